//! The queue that events wait in.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use smallvec::SmallVec;
use uwarp_driver::{Channel, ChannelError, Nic};
use uwarp_process::{Condvar, Mutex, thread};

use crate::error::CmError;
use crate::event::{Event, EventKind, Owner};
use crate::runner::now;

/// How long [`crate::Id::destroy`] gives a thread that `poll` has told of an event to take it. Much longer
/// than a thread needs from `poll` to `rdma_get_cm_event` on a busy machine.
const TIME_TO_TAKE: Duration = Duration::from_millis(200);

/// Why [`EventChannel::get`] returned without an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GetError {
    /// None is queued, and the program set its descriptor to `O_NONBLOCK`.
    WouldBlock,
    /// A signal handler ran.
    Interrupted,
    /// The caller's time limit is over.
    NothingYet,
    /// The channel is closed: [`EventChannel::close`].
    Closed,
}

/// A queue of events in the order in which they happened, with a descriptor that is readable while it is not
/// empty.
///
/// Any number of ids report to it and any number of threads read from it.
pub struct EventChannel<I> {
    /// Counts the events and wakes threads; holds one cookie for each event in `queue`, the event's number.
    doorbell: Arc<Channel>,
    queue: Mutex<Queue<I>, 14>,
    /// An event was taken while a thread waited for that.
    taken: Condvar,
}

/// Events by number. Thousands can wait when a peer with as many connections goes away, and the program can
/// destroy their ids one by one without taking any event. Neither must search the events of all other ids.
struct Queue<I> {
    /// `None`: an event that was taken back.
    events: VecDeque<Option<Event<I>>>,
    /// Number of the first event in `events`.
    first: u64,
    /// Numbers by owner. Owners are this process's own numbers, so their hash need not be keyed.
    of: FxHashMap<u64, SmallVec<[u64; 2]>>,
    closed: bool,
    /// Threads that have taken an event, and have neither destroyed an id since then nor been waited for in
    /// vain.
    readers: SmallVec<[Pid; 2]>,
    /// Threads in [`EventChannel::let_reader_take`].
    waiting: usize,
}

impl<I> Default for Queue<I> {
    fn default() -> Self {
        Self {
            events: VecDeque::new(),
            first: 0,
            of: FxHashMap::default(),
            closed: false,
            readers: SmallVec::new(),
            waiting: 0,
        }
    }
}

impl<I: Owner> Queue<I> {
    fn push(&mut self, event: Event<I>) -> u64 {
        let number = self.first + self.events.len() as u64;
        self.of.entry(event.owner().key()).or_default().push(number);
        self.events.push_back(Some(event));
        number
    }

    /// Takes out the event with this number; leaves its owner's list as it is.
    fn remove(&mut self, number: u64) -> Option<Event<I>> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        let event = self.events.get_mut(index)?.take();
        while let Some(None) = self.events.front() {
            self.events.pop_front();
            self.first += 1;
        }
        event
    }

    /// So there are never more than the process has threads.
    fn forget_ended_readers(&mut self) {
        self.readers.retain(|reader| test_kill_process(*reader) != Err(Errno::SRCH));
    }

    fn forget(&mut self, key: u64, number: u64) {
        if let Some(numbers) = self.of.get_mut(&key) {
            numbers.retain(|n| *n != number);
            if numbers.is_empty() {
                self.of.remove(&key);
            }
        }
    }
}

impl<I: Owner> EventChannel<I> {
    /// An empty channel.
    pub fn new(nic: &Nic) -> Result<Arc<Self>, CmError> {
        Ok(Arc::new(Self {
            doorbell: Channel::new(nic.engine())?,
            queue: Mutex::default(),
            taken: Condvar::new(),
        }))
    }

    /// To poll for readability; the program may set it to `O_NONBLOCK`.
    pub fn fd(&self) -> RawFd {
        self.doorbell.fd()
    }

