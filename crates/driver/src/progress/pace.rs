//! What this machine costs, learned as the library runs, and the times that follow from it.
//!
//! * What an empty poll takes, with its receive: the background thread asks when it wakes, and the next two
//!   empty polls in a row of one thread read the clock. [`Spans`] follow.
//! * After how many empty polls a thread polls in earnest ([`Pace::earnest_at`]): who found the input that
//!   both were there for ([`Contest`]).
//!
//! Nothing of this reads the clock while a thread polls and the background thread sleeps.

use std::cell::Cell;
use std::time::Duration;

use super::polling::{ANSWER, AROUND, IN_EARNEST, SPIN, STAMP_EVERY, YIELD};
use super::{
    ALIVE, HELD, LOOK_ON, NAP_BESIDE_LEADS, NAP_BESIDE_LOOPS, NAPS, Nanos, PUSH_GROWTH, PUSH_PERIOD,
    PUSH_PERIOD_MOST, nanos,
};
use crate::sync::{AtomicU8, AtomicU32, AtomicU64, Ordering, thread_local};

/// The slowest empty poll that the times follow. Slower ones are those of a thread that seldom runs.
const SLOWEST: Nanos = 40_000;

/// See [`Spans::soon_done`].
const SOON_DONE: Duration = Duration::from_micros(500);
/// What the system lets a thread run for beside others, at least nearly.
const SLICE: Duration = Duration::from_millis(1);

/// The times that must be long enough for some empty polls, on a machine of this pace. Where polls are fast
/// they are the constants, which stand for what a wake-up costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spans {
    /// What an empty poll takes.
    poll: Duration,
}

impl Spans {
    pub fn of(poll: Nanos) -> Self {
        Self { poll: Duration::from_nanos(poll.min(SLOWEST)) }
    }

    /// What so many empty polls take.
    pub fn polls(self, number: u32) -> Duration {
        self.poll.saturating_mul(number)
    }

    /// See [`NAPS`]: a thread that goes on polling stamps the time within each of them.
    pub fn nap(self, naps: usize) -> Option<Duration> {
        NAPS.get(naps).map(|(least, stamps)| self.polls(stamps * STAMP_EVERY).max(*least))
    }

    /// See [`ALIVE`].
    pub fn alive(self) -> Duration {
        self.polls(8 * STAMP_EVERY).max(ALIVE)
    }

    /// The time from the push of the watchdog with this number to the next: see [`PUSH_PERIOD`]. It grows by
    /// less than [`Self::alive`], less what a push may be late: the timer that an earlier push has set must
    /// not expire before the next one.
    pub fn push_period(self, push: u32) -> Duration {
        let first = self.polls(4 * STAMP_EVERY).max(PUSH_PERIOD);
        PUSH_GROWTH.saturating_mul(push).saturating_add(first).min(PUSH_PERIOD_MOST.max(first))
    }

    /// See [`SPIN`].
    pub fn spin(self) -> Duration {
        self.polls(STAMP_EVERY).max(SPIN)
    }

    /// See [`LOOK_ON`].
    pub fn look_on(self) -> Duration {
        self.polls(STAMP_EVERY).max(LOOK_ON)
    }

    /// See [`ANSWER`].
    pub fn answer(self) -> Duration {
        self.polls(STAMP_EVERY).max(ANSWER)
    }

    /// See [`AROUND`].
    pub fn around(self) -> (Nanos, Nanos) {
        (AROUND.0.max(nanos(self.polls(4))), AROUND.1.max(nanos(self.polls(64))))
    }

    /// See [`NAP_BESIDE_LEADS`].
    pub fn beside_leads(self) -> Duration {
        self.polls(32).max(NAP_BESIDE_LEADS)
    }

    /// See [`NAP_BESIDE_LOOPS`].
    pub fn beside_loops(self) -> Duration {
        self.polls(64).max(NAP_BESIDE_LOOPS)
    }

    /// See [`HELD`].
    pub fn held(self) -> Duration {
        self.polls(64).max(HELD)
    }

