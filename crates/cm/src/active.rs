//! Connecting: TCP, then the MPA request and its reply, over as many connections as the peer's age demands.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;
use uwarp_driver::{Readiness, Source, Token};
use uwarp_proto::setup::{Initiator, InitiatorConfig, Negotiated, Outcome, Rejection, SetupError};
use uwarp_wire::mpa;

use crate::cm::{Cm, Options};
use crate::event::EventKind;
use crate::id::Id;
use crate::socket;

/// How connecting ended, for the id.
#[derive(Debug)]
pub(crate) enum Connected {
    /// The peer accepted. The stream begins on this socket.
    Accepted(OwnedFd, Negotiated),
    /// The peer's program rejected.
    Rejected(Rejection),
    /// It came to nothing: the event to report, with its status.
    Failed(EventKind, Errno),
}

/// From where to where, and how.
#[derive(Debug)]
pub(crate) struct Target {
    /// Bind here first, if the program said so.
    pub local: Option<SocketAddr>,
    pub peer: SocketAddr,
    pub options: Options,
    pub private_data: Vec<u8>,
}

/// A connection that is being set up. The engine calls it when its socket has news.
pub(crate) struct Active {
    cm: Arc<Cm>,
    me: Weak<Self>,
    id: Weak<Id>,
    target: Target,
    running: Mutex<Option<Running>>,
    refused: Mutex<Refused>,
}

/// A listener that is not there yet.
///
/// Programs tell their peers a port and listen on it right after (perftest, qperf), or start both ends at once. An adapter
/// takes milliseconds to resolve address and route, which hides that; here both take none. So a refusal is believed only
/// when it has been repeated for a third of a second.
#[derive(Debug, Default)]
struct Refused {
    times: u32,
    /// The next attempt: its timer, and what it asks for.
    next: Option<(Token, InitiatorConfig)>,
    /// Nobody wants the connection any more.
    cancelled: bool,
}

/// Until the first repetition; each further one waits twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const MOST_REPETITIONS: u32 = 6;

#[derive(Debug)]
struct Running {
    token: Token,
    fd: OwnedFd,
    phase: Phase,
    machine: Initiator,
    config: InitiatorConfig,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Connecting,
    AwaitReply,
}

impl Active {
    /// Starts to connect, on `bound` if the program has bound the id. How it ends is reported to the id, maybe before this
    /// returns; an error that is returned is not reported.
    pub fn start(
        cm: &Arc<Cm>,
        id: &Arc<Id>,
        target: Target,
        config: InitiatorConfig,
        bound: Option<OwnedFd>,
    ) -> Result<Arc<Self>, Errno> {
        let active = Arc::new_cyclic(|me| Self {
            cm: Arc::clone(cm),
            me: Weak::clone(me),
            id: Arc::downgrade(id),
            target,
            running: Mutex::default(),
            refused: Mutex::default(),
        });
        match active.attempt(config, bound) {
            Ok(()) => Ok(active),
            Err(NoAttempt::Peer(Errno::CONNREFUSED)) if active.again_later(config) => Ok(active),
            Err(NoAttempt::Local(errno)) => Err(errno),
            Err(NoAttempt::Peer(errno)) => {
                // Over loopback a refusal may be there before `connect` returns. Programs wait for an event.
                let (kind, errno) = event_for_tcp(errno);
                id.connected(Connected::Failed(kind, errno));
                Ok(active)
            }
        }
    }

    /// Gives up, whatever there is. Nothing is reported afterwards.
    pub fn cancel(&self) {
        let mut running = self.running.lock();
        let (running, next) = {
            let mut refused = self.refused.lock();
            refused.cancelled = true;
            (running.take(), refused.next.take())
        };
        if let Some(running) = running {
            self.cm.engine().deregister(running.token);
        }
        if let Some((timer, _)) = next {
            self.cm.engine().deregister(timer);
        }
    }

    /// The peer refuses. Whether it is to be asked again, in a moment.
    fn again_later(&self, config: InitiatorConfig) -> bool {
        let Some(source) = self.me.upgrade() else { return false };
        let mut refused = self.refused.lock();
        if refused.cancelled || refused.times >= MOST_REPETITIONS {
            return false;
        }
        let pause = FIRST_PAUSE * (1 << refused.times);
        refused.times += 1;
        let engine = self.cm.engine();
        let timer = engine.new_token(source);
        refused.next = Some((timer, config));
        engine.set_timer(timer, Some(Instant::now() + pause));
        true
    }

