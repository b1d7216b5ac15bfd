//! iWARP wire formats: one module for each header, and nothing that knows a socket, a clock or a queue pair.
//!
//! | module | header | from |
//! |---|---|---|
//! | [`mpa`] | request and reply frames, enhanced set-up data, FPDU lengths, markers | RFC 5044, RFC 6581 |
//! | [`crc`] | CRC32c and its order on the wire | RFC 5044 section 4.4 |
//! | [`ddp`] | tagged and untagged segment headers | RFC 5041 |
//! | [`rdmap`] | control byte, opcode table, Read Request, atomics, immediate data | RFC 5040, RFC 7306 |
//! | [`terminate`] | Terminate header and every error code of every layer | RFC 5040, 5041, 5044, 6581, 7306 |
//! | [`datagram`] | extension header of datagram-iWARP | this project |
//! | [`text`] | one line of text for a frame or a segment | this project |
//!
//! # Habits of every module
//! - A private `field` module names the byte ranges; multi-byte fields are big endian.
//! - `parse` takes any bytes and never panics. Bytes after the header are left alone: lengths come from the layer
//!   below. Reserved bits are ignored, unknown codes survive as `Unknown(n)`.
//! - `emit` of a header of one length takes `&mut [u8; LEN]` and `to_bytes` returns the array, so neither can fail. `emit` of a
//!   header of several lengths takes a slice, **panics when it is shorter than the header's `len()`**, and
//!   returns the number of bytes written. That is the only panic in this crate and no byte from the network leads to it.
//! - Reserved bits are emitted as zero.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod crc;
pub mod datagram;
pub mod ddp;
pub mod mpa;
pub mod rdmap;
pub mod terminate;
pub mod text;

use core::fmt;

/// The bytes end before the header does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Truncated;

impl fmt::Display for Truncated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("too short for the header")
    }
}

impl core::error::Error for Truncated {}

/// The first `N` bytes, or [`Truncated`].
#[inline]
fn head<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], Truncated> {
    bytes.first_chunk::<N>().ok_or(Truncated)
}

// These three are called with constant ranges of arrays only, so the length check in `copy_from_slice` is
// decided by the compiler.
#[inline]
fn be16(bytes: &[u8]) -> u16 {
    let mut array = [0; 2];
    array.copy_from_slice(bytes);
    u16::from_be_bytes(array)
}

#[inline]
fn be32(bytes: &[u8]) -> u32 {
    let mut array = [0; 4];
    array.copy_from_slice(bytes);
    u32::from_be_bytes(array)
}

#[inline]
fn be64(bytes: &[u8]) -> u64 {
    let mut array = [0; 8];
    array.copy_from_slice(bytes);
    u64::from_be_bytes(array)
}
