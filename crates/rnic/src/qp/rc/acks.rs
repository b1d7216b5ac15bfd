//! Acknowledgements of placed messages: when they are sent, and when they are requested (docs/adr/009).

use uwarp_proto::tx::Message;
use uwarp_wire::rdmap::{
    Ack, Opcode, QN_UWARP_ACK, UWARP_AWAITS_ANSWER, UWARP_LAST_ACK, UWARP_REQUEST_ACK, UWARP_RNR_RETRY,
};

use super::ack_policy::{AckPolicy, AckTiming, REQUEST_EVERY};
use super::reads::ReadSink;
use super::stream::{DisconnectReply, Stream};
use super::tx::Tx;

/// Between uwarp ends, this many messages may complete before the peer has placed them, where completion does
/// not mean placement anyway. Programs with credits of their own (perftest with events) let hundreds of work
/// requests complete that then wait in the socket, and wait themselves for a completion that has already been
/// made: with an adapter the queue between the two is short.
const LEAD: u64 = 192;
/// Acknowledge once this many messages are placed. Less than [`LEAD`], or the last ones would never complete.
const ACK_EVERY: u64 = 96;
/// Toward strangers, emit a placement Read once this many messages are not known to be placed, even if more
/// are to follow.
const PLACEMENT_READ_AFTER: u64 = 16;
/// Acknowledge within this many messages of a request, even if another message is in progress: all work
/// requests of the sender may be in flight, so that it can send nothing more until then.
pub(super) const ACK_WITHIN: u64 = 4;

impl Stream {
    /// The last message whose work request may complete once the lower layer has taken it.
    pub(super) fn completes_to(&self) -> u64 {
        match (self.params.peer_is_uwarp, self.params.placement_acks) {
            // Strangers do not acknowledge; a placement Read can ask them.
            (false, _) if self.uses_placement_reads() => self.acked,
            (false, _) => u64::MAX,
            (true, true) => self.acked,
            (true, false) => self.acked.saturating_add(LEAD),
        }
    }

    /// Whether placement Reads ask a stranger what is placed.
    pub(super) fn uses_placement_reads(&self) -> bool {
        self.params.placement_reads && !self.params.peer_is_uwarp
    }

    /// Asks a stranger whether all messages so far are placed, if it is time. The placement Read is an RDMA
    /// Read of no bytes, whose Response comes when all messages before it are placed (RFC 5040 section 5.5).
    /// At most one is outstanding, and none while the Read of a work request serves the purpose. `last`:
    /// nothing else follows for now.
    #[cold]
    #[inline(never)]
    pub(super) fn emit_placement_read(&mut self, last: bool) {
        // It uses a place of the read depth. If the depth is zero, the peer still accepts one (see
        // `placement_reads`).
        if !self.uses_placement_reads() || self.reads.len() >= usize::from(self.params.ord.max(1)) {
            return;
        }
        let covered = self.reads.iter().map(|read| read.behind).max().unwrap_or(0).max(self.acked);
        let new = self.tx.messages.saturating_sub(covered);
        let enough = if last { 1 } else { PLACEMENT_READ_AFTER };
        if new < enough || self.reads.iter().any(|read| read.slot.is_none()) {
            return;
        }
        self.emit_empty_read();
        self.look_past_waiting();
    }

    /// The Response to a Read is complete: the messages before its request are placed.
    pub(super) fn read_answered(&mut self, read: &ReadSink) {
        self.acked = self.acked.max(read.behind);
    }

    /// Messages of the peer are placed. `requested`: it requests an acknowledgement.
    pub(super) fn count_placed(&mut self, messages: u64, requested: bool) {
        self.placed += messages;
        self.hold.input();
        if requested {
            if self.requested_to <= self.placed_acked {
                self.requested_from = self.placed;
                self.hold.begin();
            }
            self.requested_to = self.placed;
            let rides = std::mem::take(&mut self.answered);
            self.ack_timing = self.ack_timing.max(if rides { AckTiming::Rides } else { AckTiming::Drained });
        }
    }

    /// Whether the peer waits for an acknowledgement.
    pub(super) fn owes_ack(&self) -> bool {
        // The message that requested it may be behind a Send that waits for a receive.
        let of = if self.stalled || !self.buffered.is_empty() { self.placed } else { self.requested_to };
        self.params.placement_acks
            && of > self.placed_acked
            && self.opening.may_send()
            && self.closing.is_none()
    }

