//! Verbs that wait without a limit, and can be cancelled while they wait.

use std::ffi::c_int;
use std::os::fd::RawFd;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use uwarp_driver::waits::{Waits, begin_wait, end_wait};
use uwarp_driver::{
    Channel, ChannelError, Uncancelled, begin_to_wait, jumps_are_expected, mask_asleep, signals_awake,
};

use crate::convention::MinusOne;
use crate::entry::{contain, run};
use crate::failure::{Failure, errno, set_errno};

// Cancellation points: glibc unwinds a cancelled thread out of them, so they must be declared "C-unwind".
unsafe extern "C-unwind" {
    fn pthread_testcancel();
    fn pthread_setcanceltype(kind: c_int, old: *mut c_int) -> c_int;
    fn poll(fds: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int;
    fn ppoll(
        fds: *mut libc::pollfd,
        count: libc::nfds_t,
        timeout: *const libc::timespec,
        mask: *const libc::sigset_t,
    ) -> c_int;
}

const DEFERRED: c_int = 0;

/// How the calling thread is cancelled (`pthread_setcanceltype`).
#[derive(Clone, Copy)]
struct CancelType(c_int);

impl CancelType {
    /// In our frames only at cancellation points, whatever the program has set: elsewhere the thread may have
    /// anything locked.
    #[inline(always)]
    fn defer() -> Self {
        let mut before = DEFERRED;
        // SAFETY: writes the type before. No frame of ours that is left by it has anything to drop.
        unsafe { pthread_setcanceltype(DEFERRED, &raw mut before) };
        Self(before)
    }

    /// As the program has it. Ends a thread that has been cancelled and is to end at once.
    #[inline(always)]
    fn restore(self) {
        if self.0 != DEFERRED {
            // SAFETY: as above.
            unsafe { pthread_setcanceltype(self.0, null_mut()) };
        }
    }
}

/// As [`run`], for a verb that waits without a limit. It is a cancellation point, like the `read` in which
/// other implementations wait. `find` finds what to wait on. `take` takes an event if there is one (its
/// second argument: this is the beginning of the call); it is called whenever there may be one, until it
/// returns `Some`.
///
/// The thread sleeps in `ppoll`, and our frames hold nothing then: it can be cancelled there, and a signal's
/// handler can jump out. An event that comes later stays for other threads. Signals were blocked before the
/// last look for an event, so each that has come since ends the sleep. Where handlers are expected to jump
/// ([`jumps`](crate::jumps)), they are blocked for the whole call but its sleeps.
///
/// A program may have made its thread's cancellation asynchronous, as MVAPICH2 does: where this is a `read`,
/// that is harmless. Outside the sleep it is deferred. An event that was taken when such a thread is
/// cancelled is lost, as it is there.
///
/// To be called by functions of the ABI "C-unwind" that have nothing to drop.
///
/// # Errors
/// -1 with `errno`.
pub fn wait<T: Waits>(
    name: &'static str,
    find: impl FnOnce() -> Result<Arc<T>, Failure>,
    mut take: impl FnMut(&T, bool) -> Result<Option<()>, Failure>,
) -> c_int {
    let program = CancelType::defer();
    begin_to_wait();
    let defers = jumps_are_expected();
    // SAFETY: no frame of ours that is left by it has anything to drop, here and below.
    unsafe { pthread_testcancel() };
    let mut on: *const T = std::ptr::null();
    let found = find_one(name, find, &mut on);
    if found != 0 {
        signals_awake();
        program.restore();
        return found;
    }
    let mut first = true;
    let answer = loop {
        // If the thread was cancelled before it takes an event, the event stays for other threads.
        // SAFETY: as above.
        unsafe { pthread_testcancel() };
        let (answer, next) = advance(name, on, first, &mut take);
        match next {
            Next::Return => break answer,
            Next::Take => {}
            Next::Sleep(fd) => {
                let mut fds = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                let mask = mask_asleep();
                let mask = mask.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
                program.restore();
                // SAFETY: one descriptor, which the thread's hold on the channel keeps open; no limit; a
                // mask that is alive.
                let ready = unsafe { ppoll(&raw mut fds, 1, std::ptr::null(), mask) };
                CancelType::defer();
                let interrupted = ready < 0 && errno() == libc::EINTR;
                if !defers {
                    signals_awake();
                }
                if interrupted && Channel::interruptible() {
                    // An event that has come meanwhile is returned all the same.
                    break interrupt(name, on, &mut take);
                }
            }
        }
        first = false;
    };
    signals_awake();
    program.restore();
    answer
}

/// The next step of a waiting thread.
#[derive(Clone, Copy)]
enum Next {
    Return,
    /// There is, or was, an event.
    Take,
    /// Until this descriptor is readable.
    Sleep(RawFd),
}

/// Frames that have something to drop are not [`wait`]'s own.
#[inline(never)]
fn find_one<T: Waits>(
    name: &'static str,
    find: impl FnOnce() -> Result<Arc<T>, Failure>,
    on: &mut *const T,
) -> c_int {
    run::<MinusOne>(name, || {
        // Kept alive for the thread, because the program may destroy what it waits on.
        let found = find()?;
        *on = Arc::as_ptr(&found);
        begin_wait(found);
        Ok(())
    })
}

#[inline(never)]
fn advance<T: Waits>(
    name: &'static str,
    on: *const T,
    first: bool,
    take: &mut impl FnMut(&T, bool) -> Result<Option<()>, Failure>,
) -> (c_int, Next) {
    let uncancelled = Uncancelled::begin();
    let mut next = Next::Return;
    let answer = contain::<MinusOne>(name, || {
        // SAFETY: the thread holds it.
        let on = unsafe { &*on };
        if take(on, first)?.is_some() {
            return Ok(());
        }
        uwarp_driver::set_cancel_state_asleep(Some(uncancelled.state_before()));
        let attended = on.channel().attend(None);
        uwarp_driver::set_cancel_state_asleep(None);
        next = match attended {
            Ok(true) => Next::Take,
            Ok(false) => Next::Sleep(on.channel().fd()),
            Err(ChannelError::Interrupted) => return Err(interrupted()),
            Err(ChannelError::WouldBlock | ChannelError::NothingYet) => {
                return Err(Failure::new(libc::EAGAIN, "no event"));
            }
        };
        Ok(())
    });
    if matches!(next, Next::Return) {
        release();
    }
    (answer, next)
}

#[inline(never)]
fn interrupt<T: Waits>(
    name: &'static str,
    on: *const T,
    take: &mut impl FnMut(&T, bool) -> Result<Option<()>, Failure>,
) -> c_int {
    let _uncancelled = Uncancelled::begin();
    let answer = contain::<MinusOne>(name, || {
        // SAFETY: the thread holds it.
        take(unsafe { &*on }, false)?.ok_or_else(interrupted)
    });
    release();
    answer
}

fn interrupted() -> Failure {
    Failure::new(libc::EINTR, "interrupted by a signal")
}

fn release() {
    let errno = errno();
    end_wait();
    set_errno(errno);
}

/// Sleeps, as a cancellation point; to be called as [`wait`] is.
pub fn sleep(time: Duration) {
    let errno = errno();
    // SAFETY: no descriptors; no frame of ours that is left has anything to drop.
    unsafe { poll(null_mut(), 0, c_int::try_from(time.as_millis()).unwrap_or(c_int::MAX)) };
    set_errno(errno);
}
