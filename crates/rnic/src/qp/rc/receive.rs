//! The way in: received bytes are framed, checked, placed and completed.
//!
//! There are two ways of placing. *Staged*: the whole frame lies in the owner's buffer, its CRC is checked,
//! then the payload is copied into place. *Direct*: without a CRC, the payload of a large frame is received
//! straight into place (`direct`).

use uwarp_proto::framing::Step;
use uwarp_proto::rx::Segment;
use uwarp_proto::setup::PeerData;
use uwarp_wire::ddp::{Header, QN_ATOMIC_RESPONSE, QN_READ_REQUEST, QN_SEND, Untagged};
use uwarp_wire::rdmap::{
    Ack, Control, Delivery, Immediate, Opcode, ReadRequest, UWARP_AWAITS_ANSWER, UWARP_LAST_ACK,
    UWARP_RNR_RETRY,
};
use uwarp_wire::terminate::{
    RemoteOperation, RemoteProtection, TaggedBuffer, Terminate, TerminateError, UntaggedBuffer,
};

use super::core::RcCore;
use super::errors::{Blame, Fault};
use super::reads::{MOST_COPIED, ReadSource, Request};
use super::stream::{DisconnectReply, Established, OffendingSegment, Stream};
use super::timers::Now;
use crate::event::EventKind;
use crate::mr::{self, Access, AccessError, MrCache, Part};
use crate::qp::rnr::{NO_RNR_LIMIT, rnr_limit};
use crate::qp::state::QpState;
use crate::queues::{Phase, slice_sges};
use crate::trace;
use crate::wr::{SendOp, Wc, WcFlags, WcOpcode, WcStatus};
use uwarp_mem as mem;

enum Placed {
    Done,
    /// A Send for which no receive is posted.
    NoReceive,
}

impl Stream {
    /// The introduction of a uwarp initiator, which is in the header of its ready-to-receive Write.
    fn introduced(&mut self, segment: &Segment) -> Option<PeerData> {
        let (Delivery::Region, Header::Tagged(header), 0) =
            (segment.info.delivery, segment.header, segment.payload_len)
        else {
            return None;
        };
        let peer = PeerData::from_rtr(header.stag, header.to);
        match peer {
            Some(peer) => {
                self.params.placement_acks |= peer.placement_acks;
                self.last_acks = peer.last_ack;
            }
            // The peer is a stranger whose request had our reserved bit by mistake.
            None => {
                self.params.peer_is_uwarp = false;
                self.params.placement_acks = false;
                self.mulpdu = self.params.mulpdu();
                self.rx.no_uwarp_peer();
            }
        }
        peer
    }

    /// Bytes of the Write that the peer has sent right before this Immediate; zero if it sent none, or not
    /// all of it.
    pub(super) fn written_before(&self) -> u32 {
        if self.write_continues { 0 } else { self.written }
    }

    /// A Send or an Immediate was received: a later Immediate does not belong to a Write before it.
    #[inline]
    pub(super) fn note_receive(&mut self, segment: &Segment) {
        if matches!(segment.header, Header::Untagged(h) if h.qn == QN_SEND) {
            self.written = 0;
        }
    }

    /// A segment of a Write was received: an Immediate behind it says how long that is.
    #[inline]
    fn note_write(&mut self, segment: &Segment) {
        if segment.info.delivery == Delivery::Region {
            let len = u32::try_from(segment.payload_len).unwrap_or(u32::MAX);
            let before = if self.write_continues { self.written } else { 0 };
            self.written = before.saturating_add(len);
            self.write_continues = !segment.last();
        }
    }

    /// Reads and atomic operations of the peer that are outstanding (RFC 5040 section 6.1): those that wait,
    /// and those whose Response the lower layer has not taken completely, so that the peer cannot have it.
    pub(super) fn reads_to_serve(&mut self) -> usize {
        let taken = self.out.taken();
        while self.responses.front().is_some_and(|end| *end <= taken) {
            self.responses.pop_front();
        }
        self.requests.len() + self.responses.len() + usize::from(self.tx.responding())
    }

    /// The peer has sent a valid frame. After the first one, a responder may send too.
    pub(super) fn note_frame(&mut self) {
        if self.opening.hear() && self.established == Established::NotYet {
            self.established = Established::Unreported;
        }
    }
}

