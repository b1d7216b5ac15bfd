//! Extension header of datagram-iWARP: what a UDP datagram carries before its DDP segment.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------+-----------------------------------------------+
//! |    Version    |               Source QPN                      |
//! +-+-+-----------+-----------------------------------------------+
//! |I|R| Reserved  |               Destination QPN                 |
//! +-+-+-----------+-----------------------------------------------+
//! |                             Q_Key                             |
//! +---------------------------------------------------------------+
//! |                 Immediate (zero unless I is set)              |
//! +---------------------------------------------------------------+
//! |                          Incarnation                          |
//! +---------------------------------------------------------------+
//! ```

use core::fmt;

use crate::be32;

/// Version that is sent and understood.
pub const VERSION: u8 = 1;
/// I: the immediate field counts.
pub const FLAG_IMMEDIATE: u8 = 0x80;
/// R: reliable service; the reliable-datagram header follows this one.
pub const FLAG_RELIABLE: u8 = 0x40;
/// Destination of multicast and broadcast datagrams; never a queue pair's own number.
pub const QPN_MULTICAST: u32 = 0x00FF_FFFF;

mod field {
    use core::ops::Range;
    pub const VERSION: usize = 0;
    pub const SOURCE_QPN: Range<usize> = 0..4;
    pub const FLAGS: usize = 4;
    pub const DESTINATION_QPN: Range<usize> = 4..8;
    pub const QKEY: Range<usize> = 8..12;
    pub const IMMEDIATE: Range<usize> = 12..16;
    pub const INCARNATION: Range<usize> = 16..20;

    pub const QPN: u32 = 0x00FF_FFFF;
}

/// Why bytes are not an extension header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// The datagram ends before the header does.
    Truncated,
    /// Another version.
    BadVersion(u8),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Truncated => f.write_str("datagram shorter than its header"),
            Error::BadVersion(version) => write!(f, "datagram version {version}, expected {VERSION}"),
        }
    }
}

impl core::error::Error for Error {}

/// The extension header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Header {
    /// `FLAG_*`; reserved bits are kept when parsed and emitted as they are, senders leave them zero.
    pub flags: u8,
    /// The sender's queue pair, 24 bits.
    pub source_qpn: u32,
    /// The receiver's queue pair, 24 bits, or [`QPN_MULTICAST`].
    pub destination_qpn: u32,
    /// Must equal the receiving queue pair's.
    pub qkey: u32,
    /// Immediate data as on the wire, when [`FLAG_IMMEDIATE`] is set.
    pub immediate: u32,
    /// Random number that tells this life of the sender's queue pair from earlier ones.
    pub incarnation: u32,
}

impl Header {
    /// Bytes on the wire.
    pub const LEN: usize = 20;

    /// Reads the header at the start of a datagram; the version is looked at before the length.
    pub fn parse(datagram: &[u8]) -> Result<Self, Error> {
        let &version = datagram.get(field::VERSION).ok_or(Error::Truncated)?;
        if version != VERSION {
            return Err(Error::BadVersion(version));
        }
        let header = datagram.first_chunk::<{ Self::LEN }>().ok_or(Error::Truncated)?;
        Ok(Header {
            flags: header[field::FLAGS],
            source_qpn: be32(&header[field::SOURCE_QPN]) & field::QPN,
            destination_qpn: be32(&header[field::DESTINATION_QPN]) & field::QPN,
            qkey: be32(&header[field::QKEY]),
            immediate: be32(&header[field::IMMEDIATE]),
            incarnation: be32(&header[field::INCARNATION]),
        })
    }

    /// Writes the header with version [`VERSION`]; of the queue pair numbers the low 24 bits.
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        out[field::SOURCE_QPN].copy_from_slice(&self.source_qpn.to_be_bytes());
        out[field::DESTINATION_QPN].copy_from_slice(&self.destination_qpn.to_be_bytes());
        out[field::VERSION] = VERSION;
        out[field::FLAGS] = self.flags;
        out[field::QKEY].copy_from_slice(&self.qkey.to_be_bytes());
        out[field::IMMEDIATE].copy_from_slice(&self.immediate.to_be_bytes());
        out[field::INCARNATION].copy_from_slice(&self.incarnation.to_be_bytes());
    }

    /// The header as bytes.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }

    /// Immediate data, when there is any.
    pub const fn immediate(&self) -> Option<u32> {
        if self.flags & FLAG_IMMEDIATE != 0 { Some(self.immediate) } else { None }
    }
}

/// `UD src=0x11 dst=0x22 qkey=0x1 imm=0x7 inc=0x9`, `RD …` when reliable.
impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let service = if self.flags & FLAG_RELIABLE != 0 { "RD" } else { "UD" };
        write!(
            f,
            "{service} src={:#x} dst={:#x} qkey={:#x}",
            self.source_qpn, self.destination_qpn, self.qkey
        )?;
        if let Some(immediate) = self.immediate() {
            write!(f, " imm={immediate:#x}")?;
        }
        write!(f, " inc={:#x}", self.incarnation)
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn golden_bytes() {
        let header = Header {
            flags: FLAG_IMMEDIATE,
            source_qpn: 0x02_0304,
            destination_qpn: 0x06_0708,
            qkey: 0x090A_0B0C,
            immediate: 0x0D0E_0F10,
            incarnation: 0x1112_1314,
        };
        let bytes = [1, 2, 3, 4, 0x80, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20];
        assert_eq!(header.to_bytes(), bytes);
        assert_eq!(Header::parse(&bytes), Ok(header));
        assert_eq!(
            header.to_string(),
            "UD src=0x20304 dst=0x60708 qkey=0x90a0b0c imm=0xd0e0f10 inc=0x11121314"
        );
        let reliable = Header { flags: FLAG_RELIABLE, ..header };
        assert_eq!(reliable.immediate(), None);
        assert_eq!(reliable.to_string(), "RD src=0x20304 dst=0x60708 qkey=0x90a0b0c inc=0x11121314");
    }

    #[test]
    fn queue_pair_numbers_do_not_spill_into_their_neighbours() {
        let header = Header {
            flags: 0,
            source_qpn: u32::MAX,
            destination_qpn: u32::MAX,
            qkey: 0,
            immediate: 0,
            incarnation: 0,
        };
        let bytes = header.to_bytes();
        assert_eq!(bytes[..8], [VERSION, 0xFF, 0xFF, 0xFF, 0, 0xFF, 0xFF, 0xFF]);
        assert_eq!(Header::parse(&bytes).unwrap().destination_qpn, QPN_MULTICAST);
    }

    #[test]
    fn version_before_length() {
        assert_eq!(Header::parse(&[2]), Err(Error::BadVersion(2)));
        assert_eq!(Header::parse(&[1]), Err(Error::Truncated));
        assert_eq!(Header::parse(&[]), Err(Error::Truncated));
        assert_eq!(Header::parse(&[1; 19]), Err(Error::Truncated));
    }
}