    /// Polls within a slice of the system, but for those that are fewer than a yield is worth, or more than
    /// are ever made without one.
    pub fn polls_of_slice(self) -> u32 {
        let polls = nanos(SLICE) / nanos(self.poll).max(1);
        u32::try_from(polls).unwrap_or(u32::MAX).clamp(16, YIELD.1)
    }

    /// The longest that a thread may take which is soon done: much longer than what a peer has to do for an
    /// answer, and less than the slice of one that computes, which the system gives by time (0.7 to 4 ms).
    pub fn soon_done(self) -> Duration {
        self.polls(64).max(SOON_DONE)
    }
}

/// The pace of the machine, as far as it is known.
pub(crate) struct Pace {
    /// What an empty poll takes.
    poll: AtomicU64,
    /// The last measurement: a single long one may be that of a thread that was preempted.
    last: AtomicU64,
    /// See [`Pace::earnest_at`].
    earnest_at: AtomicU32,
    question: AtomicU8,
}

/// Nobody asks.
const ANSWERED: u8 = 0;
/// The background thread asks.
const ASKED: u8 = 1;
/// A thread has polled in vain since; its next empty poll ends the measurement.
const MEASURING: u8 = 2;

/// Who polls, as far as the background thread sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Present {
    Nobody,
    /// A thread has polled in vain, but not twice in a row.
    Passing,
    /// A thread has polled in vain twice in a row.
    Polling,
}

thread_local! {
    /// Which empty poll in a row began the measurement, and when.
    static BEGAN: Cell<(u32, Nanos)> = const { Cell::new((0, 0)) };
}

impl Pace {
    pub fn new() -> Self {
        Self {
            poll: AtomicU64::new(0),
            last: AtomicU64::new(0),
            earnest_at: AtomicU32::new(IN_EARNEST),
            question: AtomicU8::new(ANSWERED),
        }
    }

    pub fn spans(&self) -> Spans {
        Spans::of(self.poll.load(Ordering::Relaxed))
    }

    /// Empty polls in a row after which a thread polls in earnest: [`IN_EARNEST`], or 1 where a thread that
    /// polls sees its answers before that many.
    #[inline]
    pub fn earnest_at(&self) -> u32 {
        self.earnest_at.load(Ordering::Relaxed)
    }

    /// For the background thread: whether a thread polls in vain from now on, and how long that takes.
    pub fn ask(&self) {
        self.question.store(ASKED, Ordering::Relaxed);
    }

    /// Who has polled in vain since [`Self::ask`].
    pub fn present(&self) -> Present {
        match self.question.load(Ordering::Relaxed) {
            ASKED => Present::Nobody,
            MEASURING => Present::Passing,
            _ => Present::Polling,
        }
    }

    /// For a thread whose last `empty` polls in a row were empty: whether [`Self::answer`] is wanted.
    #[inline]
    pub fn is_asked(&self) -> bool {
        self.question.load(Ordering::Relaxed) != ANSWERED
    }

    /// Its last `empty` polls in a row were empty, and it is `now`.
    #[cold]
    pub fn answer(&self, empty: u32, now: Nanos) {
        let began = BEGAN.try_with(|began| began.replace((empty, now))).unwrap_or_default();
        if self.question.load(Ordering::Relaxed) == MEASURING && began.0.checked_add(1) == Some(empty) {
            self.learn(now.saturating_sub(began.1));
            self.question.store(ANSWERED, Ordering::Relaxed);
        } else {
            self.question.store(MEASURING, Ordering::Relaxed);
        }
    }

    /// An empty poll took this long. Longer ones count when they repeat; shorter ones little by little.
    pub fn learn(&self, took: Nanos) {
        let sure = took.min(self.last.swap(took, Ordering::Relaxed));
        let known = self.poll.load(Ordering::Relaxed);
        let learned = if sure > known { sure } else { known - (known - sure) / 4 };
        self.poll.store(learned.min(SLOWEST), Ordering::Relaxed);
    }

