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
//! | [`state`] | the state diagram of an id, as a table |
//! | [`cm`] | what ids have in common |
//! | [`id`] | [`Id`]: every call of rdma_cm on an id, and what peer, queue pair and clock do to it |
//! | [`channel`] | [`EventChannel`]: the queue that events wait in, with a descriptor to poll |
//! | [`event`] | events and connection parameters |
//! | [`active`] | connecting: from a TCP socket to a stream, with fallback to older peers |
//! | [`listener`] | listening: half-open connections, bounded, until their request is whole |
//! | [`socket`] | the system calls, and routes |
//! | [`timeouts`] | how long each phase may take |
//!
//! Semantics are those that programs know from Linux' rdma_cm on iWARP devices: which call is legal in which state, which
//! event answers it, and which status a failure carries. Nothing here blocks except [`EventChannel::get`] and
//! [`Id::destroy`], as their C names say. All sockets are non-blocking, close-on-exec and without Nagle's delay.
//!
//! # Locks
//! An id's lock and a handshake's lock are never held together, and none is held while a queue pair or the engine is
//! called that could call back.

#![deny(unsafe_code)]

pub mod active;
pub mod channel;
pub mod cm;
pub mod error;
pub mod event;
pub mod id;
pub mod listener;
mod ports;
pub mod socket;
pub mod state;
pub mod timeouts;

pub use channel::{EventChannel, GetError};
pub use cm::{Cm, Options};
pub use error::CmError;
pub use event::{ConnParam, Event, EventKind, MAX_DEPTH, MAX_PRIVATE_DATA};
pub use id::Id;
pub use state::State;
pub use timeouts::Timeouts;
