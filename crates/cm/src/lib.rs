//! Connection manager: what rdma_cm means, independent of its C names.
//!
//! ```text
//!   program ──▶ Id (id) ─────────▶ Runner (runner) ◀──▶ Life (machine) ─ Active, Listener, Client, Server
//!      ▲                            │  sockets, alarm, lock
//!      │                            ├──▶ driver::Qp::attach ─▶ StreamObserver ─┐
//!   EventChannel (channel) ◀─ events┘ ◀─────────────────────────────────────────┘
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`timeouts`] | time limits |
//! | [`error`], [`event`] | errors with their errno; events and connection parameters |
//! | [`state`] | the state diagram of an id, as a table |
//! | [`channel`] | the queue that events wait in, with a descriptor to poll |
//! | `params` | connection parameters between the program, the peer and the queue pair |
//! | [`machine`] | what happens to connections, ids, lookups, numbers: machines without sockets and clock |
//! | `carriers` | the lower layers |
//! | `runner` | the shell of a machine: its connections, its alarm, its lock |
//! | `ports` | which ids have which port |
//! | `awaiting` | connections that wait for a queue pair which the program moves itself |
//! | `numbers` | streams between queue pairs that know each other by number and address: one runner a port |
//! | [`cm`] | what ids have in common |
//! | [`adopt`] | a connected TCP socket of the program becomes a stream |
//! | [`process`] | what a process has once: its connection manager, shared device, channels by address |
//! | [`bringup`] | queue pairs that the program moves to RTR and RTS itself |
//! | [`id`] | [`Id`]: every call of rdma_cm on an id; one runner each |
//!
//! Each module uses only those above it. The event channel and events are generic over their owner, so they
//! do not name the id; `state` alone changes the state of an id, by the steps of its table. `id` is one type
//! in several files: what the program does with an id, and what peer, queue pair and clock do to it, share
//! one machine, because each of them can end a connection that another one has begun.
//!
//! Rejected: channels instead of observers, because each step of a handshake would cost a thread hop; a
//! number for the owner of events instead of a type parameter, because the channel would need a table of
//! numbers, with a lock, for each event (docs/adr/rejected.md).
//!
//! Semantics are those that programs know from Linux' rdma_cm on iWARP devices: which call is legal in which
//! state, which event answers it, and which status a failure carries. Nothing here blocks except
//! [`EventChannel::get`] and [`Id::destroy`], as their C names say. System calls on sockets are
//! `uwarp_llp`'s.
//!
//! # Locks
//! A runner has one lock, for its machine and its connections. No queue pair, observer or other runner is
//! called under it; a runner notifies another one by posting. (docs/locks.md)

#![deny(unsafe_code)]

pub mod adopt;
mod awaiting;
pub mod bringup;
mod carriers;
pub mod channel;
pub mod cm;
pub mod error;
pub mod event;
pub mod id;
pub mod machine;
mod numbers;
mod params;
mod ports;
pub mod process;
mod runner;
#[cfg(test)]
#[path = "runner/tests.rs"]
mod runner_tests;
pub mod state;
mod sync;
pub mod timeouts;

/// Where the two ends of a stream by number are.
pub mod pairing {
    pub use crate::machine::pairings::Path;
}

pub use adopt::{AdoptObserver, Adoption, Role, Terms};
pub use awaiting::Adopter;
pub use channel::GetError;
pub use cm::{Cm, Options};
pub use error::CmError;
pub use event::{ConnParam, DatagramParam, EventKind, MAX_DEPTH, MAX_PRIVATE_DATA, Owner};
pub use id::{Id, QKEY};
pub use state::State;
pub use timeouts::Timeouts;
pub use uwarp_llp::route::is_any;

/// An event of an id.
pub type Event = event::Event<Id>;
/// A queue of events of ids.
pub type EventChannel = channel::EventChannel<Id>;
