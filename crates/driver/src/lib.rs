//! The loop: sockets, clock and RNIC; which thread makes progress, and when.
//!
//! * `progress`: decides which thread makes progress, and when.
//! * [`engine`]: one epoll instance for everything, and timers; `background`: its thread; `lead`: a thread of
//!   the program in place of that one. `source`: what the engine serves; `alarm`: a timer that deregisters
//!   itself.
//! * [`qp`]: a queue pair with its socket; moves bytes between the two. `linger`: what happens to the socket
//!   afterwards.
//! * [`ud`]: datagram queue pairs and the socket of their port; [`rd`]: the reliable ones.
//! * [`quota`]: how many objects of each kind a device has.
//! * [`srq`]: a shared receive queue; continues the queue pairs that wait for it.
//! * [`poll`]: what a thread that polls a completion queue does for progress.
//! * [`channel`]: event queues with a descriptor; a thread that blocks on one sleeps on the sockets.
//! * `watchdog`: how the background thread notices that polling has stopped.
//! * [`nic`]: the device: limits, addresses; `qpn`: the registry of queue pair numbers.
//! * [`stat`]: what `uwarp stat` sees. [`credentials`]: who asks, there and of a neighbour of the host.
//! * [`config`]: the environment. [`address`], [`netdev`]: the host. [`devices`]: which devices programs see.
//!   [`port`]: what a device's port consists of, and when that changes.
//! * `rings`: datagrams that go by memory. `held`: datagrams that wait a moment for more; `proofs`: those
//!   that prove a queue pair's number.
//! * `attended`: a lock whose holder does the work of those who find it taken.
//! * `fork`, [`waits`]: the process and its threads.
//!
//! # Who makes progress
//!
//! Sockets are registered edge-triggered in one epoll instance. A background thread sleeps on it, so a
//! program that computes or spins on memory still serves its peers. A thread that blocks on an event channel
//! sleeps on the same instance; epoll wakes the thread that came last, so this thread is woken and the
//! background thread is not. A thread that polls receives directly from the few sockets of its completion
//! queue. After several empty polls in a row it polls *in earnest*: if the background thread wakes beside
//! such a thread, it sleeps on a watchdog that the polling pushes back.

#![deny(unsafe_code)]

pub mod address;
mod alarm;
mod attended;
mod background;
pub mod carriers;
pub mod channel;
pub mod config;
pub mod credentials;
pub mod devices;
pub mod engine;
pub mod event_loop;
mod fork;
mod held;
pub mod host;
pub mod lanes;
mod lead;
mod linger;
mod lost_leads;
pub mod netdev;
pub mod nic;
mod observer;
mod open;
mod own_loops;
mod pair;
mod patience;
pub mod places;
pub mod poll;
pub mod port;
mod progress;
mod proofs;
pub mod pump;
pub mod qp;
mod qpn;
pub mod quota;
mod raised;
pub mod rd;
mod rings;
mod shell;
mod sleep;
mod source;
pub mod srq;
pub mod stat;
mod sync;
mod sys;
mod timers;
mod trace;
pub mod ud;
pub mod waits;
mod watchdog;

pub use alarm::Alarm;
pub use attended::Attended;
pub use channel::{Channel, ChannelError};
pub use config::Config;
pub use devices::RdmaDevice;
pub use engine::Engine;
pub use fork::{
    Deferred, OncePerProcess, Uncancelled, begin_to_wait, expect_jumps, has_more_rights_than_its_caller,
    jumps_are_expected, mask_asleep, set_cancel_state_asleep, signals_awake,
};
pub use nic::{Limits, Nic, ProofPort};
pub use observer::StreamObserver;
pub use open::close_all;
pub use pair::QueuePair;
pub use proofs::ProofObserver;
pub use qp::{Qp, StreamNumber};
pub use raised::Look;
pub use rd::{RdQp, UcQp};
pub use source::{Interest, Readiness, Source, Token};
pub use srq::Srq;
pub use ud::UdQp;
pub use uwarp_process::record::Recorded;
pub use uwarp_process::{Birth, Descriptor};
pub use uwarp_rnic::qp::{Disconnect, Rtr, StreamParams};
