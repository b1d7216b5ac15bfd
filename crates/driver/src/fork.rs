//! Forks, signals, thread cancellation and descriptors by number: everything that needs the system's C
//! interface.

// Reason: handlers for fork, signal masks, cancellation states, and descriptors that are known by number.
#![allow(unsafe_code)]

use std::cell::{Cell, UnsafeCell};
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::epoll::Event;
use rustix::io::Errno;
pub(crate) use uwarp_process::Birth;
use uwarp_process::begin_anew;
pub use uwarp_process::has_more_rights_than_its_caller;
use uwarp_process::record::{Descriptors, descriptors};
pub(crate) use uwarp_process::record::{track, untrack};
use uwarp_process::{Making, Mutex, MutexGuard, PerProcess};

/// A value that exists once in a process. A child does not see its parent's value: it gets its own, under a
/// lock of its own.
pub struct OncePerProcess<T, const RANK: u8>(PerProcess<Mutex<Option<T>, RANK>>);

impl<T: Clone, const RANK: u8> OncePerProcess<T, RANK> {
    /// No value yet.
    #[allow(clippy::new_without_default, reason = "for statics")]
    pub const fn new() -> Self {
        Self(PerProcess::new(|| Mutex::new(None)))
    }

    /// The value, if this process has one.
    pub fn get(&self) -> Option<T> {
        self.0.lock().clone()
    }

    /// The value; at the first call `make` makes it, with the lock held.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get_or_make<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let mut value = self.0.lock();
        if let Some(value) = &*value {
            return Ok(value.clone());
        }
        Ok(value.insert(make()?).clone())
    }
}

/// The device, which exists once in a process and which a child does not have. It is locked during a fork, so
/// that no descriptor of one that is half made is left open in a child.
pub(crate) struct Device<T>(Mutex<Option<T>, 7>);

impl<T> Device<T> {
    /// None yet.
    pub const fn new() -> Self {
        Self(Mutex::new(None))
    }

    pub fn lock(&self) -> MutexGuard<'_, Option<T>, 7> {
        self.0.lock()
    }

    pub fn try_lock(&self) -> Option<MutexGuard<'_, Option<T>, 7>> {
        self.0.try_lock()
    }
}

/// The device as the fork handlers see it.
pub(crate) trait AcrossFork: Sync {
    /// Locks it.
    fn hold(&'static self) -> Box<dyn Held>;
}

/// A device that is locked.
pub(crate) trait Held {
    /// In the child: forgets the parent's device, without dropping it.
    fn forget(&mut self);
}

impl<T: Send> AcrossFork for Device<T> {
    fn hold(&'static self) -> Box<dyn Held> {
        Box::new(self.lock())
    }
}

impl<T> Held for MutexGuard<'static, Option<T>, 7> {
    fn forget(&mut self) {
        // Never dropped: its descriptors are closed by number.
        std::mem::forget(self.take());
    }
}

/// What a fork holds, from before it until after it.
struct HeldLocks(UnsafeCell<Option<Locks>>);

