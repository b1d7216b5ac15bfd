//! The way out: work requests and the peer's RDMA Reads become FPDUs.

use std::convert::Infallible;

use uwarp_proto::framer::MarkerInserter;
use uwarp_proto::setup::RTR_STAG_TO;
use uwarp_proto::tx::{Message, OutSegment, Segmenter};
use uwarp_wire::crc::{self, Crc32c};
use uwarp_wire::ddp::{Header, QN_READ_REQUEST, QN_SEND, Untagged};
use uwarp_wire::mpa;
use uwarp_wire::rdmap::{Control, Immediate, Opcode, ReadRequest};

use super::acks::Wish;
use super::queues::{Phase, slice_sges};
use super::receive::{ReadSink, ReadSource};
use super::{Disconnect, QpCore, QpState, Rtr, Stream};
use crate::event::EventKind;
use crate::mem::{self, MemSeg};
use crate::mr::{self, Access, MrCache, Part};
use crate::trace;
use crate::wr::{SendFlags, SendOp, WcOpcode, WcStatus};

/// Without a CRC, payload from this size on is referenced, not copied.
const BY_REFERENCE: u32 = 8 * 1024;
/// How far cutting runs ahead of the lower layer: enough for a full system call, little enough that staged bytes are
/// still in the second-level cache when the kernel copies them.
const AHEAD_BYTES: usize = 256 * 1024;
const AHEAD_RUNS: usize = 128;
/// From this size on, the CRC is taken while the payload is copied. Below, one pass over all bytes of the FPDU costs less.
const FUSED: u32 = 8 * 1024;

/// The message being cut, and what the untagged queues are numbered to.
#[derive(Debug)]
pub(super) struct Tx {
    markers: Option<MarkerInserter>,
    current: Option<Current>,
    /// The responder may send: the first FPDU arrived.
    pub open: bool,
    send_msn: u32,
    pub(super) read_msn: u32,
    pub(super) ack_msn: u32,
    /// Sends and Writes cut so far.
    pub(super) messages: u64,
    /// The last of them that the peer was asked to tell of.
    pub(super) asked: u64,
    /// Signalled ones among them: all, and those behind the last that asked.
    pub(super) signaled: u64,
    pub(super) unasked: u64,
    /// It is to be asked about the last ones.
    pub ask: bool,
    /// A work request failed locally; no later one starts.
    held: bool,
    /// A read response went out last: the send queue has its turn.
    sq_turn: bool,
}

#[derive(Debug, Clone, Copy)]
struct Current {
    segmenter: Segmenter,
    source: Source,
}

#[derive(Debug, Clone, Copy)]
enum Source {
    /// The scatter/gather list of this slot of the send queue.
    Slot(u64),
    /// Memory that the peer reads.
    Region(ReadSource),
}

impl Tx {
    pub fn new(markers: Option<MarkerInserter>, open: bool) -> Self {
        Self {
            markers,
            current: None,
            open,
            send_msn: 0,
            read_msn: 0,
            ack_msn: 0,
            messages: 0,
            asked: 0,
            signaled: 0,
            unasked: 0,
            ask: false,
            held: false,
            sq_turn: false,
        }
    }

    /// Gives the next message of every queue this MSN.
    pub fn set_msn(&mut self, msn: u32) {
        let last = msn.wrapping_sub(1);
        (self.send_msn, self.read_msn, self.ack_msn) = (last, last, last);
    }

    /// Bytes that were queued last are not sent after all.
    pub fn unsend(&mut self, bytes: usize) {
        if let Some(markers) = &mut self.markers {
            markers.rewind(bytes);
        }
    }

    /// Acknowledgements sent so far; wraps.
    pub fn acks(&self) -> u32 {
        self.ack_msn
    }

    /// Messages whose placement the peer counts, so far.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// A Response is half cut.
    pub fn responding(&self) -> bool {
        self.current.is_some_and(|current| matches!(current.source, Source::Region(_)))
    }

    /// No message is half cut.
    pub fn idle(&self) -> bool {
        self.current.is_none()
    }

    /// Forgets the message being cut.
    pub fn stop(&mut self) {
        self.current = None;
        self.held = true;
    }
}

/// The completion opcode of an operation.
pub(super) fn wc_opcode(op: SendOp) -> WcOpcode {
    match op {
        SendOp::Send { .. } | SendOp::SendImmediate { .. } => WcOpcode::Send,
        SendOp::Write { .. } | SendOp::WriteImmediate { .. } => WcOpcode::RdmaWrite,
        SendOp::Read { .. } => WcOpcode::RdmaRead,
        SendOp::LocalInvalidate { .. } => WcOpcode::LocalInv,
    }
}

