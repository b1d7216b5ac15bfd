//! A socket that a rule chose: an rsocket, and its stand-in.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use libc::{sockaddr, socklen_t};
use uwarp_abi_types::preload::{NOTHING_NEW, SOMETHING_NEW};
use uwarp_preload::{errno, set_errno};
use uwarp_process::Mutex;

use crate::agree::conn::{Conn, Outbound, Outcome, Stage, Wait, limit_of};
use crate::agree::spans::Spans;
use crate::agree::{said, service, table};
use crate::relay::{self, Word};
use crate::rsockets::{self, Rsockets};
use crate::stand_in::{Because, Far, StandIn};
use crate::sys::{Deferred, Signals};
use crate::{ending, fds, process, sys, watch};

mod end;

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

/// Options that this library keeps for a socket whose connection was TCP's. The stream's frames must go out
/// at once, and wake its thread, whatever the program wants.
const KEPT: [(c_int, c_int); 3] = [
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_CORK),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT),
];

/// How often a thread looks that has no descriptor to sleep on.
const WITHOUT_ROOM: Duration = Duration::from_millis(10);

fn is_without_room() -> bool {
    matches!(errno(), libc::EMFILE | libc::ENFILE)
}

/// A socket that a rule chose.
pub struct Sock {
    number: c_int,
    /// Its connection was a TCP socket's.
    conn: Option<Arc<Conn>>,
    /// Of such a socket, options that must not act on the kernel's: `TCP_NODELAY`, `TCP_CORK`, `SO_RCVLOWAT`.
    kept: [AtomicI32; 3],
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
    /// Another process has written to the program's end of the stand-in.
    torn: AtomicBool,
    /// It is closed.
    ended: AtomicBool,
    /// The program has asked for signals about it.
    signals: AtomicBool,
    /// A call has failed with `ECONNRESET` because nobody is there to send to.
    reset_said: AtomicBool,
    /// Other processes have it, too: the stand-in is a pair like any other, and a thread carries its bytes.
    handed: AtomicBool,
    handing: Mutex<(), 2>,
    word: Option<Word>,
    key: AtomicUsize,
    /// `SO_RCVTIMEO`, `SO_SNDTIMEO`: microseconds; 0: none.
    limits: [AtomicU64; 2],
    /// A TCP socket that does nothing but keep options.
    options: Mutex<Option<c_int>, 29>,
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
    ending::stop_at_the_end();
    let found = fds::find(fd);
    if found.is_none() {
        set_errno(libc::EBADF);
    }
    found
}

