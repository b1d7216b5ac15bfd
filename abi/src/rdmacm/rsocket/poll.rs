//! Waiting for many descriptors.

use std::ffi::c_int;
use std::time::Duration;

use libc::{epoll_event, fd_set, nfds_t, pollfd, timespec, timeval};
use uwarp_rsocket::Errno;
use uwarp_rsocket::poll::{PollFd, bit, poll};
use uwarp_rsocket::set::{Change, Set, SetEvent};
use uwarp_rsocket::table::{self, Entry};

use crate::convention::MinusOne;
use crate::entry;
use crate::failure::{Failure, errno, required};

/// Most descriptors of a call; the kernel has a limit, too.
pub(crate) const MOST: usize = 1 << 20;

/// The kernel's poll(2).
fn kernel(fds: &mut [PollFd], limit: Option<Duration>) -> Result<usize, Errno> {
    let time = limit.map(|limit| timespec {
        tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `PollFd` has the form of `pollfd`; the time is NULL or alive.
    let ready = unsafe {
        libc::ppoll(fds.as_mut_ptr().cast::<pollfd>(), fds.len() as nfds_t, time, std::ptr::null())
    };
    usize::try_from(ready).map_err(|_| Errno::from_raw_os_error(errno()))
}

/// Waits as poll(2).
fn wait(fds: &mut [PollFd], limit: Option<Duration>) -> Result<usize, Failure> {
    Ok(poll(fds, limit, &mut kernel)?)
}

/// A limit in milliseconds; a negative one is none.
fn limit(milliseconds: c_int) -> Option<Duration> {
    u64::try_from(milliseconds).ok().map(Duration::from_millis)
}

fn count(ready: usize) -> c_int {
    c_int::try_from(ready).unwrap_or(c_int::MAX)
}

/// The three sets of select(2), by address; NULL is empty.
struct Sets([*mut fd_set; 3]);

/// What each set stands for, and what puts a descriptor into it.
const ASKS: [i16; 3] = [bit::IN, bit::OUT, bit::PRI];
const ANSWERS: [i16; 3] =
    [bit::IN | bit::HUP | bit::ERR, bit::OUT | bit::ERR, !(bit::IN | bit::OUT | bit::HUP | bit::RDHUP)];

impl Sets {
    /// The word of a set with a descriptor, and its bit there. Programs have larger sets than libc's.
    fn place(set: *mut fd_set, fd: usize) -> (*mut u64, u64) {
        (set.cast::<u64>().wrapping_add(fd / 64), 1 << (fd % 64))
    }

    /// # Safety
    /// Each set has room for `count` descriptors.
    unsafe fn asked(&self, count: usize) -> Vec<PollFd> {
        let mut fds = Vec::new();
        for fd in 0..count {
            let mut events = None;
            for (set, ask) in self.0.iter().zip(ASKS).filter(|(set, _)| !set.is_null()) {
                let (word, bit) = Self::place(*set, fd);
                // SAFETY: the caller's promise.
                if unsafe { word.read_unaligned() } & bit != 0 {
                    events = Some(events.unwrap_or(0) | ask);
                }
            }
            if let Some(events) = events {
                fds.push(PollFd { fd: fd as i32, events, revents: 0 });
            }
        }
        fds
    }

    /// Leaves in the sets what is ready; returns how many that are.
    ///
    /// # Safety
    /// As [`Self::asked`].
    unsafe fn answer(&self, fds: &[PollFd]) -> usize {
        let mut ready = 0;
        for entry in fds {
            for ((set, ask), answer) in self.0.iter().zip(ASKS).zip(ANSWERS) {
                if set.is_null() {
                    continue;
                }
                let (word, bit) = Self::place(*set, usize::try_from(entry.fd).unwrap_or(0));
                // SAFETY: the caller's promise.
                let before = unsafe { word.read_unaligned() };
                let was_asked = before & bit != 0 && entry.events & ask != 0;
                if was_asked && entry.revents & answer != 0 {
                    ready += 1;
                } else {
                    // SAFETY: the caller's promise.
                    unsafe { word.write_unaligned(before & !bit) };
                }
            }
        }
        ready
    }
}

/// # Safety
/// As select(2).
unsafe fn select(nfds: c_int, sets: &Sets, timeout: *mut timeval) -> Result<c_int, Failure> {
    let nfds = usize::try_from(nfds).ok().filter(|nfds| *nfds <= MOST);
    let nfds = nfds.ok_or_else(|| Failure::invalid("nfds"))?;
    let limit = if timeout.is_null() {
        None
    } else {
        // SAFETY: the caller's promise.
        let time = unsafe { timeout.read_unaligned() };
        let (Ok(seconds), Ok(micros)) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_usec)) else {
            return Err(Failure::invalid("timeout"));
        };
        Some(Duration::from_secs(seconds).saturating_add(Duration::from_micros(micros)))
    };
    // SAFETY: the caller's promise.
    let mut fds = unsafe { sets.asked(nfds) };
    wait(&mut fds, limit)?;
    if fds.iter().any(|entry| entry.revents & bit::NVAL != 0) {
        return Err(Errno::BADF.into());
    }
    // SAFETY: the caller's promise.
    Ok(count(unsafe { sets.answer(&fds) }))
}

