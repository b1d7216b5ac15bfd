//! Streams of reliable datagrams as a lower layer (docs/rd.md section 5.6). Many of them share a socket,
//! whose owner has the machine that sends and receives packets ([`Carries`]).
//!
//! ```text
//!   queue pair ─ Link ─▶ ┌─ Pipe ─────────────────────────────┐
//!                        │ backlog: taken … acknowledged      │ ◀─ fill, released ──┐
//!                        │ input:   readable … taken          │ ◀─ put, readable ───┤ the socket's owner
//!                        └────────────────────────────────────┘ ── wants ──────────▶┘
//! ```
//!
//! Both ends of a pipe are in one process, and no packet is made under its lock. All bytes are copied: into
//! the backlog, which keeps them until the peer has them, and out of the input.
//
// TODO(docs/rd.md section 8): large pieces by reference, and input straight to its place. Each costs a copy
// now.

mod ring;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use uwarp_mem::{self as mem, MemSeg};
use uwarp_process::{Birth, Mutex};

use crate::carrier::{Close, Ends, Got, Refusal, SetUp, Watch};
use crate::link::{Kind, Link};
use crate::lower::{Answers, Caps, Ended, LowerLayer, Received, Stop};
use ring::Ring;

/// Bytes that a pipe keeps for the peer. More than a path at full speed has in flight.
const BACKLOG: usize = 512 * 1024;
/// The owner of the socket hears of what was taken when it is as much as this: then the peer may send more.
const TAKEN_STEP: u64 = 32 * 1024;

/// What the socket's owner does for a pipe.
pub trait Carries: Send + Sync {
    /// The pipe wants something: [`Pipe::wants`]. `later`: not in this call, because the caller may hold any
    /// lock.
    fn attend(&self, pipe: &Arc<Pipe>, later: bool);
    /// Whether the peer leaves probes without an answer, and how long ago it said something; `None`: this
    /// cannot be said now.
    fn answers(&self, pipe: &Pipe) -> Option<(bool, Duration)>;
    /// A thread polls: receives once. Returns whether that covers all.
    fn look(&self, in_earnest: bool) -> bool;
    /// A thread that polls finds nothing: does what is due.
    fn rest(&self);
    /// What has this name is to be looked at.
    fn raise(&self, name: u64);
}

/// Why a pipe is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// Nobody takes such a stream.
    Refused,
    /// The peer has broken it off.
    Broken,
    /// The peer does not answer.
    Silent,
    /// The peer does not answer, and never has.
    Unanswered,
    /// No way leads to the peer's host, and none ever has.
    Unreachable(Errno),
}

/// What a pipe wants of the socket's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wants {
    /// All bytes below this position may be sent.
    pub offered: u64,
    /// All bytes below this one were taken.
    pub taken: u64,
    /// Nothing follows what was offered.
    pub finishes: bool,
    /// Its owner has left it.
    pub leaves: bool,
    /// And without its rest.
    pub resets: bool,
}

#[derive(Debug, Default)]
struct State {
    backlog: Ring,
    input: Ring,
    /// All input below this position has come.
    readable: u64,
    /// How far the peer takes bytes.
    limit: u64,
    wants: Wants,
    /// What the socket's owner knows of `wants.taken`.
    told: u64,
    /// A send found too little room.
    wants_room: bool,
    peer_finished: bool,
    over: Option<Over>,
    /// The name under which the engine knows its owner; 0: none.
    name: u64,
    is_listed: bool,
}

/// A stream between a queue pair and the owner of its socket.
#[derive(Debug)]
pub struct Pipe {
    ends: Ends,
    /// What it is for, if this process has opened it.
    service: Option<u32>,
    state: Mutex<State, 27>,
}

impl Pipe {
    /// A stream between these ends. `service`: this process opens it, for this.
    pub fn new(ends: Ends, service: Option<u32>) -> Arc<Self> {
        Arc::new(Self { ends, service, state: Mutex::default() })
    }

    /// Its ends.
    pub fn ends(&self) -> Ends {
        self.ends
    }

