//! Datagrams of one host: those between two processes of one user go by memory (docs/adr/051).
//!
//! ```text
//!   UDP:   request ──▶      ◀── offer, with the name of the process and a word
//!   Unix:  join ──▶      ◀── answer                                               (host.rs)
//!   UDP:   the last datagrams, then "from here on by memory" ──▶                   both ways
//!   memory: all that follows ──▶
//! ```
//!
//! A [`Way`] leads from the port of queue pair numbers to one port of another process, at one pair of
//! addresses. Its datagrams go by UDP until both processes have proven that they receive at their ports, and
//! again when the other one has left. What is in the ring is given to the port as if it had come by UDP from
//! the proven port, so a queue pair notices nothing.
//!
//! Which thread reads: the one that has the port's receiver, as for the socket. It alone knows the
//! [`Inboxes`].

mod way;

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};

use rustc_hash::FxHashMap;
use rustix::io::Errno;
use uwarp_llp::carrier::Watch;
use uwarp_llp::memory::datagrams::{Inbox, Took};
use uwarp_llp::memory::lane::End;
use uwarp_llp::udp::Incoming;
use uwarp_process::{Mutex, RwLock};
use uwarp_proto::setup::Host;
use uwarp_wire::datagram::memory::{Memory, Says};

use crate::config::{Config, LinkChoice};
use crate::engine::Engine;
use crate::host::{self, Wants, Why};
use crate::nic::Nic;
use crate::source::{Readiness, Source, Token};
use crate::sync::{AtomicBool, OnceLock, Ordering};
use crate::ud::DatagramPort;

pub use way::Carried;
use way::Ring;
pub(crate) use way::Way;

/// Ways of a port. Datagrams to more ports of this host go by UDP.
const MOST_WAYS: usize = 1024;
/// Words of other processes that wait to be read. What is more is lost, and asked for again.
const MOST_HEARD: usize = 256;
/// Datagrams that are taken from one ring before others are looked at.
const TURN: usize = 64;
/// Bytes of the longest datagram, and more.
const STAGE: usize = 1 << 16;

/// The rings of a port.
#[derive(Default)]
pub(crate) struct Rings {
    /// Not set: the port is one of groups.
    on: OnceLock<On>,
    ways: RwLock<FxHashMap<[SocketAddr; 2], Arc<Way>>, 19>,
    /// Rings that the receiver does not know yet.
    new: Mutex<Vec<Reading>, 19>,
    has_new: AtomicBool,
    /// There are rings to read from.
    any: AtomicBool,
    heard: Mutex<Vec<(Memory, Incoming)>, 19>,
    /// Ways on which queue pairs wait for room.
    blocked: Mutex<Vec<Weak<Way>>, 21>,
    any_blocked: AtomicBool,
}

/// What a port needs for rings.
struct On {
    nic: Weak<Nic>,
    port: Weak<DatagramPort>,
    engine: Arc<Engine>,
    token: Token,
    number: u16,
    /// Datagrams may go by memory. Otherwise whoever asks is told so.
    shares: bool,
}

/// A ring to read from.
struct Reading {
    way: Arc<Way>,
    ring: Arc<Ring>,
    inbox: Inbox,
    /// A timer runs that opens it.
    waits: bool,
}

/// The rings that the port's receiver reads.
#[derive(Default)]
pub(crate) struct Inboxes {
    all: Vec<Reading>,
    stage: Vec<u8>,
}

/// The way that a queue pair has used last.
#[derive(Default)]
pub(crate) struct Last(Option<(SocketAddr, Option<IpAddr>, Arc<Way>)>);

impl Last {
    /// Whether a datagram for this endpoint goes by memory now, as far as that is known without a search.
    #[inline]
    pub fn is_ring_to(&self, to: SocketAddr, from: Option<IpAddr>) -> bool {
        self.0.as_ref().is_some_and(|last| (last.0, last.1) == (to, from) && last.2.is_by_ring())
    }
}

/// An address and a port, and nothing else.
fn plain(ip: IpAddr, port: u16) -> SocketAddr {
    SocketAddr::new(ip.to_canonical(), port)
}

