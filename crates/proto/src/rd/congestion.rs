//! The congestion response of an exchange (docs/rd.md section 7.1): how many packets may be in flight.
//!
//! It has no clock and no packets. It is told of each acknowledgement, and its answer is a window. A window
//! below one packet is a pause between packets, which the [`Pacer`] makes.
//!
//! | what it sees | the window | source |
//! |---|---|---|
//! | q below the target | + 1 packet a round trip | Swift (SIGCOMM 2020) |
//! | q at the target or above | × max(0.5, 1 − 0.8 · (q − target) / RTT) | Swift |
//! | the start | doubles a round trip, until q is above half the target or three losses in a row | RFC 5681 |
//! | a loss | × max(0.5, (base + 50 µs) / (base + q)), at most 1 | H-TCP's adaptive backoff |
//! | more than 2 % lost of the last 512 packets | × 0.85; more than 10 %: × 0.5 | BBR; RFC 8085 |
//! | a queue that stands | second mode: + 1.5 packets, a loss × 0.7, delay is ignored | Copa (NSDI 2018) |
//! | lost packets arrive | they count no more; the window is as before if all of that turn did | RFC 4015 |
//! | a CE mark | × 0.85 | RFC 8511 |
//! | a sample of a blind receiver | grows as above if it is below the target, else nothing | – |
//!
//! The window shrinks once a round trip at most, and grows only while it is used. q is the round-trip time
//! without the delay that the peer reports, less the minimum of the last 5 to 10 s.

use std::time::{Duration, Instant};

/// Packets in flight at first (RFC 6928).
pub(super) const FIRST_WINDOW: f64 = 10.0;
/// A loss never takes the window below this: two packets show a loss by what comes behind it.
const LEAST_AFTER_LOSS: f64 = 2.0;
/// Delay does: many senders may share a receiver that has room for less than a packet of each.
const LEAST: f64 = 1.0 / 64.0;
/// The target is at least this: user space wakes up that late.
const LEAST_TARGET: f64 = 200e-6;
/// Noise of timing in user space. A loss beside less queue than this costs nothing.
const NOISE: f64 = 50e-6;
/// Losses are counted among so many packets.
const HISTORY: usize = 512;
/// With fewer packets than this, their share is taken of this number.
const LEAST_HISTORY: u32 = 128;
/// The minimum of the round-trip time is forgotten after one to two of these.
const BASE_PERIOD: Duration = Duration::from_secs(5);
/// So many round trips after a loss all of its turn have arrived that were late by less than one.
const SETTLED_ROUNDS: f64 = 4.0;
/// A queue stands that was not near its minimum for so many round trips, and 2 ms.
const STANDING_ROUNDS: f64 = 8.0;
const STANDING: f64 = 2e-3;

/// Why the window is what it is: its last change, for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WindowChange {
    /// Nothing has changed it: ten packets (RFC 6928).
    First,
    /// It doubles in a round trip (RFC 5681 section 3.1).
    SlowStart,
    /// The delay is below the target: one packet a round trip (Swift, section 3.1).
    BelowTarget,
    /// The delay is above the target (Swift, section 3.1).
    AboveTarget,
    /// A loss took the queue that was seen with it (H-TCP's adaptive backoff).
    Loss,
    /// More than 2 % of the last packets were lost (BBR's threshold; RFC 8085 section 3.1 wants an answer).
    ManyLosses,
    /// A CE mark (RFC 8511).
    Marked,
    /// Beside a queue that is somebody else's: 1.5 packets a round trip (Copa's second mode, NSDI 2018).
    Competing,
    /// A loss beside such a queue (Copa's second mode).
    CompetingLoss,
}

/// The window of an exchange, for people.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Window {
    /// Packets of full length that may be in flight; below one, with pauses.
    pub packets: f64,
    /// Its last change.
    pub change: WindowChange,
    /// Whether a queue stands on the path that is somebody else's.
    pub is_competing: bool,
}

