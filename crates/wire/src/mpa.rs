//! MPA: request and reply frames (RFC 5044 section 7.1, RFC 6581 section 6), enhanced set-up data (RFC 6581
//! section 9), FPDU lengths and markers (RFC 5044 section 4).

use core::fmt;

use crate::{Truncated, be16, head};

/// First bytes of a request frame: `MPA ID Req Frame`.
pub const KEY_REQ: [u8; 16] = *b"MPA ID Req Frame";
/// First bytes of a reply frame: `MPA ID Rep Frame`.
pub const KEY_REP: [u8; 16] = *b"MPA ID Rep Frame";
/// Bytes of a request or reply frame before its private data.
pub const FRAME_LEN: usize = 20;
/// Largest private data of a frame, including the enhanced set-up data (RFC 5044 section 7.1.1).
pub const MAX_PRIVATE_DATA: usize = 512;

/// M: the sender of this frame requests markers in what it receives.
pub const FLAG_M: u8 = 0x80;
/// C: the sender of this frame requests CRCs.
pub const FLAG_C: u8 = 0x40;
/// R: connection rejected; in replies only.
pub const FLAG_R: u8 = 0x20;
/// S: private data begins with [`Enhanced`] (RFC 6581).
pub const FLAG_S: u8 = 0x10;
/// Reserved in the RFCs. Linux siw uses it to negotiate segmentation offload with another siw.
pub const FLAG_SIW_GSO: u8 = 0x08;
/// Reserved in the RFCs. A uwarp initiator sets it in its request.
pub const FLAG_UWARP_A: u8 = 0x04;
/// Reserved in the RFCs. A uwarp responder answers [`FLAG_UWARP_A`] with this bit and without A. So a peer
/// that echoes the flags of a request (siw does) does not look like uwarp.
pub const FLAG_UWARP_B: u8 = 0x02;

/// Bytes of the ULPDU length field at the start of an FPDU.
pub const FPDU_HDR_LEN: usize = 2;
/// Bytes of the CRC field at the end of an FPDU; present even when CRCs are off.
pub const CRC_LEN: usize = 4;
/// Distance from the first byte of one marker to the first byte of the next.
pub const MARKER_SPACING: usize = 512;
/// Bytes of a marker.
pub const MARKER_LEN: usize = Marker::LEN;
/// IRD or ORD value for "no automatic negotiation": the consumer negotiates itself (RFC 6581 section 9.1).
pub const NO_AUTO: u16 = 0x3FFF;

/// Zero bytes between the ULPDU and the CRC. They make length field and ULPDU a multiple of four.
pub const fn pad_len(ulpdu_len: usize) -> usize {
    FPDU_HDR_LEN.wrapping_sub(ulpdu_len) & 3
}

/// Bytes of a whole FPDU without markers: length field, ULPDU, pad, CRC.
///
/// `ulpdu_len` must be a value of the 16-bit length field; lengths near `usize::MAX` overflow.
pub const fn fpdu_len(ulpdu_len: usize) -> usize {
    FPDU_HDR_LEN + ulpdu_len + pad_len(ulpdu_len) + CRC_LEN
}

mod field {
    use core::ops::Range;
    pub const KEY: Range<usize> = 0..16;
    pub const FLAGS: usize = 16;
    pub const REVISION: usize = 17;
    pub const PD_LENGTH: Range<usize> = 18..20;

    pub const IRD: Range<usize> = 0..2;
    pub const ORD: Range<usize> = 2..4;
    pub const HIGH_FLAG: u16 = 0x8000;
    pub const LOW_FLAG: u16 = 0x4000;
    pub const DEPTH: u16 = 0x3FFF;

    pub const FPDUPTR: Range<usize> = 2..4;
}

/// Which of the two set-up frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FrameKind {
    /// From the initiator.
    Request,
    /// From the responder.
    Reply,
}

/// Why bytes are not a set-up frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetupError {
    /// Fewer than [`FRAME_LEN`] bytes, which agree with a key so far.
    Truncated,
    /// Neither key: the peer does not speak MPA.
    BadKey,
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SetupError::Truncated => "MPA set-up frame cut short",
            SetupError::BadKey => "not an MPA set-up frame: wrong key",
        })
    }
}

impl core::error::Error for SetupError {}

