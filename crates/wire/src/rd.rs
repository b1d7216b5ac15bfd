//! Reliable datagrams (docs/rd.md): the header of their packets and the packet as a whole. [`contact`] has
//! what two processes say before they have an exchange, [`chunk`] the parts of a packet, [`ack`] and
//! [`segment`] the two chunks of variable form.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------+-------------------------------+---------------+
//! |  Version = 1  |       Source home port        |  RD version   |
//! +-+-+---+-------+-------------------------------+---------------+
//! |0|1|Rsv| Kind  |       Destination port        |   Reserved    |
//! +-+-+---+-------+-------------------------------+---------------+
//! |                             Key                               |
//! +                                                               +
//! |                                                               |
//! +---------------------------------------------------------------+
//! |           Packet number, the low 32 bits of 64                |
//! +---------------------------------------------------------------+
//! |                    body: up to the last four bytes            |
//! +---------------------------------------------------------------+
//! |                  CRC32c, the last four bytes                  |
//! +---------------------------------------------------------------+
//! ```
//!
//! It is the extension header of datagram-iWARP with R set ([`crate::datagram`]), and words 2 to 4 have
//! another meaning. So a receiver without this service drops the packet (docs/datagram-iwarp.md section 3.3),
//! and the port in the source QPN is checked as for every datagram.

pub mod ack;
pub mod chunk;
pub mod contact;
pub mod run;
pub mod segment;

use core::fmt;

use crate::datagram::{self, CRC_LEN, FLAG_IMMEDIATE, FLAG_RELIABLE, KIND_MASK};
use crate::{Truncated, be16, be32, be64, crc};

/// The RD version that this implementation speaks. Both ends use the lower of their highest versions.
pub const VERSION: u8 = 1;

mod field {
    use core::ops::Range;
    pub const VERSION: usize = 0;
    pub const SOURCE_PORT: Range<usize> = 1..3;
    pub const RD_VERSION: usize = 3;
    pub const FLAGS: usize = 4;
    pub const DESTINATION_PORT: Range<usize> = 5..7;
    pub const RESERVED: usize = 7;
    pub const KEY: Range<usize> = 8..16;
    pub const NUMBER: Range<usize> = 16..20;
}

/// What a packet is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Chunks of an exchange.
    Packet,
    /// First contact: [`contact::Hello`].
    Hello,
    /// The stateless answer: [`contact::Challenge`].
    Challenge,
    /// The beginning of an exchange: [`contact::Open`], then chunks.
    Open,
    /// The answer to a [`Kind::Packet`] whose key nobody has.
    Unknown,
    /// The answer to a [`Kind::Open`] that met one on its way to its sender: "I ignored yours".
    Cross,
    /// Unassigned.
    Unassigned(u8),
}

impl Kind {
    /// From the low four bits of `code`.
    pub const fn from_code(code: u8) -> Self {
        match code & KIND_MASK {
            0 => Kind::Packet,
            1 => Kind::Hello,
            2 => Kind::Challenge,
            3 => Kind::Open,
            4 => Kind::Unknown,
            5 => Kind::Cross,
            other => Kind::Unassigned(other),
        }
    }

    /// The four bits.
    pub const fn code(self) -> u8 {
        match self {
            Kind::Packet => 0,
            Kind::Hello => 1,
            Kind::Challenge => 2,
            Kind::Open => 3,
            Kind::Unknown => 4,
            Kind::Cross => 5,
            Kind::Unassigned(code) => code & KIND_MASK,
        }
    }
}

/// `Packet`, `Hello`, `kind 0x8`
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Packet => f.write_str("Packet"),
            Kind::Hello => f.write_str("Hello"),
            Kind::Challenge => f.write_str("Challenge"),
            Kind::Open => f.write_str("Open"),
            Kind::Unknown => f.write_str("Unknown"),
            Kind::Cross => f.write_str("Cross"),
            Kind::Unassigned(code) => write!(f, "kind {code:#x}"),
        }
    }
}

/// Why bytes are not a packet of this service. The receiver counts and drops it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// Shorter than its header and its CRC.
    Truncated,
    /// Another version of the extension header.
    BadVersion(u8),
    /// R is not set, or I is: a datagram of another service.
    Flags(u8),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Truncated => f.write_str("packet shorter than its header"),
            Error::BadVersion(version) => {
                write!(f, "datagram version {version}, expected {}", datagram::VERSION)
            }
            Error::Flags(flags) => write!(f, "flags {flags:#04x} are not those of a reliable datagram"),
        }
    }
}

impl core::error::Error for Error {}

/// Whether these bytes are of this service: the one look by which a receiver of all datagrams of a port
/// decides. Nothing else is checked.
#[inline]
pub fn is_reliable(datagram: &[u8]) -> bool {
    matches!(datagram, [datagram::VERSION, _, _, _, flags, ..] if flags & FLAG_RELIABLE != 0)
}

