//! How a thread of the program that polls, waits for an answer or is about to sleep divides its time.

use std::time::{Duration, Instant};

use uwarp_rnic::cq::Direct;

use super::{Nanos, Spans};
use crate::sync::{AtomicI32, AtomicU64, Ordering};

// A thread that polls a completion queue.

/// Empty polls in a row after which a thread polls in earnest. A program that polls once after each post and
/// finds its completion (`ib_write_lat`) never reaches this number.
pub(crate) const IN_EARNEST: u32 = 4;
/// A thread that polls in earnest stamps the time once in this number of polls: every few microseconds, well
/// within [`ALIVE`].
pub(super) const STAMP_EVERY: u32 = 16;
/// How many queue pairs of a completion queue are received from directly; if there are more, epoll reports
/// which have input.
pub(crate) const DIRECT: Direct = Direct { few: 2, favourite: 16, partial_every: 4 };
/// A direct receive does not see other sockets. After this number of empty polls they are looked at too, and
/// far more often as long as this finds something: the background thread stands back for all sockets, not
/// only for the polled ones. Polls count even if they are not in a row: a thread that often finds something
/// keeps the background thread away all the same.
const LOOK_AROUND: u32 = 256;
/// Empty polls after which a thread yields its core, because another thread there may have to answer: the
/// minimum, while yielding brings the answer each time, and the maximum, while it brings nothing.
pub(super) const YIELD: (u32, u32) = (1, 512);
/// A completion within this number of polls after a yield is credited to the yield.
const SOON: u32 = 4;

/// Whether a thread that polls in earnest at `earnest_at` stamps the time at this number of empty polls in a
/// row.
#[inline]
pub(crate) fn stamps(empty: u32, earnest_at: u32) -> bool {
    empty % STAMP_EVERY == earnest_at
}

/// What a polling thread keeps between polls.
#[derive(Clone, Copy)]
pub(crate) struct Poller {
    pub look_around: LookAround,
    pub yielding: Yielding,
    pub stamping: Stamping,
}

impl Poller {
    pub const NEW: Self = Self {
        look_around: LookAround { polls: 0, until: LOOK_AROUND },
        yielding: Yielding { polls: 0, until: YIELD.1, tried: false, let_run: false },
        stamping: Stamping { polls: 0 },
    };
}

/// When a thread stamps the time that polls memory alone: answers there come within a few polls, so that it
/// never polls in earnest, and yet finds each of them before the background thread could.
#[derive(Clone, Copy)]
pub(crate) struct Stamping {
    /// Empty polls since the last stamp, in a row or not.
    polls: u32,
}

impl Stamping {
    /// Counts an empty poll; returns whether to stamp.
    #[inline]
    pub fn count(&mut self) -> bool {
        self.polls += 1;
        let due = self.polls >= STAMP_EVERY;
        if due {
            self.polls = 0;
        }
        due
    }
}

/// When a polling thread looks at all sockets.
#[derive(Clone, Copy)]
pub(crate) struct LookAround {
    /// Empty polls and waits for an answer since the last look.
    polls: u32,
    /// The next look comes after this many.
    until: u32,
}

impl LookAround {
    /// Counts an empty poll or a wait; returns whether a look is due.
    pub fn count(&mut self) -> bool {
        self.polls += 1;
        self.polls >= self.until
    }

    /// A look was made, and found other sockets `busy` or not.
    pub fn looked(&mut self, busy: bool) {
        self.polls = 0;
        self.until = if busy { (self.until / 8).max(1) } else { (self.until * 2).min(LOOK_AROUND) };
    }

    /// A look was made that happens at each poll.
    pub fn looked_as_always(&mut self) {
        self.polls = 0;
    }
}

/// When a polling thread yields its core.
///
/// If both ends spin on one core, each would wait for the end of the other's time slice. If another thread
/// computes there, yielding costs one of its slices and brings nothing. Whether another thread ran, for how
/// long, and the results of the next polls show which case it is.
#[derive(Clone, Copy)]
pub(crate) struct Yielding {
    /// Empty polls since the last completion or yield.
    polls: u32,
    /// The next yield comes after this many.
    pub(super) until: u32,
    /// The thread has yielded since the last completion.
    tried: bool,
    /// The last yield let another thread run, and that one was soon done.
    let_run: bool,
}

impl Yielding {
    /// Counts an empty poll; returns whether to yield.
    #[inline]
    pub fn count(&mut self) -> bool {
        self.polls += 1;
        if self.polls < self.until {
            return false;
        }
        if self.tried {
            self.until = (self.until * 2).min(YIELD.1);
        }
        (self.polls, self.tried) = (0, true);
        true
    }

