//! Connections that the program has closed, and that other processes still have open: children that have been
//! forked, or started, with a descriptor. Their bytes cannot be sent. If one writes some, the connection is
//! reset; else it ends with the last descriptor, as TCP's does.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::sock::Sock;
use crate::stand_in::Left;
use crate::sys;

/// All of them.
static WAITING: Mutex<Vec<Arc<Sock>>> = Mutex::new(Vec::new());

fn waiting() -> std::sync::MutexGuard<'static, Vec<Arc<Sock>>> {
    WAITING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes it out; false: it is not there any more.
fn take(sock: &Arc<Sock>) -> bool {
    let mut waiting = waiting();
    let at = waiting.iter().position(|other| Arc::ptr_eq(other, sock));
    at.map(|at| waiting.swap_remove(at)).is_some()
}

/// Waits, in a thread, and ends the connection.
pub fn begin(sock: &Arc<Sock>, left: Left) {
    waiting().push(Arc::clone(sock));
    let of_thread = Arc::clone(sock);
    // The program's handlers run in the program's threads.
    let before = sys::block_signals();
    let thread = std::thread::Builder::new().name("uwarp-left".to_owned()).spawn(move || {
        left.wait();
        if take(&of_thread) {
            of_thread.end_left(left);
        }
    });
    sys::unblock(&before);
    if thread.is_err() && take(sock) {
        sock.end();
    }
}

/// The process ends: waits for a moment, and ends what is left.
pub fn end_all(limit: Duration) {
    let until = Instant::now() + limit;
    while Instant::now() < until && !waiting().is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let left = std::mem::take(&mut *waiting());
    left.iter().for_each(|sock| sock.end_now());
}
