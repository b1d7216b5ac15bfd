//! The Terminate message: layer, type and code of the error that ended a stream, and the headers of the
//! offending segment (RFC 5040 section 4.8; codes also from RFC 5041 section 7.2, RFC 5044 section 8, RFC
//! 6581 section 8).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-------+-------+---------------+-+-+-+-------------------------+
//! | Layer | EType |  Error Code   |M|D|R|        Reserved         |
//! +-------+-------+---------------+-+-+-+-------------------------+
//! | DDP Segment Length, if any    |                               |
//! +-------------------------------+                               +
//! |          Terminated DDP header, if any: 14 or 18 bytes        |
//! +---------------------------------------------------------------+
//! |          Terminated RDMAP header, if any: 28 bytes            |
//! +---------------------------------------------------------------+
//! ```

use core::fmt;

use crate::rdmap::ReadRequest;
use crate::{Truncated, be16, ddp, head};

mod field {
    use core::ops::Range;
    pub const LAYER_ETYPE: usize = 0;
    pub const CODE: usize = 1;
    pub const HDRCT: usize = 2;

    pub const SEGMENT_LEN: Range<usize> = 0..2;

    pub const HDRCT_M: u8 = 0x80;
    pub const HDRCT_D: u8 = 0x40;
    pub const HDRCT_R: u8 = 0x20;

    pub const SIW_M: u8 = 0x01;
    pub const SIW_D: u8 = 0x02;
    pub const SIW_R: u8 = 0x04;
}

/// RDMAP layer, error type 1: errors in a peer's STag or offset (RFC 5040 figure 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RemoteProtection {
    /// 0x00
    InvalidStag,
    /// 0x01
    BaseOrBounds,
    /// 0x02
    AccessRights,
    /// 0x03
    StagNotAssociated,
    /// 0x04
    ToWrap,
    /// 0x09; [`RemoteOperation`] has the same code, and RFC 5040 does not say which one to use.
    StagCannotBeInvalidated,
    /// 0xFF
    Unspecified,
}

/// RDMAP layer, error type 2: errors in a peer's message (RFC 5040 figure 9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RemoteOperation {
    /// 0x05
    InvalidVersion,
    /// 0x06
    UnexpectedOpcode,
    /// 0x07; also the answer to an atomic operation on an unaligned address (RFC 7306 section 8.2).
    CatastrophicStream,
    /// 0x08
    CatastrophicGlobal,
    /// 0x09
    StagCannotBeInvalidated,
    /// 0xFF
    Unspecified,
}

/// DDP layer, error type 1 (RFC 5041 section 7.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TaggedBuffer {
    /// 0x00
    InvalidStag,
    /// 0x01
    BaseOrBounds,
    /// 0x02
    StagNotAssociated,
    /// 0x03
    ToWrap,
    /// 0x04
    InvalidVersion,
}

/// DDP layer, error type 2 (RFC 5041 section 7.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UntaggedBuffer {
    /// 0x01
    InvalidQn,
    /// 0x02: no receive was posted for the message.
    NoBuffer,
    /// 0x03
    MsnRange,
    /// 0x04
    InvalidMo,
    /// 0x05
    TooLong,
    /// 0x06
    InvalidVersion,
}

/// MPA, the lower layer: error type 0 (RFC 5044 section 8, RFC 6581 section 8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mpa {
    /// 0x01
    ConnectionLost,
    /// 0x02
    Crc,
    /// 0x03
    MarkerMismatch,
    /// 0x04
    InvalidSetupFrame,
    /// 0x05 (RFC 6581)
    LocalCatastrophic,
    /// 0x06 (RFC 6581)
    InsufficientIrd,
    /// 0x07 (RFC 6581)
    NoMatchingRtr,
}

/// Layer, type and code of an error, in one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TerminateError {
    /// Layer 0, type 0. Any code is accepted; 0 is sent.
    LocalCatastrophic,
    /// Layer 0, type 1.
    RemoteProtection(RemoteProtection),
    /// Layer 0, type 2.
    RemoteOperation(RemoteOperation),
    /// Layer 1, type 0, code 0.
    DdpLocalCatastrophic,
    /// Layer 1, type 1.
    TaggedBuffer(TaggedBuffer),
    /// Layer 1, type 2.
    UntaggedBuffer(UntaggedBuffer),
    /// Layer 2, type 0.
    Mpa(Mpa),
    /// Not in any RFC.
    Unknown {
        /// Four bits.
        layer: u8,
        /// Four bits.
        etype: u8,
        /// Eight bits.
        code: u8,
    },
}

