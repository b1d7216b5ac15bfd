//! Streams of bytes (docs/rd.md section 5.6), which share the packets of an exchange.
//!
//! A stream has bytes in both directions. Their owner keeps them: those that it sends until the peer has
//! acknowledged them, those that come until its program has taken them. The machine knows positions alone.
//!
//! ```text
//!   offered ──▶ sent ──▶ acknowledged          sending: missing parts go first
//!   came ──▶ readable (no gap below) ──▶ taken  receiving: limit = taken + window
//! ```
//!
//! What the exchange does for messages it does for streams: packet numbers, loss, pace, keys. A packet that
//! is lost gives its parts of a stream back, and they go again in another packet.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Instant;

use uwarp_wire::rd::chunk::{Stream as Chunk, StreamCredit};
use uwarp_wire::rd::{expand, low};

use super::joined::Pieces;
use super::left::Left;
use super::message::{Failure, Payload, Route, Ticket};
use super::range_set::RangeSet;

/// How far either end may send before it has heard of a limit. So the first bytes need no answer.
pub(super) const FIRST_LIMIT: u64 = 64 * 1024;
/// How far the peer may be ahead of what the program has taken.
const WINDOW: u64 = 256 * 1024;
/// Nor is more taken of a stream that a peer has opened, until its owner has taken something: nobody may have
/// asked for it. Set-up is request and reply, and no request is as long.
const UNTAKEN: u64 = 4096;
/// A limit is said again when it has grown by so much.
const CREDIT_STEP: u64 = WINDOW / 8;
/// Streams that a peer may have opened.
const MOST_OPENED: usize = 65_536;
/// Ranges of bytes behind a gap. What would make one more is not taken, and comes again.
const MOST_RANGES: usize = 64;
/// Numbers of streams that a peer has left out.
const MOST_GAPS: usize = 1024;
/// The rest of a packet is used for a part of a stream that does not fit, if it is as long as this.
const LEAST_PART: usize = 256;
/// Chunks of control in one packet.
const CONTROL_MOST: usize = 16;
/// Chunks of control that wait for the window. With more, nothing that needs one is taken.
const CONTROL_WAITING: usize = 1024;

/// How a stream has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamEnd {
    /// Each end has all of the other's bytes, and its end.
    Closed,
    /// The peer has ended it without its rest, or takes no such stream.
    Reset,
    /// Its exchange is over, or could not be made.
    Failed(Failure),
}

/// What has happened to a stream. To be dealt with before the next call of another verb: bytes are in the
/// datagram that was just handled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamEvent {
    /// Which one.
    pub stream: Ticket,
    /// What.
    pub what: StreamNews,
}

/// See [`StreamEvent`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamNews {
    /// The peer has opened it, for this service.
    Opened {
        /// Between whom.
        route: Route,
        /// What it is for.
        service: u32,
    },
    /// These bytes of the datagrams go to this position. They may have come before.
    Bytes {
        /// Of the first one.
        position: u64,
        /// Where they are.
        at: Range<usize>,
    },
    /// All bytes below this position have come.
    Readable(u64),
    /// Nothing follows the readable bytes.
    Finished,
    /// The peer has all bytes below this position: they are not asked for any more.
    Acknowledged(u64),
    /// The peer takes bytes up to this position.
    Limit(u64),
    /// It is over, and its name means nothing any more.
    Ended(StreamEnd),
}

/// The end of what is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fin {
    No,
    Wanted,
    Sent,
    Acknowledged,
}

/// One stream.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) ticket: Ticket,
    /// For what this process has opened it; `None`: the peer has.
    service: Option<u32>,
    offered: u64,
    /// The first byte that was never sent.
    next: u64,
    /// How far the peer takes bytes.
    limit: u64,
    acknowledged: RangeSet,
    /// All below are acknowledged.
    floor: u64,
    /// Sent, lost and not sent again yet.
    missing: RangeSet,
    fin: Fin,
    came: RangeSet,
    readable: u64,
    taken: u64,
    /// How far the peer may send, as it was said last.
    granted: u64,
    peers_end: Option<u64>,
    is_peer_finished: bool,
    is_listed: bool,
    /// Its owner takes nothing of it any more, since then.
    left_at: Option<Instant>,
}