    /// What it is for, if this process has opened it.
    pub fn service(&self) -> Option<u32> {
        self.service
    }

    // --- The side of the socket's owner.

    /// It is on the list of those that want something. Returns whether it was not.
    pub fn list(&self) -> bool {
        !std::mem::replace(&mut self.state.lock().is_listed, true)
    }

    /// What it wants; it is off the list from now on.
    pub fn wants(&self) -> Wants {
        let mut state = self.state.lock();
        state.is_listed = false;
        state.told = state.wants.taken;
        state.wants
    }

    /// Adds bytes of the backlog to `out`, from the position with these low 32 bits on.
    pub fn fill(&self, low: u32, len: u32, out: &mut Vec<u8>) -> bool {
        let state = self.state.lock();
        let start = state.backlog.start();
        // The backlog is far shorter than 32 bits count.
        let ahead = low.wrapping_sub((start & 0xFFFF_FFFF) as u32);
        let pieces = state.backlog.get(start + u64::from(ahead), len as usize);
        pieces.iter().for_each(|piece| out.extend_from_slice(piece));
        pieces.iter().map(|piece| piece.len()).sum::<usize>() == len as usize
    }

    /// The peer has all bytes below this position. Returns whose wish for room is met by that.
    pub fn acknowledged(&self, position: u64) -> Option<u64> {
        let mut state = self.state.lock();
        state.backlog.drop_below(position);
        let has_room = state.wants_room && state.backlog.len() <= BACKLOG / 2;
        has_room.then_some(state.name)
    }

    /// Bytes have come.
    pub fn put(&self, position: u64, bytes: &[u8]) {
        let mut state = self.state.lock();
        if !state.wants.leaves {
            state.input.put(position, bytes);
        }
    }

    /// All bytes below this position have come. Returns whom to tell.
    pub fn readable(&self, position: u64) -> u64 {
        let mut state = self.state.lock();
        state.readable = position;
        state.name
    }

    /// The peer takes bytes up to this position.
    pub fn limited(&self, position: u64) {
        self.state.lock().limit = position;
    }

    /// The peer sends nothing more. Returns whom to tell.
    pub fn finished(&self) -> u64 {
        let mut state = self.state.lock();
        state.peer_finished = true;
        state.name
    }

    /// It is over. `None`: in order. Returns whom to tell.
    pub fn ended(&self, over: Option<Over>) -> u64 {
        let mut state = self.state.lock();
        if state.over.is_some() {
            return state.name;
        }
        // Of a stream that was refused, nothing ever came.
        let was_heard = state.readable > 0 || self.service.is_none();
        state.over = match over {
            Some(Over::Refused) if was_heard => Some(Over::Broken),
            over => over,
        };
        state.backlog.drop_below(u64::MAX);
        state.name
    }
}

/// The queue pair's end of a pipe.
pub struct StreamLink {
    pipe: Arc<Pipe>,
    carries: Arc<dyn Carries>,
    birth: Birth,
    /// The owner may hold any lock.
    is_late: bool,
}

impl std::fmt::Debug for StreamLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StreamLink").field("pipe", &self.pipe).finish_non_exhaustive()
    }
}

impl StreamLink {
    /// The end of this pipe.
    pub fn new(pipe: Arc<Pipe>, carries: Arc<dyn Carries>) -> Self {
        Self { pipe, carries, birth: Birth::here(), is_late: false }
    }

    /// What receives for it.
    pub fn carries(&self) -> &Arc<dyn Carries> {
        &self.carries
    }

    pub(crate) fn ends(&self) -> Ends {
        self.pipe.ends
    }

    pub(crate) fn set_name(&self, name: u64) {
        let mut state = self.pipe.state.lock();
        state.name = name;
        let has_news = state.readable > state.input.start() || state.peer_finished || state.over.is_some();
        drop(state);
        if has_news {
            self.carries.raise(name);
        }
    }

    pub(crate) fn set_late(&mut self) {
        self.is_late = true;
    }

