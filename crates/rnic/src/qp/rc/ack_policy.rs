//! When placed messages are acknowledged, and when the peer is requested to acknowledge (docs/adr/009).

use crate::qp::shell::Shell;
use crate::queues::SqSlot;
use crate::wr::SendFlags;

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
