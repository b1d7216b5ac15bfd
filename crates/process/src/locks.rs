//! Locks whose whole state is in themselves.
//!
//! Other locks keep the threads that wait in a table of the process, under locks of that table. A forked
//! child has a copy of it, with threads that do not exist, and perhaps with one of its locks held for ever.
//! Here a thread waits in the system (futex(2)), by calls that are no cancellation points.
//!
//! The type of a lock names its rank, which docs/locks.md explains and `ranks.rs` checks.

// Reason: `lock_api` trusts its implementors.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use lock_api::GuardNoSend;

use crate::futex::{ALL, AtomicU32, LOOKS, Ordering, sleep, spin_loop, wake};
use crate::ranks;

/// A lock of one holder.
pub type Mutex<T, const RANK: u8> = lock_api::Mutex<RawMutex<RANK>, T>;
/// Held while this exists.
pub type MutexGuard<'a, T, const RANK: u8> = lock_api::MutexGuard<'a, RawMutex<RANK>, T>;
/// A lock of many readers or one writer. A thread must not take it twice.
pub type RwLock<T, const RANK: u8> = lock_api::RwLock<RawRwLock<RANK>, T>;
/// Held while this exists.
pub type RwLockReadGuard<'a, T, const RANK: u8> = lock_api::RwLockReadGuard<'a, RawRwLock<RANK>, T>;
/// Held while this exists.
pub type RwLockWriteGuard<'a, T, const RANK: u8> = lock_api::RwLockWriteGuard<'a, RawRwLock<RANK>, T>;

/// A lock without data.
pub struct RawMutex<const RANK: u8>(MutexWord);

/// The word of a mutex.
struct MutexWord(AtomicU32);

const FREE: u32 = 0;
const HELD: u32 = 1;
/// And threads may sleep.
const WANTED: u32 = 2;

