//! Waiting for many descriptors. The kernel does it: a socket that a rule chose has a descriptor of the
//! kernel, and here it is only noted that from now on its state must be current.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use uwarp_abi_types::preload::progress;
use uwarp_preload::real;
use uwarp_process::Mutex;

use crate::agree::conn::{Bell, Conn, Event, Own, Stage};
use crate::agree::said::Why;
use crate::agree::table;
use crate::ending::Pass;
use crate::event_loop::{self, Epoll, Poll, Select};
use crate::sock::Sock;
use crate::sys::Deferred;
use crate::{fds, process, relay, sys};

/// # Safety
/// `fds` has `count` entries.
unsafe fn note(fds: *const pollfd, count: nfds_t) {
    if fds.is_null() {
        return;
    }
    for at in 0..count as usize {
        // SAFETY: the caller's promise.
        let fd = unsafe { (&raw const (*fds.add(at)).fd).read_unaligned() };
        if fds::is_ruled(fd) {
            note_one(fd);
        }
    }
}

/// The program waits for a socket that a rule chose.
fn note_one(fd: c_int) {
    if process::is_forked() {
        relay::ask_for(fd);
    } else if let Some(sock) = fds::find(fd) {
        sock.watch(false);
    }
}

/// The program waits for a connection that may become iWARP's.
fn use_of(fd: c_int) -> Option<Arc<Conn>> {
    let conn = table::find(fd)?;
    conn.used();
    Some(conn)
}

/// Connections that may get a stand-in while a call waits for their present files, and what tells of it.
struct Asking(Vec<(Arc<Conn>, Arc<Event>)>);

impl Asking {
    fn of(fds: impl Iterator<Item = c_int>) -> Self {
        let conns = fds.filter(|fd| fds::is_asking(*fd)).filter_map(use_of);
        let entries = conns.map(|conn| {
            let event = conn.next_stage();
            (conn, event)
        });
        let (direct, others): (Vec<_>, Vec<_>) = entries.partition(|(conn, _)| conn.stage() == Stage::Direct);
        if !others.is_empty() {
            // Now they have it: only then does the caller see that the descriptor is ruled.
            table::settle();
        }
        Self(direct)
    }

    /// A descriptor for each; `None`: one of them has it already.
    fn bells(&self) -> Option<Vec<Arc<Own>>> {
        let bell = |(conn, event): &(Arc<Conn>, Arc<Event>)| match event.bell() {
            Bell::At(bell) => Some(bell),
            Bell::Rung => None,
            Bell::Missing => {
                table::stay_tcp(conn, Why::NoRoom);
                None
            }
        };
        self.0.iter().map(bell).collect()
    }

    /// Whether none has got one.
    fn are_as_before(&self) -> bool {
        self.0.iter().all(|(conn, _)| conn.stage() == Stage::Direct)
    }
}

fn left(until: Option<Instant>) -> Option<Duration> {
    until.map(|until| until.saturating_duration_since(Instant::now()))
}

/// As poll(2) takes it.
fn milliseconds(left: Option<Duration>) -> c_int {
    left.map_or(-1, |left| c_int::try_from(left.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX))
}

/// As ppoll(2) takes it.
fn time_of(left: Option<Duration>) -> Option<timespec> {
    left.map(|left| timespec {
        tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: left.subsec_nanos().into(),
    })
}

fn from_now(left: Option<Duration>) -> Option<Instant> {
    left.and_then(|left| Instant::now().checked_add(left))
}

/// Whether the kernel takes it as a limit.
///
/// # Safety
/// NULL, or a time.
unsafe fn is_time(time: *const timespec) -> bool {
    // SAFETY: the caller's promise.
    let time = (!time.is_null()).then(|| unsafe { time.read_unaligned() });
    time.is_none_or(|time| time.tv_sec >= 0 && (0..1_000_000_000).contains(&time.tv_nsec))
}

/// # Safety
/// NULL, or a time.
unsafe fn duration(time: *const timespec) -> Option<Duration> {
    // SAFETY: the caller's promise.
    let time = (!time.is_null()).then(|| unsafe { time.read_unaligned() })?;
    let (seconds, nanos) =
        (u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0));
    Some(Duration::from_secs(seconds).saturating_add(Duration::from_nanos(nanos.into())))
}

