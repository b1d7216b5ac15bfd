//! Streams between queue pairs that know each other by address and number, without ids (docs/contracts.md,
//! "Bring-up").
//!
//! A queue pair number names a TCP and a UDP port, so an address and a number say where the peer's process
//! listens. The end with the smaller (address, number) listens, the other one connects; both send an
//! [`Introduction`]. A connector that finds no listener tries again for as long as its queue pair waits: the
//! queue pair itself limits how long work requests may wait ([`uwarp_rnic::qp::RcCore::retry_limit`]).
//!
//! ```text
//!   modify to RTR ─▶ Pairing ──┬─ larger: cookie ── Active ── Accepted ────┬─▶ driver::Qp::attach
//!                              └─ smaller: waits ─┐                        │
//!   the port ─▶ Listener ─▶ PortListener ─────────┴── accept and reply ────┘
//! ```
//!
//! # Who may speak for a queue pair
//! Numbers and addresses are public, so each end proves that it is the one that the other's program has
//! named, before anything is kept or answered ([`crate::machine::proof`], [`uwarp_wire::introduction`]):
//! - The connector shows a cookie that came to the UDP port of its number. A cookie counts only if it is
//!   younger than the listener's move to RTR: by then the listener's program has named the port's owner. An
//!   older one may be that of the port's last owner.
//! - The listener has the TCP port of its number, and returns the request's incarnation.
//! - Each end shows a half of each packet sequence number that it knows, the other end the other half. What
//!   both know must fit, and something must be known to both. So who has taken the port of a process that
//!   died cannot return what it was sent. (PSNs that everybody knows prove nothing.)
//!
//! A request with a good proof that comes before its queue pair is in RTR, or while it still has its previous
//! stream, waits here; number and time of such requests are bounded. Whatever is turned away is rejected in
//! words, and its connector asks for a new cookie.
//!
//! A stream that ends before any program has used it does not count: the peer was moved to RESET meanwhile,
//! and the queue pair waits for the next stream. (`design/bring_up.py` searches these rules exhaustively.)

#[path = "pairing/silence.rs"]
mod silence;

use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_driver::config::Config;
use uwarp_driver::{
    Alarm, Disconnect, Engine, Nic, ProofObserver, ProofPort, Qp, Readiness, Source, StreamObserver,
};
use uwarp_llp::carrier::{Bind, Options, SetUp, TakePort};
use uwarp_llp::udp::Route;
use uwarp_proto::setup::{
    AcceptParams, Depths, InitiatorConfig, Negotiated, Request, ResponderPolicy, Revision, Rtr,
};
use uwarp_rnic::VerbsError;
use uwarp_rnic::ah::port_of;
use uwarp_rnic::mr::random_u32;
use uwarp_rnic::qp::{Now, Psns, QpAttr, QpState};
use uwarp_wire::datagram::proof::Proof as ProofDatagram;
use uwarp_wire::introduction::{self, Cookie, Half, Introduction, TurnedAway};

use crate::active::{Active, Target};
use crate::carriers::carrier;
use crate::error::CmError;
use crate::event::ConnParam;
use crate::handshake::{ConnectObserver, Connected, Pending, RequestObserver};
use crate::listener::{Listener, MAX_BACKLOG, max_half_open};
use crate::machine::proof::{self, Proof};
use crate::pairing::silence::{Silence, Versions};
use crate::params::{peer_data, stream_params};
use crate::sync::{Mutex, now};
use crate::timeouts::{RETRIES, Timeouts};

/// The two addresses of a queue pair's stream; ports do not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Path {
    /// An address of this host.
    pub local: SocketAddr,
    /// The peer's.
    pub peer: SocketAddr,
}

/// The pause after a connector has found no listener; each further pause is twice as long, up to
/// [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// The pause before an unanswered request for a cookie is repeated; it grows in the same way.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// A cookie that is nearly too old is not shown.
const FRESH: Duration = Duration::from_secs(proof::LIFE.as_secs() - 4);
/// Most early requests for one queue pair: more than one means a peer that began anew, or an earlier peer.
const MOST_EARLY_EACH: usize = 4;
/// Most early requests of which a full table asks the system whether their peers have hung up. Each takes a
/// system call, with the table locked.
const MOST_LOOKS: usize = 16;
/// How long an early request waits.
const EARLY_LIMIT: Duration = Duration::from_secs(30);
/// How long a peer whose PSNs do not fit is rejected unread. Twelve bits are guessed in 17 minutes then, on
/// average.
const WRONG_PSN_PAUSE: Duration = Duration::from_millis(500);
/// Cookies in a second for ports that no pairing names. (The peers of pairings do not count: a flood must not
/// keep them waiting.)
const MOST_COOKIES: u32 = 1000;

/// All pairings of a process.
pub(crate) struct Pairings {
    me: Weak<Self>,
    nic: Arc<Nic>,
    timeouts: Timeouts,
    policy: ResponderPolicy,
    /// Makes cookies once a queue pair is brought up by number.
    proof: Mutex<Option<Arc<Proof>>>,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// By the number of our queue pair.
    pairings: HashMap<u32, Arc<Pairing>>,
    /// The addresses and ports that pairings name.
    named: HashMap<(Ipv6Addr, u16), Named>,
    /// How many pairings there were when those of destroyed queue pairs were last removed.
    swept: usize,
    /// By port.
    ports: HashMap<u16, Arc<PortListener>>,
    /// The UDP sockets of ports that have pairings.
    proof_ports: HashMap<u16, Arc<ProofPort>>,
    /// Cookies for others in the second that began then.
    cookies: Option<(Instant, u32)>,
    /// In the order in which they came.
    early: VecDeque<Early>,
    /// Which of them [`Table::take_some_hung_up`] looks at next.
    turn: usize,
    /// How often the system was asked whether the peer of one of them has hung up.
    looks: usize,
    /// Runs until the oldest early request must be dropped.
    timer: Option<Alarm>,
}

/// A peer's address and port.
#[derive(Default)]
struct Named {
    /// How many pairings name it.
    pairings: usize,
    /// The log says that it has another version.
    version_said: bool,
    /// When its TCP port was last asked why its UDP port does not answer.
    asked_why: Option<Instant>,
}

/// A request with a good proof whose queue pair is not in RTR.
struct Early {
    since: Instant,
    introduction: Introduction,
    /// The address that it comes from.
    from: Ipv6Addr,
    /// When its cookie was made.
    proven: Instant,
    pending: Pending,
}

/// Requests that are turned away once no lock is held.
type Rejects = Vec<(Early, TurnedAway)>;

