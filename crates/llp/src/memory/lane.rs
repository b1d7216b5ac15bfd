//! A stream through a lane of a slab: a [`LowerLayer`].
//!
//! Nothing of what this end writes or takes is told before the end of a turn ([`LowerLayer::flush`]), except
//! of large transfers, at which both ends copy at once. The TCP connection of the set-up stays open without a
//! byte: its end says that the peer's process is gone, also when it was killed.

use std::net::SocketAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use uwarp_mem::glance::Glance;
use uwarp_mem::{self as mem, MemSeg, owned};
use uwarp_process::Descriptor;

use super::Side;
use super::ledger::{Flags, Mine, Nonsense, RING, Theirs};
use super::slab::Slab;
use crate::lower::{Answers, Caps, Counts, Ended, LowerLayer, Received, Stop};
use crate::sync::{Line, Ordering, fence};
use crate::{route, tcp};

/// Bytes of a large transfer after which the peer is told: it copies at the same time.
const STEP: u64 = 32 * 1024;
/// With so much in the ring, the next frame is most likely a large one, whose payload goes to its place at
/// once. So a receive takes little at first, enough for a header.
const BULK: u64 = 16 * 1024;
const BITE: usize = 128;
const LARGEST_BITE: usize = 32 * 1024;

/// One end of a stream.
#[derive(Debug)]
pub struct Lane {
    end: End,
    /// What the peer has said.
    theirs: Theirs,
    /// What the next receive takes, if there is much.
    bite: usize,
    /// The stream is of no use any more, or the peer's process is gone.
    over: Option<Ended>,
    tcp: Descriptor,
}

/// This process's use of a lane, and what it says there. Its end is the end of that use.
#[derive(Debug)]
pub struct End {
    pub(super) slab: Arc<Slab>,
    pub(super) lane: usize,
    mine: Mine,
    /// The peer uses it, too.
    agreed: bool,
}

impl End {
    /// This process's end of a lane, over which a new stream may begin.
    pub fn new(slab: Arc<Slab>, lane: usize) -> Self {
        let side = slab.side();
        slab.set_name(lane, 0);
        slab.clear(side, lane);
        let mine = Mine::begin(slab.line(side, lane));
        Self { slab, lane, mine, agreed: side == Side::Both }
    }

    /// The peer uses the lane, too: when both have left it, it may serve another stream. (If that is never
    /// said, it is never used again, because the peer may begin to use it late.)
    pub fn agreed(&mut self) {
        self.agreed = true;
    }

    /// Whether the peer has written anything, or has said that the stream ends.
    pub fn is_used_by_peer(&self) -> bool {
        let line = self.their_line();
        Theirs::default().hear_tail(line, 0) != Ok(0) || Theirs::flags(line).has(Flags::FIN)
    }

    /// Whether the peer has left the lane without having used it.
    pub fn is_declined_by_peer(&self) -> bool {
        // In this order: what it wrote, it wrote before it left.
        Theirs::flags(self.their_line()).has(Flags::LEFT) && !self.is_used_by_peer()
    }

    /// What the engine calls the lane from now on: [`Slab::harvest`] reports this name.
    pub fn set_name(&self, name: u64) {
        self.slab.set_name(self.lane, name);
    }

    #[inline]
    pub(super) fn their_line(&self) -> &Line {
        self.slab.line(self.slab.side().peer(), self.lane)
    }

    /// The parts, for those who change what is said.
    #[inline]
    fn mine(&mut self) -> (&mut Mine, &Line) {
        (&mut self.mine, self.slab.line(self.slab.side(), self.lane))
    }

    fn say(&mut self, flags: Flags) {
        let (mine, line) = self.mine();
        mine.says(line, flags);
        self.slab.tell(self.lane);
    }

    /// In the middle of a large transfer.
    fn show_tail(&mut self) {
        let (mine, line) = self.mine();
        if mine.show_tail(line) {
            self.slab.tell(self.lane);
        }
    }

    /// In the middle of a large transfer.
    fn show_head(&mut self) {
        let (mine, line) = self.mine();
        if mine.show_head(line) {
            fence(Ordering::SeqCst);
            if Theirs::flags(self.their_line()).has(Flags::WANTS_ROOM) {
                self.slab.tell(self.lane);
            }
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if self.slab.is_parents() {
            return;
        }
        self.slab.set_name(self.lane, 0);
        self.say(self.mine.flags.with(Flags::LEFT));
        if self.slab.side() == Side::Both {
            // Nobody reads on.
            self.slab.clear(Side::Both, self.lane);
        }
        if self.agreed {
            self.slab.leave(self.lane);
        }
    }
}

impl From<Nonsense> for Stop {
    fn from(_: Nonsense) -> Self {
        Self::Ended(Ended::Broken)
    }
}

impl Lane {
    /// The stream over this end of a lane. `tcp`: the connection of the set-up, from which only the set-up
    /// frames were read.
    pub fn new(end: End, tcp: Descriptor) -> Self {
        Self { end, theirs: Theirs::default(), bite: BITE, over: None, tcp }
    }

