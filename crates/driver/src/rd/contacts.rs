//! Processes to which the first stream is being opened, until they have answered.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_llp::streams::Over;
use uwarp_proto::rd::{self, Ticket};
use uwarp_rnic::qp::Now;

use super::Turn;

/// A process that has said nothing for so long after the first Hello has no streams, or is not there.
const CONTACT: Duration = Duration::from_secs(2);
/// Unless its system says nothing of the port either: the own one needs three seconds to find that no host
/// has the address, and TCP reports that.
const HOST: Duration = Duration::from_secs(4);
/// Its port is asked for after this time: who listens a third of a second late has a connection, as over TCP
/// (crates/cm/src/machine/active.rs).
const ASK: Duration = Duration::from_millis(350);

/// A user is told again of a peer that does not answer after this time. Programs, and those who connect by
/// number for them, try again all the time.
const NAMED: Duration = Duration::from_secs(60);
const MOST_NAMED: usize = 1024;

#[derive(Debug, Clone, Copy)]
struct Contact {
    began: Instant,
    ticket: Ticket,
    route: rd::Route,
}

/// All of a port, each list in the order of its times.
#[derive(Default)]
pub(super) struct Contacts {
    unasked: VecDeque<Contact>,
    asked: VecDeque<Contact>,
    /// Their systems say nothing.
    late: VecDeque<Contact>,
    /// Of which peers a user was told, and when.
    named: BTreeMap<SocketAddr, Instant>,
}

fn due(queue: &mut VecDeque<Contact>, after: Duration, now: Instant) -> Option<Contact> {
    let is_due = queue.front().is_some_and(|contact| contact.began + after <= now);
    is_due.then(|| queue.pop_front()).flatten()
}

impl Contacts {
    pub fn begin(&mut self, began: Instant, ticket: Ticket, route: rd::Route) {
        self.unasked.push_back(Contact { began, ticket, route });
    }

    /// Whether a user is to be told that this peer does not answer.
    fn names(&mut self, peer: SocketAddr, at: Instant) -> bool {
        let is_late = |told: &Instant| at.saturating_duration_since(*told) >= NAMED;
        if !self.named.get(&peer).is_none_or(is_late) {
            return false;
        }
        if self.named.len() >= MOST_NAMED {
            self.named.retain(|_, told| !is_late(told));
        }
        // Of more than so many in a minute, the others are not named.
        let names = self.named.len() < MOST_NAMED;
        if names {
            self.named.insert(peer, at);
        }
        names
    }

    /// When there is something to do.
    pub fn timeout(&self) -> Option<Instant> {
        let at = |queue: &VecDeque<Contact>, after| queue.front().map(|contact| contact.began + after);
        [at(&self.unasked, ASK), at(&self.asked, CONTACT), at(&self.late, HOST)].into_iter().flatten().min()
    }
}

impl Turn {
    /// Asks for ports of processes that do not answer, and ends what they did not answer in time.
    pub(super) fn run_contacts(&mut self, now: &Now) {
        let at = now.get();
        while let Some(contact) = due(&mut self.streams.contacts.unasked, ASK, at) {
            if self.is_unanswered(now, contact.ticket) {
                self.streams.questions.ask_host(at, contact.route);
                self.streams.contacts.asked.push_back(contact);
            }
        }
        while let Some(contact) = due(&mut self.streams.contacts.asked, CONTACT, at) {
            if self.streams.questions.is_open(contact.route.remote) {
                self.streams.contacts.late.push_back(contact);
            } else {
                self.end_contact(now, contact.ticket, Over::Unanswered);
            }
        }
        while let Some(contact) = due(&mut self.streams.contacts.late, HOST, at) {
            self.end_contact(now, contact.ticket, Over::Unanswered);
        }
    }

    /// No way leads to this host.
    pub(super) fn is_unreachable(&mut self, now: &Now, remote: SocketAddr, errno: Errno) {
        let contacts = &self.streams.contacts;
        let all = contacts.asked.iter().chain(&contacts.late);
        let its: Vec<Ticket> = all.filter(|c| c.route.remote.ip() == remote.ip()).map(|c| c.ticket).collect();
        its.into_iter().for_each(|ticket| self.end_contact(now, ticket, Over::Unreachable(errno)));
    }

    /// The system of this peer has no such port: nobody listens there, or not by reliable datagrams.
    pub(super) fn is_refused(&mut self, now: &Now, remote: SocketAddr) {
        let contacts = &self.streams.contacts;
        let all = contacts.asked.iter().chain(&contacts.late);
        let its: Vec<Ticket> = all.filter(|c| c.route.remote == remote).map(|c| c.ticket).collect();
        its.into_iter().for_each(|ticket| self.end_contact(now, ticket, Over::Unanswered));
    }

    fn is_unanswered(&self, now: &Now, ticket: Ticket) -> bool {
        let opened = self.streams.opened_as(ticket);
        opened.is_some_and(|opened| !opened.is_heard) && self.machine.stream_answers(now, ticket).is_none()
    }

    fn end_contact(&mut self, now: &Now, ticket: Ticket, why: Over) {
        let Some(pipe) = self.streams.pipe(ticket).filter(|_| self.is_unanswered(now, ticket)) else {
            return;
        };
        let peer = pipe.ends().peer;
        if why == Over::Unanswered && self.streams.contacts.names(peer, now.get()) {
            tracing::warn!(
                %peer,
                "UWARP_LINK requires reliable datagrams, and the peer does not answer them"
            );
        }
        pipe.ended(Some(why));
        self.machine.reset_stream(now, ticket);
    }
}
