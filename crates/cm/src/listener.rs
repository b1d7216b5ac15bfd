//! Listening: connections are accepted, and become requests when their MPA request has arrived completely.
//!
//! Until then they are half open. Any TCP peer can make them, so their number and their time are bounded.
//! When there are too many, the oldest is closed, not the newest: an honest peer sends its request soon, so
//! the oldest are those that do not. But the kernel of a peer that begins a thousand connections connects all
//! of them before the peer has sent the first request. So no connection is closed before [`GRACE`] is over;
//! until then new ones wait in the kernel.
//!
//! Requests are reported in the order of their connections, and behind ESTABLISHED of the connection that
//! caused them ([`Answered`]).

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;
use uwarp_driver::{Engine, Readiness, Source, Token};
use uwarp_llp::carrier::{Bound, Got, Listening, SetUp};
use uwarp_proto::setup::{Request, Responder, ResponderPolicy};
use uwarp_wire::mpa;

use crate::carriers::{NotBegun, watch};
use crate::handshake::{Pending, RequestObserver};
use crate::timeouts::Timeouts;

/// Most half-open connections of one listener; fewer where the process may have few descriptors.
pub const MAX_HALF_OPEN: usize = 1024;

/// How long a connection may be silent, however many others there are.
const GRACE: Duration = Duration::from_millis(200);

/// The backlog for a program that gives none, or too large a one. As in Linux' rdma_ucm.
pub const MAX_BACKLOG: usize = 1024;

/// Connections accepted before other sources are served: peers can connect as fast as this accepts.
const TURN: usize = 64;

/// The most connections that wait in the kernel; `net.core.somaxconn` (4096 by default) is a limit, too. A
/// connection that does not fit is lost and repeated after a second, and peers can make thousands at once.
const KERNEL_BACKLOG: usize = 65_535;

/// A listening socket.
pub(crate) struct Listener {
    engine: Arc<Engine>,
    timeouts: Timeouts,
    policy: ResponderPolicy,
    observer: Weak<dyn RequestObserver>,
    me: Weak<Self>,
    backlog: usize,
    max_half_open: usize,
    state: Mutex<ListenerState>,
    /// Requests that are queued as events and not yet taken by the program. Outside the lock, because that is
    /// held over calls into the kernel, and the program must not wait for those.
    undelivered: AtomicUsize,
    /// Connections may wait in the kernel because `undelivered` had reached the backlog.
    paused: AtomicBool,
    /// Connections that the program has accepted and that are not established yet. A lock of its own: the
    /// program must not wait for calls into the kernel.
    answered: Mutex<AnsweredConnections>,
    /// Held while requests are reported, so that two threads do not change their order.
    reporting: Mutex<()>,
}

#[derive(Default)]
struct ListenerState {
    socket: Option<(Token, Box<dyn Listening>)>,
    /// In the order in which the kernel returned them.
    half_open: VecDeque<Entry>,
    /// How many of them have not sent their request.
    silent: usize,
    /// Connections may wait in the kernel because there were too many half-open ones.
    full: bool,
    /// When the engine calls the timer.
    timer: Option<Instant>,
}

/// A connection between `accept` and the request's event.
struct Entry {
    /// `None`: the request arrived with the connection.
    connection: Option<Arc<HalfOpen>>,
    accepted: Instant,
    /// The complete request; it waits for requests of earlier connections.
    request: Option<(Pending, Request)>,
}

/// How long a complete request waits for those of connections that were accepted before its own.
///
/// Programs that make several connections to one peer (perftest with `-q`) rely on the order of the requests:
/// it must be the order in which the peer made the connections. Over adapters it is; here the requests are
/// bytes on sockets that different threads read. A peer that sends nothing must not delay others noticeably.
const IN_ORDER: Duration = Duration::from_millis(10);

/// A connection between the reply to its request and its ESTABLISHED.
///
/// A peer may connect again as soon as it has the reply, and a program whose ids share a channel expects
/// ESTABLISHED of the first connection before the request of the second: the kernel reports all events of a
/// device through one ordered queue, in the order of arrival. Here they come from two sockets and perhaps two
/// threads. So a request waits for the connections that the same peer may have seen established before it
/// connected: those which were answered before its own was accepted. Connections that a peer begins at once
/// do not wait for each other.
struct Answered {
    number: u64,
    peer: IpAddr,
    at: Instant,
}

/// The longest such wait. The peer's indication follows the reply within a round trip, but a bad peer's never
/// comes.
const UNTIL_ESTABLISHED: Duration = Duration::from_millis(200);

#[derive(Default)]
struct AnsweredConnections {
    oldest_first: VecDeque<Answered>,
    added: u64,
}

