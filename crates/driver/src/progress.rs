//! Which thread makes progress, and when: all decisions about it and all their numbers, and no action.
//!
//! A thread that polls serves the sockets itself. A thread that blocks on a channel serves them as the
//! *leader*. If neither does, the background thread does. [`Mode`] is what the background thread does, and
//! [`Mode::next`] chooses it; [`Lead`] names the leader. `background` and `lead` act on them. [`polling`] is
//! for the program's threads: how a thread that polls, waits for an answer or is about to sleep divides its
//! time. [`pace`] learns what the machine costs. This file makes no system call and reads no clock.
//!
//! **One epoll instance** has all sockets, edge-triggered. The background thread sleeps in it, and so does
//! the leader. epoll wakes one waiter, the one that came last, and does not hand an edge-triggered event on
//! to a second one: so nothing is armed or disarmed for each message. The thread that takes an event must
//! empty the socket or put the event back. Other threads that block sleep on their channel's descriptor.
//!
//! **Wake-ups cost most.** A background thread that wakes beside a polling thread costs more than the whole
//! protocol. So it stands back while a thread polls in earnest or leads: it naps, then sleeps on a watchdog
//! that polling threads push back (`watchdog`). Polling threads must therefore look at all sockets and all
//! timers from time to time.
//!
//! **A thread may leave at any time** by cancellation or by a jump out of a signal handler. So a lead ends
//! after [`LEAD`]: then the thread sleeps in `poll` on its channel's descriptor, where it holds no lock, no
//! lead and no event. Cancellation is deferred while it leads, except in the sleep itself, and a thread that
//! was cancelled leaves its event to others. A lead that has not ended [`LOST`] after its dismissal is
//! taken over, and the system reports all descriptors again (`lost_leads`). The background thread dismisses
//! leads, or threads that poll do; only a lead that begins while it sleeps in epoll has a limit of its own.
//!
//! **Two words, no lock**: the mode and the lead, because a process may exit in a signal handler that has
//! stopped any thread anywhere. A thread first announces what it does and then looks at the other word; so
//! at least one of two threads notices the other.
//!
//! **Sleeping takes longer than most answers.** A thread that is about to block looks first
//! ([`Spinning`]), and so does the background thread when it has served a stream in memory, where a look
//! costs no system call. In the iwarp view, where a Write completes before it is placed, a thread that polls
//! waits for the answer first ([`AnswerWait`]): the program would spin on its memory next, and the
//! background thread would be woken for each message.
//!
//! What decides, and which fact about the machine it stands for. P is what an empty poll takes with its
//! receive: 15 ns over memory, 0.4 µs over TCP, 10 µs where an emulator runs the kernel. It is learned
//! ([`Pace`]) without a reading of the clock on a hot path. A time "at least x P" is the larger of the two.
//!
//! | what | value | stands for | follows |
//! |---|---|---|---|
//! | [`NAPS`] | 50, 100 µs, at least 32, 64 P | two stamps of a thread that polls; a wake-up | P |
//! | [`ALIVE`] | 200 µs, at least 128 P | stamps of a thread that is interrupted | P |
//! | [`PUSH_PERIOD`] | 250 µs, at least 64 P | a push, a system call, is rare beside polls | P |
//! | [`PUSH_GROWTH`], [`PUSH_PERIOD_MOST`] | 100 µs, 1.5 ms | how late an end is noticed | a promise |
//! | [`PUSH_LATE`] | 50 µs | less than [`ALIVE`] | |
//! | [`NAP_BESIDE_LEADS`] | 200 µs, at least 32 P | a wake-up is rare beside leads | P |
//! | [`NAP_BESIDE_LOOPS`] | 1 ms, at least 64 P | what a loop does between two waits | P |
//! | `RETURNS` | 4 such naps | what a program computes between two waits that it polls for | [`Returns`] |
//! | [`LOOK_ON`] | 20 µs, at least 16 P | a round trip over memory of a program that computes little | P |
//! | [`HELD`] | 500 µs, at least 64 P | two wake-ups cost little beside the posts | P |
//! | [`LEAD`] | 5 ms | how long a sleep may hold what others need | a promise |
//! | [`LOST`] | 50 ms | above any delay of a thread that runs | a promise |
//! | `IN_EARNEST` | 4 empty polls, or 1 | who found the input that both were there for | [`Contest`] |
//! | `STAMP_EVERY` | 16 empty polls, of memory in a row or not | a stamp costs little beside them | a ratio |
//! | `BETWEEN` (rnic) | 15 glances at memory | together they cost as much as a look | a ratio |
//! | `LOOKS` (pump) | 64 | a line's way from cache to cache, some ten looks | a ratio |
//! | `Following::MOST` (pump) | 64 acknowledgements | a look in vain is rare beside them | a ratio |
//! | `LOOK_AROUND` | 256 empty polls | a look at all sockets costs as much as a poll | a ratio |
//! | `DIRECT` | 2 queue pairs, … | receives that cost as much as such a look | a ratio |
//! | `YIELD` | 1 to 512 empty polls | whether who answers runs on this core | [`polling::Yielding`] |
//! | `ANSWER`, `SPIN` | 50 µs, at least 16 P | a round trip with a wake-up | P |
//! | `AROUND` | 2 to 32 µs, at least 4 to 64 P | such a look is rare beside direct ones | P |
//! | `UNSEEN` | 1 ms | how long other sockets wait beside waits | a promise |
//! | `CONTESTS`, `DOUBT`, `GOOD`, `SOON`, `WITHOUT_…`, `ANSWERS` | counts | enough evidence | ratios |
//! | `ACK` (rnic) | 250 µs | how long an acknowledgement waits for a ride | a promise |
//! | `HOLD` (rnic) | 16 empty polls | a library's polls before its program can answer | a ratio |
//! | `ACK_EVERY`, `LEAD`, `ACK_WITHIN` (rnic) | 96, 192, 4 | messages in an adapter's queues | a promise |
//! | `COME` (own loops) | 2 ms | what a loop that was woken handles first | a promise |
//! | `LOOKS` (event loop, pump) | 4 | the turns of the program, of other sockets | a ratio |
//! | `NAP` (lost leads) | 1 ms | such a look is rare beside [`LOST`] | a ratio |
//! | `FOR_ACKS`, `FOR_FIRST` | 60 ms, halved in vain | other threads' turns of a processor | the waits |
//! | `MANY` (ud) | 4 datagrams in a poll | a program that has more to do | enough evidence |
//! | `JOINED` (ud) | 4 datagrams in a slot | a peer that sends runs | enough evidence |
//! | `SOCKET_EVERY` (ud) | 16 looks at memory | together they cost as much as one at the socket | a ratio |
//! | `LOOK_AFTER`, `LIST_COUNTS` (ud) | 32 sends; 8 for a list | a look costs little beside them | a ratio |
//! | `STAMP_EVERY`, `STAMPS_UNTIL` (ud) | 8, 512 posts | a post takes as long as some polls | a ratio |
//! | `LIST`, `LONG_RUN` (ud) | 16, 8 datagrams | a call takes as long as the pieces of some | a ratio |
//! | `SLICE`, `SOON_DONE` (pace) | 1 ms, 500 µs | the system's turns of a processor | the system |
//! | `SLOWEST` (pace) | 40 µs | above any poll of a thread that runs | a bound |
//! | `SPIN` (rsocket) | 10 µs, at least 16 P | how long librdmacm looks | P |
//!
//! A promise is to a user or a peer, and the same everywhere; where the machine is slow, it costs what it
//! costs: an acknowledgement of its own where a round trip takes longer than `ACK`. (If no thread polls, it
//! waits until that is noticed, after [`PUSH_PERIOD_MOST`] and [`ALIVE`]: docs/adr/009.) A ratio needs no
//! machine: its costs are both in polls. What remains, the times of seconds in `rnic`, `host` and `rd`,
//! ends what does not go on: limits of a silent peer, which no speed of a machine comes near. The times of
//! connection set-up (`cm::timeouts`) are repetitions and limits, from 5 ms to minutes: far above a wake-up
//! of the slowest machine that is meant.
//!
//! `costs` runs these rules on machines from 0.05 to 50 times as slow as two of ours, also if they change,
//! with programs that poll, poll once, block, compute, and share one processor.

