//! MPA framing (RFC 5044 section 4): FPDUs in a byte stream, with their CRC and markers.

use uwarp_wire::crc::crc32c;
use uwarp_wire::mpa::{self, CRC_LEN, FPDU_HDR_LEN, MARKER_LEN, MARKER_SPACING};
use uwarp_wire::terminate::{Mpa, TerminateError};

/// What one look at the input found.
#[derive(Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// The FPDU at the start of the input is not whole; it is once `need` bytes are there.
    /// (`need` may grow when the length field itself was missing.)
    Incomplete {
        /// Bytes that must be there, from the start of the input.
        need: usize,
    },
    /// A whole FPDU.
    Fpdu {
        /// Its ULPDU, without length field, markers, pad and CRC.
        ulpdu: &'a [u8],
        /// Bytes of the input it took.
        consumed: usize,
    },
}

/// Finds FPDUs. Holds no stream bytes; with markers it keeps the stream position and a scratch buffer.
#[derive(Debug, Default)]
pub struct Framer {
    check_crc: bool,
    markers: Option<Markers>,
}

#[derive(Debug, Default)]
struct Markers {
    /// Stream position of the first byte of the next input, modulo the marker spacing; counted from the
    /// first byte after the MPA reply, which is a marker (RFC 5044 section 4.3).
    position: usize,
    scratch: Vec<u8>,
}

impl Framer {
    /// A framer for a stream that starts now. `markers`: the peer inserts markers because we asked.
    pub fn new(check_crc: bool, markers: bool) -> Self {
        Self { check_crc, markers: markers.then(Markers::default) }
    }

    /// Whether the stream carries markers, so that payload is not contiguous in it.
    pub fn has_markers(&self) -> bool {
        self.markers.is_some()
    }

    /// Whether CRCs are to be checked.
    pub fn checks_crc(&self) -> bool {
        self.check_crc
    }

    /// Takes back the last FPDU of `consumed` bytes, which the owner could not place yet and will offer again.
    pub fn rewind(&mut self, consumed: usize) {
        if let Some(markers) = &mut self.markers {
            markers.position =
                (markers.position + MARKER_SPACING - consumed % MARKER_SPACING) % MARKER_SPACING;
        }
    }

    /// Looks at the start of `input`, which begins where the last FPDU ended.
    ///
    /// Call again with the rest after `Fpdu`, with more bytes after `Incomplete`. An error ends the stream:
    /// the Terminate to send is returned (RFC 5044 section 8).
    pub fn next<'a>(&'a mut self, input: &'a [u8]) -> Result<Step<'a>, TerminateError> {
        match &mut self.markers {
            None => next_plain(self.check_crc, input),
            Some(markers) => markers.next(self.check_crc, input),
        }
    }

    /// The same where there are no markers: what is found lies in the input itself, so the framer stays free.
    #[inline]
    pub fn next_plain<'a>(&self, input: &'a [u8]) -> Result<Step<'a>, TerminateError> {
        debug_assert!(!self.has_markers());
        next_plain(self.check_crc, input)
    }
}

#[inline]
fn next_plain(check_crc: bool, input: &[u8]) -> Result<Step<'_>, TerminateError> {
    let Some((head, rest)) = input.split_first_chunk::<FPDU_HDR_LEN>() else {
        return Ok(Step::Incomplete { need: FPDU_HDR_LEN });
    };
    let len = usize::from(u16::from_be_bytes(*head));
    let total = mpa::fpdu_len(len);
    let (Some(ulpdu), Some(covered), Some(crc)) =
        (rest.get(..len), input.get(..total - CRC_LEN), input.get(total - CRC_LEN..total))
    else {
        return Ok(Step::Incomplete { need: total });
    };
    if check_crc && mpa_crc(covered) != crc {
        return Err(TerminateError::Mpa(Mpa::Crc));
    }
    Ok(Step::Fpdu { ulpdu, consumed: total })
}

fn mpa_crc(covered: &[u8]) -> [u8; CRC_LEN] {
    uwarp_wire::crc::to_wire(crc32c(covered))
}

impl Markers {
    fn next<'a>(&'a mut self, check_crc: bool, input: &'a [u8]) -> Result<Step<'a>, TerminateError> {
        // A marker between two FPDUs belongs to the second one.
        let lead = if self.position == 0 { MARKER_LEN } else { 0 };
        let Some(head) = input.get(lead..lead + FPDU_HDR_LEN) else {
            return Ok(Step::Incomplete { need: lead + FPDU_HDR_LEN });
        };
        let len = usize::from(u16::from_be_bytes([head[0], head[1]]));
        let unmarked = mpa::fpdu_len(len);
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
        let Some(fpdu) = input.get(..total) else {
            return Ok(Step::Incomplete { need: total });
        };
        let (covered, crc) = fpdu.split_at(total - CRC_LEN);
        if check_crc && mpa_crc(covered) != crc {
            return Err(TerminateError::Mpa(Mpa::Crc));
        }
        self.scratch.clear();
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
                let expected = from_header;
                if pointer != expected {
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
            self.scratch.extend_from_slice(bytes);
            rest = tail;
            at = (at + run) % MARKER_SPACING;
            from_header += run;
        }
        self.position = (self.position + total) % MARKER_SPACING;
        let ulpdu = self.scratch.get(FPDU_HDR_LEN..FPDU_HDR_LEN + len).unwrap_or(&[]);
        Ok(Step::Fpdu { ulpdu, consumed: total })
    }
}

