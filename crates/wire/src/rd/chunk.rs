//! Chunks: the parts of a packet (docs/rd.md section 5). They follow each other without padding.
//!
//! ```text
//! +---------------+---------------+-------------------------------+
//! |     Type      |     Flags     |  Length, these 4 bytes too    |
//! +---------------+---------------+-------------------------------+
//! |  body …
//! ```
//!
//! | type | chunk | bytes |
//! |---|---|---|
//! | 0 | PAD | any |
//! | 1 | [ACK](super::ack) | 20, and 4 for each range |
//! | 2 | [SEGMENT](super::segment) | 34 and more |
//! | 3 | [STREAM](Stream) | 12, 16 with Open, and the bytes |
//! | 4 | [VERDICT](Verdict) | 12 |
//! | 5 | [READY](Ready) | 8 |
//! | 6 | [CLAIM](Claim) | 24 |
//! | 7 | PING | 4 |
//! | 8 | [CLOSE](Close) | 12 |
//! | 9 | [STREAM-CREDIT](StreamCredit) | 12 |
//! | 10 | [STREAM-RESET](StreamReset) | 12 |
//! | 11 | [ABANDON](Abandon) | 4, and 4 for each message |
//!
//! A receiver skips a type that it does not know. If the top bit of the type is set, it drops the packet
//! instead (as RFC 9260 section 3.2 has it).

use core::fmt;

use super::ack::Ack;
use super::contact::Cookie;
use super::segment::Segment;
use crate::{be16, be32, be64};

/// Bytes of a chunk's header.
pub const HEADER_LEN: usize = 4;
/// A type that a receiver must know to use the packet.
pub const MUST_KNOW: u8 = 0x80;

/// Type of PAD.
pub const PAD: u8 = 0;
/// Type of ACK.
pub const ACK: u8 = 1;
/// Type of SEGMENT.
pub const SEGMENT: u8 = 2;
/// Type of STREAM.
pub const STREAM: u8 = 3;
/// Type of VERDICT.
pub const VERDICT: u8 = 4;
/// Type of READY.
pub const READY: u8 = 5;
/// Type of CLAIM.
pub const CLAIM: u8 = 6;
/// Type of PING.
pub const PING: u8 = 7;
/// Type of CLOSE.
pub const CLOSE: u8 = 8;
/// Type of STREAM-CREDIT.
pub const STREAM_CREDIT: u8 = 9;
/// Type of STREAM-RESET.
pub const STREAM_RESET: u8 = 10;
/// Type of ABANDON.
pub const ABANDON: u8 = 11;

/// Why the chunks of a packet cannot be read. The receiver drops the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// A chunk is shorter than its fields, or longer than the packet.
    Truncated,
    /// A chunk that its sender wants to be understood has an unknown type.
    Unknown(u8),
    /// Flags of a segment that contradict each other.
    Flags(u8),
    /// A segment lies outside its message.
    Place,
    /// A segment without a valid DDP header.
    Ddp,
    /// Ranges of an ACK: too many, none, or a first one that does not begin with the largest packet.
    Ranges,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Truncated => f.write_str("chunk shorter than its fields"),
            Error::Unknown(code) => write!(f, "unknown chunk {code:#04x} that must be known"),
            Error::Flags(flags) => write!(f, "segment with the flags {flags:#04x}"),
            Error::Place => f.write_str("segment outside its message"),
            Error::Ddp => f.write_str("segment without a DDP header"),
            Error::Ranges => f.write_str("invalid ranges in an ACK"),
        }
    }
}

impl core::error::Error for Error {}

/// Why a message is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No receive is posted: try again later.
    ReceiverNotReady,
    /// The message is longer than its receive, or its opcode is not allowed.
    InvalidRequest,
    /// STag, bounds, rights, domain, job key or source. Which of them is not said.
    Access,
    /// No such queue pair, another Q_Key, or a state in which it takes nothing.
    InvalidDestination,
    /// The queue pair has gone while the message was under way.
    Aborted,
    /// The receive's own memory.
    Operation,
    /// Unassigned.
    Unassigned(u8),
}

impl Reason {
    /// From the byte on the wire.
    pub const fn from_code(code: u8) -> Self {
        match code {
            1 => Reason::ReceiverNotReady,
            2 => Reason::InvalidRequest,
            3 => Reason::Access,
            4 => Reason::InvalidDestination,
            5 => Reason::Aborted,
            6 => Reason::Operation,
            other => Reason::Unassigned(other),
        }
    }

    /// The byte on the wire.
    pub const fn code(self) -> u8 {
        match self {
            Reason::ReceiverNotReady => 1,
            Reason::InvalidRequest => 2,
            Reason::Access => 3,
            Reason::InvalidDestination => 4,
            Reason::Aborted => 5,
            Reason::Operation => 6,
            Reason::Unassigned(code) => code,
        }
    }
}

