//! First contact, and the exchanges of a process (docs/rd.md section 4).
//!
//! | state of a peer | is here |
//! |---|---|
//! | none, with messages to send | never: a post makes an attempt or uses the exchange |
//! | Asking | `attempt` is [`Attempt::Asking`] |
//! | Opening | `attempt` is [`Attempt::Opening`], with its exchange |
//! | Up, Resting | `exchange`; an attempt may be beside it, when the exchange has become too old |
//! | gone | its token in `dead` |
//!
//! An entry is never removed early to make room: a late copy of its Open would deliver again.

mod opens;
mod ports;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use uwarp_wire::rd::ack::CREDIT_UNIT;
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rd::contact::{self, Challenge, Cookie, Hello, Open};
use uwarp_wire::rd::{Header, Kind, Packet, VERSION};

use super::Config;
use super::congestion::Window;
use super::draws::{Rate, Tokens};
use super::exchange::{Exchange, Made, Over, Phase, Role, Start};
use super::joined::Joined;
use super::left::AllLeft;
use super::message::{Action, Arrival, Failure, Outgoing, Placed, Route, Ticket};
use super::packet::PacketBuf;
use super::peer::{Attempt, Peer, PeerId, Peers, failed, hello_at};
use super::room::Room;
use super::rtt::Rtt;
use super::stream_calls::Services;
use super::streams::StreamEvent;
use crate::clock::Now;
use crate::proof::Proof;

/// A cookie is good for this long. Far less than an entry, so that none outlives the one that it has made;
/// the 64 s of rdma_cm's cookies would not do.
const COOKIE_LIFE: Duration = Duration::from_secs(16);
/// Whose timer is served so late has not run, nor perhaps its machine (a virtual one whose host is busy, a
/// laptop that sleeps, a debugger): its peers were not silent, nobody listened.
const STOOD_STILL: Duration = Duration::from_secs(1);
/// Challenges in a second, and answers to packets without an exchange.
const CHALLENGES: u32 = 1000;
const UNKNOWNS: u32 = 100;
/// What this process knows beyond the first version.
const FEATURES: u32 = contact::STREAMS;
/// Answers without state that wait to be sent.
const ANSWERS_MOST: usize = 64;
/// Peers of a queue pair that are told of posted receives.
const REFUSED_MOST: usize = 8;
/// Receives of a queue pair that messages of one peer may have taken and not completed.
const BOUND_MOST: usize = 16;

pub use ports::PortAnswer;

/// Why a message is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The peer is this process itself. Its messages never leave it, and are no affair of this machine.
    #[error("the peer is this process itself")]
    Itself,
    /// No room for one more peer.
    #[error("no room for one more peer")]
    TooManyPeers,
    /// The process has left.
    #[error("the process has left")]
    Closed,
}

/// The reliable datagrams of a process.
#[derive(Debug)]
pub struct Rd {
    config: Config,
    proof: Proof,
    tokens: Tokens,
    next_exchange: u64,
    pub(super) peers: Peers,
    of_address: BTreeMap<IpAddr, usize>,
    timers: BTreeSet<(Instant, PeerId)>,
    /// Peers that may have something to send.
    sending: VecDeque<PeerId>,
    answers: VecDeque<(Route, Vec<u8>)>,
    actions: Vec<Action>,
    /// Actions in `actions` that were given out.
    given: usize,
    challenges: Rate,
    unknowns: Rate,
    room: Room,
    /// The last peers that found no receive in a queue pair.
    refused: BTreeMap<u32, VecDeque<Route>>,
    is_closed: bool,
    pub(super) services: Services,
    /// With whom each stream is.
    pub(super) streams: BTreeMap<Ticket, PeerId>,
    pub(super) stream_news: VecDeque<StreamEvent>,
    pub(super) left: AllLeft,
    /// When the owner last found its socket empty.
    empty_at: Option<Instant>,
}

