//! Bring-up by number: the queue pairs of one port, and the peers that their programs have named, by address
//! and number, without ids (docs/contracts.md, "Bring-up").
//!
//! A queue pair number names a TCP and a UDP port, so an address and a number say where the peer's process
//! listens. The end with the smaller (address, number) listens, the other one connects; both send an
//! [`Introduction`]. A connector that finds no listener tries again for as long as its queue pair waits: the
//! queue pair itself limits how long work requests may wait ([`uwarp_rnic::qp::RcCore::retry_limit`]).
//!
//! ```text
//!   begin ─▶ Pairing ──┬─ larger: cookie ── Active ── Accepted ─────┬─▶ Attach
//!                      └─ smaller: waits ─┐                         │
//!   Listener ─ Requested ─▶ early ────────┴── accept, Replied ──────┘
//! ```
//!
//! # Who may speak for a queue pair
//! Numbers and addresses are public, so each end proves that it is the one that the other's program has
//! named, before anything is kept or answered ([`super::proof`], [`uwarp_wire::introduction`]):
//! - The connector shows a cookie that came to the UDP port of its number. A cookie counts only if it is
//!   younger than the listener's move to RTR: by then the listener's program has named the port's owner. An
//!   older one may be that of the port's last owner.
//! - The listener has the TCP port of its number, and returns the request's incarnation.
//! - Each end shows a half of each packet sequence number that it knows, the other end the other half. What
//!   both know must fit, and something must be known to both. So who has taken the port of a process that
//!   died cannot return what it was sent. (PSNs that everybody knows prove nothing.)
//!
//! A request with a good proof that comes before its queue pair is in RTR, or while it still has its previous
//! stream, waits here. Whatever is turned away is rejected in words, and its connector asks for a new cookie.
//! Everything that a stranger can hold is bounded: connections and requests by the [`Budget`], requests also
//! by number, peer and time, and cookies cost nothing.
//!
//! A stream that ends before any program has used it does not count: the peer was moved to RESET meanwhile,
//! and the queue pair waits for the next stream. (`design/bring_up.py` searches these rules exhaustively.)

mod connecting;
mod early;
mod index;
mod listening;
mod pairing;
mod unanswered;
mod why;

use std::cmp::Ordering;
use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_llp::carrier::Close;
use uwarp_llp::udp::Route;
use uwarp_proto::datagram;
use uwarp_proto::proof::{self, Proof};
use uwarp_proto::setup::{Depths, InitiatorConfig, Negotiated, RTR_STAG_TO, ResponderPolicy, Revision, Rtr};
use uwarp_rnic::ah::port_of;
use uwarp_rnic::qp::{Now, Psns};
use uwarp_wire::datagram::proof::Proof as ProofDatagram;
use uwarp_wire::introduction::TurnedAway;

use self::early::{Arrived, EarlyRequests};
use self::index::{Entry, Index};
use self::listening::EARLY_LIMIT;
pub use self::listening::MOST_EARLY_EACH;
pub use self::pairing::shown_psns;
use self::pairing::{Pairing, State};
use self::unanswered::Unanswered;
use self::why::Named;
use super::active::{self, Active};
use super::budget::{Budget, Place};
use super::handshake::{Event, Handshake};
use super::listener::{self, Listener, MAX_BACKLOG};
use super::{
    Action, ConnKey, Ends, Input, Machine, Recipient, Space, StreamEvent, Transmit, Want, earlier, is_over,
    silence,
};
use crate::timeouts::Timeouts;

/// The two addresses of a queue pair's stream; ports do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// An address of this host.
    pub local: SocketAddr,
    /// The peer's.
    pub peer: SocketAddr,
}

const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Datagrams that wait to be sent: a request of each number, and answers. What is lost is asked for again.
const MOST_DATAGRAMS: usize = 1024;

/// What the pairings of a port need to know.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Time limits.
    pub timeouts: Timeouts,
    /// How requests are answered.
    pub policy: ResponderPolicy,
    /// CRC and markers, as this end asks for them.
    pub crc: bool,
    #[allow(missing_docs)]
    pub markers: bool,
    /// This end says that it is uwarp.
    pub says_uwarp: bool,
    /// The process's.
    pub budget: Budget,
}

