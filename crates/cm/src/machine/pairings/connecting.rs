//! The end that connects: it asks for a cookie, and then for the stream.

use std::net::SocketAddr;
use std::time::Duration;

use uwarp_llp::carrier::Close;
use uwarp_llp::udp::Route;
use uwarp_proto::setup::Rejection;
use uwarp_rnic::ah::port_of;
use uwarp_rnic::qp::Now;
use uwarp_wire::datagram::proof::Proof as ProofDatagram;
use uwarp_wire::introduction::{self, Cookie, Half, TurnedAway};

use super::pairing::{Pairing, State};
use super::{Active, LONGEST_PAUSE, Machine as _, Pairings, active, proof, silence};
use crate::machine::silence::Versions;

/// The pause before a connector tries again; each further one is twice as long, up to [`LONGEST_PAUSE`].
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The pause before an unanswered request for a cookie is repeated; it grows in the same way.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// A cookie that is nearly too old is not shown.
pub(super) const FRESH: Duration = Duration::from_secs(proof::LIFE.as_secs() - 4);

impl Pairings {
    pub(super) fn ask(&mut self, now: &Now, qpn: u32) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        pairing.cookie = None;
        let wait = (FIRST_WAIT * (1 << pairing.asked.min(10))).min(LONGEST_PAUSE);
        pairing.asked += 1;
        pairing.state = State::AwaitCookie { again: now.get() + wait };
        let mut to = pairing.path.peer;
        to.set_port(port_of(pairing.peer));
        let route = Route { to, from: Some(pairing.path.local.ip()) };
        let (destination_qpn, token) = (pairing.peer, pairing.token);
        pairing.unanswered += 1;
        let unanswered = pairing.unanswered;
        self.send(route, &ProofDatagram { source_qpn: qpn, destination_qpn, token, cookie: None });
        if silence::ASKED_AFTER.contains(&unanswered) {
            self.ask_why(now, qpn, unanswered);
        }
    }

    pub(super) fn has_cookie(&mut self, now: &Now, from: SocketAddr, reply: &ProofDatagram, cookie: Cookie) {
        let qpn = reply.destination_qpn;
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let is_answer = matches!(pairing.state, State::AwaitCookie { .. })
            && (reply.source_qpn, reply.token) == (pairing.peer, pairing.token)
            && pairing.is_peer(from.ip(), from.port());
        if is_answer {
            pairing.cookie = Some((cookie, now.get()));
            (pairing.unanswered, pairing.why_said) = (0, false);
            self.index.touch(qpn);
            self.end_why(qpn);
            self.connect(now, qpn);
        }
    }

    pub(super) fn connect(&mut self, now: &Now, qpn: u32) {
        let names = self.space();
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let cookie = pairing.cookie.filter(|(_, came)| now.get() < *came + FRESH);
        let Some((cookie, _)) = cookie else { return self.ask(now, qpn) };
        let (config, timeouts) = (self.settings.request(qpn, pairing), self.settings.timeouts);
        let mut peer = pairing.path.peer;
        peer.set_port(port_of(pairing.peer));
        let introduction = pairing.introduction(qpn, Half::Lower, pairing.incarnation, cookie);
        let target = active::Target {
            local: Some(pairing.path.local),
            peer,
            config,
            private_data: introduction.to_bytes().to_vec(),
            fall_back: false,
        };
        match Active::start(now, names, timeouts, target) {
            Ok(active) => {
                if pairing.late.is_none() {
                    pairing.late = Some(now.get() + silence::ANSWERS_WITHIN);
                }
                pairing.state = State::Asking(Box::new(active));
                self.connecting(now, qpn);
            }
            Err(_) => self.pause(now, qpn),
        }
    }

    pub(super) fn pause(&mut self, now: &Now, qpn: u32) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let pause = (FIRST_PAUSE * (1 << pairing.pauses.min(10))).min(LONGEST_PAUSE);
        pairing.pauses += 1;
        pairing.state = State::Paused { until: now.get() + pause };
    }

    /// Rejected: the next request needs a new cookie. The first time it comes at once, since the peer may
    /// have been moved to RTR just now.
    pub(super) fn rejected(&mut self, now: &Now, qpn: u32, rejection: &Rejection) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let first = !std::mem::replace(&mut pairing.rejected, true);
        // It is reached.
        (pairing.cookie, pairing.late, pairing.failed) = (None, None, None);
        let (peer, at) = (pairing.peer, pairing.path.peer.ip().to_canonical());
        let said = &rejection.private_data;
        match (TurnedAway::parse(said), introduction::version(said)) {
            (Some(TurnedAway::Version), Some(theirs)) if self.may_say(qpn, true) => tracing::warn!(
                qpn = %format_args!("{qpn:#x}"),
                "cannot connect to queue pair {peer:#x} at {at}: {}",
                Versions(theirs),
            ),
            (Some(why), _) => tracing::debug!(qpn, "the peer has turned this end away: {why}"),
            (None, _) => tracing::debug!(qpn, "the peer has turned this end away"),
        }
        if first { self.ask(now, qpn) } else { self.pause(now, qpn) }
    }

    /// Takes what the attempt to connect reports.
    pub(super) fn connecting(&mut self, now: &Now, qpn: u32) {
        while let Some(pairing) = self.pairs.get_mut(&qpn)
            && let State::Asking(active) = &mut pairing.state
            && let Some(action) = active.poll_action()
        {
            match action.pass() {
                Ok(action) => self.actions.push_back(action),
                Err(active::Report::ConnectingFrom(_)) => {}
                Err(active::Report::Accepted { conn, said }) => {
                    if pairing.is_answer(now, qpn, &said.private_data) {
                        self.attach(qpn, conn, said);
                    } else {
                        tracing::debug!(qpn, "refused: the reply is not the peer's");
                        self.close(conn, Close::Finish);
                        self.pause(now, qpn);
                    }
                }
                Err(active::Report::Rejected(rejection)) => {
                    self.rest_of_attempt(qpn);
                    self.rejected(now, qpn, &rejection);
                }
                Err(active::Report::Failed { errno, .. }) => {
                    tracing::debug!(qpn, "the peer does not listen yet: {errno}");
                    pairing.failed = Some(errno);
                    self.rest_of_attempt(qpn);
                    self.pause(now, qpn);
                }
            }
        }
    }

    /// What an attempt that is over still has to do.
    pub(super) fn rest_of_attempt(&mut self, qpn: u32) {
        if let Some(Pairing { state: State::Asking(active), .. }) = self.pairs.get_mut(&qpn) {
            while let Some(action) = active.poll_action() {
                self.actions.extend(action.pass().ok());
            }
        }
    }
}
