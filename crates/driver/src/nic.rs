//! The device: limits, addresses, and the one engine behind it.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use uwarp_llp::carrier::Bound;
use uwarp_llp::memory::lane::End;
use uwarp_llp::udp::{self, Route};
use uwarp_mem::shared::Refused;
use uwarp_process::Mutex;
use uwarp_proto::setup::HostKey;
use uwarp_rnic::ah::port_of;
use uwarp_rnic::qp::{Counters, Drops, MAX_MESSAGE, QpCaps, QpInit};
use uwarp_rnic::{AsyncSink, VerbsError};

use crate::background;
use crate::config::Config;
use crate::engine::Engine;
use crate::host::{self, Neighbours, ToItself, Why};
use crate::lanes::Lanes;
use crate::pair::{QueuePair, WeakQueuePair};
use crate::port::{Port, PortWatch};
use crate::proofs::ProofObserver;
use crate::qpn::Numbers;
use crate::rd::StreamPort;
use crate::ud::{DatagramPort, Unclaimed, UnclaimedCounters};

/// The limits of the device. All are kept: those of objects by [`crate::quota`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Limits {
    pub max_mr_size: u64,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_sge_rd: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_mw: u32,
    pub max_pd: u32,
    pub max_ah: u32,
    pub max_qp_rd_atom: u32,
    pub max_inline: u32,
    pub max_message: u32,
}

const LIMITS: Limits = Limits {
    max_mr_size: u64::MAX,
    max_qp: 64 * 1024,
    max_qp_wr: 32 * 1024,
    max_sge: 32,
    max_sge_rd: 32,
    max_srq: 64 * 1024,
    max_srq_wr: 32 * 1024,
    max_srq_sge: 32,
    max_cq: 64 * 1024,
    max_cqe: 4 * 1024 * 1024,
    max_mr: 1024 * 1024,
    max_mw: 1024 * 1024,
    max_pd: 64 * 1024,
    max_ah: 1024 * 1024,
    max_qp_rd_atom: 128,
    max_inline: 1024,
    max_message: MAX_MESSAGE,
};

/// The system chooses the port.
const NO_PORT: u16 = 0;

/// Inline data that every queue pair takes, in bytes.
const GIVEN_INLINE: u32 = 64;

impl Limits {
    /// Checks the sizes of a queue pair; returns the sizes that it gets. Sizes of receives have no meaning if
    /// receives are shared (ibv_create_qp(3)).
    pub(crate) fn admit(&self, init: &QpInit) -> Result<QpCaps, VerbsError> {
        let (mut caps, own_receives) = (init.caps, init.srq.is_none());
        if caps.max_send_wr > self.max_qp_wr || (own_receives && caps.max_recv_wr > self.max_qp_wr) {
            return Err(VerbsError::Invalid("more work requests than max_qp_wr"));
        }
        if caps.max_send_sge > self.max_sge || (own_receives && caps.max_recv_sge > self.max_sge) {
            return Err(VerbsError::Invalid("more scatter/gather elements than max_sge"));
        }
        if caps.max_inline_data > self.max_inline {
            return Err(VerbsError::Invalid("more inline data than the device takes"));
        }
        // Adapters give more than was requested, and programs post short inline messages without a request
        // for them (rdma_xclient). The room is allocated at the first use.
        caps.max_inline_data = caps.max_inline_data.max(GIVEN_INLINE);
        Ok(caps)
    }
}

/// A UDP port of queue pair numbers that is served for proofs, as long as this exists.
pub struct ProofPort(Arc<DatagramPort>);

impl ProofPort {
    /// Sends a proof from this port. It may be lost.
    pub fn send(&self, route: &Route, proof: &[u8]) {
        self.0.send_proof(route, proof);
    }
}

