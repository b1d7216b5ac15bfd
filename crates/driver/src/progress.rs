//! Which thread makes progress, and when: all decisions about it and all their numbers, and no action
//! (docs/adr/001 and 034).
//!
//! A thread that polls serves the sockets itself. A thread that blocks on a channel serves them as the
//! *leader*. If neither does, the background thread does. [`Mode`] is what the background thread does, and
//! [`Mode::next`] chooses it; [`Lead`] names the leader. `background` and `lead` act on them. The second half
//! is for the program's threads: how a thread that polls, waits for an answer or is about to sleep divides
//! its time.

use std::time::{Duration, Instant};

use uwarp_rnic::cq::Direct;

// (The model includes this file by its path.)
#[cfg(test)]
#[path = "progress/costs.rs"]
mod costs;
#[path = "progress/pace.rs"]
mod pace;

pub(crate) use pace::{Contest, Pace, Spans};

use crate::sync::{AtomicI32, AtomicU64, Ordering};

/// A time, in nanoseconds since the engine's start.
pub(crate) type Nanos = u64;

/// Later than any time.
pub(crate) const NEVER: Nanos = u64::MAX >> Mode::TAG_BITS;

/// A time span as a number of nanoseconds.
pub(crate) fn nanos(time: Duration) -> Nanos {
    u64::try_from(time.as_nanos()).unwrap_or(NEVER).min(NEVER)
}

// The background thread.

/// The background thread's first sleeps beside a thread that polls in earnest, possibly for a moment only.
/// After these, it sleeps on the watchdog. At least this long, and at least for so many stamps ([`Spans`]).
const NAPS: [(Duration, u32); 2] = [(Duration::from_micros(50), 2), (Duration::from_micros(100), 4)];
/// Its sleeps beside leads that follow each other.
pub(crate) const NAP_BESIDE_LEADS: Duration = Duration::from_micros(200);
/// The same beside the leads of an event loop, and how long after one the background thread leaves the
/// sockets to the next: a loop comes back when it has handled its events, often many of them. A loop that
/// computes keeps its peers waiting for so long.
pub(crate) const NAP_BESIDE_LOOPS: Duration = Duration::from_millis(1);
/// Longest lead, and longest time between leads that do not wake the background thread. After a longer lead,
/// the background thread serves the sockets, and the thread sleeps on its channel's descriptor. So a thread
/// sleeps for long only in a call that it can leave in any way (`pthread_cancel`, `longjmp` out of a signal
/// handler): it holds nothing there that other threads need.
pub(crate) const LEAD: Duration = Duration::from_millis(5);
/// A thread that still leads this long after its dismissal counts as lost.
pub(crate) const LOST: Duration = Duration::from_millis(50);
/// Time between two pushes of the watchdog, when a thread has just begun to poll.
pub(crate) const PUSH_PERIOD: Duration = Duration::from_micros(250);
/// How much longer it takes until the next push each time, as long as a thread polls; and the most. So the
/// end of the polling is noticed after a tenth of the time that it has lasted, at most after 1.7 ms. A push
/// is a system call, which takes as long as half a message.
pub(crate) const PUSH_GROWTH: Duration = Duration::from_micros(100);
pub(crate) const PUSH_PERIOD_MOST: Duration = Duration::from_micros(1500);
/// A push that is due may be late by this, so that it comes when the polling thread has nothing better to do.
pub(crate) const PUSH_LATE: Duration = Duration::from_micros(50);
/// A thread that polls counts as alive if it has stamped the time this recently. This and the time between
/// two pushes are the longest time until the background thread notices that it has stopped.
pub(crate) const ALIVE: Duration = Duration::from_micros(200);

