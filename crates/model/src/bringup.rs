//! What `uwarp-cm`'s `pairing` has around it: a reduced queue pair over the real core, connections
//! between the two ends of one process, and handshakes that threads of their own carry out, so that any
//! call of theirs may come at any moment.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::io::Errno;
use shuttle::rand::Rng;
use uwarp_proto::setup::{Initiator, InitiatorConfig, Outcome, Responder, ResponderPolicy};
use uwarp_rnic::qp::{
    Action, Disconnect, LinkEvent, Now, Psns, QpAttr, QpCaps, QpInit, QpModify, QpState, RcCore, StreamParams,
};
use uwarp_rnic::{AsyncEvent, AsyncSink, Cq, Pd, VerbsError};
use uwarp_wire::datagram::proof::Proof;

use crate::attended::Attended;
use crate::engine::Engine;
use crate::source::{Readiness, Source, Token};
use crate::sync::{LazyLock, Mutex, MutexGuard};
use crate::sys::{self, Count, Socket};
use crate::ud::ProofObserver;
use crate::udp::Route;

/// Longest time that the system and other threads take between two steps of a handshake.
const SLOW: Duration = Duration::from_micros(300);

fn at_some_moment() {
    let most = SLOW.as_micros() as u64;
    sys::sleep(Duration::from_micros(shuttle::rand::thread_rng().gen_range(0..most)));
}

/// Who listens where, and how many connections there are.
#[derive(Default)]
struct Net {
    doors: Mutex<HashMap<u16, (Weak<dyn handshake::RequestObserver>, ResponderPolicy)>>,
    proofs: Mutex<HashMap<u16, Weak<dyn ProofObserver>>>,
    open: std::sync::Mutex<usize>,
}

static NET: LazyLock<Net> = LazyLock::new(Net::default);

/// Ends of connections that are not closed.
pub fn open_connections() -> usize {
    *NET.open.lock().unwrap()
}

/// One direction.
#[derive(Default)]
struct Pipe {
    bytes: VecDeque<u8>,
    closed: bool,
}

/// Connections between the two ends.
pub mod connect {
    use super::*;

    /// Both directions: what each end has sent.
    type Wire = Arc<std::sync::Mutex<[Pipe; 2]>>;

    pub struct Connection {
        wire: Wire,
        side: usize,
        peer: SocketAddr,
        sockets: [Socket; 2],
        /// Changes at each end, for threads that wait for them.
        changes: [Count; 2],
    }

