//! Streams between queue pairs that know each other by address and number, without ids (docs/contracts.md,
//! "Bring-up").
//!
//! A queue pair number names a TCP port, so an address and a number say where the peer's process listens. The
//! end with the smaller (address, number) listens, the other one connects; both send an [`Introduction`]. A
//! request that comes before its queue pair is in RTR, or while it still has its previous stream, waits here;
//! number and time of such requests are bounded. A connector that finds no listener tries again for as long
//! as its queue pair waits: the queue pair itself limits how long work requests may wait
//! ([`uwarp_rnic::qp::RcCore::retry_limit`]). A stream that ends before the listening end has received
//! anything on it does not count: its connector was moved to RESET meanwhile, and the queue pair waits for
//! the next stream.
//!
//! ```text
//!   modify to RTR ─▶ Pairing ──┬─ larger: Active ── Accepted ──────────────┬─▶ driver::Qp::attach
//!                              └─ smaller: waits ─┐                        │
//!   the port ─▶ Listener ─▶ PortListener ───────┴── accept and reply ────┘
//! ```

use std::cmp::Ordering;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_driver::config::Config;
use uwarp_driver::{Disconnect, Engine, Nic, Qp, Readiness, Source, StreamObserver, Token};
use uwarp_llp::connect::{Connection, Options, Unconnected};
use uwarp_proto::setup::{AcceptParams, Depths, InitiatorConfig, Negotiated, Request, ResponderPolicy, Rtr};
use uwarp_rnic::VerbsError;
use uwarp_rnic::ah::port_of;
use uwarp_rnic::mr::random_u32;
use uwarp_rnic::qp::{QpAttr, QpState};
use uwarp_wire::introduction::Introduction;

use crate::active::{Active, Target};
use crate::error::CmError;
use crate::event::ConnParam;
use crate::handshake::{ConnectObserver, Connected, Pending, RequestObserver};
use crate::listener::{Listener, MAX_BACKLOG, max_half_open};
use crate::params::{peer_data, revision, stream_params};
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
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// Most early requests for one queue pair: more than one means a peer that began anew, or one that lies.
const MOST_EARLY_EACH: usize = 4;
/// Most early requests of which a full table asks the system whether their peers have hung up. Each takes a
/// system call, with the table locked.
const MOST_LOOKS: usize = 16;
/// How long an early request waits.
const EARLY_LIMIT: Duration = Duration::from_secs(30);

/// All pairings of a process.
pub(crate) struct Pairings {
    me: Weak<Self>,
    nic: Arc<Nic>,
    timeouts: Timeouts,
    policy: ResponderPolicy,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// By the number of our queue pair.
    pairings: HashMap<u32, Arc<Pairing>>,
    /// How many pairings there were when those of destroyed queue pairs were last removed.
    swept: usize,
    /// By port.
    ports: HashMap<u16, Arc<PortListener>>,
    /// In the order in which they came.
    early: VecDeque<Early>,
    /// Which of them [`Table::drop_some_hung_up`] looks at next.
    turn: usize,
    /// How often the system was asked whether the peer of one of them has hung up.
    looks: usize,
    /// Runs until the oldest early request must be dropped.
    timer: Option<Token>,
}

/// A request whose queue pair is not in RTR.
struct Early {
    since: Instant,
    introduction: Introduction,
    /// The address that it comes from.
    from: Option<Ipv6Addr>,
    pending: Pending,
}

impl Early {
    fn is_for(&self, qpn: u32) -> bool {
        self.introduction.destination_qpn == qpn
    }

    fn is_over(&self, now: Instant) -> bool {
        now > self.since + EARLY_LIMIT
    }

    /// Asks the system whether the peer has hung up. Checking all waiting requests each time that one comes
    /// or goes would be most of the work.
    fn hung_up(&self) -> bool {
        self.pending.connection.hung_up()
    }
}

