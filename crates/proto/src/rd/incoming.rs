//! Messages that arrive: each is delivered at most once, and in order where it asks for it (docs/rd.md
//! sections 5.2, 5.3 and 6).
//!
//! | state | event | next |
//! |---|---|---|
//! | none | a segment that may be placed | begun: it is placed, and takes a receive if it needs one |
//! | none, begun | a segment whose turn has not come | held |
//! | begun | no receive is posted | none, VERDICT "not ready" |
//! | begun | whole, and the message before it has ended | Done |
//! | begun | the owner refuses it | refused, VERDICT with the reason |
//! | begun, not whole | [`NO_PROGRESS`] without a new segment | none, and so those behind it |
//! | any but Done | ABANDON | ended |
//!
//! Both Done and ended are a number below the floor or in `ended`, and neither ever goes back.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use uwarp_wire::ddp;
use uwarp_wire::rd::chunk::{Reason, Verdict};
use uwarp_wire::rd::segment::{First, Segment};
use uwarp_wire::rd::{ack, expand, low};

use super::message::{Action, Arrival, Bytes, MessageId, Placed, QpnPair, Route, Target};
use super::outgoing::{AGAIN, WINDOW};
use super::range_set::RangeSet;
use super::sorted::SortedMap;

/// A message that has a receive and no new segment for this long gives it back.
pub(super) const NO_PROGRESS: Duration = Duration::from_secs(1);
/// Bytes that an exchange holds until their turn comes.
const HOLD: usize = 256 * 1024;
/// What a held segment costs besides its payload.
const HELD_COST: usize = 96;
/// Queue pairs of which the peer is known to know the Q_Key.
const PROVEN_MOST: usize = 8;
/// Verdicts in one packet. The others go with the next.
const VERDICTS_MOST: usize = 16;
/// The timer of a verdict on a message whose receive was taken back: at once.
const AT_ONCE: u8 = AGAIN | 1;

#[derive(Debug)]
struct Record {
    pair: QpnPair,
    len: u32,
    /// Of all segments the same: what is known of the message when the first one of them comes holds for it.
    target: Target,
    is_send: bool,
    /// The message before it in its flow; `None`: not ordered.
    ordered: Option<Before>,
    first: Option<First>,
    /// Placed, or given to the owner to be placed. An empty message has one byte here.
    arrived: RangeSet,
    has_receive: bool,
    refused: bool,
    /// Segments that the owner is placing.
    placing: u32,
    progress: Instant,
    /// The largest packet that brought a segment of it.
    packet: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    /// There was none under way.
    Nothing,
    Message(u64),
}

impl Record {
    fn is_whole(&self) -> bool {
        self.placing == 0 && self.arrived.covers(&(0..u64::from(self.len.max(1))))
    }

    /// A Send, or a Write with an immediate, of which that is known with its first segment.
    fn takes_receive(&self) -> bool {
        self.is_send || self.first.is_some_and(|first| first.immediate.is_some())
    }

    fn is_settled_by_arrival(&self) -> bool {
        self.ordered.is_none() || self.is_send
    }
}

#[derive(Debug)]
struct Held {
    first: Option<First>,
    ddp: ddp::Header,
    payload: Vec<u8>,
    packet: u64,
}

#[derive(Debug, Clone, Copy)]
struct Opinion {
    reason: Reason,
    timer: u8,
    packet: u64,
}

/// What a segment comes to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// It is acknowledged.
    Yes,
    /// There is no room for it now, or its sender contradicts itself: no acknowledgement.
    No,
}

/// The receiver's side of messages.
#[derive(Debug)]
pub(super) struct IncomingMessages {
    pub(super) exchange: u64,
    /// All below have ended.
    floor: u64,
    /// Above the floor.
    ended: RangeSet,
    records: SortedMap<u64, Record>,
    /// The message behind each one that has not ended.
    successors: SortedMap<u64, u64>,
    held: BTreeMap<(u64, u32), Held>,
    held_bytes: usize,
    /// Receives of each queue pair that messages have taken and not completed.
    bound: SortedMap<u32, usize>,
    /// The last queue pairs to which a Send of the peer's process was delivered, the newest first.
    proven: SmallVec<[u32; PROVEN_MOST]>,
    /// Told until a packet with it is acknowledged, or the message has ended.
    opinions: BTreeMap<u64, Opinion>,
    /// Where the last packet's list of verdicts, and its list of ended messages, went on.
    opinions_from: u64,
    ended_from: u64,
    /// Something has changed that the peer waits for.
    pub(super) has_news: bool,
    /// The largest number of a message that is not repeated.
    pub(super) unrepeated: u64,
}

