//! What a thread that polls a completion queue does for progress.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uwarp_rnic::{Cq, Wc};

use crate::channel::waits_no_more;
use crate::fork;
use crate::nic::Nic;

/// Empty polls in a row after which a thread is polling in earnest. A program that polls once after each post and finds its
/// completion (`ib_write_lat`) never gets there.
const IN_EARNEST: u32 = 4;
/// An earnest poller says so every so many polls: a few microseconds, well within what counts as recent.
const STAMP_EVERY: u32 = 16;
/// Up to this many queue pairs are asked directly; with more, the system says which have something.
const FEW: usize = 2;
/// A direct look does not see other sockets; every so many empty polls, they are looked at too, and far more often as before
/// when that was not in vain: the background thread stands back for all sockets, not only for the polled ones. Not only of polls
/// in a row: a thread that often finds something keeps the background thread away all the same.
const LOOK_AROUND: u32 = 256;
/// Empty polls after which a thread lets others have its core, for one of them may be whom it waits for: at least, and at most
/// while that has been in vain.
const PATIENCE: (u32, u32) = (32, 512);
/// What comes within so many polls after yielding came of that.
const AT_ONCE: u32 = 4;

/// Where a Write completes before the peer has it, the program spins on its memory for the peer's answer next. The poll that would
/// hand it the completion waits for the answer for so long. More than a round trip takes in which the peer's background thread has to be
/// woken: of two ends that both wait and fail because of each other, one has to succeed first.
const ANSWER: Duration = Duration::from_micros(50);
/// After a wait in vain, so many completions are handed out at once: at first, and at most while each wait is in vain.
const WITHOUT_WAIT: (u32, u32) = (16, 8192);
/// Answers in a row after which a wait in vain is taken for an exception.
const ANSWERS: u32 = 4;
/// Waits that are answered keep the background thread away as empty polls do, and may be all that a thread ever does: it looks
/// around as often, and after so long at the latest.
const UNSEEN: Duration = Duration::from_millis(1);

thread_local! {
    static POLLER: Cell<Poller> = const {
        Cell::new(Poller { blinkers: Blinkers { polls: 0, until: LOOK_AROUND }, patience: Patience { polls: 0, until: PATIENCE.1, tried: false } })
    };
    static ANSWERS_EXPECTED: Cell<Expectation> = const {
        Cell::new(Expectation { skip: 0, pause: WITHOUT_WAIT.0, answers: 0, missed: 0, looked: None })
    };
}

/// Whether to wait for the peer's answer before a Write's completion is handed out.
#[derive(Clone, Copy)]
struct Expectation {
    /// Completions to hand out at once before the next wait.
    skip: u32,
    /// As many after the next wait in vain.
    pause: u32,
    /// Answers in a row.
    answers: u32,
    /// The engine's count of input that came while the background thread stood back and nobody polled, when last looked at.
    missed: u64,
    /// When a wait last began with a look at all sockets.
    looked: Option<Instant>,
}

impl Expectation {
    /// Whether to wait now.
    fn is_time(&mut self, missed: u64) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        if self.missed != missed {
            // What came first was not what the program waited for, or it has stopped polling.
            self.missed = missed;
            self.skip = WITHOUT_WAIT.0;
            return false;
        }
        true
    }

    fn waited(&mut self, answered: bool) {
        if answered {
            self.answers += 1;
            if self.answers >= ANSWERS {
                self.pause = WITHOUT_WAIT.0;
            }
        } else {
            (self.skip, self.answers) = (self.pause, 0);
            self.pause = (self.pause * 2).min(WITHOUT_WAIT.1);
        }
    }
}

/// What a thread that polls knows of itself.
#[derive(Clone, Copy)]
struct Poller {
    blinkers: Blinkers,
    patience: Patience,
}

/// How long this thread has not looked around.
#[derive(Clone, Copy)]
struct Blinkers {
    /// Empty polls and waits for an answer since.
    polls: u32,
    /// As many after which it does.
    until: u32,
}

impl Blinkers {
    /// Counts an empty poll or a wait; says whether it is time.
    fn count(&mut self) -> bool {
        self.polls += 1;
        self.polls >= self.until
    }

    /// It has looked; others were `busy` or not.
    fn looked(&mut self, busy: bool) {
        self.polls = 0;
        self.until = if busy { (self.until / 8).max(1) } else { (self.until * 2).min(LOOK_AROUND) };
    }
}

/// When this thread lets others have its core.
///
/// Where both ends spin on one core, each would wait for the end of the other's time slice; where something else computes there,
/// yielding costs a slice of its and brings nothing. Which of the two it is shows in what the next polls find.
#[derive(Clone, Copy)]
struct Patience {
    /// Empty polls since the last find or yield.
    polls: u32,
    /// Empty polls after which it yields.
    until: u32,
    /// It has yielded since the last find.
    tried: bool,
}

impl Patience {
    /// Counts an empty poll; says whether to yield.
    fn count(&mut self) -> bool {
        self.polls += 1;
        if self.polls < self.until {
            return false;
        }
        if self.tried {
            self.until = (self.until * 2).min(PATIENCE.1);
        }
        (self.polls, self.tried) = (0, true);
        true
    }

    fn found(&mut self) {
        if self.tried && self.polls <= AT_ONCE {
            self.until = PATIENCE.0;
        }
        (self.polls, self.tried) = (0, false);
    }
}

