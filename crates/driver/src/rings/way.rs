//! From a port of queue pair numbers to one of another process of this host.
//!
//! ```text
//!   Idle ── datagrams ──▶ Wanted ─▶ Asked ── offer ──▶ Joining ── lane ──▶ Stands
//!     ▲                                │                  │                  │
//!     │                nobody answers, or refuses         │                  │
//!     ├────── 10 s later ───── Udp ◀───┴──────────────────┘                  │
//!     └──────────────────────── the peer has left ───────────────────────────┘
//!   any ── the peer has joined ──▶ Granted ── it begins, or its ring has news ──▶ Stands
//! ```

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_llp::carrier::Watch;
use uwarp_llp::memory::datagrams::{Inbox, Outbox, Put};
use uwarp_llp::memory::lane::End;
use uwarp_llp::udp::RUN;
use uwarp_process::Mutex;
use uwarp_rnic::ah::Endpoint;
use uwarp_rnic::mr::random_u32;
use uwarp_wire::datagram::memory::Says;

use super::{Rings, choice};
use crate::config::LinkChoice;
use crate::engine::Engine;
use crate::host::Why;
use crate::source::{Readiness, Source, Token};
use crate::sync::{AtomicBool, AtomicU64, OnceLock, Ordering};
use crate::ud::{DatagramPort, UdQp};

/// Datagrams to a port before it is asked: who sends a few to each of many asks nobody.
const ASK_AFTER: usize = 8;
/// How long datagrams wait for room, once: if the peer has taken none meanwhile, it is stopped, and what
/// finds no room is lost until it takes some. Longer than most pauses of a process that waits for a
/// processor.
const ROOM: Duration = Duration::from_millis(20);
/// When a request is repeated, and when it is given up.
const PATIENCE: [Duration; 3] =
    [Duration::from_millis(20), Duration::from_millis(60), Duration::from_millis(200)];
/// After a failure nobody is asked for so long.
const AFTER_FAILURE: Duration = Duration::from_secs(10);
/// How long what is in the ring waits for the last datagram by UDP.
const LAST_BY_UDP: Duration = Duration::from_millis(10);

/// A ring that the peer writes.
#[derive(Default)]
pub(super) struct Ring {
    /// Shown by the one of the two that has joined.
    word: [u8; 16],
    /// What came by UDP before it has been read.
    open: AtomicBool,
    over: AtomicBool,
}

impl Ring {
    #[inline]
    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }

    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

/// What carries the datagrams between two ports, for `uwarp stat`.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[allow(missing_docs)]
pub struct Carried {
    pub local: SocketAddr,
    pub peer: SocketAddr,
    /// `memory` or `udp`.
    pub link: &'static str,
    /// Why that is UDP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Through memory.
    pub sent: u64,
    pub received: u64,
    /// Of those that were sent, so many have found no room.
    pub no_room: u64,
}

/// See the head of this file.
pub(crate) struct Way {
    me: Weak<Self>,
    /// Ours, the peer's.
    ends: [SocketAddr; 2],
    /// As the system knows the peer's: with its interface.
    to: SocketAddr,
    engine: Arc<Engine>,
    port: Weak<DatagramPort>,
    token: OnceLock<Token>,
    /// Datagrams by UDP ask for memory, when there are enough of them.
    asks: AtomicBool,
    /// It has.
    wanted: AtomicBool,
    /// There is an outbox.
    by_ring: AtomicBool,
    /// Whoever sends holds it, by UDP as well: nothing goes by UDP behind the word that says so.
    gate: Mutex<Gate, 20>,
    received: AtomicU64,
}

#[derive(Default)]
struct Gate {
    outbox: Option<Outbox>,
    phase: Phase,
    /// Datagrams that went by UDP since it was idle.
    by_udp: usize,
    sent: u64,
    lost: u64,
    /// Queue pairs whose datagrams wait for room, and until when.
    blocked: Vec<Weak<UdQp>>,
    patience: Option<Instant>,
    /// They have waited long enough.
    is_stopped: bool,
}

#[derive(Default)]
enum Phase {
    #[default]
    Idle,
    Wanted,
    Asked {
        token: [u8; 16],
        tries: usize,
    },
    Joining {
        word: [u8; 16],
    },
    Granted {
        ring: Arc<Ring>,
        outbox: Outbox,
    },
    Stands {
        ring: Arc<Ring>,
    },
    Udp(Why),
}

impl Phase {
    fn ring(&self) -> Option<&Arc<Ring>> {
        match self {
            Self::Granted { ring, .. } | Self::Stands { ring } => Some(ring),
            _ => None,
        }
    }
}

