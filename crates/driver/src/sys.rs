//! The system services that the engine and the channels need: a clock, sleep, and descriptors that report
//! readiness. `crates/model` has another version, with a simulated clock and without sockets.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll};
use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

use crate::fork;
use crate::source::{Interest, Readiness};

pub(crate) use crate::fork::switches;
pub(crate) use std::thread::{Thread, park_timeout, sleep};

/// The time.
#[inline]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// A new thread is waited for at most for so long. It may need what the caller holds: the lock of the dynamic
/// loader, in a constructor of a library that is being loaded.
const TO_BEGIN: Duration = Duration::from_millis(500);

/// Starts a thread that is not joined, and waits until it runs, or for a moment.
///
/// A new thread maps memory for its heap, and unmaps what it does not need of that. libfabric changes the
/// code of `munmap` while it opens a domain, and a thread that is in there then ends with SIGSEGV. That was
/// seen twice, where the new thread was late for a processor (docs/flakes.md).
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<Thread> {
    let begun = Arc::new(AtomicU32::new(0));
    let says = Arc::clone(&begun);
    let run = move || {
        // Its heap, and what is unmapped for that.
        drop(std::hint::black_box(Box::new(0_u8)));
        says.store(1, Ordering::Release);
        let _ = futex::wake(&says, futex::Flags::PRIVATE, 1);
        drop(says);
        run();
    };
    let thread = std::thread::Builder::new().name(name.into()).spawn(run)?.thread().clone();
    let until = now() + TO_BEGIN;
    while begun.load(Ordering::Acquire) == 0 {
        let left = until.saturating_duration_since(now());
        if left.is_zero() {
            break;
        }
        let left = Timespec { tv_sec: 0, tv_nsec: left.subsec_nanos().into() };
        let _ = futex::wait(&begun, futex::Flags::PRIVATE, 0, Some(&left));
    }
    Ok(thread)
}

/// Wakes all threads that wait for it, until it is silenced. (An eventfd.)
pub(crate) struct Bell(OwnedFd);

impl Bell {
    /// `nonblocking`: `silence` may be called although it does not ring.
    pub fn new(nonblocking: bool) -> Result<Self, Errno> {
        let flags = if nonblocking { EventfdFlags::NONBLOCK } else { EventfdFlags::empty() };
        Ok(Self(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | flags)?))
    }

    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// A bell that rings already keeps ringing.
    pub fn ring(&self) {
        // A full counter rings as well.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Only for a thread that knows that the bell rings and that no other thread silences it: otherwise this
    /// would block, unless the descriptor is non-blocking.
    pub fn silence(&self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.0, &mut count);
    }

    /// Waits until the bell with this descriptor rings, at most for `limit`. Fails when a signal handler has
    /// run.
    pub fn wait(fd: RawFd, limit: Option<Duration>) -> Result<(), Errno> {
        if let Some(slept) = fork::sleep_with_signals(fd, limit) {
            return slept;
        }
        let mut fds = [PollFd::from_borrowed_fd(fork::borrow(fd), PollFlags::IN)];
        rustix::event::poll(&mut fds, limit.map(timespec).as_ref()).map(|_| ())
    }
}

/// Expires once, some time after it was set last. (A timerfd.)
pub(crate) struct Timer(OwnedFd);

impl Timer {
    pub fn new() -> Result<Self, Errno> {
        Ok(Self(rustix::time::timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?))
    }

    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Replaces an earlier setting, also one that has expired.
    pub fn set(&self, after: Duration) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // Zero would clear it.
        let time = Itimerspec { it_interval: zero, it_value: timespec(after.max(Duration::from_nanos(1))) };
        // Fails only for times out of range.
        let _ = rustix::time::timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &time);
    }
}

/// Waits until the bell rings or one of the timers has expired, at most for `limit`.
pub(crate) fn wait_first(bell: &Bell, timers: Option<&[Timer; 2]>, limit: Option<Duration>) {
    let bell = PollFd::new(&bell.0, PollFlags::IN);
    let limit = limit.map(timespec);
    // An interruption is an early end, after which the caller looks around.
    let _ = match timers {
        Some([one, other]) => {
            let (one, other) = (PollFd::new(&one.0, PollFlags::IN), PollFd::new(&other.0, PollFlags::IN));
            rustix::event::poll(&mut [bell, one, other], limit.as_ref())
        }
        None => rustix::event::poll(&mut [bell], limit.as_ref()),
    };
}

/// Descriptors that are waited for together. (An epoll instance.)
pub(crate) struct Watch(OwnedFd);

/// The most descriptors that one call of [`Watch::wait`] reports.
const AT_ONCE: usize = 64;

impl Watch {
    pub fn new() -> Result<Self, Errno> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Reports a bell as long as it rings.
    pub fn add_bell(&self, bell: &Bell, name: u64) -> Result<(), Errno> {
        epoll::add(&self.0, &bell.0, epoll::EventData::new_u64(name), epoll::EventFlags::IN)
    }

    /// Reports a bell each time it is rung.
    pub fn add_rings(&self, bell: &Bell, name: u64) -> Result<(), Errno> {
        self.add(bell.fd(), name, Interest::Input)
    }

    /// Reports a descriptor each time it becomes ready, and at once if it is ready.
    pub fn add(&self, fd: RawFd, name: u64, interest: Interest) -> Result<(), Errno> {
        epoll::add(&self.0, fork::borrow(fd), epoll::EventData::new_u64(name), interest.flags())
    }

    /// Reports it anew if it is ready.
    pub fn rearm(&self, fd: RawFd, name: u64, interest: Interest) -> Result<(), Errno> {
        epoll::modify(&self.0, fork::borrow(fd), epoll::EventData::new_u64(name), interest.flags())
    }

    /// Reports it no longer.
    pub fn delete(&self, fd: RawFd) -> Result<(), Errno> {
        epoll::delete(&self.0, fork::borrow(fd))
    }

    /// Waits until something is ready, at most for `limit`, and reports it by name. Returns how many there
    /// were. Fails when a signal handler has run.
    #[inline]
    pub fn wait(
        &self,
        limit: Option<Duration>,
        mut tell: impl FnMut(u64, Readiness),
    ) -> Result<usize, Errno> {
        use epoll::EventFlags as F;
        let mut raw = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; AT_ONCE];
        let mask = if limit == Some(Duration::ZERO) { None } else { fork::mask_asleep() };
        let ready = fork::wait_in(self.fd(), &mut raw, limit, mask.as_ref())?;
        for event in ready.iter() {
            let flags = event.flags;
            let hangup = flags.intersects(F::ERR | F::HUP | F::RDHUP);
            let readiness = Readiness {
                readable: flags.contains(F::IN) || hangup,
                writable: flags.contains(F::OUT) || hangup,
                hangup,
            };
            tell(event.data.u64(), readiness);
        }
        Ok(ready.len())
    }
}

fn timespec(t: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX), tv_nsec: t.subsec_nanos().into() }
}

impl Interest {
    fn flags(self) -> epoll::EventFlags {
        use epoll::EventFlags as F;
        match self {
            Self::Input => F::IN | F::RDHUP | F::ET,
            Self::InputAndRoom => F::IN | F::OUT | F::RDHUP | F::ET,
        }
    }
}
