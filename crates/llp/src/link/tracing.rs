//! A lower layer for tests that records its calls.

use std::net::SocketAddr;

use uwarp_mem::MemSeg;

use crate::lower::{Answers, Caps, Ended, LowerLayer, Received, Stop};

/// One call that moves bytes, with its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// Bytes in one run, or pieces.
    Send {
        /// Bytes that were offered.
        offered: usize,
        /// Bytes that were taken.
        result: Result<usize, Stop>,
    },
    /// Into a buffer, or into pieces and a buffer.
    Receive {
        /// Room in memory that the owner named, in bytes.
        direct: usize,
        /// Room in the owner's buffer, in bytes.
        staged: usize,
        /// Bytes that were received.
        result: Result<usize, Stop>,
    },
}

/// Keeps a list of all calls that move bytes.
#[derive(Debug)]
pub struct Tracing<L> {
    inner: L,
    calls: Vec<Call>,
}

impl<L> Tracing<L> {
    /// Wraps `inner`.
    pub fn new(inner: L) -> Self {
        Self { inner, calls: Vec::new() }
    }

    /// The calls since the last call of this function.
    pub fn take_calls(&mut self) -> Vec<Call> {
        std::mem::take(&mut self.calls)
    }

    /// The lower layer inside.
    pub fn inner(&self) -> &L {
        &self.inner
    }
}

fn bytes_of(pieces: &[MemSeg]) -> usize {
    pieces.iter().map(|piece| piece.len).sum()
}

impl<L: LowerLayer> LowerLayer for Tracing<L> {
    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Stop> {
        let result = self.inner.send_bytes(bytes);
        self.calls.push(Call::Send { offered: bytes.len(), result });
        result
    }

    fn send(&mut self, pieces: &[MemSeg], stays: u64) -> Result<usize, Stop> {
        let result = self.inner.send(pieces, stays);
        self.calls.push(Call::Send { offered: bytes_of(pieces), result });
        result
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Stop> {
        let staged = buffer.len();
        let result = self.inner.receive(buffer);
        self.calls.push(Call::Receive { direct: 0, staged, result: result.map(|r| r.bytes) });
        result
    }

    fn receive_scattered(&mut self, pieces: &[MemSeg], buffer: &mut [u8]) -> Result<Received, Stop> {
        let staged = buffer.len();
        let result = self.inner.receive_scattered(pieces, buffer);
        let direct = bytes_of(pieces);
        self.calls.push(Call::Receive { direct, staged, result: result.map(|r| r.bytes) });
        result
    }

    pass_on_queries!();
}
