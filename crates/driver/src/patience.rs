//! How long a program's call that ends a stream waits for the peer: for its acknowledgements (docs/adr/009),
//! or for its first message, where the stream is still being set up.
//!
//! A program may end hundreds of queue pairs, one after the other, whose peers do not answer. So each wait in
//! vain halves the next one: in all, they take less than twice as long as the first.
//!
//! The times are those of a machine on which each thread has a processor. Where more threads want one, the
//! peer's waits for the turns of the others, so a wait is as many times as long ([`turns`]).

use std::time::Duration;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::time::{ClockId, clock_gettime};

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// A wait this long after the last one in vain is as long as the first.
const RECOVERY: Duration = Duration::from_secs(1);

/// The patience of the process for acknowledgements: a peer whose program does something else answers as soon
/// as its thread gets a processor. With several threads for each processor that takes a few of the system's
/// turns, of 3 to 4 ms each; a peer that answers later than this is stopped, or gone.
pub(crate) static FOR_ACKS: Patience = Patience::new(Duration::from_millis(60));
/// For first messages: an end whose peer was not ready tries again after 20 ms, and twice that later.
pub(crate) static FOR_FIRST: Patience = Patience::new(Duration::from_millis(60));

/// How long the next wait may be. Threads that wait at the same time each have it.
pub(crate) struct Patience {
    longest: Duration,
    /// Waits in vain, each less than [`RECOVERY`] after the one before.
    in_vain: AtomicU32,
    /// When they are forgotten, in microseconds of the monotonic clock.
    forgotten_at: AtomicU64,
}

impl Patience {
    const fn new(longest: Duration) -> Self {
        Self { longest, in_vain: AtomicU32::new(0), forgotten_at: AtomicU64::new(0) }
    }

    /// How long a wait that begins now may be.
    pub fn limit(&self) -> Duration {
        self.limit_at(now())
    }

    /// A wait has ended without the acknowledgement.
    pub fn waited_in_vain(&self) {
        self.waited_in_vain_at(now());
    }

    fn limit_at(&self, now: u64) -> Duration {
        let in_vain = self.in_vain_at(now);
        self.longest / 2u32.saturating_pow(in_vain)
    }

    fn waited_in_vain_at(&self, now: u64) {
        self.in_vain.store(self.in_vain_at(now).saturating_add(1), Ordering::Relaxed);
        let recovery = u64::try_from(RECOVERY.as_micros()).unwrap_or(u64::MAX);
        self.forgotten_at.store(now.saturating_add(recovery), Ordering::Relaxed);
    }

    fn in_vain_at(&self, now: u64) -> u32 {
        if now < self.forgotten_at.load(Ordering::Relaxed) { self.in_vain.load(Ordering::Relaxed) } else { 0 }
    }
}

/// Waits so long, or until a signal comes. (No cancellation point, as the calls of libc are.)
pub(crate) fn pause(time: Duration) {
    if let Ok(time) = time.try_into() {
        let _ = rustix::thread::nanosleep(&time);
    }
}

/// More threads for a processor than these make no wait longer.
const MOST_TURNS: u32 = 16;

/// How many threads want each processor that this one may have; at least 1. Read when a wait would end: it is
/// the machine of now that counts.
pub(crate) fn turns() -> u32 {
    let running = running().unwrap_or(1);
    let processors = rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count());
    (running / processors.max(1)).clamp(1, MOST_TURNS)
}

/// Threads of this machine that run or want to; `None`: the system does not say.
fn running() -> Option<u32> {
    let mut text = [0; 64];
    let file =
        rustix::fs::openat(CWD, c"/proc/loadavg", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let len = rustix::io::read(&file, &mut text);
    crate::fork::close(file);
    running_in(text.get(..len.ok()?)?)
}

/// `0.42 0.37 0.30 3/160 4711`: three of 160.
fn running_in(loadavg: &[u8]) -> Option<u32> {
    let all = std::str::from_utf8(loadavg).ok()?.split(' ').nth(3)?;
    all.split_once('/')?.0.parse().ok()
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    u64::try_from(now.tv_sec * 1_000_000 + now.tv_nsec / 1000).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_says_how_many_want_a_processor() {
        assert_eq!(running_in(b"0.42 0.37 0.30 3/160 4711\n"), Some(3));
        assert_eq!(running_in(b""), None);
        assert!(running().is_some_and(|running| running >= 1));
        assert!((1..=MOST_TURNS).contains(&turns()));
    }

    /// Each queue pair whose peer was silent took 5 ms, one after the other.
    #[test]
    fn many_waits_in_vain_do_not_add_up() {
        let longest = Duration::from_millis(5);
        let (patience, mut now) = (Patience::new(longest), 7);
        for _ in 0..1000 {
            let limit = patience.limit_at(now);
            now += u64::try_from(limit.as_micros()).unwrap();
            patience.waited_in_vain_at(now);
        }
        assert!(now < 7 + 10_000, "{now} µs");
        assert_eq!(patience.limit_at(now + 1_000_000), longest);
    }
}
