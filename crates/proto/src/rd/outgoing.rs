//! Messages on their way out, until they have ended (docs/rd.md sections 5.3 and 6).
//!
//! | state | event | next |
//! |---|---|---|
//! | queued | a place in the window of numbers is free | sending |
//! | sending | VERDICT "not ready" of the present try | waiting; without retries: refused |
//! | waiting | the timer is over | alone |
//! | alone | the first segment is acknowledged | sending, the rest |
//! | alone | VERDICT "not ready" of the present try | waiting |
//! | sending, alone | another VERDICT | refused |
//! | sending, alone, waiting, refused | Done | gone: success; of a request, answered or asked |
//! | asked | its owner has the answer | gone |
//! | asked | its owner withdraws it | gone: failure is reported |
//! | queued | its owner withdraws it | gone: failure is reported, for those queued behind it too |
//! | sending, alone, waiting, refused | its owner withdraws it | withdrawn: failure is reported |
//! | withdrawn | Done | gone |
//! | refused, withdrawn | all before it in its flow have ended | abandoned, with all behind it: they fail |
//! | abandoned | it shows as ended | gone |
//!
//! A message gets its number when its first segment is sent. So what is queued has no part in the exchange
//! yet and may move to another.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rd::segment::{Head, Segment};

use super::message::{Failure, Outgoing, QpnPair, Ticket};
use super::range_set::RangeSet;
use super::recovery::Content;
use super::sorted::SortedMap;

/// The receiver takes no message so far above its floor (docs/rd.md section 3).
// TODO(docs/limits.md): one message that waits for a receive without limit holds the floor, and with it all
// others of the two processes. It cannot get a new number: a late copy under the old one may be delivered.
pub(super) const WINDOW: u64 = 2048;
/// In the timer of a VERDICT: the message has had a receive, which was taken back because the sender was
/// silent. The next try costs it no retry.
pub(super) const AGAIN: u8 = 0x80;
/// `rnr_retry` without a limit.
const RETRY_FOREVER: u8 = 7;
/// Messages that one ABANDON names. More go in several, the last first.
const ABANDON_MOST: usize = 128;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Sending,
    Alone,
    Waiting(Instant),
    Refused(Failure),
    /// Its end is reported. Nothing of it is sent any more.
    Withdrawn,
    Abandoned,
}

#[derive(Debug)]
struct Record {
    ticket: Ticket,
    message: Outgoing,
    /// As it travels; the same in every repair.
    behind: Option<u16>,
    state: State,
    /// Counts the tries, so that an acknowledgement of an earlier one does not count.
    attempt: u16,
    /// The first packet of the present try.
    since: u64,
    /// Up to here it has been sent in this try.
    next: u32,
    acknowledged: RangeSet,
    missing: RangeSet,
    retries: u8,
    /// The owner has its answer.
    is_answered: bool,
}

impl Record {
    /// An empty message has one byte here, so that it can be sent and acknowledged.
    fn span(&self) -> u32 {
        self.message.len.max(1)
    }

    fn is_sendable(&self) -> bool {
        match self.state {
            State::Sending => self.next < self.span() || !self.missing.is_empty(),
            State::Alone => self.next == 0 || !self.missing.is_empty(),
            _ => false,
        }
    }

    fn is_reported(&self) -> bool {
        matches!(self.state, State::Withdrawn | State::Abandoned)
    }
}

/// A segment that goes into a packet.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) segment: Segment<'static>,
    pub(super) ticket: Ticket,
    pub(super) len: u32,
    pub(super) again: bool,
    /// What is to be done again if it is lost.
    pub(super) content: Option<Content>,
}

#[derive(Debug)]
struct Group {
    /// Not confirmed yet, ascending.
    messages: Vec<u64>,
    is_due: bool,
}

/// What has become of posted messages.
pub(super) type Finished = SmallVec<[(Ticket, Result<(), Failure>); 2]>;

