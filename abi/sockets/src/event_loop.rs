//! A thread that waits for descriptors makes progress itself.
//!
//! Otherwise each request to a program with an event loop costs three thread switches: the engine's
//! background thread receives, the library's thread shows the change on the stand-in, the program's
//! `epoll_wait` wakes. `redis-server` answered a tenth as many requests as over TCP.
//!
//! * *A thread that waits leads.* `epoll_wait`, `epoll_pwait`, `epoll_pwait2`, `poll`, `ppoll`, `select` and
//!   `pselect` look at the network, show what that has changed, and ask the kernel without waiting. If
//!   nothing is ready, they sleep in `ppoll` (`pselect`) on the program's descriptors and on the engine's
//!   together. So what comes from the network wakes this thread and no other one.
//! * *What is ready, the kernel says in any case*, by the program's own call with no limit. So edges,
//!   one-shot and exclusive members, sets within sets and the number of events are the kernel's. Both calls
//!   get the signal mask, so it is changed in one step with the sleep.
//! * *Signals come only in the kernel's calls.* The thread blocks them for the rest of the call, so a
//!   handler never finds a lock of the library held: it may send on the same socket, or jump. A signal that
//!   comes just before the thread sleeps ends the call.
//! * *One thread leads.* Others that wait sleep in the kernel's call, and are woken by what the leader
//!   shows.
//! * *A lead ends after 5 ms without input.* Then the background thread serves, and this one sleeps in the
//!   kernel's call. A thread that has left its call by a jump or was cancelled holds nothing, as poll(2)
//!   takes no event from epoll; but until its lead ends (up to 55 ms) nobody serves the network.
//! * *The background thread stays away between the leads of a loop*, for 1 ms (`NAP_BESIDE_LOOPS`). A loop
//!   that handles fifty requests takes longer than the 50 µs that it naps beside threads that poll; without
//!   this it went back to the sockets in between. A loop that computes keeps its peers waiting for 1 to 2
//!   ms.
//! * *A look asks nothing of the system* (`Stream::known_readiness`): what arrives is the business of the
//!   thread that serves the sockets.
//! * *The thread that served shows the changes* (`Engine::settle_by`). An observer is called with locks
//!   held, so it only notes the socket, and only if somebody waits for this change; the thread shows it when
//!   it has released its locks.
//!
//! What is left: each request costs a byte through the stand-in, one call to show it and one to clear it. A
//! program without such a socket pays one relaxed load for each call. docs/adr/rejected.md has the other
//! ways.

use std::ffi::c_int;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use libc::{fd_set, nfds_t, pollfd};
use uwarp_abi_types::preload::{FOR_EVER, NO_MORE, progress};

use crate::rsockets::Rsockets;
use crate::{process, sys, watch};

static PROGRESS: OnceLock<progress> = OnceLock::new();

/// A socket is followed: asks how progress is made, the first time.
pub fn begin(calls: &Rsockets, socket: c_int) {
    if PROGRESS.get().is_none()
        && let Some(progress) = calls.progress(socket)
    {
        let _ = PROGRESS.set(progress);
    }
}

/// How a thread that waits now makes progress. `None`: it has nothing to do with it.
#[inline]
pub fn progress() -> Option<&'static progress> {
    if watch::any() && !process::is_forked() { PROGRESS.get() } else { None }
}

/// The right to sleep on the device.
struct Lead {
    progress: &'static progress,
    /// 0: it is over.
    lead: u64,
}

impl Lead {
    fn begin(progress: &'static progress) -> Option<Self> {
        let lead = sys::quietly(|| (progress.begin)());
        (lead != 0).then_some(Self { progress, lead })
    }

    fn serve(&self) {
        sys::quietly(|| (self.progress.serve)(self.lead));
    }

    /// How long it may sleep; `Err`: not any more.
    fn limit(&self) -> Result<Option<Duration>, ()> {
        match sys::quietly(|| (self.progress.limit)(self.lead)) {
            NO_MORE => Err(()),
            FOR_EVER => Ok(None),
            nanos => Ok(Some(Duration::from_nanos(nanos.unsigned_abs()))),
        }
    }

    /// The thread sleeps without the device.
    fn retire(mut self) {
        let lead = std::mem::take(&mut self.lead);
        sys::quietly(|| (self.progress.end)(lead, 1));
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        if self.lead != 0 {
            sys::quietly(|| (self.progress.end)(self.lead, 0));
        }
    }
}

fn left(until: Option<Instant>) -> Option<Duration> {
    until.map(|until| until.saturating_duration_since(Instant::now()))
}

/// What a call that waits asks of the kernel. Each is in one step with the change of the signal mask, if the
/// call has one.
pub trait Kernel {
    /// The call itself, with this limit.
    fn ask(&mut self, limit: Option<Duration>) -> c_int;
    /// Sleeps until the call would return, or until `fd` is readable.
    fn sleep(&mut self, fd: c_int, limit: Option<Duration>) -> c_int;
}

