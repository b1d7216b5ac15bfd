//! The thread that agrees with peers: it receives and sends datagrams, looks for markers when the program
//! does not, and repeats what was lost. It starts with the first connection that the program uses.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use uwarp_abi_types::preload::take_over;
use uwarp_preload::rules::Trust;
use uwarp_process::{Mutex, MutexGuard};

use super::conn::{Conn, Own, Stage};
use super::datagrams::{hear, hear_all, hear_aside, hear_postponed, send};
use super::inbound::End;
use super::kept;
use super::kernel;
use super::machine::{Action, Agreement, Role};
use super::said::{self, Why};
use super::side::{self, Side};
use super::table;
use super::wire::{Ends, Nonce, Pattern, Word, marker};
use crate::rsockets::{self, Rsockets};
use crate::sock::Sock;
use crate::stand_in::Because;
use crate::sys::Signals;
use crate::{address, fds, life, sys, wait};

/// How long a connection that was closed before it was decided what becomes of it is looked after.
const DYING: Duration = Duration::from_secs(5);
/// The same of one that keeps bytes. As long as a closed stream (`crates/rsocket/src/upgrade.rs`).
const LINGER: Duration = Duration::from_secs(60);

/// What the thread has to do.
pub struct Service {
    /// The connections that it looks after.
    conns: HashMap<usize, Watched>,
    /// When.
    times: BTreeSet<(Instant, usize)>,
    /// The connections that this process has accepted, by their nonces.
    pub accepted: HashMap<Nonce, usize>,
    /// UDP sockets for those, by their own addresses: one for many connections, as long as the process lives.
    speakers: HashMap<SocketAddr, c_int>,
    /// Connections that a call has found something in.
    todo: HashSet<usize>,
    /// Closed by the program, until then.
    dying: HashMap<usize, (Arc<Conn>, Instant)>,
    /// What it waits on.
    pub epoll: c_int,
    bell: c_int,
}

/// A connection that the thread looks after.
struct Watched {
    conn: Arc<Conn>,
    /// Its entry in [`Service::times`].
    time: Option<Instant>,
}

/// `None`: there is no thread. Held during a fork.
static SERVICE: Mutex<Option<Service>, 7> = Mutex::new(None);
static NEXT_KEY: AtomicUsize = AtomicUsize::new(1);

/// Wakes the thread, without a lock; -1: there is none.
static BELL_RINGS: AtomicI32 = AtomicI32::new(-1);
/// Whether the process ends, which the thread is asked to prepare.
static END: AtomicU8 = AtomicU8::new(END_OF_NOTHING);
const END_OF_NOTHING: u8 = 0;
const END_ASKED: u8 = 1;
const END_BEGUN: u8 = 2;
const END_DONE: u8 = 3;
/// The process ends by exit(3): no other connection gets a stand-in.
static EXITS: AtomicBool = AtomicBool::new(false);

/// Beside a connection's key: which of its descriptors it is.
const UDP: u64 = 0;
const TCP: u64 = 1;
const NAME: u64 = 2;
/// See above.
pub const LINK: u64 = 3;
/// So many there are.
pub const KINDS: u64 = 4;
const BELL: u64 = u64::MAX;
/// Beside a UDP socket's descriptor: it is one of many connections.
const SPEAKER: u64 = 1 << 63;

/// All of it, locked.
pub type Held = MutexGuard<'static, Option<Service>, 7>;

/// Locks it.
pub fn service() -> Held {
    SERVICE.lock()
}

/// Numbers that nobody can guess.
pub fn nonce() -> Nonce {
    let mut nonce = [0; 16];
    sys::random(&mut nonce);
    nonce
}

