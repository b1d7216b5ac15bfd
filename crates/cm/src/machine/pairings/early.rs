//! Requests with a good proof whose queue pairs do not wait for them yet.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv6Addr;
use std::time::Instant;

use uwarp_wire::introduction::Introduction;

use super::{ConnKey, Handshake, Place};

/// A request that is complete.
#[derive(Debug)]
pub(super) struct Arrived {
    pub conn: ConnKey,
    pub introduction: Introduction,
    pub from: Ipv6Addr,
    /// When its cookie was made.
    pub proven: Instant,
    pub handshake: Box<Handshake>,
    pub place: Place,
}

/// Those that wait, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct EarlyRequests {
    waiting: BTreeMap<u64, (Instant, Arrived)>,
    next: u64,
    /// Their places in the order.
    by_conn: BTreeMap<ConnKey, u64>,
    /// The same, behind the numbers that they are for.
    by_number: BTreeSet<(u32, u64)>,
}

impl EarlyRequests {
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arrived> {
        self.waiting.values().map(|(_, request)| request)
    }

    pub fn has(&self, conn: ConnKey) -> bool {
        self.by_conn.contains_key(&conn)
    }

    pub fn push(&mut self, since: Instant, request: Arrived) {
        self.by_conn.insert(request.conn, self.next);
        self.by_number.insert((request.introduction.destination_qpn, self.next));
        self.waiting.insert(self.next, (since, request));
        self.next += 1;
    }

    /// Since when the oldest one has waited.
    pub fn oldest(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(_, (since, _))| *since)
    }

    pub fn take_oldest(&mut self) -> Option<Arrived> {
        let at = *self.waiting.first_key_value()?.0;
        self.take_at(at)
    }

    pub fn take(&mut self, conn: ConnKey) -> Option<Arrived> {
        let at = *self.by_conn.get(&conn)?;
        self.take_at(at)
    }

    /// Those that are for this number, oldest first.
    pub fn of(&self, qpn: u32) -> impl Iterator<Item = &Arrived> {
        let places = self.by_number.range((qpn, 0)..=(qpn, u64::MAX));
        places.filter_map(|(_, at)| self.waiting.get(at).map(|(_, request)| request))
    }

    /// Takes those that are for this number and fit, oldest first.
    pub fn take_of(&mut self, qpn: u32, fits: impl Fn(&Arrived) -> bool) -> Vec<Arrived> {
        let conns: Vec<_> =
            self.of(qpn).filter(|request| fits(request)).map(|request| request.conn).collect();
        conns.into_iter().filter_map(|conn| self.take(conn)).collect()
    }

    fn take_at(&mut self, at: u64) -> Option<Arrived> {
        let (_, request) = self.waiting.remove(&at)?;
        self.by_conn.remove(&request.conn);
        self.by_number.remove(&(request.introduction.destination_qpn, at));
        Some(request)
    }
}
