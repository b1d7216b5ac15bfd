//! Lower layers: the system calls that carry data. [`Link`] is what a queue pair is given.
//!
//! Everything here is non-blocking. Bytes are named by address and length ([`Piece`]) because most of them lie in registered
//! memory, over which no slice may be formed; the kernel does the copying and answers EFAULT where nothing is mapped.

#![deny(unsafe_code)]

pub mod connect;
pub mod link;
mod lower;
pub mod route;
mod tcp;
pub mod udp;

pub use link::{Link, LowerLayer, Piece};