impl IncomingMessages {
    /// Keeps no more room than it needs.
    pub(super) fn shrink(&mut self) {
        self.records.shrink();
        self.successors.shrink();
        self.bound.shrink();
    }

    pub(super) fn new(exchange: u64) -> Self {
        Self {
            exchange,
            floor: 1,
            ended: RangeSet::default(),
            records: SortedMap::default(),
            successors: SortedMap::default(),
            held: BTreeMap::new(),
            held_bytes: 0,
            bound: SortedMap::default(),
            proven: SmallVec::new(),
            opinions: BTreeMap::new(),
            opinions_from: 0,
            ended_from: 0,
            has_news: false,
            unrepeated: 0,
        }
    }

    fn has_ended(&self, number: u64) -> bool {
        number < self.floor || self.ended.contains(number)
    }

    /// A message below the floor has ended.
    pub(super) fn floor(&self) -> u64 {
        self.floor
    }

    /// Bytes that are held.
    pub(super) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Whether the parts behind this segment can be placed with it.
    pub(super) fn goes_on(&self, segment: &Segment<'_>) -> bool {
        let number = expand(segment.head.message, self.floor);
        let is_known = |record: &Record| record.first.is_some() && !record.refused;
        !self.has_ended(number)
            && self.records.get(&number).is_some_and(is_known)
            && self.may_place(number, segment.head.offset, false)
    }

    /// A segment has come in packet `packet`, its payload here in the datagram. With others behind it, the
    /// payload of all of them, and `packet` is the last one's: [`Self::goes_on`] has allowed it.
    pub(super) fn on_segment(
        &mut self,
        now: Instant,
        route: Route,
        packet: u64,
        segment: &Segment<'_>,
        bytes: Bytes,
        arrivals: &mut Vec<Arrival>,
    ) -> Taken {
        let head = &segment.head;
        if head.not_repeated {
            self.pass_on(route, packet, segment, bytes, arrivals);
            return Taken::Yes;
        }
        let number = expand(head.message, self.floor);
        if self.has_ended(number) {
            // A copy. Its sender may have missed the news.
            self.has_news = true;
            return Taken::Yes;
        }
        // Flag U needs what later steps of docs/rd.md section 8 bring; no peer sends it to us.
        if number >= self.floor + WINDOW || head.idempotent {
            return Taken::No;
        }
        let held = self.held.get(&(number, head.offset)).map(|held| held.payload.len());
        let Some(record) = self.record(now, number, segment) else { return Taken::No };
        record.packet = record.packet.max(packet);
        if record.refused {
            return Taken::Yes;
        }
        let span = span(head.offset, bytes.len());
        // A repair may be cut in other places, and be longer than what is held.
        if record.arrived.covers(&span) || held.is_some_and(|held| held >= bytes.len()) {
            return Taken::Yes;
        }
        if self.may_place(number, head.offset, head.first.is_some()) {
            self.give(now, route, number, packet, head.first, segment.ddp, head.offset, bytes, arrivals);
            return Taken::Yes;
        }
        let cost = segment.payload.len() + HELD_COST;
        let freed = held.map_or(0, |held| held + HELD_COST);
        if self.held_bytes - freed + cost > HOLD {
            return Taken::No;
        }
        self.held_bytes = self.held_bytes - freed + cost;
        let payload = segment.payload.to_vec();
        self.held
            .insert((number, head.offset), Held { first: head.first, ddp: segment.ddp, payload, packet });
        Taken::Yes
    }

    /// The record of a segment's message. `None`: the segment contradicts what is known of it.
    fn record(&mut self, now: Instant, number: u64, segment: &Segment<'_>) -> Option<&mut Record> {
        let head = &segment.head;
        let target = Target::of(&segment.ddp, head.offset);
        let is_send = target.takes_receive();
        let ordered = match head.behind {
            None => None,
            Some(0) => Some(Before::Nothing),
            Some(distance) => Some(Before::Message(number.checked_sub(u64::from(distance))?)),
        };
        let pair = QpnPair { source: head.source_qpn, destination: head.destination_qpn };
        if !self.records.contains_key(&number) {
            if let Some(Before::Message(before)) = ordered
                && before >= self.floor
                && !self.ended.contains(before)
            {
                // Two messages cannot be next behind one.
                if self.successors.get(&before).is_some_and(|other| *other != number) {
                    return None;
                }
                self.successors.insert(before, number);
            }
            let record = Record {
                pair,
                len: segment.message_len(),
                target,
                is_send,
                ordered,
                first: None,
                arrived: RangeSet::default(),
                has_receive: false,
                refused: false,
                placing: 0,
                progress: now,
                packet: 0,
            };
            self.records.insert(number, record);
        }
        self.records.get_mut(&number).filter(|record| {
            let known = (record.pair, record.len, record.target, record.ordered);
            known == (pair, segment.message_len(), target, ordered)
        })
    }

