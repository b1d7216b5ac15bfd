//! Every call on a socket.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_cm::{CmError, ConnParam, Id, State as IdState};
use uwarp_driver::config::{Config, LinkChoice};
use uwarp_driver::{Descriptor, Nic, Readiness, Source, Token};
use uwarp_llp::route;
use uwarp_mem::MemSeg;
use uwarp_process::Mutex;

use crate::events::Events;
use crate::listener::{Connection, Listener};
use crate::number::Number;
use crate::options::Options;
use crate::stream::{Link, Ready, Stream};
use crate::upgrade::{self, Patience, Role, Terms, Upgraded};
use crate::waiting::{Observer, Sleep, Waiters, Waiting};

/// Longest wait of a close for the peer to take what was sent. A peer that is gone is noticed earlier.
const LINGER: Duration = Duration::from_secs(20);

/// Read depths of a connection. rsockets reads nothing; but an iWARP peer may begin with a Read of nothing,
/// and librdmacm asks for depth 1 there.
const DEPTHS: ConnParam =
    ConnParam { responder_resources: 1, initiator_depth: 1, flow_control: 1, ..ConnParam::DEFAULT };

/// What a call may do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flags {
    /// `MSG_DONTWAIT`.
    pub dont_wait: bool,
    /// `MSG_PEEK`.
    pub peek: bool,
    /// `MSG_WAITALL`.
    pub wait_all: bool,
}

/// Which directions a shutdown ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum How {
    Reading,
    Writing,
    Both,
}

enum Phase {
    /// Neither listens nor connects.
    Idle(Arc<Id>),
    Listening(Arc<Listener>),
    /// Connects, is connected, or was. `reported`: a call has said that the connection is there, or that
    /// there is none.
    Stream {
        id: Arc<Id>,
        stream: Arc<Stream>,
        reported: bool,
    },
    /// Its connection was a TCP socket's. The id is of no more use.
    Upgraded {
        id: Arc<Id>,
        upgraded: Arc<Upgraded>,
    },
    Closed,
}

struct Inner {
    phase: Phase,
    options: Options,
    /// The address that the program has bound.
    bound: Option<SocketAddr>,
    keepalive: Option<(Token, Arc<Keepalive>)>,
    /// For [`Socket::take_over`]: the stream, and a second descriptor of the TCP socket.
    prepared: Option<(Arc<Upgraded>, Descriptor)>,
}

/// A stream socket.
pub struct Socket {
    events: Arc<Events>,
    number: Number,
    v6: bool,
    nonblocking: AtomicBool,
    close_on_exec: AtomicBool,
    waiters: Arc<Waiters>,
    inner: Mutex<Inner, 4>,
}

fn errno(error: CmError) -> Errno {
    Errno::from_raw_os_error(error.errno())
}

impl Socket {
    /// A new socket.
    pub fn new(v6: bool, nonblocking: bool, close_on_exec: bool) -> Result<Arc<Self>, Errno> {
        Self::with_number(v6, nonblocking, close_on_exec, Number::new)
    }

    /// A new socket whose number is no descriptor's; nor are those of connections that it accepts.
    pub fn without_descriptor(v6: bool, nonblocking: bool, close_on_exec: bool) -> Result<Arc<Self>, Errno> {
        Self::with_number(v6, nonblocking, close_on_exec, Number::apart)
    }

    fn with_number(
        v6: bool,
        nonblocking: bool,
        close_on_exec: bool,
        number: fn() -> Result<Number, Errno>,
    ) -> Result<Arc<Self>, Errno> {
        let events = Events::of_process()?;
        let id = events.new_id();
        let number = number()?;
        Ok(Self::with_phase(
            number,
            events,
            v6,
            Phase::Idle(id),
            Arc::default(),
            (nonblocking, close_on_exec),
        ))
    }

