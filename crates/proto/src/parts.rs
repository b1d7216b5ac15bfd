//! Datagrams that are longer than a packet of the path go in parts (docs/datagram-iwarp.md section 16).
//!
//! The system would cut them into fragments of IP, one datagram at a time: between two namespaces with an MTU of
//! 1500 a message of 4 KiB then takes four times as long as four of 1 KiB, which it takes in one call. Parts are
//! packets of one length, so those of many messages go in one call and come in one.
//!
//! [`Assembler`] puts them together, [`Peers`] knows who takes them, [`layout`] says how long they are.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use uwarp_wire::datagram::part::{Part, PartHead};

/// Datagrams of which some parts have come, at most; and of one sender. The oldest goes for another one.
const MOST: usize = 64;
const MOST_OF_ONE: usize = 4;
/// Bytes of these.
const MOST_BYTES: usize = 1 << 20;

/// Peers that are known.
const MOST_PEERS: usize = 8192;
/// What is known of a peer, and of the path to it, is looked at anew after this time.
const KNOWN: Duration = Duration::from_secs(60);
/// A question is asked again after this time, and so often. Who takes no parts does not answer.
const AGAIN: Duration = Duration::from_millis(200);
const QUESTIONS: u8 = 3;
/// Parts of one datagram that are sent at most. More than these go as fragments of IP.
const MOST_SENT: usize = 32;

/// A datagram of which some parts have come.
#[derive(Debug)]
struct Assembly {
    from: SocketAddr,
    /// Of its first part; its offset has no meaning.
    head: PartHead,
    /// Bytes of a part.
    each: usize,
    /// Which have come.
    have: u64,
    bytes: Vec<u8>,
}

impl Assembly {
    fn is_of(&self, from: SocketAddr, part: &Part<'_>) -> bool {
        let head = PartHead { offset: self.head.offset, ..part.head };
        self.from == from && self.head == head && self.each == part.bytes.len()
    }

    fn count(&self) -> usize {
        self.bytes.len().div_ceil(self.each)
    }

    /// Whether it is whole now.
    fn add(&mut self, part: &Part<'_>) -> bool {
        let at = usize::from(part.head.offset);
        let Some(place) = self.bytes.get_mut(at..) else { return false };
        let len = place.len().min(self.each);
        if let (Some(place), Some(bytes)) = (place.get_mut(..len), part.bytes.get(..len)) {
            place.copy_from_slice(bytes);
        }
        self.have |= 1 << (at / self.each);
        self.have.count_ones() as usize == self.count()
    }
}

/// Puts parts together.
#[derive(Debug, Default)]
pub struct Assembler {
    /// The oldest first.
    begun: Vec<Assembly>,
    bytes: usize,
    spare: Vec<u8>,
    dropped: u64,
}

impl Assembler {
    /// Takes a part. `Some`: its datagram is whole now, and unchecked. To be given back with
    /// [`Self::give_back`].
    pub fn take(&mut self, from: SocketAddr, part: &Part<'_>) -> Option<Vec<u8>> {
        // The last one, most likely.
        let at = match self.begun.iter().rposition(|begun| begun.is_of(from, part)) {
            Some(at) => at,
            None => self.begin(from, part),
        };
        let is_whole = self.begun.get_mut(at)?.add(part);
        is_whole.then(|| self.remove(at))
    }

    /// The buffer of a datagram that was whole.
    pub fn give_back(&mut self, mut bytes: Vec<u8>) {
        bytes.clear();
        self.spare = bytes;
    }

    /// Datagrams that were dropped since the last question, because others came before their last part.
    pub fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }

    fn begin(&mut self, from: SocketAddr, part: &Part<'_>) -> usize {
        let length = usize::from(part.head.length);
        let of_one = self.begun.iter().filter(|begun| begun.from == from).count();
        if of_one >= MOST_OF_ONE
            && let Some(at) = self.begun.iter().position(|begun| begun.from == from)
        {
            self.drop_one(at);
        }
        while self.begun.len() >= MOST || self.bytes + length > MOST_BYTES {
            self.drop_one(0);
        }
        let mut bytes = std::mem::take(&mut self.spare);
        bytes.resize(length, 0);
        self.bytes += length;
        self.begun.push(Assembly { from, head: part.head, each: part.bytes.len(), have: 0, bytes });
        self.begun.len() - 1
    }

    fn drop_one(&mut self, at: usize) {
        self.dropped += 1;
        let bytes = self.remove(at);
        self.give_back(bytes);
    }

    fn remove(&mut self, at: usize) -> Vec<u8> {
        let bytes = self.begun.remove(at).bytes;
        self.bytes -= bytes.len();
        bytes
    }
}

