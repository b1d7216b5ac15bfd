//! Connecting: TCP, then the MPA request and its reply. An older peer may need several connections, each with
//! a plainer request.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;
use uwarp_driver::{Alarm, Engine, Readiness, Source, Token};
use uwarp_llp::carrier::{Bind, Bound, Close, Got, Options, Refusal, SetUp, TakePort, send_frame};
use uwarp_llp::route::wildcard_for;
use uwarp_proto::setup::{Initiator, InitiatorConfig, Outcome, SetupError};
use uwarp_wire::mpa;

use crate::carriers::{NotBegun, carrier, watch};
use crate::event::EventKind;
use crate::handshake::{ConnectObserver, Connected};
use crate::timeouts::Timeouts;

/// Which addresses to connect, and with which options.
#[derive(Debug)]
pub(crate) struct Target {
    /// Bind here first, if the program said so.
    pub local: Option<SocketAddr>,
    pub peer: SocketAddr,
    pub options: Options,
    pub private_data: Vec<u8>,
    /// The peer may be one that understands a plainer request only. By number there is none: both ends are
    /// uwarp.
    pub falls_back: bool,
}

/// A connection that is being set up. The engine calls it when its socket is ready.
pub(crate) struct Active {
    engine: Arc<Engine>,
    timeouts: Timeouts,
    me: Weak<Self>,
    observer: Weak<dyn ConnectObserver>,
    target: Target,
    running: Mutex<Option<Running>>,
    refused: Mutex<Refused>,
}

/// A refused attempt that is repeated: the listener may not exist yet.
///
/// Programs tell their peers a port and listen on it right after (perftest, qperf), or start both ends at
/// once. An adapter takes milliseconds to resolve address and route, which hides that; here both take no
/// time. So a refusal counts only when it has been repeated for a third of a second.
#[derive(Debug, Default)]
struct Refused {
    times: u32,
    /// The next attempt: its timer, and the configuration of its request.
    next: Option<(Alarm, InitiatorConfig)>,
    /// The program has cancelled the connection.
    cancelled: bool,
}

/// The pause before the first repetition; each further one is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const MOST_REPETITIONS: u32 = 6;

struct Running {
    token: Token,
    connection: Box<dyn SetUp>,
    phase: Phase,
    machine: Initiator,
    config: InitiatorConfig,
}

#[derive(Debug)]
enum Phase {
    /// The request is sent when TCP is connected.
    Connecting {
        request: Vec<u8>,
    },
    AwaitReply,
}

impl Active {
    /// Starts to connect, on `bound` if the program has bound a socket. The result is reported to the
    /// observer, possibly before this returns; an error that is returned is not reported, and the socket that
    /// the program has bound, or one with the same port, comes back with it.
    pub fn start(
        engine: &Arc<Engine>,
        timeouts: Timeouts,
        observer: Weak<dyn ConnectObserver>,
        target: Target,
        config: InitiatorConfig,
        bound: Option<Box<dyn Bound>>,
    ) -> Result<Arc<Self>, NotBegun> {
        let active = Arc::new_cyclic(|me| Self {
            engine: Arc::clone(engine),
            timeouts,
            me: Weak::clone(me),
            observer,
            target,
            running: Mutex::default(),
            refused: Mutex::default(),
        });
        match active.attempt(config, bound) {
            Ok(()) => Ok(active),
            Err(NoAttempt::Peer(Refusal::Refused)) if active.again_later(config) => Ok(active),
            Err(NoAttempt::Local(errno, bound)) => Err((errno, bound)),
            Err(NoAttempt::Peer(why)) => {
                // Over loopback a refusal may be there before `connect` returns. Programs wait for an event.
                let (kind, errno) = event_for_refusal(why);
                active.report(Connected::Failed(kind, errno));
                Ok(active)
            }
        }
    }

    /// Cancels the attempt in any phase. Nothing is reported afterwards.
    pub fn cancel(&self) {
        let mut running = self.running.lock();
        {
            let mut refused = self.refused.lock();
            refused.cancelled = true;
            refused.next = None;
        }
        if let Some(running) = running.take() {
            self.engine.deregister(running.token);
        }
    }

    /// The peer refuses. Returns whether another attempt follows after a pause.
    fn again_later(&self, config: InitiatorConfig) -> bool {
        let mut refused = self.refused.lock();
        if refused.cancelled || refused.times >= MOST_REPETITIONS {
            return false;
        }
        let pause = FIRST_PAUSE * (1 << refused.times);
        refused.times += 1;
        let me: Weak<Self> = Weak::clone(&self.me);
        refused.next = Some((Alarm::at(&self.engine, me, Instant::now() + pause), config));
        true
    }

