//! What a queue pair's pump needs from any lower layer.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;
use uwarp_mem::MemSeg;

/// Result of one receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Bytes in all; 0 is the end of the stream.
    pub bytes: usize,
    /// There was room for more, so the lower layer has no more now, unless the stream ended after these
    /// bytes.
    pub short: bool,
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

/// A reliable stream of bytes in both directions, with what a queue pair needs of it. No call blocks.
///
/// Errors: `AGAIN`, no room or no bytes; `INTR`, call again; `FAULT`, memory is not mapped. Any other error
/// ends that direction for good.
pub trait LowerLayer {
    /// Sends bytes in order; returns how many were taken.
    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Errno>;

    /// Sends pieces in order; returns how many bytes were taken. On `FAULT`, none were.
    fn send(&mut self, pieces: &[MemSeg]) -> Result<usize, Errno>;

    /// Receives into `buffer`, which is not empty.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Errno>;

    /// Receives into the pieces first, then into `buffer`. It may fill only a part of the pieces; `buffer`
    /// gets bytes only when all pieces are full.
    fn receive_scattered(&mut self, pieces: &[MemSeg], buffer: &mut [u8]) -> Result<Received, Errno>;

    /// Whether the peer has closed its side, or the link is broken. A check, for callers that got no
    /// notification in time.
    fn hung_up(&self) -> bool;

    /// Whether the link is broken. Bytes that arrived before may still wait to be received.
    fn broken(&self) -> bool;

    /// How the peer's system answers; `None` if that is not known.
    fn answers(&self) -> Option<Answers>;

    /// Makes the lower layer probe a peer from which nothing has arrived for a while.
    fn probe_when_quiet(&self);

    /// How many of the bytes that it has taken the peer's system has not acknowledged.
    fn unacknowledged(&self) -> usize;

    /// Whether a close is a reset from now on, also the one that the system does for a process that is gone.
    fn reset_on_close(&self, reset: bool);

    /// The peer's address, for messages.
    fn peer(&self) -> Option<SocketAddr>;
}
