//! Direct placement (docs/adr/003): only the start of a large FPDU was received; if where it goes is beyond doubt before its CRC
//! has been seen, the rest is received straight into place and the CRC checked afterwards.
//!
//! Beyond doubt are a Send and a Read Response, whose place follows from what we expect, and a Write that continues one whose
//! earlier segments had good CRCs and said how far it goes (uwarp ends begin a large Write with two empty segments for that
//! purpose, at its end and at its start). A CRC that then turns out wrong costs the connection, and bytes inside the announced
//! message are undefined, as they are with any broken connection.
//!
//! The CRC is then of what is found in memory. Should somebody else write there meanwhile, it is wrong for that reason. Receives of a
//! shared queue are always staged: several queue pairs place at the same time, and programs post the same memory many times.

use smallvec::SmallVec;
use uwarp_proto::rx::Segment;
use uwarp_wire::crc::{self, Crc32c};
use uwarp_wire::ddp::Header;
use uwarp_wire::mpa;
use uwarp_wire::rdmap::Opcode;
use uwarp_wire::terminate::{Mpa, TerminateError};

use super::receive::{Fault, Struck};
use super::transmit::DIRECT;
use super::{Pins, QpCore};
use crate::mem::{self, MemSeg};
use crate::mr::AccessError;
use crate::trace;
use crate::wr::WcStatus;

/// Bytes to receive behind a directly placed payload: pad and CRC of this FPDU, two empty announcing segments, and the
/// header of the next large one.
const TAIL: usize = 64;
/// The end of a message is placed only when its CRC was good: programs wait for the last byte to change, and may change it back while
/// the CRC is still being taken of what lies in memory.
const LATE: usize = 256;
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
    /// Bytes at the end of the payload that are staged, and placed after the check.
    late: usize,
    /// Where CRCs are in use.
    crc: Option<Crc32c>,
    pins: Pins,
}

impl Direct {
    /// Bytes that are still to be received into place.
    fn left(&self) -> usize {
        self.segment.payload_len.saturating_sub(self.late + self.placed)
    }
}

/// What earlier segments of a Write, whose CRCs were good, say of those to come.
#[derive(Debug, Clone, Copy)]
pub(super) struct WriteInProgress {
    stag: u32,
    /// Offset at which the next segment is expected.
    to: u64,
    /// The furthest that any of them has named.
    end: u64,
}

impl WriteInProgress {
    /// A segment that is not the last one ends at `to`.
    pub fn new(before: Option<Self>, stag: u32, to: u64) -> Self {
        let end = before.filter(|b| b.stag == stag && (to.wrapping_sub(b.end)).cast_signed() <= 0);
        Self { stag, to, end: end.map_or(to, |before| before.end) }
    }

    /// Whether a segment with this header is the end of the message, whatever its L bit says.
    fn ends_with(&self, to: u64, len: usize) -> bool {
        to.wrapping_add(len as u64) == self.end
    }

    /// Whether a segment with this header is where it has to be, and ends within the message.
    fn goes_on_with(&self, stag: u32, to: u64, len: usize) -> bool {
        (self.stag, self.to) == (stag, to) && len as u64 <= self.end.wrapping_sub(to)
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
            if stream.exact_reads > 0 {
                stream.exact_reads -= 1;
                let need = match left_over.first_chunk::<2>() {
                    Some(len) => mpa::fpdu_len(usize::from(u16::from_be_bytes(*len))),
                    None => 0,
                };
                return RxPlan::Stage { max: (need + TAIL).clamp(left_over.len() + TAIL, buffer) };
            }
            return RxPlan::Stage { max: buffer };
        };
        let left = direct.left();
        let trailer = mpa::pad_len(direct.ulpdu_len) + mpa::CRC_LEN;
        let tail = direct.late + trailer + TAIL - mpa::CRC_LEN;
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
    pub fn direct_received(&mut self, place: &[MemSeg], n: usize) {
        let Some(direct) = self.stream.as_mut().and_then(|s| s.direct.as_mut()) else { return };
        if let Some(crc) = &mut direct.crc {
            let mut left = n;
            for seg in place {
                let got = seg.part(0, left);
                if mem::crc_over(got, crc).is_err() {
                    return self.place_unmapped();
                }
                left -= got.len;
            }
        }
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
        if !stream.params.peer_is_uwarp || stream.params.strict {
            return 0;
        }
        let Some((len, ulpdu)) = input.split_first_chunk::<2>() else { return 0 };
        let ulpdu_len = usize::from(u16::from_be_bytes(*len));
        if ulpdu_len < DIRECT as usize || ulpdu.len() < Header::MAX_LEN || ulpdu.len() >= ulpdu_len {
            return 0;
        }
        // Whatever is wrong with it is dealt with when it is whole and its CRC was seen.
        let Ok(segment) = stream.rx.check(ulpdu, ulpdu_len) else { return 0 };
        let (write_continues, nothing_aside) = (stream.write_continues, stream.aside.is_empty());
        let certain = match (segment.opcode, segment.header) {
            (Opcode::Write, Header::Tagged(h)) => {
                write_continues.is_some_and(|write| write.goes_on_with(h.stag, h.to, segment.payload_len))
            }
            (Opcode::ReadResponse, _) => true,
            (
                Opcode::Send | Opcode::SendSe | Opcode::SendInvalidate | Opcode::SendSeInvalidate,
                Header::Untagged(_),
            ) => nothing_aside && self.shared.is_none() && self.rq.front().is_some(),
            _ => false,
        };
        if !certain {
            return 0;
        }
        let crc = stream.framer.checks_crc().then(|| {
            let mut crc = Crc32c::new();
            crc.update(input);
            crc
        });
        let ends = match (write_continues, segment.header) {
            (Some(write), Header::Tagged(h)) => write.ends_with(h.to, segment.payload_len),
            _ => false,
        };
        let late = if crc.is_some() && (segment.last() || ends) { LATE.min(segment.payload_len) } else { 0 };
        let payload = ulpdu.get(segment.header_len..).unwrap_or(&[]);
        if payload.len() > segment.payload_len - late {
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
        stream.direct = Some(Direct { segment, ulpdu_len, placed: payload.len(), late, crc, pins });
        stream.exact_reads = EXACT_READS;
        input.len()
    }

    /// The end of a directly placed FPDU: late payload, pad and CRC. `None` while they are not there.
    pub(super) fn finish_direct(&mut self, input: &[u8]) -> Option<usize> {
        let stream = self.stream.as_mut()?;
        let direct = stream.direct.as_ref()?;
        let pad = mpa::pad_len(direct.ulpdu_len);
        let rest = input.get(..direct.late + pad + mpa::CRC_LEN)?;
        if direct.left() > 0 {
            return None;
        }
        let Direct { segment, late, crc, .. } = stream.direct.take()?;
        let struck = Struck::new(&segment);
        let (covered, sum) = rest.split_at(late + pad);
        if let Some(mut crc) = crc {
            crc.update(covered);
            if crc::to_wire(crc.finish()) != sum {
                self.fail(TerminateError::Mpa(Mpa::Crc), None);
                return Some(rest.len());
            }
        }
        let late = covered.get(..late).unwrap_or(&[]);
        let placed = self.place(&segment, segment.payload_len - late.len(), late);
        if let Err(fault) = placed.and_then(|()| self.finish(&segment)) {
            self.fault(fault, Some(struck.get()));
        }
        Some(rest.len())
    }
}
