//! What a thread that polls a completion queue does for progress. `progress` decides when it does it.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use uwarp_rnic::cq::Coverage;
use uwarp_rnic::{Cq, Wc};

use crate::channel::waits_no_more;
use crate::nic::Nic;
use crate::progress::{AnswerWait, BeforeEarly, DIRECT, Poller, stamps};
use crate::sys;

// (Cells of plain values: a thread that is ending has them, too.)
thread_local! {
    static POLLER: Own = const { Own { poller: Cell::new(Poller::NEW), looks: Cell::new(NO_LOOK) } };
    static ANSWER_WAIT: Cell<AnswerWait> = const { Cell::new(AnswerWait::NEW) };
}

/// What a thread that polls keeps. (One thing, because to find it takes a call.)
struct Own {
    poller: Cell<Poller>,
    /// Where on its stack it began to look at the sockets. If that is set at the beginning of a look, an
    /// observer polls in the earlier one, or the thread has left that by a jump out of a signal's handler.
    looks: Cell<usize>,
}

const NO_LOOK: usize = 0;
/// A look within another one begins at least this far below it.
const BELOW: usize = 512;

impl Own {
    fn change(&self, change: impl FnOnce(&mut Poller)) {
        let mut poller = self.poller.get();
        change(&mut poller);
        self.poller.set(poller);
    }
}

impl Nic {
    /// Takes up to `max` completions, oldest first; returns how many. If there are none, makes progress in
    /// the calling thread and tries again. Never blocks.
    #[inline]
    pub fn poll_cq(&self, cq: &Arc<Cq>, max: usize, sink: impl FnMut(Wc)) -> usize {
        let nothing = max == 0 || self.engine().birth.is_parents() || cq.is_quiet();
        if nothing { 0 } else { self.look_and_poll(cq, max, sink) }
    }

    /// (Apart, because most polls find nothing, and then need no stack.)
    #[inline(never)]
    fn look_and_poll(&self, cq: &Arc<Cq>, max: usize, mut sink: impl FnMut(Wc)) -> usize {
        if cq.first_is_early_write() {
            waits_no_more();
            self.wait_for_answer(cq);
        }
        let mut found = cq.poll(max, &mut sink);
        let mut idle = false;
        if found == 0 {
            let empty = cq.note_poll(false);
            waits_no_more();
            POLLER.with(|own| {
                if empty == 1 && cq.is_looped() {
                    self.look_before_sleep(cq);
                    found = cq.poll(max, sink);
                    return;
                }
                self.begin_look(own);
                own.change(|poller| {
                    let in_earnest = self.look(cq, empty, poller);
                    own.looks.set(NO_LOOK);
                    found = cq.poll(max, sink);
                    idle = found == 0 && poller.yielding.count();
                    if found == 0 && in_earnest && !idle && !cq.needs_system() {
                        cq.glance_from_now();
                    }
                });
            });
        }
        if found > 0 {
            cq.note_poll(true);
            self.engine().held.polled();
            POLLER.with(|own| own.change(|poller| poller.yielding.found()));
        } else if idle {
            self.yield_core();
        }
        found
    }

    /// Another thread may have to run on this core before there is anything to poll.
    #[cold]
    fn yield_core(&self) {
        let before = sys::switches();
        let began = sys::now();
        std::thread::yield_now();
        let took = sys::now().saturating_duration_since(began);
        let switched = sys::switches() != before;
        let spans = self.engine().pace.spans();
        POLLER.with(|own| own.change(|poller| poller.yielding.yielded(took, switched, spans)));
    }

    /// The program's Write has completed although the peer may not have it yet. Receives for a moment, if
    /// that has brought the peer's answer lately. Otherwise the background thread would have to be woken for
    /// it.
    fn wait_for_answer(&self, cq: &Arc<Cq>) {
        let mut policy = ANSWER_WAIT.get();
        let engine = self.engine();
        match policy.next(engine.missed()) {
            BeforeEarly::Return => {}
            BeforeEarly::HandOver => engine.hand_over(),
            BeforeEarly::Wait => {
                engine.note_earnest(true);
                let mut start = Instant::now();
                if self.look_beside(policy.must_look_around(start)) {
                    start = Instant::now();
                    policy.looked_around(start);
                }
                let limit = engine.pace.spans().answer();
                let answered = loop {
                    match cq.receive_messages(DIRECT.few) {
                        Some(false) if start.elapsed() < limit => {}
                        Some(answered) => break answered,
                        None => break false,
                    }
                };
                if !answered {
                    engine.hand_over();
                }
                policy.waited(answered);
            }
        }
        ANSWER_WAIT.set(policy);
    }

    /// At the beginning of a wait, when the answer cannot have arrived yet: looks at all sockets and timers
    /// if that is due, or if `now`; returns whether it did.
    fn look_beside(&self, now: bool) -> bool {
        POLLER.with(|own| {
            let mut time = now;
            own.change(|poller| {
                time |= poller.look_around.count();
                if time {
                    self.begin_look(own);
                    let served = self.engine().poll_once();
                    self.engine().look_after();
                    own.looks.set(NO_LOOK);
                    poller.look_around.looked(served > 0);
                }
            });
            time
        })
    }

    /// For a loop that drains its queue before it sleeps: the system wakes it for what comes, so that only
    /// memory is worth a look.
    fn look_before_sleep(&self, cq: &Arc<Cq>) {
        if cq.needs_system() {
            cq.rest(&DIRECT);
        } else if cq.make_progress(&DIRECT, false) == Coverage::Partial {
            self.engine().look_once();
        }
    }

    /// Makes progress for a thread whose last `empty` polls in a row found nothing. Returns whether it polls
    /// in earnest.
    fn look(&self, cq: &Arc<Cq>, empty: u32, poller: &mut Poller) -> bool {
        let Poller { look_around, yielding, stamping } = poller;
        let sends = self.engine().held.polled_in_vain();
        let pace = &self.engine().pace;
        let earnest_at = pace.earnest_at();
        if pace.is_asked() {
            pace.answer(empty, self.engine().now());
        }
        if stamps(empty, earnest_at) || sends || (!cq.needs_system() && stamping.count()) {
            self.engine().note_earnest(empty == earnest_at);
            yielding.limit(pace.spans());
        }
        let covered = cq.make_progress(&DIRECT, empty >= earnest_at);
        // Its posts take far longer than a look at all sockets, and keep the background thread away.
        let time = look_around.count() || sends;
        if time || covered == Coverage::Partial {
            // What others wait for may be all in memory.
            let ask = time || cq.needs_system();
            let served = if ask { self.engine().poll_once() } else { self.engine().look_once() };
            if time {
                self.engine().look_after();
            }
            if covered == Coverage::Complete {
                look_around.looked(served > 0);
            } else if time {
                // This look included all sockets.
                look_around.looked_as_always();
            }
        }
        empty >= earnest_at
    }

    #[inline]
    fn begin_look(&self, own: &Own) {
        let here = 0_u8;
        let here = (&raw const here).addr();
        let before = own.looks.replace(here);
        if before != NO_LOOK {
            self.look_again(before, here);
        }
    }

    /// A look has begun before an earlier one has ended.
    #[cold]
    fn look_again(&self, before: usize, here: usize) {
        // Within that one, it will serve what the system has reported. (Not asked for again, as each time all
        // sockets are reported: with a thousand of them, that was most of what their ends cost.)
        if before < here + BELOW {
            self.engine().rearm_all();
        }
    }
}
