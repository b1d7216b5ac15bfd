//! Locks and atomics under one name. `crates/model` compiles the files that take them from here once more,
//! with locks and atomics at each of which its scheduler may switch to another thread.

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::OnceLock;
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
pub(crate) use std::thread_local;

pub(crate) use uwarp_process::{Mutex, MutexGuard, RwLock};