    fn with_phase(
        number: Number,
        events: Arc<Events>,
        v6: bool,
        phase: Phase,
        waiters: Arc<Waiters>,
        (nonblocking, close_on_exec): (bool, bool),
    ) -> Arc<Self> {
        Arc::new(Self {
            events,
            number,
            v6,
            nonblocking: AtomicBool::new(nonblocking),
            close_on_exec: AtomicBool::new(close_on_exec),
            waiters,
            inner: Mutex::new(Inner {
                phase,
                options: Options::new(),
                bound: None,
                keepalive: None,
                prepared: None,
            }),
        })
    }

    /// Its number.
    pub fn fd(&self) -> i32 {
        self.number.value()
    }

    /// See [`Number::disown`].
    pub(crate) fn disown_number(&self) {
        self.number.disown();
    }

    /// The device.
    pub fn nic(&self) -> &Arc<Nic> {
        self.events.cm().nic()
    }

    /// `O_NONBLOCK`.
    pub fn nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Sets `O_NONBLOCK`.
    pub fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Ordering::Relaxed);
    }

    /// `FD_CLOEXEC`, as the program set it. A program that begins by exec has no sockets in any case.
    pub fn close_on_exec(&self) -> bool {
        self.close_on_exec.load(Ordering::Relaxed)
    }

    /// Sets `FD_CLOEXEC`.
    pub fn set_close_on_exec(&self, on: bool) {
        self.close_on_exec.store(on, Ordering::Relaxed);
    }

    /// Its options.
    pub fn options(&self) -> Options {
        self.inner.lock().options
    }

    /// Changes options. `early`: only before it connects.
    pub fn set_options(&self, early: bool, change: impl FnOnce(&mut Options)) -> Result<(), Errno> {
        let mut inner = self.inner.lock();
        if early && !matches!(inner.phase, Phase::Idle(_) | Phase::Listening(_)) {
            return Err(Errno::INVAL);
        }
        change(&mut inner.options);
        if let Phase::Listening(listener) = &inner.phase {
            // For connections that come from now on.
            listener.set_sizes(inner.options.sizes(self.nic().limits().max_qp_wr));
        }
        Ok(())
    }

    fn stream(&self) -> Result<Arc<Stream>, Errno> {
        match &self.inner.lock().phase {
            Phase::Stream { stream, .. } => Ok(Arc::clone(stream)),
            Phase::Upgraded { upgraded, .. } => Ok(Arc::clone(upgraded.stream())),
            Phase::Idle(_) | Phase::Listening(_) => Err(Errno::NOTCONN),
            Phase::Closed => Err(Errno::BADF),
        }
    }

    fn listener(&self) -> Result<Arc<Listener>, Errno> {
        match &self.inner.lock().phase {
            Phase::Listening(listener) => Ok(Arc::clone(listener)),
            Phase::Closed => Err(Errno::BADF),
            Phase::Idle(_) | Phase::Stream { .. } | Phase::Upgraded { .. } => Err(Errno::INVAL),
        }
    }

    fn upgraded(&self) -> Option<Arc<Upgraded>> {
        match &self.inner.lock().phase {
            Phase::Upgraded { upgraded, .. } => Some(Arc::clone(upgraded)),
            _ => None,
        }
    }

    /// Makes all that [`Self::take_over`] needs, so that it does not fail for want of memory or descriptors.
    /// As long as that has not been called, the connection is the caller's alone.
    ///
    /// `OPNOTSUPP`: a rule of `UWARP_LINK` requires another link for it, and it is TCP's.
    pub fn prepare_to_take_over(&self, tcp: BorrowedFd<'_>, role: Role) -> Result<(), Errno> {
        if requires_another_link(tcp) {
            return Err(Errno::OPNOTSUPP);
        }
        let mut inner = self.inner.lock();
        let Phase::Idle(_) = &inner.phase else { return Err(Errno::INVAL) };
        let terms = Terms { options: inner.options, ..Terms::new(role) };
        let upgraded = Upgraded::prepare_for(self.events.cm(), tcp, &terms, Arc::clone(&self.waiters))?;
        inner.prepared = Some((upgraded, Descriptor::made(|| upgrade::second(tcp))?));
        Ok(())
    }

    /// [`Self::take_over`] will not follow; or its stream is not wanted any more. From now on nothing reads
    /// the connection, unless the stream runs already ([`Self::has_taken_over`]).
    pub fn give_up_what_was_prepared(&self) {
        let prepared = self.inner.lock().prepared.take();
        drop(prepared);
        if let Some(upgraded) = self.upgraded() {
            upgraded.give_up();
        }
    }

    /// Takes over the connected TCP socket of the kernel that was prepared, whose connection becomes the
    /// stream ([`crate::upgrade`]). Begins, and does not wait; the caller's descriptor stays the caller's.
    pub fn take_over(&self, role: Role) -> Result<(), Errno> {
        let mut inner = self.inner.lock();
        let Phase::Idle(id) = &inner.phase else { return Err(Errno::INVAL) };
        let id = Arc::clone(id);
        let (upgraded, tcp) = inner.prepared.take().ok_or(Errno::INVAL)?;
        let terms = Terms { options: inner.options, ..Terms::new(role) };
        upgraded.start_with(Ok(tcp.take()), &terms)?;
        inner.phase = Phase::Upgraded { id, upgraded };
        Ok(())
    }

    /// Whether the stream of [`Self::take_over`] runs, or has run; an error: why it never will.
    pub fn has_taken_over(&self) -> Result<bool, Errno> {
        self.upgraded().ok_or(Errno::INVAL)?.is_up()
    }

    fn id(&self) -> Result<Arc<Id>, Errno> {
        match &self.inner.lock().phase {
            Phase::Idle(id) | Phase::Stream { id, .. } | Phase::Upgraded { id, .. } => Ok(Arc::clone(id)),
            Phase::Listening(listener) => Ok(Arc::clone(listener.id())),
            Phase::Closed => Err(Errno::BADF),
        }
    }

    /// Binds to a local address.
    pub fn bind(&self, address: SocketAddr) -> Result<(), Errno> {
        if address.is_ipv6() != self.v6 {
            return Err(Errno::AFNOSUPPORT);
        }
        let mut inner = self.inner.lock();
        let Phase::Idle(id) = &inner.phase else { return Err(Errno::INVAL) };
        prepare(id, &inner.options, self.v6)?;
        id.bind(address).map_err(errno).map_err(|errno| match errno {
            // As the kernel's rdma_cm says of a port that is taken. Sockets say it otherwise.
            Errno::ADDRNOTAVAIL if uwarp_cm::is_any(address.ip()) => Errno::ADDRINUSE,
            errno => errno,
        })?;
        inner.bound = id.local_address();
        Ok(())
    }

    /// Listens.
    pub fn listen(&self, backlog: i32) -> Result<(), Errno> {
        let mut inner = self.inner.lock();
        let id = match &inner.phase {
            Phase::Idle(id) => Arc::clone(id),
            // A new backlog has no effect.
            Phase::Listening(_) => return Ok(()),
            Phase::Stream { .. } | Phase::Upgraded { .. } => return Err(Errno::INVAL),
            Phase::Closed => return Err(Errno::BADF),
        };
        prepare(&id, &inner.options, self.v6)?;
        if inner.bound.is_none() && self.v6 {
            id.bind((std::net::Ipv6Addr::UNSPECIFIED, 0).into()).map_err(errno)?;
        }
        let sizes = inner.options.sizes(self.nic().limits().max_qp_wr);
        let listener = Listener::start(&self.events, &id, sizes, backlog, &self.waiters)?;
        inner.phase = Phase::Listening(listener);
        Ok(())
    }

    /// The next connection; waits for it unless the socket is non-blocking. It inherits `O_NONBLOCK` and
    /// options from this one, as librdmacm's do.
    pub fn accept(&self) -> Result<Arc<Self>, Errno> {
        let mut wait = self.waits(false, None);
        loop {
            let listener = self.listener()?;
            if listener.has_connection() {
                // If there is none left, the connection stays in the queue.
                let number = self.number.another()?;
                if let Some(connection) = listener.take() {
                    return Ok(self.accepted(number, connection));
                }
            }
            wait()?;
        }
    }

    fn accepted(&self, number: Number, Connection { id, stream, .. }: Connection) -> Arc<Self> {
        // The whole receive buffer is granted before the program's first call on the connection.
        stream.is_connected();
        let waiters = Arc::clone(stream.waiters());
        let phase = Phase::Stream { id, stream, reported: true };
        let flags = (self.nonblocking(), self.close_on_exec());
        let new = Self::with_phase(number, Arc::clone(&self.events), self.v6, phase, waiters, flags);
        new.inner.lock().options = self.options();
        if self.options().keepalive {
            new.set_keepalive(true);
        }
        new
    }

    /// Connects. If the socket is non-blocking, `EINPROGRESS`.
    pub fn connect(&self, peer: SocketAddr) -> Result<(), Errno> {
        let stream = {
            let mut inner = self.inner.lock();
            match &mut inner.phase {
                Phase::Idle(id) => {
                    let id = Arc::clone(id);
                    self.begin_connect(&mut inner, id, peer)?
                }
                Phase::Stream { id, stream, reported } => match stream.link() {
                    Link::Pending if self.nonblocking() => return Err(Errno::ALREADY),
                    // A signal has ended the call that began it.
                    Link::Pending => Arc::clone(stream),
                    // Also if the peer has gone since.
                    Link::Up(_) | Link::Gone if !std::mem::replace(reported, true) => return Ok(()),
                    Link::Up(_) | Link::Gone => return Err(Errno::ISCONN),
                    Link::Failed(errno) if !std::mem::replace(reported, true) => return Err(errno),
                    Link::Failed(_) => {
                        self.events.destroy(id);
                        let id = self.events.new_id();
                        if let Some(local) = inner.bound {
                            prepare(&id, &inner.options, self.v6)?;
                            id.bind(local).map_err(errno)?;
                        }
                        inner.phase = Phase::Idle(Arc::clone(&id));
                        self.begin_connect(&mut inner, id, peer)?
                    }
                },
                Phase::Listening(_) | Phase::Upgraded { .. } => return Err(Errno::ISCONN),
                Phase::Closed => return Err(Errno::BADF),
            }
        };
        if self.nonblocking() {
            // Also if the connection is there already, or has failed: TCP's sockets are never so fast, and
            // programs know nothing else. The next call says what has become of it.
            return Err(Errno::INPROGRESS);
        }
        let mut wait = self.waits(false, None);
        loop {
            match stream.link() {
                Link::Pending => match wait() {
                    Ok(()) => {}
                    Err(Errno::AGAIN) => return Err(Errno::INPROGRESS),
                    Err(errno) => return Err(errno),
                },
                Link::Up(_) | Link::Gone => {
                    stream.is_connected();
                    self.connect_reported();
                    return Ok(());
                }
                Link::Failed(errno) => {
                    self.connect_reported();
                    return Err(errno);
                }
            }
        }
    }

    fn begin_connect(&self, inner: &mut Inner, id: Arc<Id>, peer: SocketAddr) -> Result<Arc<Stream>, Errno> {
        if peer.is_ipv6() != self.v6 {
            return Err(Errno::AFNOSUPPORT);
        }
        prepare(&id, &inner.options, self.v6)?;
        if id.state() != IdState::AddressResolved {
            id.resolve_address(None, peer).map_err(errno)?;
        }
        if id.state() != IdState::AddressResolved {
            // The reason went out as an event.
            let local = inner.bound.map(|bound| bound.ip());
            return Err(route::source_for(local, peer, false).err().unwrap_or(Errno::HOSTUNREACH));
        }
        id.resolve_route().map_err(errno)?;
        let sizes = inner.options.sizes(self.nic().limits().max_qp_wr);
        let stream = Stream::new(self.events.cm(), sizes, &self.waiters)?;
        self.events.connect(&id, &stream);
        let phase = Phase::Stream { id: Arc::clone(&id), stream: Arc::clone(&stream), reported: false };
        inner.phase = phase;
        self.start_keepalive(inner);
        if let Err(error) = id.connect(stream.qp(), DEPTHS, &stream.conn_data()) {
            stream.set_link(Link::Failed(errno(error)));
        }
        Ok(stream)
    }

    fn connect_reported(&self) {
        if let Phase::Stream { reported, .. } = &mut self.inner.lock().phase {
            *reported = true;
        }
    }

    /// What waits until the socket has changed, for a call that must not wait if `dont_wait` or if the socket
    /// is non-blocking. `EAGAIN`: it must not, or has waited for `limit`.
    fn waits(&self, dont_wait: bool, limit: Option<Duration>) -> impl FnMut() -> Result<(), Errno> {
        let (mut waiting, mut armed): (Option<Waiting>, bool) = (None, false);
        move || {
            if matches!(self.inner.lock().phase, Phase::Closed) {
                return Err(Errno::BADF);
            }
            match &mut waiting {
                None => {
                    if dont_wait || self.nonblocking() {
                        return Err(Errno::AGAIN);
                    }
                    let mut new = Waiting::begin(self.nic(), Sleep::InChannel, limit)?;
                    new.enter(&self.waiters);
                    self.arm(&new);
                    waiting = Some(new);
                }
                // What has woken the thread is most likely what it waits for. If not, it looks once more.
                Some(waiting) if !armed => self.arm(waiting),
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

    /// Who waits for it.
    pub(crate) fn waiters(&self) -> &Arc<Waiters> {
        &self.waiters
    }

    /// Prepares to wait for a change.
    pub(crate) fn arm(&self, waiting: &Waiting) {
        if let Ok(stream) = self.stream() {
            stream.arm(waiting);
        }
    }

    /// From now on `observer` is called after changes. Those of a stream are reported after each call of
    /// [`Self::look`] that asks for it. It is called with locks held: it may do no more than wake a thread.
    pub fn observe(&self, observer: Observer) {
        self.waiters.observe(observer);
    }

    /// What it is ready for. The next change is reported to the observer; unless the socket is ready for
    /// everything, and the observer does not want to hear of what comes in addition (`always`). One that does
    /// is also told whether anything has come since it looked last.
    ///
    /// It asks nothing of the system: what arrives is the business of the thread that serves the sockets.
    /// Programs with an event loop call this several times for each message.
    pub fn look(&self, always: bool) -> Ready {
        // A listener reports each connection.
        let Ok(stream) = self.stream() else { return self.readiness() };
        let ready = stream.known_readiness(always);
        let satisfied = ready.readable && ready.writable && !always;
        if satisfied || !stream.report_next() {
            return ready;
        }
        // What came before that.
        let later = stream.known_readiness(always);
        Ready { news: if ready.news == Some(true) { ready.news } else { later.news }, ..later }
    }

    /// Sends; returns how many bytes were taken.
    pub fn send(&self, buffers: &[MemSeg], flags: Flags) -> Result<usize, Errno> {
        if let Some(upgraded) = self.upgraded() {
            return upgraded.send(buffers, flags, || self.patience());
        }
        let stream = self.stream()?;
        self.unless_closed(stream.send(buffers, self.waits(flags.dont_wait, None)))
    }

    /// Receives; 0 at the end of the stream.
    pub fn receive(&self, buffers: &[MemSeg], flags: Flags) -> Result<usize, Errno> {
        if let Some(upgraded) = self.upgraded() {
            return upgraded.receive(buffers, flags, || self.patience());
        }
        let stream = self.stream()?;
        let wait = self.waits(flags.dont_wait, None);
        self.unless_closed(stream.receive(buffers, flags.wait_all, flags.peek, wait))
    }

    /// The stream is at its end because another thread has closed this socket: that is no end of the peer's.
    fn unless_closed(&self, result: Result<usize, Errno>) -> Result<usize, Errno> {
        match result {
            Ok(0) | Err(_) if matches!(self.inner.lock().phase, Phase::Closed) => Err(Errno::BADF),
            result => result,
        }
    }

    fn patience(&self) -> Patience {
        if self.nonblocking() { Patience::None } else { Patience::Unlimited }
    }

    /// Maps a buffer; see [`Stream::map`].
    pub fn map(&self, buffer: MemSeg, for_peer: bool, offset: Option<u64>) -> Result<u64, Errno> {
        self.stream()?.map(buffer, for_peer, offset)
    }

    /// Ends the mapping of a buffer.
    pub fn unmap(&self, buffer: MemSeg) -> Result<(), Errno> {
        self.stream()?.unmap(buffer)
    }

    /// Writes into the peer's mapped buffers; returns how many bytes were taken.
    pub fn write_mapped(&self, buffers: &[MemSeg], offset: u64, flags: Flags) -> Result<usize, Errno> {
        let stream = self.stream()?;
        self.unless_closed(stream.write_mapped(buffers, offset, self.waits(flags.dont_wait, None)))
    }

    /// Ends one direction or both, and waits until the peer has what was sent. Of a connection that was a TCP
    /// socket's, that goes on in the background.
    pub fn shutdown(&self, how: How) -> Result<(), Errno> {
        if let Some(upgraded) = self.upgraded() {
            return upgraded.shutdown(how);
        }
        let stream = self.stream()?;
        if stream.link() == Link::Pending || stream.is_over() {
            return Err(Errno::NOTCONN);
        }
        stream.shut(how != How::Writing, how != How::Reading)?;
        // As the kernel's, which no longer says that it has connected.
        self.connect_reported();
        if how != How::Reading {
            self.drain(&stream, LINGER);
        }
        Ok(())
    }

    /// Waits until all that was sent has reached the peer, also if the socket is non-blocking: what is in the
    /// send buffer goes out only while the queue pair lives.
    fn drain(&self, stream: &Arc<Stream>, limit: Duration) {
        let Ok(mut waiting) = Waiting::begin(self.nic(), Sleep::InChannel, Some(limit)) else { return };
        waiting.enter(stream.waiters());
        loop {
            stream.arm(&waiting);
            // An interruption does not make it return: a second call could not go on where this one was.
            if stream.is_drained() || waiting.sleep() == Ok(false) {
                return;
            }
        }
    }

    /// Closes it. Calls of other threads that wait for it return `EBADF`.
    pub fn close(&self) {
        let mut inner = self.inner.lock();
        let phase = std::mem::replace(&mut inner.phase, Phase::Closed);
        let linger = inner.options.linger;
        let keepalive = inner.keepalive.take();
        let prepared = inner.prepared.take();
        drop(inner);
        drop(prepared);
        if let Some((timer, _)) = keepalive {
            self.nic().engine().deregister(timer);
        }
        self.waiters.wake();
        match phase {
            Phase::Idle(id) => self.events.destroy(&id),
            Phase::Listening(listener) => listener.close(),
            Phase::Stream { id, stream, .. } => {
                if linger != Some(0) && stream.shut(true, true).is_ok() {
                    let limit = linger.map_or(LINGER, |seconds| Duration::from_secs(seconds.into()));
                    self.drain(&stream, limit.min(LINGER));
                }
                self.events.destroy(&id);
            }
            Phase::Upgraded { id, upgraded } => {
                upgraded.close(linger.map(|seconds| Duration::from_secs(seconds.into())));
                self.events.destroy(&id);
            }
            Phase::Closed => {}
        }
    }

    /// Its own address; of a socket without one, the wildcard address.
    pub fn local_address(&self) -> Result<SocketAddr, Errno> {
        let any: std::net::IpAddr = if self.v6 {
            std::net::Ipv6Addr::UNSPECIFIED.into()
        } else {
            std::net::Ipv4Addr::UNSPECIFIED.into()
        };
        Ok(self.id()?.local_address().unwrap_or(SocketAddr::new(any, 0)))
    }

    /// The peer's address.
    pub fn peer_address(&self) -> Result<SocketAddr, Errno> {
        let stream = self.stream()?;
        if matches!(stream.link(), Link::Pending | Link::Failed(_)) {
            return Err(Errno::NOTCONN);
        }
        self.id()?.peer_address().ok_or(Errno::NOTCONN)
    }

    /// Takes the error that waits (`SO_ERROR`).
    pub fn take_error(&self) -> Option<Errno> {
        if let Some(upgraded) = self.upgraded() {
            return upgraded.take_error();
        }
        let stream = {
            let mut inner = self.inner.lock();
            let Phase::Stream { stream, reported, .. } = &mut inner.phase else { return None };
            match stream.link() {
                Link::Failed(errno) => return (!std::mem::replace(reported, true)).then_some(errno),
                _ => Arc::clone(stream),
            }
        };
        stream.take_error()
    }

    /// Whether it is connected.
    pub fn is_connected(&self) -> bool {
        self.stream().is_ok_and(|stream| stream.is_connected())
    }

    /// Whether it listens.
    pub fn is_listening(&self) -> bool {
        self.listener().is_ok()
    }

    /// Whether it is of IPv6.
    pub fn is_v6(&self) -> bool {
        self.v6
    }

    /// Bytes that can be read (`FIONREAD`).
    pub fn unread(&self) -> Result<usize, Errno> {
        Ok(self.stream()?.unread())
    }

    /// What it is ready for.
    pub fn readiness(&self) -> Ready {
        if let Ok(listener) = self.listener() {
            return Ready { readable: listener.has_connection(), ..Ready::default() };
        }
        match self.stream() {
            Ok(stream) => stream.readiness(),
            // As of the kernel's sockets that are not connected.
            Err(_) => Ready { writable: true, hangup: true, ..Ready::default() },
        }
    }

    /// Sends signs of life from now on, or no more.
    pub fn set_keepalive(&self, on: bool) {
        let mut inner = self.inner.lock();
        inner.options.keepalive = on;
        let old = inner.keepalive.take();
        self.start_keepalive(&mut inner);
        drop(inner);
        if let Some((timer, _)) = old {
            self.nic().engine().deregister(timer);
        }
    }

    /// If they are wanted, and there is a stream.
    fn start_keepalive(&self, inner: &mut Inner) {
        let stream = match &inner.phase {
            Phase::Stream { stream, .. } if inner.options.keepalive => Arc::clone(stream),
            // The kernel's keepalive works on its connection.
            _ => return,
        };
        let engine = self.nic().engine();
        let idle = Duration::from_secs(inner.options.keep_idle().into());
        let nic = Arc::clone(self.nic());
        let keepalive = Arc::new(Keepalive { stream, idle, timer: Mutex::new(None), nic });
        let timer = engine.new_token(Arc::clone(&keepalive) as Arc<dyn Source>);
        *keepalive.timer.lock() = Some(timer);
        inner.keepalive = Some((timer, keepalive));
        engine.set_timer(timer, Instant::now().checked_add(idle));
    }
}

/// Sends signs of life.
struct Keepalive {
    nic: Arc<Nic>,
    stream: Arc<Stream>,
    idle: Duration,
    timer: Mutex<Option<Token>, 29>,
}

impl Source for Keepalive {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        self.stream.keepalive();
        let timer = *self.timer.lock();
        if let Some(timer) = timer {
            self.nic.engine().set_timer(timer, Instant::now().checked_add(self.idle));
        }
    }
}

/// Whether the stream of this TCP connection may have to go by memory or by reliable datagrams, whichever of
/// its two ports a rule names: the end that listened begins the stream.
fn requires_another_link(tcp: BorrowedFd<'_>) -> bool {
    let [Some(own), Some(peer)] = route::addresses(tcp) else { return false };
    let links = &Config::get().links;
    let requires = |port| matches!(links.choose(peer.ip(), port), LinkChoice::Memory | LinkChoice::Rd);
    requires(own.port()) || requires(peer.port())
}

/// Gives an id the options that concern it.
fn prepare(id: &Id, options: &Options, v6: bool) -> Result<(), Errno> {
    id.set_options(|_, of_id| {
        of_id.reuseaddr = options.reuse_address;
        of_id.afonly = (v6 && options.only_v6).then_some(true);
        of_id.tos = (options.tos != 0).then_some(options.tos);
        Ok(())
    })
    .map_err(errno)
}
