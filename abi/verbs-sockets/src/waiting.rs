//! How threads wait for sockets: each on a descriptor of its own, beside the completion channels of the
//! sockets that it waits for. What changes a socket wakes all of them, and each looks for itself.

use std::cell::OnceCell;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_process::Mutex;
use uwarp_rsocket::poll::{PollFd, bit};

use crate::calls::kernel_poll;

/// The threads that wait for one socket.
#[derive(Default)]
pub struct Waiters(Mutex<SmallVec<[Arc<OwnedFd>; 2]>, 29>);

impl Waiters {
    /// Something about the socket has changed.
    pub fn wake(&self) {
        for thread in self.0.lock().iter() {
            // It is full only if it was woken often enough.
            let _ = rustix::io::write(&**thread, &1u64.to_ne_bytes());
        }
    }
}

/// A new descriptor to be woken by.
pub fn new_wakeup() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// Takes what has woken it.
pub fn take_wakeup(fd: &OwnedFd) {
    let _ = rustix::io::read(fd, &mut [0u8; 8]);
}

thread_local! {
    static OF_THREAD: OnceCell<Arc<OwnedFd>> = const { OnceCell::new() };
}

fn of_thread() -> Result<Arc<OwnedFd>, Errno> {
    let known = OF_THREAD.try_with(|cell| cell.get().cloned());
    if let Ok(Some(known)) = known {
        return Ok(known);
    }
    let new = Arc::new(new_wakeup()?);
    // A thread that is ending keeps none.
    let _ = OF_THREAD.try_with(|cell| cell.set(Arc::clone(&new)));
    Ok(new)
}

/// A thread that waits. It leaves the sockets when this is dropped.
pub struct Waiting {
    wakeup: Arc<OwnedFd>,
    at: SmallVec<[Arc<Waiters>; 4]>,
    until: Option<Instant>,
}

impl Waiting {
    /// Begins to wait, for `limit` at most.
    pub fn begin(limit: Option<Duration>) -> Result<Self, Errno> {
        let wakeup = of_thread()?;
        take_wakeup(&wakeup);
        // A limit that the clock cannot express is none.
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        Ok(Self { wakeup, at: SmallVec::new(), until })
    }

    /// From now on changes of the socket wake the thread.
    pub fn enter(&mut self, waiters: &Arc<Waiters>) {
        waiters.0.lock().push(Arc::clone(&self.wakeup));
        self.at.push(Arc::clone(waiters));
    }

    /// Sleeps until one of the descriptors is ready, or a socket has changed. False: the limit is over.
    pub fn sleep(&self, beside: impl Iterator<Item = PollFd>) -> Result<bool, Errno> {
        let mut fds: SmallVec<[PollFd; 8]> = beside.collect();
        fds.push(PollFd { fd: self.wakeup.as_raw_fd(), events: bit::IN, revents: 0 });
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        let ready = kernel_poll(&mut fds, left)?;
        take_wakeup(&self.wakeup);
        Ok(ready > 0)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        for waiters in &self.at {
            let mut threads = waiters.0.lock();
            if let Some(at) = threads.iter().position(|thread| Arc::ptr_eq(thread, &self.wakeup)) {
                threads.swap_remove(at);
            }
        }
    }
}

/// In poll(2)'s form: readable.
pub fn readable(fd: RawFd) -> PollFd {
    PollFd { fd, events: bit::IN, revents: 0 }
}
