//! Completion queues.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use uwarp_mem::glance::Glance;

use crate::error::VerbsError;
use crate::event::{AsyncEvent, AsyncSink, CompletionSink, EventKind};
use crate::glances::Glances;
use crate::sync::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering, RwLock};
use crate::wr::{Wc, WcOpcode, WcStatus};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Armed {
    No,
    /// For completions of solicited Sends and for errors.
    Solicited,
    Any,
}

struct Inner {
    ring: VecDeque<Entry>,
    depth: usize,
    armed: Armed,
    /// An event was made since the queue was last empty: the program knows that completions wait.
    announced: bool,
    /// Without one, a completion was added that meets a request for solicited ones.
    missed_solicited: bool,
    /// Work queues that complete here, each at its key, and the keys that are unused.
    work_queues: Vec<Option<Arc<Places>>>,
    unused_keys: Vec<u32>,
}

struct Entry {
    wc: Wc,
    /// The work queue, and the number of the place after the work request's own.
    key: u32,
    tail: u32,
    /// Time at which it was added, by the queue's clock.
    at: u64,
}

impl Inner {
    /// The program has seen everything.
    fn forget_events(&mut self) {
        self.announced = false;
        self.missed_solicited = false;
    }

    /// The program has the completion, or will never get it: the place of its work request is free.
    fn free_place(&self, entry: &Entry) {
        if let Some(Some(places)) = self.work_queues.get(entry.key as usize) {
            places.free(entry.tail);
        }
    }
}

/// Which places of a work queue are free again.
///
/// A place is taken from the post until the program *polls* the completion, as in the providers of adapters
/// (`poll_cq` of mlx4 and mlx5 advances the tail of the work queue). So a program that posts until the queue
/// is full cannot overrun a completion queue that is as deep as its work queues.
#[derive(Debug)]
pub(crate) struct Places {
    freed: AtomicU32,
    /// Work requests complete in any order: those of a shared receive queue, which several queue pairs
    /// complete, each on its own completion queue; and those of a queue pair for reliable datagrams.
    in_any_order: bool,
}

impl Places {
    /// For a queue whose work requests complete in the order they were posted, on one completion queue.
    pub fn in_order() -> Arc<Self> {
        Arc::new(Self { freed: AtomicU32::new(0), in_any_order: false })
    }

    /// For a queue whose work requests complete in any order, possibly on several completion queues.
    pub fn in_any_order() -> Arc<Self> {
        Arc::new(Self { freed: AtomicU32::new(0), in_any_order: true })
    }

    /// See [`Self::in_any_order`].
    pub fn is_in_any_order(&self) -> bool {
        self.in_any_order
    }

    /// Places freed since the start; wraps.
    pub fn freed(&self) -> u32 {
        self.freed.load(Ordering::Acquire)
    }

    /// Frees all places before `tail`, or one of a queue that completes in any order.
    pub fn free(&self, tail: u32) {
        if self.in_any_order {
            self.freed.fetch_add(1, Ordering::Release);
        } else {
            // Under the completion queue's lock, so in order.
            self.freed.store(tail, Ordering::Release);
        }
    }

    /// Frees all places before `tail`, when no work request and no completion of the queue is left.
    pub fn free_all(&self, tail: u32) {
        self.freed.store(tail, Ordering::Release);
    }
}

/// How often a thread waits for a queue's lock, which is held for some instructions, and how long.
const WAITS_TO_PUSH: usize = 10;
const WAIT_TO_PUSH: Duration = Duration::from_millis(50);

/// The key of a completion that frees no place.
const NO_KEY: u32 = u32::MAX;

/// What a direct look at sockets, without the system (epoll), has covered.
#[must_use]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coverage {
    /// Everything that the queue pairs wait for.
    Complete,
    /// Not all: there are other queue pairs, or one waits for something that only the system can report, such
    /// as room to send.
    Partial,
}

impl Coverage {
    /// Both together.
    pub fn and(self, other: Self) -> Self {
        if self == Self::Complete { other } else { Self::Partial }
    }
}