/// Layer of an RDMAP error.
pub const LAYER_RDMAP: u8 = 0;
/// Layer of a DDP error.
pub const LAYER_DDP: u8 = 1;
/// Layer of an MPA error.
pub const LAYER_LLP: u8 = 2;

/// Every error that an RFC names, with its codes and a description. [`TerminateError::codes`],
/// [`TerminateError::from_codes`] and `Display` read this table.
pub static ERRORS: [(TerminateError, (u8, u8, u8), &str); 33] = {
    use TerminateError as E;
    [
        (E::LocalCatastrophic, (0, 0, 0x00), "the end that terminates has failed"),
        (E::RemoteProtection(RemoteProtection::InvalidStag), (0, 1, 0x00), "invalid STag"),
        (E::RemoteProtection(RemoteProtection::BaseOrBounds), (0, 1, 0x01), "base or bounds violation"),
        (E::RemoteProtection(RemoteProtection::AccessRights), (0, 1, 0x02), "access rights violation"),
        (
            E::RemoteProtection(RemoteProtection::StagNotAssociated),
            (0, 1, 0x03),
            "STag not associated with the stream",
        ),
        (E::RemoteProtection(RemoteProtection::ToWrap), (0, 1, 0x04), "tagged offset wraps"),
        (
            E::RemoteProtection(RemoteProtection::StagCannotBeInvalidated),
            (0, 1, 0x09),
            "STag cannot be invalidated",
        ),
        (E::RemoteProtection(RemoteProtection::Unspecified), (0, 1, 0xFF), "unspecified protection error"),
        (E::RemoteOperation(RemoteOperation::InvalidVersion), (0, 2, 0x05), "invalid RDMAP version"),
        (E::RemoteOperation(RemoteOperation::UnexpectedOpcode), (0, 2, 0x06), "unexpected opcode"),
        (
            E::RemoteOperation(RemoteOperation::CatastrophicStream),
            (0, 2, 0x07),
            "catastrophic error of this stream",
        ),
        (
            E::RemoteOperation(RemoteOperation::CatastrophicGlobal),
            (0, 2, 0x08),
            "catastrophic error of the whole RNIC",
        ),
        (
            E::RemoteOperation(RemoteOperation::StagCannotBeInvalidated),
            (0, 2, 0x09),
            "STag cannot be invalidated",
        ),
        (E::RemoteOperation(RemoteOperation::Unspecified), (0, 2, 0xFF), "unspecified operation error"),
        (E::DdpLocalCatastrophic, (1, 0, 0x00), "the peer's DDP layer failed"),
        (E::TaggedBuffer(TaggedBuffer::InvalidStag), (1, 1, 0x00), "invalid STag"),
        (E::TaggedBuffer(TaggedBuffer::BaseOrBounds), (1, 1, 0x01), "base or bounds violation"),
        (
            E::TaggedBuffer(TaggedBuffer::StagNotAssociated),
            (1, 1, 0x02),
            "STag not associated with the stream",
        ),
        (E::TaggedBuffer(TaggedBuffer::ToWrap), (1, 1, 0x03), "tagged offset wraps"),
        (E::TaggedBuffer(TaggedBuffer::InvalidVersion), (1, 1, 0x04), "invalid DDP version"),
        (E::UntaggedBuffer(UntaggedBuffer::InvalidQn), (1, 2, 0x01), "invalid queue number"),
        (E::UntaggedBuffer(UntaggedBuffer::NoBuffer), (1, 2, 0x02), "no receive buffer for the message"),
        (E::UntaggedBuffer(UntaggedBuffer::MsnRange), (1, 2, 0x03), "message sequence number out of range"),
        (E::UntaggedBuffer(UntaggedBuffer::InvalidMo), (1, 2, 0x04), "invalid message offset"),
        (E::UntaggedBuffer(UntaggedBuffer::TooLong), (1, 2, 0x05), "message longer than the receive buffer"),
        (E::UntaggedBuffer(UntaggedBuffer::InvalidVersion), (1, 2, 0x06), "invalid DDP version"),
        (E::Mpa(Mpa::ConnectionLost), (2, 0, 0x01), "TCP connection closed, terminated or lost"),
        (E::Mpa(Mpa::Crc), (2, 0, 0x02), "CRC mismatch"),
        (E::Mpa(Mpa::MarkerMismatch), (2, 0, 0x03), "marker and ULPDU length disagree"),
        (E::Mpa(Mpa::InvalidSetupFrame), (2, 0, 0x04), "invalid MPA request or reply frame"),
        (E::Mpa(Mpa::LocalCatastrophic), (2, 0, 0x05), "set-up failed at the peer"),
        (E::Mpa(Mpa::InsufficientIrd), (2, 0, 0x06), "insufficient inbound read depth"),
        (E::Mpa(Mpa::NoMatchingRtr), (2, 0, 0x07), "no matching ready-to-receive option"),
    ]
};

