//! Connection manager: what rdma_cm means, independent of its C names.
//!
//! ```text
//!   program ──▶ Id (id) ──────────────┬── active: TCP connect, MPA request, reply ──┐
//!      ▲         │  state table       │                                              ├─▶ driver::Qp::attach
//!      │         ▼                    └── listener: accept, MPA request ─▶ passive ──┘        │
//!   EventChannel (channel) ◀──────────────── events ◀──────────────────────── StreamObserver ◀┘
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`timeouts`] | time limits |
//! | [`error`], [`event`] | errors with their errno; events and connection parameters |
//! | [`state`] | the state diagram of an id, as a table |
//! | [`channel`] | the queue that events wait in, with a descriptor to poll |
//! | [`machine`] | what every machine has: the verbs, and its words with the shell |
//! | `carriers` | the lower layers |
//! | `runner` | the shell of a machine: its connections, its alarm, its lock |
//! | `handshake` | what the next two report, and to whom: they know nothing of ids |
//! | [`active`] | connecting: from a TCP socket to a stream, with fallback to older peers |
//! | [`listener`] | listening: half-open connections, bounded, until their request is complete |
//! | `lookup` | which queue pair serves a port of datagrams: the question and its answer |
//! | `params` | connection parameters between the program, the peer and the queue pair |
//! | `ports` | which ids have which port |
//! | `awaiting` | connections that wait for a queue pair which the program moves itself |
//! | `numbers` | streams between queue pairs that know each other by number and address: one runner a port |
//! | [`cm`] | what ids have in common |
//! | [`adopt`] | a connected TCP socket of the program becomes a stream |
//! | [`process`] | what a process has once: its connection manager, shared device, channels by address |
//! | [`bringup`] | queue pairs that the program moves to RTR and RTS itself |
//! | [`id`] | [`Id`]: every call of rdma_cm on an id, and what peer, queue pair and clock do to it |
//!
//! Each module uses only those above it (docs/adr/020).
//!
//! Semantics are those that programs know from Linux' rdma_cm on iWARP devices: which call is legal in which
//! state, which event answers it, and which status a failure carries. Nothing here blocks except
//! [`EventChannel::get`] and [`Id::destroy`], as their C names say. System calls on sockets are
//! `uwarp_llp`'s.
//!
//! # Locks
//! An id's lock and a handshake's lock are never held together, with one exception: an id starts its listener
//! under its lock, and no thread takes the two in the other order. No lock is held while a queue pair is
//! called that could call its observer. Requests of one listener are reported under a lock of their own,
//! which keeps their order.

#![deny(unsafe_code)]

pub mod active;
pub mod adopt;
mod awaiting;
pub mod bringup;
mod carriers;
pub mod channel;
pub mod cm;
pub mod error;
pub mod event;
mod handshake;
pub mod id;
pub mod listener;
mod lookup;
pub mod machine;
mod numbers;
mod params;
mod ports;
pub mod process;
mod runner;
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
