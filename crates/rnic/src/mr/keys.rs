//! STags: the table of the regions and windows that have one, and who may take one away.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::window::{WINDOW_NAME, WindowType};
use super::{Access, AccessError, Mr};
use crate::error::VerbsError;
use crate::pd::Pd;
use crate::random::random_u32;
use crate::sync::{Ordering, PerProcess, RwLock};

/// Invalidates the region with this STag, or the window that queue pair `qpn` has bound, if it belongs to
/// `pd`: for local invalidation. Waits until nothing uses its memory any more, as no use lasts longer than
/// one system call: when the work request is complete, no peer writes there.
pub fn invalidate(stag: u32, pd: u32, qpn: u32) -> Result<(), AccessError> {
    invalidate_if(stag, pd, qpn, |_| true)?.wait_for_users();
    Ok(())
}

/// The same for Send with Invalidate. A peer must not invalidate a region that gives it no right. Nor may it
/// take a region from other streams (RFC 5040 section 8.1.1 rule 7), and a region serves every stream of its
/// domain: docs/adr/012.
pub fn invalidate_remotely(stag: u32, pd: &Pd, qpn: u32) -> Result<(), AccessError> {
    let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    invalidate_if(stag, pd.id(), qpn, |mr| mr.access.intersects(remote) && pd.streams() <= 1).map(drop)
}

/// `may` decides for regions. Only its queue pair can invalidate a window of type 2; a window of type 1
/// cannot be invalidated.
fn invalidate_if(
    stag: u32,
    pd: u32,
    qpn: u32,
    may: impl FnOnce(&Mr) -> bool,
) -> Result<Arc<Mr>, AccessError> {
    TABLE.remove_if(stag, |mr| {
        if mr.pd.id() != pd {
            return Err(AccessError::WrongPd);
        }
        let may = mr.window.as_ref().map_or_else(|| may(mr), |window| window.qpn == Some(qpn));
        may.then_some(()).ok_or(AccessError::Rights)
    })
}

/// STags are random, so a peer that knows one cannot guess another (RFC 5042 section 5.1).
///
/// Regions in the table are valid, all others are not: a region enters, leaves and changes validity under the
/// table's lock.
pub(super) struct Table {
    pub(super) keys: RwLock<Keys, 23>,
}

type ByKey<T> = HashMap<u32, T, BuildHasherDefault<StagHasher>>;

#[derive(Default)]
pub(super) struct Keys {
    /// Includes bound windows.
    pub(super) regions: ByKey<Arc<Mr>>,
    /// All windows, by the part of their keys that never changes. No region has a key that could become a key
    /// of a window.
    pub(super) windows: ByKey<Named>,
}

/// A window, bound or not.
#[derive(Debug, Clone, Copy)]
pub(super) struct Named {
    pub(super) pd: u32,
    pub(super) kind: WindowType,
    /// Its present key, or its last one.
    pub(super) key: u32,
}

/// A forked child has none of its parent's.
pub(super) static TABLE: PerProcess<Table> = PerProcess::new(|| Table { keys: RwLock::default() });

impl Keys {
    pub(super) fn remove(&mut self, stag: u32) -> Option<Arc<Mr>> {
        let mr = self.regions.remove(&stag)?;
        mr.valid.store(false, Ordering::SeqCst);
        if let Some(window) = &mr.window {
            window.region.windows.fetch_sub(1, Ordering::SeqCst);
        }
        Some(mr)
    }
}

impl Table {
    pub(super) fn insert(&self, make: impl FnOnce(u32) -> Arc<Mr>) -> Result<Arc<Mr>, VerbsError> {
        let mut keys = self.keys.write();
        // The number of tries is bounded: with a million regions one draw in 4,000 is taken.
        for _ in 0..64 {
            let stag = random_u32()?;
            let taken = keys.regions.contains_key(&stag) || keys.windows.contains_key(&(stag & WINDOW_NAME));
            // Peers write 0 for "no STag"; all ones means none too.
            if stag != 0 && stag != u32::MAX && !taken {
                let mr = make(stag);
                keys.regions.insert(stag, mr.clone());
                return Ok(mr);
            }
        }
        Err(VerbsError::NoResources("STags"))
    }

    pub(super) fn find(&self, stag: u32) -> Option<Arc<Mr>> {
        self.keys.read().regions.get(&stag).cloned()
    }

    /// Gives the key of `old` to another region; fails if `old` was invalidated, or has windows.
    pub(super) fn replace(&self, old: &Mr, new: &Arc<Mr>) -> bool {
        let mut keys = self.keys.write();
        let place = keys.regions.get_mut(&old.stag).filter(|mr| std::ptr::eq(Arc::as_ptr(mr), old));
        let Some(place) = place.filter(|mr| !mr.has_windows()) else { return false };
        old.valid.store(false, Ordering::SeqCst);
        *place = new.clone();
        true
    }

    /// Invalidates the key, if `may` allows it and no window is bound to the region.
    pub(super) fn remove_if(
        &self,
        stag: u32,
        may: impl FnOnce(&Mr) -> Result<(), AccessError>,
    ) -> Result<Arc<Mr>, AccessError> {
        let mut keys = self.keys.write();
        let mr = keys.regions.get(&stag).ok_or(AccessError::InvalidStag)?;
        may(mr)?;
        if mr.has_windows() {
            return Err(AccessError::Rights);
        }
        keys.remove(stag).ok_or(AccessError::InvalidStag)
    }
}

/// The keys are random already.
#[derive(Default)]
pub(super) struct StagHasher(u64);

impl Hasher for StagHasher {
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*b);
        }
    }

    fn write_u32(&mut self, stag: u32) {
        self.0 = u64::from(stag).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