/// The sender's side of messages.
#[derive(Debug)]
pub(super) struct OutgoingMessages {
    queue: VecDeque<(Ticket, Outgoing)>,
    /// Queued behind a message of its flow that waits, or from a request on that must not begin yet.
    parked: BTreeMap<QpnPair, VecDeque<(Ticket, Outgoing)>>,
    /// Requests that wait for answers to others: the flows that begin with one, and those of no flow.
    starved: BTreeSet<QpnPair>,
    held: VecDeque<(Ticket, Outgoing)>,
    /// Requests that have begun and are not answered, and how many there may be.
    requests: usize,
    most_requests: usize,
    records: SortedMap<u64, Record>,
    /// Records with something to send; the oldest goes first.
    sendable: SortedMap<u64, ()>,
    /// Records that wait for a receive, by the end of their timer.
    waiting: BTreeSet<(Instant, u64)>,
    /// Records that are refused or withdrawn, until it is their turn to be abandoned.
    failing: BTreeSet<u64>,
    /// Numbers of each flow that have not ended, ascending.
    flows: SortedMap<QpnPair, SmallVec<[u64; 2]>>,
    next_number: u64,
    /// All below have ended.
    floor: u64,
    groups: BTreeMap<u64, Group>,
    next_group: u64,
    /// Requests that are Done and whose answers have not come.
    asked: BTreeMap<Ticket, Outgoing>,
}

impl OutgoingMessages {
    /// Keeps no more room than it needs.
    pub(super) fn shrink(&mut self) {
        self.queue.shrink_to_fit();
        self.held.shrink_to_fit();
        self.records.shrink();
        self.sendable.shrink();
        self.flows.shrink();
    }

    /// With so many requests at a time.
    pub(super) fn new(most_requests: usize) -> Self {
        Self {
            most_requests,
            queue: VecDeque::new(),
            parked: BTreeMap::new(),
            starved: BTreeSet::new(),
            held: VecDeque::new(),
            requests: 0,
            records: SortedMap::default(),
            sendable: SortedMap::default(),
            waiting: BTreeSet::new(),
            failing: BTreeSet::new(),
            flows: SortedMap::default(),
            next_number: 1,
            floor: 1,
            groups: BTreeMap::new(),
            next_group: 0,
            asked: BTreeMap::new(),
        }
    }

    pub(super) fn post(&mut self, ticket: Ticket, message: Outgoing) {
        self.queue.push_back((ticket, message));
    }

    /// No message is queued or under way.
    pub(super) fn is_empty(&self) -> bool {
        !self.has_begun() && self.queue.is_empty() && self.parked.is_empty() && self.held.is_empty()
    }

    /// Messages are under way: some of them may have been delivered.
    pub(super) fn has_begun(&self) -> bool {
        !self.records.is_empty() || !self.asked.is_empty()
    }

    /// The peer owes news of a message, or an answer, not only news of packets.
    pub(super) fn awaits_news(&self) -> bool {
        self.records.len() > self.waiting.len() || !self.asked.is_empty()
    }

    pub(super) fn next_number(&self) -> u64 {
        self.next_number
    }

    /// Something could be sent if there is room.
    pub(super) fn is_sendable(&self) -> bool {
        !self.sendable.is_empty() || self.may_begin()
    }

    fn may_begin(&self) -> bool {
        (!self.queue.is_empty() || self.may_feed()) && self.next_number < self.floor + WINDOW
    }

    /// Requests wait, and one may begin.
    fn may_feed(&self) -> bool {
        self.requests < self.most_requests && !(self.starved.is_empty() && self.held.is_empty())
    }

    /// Brings one of them to the queue again.
    fn feed(&mut self) {
        if !self.may_feed() {
            return;
        }
        match self.starved.pop_first() {
            Some(pair) => self.unpark(pair),
            None => self.held.pop_front().into_iter().for_each(|held| self.queue.push_front(held)),
        }
    }

    /// Whether a new message of this flow would overtake one, or would only be held or refused.
    fn must_wait(&self, pair: QpnPair) -> bool {
        let flow = self.flows.get(&pair);
        let mut ends = flow.into_iter().flat_map(|flow| [flow.first(), flow.last()]).flatten();
        self.parked.contains_key(&pair) || ends.any(|end| self.records.get(end).is_some_and(is_stopped))
    }