impl AnsweredConnections {
    fn add(&mut self, peer: IpAddr) -> u64 {
        self.added += 1;
        self.oldest_first.push_back(Answered { number: self.added, peer, at: Instant::now() });
        self.added
    }

    fn discard_overdue(&mut self, now: Instant) {
        while self.oldest_first.front().is_some_and(|answered| answered.at + UNTIL_ESTABLISHED <= now) {
            self.oldest_first.pop_front();
        }
    }

    /// When to look again at a request that must wait; its connection was accepted at that time.
    fn delay(&self, accepted: Instant, pending: &Pending) -> Option<Instant> {
        let peer = pending.ends.peer.ip();
        let oldest = self.oldest_first.iter().find(|answered| answered.peer == peer)?;
        (oldest.at <= accepted).then_some(oldest.at + UNTIL_ESTABLISHED)
    }
}

/// Marks a connection as answered; dropped when its ESTABLISHED is queued, or when there will be none.
///
/// Dropping it reports the requests that have waited: no lock of an id may be held.
pub(crate) struct Answer {
    listener: Weak<Listener>,
    number: u64,
}

impl Drop for Answer {
    fn drop(&mut self) {
        let Some(listener) = self.listener.upgrade() else { return };
        listener.answered.lock().oldest_first.retain(|answered| answered.number != self.number);
        listener.report();
    }
}

impl Listener {
    /// How many requests can wait, given the program's number.
    pub fn backlog(wanted: i32) -> usize {
        match usize::try_from(wanted) {
            Ok(wanted @ 1..=MAX_BACKLOG) => wanted,
            _ => MAX_BACKLOG,
        }
    }

    /// Accepts connections on a bound socket. Requests go to the observer. A socket that the system does not
    /// let listen comes back.
    pub fn start(
        engine: &Arc<Engine>,
        timeouts: Timeouts,
        policy: ResponderPolicy,
        observer: Weak<dyn RequestObserver>,
        bound: Box<dyn Bound>,
        backlog: usize,
    ) -> Result<Arc<Self>, NotBegun> {
        // The kernel's queue holds connections; the program's number is meant for requests.
        let socket = bound.listen(KERNEL_BACKLOG).map_err(|(errno, bound)| (errno, Some(bound)))?;
        let listener = Arc::new_cyclic(|me| Self {
            engine: Arc::clone(engine),
            timeouts,
            policy,
            observer,
            me: Weak::clone(me),
            backlog,
            max_half_open: max_half_open(),
            state: Mutex::default(),
            undelivered: AtomicUsize::new(0),
            paused: AtomicBool::new(false),
            answered: Mutex::default(),
            reporting: Mutex::default(),
        });
        let mut state = listener.state.lock();
        let source: Arc<Self> = Arc::clone(&listener);
        let token = watch(engine, socket.watch(), source).map_err(|errno| (errno, None))?;
        state.socket = Some((token, socket));
        drop(state);
        Ok(listener)
    }

    /// The program accepts a connection of this peer: called before the reply is sent.
    pub fn answer(listener: &Weak<Self>, peer: SocketAddr) -> Option<Answer> {
        let me = listener.upgrade()?;
        let number = me.answered.lock().add(peer.ip());
        Some(Answer { listener: Weak::clone(listener), number })
    }

    /// Closes the socket and all half-open connections.
    pub fn cancel(&self) {
        let (socket, half_open) = {
            let mut state = self.state.lock();
            state.silent = 0;
            (state.socket.take(), std::mem::take(&mut state.half_open))
        };
        if let Some((token, _socket)) = socket {
            self.engine.deregister(token);
        }
        for connection in half_open.into_iter().filter_map(|entry| entry.connection) {
            connection.cancel();
        }
    }

    /// The program has taken a request: there is room for another one.
    pub fn request_delivered(&self) {
        self.undelivered.fetch_sub(1, Ordering::SeqCst);
        if self.paused.swap(false, Ordering::SeqCst) {
            self.accept_all();
        }
    }

    /// Whether the program must take requests first. [`Self::request_delivered`] then continues.
    fn is_behind(&self) -> bool {
        let behind = || self.undelivered.load(Ordering::SeqCst) >= self.backlog;
        if !behind() {
            return false;
        }
        self.paused.store(true, Ordering::SeqCst);
        // The program may have taken one before `paused` was set.
        behind() || !self.paused.swap(false, Ordering::SeqCst)
    }

