//! Lookups: a client asks which queue pair serves a port of rdma_cm's datagrams, and the server's program
//! answers (docs/datagram-iwarp.md section 8).
//!
//! ```text
//!   Client ─ Request ─▶ Server ─ Asked ─▶ program
//!      ▲ ◀─── Reply ──────┘ ◀─ answer, refuse ─┘
//!      └─ Found ─▶ program
//! ```
//!
//! The machines trace their datagrams, because only they know why one is dropped. An outgoing one is traced
//! when the shell takes it, before it is sent, so that its arrival is not traced before it.

use std::collections::VecDeque;
use std::fmt::Display;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use uwarp_llp::udp::Route;
use uwarp_proto::proof::Proof;
use uwarp_rnic::qp::Now;
use uwarp_rnic::trace::{self, Way};
use uwarp_wire::datagram::Datagram;
use uwarp_wire::datagram::lookup::{Reply, Request, Status};

use super::{Action, ConnKey, Input, Machine, Transmit, Want, earlier, is_over};
use crate::error::CmError;

/// The pause before an unanswered Request is repeated; each further pause is twice as long, up to
/// [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A missing listener is reported only when it has been missing for this long: the server may be about to
/// start.
const ABSENT: Duration = Duration::from_millis(350);
/// Requests that a server remembers, to answer a repeated one alike.
const REMEMBERED: usize = 1024;
/// Replies that wait to be sent. Further ones are lost, as they can be on their way: the client repeats its
/// Request.
const REPLIES: usize = 64;

/// Room for the longest Request or Reply: the shell reads no longer datagrams for these machines.
pub const ROOM: usize = 256;
const _: () = assert!(ROOM >= Request::MAX_DATAGRAM_LEN && ROOM >= Reply::MAX_DATAGRAM_LEN);

/// What a lookup found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// A queue pair.
    QueuePair {
        /// Its number.
        qpn: u32,
        /// Its Q_Key.
        qkey: u32,
        /// The server program's data.
        private_data: Vec<u8>,
    },
    /// The server refuses, with its program's data.
    Refused(Status, Vec<u8>),
    /// No program listens there.
    Absent,
    /// No answer came.
    Silence,
}

/// What a client asks for.
#[derive(Debug, Clone, Copy)]
pub struct Lookup<'a> {
    /// The server. The shell's socket is connected to it: only so does the system report that no program
    /// listens there, and nothing else reaches the machine.
    pub server: SocketAddr,
    /// `RDMA_PS_UDP` or `RDMA_PS_IPOIB`, as on the wire.
    pub port_space: u16,
    /// A random number that the reply returns.
    pub transaction: u32,
    /// For the server's program.
    pub private_data: &'a [u8],
    /// How long to ask.
    pub patience: Duration,
}

/// Repeats its Request until it is answered.
#[derive(Debug)]
pub struct Client {
    state: State,
    found: Option<Found>,
}

/// | state | event | → | actions |
/// |-|-|-|-|
/// | – | new | Asking | Request |
/// | Asking | CookieRequired, the first | Asking | Request with its cookie, at once |
/// | Asking | CookieRequired, a further one | Asking | the next Request has its cookie |
/// | Asking | another Reply | Over | Report QueuePair or Refused |
/// | Asking | pause over: 50 ms·2ⁿ, at most 2 s | Asking | Request |
/// | Asking | NoListener, 350 ms after the first Request or later | Over | Report Absent |
/// | Asking | patience at its end | Over | Report Silence |
/// | any | cancel | Over | – |
#[derive(Debug)]
enum State {
    Asking(Box<Asking>),
    Over,
}

#[derive(Debug)]
struct Asking {
    route: Route,
    transaction: u32,
    port_space: u16,
    /// From the server's latest CookieRequired.
    cookie: Option<u64>,
    private_data: Vec<u8>,
    /// The datagram, and whether it is to be sent now.
    request: Vec<u8>,
    unsent: bool,
    /// When a missing listener is reported from.
    absent: Instant,
    pause: Duration,
    repeat: Option<Instant>,
    patience: Option<Instant>,
}

