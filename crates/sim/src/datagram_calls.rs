//! Arbitrary datagrams between arbitrary calls of the program, in any order, to one datagram queue pair.
//! Shared by a property test and the fuzz target `ud_calls`.
//!
//! The input is a list of steps: a byte that says which, then the step's own bytes. What must hold:
//! - no panic, and an end;
//! - nothing that arrives changes the state of the queue pair, unless a receive names wrong memory;
//! - memory behind a region, and a region without local write, do not change;
//! - a work request that was posted completes once at most, in order, and not after a reset;
//! - what goes out is well formed, in order, and no longer than the program posted.

use std::net::Ipv4Addr;
use std::sync::Arc;

use uwarp_proto::datagram;
use uwarp_rnic::event::{AsyncEvent, AsyncSink};
use uwarp_rnic::qp::{Arrival, MAX_DATAGRAM, QpCaps, QpInit, QpModify, QpState, UdCore, UdSendWr};
use uwarp_rnic::srq::SrqInit;
use uwarp_rnic::{Access, Ah, Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, Srq, WcStatus};
use uwarp_wire::crc::crc32c;
use uwarp_wire::datagram::error::ErrorMessage;
use uwarp_wire::terminate::UntaggedBuffer;

use crate::Arena;
use crate::interleave::Bytes;

const FILL: u8 = 0x5A;
/// Regions begin at multiples of this; the second half of each slot is never registered.
const SLOT: usize = 4096;
const HALF: usize = SLOT / 2;
const SLOTS: usize = 4;
/// The last region: the program may read it only.
const READ_ONLY: usize = SLOTS - 1;
const QPN: u32 = 0x004E_2007;
const STRANGER: u32 = 0x004E_2103;
const QKEY: u32 = 0x1111_1111;
/// Steps after which the rest of the input is left alone.
const MOST: usize = 300;

struct NoMatter;

impl AsyncSink for NoMatter {
    fn async_event(&self, _: AsyncEvent) {}
}

struct Run {
    core: UdCore,
    pd: Arc<Pd>,
    stranger: Arc<Pd>,
    cqs: [Arc<Cq>; 2],
    srq: Option<Arc<Srq>>,
    memory: Arena,
    regions: Vec<Arc<Mr>>,
    next_id: u64,
    /// Work requests not completed: id, and whether a completion is certain.
    sends: Vec<(u64, bool)>,
    recvs: Vec<u64>,
    /// The number of the last message that went out.
    msn: u32,
}

/// Carries out the steps that `bytes` name.
///
/// # Panics
/// When something is not as it must be.
pub fn check(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    let mut run = Run::new(bytes.byte());
    for _ in 0..MOST {
        if bytes.is_empty() {
            break;
        }
        run.step(&mut bytes);
        run.completions();
        run.check_memory();
    }
    run.end();
}

impl Run {
    fn new(flags: u8) -> Self {
        let (pd, events): (_, Arc<dyn AsyncSink>) = (Pd::new(), Arc::new(NoMatter));
        // A small one now and then, which a program that does not poll overflows.
        let depth = if flags & 1 != 0 { 2 } else { 4096 };
        let cqs = [(); 2].map(|()| Cq::new(depth, 0, None, events.clone()));
        let srq = (flags & 2 != 0).then(|| {
            let init =
                SrqInit { pd: pd.clone(), max_wr: 8, max_sge: 3, cookie: 0, async_sink: events.clone() };
            Srq::new(init)
        });
        let init = QpInit {
            pd: pd.clone(),
            send_cq: cqs[0].clone(),
            recv_cq: cqs[1].clone(),
            srq: srq.clone(),
            caps: QpCaps {
                max_send_wr: 8,
                max_recv_wr: 8,
                max_send_sge: 3,
                max_recv_sge: 3,
                max_inline_data: 64,
            },
            sq_sig_all: flags & 4 != 0,
            cookie: 0,
            async_sink: events,
        };
        let memory = Arena::from_bytes(&vec![FILL; SLOTS * SLOT]);
        let regions = (0..SLOTS)
            .map(|slot| {
                let access = if slot == READ_ONLY { Access::empty() } else { Access::LOCAL_WRITE };
                memory.register(&pd, slot * SLOT, HALF, access)
            })
            .collect();
        let mut run = Self {
            core: UdCore::new(QPN, init).expect("a queue pair"),
            pd,
            stranger: Pd::new(),
            cqs,
            srq,
            memory,
            regions,
            next_id: 0,
            sends: Vec::new(),
            recvs: Vec::new(),
            msn: 0,
        };
        run.core.keep_errors(flags & 16 != 0);
        if flags & 8 == 0 {
            [QpState::Init, QpState::Rtr, QpState::Rts].into_iter().for_each(|state| run.become_(state));
        }
        run
    }

