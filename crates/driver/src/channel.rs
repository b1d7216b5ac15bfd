//! Event queues with a descriptor: completion channels and the like.

use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use crate::engine::{Engine, LEAD};
use crate::fork;
use crate::sync::{AtomicBool, AtomicI32, Mutex, Ordering, spin_loop, thread_local};
use crate::sys::{self, Bell};

/// Why no event was returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelError {
    /// The descriptor is non-blocking and there is no event (`EAGAIN`).
    WouldBlock,
    /// A signal handler that does not restart calls has run (`EINTR`).
    Interrupted,
    /// The caller's limit is over.
    NothingYet,
}

#[derive(Default)]
struct Queue {
    events: VecDeque<u64>,
    /// The descriptor is readable.
    raised: bool,
}

/// A queue of events, each a cookie of the object it is about. Its descriptor is readable while events wait.
pub struct Channel {
    engine: Arc<Engine>,
    queue: Mutex<Queue>,
    descriptor: Bell,
    /// A thread that blocks on this channel sleeps on the sockets.
    leading: AtomicBool,
    /// The last event was there when it was asked for: the program waits on the descriptor, not here.
    waits_elsewhere: AtomicBool,
    /// Waits that a short look spared, less those it did not; negative: waits to go without looking.
    luck: AtomicI32,
}

/// Longest look before a sleep: about what falling asleep and being woken costs on both sides.
const SPIN: Duration = Duration::from_micros(20);
const MOST_LUCK: i32 = 4;
const WITHOUT_SPIN: i32 = 64;

/// In place of a lead: the thread looks for a short while only.
const NO_LEAD: u64 = 0;

thread_local! {
    /// The channel this thread blocks on, by address, and its lead: events it brings about itself need no descriptor. The lead
    /// tells whether it has left that call without a word.
    static BLOCKED_ON: Cell<(usize, u64)> = const { Cell::new((0, NO_LEAD)) };
}

/// The calling thread has left the call in which it blocked on a channel, perhaps without a word: with a jump out of the handler of
/// a signal while it looked there for a short while. An event that it brings about now goes to the descriptor.
pub(crate) fn waits_no_more() {
    // A thread that is ending waits for nothing.
    let _ = BLOCKED_ON.try_with(|on| on.set((0, NO_LEAD)));
}

impl Channel {
    /// A new channel on the process's engine.
    pub fn new(engine: &Arc<Engine>) -> Result<Arc<Self>, Errno> {
        let descriptor = Bell::new(false)?;
        fork::track(descriptor.fd());
        Ok(Arc::new(Self {
            engine: engine.clone(),
            queue: Mutex::default(),
            descriptor,
            leading: AtomicBool::new(false),
            waits_elsewhere: AtomicBool::new(true),
            luck: AtomicI32::new(0),
        }))
    }

    /// The descriptor, for `poll` and the like. The program may set `O_NONBLOCK` on it, which [`Self::get`] honours.
    pub fn fd(&self) -> RawFd {
        self.descriptor.fd()
    }

    /// Queues an event.
    pub fn push(&self, cookie: u64) {
        let mut queue = self.queue.lock();
        queue.events.push_back(cookie);
        let (blocked_on, lead) = BLOCKED_ON.with(Cell::get);
        if blocked_on == std::ptr::from_ref(self).addr() && (lead == NO_LEAD || self.engine.leads(lead)) {
            return;
        }
        self.raise(&mut queue);
        drop(queue);
        self.wake_leader();
    }

    fn wake_leader(&self) {
        if self.leading.load(Ordering::SeqCst) {
            self.engine.wake();
        }
    }

    fn raise(&self, queue: &mut Queue) {
        if !queue.raised {
            queue.raised = true;
            self.descriptor.ring();
        }
    }

    fn pop(&self) -> Option<u64> {
        let mut queue = self.queue.lock();
        let event = queue.events.pop_front();
        if queue.events.is_empty() {
            if queue.raised {
                queue.raised = false;
                self.descriptor.silence();
            }
        } else if event.is_some() {
            // Others wait for what is left: at the descriptor, or on the sockets.
            self.raise(&mut queue);
            drop(queue);
            self.wake_leader();
        }
        event
    }

    /// The oldest event. Blocks until there is one, unless the descriptor is non-blocking; meanwhile the calling thread
    /// serves the sockets.
    pub fn get(&self) -> Result<u64, ChannelError> {
        self.get_within(None)
    }

    /// Like [`Self::get`], for `limit` and little more.
    pub fn get_within(&self, limit: Option<Duration>) -> Result<u64, ChannelError> {
        let until = limit.map(|limit| sys::now() + limit);
        let left = || until.map(|until| until.saturating_duration_since(sys::now()));
        if let Some(event) = self.take_first() {
            return Ok(event);
        }
        loop {
            let there = self.attend(left())?;
            if let Some(event) = self.take() {
                return Ok(event);
            }
            if left().is_some_and(|left| left.is_zero()) {
                return Err(ChannelError::NothingYet);
            }
            if !there {
                let waited = self.descriptor.wait(left());
                if let Some(event) = self.take() {
                    return Ok(event);
                }
                if waited == Err(Errno::INTR) && !fork::interruptions_restart() {
                    return Err(ChannelError::Interrupted);
                }
            }
        }
    }

