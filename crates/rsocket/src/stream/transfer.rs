//! Calls that send and receive.

use rustix::io::Errno;
use uwarp_mem::MemSeg;
use uwarp_process::MutexGuard;

use super::cursor::Cursor;
use super::verbs::Verbs;
use super::{Link, State, Stream};
use crate::machine::End;

impl<V: Verbs> Stream<V> {
    /// Waits until no other call sends, or receives: a call's bytes stay together.
    pub(super) fn turn<'a>(
        &'a self,
        take: impl Fn(&'a Self) -> Option<MutexGuard<'a, (), 3>>,
        wait: &mut impl FnMut() -> Result<(), Errno>,
    ) -> Result<Turn<'a, V>, Errno> {
        loop {
            if let Some(held) = take(self) {
                return Ok(Turn { held: Some(held), verbs: &self.verbs });
            }
            wait()?;
        }
    }

    /// Sends the bytes of `buffers`. `wait` waits until the stream has changed, or fails if the call must not
    /// wait. Returns how many bytes were taken.
    pub fn send(
        &self,
        buffers: &[MemSeg],
        mut wait: impl FnMut() -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        let _turn = self.turn(|stream| stream.sending.try_lock(), &mut wait)?;
        let mut source = Cursor::new(buffers);
        let mut sent = 0;
        // Nothing can be sent, too, if anything could be.
        while source.left() == 0 {
            match self.may_send(&mut self.enter()) {
                Err(Errno::AGAIN) => wait()?,
                other => return other.map(|()| 0),
            }
        }
        while source.left() > 0 {
            let mut state = self.enter();
            match self.send_some(&mut state, &mut source) {
                // Not connected yet, or no room.
                Ok(0) | Err(Errno::AGAIN) => {}
                Ok(n) => {
                    sent += n;
                    continue;
                }
                Err(_) if sent > 0 => return Ok(sent),
                Err(errno) => return Err(errno),
            }
            drop(state);
            match wait() {
                Ok(()) => {}
                Err(_) if sent > 0 => return Ok(sent),
                Err(errno) => return Err(errno),
            }
        }
        Ok(sent)
    }

    /// Sends what can be sent at once; 0: nothing now.
    fn send_some(&self, state: &mut State<V>, source: &mut Cursor<'_>) -> Result<usize, Errno> {
        self.may_send(state)?;
        self.send_maps(state)?;
        let Some(machine) = &mut state.machine else { return Err(Errno::NOTCONN) };
        let room = machine.room().min(u32::try_from(source.left()).unwrap_or(u32::MAX));
        if room == 0 {
            return Ok(0);
        }
        // Copied first: a program's bad buffer must leave the stream as it is.
        source.copy_to(self.staged(machine.staging(), room))?;
        let Some(write) = machine.send(room) else { return Ok(0) };
        let carrier = machine.carrier();
        if let Err(errno) = self.post_write(carrier, &write) {
            self.ended(state, End::Disconnected);
            return Err(if errno == Errno::NODEV { errno } else { Errno::CONNRESET });
        }
        Ok(room as usize)
    }

    /// Whether data can be sent, now or later. Takes completions if it cannot be sent now.
    pub(super) fn may_send(&self, state: &mut State<V>) -> Result<(), Errno> {
        let Some(machine) = &state.machine else { return Err(self.not_connected()) };
        if machine.room() == 0 {
            self.look_at_targets(state);
        }
        let no_room = state.machine.as_ref().is_some_and(|machine| machine.room() == 0);
        // The peer may have said that it is done.
        if no_room || !self.verbs.is_empty() || self.is_gone() {
            self.process(state);
        }
        if let Some(errno) = state.error.take() {
            return Err(errno);
        }
        match &state.machine {
            Some(machine) if machine.said_last() => Err(Errno::PIPE),
            Some(machine) if machine.gone() => Err(Errno::CONNRESET),
            Some(machine) if !machine.writable() => Err(Errno::PIPE),
            _ => Ok(()),
        }
    }

    /// Why there is no machine.
    pub(super) fn not_connected(&self) -> Errno {
        match self.link() {
            Link::Pending => Errno::AGAIN,
            Link::Failed(_) | Link::Up(_) | Link::Gone => Errno::NOTCONN,
        }
    }

    /// Receives into `buffers`: what is there, or all that fits if `all`. `peek`: the bytes stay. Returns 0
    /// at the end of the stream. A call for no bytes waits for data, too.
    pub fn receive(
        &self,
        buffers: &[MemSeg],
        all: bool,
        peek: bool,
        mut wait: impl FnMut() -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        let _turn = self.turn(|stream| stream.receiving.try_lock(), &mut wait)?;
        let mut sink = Cursor::new(buffers);
        let mut received = 0;
        loop {
            let mut state = self.enter();
            if state.machine.is_none() {
                match self.not_connected() {
                    Errno::AGAIN => {}
                    errno => return Err(errno),
                }
            }
            // A program that looks until a whole header is there never takes what there is.
            let enough = if peek { u32::try_from(sink.left()).unwrap_or(u32::MAX) } else { 1 };
            if state.machine.as_ref().is_some_and(|machine| machine.unread() < enough.max(1)) {
                self.process(&mut state);
            }
            match self.receive_some(&mut state, &mut sink, peek) {
                Ok(some) => received += some,
                Err(_) if received > 0 => return Ok(received),
                Err(errno) => return Err(errno),
            }
            let there = state.machine.as_ref().is_some_and(|machine| machine.unread() > 0);
            if sink.left() == 0 && (received > 0 || there) || received > 0 && (peek || !all) {
                return Ok(received);
            }
            if let Some(machine) = &state.machine
                && !machine.readable()
                && (peek || machine.unread() == 0)
            {
                return match state.error.take() {
                    Some(errno) if received == 0 => Err(errno),
                    _ => Ok(received),
                };
            }
            drop(state);
            match wait() {
                Ok(()) => {}
                Err(_) if received > 0 => return Ok(received),
                Err(errno) => return Err(errno),
            }
        }
    }

    fn receive_some(&self, state: &mut State<V>, sink: &mut Cursor<'_>, peek: bool) -> Result<usize, Errno> {
        let Some(machine) = &mut state.machine else { return Ok(0) };
        let ring = self.memory.ring.seg();
        let mut seen = 0;
        loop {
            let (at, len) = machine.next(if peek { seen } else { 0 });
            let copied = match sink.copy_from(ring.part(at as usize, len as usize)) {
                Ok(copied) => copied as u32,
                // What was read before is not lost.
                Err(_) if seen > 0 => break,
                Err(errno) => return Err(errno),
            };
            if copied == 0 {
                break;
            }
            if !peek {
                machine.take(copied);
            }
            seen += copied;
        }
        if !peek && seen > 0 {
            self.controls(state);
        }
        Ok(seen as usize)
    }
}

/// The right of one call to send, or to receive. The next call is woken when this is dropped.
pub(super) struct Turn<'a, V: Verbs> {
    held: Option<MutexGuard<'a, (), 3>>,
    verbs: &'a V,
}

impl<V: Verbs> Drop for Turn<'_, V> {
    fn drop(&mut self) {
        self.held = None;
        self.verbs.wake_others();
    }
}