    fn become_(&mut self, state: QpState) {
        let qkey = (state == QpState::Init).then_some(QKEY);
        let change = QpModify { state: Some(state), qkey, ..QpModify::default() };
        if self.core.modify(&change).is_ok() && state == QpState::Reset {
            self.sends.clear();
            // Shared receives stay, all but the one that the queue pair had taken.
            if self.srq.is_none() {
                self.recvs.clear();
            }
        }
    }

    fn step(&mut self, bytes: &mut Bytes<'_>) {
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
        match bytes.byte() % 16 {
            0..=2 => {
                let len = usize::from(bytes.byte());
                let raw = bytes.take(len).to_vec();
                self.arrives(&raw);
            }
            3..=6 => {
                let datagram = well_formed(bytes);
                self.arrives(&datagram);
            }
            7 | 8 => self.post_recv(bytes),
            9..=11 => self.post_send(bytes),
            12 => self.become_([Reset, Init, Rtr, Rts, Sqd, Sqe, Err, Rts][usize::from(bytes.byte()) % 8]),
            13 => {
                let waiting = self.outgoing();
                self.core.sent(usize::from(bytes.byte()) % (waiting + 1));
            }
            14 => self.core.refused(bytes.byte() & 1 != 0),
            _ => {
                let what = bytes.byte();
                if what & 0x80 != 0 {
                    return self.complaint(what);
                }
                self.regions[usize::from(what) % SLOTS].invalidate();
            }
        }
    }

    fn arrives(&mut self, bytes: &[u8]) {
        let Ok(message) = datagram::parse(bytes) else { return self.hear(bytes) };
        let arrival = Arrival {
            from: Ipv4Addr::new(10, 0, 0, 1).into(),
            to: Ipv4Addr::new(10, 0, 0, 2).into(),
            slid: 0,
        };
        let (before, outgoing) = (self.core.query().state, self.outgoing());
        let taken = self.core.deliver(&message, &arrival);
        let after = self.core.query().state;
        // A receive with wrong memory, or a full completion queue: the program's own mistakes.
        assert!(after == before || (taken.is_ok() && after == QpState::Err), "{before:?} became {after:?}");
        assert!(after == QpState::Err || self.outgoing() == outgoing, "what arrives makes datagrams");
    }

    /// The receiver of the first message that waits says that it has dropped that one, or one near it.
    fn complaint(&mut self, what: u8) {
        let message = self.core.outgoing().next().map(|(_, bytes)| bytes.to_vec());
        let error = message.and_then(|bytes| datagram::answer(&bytes, UntaggedBuffer::NoBuffer));
        if let Some(error) = error {
            let msn = error.msn.wrapping_sub(u32::from(what & 3));
            self.hear(&ErrorMessage { msn, ..error }.to_bytes());
        }
    }

    /// An Error Message, if it is one: it changes no state, and names a work request that was posted.
    fn hear(&mut self, bytes: &[u8]) {
        let Some(error) = datagram::parse_error(bytes) else { return };
        let before = self.core.query().state;
        let _ = self.core.handle_error(&error, Ipv4Addr::LOCALHOST.into());
        assert_eq!(self.core.query().state, before);
        while let Some(error) = self.core.take_error() {
            assert!(error.wr_id < self.next_id, "{error:?}");
        }
    }

    /// How many datagrams wait for the lower layer; each is well formed and has the next number.
    fn outgoing(&mut self) -> usize {
        let mut count = 0;
        let mut last: Option<u32> = None;
        for (endpoint, bytes) in self.core.outgoing() {
            let message = datagram::parse(bytes).expect("what is sent is well formed");
            assert!(message.payload.len() <= MAX_DATAGRAM as usize);
            assert_eq!(message.head.source_qpn, QPN);
            assert_eq!(u32::from(endpoint.to.port()), message.head.destination_qpn >> 8);
            assert!(last.is_none_or(|last| message.head.msn > last), "messages are numbered in order");
            last = Some(message.head.msn);
            count += 1;
        }
        self.msn = last.unwrap_or(self.msn);
        count
    }

    fn post_recv(&mut self, bytes: &mut Bytes<'_>) {
        let sges = self.sges(bytes);
        let wr = RecvWr { wr_id: self.next_id, sges: &sges };
        self.next_id += 1;
        let posted = match &self.srq {
            Some(srq) => srq.post_recv(std::iter::once(wr)).0.is_ok(),
            None => self.core.post_recv(&wr).is_ok(),
        };
        if posted {
            self.recvs.push(wr.wr_id);
        }
    }