/// The descriptors, what the process makes once, and the device.
type Locks = (MutexGuard<'static, Descriptors, 28>, Making, Box<dyn Held>);

// SAFETY: only the thread that holds the locks, and the one that is a copy of it, uses the cell.
unsafe impl Sync for HeldLocks {}

static HELD: HeldLocks = HeldLocks(UnsafeCell::new(None));

/// What the handlers handle.
struct Installed {
    device: &'static dyn AcrossFork,
    /// Forgets the other state of the parent.
    forget: fn(),
}

static INSTALLED: OnceLock<Installed> = OnceLock::new();

/// Installs the handlers, when the library is loaded. At its first call it would be too late: a thread that
/// forks may be behind its handlers already, and its child would have no thread of the device that another
/// thread opens meanwhile, and no way to know.
pub(crate) fn install(device: &'static dyn AcrossFork, forget: fn()) {
    // Before any handler can run: all three handlers of a fork must see the same state.
    if INSTALLED.set(Installed { device, forget }).is_ok() {
        // It fails only for want of memory, which a program that is being loaded would not survive.
        // SAFETY: the handlers are functions of this object, which is never unloaded (linked with -z
        // nodelete).
        unsafe { libc::pthread_atfork(Some(before), Some(parent), Some(child)) };
    }
}

extern "C" fn before() {
    // In the order in which the device's start takes them.
    if let Some(Installed { device, .. }) = INSTALLED.get() {
        let device = device.hold();
        let making = Making::begin();
        let descriptors = descriptors();
        // SAFETY: this thread holds the locks.
        unsafe { *HELD.0.get() = Some((descriptors, making, device)) };
    }
}

extern "C" fn parent() {
    // SAFETY: if there are locks, `before` took them in this thread. (Another thread's handlers wait for
    // them.)
    drop(INSTALLED.get().and_then(|_| unsafe { &mut *HELD.0.get() }.take()));
}

extern "C" fn child() {
    let Some(Installed { forget, .. }) = INSTALLED.get() else { return };
    // SAFETY: `before` took the locks in the thread that this one is a copy of, and no other thread is here.
    let Some((mut descriptors, _making, mut device)) = (unsafe { &mut *HELD.0.get() }).take() else { return };
    begin_anew();
    device.forget();
    forget();
    for fd in std::mem::take(&mut *descriptors).into_keys() {
        // SAFETY: closes this process's copy; the parent's stays open, so no connection is shut down. Nothing
        // here uses the descriptor again: calls on what the parent has made fail, and what is made here has
        // descriptors of its own.
        unsafe { rustix::io::close(fd) };
    }
}

/// A descriptor whose owner keeps it open while it is registered.
pub(crate) fn borrow<'a>(fd: RawFd) -> BorrowedFd<'a> {
    // SAFETY: used only inside one call of the engine, on a descriptor that its owner registered and closes
    // only after deregistering it; the kernel answers EBADF otherwise.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Runs `f` (which starts a thread) with all signals blocked, so that the thread never takes one of the
/// program's. Signals of a thread's own faults stay unblocked: a blocked one ends the process without calling
/// its handler.
pub(crate) fn with_signals_blocked<T>(f: impl FnOnce() -> T) -> T {
    let old = block_signals();
    let result = f();
    restore_signals(&old);
    result
}

/// Returns the mask before.
fn block_signals() -> libc::sigset_t {
    // SAFETY: the sets are initialised by sigfillset and pthread_sigmask before they are read.
    unsafe {
        let mut all = std::mem::zeroed::<libc::sigset_t>();
        let mut old = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&raw mut all);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP] {
            libc::sigdelset(&raw mut all, fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    }
}

fn restore_signals(mask: &libc::sigset_t) {
    // SAFETY: the mask is initialised.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) };
}

thread_local! {
    /// The program's mask, while the calling thread takes signals only where it sleeps.
    static MASK_ASLEEP: Cell<Option<libc::sigset_t>> = const { Cell::new(None) };
}

/// A call that waits. Once [`SignalsAsleep::begin`] was called in it, and until this is dropped, the calling
/// thread takes signals only where it sleeps, so that each of them ends a sleep. Otherwise one that came
/// while the thread serves the sockets would end nothing, and the program, which looks at what the signal's
/// handler has set when the call returns, might wait for ever.
pub(crate) struct SignalsAsleep(());

impl SignalsAsleep {
    /// At the beginning of a call. The thread may have left an earlier one by a jump out of a signal's
    /// handler, which has set the mask.
    pub fn in_call() -> Self {
        MASK_ASLEEP.with(|cell| cell.set(None));
        Self(())
    }

    /// From now on. It costs two system calls, so a call that finds soon what it looks for does without.
    pub fn begin() {
        if MASK_ASLEEP.with(Cell::get).is_none() {
            let mask = block_signals();
            MASK_ASLEEP.with(|cell| cell.set(Some(mask)));
        }
    }
}

impl Drop for SignalsAsleep {
    fn drop(&mut self) {
        signals_awake();
    }
}

/// A program's signal handlers may jump out of calls (`siglongjmp`).
static JUMPS: AtomicBool = AtomicBool::new(false);

/// From now on, calls that are wrapped in [`Deferred`] defer signals, and so do waits.
pub fn expect_jumps() {
    JUMPS.store(true, Ordering::Relaxed);
}

/// Whether [`expect_jumps`] was called.
#[inline]
pub fn jumps_are_expected() -> bool {
    JUMPS.load(Ordering::Relaxed)
}

/// Defers the signals of the calling thread while it lives, except those of its own faults: a handler that
/// runs when it ends may jump, because the call holds nothing any more.
pub struct Deferred(libc::sigset_t);

impl Deferred {
    /// Signals are deferred from now on. Costs a system call, and another one at its end.
    pub fn begin() -> Self {
        // The thread may have left a wait by a jump, which has set the mask.
        MASK_ASLEEP.with(|cell| cell.set(None));
        Self(block_signals())
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        restore_signals(&self.0);
    }
}

/// At the beginning of a verb that waits: where jumps are expected, signals are deferred until
/// [`signals_awake`], except in sleeps.
pub fn begin_to_wait() {
    if jumps_are_expected() {
        MASK_ASLEEP.with(|cell| cell.set(None));
        SignalsAsleep::begin();
    }
}

/// The mask for a sleep after [`Channel::attend`](crate::Channel::attend), which has blocked the signals.
pub fn mask_asleep() -> Option<libc::sigset_t> {
    MASK_ASLEEP.with(Cell::get)
}

/// After that sleep: the thread takes signals again.
pub fn signals_awake() {
    if let Some(mask) = MASK_ASLEEP.with(Cell::take) {
        restore_signals(&mask);
    }
}

/// What the kernel, not glibc, has for a set of signals.
const KERNEL_SET: usize = 8;

/// Sleeps until a descriptor is readable, at most for `limit`, in a thread with [`SignalsAsleep`]: any signal
/// that has come meanwhile or before ends it. `None`: the thread has none, and does not sleep here.
pub(crate) fn sleep_with_signals(fd: RawFd, limit: Option<Duration>) -> Option<Result<(), Errno>> {
    let mask = mask_asleep()?;
    let mut time = limit.map(|limit| libc::timespec {
        tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    let time = time.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one descriptor; the time is NULL or alive; the mask is initialised.
    let call =
        || unsafe { libc::syscall(libc::SYS_ppoll, &raw mut entry, 1, time, &raw const mask, KERNEL_SET) };
    Some(if asleep(call) < 0 { Err(Errno::INTR) } else { Ok(()) })
}

/// Waits in an epoll instance, with the program's mask of signals if it is passed; returns what is ready.
/// Does not sleep where the limit is zero.
///
/// (Not rustix's call: it leaves the size of the mask undefined where there is none. The kernel does not look
/// at it then, and valgrind complains.)
pub(crate) fn wait_in<'a>(
    epoll: RawFd,
    events: &'a mut [MaybeUninit<Event>],
    limit: Option<Duration>,
    mask: Option<&libc::sigset_t>,
) -> Result<&'a [Event], Errno> {
    // Rounded up, so that a timer has expired when the thread wakes for it.
    let millis =
        limit.map_or(-1, |limit| c_int::try_from(limit.as_nanos().div_ceil(1_000_000)).unwrap_or(c_int::MAX));
    let (place, most) = (events.as_mut_ptr(), events.len());
    let mask = mask.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: there is room for `most` events, in the kernel's form; the mask is initialised, or none.
    let call =
        || unsafe { libc::syscall(libc::SYS_epoll_pwait, epoll, place, most, millis, mask, KERNEL_SET) };
    // Any other failure than an interruption would be one of this process's descriptors.
    let ready = if millis == 0 { call() } else { asleep(call) };
    let Ok(ready) = usize::try_from(ready) else { return Err(Errno::INTR) };
    // SAFETY: the kernel has written so many.
    Ok(unsafe { std::slice::from_raw_parts(place.cast_const().cast(), ready.min(most)) })
}

thread_local! {
    /// See [`set_cancel_state_asleep`].
    static CANCEL_STATE_ASLEEP: Cell<Option<c_int>> = const { Cell::new(None) };
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

fn set_cancel_state(state: c_int) -> c_int {
    let mut old = 0;
    // SAFETY: writes the old state. A thread with the asynchronous type and a cancellation pending ends where
    // it is enabled again; only the calls that wait are made for that.
    unsafe { pthread_setcancelstate(state, &raw mut old) };
    old
}

/// Defers a cancellation of the calling thread (`pthread_cancel`) while it lives. glibc unwinds a cancelled
/// thread out of the next system call that it makes through the C library; in our frames that ends the
/// process.
pub struct Uncancelled(c_int);

impl Uncancelled {
    /// Cancellation is deferred from now on.
    #[inline]
    pub fn begin() -> Self {
        const PTHREAD_CANCEL_DISABLE: c_int = 1;
        Self(set_cancel_state(PTHREAD_CANCEL_DISABLE))
    }

    /// The state that the program had set before.
    pub fn state_before(&self) -> c_int {
        self.0
    }
}

impl Drop for Uncancelled {
    #[inline]
    fn drop(&mut self) {
        set_cancel_state(self.0);
    }
}

/// The state that the program has set with `pthread_setcancelstate` in the calling thread, which now defers
/// cancellation. This state is restored while the thread sleeps on the sockets: a signal handler may jump out
/// of that sleep, and then nothing else would restore it.
pub fn set_cancel_state_asleep(state: Option<c_int>) {
    CANCEL_STATE_ASLEEP.with(|cell| cell.set(state));
}

/// Makes a system call that sleeps. It bypasses the C library, so it is not a cancellation point.
pub(crate) fn asleep<T>(call: impl FnOnce() -> T) -> T {
    let Some(state) = CANCEL_STATE_ASLEEP.with(Cell::get) else { return call() };
    let ours = set_cancel_state(state);
    let result = call();
    set_cancel_state(ours);
    result
}

/// Requests that the scheduler runs this thread soon and briefly: it has microseconds of work when it is
/// woken. Fails with the program's priority if the thread may not have a higher one.
///
/// Beside a program that spins on memory on every core it would otherwise wait for the end of that program's
/// slice (milliseconds), and for ever if the program has a real-time policy (`chrt -f`): such a thread is
/// preempted only by a higher priority. Linux 6.12 and later grant the short slice without any right; earlier
/// ones ignore it. A higher priority needs CAP_SYS_NICE or RLIMIT_RTPRIO.
pub(crate) fn ask_to_run_soon() -> Result<(), u32> {
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
    const OTHER: u32 = 0;
    const FIFO: u32 = 1;
    const RR: u32 = 2;
    const SHORTEST_SLICE_NS: u64 = 100_000;
    let mut attr = SchedAttr::default();
    let size = u32::try_from(size_of::<SchedAttr>()).unwrap_or(0);
    // SAFETY: `attr` is valid for writes of `size` bytes, then for reads; 0 names the calling thread.
    unsafe {
        if libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) != 0 {
            return Ok(());
        }
        let programs = attr.priority;
        match attr.policy {
            OTHER => attr.runtime = SHORTEST_SLICE_NS,
            FIFO | RR => attr.priority = programs.saturating_add(1),
            _ => return Ok(()),
        }
        let refused = libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) != 0;
        // Without the short slice nothing is lost but time.
        if refused && attr.policy != OTHER { Err(programs) } else { Ok(()) }
    }
}

/// How often the calling thread has lost its processor to another one although it could have run on.
pub(crate) fn switches() -> i64 {
    // SAFETY: all its fields are numbers, for which zero is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is valid for writes.
    if unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) } != 0 {
        return 0;
    }
    usage.ru_nivcsw
}

