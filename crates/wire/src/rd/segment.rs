//! SEGMENT: a part of a message, or all of it (docs/rd.md section 5.2).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------+-+-+-+-+-+-+-+-+-------------------------------+
//! |   Type = 2    |F|W|O|U|N|A|I|J|            Length             |
//! +---------------+-+-+-+-+-+-+-+-+-------------------------------+
//! | Behind, upper |                  Source QPN                   |
//! +---------------+-----------------------------------------------+
//! | Behind, lower |                Destination QPN                |
//! +---------------+-----------------------------------------------+
//! |            Message number, one count for the exchange         |
//! +---------------------------------------------------------------+
//! |            Offset in the message          (not with W)        |
//! +---------------------------------------------------------------+
//! |            Length of the message          (not with W)        |
//! +---------------------------------------------------------------+
//! |            Q_Key                          (with F)            |
//! +---------------------------------------------------------------+
//! |            Immediate                      (with I)            |
//! +---------------------------------------------------------------+
//! |            Job key, 64 bits               (with J)            |
//! +---------------------------------------------------------------+
//! |            DDP header, 14 or 18 bytes (RFC 5041); payload     |
//! +---------------------------------------------------------------+
//! ```

use core::fmt;

use super::chunk::{self, Error, put32, put64};
use crate::ddp::{Tagged, Untagged};
use crate::{be32, be64, ddp};

/// F: the first segment of its message. It has the Q_Key, and the immediate and the job key if there are any.
pub const FIRST: u8 = 0x80;
/// W: the whole message; offset and length are left out. Goes with [`FIRST`].
pub const WHOLE: u8 = 0x40;
/// O: the message is of an ordered flow, and its Behind field is valid.
pub const ORDERED: u8 = 0x20;
/// U: idempotent; the target keeps no record of the message.
pub const IDEMPOTENT: u8 = 0x10;
/// N: the segment is not repeated when it is lost.
pub const NOT_REPEATED: u8 = 0x08;
/// A: acknowledge at once.
pub const ACKNOWLEDGE: u8 = 0x04;
/// I: there is an immediate.
pub const IMMEDIATE: u8 = 0x02;
/// J: there is a job key.
pub const JOB_KEY: u8 = 0x01;

const QPN: u32 = 0x00FF_FFFF;

/// What the first segment of a message has beside the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct First {
    /// Must be the Q_Key of the receiving queue pair.
    pub qkey: u32,
    /// In the order of the wire.
    pub immediate: Option<[u8; 4]>,
    /// Proves the right to name memory.
    pub job_key: Option<u64>,
}

/// What a segment says of its message, without the DDP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Head {
    /// The sender's queue pair, 24 bits.
    pub source_qpn: u32,
    /// The receiver's queue pair, 24 bits.
    pub destination_qpn: u32,
    /// The low 32 bits of the message's number.
    pub message: u32,
    /// In an ordered flow: how many message numbers back the message before this one in its flow is; 0 if
    /// there was none under way. `None`: not of an ordered flow.
    pub behind: Option<u16>,
    /// Where the payload begins in the message, in bytes.
    pub offset: u32,
    /// Bytes of the whole message. `None`: this segment is all of it.
    pub message_len: Option<u32>,
    /// In the first segment only.
    pub first: Option<First>,
    /// The receiver must acknowledge at once.
    pub acknowledge: bool,
    /// The target keeps no record of the message.
    pub idempotent: bool,
    /// The segment is not repeated when it is lost.
    pub not_repeated: bool,
}

impl Head {
    /// Bytes of the longest, the chunk's header included.
    pub const MAX_LEN: usize = chunk::HEADER_LEN + 12 + 8 + 16;

    /// Bytes on the wire up to the DDP header, the chunk's header included.
    pub const fn len(&self) -> usize {
        let fixed = chunk::HEADER_LEN + 12;
        let place = if self.message_len.is_some() { 8 } else { 0 };
        let first = match self.first {
            None => 0,
            Some(First { immediate, job_key, .. }) => {
                4 + if immediate.is_some() { 4 } else { 0 } + if job_key.is_some() { 8 } else { 0 }
            }
        };
        fixed + place + first
    }

    /// Never: it has a header.
    pub const fn is_empty(&self) -> bool {
        false
    }

    fn flags(&self) -> u8 {
        let first = self.first.unwrap_or_default();
        [
            (self.first.is_some(), FIRST),
            (self.message_len.is_none(), WHOLE),
            (self.behind.is_some(), ORDERED),
            (self.idempotent, IDEMPOTENT),
            (self.not_repeated, NOT_REPEATED),
            (self.acknowledge, ACKNOWLEDGE),
            (first.immediate.is_some(), IMMEDIATE),
            (first.job_key.is_some(), JOB_KEY),
        ]
        .into_iter()
        .fold(0, |flags, (is_set, flag)| if is_set { flags | flag } else { flags })
    }

