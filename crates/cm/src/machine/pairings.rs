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

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::convert::Infallible;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_llp::carrier::Close;
use uwarp_llp::udp::Route;
use uwarp_proto::datagram;
use uwarp_proto::setup::{
    AcceptParams, Depths, InitiatorConfig, Negotiated, PeerData, RTR_STAG_TO, Rejection, Request,
    ResponderPolicy, Revision, Rtr,
};
use uwarp_rnic::ah::port_of;
use uwarp_rnic::qp::{Now, Psns};
use uwarp_wire::datagram::proof::Proof as ProofDatagram;
use uwarp_wire::introduction::{self, Cookie, Half, Introduction, TurnedAway};

use super::active::{self, Active};
use super::budget::{Budget, Place};
use super::handshake::{Event, Handshake};
use super::listener::{self, Listener, MAX_BACKLOG};
use super::proof::{self, Proof};
use super::silence::{self, Heard, Versions, Whose, Words};
use super::{
    Action, ConnKey, Ends, Input, Machine, Recipient, Space, StreamEvent, Transmit, Want, earlier, is_over,
};
use crate::event::ConnParam;
use crate::timeouts::{RETRIES, Timeouts};

/// The two addresses of a queue pair's stream; ports do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// An address of this host.
    pub local: SocketAddr,
    /// The peer's.
    pub peer: SocketAddr,
}

/// The pause before a connector tries again; each further one is twice as long, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The pause before an unanswered request for a cookie is repeated; it grows in the same way.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// A cookie that is nearly too old is not shown.
const FRESH: Duration = Duration::from_secs(proof::LIFE.as_secs() - 4);
/// Most early requests for one queue pair: more than one means a peer that began anew, or an earlier peer.
pub const MOST_EARLY_EACH: usize = 4;
/// How long an early request waits.
const EARLY_LIMIT: Duration = Duration::from_secs(30);
/// How long a peer whose PSNs do not fit is rejected unread. Twelve bits are guessed in 17 minutes then, on
/// average.
const WRONG_PSN_PAUSE: Duration = Duration::from_millis(500);
/// Cookies in a second for ports that no pairing names. (The peers of pairings do not count: a flood must not
/// keep them waiting.)
const MOST_COOKIES: u32 = 1000;
/// Datagrams that wait to be sent. What is lost is asked for again.
const MOST_DATAGRAMS: usize = 64;

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
    /// The addresses and ports that pairings name.
    named: BTreeMap<(Ipv6Addr, u16), Named>,
    /// Queue pairs that exist.
    alive: BTreeSet<u32>,
    /// In the order in which they came.
    early: VecDeque<Early>,
    /// Requests that are turned away, until the words are sent.
    leaving: BTreeMap<ConnKey, Leaving>,
    /// Cookies for others in the second that began then.
    cookies: Option<(Instant, u32)>,
    datagrams: VecDeque<(Route, [u8; ProofDatagram::LEN])>,
    /// The last one that was given out.
    sending: Option<(Route, [u8; ProofDatagram::LEN])>,
    actions: VecDeque<Action<Infallible>>,
}

/// A peer's address and port.
#[derive(Debug, Default)]
struct Named {
    /// How many pairings name it.
    pairings: usize,
    /// The log says that it has another version.
    version_said: bool,
    /// When its TCP port was last asked why its UDP port does not answer.
    asked_why: Option<Instant>,
}

impl Named {
    /// Whether the log must say that the peer has another version.
    fn say_version(&mut self) -> bool {
        !std::mem::replace(&mut self.version_said, true)
    }

    /// Whether the TCP port is asked now.
    fn may_ask_why(&mut self, now: Instant) -> bool {
        let may = !self.version_said && self.asked_why.is_none_or(|asked| now >= asked + silence::PAUSE);
        if may {
            self.asked_why = Some(now);
        }
        may
    }
}