    /// Whether a segment may be placed now (docs/rd.md section 6).
    fn may_place(&self, number: u64, offset: u32, is_first: bool) -> bool {
        let Some(record) = self.records.get(&number) else { return false };
        let is_ready = match record.ordered {
            None | Some(Before::Nothing) => true,
            Some(Before::Message(before)) if self.has_ended(before) => true,
            Some(Before::Message(before)) => {
                let before = self.records.get(&before);
                // (A Write has a receive for its immediate data alone.)
                record.is_send && before.is_some_and(|before| before.is_send && before.has_receive)
            }
        };
        // The first segment has the Q_Key and the rights to memory. A Send only writes into its own receive;
        // but without the Q_Key it must not even take one, which it would have until it makes no progress.
        let has_rights = is_first
            || record.first.is_some()
            || (record.is_send && self.proven.contains(&record.pair.destination));
        let is_next = record.is_settled_by_arrival() || record.arrived.covers(&(0..u64::from(offset)));
        is_ready && has_rights && is_next
    }

    #[expect(clippy::too_many_arguments, reason = "one segment, from a packet or held")]
    fn give(
        &mut self,
        now: Instant,
        route: Route,
        number: u64,
        packet: u64,
        first: Option<First>,
        ddp: ddp::Header,
        offset: u32,
        bytes: Bytes,
        arrivals: &mut Vec<Arrival>,
    ) {
        let Some(record) = self.records.get_mut(&number) else { return };
        let len = bytes.len();
        record.arrived.insert(span(offset, len));
        record.first = record.first.or(first);
        let first = if record.is_send { first } else { record.first };
        record.placing += 1;
        record.progress = now;
        arrivals.push(Arrival {
            route,
            message: MessageId { exchange: self.exchange, number },
            pair: record.pair,
            first,
            ddp,
            offset,
            message_len: record.len,
            bytes,
            unrepeated: false,
            packet,
            len: u32::try_from(len).unwrap_or(u32::MAX),
        });
    }

    /// The owner has placed a segment, or not.
    pub(super) fn on_placed(
        &mut self,
        now: Instant,
        arrival: &Arrival,
        placed: Placed,
        arrivals: &mut Vec<Arrival>,
        actions: &mut Vec<Action>,
    ) {
        let number = arrival.message.number;
        let Some(record) = self.records.get_mut(&number) else { return };
        record.placing = record.placing.saturating_sub(1);
        let packet = record.packet.max(arrival.packet);
        match placed {
            Placed::Done => {
                if record.takes_receive() && !std::mem::replace(&mut record.has_receive, true) {
                    let bound = self.bound.get_or_insert_with(record.pair.destination, || 0);
                    bound.into_iter().for_each(|bound| *bound += 1);
                }
                if record.refused {
                    // A segment beside it was refused.
                    self.give_back(number, actions);
                    return;
                }
            }
            Placed::NoReceive(timer) => {
                if !record.has_receive {
                    record.arrived.clear();
                }
                self.judge(number, Reason::ReceiverNotReady, timer, packet);
                return;
            }
            Placed::Refused(reason) => {
                record.refused = true;
                // The Q_Key may be another one by now.
                let qpn = record.pair.destination;
                self.proven.retain(|other| *other != qpn);
                self.drop_held(number);
                self.give_back(number, actions);
                self.judge(number, reason, 0, packet);
                return;
            }
        }
        self.settle(now, arrival.route, number, arrivals, actions);
    }

    fn judge(&mut self, number: u64, reason: Reason, timer: u8, packet: u64) {
        // Another segment of a refused message may still be in the owner's hands, and find no receive.
        let is_refused = self.records.get(&number).is_some_and(|record| record.refused);
        if is_refused && reason == Reason::ReceiverNotReady {
            return;
        }
        self.opinions.insert(number, Opinion { reason, timer, packet });
        self.has_news = true;
    }

