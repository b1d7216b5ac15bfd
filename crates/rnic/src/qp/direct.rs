//! Direct placement (docs/adr/003): where no CRC is in use and only the start of a large FPDU was received, the rest of its payload
//! is received straight into place, without a copy of ours.
//!
//! With a CRC nothing is placed directly. It would have to be taken of what lies in memory, which the program and other streams may
//! write meanwhile, and memory in use must never cost a connection.

use smallvec::SmallVec;
use uwarp_proto::rx::Segment;
use uwarp_wire::ddp::Header;
use uwarp_wire::mpa;
use uwarp_wire::rdmap::Opcode;
use uwarp_wire::terminate::TerminateError;

use super::receive::{Fault, Struck};
use super::{Pins, QpCore};
use crate::mem::{self, MemSeg};
use crate::mr::AccessError;
use crate::trace;
use crate::wr::WcStatus;

/// An FPDU from this size on is worth a receiving call of its own.
const DIRECT: usize = 16 * 1024;
/// Bytes to receive behind a large FPDU, or behind its payload: pad and CRC field, and the header of the next one.
const TAIL: usize = 64;
/// After a direct placement this many receives are sized to end at the next header, to stay direct.
const EXACT_READS: u8 = 8;

/// Where the next received bytes belong.
#[derive(Debug)]
pub enum RxPlan {
    /// Into the owner's buffer, behind what [`QpCore::handle_input`] left over; at most `max` bytes in all.
    Stage {
        /// Left-over bytes included.
        max: usize,
    },
    /// Into registered memory first (`place`), then up to `tail` bytes into the owner's buffer. Report with
    /// [`QpCore::direct_received`].
    Direct {
        /// Where to; in use until reported.
        place: SmallVec<[MemSeg; 4]>,
        /// Bytes wanted behind.
        tail: usize,
    },
    /// Nothing is to be received now.
    Stop,
}

/// A large FPDU that is being received straight into place.
#[derive(Debug)]
pub(super) struct Direct {
    segment: Segment,
    ulpdu_len: usize,
    placed: usize,
    pins: Pins,
}

impl Direct {
    fn left(&self) -> usize {
        self.segment.payload_len - self.placed
    }

    /// Bytes of the FPDU behind its payload.
    fn trailer(&self) -> usize {
        mpa::pad_len(self.ulpdu_len) + mpa::CRC_LEN
    }
}

impl QpCore {
    /// Where the next received bytes should go. `left_over` bytes are in the owner's buffer already, unconsumed.
    /// `buffer` is the size of that buffer.
    pub fn rx_plan(&mut self, left_over: &[u8], buffer: usize) -> RxPlan {
        let Some(stream) = &mut self.stream else { return RxPlan::Stop };
        if stream.closing.is_some() {
            // What comes now is only to be drained.
            return RxPlan::Stage { max: buffer };
        }
        if stream.stalled {
            return RxPlan::Stop;
        }
        let Some(mut direct) = stream.direct.take() else {
            let need = match left_over.first_chunk::<2>() {
                Some(len) if !stream.framer.has_markers() => {
                    mpa::fpdu_len(usize::from(u16::from_be_bytes(*len)))
                }
                _ => 0,
            };
            let max = if stream.exact_reads > 0 {
                stream.exact_reads -= 1;
                need + TAIL
            } else if need >= DIRECT {
                // As many as fit, should the next ones be of the same size, so that little is left over and moved.
                need * (buffer.saturating_sub(TAIL) / need).max(1) + TAIL
            } else {
                buffer
            };
            return RxPlan::Stage { max: max.max(left_over.len() + TAIL).min(buffer) };
        };
        let (left, tail) = (direct.left(), direct.trailer() + TAIL);
        let mut place = SmallVec::new();
        if left > 0 {
            // Checked anew for every receive: the region may have been taken back in between.
            match self.pin(&direct.segment, direct.placed, left, &mut direct.pins) {
                Ok(found) => place = found,
                Err(fault) => {
                    self.fault(fault, Some(Struck::new(&direct.segment).get()));
                    return RxPlan::Stop;
                }
            }
        }
        if let Some(stream) = &mut self.stream {
            stream.direct = Some(direct);
        }
        if place.is_empty() {
            RxPlan::Stage { max: buffer.min(tail) }
        } else {
            RxPlan::Direct { place, tail }
        }
    }