impl Pairings {
    pub fn new(nic: &Arc<Nic>, timeouts: Timeouts, policy: ResponderPolicy) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            nic: Arc::clone(nic),
            timeouts,
            policy,
            table: Mutex::default(),
        })
    }

    /// Joins a queue pair, which is in RTR and waits for its stream, with queue pair `peer` at the other end
    /// of the path.
    pub fn begin(&self, qp: &Arc<Qp>, path: Path, peer: u32) -> Result<(), CmError> {
        let Some((attr, moves)) = qp.awaits_stream() else { return Ok(()) };
        let incarnation = random_u64()?;
        let pairing = Arc::new_cyclic(|me| Pairing {
            me: Weak::clone(me),
            pairings: Weak::clone(&self.me),
            nic: Arc::clone(&self.nic),
            timeouts: self.timeouts,
            max_ird: self.policy.max_ird,
            qp: Arc::downgrade(qp),
            moves,
            introduction: Introduction {
                source_qpn: qp.qpn(),
                destination_qpn: peer,
                rq_psn: attr.rq_psn,
                sq_psn: None,
                incarnation,
            },
            path,
            attempt: Mutex::default(),
        });
        match pairing.role() {
            Ordering::Less => self.listen(qp, &pairing),
            Ordering::Equal => pairing.join_itself(),
            Ordering::Greater => {
                self.table.lock().insert(qp.qpn(), &pairing);
                pairing.connect();
                Ok(())
            }
        }
    }

    /// The queue pair is in RESET or ERR: everything that was begun for it is cancelled.
    pub fn end(&self, qpn: u32) {
        let pairing = self.table.lock().pairings.remove(&qpn);
        if let Some(pairing) = pairing {
            pairing.cancel();
        }
    }

    /// The queue pair is about to be destroyed.
    pub fn forget(&self, qpn: u32) {
        let (pairing, early) = {
            let mut table = self.table.lock();
            let unwanted = table.early.iter().filter(|early| early.introduction.destination_qpn == qpn);
            let unwanted = unwanted.count();
            let mut early = Vec::with_capacity(unwanted);
            for _ in 0..unwanted {
                let at = table.early.iter().position(|early| early.introduction.destination_qpn == qpn);
                early.extend(at.and_then(|at| table.early.remove(at)));
            }
            (table.pairings.remove(&qpn), early)
        };
        if let Some(pairing) = pairing {
            pairing.cancel();
        }
        for early in early {
            early.pending.reject(&[]);
        }
    }

    fn listen(&self, qp: &Arc<Qp>, pairing: &Arc<Pairing>) -> Result<(), CmError> {
        self.listen_on_port(qp)?;
        self.table.lock().insert(qp.qpn(), pairing);
        self.serve(pairing);
        Ok(())
    }

    /// Gives a queue pair that waits for its stream the request that waits for it; the last one if there are
    /// several.
    fn serve(&self, pairing: &Pairing) {
        if pairing.waiting().is_none() {
            return;
        }
        let request = {
            let mut table = self.table.lock();
            table.drop_over(now());
            table.drop_hung_up(pairing.introduction.source_qpn);
            let at = table.early.iter().rposition(|early| pairing.is_meant(early));
            at.and_then(|at| table.early.remove(at))
        };
        if let Some(Early { introduction, pending, .. }) = request {
            pairing.accept(introduction, pending);
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
        let socket = self.nic.stream_socket(qp.qpn()).ok_or(Errno::MFILE)?;
        let new = Arc::new(PortListener { pairings: Weak::clone(&self.me), listener: Mutex::default() });
        // Locked meanwhile: a request that arrives at once must find the listener, or its place in the
        // backlog is never free again.
        let mut slot = new.listener.lock();
        let observer: Weak<PortListener> = Arc::downgrade(&new);
        let engine = self.nic.engine();
        let bound = Unconnected::from(socket);
        let listener = Listener::start(engine, self.timeouts, self.policy, observer, bound, MAX_BACKLOG)?;
        *slot = Some(listener);
        drop(slot);
        table.ports.insert(port, new);
        Ok(())
    }

    /// A request has arrived at a port.
    fn requested(&self, pending: Pending, request: &Request) {
        let Some(introduction) = Introduction::parse(&request.private_data) else {
            tracing::debug!(
                peer = ?pending.connection.peer_address().ok(),
                "refused: a connection to the port of queue pairs does not come from a queue pair"
            );
            return;
        };
        let qpn = introduction.destination_qpn;
        if self.nic.queue_pair(qpn).is_none() {
            return pending.reject(&[]);
        }
        let known = self.known(qpn);
        let from = pending.connection.peer_address().ok().map(|address| gid(address.ip()));
        self.admit(known.as_deref(), Early { since: now(), introduction, from, pending });
    }

    /// The pairing of this queue pair, if there is one.
    fn known(&self, qpn: u32) -> Option<Arc<Pairing>> {
        self.table.lock().pairings.get(&qpn).cloned()
    }

    /// Gives a request to `known` if that waits for it, and stores it otherwise.
    fn admit(&self, known: Option<&Pairing>, request: Early) {
        if let Some(pairing) = known.filter(|pairing| pairing.is_meant(&request))
            && pairing.waiting().is_some()
        {
            return pairing.accept(request.introduction, request.pending);
        }
        let qpn = request.introduction.destination_qpn;
        self.keep(request);
        // Its queue pair may have been moved to RTR since the lookup, or its previous stream may have ended.
        // Then the thread that looked for a request has not found this one.
        if let Some(pairing) = self.known(qpn) {
            self.serve(&pairing);
        }
    }

    fn keep(&self, new: Early) {
        let mut table = self.table.lock();
        table.keep(new, max_half_open());
        if table.timer.is_none()
            && let Some(me) = self.me.upgrade()
        {
            let timer = self.nic.engine().new_token(me);
            table.timer = Some(timer);
            self.nic.engine().set_timer(timer, Some(now() + EARLY_LIMIT));
        }
    }
}

