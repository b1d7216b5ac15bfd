//! Lookups: for UD, rdma_cm asks which queue pair serves a port, and the server answers
//! (docs/datagram-iwarp.md section 8).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------------------------------------------------------+
//! |                   extension header, 20 bytes                  |
//! +-------------------------------+-------------------------------+
//! |     Port Space, or Status     |   Service Port, or Reserved   |
//! +-------------------------------+---------------+---------------+
//! |                    Reserved                   |  Data Length  |
//! +-----------------------------------------------+---------------+
//! |                                                               |
//! +                            Cookie                             +
//! |                                                               |
//! +---------------------------------------------------------------+
//! |             private data: Data Length bytes, padding          |
//! +---------------------------------------------------------------+
//! |                            CRC32c                             |
//! +---------------------------------------------------------------+
//! ```
//!
//! The Incarnation field holds the transaction ID. A reply has the queue pair in Source QPN and its Q_Key in
//! Q_Key.
//!
//! A Request is padded to the length of the longest Reply, so a server never answers with more bytes than it
//! received.

use core::fmt;

use super::{CRC_LEN, Datagram, Header, Kind, seal};
use crate::{be16, be64};

/// Bytes before the private data.
const HEADERS_LEN: usize = Header::LEN + FIXED_LEN;
/// Bytes of the body before the private data.
const FIXED_LEN: usize = 16;

mod field {
    use core::ops::Range;
    pub const PORT_SPACE: Range<usize> = 0..2;
    pub const STATUS: Range<usize> = 0..2;
    pub const SERVICE_PORT: Range<usize> = 2..4;
    pub const DATA_LENGTH: usize = 7;
    pub const COOKIE: Range<usize> = 8..16;
}

/// Why a body is not a lookup. The receiver counts and drops it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// Another kind of datagram, or a flag that lookups do not have.
    Flags(u8),
    /// The body ends before its fixed part or its private data does.
    Truncated,
    /// A request shorter than the longest reply: an answer could be longer than the question.
    NotPadded(usize),
    /// More private data than rdma_cm allows.
    TooMuchData(u8),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Flags(flags) => write!(f, "flags {flags:#04x} in a lookup"),
            Error::Truncated => f.write_str("lookup shorter than its header"),
            Error::NotPadded(len) => {
                write!(f, "lookup request of {len} bytes, expected {} or more", Request::MIN_DATAGRAM_LEN)
            }
            Error::TooMuchData(len) => write!(f, "lookup with {len} bytes of private data"),
        }
    }
}

impl core::error::Error for Error {}

/// A client asks for the queue pair that serves a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request<'a> {
    /// Random number that the reply returns.
    pub transaction: u32,
    /// rdma_cm's port space: 0x0111 for `RDMA_PS_UDP`, 0x0002 for `RDMA_PS_IPOIB`.
    pub port_space: u16,
    /// Port in that space.
    pub service_port: u16,
    /// 0 in a first request; otherwise the cookie of the reply that required it.
    pub cookie: u64,
    /// The program's data; bytes beyond [`Request::MAX_PRIVATE_DATA`] are not sent.
    pub private_data: &'a [u8],
}

impl<'a> Request<'a> {
    /// Limit of rdma_connect(3) for `RDMA_PS_UDP`.
    pub const MAX_PRIVATE_DATA: usize = 180;
    /// Bytes of the shortest request, padding included: as many as the longest reply has.
    pub const MIN_DATAGRAM_LEN: usize = Reply::MAX_DATAGRAM_LEN;
    /// Bytes of the longest request.
    pub const MAX_DATAGRAM_LEN: usize = HEADERS_LEN + Self::MAX_PRIVATE_DATA + CRC_LEN;