    /// After a change of this message: what is whole is delivered, what is held and may be placed is placed.
    fn settle(
        &mut self,
        now: Instant,
        route: Route,
        number: u64,
        arrivals: &mut Vec<Arrival>,
        actions: &mut Vec<Action>,
    ) {
        let mut next = Some(number);
        while let Some(number) = next.take() {
            self.release(now, route, number, arrivals);
            let Some(record) = self.records.get(&number) else { continue };
            let is_turn = match record.ordered {
                Some(Before::Message(before)) => self.has_ended(before),
                None | Some(Before::Nothing) => true,
            };
            let successor = self.successors.get(&number).copied();
            if record.is_whole() && is_turn && !record.refused {
                self.deliver(route, number, actions);
                next = successor;
            } else if record.has_receive
                && let Some(successor) = successor
            {
                // A Send may be placed as soon as the one before it has its receive.
                self.release(now, route, successor, arrivals);
            }
        }
    }

    /// Gives the owner what is held of a message and may be placed by now.
    fn release(&mut self, now: Instant, route: Route, number: u64, arrivals: &mut Vec<Arrival>) {
        while let Some(offset) = self
            .held
            .range((number, 0)..=(number, u32::MAX))
            .map(|((_, offset), held)| (*offset, held.first.is_some()))
            .find(|(offset, is_first)| self.may_place(number, *offset, *is_first))
            .map(|(offset, _)| offset)
        {
            let Some(held) = self.held.remove(&(number, offset)) else { return };
            self.held_bytes -= held.payload.len() + HELD_COST;
            let bytes = Bytes::Held(held.payload);
            self.give(now, route, number, held.packet, held.first, held.ddp, offset, bytes, arrivals);
        }
    }

    fn deliver(&mut self, route: Route, number: u64, actions: &mut Vec<Action>) {
        let Some(record) = self.records.remove(&number) else { return };
        if record.has_receive {
            self.unbind(record.pair.destination);
        }
        let qpn = record.pair.destination;
        if record.is_send && self.proven.first() != Some(&qpn) {
            self.proven.retain(|other| *other != qpn);
            self.proven.truncate(PROVEN_MOST - 1);
            self.proven.insert(0, qpn);
        }
        actions.push(Action::Deliver {
            route,
            message: MessageId { exchange: self.exchange, number },
            pair: record.pair,
            len: record.len,
            first: record.first.unwrap_or_default(),
            takes_receive: record.takes_receive(),
        });
        self.end(number);
    }

    /// From now on the message is one that has ended.
    fn end(&mut self, number: u64) {
        self.records.remove(&number);
        // Copies that a differently cut repair has overtaken.
        self.drop_held(number);
        self.opinions.remove(&number);
        self.successors.remove(&number);
        self.ended.insert(number..number + 1);
        let first = self.ended.iter().next().filter(|first| first.start == self.floor);
        if let Some(first) = first {
            self.floor = first.end;
            self.ended.remove_below(self.floor);
        }
        self.has_news = true;
    }

    fn drop_held(&mut self, number: u64) {
        let offsets: SmallVec<[u32; 8]> =
            self.held.range((number, 0)..=(number, u32::MAX)).map(|((_, offset), _)| *offset).collect();
        for offset in offsets {
            if let Some(held) = self.held.remove(&(number, offset)) {
                self.held_bytes -= held.payload.len() + HELD_COST;
            }
        }
    }

    /// The queue pair has ended, and takes nothing of what it has begun to take: those messages are refused.
    pub(super) fn refuse_all(&mut self, qpn: u32, reason: Reason, actions: &mut Vec<Action>) {
        self.proven.retain(|other| *other != qpn);
        let concerns = |record: &Record| record.pair.destination == qpn && !record.refused;
        let numbers: Vec<u64> =
            self.records.iter().filter(|(_, record)| concerns(record)).map(|(number, _)| *number).collect();
        // The last first, so that the order of the receives stays.
        for number in numbers.into_iter().rev() {
            let Some(record) = self.records.get_mut(&number) else { continue };
            record.refused = true;
            let packet = record.packet;
            self.drop_held(number);
            self.give_back(number, actions);
            self.judge(number, reason, 0, packet);
        }
    }

