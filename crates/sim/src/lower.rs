//! The virtual network as a lower layer, and the surroundings that the pump has here.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use uwarp_driver::pump::Surroundings;
use uwarp_llp::link::{Answers, LowerLayer, Received};
use uwarp_mem::{self as mem, MemSeg};

use crate::Time;
use crate::end::{Kept, leave};
use crate::net::{Pipe, Refusal};

/// Two pipes at one moment.
pub(crate) struct Network<'a> {
    pub now: Time,
    pub input: &'a mut Pipe,
    pub output: &'a mut Pipe,
    pub kept: &'a Kept,
    /// Bytes moved since the start, both ways.
    pub moved: &'a mut u64,
}

fn errno(refusal: Refusal) -> Errno {
    match refusal {
        Refusal::WouldBlock => Errno::AGAIN,
        Refusal::Reset => Errno::CONNRESET,
    }
}

impl Network<'_> {
    fn recv(&mut self, max: usize) -> Result<Vec<u8>, Errno> {
        let bytes = self.input.recv(self.now, max).map_err(errno)?;
        *self.moved += bytes.len() as u64;
        Ok(bytes)
    }
}

impl LowerLayer for Network<'_> {
    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Errno> {
        let sent = self.output.send(self.now, bytes);
        if self.output.take_killed() {
            let reset = self.kept.reset_on_close.load(Ordering::Relaxed);
            leave(self.now, self.input, self.output, reset);
        }
        let n = sent.map_err(errno)?;
        *self.moved += n as u64;
        Ok(n)
    }

    fn send(&mut self, pieces: &[MemSeg]) -> Result<usize, Errno> {
        let mut bytes = Vec::new();
        for piece in pieces {
            mem::copy_out(*piece, &mut bytes).map_err(|_| Errno::FAULT)?;
        }
        self.send_bytes(&bytes)
    }

    /// A receive may return fewer bytes than there are.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Errno> {
        let bytes = self.recv(buffer.len())?;
        buffer[..bytes.len()].copy_from_slice(&bytes);
        Ok(Received { bytes: bytes.len(), short: false })
    }

    fn receive_scattered(&mut self, pieces: &[MemSeg], buffer: &mut [u8]) -> Result<Received, Errno> {
        let direct: usize = pieces.iter().map(|piece| piece.len).sum();
        let bytes = self.recv(direct + buffer.len())?;
        let mut rest = &bytes[..];
        for piece in pieces {
            let n = mem::copy_in(*piece, rest).map_err(|_| Errno::FAULT)?;
            rest = &rest[n..];
        }
        buffer[..rest.len()].copy_from_slice(rest);
        Ok(Received { bytes: bytes.len(), short: false })
    }

    fn hung_up(&self) -> bool {
        self.input.hung_up(self.now)
    }

    fn broken(&self) -> bool {
        self.input.is_reset() || self.output.is_reset()
    }

    fn answers(&self) -> Option<Answers> {
        None
    }

    fn probe_when_quiet(&self) {}

    fn unacknowledged(&self) -> usize {
        self.output.unacknowledged(self.now)
    }

    fn reset_on_close(&self, reset: bool) {
        self.kept.reset_on_close.store(reset, Ordering::Relaxed);
    }

    fn peer(&self) -> Option<SocketAddr> {
        None
    }
}

/// The world calls the pump as long as anything moves, so the pump needs to request no calls.
impl Surroundings for Network<'_> {
    type Lower = Self;

    fn lower(&mut self) -> &mut Self {
        self
    }

    fn take_room(&mut self) -> bool {
        true
    }

    fn take_kept(&mut self) -> bool {
        self.kept.receive.swap(false, Ordering::Relaxed)
    }

    fn hung_up(&self) -> bool {
        LowerLayer::hung_up(self)
    }

    fn set_hung_up(&mut self) {}

    fn again(&mut self) {}

    fn watch(&mut self) -> bool {
        false
    }
}
