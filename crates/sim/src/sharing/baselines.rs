//! CUBIC and BBR as models, to compare with: packets with numbers, an acknowledgement of each, and the
//! window. They repair nothing: a stream without an end does not show it.

use std::collections::VecDeque;
use std::fmt::Debug;

use crate::Time;

/// What a model answers with a window.
pub(super) trait Response: Debug {
    fn on_ack(&mut self, now: f64, rtt: f64, path: &Path);
    /// So many packets in a row are lost.
    fn on_loss(&mut self, now: f64, path: &Path);
    /// Packets in flight at most.
    fn window(&self) -> f64;
    /// Packets in a second at most.
    fn rate(&self) -> f64 {
        f64::INFINITY
    }
}

/// What a sender knows.
#[derive(Debug, Default)]
pub(super) struct Path {
    smoothed: f64,
    /// The number of the next packet, and the largest acknowledged.
    next: u64,
    seen: u64,
    /// Packets acknowledged so far.
    delivered: u64,
    /// Of the packet that was acknowledged last: how many had been delivered when it was sent, and when.
    sample: (u64, f64),
}

#[derive(Debug)]
struct Sent {
    number: u64,
    at: f64,
    has_arrived: bool,
    delivered: u64,
}

/// A sender without an end.
#[derive(Debug)]
pub(super) struct Baseline {
    response: Box<dyn Response>,
    most: f64,
    path: Path,
    out: VecDeque<Sent>,
    probe_at: f64,
    /// The next packet may go.
    free_at: f64,
}

fn seconds(now: Time) -> f64 {
    now as f64 / 1e9
}

impl Baseline {
    pub(super) fn new(response: Box<dyn Response>, most: f64) -> Self {
        Self { response, most, path: Path::default(), out: VecDeque::new(), probe_at: 0.0, free_at: 0.0 }
    }

    fn is_open(&self) -> bool {
        (self.out.len() as f64) < self.response.window().min(self.most)
    }

    pub(super) fn timeout(&self) -> Option<Time> {
        let at = if self.is_open() { self.free_at.min(self.probe_at) } else { self.probe_at };
        Some((at * 1e9).ceil() as Time)
    }

    /// The next packet, if one may go now.
    pub(super) fn transmit(&mut self, now: Time) -> Option<u64> {
        let at = seconds(now);
        if !self.is_open() || self.free_at > at + 1e-9 {
            return None;
        }
        let rate = self.response.rate();
        self.free_at = self.free_at.max(at) + 1.0 / rate;
        let number = self.path.next;
        self.path.next += 1;
        self.out.push_back(Sent { number, at, has_arrived: false, delivered: self.path.delivered });
        let rtt = if self.path.smoothed > 0.0 { self.path.smoothed } else { 0.1 };
        self.probe_at = at + (3.0 * rtt).max(1e-3);
        Some(number)
    }

    /// At the receiver. What an acknowledgement says of earlier packets is looked up here.
    pub(super) fn arrived(&mut self, number: u64) {
        let at = self.out.binary_search_by_key(&number, |sent| sent.number);
        if let Some(sent) = at.ok().and_then(|at| self.out.get_mut(at)) {
            sent.has_arrived = true;
        }
    }

    pub(super) fn acknowledged(&mut self, now: Time, number: u64) {
        let now = seconds(now);
        let at = self.out.binary_search_by_key(&number, |sent| sent.number);
        let sample = at.ok().and_then(|at| self.out.get(at)).map(|sent| (sent.at, sent.delivered));
        self.settle(now, number);
        let Some((at, delivered)) = sample else { return };
        let rtt = now - at;
        let smoothed = &mut self.path.smoothed;
        *smoothed = if *smoothed > 0.0 { 0.875 * *smoothed + 0.125 * rtt } else { rtt };
        self.path.sample = (delivered, at);
        self.response.on_ack(now, rtt, &self.path);
    }

    /// A timeout: everything that has not arrived is lost.
    pub(super) fn on_time(&mut self, now: Time) {
        let at = seconds(now);
        if at + 1e-9 >= self.probe_at && !self.out.is_empty() {
            self.settle(at, self.path.next + 2);
            self.probe_at = at + (3.0 * self.path.smoothed).max(1e-3);
        }
    }

    fn settle(&mut self, now: f64, number: u64) {
        let (mut keep, mut is_loss) = (Vec::new(), false);
        while let Some(sent) = self.out.front().filter(|sent| sent.number <= number) {
            if sent.has_arrived {
                self.path.delivered += 1;
                self.path.seen = self.path.seen.max(sent.number);
            } else if sent.number + 3 <= number {
                is_loss = true;
            } else {
                keep.extend(self.out.pop_front());
                continue;
            }
            self.out.pop_front();
        }
        keep.into_iter().rev().for_each(|sent| self.out.push_front(sent));
        if is_loss {
            self.response.on_loss(now, &self.path);
        }
    }
}

