//! Datagrams that are longer than a packet of the path go in parts (docs/datagram-iwarp.md section 16).
//!
//! The system would cut them into fragments of IP, one datagram at a time: between two namespaces with an MTU
//! of 1500 a message of 4 KiB then takes four times as long as four of 1 KiB, which it takes in one call.
//! Parts are packets of one length, so those of many messages go in one call and come in one.
//!
//! [`Assembler`] puts them together, [`Peers`] knows who takes them, [`layout`] says how long they are.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use uwarp_wire::datagram::part::{Part, PartHead};

/// Bytes of the datagrams of which some parts have come, each of which counts as [`LEAST`] at least, so there
/// are 1,024 at most. For another one the older half goes of those of the address that has most.
const MOST_BYTES: usize = 4 << 20;
const LEAST: usize = 4096;
/// So many of one sender.
const MOST_OF_ONE: usize = 64;

/// Largest buffer that is used again.
const MOST_SPARE: usize = 8 << 10;

/// Peers that are known.
const MOST_PEERS: usize = 8192;
/// What is known of a peer, and of the path to it, is looked at anew after this time.
const KNOWN: Duration = Duration::from_secs(60);
/// A question is asked again after this time, and so often with each length. Who takes no parts does not
/// answer.
const AGAIN: Duration = Duration::from_millis(200);
const QUESTIONS: u8 = 2;
/// A packet of so many bytes passes on every path that programs may count on: an MTU of 1280 (RFC 8200
/// section 5), without the headers of IPv6 and UDP.
pub const FITS: usize = 1280 - 48;
/// A question is not longer than this. Whether longer packets pass, which few links have besides loopback, is
/// not asked.
const LONGEST_QUESTION: usize = 9000;
/// Parts of one datagram that are sent at most, and its bytes. What is longer goes as fragments of IP: a
/// socket must have room for all parts.
const MOST_SENT: usize = 32;
const MOST_LENGTH: usize = 32 << 10;

/// A datagram of which some parts have come.
#[derive(Debug)]
struct Assembly {
    /// Of its first part; its offset has no meaning.
    head: PartHead,
    /// Bytes of a part.
    each: usize,
    /// Which have come.
    have: u64,
    /// As far as they have come.
    bytes: Vec<u8>,
    born: u64,
}

impl Assembly {
    fn weight(&self) -> usize {
        usize::from(self.head.length).max(LEAST)
    }

    fn agrees(&self, part: &Part<'_>) -> bool {
        self.head == PartHead { offset: self.head.offset, ..part.head } && self.each == part.bytes.len()
    }

    /// Whether it is whole now.
    fn add(&mut self, part: &Part<'_>) -> bool {
        let (at, length) = (usize::from(part.head.offset), usize::from(self.head.length));
        let end = length.min(at + self.each);
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        if let (Some(place), Some(bytes)) = (self.bytes.get_mut(at..end), part.bytes.get(..end - at)) {
            place.copy_from_slice(bytes);
        }
        self.have |= 1 << (at / self.each);
        self.have.count_ones() as usize == length.div_ceil(self.each)
    }
}

/// Nobody waits for a datagram of which a part has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unexpected;

/// Who sends, and the number of the datagram.
type Name = (SocketAddr, u32);

/// Puts parts together.
#[derive(Debug, Default)]
pub struct Assembler {
    /// That of the last part: in order, nothing is looked up.
    current: Option<(Name, Assembly)>,
    /// The others.
    begun: HashMap<Name, Assembly>,
    /// How many of each sender, and bytes of each address.
    of_sender: HashMap<SocketAddr, usize>,
    of_address: HashMap<IpAddr, usize>,
    /// Bytes of all.
    bytes: usize,
    next: u64,
    spare: Vec<u8>,
    dropped: u64,
}

/// Whoever has one address of IPv6 has its network.
fn place(from: SocketAddr) -> IpAddr {
    match from.ip() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
        ip => ip,
    }
}

fn take<K: std::hash::Hash + Eq>(counts: &mut HashMap<K, usize>, of: &K, less: usize) {
    if let Some(count) = counts.get_mut(of) {
        *count -= less;
        if *count == 0 {
            counts.remove(of);
        }
    }
}

