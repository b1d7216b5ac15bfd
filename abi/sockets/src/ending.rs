//! The end of the process. What a program has sent reaches its peer afterwards, as from the kernel's sockets:
//! by exit(3), by quick_exit(3) and by `_exit`. Nobody can do that for a process that a signal ends.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use crate::agree::service;
use crate::rsockets::Rsockets;
use crate::sock::Sock;
use crate::{fds, process, relay, sys};

/// How long the end of a process may wait for connections that are closed while it is decided what becomes of
/// them.
const LIMIT: Duration = Duration::from_secs(1);

/// The library's function for `_exit`, once there is a socket of it.
static LAST_WORDS: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

/// There is a socket of the library: from now on what is sent reaches its peer also if the program ends
/// without closing.
pub fn in_order(calls: &Rsockets, socket: c_int) {
    static ONCE: AtomicBool = AtomicBool::new(false);
    unsafe extern "C" {
        fn at_quick_exit(function: extern "C" fn()) -> c_int;
    }
    if let Some(function) = calls.last_words(socket).filter(|_| !ONCE.swap(true, Ordering::Relaxed)) {
        LAST_WORDS.store(function as *mut (), Ordering::Release);
        // Behind the library's own handler, so that ours runs before it: that one ends all streams.
        // SAFETY: functions that live as long as the process: this library is never unloaded.
        unsafe {
            libc::atexit(at_exit);
            at_quick_exit(without_exit);
        }
    }
}

extern "C" fn at_exit() {
    if process::is_child() {
        return;
    }
    service::let_none_begin();
    let mut socks: Vec<Arc<Sock>> = Vec::new();
    for (fd, sock) in fds::all().unwrap_or_default() {
        if sock.is_handed() {
            // Whether another process has it, too, is seen when this one has not.
            fds::remove(fd);
            sys::close(fd);
        } else if !socks.iter().any(|other| other.number() == sock.number()) {
            socks.push(sock);
        }
    }
    let (upgraded, others): (Vec<_>, Vec<_>) = socks.into_iter().partition(|sock| sock.conn().is_some());
    upgraded.iter().for_each(|sock| sock.end_now());
    relay::end_all(LIMIT);
    service::await_the_dying(LIMIT);
    // To close an rsocket waits for its peer, up to 20 seconds for each; this is shorter, and is for all.
    last_words();
    others.iter().for_each(|sock| sock.end_now());
}

/// Sends what is sent, and ends streams.
fn last_words() {
    let function = LAST_WORDS.load(Ordering::Acquire);
    if !function.is_null() {
        // SAFETY: what `in_order` has stored.
        unsafe { std::mem::transmute::<*mut (), extern "C" fn()>(function)() };
    }
}

/// The process is about to end by `_exit`: possibly in the handler of a signal that has interrupted anything,
/// in a child of vfork(2), or in any thread. So this only asks other threads, and waits for a moment: about
/// three seconds, if a peer takes nothing.
extern "C" fn without_exit() {
    if LAST_WORDS.load(Ordering::Acquire).is_null() || process::is_child() {
        return;
    }
    let asked = service::ask_for_the_end();
    last_words();
    if asked {
        service::await_the_end(Instant::now() + LIMIT);
    }
}

macro_rules! exits {
    ($($name:ident)*) => {$(
        // Reason: a name of C.
        #[allow(non_snake_case)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(status: c_int) -> ! {
            without_exit();
            loop {
                // Not libc's function: to look it up is nothing for the handler of a signal.
                // SAFETY: a number.
                unsafe { libc::syscall(libc::SYS_exit_group, status) };
            }
        }
    )*};
}

exits! { _exit _Exit }
