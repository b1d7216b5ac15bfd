//! Connecting: TCP, then the MPA request and its reply. It may take several connections: a listener may not
//! exist yet, a peer may close without a word for a reason that passes, and an older peer may need a plainer
//! request.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_llp::carrier::{Close, Refusal};
use uwarp_proto::setup::{InitiatorConfig, Negotiated, Rejection, SetupError};
use uwarp_rnic::qp::Now;

use super::handshake::{Event, Failure, Handshake};
use super::{Action, ConnKey, Input, Machine, Space, Transmit, Want, earlier, is_over};
use crate::event::EventKind;
use crate::timeouts::Timeouts;

/// The pause before a connection is tried again; for a listener that refuses, each further one is twice as
/// long.
const FIRST_PAUSE: Duration = Duration::from_millis(5);

/// How often a refused connection is tried again.
///
/// Programs tell their peers a port and listen on it right after (perftest, qperf), or start both ends at
/// once. An adapter takes milliseconds to resolve address and route, which hides that; here both take no
/// time. So a refusal counts only when it has been repeated for a third of a second.
const MOST_REPETITIONS: u32 = 6;

/// How long the peer may be silent before the log says so: long before the limits, and longer than any
/// network.
const SILENT: Duration = Duration::from_secs(3);

/// What to connect to, and what to say there.
#[derive(Debug)]
pub struct Target {
    /// The address that the program has bound, if it has. Then a connection that is given up is reset, so
    /// that the next one can have the same port.
    pub local: Option<SocketAddr>,
    /// The peer's.
    pub peer: SocketAddr,
    /// The first request. Later ones may be plainer.
    pub config: InitiatorConfig,
    /// The program's.
    pub private_data: Vec<u8>,
    /// Try plainer requests if the peer does not understand this one. Not between queue pairs that are
    /// connected by number: both ends are uwarp there, and a plainer request would make them strangers.
    pub fall_back: bool,
}

/// A connection that is being set up.
#[derive(Debug)]
pub struct Active {
    names: Space,
    timeouts: Timeouts,
    target: Target,
    state: State,
    /// How often the peer has refused.
    refused: u32,
    /// A silent end was answered with the same request again.
    repeated: bool,
    /// A connection was begun.
    begun: bool,
    /// The log says then that the peer is silent. Not of queue pairs that are connected by number, which
    /// have words of their own.
    silent: Option<Instant>,
    /// Has a Terminate to send. The actions wait until it is sent or finds no room.
    leaving: Option<Attempt>,
    actions: VecDeque<Action<Report>>,
}

/// | state | event | → | actions |
/// |-|-|-|-|
/// | – | start | Connecting | Connect; the request waits in `poll_transmit` |
/// | Connecting | first byte sent | Asking | deadline: reply |
/// | Connecting | refused, fewer than 6 times | Paused | 5 ms·2ⁿ |
/// | Connecting | other failure, limit | Over | Close; Report Failed |
/// | Asking | Accepted | Over | Report with the connection |
/// | Asking | Rejected | Over | Close; Report |
/// | both | silent end, first time | Paused | Close (Reset if bound); 5 ms; the same request again |
/// | both | silent end again, not enhanced; `fall_back` | Connecting | Close (as above); plainer Connect |
/// | Asking | other error, limit | Over | Terminate, Close; Report Failed |
/// | Paused | limit | Connecting | Connect |
/// | any | cancel | Over | Close |
///
/// There is no Close for a connection that the shell has dropped already ([`Input::Failed`]). A connection
/// that breaks before the request is sent has ended silently, too.
#[derive(Debug)]
enum State {
    Connecting(Attempt),
    Asking(Attempt),
    Paused { until: Instant },
    Over,
}

/// One connection.
#[derive(Debug)]
struct Attempt {
    conn: ConnKey,
    /// [`Action::Connect`] was carried out.
    opened: bool,
    handshake: Box<Handshake>,
}