    impl std::fmt::Debug for Connection {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a connection")
        }
    }

    impl Connection {
        /// The two ends of one; the second one's peer is `from`.
        pub(crate) fn pair(from: SocketAddr, to: SocketAddr) -> [Self; 2] {
            let (wire, sockets) = (Wire::default(), [Socket::new(), Socket::new()]);
            let changes = [Count::new(), Count::new()];
            *NET.open.lock().unwrap() += 2;
            [(0, to), (1, from)].map(|(side, peer)| Self {
                wire: wire.clone(),
                side,
                peer,
                sockets: sockets.clone(),
                changes: changes.clone(),
            })
        }

        pub(crate) fn socket(&self) -> &Socket {
            &self.sockets[self.side]
        }

        pub(crate) fn is_other_end_of(&self, other: &Self) -> bool {
            Arc::ptr_eq(&self.wire, &other.wire) && self.side != other.side
        }

        fn tell_peer(&self) {
            self.sockets[1 - self.side].arrive();
            self.changes[1 - self.side].add();
        }

        /// Without telling the peer.
        pub(crate) fn put(&self, bytes: &[u8]) -> bool {
            let mut wire = self.wire.lock().unwrap();
            let gone = wire[1 - self.side].closed;
            wire[self.side].bytes.extend(bytes.iter().filter(|_| !gone));
            !gone
        }

        pub(crate) fn tell(&self) {
            self.tell_peer();
        }

        /// What has come, and whether no more will.
        pub(crate) fn take(&self) -> (Vec<u8>, bool) {
            let mut wire = self.wire.lock().unwrap();
            let pipe = &mut wire[1 - self.side];
            (pipe.bytes.drain(..).collect(), pipe.closed)
        }

        /// Sleeps until something has changed since `seen` changes.
        pub(crate) fn wait(&self, seen: u64) -> u64 {
            self.changes[self.side].wait(seen + 1);
            self.changes[self.side].get()
        }

        pub fn send_frame(&self, frame: &[u8]) -> Result<(), carrier::Refusal> {
            let sent = self.put(frame);
            self.tell_peer();
            if sent { Ok(()) } else { Err(carrier::Refusal(Errno::CONNRESET)) }
        }

        pub fn finish(&self) {
            self.wire.lock().unwrap()[self.side].closed = true;
            self.tell_peer();
        }

        /// A thread gives this end up while another waits on it.
        pub(crate) fn abandon(&self) {
            self.finish();
            self.changes[self.side].add();
        }

        pub(crate) fn is_abandoned(&self) -> bool {
            self.wire.lock().unwrap()[self.side].closed
        }

        pub fn ended(&self) -> bool {
            self.wire.lock().unwrap()[1 - self.side].closed
        }

        pub(crate) fn ends(&self) -> carrier::Ends {
            carrier::Ends { peer: self.peer }
        }
    }

    impl Drop for Connection {
        fn drop(&mut self) {
            *NET.open.lock().unwrap() -= 1;
            self.wire.lock().unwrap()[self.side].closed = true;
            if !std::thread::panicking() && !sys::over() {
                self.tell_peer();
            }
        }
    }
}

/// `uwarp_llp::carrier`.
pub mod carrier {
    use super::*;

    pub trait SetUp: Send {
        fn ended(&self) -> bool;
        fn into_link(self: Box<Self>) -> connect::Connection;
    }

    impl SetUp for connect::Connection {
        fn ended(&self) -> bool {
            Self::ended(self)
        }

        fn into_link(self: Box<Self>) -> connect::Connection {
            *self
        }
    }

    #[derive(Debug, Clone, Copy)]
    pub struct Refusal(pub(crate) Errno);

    impl Refusal {
        pub fn errno(self) -> Errno {
            self.0
        }
    }

    #[derive(Debug, Clone, Copy)]
    pub struct Ends {
        pub peer: SocketAddr,
    }

    #[derive(Default, Clone, Copy)]
    pub struct Options;

    pub enum TakePort {
        Now,
    }

    pub struct Bind {
        pub address: SocketAddr,
        pub port: TakePort,
        pub options: Options,
    }

    /// Knows its port.
    pub struct Bound(pub(crate) u16);

    /// For queue pairs that are their own peers, which no scenario has.
    impl Bound {
        pub fn local(&self) -> SocketAddr {
            SocketAddr::from(([127, 0, 0, 1], self.0))
        }

        pub fn connect(self, _: SocketAddr) -> Result<Box<dyn SetUp>, (Refusal, Self)> {
            Err((Refusal(Errno::NOTSUP), self))
        }
    }
}

/// `uwarp_cm::carriers`.
pub mod carriers {
    use super::*;

    pub(crate) struct None;

    pub(crate) fn carrier() -> None {
        None
    }

    impl None {
        pub fn bind(&self, _: &carrier::Bind) -> Result<carrier::Bound, Errno> {
            Err(Errno::NOTSUP)
        }
    }
}

/// `uwarp_cm::handshake`.
pub mod handshake {
    use super::*;
    use carrier::{Ends, Refusal, SetUp};
    use connect::Connection;
    use uwarp_proto::setup::{Negotiated, Rejection, Request};

    pub(crate) trait ConnectObserver: Send + Sync {
        fn connecting_from(&self, local: SocketAddr);
        fn connected(&self, how: Connected);
    }

    pub(crate) trait RequestObserver: Send + Sync {
        fn requested(&self, pending: Pending, request: Request);
    }

