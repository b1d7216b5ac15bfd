//! Every call on a socket in `IWARP_MODE`.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt;
use smallvec::SmallVec;
use uwarp_driver::Channel;
use uwarp_iwarp_mode::Mode;
use uwarp_process::Mutex;
use uwarp_rnic::Sge;
use uwarp_rsocket::poll::{PollFd, bits};
use uwarp_rsocket::socket::{Flags, How};
use uwarp_rsocket::stream::{Link, Ready, Stream};
use uwarp_rsocket::upgrade::{Patience, Role};
use uwarp_rsocket::{Completion, Kind, MemSeg, Op};

use crate::agree::Nonce;
use crate::calls::kernel_poll;
use crate::engine::Engine;
use crate::provider::Provider;
use crate::table;
use crate::waiting::{Waiters, Waiting, readable};

/// How long a call of poll looks before it sleeps, as in uwarp's own library.
const SPIN: Duration = Duration::from_micros(10);

/// The protocol over a queue pair of the libraries.
pub type VerbsStream = Stream<Provider>;

/// How far set-up is.
#[derive(Clone)]
enum Phase {
    Pending,
    Up(Arc<VerbsStream>),
    Failed(Errno),
}

/// A socket in `IWARP_MODE`.
pub struct Socket {
    /// The program's connection. Its end says why the stream has ended.
    connection: OwnedFd,
    /// Which socket it is, by its file system and number.
    inode: (u64, u64),
    pub mode: Mode,
    pub nonce: Nonce,
    pub waiters: Arc<Waiters>,
    phase: Mutex<Phase, 29>,
    peer_data: Mutex<Vec<u8>, 29>,
    /// A call has said why there is no stream.
    reported: AtomicBool,
    closed: AtomicBool,
}

impl Socket {
    /// Of a connected TCP socket, which stays as it is.
    pub fn prepare(socket: BorrowedFd<'_>, mode: Mode) -> Result<Arc<Self>, Errno> {
        let stat = rustix::fs::fstat(socket)?;
        let tcp = sockopt::socket_type(socket)? == rustix::net::SocketType::STREAM
            && matches!(sockopt::socket_protocol(socket)?, Some(rustix::net::ipproto::TCP));
        if !tcp {
            return Err(Errno::OPNOTSUPP);
        }
        rustix::net::getpeername(socket)?;
        let mut nonce = Nonce::default();
        getrandom::fill(&mut nonce).map_err(|_| Errno::IO)?;
        Ok(Arc::new(Self {
            connection: rustix::io::fcntl_dupfd_cloexec(socket, 64)
                .or_else(|_| rustix::io::fcntl_dupfd_cloexec(socket, 3))?,
            inode: (stat.st_dev, stat.st_ino),
            mode,
            nonce,
            waiters: Arc::default(),
            phase: Mutex::new(Phase::Pending),
            peer_data: Mutex::default(),
            reported: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }))
    }

