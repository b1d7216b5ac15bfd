//! Listening: connections are taken from the kernel, and become requests when their MPA request is whole.
//!
//! Until then they are half open: nobody is behind them yet but a TCP peer, so their number and their time are bounded.
//! When there are too many, the oldest goes, not the newest: an honest peer sends its request at once, so the oldest are
//! those that do not.

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

/// Most half-open connections of one listener.
pub const MAX_HALF_OPEN: usize = 128;

/// As many requests as may wait for a program that gave no backlog, or an absurd one. As Linux' rdma_ucm.
pub const MAX_BACKLOG: usize = 1024;

/// A listening socket.
pub(crate) struct Listener {
    cm: Arc<Cm>,
    id: Weak<Id>,
    me: Weak<Self>,
    backlog: usize,
    state: Mutex<ListenerState>,
    /// Held while requests are told, so that two threads do not tell them in another order.
    telling: Mutex<()>,
}

#[derive(Default)]
struct ListenerState {
    socket: Option<(Token, OwnedFd)>,
    /// In the order in which the kernel gave them out.
    half_open: VecDeque<Entry>,
    /// Requests that are queued as events and not yet taken by the program.
    undelivered: usize,
    /// Connections may wait in the kernel because `undelivered` had reached the backlog.
    paused: bool,
}

/// A connection between `accept` and the request's event.
struct Entry {
    connection: Arc<HalfOpen>,
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
        socket::listen(&fd, MAX_BACKLOG)?;
        let listener = Arc::new_cyclic(|me| Self {
            cm: Arc::clone(cm),
            id: Arc::downgrade(id),
            me: Weak::clone(me),
            backlog,
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
            (state.socket.take(), std::mem::take(&mut state.half_open))
        };
        if let Some((token, _fd)) = socket {
            self.cm.engine().deregister(token);
        }
        for entry in half_open {
            entry.connection.cancel();
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
        loop {
            let mut state = self.state.lock();
            if state.undelivered >= self.backlog {
                state.paused = true;
                return;
            }
            let Some((token, fd)) = &state.socket else { return };
            let token = *token;
            let connection = match socket::accept(fd) {
                Ok(fd) => HalfOpen::start(&self.cm, &me, fd),
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
                    let silent = |entry: &Entry| entry.request.is_none();
                    let evicted = (state.half_open.iter().filter(|e| silent(e)).count() >= MAX_HALF_OPEN)
                        .then(|| state.half_open.iter().position(silent))
                        .flatten()
                        .and_then(|oldest| state.half_open.remove(oldest));
                    state.half_open.push_back(Entry { connection, accepted: Instant::now(), request: None });
                    drop(state);
                    if let Some(evicted) = evicted {
                        tracing::debug!("too many half-open connections: the oldest is closed");
                        evicted.connection.cancel();
                    }
                }
                Err(errno) => {
                    // No descriptors or no memory. The socket will not say again that connections wait.
                    tracing::warn!("cannot take a connection: {errno}; trying again shortly");
                    let again = Instant::now() + self.cm.timeouts().no_descriptors;
                    self.cm.engine().set_timer(token, Some(again));
                    return;
                }
            }
        }
    }

    /// A connection is not half open any more. `request`: it asks for a stream.
    fn concluded(&self, connection: &HalfOpen, request: Option<(Pending, Request)>) {
        {
            let mut state = self.state.lock();
            let at =
                state.half_open.iter().position(|e| std::ptr::eq(Arc::as_ptr(&e.connection), connection));
            // Not there: the listener was closed meanwhile.
            let Some(at) = at else { return };
            if request.is_none() {
                state.half_open.remove(at);
            } else if let Some(entry) = state.half_open.get_mut(at) {
                entry.request = request;
            }
        }
        self.tell();
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
            if state.half_open.iter().any(|entry| entry.request.is_some())
                && let Some((token, _)) = &state.socket
            {
                self.cm.engine().set_timer(*token, Some(until));
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

impl Source for Listener {
    fn ready(&self, _: Readiness) {
        self.accept_all();
    }

    fn timeout(&self) {
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
    fn start(cm: &Arc<Cm>, listener: &Arc<Listener>, fd: OwnedFd) -> Result<Arc<Self>, Errno> {
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
        *running = Some(Running { token, fd, responder: Responder::new(cm.responder_policy()) });
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
        let end = running.advance();
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

impl Running {
    fn advance(&mut self) -> End {
        let mut buffer = [0; mpa::MAX_PRIVATE_DATA];
        loop {
            let want = self.responder.want().min(buffer.len());
            match socket::receive(&self.fd, &mut buffer[..want]) {
                Ok(0) => return End::Gone,
                Ok(received) => match self.responder.handle_input(&buffer[..received]) {
                    Ok(None) => {}
                    Ok(Some(request)) => return End::Request(request),
                    Err(error) => {
                        tracing::debug!(peer = ?socket::peer_address(&self.fd).ok(), "bad MPA request: {error}");
                        return End::Gone;
                    }
                },
                Err(Errno::AGAIN) => return End::NotYet,
                Err(_) => return End::Gone,
            }
        }
    }
}
