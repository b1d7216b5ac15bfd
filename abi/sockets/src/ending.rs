//! The end of the process. What a program has sent reaches its peer afterwards, as from the kernel's sockets:
//! by exit(3), by quick_exit(3) and by `_exit`. Nobody can do that for a process that a signal ends.
//!
//! The kernel ends all threads with `_exit`. Here the others live on until the peers have what was sent, so
//! their calls on sockets return no more ([`Pass`]): none of them sees an end of its connections that the
//! program has not seen, or ends the process with another status.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use uwarp_preload::real;

use crate::agree::{kept, service};
use crate::rsockets::Rsockets;
use crate::sock::Sock;
use crate::{fds, process, relay, sys};

/// How long the end of a process may wait for connections that are closed while it is decided what becomes of
/// them.
const LIMIT: Duration = Duration::from_secs(1);

/// The library's function for `_exit`, once there is a socket of it.
static LAST_WORDS: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

/// The thread that ends the process without exit(3); 0: none.
static ENDS: AtomicI32 = AtomicI32::new(0);

/// Until it is dropped, the thread is in a call of the program's. If another thread ends the process without
/// exit(3) before, the call does not return. The thread must have no lock when this begins, and when it is
/// dropped.
pub struct Pass(());

impl Pass {
    /// The call begins.
    #[inline]
    pub fn begin() -> Self {
        stop_at_the_end();
        Self(())
    }
}

impl Drop for Pass {
    #[inline]
    fn drop(&mut self) {
        stop_at_the_end();
    }
}

/// Sleeps for ever if another thread ends the process without exit(3). The caller has no lock.
#[inline]
pub fn stop_at_the_end() {
    if ENDS.load(Ordering::Acquire) != 0 {
        stop();
    }
}

#[cold]
fn stop() {
    // A child has a copy, or its parent's memory.
    if process::is_child() || ENDS.load(Ordering::Acquire) == sys::thread() {
        return;
    }
    be_left_alone();
    loop {
        sys::sleep();
    }
}

/// From now on neither a handler of the program's nor its pthread_cancel(3) interrupts this thread.
fn be_left_alone() {
    unsafe extern "C" {
        fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
    }
    const PTHREAD_CANCEL_DISABLE: c_int = 1;
    sys::block_signals();
    // SAFETY: the state before is not asked for.
    unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, std::ptr::null_mut()) };
}

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
    stop_at_the_end();
    service::let_none_begin();
    kept::await_none(LIMIT);
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
/// three seconds, if a peer takes nothing. Other threads' calls do not return meanwhile.
extern "C" fn without_exit() {
    if LAST_WORDS.load(Ordering::Acquire).is_null() || process::is_child() {
        return;
    }
    // The first status counts.
    let _ = ENDS.compare_exchange(0, sys::thread(), Ordering::AcqRel, Ordering::Acquire);
    stop_at_the_end();
    be_left_alone();
    // Streams end below, so it has to be in them before.
    kept::await_none(LIMIT);
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
            // Not libc's function: to look it up is nothing for the handler of a signal.
            end(status)
        }
    )*};
}

exits! { _exit _Exit }

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn exit(status: c_int) -> ! {
    // Before handlers of the program run.
    stop_at_the_end();
    real!(exit(status: c_int) -> ());
    end(status)
}

fn end(status: c_int) -> ! {
    loop {
        // SAFETY: a number.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}