/// Early requests whose time is over.
impl Source for Pairings {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        let engine = self.nic.engine();
        let mut table = self.table.lock();
        let now = now();
        table.drop_over(now);
        table.drop_some_hung_up();
        table.turn += 1;
        let Some(timer) = table.timer else { return };
        if table.early.is_empty() {
            table.timer = None;
            drop(table);
            engine.deregister(timer);
        } else {
            engine.set_timer(timer, Some(now + EARLY_LIMIT / 4));
        }
    }
}

impl Table {
    fn insert(&mut self, qpn: u32, pairing: &Arc<Pairing>) {
        if self.pairings.len() >= 2 * self.swept.max(64) {
            self.pairings.retain(|_, pairing| pairing.qp.strong_count() > 0);
            self.swept = self.pairings.len();
        }
        self.pairings.insert(qpn, Arc::clone(pairing));
    }

    /// Stores a request that came early, one of `most` that wait. A request that has to make room is closed,
    /// and its connector tries again.
    fn keep(&mut self, new: Early, most: usize) {
        let qpn = new.introduction.destination_qpn;
        self.drop_over(new.since);
        self.drop_hung_up(qpn);
        if self.early.iter().filter(|early| early.is_for(qpn)).count() >= MOST_EARLY_EACH {
            let first = self.early.iter().position(|early| early.is_for(qpn));
            first.and_then(|first| self.early.remove(first));
        } else if self.early.len() >= most {
            self.drop_some_hung_up();
            if self.early.len() < most {
                self.turn += 1;
            } else {
                // The others move up by one, so that the same places hold those whose turn is next.
                self.early.pop_front();
            }
        }
        self.early.push_back(new);
    }

    /// Drops requests whose time is over; they are the first ones.
    fn drop_over(&mut self, now: Instant) {
        while self.early.front().is_some_and(|early| early.is_over(now)) {
            self.early.pop_front();
        }
    }

