//! An id: one end of a connection, or a listener, as programs handle it.

mod by_number;
mod stream;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::io::Errno;
use uwarp_driver::config::Config;
use uwarp_driver::{Disconnect, Qp, StreamObserver as _, Token};
use uwarp_proto::setup::{AcceptParams, Depths, InitiatorConfig, Rtr, SetupError};
use uwarp_rnic::qp::QpState;

use self::by_number::Parked;
use self::stream::{agreed, answer_no, fail, peer_data};
use crate::active::{Active, Target};
use crate::cm::{Cm, Options, revision};
use crate::event::{ConnParam, Event, EventKind, MAX_DEPTH, MAX_PRIVATE_DATA};
use crate::listener::{Listener, Pending};
use crate::ports::{Claim, Taken};
use crate::state::{State, Step};
use crate::timeouts::{ACK_TIMEOUT, RETRIES};
use crate::{CmError, EventChannel, socket};

/// One end of a connection, or a listener.
pub struct Id {
    key: u64,
    cm: Arc<Cm>,
    me: Weak<Self>,
    /// For the owner's use.
    cookie: AtomicUsize,
    inner: Mutex<Inner>,
    events: Mutex<EventCount>,
    acknowledged: Condvar,
}

struct Inner {
    state: State,
    channel: Arc<EventChannel>,
    options: Options,
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
    /// Bound by the program, and not yet connecting or listening.
    bound: Option<OwnedFd>,
    /// Its port, where the program has bound it: until it is destroyed.
    claim: Option<Claim>,
    active: Option<Arc<Active>>,
    listener: Option<Arc<Listener>>,
    pending: Option<Pending>,
    qp: Option<Arc<Qp>>,
    /// The queue pair that the program sees to itself, until it is `qp`.
    by_number: Option<Weak<Qp>>,
    /// The connection that waits for it.
    parked: Option<Parked>,
    /// The queue pair whose connection has ended. It may not have heard of that: the program still has to disconnect.
    left: Option<Weak<Qp>>,
    /// What the peer said of itself.
    peer_param: ConnParam,
    /// What the request asked for; for an accept without parameters.
    requested: ConnParam,
    /// Our parameters while a connection comes into being.
    conn_param: ConnParam,
    /// Reported with [`EventKind::Established`].
    outcome: (ConnParam, Vec<u8>),
    /// Runs while the peer has yet to show itself.
    ready_timer: Option<Token>,
    /// Runs after the end of a connection, until [`EventKind::TimewaitExit`].
    timewait: Option<Token>,
    /// Runs while the end of the connection is not reported yet: the program has completions to poll first.
    unreported_end: Option<Token>,
    /// Whether there ever was a connection or an attempt at one.
    has_connected: bool,
}

#[derive(Debug, Default)]
struct EventCount {
    reported: u64,
    acknowledged: u64,
}

impl Id {
    /// A fresh id that reports to this channel.
    pub fn new(cm: &Arc<Cm>, channel: &Arc<EventChannel>) -> Arc<Self> {
        Self::with_state(cm, channel, State::Idle)
    }

    fn with_state(cm: &Arc<Cm>, channel: &Arc<EventChannel>, state: State) -> Arc<Self> {
        let key = cm.next_key();
        Arc::new_cyclic(|me| Self {
            key,
            cm: Arc::clone(cm),
            me: Weak::clone(me),
            cookie: AtomicUsize::new(0),
            inner: Mutex::new(Inner {
                state,
                channel: Arc::clone(channel),
                options: Options::default(),
                local: None,
                peer: None,
                bound: None,
                claim: None,
                active: None,
                listener: None,
                pending: None,
                qp: None,
                by_number: None,
                parked: None,
                left: None,
                peer_param: ConnParam::NONE,
                requested: ConnParam::NONE,
                conn_param: ConnParam::NONE,
                outcome: (ConnParam::NONE, Vec::new()),
                ready_timer: None,
                timewait: None,
                unreported_end: None,
                has_connected: false,
            }),
            events: Mutex::default(),
            acknowledged: Condvar::new(),
        })
    }

