//! What is known of connections, by name.

use smallvec::SmallVec;

use super::ConnKey;

/// A map for a machine's connections: nearly always one, sometimes hundreds, which come and go about in the
/// order of their names.
#[derive(Debug)]
pub struct Sorted<T>(SmallVec<[(ConnKey, T); 1]>);

impl<T> Default for Sorted<T> {
    fn default() -> Self {
        Self(SmallVec::new())
    }
}

impl<T> Sorted<T> {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Replaces what has this name.
    pub fn insert(&mut self, conn: ConnKey, value: T) {
        match self.find(conn) {
            Ok(at) => self.0[at].1 = value,
            Err(at) => self.0.insert(at, (conn, value)),
        }
    }

    pub fn remove(&mut self, conn: ConnKey) -> Option<T> {
        self.find(conn).ok().map(|at| self.0.remove(at).1)
    }

    pub fn get(&self, conn: ConnKey) -> Option<&T> {
        let at = self.find(conn).ok()?;
        self.0.get(at).map(|(_, value)| value)
    }

    pub fn get_mut(&mut self, conn: ConnKey) -> Option<&mut T> {
        let at = self.find(conn).ok()?;
        self.0.get_mut(at).map(|(_, value)| value)
    }

    pub fn iter(&self) -> impl Iterator<Item = &(ConnKey, T)> {
        self.0.iter()
    }

    /// The first name behind this one; `None`: of all.
    pub fn next(&self, after: Option<ConnKey>) -> Option<ConnKey> {
        let at = after.map_or(0, |conn| self.find(conn).map_or_else(|at| at, |at| at + 1));
        self.0.get(at).map(|(conn, _)| *conn)
    }

    fn find(&self, conn: ConnKey) -> Result<usize, usize> {
        self.0.binary_search_by_key(&conn, |(conn, _)| *conn)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Space;
    use super::*;

    #[test]
    fn entries_are_found_and_visited_by_name() {
        let mut space = Space::new(1);
        let names: Vec<ConnKey> = (0..6).map(|_| space.name()).collect();
        let mut sorted = Sorted::default();
        for at in [3, 0, 5, 1, 3] {
            sorted.insert(names[at], at);
        }
        assert_eq!(sorted.len(), 4);
        assert_eq!([0, 1, 2, 3].map(|at| sorted.get(names[at]).copied()), [Some(0), Some(1), None, Some(3)]);
        assert_eq!((sorted.remove(names[1]), sorted.remove(names[1])), (Some(1), None));
        let visited: Vec<ConnKey> =
            std::iter::successors(sorted.next(None), |conn| sorted.next(Some(*conn))).collect();
        assert_eq!(visited, [names[0], names[3], names[5]]);
        // Behind one that is gone.
        assert_eq!(sorted.next(Some(names[1])), Some(names[3]));
    }
}
