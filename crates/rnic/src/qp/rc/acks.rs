//! Acknowledgements of what is placed: when the peer is told, and when it is asked (docs/adr/007,
//! docs/adr/009).

use uwarp_proto::tx::Message;
use uwarp_wire::rdmap::{Ack, Opcode, QN_UWARP_ACK, UWARP_TELL};

use super::ack_policy::{AckPolicy, AckTiming};
use super::reads::ReadSink;
use super::stream::Stream;

/// Between uwarp ends, so many messages may complete before the peer has placed them, where completion does
/// not mean placement anyway. Programs with credits of their own (perftest with events) let work requests
/// complete that then wait by the hundred in the socket, and wait themselves for a completion that has been:
/// with an adapter the queue between the two is short.
const LEAD: u64 = 192;
/// The peer is told of its placed messages in lots of this many. Less than [`LEAD`], or the last ones never
/// complete.
const TELL_EVERY: u64 = 96;
/// Toward strangers, with so many messages that are not known to be placed the question goes out, though more
/// are to follow.
const ASK_AFTER: u64 = 16;
/// Where completion means placement, the peer is asked to tell of one signalled message in so many, when more
/// than that are under way, or have completions that the program has yet to poll.
const ASK_EVERY: u64 = 8;
/// Nobody waits for an unsignalled one, but it keeps its place in the send queue: it asks when this part of
/// the queue's depth went out since the last that did.
const ASK_OF_DEPTH: u64 = 4;
/// Of a message from this size on it is asked always.
const ASK_BYTES: u32 = 256 * 1024;

/// So many messages behind the one that it asked of the peer is told, though another is in the middle: its
/// work requests may all be under way, and nothing follows until it hears.
const TELL_BEHIND: u64 = 4;

impl Stream {
    /// The last message whose work request may complete once the lower layer has taken it.
    pub(super) fn completes_to(&self) -> u64 {
        match (self.params.peer_is_uwarp, self.params.placement_acks) {
            // Strangers do not tell what is placed; they can be asked.
            (false, _) if self.asks_strangers() => self.acked,
            (false, _) => u64::MAX,
            (true, true) => self.acked,
            (true, false) => self.acked.saturating_add(LEAD),
        }
    }

    /// Whether a stranger is asked for what is placed.
    pub(super) fn asks_strangers(&self) -> bool {
        self.params.placement_reads && !self.params.peer_is_uwarp
    }

    /// Asks a stranger whether all messages so far are placed, if it is time: by an RDMA Read of no bytes,
    /// whose Response comes when all before it is placed (RFC 5040 section 5.5). One is under way at a time,
    /// and none where the Read of a work request asks already. `last`: nothing else follows for now.
    #[cold]
    #[inline(never)]
    pub(super) fn ask_stranger(&mut self, last: bool) {
        // It takes a place among the program's Reads. Where that has none, the peer has one all the same (see
        // `placement_reads`).
        if !self.asks_strangers() || self.reads.len() >= usize::from(self.params.ord.max(1)) {
            return;
        }
        let asked = self.reads.iter().map(|read| read.behind).max().unwrap_or(0).max(self.acked);
        let new = self.tx.messages.saturating_sub(asked);
        let enough = if last { 1 } else { ASK_AFTER };
        if new < enough || self.reads.iter().any(|read| read.slot.is_none()) {
            return;
        }
        self.emit_empty_read();
        self.look_past_waiting();
    }

    /// The Response to a Read is whole: messages before its request are placed.
    pub(super) fn read_answered(&mut self, read: &ReadSink) {
        self.acked = self.acked.max(read.behind);
    }

    /// Messages of the peer's are placed, and it `asks` to be told.
    pub(super) fn count_placed(&mut self, messages: u64, asks: bool) {
        self.placed += messages;
        self.hold.input();
        if asks {
            if self.asked_of <= self.placed_told {
                self.asked_first = self.placed;
                self.hold.begin();
            }
            self.asked_of = self.placed;
            let rides = std::mem::take(&mut self.answered);
            self.tell = self.tell.max(if rides { AckTiming::Rides } else { AckTiming::Drained });
        }
    }

    /// The peer waits to hear what is placed.
    pub(super) fn owes_ack(&self) -> bool {
        // What it asked may stand behind a Send that waits for a receive.
        let of = if self.stalled || !self.aside.is_empty() { self.placed } else { self.asked_of };
        self.params.placement_acks && of > self.placed_told && self.tx.open && self.closing.is_none()
    }

    /// It waits longer than it should: receiving is to be interrupted for it.
    pub(super) fn ack_presses(&self) -> bool {
        self.tell == AckTiming::Drained && self.owes_ack() && self.placed - self.asked_first >= TELL_BEHIND
    }

    /// Nothing is known to go out soon: the next bytes tell the peer what is placed, and ask it if a work
    /// request waits for that.
    pub(super) fn tell_placed(&mut self) {
        if self.owes_ack() {
            self.tell = AckTiming::Now;
        }
        self.tx.ask |= self.question_presses();
    }

