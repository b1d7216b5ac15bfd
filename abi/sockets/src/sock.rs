//! A socket that a rule chose: an rsocket, and its stand-in.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use libc::{sockaddr, socklen_t};
use parking_lot::Mutex;
use uwarp_preload::{errno, set_errno};

use crate::rsockets::{self, Rsockets};
use crate::stand_in::{Because, StandIn};
use crate::{fds, process, sys, watch};

/// Options that a program may have set before the rule was looked at, and those that a new connection
/// inherits; all are numbers.
const INHERITED: [(c_int, c_int); 11] = [
    (libc::SOL_SOCKET, libc::SO_REUSEADDR),
    (libc::SOL_SOCKET, libc::SO_REUSEPORT),
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
    (libc::IPPROTO_IP, libc::IP_TOS),
    (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
];

/// A socket that a rule chose.
pub struct Sock {
    number: c_int,
    /// The program's is an IPv6 socket.
    v6: bool,
    listens: AtomicBool,
    stand_in: StandIn,
    /// Descriptors of the program.
    descriptors: AtomicUsize,
    /// The program waits for it: the stand-in is kept current.
    watched: AtomicBool,
    /// In a set with `EPOLLET`.
    edges: AtomicBool,
    nonblocking: AtomicBool,
    key: AtomicUsize,
    /// `SO_RCVTIMEO`, `SO_SNDTIMEO`: microseconds; 0: none.
    limits: [AtomicU64; 2],
    /// A TCP socket that does nothing but keep options.
    options: Mutex<Option<c_int>>,
}

/// A direction with a limit.
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub enum Direction {
    Receive,
    Send,
}

/// The socket with this descriptor, for a call; `None`, and errno: there is none, or it cannot be used here.
pub fn of(fd: c_int) -> Option<Arc<Sock>> {
    if process::is_forked() {
        rsockets::say_forked();
        return None;
    }
    let found = fds::find(fd);
    if found.is_none() {
        set_errno(libc::EBADF);
    }
    found
}

/// Makes room for options: a TCP socket with those of another one.
fn keep_options(of: c_int, v6: bool) -> Option<c_int> {
    let new = sys::quietly(|| sys::tcp(if v6 { libc::AF_INET6 } else { libc::AF_INET })).ok()?;
    for (level, name) in INHERITED {
        if let Some(value) = sys::option(of, level, name) {
            sys::set_option(new, level, name, value);
        }
    }
    for name in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
        // The kernel returns twice what a program sets.
        let default = sys::option(new, libc::SOL_SOCKET, name);
        if let Some(value) = sys::option(of, libc::SOL_SOCKET, name).filter(|value| Some(*value) != default) {
            sys::set_option(new, libc::SOL_SOCKET, name, value / 2);
        }
    }
    let moved = sys::quietly(|| sys::second(new)).ok();
    sys::close(new);
    if let Some(moved) = moved {
        fds::enter_own(moved);
    }
    moved
}

impl Sock {
    /// Puts an rsocket in the place of the TCP socket with this descriptor. When it has begun to connect or
    /// to listen, [`Self::begun`] follows.
    pub fn replace(calls: &Rsockets, number: c_int, fd: c_int, v6: bool) -> Result<Arc<Self>, c_int> {
        let (stand_in, end) = StandIn::new()?;
        let kept = sys::fcntl(fd, libc::F_GETFD, 0)? & libc::FD_CLOEXEC == 0;
        let nonblocking = sys::fcntl(fd, libc::F_GETFL, 0)? & libc::O_NONBLOCK != 0;
        let options = keep_options(fd, v6);
        let placed = sys::replace(end, fd);
        sys::close(end);
        if let Err(errno) = placed {
            stand_in.close();
            return Err(errno);
        }
        let sock = Arc::new(Self::with(number, v6, stand_in, options));
        sock.set_nonblocking(calls, nonblocking);
        if let Some(options) = options {
            for (level, name) in INHERITED {
                if let Some(value) = sys::option(options, level, name).filter(|value| *value != 0) {
                    calls.set_number(number, level, name, value);
                }
            }
        }
        if !fds::enter(fd, Arc::clone(&sock), kept) {
            sock.stand_in.close();
            return Err(libc::EMFILE);
        }
        Ok(sock)
    }

