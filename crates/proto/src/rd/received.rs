//! Packets that have arrived, and when to acknowledge them (RFC 9000 section 13.2).

use std::ops::Range;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use uwarp_wire::rd::ack::{self, TIME_UNIT_US};

use super::range_set::RangeSet;

/// How long an acknowledgement waits for a packet to ride on.
const DELAY: Duration = Duration::from_micros(50);
/// How long one that no message waits for does. The answer of a program rides within it, and one way eight
/// packets come before.
const LONG_DELAY: Duration = Duration::from_millis(1);
/// After so many bytes it does not wait.
const MOST_BYTES: u64 = 64 * 1024;
/// Nor after so many packets. Each may end a message.
const MOST_PACKETS: u32 = 8;
/// Ranges that are kept and sent. The rest of an ACK's 32 is for messages.
pub(super) const PACKET_RANGES: usize = 16;

/// When its sender wants a packet to be acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    Never,
    /// No message waits for it.
    Late,
    Soon,
    AtOnce,
}

/// The receiver's side of packet numbers.
#[derive(Debug, Default)]
pub(super) struct Received {
    numbers: RangeSet,
    /// When the largest arrived, and how long the socket had not been found empty then.
    largest_at: Option<Instant>,
    blind: Duration,
    /// Packets that elicit an acknowledgement, and their bytes, since the last one was sent.
    packets: u32,
    bytes: u64,
    /// When the acknowledgement is due at the latest.
    due: Option<Instant>,
}

impl Received {
    /// The largest number so far; 0: none.
    pub(super) fn largest(&self) -> u64 {
        self.numbers.iter().next_back().map_or(0, |range| range.end - 1)
    }

    pub(super) fn contains(&self, number: u64) -> bool {
        self.numbers.contains(number)
    }

    /// Packets have arrived, with so many bytes each, and are acknowledged from now on.
    pub(super) fn on_packets(
        &mut self,
        now: Instant,
        numbers: Range<u64>,
        len: usize,
        wish: Wish,
        blind: Duration,
    ) {
        let expected = self.largest() + 1;
        let count = numbers.end - numbers.start;
        let is_next = numbers.start == expected;
        if numbers.start >= expected {
            (self.largest_at, self.blind) = (Some(now), blind);
        }
        self.numbers.insert(numbers);
        self.numbers.keep_last(PACKET_RANGES);
        let delay = match wish {
            Wish::Never => return,
            Wish::Late => LONG_DELAY,
            Wish::Soon => DELAY,
            Wish::AtOnce => Duration::ZERO,
        };
        self.packets += u32::try_from(count).unwrap_or(u32::MAX);
        self.bytes += len as u64 * count;
        let is_urgent = !is_next || self.packets >= MOST_PACKETS || self.bytes >= MOST_BYTES;
        let due = if is_urgent { now } else { now + delay };
        self.due = Some(self.due.map_or(due, |other| other.min(due)));
    }

    /// A copy of a packet has come: its acknowledgement may have been lost.
    pub(super) fn on_copy(&mut self, now: Instant) {
        self.due = Some(now);
    }

    /// Something of the ACK has changed that the peer waits for.
    pub(super) fn hurry(&mut self, now: Instant) {
        if self.largest() > 0 {
            self.due = Some(self.due.map_or(now, |due| due.min(now)));
        }
    }

    /// When an acknowledgement must leave.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// An ACK with all of this has left.
    pub(super) fn on_sent(&mut self) {
        (self.packets, self.bytes, self.due) = (0, 0, None);
    }

    /// The peer has an ACK of everything up to this number, so older ranges need no repetition. The last
    /// range stays: its end is the largest number.
    pub(super) fn on_ack_arrived(&mut self, largest: u64) {
        let last = self.numbers.iter().next_back().map_or(0, |range| range.start);
        self.numbers.remove_below((largest + 1).min(last));
    }

    /// The fields and ranges of an ACK. `None`: nothing has arrived yet.
    pub(super) fn ack(&self, now: Instant) -> Option<(ack::Head, SmallVec<[ack::Range; PACKET_RANGES]>)> {
        let largest = self.largest();
        let delay = self.largest_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let units =
            |time: Duration| u16::try_from(time.as_micros() / u128::from(TIME_UNIT_US)).unwrap_or(u16::MAX);
        let mut ranges = SmallVec::new();
        let mut below = largest + 1;
        for Range { start, end } in self.numbers.iter().rev() {
            let mut gap = below - end;
            let mut length = end - start;
            // What is too long for one range goes into several.
            while gap > 0xFFFF {
                push(&mut ranges, 0xFFFF, 0);
                gap -= 0xFFFF;
            }
            while length > 0xFFFF {
                push(&mut ranges, gap, 0xFFFF);
                (gap, length) = (0, length - 0xFFFF);
            }
            push(&mut ranges, gap, length);
            below = start;
        }
        ranges.truncate(PACKET_RANGES);
        let head = ack::Head {
            largest: uwarp_wire::rd::low(largest),
            delay: units(delay),
            blind: units(self.blind),
            ..ack::Head::default()
        };
        (largest > 0).then_some((head, ranges))
    }
}

