//! Keeps stand-ins current: one thread for all of them. It sleeps until a socket that the program waits for
//! has changed.

use std::collections::{HashMap, HashSet};
use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::sock::Sock;
use crate::{fds, sys};

static SOCKS: Mutex<Option<HashMap<usize, Weak<Sock>>>> = Mutex::new(None);
/// Keys of sockets that have changed.
static CHANGED: Mutex<Option<HashSet<usize>>> = Mutex::new(None);
/// Wakes the thread.
static BELL: AtomicI32 = AtomicI32::new(-1);
static NEXT_KEY: AtomicUsize = AtomicUsize::new(1);

/// Called by the library with locks held.
extern "C" fn changed(key: usize) {
    let mut changed = CHANGED.lock();
    let changed = changed.get_or_insert_default();
    let first = changed.is_empty();
    changed.insert(key);
    if first {
        sys::ring(BELL.load(Ordering::Relaxed));
    }
}

/// From now on the thread shows what becomes of the socket. False: there is no thread.
pub fn begin(sock: &Arc<Sock>) -> bool {
    let key = NEXT_KEY.fetch_add(1, Ordering::Relaxed);
    {
        let mut socks = SOCKS.lock();
        if BELL.load(Ordering::Relaxed) < 0 && !start() {
            return false;
        }
        socks.get_or_insert_default().insert(key, Arc::downgrade(sock));
    }
    sock.set_key(key);
    sock.calls().is_some_and(|calls| calls.watch(sock.number(), changed, key))
}

/// The socket is closed.
pub fn end(key: usize) {
    if let Some(socks) = &mut *SOCKS.lock() {
        socks.remove(&key);
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
        let keys = CHANGED.lock().take().unwrap_or_default();
        for key in keys {
            let sock = SOCKS.lock().as_ref().and_then(|socks| socks.get(&key)?.upgrade());
            if let Some(sock) = sock {
                sock.changed();
            }
        }
    }
}
