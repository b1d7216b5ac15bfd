//! One id of rdma_cm, from Idle to Destroyed: which call is legal in which state, which event answers it,
//! with which status and parameters, and until when. The table of states is [`crate::state`]'s.
//!
//! ```text
//!   program ─ call ─▶ Id (shell) ─ check, system calls ─▶ Life ─ state, deadlines ─▶ actions ─▶ Id
//!                                                          │                          events
//!                         Active, Client, Listener, Server ┘
//! ```
//!
//! # What is whose
//! | the shell (`Id`, a runner of this machine) | this machine |
//! |-|-|
//! | sockets and their options | which connection there is, what is read of it, how it is closed |
//! | routes, scopes, the table of ports | whether a call is legal, before and after: [`Life::check`] |
//! | the queue pair: its changes and numbers, whether completions wait | when each of these happens |
//! | the event channel: pushing, migration, acknowledgement | each event, with its status and parameters |
//! | the table of connections that wait for a queue pair, by number | who waits there: [`Life::awaits`] |
//! | the program's cookie, the id's key | the acknowledgement timeout: when TIMEWAIT_EXIT comes |
//! | the clock, randomness, the configuration ([`Rules`]) | – |
//!
//! A call that needs the system goes `check(step)`, system calls, then the method that takes the step, all
//! under the runner's lock. A method that returns an error has changed nothing, unless it says otherwise.
//!
//! # Answers
//! [`Life::connect`], [`Life::accept`], [`Life::adopt`], [`Life::establish`], [`Life::listen`] and
//! [`Life::serve`] bring exactly one [`Action::Answer`] each time that they return `Ok`: the program's call
//! returns what it says, and not before. `Attach` and `Disconnect` are carried out in the order in which they
//! come, and a call that waits for its answer carries out its own.
//!
//! # How a connection moves to another machine
//! The name of a connection says who made it, not who has it: it stays the same. [`Report::Request`] has a
//! new `Life` in RequestPending and the name of its connection. The shell makes a runner for the new machine,
//! moves the connection with this name from the listener's connections to the new runner's, and then pushes
//! the event, all under the lock of the listener's runner (the new one's is not visible to anybody yet). The
//! new machine makes no names of its own: no step leads from a request to a second connection. So the names
//! of the two cannot be mixed up, and the listener knows the connection by it in all that follows:
//!
//! | when | what the shell tells the listener's machine |
//! |-|-|
//! | the program takes the event | [`Input::Delivered`] |
//! | the program accepts, before [`Life::accept`] (which sends the reply) | [`Life::answered`] |
//! | [`Report::Settled`] | [`Input::Settled`] |
//! | [`Report::Reply`] (ids of datagrams) | [`Life::reply`] |
//!
//! `answered` must be there before the peer can connect again, so it waits for the listener's lock, while no
//! other lock is held. Everything else is posted. A listener that is destroyed ignores all of it.
//!
//! # Destroy
//! From any state. No [`Report::Event`] and no [`Report::Request`] follows, no deadline, no connection: what
//! there is is closed, disconnected or rejected. Only one thing can come behind it: a queue pair that refuses
//! a connection which it was being given; that connection is then closed.

mod datagrams;
mod destroy;
mod stream;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;
use uwarp_llp::carrier::Close;
use uwarp_proto::setup::{Depths, Negotiated, ResponderPolicy};
use uwarp_rnic::qp::Now;

use super::active::{self, Active};
use super::budget::Budget;
use super::handshake::Handshake;
use super::listener::{self, Listener};
use super::lookup::{Client, Question, Server};
use super::{Action, ConnKey, Input, Machine, Recipient, Space, Transmit, Want, earlier, is_over};
use crate::error::CmError;
use crate::event::{ConnParam, DatagramParam, EventKind, MAX_DEPTH, MAX_PRIVATE_DATA};
use crate::params::octet;
use crate::state::{Lifecycle, State, Step};
use crate::timeouts::{RETRIES, Timeouts, timewait};

pub use datagrams::{QKEY, Reply};
use stream::UnreportedEnd;
pub use stream::{Ours, Pair};

