//! Datagram framing: one datagram carries one whole message, without MPA (docs/datagram-iwarp.md).
//!
//! ```text
//! extension header, 20 bytes | DDP header, untagged, 18 bytes | payload | CRC32c, 4 bytes
//! ```
//!
//! Nothing is negotiated and no state is kept: an error in a datagram concerns that datagram only.

use core::fmt;

use uwarp_wire::crc::{self, crc32c};
use uwarp_wire::datagram::error::ErrorMessage;
use uwarp_wire::datagram::memory::Memory;
use uwarp_wire::datagram::part::Offer;
use uwarp_wire::datagram::proof::Proof;
use uwarp_wire::datagram::{self, Datagram, FLAG_IMMEDIATE, FLAG_RELIABLE, Header as Extension, record};
use uwarp_wire::ddp::{self, Header, QN_SEND, Untagged};
use uwarp_wire::rdmap::{Control, Opcode, RV};
use uwarp_wire::terminate::{TerminateError, UntaggedBuffer};

/// Bytes before the payload.
pub const HEAD_LEN: usize = Extension::LEN + Untagged::LEN;
/// Bytes after the payload.
pub const TRAILER_LEN: usize = 4;
/// Bytes that are not payload.
pub const OVERHEAD: usize = HEAD_LEN + TRAILER_LEN;
/// Payload of the longest datagram.
pub const MOST_PAYLOAD: usize = datagram::MAX_LEN - OVERHEAD;

/// The contents of a message's headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// The sender's queue pair, 24 bits.
    pub source_qpn: u32,
    /// The receiver's queue pair, 24 bits, or all ones for a group.
    pub destination_qpn: u32,
    /// Must be the receiver's Q_Key.
    pub qkey: u32,
    /// In the order of the wire.
    pub immediate: Option<[u8; 4]>,
    /// The receiver's completion is a solicited one.
    pub solicited: bool,
    /// Number of the message among those of its sender.
    pub msn: u32,
    /// Distinguishes this incarnation of the sender's queue pair from earlier ones.
    pub incarnation: u32,
}

impl Head {
    /// Both headers as bytes.
    #[inline]
    pub fn to_bytes(&self) -> [u8; HEAD_LEN] {
        let extension = Extension {
            flags: if self.immediate.is_some() { FLAG_IMMEDIATE } else { 0 },
            source_qpn: self.source_qpn,
            destination_qpn: self.destination_qpn,
            qkey: self.qkey,
            immediate: u32::from_be_bytes(self.immediate.unwrap_or_default()),
            incarnation: self.incarnation,
        };
        let opcode = if self.solicited { Opcode::SendSe } else { Opcode::Send };
        let ddp = Untagged {
            last: true,
            rsvdulp: Control::new(opcode).to_byte(),
            rsvdulp32: 0,
            qn: QN_SEND,
            msn: self.msn,
            mo: 0,
        };
        let mut out = [0; HEAD_LEN];
        if let Some((front, back)) = out.split_first_chunk_mut() {
            extension.emit(front);
            if let Some(back) = back.first_chunk_mut() {
                ddp.emit(back);
            }
        }
        out
    }
}

/// The bytes after the payload, for a CRC over all bytes before them.
#[inline]
pub fn trailer(crc: u32) -> [u8; TRAILER_LEN] {
    crc::to_wire(crc)
}

/// A whole message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// Its headers.
    pub head: Head,
    /// Its payload.
    pub payload: &'a [u8],
}

/// Why a datagram is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reject {
    /// It is shorter than its headers and its CRC.
    Truncated,
    /// Another version of the extension header.
    Version(u8),
    /// Flags that have no meaning in this version, or those of another service.
    Flags(u8),
    /// The CRC is not that of the bytes.
    Crc,
    /// The DDP header is invalid, or not that of a whole untagged message on the queue of Sends.
    Ddp,
    /// The RDMAP version or opcode is not one that datagrams carry.
    Opcode,
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("shorter than its headers"),
            Self::Version(version) => write!(f, "version {version}"),
            Self::Flags(flags) => write!(f, "flags {flags:#04x}"),
            Self::Crc => f.write_str("CRC mismatch"),
            Self::Ddp => f.write_str("not a whole untagged message"),
            Self::Opcode => f.write_str("not a Send"),
        }
    }
}

/// The destination queue pair of a datagram; nothing else is checked.
#[inline]
pub fn destination(datagram: &[u8]) -> Result<u32, Reject> {
    extension(datagram).map(|header| header.destination_qpn)
}