impl Rings {
    /// From now on datagrams may go by memory, if the user allows it.
    pub fn start(&self, nic: &Arc<Nic>, port: &Arc<DatagramPort>, number: u16) {
        let config = Config::get();
        let shares = !config.links.need_no_memory() && config.find_uwarp_peers;
        let source = Arc::new(Heard(Arc::downgrade(port)));
        let engine = nic.engine().clone();
        let Ok(token) = engine.register_watch(Watch::Itself, source) else { return };
        let (nic, port) = (Arc::downgrade(nic), Arc::downgrade(port));
        let _ = self.on.set(On { nic, port, engine, token, number, shares });
    }

    /// Whether datagrams may go by memory.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on().is_some()
    }

    #[inline]
    fn on(&self) -> Option<&On> {
        self.on.get().filter(|on| on.shares)
    }

    /// Whether there are rings to read from.
    #[inline]
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Whether datagrams with these ends may go by memory.
    #[inline]
    pub fn concerns(&self, to: SocketAddr, from: Option<IpAddr>) -> bool {
        self.on().is_some_and(|on| on.ends(to, from).is_some())
    }

    /// The way of a datagram that may go by memory; `None`: it goes by UDP. `last`: the queue pair's.
    #[inline]
    pub fn way<'a>(&self, to: SocketAddr, from: Option<IpAddr>, last: &'a mut Last) -> Option<&'a Way> {
        let on = self.on()?;
        if last.0.as_ref().is_none_or(|last| (last.0, last.1) != (to, from)) {
            let ends = on.ends(to, from)?;
            last.0 = Some((to, from, self.find_or_make(on, ends, to)?));
        }
        last.0.as_ref().map(|last| &*last.2)
    }

    fn find(&self, ends: [SocketAddr; 2]) -> Option<Arc<Way>> {
        self.ways.read().get(&ends).cloned()
    }

    #[cold]
    fn find_or_make(&self, on: &On, ends: [SocketAddr; 2], to: SocketAddr) -> Option<Arc<Way>> {
        if let Some(way) = self.find(ends) {
            return Some(way);
        }
        let mut ways = self.ways.write();
        if ways.len() >= MOST_WAYS {
            ways.retain(|_, way| way.is_by_ring());
        }
        if ways.len() >= MOST_WAYS {
            return None;
        }
        let new = || Way::new(&on.engine, on.port.clone(), ends, to);
        match ways.entry(ends) {
            std::collections::hash_map::Entry::Occupied(known) => Some(known.get().clone()),
            std::collections::hash_map::Entry::Vacant(vacant) => Some(vacant.insert(new()?).clone()),
        }
    }

    /// What carries the datagrams to other processes of this host.
    pub fn carried(&self) -> Vec<Carried> {
        let mut all: Vec<_> = self.ways.read().values().map(|way| way.carried()).collect();
        all.sort_by_key(|carried| carried.peer);
        all
    }

    /// A process says something about memory. False: it is dropped.
    pub fn hear(&self, memory: Memory, incoming: &Incoming) -> bool {
        let Some(on) = self.on.get().filter(|on| on.may_share(on.ends_of(incoming))) else { return false };
        let mut heard = self.heard.lock();
        if heard.len() >= MOST_HEARD {
            return false;
        }
        heard.push((memory, *incoming));
        drop(heard);
        // This thread has locks.
        on.engine.raise(on.token, Readiness::ANY);
        true
    }

    fn serve(&self) {
        let Some(on) = self.on.get() else { return };
        let heard = std::mem::take(&mut *self.heard.lock());
        for (memory, incoming) in heard {
            let ends = on.ends_of(&incoming);
            match memory.says {
                Says::Request { token } => self.answer(on, ends, token, &incoming),
                Says::Offer { token, name, word } => {
                    self.join(on, ends, token, Host { incarnation: name, nonce: word })
                }
                Says::Refusal { token } => {
                    if let Some(way) = self.find(ends)
                        && way.take_answer(token, None)
                    {
                        way.stay(Why::NotOffered);
                    }
                }
                Says::Begins { word } => {
                    if let Some(way) = self.find(ends) {
                        way.peer_begins(word);
                    }
                }
            }
        }
    }

    /// A process of this host asks for memory.
    fn answer(&self, on: &On, ends: [SocketAddr; 2], token: [u8; 16], incoming: &Incoming) {
        let (Some(nic), Some(port)) = (on.nic.upgrade(), on.port.upgrade()) else { return };
        if !on.may_share(ends) {
            return;
        }
        // Both ask at once: the one with the smaller end is the initiator.
        if ends[0] < ends[1] && self.find(ends).is_some_and(|way| way.is_asking()) {
            return;
        }
        let neighbours = match choice(ends) {
            LinkChoice::Auto | LinkChoice::Memory | LinkChoice::Hybrid(_) if on.shares => nic.neighbours(),
            _ => None,
        };
        let says = match neighbours {
            Some(neighbours) => {
                let (name, word) = (neighbours.key().incarnation, neighbours.word_for(ends));
                Says::Offer { token, name, word }
            }
            None => Says::Refusal { token },
        };
        port.say(incoming.from, incoming.to, says);
    }

    /// A process has named itself, and the word to show there.
    fn join(&self, on: &On, ends: [SocketAddr; 2], token: [u8; 16], host: Host) {
        let Some(way) = self.find(ends) else { return };
        let Some(nic) = on.nic.upgrade() else { return };
        if !way.take_answer(token, Some(host.nonce)) {
            return;
        }
        let Some(neighbours) = nic.neighbours() else { return way.stay(nic.why_alone()) };
        if let Err((why, _)) = neighbours.ask(host, ends, Wants::Datagrams(way.clone())) {
            way.stay(why);
        }
    }

    /// The process at the other end has shown the word that it was sent, and gets this end of a lane.
    pub fn accept(&self, ends: [SocketAddr; 2], word: [u8; 16], end: End) -> Result<(), Why> {
        let on = self.on().ok_or(Why::TheirSetting)?;
        if !on.may_share(ends) {
            return Err(Why::NotOurs);
        }
        let way = self.find_or_make(on, ends, ends[1]).ok_or(Why::NoResources)?;
        if !way.grants() {
            return Err(Why::NotOurs);
        }
        way.granted(self, word, end);
        Ok(())
    }

    /// Whether this process shares memory at all.
    fn may_ask(&self) -> Result<(), Why> {
        let nic = self.on.get().and_then(|on| on.nic.upgrade()).ok_or(Why::NoResources)?;
        nic.neighbours().map(|_| ()).ok_or_else(|| nic.why_alone())
    }

    /// A ring to read from.
    fn add(&self, way: Arc<Way>, ring: Arc<Ring>, inbox: Inbox) {
        self.new.lock().push(Reading { way, ring, inbox, waits: false });
        self.has_new.store(true, Ordering::Release);
        self.any.store(true, Ordering::Release);
    }

    fn block(&self, way: Weak<Way>) {
        self.blocked.lock().push(way);
        self.any_blocked.store(true, Ordering::Release);
    }

    /// Continues the queue pairs for which there is room again.
    #[inline]
    pub fn use_room(&self) {
        if self.any_blocked.load(Ordering::Relaxed) {
            self.look_for_room();
        }
    }

    #[cold]
    fn look_for_room(&self) {
        self.any_blocked.store(false, Ordering::Relaxed);
        let blocked = std::mem::take(&mut *self.blocked.lock());
        for way in blocked {
            if way.upgrade().is_some_and(|way| way.use_room()) {
                let mut all = self.blocked.lock();
                if !all.iter().any(|other| other.ptr_eq(&way)) {
                    all.push(way);
                }
                self.any_blocked.store(true, Ordering::Release);
            }
        }
    }

    /// Reads what is in the rings; returns how many datagrams that was. The caller is the port's receiver.
    /// `each` returns after the datagram was placed or dropped; `lost`: so many have found no room.
    #[inline]
    pub fn read(
        &self,
        inboxes: &mut Inboxes,
        mut each: impl FnMut(&[u8], &Incoming),
        lost: impl Fn(u64),
    ) -> usize {
        if self.has_new.load(Ordering::Acquire) && self.has_new.swap(false, Ordering::AcqRel) {
            inboxes.all.append(&mut self.new.lock());
            inboxes.stage.resize(STAGE, 0);
        }
        let (mut read, mut over) = (0, false);
        let Inboxes { all, stage } = inboxes;
        for reading in all {
            if reading.inbox.has_news() {
                let (n, ends) = reading.read(stage, &mut each, &lost);
                read += n;
                over |= ends;
            }
        }
        if over {
            self.forget(inboxes);
        }
        read
    }

    /// Forgets the rings that are over.
    #[cold]
    fn forget(&self, inboxes: &mut Inboxes) {
        for i in (0..inboxes.all.len()).rev() {
            if inboxes.all.get(i).is_some_and(|reading| reading.ring.is_over()) {
                let Reading { way, ring, inbox, .. } = inboxes.all.swap_remove(i);
                way.is_over(&ring, inbox.is_broken());
            }
        }
        let new = self.new.lock();
        self.any.store(!(inboxes.all.is_empty() && new.is_empty()), Ordering::Release);
    }
}

