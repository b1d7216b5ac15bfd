//! An id: one end of a connection, or a listener, as programs handle it.

mod by_number;
mod datagrams;
mod stream;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::io::Errno;
use uwarp_driver::config::Config;
use uwarp_driver::{Alarm, Disconnect, Qp, StreamObserver as _};
use uwarp_llp::carrier::{Bind, Bound, TakePort};
use uwarp_llp::route;
use uwarp_proto::setup::{AcceptParams, Depths, InitiatorConfig, Rtr, SetupError};
use uwarp_rnic::qp::{QpModify, QpState};

use crate::active::{Active, Target};
use crate::carriers::carrier;
use crate::cm::{Cm, Options};
use crate::error::CmError;
use crate::event::{ConnParam, EventKind, MAX_DEPTH, MAX_PRIVATE_DATA, Owner};
use crate::handshake::{Parked, Pending};
use crate::listener::{Answer, Listener};
use crate::params::{agreed, passes_for_infiniband, peer_data, revision};
use crate::ports::{Claim, Taken};
use crate::state::{Lifecycle, State, Step};
use crate::timeouts::{ACK_TIMEOUT, RETRIES};
use crate::{Event, EventChannel};

use by_number::StandIn;
use datagrams::Datagrams;
pub use datagrams::QKEY;

/// One end of a connection, or a listener.
pub struct Id {
    key: u64,
    cm: Arc<Cm>,
    me: Weak<Self>,
    /// For datagrams; `None`: for streams.
    port_space: Option<u16>,
    /// The program's value.
    cookie: AtomicUsize,
    inner: Mutex<Inner>,
    events: Mutex<EventCount>,
    acknowledged: Condvar,
}

struct Inner {
    life: Lifecycle,
    channel: Arc<EventChannel>,
    options: Options,
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
    /// Bound by the program, and not yet connecting or listening.
    bound: Option<Box<dyn Bound>>,
    /// Its port, if the program has bound it: until it is destroyed.
    claim: Option<Claim>,
    active: Option<Arc<Active>>,
    listener: Option<Arc<Listener>>,
    pending: Option<Pending>,
    datagrams: Datagrams,
    qp: Option<Arc<Qp>>,
    /// The queue pair that the program moves to RTS itself, until it is `qp`.
    by_number: Option<Weak<Qp>>,
    /// Takes the place of a queue pair that takes no connection.
    stand_in: Option<StandIn>,
    /// The connection that waits for it.
    parked: Option<Parked>,
    /// The queue pair whose connection has ended. It may still be in RTS: the program has to disconnect
    /// first.
    left: Option<Weak<Qp>>,
    /// The peer's parameters.
    peer_param: ConnParam,
    /// The parameters of the request; for an accept without parameters.
    requested: ConnParam,
    /// Our parameters while a connection is set up.
    conn_param: ConnParam,
    /// Reported with [`EventKind::Established`].
    outcome: (ConnParam, Vec<u8>),
    /// Of a connection that the program has accepted, until it is established.
    answer: Option<Answer>,
    /// Runs until the peer's ready-to-receive indication arrives.
    ready_timer: Option<Alarm>,
    /// Runs after the end of a connection, until [`EventKind::TimewaitExit`].
    timewait: Option<Alarm>,
    /// Runs while the end of the connection is not reported yet: the program must poll completions first.
    unreported_end: Option<UnreportedEnd>,
    /// Whether there ever was a connection or an attempt at one.
    has_connected: bool,
}

/// The end of a connection whose report waits.
#[derive(Debug)]
struct UnreportedEnd {
    timer: Alarm,
    /// Reported at this time at the latest.
    limit: Instant,
}

#[derive(Debug, Default)]
struct EventCount {
    reported: u64,
    acknowledged: u64,
}

impl Id {
    /// A new id that reports to this channel.
    pub fn new(cm: &Arc<Cm>, channel: &Arc<EventChannel>) -> Arc<Self> {
        Self::with_state(cm, channel, State::Idle, None)
    }

    /// As [`Self::new`], for datagrams; `port_space` as on the wire.
    pub fn of_datagrams(cm: &Arc<Cm>, channel: &Arc<EventChannel>, port_space: u16) -> Arc<Self> {
        Self::with_state(cm, channel, State::Idle, Some(port_space))
    }