fn reject_all(rejects: Rejects) {
    for (early, why) in rejects {
        tracing::debug!(introduction = ?early.introduction, "turned away: {why}");
        early.pending.reject(&why.to_bytes());
    }
}

impl Early {
    fn is_for(&self, qpn: u32) -> bool {
        self.introduction.destination_qpn == qpn
    }

    fn is_over(&self, now: Instant) -> bool {
        now > self.since + EARLY_LIMIT
    }

    fn is_of_same_peer(&self, other: &Self) -> bool {
        let peer =
            |early: &Self| (early.from, early.introduction.source_qpn, early.introduction.destination_qpn);
        peer(self) == peer(other)
    }

    /// Asks the system whether the peer has hung up. Checking all waiting requests each time that one comes
    /// or goes would be most of the work.
    fn hung_up(&self) -> bool {
        self.pending.connection.ended()
    }
}

impl Pairings {
    pub fn new(nic: &Arc<Nic>, timeouts: Timeouts, policy: ResponderPolicy) -> Arc<Self> {
        // Both ends are uwarp: there is no older revision to speak.
        let policy = ResponderPolicy { max_revision: Revision::Two, ..policy };
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            nic: Arc::clone(nic),
            timeouts,
            policy,
            proof: Mutex::default(),
            table: Mutex::default(),
        })
    }

    /// Joins a queue pair, which is in RTR and waits for its stream, with queue pair `peer` at the other end
    /// of the path.
    pub fn begin(&self, qp: &Arc<Qp>, path: Path, peer: u32) -> Result<(), CmError> {
        let Some((.., moves)) = qp.awaits_stream() else { return Ok(()) };
        let [incarnation, token] = [random_u64()?, random_u64()?];
        self.make_proof()?;
        let pairing = Arc::new_cyclic(|me| Pairing {
            me: Weak::clone(me),
            pairings: Weak::clone(&self.me),
            nic: Arc::clone(&self.nic),
            timeouts: self.timeouts,
            max_ird: self.policy.max_ird,
            qp: Arc::downgrade(qp),
            moves,
            began: now(),
            source_qpn: qp.qpn(),
            destination_qpn: peer,
            incarnation,
            token,
            path,
            attempt: Mutex::default(),
        });
        match pairing.role() {
            Ordering::Less => self.listen(qp, &pairing),
            Ordering::Equal => pairing.join_itself(),
            Ordering::Greater => {
                self.serve_proofs(qp.qpn())?;
                self.table.lock().insert(qp.qpn(), &pairing);
                pairing.ask();
                Ok(())
            }
        }
    }

    /// The queue pair is in RESET or ERR: everything that was begun for it is cancelled.
    pub fn end(&self, qpn: u32) {
        let pairing = self.table.lock().remove(qpn);
        if let Some(pairing) = pairing {
            pairing.cancel();
        }
    }

    /// The queue pair is destroyed.
    pub fn forget(&self, qpn: u32) {
        let (pairing, early) = {
            let mut table = self.table.lock();
            (table.remove(qpn), table.take_early(|early| early.is_for(qpn)))
        };
        if let Some(pairing) = pairing {
            pairing.cancel();
        }
        reject_all(early.into_iter().map(|early| (early, TurnedAway::NoQueuePair)).collect());
    }

    fn listen(&self, qp: &Arc<Qp>, pairing: &Arc<Pairing>) -> Result<(), CmError> {
        self.listen_on_port(qp)?;
        self.serve_proofs(qp.qpn())?;
        self.table.lock().insert(qp.qpn(), pairing);
        self.serve(pairing);
        Ok(())
    }

    /// Gives a queue pair that waits for its stream the request that waits for it, the last one if there are
    /// several, and turns the others away.
    fn serve(&self, pairing: &Pairing) {
        loop {
            let Some((_, psns)) = pairing.waiting() else { return };
            let now = now();
            let (fitting, rejects) = {
                let mut table = self.table.lock();
                let mut rejects = table.take_over(now);
                table.take_hung_up(pairing.source_qpn);
                let mut fitting = None;
                for early in table.take_early(|early| early.is_for(pairing.source_qpn)) {
                    match pairing.check(now, &psns, &early) {
                        Ok(()) => {
                            rejects.extend(fitting.replace(early).map(|old| (old, TurnedAway::Crowded)))
                        }
                        Err(why) => rejects.push((early, why)),
                    }
                }
                (fitting, rejects)
            };
            reject_all(rejects);
            let Some(Early { introduction, pending, .. }) = fitting else { return };
            if pairing.accept(&introduction, pending) {
                return;
            }
        }
    }

    /// Makes the port of this queue pair's number accept connections.
    fn listen_on_port(&self, qp: &Arc<Qp>) -> Result<(), CmError> {
        let port = port_of(qp.qpn());
        // Locked while it is created, so that two threads do not both create it. A listener accepts no
        // connection within `start`.
        let mut table = self.table.lock();
        if table.ports.contains_key(&port) {
            return Ok(());
        }
        let bound = self.nic.take_stream_socket(qp.qpn()).ok_or(Errno::MFILE)?;
        let new = Arc::new(PortListener { pairings: Weak::clone(&self.me), listener: Mutex::default() });
        // Locked meanwhile: a request that arrives at once must find the listener, or its place in the
        // backlog is never free again.
        let mut slot = new.listener.lock();
        let observer: Weak<PortListener> = Arc::downgrade(&new);
        let engine = self.nic.engine();
        match Listener::start(engine, self.timeouts, self.policy, observer, bound, MAX_BACKLOG) {
            Ok(listener) => *slot = Some(listener),
            Err((errno, bound)) => {
                if let Some(bound) = bound {
                    self.nic.return_stream_socket(qp.qpn(), bound);
                }
                return Err(errno.into());
            }
        }
        drop(slot);
        table.ports.insert(port, new);
        Ok(())
    }

    /// Makes the UDP port of this number ask for cookies, and answer.
    fn serve_proofs(&self, qpn: u32) -> Result<(), CmError> {
        if self.proof_port(qpn).is_some() {
            return Ok(());
        }
        let me: Weak<Self> = Weak::clone(&self.me);
        let port = Arc::new(self.nic.serve_proofs(qpn, me)?);
        self.table.lock().proof_ports.entry(port_of(qpn)).or_insert(port);
        Ok(())
    }

    fn proof_port(&self, qpn: u32) -> Option<Arc<ProofPort>> {
        self.table.lock().proof_ports.get(&port_of(qpn)).cloned()
    }

    fn make_proof(&self) -> Result<(), CmError> {
        let mut proof = self.proof.lock();
        if proof.is_none() {
            let mut key = [0; 16];
            for part in key.chunks_exact_mut(8) {
                part.copy_from_slice(&random_u64()?.to_ne_bytes());
            }
            *proof = Some(Arc::new(Proof::new(&Now::at(now()), &key)));
        }
        Ok(())
    }

    /// A request has arrived at a port.
    fn requested(&self, pending: Pending, request: &Request) {
        let peer = pending.ends.peer;
        let Some(introduction) = Introduction::parse(&request.private_data) else {
            return match introduction::version(&request.private_data) {
                Some(theirs) => {
                    self.say_version(peer, theirs, &request.private_data);
                    pending.reject(&TurnedAway::Version.to_bytes());
                }
                None => tracing::debug!(
                    %peer,
                    "refused: a connection to the port of queue pairs does not come from a queue pair"
                ),
            };
        };
        let proof = self.proof.lock().clone();
        let Some(proof) = proof else { return pending.reject(&TurnedAway::NoProof.to_bytes()) };
        // With the scope of a link-local address.
        let mut owner = peer;
        owner.set_port(port_of(introduction.source_qpn));
        let Some(proven) = proof.made(&Now::at(now()), owner, &[], introduction.cookie) else {
            tracing::debug!(%peer, ?introduction, "turned away: {}", TurnedAway::NoProof);
            return pending.reject(&TurnedAway::NoProof.to_bytes());
        };
        let qpn = introduction.destination_qpn;
        if self.nic.queue_pair(qpn).is_none() {
            return pending.reject(&TurnedAway::NoQueuePair.to_bytes());
        }
        let known = self.known(qpn);
        let from = gid(peer.ip());
        self.admit(known.as_deref(), Early { since: now(), introduction, from, proven, pending });
    }

    /// A request has another version. Its sender tries again for as long as its program waits: the log says
    /// so once, and only of a peer that a queue pair waits for. Strangers cannot fill it.
    fn say_version(&self, peer: SocketAddr, theirs: u8, request: &[u8]) {
        let Some(qpn) = introduction::source_qpn(request) else { return };
        let at = peer.ip().to_canonical();
        let first = self.table.lock().named.get_mut(&(gid(at), port_of(qpn))).is_some_and(Named::say_version);
        if first {
            tracing::warn!("refused: a request of queue pair {qpn:#x} at {at}: {}", Versions(theirs));
        } else {
            tracing::debug!("refused: a request of queue pair {qpn:#x} at {at} has version {theirs}");
        }
    }

    /// The pairing of this queue pair, if there is one.
    fn known(&self, qpn: u32) -> Option<Arc<Pairing>> {
        self.table.lock().pairings.get(&qpn).cloned()
    }

    /// Gives a request to `known` if that waits for it. Stores it if that does not wait.
    fn admit(&self, known: Option<&Pairing>, request: Early) {
        if let Some(pairing) = known
            && let Some((_, psns)) = pairing.waiting()
        {
            if let Err(why) = pairing.check(now(), &psns, &request) {
                reject_all(vec![(request, why)]);
            } else if !pairing.accept(&request.introduction, request.pending) {
                // The peer has hung up since.
                self.serve(pairing);
            }
            return;
        }
        let qpn = request.introduction.destination_qpn;
        self.keep(request);
        // It may have been destroyed since it was found, and forgotten.
        if self.nic.queue_pair(qpn).is_none() {
            return self.forget(qpn);
        }
        // Its queue pair may have been moved to RTR since the lookup, or its previous stream may have ended.
        // Then the thread that looked for a request has not found this one.
        if let Some(pairing) = self.known(qpn) {
            self.serve(&pairing);
        }
    }

    fn keep(&self, new: Early) {
        let rejects = {
            let mut table = self.table.lock();
            let rejects = table.keep(new, max_half_open());
            if table.timer.is_none() {
                let me: Weak<Self> = Weak::clone(&self.me);
                table.timer = Some(Alarm::at(self.nic.engine(), me, now() + EARLY_LIMIT));
            }
            rejects
        };
        reject_all(rejects);
    }

    /// A queue pair asks for a cookie.
    fn answer(&self, from: SocketAddr, to: IpAddr, request: &ProofDatagram) {
        let now = now();
        if !self.table.lock().may_answer(now, (gid(from.ip()), from.port())) {
            return;
        }
        let proof = self.proof.lock().clone();
        let (Some(proof), Some(port)) = (proof, self.proof_port(request.destination_qpn)) else { return };
        let cookie = proof.make(&Now::at(now), from, &[]);
        let reply = ProofDatagram {
            source_qpn: request.destination_qpn,
            destination_qpn: request.source_qpn,
            token: request.token,
            cookie: Some(cookie),
        };
        port.send(&Route { to: from, from: Some(to) }, &reply);
    }
}

