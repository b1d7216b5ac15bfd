//! Peers that vanish: the network is cut, the machine loses its power.
//!
//! TCP alone retransmits unacknowledged bytes for a quarter of an hour, and without bytes in flight (an RDMA
//! Read whose request has arrived) it never probes at all. Here both cases end within 45 seconds. A peer
//! whose system answers is alive, however long its program does not read: the program may be stopped, or have
//! no receive to post.

use std::time::{Duration, Instant};

use super::timers::LOOK_EVERY;

/// How long the peer's system may be silent.
const LIMIT: Duration = Duration::from_secs(30);

/// How the peer's system answers what was sent to it, as far as the lower layer knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answers {
    /// Bytes were sent that are not acknowledged.
    pub pending: bool,
    /// They were retransmitted, or probes of a closed window were: the peer may be gone.
    pub doubtful: bool,
    /// Time since the last answer of any kind.
    pub last: Duration,
}

/// State of the check of one peer.
#[derive(Debug, Default)]
pub(super) struct Silence {
    /// The link probes a quiet peer itself (keepalive). This is not enabled at the start: it takes four
    /// system calls, and many streams end before the first check.
    pub probed: bool,
    /// Time since which the peer has not answered, later by the times in which this end stood still.
    pub since: Option<Instant>,
    /// The last check since then.
    looked: Option<Instant>,
    /// The log has said that a message of the peer waits for a receive.
    pub starving_said: bool,
    /// The same of a peer that answers nothing.
    idle_said: bool,
    /// What the peer had answered at the last check, and when that was first seen.
    answered: Option<(Answered, Instant)>,
}

/// How far the peer has answered: messages acknowledged, and the oldest Read that it has not served.
pub(super) type Answered = (u64, Option<u32>);

/// How long the peer's program may leave everything unanswered before the log says so.
const IDLE: Duration = Duration::from_secs(10);

impl Silence {
    /// Work requests wait for the peer. Its system answers; its program may be stopped or lack a receive.
    pub fn say_if_idle(&mut self, qpn: u32, answered: Answered, now: Instant) {
        let since = match self.answered {
            Some((before, since)) if before == answered => since,
            _ => now,
        };
        self.answered = Some((answered, since));
        if now.duration_since(since) >= IDLE && !std::mem::replace(&mut self.idle_said, true) {
            tracing::warn!(
                qpn,
                "the peer has taken nothing for {} s: its program is stopped, or has posted no receive",
                IDLE.as_secs()
            );
        }
    }

    /// Returns whether the peer must be given up. What this end has not waited for awake is not the peer's
    /// silence: a machine that stands still for half a minute (a virtual one whose host is busy, a laptop
    /// that sleeps) finds that its peer has said nothing for as long, and that this check is due.
    pub fn is_over(&mut self, answers: Answers, now: Instant) -> bool {
        let before = self.looked.replace(now).unwrap_or(now);
        let stood_still = now.duration_since(before).saturating_sub(LOOK_EVERY * 2);
        self.since = self.since.map(|since| since + stood_still);
        let silent = self.since.map_or(Duration::ZERO, |since| now.duration_since(since));
        if !answers.doubtful {
            self.since = None;
        } else if self.since.is_none() || answers.last < silent {
            self.since = Some(now);
        } else if silent >= LIMIT {
            tracing::warn!("no answer from the peer's system for {} s", silent.as_secs());
            return true;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENT: Answers = Answers { pending: true, doubtful: true, last: Duration::from_secs(3600) };

    /// Looks as often as they are due for so long, and returns whether the peer was given up.
    fn looks(silence: &mut Silence, now: &mut Instant, time: Duration) -> bool {
        let end = *now + time;
        while *now < end {
            *now += LOOK_EVERY;
            if silence.is_over(SILENT, *now) {
                return true;
            }
        }
        false
    }

    #[test]
    fn a_silent_peer_is_given_up() {
        let (mut silence, mut now) = (Silence::default(), Instant::now());
        assert!(!silence.is_over(SILENT, now));
        assert!(!looks(&mut silence, &mut now, LIMIT - LOOK_EVERY));
        assert!(looks(&mut silence, &mut now, LOOK_EVERY));
    }

    #[test]
    fn what_this_end_slept_through_is_not_the_peers_silence() {
        let (mut silence, mut now) = (Silence::default(), Instant::now());
        assert!(!silence.is_over(SILENT, now));
        for _ in 0..2 {
            now += Duration::from_secs(1000);
            assert!(!silence.is_over(SILENT, now));
        }
        assert!(looks(&mut silence, &mut now, LIMIT));
    }
}