impl Rd {
    /// For a process that has just begun. `seed` is 32 random bytes that nobody else knows, others for each
    /// process: cookies and tokens come from it.
    pub fn new(now: &Now, config: Config, seed: &[u8; 32]) -> Self {
        let (mut cookies, mut tokens) = ([0; 16], [0; 16]);
        cookies.copy_from_slice(&seed[..16]);
        tokens.copy_from_slice(&seed[16..]);
        Self {
            config,
            proof: Proof::new(now, &cookies),
            tokens: Tokens::new(&tokens),
            next_exchange: 1,
            peers: Peers::default(),
            of_address: BTreeMap::new(),
            timers: BTreeSet::new(),
            sending: VecDeque::new(),
            answers: VecDeque::new(),
            actions: Vec::new(),
            given: 0,
            challenges: Rate::new(now.get(), CHALLENGES),
            unknowns: Rate::new(now.get(), UNKNOWNS),
            room: Room::new(now.get()),
            refused: BTreeMap::new(),
            is_closed: false,
            services: Services::default(),
            streams: BTreeMap::new(),
            stream_news: VecDeque::new(),
            left: AllLeft::default(),
            empty_at: None,
        }
    }

    /// Posts a message. It ends with [`Action::Finished`], once.
    pub fn post(&mut self, now: &Now, route: Route, message: Outgoing) -> Result<Ticket, PostError> {
        let id = self.peer_for(route)?;
        let ticket = self.services.ticket();
        let now = now.get();
        if let Some(peer) = self.peers.get_mut(id) {
            peer.waiting.push_back((ticket, message));
            peer.waiting_since.get_or_insert(now);
        }
        self.after(now, id);
        Ok(ticket)
    }

    /// The peer at the other end of this route, from now on.
    pub(super) fn peer_for(&mut self, route: Route) -> Result<PeerId, PostError> {
        if self.is_closed {
            return Err(PostError::Closed);
        }
        // The scope of a link-local address is not compared: either end may lack it.
        let end = |at: std::net::SocketAddr| (at.ip(), at.port());
        if end(route.local) == end(route.remote) {
            return Err(PostError::Itself);
        }
        match self.peers.find(route) {
            Some(id) => Ok(id),
            None if self.has_room(route.remote.ip()) => Ok(self.new_peer(route)),
            None => Err(PostError::TooManyPeers),
        }
    }

    /// The owner gives a posted message up, because its queue pair ends or its memory must not be read any
    /// more. [`Action::Finished`] with [`Failure::Withdrawn`] is reported at once, and no payload of it is
    /// named from now on; it may have been delivered, or may still be. What was posted behind it in an
    /// ordered flow fails with [`Failure::Flushed`], unless the message turns out to be Done. A ticket whose
    /// end was reported, or waits in [`Self::poll_action`], is left alone.
    ///
    /// Legal at any time, also between [`Self::poll_transmit`] and the assembling of its packet: the owner
    /// need not send that packet, which then counts as lost. The message is searched among those of all
    /// peers.
    pub fn withdraw(&mut self, now: &Now, ticket: Ticket) {
        let now = now.get();
        let actions = &mut self.actions;
        let withdraw = |(id, peer): (PeerId, &mut Peer)| peer.withdraw(now, ticket, actions).then_some(id);
        let found = self.peers.iter_mut().find_map(withdraw);
        if let Some(id) = found {
            self.after(now, id);
        }
    }

    /// The owner has the answer to a request, which came over this route. Nothing is reported of the request
    /// from now on. Until this call, the peer owes the answer: it is asked whether it is there, and if it is
    /// not, the request fails like one that is under way.
    pub fn answered(&mut self, now: &Now, route: Route, ticket: Ticket) {
        let now = now.get();
        let Some(id) = self.peers.find(route) else { return };
        let Some(peer) = self.peers.get_mut(id) else { return };
        let opening = match &mut peer.attempt {
            Some(Attempt::Opening(opening)) => Some(opening),
            _ => None,
        };
        let mut exchanges = peer.exchange.iter_mut().chain(opening);
        let actions = &mut self.actions;
        if exchanges.any(|exchange| exchange.on_answered(now, ticket, actions)) {
            self.after(now, id);
        }
    }

    /// A datagram of this service has come. `local` of the route is where it came to, `remote` where it came
    /// from. Adds the segments to place to `arrivals`; each must be answered by [`Self::on_placed`] before
    /// the next call of another verb, except [`Self::poll_transmit`] and [`Self::withdraw`].
    pub fn handle_input(&mut self, now: &Now, route: Route, datagram: &[u8], arrivals: &mut Vec<Arrival>) {
        self.handle_joined(now, route, datagram, datagram.len(), arrivals);
    }

