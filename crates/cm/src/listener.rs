//! Listening: connections are taken from the kernel, and become requests when their MPA request is whole.
//!
//! Until then they are half open: nobody is behind them yet but a TCP peer, so their number and their time are bounded.
//! When there are too many, the oldest goes, not the newest: an honest peer sends its request soon, so the oldest are
//! those that do not. Soon is not at once: a peer that begins a thousand connections has all of them connected by its kernel before
//! it has sent the first request. So none goes before it had a little time; until then new ones wait in the kernel.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;
use uwarp_driver::{Readiness, Source, Token};
use uwarp_proto::setup::{Request, Responder};
use uwarp_wire::mpa;

use crate::active::errno_of;
use crate::cm::Cm;
use crate::id::Id;
use crate::socket;

/// Most half-open connections of one listener; fewer where the process may have few descriptors.
pub const MAX_HALF_OPEN: usize = 1024;

/// How long a connection may be silent however many others there are.
const GRACE: Duration = Duration::from_millis(200);

/// As many requests as may wait for a program that gave no backlog, or an absurd one. As Linux' rdma_ucm.
pub const MAX_BACKLOG: usize = 1024;

/// Connections taken before others have their turn: peers may connect as fast as they are taken.
const TURN: usize = 64;

/// Connections that the kernel lets wait, as far as `net.core.somaxconn` goes (4096 where nobody changed it). What does not fit
/// is lost and comes again after a second, and peers may make thousands at once.
const KERNEL_BACKLOG: usize = 65_535;

/// A listening socket.
pub(crate) struct Listener {
    cm: Arc<Cm>,
    id: Weak<Id>,
    me: Weak<Self>,
    backlog: usize,
    max_half_open: usize,
    state: Mutex<ListenerState>,
    /// Held while requests are told, so that two threads do not tell them in another order.
    telling: Mutex<()>,
}

#[derive(Default)]
struct ListenerState {
    socket: Option<(Token, OwnedFd)>,
    /// In the order in which the kernel gave them out.
    half_open: VecDeque<Entry>,
    /// How many of them have not sent their request.
    silent: usize,
    /// Requests that are queued as events and not yet taken by the program.
    undelivered: usize,
    /// Connections may wait in the kernel because `undelivered` had reached the backlog.
    paused: bool,
    /// Or because there were too many half-open ones.
    full: bool,
    /// When the engine calls.
    timer: Option<Instant>,
}

/// A connection between `accept` and the request's event.
struct Entry {
    /// None where the request was there as soon as the connection.
    connection: Option<Arc<HalfOpen>>,
    accepted: Instant,
    /// The request is whole; requests of earlier connections are told first.
    request: Option<(Pending, Request)>,
}

/// How long a request waits for those of connections that were accepted before its own.
///
/// Programs that make several connections to one peer (perftest with `-q`) take it that the requests arrive in the order in
/// which the peer made them. Through adapters they do; here they are bytes on sockets that different threads read. A
/// peer that sends nothing must not hold up others for longer than nobody notices.
const IN_ORDER: Duration = Duration::from_millis(10);

/// A request that waits for the program's decision.
#[derive(Debug)]
pub(crate) struct Pending {
    pub fd: OwnedFd,
    pub responder: Responder,
}

impl Listener {
    /// How many requests may wait, from what the program said.
    pub fn backlog(wanted: i32) -> usize {
        match usize::try_from(wanted) {
            Ok(wanted @ 1..=MAX_BACKLOG) => wanted,
            _ => MAX_BACKLOG,
        }
    }

    /// Takes connections from a bound socket. Requests go to the id.
    pub fn start(cm: &Arc<Cm>, id: &Arc<Id>, fd: OwnedFd, backlog: usize) -> Result<Arc<Self>, Errno> {
        // The kernel's own queue holds what comes in while the program does not look; a program's small number is
        // meant for requests.
        socket::listen(&fd, KERNEL_BACKLOG)?;
        let listener = Arc::new_cyclic(|me| Self {
            cm: Arc::clone(cm),
            id: Arc::downgrade(id),
            me: Weak::clone(me),
            backlog,
            max_half_open: max_half_open(),
            state: Mutex::default(),
            telling: Mutex::default(),
        });
        let mut state = listener.state.lock();
        let source: Arc<Self> = Arc::clone(&listener);
        let token = cm.engine().register(fd.as_raw_fd(), source).map_err(|error| errno_of(&error))?;
        state.socket = Some((token, fd));
        drop(state);
        Ok(listener)
    }

