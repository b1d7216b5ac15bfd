//! Peers that vanish: the network is cut, the machine loses its power.
//!
//! TCP alone repeats unacknowledged bytes for a quarter of an hour, and without bytes in flight (an RDMA Read
//! whose request has arrived) never asks at all. Here both end within 45 seconds. A peer whose system answers
//! is alive, however long its program does not read: it may be stopped, or have no receive to post.

use std::time::{Duration, Instant};

/// How long the peer's system may answer nothing.
const LIMIT: Duration = Duration::from_secs(30);

/// How the peer's system answers what was sent to it, as far as the lower layer knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answers {
    /// Bytes were sent that are not answered.
    pub pending: bool,
    /// They were repeated, and so were probes of a closed window: the peer may be gone.
    pub doubtful: bool,
    /// How long ago the last answer of any kind came.
    pub last: Duration,
}

/// What is known of one peer's silence.
#[derive(Debug, Default)]
pub(super) struct Silence {
    /// The link has been told to probe a quiet peer itself. Not from the beginning: that takes four system
    /// calls, and many a stream is over before the first look.
    pub probed: bool,
    /// The peer has not answered since then.
    pub since: Option<Instant>,
}

impl Silence {
    /// Says whether the peer must be given up.
    pub fn is_over(&mut self, answers: Answers, now: Instant) -> bool {
        let silent = self.since.map_or(Duration::ZERO, |since| now.duration_since(since));
        if !answers.doubtful {
            self.since = None;
        } else if self.since.is_none() || answers.last < silent {
            self.since = Some(now);
        } else if silent >= LIMIT {
            tracing::warn!("the peer's system has answered nothing for {} s", silent.as_secs());
            return true;
        }
        false
    }
}