/// What the configuration and the device say. It does not change.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// How long each phase may take.
    pub timeouts: Timeouts,
    /// Whether the device passes for InfiniBand or RoCE.
    pub infiniband: bool,
    /// How this end sets up connections, in either role.
    pub policy: ResponderPolicy,
}

/// For the shell.
#[derive(Debug)]
pub enum Report {
    /// An event of this id.
    Event(IdEvent),
    /// A request of this listener, with its event.
    Request(Box<NewId>),
    /// Of an id that came as a request: [`Input::Settled`] for its listener.
    Settled(ConnKey),
    /// Of an id that came as a lookup: [`Life::reply`] for its listener.
    Reply(Reply),
}

/// What becomes an event of rdma_cm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdEvent {
    /// What happened.
    pub kind: EventKind,
    /// As [`crate::Event::status`].
    pub status: i32,
    /// Parameters of the peer, where there are any.
    pub param: ConnParam,
    /// For ids of datagrams: the destination.
    pub datagram: Option<Box<DatagramParam>>,
    /// The peer program's.
    pub private_data: Vec<u8>,
}

impl IdEvent {
    fn plain(kind: EventKind, status: i32) -> Self {
        Self { kind, status, param: ConnParam::NONE, datagram: None, private_data: Vec::new() }
    }

    fn errno(kind: EventKind, errno: Errno) -> Self {
        Self::plain(kind, -errno.raw_os_error())
    }
}

/// An id that is born with a request.
#[derive(Debug)]
pub struct NewId {
    /// It, in RequestPending.
    pub life: Life,
    /// Its connection, which moves with it; `None`: a lookup.
    pub conn: Option<ConnKey>,
    /// The event that gives it to the program.
    pub event: IdEvent,
}

/// Whose stream a connection, or a request, waits for: a row of the table of connections that wait for a
/// queue pair which the program moves itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Awaits {
    /// Our queue pair, if it is known already.
    pub ours: Option<u32>,
    /// The peer's; 0 where the peer does not name it.
    pub peer: u32,
}

/// Which socket of datagrams the machine needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Socket {
    /// The one that the program has bound, if any; nothing of it is read.
    Quiet,
    /// One connected to the peer, for a lookup.
    Asking,
    /// The one that the program has bound: lookups arrive there.
    Serving,
}

/// One id.
#[derive(Debug)]
pub struct Life {
    rules: Arc<Rules>,
    life: Lifecycle,
    part: Part,
    /// For datagrams; `None`: for streams.
    port_space: Option<u16>,
    ack_timeout: Option<u8>,
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
    /// The program has bound it: connections begin there.
    bound: bool,
    /// Number of the next space of names.
    spaces: u32,
    /// Of a request that its listener has not heard the end of.
    request: Option<ConnKey>,
    /// The peer's parameters.
    peer_param: ConnParam,
    /// The parameters of the request; for an accept without parameters.
    requested: ConnParam,
    /// Our queue pair and our parameters, while a connection is set up.
    pair: Option<Pair>,
    conn_param: ConnParam,
    /// Reported with [`EventKind::Established`].
    outcome: (ConnParam, Vec<u8>),
    /// Whether there ever was a connection or an attempt at one.
    has_connected: bool,
    /// A stream has ended. Its queue pair may still be in RTS: the program has to disconnect first.
    left: bool,
    /// It was being given to a queue pair when the id ended: only a refusal brings it back.
    leaving: Option<ConnKey>,
    /// The last bytes of connections that are then closed.
    last_words: VecDeque<LastWords>,
    /// What the program's call returns is not known yet.
    answer: Option<Due>,
    /// Waits for [`Input::Flushed`].
    held: Option<Held>,
    /// The peer's ready-to-receive indication must have arrived by then.
    ready: Option<Instant>,
    /// The end of the stream is not reported yet: the program must poll completions first.
    unreported_end: Option<UnreportedEnd>,
    /// The time of [`EventKind::TimewaitExit`].
    timewait: Option<Instant>,
    actions: VecDeque<Action<Report>>,
}

