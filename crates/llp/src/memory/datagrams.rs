//! Datagrams through a lane of a slab, both ways.
//!
//! ```text
//! record = length, 8 bytes | the datagram as UDP would carry it | up to a multiple of 8
//! ```
//!
//! Who finds no room may wait for it ([`Outbox::wants_room`]), and when it has waited long enough, its
//! datagrams are lost and counted where they would have arrived ([`Outbox::lose`]), as those that find a full
//! socket. A record of length 0 is no datagram: there is one, and it shows that an end uses the lane.
//!
//! The rules of [`super::ledger`] hold. The peer may write anything: a length is copied before it is
//! believed, and bytes are copied before they are looked at.

use std::sync::Arc;

use uwarp_mem::{self as mem, MemSeg, owned};

use super::lane::End;
use super::ledger::{Flags, Mine, Nonsense, Theirs};
use super::slab::LONG_RING;
use crate::sync::{Ordering, fence};

/// Bytes before a datagram. All records are multiples of it.
const HEAD: u64 = 8;
/// No datagram is longer.
const MOST: usize = 65_535;

/// What became of a datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// It is in the ring.
    Taken,
    /// There is no room.
    Full,
    /// The peer does not look at the ring any more.
    Over,
}

/// What a look at the ring has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Took {
    /// A datagram of this length.
    Datagram(usize),
    /// Nothing yet.
    Nothing,
    /// Nothing more comes: the peer has left, or is gone, or has broken the rules.
    Over,
}

/// Where this process writes.
#[derive(Debug)]
pub struct Outbox {
    end: Arc<End>,
    mine: Mine,
    theirs: Theirs,
    lost: u64,
    over: bool,
}

/// From where it reads.
#[derive(Debug)]
pub struct Inbox {
    end: Arc<End>,
    mine: Mine,
    theirs: Theirs,
    /// As the peer has counted.
    lost: u64,
    /// The peer has shown that it uses the lane.
    begun: bool,
    broken: bool,
}

impl End {
    /// The two directions. The lane is one for datagrams, and left when both are dropped.
    pub fn into_datagrams(self) -> (Outbox, Inbox) {
        let end = Arc::new(self);
        let (mine, theirs) = (Mine::default(), Theirs::default());
        let outbox = Outbox { end: end.clone(), mine, theirs, lost: 0, over: false };
        (outbox, Inbox { end, mine, theirs, lost: 0, begun: false, broken: false })
    }

    /// Whether the peer has left, or is gone.
    #[inline]
    fn is_left(&self) -> bool {
        Theirs::flags(self.their_line()).ends() || self.slab.pair().is_over()
    }
}

fn padded(len: usize) -> u64 {
    (len as u64).next_multiple_of(HEAD)
}

/// The stretch of a ring from this position to the ring's end.
#[inline]
fn place(ring: MemSeg, base: u64, at: u64) -> MemSeg {
    let offset = at.wrapping_sub(base) % LONG_RING;
    ring.part(offset as usize, LONG_RING as usize)
}

impl Outbox {
    /// Writes a datagram; [`Self::show`] follows. An empty one only shows that this end uses the lane.
    pub fn put(&mut self, bytes: &[u8]) -> Put {
        if self.over || bytes.len() > MOST || self.end.is_left() {
            return Put::Over;
        }
        let End { slab, lane, .. } = &*self.end;
        let line = slab.line(slab.side(), *lane);
        let tail = self.mine.tail;
        let Ok(head) = self.theirs.hear_head(self.end.their_line(), tail) else {
            self.over = true;
            return Put::Over;
        };
        if head == tail {
            self.mine.rebase(line);
        }
        let record = HEAD + padded(bytes.len());
        if LONG_RING - (tail - head) < record {
            return Put::Full;
        }
        if self.mine.flags.has(Flags::WANTS_ROOM) {
            self.mine.says(line, self.mine.flags.without(Flags::WANTS_ROOM));
        }
        let (ring, base) = (slab.ring(slab.side(), *lane), self.mine.base());
        let length = (bytes.len() as u64).to_ne_bytes();
        let mut good = write(place(ring, base, tail), &length) == length.len();
        let mut done = 0;
        while good && done < bytes.len() {
            let rest = bytes.get(done..).unwrap_or_default();
            let n = write(place(ring, base, tail + HEAD + done as u64), rest);
            good = n > 0;
            done += n;
        }
        if !good {
            self.over = true;
            return Put::Over;
        }
        self.mine.tail += record;
        Put::Taken
    }

