//! A lock whose holder, before it is done, looks again for those who found it taken.
//!
//! Whoever has the lock does the work. Whoever brings news of work and finds it taken leaves a mark (`kick`)
//! and goes; the holder looks at the mark after letting go, so that no news is lost. Therefore the lock is
//! let go by [`Attended::release`] and [`Attended::let_go`] alone, however short it was held. The model of it
//! is in `crates/model`.

use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, fence};

pub(crate) struct Attended<T> {
    inner: Mutex<T>,
    /// Somebody found the lock taken.
    kick: AtomicBool,
}

impl<T> Attended<T> {
    pub fn new(inner: T) -> Self {
        Self { inner: Mutex::new(inner), kick: AtomicBool::new(false) }
    }

    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.inner.lock()
    }

    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.inner.try_lock()
    }

    pub fn try_lock_for(&self, patience: std::time::Duration) -> Option<MutexGuard<'_, T>> {
        self.inner.try_lock_for(patience)
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut()
    }

    /// Whether somebody has found the lock taken. A mark left from now on is seen by whoever lets go of it.
    #[inline]
    pub fn kicked(&self) -> bool {
        self.kick.load(Ordering::SeqCst)
    }

    /// Lets go of the lock; says whether there is news, with which the caller goes on by [`Self::look`]. For
    /// a holder that changed nothing that others have to know.
    #[inline]
    #[must_use = "news would be lost"]
    pub fn let_go(&self, inner: MutexGuard<'_, T>) -> bool {
        drop(inner);
        after_unlock();
        self.kick.load(Ordering::SeqCst)
    }

    /// Lets go of the lock, each time after `finish`, and takes it again for `work` as long as there is news.
    #[inline]
    pub fn release<'a>(
        &'a self,
        mut inner: MutexGuard<'a, T>,
        finish: impl Fn(&mut MutexGuard<'a, T>),
        work: impl Fn(&mut T),
    ) {
        loop {
            finish(&mut inner);
            drop(inner);
            after_unlock();
            // Read first: nearly always there is nothing, and reading is cheap.
            if !(self.kick.load(Ordering::SeqCst) && self.kick.swap(false, Ordering::SeqCst)) {
                return;
            }
            match self.inner.try_lock() {
                Some(again) => inner = again,
                // The new holder looks when it lets go: put the mark back for it.
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

    /// For one that brings news: the lock, to work and to be let go by [`Self::release`]. `None`: another
    /// thread has it, and does.
    #[inline]
    pub fn look(&self) -> Option<MutexGuard<'_, T>> {
        self.kick.store(true, Ordering::SeqCst);
        // Marked before the lock is looked at.
        fence(Ordering::SeqCst);
        let inner = self.inner.try_lock()?;
        // Exchanged, not stored: what the work then reads must not be read before, or the news of one who
        // left a mark in between is missed with it. (A store may be late on ARM.)
        self.kick.swap(false, Ordering::SeqCst);
        Some(inner)
    }
}

/// The mark is looked at after the lock is free. On x86, letting go of the lock is a barrier itself.
#[inline]
fn after_unlock() {
    if cfg!(not(any(target_arch = "x86_64", target_arch = "x86"))) {
        fence(Ordering::SeqCst);
    }
}