/// poll(2) over descriptors of which some may get a stand-in meanwhile. `None`: there are none of those.
///
/// # Safety
/// As poll(2).
unsafe fn poll_asking(
    fds: *mut pollfd,
    count: nfds_t,
    limit: impl FnOnce() -> Option<Duration>,
    kernel: impl Fn(*mut pollfd, nfds_t, Option<Duration>, &Deferred) -> c_int,
) -> Option<c_int> {
    let len = count as usize;
    if fds.is_null() || len > 1 << 20 || process::is_forked() {
        return None;
    }
    // SAFETY: the caller's promise.
    let entry = |at: usize| unsafe { fds.add(at).read_unaligned() };
    if !(0..len).any(|at| fds::is_special(entry(at).fd)) {
        return None;
    }
    let signals = Deferred::begin();
    let kernel = |fds: *mut pollfd, count: nfds_t, left| kernel(fds, count, left, &signals);
    let ask = || {
        let asking = Asking::of((0..len).map(|at| entry(at).fd));
        // Only now: what has got a stand-in since the program's call is not among those, and nobody else
        // would show in it what comes.
        // SAFETY: the caller's promise.
        unsafe { note(fds, count) };
        asking
    };
    let mut asking = ask();
    if asking.0.is_empty() {
        let progress = event_loop::progress()?;
        let is_ruled = (0..len).any(|at| fds::is_ruled(entry(at).fd));
        let kernel = Poll { fds, count, call: kernel };
        return is_ruled.then(|| event_loop::wait(progress, limit(), kernel));
    }
    let until = from_now(limit());
    loop {
        if let Some(bells) = asking.bells() {
            let bell = |bell: &Arc<Own>| pollfd { fd: bell.0, events: libc::POLLIN, revents: 0 };
            // Without those that say nothing: the kernel takes no more than the process may have files.
            let own = (0..len).map(entry).filter(|entry| entry.fd >= 0);
            let mut all: Vec<pollfd> = own.chain(bells.iter().map(bell)).collect();
            let ready = kernel(all.as_mut_ptr(), all.len() as nfds_t, left(until));
            if ready <= 0 || asking.are_as_before() {
                let mut answers = all.iter().map(|entry| entry.revents);
                for at in 0..len {
                    let revents = if entry(at).fd >= 0 { answers.next() } else { None };
                    // SAFETY: the caller's promise.
                    unsafe { (&raw mut (*fds.add(at)).revents).write_unaligned(revents.unwrap_or(0)) };
                }
                return Some(ready);
            }
        }
        asking = ask();
    }
}

macro_rules! polls {
    ($(fn $name:ident($fds:ident, $count:ident, $limit:ident: int $(, $room:ident: usize)?);)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(
            $fds: *mut pollfd, $count: nfds_t, $limit: c_int $(, $room: usize)?
        ) -> c_int {
            let _pass = Pass::begin();
            if fds::any_mediated() {
                $(crate::data::within(($count as usize).saturating_mul(size_of::<pollfd>()), $room);)?
                let limit = || u64::try_from($limit).ok().map(Duration::from_millis);
                let kernel = |fds: *mut pollfd, count: nfds_t, left, signals: &Deferred| {
                    let (time, mask) = (time_of(left), signals.mask(std::ptr::null()));
                    let limit = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
                    real!(ppoll(
                        fds: *mut pollfd, count: nfds_t, limit: *const timespec, mask: *const sigset_t
                    ) -> c_int)
                };
                // SAFETY: the caller passes what the function of libc takes.
                unsafe {
                    if let Some(ready) = poll_asking($fds, $count, limit, kernel) {
                        return ready;
                    }
                }
            }
            real!($name($fds: *mut pollfd, $count: nfds_t, $limit: c_int $(, $room: usize)?) -> c_int)
        }
    )*};
}

polls! {
    fn poll(fds, count, limit: int);
    fn __poll(fds, count, limit: int);
    fn __poll_chk(fds, count, limit: int, room: usize);
}