/// # Safety
/// `event` is NULL or valid.
unsafe fn change(op: c_int, event: *mut epoll_event) -> Result<Change, Failure> {
    if op == libc::EPOLL_CTL_DEL {
        return Ok(Change::Delete);
    }
    // SAFETY: the caller's promise.
    let event = unsafe { required(event, "event")?.read_unaligned() };
    let event = SetEvent { events: event.events, data: event.u64 };
    match op {
        libc::EPOLL_CTL_ADD => Ok(Change::Add(event)),
        libc::EPOLL_CTL_MOD => Ok(Change::Modify(event)),
        _ => Err(Failure::invalid("op")),
    }
}

/// poll(2), for sockets of this library and any other descriptors.
///
/// # Safety
/// As poll(2).
pub(crate) unsafe fn poll_c(fds: *mut pollfd, nfds: nfds_t, timeout: c_int) -> Result<c_int, Failure> {
    let nfds = usize::try_from(nfds).ok().filter(|nfds| *nfds <= MOST);
    let nfds = nfds.ok_or_else(|| Failure::invalid("nfds"))?;
    let fds: &mut [PollFd] = match nfds {
        0 => &mut [],
        // SAFETY: as poll(2), and of the same form.
        _ => unsafe { std::slice::from_raw_parts_mut(required(fds, "fds")?.cast::<PollFd>(), nfds) },
    };
    Ok(count(wait(fds, limit(timeout))?))
}

entry! {
    /// rsocket(7).
    fn rpoll(fds: *mut pollfd, nfds: nfds_t, timeout: c_int) -> MinusOne<c_int> {
        poll_c(fds, nfds, timeout)
    }

    /// rsocket(7).
    fn rselect(
        nfds: c_int,
        read: *mut fd_set,
        write: *mut fd_set,
        except: *mut fd_set,
        timeout: *mut timeval,
    ) -> MinusOne<c_int> {
        select(nfds, &Sets([read, write, except]), timeout)
    }

    /// rsocket(7). Flags are those of epoll_create1(2), and have no effect: the set does not survive exec.
    fn repoll_create(_flags: c_int) -> MinusOne<c_int> {
        let set = Set::new()?;
        Ok(table::insert(set.fd(), Entry::Set(set)))
    }

    /// rsocket(7).
    fn repoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> MinusOne {
        let set = table::set(epfd)?;
        if fd < 0 {
            return Err(Errno::BADF.into());
        }
        if fd == epfd {
            return Err(Failure::invalid("the set itself"));
        }
        if op == libc::EPOLL_CTL_ADD && table::find(fd).is_none() && libc::fcntl(fd, libc::F_GETFD) < 0 {
            return Err(Errno::BADF.into());
        }
        Ok(set.change(fd, change(op, event)?)?)
    }

    /// rsocket(7).
    fn repoll_wait(
        epfd: c_int,
        events: *mut epoll_event,
        max: c_int,
        timeout: c_int,
    ) -> MinusOne<c_int> {
        let set = table::set(epfd)?;
        let max = usize::try_from(max).ok().filter(|max| *max > 0);
        let max = max.ok_or_else(|| Failure::invalid("maxevents"))?;
        let events = required(events, "events")?;
        let told = set.wait(max, limit(timeout), &mut kernel, |at, event| {
            events.add(at).write_unaligned(epoll_event { events: event.events, u64: event.data });
        })?;
        Ok(count(told))
    }
}