    /// The peer tells when there is room. What it has taken before it knew of this, the next [`Self::put`]
    /// sees.
    pub fn wants_room(&mut self) {
        let End { slab, lane, .. } = &*self.end;
        self.mine.says(slab.line(slab.side(), *lane), self.mine.flags.with(Flags::WANTS_ROOM));
        fence(Ordering::SeqCst);
    }

    /// Whether the peer does not look at the ring any more, or has broken the rules.
    pub fn is_over(&self) -> bool {
        self.over || self.end.is_left()
    }

    /// Whether the peer has taken anything since [`Self::put`] has looked, or is gone.
    #[inline]
    pub fn may_have_room(&self) -> bool {
        self.theirs.has_taken(self.end.their_line()) || self.is_over()
    }

    /// A datagram is lost: there was no room for it.
    pub fn lose(&mut self) {
        let End { slab, lane, .. } = &*self.end;
        self.lost += 1;
        self.mine.wants(slab.line(slab.side(), *lane), self.lost);
    }

    /// The peer sees what was written.
    pub fn show(&mut self) {
        let End { slab, lane, .. } = &*self.end;
        if self.mine.show_tail(slab.line(slab.side(), *lane)) {
            slab.tell(*lane);
        }
    }
}

/// Copies as many bytes as there are and as fit; returns how many.
#[inline]
fn write(to: MemSeg, bytes: &[u8]) -> usize {
    let from = MemSeg { addr: bytes.as_ptr().expose_provenance() as u64, len: bytes.len() };
    owned::from_program(to, from).unwrap_or(0)
}

impl Inbox {
    /// What the engine calls the lane from now on.
    pub fn set_name(&self, name: u64) {
        self.end.set_name(name);
    }

    /// Whether [`Self::take`] may find anything: a datagram, or the end. Cheap.
    #[inline]
    pub fn has_news(&self) -> bool {
        self.theirs.has_written(self.end.their_line(), self.mine.head) || self.broken || self.end.is_left()
    }

    /// Copies the next datagram to the front of `stage`, which has room for the longest.
    pub fn take(&mut self, stage: &mut [u8]) -> Took {
        loop {
            match self.take_record(stage) {
                // The peer uses the lane. It says so once: otherwise this could go on for ever.
                Ok(Took::Datagram(0)) if !self.begun => self.begun = true,
                Ok(took) if took != Took::Datagram(0) => return took,
                Ok(_) | Err(Nonsense) => {
                    self.broken = true;
                    return Took::Over;
                }
            }
        }
    }

