//! Shared receive queues: one pool of receives for many queue pairs.
//!
//! A queue pair takes a receive when the first segment of a Send arrives, in order of arrival over all of
//! them (RFC 5041 numbers the messages of each stream separately, so each stream stays in order). The receive
//! then belongs to the queue pair until the message is complete.
//!
//! If there is none, the Send waits and its queue pair enters the line. When receives are posted, one is
//! reserved for each queue pair in the line, longest wait first, and only those are woken. No other queue
//! pair can take a reserved receive: a busy queue pair cannot empty the pool ahead of the line, and one that
//! is woken always finds its receive. The remaining receives are free for all.
//!
//! A receive's place is free for another post when the program has polled its completion, whichever queue
//! pair completed it ([`Places`]). mlx5 does the same: polling calls its `mlx5_free_srq_wqe`.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use crate::cq::Places;
use crate::error::VerbsError;
use crate::event::{AsyncEvent, AsyncSink, EventKind};
use crate::pd::Pd;
use crate::queues::{RecvQueue, TakenRecv};
use crate::sync::Mutex;
use crate::wr::RecvWr;

/// A queue pair that waits for a receive.
pub trait Waiter: Send + Sync {
    /// A receive is reserved for this queue pair: it may continue. Called without the shared receive queue's
    /// lock. Must not block.
    fn receive_kept(&self);
}

/// Queue pairs to notify, by [`Waiter::receive_kept`], that a receive is reserved for them. While a queue
/// pair's lock is held, the notification must wait until the lock is free.
#[must_use = "a queue pair that is not notified waits for ever"]
#[derive(Default)]
pub struct Woken(SmallVec<[Arc<dyn Waiter>; 4]>);

impl Woken {
    /// Notifies them.
    pub fn wake(self) {
        for waiter in self.0 {
            waiter.receive_kept();
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends others.
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
    /// Its protection domain, which the memory of the receives must belong to. The queue pairs may be in
    /// others.
    pub pd: Arc<Pd>,
    /// Receives it holds at most.
    pub max_wr: u32,
    /// Elements of a receive.
    pub max_sge: u32,
    /// Identifies it in asynchronous events.
    pub cookie: u64,
    /// Receives its asynchronous events.
    pub async_sink: Arc<dyn AsyncSink>,
}

/// Attributes of a shared receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqAttr {
    /// Receives it holds at most.
    pub max_wr: u32,
    /// Elements of a receive.
    pub max_sge: u32,
    /// When fewer receives than this are left, an event is reported and this becomes 0; 0: no event.
    pub limit: u32,
}

struct Inner {
    queue: RecvQueue,
    limit: u32,
    /// The line: queue pairs whose Send waits, longest wait first.
    waiting: VecDeque<(u32, Weak<dyn Waiter>)>,
    /// Queue pairs that have a receive of the queue reserved, one each.
    kept: HashSet<u32>,
}

impl Inner {
    /// Receives that are not reserved.
    fn free(&self) -> usize {
        self.queue.len().saturating_sub(self.kept.len())
    }