/// Into how many parts a datagram of `length` bytes is cut, and how many of its bytes each has, where packets have
/// `packet` bytes. `None`: it needs no parts, or too many.
pub fn layout(length: usize, packet: usize) -> Option<(usize, usize)> {
    let most = packet.checked_sub(PartHead::LEN).filter(|most| *most > 0)?;
    let count = length.div_ceil(most);
    (length > packet && count <= MOST_SENT).then(|| (count, length.div_ceil(count)))
}

/// What is known of a peer.
#[derive(Debug, Clone, Copy)]
struct Peer {
    since: Instant,
    /// Bytes of a packet of the path.
    packet: usize,
    takes: bool,
    token: u64,
    /// Not answered yet.
    asked: Option<Instant>,
    questions: u8,
}

/// How a datagram goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Way {
    /// In parts, in packets of so many bytes; `None`: as it is.
    pub parts: Option<usize>,
    /// Behind it goes the question whether the peer takes parts, with this token.
    pub asks: Option<u64>,
}

/// Who takes parts.
#[derive(Debug, Default)]
pub struct Peers {
    known: HashMap<SocketAddr, Peer>,
}

impl Peers {
    /// How a datagram of `length` bytes goes. `packet`: bytes of a packet of the path, as the system knows it.
    /// `token`: at random.
    pub fn way(
        &mut self,
        now: Instant,
        to: SocketAddr,
        length: usize,
        packet: impl FnOnce() -> usize,
        token: impl FnOnce() -> u64,
    ) -> Way {
        if self.known.len() >= MOST_PEERS && !self.known.contains_key(&to) {
            self.known.retain(|_, peer| now < peer.since + KNOWN);
            if self.known.len() >= MOST_PEERS {
                self.known.clear();
            }
        }
        let new = Peer { since: now, packet: 0, takes: false, token: 0, asked: None, questions: 0 };
        let peer = self.known.entry(to).or_insert(new);
        if peer.packet == 0 || now >= peer.since + KNOWN {
            // What it took it takes, unless it does not say so now.
            *peer = Peer { packet: packet().max(1), takes: peer.takes, ..new };
        }
        if layout(length, peer.packet).is_none() {
            return Way { parts: None, asks: None };
        }
        let is_due = match peer.asked {
            Some(at) => now >= at + AGAIN,
            None => peer.questions == 0,
        };
        if is_due && peer.questions >= QUESTIONS {
            (peer.takes, peer.asked) = (false, None);
        }
        let asks = is_due && peer.questions < QUESTIONS;
        if asks {
            if peer.questions == 0 {
                peer.token = token();
            }
            (peer.asked, peer.questions) = (Some(now), peer.questions + 1);
        }
        Way { parts: peer.takes.then_some(peer.packet), asks: asks.then_some(peer.token) }
    }