/// -1, with this errno.
pub fn fail(errno: c_int) -> c_int {
    set_errno(errno);
    -1
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

fn after_sending(sent: isize, what: &Spans) -> Because {
    if usize::try_from(sent).is_ok_and(|sent| sent >= what.len()) { Because::Call } else { Because::Blocked }
}

impl Sock {
    /// Puts an rsocket in the place of the TCP socket with this descriptor. When it has begun to connect or
    /// to listen, [`Self::begun`] follows.
    pub fn replace(calls: &Rsockets, number: c_int, fd: c_int, v6: bool) -> Result<Arc<Self>, c_int> {
        let (stand_in, end) = StandIn::new()?;
        let _changing = table::changing();
        let kept = sys::fcntl(fd, libc::F_GETFD, 0)? & libc::FD_CLOEXEC == 0;
        let flags = sys::fcntl(fd, libc::F_GETFL, 0)?;
        let signals = sys::quietly(|| Signals::of(fd));
        let options = keep_options(fd, v6);
        let placed = sys::replace(end, fd);
        sys::close(end);
        if let Err(errno) = placed {
            stand_in.close();
            return Err(errno);
        }
        sys::quietly(|| signals.give(fd));
        let sock = Arc::new(Self::with(number, v6, stand_in, options));
        sock.set_nonblocking(calls, flags & libc::O_NONBLOCK != 0);
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
    pub fn begun(self: &Arc<Self>, fd: c_int) {
        sys::quietly(|| {
            crate::wait::enter_again(fd);
            if sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|flags| flags & libc::O_ASYNC != 0) {
                self.tells_by_signals();
            }
        });
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
            conn: None,
            kept: Default::default(),
            v6,
            listens: AtomicBool::new(false),
            stand_in,
            descriptors: AtomicUsize::new(1),
            watched: AtomicBool::new(false),
            edges: AtomicBool::new(false),
            nonblocking: AtomicBool::new(false),
            torn: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            signals: AtomicBool::new(false),
            reset_said: AtomicBool::new(false),
            handed: AtomicBool::new(false),
            handing: Mutex::default(),
            word: None,
            key: AtomicUsize::new(0),
            limits: Default::default(),
            options: Mutex::new(options),
        }
    }

    /// In front of a TCP connection that may become the rsocket's stream, with a stand-in for the program's
    /// descriptors, of which there are so many. Also the program's end of the stand-in, for their place.
    pub fn in_front_of(
        calls: &Rsockets,
        number: c_int,
        tcp: c_int,
        conn: &Arc<Conn>,
        descriptors: usize,
    ) -> Result<(Arc<Self>, c_int), c_int> {
        let nonblocking = sys::fcntl(tcp, libc::F_GETFL, 0)? & libc::O_NONBLOCK != 0;
        let (stand_in, end) = StandIn::new()?;
        let v6 = sys::option(tcp, libc::SOL_SOCKET, libc::SO_DOMAIN) == Some(libc::AF_INET6);
        let mut sock = Self::with(number, v6, stand_in, None);
        sock.conn = Some(Arc::clone(conn));
        sock.word = Word::new();
        sock.descriptors = AtomicUsize::new(descriptors);
        for (kept, (level, name)) in sock.kept.iter().zip(KEPT) {
            kept.store(sys::option(tcp, level, name).unwrap_or(0), Ordering::Relaxed);
        }
        for (limit, name) in sock.limits.iter().zip([libc::SO_RCVTIMEO, libc::SO_SNDTIMEO]) {
            let ms = u64::try_from(limit_of(tcp, name)).unwrap_or(0);
            limit.store(ms.saturating_mul(1000), Ordering::Relaxed);
        }
        let sock = Arc::new(sock);
        sock.set_nonblocking(calls, nonblocking);
        Ok((sock, end))
    }

    /// It is not used after all.
    pub fn discard(&self) {
        self.stand_in.close();
    }

    /// Its connection was a TCP socket's.
    pub fn conn(&self) -> Option<&Arc<Conn>> {
        self.conn.as_ref()
    }

    /// Where an option is kept that must not act on the kernel's socket, if this is one.
    pub fn kept(&self, level: c_int, name: c_int) -> Option<&AtomicI32> {
        let at = KEPT.iter().position(|kept| *kept == (level, name)).filter(|_| self.conn.is_some())?;
        self.kept.get(at)
    }

    /// The program sets one of those. In front of a marker it acts on the kernel's socket, but no limit of
    /// bytes does as long as a marker may come: nobody would hear of it.
    pub fn keep(&self, conn: &Conn, (level, name): (c_int, c_int), value: c_int) {
        let Some(kept) = self.kept(level, name) else { return };
        let (inbound, _outbound) = (conn.inbound.lock(), conn.outbound.lock());
        kept.store(value, Ordering::Relaxed);
        let waits = (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) && inbound.is_looking();
        if conn.stage() == Stage::Behind && !waits {
            sys::set_option(conn.tcp(), level, name, value);
        }
    }

    /// The connection stays TCP: what the program has set acts again.
    pub fn restore_options(&self, conn: &Conn) {
        let tcp = conn.tcp();
        let _outbound = conn.outbound.lock();
        for (kept, (level, name)) in self.kept.iter().zip(KEPT) {
            sys::set_option(tcp, level, name, kept.load(Ordering::Relaxed));
        }
    }

    /// The stream of a TCP connection is being set up: from now on its changes are looked at.
    pub fn follow_stream(self: &Arc<Self>) {
        watch::begin(self);
        self.changed();
    }

    /// The rsocket has changed.
    pub fn changed(&self) {
        if let (Some(conn), Some(calls)) = (&self.conn, self.calls()) {
            let before = conn.joining.load(Ordering::Acquire);
            if before {
                // The first look makes the stream say what it must say first.
                let _ = calls.look(self.number, false);
                // Of a closed one it says that there is none. Who closes it decides what becomes of it.
                if let Some(result) = calls.joined(self.number).filter(|_| !self.has_ended()) {
                    let send = |outbound: &mut Outbound| conn.send_kept(outbound, calls, self.number);
                    if conn.joined(result, send) && result.is_ok() {
                        said::decided(conn, None);
                    }
                }
            }
            let joined = !conn.joining.load(Ordering::Acquire);
            let kept = joined && conn.keeps();
            if kept {
                conn.send_kept(&mut conn.outbound.lock(), calls, self.number);
                if conn.keeps() {
                    // From here on a change is reported, and one before is seen.
                    let _ = calls.look(self.number, false);
                    conn.send_kept(&mut conn.outbound.lock(), calls, self.number);
                }
            }
            if (before || kept) && joined && !conn.keeps() {
                self.streams(conn, calls);
            }
            if joined && !conn.keeps() {
                watch::joined(self.key.load(Ordering::SeqCst), self);
            }
        }
        self.show(Because::Network);
    }

    /// Nothing is left in front of what its stream sends, or it has none.
    fn streams(&self, conn: &Arc<Conn>, calls: &Rsockets) {
        service::forget(conn.key);
        let shut = conn.outbound.lock().shut_later.take();
        if let Some(how) = shut {
            // SAFETY: no pointer.
            sys::quietly(|| unsafe { (calls.rshutdown)(self.number, how) });
        }
        conn.end_if_closed();
    }

    /// What the socket is ready for, in poll(2)'s bits, and for edges [`NOTHING_NEW`] or its like.
    fn look(&self, edges: bool) -> Option<i16> {
        match &self.conn {
            Some(conn) if conn.stage() != Stage::Stream => Some(conn.look()),
            Some(conn) if conn.keeps() => {
                let ahead = if conn.unread() > 0 { libc::POLLIN } else { 0 };
                Some((self.calls()?.look(self.number, edges)? | ahead) & !libc::POLLOUT)
            }
            Some(conn) if !conn.is_only_stream() => {
                let bits = self.calls()?.look(self.number, edges)?;
                if conn.unread() == 0 {
                    return Some(bits);
                }
                // Programs give up on a hang-up, so what is there comes first. Whether it is new is not
                // known.
                Some((bits | libc::POLLIN) & !(libc::POLLHUP | SOMETHING_NEW | NOTHING_NEW))
            }
            _ => self.calls()?.look(self.number, edges),
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
        self.key.store(key, Ordering::SeqCst);
    }

    /// Whether it is closed.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    /// Whether the program waits for it.
    pub fn is_watched(&self) -> bool {
        self.watched.load(Ordering::SeqCst)
    }

    /// For a call with these flags: if it does not wait, what the calling thread changes need not be reported
    /// to another one, as the call shows it.
    fn calling(&self, flags: c_int) -> Option<watch::Calling> {
        let waits = flags & libc::MSG_DONTWAIT == 0 && !self.is_nonblocking();
        (!waits && self.is_watched()).then(|| watch::Calling::begin(self.key.load(Ordering::Relaxed)))
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
        if let Some(conn) = &self.conn {
            return Some(conn.tcp());
        }
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
        // That of a connection that was TCP's is followed in any case.
        if !self.watched.swap(true, Ordering::SeqCst) {
            if self.conn.is_none() && !watch::begin(self) {
                self.watched.store(false, Ordering::Release);
                if !self.has_ended() {
                    sys::warn("cannot start the thread that watches sockets");
                }
                return;
            }
            watch::want(self.key.load(Ordering::SeqCst));
        }
        self.show(Because::Call);
    }

    /// The program asks for signals about the socket. They are the kernel's, about the stand-in.
    pub fn tells_by_signals(self: &Arc<Self>) {
        self.signals.store(true, Ordering::Relaxed);
        self.watch(true);
    }

    /// Shows what the socket is ready for, if the program waits for it. Leaves errno as it is.
    pub fn show(&self, because: Because) {
        if self.is_handed() {
            if because == Because::Network {
                relay::kick();
            }
            return;
        }
        if self.watched.load(Ordering::Acquire) {
            let edges = self.edges.load(Ordering::Relaxed);
            // What is shown may raise a signal at once, and its handler may call.
            let _deferred = self.signals.load(Ordering::Relaxed).then(Deferred::begin);
            self.stand_in.show(because, edges, || self.look(edges));
        }
    }

    /// Gives it another stand-in at this descriptor, if the present one shows an end: it connects again.
    pub fn renew(&self, fd: c_int) {
        if !self.stand_in.has_ended() {
            return;
        }
        if let Ok((new, end)) = StandIn::new() {
            let signals = sys::quietly(|| Signals::of(fd));
            let _ = sys::replace(end, fd);
            sys::close(end);
            sys::quietly(|| signals.give(fd));
            self.stand_in.take_over(new);
            self.stand_in.set_flag(libc::O_NONBLOCK, self.is_nonblocking());
            crate::wait::enter_again(fd);
        }
    }

    fn wait_of(&self, direction: Direction) -> Wait {
        if self.is_nonblocking() { Wait::Not } else { Wait::Most(self.limit_for_poll(direction)) }
    }

    /// Receives: `call` with these flags. `spans`: where to.
    pub fn receive(&self, spans: &Spans, flags: c_int, call: impl Fn(&Rsockets, c_int) -> isize) -> isize {
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
        if let Some(conn) = self.conn.as_ref().filter(|conn| !conn.is_only_stream()) {
            match conn.receive(spans, flags, self.wait_of(Direction::Receive)) {
                Outcome::Done(received) => {
                    let received = received + self.receive_behind(calls, spans, received, flags);
                    self.show(Because::Receive);
                    return received;
                }
                Outcome::Elsewhere => {}
            }
        }
        let flags = match self.await_within_limit(calls, Direction::Receive, flags) {
            Ok(flags) => flags,
            Err(errno) => {
                set_errno(errno);
                return -1;
            }
        };
        let received = self.calling_with(calls, Direction::Receive, flags, call);
        self.show(Because::Receive);
        received
    }

    /// Receives what the stream has behind so many bytes in front of it. A program that peeks and waits for
    /// more would never see it otherwise, and others take less than they asked for as all that there is.
    fn receive_behind(&self, calls: &Rsockets, spans: &Spans, front: isize, flags: c_int) -> isize {
        let front = usize::try_from(front).unwrap_or(0);
        // In front of it nothing may be left: more has come there if it was not a stream yet.
        let seen = if flags & libc::MSG_PEEK != 0 { front } else { 0 };
        let streams =
            self.conn.as_ref().is_some_and(|conn| conn.stage() == Stage::Stream && conn.unread() == seen);
        if front == 0 || front >= spans.len() || flags & libc::MSG_TRUNC != 0 || !streams {
            return 0;
        }
        // An end, or an error, is the next call's.
        if calls.unread(self.number).is_none_or(|unread| unread <= 0) {
            return 0;
        }
        let mut rest = spans.clone();
        rest.skip(front);
        let mut message = rest.message();
        let flags = flags & libc::MSG_PEEK | libc::MSG_DONTWAIT;
        let _calling = self.calling(flags);
        // SAFETY: the program's memory, as its call says.
        sys::quietly(|| unsafe { (calls.rrecvmsg)(self.number, &raw mut message, flags) }).max(0)
    }

    /// Sends: `call` with these flags. `spans`: what.
    pub fn send(&self, spans: &Spans, flags: c_int, call: impl Fn(&Rsockets, c_int) -> isize) -> isize {
        let Some(calls) = self.calls() else { return -1 };
        if let Some(conn) = self.conn.as_ref().filter(|conn| conn.stage() != Stage::Stream || conn.keeps()) {
            match conn.send(spans, flags, self.wait_of(Direction::Send)) {
                Outcome::Done(sent) => {
                    self.show(after_sending(sent, spans));
                    return sent;
                }
                Outcome::Elsewhere => {}
            }
        }
        let within = match self.await_within_limit(calls, Direction::Send, flags) {
            Ok(flags) => flags,
            Err(errno) => {
                set_errno(errno);
                return -1;
            }
        };
        let sent = self.calling_with(calls, Direction::Send, within, call);
        if sent < 0 {
            // TCP says once that the peer has ended the connection.
            let is_said = errno() == libc::ECONNRESET && self.reset_said.swap(true, Ordering::Relaxed);
            if is_said || self.listens() && errno() == libc::ENOTCONN {
                set_errno(libc::EPIPE);
            }
            if errno() == libc::EPIPE && flags & libc::MSG_NOSIGNAL == 0 {
                sys::raise(libc::SIGPIPE);
            }
        }
        self.show(after_sending(sent, spans));
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
        match self.await_direction(calls, direction, limit) {
            0 => Err(libc::EAGAIN),
            ready if ready < 0 => Err(errno()),
            _ => Ok(flags | libc::MSG_DONTWAIT),
        }
    }

    /// Makes a call of the library's, also if there is no descriptor to sleep on.
    fn calling_with(
        &self,
        calls: &Rsockets,
        direction: Direction,
        flags: c_int,
        call: impl Fn(&Rsockets, c_int) -> isize,
    ) -> isize {
        let _calling = self.calling(flags);
        let mut done = call(calls, flags);
        while done < 0 && is_without_room() {
            if self.await_direction(calls, direction, -1) < 0 {
                return -1;
            }
            done = call(calls, flags | libc::MSG_DONTWAIT);
            if done < 0 && errno() == libc::EAGAIN {
                set_errno(libc::EMFILE);
            }
        }
        done
    }

    /// Waits until the socket is ready. Without a descriptor to sleep on, it looks now and then.
    fn await_direction(&self, calls: &Rsockets, direction: Direction, limit: c_int) -> c_int {
        let events = match direction {
            Direction::Receive => libc::POLLIN,
            Direction::Send => libc::POLLOUT,
        };
        let ready = calls.wait(self.number, events, limit);
        if ready >= 0 || !is_without_room() {
            return ready;
        }
        let limit = u64::try_from(limit).ok();
        let until = limit.and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms)));
        loop {
            let ready = calls.wait(self.number, events, 0);
            if ready != 0 || until.is_some_and(|until| Instant::now() >= until) {
                return ready;
            }
            if let Err(errno) = sys::sleep_for(WITHOUT_ROOM) {
                set_errno(errno);
                return -1;
            }
        }
    }

    /// Its own address or the peer's.
    ///
    /// # Safety
    /// As getsockname(2).
    pub unsafe fn name(&self, peer: bool, to: *mut sockaddr, len: *mut socklen_t) -> c_int {
        let Some(calls) = self.calls() else { return -1 };
        if let Some(conn) = &self.conn {
            let fd = conn.tcp();
            let given = if peer {
                uwarp_preload::real!(getpeername(
                    fd: c_int, to: *mut sockaddr, len: *mut socklen_t
                ) -> c_int)
            } else {
                uwarp_preload::real!(getsockname(
                    fd: c_int, to: *mut sockaddr, len: *mut socklen_t
                ) -> c_int)
            };
            // A stream's end closes the connection below it in both directions, and then TCP has no peer.
            if given == 0 || !peer || errno() != libc::ENOTCONN || conn.stage() != Stage::Stream {
                return given;
            }
            let peer = conn.agreement.lock().peer();
            // SAFETY: the caller's promise.
            unsafe { crate::address::give(crate::address::seen(peer, self.v6), to, len) };
            return 0;
        }
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

    /// The program closes a descriptor by `close`. With the last one, the socket ends. If another process has
    /// inherited it, it ends when that one has closed it, too, as a TCP connection does.
    pub fn release(self: &Arc<Self>, close: impl FnOnce()) {
        if self.descriptors.fetch_sub(1, Ordering::AcqRel) > 1 {
            return close();
        }
        // A child may ask for it at the same time. If its question came first, the relay has the connection,
        // and ends it when nobody has the program's end any more.
        let handing = self.handing.lock();
        if self.is_handed() {
            drop(handing);
            return close();
        }
        let far = self.stand_in.give_away().filter(|_| self.conn.is_some());
        self.handed.store(far.is_some(), Ordering::Release);
        drop(handing);
        close();
        match far {
            Some(far) if !far.is_alone() && !far.foreign && relay::start() => {
                if let Some(word) = &self.word {
                    word.answer(true);
                }
                self.carry_by(far);
            }
            Some(far) => self.end_carried(far.foreign),
            None => self.end(),
        }
    }

    /// Where a child asks for it.
    pub fn word(&self) -> Option<&Word> {
        self.word.as_ref()
    }

    /// Whether the program's descriptors are like any other.
    pub fn is_handed(&self) -> bool {
        self.handed.load(Ordering::Acquire)
    }

    /// Other processes are about to use it. False: they cannot.
    pub fn hand_over(self: &Arc<Self>) -> bool {
        let _one = self.handing.lock();
        if self.is_handed() {
            return true;
        }
        // What is there cannot be put behind an end that is shown already.
        let late = self.stand_in.has_ended() && self.look(false).is_none_or(|bits| bits & libc::POLLIN != 0);
        let far = if self.conn.is_none() || late && self.has_unread() || !relay::start() {
            None
        } else {
            self.stand_in.give_away()
        };
        self.handed.store(far.is_some(), Ordering::Release);
        if let Some(word) = &self.word {
            word.answer(far.is_some());
        }
        far.is_some_and(|far| {
            self.carry_by(far);
            true
        })
    }

    /// The relay has it from now on. It waits for the stream's changes, of which nobody is told as long as
    /// the program itself only blocks in its calls.
    fn carry_by(self: &Arc<Self>, far: Far) {
        if !self.watched.swap(true, Ordering::SeqCst) {
            watch::want(self.key.load(Ordering::SeqCst));
        }
        relay::begin(self, far);
    }

    fn has_unread(&self) -> bool {
        let ahead = self.conn.as_ref().is_some_and(|conn| !conn.is_only_stream() && conn.unread() > 0);
        ahead || self.calls().and_then(|calls| calls.unread(self.number)).is_some_and(|unread| unread > 0)
    }

    /// Sends what another process has written. Does not wait.
    pub fn carry_out(&self, bytes: &[u8]) -> Result<usize, c_int> {
        let (from, len) = (bytes.as_ptr().cast::<c_void>(), bytes.len());
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: a buffer and its length.
        let call = |r: &Rsockets, flags| unsafe { (r.rsend)(self.number, from, len, flags) };
        usize::try_from(self.send(&Spans::one(from, len), flags, call)).map_err(|_| errno())
    }

    /// Receives for whoever reads. Does not wait.
    pub fn carry_in(&self, block: &mut [u8]) -> Result<usize, c_int> {
        let (to, len) = (block.as_mut_ptr().cast::<c_void>(), block.len());
        // SAFETY: a buffer and its length.
        let call = |r: &Rsockets, flags| unsafe { (r.rrecv)(self.number, to, len, flags) };
        usize::try_from(self.receive(&Spans::one(to, len), libc::MSG_DONTWAIT, call)).map_err(|_| errno())
    }

    /// Nobody sends any more.
    pub fn end_direction(&self) {
        let how = libc::SHUT_WR;
        let Some(calls) = self.calls() else { return };
        if self.conn.as_ref().is_none_or(|conn| conn.shutdown(how).is_none()) {
            // SAFETY: no pointer.
            unsafe { (calls.rshutdown)(self.number, how) };
        }
    }

    /// What it is ready for; the next change is reported.
    pub fn look_next(&self) -> i16 {
        self.look(false).unwrap_or(0)
    }

    /// In a child.
    pub fn close_copy(&self) {
        self.stand_in.close_copy();
    }
}

/// A buffer to copy through.
pub type Block = [u8];

/// One that is not on the stack, of which threads of programs may have little: 128 KiB with musl.
pub fn block() -> Vec<u8> {
    vec![0; 65536]
}

/// Its address and a length within it.
pub fn at(block: &mut Block, len: usize) -> (*mut c_void, usize) {
    (block.as_mut_ptr().cast(), len.min(block.len()))
}