    /// The next event. Blocks while there is none (and moves data of all connections meanwhile), unless the
    /// program set the descriptor to `O_NONBLOCK`.
    ///
    /// The event's owner waits in [`crate::Id::destroy`] until it is acknowledged.
    pub fn get(&self) -> Result<Event<I>, GetError> {
        self.get_within(None)
    }

    /// Like [`Self::get`], for `limit` and little more.
    pub fn get_within(&self, limit: Option<Duration>) -> Result<Event<I>, GetError> {
        let next = |first| {
            if self.is_closed() { Some(Err(GetError::Closed)) } else { self.take_next(first).map(Ok) }
        };
        self.doorbell.wait_for(limit, next).unwrap_or_else(|error| {
            Err(match error {
                ChannelError::WouldBlock => GetError::WouldBlock,
                ChannelError::Interrupted => GetError::Interrupted,
                ChannelError::NothingYet => GetError::NothingYet,
            })
        })
    }

    /// No event is taken any more. Threads that wait return, and its descriptor stays readable for them.
    pub fn close(&self) {
        let mut queue = self.queue.lock();
        if !std::mem::replace(&mut queue.closed, true) {
            // Behind the numbers of all events; nobody takes it.
            self.doorbell.push(u64::MAX);
            self.taken.notify_all();
        }
    }

    /// Whether it is closed.
    pub fn is_closed(&self) -> bool {
        self.queue.lock().closed
    }

    /// The next event if there is one. `first`: this is the first try of a call that waits otherwise; see
    /// [`Channel::attend`].
    pub fn take_next(&self, first: bool) -> Option<Event<I>> {
        // Locked over both steps, as in `push`: an event whose number has been taken must not be taken back.
        // Otherwise another thread could take the event behind it and destroy the owner because of that one,
        // and the first event would never be reported.
        let mut queue = self.queue.lock();
        if queue.closed {
            return None;
        }
        let number = if first { self.doorbell.take_first() } else { self.doorbell.take() }?;
        let event = queue.remove(number)?;
        queue.forget(event.owner().key(), number);
        event.owner().event_reported();
        let this = thread();
        if !queue.readers.contains(&this) {
            queue.forget_ended_readers();
            queue.readers.push(this);
        }
        if queue.waiting > 0 {
            self.taken.notify_all();
        }
        drop(queue);
        if event.kind == EventKind::ConnectRequest {
            event.id.given();
            event.owner().request_delivered();
        }
        Some(event)
    }

    /// Counts the events, and wakes the threads that wait.
    pub fn doorbell(&self) -> &Channel {
        &self.doorbell
    }

    /// Whether the queue has events.
    pub fn is_empty(&self) -> bool {
        self.queue.lock().of.is_empty()
    }

    pub(crate) fn push(&self, event: Event<I>) {
        tracing::debug!(
            id = event.id.key(),
            kind = ?event.kind,
            status = event.status,
            "event"
        );
        // Locked over both steps, so that the numbers are queued in order.
        let mut queue = self.queue.lock();
        let number = queue.push(event);
        self.doorbell.push(number);
    }

    /// Before this owner's events are taken back. If another thread reads the channel, `poll` may have told
    /// it of them; it is on its way to [`Self::get`], and would wait there for ever. It is given the time to
    /// take them, as the kernel's way from `poll` to a destroyed id gives it.
    ///
    /// Returns at once if no other reader is left: a thread that is here does not read, and one that was
    /// waited for in vain does not count until it takes an event again. So threads that destroy ids at the
    /// same time do not wait for each other, and a program whose threads do not read pays once, not for each
    /// of its ids.
    pub(crate) fn let_reader_take(&self, key: u64) {
        self.let_reader_take_within(key, TIME_TO_TAKE);
    }

    fn let_reader_take_within(&self, key: u64, limit: Duration) {
        let mut queue = self.queue.lock();
        let this = thread();
        queue.readers.retain(|reader| *reader != this);
        if queue.waiting > 0 {
            self.taken.notify_all();
        }
        if !queue.of.contains_key(&key) {
            return;
        }
        queue.forget_ended_readers();
        let until = now().get() + limit;
        queue.waiting += 1;
        while !queue.closed && !queue.readers.is_empty() && queue.of.contains_key(&key) {
            let left = until.saturating_duration_since(now().get());
            if left.is_zero() {
                queue.readers.clear();
                break;
            }
            self.taken.wait_for(&mut queue, left);
        }
        queue.waiting -= 1;
    }

