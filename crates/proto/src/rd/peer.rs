//! What a process keeps of one peer (the table of [`contact`](super::contact)).

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::exchange::{Exchange, LIFE, report};
use super::message::{Action, Failure, Outgoing, Route, Ticket};
use super::outgoing::{Finished, flush, take};
use super::streams::{Stream, StreamEvent};

/// Tokens that are kept of one peer besides its exchange's. With more, a new Open is refused.
pub(super) const DEAD_MOST: usize = 64;
/// The first Hellos are this far apart.
const HELLO_FIRST: Duration = Duration::from_millis(10);
/// And the others double from here on,
const HELLO_NEXT: Duration = Duration::from_millis(50);
/// up to here.
const HELLO_LONGEST: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) enum Attempt {
    Asking { token: u64, hellos: u32, since: Instant, sent: Option<Instant> },
    Opening(Box<Exchange>),
}

/// Names a peer while it is known. Another one may have the name later.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PeerId(u32);

/// All peers. What goes on with one finds it by name: comparing addresses costs more than most of that.
#[derive(Debug, Default)]
pub(super) struct Peers {
    /// The one that was found last is often the next.
    recent: Cell<PeerId>,
    by_route: BTreeMap<Route, PeerId>,
    slots: Vec<Option<Peer>>,
    unused: Vec<PeerId>,
}

impl Peers {
    pub(super) fn find(&self, route: Route) -> Option<PeerId> {
        let recent = self.recent.get();
        if self.get(recent).is_some_and(|peer| peer.route == route) {
            return Some(recent);
        }
        let found = self.by_route.get(&route).copied()?;
        self.recent.set(found);
        Some(found)
    }

    pub(super) fn of(&self, route: Route) -> Option<&Peer> {
        self.get(self.find(route)?)
    }

    pub(super) fn get(&self, id: PeerId) -> Option<&Peer> {
        self.slots.get(id.0 as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, id: PeerId) -> Option<&mut Peer> {
        self.slots.get_mut(id.0 as usize)?.as_mut()
    }

    /// A peer that is not known yet.
    pub(super) fn add(&mut self, route: Route) -> PeerId {
        let id = self.unused.pop().unwrap_or_else(|| {
            self.slots.push(None);
            PeerId(u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX))
        });
        if let Some(slot) = self.slots.get_mut(id.0 as usize) {
            *slot = Some(Peer::new(route));
        }
        self.by_route.insert(route, id);
        id
    }

    pub(super) fn remove(&mut self, id: PeerId) -> Option<Peer> {
        let peer = self.slots.get_mut(id.0 as usize)?.take()?;
        self.by_route.remove(&peer.route);
        self.unused.push(id);
        if self.by_route.is_empty() {
            // Nothing is left of many.
            *self = Self::default();
        }
        Some(peer)
    }

    pub(super) fn len(&self) -> usize {
        self.by_route.len()
    }

    /// In the order of their addresses.
    pub(super) fn ids(&self) -> Vec<PeerId> {
        self.by_route.values().copied().collect()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (PeerId, &Peer)> {
        self.by_route.values().filter_map(|id| Some((*id, self.get(*id)?)))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (PeerId, &mut Peer)> {
        (0..).map(PeerId).zip(&mut self.slots).filter_map(|(id, slot)| Some((id, slot.as_mut()?)))
    }
}

/// What is known of a peer.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) route: Route,
    pub(super) attempt: Option<Attempt>,
    pub(super) exchange: Option<Box<Exchange>>,
    /// Tokens that no Open may use any more.
    pub(super) dead: SmallVec<[Dead; 1]>,
    /// Messages that have no exchange yet, and since when.
    pub(super) waiting: VecDeque<(Ticket, Outgoing)>,
    pub(super) waiting_since: Option<Instant>,
    /// Streams that have no exchange yet.
    pub(super) waiting_streams: Vec<Stream>,
    /// What has happened to streams of exchanges that are over, and to those that wait.
    pub(super) stream_news: Vec<StreamEvent>,
    /// Its entry in the list of timers.
    pub(super) timer: Option<Instant>,
    /// When it was heard last, as [`Room`](super::room::Room) counts.
    pub(super) heard: u64,
    pub(super) is_queued: bool,
}

/// A token of an exchange that has ended early, or of an Open that was answered with Cross.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dead {
    pub(super) token: u64,
    pub(super) until: Instant,
    /// Nothing of its Opens was delivered, so Cross may be repeated.
    pub(super) is_crossed: bool,
}