macro_rules! ppolls {
    ($(fn $name:ident($fds:ident, $count:ident, $limit:ident, $mask:ident $(, $room:ident: usize)?);)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(
            $fds: *mut pollfd, $count: nfds_t, $limit: *const timespec, $mask: *const sigset_t
            $(, $room: usize)?
        ) -> c_int {
            let _pass = Pass::begin();
            // SAFETY: the caller passes what the function of libc takes.
            if fds::any_mediated() && unsafe { is_time($limit) } {
                $(crate::data::within(($count as usize).saturating_mul(size_of::<pollfd>()), $room);)?
                // SAFETY: as below.
                let limit = || unsafe { duration($limit) };
                let kernel = |fds: *mut pollfd, count: nfds_t, left, signals: &Deferred| {
                    let (time, mask) = (time_of(left), signals.mask($mask));
                    let limit = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
                    real!(ppoll(
                        fds: *mut pollfd, count: nfds_t, limit: *const timespec, mask: *const sigset_t
                    ) -> c_int)
                };
                // SAFETY: the caller passes what the function of libc takes.
                unsafe {
                    if let Some(ready) = poll_asking($fds, $count, limit, kernel) {
                        return ready;
                    }
                }
            }
            real!($name(
                $fds: *mut pollfd, $count: nfds_t, $limit: *const timespec, $mask: *const sigset_t
                $(, $room: usize)?
            ) -> c_int)
        }
    )*};
}

ppolls! {
    fn ppoll(fds, count, limit, mask);
    fn __ppoll_chk(fds, count, limit, mask, room: usize);
}

/// # Safety
/// Each set is NULL or has room for `count` descriptors.
unsafe fn note_sets(count: c_int, sets: [*const fd_set; 3]) {
    for set in sets.into_iter().filter(|set| !set.is_null()) {
        for fd in 0..count.max(0) {
            let (word, bit) = (set.cast::<u64>().wrapping_add(fd as usize / 64), 1_u64 << (fd % 64));
            if !fds::is_ruled(fd) {
                continue;
            }
            // SAFETY: the caller's promise.
            let is_in = unsafe { word.read_unaligned() } & bit != 0;
            if is_in {
                note_one(fd);
            }
        }
    }
}

fn is_in(set: *const fd_set, fd: c_int) -> bool {
    let (word, bit) = (set.cast::<u64>().wrapping_add(fd as usize / 64), 1_u64 << (fd % 64));
    // SAFETY: the callers' promise: the set has room for so many descriptors.
    !set.is_null() && unsafe { word.read_unaligned() } & bit != 0
}

