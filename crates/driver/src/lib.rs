//! The loop: sockets, clock and RNIC; who makes progress and when.
//!
//! * [`engine`]: one epoll instance for everything, its background thread, timers.
//! * [`qp`]: a queue pair with its socket; moves bytes between the two. `linger`: what becomes of the socket afterwards.
//! * [`srq`]: a shared receive queue; goes on with the queue pairs that wait for it.
//! * [`poll`]: what a thread that polls a completion queue does for progress.
//! * [`channel`]: event queues with a descriptor; a thread that blocks on one sleeps on the sockets.
//! * `watchdog`: how the background thread notices that polling has stopped.
//! * [`nic`]: the device: limits, addresses, queue pair numbers. [`stat`]: what `uwarp stat` sees of it.
//!
//! # Who makes progress
//!
//! Sockets are registered edge-triggered in one epoll instance. A background thread sleeps on it, so a program that computes
//! or spins on memory still serves its peers. A thread that blocks on an event channel sleeps on the same instance; epoll
//! wakes the thread that came last, so it is woken and the background thread is not. A thread that polls receives
//! directly from the few sockets of its completion queue; once it has polled in vain several times in a row it is *in earnest*, and the
//! background thread, when it finds itself woken beside such a thread, sleeps on a watchdog that the polling pushes back.

#![deny(unsafe_code)]

pub mod address;
mod attended;
pub mod channel;
pub mod config;
pub mod engine;
mod fork;
mod linger;
pub mod nic;
pub mod poll;
pub mod qp;
mod qpn;
mod silence;
pub mod srq;
pub mod stat;
mod sync;
mod sys;
mod trace;
mod watchdog;

pub use channel::{Channel, ChannelError};
pub use config::Config;
pub use engine::{Engine, Readiness, Source, Token};
pub use fork::{cancelled_as, forked, generation, has_more_rights_than_its_caller, object_gone, object_made};
pub use nic::{Limits, Nic};
pub use qp::{Qp, StreamObserver};
pub use srq::Srq;
pub use uwarp_rnic::qp::{Disconnect, Rtr, StreamParams};
