//! Locks and atomics under one name. `crates/model` compiles the files that import this module a second time,
//! with locks and atomics at which its scheduler can switch threads.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::thread::yield_now;

pub(crate) use uwarp_process::{Mutex, MutexGuard, PerProcess, RwLock};
