//! The work queues: bounded rings of work requests and their scatter/gather lists.
//!
//! Both grow on use, so that an idle queue pair costs little, whatever its depth. In steady state, posting
//! does not allocate.

use std::collections::VecDeque;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::cq::Places;
use crate::error::VerbsError;
use crate::mr::Part;
use crate::wr::{RecvWr, SendFlags, SendOp, SendWr, Sge, WcStatus};
use uwarp_mem::{self as mem, MemSeg};

/// Largest message in bytes (reported as the port's `max_msg_sz`).
pub const MAX_MESSAGE: u32 = 0x7FFF_FFFF;

/// Bytes that an atomic operation changes, and returns.
pub(crate) const ATOMIC_BYTES: u32 = 8;

/// Progress of a send work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Posted,
    /// Cut into segments; done when the stream byte `end` is taken and message number `message` is
    /// acknowledged (where acknowledgements are in use).
    Sent {
        end: u64,
        message: u64,
    },
    /// An RDMA Read Request or an Atomic Request was sent.
    Reading,
    Done,
    /// Fails, but earlier ones complete first.
    Failed(WcStatus),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct SqSlot {
    pub wr_id: u64,
    pub op: SendOp,
    pub flags: SendFlags,
    pub phase: Phase,
    pub total: u32,
    pub sges: u16,
    pub first_sge: u64,
}

/// The send queue. Slots are numbered from the start of the queue.
#[derive(Debug)]
pub(crate) struct SendQueue {
    slots: VecDeque<SqSlot>,
    sges: VecDeque<Sge>,
    sge_base: u64,
    /// Inline bytes of each slot, at its number modulo the depth; allocated when first needed.
    inline: Vec<u8>,
    /// Number of the oldest slot.
    pub head: u64,
    /// Number of the first slot that is not cut into segments.
    pub next: u64,
    /// Where the program's polls free places.
    places: Arc<Places>,
    /// Number of the first slot whose place was taken when [`Self::places`] was last read.
    freed: u64,
    /// The value that [`Self::places`] will have when the program has polled all completions made so far.
    to_poll: u64,
    depth: u32,
    max_sge: u32,
    max_inline: u32,
}

impl SendQueue {
    #[cfg(test)]
    pub fn new(depth: u32, max_sge: u32, max_inline: u32) -> Self {
        Self::with(depth, max_sge, max_inline, Places::in_order())
    }

    /// `places` say in which order its work requests complete.
    pub fn with(depth: u32, max_sge: u32, max_inline: u32, places: Arc<Places>) -> Self {
        Self {
            slots: VecDeque::new(),
            sges: VecDeque::new(),
            sge_base: 0,
            inline: Vec::new(),
            head: 0,
            next: 0,
            places,
            freed: 0,
            to_poll: 0,
            depth,
            max_sge,
            max_inline,
        }
    }

    /// Where the program's polls free places.
    pub fn places(&self) -> &Arc<Places> {
        &self.places
    }

    /// Call right after the oldest slot was dropped, if it makes a completion. Returns the number for that
    /// completion: the places before it are free when the completion is polled.
    #[inline]
    pub fn completes(&mut self) -> u32 {
        self.to_poll = self.head;
        self.head as u32
    }

    /// The work request whose place [`Self::pass`] has taken ends without a completion. Only of a queue that
    /// completes in any order; elsewhere the next completion frees the place, too.
    pub fn ends_silently(&self) {
        self.places.free(0);
    }

    /// Places that become free only when the program has polled all completions made so far.
    #[inline]
    pub fn unpolled(&self) -> u32 {
        (self.to_poll as u32).wrapping_sub(self.places.freed())
    }