/// The fixed part of a request or reply frame. Revision, reserved flags and private data length are not
/// checked here: the set-up machine decides whether it accepts them, because it also chooses the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SetupFrame {
    /// From the key.
    pub kind: FrameKind,
    /// All eight flag bits, `FLAG_*`.
    pub flags: u8,
    /// MPA revision: 1 (RFC 5044) or 2 (RFC 6581); 0 is the RDMA Consortium's.
    pub revision: u8,
    /// Length of the private data behind the frame, as the frame claims. At most [`MAX_PRIVATE_DATA`] is
    /// legal.
    pub private_data_len: u16,
}

impl SetupFrame {
    /// Same as [`FRAME_LEN`].
    pub const LEN: usize = FRAME_LEN;

    /// Reads the fixed part. If there are too few bytes, but they already contradict both keys, the error is
    /// [`SetupError::BadKey`]: a peer that speaks HTTP is rejected at its first bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, SetupError> {
        let key = &bytes[..bytes.len().min(KEY_REQ.len())];
        let kind = if KEY_REQ.starts_with(key) {
            FrameKind::Request
        } else if KEY_REP.starts_with(key) {
            FrameKind::Reply
        } else {
            return Err(SetupError::BadKey);
        };
        let frame = bytes.first_chunk::<FRAME_LEN>().ok_or(SetupError::Truncated)?;
        Ok(SetupFrame {
            kind,
            flags: frame[field::FLAGS],
            revision: frame[field::REVISION],
            private_data_len: be16(&frame[field::PD_LENGTH]),
        })
    }

    /// Writes the fixed part with all flags unchanged.
    pub fn emit(&self, out: &mut [u8; FRAME_LEN]) {
        out[field::KEY].copy_from_slice(match self.kind {
            FrameKind::Request => &KEY_REQ,
            FrameKind::Reply => &KEY_REP,
        });
        out[field::FLAGS] = self.flags;
        out[field::REVISION] = self.revision;
        out[field::PD_LENGTH].copy_from_slice(&self.private_data_len.to_be_bytes());
    }

    /// The fixed part as bytes.
    pub fn to_bytes(&self) -> [u8; FRAME_LEN] {
        let mut out = [0; FRAME_LEN];
        self.emit(&mut out);
        out
    }

    /// [`FLAG_M`]
    pub const fn markers(&self) -> bool {
        self.flags & FLAG_M != 0
    }

    /// [`FLAG_C`]
    pub const fn crc(&self) -> bool {
        self.flags & FLAG_C != 0
    }

    /// [`FLAG_R`]
    pub const fn reject(&self) -> bool {
        self.flags & FLAG_R != 0
    }

    /// [`FLAG_S`]
    pub const fn enhanced(&self) -> bool {
        self.flags & FLAG_S != 0
    }
}

/// `Request rev=2 flags=CS pd=4`; reserved bits as siw's `g`, uwarp's `a` and `b`, and `x` for the last.
impl fmt::Display for SetupFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            FrameKind::Request => "Request",
            FrameKind::Reply => "Reply",
        };
        write!(f, "{kind} rev={} flags=", self.revision)?;
        if self.flags == 0 {
            f.write_str("-")?;
        }
        for (bit, letter) in (0..8).rev().zip(["M", "C", "R", "S", "g", "a", "b", "x"]) {
            if self.flags & (1 << bit) != 0 {
                f.write_str(letter)?;
            }
        }
        write!(f, " pd={}", self.private_data_len)
    }
}

/// Enhanced set-up data, the first four bytes of private data when [`FLAG_S`] is set (RFC 6581 section 9).
///
/// ```text
///  0                   1                   2                   3
///  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
/// +-+-+---------------------------+-+-+---------------------------+
/// |A|B|            IRD            |C|D|            ORD            |
/// +-+-+---------------------------+-+-+---------------------------+
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Enhanced {
    /// Inbound read depth, 14 bits; [`NO_AUTO`] leaves it to the consumer.
    pub ird: u16,
    /// Outbound read depth, 14 bits; [`NO_AUTO`] leaves it to the consumer.
    pub ord: u16,
    /// A: peer-to-peer model. Without it the three RTR bits must be ignored (section 9.2).
    pub a_p2p: bool,
    /// B: a zero-length Send may be the ready-to-receive indication.
    pub b_send_rtr: bool,
    /// C: a zero-length Write may be the indication.
    pub c_write_rtr: bool,
    /// D: a zero-length Read may be the indication.
    pub d_read_rtr: bool,
}