/// What an id consists of, beside its state.
///
/// | state | parts |
/// |-|-|
/// | Idle, Bound, AddressResolved, RouteResolved | Nothing |
/// | Listening | Listener, Server |
/// | Connecting | Active, Attaching, Stream; Client |
/// | Responded | Parked, Attaching, Stream |
/// | RequestPending | Request, Question |
/// | Accepting | Replying, Attaching, Stream |
/// | Established | Stream, Attaching, Parked; Nothing (datagrams) |
/// | Closed, Destroyed | Nothing |
///
/// | state, part | event | → | actions |
/// |-|-|-|-|
/// | RouteResolved | connect | Connecting, Active | those of `Active`; Answer when it has begun |
/// | Connecting, Active | this host refuses the first attempt | RouteResolved | Answer(errno) |
/// | Connecting, Active | Accepted, own queue pair | Connecting, Attaching | Attach |
/// | Connecting, Active | Accepted, by number | Responded, Parked | Report CONNECT_RESPONSE |
/// | Connecting, Active | Rejected, refused / Failed | Closed | Fail, Flushed: Report / Report |
/// | RequestPending | accept | Accepting, Replying | the reply |
/// | Accepting, Replying | all sent | Accepting, Attaching | Attach |
/// | Accepting, Replying | it fails or does not fit | Closed | Fail, Flushed: Answer(errno) |
/// | RequestPending | reject | Closed | the reply, Close |
/// | Connecting, Accepting, Attaching | Attached | Stream | deadline: ready. No indication: as Established |
/// | Connecting, Accepting | Established | Established | Report ESTABLISHED, Settled |
/// | Connecting, Accepting | Refused | Closed | Terminate, Close; Report CONNECT_ERROR, or Answer(errno) |
/// | Connecting, Accepting | ready | Closed | Disconnect, Fail, Flushed: Report UNREACHABLE |
/// | Connecting, Accepting | Ended | Closed | Report CONNECT_ERROR |
/// | Responded | establish | Established | a stand-in: Attach |
/// | Responded, Established, Parked | adopt | same, Attaching | Attach |
/// | Responded, Established, Parked | End, disconnect | Closed | Close; Report DISCONNECTED |
/// | Responded, Established, Attaching | Refused | Closed | Terminate, Close; Report DISCONNECTED, Answer |
/// | Responded, Established, Stream | Ended behind completions | same | CheckPolled now, each 5 ms, for 50 |
/// | Responded, Established, Stream | Ended, polled or limit | Closed | Report DISCONNECTED, then timewait |
/// | Accepting, Responded, Established | disconnect | same | Disconnect: Ended follows in bounded time |
/// | Connecting | disconnect | Closed | Close or Disconnect; Report CONNECT_ERROR |
/// | Closed | disconnect | Closed | the peer is left: the call says so |
/// | Closed | timewait | Closed | Report TIMEWAIT_EXIT |
/// | datagrams: Connecting, Client | Found | Established, Closed | Report ESTABLISHED, UNREACHABLE |
/// | datagrams: RequestPending | answer, reject | Established, Closed | Report Reply |
/// | any | destroy | Destroyed | Close, reject a request, Disconnect |
#[derive(Debug)]
enum Part {
    Nothing,
    Active(Box<Active>),
    Listener(Box<Listener>),
    Client(Box<Client>),
    Server(Box<Server>),
    /// A request that waits for the program. `gone`: its connection has failed already.
    Request {
        conn: ConnKey,
        handshake: Box<Handshake>,
        gone: Option<Errno>,
    },
    /// A lookup that waits for the program.
    Question(Question),
    /// The reply is being sent: now, or never.
    Replying {
        conn: ConnKey,
        reply: Vec<u8>,
        negotiated: Box<Negotiated>,
    },
    /// The connection waits for the queue pair that the program moves itself.
    Parked {
        conn: ConnKey,
        negotiated: Box<Negotiated>,
    },
    /// It is being given to the queue pair. Established and Ended may come first.
    Attaching {
        conn: ConnKey,
        negotiated: Box<Negotiated>,
    },
    /// The queue pair has it.
    Stream {
        conn: ConnKey,
    },
}

/// Bytes that a connection ends with: a rejection, or a Terminate. They are far smaller than any socket's
/// buffer; what does not fit at once is not sent.
#[derive(Debug)]
struct LastWords {
    conn: ConnKey,
    bytes: Vec<u8>,
}

