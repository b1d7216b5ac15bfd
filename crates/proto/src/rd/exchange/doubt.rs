//! Whether the peer's process is still there, when it says nothing although something waits for it.
//!
//! A process that is stopped says nothing either, and over TCP its connections stay: its system answers. Here
//! the system is asked for the port, which it refuses if no process has it. Until then streams stay, for as
//! long as TCP's would.

use std::time::{Duration, Instant};

use super::super::Config;
use super::{Exchange, Phase};

/// The peer's port is asked for when it has left something without an answer for so long.
const DOUBT: Duration = Duration::from_secs(1);
/// And again after this time, which doubles with each question, up to eight times as long.
const AGAIN: Duration = Duration::from_secs(1);
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

    /// When the peer's port is asked for.
    pub(super) fn doubt_at(&self) -> Option<Instant> {
        if self.streams.is_empty() || self.phase != Phase::Up {
            return None;
        }
        let at = self.silent_since()? + DOUBT;
        Some(if self.is_asked() { at.max(self.doubt.next) } else { at })
    }

    /// Returns whether the peer's port must be asked for now.
    pub(super) fn is_doubt_due(&mut self, now: Instant) -> bool {
        let is_due = self.doubt_at().is_some_and(|at| at <= now);
        if is_due {
            if !self.is_asked() {
                self.doubt = Doubt { heard: Some(self.last_heard), ..Doubt::new(now) };
            }
            self.doubt.next = now + AGAIN * (1 << self.doubt.asked.min(3));
            self.doubt.asked += 1;
        }
        is_due
    }

    /// The system of the peer refuses the port. Whoever sees our packets can forge that, so it counts only
    /// where the peer is silent, too.
    pub(in crate::rd) fn is_refused(&self, now: Instant) -> bool {
        let since = self.silent_since();
        self.phase == Phase::Up && since.is_some_and(|since| since + DOUBT <= now)
    }

    /// The system of the peer, which would say so, does not refuse the port.
    pub(in crate::rd) fn on_port_taken(&mut self) {
        self.doubt.is_taken = self.is_asked();
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
