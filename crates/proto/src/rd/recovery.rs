//! Packets in flight, and which of them are lost (RFC 9002 section 6, RFC 8985).
//!
//! A packet number is never used twice: what was in a lost packet goes into a new one, if it still matters.
//! A spurious repair costs bandwidth and never a second delivery, because messages have numbers of their own.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use uwarp_wire::rd::chunk::Reason;

use super::room::charge;
use super::rtt::{LATE, Rtt};
use super::streams::{Control, StreamContent};

/// A packet is lost when so many later ones are acknowledged (RFC 9002 section 6.1.1).
const PACKET_THRESHOLD: u64 = 3;
/// Acknowledgements that are remembered while nothing else is in flight. A peer that only sends acknowledges
/// none of them.
const MOST_IDLE: usize = 64;
/// How long reordering is remembered, in round trips (RFC 8985 section 6.2).
const REORDERING_ROUNDS: u32 = 16;
/// While it is, packets count as lost by time alone, and later by a quarter of the round trip for each step,
/// up to a whole one.
const MOST_STEPS: u32 = 4;

/// What a packet carries that must be done again if it is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// A part of a message: its number, the try that it belongs to, and the range of bytes.
    Segment { message: u64, attempt: u16, start: u32, end: u32 },
    /// A verdict on a message of the peer, and the packet that it speaks of.
    Verdict { message: u64, packet: u64, reason: Reason },
    /// A group of messages that have failed.
    Abandon { group: u64 },
    /// Receives were posted.
    Ready { qpn: u32, receives: u8 },
    /// All that had arrived up to this packet number was acknowledged.
    Ack { largest: u64 },
    /// Nothing but the length of the packet.
    Length { bytes: u32 },
    /// A part of a stream.
    Stream(StreamContent),
    /// What was said of a stream.
    Control(Control),
}

pub(super) type Contents = SmallVec<[Content; 2]>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Flying,
    Acknowledged,
    Lost,
}

#[derive(Debug)]
struct Sent {
    at: Instant,
    bytes: u32,
    /// The peer acknowledges it.
    eliciting: bool,
    /// Its bytes, if that may come late; else 0.
    late: u32,
    fate: Fate,
    contents: Contents,
}

/// The path has been seen to reorder: a packet that counted as lost was late.
#[derive(Debug, Clone, Copy)]
struct Reordering {
    until: Instant,
    /// One more for each round trip in which that was seen.
    steps: u32,
    stepped_at: Instant,
}

/// What an acknowledgement, or the time, has shown.
#[derive(Debug, Default)]
pub(super) struct News {
    /// What has arrived for the first time.
    pub(super) acknowledged: SmallVec<[Content; 4]>,
    /// What must be sent again.
    pub(super) lost: SmallVec<[Content; 2]>,
    /// An ack-eliciting packet was acknowledged for the first time.
    pub(super) progress: bool,
    /// Packets that were lost, and the longest run of them with none between that has arrived.
    pub(super) lost_packets: u32,
    pub(super) run: u32,
    /// Packets that had counted as lost and have arrived.
    pub(super) late_packets: u32,
    /// Ack-eliciting packets that were in flight until now.
    pub(super) acknowledged_packets: u32,
    /// The round-trip time of the largest of them, without the delay that the peer reports.
    pub(super) sample: Option<Duration>,
    /// Bytes of the longest packet that has arrived.
    pub(super) longest_arrived: u32,
    /// Of packets longer than the first ones that are lost: when the last was sent, and bytes of the
    /// shortest.
    pub(super) long_lost: Option<(Instant, u32)>,
}

impl News {
    /// Parts that touch become one: packets are looked at from the last one downwards.
    fn acknowledge(&mut self, content: Content) {
        let is_joined = match (self.acknowledged.last_mut(), &content) {
            (
                Some(Content::Segment { message, attempt, start, .. }),
                Content::Segment { message: of, attempt: in_try, start: from, end },
            ) if (*message, *attempt, *start) == (*of, *in_try, *end) => {
                *start = *from;
                true
            }
            (Some(Content::Stream(last)), Content::Stream(before)) => last.join(before),
            _ => false,
        };
        if !is_joined {
            self.acknowledged.push(content);
        }
    }
}