impl Stream {
    pub(super) fn new(ticket: Ticket, service: Option<u32>) -> Self {
        Self {
            ticket,
            service,
            offered: 0,
            next: 0,
            limit: FIRST_LIMIT,
            acknowledged: RangeSet::default(),
            floor: 0,
            missing: RangeSet::default(),
            fin: Fin::No,
            came: RangeSet::default(),
            readable: 0,
            taken: 0,
            granted: FIRST_LIMIT,
            peers_end: None,
            is_peer_finished: false,
            is_listed: false,
            left_at: None,
        }
    }

    /// The owner has bytes up to here.
    pub(super) fn offer(&mut self, end: u64) {
        if self.fin == Fin::No {
            self.offered = self.offered.max(end);
        }
    }

    /// Nothing follows what was offered.
    pub(super) fn finish(&mut self) {
        if self.fin == Fin::No {
            self.fin = Fin::Wanted;
        }
    }

    /// The owner takes nothing of it any more.
    pub(super) fn leave(&mut self, now: Instant) {
        self.finish();
        self.left_at.get_or_insert(now);
        self.taken = self.readable;
    }

    /// Bytes that its owner keeps for the peer.
    pub(super) fn kept(&self) -> u64 {
        self.offered.saturating_sub(self.floor)
    }

    /// The first bytes go alone, with the name of the service: until they have arrived, the peer does not
    /// know the stream, and could not keep what follows.
    fn may_go_on(&self) -> bool {
        self.service.is_none() || self.next == 0 || self.floor > 0
    }

    fn is_sendable(&self) -> bool {
        let has_new = self.next < self.offered.min(self.limit);
        let has_fin = self.fin == Fin::Wanted && self.next == self.offered;
        !self.missing.is_empty() || self.may_go_on() && (has_new || has_fin)
    }

    /// The peer has all bytes, and the end. The end may arrive first.
    fn is_all_acknowledged(&self) -> bool {
        self.fin == Fin::Acknowledged && self.floor == self.offered
    }

    fn is_over(&self) -> bool {
        self.is_all_acknowledged() && self.is_peer_finished
    }

    /// What is sent next, at most `room` bytes of it; and whether they go again.
    fn next_range(&self, room: u64) -> (Range<u64>, bool) {
        if let Some(lost) = self.missing.iter().next() {
            return (lost.start..lost.end.min(lost.start + room), true);
        }
        (self.next..self.offered.min(self.limit).min(self.next + room).max(self.next), false)
    }

    fn on_sent(&mut self, sent: &Range<u64>, fin: bool) {
        self.missing.remove(sent);
        self.next = self.next.max(sent.end);
        if fin {
            self.fin = Fin::Sent;
        }
    }

    fn on_acknowledged(&mut self, range: Range<u64>, fin: bool) {
        self.missing.remove(&range);
        self.acknowledged.insert(range);
        if let Some(first) = self.acknowledged.iter().next().filter(|first| first.start <= self.floor) {
            self.floor = self.floor.max(first.end);
        }
        self.acknowledged.remove_below(self.floor);
        if fin {
            self.fin = Fin::Acknowledged;
        }
    }

    fn on_lost(&mut self, range: Range<u64>, fin: bool) {
        let start = range.start.max(self.floor);
        for part in self.acknowledged.missing_in(start..range.end.max(start)) {
            self.missing.insert(part);
        }
        if fin && self.fin == Fin::Sent {
            self.fin = Fin::Wanted;
        }
    }

