//! Forks, signals and descriptors by number: what needs the system's C interface.

// Reason: handlers for fork, signal masks, and descriptors that are known by number.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::c_int;
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU32, Ordering};
use std::sync::{LazyLock, Once};

use parking_lot::Mutex;

use crate::linger;
use crate::nic::NIC;

static FORKED: AtomicBool = AtomicBool::new(false);
/// See [`generation`].
static GENERATION: AtomicU32 = AtomicU32::new(0);
/// Objects that the program has, and calls under way; see [`object_made`].
static OBJECTS: AtomicIsize = AtomicIsize::new(0);
/// Descriptors that a forked child has to close. Locked over a fork.
static DESCRIPTORS: LazyLock<Mutex<HashSet<RawFd>>> = LazyLock::new(Mutex::default);

/// Whether the program has more rights than whoever started it (setuid, setgid, file capabilities), so that its environment
/// is not to be believed where it names files.
pub fn has_more_rights_than_its_caller() -> bool {
    // SAFETY: no pointers.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Whether this process is a child forked while the program had something open. Its queue pairs are its parent's.
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Changes in a child that was forked while the program had nothing open: it begins afresh, and what an earlier generation kept
/// for itself (the device, the connection manager) is not used any more.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// The program was given an object of ours, or has begun a call, until [`object_gone`]. A child that is forked meanwhile has no device.
pub fn object_made() {
    OBJECTS.fetch_add(1, Ordering::Relaxed);
}

/// The program has given an object back, or the call has ended; or it is one that we keep for ourselves.
pub fn object_gone() {
    OBJECTS.fetch_sub(1, Ordering::Relaxed);
}

/// Installs the handlers, once.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        LazyLock::force(&DESCRIPTORS);
        // SAFETY: the handlers are functions of this object, which is never unloaded (linked with -z nodelete).
        let rc = unsafe { libc::pthread_atfork(Some(before), Some(parent), Some(child)) };
        if rc != 0 {
            tracing::warn!("no fork handler could be installed; a forked child keeps copies of the sockets");
        }
    });
}

extern "C" fn before() {
    // In the order in which the device's start takes them.
    std::mem::forget(NIC.lock());
    std::mem::forget(DESCRIPTORS.lock());
}

extern "C" fn parent() {
    // SAFETY: `before` locked both in this thread and forgot the guards.
    unsafe {
        DESCRIPTORS.force_unlock();
        NIC.force_unlock();
    }
}

extern "C" fn child() {
    if OBJECTS.load(Ordering::Relaxed) > 0 {
        FORKED.store(true, Ordering::Relaxed);
    } else {
        GENERATION.fetch_add(1, Ordering::Relaxed);
        // SAFETY: `before` locked it in the thread that this one is a copy of, so nobody else has it. Never dropped: its descriptors
        // are closed below, by number.
        std::mem::forget(unsafe { &mut *NIC.data_ptr() }.take());
        linger::none_is_ours();
    }
    // SAFETY: `before` locked it in the thread that this one is a copy of, so nobody else has it and it is whole.
    for fd in unsafe { &mut *DESCRIPTORS.data_ptr() }.drain() {
        // SAFETY: closes this process's copy; the parent's stays open, so no connection is shut down. Nothing here uses
        // the descriptor again: every verb answers an error from now on, or uses a new device.
        unsafe { libc::close(fd) };
    }
    // SAFETY: as above.
    unsafe {
        DESCRIPTORS.force_unlock();
        NIC.force_unlock();
    }
}

/// Remembers a descriptor for a forked child to close.
pub(crate) fn track(fd: RawFd) {
    DESCRIPTORS.lock().insert(fd);
}

/// Forgets it.
pub(crate) fn untrack(fd: RawFd) {
    DESCRIPTORS.lock().remove(&fd);
}

/// A descriptor whose owner keeps it open while it is registered.
pub(crate) fn borrow<'a>(fd: RawFd) -> BorrowedFd<'a> {
    // SAFETY: used only inside one call of the engine, on a descriptor that its owner registered and closes only after
    // deregistering it; the kernel answers EBADF otherwise.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Runs `f` (which starts a thread) with all signals blocked, so that the thread never takes one of the program's. Those that tell
/// of a thread's own faults stay: blocked, they end the process without asking a handler.
pub(crate) fn with_signals_blocked<T>(f: impl FnOnce() -> T) -> T {
    // SAFETY: the sets are initialised by sigfillset and pthread_sigmask before they are read.
    unsafe {
        let mut all = std::mem::zeroed::<libc::sigset_t>();
        let mut old = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&raw mut all);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP] {
            libc::sigdelset(&raw mut all, fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        let result = f();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut());
        result
    }
}

