//! iWARP protocol machines without sockets or clock.
//!
//! [`setup`] makes the MPA connection, [`framing`] finds and makes frames, [`rx`] checks and interprets DDP
//! segments, [`tx`] cuts messages into segments. None of them holds payload: the code that drives them moves
//! the bytes.

#![forbid(unsafe_code)]

pub mod datagram;
pub mod framing;
pub mod rx;
pub mod setup;
pub mod tx;