/// The header of every packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Header {
    /// The RD version of what follows.
    pub version: u8,
    /// What the packet is for.
    pub kind: Kind,
    /// The port from which the sender sends all packets of its exchanges. It must be the UDP source port.
    pub source_port: u16,
    /// The port to which the packet goes.
    pub destination_port: u16,
    /// 64 bits by which the receiver knows the exchange, and that nobody off the path can guess.
    pub key: u64,
    /// The low 32 bits of the packet number; 0 where there is none.
    pub number: u32,
}

impl Header {
    /// Bytes on the wire.
    pub const LEN: usize = 20;

    /// Reads the header at the start of a datagram.
    pub fn parse(datagram: &[u8]) -> Result<Self, Error> {
        let &version = datagram.get(field::VERSION).ok_or(Error::Truncated)?;
        if version != datagram::VERSION {
            return Err(Error::BadVersion(version));
        }
        let header = datagram.first_chunk::<{ Self::LEN }>().ok_or(Error::Truncated)?;
        let flags = header[field::FLAGS];
        if flags & (FLAG_RELIABLE | FLAG_IMMEDIATE) != FLAG_RELIABLE {
            return Err(Error::Flags(flags));
        }
        Ok(Header {
            version: header[field::RD_VERSION],
            kind: Kind::from_code(flags),
            source_port: be16(&header[field::SOURCE_PORT]),
            destination_port: be16(&header[field::DESTINATION_PORT]),
            key: be64(&header[field::KEY]),
            number: be32(&header[field::NUMBER]),
        })
    }

    /// Writes the header.
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        out[field::VERSION] = datagram::VERSION;
        out[field::SOURCE_PORT].copy_from_slice(&self.source_port.to_be_bytes());
        out[field::RD_VERSION] = self.version;
        out[field::FLAGS] = FLAG_RELIABLE | self.kind.code();
        out[field::DESTINATION_PORT].copy_from_slice(&self.destination_port.to_be_bytes());
        out[field::RESERVED] = 0;
        out[field::KEY].copy_from_slice(&self.key.to_be_bytes());
        out[field::NUMBER].copy_from_slice(&self.number.to_be_bytes());
    }

    /// The header as bytes.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }

    /// A whole packet without a body, as [`Kind::Unknown`] and [`Kind::Cross`] are.
    pub fn to_packet(&self) -> [u8; Self::LEN + CRC_LEN] {
        let mut out = [0; Self::LEN + CRC_LEN];
        out[..Self::LEN].copy_from_slice(&self.to_bytes());
        datagram::seal(&mut out);
        out
    }
}

/// `RD Packet 20001->20000 pn=7`. The key is for its two ends alone.
impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RD {} {}->{}", self.kind, self.source_port, self.destination_port)?;
        match self.kind {
            Kind::Packet | Kind::Open => write!(f, " pn={}", self.number),
            _ => Ok(()),
        }
    }
}

/// A packet whose version, flags and length are good. Its CRC is not checked yet.
#[derive(Debug, Clone, Copy)]
pub struct Packet<'a> {
    header: Header,
    covered: &'a [u8],
    crc: [u8; CRC_LEN],
}

impl<'a> Packet<'a> {
    /// Bytes of the shortest packet.
    pub const MIN_LEN: usize = Header::LEN + CRC_LEN;

    /// Checks version, flags and length.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        let header = Header::parse(bytes)?;
        let (covered, crc) = bytes.split_last_chunk::<CRC_LEN>().ok_or(Error::Truncated)?;
        if covered.len() < Header::LEN {
            return Err(Error::Truncated);
        }
        Ok(Packet { header, covered, crc: *crc })
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The bytes between header and CRC.
    pub fn body(&self) -> &'a [u8] {
        self.covered.get(Header::LEN..).unwrap_or(&[])
    }

    /// Whether the CRC is right. Reads the whole packet.
    pub fn is_intact(&self) -> bool {
        crc::to_wire(crc::crc32c(self.covered)) == self.crc
    }

    /// Bytes of the whole packet.
    pub fn packet_len(&self) -> usize {
        self.covered.len() + CRC_LEN
    }
}

/// `RD Packet 20001->20000 pn=9 | Abandon 3 5 | Ping`: header, contact, chunks. What cannot be read is said.
impl fmt::Display for Packet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.header.fmt(f)?;
        let body = self.body();
        let chunks_at = match self.header.kind {
            Kind::Packet => 0,
            Kind::Hello => return said(f, contact::Hello::parse(body).ok_or(Truncated)),
            Kind::Challenge => return said(f, contact::Challenge::parse(body)),
            Kind::Open => {
                said(f, contact::Open::parse(body))?;
                contact::Open::LEN
            }
            Kind::Unknown | Kind::Cross | Kind::Unassigned(_) => return Ok(()),
        };
        let mut chunks = chunk::chunks(body.get(chunks_at..).unwrap_or(&[]));
        chunks.try_for_each(|chunk| said(f, chunk))
    }
}

