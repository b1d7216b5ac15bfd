//! Receives that a program has posted for messages, on both ends of an upgraded socket. No sockets, no clock,
//! no memory.
//!
//! ```text
//!   post ─▶ announcement ─ entries, message Posted ─▶ peer_posted ─▶ fit, take ◀─ a message to send
//!                                                                       │
//!   placed ◀───────────────────── message Placed ◀─ Writes into them ◀──┘
//! ```
//!
//! A receive is one entry of the peer's table of receives for each piece of its memory. The sender writes
//! into that memory itself, so nothing is copied, and it waits until there is a receive.

use std::collections::VecDeque;

use smallvec::SmallVec;

use crate::machine::Violation;
use crate::wire::Target;

/// Entries of a table of receives.
pub const ENTRIES: u32 = 64;
/// Entries of one announcement.
pub const AT_ONCE: usize = 4;
/// In the length of an entry: the receive has further pieces.
const MORE: u32 = 1 << 31;
/// Most bytes of a message, and of a piece of a receive.
pub const MOST: u32 = (1 << 29) - 1;

/// A message about receives: ops that rsockets do not use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    /// So many entries were written.
    Posted(u32),
    /// The oldest receive holds a message of so many bytes.
    Placed(u32),
}

mod op {
    pub const SHIFT: u32 = 29;
    pub const POSTED: u32 = 1;
    pub const PLACED: u32 = 2;
}

impl Notice {
    /// From the number on the wire.
    pub fn from_bits(bits: u32) -> Option<Self> {
        match bits >> op::SHIFT {
            op::POSTED => Some(Self::Posted(bits & MOST)),
            op::PLACED => Some(Self::Placed(bits & MOST)),
            _ => None,
        }
    }

    /// The number on the wire.
    pub fn bits(self) -> u32 {
        match self {
            Self::Posted(count) => op::POSTED << op::SHIFT | count & MOST,
            Self::Placed(len) => op::PLACED << op::SHIFT | len & MOST,
        }
    }
}

/// Whether a message can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fit {
    /// The peer has posted no receive.
    NoReceive,
    /// It is longer than the receive that is next.
    TooLong,
    /// Into so many pieces.
    Pieces(u32),
}

/// What both ends have posted.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Our receives: pieces and bytes of each.
    ours: VecDeque<(u32, u64)>,
    /// Entries of ours that the peer has not used, and those of them that it knows.
    outstanding: u32,
    announced: u32,
    unannounced: VecDeque<Target>,
    /// The entry of the peer's table that we write next, and that of ours that the peer does.
    next: u32,
    peer_next: u32,
    theirs: VecDeque<Target>,
}

impl Ledger {
    /// Posts a receive of these pieces; false: the table has no room for it.
    pub fn post(&mut self, pieces: &[Target]) -> bool {
        let count = pieces.len() as u32;
        if count == 0 || self.outstanding + count > ENTRIES {
            return false;
        }
        self.outstanding += count;
        self.ours.push_back((count, pieces.iter().map(|piece| u64::from(piece.length)).sum()));
        let last = pieces.len() - 1;
        self.unannounced.extend(pieces.iter().enumerate().map(|(i, piece)| Target {
            length: piece.length & MOST | if i < last { MORE } else { 0 },
            ..*piece
        }));
        true
    }

    /// What the peer must be told next: the first entry, and what belongs there and behind it.
    pub fn announcement(&mut self) -> Option<(u32, SmallVec<[Target; AT_ONCE]>)> {
        let first = self.next;
        // The table ends there.
        let room = (ENTRIES - first).min(AT_ONCE as u32).min(self.unannounced.len() as u32);
        let entries: SmallVec<[Target; AT_ONCE]> = self.unannounced.drain(..room as usize).collect();
        self.next = (first + room) % ENTRIES;
        self.announced += room;
        (room > 0).then_some((first, entries))
    }

    /// Whether there is something to announce.
    pub fn has_announcement(&self) -> bool {
        !self.unannounced.is_empty()
    }

    /// The peer has written so many entries: which ones they are. Each goes to [`Self::peer_posted`].
    pub fn written(&mut self, count: u32) -> Result<impl Iterator<Item = u32> + use<>, Violation> {
        if self.theirs.len() as u32 + count > ENTRIES {
            return Err(Violation::TooManyMessages);
        }
        let first = self.peer_next;
        self.peer_next = (first + count) % ENTRIES;
        Ok((0..count).map(move |i| (first + i) % ENTRIES))
    }

    /// An entry that the peer has written.
    pub fn peer_posted(&mut self, entry: Target) {
        self.theirs.push_back(entry);
    }

    /// Whether a message of this length can go into the peer's next receive.
    pub fn fit(&self, len: u64) -> Fit {
        let Some(last) = self.theirs.iter().position(|entry| entry.length & MORE == 0) else {
            return Fit::NoReceive;
        };
        let (mut room, mut pieces) = (0, 0);
        for entry in self.theirs.iter().take(last + 1) {
            if room < len || pieces == 0 {
                pieces += 1;
            }
            room += u64::from(entry.length & MOST);
        }
        if len > room { Fit::TooLong } else { Fit::Pieces(pieces) }
    }

