//! How long a Send waits for a receive (docs/adr/004).

use std::time::Duration;

/// The time that a minimum RNR timer code stands for (InfiniBand specification, table 45). Codes have 5 bits;
/// other bits are ignored.
fn rnr_timer(code: u8) -> Duration {
    // Hundredths of milliseconds.
    const TABLE: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(TABLE[usize::from(code & 0x1F)] * 10)
}

/// How long a message waits for a receive if the program allows no retry. A program with `rnr_retry` 0 (fio)
/// posts its receives again within the microseconds that messages take on a wire; here a receiver that the
/// scheduler passes over for some milliseconds would lose its connection.
const WITHOUT_RNR_RETRY: Duration = Duration::from_millis(100);

/// The least time that a message waits otherwise: about the precision of a timer beside other programs.
const LEAST_RNR_WAIT: Duration = Duration::from_millis(10);

/// As many retries as it takes.
pub(super) const NO_RNR_LIMIT: u8 = 7;

/// How long a message may wait for a receive: `retries` times the timer, or without limit if `retries` is 7.
pub fn rnr_limit(retries: u8, timer_code: u8) -> Option<Duration> {
    match retries {
        0 => Some(WITHOUT_RNR_RETRY),
        1..NO_RNR_LIMIT => Some((rnr_timer(timer_code) * u32::from(retries)).max(LEAST_RNR_WAIT)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rnr_timers_of_the_specification() {
        assert_eq!(rnr_timer(0), Duration::from_micros(655_360));
        assert_eq!(rnr_timer(1), Duration::from_micros(10));
        assert_eq!(rnr_timer(12), Duration::from_micros(640));
        assert_eq!(rnr_timer(31), Duration::from_micros(491_520));
        assert_eq!(rnr_limit(7, 12), None);
        assert_eq!(rnr_limit(6, 0), Some(Duration::from_micros(6 * 655_360)));
        assert_eq!(rnr_limit(3, 12), Some(LEAST_RNR_WAIT));
        assert_eq!(rnr_limit(0, 0), Some(WITHOUT_RNR_RETRY));
        // It was at least half a second once.
        assert_eq!(rnr_limit(6, 19), Some(6 * Duration::from_micros(7680)));
    }
}
