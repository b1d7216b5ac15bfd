//! A timer that deregisters itself.

use std::sync::{Arc, Weak};
use std::time::Instant;

use crate::engine::Engine;
use crate::source::{Readiness, Source, Token};

/// A timer of a source. The engine keeps nothing of the source alive for it. When it is dropped, no call
/// begins any more; a call that another thread has begun may still run.
///
/// Its token is made when it is set first, so an alarm that is never set costs nothing. It may be set and
/// dropped under any lock of a lower rank than the engine's (docs/locks.md).
pub struct Alarm {
    engine: Arc<Engine>,
    source: Weak<dyn Source>,
    token: Option<Token>,
}

impl Alarm {
    /// One that is not set. It calls the source's [`Source::timeout`].
    pub fn new(engine: &Arc<Engine>, source: Weak<dyn Source>) -> Self {
        Self { engine: Arc::clone(engine), source, token: None }
    }

    /// As [`Self::new`], and sets it.
    pub fn at(engine: &Arc<Engine>, source: Weak<dyn Source>, at: Instant) -> Self {
        let mut alarm = Self::new(engine, source);
        alarm.set(at);
        alarm
    }

    /// Sets or moves it.
    pub fn set(&mut self, at: Instant) {
        let (engine, source) = (&self.engine, &self.source);
        let token = *self.token.get_or_insert_with(|| engine.new_token(Arc::new(Ring(Weak::clone(source)))));
        engine.set_timer(token, Some(at));
    }

    /// It rings no longer, until it is set again.
    pub fn clear(&mut self) {
        if let Some(token) = self.token {
            self.engine.set_timer(token, None);
        }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Some(token) = self.token {
            self.engine.deregister(token);
        }
    }
}

impl std::fmt::Debug for Alarm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Alarm").field("token", &self.token).finish_non_exhaustive()
    }
}

/// What the engine has for an alarm.
struct Ring(Weak<dyn Source>);

impl Source for Ring {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        if let Some(source) = self.0.upgrade() {
            source.timeout();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::progress::NEVER;

    #[derive(Default)]
    struct Counts(AtomicUsize);

    impl Source for Counts {
        fn ready(&self, _: Readiness) {}

        fn timeout(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The engine kept a source with a timer alive until the timer was over, so an owner that forgot one way
    /// out kept all that the source owned.
    #[test]
    fn an_alarm_keeps_nothing_alive_and_leaves_nothing_behind() {
        let engine = Arc::new(Engine::new().unwrap());
        let before = engine.sources_registered();
        let source = Arc::new(Counts::default());
        let weak: Weak<Counts> = Arc::downgrade(&source);
        let mut alarm = Alarm::new(&engine, weak.clone());
        assert_eq!(engine.sources_registered(), before, "not before it is set");
        alarm.set(Instant::now() + Duration::from_secs(3600));
        alarm.set(Instant::now());
        assert_eq!(engine.sources_registered(), before + 1);
        engine.poll_once();
        engine.poll_once();
        assert_eq!(source.0.load(Ordering::Relaxed), 1);
        alarm.set(Instant::now());
        alarm.clear();
        engine.poll_once();
        assert_eq!(source.0.load(Ordering::Relaxed), 1, "it was cleared");
        drop(source);
        assert!(weak.upgrade().is_none(), "the engine keeps the source");
        alarm.set(Instant::now());
        engine.poll_once();
        drop(alarm);
        assert_eq!((engine.sources_registered(), engine.first_timer()), (before, NEVER));
    }
}
