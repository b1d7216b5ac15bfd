//! Datagram queue pairs with the UDP socket that they share.
//!
//! A queue pair number names a port, so the up to 256 queue pairs of a port receive from one socket
//! ([`DatagramPort`]). Which thread receives is decided as for connected queue pairs: the one that polls, or
//! the engine's. Each datagram goes to the queue pair that its header names, under that queue pair's lock; a
//! datagram for nobody is counted and dropped. Those between processes of one host go by memory (`rings`).

#[path = "ud/delivery.rs"]
mod delivery;
#[path = "ud/parts.rs"]
mod parts;
#[path = "ud/queue_pair.rs"]
mod queue_pair;
#[path = "ud/receivers.rs"]
mod receivers;
#[path = "ud/records.rs"]
mod records;
#[path = "ud/room.rs"]
mod room;
#[path = "ud/unclaimed.rs"]
mod unclaimed;

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_llp::udp::{self, Duplicate, Outgoing, Received, Route, SLOT, Slot};
use uwarp_rnic::cq::Coverage;
use uwarp_rnic::{VerbsError, trace};

use crate::attended::Attended;
use crate::engine::{Engine, ParkMark};
use crate::fork;
use crate::progress::in_background;
use crate::proofs::{ProofObserver, Proofs};
use crate::rd::Exchanges;
pub use crate::rings::Carried;
use crate::rings::{Inboxes, Rings};
use crate::source::{Readiness, Source, Token};
use crate::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, OnceLock, Ordering, RwLock};
pub(crate) use delivery::shown_lid;
use parts::Parts;
pub use queue_pair::UdQp;
use receivers::{Member, Receivers};
pub(crate) use room::AwaitsRoom;
pub use unclaimed::Unclaimed;
pub(crate) use unclaimed::UnclaimedCounters;

/// Datagrams received in one turn before other sockets are served.
const TURN: usize = 256;

/// So many datagrams in a slot show that a peer sends them joined.
const JOINED: usize = 4;

/// A thread of the program that sends or receives so many in a poll has work to do, and polls again soon. It
/// seldom polls in vain several times in a row, its polls take long, and it does what the background thread
/// is woken for meanwhile and leaves to it.
const MANY: usize = 4;

/// Where datagrams come by memory, one look in this number is at the socket, too. The system watches it.
const SOCKET_EVERY: u32 = 16;

/// After this number of datagrams were sent and no thread has received, the sender receives. Those that go in
/// one call take as long as some alone: they count as these.
const LOOK_AFTER: usize = 32;
const LIST_COUNTS: usize = 8;

thread_local! {
    /// Two megabytes of addresses; the system gives memory for what is used of them.
    static STAGING: Cell<Option<Box<[u8]>>> = const { Cell::new(None) };
}

/// What a look at the socket has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Looked {
    /// All that had come was read.
    Empty,
    /// There may be more: it was others' turn.
    More,
    /// Another thread is receiving.
    Busy,
}

/// Held by the thread that is receiving.
struct Receiver {
    parked: Option<ParkMark>,
    /// How many slots the next call fills at most: as many as the last one did, roughly.
    batch: usize,
    /// The last call filled all its slots.
    full: bool,
    /// From other processes of this host.
    inboxes: Inboxes,
    /// Looks at these since the last one at the socket.
    looks: u32,
}

/// The UDP socket of one port.
pub(crate) struct DatagramPort {
    socket: Arc<udp::Socket>,
    engine: Arc<Engine>,
    /// The descriptor that the engine watches, where the socket lives on for the next queue pair: what serves
    /// that may begin before this one has ended, and the engine can watch a descriptor only once.
    watched: Option<Duplicate>,
    token: OnceLock<Token>,
    receivers: Receivers,
    receiver: Attended<Receiver, 16>,
    /// A thread has polled the socket while the system does not watch it.
    polled: AtomicBool,
    /// Datagrams sent since a thread last received.
    sent: AtomicUsize,
    /// Whose datagrams wait for room.
    blocked: Mutex<Vec<Weak<dyn AwaitsRoom>>, 19>,
    unclaimed: Arc<UnclaimedCounters>,
    proofs: Proofs,
    /// Datagrams that go by memory.
    rings: Rings,
    /// Those that are longer than a packet.
    parts: Parts,
    /// Exists once the port has had a queue pair of reliable datagrams.
    exchanges: OnceLock<Arc<Exchanges>>,
}