/// Which call waits for its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Due {
    /// `connect`, until this host has begun to.
    Connect,
    /// `accept`, `adopt` or `establish`, until the queue pair has the connection or does not take it.
    Attach(ConnKey),
    /// `accept` that has failed, until the queue pair is flushed.
    Flush,
}

/// What follows when the queue pair is flushed, so that the program finds the completions.
#[derive(Debug)]
enum Held {
    Event(Box<IdEvent>),
    Answer(Errno),
}

const NOT_CONNECTED: CmError = CmError::Invalid("not connected");
const TOO_MUCH_DATA: CmError = CmError::Invalid("too much private data");

impl Life {
    /// A new id.
    pub fn new(rules: impl Into<Arc<Rules>>) -> Self {
        Self::at(rules.into(), State::Idle, None)
    }

    /// A new id of datagrams; `port_space` as on the wire.
    pub fn of_datagrams(rules: impl Into<Arc<Rules>>, port_space: u16) -> Self {
        Self::at(rules.into(), State::Idle, Some(port_space))
    }

    fn at(rules: Arc<Rules>, state: State, port_space: Option<u16>) -> Self {
        Self {
            rules,
            life: Lifecycle::at(state),
            part: Part::Nothing,
            port_space,
            ack_timeout: None,
            local: None,
            peer: None,
            bound: false,
            spaces: 0,
            request: None,
            peer_param: ConnParam::NONE,
            requested: ConnParam::NONE,
            pair: None,
            conn_param: ConnParam::NONE,
            outcome: (ConnParam::NONE, Vec::new()),
            has_connected: false,
            left: false,
            leaving: None,
            last_words: VecDeque::new(),
            answer: None,
            held: None,
            ready: None,
            unreported_end: None,
            timewait: None,
            actions: VecDeque::new(),
        }
    }

    /// Its state.
    pub fn state(&self) -> State {
        self.life.state()
    }

    /// Whether it is one of datagrams.
    pub fn is_datagram(&self) -> bool {
        self.port_space.is_some()
    }

    /// The local address, if it is known.
    pub fn local(&self) -> Option<SocketAddr> {
        self.local
    }

    /// The remote address, if it is known.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// The peer's parameters from its request or its reply; zero before that, and for those that the peer
    /// does not name.
    pub fn peer_param(&self) -> ConnParam {
        self.peer_param
    }

    /// The retry count that queries show. TCP does not count retries.
    pub fn retries(&self) -> u8 {
        if self.has_connected { self.conn_param.retry_count.min(RETRIES) } else { RETRIES }
    }

    /// The program's acknowledgement timeout. Ids of later requests inherit it.
    pub fn set_ack_timeout(&mut self, ack_timeout: Option<u8>) {
        self.ack_timeout = ack_timeout;
    }

    /// The row of the table of connections that wait for a queue pair by number; to be compared with the one
    /// that is there before an event is pushed and after each run.
    pub fn awaits(&self) -> Option<Awaits> {
        match (&self.part, self.pair) {
            (Part::Request { .. }, _) => Some(Awaits { ours: None, peer: self.requested.qp_num }),
            (Part::Parked { .. }, Some(Pair::Number(qpn))) => {
                Some(Awaits { ours: Some(qpn), peer: self.peer_param.qp_num })
            }
            _ => None,
        }
    }

    /// Whether its connections can have another type of service now: what is bound, and a request's.
    pub fn takes_tos(&self) -> bool {
        match self.part {
            Part::Request { .. } => true,
            Part::Nothing => self.bound && !self.is_datagram(),
            _ => false,
        }
    }

    /// Which socket of datagrams it needs from now on.
    pub fn socket(&self) -> Socket {
        match self.part {
            Part::Client(_) => Socket::Asking,
            Part::Server(_) => Socket::Serving,
            _ => Socket::Quiet,
        }
    }

    /// Whether the step is legal now, for a call that first needs the system.
    pub fn check(&self, step: Step) -> Result<(), CmError> {
        self.life.check(step)
    }

    /// The program has bound it; the system has chosen this address, with its port.
    pub fn bind(&mut self, local: SocketAddr) -> Result<(), CmError> {
        self.life.take(Step::Bind)?;
        self.local = Some(local);
        self.bound = true;
        Ok(())
    }

