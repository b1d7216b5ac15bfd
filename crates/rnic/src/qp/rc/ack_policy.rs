//! What decides when the peer is told of placed messages, and when it is asked (docs/adr/009).

use crate::qp::shell::Shell;
use crate::queues::SqSlot;

/// Empty polls in a row for which an acknowledgement is held, at most, that could ride on what the program
/// sends: some microseconds. Libraries between verbs and programs (libfabric's ofi_rxm, MPI) poll until
/// nothing is left before the program can answer.
const HOLD: u8 = 16;

/// How long this stream holds acknowledgements for a program that polls in vain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hold {
    /// Empty polls for which one is held at present: [`HOLD`] where the program has answered within them,
    /// less each time that it has not.
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
    /// It was let go after an empty poll. Should the program send something soon, it would have paid to hold
    /// it for longer.
    LetGo,
}

impl Hold {
    pub fn new() -> Self {
        Self { limit: HOLD, polls: 0, at: Held::No }
    }

    /// An acknowledgement is due.
    pub fn begin(&mut self) {
        (self.polls, self.at) = (0, Held::Yes);
    }

    /// Something came from the peer. What the program sends from now on may be because of that, and may have
    /// had to wait for it: two ends that wait for each other's acknowledgements must not take that for
    /// answers.
    pub fn input(&mut self) {
        if self.polls > 0 || self.at == Held::LetGo {
            self.at = Held::No;
        }
    }

    /// The program has polled in vain while one is due. Says whether to hold it no more.
    pub fn expires(&mut self) -> bool {
        self.polls = self.polls.saturating_add(1);
        if self.polls <= self.limit {
            return false;
        }
        self.limit /= 2;
        (self.polls, self.at) = (0, Held::LetGo);
        true
    }

    /// The program has polled in vain, and none is due.
    pub fn idle(&mut self) {
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
pub(super) enum AckTiming {
    /// With the next that goes out.
    Rides,
    /// As soon as no message of the peer's is in progress, and when [`TELL_BEHIND`] more are placed.
    Drained,
    /// At once.
    Now,
}

/// What bears on whether a message asks.
#[derive(Debug, Clone, Copy)]
pub(super) struct AckPolicy {
    pub signaled: bool,
    /// Of the send queue.
    pub depth: u32,
    /// Its completions that the program has yet to poll, if it has asked for one of each work request.
    pub unpolled: u32,
}

impl AckPolicy {
    pub fn of(slot: &SqSlot, shell: &Shell) -> Self {
        Self { signaled: shell.signals(slot.flags), depth: shell.sq.depth(), unpolled: shell.sq.unpolled() }
    }
}