    fn accept_all(&self) {
        let Some(me) = self.me.upgrade() else { return };
        for _ in 0..TURN {
            if self.is_behind() {
                return;
            }
            let mut state = self.state.lock();
            let evicted = match self.make_room(&mut state) {
                Ok(evicted) => evicted,
                Err(until) => {
                    state.full = true;
                    return self.call_at(&mut state, until);
                }
            };
            if let Some(evicted) = evicted {
                drop(state);
                tracing::debug!("too many half-open connections: the oldest is closed");
                if let Some(connection) = evicted.connection {
                    connection.cancel();
                }
                continue;
            }
            let Some((_, socket)) = &state.socket else { return };
            let connection = match socket.accept() {
                Ok(Some(connection)) => {
                    let mut responder = Responder::new(self.policy);
                    // Usually the request has arrived already.
                    match advance(&*connection, &mut responder) {
                        RequestState::Incomplete => HalfOpen::start(&me, connection, responder),
                        RequestState::Gone => continue,
                        RequestState::Request(request) => {
                            let pending = self.pending(connection, responder);
                            let request = Some((pending, request));
                            let entry = Entry { connection: None, accepted: Instant::now(), request };
                            state.half_open.push_back(entry);
                            drop(state);
                            self.report();
                            continue;
                        }
                    }
                }
                Ok(None) => return,
                Err(errno) => Err(errno),
            };
            match connection {
                Ok(connection) => {
                    state.silent += 1;
                    let entry =
                        Entry { connection: Some(connection), accepted: Instant::now(), request: None };
                    state.half_open.push_back(entry);
                }
                Err(errno) => {
                    // No descriptors or no memory. The system does not report again that connections wait.
                    tracing::warn!("cannot accept a connection: {errno}; trying again shortly");
                    let again = Instant::now() + self.timeouts.no_descriptors;
                    return self.call_at(&mut state, again);
                }
            }
        }
        // The system does not report again that connections wait.
        let token = self.state.lock().socket.as_ref().map(|(token, _)| *token);
        if let Some(token) = token {
            self.engine.rearm(token);
        }
    }

    fn pending(&self, connection: Box<dyn SetUp>, responder: Responder) -> Pending {
        let ends = connection.ends();
        Pending { connection, ends, responder, listener: Weak::clone(&self.me) }
    }

    /// Takes a connection that has been silent for too long out of a full list. `Err`: no connection is
    /// silent for too long before that time.
    fn make_room(&self, state: &mut ListenerState) -> Result<Option<Entry>, Instant> {
        if state.silent < self.max_half_open {
            return Ok(None);
        }
        let oldest = state.half_open.iter().position(|entry| entry.request.is_none());
        let Some((oldest, entry)) = oldest.and_then(|at| Some((at, state.half_open.get(at)?))) else {
            return Ok(None);
        };
        let until = entry.accepted + GRACE;
        if Instant::now() < until {
            return Err(until);
        }
        state.silent = state.silent.saturating_sub(1);
        Ok(state.half_open.remove(oldest))
    }

    /// Makes the engine call at this time, or earlier.
    fn call_at(&self, state: &mut ListenerState, at: Instant) {
        if let Some((token, _)) = &state.socket
            && state.timer.is_none_or(|timer| at < timer)
        {
            state.timer = Some(at);
            self.engine.set_timer(*token, Some(at));
        }
    }

    /// A connection is no longer half open. `request`: its complete request.
    fn concluded(&self, connection: &HalfOpen, request: Option<(Pending, Request)>) {
        let resume = {
            let mut state = self.state.lock();
            let this = |entry: &Entry| {
                entry.connection.as_ref().is_some_and(|one| std::ptr::eq(Arc::as_ptr(one), connection))
            };
            let at = state.half_open.iter().position(this);
            // If it is not there, the listener was closed meanwhile.
            let Some(at) = at else { return };
            state.silent = state.silent.saturating_sub(1);
            if request.is_none() {
                state.half_open.remove(at);
            } else if let Some(entry) = state.half_open.get_mut(at) {
                entry.request = request;
            }
            std::mem::take(&mut state.full)
        };
        self.report();
        if resume {
            self.accept_all();
        }
    }

    /// Reports complete requests, in the order of their connections.
    fn report(&self) {
        let _reporting = self.reporting.lock();
        while let Some((pending, request)) = self.next_in_order() {
            if let Some(observer) = self.observer.upgrade() {
                observer.requested(pending, request);
            }
        }
    }

    /// The first entry that is complete, or that later ones must wait for. A request that must wait for
    /// [`Answered`] connections is passed over; with it, when to look again.
    fn first_to_report(&self, half_open: &VecDeque<Entry>, now: Instant) -> (Option<usize>, Option<Instant>) {
        let mut answered = self.answered.lock();
        answered.discard_overdue(now);
        let mut delayed_until: Option<Instant> = None;
        let first = half_open.iter().position(|entry| {
            let Some((pending, _)) = &entry.request else { return now < entry.accepted + IN_ORDER };
            let delay = answered.delay(entry.accepted, pending);
            delayed_until = delayed_until.into_iter().chain(delay).min();
            delay.is_none()
        });
        (first, delayed_until)
    }