    /// The program resolves the address of `peer`. `source`: the local address that the routing table gives.
    /// Answered by [`EventKind::AddressResolved`] or [`EventKind::AddressError`], at once.
    pub fn resolve_address(
        &mut self,
        peer: SocketAddr,
        source: Result<IpAddr, Errno>,
    ) -> Result<(), CmError> {
        self.life.check(Step::ResolveAddress)?;
        if self.local.is_some_and(|local| local.is_ipv4() != peer.is_ipv4()) {
            return Err(CmError::Invalid("local and remote address are of different families"));
        }
        match source {
            Ok(ip) => {
                self.life.take(Step::ResolveAddress)?;
                // Without a port it gets one when it connects.
                let local = self.local.get_or_insert(SocketAddr::new(ip, 0));
                if local.ip().is_unspecified() {
                    local.set_ip(ip);
                }
                self.peer = Some(peer);
                self.event(IdEvent::plain(EventKind::AddressResolved, 0));
            }
            Err(errno) => {
                self.life.take(Step::AddressError)?;
                self.event(IdEvent::errno(EventKind::AddressError, errno));
            }
        }
        Ok(())
    }

    /// Over TCP there is no route to find. Answered by [`EventKind::RouteResolved`], at once.
    pub fn resolve_route(&mut self) -> Result<(), CmError> {
        self.life.take(Step::ResolveRoute)?;
        self.event(IdEvent::plain(EventKind::RouteResolved, 0));
        Ok(())
    }

    /// The program listens on the socket that it has bound. Each request is a [`Report::Request`].
    /// `backlog`: how many of them may wait for [`Input::Delivered`]; `budget`: the process's.
    pub fn listen(&mut self, backlog: usize, budget: Budget) -> Result<(), CmError> {
        if self.is_datagram() {
            return Err(CmError::Invalid("an id of datagrams"));
        }
        self.begin_to_listen()?;
        let names = self.space();
        let Rules { timeouts, policy, .. } = *self.rules;
        let settings = listener::Settings { timeouts, policy, backlog, budget };
        self.part = Part::Listener(Box::new(Listener::new(names, settings)));
        Ok(())
    }

    fn begin_to_listen(&mut self) -> Result<(), CmError> {
        self.life.check(Step::Listen)?;
        if !self.bound {
            return Err(CmError::Invalid("not bound"));
        }
        self.life.take(Step::Listen)?;
        self.actions.push_back(Action::Listen);
        // Behind it: taken back if the system refuses.
        self.actions.push_back(Action::Answer(Ok(())));
        Ok(())
    }

    /// The system refuses. The socket is kept, and so is its port: the id is bound again.
    fn not_listening(&mut self, errno: Errno) {
        if self.life.take(Step::ListenRefused).is_err() {
            return;
        }
        self.part = Part::Nothing;
        self.actions.retain(|action| !matches!(action, Action::Answer(Ok(()))));
        self.actions.push_back(Action::Answer(Err(errno)));
    }

    /// To a listener: the program accepts this connection of its; to be called before the reply is sent.
    pub fn answered(&mut self, now: &Now, conn: ConnKey) {
        if let Part::Listener(listener) = &mut self.part {
            listener.answered(now, conn);
            self.drain();
        }
    }

    /// To a listener: the call was refused, and the program may answer the request again.
    pub fn unanswered(&mut self, now: &Now, conn: ConnKey) {
        if let Part::Listener(listener) = &mut self.part {
            listener.unanswered(now, conn);
            self.drain();
        }
    }

    /// Queues an event that does not come from the connection manager.
    pub fn post(&mut self, kind: EventKind, status: i32) -> Result<(), CmError> {
        self.check_alive()?;
        self.event(IdEvent::plain(kind, status));
        Ok(())
    }

    /// Before an id moves to another channel, which is the shell's work.
    pub fn check_alive(&self) -> Result<(), CmError> {
        if self.state() == State::Destroyed { Err(CmError::Invalid("destroyed")) } else { Ok(()) }
    }

