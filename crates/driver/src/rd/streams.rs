//! Streams of RC queue pairs over reliable datagrams (docs/rd.md section 5.6): what a port does for the pipes
//! of `uwarp_llp::streams`.
//!
//! A queue pair's lock comes before that of a turn, so a turn calls no queue pair of a stream: it fills its
//! pipe and raises its name. The other way round, who wants something puts its pipe on a list, and has a turn
//! if nobody else does.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_llp::asked_port::Said;
use uwarp_llp::carrier::{Ends, Listening, SetUp, Watch};
use uwarp_llp::streams::{Carries, Over, Pipe, StreamLink};
use uwarp_proto::rd::{self, Failure, PortAnswer, StreamEnd, StreamEvent, StreamNews, Ticket};
use uwarp_rnic::VerbsError;
use uwarp_rnic::ah::Endpoint;
use uwarp_rnic::cq::Coverage;
use uwarp_rnic::qp::Now;

use super::backlog::Backlog;
use super::contacts::Contacts;
use super::questions::Questions;
use super::{Exchanges, Owner, Turn};
use crate::engine::Engine;
use crate::source::{Readiness, Source, Token};
use crate::sync::{AtomicBool, Mutex, OnceLock, Ordering};
use crate::ud::DatagramPort;

/// What a port has for streams, under the lock of a turn.
#[derive(Default)]
pub(super) struct Streams {
    pipes: FxHashMap<Ticket, Arc<Pipe>>,
    /// The names of those that this process has opened or accepted, by the pipe's address.
    tickets: FxHashMap<usize, Opened>,
    listening: FxHashMap<u32, SmallVec<[Listener; 1]>>,
    /// Contact that is being made.
    pub contacts: Contacts,
    /// Ports of peers that are silent.
    pub questions: Questions,
}

pub(super) struct Opened {
    ticket: Ticket,
    /// What the machine knows of its wishes.
    offered: u64,
    taken: u64,
    finishes: bool,
    /// The peer has said something.
    pub is_heard: bool,
    /// The peer has opened it for this service, and perhaps nobody has accepted it.
    service: Option<u32>,
}

impl Streams {
    pub fn pipe(&self, ticket: Ticket) -> Option<Arc<Pipe>> {
        self.pipes.get(&ticket).cloned()
    }

    pub fn opened_as(&self, ticket: Ticket) -> Option<&Opened> {
        self.tickets.get(&key(self.pipes.get(&ticket)?))
    }

    /// When there is something to do again.
    pub fn timeout(&self) -> Option<Instant> {
        self.contacts.timeout().into_iter().chain(self.questions.timeout()).min()
    }
}

/// Pipes that want something, and the engine's name for the port.
pub(super) struct Wanting {
    pipes: Mutex<Vec<Arc<Pipe>>, 28>,
    /// There are some: most turns have none, and look at this alone.
    has_some: AtomicBool,
    named: OnceLock<(Token, Arc<Engine>)>,
}

impl Default for Wanting {
    fn default() -> Self {
        Self { pipes: Mutex::default(), has_some: AtomicBool::new(false), named: OnceLock::new() }
    }
}

/// What the engine has of the port's streams: it keeps nothing alive.
struct Due(Weak<Exchanges>);

impl Source for Due {
    fn ready(&self, _: Readiness) {
        if let Some(exchanges) = self.0.upgrade() {
            exchanges.do_what_is_due();
        }
    }

    fn timeout(&self) {}
}

/// A port with its exchanges, as streams know it: it stays while there are any.
pub(crate) struct StreamPort {
    port: Arc<DatagramPort>,
    exchanges: Arc<Exchanges>,
    me: Weak<Self>,
}

impl StreamPort {
    /// The streams of a port.
    pub fn of(port: &Arc<DatagramPort>) -> Result<Arc<Self>, VerbsError> {
        let exchanges = port.exchanges()?;
        exchanges.wanting.name(port.engine(), &exchanges.me);
        Ok(Arc::new_cyclic(|me| Self { port: Arc::clone(port), exchanges, me: me.clone() }))
    }

    fn carries(&self) -> Option<Arc<dyn Carries>> {
        self.me.upgrade().map(|me| -> Arc<dyn Carries> { me })
    }