/// Whether every signal handler of the program has `SA_RESTART`. If not, an interrupted wait returns `EINTR`,
/// as a blocking `read` would.
pub(crate) fn interruptions_restart() -> bool {
    !has_handler(|flags| flags & libc::SA_RESTART == 0)
}

/// Whether the program has a signal handler. Without one, a wait has ended because of a signal that nobody
/// heeds (SIGCHLD): the system would have thrown it away, had the wait not blocked it until the sleep began.
pub(crate) fn interruptions_are_heeded() -> bool {
    has_handler(|_| true)
}

/// Signals of a thread's own faults do not count: they interrupt no wait, and crash reporters (and our own
/// guard) install their handlers without `SA_RESTART`.
fn has_handler(counts: impl Fn(libc::c_int) -> bool) -> bool {
    const FAULTS: [libc::c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP];
    (1..=libc::SIGRTMAX()).filter(|signal| !FAULTS.contains(signal)).any(|signal| {
        // SAFETY: only queries; `action` is written by the call before it is read.
        unsafe {
            let mut action = std::mem::zeroed::<libc::sigaction>();
            if libc::sigaction(signal, std::ptr::null(), &raw mut action) != 0 {
                return false;
            }
            let handled = action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN;
            handled && counts(action.sa_flags)
        }
    })
}