/// Which queue pairs of a completion queue a thread looks at directly.
#[derive(Debug, Clone, Copy)]
pub struct Direct {
    /// All, if there are at most this many.
    pub few: usize,
    /// If there are more: only the one that brought this many completions in a row.
    pub favourite: u32,
    /// In that case, one empty poll in this many also asks the system about the others: they must not wait
    /// for more than a microsecond or two.
    pub partial_every: u32,
}

/// Something whose progress may bring completions to a queue: a queue pair with its socket.
pub trait Feeder: Send + Sync {
    /// Looks for input and for room to send, without blocking. Does nothing if another thread is doing so.
    /// `in_earnest`: the caller has polled without result for a while and will poll again at once.
    fn make_progress(&self, in_earnest: bool) -> Coverage;
    /// Looks for input as [`Self::make_progress`] does with `in_earnest`. Returns whether messages of the
    /// peer were placed.
    fn receive_messages(&self) -> bool {
        let _ = self.make_progress(true);
        false
    }
    /// What shows that there is news, after a look that found none and left nothing to be done. `None`: it
    /// takes a look.
    fn glance(&self) -> Option<Glance> {
        None
    }
    /// The program has polled without result, and sleeps now until input wakes it: sends what would have
    /// waited for its next message.
    fn rest(&self) {}
}

/// A completion queue: a bounded ring, and whether the next entry makes an event.
pub struct Cq {
    inner: Mutex<Inner, 22>,
    /// Entries in the ring; written under its lock, read without it.
    waiting: AtomicUsize,
    overflowed: AtomicBool,
    /// A thread has the lock for ever.
    abandoned: AtomicBool,
    /// Messages of some feeder complete before they have reached the peer's memory. A hint; it stays set.
    early: AtomicBool,
    /// See [`Cq::is_looped`].
    looped: AtomicBool,
    /// Gives each completion the time at which it was added, if the program wants to know.
    clock: Option<fn() -> u64>,
    /// Time at which the last polled completion was added.
    polled_at: AtomicU64,
    cookie: u64,
    completions: Option<Arc<dyn CompletionSink>>,
    async_sink: Arc<dyn AsyncSink>,
    /// Polls in a row that found nothing; kept for the code that decides which thread makes progress.
    empty_polls: AtomicU32,
    feeders: RwLock<Feeders, 21>,
    /// What shows that feeders have news.
    glances: Glances,
    /// How many feeders need the system. Written under their lock, read without it.
    need_system: AtomicUsize,
    /// Of many feeders, the one that brought all recent completions: the number of its queue pair, and how
    /// many completions in a row. Written under the ring's lock, read without it: a hint.
    favourite: AtomicU32,
    streak: AtomicU32,
}

/// What [`Outlet::push_run`] adds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Completed {
    /// When the program polls it, the work queue's places before this number are free.
    pub tail: u32,
    pub wc: Wc,
    pub solicited: bool,
}

/// Where the work requests of one queue complete. When it is dropped, so are its completions.
pub(crate) struct Outlet {
    cq: Arc<Cq>,
    key: u32,
}

impl Outlet {
    /// `places` are the work queue's.
    pub fn new(cq: Arc<Cq>, places: Arc<Places>) -> Self {
        let key = cq.add_work_queue(places);
        Self { cq, key }
    }

    pub fn cq(&self) -> &Arc<Cq> {
        &self.cq
    }

    /// See [`Cq::push`]. When the program polls it, the work queue's places before `tail` are free.
    #[inline]
    pub fn push(&self, tail: u32, wc: Wc, solicited: bool) -> bool {
        self.cq.push_of(self.key, tail, wc, solicited)
    }

    /// The same for several, in order: one look at the queue is enough for all of them. Returns how many have
    /// found room; the others are lost.
    pub fn push_run(&self, run: &[Completed]) -> usize {
        self.cq.push_run_of(self.key, run)
    }

    /// Drops what the program has not polled; see [`Cq::purge`].
    pub fn purge(&self) {
        self.cq.purge(self.key);
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        self.cq.remove_work_queue(self.key);
    }
}

