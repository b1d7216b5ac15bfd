//! Which process of a line of forks this is.

use std::sync::atomic::{AtomicU32, Ordering};

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Different in a process and in a child that it forks. What was made in another generation is the parent's.
#[inline]
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Whether this process was forked from one that had loaded the library.
#[inline]
pub fn forked() -> bool {
    generation() != 0
}

/// This process is a child that was forked just now; no other thread is here.
pub fn begin_anew() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// In which process something was made.
#[derive(Debug, Clone, Copy)]
pub struct Birth(u32);

impl Birth {
    /// In this one.
    pub fn here() -> Self {
        Self(generation())
    }

    /// It was made by the process that this one was forked from, and is not to be used here.
    #[inline]
    pub fn is_parents(self) -> bool {
        self.0 != generation()
    }
}
