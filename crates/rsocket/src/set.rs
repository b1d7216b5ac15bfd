//! Sets of descriptors (`repoll_create`): as epoll's, of sockets and of other descriptors, level-triggered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_process::Mutex;

use crate::number::Number;
use crate::poll::{Kernel, PollFd, bit, poll_with};
use crate::waiting::Waiters;

/// After an event, the descriptor stays silent until it is changed (`EPOLLONESHOT`).
const ONE_SHOT: u32 = 1 << 30;

/// A descriptor in a set.
#[derive(Debug, Clone, Copy)]
struct Member {
    fd: i32,
    /// `EPOLL…`: the lower 16 bits are poll(2)'s.
    events: u32,
    data: u64,
    silent: bool,
}

/// An event of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetEvent {
    /// `EPOLLIN` and so on.
    pub events: u32,
    /// The program's.
    pub data: u64,
}

/// A change of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Change {
    Add(SetEvent),
    Modify(SetEvent),
    Delete,
}

/// A set of descriptors.
pub struct Set {
    number: Number,
    members: Mutex<Vec<Member>, 29>,
    waiters: Arc<Waiters>,
    /// Changes so far.
    changes: AtomicU64,
    closed: AtomicBool,
}

impl Set {
    /// An empty set.
    pub fn new() -> Result<Arc<Self>, Errno> {
        Ok(Arc::new(Self {
            number: Number::new()?,
            members: Mutex::default(),
            waiters: Arc::default(),
            changes: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }))
    }

    /// Its number.
    pub fn fd(&self) -> i32 {
        self.number.value()
    }

    /// See [`Number::disown`].
    pub(crate) fn disown_number(&self) {
        self.number.disown();
    }

    /// Adds, changes or removes a descriptor. Threads that wait notice it.
    pub fn change(&self, fd: i32, change: Change) -> Result<(), Errno> {
        let mut members = self.members.lock();
        let at = members.iter().position(|member| member.fd == fd);
        match (change, at) {
            (Change::Add(_), Some(_)) => return Err(Errno::EXIST),
            (Change::Modify(_) | Change::Delete, None) => return Err(Errno::NOENT),
            (Change::Add(SetEvent { events, data }), None) => {
                members.push(Member { fd, events, data, silent: false });
            }
            (Change::Modify(SetEvent { events, data }), Some(at)) => {
                if let Some(member) = members.get_mut(at) {
                    *member = Member { fd, events, data, silent: false };
                }
            }
            (Change::Delete, Some(at)) => {
                members.swap_remove(at);
            }
        }
        drop(members);
        self.changes.fetch_add(1, Ordering::Release);
        self.waiters.wake();
        Ok(())
    }

    /// Waits for events, at most for `limit`; gives them to `tell`, at most `max`, and returns how many.
    pub fn wait(
        &self,
        max: usize,
        limit: Option<Duration>,
        kernel: Kernel<'_>,
        mut tell: impl FnMut(usize, SetEvent),
    ) -> Result<usize, Errno> {
        let until = limit.and_then(|limit| Instant::now().checked_add(limit));
        loop {
            let changes = self.changes.load(Ordering::Acquire);
            let changed =
                || self.changes.load(Ordering::Acquire) != changes || self.closed.load(Ordering::Acquire);
            let mut fds: SmallVec<[PollFd; 16]> = {
                let members = self.members.lock();
                let awake = members.iter().filter(|member| !member.silent);
                awake.map(|m| PollFd { fd: m.fd, events: m.events as i16, revents: 0 }).collect()
            };
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let ready = poll_with(&mut fds, left, kernel, Some((&self.waiters, &changed)))?;
            if self.closed.load(Ordering::Acquire) {
                return Err(Errno::BADF);
            }
            let told = if ready > 0 { self.tell(&fds, max, &mut tell) } else { 0 };
            if told > 0 || left.is_some_and(|left| left.is_zero()) {
                return Ok(told);
            }
        }
    }

    /// Reports what is ready and still a member. If there is more than fits, those that were reported stand
    /// last the next time, so that no member is passed over forever.
    fn tell(&self, fds: &[PollFd], max: usize, tell: &mut impl FnMut(usize, SetEvent)) -> usize {
        let mut members = self.members.lock();
        let mut told = 0;
        for ready in fds.iter().filter(|entry| entry.revents != 0) {
            if told == max {
                break;
            }
            let Some(at) = members.iter().position(|member| member.fd == ready.fd) else { continue };
            if ready.revents & bit::NVAL != 0 {
                // Closed since it was added.
                members.remove(at);
                continue;
            }
            if let Some(member) = members.get_mut(at) {
                member.silent = member.events & ONE_SHOT != 0;
                let events = u32::from(ready.revents.cast_unsigned());
                tell(told, SetEvent { events, data: member.data });
                told += 1;
            }
            if told == max && at < members.len() {
                members.rotate_left(at + 1);
            }
        }
        told
    }

    /// Threads that wait return `EBADF`.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.waiters.wake();
    }
}