    /// The next segment of at most `room` bytes, all headers included, in packet `packet`. A message is cut
    /// only to fill a packet of its own (`alone`), so that packets of a long message have one length.
    pub(super) fn next_part(&mut self, packet: u64, room: usize, alone: bool) -> Option<Part> {
        let number = match self.sendable.first() {
            Some((number, ())) => *number,
            None => self.begin()?,
        };
        let record = self.records.get_mut(&number)?;
        let span = record.span();
        let (start, end, again) = match record.missing.iter().next() {
            Some(range) => (to_u32(range.start), to_u32(range.end), true),
            None => (record.next, span, record.attempt > 0),
        };
        let message = &record.message;
        let head = |message_len| Head {
            source_qpn: message.pair.source,
            destination_qpn: message.pair.destination,
            message: uwarp_wire::rd::low(number),
            behind: record.behind,
            offset: start,
            message_len,
            first: (start == 0).then_some(message.first),
            acknowledge: false,
            idempotent: false,
            not_repeated: false,
        };
        let ddp_len = message.target.header(number, 0, true).len();
        let whole = head(None);
        let fits_whole = start == 0 && whole.len() + ddp_len + message.len as usize <= room;
        let (head, end) = if fits_whole {
            (whole, span)
        } else {
            let head = head(Some(message.len));
            let payload = room.checked_sub(head.len() + ddp_len).filter(|payload| *payload > 0)?;
            let most = start.saturating_add(u32::try_from(payload).unwrap_or(u32::MAX));
            if most < end && !alone {
                return None;
            }
            (head, end.min(most))
        };
        let len = end.min(message.len) - start;
        let ddp = message.target.header(number, start, end == span);
        let part = Part {
            segment: Segment { head, ddp, payload: &[] },
            ticket: record.ticket,
            len,
            again,
            content: Some(Content::Segment { message: number, attempt: record.attempt, start, end }),
        };
        if record.next == 0 {
            record.since = packet;
        }
        record.missing.remove_below(u64::from(end));
        record.next = record.next.max(end);
        self.note(number);
        Some(part)
    }

    /// How many parts as long as this one, which was sent last, follow it before the last one of its message.
    /// 0: something else goes first.
    pub(super) fn most_to_go_on(&self, message: u64, part: &Range<u32>) -> u32 {
        let is_next = self.sendable.first().is_some_and(|(first, ())| *first == message);
        let Some(record) = self.records.get(&message).filter(|_| is_next) else { return 0 };
        if record.state != State::Sending || record.next != part.end || !record.missing.is_empty() {
            return 0;
        }
        let left = record.span().saturating_sub(part.end);
        left.saturating_sub(1) / (part.end - part.start).max(1)
    }

    /// What follows was sent up to here, and something is left.
    pub(super) fn on_gone_on(&mut self, message: u64, end: u32) {
        if let Some(record) = self.records.get_mut(&message) {
            record.next = record.next.max(end);
        }
    }

    /// Gives the next queued message a number.
    fn begin(&mut self) -> Option<u64> {
        while self.may_begin() {
            self.feed();
            let (ticket, message) = self.queue.pop_front()?;
            let asks = message.target.is_answered();
            let is_starved = asks && self.requests >= self.most_requests;
            if is_starved && !message.ordered {
                self.held.push_back((ticket, message));
                continue;
            }
            let number = self.next_number;
            let mut behind = None;
            if message.ordered {
                if is_starved || self.must_wait(message.pair) {
                    if is_starved {
                        self.starved.insert(message.pair);
                    }
                    self.parked.entry(message.pair).or_default().push_back((ticket, message));
                    continue;
                }
                let flow = self.flows.get_or_insert_with(message.pair, SmallVec::new)?;
                // The window bounds the distance.
                let distance = flow.last().map_or(0, |last| number - last);
                behind = Some(u16::try_from(distance).unwrap_or(u16::MAX));
                flow.push(number);
            }
            self.next_number += 1;
            self.requests += usize::from(asks);
            let record = Record {
                ticket,
                message,
                behind,
                state: State::Sending,
                attempt: 0,
                since: 0,
                next: 0,
                acknowledged: RangeSet::default(),
                missing: RangeSet::default(),
                retries: message.rnr_retry,
                is_answered: false,
            };
            self.records.insert(number, record);
            // It may not fit into this packet.
            self.sendable.insert(number, ());
            return Some(number);
        }
        None
    }

