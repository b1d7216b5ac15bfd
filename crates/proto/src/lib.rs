//! iWARP protocol machines without sockets or clock.
//!
//! [`setup`] makes the MPA connection, [`framer`] finds FPDUs in a byte stream, [`rx`] checks and
//! interprets DDP segments, [`tx`] cuts messages into segments. None of them holds payload: whoever
//! drives them moves the bytes.

#![forbid(unsafe_code)]

pub mod framer;
pub mod rx;
pub mod setup;
pub mod tx;
