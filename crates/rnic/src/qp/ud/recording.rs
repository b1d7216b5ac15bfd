//! RDMA Write-Records that arrive (docs/datagram-iwarp.md section 15).
//!
//! A message ends when it is whole, or when no more of it is to be expected: its last segment, or one of a
//! later message of its sender, has come, and then nothing for a moment; or nothing at all for longer.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use uwarp_mem as mem;
use uwarp_wire::datagram::record::Segment;

use crate::mr::{Access, MrCache, Part};
use crate::qp::datagrams::{Arrival, Dropped};
use crate::qp::records::{About, Records};
use crate::qp::rights::Rights;

/// How long the rest of a message may be late when its sender has gone on. Longer than most networks change
/// the order of packets.
const REST: Duration = Duration::from_millis(1);
/// The same when the sender may still be sending: some time slices of a busy processor.
const NEXT: Duration = Duration::from_millis(100);
/// Messages of a sender behind its latest one of which it is known whether they have ended. Older ones have.
const BEHIND: u32 = 64;
/// Senders that are known. Of more, those that were silent longest are forgotten, with what they have open.
const MOST_SENDERS: usize = 1024;

/// A sender: its address, its queue pair, and which incarnation of that.
type Sender = (IpAddr, u32, u32);

/// A message of a sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    sender: Sender,
    message: u32,
}

struct Open {
    record: u64,
    last: Instant,
    /// Its sender has sent all of it.
    is_sent: bool,
}

/// What is known of a sender.
struct Known {
    /// Its latest message.
    latest: u32,
    /// By how far they are behind that one: those that have ended.
    ended: u64,
    /// Its messages that are open.
    open: usize,
    last: Instant,
}

impl Known {
    /// How far a message is behind the latest one; negative: before it. Numbers wrap.
    fn behind(&self, message: u32) -> i32 {
        self.latest.wrapping_sub(message).cast_signed()
    }

    fn has_ended(&self, message: u32) -> bool {
        match u32::try_from(self.behind(message)) {
            Ok(behind @ ..BEHIND) => self.ended >> behind & 1 == 1,
            Ok(_) => true,
            Err(_) => false,
        }
    }

    /// A message has come.
    fn note(&mut self, message: u32, now: Instant) {
        self.last = now;
        let ahead = self.behind(message).unsigned_abs();
        if self.behind(message) < 0 {
            self.ended = if ahead < BEHIND { self.ended << ahead } else { 0 };
            self.latest = message;
        }
    }

    fn end(&mut self, message: u32) {
        self.open = self.open.saturating_sub(1);
        if let Ok(behind @ ..BEHIND) = u32::try_from(self.behind(message)) {
            self.ended |= 1 << behind;
        }
    }
}

impl Open {
    fn due(&self) -> Instant {
        self.last + if self.is_sent { REST } else { NEXT }
    }
}

/// See the head of this file.
pub(super) struct Recording {
    pub records: Records,
    pub rights: Rights,
    remote: MrCache,
    open: FxHashMap<Key, Open>,
    senders: FxHashMap<Sender, Known>,
    /// No message is due before that. (One may be due later than it says.)
    due: Option<Instant>,
}

impl Recording {
    pub fn new(qpn: u32, records: Records, rights: Rights) -> Self {
        Self {
            records,
            rights,
            remote: MrCache::of_peer(qpn),
            open: FxHashMap::default(),
            senders: FxHashMap::default(),
            due: None,
        }
    }