    /// Reserves receives for the queue pairs in the line, as far as there are any.
    fn keep(&mut self) -> Woken {
        let mut woken = Woken::default();
        while self.free() > 0
            && let Some((qpn, waiter)) = self.waiting.pop_front()
        {
            // A destroyed queue pair gets none.
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
    inner: Mutex<Inner, 20>,
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
                queue: RecvQueue::with(init.max_wr, init.max_sge, Places::in_any_order()),
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

    /// Where its places are freed, by polls and by queue pairs that drop a receive they took.
    pub(crate) fn places(&self) -> Arc<Places> {
        self.inner.lock().queue.places().clone()
    }

    /// Its attributes.
    pub fn query(&self) -> SrqAttr {
        let inner = self.inner.lock();
        SrqAttr { max_wr: inner.queue.depth(), max_sge: self.max_sge, limit: inner.limit }
    }

    /// Changes the number of receives it holds at most (not below the number it holds), or the limit; all or
    /// nothing. A limit above that number is refused. A limit above the number posted now makes its event the
    /// next time a queue pair takes a receive, or finds none.
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), VerbsError> {
        let mut inner = self.inner.lock();
        let depth = max_wr.unwrap_or_else(|| inner.queue.depth());
        let limit = limit.unwrap_or(inner.limit);
        if depth == 0 || (depth as usize) < inner.queue.len() {
            return Err(VerbsError::Invalid("more receives are posted than the queue would hold"));
        }
        if limit > depth {
            return Err(VerbsError::Invalid("the limit is above what the queue can hold"));
        }
        inner.queue.set_depth(depth);
        inner.limit = limit;
        Ok(())
    }

    /// Posts receives. On an error, returns the index of the failed one (those before it are posted) and why.
    /// In any case, the caller must notify the returned queue pairs.
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

    /// Moves a receive to `to`, for queue pair `qpn`; returns whether there was one for it. If not, and
    /// `waiter` is given, the queue pair enters the line.
    pub(crate) fn take(&self, qpn: u32, to: &mut RecvQueue, waiter: Option<&Weak<dyn Waiter>>) -> bool {
        let moved = self.take_fitting(qpn, 0, |queue| queue.move_front(to).then_some(()), waiter);
        matches!(moved, Some(Some(())))
    }

    /// The same for a datagram of `length` bytes, which does not wait. `None`: the next receive is too short
    /// for it, and stays in the queue for any queue pair.
    pub(crate) fn take_for_datagram(&self, qpn: u32, length: u32, to: &mut RecvQueue) -> Option<bool> {
        self.take_fitting(qpn, length, |queue| queue.move_front(to).then_some(()), None)
            .map(|moved| moved.is_some())
    }

    /// Takes a receive for a reliable datagram of `length` bytes to queue pair `qpn`, which keeps it until
    /// the message is complete. Such a message does not enter the line: its sender tries again. `None`: the
    /// next receive is too short for it, and stays in the queue for any queue pair.
    pub(crate) fn take_for_message(&self, qpn: u32, length: u32) -> Option<Option<TakenRecv>> {
        self.take_fitting(qpn, length, RecvQueue::take_front, None)
    }

    /// The receive of [`Self::take_for_message`] is the next one again: its message has been given up. The
    /// queue pairs in the line keep their order, and the first of them may get it. The caller must notify
    /// the returned ones.
    pub(crate) fn put_back(&self, recv: TakenRecv) -> Woken {
        let mut inner = self.inner.lock();
        inner.queue.put_back(recv);
        inner.keep()
    }

    fn take_fitting<T>(
        &self,
        qpn: u32,
        length: u32,
        take: impl FnOnce(&mut RecvQueue) -> Option<T>,
        waiter: Option<&Weak<dyn Waiter>>,
    ) -> Option<Option<T>> {
        let mut inner = self.inner.lock();
        // Usually no queue pair waits, and no receive is reserved.
        let mine = !inner.kept.is_empty() && inner.kept.contains(&qpn);
        let mut taken = None;
        if mine || inner.free() > 0 {
            if inner.queue.front().is_some_and(|recv| recv.total < length) {
                return None;
            }
            if mine {
                inner.kept.remove(&qpn);
            }
            taken = take(&mut inner.queue);
        }
        if taken.is_none()
            && let Some(waiter) = waiter
        {
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

    /// A queue pair does not wait any more; a receive that was reserved for it goes to the next one.
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

        /// Queue pair `n` takes a receive, or enters the line.
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

    /// As with a queue pair's own queue, but the completions of several queue pairs free places in any order.
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
    fn waiting_queue_pairs_are_woken_in_turn_and_find_their_receive() {
        let f = Fixture::new();
        assert_eq!([2, 0, 1].map(|n| f.take(n)), [None; 3]);
        f.post(0..2).unwrap();
        assert_eq!(f.woken(), [1, 0, 1, 0]);
        // A queue pair that came later does not overtake, nor does one that still waits.
        assert!(!f.srq.take(1, &mut RecvQueue::new(1, 2), None));
        assert_eq!(f.take(3), None);
        assert_eq!((f.take(0), f.take(2)), (Some(0), Some(1)));
        // After being served, a queue pair enters the line at its end.
        assert_eq!(f.take(2), None);
        f.post(2..4).unwrap();
        assert_eq!(f.woken(), [1, 1, 1, 1]);
        assert_eq!((f.take(3), f.take(1)), (Some(2), Some(3)));
        f.post(4..7).unwrap();
        assert_eq!(f.woken(), [1, 1, 2, 1]);
        // The remaining receives are free for all.
        assert_eq!([0, 0, 0].map(|n| f.take(n)), [Some(4), Some(5), None]);
        assert_eq!(f.take(2), Some(6));
    }

    /// What is reserved for another queue pair says nothing about a message: it was called too long for it,
    /// which a reliable datagram's sender takes as final.
    #[test]
    fn a_message_is_not_too_long_for_a_receive_that_it_cannot_get() {
        let f = Fixture::new();
        assert_eq!(f.take(0), None);
        f.post(0..1).unwrap();
        let mut own = RecvQueue::new(1, 2);
        assert_eq!(f.srq.take_for_datagram(1, 9, &mut own), Some(false));
        assert!(f.srq.take_for_message(1, 9).is_some_and(|taken| taken.is_none()));
        f.post(1..3).unwrap();
        assert_eq!(f.srq.take_for_datagram(1, 9, &mut own), None);
        assert!(f.srq.take_for_message(1, 9).is_none());
        let taken = f.srq.take_for_message(1, 8).flatten().unwrap();
        assert_eq!((taken.wr_id, taken.total, taken.sges.len()), (0, 8, 1));
        f.srq.put_back(taken).wake();
        assert_eq!((f.take(0), f.take(1), f.woken()), (Some(0), Some(1), [1, 0, 0, 0]));
    }

    #[test]
    fn the_reserved_receive_of_one_that_leaves_goes_to_the_next() {
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
    fn a_destroyed_queue_pair_uses_up_no_receive() {
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
        // If the limit is set on an empty queue, the next queue pair that finds no receive makes the event.
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