    /// Begins anew, on a new connection. A failure is reported.
    fn attempt_again(&self, config: InitiatorConfig) {
        let failed = match self.attempt(config, None) {
            Ok(()) => return,
            Err(NoAttempt::Peer(Errno::CONNREFUSED)) if self.again_later(config) => return,
            Err(NoAttempt::Local(errno) | NoAttempt::Peer(errno)) => errno,
        };
        let (kind, errno) = event_for_tcp(failed);
        self.tell(Connected::Failed(kind, errno));
    }

    fn attempt(&self, config: InitiatorConfig, bound: Option<OwnedFd>) -> Result<(), NoAttempt> {
        let mut machine =
            Initiator::new(config, &self.target.private_data).map_err(|_| NoAttempt::Local(Errno::INVAL))?;
        let fd = match bound {
            Some(fd) => fd,
            None => self.socket().map_err(NoAttempt::Local)?,
        };
        socket::connect(&fd, self.target.peer).map_err(NoAttempt::Peer)?;
        if let (Some(id), Ok(local)) = (self.id.upgrade(), socket::local_address(&fd)) {
            id.connecting_from(local);
        }
        let Some(source) = self.me.upgrade() else { return Ok(()) };
        let timeouts = self.cm.timeouts();
        let (mut phase, mut patience) = (Phase::Connecting, timeouts.connect);
        // Over loopback the connection stands by now: the request goes out at once, and reaches the listener with it. (Not
        // `connect_progress`: it would take the error away from whoever looks next.)
        if socket::peer_address(&fd).is_ok() {
            (phase, patience) = (Phase::AwaitReply, timeouts.reply);
            // What went wrong is found out again when the reply is read.
            let _ = transmit(&fd, &mut machine);
        }
        let engine = self.cm.engine();
        // Held over the registration, so that news that come at once find the token.
        let mut running = self.running.lock();
        if self.refused.lock().cancelled {
            return Ok(());
        }
        let token =
            engine.register(fd.as_raw_fd(), source).map_err(|error| NoAttempt::Local(errno_of(&error)))?;
        engine.set_timer(token, Some(Instant::now() + patience));
        *running = Some(Running { token, fd, phase, machine, config });
        Ok(())
    }

    fn socket(&self) -> Result<OwnedFd, Errno> {
        let fd = socket::tcp(self.target.peer, &self.target.options)?;
        if let Some(local) = self.target.local {
            socket::bind(&fd, local, &self.target.options)?;
        }
        Ok(fd)
    }

    fn finish(&self, running: Running, how: Connected) {
        drop(running);
        self.tell(how);
    }

    fn tell(&self, how: Connected) {
        if let Some(id) = self.id.upgrade() {
            id.connected(how);
        }
    }

    /// Goes on on a new connection if the peer may understand a plainer request, or reports the failure.
    fn fall_back(&self, running: Running, error: SetupError) {
        let (kind, errno) = event_for(error);
        let Some(config) = running.machine.fallback() else {
            return self.finish(running, Connected::Failed(kind, errno));
        };
        tracing::debug!(
            peer = %self.target.peer,
            "{error}; trying again with revision {} {} reserved bits",
            config.revision.to_wire(),
            if config.peer.is_some() { "and" } else { "without" },
        );
        if self.target.local.is_some() {
            socket::abandon(&running.fd);
        }
        drop(running);
        self.attempt_again(config);
    }
}

impl Source for Active {
    fn ready(&self, _: Readiness) {
        let mut guard = self.running.lock();
        let Some(running) = guard.as_mut() else { return };
        let Some(end) = running.advance(&self.cm) else { return };
        let Some(running) = guard.take() else { return };
        self.cm.engine().deregister(running.token);
        drop(guard);
        match end {
            End::Tcp(errno) => {
                let config = running.config;
                // Before the next attempt, which may begin at once: it may need the same local port.
                drop(running);
                if errno == Errno::CONNREFUSED && self.again_later(config) {
                    return;
                }
                let (kind, errno) = event_for_tcp(errno);
                self.tell(Connected::Failed(kind, errno));
            }
            End::Setup(error) => self.fall_back(running, error),
            End::Outcome(Outcome::Rejected(rejection)) => {
                self.finish(running, Connected::Rejected(rejection));
            }
            End::Outcome(Outcome::Accepted(negotiated)) => {
                self.tell(Connected::Accepted(running.fd, negotiated));
            }
        }
    }

