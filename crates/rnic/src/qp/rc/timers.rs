//! The deadlines of a queue pair, in one table: what is waited for, for how long, and what happens then.
//!
//! | deadline     | set by                                 | after               | then                     |
//! |--------------|----------------------------------------|---------------------|--------------------------|
//! | `FirstFrame` | `attach`: the peer may not listen yet  | `first_frame_delay` | sending begins           |
//! | `Joined`     | `attach`: by number, no frame came     | [`JOINED`]          | the stream is given up   |
//! | `Nudge`      | `attach`: the peer may miss frames     | `nudge_after`, …    | an empty Write is sent   |
//! | `Receive`    | input: a Send finds no receive         | `rnr_timeout`       | Terminate "no buffer"    |
//! | `Starving`   | the same                               | [`STARVING`]        | the log says so, once    |
//! | `HangUp`     | link: hung up while a Send waits       | [`HANG_UP`]         | [`Action::CheckHangUp`]  |
//! | `Drain`      | `disconnect`: posted work may be sent  | [`DRAIN`]           | the stream is closed     |
//! | `Ack`        | `poll_transmit`: acks or requests wait | [`ACK`]             | they are sent            |
//! | `Muted`      | `poll_transmit`: work must not be sent | [`MUTED`]           | [`Action::Muted`], once  |
//! | `Silence`    | the peer must answer                   | [`LOOK_EVERY`]      | [`Action::CheckAnswers`] |
//! | `Retry`      | work is posted, no peer has answered   | `retry_limit`       | `RETRY_EXC_ERR`          |
//!
//! A deadline is set once and not moved. It is cleared when its condition ends, except for `Ack`, whose
//! handler checks what is newer than the deadline. So the clock is read about once for each deadline that
//! expires, not once for each message.
//!
//! The deadlines are the core's, so that the simulator runs them with its virtual time.
//! `RcCore::poll_timeout` gives the first one, and `RcCore::handle_timeout` does what is due. The owner
//! keeps one timer; it may be early, never late. Every verb takes a `Now`: the driver reads the system's
//! clock only when a deadline first needs it, because reading it costs 25 to 40 ns and most calls set no
//! deadline. For what only the link knows, the core asks by `RcCore::poll_action`, and the owner reports it
//! through `RcCore::handle_link`.
//!
//! Rejected: an `Instant` as argument, because nine of ten calls do not need the system call; a timer wheel
//! for each process, because the engine has a list of timers already.

use std::time::{Duration, Instant};

pub use uwarp_proto::clock::Now;

/// How long a Send that arrived may wait for its receive once the peer is gone: the program may be slow, but
/// it must learn of the end.
pub(super) const HANG_UP: Duration = Duration::from_secs(2);
/// How long a stream that was brought up by number may wait for the peer's first frame, which follows
/// within a round trip. As long as an id waits for the peer's indication.
pub(super) const JOINED: Duration = Duration::from_secs(10);
/// How long posted work may still be sent after the program has disconnected.
pub(super) const DRAIN: Duration = Duration::from_secs(2);
/// How long an acknowledgement waits for a message to ride on, if the program has answered every message so
/// far. Twice as long at most, because one that becomes due later gets its own time when this one expires.
/// Longer than the background thread sleeps while another thread polls, so that it is not woken for this.
pub(super) const ACK: Duration = Duration::from_micros(250);
/// How long a Send waits for a receive before the log says so.
pub(super) const STARVING: Duration = Duration::from_secs(5);
/// How long posted work waits for the peer's first message before the program gets a warning.
pub(super) const MUTED: Duration = Duration::from_secs(1);
/// How often the answers of the peer's system are checked while bytes are sent.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(5);

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timer {
    FirstFrame,
    Joined,
    Receive,
    Starving,
    HangUp,
    Drain,
    Ack,
    Muted,
    Silence,
    Retry,
    Nudge,
}

impl Timer {
    const fn bit(self) -> u16 {
        1 << self as u16
    }
}

/// In the order in which they are handled if several have expired.
pub(super) const ALL: [Timer; 11] = [
    Timer::Retry,
    Timer::FirstFrame,
    Timer::Joined,
    Timer::Nudge,
    Timer::HangUp,
    Timer::Receive,
    Timer::Starving,
    Timer::Drain,
    Timer::Ack,
    Timer::Muted,
    Timer::Silence,
];

/// The deadlines that are set.
#[derive(Debug, Default)]
pub(super) struct Timers {
    at: [Option<Instant>; ALL.len()],
    /// Which of [`Self::at`] there are, a bit for each: usually one or two.
    set: u16,
    first: Option<Instant>,
    /// [`Self::first`] may have been cleared since.
    stale: bool,
}

impl Timers {
    #[inline]
    pub fn is_set(&self, timer: Timer) -> bool {
        self.set & timer.bit() != 0
    }

    fn place(&self, timer: Timer) -> Option<Instant> {
        self.at.get(timer as usize).copied().flatten()
    }

    /// Sets a deadline, unless it is set already.
    #[inline]
    pub fn start(&mut self, timer: Timer, now: &Now, after: Duration) {
        if !self.is_set(timer) {
            self.set(timer, now.get() + after);
        }
    }

    #[cold]
    fn set(&mut self, timer: Timer, at: Instant) {
        if let Some(place) = self.at.get_mut(timer as usize) {
            *place = Some(at);
        }
        self.set |= timer.bit();
        if self.first.is_none_or(|first| at < first) {
            self.first = Some(at);
        }
    }

    #[inline]
    pub fn clear(&mut self, timer: Timer) {
        if self.is_set(timer)
            && let Some(place) = self.at.get_mut(timer as usize)
        {
            *place = None;
            self.set &= !timer.bit();
            self.stale = true;
        }
    }

    /// The stream has ended. Work posted to a peer that is gone still waits.
    pub fn end_of_stream(&mut self) {
        let retry = self.place(Timer::Retry);
        *self = Self::default();
        if let Some(at) = retry {
            self.set(Timer::Retry, at);
        }
    }

    /// Clears a deadline if it has expired; returns whether it had.
    pub fn take(&mut self, timer: Timer, now: Instant) -> bool {
        let over = self.is_set(timer) && self.place(timer).is_some_and(|at| at <= now);
        if over {
            self.clear(timer);
        }
        over
    }

    #[inline]
    pub fn first(&mut self) -> Option<Instant> {
        if std::mem::take(&mut self.stale) {
            self.first = self.earliest();
        }
        self.first
    }

    fn earliest(&self) -> Option<Instant> {
        let (mut rest, mut first) = (self.set, None);
        while rest != 0 {
            let at = self.at.get(rest.trailing_zeros() as usize).copied().flatten();
            first = [first, at].into_iter().flatten().min();
            rest &= rest - 1;
        }
        first
    }
}

/// What had been sent when [`Timer::Ack`] was set.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SentBefore {
    pub acks: u32,
    pub messages: u64,
}