    /// Whether every place is taken when `ahead` more are. The place of a work request with a completion is
    /// free when the program has polled it. The place of another one is free with the next completion, as
    /// with adapters, or when nothing is left to poll: programs that never ask for a completion work with
    /// siw and rxe. Where they complete in any order, each has a place of its own.
    #[inline]
    fn is_full(&mut self, ahead: u32) -> bool {
        let end = self.end() + u64::from(ahead);
        if end - self.freed < u64::from(self.depth) {
            return false;
        }
        self.freed = if self.places.is_in_any_order() {
            self.head - u64::from((self.head as u32).wrapping_sub(self.places.freed()))
        } else {
            match self.unpolled() {
                0 => self.head,
                unpolled => self.to_poll - u64::from(unpolled),
            }
        };
        end - self.freed >= u64::from(self.depth)
    }

    /// Whether there is a place behind `ahead` work requests that come first.
    #[inline]
    pub fn check_room(&mut self, ahead: u32) -> Result<(), VerbsError> {
        if self.is_full(ahead) { Err(VerbsError::QueueFull) } else { Ok(()) }
    }

    /// Takes a place, which is there, for a work request that completes at once, or that the service keeps.
    pub fn pass(&mut self) {
        self.head += 1;
        self.next = self.head;
    }

    pub fn depth(&self) -> u32 {
        self.depth
    }

    pub fn end(&self) -> u64 {
        self.head + self.slots.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether work requests wait that are not cut into segments.
    pub fn has_unsent(&self) -> bool {
        self.next < self.end()
    }

    /// Whether the next work request to be cut into segments, if there is one, gets no answer from the peer.
    pub fn next_is_not_answered(&self) -> bool {
        self.slot(self.next).is_none_or(|slot| !slot.op.is_answered())
    }

    pub fn slot(&self, number: u64) -> Option<&SqSlot> {
        self.slots.get(usize::try_from(number.checked_sub(self.head)?).ok()?)
    }

    pub fn slot_mut(&mut self, number: u64) -> Option<&mut SqSlot> {
        self.slots.get_mut(usize::try_from(number.checked_sub(self.head)?).ok()?)
    }

    /// Whether a work request can be posted behind `ahead` others, which have been checked and come first.
    /// Nothing is posted.
    #[inline]
    pub fn check(&mut self, wr: &SendWr<'_>, ahead: u32) -> Result<(), VerbsError> {
        self.check_room(ahead)?;
        if wr.sges.len() > self.max_sge as usize {
            return Err(VerbsError::Invalid("more scatter/gather elements than the queue pair was made for"));
        }
        let total = total_len(wr.sges)?;
        if wr.op.is_atomic() && total != ATOMIC_BYTES {
            return Err(VerbsError::Invalid("an atomic operation returns exactly 8 bytes"));
        }
        if wr.flags.contains(SendFlags::INLINE) {
            if !wr.op.may_be_inline() {
                return Err(VerbsError::Invalid("inline data goes with Send and RDMA Write only"));
            }
            if total > self.max_inline {
                return Err(VerbsError::Invalid("more inline data than the queue pair was made for"));
            }
        }
        Ok(())
    }

    /// Posts a work request that [`Self::check`] has allowed.
    #[inline]
    pub fn post(&mut self, wr: &SendWr<'_>) {
        let total = total_len(wr.sges).unwrap_or(0);
        let first_sge = self.sge_base + self.sges.len() as u64;
        let mut sges = wr.sges.len();
        if wr.flags.contains(SendFlags::INLINE) {
            self.store_inline(wr.sges);
            sges = 0;
        } else {
            append(&mut self.sges, wr.sges);
        }
        self.slots.push_back(SqSlot {
            wr_id: wr.wr_id,
            op: wr.op,
            flags: wr.flags,
            phase: Phase::Posted,
            total,
            sges: u16::try_from(sges).unwrap_or(u16::MAX),
            first_sge,
        });
    }

    fn store_inline(&mut self, sges: &[Sge]) {
        let size = self.max_inline as usize;
        if self.inline.is_empty() {
            self.inline = vec![0; size * self.depth as usize];
        }
        let mut at = self.inline_at(self.end());
        for sge in sges {
            let len = sge.length as usize;
            if let Some(place) = self.inline.get_mut(at..at + len) {
                mem::copy_inline(place, MemSeg { addr: sge.addr, len });
            }
            at += len;
        }
    }

    fn inline_at(&self, number: u64) -> usize {
        usize::try_from(number % u64::from(self.depth.max(1))).unwrap_or(0) * self.max_inline as usize
    }

    /// The inline bytes of a slot that was posted with `INLINE`.
    pub fn inline_bytes(&self, number: u64, total: u32) -> &[u8] {
        let at = self.inline_at(number);
        self.inline.get(at..at + total as usize).unwrap_or(&[])
    }

    /// The scatter/gather list of a slot.
    pub fn sges(&self, slot: &SqSlot) -> impl Iterator<Item = &Sge> + use<'_> {
        let at = usize::try_from(slot.first_sge - self.sge_base).unwrap_or(usize::MAX);
        let end = at.saturating_add(slot.sges.into()).min(self.sges.len());
        self.sges.range(at.min(end)..end)
    }