impl Stream {
    /// Queues the ready-to-receive frame, if this end owes one.
    pub(super) fn begin(&mut self) {
        match self.params.rtr {
            Rtr::SendWrite => {
                // Nothing is placed, so STag and offset are free: between uwarp ends they say who we are.
                let uwarp = self.params.peer_is_uwarp;
                let (stag, to) = if uwarp { self.params.rtr_stag_to } else { RTR_STAG_TO };
                self.emit_message(Message::Tagged { opcode: Opcode::Write, stag, to }, &[]);
                // A uwarp peer counts it among what it has placed, but nobody waits to hear of it.
                self.tx.messages += 1;
                self.acked = 1;
                self.tx.asked = 1;
                self.established = super::Established::Untold;
            }
            Rtr::SendRead => self.emit_empty_read(),
            // Without peer-to-peer the first FPDU may be long in coming; what is posted waits, but the connection is up.
            Rtr::None => self.established = super::Established::Untold,
            Rtr::Expect => {}
        }
    }

    /// Puts one FPDU into the staging buffer; `payload` appends its `segment.len` payload bytes, or nothing is queued.
    ///
    /// The CRC is always taken of staged bytes, which nobody else can change (docs/adr/003). `payload` takes it while it copies,
    /// if it is given one; otherwise the CRC is taken of all bytes at once, which is faster for short ones.
    fn emit_staged<E>(
        &mut self,
        segment: &OutSegment,
        payload: impl FnOnce(&mut Vec<u8>, Option<&mut Crc32c>) -> Result<(), E>,
    ) -> Result<(), E> {
        let ulpdu_len = segment.header.len() + segment.len as usize;
        let buf = self.out.stage();
        let start = buf.len();
        buf.reserve(mpa::fpdu_len(ulpdu_len));
        push_header(buf, &segment.header, ulpdu_len);
        let payload_at = buf.len();
        let fused = self.params.crc && self.tx.markers.is_none() && segment.len >= FUSED;
        let mut crc = fused.then(Crc32c::new);
        if let Some(crc) = &mut crc {
            crc.update(buf.get(start..).unwrap_or(&[]));
        }
        payload(buf, crc.as_mut()).inspect_err(|_| buf.truncate(start))?;
        let payload_end = buf.len();
        let head = buf.get(payload_at..).unwrap_or(&[]);
        trace::segment(self.qpn, trace::Way::Out, &segment.header, head, segment.len as usize);
        // A payload that came out short would break the framing for good.
        buf.resize(start + mpa::FPDU_HDR_LEN + ulpdu_len + mpa::pad_len(ulpdu_len), 0);
        match &mut self.tx.markers {
            None => {
                let sum = match crc {
                    Some(mut crc) => {
                        crc.update(buf.get(payload_end..).unwrap_or(&[]));
                        crc.finish()
                    }
                    None if self.params.crc => crc::crc32c(buf.get(start..).unwrap_or(&[])),
                    None => 0,
                };
                buf.extend_from_slice(&crc::to_wire(sum));
            }
            Some(markers) => {
                let covered = buf.split_off(start);
                markers.emit(&covered, self.params.crc, buf);
            }
        }
        self.out.staged(start, true, true);
        Ok(())
    }

    /// The same with bytes that are at hand.
    pub(super) fn emit_bytes(&mut self, segment: &OutSegment, bytes: &[u8]) {
        let Ok(()) = self.emit_staged(segment, |buf, crc| {
            buf.extend_from_slice(bytes);
            if let Some(crc) = crc {
                crc.update(bytes);
            }
            Ok::<_, Infallible>(())
        });
    }

    /// Queues one FPDU without a CRC whose payload stays where it is.
    #[inline(never)]
    fn emit_by_reference(&mut self, segment: &OutSegment, pieces: &[MemSeg]) {
        let ulpdu_len = segment.header.len() + segment.len as usize;
        let buf = self.out.stage();
        let start = buf.len();
        push_header(buf, &segment.header, ulpdu_len);
        trace::segment(self.qpn, trace::Way::Out, &segment.header, &[], segment.len as usize);
        self.out.staged(start, false, false);
        for piece in pieces {
            self.out.memory(*piece);
        }
        let buf = self.out.stage();
        let start = buf.len();
        buf.resize(start + mpa::pad_len(ulpdu_len) + mpa::CRC_LEN, 0);
        self.out.staged(start, false, true);
    }

