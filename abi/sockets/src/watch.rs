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
/// does no harm. Nothing else may be said of a key by a socket that does not have it any more.
struct Keys<T> {
    by_key: Vec<Option<Weak<T>>>,
    free: Vec<usize>,
}

impl<T> Keys<T> {
    const fn new() -> Self {
        Self { by_key: Vec::new(), free: Vec::new() }
    }

    fn take(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            // 0 is no key.
            let key = self.by_key.len().max(1);
            self.by_key.resize(key + 1, None);
            key
        })
    }

    fn set(&mut self, key: usize, sock: &Arc<T>) {
        if let Some(place) = self.by_key.get_mut(key) {
            *place = Some(Arc::downgrade(sock));
        }
    }

    fn find(&self, key: usize) -> Option<Arc<T>> {
        self.by_key.get(key)?.as_ref()?.upgrade()
    }

    /// Whether this key is this socket's.
    fn is_of(&self, key: usize, sock: &T) -> bool {
        let known = self.by_key.get(key).and_then(Option::as_ref);
        known.is_some_and(|known| std::ptr::eq(known.as_ptr(), sock))
    }

    /// False: it is not this socket's.
    fn give(&mut self, key: usize, sock: &T) -> bool {
        let had = self.is_of(key, sock);
        if had && let Some(place) = self.by_key.get_mut(key) {
            *place = None;
            self.free.push(key);
        }
        had
    }
}

static SOCKS: Mutex<Keys<Sock>, 29> = Mutex::new(Keys::new());

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
        let key = socks.take();
        socks.set(key, sock);
        let Some(wanted) = WANTED.get(key) else {
            socks.give(key, sock);
            return false;
        };
        wanted.store(if sock.conn().is_some() { JOINING } else { 0 }, Ordering::SeqCst);
        key
    };
    FOLLOWED.fetch_add(1, Ordering::Relaxed);
    sock.set_key(key);
    if sock.is_watched() {
        want(key);
    }
    event_loop::begin(calls, sock.number());
    let followed = calls.watch(sock.number(), changed, key, settle);
    // The program may have closed it before the key was known.
    if !followed || sock.has_ended() {
        end(key, sock);
        return false;
    }
    true
}

/// The program waits for the socket with this key.
pub fn want(key: usize) {
    if let Some(wanted) = WANTED.get(key).filter(|_| key != 0) {
        wanted.fetch_or(SHOWN, Ordering::SeqCst);
    }
}

/// The stream of this socket, which has had this key, is set up.
pub fn joined(key: usize, sock: &Sock) {
    if let Some(wanted) = WANTED.get(key).filter(|wanted| wanted.load(Ordering::Relaxed) & JOINING != 0) {
        // The program may have closed it meanwhile, and the next one has the key and waits for its stream.
        let socks = SOCKS.lock();
        if socks.is_of(key, sock) {
            wanted.fetch_and(!JOINING, Ordering::SeqCst);
        }
    }
}

/// This socket, which has had this key, is closed.
pub fn end(key: usize, sock: &Sock) {
    if SOCKS.lock().give(key, sock) {
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
        let sock = SOCKS.lock().find(*key);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A look at a socket that was closed meanwhile took the next one, which had its key and waited for its
    /// stream, for one whose stream was set up: nobody ever said that it was.
    #[test]
    fn a_key_is_the_last_one_s_that_has_taken_it() {
        let (before, after) = (Arc::new(1), Arc::new(2));
        let mut keys = Keys::new();
        let key = keys.take();
        keys.set(key, &before);
        assert!(key > 0 && keys.is_of(key, &before) && keys.give(key, &before));
        assert_eq!(keys.take(), key);
        keys.set(key, &after);
        assert!(keys.is_of(key, &after) && !keys.is_of(key, &before) && !keys.give(key, &before));
        assert_eq!(keys.find(key).as_deref(), Some(&2));
        assert!(!keys.is_of(0, &after) && !keys.is_of(key + 1, &after) && keys.take() > key);
    }
}