impl MutexWord {
    /// Waits until `until` at most; returns whether it has the lock.
    #[cold]
    fn lock_slowly(&self, until: Option<Instant>) -> bool {
        // A thread that has slept does not know whether others sleep.
        let mut held = HELD;
        loop {
            for _ in 0..LOOKS {
                match self.0.load(Ordering::Relaxed) {
                    FREE if self.try_to_hold(held) => return true,
                    WANTED => break,
                    _ => spin_loop(),
                }
            }
            if self.0.swap(WANTED, Ordering::Acquire) == FREE {
                return true;
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            sleep(&self.0, WANTED, left);
            held = WANTED;
        }
    }

    #[inline]
    fn try_to_hold(&self, held: u32) -> bool {
        self.0.compare_exchange(FREE, held, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }
}

// SAFETY: one thread at a time finds it free.
unsafe impl<const RANK: u8> lock_api::RawMutex for RawMutex<RANK> {
    #[allow(clippy::declare_interior_mutable_const, reason = "the trait's")]
    const INIT: Self = Self(MutexWord(AtomicU32::new(FREE)));

    type GuardMarker = GuardNoSend;

    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    fn lock(&self) {
        ranks::wait_for(RANK);
        if !self.0.try_to_hold(HELD) {
            self.0.lock_slowly(None);
        }
        ranks::taken(RANK, self);
    }

    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    fn try_lock(&self) -> bool {
        let taken = self.0.try_to_hold(HELD);
        if taken {
            ranks::taken(RANK, self);
        }
        taken
    }

    #[inline]
    unsafe fn unlock(&self) {
        ranks::released(self);
        let word = &self.0.0;
        if word.swap(FREE, Ordering::Release) == WANTED {
            wake(word, 1);
        }
    }
}

// SAFETY: as above.
unsafe impl<const RANK: u8> lock_api::RawMutexTimed for RawMutex<RANK> {
    type Duration = Duration;
    type Instant = Instant;

    #[cfg_attr(debug_assertions, track_caller)]
    fn try_lock_for(&self, limit: Duration) -> bool {
        ranks::wait_for(RANK);
        // A limit that the clock cannot express is none.
        let taken = self.0.try_to_hold(HELD) || self.0.lock_slowly(Instant::now().checked_add(limit));
        if taken {
            ranks::taken(RANK, self);
        }
        taken
    }

    #[cfg_attr(debug_assertions, track_caller)]
    fn try_lock_until(&self, until: Instant) -> bool {
        ranks::wait_for(RANK);
        let taken = self.0.try_to_hold(HELD) || self.0.lock_slowly(Some(until));
        if taken {
            ranks::taken(RANK, self);
        }
        taken
    }
}

/// A lock of many readers or one writer, without data.
pub struct RawRwLock<const RANK: u8>(RwLockWord);

/// The words of a lock of many readers or one writer.
struct RwLockWord {
    /// The number of readers; [`WRITER`]; [`AWAITED`].
    state: AtomicU32,
    /// Threads that sleep, or are about to.
    sleepers: AtomicU32,
}

/// A writer has it.
const WRITER: u32 = 1 << 31;
/// A writer waits: no more readers are let in, or it might wait for ever.
const AWAITED: u32 = 1 << 30;
const READERS: u32 = AWAITED - 1;

impl RwLockWord {
    #[cold]
    fn wait_for(&self, enter: impl Fn(u32) -> Option<u32>, awaited: u32) {
        let mut looks = 0;
        loop {
            let state = self.state.load(Ordering::Relaxed);
            if self.enter_from(state, &enter) {
                return;
            }
            if looks < LOOKS {
                looks += 1;
                spin_loop();
                continue;
            }
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            // Behind this, a thread that leaves sees the sleeper, or the state has changed.
            let state = self.state.fetch_or(awaited, Ordering::SeqCst) | awaited;
            if enter(state).is_none() {
                sleep(&self.state, state, None);
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[inline]
    fn try_to_enter(&self, enter: impl Fn(u32) -> Option<u32>) -> bool {
        self.state.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).is_ok()
    }

    #[inline]
    fn enter_from(&self, state: u32, enter: &impl Fn(u32) -> Option<u32>) -> bool {
        enter(state).is_some_and(|next| {
            self.state.compare_exchange_weak(state, next, Ordering::Acquire, Ordering::Relaxed).is_ok()
        })
    }

    /// After the state was changed, by an operation that is SeqCst: either this sees a sleeper, or the
    /// sleeper, which counts itself first, sees the change.
    #[inline]
    fn wake_sleepers(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            wake(&self.state, ALL);
        }
    }
}

#[inline]
fn one_reader_more(state: u32) -> Option<u32> {
    (state & (WRITER | AWAITED) == 0 && state & READERS != READERS).then(|| state + 1)
}

/// Another writer that waits says so again.
#[inline]
fn the_writer(state: u32) -> Option<u32> {
    (state & (WRITER | READERS) == 0).then_some(WRITER)
}

// SAFETY: a writer enters only while no thread has the lock, a reader only while no writer has it.
unsafe impl<const RANK: u8> lock_api::RawRwLock for RawRwLock<RANK> {
    #[allow(clippy::declare_interior_mutable_const, reason = "the trait's")]
    const INIT: Self = Self(RwLockWord { state: AtomicU32::new(0), sleepers: AtomicU32::new(0) });

    type GuardMarker = GuardNoSend;

    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    fn lock_shared(&self) {
        ranks::wait_for(RANK);
        let word = &self.0;
        if !word.enter_from(word.state.load(Ordering::Relaxed), &one_reader_more) {
            word.wait_for(one_reader_more, 0);
        }
        ranks::taken(RANK, self);
    }

    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    fn try_lock_shared(&self) -> bool {
        let taken = self.0.try_to_enter(one_reader_more);
        if taken {
            ranks::taken(RANK, self);
        }
        taken
    }

    #[inline]
    unsafe fn unlock_shared(&self) {
        ranks::released(self);
        if self.0.state.fetch_sub(1, Ordering::SeqCst) & READERS == 1 {
            self.0.wake_sleepers();
        }
    }

    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    fn lock_exclusive(&self) {
        ranks::wait_for(RANK);
        let word = &self.0;
        if !word.enter_from(word.state.load(Ordering::Relaxed), &the_writer) {
            word.wait_for(the_writer, AWAITED);
        }
        ranks::taken(RANK, self);
    }

    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    fn try_lock_exclusive(&self) -> bool {
        let taken = self.0.try_to_enter(the_writer);
        if taken {
            ranks::taken(RANK, self);
        }
        taken
    }

    #[inline]
    unsafe fn unlock_exclusive(&self) {
        ranks::released(self);
        // A writer that waits says so again. In a forked child there is none, but the mark may be left.
        self.0.state.fetch_and(!(WRITER | AWAITED), Ordering::SeqCst);
        self.0.wake_sleepers();
    }
}

/// Threads wait with a [`Mutex`] for something to change. It changes under this mutex.
#[derive(Debug, Default)]
pub struct Condvar {
    /// Counts the changes.
    changes: AtomicU32,
    /// Threads that wait, counted under the mutex: whoever changes something later sees them.
    waiters: AtomicU32,
}

impl Condvar {
    /// Nobody waits.
    pub const fn new() -> Self {
        Self { changes: AtomicU32::new(0), waiters: AtomicU32::new(0) }
    }

    /// Releases the lock, waits for a change, and takes the lock again. May return without one.
    pub fn wait<T, const RANK: u8>(&self, guard: &mut MutexGuard<'_, T, RANK>) {
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let seen = self.changes.load(Ordering::Relaxed);
        MutexGuard::unlocked(guard, || sleep(&self.changes, seen, None));
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }

    /// As [`Self::wait`], at most for `limit`.
    pub fn wait_for<T, const RANK: u8>(&self, guard: &mut MutexGuard<'_, T, RANK>, limit: Duration) {
        self.waiters.fetch_add(1, Ordering::Relaxed);
        let seen = self.changes.load(Ordering::Relaxed);
        MutexGuard::unlocked(guard, || sleep(&self.changes, seen, Some(limit)));
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }

    /// Something has changed: wakes all threads. Makes no system call if none waits.
    pub fn notify_all(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        if self.waiters.load(Ordering::Relaxed) != 0 {
            wake(&self.changes, ALL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUNDS: usize = 20_000;

    #[test]
    fn no_two_threads_have_the_lock() {
        let count = Mutex::<_, 1>::new(0usize);
        std::thread::scope(|scope| {
            for n in 0..4 {
                let count = &count;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let mut guard = if round % 3 == n % 3 {
                            count.try_lock_for(Duration::from_secs(60)).expect("the lock")
                        } else {
                            count.lock()
                        };
                        let before = *guard;
                        if round % 256 == 0 {
                            std::thread::yield_now();
                        }
                        *guard = before + 1;
                    }
                });
            }
        });
        assert_eq!(*count.lock(), 4 * ROUNDS);
        let held = count.lock();
        assert!(count.try_lock().is_none());
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(count.try_lock_for(Duration::from_millis(2)).is_none()));
        });
        drop(held);
        assert!(count.try_lock().is_some());
    }

