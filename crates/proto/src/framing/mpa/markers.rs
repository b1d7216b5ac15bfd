//! Markers (RFC 5044 section 4.3): every 512 bytes of the stream, the distance back to the start of the FPDU.

use uwarp_wire::crc::{crc32c, to_wire};
use uwarp_wire::mpa::{CRC_LEN, FPDU_HDR_LEN, MARKER_LEN, MARKER_SPACING, fpdu_len};
use uwarp_wire::terminate::{Mpa, TerminateError};

use super::super::input::Step;

/// The CRC field for these bytes.
#[inline]
pub(super) fn crc_field(covered: &[u8]) -> [u8; CRC_LEN] {
    to_wire(crc32c(covered))
}

/// Stream positions count from the first byte after set-up, modulo the marker spacing; a marker begins at 0.
fn back(position: usize, bytes: usize) -> usize {
    (position + MARKER_SPACING - bytes % MARKER_SPACING) % MARKER_SPACING
}

/// Finds FPDUs in a stream with markers and takes the markers out.
#[derive(Debug, Default)]
pub(super) struct Remover {
    /// Stream position of the first byte of the next input.
    position: usize,
}

impl Remover {
    /// The last FPDU, of `consumed` bytes, will be passed in again.
    pub(super) fn rewind(&mut self, consumed: usize) {
        self.position = back(self.position, consumed);
    }

    /// The FPDU at the start of `input`; puts its ULPDU without markers into `scratch`.
    #[cold]
    pub(super) fn next<'a>(
        &mut self,
        check_crc: bool,
        input: &'a [u8],
        scratch: &'a mut Vec<u8>,
    ) -> Result<Step<'a>, TerminateError> {
        // A marker between two FPDUs belongs to the second one.
        let lead = if self.position == 0 { MARKER_LEN } else { 0 };
        let Some(head) = input.get(lead..).and_then(|rest| rest.first_chunk::<FPDU_HDR_LEN>()) else {
            return Ok(Step::Incomplete { need: lead + FPDU_HDR_LEN });
        };
        let len = usize::from(u16::from_be_bytes(*head));
        let total = self.len_with_markers(lead, fpdu_len(len));
        let Some(fpdu) = input.get(..total) else {
            return Ok(Step::Incomplete { need: total });
        };
        let (covered, crc) = fpdu.split_at(total - CRC_LEN);
        if check_crc && crc_field(covered) != crc {
            return Err(TerminateError::Mpa(Mpa::Crc));
        }
        self.strip(fpdu, scratch)?;
        self.position = (self.position + total) % MARKER_SPACING;
        let ulpdu = scratch.get(FPDU_HDR_LEN..FPDU_HDR_LEN + len).unwrap_or(&[]);
        Ok(Step::Ulpdu { ulpdu, consumed: total })
    }

    /// Bytes that an FPDU of `unmarked` bytes takes in the stream, with the marker of `lead` bytes before it.
    fn len_with_markers(&self, lead: usize, unmarked: usize) -> usize {
        // Walk the FPDU's own bytes, from marker to marker.
        let mut total = lead;
        let mut own = 0;
        let mut at = (self.position + lead) % MARKER_SPACING;
        while own < unmarked {
            if at == 0 && own > 0 {
                total += MARKER_LEN;
                at += MARKER_LEN;
            }
            let run = (MARKER_SPACING - at).min(unmarked - own);
            own += run;
            total += run;
            at = (at + run) % MARKER_SPACING;
        }
        total
    }

    /// Puts the FPDU without its markers into `out`.
    fn strip(&self, fpdu: &[u8], out: &mut Vec<u8>) -> Result<(), TerminateError> {
        out.clear();
        let mut rest = fpdu;
        let mut at = self.position;
        let mut from_header = 0usize;
        while !rest.is_empty() {
            if at == 0 {
                let (marker, tail) = rest.split_at(MARKER_LEN.min(rest.len()));
                let pointer = match marker {
                    [_, _, hi, lo] => usize::from(u16::from_be_bytes([*hi, *lo]) & !3),
                    _ => return Err(TerminateError::Mpa(Mpa::MarkerMismatch)),
                };
                if pointer != from_header {
                    return Err(TerminateError::Mpa(Mpa::MarkerMismatch));
                }
                rest = tail;
                at = MARKER_LEN;
                if from_header > 0 {
                    from_header += MARKER_LEN;
                }
                continue;
            }
            let run = (MARKER_SPACING - at).min(rest.len());
            let (bytes, tail) = rest.split_at(run);
            out.extend_from_slice(bytes);
            rest = tail;
            at = (at + run) % MARKER_SPACING;
            from_header += run;
        }
        Ok(())
    }
}

/// Inserts markers into FPDUs to send, for a peer that requested them.
#[derive(Debug, Default)]
pub(super) struct Inserter {
    position: usize,
}

impl Inserter {
    /// The last `bytes` bytes that were emitted, which are whole FPDUs, will not be sent after all.
    pub(super) fn rewind(&mut self, bytes: usize) {
        self.position = back(self.position, bytes);
    }

    /// Appends to `out` the FPDU whose bytes up to and including the pad are `covered` (length field first),
    /// with markers and the CRC (zero when `crc` is off).
    pub(super) fn emit(&mut self, covered: &[u8], crc: bool, out: &mut Vec<u8>) {
        let start = out.len();
        let mut from_header = 0usize;
        let mut rest = covered;
        loop {
            if self.position == 0 {
                // FPDUPTR counts stream bytes since the length field, markers included. An FPDU may have
                // 65,543 bytes and markers, and a pointer only 16 bits, but toward strangers an FPDU is at
                // most one MSS, so the pointer fits.
                let pointer = u16::try_from(from_header).unwrap_or(0xFFFC);
                out.extend_from_slice(&[0, 0]);
                out.extend_from_slice(&pointer.to_be_bytes());
                self.position = MARKER_LEN;
                if from_header > 0 {
                    from_header += MARKER_LEN;
                }
            }
            if rest.is_empty() {
                break;
            }
            let run = (MARKER_SPACING - self.position).min(rest.len());
            let (bytes, tail) = rest.split_at(run);
            out.extend_from_slice(bytes);
            self.position = (self.position + run) % MARKER_SPACING;
            from_header += run;
            rest = tail;
        }
        let sum = if crc { crc_field(out.get(start..).unwrap_or(&[])) } else { [0; CRC_LEN] };
        out.extend_from_slice(&sum);
        // The CRC is 4 bytes at a multiple of 4, so no marker falls inside it; one may fall right after,
        // and then belongs to the next FPDU.
        self.position = (self.position + CRC_LEN) % MARKER_SPACING;
    }
}