    fn take_record(&mut self, stage: &mut [u8]) -> Result<Took, Nonsense> {
        let line = self.end.their_line();
        let head = self.mine.head;
        if self.broken {
            return Err(Nonsense);
        }
        if self.theirs.tail == head && self.theirs.hear_tail_of(line, head, LONG_RING)? == head {
            // What came before the end was written before it was said.
            if !self.end.is_left() || self.theirs.hear_tail_of(line, head, LONG_RING)? != head {
                return Ok(Took::Nothing);
            }
            return Ok(Took::Over);
        }
        let waiting = self.theirs.tail - head;
        let End { slab, lane, .. } = &*self.end;
        let (ring, base) = (slab.ring(slab.side().peer(), *lane), Theirs::base(line));
        let first = place(ring, base, head);
        let length: [u8; HEAD as usize] = owned::read(first).map_err(|_| Nonsense)?;
        let length = usize::try_from(u64::from_ne_bytes(length)).map_err(|_| Nonsense)?;
        let room = stage.get_mut(..length).filter(|_| length <= MOST).ok_or(Nonsense)?;
        let record = HEAD + padded(length);
        if record > waiting {
            return Err(Nonsense);
        }
        let mut done = 0;
        while done < room.len() {
            let rest = room.get_mut(done..).unwrap_or_default();
            let n = mem::copy_to(place(ring, base, head + HEAD + done as u64), rest).map_err(|_| Nonsense)?;
            if n == 0 {
                return Err(Nonsense);
            }
            done += n;
        }
        self.mine.head += record;
        Ok(Took::Datagram(length))
    }

    /// Whether the peer has broken the rules.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// What was taken is room for the peer.
    pub fn release(&mut self) {
        let End { slab, lane, .. } = &*self.end;
        if self.mine.show_head(slab.line(slab.side(), *lane)) {
            fence(Ordering::SeqCst);
            if Theirs::flags(self.end.their_line()).has(Flags::WANTS_ROOM) {
                slab.tell(*lane);
            }
        }
    }

