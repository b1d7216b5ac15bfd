//! Lookups: a client asks which queue pair serves a port of rdma_cm's datagrams, and the server's program
//! answers (docs/datagram-iwarp.md section 8).
//!
//! Neither end knows of ids: a [`Client`] reports to a [`LookupObserver`], a [`Server`] to a
//! [`QuestionObserver`]. Both are called without a lock of this file.

use std::collections::VecDeque;
use std::fmt::Display;
use std::hash::{BuildHasher as _, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;
use uwarp_driver::{Engine, Readiness, Source, Token};
use uwarp_llp::udp::{Outgoing, Route, Socket};
use uwarp_rnic::mr::random_u32;
use uwarp_rnic::trace::{self, Way};
use uwarp_wire::datagram::Datagram;
use uwarp_wire::datagram::lookup::{Reply, Request, Status};

use crate::error::CmError;
use crate::handshake::errno_of;

/// The pause before an unanswered Request is repeated; each further pause is twice as long, up to
/// [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A missing listener is reported only when it has been missing for this long: the server may be about to
/// start.
const ABSENT: Duration = Duration::from_millis(350);
/// Requests that a server remembers, to answer a repeated one alike.
const REMEMBERED: usize = 1024;
/// A cookie is valid for at least this long, and for at most twice as long.
const COOKIE_LIFE: Duration = Duration::from_secs(64);
/// Datagrams received before other sources are served.
const TURN: usize = 64;

/// Room for the longest Request or Reply.
const ROOM: usize = 256;
const _: () = assert!(ROOM >= Request::MAX_DATAGRAM_LEN && ROOM >= Reply::MAX_DATAGRAM_LEN);

/// What a lookup found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// A queue pair, with its Q_Key and the server program's data.
    QueuePair { qpn: u32, qkey: u32, private_data: Vec<u8> },
    /// The server refuses, with its program's data.
    Refused(Status, Vec<u8>),
    /// No program listens there.
    Absent,
    /// No answer came.
    Silence,
}

/// Receives the result of a lookup.
pub(crate) trait LookupObserver: Send + Sync {
    /// The lookup has ended; nothing further is reported.
    fn looked_up(&self, found: Found);
}

/// Receives the requests of a server.
pub(crate) trait QuestionObserver: Send + Sync {
    /// A request has come.
    fn lookup_requested(&self, question: Question, private_data: Vec<u8>);
}

/// Repeats its Request until it is answered.
pub(crate) struct Client {
    engine: Arc<Engine>,
    socket: Socket,
    route: Route,
    observer: Weak<dyn LookupObserver>,
    running: Mutex<Option<Running>>,
}

struct Running {
    token: Token,
    transaction: u32,
    port_space: u16,
    cookie: u64,
    private_data: Vec<u8>,
    since: Instant,
    patience: Duration,
    pause: Duration,
}

impl Client {
    /// Asks the server at `to` from the local address `from`, for at most `patience`.
    pub fn start(
        engine: &Arc<Engine>,
        observer: Weak<dyn LookupObserver>,
        (from, to): (SocketAddr, SocketAddr),
        port_space: u16,
        private_data: &[u8],
        patience: Duration,
    ) -> Result<Arc<Self>, CmError> {
        if private_data.len() > Request::MAX_PRIVATE_DATA {
            return Err(CmError::Invalid("too much private data"));
        }
        let mut local = from;
        local.set_port(0);
        let socket = Socket::bind_address(local)?;
        // Only a connected socket reports that no program listens.
        socket.connect(to)?;
        let client = Arc::new(Self {
            engine: Arc::clone(engine),
            socket,
            route: Route { to, from: None },
            observer,
            running: Mutex::default(),
        });
        // Locked during the registration, so that an answer that comes at once finds the token.
        let mut running = client.running.lock();
        let source: Arc<Self> = Arc::clone(&client);
        let token =
            engine.register(client.socket.fd().as_raw_fd(), source).map_err(|error| errno_of(&error))?;
        let new = Running {
            token,
            transaction: random_u32()?,
            port_space,
            cookie: 0,
            private_data: private_data.to_vec(),
            since: Instant::now(),
            patience,
            pause: FIRST_PAUSE,
        };
        client.send_request(&new);
        engine.set_timer(token, Some(Instant::now() + new.pause));
        *running = Some(new);
        drop(running);
        Ok(client)
    }

    /// Cancels the lookup. Nothing is reported afterwards.
    pub fn cancel(&self) {
        if let Some(running) = self.running.lock().take() {
            self.engine.deregister(running.token);
        }
    }

    fn send_request(&self, running: &Running) {
        let request = Request {
            transaction: running.transaction,
            port_space: running.port_space,
            service_port: self.route.to.port(),
            cookie: running.cookie,
            private_data: &running.private_data,
        };
        let mut room = [0; ROOM];
        let len = request.emit(&mut room);
        let bytes = room.get(..len).unwrap_or(&[]);
        traced(Way::Out, self.route.to, bytes, None);
        // Lost, or refused because of an earlier one: the timer sends it again.
        let _ = self.socket.send(&[Outgoing { route: &self.route, bytes }]);
    }

