//! Lookups: a client asks which queue pair serves a port of rdma_cm's datagrams, and the server's program
//! answers (docs/datagram-iwarp.md section 8).
//!
//! Neither end knows of ids: a [`Client`] reports to a [`LookupObserver`], a [`Server`] to a
//! [`QuestionObserver`]. Both are called with no lock of these held.

use std::collections::VecDeque;
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
use uwarp_wire::datagram::lookup::{Reply, Request, Status};
use uwarp_wire::datagram::{Datagram, Kind};

use crate::error::CmError;
use crate::handshake::errno_of;

/// Until an unanswered Request is sent again; each further time it waits twice as long, up to
/// [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A port without a listener is believed only when it has been so for as long: servers may start at the same
/// time.
const ABSENT: Duration = Duration::from_millis(350);
/// Requests that a server remembers, to answer a repeated one alike.
const REMEMBERED: usize = 1024;
/// A cookie is good for this long at least, and for twice as long at most.
const COOKIE_LIFE: Duration = Duration::from_secs(64);
/// Datagrams taken before others have their turn.
const TURN: usize = 64;

/// Room for the longest Request or Reply.
const ROOM: usize = 256;
const _: () = assert!(ROOM >= Request::MAX_DATAGRAM_LEN && ROOM >= Reply::MAX_DATAGRAM_LEN);

/// What a lookup found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// A queue pair, with its Q_Key and the server program's data.
    QueuePair { qpn: u32, qkey: u32, private_data: Vec<u8> },
    /// The server says no, with its program's data.
    Refused(Status, Vec<u8>),
    /// Nobody listens there.
    Absent,
    /// Nobody answers.
    Silence,
}

/// Waits for the end of a lookup.
pub(crate) trait LookupObserver: Send + Sync {
    /// It has ended, and nothing further is reported.
    fn looked_up(&self, found: Found);
}

/// Takes the questions of a server.
pub(crate) trait QuestionObserver: Send + Sync {
    /// Somebody asks.
    fn asked(&self, question: Question, private_data: Vec<u8>);
}

/// Asks until it is answered.
pub(crate) struct Client {
    engine: Arc<Engine>,
    socket: Socket,
    route: Route,
    observer: Weak<dyn LookupObserver>,
    asking: Mutex<Option<Asking>>,
}

struct Asking {
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
    /// Asks the server at `to`, for as long as `patience`, from the local address `from`.
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
        // Only a connected socket is told that nobody listens.
        socket.connect(to)?;
        let client = Arc::new(Self {
            engine: Arc::clone(engine),
            socket,
            route: Route { to, from: None },
            observer,
            asking: Mutex::default(),
        });
        // Held over the registration, so that an answer that comes at once finds the token.
        let mut asking = client.asking.lock();
        let source: Arc<Self> = Arc::clone(&client);
        let token =
            engine.register(client.socket.fd().as_raw_fd(), source).map_err(|error| errno_of(&error))?;
        let new = Asking {
            token,
            transaction: random_u32()?,
            port_space,
            cookie: 0,
            private_data: private_data.to_vec(),
            since: Instant::now(),
            patience,
            pause: FIRST_PAUSE,
        };
        client.ask(&new);
        engine.set_timer(token, Some(Instant::now() + new.pause));
        *asking = Some(new);
        drop(asking);
        Ok(client)
    }

    /// Gives up. Nothing is reported afterwards.
    pub fn cancel(&self) {
        if let Some(asking) = self.asking.lock().take() {
            self.engine.deregister(asking.token);
        }
    }

    fn ask(&self, asking: &Asking) {
        let request = Request {
            transaction: asking.transaction,
            port_space: asking.port_space,
            service_port: self.route.to.port(),
            cookie: asking.cookie,
            private_data: &asking.private_data,
        };
        let mut room = [0; ROOM];
        let len = request.emit(&mut room);
        let bytes = room.get(..len).unwrap_or(&[]);
        // Lost, or refused by an earlier one: the timer asks again.
        let _ = self.socket.send(&[Outgoing { route: &self.route, bytes }]);
    }

    /// What a datagram means for the lookup; `None`: it goes on.
    fn hear(&self, bytes: &[u8], asking: &mut Asking) -> Option<Found> {
        let datagram = Datagram::parse(bytes).ok().filter(Datagram::is_intact)?;
        let reply = Reply::parse(&datagram).ok()?;
        if reply.transaction != asking.transaction {
            return None;
        }
        let private_data = reply.private_data.to_vec();
        match reply.status {
            Status::Success => Some(Found::QueuePair { qpn: reply.qpn, qkey: reply.qkey, private_data }),
            Status::CookieRequired if asking.cookie == 0 => {
                asking.cookie = reply.cookie;
                self.ask(asking);
                None
            }
            status => Some(Found::Refused(status, private_data)),
        }
    }

    fn conclude(&self, found: Found) {
        let Some(asking) = self.asking.lock().take() else { return };
        self.engine.deregister(asking.token);
        if let Some(observer) = self.observer.upgrade() {
            observer.looked_up(found);
        }
    }
}