/// What the background thread does. Only that thread changes it.
///
/// ```text
///   mode              it sleeps                        woken by                timers wake       may park
///   Awake             not: it chooses                  -                       the leader        no
///   Serving           on the sockets                   input, timer, bell      it, before until  no
///   Napping           beside a poller, for a moment    hand-over               the leader        no
///   StandingBack      beside pollers                   hand-over, watchdog     the leader        yes
///   TakingBack        not: one look at all sockets     -                       the leader        no
///   BesideLeads       beside leads that follow         time                    the leader        no
///   AwaitingLeader    until a dismissed leader leaves  end of the lead         the leader        no
/// ```
///
/// From `Awake` it goes to the mode that [`Mode::next`] chooses, from every other mode to `Awake`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It looks at what the program's threads do, and chooses.
    Awake,
    /// It sleeps on the sockets, or is about to, until this time at the latest.
    Serving { until: Nanos },
    /// It naps beside a thread that polls, perhaps only for a moment.
    Napping,
    /// It sleeps on the watchdog, which polling threads push back. They may park descriptors.
    StandingBack,
    /// No thread polls any more: it watches the parked descriptors again.
    TakingBack,
    /// It naps beside leads that follow each other. A wake-up for each packet would cost more than it helps.
    /// The threads would compete for the locks, and of two threads that wait for the same sockets the one
    /// that came last is woken.
    BesideLeads,
    /// It has dismissed the leader and sleeps until the lead has ended.
    AwaitingLeader,
}

/// What the background thread sees of the program's threads when it chooses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Signs {
    /// Time since a thread last polled in earnest, began to lead or stopped. `None`: it has handed over.
    pub polled: Option<Duration>,
    /// The present lead.
    pub lead: Option<Lead>,
    /// Sleeps beside polling threads since the background thread last served.
    pub naps: usize,
    /// The last lead was, or is, that of an event loop.
    pub looped: bool,
    /// What this machine costs.
    pub spans: Spans,
}

impl Mode {
    const TAG_BITS: u32 = 3;

    /// The mode for these signs. The transition table is printed by a test below.
    pub fn next(signs: Signs) -> Self {
        let within = |span| signs.polled.is_some_and(|age| age < span);
        match signs.spans.nap(signs.naps) {
            _ if signs.looped && signs.lead.is_none() && signs.naps == 0 && within(NAP_BESIDE_LOOPS) => {
                Self::BesideLeads
            }
            _ if signs.looped && signs.lead.is_some() && signs.naps == 0 && within(LEAD) => Self::BesideLeads,
            Some(time) if within(time) => Self::Napping,
            None if within(signs.spans.alive()) => Self::StandingBack,
            _ if signs.naps > 0 => Self::TakingBack,
            _ if signs.lead.is_some() && within(LEAD) => Self::BesideLeads,
            _ if signs.lead.is_some() => Self::AwaitingLeader,
            _ => Self::Serving { until: NEVER },
        }
    }

    /// Whether a polling thread may have descriptors unwatched: only while the watchdog would notice that it
    /// has stopped.
    pub fn allows_parking(self) -> bool {
        self == Self::StandingBack
    }

    /// Whether it sleeps beside polling threads, so that a hand-over must wake it.
    pub fn heeds_hand_over(self) -> bool {
        matches!(self, Self::Napping | Self::StandingBack)
    }

    fn to_word(self) -> u64 {
        let (tag, until) = match self {
            Self::Awake => (0, 0),
            Self::Serving { until } => (1, until.min(NEVER)),
            Self::Napping => (2, 0),
            Self::StandingBack => (3, 0),
            Self::TakingBack => (4, 0),
            Self::BesideLeads => (5, 0),
            Self::AwaitingLeader => (6, 0),
        };
        until << Self::TAG_BITS | tag
    }

    fn from_word(word: u64) -> Self {
        match word & ((1 << Self::TAG_BITS) - 1) {
            1 => Self::Serving { until: word >> Self::TAG_BITS },
            2 => Self::Napping,
            3 => Self::StandingBack,
            4 => Self::TakingBack,
            5 => Self::BesideLeads,
            6 => Self::AwaitingLeader,
            _ => Self::Awake,
        }
    }
}

/// The background thread's mode, visible to all threads.
pub(crate) struct CurrentMode(AtomicU64);

impl CurrentMode {
    pub fn new() -> Self {
        Self(AtomicU64::new(Mode::Awake.to_word()))
    }

