//! The queue that events wait in.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;

use parking_lot::Mutex;
use uwarp_driver::{Channel, ChannelError, Nic};

use crate::{CmError, Event, EventKind};

/// Why [`EventChannel::get`] returned without an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GetError {
    /// None is queued, and the program set its descriptor to `O_NONBLOCK`.
    WouldBlock,
    /// A signal handler ran.
    Interrupted,
}

/// A queue of events in the order in which they happened, with a descriptor that is readable while there are any.
///
/// Any number of ids report to it and any number of threads read from it.
pub struct EventChannel {
    /// Counts and wakes; holds one cookie, the owner's key, for each event in `queue`.
    doorbell: Arc<Channel>,
    queue: Mutex<VecDeque<Event>>,
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
        loop {
            let key = match self.doorbell.get() {
                Ok(key) => key,
                Err(ChannelError::WouldBlock) => return Err(GetError::WouldBlock),
                Err(ChannelError::Interrupted) => return Err(GetError::Interrupted),
            };
            let mut queue = self.queue.lock();
            // Gone when its owner was destroyed or migrated between the two queues.
            let Some(at) = queue.iter().position(|event| event.owner().key() == key) else { continue };
            let Some(event) = queue.remove(at) else { continue };
            event.owner().event_reported();
            drop(queue);
            if event.kind == EventKind::ConnectRequest {
                event.owner().request_delivered();
            }
            return Ok(event);
        }
    }

    /// Whether events wait.
    pub fn is_empty(&self) -> bool {
        self.queue.lock().is_empty()
    }

    pub(crate) fn push(&self, event: Event) {
        tracing::debug!(
            id = event.id.key(),
            kind = ?event.kind,
            status = event.status,
            "event"
        );
        let key = event.owner().key();
        self.queue.lock().push_back(event);
        self.doorbell.push(key);
    }

    /// Takes back all events that this owner has queued. None of them is reported any more.
    pub(crate) fn take(&self, key: u64) -> Vec<Event> {
        let mut queue = self.queue.lock();
        self.doorbell.remove(key);
        let (taken, kept) =
            std::mem::take(&mut *queue).into_iter().partition(|event| event.owner().key() == key);
        *queue = kept;
        Vec::from(taken)
    }
}
