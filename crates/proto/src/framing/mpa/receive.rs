//! Finding FPDUs.

use uwarp_wire::ddp::Header;
use uwarp_wire::mpa::{CRC_LEN, FPDU_HDR_LEN, fpdu_len, pad_len};
use uwarp_wire::terminate::{Mpa as Error, TerminateError};

use super::super::input::{Large, Rest, Step};
use super::markers::{Remover, crc_field};
use super::{Mpa, frame_len};

/// An FPDU of at least this size is worth a receiving call of its own.
const LARGE: usize = 16 * 1024;
/// Bytes to receive after a large FPDU: the header of the next one.
const READ_AHEAD: usize = 64;
/// After a direct placement, this many receives end at the next header, so that direct placement can
/// continue.
const EXACT_READS: u8 = 8;

/// Finds the FPDUs of one stream. Holds no stream bytes.
#[derive(Debug)]
pub struct Receiver {
    crc: bool,
    markers: Option<Remover>,
    /// How many more receives must end at the next header.
    exact_reads: u8,
}

impl Receiver {
    pub(in super::super) fn new(mpa: &Mpa) -> Self {
        Self { crc: mpa.crc, markers: mpa.receive_markers.then(Remover::default), exact_reads: 0 }
    }

    #[inline]
    pub(in super::super) fn next<'a>(
        &mut self,
        input: &'a [u8],
        scratch: &'a mut Vec<u8>,
    ) -> Result<Step<'a>, TerminateError> {
        match &mut self.markers {
            None => next_plain(self.crc, input),
            Some(markers) => markers.next(self.crc, input, scratch),
        }
    }

    pub(in super::super) fn rewind(&mut self, consumed: usize) {
        if let Some(markers) = &mut self.markers {
            markers.rewind(consumed);
        }
    }

    #[inline]
    pub(in super::super) fn plan(&mut self, left_over: &[u8], buffer: usize) -> usize {
        let need = if self.markers.is_some() { 0 } else { frame_len(left_over).unwrap_or(0) };
        let max = if self.exact_reads > 0 {
            self.exact_reads -= 1;
            need + READ_AHEAD
        } else if need >= LARGE {
            // As many FPDUs as fit, if the next ones have the same size, so that little is left over and must
            // be moved.
            need * (buffer.saturating_sub(READ_AHEAD) / need).max(1) + READ_AHEAD
        } else {
            buffer
        };
        max.max(left_over.len() + READ_AHEAD).min(buffer)
    }

    /// With a CRC nothing is received straight into place: the CRC would have to be computed over memory that
    /// the program and other streams may write meanwhile. With markers the payload is not contiguous in the
    /// stream.
    pub(in super::super) fn large<'a>(&self, input: &'a [u8]) -> Option<Large<'a>> {
        if self.crc || self.markers.is_some() {
            return None;
        }
        let (len, ulpdu) = input.split_first_chunk::<FPDU_HDR_LEN>()?;
        let ulpdu_len = usize::from(u16::from_be_bytes(*len));
        let worth_it = ulpdu_len >= LARGE && ulpdu.len() >= Header::MAX_LEN && ulpdu.len() < ulpdu_len;
        worth_it.then_some(Large { ulpdu, ulpdu_len })
    }

    pub(in super::super) fn begin_rest(
        &mut self,
        large: &Large<'_>,
        payload_len: usize,
        there: usize,
    ) -> Rest {
        self.exact_reads = EXACT_READS;
        let trailer = pad_len(large.ulpdu_len) + CRC_LEN;
        Rest::new(payload_len.saturating_sub(there), trailer, READ_AHEAD)
    }

    pub(in super::super) fn cut_short(&self) -> TerminateError {
        TerminateError::Mpa(Error::ConnectionLost)
    }
}

