//! Shuttle's locks and atomics behind the interfaces that the code uses.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

pub use std::sync::OnceLock;

use crate::ranks;
pub use crate::sys::now;

pub use shuttle::hint::spin_loop;
pub use shuttle::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
pub use shuttle::thread::{Thread, current, park, yield_now};
pub use shuttle::thread_local;

#[derive(Default)]
pub struct Mutex<T, const RANK: u8>(shuttle::sync::Mutex<T>);

pub struct MutexGuard<'a, T, const RANK: u8> {
    lock: &'a Mutex<T, RANK>,
    /// `None` while unlocked.
    guard: Option<shuttle::sync::MutexGuard<'a, T>>,
}

impl<T, const RANK: u8> Mutex<T, RANK> {
    pub const fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    #[track_caller]
    pub fn lock(&self) -> MutexGuard<'_, T, RANK> {
        crate::sys::held_up();
        ranks::wait_for(RANK);
        let guard = Some(self.0.lock().unwrap());
        ranks::taken(RANK, self);
        MutexGuard { lock: self, guard }
    }

    #[track_caller]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T, RANK>> {
        let guard = Some(self.0.try_lock().ok()?);
        ranks::taken(RANK, self);
        Some(MutexGuard { lock: self, guard })
    }

    /// No time passes here: the holder releases it in time.
    #[track_caller]
    pub fn try_lock_for(&self, _: Duration) -> Option<MutexGuard<'_, T, RANK>> {
        Some(self.lock())
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap()
    }
}

impl<T, const RANK: u8> MutexGuard<'_, T, RANK> {
    #[track_caller]
    pub fn unlocked<R>(this: &mut Self, f: impl FnOnce() -> R) -> R {
        ranks::released(this.lock);
        this.guard = None;
        let result = f();
        ranks::wait_for(RANK);
        this.guard = Some(this.lock.0.lock().unwrap());
        ranks::taken(RANK, this.lock);
        result
    }
}

impl<T, const RANK: u8> Drop for MutexGuard<'_, T, RANK> {
    fn drop(&mut self) {
        ranks::released(self.lock);
    }
}

impl<T, const RANK: u8> Deref for MutexGuard<'_, T, RANK> {
    type Target = T;
    fn deref(&self) -> &T {
        self.guard.as_ref().unwrap()
    }
}

impl<T, const RANK: u8> DerefMut for MutexGuard<'_, T, RANK> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().unwrap()
    }
}

#[derive(Default)]
pub struct RwLock<T, const RANK: u8>(shuttle::sync::RwLock<T>);

/// A guard of a [`RwLock`], of either kind.
pub struct Held<'a, G, L> {
    lock: &'a L,
    guard: G,
}

impl<T, const RANK: u8> RwLock<T, RANK> {
    pub const fn new(value: T) -> Self {
        Self(shuttle::sync::RwLock::new(value))
    }

    #[track_caller]
    pub fn read(&self) -> Held<'_, shuttle::sync::RwLockReadGuard<'_, T>, Self> {
        ranks::wait_for(RANK);
        let guard = self.0.read().unwrap();
        ranks::taken(RANK, self);
        Held { lock: self, guard }
    }

    #[track_caller]
    pub fn write(&self) -> Held<'_, shuttle::sync::RwLockWriteGuard<'_, T>, Self> {
        ranks::wait_for(RANK);
        let guard = self.0.write().unwrap();
        ranks::taken(RANK, self);
        Held { lock: self, guard }
    }
}

impl<G, L> Drop for Held<'_, G, L> {
    fn drop(&mut self) {
        ranks::released(self.lock);
    }
}

impl<G: Deref, L> Deref for Held<'_, G, L> {
    type Target = G::Target;
    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut, L> DerefMut for Held<'_, G, L> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

/// A static variable with a separate value for each execution.
pub struct PerProcess<T: 'static> {
    make: fn() -> T,
    of: std::sync::Mutex<Option<HashMap<u64, &'static T>>>,
}

impl<T> PerProcess<T> {
    pub const fn new(make: fn() -> T) -> Self {
        Self { make, of: std::sync::Mutex::new(None) }
    }
}

impl<T> Deref for PerProcess<T> {
    type Target = T;
    fn deref(&self) -> &T {
        let mut of = self.of.lock().unwrap();
        // Never freed: a small table for each execution.
        of.get_or_insert_default()
            .entry(crate::sys::execution())
            .or_insert_with(|| Box::leak(Box::new((self.make)())))
    }
}
