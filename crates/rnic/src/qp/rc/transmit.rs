//! The way out: turns work requests and the peer's RDMA Reads into frames.

use uwarp_proto::opening::First;
use uwarp_proto::setup::RTR_STAG_TO;
use uwarp_proto::tx::{Message, OutSegment, Segmenter};
use uwarp_wire::crc::Crc32c;
use uwarp_wire::ddp::{QN_READ_REQUEST, QN_SEND};
use uwarp_wire::rdmap::{Immediate, Opcode, ReadRequest};

use super::ack_policy::AckPolicy;
use super::core::RcCore;
use super::reads::{ReadSink, ReadSource, Request};
use super::stream::{Disconnect, Established, Stream};
use super::timers::Timer;
use super::tx::{Current, Source};
use crate::event::EventKind;
use crate::mr::{self, Access, MrCache, Part};
use crate::qp::state::QpState;
use crate::queues::{Phase, slice_sges};
use crate::trace;
use crate::wr::{SendFlags, SendOp, WcStatus};
use uwarp_mem::{self as mem, MemSeg};

/// How many bytes are cut into frames ahead of the lower layer: enough for a full system call, few enough
/// that staged bytes are still in the second-level cache when the kernel copies them.
const AHEAD_BYTES: usize = 256 * 1024;
const AHEAD_RUNS: usize = 128;

impl Stream {
    /// Queues the ready-to-receive frame, if this end owes one.
    pub(super) fn begin(&mut self) {
        match self.opening.first() {
            First::SendWrite(stag, to) => {
                self.emit_message(Message::Tagged { opcode: Opcode::Write, stag, to }, &[]);
                // A uwarp peer counts it as placed, but no work request waits for an acknowledgement of it.
                self.tx.messages += 1;
                self.acked = 1;
                self.tx.ack_requests.last = 1;
                if self.params.by_number {
                    // Its Response is the peer's first frame, which the Write does not cause.
                    self.emit_empty_read();
                } else {
                    self.established = Established::Unreported;
                }
            }
            First::SendRead => self.emit_empty_read(),
            // Without peer-to-peer the first frame may come late. Posted work waits for it, but the
            // connection is up.
            First::Nothing => self.established = Established::Unreported,
            First::Expect => {}
        }
        self.begun = (self.tx.messages(), self.tx.read_msn);
    }

    /// Puts one frame into the staging buffer; `payload` appends its `segment.len` payload bytes, and adds
    /// them to the CRC if it gets one. If it fails, nothing is queued.
    fn emit_staged<E>(
        &mut self,
        segment: &OutSegment,
        payload: impl FnOnce(&mut Vec<u8>, Option<&mut Crc32c>) -> Result<(), E>,
    ) -> Result<(), E> {
        let qpn = self.qpn;
        let buf = self.out.stage();
        let start = buf.len();
        self.sender.stage(buf, segment, |buf, crc| {
            let at = buf.len();
            payload(buf, crc)?;
            let head = buf.get(at..).unwrap_or(&[]);
            trace::segment(qpn, trace::Way::Out, &segment.header, head, segment.len as usize);
            Ok(())
        })?;
        self.out.staged(start, true, true);
        Ok(())
    }

    /// The same with payload in a slice.
    pub(super) fn emit_bytes(&mut self, segment: &OutSegment, bytes: &[u8]) {
        trace::segment(self.qpn, trace::Way::Out, &segment.header, bytes, segment.len as usize);
        let buf = self.out.stage();
        let start = buf.len();
        self.sender.stage_bytes(buf, segment, bytes);
        self.out.staged(start, true, true);
    }

    /// Queues one frame whose payload is referred to, not copied.
    #[inline(never)]
    fn emit_by_reference(&mut self, segment: &OutSegment, pieces: &[MemSeg]) {
        trace::segment(self.qpn, trace::Way::Out, &segment.header, &[], segment.len as usize);
        let buf = self.out.stage();
        let start = buf.len();
        self.sender.begin(buf, segment);
        self.out.staged(start, false, false);
        for piece in pieces {
            self.out.memory(*piece);
        }
        let buf = self.out.stage();
        let start = buf.len();
        self.sender.end(buf, segment);
        self.out.staged(start, false, true);
    }

    /// Queues a part of a Read Response, without the changes of atomic operations behind the Read.
    #[cold]
    fn emit_as_it_was(
        &mut self,
        segment: &OutSegment,
        part: Part,
        cache: &mut MrCache,
        pd: u32,
    ) -> Result<(), mr::AccessError> {
        let mut bytes = Vec::with_capacity(part.len);
        let addr = cache
            .with(part, pd, Access::REMOTE_READ, |seg| mem::copy_out(seg, &mut bytes).map(|_| seg.addr))??;
        // The oldest change last: it has the value from before all of them.
        for request in self.requests.iter().rev() {
            if let Request::Atomic(atomic) = request {
                atomic.undo(addr, &mut bytes);
            }
        }
        self.emit_bytes(segment, &bytes);
        Ok(())
    }