    /// The background thread has decided.
    pub fn set_earnest_at(&self, empty: u32) {
        self.earnest_at.store(empty, Ordering::Relaxed);
    }
}

/// Wake-ups in a row that found a thread polling, until the background thread stands back for its first empty
/// poll.
const CONTESTS: u32 = 4;
/// After a thread had stopped polling in spite of that, this many contests count for nothing: the first
/// number, and the maximum.
const DOUBT: (u32, u32) = (64, 8192);
/// Times in a row that the background thread took the sockets back and nothing had come: the last doubt is
/// forgotten.
const GOOD: u32 = 4;

/// For how long the sockets are left to a program that has event loops, or had one at its start as UCX has,
/// and polls. The ranks of an MPI poll for their messages, compute for a few milliseconds and poll again: a
/// nap that ends while one computes takes its processor, and gives the sockets back a moment later, which
/// took a twentieth of GROMACS' time. A loop that sleeps is told of input by its sockets, but its timers
/// wait, so for loops this stays as it is.
#[derive(Debug, Default)]
pub(crate) struct Returns {
    evidence: u32,
    /// The last poll of a program to which the sockets were left in vain.
    gave_up: Option<Nanos>,
    /// The last sign of a loop that was seen.
    looped_at: Nanos,
}

/// Naps beside loops that such a program may have without a poll.
pub(super) const RETURNS: u32 = 4;
/// A nap in which it has polled, and a time in which it had not, but came back soon; how much is enough.
const EVIDENCE: [u32; 3] = [1, 4, 16];

impl Returns {
    /// How long the sockets are left to it. `polls`: its last sign was a poll, not the wait of a loop.
    pub fn beside_loops(&self, spans: Spans, polls: bool) -> Duration {
        let is_sure = polls && self.evidence >= EVIDENCE[2];
        spans.beside_loops() * if is_sure { RETURNS } else { 1 }
    }

    /// It has polled lately, and the sockets are left to it for a while. `looped_at`: when a loop of it last
    /// began to wait.
    pub fn leaves(&mut self, now: Nanos, spans: Spans, polls: bool, looped_at: Nanos) {
        let soon = nanos(spans.beside_loops() * RETURNS);
        let loops = std::mem::replace(&mut self.looped_at, looped_at) != looped_at;
        let more = match self.gave_up.take() {
            _ if !polls || loops => None,
            None => Some(EVIDENCE[0]),
            Some(last) => (now.saturating_sub(last) < soon).then_some(EVIDENCE[1]),
        };
        self.evidence = more.map_or(0, |more| (self.evidence + more).min(EVIDENCE[2]));
    }

    /// It has not polled since `last`, and somebody else serves the sockets. `None`: it has said so.
    pub fn gives_up(&mut self, last: Option<Nanos>) {
        if last.is_none() {
            self.evidence = 0;
        }
        self.gave_up = self.gave_up.or(last);
    }
}

/// Who finds the input that both are there for. If the background thread is woken for input again and again
/// while a thread polls in vain, that thread would have found it. Then the background thread stands back from
/// the first empty poll on, until that leaves input lying. Where a round trip takes a few empty polls, no
/// thread would ever be seen to poll in earnest otherwise.
#[derive(Debug)]
pub(crate) struct Contest {
    earnest_at: u32,
    contests: u32,
    skip: u32,
    doubt: u32,
    good: u32,
    /// Input lay there when the sockets were taken back: by a thread that had stopped, or was only late?
    missed: bool,
}

impl Contest {
    pub fn new() -> Self {
        Self { earnest_at: IN_EARNEST, contests: 0, skip: 0, doubt: DOUBT.0, good: 0, missed: false }
    }