    /// The next request to report; `None` if there is none, or it must wait for an earlier one.
    fn next_in_order(&self) -> Option<(Pending, Request)> {
        let mut state = self.state.lock();
        let now = Instant::now();
        let (first, delayed_until) = self.first_to_report(&state.half_open, now);
        if let Some(until) = delayed_until {
            self.call_at(&mut state, until);
        }
        let first = first?;
        let entry = state.half_open.get(first)?;
        if entry.request.is_none() {
            let until = entry.accepted + IN_ORDER;
            if state.half_open.len() > state.silent {
                self.call_at(&mut state, until);
            }
            return None;
        }
        let request = state.half_open.remove(first)?.request;
        // `None`: the listener was closed meanwhile.
        state.socket.as_ref()?;
        self.undelivered.fetch_add(1, Ordering::SeqCst);
        request
    }
}

/// Most half-open connections of one listener of this process: a quarter of its descriptors, so that enough
/// are left for the program's own connections, and no more than [`MAX_HALF_OPEN`].
pub fn max_half_open() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit / 4).ok()).unwrap_or(usize::MAX).min(MAX_HALF_OPEN)
}

impl Source for Listener {
    fn ready(&self, _: Readiness) {
        self.accept_all();
    }

    fn timeout(&self) {
        self.state.lock().timer = None;
        self.accept_all();
        self.report();
    }
}

/// A TCP connection whose MPA request is not complete.
struct HalfOpen {
    engine: Arc<Engine>,
    listener: Weak<Listener>,
    running: Mutex<Option<Running>>,
}

struct Running {
    token: Token,
    connection: Box<dyn SetUp>,
    responder: Responder,
}

impl HalfOpen {
    fn start(
        listener: &Arc<Listener>,
        connection: Box<dyn SetUp>,
        responder: Responder,
    ) -> Result<Arc<Self>, Errno> {
        let engine = &listener.engine;
        let half_open = Arc::new(Self {
            engine: Arc::clone(engine),
            listener: Arc::downgrade(listener),
            running: Mutex::default(),
        });
        let mut running = half_open.running.lock();
        let source: Arc<Self> = Arc::clone(&half_open);
        let token = watch(engine, connection.watch(), source)?;
        engine.set_timer(token, Some(Instant::now() + listener.timeouts.request));
        *running = Some(Running { token, connection, responder });
        drop(running);
        Ok(half_open)
    }

    fn cancel(&self) {
        if let Some(running) = self.running.lock().take() {
            self.engine.deregister(running.token);
        }
    }

    fn conclude(&self) {
        if let Some(listener) = self.listener.upgrade() {
            listener.concluded(self, None);
        }
    }
}

impl Source for HalfOpen {
    fn ready(&self, _: Readiness) {
        let mut guard = self.running.lock();
        let Some(running) = guard.as_mut() else { return };
        let state = advance(&*running.connection, &mut running.responder);
        if matches!(state, RequestState::Incomplete) {
            return;
        }
        let Some(running) = guard.take() else { return };
        self.engine.deregister(running.token);
        drop(guard);
        match state {
            RequestState::Request(request) => {
                let Some(listener) = self.listener.upgrade() else { return };
                let pending = listener.pending(running.connection, running.responder);
                listener.concluded(self, Some((pending, request)));
            }
            _ => {
                drop(running);
                self.conclude();
            }
        }
    }

    fn timeout(&self) {
        let Some(running) = self.running.lock().take() else { return };
        self.engine.deregister(running.token);
        tracing::debug!("no complete MPA request within the time limit");
        drop(running);
        self.conclude();
    }
}

#[derive(Debug)]
enum RequestState {
    Incomplete,
    Gone,
    Request(Request),
}

/// Reads as much of a request as has arrived.
fn advance(connection: &dyn SetUp, responder: &mut Responder) -> RequestState {
    let mut buffer = [0; mpa::MAX_PRIVATE_DATA];
    loop {
        let want = responder.want().min(buffer.len());
        match connection.receive(&mut buffer[..want]) {
            Ok(Got::Bytes(received)) => match responder.handle_input(&buffer[..received]) {
                Ok(None) => {}
                Ok(Some(request)) => return RequestState::Request(request),
                Err(error) => {
                    tracing::debug!(peer = %connection.ends().peer, "bad MPA request: {error}");
                    return RequestState::Gone;
                }
            },
            Ok(Got::Nothing) => return RequestState::Incomplete,
            Ok(Got::End) | Err(_) => return RequestState::Gone,
        }
    }
}