    fn emit_read_request(&mut self, request: ReadRequest) {
        let message = Message::Untagged {
            opcode: Opcode::ReadRequest,
            qn: QN_READ_REQUEST,
            msn: self.tx.next_read_msn(),
            invalidate: 0,
        };
        self.emit_message(message, &request.to_bytes());
    }

    /// Queues an RDMA Read of no bytes; its Response shows that all messages so far are placed.
    pub(super) fn emit_empty_read(&mut self) {
        self.emit_read_request(ReadRequest::EMPTY);
        self.reads.push_back(ReadSink::empty(self.tx.read_msn, self.tx.messages));
    }

    /// Queues an RDMA Write of no bytes to a peer that does not count what it places.
    pub(super) fn emit_empty_write(&mut self) {
        let (stag, to) = RTR_STAG_TO;
        self.emit_message(Message::Tagged { opcode: Opcode::Write, stag, to }, &[]);
    }

    /// Queues the Immediate Data message that directly follows an RDMA Write.
    fn emit_immediate(&mut self, imm: [u8; 4], solicited: bool, policy: AckPolicy) {
        self.tx.send_msn = self.tx.send_msn.wrapping_add(1);
        let opcode = if solicited { Opcode::ImmediateSe } else { Opcode::Immediate };
        let message = Message::Untagged { opcode, qn: QN_SEND, msn: self.tx.send_msn, invalidate: 0 };
        let mut segment = message.whole(Immediate::LEN as u32);
        segment.header.set_rsvdulp(self.ack_request_for(0, policy));
        self.tx.messages += 1;
        self.emit_bytes(&segment, &Immediate::of_verbs(imm).to_bytes());
    }

    /// Queues a short message of this end's own as one frame.
    pub(super) fn emit_message(&mut self, message: Message, bytes: &[u8]) {
        let len = u32::try_from(bytes.len()).unwrap_or(0);
        self.emit_bytes(&message.whole(len), bytes);
    }

    fn far_ahead(&self) -> bool {
        self.out.waiting() >= AHEAD_BYTES || self.out.runs() >= AHEAD_RUNS
    }

    fn segmenter(&self, message: Message, total: u32) -> Segmenter {
        Segmenter::new(message, total, self.mulpdu, self.params.peer_is_uwarp)
    }
}

impl RcCore {
    /// Cuts work into frames until enough is ahead of the lower layer or nothing is left. Part of
    /// [`Self::poll_transmit`].
    #[inline]
    pub(super) fn build(&mut self) {
        self.check_overflow();
        self.build_frames();
        self.end_uses();
    }

    fn build_frames(&mut self) {
        loop {
            let Some(stream) = &mut self.stream else { return };
            stream.tx.all_cut = false;
            if stream.closing.is_some() || !stream.opening.may_send() {
                return;
            }
            if stream.far_ahead() {
                // The lower layer needs no room for a number. The peer's program may wait for it before it
                // posts the receive that makes room.
                if stream.params.link.counts {
                    stream.emit_ack(true);
                }
                return;
            }
            stream.emit_rnr_retry();
            let sq_ready =
                !stream.tx.stopped && self.shell.attr.state == QpState::Rts && self.shell.sq.has_unsent();
            let response = !stream.requests.is_empty();
            stream.emit_ack(sq_ready || response || stream.tx.current.is_some());
            if let Some(mut current) = stream.tx.current.take() {
                self.cut(&mut current);
                continue;
            }
            if stream.params.placement_reads && self.shell.sq.next_is_not_answered() {
                stream.emit_placement_read(false);
            }
            let progressed = if response && !(sq_ready && stream.tx.sq_turn) {
                stream.tx.sq_turn = true;
                self.start_response()
            } else if sq_ready {
                stream.tx.sq_turn = false;
                self.start_work_request() || (response && self.start_response())
            } else {
                false
            };
            if !progressed {
                if let Some(stream) = &mut self.stream {
                    stream.emit_ack_request();
                    stream.tx.all_cut = true;
                    if stream.params.placement_reads && stream.closing.is_none() {
                        stream.emit_placement_read(true);
                    }
                }
                return;
            }
        }
    }