impl ProofObserver for Pairings {
    fn proof(&self, from: SocketAddr, to: IpAddr, proof: &ProofDatagram) {
        match proof.cookie {
            None => self.answer(from, to, proof),
            Some(cookie) => {
                let pairing = self.known(proof.destination_qpn);
                let asked = |pairing: &&Arc<Pairing>| {
                    let peer = (gid(pairing.path.peer.ip()), pairing.destination_qpn, pairing.token);
                    peer == (gid(from.ip()), proof.source_qpn, proof.token)
                };
                if let Some(pairing) = pairing.as_ref().filter(asked) {
                    pairing.has_cookie(cookie);
                }
            }
        }
    }
}

/// Early requests whose time is over.
impl Source for Pairings {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        let mut table = self.table.lock();
        let now = now();
        let rejects = table.take_over(now);
        table.take_some_hung_up();
        table.turn += 1;
        if table.early.is_empty() {
            table.timer = None;
        } else if let Some(timer) = &mut table.timer {
            timer.set(now + EARLY_LIMIT / 4);
        }
        drop(table);
        reject_all(rejects);
    }
}

impl Table {
    fn insert(&mut self, qpn: u32, pairing: &Arc<Pairing>) {
        if self.pairings.len() >= 2 * self.swept.max(64) {
            let dead = |(_, pairing): &(&u32, &Arc<Pairing>)| pairing.qp.strong_count() == 0;
            let dead: Vec<u32> = self.pairings.iter().filter(dead).map(|(qpn, _)| *qpn).collect();
            for qpn in dead {
                self.remove(qpn);
            }
            self.swept = self.pairings.len();
        }
        self.remove(qpn);
        self.named.entry(pairing.names()).or_default().pairings += 1;
        self.pairings.insert(qpn, Arc::clone(pairing));
    }

