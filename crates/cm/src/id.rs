//! An id: one end of a connection, or a listener, as programs handle it. What it is and what happens to it
//! is [`crate::machine::life`]'s; this is that machine's shell.
//!
//! ```text
//!   program ─ call ─▶ Id ─ check, system calls, step ─▶ Runner ─▶ Life ─▶ Owner ─▶ event queue, tables
//!                                                          ▲ ▼
//!                                     engine, queue pair ──┘ └─▶ queue pair; the listener's runner
//! ```

mod by_number;
mod datagrams;
mod owner;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use uwarp_driver::Qp;
use uwarp_llp::carrier::{Bind, SetUp, TakePort};
use uwarp_llp::route;
use uwarp_llp::udp::Socket;
use uwarp_process::{Condvar, Mutex, PerProcess};
use uwarp_rnic::qp::QpState;

use crate::EventChannel;
use crate::carriers::carrier;
use crate::cm::{Cm, Options};
use crate::error::CmError;
use crate::event::{self, ConnParam, EventKind};
use crate::machine::ConnKey;
use crate::machine::life::{Life, Ours, Pair};
use crate::machine::listener::Listener;
use crate::machine::run::Conns;
use crate::ports::Taken;
use crate::runner::{Runner, Watched};
use crate::state::{State, Step};
use crate::timeouts::ACK_TIMEOUT;

pub use crate::machine::life::QKEY;
use owner::{Origin, Owner};

/// One end of a connection, or a listener.
pub struct Id {
    runner: Arc<LifeRunner>,
    /// The program's value.
    cookie: AtomicUsize,
    events: Mutex<EventCount, 15>,
    acknowledged: Condvar,
}

type LifeRunner = Runner<Life, Owner>;

#[derive(Debug, Default)]
struct EventCount {
    reported: u64,
    acknowledged: u64,
}

impl Id {
    /// A new id that reports to this channel.
    pub fn new(cm: &Arc<Cm>, channel: &Arc<EventChannel>) -> Arc<Self> {
        Self::start(cm, channel, Options::default(), Life::new(cm.rules()), None, None)
    }

    /// As [`Self::new`], for datagrams; `port_space` as on the wire.
    pub fn of_datagrams(cm: &Arc<Cm>, channel: &Arc<EventChannel>, port_space: u16) -> Arc<Self> {
        Self::start(cm, channel, Options::default(), Life::of_datagrams(cm.rules(), port_space), None, None)
    }