    /// Reads a datagram of [`Kind::LookupRequest`]. The caller checks the CRC.
    pub fn parse(datagram: &Datagram<'a>) -> Result<Self, Error> {
        let (fixed, private_data) = split(datagram, Kind::LookupRequest, Self::MAX_PRIVATE_DATA)?;
        if datagram.datagram_len() < Self::MIN_DATAGRAM_LEN {
            return Err(Error::NotPadded(datagram.datagram_len()));
        }
        Ok(Request {
            transaction: datagram.header().incarnation,
            port_space: be16(&fixed[field::PORT_SPACE]),
            service_port: be16(&fixed[field::SERVICE_PORT]),
            cookie: be64(&fixed[field::COOKIE]),
            private_data,
        })
    }

    /// Bytes of the whole datagram, padding included.
    pub fn buffer_len(&self) -> usize {
        let data = cut(self.private_data, Self::MAX_PRIVATE_DATA);
        (HEADERS_LEN + data.len() + CRC_LEN).max(Self::MIN_DATAGRAM_LEN)
    }

    /// Writes the whole datagram with padding and CRC at the start of `out` and returns its length.
    ///
    /// # Panics
    /// When `out` is shorter than [`Request::buffer_len`].
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut fixed = [0; FIXED_LEN];
        fixed[field::PORT_SPACE].copy_from_slice(&self.port_space.to_be_bytes());
        fixed[field::SERVICE_PORT].copy_from_slice(&self.service_port.to_be_bytes());
        fixed[field::COOKIE].copy_from_slice(&self.cookie.to_be_bytes());
        let data = cut(self.private_data, Self::MAX_PRIVATE_DATA);
        let header = header(Kind::LookupRequest, 0, 0, self.transaction);
        join(&header, fixed, data, &mut out[..self.buffer_len()])
    }
}

/// `Lookup id=0x9 space=0x111 port=7471 len=5`
impl fmt::Display for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Request { transaction, port_space, service_port, cookie, private_data } = self;
        write!(f, "Lookup id={transaction:#x} space={port_space:#x} port={service_port}")?;
        if *cookie != 0 {
            write!(f, " cookie={cookie:#x}")?;
        }
        write!(f, " len={}", private_data.len())
    }
}

/// A server's result. 0 to 5 are InfiniBand's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    /// The reply names a queue pair.
    Success,
    /// The server does not serve this port space.
    Unsupported,
    /// The program rejected the request.
    Rejected,
    /// No program listens on the port.
    NoQueuePair,
    /// The server asks for the request again, with the cookie of this reply.
    CookieRequired,
    /// Every other value.
    Unknown(u16),
}

impl Status {
    /// From the field.
    pub const fn from_code(code: u16) -> Self {
        match code {
            0 => Status::Success,
            1 => Status::Unsupported,
            2 => Status::Rejected,
            3 => Status::NoQueuePair,
            0x8000 => Status::CookieRequired,
            other => Status::Unknown(other),
        }
    }

    /// The field.
    pub const fn code(self) -> u16 {
        match self {
            Status::Success => 0,
            Status::Unsupported => 1,
            Status::Rejected => 2,
            Status::NoQueuePair => 3,
            Status::CookieRequired => 0x8000,
            Status::Unknown(code) => code,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Status::Success => f.write_str("success"),
            Status::Unsupported => f.write_str("unsupported"),
            Status::Rejected => f.write_str("rejected"),
            Status::NoQueuePair => f.write_str("no queue pair"),
            Status::CookieRequired => f.write_str("cookie required"),
            Status::Unknown(code) => write!(f, "status {code:#x}"),
        }
    }
}

/// A server's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Reply<'a> {
    /// From the request.
    pub transaction: u32,
    /// The queue pair, 24 bits; 0 unless the status is [`Status::Success`].
    pub qpn: u32,
    /// Its Q_Key; 0 unless the status is [`Status::Success`].
    pub qkey: u32,
    /// Result.
    pub status: Status,
    /// For the next request; 0 unless the status is [`Status::CookieRequired`].
    pub cookie: u64,
    /// The program's data; bytes beyond [`Reply::MAX_PRIVATE_DATA`] are not sent.
    pub private_data: &'a [u8],
}

