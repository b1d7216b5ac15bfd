//! The one thread of the library: it makes connections and ends them. Data never passes it.

#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketAddr, sockopt};
use uwarp_abi_types::rdmacm::*;
use uwarp_process::{Condvar, Mutex, PerProcess, begin_anew};
use uwarp_rsocket::poll::{PollFd, bit};
use uwarp_rsocket::stream::verbs::Needs;
use uwarp_rsocket::upgrade::Role;
use uwarp_rsocket::wire::ConnData;

use crate::agree::{Greeting, READY};
use crate::calls::kernel_poll;
use crate::foreign::{Foreign, last};
use crate::provider::{Limits, Parts, Provider};
use crate::socket::{Socket, VerbsStream, link_up, raw};
use crate::table;
use crate::waiting::{new_wakeup, readable, take_wakeup};

/// Longest time that a closed socket goes on in the background until the peer has taken what was sent.
const LINGER: Duration = Duration::from_secs(60);
/// The same at the end of the process.
const LAST_LINGER: Duration = Duration::from_secs(3);
/// The pauses between looks whether that is so.
const LOOK: Duration = Duration::from_millis(5);
/// Between the last message of a stream and the end of its connection. siw loses data that arrives in the
/// same segment as the end (conformance/siw/README.md, trap 13), and tells nobody what TCP has sent.
const LAST_SEGMENT: Duration = Duration::from_millis(50);
/// So long may the end of the program's connection be behind that of the other one, if they have one cause.
const VERDICT: Duration = Duration::from_secs(1);
/// Ports that are tried.
const ATTEMPTS: u32 = 32;
/// For each step of rdma_cm's resolution.
const RESOLVE_MS: c_int = 5000;

/// The process has the thread.
static STARTED: AtomicBool = AtomicBool::new(false);
/// A child of fork(2): the thread, and the device, are its parent's.
static FORKED: AtomicBool = AtomicBool::new(false);

/// When the library is loaded: a child may be forked while another thread makes the first call.
#[used]
#[unsafe(link_section = ".init_array")]
static FIRST: extern "C" fn() = handle_forks;

