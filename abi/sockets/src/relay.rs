//! Connections that other processes have, too: children that were forked, or started, with a descriptor.
//!
//! The device is this process's. So a thread carries bytes between the connection and the stand-in's pair,
//! which is a pair of sockets like any other from then on. This process uses the pair, too: the kernel keeps
//! the bytes of all in order. It lasts until nobody has the program's end any more, or this process ends.
//!
//! A child asks for it before it uses a descriptor or hands it on (`dup2`), in memory that it shares with its
//! parent: until then the pair has bytes that mean something else.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use uwarp_process::{Mutex, MutexGuard};

use crate::agree::conn::Own as Descriptor;
use crate::sock::Sock;
use crate::stand_in::Far;
use crate::{fds, process, sys};

/// How long a child waits for its parent. It is a matter of microseconds, unless the parent is gone.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes that are carried at once.
const BLOCK: usize = 65536;
/// And how often, before another connection's turn.
const TURNS: usize = 16;

/// Wakes the thread; -1: there is none.
static BELL: AtomicI32 = AtomicI32::new(-1);
/// The process that the thread is of.
static PROCESS: AtomicI32 = AtomicI32::new(0);
/// What the thread does not have yet.
static NEW: Mutex<Vec<Relay>, 29> = Mutex::new(Vec::new());
/// Connections that are carried.
static CARRIED: AtomicUsize = AtomicUsize::new(0);

/// Shared memory, in which a child asks. Each connection has a word: how often the word has had another
/// owner, and in the last two bits what is asked of this one.
pub struct Word {
    at: &'static AtomicU32,
    owner: u32,
}

const NOTHING: u32 = 0;
const ASKED: u32 = 1;
const DONE: u32 = 2;
const REFUSED: u32 = 3;
const STATE: u32 = 3;

/// Words that no connection has, and the other ends of pairs that are carried.
pub struct Own {
    words: Vec<&'static AtomicU32>,
    fars: Vec<c_int>,
}

static OWN: Mutex<Own, 28> = Mutex::new(Own { words: Vec::new(), fars: Vec::new() });
/// Held while the thread is started.
static STARTING: Mutex<(), 8> = Mutex::new(());