/// Inserts markers into FPDUs to send, for a peer that asked for them.
#[derive(Debug, Default)]
pub struct MarkerInserter {
    position: usize,
}

impl MarkerInserter {
    /// The last `bytes` bytes that were emitted, whole FPDUs, are not sent after all.
    pub fn rewind(&mut self, bytes: usize) {
        self.position = (self.position + MARKER_SPACING - bytes % MARKER_SPACING) % MARKER_SPACING;
    }

    /// Appends to `out` the FPDU whose bytes up to and including the pad are `covered` (length field first),
    /// with markers and the CRC (zero when `crc` is off).
    pub fn emit(&mut self, covered: &[u8], crc: bool, out: &mut Vec<u8>) {
        let start = out.len();
        let mut from_header = 0usize;
        let mut rest = covered;
        loop {
            if self.position == 0 {
                // FPDUPTR counts stream bytes since the length field, markers included. It fits: an FPDU is
                // at most 65,543 bytes, but a marker's pointer is at most 16 bits, which the segment size
                // toward strangers (one MSS) keeps far from.
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
        let sum = if crc { mpa_crc(out.get(start..).unwrap_or(&[])) } else { [0; CRC_LEN] };
        out.extend_from_slice(&sum);
        // The CRC is 4 bytes at a multiple of 4, so no marker falls inside it; one may fall right after,
        // and then belongs to the next FPDU.
        self.position = (self.position + CRC_LEN) % MARKER_SPACING;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn covered(ulpdu: &[u8]) -> Vec<u8> {
        let mut v = u16::try_from(ulpdu.len()).unwrap().to_be_bytes().to_vec();
        v.extend_from_slice(ulpdu);
        v.resize(v.len() + mpa::pad_len(ulpdu.len()), 0);
        v
    }

    fn plain(ulpdu: &[u8], crc: bool) -> Vec<u8> {
        let mut v = covered(ulpdu);
        let sum = if crc { mpa_crc(&v) } else { [0; 4] };
        v.extend_from_slice(&sum);
        v
    }

    #[test]
    fn rfc5044_annotated_example() {
        // RFC 5044 section 4.4: the first FPDU of a stream, with a leading marker and a valid CRC.
        let mut v = vec![0u8, 0, 0, 0, 0x00, 0x2a, 0x41, 0x43];
        v.extend_from_slice(&[0; 4]);
        v.extend_from_slice(&[0; 4]);
        v.extend_from_slice(&[0, 0, 0, 1]);
        v.extend_from_slice(&[0; 4]);
        v.extend_from_slice(&[0; 24]);
        v.extend_from_slice(&[0x52, 0x23, 0x99, 0x83]);
        let mut f = Framer::new(true, true);
        match f.next(&v) {
            Ok(Step::Fpdu { ulpdu, consumed }) => {
                assert_eq!((ulpdu.len(), consumed), (42, v.len()));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn flipped_bit_is_a_crc_error() {
        let mut v = plain(&[7; 33], true);
        v[9] ^= 4;
        assert_eq!(Framer::new(true, false).next(&v), Err(TerminateError::Mpa(Mpa::Crc)));
        assert!(Framer::new(false, false).next(&v).is_ok());
    }

    proptest! {
        #[test]
        fn plain_stream_any_cut(sizes in prop::collection::vec(0usize..3000, 1..6), cut in 0usize..4000, crc: bool) {
            let ulpdus: Vec<Vec<u8>> =
                sizes.iter().map(|n| (0..*n).map(|i| u8::try_from(i % 251).unwrap()).collect()).collect();
            let stream: Vec<u8> = ulpdus.iter().flat_map(|u| plain(u, crc)).collect();
            let mut f = Framer::new(crc, false);
            check(&mut f, &stream, &ulpdus, cut);
        }

        #[test]
        fn marked_stream_any_cut(sizes in prop::collection::vec(0usize..3000, 1..6), cut in 0usize..4000, crc: bool) {
            let ulpdus: Vec<Vec<u8>> =
                sizes.iter().map(|n| (0..*n).map(|i| u8::try_from(i % 251).unwrap()).collect()).collect();
            let mut ins = MarkerInserter::default();
            let mut stream = Vec::new();
            for u in &ulpdus {
                ins.emit(&covered(u), crc, &mut stream);
            }
            let mut f = Framer::new(crc, true);
            check(&mut f, &stream, &ulpdus, cut);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..4000), crc: bool, markers: bool) {
            let mut f = Framer::new(crc, markers);
            let mut rest = &bytes[..];
            for _ in 0..1000 {
                match f.next(rest) {
                    Ok(Step::Fpdu { consumed, .. }) => rest = &rest[consumed..],
                    _ => break,
                }
            }
        }
    }

    fn check(f: &mut Framer, stream: &[u8], ulpdus: &[Vec<u8>], cut: usize) {
        let mut got = Vec::new();
        let mut start = 0;
        let mut end = cut.min(stream.len());
        loop {
            match f.next(&stream[start..end]).unwrap() {
                Step::Fpdu { ulpdu, consumed } => {
                    got.push(ulpdu.to_vec());
                    start += consumed;
                }
                Step::Incomplete { need } => {
                    assert!(need > end - start);
                    if end == stream.len() {
                        break;
                    }
                    end = (end + 700).min(stream.len());
                }
            }
        }
        assert_eq!(start, stream.len());
        assert_eq!(got, ulpdus);
    }
}