/// Which headers of the offending segment a Terminate carries (RFC 5040 figure 10).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Includes {
    /// DDP segment length and DDP header, if there is an offending segment whose whole header was received.
    pub ddp: bool,
    /// RDMAP header, if the segment was a Read Request.
    pub rdmap: bool,
}

impl TerminateError {
    /// Layer, type, code; only the low four bits of an unknown layer and type are used.
    pub fn codes(self) -> (u8, u8, u8) {
        match self {
            TerminateError::Unknown { layer, etype, code } => (layer & 0x0F, etype & 0x0F, code),
            known => ERRORS.iter().find(|row| row.0 == known).map_or((0, 0, 0), |row| row.1),
        }
    }

    /// The error with these codes; only the low four bits of layer and type are used.
    pub fn from_codes(layer: u8, etype: u8, code: u8) -> Self {
        let (layer, etype) = (layer & 0x0F, etype & 0x0F);
        if (layer, etype) == (LAYER_RDMAP, 0) {
            return TerminateError::LocalCatastrophic;
        }
        ERRORS
            .iter()
            .find(|row| row.1 == (layer, etype, code))
            .map_or(TerminateError::Unknown { layer, etype, code }, |row| row.0)
    }

    /// Which headers a Terminate with this error carries, if they are available.
    ///
    /// RFC 5040 contradicts itself about the RDMAP header. Figure 10 requires it with each remote protection
    /// error, the text only for a Read Request, and a Send with Invalidate has none. We send it with a remote
    /// protection error of a Read Request.
    pub const fn includes(self) -> Includes {
        match self {
            TerminateError::RemoteProtection(_) => Includes { ddp: true, rdmap: true },
            TerminateError::RemoteOperation(_)
            | TerminateError::TaggedBuffer(_)
            | TerminateError::UntaggedBuffer(_) => Includes { ddp: true, rdmap: false },
            TerminateError::LocalCatastrophic
            | TerminateError::DdpLocalCatastrophic
            | TerminateError::Mpa(_)
            | TerminateError::Unknown { .. } => Includes { ddp: false, rdmap: false },
        }
    }

    /// What went wrong, in the words of the verbs.
    pub fn in_words(self) -> &'static str {
        use TerminateError as E;
        match self {
            E::RemoteProtection(RemoteProtection::InvalidStag)
            | E::TaggedBuffer(TaggedBuffer::InvalidStag) => "invalid remote key",
            E::RemoteProtection(RemoteProtection::BaseOrBounds)
            | E::TaggedBuffer(TaggedBuffer::BaseOrBounds) => "access beyond the registered memory",
            E::RemoteProtection(RemoteProtection::AccessRights) => {
                "the registered memory does not allow this access"
            }
            E::RemoteProtection(RemoteProtection::StagNotAssociated)
            | E::TaggedBuffer(TaggedBuffer::StagNotAssociated) => {
                "the remote key belongs to another protection domain"
            }
            E::LocalCatastrophic | E::DdpLocalCatastrophic | E::Mpa(Mpa::LocalCatastrophic) => {
                "a failure of its own, not of what the other end has sent"
            }
            other => ERRORS.iter().find(|row| row.0 == other).map_or("unknown error", |row| row.2),
        }
    }

    /// Name of the layer.
    pub fn layer_name(self) -> &'static str {
        match self.codes().0 {
            LAYER_RDMAP => "RDMAP",
            LAYER_DDP => "DDP",
            LAYER_LLP => "MPA",
            _ => "unknown layer",
        }
    }
}

