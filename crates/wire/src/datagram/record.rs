//! RDMA Write-Records (docs/datagram-iwarp.md section 15): a message that is written to memory which the
//! sender names, and of which the receiver remembers what has come.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------------------------------------------------------+
//! |          extension header, 20 bytes: Kind 8, I is set         |
//! +---------------------------------------------------------------+
//! |           Message number, of its queue pair's records         |
//! +---------------------------------------------------------------+
//! |                 Offset of the payload in the message          |
//! +---------------------------------------------------------------+
//! |                     Length of the message                     |
//! +---------------------------------------------------------------+
//! |                                                               |
//! +                            Job key                            +
//! |                                                               |
//! +---------------------------------------------------------------+
//! |   DDP header, tagged, 14 bytes: RDMAP opcode 0xC | payload    |
//! +---------------------------------------------------------------+
//! |                            CRC32c                             |
//! +---------------------------------------------------------------+
//! ```

use super::{CRC_LEN, Datagram, FLAG_IMMEDIATE, Header, Kind};
use crate::ddp::{self, Tagged};
use crate::rdmap::{Control, Opcode, RV, UWARP_SOLICITED};
use crate::{be32, be64};

/// Bytes of the longest message.
pub const MOST: u32 = 1 << 20;

/// The headers of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Head {
    /// The sender's queue pair, 24 bits.
    pub source_qpn: u32,
    /// The receiver's queue pair, 24 bits.
    pub destination_qpn: u32,
    /// Must equal the Q_Key of the receiving queue pair.
    pub qkey: u32,
    /// In the order of the wire.
    pub immediate: [u8; 4],
    /// The receiver's completion is a solicited one.
    pub solicited: bool,
    /// Distinguishes the sender's queue pair from earlier ones with the same number.
    pub incarnation: u32,
    /// Number of the message among the records of its sender.
    pub message: u32,
    /// Where the payload begins in the message.
    pub offset: u32,
    /// Bytes of the message.
    pub message_len: u32,
    /// Must be that of the receiving queue pair.
    pub job_key: u64,
    /// Names the memory of the message's first byte.
    pub stag: u32,
    /// Where in it that is.
    pub to: u64,
}

/// A segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Segment<'a> {
    /// Its headers.
    pub head: Head,
    /// Its payload.
    pub payload: &'a [u8],
}

/// Bytes between the extension header and the DDP header.
pub(crate) const OWN_LEN: usize = 20;

impl Head {
    /// Bytes before the payload.
    pub const LEN: usize = Header::LEN + OWN_LEN + Tagged::LEN;
    /// Bytes of a datagram that are not payload.
    pub const OVERHEAD: usize = Self::LEN + CRC_LEN;

    /// The headers as bytes. `last`: no byte of the message is behind this segment's.
    pub fn to_bytes(&self, last: bool) -> [u8; Self::LEN] {
        let extension = Header {
            flags: FLAG_IMMEDIATE | Kind::Record.code(),
            source_qpn: self.source_qpn,
            destination_qpn: self.destination_qpn,
            qkey: self.qkey,
            immediate: u32::from_be_bytes(self.immediate),
            incarnation: self.incarnation,
        };
        let ddp = Tagged {
            last,
            stag: self.stag,
            to: self.to.wrapping_add(u64::from(self.offset)),
            rsvdulp: Control::new(Opcode::WriteRecord).to_byte()
                | if self.solicited { UWARP_SOLICITED } else { 0 },
        };
        let mut out = [0; Self::LEN];
        let (front, rest) = out.split_at_mut(Header::LEN);
        let (own, back) = rest.split_at_mut(OWN_LEN);
        front.copy_from_slice(&extension.to_bytes());
        own[..4].copy_from_slice(&self.message.to_be_bytes());
        own[4..8].copy_from_slice(&self.offset.to_be_bytes());
        own[8..12].copy_from_slice(&self.message_len.to_be_bytes());
        own[12..].copy_from_slice(&self.job_key.to_be_bytes());
        if let Some(back) = back.first_chunk_mut() {
            ddp.emit(back);
        }
        out
    }
}