/// Ends all streams when the process exits normally, in this object's own destructor: behind all handlers of
/// atexit(3), and behind the destructors of the program and of the libraries that need this one. All of them
/// may still call verbs.
#[used]
#[unsafe(link_section = ".fini_array")]
static LAST: extern "C" fn() = crate::open::close_all;

/// See [`install`]. Nothing else is done before a program calls us.
#[cfg(not(miri))]
#[used]
#[unsafe(link_section = ".init_array")]
static FIRST: extern "C" fn() = crate::open::prepare_for_forks;

/// Closes a descriptor in a thread that may be cancelled (`pthread_cancel`): glibc would unwind it out of a
/// close through the C library.
pub(crate) fn close(fd: OwnedFd) {
    // SAFETY: it was owned, so nothing else closes it.
    unsafe { rustix::io::close(fd.into_raw_fd()) }
}

/// Whether the program has set `O_NONBLOCK` on a descriptor.
pub(crate) fn nonblocking(fd: RawFd) -> bool {
    rustix::fs::fcntl_getfl(borrow(fd)).is_ok_and(|f| f.contains(rustix::fs::OFlags::NONBLOCK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_made_once() {
        static VALUE: OncePerProcess<u32, 4> = OncePerProcess::new();
        assert_eq!(VALUE.get(), None);
        assert_eq!(VALUE.get_or_make(|| Err("failed")), Err("failed"));
        assert_eq!(VALUE.get_or_make(|| Ok::<_, ()>(1)), Ok(1));
        assert_eq!(VALUE.get_or_make(|| Ok::<_, ()>(2)), Ok(1));
    }
}
