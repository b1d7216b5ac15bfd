//! ACK: which packets have arrived, and which messages are Done (docs/rd.md section 5.1).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------+-+-------------+-------------------------------+
//! |   Type = 1    |C|  Reserved   |            Length             |
//! +---------------+-+-------------+-------------------------------+
//! |                     Largest packet number                     |
//! +-------------------------------+-------------------------------+
//! |       Delay, units of 4 µs    |       Blind, units of 4 µs    |
//! +-------------------------------+---------------+---------------+
//! |     Credit, units of 4 KiB    | Packet ranges | Message ranges|
//! +-------------------------------+---------------+---------------+
//! |           Done floor: all messages below it have ended        |
//! +---------------------------------------------------------------+
//! |           CE marks seen so far            (with C)            |
//! +-------------------------------+-------------------------------+
//! |  Gap                          |  Length                       |  one for each range
//! +-------------------------------+-------------------------------+
//! ```
//!
//! Ranges of packets go down from the largest: `gap` packets are missing, then `length` have arrived; the
//! first gap is 0. Ranges of messages go up from the floor: `gap` messages have not ended, then `length`
//! have. A span too long for 16 bits is cut into several ranges, those between with a length or a gap of 0.

use core::fmt;

use super::chunk::{self, Error, put16, put32};
use crate::{be16, be32};

/// C: the count of CE marks follows.
pub const CE: u8 = 0x80;
/// Ranges of both kinds together at most. A longer list would tell a sender little, and a receiver is bound
/// to read it.
pub const MAX_RANGES: usize = 32;

const FIXED: usize = chunk::HEADER_LEN + 16;

/// A gap, and what has arrived behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Range {
    /// How many are missing.
    pub gap: u16,
    /// How many are there behind them.
    pub length: u16,
}

/// The fields of fixed length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Head {
    /// The low 32 bits of the largest packet number that has arrived.
    pub largest: u32,
    /// Time between the arrival of that packet and this acknowledgement, in units of 4 µs.
    pub delay: u16,
    /// How long the receiver had not found its socket empty, in units of 4 µs.
    pub blind: u16,
    /// How much the receiver of this ACK may have in flight, in units of 4 KiB.
    pub credit: u16,
    /// The low 32 bits of the first message that has not ended.
    pub floor: u32,
    /// How many packets with a CE mark have arrived, if the sender counts them.
    pub ce: Option<u32>,
}

/// Microseconds in a unit of [`Head::delay`] and [`Head::blind`].
pub const TIME_UNIT_US: u64 = 4;
/// Bytes in a unit of [`Head::credit`].
pub const CREDIT_UNIT: u64 = 4096;

impl Head {
    /// Bytes of the whole chunk with so many ranges.
    pub const fn chunk_len(&self, ranges: usize) -> usize {
        FIXED + if self.ce.is_some() { 4 } else { 0 } + 4 * ranges
    }

    /// Writes the chunk with these ranges; both lists together have at most [`MAX_RANGES`]. Returns its
    /// length.
    ///
    /// # Panics
    /// If `out` is shorter than that.
    pub fn emit(&self, packets: &[Range], messages: &[Range], out: &mut [u8]) -> usize {
        debug_assert!(packets.len() + messages.len() <= MAX_RANGES);
        let count = |ranges: &[Range]| u8::try_from(ranges.len()).unwrap_or(u8::MAX);
        let len = self.chunk_len(packets.len() + messages.len());
        let flags = if self.ce.is_some() { CE } else { 0 };
        chunk::put_header(chunk::ACK, flags, len, out);
        put32(self.largest, &mut out[4..8]);
        put16(self.delay, &mut out[8..10]);
        put16(self.blind, &mut out[10..12]);
        put16(self.credit, &mut out[12..14]);
        (out[14], out[15]) = (count(packets), count(messages));
        put32(self.floor, &mut out[16..20]);
        let mut at = FIXED;
        if let Some(ce) = self.ce {
            put32(ce, &mut out[at..at + 4]);
            at += 4;
        }
        for range in packets.iter().chain(messages) {
            put16(range.gap, &mut out[at..at + 2]);
            put16(range.length, &mut out[at + 2..at + 4]);
            at += 4;
        }
        debug_assert_eq!(at, len);
        len
    }
}

/// An ACK in a received packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack<'a> {
    /// The fields of fixed length.
    pub head: Head,
    packets: &'a [u8],
    messages: &'a [u8],
}

impl<'a> Ack<'a> {
    /// Reads the body of a chunk.
    pub(super) fn parse(flags: u8, body: &'a [u8]) -> Result<Self, Error> {
        let (fixed, mut rest) = body.split_first_chunk::<16>().ok_or(Error::Truncated)?;
        let mut ce = None;
        if flags & CE != 0 {
            let (marks, after) = rest.split_first_chunk::<4>().ok_or(Error::Truncated)?;
            (ce, rest) = (Some(be32(marks)), after);
        }
        let (packets, messages) = (usize::from(fixed[10]), usize::from(fixed[11]));
        if packets + messages > MAX_RANGES || packets == 0 {
            return Err(Error::Ranges);
        }
        let (packets, rest) = rest.split_at_checked(4 * packets).ok_or(Error::Truncated)?;
        let messages = rest.get(..4 * messages).ok_or(Error::Truncated)?;
        if packets.first_chunk::<2>() != Some(&[0, 0]) {
            return Err(Error::Ranges);
        }
        let head = Head {
            largest: be32(&fixed[..4]),
            delay: be16(&fixed[4..6]),
            blind: be16(&fixed[6..8]),
            credit: be16(&fixed[8..10]),
            floor: be32(&fixed[12..16]),
            ce,
        };
        Ok(Ack { head, packets, messages })
    }

    /// Packets that have arrived, downwards from the largest.
    pub fn packets(&self) -> impl Iterator<Item = Range> + 'a {
        ranges(self.packets)
    }

    /// Messages that have ended, upwards from the floor.
    pub fn messages(&self) -> impl Iterator<Item = Range> + 'a {
        ranges(self.messages)
    }
}

fn ranges(bytes: &[u8]) -> impl Iterator<Item = Range> {
    let (ranges, _) = bytes.as_chunks::<4>();
    ranges.iter().map(|range| Range { gap: be16(&range[..2]), length: be16(&range[2..]) })
}

/// `Ack 7 delay=40us credit=8 floor=3 packets=0+4,2+1 done=1+1`
impl fmt::Display for Ack<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Head { largest, delay, blind, credit, floor, ce } = self.head;
        write!(f, "Ack {largest} delay={}us", u64::from(delay) * TIME_UNIT_US)?;
        if blind != 0 {
            write!(f, " blind={}us", u64::from(blind) * TIME_UNIT_US)?;
        }
        write!(f, " credit={credit} floor={floor}")?;
        if let Some(ce) = ce {
            write!(f, " ce={ce}")?;
        }
        for (name, bytes) in [("packets", self.packets), ("done", self.messages)] {
            let mut separator = '=';
            for Range { gap, length } in ranges(bytes) {
                if separator == '=' {
                    write!(f, " {name}")?;
                }
                write!(f, "{separator}{gap}+{length}")?;
                separator = ',';
            }
        }
        Ok(())
    }
}