#[inline]
fn next_plain(check_crc: bool, input: &[u8]) -> Result<Step<'_>, TerminateError> {
    let Some((head, rest)) = input.split_first_chunk::<FPDU_HDR_LEN>() else {
        return Ok(Step::Incomplete { need: FPDU_HDR_LEN });
    };
    let len = usize::from(u16::from_be_bytes(*head));
    let total = fpdu_len(len);
    let (Some(ulpdu), Some(covered), Some(crc)) =
        (rest.get(..len), input.get(..total - CRC_LEN), input.get(total - CRC_LEN..total))
    else {
        return Ok(Step::Incomplete { need: total });
    };
    if check_crc && crc_field(covered) != crc {
        return Err(TerminateError::Mpa(Error::Crc));
    }
    Ok(Step::Ulpdu { ulpdu, consumed: total })
}

#[cfg(test)]
mod tests {
    use super::super::markers::Inserter;
    use super::*;
    use proptest::prelude::*;

    fn receiver(crc: bool, receive_markers: bool) -> Receiver {
        Receiver::new(&Mpa { crc, receive_markers, ..Mpa::default() })
    }

    fn covered(ulpdu: &[u8]) -> Vec<u8> {
        let mut v = u16::try_from(ulpdu.len()).unwrap().to_be_bytes().to_vec();
        v.extend_from_slice(ulpdu);
        v.resize(v.len() + pad_len(ulpdu.len()), 0);
        v
    }

    fn plain(ulpdu: &[u8], crc: bool) -> Vec<u8> {
        let mut v = covered(ulpdu);
        let sum = if crc { crc_field(&v) } else { [0; 4] };
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
        let mut f = receiver(true, true);
        match f.next(&v, &mut Vec::new()) {
            Ok(Step::Ulpdu { ulpdu, consumed }) => {
                assert_eq!((ulpdu.len(), consumed), (42, v.len()));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn flipped_bit_is_a_crc_error() {
        let mut v = plain(&[7; 33], true);
        v[9] ^= 4;
        let found = |crc| receiver(crc, false).next(&v, &mut Vec::new()).map(|_| ());
        assert_eq!(found(true), Err(TerminateError::Mpa(Error::Crc)));
        assert_eq!(found(false), Ok(()));
    }

    proptest! {
        #[test]
        fn plain_stream_any_cut(
            sizes in prop::collection::vec(0usize..3000, 1..6),
            cut in 0usize..4000,
            crc: bool,
        ) {
            let ulpdus: Vec<Vec<u8>> =
                sizes.iter().map(|n| (0..*n).map(|i| u8::try_from(i % 251).unwrap()).collect()).collect();
            let stream: Vec<u8> = ulpdus.iter().flat_map(|u| plain(u, crc)).collect();
            let mut f = receiver(crc, false);
            check(&mut f, &stream, &ulpdus, cut);
        }

        #[test]
        fn marked_stream_any_cut(
            sizes in prop::collection::vec(0usize..3000, 1..6),
            cut in 0usize..4000,
            crc: bool,
        ) {
            let ulpdus: Vec<Vec<u8>> =
                sizes.iter().map(|n| (0..*n).map(|i| u8::try_from(i % 251).unwrap()).collect()).collect();
            let mut ins = Inserter::default();
            let mut stream = Vec::new();
            for u in &ulpdus {
                ins.emit(&covered(u), crc, &mut stream);
            }
            let mut f = receiver(crc, true);
            check(&mut f, &stream, &ulpdus, cut);
        }

        #[test]
        fn arbitrary_bytes_never_panic(
            bytes in prop::collection::vec(any::<u8>(), 0..4000),
            crc: bool,
            markers: bool,
        ) {
            let mut f = receiver(crc, markers);
            let mut rest = &bytes[..];
            for _ in 0..1000 {
                match f.next(rest, &mut Vec::new()) {
                    Ok(Step::Ulpdu { consumed, .. }) => rest = &rest[consumed..],
                    _ => break,
                }
            }
        }
    }

    fn check(f: &mut Receiver, stream: &[u8], ulpdus: &[Vec<u8>], cut: usize) {
        let mut got = Vec::new();
        let mut start = 0;
        let mut end = cut.min(stream.len());
        loop {
            match f.next(&stream[start..end], &mut Vec::new()).unwrap() {
                Step::Ulpdu { ulpdu, consumed } => {
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