    fn close(&mut self, conn: ConnKey) {
        self.actions.push_back(Action::Close { conn, how: Close::Finish });
    }

    /// Sends these bytes if that can be done at once, and closes the connection behind them.
    fn close_with(&mut self, conn: ConnKey, bytes: Vec<u8>) {
        self.close(conn);
        if !bytes.is_empty() {
            self.last_words.push_back(LastWords { conn, bytes });
        }
    }

    fn reject_with(&mut self, now: &Now, conn: ConnKey, handshake: &mut Handshake, private_data: &[u8]) {
        // Refused only if it does not fit, and then there is nothing to send.
        let _ = handshake.reject(now, private_data);
        self.close_with(conn, handshake.poll_transmit().unwrap_or_default().to_vec());
    }

    fn report(&mut self, report: Report) {
        self.actions.push_back(Action::Report(report));
    }

    fn event(&mut self, event: IdEvent) {
        self.report(Report::Event(event));
    }

    /// A name space for the next machine inside.
    fn space(&mut self) -> Space {
        self.spaces += 1;
        Space::new(self.spaces)
    }

    /// The listener of a request hears once that it need not wait for this connection: behind its events.
    fn settle(&mut self) {
        if !matches!(self.state(), State::RequestPending | State::Accepting)
            && !matches!(self.held, Some(Held::Event(_)))
            && let Some(conn) = self.request.take()
        {
            self.report(Report::Settled(conn));
        }
    }

    /// After the end of a connection, in the views that pass for InfiniBand. TCP does not need it; programs
    /// wait for the event.
    fn start_timewait(&mut self, now: &Now) {
        if self.rules.infiniband {
            self.timewait = Some(now.get() + timewait(self.ack_timeout));
        }
    }

    /// Depths for negotiation, from the program's numbers (rdma_connect(3), rdma_accept(3)).
    fn depths(&self, param: ConnParam, requested: Option<ConnParam>) -> Result<Depths, CmError> {
        let max = self.rules.policy.max_ird;
        let depth = |given: u8, asked: Option<u8>| match given {
            MAX_DEPTH => Ok(asked.map_or(max, |asked| u16::from(asked).min(max))),
            given if u16::from(given) > max => {
                Err(CmError::Invalid("the read depth is above the device's limit"))
            }
            given => Ok(u16::from(given)),
        };
        Ok(Depths::negotiated(
            depth(param.responder_resources, requested.map(|asked| asked.responder_resources))?,
            depth(param.initiator_depth, requested.map(|asked| asked.initiator_depth))?,
        ))
    }

    /// The parameters of a peer that names no depths: our own limits, so that programs which mirror them get
    /// working numbers.
    fn unknown_depths(&self) -> ConnParam {
        let max = octet(self.rules.policy.max_ird);
        ConnParam { responder_resources: max, initiator_depth: max, ..ConnParam::NONE }
    }

    /// Takes what the machine inside wants and reports.
    fn drain(&mut self) {
        loop {
            match &mut self.part {
                Part::Active(active) => match active.poll_action().map(Action::pass) {
                    Some(Ok(action)) => self.actions.push_back(action),
                    Some(Err(report)) => self.attempt_reports(report),
                    None => return,
                },
                Part::Listener(listener) => match listener.poll_action().map(Action::pass) {
                    Some(Ok(action)) => self.actions.push_back(action),
                    Some(Err(report)) => self.requested(report),
                    None => return,
                },
                Part::Client(client) => match client.poll_action().map(Action::pass) {
                    Some(Ok(action)) => self.actions.push_back(action),
                    Some(Err(found)) => self.looked_up(found),
                    None => return,
                },
                Part::Server(server) => match server.poll_action().map(Action::pass) {
                    Some(Ok(action)) => self.actions.push_back(action),
                    Some(Err(asked)) => self.lookup_requested(asked),
                    None => return,
                },
                _ => return,
            }
        }
    }

    fn handle_last_words(&mut self, input: &Input<'_>) -> bool {
        let Some(words) = self.last_words.front() else { return false };
        let of = words.conn;
        match *input {
            Input::Sent { conn, .. } if conn == of => {}
            // There is nothing left to close.
            Input::Failed { conn, .. } if conn == of => {
                self.actions.retain(|action| !matches!(action, Action::Close { conn, .. } if *conn == of));
            }
            _ => return false,
        }
        self.last_words.pop_front();
        true
    }