/// What an [`Active`] reports. Nothing follows the last three.
#[derive(Debug)]
pub enum Report {
    /// A connection has begun, from this address.
    ConnectingFrom(SocketAddr),
    /// The peer accepts. The connection is the owner's now; the stream begins on it.
    Accepted {
        /// The connection.
        conn: ConnKey,
        /// What the ends have agreed on.
        said: Box<Negotiated>,
    },
    /// The peer's program rejects.
    Rejected(Rejection),
    /// It has failed.
    Failed {
        /// The event for the program.
        kind: EventKind,
        /// Its status, as a positive number.
        errno: Errno,
        /// False: this host refused even to begin, within the call that started it.
        begun: bool,
    },
}

impl Active {
    /// Begins to connect. `names`: a space that no other machine of the owner has. An error: the private data
    /// does not fit into the request.
    pub fn start(now: &Now, names: Space, timeouts: Timeouts, target: Target) -> Result<Self, SetupError> {
        let mut active = Self {
            names,
            timeouts,
            target,
            state: State::Over,
            refused: 0,
            repeated: false,
            begun: false,
            silent: None,
            leaving: None,
            actions: VecDeque::new(),
        };
        active.connect(now)?;
        Ok(active)
    }

    /// The first of its connections' names; the others have the same space.
    pub fn conns(&self) -> ConnKey {
        self.names.first()
    }

    /// Gives up, in any state. Nothing is reported afterwards.
    pub fn cancel(&mut self) {
        let mut begun = true;
        for action in std::mem::take(&mut self.actions) {
            match action {
                // Not carried out, so there is nothing to close.
                Action::Connect { .. } => begun = false,
                Action::Report(Report::Accepted { conn, .. }) => self.close(conn, Close::Finish),
                Action::Close { conn, how } => self.close(conn, how),
                _ => {}
            }
        }
        self.leaving = None;
        let state = std::mem::replace(&mut self.state, State::Over);
        if let State::Connecting(attempt) | State::Asking(attempt) = state
            && begun
        {
            self.close(attempt.conn, Close::Finish);
        }
    }

    fn connect(&mut self, now: &Now) -> Result<(), SetupError> {
        let Target { local, peer, config, ref private_data, .. } = self.target;
        let handshake = Handshake::ask(now, Some(self.timeouts.connect), config, private_data)?;
        let conn = self.names.name();
        self.actions.push_back(Action::Connect { conn, from: local, to: peer });
        self.state = State::Connecting(Attempt { conn, opened: false, handshake: Box::new(handshake) });
        self.silent = self.target.fall_back.then(|| now.get() + SILENT);
        Ok(())
    }

    /// Says that nothing comes from the peer, and what may be the reason: the program waits, and its limit
    /// is far away.
    fn say_silent(&mut self) {
        self.silent = None;
        let peer = self.target.peer;
        match &self.state {
            State::Connecting(_) => {
                tracing::warn!(
                    "no answer from {peer} for {} s: is the address right, and does a firewall drop TCP to \
                     this port?",
                    SILENT.as_secs()
                );
            }
            State::Asking(_) => tracing::warn!(
                "connected to {peer}, but no MPA reply for {} s: is that an iWARP server, and does its \
                 program accept the connection?",
                SILENT.as_secs()
            ),
            State::Paused { .. } | State::Over => {}
        }
    }

    /// As [`Self::connect`], for a further connection.
    fn connect_again(&mut self, now: &Now) {
        if self.connect(now).is_err() {
            // Its request is no longer than the first one.
            self.report_failed(EventKind::ConnectError, Errno::INVAL);
        }
    }

    fn pause(&mut self, now: &Now, pause: Duration) {
        self.state = State::Paused { until: now.get() + pause };
    }

    fn close(&mut self, conn: ConnKey, how: Close) {
        self.actions.push_back(Action::Close { conn, how });
    }

    fn report(&mut self, report: Report) {
        self.actions.push_back(Action::Report(report));
    }

    fn report_failed(&mut self, kind: EventKind, errno: Errno) {
        self.report(Report::Failed { kind, errno, begun: self.begun });
    }