    /// The same of the first of several datagrams that the system has joined: each has `len` bytes, the last
    /// may have fewer. Those behind it that bring the next parts of the same message are handled with it.
    /// Returns how many datagrams were handled.
    pub fn handle_joined(
        &mut self,
        now: &Now,
        route: Route,
        datagrams: &[u8],
        len: usize,
        arrivals: &mut Vec<Arrival>,
    ) -> usize {
        let (datagram, behind) = datagrams.split_at_checked(len).unwrap_or((datagrams, &[]));
        self.handle_first(now, route, Joined { datagram, behind }, arrivals) as usize + 1
    }

    /// Returns how many of those behind it were handled with it.
    fn handle_first(
        &mut self,
        now: &Now,
        route: Route,
        joined: Joined<'_>,
        arrivals: &mut Vec<Arrival>,
    ) -> u32 {
        let Ok(packet) = Packet::parse(joined.datagram) else { return 0 };
        let header = packet.header();
        let is_for_us = header.source_port == route.remote.port()
            && header.destination_port == route.local.port()
            && route.local != route.remote;
        if !is_for_us || self.is_closed || !packet.is_intact() {
            return 0;
        }
        let known = self.peers.find(route);
        let mut more = 0;
        match (header.kind, known) {
            (Kind::Packet, Some(id)) => more = self.on_packet(now, id, &packet, joined, arrivals),
            (Kind::Packet, None) => self.answer_unknown(now.get(), route, header.key),
            (Kind::Hello, _) => self.on_hello(now, route, &packet),
            (Kind::Open, _) => {
                self.on_open(now, route, &packet, arrivals);
                return 0;
            }
            (Kind::Challenge, Some(id)) => self.on_challenge(now, id, &packet),
            (Kind::Unknown, Some(id)) => self.on_unknown(now, id, header.key),
            (Kind::Cross, Some(id)) => self.on_cross(id, header.key),
            (Kind::Challenge | Kind::Unknown | Kind::Cross, None) | (Kind::Unassigned(_), _) => {}
        }
        if let Some(id) = known {
            self.after(now.get(), id);
        }
        more
    }

    /// The owner finds its socket empty, or has waited until something came: what it receives after this has
    /// not waited for the program. To be called after each receive call that got less than it had room for.
    /// An owner that never calls it says that its program never keeps datagrams waiting.
    pub fn on_socket_empty(&mut self, now: &Now) {
        self.empty_at = Some(now.get());
    }

    /// What the socket's receive buffer takes, as `SO_RCVBUF` says it: twice what was asked for. Peers may
    /// have three quarters of it in flight together. Without this call, it is that of a process which may not
    /// enlarge it.
    pub fn set_room(&mut self, bytes: u64) {
        self.room.set(bytes);
    }

    /// The socket says that it has dropped so many datagrams since it was made (`SO_MEMINFO`). When that has
    /// risen, all credit is halved for 100 ms.
    pub fn on_drops(&mut self, now: &Now, count: u32) {
        self.room.on_drops(now.get(), count);
    }

    /// The interface that leads to the peer takes packets of so many bytes, headers of IP and UDP aside.
    /// The exchange finds out how many of them arrive.
    pub fn search(&mut self, now: &Now, route: Route, limit: usize) {
        let Some(id) = self.peers.find(route) else { return };
        let exchange = self.peers.get_mut(id).and_then(|peer| peer.exchange.as_mut());
        if exchange.is_some_and(|exchange| exchange.path.search(limit)) {
            self.after(now.get(), id);
        }
    }

    /// Bytes of a full packet toward a peer. `None`: there is no exchange.
    pub fn packet_len(&self, route: Route) -> Option<usize> {
        Some(self.peers.of(route)?.exchange.as_ref()?.path.len())
    }

    /// The window toward a peer. `None`: there is no exchange.
    pub fn window(&self, route: Route) -> Option<Window> {
        Some(self.peers.of(route)?.exchange.as_ref()?.congestion.view())
    }

