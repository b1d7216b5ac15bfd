//! The locks of the shell. `crates/model` compiles `runner.rs` once more with others, at each of which its
//! scheduler may go on with another thread.

pub(crate) use std::thread::{Thread, current, park};

pub(crate) use uwarp_process::{Mutex, MutexGuard};
