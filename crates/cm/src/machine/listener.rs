//! Listening: connections are accepted, and become requests when their MPA request has arrived completely.
//! What becomes of a request is the owner's: an id's, or that of the pairings by number.
//!
//! Until then any TCP peer can make them, so their number and their time are bounded ([`Budget`]). When there
//! are too many, the oldest silent one is closed, not the newest: an honest peer sends its request soon, so
//! the oldest are those that do not. But the kernel of a peer that begins a thousand connections connects all
//! of them before the peer has sent the first request. So no connection is closed before [`GRACE`] is over;
//! until then new ones wait in the kernel.
//!
//! Requests are reported in the order of their connections, and behind ESTABLISHED of the connection that
//! caused them ([`Answered`]).

use std::collections::{BTreeMap, VecDeque};
use std::hash::Hash as _;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use siphasher::sip128::{Hasher128 as _, SipHasher24};
use uwarp_llp::carrier::Close;
use uwarp_proto::setup::{Host, HostKey, Request, ResponderPolicy};
use uwarp_rnic::ah::port_of;
use uwarp_rnic::qp::Now;

use super::budget::{Budget, Place};
use super::handshake::{Event, Failure, Handshake};
use super::{Action, ConnKey, Ends, Input, Machine, Space, Transmit, Want, earlier, is_over};
use crate::timeouts::Timeouts;

/// How long a connection may be silent, however many others there are.
const GRACE: Duration = Duration::from_millis(200);

/// The backlog for a program that gives none, or too large a one. As in Linux' rdma_ucm.
pub const MAX_BACKLOG: usize = 1024;

/// How long a complete request waits for those of connections that were accepted before its own.
///
/// Programs that make several connections to one peer (perftest with `-q`) rely on the order of the requests:
/// it must be the order in which the peer made the connections. Over adapters it is; here the requests are
/// bytes on sockets that are read one after the other. A peer that sends nothing must not delay others
/// noticeably.
const IN_ORDER: Duration = Duration::from_millis(10);

/// How long a request waits at most for ESTABLISHED of its peer's earlier connections. The peer's indication
/// follows the reply within a round trip, but a bad peer's never comes.
const UNTIL_ESTABLISHED: Duration = Duration::from_millis(200);

/// What a listener needs to know.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Time limits.
    pub timeouts: Timeouts,
    /// How requests are answered.
    pub policy: ResponderPolicy,
    /// How many requests may wait for [`Input::Delivered`]; see [`Listener::backlog`].
    pub backlog: usize,
    /// The process's.
    pub budget: Budget,
}

/// Accepts connections on a socket that its owner has bound and made listen.
#[derive(Debug)]
pub struct Listener {
    names: Space,
    settings: Settings,
    /// Connections may wait to be accepted.
    waiting: bool,
    opening: Option<(ConnKey, Place)>,
    // In the order in which they were accepted, as names are.
    silent: BTreeMap<ConnKey, Silent>,
    complete: BTreeMap<ConnKey, Complete>,
    /// Reported requests that were not answered; [`Input::Settled`] ends each.
    reported: BTreeMap<ConnKey, Peer>,
    answered: VecDeque<Answered>,
    /// Reported requests that the program has not taken.
    undelivered: usize,
    /// No place in the budget: the next attempt to accept, unless one comes back earlier.
    starved: Option<Instant>,
    /// No descriptors: the next attempt to accept.
    no_descriptors: Option<Instant>,
    /// A complete request may be reported then.
    look: Option<Instant>,
    actions: VecDeque<Action<Report>>,
}

/// The states of a connection are the collections that hold it.
///
/// | state | event | → | actions |
/// |-|-|-|-|
/// | – | Waiting; budget left, not behind | Opening | Accept |
/// | Opening | Accepted | Silent | deadline: 5 s; the next Accept |
/// | Opening | NotAccepted: none waits | gone | nothing until Waiting |
/// | Opening | NotAccepted: that one is gone; other errno | gone | the next Accept; the same in 100 ms |
/// | Silent | Requested | Complete | – |
/// | Silent | failed, limit; or no budget, oldest, 200 ms old | gone | Close |
/// | Complete | its turn | Reported | Report Requested |
/// | Reported | Delivered | Reported | one less undelivered; Accept |
/// | Reported | answered | Answered | – |
/// | Answered | unanswered | Reported | next Complete |
/// | Reported, Answered | Settled, 200 ms | gone | next Complete |
///
/// Its turn: earlier ones are complete or 10 ms old, there is no earlier Answered of this peer below 200 ms,
/// and the program has taken enough of the reported ones.
///
/// Behind: as many requests as the backlog are complete or reported, and the program has not taken them. Then
/// connections wait in the kernel. With a Report the connection, its handshake and its place in the budget
/// are the owner's; Reported and Answered are only names.
#[derive(Debug)]
struct Silent {
    ends: Ends,
    accepted: Instant,
    handshake: Box<Handshake>,
    place: Place,
}