impl Client {
    /// Begins.
    pub fn new(now: &Now, lookup: &Lookup<'_>) -> Result<Self, CmError> {
        if lookup.private_data.len() > Request::MAX_PRIVATE_DATA {
            return Err(CmError::Invalid("too much private data"));
        }
        let begun = now.get();
        let mut asking = Asking {
            route: Route { to: lookup.server, from: None },
            transaction: lookup.transaction,
            port_space: lookup.port_space,
            cookie: None,
            private_data: lookup.private_data.to_vec(),
            request: Vec::new(),
            unsent: false,
            absent: begun + ABSENT,
            pause: FIRST_PAUSE,
            repeat: Some(begun + FIRST_PAUSE),
            // A limit that no clock can hold is none.
            patience: begun.checked_add(lookup.patience),
        };
        asking.write_request();
        asking.unsent = true;
        Ok(Self { state: State::Asking(Box::new(asking)), found: None })
    }

    /// Cancels the lookup. Nothing is reported or sent afterwards.
    pub fn cancel(&mut self) {
        (self.state, self.found) = (State::Over, None);
    }

    fn conclude(&mut self, found: Found) {
        (self.state, self.found) = (State::Over, Some(found));
    }
}

impl Machine for Client {
    type Report = Found;

    fn handle_input(&mut self, now: &Now, input: Input<'_>) {
        let State::Asking(asking) = &mut self.state else { return };
        let found = match input {
            Input::Datagram { bytes, .. } => asking.handle_reply(bytes),
            Input::NoListener => (now.get() >= asking.absent).then_some(Found::Absent),
            _ => None,
        };
        if let Some(found) = found {
            self.conclude(found);
        }
    }

    fn handle_timeout(&mut self, now: &Now) {
        let State::Asking(asking) = &mut self.state else { return };
        if is_over(asking.patience, now) {
            return self.conclude(Found::Silence);
        }
        if is_over(asking.repeat, now) {
            asking.unsent = true;
            asking.pause = (asking.pause * 2).min(LONGEST_PAUSE);
            asking.repeat = Some(now.get() + asking.pause);
        }
    }

    fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        let State::Asking(asking) = &mut self.state else { return None };
        if !std::mem::take(&mut asking.unsent) {
            return None;
        }
        traced(Way::Out, asking.route.to, &asking.request, None);
        Some(Transmit::Datagram { route: asking.route, bytes: &asking.request })
    }

    fn poll_timeout(&self) -> Option<Instant> {
        match &self.state {
            State::Asking(asking) => earlier(asking.repeat, asking.patience),
            State::Over => None,
        }
    }

    fn poll_action(&mut self) -> Option<Action<Found>> {
        self.found.take().map(Action::Report)
    }

    fn want(&self, _: ConnKey) -> Want {
        Want::Nothing
    }
}

impl Asking {
    fn write_request(&mut self) {
        let request = Request {
            transaction: self.transaction,
            port_space: self.port_space,
            service_port: self.route.to.port(),
            cookie: self.cookie.unwrap_or(0),
            private_data: &self.private_data,
        };
        self.request = vec![0; request.buffer_len()];
        request.emit(&mut self.request);
    }

    /// The result that a datagram gives; `None`: the lookup continues.
    fn handle_reply(&mut self, bytes: &[u8]) -> Option<Found> {
        let datagram = Datagram::parse(bytes).ok().filter(Datagram::is_intact);
        let reply = datagram.as_ref().and_then(|datagram| Reply::parse(datagram).ok());
        let dropped = match &reply {
            None => Some("malformed"),
            Some(reply) if reply.transaction != self.transaction => Some("another lookup's"),
            Some(_) => None,
        };
        traced(Way::In, self.route.to, bytes, dropped);
        let reply = reply.filter(|_| dropped.is_none())?;
        let private_data = reply.private_data.to_vec();
        match reply.status {
            Status::Success => Some(Found::QueuePair { qpn: reply.qpn, qkey: reply.qkey, private_data }),
            Status::CookieRequired => {
                // At once for the first one only, so that a server cannot make the client send as often as
                // it likes. A further one answers a Request that was sent without the cookie, or this cookie
                // has expired, or the server is a new one.
                self.unsent |= self.cookie.is_none();
                self.cookie = Some(reply.cookie);
                self.write_request();
                None
            }
            status => Some(Found::Refused(status, private_data)),
        }
    }
}

