//! Sends and Immediate Data set aside: what came before its receive was posted, kept so that what our own
//! work requests wait for can be taken from behind it, Responses to RDMA Reads and acknowledgements
//! (docs/adr/004-sends-without-a-receive.md).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use uwarp_proto::rx::Segment;

/// Bytes that one queue pair may set aside, and all of a process together: a peer decides what it sends.
const MOST_OF_ONE: usize = 4 << 20;
const MOST_OF_ALL: usize = 64 << 20;

/// What keeping a segment costs beside its bytes: its place in the queue, which may be twice as long as
/// needed, and the allocator's share. Without it, Sends of a few bytes would take several times the limit.
const EACH: usize = 2 * size_of::<Waiting>() + 32;

static OF_ALL: AtomicUsize = AtomicUsize::new(0);

/// Segments of Sends, and Read Requests behind them, in the order they came, each checked and counted.
#[derive(Debug, Default)]
pub(super) struct Aside {
    segments: VecDeque<Waiting>,
    /// With what keeping them costs.
    bytes: usize,
}

#[derive(Debug)]
pub(super) struct Waiting {
    pub segment: Segment,
    pub ulpdu: Box<[u8]>,
    /// Bytes of the Write right before it.
    pub written: u32,
    /// Messages that came behind it, before the next that was set aside, and are placed.
    pub behind: u64,
}

impl Aside {
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Whether a segment of `len` bytes would be taken.
    pub fn has_room(&self, len: usize) -> bool {
        let cost = len.saturating_add(EACH);
        self.bytes.saturating_add(cost) <= MOST_OF_ONE
            && OF_ALL.load(Ordering::Relaxed).saturating_add(cost) <= MOST_OF_ALL
    }

    /// Takes a segment; says whether there was room.
    pub fn push(&mut self, segment: Segment, ulpdu: &[u8], written: u32) -> bool {
        if !self.has_room(ulpdu.len()) {
            return false;
        }
        // Two at once may both find the last room: the limit is there to bound, not to be met.
        OF_ALL.fetch_add(ulpdu.len() + EACH, Ordering::Relaxed);
        self.bytes += ulpdu.len() + EACH;
        self.segments.push_back(Waiting { segment, ulpdu: ulpdu.into(), written, behind: 0 });
        true
    }

    /// A message behind the last that was set aside is placed; the peer's messages are counted in order. Says
    /// whether there is one.
    pub fn placed_behind(&mut self) -> bool {
        let last = self.segments.back_mut();
        last.map(|last| last.behind += 1).is_some()
    }

    /// The one that came first.
    pub fn first(&self) -> Option<&Segment> {
        self.segments.front().map(|first| &first.segment)
    }

    pub fn pop(&mut self) -> Option<Waiting> {
        let waiting = self.segments.pop_front()?;
        self.gave_back(waiting.ulpdu.len() + EACH);
        if self.segments.is_empty() {
            self.segments = VecDeque::new();
        }
        Some(waiting)
    }

    fn gave_back(&mut self, len: usize) {
        self.bytes -= len;
        OF_ALL.fetch_sub(len, Ordering::Relaxed);
    }

    pub fn clear(&mut self) {
        self.gave_back(self.bytes);
        self.segments = VecDeque::new();
    }
}

impl Drop for Aside {
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
        let mut aside = Aside::default();
        while aside.push(segment, &[0; 18], 0) {}
        let places = aside.segments.capacity() * size_of::<Waiting>();
        assert!(places + aside.segments.len() * (18 + 16) <= MOST_OF_ONE, "{places} bytes of places alone");
        let kept = aside.segments.len();
        while aside.pop().is_some() {}
        assert_eq!((aside.bytes, aside.segments.capacity()), (0, 0));
        assert!(kept > 1000);
    }
}