    pub fn connection(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    pub fn inode(&self) -> (u64, u64) {
        self.inode
    }

    pub fn role(&self) -> Role {
        self.mode.role
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The stream runs.
    pub fn set_up(&self, stream: &Arc<VerbsStream>, peer_data: &[u8]) {
        // The whole receive buffer is granted before the program's first call.
        stream.is_connected();
        *self.peer_data.lock() = peer_data.to_vec();
        *self.phase.lock() = Phase::Up(Arc::clone(stream));
        self.waiters.wake();
    }

    /// There is no stream; the program's connection is of no use any more.
    pub fn set_failed(&self, why: Errno) {
        *self.phase.lock() = Phase::Failed(why);
        let _ = rustix::net::shutdown(&self.connection, rustix::net::Shutdown::Both);
        self.waiters.wake();
    }

    /// The stream, once it runs. `AGAIN`: not yet.
    pub fn stream(&self) -> Result<Arc<VerbsStream>, Errno> {
        match self.phase.lock().clone() {
            Phase::Pending => Err(Errno::AGAIN),
            Phase::Up(stream) => Ok(stream),
            Phase::Failed(_) if self.is_closed() => Err(Errno::BADF),
            Phase::Failed(_) => Err(Errno::NOTCONN),
        }
    }

    fn failed(&self) -> Option<Errno> {
        match *self.phase.lock() {
            Phase::Failed(why) => Some(why),
            _ => None,
        }
    }

    /// Waits until the stream runs. `AGAIN`: not yet.
    pub fn wait_until_up(&self, patience: impl Fn() -> Patience) -> Result<(), Errno> {
        let mut wait = self.waits(false, patience);
        loop {
            match self.stream() {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN) => wait()?,
                Err(errno) => {
                    self.reported.store(true, Ordering::Relaxed);
                    return Err(self.failed().unwrap_or(errno));
                }
            }
        }
    }

    pub fn peer_data(&self) -> Vec<u8> {
        self.peer_data.lock().clone()
    }

    /// What waits until the socket has changed, for a call that must not wait if `dont_wait`.
    fn waits<'a>(
        &'a self,
        dont_wait: bool,
        patience: impl Fn() -> Patience + 'a,
    ) -> impl FnMut() -> Result<(), Errno> + 'a {
        let mut waiting: Option<Waiting> = None;
        move || {
            if self.is_closed() {
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
                    let mut new = Waiting::begin(limit)?;
                    new.enter(&self.waiters);
                    waiting = Some(new);
                }
                Some(waiting) => {
                    match waiting.sleep(self.channel().into_iter().map(readable)) {
                        Ok(true) => self.take_events(),
                        Ok(false) => return Err(Errno::AGAIN),
                        // All handlers have SA_RESTART.
                        Err(Errno::INTR) if !Channel::interruptible() => {}
                        Err(errno) => return Err(errno),
                    }
                }
            }
            self.arm();
            Ok(())
        }
    }

    fn channel(&self) -> Option<i32> {
        self.stream().ok().map(|stream| stream.verbs().fd())
    }

    fn take_events(&self) {
        if let Ok(stream) = self.stream() {
            stream.verbs().take_events();
        }
    }

    fn arm(&self) {
        if let Ok(stream) = self.stream() {
            stream.verbs().arm();
        }
    }

    /// The stream, for a call that waits for it.
    fn running(&self, wait: &mut impl FnMut() -> Result<(), Errno>) -> Result<Arc<VerbsStream>, Errno> {
        loop {
            match self.stream() {
                Err(Errno::AGAIN) => wait()?,
                other => return other,
            }
        }
    }

    /// Sends; returns how many bytes were taken.
    pub fn send(
        &self,
        buffers: &[MemSeg],
        flags: Flags,
        patience: impl Fn() -> Patience,
    ) -> Result<usize, Errno> {
        let mut wait = self.waits(flags.dont_wait, patience);
        self.explained(self.running(&mut wait).and_then(|stream| stream.send(buffers, wait)))
    }

    /// Receives; 0 at the end of the stream.
    pub fn receive(
        &self,
        buffers: &[MemSeg],
        flags: Flags,
        patience: impl Fn() -> Patience,
    ) -> Result<usize, Errno> {
        let mut wait = self.waits(flags.dont_wait, patience);
        let stream = self.running(&mut wait);
        self.explained(stream.and_then(|stream| stream.receive(buffers, flags.wait_all, flags.peek, wait)))
    }

    /// Says once why there is no stream.
    fn explained(&self, result: Result<usize, Errno>) -> Result<usize, Errno> {
        match (result, self.failed()) {
            // The stream is at its end because the call's own end was closed.
            (Ok(0) | Err(_), _) if self.is_closed() => Err(Errno::BADF),
            (Err(Errno::NOTCONN), Some(why)) if !self.reported.swap(true, Ordering::Relaxed) => Err(why),
            (result, _) => result,
        }
    }

    /// Ends one direction or both. Does not wait. `NOTCONN`: there is no stream, or both ends have ended it.
    pub fn shutdown(&self, how: How) -> Result<(), Errno> {
        let stream = self.stream().map_err(|_| Errno::NOTCONN)?;
        if stream.is_over() {
            return Err(Errno::NOTCONN);
        }
        stream.shut(how != How::Writing, how != How::Reading)?;
        if !stream.is_drained() {
            Engine::of_process()?.push_on(&stream);
        }
        Ok(())
    }

    /// The first part of a close: from now on calls fail with `EBADF`. False: another call has begun it.
    pub fn begin_close(&self) -> bool {
        !self.closed.swap(true, Ordering::SeqCst)
    }

    /// The rest: as `SO_LINGER`, and then in the background.
    pub fn finish_close(&self, linger: Option<Duration>) {
        self.waiters.wake();
        let phase = std::mem::replace(&mut *self.phase.lock(), Phase::Failed(Errno::BADF));
        let Ok(engine) = Engine::of_process() else { return };
        let Phase::Up(stream) = phase else { return engine.look_at_set_up() };
        if linger == Some(Duration::ZERO) || stream.shut(true, true).is_err() {
            return;
        }
        if let Some(limit) = linger {
            self.drain(&stream, limit);
        }
        table::goes_on(self.inode, &stream);
        engine.end(stream);
    }

    /// Waits until the peer has what was sent. A signal or the limit ends that, and loses nothing.
    fn drain(&self, stream: &Arc<VerbsStream>, limit: Duration) {
        let Ok(mut waiting) = Waiting::begin(Some(limit)) else { return };
        waiting.enter(&self.waiters);
        loop {
            stream.verbs().arm();
            if stream.is_drained() {
                return;
            }
            if !matches!(waiting.sleep([readable(stream.verbs().fd())].into_iter()), Ok(true)) {
                return;
            }
            stream.verbs().take_events();
        }
    }

    /// Posts a descriptor.
    pub fn post(&self, id: u64, op: Op, pieces: &[Sge]) -> Result<(), Errno> {
        self.stream()?.post_descriptor(id, op, pieces)
    }

    /// Takes completions, oldest first, until `take` returns false for one, which stays.
    pub fn take_done(&self, mut take: impl FnMut(Completion) -> bool) {
        let Ok(stream) = self.stream() else { return };
        stream.take_done(|done| {
            let taken = take(done);
            // The program posts to the queue pair itself, so its work requests were not counted: they are
            // now, for the stream to give back.
            if taken && done.kind == Kind::WorkRequest {
                stream.own_work().take();
            }
            taken
        });
    }

    /// Takes the error that waits (`SO_ERROR`).
    pub fn take_error(&self) -> Option<Errno> {
        match (self.failed(), self.stream()) {
            (Some(why), _) => (!self.reported.swap(true, Ordering::Relaxed)).then_some(why),
            (None, stream) => stream.ok()?.take_error(),
        }
    }

    /// What it is ready for.
    pub fn readiness(&self) -> Ready {
        match self.stream() {
            Ok(stream) => stream.readiness(),
            Err(Errno::AGAIN) => Ready::default(),
            Err(_) => Ready { readable: true, writable: true, error: true, ..Ready::default() },
        }
    }

    /// The connection of the stream has ended.
    pub fn set_gone(&self, error: Option<Errno>) {
        if let Ok(stream) = self.stream() {
            stream.set_gone(error);
        }
    }
}

