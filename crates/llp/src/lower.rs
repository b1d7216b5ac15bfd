//! What a queue pair's pump needs from any lower layer.
//!
//! All of them are streams of bytes. [`Caps`] says what one does beside that, and TCP does none of it:
//!
//! * It *counts*: each end says how many messages it has placed, beside the stream. No frame acknowledges
//!   then, and what the count says after the peer's death is exact.
//! * It *refers*: it takes registered memory without a copy, and releases it later. A work request completes
//!   when its memory is released. Where memory goes back to the program for another reason (a flush, RESET,
//!   the end of the stream), the owner recalls it first: recall, released, completions.
//! * It shows a turn's bytes at its end, in one step ([`LowerLayer::flush`]).
//!
//! `caps` is a constant of each lower layer, so all that costs TCP nothing. `crates/driver/tests/lanes.rs`
//! has a lower layer that does all of it.
//!
//! Checked on paper for streams over reliable datagrams, many of them on one socket: the socket is one source
//! of the engine; it hands packets to their streams and raises these (`Watch::Itself`). Such a stream needs
//! the system all the same, because a look at memory receives nothing. Its room is its window. What it has
//! sent it keeps until that is acknowledged, so it copies, or it refers. `answers` and `unacknowledged` come
//! from its own retransmission. Nothing is missing here for that; what is, is a fair order among the streams
//! of a socket, which is its own affair.
//!
//! Rejected: staging buffers of the owner that stay until they are released, because they are small, hot and
//! used again at once; a lower layer that copies them needs only to be told which pieces they are.

use std::net::SocketAddr;
use std::time::Duration;

use uwarp_mem::MemSeg;

/// Result of one receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Bytes in all, at least one.
    pub bytes: usize,
    /// The lower layer has no more now, unless the stream ended after these bytes.
    pub drained: bool,
}

/// Why a call moved nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// No room, or no bytes. The lower layer reports when that changes.
    Later,
    /// A piece of memory is not mapped, or not with the rights that this needs.
    Unmapped,
    /// This direction has ended for good.
    Ended(Ended),
}

/// How a stream has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The peer has ended it in order. For a receive: all that it sent has been received.
    Closed,
    /// The stream is broken, usually because the peer has reset it.
    Broken,
    /// The system has given up a peer that does not answer.
    Silent,
}

/// How the peer's system answers what was sent to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answers {
    /// Nothing waits for an answer.
    pub all: bool,
    /// Everything that was sent is answered, and more waits to be sent: the peer accepts no more for now.
    pub held: bool,
    /// Bytes were retransmitted, or repeated probes of a closed window got no answer: the peer may be gone.
    pub doubtful: bool,
    /// Time since the last answer of any kind, to the millisecond.
    pub last: Duration,
}

/// How many messages of the other end, from the stream's start on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Acknowledged: not sooner than that is due, so that an answer may come with it.
    pub acked: u64,
    /// In place. It counts when their end is gone, and acknowledges no more.
    pub placed: u64,
}

/// What a lower layer can do, or needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caps {
    /// [`LowerLayer::answers`] returns something.
    pub answers: bool,
    /// Only the system knows what it waits for: input, room, the end. Otherwise a look at memory finds it.
    pub needs_system: bool,
    /// The ends count messages beside the stream: [`LowerLayer::flush`], [`LowerLayer::peer_received`].
    pub counts: bool,
    /// It may refer to pieces of memory that it has taken: [`LowerLayer::released`].
    pub refers: bool,
}

impl Caps {
    /// Those of TCP.
    pub const TCP: Self = Self { answers: true, needs_system: true, counts: false, refers: false };

    /// Those of a stream of reliable datagrams.
    pub const STREAM: Self = Self { answers: true, needs_system: true, counts: false, refers: false };

    /// Those of a lane in memory. A process of this host is there, or its connection ends, so its answers say
    /// only what its program has not taken.
    pub const MEMORY: Self = Self { answers: true, needs_system: false, counts: true, refers: false };
}

/// A reliable stream of bytes in both directions, with what a queue pair needs of it. No call blocks, and
/// none has to be repeated because of a signal.
pub trait LowerLayer {
    /// What it can do; the same as long as it lives.
    fn caps(&self) -> Caps;

    /// Sends bytes in order; returns how many were taken.
    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Stop>;

    /// Sends pieces in order; returns how many bytes were taken. If a piece is not mapped, none may have
    /// been. A bit is set in `stays` for each of the first 64 pieces that stays as it is until it is
    /// released: the lower layer may refer to that one, and must copy the others.
    fn send(&mut self, pieces: &[MemSeg], stays: u64) -> Result<usize, Stop>;

    /// Receives into `buffer`, which is not empty.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Stop>;

    /// Receives into the pieces first, then into `buffer`. It may fill only a part of the pieces; `buffer`
    /// gets bytes only when all pieces are full.
    fn receive_scattered(&mut self, pieces: &[MemSeg], buffer: &mut [u8]) -> Result<Received, Stop>;

    /// The end of a turn in which bytes were moved: what the peer may see of it now, it sees. `wanted`: the
    /// owner waits for the peer to acknowledge so many messages. Returns whether that may have happened
    /// before the peer knew: the owner looks once more.
    fn flush(&mut self, _received: Counts, _wanted: u64) -> bool {
        false
    }

    /// Within a turn: so many messages of the other end are in place, and more comes. Of a process that is
    /// killed later in this turn, that counts.
    fn count_placed(&mut self, _placed: u64) {}

    /// Whether a look at it may find anything: bytes, an end, or more than `acked` messages of this end
    /// acknowledged. Cheap, for a thread that polls.
    fn has_news(&self, _acked: u64) -> bool {
        true
    }

    /// What the peer says of the messages of this end; only if the ends count.
    fn peer_received(&self) -> Counts {
        Counts::default()
    }

    /// The position in the stream, in bytes taken since the start, up to which it refers to no piece any
    /// more; `None`: all that it has taken.
    fn released(&self) -> Option<u64> {
        None
    }

    /// Refers to no piece any more from now on: takes copies of what it must still send.
    fn recall(&mut self) {}

    /// Whether the peer has closed its side, or the link is broken. Bytes that arrived before may still wait
    /// to be received. A check, for callers that got no notification in time.
    fn ended(&self) -> Option<Ended>;

    /// How the peer's system answers; `None` if that is not known.
    fn answers(&self) -> Option<Answers>;

    /// Makes the lower layer probe a peer from which nothing has arrived for a while.
    fn probe_when_quiet(&self);

    /// Bytes that it has taken and not sent once.
    fn unsent(&self) -> usize;

    /// How many of the bytes that it has taken the peer's system has not acknowledged.
    fn unacknowledged(&self) -> usize;

    /// Whether a close is a reset from now on, also the one that the system does for a process that is gone.
    fn reset_on_close(&self, reset: bool);

    /// Half-closes: after all that was sent, the peer sees the end of the stream.
    fn finish(&mut self);

    /// The peer's address, for messages.
    fn peer(&self) -> Option<SocketAddr>;
}