impl Enhanced {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// Reads the first four bytes of private data.
    pub fn parse(bytes: &[u8]) -> Result<Self, Truncated> {
        let data = head::<{ Self::LEN }>(bytes)?;
        let (ird, ord) = (be16(&data[field::IRD]), be16(&data[field::ORD]));
        Ok(Enhanced {
            ird: ird & field::DEPTH,
            ord: ord & field::DEPTH,
            a_p2p: ird & field::HIGH_FLAG != 0,
            b_send_rtr: ird & field::LOW_FLAG != 0,
            c_write_rtr: ord & field::HIGH_FLAG != 0,
            d_read_rtr: ord & field::LOW_FLAG != 0,
        })
    }

    /// Writes four bytes. A depth above 14 bits is written as 0x3FFE, the largest real depth: truncated, it
    /// would be small, and all ones mean [`NO_AUTO`].
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        let word = |depth: u16, high: bool, low: bool| {
            let depth = if depth > field::DEPTH { NO_AUTO - 1 } else { depth };
            let high = if high { field::HIGH_FLAG } else { 0 };
            let low = if low { field::LOW_FLAG } else { 0 };
            (depth | high | low).to_be_bytes()
        };
        out[field::IRD].copy_from_slice(&word(self.ird, self.a_p2p, self.b_send_rtr));
        out[field::ORD].copy_from_slice(&word(self.ord, self.c_write_rtr, self.d_read_rtr));
    }

    /// The four bytes.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }
}

/// `ird=1 ord=1 p2p rtr=send,write,read`
impl fmt::Display for Enhanced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ird={} ord={}", self.ird, self.ord)?;
        if self.a_p2p {
            f.write_str(" p2p")?;
        }
        let mut separator = " rtr=";
        for (set, name) in [(self.b_send_rtr, "send"), (self.c_write_rtr, "write"), (self.d_read_rtr, "read")]
        {
            if set {
                write!(f, "{separator}{name}")?;
                separator = ",";
            }
        }
        Ok(())
    }
}

/// A marker (RFC 5044 section 4.2): 16 reserved bits, then the distance back to the FPDU's length field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Marker {
    /// Bytes from the first byte of the ULPDU length field to the first byte of this marker, including
    /// markers in between; a multiple of four. 0: the marker comes before an FPDU and belongs to it.
    pub fpduptr: u16,
}

impl Marker {
    /// Bytes on the wire.
    pub const LEN: usize = 4;
    const PTR_MASK: u16 = !3;

    /// Reads a marker. The low two bits of the pointer count as zero (section 4.2).
    pub fn parse(bytes: &[u8]) -> Result<Self, Truncated> {
        let marker = head::<{ Self::LEN }>(bytes)?;
        Ok(Marker { fpduptr: be16(&marker[field::FPDUPTR]) & Self::PTR_MASK })
    }

    /// Writes a marker, the low two bits of the pointer as zero.
    pub fn emit(&self, out: &mut [u8; Self::LEN]) {
        *out = [0; Self::LEN];
        out[field::FPDUPTR].copy_from_slice(&(self.fpduptr & Self::PTR_MASK).to_be_bytes());
    }

    /// The four bytes.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }
}