/// A Request, for the program to answer with [`Server::answer`] or [`Server::refuse`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    transaction: u32,
    /// The client's address.
    pub from: SocketAddr,
    /// The address that the Request was sent to.
    pub to: IpAddr,
}

/// What a server reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    /// The Request.
    pub question: Question,
    /// The client program's data.
    pub private_data: Vec<u8>,
}

/// A port of datagrams that answers lookups. It has no deadline: it remembers answered Requests until it
/// needs their places, and the others wait for the program.
///
/// | event | → | out |
/// |-|-|-|
/// | not a Request | – | – |
/// | another port space | – | Unsupported |
/// | remembered, and answered | – | the same Reply |
/// | remembered, and not answered | – | – |
/// | new; half full, and without a valid cookie | – | CookieRequired |
/// | new; backlog full | – | –: the client repeats it |
/// | new | remembered | Report Asked |
/// | answer, refuse | answered | Reply |
/// | cancel | over | – |
#[derive(Debug)]
pub struct Server {
    port_space: u16,
    backlog: usize,
    proof: Proof,
    remembered: VecDeque<Remembered>,
    reports: VecDeque<Asked>,
    replies: VecDeque<Outgoing>,
    /// Borrowed by the shell while it sends it.
    sending: Outgoing,
    is_over: bool,
}

/// A Request that was received.
#[derive(Debug)]
struct Remembered {
    from: SocketAddr,
    transaction: u32,
    /// `None`: the program has not answered.
    reply: Option<Vec<u8>>,
}

#[derive(Debug)]
struct Outgoing {
    route: Route,
    bytes: Vec<u8>,
}

impl Server {
    /// Serves a bound socket. At most `backlog` Requests wait for the program. `key`: 16 random bytes, for
    /// its cookies.
    pub fn new(now: &Now, key: &[u8; 16], port_space: u16, backlog: usize) -> Self {
        let nowhere = Route { to: SocketAddr::from(([0; 4], 0)), from: None };
        Self {
            port_space,
            backlog: backlog.min(REMEMBERED / 2),
            proof: Proof::new(now, key),
            remembered: VecDeque::new(),
            reports: VecDeque::new(),
            replies: VecDeque::new(),
            sending: Outgoing { route: nowhere, bytes: Vec::new() },
            is_over: false,
        }
    }

    /// The listener is closed. Nothing is reported or sent afterwards.
    pub fn cancel(&mut self) {
        self.is_over = true;
        self.remembered.clear();
        self.reports.clear();
        self.replies.clear();
    }

    /// Answers with this queue pair.
    pub fn answer(
        &mut self,
        question: &Question,
        (qpn, qkey): (u32, u32),
        private_data: &[u8],
    ) -> Result<(), CmError> {
        self.reply(question, Status::Success, (qpn, qkey), private_data)
    }

    /// The program refuses.
    pub fn refuse(&mut self, question: &Question, private_data: &[u8]) -> Result<(), CmError> {
        self.reply(question, Status::Rejected, (0, 0), private_data)
    }

    fn reply(
        &mut self,
        question: &Question,
        status: Status,
        pair: (u32, u32),
        private_data: &[u8],
    ) -> Result<(), CmError> {
        if private_data.len() > Reply::MAX_PRIVATE_DATA {
            return Err(CmError::Invalid("too much private data"));
        }
        if self.is_over {
            return Ok(());
        }
        let bytes = reply(question, status, pair, 0, private_data);
        self.send(question, bytes.clone());
        if let Some(request) = self.remembered.iter_mut().find(|old| old.is(question)) {
            request.reply = Some(bytes);
        }
        Ok(())
    }