impl Assembler {
    /// Takes a part. `may_begin`: whether there is somebody to whom its datagram may go; asked with the first
    /// one to come. `Some`: the datagram is whole now, and unchecked. To be given back with
    /// [`Self::give_back`].
    ///
    /// # Errors
    /// [`Unexpected`]: there is nobody.
    pub fn take(
        &mut self,
        from: SocketAddr,
        part: &Part<'_>,
        may_begin: impl FnOnce() -> bool,
    ) -> Result<Option<Vec<u8>>, Unexpected> {
        let name = (from, part.head.number);
        let is_current = self.current.as_ref().is_some_and(|(current, _)| *current == name);
        if !is_current && !self.begun.is_empty() && self.begun.contains_key(&name) {
            let begun = self.begun.get_mut(&name).filter(|begun| begun.agrees(part));
            let is_whole = begun.is_some_and(|begun| begun.add(part));
            return Ok(if is_whole { self.remove(&name) } else { None });
        }
        if !is_current {
            if !may_begin() {
                return Err(Unexpected);
            }
            self.set_current_aside();
            let (bytes, born) = (std::mem::take(&mut self.spare), self.next);
            self.next += 1;
            let begun = Assembly { head: part.head, each: part.bytes.len(), have: 0, bytes, born };
            self.current = Some((name, begun));
        }
        let is_whole = match &mut self.current {
            Some((_, begun)) => begun.agrees(part) && begun.add(part),
            None => false,
        };
        Ok(if is_whole { self.current.take().map(|(_, whole)| whole.bytes) } else { None })
    }

    /// The buffer of a datagram that was whole.
    pub fn give_back(&mut self, mut bytes: Vec<u8>) {
        bytes.clear();
        // What an unfinished one does not use is not counted.
        if bytes.capacity() <= MOST_SPARE {
            self.spare = bytes;
        }
    }

    /// Datagrams that were dropped since the last question, because others came before their last part.
    pub fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }

    /// Another one begins before it is whole.
    fn set_current_aside(&mut self) {
        let Some((name, begun)) = self.current.take() else { return };
        let weight = begun.weight();
        if self.of_sender.get(&name.0).is_some_and(|count| *count >= MOST_OF_ONE) {
            self.drop_older(|(from, _)| *from == name.0);
        }
        while self.bytes + weight > MOST_BYTES {
            let most = self.of_address.iter().max_by_key(|(_, bytes)| **bytes).map(|(address, _)| *address);
            self.drop_older(|(from, _)| Some(place(*from)) == most);
        }
        *self.of_sender.entry(name.0).or_default() += 1;
        *self.of_address.entry(place(name.0)).or_default() += weight;
        self.bytes += weight;
        self.begun.insert(name, begun);
    }

    /// Drops the older half of these, at least one: so what was lost does not cost a search each time.
    fn drop_older(&mut self, of: impl Fn(&Name) -> bool) {
        let these = self.begun.iter().filter(|(name, _)| of(name));
        let mut these: Vec<(u64, Name)> = these.map(|(name, begun)| (begun.born, *name)).collect();
        these.sort_unstable_by_key(|(born, _)| *born);
        let count = these.len().div_ceil(2);
        for (_, name) in these.into_iter().take(count) {
            self.dropped += 1;
            if let Some(bytes) = self.remove(&name) {
                self.give_back(bytes);
            }
        }
    }

    fn remove(&mut self, name: &Name) -> Option<Vec<u8>> {
        let begun = self.begun.remove(name)?;
        take(&mut self.of_sender, &name.0, 1);
        take(&mut self.of_address, &place(name.0), begun.weight());
        self.bytes -= begun.weight();
        Some(begun.bytes)
    }
}

/// Into how many parts a datagram of `length` bytes is cut, and how many of its bytes each has, where packets
/// have `packet` bytes. `None`: it needs no parts, or too many, or is too long.
pub fn layout(length: usize, packet: usize) -> Option<(usize, usize)> {
    let most = packet.checked_sub(PartHead::LEN).filter(|most| *most > 0)?;
    let count = length.div_ceil(most);
    (length > packet && length <= MOST_LENGTH && count <= MOST_SENT).then(|| (count, length.div_ceil(count)))
}

/// What is known of a peer.
#[derive(Debug, Clone, Copy)]
struct Peer {
    since: Instant,
    /// Bytes of a packet of the path, as the system knows it.
    packet: usize,
    /// Bytes of a packet that the peer has shown to take parts in; 0: of none.
    proven: usize,
    token: u64,
    asked: Option<Instant>,
    questions: u8,
    answered: bool,
}

impl Peer {
    /// Bytes of the packets that the answer to the last question proves.
    fn asked_len(&self) -> usize {
        if self.questions <= QUESTIONS { self.packet } else { self.packet.min(FITS) }
    }
}

/// How a datagram goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// As it is, in one packet.
    Whole,
    /// As it is, in fragments of IP.
    Fragments,
    /// In parts, in packets of so many bytes.
    Parts(usize),
}

/// The question whether a peer takes parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    /// The answer returns it.
    pub token: u64,
    /// How long the question is.
    pub bytes: usize,
}