    /// Takes bytes that have come. `false`: they cannot be kept.
    fn take(&mut self, range: &Range<u64>, fin: bool) -> bool {
        let is_untaken = self.service.is_none() && self.taken == 0 && self.left_at.is_none();
        let is_beyond = range.end > if is_untaken { UNTAKEN } else { self.granted };
        let contradicts = self.peers_end.is_some_and(|end| range.end > end || fin && range.end != end);
        let is_short =
            fin && (range.end < self.readable || self.came.iter().any(|come| come.end > range.end));
        if is_beyond || contradicts || is_short {
            return false;
        }
        let new = range.start.max(self.readable)..range.end;
        let is_gap = new.start > self.readable;
        if is_gap && self.came.count() >= MOST_RANGES && !self.came.covers(&new) {
            return false;
        }
        if !new.is_empty() {
            self.came.insert(new);
        }
        if let Some(first) = self.came.iter().next().filter(|first| first.start <= self.readable) {
            self.readable = first.end;
        }
        self.came.remove_below(self.readable);
        if fin {
            self.peers_end = Some(range.end);
        }
        true
    }
}

/// A part of a stream for a packet.
#[derive(Debug)]
pub(super) struct StreamPart {
    pub(super) chunk: Chunk<'static>,
    pub(super) payload: Payload,
    pub(super) content: StreamContent,
}

/// What a packet carries of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StreamContent {
    stream: u32,
    len: u32,
    start: u64,
    fin: bool,
}

/// What is said about a stream beside its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Control {
    Credit(u32),
    Reset(u32),
}

/// What a packet said of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Came {
    /// It is known, or was.
    Yes,
    /// There is no room for it: it must come again.
    NoRoom,
    /// It is none that this process takes.
    Stranger,
}

/// The streams of an exchange.
#[derive(Debug, Default)]
pub(super) struct Streams {
    by_number: BTreeMap<u32, Stream>,
    by_ticket: BTreeMap<Ticket, u32>,
    /// How many this process has opened.
    count: u32,
    /// Those that their owners have left.
    left: Left,
    /// Numbers that the peer has used, without their last bit. None is used again: what comes late of a
    /// stream that has ended must not begin it anew.
    used: RangeSet,
    /// Of those that have something to send, in turn.
    sendable: VecDeque<u32>,
    pub(super) control: VecDeque<Control>,
    pub(super) news: Vec<StreamEvent>,
}

impl Streams {
    pub(super) fn is_empty(&self) -> bool {
        self.by_number.is_empty()
    }

    pub(super) fn is_sendable(&self) -> bool {
        !self.sendable.is_empty()
    }

    /// Some are kept for the wire alone: when the first of them is given up.
    pub(super) fn timeout(&self) -> Option<Instant> {
        self.left.timeout()
    }

    pub(super) fn on_timeout(&mut self, now: Instant) {
        self.end_left(Some(now));
    }

    /// The one that its owner has left first, if there are many.
    pub(super) fn first_left_of_many(&self) -> Option<Ticket> {
        self.by_number.get(&self.left.first_of_many()?).map(|stream| stream.ticket)
    }

    /// Bytes that one of them keeps.
    pub(super) fn kept(&self, ticket: Ticket) -> u64 {
        let stream = self.by_ticket.get(&ticket).and_then(|number| self.by_number.get(number));
        stream.map_or(0, Stream::kept)
    }

    fn end_left(&mut self, now: Option<Instant>) {
        while let Some(number) = self.left.next_over(now) {
            self.send_reset(number);
            self.end(number, StreamEnd::Reset);
        }
    }

    /// One of this process. The last bit of its number says which end has opened it.
    pub(super) fn open(&mut self, stream: Stream, is_responder: bool) {
        let number = self.count << 1 | u32::from(is_responder);
        self.count = self.count.wrapping_add(1);
        self.by_ticket.insert(stream.ticket, number);
        if let Some(at) = stream.left_at {
            self.left.enter(at, number, stream.kept());
        }
        self.by_number.insert(number, stream);
        self.list(number);
        self.end_left(None);
    }

    /// The owner's call for one of its streams. Returns whether it is here.
    pub(super) fn with(&mut self, ticket: Ticket, call: impl FnOnce(&mut Stream)) -> bool {
        let Some(number) = self.by_ticket.get(&ticket).copied() else { return false };
        if let Some(stream) = self.by_number.get_mut(&number) {
            call(stream);
            if let Some(at) = stream.left_at {
                self.left.enter(at, number, stream.kept());
            }
            self.settle(number);
            self.end_left(None);
        }
        true
    }

