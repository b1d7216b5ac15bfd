//! The queue that events wait in.

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::SmallVec;
use uwarp_driver::{Channel, ChannelError, Nic};

use crate::{CmError, Event, EventKind};

/// Why [`EventChannel::get`] returned without an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GetError {
    /// None is queued, and the program set its descriptor to `O_NONBLOCK`.
    WouldBlock,
    /// A signal handler ran.
    Interrupted,
    /// The caller's limit is over.
    NothingYet,
}

/// A queue of events in the order in which they happened, with a descriptor that is readable while there are any.
///
/// Any number of ids report to it and any number of threads read from it.
pub struct EventChannel {
    /// Counts and wakes; holds one cookie, its number, for each event in `queue`.
    doorbell: Arc<Channel>,
    queue: Mutex<Queue>,
}

/// Events by number. Thousands may wait when a peer with as many connections goes away, and the program may destroy their ids
/// one by one without having looked at any: neither may cost a walk over the others.
#[derive(Default)]
struct Queue {
    /// Those that were taken back leave a hole.
    events: VecDeque<Option<Event>>,
    /// Number of the first of them.
    first: u64,
    /// Numbers by owner.
    of: HashMap<u64, SmallVec<[u64; 2]>>,
}

impl Queue {
    fn push(&mut self, event: Event) -> u64 {
        let number = self.first + self.events.len() as u64;
        self.of.entry(event.owner().key()).or_default().push(number);
        self.events.push_back(Some(event));
        number
    }

    /// The event with this number; leaves its owner's list as it is.
    fn remove(&mut self, number: u64) -> Option<Event> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        let event = self.events.get_mut(index)?.take();
        while let Some(None) = self.events.front() {
            self.events.pop_front();
            self.first += 1;
        }
        event
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

impl EventChannel {
    /// An empty channel.
    pub fn new(nic: &Nic) -> Result<Arc<Self>, CmError> {
        Ok(Arc::new(Self { doorbell: Channel::new(nic.engine())?, queue: Mutex::default() }))
    }

    /// To poll for readability; the program may set it to `O_NONBLOCK`.
    pub fn fd(&self) -> RawFd {
        self.doorbell.fd()
    }

    /// The next event. Blocks while there is none (and moves data of all connections meanwhile), unless the program set
    /// the descriptor to `O_NONBLOCK`.
    ///
    /// The event's owner waits in [`crate::Id::destroy`] until it is acknowledged.
    pub fn get(&self) -> Result<Event, GetError> {
        self.get_within(None)
    }

    /// Like [`Self::get`], for `limit` and little more.
    pub fn get_within(&self, limit: Option<Duration>) -> Result<Event, GetError> {
        loop {
            let number = match self.doorbell.get_within(limit) {
                Ok(number) => number,
                Err(ChannelError::WouldBlock) => return Err(GetError::WouldBlock),
                Err(ChannelError::Interrupted) => return Err(GetError::Interrupted),
                Err(ChannelError::NothingYet) => return Err(GetError::NothingYet),
            };
            if let Some(event) = self.event(number) {
                return Ok(event);
            }
        }
    }

    /// The next event if there is one. `first`: at the beginning of a call that waits for one otherwise, in the way that
    /// [`Channel::attend`] says.
    pub fn take_next(&self, first: bool) -> Option<Event> {
        let mut number = if first { self.doorbell.take_first() } else { self.doorbell.take() };
        while let Some(rung) = number {
            if let Some(event) = self.event(rung) {
                return Some(event);
            }
            number = self.doorbell.take();
        }
        None
    }

    /// What counts the events, and wakes those that wait.
    pub fn doorbell(&self) -> &Channel {
        &self.doorbell
    }

    /// Hands an event out. `None`: it went when its owner was destroyed or migrated between the two queues.
    fn event(&self, number: u64) -> Option<Event> {
        let mut queue = self.queue.lock();
        let event = queue.remove(number)?;
        queue.forget(event.owner().key(), number);
        event.owner().event_reported();
        drop(queue);
        if event.kind == EventKind::ConnectRequest {
            event.owner().request_delivered();
        }
        Some(event)
    }

    /// Whether events wait.
    pub fn is_empty(&self) -> bool {
        self.queue.lock().of.is_empty()
    }

    pub(crate) fn push(&self, event: Event) {
        tracing::debug!(
            id = event.id.key(),
            kind = ?event.kind,
            status = event.status,
            "event"
        );
        // The lock is held over both, so that the numbers ring in their order.
        let mut queue = self.queue.lock();
        let number = queue.push(event);
        self.doorbell.push(number);
    }

    /// Takes back all events that this owner has queued. None of them is reported any more.
    pub(crate) fn take(&self, key: u64) -> Vec<Event> {
        let mut queue = self.queue.lock();
        let Some(numbers) = queue.of.remove(&key) else { return Vec::new() };
        self.doorbell.remove_if(|number| numbers.contains(&number));
        numbers.into_iter().filter_map(|number| queue.remove(number)).collect()
    }
}
