//! CRC32c as MPA uses it (RFC 5044 section 4.4: computed as iSCSI's digests).
//!
//! Backend: the `crc-fast` crate alone. It selects the instructions at run time (VPCLMULQDQ and AVX-512 from
//! Rust 1.89 on, else PCLMULQDQ and SSE4.2, else tables) and needs no cargo feature for that. No other crate
//! was faster at any length. Measured with `examples/crc_speed.rs` on a Xeon with VPCLMULQDQ, Rust 1.95, 2
//! busy cores:
//!
//! | bytes | 20 | 64 | 88 | 200 | 512 | 1460 | 16 KiB | 64 KiB | 1 MiB |
//! |---|---|---|---|---|---|---|---|---|---|
//! | [`crc32c`] (crc-fast) | 10 ns | 12 ns | 10 ns | 14 ns | 19 ns | 40 GB/s | 70 GB/s | 79 GB/s | 82 GB/s |
//! | [`Crc32c`], one piece | 14 ns | 17 ns | 14 ns | 17 ns | 20 ns | 38 GB/s | 72 GB/s | 80 GB/s | 80 GB/s |
//! | [`Crc32c`], 4 + rest | 22 ns | 25 ns | 22 ns | 24 ns | 28 ns | 30 GB/s | 70 GB/s | 80 GB/s | 80 GB/s |
//! | crate `crc32c` | 14 ns | 16 ns | 14 ns | 19 ns | 43 ns | 11 GB/s | 16 GB/s | 19 GB/s | 20 GB/s |
//!
//! Without AVX-512 (with the crate's detection patched), lengths up to 256 stay the same; 16 KiB and more run
//! at 30 to 39 GB/s. So use [`crc32c`] for bytes in one piece, and [`Crc32c`] only for pieces that are too
//! large to copy together.

use core::fmt;

use crc_fast::{CrcAlgorithm, Digest};

/// CRC32c of `data`.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data)
}

/// CRC32c of bytes in several pieces.
///
/// About 300 bytes: it keeps the backend's constants beside the state. That is a third faster for each small
/// piece than a bare 32-bit state that looks them up again.
#[derive(Clone)]
pub struct Crc32c {
    digest: Digest,
}

impl Crc32c {
    /// The state before the first byte.
    #[inline]
    pub fn new() -> Self {
        Crc32c { digest: Digest::new(CrcAlgorithm::Crc32Iscsi) }
    }

    /// Adds the next bytes.
    #[inline]
    pub fn update(&mut self, data: &[u8]) {
        self.digest.update(data);
    }

    /// The current register: the CRC without its last inversion. For code that adds bytes by other means.
    #[inline]
    pub fn register(&self) -> u32 {
        // As in `finish`.
        (self.digest.get_state() & 0xFFFF_FFFF) as u32
    }

    /// Continues from a register.
    #[inline]
    pub fn from_register(register: u32) -> Self {
        Crc32c { digest: Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(register)) }
    }

    /// The CRC of all bytes so far.
    #[inline]
    pub fn finish(self) -> u32 {
        // The backend returns 64 bits for all widths; the upper half of a 32-bit CRC is zero.
        (self.digest.finalize() & 0xFFFF_FFFF) as u32
    }
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Crc32c {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Crc32c({:#010x})", self.clone().finish())
    }
}

/// The four bytes of the CRC field. The lowest byte of the remainder goes first, as in iSCSI, because the
/// polynomial is bit-reflected. As a number, it is the only little-endian field of the stream.
#[inline]
pub const fn to_wire(crc: u32) -> [u8; 4] {
    crc.to_le_bytes()
}

/// The number in a CRC field.
#[inline]
pub const fn from_wire(bytes: [u8; 4]) -> u32 {
    u32::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// RFC 3720 appendix B.4, in network byte order.
    #[test]
    fn iscsi_vectors() {
        let ascending: [u8; 32] = core::array::from_fn(|i| i as u8);
        let descending: [u8; 32] = core::array::from_fn(|i| 31 - i as u8);
        let mut read_command = [0; 48];
        read_command[..2].copy_from_slice(&[0x01, 0xC0]);
        read_command[16] = 0x14;
        read_command[22] = 0x04;
        read_command[27] = 0x14;
        read_command[31] = 0x18;
        read_command[32] = 0x28;
        read_command[40] = 0x02;
        for (data, wire) in [
            (&[0; 32][..], [0xAA, 0x36, 0x91, 0x8A]),
            (&[0xFF; 32], [0x43, 0xAB, 0xA8, 0x62]),
            (&ascending, [0x4E, 0x79, 0xDD, 0x46]),
            (&descending, [0x5C, 0xDB, 0x3F, 0x11]),
            (&read_command, [0x56, 0x3A, 0x96, 0xD9]),
        ] {
            assert_eq!(to_wire(crc32c(data)), wire, "{data:02x?}");
            assert_eq!(from_wire(wire), crc32c(data));
        }
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(b""), 0);
    }

    /// RFC 5044 figures 5 and 6: the first has the marker before its FPDU, the second inside.
    #[test]
    fn rfc5044_fpdus() {
        let mut first = [0; 0x30];
        first[5..8].copy_from_slice(&[0x2A, 0x41, 0x43]);
        first[0x13] = 1;
        assert_eq!(to_wire(crc32c(&first)), [0x52, 0x23, 0x99, 0x83]);

        let mut second = [0; 0x21C - 0x1EC];
        second[1..4].copy_from_slice(&[0x2A, 0x41, 0x43]);
        second[0x1FB - 0x1EC] = 2;
        second[0x203 - 0x1EC] = 0x14;
        assert_eq!(to_wire(crc32c(&second)), [0x84, 0x92, 0x58, 0x98]);
    }

    proptest! {
        /// Lengths on both sides of 256 bytes, where the backend changes its method, at all alignments.
        #[test]
        fn agrees_with_another_implementation(
            data in prop_oneof![
                prop::collection::vec(any::<u8>(), 0..600),
                prop::collection::vec(any::<u8>(), 0..20_000),
            ],
            skip in 0usize..64,
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        ) {
            let data = &data[skip.min(data.len())..];
            prop_assert_eq!(crc32c(data), crc32c::crc32c(data));

            let mut cuts: std::vec::Vec<usize> = cuts.iter().map(|cut| cut.index(data.len() + 1)).collect();
            cuts.extend([0, data.len()]);
            cuts.sort_unstable();
            let mut pieces = Crc32c::new();
            for pair in cuts.windows(2) {
                pieces.update(&data[pair[0]..pair[1]]);
            }
            prop_assert_eq!(pieces.finish(), crc32c(data));
        }
    }
}
