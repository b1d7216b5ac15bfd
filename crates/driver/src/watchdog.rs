//! How the background thread notices that threads have stopped polling, without waking up regularly.

use std::io;
use std::time::Duration;

use crate::fork;
use crate::progress::{ALIVE, PUSH_GROWTH, PUSH_LATE, Spans, nanos};
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::sys::{self, Bell, Timer};

/// Polling threads push the watchdog back, and the background thread sleeps on it: it fires when no thread
/// has pushed it for a while.
///
/// A thread that computes makes no call, so only a timer can show that it has stopped polling. A thread that
/// wakes by timer and finds that all is well costs the polling thread 20 µs on its own core (interrupt, two
/// switches, and in a virtual machine an exit to the hypervisor for each setting of the timer). Pushing back
/// a timer that never fires costs only that setting. There are two timers, used in turn, because of it: the
/// earlier one is moved behind the later one, so the hardware is set once for it. To cancel the first timer
/// of a core and set another one takes two settings.
pub(crate) struct Watchdog {
    timers: [Timer; 2],
    bell: Bell,
    /// When the next push is due, in nanoseconds of the engine's clock.
    due: AtomicU64,
    /// Pushes since the background thread has slept here.
    pushes: AtomicU32,
}

const _: () = assert!(PUSH_GROWTH.as_nanos() + PUSH_LATE.as_nanos() < ALIVE.as_nanos());

/// No push is due: the background thread does not sleep on the watchdog.
const NEVER: u64 = u64::MAX;

impl Watchdog {
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            timers: [Timer::new()?, Timer::new()?],
            bell: Bell::new(true)?,
            due: AtomicU64::new(NEVER),
            pushes: AtomicU32::new(0),
        })
    }

    /// Makes a forked child close its copies.
    pub fn track(&self) {
        fork::track(self.bell.fd());
        self.timers.iter().for_each(|timer| fork::track(timer.fd()));
    }

    /// A thread polls, at `now` by the engine's clock. `waits`: it has just begun to wait for an answer, so
    /// the time of a push is not lost.
    #[inline]
    pub fn push(&self, now: u64, waits: bool, spans: impl Fn() -> Spans) {
        let due = self.due.load(Ordering::Relaxed);
        let grace = if waits { 0 } else { nanos(PUSH_LATE) };
        if now >= due.saturating_add(grace) {
            self.push_now(now, due, spans());
        }
    }

    #[cold]
    fn push_now(&self, now: u64, due: u64, spans: Spans) {
        let pushes = self.pushes.load(Ordering::Relaxed);
        let period = spans.push_period(pushes);
        let next = now + nanos(period);
        if self.due.compare_exchange(due, next, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            // Another thread has pushed first, or the background thread no longer sleeps.
            return;
        }
        // Counted from the setting, not from `now`: a thread that was delayed in between is alive all the
        // same.
        let [one, other] = &self.timers;
        let timer = if self.pushes.fetch_add(1, Ordering::Relaxed) & 1 == 0 { one } else { other };
        timer.set(period * 2 + spans.alive());
    }

    /// Sleeps until no thread has pushed for a while, or until [`Self::ring`]. The last sign of a polling
    /// thread was at `last`, and it is `now`, both by the engine's clock.
    pub fn sleep(&self, last: u64, now: u64, spans: Spans) {
        let age = Duration::from_nanos(now.saturating_sub(last));
        // As if the polling thread had pushed at `last`.
        let [one, other] = &self.timers;
        let (period, alive) = (spans.push_period(0), spans.alive());
        one.set((period + alive).saturating_sub(age));
        other.set((period * 2 + alive).saturating_sub(age));
        self.pushes.store(0, Ordering::Relaxed);
        self.due.store(last + nanos(period), Ordering::SeqCst);
        sys::wait_first(&self.bell, Some(&self.timers), None);
        self.due.store(NEVER, Ordering::SeqCst);
        self.bell.silence();
    }

    /// Sleeps for `time`, or until [`Self::ring`].
    pub fn nap(&self, time: Duration) {
        sys::wait_first(&self.bell, None, Some(time));
        self.bell.silence();
    }

    /// Ends the sleep, or the next one if there is none. What the background thread must then see is written
    /// before this call.
    pub fn ring(&self) {
        self.bell.ring();
    }
}