/// RFC 7306 section 6.3: exactly 8 bytes. It names no code for another length; these are the codes for a Read
/// Request of the wrong length.
fn check_immediate(segment: &Segment) -> Result<(), TerminateError> {
    match segment.payload_len {
        Immediate::LEN if segment.last() => Ok(()),
        ..=Immediate::LEN => Err(TerminateError::RemoteOperation(RemoteOperation::Unspecified)),
        _ => Err(TerminateError::UntaggedBuffer(UntaggedBuffer::TooLong)),
    }
}

impl RcCore {
    /// Handles received bytes; returns how many were consumed. The rest must be at the beginning of the next
    /// call's input.
    pub fn handle_input(&mut self, now: &Now, input: &[u8]) -> usize {
        self.handle_input_counted(now, input, |_| ())
    }

    /// The same. Before each message behind the first, `count` hears how many are placed.
    #[inline]
    pub fn handle_input_counted(&mut self, now: &Now, input: &[u8], count: impl FnMut(u64)) -> usize {
        let used = self.frames(now, input, count);
        self.end_uses();
        used
    }

    /// Nothing of registered memory is in use any more, except by what is queued or received directly.
    #[inline]
    pub(super) fn end_uses(&mut self) {
        self.remote.end_use();
        self.shell.local.end_use();
    }

    fn frames(&mut self, now: &Now, input: &[u8], mut count: impl FnMut(u64)) -> usize {
        let mut used = 0;
        let mut scratch = Vec::new();
        while let Some(stream) = &mut self.stream {
            if stream.closing.is_some() {
                return input.len();
            }
            let rest = input.get(used..).unwrap_or(&[]);
            if stream.direct.is_some() {
                match self.finish_direct(rest) {
                    Some(n) => used += n,
                    None => break,
                }
                continue;
            }
            if rest.is_empty() {
                break;
            }
            if used > 0 {
                count(stream.placed);
            }
            match stream.receiver.next(rest, &mut scratch) {
                Err(e) => {
                    self.fail(e, None);
                    used = input.len();
                    break;
                }
                Ok(Step::Incomplete { .. }) => {
                    used += self.begin_direct(rest);
                    break;
                }
                Ok(Step::Ulpdu { ulpdu, consumed }) => match self.segment(ulpdu) {
                    Placed::Done => used += consumed,
                    Placed::NoReceive => {
                        if let Some(stream) = &mut self.stream {
                            stream.receiver.rewind(consumed);
                        }
                        break;
                    }
                },
            }
        }
        self.wait_if_nothing_else_comes();
        self.check_overflow();
        self.set_deadlines(now);
        used
    }

    /// Handles one whole ULPDU.
    fn segment(&mut self, ulpdu: &[u8]) -> Placed {
        let Some(stream) = &mut self.stream else { return Placed::Done };
        let offending = Some((ulpdu, u16::try_from(ulpdu.len()).unwrap_or(u16::MAX)));
        let segment = match stream.rx.check(ulpdu, ulpdu.len()) {
            Ok(segment) => segment,
            Err(e) => {
                self.fail(e, offending);
                return Placed::Done;
            }
        };
        let payload = ulpdu.get(segment.header_len..).unwrap_or(&[]);
        trace::segment(self.shell.qpn, trace::Way::In, &segment.header, payload, segment.payload_len);
        let done = match segment.info.delivery {
            // It may read what an earlier Send brings, and that Send is not delivered yet (RFC 5040 section
            // 5.5).
            Delivery::ReadRequest | Delivery::AtomicRequest if !stream.buffered.is_empty() => {
                return self.hold_back(&segment, ulpdu);
            }
            // Atomic operations and Writes take effect in their order.
            Delivery::Region if stream.buffered.has_atomic() => return self.hold_back(&segment, ulpdu),
            Delivery::ReadRequest => self.read_request(&segment, payload).map_err(Fault::Peer),
            Delivery::AtomicRequest => self.atomic_request(&segment, payload).map_err(Fault::Peer),
            Delivery::AtomicResponse => self.atomic_response(&segment, payload),
            Delivery::Terminate => {
                self.terminated(payload);
                return Placed::Done;
            }
            Delivery::Acknowledge => self.acknowledged(&segment, payload).map_err(Fault::Peer),
            Delivery::Region | Delivery::ReadSink => self.place(&segment, 0, payload),
            // Messages that take a receive; the check has rejected everything else.
            delivery => {
                let immediate = delivery == Delivery::Immediate;
                if immediate && let Err(e) = check_immediate(&segment) {
                    self.fail(e, offending);
                    return Placed::Done;
                }
                // After a buffered Send, it has to wait even if there is a receive.
                if !stream.buffered.is_empty() || !self.find_receive() {
                    let was_buffered = self.buffer_segment(&segment, ulpdu);
                    if let Some(stream) = &mut self.stream {
                        self.shell.counters.receive_stalls += 1;
                        if was_buffered {
                            stream.note_frame();
                            return Placed::Done;
                        }
                        stream.stalled = true;
                        stream.waiting = Some(OffendingSegment::new(&segment));
                        // A program may post its first receives when the connection is reported to be up.
                        stream.note_frame();
                    }
                    return Placed::NoReceive;
                }
                if immediate {
                    let written = self.stream.as_ref().map_or(0, Stream::written_before);
                    self.immediate(&segment, payload, written)
                } else {
                    self.place(&segment, 0, payload)
                }
            }
        };
        match done.and_then(|()| self.finish(&segment)) {
            Ok(()) => {}
            Err(fault) => self.fault(fault, offending),
        }
        Placed::Done
    }