    /// What the engine calls it from now on: [`Slab::harvest`] reports this name.
    pub fn set_name(&self, name: u64) {
        self.end.set_name(name);
    }

    /// The connection whose end is the peer's.
    pub fn tcp(&self) -> BorrowedFd<'_> {
        self.tcp.as_fd()
    }

    /// Looks whether the peer's process has ended the connection: something was reported of it.
    #[cold]
    pub fn look_at_end(&mut self) {
        if self.over.is_none() {
            self.over = tcp::ended(self.tcp.as_fd());
        }
    }

    /// Whether the peer has said that its stream ends, or the connection was found to have ended.
    #[inline]
    pub fn is_ending(&self) -> bool {
        self.over.is_some() || Theirs::flags(self.end.their_line()).ends()
    }

    /// Whether there is room again, after a send that found too little.
    #[inline]
    pub fn has_room_again(&self) -> bool {
        self.end.mine.flags.has(Flags::WANTS_ROOM) && self.theirs.has_taken(self.end.their_line())
    }

    /// What shows the peer's next word, if there is none now. `acked`: messages that it has acknowledged.
    pub fn glance(&self, acked: u64) -> Option<Glance> {
        let line = self.end.their_line();
        // The stream may know of more: what answers a message acknowledges it, too.
        let (flags, shown) = (Theirs::flags(line), Theirs::acked(line));
        if flags.ends() || shown > acked || self.has_news(acked) {
            return None;
        }
        let words = Theirs::no_news(self.end.mine.head, shown, flags);
        Some(self.end.slab.glance(self.end.slab.side().peer(), self.end.lane, words))
    }

    /// Leaves the lane; the connection comes back.
    pub fn into_tcp(self) -> Descriptor {
        self.tcp
    }

    /// How much room there is. If there is none, the peer will tell when there is.
    fn room(&mut self) -> Result<u64, Stop> {
        let Self { end, theirs, .. } = self;
        let free = |theirs: &Theirs, end: &End| RING - (end.mine.tail - theirs.head);
        if free(theirs, end) == 0
            && theirs.hear_head(end.their_line(), end.mine.tail)? + RING == end.mine.tail
        {
            let (mine, line) = end.mine();
            mine.says(line, mine.flags.with(Flags::WANTS_ROOM));
            fence(Ordering::SeqCst);
            theirs.hear_head(end.their_line(), end.mine.tail)?;
        }
        Ok(free(theirs, end))
    }

    /// Copies into the ring what there is room for, piece by piece; returns how much.
    #[inline]
    fn put(&mut self, pieces: &[MemSeg]) -> Result<usize, Stop> {
        if let Some(how) = self.over {
            return Err(Stop::Ended(how));
        }
        let begin = self.end.mine.tail;
        if self.theirs.hear_head(self.end.their_line(), begin)? == begin {
            let (mine, line) = self.end.mine();
            mine.rebase(line);
        }
        for piece in pieces {
            let mut piece = *piece;
            while piece.len > 0 {
                let room = self.room()?;
                let End { slab, lane, mine, .. } = &mut self.end;
                let to = place(slab.ring(slab.side(), *lane), mine.base(), mine.tail);
                let part = piece.part(0, size(room.min(STEP)).min(to.len));
                if part.len == 0 {
                    return self.have_put(begin, Stop::Later);
                }
                if owned::from_program(to, part).is_err() {
                    return self.have_put(begin, Stop::Unmapped);
                }
                mine.tail += part.len as u64;
                piece = piece.part(part.len, piece.len);
                if piece.len > 0 {
                    // What ends in this turn is shown at its end: the peer must not see it before the count.
                    self.end.show_tail();
                }
            }
        }
        if self.end.mine.flags.has(Flags::WANTS_ROOM) {
            let (mine, line) = self.end.mine();
            mine.says(line, mine.flags.without(Flags::WANTS_ROOM));
        }
        Ok(size(self.end.mine.tail - begin))
    }

    #[cold]
    fn have_put(&self, begin: u64, stop: Stop) -> Result<usize, Stop> {
        let bytes = size(self.end.mine.tail - begin);
        if bytes == 0 { Err(stop) } else { Ok(bytes) }
    }