    pub(crate) fn has_room_again(&self) -> bool {
        let state = self.pipe.state.lock();
        state.wants_room && state.backlog.len() <= BACKLOG / 2
    }

    fn attend(&self, wants: impl FnOnce(&mut Wants)) {
        wants(&mut self.pipe.state.lock().wants);
        self.carries.attend(&self.pipe, self.is_late);
    }

    /// Puts bytes into the backlog: `copy` adds at most so many.
    fn take(&self, copy: impl FnOnce(usize, &mut Vec<u8>) -> Result<bool, Stop>) -> Result<usize, Stop> {
        let mut state = self.pipe.state.lock();
        if state.over.is_some() {
            return Err(Stop::Ended(ended(state.over)));
        }
        let room = BACKLOG.saturating_sub(state.backlog.len());
        if room == 0 {
            state.wants_room = true;
            return Err(Stop::Later);
        }
        let before = state.backlog.len();
        let all = copy(room, state.backlog.tail());
        let bytes = state.backlog.len() - before;
        state.wants_room = all == Ok(false);
        state.wants.offered = state.backlog.end();
        drop(state);
        if bytes > 0 {
            self.carries.attend(&self.pipe, self.is_late);
            return Ok(bytes);
        }
        all.map(|_| 0)
    }

    fn put(&self, bytes: &[u8]) -> Result<usize, Stop> {
        self.take(|room, out| {
            let part = bytes.get(..room.min(bytes.len())).unwrap_or_default();
            out.extend_from_slice(part);
            Ok(part.len() == bytes.len())
        })
    }

    /// Takes input: `copy` gets it in pieces, and says how much of one it has taken.
    fn get(&self, copy: impl FnOnce(&[u8]) -> Result<usize, Stop>) -> Result<Received, Stop> {
        let mut state = self.pipe.state.lock();
        let State { input, readable, wants, told, over, peer_finished, .. } = &mut *state;
        let waiting = usize::try_from(*readable - input.start()).unwrap_or(usize::MAX);
        if waiting == 0 {
            return Err(match (*peer_finished, *over) {
                (true, _) => Stop::Ended(Ended::Closed),
                (false, None) => Stop::Later,
                (false, over) => Stop::Ended(ended(over)),
            });
        }
        let start = input.start();
        let [first, _] = input.get(start, waiting);
        let bytes = copy(first)?;
        input.drop_below(start + bytes as u64);
        wants.taken = input.start();
        let tells = wants.taken - *told >= TAKEN_STEP;
        let received = Received { bytes, drained: bytes == waiting };
        drop(state);
        if tells {
            self.carries.attend(&self.pipe, self.is_late);
        }
        Ok(received)
    }
}

fn ended(over: Option<Over>) -> Ended {
    match over {
        None => Ended::Closed,
        Some(Over::Refused | Over::Broken) => Ended::Broken,
        Some(Over::Silent | Over::Unanswered | Over::Unreachable(_)) => Ended::Silent,
    }
}