/// What the receiver says of a message that it does not take, or not yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Verdict {
    /// The low 32 bits of the message's number.
    pub message: u32,
    /// Why.
    pub reason: Reason,
    /// With [`Reason::ReceiverNotReady`]: when to try again, as InfiniBand's RNR NAK timer field codes it.
    pub timer: u8,
    /// With [`Reason::ReceiverNotReady`]: the low 16 bits of the number of the packet that was refused.
    pub detail: u16,
}

/// Receives have been posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ready {
    /// The queue pair, 24 bits.
    pub qpn: u32,
    /// How many receives it has; 255 for more.
    pub receives: u8,
}

/// The sender speaks for one more port of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Claim {
    /// The port.
    pub port: u16,
    /// A cookie that the receiver of this chunk sent to it.
    pub cookie: Cookie,
}

/// The sender leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Close {
    /// The low 32 bits of its Done floor, which is final.
    pub floor: u32,
    /// Why, for traces.
    pub reason: u8,
}

/// Bytes of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream<'a> {
    /// Its number.
    pub stream: u32,
    /// The low 32 bits of the position of the first byte.
    pub offset: u32,
    /// With the stream's first bytes: the service port or queue pair number that it is for.
    pub open: Option<u32>,
    /// Nothing follows these bytes.
    pub fin: bool,
    /// The packet is to be acknowledged at once.
    pub acknowledge: bool,
    /// The bytes.
    pub data: &'a [u8],
}

/// How far a stream may go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamCredit {
    /// Its number.
    pub stream: u32,
    /// The low 32 bits of the position that it may reach.
    pub limit: u32,
}

/// A stream ends without its rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamReset {
    /// Its number.
    pub stream: u32,
    /// Why.
    pub reason: u8,
}

/// The sender has failed these messages, all of them together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abandon<'a> {
    messages: &'a [u8],
}

impl<'a> Abandon<'a> {
    /// The low 32 bits of their numbers.
    pub fn messages(&self) -> impl ExactSizeIterator<Item = u32> + 'a {
        let (numbers, _) = self.messages.as_chunks::<4>();
        numbers.iter().map(|number| u32::from_be_bytes(*number))
    }

    /// Bytes of the whole chunk for so many messages.
    pub const fn chunk_len(messages: usize) -> usize {
        HEADER_LEN + 4 * messages
    }

    /// Writes the chunk. Returns its length.
    ///
    /// # Panics
    /// If `out` is shorter than that.
    pub fn emit(messages: impl ExactSizeIterator<Item = u32>, out: &mut [u8]) -> usize {
        let len = Self::chunk_len(messages.len());
        put_header(ABANDON, 0, len, out);
        for (place, message) in out[HEADER_LEN..len].chunks_exact_mut(4).zip(messages) {
            put32(message, place);
        }
        len
    }
}