    fn remove(&mut self, qpn: u32) -> Option<Arc<Pairing>> {
        let pairing = self.pairings.remove(&qpn)?;
        let names = pairing.names();
        if let Some(named) = self.named.get_mut(&names) {
            named.pairings -= 1;
            if named.pairings == 0 {
                self.named.remove(&names);
            }
        }
        Some(pairing)
    }

    /// Whether this address and port get a cookie now.
    fn may_answer(&mut self, now: Instant, peer: (Ipv6Addr, u16)) -> bool {
        if self.named.contains_key(&peer) {
            return true;
        }
        let (since, count) = self.cookies.unwrap_or((now, 0));
        let count = if now >= since + Duration::from_secs(1) { 0 } else { count };
        self.cookies = Some((if count == 0 { now } else { since }, (count + 1).min(MOST_COOKIES)));
        count < MOST_COOKIES
    }

    /// Stores a request that came early, one of `most` that wait. Returns those that have to make room.
    fn keep(&mut self, new: Early, most: usize) -> Rejects {
        let qpn = new.introduction.destination_qpn;
        let mut rejects = self.take_over(new.since);
        self.take_hung_up(qpn);
        // The peer has begun anew.
        let same = self.take_early(|early| early.is_of_same_peer(&new));
        rejects.extend(same.into_iter().map(|early| (early, TurnedAway::Crowded)));
        let mut room = None;
        if self.early.iter().filter(|early| early.is_for(qpn)).count() >= MOST_EARLY_EACH {
            let first = self.early.iter().position(|early| early.is_for(qpn));
            room = first.and_then(|first| self.early.remove(first));
        } else if self.early.len() >= most {
            self.take_some_hung_up();
            if self.early.len() < most {
                self.turn += 1;
            } else {
                // The others move up by one, so that the same places hold those whose turn is next.
                room = self.early.pop_front();
            }
        }
        rejects.extend(room.map(|early| (early, TurnedAway::Crowded)));
        self.early.push_back(new);
        rejects
    }

    /// Removes requests, in their order.
    fn take_early(&mut self, mut which: impl FnMut(&Early) -> bool) -> Vec<Early> {
        let mut taken = Vec::new();
        if self.early.iter().any(&mut which) {
            for early in std::mem::take(&mut self.early) {
                if which(&early) {
                    taken.push(early);
                } else {
                    self.early.push_back(early);
                }
            }
        }
        taken
    }

    /// Takes the requests whose time is over; they are the first ones.
    fn take_over(&mut self, now: Instant) -> Rejects {
        let mut rejects = Vec::new();
        while self.early.front().is_some_and(|early| early.is_over(now)) {
            rejects.extend(self.early.pop_front().map(|early| (early, TurnedAway::Crowded)));
        }
        rejects
    }

    /// Looks at [`MOST_LOOKS`] requests at most and drops those whose peers have hung up. They are spread
    /// over the table: a peer that opens and closes connections leaves its requests side by side, and some
    /// of those are found before one that is alive has to go. With each `turn` it looks at the next ones.
    fn take_some_hung_up(&mut self) {
        let step = self.early.len().div_ceil(MOST_LOOKS).max(1);
        let mut until = self.turn % step;
        self.early.retain(|early| {
            if until > 0 {
                until -= 1;
                return true;
            }
            until = step - 1;
            self.looks += 1;
            !early.hung_up()
        });
    }

    /// Drops requests for this queue pair whose peers have hung up; it looks at [`MOST_EARLY_EACH`] at most.
    fn take_hung_up(&mut self, qpn: u32) {
        self.early.retain(|early| {
            if !early.is_for(qpn) {
                return true;
            }
            self.looks += 1;
            !early.hung_up()
        });
    }
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

/// A port of queue pair numbers that accepts connections.
struct PortListener {
    pairings: Weak<Pairings>,
    listener: Mutex<Option<Arc<Listener>>>,
}

impl RequestObserver for PortListener {
    fn requested(&self, pending: Pending, request: Request) {
        if let Some(pairings) = self.pairings.upgrade() {
            pairings.requested(pending, &request);
        }
        let listener = self.listener.lock().clone();
        if let Some(listener) = listener {
            listener.request_delivered();
        }
    }
}

/// A queue pair and the peer that it must be joined with.
struct Pairing {
    me: Weak<Self>,
    pairings: Weak<Pairings>,
    nic: Arc<Nic>,
    timeouts: Timeouts,
    max_ird: u16,
    qp: Weak<Qp>,
    /// Which of the queue pair's moves to RTR this is for.
    moves: u32,
    /// When it was made.
    began: Instant,
    source_qpn: u32,
    destination_qpn: u32,
    incarnation: u64,
    /// What an answer to a request for a cookie returns.
    token: u64,
    path: Path,
    attempt: Mutex<Attempt>,
}

#[derive(Default)]
struct Attempt {
    active: Option<Arc<Active>>,
    /// Asks the peer's TCP port why the UDP port does not answer.
    why: Option<(Arc<Silence>, Arc<Active>)>,
    /// The log has said it.
    why_said: bool,
    /// The next step of the connecting end.
    timer: Option<Alarm>,
    /// It asks for a cookie until it gets one.
    asking: bool,
    /// How often since the last answer.
    asked: u32,
    /// With the time when it came.
    cookie: Option<(Cookie, Instant)>,
    pauses: u32,
    rejected: bool,
    /// The listening end rejects requests unread until then.
    wrong_psn: Option<Instant>,
    cancelled: bool,
}

impl Pairing {
    /// Less: this end listens; greater: it connects; equal: the queue pair is its own peer.
    fn role(&self) -> Ordering {
        let own = (gid(self.path.local.ip()), self.source_qpn);
        own.cmp(&(gid(self.path.peer.ip()), self.destination_qpn))
    }

    /// The peer's address and port.
    fn names(&self) -> (Ipv6Addr, u16) {
        (gid(self.path.peer.ip()), port_of(self.destination_qpn))
    }

    /// Whether this request is the peer's, for the present move.
    fn check(&self, now: Instant, psns: &Psns, request: &Early) -> Result<(), TurnedAway> {
        let introduction = &request.introduction;
        let is_peers = introduction.source_qpn == self.destination_qpn
            && introduction.destination_qpn == self.source_qpn
            && request.from == gid(self.path.peer.ip())
            && self.role() == Ordering::Less;
        if !is_peers {
            return Err(TurnedAway::AnotherPeer);
        }
        if request.proven <= self.began {
            return Err(TurnedAway::Stale);
        }
        if self.attempt.lock().wrong_psn.is_some_and(|until| now < until) {
            return Err(TurnedAway::Psn);
        }
        self.check_psns(psns, Half::Lower, introduction)
    }

