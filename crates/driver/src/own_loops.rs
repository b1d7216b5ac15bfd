//! Event loops of the program that wait for completion channels and serve their own sockets (`channel`,
//! ADR 050): what the engine keeps for them. `event_loop` has what it does with it.

use std::time::Duration;

use crate::progress::{Nanos, nanos};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// A loop that is woken serves what was left to it within this time, or another thread does.
const COME: Duration = Duration::from_millis(2);

/// Event loops that serve their own channels.
#[derive(Default)]
pub(crate) struct OwnLoops {
    /// The sleep of a loop with streams that no descriptor reports is announced, for as long as nothing calls
    /// it: it may sleep at any time without a further word.
    pub announced: AtomicBool,
    /// The thread of such loops; 0: none yet.
    thread: AtomicUsize,
    /// When sources were left to loops that have not come for them since; 0: there are none.
    left_since: AtomicU64,
    /// Several threads have such loops. A bell would wake one of them, for streams of the others.
    several: AtomicBool,
}

impl OwnLoops {
    /// Sources are left to loops now. Returns whether others were left so long ago that their loops do not
    /// come: they compute, or wait for something else.
    pub fn leaves(&self, now: Nanos) -> bool {
        let first = self.left_since.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        first.is_err_and(|since| now.saturating_sub(since) > nanos(COME))
    }

    /// All that was left is served.
    pub fn have_come(&self) {
        self.left_since.store(0, Ordering::Relaxed);
    }

    /// Whether this thread, by its number, may be left to serve streams that no descriptor reports.
    pub fn may_serve(&self, thread: usize) -> bool {
        let first = self.thread.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed);
        if first.is_err_and(|known| known != thread) {
            self.several.store(true, Ordering::Relaxed);
        }
        !self.several.load(Ordering::Relaxed)
    }
}

/// What came of `Engine::watch_beside`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Beside {
    Watched,
    /// No descriptor reports this source: see `Engine::call_to`.
    Raised,
    /// The system has refused it.
    Cannot,
    /// There is no such source any more.
    Gone,
}
