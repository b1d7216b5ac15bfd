//! A connected TCP socket of the kernel, upgraded in place: its connection becomes an iWARP stream, and its
//! bytes travel as an rsocket's do (docs/rsockets.md). The descriptor stays the program's.
//!
//! Both ends must have agreed, and each must have read all that the other one sent before. How they agree is
//! theirs to decide; [`Terms::role`] must differ.
//!
//! ```
//! use std::net::{TcpListener, TcpStream};
//! use std::os::fd::AsFd as _;
//! use std::time::Duration;
//! use uwarp_rsocket::upgrade::{Patience, Role, Terms, Upgraded};
//! use uwarp_rsocket::{Errno, socket::{Flags, How}};
//!
//! let listener = TcpListener::bind("127.0.0.1:0")?;
//! let client = TcpStream::connect(listener.local_addr()?)?;
//! let (server, _) = listener.accept()?;
//!
//! // Begins set-up and returns; neither end waits for the other one.
//! let terms = |role| Terms { private_data: b"mine", ..Terms::new(role) };
//! let client = Upgraded::begin(client.as_fd(), &terms(Role::Initiator))?;
//! let server = Upgraded::begin(server.as_fd(), &terms(Role::Responder))?;
//! client.wait_until_up(|| Patience::Unlimited)?;
//! server.wait_until_up(|| Patience::Limit(Duration::from_secs(60)))?;
//! assert_eq!(server.peer_data(), b"mine");
//!
//! // As read(2) and write(2). The last argument is asked when a call would wait: O_NONBLOCK, SO_RCVTIMEO.
//! # let bytes = *b"hello";
//! # let mut buffer = [0u8; 16];
//! # let of = |addr: usize, len| uwarp_rsocket::MemSeg { addr: addr as u64, len };
//! # let ours = of(bytes.as_ptr().expose_provenance(), bytes.len());
//! # let theirs = of(buffer.as_mut_ptr().expose_provenance(), buffer.len());
//! assert_eq!(client.send(&[ours], Flags::default(), || Patience::Unlimited), Ok(5));
//! assert_eq!(server.receive(&[theirs], Flags::default(), || Patience::Unlimited), Ok(5));
//! assert_eq!(server.receive(&[theirs], Flags::default(), || Patience::None), Err(Errno::AGAIN));
//!
//! // As shutdown(2), and then close(2) without SO_LINGER: it does not wait.
//! client.shutdown(How::Writing)?;
//! assert_eq!(server.receive(&[theirs], Flags::default(), || Patience::Unlimited), Ok(0));
//! assert!(server.readiness().peer_done);
//! client.close(None);
//! server.close(None);
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! poll(2) of the kernel knows nothing of what has arrived: the library reads the socket.
//! [`crate::poll::poll`] does, for descriptors that were entered into [`crate::table`], together with any
//! others.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_cm::{AdoptObserver, Adoption, Cm};
use uwarp_driver::{Engine, Nic, Qp, Readiness, Source, Token};
use uwarp_mem::MemSeg;
use uwarp_process::Mutex;
use uwarp_rnic::{Pd, Sge};

pub use uwarp_cm::Role;

use crate::machine::Sizes;
use crate::options::Options;
use crate::socket::{Flags, How};
use crate::stream::descriptors::{Completion, Op, OwnWork};
use crate::stream::{Link, Ready, Stream};
use crate::waiting::{Sleep, Waiters, Waiting};
use crate::wire::ConnData;

/// Most bytes of private data of the program: what MPA's frames have beside everything that the library puts
/// into them.
pub const MAX_PRIVATE_DATA: usize = uwarp_cm::adopt::MAX_PRIVATE_DATA - ConnData::LEN;
/// How long set-up may take by default. Both ends have agreed, so it is a round trip; a program may be busy.
pub const SETUP_LIMIT: Duration = Duration::from_secs(30);
/// Longest time that a closed socket goes on in the background until the peer has taken what was sent. A peer
/// that is gone is noticed earlier.
const LINGER: Duration = Duration::from_secs(60);
/// The pauses between looks whether that is so.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LAST_LOOK: Duration = Duration::from_millis(50);

