//! Lower layers: the system calls that carry data. A queue pair gets a [`Link`].
//!
//! Everything here is non-blocking. Bytes are named by address and length ([`uwarp_mem::MemSeg`]), because
//! most of them are in registered memory, over which no slice may be formed. The kernel copies them and
//! returns EFAULT for memory that is not mapped. The system's errors of a stream stay here: its owner sees a
//! [`Stop`].

#![deny(unsafe_code)]

pub mod asked_port;
pub mod carrier;
pub mod closing;
pub mod link;
mod lower;
pub mod memory;
pub mod route;
pub mod streams;
mod sync;
mod tcp;
pub mod udp;

pub use link::{Ended, Link, LowerLayer, Stop};