    /// The next bytes ask what the peer has placed of what it was not asked about; of what no work request
    /// waits for, only with `all`.
    pub(super) fn request_ack(&mut self, all: bool) {
        self.tx.ask |= if all { self.owes_question() } else { self.question_presses() };
    }

    /// The peer is told at once of all that is placed, whether it asked or not: the stream is about to end.
    pub(super) fn ack_everything(&mut self) {
        self.asked_of = self.placed;
        self.tell = AckTiming::Now;
    }

    /// Something is owed that waits for a time to come, not for room in the lower layer.
    pub(super) fn ack_waits(&self) -> bool {
        (self.tell != AckTiming::Now && self.owes_ack()) || (!self.tx.ask && self.owes_question())
    }

    /// The program has polled in vain: it has nothing to send at present, and so many completions of its
    /// messages are there. What is due goes with the next [`super::RcCore::build`], unless the program is
    /// likely to answer in a moment. Says whether anything is due.
    pub(super) fn polled_in_vain(&mut self, unpolled: u32) -> bool {
        let mut due = false;
        if self.tell != AckTiming::Now && self.owes_ack() {
            due = self.tell == AckTiming::Drained || self.hold.expires();
            if due {
                self.tell = AckTiming::Now;
            }
        } else {
            self.hold.idle();
        }
        // Completions may wait in another queue.
        if !self.tx.ask && u64::from(unpolled) < ASK_EVERY && self.question_presses() {
            self.tx.ask = true;
            due = true;
        }
        due
    }

    /// Tells the peer how many of its messages are placed, if it is time: it is when something else goes the
    /// same way.
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
                    || match self.tell {
                        AckTiming::Rides => false,
                        // Whoever is in the middle of a message has no need to know.
                        AckTiming::Drained => {
                            (self.direct.is_none() && !self.write_continues) || self.ack_presses()
                        }
                        AckTiming::Now => true,
                    })
        } else {
            self.params.peer_is_uwarp && self.tx.open && self.placed - self.placed_told >= TELL_EVERY
        }
    }

    pub(super) fn emit_ack_now(&mut self, control: u8) {
        self.placed_told = self.placed;
        self.tell = AckTiming::Rides;
        self.tx.ack_msn = self.tx.ack_msn.wrapping_add(1);
        let message = Message::Untagged {
            opcode: Opcode::UwarpAck,
            qn: QN_UWARP_ACK,
            msn: self.tx.ack_msn,
            invalidate: 0,
        };
        let bytes = Ack { completed: self.placed }.to_bytes();
        let mut segment = message.whole(Ack::LEN as u32);
        segment.header.set_rsvdulp(control);
        self.emit_bytes(&segment, &bytes);
    }

    /// Whether the peer is to tell of the message that is cut next, of `total` bytes, and remembers it: of
    /// each signalled one while few are under way, of one in some when there are many or the program has
    /// others to poll; of unsignalled ones seldom.
    pub(super) fn asks(&mut self, total: u32, wish: AckPolicy) -> u8 {
        if !self.params.placement_acks {
            return 0;
        }
        let tx = &mut self.tx;
        let depth = u64::from(wish.depth);
        let asks = if wish.signaled {
            tx.signaled += 1;
            tx.unasked += 1;
            let unpolled = if tx.messages - tx.unsignaled_at < depth { 0 } else { u64::from(wish.unpolled) };
            // Where the peer sends something in between, its acknowledgement most likely rides on that.
            let heard = std::mem::replace(&mut tx.heard, self.placed) != self.placed;
            let waits = unpolled < ASK_EVERY || heard;
            let few = tx.signaled.saturating_sub(self.completed_signaled) <= ASK_EVERY;
            let soon = !waits || tx.asked > self.acked && !few;
            tx.unasked >= ASK_EVERY || !soon || total >= ASK_BYTES
        } else {
            tx.unsignaled_at = tx.messages;
            // With a small queue, a program may take its peer's answer as a sign that there is a place.
            let gap = if depth <= 2 * ASK_EVERY { 0 } else { depth / ASK_OF_DEPTH };
            tx.messages - tx.asked.max(self.acked) >= gap
        };
        if !asks {
            return 0;
        }
        tx.asked = tx.messages + 1;
        tx.unasked = 0;
        UWARP_TELL
    }

    /// The peer was not asked to tell of the last messages, and is to be unless others follow.
    pub(super) fn owes_question(&self) -> bool {
        self.params.placement_acks
            && self.tx.messages > self.acked
            && self.tx.asked <= self.acked
            && self.closing.is_none()
    }

    /// And the program waits for one of them.
    pub(super) fn question_presses(&self) -> bool {
        self.tx.unasked > 0 && self.owes_question()
    }

    pub(super) fn emit_question(&mut self) {
        if std::mem::take(&mut self.tx.ask) && self.owes_question() {
            self.tx.asked = self.tx.messages;
            self.tx.unasked = 0;
            self.emit_ack_now(UWARP_TELL);
        }
    }

    /// Says what is placed before a Terminate, whether the peer asked or not.
    pub(super) fn emit_last_ack(&mut self) {
        if self.params.placement_acks && self.placed > self.placed_told && self.tx.open {
            self.emit_ack_now(0);
        }
    }
}
