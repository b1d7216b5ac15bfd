//! What a queue pair's pump needs from any lower layer.

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

/// What a lower layer can do, or needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caps {
    /// [`LowerLayer::answers`] returns something.
    pub answers: bool,
    /// Only the system knows what it waits for: input, room, the end. Otherwise a look at memory finds it.
    pub needs_system: bool,
}

/// A reliable stream of bytes in both directions, with what a queue pair needs of it. No call blocks, and
/// none has to be repeated because of a signal.
pub trait LowerLayer {
    /// What it can do; the same as long as it lives.
    fn caps(&self) -> Caps;

    /// Sends bytes in order; returns how many were taken.
    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Stop>;

    /// Sends pieces in order; returns how many bytes were taken. If a piece is not mapped, none may have
    /// been.
    fn send(&mut self, pieces: &[MemSeg]) -> Result<usize, Stop>;

    /// Receives into `buffer`, which is not empty.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Stop>;

    /// Receives into the pieces first, then into `buffer`. It may fill only a part of the pieces; `buffer`
    /// gets bytes only when all pieces are full.
    fn receive_scattered(&mut self, pieces: &[MemSeg], buffer: &mut [u8]) -> Result<Received, Stop>;

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
