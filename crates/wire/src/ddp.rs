//! DDP segment headers (RFC 5041 section 4).
//!
//! ```text
//! tagged, T=1, 14 bytes                  untagged, T=0, 18 bytes
//! +-+-+-------+---+---------------+      +-+-+-------+---+---------------+
//! |T|L| Rsvd  |DV |    RsvdULP    |      |T|L| Rsvd  |DV |    RsvdULP    |
//! +-+-+-------+---+---------------+      +-+-+-------+---+---------------+
//! |             STag              |      |     RsvdULP, four bytes       |
//! +-------------------------------+      +-------------------------------+
//! |         TO, eight bytes       |      |              QN               |
//! +-------------------------------+      +-------------------------------+
//!                                        |              MSN              |
//!                                        +-------------------------------+
//!                                        |              MO               |
//!                                        +-------------------------------+
//! ```

use core::fmt;

use crate::{be32, be64};

/// The only DDP version there is.
pub const DV: u8 = 1;

/// Untagged queue of Sends and of immediate data.
pub const QN_SEND: u32 = 0;
/// Untagged queue of Read Requests and Atomic Requests.
pub const QN_READ_REQUEST: u32 = 1;
/// Untagged queue of the Terminate message.
pub const QN_TERMINATE: u32 = 2;
/// Untagged queue of Atomic Responses (RFC 7306).
pub const QN_ATOMIC_RESPONSE: u32 = 3;

mod field {
    use core::ops::Range;
    pub const CONTROL: usize = 0;
    pub const RSVDULP: usize = 1;

    pub const STAG: Range<usize> = 2..6;
    pub const TO: Range<usize> = 6..14;

    pub const RSVDULP32: Range<usize> = 2..6;
    pub const QN: Range<usize> = 6..10;
    pub const MSN: Range<usize> = 10..14;
    pub const MO: Range<usize> = 14..18;

    pub const CONTROL_T: u8 = 0x80;
    pub const CONTROL_L: u8 = 0x40;
    pub const CONTROL_DV: u8 = 0x03;
}

/// Why bytes are not a DDP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// The segment ends before its header does.
    Truncated,
    /// Another DDP version. The buffer model (T bit) decides between two error codes.
    BadVersion {
        /// The T bit.
        tagged: bool,
        /// Value of the version field.
        dv: u8,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Truncated => f.write_str("DDP segment shorter than its header"),
            Error::BadVersion { dv, .. } => write!(f, "DDP version {dv}, expected {DV}"),
        }
    }
}

impl core::error::Error for Error {}

/// Header of a segment that names its buffer: RDMA Write and Read Response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tagged {
    /// Last segment of its message.
    pub last: bool,
    /// Steering tag of the target's buffer.
    pub stag: u32,
    /// Tagged offset: where in that buffer this segment's payload begins.
    pub to: u64,
    /// The upper layer's byte: RDMAP's control field.
    pub rsvdulp: u8,
}

impl Tagged {
    /// Bytes on the wire.
    pub const LEN: usize = 14;

    /// Writes the header with version [`DV`].
    #[inline]
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        out[field::CONTROL] = field::CONTROL_T | last_bit(self.last) | DV;
        out[field::RSVDULP] = self.rsvdulp;
        out[field::STAG].copy_from_slice(&self.stag.to_be_bytes());
        out[field::TO].copy_from_slice(&self.to.to_be_bytes());
    }

    /// The header as bytes.
    #[inline]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }

    #[inline]
    fn read(header: &[u8; Self::LEN]) -> Self {
        Tagged {
            last: header[field::CONTROL] & field::CONTROL_L != 0,
            stag: be32(&header[field::STAG]),
            to: be64(&header[field::TO]),
            rsvdulp: header[field::RSVDULP],
        }
    }
}

/// `Tagged L stag=0x1 to=0x2 ulp=0x40`
impl fmt::Display for Tagged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Tagged{} stag={:#x} to={:#x} ulp={:#04x}",
            last_text(self.last),
            self.stag,
            self.to,
            self.rsvdulp
        )
    }
}