    /// Cuts a message, until all of it is queued or enough is ahead of the lower layer.
    fn cut(&mut self, current: &mut Current) {
        loop {
            if let Some(mut segment) = current.segmenter.next_segment() {
                match current.source {
                    Source::Slot(number) => {
                        if let (true, Some(stream), Some(slot)) =
                            (segment.header.last(), &mut self.stream, self.shell.sq.slot(number))
                            && !slot.op.is_pair()
                        {
                            let policy = AckPolicy::of(slot, &self.shell);
                            segment
                                .header
                                .set_rsvdulp(stream.ack_request_for(current.segmenter.total(), policy));
                        }
                        self.emit_slot_segment(number, &segment);
                    }
                    Source::Region(request) => self.emit_region_segment(request, &segment),
                }
            }
            let Some(stream) = &mut self.stream else { return };
            match current.source {
                Source::Slot(number) if current.segmenter.finished() => return self.slot_cut(number),
                // The work request failed meanwhile. (A response continues: only work requests are stopped.)
                Source::Slot(_) if stream.tx.stopped => return,
                Source::Region(_) if current.segmenter.finished() => {
                    stream.responses.push_back(stream.out.queued());
                    return;
                }
                _ => {}
            }
            if stream.closing.is_some() || stream.far_ahead() {
                stream.tx.current = Some(*current);
                return;
            }
            // Between segments too: a long message may take longer than the peer should wait for an
            // acknowledgement.
            stream.emit_ack(true);
        }
    }

    fn start_response(&mut self) -> bool {
        let Some(stream) = &mut self.stream else { return false };
        let request = match stream.requests.pop_front() {
            None => return false,
            Some(request) => request,
        };
        match request {
            Request::Read(request) => self.start_read_response(request),
            Request::Copied(request, bytes) => {
                self.shell.counters.sent.read_response.count(request.size);
                let mut segmenter = stream.segmenter(request.response(), request.size);
                while let Some(segment) = segmenter.next_segment() {
                    let at = segment.offset as usize;
                    stream.emit_bytes(&segment, bytes.get(at..at + segment.len as usize).unwrap_or(&[]));
                }
                stream.responses.push_back(stream.out.queued());
            }
            Request::Atomic(atomic) => self.start_atomic_response(atomic),
        }
        true
    }

    /// Whether a Response may be sent now: nothing is before it.
    pub(super) fn may_respond(&self) -> bool {
        let free = |stream: &Stream| {
            (stream.opening.may_send() && stream.tx.current.is_none() && stream.closing.is_none())
                && (stream.requests.is_empty() && !stream.far_ahead())
        };
        self.stream.as_ref().is_some_and(free) && !self.timers.is_set(Timer::FirstFrame)
    }

    pub(super) fn start_read_response(&mut self, request: ReadSource) {
        let Some(stream) = &mut self.stream else { return };
        let segmenter = stream.segmenter(request.response(), request.size);
        self.shell.counters.sent.read_response.count(request.size);
        self.cut(&mut Current { segmenter, source: Source::Region(request) });
    }