    fn timeout(&self) {
        let next = self.refused.lock().next.take();
        if let Some((timer, config)) = next {
            self.cm.engine().deregister(timer);
            return self.attempt_again(config);
        }
        let Some(running) = self.running.lock().take() else { return };
        self.cm.engine().deregister(running.token);
        if running.phase == Phase::AwaitReply {
            let limit = self.cm.timeouts().reply;
            let peer = socket::peer_address(&running.fd).ok();
            tracing::warn!(
                ?peer,
                "the peer took the connection, and its program did not accept it within {limit:?}"
            );
        }
        self.finish(running, Connected::Failed(EventKind::Unreachable, Errno::TIMEDOUT));
    }
}

/// Why an attempt did not begin.
#[derive(Debug)]
enum NoAttempt {
    /// This host refuses.
    Local(Errno),
    /// The peer, or the way to it.
    Peer(Errno),
}

/// Why a connection needs no more looking after.
#[derive(Debug)]
enum End {
    Tcp(Errno),
    Setup(SetupError),
    Outcome(Outcome),
}

impl Running {
    /// Goes as far as it can without waiting; `None`: wait for more.
    fn advance(&mut self, cm: &Cm) -> Option<End> {
        if self.phase == Phase::Connecting {
            match socket::connect_progress(&self.fd) {
                Ok(true) => {}
                Ok(false) => return None,
                Err(errno) => return Some(End::Tcp(errno)),
            }
            self.phase = Phase::AwaitReply;
            cm.engine().set_timer(self.token, Some(Instant::now() + cm.timeouts().reply));
            if let Err(end) = transmit(&self.fd, &mut self.machine) {
                return Some(end);
            }
        }
        let mut buffer = [0; mpa::MAX_PRIVATE_DATA];
        loop {
            let want = self.machine.want().min(buffer.len());
            match socket::receive(&self.fd, &mut buffer[..want]) {
                Ok(0) => return Some(End::Setup(self.machine.handle_close())),
                Ok(received) => match self.machine.handle_input(&buffer[..received]) {
                    Ok(None) => {}
                    Ok(Some(outcome)) => return Some(End::Outcome(outcome)),
                    Err(error) => {
                        // A Terminate, if there is one to send; the connection ends either way.
                        let _ = transmit(&self.fd, &mut self.machine);
                        socket::finish(&self.fd);
                        return Some(End::Setup(error));
                    }
                },
                Err(Errno::AGAIN) => return None,
                Err(Errno::CONNRESET | Errno::PIPE) => {
                    return Some(End::Setup(self.machine.handle_close()));
                }
                Err(errno) => return Some(End::Tcp(errno)),
            }
        }
    }
}

fn transmit(fd: &OwnedFd, machine: &mut Initiator) -> Result<(), End> {
    while let Some(bytes) = machine.poll_transmit() {
        match socket::send_all(fd, &bytes) {
            Ok(()) => {}
            Err(Errno::CONNRESET | Errno::PIPE) => return Err(End::Setup(machine.handle_close())),
            Err(errno) => return Err(End::Tcp(errno)),
        }
    }
    Ok(())
}

/// Event and status for a failure of TCP, as Linux' iWARP connection manager reports them.
pub(crate) fn event_for_tcp(errno: Errno) -> (EventKind, Errno) {
    match errno {
        Errno::CONNREFUSED | Errno::CONNRESET | Errno::PIPE => (EventKind::Rejected, errno),
        Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::HOSTDOWN | Errno::NETDOWN => {
            (EventKind::Unreachable, errno)
        }
        _ => (EventKind::ConnectError, errno),
    }
}

/// Event and status for a failure of set-up.
fn event_for(error: SetupError) -> (EventKind, Errno) {
    match error {
        SetupError::Closed { .. } => (EventKind::Rejected, Errno::CONNRESET),
        SetupError::InsufficientIrd { .. } => (EventKind::ConnectError, Errno::NOMEM),
        _ => (EventKind::ConnectError, Errno::PROTO),
    }
}

pub(crate) fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}
