//! Direct placement (docs/adr/003): if no CRC is in use and only the start of a large frame was received, the
//! rest of its payload is received straight into place, without a copy of ours.
//!
//! With a CRC nothing is placed directly. The CRC would have to be computed over registered memory, which the
//! program and other streams may write meanwhile, and that must never end a connection.

use smallvec::SmallVec;
use uwarp_proto::rx::Segment;
use uwarp_wire::rdmap::Delivery;
use uwarp_wire::terminate::TerminateError;

use super::core::RcCore;
use super::errors::Fault;
use super::stream::{Direct, OffendingSegment, Pins};
use crate::mr::AccessError;
use crate::trace;
use crate::wr::WcStatus;
use uwarp_mem::{self as mem, MemSeg};

/// Where the next received bytes belong.
#[derive(Debug)]
pub enum RxPlan {
    /// Into the owner's buffer, after what [`RcCore::handle_input`] left over; at most `max` bytes in all.
    Stage {
        /// Left-over bytes included.
        max: usize,
    },
    /// Into registered memory first, the places that were added to the list, then up to `tail` bytes into the
    /// owner's buffer. The memory is in use until [`RcCore::direct_received`] is called.
    Direct {
        /// Bytes wanted after it.
        tail: usize,
    },
    /// Receive nothing now.
    Stop,
}

impl RcCore {
    /// Where the next received bytes should go. `left_over`: the bytes in the owner's buffer that are not
    /// consumed. `buffer`: the size of that buffer. `place`: an empty list.
    #[inline]
    pub fn rx_plan(&mut self, left_over: &[u8], buffer: usize, place: &mut SmallVec<[MemSeg; 4]>) -> RxPlan {
        let Some(stream) = &mut self.stream else { return RxPlan::Stop };
        if stream.closing.is_some() || stream.stalled {
            return RxPlan::Stop;
        }
        if stream.direct.is_none() {
            return RxPlan::Stage { max: stream.receiver.plan(left_over, buffer) };
        }
        self.plan_directly(buffer, place)
    }

    /// Large: kept out of the way of what is received at every poll.
    #[inline(never)]
    fn plan_directly(&mut self, buffer: usize, place: &mut SmallVec<[MemSeg; 4]>) -> RxPlan {
        let Some(mut direct) = self.stream.as_mut().and_then(|stream| stream.direct.take()) else {
            return RxPlan::Stop;
        };
        let (left, tail) = (direct.rest.payload(), direct.rest.behind());
        if left > 0 {
            // Checked again for every receive: the region may have been deregistered in between.
            let placed = direct.segment.payload_len.saturating_sub(left);
            match self.pin(&direct.segment, placed, left, &mut direct.pins) {
                Ok(found) => *place = found,
                Err(fault) => {
                    self.fault(fault, Some(OffendingSegment::new(&direct.segment).get()));
                    return RxPlan::Stop;
                }
            }
        }
        if let Some(stream) = &mut self.stream {
            stream.direct = Some(direct);
        }
        if place.is_empty() { RxPlan::Stage { max: buffer.min(tail) } } else { RxPlan::Direct { tail } }
    }

    /// `n` bytes were received into the places of the last [`RxPlan::Direct`] (zero if it failed).
    pub fn direct_received(&mut self, n: usize) {
        let Some(direct) = self.stream.as_mut().and_then(|s| s.direct.as_mut()) else { return };
        direct.rest.placed(n);
        direct.pins.clear();
    }

    /// The places of the last [`RxPlan::Direct`] are not all mapped any more: the stream ends.
    pub(super) fn place_unmapped(&mut self) {
        let Some(direct) = self.stream.as_mut().and_then(|s| s.direct.take()) else { return };
        let fault = match direct.segment.info.delivery {
            Delivery::Region => Fault::Peer(AccessError::Unmapped.for_tagged()),
            Delivery::ReadSink => Fault::Read(WcStatus::LocProtErr),
            _ => Fault::Receive(WcStatus::LocProtErr, TerminateError::DdpLocalCatastrophic),
        };
        self.fault(fault, Some(OffendingSegment::new(&direct.segment).get()));
    }

    /// Finds the memory for payload bytes `skip` to `skip + len` of a segment and begins a use of it, for
    /// [`RxPlan::Direct`].
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

    /// Tries to receive the rest of the incomplete frame at the start of `input` straight into place. Returns
    /// how many bytes of the input are consumed: all or none.
    pub(super) fn begin_direct(&mut self, input: &[u8]) -> usize {
        let Some(stream) = &mut self.stream else { return 0 };
        let Some(large) = stream.receiver.large(input) else { return 0 };
        // Errors are handled when the frame is complete.
        let Ok(segment) = stream.rx.check(large.ulpdu, large.ulpdu_len) else { return 0 };
        let may = match segment.info.delivery {
            Delivery::Region => !stream.buffered.has_atomic(),
            Delivery::ReadSink => true,
            Delivery::Receive => stream.buffered.is_empty() && self.find_receive(),
            _ => false,
        };
        if !may {
            return 0;
        }
        let payload = large.ulpdu.get(segment.header_len..).unwrap_or(&[]);
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
        trace::segment(self.shell.qpn, trace::Way::In, &segment.header, &[], segment.payload_len);
        let Some(stream) = &mut self.stream else { return 0 };
        let rest = stream.receiver.begin_rest(&large, segment.payload_len, payload.len());
        stream.direct = Some(Direct { segment, rest, pins });
        input.len()
    }

    /// The end of a frame whose payload is in place: how many bytes of `input` belong to it. `None` while
    /// some are missing.
    pub(super) fn finish_direct(&mut self, input: &[u8]) -> Option<usize> {
        let stream = self.stream.as_mut()?;
        let end = stream.direct.as_ref()?.rest.end(input)?;
        let direct = stream.direct.take()?;
        if let Err(fault) = self.finish(&direct.segment) {
            self.fault(fault, Some(OffendingSegment::new(&direct.segment).get()));
        }
        Some(end)
    }
}