    /// The oldest event, at the beginning of a call that takes one: one that is there already says that the program waits
    /// elsewhere.
    pub fn take_first(&self) -> Option<u64> {
        let event = self.pop();
        self.waits_elsewhere.store(event.is_some(), Ordering::Relaxed);
        event
    }

    /// The oldest event.
    pub fn take(&self) -> Option<u64> {
        self.pop()
    }

    /// Serves the sockets until there is an event, for a few milliseconds at most (and no longer than `limit`). Returns whether there is
    /// one, for [`Self::take`]. If not, the caller sleeps until the descriptor is readable, in whatever way it likes, and takes
    /// what is there: the background thread serves the sockets meanwhile.
    ///
    /// The descriptor may not be readable although there is an event, until the caller has taken it: one that does not come to that
    /// calls [`Self::abandon`].
    pub fn attend(&self, limit: Option<Duration>) -> Result<bool, ChannelError> {
        waits_no_more();
        if fork::nonblocking(self.fd()) {
            self.engine.poll_once();
            return if self.is_empty() { Err(ChannelError::WouldBlock) } else { Ok(true) };
        }
        // What this thread polled in earnest it polls no more.
        self.engine.unpark();
        if self.spin() {
            return Ok(true);
        }
        let Some(leader) = self.engine.lead() else { return Ok(!self.is_empty()) };
        let until = sys::now() + limit.map_or(LEAD, |limit| limit.min(LEAD));
        let blocked = Blocked::on(self, leader.lead());
        // Looks before sleeping: an event pushed before `leading` was set woke nobody. Keeps the lead until there is an event: giving
        // it up and taking it again wakes the background thread each time.
        while self.is_empty() {
            let left = until.saturating_duration_since(sys::now());
            if left.is_zero() {
                drop(blocked);
                leader.retire();
                return Ok(!self.is_empty());
            }
            if leader.wait(Some(left)) == Err(Errno::INTR)
                && self.is_empty()
                && !fork::interruptions_restart()
            {
                return Err(ChannelError::Interrupted);
            }
        }
        Ok(true)
    }

    /// A thread that was about to take an event is gone, or does something else.
    pub fn abandon(&self) {
        let mut queue = self.queue.lock();
        if !queue.events.is_empty() {
            self.raise(&mut queue);
            drop(queue);
            self.wake_leader();
        }
    }

    /// Whether a signal's handler that has run interrupts a call that waits, as it would a blocking `read`.
    pub fn interruptible() -> bool {
        !fork::interruptions_restart()
    }

    /// The program armed something that reports here, and is going to wait. If it waits on the descriptor, the background
    /// thread has to bring the event about; a thread that blocks in [`Self::get`] does so itself.
    pub fn armed(&self) {
        if self.waits_elsewhere.load(Ordering::Relaxed) {
            self.engine.hand_over();
        }
    }

    /// Looks for a short while before going to sleep, as long as that has paid off lately: falling asleep and being woken costs
    /// more than most replies take. Says whether there is an event.
    fn spin(&self) -> bool {
        let luck = self.luck.load(Ordering::Relaxed);
        if luck < 0 {
            // Out of luck: try again now and then.
            self.luck.store(luck + 1, Ordering::Relaxed);
            return false;
        }
        let start = sys::now();
        loop {
            self.engine.note_earnest(false);
            BLOCKED_ON.with(|on| on.set((std::ptr::from_ref(self).addr(), NO_LEAD)));
            self.engine.poll_once();
            BLOCKED_ON.with(|on| on.set((0, NO_LEAD)));
            if !self.is_empty() {
                self.luck.store((luck + 1).min(MOST_LUCK), Ordering::Relaxed);
                return true;
            }
            if sys::now().saturating_duration_since(start) > SPIN {
                self.luck.store(if luck > 0 { luck - 1 } else { -WITHOUT_SPIN }, Ordering::Relaxed);
                return false;
            }
            spin_loop();
        }
    }

    /// Drops the queued events with this cookie (its object is going away); returns how many there were.
    pub fn remove(&self, cookie: u64) -> usize {
        self.remove_if(|event| event == cookie)
    }

    /// Drops the queued events that `gone` picks; returns how many there were.
    pub fn remove_if(&self, gone: impl Fn(u64) -> bool) -> usize {
        let mut queue = self.queue.lock();
        let before = queue.events.len();
        queue.events.retain(|event| !gone(*event));
        let removed = before - queue.events.len();
        if queue.events.is_empty() && queue.raised {
            queue.raised = false;
            self.descriptor.silence();
        }
        removed
    }

    /// Whether no event waits.
    pub fn is_empty(&self) -> bool {
        self.queue.lock().events.is_empty()
    }
}

/// A thread sleeps on the sockets for this channel.
struct Blocked<'a>(&'a Channel);

impl<'a> Blocked<'a> {
    fn on(channel: &'a Channel, lead: u64) -> Self {
        channel.leading.store(true, Ordering::SeqCst);
        BLOCKED_ON.with(|on| on.set((std::ptr::from_ref(channel).addr(), lead)));
        Self(channel)
    }
}

impl Drop for Blocked<'_> {
    fn drop(&mut self) {
        BLOCKED_ON.with(|on| on.set((0, NO_LEAD)));
        self.0.leading.store(false, Ordering::SeqCst);
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        fork::untrack(self.descriptor.fd());
    }
}