/// How a socket is upgraded.
#[derive(Debug, Clone, Copy)]
pub struct Terms<'a> {
    /// Which end sends the first byte.
    pub role: Role,
    /// For the peer, at most [`MAX_PRIVATE_DATA`].
    pub private_data: &'a [u8],
    /// For all of set-up.
    pub limit: Duration,
    /// Sizes of buffers and queues.
    pub options: Options,
}

impl Terms<'_> {
    /// Without private data, with defaults.
    pub fn new(role: Role) -> Self {
        Self { role, private_data: &[], limit: SETUP_LIMIT, options: Options::new() }
    }
}

/// How long a call may wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// Not at all: the socket is non-blocking.
    None,
    /// At most so long.
    Limit(Duration),
    /// As long as it takes.
    Unlimited,
}

/// An upgraded socket.
pub struct Upgraded {
    nic: Arc<Nic>,
    role: Role,
    /// Which socket it is, by its file system and number: no other file has both while the socket is open.
    inode: (u64, u64),
    stream: Arc<Stream>,
    waiters: Arc<Waiters>,
    adoption: Mutex<Option<Arc<Adoption>>, 24>,
    peer_data: Mutex<Vec<u8>, 24>,
    handle: Mutex<Handle, 29>,
    /// A call has said why there is no stream.
    reported: AtomicBool,
    closed: AtomicBool,
}

/// What the caller has made of a socket's queue pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Handle {
    #[default]
    None,
    Made(usize),
    /// The socket is closed: nothing is made any more.
    Closed,
}

impl Upgraded {
    /// Prepares and starts ([`Self::prepare`], [`Self::start`]).
    pub fn begin(socket: BorrowedFd<'_>, terms: &Terms<'_>) -> Result<Arc<Self>, Errno> {
        let upgraded = Self::prepare(socket, terms)?;
        upgraded.start(socket, terms)?;
        Ok(upgraded)
    }

    /// Makes what a connected TCP socket needs to be upgraded, and leaves the socket as it is. The caller
    /// can make the result known to other threads, which then wait in their calls, before [`Self::start`].
    ///
    /// | errno | |
    /// |---|---|
    /// | `BADF` | no descriptor |
    /// | `NOTSOCK`, `OPNOTSUPP` | not a TCP socket, so that none of this library's is replaced by it |
    /// | `INVAL` | too much private data |
    /// | `NODEV` | a forked child: the device is its parent's |
    /// | `NOMEM`, `MFILE` | no memory, no descriptor |
    pub fn prepare(socket: BorrowedFd<'_>, terms: &Terms<'_>) -> Result<Arc<Self>, Errno> {
        let cm = Cm::of_process().map_err(|error| Errno::from_raw_os_error(error.errno()))?;
        Self::prepare_for(&cm, socket, terms, Arc::default())
    }

    /// The same; `waiters`: who waits for it, possibly already.
    pub(crate) fn prepare_for(
        cm: &Arc<Cm>,
        socket: BorrowedFd<'_>,
        terms: &Terms<'_>,
        waiters: Arc<Waiters>,
    ) -> Result<Arc<Self>, Errno> {
        if terms.private_data.len() > MAX_PRIVATE_DATA {
            return Err(Errno::INVAL);
        }
        Adoption::check_type(socket)?;
        let inode = inode_of(socket)?;
        let sizes: Sizes = terms.options.sizes(cm.nic().limits().max_qp_wr);
        let stream = Stream::with(cm, sizes, &waiters, true)?;
        Ok(Arc::new(Self {
            nic: Arc::clone(cm.nic()),
            role: terms.role,
            inode,
            waiters,
            stream,
            adoption: Mutex::default(),
            peer_data: Mutex::default(),
            handle: Mutex::default(),
            reported: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }))
    }