extern "C" fn handle_forks() {
    // SAFETY: a function of this library, which is never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}

/// Whether this process is a forked child of one that has the thread.
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

extern "C" fn in_child() {
    // What another thread of the parent was about to start, this process starts for itself.
    begin_anew();
    if STARTED.load(Ordering::Relaxed) {
        FORKED.store(true, Ordering::Relaxed);
    }
}

/// An id of rdma_cm, by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Id(*mut rdma_cm_id);

// SAFETY: the library's ids may be used by any thread.
unsafe impl Send for Id {}

/// What other threads ask of the thread.
#[derive(Default)]
struct Inbox {
    new: Vec<Job>,
    ending: Vec<Arc<VerbsStream>>,
    pushed: Vec<Weak<VerbsStream>>,
    graves: Vec<Parts>,
}

/// The thread, as others see it.
pub struct Engine {
    foreign: &'static Foreign,
    channel: *mut rdma_event_channel,
    wakeup: OwnedFd,
    inbox: Mutex<Inbox, 29>,
    /// Streams that have not ended yet.
    unfinished: Mutex<usize, 29>,
    finished: Condvar,
}

// SAFETY: the event channel may be used by any thread.
unsafe impl Send for Engine {}
// SAFETY: as above.
unsafe impl Sync for Engine {}

impl Engine {
    /// The process's. The first call starts the thread.
    pub fn of_process() -> Result<&'static Self, Errno> {
        static ENGINE: PerProcess<Mutex<Option<&'static Engine>, 1>> = PerProcess::new(Mutex::default);
        if forked() {
            return Err(Errno::NODEV);
        }
        let mut engine = ENGINE.lock();
        match *engine {
            Some(engine) => Ok(engine),
            // What is missing, descriptors or the kernel's module, may be there for the next call.
            None => Self::start().map(|started| *engine.insert(started)),
        }
    }

    fn start() -> Result<&'static Self, Errno> {
        let foreign = Foreign::get()?;
        // For program's buffers that are not mapped.
        uwarp_mem::guard::arm();
        // SAFETY: no arguments.
        let channel = unsafe { (foreign.rdma_create_event_channel)() };
        if channel.is_null() {
            return Err(match last() {
                errno @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM) => errno,
                // No device is there, or the kernel's part is not loaded.
                _ => Errno::NODEV,
            });
        }
        // SAFETY: the channel lives as long as the process.
        rustix::io::ioctl_fionbio(unsafe { BorrowedFd::borrow_raw((*channel).fd) }, true)?;
        let engine: &'static Self = Box::leak(Box::new(Self {
            foreign,
            channel,
            wakeup: new_wakeup()?,
            inbox: Mutex::default(),
            unfinished: Mutex::new(0),
            finished: Condvar::new(),
        }));
        // The program's handlers run in its own threads.
        // SAFETY: sets that are filled in before they are used; a handler that is a function of this library,
        // which is never unloaded: it has a thread.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            let thread = std::thread::Builder::new().name("uwarp-sockets".to_owned());
            let started = thread.spawn(move || Thread::new(engine).run());
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, null_mut());
            started.map_err(|_| Errno::AGAIN)?;
        }
        STARTED.store(true, Ordering::Relaxed);
        Ok(engine)
    }

    pub fn foreign(&self) -> &'static Foreign {
        self.foreign
    }

    fn tell(&self, what: impl FnOnce(&mut Inbox)) {
        what(&mut self.inbox.lock());
        let _ = rustix::io::write(&self.wakeup, &1u64.to_ne_bytes());
    }

    /// Begins set-up. After an error nothing was sent.
    ///
    /// | errno | |
    /// |---|---|
    /// | `NODEV` | the connection's address is none of a device's |
    pub fn set_up(&'static self, socket: &Arc<Socket>) -> Result<(), Errno> {
        let id = self.id_at(rustix::net::getsockname(socket.connection())?)?;
        let _ = sockopt::set_tcp_nodelay(socket.connection(), true);
        // SAFETY: a descriptor, and a value of the option's type.
        unsafe {
            let one: c_int = 1;
            let (level, name) = (libc::SOL_SOCKET, libc::SO_RCVLOWAT);
            let value = (&raw const one).cast();
            libc::setsockopt(raw(socket), level, name, value, size_of::<c_int>() as libc::socklen_t);
        }
        // Once a device is open: handlers at the end of the process run in reverse order.
        static AT_EXIT: AtomicBool = AtomicBool::new(false);
        if !AT_EXIT.swap(true, Ordering::Relaxed) {
            // SAFETY: a function of this library, which is never unloaded.
            unsafe { libc::atexit(at_exit) };
        }
        let until = Instant::now().checked_add(socket.mode.limit);
        let mut job = Job {
            socket: Arc::clone(socket),
            id: Some(id),
            connected: id,
            until: until.unwrap_or_else(|| Instant::now() + LINGER),
            out: Vec::new(),
            got: Vec::new(),
            peer: None,
            stream: None,
            peer_conn: None,
            established: false,
            ready: false,
            attempts: 0,
            gone: false,
        };
        if socket.role() == Role::Initiator {
            job.out = job.greeting(0);
        }
        self.tell(|inbox| inbox.new.push(job));
        Ok(())
    }

    /// A new id, bound to this address and any port.
    fn id_at(&self, address: rustix::net::SocketAddrAny) -> Result<Id, Errno> {
        let mut id = null_mut();
        let mut address = c_address(SocketAddr::try_from(address).map_err(|_| Errno::AFNOSUPPORT)?, 0);
        // SAFETY: a place for the id; an address that is alive.
        unsafe {
            if (self.foreign.rdma_create_id)(self.channel, &raw mut id, null_mut(), RDMA_PS_TCP) != 0 {
                return Err(last());
            }
            if (self.foreign.rdma_bind_addr)(id, (&raw mut address).cast()) != 0 {
                let error = last();
                (self.foreign.rdma_destroy_id)(id);
                return Err(if error == Errno::ADDRNOTAVAIL { Errno::NODEV } else { error });
            }
        }
        Ok(Id(id))
    }

    /// Ends a stream whose socket is closed, once the peer has what was sent.
    pub fn end(&self, stream: Arc<VerbsStream>) {
        *self.unfinished.lock() += 1;
        self.tell(|inbox| inbox.ending.push(stream));
    }

    /// A socket was closed during set-up: the peer must not wait for it.
    pub fn look_at_set_up(&self) {
        self.tell(|_| ());
    }

    /// Sends what waits in a stream without the program's calls, until nothing does.
    pub fn push_on(&self, stream: &Arc<VerbsStream>) {
        self.tell(|inbox| inbox.pushed.push(Arc::downgrade(stream)));
    }

    /// Destroys what was made of the libraries.
    pub fn bury(&self, parts: Parts) {
        self.tell(|inbox| inbox.graves.push(parts));
    }
}