impl<'a> Segment<'a> {
    /// Reads a datagram. `None`: it is no segment of a record, or one that contradicts itself. The caller
    /// checks the CRC.
    pub fn parse(datagram: &Datagram<'a>) -> Option<Self> {
        let header = datagram.header();
        if header.flags != FLAG_IMMEDIATE | Kind::Record.code() {
            return None;
        }
        let (own, rest) = datagram.body().split_first_chunk::<OWN_LEN>()?;
        let Ok((ddp::Header::Tagged(ddp), ddp_len)) = ddp::Header::parse(rest) else { return None };
        let payload = rest.get(ddp_len..)?;
        let control = Control::parse(ddp.rsvdulp);
        if (control.version, control.opcode) != (RV, Opcode::WriteRecord) {
            return None;
        }
        let (offset, message_len) = (be32(&own[4..8]), be32(&own[8..12]));
        let end = u64::from(offset) + payload.len() as u64;
        let is_last = end == u64::from(message_len);
        // (Only an empty message has an empty segment.)
        let is_empty = payload.is_empty() && message_len > 0;
        if message_len > MOST || end > u64::from(message_len) || ddp.last != is_last || is_empty {
            return None;
        }
        let head = Head {
            source_qpn: header.source_qpn,
            destination_qpn: header.destination_qpn,
            qkey: header.qkey,
            immediate: header.immediate.to_be_bytes(),
            solicited: ddp.rsvdulp & UWARP_SOLICITED != 0,
            incarnation: header.incarnation,
            message: be32(&own[..4]),
            offset,
            message_len,
            job_key: be64(&own[12..]),
            stag: ddp.stag,
            to: ddp.to.wrapping_sub(u64::from(offset)),
        };
        Some(Self { head, payload })
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::super::seal;
    use super::*;

    const HEAD: Head = Head {
        source_qpn: 0x02_0304,
        destination_qpn: 0x06_0708,
        qkey: 0x090A_0B0C,
        immediate: [13, 14, 15, 16],
        solicited: false,
        incarnation: 0x1112_1314,
        message: 0x1516_1718,
        offset: 8,
        message_len: 11,
        job_key: 0x2122_2324_2526_2728,
        stag: 0x2B2C_2D2E,
        to: 0x2F30_3132_3334_3530,
    };

    fn datagram(head: &Head, payload: &[u8], last: bool) -> Vec<u8> {
        let mut bytes = head.to_bytes(last).to_vec();
        bytes.extend_from_slice(payload);
        bytes.extend_from_slice(&[0; CRC_LEN]);
        seal(&mut bytes);
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Segment<'_>> {
        Datagram::parse(bytes).ok().filter(Datagram::is_intact).and_then(|whole| Segment::parse(&whole))
    }

    #[test]
    fn golden_bytes() {
        let bytes = datagram(&HEAD, &[0x37, 0x38, 0x39], true);
        let mut expected: Vec<u8> = (1..=20).collect();
        expected[4] = 0x88;
        expected.extend([0x15, 0x16, 0x17, 0x18, 0, 0, 0, 8, 0, 0, 0, 11]);
        expected.extend(0x21..=0x28);
        expected.extend([0xC1, 0x4C]);
        expected.extend(0x2B..=0x2E);
        expected.extend([0x2F, 0x30, 0x31, 0x32, 0x33, 0x34, 0x35, 0x38]);
        expected.extend([0x37, 0x38, 0x39]);
        assert_eq!(bytes[..bytes.len() - CRC_LEN], expected);
        assert_eq!(bytes.len(), Head::OVERHEAD + 3);
        assert_eq!(parse(&bytes), Some(Segment { head: HEAD, payload: &[0x37, 0x38, 0x39] }));
    }

    #[test]
    fn what_contradicts_itself_is_none() {
        let good = |head: Head, payload: &[u8], last| parse(&datagram(&head, payload, last)).is_some();
        assert!(good(HEAD, &[1, 2, 3], true) && good(HEAD, &[1, 2], false));
        let event = datagram(&Head { solicited: true, ..HEAD }, &[1, 2, 3], true);
        assert!(parse(&event).is_some_and(|segment| segment.head.solicited));
        assert!(!good(HEAD, &[1, 2, 3], false), "the last one says so");
        assert!(!good(HEAD, &[1, 2], true));
        assert!(!good(HEAD, &[1, 2, 3, 4], true), "beyond the end");
        assert!(!good(HEAD, &[], false), "nothing");
        assert!(!good(Head { offset: u32::MAX, ..HEAD }, &[1, 2], false));
        assert!(good(Head { message_len: MOST, ..HEAD }, &[1], false));
        assert!(!good(Head { message_len: MOST + 1, ..HEAD }, &[1], false));
        assert!(good(Head { message_len: 0, offset: 0, ..HEAD }, &[], true), "an empty message");
        let bytes = datagram(&HEAD, &[1, 2, 3], true);
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(parse(&bad), None, "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert_eq!(parse(&bytes[..len]), None, "{len}");
        }
    }
}
