//! The background thread: serves the program's peers while no thread of the program does.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::io::Errno;

use crate::config::Config;
use crate::engine::{Engine, Looked};
use crate::fork;
use crate::progress::{self, Contest, LOST, Lead, Mode, Returns, Signs, Spans, Spinning};
use crate::sync::spin_loop;
use crate::sys;

/// An engine with its background thread.
pub(crate) fn start() -> io::Result<Arc<Engine>> {
    let engine = Arc::new(Engine::new()?);
    let weak = Arc::downgrade(&engine);
    // The program's own threads handle its signals.
    let thread = fork::with_signals_blocked(|| sys::spawn("uwarp-progress", move || run(&weak)))?;
    // After everything that can fail: a child must not close a descriptor number that another descriptor has
    // by then.
    engine.track();
    // Set only here, so it cannot be set already.
    let _ = engine.background.set(thread);
    Ok(engine)
}

/// State of the thread beside its mode.
struct Background {
    /// How often it has slept beside polling threads since it last served.
    naps: usize,
    /// It has slept on the sockets, and the leader may not know of all timers yet.
    has_served: bool,
    contest: Contest,
    returns: Returns,
    /// Whether it looks on in memory before it sleeps again.
    spinning: Spinning,
    /// The last look in memory found something: the next one at the sockets does not sleep.
    looks_on: bool,
}

fn run(engine: &Weak<Engine>) {
    if let Err(priority) = fork::ask_to_run_soon() {
        tracing::warn!(
            "this program runs with real-time priority {priority}, and the library's thread may not have a \
             higher one: a thread that spins without polling can keep it from its processor. Raise \
             RLIMIT_RTPRIO to {} (LimitRTPRIO= of a systemd unit), or leave a processor free",
            priority + 1
        );
    }
    progress::enter_background();
    let mut background = Background::new();
    while let Some(engine) = engine.upgrade() {
        if engine.birth.is_parents() {
            return;
        }
        guarded(|| engine.exit_if_requested());
        engine.end_long_lead();
        if Config::get().spin {
            guarded(|| engine.poll_once());
            spin_loop();
            continue;
        }
        let lead = engine.lead.get();
        let polled = engine.last_poll.age(engine.now());
        let (looped, spans) = (engine.is_looped(), engine.pace.spans());
        let beside_loops = background.returns.beside_loops(spans, engine.polls_last());
        let signs = Signs { lead, polled, naps: background.naps, looped, beside_loops, spans };
        background.sleep(&engine, signs);
    }
}

impl Background {
    fn new() -> Self {
        Self {
            naps: 0,
            has_served: true,
            contest: Contest::new(),
            returns: Returns::default(),
            spinning: Spinning::new(),
            looks_on: false,
        }
    }

    /// Sleeps as these signs require; its mode is `Awake` afterwards.
    fn sleep(&mut self, engine: &Engine, signs: Signs) {
        let mode = Mode::next(signs);
        match mode {
            Mode::Awake => return,
            Mode::Napping | Mode::StandingBack => self.stand_back(engine, mode, signs.spans),
            Mode::TakingBack => self.take_back(engine),
            Mode::BesideLeads => self.nap_beside_leads(engine, signs),
            Mode::AwaitingLeader => self.await_leader(engine, signs.lead),
            Mode::Serving { .. } => self.serve(engine, signs),
        }
        engine.mode.enter(Mode::Awake);
        if std::mem::take(&mut self.looks_on) {
            self.looks_on = self.look_on(engine);
        }
    }

    /// Something came through memory, and no thread of the program looks: looks for more before it sleeps,
    /// as long as that has been useful lately. Otherwise each peer would ring for each message, and wait for
    /// this thread to wake. Returns whether it goes on with that, after a look at the sockets.
    fn look_on(&self, engine: &Engine) -> bool {
        let Some(score) = self.spinning.begin() else { return false };
        let threads = (engine.last_poll.get(), engine.lead.get());
        let limit = engine.pace.spans().look_on();
        let (mut since, mut found) = (sys::now(), false);
        while (engine.last_poll.get(), engine.lead.get()) == threads {
            let served = guarded(|| engine.settling(|| engine.look_once()));
            let now = sys::now();
            if served.is_some_and(|served| served > 0) {
                (since, found) = (now, true);
            } else if now.saturating_duration_since(since) > limit {
                // So it is also if this thread was kept from its processor: another one has something to do.
                self.spinning.end(score, false);
                return false;
            }
            if found && engine.around.is_due(engine.nanos(now)) {
                self.spinning.end(score, true);
                return true;
            }
            spin_loop();
        }
        false
    }

    /// Sleeps while threads poll in earnest or lead one after the other; for a moment only, if the mode
    /// requires that.
    fn stand_back(&mut self, engine: &Engine, mode: Mode, spans: Spans) {
        if engine.is_led() {
            self.leave_timers_to_leader(engine);
        }
        let nap = spans.nap(self.naps);
        self.naps = self.naps.saturating_add(1);
        engine.mode.enter(mode);
        // A thread that handed over before this did not see this mode, and woke no thread.
        match (engine.last_poll.get(), nap) {
            (None, _) => {}
            (Some(_), Some(time)) => engine.watchdog.nap(time),
            (Some(last), None) => engine.watchdog.sleep(last, engine.now(), spans),
        }
    }

    /// No thread polls any more, so no thread receives from the parked descriptors.
    fn take_back(&mut self, engine: &Engine) {
        engine.mode.enter(Mode::TakingBack);
        self.naps = 0;
        engine.unpark();
        let looked = guarded(|| engine.settling(|| engine.wait_once(Some(Duration::ZERO))));
        let input = matches!(looked, Some(Ok(Looked { input: true, .. })));
        if input {
            engine.note_missed();
        }
        self.contest.took_back(input);
        engine.pace.ask();
    }