    /// When the state changes, whatever the log says meanwhile.
    fn deadline(&self) -> Option<Instant> {
        match &self.state {
            State::Connecting(attempt) | State::Asking(attempt) => attempt.handshake.poll_timeout(),
            State::Paused { until } => Some(*until),
            State::Over => None,
        }
    }

    fn attempt(&self) -> Option<&Attempt> {
        match &self.state {
            State::Connecting(attempt) | State::Asking(attempt) => Some(attempt),
            State::Paused { .. } | State::Over => self.leaving.as_ref(),
        }
    }

    fn attempt_mut(&mut self, conn: ConnKey) -> Option<&mut Attempt> {
        let attempt = match &mut self.state {
            State::Connecting(attempt) | State::Asking(attempt) => Some(attempt),
            State::Paused { .. } | State::Over => self.leaving.as_mut(),
        };
        attempt.filter(|attempt| attempt.conn == conn)
    }

    /// The first bytes of the request are on their way: from here the peer's program has its time.
    fn request_leaves(&mut self, now: &Now) {
        self.state = match std::mem::replace(&mut self.state, State::Over) {
            State::Connecting(mut attempt) => {
                attempt.handshake.set_limit(now, Some(self.timeouts.reply));
                self.silent = self.target.fall_back.then(|| now.get() + SILENT);
                State::Asking(attempt)
            }
            other => other,
        };
    }

    /// `open`: the shell still has the connection.
    fn handle_event(&mut self, now: &Now, event: Event, open: bool) {
        let (attempt, asking) = match std::mem::replace(&mut self.state, State::Over) {
            State::Connecting(attempt) => (attempt, false),
            State::Asking(attempt) => (attempt, true),
            other => {
                self.state = other;
                return;
            }
        };
        match event {
            Event::Accepted(said) => self.report(Report::Accepted { conn: attempt.conn, said }),
            Event::Rejected(rejection) => {
                self.close(attempt.conn, Close::Finish);
                self.report(Report::Rejected(rejection));
            }
            Event::Failed(failure) => self.failed(now, attempt, asking, failure, open),
            // A responder's.
            Event::Requested(_) | Event::Replied => {}
        }
    }

    fn failed(&mut self, now: &Now, attempt: Attempt, asking: bool, failure: Failure, open: bool) {
        let conn = attempt.conn;
        let plainer = attempt.handshake.plainer().filter(|_| self.target.fall_back);
        // A connection that the peer has closed keeps its local port until both sides are closed.
        let give_up = if self.target.local.is_some() { Close::Reset } else { Close::Finish };
        match (failure, plainer) {
            (Failure::Lower(Refusal::Refused), _) if self.refused < MOST_REPETITIONS => {
                let pause = FIRST_PAUSE * (1 << self.refused);
                self.refused += 1;
                self.pause(now, pause);
            }
            // A listener with too many silent connections closes the oldest. That says nothing of what it
            // understands.
            (Failure::Setup(SetupError::Closed { silent: true }), _) if !self.repeated => {
                self.repeated = true;
                if open {
                    self.close(conn, give_up);
                }
                self.pause(now, FIRST_PAUSE);
            }
            (Failure::Setup(error), Some(config)) => {
                tracing::debug!(
                    peer = %self.target.peer,
                    "{error}; trying again with revision {} {} reserved bits",
                    config.revision.to_wire(),
                    if config.peer.is_some() { "and" } else { "without" },
                );
                if open {
                    self.close(conn, give_up);
                }
                self.target.config = config;
                self.connect_again(now);
            }
            (failure, _) => {
                self.say_timed_out(failure, asking);
                if open {
                    self.close(conn, Close::Finish);
                    self.leaving = Some(attempt);
                    self.stop_leaving();
                }
                let (kind, errno) = event_for(failure);
                self.report_failed(kind, errno);
            }
        }
    }