impl Source for Client {
    fn ready(&self, _: Readiness) {
        let mut found = None;
        {
            let mut guard = self.asking.lock();
            let Some(asking) = guard.as_mut() else { return };
            let mut room = [0; ROOM];
            // A peer that floods does not keep others waiting: what it left behind is heard after the next
            // Request.
            for _ in 0..TURN {
                let mut heard = None;
                match self.socket.receive(&mut room, ROOM, 1, |bytes, _| heard = self.hear(bytes, asking)) {
                    Ok(_) => found = heard,
                    Err(Errno::INTR) => {}
                    Err(Errno::CONNREFUSED) if asking.since.elapsed() > ABSENT => found = Some(Found::Absent),
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
            let mut guard = self.asking.lock();
            let Some(asking) = guard.as_mut() else { return };
            let over = asking.since.elapsed() > asking.patience;
            if !over {
                self.ask(asking);
                asking.pause = (asking.pause * 2).min(LONGEST_PAUSE);
                self.engine.set_timer(asking.token, Some(Instant::now() + asking.pause));
            }
            over
        };
        if over {
            self.conclude(Found::Silence);
        }
    }
}

/// A port that is asked.
pub(crate) struct Server {
    engine: Arc<Engine>,
    socket: Arc<Socket>,
    port_space: u16,
    backlog: usize,
    observer: Weak<dyn QuestionObserver>,
    me: Weak<Self>,
    token: Mutex<Option<Token>>,
    asked: Mutex<VecDeque<Asked>>,
    /// Of its cookies.
    key: RandomState,
    since: Instant,
}

/// A Request that came.
struct Asked {
    from: SocketAddr,
    transaction: u32,
    /// None: the program has not answered.
    reply: Option<Vec<u8>>,
}

/// A Request, for the program to answer.
pub(crate) struct Question {
    server: Weak<Server>,
    transaction: u32,
    /// Who asks.
    pub from: SocketAddr,
    /// The address that it asked.
    pub to: IpAddr,
}

impl Server {
    /// Answers on a bound socket. At most `backlog` questions wait for the program.
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
            asked: Mutex::default(),
            key: RandomState::new(),
            since: Instant::now(),
        });
        let mut token = server.token.lock();
        let source: Arc<Self> = Arc::clone(&server);
        *token = Some(engine.register(socket.fd().as_raw_fd(), source).map_err(|error| errno_of(&error))?);
        drop(token);
        Ok(server)
    }

    /// Hears nothing more. Questions that the program has can still be answered.
    pub fn cancel(&self) {
        if let Some(token) = self.token.lock().take() {
            self.engine.deregister(token);
        }
    }

    fn hear(&self, bytes: &[u8], from: SocketAddr, to: IpAddr) -> Option<(Question, Vec<u8>)> {
        let datagram = Datagram::parse(bytes).ok().filter(Datagram::is_intact)?;
        if datagram.header().kind() != Kind::LookupRequest {
            return None;
        }
        let request = Request::parse(&datagram).ok()?;
        let question = Question { server: Weak::clone(&self.me), transaction: request.transaction, from, to };
        if request.port_space != self.port_space {
            self.send(&question, &reply(&question, Status::Unsupported, (0, 0), 0, &[]));
            return None;
        }
        let mut asked = self.asked.lock();
        let same = |asked: &&Asked| (asked.from, asked.transaction) == (from, request.transaction);
        if let Some(again) = asked.iter().find(same) {
            if let Some(reply) = &again.reply {
                self.send(&question, reply);
            }
            return None;
        }
        let waiting = asked.iter().filter(|asked| asked.reply.is_none()).count();
        // From here on a Request costs an event and memory. A server that is asked often wants to know first
        // that the client is where it says.
        let is_busy = waiting >= self.backlog.div_ceil(2) || asked.len() >= REMEMBERED / 2;
        if is_busy && !self.cookies(&question).contains(&request.cookie) {
            let [cookie, _] = self.cookies(&question);
            self.send(&question, &reply(&question, Status::CookieRequired, (0, 0), cookie, &[]));
            return None;
        }
        if waiting >= self.backlog {
            // The client asks again.
            return None;
        }
        if asked.len() >= REMEMBERED {
            let answered = asked.iter().position(|asked| asked.reply.is_some());
            asked.remove(answered.unwrap_or(0));
        }
        asked.push_back(Asked { from, transaction: request.transaction, reply: None });
        Some((question, request.private_data.to_vec()))
    }

    /// What proves that a client receives at the address it sends from: the present cookie and the one
    /// before. Never 0, which is none.
    fn cookies(&self, question: &Question) -> [u64; 2] {
        let now = self.since.elapsed().as_secs() / COOKIE_LIFE.as_secs() + 1;
        [now, now - 1].map(|age| self.key.hash_one((question.from, question.transaction, age)) | 1)
    }

    fn send(&self, question: &Question, reply: &[u8]) {
        let route = Route { to: question.from, from: Some(question.to) };
        // Lost: the client asks again.
        let _ = self.socket.send(&[Outgoing { route: &route, bytes: reply }]);
    }
}

impl Source for Server {
    fn ready(&self, _: Readiness) {
        let mut room = [0; ROOM];
        for _ in 0..TURN {
            let mut heard = None;
            let received = self.socket.receive(&mut room, ROOM, 1, |bytes, incoming| {
                if !incoming.truncated {
                    heard = self.hear(bytes, incoming.from, incoming.to);
                }
            });
            match received {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
            if let (Some((question, private_data)), Some(observer)) = (heard, self.observer.upgrade()) {
                observer.asked(question, private_data);
            }
        }
        // The system will not say again that datagrams wait.
        if let Some(token) = *self.token.lock() {
            self.engine.rearm(token);
        }
    }

    fn timeout(&self) {}
}

impl Question {
    /// The queue pair is this one.
    pub fn answer(&self, qpn: u32, qkey: u32, private_data: &[u8]) -> Result<(), CmError> {
        self.reply(Status::Success, (qpn, qkey), private_data)
    }

    /// The program does not want to.
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
        let mut asked = server.asked.lock();
        let mine = |asked: &&mut Asked| (asked.from, asked.transaction) == (self.from, self.transaction);
        if let Some(asked) = asked.iter_mut().find(mine) {
            asked.reply = Some(bytes);
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