    /// Everything that is queued, in the order of the posts of each flow.
    fn gather_queued(&mut self) {
        self.starved.clear();
        self.queue.append(&mut self.held);
        let pairs: Vec<QpnPair> = self.parked.keys().copied().collect();
        pairs.into_iter().for_each(|pair| self.unpark(pair));
    }

    /// Keeps `sendable` true of a record.
    fn note(&mut self, number: u64) {
        if self.records.get(&number).is_some_and(Record::is_sendable) {
            self.sendable.insert(number, ());
        } else {
            self.sendable.remove(&number);
        }
    }

    /// Messages behind one that waits come to the queue again.
    fn unpark(&mut self, pair: QpnPair) {
        for parked in self.parked.remove(&pair).into_iter().flatten().rev() {
            self.queue.push_front(parked);
        }
    }

    /// A part has arrived.
    pub(super) fn on_acknowledged(&mut self, message: u64, attempt: u16, start: u32, end: u32) {
        let Some(record) = self.records.get_mut(&message).filter(|record| record.attempt == attempt) else {
            return;
        };
        record.acknowledged.insert(u64::from(start)..u64::from(end));
        if !record.missing.is_empty() {
            let mut missing = RangeSet::default();
            for range in record.missing.iter() {
                record.acknowledged.missing_in(range).into_iter().for_each(|left| {
                    missing.insert(left);
                });
            }
            record.missing = missing;
        }
        let mut goes_on = None;
        if record.state == State::Alone && start == 0 {
            record.state = State::Sending;
            goes_on = Some(record.message.pair);
        }
        self.note(message);
        if let Some(pair) = goes_on {
            self.unpark(pair);
        }
    }

    /// A part is lost, or a probe repeats it.
    pub(super) fn on_lost(&mut self, message: u64, attempt: u16, start: u32, end: u32) {
        let Some(record) = self.records.get_mut(&message).filter(|record| record.attempt == attempt) else {
            return;
        };
        for range in record.acknowledged.missing_in(u64::from(start)..u64::from(end)) {
            record.missing.insert(range);
        }
        self.note(message);
    }

    /// The peer says that a message has ended.
    pub(super) fn on_ended(&mut self, number: u64, finished: &mut Finished) -> bool {
        let Some(record) = self.records.remove(&number) else { return false };
        self.sendable.remove(&number);
        self.failing.remove(&number);
        if let State::Waiting(until) = record.state {
            self.waiting.remove(&(until, number));
        }
        if record.is_reported() {
            self.groups.values_mut().for_each(|group| group.messages.retain(|other| *other != number));
            self.groups.retain(|_, group| !group.messages.is_empty());
        } else if !record.message.target.is_answered() {
            finished.push((record.ticket, Ok(())));
        } else if !record.is_answered {
            self.asked.insert(record.ticket, record.message);
        }
        let is_over = record.is_reported() || record.is_answered;
        if record.message.target.is_answered() && is_over {
            self.requests = self.requests.saturating_sub(1);
        }
        if record.message.ordered {
            let pair = record.message.pair;
            if let Some(flow) = self.flows.get_mut(&pair) {
                flow.retain(|other| *other != number);
                if flow.is_empty() {
                    self.flows.remove(&pair);
                }
            }
            if is_stopped(&record) {
                self.unpark(pair);
            }
        }
        true
    }

    /// The peer says that all messages below have ended. Returns whether that is news.
    pub(super) fn on_floor(&mut self, floor: u64, finished: &mut Finished) -> bool {
        let ended: SmallVec<[u64; 8]> = self.records.range(..floor).map(|(number, _)| *number).collect();
        ended.iter().for_each(|number| {
            self.on_ended(*number, finished);
        });
        self.floor = self.floor.max(floor);
        !ended.is_empty()
    }