/// One chunk of a received packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunk<'a> {
    /// Nothing, so many bytes of it.
    Pad(usize),
    /// What has arrived.
    Ack(Ack<'a>),
    /// A part of a message.
    Segment(Segment<'a>),
    /// Bytes of a stream.
    Stream(Stream<'a>),
    /// A message that is not taken.
    Verdict(Verdict),
    /// Receives have been posted.
    Ready(Ready),
    /// One more port.
    Claim(Claim),
    /// Asks for an acknowledgement.
    Ping,
    /// The sender leaves.
    Close(Close),
    /// How far a stream may go.
    StreamCredit(StreamCredit),
    /// A stream ends.
    StreamReset(StreamReset),
    /// Messages that have failed.
    Abandon(Abandon<'a>),
    /// A type without a meaning here; it is skipped.
    Unknown(u8),
}

impl Chunk<'_> {
    /// Writes a chunk of fixed length: VERDICT, READY, CLAIM, PING, CLOSE, STREAM-CREDIT and STREAM-RESET.
    /// The others have functions of their own; they write nothing here. Returns the length.
    ///
    /// # Panics
    /// If `out` is shorter than that.
    pub fn emit_fixed(&self, out: &mut [u8]) -> usize {
        match *self {
            Chunk::Verdict(Verdict { message, reason, timer, detail }) => {
                put_header(VERDICT, 0, 12, out);
                put32(message, &mut out[4..8]);
                (out[8], out[9]) = (reason.code(), timer);
                put16(detail, &mut out[10..12]);
                12
            }
            Chunk::Ready(Ready { qpn, receives }) => {
                put_header(READY, 0, 8, out);
                put32(qpn << 8 | u32::from(receives), &mut out[4..8]);
                8
            }
            Chunk::Claim(Claim { port, cookie }) => {
                put_header(CLAIM, 0, 24, out);
                put32(u32::from(port) << 16, &mut out[4..8]);
                put64(cookie.key, &mut out[8..16]);
                put64(cookie.made, &mut out[16..24]);
                24
            }
            Chunk::Ping => {
                put_header(PING, 0, 4, out);
                4
            }
            Chunk::Close(Close { floor, reason }) => {
                put_header(CLOSE, 0, 12, out);
                put32(floor, &mut out[4..8]);
                put32(u32::from(reason) << 24, &mut out[8..12]);
                12
            }
            Chunk::StreamCredit(StreamCredit { stream, limit }) => {
                put_header(STREAM_CREDIT, 0, 12, out);
                put32(stream, &mut out[4..8]);
                put32(limit, &mut out[8..12]);
                12
            }
            Chunk::StreamReset(StreamReset { stream, reason }) => {
                put_header(STREAM_RESET, 0, 12, out);
                put32(stream, &mut out[4..8]);
                put32(u32::from(reason) << 24, &mut out[8..12]);
                12
            }
            _ => 0,
        }
    }
}

impl Stream<'_> {
    const OPEN: u8 = 0x80;
    const FIN: u8 = 0x40;
    /// That of a segment, too.
    const ACKNOWLEDGE: u8 = super::segment::ACKNOWLEDGE;

    /// Bytes in front of the stream's own.
    pub const fn head_len(&self) -> usize {
        HEADER_LEN + 8 + if self.open.is_some() { 4 } else { 0 }
    }

    /// Writes everything in front of the stream's bytes. Returns [`Self::head_len`].
    ///
    /// # Panics
    /// If `out` is shorter than that.
    pub fn emit_head(&self, out: &mut [u8]) -> usize {
        self.emit_head_for(self.data.len(), out)
    }

    /// The same in front of so many bytes, which are not `data`.
    ///
    /// # Panics
    /// If `out` is shorter than that.
    pub fn emit_head_for(&self, len: usize, out: &mut [u8]) -> usize {
        let open = if self.open.is_some() { Self::OPEN } else { 0 };
        let fin = if self.fin { Self::FIN } else { 0 };
        let acknowledge = if self.acknowledge { Self::ACKNOWLEDGE } else { 0 };
        put_header(STREAM, open | fin | acknowledge, self.head_len() + len, out);
        put32(self.stream, &mut out[4..8]);
        put32(self.offset, &mut out[8..12]);
        if let Some(service) = self.open {
            put32(service, &mut out[12..16]);
        }
        self.head_len()
    }
}

/// Writes PAD of so many bytes, from [`HEADER_LEN`] to 65,535. Returns them.
///
/// # Panics
/// If `out` is shorter than that.
pub fn emit_pad(len: usize, out: &mut [u8]) -> usize {
    put_header(PAD, 0, len, out);
    out[HEADER_LEN..len].fill(0);
    len
}

/// The chunks of a packet's body.
pub fn chunks(body: &[u8]) -> Chunks<'_> {
    Chunks { rest: body }
}

/// Iterator over the chunks of a packet; it ends behind the first error.
#[derive(Debug, Clone)]
pub struct Chunks<'a> {
    rest: &'a [u8],
}

impl Chunks<'_> {
    /// Bytes of the body behind the chunks so far.
    pub fn remaining(&self) -> usize {
        self.rest.len()
    }
}

impl<'a> Iterator for Chunks<'a> {
    type Item = Result<Chunk<'a>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let whole = self.rest.first_chunk::<HEADER_LEN>().and_then(|head| {
            let len = usize::from(be16(&head[2..4]));
            let (whole, rest) = self.rest.split_at_checked(len)?;
            Some((head[0], head[1], whole.get(HEADER_LEN..)?, rest))
        });
        let Some((code, flags, body, rest)) = whole else {
            self.rest = &[];
            return Some(Err(Error::Truncated));
        };
        self.rest = rest;
        let chunk = parse(code, flags, body);
        if chunk.is_err() {
            self.rest = &[];
        }
        Some(chunk)
    }
}

