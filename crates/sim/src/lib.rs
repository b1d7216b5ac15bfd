//! Virtual clock and seeded network for protocol tests.
//!
//! Two queue pairs without sockets ([`End`]) are joined by two pipes ([`net::Pipe`]) that delay, cut, stall, corrupt and
//! break as their seed says; [`World`] moves bytes between them in virtual time, doing with a [`QpCore`] exactly what the
//! driver does with a socket in between. [`workload`] runs lists of work requests over it and compares what came of
//! them with a model; [`tap`] prints the wire as text.
//!
//! A seed repeats a run exactly, but for the STags, which are random by design.
//!
//! ```text
//!   workload ── posts, model, checks
//!       │
//!     World ── clock, who moves next ──┬── End ── QpCore, buffers, completions
//!       │                              └── End
//!     Pipe a→b, Pipe b→a ── tap
//! ```
//!
//! [`QpCore`]: uwarp_rnic::qp::QpCore

#![forbid(unsafe_code)]

pub mod assault;
pub mod end;
pub mod interleave;
pub mod memory;
pub mod net;
pub mod rng;
pub mod tap;
pub mod workload;
pub mod world;

pub use end::{End, EndConfig};
pub use memory::Arena;
pub use net::{Fault, NetParams, Pipe};
pub use rng::Rng;
pub use world::{Side, World};

/// Virtual time in nanoseconds since the start.
pub type Time = u64;