impl Way {
    pub(super) fn new(
        engine: &Arc<Engine>,
        port: Weak<DatagramPort>,
        ends: [SocketAddr; 2],
        to: SocketAddr,
    ) -> Option<Arc<Self>> {
        let way = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            ends,
            to,
            engine: engine.clone(),
            port,
            token: OnceLock::new(),
            asks: AtomicBool::new(true),
            wanted: AtomicBool::new(false),
            by_ring: AtomicBool::new(false),
            gate: Mutex::default(),
            received: AtomicU64::new(0),
        });
        let source = Arc::new(WaySource(way.me.clone()));
        // The only one to set it.
        let _ = way.token.set(engine.register_watch(Watch::Itself, source).ok()?);
        Some(way)
    }

    pub(super) fn ends(&self) -> [SocketAddr; 2] {
        self.ends
    }

    /// Whether datagrams go by memory now.
    #[inline]
    pub fn is_by_ring(&self) -> bool {
        self.by_ring.load(Ordering::Relaxed)
    }

    /// The engine looks at it soon.
    pub(super) fn raise(&self) {
        if let Some(token) = self.token.get() {
            self.engine.raise(*token, Readiness::ANY);
        }
    }

    fn set_timer(&self, after: Duration) {
        if let Some(token) = self.token.get() {
            self.engine.set_timer(*token, Some(Instant::now() + after));
        }
    }

    pub(super) fn count_received(&self, count: usize) {
        // Only the port's receiver counts.
        let received = self.received.load(Ordering::Relaxed);
        self.received.store(received + count as u64, Ordering::Relaxed);
    }

    pub(super) fn carried(&self) -> Carried {
        let gate = self.gate.lock();
        let link = if gate.outbox.is_some() { "memory" } else { "udp" };
        let why = match &gate.phase {
            Phase::Udp(why) => Some(why.to_string()),
            _ => None,
        };
        let [local, peer] = self.ends;
        let received = self.received.load(Ordering::Relaxed);
        Carried { local, peer, link, why, sent: gate.sent, received, no_room: gate.lost }
    }

    /// Sends the first of these datagrams, and those behind it with the same destination; returns how many:
    /// by memory, or with `udp`, which is passed how many there are. 0: by memory there was nobody any
    /// more, and the caller tries again. `None`: there is no room in memory, and `qp` will be called when
    /// there is.
    #[inline]
    pub fn send<'a>(
        &self,
        qp: &Weak<UdQp>,
        first: &Endpoint,
        outgoing: impl Iterator<Item = (&'a Endpoint, &'a [u8])>,
        udp: impl FnOnce(usize) -> Result<usize, Errno>,
    ) -> Result<Option<usize>, Errno> {
        let alike = outgoing.take(RUN).take_while(|(next, _)| (next.to, next.from) == (first.to, first.from));
        let mut gate = self.gate.lock();
        let Gate { outbox, sent, lost, is_stopped, .. } = &mut *gate;
        let Some(outbox) = outbox else {
            let count = alike.count();
            if self.asks.load(Ordering::Relaxed) {
                self.want(&mut gate, count);
            }
            return udp(count).map(Some);
        };
        let (mut done, mut stop) = (0, Put::Taken);
        for (_, bytes) in alike {
            match outbox.put(bytes) {
                Put::Taken => {
                    *sent += 1;
                    *is_stopped = false;
                }
                Put::Full if *is_stopped => {
                    *lost += 1;
                    outbox.lose();
                }
                end => {
                    stop = end;
                    break;
                }
            }
            done += 1;
        }
        outbox.show();
        if done == 0 && stop == Put::Full {
            return Ok(self.block(&mut gate, qp));
        }
        if stop == Put::Over {
            // What it has written is read before the rest of it is forgotten.
            gate.outbox = None;
            self.by_ring.store(false, Ordering::Relaxed);
            self.raise();
        }
        Ok(Some(done))
    }

    /// The datagrams of this queue pair wait for room.
    #[cold]
    fn block(&self, gate: &mut Gate, qp: &Weak<UdQp>) -> Option<usize> {
        let Some(outbox) = &mut gate.outbox else { return Some(0) };
        outbox.wants_room();
        if outbox.may_have_room() {
            return Some(0);
        }
        if gate.blocked.is_empty() {
            gate.patience = Some(Instant::now() + ROOM);
            self.set_timer(ROOM);
        }
        gate.blocked.push(qp.clone());
        if let Some(port) = self.port.upgrade() {
            port.rings().block(self.me.clone());
        }
        None
    }

    /// Continues the queue pairs that wait for room, if there may be some. Returns whether some still wait.
    pub(super) fn use_room(&self) -> bool {
        let mut gate = self.gate.lock();
        let may = gate.is_stopped || gate.outbox.as_ref().is_none_or(Outbox::may_have_room);
        if !may {
            return !gate.blocked.is_empty();
        }
        let blocked = std::mem::take(&mut gate.blocked);
        drop(gate);
        for qp in blocked.iter().filter_map(Weak::upgrade) {
            qp.use_room();
        }
        !self.gate.lock().blocked.is_empty()
    }

    /// The next look asks for memory: this thread has locks.
    fn want(&self, gate: &mut Gate, count: usize) {
        gate.by_udp += count;
        if gate.by_udp < ASK_AFTER {
            return;
        }
        if matches!(gate.phase, Phase::Idle) && self.asks.swap(false, Ordering::Relaxed) {
            gate.phase = Phase::Wanted;
            gate.by_udp = 0;
            self.wanted.store(true, Ordering::Release);
            self.raise();
        }
    }

    fn ask(&self, port: &DatagramPort) {
        let mut token = [0; 16];
        for part in token.chunks_exact_mut(4) {
            let Ok(random) = random_u32() else { return self.stay(Why::NoResources) };
            part.copy_from_slice(&random.to_ne_bytes());
        }
        if choice(self.ends) == LinkChoice::Tcp {
            return self.stay(Why::Setting);
        }
        if let Err(why) = port.rings().may_ask() {
            return self.stay(why);
        }
        let mut gate = self.gate.lock();
        if !matches!(gate.phase, Phase::Wanted) {
            return;
        }
        gate.phase = Phase::Asked { token, tries: 0 };
        drop(gate);
        self.set_timer(PATIENCE[0]);
        port.say(self.to, self.ends[0].ip(), Says::Request { token });
    }

    /// Whether this end asks for memory, and has no answer.
    pub(super) fn is_asking(&self) -> bool {
        matches!(self.gate.lock().phase, Phase::Asked { .. })
    }

    /// The answer to the request with this token has come: an offer with a word, or a refusal. False: nobody
    /// has asked.
    pub(super) fn take_answer(&self, of: [u8; 16], word: Option<[u8; 16]>) -> bool {
        let mut gate = self.gate.lock();
        match gate.phase {
            Phase::Asked { token, .. } if token == of => {
                gate.phase = Phase::Joining { word: word.unwrap_or_default() };
                true
            }
            _ => false,
        }
    }

    /// Datagrams go by UDP, and for a while nobody is asked.
    pub(crate) fn stay(&self, why: Why) {
        let mut gate = self.gate.lock();
        if !matches!(gate.phase, Phase::Wanted | Phase::Asked { .. } | Phase::Joining { .. }) {
            return;
        }
        gate.phase = Phase::Udp(why);
        drop(gate);
        tracing::info!("datagrams from {} to {} go by UDP: {why}", self.ends[0], self.ends[1]);
        if why != Why::Setting {
            self.set_timer(AFTER_FAILURE);
        }
    }

    /// The peer has granted this end of a lane.
    pub(crate) fn settle(&self, end: End) {
        let (Some(port), Some(me)) = (self.port.upgrade(), self.me.upgrade()) else { return };
        let mut gate = self.gate.lock();
        let Phase::Joining { word } = gate.phase else { return };
        let (ring, outbox, inbox) = self.take(word, end);
        gate.phase = Phase::Stands { ring: ring.clone() };
        self.begin(&mut gate, outbox, word);
        drop(gate);
        port.rings().add(me, ring, inbox);
        // What came before the engine knew it.
        self.raise();
    }

    /// Whether the peer may join. Both may ask at once: then the one with the smaller end does, or has done
    /// so.
    pub(super) fn grants(&self) -> bool {
        let is_initiator = self.ends[0] < self.ends[1];
        let gate = self.gate.lock();
        let has = match gate.phase {
            Phase::Joining { .. } => true,
            Phase::Stands { .. } => gate.outbox.as_ref().is_some_and(|outbox| !outbox.is_over()),
            _ => false,
        };
        !(is_initiator && has)
    }

    /// The peer has joined, and gets this end of a lane. Until it begins, this end writes nothing there: the
    /// peer may have given up.
    pub(super) fn granted(&self, rings: &Rings, word: [u8; 16], end: End) {
        let Some(me) = self.me.upgrade() else { return };
        let mut gate = self.gate.lock();
        let (ring, outbox, inbox) = self.take(word, end);
        // What an earlier one of this port has left is read, and then forgotten. Nobody says any more that
        // its last datagram by UDP has come.
        gate.outbox = None;
        if let Some(earlier) = gate.phase.ring() {
            earlier.open.store(true, Ordering::Release);
        }
        self.by_ring.store(false, Ordering::Relaxed);
        gate.phase = Phase::Granted { ring: ring.clone(), outbox };
        drop(gate);
        rings.add(me, ring, inbox);
        self.raise();
    }

    fn take(&self, word: [u8; 16], end: End) -> (Arc<Ring>, Outbox, Inbox) {
        if let Some(token) = self.token.get() {
            // Nothing that was asked before counts any more.
            self.engine.set_timer(*token, None);
            end.set_name(token.0);
        }
        let (outbox, inbox) = end.into_datagrams();
        (Arc::new(Ring { word, ..Ring::default() }), outbox, inbox)
    }

    /// From now on by memory. Whoever sends by UDP has the gate, so all that is behind this word.
    fn begin(&self, gate: &mut Gate, mut outbox: Outbox, word: [u8; 16]) {
        if let Some(port) = self.port.upgrade() {
            port.say(self.to, self.ends[0].ip(), Says::Begins { word });
        }
        // The peer learns that this end uses the lane, also if that word is lost.
        outbox.put(&[]);
        outbox.show();
        gate.outbox = Some(outbox);
        self.by_ring.store(true, Ordering::Relaxed);
        tracing::info!("datagrams from {} to {} go by memory", self.ends[0], self.ends[1]);
    }

    /// All that the peer has sent by UDP was read.
    pub(super) fn peer_begins(&self, word: [u8; 16]) {
        let mut gate = self.gate.lock();
        if gate.phase.ring().is_some_and(|ring| ring.word == word) {
            self.open(&mut gate);
        }
    }

    fn open(&self, gate: &mut Gate) {
        let Some(ring) = gate.phase.ring().cloned() else { return };
        ring.open.store(true, Ordering::Release);
        let stands = Phase::Stands { ring: ring.clone() };
        if let Phase::Granted { outbox, .. } = std::mem::replace(&mut gate.phase, stands) {
            self.begin(gate, outbox, ring.word);
        }
        self.raise();
    }

    /// There is something in the ring, and its peer's last word by UDP has not come.
    pub(super) fn open_soon(&self) {
        self.set_timer(LAST_BY_UDP);
    }

    /// This ring was read to its end.
    pub(super) fn is_over(&self, ring: &Arc<Ring>, broken: bool) {
        let mut gate = self.gate.lock();
        if !gate.phase.ring().is_some_and(|present| Arc::ptr_eq(present, ring)) {
            return;
        }
        gate.outbox = None;
        self.by_ring.store(false, Ordering::Relaxed);
        // Those that wait for room go by UDP.
        self.raise();
        if broken {
            gate.phase = Phase::Udp(Why::Broken);
            self.set_timer(AFTER_FAILURE);
        } else {
            gate.phase = Phase::Idle;
            self.asks.store(true, Ordering::Relaxed);
        }
    }

    fn timeout(&self) {
        let mut gate = self.gate.lock();
        match &mut gate.phase {
            Phase::Asked { token, tries } => {
                *tries += 1;
                let (tries, token) = (*tries, *token);
                drop(gate);
                match (PATIENCE.get(tries), self.port.upgrade()) {
                    (Some(patience), Some(port)) => {
                        self.set_timer(*patience);
                        port.say(self.to, self.ends[0].ip(), Says::Request { token });
                    }
                    _ => self.stay(Why::Silent),
                }
            }
            Phase::Stands { ring } if ring.is_open() => {
                // (Those that wait since a later time find out later.)
                let left = gate.patience.map(|until| until.saturating_duration_since(Instant::now()));
                if let Some(left) = left.filter(|left| !left.is_zero() && !gate.blocked.is_empty()) {
                    drop(gate);
                    return self.set_timer(left);
                }
                gate.is_stopped = !gate.blocked.is_empty();
                drop(gate);
                self.use_room();
            }
            Phase::Granted { .. } | Phase::Stands { .. } => {
                self.open(&mut gate);
                if !gate.blocked.is_empty() {
                    self.set_timer(ROOM);
                }
            }
            Phase::Udp(_) => {
                gate.phase = Phase::Idle;
                self.asks.store(true, Ordering::Relaxed);
            }
            Phase::Idle | Phase::Wanted | Phase::Joining { .. } => {}
        }
    }
}

impl Drop for Way {
    fn drop(&mut self) {
        if let Some(token) = self.token.get() {
            self.engine.deregister(*token);
        }
    }
}

/// What the engine holds of a way.
struct WaySource(Weak<Way>);

impl Source for WaySource {
    fn ready(&self, _: Readiness) {
        let Some(way) = self.0.upgrade() else { return };
        let Some(port) = way.port.upgrade() else { return };
        if way.wanted.swap(false, Ordering::AcqRel) {
            way.ask(&port);
        }
        port.rings().use_room();
        port.look_at_rings();
    }

    fn timeout(&self) {
        if let Some(way) = self.0.upgrade() {
            way.timeout();
        }
    }
}