impl Settings {
    fn request(&self, qpn: u32, pairing: &Pairing) -> InitiatorConfig {
        let max_ird = self.policy.max_ird;
        InitiatorConfig {
            revision: Revision::Two,
            crc: self.crc,
            markers: self.markers,
            depths: Depths::negotiated(max_ird, max_ird),
            max_ird,
            peer: self.says_uwarp.then(|| pairing.peer_data(qpn)),
            peer_in_request: false,
        }
    }
}

/// What the program has set of a queue pair: pushed at each of its changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Terms {
    /// Packet sequence numbers.
    pub psns: Psns,
    /// How often the peer repeats a Send without a receive.
    pub retry_cnt: u8,
    /// The same for this end's Sends, once the program has said it.
    pub rnr_retry: Option<u8>,
    /// What it tells the peer to wait before.
    pub min_rnr_timer: u8,
    /// This end acknowledges placement.
    pub placement_acks: bool,
}

/// The queue pairs of one port that are brought up by number.
#[derive(Debug)]
pub struct Pairings {
    settings: Settings,
    proof: Proof,
    listener: Listener,
    /// Asked for, or there.
    listens: bool,
    /// The system has refused to listen: the next attempt.
    listen_again: Option<Instant>,
    /// For the next attempt to connect; 0 is the listener's.
    spaces: u32,
    pairs: BTreeMap<u32, Pairing>,
    index: Index,
    /// The addresses and ports that pairings name.
    named: BTreeMap<(Ipv6Addr, u16), Named>,
    /// Queue pairs that exist.
    alive: Alive,
    early: EarlyRequests,
    /// Requests that are turned away, until the words are sent.
    leaving: BTreeMap<ConnKey, Leaving>,
    /// Requests for cookies that came before a queue pair's move.
    unanswered: Unanswered,
    /// Cookies for others in the second that began then.
    cookies: Option<(Instant, u32)>,
    datagrams: VecDeque<(Route, [u8; ProofDatagram::LEN])>,
    /// The last one that was given out.
    sending: Option<(Route, [u8; ProofDatagram::LEN])>,
    actions: VecDeque<Action<Infallible>>,
}

#[derive(Debug)]
struct Leaving {
    handshake: Box<Handshake>,
    _place: Option<Place>,
}

/// The queue pairs of a port that exist. The program makes and destroys hundreds in a row, and the shell
/// reports each change.
#[derive(Debug, Default)]
struct Alive {
    port: u16,
    slots: [u64; 4],
}

impl Alive {
    fn has(&self, qpn: u32) -> bool {
        let (word, bit) = Self::place(qpn);
        port_of(qpn) == self.port && self.slots.get(word).is_some_and(|slots| slots & bit != 0)
    }

    fn set(&mut self, qpn: u32, is_alive: bool) {
        self.port = port_of(qpn);
        let (word, bit) = Self::place(qpn);
        if let Some(slots) = self.slots.get_mut(word) {
            *slots = if is_alive { *slots | bit } else { *slots & !bit };
        }
    }

    fn place(qpn: u32) -> (usize, u64) {
        let [.., slot] = qpn.to_be_bytes();
        (usize::from(slot / 64), 1 << (slot % 64))
    }
}

impl Pairings {
    /// For a port whose sockets are bound. `key`: 16 random bytes that nobody else knows.
    pub fn new(now: &Now, settings: Settings, key: &[u8; 16]) -> Self {
        // Both ends are uwarp: there is no older revision to speak.
        let policy = ResponderPolicy { max_revision: Revision::Two, ..settings.policy };
        let Settings { timeouts, ref budget, .. } = settings;
        let listener = listener::Settings { timeouts, policy, backlog: MAX_BACKLOG, budget: budget.clone() };
        Self {
            proof: Proof::new(now, key),
            listener: Listener::new(Space::new(0), listener),
            listens: false,
            listen_again: None,
            spaces: 0,
            pairs: BTreeMap::new(),
            index: Index::default(),
            named: BTreeMap::new(),
            alive: Alive::default(),
            early: EarlyRequests::default(),
            leaving: BTreeMap::new(),
            unanswered: Unanswered::default(),
            cookies: None,
            datagrams: VecDeque::new(),
            sending: None,
            actions: VecDeque::new(),
            settings,
        }
    }

    /// The queue pairs of this port that exist now: a bit for each, by the low byte of its number.
    pub fn set_alive(&mut self, port: u16, slots: [u64; 4]) {
        self.alive = Alive { port, slots };
    }

