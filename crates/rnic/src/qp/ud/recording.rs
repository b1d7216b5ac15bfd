//! RDMA Write-Records that arrive (docs/datagram-iwarp.md section 15).
//!
//! A message ends when it is whole, or when no more of it is to be expected: its last segment, or one of a
//! later message of its sender, has come, and then nothing for a moment; or nothing at all for longer.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};
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
/// Messages that have ended, of which late or doubled segments are still known.
const MOST_ENDED: usize = 256;

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
    ended: FxHashSet<Key>,
    /// The same, in the order of their ends.
    in_order: VecDeque<Key>,
}

impl Recording {
    pub fn new(qpn: u32, records: Records, rights: Rights) -> Self {
        Self {
            records,
            rights,
            remote: MrCache::of_peer(qpn),
            open: FxHashMap::default(),
            ended: FxHashSet::default(),
            in_order: VecDeque::new(),
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
        if self.ended.contains(&key) {
            return Err(Dropped::Late);
        }
        let about = About {
            arrival: *arrival,
            source_qpn: head.source_qpn,
            stag: head.stag,
            to: head.to,
            len: head.message_len,
            immediate: head.immediate,
        };
        let range = head.offset..head.offset + segment.payload.len() as u32;
        let known = self.open.get(&key).map(|open| open.record);
        if let Some(record) = known {
            if self.records.about(record) != Some(about) {
                return Err(Dropped::Access);
            }
            if !self.records.may_mark(record, &range) {
                return Err(Dropped::NoRecord);
            }
        }
        if head.message_len > 0 {
            // All of the message, so that none is begun that cannot be finished.
            let whole = Part { stag: head.stag, to: head.to, len: head.message_len as usize };
            let is_new = known.is_none();
            self.remote.with(whole, pd, need, |_| ()).map_err(|_| Dropped::Access)?;
            if is_new && !self.records.has_room() {
                return Err(Dropped::NoRecord);
            }
            let copied = self.remote.with(whole, pd, need, |place| {
                mem::copy_in(place.part(head.offset as usize, segment.payload.len()), segment.payload)
            });
            if !matches!(copied, Ok(Ok(_))) {
                return Err(Dropped::Access);
            }
        }
        let record = match known {
            Some(record) => record,
            None => self.records.begin(about).ok_or(Dropped::NoRecord)?,
        };
        if known.is_none() {
            self.goes_on(&key);
        }
        if self.records.mark(record, &range) {
            self.end(key);
            return Ok(Some(record));
        }
        let is_sent = range.end == head.message_len;
        let open = self.open.entry(key).or_insert(Open { record, last: now, is_sent });
        (open.last, open.is_sent) = (now, open.is_sent || is_sent);
        Ok(None)
    }

    /// The sender of this message has sent all of those before it.
    fn goes_on(&mut self, key: &Key) {
        for (other, open) in &mut self.open {
            // Numbers wrap.
            if other.sender == key.sender && (key.message.wrapping_sub(other.message) as i32) > 0 {
                open.is_sent = true;
            }
        }
    }

    fn end(&mut self, key: Key) {
        self.open.remove(&key);
        self.ended.insert(key);
        self.in_order.push_back(key);
        if self.in_order.len() > MOST_ENDED
            && let Some(oldest) = self.in_order.pop_front()
        {
            self.ended.remove(&oldest);
        }
    }

    /// When the next message ends of which a part is missing.
    pub fn due(&self) -> Option<Instant> {
        self.open.values().map(Open::due).min()
    }

    /// Ends a message that is due, and returns the name of its record.
    pub fn expire(&mut self, now: Instant) -> Option<u64> {
        let (key, open) =
            self.open.iter().filter(|(_, open)| open.due() <= now).min_by_key(|(_, open)| open.last)?;
        let (key, record) = (*key, open.record);
        self.end(key);
        Some(record)
    }

    /// The queue pair receives no more: what is not whole is given up.
    pub fn give_up(&mut self) {
        for (_, open) in self.open.drain() {
            self.records.drop_open(open.record);
        }
        self.ended.clear();
        self.in_order.clear();
    }
}
