//! Sources that no descriptor reports: lower layers in memory. Whoever learns that one is ready calls
//! `Engine::raise`; or a [`Look`] finds it, which every thread that looks at the sockets asks as well. The
//! next thread that looks serves it.
//!
//! No thread sleeps over such a source. A thread that is about to sleep announces that first ([`Asleep`],
//! and [`Look::sleep_begins`]) and then looks once more; whoever raises adds to the list first, and whoever
//! makes a source ready marks it first, and then looks whether a thread has announced its sleep. All of that
//! is sequentially consistent, so one of the two sees the other. `sleep` has what the engine does with it.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::source::{Readiness, Token};
use crate::sync::{AtomicU8, AtomicUsize, Mutex, OnceLock, Ordering};

/// Finds sources that are ready, where raising each of them would cost more: all those of one lower layer.
pub trait Look: Send + Sync {
    /// A thread is about to sleep, and calls [`Self::harvest`] once more before it does. From now on, whoever
    /// makes a source ready must wake it (`Engine::wake`, or a descriptor that the engine watches).
    fn sleep_begins(&self);

    /// It looks again by itself. (Not called by a thread that leaves its sleep with a jump.)
    fn sleep_ends(&self);

    /// Passes each source that has become ready since the last call to `raise`. No lock may be held there
    /// whose rank is 29. Called at every look at the sockets, by any thread, also by two at once.
    fn harvest(&self, raise: &mut dyn FnMut(Token, Readiness));
}

/// How many threads sleep, or are about to: twice that number. The lowest bit: each of them is announced to
/// the [`Look`], too. Both are in one word, so that each announcement has its end.
#[derive(Default)]
pub(crate) struct Asleep(AtomicUsize);

impl Asleep {
    const ONE: usize = 2;
    const TOLD: usize = 1;

    /// The calling thread is about to sleep, and looks once more after this. Returns whether the look must be
    /// told.
    pub fn enter(&self) -> bool {
        self.0.fetch_add(Self::ONE, Ordering::SeqCst) & Self::TOLD != 0
    }

    /// It looks again by itself. (A thread that leaves its sleep by a jump does not come here. Then there are
    /// wake-ups that nobody needs, and none is missing.)
    pub fn leave(&self) -> bool {
        self.0.fetch_sub(Self::ONE, Ordering::SeqCst) & Self::TOLD != 0
    }

    /// From now on the look must be told; returns how many threads sleep that it was not told of.
    pub fn tell(&self) -> usize {
        self.0.fetch_or(Self::TOLD, Ordering::SeqCst) / Self::ONE
    }

    pub fn any(&self) -> bool {
        self.count() > 0
    }

    /// How many threads.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst) / Self::ONE
    }
}

/// Reports that no thread has served yet, and what finds more.
#[derive(Default)]
pub(crate) struct Raised {
    /// [`REPORTS`] and [`CAN_LOOK`]: the usual case, neither of them, costs one load.
    state: AtomicU8,
    raised: Mutex<Reports, 29>,
    look: OnceLock<Arc<dyn Look>>,
}

/// Which sources are ready. Usually one or two: nothing is allocated for them, because a thread that polls
/// comes here each time that its peer has sent something.
pub(crate) type Reports = SmallVec<[(Token, Readiness); 4]>;

/// So many reports are searched for an earlier one of the same source.
const SEARCHED: usize = 32;

/// There are reports. Written under the lock, read without it.
const REPORTS: u8 = 1;
/// There is a [`Look`]. It stays set.
const CAN_LOOK: u8 = 2;

impl Raised {
    /// Whether there are reports, or may be some that a look finds.
    #[inline]
    pub fn maybe(&self) -> bool {
        self.state.load(Ordering::SeqCst) != 0
    }

    pub fn any(&self) -> bool {
        self.state.load(Ordering::SeqCst) & REPORTS != 0
    }

    pub fn add(&self, token: Token, readiness: Readiness) {
        let mut raised = self.raised.lock();
        let searched = raised.len().min(SEARCHED);
        match raised.iter_mut().rev().take(searched).find(|(known, _)| *known == token) {
            Some((_, all)) => *all = all.or(readiness),
            None => {
                if raised.len() > SEARCHED && raised.len() == raised.capacity() {
                    join(&mut raised);
                }
                raised.push((token, readiness));
            }
        }
        self.state.fetch_or(REPORTS, Ordering::SeqCst);
    }

    /// All reports, and what the look finds. The lock is left alone where only that finds something, as it
    /// does for a thread that polls: if a signal's handler jumps out of it, no other thread must wait.
    pub fn take(&self) -> Reports {
        let mut reports = Reports::new();
        if let Some(look) = self.look.get() {
            look.harvest(&mut |token, readiness| reports.push((token, readiness)));
        }
        if self.any() {
            let mut raised = self.raised.lock();
            self.state.fetch_and(!REPORTS, Ordering::SeqCst);
            reports.append(&mut raised);
        }
        reports
    }

    /// Every look asks this one, too; returns it if there is one already.
    pub fn set_look(&self, look: Arc<dyn Look>) -> Result<(), Arc<dyn Look>> {
        self.look.set(look)?;
        self.state.fetch_or(CAN_LOOK, Ordering::SeqCst);
        Ok(())
    }

    pub fn look(&self) -> Option<&dyn Look> {
        self.look.get().map(|look| &**look)
    }

    /// Adds what the look finds.
    pub fn harvest(&self) {
        if let Some(look) = self.look.get() {
            look.harvest(&mut |token, readiness| self.add(token, readiness));
        }
    }
}

/// One report for each source: sources that nobody serves for a while do not fill memory.
#[cold]
fn join(raised: &mut Reports) {
    raised.sort_unstable_by_key(|(token, _)| *token);
    raised.dedup_by(|(token, readiness), (before, all)| {
        let again = token == before;
        if again {
            *all = all.or(*readiness);
        }
        again
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_is_raised_again_and_again_fills_no_memory() {
        let raised = Raised::default();
        for n in 0..100_000 {
            let input = Readiness { readable: true, ..Readiness::default() };
            raised.add(Token(n % 100), if n < 50_000 { input } else { Readiness::ANY });
        }
        assert!(raised.any());
        let mut reports = raised.take();
        assert!(!raised.any() && reports.capacity() < 1024, "{}", reports.capacity());
        join(&mut reports);
        assert_eq!(reports.len(), 100);
        assert!(reports.iter().all(|(_, all)| *all == Readiness::ANY));
    }
}
