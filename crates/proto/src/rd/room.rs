//! The receive buffer of the socket, divided among peers (docs/rd.md section 7.2).
//!
//! The kernel charges a socket for memory, not for bytes: small packets cost many times their length. So
//! credit counts charge, computed alike at both ends. It bounds what is in flight and is no sum: with a sum,
//! the charge of a lost packet would never come back.

use std::time::{Duration, Instant};

use uwarp_wire::rd::ack::CREDIT_UNIT;

/// What Linux charges for each datagram besides its bytes, rounded.
const EACH: u64 = 768;
const ROUNDED_TO: usize = 256;
/// `SO_RCVBUF` of a socket that asks for the stock `rmem_max`, 212,992: the kernel doubles it.
pub(super) const STOCK: u64 = 2 * 212_992;
/// The rest is for acknowledgements and for what is no reliable datagram.
const SHARED: (u64, u64) = (3, 4);
/// A peer has a share while it was heard in this period or in the one before.
const PERIOD: Duration = Duration::from_millis(10);
/// A drop halves all credit, once in a period. Each halving lasts this long.
const HALVED: Duration = Duration::from_millis(100);
const HALVINGS_MOST: u32 = 6;

/// What a packet of this length takes of the receiver's socket.
pub(super) fn charge(len: usize) -> u64 {
    EACH + len.next_multiple_of(ROUNDED_TO) as u64
}

/// What a responder may have in flight before the first ACK: no Challenge has told it a credit, and the first
/// window is no more.
pub(super) fn first_credit() -> u64 {
    10 * charge(1472)
}

/// The room of the socket, and who shares it.
#[derive(Debug)]
pub(super) struct Room {
    bytes: u64,
    began: Instant,
    /// The present period, from 1 on, and when it ends.
    period: u64,
    ends: Instant,
    /// Peers that were heard in it, in the one before, and in both.
    heard: u64,
    heard_before: u64,
    heard_in_both: u64,
    /// The socket's count.
    drops: u32,
    halvings: u32,
    halved_at: Instant,
}

impl Room {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            bytes: STOCK,
            began: now,
            period: 1,
            ends: now + PERIOD,
            heard: 0,
            heard_before: 0,
            heard_in_both: 0,
            drops: 0,
            halvings: 0,
            halved_at: now,
        }
    }

    pub(super) fn set(&mut self, bytes: u64) {
        self.bytes = bytes;
    }

    fn advance(&mut self, now: Instant) {
        if now < self.ends {
            return;
        }
        let passed = now.saturating_duration_since(self.began).as_nanos() / PERIOD.as_nanos();
        let period = 1 + u64::try_from(passed).unwrap_or(u64::MAX - 1);
        if period > self.period {
            self.heard_before = if period == self.period + 1 { self.heard } else { 0 };
            (self.heard, self.heard_in_both, self.period) = (0, 0, period);
        }
        let ends = u32::try_from(self.period).ok().and_then(|periods| PERIOD.checked_mul(periods));
        self.ends = ends.map_or(now, |ends| self.began + ends);
    }

    /// A peer was heard. `last`: the period in which it was heard before, which is kept with the peer; 0:
    /// never.
    pub(super) fn on_heard(&mut self, now: Instant, last: &mut u64) {
        self.advance(now);
        let before = std::mem::replace(last, self.period);
        if before != self.period {
            self.heard += 1;
            self.heard_in_both += u64::from(before + 1 == self.period && before > 0);
        }
    }

    /// The socket has dropped so many datagrams since it was made.
    pub(super) fn on_drops(&mut self, now: Instant, count: u32) {
        if std::mem::replace(&mut self.drops, count) == count {
            return;
        }
        let left = self.halvings(now);
        // Drops of one burst count once: peers have not heard of it yet.
        if left == 0 || now >= self.halved_at + PERIOD {
            (self.halvings, self.halved_at) = ((left + 1).min(HALVINGS_MOST), now);
        }
    }

    fn halvings(&self, now: Instant) -> u32 {
        if self.halvings == 0 {
            return 0;
        }
        let passed = now.saturating_duration_since(self.halved_at).as_nanos() / HALVED.as_nanos();
        self.halvings.saturating_sub(u32::try_from(passed).unwrap_or(u32::MAX))
    }

    /// What a peer may have in flight, in units of the wire. `more`: peers that are about to be heard.
    pub(super) fn share(&mut self, now: Instant, more: u64) -> u16 {
        self.advance(now);
        let peers = (self.heard + self.heard_before - self.heard_in_both + more).max(1);
        let all = (self.bytes / SHARED.1 * SHARED.0) >> self.halvings(now);
        // Rounded to the nearest, so that what is announced to many is not far less than there is. A packet
        // of full length is more than half a unit, so the quarter that is left bounds what is too much.
        let units = all.div_ceil(peers).saturating_add(CREDIT_UNIT / 2) / CREDIT_UNIT;
        u16::try_from(units.max(1)).unwrap_or(u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn small_packets_cost_more_than_their_bytes() {
        let expected =
            [(0, 768), (1, 1024), (64, 1024), (256, 1024), (257, 1280), (1472, 2304), (8972, 9984)];
        assert_eq!(expected.map(|(len, _)| (len, charge(len))), expected);
    }

    #[test]
    fn the_room_is_divided_among_those_who_were_heard_lately() {
        let now = Instant::now();
        let mut room = Room::new(now);
        assert_eq!(room.share(now, 0), 78, "138 packets of full length");
        assert_eq!(room.share(now, 2), 39);
        let mut last = [0; 100];
        for _ in 0..3 {
            last[..10].iter_mut().for_each(|last| room.on_heard(now, last));
        }
        assert_eq!((room.share(now, 0), room.share(now, 1)), (8, 7));
        let later = now + MS * 12;
        last[5..20].iter_mut().for_each(|last| room.on_heard(later, last));
        assert_eq!(room.share(later, 0), 4, "20 peers in both periods");
        assert_eq!(room.share(now + MS * 22, 0), 5, "15 in the last one");
        assert_eq!(room.share(now + MS * 32, 0), 78, "all are silent");
        last.iter_mut().for_each(|last| room.on_heard(now + MS * 45, last));
        assert_eq!(room.share(now + MS * 45, 0), 1, "4 KiB at least");
        room.set(u64::MAX);
        assert_eq!(room.share(now + MS * 45, 0), u16::MAX);
    }

    #[test]
    fn drops_halve_all_credit_for_a_while() {
        let now = Instant::now();
        let mut room = Room::new(now);
        room.on_drops(now, 0);
        assert_eq!(room.share(now, 0), 78);
        for count in [3, 3, 4] {
            room.on_drops(now, count);
            assert_eq!(room.share(now, 0), 39, "one burst");
        }
        room.on_drops(now + MS * 10, 5);
        assert_eq!(room.share(now + MS * 10, 0), 20);
        assert_eq!(room.share(now + MS * 109, 0), 20);
        assert_eq!(room.share(now + MS * 110, 0), 39);
        assert_eq!(room.share(now + MS * 210, 0), 78);
        (1..100).for_each(|count| room.on_drops(now + MS * (300 + count * 10), count + 5));
        assert_eq!(room.share(now + MS * 1290, 0), 1);
    }
}
