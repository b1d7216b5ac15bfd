//! What a fork changes: the child is another process, and must not use what its parent drew or made.

use std::sync::atomic::{AtomicU32, Ordering};

static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Different in a process and in a child that it forks. What was made in another generation is the parent's.
#[inline]
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// This process is a child that was forked just now; no other thread is here.
pub fn begin_anew() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}
