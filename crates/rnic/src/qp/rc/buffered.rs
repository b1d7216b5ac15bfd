//! Buffered Sends and Immediate Data: they arrived before their receive was posted. They are kept so that
//! this end can receive what follows them and its own work requests wait for: Responses to RDMA Reads, and
//! acknowledgements (docs/adr/004-sends-without-a-receive.md).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use uwarp_process::PerProcess;
use uwarp_proto::rx::Segment;
use uwarp_wire::rdmap::Delivery;

/// Limits in bytes, for one queue pair and for the process: the peer decides how much it sends.
const MAX_PER_QP: usize = 4 << 20;
const MAX_PER_PROCESS: usize = 64 << 20;

/// Memory that a segment needs in addition to its bytes: its place in the queue, which may be twice as long
/// as needed, and the allocator's share. Without it, Sends of a few bytes would take several times the limit.
const OVERHEAD: usize = 2 * size_of::<BufferedSegment>() + 32;

static TOTAL: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);

/// Segments of Sends, and Read and Atomic Requests behind them with the Writes behind these, in order of
/// arrival. Each is checked and counted.
#[derive(Debug, Default)]
pub(super) struct BufferedSends {
    segments: VecDeque<BufferedSegment>,
    /// Includes [`OVERHEAD`] for each.
    bytes: usize,
    /// How many of them are Atomic Requests.
    atomics: usize,
}

#[derive(Debug)]
pub(super) struct BufferedSegment {
    pub segment: Segment,
    pub ulpdu: Box<[u8]>,
    /// Bytes of the Write right before it.
    pub written: u32,
    /// Messages that arrived after it and before the next buffered one, and are placed.
    pub behind: u64,
}

impl BufferedSends {
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Whether an atomic operation waits: Writes behind it must wait, too.
    pub fn has_atomic(&self) -> bool {
        self.atomics > 0
    }

    /// Whether there is room for a segment of `len` bytes.
    pub fn has_room(&self, len: usize) -> bool {
        let cost = len.saturating_add(OVERHEAD);
        self.bytes.saturating_add(cost) <= MAX_PER_QP
            && TOTAL.load(Ordering::Relaxed).saturating_add(cost) <= MAX_PER_PROCESS
    }

    /// Adds a segment; returns whether there was room.
    pub fn push(&mut self, segment: Segment, ulpdu: &[u8], written: u32) -> bool {
        if !self.has_room(ulpdu.len()) {
            return false;
        }
        // Two threads may both take the last room: the limit bounds memory, it need not be exact.
        TOTAL.fetch_add(ulpdu.len() + OVERHEAD, Ordering::Relaxed);
        self.bytes += ulpdu.len() + OVERHEAD;
        self.atomics += usize::from(segment.info.delivery == Delivery::AtomicRequest);
        self.segments.push_back(BufferedSegment { segment, ulpdu: ulpdu.into(), written, behind: 0 });
        true
    }

    /// A message behind the last buffered one is placed; the peer's messages are counted in order. Returns
    /// whether there is a buffered one.
    pub fn placed_behind(&mut self) -> bool {
        let last = self.segments.back_mut();
        last.map(|last| last.behind += 1).is_some()
    }

    /// The oldest segment.
    pub fn first(&self) -> Option<&Segment> {
        self.segments.front().map(|first| &first.segment)
    }

    pub fn pop(&mut self) -> Option<BufferedSegment> {
        let oldest = self.segments.pop_front()?;
        self.atomics -= usize::from(oldest.segment.info.delivery == Delivery::AtomicRequest);
        self.release(oldest.ulpdu.len() + OVERHEAD);
        if self.segments.is_empty() {
            self.segments = VecDeque::new();
        }
        Some(oldest)
    }

    fn release(&mut self, len: usize) {
        self.bytes -= len;
        TOTAL.fetch_sub(len, Ordering::Relaxed);
    }

    pub fn clear(&mut self) {
        self.release(self.bytes);
        self.atomics = 0;
        self.segments = VecDeque::new();
    }
}

impl Drop for BufferedSends {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uwarp_wire::ddp::{Header, Untagged};
    use uwarp_wire::rdmap::Opcode;

    /// Found by the attacker of `conformance/tests/hostile`: 18 MiB were kept where 4 are allowed.
    #[test]
    fn small_sends_count_with_what_keeping_them_costs() {
        let header =
            Header::Untagged(Untagged { last: true, rsvdulp: 0x43, rsvdulp32: 0, qn: 0, msn: 1, mo: 0 });
        let info = Opcode::Send.info().unwrap();
        let segment = Segment { header, info, header_len: 18, payload_len: 0 };
        let mut buffered = BufferedSends::default();
        while buffered.push(segment, &[0; 18], 0) {}
        let places = buffered.segments.capacity() * size_of::<BufferedSegment>();
        assert!(places + buffered.segments.len() * (18 + 16) <= MAX_PER_QP, "{places} bytes of places alone");
        let kept = buffered.segments.len();
        while buffered.pop().is_some() {}
        assert_eq!((buffered.bytes, buffered.segments.capacity()), (0, 0));
        assert!(kept > 1000);
    }
}