    /// Starts the next work request, if it may start. False when it has to wait.
    fn start_work_request(&mut self) -> bool {
        let number = self.shell.sq.next;
        let Some(slot) = self.shell.sq.slot(number) else { return false };
        let Some(stream) = &mut self.stream else { return false };
        if slot.flags.contains(SendFlags::FENCE) && stream.reads.iter().any(|read| read.slot.is_some()) {
            return false;
        }
        let (total, pair) = (slot.total, slot.op.is_pair());
        let policy = AckPolicy::of(slot, &self.shell);
        if !policy.relaxed {
            // It completes behind those before it.
            stream.tx.ack_requests.needed = stream.tx.messages;
        }
        let solicited = slot.flags.contains(SendFlags::SOLICITED);
        let message = match slot.op {
            // It was posted while the peer was assumed to be a uwarp end, or not yet known.
            op if op.wants_uwarp() && !stream.params.peer_is_uwarp => {
                self.fail_work_request(number, WcStatus::LocQpOpErr);
                return true;
            }
            // Of datagrams only.
            SendOp::WriteRecord { .. } => {
                self.fail_work_request(number, WcStatus::LocQpOpErr);
                return true;
            }
            SendOp::Send { invalidate } => {
                stream.tx.send_msn = stream.tx.send_msn.wrapping_add(1);
                Message::send(stream.tx.send_msn, solicited, invalidate)
            }
            SendOp::SendImmediate { imm } => {
                stream.tx.send_msn = stream.tx.send_msn.wrapping_add(1);
                Message::SendImmediate { msn: stream.tx.send_msn, solicited, imm }
            }
            SendOp::Write { stag, to } | SendOp::WriteImmediate { stag, to, .. } => {
                Message::Tagged { opcode: Opcode::Write, stag, to }
            }
            SendOp::Read { .. } | SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. }
                if stream.reads.len() >= usize::from(stream.params.ord) =>
            {
                // Without any read depth, waiting does not help.
                if stream.params.ord == 0 {
                    self.fail_work_request(number, WcStatus::LocQpOpErr);
                    return true;
                }
                return false;
            }
            SendOp::Read { stag, to, .. } => return self.start_read(number, stag, to, total),
            SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => return self.start_atomic(number),
            op @ (SendOp::LocalInvalidate { .. } | SendOp::Bind(_)) => {
                self.shell.sq.next += 1;
                // It completes after messages that did not request an acknowledgement.
                stream.tx.ack_requests.signaled_since += u64::from(policy.signaled);
                stream.tx.ack_requests.needed = stream.tx.messages;
                match self.change_key(op) {
                    Ok(()) => self.mark(number, Phase::Done),
                    Err(_) => self.fail_work_request(number, WcStatus::MwBindErr),
                }
                self.retire();
                return true;
            }
        };
        self.shell.sq.next += 1;
        if message.header_len() + total as usize <= stream.mulpdu {
            let mut segment = message.whole(total);
            if !pair {
                segment.header.set_rsvdulp(stream.ack_request_for(total, policy));
            }
            self.emit_slot_segment(number, &segment);
            self.slot_cut(number);
            return true;
        }
        let segmenter = stream.segmenter(message, total);
        self.cut(&mut Current { segmenter, source: Source::Slot(number) });
        true
    }

    /// Carries out a work request about a key of this end; it sends nothing.
    pub(super) fn change_key(&mut self, op: SendOp) -> Result<(), mr::AccessError> {
        // It waits for those who use the region.
        self.end_uses();
        let (pd, qpn) = (&self.shell.pd, self.shell.qpn);
        match op {
            SendOp::LocalInvalidate { stag } => mr::invalidate(stag, pd.id(), qpn),
            SendOp::Bind(bind) => mr::bind_window(pd, qpn, &bind),
            _ => Ok(()),
        }
    }

    fn start_read(&mut self, number: u64, stag: u32, to: u64, total: u32) -> bool {
        // The sink is checked before the request is sent: a response that cannot be placed would end the
        // connection.
        let Some(slot) = self.shell.sq.slot(number).copied() else { return false };
        let pd = self.shell.pd.id();
        let local = &mut self.shell.local;
        let bad = slice_sges(self.shell.sq.sges(&slot), 0, total)
            .any(|part| local.with(part, pd, Access::LOCAL_WRITE, |_| ()).is_err());
        if bad {
            self.fail_work_request(number, WcStatus::LocProtErr);
            return true;
        }
        let Ok(sink_stag) = mr::random_u32() else {
            self.fail_work_request(number, WcStatus::LocQpOpErr);
            return true;
        };
        let Some(stream) = &mut self.stream else { return false };
        stream.emit_read_request(ReadRequest {
            sink_stag,
            sink_to: 0,
            size: total,
            source_stag: stag,
            source_to: to,
        });
        let msn = stream.tx.read_msn;
        stream.reads.push_back(ReadSink::new(number, sink_stag, total, msn, stream.tx.messages));
        stream.look_past_waiting();
        self.shell.sq.next += 1;
        self.mark(number, Phase::Reading);
        true
    }

    /// The lower layer cannot read the next byte: the program has unmapped memory that it posted. The stream
    /// would have a hole, so it cannot continue.
    pub(super) fn unreadable(&mut self) {
        let Some(stream) = self.stream.as_ref().filter(|s| s.closing.is_none()) else { return };
        let taken = stream.out.taken();
        let cutting = match stream.tx.current {
            Some(Current { source: Source::Slot(number), .. }) => Some(number),
            _ => None,
        };
        // Responses are copied, so the byte belongs to a work request: the first that is not wholly taken.
        let number = (self.shell.sq.head..self.shell.sq.next).find(|number| {
            let phase = self.shell.sq.slot(*number).map(|slot| slot.phase);
            matches!(phase, Some(Phase::Sent { end, .. }) if end > taken)
        });
        if let Some(number) = number.or(cutting) {
            self.mark(number, Phase::Failed(WcStatus::LocProtErr));
        }
        let quiet = self.infiniband();
        self.flush(Disconnect::Reset, None);
        if !quiet {
            self.shell.event(EventKind::QpFatal);
        }
    }

    /// All segments of a slot are queued.
    fn slot_cut(&mut self, number: u64) {
        let Some(stream) = &mut self.stream else { return };
        stream.tx.messages += 1;
        stream.answered = true;
        stream.hold.sent();
        stream.look_past_waiting();
        // A slot that has failed meanwhile keeps its failure.
        let slot = self.shell.sq.slot(number).filter(|slot| slot.phase == Phase::Posted);
        let Some(slot) = slot else { return };
        if let SendOp::WriteImmediate { imm, .. } = slot.op {
            let policy = AckPolicy::of(slot, &self.shell);
            stream.emit_immediate(imm, slot.flags.contains(SendFlags::SOLICITED), policy);
        }
        let phase = Phase::Sent { end: stream.out.queued(), message: stream.tx.messages };
        self.mark(number, phase);
    }

    pub(super) fn mark(&mut self, number: u64, phase: Phase) {
        if let Some(slot) = self.shell.sq.slot_mut(number) {
            slot.phase = phase;
        }
    }

    /// The work request fails because of a local error: no later one starts, earlier ones complete, then the
    /// queue pair fails.
    pub(super) fn fail_work_request(&mut self, number: u64, status: WcStatus) {
        self.mark(number, Phase::Failed(status));
        if let Some(stream) = &mut self.stream {
            stream.tx.stop();
            // Nothing starts after this one, and if it requested an acknowledgement, the peer will not see
            // the request.
            let requests = &mut stream.tx.ack_requests;
            requests.last = requests.last.min(stream.acked);
            requests.signaled_since = 1;
            requests.needed = stream.tx.messages;
        }
        self.retire();
    }

    fn emit_slot_segment(&mut self, number: u64, segment: &OutSegment) {
        let Some(slot) = self.shell.sq.slot(number) else { return };
        let Some(stream) = &mut self.stream else { return };
        if slot.flags.contains(SendFlags::INLINE) {
            let bytes = self.shell.sq.inline_bytes(number, slot.total);
            let at = segment.offset as usize;
            stream.emit_bytes(segment, bytes.get(at..at + segment.len as usize).unwrap_or(&[]));
            return;
        }
        let parts = slice_sges(self.shell.sq.sges(slot), segment.offset, segment.len);
        let ok =
            emit_parts(stream, segment, parts, &mut self.shell.local, self.shell.pd.id(), Access::empty());
        if ok.is_err() {
            self.fail_work_request(number, WcStatus::LocProtErr);
        }
    }

    fn emit_region_segment(&mut self, request: ReadSource, segment: &OutSegment) {
        let Some(stream) = &mut self.stream else { return };
        let at = request.to.wrapping_add(u64::from(segment.offset));
        let part =
            (segment.len > 0).then_some(Part { stag: request.stag, to: at, len: segment.len as usize });
        // Checked when the request came, and again here: the region may have been deregistered since.
        let need = Access::REMOTE_READ;
        let (remote, pd) = (&mut self.remote, self.shell.pd.id());
        let emitted = match part {
            Some(part) if stream.atomics > 0 => stream.emit_as_it_was(segment, part, remote, pd),
            part => emit_parts(stream, segment, part.into_iter(), remote, pd, need),
        };
        if let Err(e) = emitted {
            self.fail(e.for_read_request(), Some((&request.rest(segment.offset), ReadSource::SEGMENT_LEN)));
        }
    }
}