    /// A segment behind a Send that waits for its receive must wait, too: it is buffered, or nothing more is
    /// received.
    fn hold_back(&mut self, segment: &Segment, ulpdu: &[u8]) -> Placed {
        let buffered = self.buffer_segment(segment, ulpdu);
        if let Some(stream) = &mut self.stream {
            if buffered {
                stream.note_write(segment);
                return Placed::Done;
            }
            stream.stalled = true;
        }
        Placed::NoReceive
    }

    /// Handles a segment that was checked and counted before. `written`: the value of
    /// [`Stream::written_before`] when it arrived.
    pub(super) fn place_checked(&mut self, segment: &Segment, ulpdu: &[u8], written: u32) {
        let payload = ulpdu.get(segment.header_len..).unwrap_or(&[]);
        let done = match segment.info.delivery {
            Delivery::ReadRequest => self.read_request(segment, payload).map_err(Fault::Peer),
            Delivery::AtomicRequest => self.atomic_request(segment, payload).map_err(Fault::Peer),
            Delivery::Immediate => self.immediate(segment, payload, written),
            _ => self.place(segment, 0, payload).and_then(|()| self.deliver(segment, false)),
        };
        self.end_uses();
        if let Err(fault) = done {
            self.fault(fault, Some((ulpdu, u16::try_from(ulpdu.len()).unwrap_or(u16::MAX))));
        }
    }

    /// Copies staged payload, which begins `skip` bytes after the start of the segment's payload, to its
    /// place.
    pub(super) fn place(&mut self, segment: &Segment, skip: usize, payload: &[u8]) -> Result<(), Fault> {
        let mut rest = payload;
        self.locate(segment, skip, payload.len(), |cache, part, pd, need| {
            let n = cache.with_more(part, pd, need, |seg| mem::copy_in(seg, rest))??;
            rest = rest.get(n..).unwrap_or(&[]);
            Ok(())
        })
    }