    /// Looks at [`MOST_LOOKS`] requests at most and drops those whose peers have hung up. They are spread
    /// over the table: a peer that opens and closes connections leaves its requests side by side, and some
    /// of those are found before one that is alive has to go. With each `turn` it looks at the next ones.
    fn drop_some_hung_up(&mut self) {
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
    fn drop_hung_up(&mut self, qpn: u32) {
        self.early.retain(|early| {
            if !early.is_for(qpn) {
                return true;
            }
            self.looks += 1;
            !early.hung_up()
        });
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
    introduction: Introduction,
    path: Path,
    attempt: Mutex<Attempt>,
}

/// State of the connecting end.
#[derive(Default)]
struct Attempt {
    active: Option<Arc<Active>>,
    /// The next attempt.
    timer: Option<Token>,
    pauses: u32,
    cancelled: bool,
}

impl Pairing {
    /// Less: this end listens; greater: it connects; equal: the queue pair is its own peer.
    fn role(&self) -> Ordering {
        let own = (gid(self.path.local.ip()), self.introduction.source_qpn);
        own.cmp(&(gid(self.path.peer.ip()), self.introduction.destination_qpn))
    }

    fn is_meant(&self, request: &Early) -> bool {
        let introduction = &request.introduction;
        introduction.source_qpn == self.introduction.destination_qpn
            && introduction.destination_qpn == self.introduction.source_qpn
            && request.from == Some(gid(self.path.peer.ip()))
            && self.role() == Ordering::Less
    }

    /// Its queue pair, if that still waits for this stream.
    fn waiting(&self) -> Option<(Arc<Qp>, QpAttr)> {
        let qp = self.qp.upgrade()?;
        let (attr, moves) = qp.awaits_stream()?;
        (moves == self.moves).then_some((qp, attr))
    }

    /// Takes the peer's request, if the queue pair still waits for it.
    fn accept(&self, introduction: Introduction, mut pending: Pending) {
        let Some((qp, attr)) = self.waiting() else { return pending.reject(&[]) };
        let peer = peer_data(qp.qpn(), attr.min_rnr_timer, conn_param(&attr));
        let params = AcceptParams { depths: self.depths(), peer };
        let reply = self.introduction(&attr).to_bytes();
        let negotiated = match pending.responder.accept(params, &reply) {
            Ok(negotiated) => negotiated,
            Err(error) => return tracing::debug!(qpn = qp.qpn(), "cannot accept: {error}"),
        };
        if let Err(errno) = pending.reply() {
            return tracing::debug!(
                qpn = qp.qpn(),
                "the peer closed the connection before it had the reply: {errno}"
            );
        }
        self.attach(pending.connection, &negotiated, Some(introduction));
    }

    fn connect(&self) {
        let Some((qp, attr)) = self.waiting() else { return };
        let config = Config::get();
        let request = InitiatorConfig {
            revision: revision(config),
            crc: config.crc,
            markers: config.markers,
            depths: self.depths(),
            max_ird: self.max_ird,
            peer: config.find_uwarp_peers.then(|| peer_data(qp.qpn(), attr.min_rnr_timer, conn_param(&attr))),
            peer_in_request: false,
        };
        let mut peer = self.path.peer;
        peer.set_port(port_of(self.introduction.destination_qpn));
        let target = Target {
            local: Some(self.path.local),
            peer,
            options: Options::default(),
            private_data: self.introduction(&attr).to_bytes().to_vec(),
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
            Err(errno) => {
                tracing::debug!(qpn = self.introduction.source_qpn, %peer, "cannot connect: {errno}");
                self.again_later();
            }
        }
    }

    /// No listener is there, or not yet.
    fn again_later(&self) {
        let (Some(me), Some(_)) = (self.me.upgrade(), self.waiting()) else { return };
        let timer = self.engine().new_token(me);
        let mut attempt = self.attempt.lock();
        if attempt.cancelled || attempt.timer.is_some() {
            drop(attempt);
            return self.engine().deregister(timer);
        }
        let pause = (FIRST_PAUSE * (1 << attempt.pauses.min(10))).min(LONGEST_PAUSE);
        attempt.pauses += 1;
        attempt.timer = Some(timer);
        drop(attempt);
        self.engine().set_timer(timer, Some(now() + pause));
    }

    fn cancel(&self) {
        let (active, timer) = {
            let mut attempt = self.attempt.lock();
            attempt.cancelled = true;
            (attempt.active.take(), attempt.timer.take())
        };
        if let Some(active) = active {
            active.cancel();
        }
        if let Some(timer) = timer {
            self.engine().deregister(timer);
        }
    }

    /// Joins a queue pair with itself: a TCP connection, too, can be connected to itself.
    fn join_itself(&self) -> Result<(), CmError> {
        let options = Options::default();
        let socket = Unconnected::new(self.path.local, &options)?;
        let address = socket.bind(self.path.local, &options)?;
        let connection = socket.connect(address)?;
        let Some((qp, attr)) = self.waiting() else { return Ok(()) };
        let (crc, markers) = (Config::get().crc, Config::get().markers);
        let negotiated = Negotiated {
            initiator: true,
            revision: revision(Config::get()),
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
        self.attach(connection, &negotiated, None);
        Ok(())
    }

    fn attach(&self, connection: Connection, negotiated: &Negotiated, peer: Option<Introduction>) {
        let (Some(me), Some((qp, attr))) = (self.me.upgrade(), self.waiting()) else { return };
        if let (Some(begins), Some(expects)) = (peer.and_then(|peer| peer.sq_psn), Some(attr.rq_psn))
            && begins != expects
        {
            tracing::warn!(
                qpn = qp.qpn(),
                "the peer begins with PSN {begins:#x}, and the program expects {expects:#x} (rq_psn): \
                 over InfiniBand nothing would arrive"
            );
        }
        let mut param = conn_param(&attr);
        // A queue pair says for how long its own Sends may wait, an id for how long its peer's may. What the
        // peer has not said yet it says before its first Send.
        param.rnr_retry_count = negotiated.peer.map_or(RETRIES, |peer| peer.rnr_retry);
        let mut params = stream_params(negotiated, param, attr.timeout, attr.min_rnr_timer);
        // In the iwarp view, too: programs that exchange numbers are written for InfiniBand.
        params.outlives_stream = true;
        tracing::debug!(qpn = qp.qpn(), peer = self.introduction.destination_qpn, ?params, "attach");
        if let Err((error, _)) = qp.attach_awaited(connection.into(), params, me, self.moves) {
            // Closed without a message: the peer's queue pair waits for the next stream.
            tracing::debug!(qpn = qp.qpn(), "cannot give the connection to the queue pair: {error}");
        }
    }

    /// With the present attributes: the program sets one of the numbers late.
    fn introduction(&self, attr: &QpAttr) -> Introduction {
        let said = attr.state != QpState::Rtr;
        Introduction { sq_psn: said.then_some(attr.sq_psn), ..self.introduction }
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
            Connected::Accepted(connection, negotiated) => {
                let peer = Introduction::parse(&negotiated.private_data);
                self.attach(connection, &negotiated, peer);
            }
            Connected::Rejected(_) => self.again_later(),
            Connected::Failed(kind, errno) => {
                tracing::debug!(
                    qpn = self.introduction.source_qpn,
                    ?kind,
                    "the peer does not listen yet: {errno}"
                );
                self.again_later();
            }
        }
    }
}

/// The timer of the next attempt.
impl Source for Pairing {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        let timer = self.attempt.lock().timer.take();
        if let Some(timer) = timer {
            self.engine().deregister(timer);
            self.connect();
        }
    }
}

/// Without an id, no event reports what happens to a stream: the program learns it from its completions.
impl StreamObserver for Pairing {
    fn established(&self) {}