/// CUBIC (RFC 9438) with a window of at least two packets, and a start that ends with the first loss.
#[derive(Debug)]
pub(super) struct Cubic {
    window: f64,
    is_start: bool,
    most: f64,
    epoch: f64,
    cut_number: u64,
}

impl Cubic {
    pub(super) fn new() -> Self {
        Self { window: 10.0, is_start: true, most: 0.0, epoch: 0.0, cut_number: 0 }
    }
}

impl Response for Cubic {
    fn on_ack(&mut self, now: f64, _: f64, path: &Path) {
        if self.is_start {
            self.window += 1.0;
            return;
        }
        let since = now - self.epoch;
        let inflection = (self.most * 0.3 / 0.4).cbrt();
        let cubic = 0.4 * (since - inflection).powi(3) + self.most;
        let reno = self.most * 0.7 + 0.53 * since / path.smoothed.max(1e-6);
        self.window += ((cubic.max(reno) - self.window) / self.window).clamp(0.01, 0.5);
    }

    fn on_loss(&mut self, now: f64, path: &Path) {
        if path.seen >= self.cut_number {
            (self.most, self.epoch, self.is_start) = (self.window, now, false);
            self.cut_number = path.next;
            self.window = (self.window * 0.7).max(2.0);
        }
    }

    fn window(&self) -> f64 {
        self.window
    }
}

/// BBR, first version (ACM Queue 2016), without its minute details: it does not answer a loss.
#[derive(Debug)]
pub(super) struct Bbr {
    /// The largest delivery rate of each of the last ten round trips, and when this one began.
    rates: VecDeque<f64>,
    round: u64,
    least: f64,
    least_at: f64,
    gain: f64,
    /// Round trips without a quarter more rate; `None`: the start is over.
    flat: Option<(u32, f64)>,
    phase: usize,
    phase_at: f64,
    /// Until when the path is drained to see its round trip.
    drain_until: f64,
}

/// 2 / ln 2.
const START_GAIN: f64 = 2.885;
const CYCLE: [f64; 8] = [1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];

impl Bbr {
    pub(super) fn new() -> Self {
        Self {
            rates: VecDeque::from([0.0]),
            round: 0,
            least: f64::INFINITY,
            least_at: 0.0,
            gain: START_GAIN,
            flat: Some((0, 0.0)),
            phase: 0,
            phase_at: 0.0,
            drain_until: 0.0,
        }
    }

    fn bottleneck(&self) -> f64 {
        self.rates.iter().copied().fold(0.0, f64::max)
    }
}

impl Response for Bbr {
    fn on_ack(&mut self, now: f64, rtt: f64, path: &Path) {
        if rtt <= self.least {
            (self.least, self.least_at) = (rtt, now);
        } else if now > self.least_at + 10.0 {
            (self.least, self.least_at, self.drain_until) = (rtt, now, now + 0.2);
        }
        let rate = (path.delivered - path.sample.0) as f64 / (now - path.sample.1).max(1e-9);
        if let Some(last) = self.rates.back_mut() {
            *last = last.max(rate);
        }
        if path.seen >= self.round {
            self.round = path.next;
            if let Some((rounds, best)) = self.flat {
                let now_best = self.bottleneck();
                self.flat = Some(if now_best > 1.25 * best { (0, now_best) } else { (rounds + 1, best) });
                if rounds >= 2 {
                    (self.flat, self.gain, self.phase, self.phase_at) = (None, 1.0 / START_GAIN, 1, now);
                }
            }
            self.rates.push_back(0.0);
            if self.rates.len() > 10 {
                self.rates.pop_front();
            }
        }
        if self.flat.is_none() && now > self.phase_at + self.least {
            self.phase = (self.phase + 1) % CYCLE.len();
            (self.gain, self.phase_at) = (CYCLE[self.phase], now);
        }
        if now < self.drain_until {
            self.phase_at = now;
        }
    }

    fn on_loss(&mut self, _: f64, _: &Path) {}

    fn window(&self) -> f64 {
        // The phase stands still while the path is drained.
        if self.drain_until > self.phase_at {
            return 4.0;
        }
        let gain = if self.flat.is_some() { START_GAIN } else { 2.0 };
        let path = self.bottleneck() * self.least;
        if path.is_finite() { (gain * path).max(10.0) } else { 10.0 }
    }

    fn rate(&self) -> f64 {
        let bottleneck = self.bottleneck();
        if bottleneck > 0.0 { self.gain * bottleneck } else { f64::INFINITY }
    }
}
