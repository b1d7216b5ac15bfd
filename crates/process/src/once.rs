//! Values that statics hold, and what a process does once.
//!
//! A child that was forked while another thread made a value must not wait for that thread. So either no
//! thread waits for another one ([`PerProcess`]: if two make it at once, the first value is kept), or a fork
//! waits, too ([`Once`], [`OnceValue`]).

// Reason: the values are reached by pointers that threads exchange.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::generation::generation;
use crate::locks::{Mutex, MutexGuard};

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

impl<T> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::any::type_name::<T>())
    }
}

// SAFETY: threads share the value, and any of them may have made it.
unsafe impl<T: Send + Sync> Sync for PerProcess<T> {}

/// Held by a thread while it makes what a process has once, and over a fork: so a child finds all of it made,
/// or not begun. With a cell of the standard library a child would wait for its parent's thread.
static MAKING: Mutex<(), 27> = Mutex::new(());

thread_local! {
    /// Whether the calling thread has it: what is made may need something else that is made.
    static MAKES: Cell<bool> = const { Cell::new(false) };
}

/// While this exists, no other thread makes what the process has once.
pub struct Making {
    /// `None`: this thread has it already.
    outermost: Option<MutexGuard<'static, (), 27>>,
}

impl Making {
    /// Waits until the others have made it.
    pub fn begin() -> Self {
        Self { outermost: (!MAKES.replace(true)).then(|| MAKING.lock()) }
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        if self.outermost.is_some() {
            MAKES.set(false);
        }
    }
}

/// What a process does once, at its first use of the library. The threads that come meanwhile wait, and so
/// does a fork.
pub struct Once(AtomicBool);

impl Once {
    /// Not done yet.
    #[allow(clippy::new_without_default, reason = "for statics")]
    pub const fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Does it, unless it is done.
    #[inline]
    pub fn call(&self, act: impl FnOnce()) {
        if !self.0.load(Ordering::Acquire) {
            self.call_slowly(act);
        }
    }

    #[cold]
    fn call_slowly(&self, act: impl FnOnce()) {
        let _making = Making::begin();
        if !self.0.load(Ordering::Acquire) {
            act();
            self.0.store(true, Ordering::Release);
        }
    }
}

/// A value that is made at its first use and stays. The threads that come meanwhile wait, and so does a fork.
/// A child has its parent's.
pub struct OnceValue<T> {
    value: AtomicPtr<T>,
    owned: PhantomData<*const T>,
}

impl<T> OnceValue<T> {
    /// Not made yet.
    #[allow(clippy::new_without_default, reason = "for statics")]
    pub const fn new() -> Self {
        Self { value: AtomicPtr::new(null_mut()), owned: PhantomData }
    }

    /// The value, if it is made.
    #[inline]
    pub fn get(&self) -> Option<&T> {
        // SAFETY: what is stored was made here, and is not changed until this is dropped.
        unsafe { self.value.load(Ordering::Acquire).as_ref() }
    }

    /// The value; `make` makes it, the first time.
    #[inline]
    pub fn get_or_make(&self, make: impl FnOnce() -> T) -> &T {
        match self.get() {
            Some(value) => value,
            None => self.make(make),
        }
    }

    #[cold]
    fn make(&self, make: impl FnOnce() -> T) -> &T {
        let _making = Making::begin();
        if let Some(value) = self.get() {
            return value;
        }
        let new = Box::into_raw(Box::new(make()));
        let stored = self.value.compare_exchange(null_mut(), new, Ordering::AcqRel, Ordering::Acquire);
        // Not null only if `make` has come here itself.
        let kept = stored.map_or_else(
            |other| {
                // SAFETY: no other thread has seen it.
                drop(unsafe { Box::from_raw(new) });
                other
            },
            |_| new,
        );
        // SAFETY: it is stored, and not changed until this is dropped.
        unsafe { &*kept }
    }
}

impl<T> Drop for OnceValue<T> {
    fn drop(&mut self) {
        let value = *self.value.get_mut();
        if !value.is_null() {
            // SAFETY: made by `make`; nobody has a reference to it any more.
            drop(unsafe { Box::from_raw(value) });
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for OnceValue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

// SAFETY: it owns the value.
unsafe impl<T: Send> Send for OnceValue<T> {}
// SAFETY: threads share the value, and any of them may have made it.
unsafe impl<T: Send + Sync> Sync for OnceValue<T> {}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::generation::begin_anew;

    /// One test makes this process a child, and what belongs to a process is then made anew, for all tests.
    static GENERATION: std::sync::RwLock<()> = std::sync::RwLock::new(());

    #[test]
    fn a_value_is_made_once_and_again_in_a_child() {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        static PER_PROCESS: PerProcess<u32> = PerProcess::new(|| COUNT.fetch_add(1, Ordering::Relaxed));
        let _alone = GENERATION.write();
        assert_eq!((*PER_PROCESS, *PER_PROCESS), (0, 0));
        begin_anew();
        assert_eq!((*PER_PROCESS, *PER_PROCESS), (1, 1));
    }

    #[test]
    fn threads_that_make_it_at_once_share_one() {
        let _same = GENERATION.read();
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

    #[test]
    fn it_is_done_once_and_threads_wait_for_the_one_that_does_it() {
        let (once, count) = (Once::new(), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    once.call(|| {
                        std::thread::yield_now();
                        count.fetch_add(1, Ordering::Relaxed);
                    });
                    assert_eq!(count.load(Ordering::Relaxed), 1);
                });
            }
        });
        once.call(|| unreachable!("it is done"));
    }

    /// A child that was forked while another thread made what C sees of a device waited for it for ever.
    #[test]
    fn a_fork_waits_for_what_is_being_made() {
        static VALUE: OnceValue<u32> = OnceValue::new();
        static INNER: OnceValue<u32> = OnceValue::new();
        let (begun, has_begun) = std::sync::mpsc::channel();
        let maker = std::thread::spawn(move || {
            *VALUE.get_or_make(|| {
                begun.send(()).unwrap();
                std::thread::yield_now();
                // What it needs is made in the same thread.
                *INNER.get_or_make(|| 6) + 1
            })
        });
        has_begun.recv().unwrap();
        let fork = Making::begin();
        assert_eq!((VALUE.get(), INNER.get()), (Some(&7), Some(&6)));
        drop(fork);
        assert_eq!(maker.join().unwrap(), 7);
        assert_eq!(*VALUE.get_or_make(|| 8), 7);
    }
}