    fn nap_beside_leads(&mut self, engine: &Engine, signs: Signs) {
        let Signs { looped, lead, spans, .. } = signs;
        if looped && lead.is_none() {
            self.returns.leaves(engine.now(), spans, engine.polls_last(), engine.looped_at());
        }
        engine.mode.enter(Mode::BesideLeads);
        self.leave_timers_to_leader(engine);
        engine.pace.ask();
        // Who handed over before this did not see this mode, and woke no thread.
        if engine.last_poll.get().is_none() && !engine.is_led() {
            return;
        }
        sys::park_timeout(match (looped, lead) {
            // (Counted from the last poll.)
            (true, None) => signs.beside_loops.saturating_sub(signs.polled.unwrap_or_default()),
            (true, _) => spans.beside_loops(),
            _ => spans.beside_leads(),
        });
    }

    /// Ends a lead that has lasted too long.
    fn await_leader(&mut self, engine: &Engine, lead: Option<Lead>) {
        engine.mode.enter(Mode::AwaitingLeader);
        let Some(lead) = lead else { return };
        self.leave_timers_to_leader(engine);
        engine.dismiss(lead);
        let since = sys::now();
        while engine.lead.get() == Some(lead) {
            let left = LOST.saturating_sub(sys::now().saturating_duration_since(since));
            if left.is_zero() {
                return engine.replace_leader(lead);
            }
            sys::park_timeout(left);
            guarded(|| engine.exit_if_requested());
        }
    }

    /// From now on the leader is woken for each new timer that it could sleep past. It may not know of timers
    /// that were set while this thread slept until an earlier one.
    fn leave_timers_to_leader(&mut self, engine: &Engine) {
        if std::mem::take(&mut self.has_served) && engine.within_a_lead(engine.first_timer()) {
            engine.wake();
        }
    }

    /// Sleeps until something is ready, and serves it; does not sleep beside a lead that has just begun.
    fn serve(&mut self, engine: &Engine, signs: Signs) {
        self.has_served = true;
        if signs.looped {
            self.returns.gives_up(engine.last_poll.get());
        }
        let deadline = engine.first_timer();
        engine.mode.enter(Mode::Serving { until: deadline });
        if engine.is_led() {
            return;
        }
        // A thread that set a timer before this did not see this mode.
        let again = self.looks_on || engine.first_timer() != deadline;
        let looked =
            guarded(|| engine.settling(|| engine.wait_until(deadline, again.then_some(Duration::ZERO))));
        if let Some(Ok(looked)) = looked {
            if self.looks_on {
                engine.around.looked(looked.served > 0, engine.pace.spans());
            }
            self.looks_on |= looked.in_memory;
        }
        if let Some(Ok(Looked { input: true, .. })) = looked {
            engine.pace.set_earnest_at(self.contest.served(engine.pace.present()));
            engine.pace.ask();
        }
        match looked.unwrap_or(Ok(Looked::default())) {
            Ok(Looked { woken: false, .. }) | Err(Errno::INTR) => {}
            Ok(Looked { woken: true, .. }) => {
                engine.take_wake();
                if engine.is_led() {
                    // The wake-up may have been meant for the thread that is about to sleep here for a
                    // channel.
                    engine.wake();
                }
            }
            Err(e) => {
                tracing::error!("the progress thread cannot wait: {e}");
                sys::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// Without this, a panic in one connection's service would stop all of them.
fn guarded<T>(serve: impl FnOnce() -> T) -> Option<T> {
    // Locks are released during unwinding, and only the failed source can be in an inconsistent state.
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(serve));
    result
        .inspect_err(|_| {
            tracing::error!("a panic while serving a connection; the other connections continue")
        })
        .ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use uwarp_llp::carrier::Watch;

    use super::*;
    use crate::raised::Look;
    use crate::source::{Readiness, Source, Token};

    struct Nothing;

    impl Source for Nothing {
        fn ready(&self, _: Readiness) {}

        fn timeout(&self) {}
    }

    /// One source in memory that always has input, or never; counts how often it is asked.
    struct Lanes {
        token: Token,
        busy: AtomicBool,
        asked: AtomicUsize,
    }

    impl Look for Lanes {
        fn sleep_begins(&self) {}

        fn sleep_ends(&self) {}

        fn harvest(&self, raise: &mut dyn FnMut(Token, Readiness)) {
            self.asked.fetch_add(1, Ordering::SeqCst);
            if self.busy.load(Ordering::SeqCst) {
                raise(self.token, Readiness::ANY);
            }
        }
    }

    #[test]
    fn it_looks_on_in_memory_as_long_as_that_finds_something() {
        let engine = Engine::new().unwrap();
        let token = engine.register_watch(Watch::Itself, Arc::new(Nothing)).unwrap();
        let lanes = Lanes { token, busy: AtomicBool::new(true), asked: AtomicUsize::new(0) };
        let lanes = Arc::new(lanes);
        engine.add_look(lanes.clone());
        let background = Background::new();
        assert!(background.look_on(&engine), "and then at the sockets, too");
        lanes.busy.store(false, Ordering::SeqCst);
        (0..2).for_each(|_| assert!(!background.look_on(&engine), "nothing comes"));
        let asked = lanes.asked.load(Ordering::SeqCst);
        (0..8).for_each(|_| assert!(!background.look_on(&engine)));
        assert_eq!(lanes.asked.load(Ordering::SeqCst), asked, "it has not paid");
    }
}
