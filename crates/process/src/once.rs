//! Values that statics hold.
//!
//! No thread waits for another one that makes the value: a child that was forked meanwhile would wait for
//! ever. If two threads make it at once, the first value is kept.

// Reason: the values are reached by pointers that threads exchange.
#![allow(unsafe_code)]

use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::generation::generation;
use crate::locks::{ALL, sleep, wake};

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

/// What a process does once, at its first use of the library. The threads that come meanwhile wait. A child
/// that is forked meanwhile does it anew: the thread that had begun is its parent's.
pub struct Once(AtomicU32);

const NOT_YET: u32 = 0;
const DONE: u32 = u32::MAX;

impl Once {
    /// Not done yet.
    #[allow(clippy::new_without_default, reason = "for statics")]
    pub const fn new() -> Self {
        Self(AtomicU32::new(NOT_YET))
    }

    /// Does it, unless it is done.
    #[inline]
    pub fn call(&self, act: impl FnOnce()) {
        if self.0.load(Ordering::Acquire) != DONE {
            self.call_slowly(act);
        }
    }

    #[cold]
    fn call_slowly(&self, act: impl FnOnce()) {
        // While it is done, the word names the process. The generation does not serve: what makes a child
        // begin one may be what is done here.
        let process = std::process::id();
        loop {
            let seen = self.0.load(Ordering::Acquire);
            if seen == DONE {
                return;
            }
            if seen == process {
                sleep(&self.0, seen, None);
            } else if self.0.compare_exchange(seen, process, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                act();
                self.0.store(DONE, Ordering::Release);
                wake(&self.0, ALL);
                return;
            }
        }
    }
}

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

    /// A child that was forked while another thread set up logging waited for it for ever.
    #[test]
    fn what_a_parents_thread_had_begun_is_done_anew() {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = || {
            std::thread::yield_now();
            COUNT.fetch_add(1, Ordering::Relaxed);
        };
        let once = Once::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| once.call(count));
            }
        });
        assert_eq!(COUNT.load(Ordering::Relaxed), 1);
        let begun = Once(AtomicU32::new(std::process::id() + 1));
        begun.call(count);
        begun.call(count);
        assert_eq!(COUNT.load(Ordering::Relaxed), 2);
    }
}
