//! Bytes on their way to the socket: bytes in a staging buffer, and references to registered memory.

use std::collections::VecDeque;

use uwarp_proto::framing::Boundaries;

use uwarp_mem::{self as mem, MemSeg, Unmapped};

/// One run of bytes. A run is part of one frame, or holds several whole small frames.
#[derive(Debug, Clone, Copy)]
struct Run {
    bytes: Bytes,
    /// A frame ends with this run.
    ends_frame: bool,
}

#[derive(Debug, Clone, Copy)]
enum Bytes {
    /// `frame`: a position in the staging buffer at which a frame begins, in the run or before it, or at
    /// which the frame ends in which the run begins.
    Staged {
        start: usize,
        len: usize,
        frame: usize,
    },
    Memory(MemSeg),
}

impl Run {
    fn len(&self) -> usize {
        match self.bytes {
            Bytes::Staged { len, .. } => len,
            Bytes::Memory(seg) => seg.len,
        }
    }
}

/// Staged bytes that were sent are dropped once there are this many.
const COMPACT: usize = 64 * 1024;

/// The send side of a stream between segmentation and the kernel. It holds no memory while it is empty.
#[derive(Debug, Default)]
pub struct OutQueue {
    staged: Vec<u8>,
    runs: VecDeque<Run>,
    /// Bytes of the first run that the kernel has taken.
    head_taken: usize,
    /// The run before the first one belonged to the same frame as it.
    mid_frame: bool,
    queued: u64,
    taken: u64,
    /// Up to which position the lower layer refers to nothing any more; `None`: to nothing that it has taken.
    released: Option<u64>,
    /// How the boundaries of the staged frames can be found again.
    boundaries: Boundaries,
}

impl OutQueue {
    /// For a stream whose frames can be found in this way. `refers`: the lower layer may refer to memory that
    /// it has taken.
    pub fn new(boundaries: Boundaries, refers: bool) -> Self {
        Self { boundaries, released: refers.then_some(0), ..Self::default() }
    }

    /// Stream bytes queued since the start.
    pub fn queued(&self) -> u64 {
        self.queued
    }

    /// Stream bytes that the lower layer has taken since the start.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// The same for those to whose memory it does not refer any more.
    #[inline]
    pub fn released(&self) -> u64 {
        self.released.unwrap_or(self.taken)
    }

    /// The lower layer says so; not more than it has taken.
    pub fn release_to(&mut self, position: u64) {
        let taken = self.taken;
        if let Some(released) = &mut self.released {
            *released = position.min(taken).max(*released);
        }
    }

    /// Bytes waiting.
    pub fn waiting(&self) -> usize {
        usize::try_from(self.queued - self.taken).unwrap_or(usize::MAX)
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.queued == self.taken
    }

    /// Runs waiting: the number of pieces that a gathering system call would get.
    pub fn runs(&self) -> usize {
        self.runs.len()
    }

    /// The staging buffer, to append to. The following [`Self::staged`] queues what was appended.
    pub fn stage(&mut self) -> &mut Vec<u8> {
        if self.staged.capacity() == 0 {
            self.staged = pool::take();
        }
        &mut self.staged
    }

    /// Queues what was appended to the staging buffer from `start` on.
    ///
    /// `whole`: these are whole frames (they may join the run before them). Otherwise `ends_frame` says
    /// whether a frame ends here.
    pub fn staged(&mut self, start: usize, whole: bool, ends_frame: bool) {
        let len = self.staged.len().saturating_sub(start);
        if len == 0 {
            return;
        }
        self.queued += len as u64;
        let end = start + len;
        if whole
            && let Some(Run { bytes: Bytes::Staged { start: s, len: l, frame }, ends_frame: true }) =
                self.runs.back_mut()
            && *s + *l == start
        {
            *l += len;
            if !self.boundaries.are_known() {
                *frame = end;
            }
            return;
        }
        let frame = if whole && self.boundaries.are_known() { start } else { end };
        self.runs
            .push_back(Run { bytes: Bytes::Staged { start, len, frame }, ends_frame: whole || ends_frame });
    }

    /// Queues registered memory, part of a frame that does not end here.
    pub fn memory(&mut self, seg: MemSeg) {
        if seg.len > 0 {
            self.queued += seg.len as u64;
            self.runs.push_back(Run { bytes: Bytes::Memory(seg), ends_frame: false });
        }
    }

    /// All bytes waiting, if they are a single staged run.
    pub fn only_staged(&self) -> Option<&[u8]> {
        match (self.runs.len(), self.runs.front()) {
            (1, Some(Run { bytes: Bytes::Staged { start, len, .. }, .. })) => {
                self.staged.get(start + self.head_taken..start + len)
            }
            _ => None,
        }
    }