/// Queue pairs by number: thousands may share a queue, and each may come and go at any time.
#[derive(Default)]
struct Feeders {
    /// How often one was added, changed or removed.
    changes: u64,
    list: Vec<Feeding>,
    /// Index in the list.
    place: FxHashMap<u32, usize>,
}

struct Feeding {
    qpn: u32,
    feeder: Weak<dyn Feeder>,
    /// What it waits for is known only to the system.
    needs_system: bool,
}

impl std::fmt::Debug for Cq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cq").field("cookie", &self.cookie).finish_non_exhaustive()
    }
}

impl Cq {
    /// A queue of `depth` entries. `cookie` names it in events.
    pub fn new(
        depth: u32,
        cookie: u64,
        completions: Option<Arc<dyn CompletionSink>>,
        async_sink: Arc<dyn AsyncSink>,
    ) -> Arc<Self> {
        Self::with_clock(depth, cookie, completions, async_sink, None)
    }

    /// The same; each completion gets the time of this clock when it is added ([`Self::polled_at`]).
    pub fn with_clock(
        depth: u32,
        cookie: u64,
        completions: Option<Arc<dyn CompletionSink>>,
        async_sink: Arc<dyn AsyncSink>,
        clock: Option<fn() -> u64>,
    ) -> Arc<Self> {
        Arc::new(Self {
            // The ring grows on use: an idle queue of 16,384 entries costs nothing.
            inner: Mutex::new(Inner {
                ring: VecDeque::new(),
                depth: depth.max(1) as usize,
                armed: Armed::No,
                announced: false,
                missed_solicited: false,
                work_queues: Vec::new(),
                unused_keys: Vec::new(),
            }),
            waiting: AtomicUsize::new(0),
            overflowed: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            early: AtomicBool::new(false),
            looped: AtomicBool::new(false),
            clock,
            polled_at: AtomicU64::new(0),
            cookie,
            completions,
            async_sink,
            empty_polls: AtomicU32::new(0),
            feeders: RwLock::default(),
            glances: Glances::default(),
            need_system: AtomicUsize::new(0),
            favourite: AtomicU32::new(0),
            streak: AtomicU32::new(0),
        })
    }

    /// Entries it holds at most.
    pub fn depth(&self) -> u32 {
        u32::try_from(self.inner.lock().depth).unwrap_or(u32::MAX)
    }

    /// Takes up to `max` completions, oldest first; returns how many. Makes no progress of its own.
    pub fn poll(&self, max: usize, mut sink: impl FnMut(Wc)) -> usize {
        // A poller that looks before the completion is counted looks again.
        if self.waiting.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let n = inner.ring.len().min(max);
        self.waiting.store(inner.ring.len() - n, Ordering::Release);
        if n == inner.ring.len() {
            inner.forget_events();
        }
        for _ in 0..n {
            if let Some(entry) = inner.ring.pop_front() {
                inner.free_place(&entry);
                if self.clock.is_some() {
                    self.polled_at.store(entry.at, Ordering::Relaxed);
                }
                sink(entry.wc);
            }
        }
        n
    }

    /// Time at which the last polled completion was added, by the queue's clock; 0 without one. Useful for a
    /// program that polls one completion at a time, in one thread.
    pub fn polled_at(&self) -> u64 {
        self.polled_at.load(Ordering::Relaxed)
    }

    /// Whether completions wait.
    pub fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    /// Whether a completion did not fit. Such a queue stays broken (`ibv_poll_cq` fails on it).
    pub fn overflowed(&self) -> bool {
        self.overflowed.load(Ordering::Relaxed)
    }