    /// Starts again on a new connection. A failure is reported.
    fn attempt_again(&self, config: InitiatorConfig) {
        let failed = match self.attempt(config, None) {
            Ok(()) => return,
            Err(NoAttempt::Peer(Refusal::Refused)) if self.again_later(config) => return,
            Err(NoAttempt::Local(errno, _)) => Refusal::from_errno(errno),
            Err(NoAttempt::Peer(why)) => why,
        };
        let (kind, errno) = event_for_refusal(failed);
        self.report(Connected::Failed(kind, errno));
    }

    fn attempt(&self, config: InitiatorConfig, bound: Option<Box<dyn Bound>>) -> Result<(), NoAttempt> {
        let mut machine = match Initiator::new(config, &self.target.private_data) {
            Ok(machine) => machine,
            Err(_) => return Err(NoAttempt::Local(Errno::INVAL, bound)),
        };
        let was_bound = bound.as_ref().map(|bound| bound.local());
        let socket = match bound {
            Some(socket) => socket,
            None => self.socket().map_err(|errno| NoAttempt::Local(errno, None))?,
        };
        let connection = socket.connect(self.target.peer).map_err(|(why, _)| NoAttempt::Peer(why))?;
        // Over loopback TCP is connected by now. The request is sent before anything else is done, so that
        // the listener finds it together with the connection.
        let request = machine.poll_transmit().unwrap_or_default();
        let (phase, patience) = match connection.send_some(&request) {
            Ok(0) => (Phase::Connecting { request }, self.timeouts.connect),
            Ok(sent) if sent < request.len() => return Err(NoAttempt::Peer(Refusal::Local(Errno::NOBUFS))),
            // The peer has hung up: reading the reply shows it again.
            Ok(_) | Err(Refusal::Gone) => (Phase::AwaitReply, self.timeouts.reply),
            Err(why) => return Err(NoAttempt::Peer(why)),
        };
        if let Some(observer) = self.observer.upgrade() {
            observer.connecting_from(connection.ends().local);
        }
        let Some(source) = self.me.upgrade() else { return Ok(()) };
        // Locked during the registration, so that readiness that comes at once finds the token.
        let mut running = self.running.lock();
        if self.refused.lock().cancelled {
            return Ok(());
        }
        let token = match watch(&self.engine, connection.watch(), source) {
            Ok(token) => token,
            Err(errno) => {
                drop(running);
                // So that its port is free at once.
                connection.close(Close::Reset);
                return Err(NoAttempt::Local(errno, was_bound.and_then(|local| self.bind_again(local))));
            }
        };
        self.engine.set_timer(token, Some(Instant::now() + patience));
        *running = Some(Running { token, connection, phase, machine, config });
        Ok(())
    }

    fn socket(&self) -> Result<Box<dyn Bound>, Errno> {
        let (address, port) = match self.target.local {
            Some(local) if local.port() != 0 => (local, TakePort::Now),
            Some(local) => (local, TakePort::AtConnect),
            None => (wildcard_for(self.target.peer), TakePort::AtConnect),
        };
        carrier().bind(&Bind { address, port, options: self.target.options })
    }

    /// The port that the program has bound, if it can be bound again.
    fn bind_again(&self, address: SocketAddr) -> Option<Box<dyn Bound>> {
        carrier().bind(&Bind { address, port: TakePort::Now, options: self.target.options }).ok()
    }

    fn finish(&self, running: Running, how: Connected) {
        drop(running);
        self.report(how);
    }

    fn report(&self, how: Connected) {
        if let Some(observer) = self.observer.upgrade() {
            observer.connected(how);
        }
    }

    /// Tries again on a new connection if the peer may understand a plainer request, or reports the failure.
    fn fall_back(&self, running: Running, error: SetupError) {
        let (kind, errno) = event_for(error);
        let Some(config) = running.machine.fallback().filter(|_| self.target.falls_back) else {
            return self.finish(running, Connected::Failed(kind, errno));
        };
        tracing::debug!(
            peer = %self.target.peer,
            "{error}; trying again with revision {} {} reserved bits",
            config.revision.to_wire(),
            if config.peer.is_some() { "and" } else { "without" },
        );
        if self.target.local.is_some() {
            running.connection.close(Close::Reset);
        } else {
            running.connection.close(Close::Finish);
        }
        self.attempt_again(config);
    }
}