/// What an acknowledgement, or the time, has shown.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Report {
    /// The round-trip time of the largest packet, without the delay that the peer reports.
    pub(super) sample: Option<Duration>,
    /// How long the peer had not found its socket empty.
    pub(super) blind: Duration,
    /// Packets that were acknowledged for the first time, and those that are lost now.
    pub(super) acknowledged: u32,
    pub(super) lost: u32,
    /// The longest run of lost packets without one between them that has arrived.
    pub(super) run: u32,
    /// Packets that had counted as lost and have arrived.
    pub(super) late: u32,
    /// Packets with a CE mark that are new.
    pub(super) marks: u32,
    /// The largest packet number acknowledged so far.
    pub(super) largest: u64,
    /// The number of the next packet.
    pub(super) next: u64,
    /// At least half of the window was in flight.
    pub(super) is_used: bool,
}

/// The window, and what it depends on. Times are seconds.
#[derive(Debug)]
pub(super) struct Congestion {
    window: f64,
    change: WindowChange,
    is_start: bool,
    is_second: bool,
    /// The minimum of this period and of the one before, and when this period began.
    minima: [f64; 2],
    period: Option<Instant>,
    smoothed: f64,
    /// Queueing delay of the last sample, and the largest seen.
    queue: f64,
    most_queue: f64,
    /// When the queue was last near its minimum.
    low_at: Option<Instant>,
    /// Whether each of the last packets was lost, as a ring.
    history: [u64; HISTORY / 64],
    at: usize,
    known: u32,
    lost: u32,
    /// No further decrease before this packet is acknowledged.
    cut_number: u64,
    /// What a loss has cost last.
    cost: Option<Cost>,
}

/// What the window was before a loss, and the packets of that round trip that are still believed to be lost.
#[derive(Debug, Clone, Copy)]
struct Cost {
    window: f64,
    lost: u32,
    /// What comes later was another packet.
    until: Instant,
}

impl Congestion {
    pub(super) fn new() -> Self {
        Self {
            window: FIRST_WINDOW,
            change: WindowChange::First,
            is_start: true,
            is_second: false,
            minima: [f64::INFINITY; 2],
            period: None,
            smoothed: 0.0,
            queue: 0.0,
            most_queue: 0.0,
            low_at: None,
            history: [0; HISTORY / 64],
            at: 0,
            known: 0,
            lost: 0,
            cut_number: 0,
            cost: None,
        }
    }

    /// Bytes that may be in flight, with packets of this length. There is always room for one packet.
    pub(super) fn bytes(&self, length: usize) -> u64 {
        (self.window.max(1.0) * length as f64) as u64
    }

    /// Packets are longer now by this factor, so as many bytes are fewer of them.
    pub(super) fn rescale(&mut self, factor: f64) {
        self.window = (self.window / factor).max(LEAST_AFTER_LOSS.min(self.window));
        if let Some(cost) = &mut self.cost {
            cost.window /= factor;
        }
    }

    pub(super) fn view(&self) -> Window {
        Window { packets: self.window, change: self.change, is_competing: self.is_second }
    }

    /// Packets in a second, a little more than the window gives: the window is the limit, and the pause only
    /// spreads what it allows (RFC 9002 section 7.7). `None`: nothing is known of the path.
    pub(super) fn rate(&self) -> Option<f64> {
        let gain = if self.is_start { 2.0 } else { 1.25 };
        let gain = if self.window < 1.0 { 1.0 } else { gain };
        (self.smoothed > 0.0).then(|| gain * self.window / self.smoothed)
    }

    fn base(&self) -> f64 {
        self.minima[0].min(self.minima[1])
    }

    fn target(&self, base: f64) -> f64 {
        let scaling = (2.0 / self.window.max(1.0).sqrt()).min(1.0);
        (base / 2.0).max(LEAST_TARGET) * (1.0 + scaling)
    }