    /// Whether the peer has waited too long: interrupt receiving to acknowledge.
    pub(super) fn ack_is_urgent(&self) -> bool {
        self.ack_timing == AckTiming::Drained
            && self.owes_ack()
            && self.placed - self.requested_from >= ACK_WITHIN
    }

    /// Nothing else is known to be sent soon: the next bytes acknowledge what is placed, and request an
    /// acknowledgement if a work request waits for one.
    pub(super) fn acknowledge_now(&mut self) {
        if self.owes_ack() {
            self.ack_timing = AckTiming::Now;
        }
        self.tx.ack_requests.due |= self.ack_request_is_urgent();
    }

    /// The next bytes request an acknowledgement for messages that did not request one. Without `all`: only
    /// if a work request waits for it.
    pub(super) fn request_ack(&mut self, all: bool) {
        self.tx.ack_requests.due |= if all { self.owes_ack_request() } else { self.ack_request_is_urgent() };
    }

    /// Acknowledges all that is placed with the next bytes, requested or not: the stream is about to end.
    pub(super) fn ack_everything(&mut self) {
        self.requested_to = self.placed;
        self.ack_timing = AckTiming::Now;
    }

    /// The same for all messages so far, relaxed or not.
    pub(super) fn request_every_ack(&mut self) {
        self.tx.ack_requests.needed = self.tx.messages;
        self.request_ack(true);
    }

    /// Whether an acknowledgement or a request waits for a time, not for room in the lower layer.
    pub(super) fn ack_waits(&self) -> bool {
        (self.ack_timing != AckTiming::Now && self.owes_ack())
            || (!self.tx.ack_requests.due && self.owes_ack_request())
    }

    /// A poll found nothing: the program has nothing to send at present. `unpolled`: completions of its
    /// messages that wait to be polled. What is due is sent by the next [`super::RcCore::build`], unless the
    /// program is likely to answer in a moment. Returns whether anything is due.
    #[inline]
    pub(super) fn polled_in_vain(&mut self, unpolled: u32) -> bool {
        let mut due = false;
        if self.ack_timing != AckTiming::Now && self.owes_ack() {
            due = self.ack_timing == AckTiming::Drained || self.hold.expires();
            if due {
                self.ack_timing = AckTiming::Now;
            }
        } else {
            self.hold.idle();
        }
        // Completions may wait in another queue.
        if !self.tx.ack_requests.due && u64::from(unpolled) < REQUEST_EVERY && self.ack_request_is_urgent() {
            self.tx.ack_requests.due = true;
            due = true;
        }
        due
    }

    /// Acknowledges placed messages, if it is time. `rides`: something else is sent along.
    pub(super) fn emit_ack(&mut self, rides: bool) {
        if self.ack_is_due(rides) {
            self.emit_ack_now(0);
        }
    }

    #[inline]
    pub(super) fn ack_is_due(&self, rides: bool) -> bool {
        if self.params.placement_acks {
            self.owes_ack()
                && (rides
                    || match self.ack_timing {
                        AckTiming::Rides => false,
                        // While the peer is in the middle of a message, it does not need the acknowledgement.
                        AckTiming::Drained => {
                            (self.direct.is_none() && !self.write_continues) || self.ack_is_urgent()
                        }
                        AckTiming::Now => true,
                    })
        } else {
            self.params.peer_is_uwarp
                && self.opening.may_send()
                && self.placed - self.placed_acked >= ACK_EVERY
        }
    }

    pub(super) fn emit_ack_now(&mut self, control: u8) {
        self.emit_ack_frame(control, 0);
    }

    /// `said`: what it says beside the number of messages.
    fn emit_ack_frame(&mut self, control: u8, said: u32) {
        self.placed_acked = self.placed;
        self.ack_timing = AckTiming::Rides;
        if self.params.link.counts && (control, said) == (0, 0) && self.tx.rnr_retry.is_none() {
            // The lower layer carries the number.
            return;
        }
        self.tx.ack_msn = self.tx.ack_msn.wrapping_add(1);
        let retries = self.tx.rnr_retry.take().map_or(0, |retries| UWARP_RNR_RETRY | u32::from(retries));
        let message = Message::Untagged {
            opcode: Opcode::UwarpAck,
            qn: QN_UWARP_ACK,
            msn: self.tx.ack_msn,
            invalidate: retries | said,
        };
        let taken = self.out.taken();
        self.tx.acks_queued.retain(|end| *end > taken);
        let bytes = Ack { completed: self.placed }.to_bytes();
        let mut segment = message.whole(Ack::LEN as u32);
        segment.header.set_rsvdulp(control);
        self.emit_bytes(&segment, &bytes);
        self.tx.acks_queued.push(self.out.queued());
    }