    /// Opens a stream to a service of a peer; `LOOP`: the peer is this port. `from`: the address of this
    /// host, if the caller has chosen one.
    pub fn connect(
        &self,
        from: Option<IpAddr>,
        to: SocketAddr,
        service: u32,
    ) -> Result<Box<dyn SetUp>, Errno> {
        let endpoint = Endpoint { to, from, marks: (0, 0) };
        let route = self.exchanges.route_to(&endpoint)?;
        let pipe = Pipe::new(Ends { local: route.local, peer: route.remote }, Some(service));
        let carries = self.carries().ok_or(Errno::CANCELED)?;
        let link = StreamLink::new(Arc::clone(&pipe), carries);
        let now = Now::unread();
        let mut turn = self.exchanges.turn.lock();
        let opened = turn.machine.open_stream(&now, route, service);
        if let Ok(ticket) = opened {
            turn.enter(ticket, &pipe, None);
            turn.streams.contacts.begin(now.get(), ticket, route);
        }
        self.exchanges.end(turn, &now);
        match opened {
            Ok(_) => Ok(Box::new(link)),
            Err(rd::PostError::TooManyPeers) => Err(Errno::NOBUFS),
            Err(rd::PostError::Itself) => Err(Errno::LOOP),
            Err(rd::PostError::Closed) => Err(Errno::SHUTDOWN),
        }
    }

    /// Takes streams for a service from now on, of those that come to this address. (Programs listen on all
    /// addresses of each family by itself, or on some addresses.)
    pub fn listen(&self, service: u32, at: IpAddr) -> Result<Box<dyn Listening>, Errno> {
        let backlog = Arc::new(Backlog::default());
        let mut turn = self.exchanges.turn.lock();
        let listening = turn.streams.listening.entry(service).or_default();
        listening.retain(|listener| listener.backlog.strong_count() > 0);
        let known = listening.iter().any(|listener| listener.at == at);
        if !known {
            listening.push(Listener { at, backlog: Arc::downgrade(&backlog) });
            turn.machine.take_streams(service, true);
        }
        self.exchanges.release(turn);
        if known {
            return Err(Errno::ADDRINUSE);
        }
        let port = self.me.upgrade().ok_or(Errno::CANCELED)?;
        Ok(Box::new(Listens { port, service, backlog }))
    }
}

impl Carries for StreamPort {
    fn attend(&self, pipe: &Arc<Pipe>, later: bool) {
        if pipe.list() {
            self.exchanges.wanting.push(pipe);
        }
        if later {
            self.exchanges.wanting.raise();
        } else {
            self.exchanges.do_what_is_due();
        }
    }

    fn answers(&self, pipe: &Pipe) -> Option<(bool, Duration)> {
        let turn = self.exchanges.turn.try_lock()?;
        let opened = turn.streams.tickets.get(&key(pipe));
        let answers = opened.and_then(|opened| turn.machine.stream_answers(&Now::unread(), opened.ticket));
        if self.exchanges.turn.let_go(turn) {
            self.exchanges.wanting.raise();
        }
        answers.map(|answers| (answers.doubtful, answers.last))
    }

    fn look(&self, in_earnest: bool) -> bool {
        self.port.make_progress(in_earnest) == Coverage::Complete
    }

    fn rest(&self) {
        self.exchanges.poll(self.port.engine());
    }

    fn raise(&self, name: u64) {
        raise(self.port.engine(), name, END);
    }
}

/// Who takes the streams of a service that come to an address.
struct Listener {
    at: IpAddr,
    backlog: Weak<Backlog>,
}

impl Listener {
    /// How well it fits a stream that has come to this address, as the system chooses among sockets of one
    /// port; 0: it does not.
    fn fits(&self, to: IpAddr) -> u8 {
        match self.at {
            at if at == to => 3,
            at if at.is_unspecified() && at.is_ipv4() == to.is_ipv4() => 2,
            at if at.is_unspecified() && at.is_ipv6() => 1,
            _ => 0,
        }
    }
}

/// Streams that peers open for a service.
struct Listens {
    port: Arc<StreamPort>,
    service: u32,
    backlog: Arc<Backlog>,
}

impl Listening for Listens {
    fn accept(&self) -> Result<Option<Box<dyn SetUp>>, Errno> {
        let Some(pipe) = self.backlog.pop() else { return Ok(None) };
        let carries = self.port.carries().ok_or(Errno::CANCELED)?;
        Ok(Some(Box::new(StreamLink::new(pipe, carries))))
    }

    fn watch(&self) -> Watch<'_> {
        Watch::Itself
    }

    fn name(&self, name: u64) {
        if self.backlog.name(name) {
            raise(self.port.port.engine(), name, INPUT);
        }
    }
}