    /// An acknowledgement has come, or packets are lost by the time.
    pub(super) fn on_report(&mut self, now: Instant, report: &Report) {
        for lost in [(report.lost, true), (report.acknowledged, false)] {
            (0..lost.0.min(HISTORY as u32)).for_each(|_| self.note(lost.1));
        }
        self.cost = self.cost.filter(|cost| now < cost.until);
        if report.late > 0 {
            self.on_late(report.late);
        }
        if report.lost > 0 {
            self.on_loss(now, report);
        }
        if report.marks > 0 {
            (self.is_start, self.cost) = (false, None);
            self.cut(report, 0.85, LEAST_AFTER_LOSS, WindowChange::Marked);
        }
        if let Some(sample) = report.sample {
            self.on_sample(now, sample.as_secs_f64(), report);
        }
    }

    fn note(&mut self, lost: bool) {
        let (word, bit) = (self.at / 64, 1 << (self.at % 64));
        let Some(word) = self.history.get_mut(word) else { return };
        self.lost -= u32::from(*word & bit != 0);
        *word = if lost { *word | bit } else { *word & !bit };
        self.lost += u32::from(lost);
        self.at = (self.at + 1) % HISTORY;
        self.known = (self.known + 1).min(HISTORY as u32);
    }

    /// They were late, not lost: neither do they count as that, nor does the window stay smaller for them if
    /// they were all (RFC 3522, RFC 4015).
    fn on_late(&mut self, late: u32) {
        let mut left = late.min(self.lost);
        self.lost -= left;
        // The newest first: it does not matter which, but they must go out of the count one day.
        for back in 1..=HISTORY {
            if left == 0 {
                break;
            }
            let at = (self.at + HISTORY - back) % HISTORY;
            let (word, bit) = (at / 64, 1_u64 << (at % 64));
            if let Some(word) = self.history.get_mut(word).filter(|word| **word & bit != 0) {
                *word &= !bit;
                left -= 1;
            }
        }
        if let Some(cost) = &mut self.cost {
            cost.lost = cost.lost.saturating_sub(late);
            if cost.lost == 0 {
                self.window = self.window.max(cost.window);
                (self.cost, self.cut_number) = (None, 0);
            }
        }
    }

    fn on_loss(&mut self, now: Instant, report: &Report) {
        if let Some(cost) = &mut self.cost {
            cost.lost += report.lost;
        }
        let share = f64::from(self.lost) / f64::from(self.known.max(LEAST_HISTORY));
        let base = self.base();
        let (mut factor, mut change) = (1.0, WindowChange::Loss);
        if self.is_second {
            (factor, change) = (0.7, WindowChange::CompetingLoss);
        } else if base.is_finite() {
            factor = (base + NOISE) / (base + self.queue);
        }
        let of_many = if share > 0.10 { 0.5 } else { 0.85 };
        let are_many = share > 0.02;
        if are_many && of_many < factor {
            (factor, change) = (of_many, WindowChange::ManyLosses);
        }
        // The start ends by delay, or by losses that are more than an accident.
        if self.is_start && report.run < 3 && !are_many {
            return;
        }
        self.is_start = false;
        // Some of an earlier turn may be late, too.
        let (window, lost) = (self.window, self.cost.map_or(report.lost, |cost| cost.lost));
        if factor < 1.0 && self.cut(report, factor.max(0.5), LEAST_AFTER_LOSS, change) {
            let until = now + Duration::from_secs_f64(SETTLED_ROUNDS * self.smoothed);
            self.cost = Some(Cost { window, lost, until });
        }
    }

