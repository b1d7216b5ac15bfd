//! How two queue pairs introduce themselves that were connected by number and address (docs/contracts.md,
//! "Bring-up").
//!
//! An [`Introduction`] is the private data of the MPA request, and of the reply that accepts it; a
//! [`TurnedAway`] that of a reply that rejects it.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------------------------------------------------------+
//! |                  "uQP" and the version, 2                     |
//! +---------------+-----------------------------------------------+
//! |       0       |              Source QPN                       |
//! +---------------+-----------------------------------------------+
//! |       0       |              Destination QPN                  |
//! +-+-+---+-------+---------------+-------+-----------------------+
//! |E|B| 0 | half of the PSN that  |   0   | half of the PSN that  |
//! | | |   |   it expects, if E    |       |  it begins with, if B |
//! +-+-+---+-----------------------+-------+-----------------------+
//! |                                                               |
//! +                          Incarnation                          +
//! |                                                               |
//! +---------------------------------------------------------------+
//! |                                                               |
//! +            Cookie: when it was made; its hash                 +
//! |                        (0 in a reply)                         |
//! +                                                               +
//! |                                                               |
//! +                                                               +
//! |                                                               |
//! +---------------------------------------------------------------+
//! ```
//!
//! A request shows the lower 12 bits of each packet sequence number that its sender knows, the reply the
//! upper 12 bits. So each end proves what the other one has not shown: whoever takes the port of a process
//! that has died cannot return what was sent to it. The incarnation is a new random number for each move to
//! RTR; a reply returns that of the request. The cookie proves that its sender receives at the UDP port of
//! its number ([`crate::datagram::proof`]).
//!
//! Version 1 showed whole PSNs, also the one that the other end must know by itself, and proved nothing.

use core::fmt;
use core::ops::Range;

use crate::{be32, be64};

/// The introduction of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Introduction {
    /// The sender's queue pair, 24 bits.
    pub source_qpn: u32,
    /// The queue pair that the sender connects to, 24 bits.
    pub destination_qpn: u32,
    /// A half of the PSN that the sender expects (`rq_psn`), 12 bits, if its program has set it already.
    pub expects: Option<u16>,
    /// A half of the PSN that the sender begins with (`sq_psn`), 12 bits, if its program has set it already.
    pub begins: Option<u16>,
    /// Distinguishes attempts of one bring-up from those of another.
    pub incarnation: u64,
    /// Proof that the sender owns the port of its number.
    pub cookie: Cookie,
}

/// Proof that its bearer received at an address and a UDP port when it was made. Only its maker can read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Cookie {
    /// When it was made, by the maker's clock.
    pub made: u64,
    /// A keyed hash over address, port and time.
    pub hash: u64,
}

impl Cookie {
    /// Bytes on the wire.
    pub const LEN: usize = 16;
    /// None.
    pub const NONE: Self = Self { made: 0, hash: 0 };

    pub(crate) fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        Self { made: be64(&bytes[..8]), hash: be64(&bytes[8..]) }
    }

    pub(crate) fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..8].copy_from_slice(&self.made.to_be_bytes());
        out[8..].copy_from_slice(&self.hash.to_be_bytes());
        out
    }
}

/// Which half of a packet sequence number is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Half {
    /// By a request.
    Lower,
    /// By a reply.
    Upper,
}

impl Half {
    /// This half of a PSN of 24 bits.
    pub const fn of(self, psn: u32) -> u16 {
        match self {
            Half::Lower => (psn & LOW_12) as u16,
            Half::Upper => (psn >> 12 & LOW_12) as u16,
        }
    }
}

mod field {
    use super::Range;
    pub const MAGIC: Range<usize> = 0..4;
    pub const SOURCE_QPN: Range<usize> = 4..8;
    pub const DESTINATION_QPN: Range<usize> = 8..12;
    pub const HALVES: Range<usize> = 12..16;
    pub const INCARNATION: Range<usize> = 16..24;
    pub const COOKIE: Range<usize> = 24..40;

    pub const REASON: Range<usize> = 4..8;

