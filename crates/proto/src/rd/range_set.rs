//! Sets of numbers, kept as ranges.

use std::ops::Range;

use smallvec::SmallVec;

/// A set of numbers as ascending ranges that neither overlap nor touch. Cheap while there are few of them,
/// which is what loss and reordering leave.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RangeSet(SmallVec<[Range<u64>; 1]>);

impl RangeSet {
    /// Adds all numbers of a range. Returns whether any of them is new.
    pub fn insert(&mut self, new: Range<u64>) -> bool {
        if new.is_empty() || self.covers(&new) {
            return false;
        }
        let from = self.0.partition_point(|range| range.end < new.start);
        let to = self.0.partition_point(|range| range.start <= new.end);
        let mut joined = new;
        if let (Some(first), Some(last)) = (self.0.get(from), self.0.get(to.wrapping_sub(1)))
            && from < to
        {
            joined = joined.start.min(first.start)..joined.end.max(last.end);
        }
        self.0.drain(from..to);
        self.0.insert(from, joined);
        true
    }

    /// Whether all numbers of a range are in the set.
    pub fn covers(&self, wanted: &Range<u64>) -> bool {
        wanted.is_empty() || self.holding(wanted.start).is_some_and(|range| wanted.end <= range.end)
    }

    /// Whether one number is in the set.
    pub(super) fn contains(&self, number: u64) -> bool {
        self.holding(number).is_some()
    }

    /// The numbers of a range that are not in the set, in ascending ranges.
    pub(super) fn missing_in(&self, wanted: Range<u64>) -> SmallVec<[Range<u64>; 1]> {
        let mut missing = SmallVec::new();
        let mut at = wanted.start;
        for range in self.0.iter().filter(|range| range.end > wanted.start && range.start < wanted.end) {
            if range.start > at {
                missing.push(at..range.start);
            }
            at = at.max(range.end);
        }
        if at < wanted.end {
            missing.push(at..wanted.end);
        }
        missing
    }

    /// Removes all numbers of a range.
    pub(super) fn remove(&mut self, gone: &Range<u64>) {
        if gone.is_empty() || !self.0.iter().any(|range| range.start < gone.end && gone.start < range.end) {
            return;
        }
        let ranges = std::mem::take(&mut self.0);
        for range in ranges {
            let (before, behind) =
                (range.start..range.end.min(gone.start), range.start.max(gone.end)..range.end);
            self.0.extend([before, behind].into_iter().filter(|part| !part.is_empty()));
        }
    }

    /// How many ranges there are.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// Removes all numbers below `floor`.
    pub(super) fn remove_below(&mut self, floor: u64) {
        let gone = self.0.partition_point(|range| range.end <= floor);
        self.0.drain(..gone);
        if let Some(first) = self.0.first_mut() {
            first.start = first.start.max(floor);
        }
    }

    /// Keeps the last so many ranges. A receiver that forgets a range has its packets repeated, no more.
    pub(super) fn keep_last(&mut self, count: usize) {
        let excess = self.0.len().saturating_sub(count);
        self.0.drain(..excess);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranges, ascending.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Range<u64>> + ExactSizeIterator {
        self.0.iter().cloned()
    }

    fn holding(&self, number: u64) -> Option<&Range<u64>> {
        let at = self.0.partition_point(|range| range.end <= number);
        self.0.get(at).filter(|range| range.start <= number)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_set(
            inserts in prop::collection::vec((0u64..60, 0u64..12), 0..20),
            floor in 0u64..70,
            keep in 0usize..6,
        ) {
            let (mut set, mut model) = (RangeSet::default(), BTreeSet::new());
            for (start, len) in inserts {
                let new = (start..start + len).filter(|number| model.insert(*number)).count();
                prop_assert_eq!(set.insert(start..start + len), new > 0);
                let ranges: Vec<_> = set.iter().collect();
                prop_assert!(ranges.iter().all(|range| !range.is_empty()));
                prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{:?}", ranges);
                prop_assert_eq!(set.iter().flatten().collect::<BTreeSet<_>>(), model.clone());
                let missing: Vec<_> = set.missing_in(5..50).into_iter().flatten().collect();
                let expected: Vec<_> = (5..50).filter(|number| !model.contains(number)).collect();
                prop_assert_eq!(&missing, &expected);
                prop_assert_eq!(set.covers(&(5..50)), missing.is_empty());
                prop_assert!((0..75).all(|number| set.contains(number) == model.contains(&number)));
            }
            let mut without = set.clone();
            without.remove(&(floor..floor + 9));
            let stays = |n: &u64| !(floor..floor + 9).contains(n);
            let rest: BTreeSet<_> = model.iter().copied().filter(stays).collect();
            prop_assert!(without.iter().all(|range| !range.is_empty()));
            prop_assert_eq!(without.iter().flatten().collect::<BTreeSet<_>>(), rest);
            set.remove_below(floor);
            model.retain(|number| *number >= floor);
            prop_assert_eq!(set.iter().flatten().collect::<BTreeSet<_>>(), model);
            let last: Vec<_> = set.iter().rev().take(keep).collect();
            set.keep_last(keep);
            prop_assert_eq!(set.iter().rev().collect::<Vec<_>>(), last);
        }
    }
}