    /// `origin`: of an id that came as a request; `conn`: its connection.
    fn start(
        cm: &Arc<Cm>,
        channel: &Arc<EventChannel>,
        options: Options,
        life: Life,
        origin: Option<Origin>,
        conn: Option<(ConnKey, Box<dyn SetUp>)>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|me| {
            let owner = Owner::new(Weak::clone(me), cm, life.is_datagram(), origin, channel, options);
            Self {
                runner: Runner::start(cm.engine(), owner, life, conn),
                cookie: AtomicUsize::new(0),
                events: Mutex::default(),
                acknowledged: Condvar::new(),
            }
        })
    }

    fn owner(&self) -> &Owner {
        self.runner.env()
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
        self.runner.read(Life::state)
    }

    /// Whether this is an id of datagrams.
    pub fn is_datagram(&self) -> bool {
        self.owner().is_datagram
    }

    /// The local address, if it is known.
    pub fn local_address(&self) -> Option<SocketAddr> {
        self.runner.read(Life::local)
    }

    /// The remote address, if it is known.
    pub fn peer_address(&self) -> Option<SocketAddr> {
        self.runner.read(Life::peer)
    }

    /// Where its events go.
    pub fn channel(&self) -> Arc<EventChannel> {
        self.owner().channel()
    }

    /// Its options.
    pub fn options(&self) -> Options {
        self.owner().kept.lock().options
    }

    /// The time limit that the attributes of its queue pair show.
    pub fn ack_timeout(&self) -> u8 {
        self.options().ack_timeout.unwrap_or(ACK_TIMEOUT)
    }

    /// The retry count that queries show. TCP does not count retries.
    pub fn retries(&self) -> u8 {
        self.runner.read(Life::retries)
    }

    /// The peer's parameters from its request or its reply; zero before that, and for those that the peer
    /// does not name.
    pub fn peer_param(&self) -> ConnParam {
        self.runner.read(Life::peer_param)
    }

    /// Sets options. They take effect on later calls; the type of service also on a socket that is bound and
    /// on a request that waits.
    pub fn set_options(
        &self,
        change: impl FnOnce(State, &mut Options) -> Result<(), CmError>,
    ) -> Result<(), CmError> {
        self.runner.call_with(|life, conns, _| {
            let before = self.options();
            let mut options = before;
            change(life.state(), &mut options)?;
            self.owner().kept.lock().options = options;
            conns.set_options(options.of_sockets());
            life.set_ack_timeout(options.ack_timeout);
            match options.tos.filter(|_| options.tos != before.tos) {
                Some(tos) if life.takes_tos() => Ok(conns.set_tos(tos)?),
                _ => Ok(()),
            }
        })
    }

    /// Binds to a local address; port 0 takes a free one, which [`Id::local_address`] then returns. The port
    /// is one of the host's TCP ports, because connections arrive there.
    pub fn bind(&self, address: SocketAddr) -> Result<(), CmError> {
        self.runner.call_with(|life, conns, _| self.bind_locked(life, conns, address))
    }

    fn bind_locked(
        &self,
        life: &mut Life,
        conns: &mut Conns<Watched>,
        address: SocketAddr,
    ) -> Result<(), CmError> {
        life.check(Step::Bind)?;
        check_scope(address)?;
        let owner = self.owner();
        if owner.is_datagram {
            let socket =
                Socket::bind_address(address).inspect_err(|errno| explain_foreign(*errno, address))?;
            let local = SocketAddr::new(address.ip(), socket.port()?);
            owner.kept.lock().bound = Some(Arc::new(socket));
            return life.bind(local);
        }
        let options = self.options();
        let ports = owner.cm.ports();
        let wanted = self.port(&options, address);
        ports.check(wanted)?;
        let bind = Bind { address, port: TakePort::Now, options: options.of_sockets() };
        let socket = carrier().bind(&bind).inspect_err(|errno| explain(*errno, address))?;
        let local = socket.local();
        conns.set_bound(socket);
        let mut kept = owner.kept.lock();
        kept.claim = None;
        kept.claim = Some(ports.claim(Taken { address: local, ..wanted }));
        drop(kept);
        life.bind(local)
    }

    /// The port that the id wants, as an entry of the table of ports.
    fn port(&self, options: &Options, address: SocketAddr) -> Taken {
        let afonly = address.is_ipv4() || options.afonly.unwrap_or_else(route::ipv6_only_by_default);
        Taken { key: self.owner().key, address, reuse: options.reuseaddr, afonly }
    }

    /// Finds the route to `peer`. Answered by [`EventKind::AddressResolved`] or [`EventKind::AddressError`],
    /// at once.
    ///
    /// An id that is not bound gets the local address that the routing table gives, or `source`. Without a
    /// port in `source` it gets one when it connects. A wildcard peer is this host.
    pub fn resolve_address(&self, source: Option<SocketAddr>, peer: SocketAddr) -> Result<(), CmError> {
        self.runner.call_with(|life, conns, _| {
            life.check(Step::ResolveAddress)?;
            check_scope(peer)?;
            let peer = route::loopback_if_wildcard(peer);
            if life.state() == State::Idle
                && let Some(source) = source
                && (source.port() != 0 || !source.ip().is_unspecified())
            {
                self.bind_locked(life, conns, source)?;
            }
            let bound = life.local().map(|local| local.ip());
            let source = route::source_for(bound, peer, life.is_datagram());
            life.resolve_address(peer, source)?;
            if let Err(errno) = source {
                explain_no_route(errno, peer.ip());
            }
            Ok(())
        })
    }

    /// Finds the route; over TCP there is nothing to find. Answered by [`EventKind::RouteResolved`], at once.
    pub fn resolve_route(&self) -> Result<(), CmError> {
        self.runner.call(|life, _| life.resolve_route())
    }

    /// Takes connection requests from now on; each is reported as [`EventKind::ConnectRequest`]. An id that
    /// is not bound is bound to the IPv4 wildcard address and a free port.
    ///
    /// `backlog`: how many requests may wait for [`EventChannel::get`]; 0 or less: the maximum. Further
    /// connections wait in the kernel.
    pub fn listen(&self, backlog: i32) -> Result<(), CmError> {
        let backlog = Listener::backlog(backlog);
        let owner = self.owner();
        let key = if owner.is_datagram { owner::random_key()? } else { [0; 16] };
        let mut address = None;
        let listens = self.runner.ask(|life, conns, now| {
            life.check(Step::Listen)?;
            if life.state() == State::Idle {
                self.bind_locked(life, conns, SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0))?;
            }
            if owner.is_datagram {
                return life.serve(now, &key, backlog);
            }
            if let Some(local) = life.local() {
                owner.cm.ports().check(Taken { reuse: false, ..self.port(&self.options(), local) })?;
            }
            life.listen(backlog, owner.cm.budget())?;
            address = life.local();
            Ok(())
        });
        match listens {
            Ok(()) => {
                if let Some(claim) = &owner.kept.lock().claim {
                    claim.alone();
                }
            }
            Err(CmError::System(errno)) => address.into_iter().for_each(|address| explain(errno, address)),
            Err(_) => {}
        }
        listens
    }

    /// Connects the queue pair to the peer. Answered by [`EventKind::Established`], [`EventKind::Rejected`],
    /// [`EventKind::Unreachable`] or [`EventKind::ConnectError`].
    pub fn connect(&self, qp: &Arc<Qp>, param: ConnParam, private_data: &[u8]) -> Result<(), CmError> {
        self.connect_as(Pair::Own(qp.qpn()), qp, param, private_data)
    }

    fn connect_as(
        &self,
        pair: Pair,
        qp: &Arc<Qp>,
        param: ConnParam,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        // Without the runner's lock, here and below: the queue pair has one of its own.
        let ours = Ours { pair, min_rnr_timer: qp.query().min_rnr_timer, private_data };
        self.runner.ask(|life, _, now| {
            life.connect(now, ours, param)?;
            self.owner().take_pair(pair, qp);
            Ok(())
        })
    }

    /// Accepts the request with this queue pair. Answered by [`EventKind::Established`] or
    /// [`EventKind::ConnectError`].
    ///
    /// `param`: `None` takes the depths that the request asks for. After an error the request is gone, unless
    /// it is `EINVAL`.
    pub fn accept(&self, qp: &Arc<Qp>, param: Option<ConnParam>, private_data: &[u8]) -> Result<(), CmError> {
        self.accept_as(Pair::Own(qp.qpn()), qp, param, private_data)
    }

    fn accept_as(
        &self,
        pair: Pair,
        qp: &Arc<Qp>,
        param: Option<ConnParam>,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        let ours = Ours { pair, min_rnr_timer: qp.query().min_rnr_timer, private_data };
        self.runner.read(|life| life.check(Step::Accept))?;
        // The peer can connect again as soon as it has the reply.
        self.owner().answered();
        let mut begun = false;
        let accepted = self.runner.ask(|life, _, now| {
            life.accept(now, ours, param)?;
            begun = true;
            self.owner().take_pair(pair, qp);
            Ok(())
        });
        if !begun {
            // Its peer's next request does not wait for this connection. (If another thread has accepted
            // meanwhile, it does not either: such a program does not rely on the order.)
            self.owner().unanswered();
        }
        accepted
    }

    /// Rejects the request.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), CmError> {
        self.runner.call(|life, now| life.reject(now, private_data))
    }

    /// Ends the connection. Posted work is sent as far as possible in bounded time. Answered by
    /// [`EventKind::Disconnected`] at both ends. If the peer has disconnected already, nothing more happens.
    pub fn disconnect(&self) -> Result<(), CmError> {
        let (leaves, state) =
            self.runner.call(|life, now| life.disconnect(now).map(|leaves| (leaves, life.state())))?;
        if leaves && let Some(qp) = self.owner().pair() {
            qp.leave_gone_peer();
        }
        if matches!(state, State::Established | State::Responded | State::Accepting)
            && self.owner().pair().is_some_and(|qp| qp.query().state == QpState::Reset)
        {
            // The program has destroyed the connection's queue pair without a call to us, so its end was not
            // reported.
            self.queue_pair_destroyed();
        }
        Ok(())
    }

    /// The program has destroyed the id's queue pair, which ends the connection without a call to the
    /// observer. Reported as [`EventKind::Disconnected`], as by a device in the kernel.
    pub fn queue_pair_destroyed(&self) {
        self.runner.call(Life::queue_pair_destroyed);
    }

    /// Queues an event that does not come from the connection manager: for calls that answer by event and do
    /// their work elsewhere, and for programs that wake one of their threads.
    pub fn post(&self, kind: EventKind, status: i32) -> Result<(), CmError> {
        self.runner.call(|life, _| life.post(kind, status))
    }

    /// Makes the id report to another channel. Its queued events move to that channel, and so do the new ids
    /// of queued requests: a program that takes a request there also waits there for the events that follow.
    pub fn migrate(&self, channel: &Arc<EventChannel>) -> Result<(), CmError> {
        // Under the runner's lock: no event is reported meanwhile.
        self.runner.call(|life, _| {
            life.check_alive()?;
            let old = self.owner().set_channel(channel);
            for event in old.take(self.owner().key) {
                if event.kind == EventKind::ConnectRequest {
                    // It reports nothing before the program has it.
                    event.id.owner().set_channel(channel);
                }
                channel.push(event);
            }
            Ok(())
        })
    }

    /// Blocks until all events that were reported for this id have been acknowledged.
    pub fn wait_acknowledged(&self) {
        let mut events = self.events.lock();
        while events.acknowledged < events.reported {
            self.acknowledged.wait(&mut events);
        }
    }

    /// Destroys the id: a listener stops, a request is rejected, an attempt is cancelled, a connection is
    /// disconnected. Events that were not taken yet are dropped, after a short time for another thread that
    /// was told of them by the channel's descriptor.
    ///
    /// Blocks until all reported events have been acknowledged. Otherwise it waits for nothing else: whoever
    /// carries out what is left may be the caller.
    pub fn destroy(&self) {
        let channel = self.channel();
        channel.let_reader_take(self.owner().key);
        drop(channel);
        let first = self.runner.end(|life, now| {
            let alive = life.check_alive();
            life.destroy(now);
            alive.is_ok()
        });
        if !first {
            return;
        }
        let owner = self.owner();
        let stand_in = owner.kept.lock().stand_in.take();
        drop(stand_in);
        for event in owner.channel().take(owner.key) {
            if event.kind == EventKind::ConnectRequest {
                // The program will never see this id.
                event.id.destroy();
            }
        }
        self.wait_acknowledged();
    }
}