    /// Whether the packet sequence numbers fit: `half` of what the peer shows.
    fn check_psns(&self, own: &Psns, half: Half, shown: &Introduction) -> Result<(), TurnedAway> {
        match fit(own, half, shown) {
            Some(true) => Ok(()),
            // It comes back when one end has been moved to RTS.
            None => Err(TurnedAway::Psn),
            Some(false) => {
                tracing::warn!(
                    qpn = %format_args!("{:#x}", self.source_qpn),
                    "refused: queue pair {:#x} at {} shows other packet sequence numbers than the program \
                     has set here (rq_psn {}, sq_psn {}); over InfiniBand nothing would arrive",
                    self.destination_qpn,
                    self.path.peer.ip().to_canonical(),
                    hex(own.expects),
                    hex(own.begins),
                );
                self.attempt.lock().wrong_psn = Some(now() + WRONG_PSN_PAUSE);
                Err(TurnedAway::Psn)
            }
        }
    }

    /// Its queue pair, if that still waits for this stream.
    fn waiting(&self) -> Option<(Arc<Qp>, Psns)> {
        self.waiting_with_attributes().map(|(qp, _, psns)| (qp, psns))
    }

    fn waiting_with_attributes(&self) -> Option<(Arc<Qp>, QpAttr, Psns)> {
        let qp = self.qp.upgrade()?;
        let (attr, psns, moves) = qp.awaits_stream()?;
        (moves == self.moves).then_some((qp, attr, psns))
    }

    /// Takes the peer's request, if the queue pair still waits for it. False: the peer has hung up.
    fn accept(&self, request: &Introduction, mut pending: Pending) -> bool {
        let Some((qp, attr, psns)) = self.waiting_with_attributes() else {
            pending.reject(&TurnedAway::Stale.to_bytes());
            return true;
        };
        let peer = peer_data(qp.qpn(), attr.min_rnr_timer, conn_param(&attr));
        let params = AcceptParams { depths: self.depths(), peer };
        let reply = self.introduction(&psns, Half::Upper, request.incarnation, Cookie::NONE).to_bytes();
        let negotiated = match pending.responder.accept(params, &reply) {
            Ok(negotiated) => negotiated,
            Err(error) => {
                tracing::debug!(qpn = qp.qpn(), "cannot accept: {error}");
                return true;
            }
        };
        if let Err(why) = pending.reply() {
            tracing::debug!(
                qpn = qp.qpn(),
                "the peer closed the connection before it had the reply: {}",
                why.errno()
            );
            return false;
        }
        self.attach(pending.connection, &negotiated);
        true
    }

    /// Asks the peer for a cookie, and again after a pause.
    fn ask(&self) {
        let (Some(_), Some(pairings)) = (self.waiting(), self.pairings.upgrade()) else { return };
        let Some(port) = pairings.proof_port(self.source_qpn) else { return };
        let asked = {
            let mut attempt = self.attempt.lock();
            attempt.asking = true;
            attempt.cookie = None;
            attempt.asked += 1;
            attempt.asked
        };
        let mut to = self.path.peer;
        to.set_port(port_of(self.destination_qpn));
        if silence::ASKED_AFTER.contains(&asked) {
            self.ask_why(&pairings, asked);
        }
        self.step_after((FIRST_WAIT * (1 << (asked - 1).min(10))).min(LONGEST_PAUSE));
        let request = ProofDatagram {
            source_qpn: self.source_qpn,
            destination_qpn: self.destination_qpn,
            token: self.token,
            cookie: None,
        };
        port.send(&Route { to, from: Some(self.path.local.ip()) }, &request);
    }

    /// The UDP port does not answer: asks the TCP port why, for the log.
    fn ask_why(&self, pairings: &Pairings, asked: u32) {
        let (before, said) = {
            let mut attempt = self.attempt.lock();
            (attempt.why.take(), attempt.why_said)
        };
        if let Some((silence, active)) = before {
            active.cancel();
            if silence.end(asked) {
                return;
            }
        }
        let may_ask = |named: &mut Named| named.may_ask_why(now());
        if said || !pairings.table.lock().named.get_mut(&self.names()).is_some_and(may_ask) {
            return;
        }
        let Some((qp, attr, _)) = self.waiting_with_attributes() else { return };
        match Silence::ask(self, self.engine(), self.request(&qp, &attr), asked) {
            Ok((silence, active)) => {
                let mut attempt = self.attempt.lock();
                if attempt.asking && !attempt.cancelled {
                    attempt.why = Some((silence, active));
                } else {
                    drop(attempt);
                    active.cancel();
                }
            }
            Err(errno) => tracing::debug!(qpn = self.source_qpn, "cannot ask the peer's TCP port: {errno}"),
        }
    }

    /// Whether the log may say why the peer does not answer. Of its version it speaks once.
    fn may_say(&self, version: bool) -> bool {
        let (Some(_), Some(pairings)) = (self.waiting(), self.pairings.upgrade()) else { return false };
        let mut table = pairings.table.lock();
        let named = table.named.get_mut(&self.names());
        let may = named.is_some_and(|named| if version { named.say_version() } else { !named.version_said });
        drop(table);
        self.attempt.lock().why_said |= may;
        may
    }

    /// The peer has answered: this end has the port of its number.
    fn has_cookie(&self, cookie: Cookie) {
        let why = {
            let mut attempt = self.attempt.lock();
            if attempt.cancelled || !std::mem::take(&mut attempt.asking) {
                return;
            }
            attempt.cookie = Some((cookie, now()));
            (attempt.asked, attempt.why_said) = (0, false);
            attempt.timer = None;
            attempt.why.take()
        };
        if let Some((_, active)) = why {
            active.cancel();
        }
        self.connect();
    }

    fn request(&self, qp: &Qp, attr: &QpAttr) -> InitiatorConfig {
        let config = Config::get();
        InitiatorConfig {
            revision: Revision::Two,
            crc: config.crc,
            markers: config.markers,
            depths: self.depths(),
            max_ird: self.max_ird,
            peer: config.find_uwarp_peers.then(|| peer_data(qp.qpn(), attr.min_rnr_timer, conn_param(attr))),
            peer_in_request: false,
        }
    }

