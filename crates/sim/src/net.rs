//! One direction of a connection: an ordered byte stream that arrives late, in pieces, damaged, or not at
//! all.

use std::collections::VecDeque;

use crate::{Rng, Time};

/// How a direction behaves without a fault.
#[derive(Debug, Clone, Copy)]
pub struct NetParams {
    /// Shortest and longest delay of a piece, in nanoseconds.
    pub delay: (Time, Time),
    /// Longest piece that arrives at once, in bytes. Pieces are of random length.
    pub piece: usize,
    /// Bytes that are accepted before the other end has read them; a larger write is taken only in part.
    pub capacity: usize,
    /// How many pieces in a thousand stall.
    pub stalls: u32,
    /// Longest stall, in nanoseconds.
    pub stall: Time,
}

impl Default for NetParams {
    fn default() -> Self {
        Self { delay: (10_000, 20_000), piece: 1 << 20, capacity: 256 * 1024, stalls: 0, stall: 0 }
    }
}

/// A fault of a direction, at a position in its stream (bytes since the start).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A bit changes.
    Flip {
        /// Which byte.
        at: u64,
        /// Which bit, 0 to 7.
        bit: u8,
    },
    /// The connection is reset in both directions after this many bytes were sent.
    Reset {
        /// Bytes that still arrive.
        at: u64,
    },
    /// The sending process is killed after this many bytes, and its system closes the connection: in good
    /// order, or with a reset if something was not read ([`Pipe::take_killed`]).
    End {
        /// Bytes that still arrive.
        at: u64,
    },
}

/// Why a pipe does nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Nothing to read, or no room.
    WouldBlock,
    /// The connection was reset.
    Reset,
}

/// One direction.
#[derive(Debug)]
pub struct Pipe {
    params: NetParams,
    rng: Rng,
    fault: Option<Fault>,
    /// For each piece: when it arrives, its bytes, and how many of them were read.
    pieces: VecDeque<(Time, Vec<u8>, usize)>,
    /// Arrival of the last piece, to keep the order.
    last: Time,
    sent: u64,
    held: usize,
    fin: Option<Time>,
    reset: bool,
    /// Bytes that had not arrived when the reader's process was killed, and the bytes sent since.
    lost: Option<usize>,
    /// The fault has happened.
    fault_hit: bool,
    /// [`Fault::End`] has happened just now.
    killed: bool,
    /// Everything that was sent, with the time of each write, before any damage.
    tapped: Vec<(Time, Vec<u8>)>,
}

impl Pipe {
    /// A direction that does what `params`, the seed and `fault` say.
    pub fn new(params: NetParams, rng: Rng, fault: Option<Fault>) -> Self {
        Self {
            params,
            rng,
            fault,
            pieces: VecDeque::new(),
            last: 0,
            sent: 0,
            held: 0,
            fin: None,
            reset: false,
            lost: None,
            fault_hit: false,
            killed: false,
            tapped: Vec::new(),
        }
    }

    /// Accepts some of the bytes; returns how many.
    pub fn send(&mut self, now: Time, bytes: &[u8]) -> Result<usize, Refusal> {
        if self.reset || self.fin.is_some() {
            return Err(Refusal::Reset);
        }
        if let Some(lost) = &mut self.lost {
            // The reset that answers it is not back yet.
            *lost += bytes.len();
            return Ok(bytes.len());
        }
        let room = self.params.capacity.saturating_sub(self.held);
        let mut taken = bytes.len().min(room);
        if taken == 0 {
            return Err(Refusal::WouldBlock);
        }
        let stop = match self.fault {
            Some(Fault::Reset { at } | Fault::End { at }) => {
                Some(usize::try_from(at.saturating_sub(self.sent)).unwrap_or(usize::MAX))
                    .filter(|n| *n <= taken)
            }
            _ => None,
        };
        if let Some(stop) = stop {
            taken = stop;
        }
        let mut data = bytes.get(..taken).unwrap_or(&[]).to_vec();
        self.tapped.push((now, data.clone()));
        if let Some(Fault::Flip { at, bit }) = self.fault
            && let Some(offset) = at.checked_sub(self.sent).and_then(|n| usize::try_from(n).ok())
            && let Some(byte) = data.get_mut(offset)
        {
            *byte ^= 1 << (bit & 7);
            self.fault_hit = true;
        }
        self.sent += taken as u64;
        self.held += taken;
        let mut rest = &data[..];
        while !rest.is_empty() {
            let n = self.rng.size(1, self.params.piece.max(1)).min(rest.len());
            let (piece, tail) = rest.split_at(n);
            let at = self.arrival(now);
            self.pieces.push_back((at, piece.to_vec(), 0));
            rest = tail;
        }
        if stop.is_some() {
            self.fault_hit = true;
            match self.fault.take() {
                Some(Fault::Reset { .. }) => self.reset = true,
                _ => {
                    self.killed = true;
                    self.close(now);
                }
            }
            if taken == 0 {
                return Err(Refusal::Reset);
            }
        }
        Ok(taken)
    }

