//! A lower layer for tests that misbehaves as far as its contract allows.

use std::net::SocketAddr;

use uwarp_mem::MemSeg;

use crate::lower::{Answers, Caps, Ended, LowerLayer, Received, Stop};

/// Shortens sends and receives, and refuses calls, depending on the seed. All of that may
/// happen on any system at any time, so a queue pair must work as before.
#[derive(Debug)]
pub struct Faulty<L> {
    inner: L,
    /// The next choices, from the lowest bits on; changed after each.
    seed: u64,
}

impl<L> Faulty<L> {
    /// Wraps `inner`; `seed` decides what happens when.
    pub fn new(inner: L, seed: u64) -> Self {
        Self { inner, seed: seed | 1 }
    }

    /// The lower layer inside.
    pub fn inner(&self) -> &L {
        &self.inner
    }

    fn choose(&mut self, of: u64) -> u64 {
        // xorshift64: enough for choices.
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed % of
    }

    /// Refuses one call in eight: there is no room, or there are no bytes.
    fn refuse(&mut self) -> Result<(), Stop> {
        if self.choose(8) == 0 { Err(Stop::Later) } else { Ok(()) }
    }

    /// Of `len` bytes, how many one call may move: all of them in two calls of three.
    fn part(&mut self, len: usize) -> usize {
        if self.choose(3) > 0 || len < 2 {
            return len;
        }
        let most = u64::try_from(len).unwrap_or(u64::MAX);
        usize::try_from(1 + self.choose(most - 1)).unwrap_or(len)
    }
}

impl<L: LowerLayer> LowerLayer for Faulty<L> {
    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Stop> {
        self.refuse()?;
        let part = self.part(bytes.len());
        self.inner.send_bytes(bytes.get(..part).unwrap_or(bytes))
    }

    fn send(&mut self, pieces: &[MemSeg], stays: u64) -> Result<usize, Stop> {
        self.refuse()?;
        let part = self.part(pieces.len());
        self.inner.send(pieces.get(..part).unwrap_or(pieces), stays)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Stop> {
        self.refuse()?;
        let part = self.part(buffer.len());
        let received = self.inner.receive(buffer.get_mut(..part).unwrap_or_default())?;
        Ok(Received { drained: false, ..received })
    }

    fn receive_scattered(&mut self, pieces: &[MemSeg], buffer: &mut [u8]) -> Result<Received, Stop> {
        self.refuse()?;
        let part = self.part(pieces.len());
        let behind = if part < pieces.len() { 0 } else { self.part(buffer.len()) };
        let (pieces, buffer) = (pieces.get(..part), buffer.get_mut(..behind));
        let received =
            self.inner.receive_scattered(pieces.unwrap_or_default(), buffer.unwrap_or_default())?;
        Ok(Received { drained: false, ..received })
    }

    pass_on_queries!();
}
