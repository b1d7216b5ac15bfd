//! How threads wait for sockets.
//!
//! Each thread waits on a channel of its own, and enters it at every socket that it waits for. What changes a
//! socket wakes all of them; each thread then looks for itself. So no thread can take an event that another
//! one waits for, and a thread that waits for one socket sleeps on the network itself
//! ([`uwarp_driver::channel`]).

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_driver::{Channel, ChannelError, Nic, Uncancelled};
use uwarp_process::{Birth, Mutex};
use uwarp_rnic::CompletionSink;

/// The only event of these channels.
const WAKE: u64 = 1;

/// The threads that wait for one socket.
#[derive(Default)]
pub struct Waiters {
    channels: Mutex<SmallVec<[Arc<Channel>; 2]>, 23>,
    /// Is called after each change, beside them.
    observer: OnceLock<Observer>,
}

/// What is called after a change, with locks held: it may do no more than to wake a thread.
pub type Observer = Box<dyn Fn() + Send + Sync>;

impl Waiters {
    /// Something about the socket has changed.
    pub fn wake(&self) {
        for channel in self.channels.lock().iter() {
            channel.push_once(WAKE);
        }
        if let Some(observer) = self.observer.get() {
            observer();
        }
    }

    /// As [`Self::wake`], for a change that says nothing to the calling thread, which is about to leave: it
    /// would have to take back its own wake-up before it waits again, by two system calls.
    pub fn wake_others(&self) {
        let own = own_channel();
        for channel in self.channels.lock().iter() {
            if Arc::as_ptr(channel) != own {
                channel.push_once(WAKE);
            }
        }
        if let Some(observer) = self.observer.get() {
            observer();
        }
    }

    /// Sets what is called after each change, once.
    pub fn observe(&self, observer: Observer) {
        let _ = self.observer.set(observer);
    }
}

impl Waiters {
    /// Whether no thread waits.
    pub fn is_empty(&self) -> bool {
        self.channels.lock().is_empty()
    }
}

impl CompletionSink for Waiters {
    fn completion_event(&self, _: u64) {
        self.wake();
    }
}

thread_local! {
    /// For calls that sleep in the channel, and for calls that sleep on its descriptor beside others: the
    /// driver learns from each channel how its thread waits.
    static CHANNELS: RefCell<[Option<OfThread>; 2]> = const { RefCell::new([const { None }; 2]) };
}

/// The channel in which the calling thread sleeps.
fn own_channel() -> *const Channel {
    let known = CHANNELS.try_with(|channels| {
        let channels = channels.try_borrow().ok()?;
        channels.first()?.as_ref()?.channel.as_ref().map(Arc::as_ptr)
    });
    known.ok().flatten().unwrap_or(std::ptr::null())
}

struct OfThread {
    nic: Arc<Nic>,
    birth: Birth,
    /// Until it is dropped.
    channel: Option<Arc<Channel>>,
}

impl Drop for OfThread {
    /// The thread is ending, possibly cancelled, and closing a descriptor is a cancellation point: in a
    /// destructor of thread-local data, that would end the process.
    fn drop(&mut self) {
        if self.birth.is_parents() {
            // Closed here already, by number: the number may be another file's now. And a thread that is not
            // here may have its locks.
            std::mem::forget(self.channel.take());
            return;
        }
        let _uncancelled = Uncancelled::begin();
        self.channel = None;
    }
}

/// How a thread sleeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sleep {
    /// In [`Waiting::sleep`].
    InChannel,
    /// On [`Waiting::fd`], beside other descriptors.
    OnDescriptor,
}

/// A thread that waits. It leaves the sockets when this is dropped.
pub struct Waiting {
    channel: Arc<Channel>,
    at: SmallVec<[Arc<Waiters>; 4]>,
    until: Option<Instant>,
}

