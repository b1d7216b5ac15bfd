//! What the preloaded libraries share.
//!
//! * `real`: the functions that theirs stand before.
//! * [`rules`]: which sockets `libuwarp-sockets.so` makes iWARP's. The command checks rules by it, too.

#![deny(unsafe_code)]

// Reason: C functions are looked up and called.
#[allow(unsafe_code)]
mod real;
pub mod rules;

pub use real::{Missing, Real, errno, missing, set_errno};