/// Who takes parts.
#[derive(Debug, Default)]
pub struct Peers {
    known: HashMap<SocketAddr, Peer>,
}

impl Peers {
    /// How a datagram of `length` bytes goes, and what is to be asked behind it. `packet`: bytes of a packet
    /// of the path, as the system knows it. `token`: at random.
    pub fn way(
        &mut self,
        now: Instant,
        to: SocketAddr,
        length: usize,
        packet: impl Fn() -> usize,
        token: impl FnOnce() -> u64,
    ) -> (How, Option<Question>) {
        if self.known.len() >= MOST_PEERS && !self.known.contains_key(&to) {
            self.known.retain(|_, peer| now < peer.since + KNOWN);
            if self.known.len() >= MOST_PEERS {
                return (How::Fragments, None);
            }
        }
        let new =
            Peer { since: now, packet: 0, proven: 0, token: 0, asked: None, questions: 0, answered: false };
        let peer = self.known.entry(to).or_insert(new);
        if peer.packet == 0 || now >= peer.since + KNOWN {
            let packet = packet().max(1);
            // What it took it takes, unless it does not say so now.
            *peer = Peer { packet, proven: peer.proven.min(packet), ..new };
        }
        let mut question = None;
        // A packet as long as the first link's may be too long behind it, and nobody says so.
        let may_ask = layout(length, peer.packet.min(FITS)).is_some();
        if may_ask && !peer.answered && peer.asked.is_none_or(|at| now >= at + AGAIN) {
            if peer.asked.is_some() && peer.asked_len() <= peer.proven {
                peer.proven = 0;
            }
            if peer.questions < 2 * QUESTIONS {
                if peer.questions == 0 {
                    peer.token = token();
                } else {
                    peer.packet = packet().max(1);
                }
                (peer.asked, peer.questions) = (Some(now), peer.questions + 1);
                question =
                    Some(Question { token: peer.token, bytes: peer.asked_len().min(LONGEST_QUESTION) });
            }
        }
        let how = match peer.proven {
            proven if proven > 0 && layout(length, proven).is_some() => How::Parts(proven),
            _ if length <= peer.packet => How::Whole,
            _ => How::Fragments,
        };
        (how, question)
    }

    /// An answer has come, perhaps a late one. Returns whether there was such a question.
    pub fn on_answer(&mut self, from: SocketAddr, token: u64) -> bool {
        let Some(peer) = self.known.get_mut(&from) else { return false };
        let is_ours = peer.questions > 0 && peer.token == token;
        if is_ours {
            // The answer may be to an earlier question, which was not shorter.
            (peer.proven, peer.answered) = (peer.asked_len(), true);
        }
        is_ours
    }

    /// The last question did not go out: the socket has no room.
    pub fn was_not_asked(&mut self, to: SocketAddr) {
        if let Some(peer) = self.known.get_mut(&to) {
            (peer.asked, peer.questions) = (None, peer.questions.saturating_sub(1));
        }
    }

    /// The system says that packets to this peer are too long. It is asked again, not at once.
    pub fn forget(&mut self, now: Instant, to: SocketAddr) {
        if let Some(peer) = self.known.get_mut(&to) {
            let packet = peer.packet.min(FITS);
            *peer = Peer { packet, proven: 0, asked: Some(now), questions: 0, answered: false, ..*peer };
        }
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
                qkey: 3,
                number,
                length: datagram.len() as u16,
                offset: (nth * each) as u16,
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
        assembler.take(peer(port), &Part::parse(part).unwrap(), || true).unwrap()
    }

    #[test]
    fn parts_are_of_one_length_and_fit() {
        assert_eq!(layout(1472, 1472), None);
        assert_eq!(layout(1473, 1472), Some((2, 737)));
        assert_eq!(layout(4138, 1472), Some((3, 1380)));
        assert_eq!((layout(65_507, 1472), layout(40_000, 8972), layout(40_000, 500)), (None, None, None));
        assert_eq!(layout(4138, 20), None);
        for length in 1473..=MOST_LENGTH {
            let (count, each) = layout(length, 1472).unwrap();
            assert!(each + PartHead::LEN <= 1472 && (count - 1) * each < length && count * each >= length);
        }
    }

