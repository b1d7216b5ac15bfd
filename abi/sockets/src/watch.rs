//! Keeps stand-ins current. What changes a socket that the program waits for is noted here; the thread that
//! has served the network shows it then ([`settle`]). For changes that other threads note, there is one
//! thread, which sleeps until there are any.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use uwarp_process::Mutex;

use crate::sock::Sock;
use crate::{event_loop, fds, sys};

/// Sockets by key. Keys are used again: a late change of a socket that is closed looks at another one, which
/// does no harm.
struct Socks {
    by_key: Vec<Option<Weak<Sock>>>,
    free: Vec<usize>,
}

static SOCKS: Mutex<Socks, 29> = Mutex::new(Socks { by_key: Vec::new(), free: Vec::new() });

/// Keys of sockets that have changed.
struct Changed {
    /// Any thread shows them.
    shown: Vec<usize>,
    /// Those are this module's thread's: more than showing has to be done.
    joining: Vec<usize>,
    /// The thread has been woken and has not looked yet.
    rung: bool,
}

static CHANGED: Mutex<Changed, 29> =
    Mutex::new(Changed { shown: Vec::new(), joining: Vec::new(), rung: false });
/// Wakes the thread.
static BELL: AtomicI32 = AtomicI32::new(-1);
/// How many sockets are followed.
static FOLLOWED: AtomicUsize = AtomicUsize::new(0);

/// The program waits for it: the stand-in is shown.
const SHOWN: u8 = 1;
/// Its stream is being set up.
const JOINING: u8 = 2;
/// It is in the list of those that have changed.
const QUEUED: u8 = 4;

const MOST: usize = 1 << 20;
/// What each key's changes are wanted for. In the data section without content, as in [`fds`].
static WANTED: [AtomicU8; MOST] = [const { AtomicU8::new(0) }; MOST];

thread_local! {
    /// The key of the socket that the calling thread has called, and will show when the call is over.
    static CALLED: Cell<usize> = const { Cell::new(0) };
}

/// Until it is dropped, the calling thread's own changes of this socket are not noted.
pub struct Calling(());

impl Calling {
    /// For a call that does not wait.
    pub fn begin(key: usize) -> Self {
        CALLED.with(|called| called.set(key));
        Self(())
    }
}

impl Drop for Calling {
    fn drop(&mut self) {
        CALLED.with(|called| called.set(0));
    }
}

/// Called by the library with locks held. `later`: the thread calls [`settle`] soon.
extern "C" fn changed(key: usize, later: c_int) {
    let Some(wanted) = WANTED.get(key) else { return };
    let now = wanted.load(Ordering::SeqCst);
    // Nobody waits: a program that blocks in recv.
    if now & (SHOWN | JOINING) == 0 {
        return;
    }
    let joining = now & JOINING != 0;
    if later == 0 && !joining && CALLED.with(Cell::get) == key {
        return;
    }
    let mut changed = CHANGED.lock();
    if wanted.fetch_or(QUEUED, Ordering::SeqCst) & QUEUED == 0 {
        let list = if joining { &mut changed.joining } else { &mut changed.shown };
        list.push(key);
    }
    // A key that is queued already was perhaps noted by a thread that settles, but later than this one must
    // know.
    if (later == 0 || joining) && !std::mem::replace(&mut changed.rung, true) {
        drop(changed);
        sys::ring(BELL.load(Ordering::Relaxed));
    }
}

/// Whether the thread runs, or can be started. Asked before both ends of a connection agree on a stream:
/// afterwards nobody would see that it has been set up.
pub fn is_ready() -> bool {
    let _socks = SOCKS.lock();
    BELL.load(Ordering::Relaxed) >= 0 || start()
}

/// From now on what becomes of the socket is shown. False: there is no thread for it.
pub fn begin(sock: &Arc<Sock>) -> bool {
    let Some(calls) = sock.calls() else { return false };
    let key = {
        let mut socks = SOCKS.lock();
        if BELL.load(Ordering::Relaxed) < 0 && !start() {
            return false;
        }
        let key = match socks.free.pop() {
            Some(key) => key,
            // 0 is no key.
            None => {
                let key = socks.by_key.len().max(1);
                socks.by_key.resize(key + 1, None);
                key
            }
        };
        let Some(wanted) = WANTED.get(key) else {
            socks.free.push(key);
            return false;
        };
        wanted.store(if sock.conn().is_some() { JOINING } else { 0 }, Ordering::SeqCst);
        if let Some(place) = socks.by_key.get_mut(key) {
            *place = Some(Arc::downgrade(sock));
        }
        key
    };
    FOLLOWED.fetch_add(1, Ordering::Relaxed);
    sock.set_key(key);
    if sock.is_watched() {
        want(key);
    }
    event_loop::begin(calls, sock.number());
    calls.watch(sock.number(), changed, key, settle)
}

/// The program waits for the socket with this key.
pub fn want(key: usize) {
    if let Some(wanted) = WANTED.get(key).filter(|_| key != 0) {
        wanted.fetch_or(SHOWN, Ordering::SeqCst);
    }
}

/// The socket's stream is set up.
pub fn joined(key: usize) {
    if let Some(wanted) = WANTED.get(key).filter(|wanted| wanted.load(Ordering::Relaxed) & JOINING != 0) {
        wanted.fetch_and(!JOINING, Ordering::SeqCst);
    }
}

/// The socket is closed.
pub fn end(key: usize) {
    let mut socks = SOCKS.lock();
    if let Some(place) = socks.by_key.get_mut(key)
        && place.take().is_some()
    {
        socks.free.push(key);
        FOLLOWED.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether any socket is followed.
#[inline]
pub fn any() -> bool {
    FOLLOWED.load(Ordering::Relaxed) != 0
}

/// Shows what has changed. The calling thread holds no lock.
pub extern "C" fn settle() {
    let keys = {
        let mut changed = CHANGED.lock();
        if changed.shown.is_empty() {
            return;
        }
        std::mem::take(&mut changed.shown)
    };
    show(&keys);
}

fn show(keys: &[usize]) {
    for key in keys {
        if let Some(wanted) = WANTED.get(*key) {
            wanted.fetch_and(!QUEUED, Ordering::SeqCst);
        }
        let sock = SOCKS.lock().by_key.get(*key).and_then(|sock| sock.as_ref()?.upgrade());
        if let Some(sock) = sock {
            sock.changed();
        }
    }
}

fn start() -> bool {
    let Ok(bell) = sys::eventfd() else { return false };
    let bell = match sys::second(bell) {
        Ok(moved) => {
            sys::close(bell);
            moved
        }
        Err(_) => bell,
    };
    fds::enter_own(bell);
    BELL.store(bell, Ordering::Relaxed);
    // The program's handlers run in the program's threads.
    let before = sys::block_signals();
    let thread = std::thread::Builder::new().name("uwarp-sockets".to_owned()).spawn(move || serve(bell));
    sys::unblock(&before);
    thread.is_ok()
}

fn serve(bell: c_int) {
    loop {
        sys::await_ring(bell);
        let (shown, joining) = {
            let mut changed = CHANGED.lock();
            changed.rung = false;
            (std::mem::take(&mut changed.shown), std::mem::take(&mut changed.joining))
        };
        show(&joining);
        show(&shown);
    }
}
