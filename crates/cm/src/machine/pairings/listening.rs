//! The end that listens: who asks for its queue pairs, and who waits for them.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use uwarp_llp::carrier::Close;
use uwarp_llp::udp::Route;
use uwarp_proto::setup::{AcceptParams, Depths, Request};
use uwarp_rnic::ah::port_of;
use uwarp_rnic::qp::Now;
use uwarp_wire::datagram::proof::Proof as ProofDatagram;
use uwarp_wire::introduction::{self, Cookie, Half, Introduction, TurnedAway};

use super::early::Arrived;
use super::pairing::State;
use super::{Action, ConnKey, Ends, Event, Handshake, Input, Machine as _, Pairings, Place, gid, listener};

/// Most early requests for one queue pair: more than one means a peer that began anew, or an earlier peer.
pub const MOST_EARLY_EACH: usize = 4;
/// How long an early request waits.
pub(super) const EARLY_LIMIT: Duration = Duration::from_secs(30);
/// Cookies in a second for ports that no pairing names. (The peers of pairings do not count: a flood must not
/// keep them waiting.)
const MOST_COOKIES: u32 = 1000;

impl Pairings {
    /// A request is complete.
    pub(super) fn requested(
        &mut self,
        now: &Now,
        (conn, ends): (ConnKey, Ends),
        mut handshake: Box<Handshake>,
        request: &Request,
        place: Place,
    ) {
        // No other request waits for what becomes of this one: here each belongs to a queue pair.
        self.listener.handle_input(now, Input::Delivered);
        self.listener.handle_input(now, Input::Settled(conn));
        let (introduction, peer) = (Introduction::parse(&request.private_data), ends.peer);
        let why = match introduction {
            Some(introduction) => {
                let mut owner = ends.peer;
                owner.set_port(port_of(introduction.source_qpn));
                match self.proof.made(now, owner, &[], introduction.cookie) {
                    Some(_) if !self.alive.has(introduction.destination_qpn) => TurnedAway::NoQueuePair,
                    Some(proven) => {
                        let from = gid(ends.peer.ip());
                        let request = Arrived { conn, introduction, from, proven, handshake, place };
                        return self.admit(now, request);
                    }
                    None => {
                        tracing::debug!(%peer, ?introduction, "turned away: {}", TurnedAway::NoProof);
                        TurnedAway::NoProof
                    }
                }
            }
            None => {
                let Some(theirs) = introduction::version(&request.private_data) else {
                    tracing::debug!(
                        %peer,
                        "refused: a connection to the port of queue pairs does not come from a queue pair"
                    );
                    return self.close(conn, Close::Finish);
                };
                self.say_version_of(peer, theirs, &request.private_data);
                TurnedAway::Version
            }
        };
        self.reject_handshake(now, conn, &mut handshake, why);
        self.leave(conn, handshake, Some(place));
    }

    pub(super) fn admit(&mut self, now: &Now, request: Arrived) {
        let qpn = request.introduction.destination_qpn;
        if let Some(pairing) = self.pairs.get_mut(&qpn).filter(|p| matches!(p.state, State::Waiting)) {
            match pairing.check(now, qpn, &request) {
                Ok(()) => self.accept(now, qpn, request),
                Err(why) => self.reject(now, request, why),
            }
            return;
        }
        // It says that its peer waits. A newer one of the same peer takes its place.
        let Introduction { source_qpn, .. } = request.introduction;
        let is_same =
            |early: &Arrived| (early.from, early.introduction.source_qpn) == (request.from, source_qpn);
        let mut leaving = self.early.take_of(qpn, is_same);
        if self.early.of(qpn).count() >= MOST_EARLY_EACH {
            let first = self.early.of(qpn).next().map(|early| early.conn);
            leaving.extend(first.and_then(|conn| self.early.take(conn)));
        }
        for early in leaving {
            self.reject(now, early, TurnedAway::Crowded);
        }
        // Its end is of interest now.
        self.actions.push_back(Action::Look { conn: request.conn });
        self.early.push(now.get(), request);
    }