impl event::Owner for Id {
    fn key(&self) -> u64 {
        self.owner().key
    }

    fn request_delivered(&self) {
        self.owner().request_delivered(&self.runner);
    }

    fn given(&self) {
        self.owner().cm.give(self.owner().key);
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
        let key = self.owner().key;
        f.debug_struct("Id").field("key", &key).field("state", &self.state()).finish_non_exhaustive()
    }
}

/// A program gets only an errno. This logs what is special here: once for each address, and only for the
/// first few addresses, since some programs try one port after the other.
fn explain(errno: Errno, address: SocketAddr) {
    explain_foreign(errno, address);
    if errno != Errno::ADDRINUSE && !(errno == Errno::ADDRNOTAVAIL && route::is_any(address.ip())) {
        return;
    }
    if is_news(address) {
        tracing::warn!(
            "{address} is in use: RDMA ports are TCP ports here, so any TCP program of this host may have it \
             (\"ss -tanp\" tells which)"
        );
    }
}

/// A server was given the address of its client, or a mistyped one.
fn explain_foreign(errno: Errno, address: SocketAddr) {
    if errno == Errno::ADDRNOTAVAIL && !route::is_any(address.ip()) && is_news(address) {
        tracing::warn!(
            "{} is not an address of this host; `uwarp devices` lists those that are",
            address.ip()
        );
    }
}

/// Programs print at most the number of the event.
fn explain_no_route(errno: Errno, peer: IpAddr) {
    if is_news(SocketAddr::new(peer, 0)) {
        tracing::warn!("no route to {peer}: {errno}. Is the address right, and is an interface up?");
    }
}

/// Whether nothing was logged about this address yet.
fn is_news(address: SocketAddr) -> bool {
    const ENOUGH: usize = 16;
    static SAID: PerProcess<Mutex<Vec<SocketAddr>, 29>> = PerProcess::new(Mutex::default);
    let mut said = SAID.lock();
    if said.len() >= ENOUGH || said.contains(&address) {
        return false;
    }
    said.push(address);
    true
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
