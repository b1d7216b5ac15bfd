//! Plans from bytes, for a fuzzer.

use uwarp_rnic::qp::QpCaps;

use super::{Abort, Kind, Op, Plan, StreamPlan, WindowPlan};
use crate::net::{Fault, NetParams};
use crate::{Side, Time};

/// Takes numbers from the front; zeros when there are no more.
struct Source<'a>(&'a [u8]);

impl Source<'_> {
    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((byte, rest)) => {
                self.0 = rest;
                *byte
            }
            None => 0,
        }
    }

    fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn bit(byte: u8, n: u8) -> bool {
        byte >> n & 1 == 1
    }

    fn side(byte: u8) -> Side {
        Side::BOTH[usize::from(byte & 1)]
    }

    /// `windows`: 0 for none, 1 for those of type 1, 2 for type 2, 3 for both.
    fn op(&mut self, windows: u8) -> Op {
        let (what, flags, scale) = (self.byte(), self.byte(), self.byte());
        let kind = [
            Kind::Send,
            Kind::Write,
            Kind::Read,
            Kind::SendInvalidate,
            Kind::ReadInvalidate,
            Kind::LocalInvalidate,
            Kind::SendImmediate,
            Kind::WriteImmediate,
        ][usize::from(what >> 1 & 7)];
        // Reads with an odd scale are atomic operations.
        let kind = match (kind, scale & 1, flags & 3) {
            (Kind::Read, 1, 0 | 1) => Kind::FetchAdd,
            (Kind::Read, 1, 2) => Kind::CmpSwap,
            (Kind::Read, 1, _) => Kind::CmpSwapDiffers,
            (kind, ..) => kind,
        };
        // Small ones often, up to 64 KiB.
        let len = u32::from(self.short()) >> (scale & 15);
        let cuts = (0..what >> 4 & 3).map(|_| self.short()).collect();
        let peer_cuts = (0..what >> 6 & 3).map(|_| self.short()).collect();
        let two = if windows == 3 { Self::bit(scale, 6) } else { windows == 2 };
        let window = WindowPlan { two, zero_based: Self::bit(scale, 4), again: Self::bit(scale, 5) };
        Op {
            side: Self::side(what),
            kind,
            len,
            cuts,
            peer_cuts,
            slack: u16::from(scale >> 4),
            signaled: Self::bit(flags, 0),
            fence: Self::bit(flags, 1),
            solicited: Self::bit(flags, 2),
            inline: Self::bit(flags, 3),
            window: (windows > 0).then_some(window),
            at: Time::from(flags >> 4) * 10_000,
            recv_at: if Self::bit(flags, 7) { Time::from(scale) * 5_000 } else { 0 },
        }
    }
}

impl Plan {
    /// Most work requests in a plan made from bytes.
    const MOST: usize = 10;

    /// A plan, whatever the bytes are.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let mut s = Source(bytes);
        let seed = u64::from(s.short());
        let (a, b, c, d) = (s.byte(), s.byte(), s.byte(), s.byte());
        let bit = Source::bit;
        let stream = StreamPlan {
            crc: bit(a, 0),
            uwarp: bit(a, 1),
            acks: bit(a, 2),
            markers: [bit(a, 5), bit(a, 6)],
            emss: 128 + u32::from(s.short() % 9000),
            rtr: b & 3,
            ird: [u16::from(b >> 2 & 3), u16::from(b >> 4 & 3)],
            ord: [u16::from(c & 3), u16::from(c >> 2 & 3)],
            msn_to_wrap: u32::from(c >> 4 & 3),
        };
        let net = NetParams {
            delay: (0, Time::from(d) * 100),
            piece: usize::from(s.short()) + 1,
            capacity: 1000 + usize::from(s.short()),
            stalls: u32::from(d & 31),
            stall: 1_000_000,
        };
        let trouble = s.byte();
        let at = u64::from(s.short()) << (trouble >> 4 & 3);
        let (mut faults, mut abort) = ([None, None], None);
        let fault = |fault| if bit(trouble, 3) { [Some(fault), None] } else { [None, Some(fault)] };
        let side = Source::side(trouble >> 6);
        match trouble & 7 {
            1 => faults = fault(Fault::Flip { at, bit: trouble >> 5 }),
            2 => faults = fault(Fault::Reset { at }),
            3 => faults = fault(Fault::End { at }),
            4 => abort = Some((at * 20, Abort::Disconnect(side))),
            5 => abort = Some((at * 20, Abort::Error(side))),
            6 => abort = Some((at * 20, Abort::Reset(side))),
            7 if bit(c, 7) => abort = Some((at * 20, Abort::Unbind(side, u16::from(trouble >> 3)))),
            7 => abort = Some((at * 20, Abort::Deregister(side, u16::from(trouble >> 3)))),
            _ => {}
        }
        let (e, f) = (s.byte(), s.byte());
        let caps = QpCaps {
            max_send_wr: u32::from(e & 7) + 1,
            max_recv_wr: u32::from(e >> 3 & 7) + 1,
            max_send_sge: u32::from(f & 3) + 1,
            max_recv_sge: u32::from(f >> 2 & 3) + 1,
            max_inline_data: u32::from(f >> 4) * 20,
        };
        let mut ops = Vec::new();
        while !s.0.is_empty() && ops.len() < Self::MOST {
            ops.push(s.op(b >> 6));
        }
        let (shared_recv, one_region, sq_sig_all) = (bit(c, 6), bit(e, 6), bit(e, 7));
        Self { seed, stream, net, faults, abort, caps, shared_recv, one_region, sq_sig_all, ops }
    }
}