/// A call that waits, at most for `limit`.
pub fn wait(progress: &'static progress, limit: Option<Duration>, mut kernel: impl Kernel) -> c_int {
    if limit == Some(Duration::ZERO) {
        sys::quietly(|| (progress.look)());
        return kernel.ask(limit);
    }
    // A limit that the clock cannot express is none.
    let until = limit.and_then(|limit| Instant::now().checked_add(limit));
    if let Some(lead) = Lead::begin(progress) {
        loop {
            lead.serve();
            let ready = kernel.ask(Some(Duration::ZERO));
            let left = left(until);
            if ready != 0 || left == Some(Duration::ZERO) {
                return ready;
            }
            let Ok(limit) = lead.limit() else {
                lead.retire();
                break;
            };
            let slept = kernel.sleep(progress.fd, [left, limit].into_iter().flatten().min());
            if slept < 0 {
                return slept;
            }
        }
    }
    kernel.ask(left(until))
}

/// Poll(2) and ppoll(2).
pub struct Poll<F> {
    /// The program's entries.
    pub fds: *mut pollfd,
    /// How many.
    pub count: nfds_t,
    /// The call.
    pub call: F,
}

impl<F: Fn(*mut pollfd, nfds_t, Option<Duration>) -> c_int> Kernel for Poll<F> {
    fn ask(&mut self, limit: Option<Duration>) -> c_int {
        (self.call)(self.fds, self.count, limit)
    }

    fn sleep(&mut self, fd: c_int, limit: Option<Duration>) -> c_int {
        // SAFETY: as many entries as the program says; the kernel has read and written them just before.
        let entry = |at| unsafe { self.fds.add(at).read_unaligned() };
        let device = pollfd { fd, events: libc::POLLIN, revents: 0 };
        // Without those that say nothing: the kernel takes no more than the process may have files.
        let all = (0..self.count as usize).map(entry).filter(|entry| entry.fd >= 0);
        let mut all: smallvec::SmallVec<[pollfd; 16]> = all.collect();
        all.push(device);
        (self.call)(all.as_mut_ptr(), all.len() as nfds_t, limit)
    }
}

/// Epoll_wait(2) and its like.
pub struct Epoll<A, S> {
    /// The set.
    pub set: c_int,
    /// The call, with a limit.
    pub call: A,
    /// Ppoll(2), with the call's signal mask.
    pub sleep: S,
}

impl<A, S> Kernel for Epoll<A, S>
where
    A: Fn(Option<Duration>) -> c_int,
    S: Fn(&mut [pollfd; 2], Option<Duration>) -> c_int,
{
    fn ask(&mut self, limit: Option<Duration>) -> c_int {
        (self.call)(limit)
    }

    fn sleep(&mut self, fd: c_int, limit: Option<Duration>) -> c_int {
        let entry = |fd| pollfd { fd, events: libc::POLLIN, revents: 0 };
        (self.sleep)(&mut [entry(self.set), entry(fd)], limit)
    }
}

/// Select(2) and pselect(2).
pub struct Select<F> {
    count: c_int,
    /// The program's sets, and what was in them.
    sets: [*mut fd_set; 3],
    asked: [Vec<u64>; 3],
    call: F,
}

impl<F: Fn(c_int, [*mut fd_set; 3], Option<Duration>) -> c_int> Select<F> {
    /// # Safety
    /// Each set is NULL or has room for `count` descriptors, until the call is over.
    pub unsafe fn of(count: c_int, sets: [*mut fd_set; 3], call: F) -> Self {
        let words = (count.max(0) as usize).div_ceil(64);
        let asked = sets.map(|set| {
            let words = if set.is_null() { 0 } else { words };
            // SAFETY: the caller's promise.
            (0..words).map(|at| unsafe { set.cast::<u64>().add(at).read_unaligned() }).collect()
        });
        Self { count, sets, asked, call }
    }
}

impl<F: Fn(c_int, [*mut fd_set; 3], Option<Duration>) -> c_int> Kernel for Select<F> {
    fn ask(&mut self, limit: Option<Duration>) -> c_int {
        for (set, asked) in self.sets.iter().zip(&self.asked) {
            for (at, word) in asked.iter().enumerate() {
                // SAFETY: as of `of`; nothing was read from a set that is NULL.
                unsafe { set.cast::<u64>().add(at).write_unaligned(*word) };
            }
        }
        (self.call)(self.count, self.sets, limit)
    }

    fn sleep(&mut self, fd: c_int, limit: Option<Duration>) -> c_int {
        let count = self.count.max(fd + 1);
        let mut copies = self.asked.clone();
        for copy in &mut copies {
            copy.resize((count as usize).div_ceil(64), 0);
        }
        if let Some(word) = copies[0].get_mut(fd as usize / 64) {
            *word |= 1 << (fd % 64);
        }
        let [read, write, other] = &mut copies;
        (self.call)(count, [read, write, other].map(|copy| copy.as_mut_ptr().cast()), limit)
    }
}