    /// `n` bytes were received into the places of the last [`RxPlan::Direct`] (zero if it failed).
    pub fn direct_received(&mut self, n: usize) {
        let Some(direct) = self.stream.as_mut().and_then(|s| s.direct.as_mut()) else { return };
        direct.placed += n;
        direct.pins.clear();
    }

    /// The places of the last [`RxPlan::Direct`] are not all mapped any more: the stream ends.
    pub fn place_unmapped(&mut self) {
        let Some(direct) = self.stream.as_mut().and_then(|s| s.direct.take()) else { return };
        let fault = match direct.segment.opcode {
            Opcode::Write => Fault::Peer(AccessError::Unmapped.for_tagged()),
            Opcode::ReadResponse => Fault::Read(WcStatus::LocProtErr),
            _ => Fault::Receive(WcStatus::LocProtErr, TerminateError::DdpLocalCatastrophic),
        };
        self.fault(fault, Some(Struck::new(&direct.segment).get()));
    }

    /// Finds the memory for payload bytes `skip` to `skip + len` of a segment and begins its use, for [`RxPlan::Direct`].
    fn pin(
        &mut self,
        segment: &Segment,
        skip: usize,
        len: usize,
        pins: &mut Pins,
    ) -> Result<SmallVec<[MemSeg; 4]>, Fault> {
        let mut place = SmallVec::new();
        self.locate(segment, skip, len, |cache, part, pd, need| {
            let (seg, pin) = cache.enter(part, pd, need)?;
            place.push(seg);
            pins.push(pin);
            Ok(())
        })?;
        Ok(place)
    }

    /// Tries to receive the rest of the incomplete FPDU at the start of `input` straight into place. Returns how many bytes
    /// of the input are done with: all of them or none.
    pub(super) fn begin_direct(&mut self, input: &[u8]) -> usize {
        let Some(stream) = &mut self.stream else { return 0 };
        if stream.framer.checks_crc() {
            return 0;
        }
        let Some((len, ulpdu)) = input.split_first_chunk::<2>() else { return 0 };
        let ulpdu_len = usize::from(u16::from_be_bytes(*len));
        if ulpdu_len < DIRECT || ulpdu.len() < Header::MAX_LEN || ulpdu.len() >= ulpdu_len {
            return 0;
        }
        // Whatever is wrong with it is dealt with when it is whole.
        let Ok(segment) = stream.rx.check(ulpdu, ulpdu_len) else { return 0 };
        let may = match segment.opcode {
            Opcode::Write | Opcode::ReadResponse => true,
            Opcode::Send | Opcode::SendSe | Opcode::SendInvalidate | Opcode::SendSeInvalidate => {
                stream.aside.is_empty() && self.find_receive()
            }
            _ => false,
        };
        if !may {
            return 0;
        }
        let payload = ulpdu.get(segment.header_len..).unwrap_or(&[]);
        if payload.len() > segment.payload_len {
            return 0;
        }
        let mut pins = Pins::new();
        // All of it must fit before the first byte is placed.
        let Ok(place) = self.pin(&segment, 0, segment.payload_len, &mut pins) else { return 0 };
        let mut rest = payload;
        for seg in place {
            let Ok(n) = mem::copy_in(seg, rest) else { return 0 };
            rest = rest.get(n..).unwrap_or(&[]);
        }
        pins.clear();
        trace::segment(self.qpn, trace::Way::In, &segment.header, &[], segment.payload_len);
        let Some(stream) = &mut self.stream else { return 0 };
        stream.direct = Some(Direct { segment, ulpdu_len, placed: payload.len(), pins });
        stream.exact_reads = EXACT_READS;
        input.len()
    }

    /// The end of a directly placed FPDU: pad and CRC field. `None` while they are not there.
    pub(super) fn finish_direct(&mut self, input: &[u8]) -> Option<usize> {
        let stream = self.stream.as_mut()?;
        let trailer = stream.direct.as_ref().filter(|direct| direct.left() == 0)?.trailer();
        if input.len() < trailer {
            return None;
        }
        let direct = stream.direct.take()?;
        if let Err(fault) = self.finish(&direct.segment) {
            self.fault(fault, Some(Struck::new(&direct.segment).get()));
        }
        Some(trailer)
    }
}