#[inline]
fn extension(datagram: &[u8]) -> Result<Extension, Reject> {
    Extension::parse(datagram).map_err(|e| match e {
        datagram::Error::Truncated => Reject::Truncated,
        datagram::Error::BadVersion(version) => Reject::Version(version),
    })
}

/// Checks and parses a datagram. The checks follow the order of the layers; the CRC is checked before the DDP
/// header.
#[inline]
pub fn parse(datagram: &[u8]) -> Result<Message<'_>, Reject> {
    let extension = extension(datagram)?;
    if extension.flags & !FLAG_IMMEDIATE != 0 {
        debug_assert_eq!(FLAG_RELIABLE & FLAG_IMMEDIATE, 0);
        return Err(Reject::Flags(extension.flags));
    }
    let (covered, trailer) = datagram.split_last_chunk::<TRAILER_LEN>().ok_or(Reject::Truncated)?;
    let payload = covered.get(HEAD_LEN..).ok_or(Reject::Truncated)?;
    if crc::to_wire(crc32c(covered)) != *trailer {
        return Err(Reject::Crc);
    }
    let ddp = covered.get(Extension::LEN..).unwrap_or(&[]);
    let Ok((Header::Untagged(ddp), _)) = Header::parse(ddp) else { return Err(Reject::Ddp) };
    if !ddp.last || ddp.qn != QN_SEND || ddp.mo != 0 {
        return Err(Reject::Ddp);
    }
    let control = Control::parse(ddp.rsvdulp);
    let solicited = match control.opcode {
        Opcode::Send => false,
        Opcode::SendSe => true,
        _ => return Err(Reject::Opcode),
    };
    if control.version != RV {
        return Err(Reject::Opcode);
    }
    let head = Head {
        source_qpn: extension.source_qpn,
        destination_qpn: extension.destination_qpn,
        qkey: extension.qkey,
        immediate: extension.immediate().map(u32::to_be_bytes),
        solicited,
        msn: ddp.msn,
        incarnation: extension.incarnation,
    };
    Ok(Message { head, payload })
}

/// An Error Message, if a datagram that [`parse`] rejects is one (docs/datagram-iwarp.md section 7). The
/// caller checks the destination and the incarnation.
pub fn parse_error(datagram: &[u8]) -> Option<ErrorMessage> {
    // Before the CRC is computed once more.
    if datagram.len() != ErrorMessage::LEN {
        return None;
    }
    let datagram = Datagram::parse(datagram).ok()?;
    ErrorMessage::parse(&datagram).ok().filter(|_| datagram.is_intact())
}

/// A request for the proof of a port, or its answer, if a datagram that [`parse`] rejects is one
/// (docs/datagram-iwarp.md section 13). The caller checks both numbers.
pub fn parse_proof(datagram: &[u8]) -> Option<Proof> {
    // Before the CRC is computed once more.
    if datagram.len() != Proof::LEN {
        return None;
    }
    let datagram = Datagram::parse(datagram).ok()?;
    Proof::parse(&datagram).filter(|_| datagram.is_intact())
}

/// What processes of one host say to each other about memory, if a datagram that [`parse`] rejects is that
/// (docs/datagram-iwarp.md section 14). The caller checks both numbers.
pub fn parse_memory(datagram: &[u8]) -> Option<Memory> {
    // Before the CRC is computed once more.
    if datagram.len() != Memory::LEN {
        return None;
    }
    let datagram = Datagram::parse(datagram).ok()?;
    Memory::parse(&datagram).filter(|_| datagram.is_intact())
}

/// The question whether a process takes parts, or the answer, if a datagram that [`parse`] rejects is one
/// (docs/datagram-iwarp.md section 16). The caller checks both numbers.
pub fn parse_offer(datagram: &[u8]) -> Option<Offer> {
    // Before the CRC is computed once more.
    let datagram = Datagram::parse(datagram).ok()?;
    Offer::parse(&datagram).filter(|_| datagram.is_intact())
}

/// A segment of an RDMA Write-Record, if a datagram that [`parse`] rejects is one (docs/datagram-iwarp.md
/// section 15). The caller checks both numbers.
pub fn parse_record(datagram: &[u8]) -> Option<record::Segment<'_>> {
    // Before the CRC is computed.
    let datagram = Datagram::parse(datagram).ok()?;
    record::Segment::parse(&datagram).filter(|_| datagram.is_intact())
}