    /// Begins set-up, once, on the socket and with the terms that it was prepared for. Does not wait. After
    /// an error there is no stream and calls that wait for one return it; nothing was sent or received on the
    /// socket, but `TCP_NODELAY` and `SO_RCVLOWAT` may have been set.
    ///
    /// | errno | |
    /// |---|---|
    /// | `NOTCONN` | not connected |
    /// | `NOMEM`, `MFILE` | no memory, no descriptor |
    /// | `BADF` | another thread has closed it meanwhile ([`Self::close`]) |
    pub fn start(self: &Arc<Self>, socket: BorrowedFd<'_>, terms: &Terms<'_>) -> Result<(), Errno> {
        self.start_with(second(socket), terms)
    }

    /// The same, with a second descriptor of the socket ([`second`]) or the error of making one.
    pub(crate) fn start_with(
        self: &Arc<Self>,
        socket: Result<OwnedFd, Errno>,
        terms: &Terms<'_>,
    ) -> Result<(), Errno> {
        let result = socket.and_then(|socket| self.adopt(socket, terms));
        if let Err(errno) = result {
            self.stream.set_link(Link::Failed(errno));
        }
        result
    }

    fn adopt(self: &Arc<Self>, socket: OwnedFd, terms: &Terms<'_>) -> Result<(), Errno> {
        let cm = &Cm::of_process().map_err(|error| Errno::from_raw_os_error(error.errno()))?;
        let mut private_data = self.stream.conn_data().to_vec();
        private_data.extend_from_slice(terms.private_data);
        let observer: Weak<Self> = Arc::downgrade(self);
        let qp = self.stream.qp();
        let said = uwarp_cm::Terms {
            role: self.role,
            private_data: &private_data,
            expects: is_of_a_socket,
            limit: terms.limit,
        };
        let adoption = Adoption::start(cm, socket, &said, qp, observer)?;
        *self.adoption.lock() = Some(adoption);
        // A close before that has not found it.
        if self.closed.load(Ordering::SeqCst) {
            let adoption = self.adoption.lock().take();
            if let Some(adoption) = adoption {
                adoption.cancel();
            }
            return Err(Errno::BADF);
        }
        Ok(())
    }

    /// `Ok(true)`: the stream runs, or has run. `Ok(false)`: set-up goes on. The errors are those of
    /// [`AdoptObserver::failed`].
    pub fn is_up(&self) -> Result<bool, Errno> {
        match self.stream.link() {
            Link::Pending => Ok(false),
            Link::Up(_) | Link::Gone => Ok(true),
            Link::Failed(errno) => Err(errno),
        }
    }

    /// Waits until the stream runs. `AGAIN`: not yet; it is `readiness`'s `writable` that tells when.
    pub fn wait_until_up(&self, patience: impl Fn() -> Patience) -> Result<(), Errno> {
        let mut wait = self.waits(false, patience);
        loop {
            match self.is_up() {
                Ok(true) => {
                    // The whole receive buffer is granted before the program's first call.
                    self.stream.is_connected();
                    return Ok(());
                }
                Ok(false) => wait()?,
                Err(errno) => {
                    self.reported.store(true, Ordering::Relaxed);
                    return Err(errno);
                }
            }
        }
    }

    /// The private data that the peer's program gave. Empty until the stream runs.
    pub fn peer_data(&self) -> Vec<u8> {
        self.peer_data.lock().clone()
    }

    /// The role of this end.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Which socket it is, by its file system and number.
    pub(crate) fn inode(&self) -> (u64, u64) {
        self.inode
    }