    proptest! {
        /// Whatever order they come in, and however often.
        #[test]
        fn a_datagram_is_whole_with_its_last_part(length in 1473usize..32_000, seed: u64) {
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
                let again = others[draw(others.len())].clone();
                prop_assert!(take(&mut assembler, 1, &again).is_none());
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
        // The same number with another length: who has it first goes on.
        let (short, long) = (cut(&bytes(3000, 1), 9, 1472), cut(&bytes(4138, 2), 9, 1472));
        for nth in 0..3 {
            assert_eq!(take(&mut assembler, 1, &long[nth]).is_some(), nth == 2);
            assert!(nth == 2 || take(&mut assembler, 1, &short[nth]).is_none());
        }
        let part = Part::parse(&long[0]).unwrap();
        assert_eq!(assembler.take(peer(1), &part, || false), Err(Unexpected));
        assert!(
            assembler.begun.is_empty() && assembler.of_sender.is_empty() && assembler.of_address.is_empty()
        );
    }

    #[test]
    fn what_misses_parts_is_bounded() {
        let mut assembler = Assembler::default();
        let first = |length, number| cut(&bytes(length, 0), number, 1472).swap_remove(0);
        for number in 0..100 {
            assert_eq!(take(&mut assembler, 1, &first(4138, number)), None);
        }
        assert_eq!((assembler.begun.len(), assembler.take_dropped()), (35, 64));
        // Somebody at another address begins one. All ports of the first one then cost only that address.
        let other: SocketAddr = ([10, 0, 0, 2], 5).into();
        let mine = cut(&bytes(4138, 3), 7, 1472);
        let add = |assembler: &mut Assembler, nth: usize| {
            assembler.take(other, &Part::parse(&mine[nth]).unwrap(), || true).unwrap().is_some()
        };
        assert!(!add(&mut assembler, 0));
        for port in 2..5000 {
            assert_eq!(take(&mut assembler, port, &first(32_000, 1)), None);
            assert!(assembler.begun.len() <= 1024 && assembler.bytes <= MOST_BYTES);
        }
        assert!(assembler.take_dropped() > 3000);
        assert!(!add(&mut assembler, 1) && add(&mut assembler, 2));
    }

    #[test]
    fn a_peer_is_asked_and_believed_for_a_while() {
        let start = Instant::now();
        let mut peers = Peers::default();
        let way = |peers: &mut Peers, ms, length| {
            peers.way(start + Duration::from_millis(ms), peer(1), length, || 1472, || 77)
        };
        let asks = |bytes| Some(Question { token: 77, bytes });
        assert_eq!(way(&mut peers, 0, FITS), (How::Whole, None));
        assert_eq!(way(&mut peers, 0, 60_000), (How::Fragments, None));
        assert_eq!(way(&mut peers, 0, 1472), (How::Whole, asks(1472)));
        assert_eq!(way(&mut peers, 1, 4138), (How::Fragments, None));
        assert!(!peers.on_answer(peer(1), 76) && !peers.on_answer(peer(2), 77));
        assert!(peers.on_answer(peer(1), 77));
        let parts = (How::Parts(1472), None);
        assert_eq!((way(&mut peers, 2, 4138), way(&mut peers, 59_000, 4138)), (parts, parts));
        assert_eq!(way(&mut peers, 59_000, 1000), (How::Whole, None));
        // After a minute it is asked again, and not believed for long without an answer.
        assert_eq!(way(&mut peers, 60_001, 4138), (How::Parts(1472), asks(1472)));
        assert_eq!(way(&mut peers, 60_100, 4138), parts);
        for (again, bytes) in [(60_202, 1472), (60_403, FITS), (60_604, FITS)] {
            assert_eq!(way(&mut peers, again, 4138), (How::Fragments, asks(bytes)));
        }
        assert_eq!(way(&mut peers, 60_900, 4138), (How::Fragments, None));
        // It was busy; which question it answers is not known.
        assert!(peers.on_answer(peer(1), 77));
        assert_eq!(way(&mut peers, 61_000, 4138), (How::Parts(FITS), None));
        // As long as the first link takes, and longer than what was shown to pass.
        assert_eq!(way(&mut peers, 61_000, 1400), (How::Parts(FITS), None));
        peers.forget(start + Duration::from_millis(61_001), peer(1));
        assert_eq!(way(&mut peers, 61_100, 4138), (How::Fragments, None));
        assert_eq!(way(&mut peers, 61_201, 4138), (How::Fragments, asks(FITS)));
    }

    /// The path takes less than its first link, and nobody says so.
    #[test]
    fn parts_are_as_long_as_a_question_that_was_answered() {
        let (start, mut peers) = (Instant::now(), Peers::default());
        let mut answered = None;
        for ms in 0..2000 {
            let now = start + Duration::from_millis(ms);
            let (how, question) = peers.way(now, peer(1), 4138, || 1472, || 77);
            if question.is_some_and(|question| question.bytes <= 1400) {
                assert!(peers.on_answer(peer(1), 77));
                answered.get_or_insert(ms);
            }
            let is_known = answered.is_some_and(|at| at < ms);
            assert_eq!(how, if is_known { How::Parts(FITS) } else { How::Fragments }, "{ms}");
        }
        assert_eq!(answered, Some(400));
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
