//! Atomics of what two processes share. `tests/order.rs` compiles the same files with loom's, which tries
//! every order that the memory model allows.

pub(crate) use uwarp_mem::shared::Line;

pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};