    fn connect(&self) {
        let Some((qp, attr, psns)) = self.waiting_with_attributes() else { return };
        let cookie = self.attempt.lock().cookie.filter(|(_, came)| now() < *came + FRESH);
        let Some((cookie, _)) = cookie else { return self.ask() };
        let request = self.request(&qp, &attr);
        let mut peer = self.path.peer;
        peer.set_port(port_of(self.destination_qpn));
        let target = Target {
            local: Some(self.path.local),
            peer,
            options: Options::default(),
            private_data: self.introduction(&psns, Half::Lower, self.incarnation, cookie).to_bytes().to_vec(),
            falls_back: false,
        };
        drop(qp);
        let me: Weak<Self> = Weak::clone(&self.me);
        match Active::start(self.engine(), self.timeouts, me, target, request, None) {
            Ok(active) => {
                let mut attempt = self.attempt.lock();
                if attempt.cancelled {
                    drop(attempt);
                    return active.cancel();
                }
                attempt.active = Some(active);
            }
            Err((errno, _)) => {
                tracing::debug!(qpn = self.source_qpn, %peer, "cannot connect: {errno}");
                self.again_later();
            }
        }
    }

    /// No listener is there, or not yet, or it has turned this end away.
    fn again_later(&self) {
        let pauses = {
            let mut attempt = self.attempt.lock();
            attempt.pauses += 1;
            attempt.pauses - 1
        };
        self.step_after((FIRST_PAUSE * (1 << pauses.min(10))).min(LONGEST_PAUSE));
    }

    fn step_after(&self, pause: Duration) {
        if self.waiting().is_none() {
            return;
        }
        let mut attempt = self.attempt.lock();
        if attempt.cancelled || attempt.timer.is_some() {
            return;
        }
        let me: Weak<Self> = Weak::clone(&self.me);
        attempt.timer = Some(Alarm::at(self.engine(), me, now() + pause));
    }

    /// The peer has rejected the request: its next one needs a new cookie. The first time it comes at once,
    /// since the peer may have been moved to RTR just now.
    fn turned_away(&self, said: &[u8]) {
        let why = TurnedAway::parse(said);
        let first = {
            let mut attempt = self.attempt.lock();
            attempt.cookie = None;
            !std::mem::replace(&mut attempt.rejected, true)
        };
        match (why, introduction::version(said)) {
            (Some(TurnedAway::Version), Some(theirs)) if self.may_say(true) => tracing::warn!(
                qpn = %format_args!("{:#x}", self.source_qpn),
                "cannot connect to queue pair {:#x} at {}: {}",
                self.destination_qpn,
                self.path.peer.ip().to_canonical(),
                Versions(theirs),
            ),
            (Some(why), _) => {
                tracing::debug!(qpn = self.source_qpn, "the peer has turned this end away: {why}")
            }
            (None, _) => tracing::debug!(qpn = self.source_qpn, "the peer has turned this end away"),
        }
        if first { self.ask() } else { self.again_later() }
    }

    fn cancel(&self) {
        let (active, why) = {
            let mut attempt = self.attempt.lock();
            attempt.cancelled = true;
            attempt.timer = None;
            (attempt.active.take(), attempt.why.take())
        };
        for active in active.into_iter().chain(why.map(|(_, active)| active)) {
            active.cancel();
        }
    }

    /// Joins a queue pair with itself: a TCP connection, too, can be connected to itself.
    fn join_itself(&self) -> Result<(), CmError> {
        let at = Bind { address: self.path.local, port: TakePort::Now, options: Options::default() };
        let socket = carrier().bind(&at)?;
        let address = socket.local();
        let connection = socket.connect(address).map_err(|(why, _)| why.errno())?;
        let Some((qp, attr, _)) = self.waiting_with_attributes() else { return Ok(()) };
        let (crc, markers) = (Config::get().crc, Config::get().markers);
        let negotiated = Negotiated {
            initiator: true,
            revision: Revision::Two,
            crc,
            send_markers: markers,
            receive_markers: markers,
            ird: self.max_ird,
            ord: self.max_ird,
            rtr: Rtr::None,
            peer_enhanced: None,
            drops_reserved_flags: false,
            peer_is_uwarp: true,
            peer: Some(peer_data(qp.qpn(), attr.min_rnr_timer, conn_param(&attr))),
            rtr_stag_to: uwarp_proto::setup::RTR_STAG_TO,
            private_data: Vec::new(),
        };
        self.attach(connection, &negotiated);
        Ok(())
    }

    fn attach(&self, connection: Box<dyn SetUp>, negotiated: &Negotiated) {
        let (Some(me), Some((qp, attr, _))) = (self.me.upgrade(), self.waiting_with_attributes()) else {
            return;
        };
        let mut param = conn_param(&attr);
        // A queue pair says for how long its own Sends may wait, an id for how long its peer's may. What the
        // peer has not said yet it says before its first Send.
        param.rnr_retry_count = negotiated.peer.map_or(RETRIES, |peer| peer.rnr_retry);
        let mut params = stream_params(negotiated, param, attr.timeout, attr.min_rnr_timer);
        // In the iwarp view, too: programs that exchange numbers are written for InfiniBand.
        params.by_number = true;
        params.wait_first_fpdu = negotiated.rtr != Rtr::None;
        tracing::debug!(qpn = qp.qpn(), peer = self.destination_qpn, ?params, "attach");
        if let Err((error, _)) = qp.attach_awaited(connection.into_link(), params, me, self.moves) {
            // Closed without a message: the peer's queue pair waits for the next stream.
            tracing::debug!(qpn = qp.qpn(), "cannot give the connection to the queue pair: {error}");
        }
    }

    /// Shows the present PSNs: the program sets one of them late.
    fn introduction(&self, psns: &Psns, half: Half, incarnation: u64, cookie: Cookie) -> Introduction {
        let [expects, begins] = [psns.expects, psns.begins].map(|psn| psn.map(|psn| half.of(psn)));
        let (source_qpn, destination_qpn) = (self.source_qpn, self.destination_qpn);
        Introduction { source_qpn, destination_qpn, expects, begins, incarnation, cookie }
    }

    /// Whether the reply comes from the queue pair that was asked.
    fn is_answer(&self, reply: &[u8]) -> bool {
        let (Some(reply), Some((_, psns))) = (Introduction::parse(reply), self.waiting()) else {
            return false;
        };
        let expected = (self.destination_qpn, self.source_qpn, self.incarnation);
        (reply.source_qpn, reply.destination_qpn, reply.incarnation) == expected
            && self.check_psns(&psns, Half::Upper, &reply).is_ok()
    }