/// `MPA: CRC mismatch (2/0/02)`: layer, description, and the codes as layer/type/code in hexadecimal.
impl fmt::Display for TerminateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layer, etype, code) = self.codes();
        let sentence = ERRORS.iter().find(|row| row.0 == *self).map_or("unknown error", |row| row.2);
        write!(f, "{}: {sentence} ({layer:x}/{etype:x}/{code:02x})", self.layer_name())
    }
}

/// The four bytes that every Terminate has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Header {
    /// The error.
    pub error: TerminateError,
    /// M: the DDP segment length is valid.
    pub m: bool,
    /// D: the DDP header is included.
    pub d: bool,
    /// R: the RDMAP header is included.
    pub r: bool,
}

impl Header {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// Reads the four bytes after the DDP header.
    ///
    /// Linux siw uses C bit-fields. On little-endian machines it sends the two halves of the first byte
    /// swapped, and M, D, R as the lowest bits of the third. A header is read in siw's order if all of these
    /// hold:
    /// - M, D and R are clear in the RFC's places;
    /// - siw's order gives an existing error;
    /// - the RFC's order gives no existing error; or siw's M, D or R is set, where the RFC requires zero; or
    ///   the RFC's error requires a DDP header and siw's does not.
    ///
    /// The price: if a peer sends a remote operation error 5, 6 or 7 without the required DDP header, it is
    /// read as the MPA error of that number. This includes siw's own 5 and 6 (RDMAP version, opcode).
    pub fn parse(bytes: &[u8]) -> Result<Self, Truncated> {
        let header = head::<{ Self::LEN }>(bytes)?;
        let (high, low) = (header[field::LAYER_ETYPE] >> 4, header[field::LAYER_ETYPE] & 0x0F);
        let code = header[field::CODE];
        let hdrct = header[field::HDRCT];
        let rfc = TerminateError::from_codes(high, low, code);
        let siw = TerminateError::from_codes(low, high, code);
        let rfc_bits = hdrct & (field::HDRCT_M | field::HDRCT_D | field::HDRCT_R) != 0;
        let siw_bits = hdrct & (field::SIW_M | field::SIW_D | field::SIW_R) != 0;
        let is_siw = match (rfc, siw) {
            _ if rfc_bits => false,
            (_, TerminateError::Unknown { .. }) => false,
            (TerminateError::Unknown { .. }, _) => true,
            _ => siw_bits || (rfc.includes().ddp && !siw.includes().ddp),
        };
        let (error, m, d, r) = if is_siw {
            (siw, field::SIW_M, field::SIW_D, field::SIW_R)
        } else {
            (rfc, field::HDRCT_M, field::HDRCT_D, field::HDRCT_R)
        };
        Ok(Header { error, m: hdrct & m != 0, d: hdrct & d != 0, r: hdrct & r != 0 })
    }

    /// Writes the four bytes, always in the RFC's order.
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        let (layer, etype, code) = self.error.codes();
        *out = [0; Self::LEN];
        out[field::LAYER_ETYPE] = layer << 4 | etype;
        out[field::CODE] = code;
        for (set, bit) in [(self.m, field::HDRCT_M), (self.d, field::HDRCT_D), (self.r, field::HDRCT_R)] {
            if set {
                out[field::HDRCT] |= bit;
            }
        }
    }

    /// The four bytes.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }
}

/// A whole Terminate message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Terminate<'a> {
    /// The error, and what the sender claims to include.
    pub header: Header,
    /// Length of the offending DDP segment, header and payload (RFC 5040 section 7.1 calls it ULP PDU Length;
    /// siw sends only the length of the payload). Valid only if `header.m`.
    pub ddp_segment_len: Option<u16>,
    /// The DDP header of the offending segment, 14 or 18 bytes.
    pub ddp_header: Option<&'a [u8]>,
    /// The RDMAP header of the offending Read Request, 28 bytes.
    pub rdmap_header: Option<&'a [u8]>,
}

impl<'a> Terminate<'a> {
    /// Bytes of the longest Terminate.
    pub const MAX_LEN: usize = Header::LEN + SEGMENT_LEN_LEN + ddp::Untagged::LEN + ReadRequest::LEN;

