//! A small map in the order of its keys.

use std::collections::VecDeque;
use std::ops::{Bound, RangeBounds};

/// A map for keys that come in ascending order and leave from the front, for the most part: numbers of
/// messages. One that comes and goes allocates nothing, which a tree does each time. In the middle, an entry
/// costs the moving of half of the others.
#[derive(Debug, Clone)]
pub(super) struct SortedMap<K, V>(VecDeque<(K, V)>);

/// An empty map keeps room for so many.
const KEPT: usize = 2;

impl<K, V> Default for SortedMap<K, V> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<K: Ord + Copy, V> SortedMap<K, V> {
    /// Where a key is, or would be.
    fn place(&self, key: &K) -> Result<usize, usize> {
        let (Some((first, _)), Some((last, _))) = (self.0.front(), self.0.back()) else { return Err(0) };
        if key > last {
            Err(self.0.len())
        } else if key == first {
            Ok(0)
        } else if key == last {
            Ok(self.0.len() - 1)
        } else {
            self.0.binary_search_by(|(other, _)| other.cmp(key))
        }
    }

    pub(super) fn get(&self, key: &K) -> Option<&V> {
        self.0.get(self.place(key).ok()?).map(|(_, value)| value)
    }

    pub(super) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let at = self.place(key).ok()?;
        self.0.get_mut(at).map(|(_, value)| value)
    }

    pub(super) fn contains_key(&self, key: &K) -> bool {
        self.place(key).is_ok()
    }

    /// In place of an earlier value.
    pub(super) fn insert(&mut self, key: K, value: V) {
        match self.place(&key) {
            Ok(at) => {
                if let Some(entry) = self.0.get_mut(at) {
                    entry.1 = value;
                }
            }
            Err(at) => {
                if self.0.capacity() == 0 {
                    self.0.reserve_exact(1);
                }
                if at == self.0.len() {
                    self.0.push_back((key, value));
                } else {
                    self.0.insert(at, (key, value));
                }
            }
        }
    }

    /// The value of a key, which is made if it is not there.
    pub(super) fn get_or_insert_with(&mut self, key: K, make: impl FnOnce() -> V) -> Option<&mut V> {
        if !self.contains_key(&key) {
            self.insert(key, make());
        }
        self.get_mut(&key)
    }

    pub(super) fn remove(&mut self, key: &K) -> Option<V> {
        let at = self.place(key).ok()?;
        let removed = if at == 0 { self.0.pop_front() } else { self.0.remove(at) };
        if self.0.is_empty() && self.0.capacity() > KEPT {
            self.0 = VecDeque::new();
        }
        removed.map(|(_, value)| value)
    }

    /// Keeps no more room than it needs.
    pub(super) fn shrink(&mut self) {
        self.0.shrink_to_fit();
    }

    pub(super) fn first(&self) -> Option<(&K, &V)> {
        self.0.front().map(|(key, value)| (key, value))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> {
        self.0.iter().map(|(key, value)| (key, value))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.0.iter_mut().map(|(key, value)| (&*key, value))
    }

    pub(super) fn keys(&self) -> impl DoubleEndedIterator<Item = &K> {
        self.0.iter().map(|(key, _)| key)
    }

    pub(super) fn values(&self) -> impl DoubleEndedIterator<Item = &V> {
        self.0.iter().map(|(_, value)| value)
    }

    pub(super) fn into_values(self) -> impl Iterator<Item = V> {
        self.0.into_iter().map(|(_, value)| value)
    }

    /// Those of a range of keys, ascending.
    pub(super) fn range(&self, keys: impl RangeBounds<K>) -> impl Iterator<Item = (&K, &V)> {
        let from = match keys.start_bound() {
            Bound::Unbounded => 0,
            Bound::Included(start) => self.place(start).unwrap_or_else(|at| at),
            Bound::Excluded(start) => self.place(start).map_or_else(|at| at, |at| at + 1),
        };
        self.0.iter().skip(from).map(|(key, value)| (key, value)).take_while(move |(key, _)| {
            match keys.end_bound() {
                Bound::Unbounded => true,
                Bound::Included(end) => *key <= end,
                Bound::Excluded(end) => *key < end,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_map(
            steps in prop::collection::vec((0u8..3, 0u64..20, any::<u8>()), 0..60),
            from in 0u64..22,
        ) {
            let (mut map, mut model) = (SortedMap::default(), BTreeMap::new());
            for (step, key, value) in steps {
                match step {
                    0 => {
                        map.insert(key, value);
                        model.insert(key, value);
                    }
                    1 => {
                        prop_assert_eq!(map.remove(&key), model.remove(&key));
                    }
                    _ => {
                        *map.get_or_insert_with(key, || value).unwrap() ^= 1;
                        *model.entry(key).or_insert(value) ^= 1;
                    }
                }
                prop_assert!(map.iter().eq(model.iter()));
                prop_assert_eq!((map.len(), map.first()), (model.len(), model.first_key_value()));
                prop_assert!((0..21).all(|key| map.get(&key) == model.get(&key)));
            }
            prop_assert!(map.range(from..).eq(model.range(from..)));
            prop_assert!(map.range(..from).eq(model.range(..from)));
            prop_assert!(map.range(from..=from + 5).eq(model.range(from..=from + 5)));
            prop_assert!(map.keys().eq(model.keys()) && map.values().eq(model.values()));
        }
    }

    #[test]
    fn an_empty_map_keeps_little() {
        let mut map = SortedMap::default();
        for count in [1, 100] {
            (0..count).for_each(|key| map.insert(key, [0u8; 100]));
            (0..count).for_each(|key| {
                map.remove(&key);
            });
            assert!(map.is_empty() && map.0.capacity() <= KEPT, "{count}");
            map.shrink();
            assert_eq!(map.0.capacity(), 0, "{count}");
        }
    }
}