impl<'a> Reply<'a> {
    /// Limit of rdma_accept(3) and rdma_reject(3) for `RDMA_PS_UDP`.
    pub const MAX_PRIVATE_DATA: usize = 136;
    /// Bytes of the longest reply.
    pub const MAX_DATAGRAM_LEN: usize = HEADERS_LEN + Self::MAX_PRIVATE_DATA + CRC_LEN;

    /// Reads a datagram of [`Kind::LookupReply`]. The caller checks the CRC and the transaction.
    pub fn parse(datagram: &Datagram<'a>) -> Result<Self, Error> {
        let (fixed, private_data) = split(datagram, Kind::LookupReply, Self::MAX_PRIVATE_DATA)?;
        Ok(Reply {
            transaction: datagram.header().incarnation,
            qpn: datagram.header().source_qpn,
            qkey: datagram.header().qkey,
            status: Status::from_code(be16(&fixed[field::STATUS])),
            cookie: be64(&fixed[field::COOKIE]),
            private_data,
        })
    }

    /// Bytes of the whole datagram.
    pub fn buffer_len(&self) -> usize {
        HEADERS_LEN + cut(self.private_data, Self::MAX_PRIVATE_DATA).len() + CRC_LEN
    }

    /// Writes the whole datagram with its CRC at the start of `out` and returns its length.
    ///
    /// # Panics
    /// When `out` is shorter than [`Reply::buffer_len`].
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let mut fixed = [0; FIXED_LEN];
        fixed[field::STATUS].copy_from_slice(&self.status.code().to_be_bytes());
        fixed[field::COOKIE].copy_from_slice(&self.cookie.to_be_bytes());
        let data = cut(self.private_data, Self::MAX_PRIVATE_DATA);
        let header = header(Kind::LookupReply, self.qpn, self.qkey, self.transaction);
        join(&header, fixed, data, &mut out[..self.buffer_len()])
    }
}

/// `LookupReply id=0x9 success qpn=0x4e2007 qkey=0x1234567 len=0`
impl fmt::Display for Reply<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Reply { transaction, qpn, qkey, status, cookie, private_data } = self;
        write!(f, "LookupReply id={transaction:#x} {status}")?;
        if *status == Status::Success {
            write!(f, " qpn={qpn:#x} qkey={qkey:#x}")?;
        }
        if *cookie != 0 {
            write!(f, " cookie={cookie:#x}")?;
        }
        write!(f, " len={}", private_data.len())
    }
}

fn cut(data: &[u8], most: usize) -> &[u8] {
    data.get(..most).unwrap_or(data)
}

fn header(kind: Kind, source_qpn: u32, qkey: u32, transaction: u32) -> Header {
    Header {
        flags: kind.code(),
        source_qpn,
        destination_qpn: 0,
        qkey,
        immediate: 0,
        incarnation: transaction,
    }
}

/// The fixed part of the body, and the private data.
fn split<'a>(
    datagram: &Datagram<'a>,
    kind: Kind,
    most: usize,
) -> Result<(&'a [u8; FIXED_LEN], &'a [u8]), Error> {
    let header = datagram.header();
    if header.flags != kind.code() {
        return Err(Error::Flags(header.flags));
    }
    let (fixed, rest) = datagram.body().split_first_chunk::<FIXED_LEN>().ok_or(Error::Truncated)?;
    let len = fixed[field::DATA_LENGTH];
    if usize::from(len) > most {
        return Err(Error::TooMuchData(len));
    }
    Ok((fixed, rest.get(..usize::from(len)).ok_or(Error::Truncated)?))
}

/// Writes a whole datagram that fills `out`.
fn join(header: &Header, mut fixed: [u8; FIXED_LEN], data: &[u8], out: &mut [u8]) -> usize {
    fixed[field::DATA_LENGTH] = data.len() as u8;
    let (front, rest) = out.split_at_mut(HEADERS_LEN);
    front[..Header::LEN].copy_from_slice(&header.to_bytes());
    front[Header::LEN..].copy_from_slice(&fixed);
    let (body, padding) = rest.split_at_mut(data.len());
    body.copy_from_slice(data);
    padding.fill(0);
    seal(out);
    out.len()
}