    fn with_state(
        cm: &Arc<Cm>,
        channel: &Arc<EventChannel>,
        state: State,
        port_space: Option<u16>,
    ) -> Arc<Self> {
        let key = cm.next_key();
        Arc::new_cyclic(|me| Self {
            key,
            cm: Arc::clone(cm),
            me: Weak::clone(me),
            port_space,
            cookie: AtomicUsize::new(0),
            inner: Mutex::new(Inner {
                life: Lifecycle::at(state),
                channel: Arc::clone(channel),
                options: Options::default(),
                local: None,
                peer: None,
                bound: None,
                claim: None,
                active: None,
                listener: None,
                pending: None,
                datagrams: Datagrams::default(),
                qp: None,
                by_number: None,
                stand_in: None,
                parked: None,
                left: None,
                peer_param: ConnParam::NONE,
                requested: ConnParam::NONE,
                conn_param: ConnParam::NONE,
                outcome: (ConnParam::NONE, Vec::new()),
                ready_timer: None,
                answer: None,
                timewait: None,
                unreported_end: None,
                has_connected: false,
            }),
            events: Mutex::default(),
            acknowledged: Condvar::new(),
        })
    }

    /// The value that the program has stored; 0 at first.
    pub fn cookie(&self) -> usize {
        self.cookie.load(Ordering::Acquire)
    }

    /// Stores a value for the program.
    pub fn set_cookie(&self, cookie: usize) {
        self.cookie.store(cookie, Ordering::Release);
    }

    /// Its state.
    pub fn state(&self) -> State {
        self.inner.lock().life.state()
    }