    /// Bytes that were queued are not sent after all: the next acknowledgement gets the number of the first
    /// one among them.
    pub(super) fn unsend_acks(&mut self) {
        let queued = self.out.queued();
        let before = self.tx.acks_queued.len();
        self.tx.acks_queued.retain(|end| *end <= queued);
        let dropped = u32::try_from(before - self.tx.acks_queued.len()).unwrap_or(0);
        self.tx.ack_msn = self.tx.ack_msn.wrapping_sub(dropped);
        if dropped > 0 {
            // What they said must be said again.
            self.placed_acked = 0;
        }
    }

    /// Tells the peer how often our Sends are to be retried, before the first of them.
    pub(super) fn emit_rnr_retry(&mut self) {
        if self.tx.rnr_retry.is_some() && self.params.peer_is_uwarp {
            self.emit_ack_now(0);
        }
    }

    /// The control bits of the message that is cut next, of `total` bytes: whether it requests an
    /// acknowledgement.
    pub(super) fn ack_request_for(&mut self, total: u32, policy: AckPolicy) -> u8 {
        let Tx { messages, ack_requests, .. } = &mut self.tx;
        let requests = self.params.placement_acks
            && ack_requests.request(*messages, total, policy, self.acked, self.placed);
        if requests { UWARP_REQUEST_ACK } else { 0 }
    }

    /// Whether the last messages did not request an acknowledgement; one must be requested unless others
    /// follow.
    pub(super) fn owes_ack_request(&self) -> bool {
        self.params.placement_acks
            && self.tx.ack_requests.needed > self.acked
            && self.tx.ack_requests.last <= self.acked
            && self.closing.is_none()
    }

    /// Whether messages whose completion may come late are in flight, and nothing has requested it.
    pub(super) fn has_relaxed(&self) -> bool {
        self.params.placement_acks && self.tx.messages > self.tx.ack_requests.needed.max(self.acked)
    }

    /// Whether, in addition, the program waits for one of them.
    pub(super) fn ack_request_is_urgent(&self) -> bool {
        self.tx.ack_requests.signaled_since > 0 && self.owes_ack_request()
    }

    /// Whether work requests wait for an acknowledgement.
    pub(super) fn awaits_ack(&self) -> bool {
        self.params.placement_acks && self.closing.is_none() && self.tx.messages > self.acked
    }

    /// The same, unless it cannot come soon: this end does not read, because a Send waits for a receive, or
    /// the peer's system does not answer.
    pub(super) fn expects_ack(&self) -> bool {
        self.awaits_ack() && !self.stalled && self.silence.since.is_none()
    }

    /// Requests an acknowledgement of everything that is cut, even if one is requested: the peer may hold
    /// that one back for a message to ride on, but not this one. Returns whether there is anything.
    pub(super) fn demand_ack(&mut self) -> bool {
        let awaits = self.awaits_ack() && self.opening.may_send();
        if awaits {
            self.tx.ack_requests.made(self.tx.messages);
            self.emit_ack_now(UWARP_REQUEST_ACK);
            self.look_past_waiting();
        }
        awaits
    }

    pub(super) fn emit_ack_request(&mut self) {
        if std::mem::take(&mut self.tx.ack_requests.due) && self.owes_ack_request() {
            self.tx.ack_requests.made(self.tx.messages);
            self.emit_ack_now(UWARP_REQUEST_ACK);
        }
    }

    /// Acknowledges what is placed, requested or not: a Terminate follows, or the end of the stream.
    pub(super) fn emit_all_acks(&mut self) {
        if self.params.placement_acks && self.placed > self.placed_acked && self.opening.may_send() {
            self.emit_ack_now(0);
        }
    }

    /// Acknowledges what is placed, and says that nothing else will be: this end closes the stream, and drops
    /// what arrives from now on. (A responder that has received nothing has nothing to say, and may not.)
    pub(super) fn emit_last_ack(&mut self) {
        if self.params.placement_acks && (self.opening.may_send() || self.params.initiator) {
            let answer = if self.answer == DisconnectReply::Awaited { UWARP_AWAITS_ANSWER } else { 0 };
            self.emit_ack_frame(0, UWARP_LAST_ACK | answer);
        } else {
            self.answer = DisconnectReply::None;
        }
        self.last_word_said = true;
    }
}
