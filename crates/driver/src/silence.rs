//! Peers that vanish: the network is cut, the machine loses its power.
//!
//! TCP alone asks for a quarter of an hour about bytes that nobody acknowledges, and for ever not at all when nothing is under
//! way (a Read whose request has arrived). Here both end within 45 seconds. A peer whose system answers lives, however
//! long its program does not read: it may be stopped, or have no receive to give.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use uwarp_llp::tcp;

/// How often a stream is looked at on which something was sent.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How long the peer's system may answer nothing.
const LIMIT: Duration = Duration::from_secs(30);
/// The system itself asks a peer that has been quiet so long, so often.
const QUIET: Duration = Duration::from_secs(30);
const ASK_EVERY: Duration = Duration::from_secs(5);
const ASK: u32 = 3;

/// Watches for the answers of one peer.
#[derive(Debug)]
pub(crate) struct Silence {
    /// Something was sent, or the stream is new: when to look.
    look_at: Option<Instant>,
    /// The system asks a quiet peer by itself. Not from the beginning: that takes four calls, and many a stream is over before the
    /// first look.
    asks: bool,
    /// Nothing is answered, since.
    since: Option<Instant>,
}

impl Silence {
    pub(crate) fn watch() -> Self {
        Self { look_at: Some(Instant::now() + LOOK_EVERY), asks: false, since: None }
    }

    /// Bytes went out. Says whether [`Self::deadline`] is new.
    #[inline]
    pub(crate) fn sent(&mut self) -> bool {
        let new = self.look_at.is_none();
        if new {
            self.look_at = Some(Instant::now() + LOOK_EVERY);
        }
        new
    }

    /// When to ask [`Self::is_over`].
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.look_at
    }

    /// Whether the peer is to be given up.
    pub(crate) fn is_over(&mut self, fd: BorrowedFd<'_>, now: Instant) -> bool {
        if self.look_at.is_none_or(|at| at > now) {
            return false;
        }
        if !self.asks {
            self.asks = true;
            if let Err(e) = tcp::ask_when_quiet(fd, QUIET, ASK_EVERY, ASK) {
                tracing::debug!("cannot enable TCP keepalive: {e}");
            }
        }
        let Some(answers) = tcp::answers(fd).filter(|answers| !answers.all) else {
            (self.look_at, self.since) = (None, None);
            return false;
        };
        self.look_at = Some(now + LOOK_EVERY);
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
