//! Peers that vanish: the network is cut, the machine loses its power.
//!
//! TCP alone retransmits unacknowledged bytes for a quarter of an hour, and without bytes in flight (an RDMA
//! Read whose request has arrived) it never probes at all. Here both cases end within 45 seconds. A peer
//! whose system answers is alive, however long its program does not read: the program may be stopped, or have
//! no receive to post.

use std::time::{Duration, Instant};

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
    /// Time since which the peer has not answered.
    pub since: Option<Instant>,
}

impl Silence {
    /// Returns whether the peer must be given up.
    pub fn is_over(&mut self, answers: Answers, now: Instant) -> bool {
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