impl Reading {
    /// Returns how many datagrams were read, and whether the ring is over.
    fn read(
        &mut self,
        stage: &mut [u8],
        each: &mut impl FnMut(&[u8], &Incoming),
        lost: &impl Fn(u64),
    ) -> (usize, bool) {
        if !self.ring.is_open() {
            if !std::mem::replace(&mut self.waits, true) {
                self.way.open_soon();
            }
            return (0, false);
        }
        let [own, peer] = self.way.ends();
        let mut read = 0;
        let mut incoming =
            Incoming { start: 0, len: 0, from: peer, to: own.ip(), interface: 0, truncated: false };
        let over = loop {
            if read == TURN {
                self.way.raise();
                break false;
            }
            match self.inbox.take(stage) {
                Took::Datagram(len) => {
                    incoming.len = len;
                    each(stage.get(..len).unwrap_or_default(), &incoming);
                    read += 1;
                }
                Took::Nothing => break false,
                Took::Over => break true,
            }
        };
        self.inbox.release();
        self.way.count_received(read);
        match self.inbox.newly_lost() {
            0 => {}
            more => lost(more),
        }
        if over {
            self.ring.end();
        }
        (read, over)
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        if let Some(on) = self.on.get() {
            on.engine.deregister(on.token);
        }
    }
}