/// The question to a peer's TCP port, why its UDP port does not answer.
#[derive(Debug)]
struct Why {
    active: Box<Active>,
    /// How many requests for a cookie had no answer then.
    unanswered: u32,
    heard: bool,
}

/// A request that is complete.
#[derive(Debug)]
struct Arrived {
    conn: ConnKey,
    introduction: Introduction,
    from: Ipv6Addr,
    /// When its cookie was made.
    proven: Instant,
    handshake: Box<Handshake>,
    place: Place,
}

#[derive(Debug)]
struct Early {
    since: Instant,
    request: Arrived,
}

#[derive(Debug)]
struct Leaving {
    handshake: Box<Handshake>,
    _place: Option<Place>,
}

/// A queue pair and the peer that its program has named.
#[derive(Debug)]
struct Pairing {
    moves: u32,
    path: Path,
    peer: u32,
    terms: Terms,
    incarnation: u64,
    token: u64,
    /// When it was moved to RTR.
    began: Instant,
    cookie: Option<(Cookie, Instant)>,
    asked: u32,
    /// As `asked`, since the last answer.
    unanswered: u32,
    why: Option<Why>,
    /// The log has said it.
    why_said: bool,
    pauses: u32,
    rejected: bool,
    /// Requests are rejected unread until then.
    wrong_psn: Option<Instant>,
    /// This host cannot do what it needs.
    refused: Option<Errno>,
    state: State,
}

/// | state | event | → | actions |
/// |-|-|-|-|
/// | – | begin: smaller | Waiting | Listen once a port; early ones with older cookies are rejected |
/// | – | begin: larger | AwaitCookie | ask for a cookie (UDP) |
/// | – | begin: itself | Joining | Connect to itself; Opened: Attach |
/// | Joining | Failed | Paused | – |
/// | AwaitCookie | cookie with our token | Asking | `Active`, introduction with the cookie |
/// | AwaitCookie | 50 ms·2ⁿ ≤ 500 | AwaitCookie | ask again |
/// | Asking | Accepted; numbers, incarnation, halves of the PSNs fit | Attaching | Attach |
/// | Asking | Accepted, unfit; Failed | Paused | Close; 20 ms·2ⁿ ≤ 500 |
/// | Asking | Rejected, first; later | AwaitCookie; Paused | Close; ask again; as above |
/// | Paused | limit | Asking; without a fresh cookie AwaitCookie; itself Joining | – |
/// | Waiting | request: proven since this move; address, numbers, halves fit | Replying | accept |
/// | Waiting | unfit request | Waiting | reject |
/// | Replying | Replied / failed | Attaching / Waiting | Attach / next early one |
/// | Attaching | Attached / Refused: it has failed | Attached / over | – / Close |
/// | Attached | Used | Up | – |
/// | Attached | Ended | Waiting, Paused | – |
/// | Up | Ended | over | – |
/// | any | end, forget | – | Close; forget: reject early ones |
///
/// The limit of the first FPDU is the queue pair's ([`uwarp_rnic::qp::RcCore`]): it ends the stream.
#[derive(Debug)]
enum State {
    Waiting,
    Replying { conn: ConnKey, handshake: Box<Handshake>, said: Box<Negotiated>, _place: Place },
    AwaitCookie { again: Instant },
    Asking(Box<Active>),
    Paused { until: Instant },
    Joining { conn: ConnKey },
    Attaching { conn: ConnKey },
    Attached { conn: ConnKey },
    Up { conn: ConnKey },
    Over,
}

impl State {
    /// The connection that a queue pair has, or is about to get.
    fn stream(&self) -> Option<ConnKey> {
        match self {
            Self::Attaching { conn } | Self::Attached { conn } | Self::Up { conn } => Some(*conn),
            _ => None,
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Waiting => "Waiting",
            Self::Replying { .. } => "Replying",
            Self::AwaitCookie { .. } => "AwaitCookie",
            Self::Asking(_) => "Asking",
            Self::Paused { .. } => "Paused",
            Self::Joining { .. } => "Joining",
            Self::Attaching { .. } => "Attaching",
            Self::Attached { .. } => "Attached",
            Self::Up { .. } => "Up",
            Self::Over => "Over",
        }
    }