    fn arrival(&mut self, now: Time) -> Time {
        let (low, high) = self.params.delay;
        let mut at = now + low + self.rng.below(high.saturating_sub(low) + 1);
        if self.rng.chance(self.params.stalls) {
            at += self.rng.below(self.params.stall + 1);
        }
        self.last = self.last.max(at);
        self.last
    }

    /// The sender closes this direction.
    pub fn close(&mut self, now: Time) {
        if self.fin.is_none() {
            self.fin = Some(self.arrival(now));
        }
    }

    /// Bytes that have arrived, at most `max`, perhaps fewer than there are. No bytes: the sender has closed.
    pub fn recv(&mut self, now: Time, max: usize) -> Result<Vec<u8>, Refusal> {
        let mut out = Vec::new();
        while let Some((at, piece, read)) = self.pieces.front_mut() {
            if *at > now || out.len() >= max {
                break;
            }
            let n = (piece.len() - *read).min(max - out.len());
            out.extend_from_slice(&piece[*read..*read + n]);
            *read += n;
            if *read == piece.len() {
                self.pieces.pop_front();
            }
            // Sometimes a read ends at the end of a piece although there is more.
            if self.rng.chance(300) {
                break;
            }
        }
        self.held -= out.len();
        if !out.is_empty() {
            return Ok(out);
        }
        if self.reset && self.pieces.is_empty() {
            return Err(Refusal::Reset);
        }
        if self.pieces.is_empty() && self.fin.is_some_and(|at| at <= now) {
            return Ok(out);
        }
        Err(Refusal::WouldBlock)
    }

    /// Whether the writer's process was killed by [`Fault::End`] in the send before. The caller closes the
    /// other direction, too ([`Pipe::orphan`]).
    pub fn take_killed(&mut self) -> bool {
        std::mem::take(&mut self.killed)
    }

    /// The reader's process is killed. Returns whether bytes had arrived that it has not read. No later one
    /// arrives, so its system acknowledges none of them.
    pub fn orphan(&mut self, now: Time) -> bool {
        let unread = self.has_unread(now);
        self.lost = Some(self.unacknowledged(now));
        self.pieces.clear();
        self.held = 0;
        unread
    }

    /// Bytes that the reader's system has not acknowledged: those that have not arrived.
    pub fn unacknowledged(&self, now: Time) -> usize {
        let on_the_way = self.pieces.iter().filter(|(at, ..)| *at > now);
        self.lost.unwrap_or_else(|| on_the_way.map(|(_, piece, _)| piece.len()).sum())
    }

    /// The writer's system resets the connection: what was sent still arrives, and then the reset.
    pub fn break_off(&mut self) {
        self.reset = true;
    }

    /// Resets it; bytes that have not arrived are lost.
    pub fn reset(&mut self) {
        self.reset = true;
        self.pieces.clear();
        self.held = 0;
    }

    /// What is sent from now on arrives no earlier than this.
    pub fn stall_until(&mut self, at: Time) {
        self.last = self.last.max(at);
    }

    /// Grows whenever the reader has something new to look at: bytes, the end, a reset.
    pub fn news(&self, now: Time) -> u64 {
        let arrived = self.pieces.iter().take_while(|(at, ..)| *at <= now);
        let unread: usize = arrived.map(|(_, piece, read)| piece.len() - read).sum();
        let read = self.sent - self.held as u64;
        // Bytes that a reset has lost count as read.
        read + unread as u64 + u64::from(self.fin.is_some_and(|at| at <= now)) + (u64::from(self.reset) << 40)
    }

    /// Whether bytes have arrived that were not read.
    pub fn has_unread(&self, now: Time) -> bool {
        self.pieces.front().is_some_and(|(at, ..)| *at <= now)
    }

    /// Whether there is room for a byte.
    pub fn has_room(&self) -> bool {
        self.held < self.params.capacity
    }

    /// Whether it was reset.
    pub fn is_reset(&self) -> bool {
        self.reset
    }

    /// Whether the other end is known to send no more; its last bytes may not have been read yet.
    pub fn hung_up(&self, now: Time) -> bool {
        self.reset || self.fin.is_some_and(|at| at <= now)
    }

    /// Whether the fault has happened.
    pub fn fault_hit(&self) -> bool {
        self.fault_hit
    }

    /// Bytes sent since the start.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// The next arrival after `now`.
    pub fn next_arrival(&self, now: Time) -> Option<Time> {
        let piece = self.pieces.front().map(|(at, ..)| *at);
        piece.or(self.fin).filter(|at| *at > now)
    }

    /// What was sent, undamaged, write by write.
    pub fn tapped(&self) -> &[(Time, Vec<u8>)] {
        &self.tapped
    }
}