    /// The owner has taken what came below this position.
    pub(super) fn taken(&mut self, ticket: Ticket, position: u64) {
        self.with(ticket, |stream| stream.taken = stream.taken.max(position.min(stream.readable)));
    }

    /// The owner ends it without its rest.
    pub(super) fn reset(&mut self, ticket: Ticket) -> bool {
        let Some(number) = self.by_ticket.get(&ticket).copied() else { return false };
        // One that the peer knows nothing of needs no word.
        let is_known =
            self.by_number.get(&number).is_some_and(|stream| stream.service.is_none() || stream.next > 0);
        if is_known {
            self.send_reset(number);
        }
        self.end(number, StreamEnd::Reset);
        true
    }

    fn send_reset(&mut self, number: u32) {
        self.control.retain(|control| *control != Control::Credit(number));
        self.control.push_back(Control::Reset(number));
    }

    /// All end with the exchange.
    pub(super) fn fail(&mut self, failure: Failure) {
        let numbers: Vec<u32> = self.by_number.keys().copied().collect();
        numbers.into_iter().for_each(|number| self.end(number, StreamEnd::Failed(failure)));
        self.control.clear();
    }

    fn end(&mut self, number: u32, how: StreamEnd) {
        let Some(stream) = self.by_number.remove(&number) else { return };
        self.by_ticket.remove(&stream.ticket);
        if let Some(at) = stream.left_at {
            self.left.remove(at, number, stream.kept());
        }
        self.sendable.retain(|other| *other != number);
        self.control.retain(|control| *control != Control::Credit(number));
        self.news.push(StreamEvent { stream: stream.ticket, what: StreamNews::Ended(how) });
    }

    /// After anything that concerns a stream.
    fn settle(&mut self, number: u32) {
        let Some(stream) = self.by_number.get_mut(&number) else { return };
        if stream.left_at.is_some() {
            stream.taken = stream.readable;
        }
        if stream.is_over() {
            return self.end(number, StreamEnd::Closed);
        }
        // Its owner waits for nothing that the peer may still send.
        if stream.left_at.is_some() && stream.is_all_acknowledged() {
            self.send_reset(number);
            return self.end(number, StreamEnd::Reset);
        }
        // It grows with what was taken: who has sent a request and nothing else gets no more.
        let window = (stream.taken * 4).clamp(FIRST_LIMIT, WINDOW);
        if stream.peers_end.is_none() && stream.taken + window >= stream.granted + CREDIT_STEP {
            stream.granted = stream.taken + window;
            if !self.control.contains(&Control::Credit(number)) {
                self.control.push_back(Control::Credit(number));
            }
        }
        self.list(number);
    }

    fn list(&mut self, number: u32) {
        if let Some(stream) = self.by_number.get_mut(&number)
            && !stream.is_listed
            && stream.is_sendable()
        {
            stream.is_listed = true;
            self.sendable.push_back(number);
        }
    }

    // --- What comes.

    /// Whether the parts behind this one can be taken with it.
    pub(super) fn goes_on(&self, chunk: &Chunk<'_>) -> bool {
        self.by_number.contains_key(&chunk.stream)
    }