impl DatagramPort {
    /// Serves `socket`, which is bound to `port`, for the queue pairs whose numbers name it. `observer`: as
    /// for [`Self::watch_proofs`], before the first proof comes.
    pub(crate) fn of_numbers(
        engine: &Arc<Engine>,
        socket: Arc<udp::Socket>,
        port: u16,
        unclaimed: &Arc<UnclaimedCounters>,
        observer: Option<Weak<dyn ProofObserver>>,
    ) -> Result<Arc<Self>, Errno> {
        let places = (0..256).map(|_| Weak::new()).collect();
        let watched = socket.duplicate()?;
        let receivers = Receivers::Numbers { port, places: RwLock::new(places) };
        Self::new(engine, socket, Some(watched), unclaimed, receivers, observer)
    }

    /// Serves `socket`, which is bound to the port of multicast groups.
    pub(crate) fn of_groups(
        engine: &Arc<Engine>,
        socket: Arc<udp::Socket>,
        unclaimed: &Arc<UnclaimedCounters>,
    ) -> Result<Arc<Self>, Errno> {
        Self::new(engine, socket, None, unclaimed, Receivers::Groups(RwLock::default()), None)
    }

    fn new(
        engine: &Arc<Engine>,
        socket: Arc<udp::Socket>,
        watched: Option<Duplicate>,
        unclaimed: &Arc<UnclaimedCounters>,
        receivers: Receivers,
        observer: Option<Weak<dyn ProofObserver>>,
    ) -> Result<Arc<Self>, Errno> {
        let this = Arc::new(Self {
            engine: engine.clone(),
            watched,
            token: OnceLock::new(),
            receivers,
            receiver: Attended::new(Receiver {
                parked: None,
                batch: 1,
                full: false,
                inboxes: Inboxes::default(),
                looks: 0,
            }),
            polled: AtomicBool::new(false),
            sent: AtomicUsize::new(0),
            blocked: Mutex::default(),
            unclaimed: unclaimed.clone(),
            proofs: Proofs::new(observer),
            rings: Rings::default(),
            parts: Parts::default(),
            exchanges: OnceLock::new(),
            socket,
        });
        this.socket.make_room();
        let fd = this.watched.as_ref().map_or_else(|| this.socket.fd().as_raw_fd(), |fd| fd.as_raw_fd());
        let source: Arc<dyn Source> = Arc::new(PortSource(Arc::downgrade(&this)));
        let token =
            engine.register_input(fd, source).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
        // The only one to set it.
        let _ = this.token.set(token);
        Ok(this)
    }

    /// Proofs go to this observer from now on; only the first call has an effect. [`Self::report_proofs`]
    /// follows.
    pub(crate) fn watch_proofs(&self, observer: Weak<dyn ProofObserver>) {
        self.proofs.watch(observer);
    }

    /// Reports the proofs that have come. Called without a lock.
    pub(crate) fn report_proofs(&self) {
        self.proofs.report();
    }