    /// Drops the oldest slot.
    pub fn pop(&mut self) -> Option<SqSlot> {
        let slot = self.slots.pop_front()?;
        forget(&mut self.sges, slot.sges);
        self.sge_base += u64::from(slot.sges);
        self.head += 1;
        self.next = self.next.max(self.head);
        Some(slot)
    }

    pub fn front(&self) -> Option<&SqSlot> {
        self.slots.front()
    }

    /// Work requests that were cut but reach past stream byte `end` will not be sent after all. Other bytes
    /// get their numbers, and must not complete them.
    pub fn unsend(&mut self, end: u64) {
        for slot in &mut self.slots {
            if matches!(slot.phase, Phase::Sent { end: of, .. } if of > end) {
                slot.phase = Phase::Posted;
            }
        }
    }

    /// Drops everything. The caller has dropped the completions, too.
    pub fn clear(&mut self) {
        while self.pop().is_some() {}
        (self.freed, self.to_poll) = (self.head, self.head);
        self.places.free_all(self.head as u32);
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct RqSlot {
    pub wr_id: u64,
    pub total: u32,
    sges: u16,
}

/// A receive that was taken out of its queue. Its place stays taken until its completion is polled, or it is
/// put back.
#[derive(Debug)]
pub(crate) struct TakenRecv {
    pub wr_id: u64,
    pub total: u32,
    pub sges: SmallVec<[Sge; 2]>,
}

/// The receive queue, of one queue pair or shared.
#[derive(Debug)]
pub(crate) struct RecvQueue {
    slots: VecDeque<RqSlot>,
    sges: VecDeque<Sge>,
    /// Posted since the start; wraps.
    posted: u32,
    /// Where the program's polls free places.
    places: Arc<Places>,
    /// The value of `places` when it was last read.
    freed: u32,
    depth: u32,
    max_sge: u32,
}

impl RecvQueue {
    /// One whose receives complete in the order of posting.
    pub fn new(depth: u32, max_sge: u32) -> Self {
        Self::with(depth, max_sge, Places::in_order())
    }

    /// `places` say in which order its receives complete.
    pub fn with(depth: u32, max_sge: u32, places: Arc<Places>) -> Self {
        Self { slots: VecDeque::new(), sges: VecDeque::new(), posted: 0, places, freed: 0, depth, max_sge }
    }

    /// Where the program's polls free places.
    pub fn places(&self) -> &Arc<Places> {
        &self.places
    }

    /// Call right after the oldest receive was taken out, when it completes. Returns the number for its
    /// completion: the places before it are free when the completion is polled.
    #[inline]
    pub fn completes(&self) -> u32 {
        self.posted.wrapping_sub(self.slots.len() as u32)
    }

    /// Whether every place is taken. A place stays taken until the completion of its receive is polled.
    #[inline]
    fn is_full(&mut self) -> bool {
        if self.posted.wrapping_sub(self.freed) < self.depth {
            return false;
        }
        self.freed = self.places.freed();
        self.posted.wrapping_sub(self.freed) >= self.depth
    }

    /// Takes a place for a receive that completes at once.
    pub fn pass(&mut self) -> Result<(), VerbsError> {
        if self.is_full() {
            return Err(VerbsError::QueueFull);
        }
        self.posted = self.posted.wrapping_add(1);
        Ok(())
    }

    pub fn post(&mut self, wr: &RecvWr<'_>) -> Result<(), VerbsError> {
        if self.is_full() {
            return Err(VerbsError::QueueFull);
        }
        if wr.sges.len() > self.max_sge as usize {
            return Err(VerbsError::Invalid("more scatter/gather elements than the queue pair was made for"));
        }
        let total = total_len(wr.sges)?;
        append(&mut self.sges, wr.sges);
        let sges = u16::try_from(wr.sges.len()).unwrap_or(u16::MAX);
        self.slots.push_back(RqSlot { wr_id: wr.wr_id, total, sges });
        self.posted = self.posted.wrapping_add(1);
        Ok(())
    }

    pub fn front(&self) -> Option<&RqSlot> {
        self.slots.front()
    }

    /// The only element of the scatter list of the oldest receive; none: it has another number of them.
    #[inline]
    pub fn front_sge(&self) -> Option<&Sge> {
        self.slots.front().filter(|slot| slot.sges == 1).and_then(|_| self.sges.front())
    }

    /// The scatter list of the oldest receive.
    pub fn front_sges(&self) -> impl Iterator<Item = &Sge> + use<'_> {
        let n = self.slots.front().map_or(0, |s| usize::from(s.sges)).min(self.sges.len());
        self.sges.range(..n)
    }

    pub fn pop(&mut self) -> Option<RqSlot> {
        let slot = self.slots.pop_front()?;
        forget(&mut self.sges, slot.sges);
        Some(slot)
    }

    /// Takes the oldest receive out, with its scatter list.
    pub fn take_front(&mut self) -> Option<TakenRecv> {
        let slot = self.slots.pop_front()?;
        let count = usize::from(slot.sges).min(self.sges.len());
        Some(TakenRecv { wr_id: slot.wr_id, total: slot.total, sges: self.sges.drain(..count).collect() })
    }

    /// Makes it the oldest receive again.
    pub fn put_back(&mut self, recv: TakenRecv) {
        let sges = u16::try_from(recv.sges.len()).unwrap_or(u16::MAX);
        recv.sges.into_iter().rev().for_each(|sge| self.sges.push_front(sge));
        self.slots.push_front(RqSlot { wr_id: recv.wr_id, total: recv.total, sges });
    }

    /// Moves the oldest receive to the end of `to`; returns whether there was one.
    pub fn move_front(&mut self, to: &mut Self) -> bool {
        let Some(slot) = self.slots.pop_front() else { return false };
        for _ in 0..slot.sges {
            to.sges.extend(self.sges.pop_front());
        }
        to.slots.push_back(slot);
        true
    }

    pub fn len(&self) -> usize {
        self.slots.len()
    }

    pub fn depth(&self) -> u32 {
        self.depth
    }

    pub fn set_depth(&mut self, depth: u32) {
        self.depth = depth;
    }

    /// Drops everything. The caller has dropped the completions, too.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.sges.clear();
        self.freed = self.posted;
        self.places.free_all(self.posted);
    }
}