    pub const NAME: [u8; 3] = *b"uQP";
    pub const LOW_24: u32 = 0x00FF_FFFF;
    pub const EXPECTS: u32 = 1 << 31;
    pub const BEGINS: u32 = 1 << 30;
}

const LOW_12: u32 = 0x0FFF;

/// The version that is sent and understood.
pub const VERSION: u8 = 2;
const MAGIC: [u8; 4] = [field::NAME[0], field::NAME[1], field::NAME[2], VERSION];

/// The version of an introduction, whatever else is in it. `None`: it is none.
pub fn version(bytes: &[u8]) -> Option<u8> {
    match bytes {
        [a, b, c, version, ..] if [*a, *b, *c] == field::NAME => Some(*version),
        _ => None,
    }
}

/// The sender's queue pair, in any version: versions 1 and 2 have it at the same place. `None`: it is no
/// introduction. It proves nothing.
pub fn source_qpn(bytes: &[u8]) -> Option<u32> {
    version(bytes)?;
    Some(be32(bytes.get(field::SOURCE_QPN)?) & field::LOW_24)
}

impl Introduction {
    /// Bytes on the wire.
    pub const LEN: usize = 40;

    /// Reads one. `None`: it is another version, or no introduction.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.first_chunk::<{ Self::LEN }>()?;
        if bytes[field::MAGIC] != MAGIC {
            return None;
        }
        let number = |range: Range<usize>| be32(&bytes[range]);
        let halves = number(field::HALVES);
        let half = |flag: u32, shift: u32| (halves & flag != 0).then_some((halves >> shift & LOW_12) as u16);
        Some(Self {
            source_qpn: number(field::SOURCE_QPN) & field::LOW_24,
            destination_qpn: number(field::DESTINATION_QPN) & field::LOW_24,
            expects: half(field::EXPECTS, 16),
            begins: half(field::BEGINS, 0),
            incarnation: be64(&bytes[field::INCARNATION]),
            cookie: bytes[field::COOKIE].first_chunk().map(Cookie::from_bytes)?,
        })
    }

    /// As bytes, with the low 24 bits of each number and the low 12 of each half.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        let half = |half: Option<u16>, flag: u32, shift: u32| {
            half.map_or(0, |half| flag | (u32::from(half) & LOW_12) << shift)
        };
        out[field::MAGIC].copy_from_slice(&MAGIC);
        for (range, number) in [
            (field::SOURCE_QPN, self.source_qpn & field::LOW_24),
            (field::DESTINATION_QPN, self.destination_qpn & field::LOW_24),
            (field::HALVES, half(self.expects, field::EXPECTS, 16) | half(self.begins, field::BEGINS, 0)),
        ] {
            out[range].copy_from_slice(&number.to_be_bytes());
        }
        out[field::INCARNATION].copy_from_slice(&self.incarnation.to_be_bytes());
        out[field::COOKIE].copy_from_slice(&self.cookie.to_bytes());
        out
    }
}

/// Why a request is turned away. The sender may try again; its next request has another cookie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TurnedAway {
    /// The cookie is missing, wrong or too old.
    NoProof,
    /// The cookie is older than the move to RTR of the queue pair that is asked for.
    Stale,
    /// That queue pair has named another peer.
    AnotherPeer,
    /// The packet sequence numbers do not fit, or nothing is known to both ends yet.
    Psn,
    /// No queue pair has that number.
    NoQueuePair,
    /// There were too many requests, or it has waited too long.
    Crowded,
    /// The version of the introduction is not understood.
    Version,
    /// Unassigned.
    Unknown(u32),
}

impl TurnedAway {
    /// Bytes on the wire: the magic of an introduction, and the reason.
    pub const LEN: usize = 8;

    const ALL: [(Self, u32, &str); 7] = [
        (Self::NoProof, 1, "the proof of the number is missing, wrong or too old"),
        (Self::Stale, 2, "the proof of the number is older than the queue pair's move to RTR"),
        (Self::AnotherPeer, 3, "the queue pair has named another peer"),
        (Self::Psn, 4, "the packet sequence numbers do not fit"),
        (Self::NoQueuePair, 5, "no queue pair has this number"),
        (Self::Crowded, 6, "too many requests wait"),
        (Self::Version, 7, "the version is not understood"),
    ];