/// The Error Message that answers a message which was dropped for this reason. `None`: none may be sent,
/// because it would be longer than its cause, or because its cause went to a group.
pub fn answer(datagram: &[u8], why: UntaggedBuffer) -> Option<ErrorMessage> {
    let datagram = Datagram::parse(datagram).ok()?;
    ErrorMessage::answer(&datagram, TerminateError::UntaggedBuffer(why))
}

const _: () = assert!(ddp::DV == 1);

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: Head = Head {
        source_qpn: 0x12_3456,
        destination_qpn: 0xAB_CDEF,
        qkey: 0x1111_1111,
        immediate: Some([1, 2, 3, 4]),
        solicited: true,
        msn: 7,
        incarnation: 9,
    };

    fn datagram(head: &Head, payload: &[u8]) -> Vec<u8> {
        let mut bytes = head.to_bytes().to_vec();
        bytes.extend_from_slice(payload);
        let sum = crc32c(&bytes);
        bytes.extend_from_slice(&trailer(sum));
        bytes
    }

    #[test]
    fn a_message_survives_the_round_trip() {
        for (immediate, solicited) in [(None, false), (Some([9, 8, 7, 6]), true), (Some([0; 4]), false)] {
            let head = Head { immediate, solicited, ..HEAD };
            for payload in [&b""[..], b"x", b"a longer one"] {
                let bytes = datagram(&head, payload);
                assert_eq!(bytes.len(), OVERHEAD + payload.len());
                assert_eq!(parse(&bytes), Ok(Message { head, payload }));
                assert_eq!(destination(&bytes), Ok(0xAB_CDEF));
            }
        }
    }

    #[test]
    fn every_bit_that_changes_is_found() {
        let bytes = datagram(&HEAD, b"payload");
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(parse(&bad).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(parse(&bytes[..len]).is_err(), "{len} bytes");
        }
    }

    /// With a correct CRC, as a sender of another kind would make it.
    #[test]
    fn what_is_no_whole_send_is_rejected() {
        let rejected = |at: usize, value: u8| {
            let mut bytes = HEAD.to_bytes().to_vec();
            bytes[at] = value;
            let sum = crc32c(&bytes);
            bytes.extend_from_slice(&trailer(sum));
            parse(&bytes).err()
        };
        assert_eq!(rejected(0, 2), Some(Reject::Version(2)));
        assert_eq!(rejected(4, FLAG_RELIABLE), Some(Reject::Flags(FLAG_RELIABLE)));
        assert_eq!(rejected(4, 1), Some(Reject::Flags(1)));
        // A tagged segment, one that is not the last, another DDP version.
        assert_eq!(rejected(20, 0x80 | 0x40 | 1), Some(Reject::Ddp));
        assert_eq!(rejected(20, 1), Some(Reject::Ddp));
        assert_eq!(rejected(20, 0x40 | 2), Some(Reject::Ddp));
        // RDMAP version 0, a Read Request, Send with Invalidate.
        assert_eq!(rejected(21, Opcode::Send.code()), Some(Reject::Opcode));
        assert_eq!(rejected(21, Control::new(Opcode::ReadRequest).to_byte()), Some(Reject::Opcode));
        assert_eq!(rejected(21, Control::new(Opcode::SendInvalidate).to_byte()), Some(Reject::Opcode));
        // Another queue, another offset.
        assert_eq!(rejected(29, 1), Some(Reject::Ddp));
        assert_eq!(rejected(37, 1), Some(Reject::Ddp));
    }

    #[test]
    fn an_error_message_is_told_from_other_datagrams() {
        let cause = datagram(&HEAD, b"four");
        let error = answer(&cause, UntaggedBuffer::NoBuffer).unwrap();
        let bytes = error.to_bytes();
        assert!(bytes.len() <= cause.len());
        assert_eq!((error.destination_qpn, error.msn, error.incarnation), (HEAD.source_qpn, 7, 9));
        assert_eq!((parse(&bytes), parse_error(&bytes)), (Err(Reject::Ddp), Some(error)));
        assert_eq!(parse_error(&cause), None);
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(parse_error(&bad), None, "bit {bit}");
        }
        // Shorter than its answer; to a group; itself an answer.
        assert_eq!(answer(&datagram(&HEAD, b"xyz"), UntaggedBuffer::NoBuffer), None);
        let group = Head { destination_qpn: 0xFF_FFFF, ..HEAD };
        assert_eq!(answer(&datagram(&group, b"a longer one"), UntaggedBuffer::NoBuffer), None);
        assert_eq!(answer(&bytes, UntaggedBuffer::NoBuffer), None);
    }
}