/// select(2) over descriptors of which some may get a stand-in meanwhile. `None`: there are none of those.
///
/// # Safety
/// As select(2).
unsafe fn select_asking(
    count: c_int,
    sets: [*mut fd_set; 3],
    limit: impl FnOnce() -> Option<Duration>,
    kernel: impl Fn(c_int, [*mut fd_set; 3], Option<Duration>, &Deferred) -> c_int,
) -> Option<(c_int, Option<Instant>)> {
    if !(0..=1 << 20).contains(&count) || process::is_forked() {
        // SAFETY: the caller's promise.
        unsafe { note_sets(count, sets.map(<*mut fd_set>::cast_const)) };
        return None;
    }
    if !(0..count).any(|fd| fds::is_special(fd) && sets.iter().any(|set| is_in(*set, fd))) {
        return None;
    }
    let signals = Deferred::begin();
    let kernel =
        |count: c_int, sets: [*mut fd_set; 3], left: Option<Duration>| kernel(count, sets, left, &signals);
    let asked = || (0..count).filter(|fd| fds::is_asking(*fd) && sets.iter().any(|set| is_in(*set, *fd)));
    let ask = || {
        let asking = Asking::of(asked());
        // As in `poll_asking`.
        // SAFETY: the caller's promise.
        unsafe { note_sets(count, sets.map(<*mut fd_set>::cast_const)) };
        asking
    };
    let mut asking = ask();
    if asking.0.is_empty() {
        let progress = event_loop::progress()?;
        let is_in = |fd| fds::is_ruled(fd) && sets.iter().any(|set| is_in(*set, fd));
        if !(0..count).any(is_in) {
            return None;
        }
        let limit = limit();
        let until = from_now(limit);
        // SAFETY: the caller's promise.
        let kernel = unsafe { Select::of(count, sets, kernel) };
        return Some((event_loop::wait(progress, limit, kernel), until));
    }
    let words = (count as usize).div_ceil(64);
    let until = from_now(limit());
    loop {
        if let Some(bells) = asking.bells() {
            let end = bells.iter().map(|bell| bell.0 + 1).fold(count, c_int::max);
            let mut copies = sets.map(|set| {
                let mut copy = vec![0_u64; (end as usize).div_ceil(64)];
                for (at, word) in copy.iter_mut().enumerate().take(if set.is_null() { 0 } else { words }) {
                    // SAFETY: the caller's promise.
                    *word = unsafe { set.cast::<u64>().add(at).read_unaligned() };
                }
                copy
            });
            for bell in &bells {
                if let Some(word) = copies[0].get_mut(bell.0 as usize / 64) {
                    *word |= 1 << (bell.0 % 64);
                }
            }
            let given = [0, 1, 2].map(|at| copies[at].as_mut_ptr().cast::<fd_set>());
            let ready = kernel(end, given, left(until));
            if ready < 0 {
                return Some((ready, until));
            }
            if ready == 0 || asking.are_as_before() {
                for (set, copy) in sets.iter().zip(&copies).filter(|(set, _)| !set.is_null()) {
                    for (at, word) in copy.iter().enumerate().take(words) {
                        // SAFETY: the caller's promise.
                        unsafe { set.cast::<u64>().add(at).write_unaligned(*word) };
                    }
                }
                return Some((ready, until));
            }
        }
        asking = ask();
    }
}

macro_rules! selects {
    ($(fn $name:ident($count:ident, $r:ident, $w:ident, $e:ident, $limit:ident);)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(
            $count: c_int, $r: *mut fd_set, $w: *mut fd_set, $e: *mut fd_set, $limit: *mut timeval
        ) -> c_int {
            let _pass = Pass::begin();
            if fds::any_mediated() {
                let time = || {
                    // SAFETY: as below.
                    let time = (!$limit.is_null()).then(|| unsafe { $limit.read_unaligned() })?;
                    let (seconds, micros) = (u64::try_from(time.tv_sec), u64::try_from(time.tv_usec));
                    let micros = Duration::from_micros(micros.unwrap_or(0));
                    Some(Duration::from_secs(seconds.unwrap_or(0)).saturating_add(micros))
                };
                let kernel = |count: c_int, [r, w, e]: [*mut fd_set; 3], left, signals: &Deferred| {
                    let (time, mask) = (time_of(left), signals.mask(std::ptr::null()));
                    let limit = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
                    real!(pselect(
                        count: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set,
                        limit: *const timespec, mask: *const sigset_t
                    ) -> c_int)
                };
                // SAFETY: the caller passes what the function of libc takes.
                unsafe {
                    if let Some((ready, until)) = select_asking($count, [$r, $w, $e], time, kernel) {
                        // As the kernel does.
                        if let Some(left) = left(until) {
                            let tv_sec = libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX);
                            $limit.write_unaligned(timeval { tv_sec, tv_usec: left.subsec_micros().into() });
                        }
                        return ready;
                    }
                }
            }
            real!($name(
                $count: c_int, $r: *mut fd_set, $w: *mut fd_set, $e: *mut fd_set, $limit: *mut timeval
            ) -> c_int)
        }
    )*};
}

