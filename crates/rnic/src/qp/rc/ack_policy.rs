//! When placed messages are acknowledged, and when the peer is requested to acknowledge (docs/adr/009).

use crate::qp::shell::Shell;
use crate::queues::SqSlot;
use crate::wr::SendFlags;

/// Where completion means placement: one signalled message in this many requests an acknowledgement, if more
/// than this many are in flight or have completions that the program has not polled yet.
pub(super) const REQUEST_EVERY: u64 = 8;
/// No completion waits for an unsignalled message, but it keeps its place in the send queue. It requests an
/// acknowledgement when this part of the queue's depth was sent since the last request.
const REQUESTS_PER_DEPTH: u64 = 4;
/// A message of at least this size always requests an acknowledgement.
const REQUEST_BYTES: u32 = 256 * 1024;

/// Largest number of empty polls in a row for which an acknowledgement is held because it could ride on what
/// the program sends: some microseconds. Libraries between verbs and programs (libfabric's ofi_rxm, MPI) poll
/// until nothing is left before the program can answer.
const HOLD: u8 = 16;

/// How long this stream holds acknowledgements while the program's polls find nothing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hold {
    /// Empty polls for which one is held at present: [`HOLD`] if the program has answered within them; halved
    /// each time it has not.
    limit: u8,
    /// Empty polls since an acknowledgement became due, or since it was released.
    polls: u8,
    at: Held,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Held {
    /// None is held, or the program's next message does not show whether holding pays.
    No,
    Yes,
    /// It was released after an empty poll. If the program sends something soon, holding it longer would have
    /// paid.
    Released,
}

impl Hold {
    pub fn new() -> Self {
        Self { limit: HOLD, polls: 0, at: Held::No }
    }

    /// An acknowledgement is due.
    pub fn begin(&mut self) {
        (self.polls, self.at) = (0, Held::Yes);
    }

    /// Something arrived from the peer. What the program sends from now on may be an answer to that, and may
    /// have waited for it: two ends that wait for each other's acknowledgements must not take these for
    /// answers.
    pub fn input(&mut self) {
        if self.polls > 0 || self.at == Held::Released {
            self.at = Held::No;
        }
    }

    /// A poll found nothing while one is due. Returns whether to stop holding it.
    pub fn expires(&mut self) -> bool {
        self.polls = self.polls.saturating_add(1);
        if self.polls <= self.limit {
            return false;
        }
        self.limit /= 2;
        (self.polls, self.at) = (0, Held::Released);
        true
    }

    /// A poll found nothing, and none is due.
    pub fn idle(&mut self) {
        if self.at == Held::Released {
            self.polls = self.polls.saturating_add(1);
        }
    }

    /// The program sends something.
    pub fn sent(&mut self) {
        if self.at == Held::Released && self.polls < HOLD || self.at == Held::Yes && self.polls > 0 {
            self.limit = HOLD;
        }
        self.at = Held::No;
    }
}

/// When placed messages are acknowledged, where completion means placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum AckTiming {
    /// With the next bytes that are sent.
    Rides,
    /// As soon as no message of the peer is in progress, and when [`ACK_WITHIN`](super::acks::ACK_WITHIN)
    /// more are placed.
    Drained,
    /// At once.
    Now,
}

/// Which messages of this end have requested an acknowledgement, and which need one. Messages are numbered
/// from 1 as they are cut.
#[derive(Debug, Default)]
pub(super) struct AckRequests {
    /// The last message that has requested one.
    pub last: u64,
    /// The last message that needs one: its completion, or that of a later work request, must not come late.
    pub needed: u64,
    /// Signalled messages.
    signaled: u64,
    /// Those of them that have completed.
    pub signaled_completed: u64,
    /// Those of them since the last request: the program waits for their completions.
    pub signaled_since: u64,
    /// The last message that was not signalled.
    unsignaled: u64,
    /// Messages of the peer that were placed when the last signalled one was cut.
    placed_at_signaled: u64,
    /// The next bytes must request one, in a frame of its own.
    pub due: bool,
}

impl AckRequests {
    /// Whether the message behind `messages`, of `total` bytes, requests an acknowledgement. Each signalled
    /// message does while few are in flight; one in some when there are many, or when the program has others
    /// to poll; unsignalled ones seldom. Remembers the request. `acked`, `placed`: messages of this end that
    /// the peer has acknowledged, and messages of the peer that are placed.
    #[inline]
    pub fn request(&mut self, messages: u64, total: u32, policy: AckPolicy, acked: u64, placed: u64) -> bool {
        if policy.relaxed {
            self.signaled += u64::from(policy.signaled);
            return false;
        }
        self.needed = messages + 1;
        let depth = u64::from(policy.depth);
        let requests = if policy.signaled {
            self.signaled += 1;
            self.signaled_since += 1;
            let unpolled = if messages - self.unsignaled < depth { 0 } else { u64::from(policy.unpolled) };
            // If the peer sends messages in between, its acknowledgement most likely rides on one of them.
            let answered = std::mem::replace(&mut self.placed_at_signaled, placed) != placed;
            let waits = unpolled < REQUEST_EVERY || answered;
            let few = self.signaled.saturating_sub(self.signaled_completed) <= REQUEST_EVERY;
            let soon = !waits || self.last > acked && !few;
            self.signaled_since >= REQUEST_EVERY || !soon || total >= REQUEST_BYTES
        } else {
            self.unsignaled = messages;
            // With a small queue, a program may take its peer's answer as a sign that there is a free place.
            let gap = if depth <= 2 * REQUEST_EVERY { 0 } else { depth / REQUESTS_PER_DEPTH };
            messages - self.last.max(acked) >= gap
        };
        if requests {
            self.made(messages + 1);
        }
        requests
    }

    /// Everything up to the message `last` is requested.
    pub fn made(&mut self, last: u64) {
        self.last = last;
        self.signaled_since = 0;
    }
}

/// What decides whether a message requests an acknowledgement.
#[derive(Debug, Clone, Copy)]
pub(super) struct AckPolicy {
    pub signaled: bool,
    /// The completion may come late.
    pub relaxed: bool,
    /// Depth of the send queue.
    pub depth: u32,
    /// Completions of the send queue that the program has not polled yet, if it requested one for each work
    /// request.
    pub unpolled: u32,
}

impl AckPolicy {
    pub fn of(slot: &SqSlot, shell: &Shell) -> Self {
        Self {
            signaled: shell.signals(slot.flags),
            relaxed: slot.flags.contains(SendFlags::RELAXED),
            depth: shell.sq.depth(),
            unpolled: shell.sq.unpolled(),
        }
    }
}