    fn emit_read_request(&mut self, request: ReadRequest) {
        self.tx.read_msn = self.tx.read_msn.wrapping_add(1);
        let message = Message::Untagged {
            opcode: Opcode::ReadRequest,
            qn: QN_READ_REQUEST,
            msn: self.tx.read_msn,
            invalidate: 0,
        };
        self.emit_message(message, &request.to_bytes());
    }

    /// Queues an RDMA Read of no bytes; its Response says that all messages so far are placed.
    pub(super) fn emit_empty_read(&mut self) {
        self.emit_read_request(ReadRequest::EMPTY);
        self.reads.push_back(ReadSink::empty(self.tx.read_msn, self.tx.messages));
    }

    /// Queues the Immediate Data message that goes behind an RDMA Write, nothing between them.
    fn emit_immediate(&mut self, imm: [u8; 4], solicited: bool, wish: Wish) {
        self.tx.send_msn = self.tx.send_msn.wrapping_add(1);
        let opcode = if solicited { Opcode::ImmediateSe } else { Opcode::Immediate };
        let message = Message::Untagged { opcode, qn: QN_SEND, msn: self.tx.send_msn, invalidate: 0 };
        let mut segment = message.whole(Immediate::LEN as u32);
        segment.header.set_rsvdulp(self.asks(0, wish));
        self.tx.messages += 1;
        self.emit_bytes(&segment, &Immediate::of_verbs(imm).to_bytes());
    }

    /// Queues a short message of our own making as one FPDU.
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

/// Appends length field and DDP header.
#[inline]
fn push_header(buf: &mut Vec<u8>, header: &Header, ulpdu_len: usize) {
    buf.extend_from_slice(&u16::try_from(ulpdu_len).unwrap_or(u16::MAX).to_be_bytes());
    match header {
        Header::Tagged(header) => buf.extend_from_slice(&header.to_bytes()),
        Header::Untagged(header) => buf.extend_from_slice(&header.to_bytes()),
    }
}

impl QpCore {
    /// Cuts work into FPDUs until enough is ahead of the lower layer or there is none. Call after posting, after
    /// [`Self::taken`], and after input.
    pub fn build(&mut self) {
        self.check_overflow();
        loop {
            let Some(stream) = &mut self.stream else { return };
            if stream.closing.is_some() || !stream.tx.open || stream.far_ahead() {
                return;
            }
            let sq_ready = !stream.tx.held && self.attr.state == QpState::Rts && self.sq.has_unsent();
            let response = !stream.requests.is_empty();
            stream.emit_ack(sq_ready || response || stream.tx.current.is_some());
            if let Some(mut current) = stream.tx.current.take() {
                self.cut(&mut current);
                continue;
            }
            if stream.params.placement_reads && self.sq.next_is_no_read() {
                stream.ask_stranger(false);
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
                    stream.emit_question();
                    if stream.params.placement_reads && stream.closing.is_none() {
                        stream.ask_stranger(true);
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
                            (segment.header.last(), &mut self.stream, self.sq.slot(number))
                            && !slot.op.is_pair()
                        {
                            let wish = Wish::of(slot, &self.attr, &self.sq);
                            segment.header.set_rsvdulp(stream.asks(current.segmenter.total(), wish));
                        }
                        self.emit_slot_segment(number, &segment);
                    }
                    Source::Region(request) => self.emit_region_segment(request, &segment),
                }
            }
            let Some(stream) = &mut self.stream else { return };
            match current.source {
                Source::Slot(number) if current.segmenter.finished() => return self.slot_cut(number),
                // It failed on the way. (A response goes on: only work requests are held.)
                Source::Slot(_) if stream.tx.held => return,
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
            // Between segments too: a long message may take longer than the peer should wait.
            stream.emit_ack(true);
        }
    }

    /// The lower layer took `n` bytes of [`Self::out`].
    pub fn taken(&mut self, n: usize) {
        if let Some(stream) = &mut self.stream {
            stream.out.take(n);
        }
        self.retire();
    }

    fn start_response(&mut self) -> bool {
        let Some(stream) = &mut self.stream else { return false };
        let Some(request) = stream.requests.pop_front() else { return false };
        let message =
            Message::Tagged { opcode: Opcode::ReadResponse, stag: request.sink_stag, to: request.sink_to };
        let segmenter = stream.segmenter(message, request.size);
        self.counters.sent.read_response.count(request.size);
        self.cut(&mut Current { segmenter, source: Source::Region(request) });
        true
    }