    /// The result that a datagram gives; `None`: the lookup continues.
    fn handle_reply(&self, bytes: &[u8], running: &mut Running) -> Option<Found> {
        let datagram = Datagram::parse(bytes).ok().filter(Datagram::is_intact);
        let reply = datagram.as_ref().and_then(|datagram| Reply::parse(datagram).ok());
        let dropped = match &reply {
            None => Some("malformed"),
            Some(reply) if reply.transaction != running.transaction => Some("another lookup's"),
            Some(_) => None,
        };
        traced(Way::In, self.route.to, bytes, dropped);
        let reply = reply.filter(|_| dropped.is_none())?;
        let private_data = reply.private_data.to_vec();
        match reply.status {
            Status::Success => Some(Found::QueuePair { qpn: reply.qpn, qkey: reply.qkey, private_data }),
            Status::CookieRequired if running.cookie == 0 => {
                running.cookie = reply.cookie;
                self.send_request(running);
                None
            }
            status => Some(Found::Refused(status, private_data)),
        }
    }

    fn conclude(&self, found: Found) {
        let Some(running) = self.running.lock().take() else { return };
        self.engine.deregister(running.token);
        if let Some(observer) = self.observer.upgrade() {
            observer.looked_up(found);
        }
    }
}

impl Source for Client {
    fn ready(&self, _: Readiness) {
        let mut found = None;
        {
            let mut guard = self.running.lock();
            let Some(running) = guard.as_mut() else { return };
            let mut room = [0; ROOM];
            // A flood of datagrams must not delay other sources: the rest is read after the next Request.
            for _ in 0..TURN {
                let mut result = None;
                match self
                    .socket
                    .receive(&mut room, ROOM, 1, |bytes, _| result = self.handle_reply(bytes, running))
                {
                    Ok(_) => found = result,
                    Err(Errno::INTR) => {}
                    Err(Errno::CONNREFUSED) if running.since.elapsed() > ABSENT => {
                        found = Some(Found::Absent)
                    }
                    Err(Errno::CONNREFUSED) => {}
                    Err(_) => break,
                }
                if found.is_some() {
                    break;
                }
            }
        }
        if let Some(found) = found {
            self.conclude(found);
        }
    }

    fn timeout(&self) {
        let over = {
            let mut guard = self.running.lock();
            let Some(running) = guard.as_mut() else { return };
            let over = running.since.elapsed() > running.patience;
            if !over {
                self.send_request(running);
                running.pause = (running.pause * 2).min(LONGEST_PAUSE);
                self.engine.set_timer(running.token, Some(Instant::now() + running.pause));
            }
            over
        };
        if over {
            self.conclude(Found::Silence);
        }
    }
}

/// A port of datagrams that answers lookups.
pub(crate) struct Server {
    engine: Arc<Engine>,
    socket: Arc<Socket>,
    port_space: u16,
    backlog: usize,
    observer: Weak<dyn QuestionObserver>,
    me: Weak<Self>,
    token: Mutex<Option<Token>>,
    remembered: Mutex<VecDeque<Remembered>>,
    /// Key of its cookies.
    key: RandomState,
    since: Instant,
}

/// A Request that was received.
struct Remembered {
    from: SocketAddr,
    transaction: u32,
    /// `None`: the program has not answered.
    reply: Option<Vec<u8>>,
}

/// A Request, for the program to answer.
pub(crate) struct Question {
    server: Weak<Server>,
    transaction: u32,
    /// The client's address.
    pub from: SocketAddr,
    /// The address that the Request was sent to.
    pub to: IpAddr,
}

impl Server {
    /// Serves a bound socket. At most `backlog` Requests wait for the program.
    pub fn start(
        engine: &Arc<Engine>,
        socket: &Arc<Socket>,
        port_space: u16,
        backlog: usize,
        observer: Weak<dyn QuestionObserver>,
    ) -> Result<Arc<Self>, Errno> {
        let server = Arc::new_cyclic(|me| Self {
            engine: Arc::clone(engine),
            socket: Arc::clone(socket),
            port_space,
            backlog: backlog.min(REMEMBERED / 2),
            observer,
            me: Weak::clone(me),
            token: Mutex::default(),
            remembered: Mutex::default(),
            key: RandomState::new(),
            since: Instant::now(),
        });
        let mut token = server.token.lock();
        let source: Arc<Self> = Arc::clone(&server);
        *token = Some(engine.register(socket.fd().as_raw_fd(), source).map_err(|error| errno_of(&error))?);
        drop(token);
        Ok(server)
    }

    /// Receives no more Requests. The program can still answer those that it has.
    pub fn cancel(&self) {
        if let Some(token) = self.token.lock().take() {
            self.engine.deregister(token);
        }
    }