    /// Closes the socket and all half-open connections.
    pub fn cancel(&self) {
        let (socket, half_open) = {
            let mut state = self.state.lock();
            state.silent = 0;
            (state.socket.take(), std::mem::take(&mut state.half_open))
        };
        if let Some((token, _fd)) = socket {
            self.cm.engine().deregister(token);
        }
        for connection in half_open.into_iter().filter_map(|entry| entry.connection) {
            connection.cancel();
        }
    }

    /// The program has taken a request, so that there is room for another.
    pub fn request_delivered(&self) {
        let resume = {
            let mut state = self.state.lock();
            state.undelivered = state.undelivered.saturating_sub(1);
            std::mem::take(&mut state.paused)
        };
        if resume {
            self.accept_all();
        }
    }

    fn accept_all(&self) {
        let Some(me) = self.me.upgrade() else { return };
        for _ in 0..TURN {
            let mut state = self.state.lock();
            if state.undelivered >= self.backlog {
                state.paused = true;
                return;
            }
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
            let Some((_, fd)) = &state.socket else { return };
            let connection = match socket::accept(fd) {
                Ok(fd) => {
                    let mut responder = Responder::new(self.cm.responder_policy());
                    // Mostly the request is there already; then there is nothing to wait for.
                    match advance(&fd, &mut responder) {
                        End::NotYet => HalfOpen::start(&self.cm, &me, fd, responder),
                        End::Gone => continue,
                        End::Request(request) => {
                            let request = Some((Pending { fd, responder }, request));
                            let entry = Entry { connection: None, accepted: Instant::now(), request };
                            state.half_open.push_back(entry);
                            drop(state);
                            self.tell();
                            continue;
                        }
                    }
                }
                Err(Errno::AGAIN) => return,
                // That one connection is gone; the next may be well (accept(2) names these).
                Err(
                    Errno::INTR
                    | Errno::CONNABORTED
                    | Errno::PROTO
                    | Errno::NETDOWN
                    | Errno::NETUNREACH
                    | Errno::HOSTDOWN
                    | Errno::HOSTUNREACH
                    | Errno::NONET
                    | Errno::NOPROTOOPT
                    | Errno::OPNOTSUPP,
                ) => continue,
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
                    // No descriptors or no memory. The socket will not say again that connections wait.
                    tracing::warn!("cannot take a connection: {errno}; trying again shortly");
                    let again = Instant::now() + self.cm.timeouts().no_descriptors;
                    return self.call_at(&mut state, again);
                }
            }
        }
        // The system will not say again that connections wait.
        let token = self.state.lock().socket.as_ref().map(|(token, _)| *token);
        if let Some(token) = token {
            self.cm.engine().rearm(token);
        }
    }

    /// Takes a connection that has been silent for too long out of a full list; where there is none, says when there will be.
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

    /// Has the engine call then, or earlier.
    fn call_at(&self, state: &mut ListenerState, at: Instant) {
        if let Some((token, _)) = &state.socket
            && state.timer.is_none_or(|timer| at < timer)
        {
            state.timer = Some(at);
            self.cm.engine().set_timer(*token, Some(at));
        }
    }

    /// A connection is not half open any more. `request`: it asks for a stream.
    fn concluded(&self, connection: &HalfOpen, request: Option<(Pending, Request)>) {
        let resume = {
            let mut state = self.state.lock();
            let this = |entry: &Entry| {
                entry.connection.as_ref().is_some_and(|one| std::ptr::eq(Arc::as_ptr(one), connection))
            };
            let at = state.half_open.iter().position(this);
            // Not there: the listener was closed meanwhile.
            let Some(at) = at else { return };
            state.silent = state.silent.saturating_sub(1);
            if request.is_none() {
                state.half_open.remove(at);
            } else if let Some(entry) = state.half_open.get_mut(at) {
                entry.request = request;
            }
            std::mem::take(&mut state.full)
        };
        self.tell();
        if resume {
            self.accept_all();
        }
    }

    /// Tells the id of whole requests, in the order of their connections.
    fn tell(&self) {
        let _telling = self.telling.lock();
        while let Some((pending, request)) = self.next_in_order() {
            if let Some(id) = self.id.upgrade() {
                id.requested(pending, request);
            }
        }
    }

    /// The next request to tell; `None` if there is none, or it has to wait for an earlier one.
    fn next_in_order(&self) -> Option<(Pending, Request)> {
        let mut state = self.state.lock();
        let now = Instant::now();
        let first = state
            .half_open
            .iter()
            .position(|entry| entry.request.is_some() || now < entry.accepted + IN_ORDER)?;
        let entry = state.half_open.get(first)?;
        if entry.request.is_none() {
            let until = entry.accepted + IN_ORDER;
            if state.half_open.len() > state.silent {
                self.call_at(&mut state, until);
            }
            return None;
        }
        let request = state.half_open.remove(first)?.request;
        // Closed meanwhile: nobody wants it.
        state.socket.as_ref()?;
        state.undelivered += 1;
        request
    }
}