    /// Starts the next work request, if its turn has come. False when it has to wait.
    fn start_work_request(&mut self) -> bool {
        let number = self.sq.next;
        let Some(slot) = self.sq.slot(number) else { return false };
        let Some(stream) = &mut self.stream else { return false };
        if slot.flags.contains(SendFlags::FENCE) && stream.reads.iter().any(|read| read.slot.is_some()) {
            return false;
        }
        let (total, pair) = (slot.total, slot.op.is_pair());
        let wish = Wish::of(slot, &self.attr, &self.sq);
        let solicited = slot.flags.contains(SendFlags::SOLICITED);
        let message = match slot.op {
            // It was posted while the peer was taken for a uwarp end.
            SendOp::SendImmediate { .. } | SendOp::WriteImmediate { .. } if !stream.params.peer_is_uwarp => {
                self.hold(number, WcStatus::LocQpOpErr);
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
            SendOp::Read { stag, to, .. } => {
                if stream.reads.len() >= usize::from(stream.params.ord) {
                    // No read depth at all can never be mended by waiting.
                    if stream.params.ord == 0 {
                        self.hold(number, WcStatus::LocQpOpErr);
                        return true;
                    }
                    return false;
                }
                return self.start_read(number, stag, to, total);
            }
            SendOp::LocalInvalidate { stag } => {
                self.sq.next += 1;
                // It completes behind what the peer was not asked about.
                stream.tx.unasked += u64::from(wish.signaled);
                match mr::invalidate(stag, self.pd.id()) {
                    Ok(()) => self.mark(number, Phase::Done),
                    Err(_) => self.hold(number, WcStatus::MwBindErr),
                }
                self.retire();
                return true;
            }
        };
        self.sq.next += 1;
        if message.header_len() + total as usize <= stream.mulpdu {
            let mut segment = message.whole(total);
            if !pair {
                segment.header.set_rsvdulp(stream.asks(total, wish));
            }
            self.emit_slot_segment(number, &segment);
            self.slot_cut(number);
            return true;
        }
        let segmenter = stream.segmenter(message, total);
        self.cut(&mut Current { segmenter, source: Source::Slot(number) });
        true
    }

    fn start_read(&mut self, number: u64, stag: u32, to: u64, total: u32) -> bool {
        // The sink is checked before the request goes out: a response that cannot be placed would cost the connection.
        let Some(slot) = self.sq.slot(number).copied() else { return false };
        let pd = self.pd.id();
        let local = &mut self.local;
        let bad = slice_sges(self.sq.sges(&slot), 0, total)
            .any(|part| local.with(part, pd, Access::LOCAL_WRITE, |_| ()).is_err());
        if bad {
            self.hold(number, WcStatus::LocProtErr);
            return true;
        }
        let Ok(sink_stag) = mr::random_u32() else {
            self.hold(number, WcStatus::LocQpOpErr);
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
        self.sq.next += 1;
        self.mark(number, Phase::Reading);
        true
    }

    /// The lower layer cannot read the next byte of [`Self::out`]: the program has unmapped what it posted. The stream has a hole, so
    /// there is no going on.
    pub fn unreadable(&mut self) {
        let Some(stream) = self.stream.as_ref().filter(|s| s.closing.is_none()) else { return };
        let taken = stream.out.taken();
        let cutting = match stream.tx.current {
            Some(Current { source: Source::Slot(number), .. }) => Some(number),
            _ => None,
        };
        // Responses are copied, so it is a work request's: the first that is not wholly taken.
        let number = (self.sq.head..self.sq.next).find(|number| {
            let phase = self.sq.slot(*number).map(|slot| slot.phase);
            matches!(phase, Some(Phase::Sent { end, .. }) if end > taken)
        });
        if let Some(number) = number.or(cutting) {
            self.mark(number, Phase::Failed(WcStatus::LocProtErr));
        }
        let quiet = self.infiniband();
        self.flush(Disconnect::Reset, None);
        if !quiet {
            self.event(EventKind::QpFatal);
        }
    }

    /// All segments of a slot are queued.
    fn slot_cut(&mut self, number: u64) {
        let Some(stream) = &mut self.stream else { return };
        stream.tx.messages += 1;
        stream.answered = true;
        stream.hold.sent();
        stream.look_past_waiting();
        let Some(wish) = self.sq.slot(number).map(|slot| Wish::of(slot, &self.attr, &self.sq)) else {
            return;
        };
        // A slot that failed on the way keeps its failure.
        let Some(slot) = self.sq.slot_mut(number).filter(|s| s.phase == Phase::Posted) else { return };
        if let SendOp::WriteImmediate { imm, .. } = slot.op {
            stream.emit_immediate(imm, slot.flags.contains(SendFlags::SOLICITED), wish);
        }
        slot.phase = Phase::Sent { end: stream.out.queued(), message: stream.tx.messages };
    }

    fn mark(&mut self, number: u64, phase: Phase) {
        if let Some(slot) = self.sq.slot_mut(number) {
            slot.phase = phase;
        }
    }

    /// The work request fails by its own fault: no later one starts, earlier ones complete, then the queue pair fails.
    fn hold(&mut self, number: u64, status: WcStatus) {
        self.mark(number, Phase::Failed(status));
        if let Some(stream) = &mut self.stream {
            stream.tx.stop();
            // Nothing starts after this one, and if it asked, the peer will not see it.
            stream.tx.asked = stream.tx.asked.min(stream.acked);
            stream.tx.unasked = 1;
        }
        self.retire();
    }

    fn emit_slot_segment(&mut self, number: u64, segment: &OutSegment) {
        let Some(slot) = self.sq.slot(number) else { return };
        let Some(stream) = &mut self.stream else { return };
        if slot.flags.contains(SendFlags::INLINE) {
            let bytes = self.sq.inline_bytes(number, slot.total);
            let at = segment.offset as usize;
            stream.emit_bytes(segment, bytes.get(at..at + segment.len as usize).unwrap_or(&[]));
            return;
        }
        let parts = slice_sges(self.sq.sges(slot), segment.offset, segment.len);
        let ok = emit_parts(stream, segment, parts, &mut self.local, self.pd.id(), Access::empty());
        if ok.is_err() {
            self.hold(number, WcStatus::LocProtErr);
        }
    }

    fn emit_region_segment(&mut self, request: ReadSource, segment: &OutSegment) {
        let Some(stream) = &mut self.stream else { return };
        let at = request.to.wrapping_add(u64::from(segment.offset));
        let part =
            (segment.len > 0).then_some(Part { stag: request.stag, to: at, len: segment.len as usize });
        // Checked when the request came, and again here: the region may have gone since.
        let need = Access::REMOTE_READ;
        if let Err(e) = emit_parts(stream, segment, part.into_iter(), &mut self.remote, self.pd.id(), need) {
            self.fail(e.for_read_request(), Some((&request.rest(segment.offset), ReadSource::SEGMENT_LEN)));
        }
    }
}

impl ReadSource {
    const SEGMENT_LEN: u16 = (Untagged::LEN + ReadRequest::LEN) as u16;

    /// The segment that asked for it, with what is left to do from `offset` on, as a Terminate in the middle of a response
    /// quotes it (RFC 5040 section 4.8).
    fn rest(&self, offset: u32) -> [u8; Self::SEGMENT_LEN as usize] {
        let header = Untagged {
            last: true,
            rsvdulp: Control::new(Opcode::ReadRequest).to_byte(),
            rsvdulp32: 0,
            qn: QN_READ_REQUEST,
            msn: self.msn,
            mo: 0,
        };
        let request = ReadRequest {
            sink_stag: self.sink_stag,
            sink_to: self.sink_to.wrapping_add(u64::from(offset)),
            size: self.size.saturating_sub(offset),
            source_stag: self.stag,
            source_to: self.to.wrapping_add(u64::from(offset)),
        };
        let mut bytes = [0; Self::SEGMENT_LEN as usize];
        let (head, tail) = bytes.split_at_mut(Untagged::LEN);
        head.copy_from_slice(&header.to_bytes());
        tail.copy_from_slice(&request.to_bytes());
        bytes
    }
}

/// Queues one FPDU whose payload lies in the given parts of registered memory.
fn emit_parts(
    stream: &mut Stream,
    segment: &OutSegment,
    parts: impl Iterator<Item = Part>,
    cache: &mut MrCache,
    pd: u32,
    need: Access,
) -> Result<(), mr::AccessError> {
    // What the peer reads is copied at once: the program may take the region back while it is on its way, and it must not be read
    // any more then. What goes with a CRC is copied because the program may change it meanwhile, which must not make the CRC wrong.
    let promised = !need.contains(Access::REMOTE_READ);
    if !promised || stream.params.crc || segment.len < BY_REFERENCE || stream.tx.markers.is_some() {
        return stream.emit_staged(segment, |buf, mut crc| {
            for part in parts {
                cache.with(part, pd, need, |seg| match crc.as_deref_mut() {
                    Some(crc) => mem::copy_out_with_crc(seg, buf, crc),
                    None => mem::copy_out(seg, buf),
                })??;
            }
            Ok(())
        });
    }
    // Up to a few pieces without allocation; a longer list is rare and pays for it.
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

/// A list that is nearly always of one or two.
type Pieces<T> = smallvec::SmallVec<[T; 2]>;
