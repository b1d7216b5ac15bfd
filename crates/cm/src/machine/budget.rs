//! How many connections of strangers a process holds: those whose request has not been given to the program,
//! or to a queue pair. One budget serves all listeners and all pairings of a process, because descriptors are
//! the process's. A limit for each listener would be no limit: five of them are more than all descriptors.
//!
//! It is a value that is handed in, a counter without a lock: whoever has a [`Place`] holds a connection, and
//! dropping it gives the place back. Taking one never waits, reads no clock and depends only on how many
//! places are taken, so a run of the simulator repeats exactly. Nobody is notified of a free place: a machine
//! that got none tries again at a deadline of its own. So no machine calls another one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Most places of a process; fewer where it may have few descriptors.
pub const MAX_PLACES: usize = 1024;

/// A machine gets a place while it holds fewer than this many times the number of free ones.
///
/// So one flooded listener gets eight ninths of the budget, and others find free places beside it. With
/// several flooded ones, each closes old connections whenever it wants a new one until it has no more than
/// its share, two of them eight seventeenths each; a listener that holds nothing then finds a place beside a
/// hundred of them. So who connects to one port cannot keep another one closed.
const SHARE: usize = 8;

/// The budget; its clones are the same one.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Counts>);

#[derive(Debug)]
struct Counts {
    limit: AtomicUsize,
    used: AtomicUsize,
}

/// One connection's place. Dropping it gives the place back.
#[derive(Debug)]
pub struct Place(Budget);

impl Budget {
    /// A budget of so many places.
    pub fn new(limit: usize) -> Self {
        Self(Arc::new(Counts { limit: AtomicUsize::new(limit), used: AtomicUsize::new(0) }))
    }

    /// How many places a process gets that may have so many descriptors: a quarter, so that enough are left
    /// for the program's own connections, and no more than [`MAX_PLACES`].
    pub fn of_descriptors(descriptors: usize) -> usize {
        (descriptors / 4).clamp(1, MAX_PLACES)
    }

    /// Changes the limit: programs raise that of their descriptors after they have started. Places that are
    /// taken stay taken.
    pub fn set_limit(&self, limit: usize) {
        self.0.limit.store(limit, Ordering::Relaxed);
    }

    /// A place for a machine that holds so many. `None`: it must give one back first, or wait.
    pub fn take(&self, held: usize) -> Option<Place> {
        let limit = self.0.limit.load(Ordering::Relaxed);
        // The counter guards no other memory.
        let taken = self.0.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            let free = limit.saturating_sub(used);
            (held < free.saturating_mul(SHARE)).then_some(used + 1)
        });
        taken.is_ok().then(|| Place(self.clone()))
    }

    /// How many places are taken.
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let Self(Budget(counts)) = self;
        counts.used.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes as many as it gets.
    fn flood(budget: &Budget, places: &mut Vec<Place>) {
        while let Some(place) = budget.take(places.len()) {
            places.push(place);
        }
    }

    #[test]
    fn places_come_back() {
        let budget = Budget::new(2);
        let first = budget.take(0).unwrap();
        let second = budget.take(1).unwrap();
        assert!(budget.take(0).is_none());
        drop(first);
        assert_eq!(budget.used(), 1);
        assert!(budget.take(0).is_some());
        drop(second);
        assert_eq!(budget.used(), 0);
    }

    /// Five listeners together held more than all descriptors of the process.
    #[test]
    fn all_listeners_share_it() {
        let budget = Budget::new(MAX_PLACES);
        let mut floods: [Vec<Place>; 5] = Default::default();
        for flooded in &mut floods {
            flood(&budget, flooded);
        }
        let used: usize = floods.iter().map(Vec::len).sum();
        assert_eq!(budget.used(), used);
        assert!(used <= MAX_PLACES);
        assert_eq!(floods[0].len(), 911);
        // Each gives one back before it takes the next. So they come to equal shares.
        for _ in 0..2000 {
            for flooded in &mut floods {
                flooded.pop();
                flood(&budget, flooded);
            }
        }
        for flooded in &floods {
            assert!((195..=201).contains(&flooded.len()), "{}", flooded.len());
        }
        assert!(budget.take(0).is_some(), "a listener that holds none finds a place beside them");
    }

    #[test]
    fn a_small_process_has_a_place_and_a_large_one_has_a_limit() {
        assert_eq!([0, 3, 256, 1024, 1 << 20].map(Budget::of_descriptors), [1, 1, 64, 256, 1024]);
        let budget = Budget::new(4);
        let places: Vec<_> = (0..3).map(|held| budget.take(held).unwrap()).collect();
        budget.set_limit(2);
        assert!(budget.take(0).is_none());
        drop(places);
        assert!(budget.take(0).is_some());
    }
}