/// A connection that the program has just made, by connecting or by accepting it, and that a rule chose.
/// `None`: it stays TCP.
pub fn connection(role: Role, own: SocketAddr, peer: SocketAddr, trust: Trust) -> Option<Arc<Conn>> {
    if own == peer {
        return None;
    }
    let ends = match role {
        Role::Connected => Ends { connected: own, accepted: peer },
        Role::Accepted => Ends { connected: peer, accepted: own },
    };
    let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
    let made =
        |secret, udp, side| Some(Conn::new(key, Agreement::new(role, ends, nonce(), secret), udp, side));
    // The end that accepted makes its socket when it is needed.
    if kernel::is_local(peer, own) {
        let side = match role {
            Role::Connected => Side::publish(&ends),
            Role::Accepted => Ok(Side::default()),
        };
        return match side {
            Ok(side) => made(None, None, Some(side)),
            Err(errno) => {
                let why = if errno == libc::EADDRINUSE { Why::NoName } else { Why::NoRoom };
                said::never_begun(role, ends, why);
                None
            }
        };
    }
    let secret = match trust {
        Trust::ThisHost => {
            said::never_begun(role, ends, Why::OtherHost);
            return None;
        }
        Trust::NoOtherUsers => None,
        Trust::Key(secret) => Some(secret),
    };
    match role {
        Role::Accepted => made(secret, None, None),
        Role::Connected => match udp(own) {
            Ok(udp) => made(secret, Some(udp), None),
            Err(errno) => {
                let why = if errno == libc::EADDRINUSE { Why::NoUdpPort } else { Why::NoRoom };
                said::never_begun(role, ends, why);
                None
            }
        },
    }
}

fn udp(own: SocketAddr) -> Result<Own, c_int> {
    let udp = Own::new(sys::quietly(|| sys::udp(own.is_ipv6()))?);
    let (storage, len) = address::store(own);
    sys::quietly(|| sys::bind(udp.0, &storage, len))?;
    Ok(udp)
}

/// The program uses a connection for the first time.
pub fn begin(conn: &Arc<Conn>) {
    let (action, role, ends) = {
        let mut agreement = conn.agreement.lock();
        (agreement.used(Instant::now()), agreement.role(), agreement.ends())
    };
    {
        let mut held = service();
        if held.is_none() && !start(&mut held) {
            drop(held);
            return table::stay_tcp(conn, Why::NoRoom);
        }
        let Some(service) = &mut *held else { return };
        service.conns.insert(conn.key, Watched { conn: Arc::clone(conn), time: None });
        if !service.hear(conn, role, ends) {
            drop(held);
            return table::stay_tcp(conn, Why::NoRoom);
        }
        service.schedule(conn);
        sys::ring(service.bell);
    }
    act(conn, action.into_iter().collect());
}

/// A call has found something in what it received: the thread looks at it.
pub fn look_at(key: usize) {
    if let Some(service) = &mut *service() {
        service.todo.insert(key);
        sys::ring(service.bell);
    }
}

/// Nothing more is to be done for a connection.
pub fn forget(key: usize) {
    if let Some(service) = &mut *service() {
        service.drop_conn(key);
    }
}

/// The program has closed a connection before it was decided what becomes of it. What the peer sends on the
/// way there must not reset the connection, so it is received for a while.
pub fn let_die(conn: &Arc<Conn>) {
    let mut held = service();
    let Some(service) = &mut *held else { return };
    if service.conns.contains_key(&conn.key) {
        service.dying.insert(conn.key, (Arc::clone(conn), Instant::now() + DYING));
        service.todo.insert(conn.key);
        sys::ring(service.bell);
    }
}

/// The program has closed a connection that keeps bytes for a peer which has not said yet what becomes of it.
pub fn let_linger(conn: &Arc<Conn>) {
    let mut held = service();
    let Some(service) = &mut *held else { return };
    if service.conns.contains_key(&conn.key) {
        service.dying.insert(conn.key, (Arc::clone(conn), Instant::now() + LINGER));
        sys::ring(service.bell);
    }
}

