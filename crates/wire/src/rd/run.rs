//! Runs: packets, one behind the other, that bring the next parts of one message, or of one stream. Their
//! heads differ in some counts alone, so a sender writes the later ones from the first, and a receiver of
//! several joined by the system knows them by comparing bytes.

use super::chunk::{HEADER_LEN, SEGMENT, STREAM};
use super::segment::{ACKNOWLEDGE, ORDERED};
use super::{Header, Kind, field};
use crate::datagram::CRC_LEN;
use crate::ddp::{self, Tagged, Untagged};
use crate::{be32, be64, crc};

/// Where the chunk's type and flags are, the fields of a segment, and those of a part of a stream.
const TYPE: usize = Header::LEN;
const FLAGS: usize = TYPE + 1;
const OFFSET: usize = TYPE + HEADER_LEN + 12;
const MESSAGE_LEN: usize = OFFSET + 4;
const DDP: usize = MESSAGE_LEN + 4;
const POSITION: usize = TYPE + HEADER_LEN + 4;
/// Where a DDP header says where its payload goes.
const TO: usize = DDP + 6;
const MO: usize = DDP + 14;
/// Bytes in front of those of a stream.
const STREAM_HEAD: usize = POSITION + 4;

/// What comes before the payload of a packet.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    bytes: [u8; Head::MAX_LEN],
    len: usize,
}

impl Head {
    const MAX_LEN: usize = DDP + Untagged::LEN;

    /// As it travels.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&[])
    }
}

/// The packets that may follow one that is a single SEGMENT, neither the first nor the last of its message,
/// nor the whole of it; or a single part of a stream, neither the first one nor the last.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    first: Head,
    payload: usize,
}

impl Run {
    /// Of everything in front of the payload of the first packet, and the length of that. `None`: none follow
    /// it that differ in counts alone.
    pub fn of(head: &[u8], payload: usize) -> Option<Self> {
        let chunk_len = u16::try_from(head.len().checked_sub(Header::LEN)? + payload).ok()?;
        let is_all = head.get(FLAGS + 1..FLAGS + 3)? == chunk_len.to_be_bytes();
        let flags = *head.get(FLAGS)? & !ACKNOWLEDGE;
        let may_go_on = match *head.get(TYPE)? {
            SEGMENT => {
                let (ddp, len) = ddp::Header::parse(head.get(DDP..)?).ok()?;
                flags & !ORDERED == 0 && head.len() == DDP + len && !ddp.last()
            }
            STREAM => flags == 0 && head.len() == STREAM_HEAD,
            _ => false,
        };
        let is_packet = Header::parse(head).is_ok_and(|header| header.kind == Kind::Packet);
        if !is_packet || !is_all || !may_go_on || payload == 0 {
            return None;
        }
        let mut bytes = [0; Head::MAX_LEN];
        bytes.get_mut(..head.len())?.copy_from_slice(head);
        bytes[FLAGS] = flags;
        Some(Self { first: Head { bytes, len: head.len() }, payload })
    }

    /// Bytes of a whole packet.
    pub fn packet_len(&self) -> usize {
        self.first.len + self.payload + CRC_LEN
    }

    /// How many can follow the first one: not the last of a message, which says that it is.
    pub fn most(&self) -> u32 {
        if self.first.bytes[TYPE] == STREAM {
            return u32::MAX;
        }
        let place = |at: usize| be32(self.first.bytes.get(at..at + 4).unwrap_or(&[0; 4])) as usize;
        let left = place(MESSAGE_LEN).saturating_sub(place(OFFSET) + self.payload);
        u32::try_from(left.saturating_sub(1) / self.payload).unwrap_or(0)
    }

