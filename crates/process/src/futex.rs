//! The system's futex(2), and what a thread keeps for itself. `crates/model` has others, and compiles
//! `locks.rs`, `order.rs` and `ranks.rs` with them once more.

use std::cell::Cell;
pub(crate) use std::hint::spin_loop;
use std::io::Write as _;
pub(crate) use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex;

use crate::order::Held;

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

thread_local! {
    /// The locks that the thread holds, in debug builds. Nothing is dropped at its end, and destructors and
    /// handlers of exit may take locks.
    static HELD: Cell<Held> = const { Cell::new(Held::none()) };
}

/// Looks at the locks that the calling thread holds, and changes them. A signal handler that comes in the
/// middle releases what it has taken.
pub(crate) fn held<T>(change: impl FnOnce(&mut Held) -> T) -> T {
    let mut held = HELD.get();
    let result = change(&mut held);
    HELD.set(held);
    result
}

/// A mistake in the library, in a debug build. A panic might be caught, and the test pass.
#[cold]
pub(crate) fn out_of_order(words: &str) -> ! {
    // Not captured by a test's harness.
    let _ = writeln!(std::io::stderr(), "uwarp: {words}\n{}", std::backtrace::Backtrace::force_capture());
    std::process::abort()
}