fn said(f: &mut fmt::Formatter<'_>, part: Result<impl fmt::Display, impl fmt::Display>) -> fmt::Result {
    match part {
        Ok(part) => write!(f, " | {part}"),
        Err(error) => write!(f, " | {error}"),
    }
}

/// The whole number whose low 32 bits are `low`, nearest to `expected` (RFC 9000 appendix A.3). For packet,
/// message and stream positions alike.
pub const fn expand(low: u32, expected: u64) -> u64 {
    const SPAN: u64 = 1 << 32;
    const HALF: u64 = SPAN / 2;
    let candidate = (expected & !(SPAN - 1)) | low as u64;
    if candidate.saturating_add(HALF) <= expected && candidate.checked_add(SPAN).is_some() {
        candidate + SPAN
    } else if candidate > expected.saturating_add(HALF) && candidate >= SPAN {
        candidate - SPAN
    } else {
        candidate
    }
}

/// The low 32 bits, as they travel.
#[inline]
pub const fn low(number: u64) -> u32 {
    (number & 0xFFFF_FFFF) as u32
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    const HEADER: Header = Header {
        version: 1,
        kind: Kind::Open,
        source_port: 0x0203,
        destination_port: 0x0607,
        key: 0x090A_0B0C_0D0E_0F10,
        number: 0x1112_1314,
    };

    #[test]
    fn golden_bytes() {
        let bytes = [1, 2, 3, 1, 0x43, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20];
        assert_eq!(HEADER.to_bytes(), bytes);
        assert_eq!(Header::parse(&bytes), Ok(HEADER));
        assert_eq!(HEADER.to_string(), "RD Open 515->1543 pn=286397204");
        let unknown = Header { kind: Kind::Unknown, number: 0, ..HEADER };
        assert_eq!(unknown.to_string(), "RD Unknown 515->1543");
        let packet = unknown.to_packet();
        assert_eq!(packet[..8], [1, 2, 3, 1, 0x44, 6, 7, 0]);
        assert!(Packet::parse(&packet).is_ok_and(|packet| packet.is_intact() && packet.body().is_empty()));
        let mut reserved = bytes;
        (reserved[4], reserved[7]) = (0x73, 9);
        assert_eq!(Header::parse(&reserved), Ok(HEADER), "reserved bits are ignored");
    }

    #[test]
    fn the_two_services_never_take_each_others_datagrams() {
        assert!(is_reliable(&HEADER.to_bytes()));
        let seen_by_ud = datagram::Header::parse(&HEADER.to_bytes()).unwrap();
        assert_eq!(seen_by_ud.source_qpn >> 8, u32::from(HEADER.source_port), "the check of the port stays");
        assert_ne!(seen_by_ud.flags & FLAG_RELIABLE, 0);
        for flags in [0x00, 0x80, 0xC3] {
            let mut bytes = HEADER.to_bytes();
            bytes[4] = flags;
            assert_eq!(Header::parse(&bytes), Err(Error::Flags(flags)));
        }
        assert!(!is_reliable(&[1, 2, 3, 1]) && !is_reliable(&[2, 2, 3, 1, 0x40]));
    }

    #[test]
    fn too_short_or_of_another_version() {
        assert_eq!(Header::parse(&[2]), Err(Error::BadVersion(2)));
        assert_eq!(Header::parse(&[]), Err(Error::Truncated));
        let packet = HEADER.to_packet();
        for len in 1..packet.len() {
            assert!(matches!(Packet::parse(&packet[..len]), Err(Error::Truncated)), "{len}");
        }
    }

    #[test]
    fn every_kind_survives() {
        for code in 0..16 {
            assert_eq!(Kind::from_code(code).code(), code);
            assert_eq!(Kind::from_code(0xF0 | code), Kind::from_code(code));
        }
    }

    #[test]
    fn numbers_expand_to_the_nearest() {
        const G4: u64 = 1 << 32;
        for (low, expected, whole) in [
            (0, 0, 0),
            (7, 5, 7),
            (u32::MAX, 0, u64::from(u32::MAX)),
            (u32::MAX, G4, G4 - 1),
            (3, G4 - 2, G4 + 3),
            (0, G4 - 1, G4),
            (5, 3 * G4 + 9, 3 * G4 + 5),
            (u32::MAX - 1, 3 * G4 + 9, 3 * G4 - 2),
            (0, u64::MAX, u64::MAX - u64::from(u32::MAX)),
        ] {
            assert_eq!(expand(low, expected), whole, "{low} near {expected}");
        }
        for whole in [1, G4 - 1, G4, G4 + 1, 77 * G4 + 3_000_000_000] {
            for off in [0, 1, 1000, (1 << 31) - 1] {
                assert_eq!(expand(low(whole), whole + off), whole);
                assert_eq!(expand(low(whole), whole.saturating_sub(off)), whole);
            }
        }
    }
}