    /// A queue pair with this number exists from now on, or no longer; in that case see [`Self::forget`].
    pub fn alive(&mut self, qpn: u32, is_alive: bool) {
        self.alive.set(qpn, is_alive);
    }

    /// The program has moved a queue pair to RTR: it waits for its stream to queue pair `peer` at the other
    /// end of the path. `incarnation` and `token` are random.
    #[allow(clippy::too_many_arguments)]
    pub fn begin(
        &mut self,
        now: &Now,
        (qpn, moves): (u32, u32),
        path: Path,
        peer: u32,
        terms: Terms,
        incarnation: u64,
        token: u64,
    ) {
        self.end(qpn);
        let pairing = Pairing {
            moves,
            path,
            peer,
            terms,
            incarnation,
            token,
            began: now.get(),
            cookie: None,
            asked: 0,
            unanswered: 0,
            why: None,
            why_said: false,
            late: None,
            failed: None,
            pauses: 0,
            rejected: false,
            wrong_psn: None,
            refused: None,
            state: State::Waiting,
            indexed: Entry::default(),
        };
        let role = pairing.role(qpn);
        self.named.entry(pairing.names_peer()).or_default().pairings += 1;
        self.pairs.insert(qpn, pairing);
        self.index.touch(qpn);
        match role {
            Ordering::Less => {
                self.late_after(now, qpn, silence::CONNECTS_WITHIN);
                self.listen();
                self.serve(now, qpn);
            }
            Ordering::Equal => self.join_itself(qpn),
            Ordering::Greater => self.ask(now, qpn),
        }
        self.refresh();
    }

    fn join_itself(&mut self, qpn: u32) {
        let conn = self.space().name();
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let own = pairing.path.local;
        pairing.state = State::Joining { conn };
        self.actions.push_back(Action::Connect { conn, from: Some(own), to: own });
    }

    fn listen(&mut self) {
        self.listen_again = None;
        if !std::mem::replace(&mut self.listens, true) {
            self.actions.push_back(Action::Listen);
        }
    }

    /// Whether a queue pair waits for requests.
    fn has_listeners(&self) -> bool {
        self.pairs.iter().any(|(qpn, pairing)| pairing.role(*qpn) == Ordering::Less)
    }

    /// To be called after [`Self::begin`], with a later time: a cookie from the time of the move does not
    /// count. The peer may have asked for one before the move.
    pub fn begun(&mut self, now: &Now, qpn: u32) {
        let Some(pairing) = self.pairs.get(&qpn) else { return };
        let (peer, (address, port)) = (pairing.peer, pairing.names_peer());
        let asked = self
            .unanswered
            .take(qpn, |from, source_qpn| (source_qpn, gid(from.ip()), from.port()) == (peer, address, port));
        for (from, to, request) in asked {
            self.answer(now, from, to, &request);
        }
    }

    /// What this host has refused of what a queue pair needs; it waits in vain.
    pub fn refused(&self, qpn: u32) -> Option<Errno> {
        self.pairs.get(&qpn)?.refused
    }

    /// The connecting ends that are about to do something, with the move that each is for. Their queue pairs
    /// may have failed since, on their own.
    pub fn due(&self, now: &Now) -> Vec<(u32, u32)> {
        let due = self.index.due(now.get()).into_iter();
        due.filter_map(|qpn| Some((qpn, self.pairs.get(&qpn)?.moves))).collect()
    }

    /// The queue pair does not wait any more for the stream of this one of its moves to RTR.
    pub fn give_up(&mut self, qpn: u32, moves: u32) {
        if self.pairs.get(&qpn).is_some_and(|pairing| pairing.moves == moves) {
            self.end(qpn);
        }
    }

    /// The program has changed attributes of a queue pair.
    pub fn terms(&mut self, qpn: u32, terms: Terms) {
        if let Some(pairing) = self.pairs.get_mut(&qpn) {
            pairing.terms = terms;
        }
    }

    /// The queue pair is in RESET or ERR: everything that was begun for it is cancelled.
    pub fn end(&mut self, qpn: u32) {
        self.end_why(qpn);
        let Some(pairing) = self.pairs.remove(&qpn) else { return };
        self.index.change(qpn, pairing.indexed, Entry::default());
        let peer = pairing.names_peer();
        if let Some(named) = self.named.get_mut(&peer) {
            named.pairings -= 1;
            if named.pairings == 0 {
                self.named.remove(&peer);
            }
        }
        match pairing.state {
            State::Replying { conn, .. } | State::Joining { conn } => self.close(conn, Close::Finish),
            State::Asking(mut active) => {
                active.cancel();
                while let Some(action) = active.poll_action() {
                    self.actions.extend(action.pass().ok());
                }
            }
            // The stream is the queue pair's, and ends with its state.
            _ => {}
        }
    }

