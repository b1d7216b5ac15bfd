//! Virtual clock and seeded network for protocol tests.
//!
//! Two queue pairs without sockets ([`End`]) are joined by two pipes ([`net::Pipe`]) that delay, split,
//! stall, corrupt and break as their seed says; [`World`] moves bytes between them in virtual time, with the
//! driver's pump. [`workload`] runs lists of work requests over it and compares the result with a model;
//! [`tap`] prints the wire as text.
//!
//! A seed repeats a run exactly, except for the STags, which are random by design.
//!
//! ```text
//!   workload ── posts, model, checks
//!       │
//!     World ── clock, who moves next ──┬── End ── RcCore, buffers, completions
//!       │                              └── End
//!     Pipe a→b, Pipe b→a ── tap
//! ```
//!
//! [`RcCore`]: uwarp_rnic::qp::RcCore

#![forbid(unsafe_code)]

pub mod adoptions;
pub mod assault;
pub mod datagram_calls;
pub mod datagrams;
pub mod end;
pub mod hosts;
pub mod ids;
pub mod interleave;
pub mod links;
pub mod lookups;
mod lower;
pub mod memory;
pub mod net;
pub mod reliable;
pub mod rng;
pub mod rooms;
pub mod sharing;
pub mod tap;
pub mod workload;
pub mod world;

use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub use end::{End, EndConfig};
pub use memory::Arena;
pub use net::{Fault, NetParams, Pipe};
pub use rng::Rng;
pub use world::{Side, World};

/// Virtual time in nanoseconds since the start.
pub type Time = u64;

/// Virtual time zero, on the clock that queue pairs use.
fn start() -> Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    *START.get_or_init(Instant::now)
}

pub(crate) fn instant(now: Time) -> Instant {
    start() + Duration::from_nanos(now)
}

pub(crate) fn time(at: Instant) -> Time {
    Time::try_from(at.duration_since(start()).as_nanos()).unwrap_or(Time::MAX)
}
