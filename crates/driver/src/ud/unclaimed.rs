//! Datagrams that reach no queue pair, and how many of them are answered.

use std::fmt;
use std::net::IpAddr;

use serde::Serialize;
use uwarp_llp::udp::Incoming;
use uwarp_rnic::trace;

use crate::sync::{AtomicU64, Ordering};

/// Datagrams that reached no queue pair, on all ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Unclaimed {
    /// Not a message: truncated, another version, a bad CRC, headers that do not fit.
    pub malformed: u64,
    /// No queue pair has that number.
    pub unknown: u64,
    /// The queue pair that the sender names is not of the port it was sent from.
    pub spoofed: u64,
    /// By memory: they found no room. Their senders have counted them.
    pub no_room: u64,
    /// Came in parts, of which one did not; or parts of it came again when it was whole.
    pub incomplete: u64,
}

/// Where they are counted.
#[derive(Debug, Default)]
pub(crate) struct UnclaimedCounters {
    pub malformed: AtomicU64,
    pub unknown: AtomicU64,
    pub spoofed: AtomicU64,
    pub no_room: AtomicU64,
    pub incomplete: AtomicU64,
    /// Error Messages of the process.
    pub answers: Rate,
    /// Its answers to questions for parts.
    pub parts_answers: Rate,
}

impl UnclaimedCounters {
    pub fn get(&self) -> Unclaimed {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let [malformed, unknown, spoofed] = [&self.malformed, &self.unknown, &self.spoofed].map(get);
        let [no_room, incomplete] = [&self.no_room, &self.incomplete].map(get);
        Unclaimed { malformed, unknown, spoofed, no_room, incomplete }
    }
}

/// Error Messages that a process sends in a second at most, and a queue pair.
pub(super) const ANSWERS: u64 = 1000;
pub(super) const ANSWERS_OF_ONE: u64 = 100;

/// So many times in a second, and no more: the second in the upper bits, the number in the lower 16.
#[derive(Debug, Default)]
pub(crate) struct Rate(AtomicU64);

impl Rate {
    pub fn allows(&self, most: u64) -> bool {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let second = now.tv_sec.unsigned_abs() + 1;
        let next = |last: u64| match last >> 16 == second {
            true => (last & 0xFFFF < most).then_some(last + 1),
            false => Some(second << 16 | 1),
        };
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }
}

/// Counts and traces a datagram that reaches no queue pair.
pub(super) fn drop_unclaimed(counter: &AtomicU64, why: &dyn fmt::Display, bytes: &[u8], incoming: &Incoming) {
    counter.fetch_add(1, Ordering::Relaxed);
    trace::datagram(trace::Datagram {
        qpn: None,
        way: trace::Way::In,
        peer: incoming.from,
        group: Some(incoming.to).filter(IpAddr::is_multicast),
        head: bytes,
        len: bytes.len(),
        dropped: Some(why),
    });
}