#[derive(Debug)]
struct Complete {
    connection: Silent,
    request: Request,
    peer: Peer,
}

/// A connection between the reply to its request and its ESTABLISHED.
///
/// A peer may connect again as soon as it has the reply, and a program whose ids share a channel expects
/// ESTABLISHED of the first connection before the request of the second: the kernel reports all events of a
/// device through one ordered queue, in the order of arrival. Here they come from two sockets and perhaps two
/// threads. So a request waits for the connections that the same peer may have seen established before it
/// connected: those which were answered before its own was accepted. Connections that a peer begins at once
/// do not wait for each other.
#[derive(Debug)]
struct Answered {
    conn: ConnKey,
    peer: Peer,
    at: Instant,
}

/// Who may have caused a request: an address and, where the request names the queue pair, the port of its
/// number, which one process has. Otherwise each process would delay all others of its host. (So a program in
/// the iwarp view that names a number only in some of its requests has no order between the two kinds. If
/// these waited for those that name none, any local process could hold up all others again.)
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Peer {
    address: IpAddr,
    port: Option<u16>,
}

/// What a [`Listener`] reports.
#[derive(Debug)]
pub enum Report {
    /// A request is complete. Connection, handshake and place are the owner's from now on. It gives back
    /// [`Input::Delivered`] when the program has taken the request, [`Listener::answered`] if it is accepted,
    /// and [`Input::Settled`] whatever becomes of it.
    Requested {
        /// The connection.
        conn: ConnKey,
        /// Its addresses.
        ends: Ends,
        /// It waits for accept or reject.
        handshake: Box<Handshake>,
        /// What it asks for.
        request: Request,
        /// To be kept only by an owner that no backlog bounds.
        place: Place,
    },
}

impl Listener {
    /// A listener whose socket listens already, or is about to. `names`: a space that no other machine of the
    /// owner has.
    pub fn new(names: Space, settings: Settings) -> Self {
        Self {
            names,
            settings,
            waiting: false,
            opening: None,
            silent: BTreeMap::new(),
            complete: BTreeMap::new(),
            reported: BTreeMap::new(),
            answered: VecDeque::new(),
            undelivered: 0,
            starved: None,
            no_descriptors: None,
            look: None,
            actions: VecDeque::new(),
        }
    }

    /// How many requests can wait, given the program's number.
    pub fn backlog(wanted: i32) -> usize {
        match usize::try_from(wanted) {
            Ok(wanted @ 1..=MAX_BACKLOG) => wanted,
            _ => MAX_BACKLOG,
        }
    }

    /// The program accepts a request that was reported: to be called before the reply is sent, because the
    /// peer can connect again as soon as it has that.
    pub fn answered(&mut self, now: &Now, conn: ConnKey) {
        if let Some(peer) = self.reported.remove(&conn) {
            self.answered.push_back(Answered { conn, peer, at: now.get() });
        }
    }

    /// The program's call was refused: the request is as it was.
    pub fn unanswered(&mut self, now: &Now, conn: ConnKey) {
        if let Some(at) = self.answered.iter().position(|answered| answered.conn == conn)
            && let Some(Answered { peer, .. }) = self.answered.remove(at)
        {
            self.reported.insert(conn, peer);
            self.report(now);
            self.accept_more(now);
        }
    }

    /// Whether it waits for a place in the budget. An owner that keeps places can give one back and call
    /// [`Self::accept_more`].
    pub fn is_starved(&self) -> bool {
        self.starved.is_some()
    }