fn push(ranges: &mut SmallVec<[ack::Range; PACKET_RANGES]>, gap: u64, length: u64) {
    let short = |value: u64| u16::try_from(value).unwrap_or(u16::MAX);
    ranges.push(ack::Range { gap: short(gap), length: short(length) });
}

/// Ranges of packet numbers.
pub(super) type Packets = SmallVec<[Range<u64>; 2]>;

/// The packets that an ACK names, from the largest downwards. `None`: there is no such packet number.
pub(super) fn packets(largest: u64, ranges: impl Iterator<Item = ack::Range>) -> Option<Packets> {
    let mut below = largest + 1;
    let mut packets = Packets::new();
    for ack::Range { gap, length } in ranges {
        let end = below.checked_sub(u64::from(gap))?;
        let start = end.checked_sub(u64::from(length))?;
        // Numbers begin with 1.
        if start == 0 {
            return None;
        }
        if start < end {
            packets.push(start..end);
        }
        below = start;
    }
    Some(packets)
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "a list of ranges may have one")]
mod tests {
    use super::*;

    fn named(received: &Received) -> Vec<Range<u64>> {
        let (head, ranges) = received.ack(Instant::now()).expect("something arrived");
        packets(u64::from(head.largest), ranges.into_iter()).expect("valid").into_vec()
    }

    #[test]
    fn ranges_there_and_back() {
        let now = Instant::now();
        let mut received = Received::default();
        assert!(received.ack(now).is_none());
        for number in [1, 2, 3, 7, 8, 12] {
            received.on_packets(now, number..number + 1, 100, Wish::Soon, Duration::ZERO);
        }
        assert_eq!(named(&received), [12..13, 7..9, 1..4]);
        for number in 13..200_000 {
            received.on_packets(now, number..number + 1, 100, Wish::Soon, Duration::ZERO);
        }
        let joined = named(&received);
        assert_eq!((joined.first().unwrap().end, joined.last().unwrap().clone()), (200_000, 1..4));
        assert!(joined.windows(2).all(|pair| pair[0].start >= pair[1].end));
        received.on_ack_arrived(8);
        assert_eq!(named(&received).last().unwrap().start, 12);
        received.on_packets(now, 400_000..400_000 + 1, 100, Wish::Soon, Duration::ZERO);
        assert_eq!(named(&received).first(), Some(&(400_000..400_001)));
    }

    #[test]
    fn a_gap_and_much_data_do_not_wait() {
        let now = Instant::now();
        let mut received = Received::default();
        received.on_packets(now, 1..1 + 1, 100, Wish::Soon, Duration::ZERO);
        assert_eq!(received.due(), Some(now + DELAY));
        received.on_packets(now, 3..3 + 1, 100, Wish::Soon, Duration::ZERO);
        assert_eq!(received.due(), Some(now), "a gap");
        received.on_sent();
        assert_eq!(received.due(), None);
        received.on_packets(now, 4..4 + 1, 100, Wish::Never, Duration::ZERO);
        assert_eq!(received.due(), None, "an ACK is not acknowledged");
        received.on_packets(now, 5..5 + 1, 65_536, Wish::Late, Duration::ZERO);
        assert_eq!(received.due(), Some(now));
    }

    #[test]
    fn what_no_message_waits_for_waits_longer_but_for_nothing_else() {
        let now = Instant::now();
        let mut received = Received::default();
        for number in 1..u64::from(MOST_PACKETS) {
            received.on_packets(now, number..number + 1, 100, Wish::Late, Duration::ZERO);
            assert_eq!(received.due(), Some(now + LONG_DELAY));
        }
        received.on_packets(now, 8..9, 100, Wish::Late, Duration::ZERO);
        assert_eq!(received.due(), Some(now), "eight packets");
        received.on_sent();
        received.on_packets(now, 9..10, 100, Wish::Late, Duration::ZERO);
        received.on_packets(now, 10..11, 100, Wish::Soon, Duration::ZERO);
        assert_eq!(received.due(), Some(now + DELAY), "a message waits for the second one");
        received.on_packets(now, 11..12, 100, Wish::Late, Duration::ZERO);
        assert_eq!(received.due(), Some(now + DELAY), "and goes on waiting");
    }

    #[test]
    fn ranges_that_no_sender_has_sent() {
        let range = |gap, length| ack::Range { gap, length };
        let packets =
            |largest, ranges: &[ack::Range]| packets(largest, ranges.iter().copied()).map(Packets::into_vec);
        assert_eq!(packets(3, &[range(0, 3)]), Some(vec![1..4]));
        assert_eq!(packets(3, &[range(0, 4)]), None, "number 0");
        assert_eq!(packets(3, &[range(0, 1), range(5, 1)]), None);
        assert_eq!(packets(3, &[range(0, 0), range(2, 1)]), Some(vec![1..2]));
    }
}