    /// Bytes, in these pieces of the datagrams. `open` makes a name for a stream that the peer may open.
    pub(super) fn on_stream(
        &mut self,
        is_responder: bool,
        route: Route,
        chunk: &Chunk<'_>,
        pieces: &Pieces,
        open: impl FnOnce(u32) -> Option<Ticket>,
    ) -> Came {
        let number = chunk.stream;
        if !self.by_number.contains_key(&number) {
            let is_peers = number & 1 != u32::from(is_responder);
            let count = u64::from(number >> 1);
            // What is late of one that has ended is no news. (Of ours, too: those are known until they end.)
            if !is_peers || self.used.contains(count) {
                return Came::Yes;
            }
            let Some(service) = chunk.open else { return Came::NoRoom };
            if self.by_number.len() >= MOST_OPENED || self.control.len() >= CONTROL_WAITING {
                return Came::NoRoom;
            }
            self.use_number(count);
            let Some(ticket) = open(service) else {
                self.control.push_back(Control::Reset(number));
                return Came::Stranger;
            };
            self.by_ticket.insert(ticket, number);
            self.by_number.insert(number, Stream::new(ticket, None));
            self.tell(ticket, StreamNews::Opened { route, service });
        }
        let Some(stream) = self.by_number.get_mut(&number) else { return Came::Yes };
        let start = expand(chunk.offset, stream.readable);
        let range = start..start.saturating_add(pieces.len() as u64);
        let before = stream.readable;
        if !stream.take(&range, chunk.fin) {
            return Came::NoRoom;
        }
        let (ticket, readable) = (stream.ticket, stream.readable);
        let finished = !stream.is_peer_finished && stream.peers_end == Some(readable);
        stream.is_peer_finished |= finished;
        let (is_new, is_left) = (range.end > before, stream.left_at.is_some());
        if is_new && !is_left {
            let mut position = start;
            for at in pieces.ranges() {
                // What was readable before may be gone from the owner's buffer.
                let skipped = before.saturating_sub(position).min(at.len() as u64);
                let from = at.start + usize::try_from(skipped).unwrap_or(0);
                if from < at.end {
                    self.tell(ticket, StreamNews::Bytes { position: position + skipped, at: from..at.end });
                }
                position += at.len() as u64;
            }
        }
        if readable > before && !is_left {
            self.tell(ticket, StreamNews::Readable(readable));
        }
        if finished {
            self.tell(ticket, StreamNews::Finished);
        }
        self.settle(number);
        Came::Yes
    }

    fn use_number(&mut self, count: u64) {
        self.used.insert(count..count + 1);
        // An honest peer leaves no gaps for long.
        while self.used.count() > MOST_GAPS {
            let mut ranges = self.used.iter();
            let (Some(first), Some(second)) = (ranges.next(), ranges.next()) else { return };
            drop(ranges);
            self.used.insert(first.end..second.start);
        }
    }

    fn tell(&mut self, stream: Ticket, what: StreamNews) {
        self.news.push(StreamEvent { stream, what });
    }

    pub(super) fn on_credit(&mut self, credit: StreamCredit) {
        let Some(stream) = self.by_number.get_mut(&credit.stream) else { return };
        let limit = expand(credit.limit, stream.limit);
        if limit > stream.limit {
            stream.limit = limit;
            let ticket = stream.ticket;
            self.tell(ticket, StreamNews::Limit(limit));
            self.settle(credit.stream);
        }
    }

    pub(super) fn on_reset(&mut self, number: u32, is_responder: bool) {
        // One that was never heard of does not begin any more.
        if number & 1 != u32::from(is_responder) {
            self.use_number(u64::from(number >> 1));
        }
        self.end(number, StreamEnd::Reset);
    }

    // --- What becomes of what was sent.

    pub(super) fn on_acknowledged(&mut self, content: StreamContent) {
        let Some(stream) = self.by_number.get_mut(&content.stream) else { return };
        let before = stream.floor;
        stream.on_acknowledged(content.start..content.start + u64::from(content.len), content.fin);
        let (ticket, floor) = (stream.ticket, stream.floor);
        if stream.left_at.is_some() {
            self.left.on_acknowledged(floor - before);
        }
        if floor > before {
            self.tell(ticket, StreamNews::Acknowledged(floor));
        }
        self.settle(content.stream);
    }

    pub(super) fn on_lost(&mut self, content: StreamContent) {
        let Some(stream) = self.by_number.get_mut(&content.stream) else { return };
        stream.on_lost(content.start..content.start + u64::from(content.len), content.fin);
        self.list(content.stream);
    }

    /// A packet that said this is lost.
    pub(super) fn say_again(&mut self, control: Control) {
        let is_due = match control {
            Control::Credit(number) => self.by_number.contains_key(&number),
            Control::Reset(_) => true,
        };
        if is_due && !self.control.contains(&control) {
            self.control.push_back(control);
        }
    }

    // --- What is sent.

    /// What is to be said next, and the limit of a credit.
    pub(super) fn next_control(&mut self, said: usize) -> Option<(Control, u64)> {
        if said >= CONTROL_MOST {
            return None;
        }
        let control = self.control.pop_front()?;
        let granted = match control {
            Control::Credit(number) => self.by_number.get(&number).map_or(0, |stream| stream.granted),
            Control::Reset(_) => 0,
        };
        Some((control, granted))
    }