thread_local! {
    /// See [`cancelled_as`].
    static CANCELLED_AS: Cell<Option<c_int>> = const { Cell::new(None) };
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// What the program has set with `pthread_setcancelstate` in the calling thread, which has put cancellation off since. It is so again while
/// the thread sleeps on the sockets: the handler of a signal may jump out of that, and nobody would set it right afterwards.
pub fn cancelled_as(state: Option<c_int>) {
    CANCELLED_AS.with(|cell| cell.set(state));
}

/// Makes a system call that sleeps. It is not made through the C library, so it is no cancellation point.
pub(crate) fn asleep<T>(call: impl FnOnce() -> T) -> T {
    let Some(state) = CANCELLED_AS.with(Cell::get) else { return call() };
    let mut ours = 0;
    // SAFETY: writes the old state.
    unsafe { pthread_setcancelstate(state, &raw mut ours) };
    let result = call();
    // SAFETY: the state that was.
    unsafe { pthread_setcancelstate(ours, std::ptr::null_mut()) };
    result
}

/// Asks the scheduler to run this thread soon and briefly: it has microseconds of work when it is woken, and beside a program
/// that spins on memory on every core it would otherwise wait for the end of that program's slice (milliseconds). Linux 6.12 and
/// later honour it, without any right; earlier ones ignore it.
pub(crate) fn ask_for_short_slices() {
    /// `struct sched_attr` of the system, first version.
    #[repr(C)]
    #[derive(Default)]
    struct SchedAttr {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    const SHORTEST_SLICE_NS: u64 = 100_000;
    let mut attr = SchedAttr::default();
    let size = u32::try_from(size_of::<SchedAttr>()).unwrap_or(0);
    // SAFETY: `attr` is valid for writes of `size` bytes, then for reads; 0 names the calling thread.
    unsafe {
        if libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) == 0 && attr.policy == 0 {
            attr.runtime = SHORTEST_SLICE_NS;
            // Refused by older systems: then it stays as it was.
            libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0);
        }
    }
}

/// Whether every signal handler of the program asks for interrupted calls to be restarted. Tells a blocking call that was
/// interrupted whether the program expects to hear of it, as a blocking `read` would.
///
/// Signals that are a thread's own faults interrupt no wait, and crash reporters (and our own guard) do not ask for anything.
pub(crate) fn interruptions_restart() -> bool {
    const FAULTS: [libc::c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP];
    (1..=libc::SIGRTMAX()).filter(|signal| !FAULTS.contains(signal)).all(|signal| {
        // SAFETY: only queries; `action` is written by the call before it is read.
        unsafe {
            let mut action = std::mem::zeroed::<libc::sigaction>();
            if libc::sigaction(signal, std::ptr::null(), &raw mut action) != 0 {
                return true;
            }
            let handled = action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN;
            !handled || action.sa_flags & libc::SA_RESTART != 0
        }
    })
}

/// Runs `f` when the process exits normally.
pub(crate) fn at_exit(f: extern "C" fn()) {
    // SAFETY: `f` is a function of this object, which is never unloaded.
    if unsafe { libc::atexit(f) } != 0 {
        tracing::warn!("no exit handler could be installed; close connections before exiting");
    }
}

/// Closes a descriptor where a thread of the program may come by that was cancelled (`pthread_cancel`): it would be unwound
/// out of a close through the C library.
pub(crate) fn close(fd: OwnedFd) {
    // SAFETY: it was owned, so nobody else closes it.
    unsafe { rustix::io::close(fd.into_raw_fd()) }
}

/// Whether a descriptor has `O_NONBLOCK` set, by the program.
pub(crate) fn nonblocking(fd: RawFd) -> bool {
    rustix::fs::fcntl_getfl(borrow(fd)).is_ok_and(|f| f.contains(rustix::fs::OFlags::NONBLOCK))
}