// Lists nearly always have one element, and the general functions of a `VecDeque` cost several times as much
// for it.

fn append(queue: &mut VecDeque<Sge>, list: &[Sge]) {
    match list {
        [one] => queue.push_back(*one),
        list => queue.extend(list),
    }
}

fn forget(queue: &mut VecDeque<Sge>, count: u16) {
    if count <= 2 {
        for _ in 0..count {
            queue.pop_front();
        }
    } else {
        queue.drain(..usize::from(count).min(queue.len()));
    }
}

fn total_len(sges: &[Sge]) -> Result<u32, VerbsError> {
    if let [Sge { length: length @ 0..=MAX_MESSAGE, .. }] = sges {
        return Ok(*length);
    }
    let total: u64 = sges.iter().map(|s| u64::from(s.length)).sum();
    u32::try_from(total)
        .ok()
        .filter(|t| *t <= MAX_MESSAGE)
        .ok_or(VerbsError::Invalid("the message is longer than the port's max_msg_sz"))
}

/// The parts of a scatter/gather list that hold bytes `offset` to `offset + len` of the message.
pub(crate) fn slice_sges<'a>(
    sges: impl Iterator<Item = &'a Sge>,
    offset: u32,
    len: u32,
) -> impl Iterator<Item = Part> {
    let mut skip = offset;
    let mut left = len;
    sges.filter_map(move |sge| {
        if skip >= sge.length {
            skip -= sge.length;
            return None;
        }
        let n = (sge.length - skip).min(left);
        let at = sge.addr.wrapping_add(u64::from(skip));
        skip = 0;
        left -= n;
        (n > 0).then_some(Part { stag: sge.lkey, to: at, len: n as usize })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sge(addr: u64, length: u32) -> Sge {
        Sge { addr, length, lkey: 7 }
    }

    #[test]
    fn slices_cross_elements_and_skip_empty_ones() {
        let list = [sge(100, 4), sge(0, 0), sge(200, 8), sge(300, 2)];
        let parts = |o, l| slice_sges(list.iter(), o, l).map(|p| (p.to, p.len)).collect::<Vec<_>>();
        assert_eq!(parts(0, 14), [(100, 4), (200, 8), (300, 2)]);
        assert_eq!(parts(3, 2), [(103, 1), (200, 1)]);
        assert_eq!(parts(12, 2), [(300, 2)]);
        assert_eq!(parts(4, 0), []);
    }

    #[test]
    fn a_full_queue_refuses_and_recovers() {
        let mut q = SendQueue::new(2, 2, 16);
        let list = [sge(1, 2), sge(3, 4)];
        let wr = SendWr {
            wr_id: 1,
            op: SendOp::Send { invalidate: None },
            flags: SendFlags::empty(),
            sges: &list,
        };
        assert_eq!((q.check(&wr, 1), q.check(&wr, 2)), (Ok(()), Err(VerbsError::QueueFull)));
        q.post(&wr);
        q.check(&wr, 0).unwrap();
        q.post(&wr);
        assert_eq!(q.check(&wr, 0), Err(VerbsError::QueueFull));
        q.pop();
        let tail = q.completes();
        assert_eq!(q.check(&wr, 0), Err(VerbsError::QueueFull), "its completion is not polled yet");
        q.places().free(tail);
        assert_eq!((q.check(&wr, 1), q.check(&wr, 0)), (Err(VerbsError::QueueFull), Ok(())));
        q.post(&wr);
        let slot = *q.slot(2).unwrap();
        assert_eq!(q.sges(&slot).copied().collect::<Vec<_>>(), list);
        let three = [list[0]; 3];
        q.pop();
        assert!(matches!(q.check(&SendWr { sges: &three, ..wr }, 0), Err(VerbsError::Invalid(_))));
    }

    #[test]
    fn inline_bytes_are_copied_by_the_post() {
        let mut q = SendQueue::new(2, 2, 16);
        let mut data = *b"hello";
        let list = [sge(data.as_ptr().expose_provenance() as u64, 5)];
        let wr =
            SendWr { wr_id: 1, op: SendOp::Send { invalidate: None }, flags: SendFlags::INLINE, sges: &list };
        q.check(&wr, 0).unwrap();
        q.post(&wr);
        data = *b"XXXXX";
        assert_eq!(q.inline_bytes(0, 5), b"hello");
        assert_eq!(&data, b"XXXXX");
    }
}
