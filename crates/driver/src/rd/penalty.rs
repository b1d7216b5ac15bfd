//! Peers that guess the names of memory. An STag has 32 bits, so who may send a million requests in a second
//! would find one in half an hour. After 16 wrong ones, all of a peer are refused for a second, then for two,
//! up to 64.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use uwarp_rnic::qp::Now;

/// Wrong requests before the first penalty.
const FREE: u32 = 16;
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(64);
/// Peers that are remembered. Above it, the oldest are forgotten.
const PEERS_MOST: usize = 4096;

struct Penalty {
    wrong: u32,
    last: Instant,
    until: Option<Instant>,
    /// How long the next one is.
    next: Duration,
}

/// By exchange.
#[derive(Default)]
pub(super) struct Penalties {
    of: FxHashMap<u64, Penalty>,
}

impl Penalties {
    /// Whether this peer names no memory now, whatever it knows.
    pub fn refuses(&self, now: &Now, exchange: u64) -> bool {
        // Most often there are none.
        !self.of.is_empty()
            && self.of.get(&exchange).and_then(|one| one.until).is_some_and(|until| now.get() < until)
    }

    /// It has named memory that it may not use.
    pub fn note(&mut self, now: &Now, exchange: u64) {
        let now = now.get();
        if self.of.len() >= PEERS_MOST && !self.of.contains_key(&exchange) {
            let oldest = self.of.iter().min_by_key(|(_, one)| one.last).map(|(exchange, _)| *exchange);
            oldest.iter().for_each(|exchange| {
                self.of.remove(exchange);
            });
        }
        let new = || Penalty { wrong: 0, last: now, until: None, next: FIRST };
        let one = self.of.entry(exchange).or_insert_with(new);
        if one.until.is_some_and(|until| now < until) {
            return;
        }
        // A program that makes a mistake now and then is not punished for those of last week.
        if now.saturating_duration_since(one.last) > LONGEST * 2 {
            (one.wrong, one.next) = (0, FIRST);
        }
        (one.wrong, one.last) = (one.wrong + 1, now);
        if one.wrong >= FREE {
            one.until = Some(now + one.next);
            // Not each mistake afterwards: a program may have taken a region away while it was used.
            one.wrong = FREE / 2;
            one.next = (one.next * 2).min(LONGEST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_guesses_is_refused_for_longer_and_longer() {
        let start = Instant::now();
        let at = |seconds: f64| Now::at(start + Duration::from_secs_f64(seconds));
        let mut penalties = Penalties::default();
        for _ in 0..15 {
            penalties.note(&at(0.0), 1);
        }
        assert!(!penalties.refuses(&at(0.0), 1));
        penalties.note(&at(0.0), 1);
        assert!(penalties.refuses(&at(0.9), 1) && !penalties.refuses(&at(0.9), 2));
        assert!(!penalties.refuses(&at(1.1), 1));
        (0..8).for_each(|_| penalties.note(&at(1.1), 1));
        assert!(penalties.refuses(&at(3.0), 1) && !penalties.refuses(&at(3.2), 1), "then two seconds");
        penalties.note(&at(500.0), 1);
        assert!(!penalties.refuses(&at(500.0), 1), "it is long ago");
    }

    #[test]
    fn only_so_many_peers_are_remembered() {
        let now = Now::at(Instant::now());
        let mut penalties = Penalties::default();
        (0..2 * PEERS_MOST as u64).for_each(|exchange| penalties.note(&now, exchange));
        assert_eq!(penalties.of.len(), PEERS_MOST);
    }
}
