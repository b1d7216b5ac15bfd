//! Parts of a datagram that is longer than a packet of the path, and how a process learns that another one
//! takes them (docs/datagram-iwarp.md section 16).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------+-----------------------------------------------+
//! |  Version = 1  |                  Source QPN                   |
//! +-+-+---+-------+-----------------------------------------------+
//! |0|0| 0 |   9   |                Destination QPN                |
//! +-+-+---+-------+-----------------------------------------------+
//! |                             Q_Key                             |
//! +-------------------------------+-------------------------------+
//! |            Length             |            Offset             |
//! +-------------------------------+-------------------------------+
//! |                            Number                             |
//! +---------------------------------------------------------------+
//! |        bytes of the datagram from Offset on, and zeros        |
//! +---------------------------------------------------------------+
//! ```
//!
//! The datagram is a whole one, with its own header and CRC, so a part has none. All parts of a datagram have
//! the same number of bytes; the last one is filled with zeros. So the system can send those of several
//! datagrams in one call, and give them in one.

use core::fmt;

use super::{Datagram, Header, Kind, MIN_LEN, seal};

/// Parts of one datagram at most.
pub const MOST_PARTS: usize = 64;

/// What the header of a part says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PartHead {
    /// The sender's queue pair, 24 bits.
    pub source_qpn: u32,
    /// The receiver's queue pair, 24 bits.
    pub destination_qpn: u32,
    /// That of the datagram.
    pub qkey: u32,
    /// The datagram's, among those that its sender sends in parts.
    pub number: u32,
    /// Bytes of the datagram.
    pub length: u16,
    /// Where in it the part begins.
    pub offset: u16,
}

/// A part, as it was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part<'a> {
    /// Its header.
    pub head: PartHead,
    /// Behind the header: bytes of the datagram, and behind its end zeros.
    pub bytes: &'a [u8],
}

/// Whether a datagram is a part, or what should be one.
#[inline]
pub fn is_part(datagram: &[u8]) -> bool {
    datagram.get(4).is_some_and(|flags| *flags == Kind::Part.code())
        && datagram.first() == Some(&super::VERSION)
}

impl PartHead {
    /// Bytes of the header.
    pub const LEN: usize = Header::LEN;

    /// The header as bytes.
    #[inline]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        Header {
            flags: Kind::Part.code(),
            source_qpn: self.source_qpn,
            destination_qpn: self.destination_qpn,
            qkey: self.qkey,
            immediate: u32::from(self.length) << 16 | u32::from(self.offset),
            incarnation: self.number,
        }
        .to_bytes()
    }
}

impl<'a> Part<'a> {
    /// Reads a part. `None`: it is none, or none that a sender makes: it begins beyond its datagram's end or
    /// in the middle of another part, or there would be too many.
    pub fn parse(datagram: &'a [u8]) -> Option<Self> {
        let header = Header::parse(datagram).ok().filter(|header| header.flags == Kind::Part.code())?;
        let bytes = datagram.get(Header::LEN..).filter(|bytes| !bytes.is_empty())?;
        let head = PartHead {
            source_qpn: header.source_qpn,
            destination_qpn: header.destination_qpn,
            qkey: header.qkey,
            number: header.incarnation,
            length: (header.immediate >> 16) as u16,
            offset: header.immediate as u16,
        };
        let (length, offset) = (usize::from(head.length), usize::from(head.offset));
        let is_whole = offset < length && offset.is_multiple_of(bytes.len()) && length >= MIN_LEN;
        (is_whole && length.div_ceil(bytes.len()) <= MOST_PARTS).then_some(Self { head, bytes })
    }
}

/// `Part 2 of 3 src=0x4e2007 dst=0x4e2107 number=0x9 1380 of 4138`
impl fmt::Display for Part<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PartHead { source_qpn, destination_qpn, number, length, offset, .. } = self.head;
        let (each, length, offset) = (self.bytes.len(), usize::from(length), usize::from(offset));
        write!(
            f,
            "Part {} of {} src={source_qpn:#x} dst={destination_qpn:#x} number={number:#x} {} of {length}",
            offset / each + 1,
            length.div_ceil(each),
            each.min(length - offset)
        )
    }
}

/// The question whether a process takes parts, or the answer. Both have a header and a CRC; the question has
/// as many zeros between them as make it as long as a part, so the answer shows that parts pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Offer {
    /// The sender's queue pair, 24 bits.
    pub source_qpn: u32,
    /// The receiver's queue pair, 24 bits.
    pub destination_qpn: u32,
    /// Chosen by who asks; the answer returns it, so nobody who has not seen the question can answer.
    pub token: u64,
    /// It is the answer.
    pub answers: bool,
}

impl Offer {
    /// Bytes of the answer, and of the shortest question.
    pub const LEN: usize = MIN_LEN;