    fn names(&self, conn: ConnKey) -> bool {
        match self {
            Self::Replying { conn: own, .. } | Self::Joining { conn: own } => *own == conn,
            Self::Asking(active) => active.space() == conn.space(),
            other => other.stream() == Some(conn),
        }
    }
}

impl Pairing {
    /// Less: this end listens; greater: it connects; equal: the queue pair is its own peer.
    fn role(&self, qpn: u32) -> Ordering {
        (gid(self.path.local.ip()), qpn).cmp(&(gid(self.path.peer.ip()), self.peer))
    }

    /// The peer's address and port.
    fn names_peer(&self) -> (Ipv6Addr, u16) {
        (gid(self.path.peer.ip()), port_of(self.peer))
    }

    fn has(&self, conn: ConnKey) -> bool {
        self.asks_why_on(conn) || self.state.names(conn)
    }

    fn asks_why_on(&self, conn: ConnKey) -> bool {
        self.why.as_ref().is_some_and(|why| why.active.space() == conn.space())
    }

    fn is_peer(&self, address: IpAddr, port: u16) -> bool {
        self.names_peer() == (gid(address), port)
    }

    /// Whether this request is the peer's, for the present move.
    fn check(&mut self, now: &Now, qpn: u32, request: &Arrived) -> Result<(), TurnedAway> {
        let said = &request.introduction;
        let is_peers = (said.source_qpn, said.destination_qpn) == (self.peer, qpn)
            && request.from == gid(self.path.peer.ip())
            && self.role(qpn) == Ordering::Less;
        if !is_peers {
            Err(TurnedAway::AnotherPeer)
        } else if request.proven <= self.began {
            Err(TurnedAway::Stale)
        } else if self.wrong_psn.is_some_and(|until| now.get() < until) {
            Err(TurnedAway::Psn)
        } else {
            self.check_psns(now, qpn, Half::Lower, said)
        }
    }

    fn check_psns(
        &mut self,
        now: &Now,
        qpn: u32,
        half: Half,
        shown: &Introduction,
    ) -> Result<(), TurnedAway> {
        match fit(&self.terms.psns, half, shown) {
            Some(true) => Ok(()),
            // It comes back when one end has been moved to RTS.
            None => Err(TurnedAway::Psn),
            Some(false) => {
                let Psns { expects, begins } = self.terms.psns;
                tracing::warn!(
                    qpn = %format_args!("{qpn:#x}"),
                    "refused: queue pair {:#x} at {} shows other packet sequence numbers than the program \
                     has set here (rq_psn {}, sq_psn {}); over InfiniBand nothing would arrive",
                    self.peer,
                    self.path.peer.ip().to_canonical(),
                    hex(expects),
                    hex(begins),
                );
                self.wrong_psn = Some(now.get() + WRONG_PSN_PAUSE);
                Err(TurnedAway::Psn)
            }
        }
    }

    /// Whether the reply comes from the queue pair that was asked.
    fn is_answer(&mut self, now: &Now, qpn: u32, reply: &[u8]) -> bool {
        let Some(reply) = Introduction::parse(reply) else { return false };
        let expected = (self.peer, qpn, self.incarnation);
        (reply.source_qpn, reply.destination_qpn, reply.incarnation) == expected
            && self.check_psns(now, qpn, Half::Upper, &reply).is_ok()
    }

    fn introduction(&self, qpn: u32, half: Half, incarnation: u64, cookie: Cookie) -> Introduction {
        let psns = &self.terms.psns;
        let [expects, begins] = [psns.expects, psns.begins].map(|psn| psn.map(|psn| half.of(psn)));
        Introduction { source_qpn: qpn, destination_qpn: self.peer, expects, begins, incarnation, cookie }
    }

