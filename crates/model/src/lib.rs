//! Tests the code that threads share, under many orders of threads.
//!
//! The files below are those of `uwarp-process`, `uwarp-rnic`, `uwarp-driver` and `uwarp-cm`, compiled a
//! second time. The code is the same. The locks and atomics are others ([`sync`], `futex`): at each of them
//! Shuttle may switch to another thread. The system is another one too ([`sys`]): its clock advances when all
//! threads sleep. The code needs no feature and no `cfg` for this, and only these files are built twice.
//!
//! A scenario ([`scenarios`]) ends when everything that must happen has happened. If it never does, all
//! threads sleep, and the model fails with a list of where each thread sleeps. A failure prints its
//! schedule, which `shuttle::replay` repeats.
//!
//! Memory is sequentially consistent here, so the model does not find what weaker orderings allow on ARM.
//! (Loom would find some of it, but models `SeqCst` weaker than it is, and this code relies on it.) The
//! thread sanitizer covers that part: CONTRIBUTING.md.

// The unit tests of those files need the usual locks. They run in their own crates.
#![cfg(not(test))]
// The model uses only a part of each file.
#![allow(dead_code, unused_imports, missing_docs, unreachable_pub, clippy::all)]

pub mod scenarios;
pub mod sync;
pub mod sys;

mod config;
mod datagrams;
mod fork;
mod futex;
mod runners;

// The names by which `runner` knows what it has around it.
extern crate self as uwarp_driver;
extern crate self as uwarp_llp;

pub(crate) use alarm::Alarm;
pub(crate) use attended::Attended;
pub(crate) use datagrams::{address, nic, pair, rd, rings, udp};
pub(crate) use engine::Engine;
pub(crate) use llp::carrier;
pub(crate) use proofs::ProofObserver;
pub(crate) use runners::{Qp, StreamNumber, StreamObserver, carriers, host};
pub(crate) use source::{Readiness, Source, Token};
pub(crate) use uwarp_cm::machine;
pub(crate) use uwarp_rnic::qp::Disconnect;
pub(crate) use uwarp_rnic::{error, pd, wr};

mod random {
    pub use uwarp_rnic::mr::random_u32;
}

mod event {
    pub use uwarp_cm::ConnParam;
    pub use uwarp_rnic::event::*;
}

#[path = "../../rnic/src/cq.rs"]
mod cq;
#[path = "../../rnic/src/glances.rs"]
mod glances;
#[path = "../../rnic/src/mr/mod.rs"]
mod mr;
#[path = "../../rnic/src/queues.rs"]
mod queues;
#[path = "../../rnic/src/srq.rs"]
mod srq;

#[path = "../../driver/src/alarm.rs"]
mod alarm;
#[path = "../../driver/src/attended.rs"]
mod attended;
#[path = "../../driver/src/background.rs"]
mod background;
#[path = "../../driver/src/channel.rs"]
mod channel;
#[path = "../../driver/src/engine.rs"]
mod engine;
#[path = "../../driver/src/event_loop.rs"]
mod event_loop;
#[path = "../../driver/src/held.rs"]
mod held;
#[path = "../../driver/src/lead.rs"]
mod lead;
#[path = "../../driver/src/lost_leads.rs"]
mod lost_leads;
#[path = "../../driver/src/own_loops.rs"]
mod own_loops;
#[path = "../../driver/src/progress.rs"]
mod progress;
#[path = "../../driver/src/proofs.rs"]
mod proofs;
#[path = "../../driver/src/raised.rs"]
mod raised;
#[path = "../../driver/src/shell.rs"]
mod shell;
#[path = "../../driver/src/sleep.rs"]
mod sleep;
#[path = "../../driver/src/source.rs"]
mod source;
#[path = "../../driver/src/timers.rs"]
mod timers;
#[path = "../../driver/src/ud.rs"]
mod ud;
#[path = "../../driver/src/watchdog.rs"]
mod watchdog;

#[path = "../../cm/src/runner.rs"]
mod runner;

#[path = "../../process/src/order.rs"]
mod order;
#[path = "../../process/src/locks.rs"]
mod process_locks;
#[path = "../../process/src/ranks.rs"]
mod ranks;