    /// That of the packet so many behind the first one, of [`Self::most`] at most.
    pub fn head(&self, nth: u32, acknowledge: bool) -> Head {
        let mut head = self.first;
        let bytes = nth.wrapping_mul(self.payload as u32);
        let mut add = |at: usize, more: u32| {
            let place = &mut head.bytes[at..at + 4];
            place.copy_from_slice(&be32(place).wrapping_add(more).to_be_bytes());
        };
        add(field::NUMBER.start, nth);
        match head.len {
            STREAM_HEAD => add(POSITION, bytes),
            len => {
                add(OFFSET, bytes);
                if len == DDP + Tagged::LEN {
                    let place = &mut head.bytes[TO..TO + 8];
                    place.copy_from_slice(&be64(place).wrapping_add(u64::from(bytes)).to_be_bytes());
                } else {
                    add(MO, bytes);
                }
            }
        }
        head.bytes[FLAGS] |= if acknowledge { ACKNOWLEDGE } else { 0 };
        head
    }

    /// Whether this is the packet so many behind the first one, and intact. `Some`: whether it asks for an
    /// acknowledgement at once.
    pub fn is_next(&self, nth: u32, packet: &[u8]) -> Option<bool> {
        if packet.len() != self.packet_len() || nth > self.most() {
            return None;
        }
        let acknowledge = packet.get(FLAGS)? & ACKNOWLEDGE != 0;
        let (covered, sum) = packet.split_last_chunk::<CRC_LEN>()?;
        let is_it = covered.get(..self.first.len)? == self.head(nth, acknowledge).bytes()
            && crc::to_wire(crc::crc32c(covered)) == *sum;
        is_it.then_some(acknowledge)
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::super::Packet;
    use super::super::chunk::{self, Chunk, chunks};
    use super::super::segment::{self, First, Segment};
    use super::*;
    use crate::datagram;

    const HEADER: Header = Header { number: u32::MAX - 1, ..super::super::contact::tests::HEADER };

    /// The packets of a message, as a sender makes them one by one.
    fn packets(len: u32, piece: u32, tagged: bool, ordered: bool) -> Vec<Vec<u8>> {
        let starts = (0..len).step_by(piece as usize);
        let one = |(index, start): (usize, u32)| {
            let payload: Vec<u8> = (start..len.min(start + piece)).map(|byte| byte as u8).collect();
            let last = start + piece >= len;
            let ddp = match tagged {
                true => {
                    let to = 0xFFFF_FFFF_u64 + u64::from(start);
                    ddp::Header::Tagged(Tagged { last, stag: 7, to, rsvdulp: 0x40 })
                }
                false => {
                    let (rsvdulp, rsvdulp32) = (0x43, 9);
                    ddp::Header::Untagged(Untagged { last, rsvdulp, rsvdulp32, qn: 0, msn: 5, mo: start })
                }
            };
            let head = segment::Head {
                source_qpn: 0x4e_2103,
                destination_qpn: 0x4e_2007,
                message: 5,
                behind: ordered.then_some(3),
                offset: start,
                message_len: Some(len),
                first: (start == 0).then_some(First { qkey: 1, immediate: None, job_key: None }),
                acknowledge: last,
                idempotent: false,
                not_repeated: false,
            };
            let segment = Segment { head, ddp, payload: &payload };
            let number = HEADER.number.wrapping_add(index as u32);
            let mut packet = Header { number, ..HEADER }.to_bytes().to_vec();
            let at = packet.len();
            packet.resize(at + segment.head_len(), 0);
            segment.emit_head(&mut packet[at..]);
            packet.extend_from_slice(&payload);
            packet.extend_from_slice(&[0; CRC_LEN]);
            datagram::seal(&mut packet);
            packet
        };
        starts.enumerate().map(one).collect()
    }

    fn run_of(packet: &[u8]) -> Option<Run> {
        let parsed = Packet::parse(packet).unwrap();
        let Some(Ok(Chunk::Segment(segment))) = chunks(parsed.body()).next() else { panic!("no segment") };
        let payload = segment.payload.len();
        Run::of(&packet[..packet.len() - CRC_LEN - payload], payload)
    }

    proptest! {
        #[test]
        fn a_run_is_what_a_sender_makes_one_by_one(
            len in 1u32..3000,
            piece in 1u32..700,
            tagged in any::<bool>(),
            ordered in any::<bool>(),
            flip in any::<prop::sample::Index>(),
            bit in 0u8..8,
        ) {
            let packets = packets(len, piece, tagged, ordered);
            prop_assert!(run_of(&packets[0]).is_none(), "the first one says more");
            prop_assert!(run_of(packets.last().unwrap()).is_none(), "the last one says that it is");
            for (at, first) in packets.iter().enumerate().skip(1).take(packets.len().saturating_sub(2)) {
                let run = run_of(first).unwrap();
                prop_assert_eq!(run.most() as usize, packets.len() - 2 - at);
                for (nth, packet) in (0..).zip(&packets[at..packets.len() - 1]) {
                    prop_assert_eq!(run.is_next(nth, packet), Some(false));
                    prop_assert_eq!(run.is_next(nth + 1, packet), None);
                    let head = run.head(nth, false);
                    prop_assert_eq!(head.bytes(), &packet[..head.bytes().len()]);
                    let mut asks = packet.clone();
                    asks[FLAGS] |= ACKNOWLEDGE;
                    prop_assert_eq!(run.is_next(nth, &asks), None, "the CRC is another one");
                    datagram::seal(&mut asks);
                    prop_assert_eq!(run.is_next(nth, &asks), Some(true));
                    let mut damaged = packet.clone();
                    damaged[flip.index(packet.len())] ^= 1 << bit;
                    prop_assert_eq!(run.is_next(nth, &damaged), None);
                }
                prop_assert_eq!(run.is_next(run.most() + 1, packets.last().unwrap()), None);
            }
        }
    }

    /// A part of a stream, as a sender makes it by itself.
    fn part(number: u32, offset: u32, open: Option<u32>, fin: bool, data: &[u8]) -> Vec<u8> {
        let chunk = chunk::Stream { stream: 6, offset, open, fin, acknowledge: false, data };
        let mut packet = Header { number, ..HEADER }.to_bytes().to_vec();
        packet.resize(Header::LEN + chunk.head_len(), 0);
        chunk.emit_head(&mut packet[Header::LEN..]);
        packet.extend_from_slice(data);
        packet.extend_from_slice(&[0; CRC_LEN]);
        datagram::seal(&mut packet);
        packet
    }

    #[test]
    fn a_stream_goes_on_across_the_end_of_its_counts() {
        let (number, offset) = (u32::MAX, u32::MAX - 7);
        let run = |packet: &[u8], head: usize| Run::of(&packet[..Header::LEN + head], 16);
        assert!(run(&part(number, offset, Some(1), false, &[7; 16]), 16).is_none(), "it opens the stream");
        assert!(run(&part(number, offset, None, true, &[7; 16]), 12).is_none(), "it ends the stream");
        let run = run(&part(number, offset, None, false, &[7; 16]), 12).unwrap();
        for nth in 0..3 {
            let at = offset.wrapping_add(nth * 16);
            let packet = part(number.wrapping_add(nth), at, None, false, &[nth as u8; 16]);
            assert_eq!(run.is_next(nth, &packet), Some(false));
            assert_eq!(run.head(nth, false).bytes(), &packet[..STREAM_HEAD]);
            assert_eq!(run.is_next(nth + 1, &packet), None);
            let end = part(number.wrapping_add(nth), at, None, true, &[nth as u8; 16]);
            assert_eq!(run.is_next(nth, &end), None, "the end of the stream");
        }
    }

    #[test]
    fn an_open_is_none() {
        let mut packet = part(1, 0, None, false, &[7; 16]);
        packet[field::FLAGS] |= Kind::Open.code();
        assert!(Run::of(&packet[..STREAM_HEAD], 16).is_none());
    }
}
