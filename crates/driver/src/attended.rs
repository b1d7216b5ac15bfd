//! A lock whose holder looks for new work before it finishes, on behalf of threads that found the lock taken.
//!
//! The thread that has the lock does the work. A thread that brings new work and finds the lock taken leaves
//! a mark (`kick`) and returns. The holder checks the mark after it has unlocked, so that no work is lost.
//! Therefore the lock is released only by [`Attended::release`] and [`Attended::let_go`], however short it
//! was held. Its model is in `crates/model`.

use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, fence};

/// See the head of its file: a lock that does the work of those who find it taken.
pub struct Attended<T, const RANK: u8> {
    inner: Mutex<T, RANK>,
    /// A thread found the lock taken.
    kick: AtomicBool,
}

impl<T, const RANK: u8> Attended<T, RANK> {
    /// A lock that is free.
    pub fn new(inner: T) -> Self {
        Self { inner: Mutex::new(inner), kick: AtomicBool::new(false) }
    }

    /// Waits for the lock. To be released by [`Self::release`] or [`Self::let_go`].
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn lock(&self) -> MutexGuard<'_, T, RANK> {
        self.inner.lock()
    }

    /// The lock, if it is free; nothing is left for the holder otherwise.
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T, RANK>> {
        self.inner.try_lock()
    }

    /// Waits for the lock for so long.
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn try_lock_for(&self, patience: std::time::Duration) -> Option<MutexGuard<'_, T, RANK>> {
        self.inner.try_lock_for(patience)
    }

    /// What it guards, without the lock: no other thread has it.
    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }

    /// Whether a thread has found the lock taken. The thread that releases the lock sees a mark that is left
    /// from now on.
    #[inline]
    pub fn kicked(&self) -> bool {
        self.kick.load(Ordering::SeqCst)
    }

    /// Releases the lock. Returns whether there is new work; if so, the caller continues with [`Self::look`].
    /// For a holder that changed nothing that other threads must learn of.
    #[inline]
    #[must_use = "news would be lost"]
    pub fn let_go(&self, inner: MutexGuard<'_, T, RANK>) -> bool {
        drop(inner);
        after_unlock();
        self.kick.load(Ordering::SeqCst)
    }

    /// Runs `finish` and releases the lock; takes it again for `work` and repeats this while there is new
    /// work.
    #[inline]
    pub fn release<'a>(
        &'a self,
        mut inner: MutexGuard<'a, T, RANK>,
        finish: impl Fn(&mut MutexGuard<'a, T, RANK>),
        work: impl Fn(&mut T),
    ) {
        loop {
            finish(&mut inner);
            drop(inner);
            after_unlock();
            // Read first: nearly always there is no mark, and reading is cheap.
            if !(self.kick.load(Ordering::SeqCst) && self.kick.swap(false, Ordering::SeqCst)) {
                return;
            }
            match self.inner.try_lock() {
                Some(again) => inner = again,
                // The new holder checks the mark when it releases the lock: set it again.
                None => {
                    self.kick.store(true, Ordering::SeqCst);
                    fence(Ordering::SeqCst);
                    match self.inner.try_lock() {
                        Some(again) => inner = again,
                        None => return,
                    }
                }
            }
            work(&mut inner);
        }
    }

    /// For a thread that brings new work: the lock, to do the work and then [`Self::release`] it. `None`:
    /// another thread has the lock, and does the work.
    #[inline]
    #[cfg_attr(debug_assertions, track_caller)]
    pub fn look(&self) -> Option<MutexGuard<'_, T, RANK>> {
        self.kick.store(true, Ordering::SeqCst);
        // The mark is set before the lock is tried.
        fence(Ordering::SeqCst);
        let inner = self.inner.try_lock()?;
        // An exchange, not a store: the reads of the work that follows must not be done earlier, or they
        // could miss the work of a thread that left a mark in between. (On ARM, a store may be delayed.)
        self.kick.swap(false, Ordering::SeqCst);
        Some(inner)
    }
}

/// The mark is read after the lock is free. On x86, unlocking is a barrier itself.
#[inline]
fn after_unlock() {
    if cfg!(not(any(target_arch = "x86_64", target_arch = "x86"))) {
        fence(Ordering::SeqCst);
    }
}