/// Sent packets until their fate is known.
#[derive(Debug)]
pub(super) struct Recovery {
    /// Number of the first of `sent`.
    first: u64,
    sent: VecDeque<Sent>,
    /// Bytes of a full packet at first.
    usual: u32,
    largest_acknowledged: Option<u64>,
    /// Bytes of ack-eliciting packets whose fate is not known.
    in_flight: u64,
    /// What they take of the peer's socket.
    charge: u64,
    /// Bytes of those that may be acknowledged late.
    late: u64,
    /// Count of those packets.
    flying: u32,
    /// When the next packet counts as lost, if nothing comes before.
    loss_at: Option<Instant>,
    /// Probes since the last progress.
    probes: u32,
    /// When the last ack-eliciting packet was sent, and how much longer than others its acknowledgement may
    /// take.
    last_eliciting: Option<Instant>,
    more_delay: Duration,
    reordering: Option<Reordering>,
    pub(super) rtt: Rtt,
}

impl Recovery {
    /// Keeps no more room than it needs.
    pub(super) fn shrink(&mut self) {
        self.sent.shrink_to_fit();
    }

    /// With full packets of `usual` bytes at first.
    pub(super) fn new(rtt: Rtt, usual: u32) -> Self {
        Self {
            first: 1,
            sent: VecDeque::new(),
            usual,
            largest_acknowledged: None,
            in_flight: 0,
            charge: 0,
            late: 0,
            flying: 0,
            loss_at: None,
            probes: 0,
            last_eliciting: None,
            more_delay: Duration::ZERO,
            reordering: None,
            rtt,
        }
    }