    /// Unique among the ids of a connection manager, never 0.
    pub fn key(&self) -> u64 {
        self.key
    }

    /// What the owner has stored; 0 at first.
    pub fn cookie(&self) -> usize {
        self.cookie.load(Ordering::Acquire)
    }

    /// Stores a value for the owner.
    pub fn set_cookie(&self, cookie: usize) {
        self.cookie.store(cookie, Ordering::Release);
    }

    /// Where it stands.
    pub fn state(&self) -> State {
        self.inner.lock().state
    }

    /// The local address, as far as it is known.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.inner.lock().local
    }

    /// The remote address, as far as it is known.
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

    /// The time limit that its queue pair's attributes show.
    pub fn ack_timeout(&self) -> u8 {
        self.options().ack_timeout.unwrap_or(ACK_TIMEOUT)
    }

    /// Sets options. They take effect on what is done afterwards; the type of service also where a socket is bound or a
    /// request waits.
    pub fn set_options(
        &self,
        change: impl FnOnce(State, &mut Options) -> Result<(), CmError>,
    ) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        let state = inner.state;
        let before = inner.options.tos;
        change(state, &mut inner.options)?;
        if let (Some(tos), Some(local)) =
            (inner.options.tos.filter(|_| inner.options.tos != before), inner.local)
            && let Some(fd) = inner.bound.as_ref().or(inner.pending.as_ref().map(|pending| &pending.fd))
        {
            socket::set_tos(fd, local, tos)?;
        }
        Ok(())
    }

    /// Binds to a local address; port 0 takes a free one, which [`Id::local_address`] then says. The port is taken from the
    /// host's TCP ports, because that is where connections arrive.
    pub fn bind(&self, address: SocketAddr) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        self.bind_locked(&mut inner, address)
    }

    fn bind_locked(&self, inner: &mut MutexGuard<'_, Inner>, address: SocketAddr) -> Result<(), CmError> {
        let state = inner.after(Step::Bind)?;
        check_scope(address)?;
        let fd = socket::tcp(address, &inner.options)?;
        let ports = self.cm.ports();
        let wanted = self.port(&inner.options, address);
        ports.check(wanted)?;
        let bound =
            socket::bind(&fd, address, &inner.options).inspect_err(|errno| explain(*errno, address))?;
        inner.local = Some(bound);
        inner.bound = Some(fd);
        inner.claim = None;
        inner.claim = Some(ports.claim(Taken { address: bound, ..wanted }));
        inner.state = state;
        Ok(())
    }

    /// What the id wants to have, in the words of the table of ports.
    fn port(&self, options: &Options, address: SocketAddr) -> Taken {
        let afonly = address.is_ipv4() || options.afonly.unwrap_or_else(socket::ipv6_only_by_default);
        Taken { key: self.key, address, reuse: options.reuseaddr, afonly }
    }

    /// Finds the way to `peer`. Answered by [`EventKind::AddressResolved`] or [`EventKind::AddressError`], at once.
    ///
    /// An id that is not bound gets the local address that the routing table gives, or `source`. Without a port in
    /// `source` it gets one when it connects. A wildcard peer is this host.
    pub fn resolve_address(&self, source: Option<SocketAddr>, peer: SocketAddr) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        let state = inner.after(Step::ResolveAddress)?;
        check_scope(peer)?;
        let peer = socket::loopback_if_wildcard(peer);
        if inner.state == State::Idle
            && let Some(source) = source
            && (source.port() != 0 || !source.ip().is_unspecified())
        {
            self.bind_locked(&mut inner, source)?;
        }
        if inner.local.is_some_and(|local| local.is_ipv4() != peer.is_ipv4()) {
            return Err(CmError::Invalid("local and remote address are of different families"));
        }
        match socket::source_for(inner.local.map(|local| local.ip()), peer) {
            Ok(ip) => {
                let local = inner.local.get_or_insert(SocketAddr::new(ip, 0));
                if local.ip().is_unspecified() {
                    local.set_ip(ip);
                }
                inner.peer = Some(peer);
                inner.state = state;
                self.report(&mut inner, EventKind::AddressResolved, 0);
            }
            Err(errno) => {
                inner.state = inner.after(Step::AddressError)?;
                self.report(&mut inner, EventKind::AddressError, -errno.raw_os_error());
            }
        }
        Ok(())
    }

    /// Finds the route; over TCP there is nothing to find. Answered by [`EventKind::RouteResolved`], at once.
    pub fn resolve_route(&self) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        inner.state = inner.after(Step::ResolveRoute)?;
        self.report(&mut inner, EventKind::RouteResolved, 0);
        Ok(())
    }

    /// Takes connection requests from now on; each comes as [`EventKind::ConnectRequest`]. An id that is not bound is
    /// bound to the IPv4 wildcard and a free port.
    ///
    /// `backlog`: how many requests may wait for [`EventChannel::get`]; 0 or less: many. Connections beyond that wait in
    /// the kernel.
    pub fn listen(self: &Arc<Self>, backlog: i32) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        inner.after(Step::Listen)?;
        if inner.state == State::Idle {
            self.bind_locked(&mut inner, SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0))?;
        }
        let local = inner.local;
        if let Some(local) = local {
            self.cm.ports().check(Taken { reuse: false, ..self.port(&inner.options, local) })?;
        }
        let fd = inner.bound.take().ok_or(CmError::Invalid("not bound"))?;
        inner.state = State::Listening;
        // The lock is held meanwhile: a request that comes at once, and is taken at once, has to find the listener.
        match Listener::start(&self.cm, self, fd, Listener::backlog(backlog)) {
            Ok(listener) => {
                inner.listener = Some(listener);
                if let Some(claim) = &inner.claim {
                    claim.alone();
                }
                Ok(())
            }
            Err(errno) => {
                // Back to where it was, on a new socket, because the old one is gone with the attempt.
                inner.state = State::Idle;
                if let Some(local) = local {
                    explain(errno, local);
                    let _ = self.bind_locked(&mut inner, local);
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
        let mut inner = self.inner.lock();
        let state = inner.after(Step::Connect)?;
        let peer = inner.peer.ok_or(CmError::Invalid("no remote address"))?;
        inner.state = state;
        // What the program bound itself is what a second attempt binds again.
        let local = inner.bound.as_ref().and(inner.local);
        let target = Target { local, peer, options: inner.options, private_data: private_data.to_vec() };
        let bound = inner.bound.take();
        inner.qp = (!by_number).then(|| Arc::clone(qp));
        inner.by_number = by_number.then(|| Arc::downgrade(qp));
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
            peer: config.find_uwarp_peers.then(|| peer_data(qp, param)),
            peer_in_request: by_number,
        };
        match Active::start(&self.cm, self, target, config, bound) {
            Ok(active) => {
                let mut inner = self.inner.lock();
                if inner.state == State::Connecting {
                    inner.active = Some(active);
                } else {
                    // It has ended already, or was given up by another thread.
                    drop(inner);
                    active.cancel();
                }
                Ok(())
            }
            Err(errno) => {
                let mut inner = self.inner.lock();
                if inner.state == State::Connecting {
                    inner.state = State::RouteResolved;
                    inner.qp = None;
                }
                Err(errno.into())
            }
        }
    }

    /// Accepts the request with this queue pair. Answered by [`EventKind::Established`] or [`EventKind::ConnectError`].
    ///
    /// `param`: `None` takes the depths that the request asks for. After an error the request is gone.
    pub fn accept(
        self: &Arc<Self>,
        qp: &Arc<Qp>,
        param: Option<ConnParam>,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        check_private_data(private_data)?;
        let mut inner = self.inner.lock();
        let accepting = inner.after(Step::Accept)?;
        let param = param.unwrap_or(ConnParam { rnr_retry_count: 7, ..inner.requested });
        // "This value is ignored" (rdma_accept(3)); that of the peer's program is not told.
        let param = ConnParam { retry_count: RETRIES, ..param };
        let depths = self.depths(param, Some(inner.requested))?;
        let Some(mut pending) = inner.pending.take() else { return Err(CmError::Invalid("no request")) };
        self.cm.no_longer_awaits(self.key);
        let peer = peer_data(qp, param);
        let negotiated = pending.responder.accept(AcceptParams { depths, peer }, private_data).map_err(
            |error| match error {
                SetupError::PrivateDataLimit { .. } => CmError::Invalid("too much private data"),
                _ => CmError::Invalid("no request"),
            },
        )?;
        while let Some(reply) = pending.responder.poll_transmit() {
            if let Err(errno) = socket::send_all(&pending.fd, &reply) {
                inner.state = State::Closed;
                drop(inner);
                // As librdmacm: the receives that were posted for the connection are flushed.
                fail(qp);
                // The peer gave up before we answered, which is the usual reason.
                let errno = if errno == Errno::PIPE { Errno::CONNRESET } else { errno };
                return Err(errno.into());
            }
        }
        inner.state = accepting;
        inner.qp = Some(Arc::clone(qp));
        inner.conn_param = param;
        inner.has_connected = true;
        inner.outcome = (agreed(&negotiated, inner.requested), Vec::new());
        drop(inner);
        // Without an indication to wait for, the program may go on; the stream itself holds back until the peer's
        // first FPDU (RFC 5044 section 7.1.2 rule 4).
        let ready = negotiated.rtr == Rtr::None;
        self.attach(qp, pending.fd, &negotiated, param).inspect_err(|_| {
            self.inner.lock().conclude(Step::Failed);
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
        inner.state = inner.after(Step::Reject)?;
        let pending = inner.pending.take();
        drop(inner);
        self.cm.no_longer_awaits(self.key);
        if let Some(pending) = pending {
            answer_no(pending, private_data);
        }
        Ok(())
    }

    /// Ends the connection: queued work goes out as far as it can in bounded time. Answered by
    /// [`EventKind::Disconnected`] at both ends. Where the peer was first, nothing more happens.
    pub fn disconnect(&self) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        if let Some(timer) = inner.unreported_end.take() {
            drop(inner);
            self.cm.engine().deregister(timer);
            self.stream_ended();
            inner = self.inner.lock();
        }
        match inner.state {
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
                    // Destroyed without our knowing, so its stream ended and no call to us followed.
                    if qp.query().state == QpState::Reset {
                        self.queue_pair_destroyed();
                    }
                }
                Ok(())
            }
            State::Connecting => {
                let active = inner.active.take();
                let qp = inner.qp.clone();
                // An attempt that is given up ends like one that fails.
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

    /// The program has destroyed the id's queue pair, which ends a connection without a call to the observer. Reported as
    /// [`EventKind::Disconnected`], as a device in the kernel does.
    pub fn queue_pair_destroyed(&self) {
        self.disconnected(Disconnect::LocalClosed);
    }

    /// Queues an event that is not the connection manager's own: for calls that answer by event and do their work
    /// elsewhere, and for programs that wake a thread.
    pub fn post(&self, kind: EventKind, status: i32) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        if inner.state == State::Destroyed {
            return Err(CmError::Invalid("destroyed"));
        }
        self.report(&mut inner, kind, status);
        Ok(())
    }

    /// Makes the id report to another channel; events that it has queued move along.
    pub fn migrate(&self, channel: &Arc<EventChannel>) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        if inner.state == State::Destroyed {
            return Err(CmError::Invalid("destroyed"));
        }
        let old = std::mem::replace(&mut inner.channel, Arc::clone(channel));
        for event in old.take(self.key) {
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

    /// Gives the id up: a listener stops, a request is rejected, an attempt is abandoned, a connection is
    /// disconnected. Events that were not reported yet are dropped.
    ///
    /// Blocks until all reported events have been acknowledged.
    pub fn destroy(&self) {
        let mut inner = self.inner.lock();
        let before = inner.state;
        let Ok(after) = inner.after(Step::Destroy) else { return };
        inner.state = after;
        let active = inner.active.take();
        let listener = inner.listener.take();
        let pending = inner.pending.take();
        let timers = [inner.ready_timer.take(), inner.timewait.take(), inner.unreported_end.take()];
        let qp = inner.qp.take();
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
        // The port is free when its socket is.
        drop(claim);
        if let Some(pending) = pending {
            answer_no(pending, &[]);
        }
        self.unpark();
        for timer in timers.into_iter().flatten() {
            self.cm.engine().deregister(timer);
        }
        if let Some(qp) = qp
            && matches!(before, State::Established | State::Responded | State::Accepting | State::Connecting)
        {
            qp.disconnect();
        }
        for event in channel.take(self.key) {
            if event.kind == EventKind::ConnectRequest {
                // Nobody will ever see this id.
                event.id.destroy();
            }
        }
        self.wait_acknowledged();
    }

    pub(crate) fn request_delivered(&self) {
        let listener = self.inner.lock().listener.clone();
        if let Some(listener) = listener {
            listener.request_delivered();
        }
    }

    pub(crate) fn event_reported(&self) {
        self.events.lock().reported += 1;
    }

    pub(crate) fn event_acknowledged(&self) {
        let mut events = self.events.lock();
        events.acknowledged += 1;
        if events.acknowledged >= events.reported {
            self.acknowledged.notify_all();
        }
    }

    fn report(&self, inner: &mut MutexGuard<'_, Inner>, kind: EventKind, status: i32) {
        if let Some(me) = self.me.upgrade() {
            Self::push(inner, Event::plain(&me, kind, status));
        }
    }

    /// Nothing is reported of an id that the program has destroyed: the call may have returned while no lock was held, and what the
    /// id was may be something else by now.
    fn push(inner: &mut MutexGuard<'_, Inner>, event: Event) {
        if inner.state != State::Destroyed {
            inner.channel.push(event);
        }
    }

    /// Depths for negotiation, from the program's numbers (rdma_connect(3), rdma_accept(3)).
    fn depths(&self, param: ConnParam, requested: Option<ConnParam>) -> Result<Depths, CmError> {
        let max = self.cm.max_depth();
        let depth = |given: u8, asked: Option<u8>| match given {
            MAX_DEPTH => Ok(asked.map_or(max, |asked| u16::from(asked).min(max))),
            given if u16::from(given) > max => Err(CmError::Invalid("read depth above the device's")),
            given => Ok(u16::from(given)),
        };
        Ok(Depths::negotiated(
            depth(param.responder_resources, requested.map(|asked| asked.responder_resources))?,
            depth(param.initiator_depth, requested.map(|asked| asked.initiator_depth))?,
        ))
    }
}

impl std::fmt::Debug for Id {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Id").field("key", &self.key).field("state", &self.state()).finish_non_exhaustive()
    }
}

impl Inner {
    fn after(&self, step: Step) -> Result<State, CmError> {
        self.state.next(step).ok_or(CmError::Invalid("not allowed in the id's state"))
    }

    /// Takes a step towards [`State::Closed`] if it is one here; the queue pair is then the program's alone again.
    fn conclude(&mut self, step: Step) -> bool {
        let Some(state) = self.state.next(step) else { return false };
        self.state = state;
        self.qp = None;
        true
    }
}

/// A program gets no more than an errno; what is peculiar here is said, once for each address. One that goes through
/// the ports until it finds a free one has heard enough after some.
fn explain(errno: Errno, address: SocketAddr) {
    const ENOUGH: usize = 16;
    static SAID: Mutex<Vec<SocketAddr>> = Mutex::new(Vec::new());
    if errno != Errno::ADDRINUSE && !(errno == Errno::ADDRNOTAVAIL && socket::is_any(address.ip())) {
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