    /// The device.
    pub fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }

    /// What waits until the socket has changed, for a call that must not wait if `dont_wait`.
    fn waits<'a>(
        &'a self,
        dont_wait: bool,
        patience: impl Fn() -> Patience + 'a,
    ) -> impl FnMut() -> Result<(), Errno> + 'a {
        let (mut waiting, mut armed): (Option<Waiting>, bool) = (None, false);
        move || {
            if self.closed.load(Ordering::Acquire) {
                return Err(Errno::BADF);
            }
            match &mut waiting {
                None => {
                    let limit = match patience() {
                        _ if dont_wait => return Err(Errno::AGAIN),
                        Patience::None => return Err(Errno::AGAIN),
                        Patience::Limit(limit) => Some(limit),
                        Patience::Unlimited => None,
                    };
                    let mut new = Waiting::begin(&self.nic, Sleep::InChannel, limit)?;
                    new.enter(&self.waiters);
                    self.stream.arm(&new);
                    waiting = Some(new);
                }
                // What has woken the thread is most likely what it waits for. If not, it looks once more.
                Some(waiting) if !armed => self.stream.arm(waiting),
                Some(waiting) if !waiting.sleep()? => return Err(Errno::AGAIN),
                Some(_) => {
                    armed = false;
                    return Ok(());
                }
            }
            armed = true;
            Ok(())
        }
    }

    /// Sends; returns how many bytes were taken. While set-up goes on, it waits for that. Nothing raises
    /// SIGPIPE.
    pub fn send(
        &self,
        buffers: &[MemSeg],
        flags: Flags,
        patience: impl Fn() -> Patience,
    ) -> Result<usize, Errno> {
        self.explained(self.stream.send(buffers, self.waits(flags.dont_wait, patience)))
    }

    /// Receives; 0 at the end of the stream. While set-up goes on, it waits for that.
    pub fn receive(
        &self,
        buffers: &[MemSeg],
        flags: Flags,
        patience: impl Fn() -> Patience,
    ) -> Result<usize, Errno> {
        let wait = self.waits(flags.dont_wait, patience);
        self.explained(self.stream.receive(buffers, flags.wait_all, flags.peek, wait))
    }

    /// Says once why there is no stream.
    fn explained(&self, result: Result<usize, Errno>) -> Result<usize, Errno> {
        match result {
            // The stream is at its end because the call's own end was closed.
            Ok(0) | Err(_) if self.closed.load(Ordering::Acquire) => Err(Errno::BADF),
            Err(Errno::NOTCONN) => match self.stream.link() {
                Link::Failed(why) if !self.reported.swap(true, Ordering::Relaxed) => Err(why),
                _ => result,
            },
            result => result,
        }
    }

    /// Ends one direction or both. Does not wait: the peer hears of it behind what was sent. `NOTCONN`: there
    /// is no stream, or both ends have ended it.
    pub fn shutdown(&self, how: How) -> Result<(), Errno> {
        if self.stream.is_over() {
            return Err(Errno::NOTCONN);
        }
        self.stream.shut(how != How::Writing, how != How::Reading)?;
        if !self.stream.is_drained() {
            Ending::begin(&self.nic, &self.stream);
        }
        Ok(())
    }

    /// Ends the stream. Calls of other threads that wait for it return `EBADF`. `linger`: as `SO_LINGER`; of
    /// no time, what was sent is dropped; with a time, the call waits that long until the peer has it; from
    /// then on, and without a time, that goes on in the background. The program's descriptor is the caller's
    /// to close.
    pub fn close(&self, linger: Option<Duration>) {
        if self.begin_close() {
            self.finish_close(linger);
        }
    }

    /// The first part of [`Self::close`]: from now on calls fail with `EBADF`. False: another call has begun
    /// to close it.
    pub fn begin_close(&self) -> bool {
        !self.closed.swap(true, Ordering::SeqCst)
    }

    /// Ends set-up: afterwards the stream runs already, or never will.
    pub(crate) fn give_up(&self) {
        let adoption = self.adoption.lock().take();
        if let Some(private_data) = adoption.and_then(|adoption| adoption.cancel()) {
            // Once more, if that was reported.
            self.adopted(private_data);
        }
    }

    /// The rest of it.
    pub fn finish_close(&self, linger: Option<Duration>) {
        self.waiters.wake();
        self.give_up();
        if linger == Some(Duration::ZERO) || self.stream.shut(true, true).is_err() {
            return self.stream.qp().destroy();
        }
        if linger.is_some_and(|limit| self.drains_within(limit.min(LINGER))) {
            return self.stream.qp().destroy();
        }
        Closing::begin(&self.nic, &self.stream);
    }

    /// Waits until the peer has what was sent. False: a signal or the limit ended that; as with TCP, nothing
    /// is lost by it.
    fn drains_within(&self, limit: Duration) -> bool {
        let Ok(mut waiting) = Waiting::begin(&self.nic, Sleep::InChannel, Some(limit)) else { return false };
        waiting.enter(&self.waiters);
        loop {
            self.stream.arm(&waiting);
            if self.stream.is_drained() {
                return true;
            }
            if matches!(waiting.sleep(), Ok(false) | Err(_)) {
                return false;
            }
        }
    }

    /// Posts a descriptor; see [`Stream::post_descriptor`]. `AGAIN` while set-up goes on, too.
    pub fn post(&self, id: u64, op: Op, pieces: &[Sge]) -> Result<(), Errno> {
        self.stream.post_descriptor(id, op, pieces)
    }

    /// Takes completions, oldest first, until `take` returns false for one, which stays.
    pub fn take_done(&self, take: impl FnMut(Completion) -> bool) {
        self.stream.take_done(take);
    }

    /// Its queue pair, for the rest of the verbs. The program may post work requests of its own for sending,
    /// as far as [`Self::own_work`] allows; their completions come from [`Self::take_done`].
    pub fn qp(&self) -> &Arc<Qp> {
        self.stream.qp()
    }

    /// The program's own work requests on the queue pair.
    pub fn own_work(&self) -> &Arc<OwnWork> {
        self.stream.own_work()
    }

    /// What `make` has made of the queue pair, the first time: the caller's, to take back by
    /// [`Self::take_handle`]. What is made while another thread makes one, or after that, is unmade again.
    /// `BADF`: it was taken back. `make` is called without a lock.
    pub fn handle<E: From<Errno>>(
        &self,
        make: impl FnOnce() -> Result<usize, E>,
        unmake: impl FnOnce(usize),
    ) -> Result<usize, E> {
        match *self.handle.lock() {
            Handle::Made(made) => return Ok(made),
            Handle::Closed => return Err(Errno::BADF.into()),
            Handle::None => {}
        }
        let new = make()?;
        let kept = {
            let mut handle = self.handle.lock();
            if *handle == Handle::None {
                *handle = Handle::Made(new);
            }
            *handle
        };
        match kept {
            Handle::Made(made) if made == new => Ok(made),
            Handle::Made(made) => {
                unmake(new);
                Ok(made)
            }
            _ => {
                unmake(new);
                Err(Errno::BADF.into())
            }
        }
    }

    /// Takes back what was made. From then on nothing is made.
    pub fn take_handle(&self) -> Option<usize> {
        match std::mem::replace(&mut *self.handle.lock(), Handle::Closed) {
            Handle::Made(made) => Some(made),
            Handle::None | Handle::Closed => None,
        }
    }

    /// Its stream.
    pub(crate) fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// The protection domain in which memory for descriptors is registered.
    pub fn pd(&self) -> &Arc<Pd> {
        self.stream.pd()
    }

    /// What it is ready for.
    pub fn readiness(&self) -> Ready {
        self.stream.readiness()
    }

    /// Bytes that can be read (`FIONREAD`).
    pub fn unread(&self) -> usize {
        self.stream.unread()
    }

    /// Takes the error that waits (`SO_ERROR`).
    pub fn take_error(&self) -> Option<Errno> {
        match self.stream.link() {
            Link::Failed(errno) => (!self.reported.swap(true, Ordering::Relaxed)).then_some(errno),
            _ => self.stream.take_error(),
        }
    }

    /// Who waits for it.
    pub fn waiters(&self) -> &Arc<Waiters> {
        &self.waiters
    }

    /// Whether no thread waits for it.
    pub fn is_idle(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Prepares to wait for a change.
    pub fn arm(&self, waiting: &Waiting) {
        self.stream.arm(waiting);
    }
}

