//! At most one timer for each source, and which expires first.
//!
//! A heap, and a table that says where in it a source's timer is. On a server each message sets a timer of
//! its queue pair, and most of them expire: a message comes to the same queue pair long after. With a sorted
//! tree and a hash table, that was a fifth of what such a message cost.

use crate::progress::{NEVER, Nanos};
use crate::source::Token;

/// Below one timer in the heap. More comparisons when the first one is removed, fewer steps when one is set;
/// one cache line has those of four.
const FAN: usize = 4;
/// In the table: no timer is set.
const NONE: u32 = u32::MAX;

/// The timers that are set.
#[derive(Default)]
pub(crate) struct Timers {
    /// None is later than the [`FAN`] ones below it.
    heap: Vec<Timer>,
    /// The place in the heap, by the index of the token.
    places: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Timer {
    at: Nanos,
    token: Token,
}

impl Timers {
    /// When the first one expires; [`NEVER`] if none is set.
    #[inline]
    pub fn first(&self) -> Nanos {
        self.heap.first().map_or(NEVER, |timer| timer.at)
    }

    /// Sets or moves the timer of a source. Does nothing if another source has its place in the engine by
    /// now: it is not served any more.
    pub fn set(&mut self, token: Token, at: Nanos) {
        let timer = Timer { at, token };
        match self.found(token) {
            Some((_, old)) if old.token.is_newer_than(token) => {}
            Some((place, old)) if at < old.at => self.rise(place, timer),
            Some((place, _)) => self.sink(place, timer),
            None => {
                let (index, place) = (token.index(), self.heap.len());
                if index >= self.places.len() {
                    self.places.resize(index + 1, NONE);
                }
                self.heap.push(timer);
                self.rise(place, timer);
            }
        }
    }

    /// Clears the timer of a source, if it is set.
    pub fn clear(&mut self, token: Token) {
        if let Some((place, _)) = self.found(token).filter(|(_, timer)| timer.token == token) {
            self.remove(place);
        }
    }

    /// Removes the first one that has expired; returns whose it was.
    pub fn take_expired(&mut self, now: Nanos) -> Option<Token> {
        let first = self.heap.first().filter(|timer| timer.at <= now)?.token;
        self.remove(0);
        Some(first)
    }

    /// The timer at the place of this source in the engine: its own, or that of an earlier or later source.
    #[inline]
    fn found(&self, token: Token) -> Option<(usize, Timer)> {
        // (No heap is as long as NONE says.)
        let place = *self.places.get(token.index())? as usize;
        Some((place, *self.heap.get(place)?))
    }

    fn remove(&mut self, place: usize) {
        let Some(last) = self.heap.pop() else { return };
        let removed = self.heap.get(place).copied();
        self.note(removed.unwrap_or(last).token, NONE);
        match removed {
            Some(removed) if last.at < removed.at => self.rise(place, last),
            Some(_) => self.sink(place, last),
            None => {}
        }
    }

    /// Puts a timer at this place, or where one above it is that is later, and moves that down.
    fn rise(&mut self, mut place: usize, timer: Timer) {
        while place > 0 {
            let above = (place - 1) / FAN;
            let Some(other) = self.heap.get(above).copied().filter(|other| other.at > timer.at) else {
                break;
            };
            self.put(place, other);
            place = above;
        }
        self.put(place, timer);
    }

    /// Puts a timer at this place, or where one below it is that is earlier, and moves that up.
    fn sink(&mut self, mut place: usize, timer: Timer) {
        loop {
            let mut from = place * FAN + 1;
            let end = (from + FAN).min(self.heap.len());
            let Some((first, others)) = self.heap.get(from..end).and_then(<[Timer]>::split_first) else {
                break;
            };
            let mut earliest = *first;
            for (other, at) in others.iter().zip(from + 1..) {
                if other.at < earliest.at {
                    (earliest, from) = (*other, at);
                }
            }
            if earliest.at >= timer.at {
                break;
            }
            self.put(place, earliest);
            place = from;
        }
        self.put(place, timer);
    }

    #[inline]
    fn put(&mut self, place: usize, timer: Timer) {
        if let Some(there) = self.heap.get_mut(place) {
            *there = timer;
        }
        self.note(timer.token, place as u32);
    }