/// The process ends: what was sent still has to reach the peers.
extern "C" fn at_exit() {
    let done = std::panic::catch_unwind(|| {
        let Ok(engine) = Engine::of_process() else { return };
        for socket in table::all() {
            if socket.begin_close() {
                socket.finish_close(None);
            }
        }
        let until = Instant::now() + LAST_LINGER;
        let mut unfinished = engine.unfinished.lock();
        while *unfinished > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            engine.finished.wait_for(&mut unfinished, left);
        }
    });
    drop(done);
}

/// In C's form, with another port.
fn c_address(address: SocketAddr, port: u16) -> libc::sockaddr_storage {
    // SAFETY: zeros are a value of it.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    match address {
        SocketAddr::V4(address) => {
            let v4 = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: port.to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: it has room for any address.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(v4) };
        }
        SocketAddr::V6(address) => {
            let v6 = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: port.to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            };
            // SAFETY: as above.
            unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(v6) };
        }
    }
    storage
}

/// A socket that is set up.
struct Job {
    socket: Arc<Socket>,
    /// The initiator's id until it has a queue pair, or the responder's that listens.
    id: Option<Id>,
    /// The id of the connection.
    connected: Id,
    until: Instant,
    /// To be sent on the program's connection.
    out: Vec<u8>,
    got: Vec<u8>,
    peer: Option<Greeting>,
    stream: Option<Arc<VerbsStream>>,
    peer_conn: Option<ConnData>,
    established: bool,
    /// The peer has said that the connection is there.
    ready: bool,
    /// Ids that had a port which was not free.
    attempts: u32,
    /// It has ended already.
    gone: bool,
}

/// An event of rdma_cm, in our memory.
struct Event {
    id: Id,
    listener: Id,
    kind: rdma_cm_event_type,
    status: c_int,
    private_data: Vec<u8>,
    /// Reads that the peer answers, and asks for, at a time.
    depths: (u8, u8),
}

impl Job {
    fn greeting(&self, port: u16) -> Vec<u8> {
        let (role, nonce) = (self.socket.role(), self.socket.nonce);
        let private_data = self.socket.mode.private_data.clone();
        Greeting { role, port, nonce, private_data }.to_bytes()
    }

