//! Acknowledgements of what is placed: when the peer is told, and when it is asked (docs/adr/007, docs/adr/009).

use uwarp_proto::tx::Message;
use uwarp_wire::rdmap::{Ack, Opcode, QN_UWARP_ACK, UWARP_TELL};

use super::queues::{SendQueue, SqSlot};
use super::receive::ReadSink;
use super::{QpAttr, Stream};
use crate::wr::SendFlags;

/// Between uwarp ends, so many messages may complete before the peer has placed them, where completion does not mean placement anyway.
/// Programs with credits of their own (perftest with events) let work requests complete that then wait by the hundred in the socket,
/// and wait themselves for a completion that has been: with an adapter the queue between the two is short.
const LEAD: u64 = 192;
/// The peer is told of its placed messages in lots of this many. Less than [`LEAD`], or the last ones never complete.
const TELL_EVERY: u64 = 96;
/// Toward strangers, with so many messages that are not known to be placed the question goes out, though more are to follow.
const ASK_AFTER: u64 = 16;
/// Where completion means placement, the peer is asked to tell of one signalled message in so many, when more than that are under way.
const ASK_EVERY: u64 = 8;
/// Nobody waits for an unsignalled one, but it keeps its place in the send queue: it asks when this part of the queue's depth went out since
/// the last that did.
const ASK_OF_DEPTH: u64 = 4;
/// Of a message from this size on it is asked always.
const ASK_BYTES: u32 = 256 * 1024;

/// So many messages behind the one that it asked of the peer is told, though another is in the middle: its work requests may all be under
/// way, and nothing follows until it hears.
const TELL_BEHIND: u64 = 4;

/// Empty polls in a row for which an acknowledgement is held, at most, that could ride on what the program sends: some
/// microseconds. Libraries between verbs and programs (libfabric's ofi_rxm, MPI) poll until nothing is left before the program can answer.
const HOLD: u8 = 16;

/// How long this stream holds acknowledgements for a program that polls in vain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hold {
    /// Empty polls for which one is held at present: [`HOLD`] where the program has answered within them, less each time that it has not.
    limit: u8,
    /// Empty polls since an acknowledgement became due, or since it was let go.
    polls: u8,
    at: Held,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// None is, or what the program sends next says nothing of whether to hold one.
    No,
    Yes,
    /// It was let go after an empty poll. Should the program send something soon, it would have paid to hold it for longer.
    LetGo,
}

impl Hold {
    pub fn new() -> Self {
        Self { limit: HOLD, polls: 0, at: Held::No }
    }

    /// An acknowledgement is due.
    fn begin(&mut self) {
        (self.polls, self.at) = (0, Held::Yes);
    }

    /// Something came from the peer. What the program sends from now on may be because of that, and may have had to wait for it: two ends
    /// that wait for each other's acknowledgements must not take that for answers.
    pub fn input(&mut self) {
        if self.polls > 0 || self.at == Held::LetGo {
            self.at = Held::No;
        }
    }

    /// The program has polled in vain while one is due. Says whether to hold it no more.
    fn expires(&mut self) -> bool {
        self.polls = self.polls.saturating_add(1);
        if self.polls <= self.limit {
            return false;
        }
        self.limit /= 2;
        (self.polls, self.at) = (0, Held::LetGo);
        true
    }

    /// The program has polled in vain, and none is due.
    fn idle(&mut self) {
        if self.at == Held::LetGo {
            self.polls = self.polls.saturating_add(1);
        }
    }

    /// The program sends something.
    pub fn sent(&mut self) {
        if self.at == Held::LetGo && self.polls < HOLD || self.at == Held::Yes && self.polls > 0 {
            self.limit = HOLD;
        }
        self.at = Held::No;
    }
}

/// When the peer is told what is placed, where completion means placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Tell {
    /// With the next that goes out.
    Rides,
    /// As soon as no message of the peer's is in progress, and when [`TELL_BEHIND`] more are placed.
    Drained,
    /// At once.
    Now,
}

