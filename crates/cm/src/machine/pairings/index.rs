//! Finds pairings by what happens: by connection, by deadline, by what they have to send. A port has 256
//! numbers, which a program may bring up at once: a search through all of them for each input was half of the
//! processor time of that.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::pairing::Pairing;
use super::{ConnKey, Pairings};

/// Made of the pairings that were touched, at the end of each input and call.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// The attempts of one [`Space`](super::Space) are one pairing's; the listener's connections have the
    /// first space.
    owners: BTreeMap<ConnKey, u32>,
    deadlines: BTreeSet<(Instant, u32)>,
    sending: BTreeSet<u32>,
    touched: Vec<u32>,
}

/// What the index has of a pairing.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub conns: [Option<ConnKey>; 2],
    pub deadline: Option<Instant>,
    pub sends: bool,
}

/// What is found of a connection: its space, but itself if it is the listener's.
pub(super) fn group(conn: ConnKey) -> ConnKey {
    if conn.space == 0 { conn } else { ConnKey { number: 0, ..conn } }
}

impl Index {
    /// The pairing will change.
    pub fn touch(&mut self, qpn: u32) {
        if self.touched.last() != Some(&qpn) {
            self.touched.push(qpn);
        }
    }

    pub fn owner(&self, conn: ConnKey) -> Option<u32> {
        self.owners.get(&group(conn)).copied()
    }

    pub fn first_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// The pairings whose deadlines are over.
    pub fn due(&self, now: Instant) -> Vec<u32> {
        self.deadlines.range(..=(now, u32::MAX)).map(|(_, qpn)| *qpn).collect()
    }

    /// One that has something to send.
    pub fn sends(&self) -> Option<u32> {
        self.sending.first().copied()
    }

    pub fn change(&mut self, qpn: u32, old: Entry, new: Entry) {
        // Mostly one of them: a pairing changes ten times until its stream runs.
        if old.conns != new.conns {
            for conn in old.conns.into_iter().flatten() {
                self.owners.remove(&conn);
            }
            self.owners.extend(new.conns.into_iter().flatten().map(|conn| (conn, qpn)));
        }
        if old.deadline != new.deadline {
            if let Some(at) = old.deadline {
                self.deadlines.remove(&(at, qpn));
            }
            self.deadlines.extend(new.deadline.map(|at| (at, qpn)));
        }
        match (old.sends, new.sends) {
            (false, true) => _ = self.sending.insert(qpn),
            (true, false) => _ = self.sending.remove(&qpn),
            _ => {}
        }
    }
}

impl Pairings {
    /// Brings the index up to date.
    pub(super) fn refresh(&mut self) {
        let mut touched = std::mem::take(&mut self.index.touched);
        for qpn in touched.drain(..) {
            if let Some(pairing) = self.pairs.get_mut(&qpn) {
                let entry = pairing.entry();
                self.index.change(qpn, std::mem::replace(&mut pairing.indexed, entry), entry);
            }
        }
        // It keeps its room.
        self.index.touched = touched;
        // In tests and in the simulator.
        debug_assert!(self.pairs.values_mut().all(Pairing::is_indexed), "a pairing was not touched");
    }
}