impl Drop for Listens {
    fn drop(&mut self) {
        if self.port.port.engine().birth.is_parents() {
            return;
        }
        let now = Now::unread();
        let mut turn = self.port.exchanges.turn.lock();
        // Those that wait are nobody's. Their ends leave them.
        let waiting = self.backlog.take_all();
        let own = Arc::downgrade(&self.backlog);
        let mut is_last = true;
        if let Some(listening) = turn.streams.listening.get_mut(&self.service) {
            listening.retain(|listener| !listener.backlog.ptr_eq(&own));
            is_last = listening.is_empty();
        }
        if is_last {
            turn.streams.listening.remove(&self.service);
            turn.machine.take_streams(self.service, false);
        }
        for pipe in waiting {
            if let Some(opened) = turn.streams.tickets.get(&key(&pipe)) {
                let ticket = opened.ticket;
                turn.machine.reset_stream(&now, ticket);
            }
        }
        self.port.exchanges.end(turn, &now);
    }
}

impl Drop for StreamPort {
    /// The last stream has gone: the machine answers its peers for a while.
    fn drop(&mut self) {
        if self.port.engine().birth.is_parents() {
            return;
        }
        let now = Now::unread();
        let mut turn = self.exchanges.turn.lock();
        // And some streams may have a rest to send.
        turn.port = Some(Arc::clone(&self.port));
        self.exchanges.end(turn, &now);
    }
}

const INPUT: Readiness = Readiness { readable: true, writable: false, hangup: false };
const ROOM: Readiness = Readiness { readable: false, writable: true, hangup: false };
const END: Readiness = Readiness { readable: true, writable: true, hangup: true };

fn raise(engine: &Engine, name: u64, readiness: Readiness) {
    if name != 0 {
        engine.raise(Token(name), readiness);
    }
}

fn key(pipe: &Pipe) -> usize {
    std::ptr::from_ref(pipe).addr()
}

impl Wanting {
    fn name(&self, engine: &Arc<Engine>, exchanges: &Weak<Exchanges>) {
        if self.named.get().is_none() {
            let due = Arc::new(Due(exchanges.clone()));
            // It fails for descriptors alone, and this has none.
            if let Ok(token) = engine.register_watch(Watch::Itself, due)
                && let Err((token, engine)) = self.named.set((token, Arc::clone(engine)))
            {
                engine.deregister(token);
            }
        }
    }

    /// Before the turn that is to see it: who has that lock sees the caller's mark behind it.
    fn push(&self, pipe: &Arc<Pipe>) {
        let mut pipes = self.pipes.lock();
        pipes.push(Arc::clone(pipe));
        self.has_some.store(true, Ordering::Release);
    }

    fn take(&self) -> Vec<Arc<Pipe>> {
        if !self.has_some.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut pipes = self.pipes.lock();
        self.has_some.store(false, Ordering::Relaxed);
        std::mem::take(&mut *pipes)
    }

    /// Whoever looks next does what is due.
    fn raise(&self) {
        if let Some((token, engine)) = self.named.get() {
            engine.raise(*token, ROOM);
        }
    }
}

impl Drop for Wanting {
    fn drop(&mut self) {
        if let Some((token, engine)) = self.named.get() {
            engine.deregister(*token);
        }
    }
}

impl Exchanges {
    /// Tells the machine what pipes want.
    pub(super) fn run_streams(&self, turn: &mut Turn, now: &Now) {
        for pipe in self.wanting.take() {
            turn.tell_machine(now, &pipe);
        }
        turn.run_contacts(now);
        if !turn.streams.questions.is_empty() {
            for (remote, answer) in turn.streams.questions.run(now.get()) {
                match answer {
                    Said::Refused => {
                        turn.machine.port_is(now, remote, PortAnswer::Refused);
                        turn.is_refused(now, remote);
                    }
                    Said::Nothing => turn.machine.port_is(now, remote, PortAnswer::Nothing),
                    // What is up goes on, as over TCP: the way may come back.
                    Said::Unreachable(errno) => turn.is_unreachable(now, remote, errno),
                }
            }
        }
        if turn.machine.has_stream_events()
            && let Some(port) = self.port.upgrade()
        {
            turn.stream_events(port.engine(), &[]);
        }
    }
}

impl Turn {
    fn enter(&mut self, ticket: Ticket, pipe: &Arc<Pipe>, service: Option<u32>) {
        let opened = Opened { ticket, offered: 0, taken: 0, finishes: false, is_heard: false, service };
        self.streams.tickets.insert(key(pipe), opened);
        self.streams.pipes.insert(ticket, Arc::clone(pipe));
        self.owners.insert(ticket, Owner::Stream(Arc::clone(pipe)));
    }

