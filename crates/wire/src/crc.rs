//! CRC32c as MPA uses it (RFC 5044 section 4.4: as iSCSI computes its digests).

use crc_fast::{CrcAlgorithm, Digest};

/// CRC32c of `data`.
pub fn crc32c(data: &[u8]) -> u32 {
    let mut crc = Crc32c::new();
    crc.update(data);
    crc.finish()
}

/// CRC32c of bytes that come in pieces.
#[derive(Clone, Debug)]
pub struct Crc32c {
    digest: Digest,
}

impl Crc32c {
    /// Before the first byte.
    pub fn new() -> Self {
        Crc32c { digest: Digest::new(CrcAlgorithm::Crc32Iscsi) }
    }

    /// Takes in the next bytes.
    pub fn update(&mut self, data: &[u8]) {
        self.digest.update(data);
    }

    /// The CRC of all bytes so far.
    pub fn finish(self) -> u32 {
        self.digest.finalize() as u32
    }
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

/// The four bytes of the CRC field. The remainder's lowest byte goes first: the polynomial is bit-reflected, and iSCSI sends
/// it so. It is the one field of MPA that is little endian when seen as a number.
pub const fn to_wire(crc: u32) -> [u8; 4] {
    crc.to_le_bytes()
}

/// The number in a CRC field.
pub const fn from_wire(bytes: [u8; 4]) -> u32 {
    u32::from_le_bytes(bytes)
}