    /// How many bytes wait; none: why.
    #[inline]
    fn waiting(&mut self) -> Result<u64, Stop> {
        let head = self.end.mine.head;
        if self.theirs.tail == head {
            match self.theirs.hear_tail(self.end.their_line(), head) {
                Ok(tail) if tail != head => {}
                Ok(_) => return Err(self.nothing()),
                Err(nonsense) => {
                    self.over = Some(Ended::Broken);
                    return Err(nonsense.into());
                }
            }
        }
        Ok(self.theirs.tail - head)
    }

    /// Nothing waits: nothing yet, or no more.
    #[inline]
    fn nothing(&mut self) -> Stop {
        let flags = Theirs::flags(self.end.their_line());
        if flags.ends() || self.over.is_some() { self.at_end(flags.has(Flags::FIN)) } else { Stop::Later }
    }

    #[cold]
    fn at_end(&mut self, fin: bool) -> Stop {
        // What came before the end was written before it was said.
        let head = self.end.mine.head;
        match self.theirs.hear_tail(self.end.their_line(), head) {
            // The next call finds it.
            Ok(tail) if tail != head => Stop::Later,
            Ok(_) if fin => Stop::Ended(Ended::Closed),
            // It has left without a word, or its process is gone.
            Ok(_) => Stop::Ended(self.over.unwrap_or(Ended::Broken)),
            Err(_) => Stop::Ended(Ended::Broken),
        }
    }

    /// Whether nothing waits by now. Asked of the peer's line: what was heard of it may be from before a stop
    /// in the middle (a Send without a receive), and what came since was reported during the stop.
    #[inline]
    fn is_drained(&self) -> bool {
        !self.theirs.has_written(self.end.their_line(), self.end.mine.head)
    }

    /// Copies so many bytes out of the ring, of those that wait: `copy` gets a stretch of the ring, and how
    /// many were copied before. Returns whether all could be.
    #[inline]
    fn get(&mut self, bytes: usize, mut copy: impl FnMut(MemSeg, usize) -> bool) -> bool {
        let mut done = 0;
        while done < bytes {
            let End { slab, lane, mine, .. } = &mut self.end;
            let side = slab.side().peer();
            let base = Theirs::base(slab.line(side, *lane));
            let from = place(slab.ring(side, *lane), base, mine.head);
            let from = from.part(0, (bytes - done).min(STEP as usize));
            if !copy(from, done) {
                return false;
            }
            mine.head += from.len as u64;
            done += from.len;
            if done < bytes {
                self.end.show_head();
            }
        }
        true
    }

    /// The ring itself cannot be read.
    #[cold]
    fn broken(&mut self) -> Stop {
        self.over = Some(Ended::Broken);
        Stop::Ended(Ended::Broken)
    }
}

/// The stretch of a ring from this position to the ring's end.
#[inline]
fn place(ring: MemSeg, base: u64, at: u64) -> MemSeg {
    let offset = at.wrapping_sub(base) % RING;
    ring.part(offset as usize, RING as usize)
}

impl LowerLayer for Lane {
    #[inline]
    fn caps(&self) -> Caps {
        Caps::MEMORY
    }

    #[inline]
    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Stop> {
        let piece = MemSeg { addr: bytes.as_ptr().expose_provenance() as u64, len: bytes.len() };
        self.put(&[piece])
    }

    fn send(&mut self, pieces: &[MemSeg], _: u64) -> Result<usize, Stop> {
        self.put(pieces)
    }

    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Stop> {
        let waiting = self.waiting()?;
        let mut bytes = buffer.len().min(size(waiting));
        if waiting >= BULK {
            bytes = bytes.min(self.bite);
            self.bite = (self.bite * 2).min(LARGEST_BITE);
        } else {
            self.bite = BITE;
        }
        self.get_bytes(buffer.get_mut(..bytes).unwrap_or_default())?;
        Ok(Received { bytes, drained: self.is_drained() })
    }

    fn receive_scattered(&mut self, pieces: &[MemSeg], buffer: &mut [u8]) -> Result<Received, Stop> {
        let waiting = size(self.waiting()?);
        let mut left = waiting;
        for piece in pieces {
            let bytes = piece.len.min(left);
            let done = self.get(bytes, |from, at| owned::to_program(piece.part(at, piece.len), from).is_ok());
            if !done {
                return Err(Stop::Unmapped);
            }
            left -= bytes;
        }
        let bytes = buffer.len().min(left);
        self.get_bytes(buffer.get_mut(..bytes).unwrap_or_default())?;
        left -= bytes;
        self.bite = BITE;
        Ok(Received { bytes: waiting - left, drained: self.is_drained() })
    }

