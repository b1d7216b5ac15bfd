//! How long the packets of an exchange may be (RFC 8899, docs/rd.md section 7.3).
//!
//! | state | event | next |
//! |---|---|---|
//! | unasked | a packet was full | the owner is asked what its interface takes |
//! | searching | a probe of some length has arrived | that is the length; searching above it |
//! | searching | two probes of a length are lost | searching below it |
//! | searching | nothing is left to try | found, for ten minutes |
//! | found, searching | three probe timeouts in a row | the first length again, for ten minutes |
//! | found, searching | longer packets than at first were lost in three turns, and none arrived | likewise |
//! | the first length again | a longer packet of before is acknowledged late | searching that length |
//!
//! A packet that is too long for its path is lost without a word wherever a router does not answer, or its
//! answer is filtered. So nothing but a probe is sent with a new length, and a lost probe is no congestion.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

/// What is tried below the length of the interface: jumbo frames of 9,000 less what tunnels add, and half a
/// KiB less than 4, for which the system needs no more than a page.
const LENGTHS: [usize; 2] = [8800, 3600];
/// A length is worth a probe if it is so much longer.
const LEAST_STEP: usize = 256;
/// Probes of one length. One may be lost by chance.
const TRIES: u32 = 2;
/// After this time the search begins anew: the path may be another one.
const SEARCH_EVERY: Duration = Duration::from_secs(600);
/// Probe timeouts in a row after which the path is taken for a shorter one.
pub(super) const TIMEOUTS: u32 = 3;

/// Turns in which long packets were lost and none arrived, each sent when the loss of the one before was
/// known, after which the path is taken for a shorter one: short packets may well arrive then, so there is no
/// silence (RFC 8899 section 4.3, the loss of a black hole).
const HOLES: u32 = 3;

/// The length of packets on a path.
#[derive(Debug)]
pub(super) struct Path {
    /// Bytes of a full packet, and of one at first, which passes nearly everywhere.
    len: usize,
    first: usize,
    /// What the peer takes.
    peer: usize,
    /// Lengths to try, the next one last.
    tries: SmallVec<[usize; 4]>,
    /// Probes of the next one that are lost.
    lost: u32,
    is_probing: bool,
    /// The owner is to be asked, or was.
    asks: bool,
    /// When to ask again.
    again_at: Option<Instant>,
    /// Turns in which long packets were lost, and when the last of them was found to be.
    holes: u32,
    hole_at: Option<Instant>,
    /// Bytes of the shortest of them.
    hole_len: usize,
}

impl Path {
    /// With packets of `first` bytes; the peer takes `peer`.
    pub(super) fn new(first: usize, peer: usize) -> Self {
        let tries = SmallVec::new();
        Self {
            len: first,
            first,
            peer,
            tries,
            lost: 0,
            is_probing: false,
            asks: false,
            again_at: None,
            holes: 0,
            hole_at: None,
            hole_len: usize::MAX,
        }
    }

    /// Bytes of a full packet.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// A full packet was sent: longer ones would be of use.
    #[inline]
    pub(super) fn on_full(&mut self, now: Instant) {
        if self.peer > self.len && self.again_at.is_none_or(|at| at <= now) {
            self.asks = true;
            self.again_at = Some(now + SEARCH_EVERY);
        }
    }

    /// Whether the owner is to be asked what the interface takes.
    #[inline]
    pub(super) fn take_question(&mut self) -> bool {
        std::mem::take(&mut self.asks)
    }

    /// The interface takes packets of `limit` bytes. Returns whether there is something to probe.
    pub(super) fn search(&mut self, limit: usize) -> bool {
        let limit = limit.min(self.peer);
        let lower = LENGTHS.into_iter().rev().filter(|len| len + LEAST_STEP / 2 <= limit);
        self.tries = lower.chain([limit]).collect();
        self.is_probing = false;
        self.settle();
        !self.tries.is_empty()
    }

    /// Forgets what is not worth a try.
    fn settle(&mut self) {
        let least = self.len + LEAST_STEP;
        self.tries.retain(|len| *len >= least);
        self.lost = 0;
    }

    /// The length of a probe that is to be sent now.
    #[inline]
    pub(super) fn probe(&self) -> Option<usize> {
        self.tries.last().copied().filter(|_| !self.is_probing)
    }

    /// It was sent.
    pub(super) fn on_probe_sent(&mut self) {
        self.is_probing = true;
    }

    /// A probe of this length has arrived. Returns by how much packets are longer now.
    pub(super) fn on_arrived(&mut self, len: usize) -> Option<f64> {
        self.is_probing = false;
        let before = self.len;
        self.len = before.max(len);
        self.settle();
        (self.len > before).then(|| self.len as f64 / before as f64)
    }

    /// A probe of this length is lost.
    pub(super) fn on_lost(&mut self, len: usize) {
        self.is_probing = false;
        if self.tries.last() == Some(&len) {
            self.lost += 1;
            if self.lost >= TRIES {
                self.tries.pop();
                self.lost = 0;
            }
        }
    }

