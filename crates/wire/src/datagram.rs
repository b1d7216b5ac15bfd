//! Datagram-iWARP (docs/datagram-iwarp.md): the extension header that begins every UDP datagram, and the
//! datagram as a whole. [`error`] has the Error Message, [`lookup`] what rdma_cm sends, [`proof`] what
//! connected queue pairs send before they connect by number, [`memory`] how processes of one host agree on
//! memory, [`record`] RDMA Write-Records, [`part`] parts of what is longer than a packet.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------+-----------------------------------------------+
//! |    Version    |                  Source QPN                   |
//! +-+-+---+-------+-----------------------------------------------+
//! |I|R|Rsv| Kind  |                Destination QPN                |
//! +-+-+---+-------+-----------------------------------------------+
//! |                             Q_Key                             |
//! +---------------------------------------------------------------+
//! |                 Immediate (zero unless I is set)              |
//! +---------------------------------------------------------------+
//! |                          Incarnation                          |
//! +---------------------------------------------------------------+
//! |                    body: up to the last four bytes            |
//! +---------------------------------------------------------------+
//! |                  CRC32c, the last four bytes                  |
//! +---------------------------------------------------------------+
//! ```

pub mod error;
pub mod lookup;
pub mod memory;
pub mod part;
pub mod proof;
pub mod record;

use core::fmt;

use crate::{be32, crc};

/// Version that is sent and understood.
pub const VERSION: u8 = 1;
/// I: the immediate field is valid.
pub const FLAG_IMMEDIATE: u8 = 0x80;
/// R: reliable service; the reliable-datagram header follows this one.
pub const FLAG_RELIABLE: u8 = 0x40;
/// The bits of the flags that hold the [`Kind`].
pub const KIND_MASK: u8 = 0x0F;
/// Destination of multicast and broadcast datagrams. It is never the number of a queue pair.
pub const QPN_MULTICAST: u32 = 0x00FF_FFFF;
/// Bytes of the CRC field at the end.
pub const CRC_LEN: usize = 4;
/// Bytes of the shortest datagram: an extension header and a CRC.
pub const MIN_LEN: usize = Header::LEN + CRC_LEN;
/// Bytes of the longest datagram: what UDP over IPv4 carries. It is the limit over IPv6 too, so that the
/// largest message does not depend on the address.
pub const MAX_LEN: usize = 65_507;

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

/// What the body of a datagram is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A whole DDP/RDMAP message.
    Message,
    /// rdma_cm asks for the queue pair of a port: [`lookup::Request`].
    LookupRequest,
    /// The answer: [`lookup::Reply`].
    LookupReply,
    /// A queue pair asks for the proof of its port: [`proof::Proof`].
    ProofRequest,
    /// The answer, with a cookie.
    ProofReply,
    /// A process asks one of its host for memory: [`memory::Memory`].
    MemoryRequest,
    /// The answer.
    MemoryReply,
    /// From here on by memory.
    MemoryBegins,
    /// A segment of an RDMA Write-Record: [`record::Segment`].
    Record,
    /// A part of a longer datagram: [`part::Part`].
    Part,
    /// Does the other process take parts: [`part::Offer`].
    PartsRequest,
    /// It does.
    PartsReply,
    /// Unassigned.
    Unknown(u8),
}

impl Kind {
    /// From the low four bits of `code`.
    #[inline]
    pub const fn from_code(code: u8) -> Self {
        match code & KIND_MASK {
            0 => Kind::Message,
            1 => Kind::LookupRequest,
            2 => Kind::LookupReply,
            3 => Kind::ProofRequest,
            4 => Kind::ProofReply,
            5 => Kind::MemoryRequest,
            6 => Kind::MemoryReply,
            7 => Kind::MemoryBegins,
            8 => Kind::Record,
            9 => Kind::Part,
            10 => Kind::PartsRequest,
            11 => Kind::PartsReply,
            other => Kind::Unknown(other),
        }
    }

    /// The four bits.
    #[inline]
    pub const fn code(self) -> u8 {
        match self {
            Kind::Message => 0,
            Kind::LookupRequest => 1,
            Kind::LookupReply => 2,
            Kind::ProofRequest => 3,
            Kind::ProofReply => 4,
            Kind::MemoryRequest => 5,
            Kind::MemoryReply => 6,
            Kind::MemoryBegins => 7,
            Kind::Record => 8,
            Kind::Part => 9,
            Kind::PartsRequest => 10,
            Kind::PartsReply => 11,
            Kind::Unknown(code) => code & KIND_MASK,
        }
    }
}