    /// The queue pair is about to be destroyed.
    pub fn forget(&mut self, now: &Now, qpn: u32) {
        self.end(qpn);
        self.alive(qpn, false);
        self.unanswered.take(qpn, |_, _| false);
        for early in self.early.take_of(qpn, |_| true) {
            self.reject(now, early, TurnedAway::NoQueuePair);
        }
    }

    /// What is held of others: early requests, and those that are being turned away.
    pub fn held(&self) -> usize {
        self.early.len() + self.leaving.len()
    }

    /// The early requests: the queue pair that each is for, the one that it comes from, and its address.
    pub fn early(&self) -> impl Iterator<Item = (u32, u32, Ipv6Addr)> + '_ {
        self.early.iter().map(|request| {
            (request.introduction.destination_qpn, request.introduction.source_qpn, request.from)
        })
    }

    /// The state of each pairing, and its deadline.
    pub fn phases(&self) -> impl Iterator<Item = (u32, &'static str, Option<Instant>)> + '_ {
        self.pairs.iter().map(|(qpn, pairing)| (*qpn, pairing.state.name(), pairing.deadline_of_change()))
    }

    fn timeout(&self, pairs: Option<Instant>) -> Option<Instant> {
        let early = self.early.oldest().map(|since| since + EARLY_LIMIT);
        let leaving = self.leaving.values().filter_map(|leaving| leaving.handshake.poll_timeout()).min();
        let own = earlier(earlier(pairs, early), earlier(leaving, self.listen_again));
        earlier(own, self.listener.poll_timeout())
    }

    /// When something changes, whatever the log says before.
    #[cfg(test)]
    fn next_change(&self) -> Option<Instant> {
        self.timeout(self.pairs.values().filter_map(Pairing::deadline_of_change).min())
    }

    fn space(&mut self) -> Space {
        self.spaces += 1;
        Space::new(self.spaces)
    }

    fn close(&mut self, conn: ConnKey, how: Close) {
        self.actions.push_back(Action::Close { conn, how });
    }

    fn reject(&mut self, now: &Now, mut request: Arrived, why: TurnedAway) {
        tracing::debug!(introduction = ?request.introduction, "turned away: {why}");
        self.reject_handshake(now, request.conn, request.handshake.as_mut(), why);
        self.leave(request.conn, request.handshake, Some(request.place));
    }

    fn reject_handshake(&mut self, now: &Now, conn: ConnKey, handshake: &mut Handshake, why: TurnedAway) {
        if handshake.reject(now, &why.to_bytes()).is_err() {
            self.close(conn, Close::Finish);
        }
    }

    fn leave(&mut self, conn: ConnKey, handshake: Box<Handshake>, place: Option<Place>) {
        if !handshake.is_drained() {
            self.leaving.insert(conn, Leaving { handshake, _place: place });
            self.actions.push_back(Action::Look { conn });
        }
    }

    /// A request that is being turned away has its words, or cannot get them.
    fn leaving(&mut self, conn: ConnKey, input: Input<'_>) {
        let open = !matches!(input, Input::Failed { .. });
        let Some(leaving) = self.leaving.get_mut(&conn) else { return };
        leaving.handshake.handle_input(input);
        if leaving.handshake.is_drained() || !open {
            self.leaving.remove(&conn);
            if open {
                self.close(conn, Close::Finish);
            }
        }
    }

    // --- The listening end.

    fn send(&mut self, route: Route, proof: &ProofDatagram) {
        if self.datagrams.len() < MOST_DATAGRAMS {
            self.datagrams.push_back((route, proof.to_bytes()));
        }
    }

    // --- The stream.

    fn attach(&mut self, qpn: u32, conn: ConnKey, said: Box<Negotiated>) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let (to, param) = (Recipient::Number { qpn, moves: pairing.moves }, pairing.conn_param(&said));
        pairing.state = State::Attaching { conn };
        pairing.late = None;
        self.actions.push_back(Action::Attach { conn, to, said, param });
    }

    fn stream_event(&mut self, now: &Now, qpn: u32, conn: ConnKey, event: StreamEvent) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let up = matches!(pairing.state, State::Up { .. });
        match event {
            StreamEvent::Attached if matches!(pairing.state, State::Attaching { .. }) => {
                pairing.state = State::Attached { conn };
            }
            StreamEvent::Used => pairing.state = State::Up { conn },
            StreamEvent::Ended(_) if up => pairing.state = State::Over,
            // It waits for no stream of this move any more: it has failed by itself.
            StreamEvent::Refused(error) => {
                tracing::debug!(qpn, "the queue pair does not take the connection: {error}");
                pairing.state = State::Over;
                self.close(conn, Close::Finish);
            }
            StreamEvent::Ended(_) => self.wait_again(now, qpn),
            StreamEvent::Attached | StreamEvent::Established => {}
        }
    }

    /// A stream did not count: the queue pair waits for the next one.
    fn wait_again(&mut self, now: &Now, qpn: u32) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        match pairing.role(qpn) {
            Ordering::Less => {
                pairing.state = State::Waiting;
                self.serve(now, qpn);
            }
            Ordering::Greater | Ordering::Equal => self.pause(now, qpn),
        }
    }

    fn handle_pairs_input(&mut self, now: &Now, qpn: u32, conn: ConnKey, input: Input<'_>) {
        self.index.touch(qpn);
        if let Input::Stream { event, .. } = input {
            return self.stream_event(now, qpn, conn, event);
        }
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        if pairing.asks_why_on(conn) {
            if let Some(why) = &mut pairing.why {
                why.active.handle_input(now, input);
            }
            return self.hear_why(qpn);
        }
        let open = !matches!(input, Input::Failed { .. });
        match &mut pairing.state {
            State::Asking(active) => {
                active.handle_input(now, input);
                self.connecting(now, qpn);
            }
            State::Replying { handshake, .. } => {
                let event = handshake.handle_input(input);
                self.replying(now, qpn, event, open);
            }
            State::Joining { .. } => match input {
                Input::Opened { .. } => {
                    let said = self.joined_itself(qpn);
                    self.attach(qpn, conn, said);
                }
                Input::Failed { why, .. } => {
                    let qp = format_args!("{qpn:#x}");
                    tracing::warn!(qpn = %qp, "cannot connect the queue pair with itself: {}", why.errno());
                    pairing.refused = Some(why.errno());
                    self.pause(now, qpn);
                }
                _ => {}
            },
            _ => {}
        }
    }

    /// What the two ends of a queue pair that is its own peer have agreed on.
    fn joined_itself(&self, qpn: u32) -> Box<Negotiated> {
        let Settings { policy, crc, markers, .. } = self.settings;
        Box::new(Negotiated {
            initiator: true,
            revision: Revision::Two,
            crc,
            send_markers: markers,
            receive_markers: markers,
            ird: policy.max_ird,
            ord: policy.max_ird,
            rtr: Rtr::None,
            peer_enhanced: None,
            drops_reserved_flags: false,
            peer_is_uwarp: true,
            peer: self.pairs.get(&qpn).map(|pairing| pairing.peer_data(qpn)),
            host: None,
            rtr_stag_to: RTR_STAG_TO,
            private_data: Vec::new(),
        })
    }
}