    /// The most that the device offers: programs set their own numbers when the stream may exist already.
    fn depths(&self) -> Depths {
        Depths::negotiated(self.max_ird, self.max_ird)
    }

    fn engine(&self) -> &Arc<Engine> {
        self.nic.engine()
    }
}

impl ConnectObserver for Pairing {
    fn connecting_from(&self, _: SocketAddr) {}

    fn connected(&self, how: Connected) {
        self.attempt.lock().active = None;
        match how {
            Connected::Accepted(connection, negotiated) if self.is_answer(&negotiated.private_data) => {
                self.attach(connection, &negotiated);
            }
            Connected::Accepted(..) => {
                tracing::debug!(qpn = self.source_qpn, "refused: the reply is not the peer's");
                self.again_later();
            }
            Connected::Rejected(rejection) => self.turned_away(&rejection.private_data),
            Connected::Failed(kind, errno) => {
                tracing::debug!(qpn = self.source_qpn, ?kind, "the peer does not listen yet: {errno}");
                self.again_later();
            }
        }
    }
}

/// The timer of the next step.
impl Source for Pairing {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        let (was_set, asking) = {
            let mut attempt = self.attempt.lock();
            (attempt.timer.take().is_some(), attempt.asking)
        };
        match asking {
            _ if !was_set => {}
            true => self.ask(),
            false => self.connect(),
        }
    }
}

/// Without an id, no event reports what happens to a stream: the program learns it from its completions.
impl StreamObserver for Pairing {
    fn established(&self) {}

    /// If the stream did not count, the next one may have been requested already, or is to be requested.
    fn disconnected(&self, _: Disconnect) {
        if self.role() == Ordering::Greater {
            self.again_later();
        } else if let Some(pairings) = self.pairings.upgrade() {
            pairings.serve(self);
        }
    }
}

/// Whether what the peer shows of the packet sequence numbers fits what this end's program has set. `None`:
/// nothing is known to both.
pub(crate) fn fit(own: &Psns, half: Half, shown: &Introduction) -> Option<bool> {
    let pairs = [(own.begins, shown.expects), (own.expects, shown.begins)];
    let known = pairs.into_iter().filter_map(|(own, shown)| Some(half.of(own?) == shown?));
    known.reduce(|a, b| a && b)
}

fn hex(psn: Option<u32>) -> String {
    psn.map_or_else(|| "not set".into(), |psn| format!("{psn:#x}"))
}

/// What the program said of the queue pair, as rdma_cm would have it. How long its Sends may wait for a
/// receive it says when it moves the queue pair to RTS, which may be later: until then, for as long as it
/// takes. (The queue pair tells the peer then.)
fn conn_param(attr: &QpAttr) -> ConnParam {
    let said = attr.state != QpState::Rtr;
    let rnr_retry_count = if said { attr.rnr_retry } else { RETRIES };
    ConnParam { retry_count: attr.retry_cnt, rnr_retry_count, ..ConnParam::NONE }
}