    /// Where polls are slow, the next yield comes sooner: within the slice that the system gives the thread,
    /// or it would never be tried.
    pub fn limit(&mut self, spans: Spans) {
        self.until = self.until.min(spans.polls_of_slice());
    }

    /// The yield that was asked for took this long, and another thread ran meanwhile or not.
    pub fn yielded(&mut self, took: Duration, switched: bool, spans: Spans) {
        self.let_run = switched && took < spans.soon_done();
    }

    /// A poll found a completion.
    pub fn found(&mut self) {
        if self.tried && self.let_run && self.polls <= SOON {
            self.until = (self.until / 2).max(YIELD.0);
        }
        (self.polls, self.tried) = (0, false);
    }
}

// A thread that waits for the answer to a Write which completed early.

/// If a Write completes before the peer has it, the program next spins on its memory for the peer's answer.
/// So the poll that would return the completion waits for the answer for this long. It is longer than a round
/// trip in which the peer's background thread must be woken: of two ends that both wait in vain because of
/// each other, one must succeed first.
pub(crate) const ANSWER: Duration = Duration::from_micros(50);
/// After a wait in vain, this number of completions is returned at once: the first number, and the maximum
/// while each wait is in vain.
const WITHOUT_WAIT: (u32, u32) = (16, 8192);
/// After this number of answers in a row, a wait in vain counts as an exception.
const ANSWERS: u32 = 4;
/// Waits that are answered keep the background thread away as empty polls do, and may be all that a thread
/// ever does. So it looks around after as many waits as polls, and after this time at the latest.
const UNSEEN: Duration = Duration::from_millis(1);

/// What a poll does before it returns an early completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BeforeEarly {
    /// It waits for the answer.
    Wait,
    /// It returns the completion: lately, no answer came.
    Return,
    /// It returns the completion, and the background thread gets the sockets at once: the program stopped
    /// polling.
    HandOver,
}

/// Whether a thread waits for the peer's answer before it returns the completion of a Write.
#[derive(Clone, Copy)]
pub(crate) struct AnswerWait {
    /// Completions to return at once before the next wait.
    skip: u32,
    /// The value of `skip` after the next wait in vain.
    pause: u32,
    /// Answers in a row.
    answers: u32,
    /// The last known count of input that came while the background thread stood back and no thread polled.
    missed: u64,
    /// When a wait last began with a look at all sockets.
    looked: Option<Instant>,
}

impl AnswerWait {
    pub const NEW: Self = Self { skip: 0, pause: WITHOUT_WAIT.0, answers: 0, missed: 0, looked: None };

    /// Counts a completion. `missed`: how often the background thread has found input when it took the
    /// sockets back.
    pub fn next(&mut self, missed: u64) -> BeforeEarly {
        if self.skip > 0 {
            self.skip -= 1;
            BeforeEarly::Return
        } else if self.missed != missed {
            // The first input was not what the program waited for, or it has stopped polling.
            self.missed = missed;
            self.skip = WITHOUT_WAIT.0;
            BeforeEarly::HandOver
        } else {
            BeforeEarly::Wait
        }
    }

    /// Whether all sockets must be looked at before a wait that begins now.
    pub fn must_look_around(&self, now: Instant) -> bool {
        self.looked.is_none_or(|at| now.duration_since(at) >= UNSEEN)
    }

    pub fn looked_around(&mut self, now: Instant) {
        self.looked = Some(now);
    }

    pub fn waited(&mut self, answered: bool) {
        if answered {
            self.answers += 1;
            if self.answers >= ANSWERS {
                self.pause = WITHOUT_WAIT.0;
            }
        } else {
            (self.skip, self.answers) = (self.pause, 0);
            self.pause = (self.pause * 2).min(WITHOUT_WAIT.1);
        }
    }
}

// A thread that is about to sleep for an event.

/// Longest look before a sleep. A round trip takes less even if the peer's thread must be woken for it: of
/// two ends that both sleep, one can find out in this way that looking is useful, and then the other.
pub(crate) const SPIN: Duration = Duration::from_micros(50);
const MOST_SPIN_SCORE: i32 = 4;
const WITHOUT_SPIN: i32 = 64;
/// How long after a look at all sockets the threads that look directly make the next one: the least, while
/// such looks find something, and the most. At least the time of a few of their own looks
/// ([`Spans::around`]): a look at all sockets takes as long as one of these.
pub(super) const AROUND: (Nanos, Nanos) = (2_000, 32_000);

/// Whether the threads that wait on a channel look for an event for a short time before they sleep: falling
/// asleep and being woken costs more than most answers take.
pub(crate) struct Spinning {
    /// Waits that a look made unnecessary, minus those that it did not; negative: waits left without a look.
    score: AtomicI32,
}

