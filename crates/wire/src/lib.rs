//! iWARP wire formats: one module for each header. No sockets, no clock, no queue pairs.
//!
//! | module | header | from |
//! |---|---|---|
//! | [`mpa`] | request and reply frames, enhanced set-up data, FPDU lengths, markers | RFC 5044, RFC 6581 |
//! | [`crc`] | CRC32c and its order on the wire | RFC 5044 section 4.4 |
//! | [`ddp`] | tagged and untagged segment headers | RFC 5041 |
//! | [`rdmap`] | control byte, opcode table, Read Request, atomics, immediate data | RFC 5040, RFC 7306 |
//! | [`terminate`] | Terminate header, error codes of all layers | RFC 5040, 5041, 5044, 6581, 7306 |
//! | [`datagram`] | UDP datagrams: extension header, Error Message, lookups | docs/datagram-iwarp.md |
//! | [`rd`] | packets of reliable datagrams: header, first contact, chunks | docs/rd.md |
//! | [`grh`] | the 40 bytes in front of a received datagram | docs/datagram-iwarp.md |
//! | [`introduction`] | private data of a stream between queue pairs connected by number | this project |
//! | [`text`] | one line of text for a frame or a segment | this project |
//!
//! # Rules of every module
//! - A private `field` module names the byte ranges. Multi-byte fields are big endian.
//! - `parse` takes any bytes and never panics. It ignores bytes after the header: lengths come from the layer
//!   below. It ignores reserved bits. Unknown codes are kept as `Unknown(n)`.
//! - For a header of fixed length, `emit` takes `&mut [u8; LEN]` and `to_bytes` returns the array, so neither
//!   can fail. For a header of variable length, `emit` takes a slice, **panics if it is shorter than the
//!   header's `len()`**, and returns the number of bytes written. This is the only panic in the crate; no
//!   byte from the network leads to it.
//! - `emit` writes reserved bits as zero.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

pub mod crc;
pub mod datagram;
pub mod ddp;
pub mod grh;
pub mod introduction;
pub mod mpa;
pub mod rd;
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

// Callers pass only constant ranges of arrays, so the compiler removes the length check in `copy_from_slice`.
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