    /// The number of the next packet.
    pub(super) fn next_number(&self) -> u64 {
        self.first + self.sent.len() as u64
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// What is in flight takes this of the peer's socket.
    pub(super) fn charge(&self) -> u64 {
        self.charge
    }

    /// Whether the peer owes an acknowledgement of something.
    pub(super) fn is_waiting(&self) -> bool {
        self.flying > 0
    }

    pub(super) fn largest_acknowledged(&self) -> u64 {
        self.largest_acknowledged.unwrap_or(0)
    }

    pub(super) fn last_eliciting(&self) -> Option<Instant> {
        self.last_eliciting
    }

    /// The packet [`Self::next_number`] was sent.
    pub(super) fn on_sent(&mut self, now: Instant, bytes: u32, eliciting: bool, contents: Contents) {
        if eliciting {
            self.in_flight += u64::from(bytes);
            self.charge += charge(bytes as usize);
            self.flying += 1;
            (self.last_eliciting, self.more_delay) = (Some(now), Duration::ZERO);
        }
        let fate = Fate::Flying;
        self.sent.push_back(Sent { at: now, bytes, eliciting, late: 0, fate, contents });
        while self.flying == 0 && self.sent.len() > MOST_IDLE {
            self.sent.pop_front();
            self.first += 1;
        }
    }

    /// The acknowledgement of the packet that was just sent may come late.
    pub(super) fn on_late_wish(&mut self) {
        if let Some(sent) = self.sent.back_mut().filter(|sent| sent.eliciting) {
            sent.late = sent.bytes;
            self.late += u64::from(sent.bytes);
            self.more_delay = LATE;
        }
    }

    /// Bytes in flight that are acknowledged as soon as they arrive: how much of the window is used.
    pub(super) fn in_flight_soon(&self) -> u64 {
        self.in_flight - self.late
    }

    /// Packets that are remembered.
    pub(super) fn remembered(&self) -> usize {
        self.sent.len()
    }

    /// The older half of all packets is lost, and an acknowledgement of them means nothing any more.
    pub(super) fn forget_half(&mut self, news: &mut News) {
        for sent in self.sent.drain(..self.sent.len() / 2) {
            self.first += 1;
            if sent.fate != Fate::Flying {
                continue;
            }
            news.lost.extend(sent.contents);
            if sent.eliciting {
                news.lost_packets += 1;
                self.in_flight -= u64::from(sent.bytes);
                self.late -= u64::from(sent.late);
                self.charge -= charge(sent.bytes as usize);
                self.flying -= 1;
            }
        }
    }

    /// The peer has these packets: ranges from the largest downwards. `Err`: one of them was never sent, so
    /// the peer lies, and nothing has changed.
    pub(super) fn on_ack(
        &mut self,
        now: Instant,
        ranges: &[Range<u64>],
        delay: Duration,
        news: &mut News,
    ) -> Result<(), ()> {
        let Some(largest) = ranges.first().and_then(|range| range.end.checked_sub(1)) else { return Err(()) };
        if largest >= self.next_number() {
            return Err(());
        }
        for range in ranges {
            for number in (range.start.max(self.first)..range.end).rev() {
                self.acknowledge(now, number, (number == largest).then_some(delay), news);
            }
        }
        self.largest_acknowledged = self.largest_acknowledged.max(Some(largest));
        if news.progress {
            self.probes = 0;
        }
        self.detect(now, news);
        Ok(())
    }

    fn acknowledge(&mut self, now: Instant, number: u64, largest: Option<Duration>, news: &mut News) {
        let Some(sent) = usize::try_from(number - self.first).ok().and_then(|at| self.sent.get_mut(at))
        else {
            return;
        };
        let was = std::mem::replace(&mut sent.fate, Fate::Acknowledged);
        if was == Fate::Acknowledged {
            return;
        }
        let is_probe = sent.contents.iter().any(|content| matches!(content, Content::Length { .. }));
        for content in sent.contents.drain(..) {
            news.acknowledge(content);
        }
        if was == Fate::Lost {
            // It was late, not lost.
            news.late_packets += u32::from(sent.eliciting && !is_probe);
            let round = self.rtt.smoothed();
            let (steps, stepped_at) = match self.reordering.filter(|reordering| now < reordering.until) {
                Some(seen) if now < seen.stepped_at + round => (seen.steps, seen.stepped_at),
                Some(seen) => ((seen.steps + 1).min(MOST_STEPS), now),
                None => (1, now),
            };
            self.reordering = Some(Reordering { until: now + round * REORDERING_ROUNDS, steps, stepped_at });
        } else if sent.eliciting {
            self.in_flight -= u64::from(sent.bytes);
            self.late -= u64::from(sent.late);
            self.charge -= charge(sent.bytes as usize);
            self.flying -= 1;
            news.acknowledged_packets += 1;
        }
        if sent.eliciting {
            news.progress = true;
            news.longest_arrived = news.longest_arrived.max(sent.bytes);
            if let Some(delay) = largest {
                let sample = now.saturating_duration_since(sent.at);
                self.rtt.update(sample, delay);
                // A peer that claims more than the whole time is not believed.
                news.sample = Some(sample.checked_sub(delay).unwrap_or(sample));
            }
        }
    }

    /// Finds what is lost by now.
    fn detect(&mut self, now: Instant, news: &mut News) {
        self.loss_at = None;
        let Some(largest) = self.largest_acknowledged else { return };
        let reordering = self.reordering.filter(|reordering| now < reordering.until);
        let threshold = if reordering.is_some() { u64::MAX } else { PACKET_THRESHOLD };
        let more = reordering.map_or(Duration::ZERO, |seen| self.rtt.smoothed() * seen.steps / 4);
        let delay = self.rtt.loss_delay() + more;
        let older = usize::try_from(largest.saturating_sub(self.first)).unwrap_or(usize::MAX);
        let mut run = 0;
        for (at, sent) in self.sent.iter_mut().enumerate().take(older) {
            if sent.fate != Fate::Flying {
                run = if sent.fate == Fate::Acknowledged { 0 } else { run };
                continue;
            }
            let number = self.first + at as u64;
            let due = sent.at + delay;
            if number.saturating_add(threshold) > largest && due > now {
                self.loss_at = Some(self.loss_at.map_or(due, |other| other.min(due)));
                continue;
            }
            sent.fate = Fate::Lost;
            // The contents stay for a late acknowledgement, which may still save their repair.
            news.lost.extend(sent.contents.iter().copied());
            if sent.eliciting {
                // One that was too long says nothing of the others.
                if !sent.contents.iter().any(|content| matches!(content, Content::Length { .. })) {
                    news.lost_packets += 1;
                    run += 1;
                    news.run = news.run.max(run);
                    if sent.bytes > self.usual {
                        let (at, bytes) = news.long_lost.unwrap_or((sent.at, sent.bytes));
                        news.long_lost = Some((at.max(sent.at), bytes.min(sent.bytes)));
                    }
                }
                self.in_flight -= u64::from(sent.bytes);
                self.late -= u64::from(sent.late);
                self.charge -= charge(sent.bytes as usize);
                self.flying -= 1;
            }
        }
        // A lost packet is remembered a little, so that its late acknowledgement shows reordering.
        while let Some(front) = self.sent.front() {
            let is_over = match front.fate {
                Fate::Flying => false,
                Fate::Acknowledged => true,
                Fate::Lost => now > front.at + delay + self.rtt.probe_delay(1),
            };
            if !is_over {
                break;
            }
            self.sent.pop_front();
            self.first += 1;
        }
    }

    /// When [`Self::on_timeout`] has something to do.
    pub(super) fn timeout(&self) -> Option<Instant> {
        let probe = self.last_eliciting.filter(|_| self.flying > 0);
        self.loss_at.or_else(|| probe.map(|at| at + self.rtt.probe_delay(self.probes) + self.more_delay))
    }

    /// Finds what is lost by now. Returns whether a probe must be sent.
    pub(super) fn on_timeout(&mut self, now: Instant, news: &mut News) -> bool {
        if self.loss_at.is_some_and(|at| at <= now) {
            self.detect(now, news);
            return false;
        }
        let is_due = self.loss_at.is_none() && self.timeout().is_some_and(|at| at <= now);
        if is_due {
            self.probes = self.probes.saturating_add(1);
            // The next one counts from this one, whether or not it can be sent.
            (self.last_eliciting, self.more_delay) = (Some(now), Duration::ZERO);
        }
        is_due
    }

    /// Probes since the last progress.
    pub(super) fn probes(&self) -> u32 {
        self.probes
    }

    /// What a probe sends again: of all that is in flight, what belongs to the oldest message. The receiver
    /// may have no room to hold a later one, however often it comes. The packet stays in flight.
    pub(super) fn oldest(&self) -> impl Iterator<Item = Content> + '_ {
        let message = |sent: &&Sent| {
            let numbers = sent.contents.iter().map(|content| match content {
                Content::Segment { message, .. } => *message,
                _ => u64::MAX,
            });
            numbers.min().unwrap_or(u64::MAX)
        };
        let flying = self.sent.iter().filter(|sent| sent.fate == Fate::Flying && sent.eliciting);
        flying.min_by_key(message).into_iter().flat_map(|sent| sent.contents.iter().copied())
    }
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "a list of ranges may have one")]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    struct Bench {
        start: Instant,
        recovery: Recovery,
    }

    impl Bench {
        /// With so many packets sent at time 0, a millisecond of round trip known.
        fn new(packets: u64) -> Self {
            let start = Instant::now();
            let mut rtt = Rtt::new();
            rtt.update(MS, Duration::ZERO);
            let mut recovery = Recovery::new(rtt, 1452);
            for message in 1..=packets {
                let content = Content::Segment { message, attempt: 0, start: 0, end: 1 };
                recovery.on_sent(start, 100, true, SmallVec::from_slice(&[content]));
            }
            Self { start, recovery }
        }

        fn ack(&mut self, after: Duration, ranges: &[Range<u64>]) -> (Vec<u64>, Vec<u64>) {
            let mut news = News::default();
            self.recovery.on_ack(self.start + after, ranges, Duration::ZERO, &mut news).expect("honest");
            (messages(&news.acknowledged), messages(&news.lost))
        }
    }

    fn messages(contents: &[Content]) -> Vec<u64> {
        let message = |content: &Content| match content {
            Content::Segment { message, .. } => Some(*message),
            _ => None,
        };
        contents.iter().filter_map(message).collect()
    }

    /// Who only receives sends acknowledgements alone, and none of them is ever acknowledged.
    #[test]
    fn acknowledgements_without_end_are_not_remembered() {
        let mut bench = Bench::new(1);
        let ack = || SmallVec::from_slice(&[Content::Ack { largest: 1 }]);
        (0..5000).for_each(|_| bench.recovery.on_sent(bench.start, 60, false, ack()));
        assert_eq!(bench.recovery.remembered(), 5001, "the first packet is in flight");
        assert_eq!(bench.ack(MS, &[1..2]), (vec![1], vec![]));
        (0..5000).for_each(|_| bench.recovery.on_sent(bench.start, 60, false, ack()));
        assert_eq!(bench.recovery.remembered(), MOST_IDLE);
        assert_eq!(bench.recovery.next_number(), 10_002);
    }

    #[test]
    fn what_is_forgotten_is_lost_once() {
        let mut bench = Bench::new(10);
        let mut news = News::default();
        bench.recovery.forget_half(&mut news);
        assert_eq!((messages(&news.lost), news.lost_packets), (vec![1, 2, 3, 4, 5], 5));
        assert_eq!((bench.recovery.in_flight(), bench.recovery.next_number()), (500, 11));
        assert_eq!(bench.ack(Duration::ZERO, &[1..11]), (vec![10, 9, 8, 7, 6], vec![]));
        assert_eq!((bench.recovery.in_flight(), bench.recovery.charge()), (0, 0));
    }

    #[test]
    fn three_later_packets_make_a_loss() {
        let mut bench = Bench::new(6);
        assert_eq!(bench.ack(MS, &[2..4]), (vec![3, 2], vec![]));
        assert_eq!(bench.ack(MS, &[2..5]), (vec![4], vec![1]));
        assert_eq!(bench.recovery.in_flight(), 200);
    }

    #[test]
    fn time_makes_a_loss() {
        let mut bench = Bench::new(2);
        assert_eq!(bench.ack(MS, &[2..3]), (vec![2], vec![]));
        let due = bench.recovery.timeout().unwrap();
        assert_eq!(due, bench.start + MS * 9 / 8);
        let mut news = News::default();
        assert!(!bench.recovery.on_timeout(due, &mut news));
        assert_eq!(messages(&news.lost), [1]);
        assert!(!bench.recovery.is_waiting());
    }

    #[test]
    fn a_late_acknowledgement_saves_the_repair_and_shows_reordering() {
        let mut bench = Bench::new(10);
        assert_eq!(bench.ack(MS, &[4..5]).1, [1]);
        assert_eq!(bench.ack(MS, &[4..5, 1..2]), (vec![1], vec![]));
        assert_eq!(bench.ack(MS, &[8..9]).1, Vec::<u64>::new(), "three are not enough any more");
        let much_later = MS * 20;
        assert_eq!(bench.ack(much_later, &[10..11]).1, [2, 3, 5, 6, 7], "reordering is forgotten");
    }

    #[test]
    fn a_tail_is_probed_ever_more_seldom() {
        let mut bench = Bench::new(1);
        let mut last = bench.start;
        let mut news = News::default();
        for delay in [2, 3, 6, 12, 24] {
            let due = bench.recovery.timeout().unwrap();
            assert!(due >= last + delay * MS, "{delay}");
            assert!(!bench.recovery.on_timeout(due - Duration::from_micros(1), &mut news));
            assert!(bench.recovery.on_timeout(due, &mut news));
            last = due;
        }
        assert_eq!(bench.recovery.oldest().count(), 1);
        assert_eq!(messages(&news.lost), Vec::<u64>::new(), "a probe is no loss");
        bench.ack(MS, &[1..2]);
        assert_eq!(bench.recovery.timeout(), None);
    }

    #[test]
    fn what_may_be_acknowledged_late_is_probed_late() {
        let mut bench = Bench::new(1);
        let usual = bench.recovery.timeout().unwrap();
        bench.recovery.on_late_wish();
        let late = usual + LATE;
        assert_eq!((bench.recovery.timeout(), bench.recovery.in_flight_soon()), (Some(late), 0));
        let mut news = News::default();
        assert!(!bench.recovery.on_timeout(usual, &mut news));
        assert!(bench.recovery.on_timeout(late, &mut news));
        let next = late + bench.recovery.rtt.probe_delay(1);
        assert_eq!(bench.recovery.timeout(), Some(next), "the probe is acknowledged at once");
        bench.recovery.on_sent(bench.start, 50, true, Contents::new());
        assert_eq!(bench.recovery.in_flight_soon(), 50, "and so is what follows");
        bench.ack(MS, &[1..3]);
        assert_eq!((bench.recovery.in_flight_soon(), bench.recovery.in_flight()), (0, 0));
    }

    #[test]
    fn what_was_never_sent_cannot_be_acknowledged() {
        let mut bench = Bench::new(3);
        let mut news = News::default();
        assert!(bench.recovery.on_ack(bench.start, &[2..5], Duration::ZERO, &mut news).is_err());
        assert!(bench.recovery.on_ack(bench.start, &[], Duration::ZERO, &mut news).is_err());
        assert_eq!(bench.recovery.in_flight(), 300);
    }

    #[test]
    fn on_a_path_that_reorders_time_alone_says_what_is_lost() {
        let mut bench = Bench::new(40);
        assert_eq!(bench.ack(MS, &[5..11]).1, [1, 2, 3, 4]);
        // They were late: more of them than the three that usually tell.
        bench.ack(MS * 11 / 10, &[1..5]);
        assert_eq!(bench.ack(MS * 12 / 10, &[30..31]).1, [] as [u64; 0]);
        // After 9/8 of the last round trip and a quarter.
        let lost = |bench: &mut Bench, after| {
            let mut news = News::default();
            bench.recovery.on_timeout(bench.start + after, &mut news);
            (news.lost.len(), news.late_packets)
        };
        assert_eq!(lost(&mut bench, MS * 15 / 10), (0, 0));
        assert_eq!(lost(&mut bench, MS * 17 / 10), (19, 0));
    }
}
