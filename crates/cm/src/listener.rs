//! Listening: connections are taken from the kernel, and become requests when their MPA request is whole.
//!
//! Until then they are half open: nobody is behind them yet but a TCP peer, so their number and their time are bounded.
//! When there are too many, the oldest goes, not the newest: an honest peer sends its request at once, so the oldest are
//! those that do not.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Instant;

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
}

#[derive(Default)]
struct ListenerState {
    socket: Option<(Token, OwnedFd)>,
    half_open: VecDeque<Arc<HalfOpen>>,
    /// Requests that are queued as events and not yet taken by the program.
    undelivered: usize,
    /// Connections may wait in the kernel because `undelivered` had reached the backlog.
    paused: bool,
}

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
        for connection in half_open {
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
                    let evicted = if state.half_open.len() >= MAX_HALF_OPEN {
                        state.half_open.pop_front()
                    } else {
                        None
                    };
                    state.half_open.push_back(connection);
                    drop(state);
                    if let Some(evicted) = evicted {
                        tracing::debug!("too many half-open connections: the oldest is closed");
                        evicted.cancel();
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
        let listening = {
            let mut state = self.state.lock();
            state.half_open.retain(|other| !std::ptr::eq(Arc::as_ptr(other), connection));
            let listening = state.socket.is_some();
            if request.is_some() && listening {
                state.undelivered += 1;
            }
            listening
        };
        if let (Some((pending, request)), true, Some(id)) = (request, listening, self.id.upgrade()) {
            id.requested(pending, request);
        }
    }
}

impl Source for Listener {
    fn ready(&self, _: Readiness) {
        self.accept_all();
    }

    fn timeout(&self) {
        self.accept_all();
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