/// The device of this process.
pub struct Nic {
    me: Weak<Self>,
    engine: Arc<Engine>,
    pub(crate) numbers: Numbers<WeakQueuePair>,
    /// See [`Self::changes`].
    changes: AtomicU64,
    /// Ports with datagram queue pairs.
    datagram_ports: Mutex<HashMap<u16, Weak<DatagramPort>>, 15>,
    /// Ports with streams of reliable datagrams.
    stream_ports: Mutex<HashMap<u16, Weak<StreamPort>>, 14>,
    /// The port of multicast groups, while a queue pair is a member of one.
    group_port: Mutex<Weak<DatagramPort>, 15>,
    /// Counters of destroyed queue pairs, and the datagrams that they dropped.
    departed: Mutex<(Counters, Drops), 19>,
    unclaimed: Arc<UnclaimedCounters>,
    /// Exists once an observer watches the port.
    watch: Mutex<Option<Arc<PortWatch>>, 8>,
    /// Exists once a stream goes through memory.
    lanes: Mutex<Option<Arc<Lanes>>, 9>,
    /// Exists once this process may share memory with others.
    neighbours: Mutex<Option<Result<Arc<Neighbours>, Why>>, 8>,
    /// Exists once a queue pair is joined with itself.
    to_itself: Mutex<Option<ToItself>, 8>,
}

impl Nic {
    /// A device that the program does not use yet, and its engine's thread.
    pub(crate) fn start() -> io::Result<Arc<Self>> {
        let engine = background::start()?;
        Ok(Arc::new_cyclic(|me| Self {
            me: me.clone(),
            engine,
            numbers: Numbers::default(),
            changes: AtomicU64::new(0),
            datagram_ports: Mutex::default(),
            stream_ports: Mutex::default(),
            group_port: Mutex::default(),
            departed: Mutex::default(),
            unclaimed: Arc::default(),
            watch: Mutex::default(),
            lanes: Mutex::default(),
            neighbours: Mutex::default(),
            to_itself: Mutex::default(),
        }))
    }

    pub(crate) fn me(&self) -> Weak<Self> {
        self.me.clone()
    }

    /// The engine.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Streams through memory; an error if the system gives no memory for them.
    pub fn lanes(&self) -> Result<Arc<Lanes>, Refused> {
        let mut lanes = self.lanes.lock();
        if let Some(known) = &*lanes {
            return Ok(known.clone());
        }
        let started = Lanes::start(&self.engine)?;
        *lanes = Some(started.clone());
        Ok(started)
    }

    /// What this process shares with others of its host; `None`: it uses TCP, and a log line says why. A
    /// program may forbid others to look into it at any time, so that is asked for each stream.
    pub fn neighbours(&self) -> Option<Arc<Neighbours>> {
        self.known_neighbours().filter(|_| host::may_be_looked_into())
    }

    /// The same, also if it shares nothing more from now on: who asks is still answered.
    pub(crate) fn known_neighbours(&self) -> Option<Arc<Neighbours>> {
        if Config::get().links.need_no_memory() {
            return None;
        }
        let mut neighbours = self.neighbours.lock();
        let known = neighbours.get_or_insert_with(|| {
            let started = Neighbours::start(self);
            if let Err(why) = &started {
                tracing::info!("streams to this host use TCP: {why}");
            }
            started
        });
        known.as_ref().ok().cloned()
    }

    /// A lane for a queue pair that is joined with itself; `None`: the system gives no memory for it.
    pub(crate) fn lane_to_itself(&self) -> Option<End> {
        let mut to_itself = self.to_itself.lock();
        if to_itself.is_none() {
            *to_itself = ToItself::start(&self.engine, &self.lanes().ok()?).ok();
        }
        to_itself.as_mut()?.lane().ok()
    }

    /// Why it shares nothing.
    pub fn why_alone(&self) -> Why {
        match &*self.neighbours.lock() {
            Some(Err(why)) => *why,
            _ => Why::Sandbox,
        }
    }

    /// What responders offer to initiators on the same host.
    pub fn host_key(&self) -> Option<HostKey> {
        self.neighbours().map(|neighbours| neighbours.key())
    }

    /// From now on `sink` gets the events of `port`, as long as it lives. Their cookie is the port's number.
    /// Without netlink there are none; a log line says so.
    pub fn watch_port(&self, port: &'static Port, sink: Weak<dyn AsyncSink>) {
        let mut watch = self.watch.lock();
        if watch.is_none() {
            match PortWatch::start(&self.engine) {
                Ok(started) => *watch = Some(started),
                Err(error) => {
                    tracing::warn!(
                        "cannot watch network interfaces, so there will be no port events: {error}"
                    );
                    return;
                }
            }
        }
        if let Some(watch) = &*watch {
            watch.add(port, sink);
        }
    }