    /// Takes back all queued events of this owner. None of them is reported any more.
    pub(crate) fn take(&self, key: u64) -> Vec<Event<I>> {
        let mut queue = self.queue.lock();
        let Some(numbers) = queue.of.remove(&key) else { return Vec::new() };
        numbers.iter().for_each(|number| self.doorbell.remove_ascending(*number));
        numbers.into_iter().filter_map(|number| queue.remove(number)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::event::ConnParam;

    fn plain(id: &Arc<Watched>, kind: EventKind, status: i32) -> Event<Watched> {
        Event {
            id: Arc::clone(id),
            listener: None,
            kind,
            status,
            param: ConnParam::NONE,
            datagram: None,
            private_data: Vec::new(),
        }
    }

    /// Counts who looks at it.
    struct Watched {
        key: u64,
        looks: AtomicUsize,
    }

    impl Owner for Watched {
        fn key(&self) -> u64 {
            self.looks.fetch_add(1, Ordering::Relaxed);
            self.key
        }
        fn event_reported(&self) {}
        fn event_acknowledged(&self) {}
        fn request_delivered(&self) {}
        fn given(&self) {}
    }

    /// A test that waits for this long hangs.
    const FOR_EVER: Duration = Duration::from_secs(3600);

    /// Taking an id's events back once searched and moved the events of all other ids.
    #[test]
    fn events_are_taken_back_without_a_look_at_those_of_others() {
        const COUNT: u64 = 500;
        let channel = EventChannel::new(&Nic::open().unwrap()).unwrap();
        let ids: Vec<_> =
            (0..COUNT).map(|key| Arc::new(Watched { key, looks: AtomicUsize::new(0) })).collect();
        for id in ids.iter().chain(&ids) {
            channel.push(plain(id, EventKind::User(1), 0));
        }
        let looks = || ids.iter().map(|id| id.looks.load(Ordering::Relaxed)).collect::<Vec<_>>();
        let before = looks();
        // In reverse order: the events of all others are in front.
        for key in (1..COUNT).rev() {
            assert_eq!(channel.take(key).len(), 2);
        }
        assert_eq!(looks(), before);
        for _ in 0..2 {
            assert!(Arc::ptr_eq(&channel.take_next(false).unwrap().id, &ids[0]));
        }
        assert!(channel.take_next(false).is_none() && channel.is_empty() && channel.doorbell().is_empty());
    }

    /// Without a thread that takes the events, the program waits once, and not for each of its ids.
    #[test]
    fn only_a_thread_that_reads_is_given_the_time_to_take_an_event() {
        let channel = EventChannel::new(&Nic::open().unwrap()).unwrap();
        let ids: Vec<_> = (0..3).map(|key| Arc::new(Watched { key, looks: AtomicUsize::new(0) })).collect();
        ids.iter().for_each(|id| channel.push(plain(id, EventKind::User(1), 0)));
        channel.let_reader_take(0);
        assert!(channel.take_next(false).is_some_and(|event| event.owner().key == 0), "nobody has read");
        channel.let_reader_take(1);
        assert!(!channel.queue.lock().of.is_empty(), "the caller itself has read");
        std::thread::scope(|scope| {
            let (told, is_told) = std::sync::mpsc::channel();
            let (until, end) = std::sync::mpsc::channel::<()>();
            let channel = &channel;
            scope.spawn(move || {
                assert!(channel.take_next(false).is_some_and(|event| event.owner().key == 1));
                told.send(()).unwrap();
                // On its way from poll to the event.
                while channel.queue.lock().waiting == 0 {
                    std::thread::yield_now();
                }
                assert!(channel.take_next(false).is_some_and(|event| event.owner().key == 2));
                end.recv().unwrap();
            });
            is_told.recv().unwrap();
            channel.let_reader_take(2);
            assert!(channel.is_empty(), "the reader has taken the event");
            channel.push(plain(&ids[0], EventKind::User(1), 0));
            channel.let_reader_take(0);
            assert!(channel.queue.lock().readers.is_empty(), "it does not read");
            assert!(!channel.is_empty());
            until.send(()).unwrap();
        });
    }

    /// Only the thread that had taken the last event was remembered: if it destroyed an id itself, the other
    /// readers were told of events that were then taken back.
    #[test]
    fn all_threads_that_read_are_given_the_time_to_take_an_event() {
        let channel = EventChannel::new(&Nic::open().unwrap()).unwrap();
        let ids: Vec<_> = (0..3).map(|key| Arc::new(Watched { key, looks: AtomicUsize::new(0) })).collect();
        ids.iter().for_each(|id| channel.push(plain(id, EventKind::User(1), 0)));
        let (told, is_told) = std::sync::mpsc::channel();
        let channel = &channel;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                assert!(channel.take_next(false).is_some_and(|event| event.owner().key == 0));
                told.send(()).unwrap();
                while channel.queue.lock().waiting == 0 {
                    std::thread::yield_now();
                }
                assert!(channel.take_next(false).is_some_and(|event| event.owner().key == 2));
            });
            is_told.recv().unwrap();
            assert!(channel.take_next(false).is_some_and(|event| event.owner().key == 1));
            channel.let_reader_take_within(2, FOR_EVER);
            assert!(channel.is_empty(), "the other reader has taken the event");
        });
    }

    /// Each has taken an event and destroys an id with another one.
    #[test]
    fn threads_that_destroy_ids_do_not_wait_for_each_other() {
        let channel = EventChannel::new(&Nic::open().unwrap()).unwrap();
        let ids: Vec<_> = (0..2).map(|key| Arc::new(Watched { key, looks: AtomicUsize::new(0) })).collect();
        ids.iter().for_each(|id| channel.push(plain(id, EventKind::User(1), 0)));
        assert!(channel.take_next(false).is_some() && channel.take_next(false).is_some());
        ids.iter().for_each(|id| channel.push(plain(id, EventKind::User(2), 0)));
        let channel = &channel;
        std::thread::scope(|scope| {
            scope.spawn(move || channel.let_reader_take_within(0, FOR_EVER));
            while channel.queue.lock().waiting == 0 {
                std::thread::yield_now();
            }
            channel.let_reader_take_within(1, FOR_EVER);
        });
        assert!(!channel.is_empty() && channel.queue.lock().waiting == 0);
    }

    /// Two threads take the events of one channel. The thread that takes the owner's second event destroys
    /// the owner while the other thread is about to take the first: that event was never reported.
    #[test]
    fn an_event_that_another_thread_is_taking_is_reported_before_those_behind_it() {
        const COUNT: u64 = 20_000;
        let channel = EventChannel::<Watched>::new(&Nic::open().unwrap()).unwrap();
        let [firsts, seconds, dropped] = [const { AtomicUsize::new(0) }; 3];
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while seconds.load(Ordering::Relaxed) < COUNT as usize {
                        match channel.take_next(false) {
                            Some(Event { kind: EventKind::User(1), .. }) => {
                                firsts.fetch_add(1, Ordering::Relaxed);
                            }
                            Some(event) => {
                                let taken_back = channel.take(event.owner().key()).len();
                                dropped.fetch_add(taken_back, Ordering::Relaxed);
                                seconds.fetch_add(1, Ordering::Relaxed);
                            }
                            None => std::thread::yield_now(),
                        }
                    }
                });
            }
            for key in 0..COUNT {
                let id = Arc::new(Watched { key, looks: AtomicUsize::new(0) });
                channel.push(plain(&id, EventKind::User(1), 0));
                channel.push(plain(&id, EventKind::User(2), 0));
            }
        });
        assert_eq!((firsts.into_inner() as u64, dropped.into_inner()), (COUNT, 0));
    }
}