    /// The peer does not take a message. `packet` is the one that it refused.
    pub(super) fn on_verdict(&mut self, now: Instant, number: u64, reason: Reason, timer: u8, packet: u64) {
        let Some(record) = self.records.get_mut(&number) else { return };
        let is_open = matches!(record.state, State::Sending | State::Alone);
        if reason == Reason::ReceiverNotReady {
            // One of an earlier try says nothing of this one.
            if !is_open || packet < record.since {
                return;
            }
            let is_free = timer & AGAIN != 0;
            if record.retries == 0 && !is_free {
                record.state = State::Refused(Failure::NoReceive);
                self.failing.insert(number);
            } else {
                record.retries -= u8::from(record.retries != RETRY_FOREVER && !is_free);
                let until = now + rnr_delay(timer);
                record.state = State::Waiting(until);
                self.waiting.insert((until, number));
            }
            record.attempt = record.attempt.wrapping_add(1);
            // The next try may wait for the window, and this VERDICT comes again meanwhile.
            record.since = u64::MAX;
            record.next = 0;
            record.acknowledged.clear();
            record.missing.clear();
        } else if !record.is_reported() && !matches!(record.state, State::Refused(_)) {
            if let State::Waiting(until) = record.state {
                self.waiting.remove(&(until, number));
            }
            record.state = State::Refused(Failure::Refused(reason));
            self.failing.insert(number);
        }
        self.note(number);
    }

    /// So many receives have been posted for this queue pair: as many that wait for them try now, the oldest
    /// first. Their timers have not ended, so this try costs no retry.
    pub(super) fn on_ready(&mut self, qpn: u32, receives: u8) {
        let is_for = |record: &Record| record.message.pair.destination == qpn;
        let mut ready: Vec<(Instant, u64)> = self.waiting.iter().copied().collect();
        ready.retain(|(_, number)| self.records.get(number).is_some_and(is_for));
        ready.sort_unstable_by_key(|(_, number)| *number);
        for entry in ready.into_iter().take(usize::from(receives)) {
            if let Some(record) = self.records.get_mut(&entry.1) {
                record.retries = record.retries.saturating_add(1).min(record.message.rnr_retry);
            }
            self.try_again(entry);
        }
    }

    /// When [`Self::on_timeout`] has something to do.
    pub(super) fn timeout(&self) -> Option<Instant> {
        self.waiting.first().map(|(until, _)| *until)
    }

    /// Messages whose timer is over try again.
    pub(super) fn on_timeout(&mut self, now: Instant) {
        while let Some(entry) = self.waiting.first().copied().filter(|(until, _)| *until <= now) {
            self.try_again(entry);
        }
    }

    fn try_again(&mut self, entry: (Instant, u64)) {
        self.waiting.remove(&entry);
        if let Some(record) = self.records.get_mut(&entry.1) {
            record.state = State::Alone;
        }
        self.note(entry.1);
    }

    /// The owner has the answer to a request. Returns whether it was here.
    pub(super) fn on_answered(&mut self, ticket: Ticket, finished: &mut Finished) -> bool {
        // Most often the news that it is Done have come with the answer.
        if self.asked.remove(&ticket).is_some() {
            self.requests = self.requests.saturating_sub(1);
            return true;
        }
        // Otherwise the answer is the news.
        let record = self.records.iter_mut().find(|(_, record)| record.ticket == ticket);
        let Some((number, record)) = record else { return false };
        record.is_answered = true;
        let number = *number;
        self.on_ended(number, finished);
        self.fail_in_turn(finished);
        true
    }

    /// The owner gives a message up. `Some`: it was here, and had not ended.
    pub(super) fn withdraw(&mut self, ticket: Ticket, finished: &mut Finished) -> Option<Outgoing> {
        if let Some(message) = self.asked.remove(&ticket) {
            finished.push((ticket, Err(Failure::Withdrawn)));
            self.requests = self.requests.saturating_sub(1);
            // It is Done, so nothing behind it in its flow fails.
            return Some(Outgoing { ordered: false, ..message });
        }
        let begun =
            self.records.iter().find(|(_, record)| record.ticket == ticket).map(|(number, _)| *number);
        let message = match begun {
            Some(number) => self.withdraw_begun(number)?,
            None => self.take_queued(ticket)?,
        };
        finished.push((ticket, Err(Failure::Withdrawn)));
        if message.ordered {
            self.flush_queued(message.pair, ticket, finished);
        }
        self.fail_in_turn(finished);
        Some(message)
    }