impl Drop for Socket {
    /// Its number was given to another file, or set-up was not begun.
    fn drop(&mut self) {
        if self.begin_close() {
            self.finish_close(None);
        }
    }
}

/// Whether the peer's private data were those of a stream is the caller's to know.
pub fn link_up(stream: &VerbsStream, peer: uwarp_rsocket::wire::ConnData) {
    stream.set_link(Link::Up(peer));
}

/// Waits until one of the descriptors is ready, at most for `limit`; returns how many are. Those that are not
/// in `IWARP_MODE` are the kernel's.
pub fn poll(fds: &mut [PollFd], limit: Option<Duration>) -> Result<usize, Errno> {
    let sockets: Sockets = fds.iter().map(|entry| table::find(entry.fd)).collect();
    if sockets.iter().all(Option::is_none) {
        return kernel_poll(fds, limit);
    }
    let begin = Instant::now();
    loop {
        let ready = look(fds, &sockets)?;
        if ready > 0 || limit == Some(Duration::ZERO) {
            return Ok(ready);
        }
        if begin.elapsed() > SPIN {
            break;
        }
    }
    let mut waiting = Waiting::begin(limit)?;
    sockets.iter().flatten().for_each(|socket| waiting.enter(&socket.waiters));
    loop {
        sockets.iter().flatten().for_each(|socket| socket.arm());
        let ready = look(fds, &sockets)?;
        if ready > 0 {
            return Ok(ready);
        }
        let theirs = fds.iter().zip(&sockets).filter(|(_, socket)| socket.is_none()).map(|(entry, _)| *entry);
        let ours = sockets.iter().flatten().filter_map(|socket| socket.channel()).map(readable);
        let woken = waiting.sleep(theirs.chain(ours))?;
        sockets.iter().flatten().for_each(|socket| socket.take_events());
        if !woken {
            return look(fds, &sockets);
        }
    }
}

type Sockets = SmallVec<[Option<Arc<Socket>>; 8]>;

/// What is ready now.
fn look(fds: &mut [PollFd], sockets: &Sockets) -> Result<usize, Errno> {
    let mut foreign = SmallVec::<[PollFd; 8]>::new();
    let mut ready = 0;
    for (entry, socket) in fds.iter_mut().zip(sockets) {
        entry.revents = 0;
        match socket {
            Some(socket) => {
                entry.revents = bits(socket.readiness(), entry.events);
                ready += usize::from(entry.revents != 0);
            }
            None => foreign.push(*entry),
        }
    }
    if foreign.is_empty() {
        return Ok(ready);
    }
    ready += kernel_poll(&mut foreign, Some(Duration::ZERO))?;
    let theirs = fds.iter_mut().zip(sockets).filter(|(_, socket)| socket.is_none());
    for ((entry, _), seen) in theirs.zip(&foreign) {
        entry.revents = seen.revents;
    }
    Ok(ready)
}

/// The connection's raw descriptor, for the engine's poll.
pub fn raw(socket: &Socket) -> i32 {
    socket.connection.as_raw_fd()
}
