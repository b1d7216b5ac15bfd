//! Memory with 64 lanes, for a pair of processes.
//!
//! The geometry belongs to the version that the two ends have agreed on; nothing of it is read from the slab.
//! All of it are addresses: a page is in use when it is written, and a ring with little in it stays in its
//! first page.
//!
//! A slab for datagrams has fewer lanes and longer rings: a stream's sender waits for room, a datagram only
//! for a moment.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use uwarp_mem::MemSeg;
use uwarp_mem::glance::Glance;
use uwarp_mem::shared::{LINE, Line, Refused, Shared, Writers};

use super::Side;
use super::bell;
use super::ledger::{Flags, RING, Theirs};
use super::pair::Pair;
use crate::sync::{AtomicU64, Ordering};

/// Lanes of a slab.
pub const LANES: usize = 64;
/// The lines of the lanes, two each; before them, one line for each side's ready word.
const LINES: usize = 4096;
const RINGS: usize = LINES + 2 * LANES * LINE;
const SIZE: usize = RINGS + 2 * LANES * RING as usize;

/// Bytes of a ring of datagrams: as many of one kilobyte as a UDP socket keeps here.
pub const LONG_RING: u64 = 2 << 20;
const LONG_LANES: usize = LANES * RING as usize / LONG_RING as usize;

/// What the lanes of a slab carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carries {
    /// Streams.
    Streams,
    /// Datagrams.
    Datagrams,
}

impl Carries {
    fn lanes(self) -> usize {
        match self {
            Self::Streams => LANES,
            Self::Datagrams => LONG_LANES,
        }
    }

    fn ring(self) -> usize {
        match self {
            Self::Streams => RING as usize,
            Self::Datagrams => LONG_RING as usize,
        }
    }
}

/// One process's view of a slab.
#[derive(Debug)]
pub struct Slab {
    memory: Arc<Shared>,
    carries: Carries,
    side: Side,
    peer: Arc<Pair>,
    /// What the engine calls each lane; 0: nothing.
    names: [AtomicU64; LANES],
    /// [`UNUSED`], [`USED`] or [`LEFT`], by this process.
    uses: [AtomicU64; LANES],
}

/// Nobody has used the lane yet.
const UNUSED: u64 = 0;
/// A stream of this process uses it, or waits for the peer's word to use it.
const USED: u64 = 1;
/// This process has left it.
const LEFT: u64 = 2;

impl Slab {
    /// Makes one for streams, and the descriptor for the peer. The calling process has connected.
    pub fn create(peer: Arc<Pair>) -> Result<(Arc<Self>, OwnedFd), Refused> {
        Self::create_for(Carries::Streams, peer)
    }

    /// Makes one that carries these.
    pub fn create_for(carries: Carries, peer: Arc<Pair>) -> Result<(Arc<Self>, OwnedFd), Refused> {
        let (memory, fd) = Shared::create(c"uwarp-slab", SIZE, Writers::All)?;
        Ok((Self::over(memory, carries, Side::Initiator, peer), fd))
    }

    /// The one for streams that the peer has made.
    pub fn open(fd: OwnedFd, peer: Arc<Pair>) -> Result<Arc<Self>, Refused> {
        Self::open_for(Carries::Streams, fd, peer)
    }

    /// The one that the peer has made for these.
    pub fn open_for(carries: Carries, fd: OwnedFd, peer: Arc<Pair>) -> Result<Arc<Self>, Refused> {
        let memory = Shared::open(fd.as_fd(), SIZE, true)?;
        Ok(Self::over(memory, carries, Side::Responder, peer))
    }

    /// Makes one for streams that lead from a queue pair to itself. `own`: the calling process's.
    pub fn create_alone(own: Arc<Pair>) -> Result<Arc<Self>, Refused> {
        // (Nobody else gets the descriptor.)
        let (memory, _) = Shared::create(c"uwarp-slab", SIZE, Writers::All)?;
        Ok(Self::over(memory, Carries::Streams, Side::Both, own))
    }

    fn over(memory: Shared, carries: Carries, side: Side, peer: Arc<Pair>) -> Arc<Self> {
        let words = || std::array::from_fn(|_| AtomicU64::new(0));
        let memory = Arc::new(memory);
        Arc::new(Self { memory, carries, side, peer, names: words(), uses: words() })
    }

    /// What its lanes carry.
    pub fn carries(&self) -> Carries {
        self.carries
    }