    /// Reads one, of any version: a peer of another version says so in its own. `None`: it is none.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        version(bytes)?;
        let reason = be32(bytes.get(field::REASON)?);
        let known = Self::ALL.iter().find(|(_, code, _)| *code == reason);
        Some(known.map_or(Self::Unknown(reason), |(known, ..)| *known))
    }

    /// As bytes.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        let code = match self {
            Self::Unknown(code) => code,
            known => Self::ALL.iter().find(|(this, ..)| *this == known).map_or(0, |(_, code, _)| *code),
        };
        out[field::MAGIC].copy_from_slice(&MAGIC);
        out[field::REASON].copy_from_slice(&code.to_be_bytes());
        out
    }
}

impl fmt::Display for TurnedAway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Self::ALL.iter().find(|(this, ..)| this == self) {
            Some((.., words)) => f.write_str(words),
            None => write!(f, "{self:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn golden() {
        let introduction = Introduction {
            source_qpn: 0x0001_0203,
            destination_qpn: 0x0004_0506,
            expects: Some(Half::Lower.of(7)),
            begins: Some(Half::Upper.of(0x00AB_CDEF)),
            incarnation: 0x1122_3344_5566_7788,
            cookie: Cookie { made: 0x0102_0304_0506_0708, hash: 0x1112_1314_1516_1718 },
        };
        let bytes = introduction.to_bytes();
        assert_eq!(&bytes[..4], b"uQP\x02");
        assert_eq!(bytes[4..16], [0, 1, 2, 3, 0, 4, 5, 6, 0xC0, 7, 0x0A, 0xBC]);
        assert_eq!(bytes[16..24], [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
        assert_eq!(bytes[24..32], [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(bytes[32..], [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]);
        assert_eq!(Introduction::parse(&bytes), Some(introduction));
        let unsaid = Introduction { begins: None, expects: None, ..introduction };
        assert_eq!(Introduction::parse(&unsaid.to_bytes()), Some(unsaid));
        let mut other = bytes;
        other[3] = 1;
        assert_eq!((Introduction::parse(&other), Introduction::parse(&bytes[..39])), (None, None));
        assert_eq!(
            [version(&other), version(&bytes), version(b"uQP"), version(b"")],
            [Some(1), Some(2), None, None]
        );
        assert_eq!(
            [
                source_qpn(&other),
                source_qpn(&bytes),
                source_qpn(&bytes[..7]),
                source_qpn(b"uQQ\x02\0\0\0\x01")
            ],
            [Some(0x0001_0203), Some(0x0001_0203), None, None]
        );
    }

    /// Whoever has seen one half cannot show the other one.
    #[test]
    fn the_halves_of_a_psn_have_no_bit_in_common() {
        assert_eq!((Half::Lower.of(0x00AB_CDEF), Half::Upper.of(0x00AB_CDEF)), (0xDEF, 0xABC));
        for bit in 0..24 {
            let halves = [Half::Lower, Half::Upper].map(|half| half.of(1 << bit));
            assert_eq!(halves.iter().filter(|half| **half != 0).count(), 1, "bit {bit}");
        }
    }

    #[test]
    fn reasons_round_trip_and_an_unknown_one_survives() {
        for (reason, code, words) in TurnedAway::ALL {
            assert_eq!(TurnedAway::parse(&reason.to_bytes()), Some(reason));
            assert_eq!(
                (reason.to_bytes()[4..8].to_vec(), reason.to_string()),
                (code.to_be_bytes().to_vec(), words.into())
            );
        }
        assert_eq!(TurnedAway::parse(&TurnedAway::Unknown(99).to_bytes()), Some(TurnedAway::Unknown(99)));
        assert_eq!((TurnedAway::parse(b"uQP\x02\0\0\0"), TurnedAway::parse(b"nothing!")), (None, None));
    }
}