/// Header of a segment whose buffer comes from a queue: every message except Write and Read Response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Untagged {
    /// Last segment of its message.
    pub last: bool,
    /// The upper layer's first byte: RDMAP's control field.
    pub rsvdulp: u8,
    /// The upper layer's other four bytes: RDMAP's Invalidate STag.
    pub rsvdulp32: u32,
    /// Queue number, `QN_*`.
    pub qn: u32,
    /// Message sequence number, counted for each queue from 1 and wrapping to 0.
    pub msn: u32,
    /// Message offset: where in the message this segment's payload begins.
    pub mo: u32,
}

impl Untagged {
    /// Bytes on the wire.
    pub const LEN: usize = 18;

    /// Writes the header with version [`DV`].
    #[inline]
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        out[field::CONTROL] = last_bit(self.last) | DV;
        out[field::RSVDULP] = self.rsvdulp;
        out[field::RSVDULP32].copy_from_slice(&self.rsvdulp32.to_be_bytes());
        out[field::QN].copy_from_slice(&self.qn.to_be_bytes());
        out[field::MSN].copy_from_slice(&self.msn.to_be_bytes());
        out[field::MO].copy_from_slice(&self.mo.to_be_bytes());
    }

    /// The header as bytes.
    #[inline]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }

    #[inline]
    fn read(header: &[u8; Self::LEN]) -> Self {
        Untagged {
            last: header[field::CONTROL] & field::CONTROL_L != 0,
            rsvdulp: header[field::RSVDULP],
            rsvdulp32: be32(&header[field::RSVDULP32]),
            qn: be32(&header[field::QN]),
            msn: be32(&header[field::MSN]),
            mo: be32(&header[field::MO]),
        }
    }
}

/// `Untagged L qn=0 msn=1 mo=0 ulp=0x43/0x0`
impl fmt::Display for Untagged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Untagged{} qn={} msn={} mo={} ulp={:#04x}/{:#x}",
            last_text(self.last),
            self.qn,
            self.msn,
            self.mo,
            self.rsvdulp,
            self.rsvdulp32
        )
    }
}

/// Either header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Header {
    /// T=1.
    Tagged(Tagged),
    /// T=0.
    Untagged(Untagged),
}

impl Header {
    /// Bytes of the longest header.
    pub const MAX_LEN: usize = Untagged::LEN;

    /// Reads the header at the start of a segment. Returns it with its length, which is where the payload
    /// begins.
    ///
    /// Checks the version before the length: another version may have a header of another length.
    #[inline]
    pub fn parse(segment: &[u8]) -> Result<(Header, usize), Error> {
        let &control = segment.first().ok_or(Error::Truncated)?;
        let tagged = control & field::CONTROL_T != 0;
        let dv = control & field::CONTROL_DV;
        if dv != DV {
            return Err(Error::BadVersion { tagged, dv });
        }
        if tagged {
            let header = segment.first_chunk().ok_or(Error::Truncated)?;
            Ok((Header::Tagged(Tagged::read(header)), Tagged::LEN))
        } else {
            let header = segment.first_chunk().ok_or(Error::Truncated)?;
            Ok((Header::Untagged(Untagged::read(header)), Untagged::LEN))
        }
    }

    /// Length of the header that begins with this byte, for any version.
    #[inline]
    pub const fn len_for(control: u8) -> usize {
        if control & field::CONTROL_T != 0 { Tagged::LEN } else { Untagged::LEN }
    }