    fn on_sample(&mut self, now: Instant, sample: f64, report: &Report) {
        let known = self.base().min(sample);
        if report.blind.as_secs_f64() > self.target(known) / 2.0 {
            // A delay that is too long by what the program has waited is still an upper bound, and paces:
            // what one long pause has left must not stay because all later samples are blind.
            if sample < self.smoothed {
                self.smoothed = 0.875 * self.smoothed + 0.125 * sample;
            }
            self.on_bound(sample, report);
            return;
        }
        if self.period.is_none_or(|since| now >= since + BASE_PERIOD) {
            self.minima = [f64::INFINITY, self.minima[0]];
            self.period = Some(now);
        }
        self.minima[0] = self.minima[0].min(sample);
        let base = self.base();
        self.smoothed = if self.smoothed > 0.0 { 0.875 * self.smoothed + 0.125 * sample } else { sample };
        self.queue = sample - base;
        self.most_queue = self.queue.max(self.most_queue * (1.0 - 1e-5));
        let target = self.target(base);
        self.find_mode(now, target);
        if self.queue >= target && !self.is_second {
            self.is_start = false;
            let factor = (1.0 - 0.8 * (self.queue - target) / sample).max(0.5);
            // Who has a message in flight and waits for its answer has made no queue. On a busy host the
            // delay is that of programs that wait for a processor.
            if report.is_used {
                self.cost = None;
                self.cut(report, factor, LEAST, WindowChange::AboveTarget);
            }
        } else if report.acknowledged > 0 {
            self.is_start &= self.queue < target / 2.0;
            if report.is_used {
                self.grow(f64::from(report.acknowledged));
            }
        }
    }

    /// The queue is no longer than this sample says, whatever part of that the programs have waited. Two that
    /// are busy with each other never find their sockets empty; without this, their window would stay as it
    /// was at first.
    fn on_bound(&mut self, sample: f64, report: &Report) {
        let base = self.base();
        let target = self.target(base) / if self.is_start { 2.0 } else { 1.0 };
        let is_below = base.is_finite() && sample - base < target && !self.is_second;
        if is_below && report.acknowledged > 0 && report.is_used {
            self.grow(f64::from(report.acknowledged));
        }
    }

    /// Copa's rule: a queue of our own would have been near its minimum by now.
    fn find_mode(&mut self, now: Instant, target: f64) {
        let low_at = *self.low_at.get_or_insert(now);
        if self.queue < NOISE.max(0.1 * self.most_queue) {
            self.low_at = Some(now);
            self.is_second = false;
            return;
        }
        let standing = now.saturating_duration_since(low_at).as_secs_f64();
        self.is_second |= standing > STANDING_ROUNDS * self.smoothed + STANDING && self.queue > target;
    }

    fn grow(&mut self, packets: f64) {
        let (more, change) = match (self.is_start, self.is_second) {
            (true, _) => (packets, WindowChange::SlowStart),
            (false, true) => (1.5 * packets / self.window.max(1.0), WindowChange::Competing),
            (false, false) => (packets / self.window.max(1.0), WindowChange::BelowTarget),
        };
        self.window += more;
        self.change = change;
    }

    /// Once a round trip. Whether it was.
    fn cut(&mut self, report: &Report, factor: f64, least: f64, change: WindowChange) -> bool {
        if report.largest < self.cut_number {
            return false;
        }
        self.cost = None;
        self.window = (self.window * factor).max(least.min(self.window));
        self.change = change;
        self.cut_number = report.next;
        true
    }
}

/// Above this rate the window and the acknowledgements pace.
const PACED_BELOW: f64 = 250e6;
/// A burst is what the rate gives in this time: the alarm of a process is no finer.
const BURST_TIME: f64 = 250e-6;
/// Packets of a burst: a probe and what shows its loss, and what one system call takes.
const BURST: (f64, f64) = (2.0, 44.0);
/// A burst makes up for no more lateness than the round trip divided by this.
const MADE_UP: f64 = 4.0;
/// The longest pause between two packets.
const LONGEST_PAUSE: f64 = 0.5;

/// Spreads packets over the round trip, in bursts.
#[derive(Debug, Default)]
pub(super) struct Pacer {
    /// Packets of this burst that may still go.
    left: u32,
    /// When the next burst may go. `None`: now.
    next: Option<Instant>,
    /// Something waits for it.
    is_waited_for: bool,
}

impl Pacer {
    /// When the next packet may go, if the burst is over.
    pub(super) fn next(&self) -> Option<Instant> {
        self.next.filter(|_| self.left == 0)
    }