    #[inline]
    fn flush(&mut self, received: Counts, wanted: u64) -> bool {
        let (mine, line) = self.end.mine();
        // The peer sees the bytes last: what they say may be about what is not placed.
        mine.placed(line, received.placed);
        let before = mine.acked(line, received.acked);
        let wants = mine.wants(line, wanted);
        let head = mine.show_head(line);
        let tail = mine.show_tail(line);
        if tail {
            self.end.slab.tell(self.end.lane);
        }
        if before < received.acked || wants || head && !tail {
            self.tell_if_waited_for(before..received.acked);
            // It may have counted them before it knew.
            return wants && Theirs::acked(self.end.their_line()) >= wanted;
        }
        false
    }

    #[inline]
    fn count_placed(&mut self, placed: u64) {
        let (mine, line) = self.end.mine();
        mine.placed(line, placed);
    }

    #[inline]
    fn has_news(&self, acked: u64) -> bool {
        let line = self.end.their_line();
        self.theirs.has_written(line, self.end.mine.head)
            || Theirs::acked(line) > acked
            || self.over.is_some()
            || Theirs::flags(line).ends()
    }

    #[inline]
    fn peer_received(&self) -> Counts {
        let line = self.end.their_line();
        Counts { acked: Theirs::acked(line), placed: Theirs::placed(line) }
    }

    fn ended(&self) -> Option<Ended> {
        let fin = Theirs::flags(self.end.their_line()).has(Flags::FIN);
        let closed = fin.then_some(Ended::Closed);
        self.over.or(closed).or_else(|| tcp::ended(self.tcp.as_fd()))
    }

    /// The end of the peer's process is reported, so nothing is doubtful. Asked some seconds after bytes were
    /// sent: a ring that is empty then gives its pages back, since the stream may idle from now on.
    fn answers(&self) -> Option<Answers> {
        let all = self.unacknowledged() == 0;
        if all {
            self.end.slab.clear(self.end.slab.side(), self.end.lane);
        }
        Some(Answers { all, held: false, doubtful: false, last: Duration::ZERO })
    }

    fn probe_when_quiet(&self) {}

    fn unsent(&self) -> usize {
        0
    }

    fn unacknowledged(&self) -> usize {
        let (mut theirs, tail) = (self.theirs, self.end.mine.tail);
        size(tail - theirs.hear_head(self.end.their_line(), tail).unwrap_or(theirs.head))
    }

    fn reset_on_close(&self, reset: bool) {
        tcp::reset_on_close(self.tcp.as_fd(), reset);
    }

    fn finish(&mut self) {
        let (mine, line) = self.end.mine();
        mine.show_tail(line);
        self.end.say(self.end.mine.flags.with(Flags::FIN));
    }

    fn peer(&self) -> Option<SocketAddr> {
        route::addresses(self.tcp.as_fd())[1]
    }
}

impl Lane {
    fn get_bytes(&mut self, buffer: &mut [u8]) -> Result<(), Stop> {
        let done = self.get(buffer.len(), |from, at| {
            mem::copy_to(from, buffer.get_mut(at..).unwrap_or_default()).is_ok()
        });
        if done { Ok(()) } else { Err(self.broken()) }
    }

