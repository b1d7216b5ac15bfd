//! rsockets: sockets over queue pairs, in the protocol of rdma-core's librdmacm (docs/rsockets.md).
//!
//! ```text
//!   rsend, rrecv, rpoll … (abi)
//!        │
//!   Socket (socket) ── options ── poll
//!        │         └── listener, events: the connection manager reports
//!   Stream (stream): queue pair and registered memory
//!        │
//!   Machine (machine): credits, rings, control messages; wire: their bytes
//! ```
//!
//! | module | what |
//! |---|---|
//! | [`wire`] | private data, messages, entries of tables |
//! | [`machine`] | the protocol of one stream; no sockets, no clock, no memory |
//! | [`posted`] | receives of messages, on upgraded sockets |
//! | `number` | the number of a socket or set |
//! | `waiting` | how threads wait for sockets |
//! | [`stream`] | a stream and its memory, over [`stream::verbs`]; calls, mapped buffers, descriptors |
//! | [`options`] | what a program sets before it connects, and the defaults |
//! | `events` | where the connection manager's events go |
//! | `listener` | a listening socket |
//! | [`socket`] | every call on a socket |
//! | [`upgrade`] | a connected TCP socket of the kernel, upgraded in place |
//! | [`datagram`] | datagram sockets |
//! | [`table`] | sockets by descriptor |
//! | [`poll`] | waiting for many sockets and other descriptors |
//! | [`set`] | sets of descriptors (`repoll_create`) |
//!
//! Each module uses only those above it.
//!
//! # Locks
//! The connection manager reports while a thread polls a queue pair, possibly with a stream's state locked.
//! So what it reports is stored under a lock of its own, and the next call acts on it.

#![deny(unsafe_code)]

pub mod datagram;
mod events;
mod listener;
pub mod machine;
mod number;
pub mod options;
pub mod poll;
pub mod posted;
pub mod set;
pub mod socket;
pub mod stream;
pub mod table;
pub mod upgrade;
mod waiting;
pub mod wire;

pub use datagram::Datagrams;
pub use rustix::io::Errno;
pub use socket::Socket;
pub use stream::Ready;
pub use stream::descriptors::{Completion, Kind, MOST_PIECES, Op, OwnWork};
pub use upgrade::Upgraded;
/// See [`uwarp_driver::close_all`].
pub use uwarp_driver::close_all as last_words;
pub use uwarp_mem::MemSeg;
pub use waiting::{Sleep, Waiters, Waiting};
