//! How the engine sleeps, and serves what no descriptor reports (`raised`).
//!
//! Every sleep is between [`Engine::begin_sleep`] and [`Engine::end_sleep`], and nothing else may wait for
//! the sockets: one thread in `wait_until`, the thread of an event loop in a call of its own.

use std::sync::Arc;

use crate::engine::Engine;
use crate::fork::Uncancelled;
use crate::raised::{Look, Reports};
use crate::source::{Found, Readiness, Token};

/// A sleep, until it is dropped.
pub(crate) struct Sleeper<'a>(&'a Engine);

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        self.0.end_sleep();
    }
}

impl Engine {
    /// A source that was registered with [`Watch::Itself`](uwarp_llp::carrier::Watch::Itself) is ready. The
    /// next thread that looks serves it; this one does not, because it may hold locks.
    pub fn raise(&self, token: Token, readiness: Readiness) {
        self.raised.add(token, readiness);
        if self.asleep.any() {
            self.wake();
        }
    }

    /// From now on, every look at the sockets asks `look`, too. Called once, before any of its sources can be
    /// ready.
    pub fn add_look(&self, look: Arc<dyn Look>) {
        if self.raised.set_look(look.clone()).is_err() {
            return debug_assert!(false, "there is a look already");
        }
        // Those that sleep already call its other half when they wake.
        (0..self.asleep.tell()).for_each(|_| look.sleep_begins());
    }

    /// Announces that the calling thread is about to sleep; returns whether it may: nothing that no
    /// descriptor reports is ready.
    pub(crate) fn begin_sleep(&self) -> bool {
        self.announce_sleep() && !self.left.any()
    }

    /// The same for a thread that what is left is not for.
    pub(crate) fn announce_sleep(&self) -> bool {
        if self.asleep.enter()
            && let Some(look) = self.raised.look()
        {
            look.sleep_begins();
            self.raised.harvest();
        }
        !self.raised.any()
    }

    /// The thread looks again by itself.
    pub(crate) fn end_sleep(&self) {
        if self.asleep.leave()
            && let Some(look) = self.raised.look()
        {
            look.sleep_ends();
        }
    }

    /// As [`Self::begin_sleep`], until the value is dropped.
    pub(crate) fn while_asleep(&self) -> (Sleeper<'_>, bool) {
        let may = self.begin_sleep();
        (Sleeper(self), may)
    }

    /// Serves what no descriptor reports and is ready now; returns how many sources had something to do that
    /// no thread polls, and whether one had input. Makes no system call.
    #[cold]
    pub(crate) fn serve_raised(&self) -> (usize, bool) {
        let (mut served, mut input) = (0, false);
        let reports = self.raised.take();
        if reports.is_empty() {
            return (served, input);
        }
        // What is served closes descriptors, reads and logs through the C library. A thread that polls must
        // not be cancelled there (pthreads(7)).
        let _uncancelled = Uncancelled::begin();
        // What is raised meanwhile is served by the next look: it may be the same source.
        self.serve_all(reports, &mut served, &mut input);
        (served, input)
    }

    /// Serves what threads of the program's loops have left; returns as [`Self::serve_raised`] does.
    #[cold]
    pub(crate) fn serve_left(&self) -> (usize, bool) {
        let (mut served, mut input) = (0, false);
        let _uncancelled = Uncancelled::begin();
        self.own.have_come();
        self.serve_all(self.left.take(), &mut served, &mut input);
        (served, input)
    }

    fn serve_all(&self, ready: Reports, served: &mut usize, input: &mut bool) {
        for (token, readiness) in ready {
            if let Some(source) = self.find(token) {
                source.ready(readiness);
                let found = source.found();
                *served += usize::from(found == Found::News);
                *input |= readiness.readable && found != Found::Nothing;
            }
        }
    }