impl On {
    /// The ends of a datagram that may go by memory: those of this host. (Where the system chooses the
    /// source, it is the same address for these two alone.)
    #[inline]
    fn ends(&self, to: SocketAddr, from: Option<IpAddr>) -> Option<[SocketAddr; 2]> {
        let alike = |ip: IpAddr| match ip {
            IpAddr::V4(v4) => v4 == std::net::Ipv4Addr::LOCALHOST,
            IpAddr::V6(v6) => v6 == std::net::Ipv6Addr::LOCALHOST,
        };
        let from = from.or_else(|| Some(to.ip()).filter(|ip| alike(*ip)))?;
        let ends = [plain(from, self.number), plain(to.ip(), to.port())];
        self.may_share(ends).then_some(ends)
    }

    fn ends_of(&self, incoming: &Incoming) -> [SocketAddr; 2] {
        [plain(incoming.to, self.number), plain(incoming.from.ip(), incoming.from.port())]
    }

    /// Whether the two may be processes of this host, and are not one and the same port.
    #[inline]
    fn may_share(&self, ends: [SocketAddr; 2]) -> bool {
        host::are_one_host(ends) && ends[0].port() != ends[1].port()
    }
}

/// What the user wants for datagrams with these ends.
fn choice([_, peer]: [SocketAddr; 2]) -> LinkChoice {
    Config::get().links.choose(peer.ip(), peer.port())
}

/// What the engine holds of a port that hears of memory.
struct Heard(Weak<DatagramPort>);

impl Source for Heard {
    fn ready(&self, _: Readiness) {
        if let Some(port) = self.0.upgrade() {
            port.rings().serve();
        }
    }

    fn timeout(&self) {}
}

/// A word by UDP may be lost: it is said again, or the datagrams go by UDP.
impl DatagramPort {
    fn say(&self, to: SocketAddr, from: IpAddr, says: Says) {
        let Some(on) = self.rings().on.get() else { return };
        let [source_qpn, destination_qpn] = [on.number, to.port()].map(|port| u32::from(port) << 8);
        let bytes = Memory { source_qpn, destination_qpn, says }.to_bytes();
        let _: Result<usize, Errno> = self.send_plain(to, from, &bytes);
    }
}