    /// What has happened to the connection that the id has itself. False: it is not this one.
    fn handle_own(&mut self, now: &Now, input: &Input<'_>) -> bool {
        let Some(of) = input.conn() else { return false };
        match &mut self.part {
            Part::Request { conn, gone, .. } if *conn == of => {
                if let Input::Failed { why, .. } = input {
                    *gone = Some(why.errno());
                }
            }
            Part::Replying { conn, .. } if *conn == of => match *input {
                Input::Sent { bytes, .. } => self.reply_sent(bytes),
                Input::Failed { why, .. } => self.reply_failed(None, why.errno()),
                _ => {}
            },
            Part::Parked { conn, .. } if *conn == of => match input {
                Input::End { .. } => self.parked_ended(now, true),
                Input::Failed { .. } => self.parked_ended(now, false),
                _ => {}
            },
            Part::Attaching { conn, .. } | Part::Stream { conn } if *conn == of => {}
            _ => return false,
        }
        true
    }
}

impl Machine for Life {
    type Report = Report;

    fn handle_input(&mut self, now: &Now, input: Input<'_>) {
        match input {
            Input::Stream { conn, event } => self.handle_stream(now, conn, event),
            Input::Unpolled(unpolled) => self.handle_unpolled(now, unpolled),
            Input::Flushed => self.handle_flushed(),
            Input::NotListening(errno) => self.not_listening(errno),
            input if self.handle_last_words(&input) || self.handle_own(now, &input) => {}
            input => self.handle_inside(now, input),
        }
        self.settle();
    }

    fn handle_timeout(&mut self, now: &Now) {
        match &mut self.part {
            Part::Active(active) => active.handle_timeout(now),
            Part::Listener(listener) => listener.handle_timeout(now),
            Part::Client(client) => client.handle_timeout(now),
            Part::Server(server) => server.handle_timeout(now),
            _ => {}
        }
        self.drain();
        if is_over(self.ready, now) {
            self.not_ready();
        }
        self.check_unreported_end(now);
        if is_over(self.timewait, now) {
            self.timewait = None;
            self.event(IdEvent::plain(EventKind::TimewaitExit, 0));
        }
        self.settle();
    }

    fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        if let Some(LastWords { conn, bytes }) = self.last_words.front() {
            return Some(Transmit::Bytes { conn: *conn, bytes });
        }
        match &mut self.part {
            Part::Replying { conn, reply, .. } => Some(Transmit::Bytes { conn: *conn, bytes: reply }),
            Part::Active(active) => active.poll_transmit(),
            Part::Listener(listener) => listener.poll_transmit(),
            Part::Client(client) => client.poll_transmit(),
            Part::Server(server) => server.poll_transmit(),
            _ => None,
        }
    }

    fn poll_timeout(&self) -> Option<Instant> {
        let inside = match &self.part {
            Part::Active(active) => active.poll_timeout(),
            Part::Listener(listener) => listener.poll_timeout(),
            Part::Client(client) => client.poll_timeout(),
            Part::Server(server) => server.poll_timeout(),
            _ => None,
        };
        let end = self.unreported_end.as_ref().map(UnreportedEnd::deadline);
        [self.ready, end, self.timewait].into_iter().fold(inside, earlier)
    }

    fn poll_action(&mut self) -> Option<Action<Report>> {
        // The last bytes go before the end of their connection, and that before the event.
        let action = if self.last_words.is_empty() { self.actions.pop_front() } else { None };
        if action.is_none() && self.state() == State::Established && self.actions.is_empty() {
            // A server has thousands of connections, and nothing happens to most of them for long.
            self.actions = VecDeque::new();
        }
        action
    }

    fn want(&self, conn: ConnKey) -> Want {
        match &self.part {
            Part::Parked { conn: parked, .. } if *parked == conn => Want::End,
            Part::Active(active) => active.want(conn),
            Part::Listener(listener) => listener.want(conn),
            // A request is not watched before its answer: most programs give it at once.
            _ => Want::Nothing,
        }
    }
}
