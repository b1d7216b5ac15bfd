//! Locks and atomics under one name. `crates/model` compiles the files that take them from here once more,
//! with locks and atomics at each of which its scheduler may go on with another thread.

pub(crate) use std::sync::LazyLock;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::thread::yield_now;

pub(crate) use parking_lot::{Mutex, RwLock};