/// `Marker ptr=12`
impl fmt::Display for Marker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Marker ptr={}", self.fpduptr)
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    fn frame(key: &[u8; 16], rest: [u8; 4]) -> [u8; FRAME_LEN] {
        let mut frame = [0; FRAME_LEN];
        frame[..16].copy_from_slice(key);
        frame[16..].copy_from_slice(&rest);
        frame
    }

    /// The keys as RFC 6581 section 6 prints them.
    #[test]
    fn keys() {
        let req =
            [0x4D, 0x50, 0x41, 0x20, 0x49, 0x44, 0x20, 0x52, 0x65, 0x71, 0x20, 0x46, 0x72, 0x61, 0x6D, 0x65];
        let rep =
            [0x4D, 0x50, 0x41, 0x20, 0x49, 0x44, 0x20, 0x52, 0x65, 0x70, 0x20, 0x46, 0x72, 0x61, 0x6D, 0x65];
        assert_eq!((KEY_REQ, KEY_REP), (req, rep));
    }

    /// Frames captured from Linux siw.
    #[test]
    fn frames_of_siw() {
        let cases = [
            ([0x10, 0x02, 0x00, 0x04], "Request rev=2 flags=S pd=4"),
            ([0x50, 0x02, 0x00, 0x04], "Request rev=2 flags=CS pd=4"),
            ([0x00, 0x01, 0x00, 0x00], "Request rev=1 flags=- pd=0"),
            ([0x18, 0x02, 0x00, 0x04], "Request rev=2 flags=Sg pd=4"),
        ];
        for (rest, text) in cases {
            let bytes = frame(&KEY_REQ, rest);
            let parsed = SetupFrame::parse(&bytes).unwrap();
            assert_eq!(parsed.to_string(), text);
            assert_eq!(parsed.to_bytes(), bytes);
        }
        for (bytes, text) in [
            ([0x00, 0x01, 0x00, 0x01], "ird=1 ord=1"),
            ([0x80, 0x01, 0xC0, 0x01], "ird=1 ord=1 p2p rtr=write,read"),
            ([0x80, 0x01, 0x40, 0x01], "ird=1 ord=1 p2p rtr=read"),
        ] {
            let parsed = Enhanced::parse(&bytes).unwrap();
            assert_eq!(parsed.to_string(), text);
            assert_eq!(parsed.to_bytes(), bytes);
        }
    }

    #[test]
    fn flags() {
        let reply = SetupFrame::parse(&frame(&KEY_REP, [0xE2, 2, 0x02, 0x00])).unwrap();
        assert_eq!(reply.kind, FrameKind::Reply);
        assert!(reply.markers() && reply.crc() && reply.reject() && !reply.enhanced());
        assert_eq!(usize::from(reply.private_data_len), MAX_PRIVATE_DATA);
        assert_eq!(reply.flags & (FLAG_UWARP_A | FLAG_UWARP_B), FLAG_UWARP_B);
        assert_eq!(reply.to_string(), "Reply rev=2 flags=MCRb pd=512");
        let all = FLAG_M | FLAG_C | FLAG_R | FLAG_S | FLAG_SIW_GSO | FLAG_UWARP_A | FLAG_UWARP_B;
        assert_eq!(all, 0xFE);
    }

    #[test]
    fn other_protocols_are_recognized_by_their_first_bytes() {
        assert_eq!(SetupFrame::parse(b"GET / HTTP/1.1\r\n"), Err(SetupError::BadKey));
        assert_eq!(SetupFrame::parse(b"G"), Err(SetupError::BadKey));
        assert_eq!(SetupFrame::parse(b""), Err(SetupError::Truncated));
        assert_eq!(SetupFrame::parse(b"MPA ID Re"), Err(SetupError::Truncated));
        assert_eq!(SetupFrame::parse(b"MPA ID Rex"), Err(SetupError::BadKey));
        assert_eq!(SetupFrame::parse(&frame(&KEY_REQ, [0; 4])[..19]), Err(SetupError::Truncated));
        assert_eq!(SetupFrame::parse(b"MPA ID Req framE\0\x01\0\0"), Err(SetupError::BadKey));
    }

    #[test]
    fn a_depth_that_does_not_fit_stays_large_and_is_not_no_auto() {
        let bytes = Enhanced { ird: 0x4000, ord: u16::MAX, a_p2p: true, ..Default::default() }.to_bytes();
        assert_eq!(bytes, [0xBF, 0xFE, 0x3F, 0xFE]);
        let bytes = Enhanced { ird: NO_AUTO, ord: NO_AUTO, ..Default::default() }.to_bytes();
        assert_eq!(bytes, [0x3F, 0xFF, 0x3F, 0xFF]);
    }

    #[test]
    fn lengths() {
        assert_eq!([0, 1, 2, 3, 4, 5, 6].map(pad_len), [2, 1, 0, 3, 2, 1, 0]);
        // RFC 5044 figure 5 without its marker; siw's Terminate for a bad CRC; the longest possible FPDU.
        assert_eq!([42, 22, 65535].map(fpdu_len), [48, 28, 65544]);
        for len in 0..2000 {
            assert_eq!(fpdu_len(len) % 4, 0);
            assert!(pad_len(len) < 4);
        }
    }

    /// RFC 5044 figures 4 and 6.
    #[test]
    fn markers() {
        assert_eq!(Marker::parse(&[0, 0, 0, 0x0C]), Ok(Marker { fpduptr: 12 }));
        assert_eq!(Marker { fpduptr: 0x14 }.to_bytes(), [0, 0, 0, 0x14]);
        // Reserved bits and the two low bits are ignored.
        assert_eq!(Marker::parse(&[0xFF, 0xFF, 0x01, 0xFF]), Ok(Marker { fpduptr: 0x01FC }));
        assert_eq!(Marker { fpduptr: 0x0203 }.to_bytes(), [0, 0, 0x02, 0x00]);
        assert_eq!(Marker::parse(&[0; 3]), Err(Truncated));
        assert_eq!(Marker { fpduptr: 8 }.to_string(), "Marker ptr=8");
    }
}
