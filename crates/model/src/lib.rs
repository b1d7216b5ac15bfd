//! What threads share, under all orders of threads that a scheduler thinks of.
//!
//! The files below are those of `uwarp-rnic` and `uwarp-driver`, compiled once more: the very code, with other locks and
//! atomics ([`sync`]), at each of which Shuttle may go on with another thread, and another system ([`sys`]), whose clock goes on when
//! all threads sleep. No feature or `cfg` is in the way of the code itself, and nothing is built twice but these files.
//!
//! The scenarios ([`scenarios`]) end when what has to happen has happened. If it never does, all threads sleep, and that is
//! an error with the list of who sleeps where. A failure prints its schedule, which `shuttle::replay` repeats.
//!
//! Memory is sequentially consistent here: what the orderings of atomics allow on ARM is not seen. (Loom would see some of it, but
//! takes `SeqCst` for less than it is, which this code relies on.) The thread sanitizer looks at that side: CONTRIBUTING.md.

// The unit tests of those files want the locks they know, and run where they are.
#![cfg(not(test))]
// Only a part of each file is used.
#![allow(dead_code, missing_docs, unreachable_pub, clippy::all)]

pub mod scenarios;
pub mod sync;
pub mod sys;

mod config;
mod fork;

pub(crate) use uwarp_rnic::{error, event, mem, pd, wr};

#[path = "../../rnic/src/cq.rs"]
mod cq;
#[path = "../../rnic/src/mr.rs"]
mod mr;
#[path = "../../rnic/src/qp/queues.rs"]
mod queues;
#[path = "../../rnic/src/srq.rs"]
mod srq;
mod qp {
    pub(crate) use crate::queues::RecvQueue;
}

#[path = "../../driver/src/attended.rs"]
mod attended;
#[path = "../../driver/src/channel.rs"]
mod channel;
#[path = "../../driver/src/engine.rs"]
mod engine;
#[path = "../../driver/src/watchdog.rs"]
mod watchdog;