    /// Does what can be done on the program's connection. `Ok(true)`: set-up is complete.
    fn step(&mut self, engine: &'static Engine) -> Result<bool, Errno> {
        if self.socket.is_closed() {
            return Err(Errno::BADF);
        }
        while !self.out.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(self.socket.connection(), &self.out, flags) {
                Ok(n) => drop(self.out.drain(..n)),
                Err(Errno::AGAIN | Errno::INTR) => break,
                Err(Errno::PIPE) => return Err(Errno::CONNRESET),
                Err(errno) => return Err(errno),
            }
        }
        // Not a look further than the last message: the peer may have used the stream and closed it by now.
        while !self.is_complete() && self.read(engine)? {}
        if self.is_complete() {
            return Ok(true);
        }
        if Instant::now() >= self.until { Err(Errno::TIMEDOUT) } else { Ok(false) }
    }

    fn is_complete(&self) -> bool {
        self.established && self.ready && self.peer.is_some() && self.out.is_empty()
    }

    /// Reads one message, or a part of it. False: no more for now.
    fn read(&mut self, engine: &'static Engine) -> Result<bool, Errno> {
        let missing = match (&self.peer, self.ready) {
            (None, _) => match Greeting::parse(&self.got, self.socket.role())? {
                Err(missing) => missing,
                Ok(peer) => return self.greeted(engine, peer).map(|()| true),
            },
            (Some(_), false) => 1,
            (Some(_), true) => 0,
        };
        let mut bytes = [0; 64];
        let len = missing.clamp(1, bytes.len());
        let flags = if missing == 0 { RecvFlags::PEEK } else { RecvFlags::empty() };
        let got = rustix::net::recv(self.socket.connection(), &mut bytes[..len], flags | RecvFlags::DONTWAIT);
        let got = match got {
            Ok((0, _)) => return Err(Errno::CONNRESET),
            // Nothing may come any more.
            Ok(_) if missing == 0 => return Err(Errno::PROTO),
            Ok((got, _)) => &bytes[..got],
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(errno) => return Err(errno),
        };
        if self.peer.is_none() {
            self.got.extend_from_slice(got);
        } else if got == [READY] {
            self.ready = true;
        } else {
            return Err(Errno::PROTO);
        }
        Ok(true)
    }

    /// The peer has agreed.
    fn greeted(&mut self, engine: &'static Engine, peer: Greeting) -> Result<(), Errno> {
        let port = peer.port;
        self.peer = Some(peer);
        if self.socket.role() == Role::Initiator {
            return self.resolve(engine, port);
        }
        loop {
            let Some(id) = self.id else { return Err(Errno::PROTO) };
            // SAFETY: an id that is bound.
            let listening = unsafe { (engine.foreign.rdma_listen)(id.0, 1) == 0 };
            if !listening {
                self.other_port(engine, last())?;
                continue;
            }
            // SAFETY: as above.
            let port = u16::from_be(unsafe { (engine.foreign.rdma_get_src_port)(id.0) });
            self.out = self.greeting(port);
            return Ok(());
        }
    }

    /// The initiator asks for the way to the responder's port.
    fn resolve(&mut self, engine: &'static Engine, port: u16) -> Result<(), Errno> {
        let Some(id) = self.id else { return Err(Errno::PROTO) };
        let to = rustix::net::getpeername(self.socket.connection())?;
        let to = to.and_then(|to| SocketAddr::try_from(to).ok()).ok_or(Errno::NOTCONN)?;
        let mut to = c_address(to, port);
        // SAFETY: an id that is bound, and an address that is alive.
        let begun =
            unsafe { (engine.foreign.rdma_resolve_addr)(id.0, null_mut(), (&raw mut to).cast(), RESOLVE_MS) };
        if begun == 0 { Ok(()) } else { Err(last()) }
    }

    /// Takes another id, with another port, if that is what was wrong. rdma_cm gives out ports without a look
    /// at TCP's, and siw then finds them in use.
    fn other_port(&mut self, engine: &'static Engine, error: Errno) -> Result<(), Errno> {
        self.attempts += 1;
        if error != Errno::ADDRINUSE || self.attempts > ATTEMPTS {
            return Err(error);
        }
        let new = engine.id_at(rustix::net::getsockname(self.socket.connection())?)?;
        self.connected = new;
        if let Some(old) = self.id.replace(new) {
            // SAFETY: it has no queue pair, and its events are looked for no longer.
            unsafe { (engine.foreign.rdma_destroy_id)(old.0) };
        }
        Ok(())
    }

    /// Makes the queue pair of an id.
    fn make_stream(&mut self, engine: &'static Engine, id: Id) -> Result<(Arc<VerbsStream>, Limits), Errno> {
        // SAFETY: an id with a device, which is this function's.
        let limits = unsafe {
            let destroy = || (engine.foreign.rdma_destroy_id)(id.0);
            Limits::of(engine.foreign, (*id.0).verbs).inspect_err(|_| _ = destroy())?
        };
        let sizes = limits.sizes();
        self.connected = id;
        let waiters = &self.socket.waiters;
        let provider = Provider::new(engine, id.0, Needs::of(&sizes, true), limits, waiters)?;
        let stream = VerbsStream::over(provider, sizes, true)?;
        self.stream = Some(Arc::clone(&stream));
        Ok((stream, limits))
    }

    /// Our end of the connection, with what the peer can do.
    fn param(private_data: &[u8], limits: Limits, peer: Option<(u8, u8)>) -> rdma_conn_param {
        let (asks, answers) = peer.unwrap_or((u8::MAX, u8::MAX));
        rdma_conn_param {
            private_data: private_data.as_ptr().cast(),
            private_data_len: private_data.len() as u8,
            responder_resources: limits.answers.min(asks),
            initiator_depth: limits.reads.min(answers),
            flow_control: 1,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: 0,
            qp_num: 0,
        }
    }

    /// A request has come to the responder. The id is the stream's, or destroyed.
    fn requested(&mut self, engine: &'static Engine, event: &Event) -> Result<(), Errno> {
        let foreign = engine.foreign;
        let conn = ConnData::parse(&event.private_data);
        let nonce = event.private_data.get(ConnData::LEN..ConnData::LEN + self.socket.nonce.len());
        if conn.is_none() || nonce != Some(&self.socket.nonce[..]) || self.stream.is_some() {
            // A stranger's: the peer's may still come.
            // SAFETY: a request that is not answered yet.
            unsafe {
                (foreign.rdma_reject)(event.id.0, std::ptr::null(), 0);
                (foreign.rdma_destroy_id)(event.id.0);
            }
            return Ok(());
        }
        self.peer_conn = conn;
        let (stream, limits) = self.make_stream(engine, event.id)?;
        let private_data = stream.conn_data();
        let mut param = Self::param(&private_data, limits, Some(event.depths));
        // SAFETY: an id with a queue pair; the data are alive.
        if unsafe { (foreign.rdma_accept)(event.id.0, &raw mut param) } != 0 { Err(last()) } else { Ok(()) }
    }

    /// The initiator knows the way.
    fn connect(&mut self, engine: &'static Engine) -> Result<(), Errno> {
        let (Some(id), Some(peer)) = (self.id.take(), &self.peer) else { return Err(Errno::PROTO) };
        let (nonce, port) = (peer.nonce, peer.port);
        let (stream, limits) = self.make_stream(engine, id)?;
        let private_data = [&stream.conn_data()[..], &nonce].concat();
        let mut param = Self::param(&private_data, limits, None);
        // SAFETY: as in `requested`.
        if unsafe { (engine.foreign.rdma_connect)(id.0, &raw mut param) } == 0 {
            return Ok(());
        }
        let error = last();
        self.stream = None;
        self.other_port(engine, error)?;
        self.resolve(engine, port)
    }

    fn event(&mut self, engine: &'static Engine, event: &Event) -> Result<(), Errno> {
        match event.kind {
            RDMA_CM_EVENT_CONNECT_REQUEST => self.requested(engine, event),
            RDMA_CM_EVENT_ADDR_RESOLVED => {
                // SAFETY: an id whose address is known.
                match unsafe { (engine.foreign.rdma_resolve_route)(event.id.0, RESOLVE_MS) } {
                    0 => Ok(()),
                    _ => Err(last()),
                }
            }
            RDMA_CM_EVENT_ROUTE_RESOLVED => self.connect(engine),
            RDMA_CM_EVENT_ESTABLISHED => {
                self.established = true;
                if self.socket.role() == Role::Initiator {
                    self.peer_conn = ConnData::parse(&event.private_data);
                }
                self.out.push(READY);
                if self.peer_conn.is_some() { Ok(()) } else { Err(Errno::PROTO) }
            }
            RDMA_CM_EVENT_ADDR_ERROR | RDMA_CM_EVENT_ROUTE_ERROR => Err(of_status(event, Errno::HOSTUNREACH)),
            RDMA_CM_EVENT_UNREACHABLE => Err(of_status(event, Errno::TIMEDOUT)),
            RDMA_CM_EVENT_CONNECT_ERROR => Err(of_status(event, Errno::CONNREFUSED)),
            RDMA_CM_EVENT_REJECTED => Err(Errno::CONNREFUSED),
            RDMA_CM_EVENT_DISCONNECTED if self.established => {
                self.gone = true;
                Ok(())
            }
            RDMA_CM_EVENT_DISCONNECTED => Err(Errno::CONNRESET),
            RDMA_CM_EVENT_DEVICE_REMOVAL => Err(Errno::NODEV),
            _ => Ok(()),
        }
    }
}