    #[inline]
    fn note(&mut self, token: Token, place: u32) {
        if let Some(noted) = self.places.get_mut(token.index()) {
            *noted = place;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::{Arc, OnceLock, Weak};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::engine::Engine;
    use crate::source::{Readiness, Source};
    use crate::sync::{AtomicUsize, Ordering};

    fn token(index: usize, generation: u32) -> Token {
        Token::new(index, generation)
    }

    /// Numbers that look random, the same each time.
    fn numbers(mut state: u64) -> impl FnMut(u64) -> u64 {
        move |below| {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            (state >> 33) % below
        }
    }

    /// Nothing is later than what is below it, and the table has the place of each.
    fn check(timers: &Timers) {
        for (place, timer) in timers.heap.iter().enumerate() {
            assert!(place == 0 || timers.heap[(place - 1) / FAN].at <= timer.at, "{place}");
            assert_eq!(timers.places[timer.token.index()] as usize, place);
        }
        let noted = timers.places.iter().filter(|place| **place != NONE).count();
        assert_eq!(noted, timers.heap.len(), "the table has some that are gone");
    }

    #[test]
    fn timers_expire_in_their_order_however_they_were_set_and_cleared() {
        for seed in 0..200 {
            let mut random = numbers(seed);
            let (mut timers, mut expected) = (Timers::default(), BTreeMap::new());
            for _ in 0..400 {
                let (index, at) = (random(40) as usize, random(1000));
                let of = token(index, 7);
                match random(8) {
                    0 => {
                        timers.clear(of);
                        expected.remove(&index);
                    }
                    1 => {
                        let expired: Vec<_> = std::iter::from_fn(|| timers.take_expired(at)).collect();
                        let times: Vec<u64> = expired.iter().map(|of| expected[&of.index()]).collect();
                        assert!(times.is_sorted() && times.iter().all(|time| *time <= at), "{times:?}");
                        expired.iter().for_each(|of| _ = expected.remove(&of.index()));
                    }
                    _ => {
                        timers.set(of, at);
                        expected.insert(index, at);
                    }
                }
                check(&timers);
                assert_eq!(timers.first(), expected.values().min().copied().unwrap_or(NEVER));
            }
            assert_eq!(timers.heap.len(), expected.len());
        }
    }

    #[test]
    fn a_source_that_is_gone_neither_takes_nor_clears_the_timer_of_the_next_one_in_its_place() {
        for last in [9, 0x7FFF_FFFF] {
            let (gone, next) = (token(3, last), token(3, (last + 1) & 0x7FFF_FFFF));
            assert!(next.is_newer_than(gone) && !gone.is_newer_than(next) && !next.is_newer_than(next));
            let mut timers = Timers::default();
            timers.set(gone, 10);
            timers.set(next, 20);
            timers.clear(gone);
            timers.set(gone, 5);
            timers.set(gone, 50);
            check(&timers);
            assert_eq!((timers.first(), timers.take_expired(10)), (20, None));
            assert_eq!((timers.take_expired(20), timers.first()), (Some(next), NEVER));
        }
    }

    const HOUR: Duration = Duration::from_secs(3600);

    /// Counts its calls, and sets its timer again so often.
    struct Counted {
        engine: Weak<Engine>,
        token: OnceLock<Token>,
        calls: AtomicUsize,
        again: AtomicUsize,
    }

    impl Counted {
        fn new(engine: &Arc<Engine>) -> (Arc<Self>, Token) {
            let counted = Arc::new(Self {
                engine: Arc::downgrade(engine),
                token: OnceLock::new(),
                calls: AtomicUsize::new(0),
                again: AtomicUsize::new(0),
            });
            let token = engine.new_token(counted.clone());
            (counted.clone(), *counted.token.get_or_init(|| token))
        }

        fn calls(&self) -> usize {
            self.calls.load(Ordering::SeqCst)
        }
    }

    impl Source for Counted {
        fn ready(&self, _: Readiness) {}

        fn timeout(&self) {
            self.calls.fetch_add(1, Ordering::SeqCst);
            let left = self.again.load(Ordering::SeqCst);
            if left > 0 {
                self.again.store(left - 1, Ordering::SeqCst);
                let engine = self.engine.upgrade().unwrap();
                engine.set_timer(*self.token.get().unwrap(), Some(Instant::now()));
            }
        }
    }

    #[test]
    fn a_timer_that_is_moved_or_cleared_calls_at_its_last_time_only() {
        let engine = Arc::new(Engine::new().unwrap());
        let (counted, token) = Counted::new(&engine);
        let look = |at: Option<Instant>| {
            engine.set_timer(token, at);
            engine.poll_once();
            engine.poll_once();
            counted.calls()
        };
        let now = Instant::now();
        assert_eq!([Some(now + HOUR), None].map(look), [0, 0]);
        assert_eq!(look(Some(now)), 1, "it has expired, once");
        engine.set_timer(token, Some(now));
        assert_eq!(look(Some(now + HOUR)), 1, "it was moved to a later time");
        assert_eq!(look(Some(now)), 2, "and to an earlier one");
        engine.set_timer(token, Some(now));
        assert_eq!(look(None), 2, "it was cleared");
        counted.again.store(3, Ordering::SeqCst);
        engine.set_timer(token, Some(now));
        (0..8).for_each(|_| _ = engine.poll_once());
        assert_eq!((counted.calls(), engine.first_timer()), (6, NEVER), "set again while it was called");
    }

    #[test]
    fn a_source_that_is_deregistered_leaves_no_timer() {
        let engine = Arc::new(Engine::new().unwrap());
        let (gone, old) = Counted::new(&engine);
        engine.set_timer(old, Some(Instant::now()));
        engine.deregister(old);
        assert_eq!(engine.first_timer(), NEVER);
        let (next, new) = Counted::new(&engine);
        assert_eq!(new.index(), old.index());
        engine.set_timer(new, Some(Instant::now()));
        // Of those who are late.
        engine.set_timer(old, Some(Instant::now() + HOUR));
        engine.deregister(old);
        engine.poll_once();
        assert_eq!((gone.calls(), next.calls(), engine.first_timer()), (0, 1, NEVER));
    }
}
