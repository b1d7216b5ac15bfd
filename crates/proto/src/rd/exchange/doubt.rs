//! Whether the peer's process is still there, when it says nothing although something waits for it.
//!
//! A process that is stopped says nothing either, and over TCP its connections stay: its system answers. Here
//! the system is asked for the port, which it refuses if no process has it. Until then streams stay, for as
//! long as TCP's would.
//!
//! A question comes from a port of its own, so a router that translates addresses, or a firewall that lets in
//! what belongs to a flow, may refuse it although the process lives. So another host is asked once while the
//! peer answers. What it says then is what its refusals are worth.

use std::time::{Duration, Instant};

use super::super::Config;
use super::{Exchange, Phase};

/// The system of the peer is asked first so long after the exchange has begun, while the peer answers.
const TRIAL: Duration = Duration::from_millis(100);
/// The peer's port is asked for when it has left something without an answer for so long.
const DOUBT: Duration = Duration::from_secs(1);
/// And again after this time, which doubles with each question, up to eight times as long.
const AGAIN: Duration = Duration::from_secs(1);
/// Refusals of a host of which it is not known yet what they are worth end streams after this time.
const UNPROVEN: Duration = Duration::from_secs(10);
/// Streams end when the peer has been silent for so long. (Those of connections end before: there, half a
/// minute is the limit of a system that does not answer.)
const SILENT: Duration = Duration::from_secs(60);
/// The same when the system says that the port is taken: about as long as TCP repeats its bytes, 15 retries.
const TAKEN: Duration = Duration::from_secs(924);

/// What is known of the peer's port.
#[derive(Debug)]
pub(super) struct Doubt {
    /// When the peer had said something, before it was asked for. All this ends when it says more.
    heard: Option<Instant>,
    asked: u32,
    next: Instant,
    is_taken: bool,
}

/// What refusals of the peer's system are worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusals {
    /// It was not asked yet while the peer answered.
    Untried,
    /// It was.
    Tried,
    /// It has refused the port then.
    Refused(Instant),
    /// It has not: it does not refuse a port that is taken.
    Believed,
    /// It has refused the port, and the peer has said something since.
    Worthless,
}

impl Doubt {
    pub(super) fn new(now: Instant) -> Self {
        Self { heard: None, asked: 0, next: now, is_taken: false }
    }
}

impl Exchange {
    /// Since when the peer owes something and says nothing. Never from a time when nothing was owed.
    fn silent_since(&self) -> Option<Instant> {
        self.waiting_since.map(|since| since.max(self.last_heard))
    }

    fn is_asked(&self) -> bool {
        self.doubt.heard == Some(self.last_heard)
    }

    fn is_near(&self) -> bool {
        self.start.route.local.ip() == self.start.route.remote.ip()
    }

    /// When it is asked for the first time, while it answers.
    fn trial_at(&self) -> Option<Instant> {
        let is_due = self.refusals == Refusals::Untried && !self.is_near();
        is_due.then(|| self.last_heard.max(self.born + TRIAL))
    }

    /// When the peer's port is asked for.
    pub(super) fn doubt_at(&self) -> Option<Instant> {
        if self.streams.is_empty() || self.phase != Phase::Up {
            return None;
        }
        let silent = self.silent_since().map(|since| since + DOUBT);
        let doubt = silent.map(|at| if self.is_asked() { at.max(self.doubt.next) } else { at });
        doubt.into_iter().chain(self.trial_at()).min()
    }

    /// Whether the peer's port must be asked for now, and whether that is urgent.
    pub(super) fn question(&mut self, now: Instant) -> Option<bool> {
        self.doubt_at().filter(|at| *at <= now)?;
        if self.trial_at().is_some_and(|at| at <= now) {
            self.refusals = Refusals::Tried;
            return Some(false);
        }
        if !self.is_asked() {
            self.doubt = Doubt { heard: Some(self.last_heard), ..Doubt::new(now) };
        }
        let again = now + AGAIN * (1 << self.doubt.asked.min(3));
        // When what is said then would count for the first time.
        let proof = self.silent_since().map(|since| since + UNPROVEN).filter(|proof| now < *proof);
        self.doubt.next = proof.map_or(again, |proof| again.min(proof));
        self.doubt.asked += 1;
        Some(true)
    }

    /// The peer has said something.
    pub(super) fn weigh_refusals(&mut self) {
        if let Refusals::Refused(at) = self.refusals
            && self.last_heard > at
        {
            self.refusals = Refusals::Worthless;
        }
    }

    /// The system of the peer refuses the port. Whoever sees our packets can forge that, so it counts only
    /// where the peer is silent, too. Returns whether the exchange is over.
    pub(in crate::rd) fn is_refused(&mut self, now: Instant) -> bool {
        if matches!(self.refusals, Refusals::Untried | Refusals::Tried) {
            self.refusals = Refusals::Refused(now);
        }
        let patience = match self.refusals {
            _ if self.is_near() => DOUBT,
            Refusals::Believed => DOUBT,
            Refusals::Worthless => return false,
            _ => UNPROVEN,
        };
        let since = self.silent_since();
        self.phase == Phase::Up && since.is_some_and(|since| since + patience <= now)
    }

    /// The system of the peer does not refuse the port. (If the peer is silent, too, it may be out of reach.)
    pub(in crate::rd) fn on_port_taken(&mut self, now: Instant) {
        let answers = self.silent_since().is_none_or(|since| now < since + DOUBT);
        if self.refusals == Refusals::Tried && answers {
            self.refusals = Refusals::Believed;
        }
        // The own system always refuses what nobody has; another one may be out of reach.
        self.doubt.is_taken = self.is_near() && self.is_asked();
    }

    /// A process has the peer's port, so it is stopped.
    pub(in crate::rd) fn is_stopped(&self) -> bool {
        self.doubt.is_taken && self.is_asked()
    }

    /// When the exchange fails, because the peer is silent.
    pub(super) fn patience(&self, config: &Config) -> Option<Instant> {
        let since = self.silent_since()?;
        // A message has less patience, and ends the streams of its exchange with it.
        let is_streams = self.phase == Phase::Up && !self.streams.is_empty() && self.has_nothing();
        Some(match (is_streams, self.is_stopped()) {
            (false, _) => since + config.patience,
            (true, false) => since + SILENT.max(config.patience),
            (true, true) => since + TAKEN,
        })
    }
}
