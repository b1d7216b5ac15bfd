//! Sources that raise their readiness themselves, because no descriptor of theirs says it: lower layers in
//! memory. Whoever learns that one is ready calls [`Engine::raise`](crate::Engine::raise); the next thread
//! that looks serves it.
//!
//! No thread sleeps over such a report. A thread that is about to sleep announces that first ([`Asleep`])
//! and then looks at the list once more; whoever raises adds to the list first and then looks whether a
//! thread has announced its sleep. All of that is sequentially consistent, so one of the two sees the other.

use std::collections::BTreeMap;

use crate::source::{Readiness, Token};
use crate::sync::{AtomicBool, AtomicUsize, Mutex, Ordering};

/// How many threads sleep, or are about to.
#[derive(Default)]
pub(crate) struct Asleep(AtomicUsize);

impl Asleep {
    /// The calling thread is about to sleep, and looks once more after this.
    pub fn enter(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    /// It looks again by itself. (A thread that leaves its sleep by a jump does not come here. Then there are
    /// wake-ups that nobody needs, and none is missing.)
    pub fn leave(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// The same until the value is dropped.
    pub fn while_asleep(&self) -> Sleeper<'_> {
        self.enter();
        Sleeper(self)
    }

    pub fn any(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

pub(crate) struct Sleeper<'a>(&'a Asleep);

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// Reports that no thread has served yet.
#[derive(Default)]
pub(crate) struct Raised {
    /// Whether there are any. Written under the lock, read without it.
    any: AtomicBool,
    raised: Mutex<BTreeMap<Token, Readiness>, 29>,
}

impl Raised {
    pub fn any(&self) -> bool {
        self.any.load(Ordering::SeqCst)
    }

    pub fn add(&self, token: Token, readiness: Readiness) {
        let mut raised = self.raised.lock();
        let all = raised.entry(token).or_default();
        all.readable |= readiness.readable;
        all.writable |= readiness.writable;
        all.hangup |= readiness.hangup;
        self.any.store(true, Ordering::SeqCst);
    }

    pub fn take(&self) -> BTreeMap<Token, Readiness> {
        let mut raised = self.raised.lock();
        self.any.store(false, Ordering::SeqCst);
        std::mem::take(&mut *raised)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use uwarp_llp::carrier::Watch;

    use super::*;
    use crate::background;
    use crate::engine::Engine;
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
}