    /// How many more datagrams have found no room, as the peer says.
    pub fn newly_lost(&mut self) -> u64 {
        let lost = Theirs::want(self.end.their_line());
        let new = lost.saturating_sub(self.lost);
        self.lost = lost;
        // It may say anything.
        new.min(u64::from(u32::MAX))
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::super::pair::Pair;
    use super::super::slab::{Carries, Slab};
    use super::*;

    type Ends = [(Outbox, Inbox); 2];

    fn ends() -> (Ends, [Arc<Slab>; 2]) {
        mem::guard::arm();
        let pair = || Arc::new(Pair::default());
        let (made, fd) = Slab::create_for(Carries::Datagrams, pair()).unwrap();
        let opened = Slab::open_for(Carries::Datagrams, fd, pair()).unwrap();
        let lane = made.take_lane().unwrap();
        assert!(opened.claim_lane(lane) && !opened.claim_lane(lane));
        let slabs = [made, opened];
        let ends = [&slabs[0], &slabs[1]].map(|slab| {
            let mut end = End::new(slab.clone(), lane);
            end.agreed();
            end.into_datagrams()
        });
        (ends, slabs)
    }

    fn take(inbox: &mut Inbox) -> Option<Vec<u8>> {
        let mut stage = vec![0; 65_536];
        match inbox.take(&mut stage) {
            Took::Datagram(len) => Some(stage[..len].to_vec()),
            Took::Nothing => None,
            Took::Over => panic!("it is not over"),
        }
    }

    fn bytes(seed: usize, len: usize) -> Vec<u8> {
        (0..len).map(|i| ((seed + i) % 251) as u8).collect()
    }

    #[test]
    fn what_is_written_is_read_whole_and_in_order_both_ways() {
        let ([(mut to_b, mut from_b), (mut to_a, mut from_a)], _slabs) = ends();
        assert_eq!((take(&mut from_a), from_a.has_news()), (None, false));
        for round in 0..400 {
            let lens = [1, 7, 8, 9, 64, 1090, 4160, 65_507].map(|len| len - round % 2 * (len > 1) as usize);
            for (outbox, inbox) in [(&mut to_b, &mut from_a), (&mut to_a, &mut from_b)] {
                for len in lens {
                    assert_eq!(outbox.put(&bytes(round, len)), Put::Taken);
                }
                assert_eq!((inbox.has_news(), take(inbox)), (false, None), "not before it is shown");
                outbox.show();
                assert!(inbox.has_news());
                for len in lens {
                    assert!(take(inbox) == Some(bytes(round, len)), "round {round}, {len} bytes");
                }
                assert_eq!(take(inbox), None);
                // Half of the rounds go on in the middle of the ring.
                if round % 2 == 0 {
                    inbox.release();
                }
            }
        }
    }

    #[test]
    fn an_empty_record_is_news_and_no_datagram() {
        let ([(mut to_b, _), (_, mut from_a)], _slabs) = ends();
        assert_eq!(to_b.put(&[]), Put::Taken);
        to_b.show();
        assert!(from_a.has_news());
        assert_eq!((take(&mut from_a), from_a.has_news()), (None, false));
    }

    #[test]
    fn a_peer_that_says_for_ever_that_it_begins_breaks_the_rules() {
        let ([(mut to_b, _), (_, mut from_a)], _slabs) = ends();
        for _ in 0..1000 {
            assert_eq!(to_b.put(&[]), Put::Taken);
        }
        to_b.show();
        assert_eq!(from_a.take(&mut vec![0; 65_536]), Took::Over);
        assert!(from_a.is_broken());
    }

    #[test]
    fn what_finds_no_room_is_lost_and_counted_at_the_receiver() {
        let ([(mut to_b, _), (_, mut from_a)], _slabs) = ends();
        let mut taken = 0;
        while to_b.put(&bytes(taken, 4000)) == Put::Taken {
            taken += 1;
            to_b.show();
        }
        assert_eq!(taken as u64, LONG_RING / 4008);
        to_b.lose();
        assert_eq!((to_b.put(&bytes(1, 4000)), to_b.put(&[7])), (Put::Full, Put::Taken));
        to_b.lose();
        to_b.show();
        assert_eq!((from_a.newly_lost(), from_a.newly_lost()), (2, 0));
        for i in 0..taken {
            assert!(take(&mut from_a) == Some(bytes(i, 4000)), "{i}");
        }
        assert_eq!((take(&mut from_a), take(&mut from_a)), (Some(vec![7]), None));
        assert_eq!(to_b.put(&bytes(1, 4000)), Put::Full, "what was taken is no room before it is released");
        to_b.wants_room();
        assert!(!to_b.may_have_room());
        from_a.release();
        assert!(to_b.may_have_room());
        assert_eq!(to_b.put(&bytes(1, 4000)), Put::Taken);
        to_b.show();
        assert_eq!((take(&mut from_a), from_a.newly_lost()), (Some(bytes(1, 4000)), 0));
    }

    #[test]
    fn what_was_written_before_the_end_is_read_and_nothing_is_written_after_it() {
        for leaves in [true, false] {
            let ([(mut to_b, from_b), (mut to_a, mut from_a)], slabs) = ends();
            to_b.put(b"last words");
            to_b.show();
            if leaves {
                drop((to_b, from_b));
            } else {
                // The process was killed.
                slabs[1].pair().end();
            }
            assert_eq!(to_a.put(b"anybody there?"), Put::Over);
            assert!(from_a.has_news());
            assert_eq!(take(&mut from_a), Some(b"last words".to_vec()));
            let mut stage = vec![0; 65_536];
            assert_eq!((from_a.take(&mut stage), from_a.has_news()), (Took::Over, true));
        }
    }

    #[test]
    fn a_lane_serves_others_when_both_ends_have_left_it() {
        let (ends, slabs) = ends();
        let others: Vec<_> = std::iter::from_fn(|| slabs[0].take_lane()).collect();
        assert_eq!(others.len(), 15);
        let [a, (to_a, from_a)] = ends;
        drop(a);
        assert_eq!(slabs[0].take_lane(), None, "the peer may still read what was written");
        drop(to_a);
        assert_eq!(slabs[0].take_lane(), None);
        drop(from_a);
        assert_eq!(slabs[0].take_lane(), Some(0));
        assert!(slabs[1].claim_lane(0) && !slabs[1].claim_lane(16), "there are 16");
    }
}
