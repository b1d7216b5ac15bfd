//! The lock and the clock of bring-up. `crates/model` compiles `pairing.rs` once more with others, at
//! each of which its scheduler may go on with another thread.

use std::time::Instant;

pub(crate) use parking_lot::Mutex;

/// The time.
pub(crate) fn now() -> Instant {
    Instant::now()
}
