//! Opens of peers: a responder's part of first contact.

use uwarp_wire::introduction;
use uwarp_wire::rd::contact::Open;
use uwarp_wire::rd::{Header, Kind, Packet, VERSION};

use super::super::exchange::{Exchange, Over, Role, Start};
use super::super::joined::Joined;
use super::super::message::{Arrival, Failure, Route};
use super::super::peer::{Attempt, DEAD_MOST, PeerId};
use super::super::room::first_credit;
use super::super::rtt::Rtt;
use super::{COOKIE_LIFE, FEATURES, LARGEST_PACKET, Rd, added, answer_header, is_local};
use crate::clock::Now;

impl Rd {
    pub(super) fn on_open(
        &mut self,
        now: &Now,
        route: Route,
        packet: &Packet<'_>,
        arrivals: &mut Vec<Arrival>,
    ) {
        let Ok(open) = Open::parse(packet.body()) else { return };
        let header = packet.header();
        let chunks = packet.body().get(Open::LEN..).unwrap_or(&[]);
        let at = Header::LEN + Open::LEN;
        let is_possible = open.asked_port == route.local.port()
            && (1..=VERSION).contains(&open.version)
            && open.version == header.version
            && open.features & !FEATURES == 0;
        if !is_possible {
            return;
        }
        let known = self.peers.find(route);
        let own = known.and_then(|id| self.peers.get(id)?.exchange.as_ref());
        let is_ours = own.is_some_and(|exchange| {
            let start = &exchange.start;
            exchange.is_responder() && start.own_key == header.key && start.peer_key == open.token
        });
        let accepted = if is_ours { known } else { self.accept(now, route, header, &open) };
        let now = now.get();
        let blind = self.blind(now);
        if let Some(id) = accepted
            && let Some(peer) = self.peers.get_mut(id)
            && let Some(exchange) = &mut peer.exchange
        {
            self.room.on_heard(now, &mut peer.heard);
            let (actions, services) = (&mut self.actions, &mut self.services);
            let alone = Joined::alone(&[]);
            let handled =
                exchange.handle_input(now, blind, header, chunks, at, alone, arrivals, actions, services);
            if let Some(Over::Failed(failure)) = handled.over {
                arrivals.clear();
                peer.end_exchange(now, failure, &mut self.actions);
            }
        }
        // One that was not accepted may be forgotten again.
        if let Some(id) = self.peers.find(route) {
            self.after(now, id);
        }
    }

    /// Makes an exchange for an Open, if that may be.
    fn accept(&mut self, now: &Now, route: Route, header: &Header, open: &Open) -> Option<PeerId> {
        let cookie = introduction::Cookie { made: open.made, hash: header.key };
        let made = self.proof.made(now, route.remote, &added(route, open.token), cookie);
        let now_at = now.get();
        let is_right = made.is_some_and(|made| now_at.saturating_duration_since(made) <= COOKIE_LIFE);
        let known = self.peers.find(route);
        let has_room = known.is_some() || self.has_room(route.remote.ip());
        // Nothing that a forger sends goes beyond this line.
        if !is_right || !has_room {
            return None;
        }
        let own_is_larger = route.local > route.remote;
        let longest = self.longest(route);
        let exchange_id = self.next_exchange;
        let mut flushed = Vec::new();
        let id = known.unwrap_or_else(|| self.new_peer(route));
        let peer = self.peers.get_mut(id)?;
        peer.dead.retain(|dead| dead.until > now_at);
        if let Some(dead) = peer.dead.iter().find(|dead| dead.token == open.token) {
            // The first Cross may be lost.
            if dead.is_crossed {
                self.answer_cross(route, open.token);
            }
            return None;
        }
        if peer.dead.len() + usize::from(peer.exchange.is_some()) > DEAD_MOST {
            return None;
        }
        // The peer's end has rested and its Open has crossed what ours has sent: the acknowledgement is on
        // its way, and would find no exchange. The Open is repeated. Who sends all the time waits for some
        // acknowledgement always, so this has an end.
        if peer.exchange.as_mut().is_some_and(|exchange| exchange.holds_open_off(now_at)) {
            return None;
        }
        // A late Open of an attempt before the present exchange.
        if let Some(Role::Responder { made }) = peer.exchange.as_ref().map(|exchange| exchange.start.role)
            && open.made < made
        {
            return None;
        }
        if let Some(Attempt::Opening(opening)) = &mut peer.attempt {
            if own_is_larger {
                // Its token is dead from now on, so this is a last word.
                if peer.dead.len() < DEAD_MOST {
                    peer.keep(now_at, open.token, true);
                    self.answer_cross(route, open.token);
                }
                return None;
            }
            if !opening.is_crossed {
                return None;
            }
            let ignored = opening.take_all(&mut flushed);
            peer.put_back(now_at, ignored);
        }
        peer.attempt = None;
        self.actions.append(&mut flushed);
        let start = Start {
            id: exchange_id,
            route,
            own_key: header.key,
            peer_key: open.token,
            version: open.version,
            longest: if is_local(route) { longest } else { longest.min(LARGEST_PACKET) },
            // An initiator does not say what it takes. A probe that it does not take is lost.
            peer_takes: self.most_taken(route),
            most_requests: self.config.most_requests,
            credit: first_credit(),
            features: open.features,
            role: Role::Responder { made: open.made },
        };
        let exchange = Box::new(Exchange::new(now_at, start, Rtt::new()));
        self.next_exchange += 1;
        if let Some(peer) = self.peers.get_mut(id) {
            peer.end_exchange(now_at, Failure::Restarted, &mut self.actions);
            peer.exchange = Some(exchange);
        }
        Some(id)
    }

    /// Only to an Open with a right cookie, so it is as rare as the peer's Opens.
    fn answer_cross(&mut self, route: Route, token: u64) {
        let cross = answer_header(route, Kind::Cross, token).to_packet();
        self.answers.push_back((route, cross.to_vec()));
    }
}
