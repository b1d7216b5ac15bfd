//! Shared receive queues: one pool of receives for many queue pairs.
//!
//! A queue pair takes a receive when the first segment of a Send arrives, in order of arrival over all of
//! them (RFC 5041 numbers the messages of each stream by themselves, so each stream's stay in order). The
//! receive is then the queue pair's own until the message is complete.
//!
//! A Send that finds none waits, and its queue pair gets in line. A refill keeps one receive for each that
//! waits, the one that has waited longest first, and wakes only those. Kept receives are nobody else's: a
//! busy queue pair cannot empty the pool in front of the line, and one that is woken never finds it empty.
//! Only what is left over is free for all.
//!
//! A receive's place is free for another post when the program has polled its completion, whichever queue
//! pair completed it ([`Places`]); so it is with mlx5, whose `mlx5_free_srq_wqe` is called from polling.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use crate::cq::Places;
use crate::error::VerbsError;
use crate::event::{AsyncEvent, AsyncSink, EventKind};
use crate::pd::Pd;
use crate::queues::RecvQueue;
use crate::sync::Mutex;
use crate::wr::RecvWr;

/// A queue pair that waits for a receive.
pub trait Waiter: Send + Sync {
    /// A receive is kept for it: it may go on. Called without the shared receive queue's lock. Must not
    /// block.
    fn receive_kept(&self);
}

/// Queue pairs that are to be told, by [`Waiter::receive_kept`], that a receive is kept for them. Where a
/// queue pair's lock is held, that has to wait until it is free.
#[must_use = "a queue pair that is not woken waits for ever"]
#[derive(Default)]
pub struct Woken(SmallVec<[Arc<dyn Waiter>; 4]>);

impl Woken {
    /// Wakes them.
    pub fn wake(self) {
        for waiter in self.0 {
            waiter.receive_kept();
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds others behind.
    pub fn append(&mut self, mut others: Self) {
        self.0.append(&mut others.0);
    }
}

impl IntoIterator for Woken {
    type Item = Arc<dyn Waiter>;
    type IntoIter = smallvec::IntoIter<[Arc<dyn Waiter>; 4]>;
    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// What a shared receive queue is made from.
pub struct SrqInit {
    /// Its protection domain, which the receives' memory has to be in. The queue pairs may be in others.
    pub pd: Arc<Pd>,
    /// Receives it holds at most.
    pub max_wr: u32,
    /// Elements of a receive.
    pub max_sge: u32,
    /// Names it in asynchronous events.
    pub cookie: u64,
    /// Takes its asynchronous events.
    pub async_sink: Arc<dyn AsyncSink>,
}

/// Attributes of a shared receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqAttr {
    /// Receives it holds at most.
    pub max_wr: u32,
    /// Elements of a receive.
    pub max_sge: u32,
    /// When fewer receives than this are left, an event says so and this becomes 0; 0: no event.
    pub limit: u32,
}

struct Inner {
    queue: RecvQueue,
    limit: u32,
    /// Queue pairs whose Send waits, longest first.
    waiting: VecDeque<(u32, Weak<dyn Waiter>)>,
    /// Queue pairs for each of which one receive of the queue is kept.
    kept: HashSet<u32>,
}

impl Inner {
    /// Receives that are kept for nobody.
    fn free(&self) -> usize {
        self.queue.len().saturating_sub(self.kept.len())
    }

    /// Keeps receives for those that wait, as far as they reach.
    fn keep(&mut self) -> Woken {
        let mut woken = Woken::default();
        while self.free() > 0
            && let Some((qpn, waiter)) = self.waiting.pop_front()
        {
            // One that is gone has lost its turn.
            if let Some(waiter) = waiter.upgrade() {
                self.kept.insert(qpn);
                woken.0.push(waiter);
            }
        }
        woken
    }
}

/// A shared receive queue.
pub struct Srq {
    inner: Mutex<Inner>,
    pd: Arc<Pd>,
    max_sge: u32,
    cookie: u64,
    async_sink: Arc<dyn AsyncSink>,
}

impl std::fmt::Debug for Srq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Srq").field("cookie", &self.cookie).finish_non_exhaustive()
    }
}