    /// The bytes waiting, as addresses for a gathering system call; passes at most `max` pieces to `sink`.
    pub fn gather(&self, max: usize, mut sink: impl FnMut(MemSeg)) -> usize {
        self.gather_marked(max, |seg, _| sink(seg))
    }

    /// The same; `sink` is also told whether the piece stays as it is until it is released: the others are
    /// staged, and change as soon as the lower layer has taken them.
    pub fn gather_marked(&self, max: usize, mut sink: impl FnMut(MemSeg, bool)) -> usize {
        let mut skip = self.head_taken;
        let mut bytes = 0;
        for run in self.runs.iter().take(max) {
            let stays = matches!(run.bytes, Bytes::Memory(_));
            let seg = match run.bytes {
                Bytes::Memory(seg) => seg,
                Bytes::Staged { start, len, .. } => {
                    let staged = self.staged.get(start..start + len).unwrap_or(&[]);
                    MemSeg { addr: staged.as_ptr().expose_provenance() as u64, len: staged.len() }
                }
            };
            let seg = seg.part(skip, seg.len);
            skip = 0;
            bytes += seg.len;
            sink(seg, stays);
        }
        bytes
    }

    /// The kernel has taken `n` more bytes.
    #[inline]
    pub fn take(&mut self, n: usize) {
        self.taken += n as u64;
        let mut n = self.head_taken + n;
        while let Some(run) = self.runs.front() {
            if n < run.len() {
                break;
            }
            n -= run.len();
            self.mid_frame = !run.ends_frame;
            self.runs.pop_front();
        }
        self.head_taken = n;
        if self.runs.is_empty() {
            self.release();
        } else {
            self.compact();
        }
    }

    /// Drops the staged bytes that the kernel has taken. On a busy stream something always waits, so the
    /// buffer is never empty; it must not grow without bound for that reason.
    fn compact(&mut self) {
        if let Some(Run { bytes: Bytes::Staged { start, len, .. }, .. }) = self.runs.front_mut() {
            *start += self.head_taken;
            *len -= self.head_taken;
            self.mid_frame |= self.head_taken > 0;
            self.head_taken = 0;
        }
        let first = self.runs.iter_mut().find_map(|run| match &mut run.bytes {
            Bytes::Staged { start, frame, .. } => Some((*start, frame)),
            Bytes::Memory(_) => None,
        });
        let mut done = first.as_ref().map_or(self.staged.len(), |(start, _)| *start);
        // Moving the rest then costs no more than the bytes sent since the last time.
        if done < COMPACT || done < self.staged.len() / 2 {
            return;
        }
        if let Some((start, frame)) = first {
            // A frame that is partly sent stays: its length field shows where the next one begins.
            loop {
                let next = self.boundaries.next(&self.staged, *frame);
                if next > start {
                    break;
                }
                *frame = next;
            }
            done = start.min(*frame);
        }
        self.staged.drain(..done);
        for run in &mut self.runs {
            if let Bytes::Staged { start, frame, .. } = &mut run.bytes {
                *start -= done;
                *frame -= done;
            }
        }
    }

    /// Drops all that need not be sent, so that a Terminate can follow at once: everything but the frame that
    /// the kernel has taken a part of. That one is copied, because its work request is about to be flushed.
    /// Returns how many bytes were dropped. If it cannot be read any more, everything is dropped, and nothing
    /// may follow.
    pub fn cut(&mut self) -> Result<usize, Unmapped> {
        let before = self.waiting();
        let partial = self.head_taken > 0 || self.mid_frame;
        let keep = if partial { self.end_of_frame() } else { 0 };
        self.runs.truncate(keep);
        let mut copy = pool::take();
        let mut read = Ok(());
        self.gather(usize::MAX, |seg| read = read.and_then(|()| mem::copy_out(seg, &mut copy)));
        if let Err(e) = read {
            pool::give(copy);
            self.release();
            return Err(e);
        }
        let dropped = before.saturating_sub(copy.len());
        self.release();
        self.staged = copy;
        self.staged(0, false, true);
        // The kept bytes are still the rest of a frame that is partly sent.
        self.mid_frame = partial && !self.runs.is_empty();
        Ok(dropped)
    }

    /// How many runs there are up to the end of the frame that is partly sent. Shortens the last of them to
    /// end there.
    fn end_of_frame(&mut self) -> usize {
        let Some(last) = self.runs.iter().position(|r| r.ends_frame) else { return self.runs.len() };
        let head_taken = if last == 0 { self.head_taken } else { 0 };
        let Some(Run { bytes: Bytes::Staged { start, len, frame }, .. }) = self.runs.get_mut(last) else {
            return last + 1;
        };
        let end = *start + *len;
        let mut rest = *frame;
        while rest < *start + head_taken {
            rest = self.boundaries.next(&self.staged, rest);
        }
        *len = rest.min(end) - *start;
        if *len == head_taken { last } else { last + 1 }
    }