impl Waiting {
    /// Begins to wait, for `limit` at most.
    pub fn begin(nic: &Arc<Nic>, how: Sleep, limit: Option<Duration>) -> Result<Self, Errno> {
        let place = usize::from(how == Sleep::OnDescriptor);
        // A thread that is ending has no such data any more: sockets may be closed then, too.
        let known = CHANNELS.try_with(|channels| {
            let mut channels = channels.borrow_mut();
            let mut known = channels.get_mut(place).and_then(Option::take)?;
            if Arc::ptr_eq(&known.nic, nic) {
                return known.channel.take();
            }
            // Of the process that this one was forked from. Its descriptor is closed here already, and may
            // have become another one's.
            std::mem::forget(known);
            None
        });
        let channel = match known.ok().flatten() {
            Some(channel) => channel,
            // The program never sees the descriptor of a channel in which threads sleep.
            None if how == Sleep::InChannel => Channel::hidden(nic.engine())?,
            None => Channel::new(nic.engine())?,
        };
        while channel.take().is_some() {}
        let of_thread =
            OfThread { nic: Arc::clone(nic), birth: Birth::here(), channel: Some(Arc::clone(&channel)) };
        let _ = CHANNELS.try_with(|channels| {
            if let Some(place) = channels.borrow_mut().get_mut(place) {
                *place = Some(of_thread);
            }
        });
        // A limit that the clock cannot express is none.
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        Ok(Self { channel, at: SmallVec::new(), until })
    }

    /// Enters the thread at a socket. From now on changes of it wake the thread; the caller looks at the
    /// socket once more before it sleeps.
    pub fn enter(&mut self, waiters: &Arc<Waiters>) {
        waiters.channels.lock().push(Arc::clone(&self.channel));
        self.at.push(Arc::clone(waiters));
    }

    /// The channel, to arm completion queues for.
    pub fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Readable when the thread must look again.
    pub fn fd(&self) -> RawFd {
        self.channel.fd()
    }

    /// How long it may still wait; `None`: without limit.
    pub fn left(&self) -> Option<Duration> {
        self.until.map(|until| until.saturating_duration_since(Instant::now()))
    }

    /// Sleeps until the thread must look again. False: the limit is over.
    pub fn sleep(&self) -> Result<bool, Errno> {
        self.slept(self.channel.wait_for(self.left(), |first| self.take(first)))
    }

    /// The same, for a call that any signal ends.
    pub fn sleep_as_poll(&self) -> Result<bool, Errno> {
        self.slept(self.channel.wait_as_poll(self.left(), |first| self.take(first)))
    }

    fn take(&self, first: bool) -> Option<u64> {
        if first { self.channel.take_first() } else { self.channel.take() }
    }

    fn slept(&self, took: Result<u64, ChannelError>) -> Result<bool, Errno> {
        match took {
            Ok(_) => Ok(true),
            Err(ChannelError::Interrupted) => Err(Errno::INTR),
            Err(ChannelError::NothingYet | ChannelError::WouldBlock) => {
                Ok(self.left().is_none_or(|left| !left.is_zero()))
            }
        }
    }

    /// The thread has slept on the descriptor: takes what woke it.
    pub fn woken(&self) {
        while self.channel.take().is_some() {}
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        for waiters in &self.at {
            let mut channels = waiters.channels.lock();
            if let Some(at) = channels.iter().position(|channel| Arc::ptr_eq(channel, &self.channel)) {
                channels.swap_remove(at);
            }
        }
        self.channel.abandon();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call that ended rang its own bell, and silenced it when the next one began.
    #[test]
    fn a_change_that_is_none_for_the_calling_thread_wakes_the_others_only() {
        let nic = Nic::open().unwrap();
        let waiters = Arc::new(Waiters::default());
        let mut here = Waiting::begin(&nic, Sleep::InChannel, None).unwrap();
        here.enter(&waiters);
        std::thread::scope(|scope| {
            let (ready, is_ready) = std::sync::mpsc::channel();
            let waiters = &waiters;
            let nic = &nic;
            scope.spawn(move || {
                let mut there = Waiting::begin(nic, Sleep::InChannel, None).unwrap();
                there.enter(waiters);
                ready.send(()).unwrap();
                assert_eq!(there.sleep(), Ok(true));
            });
            is_ready.recv().unwrap();
            waiters.wake_others();
        });
        assert!(here.channel.is_empty());
        waiters.wake();
        assert!(!here.channel.is_empty());
    }
}