    /// The port that receives datagrams to `qpn`, served from now on. The number must have been taken.
    pub(crate) fn datagram_port(&self, qpn: u32) -> Result<Arc<DatagramPort>, VerbsError> {
        self.datagram_port_for(qpn, None)
    }

    /// The same; proofs go to the observer from the first one on.
    fn datagram_port_for(
        &self,
        qpn: u32,
        observer: Option<Weak<dyn ProofObserver>>,
    ) -> Result<Arc<DatagramPort>, VerbsError> {
        let none = VerbsError::NoResources("descriptors");
        let port = port_of(qpn);
        let mut ports = self.datagram_ports.lock();
        if let Some(known) = ports.get(&port).and_then(Weak::upgrade) {
            observer.into_iter().for_each(|observer| known.watch_proofs(observer));
            return Ok(known);
        }
        let socket = self.numbers.datagrams(qpn).ok_or(none)?;
        let new =
            DatagramPort::of_numbers(&self.engine, socket, port, &self.unclaimed, observer).map_err(|e| {
                tracing::error!("cannot watch the UDP socket of port {port}: {e}");
                none
            })?;
        if let Some(me) = self.me.upgrade() {
            new.rings().start(&me, &new, port);
        }
        ports.insert(port, Arc::downgrade(&new));
        Ok(new)
    }

    /// What serves the datagrams of this port, if there is one.
    pub(crate) fn served_datagram_port(&self, port: u16) -> Option<Arc<DatagramPort>> {
        self.datagram_ports.lock().get(&port)?.upgrade()
    }

    /// The port of multicast groups, served from now on.
    pub(crate) fn group_port(&self) -> Result<Arc<DatagramPort>, VerbsError> {
        let mut known = self.group_port.lock();
        if let Some(port) = known.upgrade() {
            return Ok(port);
        }
        let number = Config::get().multicast_port;
        let made = udp::Socket::bind_shared(number)
            .and_then(|socket| DatagramPort::of_groups(&self.engine, Arc::new(socket), &self.unclaimed));
        let port = made.map_err(|error| {
            tracing::error!("cannot listen for multicast on UDP port {number} (UWARP_MCAST_PORT): {error}");
            VerbsError::NoResources("the port of multicast groups")
        })?;
        *known = Arc::downgrade(&port);
        Ok(port)
    }

    /// From now on, proofs for queue pairs of the port of this number go to the observer. The number must
    /// have been taken.
    pub fn serve_proofs(&self, qpn: u32, observer: Weak<dyn ProofObserver>) -> Result<ProofPort, VerbsError> {
        let port = self.datagram_port_for(qpn, Some(observer))?;
        // What has come while the port served datagrams alone.
        port.report_proofs();
        Ok(ProofPort(port))
    }

    /// What is bound to the port of a queue pair's number, to listen with. `None`: it was taken before.
    pub fn take_stream_socket(&self, qpn: u32) -> Option<Box<dyn Bound>> {
        self.numbers.take_streams(qpn)
    }

    /// The port from which this process opens streams of reliable datagrams: its first one.
    pub(crate) fn stream_port(&self) -> Result<Arc<StreamPort>, Errno> {
        // A stream is for a queue pair, which has a number.
        let qpn = self.numbers.any_of_port().ok_or(Errno::NOBUFS)?;
        self.stream_port_at(port_of(qpn), None)
    }

    /// Another one, from which it opens streams to the first: an exchange is between two ports.
    pub(crate) fn second_stream_port(&self) -> Result<Arc<StreamPort>, Errno> {
        let mut ports = self.stream_ports.lock();
        if let Some(known) = ports.get(&NO_PORT).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let new =
            StreamPort::of(&self.datagram_port_of_service(NO_PORT, None)?).map_err(|_| Errno::NOBUFS)?;
        ports.insert(NO_PORT, Arc::downgrade(&new));
        Ok(new)
    }

