//! What is drawn at random, and what is allowed only so often.

use std::hash::Hasher as _;
use std::time::{Duration, Instant};

use siphasher::sip::SipHasher24;

/// So many in a second, and as many at once.
#[derive(Debug)]
pub(super) struct Rate {
    per_second: u32,
    used: u32,
    since: Instant,
}

impl Rate {
    pub(super) fn new(now: Instant, per_second: u32) -> Self {
        Self { per_second, used: 0, since: now }
    }

    pub(super) fn allows(&mut self, now: Instant) -> bool {
        if now >= self.since + Duration::from_secs(1) {
            (self.used, self.since) = (0, now);
        }
        let allowed = self.used < self.per_second;
        self.used += u32::from(allowed);
        allowed
    }
}

/// Random numbers from a seed: a keyed hash of a count.
pub(super) struct Tokens {
    key: SipHasher24,
    count: u64,
}

/// Without the key.
impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokens").field("count", &self.count).finish_non_exhaustive()
    }
}

impl Tokens {
    pub(super) fn new(key: &[u8; 16]) -> Self {
        Self { key: SipHasher24::new_with_key(key), count: 0 }
    }

    pub(super) fn next(&mut self) -> u64 {
        self.count += 1;
        let mut hash = self.key;
        hash.write_u64(self.count);
        hash.finish()
    }
}