    /// The next part of at most `room` bytes with its header. `alone`: nothing is in the packet yet.
    pub(super) fn next_part(&mut self, room: usize, alone: bool) -> Option<StreamPart> {
        let number = *self.sendable.front()?;
        let stream = self.by_number.get_mut(&number)?;
        let mut chunk =
            Chunk { stream: number, offset: 0, open: None, fin: false, acknowledge: false, data: &[] };
        chunk.open = stream.service.filter(|_| stream.next_range(1).0.start == 0);
        let most = room.checked_sub(chunk.head_len()).filter(|most| *most > 0)?;
        let (range, again) = stream.next_range(most as u64);
        let is_cut = stream.next_range(u64::MAX >> 1).0.end > range.end;
        if is_cut && most < LEAST_PART && !alone {
            return None;
        }
        chunk.offset = low(range.start);
        let is_end = range.end == stream.offered && range.end >= stream.next;
        chunk.fin =
            is_end && matches!(stream.fin, Fin::Wanted | Fin::Sent) && stream.may_go_on_behind(&range);
        stream.on_sent(&range, chunk.fin);
        let len = u32::try_from(range.end - range.start).unwrap_or(0);
        let payload = Payload { ticket: stream.ticket, offset: low(range.start), len, at: 0, again };
        let content = StreamContent { stream: number, len, start: range.start, fin: chunk.fin };
        // The others come first next time.
        self.sendable.pop_front();
        stream.is_listed = false;
        self.list(number);
        Some(StreamPart { chunk, payload, content })
    }
}

impl Streams {
    /// How many parts as long as this one, which was sent last, follow it before the last bytes that were
    /// offered. 0: something else goes first.
    pub(super) fn most_to_go_on(&self, part: &StreamContent) -> u32 {
        let is_only = self.sendable.len() == 1 && self.sendable.front() == Some(&part.stream);
        let Some(stream) = self.by_number.get(&part.stream).filter(|_| is_only) else { return 0 };
        let end = part.start + u64::from(part.len);
        if part.fin || stream.next != end || !stream.missing.is_empty() || !stream.may_go_on() {
            return 0;
        }
        let left = stream.offered.min(stream.limit).saturating_sub(end);
        u32::try_from(left.saturating_sub(1) / u64::from(part.len.max(1))).unwrap_or(u32::MAX)
    }

    /// What follows was sent, up to this part and with it, and something is left.
    pub(super) fn on_gone_on(&mut self, part: &StreamContent) {
        if let Some(stream) = self.by_number.get_mut(&part.stream) {
            stream.next = stream.next.max(part.start + u64::from(part.len));
        }
    }
}

impl StreamContent {
    /// Makes the part that ends where this one begins a part of this one. False: it is none.
    pub(super) fn join(&mut self, before: &Self) -> bool {
        let touches = before.stream == self.stream && before.next().start == self.start && !before.fin;
        if touches {
            (self.start, self.len) = (before.start, before.len + self.len);
        }
        touches
    }

    /// That of the packet behind this one.
    pub(super) fn next(self) -> Self {
        Self { start: self.start + u64::from(self.len), ..self }
    }
}

