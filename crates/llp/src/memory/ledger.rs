//! What the two ends of a lane say to each other beside the bytes: one line of memory each, which only that
//! end writes. Positions count bytes since the lane's stream began, and never wrap.

use crate::sync::{Line, Ordering};

/// Bytes of a ring.
pub const RING: u64 = 512 * 1024;

// The words of a line.
/// Bytes written into this end's ring.
const TAIL: usize = 0;
/// Bytes taken from the peer's ring.
const HEAD: usize = 1;
/// Messages of the peer's that are acknowledged.
const ACKED: usize = 2;
/// This end waits for the peer to acknowledge so many. Of datagrams: so many found no room.
const WANT: usize = 3;
/// [`Flags`].
const FLAGS: usize = 4;
/// The position that lies at the start of this end's ring.
const BASE: usize = 5;
/// Messages of the peer's that are in place.
const PLACED: usize = 6;

/// What an end says in its flags.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flags(u64);

impl Flags {
    /// It waits for room in its ring.
    pub const WANTS_ROOM: Self = Self(1);
    /// Behind its last byte, the stream ends.
    pub const FIN: Self = Self(2);
    /// It does not look at the lane any more.
    pub const LEFT: Self = Self(4);

    /// Whether these are set.
    pub fn has(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// Whether nothing follows behind the last byte.
    #[inline]
    pub fn ends(self) -> bool {
        self.0 & (Self::FIN.0 | Self::LEFT.0) != 0
    }

    /// With these.
    #[must_use]
    pub fn with(self, flags: Self) -> Self {
        Self(self.0 | flags.0)
    }

    /// Without these.
    #[must_use]
    pub fn without(self, flags: Self) -> Self {
        Self(self.0 & !flags.0)
    }
}

/// What the peer says cannot be: it is broken, or means harm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nonsense;

/// What this end has said last. It never reads its own line.
#[derive(Debug, Clone, Copy, Default)]
pub struct Mine {
    /// Bytes written.
    pub tail: u64,
    /// Bytes taken.
    pub head: u64,
    shown_tail: u64,
    shown_head: u64,
    acked: u64,
    placed: u64,
    want: u64,
    base: u64,
    /// Flags.
    pub flags: Flags,
}

impl Mine {
    /// Begins: the line may be what an earlier use of the lane has left.
    pub fn begin(line: &Line) -> Self {
        line.iter().for_each(|word| word.store(0, Ordering::Release));
        Self::default()
    }

    /// The ring is empty: what is written next lies at its start. (Its reader looks at this only when it
    /// has seen bytes behind it.)
    #[inline]
    pub fn rebase(&mut self, line: &Line) {
        self.base = self.tail;
        line[BASE].store(self.base, Ordering::Relaxed);
    }

    /// Where its ring begins.
    #[inline]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Says that bytes are in the ring, up to `tail`; returns whether that is new.
    #[inline]
    pub fn show_tail(&mut self, line: &Line) -> bool {
        let new = self.shown_tail != self.tail;
        if new {
            self.shown_tail = self.tail;
            line[TAIL].store(self.tail, Ordering::Release);
        }
        new
    }

    /// Says that bytes were copied out of the peer's ring, up to `head`; returns whether that is new.
    #[inline]
    pub fn show_head(&mut self, line: &Line) -> bool {
        let new = self.shown_head != self.head;
        if new {
            self.shown_head = self.head;
            line[HEAD].store(self.head, Ordering::Release);
        }
        new
    }

    /// Says how many messages of the peer's are in place.
    #[inline]
    pub fn placed(&mut self, line: &Line, placed: u64) {
        if self.placed != placed {
            self.placed = placed;
            line[PLACED].store(placed, Ordering::Release);
        }
    }

    /// Acknowledges so many messages of the peer's; returns how many it had acknowledged before.
    #[inline]
    pub fn acked(&mut self, line: &Line, acked: u64) -> u64 {
        let before = self.acked;
        if before < acked {
            self.acked = acked;
            line[ACKED].store(acked, Ordering::Release);
        }
        before
    }

    /// Waits for the peer to acknowledge so many; returns whether that is new.
    #[inline]
    pub fn wants(&mut self, line: &Line, want: u64) -> bool {
        let new = self.want != want;
        if new {
            self.want = want;
            line[WANT].store(want, Ordering::Release);
        }
        new
    }

    /// Says these.
    pub fn says(&mut self, line: &Line, flags: Flags) {
        self.flags = flags;
        line[FLAGS].store(flags.0, Ordering::Release);
    }
}

/// What the peer has said, as far as it was heard and makes sense.
#[derive(Debug, Clone, Copy, Default)]
pub struct Theirs {
    /// Bytes in its ring.
    pub tail: u64,
    /// Bytes of ours that it has taken.
    pub head: u64,
}

impl Theirs {
    /// Looks for more bytes. `head`: how many were taken.
    #[inline]
    pub fn hear_tail(&mut self, line: &Line, head: u64) -> Result<u64, Nonsense> {
        self.hear_tail_of(line, head, RING)
    }

    /// As [`Self::hear_tail`], of a ring of this size.
    #[inline]
    pub fn hear_tail_of(&mut self, line: &Line, head: u64, ring: u64) -> Result<u64, Nonsense> {
        let tail = line[TAIL].load(Ordering::Acquire);
        if tail != self.tail {
            if tail < self.tail || tail - head > ring {
                return Err(Nonsense);
            }
            self.tail = tail;
        }
        Ok(tail)
    }

    /// Looks for room. `tail`: how many were written.
    #[inline]
    pub fn hear_head(&mut self, line: &Line, tail: u64) -> Result<u64, Nonsense> {
        let head = line[HEAD].load(Ordering::Acquire);
        if head != self.head {
            if head < self.head || head > tail {
                return Err(Nonsense);
            }
            self.head = head;
        }
        Ok(head)
    }

    /// Whether there are bytes to take, or nonsense. `head`: how many were taken.
    #[inline]
    pub fn has_written(&self, line: &Line, head: u64) -> bool {
        self.tail != head || line[TAIL].load(Ordering::Acquire) != head
    }

    /// Whether it has taken bytes since it was heard last.
    #[inline]
    pub fn has_taken(&self, line: &Line) -> bool {
        line[HEAD].load(Ordering::Acquire) != self.head
    }

    /// Where its ring begins. What it says is only used modulo the ring's size. After [`Self::hear_tail`].
    #[inline]
    pub fn base(line: &Line) -> u64 {
        line[BASE].load(Ordering::Relaxed)
    }

    /// How many messages it has acknowledged. The caller checks it.
    #[inline]
    pub fn acked(line: &Line) -> u64 {
        line[ACKED].load(Ordering::Acquire)
    }

    /// How many messages it has placed. The caller checks it.
    #[inline]
    pub fn placed(line: &Line) -> u64 {
        line[PLACED].load(Ordering::Acquire)
    }

    /// It waits for so many of its messages to be acknowledged.
    #[inline]
    pub fn want(line: &Line) -> u64 {
        line[WANT].load(Ordering::SeqCst)
    }

    /// The words that change when there are bytes behind `head`, when it acknowledges more than it has,
    /// `acked`, and when the stream ends, with what they are until then.
    pub fn no_news(head: u64, acked: u64, flags: Flags) -> [(u8, u64); 3] {
        [(TAIL as u8, head), (ACKED as u8, acked), (FLAGS as u8, flags.0)]
    }

    /// Its flags.
    #[inline]
    pub fn flags(line: &Line) -> Flags {
        Flags(line[FLAGS].load(Ordering::SeqCst))
    }
}