    /// The streams of reliable datagrams that come to this port. `bound`: its socket, if the caller has it.
    pub(crate) fn stream_port_at(
        &self,
        port: u16,
        bound: Option<udp::Socket>,
    ) -> Result<Arc<StreamPort>, Errno> {
        let mut ports = self.stream_ports.lock();
        if let Some(known) = ports.get(&port).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let served = self.served_datagram_port(port);
        let datagrams = match served {
            Some(served) => Ok(served),
            None if self.numbers.datagrams(u32::from(port) << 8).is_some() => {
                self.datagram_port(u32::from(port) << 8).map_err(|_| Errno::NOBUFS)
            }
            None => self.datagram_port_of_service(port, bound),
        }?;
        let new = StreamPort::of(&datagrams).map_err(|_| Errno::NOBUFS)?;
        ports.retain(|_, port| port.strong_count() > 0);
        ports.insert(port, Arc::downgrade(&new));
        Ok(new)
    }

    /// The UDP port of the same number as one that rdma_cm listens on; [`NO_PORT`]: any.
    fn datagram_port_of_service(
        &self,
        port: u16,
        bound: Option<udp::Socket>,
    ) -> Result<Arc<DatagramPort>, Errno> {
        let mut ports = self.datagram_ports.lock();
        let socket = Arc::new(bound.map_or_else(|| udp::Socket::bind(port), Ok)?);
        let port = socket.port()?;
        let new = DatagramPort::of_numbers(&self.engine, socket, port, &self.unclaimed, None)?;
        ports.insert(port, Arc::downgrade(&new));
        Ok(new)
    }

    /// It could not listen.
    pub fn return_stream_socket(&self, qpn: u32, bound: Box<dyn Bound>) {
        self.numbers.return_streams(qpn, bound);
    }

    /// A queue pair was made.
    pub(crate) fn arrive(&self, qp: &QueuePair) {
        self.numbers.register(qp.qpn(), qp.downgrade());
        self.changes.fetch_add(1, Ordering::AcqRel);
    }

    /// A queue pair was destroyed; adds its counters to those of the device, the first time.
    pub(crate) fn depart(&self, qpn: u32, counters: Counters, drops: Drops) {
        if self.numbers.unregister(qpn) {
            self.changes.fetch_add(1, Ordering::AcqRel);
            let mut departed = self.departed.lock();
            departed.0 += counters;
            departed.1 += drops;
        }
    }

    /// The queue pair with this number, unless it is destroyed.
    pub fn queue_pair(&self, qpn: u32) -> Option<QueuePair> {
        self.numbers.find(qpn)?.upgrade()
    }

    /// Grows whenever a queue pair is made or destroyed: [`Self::numbers_of`] may be different then.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// The numbers of this port's queue pairs that are not destroyed: a bit for each, by its low byte.
    pub fn numbers_of(&self, port: u16) -> [u64; 4] {
        self.numbers.of_port(port)
    }

    /// All queue pairs that are not destroyed, in the order of their numbers.
    pub(crate) fn queue_pairs(&self) -> Vec<WeakQueuePair> {
        self.numbers.all()
    }

    /// Records that a queue pair belongs to an opened device, for [`Self::close_context`]. `context`: any
    /// number but 0.
    pub fn set_context(&self, qp: &QueuePair, context: u64) {
        self.numbers.set_context(qp.qpn(), context);
    }

    /// Destroys the queue pairs that belong to an opened device. `after`: called with the number of each one
    /// when it is destroyed.
    pub fn close_context(&self, context: u64, after: impl Fn(u32)) {
        for qp in self.numbers.of_context(context).iter().filter_map(WeakQueuePair::upgrade) {
            qp.destroy();
            after(qp.qpn());
        }
    }

    /// Counters of destroyed queue pairs, and the datagrams that they dropped.
    pub(crate) fn departed(&self) -> (Counters, Drops) {
        *self.departed.lock()
    }

    /// Datagrams that reached no queue pair.
    pub fn unclaimed(&self) -> Unclaimed {
        self.unclaimed.get()
    }

    /// The device's limits.
    pub fn limits(&self) -> &'static Limits {
        &LIMITS
    }

    /// The host's addresses, in the order of the GID table: the default route's interface first, loopback
    /// only if nothing else is up.
    pub fn addresses(&self) -> Vec<IpAddr> {
        crate::address::list().iter().map(|a| a.ip).collect()
    }
}
