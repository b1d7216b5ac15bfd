//! Bounds of streams that are kept for the peer alone: their owners have left them, and what they have sent
//! is not acknowledged yet.
//!
//! A peer that acknowledges nothing keeps each of them for half a minute, with its bytes. So there are at
//! most so many of one peer and of all, and the one that was left first is ended for the next one: a new
//! stream is never refused for them. An honest peer has the rest of a stream after a round trip.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::message::Ticket;

/// Of one peer: how many, and bytes that they keep.
pub(super) const MOST_OF_PEER: usize = 2048;
const MOST_BYTES_OF_PEER: u64 = 32 << 20;
/// Of all peers of a port.
const MOST: usize = 8192;
const MOST_BYTES: u64 = 64 << 20;
/// A peer with more than this part of them ends its own when there are too many.
const SHARES: usize = 8;
/// A stream whose owner has left it ends within this time, whatever its peer takes.
pub(super) const LEFT_LIMIT: Duration = Duration::from_secs(30);

/// Those of an exchange, by their numbers.
#[derive(Debug, Default)]
pub(super) struct Left {
    order: BTreeSet<(Instant, u32)>,
    bytes: u64,
}

impl Left {
    pub(super) fn enter(&mut self, at: Instant, number: u32, bytes: u64) {
        if self.order.insert((at, number)) {
            self.bytes += bytes;
        }
    }

    /// The peer has acknowledged so many bytes of one.
    pub(super) fn on_acknowledged(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    pub(super) fn remove(&mut self, at: Instant, number: u32, bytes: u64) {
        if self.order.remove(&(at, number)) {
            self.bytes = self.bytes.saturating_sub(bytes);
        }
    }

    /// The number of the one that was left first, if this peer has more than its share of all.
    pub(super) fn first_of_many(&self) -> Option<u32> {
        let are_many = self.order.len() > MOST / SHARES || self.bytes > MOST_BYTES / SHARES as u64;
        self.order.first().filter(|_| are_many).map(|(_, number)| *number)
    }

    /// When the first of them is given up.
    pub(super) fn timeout(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at + LEFT_LIMIT)
    }

    /// One that must end: its time is over, or there are too many.
    pub(super) fn next_over(&self, now: Option<Instant>) -> Option<u32> {
        let (at, number) = *self.order.first()?;
        let is_due = now.is_some_and(|now| at + LEFT_LIMIT <= now);
        let are_many = self.order.len() > MOST_OF_PEER;
        // The last one may be as long as it likes: a pipe has its own limit.
        let are_long = self.bytes > MOST_BYTES_OF_PEER && self.order.len() > 1;
        (is_due || are_many || are_long).then_some(number)
    }
}

/// Those of all exchanges.
#[derive(Debug, Default)]
pub(super) struct AllLeft {
    count: u64,
    order: BTreeMap<u64, (Ticket, u64)>,
    places: BTreeMap<Ticket, u64>,
    bytes: u64,
}

impl AllLeft {
    /// It keeps so many bytes.
    pub(super) fn enter(&mut self, ticket: Ticket, bytes: u64) {
        self.count += 1;
        if self.places.contains_key(&ticket) {
            return;
        }
        self.places.insert(ticket, self.count);
        self.order.insert(self.count, (ticket, bytes));
        self.bytes += bytes;
    }

    pub(super) fn remove(&mut self, ticket: Ticket) {
        if let Some((_, bytes)) = self.places.remove(&ticket).and_then(|place| self.order.remove(&place)) {
            self.bytes -= bytes;
        }
    }

    /// Whether there are any.
    pub(super) fn is_any(&self) -> bool {
        !self.order.is_empty()
    }

    /// It keeps so many bytes now, if it is one of them.
    pub(super) fn update(&mut self, ticket: Ticket, bytes: u64) {
        let place = self.places.get(&ticket);
        if let Some((_, kept)) = place.and_then(|place| self.order.get_mut(place)) {
            self.bytes = self.bytes - *kept + bytes;
            *kept = bytes;
        }
    }

    /// The one that ends, because there are too many: `of_peer`, the first one of the peer that has brought
    /// the last one, if that has many, or else the one that was left first of all. So who leaves many ends
    /// its own.
    pub(super) fn excess(&mut self, of_peer: Option<Ticket>) -> Option<Ticket> {
        let are_too_many = self.order.len() > MOST || self.bytes > MOST_BYTES && self.order.len() > 1;
        let of_peer = of_peer.filter(|ticket| self.places.contains_key(ticket));
        let first = self.order.values().next().map(|(ticket, _)| *ticket);
        let ticket = of_peer.or(first).filter(|_| are_too_many)?;
        self.remove(ticket);
        Some(ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_all_that_were_left_the_oldest_one_ends_first() {
        let mut all = AllLeft::default();
        (1..=MOST as u64).for_each(|ticket| all.enter(Ticket(ticket), 0));
        assert_eq!(all.excess(None), None);
        all.remove(Ticket(1));
        all.enter(Ticket(9000), 0);
        assert_eq!(all.excess(None), None, "one has ended by itself");
        all.enter(Ticket(9001), 0);
        assert_eq!([all.excess(None), all.excess(None)], [Some(Ticket(2)), None]);
        all.enter(Ticket(9002), MOST_BYTES + 1);
        all.update(Ticket(9002), 1);
        assert_eq!([all.excess(None), all.excess(None)], [Some(Ticket(3)), None], "the rest has arrived");
        all.update(Ticket(9002), MOST_BYTES + 1);
        let ended: Vec<Ticket> = std::iter::from_fn(|| all.excess(None)).collect();
        assert_eq!((ended.len(), all.order.len()), (MOST - 1, 1), "only bytes of the newest one stay");
    }

    #[test]
    fn who_leaves_too_many_ends_its_own() {
        let mut all = AllLeft::default();
        (1..=MOST as u64 + 1).for_each(|ticket| all.enter(Ticket(ticket), 0));
        assert_eq!(all.excess(Some(Ticket(77))), Some(Ticket(77)));
        all.enter(Ticket(9000), 0);
        assert_eq!(all.excess(Some(Ticket(77))), Some(Ticket(1)), "that one has ended");
    }
}