selects! {
    fn select(count, read, write, other, limit);
    fn __select(count, read, write, other, limit);
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    other: *mut fd_set,
    limit: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let _pass = Pass::begin();
    // SAFETY: the caller passes what the function of libc takes.
    if fds::any_mediated() && unsafe { is_time(limit) } {
        // SAFETY: as below.
        let time = || unsafe { duration(limit) };
        let kernel = |count: c_int, [r, w, e]: [*mut fd_set; 3], left, signals: &Deferred| {
            let (time, mask) = (time_of(left), signals.mask(mask));
            let limit = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            real!(pselect(
                count: c_int, r: *mut fd_set, w: *mut fd_set, e: *mut fd_set,
                limit: *const timespec, mask: *const sigset_t
            ) -> c_int)
        };
        // SAFETY: the caller passes what the function of libc takes.
        unsafe {
            if let Some((ready, _)) = select_asking(count, [read, write, other], time, kernel) {
                return ready;
            }
        }
    }
    real!(pselect(
        count: c_int, read: *mut fd_set, write: *mut fd_set, other: *mut fd_set,
        limit: *const timespec, mask: *const sigset_t
    ) -> c_int)
}

/// Ppoll(2) for a call with this signal mask.
fn sleep_with(mask: *const sigset_t) -> impl Fn(&mut [pollfd; 2], Option<Duration>) -> c_int {
    move |both, left| {
        let (fds, count, time) = (both.as_mut_ptr(), both.len() as nfds_t, time_of(left));
        let limit = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        real!(ppoll(fds: *mut pollfd, count: nfds_t, limit: *const timespec, mask: *const sigset_t) -> c_int)
    }
}