    /// Uses the peer's next receive for a message that fits: where its bytes belong.
    pub fn take(&mut self, mut len: u64) -> SmallVec<[Target; AT_ONCE]> {
        let mut pieces = SmallVec::new();
        while let Some(entry) = self.theirs.pop_front() {
            let length = u64::from(entry.length & MOST).min(len);
            if length > 0 || pieces.is_empty() {
                pieces.push(Target { length: length as u32, ..entry });
            }
            len -= length;
            if entry.length & MORE == 0 {
                break;
            }
        }
        pieces
    }

    /// The peer has placed a message in our oldest receive.
    pub fn placed(&mut self, len: u32) -> Result<(), Violation> {
        match self.ours.front() {
            Some((count, _)) if *count > self.announced => Err(Violation::TooManyMessages),
            None => Err(Violation::TooManyMessages),
            Some((_, room)) if u64::from(len) > *room => Err(Violation::TooManyBytes),
            Some(&(count, _)) => {
                self.ours.pop_front();
                self.outstanding -= count;
                self.announced -= count;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(addr: u64, length: u32) -> Target {
        Target { addr, key: 7, length }
    }

    /// Tells the peer of all that was posted.
    fn announce(from: &mut Ledger, to: &mut Ledger, table: &mut [Target; ENTRIES as usize]) {
        while let Some((first, entries)) = from.announcement() {
            for (i, entry) in entries.iter().enumerate() {
                table[first as usize + i] = *entry;
            }
            let written: Vec<u32> = to.written(entries.len() as u32).unwrap().collect();
            assert_eq!(written[0], first);
            written.into_iter().for_each(|at| to.peer_posted(table[at as usize]));
        }
    }

    #[test]
    fn messages_go_into_receives_in_order_for_ever() {
        let (mut a, mut b) = (Ledger::default(), Ledger::default());
        let mut table = [Target::default(); ENTRIES as usize];
        assert_eq!(b.fit(0), Fit::NoReceive);
        for round in 0..1000u64 {
            assert!(a.post(&[piece(round, 10)]));
            assert!(a.post(&[piece(1000, 5), piece(2000, 0), piece(3000, 7)]));
            announce(&mut a, &mut b, &mut table);
            assert_eq!((b.fit(11), b.fit(10), b.fit(0)), (Fit::TooLong, Fit::Pieces(1), Fit::Pieces(1)));
            assert_eq!(b.take(4).as_slice(), [piece(round, 4)]);
            a.placed(4).unwrap();
            assert_eq!((b.fit(5), b.fit(6), b.fit(13)), (Fit::Pieces(1), Fit::Pieces(3), Fit::TooLong));
            assert_eq!(b.take(6).as_slice(), [piece(1000, 5), piece(3000, 1)]);
            a.placed(6).unwrap();
            assert_eq!(b.fit(0), Fit::NoReceive);
        }
    }

    #[test]
    fn the_table_is_never_written_beyond_what_the_peer_has_used() {
        let mut a = Ledger::default();
        for i in 0..ENTRIES / 2 {
            assert!(a.post(&[piece(u64::from(i), 1), piece(0, 1)]));
        }
        assert!(!a.post(&[piece(0, 1)]) && !a.post(&[]));
        while a.announcement().is_some() {}
        a.placed(2).unwrap();
        assert!(!a.post(&[piece(0, 1); 3]) && a.post(&[piece(0, 1); 2]));
    }

    #[test]
    fn a_peer_that_lies_is_found_out() {
        let mut a = Ledger::default();
        assert_eq!(a.placed(0), Err(Violation::TooManyMessages));
        assert!(a.post(&[piece(0, 8)]));
        // It cannot know of that one.
        assert_eq!(a.placed(0), Err(Violation::TooManyMessages));
        a.announcement().unwrap();
        assert_eq!(a.placed(9), Err(Violation::TooManyBytes));
        a.placed(8).unwrap();
        assert_eq!(a.written(ENTRIES + 1).err(), Some(Violation::TooManyMessages));
        for at in a.written(ENTRIES).unwrap() {
            assert!(at < ENTRIES);
            a.peer_posted(piece(0, MORE | 1));
        }
        assert_eq!(a.written(1).err(), Some(Violation::TooManyMessages));
        // A receive without an end is none.
        assert_eq!(a.fit(0), Fit::NoReceive);
    }

    #[test]
    fn notices_are_messages_that_rsockets_do_not_know() {
        use crate::wire::Message;
        for notice in [Notice::Posted(3), Notice::Placed(MOST)] {
            assert_eq!(Notice::from_bits(notice.bits()), Some(notice));
            assert_eq!(Message::from_bits(notice.bits()), Message::Unknown(notice.bits()));
        }
        assert_eq!(Notice::from_bits(Message::Data(5).bits()), None);
    }
}