    /// Takes the receive of a message back. Its bytes must come again.
    fn give_back(&mut self, number: u64, actions: &mut Vec<Action>) {
        let Some(record) = self.records.get_mut(&number) else { return };
        record.arrived.clear();
        if std::mem::take(&mut record.has_receive) {
            let message = MessageId { exchange: self.exchange, number };
            let pair = record.pair;
            actions.push(Action::TakeBack { message, pair });
            self.unbind(pair.destination);
        }
    }

    /// Receives of a queue pair that messages have taken and not completed.
    pub(super) fn bound(&self, qpn: u32) -> usize {
        self.bound.get(&qpn).copied().unwrap_or(0)
    }

    fn unbind(&mut self, qpn: u32) {
        if let Some(count) = self.bound.get_mut(&qpn) {
            *count -= 1;
            if *count == 0 {
                self.bound.remove(&qpn);
            }
        }
    }

    /// The sender has failed these messages. `Taken::No`: it names one that cannot be.
    pub(super) fn on_abandon(
        &mut self,
        now: Instant,
        route: Route,
        messages: impl Iterator<Item = u32>,
        arrivals: &mut Vec<Arrival>,
        actions: &mut Vec<Action>,
    ) -> Taken {
        let mut numbers: Vec<u64> = messages.map(|message| expand(message, self.floor)).collect();
        if numbers.iter().any(|number| *number >= self.floor + WINDOW) {
            return Taken::No;
        }
        numbers.retain(|number| !self.has_ended(*number));
        numbers.sort_unstable();
        numbers.dedup();
        self.has_news = true;
        let mut behind = Vec::new();
        for number in numbers.into_iter().rev() {
            self.drop_held(number);
            self.give_back(number, actions);
            behind.extend(self.successors.get(&number).copied());
            self.end(number);
        }
        behind.into_iter().for_each(|number| self.settle(now, route, number, arrivals, actions));
        Taken::Yes
    }

    /// When [`Self::on_timeout`] has something to do.
    pub(super) fn timeout(&self) -> Option<Instant> {
        let stuck = self.records.values().filter(|record| record.has_receive && !record.is_whole());
        stuck.map(|record| record.progress + NO_PROGRESS).min()
    }

    /// Messages without progress give their receives back, with those behind them.
    pub(super) fn on_timeout(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let is_stuck = |record: &Record| {
            let is_late = record.progress + NO_PROGRESS <= now;
            record.has_receive && !record.is_whole() && record.placing == 0 && is_late
        };
        let stuck: Vec<u64> =
            self.records.iter().filter(|(_, record)| is_stuck(record)).map(|(number, _)| *number).collect();
        // The last first, so that the order of the receives stays.
        for number in stuck.into_iter().rev() {
            let mut flow = vec![number];
            while let Some(successor) = flow.last().and_then(|last| self.successors.get(last)) {
                flow.push(*successor);
            }
            for number in flow.into_iter().rev() {
                let Some(record) = self.records.get(&number).filter(|record| record.has_receive) else {
                    continue;
                };
                let packet = record.packet;
                self.give_back(number, actions);
                self.judge(number, Reason::ReceiverNotReady, AT_ONCE, packet);
            }
        }
    }

    /// The exchange ends: all receives go back.
    pub(super) fn give_everything_back(&mut self, actions: &mut Vec<Action>) {
        let numbers: Vec<u64> = self.records.keys().copied().collect();
        numbers.into_iter().rev().for_each(|number| self.give_back(number, actions));
        *self = Self::new(self.exchange);
    }

    /// Verdicts that the next packet carries, and the packet that each speaks of.
    pub(super) fn verdicts(&mut self) -> SmallVec<[(Verdict, u64, u64); 2]> {
        let from = self.opinions_from;
        let rotated = self.opinions.range(from..).chain(self.opinions.range(..from));
        let verdicts: SmallVec<[_; 2]> = rotated
            .take(VERDICTS_MOST)
            .map(|(number, Opinion { reason, timer, packet })| {
                let detail = u16::try_from(packet & 0xFFFF).unwrap_or(0);
                (Verdict { message: low(*number), reason: *reason, timer: *timer, detail }, *number, *packet)
            })
            .collect();
        self.opinions_from = verdicts.last().map_or(0, |(_, number, _)| number + 1);
        verdicts
    }

    /// Whether there is a verdict to tell.
    pub(super) fn has_verdicts(&self) -> bool {
        !self.opinions.is_empty()
    }