    /// Makes the next completion (or the next solicited or failed one) an event. Arming for any completion
    /// includes arming for solicited ones.
    ///
    /// Completions that wait already make an event at once if none has announced them. The man page asks
    /// programs to poll after arming; UCX does not. It relies on mlx4 and mlx5, which compare what has been
    /// polled with what has been added. They would also make an event here of completions behind one that
    /// had an event: a program that arms before it polls would be woken twice.
    pub fn arm(&self, solicited_only: bool) {
        let missed = {
            let mut inner = self.inner.lock();
            let waits = !inner.ring.is_empty() && !inner.announced;
            let missed = waits && (!solicited_only || inner.missed_solicited);
            if missed {
                inner.announced = true;
                inner.armed = Armed::No;
            } else {
                inner.armed = match (inner.armed, solicited_only) {
                    (Armed::Any, _) | (_, false) => Armed::Any,
                    _ => Armed::Solicited,
                };
            }
            missed
        };
        if let Some(sink) = &self.completions {
            let looped = sink.armed();
            if looped != self.looped.load(Ordering::Relaxed) {
                self.looped.store(looped, Ordering::Relaxed);
            }
            if missed {
                sink.completion_event(self.cookie);
            }
        }
    }

    /// Makes an event, armed or not, although perhaps nothing has completed. (Programs expect such events:
    /// what one announces may have been polled before it is taken.)
    pub fn announce(&self) {
        let Some(sink) = &self.completions else { return };
        let mut inner = self.inner.lock();
        inner.armed = Armed::No;
        inner.announced |= !inner.ring.is_empty();
        drop(inner);
        sink.completion_event(self.cookie);
    }

    /// Changes the depth; refused when more entries wait than would fit.
    pub fn resize(&self, depth: u32) -> Result<(), VerbsError> {
        let mut inner = self.inner.lock();
        if (depth as usize) < inner.ring.len() || depth == 0 {
            return Err(VerbsError::Invalid("more completions wait than the queue would hold"));
        }
        inner.depth = depth as usize;
        Ok(())
    }