impl Srq {
    /// An empty queue without a limit.
    pub fn new(init: SrqInit) -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::new(Inner {
                queue: RecvQueue::shared(init.max_wr, init.max_sge),
                limit: 0,
                waiting: VecDeque::new(),
                kept: HashSet::new(),
            }),
            pd: init.pd,
            max_sge: init.max_sge,
            cookie: init.cookie,
            async_sink: init.async_sink,
        })
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Where polls, and queue pairs that drop a receive they took, free its places.
    pub(crate) fn places(&self) -> Arc<Places> {
        self.inner.lock().queue.places().clone()
    }

    /// Its attributes.
    pub fn query(&self) -> SrqAttr {
        let inner = self.inner.lock();
        SrqAttr { max_wr: inner.queue.depth(), max_sge: self.max_sge, limit: inner.limit }
    }

    /// Changes the number of receives it holds at most (not below those it holds), or the limit; all or
    /// nothing. A limit above what it holds is refused; one above what is posted now makes its event when the
    /// next receive is taken, or missed.
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), VerbsError> {
        let mut inner = self.inner.lock();
        let depth = max_wr.unwrap_or_else(|| inner.queue.depth());
        let limit = limit.unwrap_or(inner.limit);
        if depth == 0 || (depth as usize) < inner.queue.len() {
            return Err(VerbsError::Invalid("more receives are posted than the queue would hold"));
        }
        if limit > depth {
            return Err(VerbsError::Invalid("a limit that the queue cannot reach"));
        }
        inner.queue.set_depth(depth);
        inner.limit = limit;
        Ok(())
    }

    /// Posts receives. On a refusal, says which one (the ones before it are posted) and why. In any case,
    /// those that wait are to be woken.
    pub fn post_recv<'a>(
        &self,
        wrs: impl Iterator<Item = RecvWr<'a>>,
    ) -> (Result<(), (usize, VerbsError)>, Woken) {
        let mut inner = self.inner.lock();
        let mut result = Ok(());
        for (i, wr) in wrs.enumerate() {
            if let Err(e) = inner.queue.post(&wr) {
                result = Err((i, e));
                break;
            }
        }
        (result, inner.keep())
    }

    /// Moves a receive to `to`, for queue pair `qpn`; says whether there was one for it. If not, and `waiter`
    /// is given, the queue pair gets in line.
    pub(crate) fn take(&self, qpn: u32, to: &mut RecvQueue, waiter: Option<&Weak<dyn Waiter>>) -> bool {
        self.take_fitting(qpn, 0, to, waiter).unwrap_or(false)
    }

    /// The same for a datagram of `length` bytes, which does not wait. `None`: the next receive is too short
    /// for it, and stays where every queue pair finds it.
    pub(crate) fn take_for_datagram(&self, qpn: u32, length: u32, to: &mut RecvQueue) -> Option<bool> {
        self.take_fitting(qpn, length, to, None)
    }

    fn take_fitting(
        &self,
        qpn: u32,
        length: u32,
        to: &mut RecvQueue,
        waiter: Option<&Weak<dyn Waiter>>,
    ) -> Option<bool> {
        let mut inner = self.inner.lock();
        if inner.queue.front().is_some_and(|recv| recv.total < length) {
            return None;
        }
        // Most of the time nobody waits, and nothing is kept.
        let mine = !inner.kept.is_empty() && inner.kept.remove(&qpn);
        let taken = (mine || inner.free() > 0) && inner.queue.move_front(to);
        if !taken && let Some(waiter) = waiter {
            inner.waiting.push_back((qpn, waiter.clone()));
        }
        let low = inner.queue.len() < inner.limit as usize;
        if low {
            inner.limit = 0;
        }
        drop(inner);
        if low {
            let kind = EventKind::SrqLimitReached;
            self.async_sink.async_event(AsyncEvent { kind, cookie: self.cookie });
        }
        Some(taken)
    }

    /// A queue pair does not wait any more; what was kept for it is another's.
    pub(crate) fn leave(&self, qpn: u32) -> Woken {
        let mut inner = self.inner.lock();
        inner.waiting.retain(|(waiting, _)| *waiting != qpn);
        inner.kept.remove(&qpn);
        inner.keep()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::wr::Sge;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Count {
        fn get(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }
    }

    impl AsyncSink for Count {
        fn async_event(&self, event: AsyncEvent) {
            assert_eq!(event, AsyncEvent { kind: EventKind::SrqLimitReached, cookie: 5 });
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Waiter for Count {
        fn receive_kept(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    struct Fixture {
        srq: Arc<Srq>,
        events: Arc<Count>,
        waiters: [Arc<Count>; 4],
    }

    impl Fixture {
        fn new() -> Self {
            let events = Arc::new(Count::default());
            let srq = Srq::new(SrqInit {
                pd: Pd::new(),
                max_wr: 8,
                max_sge: 2,
                cookie: 5,
                async_sink: events.clone(),
            });
            Self { srq, events, waiters: Default::default() }
        }

        fn post(&self, ids: std::ops::Range<u64>) -> Result<(), (usize, VerbsError)> {
            let sges = [Sge { addr: 16, length: 8, lkey: 1 }];
            let (result, woken) = self.srq.post_recv(ids.map(|wr_id| RecvWr { wr_id, sges: &sges }));
            woken.wake();
            result
        }

        /// Queue pair `n` takes a receive, or gets in line.
        fn take(&self, n: usize) -> Option<u64> {
            let mut to = RecvQueue::new(1, 2);
            let waiter: Weak<dyn Waiter> = Arc::downgrade(&self.waiters[n]) as Weak<dyn Waiter>;
            let taken = self.srq.take(n as u32, &mut to, Some(&waiter));
            assert_eq!(taken, to.front().is_some());
            // Its completion is polled at once.
            to.pop().inspect(|_| self.srq.places().free(0)).map(|slot| slot.wr_id)
        }

        fn woken(&self) -> [usize; 4] {
            [0, 1, 2, 3].map(|n| self.waiters[n].get())
        }
    }

    #[test]
    fn receives_are_taken_in_the_order_they_were_posted() {
        let f = Fixture::new();
        f.post(0..4).unwrap();
        assert_eq!([0, 1, 0, 2].map(|n| f.take(n)), [Some(0), Some(1), Some(2), Some(3)]);
        assert_eq!(f.take(3), None);
    }

    #[test]
    fn a_full_queue_takes_what_fits() {
        let f = Fixture::new();
        assert_eq!(f.post(0..9), Err((8, VerbsError::QueueFull)));
        let three = [Sge::default(); 3];
        let (result, _) = f.srq.post_recv(std::iter::once(RecvWr { wr_id: 9, sges: &three }));
        assert!(matches!(result, Err((0, _))));
        assert_eq!(f.take(0), Some(0));
        f.post(8..9).unwrap();
    }

    /// As a queue pair's own queue does; the completions of several queue pairs free places in any order.
    #[test]
    fn a_place_is_free_when_its_completion_was_polled() {
        let f = Fixture::new();
        f.post(0..8).unwrap();
        let mut own = RecvQueue::new(1, 2);
        for _ in 0..8 {
            assert!(f.srq.take(1, &mut own, None));
            own.pop();
            assert_eq!(f.post(8..9), Err((0, VerbsError::QueueFull)));
        }
        f.srq.places().free(0);
        assert_eq!(f.post(8..10), Err((1, VerbsError::QueueFull)));
    }

    #[test]
    fn those_that_wait_are_woken_in_turn_and_find_their_receive() {
        let f = Fixture::new();
        assert_eq!([2, 0, 1].map(|n| f.take(n)), [None; 3]);
        f.post(0..2).unwrap();
        assert_eq!(f.woken(), [1, 0, 1, 0]);
        // One that came later does not get in front, nor does one that waits still.
        assert!(!f.srq.take(1, &mut RecvQueue::new(1, 2), None));
        assert_eq!(f.take(3), None);
        assert_eq!((f.take(0), f.take(2)), (Some(0), Some(1)));
        // Having been served they stand at the end of the line.
        assert_eq!(f.take(2), None);
        f.post(2..4).unwrap();
        assert_eq!(f.woken(), [1, 1, 1, 1]);
        assert_eq!((f.take(3), f.take(1)), (Some(2), Some(3)));
        f.post(4..7).unwrap();
        assert_eq!(f.woken(), [1, 1, 2, 1]);
        // What is left over is free for all.
        assert_eq!([0, 0, 0].map(|n| f.take(n)), [Some(4), Some(5), None]);
        assert_eq!(f.take(2), Some(6));
    }

    #[test]
    fn what_was_kept_for_one_that_leaves_is_the_next_ones() {
        let f = Fixture::new();
        assert_eq!([0, 1, 2].map(|n| f.take(n)), [None; 3]);
        f.srq.leave(1).wake();
        f.post(0..1).unwrap();
        assert_eq!(f.woken(), [1, 0, 0, 0]);
        f.srq.leave(0).wake();
        assert_eq!(f.woken(), [1, 0, 1, 0]);
        assert_eq!((f.take(3), f.take(2)), (None, Some(0)));
    }

    #[test]
    fn one_that_is_gone_does_not_use_up_a_receive() {
        let mut f = Fixture::new();
        assert_eq!([0, 1].map(|n| f.take(n)), [None; 2]);
        f.waiters[0] = Arc::default();
        f.post(0..1).unwrap();
        assert_eq!((f.woken(), f.take(1)), ([0, 1, 0, 0], Some(0)));
    }

    #[test]
    fn the_limit_makes_one_event() {
        let f = Fixture::new();
        f.post(0..4).unwrap();
        f.srq.modify(None, Some(3)).unwrap();
        assert_eq!(f.take(0), Some(0));
        assert_eq!((f.events.get(), f.srq.query().limit), (0, 3), "three are not fewer than three");
        assert_eq!(f.take(0), Some(1));
        assert_eq!((f.events.get(), f.srq.query().limit), (1, 0));
        assert_eq!([f.take(0), f.take(0)], [Some(2), Some(3)]);
        assert_eq!(f.events.get(), 1);
        // Set when there is nothing left to take: the next that is missed tells.
        f.srq.modify(None, Some(1)).unwrap();
        assert_eq!(f.events.get(), 1);
        assert_eq!(f.take(0), None);
        assert_eq!(f.events.get(), 2);
    }

    #[test]
    fn a_modification_is_made_whole_or_not_at_all() {
        let f = Fixture::new();
        f.post(0..4).unwrap();
        let before = f.srq.query();
        assert_eq!(before, SrqAttr { max_wr: 8, max_sge: 2, limit: 0 });
        for (max_wr, limit) in
            [(Some(3), None), (Some(0), None), (None, Some(9)), (Some(5), Some(6)), (Some(3), Some(1))]
        {
            assert!(matches!(f.srq.modify(max_wr, limit), Err(VerbsError::Invalid(_))));
            assert_eq!(f.srq.query(), before);
        }
        f.srq.modify(Some(16), Some(16)).unwrap();
        assert!(f.srq.modify(Some(15), None).is_err(), "below the limit");
        f.post(4..16).unwrap();
        assert_eq!(f.srq.query(), SrqAttr { max_wr: 16, max_sge: 2, limit: 16 });
    }
}