impl Machine for Pairings {
    type Report = Infallible;

    fn handle_input(&mut self, now: &Now, input: Input<'_>) {
        match input {
            Input::Datagram { from, to, bytes } => {
                let Some(proof) = datagram::parse_proof(bytes) else { return };
                if port_of(proof.source_qpn) != from.port() {
                    return;
                }
                match proof.cookie {
                    None if self.waits_for_move(now, from, to, &proof) => {}
                    None => self.answer(now, from, to, &proof),
                    Some(cookie) => self.has_cookie(now, from, &proof, cookie),
                }
            }
            Input::NotListening(errno) => {
                tracing::error!("cannot listen on a port of queue pair numbers: {errno}; trying again");
                self.listens = false;
                for pairing in self.pairs.values_mut().filter(|p| matches!(p.state, State::Waiting)) {
                    pairing.refused = Some(errno);
                }
                self.listen_again = self.has_listeners().then(|| now.get() + LONGEST_PAUSE);
            }
            input => {
                let conn = input.conn();
                if let Some(conn) = conn.filter(|conn| self.leaving.contains_key(conn)) {
                    self.leaving(conn, input);
                } else if let Some(conn) = conn.filter(|conn| self.early.has(*conn)) {
                    let ended = matches!(input, Input::End { .. });
                    if ended || matches!(input, Input::Failed { .. }) {
                        self.early.take(conn);
                    }
                    if ended {
                        self.close(conn, Close::Finish);
                    }
                } else if let Some((qpn, conn)) = conn.and_then(|conn| Some((self.index.owner(conn)?, conn)))
                {
                    self.handle_pairs_input(now, qpn, conn, input);
                } else if let Input::Stream { conn, event: StreamEvent::Refused(_) } = input {
                    // Its move was over before its queue pair was asked.
                    self.close(conn, Close::Finish);
                } else {
                    self.listener.handle_input(now, input);
                }
            }
        }
        self.listening(now);
        self.refresh();
    }