/// The process ends: waits until those are gone, for a moment.
pub fn await_the_dying(limit: Duration) {
    let until = Instant::now() + limit;
    while Instant::now() < until && !all_may_go() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The process ends by exit(3). A connection that got a stand-in now would be closed by the kernel, with the
/// peer's marker unread: that resets it.
pub fn let_none_begin() {
    let _table = table::change();
    EXITS.store(true, Ordering::Release);
}

fn is_ending() -> bool {
    EXITS.load(Ordering::Acquire) || END.load(Ordering::Acquire) != END_OF_NOTHING
}

/// Whether the process may end as far as those are concerned. Once the peer's system has all, and the end
/// behind it, a reset takes nothing away any more.
fn all_may_go() -> bool {
    let held = service();
    let mut dying = held.iter().flat_map(|service| service.dying.values());
    dying.all(|(conn, _)| !conn.keeps() && sys::has_arrived(conn.tcp()))
}

/// The process ends without exit: the thread closes what is not decided. False: there is no thread. Takes no
/// lock.
pub fn ask_for_the_end() -> bool {
    let bell = BELL_RINGS.load(Ordering::Acquire);
    if bell >= 0 {
        let _ = END.compare_exchange(END_OF_NOTHING, END_ASKED, Ordering::AcqRel, Ordering::Acquire);
        sys::ring(bell);
    }
    bell >= 0
}

/// Waits until it has. Takes no lock.
pub fn await_the_end(until: Instant) {
    while END.load(Ordering::Acquire) != END_DONE && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// What the thread does about that.
fn end_if_asked() {
    if END.compare_exchange(END_ASKED, END_BEGUN, Ordering::AcqRel, Ordering::Acquire).is_ok() {
        let mut ended: Vec<c_int> = Vec::new();
        for (_, sock) in fds::all().unwrap_or_default() {
            // Streams are the engine's to end.
            let undecided = sock.conn().is_some_and(|conn| conn.stage() != Stage::Stream);
            if undecided && !ended.contains(&sock.number()) {
                ended.push(sock.number());
                sock.end_now();
            }
        }
    }
    if END.load(Ordering::Acquire) == END_BEGUN && all_may_go() {
        END.store(END_DONE, Ordering::Release);
    }
}

/// Before a fork.
pub fn before_fork() -> Held {
    service()
}

/// In a child: there is no thread.
pub fn in_child(mut held: Held) {
    BELL_RINGS.store(-1, Ordering::Release);
    END.store(END_OF_NOTHING, Ordering::Release);
    EXITS.store(false, Ordering::Release);
    kept::in_child();
    let service = held.take();
    drop(held);
    if let Some(service) = service {
        for fd in [service.epoll, service.bell] {
            fds::forget(fd);
            sys::close(fd);
        }
        for speaker in service.speakers.values() {
            fds::forget(*speaker);
            sys::close(*speaker);
        }
        side::in_child();
        service.conns.values().for_each(|watched| watched.conn.close_copy());
        std::mem::forget(service);
    }
}

impl Service {
    /// The connection with this key.
    pub fn find(&self, key: usize) -> Option<Arc<Conn>> {
        self.conns.get(&key).map(|watched| Arc::clone(&watched.conn))
    }

    fn schedule(&mut self, conn: &Conn) {
        let Some(watched) = self.conns.get_mut(&conn.key) else { return };
        let next = conn.agreement.lock().next();
        if let Some(before) = std::mem::replace(&mut watched.time, next) {
            self.times.remove(&(before, conn.key));
        }
        if let Some(next) = next {
            self.times.insert((next, conn.key));
        }
    }

    fn drop_conn(&mut self, key: usize) {
        self.todo.remove(&key);
        self.dying.remove(&key);
        if let Some(Watched { conn, time }) = self.conns.remove(&key) {
            if let Some(time) = time {
                self.times.remove(&(time, key));
            }
            self.hear_no_more(&conn);
            if conn.tcp() >= 0 {
                sys::epoll_delete(self.epoll, conn.tcp());
            }
        }
    }

    /// Datagrams of this connection come to the thread. False: there is no descriptor for it.
    fn hear(&mut self, conn: &Conn, role: Role, ends: Ends) -> bool {
        let data = conn.key as u64 * KINDS;
        if conn.is_near {
            return role == Role::Accepted || conn.side.lock().watch(self.epoll, data + NAME);
        }
        if role == Role::Connected {
            let udp = conn.udp.lock();
            let Some(udp) = &*udp else { return false };
            return sys::epoll_add(self.epoll, udp.0, libc::EPOLLIN as u32, data + UDP).is_ok();
        }
        let Some(speaker) = self.speaker(ends.accepted) else { return false };
        conn.speaker.store(speaker, Ordering::Release);
        self.accepted.insert(conn.agreement.lock().accepted(), conn.key);
        true
    }

    /// The UDP socket for connections that were accepted at this address. Those of one host must not use up
    /// the ports: each is the number of some connection.
    fn speaker(&mut self, own: SocketAddr) -> Option<c_int> {
        let mut own = own;
        own.set_port(0);
        if let Some(speaker) = self.speakers.get(&own) {
            return Some(*speaker);
        }
        let speaker = udp(own).ok()?;
        sys::report_refusals(speaker.0, own.is_ipv6());
        let data = SPEAKER | u64::from(speaker.0.cast_unsigned());
        sys::epoll_add(self.epoll, speaker.0, libc::EPOLLIN as u32, data).ok()?;
        // It lives as long as the process, or until a child closes its copy.
        let speaker = std::mem::ManuallyDrop::new(speaker).0;
        self.speakers.insert(own, speaker);
        Some(speaker)
    }

    fn hear_no_more(&mut self, conn: &Conn) {
        if conn.speaker.load(Ordering::Acquire) >= 0 {
            self.accepted.remove(&conn.agreement.lock().accepted());
        }
        let udp = conn.udp.lock().take();
        if let Some(udp) = udp {
            // A relative may have the same socket, so closing it is not enough.
            sys::epoll_delete(self.epoll, udp.0);
        }
        *conn.side.lock() = Side::default();
    }
}

fn start(held: &mut Held) -> bool {
    let (Ok(epoll), Ok(bell)) = (sys::quietly(sys::epoll), sys::quietly(sys::eventfd)) else { return false };
    let (epoll, bell) = (Own::new(epoll), Own::new(bell));
    if sys::epoll_add(epoll.0, bell.0, libc::EPOLLIN as u32, BELL).is_err() {
        return false;
    }
    // They live as long as the process, or until a child closes its copies.
    let (epoll, bell) = (std::mem::ManuallyDrop::new(epoll).0, std::mem::ManuallyDrop::new(bell).0);
    **held = Some(Service {
        conns: HashMap::new(),
        times: BTreeSet::new(),
        accepted: HashMap::new(),
        speakers: HashMap::new(),
        todo: HashSet::new(),
        dying: HashMap::new(),
        epoll,
        bell,
    });
    static ONCE: AtomicBool = AtomicBool::new(false);
    if said::is_wanted() && !ONCE.swap(true, Ordering::Relaxed) {
        extern "C" fn at_exit() {
            table::end();
        }
        // SAFETY: a function that lives as long as the process: this library is never unloaded.
        unsafe { libc::atexit(at_exit) };
    }
    // The program's handlers run in the program's threads.
    let before = sys::block_signals();
    let thread =
        std::thread::Builder::new().name("uwarp-upgrade".to_owned()).spawn(move || serve(epoll, bell));
    sys::unblock(&before);
    if thread.is_ok() {
        BELL_RINGS.store(bell, Ordering::Release);
    }
    thread.is_ok()
}

fn serve(epoll: c_int, bell: c_int) {
    loop {
        let next = service().as_ref().and_then(|service| {
            let time = service.times.first().map(|(time, _)| *time);
            time.into_iter().chain(service.dying.values().map(|(_, until)| *until)).min()
        });
        // Nothing tells of what the peer's system acknowledges.
        let ends = END.load(Ordering::Acquire) == END_BEGUN;
        let next = if ends { Some(Instant::now() + Duration::from_millis(1)) } else { next };
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 32];
        let got = sys::epoll_wait(epoll, &mut events, next);
        for event in events.iter().take(got) {
            let (bits, data) = (event.events, event.u64);
            if data == BELL {
                sys::take_ring(bell);
                continue;
            }
            if data & SPEAKER != 0 {
                hear_all((data & !SPEAKER) as c_int);
                continue;
            }
            let key = usize::try_from(data / KINDS).unwrap_or(0);
            let Some(conn) = service().as_ref().and_then(|service| service.find(key)) else {
                continue;
            };
            match data % KINDS {
                UDP => hear(&conn),
                TCP => ready(&conn, bits),
                _ => hear_aside(&conn, epoll),
            }
        }
        let (todo, due, dying) = {
            let mut held = service();
            let Some(service) = &mut *held else { return };
            let now = Instant::now();
            let due: Vec<usize> =
                service.times.iter().take_while(|(time, _)| *time <= now).map(|(_, key)| *key).collect();
            let dying: Vec<usize> = service.dying.keys().copied().collect();
            (std::mem::take(&mut service.todo), due, dying)
        };
        let find = |key: &usize| service().as_ref().and_then(|service| service.find(*key));
        for conn in todo.iter().filter_map(find) {
            examine(&conn);
        }
        for conn in due.iter().filter_map(find) {
            hear_postponed(&conn);
            let actions = conn.agreement.lock().timeout(Instant::now());
            act(&conn, actions);
        }
        for conn in dying.iter().filter_map(find) {
            bury(&conn);
        }
        end_if_asked();
    }
}

/// The kernel's socket has become ready.
fn ready(conn: &Arc<Conn>, bits: u32) {
    if bits & libc::EPOLLOUT as u32 != 0 {
        let mut outbound = conn.outbound.lock();
        if !outbound.unsent.is_empty() {
            conn.flush(&mut outbound);
        }
    }
    examine(conn);
}

/// Looks at what was received.
fn examine(conn: &Arc<Conn>) {
    hear_postponed(conn);
    let (found, end) = {
        let mut inbound = conn.inbound.lock();
        while inbound.is_looking() && conn.pull(&mut inbound) {}
        (inbound.found(), inbound.end())
    };
    let actions = match (found, end) {
        (Some(found), _) => conn.agreement.lock().found(found),
        (None, Some(_)) => conn.agreement.lock().ended(),
        (None, None) => Vec::new(),
    };
    act(conn, actions);
}

fn show(conn: &Conn) {
    let sock = conn.sock.lock().upgrade();
    if let Some(sock) = sock {
        sock.show(Because::Network);
    }
}

/// Does what the agreement says.
pub fn act(conn: &Arc<Conn>, actions: Vec<Action>) {
    let mut actions = VecDeque::from(actions);
    while let Some(action) = actions.pop_front() {
        match action {
            Action::Send(datagram) => actions.extend(send(conn, &datagram)),
            Action::Prepare(pattern) => {
                let done = prepare(conn, pattern);
                actions.extend(conn.agreement.lock().prepared(done, Instant::now()));
            }
            Action::Mark(own, word) => {
                let stage = if word == Word::Mark { Stage::Held } else { Stage::Behind };
                if !conn.mark(marker(&own, word), stage) {
                    actions.push_back(Action::Stay);
                }
            }
            Action::Respond(own) => {
                let free = conn.inbound.lock().behind() == 0;
                if free && join(conn, false) {
                    conn.mark(marker(&own, Word::Yes), Stage::Held);
                    watch(conn);
                } else {
                    conn.mark(marker(&own, Word::No), Stage::Behind);
                    actions.push_back(Action::Stay);
                }
            }
            Action::Initiate => {
                let free = conn.inbound.lock().behind() == 0;
                if free && join(conn, true) { watch(conn) } else { actions.push_back(Action::Break) }
            }
            Action::Stay => stay(conn),
            Action::Doubt => {
                conn.inbound.lock().be_hasty();
                conn.nudge();
            }
            Action::Break => {
                let (mut inbound, mut outbound) = (conn.inbound.lock(), conn.outbound.lock());
                inbound.finish(End::Failed(libc::ECONNRESET));
                sys::reset(conn.tcp());
                conn.forget_kept(&mut outbound);
                conn.enter(Stage::Behind);
                drop((inbound, outbound));
                conn.end_if_closed();
            }
        }
    }
    let deaf = conn.agreement.lock().is_deaf();
    if let Some(service) = &mut *service() {
        if deaf {
            service.hear_no_more(conn);
            let decided = matches!(conn.stage(), Stage::Tcp | Stage::Stream);
            if decided && !conn.keeps() && conn.outbound.lock().unsent.is_empty() {
                service.drop_conn(conn.key);
            }
        }
        service.schedule(conn);
    }
    show(conn);
}

/// The agreement has changed, and there is nothing to do.
pub fn reschedule(conn: &Conn) {
    if let Some(service) = &mut *service() {
        service.schedule(conn);
    }
}

/// The connection stays TCP.
fn stay(conn: &Arc<Conn>) {
    match conn.stage() {
        Stage::Direct => {
            let why = conn.agreement.lock().why();
            table::stay_tcp_in(&mut table::change(), conn, why);
            return;
        }
        // The program's call has decided that, while a stand-in was made.
        Stage::Tcp => return,
        _ => {}
    }
    let (mut inbound, mut outbound) = (conn.inbound.lock(), conn.outbound.lock());
    inbound.is_plain();
    let kept = outbound.kept.take();
    outbound.unsent.extend(kept);
    conn.keeps.store(false, Ordering::Release);
    // Also if it is there already: threads wait for what is behind a marker.
    conn.enter(Stage::Behind);
    let later = outbound.shut_later.take().filter(|how| *how != libc::SHUT_RD);
    let is_closed = conn.closed.load(Ordering::Acquire);
    if later.is_some() || is_closed {
        // (Who closed it while the stream was set up left that to this.)
        let _ = conn.end_sending(&mut outbound);
    } else {
        conn.flush(&mut outbound);
    }
    drop((inbound, outbound));
    let why = if is_closed { Why::Ended } else { conn.agreement.lock().why() };
    said::decided(conn, Some(why));
    let sock = conn.sock.lock().upgrade();
    if let Some(sock) = sock {
        if let Some(calls) = sock.calls() {
            calls.give_up(sock.number());
        }
        sock.restore_options(conn);
    }
    conn.end_if_closed();
}

/// Puts a stand-in in the place of the program's socket, with all that a stream needs behind it.
fn prepare(conn: &Arc<Conn>, pattern: Pattern) -> bool {
    let Some(calls) = rsockets::load().filter(|_| crate::watch::is_ready()) else { return false };
    let Ok(number) = life::new_rsocket(calls, false) else { return false };
    let replaced = replace(conn, calls, number, pattern);
    if !replaced {
        life::close_rsocket(calls, number);
    }
    replaced
}

/// Whether the program has asked for signals about this socket, which would go on for ever about what the
/// library reads, or for notices that its buffers are free.
fn uses_what_no_stream_has(fd: c_int) -> bool {
    let flags = sys::fcntl(fd, libc::F_GETFL, 0).unwrap_or(0);
    flags & libc::O_ASYNC != 0 || tells_of_buffers(fd)
}

/// The program waits for notices that its buffers are free (`MSG_ZEROCOPY`), and no stream gives any.
pub fn tells_of_buffers(fd: c_int) -> bool {
    sys::option(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY).unwrap_or(0) != 0
}

fn replace(conn: &Arc<Conn>, calls: &Rsockets, number: c_int, pattern: Pattern) -> bool {
    let mut table = table::change();
    if conn.stage() != Stage::Direct {
        return false;
    }
    let numbers = table::descriptors(&table, conn);
    let Some(first) = numbers.first().filter(|_| !is_ending()) else {
        conn.agreement.lock().cannot(Why::Ended);
        return false;
    };
    if uses_what_no_stream_has(*first) {
        conn.agreement.lock().cannot(Why::Vetoed);
        return false;
    }
    let Ok(tcp) = sys::second(*first) else { return false };
    fds::enter_own(tcp);
    let undo = || {
        fds::forget(tcp);
        sys::close(tcp);
        false
    };
    let initiates = c_int::from(conn.agreement.lock().role() == Role::Accepted);
    if let Err(errno) = calls.prepare(number, &take_over { fd: tcp, initiates }) {
        if errno == libc::EOPNOTSUPP {
            conn.agreement.lock().cannot(Why::OtherLink);
        }
        return undo();
    }
    let mut signals = Some(Signals::of(*first));
    let Ok((sock, end)) = Sock::in_front_of(calls, number, tcp, conn, numbers.len()) else { return undo() };
    let nonblocking = sock.is_nonblocking();
    if !conn.shared.lock().as_ref().is_none_or(table::Shared::commit) {
        sock.discard();
        sys::close(end);
        return undo();
    }
    conn.set_tcp(tcp);
    *conn.sock.lock() = Arc::downgrade(&sock);
    sys::set_option(tcp, libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1);
    // The end that accepted sends its marker next.
    let accepted = conn.agreement.lock().role() == Role::Accepted;
    conn.begin_to_look(pattern, if accepted { Stage::Held } else { Stage::Behind });
    for fd in numbers {
        let kept = sys::fcntl(fd, libc::F_GETFD, 0).unwrap_or(0) & libc::FD_CLOEXEC == 0;
        wait::change_file(fd, &sock, || {
            let _ = sys::replace(end, fd);
            if let Some(signals) = signals.take() {
                signals.give(fd);
            }
            fds::enter(fd, Arc::clone(&sock), kept);
        });
        if let Some(table) = &mut *table {
            table.remove(&fd);
        }
    }
    // The program may have changed it between the first look and the exchange.
    let now = sys::quietly(|| sys::fcntl(tcp, libc::F_GETFL, 0)).map(|flags| flags & libc::O_NONBLOCK != 0);
    if now.is_ok_and(|now| now != nonblocking) {
        sock.set_nonblocking(calls, !nonblocking);
    }
    sys::close(end);
    drop(table);
    if let Some(service) = &*service() {
        let events = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
        let _ = sys::epoll_add(service.epoll, tcp, events, conn.key as u64 * KINDS + TCP);
    }
    sock.show(Because::Call);
    true
}

/// Makes the stream.
fn join(conn: &Arc<Conn>, initiates: bool) -> bool {
    let (Some(calls), Some(sock)) = (rsockets::loaded(), conn.sock.lock().upgrade()) else { return false };
    let with = take_over { fd: conn.tcp(), initiates: c_int::from(initiates) };
    let joined = conn.begin_to_join() && calls.take_over(sock.number(), &with);
    if !joined {
        conn.joining.store(false, Ordering::Release);
    }
    joined
}

/// From now on changes of the stream come to the thread that watches sockets; the first is that it runs.
fn watch(conn: &Conn) {
    let sock = conn.sock.lock().upgrade();
    if let Some(sock) = sock {
        sock.follow_stream();
    }
}

/// Looks after a connection that the program has closed.
fn bury(conn: &Arc<Conn>) {
    let until = service().as_ref().and_then(|service| service.dying.get(&conn.key).map(|(_, until)| *until));
    let Some(until) = until else { return };
    if conn.keeps() {
        if Instant::now() >= until {
            sys::reset(conn.tcp());
            conn.forget_kept(&mut conn.outbound.lock());
            conn.end_if_closed();
        }
        return;
    }
    let gone = if conn.joining.load(Ordering::Acquire) {
        // The set-up of the stream has been given up.
        sys::take_all(conn.tcp());
        sys::has_arrived(conn.tcp()) || sys::ready_for(conn.tcp(), libc::POLLRDHUP) != 0
    } else {
        let mut inbound = conn.inbound.lock();
        while inbound.found().is_none() && conn.pull(&mut inbound) {}
        // Plain bytes that nobody will read: the kernel would reset the connection.
        let unread = !inbound.ready().is_empty();
        if unread {
            sys::reset(conn.tcp());
        }
        let over = unread || inbound.end().is_some() || inbound.found().is_some();
        let unsent = !conn.outbound.lock().unsent.is_empty();
        if unsent && !over && Instant::now() >= until {
            sys::reset(conn.tcp());
        }
        over && !unsent
    };
    if gone || Instant::now() >= until {
        forget(conn.key);
    }
}