    /// Closes all connections that were not reported. Nothing is reported afterwards.
    pub fn cancel(&mut self) {
        let mut closing: Vec<ConnKey> = Vec::new();
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::Close { conn, .. } | Action::Report(Report::Requested { conn, .. }) => {
                    closing.push(conn)
                }
                _ => {}
            }
        }
        let silent = std::mem::take(&mut self.silent).into_keys();
        let complete = std::mem::take(&mut self.complete).into_keys();
        closing.extend(silent.chain(complete));
        for conn in closing {
            self.close(conn);
        }
        self.waiting = false;
        self.opening = None;
        self.reported.clear();
        self.answered.clear();
        (self.starved, self.no_descriptors, self.look) = (None, None, None);
    }

    /// Accepts the next connection if one may wait and there is a place for it.
    pub fn accept_more(&mut self, now: &Now) {
        self.starved = None;
        if !self.waiting || self.opening.is_some() || self.no_descriptors.is_some() || self.is_behind() {
            return;
        }
        loop {
            let held = self.silent.len() + self.complete.len();
            if let Some(place) = self.settings.budget.take(held) {
                let conn = self.names.name();
                self.opening = Some((conn, place));
                self.actions.push_back(Action::Accept { conn });
                return;
            }
            // Other machines give back places without a word.
            let again = now.get() + self.settings.timeouts.no_descriptors;
            let oldest = self.silent.first_key_value().map(|(conn, silent)| (*conn, silent.accepted + GRACE));
            match oldest {
                Some((conn, until)) if until <= now.get() => {
                    tracing::debug!("too many half-open connections: the oldest is closed");
                    self.silent.remove(&conn);
                    self.close(conn);
                }
                Some((_, until)) => self.starved = Some(again.min(until)),
                None => self.starved = Some(again),
            }
            if self.starved.is_some() {
                return;
            }
        }
    }

    /// Whether the program must take requests first.
    fn is_behind(&self) -> bool {
        self.complete.len() + self.undelivered >= self.settings.backlog
    }

    fn close(&mut self, conn: ConnKey) {
        self.actions.push_back(Action::Close { conn, how: Close::Finish });
    }

    fn accepted(&mut self, now: &Now, conn: ConnKey, ends: Ends) {
        let Some((_, place)) = self.opening.take_if(|(opening, _)| *opening == conn) else { return };
        let limit = Some(self.settings.timeouts.request);
        let policy = self.settings.policy;
        let offer = policy.host.and_then(|key| offer(&key, conn, ends));
        let handshake = Box::new(Handshake::await_request(now, limit, policy, offer));
        self.silent.insert(conn, Silent { ends, accepted: now.get(), handshake, place });
        self.accept_more(now);
    }

    fn not_accepted(&mut self, now: &Now, conn: ConnKey, why: Option<Errno>) {
        if self.opening.take_if(|(opening, _)| *opening == conn).is_none() {
            return;
        }
        match why {
            None => self.waiting = false,
            // That connection is gone; the next one may be good (accept(2) lists these errors).
            Some(
                Errno::INTR
                | Errno::CONNABORTED
                | Errno::PROTO
                | Errno::NETDOWN
                | Errno::NETUNREACH
                | Errno::HOSTDOWN
                | Errno::HOSTUNREACH
                | Errno::NONET
                | Errno::NOPROTOOPT
                | Errno::OPNOTSUPP,
            ) => self.accept_more(now),
            Some(errno) => {
                // No descriptors or no memory. The system does not report again that connections wait.
                tracing::warn!("cannot accept a connection: {errno}; trying again shortly");
                self.no_descriptors = Some(now.get() + self.settings.timeouts.no_descriptors);
            }
        }
    }

    /// Something has come on a silent connection. `open`: the shell still has it.
    fn advance(&mut self, now: &Now, conn: ConnKey, event: Event, open: bool) {
        let Some(connection) = self.silent.remove(&conn) else { return };
        match event {
            Event::Requested(request) => {
                let peer = Peer::of(&connection.ends, &request);
                self.complete.insert(conn, Complete { connection, request, peer });
            }
            event => {
                if let Event::Failed(Failure::Setup(error)) = event {
                    tracing::debug!(peer = %connection.ends.peer, "bad MPA request: {error}");
                }
                drop(connection);
                if open {
                    self.close(conn);
                }
            }
        }
        self.report(now);
        self.accept_more(now);
    }

    /// Reports complete requests, in the order of their connections.
    fn report(&mut self, now: &Now) {
        self.look = None;
        while self.answered.front().is_some_and(|answered| answered.at + UNTIL_ESTABLISHED <= now.get()) {
            self.answered.pop_front();
        }
        let mut ready = Vec::new();
        let mut look = None;
        // If one waits, all later ones of its peer do: hundreds may come at once.
        let mut waits = None;
        for (conn, complete) in &self.complete {
            if self.undelivered + ready.len() >= self.settings.backlog {
                break;
            }
            if waits == Some(complete.peer) {
                continue;
            }
            // The last one before it that is silent is the youngest one.
            let before = self.silent.range(..conn).next_back();
            if let Some((_, silent)) = before
                && now.get() < silent.accepted + IN_ORDER
            {
                look = earlier(look, Some(silent.accepted + IN_ORDER));
                break;
            }
            match self.delay(complete) {
                None => ready.push(*conn),
                delay => (look, waits) = (earlier(look, delay), Some(complete.peer)),
            }
        }
        self.look = look;
        for conn in ready {
            let Some(Complete { connection, request, peer }) = self.complete.remove(&conn) else { continue };
            self.undelivered += 1;
            self.reported.insert(conn, peer);
            let Silent { ends, handshake, place, .. } = connection;
            self.actions.push_back(Action::Report(Report::Requested {
                conn,
                ends,
                handshake,
                request,
                place,
            }));
        }
    }

    /// When to look again at a request that must wait for ESTABLISHED of another connection.
    fn delay(&self, complete: &Complete) -> Option<Instant> {
        let oldest = self.answered.iter().find(|answered| answered.peer == complete.peer)?;
        (oldest.at <= complete.connection.accepted).then_some(oldest.at + UNTIL_ESTABLISHED)
    }

    fn settled(&mut self, now: &Now, conn: ConnKey) {
        self.reported.remove(&conn);
        self.answered.retain(|answered| answered.conn != conn);
        self.report(now);
        self.accept_more(now);
    }
}

