//! What a thread that polls a completion queue looks at before anything else.
//!
//! A look at a queue pair takes locks and counts references, which costs ten times what is read. So a thread
//! that polls in earnest, and has seen everything, keeps the words of shared memory that change when there is
//! news. For the next polls it looks at these alone.

use std::time::Duration;

use uwarp_mem::glance::Glance;

use crate::sync::{AtomicU32, Mutex, Ordering};

/// Polls that are glances, between two that look at the queue pairs: together they cost about as much as one
/// of these, on any machine.
const BETWEEN: u32 = 15;
/// How long to wait for the lock, which is held for some instructions, unless its holder was stopped there.
const WAIT: Duration = Duration::from_millis(50);

/// Of one feeder, or of two.
pub(crate) type Few = [Option<Glance>; 2];

const NONE: Few = [None, None];

/// The glances of a completion queue.
#[derive(Default)]
pub(crate) struct Glances {
    /// How many polls may still be glances. Written under the lock, read without it.
    left: AtomicU32,
    kept: Mutex<Few, 22>,
}

impl Glances {
    /// Whether there are any, and none shows news; counts that.
    #[inline]
    pub fn show_nothing(&self) -> bool {
        if self.left.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let Some(kept) = self.kept.try_lock() else { return false };
        let left = self.left.load(Ordering::Relaxed);
        let nothing = left > 0 && kept.iter().flatten().all(Glance::shows_nothing);
        self.left.store(if nothing { left - 1 } else { 0 }, Ordering::Relaxed);
        nothing
    }

    /// The next polls look at these. Returns the last ones, to be dropped where no lock is held: nobody else
    /// may keep their memory.
    #[must_use]
    pub fn begin(&self, few: Few) -> Few {
        let Some(mut kept) = self.kept.try_lock() else { return few };
        self.left.store(BETWEEN, Ordering::Relaxed);
        std::mem::replace(&mut kept, few)
    }

    /// There are none from now on; returns the last ones, as [`Self::begin`] does. (If a thread has jumped
    /// out of a glance, from the handler of a signal, it has them for ever.)
    #[must_use]
    pub fn end(&self) -> Few {
        let Some(mut kept) = self.kept.try_lock_for(WAIT) else { return NONE };
        self.left.store(0, Ordering::Relaxed);
        std::mem::replace(&mut kept, NONE)
    }
}