impl Spinning {
    pub fn new() -> Self {
        Self { score: AtomicI32::new(0) }
    }

    /// The score, if a wait that begins now looks first.
    pub fn begin(&self) -> Option<i32> {
        let score = self.score.load(Ordering::Relaxed);
        if score < 0 {
            // One wait in many tries again.
            self.score.store(score + 1, Ordering::Relaxed);
            return None;
        }
        Some(score)
    }

    /// The wait that began with this score has found its event, or not.
    pub fn end(&self, score: i32, found: bool) {
        let score = match score {
            score if found => (score + 1).min(MOST_SPIN_SCORE),
            score if score > 0 => score - 1,
            _ => -WITHOUT_SPIN,
        };
        self.score.store(score, Ordering::Relaxed);
    }
}

/// When threads that look directly before they sleep look at all sockets. By time, for all threads together:
/// a wait that ends at its first look must not keep other sockets from being served, and one that takes
/// longer need not ask the system each time.
pub(crate) struct Around {
    /// When the next look is due.
    due: AtomicU64,
    period: AtomicU64,
}

impl Around {
    pub fn new() -> Self {
        Self { due: AtomicU64::new(0), period: AtomicU64::new(AROUND.0) }
    }

    /// Whether a look is due; if so, the caller makes it, and no other thread.
    pub fn is_due(&self, now: Nanos) -> bool {
        let due = self.due.load(Ordering::Relaxed);
        let next = now.saturating_add(self.period.load(Ordering::Relaxed));
        now >= due && self.due.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// A look was made, and found sockets ready or not.
    pub fn looked(&self, busy: bool, spans: Spans) {
        let (least, most) = spans.around();
        let period = self.period.load(Ordering::Relaxed);
        let period = if busy { (period / 8).max(least) } else { (period * 2).clamp(least, most) };
        self.period.store(period, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_waits_for_its_answer_seldom_where_none_comes() {
        let mut policy = AnswerWait::NEW;
        let mut waits = 0;
        for _ in 0..100_000 {
            if policy.next(0) == BeforeEarly::Wait {
                waits += 1;
                policy.waited(false);
            }
        }
        assert!((10..25).contains(&waits), "{waits}");
        // Until answers come.
        while policy.next(0) != BeforeEarly::Wait {}
        (0..ANSWERS).for_each(|_| policy.waited(true));
        policy.waited(false);
        let returned = (0..).take_while(|_| policy.next(0) == BeforeEarly::Return).count();
        assert_eq!(returned, WITHOUT_WAIT.0 as usize);
        assert_eq!(policy.next(1), BeforeEarly::HandOver, "input came while no thread looked");
    }

    fn polls_until_it_yields(yielding: &mut Yielding) -> u32 {
        (1..).find(|_| yielding.count()).unwrap_or(0)
    }

    #[test]
    fn yields_soon_where_that_helped_and_seldom_where_it_did_not() {
        let spans = Spans::of(400);
        // Another thread runs and is soon done, none runs, one computes.
        for (us, switched, helps) in [(6, true, true), (6, false, false), (3_000, true, false)] {
            let mut yielding = Poller::NEW.yielding;
            for _ in 0..20 {
                polls_until_it_yields(&mut yielding);
                yielding.yielded(Duration::from_micros(us), switched, spans);
                yielding.found();
            }
            assert_eq!(yielding.until, if helps { YIELD.0 } else { YIELD.1 }, "{us}");
            let mut last = 0;
            for _ in 0..20 {
                let n = polls_until_it_yields(&mut yielding);
                assert!(n >= last);
                last = n;
            }
            assert_eq!(last, YIELD.1, "it brings nothing any more");
        }
    }

    #[test]
    fn a_wait_looks_first_as_long_as_that_pays() {
        let spinning = Spinning::new();
        let wait = |found| spinning.begin().map(|score| spinning.end(score, found)).is_some();
        (0..10).for_each(|_| assert!(wait(true)));
        (0..=MOST_SPIN_SCORE).for_each(|_| assert!(wait(false)));
        (0..WITHOUT_SPIN).for_each(|_| assert!(!wait(true), "it has not paid"));
        assert!(wait(true), "it is tried again");
    }

    #[test]
    fn all_sockets_are_looked_at_often_only_where_that_finds_something() {
        let around = Around::new();
        let looks = |busy, from: Nanos| {
            let due = (from..from + 1_000_000).step_by(500).filter(|now| around.is_due(*now));
            due.inspect(|_| around.looked(busy, Spans::of(400))).count()
        };
        assert!((30..40).contains(&looks(false, 0)));
        assert!((450..=500).contains(&looks(true, 1_000_000)));
        assert!((30..40).contains(&looks(false, 2_000_000)));
    }
}