fn of_status(event: &Event, otherwise: Errno) -> Errno {
    if event.status < 0 { Errno::from_raw_os_error(-event.status) } else { otherwise }
}

/// A stream whose socket is closed.
struct Ending {
    stream: Arc<VerbsStream>,
    until: Instant,
    /// Since when nothing has to be sent any more.
    drained: Option<Instant>,
}

/// A stream whose connection has ended, until it is known why.
struct Verdict {
    socket: Weak<Socket>,
    until: Instant,
}

/// What only the thread uses.
struct Thread {
    engine: &'static Engine,
    jobs: Vec<Job>,
    /// Sockets by the ids of their connections.
    up: HashMap<Id, Weak<Socket>>,
    verdicts: Vec<Verdict>,
    endings: Vec<Ending>,
    pushed: Vec<Weak<VerbsStream>>,
    graves: Vec<Parts>,
}

impl Thread {
    fn new(engine: &'static Engine) -> Self {
        Self {
            engine,
            jobs: Vec::new(),
            up: HashMap::new(),
            verdicts: Vec::new(),
            endings: Vec::new(),
            pushed: Vec::new(),
            graves: Vec::new(),
        }
    }

    fn run(mut self) {
        loop {
            let Inbox { new, ending, pushed, graves } = std::mem::take(&mut *self.engine.inbox.lock());
            self.jobs.extend(new);
            let until = Instant::now() + LINGER;
            self.endings.extend(ending.into_iter().map(|stream| Ending { stream, until, drained: None }));
            self.pushed.extend(pushed);
            self.take_events();
            self.set_up();
            self.judge();
            self.end();
            self.dig(graves);
            self.sleep();
        }
    }