    /// For the background thread. Other threads change what it reads after this before they read the mode. So
    /// either it sees their change, or they see this mode.
    pub fn enter(&self, mode: Mode) {
        let old = self.0.swap(mode.to_word(), Ordering::SeqCst);
        debug_assert_ne!(old == 0, mode == Mode::Awake, "from {:?} to {mode:?}", Mode::from_word(old));
    }

    pub fn get(&self) -> Mode {
        Mode::from_word(self.0.load(Ordering::SeqCst))
    }

    /// Possibly an earlier mode. For a polling thread, at each poll.
    #[inline]
    pub fn glance(&self) -> Mode {
        Mode::from_word(self.0.load(Ordering::Relaxed))
    }
}

/// When a thread last polled in earnest.
pub(crate) struct LastPoll(AtomicU64);

impl LastPoll {
    const HANDED_OVER: u64 = 0;

    pub fn new() -> Self {
        Self(AtomicU64::new(Self::HANDED_OVER))
    }

    #[inline]
    pub fn stamp(&self, now: Nanos) {
        self.0.store(now, Ordering::Relaxed);
    }

    /// The polling has ended.
    pub fn hand_over(&self) {
        self.0.store(Self::HANDED_OVER, Ordering::SeqCst);
    }

    /// `None`: the polling has ended.
    pub fn get(&self) -> Option<Nanos> {
        Some(self.0.load(Ordering::SeqCst)).filter(|at| *at != Self::HANDED_OVER)
    }

    pub fn age(&self, now: Nanos) -> Option<Duration> {
        self.get().map(|at| Duration::from_nanos(now.saturating_sub(at)))
    }
}

// The leader.

/// A thread's right to sleep on the sockets in place of the background thread, named by the time it began:
/// two leads never begin at the same nanosecond, for one must end before another begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lead(u64);

impl Lead {
    pub fn beginning(now: Nanos) -> Self {
        Self(now.max(1) << 1)
    }

    pub fn age(self, now: Nanos) -> Duration {
        Duration::from_nanos(now.saturating_sub(self.0 >> 1))
    }

    /// For callers that keep it as a number, which is not 0.
    pub fn to_word(self) -> u64 {
        self.0
    }

    pub fn from_word(word: u64) -> Self {
        Self(word & !CurrentLead::DISMISSED)
    }
}

/// The present lead.
///
/// ```text
///   from               event                                          to
///   nobody             a thread begins to block on a channel          led
///   led                nothing has come for LEAD                      dismissed
///   led, dismissed     its thread has an event, retires, or exits     nobody
///   led, dismissed     its thread is lost: it left with a jump        nobody
/// ```
pub(crate) struct CurrentLead(AtomicU64);

/// What must be done with a lead of this age, if polling threads keep the background thread from looking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    Dismissal,
    /// Its thread is lost.
    End,
}

impl CurrentLead {
    const NOBODY: u64 = 0;
    const DISMISSED: u64 = 1;

    pub fn new() -> Self {
        Self(AtomicU64::new(Self::NOBODY))
    }