    /// Writes the chunk's header and the fields up to the DDP header; `rest` bytes (DDP header and payload)
    /// follow. Returns [`Self::len`].
    ///
    /// # Panics
    /// If `out` is shorter than that.
    pub fn emit(&self, rest: usize, out: &mut [u8]) -> usize {
        let len = self.len();
        let [upper, lower] = self.behind.unwrap_or(0).to_be_bytes();
        chunk::put_header(chunk::SEGMENT, self.flags(), len + rest, out);
        put32(u32::from(upper) << 24 | self.source_qpn & QPN, &mut out[4..8]);
        put32(u32::from(lower) << 24 | self.destination_qpn & QPN, &mut out[8..12]);
        put32(self.message, &mut out[12..16]);
        let mut at = 16;
        if let Some(message_len) = self.message_len {
            put32(self.offset, &mut out[at..at + 4]);
            put32(message_len, &mut out[at + 4..at + 8]);
            at += 8;
        }
        if let Some(First { qkey, immediate, job_key }) = self.first {
            put32(qkey, &mut out[at..at + 4]);
            at += 4;
            if let Some(immediate) = immediate {
                out[at..at + 4].copy_from_slice(&immediate);
                at += 4;
            }
            if let Some(job_key) = job_key {
                put64(job_key, &mut out[at..at + 8]);
                at += 8;
            }
        }
        debug_assert_eq!(at, len);
        len
    }
}

/// A segment in a received packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment<'a> {
    /// What it says of its message.
    pub head: Head,
    /// Its DDP header. In a Send, the message offset is the head's offset.
    pub ddp: ddp::Header,
    /// Its payload.
    pub payload: &'a [u8],
}

impl<'a> Segment<'a> {
    /// Bytes in front of the payload.
    pub fn head_len(&self) -> usize {
        self.head.len() + self.ddp.len()
    }

    /// Writes everything in front of the payload. Returns [`Self::head_len`].
    ///
    /// # Panics
    /// If `out` is shorter than that.
    pub fn emit_head(&self, out: &mut [u8]) -> usize {
        let at = self.head.emit(self.ddp.len() + self.payload.len(), out);
        at + self.ddp.emit(&mut out[at..])
    }

    /// Bytes in front of the payload at most.
    pub const MAX_HEAD_LEN: usize =
        Head::MAX_LEN + if Untagged::LEN > Tagged::LEN { Untagged::LEN } else { Tagged::LEN };

    /// Reads the body of a chunk. Checks that the payload lies inside the message.
    pub(super) fn parse(flags: u8, body: &'a [u8]) -> Result<Self, Error> {
        let (fixed, mut rest) = body.split_first_chunk::<12>().ok_or(Error::Truncated)?;
        let (upper, lower) = (be32(&fixed[..4]), be32(&fixed[4..8]));
        let behind = u16::from_be_bytes([fixed[0], fixed[4]]);
        let (mut offset, mut message_len) = (0, None);
        if flags & WHOLE == 0 {
            let (place, after) = rest.split_first_chunk::<8>().ok_or(Error::Truncated)?;
            (offset, message_len) = (be32(&place[..4]), Some(be32(&place[4..])));
            rest = after;
        }
        let mut first = None;
        if flags & FIRST != 0 {
            let (qkey, after) = rest.split_first_chunk::<4>().ok_or(Error::Truncated)?;
            rest = after;
            let mut fields = First { qkey: be32(qkey), ..First::default() };
            if flags & IMMEDIATE != 0 {
                let (immediate, after) = rest.split_first_chunk::<4>().ok_or(Error::Truncated)?;
                fields.immediate = Some(*immediate);
                rest = after;
            }
            if flags & JOB_KEY != 0 {
                let (job_key, after) = rest.split_first_chunk::<8>().ok_or(Error::Truncated)?;
                fields.job_key = Some(be64(job_key));
                rest = after;
            }
            first = Some(fields);
        } else if flags & (WHOLE | IMMEDIATE | JOB_KEY) != 0 {
            return Err(Error::Flags(flags));
        }
        let (ddp, ddp_len) = ddp::Header::parse(rest).map_err(|_| Error::Ddp)?;
        let payload = rest.get(ddp_len..).unwrap_or(&[]);
        let head = Head {
            source_qpn: upper & QPN,
            destination_qpn: lower & QPN,
            message: be32(&fixed[8..]),
            behind: (flags & ORDERED != 0).then_some(behind),
            offset,
            message_len,
            first,
            acknowledge: flags & ACKNOWLEDGE != 0,
            idempotent: flags & IDEMPOTENT != 0,
            not_repeated: flags & NOT_REPEATED != 0,
        };
        if first.is_some() != (offset == 0) && message_len != Some(0) {
            return Err(Error::Place);
        }
        if let Some(message_len) = message_len {
            let end = u64::from(offset) + payload.len() as u64;
            if end > u64::from(message_len) || (payload.is_empty() && message_len != 0) {
                return Err(Error::Place);
            }
        }
        Ok(Segment { head, ddp, payload })
    }

    /// Bytes of the whole message.
    pub fn message_len(&self) -> u32 {
        let own = u32::try_from(self.payload.len()).unwrap_or(u32::MAX);
        self.head.message_len.unwrap_or(own)
    }
}

/// `Segment 0x4e2103->0x4e2007 msg=7 behind=2 0+64/64 first`
impl fmt::Display for Segment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Head { source_qpn, destination_qpn, message, behind, offset, .. } = self.head;
        write!(f, "Segment {source_qpn:#x}->{destination_qpn:#x} msg={message}")?;
        if let Some(behind) = behind {
            write!(f, " behind={behind}")?;
        }
        write!(f, " {offset}+{}/{}", self.payload.len(), self.message_len())?;
        let first = self.head.first;
        for (is_set, name) in [
            (first.is_some(), " first"),
            (self.head.idempotent, " idempotent"),
            (self.head.not_repeated, " once"),
            (self.head.acknowledge, " ack"),
        ] {
            if is_set {
                f.write_str(name)?;
            }
        }
        match first.and_then(|first| first.immediate) {
            Some(immediate) => write!(f, " imm={:#x}", u32::from_be_bytes(immediate)),
            None => Ok(()),
        }
    }
}