impl Nic {
    /// Takes up to `max` completions, oldest first; returns how many. With none there, makes progress in the calling thread and
    /// looks again. Never blocks.
    pub fn poll_cq(&self, cq: &Arc<Cq>, max: usize, mut sink: impl FnMut(Wc)) -> usize {
        if max == 0 || fork::forked() {
            return 0;
        }
        // A thread that is ending knows nothing of itself any more, and looks around each time.
        let unknown = Poller {
            blinkers: Blinkers { polls: 0, until: 1 },
            patience: Patience { polls: 0, until: PATIENCE.1, tried: false },
        };
        if cq.first_is_early_write() {
            waits_no_more();
            self.wait_for_answer(cq);
        }
        let mut found = cq.poll(max, &mut sink);
        let mut idle = false;
        if found == 0 {
            let mut poller = POLLER.try_with(Cell::get).unwrap_or(unknown);
            let empty = cq.note_poll(false);
            waits_no_more();
            self.look(cq, empty, &mut poller.blinkers);
            found = cq.poll(max, sink);
            if found == 0 {
                idle = poller.patience.count();
            }
            let _ = POLLER.try_with(|p| p.set(poller));
        }
        if found > 0 {
            cq.note_poll(true);
            let _ = POLLER.try_with(|p| {
                let mut poller = p.get();
                poller.patience.found();
                p.set(poller);
            });
        } else if idle {
            std::thread::yield_now();
        }
        found
    }

    /// The program's Write has completed although the peer may not have it yet: receives for a moment, where that has brought the peer's
    /// answer lately. Otherwise the background thread would have to be woken for it.
    fn wait_for_answer(&self, cq: &Arc<Cq>) {
        // A thread that is ending waits for nothing.
        let Ok(mut expectation) = ANSWERS_EXPECTED.try_with(Cell::get) else { return };
        let engine = self.engine();
        if !expectation.is_time(engine.missed()) {
            if expectation.skip == WITHOUT_WAIT.0 {
                engine.hand_over();
            }
        } else {
            engine.note_earnest(true);
            let mut start = Instant::now();
            if self.look_beside(expectation.looked.is_none_or(|at| start.duration_since(at) >= UNSEEN)) {
                start = Instant::now();
                expectation.looked = Some(start);
            }
            let answered = loop {
                match cq.listen(FEW) {
                    Some(false) if start.elapsed() < ANSWER => {}
                    Some(answered) => break answered,
                    None => break false,
                }
            };
            if !answered {
                engine.hand_over();
            }
            expectation.waited(answered);
        }
        let _ = ANSWERS_EXPECTED.try_with(|e| e.set(expectation));
    }

    /// At the beginning of a wait, when the answer cannot be there yet: looks at all sockets and timers where it is time, or `now`; says
    /// whether it did.
    fn look_beside(&self, now: bool) -> bool {
        let Ok(mut poller) = POLLER.try_with(Cell::get) else { return false };
        let time = poller.blinkers.count() || now;
        if time {
            let served = self.engine().poll_once();
            self.engine().look_after();
            poller.blinkers.looked(served > 0);
        }
        let _ = POLLER.try_with(|p| p.set(poller));
        time
    }

    /// Makes progress for a thread that has found `empty` polls in a row in vain.
    fn look(&self, cq: &Arc<Cq>, empty: u32, blinkers: &mut Blinkers) {
        if empty % STAMP_EVERY == IN_EARNEST {
            self.engine().note_earnest(empty == IN_EARNEST);
        }
        let direct = cq.feed(FEW, empty >= IN_EARNEST);
        let time = blinkers.count();
        if time || !direct {
            let served = self.engine().poll_once();
            if time {
                self.engine().look_after();
            }
            if direct {
                blinkers.looked(served > 0);
            } else if time {
                // All were looked at anyway, each time.
                blinkers.polls = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Engine;

    #[test]
    fn a_write_waits_for_its_answer_seldom_where_none_comes() {
        let mut expectation =
            Expectation { skip: 0, pause: WITHOUT_WAIT.0, answers: 0, missed: 0, looked: None };
        let mut waits = 0;
        for _ in 0..100_000 {
            if expectation.is_time(0) {
                waits += 1;
                expectation.waited(false);
            }
        }
        assert!(waits < 25, "{waits}");
        // Until answers come.
        while !expectation.is_time(0) {}
        (0..ANSWERS).for_each(|_| expectation.waited(true));
        expectation.waited(false);
        assert_eq!((0..).take_while(|_| !expectation.is_time(0)).count(), WITHOUT_WAIT.0 as usize);
        assert!(!expectation.is_time(1), "something came while nobody looked");
    }

    #[test]
    fn a_lead_that_was_left_without_a_word_is_replaced_although_a_thread_polls() {
        let engine = Engine::start().unwrap();
        // As a jump out of a signal's handler leaves it.
        std::mem::forget(engine.lead());
        let end = Instant::now() + Duration::from_secs(20);
        while engine.lead().is_none() {
            assert!(Instant::now() < end, "nobody else may lead");
            engine.note_earnest(false);
            engine.look_after();
        }
    }

    fn polls_until_it_yields(patience: &mut Patience) -> u32 {
        (1..).find(|_| patience.count()).unwrap_or(0)
    }

    #[test]
    fn yields_soon_where_that_helped_and_seldom_where_it_did_not() {
        let mut patience = Patience { polls: 0, until: PATIENCE.1, tried: false };
        assert_eq!(polls_until_it_yields(&mut patience), PATIENCE.1);
        patience.found();
        assert_eq!(polls_until_it_yields(&mut patience), PATIENCE.0);
        let mut last = PATIENCE.0;
        for _ in 0..10 {
            let n = polls_until_it_yields(&mut patience);
            assert!(n >= last);
            last = n;
        }
        assert_eq!(last, PATIENCE.1);
    }
}