    fn blind(&self, now: Instant) -> Duration {
        self.empty_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at))
    }

    /// The owner has placed a segment, or not. May add further ones to `arrivals`: what was held until now.
    pub fn on_placed(&mut self, now: &Now, arrival: &Arrival, placed: Placed, arrivals: &mut Vec<Arrival>) {
        if arrival.unrepeated {
            return;
        }
        let now = now.get();
        let Some(id) = self.peers.find(arrival.route) else { return };
        let exchange = self.peers.get_mut(id).and_then(|peer| peer.exchange.as_mut());
        if let Some(exchange) = exchange.filter(|exchange| exchange.start.id == arrival.message.exchange) {
            exchange.on_placed(now, arrival, placed, arrivals, &mut self.actions);
            if matches!(placed, Placed::NoReceive(_)) {
                let refused = self.refused.entry(arrival.pair.destination).or_default();
                refused.retain(|route| *route != arrival.route);
                refused.push_back(arrival.route);
                if refused.len() > REFUSED_MOST {
                    refused.pop_front();
                }
            }
            self.after(now, id);
        }
    }

    /// A queue pair of the owner's has ended. What it had begun to take is refused, for this reason: a
    /// message that was whole and waited for its turn, too, and what comes later of one whose first segment
    /// has come. Its number may be another queue pair's from now on.
    pub fn refuse_all(&mut self, now: &Now, qpn: u32, reason: Reason) {
        self.on_queue_pair_gone(qpn);
        let now = now.get();
        for id in self.peers.ids() {
            if let Some(exchange) = self.peers.get_mut(id).and_then(|peer| peer.exchange.as_mut()) {
                exchange.refuse_all(now, qpn, reason, &mut self.actions);
                self.after(now, id);
            }
        }
    }

    /// Whether a message that has no receive yet may take one of a queue of so many. To be asked by the owner
    /// before it takes one; if not, it answers [`Placed::NoReceive`]. So no peer holds more than a quarter of
    /// a queue, at least one and at most 16, with messages that never become whole.
    pub fn may_bind(&self, arrival: &Arrival, queue: usize) -> bool {
        let exchange = self.peers.of(arrival.route).and_then(|peer| peer.exchange.as_ref());
        let bound = exchange.map_or(0, |exchange| exchange.bound(arrival.pair.destination));
        bound < (queue / 4).clamp(1, BOUND_MOST)
    }

    /// Receives were posted, and this queue pair has so many now. The last peers that found none hear of it.
    pub fn on_receives_posted(&mut self, now: &Now, qpn: u32, receives: usize) {
        let receives = u8::try_from(receives).unwrap_or(u8::MAX);
        for route in self.refused.remove(&qpn).into_iter().flatten() {
            let Some(id) = self.peers.find(route) else { continue };
            let exchange = self.peers.get_mut(id).and_then(|peer| peer.exchange.as_mut());
            if let Some(exchange) = exchange {
                exchange.on_receives_posted(qpn, receives);
                self.after(now.get(), id);
            }
        }
    }

    /// The queue pair is no more.
    pub fn on_queue_pair_gone(&mut self, qpn: u32) {
        self.refused.remove(&qpn);
    }

    /// What the owner must do next.
    pub fn poll_action(&mut self) -> Option<Action> {
        let action = self.actions.get(self.given).copied();
        self.given += 1;
        if action.is_none() {
            self.actions.clear();
            self.given = 0;
        }
        action
    }

    /// Whether [`Self::poll_action`] has something.
    #[inline]
    pub fn has_actions(&self) -> bool {
        self.given < self.actions.len()
    }

    /// When [`Self::handle_timeout`] must be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        // The timers of those that may have something to send are set when they have nothing more.
        let queued = self.sending.iter().filter_map(|id| self.timer_of(self.peers.get(*id)?));
        self.timers.first().map(|(at, _)| *at).into_iter().chain(queued).min()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: &Now) {
        let now = now.get();
        let queued: SmallVec<[PeerId; 4]> = self.sending.iter().copied().collect();
        queued.into_iter().for_each(|id| self.reset_timer(now, id));
        while let Some((due, id)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.set_timer(id, None);
            self.on_timer(now, id, due);
            self.after(now, id);
            // What is due at this very moment and stays so, as an acknowledgement to send, is not done here.
            let next = self.peers.get(id).and_then(|peer| self.timer_of(peer));
            self.set_timer(id, next.map(|at| at.max(now + Duration::from_nanos(1))));
        }
    }

    /// Makes the next packet, and says where it goes. `None`: there is nothing to send now.
    pub fn poll_transmit(&mut self, now: &Now, out: &mut PacketBuf) -> Option<Route> {
        if let Some((route, answer)) = self.answers.pop_front() {
            out.put_sealed(&answer);
            return Some(route);
        }
        let now = now.get();
        while let Some(id) = self.sending.pop_front() {
            let made = self.transmit(now, id, out);
            if let Some((route, Made::More)) = made {
                // The others come first next time.
                self.sending.push_back(id);
                return Some(route);
            }
            if let Some(peer) = self.peers.get_mut(id) {
                peer.is_queued = false;
            }
            self.reset_timer(now, id);
            if let Some((route, Made::Last)) = made {
                return Some(route);
            }
        }
        None
    }

    /// The process leaves. Nothing is taken any more; [`Self::poll_transmit`] says so to each peer, twice.
    /// The owner goes on until [`Self::is_closed`].
    pub fn close(&mut self, now: &Now) {
        self.is_closed = true;
        for id in self.peers.ids() {
            let Some(peer) = self.peers.get_mut(id) else { continue };
            (peer.attempt, peer.waiting_since) = (None, None);
            peer.waiting.clear();
            peer.fail_streams(Failure::Withdrawn);
            peer.dead.clear();
            peer.exchange.iter_mut().for_each(|exchange| exchange.close());
            self.after(now.get(), id);
        }
    }

    /// Every peer has been told.
    pub fn is_closed(&self) -> bool {
        let mut exchanges = self.peers.iter().filter_map(|(_, peer)| peer.exchange.as_ref());
        self.is_closed && exchanges.all(|exchange| exchange.is_closed())
    }

    /// Peers of whom something is kept: an exchange, an attempt or a token.
    pub fn peers(&self) -> usize {
        self.peers.len()
    }

    /// Bytes of segments that wait for their turn.
    pub fn held_bytes(&self) -> usize {
        let exchanges = self.peers.iter().filter_map(|(_, peer)| peer.exchange.as_ref());
        exchanges.map(|exchange| exchange.held_bytes()).sum()
    }

    /// Bytes of the longest packet on this route.
    fn longest(&self, route: Route) -> usize {
        if is_local(route) { self.config.local_packet_len } else { self.config.packet_len }
    }

    /// Bytes of the longest packet that this process takes on this route.
    fn most_taken(&self, route: Route) -> usize {
        self.longest(route).max(if is_local(route) { 0 } else { self.config.most_taken })
    }

    fn has_room(&self, address: IpAddr) -> bool {
        let of_one = self.of_address.get(&address).copied().unwrap_or(0);
        self.peers.len() < self.config.most_peers && of_one < self.config.most_peers_of_one
    }

    fn new_peer(&mut self, route: Route) -> PeerId {
        *self.of_address.entry(route.remote.ip()).or_insert(0) += 1;
        self.peers.add(route)
    }

    // --- Packets.

    fn on_hello(&mut self, now: &Now, route: Route, packet: &Packet<'_>) {
        let Some(hello) = Hello::parse(packet.body()) else { return };
        let has_place = self.answers.len() < ANSWERS_MOST;
        if hello.highest == 0 || !has_place || !self.challenges.allows(now.get()) {
            return;
        }
        let token = packet.header().key;
        let made = self.proof.make(now, route.remote, &added(route, token));
        let challenge = Challenge {
            highest: VERSION,
            home_port: route.local.port(),
            features: FEATURES,
            cookie: Cookie { key: made.hash, made: made.made },
            credit: self.room.share(now.get(), 1),
            largest: u16::try_from(self.most_taken(route)).unwrap_or(u16::MAX),
        };
        let header = answer_header(route, Kind::Challenge, token);
        self.answers.push_back((route, challenge.to_packet(&header).to_vec()));
    }

    fn on_challenge(&mut self, now: &Now, id: PeerId, packet: &Packet<'_>) {
        let Ok(challenge) = Challenge::parse(packet.body()) else { return };
        let Some(route) = self.peers.get(id).map(|peer| peer.route) else { return };
        let longest = self.longest(route);
        let Some(peer) = self.peers.get_mut(id) else { return };
        let Some(Attempt::Asking { token, hellos, sent, .. }) = peer.attempt else { return };
        // TODO(docs/rd.md section 8): a peer whose home port is another one than the asked port, with CLAIM,
        // comes with the driver, which has several ports.
        if token != packet.header().key || challenge.home_port != route.remote.port() {
            return;
        }
        let peer_takes = usize::from(challenge.largest).max(LEAST_PACKET);
        let longest = longest.min(peer_takes);
        if challenge.highest == 0 {
            peer.attempt = None;
            peer.fail_waiting(Failure::Incompatible, &mut self.actions);
            return;
        }
        let now = now.get();
        let version = challenge.highest.min(VERSION);
        let features = challenge.features & FEATURES;
        let mut rtt = Rtt::new();
        // With several Hellos it is not known which one this answers (RFC 6298 section 3).
        if let (1, Some(sent)) = (hellos, sent) {
            rtt.update(now.saturating_duration_since(sent), Duration::ZERO);
        }
        let open =
            Open { token, made: challenge.cookie.made, asked_port: route.remote.port(), version, features };
        let start = Start {
            id: self.next_exchange,
            route,
            own_key: token,
            peer_key: challenge.cookie.key,
            version,
            longest,
            peer_takes,
            most_requests: self.config.most_requests,
            credit: u64::from(challenge.credit) * CREDIT_UNIT,
            features,
            role: Role::Initiator(open),
        };
        self.next_exchange += 1;
        peer.attempt = Some(Attempt::Opening(Box::new(Exchange::new(now, start, rtt))));
    }

    fn on_packet(
        &mut self,
        now: &Now,
        id: PeerId,
        packet: &Packet<'_>,
        joined: Joined<'_>,
        arrivals: &mut Vec<Arrival>,
    ) -> u32 {
        let header = packet.header();
        let now = now.get();
        let blind = self.blind(now);
        let Some(peer) = self.peers.get_mut(id) else { return 0 };
        let own_key = |exchange: &Exchange| exchange.start.own_key == header.key;
        let opening = matches!(&peer.attempt, Some(Attempt::Opening(opening)) if own_key(opening));
        if !opening && !peer.exchange.as_ref().is_some_and(|exchange| own_key(exchange)) {
            let route = peer.route;
            self.answer_unknown(now, route, header.key);
            return 0;
        }
        if let Some(Attempt::Opening(opening)) = &mut peer.attempt
            && opening.start.own_key == header.key
        {
            opening.phase = Phase::Up;
            peer.end_exchange(now, Failure::Restarted, &mut self.actions);
            if let Some(Attempt::Opening(opening)) = peer.attempt.take() {
                peer.exchange = Some(opening);
            }
        }
        let Some(exchange) = &mut peer.exchange else { return 0 };
        self.room.on_heard(now, &mut peer.heard);
        let body = packet.body();
        let (at, services) = (Header::LEN, &mut self.services);
        let actions = &mut self.actions;
        let handled =
            exchange.handle_input(now, blind, header, body, at, joined, arrivals, actions, services);
        if let Some(Over::Failed(failure)) = handled.over {
            arrivals.clear();
            peer.end_exchange(now, failure, &mut self.actions);
        }
        handled.more
    }

    fn answer_unknown(&mut self, now: Instant, route: Route, key: u64) {
        if self.answers.len() < ANSWERS_MOST && self.unknowns.allows(now) {
            let answer = answer_header(route, Kind::Unknown, key).to_packet();
            self.answers.push_back((route, answer.to_vec()));
        }
    }

    fn on_unknown(&mut self, now: &Now, id: PeerId, key: u64) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let exchange = peer.exchange.as_mut().filter(|exchange| exchange.start.peer_key == key);
        if exchange.is_some_and(|exchange| exchange.on_unknown(now.get())) {
            peer.end_exchange(now.get(), Failure::Restarted, &mut self.actions);
        }
    }

    fn on_cross(&mut self, id: PeerId, key: u64) {
        let peer = self.peers.get_mut(id).filter(|peer| peer.route.local < peer.route.remote);
        if let Some(Attempt::Opening(opening)) = peer.and_then(|peer| peer.attempt.as_mut())
            && opening.start.own_key == key
        {
            opening.is_crossed = true;
        }
    }

    // --- Time.

    fn on_timer(&mut self, now: Instant, id: PeerId, due: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.dead.retain(|dead| dead.until > now);
        let late = now.saturating_duration_since(due);
        if late >= STOOD_STILL {
            peer.waiting_since = peer.waiting_since.map(|since| since + late);
            let attempt = peer.attempt.iter_mut().filter_map(|attempt| match attempt {
                Attempt::Opening(opening) => Some(opening),
                Attempt::Asking { .. } => None,
            });
            peer.exchange.iter_mut().chain(attempt).for_each(|exchange| exchange.excuse(late));
        }
        let mut is_over =
            |exchange: &mut Box<Exchange>| exchange.handle_timeout(now, &self.config, &mut self.actions);
        let over = peer.exchange.as_mut().and_then(&mut is_over);
        let failure = match &mut peer.attempt {
            Some(Attempt::Opening(opening)) => is_over(opening),
            _ => None,
        };
        if failure.is_some()
            && let Some(Attempt::Opening(mut opening)) = peer.attempt.take()
        {
            let queued = opening.end(Failure::Silent, &mut self.actions);
            self.actions.extend(queued.into_iter().map(|(ticket, _)| failed(ticket, Failure::Silent)));
            peer.fail_waiting(Failure::Silent, &mut self.actions);
        }
        match over {
            Some(Over::Failed(failure)) => peer.end_exchange(now, failure, &mut self.actions),
            // Old enough: no copy of its Open can be accepted any more.
            Some(Over::Forgotten) => peer.exchange = None,
            None => {}
        }
        if peer.waiting_since.is_some_and(|since| since + self.config.patience <= now) {
            if matches!(peer.attempt, Some(Attempt::Asking { .. })) {
                peer.attempt = None;
            }
            peer.fail_waiting(Failure::Silent, &mut self.actions);
        }
    }

    /// After anything that concerns a peer: messages go where they can, and the peer is asked what it has to
    /// send. Its timer follows when that is nothing more: once for all that happens in a turn of the owner.
    pub(super) fn after(&mut self, now: Instant, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let has_waiting = !peer.waiting.is_empty() || !peer.waiting_streams.is_empty();
        let is_usual = peer.attempt.is_none() && peer.exchange.is_some() && !has_waiting;
        if is_usual && peer.is_queued && !peer.has_stream_news() {
            return;
        }
        if has_waiting {
            // The peer has woken it meanwhile.
            let is_awake = peer.exchange.as_ref().is_some_and(|exchange| exchange.takes_messages(now));
            if is_awake && matches!(peer.attempt, Some(Attempt::Asking { .. })) {
                peer.attempt = None;
            }
            let exchange = match (&mut peer.attempt, &mut peer.exchange) {
                (Some(Attempt::Opening(opening)), _) if !opening.is_crossed => Some(opening),
                (Some(_), _) => None,
                (None, Some(exchange)) if exchange.takes_messages(now) => Some(exchange),
                (None, Some(exchange)) if exchange.may_wake(now) => {
                    exchange.ping(now);
                    None
                }
                (None, _) => {
                    let token = self.tokens.next();
                    peer.attempt = Some(Attempt::Asking { token, hellos: 0, since: now, sent: None });
                    None
                }
            };
            if let Some(exchange) = exchange {
                peer.waiting_since = None;
                peer.waiting.drain(..).for_each(|(ticket, message)| exchange.post(now, ticket, message));
                if exchange.phase == Phase::Opening && !peer.waiting_streams.is_empty() {
                    exchange.ping(now);
                }
                if peer.attempt.is_none() {
                    peer.begin_streams();
                }
            }
        } else if matches!(peer.attempt, Some(Attempt::Asking { .. })) {
            peer.attempt = None;
        }
        let (has_news, is_empty) = (peer.has_stream_news(), peer.is_empty());
        if !is_empty && !std::mem::replace(&mut peer.is_queued, true) {
            self.sending.push_back(id);
        }
        if has_news {
            self.gather_stream_news(id);
        }
        if is_empty {
            self.forget(id);
        }
    }

    fn forget(&mut self, id: PeerId) {
        self.set_timer(id, None);
        let Some(peer) = self.peers.remove(id) else { return };
        if peer.is_queued {
            self.sending.retain(|other| *other != id);
        }
        let address = peer.route.remote.ip();
        if let Some(count) = self.of_address.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                self.of_address.remove(&address);
            }
        }
    }

    fn reset_timer(&mut self, now: Instant, id: PeerId) {
        let Some(peer) = self.peers.get(id) else { return };
        let timer = self.timer_of(peer).map(|at| at.max(now));
        self.set_timer(id, timer);
    }

    /// When there is something to do for a peer.
    fn timer_of(&self, peer: &Peer) -> Option<Instant> {
        let opening = match &peer.attempt {
            Some(Attempt::Opening(opening)) => Some(opening.timeout(&self.config)),
            Some(asking) => hello_at(asking),
            None => None,
        };
        let others = [
            opening,
            peer.exchange.as_ref().map(|exchange| exchange.timeout(&self.config)),
            peer.waiting_since.map(|since| since + self.config.patience),
            peer.dead.iter().map(|dead| dead.until).min(),
        ];
        others.into_iter().flatten().min()
    }

    fn set_timer(&mut self, id: PeerId, timer: Option<Instant>) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        // An earlier one stays, although it may be in vain: with each packet the timers of an exchange move a
        // little later, and this is one more look at it per round of them.
        if let (Some(old), Some(new)) = (peer.timer, timer)
            && old <= new
        {
            return;
        }
        peer.timer.iter().for_each(|old| {
            self.timers.remove(&(*old, id));
        });
        self.timers.extend(timer.map(|at| (at, id)));
        peer.timer = timer;
    }

    // --- Output.

    fn transmit(&mut self, now: Instant, id: PeerId, out: &mut PacketBuf) -> Option<(Route, Made)> {
        let peer = self.peers.get_mut(id)?;
        let (route, credit) = (peer.route, self.room.share(now, 0));
        if let Some(exchange) = &mut peer.exchange
            && let Some(made) = exchange.poll_transmit(now, &self.config, credit, out)
        {
            exchange.unrepeated.report(&mut self.actions);
            if exchange.path.take_question() {
                self.actions.push(Action::AskLength { route });
            }
            // An attempt beside it may have something to send.
            let made = if peer.attempt.is_some() { Made::More } else { made };
            return Some((route, made));
        }
        let attempt = peer.attempt.as_mut()?;
        let is_due = hello_at(attempt).is_some_and(|at| at <= now);
        match attempt {
            Attempt::Opening(opening) => {
                opening.poll_transmit(now, &self.config, credit, out).map(|made| (route, made))
            }
            Attempt::Asking { token, hellos, sent, .. } if is_due => {
                (*hellos, *sent) = (*hellos + 1, Some(now));
                let header = answer_header(route, Kind::Hello, *token);
                out.put_sealed(&Hello { highest: VERSION, features: FEATURES }.to_packet(&header));
                Some((route, Made::More))
            }
            Attempt::Asking { .. } => None,
        }
    }
}

/// Whether its packets stay on the host.
fn is_local(route: Route) -> bool {
    route.local.ip() == route.remote.ip()
}

/// The shortest packet length that is ever used: IPv6's least MTU without its headers.
const LEAST_PACKET: usize = 1232;
/// The longest at first, to an initiator, which does not say what it takes.
const LARGEST_PACKET: usize = 1472;

fn answer_header(route: Route, kind: Kind, key: u64) -> Header {
    Header {
        version: VERSION,
        kind,
        source_port: route.local.port(),
        destination_port: route.remote.port(),
        key,
        number: 0,
    }
}

/// What a cookie is bound to, besides the initiator's address and port.
fn added(route: Route, token: u64) -> [u8; 10] {
    let mut added = [0; 10];
    added[..8].copy_from_slice(&token.to_be_bytes());
    added[8..].copy_from_slice(&route.local.port().to_be_bytes());
    added
}