    /// Reads a datagram. `None`: it is none of these two. The caller checks the CRC.
    pub fn parse(datagram: &Datagram<'_>) -> Option<Self> {
        let header = datagram.header();
        let answers = match header.kind() {
            Kind::PartsRequest => false,
            Kind::PartsReply => true,
            _ => return None,
        };
        let body = datagram.body();
        let is_plain =
            header.flags == header.kind().code() && header.qkey == 0 && (body.is_empty() || !answers);
        is_plain.then(|| Self {
            source_qpn: header.source_qpn,
            destination_qpn: header.destination_qpn,
            token: u64::from(header.immediate) << 32 | u64::from(header.incarnation),
            answers,
        })
    }

    /// The answer to it.
    pub fn answer(&self) -> Self {
        Self {
            source_qpn: self.destination_qpn,
            destination_qpn: self.source_qpn,
            token: self.token,
            answers: true,
        }
    }

    /// The whole datagram, with its CRC.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        self.emit(&mut out);
        out
    }

    /// The same, as long as `out`, which has [`Self::LEN`] bytes or more.
    pub fn emit(&self, out: &mut [u8]) {
        let kind = if self.answers { Kind::PartsReply } else { Kind::PartsRequest };
        let header = Header {
            flags: kind.code(),
            source_qpn: self.source_qpn,
            destination_qpn: self.destination_qpn,
            qkey: 0,
            immediate: (self.token >> 32) as u32,
            incarnation: self.token as u32,
        };
        out.fill(0);
        if let Some(head) = out.first_chunk_mut() {
            header.emit(head);
        }
        seal(out);
    }
}

/// `PartsRequest src=0x4e2007 dst=0x4e2107`; the token is nobody else's business.
impl fmt::Display for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.answers { "PartsReply" } else { "PartsRequest" };
        write!(f, "{name} src={:#x} dst={:#x}", self.source_qpn, self.destination_qpn)
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;
    use std::vec::Vec;

    use super::*;

    const HEAD: PartHead = PartHead {
        source_qpn: 0x4E_2007,
        destination_qpn: 0x4E_2107,
        qkey: 0x0102_0304,
        number: 9,
        length: 4138,
        offset: 1380,
    };

    fn bytes(head: PartHead, len: usize) -> Vec<u8> {
        [&head.to_bytes()[..], &[7; 2000][..len]].concat()
    }

    #[test]
    fn golden_bytes() {
        let expected = [1, 0x4E, 0x20, 7, 9, 0x4E, 0x21, 7, 1, 2, 3, 4, 0x10, 0x2A, 5, 0x64, 0, 0, 0, 9];
        assert_eq!(HEAD.to_bytes(), expected);
        let part = bytes(HEAD, 1380);
        assert!(
            is_part(&part) && !is_part(&[1, 0, 0, 0, 0x49]) && !is_part(&[2, 0, 0, 0, 9]) && !is_part(&[])
        );
        let part = Part::parse(&part).unwrap();
        assert_eq!((part.head, part.bytes.len()), (HEAD, 1380));
        assert_eq!(part.to_string(), "Part 2 of 3 src=0x4e2007 dst=0x4e2107 number=0x9 1380 of 4138");
        let offer = Offer { source_qpn: 1, destination_qpn: 2, token: 0x0102_0304_0506_0708, answers: false };
        assert_eq!(offer.to_bytes()[..20], [1, 0, 0, 1, 10, 0, 0, 2, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
        for offer in [offer, offer.answer()] {
            let bytes = offer.to_bytes();
            let datagram = Datagram::parse(&bytes).unwrap();
            assert!(datagram.is_intact());
            assert_eq!(Offer::parse(&datagram), Some(offer));
            let mut long = [7; 100];
            offer.emit(&mut long);
            let datagram = Datagram::parse(&long).unwrap();
            assert!(datagram.is_intact());
            assert_eq!(Offer::parse(&datagram), Some(offer).filter(|offer| !offer.answers));
        }
    }

    #[test]
    fn what_no_sender_makes_is_no_part() {
        for (head, len) in [
            (HEAD, 0),
            (HEAD, 1379),
            (PartHead { offset: 4140, ..HEAD }, 1380),
            (PartHead { length: 10, offset: 0, ..HEAD }, 1380),
            (PartHead { offset: 64, ..HEAD }, 64),
            (PartHead { offset: 0, length: 0, ..HEAD }, 64),
        ] {
            assert_eq!(Part::parse(&bytes(head, len)), None, "{head:?} {len}");
        }
        assert_eq!(Part::parse(&HEAD.to_bytes()[..12]), None);
        let reliable = [&[1, 0, 0, 0, 0x49][..], &[0; 100]].concat();
        assert_eq!(Part::parse(&reliable), None);
    }
}