    /// The local address, if it is known.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.inner.lock().local
    }

    /// The remote address, if it is known.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.inner.lock().peer
    }

    /// Where its events go.
    pub fn channel(&self) -> Arc<EventChannel> {
        Arc::clone(&self.inner.lock().channel)
    }

    /// Its options.
    pub fn options(&self) -> Options {
        self.inner.lock().options
    }

    /// The time limit that the attributes of its queue pair show.
    pub fn ack_timeout(&self) -> u8 {
        self.options().ack_timeout.unwrap_or(ACK_TIMEOUT)
    }

    /// Sets options. They take effect on later calls; the type of service also on a socket that is bound and
    /// on a request that waits.
    pub fn set_options(
        &self,
        change: impl FnOnce(State, &mut Options) -> Result<(), CmError>,
    ) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        let state = inner.life.state();
        let before = inner.options.tos;
        change(state, &mut inner.options)?;
        let changed = inner.options.tos.filter(|_| inner.options.tos != before);
        if let Some(tos) = changed {
            if let Some(socket) = &inner.bound {
                socket.set_tos(tos)?;
            } else if let Some(pending) = &inner.pending {
                pending.connection.set_tos(tos)?;
            }
        }
        Ok(())
    }

    /// Binds to a local address; port 0 takes a free one, which [`Id::local_address`] then returns. The port
    /// is one of the host's TCP ports, because connections arrive there.
    pub fn bind(&self, address: SocketAddr) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        self.bind_locked(&mut inner, address)
    }

    fn bind_locked(&self, inner: &mut MutexGuard<'_, Inner>, address: SocketAddr) -> Result<(), CmError> {
        if self.is_datagram() {
            return self.bind_datagrams(inner, address);
        }
        inner.life.check(Step::Bind)?;
        check_scope(address)?;
        let options = inner.options.of_sockets();
        let ports = self.cm.ports();
        let wanted = self.port(&inner.options, address);
        ports.check(wanted)?;
        let socket = carrier()
            .bind(&Bind { address, port: TakePort::Now, options })
            .inspect_err(|errno| explain(*errno, address))?;
        let bound = socket.local();
        inner.local = Some(bound);
        inner.bound = Some(socket);
        inner.claim = None;
        inner.claim = Some(ports.claim(Taken { address: bound, ..wanted }));
        inner.life.take(Step::Bind)
    }

    /// The port that the id wants, as an entry of the table of ports.
    fn port(&self, options: &Options, address: SocketAddr) -> Taken {
        let afonly = address.is_ipv4() || options.afonly.unwrap_or_else(route::ipv6_only_by_default);
        Taken { key: self.key, address, reuse: options.reuseaddr, afonly }
    }

    /// Finds the route to `peer`. Answered by [`EventKind::AddressResolved`] or [`EventKind::AddressError`],
    /// at once.
    ///
    /// An id that is not bound gets the local address that the routing table gives, or `source`. Without a
    /// port in `source` it gets one when it connects. A wildcard peer is this host.
    pub fn resolve_address(&self, source: Option<SocketAddr>, peer: SocketAddr) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        inner.life.check(Step::ResolveAddress)?;
        check_scope(peer)?;
        let peer = route::loopback_if_wildcard(peer);
        if inner.life.state() == State::Idle
            && let Some(source) = source
            && (source.port() != 0 || !source.ip().is_unspecified())
        {
            self.bind_locked(&mut inner, source)?;
        }
        if inner.local.is_some_and(|local| local.is_ipv4() != peer.is_ipv4()) {
            return Err(CmError::Invalid("local and remote address are of different families"));
        }
        match route::source_for(inner.local.map(|local| local.ip()), peer) {
            Ok(ip) => {
                let local = inner.local.get_or_insert(SocketAddr::new(ip, 0));
                if local.ip().is_unspecified() {
                    local.set_ip(ip);
                }
                inner.peer = Some(peer);
                inner.life.take(Step::ResolveAddress)?;
                self.report(&mut inner, EventKind::AddressResolved, 0);
            }
            Err(errno) => {
                inner.life.take(Step::AddressError)?;
                self.report(&mut inner, EventKind::AddressError, -errno.raw_os_error());
            }
        }
        Ok(())
    }

    /// Finds the route; over TCP there is nothing to find. Answered by [`EventKind::RouteResolved`], at once.
    pub fn resolve_route(&self) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        inner.life.take(Step::ResolveRoute)?;
        self.report(&mut inner, EventKind::RouteResolved, 0);
        Ok(())
    }

    /// Takes connection requests from now on; each is reported as [`EventKind::ConnectRequest`]. An id that
    /// is not bound is bound to the IPv4 wildcard address and a free port.
    ///
    /// `backlog`: how many requests may wait for [`EventChannel::get`]; 0 or less: the maximum. Further
    /// connections wait in the kernel.
    pub fn listen(self: &Arc<Self>, backlog: i32) -> Result<(), CmError> {
        if let Some(port_space) = self.port_space {
            return self.listen_datagrams(port_space, backlog);
        }
        let mut inner = self.inner.lock();
        inner.life.check(Step::Listen)?;
        if inner.life.state() == State::Idle {
            self.bind_locked(&mut inner, SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0))?;
        }
        let local = inner.local;
        if let Some(local) = local {
            self.cm.ports().check(Taken { reuse: false, ..self.port(&inner.options, local) })?;
        }
        let socket = inner.bound.take().ok_or(CmError::Invalid("not bound"))?;
        inner.life.take(Step::Listen)?;
        let cm = &self.cm;
        let me: Weak<Self> = Weak::clone(&self.me);
        let backlog = Listener::backlog(backlog);
        // Locked meanwhile: a request that arrives and is taken at once must find the listener.
        match Listener::start(cm.engine(), *cm.timeouts(), cm.responder_policy(), me, socket, backlog) {
            Ok(listener) => {
                inner.listener = Some(listener);
                if let Some(claim) = &inner.claim {
                    claim.alone();
                }
                Ok(())
            }
            Err((errno, bound)) => {
                inner.life.take(Step::ListenRefused)?;
                inner.bound = bound;
                if let Some(address) = local {
                    explain(errno, address);
                    if inner.bound.is_none() {
                        // It listened, and could not be watched. A new socket takes its port.
                        let options = inner.options.of_sockets();
                        inner.bound = carrier().bind(&Bind { address, port: TakePort::Now, options }).ok();
                    }
                }
                Err(errno.into())
            }
        }
    }

    /// Connects the queue pair to the peer. Answered by [`EventKind::Established`], [`EventKind::Rejected`],
    /// [`EventKind::Unreachable`] or [`EventKind::ConnectError`].
    pub fn connect(
        self: &Arc<Self>,
        qp: &Arc<Qp>,
        param: ConnParam,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        self.connect_as(qp, false, param, private_data)
    }

    fn connect_as(
        self: &Arc<Self>,
        qp: &Arc<Qp>,
        by_number: bool,
        param: ConnParam,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        check_private_data(private_data)?;
        let depths = self.depths(param, None)?;
        // Before the id's lock is taken: releasing the queue pair's lock may call its observer, which takes
        // the id's lock.
        let min_rnr_timer = qp.query().min_rnr_timer;
        let mut inner = self.inner.lock();
        inner.life.check(Step::Connect)?;
        let peer = inner.peer.ok_or(CmError::Invalid("no remote address"))?;
        inner.life.take(Step::Connect)?;
        // A second attempt binds again to the address that the program has bound.
        let local = inner.bound.as_ref().and(inner.local);
        let options = inner.options.of_sockets();
        let private_data = private_data.to_vec();
        let target = Target { local, peer, options, private_data, falls_back: true };
        let bound = inner.bound.take();
        inner.qp = (!by_number).then(|| Arc::clone(qp));
        inner.by_number = by_number.then(|| Arc::downgrade(qp));
        let number = inner.number_of(qp, param);
        inner.conn_param = param;
        inner.has_connected = true;
        drop(inner);

        let config = Config::get();
        let config = InitiatorConfig {
            revision: revision(config),
            crc: config.crc,
            markers: config.markers,
            depths,
            max_ird: self.cm.max_depth(),
            peer: config.find_uwarp_peers.then(|| peer_data(number, min_rnr_timer, param)),
            // InfiniBand's connection manager always names the queue pair in the request (docs/adr/021).
            peer_in_request: by_number || passes_for_infiniband(),
        };
        let me: Weak<Self> = Weak::clone(&self.me);
        match Active::start(self.cm.engine(), *self.cm.timeouts(), me, target, config, bound) {
            Ok(active) => {
                let mut inner = self.inner.lock();
                if inner.life.state() == State::Connecting {
                    inner.active = Some(active);
                } else {
                    // It has ended already, or another thread has cancelled it.
                    drop(inner);
                    active.cancel();
                }
                Ok(())
            }
            Err((errno, bound)) => {
                let mut inner = self.inner.lock();
                // Unless the program has destroyed it meanwhile.
                if inner.life.take(Step::ConnectRefused).is_ok() {
                    inner.qp = None;
                    inner.bound = bound;
                }
                Err(errno.into())
            }
        }
    }

    /// Accepts the request with this queue pair. Answered by [`EventKind::Established`] or
    /// [`EventKind::ConnectError`].
    ///
    /// `param`: `None` takes the depths that the request asks for. After an error the request is gone.
    pub fn accept(
        self: &Arc<Self>,
        qp: &Arc<Qp>,
        param: Option<ConnParam>,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        check_private_data(private_data)?;
        // Before the id's lock is taken, as in `connect`.
        let min_rnr_timer = qp.query().min_rnr_timer;
        // Declared before the lock: it is dropped after it.
        let answer;
        let mut inner = self.inner.lock();
        inner.life.check(Step::Accept)?;
        let param = param.unwrap_or(ConnParam { rnr_retry_count: 7, ..inner.requested });
        // "This value is ignored" (rdma_accept(3)); the peer's program does not learn ours.
        let param = ConnParam { retry_count: RETRIES, ..param };
        let depths = self.depths(param, Some(inner.requested))?;
        let Some(mut pending) = inner.pending.take() else {
            return Err(CmError::Invalid("there is no connection request"));
        };
        self.cm.no_longer_awaits(self.key);
        let peer = peer_data(inner.number_of(qp, param), min_rnr_timer, param);
        let negotiated = pending.responder.accept(AcceptParams { depths, peer }, private_data).map_err(
            |error| match error {
                SetupError::PrivateDataLimit { .. } => CmError::Invalid("too much private data"),
                _ => CmError::Invalid("there is no connection request"),
            },
        )?;
        answer = pending.answer();
        if let Err(why) = pending.reply() {
            inner.conclude(Step::Failed);
            drop(inner);
            // As librdmacm: the receives that were posted for the connection are flushed.
            fail(qp);
            // The usual reason is that the peer gave up before we answered.
            return Err(why.errno().into());
        }
        inner.life.take(Step::Accept)?;
        inner.answer = answer;
        inner.qp = Some(Arc::clone(qp));
        inner.conn_param = param;
        inner.has_connected = true;
        inner.outcome = (agreed(&negotiated, inner.requested), Vec::new());
        drop(inner);
        // Without an indication to wait for, the program may continue; the stream itself holds back until the
        // peer's first FPDU (RFC 5044 section 7.1.2 rule 4).
        let ready = negotiated.rtr == Rtr::None;
        self.attach(qp, pending.connection, &negotiated, param).inspect_err(|_| {
            self.inner.lock().conclude(Step::Failed);
            self.no_longer_answered();
        })?;
        if ready {
            self.stream_established();
        } else {
            self.start_ready_timer();
        }
        Ok(())
    }

    /// Rejects the request.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), CmError> {
        check_private_data(private_data)?;
        let mut inner = self.inner.lock();
        inner.life.take(Step::Reject)?;
        if self.is_datagram() {
            return Self::refuse(inner, private_data);
        }
        let pending = inner.pending.take();
        drop(inner);
        self.cm.no_longer_awaits(self.key);
        if let Some(pending) = pending {
            pending.reject(private_data);
        }
        Ok(())
    }

    /// Ends the connection. Posted work is sent as far as possible in bounded time. Answered by
    /// [`EventKind::Disconnected`] at both ends. If the peer has disconnected already, nothing more happens.
    pub fn disconnect(&self) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        if inner.unreported_end.take().is_some() {
            drop(inner);
            self.stream_ended();
            inner = self.inner.lock();
        }
        match inner.life.state() {
            _ if inner.waits_for_queue_pair() => {
                drop(inner);
                if self.unpark() {
                    self.lost();
                }
                Ok(())
            }
            State::Established | State::Responded | State::Accepting => {
                let qp = inner.qp.clone();
                drop(inner);
                if let Some(qp) = qp {
                    qp.disconnect();
                    // The program has destroyed the connection's queue pair without a call to us, so its end
                    // was not reported.
                    if qp.query().state == QpState::Reset {
                        self.queue_pair_destroyed();
                    }
                }
                Ok(())
            }
            State::Connecting => {
                let active = inner.active.take();
                let qp = inner.qp.clone();
                // An attempt that the program cancels ends like one that fails.
                inner.conclude(Step::Failed);
                self.report(&mut inner, EventKind::ConnectError, -Errno::CONNABORTED.raw_os_error());
                drop(inner);
                if let Some(active) = active {
                    active.cancel();
                }
                if let Some(qp) = qp {
                    qp.disconnect();
                }
                Ok(())
            }
            State::Closed if inner.has_connected => {
                let left = inner.left.take();
                drop(inner);
                if let Some(qp) = left.and_then(|qp| qp.upgrade()) {
                    qp.leave_gone_peer();
                }
                Ok(())
            }
            State::RequestPending => Ok(()),
            _ => Err(CmError::Invalid("not connected")),
        }
    }

    /// The program has destroyed the id's queue pair, which ends the connection without a call to the
    /// observer. Reported as [`EventKind::Disconnected`], as by a device in the kernel.
    pub fn queue_pair_destroyed(&self) {
        if self.is_datagram() {
            return;
        }
        self.disconnected(Disconnect::LocalClosed);
    }

    /// Queues an event that does not come from the connection manager: for calls that answer by event and do
    /// their work elsewhere, and for programs that wake one of their threads.
    pub fn post(&self, kind: EventKind, status: i32) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        if inner.life.state() == State::Destroyed {
            return Err(CmError::Invalid("destroyed"));
        }
        self.report(&mut inner, kind, status);
        Ok(())
    }

    /// Makes the id report to another channel. Its queued events move to that channel, and so do the new ids
    /// of queued requests: a program that takes a request there also waits there for the events that follow.
    pub fn migrate(&self, channel: &Arc<EventChannel>) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        if inner.life.state() == State::Destroyed {
            return Err(CmError::Invalid("destroyed"));
        }
        let old = std::mem::replace(&mut inner.channel, Arc::clone(channel));
        for event in old.take(self.key) {
            if event.kind == EventKind::ConnectRequest {
                // Refused only if it is destroyed, which the program cannot do before it has taken the event.
                let _ = event.id.migrate(channel);
            }
            channel.push(event);
        }
        Ok(())
    }

    /// Blocks until all events that were reported for this id have been acknowledged.
    pub fn wait_acknowledged(&self) {
        let mut events = self.events.lock();
        while events.acknowledged < events.reported {
            self.acknowledged.wait(&mut events);
        }
    }

    /// Destroys the id: a listener stops, a request is rejected, an attempt is cancelled, a connection is
    /// disconnected. Events that were not taken yet are dropped.
    ///
    /// Blocks until all reported events have been acknowledged.
    pub fn destroy(&self) {
        let mut inner = self.inner.lock();
        let before = inner.life.state();
        if inner.life.take(Step::Destroy).is_err() {
            return;
        }
        let active = inner.active.take();
        let listener = inner.listener.take();
        let pending = inner.pending.take();
        (inner.unreported_end, inner.ready_timer, inner.timewait) = (None, None, None);
        let qp = inner.qp.take();
        let stand_in = inner.stand_in.take();
        let datagrams = std::mem::take(&mut inner.datagrams);
        inner.bound = None;
        let claim = inner.claim.take();
        let channel = Arc::clone(&inner.channel);
        drop(inner);

        if let Some(active) = active {
            active.cancel();
        }
        if let Some(listener) = listener {
            listener.cancel();
        }
        datagrams.close();
        // The port becomes free after its socket is closed.
        drop(claim);
        if let Some(pending) = pending {
            pending.reject(&[]);
        }
        self.unpark();
        self.no_longer_answered();
        if let Some(qp) = qp
            && matches!(before, State::Established | State::Responded | State::Accepting | State::Connecting)
        {
            qp.disconnect();
        }
        drop(stand_in);
        for event in channel.take(self.key) {
            if event.kind == EventKind::ConnectRequest {
                // The program will never see this id.
                event.id.destroy();
            }
        }
        self.wait_acknowledged();
    }

    fn report(&self, inner: &mut MutexGuard<'_, Inner>, kind: EventKind, status: i32) {
        if let Some(me) = self.me.upgrade() {
            Self::push(inner, Event::plain(&me, kind, status));
        }
    }

    /// Reports nothing for an id that the program has destroyed. The call may have returned while no lock was
    /// held, and the program may use the id's memory for something else by now.
    fn push(inner: &mut MutexGuard<'_, Inner>, event: Event) {
        if inner.life.state() != State::Destroyed {
            inner.channel.push(event);
        }
    }

    /// Depths for negotiation, from the program's numbers (rdma_connect(3), rdma_accept(3)).
    fn depths(&self, param: ConnParam, requested: Option<ConnParam>) -> Result<Depths, CmError> {
        let max = self.cm.max_depth();
        let depth = |given: u8, asked: Option<u8>| match given {
            MAX_DEPTH => Ok(asked.map_or(max, |asked| u16::from(asked).min(max))),
            given if u16::from(given) > max => {
                Err(CmError::Invalid("the read depth is above the device's limit"))
            }
            given => Ok(u16::from(given)),
        };
        Ok(Depths::negotiated(
            depth(param.responder_resources, requested.map(|asked| asked.responder_resources))?,
            depth(param.initiator_depth, requested.map(|asked| asked.initiator_depth))?,
        ))
    }
}

