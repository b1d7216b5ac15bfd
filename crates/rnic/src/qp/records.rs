//! Records of RDMA Write-Records: what peers have written into memory that they named, so that the program
//! learns of it without a receive (docs/datagram-iwarp.md section 15).
//!
//! ```text
//!   begin ──▶ open ── end: a completion ──▶ ended ── the program frees it ──▶
//!               └─ drop: the message is given up ──▶
//! ```

use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;
use uwarp_proto::rd::RangeSet;

use super::datagrams::{Arrival, service_level};
use crate::cq::{Cq, Outlet, Places};
use crate::error::VerbsError;
use crate::wr::{Wc, WcFlags, WcOpcode, WcStatus};

/// The most records that a queue pair can have.
pub const MOST_RECORDS: u32 = 1024;
/// Ranges of a message that may be valid. What would need one more counts as lost.
pub const MOST_RANGES: usize = 64;
/// `vendor_err` of a record of which not all has come.
const PARTLY: u32 = 1;

/// What has come of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The sender's address.
    pub from: IpAddr,
    /// Its queue pair.
    pub source_qpn: u32,
    /// The memory of the message's first byte: its region, and where in it.
    pub stag: u32,
    /// See `stag`.
    pub to: u64,
    /// Bytes of the message.
    pub len: u32,
    /// In the order of the wire.
    pub immediate: [u8; 4],
    /// The bytes that have come, by their places in the message: ascending ranges that do not touch.
    pub valid: SmallVec<[Range<u32>; 1]>,
}

/// What is known of a message when its first segment has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct About {
    pub arrival: Arrival,
    pub source_qpn: u32,
    pub stag: u32,
    pub to: u64,
    pub len: u32,
    pub immediate: [u8; 4],
    /// Its completion is a solicited one.
    pub solicited: bool,
}

struct Entry {
    about: About,
    valid: RangeSet,
    has_ended: bool,
}

#[derive(Default)]
struct Slot {
    /// Counts the records that had this slot: the upper half of their names.
    generation: u32,
    entry: Option<Entry>,
}

/// The records of a queue pair.
pub(super) struct Records {
    qpn: u32,
    most: usize,
    slots: Vec<Slot>,
    unused: Vec<u32>,
    /// Records take no receive.
    outlet: Outlet,
}

impl Records {
    /// At most `most` of them, which complete at `cq`.
    pub fn new(qpn: u32, most: u32, cq: Arc<Cq>) -> Result<Self, VerbsError> {
        if most > MOST_RECORDS {
            return Err(VerbsError::Invalid("a queue pair has at most 1,024 records"));
        }
        let outlet = Outlet::new(cq, Places::in_order());
        Ok(Self { qpn, most: most as usize, slots: Vec::new(), unused: Vec::new(), outlet })
    }

    /// Whether one more may begin.
    pub fn has_room(&self) -> bool {
        !self.unused.is_empty() || self.slots.len() < self.most
    }

    /// Begins one; returns its name. `None`: there are too many.
    pub fn begin(&mut self, about: About) -> Option<u64> {
        let index = match self.unused.pop() {
            Some(index) => index,
            None if self.slots.len() < self.most => {
                self.slots.push(Slot::default());
                u32::try_from(self.slots.len() - 1).ok()?
            }
            None => return None,
        };
        let slot = self.slots.get_mut(index as usize)?;
        slot.generation = slot.generation.wrapping_add(1);
        slot.entry = Some(Entry { about, valid: RangeSet::default(), has_ended: false });
        Some(u64::from(slot.generation) << 32 | u64::from(index))
    }

    fn entry(&mut self, name: u64) -> Option<&mut Entry> {
        let slot = self.slots.get_mut(name as u32 as usize)?;
        slot.entry.as_mut().filter(|_| slot.generation == (name >> 32) as u32)
    }

    /// What an open one is about.
    pub fn about(&mut self, name: u64) -> Option<About> {
        self.entry(name).map(|entry| entry.about)
    }

    /// Whether a range can be marked as valid.
    pub fn may_mark(&mut self, name: u64, range: &Range<u32>) -> bool {
        let Some(entry) = self.entry(name) else { return false };
        if entry.valid.iter().len() < MOST_RANGES {
            return true;
        }
        let mut with = entry.valid.clone();
        with.insert(wide(range));
        with.iter().len() <= MOST_RANGES
    }

    /// A range is valid now. Returns whether the whole message is.
    pub fn mark(&mut self, name: u64, range: &Range<u32>) -> bool {
        let Some(entry) = self.entry(name) else { return false };
        entry.valid.insert(wide(range));
        entry.valid.covers(&(0..u64::from(entry.about.len)))
    }

    /// No more comes of an open one: it completes. Returns false if the completion queue is full.
    pub fn end(&mut self, name: u64) -> bool {
        let qpn = self.qpn;
        let Some(entry) = self.entry(name).filter(|entry| !entry.has_ended) else { return true };
        entry.has_ended = true;
        let about = entry.about;
        let valid: u64 = entry.valid.iter().map(|range| range.end - range.start).sum();
        let mut wc = Wc::new(name, WcStatus::Success, WcOpcode::Record, qpn);
        wc.byte_len = u32::try_from(valid).unwrap_or(u32::MAX);
        wc.vendor_err = if valid < u64::from(about.len) { PARTLY } else { 0 };
        wc.src_qp = about.source_qpn;
        wc.slid = about.arrival.slid;
        wc.sl = service_level(&about.arrival);
        wc.flags = WcFlags::WITH_IMM;
        wc.imm_or_inv = u32::from_ne_bytes(about.immediate);
        self.outlet.push(0, wc, about.solicited)
    }

    /// An open one is given up, and the program never hears of it.
    pub fn drop_open(&mut self, name: u64) {
        if self.entry(name).is_some_and(|entry| !entry.has_ended) {
            self.remove(name);
        }
    }

    /// One that has ended, until the program frees it.
    pub fn read(&mut self, name: u64) -> Option<Record> {
        let Entry { about, valid, .. } = self.entry(name).filter(|entry| entry.has_ended)?;
        // (A message has at most 2^31 bytes.)
        let narrow = |range: Range<u64>| range.start as u32..range.end as u32;
        Some(Record {
            from: about.arrival.from,
            source_qpn: about.source_qpn,
            stag: about.stag,
            to: about.to,
            len: about.len,
            immediate: about.immediate,
            valid: valid.iter().map(narrow).collect(),
        })
    }

    /// The program does not need one any more. False: it has none of this name.
    pub fn free(&mut self, name: u64) -> bool {
        let has_ended = self.entry(name).is_some_and(|entry| entry.has_ended);
        if has_ended {
            self.remove(name);
        }
        has_ended
    }

    fn remove(&mut self, name: u64) {
        if let Some(slot) = self.slots.get_mut(name as u32 as usize) {
            slot.entry = None;
            self.unused.push(name as u32);
        }
    }

    /// To RESET: all of them are gone, and the completions that the program has not polled.
    pub fn clear(&mut self) {
        self.outlet.purge();
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if slot.entry.take().is_some() {
                self.unused.push(u32::try_from(index).unwrap_or(u32::MAX));
            }
        }
    }
}

fn wide(range: &Range<u32>) -> Range<u64> {
    u64::from(range.start)..u64::from(range.end)
}