    fn sleep(&self) {
        let mut fds = vec![readable(self.engine.wakeup.as_raw_fd())];
        // SAFETY: the channel lives as long as the process.
        fds.push(readable(unsafe { (*self.engine.channel).fd }));
        fds.extend(self.jobs.iter().map(|job| {
            let writable = if job.out.is_empty() { 0 } else { bit::OUT };
            PollFd { fd: raw(&job.socket), events: bit::IN | writable, revents: 0 }
        }));
        let now = Instant::now();
        let mut until = self.jobs.iter().map(|job| job.until).min();
        if !(self.verdicts.is_empty() && self.endings.is_empty() && self.pushed.is_empty()) {
            until = Some(until.map_or(now + LOOK, |until| until.min(now + LOOK)));
        }
        let _ = kernel_poll(&mut fds, until.map(|until| until.saturating_duration_since(now)));
        take_wakeup(&self.engine.wakeup);
    }

    /// Takes the events of rdma_cm.
    fn take_events(&mut self) {
        let foreign = self.engine.foreign;
        loop {
            let mut event = null_mut();
            // SAFETY: the channel lives as long as the process, and does not block. An event is copied before
            // it is acknowledged; its data are of a request or an answer to one.
            let event = unsafe {
                if (foreign.rdma_get_cm_event)(self.engine.channel, &raw mut event) != 0 {
                    return;
                }
                let e = &*event;
                let with_data = [RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_CM_EVENT_ESTABLISHED].contains(&e.event);
                let conn = e.param.conn;
                let len = if with_data && !conn.private_data.is_null() { conn.private_data_len } else { 0 };
                let mut private_data = vec![0u8; len.into()];
                let from = conn.private_data.cast::<u8>();
                std::ptr::copy_nonoverlapping(
                    if len > 0 { from } else { private_data.as_ptr() },
                    private_data.as_mut_ptr(),
                    len.into(),
                );
                let copy = Event {
                    id: Id(e.id),
                    listener: Id(e.listen_id),
                    kind: e.event,
                    status: e.status,
                    private_data,
                    depths: (conn.responder_resources, conn.initiator_depth),
                };
                (foreign.rdma_ack_cm_event)(event);
                copy
            };
            self.event(&event);
        }
    }

