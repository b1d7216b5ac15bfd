//! iWARP protocol machines without sockets or clock.
//!
//! [`setup`] makes the MPA connection, [`opening`] says who sends first on it, [`framing`] finds and makes
//! frames, [`rx`] checks and interprets DDP segments, [`tx`] cuts messages into segments. None of them
//! holds payload: the code that drives them moves the bytes. [`datagram`] frames datagrams, [`parts`] cuts
//! those that are longer than a packet, [`rd`] is the machine of reliable ones. [`proof`] makes cookies,
//! [`clock`] has the time.

#![forbid(unsafe_code)]

pub mod clock;
pub mod datagram;
pub mod framing;
pub mod opening;
pub mod parts;
pub mod proof;
pub mod rd;
pub mod rx;
pub mod setup;
pub mod tx;