    /// Returns whether there was no leader.
    pub fn begin(&self, lead: Lead) -> bool {
        self.0.compare_exchange(Self::NOBODY, lead.0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Returns whether it had not been dismissed before.
    pub fn dismiss(&self, lead: Lead) -> bool {
        let dismissed = lead.0 | Self::DISMISSED;
        self.0.compare_exchange(lead.0, dismissed, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Returns whether it had not ended before.
    pub fn end(&self, lead: Lead) -> bool {
        let ends = |word| (word & !Self::DISMISSED == lead.0).then_some(Self::NOBODY);
        self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, ends).is_ok()
    }

    /// Ends the present lead, if there is one.
    pub fn end_any(&self) {
        self.0.store(Self::NOBODY, Ordering::SeqCst);
    }

    /// The present lead, dismissed or not.
    pub fn get(&self) -> Option<Lead> {
        let lead = self.0.load(Ordering::SeqCst) & !Self::DISMISSED;
        (lead != Self::NOBODY).then_some(Lead(lead))
    }

    /// Whether this lead continues and is not dismissed.
    pub fn goes_on(&self, lead: Lead) -> bool {
        self.0.load(Ordering::SeqCst) == lead.0
    }
}

impl Due {
    pub fn at(age: Duration) -> Self {
        match age {
            age if age > LEAD + LOST => Self::End,
            age if age > LEAD => Self::Dismissal,
            _ => Self::Nothing,
        }
    }
}

// A thread that polls a completion queue.

/// Empty polls in a row after which a thread polls in earnest. A program that polls once after each post and
/// finds its completion (`ib_write_lat`) never reaches this number.
pub(crate) const IN_EARNEST: u32 = 4;
/// A thread that polls in earnest stamps the time once in this number of polls: every few microseconds, well
/// within [`ALIVE`].
const STAMP_EVERY: u32 = 16;
/// How many queue pairs of a completion queue are received from directly; if there are more, epoll reports
/// which have input.
pub(crate) const DIRECT: Direct = Direct { few: 2, favourite: 16, partial_every: 4 };
/// A direct receive does not see other sockets. After this number of empty polls they are looked at too, and
/// far more often as long as this finds something: the background thread stands back for all sockets, not
/// only for the polled ones. Polls count even if they are not in a row: a thread that often finds something
/// keeps the background thread away all the same.
const LOOK_AROUND: u32 = 256;
/// Empty polls after which a thread yields its core, because another thread there may have to answer: the
/// minimum, and the maximum while yielding brings nothing.
const YIELD: (u32, u32) = (32, 512);
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
}

impl Poller {
    pub const NEW: Self = Self {
        look_around: LookAround { polls: 0, until: LOOK_AROUND },
        yielding: Yielding { polls: 0, until: YIELD.1, tried: false },
    };
    /// For a thread that is ending: keeps nothing, and looks around each time.
    pub const ENDING: Self = Self { look_around: LookAround { polls: 0, until: 1 }, ..Self::NEW };
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
/// computes there, yielding costs one of its slices and brings nothing. The results of the next polls show
/// which case it is.
#[derive(Clone, Copy)]
pub(crate) struct Yielding {
    /// Empty polls since the last completion or yield.
    polls: u32,
    /// The next yield comes after this many.
    until: u32,
    /// The thread has yielded since the last completion.
    tried: bool,
}

impl Yielding {
    /// Counts an empty poll; returns whether to yield.
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

    /// A poll found a completion.
    pub fn found(&mut self) {
        if self.tried && self.polls <= SOON {
            self.until = YIELD.0;
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
/// such looks find something, and the most.
const AROUND: (Nanos, Nanos) = (2_000, 32_000);

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
    pub fn looked(&self, busy: bool) {
        let period = self.period.load(Ordering::Relaxed);
        let period = if busy { (period / 8).max(AROUND.0) } else { (period * 2).min(AROUND.1) };
        self.period.store(period, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every combination of signs, and the mode that follows: the transition table of [`Mode::next`].
    #[test]
    fn the_background_thread_chooses_its_mode() {
        let us = Duration::from_micros;
        let ages = [("-", None), ("40", Some(us(40))), ("90", Some(us(90))), ("190", Some(us(190)))];
        let ages = ages.into_iter().chain([("4000", Some(us(4000))), ("6000", Some(us(6000)))]);
        let mut table =
            String::from("polled  sleeps beside pollers: 0, 1, 2; then, with a leader: 0, 1, 2\n");
        for (name, polled) in ages {
            let looped = false;
            let mode =
                |lead, naps| match Mode::next(Signs { polled, lead, naps, looped, spans: Spans::of(400) }) {
                    Mode::Serving { .. } => "Serving".into(),
                    mode => format!("{mode:?}"),
                };
            let row =
                [None, Some(Lead::beginning(1))].map(|lead| [0, 1, 2].map(|naps| mode(lead, naps)).join(" "));
            table += &format!("{name:<7} {} | {}\n", row[0], row[1]);
        }
        assert_eq!(table, TABLE);
    }

    const TABLE: &str = "\
polled  sleeps beside pollers: 0, 1, 2; then, with a leader: 0, 1, 2
-       Serving TakingBack TakingBack | AwaitingLeader TakingBack TakingBack
40      Napping Napping StandingBack | Napping Napping StandingBack
90      Serving Napping StandingBack | BesideLeads Napping StandingBack
190     Serving TakingBack StandingBack | BesideLeads TakingBack StandingBack
4000    Serving TakingBack TakingBack | BesideLeads TakingBack TakingBack
6000    Serving TakingBack TakingBack | AwaitingLeader TakingBack TakingBack
";

    /// Between two leads of an event loop, which has events to handle, the background thread stays away.
    #[test]
    fn a_loop_keeps_the_sockets_for_a_while() {
        let us = |us| Some(Duration::from_micros(us));
        let next = |polled, lead, naps| match Mode::next(Signs {
            polled,
            lead,
            naps,
            looped: true,
            spans: Spans::of(400),
        }) {
            Mode::Serving { .. } => "Serving".into(),
            mode => format!("{mode:?}"),
        };
        let led = Some(Lead::beginning(1));
        assert_eq!(
            [40, 900, 1100].map(|age| next(us(age), None, 0)),
            ["BesideLeads", "BesideLeads", "Serving"]
        );
        assert_eq!(
            [40, 4000, 6000].map(|age| next(us(age), led, 0)),
            ["BesideLeads", "BesideLeads", "AwaitingLeader"]
        );
        assert_eq!(next(None, None, 0), "Serving", "it has handed over");
        assert_eq!(next(us(300), None, 2), "TakingBack", "parked descriptors first");
    }

    #[test]
    fn a_mode_is_read_as_it_was_stored() {
        for mode in [
            Mode::Awake,
            Mode::Serving { until: 0 },
            Mode::Serving { until: 12345 },
            Mode::Serving { until: NEVER },
            Mode::Napping,
            Mode::StandingBack,
            Mode::TakingBack,
            Mode::BesideLeads,
            Mode::AwaitingLeader,
        ] {
            assert_eq!(Mode::from_word(mode.to_word()), mode);
        }
    }

    #[test]
    fn a_lead_ends_once() {
        let (current, one, other) = (CurrentLead::new(), Lead::beginning(10), Lead::beginning(11));
        assert!(!current.dismiss(one) && !current.end(one), "no thread leads");
        assert!(current.begin(one) && !current.begin(other));
        assert!(current.goes_on(one) && !current.goes_on(other));
        assert!(!current.dismiss(other) && !current.end(other), "another one leads");
        assert!(current.dismiss(one) && !current.dismiss(one));
        assert!(current.get() == Some(one) && !current.goes_on(one), "it leads until it retires");
        assert!(current.end(one) && !current.end(one));
        assert!(current.get().is_none() && current.begin(other));
        assert_eq!(Due::at(other.age(11 + nanos(LEAD))), Due::Nothing);
        assert_eq!(Due::at(other.age(12 + nanos(LEAD))), Due::Dismissal);
        assert_eq!(Due::at(other.age(12 + nanos(LEAD + LOST))), Due::End);
    }

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
        let mut yielding = Poller::NEW.yielding;
        assert_eq!(polls_until_it_yields(&mut yielding), YIELD.1);
        yielding.found();
        assert_eq!(polls_until_it_yields(&mut yielding), YIELD.0);
        let mut last = YIELD.0;
        for _ in 0..10 {
            let n = polls_until_it_yields(&mut yielding);
            assert!(n >= last);
            last = n;
        }
        assert_eq!(last, YIELD.1);
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
            due.inspect(|_| around.looked(busy)).count()
        };
        assert!((30..40).contains(&looks(false, 0)));
        assert!((450..=500).contains(&looks(true, 1_000_000)));
        assert!((30..40).contains(&looks(false, 2_000_000)));
    }
}
