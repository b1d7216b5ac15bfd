//! Making FPDUs.

use uwarp_wire::crc::{self, Crc32c};
use uwarp_wire::ddp::Header;
use uwarp_wire::mpa::{CRC_LEN, FPDU_HDR_LEN, fpdu_len, pad_len};

use super::Mpa;
use super::markers::Inserter;
use crate::tx::OutSegment;

/// Without a CRC, payload from this size on is referenced, not copied.
const BY_REFERENCE: u32 = 8 * 1024;
/// From this size on, the CRC is computed while the payload is copied. Below it, one pass over all bytes of
/// the FPDU costs less.
const FUSED: u32 = 8 * 1024;

/// Makes the FPDUs of one stream.
#[derive(Debug)]
pub struct Sender {
    crc: bool,
    markers: Option<Inserter>,
}

impl Sender {
    pub(in super::super) fn new(mpa: &Mpa) -> Self {
        Self { crc: mpa.crc, markers: mpa.send_markers.then(Inserter::default) }
    }

    #[inline]
    pub(in super::super) fn takes_reference(&self, segment: &OutSegment) -> bool {
        !self.crc && segment.len >= BY_REFERENCE && self.markers.is_none()
    }

    #[inline]
    pub(in super::super) fn stage<E>(
        &mut self,
        buf: &mut Vec<u8>,
        segment: &OutSegment,
        payload: impl FnOnce(&mut Vec<u8>, Option<&mut Crc32c>) -> Result<(), E>,
    ) -> Result<(), E> {
        let ulpdu_len = segment.ulpdu_len();
        let start = buf.len();
        buf.reserve(fpdu_len(ulpdu_len));
        push_header(buf, segment);
        let fused = self.crc && self.markers.is_none() && segment.len >= FUSED;
        let mut crc = fused.then(Crc32c::new);
        if let Some(crc) = &mut crc {
            crc.update(buf.get(start..).unwrap_or(&[]));
        }
        payload(buf, crc.as_mut()).inspect_err(|_| buf.truncate(start))?;
        let payload_end = buf.len();
        // A payload that is too short would break the framing of the whole stream.
        buf.resize(start + FPDU_HDR_LEN + ulpdu_len + pad_len(ulpdu_len), 0);
        match &mut self.markers {
            None => {
                let sum = match crc {
                    Some(mut crc) => {
                        crc.update(buf.get(payload_end..).unwrap_or(&[]));
                        crc.finish()
                    }
                    None if self.crc => crc::crc32c(buf.get(start..).unwrap_or(&[])),
                    None => 0,
                };
                buf.extend_from_slice(&crc::to_wire(sum));
            }
            Some(markers) => {
                let covered = buf.split_off(start);
                markers.emit(&covered, self.crc, buf);
            }
        }
        Ok(())
    }

    #[inline]
    pub(in super::super) fn begin(&mut self, buf: &mut Vec<u8>, segment: &OutSegment) {
        push_header(buf, segment);
    }

    #[inline]
    pub(in super::super) fn end(&mut self, buf: &mut Vec<u8>, segment: &OutSegment) {
        buf.resize(buf.len() + pad_len(segment.ulpdu_len()) + CRC_LEN, 0);
    }

    pub(in super::super) fn unsend(&mut self, bytes: usize) {
        if let Some(markers) = &mut self.markers {
            markers.rewind(bytes);
        }
    }

    /// Whether the length field of an FPDU shows where it ends. With markers in the FPDU, it does not.
    pub(in super::super) fn lengths_are_whole(&self) -> bool {
        self.markers.is_none()
    }
}

/// Appends length field and DDP header.
#[inline]
fn push_header(buf: &mut Vec<u8>, segment: &OutSegment) {
    buf.extend_from_slice(&u16::try_from(segment.ulpdu_len()).unwrap_or(u16::MAX).to_be_bytes());
    match &segment.header {
        Header::Tagged(header) => buf.extend_from_slice(&header.to_bytes()),
        Header::Untagged(header) => buf.extend_from_slice(&header.to_bytes()),
    }
}