    /// Finds the memory for payload bytes `skip` to `skip + len` of a segment. `visit` gets its parts in
    /// order, with the domain and the right that their regions must have.
    #[inline]
    pub(super) fn locate(
        &mut self,
        segment: &Segment,
        skip: usize,
        len: usize,
        mut visit: impl FnMut(&mut MrCache, Part, u32, Access) -> Result<(), AccessError>,
    ) -> Result<(), Fault> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        let pd = self.shell.pd.id();
        let need = Access::needed(segment.info.right);
        match (segment.info.delivery, segment.header) {
            (Delivery::Region, Header::Tagged(h)) => {
                if len == 0 {
                    return Ok(());
                }
                if !self.shell.attr.access.contains(need) {
                    return Err(Fault::Peer(TerminateError::RemoteProtection(
                        RemoteProtection::AccessRights,
                    )));
                }
                let to = h.to.wrapping_add(skip as u64);
                let part = Part { stag: h.stag, to, len };
                visit(&mut self.remote, part, pd, need).map_err(|e| Fault::Peer(e.for_tagged()))
            }
            (Delivery::ReadSink, Header::Tagged(h)) => {
                // STag and offset of an empty segment mean nothing and must not be checked (RFC 5041 section
                // 5.2).
                let empty = segment.payload_len == 0;
                let Some(sink) = stream.reads.front().filter(|sink| !sink.atomic) else {
                    return Err(if empty {
                        TerminateError::RemoteOperation(RemoteOperation::UnexpectedOpcode).into()
                    } else {
                        TerminateError::TaggedBuffer(TaggedBuffer::InvalidStag).into()
                    });
                };
                if sink.stag != h.stag && !empty {
                    return Err(TerminateError::TaggedBuffer(TaggedBuffer::InvalidStag).into());
                }
                // A sink's offsets count from zero. Responses come in order; anything else would be placed
                // over earlier bytes or beyond the request. There is no code of its own for a Response that
                // ends too soon.
                let whole = u32::try_from(segment.payload_len).ok();
                let end = whole.and_then(|n| sink.received.checked_add(n)).filter(|end| *end <= sink.total);
                let fits = end.is_some_and(|end| !segment.last() || end == sink.total);
                if !fits || (h.to != u64::from(sink.received) && !empty) {
                    return Err(TerminateError::TaggedBuffer(TaggedBuffer::BaseOrBounds).into());
                }
                let Some(slot) = sink.slot.and_then(|n| self.shell.sq.slot(n)) else { return Ok(()) };
                let offset = sink.received.saturating_add(u32::try_from(skip).unwrap_or(u32::MAX));
                let len = u32::try_from(len).unwrap_or(u32::MAX);
                slice_sges(self.shell.sq.sges(slot), offset, len)
                    .try_for_each(|part| visit(&mut self.shell.local, part, pd, need))
                    .map_err(|_| Fault::Read(WcStatus::LocProtErr))
            }
            (_, Header::Untagged(h)) => {
                let Some(recv) = self.shell.rq.front() else {
                    return Err(TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer).into());
                };
                let end = u64::from(h.mo) + segment.payload_len as u64;
                if end > u64::from(recv.total) {
                    let e = TerminateError::UntaggedBuffer(UntaggedBuffer::TooLong);
                    return Err(Fault::Receive(WcStatus::LocLenErr, e));
                }
                let offset = h.mo.saturating_add(u32::try_from(skip).unwrap_or(u32::MAX));
                let len = u32::try_from(len).unwrap_or(u32::MAX);
                let pd = self.shell.srq.as_ref().map_or(pd, |srq| srq.pd().id());
                slice_sges(self.shell.rq.front_sges(), offset, len)
                    .try_for_each(|part| visit(&mut self.shell.local, part, pd, need))
                    .map_err(|_| Fault::Receive(WcStatus::LocProtErr, TerminateError::DdpLocalCatastrophic))
            }
            _ => Err(TerminateError::RemoteOperation(RemoteOperation::UnexpectedOpcode).into()),
        }
    }

    /// A segment is placed; its CRC, if there is one, was correct.
    pub(super) fn finish(&mut self, segment: &Segment) -> Result<(), Fault> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        stream.rx.commit(segment);
        stream.note_receive(segment);
        stream.note_write(segment);
        // A ready-to-receive Write is no message of the program.
        let rtr = stream.opening.is_indication(segment.payload_len);
        let peer = if rtr && stream.params.peer_is_uwarp { stream.introduced(segment) } else { None };
        stream.note_frame();
        // An acknowledgement is none of a program either: it may only say that the stream ends.
        let of_program =
            !rtr && segment.info.delivery != Delivery::Acknowledge && !stream.is_indication(segment);
        if of_program && self.shell.attr.state == QpState::Rtr && !stream.comm_est {
            stream.comm_est = true;
            self.shell.event(EventKind::CommEst);
        }
        if peer.is_some() {
            self.set_peer_attributes(peer);
        }
        self.deliver(segment, rtr)
    }

    /// Handles the effects of a placed segment, mostly completions. `rtr`: it is the ready-to-receive Write.
    fn deliver(&mut self, segment: &Segment, rtr: bool) -> Result<(), Fault> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        match (segment.info.delivery, segment.header) {
            (Delivery::Region, _) => {
                let counts = &mut self.shell.counters.received.write;
                counts.bytes += segment.payload_len as u64;
                counts.messages += u64::from(segment.last() && !rtr);
                if segment.last() {
                    let behind = stream.buffered.placed_behind();
                    stream.count_placed(u64::from(!behind), segment.requests_ack());
                }
            }
            (Delivery::ReadSink, _) => {
                if let Some(sink) = stream.reads.front_mut() {
                    sink.received =
                        sink.received.saturating_add(u32::try_from(segment.payload_len).unwrap_or(0));
                }
                if segment.last()
                    && let Some(sink) = stream.reads.pop_front()
                {
                    stream.read_answered(&sink);
                    match sink.slot {
                        Some(number) => self.read_done(number),
                        None => self.retire(),
                    }
                }
            }
            (Delivery::Receive, Header::Untagged(h)) if h.last => {
                let uwarp = stream.params.peer_is_uwarp;
                let byte_len = h.mo.saturating_add(u32::try_from(segment.payload_len).unwrap_or(0));
                self.shell.counters.received.send.count(byte_len);
                if segment.info.invalidates {
                    // The same code for every reason (RFC 5040 section 5.3), so that a peer learns nothing
                    // from guessing.
                    mr::invalidate_remotely(h.rsvdulp32, &self.shell.pd, self.shell.qpn).map_err(|_| {
                        TerminateError::RemoteProtection(RemoteProtection::StagCannotBeInvalidated)
                    })?;
                }
                stream.count_placed(1, segment.requests_ack());
                if let Some(recv) = self.shell.rq.pop() {
                    let mut wc = Wc::new(recv.wr_id, WcStatus::Success, WcOpcode::Recv, self.shell.qpn);
                    wc.byte_len = byte_len;
                    if segment.info.invalidates {
                        wc.flags = WcFlags::WITH_INV;
                        wc.imm_or_inv = h.rsvdulp32;
                    } else if let Some(imm) = segment.send_immediate().filter(|_| uwarp) {
                        wc.flags = WcFlags::WITH_IMM;
                        wc.imm_or_inv = u32::from_ne_bytes(imm);
                    }
                    self.shell.complete_recv(wc, segment.info.solicited);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Immediate Data: takes a receive and uses none of its memory.
    fn immediate(&mut self, segment: &Segment, payload: &[u8], written: u32) -> Result<(), Fault> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        let Ok(immediate) = Immediate::parse(payload) else {
            return Err(TerminateError::RemoteOperation(RemoteOperation::Unspecified).into());
        };
        let Some(recv) = self.shell.rq.pop() else {
            return Err(TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer).into());
        };
        stream.count_placed(1, segment.requests_ack());
        let mut wc = Wc::new(recv.wr_id, WcStatus::Success, WcOpcode::RecvRdmaWithImm, self.shell.qpn);
        wc.byte_len = written;
        wc.flags = WcFlags::WITH_IMM;
        wc.imm_or_inv = u32::from_ne_bytes(immediate.to_verbs());
        self.shell.complete_recv(wc, segment.info.solicited);
        Ok(())
    }

    pub(super) fn read_done(&mut self, number: u64) {
        if let Some(slot) = self.shell.sq.slot_mut(number) {
            slot.phase = Phase::Done;
            if let SendOp::Read { invalidate_local: true, .. } = slot.op {
                let key =
                    self.shell.sq.slot(number).and_then(|s| self.shell.sq.sges(s).next()).map(|sge| sge.lkey);
                if let Some(key) = key {
                    // Invalidating waits for those who use the region.
                    self.end_uses();
                    // The key was valid when the Read began; if it is already invalid, that is the wanted
                    // result.
                    let _ = mr::invalidate(key, self.shell.pd.id(), self.shell.qpn);
                }
            }
        }
        self.retire();
    }

    fn read_request(&mut self, segment: &Segment, payload: &[u8]) -> Result<(), TerminateError> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        if payload.len() > ReadRequest::LEN {
            return Err(TerminateError::UntaggedBuffer(UntaggedBuffer::TooLong));
        }
        // No code fits a request that is too short or in several segments: its 28 bytes are less than any
        // limit of a segment (RFC 5044 section 4.1).
        let (true, Header::Untagged(header), Ok(request)) =
            (segment.last(), segment.header, ReadRequest::parse(payload))
        else {
            return Err(TerminateError::RemoteOperation(RemoteOperation::Unspecified));
        };
        // One Read of no bytes is allowed whatever was negotiated: it is a ready-to-receive frame or a
        // placement Read. It still takes a place while others wait.
        let depth = stream.params.ird.max(u16::from(request.size == 0));
        if stream.reads_to_serve() >= usize::from(depth) {
            return Err(TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer));
        }
        if request.size > 0 {
            let need = Access::needed(segment.info.right);
            if !self.shell.attr.access.contains(need) {
                return Err(TerminateError::RemoteProtection(RemoteProtection::AccessRights));
            }
            if request.source_to.checked_add(u64::from(request.size)).is_none()
                || request.sink_to.checked_add(u64::from(request.size)).is_none()
            {
                return Err(TerminateError::RemoteProtection(RemoteProtection::ToWrap));
            }
            let part = Part { stag: request.source_stag, to: request.source_to, len: request.size as usize };
            self.remote
                .with(part, self.shell.pd.id(), need, |_| ())
                .map_err(AccessError::for_read_request)?;
        }
        self.take_read(ReadSource {
            msn: header.msn,
            sink_stag: request.sink_stag,
            sink_to: request.sink_to,
            size: request.size,
            stag: request.source_stag,
            to: request.source_to,
        })
    }

    /// Answers a Read at once, if its turn is now: what arrives behind it must not show in the Response, as
    /// with InfiniBand. If it has to wait, the bytes of a short one are copied; a long one may show Writes
    /// behind it.
    fn take_read(&mut self, source: ReadSource) -> Result<(), TerminateError> {
        if source.size == 0 || source.size > MOST_COPIED {
            return self.let_read_wait(Request::Read(source));
        }
        if self.may_respond() {
            self.start_read_response(source);
            return Ok(());
        }
        let part = Part { stag: source.stag, to: source.to, len: source.size as usize };
        let mut bytes = Vec::with_capacity(part.len);
        let copied = self
            .remote
            .with(part, self.shell.pd.id(), Access::REMOTE_READ, |seg| mem::copy_out(seg, &mut bytes));
        copied.and_then(|copied| Ok(copied?)).map_err(AccessError::for_read_request)?;
        self.let_read_wait(Request::Copied(source, bytes.into()))
    }

    fn let_read_wait(&mut self, request: Request) -> Result<(), TerminateError> {
        if let Some(stream) = &mut self.stream {
            stream.requests.push_back(request);
        }
        Ok(())
    }

    fn acknowledged(&mut self, segment: &Segment, payload: &[u8]) -> Result<(), TerminateError> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        let Ok(ack) = Ack::parse(payload) else {
            return Err(TerminateError::RemoteOperation(RemoteOperation::Unspecified));
        };
        if ack.completed > stream.tx.messages() {
            // More than we have sent.
            return Err(TerminateError::RemoteOperation(RemoteOperation::Unspecified));
        }
        stream.acked = stream.acked.max(ack.completed);
        stream.hold.input();
        if let Header::Untagged(Untagged { rsvdulp32: said, .. }) = segment.header {
            stream.last_ack_seen |= said & UWARP_LAST_ACK != 0;
            if stream.last_ack_seen && said & UWARP_AWAITS_ANSWER != 0 {
                stream.answer = DisconnectReply::Owed;
            }
            if self.by_program && said & UWARP_RNR_RETRY != 0 {
                let retries = u8::try_from(said & (UWARP_RNR_RETRY - 1)).unwrap_or(NO_RNR_LIMIT);
                stream.params.rnr_timeout = rnr_limit(retries, self.shell.attr.min_rnr_timer);
            }
        }
        if segment.requests_ack() {
            stream.count_placed(0, true);
            stream.ack_timing = super::ack_policy::AckTiming::Now;
        }
        self.retire();
        Ok(())
    }

    fn terminated(&mut self, payload: &[u8]) {
        let Ok(terminate) = Terminate::parse(payload) else {
            self.peer_terminated(TerminateError::LocalCatastrophic, Blame::Oldest);
            return;
        };
        let header = terminate.ddp_header.and_then(|h| Header::parse(h).ok()).map(|(h, _)| h);
        let error = terminate.header.error;
        // In that case nothing that this end has sent is wrong, but the peer may have been unable to read its
        // own memory for this end.
        let own_failure = error == TerminateError::LocalCatastrophic
            && self.infiniband()
            && self.stream.as_ref().is_some_and(Stream::peer_only_receives);
        let blame = match header {
            None if own_failure => Blame::NoWorkRequest,
            Some(Header::Untagged(h)) if h.qn == QN_READ_REQUEST => Blame::Read(h.msn),
            Some(Header::Tagged(h)) if Control::parse(h.rsvdulp).opcode == Opcode::ReadResponse => {
                Blame::NoWorkRequest
            }
            Some(Header::Untagged(h)) if h.qn == QN_ATOMIC_RESPONSE => Blame::NoWorkRequest,
            _ => Blame::Oldest,
        };
        self.peer_terminated(error, blame);
    }

    /// No receive was posted in the time the peer allows (docs/adr/004).
    pub(super) fn receive_missing(&mut self) {
        let waiting = self.stream.as_mut().and_then(|s| s.waiting.take());
        let offending = waiting.as_ref().map(OffendingSegment::get);
        self.give_up(TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer), offending);
    }
}
