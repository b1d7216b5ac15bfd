//! Streams through memory that two processes of one host share.
//!
//! ```text
//!   process A                         slab (a memfd of the pair)                      process B
//!   Lane ─ ring of A's bytes ─────────▶ 64 lanes: 2 lines, 2 rings each ──────────────▶ Lane
//!        ─ line: tail head placed want ▶                                ◀─ line ─
//!        ─ bit of the lane in B's ready word, then B's board: does a thread sleep? ─▶ bell (an eventfd)
//! ```
//!
//! A [`slab`] has 64 [`lane`]s. Each end of a lane writes bytes into a ring of its own, and what it says into
//! a line of its own ([`ledger`]). Who has said something new sets the lane's bit in the peer's ready word;
//! if a thread of the peer's sleeps, which its [`board`] shows, it rings the peer's [`bell`].
//!
//! [`datagrams`] go through lanes of slabs of their own, and the rings have records then.
//!
//! The peer is a process that may do anything to this memory: each word is copied, then checked, and bytes
//! are only copied. What it can spoil is its own streams.
//!
//! Rejected: one ring for all queue pairs of two processes, because one receiver that stands still would
//! block all; a memfd for each queue pair, because of descriptors and of something that must say which has
//! news; headers of records in the ring, because a plain stream of bytes says all that the stream's frames
//! say already, and headers would be one more thing to believe.

pub mod bell;
pub mod board;
pub mod datagrams;
pub mod lane;
pub mod ledger;
pub mod pair;
pub mod slab;

/// Which end of a lane. The end that has connected makes the slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// It has connected.
    Initiator,
    /// It has accepted.
    Responder,
    /// Both: the stream leads from a queue pair to itself, so what it writes and says is for this end.
    Both,
}

impl Side {
    /// The other one.
    pub fn peer(self) -> Self {
        match self {
            Self::Initiator => Self::Responder,
            Self::Responder => Self::Initiator,
            Self::Both => Self::Both,
        }
    }

    pub(crate) fn index(self) -> usize {
        usize::from(self == Self::Responder)
    }
}