    fn event(&mut self, event: &Event) {
        let request = event.kind == RDMA_CM_EVENT_CONNECT_REQUEST;
        let of = if request { event.listener } else { event.id };
        let job =
            self.jobs.iter_mut().find(|job| if request { job.id == Some(of) } else { job.connected == of });
        if let Some(job) = job {
            if let Err(errno) = job.event(self.engine, event) {
                job.until = Instant::now();
                job.gone = true;
                job.socket.set_failed(errno);
            }
        } else if request {
            // Of a listener that is gone.
            // SAFETY: a request that is not answered yet.
            unsafe { (self.engine.foreign.rdma_destroy_id)(event.id.0) };
        } else if [RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_DEVICE_REMOVAL].contains(&event.kind)
            && let Some(socket) = self.up.remove(&event.id)
        {
            self.verdicts.push(Verdict { socket, until: Instant::now() + VERDICT });
        }
    }

    /// Goes on with set-up.
    fn set_up(&mut self) {
        let mut at = 0;
        while let Some(job) = self.jobs.get_mut(at) {
            let result = match job.socket.stream() {
                // Said already, by an event.
                Err(Errno::NOTCONN | Errno::BADF) => Err(Errno::NOTCONN),
                _ => job.step(self.engine),
            };
            if result == Ok(false) {
                at += 1;
                continue;
            }
            let job = self.jobs.swap_remove(at);
            if let Some(id) = job.id {
                // SAFETY: the listener's, or an initiator's without a queue pair.
                unsafe { (self.engine.foreign.rdma_destroy_id)(id.0) };
            }
            match (result, &job.stream, &job.peer, job.peer_conn) {
                (Ok(_), Some(stream), Some(peer), Some(conn)) => {
                    link_up(stream, conn);
                    job.socket.set_up(stream, &peer.private_data);
                    let socket = Arc::downgrade(&job.socket);
                    if job.gone {
                        self.verdicts.push(Verdict { socket, until: Instant::now() + VERDICT });
                    } else {
                        self.up.insert(job.connected, socket);
                    }
                }
                (Err(Errno::NOTCONN), ..) => {}
                (result, ..) => job.socket.set_failed(result.err().unwrap_or(Errno::PROTO)),
            }
        }
    }

    /// Asks the program's connections why streams have ended.
    fn judge(&mut self) {
        let now = Instant::now();
        self.verdicts.retain(|verdict| {
            let Some(socket) = verdict.socket.upgrade() else { return false };
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            let error = match rustix::net::recv(socket.connection(), &mut [0u8; 1], flags) {
                // The peer's program is gone, or has closed.
                Ok((0, _)) => None,
                Err(Errno::AGAIN | Errno::INTR) if now < verdict.until && !socket.is_closed() => return true,
                // The peer lives, and did not end the stream: the protocol was broken.
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Some(Errno::PROTO),
                Err(errno) => Some(errno),
            };
            socket.set_gone(error);
            false
        });
    }

    /// Goes on with what is sent without calls.
    fn end(&mut self) {
        let now = Instant::now();
        self.pushed.retain(|stream| stream.upgrade().is_some_and(|stream| !stream.is_drained_meanwhile()));
        let before = self.endings.len();
        self.endings.retain_mut(|ending| {
            if ending.drained.is_none() && ending.stream.is_drained_meanwhile() {
                ending.drained = Some(now);
            }
            let over = ending.drained.is_some_and(|since| now >= since + LAST_SEGMENT);
            !over && now < ending.until
        });
        let ended = before - self.endings.len();
        if ended > 0 {
            *self.engine.unfinished.lock() -= ended;
            self.engine.finished.notify_all();
        }
    }

    /// Destroys what is not used any more.
    fn dig(&mut self, graves: Vec<Parts>) {
        self.graves.extend(graves);
        let foreign = self.engine.foreign;
        for parts in std::mem::take(&mut self.graves) {
            self.up.remove(&Id(parts.id()));
            self.graves.extend(parts.destroy(foreign));
        }
    }
}