    #[test]
    fn writers_have_it_alone_and_readers_see_whole_values() {
        let pair = RwLock::<_, 1>::new((0usize, 0usize));
        std::thread::scope(|scope| {
            for n in 0..4 {
                let pair = &pair;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        if (round + n) % 4 == 0 {
                            let mut both = pair.write();
                            both.0 += 1;
                            if round % 256 == 0 {
                                std::thread::yield_now();
                            }
                            both.1 += 1;
                        } else {
                            let both = pair.read();
                            assert_eq!(both.0, both.1);
                        }
                    }
                });
            }
        });
        assert_eq!(*pair.read(), (ROUNDS, ROUNDS));
        let read = pair.read();
        assert!(pair.try_read().is_some() && pair.try_write().is_none());
        drop(read);
        let write = pair.write();
        assert!(pair.try_read().is_none() && pair.try_write().is_none());
        drop(write);
        assert!(pair.try_write().is_some());
    }

    /// The child of a thread that forks with the lock has the marks of threads that are not there.
    #[test]
    fn a_writer_that_a_child_does_not_have_keeps_no_reader_out() {
        let lock = RwLock::<_, 1>::new(0);
        let write = lock.write();
        // SAFETY: only looked at and marked, not unlocked.
        let word = unsafe { &lock.raw().0 };
        word.state.fetch_or(AWAITED, Ordering::SeqCst);
        word.sleepers.fetch_add(1, Ordering::SeqCst);
        drop(write);
        assert!(lock.try_read().is_some());
        drop(lock.write());
        assert_eq!(*lock.read(), 0);
    }

    #[test]
    fn who_waits_for_a_change_hears_of_it() {
        let (count, changed) = (Mutex::<_, 1>::new(0), Condvar::new());
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut count = count.lock();
                    while *count < 1000 {
                        changed.wait(&mut count);
                    }
                });
            }
            for _ in 0..1000 {
                *count.lock() += 1;
                changed.notify_all();
            }
        });
    }
}
