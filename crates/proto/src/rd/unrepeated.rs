//! Messages that are not repeated: those of unreliable connections (flag N, docs/rd.md section 5.5).
//!
//! They share the packets of the exchange: its keys, its numbers, its pace. But nothing is kept of a message
//! that has left, at either end. So a message has left when its last packet is made, and the receiving queue
//! pair decides alone when it is whole or lost. Their numbers are a count of their own: the reliable ones'
//! says which have ended, and must have no gap for ever.

use std::collections::VecDeque;
use std::time::Instant;

use uwarp_wire::rd::expand;
use uwarp_wire::rd::segment::{Head, Segment};

use super::exchange::{Exchange, Phase};
use super::incoming::IncomingMessages;
use super::message::{Action, Arrival, Bytes, Failure, MessageId, Outgoing, QpnPair, Route, Ticket};
use super::outgoing::{Finished, Part, take};

/// The sender's side.
#[derive(Debug, Default)]
pub(super) struct Unrepeated {
    queue: VecDeque<(Ticket, Outgoing)>,
    /// Of the first one: up to here it has left; `None`: nothing of it.
    at: Option<u32>,
    /// The number of the last message that was begun.
    number: u64,
    /// Messages that have left, and of which the owner has not heard.
    left: Vec<Ticket>,
    /// A reliable message goes next, if there is one.
    is_others_turn: bool,
}

impl Unrepeated {
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The owner gives a message up. `Some`: it was here.
    pub(super) fn withdraw(&mut self, ticket: Ticket, finished: &mut Finished) -> Option<Outgoing> {
        let is_first = self.queue.front().is_some_and(|(first, _)| *first == ticket);
        let message = take(&mut self.queue, ticket)?;
        if is_first {
            self.at = None;
        }
        finished.push((ticket, Err(Failure::Withdrawn)));
        Some(message)
    }

    /// The exchange ends: a message that has left in part fails, the others may go to another one.
    pub(super) fn end(
        &mut self,
        failure: Failure,
        finished: &mut Finished,
        queued: &mut Vec<(Ticket, Outgoing)>,
    ) {
        if self.at.take().is_some() {
            finished.extend(self.queue.pop_front().map(|(ticket, _)| (ticket, Err(failure))));
        }
        queued.extend(self.queue.drain(..));
    }

    /// Says which messages have left.
    #[inline]
    pub(super) fn report(&mut self, actions: &mut Vec<Action>) {
        if self.left.is_empty() {
            return;
        }
        actions.extend(self.left.drain(..).map(|ticket| Action::Finished { ticket, outcome: Ok(()) }));
    }

    /// The next segment of at most `room` bytes, cut only for a packet of its own, as that of another kind.
    fn next_part(&mut self, room: usize, alone: bool) -> Option<Part> {
        let (ticket, message) = self.queue.front()?;
        let (number, start) = (self.number + u64::from(self.at.is_none()), self.at.unwrap_or(0));
        let head = |message_len| Head {
            source_qpn: message.pair.source,
            destination_qpn: message.pair.destination,
            message: uwarp_wire::rd::low(number),
            behind: None,
            offset: start,
            message_len,
            first: (start == 0).then_some(message.first),
            acknowledge: false,
            idempotent: false,
            not_repeated: true,
        };
        let ddp_len = message.target.header(number, 0, true).len();
        let whole = head(None);
        let fits_whole = start == 0 && whole.len() + ddp_len + message.len as usize <= room;
        let (head, end) = if fits_whole {
            (whole, message.len)
        } else {
            let head = head(Some(message.len));
            let payload = room.checked_sub(head.len() + ddp_len).filter(|payload| *payload > 0)?;
            let most = start.saturating_add(u32::try_from(payload).unwrap_or(u32::MAX));
            if most < message.len && !alone {
                return None;
            }
            (head, message.len.min(most))
        };
        let ddp = message.target.header(number, start, end == message.len);
        let segment = Segment { head, ddp, payload: &[] };
        let part = Part { segment, ticket: *ticket, len: end - start, again: false, content: None };
        (self.number, self.at) = (number, Some(end));
        if end == message.len {
            self.at = None;
            self.left.push(*ticket);
            self.queue.pop_front();
        }
        Some(part)
    }
}

impl Exchange {
    pub(super) fn post_unrepeated(&mut self, now: Instant, ticket: Ticket, message: Outgoing) {
        self.unrepeated.queue.push_back((ticket, message));
        if self.phase == Phase::Opening {
            // An Open may be ignored in words, and its messages then move: so these wait for the answer.
            self.ping(now);
        }
    }

    /// Whether no message is queued or under way.
    pub(super) fn has_nothing(&self) -> bool {
        self.outgoing.is_empty() && self.unrepeated.is_empty()
    }

    pub(super) fn has_unrepeated(&self) -> bool {
        !self.unrepeated.is_empty() && self.phase != Phase::Opening
    }

    /// Something could be sent if there is room.
    pub(super) fn is_sendable(&self) -> bool {
        self.outgoing.is_sendable() || self.has_unrepeated() || self.has_stream_bytes()
    }

    /// The next segment: of both kinds in turns, if there are both.
    pub(super) fn next_part(&mut self, packet: u64, room: usize, alone: bool) -> Option<Part> {
        if !self.has_unrepeated() {
            return self.outgoing.next_part(packet, room, alone);
        }
        let others_first = !self.unrepeated.is_others_turn;
        self.unrepeated.is_others_turn = others_first;
        if others_first {
            let other = self.outgoing.next_part(packet, room, alone);
            other.or_else(|| self.unrepeated.next_part(room, alone))
        } else {
            let own = self.unrepeated.next_part(room, alone);
            own.or_else(|| self.outgoing.next_part(packet, room, alone))
        }
    }
}

impl IncomingMessages {
    /// Gives the owner a segment of which nothing is kept here.
    pub(super) fn pass_on(
        &mut self,
        route: Route,
        packet: u64,
        segment: &Segment<'_>,
        bytes: Bytes,
        arrivals: &mut Vec<Arrival>,
    ) {
        let head = &segment.head;
        // They have no order among each other that would have to be said.
        if head.idempotent || head.behind.is_some() {
            return;
        }
        let number = expand(head.message, self.unrepeated);
        self.unrepeated = self.unrepeated.max(number);
        arrivals.push(Arrival {
            route,
            message: MessageId { exchange: self.exchange, number },
            pair: QpnPair { source: head.source_qpn, destination: head.destination_qpn },
            first: head.first,
            ddp: segment.ddp,
            offset: head.offset,
            message_len: segment.message_len(),
            bytes,
            unrepeated: true,
            packet,
            len: u32::try_from(segment.payload.len()).unwrap_or(u32::MAX),
        });
    }
}