    fn handle_request(&mut self, now: &Now, from: SocketAddr, to: IpAddr, bytes: &[u8]) {
        // Checks the kind, too.
        let datagram = Datagram::parse(bytes).ok().filter(Datagram::is_intact);
        let request = datagram.as_ref().and_then(|datagram| Request::parse(datagram).ok());
        traced(Way::In, from, bytes, request.is_none().then_some("malformed"));
        let Some(request) = request else { return };
        let question = Question { transaction: request.transaction, from, to };
        if request.port_space != self.port_space {
            return self.send(&question, reply(&question, Status::Unsupported, (0, 0), 0, &[]));
        }
        if let Some(again) = self.remembered.iter().find(|old| old.is(&question)) {
            if let Some(reply) = again.reply.clone() {
                self.send(&question, reply);
            }
            return;
        }
        let waiting = self.remembered.iter().filter(|old| old.reply.is_none()).count();
        // From here on a Request costs an event and memory. A busy server lets the client prove first that it
        // receives at its address.
        let is_busy = waiting >= self.backlog.div_ceil(2) || self.remembered.len() >= REMEMBERED / 2;
        let transaction = request.transaction.to_be_bytes();
        if is_busy && !self.proof.is_short_valid(now, from, &transaction, request.cookie) {
            let cookie = self.proof.make_short(now, from, &transaction);
            return self.send(&question, reply(&question, Status::CookieRequired, (0, 0), cookie, &[]));
        }
        if waiting >= self.backlog {
            // The client repeats the Request.
            return;
        }
        if self.remembered.len() >= REMEMBERED {
            let answered = self.remembered.iter().position(|old| old.reply.is_some());
            self.remembered.remove(answered.unwrap_or(0));
        }
        self.remembered.push_back(Remembered { from, transaction: request.transaction, reply: None });
        self.reports.push_back(Asked { question, private_data: request.private_data.to_vec() });
    }

    fn send(&mut self, question: &Question, bytes: Vec<u8>) {
        if self.replies.len() < REPLIES {
            let route = Route { to: question.from, from: Some(question.to) };
            self.replies.push_back(Outgoing { route, bytes });
        }
    }
}

impl Machine for Server {
    type Report = Asked;

    fn handle_input(&mut self, now: &Now, input: Input<'_>) {
        if let Input::Datagram { from, to, bytes } = input
            && !self.is_over
        {
            self.handle_request(now, from, to, bytes);
        }
    }

    fn handle_timeout(&mut self, _: &Now) {}

    fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        self.sending = self.replies.pop_front()?;
        let Outgoing { route, bytes } = &self.sending;
        traced(Way::Out, route.to, bytes, None);
        Some(Transmit::Datagram { route: *route, bytes })
    }

    fn poll_timeout(&self) -> Option<Instant> {
        None
    }

    fn poll_action(&mut self) -> Option<Action<Asked>> {
        self.reports.pop_front().map(Action::Report)
    }

    fn want(&self, _: ConnKey) -> Want {
        Want::Nothing
    }
}

impl Remembered {
    fn is(&self, question: &Question) -> bool {
        (self.from, self.transaction) == (question.from, question.transaction)
    }
}

fn reply(
    question: &Question,
    status: Status,
    (qpn, qkey): (u32, u32),
    cookie: u64,
    private_data: &[u8],
) -> Vec<u8> {
    let reply = Reply { transaction: question.transaction, qpn, qkey, status, cookie, private_data };
    let mut bytes = vec![0; reply.buffer_len()];
    reply.emit(&mut bytes);
    bytes
}

fn traced(way: Way, peer: SocketAddr, bytes: &[u8], dropped: Option<&str>) {
    let dropped = dropped.as_ref().map(|why| why as &dyn Display);
    trace::unclaimed(way, peer, bytes, dropped);
}

#[cfg(test)]
#[path = "tests/lookup.rs"]
mod tests;