    /// What was said is told if the peer waits for it: room, or the acknowledgement of its messages of these
    /// numbers. Each end says first, and then looks at what the other waits for, so one of the two sees it.
    fn tell_if_waited_for(&self, acked: std::ops::Range<u64>) {
        fence(Ordering::SeqCst);
        let theirs = self.end.their_line();
        let wanted = Theirs::want(theirs);
        if Theirs::flags(theirs).has(Flags::WANTS_ROOM) || acked.start < wanted && wanted <= acked.end {
            self.end.slab.tell(self.end.lane);
        }
    }
}

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::super::slab::Slab;
    use super::*;

    fn lanes() -> ([Lane; 2], Arc<Slab>) {
        let pair = || Arc::new(super::super::pair::Pair::default());
        let (made, fd) = Slab::create(pair()).unwrap();
        let opened = Slab::open(fd, pair()).unwrap();
        let number = made.take_lane().unwrap();
        let (a, b) = std::os::unix::net::UnixStream::pair().unwrap();
        let lane = |slab: &Arc<Slab>, socket: std::os::unix::net::UnixStream| {
            Lane::new(End::new(slab.clone(), number), Descriptor::new(socket.into()))
        };
        ([lane(&made, a), lane(&opened, b)], opened)
    }

    /// A queue pair that is joined with itself. A ring that is full has room again, and the end comes last.
    #[test]
    fn a_lane_with_one_end_reads_what_it_writes() {
        mem::guard::arm();
        let none = Counts { acked: 0, placed: 0 };
        let slab = Slab::create_alone(Arc::new(super::super::pair::Pair::default())).unwrap();
        for round in 0..3 {
            let number = slab.take_lane().unwrap();
            assert_eq!(number, 0, "round {round}: it was left");
            let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
            let mut lane = Lane::new(End::new(slab.clone(), number), Descriptor::new(socket.into()));
            let (bytes, mut buffer) = (vec![round; RING as usize], vec![0; RING as usize]);
            for length in [1, 100, RING as usize - 1, RING as usize] {
                assert_eq!(lane.receive(&mut buffer), Err(Stop::Later));
                assert_eq!(lane.send_bytes(&bytes[..length]), Ok(length));
                lane.flush(none, 0);
                if length == bytes.len() {
                    assert_eq!(lane.send_bytes(&bytes), Err(Stop::Later));
                }
                let mut came = 0;
                while came < length {
                    let received = lane.receive(&mut buffer[came..]).unwrap();
                    came += received.bytes;
                    assert_eq!(received.drained, came == length);
                }
                lane.flush(none, 0);
                assert!(buffer[..length] == bytes[..length] && lane.unacknowledged() == 0);
                assert_eq!(lane.has_room_again(), length == bytes.len());
            }
            lane.flush(Counts { acked: 3, placed: 4 }, 3);
            assert_eq!(lane.peer_received(), Counts { acked: 3, placed: 4 });
            assert_eq!(lane.send_bytes(&[1]), Ok(1));
            lane.finish();
            assert_eq!(lane.receive(&mut buffer).unwrap().bytes, 1);
            assert_eq!(
                (lane.receive(&mut buffer), lane.ended()),
                (Err(Stop::Ended(Ended::Closed)), Some(Ended::Closed))
            );
        }
    }

    /// A receiver that stops in the middle, because a Send waits for its receive, is told of more meanwhile,
    /// and only once. When it went on, it took what it had known of before for all that there is.
    #[test]
    fn who_stopped_in_the_middle_does_not_take_what_it_knew_for_all() {
        mem::guard::arm();
        let none = Counts { acked: 0, placed: 0 };
        for scattered in [false, true] {
            let ([mut from, mut to], slab) = lanes();
            to.set_name(7);
            let news = || {
                let mut names = 0;
                slab.harvest(|_| names += 1);
                names
            };
            let mut buffer = vec![0; 64 * 1024];
            let half = vec![1; 2 * BULK as usize];
            assert_eq!(from.send_bytes(&half), Ok(half.len()));
            from.flush(none, 0);
            let first = to.receive(&mut buffer).unwrap();
            assert!(!first.drained && first.bytes < half.len());
            let _ = news();
            assert_eq!(from.send_bytes(&half), Ok(half.len()));
            from.flush(none, 0);
            let _ = news();
            let mut bytes = first.bytes;
            loop {
                let received = if scattered {
                    let place = MemSeg { addr: buffer.as_mut_ptr().expose_provenance() as u64, len: 1000 };
                    let (_, tail) = buffer.split_at_mut(1000);
                    to.receive_scattered(&[place], &mut tail[..5000])
                } else {
                    to.receive(&mut buffer)
                };
                let received = received.unwrap();
                bytes += received.bytes;
                if received.drained {
                    break;
                }
            }
            assert_eq!((bytes, to.receive(&mut buffer)), (2 * half.len(), Err(Stop::Later)));
        }
    }

    /// A responder's stream follows the initiator's first byte. To leave a lane is no byte.
    #[test]
    fn a_lane_that_was_left_unused_is_declined() {
        let pair = || Arc::new(super::super::pair::Pair::default());
        let (made, fd) = Slab::create(pair()).unwrap();
        let opened = Slab::open(fd, pair()).unwrap();
        for (ends, used, declined) in [(false, false, true), (true, true, false)] {
            let lane = made.take_lane().unwrap();
            assert!(opened.claim_lane(lane));
            let (mut initiators, responders) = (End::new(made.clone(), lane), End::new(opened.clone(), lane));
            assert!(!responders.is_used_by_peer() && !responders.is_declined_by_peer());
            if ends {
                initiators.say(Flags::FIN);
            }
            drop(initiators);
            assert_eq!((responders.is_used_by_peer(), responders.is_declined_by_peer()), (used, declined));
        }
    }
}