    fn handle_timeout(&mut self, now: &Now) {
        if is_over(self.listen_again, now) {
            self.listen_again = None;
            if self.has_listeners() {
                self.listen();
            }
        }
        while self.early.oldest().is_some_and(|since| since + EARLY_LIMIT <= now.get()) {
            if let Some(early) = self.early.take_oldest() {
                self.reject(now, early, TurnedAway::Crowded);
            }
        }
        let late = |(_, leaving): &(&ConnKey, &Leaving)| is_over(leaving.handshake.poll_timeout(), now);
        let late: Vec<ConnKey> = self.leaving.iter().filter(late).map(|(conn, _)| *conn).collect();
        for conn in late {
            self.leaving.remove(&conn);
            self.close(conn, Close::Finish);
        }
        for qpn in self.index.due(now.get()) {
            self.index.touch(qpn);
            let Some(pairing) = self.pairs.get_mut(&qpn) else { continue };
            if let Some(why) = &mut pairing.why {
                why.active.handle_timeout(now);
                self.hear_why(qpn);
            }
            self.say_late(now, qpn);
            let Some(pairing) = self.pairs.get_mut(&qpn) else { continue };
            if !is_over(pairing.deadline_of_state(), now) {
                continue;
            }
            let role = pairing.role(qpn);
            match &mut pairing.state {
                State::AwaitCookie { .. } => self.ask(now, qpn),
                State::Paused { .. } if role == Ordering::Equal => self.join_itself(qpn),
                State::Paused { .. } => self.connect(now, qpn),
                State::Asking(active) => {
                    active.handle_timeout(now);
                    self.connecting(now, qpn);
                }
                State::Replying { handshake, .. } => {
                    let event = handshake.handle_timeout(now);
                    self.replying(now, qpn, event, true);
                }
                _ => {}
            }
        }
        self.listener.handle_timeout(now);
        self.listening(now);
        self.refresh();
    }

    fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        if let Some(next) = self.datagrams.pop_front() {
            let (route, bytes) = self.sending.insert(next);
            return Some(Transmit::Datagram { route: *route, bytes });
        }
        for (conn, leaving) in &self.leaving {
            if let Some(bytes) = leaving.handshake.poll_transmit() {
                return Some(Transmit::Bytes { conn: *conn, bytes });
            }
        }
        let qpn = self.index.sends()?;
        self.pairs.get_mut(&qpn)?.poll_transmit()
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.timeout(self.index.first_deadline())
    }

    fn poll_action(&mut self) -> Option<Action<Infallible>> {
        self.actions.pop_front()
    }

    fn want(&self, conn: ConnKey) -> Want {
        if self.early.has(conn) {
            return Want::End;
        }
        if let Some(leaving) = self.leaving.get(&conn) {
            return leaving.handshake.want();
        }
        let pairing = self.index.owner(conn).and_then(|qpn| self.pairs.get(&qpn));
        if let Some(why) = pairing.filter(|pairing| pairing.asks_why_on(conn)).and_then(|p| p.why.as_ref()) {
            return why.active.want(conn);
        }
        match pairing.map(|pairing| &pairing.state) {
            Some(State::Replying { handshake, .. }) => handshake.want(),
            Some(State::Asking(active)) => active.want(conn),
            Some(_) => Want::Nothing,
            None => self.listener.want(conn),
        }
    }
}

fn gid(address: IpAddr) -> Ipv6Addr {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

#[cfg(test)]
#[path = "tests/pairings.rs"]
mod tests;