    /// As [`Self::poll_once`], for a caller that need not ask the system: only what no descriptor reports.
    #[inline]
    pub(crate) fn look_once(&self) -> usize {
        if self.raised.maybe() { self.serve_raised().0 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use uwarp_llp::carrier::Watch;

    use super::*;
    use crate::background;
    use crate::source::Source;

    /// Counts its calls.
    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Source for Counted {
        fn ready(&self, _: Readiness) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }

        fn timeout(&self) {}
    }

    const INPUT: Readiness = Readiness { readable: true, writable: false, hangup: false };

    #[test]
    fn the_next_look_serves_what_was_raised() {
        let engine = Engine::new().unwrap();
        let source = Arc::new(Counted::default());
        let token = engine.register_watch(Watch::Itself, source.clone()).unwrap();
        let calls = || source.0.load(Ordering::SeqCst);
        engine.raise(token, INPUT);
        engine.raise(token, INPUT);
        assert_eq!(calls(), 0, "the raising thread may hold locks");
        assert_eq!((engine.poll_once(), calls()), (1, 1));
        assert_eq!((engine.poll_once(), calls()), (0, 1));
        // It left work undone.
        engine.rearm(token);
        assert_eq!((engine.poll_once(), calls()), (1, 2));
        engine.rearm_all();
        assert_eq!((engine.poll_once(), calls()), (1, 3));
        // There is no watch to take away.
        assert!(engine.park(token).is_none());
        engine.raise(token, INPUT);
        engine.deregister(token);
        assert_eq!((engine.poll_once(), calls()), (0, 3));
        assert!(!engine.raised.any());
        // A source that has only a timer is not ready.
        let timer = engine.new_token(source.clone());
        engine.rearm(timer);
        assert_eq!((engine.poll_once(), calls()), (0, 3));
    }

    #[test]
    fn a_thread_that_sleeps_is_woken_for_what_is_raised() {
        let engine = background::start().unwrap();
        let source = Arc::new(Counted::default());
        let token = engine.register_watch(Watch::Itself, source.clone()).unwrap();
        for calls in 1..=20 {
            let end = Instant::now() + Duration::from_secs(20);
            // Sometimes it sleeps by then, sometimes it is about to.
            std::thread::sleep(Duration::from_micros(calls as u64 % 4 * 300));
            engine.raise(token, INPUT);
            while source.0.load(Ordering::SeqCst) < calls {
                assert!(Instant::now() < end, "nobody serves it");
                std::thread::yield_now();
            }
        }
    }

    /// An event loop sleeps by a call of its own.
    #[test]
    fn an_event_loop_does_not_sleep_over_what_was_raised() {
        let engine = Engine::new().unwrap();
        let source = Arc::new(Counted::default());
        let token = engine.register_watch(Watch::Itself, source.clone()).unwrap();
        let lead = engine.begin_loop().unwrap();
        assert_eq!(engine.may_sleep(lead), crate::event_loop::Sleep::For(None));
        assert!(engine.asleep.any());
        engine.raise(token, INPUT);
        assert!(crate::sys::Bell::wait(engine.fd(), Some(Duration::ZERO)).is_ok());
        assert_eq!(engine.may_sleep(lead), crate::event_loop::Sleep::For(Some(Duration::ZERO)));
        engine.serve_loop(lead);
        assert_eq!(source.0.load(Ordering::SeqCst), 1);
        assert!(!engine.asleep.any());
        assert!(matches!(engine.may_sleep(lead), crate::event_loop::Sleep::For(_)));
        engine.end_loop(lead, false);
        assert!(!engine.asleep.any());
    }

    /// A lower layer in memory with one source. What makes it ready wakes no thread itself.
    #[derive(Default)]
    struct Lanes {
        token: OnceLock<Token>,
        ready: AtomicBool,
        asleep: AtomicUsize,
    }

    impl Look for Lanes {
        fn sleep_begins(&self) {
            self.asleep.fetch_add(1, Ordering::SeqCst);
        }

        fn sleep_ends(&self) {
            self.asleep.fetch_sub(1, Ordering::SeqCst);
        }

        fn harvest(&self, raise: &mut dyn FnMut(Token, Readiness)) {
            if self.ready.swap(false, Ordering::SeqCst) {
                raise(*self.token.get().unwrap(), INPUT);
            }
        }
    }

    impl Lanes {
        fn new(engine: &Engine) -> (Arc<Self>, Arc<Counted>) {
            let (lanes, source) = (Arc::new(Self::default()), Arc::new(Counted::default()));
            lanes.token.set(engine.register_watch(Watch::Itself, source.clone()).unwrap()).unwrap();
            (lanes, source)
        }

        fn arrive(&self, engine: &Engine) {
            self.ready.store(true, Ordering::SeqCst);
            if self.asleep.load(Ordering::SeqCst) > 0 {
                engine.wake();
            }
        }
    }

    #[test]
    fn a_look_is_asked_at_every_look_and_before_every_sleep() {
        let engine = Engine::new().unwrap();
        let (lanes, source) = Lanes::new(&engine);
        let calls = || source.0.load(Ordering::SeqCst);
        let asleep = || lanes.asleep.load(Ordering::SeqCst);
        lanes.arrive(&engine);
        assert_eq!((engine.poll_once(), engine.look_once(), calls()), (0, 0, 0), "it is not known yet");
        // A thread that sleeps meanwhile counts.
        let before = engine.while_asleep();
        assert!(before.1);
        engine.add_look(lanes.clone());
        assert_eq!(asleep(), 1);
        drop(before);
        assert_eq!(asleep(), 0);
        assert_eq!((engine.poll_once(), calls()), (1, 1));
        lanes.arrive(&engine);
        assert_eq!((engine.look_once(), calls()), (1, 2), "without the system");
        lanes.arrive(&engine);
        let (sleeper, may) = engine.while_asleep();
        assert!(!may && asleep() == 1);
        drop(sleeper);
        assert_eq!((engine.look_once(), calls(), asleep()), (1, 3, 0));
        lanes.arrive(&engine);
        let lead = engine.begin_loop().unwrap();
        assert_eq!(engine.may_sleep(lead), crate::event_loop::Sleep::For(Some(Duration::ZERO)));
        engine.serve_loop(lead);
        engine.end_loop(lead, false);
        assert_eq!((calls(), asleep()), (4, 0));
    }

    #[test]
    fn a_thread_that_sleeps_is_woken_for_what_a_look_finds() {
        let engine = background::start().unwrap();
        let (lanes, source) = Lanes::new(&engine);
        engine.add_look(lanes.clone());
        for calls in 1..=20 {
            let end = Instant::now() + Duration::from_secs(20);
            std::thread::sleep(Duration::from_micros(calls as u64 % 4 * 300));
            lanes.arrive(&engine);
            while source.0.load(Ordering::SeqCst) < calls {
                assert!(Instant::now() < end, "nobody serves it");
                std::thread::yield_now();
            }
        }
    }
}