    fn peer_data(&self, qpn: u32) -> PeerData {
        let Terms { rnr_retry, min_rnr_timer, placement_acks, .. } = self.terms;
        let rnr_retry = rnr_retry.unwrap_or(RETRIES).min(RETRIES);
        PeerData { placement_acks, rnr_retry, min_rnr_timer, qpn, ..PeerData::new() }
    }

    /// What the program said, as rdma_cm would have it. The peer says how long its Sends may wait.
    fn conn_param(&self, said: &Negotiated) -> ConnParam {
        let rnr_retry_count = said.peer.map_or(RETRIES, |peer| peer.rnr_retry);
        ConnParam { retry_count: self.terms.retry_cnt, rnr_retry_count, ..ConnParam::NONE }
    }

    fn deadline(&self) -> Option<Instant> {
        earlier(self.deadline_of_state(), self.why.as_ref().and_then(|why| why.active.poll_timeout()))
    }

    fn deadline_of_state(&self) -> Option<Instant> {
        match &self.state {
            State::Replying { handshake, .. } => handshake.poll_timeout(),
            State::AwaitCookie { again } => Some(*again),
            State::Asking(active) => active.poll_timeout(),
            State::Paused { until } => Some(*until),
            _ => None,
        }
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
            named: BTreeMap::new(),
            alive: BTreeSet::new(),
            early: VecDeque::new(),
            leaving: BTreeMap::new(),
            cookies: None,
            datagrams: VecDeque::new(),
            sending: None,
            actions: VecDeque::new(),
            settings,
        }
    }

    /// The queue pairs that exist now.
    pub fn set_alive(&mut self, alive: impl IntoIterator<Item = u32>) {
        self.alive = alive.into_iter().collect();
    }

    /// A queue pair with this number exists from now on, or no longer; in that case see [`Self::forget`].
    pub fn alive(&mut self, qpn: u32, is_alive: bool) {
        if is_alive {
            self.alive.insert(qpn);
        } else {
            self.alive.remove(&qpn);
        }
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
            pauses: 0,
            rejected: false,
            wrong_psn: None,
            refused: None,
            state: State::Waiting,
        };
        let role = pairing.role(qpn);
        self.named.entry(pairing.names_peer()).or_default().pairings += 1;
        self.pairs.insert(qpn, pairing);
        match role {
            Ordering::Less => {
                self.listen();
                self.serve(now, qpn);
            }
            Ordering::Equal => self.join_itself(qpn),
            Ordering::Greater => self.ask(now, qpn),
        }
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

    /// What this host has refused of what a queue pair needs; it waits in vain.
    pub fn refused(&self, qpn: u32) -> Option<Errno> {
        self.pairs.get(&qpn)?.refused
    }

    /// The connecting ends that are about to do something, with the move that each is for. Their queue pairs
    /// may have failed since, on their own.
    pub fn due(&self, now: &Now) -> Vec<(u32, u32)> {
        let due = self.pairs.iter().filter(|(_, pairing)| is_over(pairing.deadline(), now));
        due.map(|(qpn, pairing)| (*qpn, pairing.moves)).collect()
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
        for early in self.take_early(|early| early.request.introduction.destination_qpn == qpn) {
            self.reject(now, early.request, TurnedAway::NoQueuePair);
        }
    }

    /// What is held of others: early requests, and those that are being turned away.
    pub fn held(&self) -> usize {
        self.early.len() + self.leaving.len()
    }

    /// The early requests: the queue pair that each is for, the one that it comes from, and its address.
    pub fn early(&self) -> impl Iterator<Item = (u32, u32, Ipv6Addr)> + '_ {
        self.early.iter().map(|Early { request, .. }| {
            (request.introduction.destination_qpn, request.introduction.source_qpn, request.from)
        })
    }

    /// The state of each pairing, and its deadline.
    pub fn phases(&self) -> impl Iterator<Item = (u32, &'static str, Option<Instant>)> + '_ {
        self.pairs.iter().map(|(qpn, pairing)| (*qpn, pairing.state.name(), pairing.deadline()))
    }

    fn space(&mut self) -> Space {
        self.spaces += 1;
        Space::new(self.spaces)
    }

    fn close(&mut self, conn: ConnKey, how: Close) {
        self.actions.push_back(Action::Close { conn, how });
    }

    fn take_early(&mut self, which: impl Fn(&Early) -> bool) -> Vec<Early> {
        let (taken, left): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.early).into_iter().partition(which);
        self.early = left;
        taken.into()
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

    /// A request is complete.
    fn requested(
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
                    Some(_) if !self.alive.contains(&introduction.destination_qpn) => TurnedAway::NoQueuePair,
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

    fn admit(&mut self, now: &Now, request: Arrived) {
        let qpn = request.introduction.destination_qpn;
        if let Some(pairing) = self.pairs.get_mut(&qpn).filter(|p| matches!(p.state, State::Waiting)) {
            match pairing.check(now, qpn, &request) {
                Ok(()) => self.accept(now, qpn, request),
                Err(why) => self.reject(now, request, why),
            }
            return;
        }
        // It says that its peer waits. A newer one of the same peer takes its place.
        let peer = |request: &Arrived| (request.from, request.introduction.source_qpn, qpn);
        let is_for = |early: &Early| early.request.introduction.destination_qpn == qpn;
        let same = self.take_early(|early| is_for(early) && peer(&early.request) == peer(&request));
        for early in same {
            self.reject(now, early.request, TurnedAway::Crowded);
        }
        if self.early.iter().filter(|early| is_for(early)).count() >= MOST_EARLY_EACH
            && let Some(first) = self.early.iter().position(is_for)
            && let Some(early) = self.early.remove(first)
        {
            self.reject(now, early.request, TurnedAway::Crowded);
        }
        self.early.push_back(Early { since: now.get(), request });
    }

    /// Gives a queue pair that waits the request that waits for it, the last one if there are several, and
    /// turns the others away.
    fn serve(&mut self, now: &Now, qpn: u32) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        if !matches!(pairing.state, State::Waiting) {
            return;
        }
        let mut fitting: Option<Arrived> = None;
        for early in self.take_early(|early| early.request.introduction.destination_qpn == qpn) {
            let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
            match pairing.check(now, qpn, &early.request) {
                Ok(()) => {
                    if let Some(older) = fitting.replace(early.request) {
                        self.reject(now, older, TurnedAway::Crowded);
                    }
                }
                Err(why) => self.reject(now, early.request, why),
            }
        }
        if let Some(request) = fitting {
            self.accept(now, qpn, request);
        }
    }

    fn accept(&mut self, now: &Now, qpn: u32, request: Arrived) {
        let Arrived { conn, introduction, mut handshake, place, .. } = request;
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let max_ird = self.settings.policy.max_ird;
        let params =
            AcceptParams { depths: Depths::negotiated(max_ird, max_ird), peer: pairing.peer_data(qpn) };
        let reply = pairing.introduction(qpn, Half::Upper, introduction.incarnation, Cookie::NONE).to_bytes();
        match handshake.accept(now, params, &reply) {
            Ok(said) => {
                pairing.state = State::Replying { conn, handshake, said: Box::new(said), _place: place };
            }
            Err(error) => {
                tracing::debug!("cannot accept: {error}");
                self.close(conn, Close::Finish);
            }
        }
    }

    /// A queue pair asks for a cookie.
    fn answer(&mut self, now: &Now, from: SocketAddr, to: IpAddr, request: &ProofDatagram) {
        let named = self.pairs.values().any(|pairing| pairing.is_peer(from.ip(), from.port()));
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

    fn may_answer(&mut self, now: &Now) -> bool {
        let (since, count) = match self.cookies {
            Some((since, count)) if now.get() < since + Duration::from_secs(1) => (since, count),
            _ => (now.get(), 0),
        };
        self.cookies = Some((since, (count + 1).min(MOST_COOKIES)));
        count < MOST_COOKIES
    }

    fn send(&mut self, route: Route, proof: &ProofDatagram) {
        if self.datagrams.len() < MOST_DATAGRAMS {
            self.datagrams.push_back((route, proof.to_bytes()));
        }
    }

    // --- The connecting end.

    fn ask(&mut self, now: &Now, qpn: u32) {
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

    fn has_cookie(&mut self, now: &Now, from: SocketAddr, reply: &ProofDatagram, cookie: Cookie) {
        let qpn = reply.destination_qpn;
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let is_answer = matches!(pairing.state, State::AwaitCookie { .. })
            && (reply.source_qpn, reply.token) == (pairing.peer, pairing.token)
            && pairing.is_peer(from.ip(), from.port());
        if is_answer {
            pairing.cookie = Some((cookie, now.get()));
            (pairing.unanswered, pairing.why_said) = (0, false);
            self.end_why(qpn);
            self.connect(now, qpn);
        }
    }

    fn connect(&mut self, now: &Now, qpn: u32) {
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
                pairing.state = State::Asking(Box::new(active));
                self.connecting(now, qpn);
            }
            Err(_) => self.pause(now, qpn),
        }
    }

    fn pause(&mut self, now: &Now, qpn: u32) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let pause = (FIRST_PAUSE * (1 << pairing.pauses.min(10))).min(LONGEST_PAUSE);
        pairing.pauses += 1;
        pairing.state = State::Paused { until: now.get() + pause };
    }

    /// Rejected: the next request needs a new cookie. The first time it comes at once, since the peer may
    /// have been moved to RTR just now.
    fn rejected(&mut self, now: &Now, qpn: u32, rejection: &Rejection) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let first = !std::mem::replace(&mut pairing.rejected, true);
        pairing.cookie = None;
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

    // --- Why a peer does not answer, for the log.

    /// A request has another version. Its sender tries again for as long as its program waits: the log says
    /// so once, and only of a peer that a queue pair waits for. Strangers cannot fill it.
    fn say_version_of(&mut self, peer: SocketAddr, theirs: u8, request: &[u8]) {
        let Some(qpn) = introduction::source_qpn(request) else { return };
        let at = peer.ip().to_canonical();
        if self.named.get_mut(&(gid(at), port_of(qpn))).is_some_and(Named::say_version) {
            tracing::warn!("refused: a request of queue pair {qpn:#x} at {at}: {}", Versions(theirs));
        } else {
            tracing::debug!("refused: a request of queue pair {qpn:#x} at {at} has version {theirs}");
        }
    }

    /// The UDP port does not answer: asks the TCP port why.
    fn ask_why(&mut self, now: &Now, qpn: u32, unanswered: u32) {
        if self.end_why(qpn).is_some_and(|before| !before.heard) {
            return self.say(qpn, Heard::Nothing, unanswered);
        }
        let names = self.space();
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let named = self.named.get_mut(&pairing.names_peer());
        if pairing.why_said || !named.is_some_and(|named| named.may_ask_why(now.get())) {
            return;
        }
        // Nothing that only the two ends know.
        let introduction = Introduction {
            source_qpn: qpn,
            destination_qpn: pairing.peer,
            expects: None,
            begins: None,
            incarnation: 0,
            cookie: Cookie::NONE,
        };
        let mut peer = pairing.path.peer;
        peer.set_port(port_of(pairing.peer));
        let target = active::Target {
            local: Some(pairing.path.local),
            peer,
            config: self.settings.request(qpn, pairing),
            private_data: introduction.to_bytes().to_vec(),
            fall_back: false,
        };
        if let Ok(active) = Active::start(now, names, self.settings.timeouts, target) {
            pairing.why = Some(Why { active: Box::new(active), unanswered, heard: false });
            self.hear_why(qpn);
        }
    }

    /// Takes what the TCP port says. Whatever it is, it only chooses the words: no answer connects a queue
    /// pair.
    fn hear_why(&mut self, qpn: u32) {
        while let Some(why) = self.pairs.get_mut(&qpn).and_then(|pairing| pairing.why.as_mut())
            && let Some(action) = why.active.poll_action()
        {
            match action.pass() {
                Ok(action) => self.actions.push_back(action),
                Err(active::Report::ConnectingFrom(_)) => {}
                Err(report) => {
                    why.heard = true;
                    let unanswered = why.unanswered;
                    if let active::Report::Accepted { conn, .. } = report {
                        self.close(conn, Close::Finish);
                    }
                    self.say(qpn, Heard::from(&report), unanswered);
                }
            }
        }
    }

    fn end_why(&mut self, qpn: u32) -> Option<Why> {
        let mut why = self.pairs.get_mut(&qpn)?.why.take()?;
        why.active.cancel();
        while let Some(action) = why.active.poll_action() {
            self.actions.extend(action.pass().ok());
        }
        Some(why)
    }

    fn say(&mut self, qpn: u32, heard: Heard, unanswered: u32) {
        if unanswered >= heard.said_after()
            && self.may_say(qpn, heard.is_definite())
            && let Some(pairing) = self.pairs.get(&qpn)
        {
            let whose = Whose { peer: pairing.peer, at: pairing.path.peer.ip().to_canonical() };
            tracing::warn!(qpn = %format_args!("{qpn:#x}"), "{}", Words(whose, heard));
        }
    }

    /// Whether the log may say why the peer does not answer. Of its version it speaks once.
    fn may_say(&mut self, qpn: u32, version: bool) -> bool {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return false };
        let named = self.named.get_mut(&pairing.names_peer());
        let may = named.is_some_and(|named| if version { named.say_version() } else { !named.version_said });
        pairing.why_said |= may;
        may
    }

    // --- The attempt to connect.

    /// Takes what the attempt to connect reports.
    fn connecting(&mut self, now: &Now, qpn: u32) {
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
                    self.rest_of_attempt(qpn);
                    self.pause(now, qpn);
                }
            }
        }
    }

    /// What an attempt that is over still has to do.
    fn rest_of_attempt(&mut self, qpn: u32) {
        if let Some(Pairing { state: State::Asking(active), .. }) = self.pairs.get_mut(&qpn) {
            while let Some(action) = active.poll_action() {
                self.actions.extend(action.pass().ok());
            }
        }
    }

    // --- The stream.

    fn attach(&mut self, qpn: u32, conn: ConnKey, said: Box<Negotiated>) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let (to, param) = (Recipient::Number { qpn, moves: pairing.moves }, pairing.conn_param(&said));
        pairing.state = State::Attaching { conn };
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

    /// The pairing that this connection belongs to.
    fn owner(&self, conn: ConnKey) -> Option<u32> {
        self.pairs.iter().find(|(_, pairing)| pairing.has(conn)).map(|(qpn, _)| *qpn)
    }

    fn handle_pairs_input(&mut self, now: &Now, qpn: u32, conn: ConnKey, input: Input<'_>) {
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
                    tracing::warn!(qpn, "cannot connect the queue pair with itself: {}", why.errno());
                    pairing.refused = Some(why.errno());
                    self.pause(now, qpn);
                }
                _ => {}
            },
            _ => {}
        }
    }

    fn replying(&mut self, now: &Now, qpn: u32, event: Option<Event>, open: bool) {
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
            rtr_stag_to: RTR_STAG_TO,
            private_data: Vec::new(),
        })
    }

    /// Takes what the listener reports, and makes room for the connections that it has to turn down.
    fn listening(&mut self, now: &Now) {
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
            match self.listener.is_starved().then(|| self.early.pop_front()).flatten() {
                Some(early) => {
                    let Early { request: Arrived { conn, mut handshake, place, .. }, .. } = early;
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
                    return self.listening(now);
                }
                let hung_up = matches!(input, Input::End { .. } | Input::Failed { .. });
                let early =
                    conn.and_then(|conn| self.early.iter().position(|early| early.request.conn == conn));
                if let (Some(conn), Some(at)) = (conn, early) {
                    if hung_up {
                        self.early.remove(at);
                        if matches!(input, Input::End { .. }) {
                            self.close(conn, Close::Finish);
                        }
                    }
                } else if let Some((qpn, conn)) = conn.and_then(|conn| Some((self.owner(conn)?, conn))) {
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
    }

    fn handle_timeout(&mut self, now: &Now) {
        if is_over(self.listen_again, now) {
            self.listen_again = None;
            if self.has_listeners() {
                self.listen();
            }
        }
        while self.early.front().is_some_and(|early| early.since + EARLY_LIMIT <= now.get()) {
            if let Some(early) = self.early.pop_front() {
                self.reject(now, early.request, TurnedAway::Crowded);
            }
        }
        let late = |(_, leaving): &(&ConnKey, &Leaving)| is_over(leaving.handshake.poll_timeout(), now);
        let late: Vec<ConnKey> = self.leaving.iter().filter(late).map(|(conn, _)| *conn).collect();
        for conn in late {
            self.leaving.remove(&conn);
            self.close(conn, Close::Finish);
        }
        let due = |(_, pairing): &(&u32, &Pairing)| is_over(pairing.deadline(), now);
        let due: Vec<u32> = self.pairs.iter().filter(due).map(|(qpn, _)| *qpn).collect();
        for qpn in due {
            let Some(pairing) = self.pairs.get_mut(&qpn) else { continue };
            if let Some(why) = &mut pairing.why {
                why.active.handle_timeout(now);
                self.hear_why(qpn);
            }
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
        self.pairs.values_mut().find_map(|pairing| match &mut pairing.state {
            State::Replying { conn, handshake, .. } => {
                Some(Transmit::Bytes { conn: *conn, bytes: handshake.poll_transmit()? })
            }
            State::Asking(active) => active.poll_transmit(),
            _ => pairing.why.as_mut()?.active.poll_transmit(),
        })
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let pairs = self.pairs.values().filter_map(Pairing::deadline).min();
        let early = self.early.front().map(|early| early.since + EARLY_LIMIT);
        let leaving = self.leaving.values().filter_map(|leaving| leaving.handshake.poll_timeout()).min();
        let own = earlier(earlier(pairs, early), earlier(leaving, self.listen_again));
        earlier(own, self.listener.poll_timeout())
    }

    fn poll_action(&mut self) -> Option<Action<Infallible>> {
        self.actions.pop_front()
    }

    fn want(&self, conn: ConnKey) -> Want {
        if self.early.iter().any(|early| early.request.conn == conn) {
            return Want::End;
        }
        if let Some(leaving) = self.leaving.get(&conn) {
            return leaving.handshake.want();
        }
        let pairing = self.owner(conn).and_then(|qpn| self.pairs.get(&qpn));
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

/// Whether what the peer shows of the packet sequence numbers fits what this end's program has set. `None`:
/// nothing is known to both.
fn fit(own: &Psns, half: Half, shown: &Introduction) -> Option<bool> {
    let pairs = [(own.begins, shown.expects), (own.expects, shown.begins)];
    let known = pairs.into_iter().filter_map(|(own, shown)| Some(half.of(own?) == shown?));
    known.reduce(|a, b| a && b)
}

fn hex(psn: Option<u32>) -> String {
    psn.map_or_else(|| "not set".into(), |psn| format!("{psn:#x}"))
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
