//! MPA (RFC 5044 section 4): FPDUs in a byte stream, with pad, CRC and markers.
//!
//! An FPDU is a 16-bit length, the ULPDU, a pad to a multiple of four bytes and a CRC field, which is always
//! present.

mod markers;
mod receive;
mod send;

use uwarp_wire::mpa::{CRC_LEN, FPDU_HDR_LEN, MARKER_LEN, MARKER_SPACING, fpdu_len};

pub use receive::Receiver;
pub use send::Sender;

/// Largest ULPDU between two uwarp ends, in bytes: 64 KiB minus room for what a later revision may add.
const UWARP_MULPDU: usize = 64_768;

/// What MPA set-up has negotiated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mpa {
    /// CRCs are generated and checked.
    pub crc: bool,
    /// The peer requested markers.
    pub send_markers: bool,
    /// This end requested markers.
    pub receive_markers: bool,
}

impl Default for Mpa {
    fn default() -> Self {
        Self { crc: true, send_markers: false, receive_markers: false }
    }
}

impl Mpa {
    /// One FPDU for each TCP segment (RFC 5044 section 4.5; with markers, minus room for those in one
    /// segment). Toward a uwarp peer, FPDUs are larger than a segment.
    pub(super) fn mulpdu(&self, emss: usize, uwarp_peer: bool) -> usize {
        if uwarp_peer {
            return UWARP_MULPDU;
        }
        let markers = if self.send_markers { MARKER_LEN * emss.div_ceil(MARKER_SPACING) } else { 0 };
        let overhead = FPDU_HDR_LEN + CRC_LEN + markers + emss % 4;
        emss.saturating_sub(overhead).clamp(128, UWARP_MULPDU)
    }
}

/// Bytes of the FPDU without markers at the start of `bytes`; `None` if its length field is not there.
#[inline]
pub(super) fn frame_len(bytes: &[u8]) -> Option<usize> {
    bytes.first_chunk::<FPDU_HDR_LEN>().map(|len| fpdu_len(u16::from_be_bytes(*len).into()))
}