impl Owner for Id {
    fn key(&self) -> u64 {
        self.key
    }

    fn request_delivered(&self) {
        let listener = self.inner.lock().listener.clone();
        if let Some(listener) = listener {
            listener.request_delivered();
        }
    }

    fn event_reported(&self) {
        self.events.lock().reported += 1;
    }

    fn event_acknowledged(&self) {
        let mut events = self.events.lock();
        events.acknowledged += 1;
        if events.acknowledged >= events.reported {
            self.acknowledged.notify_all();
        }
    }
}

impl std::fmt::Debug for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Id").field("key", &self.key).field("state", &self.state()).finish_non_exhaustive()
    }
}

impl Inner {
    /// Takes a step to [`State::Closed`] if the table allows it; from then on only the program uses the queue
    /// pair.
    fn conclude(&mut self, step: Step) -> bool {
        let ended = self.life.take(step).is_ok();
        if ended {
            self.qp = None;
        }
        ended
    }
}

/// Moves a queue pair whose connection failed to the error state.
fn fail(qp: &Qp) {
    let change = QpModify { state: Some(QpState::Err), ..QpModify::default() };
    // Refused only in a forked child, which has no connections.
    let _ = qp.modify(&change);
}

/// A program gets only an errno. This logs what is special here: once for each address, and only for the
/// first few addresses, since some programs try one port after the other.
fn explain(errno: Errno, address: SocketAddr) {
    const ENOUGH: usize = 16;
    static SAID: Mutex<Vec<SocketAddr>> = Mutex::new(Vec::new());
    if errno != Errno::ADDRINUSE && !(errno == Errno::ADDRNOTAVAIL && route::is_any(address.ip())) {
        return;
    }
    let mut said = SAID.lock();
    if said.len() >= ENOUGH || said.contains(&address) {
        return;
    }
    said.push(address);
    drop(said);
    tracing::warn!(
        "{address} is in use: RDMA ports are TCP ports here, so any TCP program of this host may have it \
         (\"ss -tanp\" tells which)"
    );
}

/// A link-local address means nothing without its interface.
fn check_scope(address: SocketAddr) -> Result<(), CmError> {
    match address {
        SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() && v6.scope_id() == 0 => {
            Err(CmError::Invalid("link-local address without a scope id"))
        }
        _ => Ok(()),
    }
}

fn check_private_data(private_data: &[u8]) -> Result<(), CmError> {
    if private_data.len() > MAX_PRIVATE_DATA {
        return Err(CmError::Invalid("too much private data"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