    /// A Terminate for `error` in `segment`, with as much of the segment as RFC 5040 allows for this error.
    /// `segment` holds at least the headers of the DDP segment of `segment_len` bytes; `None` if the error
    /// does not come from an incoming segment.
    pub fn new(error: TerminateError, segment: Option<(&'a [u8], u16)>) -> Self {
        let mut terminate = Terminate {
            header: Header { error, m: false, d: false, r: false },
            ddp_segment_len: None,
            ddp_header: None,
            rdmap_header: None,
        };
        let includes = error.includes();
        let Some((bytes, segment_len)) = segment.filter(|_| includes.ddp) else { return terminate };
        let Some((ddp_header, payload)) = split_ddp_header(bytes) else { return terminate };
        terminate.header.m = true;
        terminate.header.d = true;
        terminate.ddp_segment_len = Some(segment_len);
        terminate.ddp_header = Some(ddp_header);
        if includes.rdmap && is_read_request(ddp_header) {
            terminate.rdmap_header = payload.get(..ReadRequest::LEN);
            terminate.header.r = terminate.rdmap_header.is_some();
        }
        terminate
    }

    /// Reads the message after the DDP header. It needs only the first four bytes. If the headers that M, D
    /// and R announce are truncated, they are `None`: the error matters more than the quoted headers.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Truncated> {
        let header = Header::parse(bytes)?;
        let mut terminate = Terminate { header, ddp_segment_len: None, ddp_header: None, rdmap_header: None };
        let mut rest = &bytes[Header::LEN..];
        // "MUST be valid if the M bit is set ... MUST be present when the D bit is set": so either bit means
        // that it is present.
        if header.m || header.d {
            let Some((len, after)) = rest.split_at_checked(SEGMENT_LEN_LEN) else { return Ok(terminate) };
            terminate.ddp_segment_len = Some(be16(&len[field::SEGMENT_LEN]));
            rest = after;
        }
        if header.d {
            let Some((ddp_header, after)) = split_ddp_header(rest) else { return Ok(terminate) };
            terminate.ddp_header = Some(ddp_header);
            rest = after;
        }
        if header.r {
            terminate.rdmap_header = rest.get(..ReadRequest::LEN);
        }
        Ok(terminate)
    }

    /// Bytes on the wire.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        let segment_len = if self.has_segment_len() { SEGMENT_LEN_LEN } else { 0 };
        Header::LEN
            + segment_len
            + self.ddp_header.map_or(0, <[u8]>::len)
            + self.rdmap_header.map_or(0, <[u8]>::len)
    }

    /// Writes the message at the start of `out` and returns its length. Sets D and R for the headers that are
    /// included, and M if `header.m` is set and there is a length.
    ///
    /// # Panics
    /// When `out` is shorter than [`Terminate::len`].
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let header = Header {
            error: self.header.error,
            m: self.header.m && self.ddp_segment_len.is_some(),
            d: self.ddp_header.is_some(),
            r: self.rdmap_header.is_some(),
        };
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&header.to_bytes());
        if self.has_segment_len() {
            put(&self.ddp_segment_len.unwrap_or(0).to_be_bytes());
        }
        put(self.ddp_header.unwrap_or(&[]));
        put(self.rdmap_header.unwrap_or(&[]));
        at
    }

    fn has_segment_len(&self) -> bool {
        self.ddp_header.is_some() || (self.header.m && self.ddp_segment_len.is_some())
    }
}

/// `Terminate MPA: CRC mismatch (2/0/02)`, with ` segment=64` and the quoted headers if they are included.
impl fmt::Display for Terminate<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Terminate {}", self.header.error)?;
        if let (true, Some(len)) = (self.header.m, self.ddp_segment_len) {
            write!(f, " segment={len}")?;
        }
        if let Some(Ok((header, _))) = self.ddp_header.map(ddp::Header::parse) {
            let rdmap_header = self.rdmap_header.unwrap_or(&[]);
            write!(f, " [{}]", crate::text::Headers { header, rdmap_header })?;
        }
        Ok(())
    }
}

const SEGMENT_LEN_LEN: usize = 2;

/// Splits a DDP header off by its T bit. It ignores the version: a wrong version may be the error that is
/// reported.
fn split_ddp_header(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    bytes.split_at_checked(ddp::Header::len_for(*bytes.first()?))
}

