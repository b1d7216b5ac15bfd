//! Completion queues and shared receive queues.

use std::sync::{Arc, Weak};

use uwarp_rnic::{AsyncEvent, AsyncSink, CompletionSink, Pd, RecvWr, Sge, Wc, WcOpcode, WcStatus};

use crate::cq::{Coverage, Cq, Direct, Feeder};
use crate::queues::RecvQueue;
use crate::srq::{Srq, SrqInit, Waiter};
use crate::sys::{Count, Thread, start};

struct Events(Count);

impl CompletionSink for Events {
    fn completion_event(&self, _: u64) {
        self.0.add();
    }
}

impl AsyncSink for Events {
    fn async_event(&self, _: AsyncEvent) {
        self.0.add();
    }
}

impl Feeder for Events {
    fn make_progress(&self, _: bool) -> Coverage {
        self.0.add();
        Coverage::Complete
    }
}

impl Waiter for Events {
    fn receive_kept(&self) {
        self.0.add();
    }
}

fn events() -> Arc<Events> {
    Arc::new(Events(Count::new()))
}

fn wc(id: u64) -> Wc {
    Wc::new(id, WcStatus::Success, WcOpcode::Recv, (id >> 8) as u32)
}

/// A thread that arms, polls once more and then sleeps is woken by every completion that this poll did not
/// find.
pub fn no_completion_comes_between_arming_and_sleeping() {
    const EACH: u64 = 3;
    let notified = events();
    let cq = Cq::new(16, 0, Some(notified.clone()), events());
    let producers = [1u64, 2].map(|from| {
        let cq = cq.clone();
        start(move || (0..EACH).for_each(|n| assert!(cq.push(wc(from << 8 | n), false))))
    });
    let (mut found, mut seen) = (0, 0);
    while found < 2 * EACH {
        found += cq.poll(1, |_| ()) as u64;
        cq.arm(false);
        let more = cq.poll(2, |_| ()) as u64;
        found += more;
        if more == 0 && found < 2 * EACH {
            seen += 1;
            notified.0.wait(seen);
        }
        // An event without a waiter does not count for the next wait.
        seen = notified.0.get();
    }
    producers.into_iter().for_each(Thread::join);
}

/// Every accepted completion is polled once, in order for each queue pair, while other threads poll and
/// resize; a completion that finds no room is reported once.
pub fn completions_come_out_once() {
    const EACH: u64 = 4;
    let broken = events();
    let cq = Cq::new(4, 0, None, broken.clone());
    let out = Arc::new(crate::sync::Mutex::<_, 1>::new(Vec::new()));
    let pushed = Arc::new(crate::sync::Mutex::<_, 30>::new(Vec::new()));
    let mut threads = Vec::new();
    for from in [1u64, 2] {
        let (cq, pushed) = (cq.clone(), pushed.clone());
        threads.push(start(move || {
            for n in 0..EACH {
                if cq.push(wc(from << 8 | n), false) {
                    pushed.lock().push(from << 8 | n);
                }
            }
        }));
    }
    for _ in 0..2 {
        let (cq, out) = (cq.clone(), out.clone());
        threads.push(start(move || {
            for _ in 0..3 {
                // Two threads that poll keep the order of the ring only while one of them takes everything.
                let mut out = out.lock();
                cq.poll(2, |wc| out.push(wc.wr_id));
            }
        }));
    }
    let resizer = cq.clone();
    threads.push(start(move || {
        let _ = resizer.resize(2);
        resizer.resize(8).unwrap();
    }));
    threads.into_iter().for_each(Thread::join);
    let mut out = std::mem::take(&mut *out.lock());
    let mut left = 0;
    left += cq.poll(100, |wc| out.push(wc.wr_id));
    assert!(cq.is_empty() && left <= 8);
    for from in [1, 2] {
        let of = |list: &[u64]| list.iter().copied().filter(|id| id >> 8 == from).collect::<Vec<_>>();
        assert_eq!(of(&out), of(&pushed.lock()));
    }
    let lost = (2 * EACH) as usize - out.len();
    assert_eq!(broken.0.get(), u64::from(lost > 0));
    assert_eq!(cq.overflowed(), lost > 0);
}

/// Queue pairs are created and destroyed while their completion queue asks them for input.
pub fn feeders_come_and_go() {
    const FEW: Direct = Direct { few: 2, favourite: u32::MAX, partial_every: 1 };
    let cq = Cq::new(4, 0, None, events());
    let feeder = |of: &Arc<Events>| -> Weak<dyn Feeder> { Arc::downgrade(of) as Weak<dyn Feeder> };
    let stays = events();
    cq.add_feeder(1, feeder(&stays));
    let goes = {
        let cq = cq.clone();
        start(move || {
            for number in [2, 3] {
                let goes = events();
                cq.add_feeder(number, feeder(&goes));
                // A queue pair with one completion queue for both directions.
                cq.add_feeder(number, feeder(&goes));
                let _ = cq.make_progress(&FEW, false);
                cq.remove_feeder(number);
                cq.remove_feeder(number);
            }
        })
    };
    let poller = {
        let cq = cq.clone();
        start(move || (0..3).for_each(|_| _ = cq.make_progress(&FEW, true)))
    };
    goes.join();
    poller.join();
    let before = stays.0.get();
    assert_eq!(cq.make_progress(&FEW, false), Coverage::Complete, "one is left and is polled directly");
    assert_eq!(stays.0.get(), before + 1);
    cq.remove_feeder(1);
    let _ = cq.make_progress(&FEW, false);
    assert_eq!(stays.0.get(), before + 1, "removed");
}

/// Queue pairs that wait for a receive get one while there are receives, although others take receives in
/// between and one that got its turn is destroyed.
pub fn a_refill_reaches_all_waiting_queue_pairs() {
    const SIDES: u32 = 3;
    let srq = Srq::new(SrqInit { pd: Pd::new(), max_wr: 8, max_sge: 1, cookie: 0, async_sink: events() });
    let taken = Count::new();
    let mut threads = Vec::new();
    for qpn in 0..SIDES {
        let (srq, taken) = (srq.clone(), taken.clone());
        threads.push(start(move || {
            let kept = events();
            let waiter: Weak<dyn Waiter> = Arc::downgrade(&kept) as Weak<dyn Waiter>;
            let mut own = RecvQueue::new(1, 1);
            let mut seen = 0;
            if qpn == 0 {
                // This one is destroyed, whether it has a receive, is about to get one, or waits. There is
                // one for each of the others.
                if srq.take(qpn, &mut own, Some(&waiter)) {
                    post(&srq, 1);
                }
                srq.leave(qpn).wake();
                return;
            }
            while !srq.take(qpn, &mut own, Some(&waiter)) {
                seen += 1;
                kept.0.wait(seen);
            }
            taken.add();
        }));
    }
    post(&srq, 1);
    post(&srq, 1);
    threads.into_iter().for_each(Thread::join);
    assert_eq!(taken.get(), u64::from(SIDES) - 1);
    let mut own = RecvQueue::new(8, 1);
    post(&srq, 1);
    assert!(srq.take(9, &mut own, None), "a receive stays reserved for no queue pair");
    assert!(!srq.take(9, &mut own, None));
}

fn post(srq: &Srq, n: u64) {
    let sges = [Sge { addr: 16, length: 8, lkey: 1 }];
    let (result, woken) = srq.post_recv((0..n).map(|wr_id| RecvWr { wr_id, sges: &sges }));
    result.unwrap();
    woken.wake();
}