/// How a thread that waits for events of a set makes progress. `None`: the kernel's call is all; it also
/// refuses what is not right.
fn progress_for(most: c_int) -> Option<&'static progress> {
    event_loop::progress().filter(|_| most > 0)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn epoll_wait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    limit: c_int,
) -> c_int {
    let _pass = Pass::begin();
    let call = |limit: c_int| {
        let (to, timeout) = (events, limit);
        real!(epoll_wait(set: c_int, to: *mut epoll_event, most: c_int, timeout: c_int) -> c_int)
    };
    let Some(progress) = progress_for(most) else { return call(limit) };
    let signals = Deferred::begin();
    let mask = signals.mask(std::ptr::null());
    let call = |left| {
        let (to, timeout) = (events, milliseconds(left));
        real!(epoll_pwait(
            set: c_int, to: *mut epoll_event, most: c_int, timeout: c_int, mask: *const sigset_t
        ) -> c_int)
    };
    let limit = u64::try_from(limit).ok().map(Duration::from_millis);
    event_loop::wait(progress, limit, Epoll { set, call, sleep: sleep_with(mask) })
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn epoll_pwait(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    limit: c_int,
    mask: *const sigset_t,
) -> c_int {
    let _pass = Pass::begin();
    let call = |limit: c_int, mask: *const sigset_t| {
        real!(epoll_pwait(
            set: c_int, events: *mut epoll_event, most: c_int, limit: c_int, mask: *const sigset_t
        ) -> c_int)
    };
    let Some(progress) = progress_for(most) else { return call(limit, mask) };
    let signals = Deferred::begin();
    let mask = signals.mask(mask);
    let call = |left| call(milliseconds(left), mask);
    let limit = u64::try_from(limit).ok().map(Duration::from_millis);
    event_loop::wait(progress, limit, Epoll { set, call, sleep: sleep_with(mask) })
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn epoll_pwait2(
    set: c_int,
    events: *mut epoll_event,
    most: c_int,
    limit: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let _pass = Pass::begin();
    let call = |limit: *const timespec, mask: *const sigset_t| {
        real!(epoll_pwait2(
            set: c_int, events: *mut epoll_event, most: c_int, limit: *const timespec, mask: *const sigset_t
        ) -> c_int)
    };
    // SAFETY: the caller passes what the function of libc takes.
    let Some(progress) = progress_for(most).filter(|_| unsafe { is_time(limit) }) else {
        return call(limit, mask);
    };
    let signals = Deferred::begin();
    let mask = signals.mask(mask);
    let call = |left| call(time_of(left).as_ref().map_or(std::ptr::null(), std::ptr::from_ref), mask);
    // SAFETY: as above.
    let limit = unsafe { duration(limit) };
    event_loop::wait(progress, limit, Epoll { set, call, sleep: sleep_with(mask) })
}

/// A set of epoll that a descriptor is in, by both descriptors.
#[derive(Clone, Copy)]
struct Member {
    set: c_int,
    event: epoll_event,
}

/// Descriptors that a rule may choose, or has chosen, in sets of epoll. A descriptor that becomes another one
/// is taken out of all sets by the kernel, and must be put in again.
static MEMBERS: Mutex<Option<HashMap<c_int, Vec<Member>>>, 2> = Mutex::new(None);

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn epoll_ctl(
    set: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    if process::is_forked() && fds::is_ruled(fd) {
        relay::ask_for(fd);
    }
    let special = fds::is_special(fd) && !process::is_child();
    // SAFETY: the caller passes what the function of libc takes.
    let copy = (special && !event.is_null()).then(|| unsafe { event.read_unaligned() });
    if special && fds::is_asking(fd) && operation != libc::EPOLL_CTL_DEL {
        use_of(fd);
    }
    // What the descriptor is does not change meanwhile.
    let mut members = special.then(|| MEMBERS.lock());
    if let Some(copy) = &copy
        && operation != libc::EPOLL_CTL_DEL
        && let Some(sock) = fds::is_ruled(fd).then(|| fds::find(fd)).flatten()
    {
        sock.watch(copy.events & libc::EPOLLET as u32 != 0);
    }
    let result = real!(epoll_ctl(set: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int);
    if let Some(members) = members.as_mut().filter(|_| result == 0) {
        remember(members, set, operation, fd, copy);
    }
    result
}

type Members = Option<HashMap<c_int, Vec<Member>>>;

fn remember(members: &mut Members, set: c_int, operation: c_int, fd: c_int, event: Option<epoll_event>) {
    let of_fd = members.get_or_insert_default().entry(fd).or_default();
    of_fd.retain(|member| member.set != set);
    if let (true, Some(event)) = (operation != libc::EPOLL_CTL_DEL, event) {
        of_fd.push(Member { set, event });
    }
}

/// The descriptor is closed.
pub fn forget(fd: c_int) {
    if let Some(members) = &mut *MEMBERS.lock() {
        members.remove(&fd);
    }
}

/// Makes `change` put another file in the place of a descriptor, which stays in its sets of epoll: the socket
/// whose stand-in it is becomes watched. The file that was there before stays open, so the kernel does not
/// take it out itself.
pub fn change_file(fd: c_int, sock: &Arc<Sock>, change: impl FnOnce()) {
    let members = MEMBERS.lock();
    let of_fd = members.as_ref().and_then(|members| members.get(&fd)).map(Vec::as_slice).unwrap_or_default();
    let mut of_fd: Vec<Member> = of_fd.iter().map(|member| as_it_is(*member, fd)).collect();
    // A number that is in none is another file's by now.
    of_fd.retain(|member| sys::epoll_delete(member.set, fd));
    change();
    for mut member in of_fd {
        sock.watch(member.event.events & libc::EPOLLET as u32 != 0);
        sys::epoll_ctl(member.set, libc::EPOLL_CTL_ADD, fd, &mut member.event);
    }
}

/// A member that has been reported and waits to be changed by the program (`EPOLLONESHOT`) is to stay silent.
/// The kernel says which are.
fn as_it_is(mut member: Member, fd: c_int) -> Member {
    let once = libc::EPOLLONESHOT as u32;
    if member.event.events & once == 0 {
        return member;
    }
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", member.set)).unwrap_or_default();
    let mut entries = info.lines().filter_map(|line| {
        let mut words = line.strip_prefix("tfd:")?.split_whitespace();
        let number: c_int = words.next()?.parse().ok()?;
        let events = u32::from_str_radix(words.nth(1)?, 16).ok()?;
        (number == fd).then_some(events)
    });
    if let Some(events) = entries.next() {
        member.event.events = events;
    }
    member
}

/// The descriptor has become another one, with the same number.
pub fn enter_again(fd: c_int) {
    let of_fd = MEMBERS.lock().as_ref().and_then(|members| members.get(&fd).cloned()).unwrap_or_default();
    let Some(sock) = fds::find(fd) else { return };
    for mut member in of_fd {
        sock.watch(member.event.events & libc::EPOLLET as u32 != 0);
        sys::epoll_ctl(member.set, libc::EPOLL_CTL_ADD, fd, &mut member.event);
    }
}