    /// If the stream did not count, the next one may have been requested already.
    fn disconnected(&self, _: Disconnect) {
        if let Some(pairings) = self.pairings.upgrade() {
            pairings.serve(self);
        }
    }
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
    use std::os::fd::OwnedFd;

    use uwarp_proto::setup::{Initiator, Responder};
    use uwarp_rnic::qp::{QpCaps, QpInit, QpModify};
    use uwarp_rnic::{AsyncEvent, AsyncSink, Cq, Pd};

    use super::*;
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
            revision: revision(Config::get()),
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
        let connection = Connection::from(OwnedFd::from(accepted));
        (Pending { connection, addresses: [None; 2], responder, listener: Weak::new() }, peer)
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
            rq_psn: 0,
            sq_psn: None,
            incarnation: 1,
        };
        let (pending, mut peer) = request(cm.responder_policy(), &introduction);
        // The engine looks the queue pair up; before it has stored the request, the program moves the queue
        // pair.
        let known = pairings.known(low.qpn());
        assert!(known.is_none());
        let change = QpModify { state: Some(QpState::Rtr), awaits_stream: true, ..QpModify::default() };
        low.modify(&change).unwrap();
        let here = SocketAddr::from(([127, 0, 0, 1], 0));
        pairings.begin(&low, Path { local: here, peer: here }, high.qpn()).unwrap();
        let from = pending.connection.peer_address().ok().map(|address| gid(address.ip()));
        pairings.admit(known.as_deref(), Early { since: Instant::now(), introduction, from, pending });
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
        let early = |qpn: u32| {
            let introduction =
                Introduction { source_qpn: 1, destination_qpn: qpn, rq_psn: 0, sq_psn: None, incarnation: 1 };
            let (pending, peer) = request(cm.responder_policy(), &introduction);
            (Early { since: Instant::now(), introduction, from: None, pending }, peer)
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
            while !gone.pending.connection.hung_up() {
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
    }
}