impl Source for Active {
    fn ready(&self, _: Readiness) {
        let mut guard = self.running.lock();
        let Some(running) = guard.as_mut() else { return };
        let Some(end) = running.advance(&self.engine, &self.timeouts) else { return };
        let Some(running) = guard.take() else { return };
        self.engine.deregister(running.token);
        drop(guard);
        match end {
            AttemptEnd::Lower(why) => {
                let config = running.config;
                // Before the next attempt, which may begin at once: it may need the same local port.
                drop(running);
                if why == Refusal::Refused && self.again_later(config) {
                    return;
                }
                let (kind, errno) = event_for_refusal(why);
                self.report(Connected::Failed(kind, errno));
            }
            AttemptEnd::Setup(error) => self.fall_back(running, error),
            AttemptEnd::Outcome(Outcome::Rejected(rejection)) => {
                self.finish(running, Connected::Rejected(rejection));
            }
            AttemptEnd::Outcome(Outcome::Accepted(negotiated)) => {
                self.report(Connected::Accepted(running.connection, negotiated));
            }
        }
    }

    fn timeout(&self) {
        let next = self.refused.lock().next.take();
        if let Some((_, config)) = next {
            return self.attempt_again(config);
        }
        let Some(running) = self.running.lock().take() else { return };
        self.engine.deregister(running.token);
        if matches!(running.phase, Phase::AwaitReply) {
            let limit = self.timeouts.reply;
            let peer = running.connection.ends().peer;
            tracing::warn!(
                %peer,
                "the peer is connected by TCP, but its program did not accept the request within {limit:?}"
            );
        }
        self.finish(running, Connected::Failed(EventKind::Unreachable, Errno::TIMEDOUT));
    }
}

/// Why an attempt did not begin.
enum NoAttempt {
    /// This host refuses; with what the program has bound.
    Local(Errno, Option<Box<dyn Bound>>),
    /// The peer refuses, or there is no route to it.
    Peer(Refusal),
}

/// Why an attempt has ended.
#[derive(Debug)]
enum AttemptEnd {
    Lower(Refusal),
    Setup(SetupError),
    Outcome(Outcome),
}

impl Running {
    /// Goes as far as possible without waiting; `None`: wait for more input.
    fn advance(&mut self, engine: &Engine, timeouts: &Timeouts) -> Option<AttemptEnd> {
        if let Phase::Connecting { request } = &self.phase {
            match self.connection.send_some(request) {
                Ok(0) => return None,
                Ok(sent) if sent < request.len() => {
                    return Some(AttemptEnd::Lower(Refusal::Local(Errno::NOBUFS)));
                }
                Ok(_) => {}
                Err(Refusal::Gone) => return Some(AttemptEnd::Setup(self.machine.handle_close())),
                Err(why) => return Some(AttemptEnd::Lower(why)),
            }
            self.phase = Phase::AwaitReply;
            engine.set_timer(self.token, Some(Instant::now() + timeouts.reply));
        }
        let mut buffer = [0; mpa::MAX_PRIVATE_DATA];
        loop {
            let want = self.machine.want().min(buffer.len());
            match self.connection.receive(&mut buffer[..want]) {
                Ok(Got::Bytes(received)) => match self.machine.handle_input(&buffer[..received]) {
                    Ok(None) => {}
                    Ok(Some(outcome)) => return Some(AttemptEnd::Outcome(outcome)),
                    Err(error) => {
                        // A Terminate, if there is one to send; the connection ends either way.
                        while let Some(bytes) = self.machine.poll_transmit() {
                            let _ = send_frame(&*self.connection, &bytes);
                        }
                        return Some(AttemptEnd::Setup(error));
                    }
                },
                Ok(Got::Nothing) => return None,
                Ok(Got::End) | Err(Refusal::Gone) => {
                    return Some(AttemptEnd::Setup(self.machine.handle_close()));
                }
                Err(why) => return Some(AttemptEnd::Lower(why)),
            }
        }
    }
}

/// Event and status for a failure of the lower layer, as Linux' iWARP connection manager reports them.
fn event_for_refusal(why: Refusal) -> (EventKind, Errno) {
    let kind = match why {
        Refusal::Refused | Refusal::Gone => EventKind::Rejected,
        Refusal::Unreachable(_) => EventKind::Unreachable,
        Refusal::Local(_) => EventKind::ConnectError,
    };
    (kind, why.errno())
}

/// Event and status for a failure of set-up.
fn event_for(error: SetupError) -> (EventKind, Errno) {
    match error {
        SetupError::Closed { .. } => (EventKind::Rejected, Errno::CONNRESET),
        SetupError::InsufficientIrd { .. } => (EventKind::ConnectError, Errno::NOMEM),
        _ => (EventKind::ConnectError, Errno::PROTO),
    }
}