/// What bears on whether a message asks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wish {
    pub signaled: bool,
    /// Of the send queue.
    depth: u32,
}

impl Wish {
    pub fn of(slot: &SqSlot, attr: &QpAttr, sq: &SendQueue) -> Self {
        Self { signaled: attr.sq_sig_all || slot.flags.contains(SendFlags::SIGNALED), depth: sq.depth() }
    }
}

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

    /// Asks a stranger whether all messages so far are placed, if it is time: by an RDMA Read of no bytes, whose Response comes when all
    /// before it is placed (RFC 5040 section 5.5). One is under way at a time, and none where the Read of a work request asks
    /// already. `last`: nothing else follows for now.
    #[cold]
    #[inline(never)]
    pub(super) fn ask_stranger(&mut self, last: bool) {
        // It takes a place among the program's Reads. Where that has none, the peer has one all the same (see `placement_reads`).
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
            self.tell = self.tell.max(if rides { Tell::Rides } else { Tell::Drained });
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
        self.tell == Tell::Drained && self.owes_ack() && self.placed - self.asked_first >= TELL_BEHIND
    }

    /// The peer is told at once of all that is placed, whether it asked or not: the stream is about to end.
    pub(super) fn tell_all(&mut self) {
        self.asked_of = self.placed;
        self.tell = Tell::Now;
    }

    /// Something is owed that waits for a time to come, not for room in the lower layer.
    pub(super) fn ack_waits(&self) -> bool {
        (self.tell != Tell::Now && self.owes_ack()) || (!self.tx.ask && self.owes_question())
    }

    /// And that one of the two programs waits for, as far as is known.
    pub(super) fn ack_awaited(&self) -> bool {
        (self.tell != Tell::Now && self.owes_ack()) || (!self.tx.ask && self.question_presses())
    }

    /// The program has polled in vain: it has nothing to send at present. What is due goes with the next [`super::QpCore::build`], unless the
    /// program is likely to answer in a moment. Says whether anything is due.
    pub(super) fn polled_in_vain(&mut self) -> bool {
        let mut due = false;
        if self.tell != Tell::Now && self.owes_ack() {
            due = self.tell == Tell::Drained || self.hold.expires();
            if due {
                self.tell = Tell::Now;
            }
        } else {
            self.hold.idle();
        }
        if !self.tx.ask && self.question_presses() {
            self.tx.ask = true;
            due = true;
        }
        due
    }

    /// Tells the peer how many of its messages are placed, if it is time: it is when something else goes the same way.
    pub(super) fn emit_ack(&mut self, rides: bool) {
        let due = if self.params.placement_acks {
            self.owes_ack()
                && (rides
                    || match self.tell {
                        Tell::Rides => false,
                        // Whoever is in the middle of a message has no need to know.
                        Tell::Drained => {
                            (self.direct.is_none() && !self.write_continues) || self.ack_presses()
                        }
                        Tell::Now => true,
                    })
        } else {
            self.params.peer_is_uwarp && self.tx.open && self.placed - self.placed_told >= TELL_EVERY
        };
        if due {
            self.emit_ack_now(0);
        }
    }

    pub(super) fn emit_ack_now(&mut self, control: u8) {
        self.placed_told = self.placed;
        self.tell = Tell::Rides;
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

    /// Whether the peer is to tell of the message that is cut next, of `total` bytes, and remembers it: of each signalled one while few
    /// are under way, of one in some when there are many; of others seldom.
    pub(super) fn asks(&mut self, total: u32, wish: Wish) -> u8 {
        if !self.params.placement_acks {
            return 0;
        }
        let tx = &mut self.tx;
        let asks = if wish.signaled {
            tx.signaled += 1;
            tx.unasked += 1;
            let soon = tx.asked > self.acked && tx.unasked < ASK_EVERY;
            tx.signaled.saturating_sub(self.completed_signaled) <= ASK_EVERY || !soon || total >= ASK_BYTES
        } else {
            let depth = u64::from(wish.depth);
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