    fn post_send(&mut self, bytes: &mut Bytes<'_>) {
        let what = bytes.byte();
        let op = match what % 8 {
            0 => SendOp::SendImmediate { imm: [what; 4] },
            1 => SendOp::Write { stag: 1, to: 0 },
            _ => SendOp::Send { invalidate: (what % 8 == 2).then_some(1) },
        };
        let flags = SendFlags::from_bits_truncate(u32::from(bytes.byte()) & 0xF);
        let sges = self.sges(bytes);
        let wr = SendWr { wr_id: self.next_id, op, flags, sges: &sges };
        self.next_id += 1;
        let pd = if what & 0xC0 == 0xC0 { &self.stranger } else { &self.pd };
        let ah = Ah::new(pd, (Ipv4Addr::LOCALHOST, 0).into(), None);
        let remote_qkey = if what & 0x20 != 0 { 1 << 31 } else { QKEY };
        let ud = UdSendWr { wr, ah: &ah, remote_qpn: STRANGER, remote_qkey, job_key: None };
        if self.core.post_send(&ud).is_ok() {
            let certain = flags.contains(SendFlags::SIGNALED) || self.core.query().sq_sig_all;
            self.sends.push((wr.wr_id, certain));
        }
    }

    /// Up to four elements: one more than a queue pair takes. Some end behind their region, or have no
    /// region's key.
    fn sges(&self, bytes: &mut Bytes<'_>) -> Vec<Sge> {
        let count = bytes.byte() % 5;
        (0..count)
            .map(|_| {
                let (slot, at, len) = (usize::from(bytes.byte()), bytes.byte(), bytes.byte());
                let lkey = self.regions.get(slot).map_or(slot as u32, |region| region.stag());
                let addr = self.memory.addr(slot % SLOTS * SLOT + usize::from(at) * 9);
                Sge { addr, length: u32::from(len) * 9, lkey }
            })
            .collect()
    }

    fn completions(&mut self) {
        // A full queue has lost some.
        let lossy = self.cqs.iter().any(|cq| cq.overflowed());
        let (mut sends, mut recvs) = (Vec::new(), Vec::new());
        self.cqs[0].poll(64, |wc| sends.push(wc));
        self.cqs[1].poll(64, |wc| recvs.push(wc));
        for wc in sends {
            let at = self.sends.iter().position(|(id, _)| *id == wc.wr_id);
            let at = at.unwrap_or_else(|| panic!("send {} completes, and was not waiting", wc.wr_id));
            let mut before = self.sends.drain(..=at).take(at);
            assert!(lossy || before.all(|(_, certain)| !certain), "sends do not complete in order");
        }
        for wc in recvs {
            let at = self.recvs.iter().position(|id| *id == wc.wr_id);
            let at = at.unwrap_or_else(|| panic!("receive {} completes, and was not waiting", wc.wr_id));
            assert!(at == 0 || lossy || self.srq.is_some(), "receive {} before an older one", wc.wr_id);
            self.recvs.remove(at);
            assert!(wc.status != WcStatus::Success || wc.byte_len >= 40, "{wc:?}");
        }
    }

    fn check_memory(&self) {
        for slot in 0..SLOTS {
            let from = if slot == READ_ONLY { 0 } else { HALF };
            let kept = self.memory.read(slot * SLOT + from, SLOT - from);
            assert!(kept.iter().all(|byte| *byte == FILL), "slot {slot} is written where nobody may");
        }
    }

    fn end(mut self) {
        let failed = self.core.query().state == QpState::Err;
        self.become_(QpState::Err);
        self.completions();
        // With a full completion queue, some are lost for good.
        let lossy = self.cqs.iter().any(|cq| cq.overflowed());
        if !failed && self.core.query().state == QpState::Err && !lossy {
            assert!(self.sends.iter().all(|(_, certain)| !certain), "{:?} never completed", self.sends);
            assert!(self.srq.is_some() || self.recvs.is_empty(), "{:?} never completed", self.recvs);
        }
        self.become_(QpState::Reset);
        assert_eq!(self.outgoing(), 0);
    }
}

/// A datagram with good headers and a right CRC, of which the input changes some bytes before the CRC is
/// taken.
fn well_formed(bytes: &mut Bytes<'_>) -> Vec<u8> {
    let what = bytes.byte();
    let head = datagram::Head {
        source_qpn: STRANGER,
        destination_qpn: QPN,
        qkey: QKEY ^ u32::from(what >> 7),
        immediate: (what & 1 != 0).then_some([what; 4]),
        solicited: what & 2 != 0,
        msn: what.into(),
        incarnation: 7,
    };
    let mut out = head.to_bytes().to_vec();
    if what & 4 != 0 {
        let (at, value) = (usize::from(bytes.byte()), bytes.byte());
        if let Some(place) = out.get_mut(at) {
            *place = value;
        }
    }
    let len = usize::from(bytes.byte()) * if what & 8 != 0 { 17 } else { 1 };
    out.extend(std::iter::repeat_n(0xC3, len));
    let sum = crc32c(&out);
    out.extend(datagram::trailer(sum));
    out
}
