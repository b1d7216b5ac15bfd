//! How long each phase of set-up may take (RFC 5044 section 7.1.2 rule 10).

use std::time::Duration;

/// Time limits of the connection manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// For TCP to connect. Shorter than TCP's own two minutes, about as long as InfiniBand's connection
    /// manager tries.
    pub connect: Duration,
    /// From the sent request to the whole reply. The other program may take its time to accept; Linux siw
    /// gives up after 10 s, Chelsio's driver after 60 s, InfiniBand's connection manager after about 64.
    /// (perftest fills its buffers with random numbers before it accepts: half a minute on a slow machine.)
    pub reply: Duration,
    /// From an accepted TCP connection to the whole request. As siw.
    pub request: Duration,
    /// From the sent reply to the peer's ready-to-receive indication, which follows within a round trip.
    pub ready: Duration,
    /// Until a listener that had no descriptors left tries again.
    pub no_descriptors: Duration,
    /// The longest time that [`EventKind::Disconnected`] waits for the program to poll the completions that
    /// came with the peer's last bytes. From InfiniBand's manager and from adapters, the event comes through
    /// the kernel, some hundred microseconds behind them. Programs look for completions, then for events, and
    /// destroy the queue pair on this one, with all completions that came in between (libfabric's rxm then
    /// waits for them for ever). On a busy machine, a program may not run for a long time.
    ///
    /// [`EventKind::Disconnected`]: crate::EventKind::Disconnected
    pub unpolled: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(60),
            reply: Duration::from_secs(60),
            request: Duration::from_secs(5),
            ready: Duration::from_secs(10),
            no_descriptors: Duration::from_millis(100),
            unpolled: Duration::from_millis(50),
        }
    }
}

/// How long the first FPDU waits after a peer that is not uwarp has replied. Linux siw sends its reply before
/// it can be notified of input: an FPDU that arrives in that moment is not read until more comes (seen in 8
/// of 150 connections without a pause, in none of 150 with this one).
pub const STRANGER_FIRST_FPDU: Duration = Duration::from_millis(20);

/// After this time, a peer that may be siw and has not sent anything yet is sent an RDMA Write of no bytes;
/// again after twice the time, and so on. On a busy machine it may miss the first FPDU in spite of the pause
/// (18 of 8,100 connections), and reads it when more comes.
pub const NUDGE_AFTER: Duration = Duration::from_millis(100);

/// The local acknowledgement timeout that queries show, 4.096 µs × 2¹⁸, about a second. It has no effect, as
/// TCP measures its own.
pub const ACK_TIMEOUT: u8 = 18;

/// The time from the end of a connection to [`EventKind::TimewaitExit`]: what InfiniBand's connection manager
/// derives from an acknowledgement timeout (`cm_convert_to_ms`). Without one it takes that of a RoCE path,
/// twice a packet's lifetime.
///
/// [`EventKind::TimewaitExit`]: crate::EventKind::TimewaitExit
pub fn timewait(ack_timeout: Option<u8>) -> Duration {
    Duration::from_millis(1 << ack_timeout.unwrap_or(19).min(31).saturating_sub(8))
}

/// The interval of the checks whether a program has polled what came before the end. After an end that is not
/// the peer's orderly one, the longest wait, in the views that pass for InfiniBand.
pub const UNPOLLED_LOOK: Duration = Duration::from_millis(5);

/// The most retries that InfiniBand knows, and what queries show if the program gave no number: TCP does not
/// count them.
pub const RETRIES: u8 = 7;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timewait_is_infinibands() {
        let of = |timeout| timewait(timeout).as_millis();
        assert_eq!([None, Some(0), Some(8), Some(14), Some(19)].map(of), [2048, 1, 1, 64, 2048]);
    }
}