    /// The two processes.
    pub(super) fn pair(&self) -> &Pair {
        &self.peer
    }

    /// Which end this process is.
    pub fn side(&self) -> Side {
        self.side
    }

    /// Takes a lane for a new stream; `None`: all are in use. Only the end that has connected does this.
    pub fn take_lane(&self) -> Option<usize> {
        let free = |&lane: &usize| match self.uses.get(lane)?.load(Ordering::Acquire) {
            UNUSED => Some(()),
            LEFT => Theirs::flags(self.line(self.side.peer(), lane)).has(Flags::LEFT).then_some(()),
            _ => None,
        };
        let mut lanes = 0..self.carries.lanes();
        lanes.find(|lane| {
            free(lane).is_some_and(|()| {
                let was = self.uses[*lane].load(Ordering::Relaxed);
                let taken = self.uses[*lane].compare_exchange(was, USED, Ordering::AcqRel, Ordering::Relaxed);
                was != USED && taken.is_ok()
            })
        })
    }

    /// The peer has taken this lane for a new stream. Returns whether that is possible: there is such a lane,
    /// and no stream of this process uses it.
    pub fn claim_lane(&self, lane: usize) -> bool {
        let uses = self.uses.get(..self.carries.lanes()).unwrap_or_default();
        uses.get(lane).is_some_and(|usage| usage.swap(USED, Ordering::AcqRel) != USED)
    }

    /// This process has left a lane that both ends have used. (One that the peer may begin to use late is
    /// never taken again.)
    pub(super) fn leave(&self, lane: usize) {
        if let Some(usage) = self.uses.get(lane) {
            usage.store(LEFT, Ordering::Release);
        }
    }

    /// Whether a stream of this process uses it.
    pub fn is_used(&self) -> bool {
        self.uses.iter().any(|usage| usage.load(Ordering::Acquire) == USED)
    }

    /// Calls `each` with the name of each lane that has one.
    pub fn names(&self, each: impl FnMut(u64)) {
        self.names.iter().map(|name| name.load(Ordering::Acquire)).filter(|name| *name != 0).for_each(each);
    }

    /// Calls `each` with the name of each lane that has news for this process.
    pub fn harvest(&self, mut each: impl FnMut(u64)) {
        let mut lanes = bell::take(self.ready(self.side));
        while lanes != 0 {
            let lane = lanes.trailing_zeros();
            lanes &= lanes - 1;
            let name = self.names.get(lane as usize).map_or(0, |name| name.load(Ordering::Acquire));
            if name != 0 {
                each(name);
            }
        }
    }

    pub(super) fn set_name(&self, lane: usize, name: u64) {
        if let Some(known) = self.names.get(lane) {
            known.store(name, Ordering::Release);
        }
    }

    /// Tells the peer that there are news of this lane.
    #[inline]
    pub(super) fn tell(&self, lane: usize) {
        self.peer.tell(self.ready(self.side.peer()), 1 << lane);
    }

    #[inline]
    pub(super) fn line(&self, side: Side, lane: usize) -> &Line {
        self.memory.line(Self::line_at(side, lane))
    }

    /// What shows a change in these words of a line.
    pub(super) fn glance(&self, side: Side, lane: usize, words: [(u8, u64); 3]) -> Glance {
        Glance::new(self.memory.clone(), Self::line_at(side, lane), words)
    }

    #[inline]
    fn line_at(side: Side, lane: usize) -> usize {
        LINES + (lane % LANES * 2 + side.index()) * LINE
    }

    /// A ring.
    #[inline]
    pub(super) fn ring(&self, side: Side, lane: usize) -> MemSeg {
        self.memory.seg(self.ring_at(side, lane), self.carries.ring())
    }

    /// Gives a ring's pages back: they are zero.
    pub(super) fn clear(&self, side: Side, lane: usize) {
        self.memory.clear(self.ring_at(side, lane), self.carries.ring());
    }

    pub(super) fn is_parents(&self) -> bool {
        self.memory.is_parents()
    }

    #[inline]
    fn ring_at(&self, side: Side, lane: usize) -> usize {
        RINGS + (lane % self.carries.lanes() * 2 + side.index()) * self.carries.ring()
    }

    fn ready(&self, side: Side) -> &AtomicU64 {
        &self.memory.line(side.index() * LINE)[0]
    }
}