impl Peer {
    fn of(ends: &Ends, request: &Request) -> Self {
        let number = request.peer.map(|peer| peer.qpn).filter(|number| *number != 0);
        Self { address: ends.peer.ip().to_canonical(), port: number.map(port_of) }
    }
}

impl Machine for Listener {
    type Report = Report;

    fn handle_input(&mut self, now: &Now, input: Input<'_>) {
        match input {
            Input::Waiting => {
                self.waiting = true;
                self.accept_more(now);
            }
            Input::Accepted { conn, ends } => self.accepted(now, conn, ends),
            Input::NotAccepted { conn, why } => self.not_accepted(now, conn, why),
            Input::Delivered => {
                let held_up = self.undelivered >= self.settings.backlog;
                self.undelivered = self.undelivered.saturating_sub(1);
                if held_up {
                    self.report(now);
                }
                self.accept_more(now);
            }
            Input::Settled(conn) => self.settled(now, conn),
            Input::Failed { conn, .. } if self.complete.remove(&conn).is_some() => {
                self.report(now);
                self.accept_more(now);
            }
            input => {
                let Some(conn) = input.conn() else { return };
                let Some(silent) = self.silent.get_mut(&conn) else { return };
                let open = !matches!(input, Input::Failed { .. });
                if let Some(event) = silent.handshake.handle_input(input) {
                    self.advance(now, conn, event, open);
                }
            }
        }
    }

    fn handle_timeout(&mut self, now: &Now) {
        // They all have the same limit, so the oldest comes first.
        while let Some(mut oldest) = self.silent.first_entry() {
            let conn = *oldest.key();
            let Some(event) = oldest.get_mut().handshake.handle_timeout(now) else { break };
            tracing::debug!("no complete MPA request within the time limit");
            self.advance(now, conn, event, true);
        }
        if is_over(self.no_descriptors, now) {
            self.no_descriptors = None;
            self.accept_more(now);
        }
        if is_over(self.starved, now) {
            self.accept_more(now);
        }
        if is_over(self.look, now) {
            self.report(now);
            self.accept_more(now);
        }
    }

    fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        None
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let silent = self.silent.first_key_value().and_then(|(_, silent)| silent.handshake.poll_timeout());
        earlier(earlier(silent, self.look), earlier(self.starved, self.no_descriptors))
    }

    fn poll_action(&mut self) -> Option<Action<Report>> {
        self.actions.pop_front()
    }

    fn want(&self, conn: ConnKey) -> Want {
        self.silent.get(&conn).map_or(Want::Nothing, |silent| silent.handshake.want())
    }
}

/// What an initiator on this host is told: a word that nobody else knows, for this connection alone.
///
/// Only one that comes from this host can use it. An address of the host's own is the source of what goes to
/// itself, unless the program has bound another one.
fn offer(key: &HostKey, conn: ConnKey, ends: Ends) -> Option<Host> {
    let [local, peer] = [ends.local.ip(), ends.peer.ip()].map(|ip| ip.to_canonical());
    if local != peer && !(local.is_loopback() && peer.is_loopback()) {
        return None;
    }
    let mut hash = SipHasher24::new_with_key(&key.key);
    (ends.local, ends.peer, conn).hash(&mut hash);
    let nonce = hash.finish128().as_bytes();
    Some(Host { incarnation: key.incarnation, nonce })
}

#[cfg(test)]
#[path = "tests/listener.rs"]
mod tests;
