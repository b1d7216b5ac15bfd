//! The system's futex(2), and what waits with it. `crates/model` has another one, and compiles `locks.rs`
//! with it once more.

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;

/// How often a thread looks before it sleeps: most locks are held for less time than a sleep takes.
pub(crate) const LOOKS: u32 = 100;

/// All that sleep. (The kernel has a signed number.)
pub(crate) const ALL: u32 = i32::MAX as u32;

/// Sleeps while the word has this value, at most for `limit`. May return early.
pub(crate) fn sleep(word: &AtomicU32, value: u32, limit: Option<Duration>) {
    let limit = limit.map(|limit| futex::Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    // Whatever it says, the caller looks again.
    let _ = futex::wait(word, futex::Flags::PRIVATE, value, limit.as_ref());
}

/// Wakes so many threads that sleep at this word.
pub(crate) fn wake(word: &AtomicU32, threads: u32) {
    // Fails only for a word that is none.
    let _ = futex::wake(word, futex::Flags::PRIVATE, threads);
}