    /// The peer has heard the verdict that spoke of this packet. The first packet of a message may bring a
    /// refusal after a later one has found no receive: then two verdicts speak of the same packet.
    pub(super) fn on_verdict_arrived(&mut self, number: u64, packet: u64, reason: Reason) {
        let is_it = |opinion: &Opinion| (opinion.packet, opinion.reason) == (packet, reason);
        if self.opinions.get(&number).is_some_and(is_it) {
            self.opinions.remove(&number);
        }
    }

    /// Ranges of ended messages above the floor, at most so many. What finds no place is in a later one.
    pub(super) fn ended_ranges(&mut self, most: usize) -> SmallVec<[ack::Range; 8]> {
        let mut ranges = SmallVec::new();
        let is_after = |range: &std::ops::Range<u64>, from: u64| range.start >= from;
        let from = match self.ended.iter().any(|range| is_after(&range, self.ended_from)) {
            true if self.ended.iter().len() > most => self.ended_from,
            _ => 0,
        };
        let mut at = self.floor;
        for range in self.ended.iter().filter(|range| is_after(range, from)).take(most) {
            // The window is smaller than 16 bits.
            let short = |value: u64| u16::try_from(value).unwrap_or(u16::MAX);
            ranges.push(ack::Range { gap: short(range.start - at), length: short(range.end - range.start) });
            at = range.end;
        }
        self.ended_from = at;
        ranges
    }
}

/// The bytes of a segment; an empty message has one.
fn span(offset: u32, len: usize) -> std::ops::Range<u64> {
    let start = u64::from(offset);
    start..start + (len as u64).max(1)
}

#[cfg(test)]
mod tests {
    use uwarp_wire::ddp::Tagged;
    use uwarp_wire::rd::segment::Head;

    use super::*;

    /// A record of a Write-Record says where the message begins, and that all of it has come: each segment
    /// must go where the first one said.
    #[test]
    fn segments_of_one_message_agree() {
        let now = Instant::now();
        let at = |port| std::net::SocketAddr::from(([127, 0, 0, 1], port));
        let route = Route { local: at(1), remote: at(2) };
        let take =
            |incoming: &mut IncomingMessages, offset, stag, to: u64, rsvdulp, arrivals: &mut Vec<_>| {
                let first = First { qkey: 1, immediate: Some([0; 4]), job_key: Some(2) };
                let head = Head {
                    source_qpn: 0x100,
                    destination_qpn: 0x200,
                    message: 1,
                    offset,
                    message_len: Some(20),
                    first: (offset == 0).then_some(first),
                    behind: None,
                    idempotent: false,
                    not_repeated: false,
                    acknowledge: false,
                };
                let tagged = Tagged { last: offset == 10, stag, to: to + u64::from(offset), rsvdulp };
                let segment = Segment { head, ddp: ddp::Header::Tagged(tagged), payload: &[7; 10] };
                incoming.on_segment(now, route, 1, &segment, Bytes::Datagram(0..10), arrivals)
            };
        for (stag, to, rsvdulp, taken) in [
            (0x1234, 0x7000, 0x4C, Taken::Yes),
            (0x1235, 0x7000, 0x4C, Taken::No),
            (0x1234, 0x7001, 0x4C, Taken::No),
            (0x1234, 0x7000, 0x40, Taken::No),
        ] {
            let (mut incoming, mut arrivals) = (IncomingMessages::new(1), Vec::new());
            assert_eq!(take(&mut incoming, 0, 0x1234, 0x7000, 0x4C, &mut arrivals), Taken::Yes);
            let said = take(&mut incoming, 10, stag, to, rsvdulp, &mut arrivals);
            assert_eq!(
                (said == taken, arrivals.len()),
                (true, 1 + usize::from(taken == Taken::Yes)),
                "{to:#x}"
            );
        }
    }

    /// A later segment finds no receive, and then the first one is refused.
    #[test]
    fn two_verdicts_may_speak_of_one_packet() {
        let mut incoming = IncomingMessages::new(1);
        incoming.judge(1, Reason::ReceiverNotReady, 1, 5);
        assert_eq!(incoming.verdicts().len(), 1);
        incoming.judge(1, Reason::Access, 0, 5);
        incoming.on_verdict_arrived(1, 5, Reason::ReceiverNotReady);
        assert!(incoming.has_verdicts(), "the refusal is not told yet");
        incoming.on_verdict_arrived(1, 5, Reason::Access);
        assert!(!incoming.has_verdicts());
    }
}