fn gid(address: IpAddr) -> Ipv6Addr {
    match address.to_canonical() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

fn random_u64() -> Result<u64, VerbsError> {
    Ok(u64::from(random_u32()?) << 32 | u64::from(random_u32()?))
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use uwarp_proto::setup::{Initiator, Responder};
    use uwarp_rnic::qp::{QpCaps, QpInit, QpModify};
    use uwarp_rnic::{AsyncEvent, AsyncSink, Cq, Pd};

    use super::*;
    use crate::carriers;
    use crate::cm::Cm;

    struct Ignore;

    impl AsyncSink for Ignore {
        fn async_event(&self, _: AsyncEvent) {}
    }

    fn queue_pair(nic: &Arc<Nic>) -> Arc<Qp> {
        let cq = Cq::new(8, 0, None, Arc::new(Ignore));
        let caps =
            QpCaps { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let init = QpInit {
            pd: Pd::new(),
            send_cq: Arc::clone(&cq),
            recv_cq: cq,
            srq: None,
            caps,
            sq_sig_all: true,
            cookie: 0,
            async_sink: Arc::new(Ignore),
        };
        let qp = Qp::create(nic, init).unwrap();
        qp.modify(&QpModify { state: Some(QpState::Init), ..QpModify::default() }).unwrap();
        qp
    }

    /// A connection with a request that has come, and the peer's end of it.
    fn request(policy: ResponderPolicy, introduction: &Introduction) -> (Pending, TcpStream) {
        let depths = Depths::negotiated(1, 1);
        let config = InitiatorConfig {
            revision: Revision::Two,
            crc: true,
            markers: false,
            depths,
            max_ird: 1,
            peer: None,
            peer_in_request: false,
        };
        let mut initiator = Initiator::new(config, &introduction.to_bytes()).unwrap();
        let bytes = initiator.poll_transmit().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        peer.write_all(&bytes).unwrap();
        let mut responder = Responder::new(policy);
        let mut got = 0;
        while got < bytes.len() {
            let part = responder.want().min(bytes.len() - got);
            let request = responder.handle_input(&bytes[got..got + part]).unwrap();
            got += part;
            assert_eq!(request.is_some(), got == bytes.len());
        }
        std::io::copy(&mut (&accepted).take(bytes.len() as u64), &mut std::io::sink()).unwrap();
        accepted.set_nonblocking(true).unwrap();
        let connection = carriers::adopt(accepted.into()).unwrap();
        let ends = connection.ends();
        (Pending { connection, ends, responder, listener: Weak::new() }, peer)
    }

    /// When thousands of queue pairs were joined at once, both ends waited for half a minute, until the
    /// request was stale.
    #[test]
    fn a_request_that_comes_while_its_queue_pair_is_moved_to_rtr_is_served() {
        let nic = Nic::open().unwrap();
        let cm = Cm::new(&nic, Timeouts::default());
        let pairings = cm.pairings();
        let (low, high) = (queue_pair(&nic), queue_pair(&nic));
        let introduction = Introduction {
            source_qpn: high.qpn(),
            destination_qpn: low.qpn(),
            expects: Some(0),
            begins: Some(0),
            incarnation: 1,
            cookie: Cookie::NONE,
        };
        let (pending, mut peer) = request(cm.responder_policy(), &introduction);
        // The engine looks the queue pair up; before it has stored the request, the program moves the queue
        // pair.
        let known = pairings.known(low.qpn());
        assert!(known.is_none());
        let change = QpModify {
            state: Some(QpState::Rtr),
            rq_psn: Some(0),
            awaits_stream: true,
            ..QpModify::default()
        };
        low.modify(&change).unwrap();
        let here = SocketAddr::from(([127, 0, 0, 1], 0));
        pairings.begin(&low, Path { local: here, peer: here }, high.qpn()).unwrap();
        let from = gid(pending.ends.peer.ip());
        let now = Instant::now();
        pairings.admit(known.as_deref(), Early { since: now, introduction, from, proven: now, pending });
        assert!(low.awaits_stream().is_none(), "it has its stream");
        peer.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert!(peer.read(&mut [0; 256]).unwrap() > 0, "and its peer a reply");
        pairings.forget(low.qpn());
        low.destroy();
    }

    /// With a thousand requests of queue pairs that never came, each further one asked the system about all
    /// of them. Later, a further one looked at the oldest only, and dropped one of those that were alive
    /// although all behind them were dead.
    #[test]
    fn a_request_that_finds_the_table_full_looks_at_few_and_drops_the_dead_first() {
        const MOST: usize = 64;
        const STEP: usize = MOST / MOST_LOOKS;
        const ALIVE: u32 = 16;
        let mut table = Table::default();
        let cm = Cm::new(&Nic::open().unwrap(), Timeouts::default());
        let mut peers_so_far = 0;
        let mut early = |qpn: u32| {
            peers_so_far += 1;
            let introduction = Introduction {
                source_qpn: peers_so_far,
                destination_qpn: qpn,
                expects: None,
                begins: None,
                incarnation: 1,
                cookie: Cookie::NONE,
            };
            let (pending, peer) = request(cm.responder_policy(), &introduction);
            let now = Instant::now();
            (Early { since: now, introduction, from: Ipv6Addr::UNSPECIFIED, proven: now, pending }, peer)
        };
        let qpn = |early: &Early| early.introduction.destination_qpn;
        let mut peers = VecDeque::new();
        for qpn in 0..MOST as u32 {
            let (request, peer) = early(qpn);
            table.keep(request, MOST);
            peers.push_back(peer);
        }
        assert_eq!((table.early.len(), table.looks), (MOST, 0), "there is room: nothing to look for");
        // All but the oldest ones die.
        let dead = ALIVE..MOST as u32;
        peers.truncate(ALIVE as usize);
        for gone in table.early.iter().skip(ALIVE as usize) {
            let start = Instant::now();
            while !gone.pending.connection.ended() {
                assert!(start.elapsed() < Duration::from_secs(60), "the system does not tell");
                std::thread::yield_now();
            }
        }
        let left = |table: &Table| table.early.iter().filter(|early| dead.contains(&qpn(early))).count();
        // Few that lie side by side can be missed, for a while.
        for new in 100.. {
            let (before, looks) = (left(&table), table.looks);
            if before < STEP {
                break;
            }
            let (request, peer) = early(new);
            table.keep(request, MOST);
            peers.push_back(peer);
            assert!(table.looks - looks <= MOST_LOOKS);
            let oldest: Vec<u32> = table.early.iter().take(ALIVE as usize).map(qpn).collect();
            assert!(oldest.into_iter().eq(0..ALIVE), "the dead go first; {before} were left");
        }
        for new in 200..200 + (STEP * MOST) as u32 {
            let (request, peer) = early(new);
            table.keep(request, MOST);
            peers.push_back(peer);
            assert!(table.early.len() <= MOST);
            if left(&table) == 0 {
                break;
            }
        }
        assert_eq!(left(&table), 0, "each has its turn");
        // Of one queue pair, those that wait are few.
        table.looks = 0;
        for _ in 0..2 * MOST_EARLY_EACH {
            let (request, peer) = early(7777);
            table.keep(request, 2 * MOST);
            peers.push_back(peer);
        }
        assert!(table.looks <= 2 * MOST_EARLY_EACH * MOST_EARLY_EACH);
        assert_eq!(table.early.iter().filter(|early| early.is_for(7777)).count(), MOST_EARLY_EACH);
        // A peer that begins anew has one place.
        for _ in 0..2 * MOST_EARLY_EACH {
            let (mut request, peer) = early(8888);
            request.introduction.source_qpn = 9;
            assert!(table.keep(request, 4 * MOST).len() <= 1);
            peers.push_back(peer);
        }
        assert_eq!(table.early.iter().filter(|early| early.is_for(8888)).count(), 1);
    }

    /// Peers of another version try again and again, and all queue pairs of one port do.
    #[test]
    fn the_log_speaks_of_a_version_once_and_a_port_is_asked_in_turn() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut named = Named::default();
        assert_eq!(
            [now, now, later(1), later(1)].map(|at| named.may_ask_why(at)),
            [true, false, true, false]
        );
        assert_eq!([named.say_version(), named.say_version()], [true, false]);
        assert!(!named.may_ask_why(later(9)), "it is known why");
    }

    /// The first column is what this end's program has set: expected, begun with.
    #[test]
    fn packet_sequence_numbers_fit_if_all_that_both_know_is_equal() {
        let shown = |half: Half, expects: Option<u32>, begins: Option<u32>| Introduction {
            source_qpn: 1,
            destination_qpn: 2,
            expects: expects.map(|psn| half.of(psn)),
            begins: begins.map(|psn| half.of(psn)),
            incarnation: 1,
            cookie: Cookie::NONE,
        };
        let (a, b) = (0x00AB_CDEF, 0x0012_3456);
        for half in [Half::Lower, Half::Upper] {
            for (own, said, fits) in [
                ((Some(a), Some(b)), (Some(b), Some(a)), Some(true)),
                ((Some(a), Some(b)), (Some(b), None), Some(true)),
                ((Some(a), None), (Some(b), Some(a)), Some(true)),
                ((Some(a), None), (Some(b), None), None),
                ((None, None), (Some(b), Some(a)), None),
                ((Some(a), Some(b)), (None, None), None),
                ((Some(a), Some(b)), (Some(a), Some(b)), Some(false)),
                ((Some(a), Some(b)), (Some(b), Some(a + 0x1001)), Some(false)),
                ((Some(a), Some(b)), (Some(b + 0x1001), Some(a)), Some(false)),
            ] {
                let own = Psns { expects: own.0, begins: own.1 };
                assert_eq!(fit(&own, half, &shown(half, said.0, said.1)), fits, "{own:x?} {said:x?}");
            }
        }
        // Who has seen a request only cannot answer it.
        let own = Psns { expects: Some(a), begins: Some(b) };
        assert_eq!(fit(&own, Half::Upper, &shown(Half::Lower, Some(b), Some(a))), Some(false));
    }
}