    /// It is in the sets of epoll again in which the TCP socket was. Not earlier: a socket that does nothing
    /// yet is hung up, which a stand-in cannot take back. Leaves errno as it was.
    pub fn begun(&self, fd: c_int) {
        sys::quietly(|| crate::wait::enter_again(fd));
        self.show(Because::Call);
    }

    /// A connection that this listener has accepted, with its descriptor, which is not entered yet.
    pub fn accepted(&self, number: c_int, stand_in: StandIn) -> Self {
        let new = Self::with(number, self.v6, stand_in, None);
        for (to, from) in new.limits.iter().zip(&self.limits) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        let from = self.options();
        *new.options.lock() = from.and_then(|from| keep_options(from, self.v6));
        new
    }

    fn with(number: c_int, v6: bool, stand_in: StandIn, options: Option<c_int>) -> Self {
        Self {
            number,
            v6,
            listens: AtomicBool::new(false),
            stand_in,
            descriptors: AtomicUsize::new(1),
            watched: AtomicBool::new(false),
            edges: AtomicBool::new(false),
            nonblocking: AtomicBool::new(false),
            key: AtomicUsize::new(0),
            limits: Default::default(),
            options: Mutex::new(options),
        }
    }

    /// The rsocket's number.
    pub fn number(&self) -> c_int {
        self.number
    }