    /// Gives a queue pair that waits the request that waits for it, the last one if there are several, and
    /// turns the others away.
    pub(super) fn serve(&mut self, now: &Now, qpn: u32) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        if !matches!(pairing.state, State::Waiting) {
            return;
        }
        let mut fitting: Option<Arrived> = None;
        for early in self.early.take_of(qpn, |_| true) {
            let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
            match pairing.check(now, qpn, &early) {
                Ok(()) => {
                    if let Some(older) = fitting.replace(early) {
                        self.reject(now, older, TurnedAway::Crowded);
                    }
                }
                Err(why) => self.reject(now, early, why),
            }
        }
        if let Some(request) = fitting {
            self.accept(now, qpn, request);
        }
    }

    pub(super) fn accept(&mut self, now: &Now, qpn: u32, request: Arrived) {
        self.index.touch(qpn);
        let Arrived { conn, introduction, mut handshake, place, .. } = request;
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let max_ird = self.settings.policy.max_ird;
        let params =
            AcceptParams { depths: Depths::negotiated(max_ird, max_ird), peer: pairing.peer_data(qpn) };
        let reply = pairing.introduction(qpn, Half::Upper, introduction.incarnation, Cookie::NONE).to_bytes();
        match handshake.accept(now, params, &reply) {
            Ok(mut said) => {
                // For `shown_psns`: a responder's is empty otherwise.
                said.private_data = introduction.to_bytes().to_vec();
                pairing.state = State::Replying { conn, handshake, said: Box::new(said), _place: place };
                self.actions.push_back(Action::Look { conn });
            }
            Err(error) => {
                tracing::debug!("cannot accept: {error}");
                self.close(conn, Close::Finish);
            }
        }
    }

    /// Whether this request for a cookie is answered when the program moves the queue pair: a cookie from
    /// before the move does not count, so its peer would connect in vain. The peer asks again after 50 ms,
    /// and gets a cookie: its connection says then that it waits.
    pub(super) fn waits_for_move(
        &mut self,
        now: &Now,
        from: SocketAddr,
        to: IpAddr,
        request: &ProofDatagram,
    ) -> bool {
        let qpn = request.destination_qpn;
        let is_early = self.alive.has(qpn) && !self.pairs.contains_key(&qpn);
        is_early && self.unanswered.is_first(now.get(), from, to, request)
    }

    /// A queue pair asks for a cookie.
    pub(super) fn answer(&mut self, now: &Now, from: SocketAddr, to: IpAddr, request: &ProofDatagram) {
        let named = self.named.contains_key(&(gid(from.ip()), from.port()));
        if !named && !self.may_answer(now) {
            return;
        }
        let reply = ProofDatagram {
            source_qpn: request.destination_qpn,
            destination_qpn: request.source_qpn,
            token: request.token,
            cookie: Some(self.proof.make(now, from, &[])),
        };
        self.send(Route { to: from, from: Some(to) }, &reply);
    }

    pub(super) fn may_answer(&mut self, now: &Now) -> bool {
        let (since, count) = match self.cookies {
            Some((since, count)) if now.get() < since + Duration::from_secs(1) => (since, count),
            _ => (now.get(), 0),
        };
        self.cookies = Some((since, (count + 1).min(MOST_COOKIES)));
        count < MOST_COOKIES
    }

    pub(super) fn replying(&mut self, now: &Now, qpn: u32, event: Option<Event>, open: bool) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let Some(event) = event else { return };
        if let State::Replying { conn, said, .. } = std::mem::replace(&mut pairing.state, State::Waiting) {
            match event {
                Event::Replied => self.attach(qpn, conn, said),
                _ => {
                    tracing::debug!(qpn, "the peer closed the connection before it had the reply");
                    if open {
                        self.close(conn, Close::Finish);
                    }
                    self.serve(now, qpn);
                }
            }
        }
    }

    /// Takes what the listener reports, and makes room for the connections that it has to turn down.
    pub(super) fn listening(&mut self, now: &Now) {
        loop {
            while let Some(action) = self.listener.poll_action() {
                match action.pass() {
                    Ok(action) => self.actions.push_back(action),
                    Err(listener::Report::Requested { conn, ends, handshake, request, place }) => {
                        self.requested(now, (conn, ends), handshake, &request, place);
                    }
                }
            }
            // Early requests say only that their peers wait; a new connection may be the one that is waited
            // for.
            match self.listener.is_starved().then(|| self.early.take_oldest()).flatten() {
                Some(Arrived { conn, mut handshake, place, .. }) => {
                    // Without its place, which the next one needs: what is not sent at once is not said.
                    drop(place);
                    self.reject_handshake(now, conn, &mut handshake, TurnedAway::Crowded);
                    self.leave(conn, handshake, None);
                    self.listener.accept_more(now);
                }
                None => return,
            }
        }
    }
}