    fn withdraw_begun(&mut self, number: u64) -> Option<Outgoing> {
        let record = self.records.get_mut(&number).filter(|record| !record.is_reported())?;
        if let State::Waiting(until) = record.state {
            self.waiting.remove(&(until, number));
        }
        record.state = State::Withdrawn;
        let message = record.message;
        self.failing.insert(number);
        self.note(number);
        Some(message)
    }

    fn take_queued(&mut self, ticket: Ticket) -> Option<Outgoing> {
        let queues = self.parked.values_mut().chain([&mut self.queue, &mut self.held]);
        let message = queues.into_iter().find_map(|queue| take(queue, ticket));
        self.parked.retain(|_, parked| !parked.is_empty());
        message
    }

    /// Fails what is queued of a flow behind a message.
    fn flush_queued(&mut self, pair: QpnPair, behind: Ticket, finished: &mut Finished) {
        if let Some(parked) = self.parked.get_mut(&pair) {
            flush(parked, pair, behind, finished);
        }
        self.parked.retain(|_, parked| !parked.is_empty());
        flush(&mut self.queue, pair, behind, finished);
    }

    /// Fails what was refused or withdrawn and whose turn it is, with everything behind it in its flow.
    pub(super) fn fail_in_turn(&mut self, finished: &mut Finished) {
        let is_due =
            |number: &u64| self.records.get(number).is_some_and(|record| self.is_in_turn(*number, record));
        let now: Vec<u64> = self.failing.iter().copied().filter(is_due).collect();
        now.into_iter().for_each(|number| self.abandon(number, finished));
    }

    fn is_in_turn(&self, number: u64, record: &Record) -> bool {
        let flow = self.flows.get(&record.message.pair).filter(|_| record.message.ordered);
        flow.is_none_or(|flow| flow.first() == Some(&number))
    }

    fn abandon(&mut self, number: u64, finished: &mut Finished) {
        let Some(record) = self.records.get(&number) else { return };
        let (ticket, pair, ordered) = (record.ticket, record.message.pair, record.message.ordered);
        let flow = self.flows.get(&pair).filter(|_| ordered);
        let messages: Vec<u64> = match flow {
            Some(flow) => flow.iter().copied().filter(|other| *other >= number).collect(),
            None => vec![number],
        };
        for (at, number) in messages.iter().enumerate() {
            let Some(record) = self.records.get_mut(number) else { continue };
            let failure = match std::mem::replace(&mut record.state, State::Abandoned) {
                State::Withdrawn | State::Abandoned => None,
                State::Refused(failure) if at == 0 => Some(failure),
                State::Waiting(until) => {
                    self.waiting.remove(&(until, *number));
                    Some(Failure::Flushed)
                }
                _ => Some(Failure::Flushed),
            };
            self.sendable.remove(number);
            self.failing.remove(number);
            finished.extend(failure.map(|failure| (record.ticket, Err(failure))));
        }
        if ordered {
            // What is queued behind it has no number yet; it was posted before the failure.
            self.flush_queued(pair, ticket, finished);
        }
        self.groups.insert(self.next_group, Group { messages, is_due: true });
        self.next_group += 1;
    }

    /// A group of failed messages that the peer must hear of: its number, and the messages to name.
    pub(super) fn next_abandon(&self) -> Option<(u64, &[u64])> {
        let (number, group) = self.groups.iter().find(|(_, group)| group.is_due)?;
        let from = group.messages.len().saturating_sub(ABANDON_MOST);
        Some((*number, group.messages.get(from..).unwrap_or(&[])))
    }