fn is_read_request(ddp_header: &[u8]) -> bool {
    use crate::rdmap::{Control, Opcode};
    matches!(ddp::Header::parse(ddp_header), Ok((ddp::Header::Untagged(header), _))
        if Control::parse(header.rsvdulp).opcode == Opcode::ReadRequest)
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;
    use crate::text::Segment;

    const CRC: TerminateError = TerminateError::Mpa(Mpa::Crc);

    /// A Write, a Send with Invalidate and a Read Request as whole segments.
    const WRITE: [u8; 16] = [0xC1, 0x40, 0, 0, 0x12, 0x34, 0, 0, 0, 0, 0, 0, 0x10, 0, 0xAA, 0xBB];
    const SEND_INVALIDATE: [u8; 18] = [0x41, 0x44, 0, 0, 0x12, 0x34, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0];
    const READ: [u8; 46] = [
        0x41, 0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, // DDP
        0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 64, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 10,
    ];

    fn emitted(terminate: Terminate<'_>) -> std::vec::Vec<u8> {
        let mut out = std::vec![0; terminate.len()];
        assert_eq!(terminate.emit(&mut out), out.len());
        assert_eq!(Terminate::parse(&out), Ok(terminate));
        out
    }

    #[test]
    fn golden_bytes() {
        assert_eq!(emitted(Terminate::new(CRC, None)), [0x20, 0x02, 0, 0]);
        assert_eq!(Terminate::new(CRC, None).to_string(), "Terminate MPA: CRC mismatch (2/0/02)");

        let bounds = TerminateError::TaggedBuffer(TaggedBuffer::BaseOrBounds);
        let terminate = Terminate::new(bounds, Some((&WRITE, 16)));
        let mut bytes = std::vec![0x11, 0x01, 0xC0, 0, 0, 16];
        bytes.extend(&WRITE[..14]);
        assert_eq!(emitted(terminate), bytes);
        assert_eq!(
            terminate.to_string(),
            "Terminate DDP: base or bounds violation (1/1/01) segment=16 [Write L stag=0x1234 to=0x1000]"
        );

        let stag = TerminateError::RemoteProtection(RemoteProtection::InvalidStag);
        let terminate = Terminate::new(stag, Some((&READ, 46)));
        let mut bytes = std::vec![0x01, 0x00, 0xE0, 0, 0, 46];
        bytes.extend(READ);
        assert_eq!(emitted(terminate), bytes);
        assert_eq!(bytes.len(), Terminate::MAX_LEN);
        assert_eq!(
            terminate.to_string(),
            "Terminate RDMAP: invalid STag (0/1/00) segment=46 \
             [ReadReq L qn=1 msn=2 mo=0 sink=0x7/0x8 src=0x9/0xa size=64]"
        );
    }

    /// RFC 5040 figure 10, and the text where it contradicts the figure.
    #[test]
    fn what_is_included() {
        let protection = TerminateError::RemoteProtection(RemoteProtection::AccessRights);
        let operation = TerminateError::RemoteOperation(RemoteOperation::UnexpectedOpcode);
        let untagged = TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer);
        let shape = |error, segment: &[u8]| {
            let terminate = Terminate::new(error, Some((segment, 1000)));
            let Header { m, d, r, .. } = terminate.header;
            assert_eq!((m, d, r), (d, terminate.ddp_header.is_some(), terminate.rdmap_header.is_some()));
            (terminate.ddp_header.map_or(0, <[u8]>::len), terminate.rdmap_header.map_or(0, <[u8]>::len))
        };
        assert_eq!(shape(protection, &READ), (18, 28));
        assert_eq!(shape(protection, &SEND_INVALIDATE), (18, 0));
        assert_eq!(shape(protection, &READ[..45]), (18, 0), "Read Request cut short");
        assert_eq!(shape(operation, &READ), (18, 0));
        assert_eq!(shape(operation, &WRITE), (14, 0));
        assert_eq!(shape(untagged, &SEND_INVALIDATE), (18, 0));
        assert_eq!(shape(untagged, &SEND_INVALIDATE[..17]), (0, 0), "DDP header cut short");
        assert_eq!(shape(untagged, &[]), (0, 0));
        assert_eq!(shape(CRC, &READ), (0, 0));
        assert_eq!(shape(TerminateError::LocalCatastrophic, &READ), (0, 0));
        assert_eq!(shape(TerminateError::DdpLocalCatastrophic, &READ), (0, 0));
    }

    /// A DDP header of an unknown version is still quoted.
    #[test]
    fn quotes_a_header_of_another_version() {
        let mut write = WRITE;
        write[0] = 0xC2;
        let version = TerminateError::TaggedBuffer(TaggedBuffer::InvalidVersion);
        let terminate = Terminate::new(version, Some((&write, 16)));
        assert_eq!(terminate.ddp_header, Some(&write[..14]));
        emitted(terminate);
        assert_eq!(terminate.to_string(), "Terminate DDP: invalid DDP version (1/1/04) segment=16");
    }

    #[test]
    fn headers_cut_short_leave_the_reason() {
        let whole = emitted(Terminate::new(
            TerminateError::RemoteProtection(RemoteProtection::ToWrap),
            Some((&READ, 46)),
        ));
        for cut in 4..whole.len() {
            let terminate = Terminate::parse(&whole[..cut]).unwrap();
            assert_eq!(terminate.header.error, TerminateError::RemoteProtection(RemoteProtection::ToWrap));
            assert_eq!(terminate.ddp_segment_len.is_some(), cut >= 6);
            assert_eq!(terminate.ddp_header.is_some(), cut >= 24);
            assert_eq!(terminate.rdmap_header, None);
        }
        for cut in 0..4 {
            assert_eq!(Terminate::parse(&whole[..cut]), Err(Truncated));
        }
    }

    /// siw's answer to a bad CRC, captured on the wire, as a whole ULPDU.
    #[test]
    fn siw_bad_crc() {
        let ulpdu = [0x41, 0x47, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0x02, 0x02, 0x00, 0x00];
        assert_eq!(
            Segment::parse(&ulpdu).unwrap().to_string(),
            "Terminate L qn=2 msn=1 mo=0 MPA: CRC mismatch (2/0/02)"
        );
        assert_eq!(Terminate::parse(&ulpdu[18..]), Ok(Terminate::new(CRC, None)));
    }

    #[test]
    fn siw_order() {
        let error = |bytes: [u8; 4]| Header::parse(&bytes).unwrap().error;
        // Captured: wrong key, ORD too large.
        assert_eq!(error([0x02, 0x04, 0, 0]), TerminateError::Mpa(Mpa::InvalidSetupFrame));
        assert_eq!(error([0x02, 0x06, 0, 0]), TerminateError::Mpa(Mpa::InsufficientIrd));
        assert_eq!(error([0x01, 0x00, 0, 0]), TerminateError::DdpLocalCatastrophic);
        // M and D as the lowest bits of the third byte: a Read Request with an STag that does not exist.
        let read = Header::parse(&[0x10, 0x00, 0x07, 0]).unwrap();
        let error_of_read = TerminateError::RemoteProtection(RemoteProtection::InvalidStag);
        assert_eq!(read, Header { error: error_of_read, m: true, d: true, r: true });
        let send = Header::parse(&[0x21, 0x02, 0x03, 0]).unwrap();
        let error_of_send = TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer);
        assert_eq!(send, Header { error: error_of_send, m: true, d: true, r: false });
    }

    /// Every error in the RFC's order, with its required headers, is read in the RFC's order.
    #[test]
    fn rfc_order_is_never_taken_for_siw() {
        for &(error, ..) in &ERRORS {
            let d = error.includes().ddp;
            let header = Header { error, m: d, d, r: false };
            assert_eq!(Header::parse(&header.to_bytes()), Ok(header));
        }
    }

    #[test]
    fn unknown_codes_survive() {
        let header = Header::parse(&[0xF3, 0x77, 0xE0, 0]).unwrap();
        let error = TerminateError::Unknown { layer: 15, etype: 3, code: 0x77 };
        assert_eq!(header, Header { error, m: true, d: true, r: true });
        assert_eq!(header.to_bytes(), [0xF3, 0x77, 0xE0, 0]);
        assert_eq!(error.to_string(), "unknown layer: unknown error (f/3/77)");
        assert_eq!(TerminateError::from_codes(1, 3, 0).to_string(), "DDP: unknown error (1/3/00)");
        assert_eq!(TerminateError::from_codes(0, 0, 0x42), TerminateError::LocalCatastrophic);
    }
}