    /// Its reliable datagrams, from now on.
    pub(crate) fn exchanges(self: &Arc<Self>) -> Result<Arc<Exchanges>, VerbsError> {
        let Receivers::Numbers { port, .. } = self.receivers else {
            return Err(VerbsError::Invalid("groups have no reliable datagrams"));
        };
        if let Some(known) = self.exchanges.get() {
            return Ok(Arc::clone(known));
        }
        let made = Exchanges::new(self, port)?;
        // Another thread may have been faster.
        Ok(Arc::clone(self.exchanges.get_or_init(|| made)))
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub(crate) fn socket(&self) -> &udp::Socket {
        &self.socket
    }

    /// Hands packets of one length, which lie one behind the other, to the system; returns how many it took.
    pub(crate) fn send_joined(&self, route: &Route, bytes: &[u8], length: usize) -> Result<usize, Errno> {
        self.socket.send_joined(route, bytes, length)
    }

    /// Its datagrams that go by memory.
    pub(crate) fn rings(&self) -> &Rings {
        &self.rings
    }

    /// Sends what is no message: it may be lost.
    pub(crate) fn send_plain(&self, to: SocketAddr, from: IpAddr, bytes: &[u8]) -> Result<usize, Errno> {
        trace::unclaimed(trace::Way::Out, to, bytes, None);
        self.socket.send(&[Outgoing { route: &Route { to, from: Some(from) }, bytes }])
    }

    /// Sends a proof. If it is lost, it is asked for again.
    pub(crate) fn send_proof(&self, route: &Route, bytes: &[u8]) {
        trace::unclaimed(trace::Way::Out, route.to, bytes, None);
        let _ = self.socket.send(&[Outgoing { route, bytes }]);
    }

    /// Takes what other processes of this host have written; returns how many datagrams.
    fn read_rings(&self, receiver: &mut Receiver) -> usize {
        if !self.rings.any() {
            return 0;
        }
        self.sent.store(0, Ordering::Relaxed);
        let lost = |more| _ = self.unclaimed.no_room.fetch_add(more, Ordering::Relaxed);
        self.rings.read(&mut receiver.inboxes, |bytes, incoming| self.deliver(bytes, incoming), lost)
    }

    /// News of these, or of one that is new.
    pub(crate) fn look_at_rings(&self) {
        if let Some(mut receiver) = self.receiver.look() {
            self.read_rings(&mut receiver);
            self.release(receiver);
        }
        self.report_proofs();
    }

    /// Receives in one call to the system; returns how many datagrams. `polls`: a thread of the program
    /// polls.
    fn receive_some(&self, receiver: &mut Receiver, polls: bool) -> Result<usize, Errno> {
        let batch = receiver.batch;
        self.sent.store(0, Ordering::Relaxed);
        let (exchanges, mut taking) = (self.exchanges.get(), None);
        let deliver = |slot: Slot<'_>| match exchanges {
            None => self.deliver_slot(&slot),
            Some(exchanges) => self.deliver_either(&slot, |reliable| match reliable {
                Some((joined, incoming)) => {
                    taking.get_or_insert_with(|| exchanges.take(&self.engine)).input(joined, incoming);
                }
                // Its lock ranks below that of a queue pair.
                None => taking = None,
            }),
        };
        // Taken, so a thread that jumps out of the call loses it once, and an observer of a completion that
        // calls in again has another one.
        let kept = STAGING.try_with(Cell::take).ok().flatten();
        let mut stage = kept.unwrap_or_else(|| vec![0; SLOT * udp::BATCH].into_boxed_slice());
        let received = self.socket.receive_slots(&mut stage, SLOT, batch, deliver);
        let _ = STAGING.try_with(|kept| kept.set(Some(stage)));
        let was_full = receiver.full;
        receiver.full = received.is_ok_and(|received| received.slots == batch);
        let mut sent = 0;
        if let Some(exchanges) = exchanges {
            match received {
                Ok(_) => {
                    sent = match taking {
                        Some(taking) => taking.finish(polls),
                        None => exchanges.after_input(polls),
                    }
                }
                Err(Errno::AGAIN) => exchanges.found_empty(&self.engine),
                Err(_) => {}
            }
        }
        let are_many = sent >= MANY || received.is_ok_and(|received| received.datagrams >= MANY);
        if are_many && !in_background() {
            self.engine.note_posts();
        }
        receiver.batch = match received {
            // One is the answer of a ping-pong, most likely. After two in a row there may be many.
            Ok(_) if receiver.full && batch == 1 && !was_full => 1,
            // Of those that the system has joined, one slot is work enough beside a call. Acknowledgements go
            // out behind each call, and their senders wait for them.
            Ok(Received { slots, datagrams }) if datagrams >= slots.saturating_mul(JOINED) => 1,
            Ok(_) if receiver.full => (batch * 4).min(udp::BATCH),
            Ok(Received { slots, .. }) => slots.max(1),
            Err(_) => 1,
        };
        received.map(|received| received.datagrams)
    }

    /// Receives until the socket is empty, or it is others' turn; says which.
    fn drain(&self, receiver: &mut Receiver) -> Looked {
        let mut received = self.read_rings(receiver);
        while received < TURN {
            match self.receive_some(receiver, false) {
                Ok(n) => received += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Looked::Empty,
                // An error of a datagram that was sent, reported by the network (RFC 1122 section 4.1.3.3):
                // it was lost.
                Err(_) => received += 1,
            }
        }
        if let Some(token) = self.token.get() {
            self.engine.rearm(*token);
        }
        Looked::More
    }

    /// A thread polls: receives once. Only the system reports room to a queue pair that waits for room to
    /// send.
    pub(crate) fn make_progress(&self, in_earnest: bool) -> Coverage {
        if let Some(exchanges) = self.exchanges.get()
            && exchanges.poll(&self.engine) >= MANY
        {
            self.engine.note_posts();
        }
        let mut blocked = !self.blocked.lock().is_empty();
        if let Some(mut receiver) = self.receiver.try_lock() {
            if self.rings.any() && self.look_at_rings_first(&mut receiver) {
                self.release(receiver);
                self.report_proofs();
                return if blocked { Coverage::Partial } else { Coverage::Complete };
            }
            let in_earnest = in_earnest && !self.rings.any();
            let parked = receiver.parked.is_some_and(|mark| self.engine.is_parked(mark));
            if in_earnest && !blocked && !parked {
                receiver.parked = self.token.get().and_then(|token| self.engine.park(*token));
                // A queue pair that blocked since the look above may have unparked before this parked.
                blocked = !self.blocked.lock().is_empty();
                if blocked {
                    self.watch_room();
                }
            }
            if receiver.parked.is_some() {
                self.polled.store(true, Ordering::Relaxed);
            }
            // An error is that of a datagram which was sent and lost; the next look finds what came.
            let _ = self.receive_some(&mut receiver, true);
            self.release(receiver);
            self.report_proofs();
        }
        if blocked { Coverage::Partial } else { Coverage::Complete }
    }