/// Queues one frame whose payload lies in the given parts of registered memory.
fn emit_parts(
    stream: &mut Stream,
    segment: &OutSegment,
    parts: impl Iterator<Item = Part>,
    cache: &mut MrCache,
    pd: u32,
    need: Access,
) -> Result<(), mr::AccessError> {
    // What the peer reads is copied at once: the program may deregister the region while the bytes wait, and
    // then they must not be read any more. With a CRC, the framing takes no references.
    let promised = !need.contains(Access::REMOTE_READ);
    if !promised || !stream.sender.takes_reference(segment) {
        return stream.emit_staged(segment, |buf, mut crc| {
            for part in parts {
                cache.with_more(part, pd, need, |seg| match crc.as_deref_mut() {
                    Some(crc) => mem::copy_out_with_crc(seg, buf, crc),
                    None => mem::copy_out(seg, buf),
                })??;
            }
            Ok(())
        });
    }
    // A few pieces need no allocation; a longer list is rare and pays for one.
    let mut pieces = Pieces::default();
    let mut pins = Pieces::default();
    for part in parts {
        let (seg, pin) = cache.enter(part, pd, need)?;
        pieces.push(seg);
        pins.push(pin);
    }
    stream.emit_by_reference(segment, pieces.as_slice());
    Ok(())
}

/// A list that nearly always has one or two elements.
type Pieces<T> = smallvec::SmallVec<[T; 2]>;