    /// The library.
    pub fn calls(&self) -> Option<&'static Rsockets> {
        rsockets::loaded()
    }

    /// It listens.
    pub fn set_listens(&self) {
        self.listens.store(true, Ordering::Relaxed);
    }

    /// Whether it listens.
    pub fn listens(&self) -> bool {
        self.listens.load(Ordering::Relaxed)
    }

    /// Its key in [`watch`].
    pub fn set_key(&self, key: usize) {
        self.key.store(key, Ordering::Relaxed);
    }

    /// `O_NONBLOCK`.
    pub fn is_nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Sets `O_NONBLOCK`, also of the stand-in: `F_GETFL` is the kernel's.
    pub fn set_nonblocking(&self, calls: &Rsockets, on: bool) {
        self.nonblocking.store(on, Ordering::Relaxed);
        calls.set_nonblocking(self.number, on);
        self.stand_in.set_flag(libc::O_NONBLOCK, on);
    }

    /// The limit of calls that wait, in microseconds.
    pub fn limit(&self, direction: Direction) -> &AtomicU64 {
        &self.limits[direction as usize]
    }

    /// The same in milliseconds, as poll(2) takes it.
    pub fn limit_for_poll(&self, direction: Direction) -> c_int {
        match self.limit(direction).load(Ordering::Relaxed) {
            0 => -1,
            micros => c_int::try_from(micros.div_ceil(1000)).unwrap_or(c_int::MAX),
        }
    }

    /// The socket that keeps its options.
    pub fn options(&self) -> Option<c_int> {
        let mut options = self.options.lock();
        if options.is_none() {
            *options = keep_options(-1, self.v6);
        }
        *options
    }

    /// From now on the kernel's poll and its like say of the descriptor what is true of the socket.
    pub fn watch(self: &Arc<Self>, edges: bool) {
        if edges {
            self.edges.store(true, Ordering::Relaxed);
        }
        if !self.watched.swap(true, Ordering::AcqRel) && !watch::begin(self) {
            self.watched.store(false, Ordering::Release);
            sys::warn("cannot start the thread that watches sockets");
            return;
        }
        self.show(Because::Call);
    }

    /// Shows what the socket is ready for, if the program waits for it. Leaves errno as it is.
    pub fn show(&self, because: Because) {
        if self.watched.load(Ordering::Acquire) {
            let edges = self.edges.load(Ordering::Relaxed);
            self.stand_in.show(because, edges, || self.calls()?.look(self.number, edges));
        }
    }

    /// Gives it another stand-in at this descriptor, if the present one shows an end: it connects again.
    pub fn renew(&self, fd: c_int) {
        if !self.stand_in.has_ended() {
            return;
        }
        if let Ok((new, end)) = StandIn::new() {
            let _ = sys::replace(end, fd);
            sys::close(end);
            self.stand_in.take_over(new);
            self.stand_in.set_flag(libc::O_NONBLOCK, self.is_nonblocking());
            crate::wait::enter_again(fd);
        }
    }

    /// Receives: `call` with these flags.
    pub fn receive(&self, flags: c_int, call: impl Fn(&Rsockets, c_int) -> isize) -> isize {
        let Some(calls) = self.calls() else { return -1 };
        if flags & libc::MSG_ERRQUEUE != 0 {
            set_errno(libc::EAGAIN);
            return -1;
        }
        if flags & libc::MSG_OOB != 0 {
            // As of the kernel's, if there is no urgent data.
            set_errno(libc::EINVAL);
            return -1;
        }
        let flags = match self.await_within_limit(calls, Direction::Receive, flags) {
            Ok(flags) => flags,
            Err(errno) => {
                set_errno(errno);
                return -1;
            }
        };
        let received = call(calls, flags);
        self.show(Because::Receive);
        received
    }

    /// Sends: `call` with these flags.
    pub fn send(&self, flags: c_int, call: impl Fn(&Rsockets, c_int) -> isize) -> isize {
        let Some(calls) = self.calls() else { return -1 };
        let within = match self.await_within_limit(calls, Direction::Send, flags) {
            Ok(flags) => flags,
            Err(errno) => {
                set_errno(errno);
                return -1;
            }
        };
        let sent = call(calls, within);
        if sent < 0 {
            if self.listens() && errno() == libc::ENOTCONN {
                set_errno(libc::EPIPE);
            }
            if errno() == libc::EPIPE && flags & libc::MSG_NOSIGNAL == 0 {
                sys::raise(libc::SIGPIPE);
            }
        }
        self.show(Because::Call);
        sent
    }

    /// Waits as long as the program allows, if it has set a limit.
    fn await_within_limit(
        &self,
        calls: &Rsockets,
        direction: Direction,
        flags: c_int,
    ) -> Result<c_int, c_int> {
        let limit = self.limit_for_poll(direction);
        if limit < 0 || flags & libc::MSG_DONTWAIT != 0 || self.is_nonblocking() {
            return Ok(flags);
        }
        let events = match direction {
            Direction::Receive => libc::POLLIN,
            Direction::Send => libc::POLLOUT,
        };
        match calls.wait(self.number, events, limit) {
            0 => Err(libc::EAGAIN),
            ready if ready < 0 => Err(errno()),
            _ => Ok(flags | libc::MSG_DONTWAIT),
        }
    }

    /// Its own address or the peer's.
    ///
    /// # Safety
    /// As getsockname(2).
    pub unsafe fn name(&self, peer: bool, to: *mut sockaddr, len: *mut socklen_t) -> c_int {
        let Some(calls) = self.calls() else { return -1 };
        if to.is_null() || len.is_null() {
            set_errno(libc::EFAULT);
            return -1;
        }
        let (mut storage, mut room) = crate::address::room();
        let call = if peer { calls.rgetpeername } else { calls.rgetsockname };
        let at = (&raw mut storage).cast::<sockaddr>();
        // SAFETY: room for any address.
        let got = unsafe { call(self.number, at, &raw mut room) };
        // SAFETY: what the call wrote; the caller's promise.
        unsafe {
            if let (0, Some(address)) = (got, crate::address::load(at, room)) {
                crate::address::give(crate::address::seen(address, self.v6), to, len);
            }
        }
        got
    }

    /// The program has one descriptor more.
    pub fn duplicated(&self) {
        self.descriptors.fetch_add(1, Ordering::Relaxed);
    }

    /// The program closes a descriptor by `close`. With the last one, the socket ends.
    pub fn release(&self, close: impl FnOnce()) {
        if self.descriptors.fetch_sub(1, Ordering::AcqRel) > 1 {
            return close();
        }
        self.stand_in.close();
        close();
        self.end();
    }

    /// Ends the connection: what was sent reaches the peer first.
    pub fn end(&self) {
        watch::end(self.key.load(Ordering::Relaxed));
        if let Some(calls) = self.calls() {
            // SAFETY: no pointer.
            sys::quietly(|| unsafe { (calls.rclose)(self.number) });
        }
        if let Some(options) = self.options.lock().take() {
            fds::forget(options);
            sys::close(options);
        }
    }
}

/// A buffer to copy through.
pub type Block = [u8; 65536];

/// Its address and a length within it.
pub fn at(block: &mut Block, len: usize) -> (*mut c_void, usize) {
    (block.as_mut_ptr().cast(), len.min(block.len()))
}