/// `message`, `lookup request`, `proof reply`, `kind 0xc`
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Message => f.write_str("message"),
            Kind::LookupRequest => f.write_str("lookup request"),
            Kind::LookupReply => f.write_str("lookup reply"),
            Kind::ProofRequest => f.write_str("proof request"),
            Kind::ProofReply => f.write_str("proof reply"),
            Kind::MemoryRequest => f.write_str("memory request"),
            Kind::MemoryReply => f.write_str("memory reply"),
            Kind::MemoryBegins => f.write_str("memory begins"),
            Kind::Record => f.write_str("record"),
            Kind::Part => f.write_str("part"),
            Kind::PartsRequest => f.write_str("parts request"),
            Kind::PartsReply => f.write_str("parts reply"),
            Kind::Unknown(code) => write!(f, "kind {code:#x}"),
        }
    }
}

/// Why bytes are not a valid datagram. The receiver counts and drops it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// Shorter than its header, or, for a whole datagram, than [`MIN_LEN`].
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
    /// `FLAG_*` and the [`Kind`]. Reserved bits are kept when parsed and emitted unchanged; senders leave
    /// them zero.
    pub flags: u8,
    /// The sender's queue pair, 24 bits.
    pub source_qpn: u32,
    /// The receiver's queue pair, 24 bits, or [`QPN_MULTICAST`].
    pub destination_qpn: u32,
    /// Must equal the Q_Key of the receiving queue pair.
    pub qkey: u32,
    /// Immediate data in network byte order, valid if [`FLAG_IMMEDIATE`] is set.
    pub immediate: u32,
    /// Random number that distinguishes the sender's queue pair from earlier ones with the same number.
    pub incarnation: u32,
}

impl Header {
    /// Bytes on the wire.
    pub const LEN: usize = 20;

    /// Reads the header at the start of a datagram. Checks the version before the length: another version may
    /// have a shorter header.
    #[inline]
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

    /// Writes the header with version [`VERSION`] and the low 24 bits of the queue pair numbers.
    #[inline]
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
    #[inline]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }

    /// What the body is.
    pub const fn kind(&self) -> Kind {
        Kind::from_code(self.flags)
    }

    /// Immediate data, if there is any.
    #[inline]
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

/// A datagram whose version and length are good. Its CRC is not checked yet: a receiver that copies the
/// payload anyway can compute the CRC on the way.
#[derive(Debug, Clone, Copy)]
pub struct Datagram<'a> {
    header: Header,
    covered: &'a [u8],
    crc: u32,
}

impl<'a> Datagram<'a> {
    /// Checks version and length.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        let header = Header::parse(bytes)?;
        let (covered, crc) = bytes.split_last_chunk::<CRC_LEN>().ok_or(Error::Truncated)?;
        if covered.len() < Header::LEN {
            return Err(Error::Truncated);
        }
        Ok(Datagram { header, covered, crc: crc::from_wire(*crc) })
    }

    /// The extension header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The bytes between the extension header and the CRC.
    pub fn body(&self) -> &'a [u8] {
        self.covered.get(Header::LEN..).unwrap_or(&[])
    }

    /// The bytes that the CRC covers: everything before it.
    pub fn covered(&self) -> &'a [u8] {
        self.covered
    }

    /// Whether the CRC is right. Reads the whole datagram.
    pub fn is_intact(&self) -> bool {
        crc::crc32c(self.covered) == self.crc
    }

    /// Bytes of the whole datagram.
    pub fn datagram_len(&self) -> usize {
        self.covered.len() + CRC_LEN
    }
}

/// Writes the CRC of all bytes before it into the last four bytes of `datagram`, which must be longer than
/// that.
pub(crate) fn seal(datagram: &mut [u8]) {
    if let Some((covered, field)) = datagram.split_last_chunk_mut::<CRC_LEN>() {
        *field = crc::to_wire(crc::crc32c(covered));
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

    #[test]
    fn every_kind_survives() {
        for code in 0..16 {
            assert_eq!(Kind::from_code(code).code(), code);
            assert_eq!(Kind::from_code(0xF0 | code), Kind::from_code(code));
        }
        assert_eq!(Kind::from_code(12).to_string(), "kind 0xc");
    }

    #[test]
    fn the_body_lies_between_header_and_crc() {
        let mut bytes = [0; MIN_LEN + 3];
        bytes[0] = VERSION;
        bytes[20..23].copy_from_slice(&[1, 2, 3]);
        seal(&mut bytes);
        let datagram = Datagram::parse(&bytes).unwrap();
        assert_eq!(datagram.body(), [1, 2, 3]);
        assert_eq!(datagram.covered().len(), 23);
        assert_eq!(datagram.datagram_len(), bytes.len());
        assert!(datagram.is_intact());
        for at in 0..bytes.len() {
            let mut broken = bytes;
            broken[at] ^= 0x10;
            assert!(!Datagram::parse(&broken).is_ok_and(|datagram| datagram.is_intact()), "byte {at}");
        }
        for len in [0, 3, 20, 23] {
            assert!(matches!(Datagram::parse(&bytes[..len]), Err(Error::Truncated)), "{len}");
        }
    }
}