    pub(crate) enum Connected {
        Accepted(Box<dyn SetUp>, Negotiated),
        Rejected(Rejection),
        Failed(&'static str, Errno),
    }

    pub(crate) struct Pending {
        pub connection: Box<Connection>,
        pub ends: Ends,
        pub responder: Responder,
    }

    impl Pending {
        pub fn reply(&mut self) -> Result<(), Refusal> {
            while let Some(reply) = self.responder.poll_transmit() {
                self.connection.send_frame(&reply)?;
            }
            Ok(())
        }

        pub fn reject(mut self, private_data: &[u8]) {
            if self.responder.reject(private_data).is_ok() && self.reply().is_ok() {
                self.connection.finish();
            }
        }
    }
}

/// `uwarp_cm::listener`: whoever connects calls it.
pub mod listener {
    use super::*;
    use carrier::Bound;

    pub const MAX_BACKLOG: usize = 1024;

    pub fn max_half_open() -> usize {
        16
    }

    pub struct Listener;

    impl Listener {
        pub fn start(
            _: &Arc<Engine>,
            _: timeouts::Timeouts,
            policy: ResponderPolicy,
            observer: Weak<dyn handshake::RequestObserver>,
            bound: Bound,
            _: usize,
        ) -> Result<Arc<Self>, (Errno, Option<Bound>)> {
            NET.doors.lock().insert(bound.0, (observer, policy));
            Ok(Arc::new(Self))
        }

        pub fn request_delivered(&self) {}
    }
}

/// `uwarp_cm::active`: a thread for each attempt.
pub mod active {
    use super::*;
    use carrier::Options;
    use connect::Connection;
    use handshake::{ConnectObserver, Connected, Pending};

    pub(crate) struct Target {
        pub local: Option<SocketAddr>,
        pub peer: SocketAddr,
        pub options: Options,
        pub private_data: Vec<u8>,
        /// Never set: by number there is no plainer request.
        #[allow(dead_code)]
        pub falls_back: bool,
    }

    /// The connecting end, until it has ended or is cancelled.
    #[derive(Default)]
    pub(crate) struct Active {
        running: Mutex<Option<Arc<Connection>>>,
        cancelled: Mutex<bool>,
    }

    impl Active {
        pub fn start(
            _: &Arc<Engine>,
            _: timeouts::Timeouts,
            observer: Weak<dyn ConnectObserver>,
            target: Target,
            config: InitiatorConfig,
            _: Option<carrier::Bound>,
        ) -> Result<Arc<Self>, (Errno, Option<carrier::Bound>)> {
            let active = Arc::new(Self::default());
            let this = active.clone();
            sys::start(move || {
                let how = this.run(&target, config);
                drop(this.running.lock().take());
                // As the real one: what has ended is reported, also when it is cancelled in this moment.
                if let (Some(how), Some(observer)) = (how, observer.upgrade()) {
                    observer.connected(how);
                }
            });
            Ok(active)
        }

        /// Nothing is reported afterwards, unless the end was there already.
        pub fn cancel(&self) {
            *self.cancelled.lock() = true;
            let running = self.running.lock().take();
            if let Some(connection) = running {
                connection.abandon();
            }
        }

        fn run(&self, target: &Target, config: InitiatorConfig) -> Option<Connected> {
            let refused = Some(Connected::Failed("refused", Errno::CONNREFUSED));
            at_some_moment();
            let known = NET.doors.lock().get(&target.peer.port()).cloned();
            let Some((observer, policy)) = known else { return refused };
            let Some(observer) = observer.upgrade() else { return refused };
            let mut machine = Initiator::new(config, &target.private_data).ok()?;
            let [client, server] = Connection::pair(target.local?, target.peer);
            let client = Arc::new(client);
            *self.running.lock() = Some(client.clone());
            if *self.cancelled.lock() {
                return None;
            }
            let bytes = machine.poll_transmit()?;
            let mut responder = Responder::new(policy);
            let mut rest = &bytes[..];
            let request = loop {
                let (part, tail) = rest.split_at(responder.want().min(rest.len()));
                rest = tail;
                if let Some(request) = responder.handle_input(part).ok()? {
                    break request;
                }
            };
            at_some_moment();
            let ends = server.ends();
            observer.requested(Pending { connection: Box::new(server), ends, responder }, request);
            let outcome = Self::outcome(&client, &mut machine);
            // Taken before it is reported; a thread that cancels takes it instead.
            self.running.lock().take()?;
            at_some_moment();
            let connection = Arc::into_inner(client)?;
            Some(match outcome {
                Some(Outcome::Accepted(negotiated)) => Connected::Accepted(Box::new(connection), negotiated),
                Some(Outcome::Rejected(rejection)) => Connected::Rejected(rejection),
                None => Connected::Failed("closed", Errno::CONNRESET),
            })
        }

