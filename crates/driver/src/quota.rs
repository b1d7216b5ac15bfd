//! How many objects of each kind a device has. Its limits are promises in both directions: as many can be
//! made, and no more.

use std::sync::atomic::{AtomicU32, Ordering};

use uwarp_rnic::VerbsError;

/// The number of objects of one kind.
#[derive(Debug, Default)]
pub struct Quota(AtomicU32);

/// The place of one object, or of some bytes; ends with its drop.
#[derive(Debug)]
pub struct Place {
    of: &'static Quota,
    count: u32,
}

impl Quota {
    /// A place for one more object, of at most `most`.
    pub fn take(&'static self, most: u32) -> Result<Place, VerbsError> {
        self.take_many(1, most)
    }

    /// The same for `count`.
    pub fn take_many(&'static self, count: u32, most: u32) -> Result<Place, VerbsError> {
        let more = |made: u32| made.checked_add(count).filter(|made| *made <= most);
        match self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Place { of: self, count }),
            Err(_) => Err(VerbsError::NoResources("the device has as many of these as it takes")),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of.0.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// What a device has.
#[derive(Debug, Default)]
#[allow(missing_docs)]
pub struct Made {
    pub qps: Quota,
    pub cqs: Quota,
    pub srqs: Quota,
    pub mrs: Quota,
    pub mws: Quota,
    pub pds: Quota,
    pub ahs: Quota,
    pub dm_bytes: Quota,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_objects_than_the_limit_and_a_place_comes_back() {
        static QUOTA: Quota = Quota(AtomicU32::new(0));
        let first = QUOTA.take(2).unwrap();
        let second = QUOTA.take(2).unwrap();
        assert!(matches!(QUOTA.take(2), Err(VerbsError::NoResources(_))));
        drop(first);
        let third = QUOTA.take(2).unwrap();
        assert!(QUOTA.take(2).is_err());
        drop((second, third));
        assert!(QUOTA.take(1).is_ok());
        let bytes = QUOTA.take_many(7, 10).unwrap();
        assert!(QUOTA.take_many(4, 10).is_err() && QUOTA.take_many(u32::MAX, 10).is_err());
        drop(bytes);
        assert!(QUOTA.take_many(10, 10).is_ok());
    }
}