    /// Writes the header at the start of `out` and returns its length.
    ///
    /// # Panics
    /// When `out` is shorter than [`Header::len`].
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let len = self.len();
        match self {
            Header::Tagged(header) => out[..len].copy_from_slice(&header.to_bytes()),
            Header::Untagged(header) => out[..len].copy_from_slice(&header.to_bytes()),
        }
        len
    }

    /// Bytes on the wire: 14 or 18.
    #[inline]
    #[allow(clippy::len_without_is_empty)]
    pub const fn len(&self) -> usize {
        match self {
            Header::Tagged(_) => Tagged::LEN,
            Header::Untagged(_) => Untagged::LEN,
        }
    }

    /// Sets bits of RsvdULP's first octet, RDMAP's control field.
    #[inline]
    pub fn set_rsvdulp(&mut self, bits: u8) {
        match self {
            Header::Tagged(header) => header.rsvdulp |= bits,
            Header::Untagged(header) => header.rsvdulp |= bits,
        }
    }

    /// Last segment of its message.
    #[inline]
    pub const fn last(&self) -> bool {
        match self {
            Header::Tagged(header) => header.last,
            Header::Untagged(header) => header.last,
        }
    }

    /// The upper layer's byte: RDMAP's control field.
    #[inline]
    pub const fn rsvdulp(&self) -> u8 {
        match self {
            Header::Tagged(header) => header.rsvdulp,
            Header::Untagged(header) => header.rsvdulp,
        }
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Header::Tagged(header) => header.fmt(f),
            Header::Untagged(header) => header.fmt(f),
        }
    }
}

const fn last_bit(last: bool) -> u8 {
    if last { field::CONTROL_L } else { 0 }
}

const fn last_text(last: bool) -> &'static str {
    if last { " L" } else { "" }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    /// The header in RFC 5044 figure 5; siw's first segment has the same.
    #[test]
    fn untagged() {
        let bytes = [0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0xEE];
        let (header, len) = Header::parse(&bytes).unwrap();
        assert_eq!(len, 18);
        let expected = Untagged { last: true, rsvdulp: 0x43, rsvdulp32: 0, qn: QN_SEND, msn: 1, mo: 0 };
        assert_eq!(header, Header::Untagged(expected));
        assert_eq!(expected.to_bytes(), bytes[..18]);
        assert_eq!(header.to_string(), "Untagged L qn=0 msn=1 mo=0 ulp=0x43/0x0");
        assert!(header.last());
        assert_eq!(header.rsvdulp(), 0x43);

        let header = Untagged {
            last: false,
            rsvdulp: 0x44,
            rsvdulp32: 0x0102_0304,
            qn: 0x0506_0708,
            msn: 0x090A_0B0C,
            mo: 0x0D0E_0F10,
        };
        let bytes = [0x01, 0x44, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
        assert_eq!(header.to_bytes(), bytes);
        assert_eq!(Header::parse(&bytes), Ok((Header::Untagged(header), 18)));
    }

    #[test]
    fn tagged() {
        let header = Tagged { last: true, stag: 0x0102_0304, to: 0x0506_0708_090A_0B0C, rsvdulp: 0x40 };
        let bytes = [0xC1, 0x40, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12];
        assert_eq!(header.to_bytes(), bytes);
        assert_eq!(Header::parse(&bytes), Ok((Header::Tagged(header), 14)));
        assert_eq!(header.to_string(), "Tagged L stag=0x1020304 to=0x5060708090a0b0c ulp=0x40");

        let middle = Tagged { last: false, ..header };
        assert_eq!(middle.to_bytes()[0], 0x81);
        assert!(!Header::Tagged(middle).last());
    }

    #[test]
    fn reserved_bits_are_ignored() {
        let mut bytes = Tagged { last: true, stag: 1, to: 2, rsvdulp: 3 }.to_bytes();
        let clean = Header::parse(&bytes);
        bytes[0] |= 0x3C;
        assert_eq!(Header::parse(&bytes), clean);
    }

    /// A wrong version is reported as such, however short the segment is.
    #[test]
    fn version_before_length() {
        for (control, tagged, dv) in [(0x00, false, 0), (0x42, false, 2), (0x80, true, 0), (0xFF, true, 3)] {
            assert_eq!(Header::parse(&[control]), Err(Error::BadVersion { tagged, dv }));
        }
        assert_eq!(Header::parse(&[]), Err(Error::Truncated));
        assert_eq!(Header::parse(&[0x01]), Err(Error::Truncated));
        assert_eq!(Header::parse(&[0xC1; 13]), Err(Error::Truncated));
        assert_eq!(Header::parse(&[0x41; 17]), Err(Error::Truncated));
        assert_eq!(Error::BadVersion { tagged: true, dv: 2 }.to_string(), "DDP version 2, expected 1");
    }
}