impl LowerLayer for StreamLink {
    fn caps(&self) -> Caps {
        Caps::STREAM
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Stop> {
        self.put(bytes)
    }

    fn send(&mut self, pieces: &[MemSeg], _: u64) -> Result<usize, Stop> {
        self.take(|mut room, out| {
            for piece in pieces {
                let part = piece.part(0, room);
                if mem::copy_out(part, out).is_err() {
                    return Err(Stop::Unmapped);
                }
                room -= part.len;
                if part.len < piece.len {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Stop> {
        self.get(|input| Ok(copy(input, buffer)))
    }

    fn receive_scattered(&mut self, pieces: &[MemSeg], buffer: &mut [u8]) -> Result<Received, Stop> {
        self.get(|input| {
            let mut rest = input;
            for piece in pieces {
                let (part, behind) = rest.split_at(piece.len.min(rest.len()));
                if mem::copy_in(piece.part(0, part.len()), part).is_err() {
                    return Err(Stop::Unmapped);
                }
                rest = behind;
            }
            Ok(input.len() - rest.len() + copy(rest, buffer))
        })
    }

    fn ended(&self) -> Option<Ended> {
        let state = self.pipe.state.lock();
        let is_over = state.over.is_some() || state.peer_finished;
        is_over.then(|| if state.peer_finished { Ended::Closed } else { ended(state.over) })
    }

    fn answers(&self) -> Option<Answers> {
        let (all, held) = {
            let state = self.pipe.state.lock();
            let (acknowledged, end) = (state.backlog.start(), state.backlog.end());
            (acknowledged == end, acknowledged >= state.limit && end > acknowledged)
        };
        let (doubtful, last) = self.carries.answers(&self.pipe)?;
        Some(Answers { all, held, doubtful, last })
    }

    /// The exchange does, for all its streams.
    fn probe_when_quiet(&self) {}

    fn unsent(&self) -> usize {
        0
    }

    fn unacknowledged(&self) -> usize {
        self.pipe.state.lock().backlog.len()
    }

    fn reset_on_close(&self, reset: bool) {
        self.pipe.state.lock().wants.resets = reset;
    }

    fn finish(&mut self) {
        self.attend(|wants| wants.finishes = true);
    }

    fn peer(&self) -> Option<SocketAddr> {
        Some(self.pipe.ends.peer)
    }
}

fn copy(from: &[u8], to: &mut [u8]) -> usize {
    let len = from.len().min(to.len());
    if let (Some(from), Some(to)) = (from.get(..len), to.get_mut(..len)) {
        to.copy_from_slice(from);
    }
    len
}

/// What carries a stream does not look at the pipe's end alone: the rest is sent.
impl Drop for StreamLink {
    fn drop(&mut self) {
        // A forked child has a copy of its parent's.
        if !self.birth.is_parents() {
            let mut state = self.pipe.state.lock();
            state.wants.leaves = true;
            // The peer may keep the pipe for a while.
            state.input = Ring::default();
            drop(state);
            self.carries.attend(&self.pipe, true);
        }
    }
}

impl SetUp for StreamLink {
    fn ends(&self) -> Ends {
        self.pipe.ends
    }

    /// Its packets are those of other streams, too.
    fn set_tos(&self, _: u8) -> Result<(), Errno> {
        Ok(())
    }

    fn send_some(&self, bytes: &[u8]) -> Result<usize, Refusal> {
        match self.put(bytes) {
            Ok(bytes) => Ok(bytes),
            Err(Stop::Later | Stop::Unmapped) => Ok(0),
            Err(Stop::Ended(_)) => Err(self.refusal()),
        }
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<Got, Refusal> {
        match self.get(|input| Ok(copy(input, buffer))) {
            Ok(received) => Ok(Got::Bytes(received.bytes)),
            Err(Stop::Later | Stop::Unmapped) => Ok(Got::Nothing),
            Err(Stop::Ended(Ended::Closed)) => Ok(Got::End),
            Err(Stop::Ended(_)) => Err(self.refusal()),
        }
    }

    fn ended(&self) -> bool {
        LowerLayer::ended(self).is_some()
    }

    fn close(self: Box<Self>, how: Close) {
        match how {
            Close::Finish => self.attend(|wants| wants.finishes = true),
            Close::Reset => self.reset_on_close(true),
        }
    }

    fn watch(&self) -> Watch<'_> {
        Watch::Itself
    }

    fn name(&self, name: u64) {
        self.set_name(name);
    }

    fn kind(&self) -> Kind {
        Kind::Rd
    }

    fn into_link(self: Box<Self>) -> Link {
        Link::Stream(self)
    }
}

impl StreamLink {
    fn refusal(&self) -> Refusal {
        match self.pipe.state.lock().over {
            Some(Over::Refused) => Refusal::Refused,
            Some(Over::Silent) => Refusal::Unreachable(Errno::TIMEDOUT),
            Some(Over::Unanswered) => Refusal::Local(Errno::OPNOTSUPP),
            Some(Over::Unreachable(errno)) => Refusal::Unreachable(errno),
            Some(Over::Broken) | None => Refusal::Gone,
        }
    }
}