impl Peer {
    fn new(route: Route) -> Self {
        Self {
            route,
            attempt: None,
            exchange: None,
            dead: SmallVec::new(),
            waiting: VecDeque::new(),
            waiting_since: None,
            waiting_streams: Vec::new(),
            stream_news: Vec::new(),
            timer: None,
            heard: 0,
            is_queued: false,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        let has_nothing = self.waiting.is_empty() && self.waiting_streams.is_empty();
        self.attempt.is_none() && self.exchange.is_none() && self.dead.is_empty() && has_nothing
    }

    pub(super) fn keep(&mut self, now: Instant, token: u64, is_crossed: bool) {
        self.dead.push(Dead { token, until: now + LIFE, is_crossed });
    }

    /// The exchange ends before its time. A responder keeps the token.
    pub(super) fn end_exchange(&mut self, now: Instant, failure: Failure, actions: &mut Vec<Action>) {
        let Some(mut exchange) = self.exchange.take() else { return };
        let queued = exchange.end(failure, actions);
        self.stream_news.append(&mut exchange.streams.news);
        if exchange.is_responder() {
            self.keep(now, exchange.start.peer_key, false);
        }
        if failure == Failure::Silent {
            actions.extend(queued.into_iter().map(|(ticket, _)| failed(ticket, failure)));
        } else {
            self.put_back(now, queued);
        }
    }

    /// Messages that were posted before those that wait.
    pub(super) fn put_back(&mut self, now: Instant, messages: Vec<(Ticket, Outgoing)>) {
        messages.into_iter().rev().for_each(|message| self.waiting.push_front(message));
        if !self.waiting.is_empty() {
            self.waiting_since.get_or_insert(now);
        }
    }

    /// The owner gives a message up. Returns whether it was this peer's, and had not ended.
    pub(super) fn withdraw(&mut self, now: Instant, ticket: Ticket, actions: &mut Vec<Action>) -> bool {
        let mut found = self.exchange.as_mut().and_then(|exchange| exchange.withdraw(now, ticket, actions));
        if let (None, Some(Attempt::Opening(opening))) = (found, &mut self.attempt) {
            found = opening.withdraw(now, ticket, actions);
        }
        let mut finished = Finished::new();
        if found.is_none() {
            found = take(&mut self.waiting, ticket);
            finished.extend(found.map(|_| (ticket, Err(Failure::Withdrawn))));
        }
        let Some(message) = found else { return false };
        if message.ordered {
            flush(&mut self.waiting, message.pair, ticket, &mut finished);
        }
        report(finished, actions);
        if self.waiting.is_empty() && self.waiting_streams.is_empty() {
            self.waiting_since = None;
        }
        if matches!(&self.attempt, Some(Attempt::Opening(opening)) if opening.is_idle_opening())
            && self.waiting_streams.is_empty()
        {
            self.attempt = None;
        }
        true
    }

    pub(super) fn fail_waiting(&mut self, failure: Failure, actions: &mut Vec<Action>) {
        self.waiting_since = None;
        self.fail_streams(failure);
        actions.extend(self.waiting.drain(..).map(|(ticket, _)| failed(ticket, failure)));
    }
}

pub(super) fn failed(ticket: Ticket, failure: Failure) -> Action {
    Action::Finished { ticket, outcome: Err(failure) }
}

/// When the next Hello is due. `None`: the attempt asks no more.
pub(super) fn hello_at(attempt: &Attempt) -> Option<Instant> {
    let Attempt::Asking { hellos, since, sent, .. } = attempt else { return None };
    let Some(sent) = sent else { return Some(*since) };
    let pause = match hellos.checked_sub(4) {
        None => HELLO_FIRST,
        Some(doublings) => (HELLO_NEXT * (1 << doublings.min(8))).min(HELLO_LONGEST),
    };
    Some(*sent + pause)
}
