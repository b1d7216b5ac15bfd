//! The send work requests of a queue pair for reliable datagrams. They end in any order, so each has a slot
//! of its own. A slot keeps its buffers for the next one: in steady state, posting does not allocate.

use std::collections::VecDeque;

use uwarp_proto::rd::Ticket;

use crate::ah::Endpoint;
use crate::qp::datagrams::copy_inline;
use crate::wr::{SendFlags, SendWr, Sge};

/// A send work request whose message is not done.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub wr_id: u64,
    pub signaled: bool,
    pub endpoint: Endpoint,
    pub remote_qpn: u32,
    pub qkey: u32,
    pub immediate: Option<[u8; 4]>,
    pub solicited: bool,
    pub len: u32,
    /// The machine's name for its message.
    pub ticket: Option<Ticket>,
    /// Counts the requests from the start.
    pub number: u64,
}

/// Where the payload of a request is.
pub(super) enum Payload<'a> {
    /// Copied by the post.
    Inline(&'a [u8]),
    /// In the program's memory.
    Sges(&'a [Sge]),
}

#[derive(Debug, Default)]
struct Slot {
    /// Counts the requests that had this slot: the upper half of their names.
    generation: u32,
    request: Option<Request>,
    is_inline: bool,
    inline: Vec<u8>,
    sges: Vec<Sge>,
}

#[derive(Debug, Default)]
pub(super) struct Requests {
    slots: Vec<Slot>,
    unused: Vec<u32>,
    /// Names of those that have not gone to the exchange, oldest first. Some of them may have ended.
    unsent: VecDeque<u64>,
    posted: u64,
}

impl Requests {
    /// The number that the next request gets.
    pub fn posted(&self) -> u64 {
        self.posted
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.unused.len()
    }

    /// Slots that exist, used or not.
    #[cfg(test)]
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Adds one behind all others.
    pub fn post(&mut self, mut request: Request, wr: &SendWr<'_>) {
        let index = self.unused.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        slot.generation = slot.generation.wrapping_add(1);
        request.number = self.posted;
        self.posted += 1;
        slot.is_inline = wr.flags.contains(SendFlags::INLINE);
        if slot.is_inline {
            copy_inline(wr.sges, &mut slot.inline);
        } else {
            slot.sges.extend_from_slice(wr.sges);
        }
        slot.request = Some(request);
        self.unsent.push_back(u64::from(slot.generation) << 32 | u64::from(index));
    }

    fn slot(&self, name: u64) -> Option<&Slot> {
        let (generation, index) = parts(name);
        self.slots.get(index as usize).filter(|slot| slot.generation == generation)
    }

    pub fn get_mut(&mut self, name: u64) -> Option<&mut Request> {
        let (generation, index) = parts(name);
        let slot = self.slots.get_mut(index as usize).filter(|slot| slot.generation == generation);
        slot?.request.as_mut()
    }

    /// Bytes of the message, and where they are.
    pub fn payload(&self, name: u64) -> Option<(u32, Payload<'_>)> {
        let slot = self.slot(name)?;
        let payload = if slot.is_inline { Payload::Inline(&slot.inline) } else { Payload::Sges(&slot.sges) };
        Some((slot.request?.len, payload))
    }

    /// The oldest one that has not gone to the exchange, if its number is below `end`. It has gone now.
    pub fn next_unsent(&mut self, end: u64) -> Option<(u64, Request)> {
        loop {
            let name = *self.unsent.front()?;
            let request = self.slot(name).and_then(|slot| slot.request);
            if request.is_some_and(|request| request.number >= end) {
                return None;
            }
            self.unsent.pop_front();
            if let Some(request) = request {
                return Some((name, request));
            }
        }
    }

    /// Takes one out.
    pub fn end(&mut self, name: u64) -> Option<Request> {
        let (generation, index) = parts(name);
        let slot = self.slots.get_mut(index as usize).filter(|slot| slot.generation == generation)?;
        let request = slot.request.take()?;
        slot.inline.clear();
        slot.sges.clear();
        self.unused.push(index);
        Some(request)
    }

    /// Takes all out, in the order of posting.
    pub fn end_all(&mut self) -> Vec<Request> {
        self.unsent.clear();
        let mut all = Vec::with_capacity(self.len());
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if let Some(request) = slot.request.take() {
                slot.inline.clear();
                slot.sges.clear();
                self.unused.push(u32::try_from(index).unwrap_or(u32::MAX));
                all.push(request);
            }
        }
        all.sort_unstable_by_key(|request| request.number);
        all
    }
}

fn parts(name: u64) -> (u32, u32) {
    ((name >> 32) as u32, name as u32)
}