fn parse(code: u8, flags: u8, body: &[u8]) -> Result<Chunk<'_>, Error> {
    fn fixed<const N: usize>(body: &[u8]) -> Result<&[u8; N], Error> {
        body.first_chunk().ok_or(Error::Truncated)
    }
    Ok(match code {
        PAD => Chunk::Pad(HEADER_LEN + body.len()),
        ACK => Chunk::Ack(Ack::parse(flags, body)?),
        SEGMENT => Chunk::Segment(Segment::parse(flags, body)?),
        STREAM => {
            let (head, mut data) = body.split_first_chunk::<8>().ok_or(Error::Truncated)?;
            let mut open = None;
            if flags & Stream::OPEN != 0 {
                let (service, rest) = data.split_first_chunk::<4>().ok_or(Error::Truncated)?;
                (open, data) = (Some(be32(service)), rest);
            }
            let (stream, offset) = (be32(&head[..4]), be32(&head[4..]));
            let (fin, acknowledge) = (flags & Stream::FIN != 0, flags & Stream::ACKNOWLEDGE != 0);
            Chunk::Stream(Stream { stream, offset, open, fin, acknowledge, data })
        }
        VERDICT => {
            let body = fixed::<8>(body)?;
            Chunk::Verdict(Verdict {
                message: be32(&body[..4]),
                reason: Reason::from_code(body[4]),
                timer: body[5],
                detail: be16(&body[6..]),
            })
        }
        READY => {
            let word = be32(fixed::<4>(body)?);
            Chunk::Ready(Ready { qpn: word >> 8, receives: word.to_be_bytes()[3] })
        }
        CLAIM => {
            let body = fixed::<20>(body)?;
            let cookie = Cookie { key: be64(&body[4..12]), made: be64(&body[12..]) };
            Chunk::Claim(Claim { port: be16(&body[..2]), cookie })
        }
        PING => Chunk::Ping,
        CLOSE => {
            let body = fixed::<8>(body)?;
            Chunk::Close(Close { floor: be32(&body[..4]), reason: body[4] })
        }
        STREAM_CREDIT => {
            let body = fixed::<8>(body)?;
            Chunk::StreamCredit(StreamCredit { stream: be32(&body[..4]), limit: be32(&body[4..]) })
        }
        STREAM_RESET => {
            let body = fixed::<8>(body)?;
            Chunk::StreamReset(StreamReset { stream: be32(&body[..4]), reason: body[4] })
        }
        ABANDON if body.len().is_multiple_of(4) => Chunk::Abandon(Abandon { messages: body }),
        ABANDON => return Err(Error::Truncated),
        unknown if unknown & MUST_KNOW != 0 => return Err(Error::Unknown(unknown)),
        unknown => Chunk::Unknown(unknown),
    })
}

impl fmt::Display for Chunk<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Chunk::Pad(len) => write!(f, "Pad {len}"),
            Chunk::Ack(ack) => ack.fmt(f),
            Chunk::Segment(segment) => segment.fmt(f),
            Chunk::Stream(Stream { stream, offset, open, fin, acknowledge, data }) => {
                write!(f, "Stream {stream} {offset}+{}", data.len())?;
                if let Some(service) = open {
                    write!(f, " open={service:#x}")?;
                }
                f.write_str(if *fin { " fin" } else { "" })?;
                f.write_str(if *acknowledge { " ack" } else { "" })
            }
            Chunk::Verdict(Verdict { message, reason, timer, detail }) => {
                write!(f, "Verdict msg={message} {reason:?}")?;
                if *reason == Reason::ReceiverNotReady {
                    write!(f, " timer={timer} pn=…{detail}")?;
                }
                Ok(())
            }
            Chunk::Ready(Ready { qpn, receives }) => write!(f, "Ready {qpn:#x} receives={receives}"),
            Chunk::Claim(Claim { port, .. }) => write!(f, "Claim port={port}"),
            Chunk::Ping => f.write_str("Ping"),
            Chunk::Close(Close { floor, reason }) => write!(f, "Close floor={floor} reason={reason}"),
            Chunk::StreamCredit(StreamCredit { stream, limit }) => {
                write!(f, "Stream credit {stream} to {limit}")
            }
            Chunk::StreamReset(StreamReset { stream, reason }) => {
                write!(f, "Stream reset {stream} reason={reason}")
            }
            Chunk::Abandon(abandon) => {
                f.write_str("Abandon")?;
                abandon.messages().try_for_each(|message| write!(f, " {message}"))
            }
            Chunk::Unknown(code) => write!(f, "chunk {code:#04x}"),
        }
    }
}

pub(super) fn put_header(code: u8, flags: u8, len: usize, out: &mut [u8]) {
    (out[0], out[1]) = (code, flags);
    put16(u16::try_from(len).unwrap_or(u16::MAX), &mut out[2..4]);
}

pub(super) fn put16(value: u16, out: &mut [u8]) {
    out.copy_from_slice(&value.to_be_bytes());
}

pub(super) fn put32(value: u32, out: &mut [u8]) {
    out.copy_from_slice(&value.to_be_bytes());
}

pub(super) fn put64(value: u64, out: &mut [u8]) {
    out.copy_from_slice(&value.to_be_bytes());
}