        /// Waits for the reply, or the end.
        fn outcome(client: &Connection, machine: &mut Initiator) -> Option<Outcome> {
            let (mut seen, mut have) = (0, VecDeque::new());
            loop {
                let (bytes, closed) = client.take();
                have.extend(bytes);
                while !have.is_empty() && machine.want() > 0 {
                    let part: Vec<u8> = have.drain(..machine.want().min(have.len())).collect();
                    if let Some(outcome) = machine.handle_input(&part).ok()? {
                        return Some(outcome);
                    }
                }
                if closed || client.is_abandoned() {
                    return None;
                }
                seen = client.wait(seen);
            }
        }
    }
}

/// `uwarp_cm::timeouts`.
pub mod timeouts {
    pub const RETRIES: u8 = 7;

    #[derive(Default, Clone, Copy)]
    pub struct Timeouts;
}

/// `uwarp_cm::event`, as far as bring-up by number uses it.
#[derive(Clone, Copy)]
pub struct ConnParam {
    pub retry_count: u8,
    pub rnr_retry_count: u8,
}

impl ConnParam {
    pub const NONE: Self = Self { retry_count: 0, rnr_retry_count: 0 };
}

/// `uwarp_cm::error`.
#[derive(Debug)]
pub enum CmError {
    System(Errno),
    Verbs(VerbsError),
}

impl From<Errno> for CmError {
    fn from(errno: Errno) -> Self {
        Self::System(errno)
    }
}

impl From<VerbsError> for CmError {
    fn from(error: VerbsError) -> Self {
        Self::Verbs(error)
    }
}

/// `uwarp_cm::params`.
pub mod params {
    use super::*;
    use crate::config::Config;
    use uwarp_proto::setup::{Negotiated, PeerData, Revision};

    pub fn revision(_: &Config) -> Revision {
        Revision::Two
    }

    pub fn peer_data(qpn: u32, min_rnr_timer: u8, param: ConnParam) -> PeerData {
        PeerData { rnr_retry: param.rnr_retry_count.min(7), min_rnr_timer, qpn, ..PeerData::new() }
    }

    /// As in the views that pass for InfiniBand.
    pub fn stream_params(negotiated: &Negotiated, _: ConnParam, timeout: u8, _: u8) -> StreamParams {
        StreamParams {
            initiator: negotiated.initiator,
            framing: negotiated.framing(),
            ird: negotiated.ird,
            ord: negotiated.ord,
            peer_is_uwarp: negotiated.peer_is_uwarp,
            peer: negotiated.peer,
            timeout,
            rtr: negotiated.rtr,
            rtr_stag_to: negotiated.rtr_stag_to,
            wait_first_fpdu: !negotiated.initiator,
            infiniband: true,
            ..StreamParams::default()
        }
    }
}

/// `uwarp_driver::Nic`: who has which number.
pub struct Nic {
    engine: Arc<Engine>,
    registered: Mutex<HashMap<u32, Weak<Qp>>>,
}

impl Nic {
    pub fn new(engine: &Arc<Engine>) -> Arc<Self> {
        Arc::new(Self { engine: engine.clone(), registered: Mutex::default() })
    }

    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub fn queue_pair(&self, qpn: u32) -> Option<Arc<Qp>> {
        self.registered.lock().get(&qpn).and_then(Weak::upgrade)
    }