    /// An answer has come. Returns whether there was such a question.
    pub fn on_answer(&mut self, from: SocketAddr, token: u64) -> bool {
        let Some(peer) = self.known.get_mut(&from) else { return false };
        let is_asked = peer.asked.is_some() && peer.token == token;
        if is_asked {
            (peer.takes, peer.asked) = (true, None);
        }
        is_asked
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn peer(port: u16) -> SocketAddr {
        ([10, 0, 0, 1], port).into()
    }

    /// As a sender cuts a datagram.
    fn cut(datagram: &[u8], number: u32, packet: usize) -> Vec<Vec<u8>> {
        let (count, each) = layout(datagram.len(), packet).unwrap();
        let part = |nth: usize| {
            let head = PartHead {
                source_qpn: 1,
                destination_qpn: 2,
                number,
                length: datagram.len() as u16,
                offset: (nth * each) as u16,
                incarnation: 3,
            };
            let mut bytes =
                [&head.to_bytes()[..], &datagram[nth * each..datagram.len().min((nth + 1) * each)]].concat();
            bytes.resize(PartHead::LEN + each, 0);
            bytes
        };
        (0..count).map(part).collect()
    }

    fn bytes(length: usize, seed: u8) -> Vec<u8> {
        (0..length).map(|at| (at * 7 + at / 251) as u8 ^ seed).collect()
    }

    fn take(assembler: &mut Assembler, port: u16, part: &[u8]) -> Option<Vec<u8>> {
        assembler.take(peer(port), &Part::parse(part).unwrap())
    }

    #[test]
    fn parts_are_of_one_length_and_fit() {
        assert_eq!(layout(1472, 1472), None);
        assert_eq!(layout(1473, 1472), Some((2, 737)));
        assert_eq!(layout(4138, 1472), Some((3, 1380)));
        assert_eq!(layout(65_507, 1472), None, "too many");
        assert_eq!(layout(4138, 20), None);
        for length in 1473..MOST_SENT * 1452 {
            let (count, each) = layout(length, 1472).unwrap();
            assert!(each + PartHead::LEN <= 1472 && (count - 1) * each < length && count * each >= length);
        }
    }

    proptest! {
        /// Whatever order they come in, and however often.
        #[test]
        fn a_datagram_is_whole_with_its_last_part(length in 1473usize..40_000, seed: u64) {
            let datagram = bytes(length, 5);
            let mut parts = cut(&datagram, 9, 1472);
            let mut assembler = Assembler::default();
            let mut draws = seed;
            let mut draw = |below: usize| {
                draws = draws.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (draws >> 33) as usize % below
            };
            for at in (1..parts.len()).rev() {
                parts.swap(at, draw(at + 1));
            }
            let (last, others) = parts.split_last().unwrap();
            for part in others {
                prop_assert_eq!(take(&mut assembler, 1, part), None);
                prop_assert_eq!(take(&mut assembler, 1, &others[draw(others.len())].clone()).is_some(), false);
            }
            prop_assert_eq!(take(&mut assembler, 1, last), Some(datagram));
            prop_assert_eq!((assembler.begun.len(), assembler.bytes, assembler.take_dropped()), (0, 0, 0));
        }
    }

    #[test]
    fn senders_and_datagrams_do_not_mix() {
        let mut assembler = Assembler::default();
        let cuts: Vec<_> =
            (0..3u8).map(|seed| (bytes(4138, seed), cut(&bytes(4138, seed), 9, 1472))).collect();
        for nth in 0..3 {
            for (port, (datagram, parts)) in (1..).zip(&cuts) {
                let whole = take(&mut assembler, port, &parts[nth]);
                assert_eq!(whole.as_deref(), (nth == 2).then_some(&datagram[..]));
            }
        }
        // The same number with another length, or another incarnation.
        let (short, long) = (cut(&bytes(3000, 1), 9, 1472), cut(&bytes(4138, 2), 9, 1472));
        for nth in 0..2 {
            assert_eq!(take(&mut assembler, 1, &long[nth]), None);
            assert_eq!(take(&mut assembler, 1, &short[nth]).is_none(), nth == 0 || short.len() > 2);
        }
    }

    #[test]
    fn what_misses_parts_is_bounded() {
        let mut assembler = Assembler::default();
        for number in 0..10 {
            assert_eq!(take(&mut assembler, 1, &cut(&bytes(4138, 0), number, 1472)[0]), None);
        }
        assert_eq!((assembler.begun.len(), assembler.take_dropped()), (MOST_OF_ONE, 6));
        for port in 2..500 {
            assert_eq!(take(&mut assembler, port, &cut(&bytes(40_000, 0), 1, 1472)[0]), None);
            assert!(assembler.begun.len() <= MOST && assembler.bytes <= MOST_BYTES);
        }
        assert!(assembler.take_dropped() > 400);
        // And all that is begun behind them is finished.
        let datagram = bytes(4138, 3);
        let wholes = cut(&datagram, 7, 1472).iter().filter_map(|part| take(&mut assembler, 1, part)).count();
        assert_eq!(wholes, 1);
    }

    #[test]
    fn a_peer_is_asked_and_believed_for_a_while() {
        let start = Instant::now();
        let mut peers = Peers::default();
        let way = |peers: &mut Peers, ms, length| {
            peers.way(start + Duration::from_millis(ms), peer(1), length, || 1472, || 77)
        };
        let whole = Way { parts: None, asks: None };
        assert_eq!(way(&mut peers, 0, 1472), whole, "needs no parts");
        assert_eq!(way(&mut peers, 0, 4138), Way { parts: None, asks: Some(77) });
        assert_eq!(way(&mut peers, 1, 4138), whole);
        assert!(!peers.on_answer(peer(1), 76) && !peers.on_answer(peer(2), 77));
        assert!(peers.on_answer(peer(1), 77) && !peers.on_answer(peer(1), 77));
        let parts = Way { parts: Some(1472), asks: None };
        assert_eq!((way(&mut peers, 2, 4138), way(&mut peers, 59_000, 4138)), (parts, parts));
        assert_eq!(way(&mut peers, 59_000, 1000), whole);
        // After a minute it is asked again, and not believed for long without an answer.
        assert_eq!(way(&mut peers, 60_001, 4138), Way { asks: Some(77), ..parts });
        for again in [60_202, 60_403] {
            assert_eq!(way(&mut peers, again, 4138), Way { asks: Some(77), ..parts });
        }
        assert_eq!((way(&mut peers, 60_604, 4138), way(&mut peers, 61_000, 4138)), (whole, whole));
        assert!(!peers.on_answer(peer(1), 77), "too late");
        assert_eq!(way(&mut peers, 121_000, 4138), Way { parts: None, asks: Some(77) });
    }

    #[test]
    fn peers_are_bounded() {
        let (now, mut peers) = (Instant::now(), Peers::default());
        for nth in 0..20_000u32 {
            let to = (nth.to_be_bytes(), 5).into();
            let _ = peers.way(now, to, 4138, || 1472, || 7);
            assert!(peers.known.len() <= MOST_PEERS);
        }
    }
}
