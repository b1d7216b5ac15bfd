//! Shuttle's locks and atomics behind the interfaces that the code uses.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

pub use std::sync::OnceLock;

pub use crate::sys::now;

pub use shuttle::hint::spin_loop;
pub use shuttle::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
pub use shuttle::thread::{Thread, current, park, yield_now};
pub use shuttle::thread_local;

#[derive(Default)]
pub struct Mutex<T>(shuttle::sync::Mutex<T>);

pub struct MutexGuard<'a, T> {
    lock: &'a Mutex<T>,
    /// `None` while unlocked.
    guard: Option<shuttle::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub const fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        crate::sys::held_up();
        MutexGuard { lock: self, guard: Some(self.0.lock().unwrap()) }
    }

    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        Some(MutexGuard { lock: self, guard: Some(self.0.try_lock().ok()?) })
    }

    pub fn try_lock_for(&self, _: Duration) -> Option<MutexGuard<'_, T>> {
        self.try_lock()
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap()
    }
}

impl<T> MutexGuard<'_, T> {
    pub fn unlocked<R>(this: &mut Self, f: impl FnOnce() -> R) -> R {
        this.guard = None;
        let result = f();
        this.guard = Some(this.lock.0.lock().unwrap());
        result
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.guard.as_ref().unwrap()
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().unwrap()
    }
}

#[derive(Default)]
pub struct RwLock<T>(shuttle::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub const fn new(value: T) -> Self {
        Self(shuttle::sync::RwLock::new(value))
    }

    pub fn read(&self) -> shuttle::sync::RwLockReadGuard<'_, T> {
        self.0.read().unwrap()
    }

    pub fn write(&self) -> shuttle::sync::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap()
    }
}

/// A static variable with a separate value for each execution.
pub struct LazyLock<T: 'static> {
    make: fn() -> T,
    of: std::sync::Mutex<Option<HashMap<u64, &'static T>>>,
}

impl<T> LazyLock<T> {
    pub const fn new(make: fn() -> T) -> Self {
        Self { make, of: std::sync::Mutex::new(None) }
    }
}

impl<T> Deref for LazyLock<T> {
    type Target = T;
    fn deref(&self) -> &T {
        let mut of = self.of.lock().unwrap();
        // Never freed: a small table for each execution.
        of.get_or_insert_default()
            .entry(crate::sys::execution())
            .or_insert_with(|| Box::leak(Box::new((self.make)())))
    }
}