    fn handle_request(&self, bytes: &[u8], from: SocketAddr, to: IpAddr) -> Option<(Question, Vec<u8>)> {
        // Checks the kind, too.
        let datagram = Datagram::parse(bytes).ok().filter(Datagram::is_intact);
        let request = datagram.as_ref().and_then(|datagram| Request::parse(datagram).ok());
        traced(Way::In, from, bytes, request.is_none().then_some("malformed"));
        let request = request?;
        let question = Question { server: Weak::clone(&self.me), transaction: request.transaction, from, to };
        if request.port_space != self.port_space {
            self.send(&question, &reply(&question, Status::Unsupported, (0, 0), 0, &[]));
            return None;
        }
        let mut remembered = self.remembered.lock();
        let same = |old: &&Remembered| (old.from, old.transaction) == (from, request.transaction);
        if let Some(again) = remembered.iter().find(same) {
            if let Some(reply) = &again.reply {
                self.send(&question, reply);
            }
            return None;
        }
        let waiting = remembered.iter().filter(|old| old.reply.is_none()).count();
        // From here on a Request costs an event and memory. A busy server lets the client prove first that it
        // receives at its address.
        let is_busy = waiting >= self.backlog.div_ceil(2) || remembered.len() >= REMEMBERED / 2;
        if is_busy && !self.cookies(&question).contains(&request.cookie) {
            let [cookie, _] = self.cookies(&question);
            self.send(&question, &reply(&question, Status::CookieRequired, (0, 0), cookie, &[]));
            return None;
        }
        if waiting >= self.backlog {
            // The client repeats the Request.
            return None;
        }
        if remembered.len() >= REMEMBERED {
            let answered = remembered.iter().position(|old| old.reply.is_some());
            remembered.remove(answered.unwrap_or(0));
        }
        remembered.push_back(Remembered { from, transaction: request.transaction, reply: None });
        Some((question, request.private_data.to_vec()))
    }

    /// Values that prove that a client receives at the address it sends from: the present cookie and the one
    /// before. Never 0, which means none.
    fn cookies(&self, question: &Question) -> [u64; 2] {
        let now = self.since.elapsed().as_secs() / COOKIE_LIFE.as_secs() + 1;
        [now, now - 1].map(|age| self.key.hash_one((question.from, question.transaction, age)) | 1)
    }

    fn send(&self, question: &Question, reply: &[u8]) {
        let route = Route { to: question.from, from: Some(question.to) };
        traced(Way::Out, question.from, reply, None);
        // If it is lost, the client repeats its Request.
        let _ = self.socket.send(&[Outgoing { route: &route, bytes: reply }]);
    }
}

impl Source for Server {
    fn ready(&self, _: Readiness) {
        let mut room = [0; ROOM];
        for _ in 0..TURN {
            let mut result = None;
            let received = self.socket.receive(&mut room, ROOM, 1, |bytes, incoming| {
                if !incoming.truncated {
                    result = self.handle_request(bytes, incoming.from, incoming.to);
                }
            });
            match received {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
            if let (Some((question, private_data)), Some(observer)) = (result, self.observer.upgrade()) {
                observer.lookup_requested(question, private_data);
            }
        }
        // The system does not report again that datagrams wait.
        if let Some(token) = *self.token.lock() {
            self.engine.rearm(token);
        }
    }

    fn timeout(&self) {}
}

impl Question {
    /// Answers with this queue pair.
    pub fn answer(&self, qpn: u32, qkey: u32, private_data: &[u8]) -> Result<(), CmError> {
        self.reply(Status::Success, (qpn, qkey), private_data)
    }

    /// The program refuses.
    pub fn refuse(&self, private_data: &[u8]) -> Result<(), CmError> {
        self.reply(Status::Rejected, (0, 0), private_data)
    }

    fn reply(&self, status: Status, pair: (u32, u32), private_data: &[u8]) -> Result<(), CmError> {
        if private_data.len() > Reply::MAX_PRIVATE_DATA {
            return Err(CmError::Invalid("too much private data"));
        }
        let Some(server) = self.server.upgrade() else { return Ok(()) };
        let bytes = reply(self, status, pair, 0, private_data);
        server.send(self, &bytes);
        let mut remembered = server.remembered.lock();
        let mine = |old: &&mut Remembered| (old.from, old.transaction) == (self.from, self.transaction);
        if let Some(request) = remembered.iter_mut().find(mine) {
            request.reply = Some(bytes);
        }
        Ok(())
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
    let mut bytes = vec![0; ROOM];
    let len = reply.emit(&mut bytes);
    bytes.truncate(len);
    bytes
}

/// Traces a datagram of a lookup. One that goes out is traced first, so that its arrival is not traced before
/// it.
fn traced(way: Way, peer: SocketAddr, bytes: &[u8], dropped: Option<&str>) {
    let dropped = dropped.as_ref().map(|why| why as &dyn Display);
    trace::datagram(trace::Datagram {
        qpn: None,
        way,
        peer,
        group: None,
        head: bytes,
        len: bytes.len(),
        dropped,
    });
}