    /// The process leaves: what its program has not accepted is nobody's.
    pub(super) fn refuse_waiting(&mut self, now: &Now) {
        let listening = std::mem::take(&mut self.streams.listening).into_values().flatten();
        for backlog in listening.filter_map(|listener| listener.backlog.upgrade()) {
            for pipe in backlog.take_all() {
                if let Some(opened) = self.streams.tickets.get(&key(&pipe)) {
                    self.machine.reset_stream(now, opened.ticket);
                }
            }
        }
    }

    fn tell_machine(&mut self, now: &Now, pipe: &Arc<Pipe>) {
        let wants = pipe.wants();
        // (None: it is over.)
        let Some(opened) = self.streams.tickets.get_mut(&key(pipe)) else { return };
        let ticket = opened.ticket;
        if wants.resets && wants.leaves {
            return self.machine.reset_stream(now, ticket);
        }
        if std::mem::replace(&mut opened.offered, wants.offered) != wants.offered {
            self.machine.offer(now, ticket, wants.offered);
        }
        if std::mem::replace(&mut opened.taken, wants.taken) != wants.taken {
            self.machine.taken(now, ticket, wants.taken);
        }
        if wants.leaves {
            self.machine.leave_stream(now, ticket);
        } else if wants.finishes && !std::mem::replace(&mut opened.finishes, true) {
            self.machine.finish_stream(now, ticket);
        }
    }

    /// Does what has happened to streams. Their bytes are in the datagram.
    pub(super) fn stream_events(&mut self, engine: &Engine, datagram: &[u8]) {
        while let Some(StreamEvent { stream, what }) = self.machine.poll_stream_event() {
            if let StreamNews::Opened { route, service } = what {
                self.opened(engine, stream, route, service);
                continue;
            }
            let Some(pipe) = self.streams.pipes.get(&stream).cloned() else { continue };
            if let Some(opened) = self.streams.tickets.get_mut(&key(&pipe)) {
                opened.is_heard = true;
            }
            match what {
                StreamNews::Opened { .. } => {}
                StreamNews::Bytes { position, at } => {
                    pipe.put(position, datagram.get(at).unwrap_or_default());
                }
                StreamNews::Readable(position) => raise(engine, pipe.readable(position), INPUT),
                StreamNews::Finished => raise(engine, pipe.finished(), END),
                StreamNews::Acknowledged(position) => {
                    if let Some(name) = pipe.acknowledged(position) {
                        raise(engine, name, ROOM);
                    }
                }
                StreamNews::Limit(position) => pipe.limited(position),
                StreamNews::Ended(how) => {
                    self.streams.pipes.remove(&stream);
                    let opened = self.streams.tickets.remove(&key(&pipe));
                    self.owners.remove(&stream);
                    let service = opened.and_then(|opened| opened.service);
                    let listening = service.and_then(|service| self.streams.listening.get(&service));
                    for backlog in listening.into_iter().flatten().filter_map(|l| l.backlog.upgrade()) {
                        backlog.remove(&pipe);
                    }
                    raise(engine, pipe.ended(over(how)), END);
                }
            }
        }
    }

    /// A peer has opened a stream.
    fn opened(&mut self, engine: &Engine, stream: Ticket, route: rd::Route, service: u32) {
        let pipe = Pipe::new(Ends { local: route.local, peer: route.remote }, None);
        self.enter(stream, &pipe, Some(service));
        let name = self.backlog(service, route.local.ip()).and_then(|backlog| backlog.push(&pipe));
        match name {
            Some(name) => raise(engine, name, INPUT),
            None => self.machine.reset_stream(&Now::unread(), stream),
        }
    }

    /// Where a stream waits that has come to this address.
    fn backlog(&self, service: u32, to: IpAddr) -> Option<Arc<Backlog>> {
        let fitting = self.streams.listening.get(&service)?.iter().filter(|listener| listener.fits(to) > 0);
        fitting.max_by_key(|listener| listener.fits(to))?.backlog.upgrade()
    }
}

fn over(how: StreamEnd) -> Option<Over> {
    match how {
        StreamEnd::Closed => None,
        StreamEnd::Reset => Some(Over::Refused),
        StreamEnd::Failed(Failure::Incompatible) => Some(Over::Unanswered),
        StreamEnd::Failed(Failure::Silent) => Some(Over::Silent),
        StreamEnd::Failed(_) => Some(Over::Broken),
    }
}