    /// The same, if that is not now.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        self.next().filter(|next| *next > now)
    }

    /// Something would go, if there were room.
    pub(super) fn note_waiting(&mut self) {
        self.is_waited_for = true;
    }

    /// As [`Self::due`], asked by what would go otherwise.
    pub(super) fn holds_back(&mut self, now: Instant) -> bool {
        let holds_back = self.due(now).is_some();
        self.is_waited_for |= holds_back;
        holds_back
    }

    /// A packet goes. `length`: bytes of a full one.
    pub(super) fn on_sent(&mut self, now: Instant, congestion: &Congestion, length: usize) {
        let is_paced = |rate: &f64| *rate * (length as f64) < PACED_BELOW;
        let Some(rate) = congestion.rate().filter(is_paced) else {
            *self = Self::default();
            return;
        };
        if self.next.is_none_or(|next| next <= now) {
            // The alarm of a program that sleeps comes late, and what it has cost is made up for.
            let next = self.next.filter(|_| std::mem::take(&mut self.is_waited_for));
            let late = next.map_or(0.0, |next| now.saturating_duration_since(next).as_secs_f64());
            let late = late.min(congestion.smoothed / MADE_UP);
            let burst = (rate * (BURST_TIME + late)).clamp(BURST.0, BURST.1).floor();
            // Below one packet a round trip, a burst would be a multiple of the window.
            let (burst, late) = if congestion.window < 1.0 { (1.0, 0.0) } else { (burst, late) };
            self.left = burst as u32;
            let pause = (burst / rate - late).clamp(0.0, LONGEST_PAUSE);
            self.next = Some(now + Duration::from_secs_f64(pause));
        }
        self.left = self.left.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use WindowChange as Change;

    const BASE: Duration = Duration::from_micros(400);
    /// A number that is surely larger than all before.
    const LATER: u64 = 1 << 40;

    struct Bench {
        now: Instant,
        number: u64,
        /// Less than half of the window is in use.
        is_idle: bool,
        congestion: Congestion,
    }

    impl Bench {
        /// Behind the start, with so many packets, on a path of 400 µs: the target is 200 µs, and more with
        /// fewer than 4 packets.
        fn new(window: f64) -> Self {
            let mut bench =
                Self { now: Instant::now(), number: 0, is_idle: false, congestion: Congestion::new() };
            bench.ack(0, Report::default());
            bench.congestion.is_start = false;
            bench.congestion.window = window;
            bench
        }

        /// An acknowledgement of one packet a round trip later, with so much queue in µs.
        fn ack(&mut self, queue: u64, report: Report) {
            let sample = BASE + Duration::from_micros(queue);
            self.now += sample;
            self.number += 100;
            let report = Report {
                sample: Some(sample),
                acknowledged: report.acknowledged.max(1),
                largest: self.number,
                next: self.number + 100,
                is_used: !self.is_idle,
                ..report
            };
            self.congestion.on_report(self.now, &report);
        }

        fn window(&self) -> f64 {
            self.congestion.window
        }
    }

    fn lost(lost: u32) -> Report {
        Report { lost, run: lost, ..Report::default() }
    }

    /// Two ends that send one message at a time on a busy host took a millisecond for each: their window had
    /// shrunk to a fraction of a packet.
    #[test]
    fn delay_says_nothing_to_who_has_hardly_anything_in_flight() {
        let mut bench = Bench::new(10.0);
        bench.is_idle = true;
        for round in 0..100 {
            bench.ack(if round % 3 == 0 { 10 } else { 4000 }, Report::default());
        }
        assert_eq!(bench.window(), 10.0);
        // A loss counts, though.
        bench.ack(4000, lost(20));
        assert!(bench.window() < 10.0);
    }

    /// A sender was stopped for a second, and its receiver is always a little blind: it paced 2 packets in
    /// 100 ms from then on.
    #[test]
    fn one_pause_does_not_set_the_pace_for_good() {
        let mut bench = Bench::new(10.0);
        bench.ack(1_300_000, Report::default());
        let slow = bench.congestion.rate().unwrap();
        let blind = || Report { blind: Duration::from_micros(500), ..Report::default() };
        (0..60).for_each(|_| bench.ack(500, blind()));
        assert!(bench.congestion.rate().unwrap() > 50.0 * slow);
    }

    /// Two programs that are busy with each other never find their sockets empty. Their window stayed as it
    /// was when that began.
    #[test]
    fn a_blind_sample_below_the_target_lets_the_window_grow() {
        let blind = || Report { blind: Duration::from_millis(9), acknowledged: 100, ..Report::default() };
        let mut bench = Bench::new(100.0);
        bench.ack(150, blind());
        assert_eq!((bench.window(), bench.congestion.base()), (101.0, BASE.as_secs_f64()));
        bench.ack(300, blind());
        assert_eq!(bench.window(), 101.0, "there may be a queue of that length");
        // The start ends by samples that are not blind.
        bench.congestion.is_start = true;
        bench.ack(90, blind());
        assert_eq!(bench.window(), 201.0);
        bench.ack(150, blind());
        assert_eq!((bench.window(), bench.congestion.is_start), (201.0, true));
        bench.congestion.is_start = false;
        bench.congestion.is_second = true;
        bench.ack(0, blind());
        assert_eq!(bench.window(), 201.0, "delay says nothing in the second mode");
    }

    /// Each row: queue in the sample before, then a report with this queue, and what comes of 100 packets.
    #[test]
    fn each_rule_alone() {
        let marked = Report { marks: 3, ..Report::default() };
        let blind = |us| Report { blind: Duration::from_micros(us), ..Report::default() };
        let round = Report { acknowledged: 100, ..Report::default() };
        let above = |queue: f64| 1.0 - 0.8 * (queue - 240.0) / (queue + 400.0);
        let rows = [
            ("below the target", 0, 0, round, 101.0, Change::BelowTarget),
            ("just below", 0, 239, round, 101.0, Change::BelowTarget),
            ("a little above", 0, 340, round, 100.0 * above(340.0), Change::AboveTarget),
            ("far above", 0, 9000, round, 50.0, Change::AboveTarget),
            ("a mark", 0, 0, marked, 85.0, Change::Marked),
            ("a loss without a queue", 0, 0, lost(1), 100.0, Change::BelowTarget),
            ("a loss beside noise", 50, 0, lost(1), 100.0, Change::BelowTarget),
            ("a loss beside a queue", 200, 0, lost(1), 100.0 * 450.0 / 600.0, Change::Loss),
            ("6 of 128", 0, 0, lost(6), 85.0, Change::ManyLosses),
            ("20 of 128", 0, 0, lost(20), 50.0, Change::ManyLosses),
            ("a blind sample", 0, 9000, blind(130), 100.0, Change::BelowTarget),
            ("one that is hardly blind", 0, 9000, blind(110), 50.0, Change::AboveTarget),
        ];
        for (name, before, queue, report, window, change) in rows {
            let mut bench = Bench::new(100.0);
            bench.ack(before, Report::default());
            bench.congestion.window = 100.0;
            bench.ack(queue, report);
            // One more packet was acknowledged beside the losses.
            let one = if report.acknowledged == 0 { 0.021 } else { 1e-9 };
            assert!((bench.window() - window).abs() <= one, "{name}: {}", bench.window());
            if window != 100.0 || bench.congestion.change != Change::BelowTarget {
                let cut = bench.congestion.cut_number == bench.number + 100;
                assert_eq!(cut, window < 100.0, "{name}");
            }
            let grew = bench.congestion.change == Change::BelowTarget;
            assert!(bench.congestion.change == change || (grew && window < 100.0), "{name}");
        }
    }

    #[test]
    fn it_shrinks_once_a_round_trip() {
        let mut bench = Bench::new(100.0);
        bench.congestion.cut_number = LATER;
        for report in [lost(20), Report { marks: 1, ..Report::default() }, Report::default()] {
            bench.ack(9000, report);
            bench.congestion.low_at = Some(bench.now);
        }
        assert_eq!(bench.window(), 100.0);
        bench.congestion.cut_number = 0;
        bench.ack(9000, Report::default());
        assert_eq!((bench.window(), bench.congestion.change), (50.0, Change::AboveTarget));
    }

    #[test]
    fn the_start_doubles_until_delay_or_three_losses_in_a_row() {
        let mut bench = Bench::new(0.0);
        bench.congestion = Congestion::new();
        let round = |bench: &Bench| Report { acknowledged: bench.window() as u32, ..Report::default() };
        for window in [20.0, 40.0, 80.0] {
            bench.ack(0, round(&bench));
            assert_eq!((bench.window(), bench.congestion.change), (window, Change::SlowStart));
        }
        bench.ack(0, Report { lost: 2, run: 1, ..round(&bench) });
        assert_eq!(bench.window(), 160.0, "two losses apart");
        let report = round(&bench);
        bench.ack(110, report);
        assert!((bench.window() - 320.0).abs() < 1.0, "half the target is not reached");
        bench.ack(120, round(&bench));
        assert!(!bench.congestion.is_start && bench.window() < 322.0, "delay ends it");

        let mut bench = Bench::new(40.0);
        bench.congestion.is_start = true;
        bench.ack(0, lost(3));
        assert!(!bench.congestion.is_start, "three in a row");
    }

    #[test]
    fn what_is_not_used_does_not_grow() {
        let mut bench = Bench::new(100.0);
        let report = Report { sample: Some(BASE), acknowledged: 100, ..Report::default() };
        bench.congestion.on_report(bench.now, &report);
        assert_eq!(bench.window(), 100.0);
    }

    #[test]
    fn a_blind_receiver_is_no_base_either() {
        let mut bench = Bench::new(100.0);
        bench.congestion = Congestion::new();
        let blind = Duration::from_millis(5);
        bench.ack(5000, Report { blind, ..Report::default() });
        assert_eq!((bench.congestion.base(), bench.window()), (f64::INFINITY, FIRST_WINDOW));
    }

    #[test]
    fn a_queue_that_stands_is_somebody_elses() {
        let mut bench = Bench::new(100.0);
        let mut rounds = 0;
        while !bench.congestion.is_second && rounds < 100 {
            bench.ack(400, Report::default());
            rounds += 1;
        }
        // 8 round trips of 0.8 ms and 2 ms more.
        assert!((10..=14).contains(&rounds), "{rounds}");
        bench.congestion.window = 100.0;
        bench.ack(4000, Report { acknowledged: 100, ..Report::default() });
        assert_eq!((bench.window(), bench.congestion.change), (101.5, Change::Competing), "delay is ignored");
        bench.ack(4000, lost(1));
        assert!((bench.window() - 101.5 * 0.7).abs() < 0.03, "{}", bench.window());
        bench.ack(500, Report::default());
        assert!(bench.congestion.is_second);
        bench.ack(300, Report::default());
        assert!(!bench.congestion.is_second, "a tenth of the largest queue");
        bench.ack(4000, Report::default());
        assert_eq!(bench.congestion.change, Change::AboveTarget);
    }

    #[test]
    fn a_dip_of_the_queue_shows_that_it_is_ours() {
        let mut bench = Bench::new(100.0);
        for round in 0..1000 {
            bench.ack(if round % 8 == 0 { 30 } else { 300 }, Report::default());
            assert!(!bench.congestion.is_second);
        }
    }

    #[test]
    fn the_base_is_forgotten_after_some_seconds() {
        let mut bench = Bench::new(100.0);
        let longer = 600;
        bench.ack(longer, Report::default());
        assert!(bench.congestion.queue > 599e-6);
        bench.now += BASE_PERIOD;
        bench.ack(longer, Report::default());
        assert!(bench.congestion.queue > 599e-6, "that of the period before counts");
        bench.now += BASE_PERIOD;
        bench.ack(longer, Report::default());
        assert!(bench.congestion.queue < 1e-6);
    }

    #[test]
    fn losses_leave_two_packets_and_delay_goes_below_one() {
        let mut bench = Bench::new(3.0);
        (0..10).for_each(|_| bench.ack(0, lost(20)));
        assert!((2.0..3.0).contains(&bench.window()), "{}", bench.window());
        for _ in 0..6 {
            bench.congestion.low_at = Some(bench.now);
            bench.ack(50_000, Report::default());
        }
        assert!(bench.window() < 0.1, "{}", bench.window());
        assert_eq!(bench.congestion.bytes(1000), 1000, "one packet");
        bench.ack(50_000, lost(20));
        assert!(bench.window() < 0.1, "a loss does not enlarge it");
    }

    /// Packets that go at once, and how long after the first of them the next may go, in µs.
    fn burst(window: f64, round_trip_us: u64, length: usize) -> (u32, u64) {
        let mut congestion = Congestion::new();
        let now = Instant::now();
        (congestion.window, congestion.is_start) = (window, false);
        congestion.smoothed = round_trip_us as f64 / 1e6;
        let mut pacer = Pacer::default();
        for count in 1..=100 {
            pacer.on_sent(now, &congestion, length);
            if let Some(next) = pacer.due(now) {
                assert_eq!(pacer.due(next), None);
                return (count, (next - now).as_micros() as u64);
            }
        }
        (100, 0)
    }

    #[test]
    fn packets_that_were_late_cost_nothing_in_the_end() {
        let mut bench = Bench::new(40.0);
        bench.ack(150, Report::default());
        let before = bench.window();
        bench.ack(0, lost(20));
        // Of the same round trip.
        let next = bench.number;
        bench.number -= 100;
        bench.ack(0, Report { largest: next - 50, ..lost(4) });
        assert!(bench.window() < 0.6 * before && bench.congestion.lost == 24, "{}", bench.window());
        bench.ack(0, Report { late: 20, ..Report::default() });
        assert!(bench.window() < 0.7 * before && bench.congestion.lost == 4, "{}", bench.window());
        bench.ack(0, Report { late: 4, ..Report::default() });
        assert!(bench.window() >= before && bench.congestion.lost == 0, "{}", bench.window());
        // Nothing is given back twice, or for what was lost before something else made it smaller.
        bench.ack(0, lost(20));
        bench.ack(0, Report { marks: 1, ..Report::default() });
        let marked = bench.window();
        bench.ack(0, Report { late: 40, ..Report::default() });
        assert!(bench.window() < marked + 0.1 && bench.congestion.lost == 0, "{}", bench.window());
    }

    #[test]
    fn a_burst_that_is_late_makes_up_for_it() {
        let mut congestion = Congestion::new();
        (congestion.window, congestion.is_start, congestion.smoothed) = (40.0, false, 10e-3);
        let (mut now, mut pacer) = (Instant::now(), Pacer::default());
        let end = now + Duration::from_millis(500);
        let mut sent = 0;
        while now < end {
            if !pacer.holds_back(now) {
                pacer.on_sent(now, &congestion, 1472);
                sent += 1;
            } else {
                // The alarm comes half a millisecond late.
                now = pacer.next().expect("a pause") + Duration::from_micros(500);
            }
        }
        // 40 packets in 10 ms, and a quarter more.
        assert!((2300..2600).contains(&sent), "{sent}");
        // Who had nothing to send for a while makes up for nothing, and who waited for long, for little.
        for (is_waited_for, wanted) in [(false, 2..3), (true, 10..15)] {
            pacer.is_waited_for = is_waited_for;
            now += Duration::from_secs(1);
            let mut burst = 0;
            while pacer.due(now).is_none() {
                pacer.on_sent(now, &congestion, 1472);
                burst += 1;
            }
            assert!(wanted.contains(&burst), "{burst}");
        }
    }

    #[test]
    fn bursts_and_pauses() {
        // 100 packets in a millisecond, and a quarter more: 125,000 a second.
        assert_eq!(burst(100.0, 1000, 1472), (31, 248));
        assert_eq!(burst(100.0, 100_000, 1472), (2, 1600));
        assert_eq!(burst(100.0, 600, 1000).0, 44, "as many as one call takes");
        assert_eq!(burst(100.0, 400, 1472), (100, 0), "above 250 MB/s");
        assert_eq!(burst(0.5, 1000, 1472), (1, 2000), "below one packet a round trip");
        assert_eq!(burst(0.02, 100_000, 1472), (1, 500_000));
    }
}