use std::cell::Cell;
use std::time::Duration;

// (The model includes this file by its path.)
#[cfg(test)]
#[path = "progress/costs.rs"]
mod costs;
#[path = "progress/pace.rs"]
mod pace;
#[path = "progress/polling.rs"]
mod polling;

#[cfg(test)]
use pace::RETURNS;
pub(crate) use pace::{Contest, Pace, Returns, Spans};
#[cfg(test)]
use polling::Yielding;
pub(crate) use polling::{AnswerWait, Around, BeforeEarly, DIRECT, Poller, Spinning, stamps};

use crate::sync::{AtomicU64, Ordering, thread_local};

thread_local! {
    /// This thread is the background thread.
    static IN_BACKGROUND: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread is the background thread from now on.
pub(crate) fn enter_background() {
    IN_BACKGROUND.with(|here| here.set(true));
}

/// Whether the calling thread is the background thread.
pub(crate) fn in_background() -> bool {
    IN_BACKGROUND.try_with(Cell::get).unwrap_or(false)
}

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

/// How long the background thread looks on after it has served a stream in memory, as long as that finds
/// more. Waking it takes its peer as long as several round trips.
const LOOK_ON: Duration = Duration::from_micros(20);

/// Longest time that datagrams wait for more, if no thread polls. Two wake-ups of the background thread in
/// this time must cost little beside the posts of the same time.
pub(crate) const HELD: Duration = Duration::from_micros(500);

/// What the background thread does. Only that thread changes it.
///
/// ```text
///   mode              it sleeps                        woken by                timers wake       may park
///   Awake             not: it chooses                  -                       the leader        no
///   Serving           on the sockets                   input, timer, bell      it, before until  no
///   Napping           beside a poller, for a moment    hand-over               the leader        no
///   StandingBack      beside pollers                   hand-over, watchdog     the leader        yes
///   TakingBack        not: one look at all sockets     -                       the leader        no
///   BesideLeads       beside leads that follow         time, a loop that waits  the leader        no
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
    /// How long the sockets are left to such a loop ([`Returns`]).
    pub beside_loops: Duration,
    /// What this machine costs.
    pub spans: Spans,
}

impl Mode {
    const TAG_BITS: u32 = 3;

    /// The mode for these signs. The transition table is printed by a test below.
    pub fn next(signs: Signs) -> Self {
        let within = |span| signs.polled.is_some_and(|age| age < span);
        match signs.spans.nap(signs.naps) {
            _ if signs.looped && signs.lead.is_none() && signs.naps == 0 && within(signs.beside_loops) => {
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
            let (looped, beside_loops, spans) = (false, NAP_BESIDE_LOOPS, Spans::of(400));
            let mode =
                |lead, naps| match Mode::next(Signs { polled, lead, naps, looped, beside_loops, spans }) {
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
            beside_loops: NAP_BESIDE_LOOPS,
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
}
