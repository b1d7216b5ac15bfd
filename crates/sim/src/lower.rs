//! The virtual network as a lower layer, and the surroundings that the pump has here.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use uwarp_driver::pump::Surroundings;
use uwarp_llp::link::{Answers, Caps, Ended, LowerLayer, Received, Stop};
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

fn stop(refusal: Refusal) -> Stop {
    match refusal {
        Refusal::WouldBlock => Stop::Later,
        Refusal::Reset => Stop::Ended(Ended::Broken),
    }
}

impl Network<'_> {
    fn recv(&mut self, max: usize) -> Result<Vec<u8>, Stop> {
        let bytes = self.input.recv(self.now, max).map_err(stop)?;
        *self.moved += bytes.len() as u64;
        if bytes.is_empty() { Err(Stop::Ended(Ended::Closed)) } else { Ok(bytes) }
    }
}

impl LowerLayer for Network<'_> {
    fn caps(&self) -> Caps {
        Caps { answers: false, ..Caps::TCP }
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Stop> {
        let sent = self.output.send(self.now, bytes);
        if self.output.take_killed() {
            let reset = self.kept.reset_on_close.load(Ordering::Relaxed);
            leave(self.now, self.input, self.output, reset);
        }
        let n = sent.map_err(stop)?;
        *self.moved += n as u64;
        Ok(n)
    }

    fn send(&mut self, pieces: &[MemSeg], _: u64) -> Result<usize, Stop> {
        let mut bytes = Vec::new();
        for piece in pieces {
            mem::copy_out(*piece, &mut bytes).map_err(|_| Stop::Unmapped)?;
        }
        self.send_bytes(&bytes)
    }

    /// A receive may return fewer bytes than there are.
    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Stop> {
        let bytes = self.recv(buffer.len())?;
        buffer[..bytes.len()].copy_from_slice(&bytes);
        Ok(Received { bytes: bytes.len(), drained: false })
    }

    fn receive_scattered(&mut self, pieces: &[MemSeg], buffer: &mut [u8]) -> Result<Received, Stop> {
        let direct: usize = pieces.iter().map(|piece| piece.len).sum();
        let bytes = self.recv(direct + buffer.len())?;
        let mut rest = &bytes[..];
        for piece in pieces {
            let n = mem::copy_in(*piece, rest).map_err(|_| Stop::Unmapped)?;
            rest = &rest[n..];
        }
        buffer[..rest.len()].copy_from_slice(rest);
        Ok(Received { bytes: bytes.len(), drained: false })
    }

    fn ended(&self) -> Option<Ended> {
        let broken = self.input.is_reset() || self.output.is_reset();
        let how = if broken { Ended::Broken } else { Ended::Closed };
        self.input.hung_up(self.now).then_some(how)
    }

    fn answers(&self) -> Option<Answers> {
        None
    }

    fn probe_when_quiet(&self) {}

    fn unsent(&self) -> usize {
        0
    }

    fn unacknowledged(&self) -> usize {
        self.output.unacknowledged(self.now)
    }

    fn reset_on_close(&self, reset: bool) {
        self.kept.reset_on_close.store(reset, Ordering::Relaxed);
    }

    fn finish(&mut self) {
        self.output.close(self.now);
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
        self.ended().is_some()
    }

    fn set_hung_up(&mut self) {}

    fn again(&mut self) {}

    fn watch(&mut self) -> bool {
        false
    }
}
