//! How two queue pairs introduce themselves that were connected by number and address (docs/contracts.md,
//! "Bring-up").
//!
//! It is the private data of the MPA request, and of the reply that accepts it. Each end gives both numbers,
//! the sequence numbers from its program, and an incarnation: a new random number for each move to RTR.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------------------------------------------------------+
//! |                  "uQP" and the version, 1                     |
//! +---------------+-----------------------------------------------+
//! |       0       |              Source QPN                       |
//! +---------------+-----------------------------------------------+
//! |       0       |              Destination QPN                  |
//! +-+-------------+-----------------------------------------------+
//! |       0       |              PSN that it expects              |
//! +-+-------------+-----------------------------------------------+
//! |S|     0       |              PSN that it begins with, if S    |
//! +-+-------------+-----------------------------------------------+
//! |                                                               |
//! +                          Incarnation                          +
//! |                                                               |
//! +---------------------------------------------------------------+
//! ```
//!
//! Packet sequence numbers mean nothing to TCP. They are sent so that a program gets a report if over
//! InfiniBand nothing would arrive.

use crate::{be32, be64};

/// The introduction of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Introduction {
    /// The sender's queue pair, 24 bits.
    pub source_qpn: u32,
    /// The queue pair that the sender connects to, 24 bits.
    pub destination_qpn: u32,
    /// The PSN that the sender expects (`rq_psn`), 24 bits.
    pub rq_psn: u32,
    /// The PSN that the sender begins with (`sq_psn`), if its program has set it already.
    pub sq_psn: Option<u32>,
    /// Distinguishes attempts of one bring-up from those of another.
    pub incarnation: u64,
}

mod field {
    use core::ops::Range;
    pub const MAGIC: Range<usize> = 0..4;
    pub const SOURCE_QPN: Range<usize> = 4..8;
    pub const DESTINATION_QPN: Range<usize> = 8..12;
    pub const RQ_PSN: Range<usize> = 12..16;
    pub const SQ_PSN: Range<usize> = 16..20;
    pub const INCARNATION: Range<usize> = 20..28;

    pub const MAGIC_1: [u8; 4] = *b"uQP\x01";
    pub const LOW_24: u32 = 0x00FF_FFFF;
    pub const SQ_PSN_GIVEN: u32 = 1 << 31;
}

impl Introduction {
    /// Bytes on the wire.
    pub const LEN: usize = 28;

    /// Reads one. `None`: it is another version, or no introduction.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.first_chunk::<{ Self::LEN }>()?;
        if bytes[field::MAGIC] != field::MAGIC_1 {
            return None;
        }
        let number = |range: core::ops::Range<usize>| be32(&bytes[range]);
        let sq_psn = number(field::SQ_PSN);
        Some(Self {
            source_qpn: number(field::SOURCE_QPN) & field::LOW_24,
            destination_qpn: number(field::DESTINATION_QPN) & field::LOW_24,
            rq_psn: number(field::RQ_PSN) & field::LOW_24,
            sq_psn: (sq_psn & field::SQ_PSN_GIVEN != 0).then_some(sq_psn & field::LOW_24),
            incarnation: be64(&bytes[field::INCARNATION]),
        })
    }

    /// As bytes, with the low 24 bits of each number.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        let sq_psn = self.sq_psn.map_or(0, |psn| psn & field::LOW_24 | field::SQ_PSN_GIVEN);
        out[field::MAGIC].copy_from_slice(&field::MAGIC_1);
        for (range, number) in [
            (field::SOURCE_QPN, self.source_qpn & field::LOW_24),
            (field::DESTINATION_QPN, self.destination_qpn & field::LOW_24),
            (field::RQ_PSN, self.rq_psn & field::LOW_24),
            (field::SQ_PSN, sq_psn),
        ] {
            out[range].copy_from_slice(&number.to_be_bytes());
        }
        out[field::INCARNATION].copy_from_slice(&self.incarnation.to_be_bytes());
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden() {
        let introduction = Introduction {
            source_qpn: 0x0001_0203,
            destination_qpn: 0x0004_0506,
            rq_psn: 7,
            sq_psn: Some(0x00FF_FFFF),
            incarnation: 0x1122_3344_5566_7788,
        };
        let bytes = introduction.to_bytes();
        assert_eq!(&bytes[..4], b"uQP\x01");
        assert_eq!(bytes[4..20], [0, 1, 2, 3, 0, 4, 5, 6, 0, 0, 0, 7, 0x80, 0xFF, 0xFF, 0xFF]);
        assert_eq!(bytes[20..], [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
        assert_eq!(Introduction::parse(&bytes), Some(introduction));
        let unsaid = Introduction { sq_psn: None, ..introduction };
        assert_eq!(Introduction::parse(&unsaid.to_bytes()), Some(unsaid));
        let mut other = bytes;
        other[3] = 2;
        assert_eq!((Introduction::parse(&other), Introduction::parse(&bytes[..27])), (None, None));
    }
}