    fn say_timed_out(&self, failure: Failure, asking: bool) {
        let peer = self.target.peer;
        match (failure, asking) {
            (Failure::TimedOut, true) => tracing::warn!(
                "connected to {peer}, but no MPA reply within {} s: given up. Is that an iWARP server?",
                self.timeouts.reply.as_secs()
            ),
            (Failure::TimedOut, false) if self.target.fall_back => {
                let limit = self.timeouts.connect.as_secs();
                tracing::warn!("no answer from {peer} within {limit} s: given up");
            }
            _ => {}
        }
    }

    fn stop_leaving(&mut self) {
        self.leaving.take_if(|attempt| attempt.handshake.is_drained());
    }
}

impl Machine for Active {
    type Report = Report;

    fn handle_input(&mut self, now: &Now, input: Input<'_>) {
        let Some(attempt) = input.conn().and_then(|conn| self.attempt_mut(conn)) else { return };
        let open = !matches!(input, Input::Failed { .. });
        let taken = matches!(input, Input::Sent { bytes: 1.., .. });
        if let Input::Opened { local, .. } = input {
            attempt.opened = true;
            self.begun = true;
            return self.report(Report::ConnectingFrom(local));
        }
        let event = attempt.handshake.handle_input(input);
        if self.leaving.is_some() {
            if !open {
                // The connection is gone, and so is the need to close it.
                self.leaving = None;
                self.actions.retain(|action| !matches!(action, Action::Close { .. }));
            }
            return self.stop_leaving();
        }
        if taken {
            self.request_leaves(now);
        }
        if let Some(event) = event {
            self.handle_event(now, event, open);
        }
    }

    fn handle_timeout(&mut self, now: &Now) {
        if matches!(self.state, State::Connecting(_) | State::Asking(_)) && is_over(self.silent, now) {
            self.say_silent();
        }
        match &mut self.state {
            State::Connecting(attempt) | State::Asking(attempt) => {
                if let Some(event) = attempt.handshake.handle_timeout(now) {
                    self.handle_event(now, event, true);
                }
            }
            State::Paused { until } if is_over(Some(*until), now) => self.connect_again(now),
            State::Paused { .. } | State::Over => {}
        }
    }

    fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        let attempt = self.attempt().filter(|attempt| attempt.opened)?;
        let bytes = attempt.handshake.poll_transmit()?;
        Some(Transmit::Bytes { conn: attempt.conn, bytes })
    }

    fn poll_timeout(&self) -> Option<Instant> {
        match &self.state {
            State::Connecting(_) | State::Asking(_) => earlier(self.deadline(), self.silent),
            State::Paused { .. } | State::Over => self.deadline(),
        }
    }

    fn poll_action(&mut self) -> Option<Action<Report>> {
        // The Terminate goes before the end of the connection.
        if self.leaving.is_some() { None } else { self.actions.pop_front() }
    }

    fn want(&self, conn: ConnKey) -> Want {
        self.attempt()
            .filter(|attempt| attempt.conn == conn)
            .map_or(Want::Nothing, |attempt| attempt.handshake.want())
    }
}

/// Event and status, as Linux' iWARP connection manager reports them.
fn event_for(failure: Failure) -> (EventKind, Errno) {
    match failure {
        Failure::TimedOut => (EventKind::Unreachable, Errno::TIMEDOUT),
        Failure::Lower(Refusal::Unreachable(errno)) => (EventKind::Unreachable, errno),
        Failure::Lower(Refusal::Local(errno)) => (EventKind::ConnectError, errno),
        Failure::Lower(why @ (Refusal::Refused | Refusal::Gone)) => (EventKind::Rejected, why.errno()),
        Failure::Setup(SetupError::Closed { .. }) => (EventKind::Rejected, Errno::CONNRESET),
        Failure::Setup(SetupError::InsufficientIrd { .. }) => (EventKind::ConnectError, Errno::NOMEM),
        Failure::Setup(_) => (EventKind::ConnectError, Errno::PROTO),
    }
}

#[cfg(test)]
#[path = "tests/active.rs"]
mod tests;