    /// The background thread was woken by input. `present`: who has polled since it last was.
    pub fn served(&mut self, present: Present) -> u32 {
        let missed = std::mem::take(&mut self.missed) && present != Present::Polling;
        if missed && self.earnest_at < IN_EARNEST {
            self.earnest_at = IN_EARNEST;
            self.skip = self.doubt;
            self.doubt = (self.doubt * 2).min(DOUBT.1);
        }
        self.contests = match (present, self.skip) {
            (Present::Nobody, _) => 0,
            (_, 0) => self.contests + 1,
            _ => {
                self.skip -= 1;
                0
            }
        };
        if self.contests >= CONTESTS {
            (self.earnest_at, self.contests) = (1, 0);
        }
        self.earnest_at
    }

    /// The background thread has taken the sockets back, and input lay there or not.
    pub fn took_back(&mut self, input: bool) {
        self.missed = input;
        self.good = if input || self.earnest_at == IN_EARNEST { 0 } else { self.good + 1 };
        if self.good >= GOOD {
            self.doubt = DOUBT.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    #[test]
    fn times_follow_the_pace_and_hold_their_order() {
        for poll in [15, 200, 400, 4_000, 10_000, 20_000, 500_000] {
            let spans = Spans::of(poll);
            let stamps = Duration::from_nanos(poll.min(SLOWEST)) * STAMP_EVERY;
            let (first, second) = (spans.nap(0).unwrap(), spans.nap(1).unwrap());
            assert!(stamps < first && first < second && second < spans.alive(), "{poll}: {spans:?}");
            assert!(stamps < spans.push_period(0) && spans.nap(2).is_none());
            assert!(spans.alive() <= us(5200), "a peer waits for no longer: {spans:?}");
        }
        let fast = Spans::of(400);
        assert_eq!([fast.nap(0), fast.nap(1)], [Some(us(50)), Some(us(100))]);
        assert_eq!([fast.alive(), fast.push_period(0), fast.spin()], [us(200), us(250), us(50)]);
        assert_eq!(Spans::of(10_000).alive(), us(1280));
    }

    #[test]
    fn a_poll_that_was_preempted_once_does_not_count() {
        let pace = Pace::new();
        for took in [400, 420, 4_000_000, 410, 4_000_000, 400] {
            pace.learn(took);
            assert!(pace.spans() < 1_000.into(), "{took}");
        }
        pace.learn(20_000);
        pace.learn(20_000);
        assert_eq!(pace.spans(), Spans::of(20_000), "it counts when it repeats");
        (0..40).for_each(|_| pace.learn(400));
        assert!(pace.spans() < 1_000.into(), "and a spell ends");
    }

    impl From<Nanos> for Spans {
        fn from(poll: Nanos) -> Self {
            Self::of(poll)
        }
    }

    impl PartialOrd for Spans {
        fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
            self.poll.partial_cmp(&other.poll)
        }
    }

    #[test]
    fn two_empty_polls_in_a_row_answer() {
        let pace = Pace::new();
        assert!(!pace.is_asked());
        pace.learn(700);
        pace.ask();
        pace.answer(1, 1_000);
        assert!(pace.is_asked() && pace.present() == Present::Passing);
        // It found something in between.
        pace.answer(1, 9_000);
        pace.answer(2, 9_700);
        assert!(!pace.is_asked() && pace.present() == Present::Polling);
        assert_eq!(pace.spans(), Spans::of(700));
    }

    #[test]
    fn it_stands_back_early_where_a_thread_was_there_and_seldom_where_it_went_away() {
        let mut contest = Contest::new();
        let (here, gone) = (Present::Polling, Present::Nobody);
        assert_eq!([here, here, gone, here].map(|present| contest.served(present)), [IN_EARNEST; 4]);
        (0..CONTESTS).for_each(|_| _ = contest.served(here));
        assert_eq!(contest.earnest_at, 1);
        // Late, but still there.
        contest.took_back(true);
        assert_eq!(contest.served(here), 1);
        // A program that polls once for each message and then looks at its memory.
        let mut early = 0;
        for _ in 0..100_000 {
            if contest.earnest_at == 1 {
                early += 1;
                contest.took_back(true);
                contest.served(Present::Passing);
            } else {
                contest.served(Present::Passing);
            }
        }
        assert!((8..30).contains(&early), "{early}");
    }
}
