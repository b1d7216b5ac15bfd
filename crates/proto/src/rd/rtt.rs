//! The round-trip time of an exchange (RFC 9002 section 5, RFC 6298).

use std::time::Duration;

/// Taken until there is a sample: the first Hello is repeated after twice this time.
const INITIAL: Duration = Duration::from_millis(5);
/// A probe waits at least this long.
const LEAST_PROBE: Duration = Duration::from_micros(200);
/// The retransmission timer is at least this long. Linux' 200 ms are thousands of round trips here; the 5 ms
/// of Ultra Ethernet's reference provider are a hundred.
const LEAST_RETRANSMISSION: Duration = Duration::from_millis(1);
/// Timers double up to this.
const LONGEST: Duration = Duration::from_millis(500);
/// How long the peer may hold back an acknowledgement that something waits for.
pub(super) const PEER_DELAY: Duration = Duration::from_micros(50);
/// How much longer this end waits for one that nothing waits for. The peer may keep it for a millisecond, and
/// longer where its program computes; nothing is sent again.
pub(super) const LATE: Duration = Duration::from_millis(4);
/// Time threshold of a loss: never less, because a thread of user space wakes up that late.
const GRANULARITY: Duration = Duration::from_micros(50);

/// Estimates of the round-trip time.
#[derive(Debug, Clone)]
pub(super) struct Rtt {
    /// `None`: no sample yet.
    smoothed: Option<Duration>,
    variance: Duration,
    latest: Duration,
    /// What follows from them: asked for with each packet.
    probe: Duration,
    loss: Duration,
}

impl Rtt {
    pub(super) const fn new() -> Self {
        let probe = Duration::from_nanos(2 * INITIAL.as_nanos() as u64 + PEER_DELAY.as_nanos() as u64);
        let loss = Duration::from_nanos(INITIAL.as_nanos() as u64 * 9 / 8);
        Self { smoothed: None, variance: Duration::ZERO, latest: INITIAL, probe, loss }
    }

    /// A sample, and how long the peer says that it held the acknowledgement back.
    pub(super) fn update(&mut self, sample: Duration, delay: Duration) {
        // A peer that claims more than the whole time is not believed.
        let sample = if sample > delay { sample - delay } else { sample };
        let Some(smoothed) = self.smoothed else {
            (self.smoothed, self.variance, self.latest) = (Some(sample), sample / 2, sample);
            self.derive();
            return;
        };
        self.latest = sample;
        self.variance = (self.variance * 3 + smoothed.abs_diff(sample)) / 4;
        self.smoothed = Some((smoothed * 7 + sample) / 8);
        self.derive();
    }

    fn derive(&mut self) {
        self.probe = (self.smoothed() * 2).max(LEAST_PROBE) + PEER_DELAY;
        self.loss = (self.smoothed().max(self.latest) * 9 / 8).max(GRANULARITY);
    }

    pub(super) fn smoothed(&self) -> Duration {
        self.smoothed.unwrap_or(INITIAL)
    }

    /// After this time behind a later packet, one that is not acknowledged is lost (RFC 9002 section 6.1.2).
    pub(super) fn loss_delay(&self) -> Duration {
        self.loss
    }

    /// How long to wait for an acknowledgement before probe number `count`, from 0 on. The first probe goes
    /// early (RFC 8985 section 7.2), the others as the retransmission timer has it.
    pub(super) fn probe_delay(&self, count: u32) -> Duration {
        let probe = self.probe;
        let Some(doublings) = count.checked_sub(1) else { return probe.min(LONGEST) };
        let Some(smoothed) = self.smoothed else { return (probe * (1 << count.min(6))).min(LONGEST) };
        let timer = (smoothed + self.variance * 4 + PEER_DELAY).max(LEAST_RETRANSMISSION).max(probe);
        (timer * (1 << doublings.min(10))).min(LONGEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn the_first_sample_is_taken_as_it_is_and_others_smoothed() {
        let mut rtt = Rtt::new();
        assert_eq!(rtt.probe_delay(0), INITIAL * 2 + PEER_DELAY);
        rtt.update(90 * US, 10 * US);
        assert_eq!((rtt.smoothed(), rtt.variance), (80 * US, 40 * US));
        rtt.update(170 * US, 10 * US);
        assert_eq!((rtt.smoothed(), rtt.variance, rtt.latest), (90 * US, 50 * US, 160 * US));
        assert_eq!(rtt.loss_delay(), 180 * US);
        rtt.update(20 * US, 30 * US);
        assert_eq!(rtt.latest, 20 * US, "a delay beyond the sample");
    }

    #[test]
    fn timers_have_a_floor_and_a_ceiling() {
        let mut rtt = Rtt::new();
        rtt.update(20 * US, Duration::ZERO);
        assert_eq!(rtt.probe_delay(0), LEAST_PROBE + PEER_DELAY);
        assert_eq!(rtt.probe_delay(1), LEAST_RETRANSMISSION);
        assert_eq!(rtt.probe_delay(2), LEAST_RETRANSMISSION * 2);
        assert_eq!(rtt.probe_delay(u32::MAX), LONGEST);
        assert_eq!(rtt.loss_delay(), GRANULARITY);
        assert_eq!(Rtt::new().probe_delay(u32::MAX), LONGEST);
    }
}
