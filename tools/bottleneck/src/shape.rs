//! What happens to a packet, and when: without devices, threads or a clock.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// How one direction of a path is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Shape {
    /// Bytes in a second; `None`, or none: packets need no time.
    pub rate: Option<u64>,
    /// Bytes that may wait for their turn. Meaningless without a rate.
    pub queue: u64,
    /// How long a packet is under way, behind its turn.
    pub delay: Duration,
    /// Packets in a thousand that are lost at random.
    pub loss: u32,
    /// Packets in a thousand that are late.
    pub late: u32,
    /// By how much.
    pub lateness: Duration,
    /// Packets in a thousand that come twice.
    pub twice: u32,
    /// Longer ones are lost without a word, as behind a router whose answers somebody filters.
    pub longest: Option<usize>,
}

/// What became of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Goes,
    /// It goes, and those behind it may overtake it.
    Late,
    Lost,
    /// The queue was full.
    NoRoom,
    /// Longer than the path takes.
    TooLong,
}

/// Packets on their way in one direction. Times are since some beginning.
#[derive(Debug)]
pub struct Lane {
    under_way: BinaryHeap<Reverse<UnderWay>>,
    bytes: u64,
    /// When the last packet of the queue has had its turn.
    free: Duration,
    number: u64,
    random: u64,
}

/// Ordered by time; of one time, those that came first go first.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct UnderWay {
    at: Duration,
    number: u64,
    packet: Vec<u8>,
}

impl Lane {
    pub fn new(seed: u64) -> Lane {
        Lane { under_way: BinaryHeap::new(), bytes: 0, free: Duration::ZERO, number: 0, random: seed }
    }

    /// Bytes under way.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn arrives(&mut self, shape: &Shape, now: Duration, packet: &[u8]) -> Fate {
        if self.one_of(shape.loss) {
            return Fate::Lost;
        }
        if shape.longest.is_some_and(|longest| packet.len() > longest) {
            return Fate::TooLong;
        }
        let mut turn = now;
        if let Some(rate) = shape.rate.filter(|rate| *rate > 0) {
            let waits = self.free.saturating_sub(now);
            if waits.as_secs_f64() * rate as f64 + packet.len() as f64 > shape.queue as f64 {
                return Fate::NoRoom;
            }
            turn = now + waits + Duration::from_secs_f64(packet.len() as f64 / rate as f64);
            self.free = turn;
        }
        let is_late = self.one_of(shape.late);
        let at = turn + shape.delay + if is_late { shape.lateness } else { Duration::ZERO };
        for _ in 0..1 + usize::from(self.one_of(shape.twice)) {
            self.number += 1;
            self.bytes += packet.len() as u64;
            self.under_way.push(Reverse(UnderWay { at, number: self.number, packet: packet.to_vec() }));
        }
        if is_late { Fate::Late } else { Fate::Goes }
    }

    /// The next packet that is due, or when the next will be.
    pub fn due(&mut self, now: Duration) -> Result<Vec<u8>, Option<Duration>> {
        let Some(Reverse(first)) = self.under_way.peek() else { return Err(None) };
        if first.at > now {
            return Err(Some(first.at));
        }
        let Some(Reverse(first)) = self.under_way.pop() else { return Err(None) };
        self.bytes -= first.packet.len() as u64;
        Ok(first.packet)
    }

    /// True so many times in a thousand (SplitMix64).
    fn one_of(&mut self, in_a_thousand: u32) -> bool {
        if in_a_thousand == 0 {
            return false;
        }
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % 1000 < u64::from(in_a_thousand)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn all(lane: &mut Lane, now: Duration) -> Vec<u8> {
        std::iter::from_fn(|| lane.due(now).ok()).map(|packet| packet[0]).collect()
    }

    #[test]
    fn a_rate_makes_packets_wait_and_a_full_queue_drops() {
        let shape = Shape { rate: Some(1_000_000), queue: 2_500, delay: 10 * MS, ..Shape::default() };
        let mut lane = Lane::new(1);
        // 1,000 bytes take a millisecond.
        let fates = [1, 2, 3].map(|name| lane.arrives(&shape, Duration::ZERO, &[name; 1000]));
        assert_eq!(fates, [Fate::Goes, Fate::Goes, Fate::NoRoom]);
        assert_eq!(lane.bytes(), 2000);
        assert_eq!(lane.due(10 * MS), Err(Some(11 * MS)));
        assert_eq!(all(&mut lane, 11 * MS), [1]);
        // There is room again for what has had its turn, long before it has arrived.
        assert_eq!(lane.arrives(&shape, 12 * MS, &[4; 1000]), Fate::Goes);
        assert_eq!(all(&mut lane, 12 * MS), [2]);
        assert_eq!(lane.due(13 * MS), Err(Some(23 * MS)));
        assert_eq!(all(&mut lane, 23 * MS), [4]);
        assert_eq!((lane.due(24 * MS), lane.bytes()), (Err(None), 0));
    }

    #[test]
    fn without_a_rate_packets_keep_their_order() {
        let shape = Shape { delay: MS, ..Shape::default() };
        let mut lane = Lane::new(1);
        for name in 0..100 {
            assert_eq!(lane.arrives(&shape, Duration::ZERO, &[name]), Fate::Goes);
        }
        assert_eq!(all(&mut lane, MS), (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn what_is_too_long_is_lost() {
        let shape = Shape { longest: Some(1500), ..Shape::default() };
        let mut lane = Lane::new(1);
        let fates = [1500, 1501].map(|length| lane.arrives(&shape, MS, &vec![1; length]));
        assert_eq!(fates, [Fate::Goes, Fate::TooLong]);
    }

    #[test]
    fn some_are_lost_some_late_some_come_twice() {
        let shape =
            Shape { loss: 100, late: 100, lateness: 5 * MS, twice: 100, delay: MS, ..Shape::default() };
        let mut lane = Lane::new(7);
        let fates: Vec<Fate> = (0..250).map(|name| lane.arrives(&shape, Duration::ZERO, &[name])).collect();
        let count = |fate| fates.iter().filter(|one| **one == fate).count();
        let (lost, late) = (count(Fate::Lost), count(Fate::Late));
        assert!((10..45).contains(&lost) && (10..45).contains(&late), "{lost} lost, {late} late");
        let (first, second) = (all(&mut lane, MS), all(&mut lane, 6 * MS));
        assert!(first.is_sorted() && second.is_sorted());
        let twice = first.len() + second.len() - (250 - lost);
        assert!((10..45).contains(&twice), "{twice} twice");
    }
}