/// Most half-open connections of one listener of this process: a quarter of its descriptors, so that the program's own
/// connections are not short of them, and no more than [`MAX_HALF_OPEN`].
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
        self.tell();
    }
}

/// A TCP connection whose MPA request is not whole.
struct HalfOpen {
    cm: Arc<Cm>,
    listener: Weak<Listener>,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    token: Token,
    fd: OwnedFd,
    responder: Responder,
}

impl HalfOpen {
    fn start(
        cm: &Arc<Cm>,
        listener: &Arc<Listener>,
        fd: OwnedFd,
        responder: Responder,
    ) -> Result<Arc<Self>, Errno> {
        let connection = Arc::new(Self {
            cm: Arc::clone(cm),
            listener: Arc::downgrade(listener),
            running: Mutex::default(),
        });
        let engine = cm.engine();
        let mut running = connection.running.lock();
        let source: Arc<Self> = Arc::clone(&connection);
        let token = engine.register(fd.as_raw_fd(), source).map_err(|error| errno_of(&error))?;
        engine.set_timer(token, Some(Instant::now() + cm.timeouts().request));
        *running = Some(Running { token, fd, responder });
        drop(running);
        Ok(connection)
    }

    fn cancel(&self) {
        if let Some(running) = self.running.lock().take() {
            self.cm.engine().deregister(running.token);
        }
    }

    fn conclude(&self, request: Option<(Pending, Request)>) {
        if let Some(listener) = self.listener.upgrade() {
            listener.concluded(self, request);
        }
    }
}

impl Source for HalfOpen {
    fn ready(&self, _: Readiness) {
        let mut guard = self.running.lock();
        let Some(running) = guard.as_mut() else { return };
        let end = advance(&running.fd, &mut running.responder);
        if matches!(end, End::NotYet) {
            return;
        }
        let Some(running) = guard.take() else { return };
        self.cm.engine().deregister(running.token);
        drop(guard);
        match end {
            End::Request(request) => {
                let Running { fd, responder, .. } = running;
                self.conclude(Some((Pending { fd, responder }, request)));
            }
            _ => {
                drop(running);
                self.conclude(None);
            }
        }
    }

    fn timeout(&self) {
        let Some(running) = self.running.lock().take() else { return };
        self.cm.engine().deregister(running.token);
        tracing::debug!("no MPA request in time");
        drop(running);
        self.conclude(None);
    }
}

#[derive(Debug)]
enum End {
    NotYet,
    Gone,
    Request(Request),
}

/// Reads what there is of a request.
fn advance(fd: &OwnedFd, responder: &mut Responder) -> End {
    let mut buffer = [0; mpa::MAX_PRIVATE_DATA];
    loop {
        let want = responder.want().min(buffer.len());
        match socket::receive(fd, &mut buffer[..want]) {
            Ok(0) => return End::Gone,
            Ok(received) => match responder.handle_input(&buffer[..received]) {
                Ok(None) => {}
                Ok(Some(request)) => return End::Request(request),
                Err(error) => {
                    tracing::debug!(peer = ?socket::peer_address(fd).ok(), "bad MPA request: {error}");
                    return End::Gone;
                }
            },
            Err(Errno::AGAIN) => return End::NotYet,
            Err(_) => return End::Gone,
        }
    }
}