    /// Places a segment and marks it as valid, or does neither. `Some`: its message is whole now, and the
    /// name of its record.
    pub fn place(
        &mut self,
        segment: &Segment<'_>,
        arrival: &Arrival,
        pd: u32,
        now: Instant,
    ) -> Result<Option<u64>, Dropped> {
        let head = &segment.head;
        let need = Access::REMOTE_WRITE;
        let checked = self.rights.check(Some(head.job_key), arrival.from, head.source_qpn, need);
        checked.map_err(|_| Dropped::Access)?;
        let key = Key { sender: (arrival.from, head.source_qpn, head.incarnation), message: head.message };
        let about = About {
            arrival: *arrival,
            source_qpn: head.source_qpn,
            stag: head.stag,
            to: head.to,
            len: head.message_len,
            immediate: head.immediate,
            solicited: head.solicited,
        };
        let range = head.offset..head.offset + segment.payload.len() as u32;
        let is_last = range.end == head.message_len;
        let record = self.open.get(&key).map(|open| open.record);
        if record.is_some_and(|record| self.records.about(record) != Some(about)) {
            return Err(Dropped::Access);
        }
        if record.is_none()
            && self.senders.get(&key.sender).is_some_and(|sender| sender.has_ended(head.message))
        {
            return Err(Dropped::Late);
        }
        let whole = Part { stag: head.stag, to: head.to, len: head.message_len as usize };
        if head.message_len > 0 {
            // All of the message, so that none is begun that cannot be finished.
            self.remote.with(whole, pd, need, |_| ()).map_err(|_| Dropped::Access)?;
        }
        let has_room = match record {
            Some(record) => self.records.may_mark(record, &range),
            None => self.records.has_room(),
        };
        if !has_room {
            if let Some(open) = self.open.get_mut(&key).filter(|_| is_last) {
                open.is_sent = true;
                let due = open.due();
                self.is_due(due);
            }
            return Err(Dropped::NoRecord);
        }
        if head.message_len > 0 {
            let copied = self.remote.with(whole, pd, need, |place| {
                mem::copy_in(place.part(head.offset as usize, segment.payload.len()), segment.payload)
            });
            if !matches!(copied, Ok(Ok(_))) {
                return Err(Dropped::Access);
            }
        }
        let record = match record {
            Some(record) => record,
            None => self.begin(key, about, now).ok_or(Dropped::NoRecord)?,
        };
        if self.records.mark(record, &range) {
            self.end(key);
            return Ok(Some(record));
        }
        if let Some(open) = self.open.get_mut(&key) {
            (open.last, open.is_sent) = (now, open.is_sent || is_last);
            let due = open.due();
            self.is_due(due);
        }
        Ok(None)
    }

    /// The first segment of a message has come. Its sender has sent all of those before it.
    fn begin(&mut self, key: Key, about: About, now: Instant) -> Option<u64> {
        let record = self.records.begin(about)?;
        if self.senders.len() >= MOST_SENDERS && !self.senders.contains_key(&key.sender) {
            self.forget_one();
        }
        let new = || Known { latest: key.message, ended: 0, open: 0, last: now };
        let sender = self.senders.entry(key.sender).or_insert_with(new);
        sender.note(key.message, now);
        sender.open += 1;
        if sender.open > 1 {
            let mut due = now + NEXT;
            let is_before = |other: &Key| {
                other.sender == key.sender && key.message.wrapping_sub(other.message).cast_signed() > 0
            };
            for (_, open) in self.open.iter_mut().filter(|(other, open)| is_before(other) && !open.is_sent) {
                (open.is_sent, open.last) = (true, now);
                due = due.min(open.due());
            }
            self.is_due(due);
        }
        self.open.insert(key, Open { record, last: now, is_sent: false });
        Some(record)
    }

    /// The sender that was silent longest is not known any more.
    #[cold]
    fn forget_one(&mut self) {
        let Some(oldest) = self.senders.iter().min_by_key(|(_, known)| known.last) else { return };
        let oldest = *oldest.0;
        self.senders.remove(&oldest);
        let records = &mut self.records;
        self.open.retain(|key, open| {
            let stays = key.sender != oldest;
            if !stays {
                records.drop_open(open.record);
            }
            stays
        });
    }

    fn end(&mut self, key: Key) {
        self.open.remove(&key);
        if let Some(sender) = self.senders.get_mut(&key.sender) {
            sender.end(key.message);
        }
    }

    fn is_due(&mut self, at: Instant) {
        if self.due.is_none_or(|due| at < due) {
            self.due = Some(at);
        }
    }

    /// When to look for a message that ends although a part of it is missing ([`Self::expire`]).
    pub fn due(&self) -> Option<Instant> {
        self.due.filter(|_| !self.open.is_empty())
    }

    /// Ends a message that is due, and returns the name of its record. To be repeated until there is none.
    pub fn expire(&mut self, now: Instant) -> Option<u64> {
        let due = self.open.iter().filter(|(_, open)| open.due() <= now).min_by_key(|(_, open)| open.last);
        let Some((key, record)) = due.map(|(key, open)| (*key, open.record)) else {
            self.due = self.open.values().map(Open::due).min();
            return None;
        };
        self.end(key);
        Some(record)
    }

    /// The queue pair receives no more: what is not whole is given up.
    pub fn give_up(&mut self) {
        for (_, open) in self.open.drain() {
            self.records.drop_open(open.record);
        }
        self.senders.clear();
        self.due = None;
    }
}