    /// Drops all that waits, without reading it.
    pub fn discard(&mut self) {
        self.release();
    }

    fn release(&mut self) {
        self.runs.clear();
        self.head_taken = 0;
        self.mid_frame = false;
        self.queued = self.taken;
        pool::give(std::mem::take(&mut self.staged));
    }
}

/// Unused staging buffers, kept for the next queue pair that sends: an idle queue pair has none.
pub(crate) mod pool {
    use std::cell::{Cell, RefCell};

    const KEPT: usize = 8;
    const START: usize = 16 * 1024;
    const LARGEST_KEPT: usize = 512 * 1024;

    thread_local! {
        /// The buffer that was returned last: where one queue pair sends at a time, no other is needed.
        static LAST: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
        static OTHERS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
    }

    pub(crate) fn take() -> Vec<u8> {
        let last = LAST.try_with(Cell::take).unwrap_or_default();
        if last.capacity() > 0 { last } else { take_other() }
    }

    #[cold]
    fn take_other() -> Vec<u8> {
        let kept = OTHERS.try_with(|others| others.borrow_mut().pop()).ok().flatten();
        kept.unwrap_or_else(|| Vec::with_capacity(START))
    }

    pub(crate) fn give(mut buffer: Vec<u8>) {
        if buffer.capacity() == 0 || buffer.capacity() > LARGEST_KEPT {
            return;
        }
        buffer.clear();
        // A thread that is ending has no thread-local storage any more; the buffer is then freed.
        let before = LAST.try_with(|last| last.replace(buffer)).unwrap_or_default();
        if before.capacity() > 0 {
            give_other(before);
        }
    }