impl Stream {
    /// Whether the end may go with this part.
    fn may_go_on_behind(&self, part: &Range<u64>) -> bool {
        self.service.is_none() || part.start == 0 || self.floor > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route() -> Route {
        Route { local: ([10, 0, 0, 1], 20_000).into(), remote: ([10, 0, 0, 2], 20_000).into() }
    }

    fn come(streams: &mut Streams, stream: u32, offset: u32, open: Option<Ticket>) -> Came {
        let chunk = Chunk {
            stream,
            offset,
            open: Some(7),
            fin: false,
            acknowledge: false,
            data: b"sixteen bytes!!!",
        };
        streams.on_stream(true, route(), &chunk, &Pieces::one(0..16), |_| open)
    }

    /// 46 chunks of one byte in a packet, each behind a gap of 262,000, made a listener's process grow by
    /// 12 MB.
    #[test]
    fn of_what_nobody_has_taken_little_is_kept() {
        let (mut streams, ticket) = (Streams::default(), Ticket(1));
        assert_eq!(come(&mut streams, 0, 0, Some(ticket)), Came::Yes);
        assert_eq!(come(&mut streams, 0, 4080, Some(ticket)), Came::Yes);
        assert_eq!(come(&mut streams, 0, 4081, Some(ticket)), Came::NoRoom);
        assert!(streams.control.is_empty(), "and the peer may send no more");
        streams.taken(ticket, 16);
        assert_eq!(come(&mut streams, 0, 65_520, Some(ticket)), Came::Yes);
        assert_eq!(
            come(&mut streams, 0, 65_521, Some(ticket)),
            Came::NoRoom,
            "a request alone is no traffic"
        );
        assert!(streams.control.is_empty());
    }

    #[test]
    fn the_limit_grows_with_what_is_taken() {
        let (mut streams, ticket) = (Streams::default(), Ticket(1));
        come(&mut streams, 0, 0, Some(ticket));
        streams.taken(ticket, 16);
        let mut limits = Vec::new();
        for offset in (16..200_000).step_by(16) {
            assert_eq!(come(&mut streams, 0, offset, Some(ticket)), Came::Yes);
            streams.taken(ticket, u64::from(offset) + 16);
            if streams.control.pop_front() == Some(Control::Credit(0)) {
                limits.push(streams.by_number[&0].granted);
            }
        }
        assert!(limits.windows(2).all(|pair| pair[1] >= pair[0] + CREDIT_STEP));
        assert!(limits.last().is_some_and(|last| *last > 200_000 + WINDOW - CREDIT_STEP));
    }

    /// Streams of a peer that acknowledges nothing: all are taken, and the one that was left first ends for
    /// the next one.
    fn left(streams: &mut Streams, count: u32, bytes: u64) -> Vec<Ticket> {
        let now = Instant::now();
        for number in 0..count {
            let ticket = Ticket(u64::from(number));
            assert_eq!(come(streams, number << 1, 0, Some(ticket)), Came::Yes);
            streams.with(ticket, |stream| {
                stream.offer(bytes);
                stream.leave(now);
            });
            streams.control.clear();
        }
        let ended = streams.news.drain(..).filter(|news| matches!(news.what, StreamNews::Ended(_)));
        ended.map(|news| news.stream).collect()
    }

    #[test]
    fn of_streams_that_were_left_the_oldest_ones_end() {
        let most = super::super::left::MOST_OF_PEER as u32;
        let mut streams = Streams::default();
        assert_eq!(left(&mut streams, most + 3, 1), [Ticket(0), Ticket(1), Ticket(2)]);
        assert_eq!(streams.by_number.len(), most as usize);
        let mut streams = Streams::default();
        assert_eq!(left(&mut streams, 34, 1 << 20), [Ticket(0), Ticket(1)], "32 MiB are kept");
        // What the peer has acknowledged is kept no more.
        let all = StreamContent { stream: 4, len: 1 << 20, start: 0, fin: false };
        streams.on_acknowledged(all);
        streams.with(Ticket(90), |_| unreachable!("no such stream"));
        come(&mut streams, 200, 0, Some(Ticket(100)));
        streams.news.clear();
        streams.with(Ticket(100), |stream| {
            stream.offer(1 << 20);
            stream.leave(Instant::now());
        });
        assert!(streams.news.is_empty(), "there is room for it");
        assert!(streams.timeout().is_some());
        streams.on_timeout(Instant::now() + super::super::left::LEFT_LIMIT);
        assert!(streams.by_number.is_empty() && streams.timeout().is_none());
    }

    #[test]
    fn refusals_that_wait_are_few() {
        let mut streams = Streams::default();
        let refused =
            (0..2000).filter(|count| come(&mut streams, count << 1, 0, None) == Came::Stranger).count();
        assert_eq!((refused, streams.control.len()), (CONTROL_WAITING, CONTROL_WAITING));
    }
}