    pub(super) fn on_abandon_sent(&mut self, group: u64) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.is_due = false;
        }
    }

    /// The packet with an ABANDON is lost, or it has arrived and some of the group are not confirmed yet.
    pub(super) fn on_abandon_due(&mut self, group: u64) {
        if let Some(group) = self.groups.get_mut(&group) {
            group.is_due = true;
        }
    }

    /// Ends everything: messages under way fail. Returns what is queued and may move to another exchange; in
    /// an ordered flow only if nothing before it fails now.
    pub(super) fn end(&mut self, failure: Failure, finished: &mut Finished) -> Vec<(Ticket, Outgoing)> {
        let mut all = std::mem::replace(self, Self::new(self.most_requests));
        let mut broken = BTreeSet::new();
        for record in all.records.values().filter(|record| record.state != State::Abandoned) {
            if record.message.ordered {
                broken.insert(record.message.pair);
            }
            let failure = match record.state {
                State::Withdrawn => continue,
                State::Refused(failure) => failure,
                _ => failure,
            };
            finished.push((record.ticket, Err(failure)));
        }
        finished.extend(all.asked.keys().map(|ticket| (*ticket, Err(failure))));
        all.gather_queued();
        let (flushed, queued): (Vec<_>, Vec<_>) =
            all.queue.into_iter().partition(|(_, message)| message.ordered && broken.contains(&message.pair));
        finished.extend(flushed.into_iter().map(|(ticket, _)| (ticket, Err(Failure::Flushed))));
        queued
    }

    /// Takes all messages out, those under way too, in the order in which they were posted. Only after the
    /// peer has said that it ignored them (docs/rd.md section 4). What has failed meanwhile stays failed, and
    /// so does what was posted behind it before that.
    pub(super) fn take_all(&mut self, finished: &mut Finished) -> Vec<(Ticket, Outgoing)> {
        let mut all = std::mem::replace(self, Self::new(self.most_requests));
        all.gather_queued();
        let mut broken = BTreeSet::new();
        let mut left = Vec::new();
        for record in all.records.into_values() {
            match record.state {
                State::Abandoned => {}
                State::Withdrawn if record.message.ordered => {
                    broken.insert(record.message.pair);
                }
                State::Withdrawn => {}
                _ if record.message.ordered && broken.contains(&record.message.pair) => {
                    finished.push((record.ticket, Err(Failure::Flushed)));
                }
                _ => left.push((record.ticket, record.message)),
            }
        }
        // An honest peer has none of these: it has taken nothing.
        finished.extend(all.asked.into_keys().map(|ticket| (ticket, Err(Failure::Restarted))));
        left.extend(all.queue);
        left
    }
}

/// Takes a message out of a queue.
pub(super) fn take(queue: &mut VecDeque<(Ticket, Outgoing)>, ticket: Ticket) -> Option<Outgoing> {
    let at = queue.iter().position(|(other, _)| *other == ticket)?;
    queue.remove(at).map(|(_, message)| message)
}

/// Fails the messages of a queue that are of a flow and were posted after a message of it.
pub(super) fn flush(
    queue: &mut VecDeque<(Ticket, Outgoing)>,
    pair: QpnPair,
    behind: Ticket,
    finished: &mut Finished,
) {
    queue.retain(|(ticket, message)| {
        let is_behind = message.ordered && message.pair == pair && *ticket > behind;
        if is_behind {
            finished.push((*ticket, Err(Failure::Flushed)));
        }
        !is_behind
    });
}

/// New messages of its flow would only be held or refused.
fn is_stopped(record: &Record) -> bool {
    matches!(record.state, State::Waiting(_) | State::Alone | State::Refused(_) | State::Withdrawn)
}

fn to_u32(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// InfiniBand's RNR NAK timer field (volume 1, table 45): 5 bits.
pub fn rnr_delay(code: u8) -> Duration {
    const HUNDREDTHS_OF_MS: [u32; 32] = [
        65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768, 49_152,
    ];
    let hundredths = HUNDREDTHS_OF_MS.get(usize::from(code & 0x1F)).copied().unwrap_or(1);
    Duration::from_micros(10) * hundredths
}