/// What a fork holds.
pub type Held =
    (MutexGuard<'static, (), 8>, MutexGuard<'static, Own, 28>, MutexGuard<'static, Vec<Relay>, 29>);

/// Before a fork.
pub fn before_fork() -> Held {
    (STARTING.lock(), OWN.lock(), NEW.lock())
}

/// In a child: there is no thread, and its parent's connections are its parent's.
pub fn in_child((starting, mut own, mut new): Held) {
    own.words.clear();
    let fars = std::mem::take(&mut own.fars);
    // Their descriptors are closed.
    std::mem::take(&mut *new).into_iter().for_each(std::mem::forget);
    drop((new, own, starting));
    for far in fars {
        fds::forget(far);
        sys::close(far);
    }
    PROCESS.store(0, Ordering::Release);
    CARRIED.store(0, Ordering::Release);
    END.store(0, Ordering::Release);
}

impl Word {
    /// A word for a new connection. `None`: no memory.
    pub fn new() -> Option<Self> {
        const BYTES: usize = 4096;
        let free = &mut OWN.lock().words;
        if free.is_empty() {
            let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
            // SAFETY: new memory, at an address of the system's choice.
            let page = unsafe { libc::mmap(std::ptr::null_mut(), BYTES, access, kind, -1, 0) };
            if page == libc::MAP_FAILED {
                return None;
            }
            // SAFETY: the page is never unmapped, and zeros are values.
            free.extend((0..BYTES / 4).map(|at| unsafe { &*page.cast::<AtomicU32>().add(at) }));
        }
        let at = free.pop()?;
        Some(Self { at, owner: at.load(Ordering::Acquire) & !STATE })
    }

    /// Whether a child asks.
    fn is_asked(&self) -> bool {
        self.at.load(Ordering::Acquire) == self.owner | ASKED
    }

    /// Answers, now or in advance.
    pub fn answer(&self, done: bool) {
        self.at.store(self.owner | if done { DONE } else { REFUSED }, Ordering::Release);
    }

    /// In a child: asks, and waits for the answer.
    fn ask(&self) -> bool {
        let asked = (self.owner | NOTHING, self.owner | ASKED);
        let _ = self.at.compare_exchange(asked.0, asked.1, Ordering::AcqRel, Ordering::Acquire);
        let until = Instant::now() + PATIENCE;
        loop {
            let word = self.at.load(Ordering::Acquire);
            if word != asked.1 {
                return word == self.owner | DONE;
            }
            if BELL.load(Ordering::Acquire) < 0 || Instant::now() >= until {
                return false;
            }
            sys::ring(BELL.load(Ordering::Acquire));
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        // A child's copy is not the owner.
        if !process::is_child() {
            self.at.store(self.owner.wrapping_add(STATE + 1), Ordering::Release);
            OWN.lock().words.push(self.at);
        }
    }
}

/// In a child: this descriptor is one of a connection of its parent. True: from now on it is like any other.
pub fn ask_for(fd: c_int) -> bool {
    sys::quietly(|| {
        let forked = process::is_forked();
        let Some(sock) = (if forked { fds::find_now(fd) } else { fds::find(fd) }) else { return false };
        let done = sock.word().is_some_and(Word::ask);
        if done && forked {
            if fds::is_kept(fd) {
                let _ = sys::fcntl(fd, libc::F_SETFD, 0);
            }
            fds::forget(fd);
        }
        done
    })
}

/// Before a fork, or before a program is started: children may ask from now on.
pub fn before_children() {
    if fds::any_ruled() && !process::is_child() {
        start();
    }
}

/// Starts the thread, if there is none. False: it cannot be started.
pub fn start() -> bool {
    let _one = STARTING.lock();
    if PROCESS.load(Ordering::Acquire) == sys::pid() {
        return true;
    }
    let (Ok(epoll), Ok(bell)) = (sys::quietly(sys::epoll), sys::quietly(sys::eventfd)) else { return false };
    // They live as long as the process.
    let of_process = |fd: c_int| std::mem::ManuallyDrop::new(Descriptor::new(fd)).0;
    let (epoll, bell) = (of_process(epoll), of_process(bell));
    let _ = sys::epoll_add(epoll, bell, libc::EPOLLIN as u32, 0);
    // The program's handlers run in the program's threads.
    let before = sys::block_signals();
    let thread = std::thread::Builder::new().name("uwarp-relay".to_owned()).spawn(move || serve(epoll, bell));
    sys::unblock(&before);
    if thread.is_ok() {
        BELL.store(bell, Ordering::Release);
        PROCESS.store(sys::pid(), Ordering::Release);
    }
    thread.is_ok()
}

/// A connection that is carried has changed.
pub fn kick() {
    sys::ring(BELL.load(Ordering::Acquire));
}

/// From now on this connection is carried. The thread runs.
pub fn begin(sock: &Arc<Sock>, far: Far) {
    CARRIED.fetch_add(1, Ordering::AcqRel);
    OWN.lock().fars.push(far.fd);
    NEW.lock().push(Relay {
        sock: Arc::clone(sock),
        far,
        out: Vec::new(),
        into: Vec::new(),
        out_ended: false,
        into_ended: false,
        told: false,
    });
    kick();
}

/// The process ends: waits for a moment until nobody has those connections any more.
pub fn end_all(limit: Duration) {
    let until = Instant::now() + limit;
    while CARRIED.load(Ordering::Acquire) > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    END.store(1, Ordering::Release);
    kick();
    let until = Instant::now() + limit;
    while CARRIED.load(Ordering::Acquire) > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Not 0: the process ends, and what other processes still have is reset.
static END: AtomicU32 = AtomicU32::new(0);

/// A connection that is carried.
pub struct Relay {
    sock: Arc<Sock>,
    far: Far,
    /// From the pair, for the peer.
    out: Vec<u8>,
    /// From the peer, for the pair.
    into: Vec<u8>,
    out_ended: bool,
    into_ended: bool,
    /// The peer has been told of the end.
    told: bool,
}

impl Relay {
    /// Carries what can be carried now. False: it is over.
    fn carry(&mut self) -> bool {
        for _ in 0..TURNS {
            let gone = self.far.is_alone();
            let lives = self.carry_out() && (gone || self.carry_in());
            if !lives || (gone && self.out_ended && self.out.is_empty()) {
                return false;
            }
            // What has come meanwhile is not reported any more.
            let ready = self.sock.look_next();
            let more = ready & libc::POLLIN != 0 && self.into.is_empty() && !self.into_ended && !gone;
            if !more && (ready & libc::POLLOUT == 0 || self.out.is_empty()) {
                return true;
            }
        }
        kick();
        true
    }

    /// What others write. False: nobody can be sent anything.
    fn carry_out(&mut self) -> bool {
        loop {
            if self.out.is_empty() && !self.out_ended {
                let mut block = [0; BLOCK];
                match sys::receive_now(self.far.fd, &mut block) {
                    Ok(0) => self.out_ended = true,
                    Ok(len) => self.out.extend_from_slice(block.get(..len).unwrap_or_default()),
                    Err(libc::EINTR) => continue,
                    Err(libc::EAGAIN) => return true,
                    // Somebody has closed it with bytes unread, as a connection of TCP that resets.
                    Err(_) => self.out_ended = true,
                }
            }
            if self.out.is_empty() {
                if !std::mem::replace(&mut self.told, true) {
                    self.sock.end_direction();
                }
                return true;
            }
            match self.sock.carry_out(&self.out) {
                Ok(sent) => drop(self.out.drain(..sent)),
                Err(libc::EAGAIN) => return true,
                Err(libc::EINTR) => {}
                Err(_) => return false,
            }
        }
    }

    /// What the peer sends. False: the connection has failed.
    fn carry_in(&mut self) -> bool {
        while !self.into_ended {
            if self.into.is_empty() {
                let mut block = [0; BLOCK];
                match self.sock.carry_in(&mut block) {
                    Ok(0) => {
                        self.into_ended = true;
                        sys::shut(self.far.fd, libc::SHUT_WR);
                        break;
                    }
                    Ok(len) => self.into.extend_from_slice(block.get(..len).unwrap_or_default()),
                    Err(libc::EAGAIN) => break,
                    Err(libc::EINTR) => continue,
                    Err(_) => return false,
                }
            }
            match sys::send_now(self.far.fd, &self.into) {
                Ok(sent) => drop(self.into.drain(..sent)),
                Err(libc::EAGAIN) => break,
                // Nobody reads it any more.
                Err(_) => self.into_ended = true,
            }
        }
        true
    }

    /// It is over, or the process ends.
    fn end(self) {
        let others = !self.far.is_alone();
        let whole = self.out_ended && self.out.is_empty();
        let unsent = END.load(Ordering::Acquire) != 0 && others && !whole;
        self.sock.end_carried(self.far.foreign || unsent);
        OWN.lock().fars.retain(|far| *far != self.far.fd);
        CARRIED.fetch_sub(1, Ordering::AcqRel);
    }
}

fn serve(epoll: c_int, bell: c_int) {
    let mut relays: Vec<Relay> = Vec::new();
    loop {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        sys::epoll_wait(epoll, &mut events, None);
        sys::take_ring(bell);
        for (_, sock) in fds::all().unwrap_or_default() {
            if sock.word().is_some_and(Word::is_asked) {
                sock.hand_over();
            }
        }
        let new = std::mem::take(&mut *NEW.lock());
        for relay in new {
            let events = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
            let _ = sys::epoll_add(epoll, relay.far.fd, events, 1);
            relays.push(relay);
        }
        let ends = END.load(Ordering::Acquire) != 0;
        for relay in std::mem::take(&mut relays) {
            let mut relay = relay;
            if relay.carry() && !ends { relays.push(relay) } else { relay.end() }
        }
    }
}
