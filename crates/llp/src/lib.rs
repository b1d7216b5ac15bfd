//! Lower layer: the system calls that carry data.
//!
//! Everything here is non-blocking. Bytes are named by address and length ([`Piece`]) because most of them lie in registered
//! memory, over which no slice may be formed; the kernel does the copying and answers EFAULT where nothing is mapped.

#![deny(unsafe_code)]

pub mod tcp;