    pub fn take_stream_socket(&self, qpn: u32) -> Option<carrier::Bound> {
        Some(carrier::Bound(uwarp_rnic::ah::port_of(qpn)))
    }

    pub fn return_stream_socket(&self, _: u32, _: carrier::Bound) {}

    pub fn serve_proofs(&self, qpn: u32, observer: Weak<dyn ProofObserver>) -> Result<ProofPort, VerbsError> {
        let port = uwarp_rnic::ah::port_of(qpn);
        NET.proofs.lock().insert(port, observer);
        Ok(ProofPort(port))
    }
}

/// `uwarp_driver::ProofPort`.
pub struct ProofPort(u16);

impl ProofPort {
    /// A thread delivers it, or one in eight is lost.
    pub fn send(&self, route: &Route, proof: &Proof) {
        let (proof, to) = (*proof, route.to);
        let from = SocketAddr::new(route.from.unwrap_or_else(|| to.ip()), self.0);
        if shuttle::rand::thread_rng().gen_bool(0.125) {
            return;
        }
        sys::start(move || {
            at_some_moment();
            let observer = NET.proofs.lock().get(&to.port()).cloned();
            if let Some(observer) = observer.and_then(|observer| observer.upgrade()) {
                observer.proof(from, to.ip(), &proof);
            }
        });
    }
}

/// `uwarp_driver::StreamObserver`.
pub trait StreamObserver: Send + Sync {
    fn established(&self);
    fn disconnected(&self, why: Disconnect);
}

/// A queue pair: the real core and the real lock.
pub struct Qp {
    me: Weak<Self>,
    nic: Arc<Nic>,
    qpn: u32,
    inner: Attended<Inner>,
}

struct Inner {
    core: RcCore,
    conn: Option<Conn>,
    destroyed: bool,
    notices: VecDeque<(Arc<dyn StreamObserver>, Disconnect)>,
    reporting: bool,
}

struct Conn {
    link: connect::Connection,
    token: Token,
    observer: Arc<dyn StreamObserver>,
    established: bool,
    left_over: Vec<u8>,
}

struct Ignore;

impl AsyncSink for Ignore {
    fn async_event(&self, _: AsyncEvent) {}
}

fn clock() -> Now {
    Now::at(sys::now())
}

impl Qp {
    /// One in INIT.
    pub fn new(nic: &Arc<Nic>, qpn: u32) -> Arc<Self> {
        let cq = Cq::new(8, 0, None, Arc::new(Ignore));
        let caps =
            QpCaps { max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let init = QpInit {
            pd: Pd::new(),
            send_cq: cq.clone(),
            recv_cq: cq,
            srq: None,
            caps,
            sq_sig_all: true,
            cookie: 0,
            async_sink: Arc::new(Ignore),
        };
        let inner = Inner {
            core: RcCore::new(qpn, init, None),
            conn: None,
            destroyed: false,
            notices: VecDeque::new(),
            reporting: false,
        };
        let qp =
            Arc::new_cyclic(|me| Self { me: me.clone(), nic: nic.clone(), qpn, inner: Attended::new(inner) });
        nic.registered.lock().insert(qpn, Arc::downgrade(&qp));
        qp.modify(QpState::Init);
        qp
    }

    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// RTR is that of a queue pair which waits for its stream.
    pub fn modify(&self, state: QpState) {
        let awaits_stream = state == QpState::Rtr;
        let mut inner = self.inner.lock();
        let psn = awaits_stream.then_some(7);
        let change =
            QpModify { state: Some(state), awaits_stream, rq_psn: psn, sq_psn: psn, ..QpModify::default() };
        inner.core.modify(&change).unwrap();
        self.pump(&mut inner);
        self.release(inner);
    }

    pub fn awaits_stream(&self) -> Option<(QpAttr, Psns, u32)> {
        let inner = self.inner.lock();
        let core = &inner.core;
        let awaits = core.awaits_stream().map(|moves| (core.query(), core.psns(), moves));
        self.release(inner);
        awaits
    }

    pub fn attach_awaited(
        &self,
        link: connect::Connection,
        params: StreamParams,
        observer: Arc<dyn StreamObserver>,
        moves: u32,
    ) -> Result<(), (VerbsError, connect::Connection)> {
        let mut inner = self.inner.lock();
        let refused = VerbsError::Invalid("the queue pair does not wait for this stream");
        let result = if inner.destroyed || inner.core.awaits_stream() != Some(moves) {
            Err((refused, link))
        } else if let Err(error) = inner.core.attach(&clock(), params) {
            Err((error, link))
        } else {
            let source: Arc<Self> = self.me.upgrade().unwrap();
            let token = self.nic.engine.register(link.socket().fd(), source).unwrap();
            inner.conn = Some(Conn { link, token, observer, established: false, left_over: vec![] });
            self.pump(&mut inner);
            Ok(())
        };
        self.release(inner);
        result
    }

    /// Moves bytes in both directions.
    fn pump(&self, inner: &mut Inner) {
        let now = clock();
        let Inner { core, conn: Some(conn), .. } = inner else { return };
        conn.link.socket().read();
        let (bytes, closed) = conn.link.take();
        conn.left_over.extend(bytes);
        if !conn.left_over.is_empty() {
            let used = core.handle_input(&now, &conn.left_over);
            conn.left_over.drain(..used);
        }
        if closed {
            core.handle_link(&now, LinkEvent::End { partial: false, broken: false });
        }
        let mut sent = false;
        while let Some(out) = core.poll_transmit(&now) {
            let bytes = out.only_staged().unwrap_or(&[]).to_vec();
            if bytes.is_empty() {
                break;
            }
            conn.link.put(&bytes);
            sent = true;
            core.transmitted(&now, bytes.len());
        }
        if sent {
            conn.link.tell();
        }
    }

    fn act(&self, inner: &mut Inner) {
        while let Some(action) = inner.core.poll_action() {
            match action {
                Action::Established => inner.conn.iter_mut().for_each(|conn| conn.established = true),
                Action::Disconnected { why, .. } => {
                    let Some(conn) = inner.conn.take() else { continue };
                    self.nic.engine.deregister(conn.token);
                    if !inner.destroyed {
                        inner.notices.push_back((conn.observer, why));
                    }
                }
                _ => {}
            }
        }
    }

    fn release(&self, inner: MutexGuard<'_, Inner>) {
        let finish = |inner: &mut MutexGuard<'_, Inner>| {
            self.act(inner);
            if std::mem::replace(&mut inner.reporting, true) {
                return;
            }
            while let Some((observer, why)) = inner.notices.pop_front() {
                MutexGuard::unlocked(inner, || observer.disconnected(why));
            }
            inner.reporting = false;
        };
        self.inner.release(inner, finish, |inner| self.pump(inner));
    }

    /// Whether the two have a stream in common that both have heard on.
    pub fn is_joined(&self, other: &Self) -> bool {
        let (own, others) = (self.inner.lock(), other.inner.lock());
        let joined = match [&own.conn, &others.conn] {
            [Some(a), Some(b)] => a.established && b.established && a.link.is_other_end_of(&b.link),
            _ => false,
        };
        other.release(others);
        self.release(own);
        joined
    }

    pub fn destroy(&self) {
        let mut inner = self.inner.lock();
        inner.destroyed = true;
        self.nic.registered.lock().remove(&self.qpn);
        let reset = QpModify { state: Some(QpState::Reset), ..QpModify::default() };
        inner.core.modify(&reset).unwrap();
        inner.notices.clear();
        self.release(inner);
    }
}

impl Source for Qp {
    fn ready(&self, _: Readiness) {
        if let Some(mut inner) = self.inner.look() {
            self.pump(&mut inner);
            self.release(inner);
        }
    }

    fn timeout(&self) {}
}