/// A second descriptor of a socket, for its stream.
pub(crate) fn second(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    rustix::io::fcntl_dupfd_cloexec(socket, 0)
}

fn inode_of(socket: BorrowedFd<'_>) -> Result<(u64, u64), Errno> {
    rustix::fs::fstat(socket).map(|stat| (stat.st_dev, stat.st_ino))
}

impl Drop for Upgraded {
    fn drop(&mut self) {
        self.close(None);
    }
}

/// Whether this is the private data of a socket in IWARP_MODE.
fn is_of_a_socket(private_data: &[u8]) -> bool {
    let speaks = ConnData::parse(private_data).is_some();
    if !speaks {
        tracing::warn!("the peer is an iWARP end, but not one of a socket in IWARP_MODE");
    }
    speaks
}

impl AdoptObserver for Upgraded {
    fn adopted(&self, private_data: Vec<u8>) {
        let link = match ConnData::parse(&private_data) {
            Some(peer) => Link::Up(peer),
            None => Link::Failed(Errno::PROTO),
        };
        *self.peer_data.lock() = private_data.get(ConnData::LEN..).unwrap_or_default().to_vec();
        self.stream.set_link(link);
    }

    fn failed(&self, errno: Errno) {
        self.stream.set_link(Link::Failed(errno));
    }

