//! Values that statics hold.
//!
//! No thread waits for another one that makes the value: a child that was forked meanwhile would wait for
//! ever. If two threads make it at once, the first value is kept.

// Reason: the values are reached by pointers that threads exchange.
#![allow(unsafe_code)]

use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::generation::generation;

struct Made<T> {
    generation: u32,
    value: T,
}

/// A value that exists once in a process. A forked child makes its own at the first use, and leaves its
/// parent's as it is.
pub struct PerProcess<T> {
    present: AtomicPtr<Made<T>>,
    make: fn() -> T,
}

impl<T> PerProcess<T> {
    /// Made by `make` at the first use.
    pub const fn new(make: fn() -> T) -> Self {
        Self { present: AtomicPtr::new(null_mut()), make }
    }

    #[cold]
    fn make(&self, mut seen: *mut Made<T>) -> &T {
        let new = Box::into_raw(Box::new(Made { generation: generation(), value: (self.make)() }));
        loop {
            match self.present.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Acquire) {
                // SAFETY: it is shared from now on, and never freed.
                Ok(_) => return unsafe { &(*new).value },
                Err(other) => {
                    // SAFETY: what is stored was made here, and is never freed.
                    if let Some(made) = unsafe { other.as_ref() }
                        && made.generation == generation()
                    {
                        // SAFETY: no other thread has seen it.
                        drop(unsafe { Box::from_raw(new) });
                        return &made.value;
                    }
                    seen = other;
                }
            }
        }
    }
}

impl<T> Deref for PerProcess<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        let present = self.present.load(Ordering::Acquire);
        // SAFETY: what is stored was made by `make`, and is never freed.
        match unsafe { present.as_ref() } {
            Some(made) if made.generation == generation() => &made.value,
            _ => self.make(present),
        }
    }
}

impl<T> std::fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(std::any::type_name::<T>())
    }
}

// SAFETY: threads share the value, and any of them may have made it.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::generation::begin_anew;

    #[test]
    fn a_value_is_made_once_and_again_in_a_child() {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        static PER_PROCESS: PerProcess<u32> = PerProcess::new(|| COUNT.fetch_add(1, Ordering::Relaxed));
        assert_eq!((*PER_PROCESS, *PER_PROCESS), (0, 0));
        begin_anew();
        assert_eq!((*PER_PROCESS, *PER_PROCESS), (1, 1));
    }

    #[test]
    fn threads_that_make_it_at_once_share_one() {
        for _ in 0..200 {
            let made = PerProcess::new(|| Box::new(7));
            std::thread::scope(|scope| {
                let seen = || scope.spawn(|| std::ptr::from_ref::<i32>(&made).addr());
                let threads = [seen(), seen(), seen(), seen()];
                let seen = threads.map(|thread| thread.join().unwrap());
                assert!(seen.iter().all(|at| *at == seen[0]), "{seen:?}");
            });
        }
    }
}