    /// A packet of `arrived` bytes has arrived, the longest of some, or none (0). Of packets that are longer
    /// than the first length, some are lost: when the last of them was sent, and bytes of the shortest.
    /// Returns as [`Self::on_silence`].
    ///
    /// A path may have become too short for the longest packets and not for others, which then still arrive.
    #[inline]
    pub(super) fn on_fates(
        &mut self,
        now: Instant,
        arrived: usize,
        lost: Option<(Instant, usize)>,
    ) -> Option<f64> {
        if arrived > self.len {
            self.doubt(arrived);
        }
        let shortest = lost.map_or(self.hole_len, |(_, len)| len.min(self.hole_len));
        if arrived >= shortest {
            self.forget_holes();
            return None;
        }
        let (sent, _) = lost?;
        self.hole_len = shortest;
        if self.hole_at.is_some_and(|before| sent <= before) {
            return None;
        }
        (self.holes, self.hole_at) = (self.holes + 1, Some(now));
        if self.holes < HOLES { None } else { self.on_silence(now) }
    }

    /// Packets of this length have arrived after all: it may have been an end that stood still, and not the
    /// path that became shorter. (Or it became shorter behind them, so this length is tried, and not taken.)
    fn doubt(&mut self, len: usize) {
        if self.tries.is_empty() && len >= self.len + LEAST_STEP {
            self.tries.push(len);
            (self.lost, self.is_probing) = (0, false);
        }
    }

    fn forget_holes(&mut self) {
        (self.holes, self.hole_at, self.hole_len) = (0, None, usize::MAX);
    }

    /// Nothing has arrived for [`TIMEOUTS`] probe timeouts. Returns by how much packets are longer now, which
    /// is less than 1.
    pub(super) fn on_silence(&mut self, now: Instant) -> Option<f64> {
        self.tries.clear();
        self.forget_holes();
        self.again_at = Some(now + SEARCH_EVERY);
        let before = std::mem::replace(&mut self.len, self.first);
        (before > self.first).then(|| self.first as f64 / before as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_that_arrives_is_taken() {
        let now = Instant::now();
        let mut path = Path::new(1452, 65_000);
        assert!(!path.take_question() && path.probe().is_none());
        path.on_full(now);
        assert!(path.take_question() && !path.take_question());
        assert!(path.search(9000 - 28));
        for len in [8972, 8972, 8800, 8800] {
            assert_eq!(path.probe(), Some(len));
            path.on_probe_sent();
            assert_eq!(path.probe(), None);
            path.on_lost(len);
        }
        assert_eq!(path.probe(), Some(3600));
        assert_eq!(path.on_arrived(3600), Some(3600.0 / 1452.0));
        assert_eq!((path.len(), path.probe()), (3600, None));
        // A late one of before.
        assert!(path.on_arrived(8800).is_some_and(|more| more > 2.0));
        assert_eq!(path.len(), 8800);
        path.on_full(now + SEARCH_EVERY / 2);
        assert!(!path.take_question());
        path.on_full(now + SEARCH_EVERY);
        assert!(path.take_question());
    }

    #[test]
    fn silence_means_a_shorter_path() {
        let now = Instant::now();
        let mut path = Path::new(1452, 8972);
        path.search(60_000);
        assert_eq!(path.probe(), Some(8972), "what the peer takes");
        path.on_arrived(8972);
        assert_eq!(path.on_silence(now), Some(1452.0 / 8972.0));
        assert_eq!((path.len(), path.on_silence(now)), (1452, None));
        path.on_full(now + SEARCH_EVERY / 2);
        assert!(!path.take_question());
    }

    #[test]
    fn long_packets_that_vanish_mean_a_shorter_path() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut path = Path::new(1452, 8972);
        path.search(60_000);
        path.on_arrived(8972);
        let mut lost = |now, sent, arrived| path.on_fates(at(now), arrived, Some((at(sent), 8000)));
        // Those of one turn are lost together, or one after the other.
        for (sent, now) in [(0, 10), (1, 11), (9, 12), (13, 20), (14, 21)] {
            assert_eq!(lost(now, sent, 0), None);
        }
        assert_eq!(lost(21, 20, 8972), None, "one as long has arrived");
        // Shorter ones do.
        for (sent, now) in [(22, 30), (31, 40)] {
            assert_eq!(lost(now, sent, 4000), None);
        }
        assert_eq!(lost(50, 41, 7999), Some(1452.0 / 8972.0));
        assert_eq!(path.len(), 1452);
    }

    /// Its machine was busy for longer than three probe timeouts.
    #[test]
    fn a_peer_that_stood_still_has_no_shorter_path() {
        let now = Instant::now();
        let mut path = Path::new(1452, 8972);
        path.search(60_000);
        path.on_arrived(8972);
        assert!(path.on_silence(now).is_some());
        path.on_fates(now, 1452, None);
        assert_eq!(path.probe(), None);
        path.on_fates(now, 8972, None);
        assert_eq!((path.probe(), path.len()), (Some(8972), 1452));
        path.on_probe_sent();
        path.on_fates(now, 8972, None);
        assert_eq!(path.probe(), None, "one at a time");
        assert!(path.on_arrived(8972).is_some());
        assert_eq!((path.probe(), path.len()), (None, 8972));
        // Where it did become shorter, that costs two probes.
        assert!(path.on_silence(now).is_some());
        path.on_fates(now, 8972, None);
        for _ in 0..TRIES {
            path.on_probe_sent();
            path.on_lost(8972);
        }
        assert_eq!((path.probe(), path.len()), (None, 1452));
    }

    #[test]
    fn an_interface_with_little_more_is_not_probed() {
        let mut path = Path::new(1452, 65_000);
        assert!(!path.search(1472));
        assert!(!path.search(0));
        assert_eq!(path.probe(), None);
    }
}