    /// The lock, for a thread that serves queue pairs. `None`: a thread has it that has jumped out of
    /// `ibv_poll_cq`, from the handler of a signal. The queue then stands still, as an adapter's does; the
    /// other queues of the process go on.
    #[cold]
    fn wait_to_push(&self) -> Option<MutexGuard<'_, Inner, 22>> {
        if self.abandoned.load(Ordering::Relaxed) {
            return None;
        }
        // (Each of them, and not their sum: a process that is stopped, and goes on, misses one.)
        let inner = (0..WAITS_TO_PUSH).find_map(|_| self.inner.try_lock_for(WAIT_TO_PUSH));
        if inner.is_none() && !self.abandoned.swap(true, Ordering::Relaxed) {
            tracing::error!(
                "a completion queue is locked for ever: has a signal's handler jumped out of ibv_poll_cq? \
                 Its queue pairs fail"
            );
        }
        inner
    }

    /// Adds a completion. `solicited`: it completes a receive of a Send with Solicited Event.
    ///
    /// Returns false when the queue is full: the completion is lost, an asynchronous event reports it once,
    /// and the caller must move its queue pair to the error state.
    pub fn push(&self, wc: Wc, solicited: bool) -> bool {
        self.push_of(NO_KEY, 0, wc, solicited)
    }

    /// The same for the work queue at `key`: when the program polls the completion, the places before `tail`
    /// are free.
    fn push_of(&self, key: u32, tail: u32, wc: Wc, solicited: bool) -> bool {
        let completed = Completed { tail, wc, solicited };
        let event = {
            let Some(mut inner) = self.inner.try_lock().or_else(|| self.wait_to_push()) else { return false };
            if inner.ring.len() >= inner.depth {
                self.lose(inner, key, &[completed]);
                return false;
            }
            let event = self.add(&mut inner, key, &completed);
            self.waiting.store(inner.ring.len(), Ordering::Release);
            event
        };
        if event && let Some(sink) = &self.completions {
            sink.completion_event(self.cookie);
        }
        true
    }

    /// As [`Self::push_of`] for each of these, in order; returns how many were added. The others are lost.
    fn push_run_of(&self, key: u32, run: &[Completed]) -> usize {
        let (added, event) = {
            let Some(mut inner) = self.inner.try_lock().or_else(|| self.wait_to_push()) else { return 0 };
            let room = inner.depth.saturating_sub(inner.ring.len());
            let (fitting, lost) = run.split_at_checked(room).unwrap_or((run, &[]));
            let mut event = false;
            for completed in fitting {
                event |= self.add(&mut inner, key, completed);
            }
            self.waiting.store(inner.ring.len(), Ordering::Release);
            if !lost.is_empty() {
                self.lose(inner, key, lost);
            }
            (fitting.len(), event)
        };
        if event && let Some(sink) = &self.completions {
            sink.completion_event(self.cookie);
        }
        added
    }

    /// Adds a completion, for which there is room; returns whether it makes an event.
    #[inline]
    fn add(&self, inner: &mut Inner, key: u32, completed: &Completed) -> bool {
        let Completed { tail, wc, solicited } = *completed;
        let meets_solicited = solicited || wc.status != WcStatus::Success;
        let event = match inner.armed {
            Armed::No => false,
            Armed::Any => true,
            Armed::Solicited => meets_solicited,
        };
        if event {
            inner.armed = Armed::No;
            inner.announced = true;
        } else {
            inner.missed_solicited |= meets_solicited;
        }
        if self.favourite.load(Ordering::Relaxed) == wc.qp_num {
            let streak = self.streak.load(Ordering::Relaxed);
            self.streak.store(streak.saturating_add(1), Ordering::Relaxed);
        } else {
            self.favourite.store(wc.qp_num, Ordering::Relaxed);
            self.streak.store(0, Ordering::Relaxed);
        }
        let at = self.clock.map_or(0, |clock| clock());
        inner.ring.push_back(Entry { wc, key, tail, at });
        event
    }

    /// The queue is full: these will never be polled.
    #[cold]
    fn lose(&self, inner: MutexGuard<'_, Inner, 22>, key: u32, lost: &[Completed]) {
        let first = !self.overflowed.swap(true, Ordering::Relaxed);
        let depth = inner.depth;
        // (A place of a queue that completes in order becomes free with its next completion, if there is
        // one.)
        if let Some(Some(places)) = inner.work_queues.get(key as usize)
            && places.in_any_order
        {
            lost.iter().for_each(|completed| places.free(completed.tail));
        }
        drop(inner);
        if first {
            // Once: the queue stays broken, and each queue pair that fails has an event of its own.
            tracing::error!(
                depth,
                qpn = lost.first().map_or(0, |completed| completed.wc.qp_num),
                "completion queue overflow: a completion is lost, because the program has not \
                 polled; each queue pair that loses one fails"
            );
            self.async_sink.async_event(AsyncEvent { kind: EventKind::CqErr, cookie: self.cookie });
            // The next poll says so.
            drop(self.glances.end());
        }
    }

    /// Adds a work queue whose completions come here; returns its key.
    fn add_work_queue(&self, places: Arc<Places>) -> u32 {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        if let Some(key) = inner.unused_keys.pop()
            && let Some(place) = inner.work_queues.get_mut(key as usize)
        {
            *place = Some(places);
            return key;
        }
        inner.work_queues.push(Some(places));
        u32::try_from(inner.work_queues.len() - 1).unwrap_or(NO_KEY)
    }

    /// Drops the completions of a work queue that the program has not polled, and frees their places. Events
    /// are kept.
    ///
    /// Providers of adapters do the same when a queue pair is destroyed or reset (`mlx5_destroy_qp` and
    /// `mlx5_modify_qp` call `mlx5_cq_clean`; mlx4, hns and bnxt_re do likewise; irdma does so at destruction
    /// only), and programs free what the `wr_id` points to right after.
    fn purge(&self, key: u32) {
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let work_queues = &inner.work_queues;
        inner.ring.retain(|entry| {
            let stays = entry.key != key;
            if !stays && let Some(Some(places)) = work_queues.get(key as usize) {
                places.free(entry.tail);
            }
            stays
        });
        if inner.ring.is_empty() {
            inner.forget_events();
        }
        self.waiting.store(inner.ring.len(), Ordering::Release);
    }

    /// Removes a work queue, with its completions.
    fn remove_work_queue(&self, key: u32) {
        self.purge(key);
        let mut inner = self.inner.lock();
        if let Some(place) = inner.work_queues.get_mut(key as usize)
            && place.take().is_some()
        {
            inner.unused_keys.push(key);
        }
    }

    /// Messages of a feeder complete before they have reached the peer's memory.
    pub fn note_early_completions(&self) {
        self.early.store(true, Ordering::Relaxed);
    }

    /// Whether the oldest completion is of a Write and may have been added before the Write reached the
    /// peer's memory.
    pub fn first_is_early_write(&self) -> bool {
        let early = |wc: &Wc| wc.opcode == WcOpcode::RdmaWrite && wc.status == WcStatus::Success;
        self.early.load(Ordering::Relaxed)
            && !self.is_empty()
            && self.inner.lock().ring.front().is_some_and(|entry| early(&entry.wc))
    }

    /// Lets the feeders look for input, as in [`Feeder::receive_messages`], if there are at most `few`.
    /// Returns whether messages of the peer were placed; `None` if there are more feeders.
    pub fn receive_messages(&self, few: usize) -> Option<bool> {
        let feeders = self.feeders.read();
        if feeders.list.len() > few {
            return None;
        }
        let some: SmallVec<[Arc<dyn Feeder>; 4]> =
            feeders.list.iter().filter_map(|feeding| feeding.feeder.upgrade()).collect();
        drop(feeders);
        // All of them, whatever the first one returns.
        Some(some.iter().filter(|feeder| feeder.receive_messages()).count() > 0)
    }

    /// Adds a feeder: the queue pair with this number. It counts as one that needs the system.
    pub fn add_feeder(&self, qpn: u32, feeder: Weak<dyn Feeder>) {
        self.change_feeders(|feeders| {
            let end = feeders.list.len();
            // A queue pair with one completion queue for both directions is added twice.
            if *feeders.place.entry(qpn).or_insert(end) == end {
                feeders.list.push(Feeding { qpn, feeder, needs_system: true });
                self.need_system.fetch_add(1, Ordering::Relaxed);
            }
        });
    }

    /// Input for this queue wakes a loop of the program, which waits for an event. A hint.
    pub fn is_looped(&self) -> bool {
        self.looped.load(Ordering::Relaxed)
    }

    /// What the source with this name receives may complete here; `None`: one that many queue pairs share.
    pub fn fed_by(&self, source: Option<u64>) {
        if let Some(sink) = &self.completions {
            sink.fed_by(source);
        }
    }

    /// Whether only the system knows what this feeder waits for: its sockets. Otherwise a look at memory
    /// finds it.
    pub fn set_needs_system(&self, qpn: u32, needs: bool) {
        self.change_feeders(|feeders| {
            let Some(&at) = feeders.place.get(&qpn) else { return };
            let Some(feeding) = feeders.list.get_mut(at) else { return };
            match (std::mem::replace(&mut feeding.needs_system, needs), needs) {
                (false, true) => _ = self.need_system.fetch_add(1, Ordering::Relaxed),
                (true, false) => _ = self.need_system.fetch_sub(1, Ordering::Relaxed),
                _ => {}
            }
        });
    }

    /// Whether a thread that polls must ask the system about feeders that it has not looked at. Possibly what
    /// was true a moment ago.
    pub fn needs_system(&self) -> bool {
        self.need_system.load(Ordering::Relaxed) > 0
    }

    /// Removes it, if it is there.
    pub fn remove_feeder(&self, qpn: u32) {
        self.change_feeders(|feeders| {
            let Some(at) = feeders.place.remove(&qpn) else { return };
            if feeders.list.swap_remove(at).needs_system {
                self.need_system.fetch_sub(1, Ordering::Relaxed);
            }
            if let Some(moved) = feeders.list.get(at).map(|moved| moved.qpn) {
                feeders.place.insert(moved, at);
            }
        });
    }

    /// What a glance shows is of the feeders as they were.
    fn change_feeders(&self, change: impl FnOnce(&mut Feeders)) {
        let mut feeders = self.feeders.write();
        feeders.changes += 1;
        change(&mut feeders);
        let last = self.glances.end();
        drop(feeders);
        drop(last);
    }

    /// Whether nothing waits and, at a glance, nothing comes: a poll need not look further. True for some
    /// polls behind one that ended with [`Self::glance_from_now`].
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.is_empty() && self.glances.show_nothing()
    }

    /// A thread that polls in earnest has looked at all that the queue waits for, and found nothing: glances
    /// take the place of its next looks, if the feeders are one or two, and a glance shows the news of each.
    pub fn glance_from_now(&self) {
        let feeders = self.feeders.read();
        let (changes, mut glances) = (feeders.changes, [None, None]);
        if feeders.list.len() > glances.len() || self.overflowed() {
            return;
        }
        let some: SmallVec<[Arc<dyn Feeder>; 2]> =
            feeders.list.iter().filter_map(|feeding| feeding.feeder.upgrade()).collect();
        drop(feeders);
        for (feeder, place) in some.iter().zip(&mut glances) {
            let Some(glance) = feeder.glance() else { return };
            *place = Some(glance);
        }
        let feeders = self.feeders.read();
        let last = (feeders.changes == changes).then(|| self.glances.begin(glances));
        drop(feeders);
        drop(last);
    }

    /// Lets feeders look directly: all, if they are few, or the one that brought all recent completions.
    #[inline]
    pub fn make_progress(&self, direct: &Direct, in_earnest: bool) -> Coverage {
        // The usual case is one feeder, polled millions of times a second.
        let only = match self.feeders.read().list.as_slice() {
            [one] if direct.few > 0 => Some(one.feeder.upgrade()),
            _ => None,
        };
        match only {
            Some(one) => one.map_or(Coverage::Complete, |one| one.make_progress(in_earnest)),
            None => self.make_progress_of_many(direct, in_earnest),
        }
    }

    /// As [`Self::make_progress`], for a program that sleeps now, and is woken by input.
    pub fn rest(&self, direct: &Direct) {
        let feeders = self.feeders.read();
        if feeders.list.len() <= direct.few {
            let some: SmallVec<[Arc<dyn Feeder>; 4]> =
                feeders.list.iter().filter_map(|feeding| feeding.feeder.upgrade()).collect();
            drop(feeders);
            some.iter().for_each(|feeder| feeder.rest());
        }
    }

    #[inline(never)]
    fn make_progress_of_many(&self, direct: &Direct, in_earnest: bool) -> Coverage {
        // Cloned, so that no lock is held here: a feeder calls observers, which take locks of their own.
        let feeders = self.feeders.read();
        if feeders.list.len() > direct.few {
            let favourite = self.favourite(&feeders, direct.favourite);
            drop(feeders);
            let Some(favourite) = favourite else { return Coverage::Partial };
            let covered = favourite.make_progress(in_earnest);
            let others_wait = self.empty_polls.load(Ordering::Relaxed).is_multiple_of(direct.partial_every);
            return if others_wait { Coverage::Partial } else { covered };
        }
        let some: SmallVec<[Arc<dyn Feeder>; 4]> =
            feeders.list.iter().filter_map(|feeding| feeding.feeder.upgrade()).collect();
        drop(feeders);
        // All of them, whatever the first one returns.
        let each = some.iter().map(|feeder| feeder.make_progress(in_earnest));
        each.fold(Coverage::Complete, Coverage::and)
    }

    fn favourite(&self, feeders: &Feeders, streak: u32) -> Option<Arc<dyn Feeder>> {
        if self.streak.load(Ordering::Relaxed) < streak {
            return None;
        }
        let at = *feeders.place.get(&self.favourite.load(Ordering::Relaxed))?;
        feeders.list.get(at)?.feeder.upgrade()
    }

    /// Counts an empty poll and returns how many there were in a row; a poll that found something resets the
    /// count.
    pub fn note_poll(&self, found: bool) -> u32 {
        if found {
            self.empty_polls.store(0, Ordering::Relaxed);
            return 0;
        }
        // The update is not atomic: two pollers may lose a count, which costs one more empty poll.
        let n = self.empty_polls.load(Ordering::Relaxed).wrapping_add(1);
        self.empty_polls.store(n, Ordering::Relaxed);
        n
    }
}

#[cfg(test)]
#[path = "cq/tests.rs"]
mod tests;
