//! The locks that a thread holds, as `ranks.rs` keeps them.

use std::panic::Location;

/// A lock that a thread holds.
#[derive(Debug, Clone, Copy)]
struct Lock {
    rank: u8,
    at: usize,
    taken: &'static Location<'static>,
}

/// A thread never holds more: there are fewer ranks.
const MOST: usize = 32;

/// The locks that a thread holds, without an order: they may be released in any.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held([Option<Lock>; MOST]);

impl Held {
    pub(crate) const fn none() -> Self {
        Self([None; MOST])
    }

    /// What is wrong if a thread that holds these waits for a lock of this rank.
    pub(crate) fn forbids(&self, rank: u8, place: &Location<'_>) -> Option<String> {
        let highest = self.0.iter().flatten().max_by_key(|lock| lock.rank)?;
        (highest.rank >= rank).then(|| {
            let Lock { rank: before, taken, .. } = highest;
            format!(
                "docs/locks.md: {place} waits for a lock of rank {rank} while its thread holds one of rank \
                 {before}, taken in {taken}"
            )
        })
    }

    pub(crate) fn add(&mut self, rank: u8, at: usize, taken: &'static Location<'static>) {
        if let Some(place) = self.0.iter_mut().find(|place| place.is_none()) {
            *place = Some(Lock { rank, at, taken });
        }
    }

    pub(crate) fn remove(&mut self, at: usize) {
        if let Some(place) = self.0.iter_mut().find(|place| place.is_some_and(|lock| lock.at == at)) {
            *place = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_waits_only_for_locks_of_a_higher_rank() {
        let here = Location::caller();
        let mut held = Held::none();
        assert_eq!(held.forbids(0, here), None);
        held.add(5, 1, here);
        held.add(7, 2, here);
        assert!(held.forbids(7, here).is_some() && held.forbids(6, here).is_some());
        assert_eq!(held.forbids(8, here), None);
        // In any order.
        held.remove(1);
        assert!(held.forbids(6, here).is_some());
        held.remove(2);
        assert_eq!(held.forbids(1, here), None);
        let words = {
            held.add(9, 3, here);
            held.forbids(9, here).unwrap_or_default()
        };
        assert!(words.contains("rank 9, taken in ") && words.contains("order.rs"), "{words}");
    }
}
