//! What a queue pair's pump needs of a lower layer, whichever it is.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;

/// Bytes at an address, laid out like the system's `iovec`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    pub(crate) addr: *mut core::ffi::c_void,
    pub(crate) len: usize,
}

impl Piece {
    /// `len` bytes at virtual address `addr` of this process.
    pub fn new(addr: u64, len: usize) -> Self {
        Self { addr: std::ptr::with_exposed_provenance_mut(addr as usize), len }
    }

    /// Its virtual address.
    pub fn addr(&self) -> u64 {
        self.addr.expose_provenance() as u64
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// What one receive brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Bytes in all; 0 is the end of the stream.
    pub bytes: usize,
    /// There was room for more, so the lower layer has no more now, unless the stream ended behind these bytes.
    pub short: bool,
}

/// How the peer's system answers what was sent to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answers {
    /// Nothing waits for an answer.
    pub all: bool,
    /// All that was sent is answered, and more waits to be sent: the peer takes no more for now.
    pub held: bool,
    /// What was sent has been repeated, and repeated probes of a closed window are without answer: the peer may be gone.
    pub doubtful: bool,
    /// How long ago the last answer of any kind came; to the millisecond.
    pub last: Duration,
}

/// A reliable stream of bytes in both directions, as far as a queue pair needs one. No call blocks.
///
/// Errors: `AGAIN`, no room or no bytes; `INTR`, call again; `FAULT`, memory is not mapped. Any other error ends that
/// direction for good.
pub trait LowerLayer {
    /// Sends bytes in order; returns how many were taken.
    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Errno>;

    /// Sends pieces in order; returns how many bytes were taken. On `FAULT`, none were.
    fn send(&mut self, pieces: &[Piece]) -> Result<usize, Errno>;

    /// Receives into `buffer`, which is not empty.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Errno>;

    /// Receives into the pieces first, then into `buffer`. Bytes may go into a part of the pieces only; behind them only
    /// when all pieces are full.
    fn receive_scattered(&mut self, pieces: &[Piece], buffer: &mut [u8]) -> Result<Received, Errno>;

    /// Whether the peer has closed its side, or the link is broken. A look, for those who were not told in time.
    fn hung_up(&self) -> bool;

    /// Whether the link is broken, though bytes that came before that may still wait to be received.
    fn broken(&self) -> bool;

    /// How the peer's system answers; `None` if that is not known.
    fn answers(&self) -> Option<Answers>;

    /// Has the lower layer probe a peer from which nothing comes for a while.
    fn probe_when_quiet(&self);

    /// The peer's address, for messages.
    fn peer(&self) -> Option<SocketAddr>;
}