    fn ended(&self, error: Option<Errno>) {
        self.stream.set_gone(error);
    }
}

/// A stream whose socket is closed, until the peer has what was sent.
struct Closing {
    engine: Arc<Engine>,
    until: Instant,
    state: Mutex<Option<(Token, Arc<Stream>, Duration)>, 29>,
}

impl Closing {
    fn begin(nic: &Arc<Nic>, stream: &Arc<Stream>) {
        let engine = Arc::clone(nic.engine());
        let until = Instant::now() + LINGER;
        let closing = Arc::new(Self { engine, until, state: Mutex::default() });
        let token = closing.engine.new_token(Arc::clone(&closing) as Arc<dyn Source>);
        *closing.state.lock() = Some((token, Arc::clone(stream), FIRST_LOOK));
        closing.look();
    }

    fn look(&self) {
        // Taken out meanwhile: the queue pair may report while it is looked at.
        let Some((token, stream, pause)) = self.state.lock().take() else { return };
        // A thread that is in a call of another stream may have come here, to run the timers.
        if stream.is_drained_meanwhile() || Instant::now() >= self.until {
            self.engine.deregister(token);
            // The stream's own descriptor is closed when the peer has closed, too.
            return stream.qp().destroy();
        }
        *self.state.lock() = Some((token, stream, (pause * 2).min(LAST_LOOK)));
        self.engine.set_timer(token, Some(Instant::now() + pause));
    }
}

/// A stream of which a direction has been ended, until the peer has been told. There may have been no room
/// for that message, and the program need not call again.
struct Ending {
    engine: Arc<Engine>,
    stream: Weak<Stream>,
    state: Mutex<Option<(Token, Duration)>, 29>,
}

impl Ending {
    fn begin(nic: &Arc<Nic>, stream: &Arc<Stream>) {
        let engine = Arc::clone(nic.engine());
        let ending = Arc::new(Self { engine, stream: Arc::downgrade(stream), state: Mutex::default() });
        let token = ending.engine.new_token(Arc::clone(&ending) as Arc<dyn Source>);
        *ending.state.lock() = Some((token, FIRST_LOOK));
        ending.engine.set_timer(token, Some(Instant::now() + FIRST_LOOK));
    }
}

impl Source for Ending {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        let Some((token, pause)) = self.state.lock().take() else { return };
        if self.stream.upgrade().is_none_or(|stream| stream.is_drained_meanwhile()) {
            return self.engine.deregister(token);
        }
        *self.state.lock() = Some((token, (pause * 2).min(LAST_LOOK)));
        self.engine.set_timer(token, Some(Instant::now() + pause));
    }
}

impl Source for Closing {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        self.look();
    }
}
