//! What the tests of the machines share: a clock that only they move, settings, and random numbers from a
//! seed.

use std::time::{Duration, Instant};

use uwarp_proto::setup::{AcceptParams, Depths, InitiatorConfig, PeerData, ResponderPolicy, Revision};
use uwarp_rnic::qp::Now;

/// A clock.
pub(super) struct Clock(Instant);

impl Clock {
    pub fn new() -> Self {
        Self(Instant::now())
    }

    pub const fn at(now: Instant) -> Self {
        Self(now)
    }

    pub fn now(&self) -> Now {
        Now::at(self.0)
    }

    pub fn get(&self) -> Instant {
        self.0
    }

    pub fn pass(&mut self, time: Duration) {
        self.0 += time;
    }

    pub fn pass_ms(&mut self, ms: u64) {
        self.pass(Duration::from_millis(ms));
    }

    /// Moves on to a deadline, or not at all.
    pub fn reach(&mut self, deadline: Instant) {
        self.0 = self.0.max(deadline);
    }
}

/// Random numbers (xorshift64*).
pub(super) struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Below `limit`, which is not 0.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32;
        usize::try_from(number).unwrap() % limit
    }

    /// Once in so many times.
    pub fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}

/// Prints the seed of a run that panics.
pub(super) struct Seed(pub u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the seed was {}", self.0);
        }
    }
}

pub(super) fn initiator() -> InitiatorConfig {
    InitiatorConfig {
        revision: Revision::Two,
        crc: true,
        markers: false,
        depths: Depths::negotiated(16, 16),
        max_ird: 128,
        peer: Some(PeerData::new()),
        peer_in_request: false,
    }
}

pub(super) fn responder() -> ResponderPolicy {
    ResponderPolicy {
        max_revision: Revision::Two,
        crc: true,
        markers: false,
        know_peers: true,
        max_ird: 128,
        host: None,
    }
}

pub(super) fn terms() -> AcceptParams {
    AcceptParams { depths: Depths::negotiated(16, 16), peer: PeerData::new() }
}