    /// For a thread that polls: reads the rings, and returns whether that is all this time. The system
    /// watches the socket meanwhile, because this thread seldom looks there.
    fn look_at_rings_first(&self, receiver: &mut Receiver) -> bool {
        self.rings.use_room();
        self.read_rings(receiver);
        if receiver.parked.take().is_some() {
            self.engine.unpark();
        }
        receiver.looks += 1;
        if receiver.looks < SOCKET_EVERY {
            return true;
        }
        receiver.looks = 0;
        false
    }

    /// A thread that posts without end must not lose what comes meanwhile: the system's room for it is
    /// bounded.
    pub(crate) fn has_sent(&self, count: usize) {
        if self.sent.fetch_add(count, Ordering::Relaxed) >= LOOK_AFTER {
            let _ = self.make_progress(false);
        }
    }

    fn add_member(&self, qp: &Weak<UdQp>, group: IpAddr, interface: u32) -> Result<(), VerbsError> {
        let Receivers::Groups(members) = &self.receivers else { return Ok(()) };
        let mut members = members.write();
        if members.iter().any(|member| member.group == group && member.qp.ptr_eq(qp)) {
            return Ok(());
        }
        let joined = members.iter().any(|member| (member.group, member.interface) == (group, interface));
        // A broadcast comes without that.
        if interface != 0 && !joined && group.is_multicast() {
            self.socket.join(group, interface).map_err(|error| {
                tracing::warn!("cannot join {group} on interface {interface}: {error}");
                VerbsError::NoResources("multicast groups (see net.ipv4.igmp_max_memberships)")
            })?;
        }
        members.push(Member { group, interface, qp: qp.clone() });
        Ok(())
    }

    /// Says whether it was a member of one of these groups.
    fn remove_members(&self, qp: &Weak<UdQp>, of: impl Fn(IpAddr) -> bool) -> bool {
        let Receivers::Groups(members) = &self.receivers else { return false };
        let mut members = members.write();
        let mut left = SmallVec::<[(IpAddr, u32); 4]>::new();
        members.retain(|member| {
            let leaves = member.qp.ptr_eq(qp) && of(member.group);
            if leaves {
                left.push((member.group, member.interface));
            }
            !leaves
        });
        let multicast = |(group, interface): &&(IpAddr, u32)| *interface != 0 && group.is_multicast();
        for &(group, interface) in left.iter().filter(multicast) {
            if !members.iter().any(|member| (member.group, member.interface) == (group, interface)) {
                // Gone with its interface, at worst.
                let _ = self.socket.leave(group, interface);
            }
        }
        !left.is_empty()
    }

    fn look(&self) -> Looked {
        let looked = match self.receiver.look() {
            Some(mut receiver) => {
                let looked = self.drain(&mut receiver);
                self.release(receiver);
                looked
            }
            None => Looked::Busy,
        };
        self.report_proofs();
        looked
    }

    fn release<'a>(&'a self, receiver: MutexGuard<'a, Receiver, 16>) {
        self.receiver.release(receiver, |_| (), |receiver| _ = self.drain(receiver));
    }
}

impl Drop for DatagramPort {
    fn drop(&mut self) {
        if let Some(token) = self.token.get() {
            self.engine.deregister(*token);
        }
        if let Some(watched) = self.watched.take() {
            fork::close(watched);
        }
    }
}

/// What the engine holds of a port, which lives as long as its queue pairs.
struct PortSource(Weak<DatagramPort>);

impl Source for PortSource {
    fn ready(&self, readiness: Readiness) {
        let Some(port) = self.0.upgrade() else { return };
        if readiness.writable {
            port.use_room();
        }
        port.look();
    }

    fn timeout(&self) {}

    fn polled(&self) -> bool {
        self.0.upgrade().is_none_or(|port| port.polled.swap(false, Ordering::Relaxed))
    }

    fn exit(&self) {
        let port = self.0.upgrade();
        if let Some(exchanges) = port.as_ref().and_then(|port| port.exchanges.get()) {
            exchanges.exit();
        }
    }
}