    #[cold]
    fn give_other(buffer: Vec<u8>) {
        let _ = OTHERS.try_with(|others| {
            let mut others = others.borrow_mut();
            if others.len() < KEPT {
                others.push(buffer);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(q: &mut OutQueue) -> Vec<u8> {
        let mut v = Vec::new();
        q.gather(usize::MAX, |s| mem::copy_out(s, &mut v).unwrap());
        q.take(v.len());
        v
    }

    fn push(q: &mut OutQueue, bytes: &[u8]) {
        let start = q.stage().len();
        q.stage().extend_from_slice(bytes);
        q.staged(start, true, true);
    }

    fn push_large(q: &mut OutQueue, head: &[u8], body: &[u8], tail: &[u8]) {
        let start = q.stage().len();
        q.stage().extend_from_slice(head);
        q.staged(start, false, false);
        q.memory(MemSeg { addr: body.as_ptr().expose_provenance() as u64, len: body.len() });
        let start = q.stage().len();
        q.stage().extend_from_slice(tail);
        q.staged(start, false, true);
    }

    #[test]
    fn small_frames_join_into_one_run() {
        let mut q = OutQueue::default();
        push(&mut q, b"abc");
        push(&mut q, b"def");
        assert_eq!(q.runs(), 1);
        push_large(&mut q, b"H", b"body", b"T");
        push(&mut q, b"xyz");
        // The trailer and the small frame after it are adjacent.
        assert_eq!(q.runs(), 4);
        assert_eq!(drain(&mut q), b"abcdefHbodyTxyz");
        assert!(q.is_empty());
        assert_eq!((q.queued(), q.taken()), (15, 15));
    }

    #[test]
    fn partial_takes_resume_in_the_middle() {
        let mut q = OutQueue::default();
        push(&mut q, b"abc");
        push_large(&mut q, b"H", b"body", b"T");
        q.take(5);
        let mut v = Vec::new();
        q.gather(usize::MAX, |s| mem::copy_out(s, &mut v).unwrap());
        assert_eq!(v, b"odyT");
        assert_eq!(q.waiting(), 4);
    }

    #[test]
    fn the_staging_buffer_does_not_grow_while_bytes_always_wait() {
        let mut q = OutQueue::default();
        let (mut expected, mut got) = (Vec::new(), Vec::new());
        for i in 0..2000u32 {
            let frame = i.to_be_bytes().repeat(100);
            push(&mut q, &frame);
            expected.extend(frame);
            if i % 3 == 0 {
                push_large(&mut q, b"head", b"body", b"tail");
                expected.extend(b"headbodytail");
            }
            let n = (400 * i as usize / 401).min(q.waiting() - 1);
            let mut v = Vec::new();
            q.gather(usize::MAX, |s| mem::copy_out(s, &mut v).unwrap());
            got.extend(&v[..n]);
            q.take(n);
            assert!(!q.is_empty() && q.staged.len() < 4 * COMPACT, "{}", q.staged.len());
        }
        got.extend(drain(&mut q));
        assert!(got == expected);
    }

    #[test]
    fn a_second_cut_keeps_what_the_first_kept() {
        let mut q = OutQueue::default();
        push_large(&mut q, b"H", b"body", b"T");
        push_large(&mut q, b"H", b"dropped", b"T");
        q.take(1);
        assert_eq!(q.cut(), Ok(9));
        assert_eq!(q.cut(), Ok(0));
        assert_eq!(drain(&mut q), b"bodyT");
    }

    #[test]
    fn what_is_discarded_is_not_read() {
        let mut q = OutQueue::default();
        push(&mut q, b"abc");
        q.take(1);
        // Page zero: a copy would end the process.
        q.memory(MemSeg { addr: 0, len: 100 });
        q.discard();
        assert!(q.is_empty());
        assert_eq!((q.queued(), q.taken()), (1, 1));
    }

    /// A lower layer that refers to what it has taken, and one that does not.
    #[test]
    fn what_is_taken_is_released_later_or_at_once() {
        for refers in [false, true] {
            let mut q = OutQueue::new(Boundaries::MpaLength, refers);
            push_large(&mut q, b"H", b"body", b"T");
            q.release_to(3);
            assert_eq!(q.released(), 0, "it has taken nothing");
            let mut stays = Vec::new();
            q.gather_marked(usize::MAX, |_, stay| stays.push(stay));
            assert_eq!(stays, [false, true, false]);
            q.take(5);
            let mut seen = vec![q.released()];
            for position in [2, 1, 100] {
                q.release_to(position);
                seen.push(q.released());
            }
            assert_eq!(seen, if refers { [0, 2, 2, 5] } else { [5; 4] });
            q.take(1);
            assert_eq!(q.released(), if refers { 5 } else { 6 });
        }
    }

    #[test]
    fn cut_keeps_the_frame_that_is_partly_sent() {
        let mut q = OutQueue::default();
        push_large(&mut q, b"H", b"body", b"T");
        push_large(&mut q, b"H", b"next", b"T");
        q.take(1);
        q.cut().unwrap();
        push(&mut q, b"term");
        assert_eq!(drain(&mut q), b"bodyTterm");
        push(&mut q, b"whole");
        q.cut().unwrap();
        push(&mut q, b"term");
        assert_eq!(drain(&mut q), b"term");
    }

    /// Everything in the same run was kept, some hundred KiB.
    #[test]
    fn cut_drops_the_small_frames_after_the_one_that_is_partly_sent() {
        let frame = |n: u16| {
            let mut bytes = n.to_be_bytes().to_vec();
            bytes.resize(uwarp_wire::mpa::fpdu_len(n.into()), n as u8);
            bytes
        };
        for boundaries in [Boundaries::MpaLength, Boundaries::Unknown] {
            let mut all = Vec::new();
            let mut q = OutQueue::new(boundaries, false);
            for n in [30, 20, 25] {
                push(&mut q, &frame(n));
                all.extend(frame(n));
            }
            // The second frame is partly sent. (With markers the length fields do not show where frames end.)
            let kept = if boundaries.are_known() { 45..36 + 28 } else { 45..all.len() };
            q.take(40);
            q.take(5);
            assert_eq!(q.cut(), Ok(all.len() - kept.end));
            push(&mut q, b"term");
            assert_eq!(drain(&mut q), [&all[kept], b"term"].concat());
        }
        // At the very end of a frame, nothing is kept.
        let mut q = OutQueue::default();
        [30, 20].iter().for_each(|n| push(&mut q, &frame(*n)));
        q.take(36);
        assert_eq!((q.cut(), q.is_empty()), (Ok(28), true));
        // After the trailer of a large frame, and far into a stream.
        let body = [7; 40];
        for taken in [1, 30, 43] {
            let mut q = OutQueue::default();
            for _ in 0..10_000 {
                push(&mut q, &frame(20));
                q.take(q.waiting() - 1);
            }
            push(&mut q, &frame(21));
            q.take(q.waiting() - 1);
            assert_eq!((q.cut(), q.waiting()), (Ok(0), 1));
            q.take(1);
            push_large(&mut q, b"H", &body, b"TRA");
            push(&mut q, &frame(20));
            q.take(taken);
            assert_eq!((q.cut(), q.waiting()), (Ok(28), 44 - taken));
        }
    }
}
