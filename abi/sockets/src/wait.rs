//! Waiting for many descriptors. The kernel does it: a socket that a rule chose has a descriptor of the
//! kernel, and here it is only noted that from now on its state must be current.

use std::collections::HashMap;
use std::ffi::c_int;

use libc::{epoll_event, fd_set, nfds_t, pollfd, sigset_t, timespec, timeval};
use parking_lot::Mutex;
use uwarp_preload::real;

use crate::{fds, process, sys};

/// # Safety
/// `fds` has `count` entries.
unsafe fn note(fds: *const pollfd, count: nfds_t) {
    if fds.is_null() || process::is_forked() {
        return;
    }
    for at in 0..count as usize {
        // SAFETY: the caller's promise.
        let fd = unsafe { (&raw const (*fds.add(at)).fd).read_unaligned() };
        if fds::is_ruled(fd)
            && let Some(sock) = fds::find(fd)
        {
            sock.watch(false);
        }
    }
}

macro_rules! polls {
    ($(fn $name:ident($fds:ident, $count:ident $(, $argument:ident: $type:ty)*);)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name($fds: *mut pollfd, $count: nfds_t $(, $argument: $type)*) -> c_int {
            if fds::any_ruled() {
                // SAFETY: the caller passes what the function of libc takes.
                unsafe { note($fds, $count) };
            }
            real!($name($fds: *mut pollfd, $count: nfds_t $(, $argument: $type)*) -> c_int)
        }
    )*};
}

polls! {
    fn poll(fds, count, timeout: c_int);
    fn __poll(fds, count, timeout: c_int);
    fn __poll_chk(fds, count, timeout: c_int, room: usize);
    fn ppoll(fds, count, timeout: *const timespec, mask: *const sigset_t);
    fn __ppoll_chk(fds, count, timeout: *const timespec, mask: *const sigset_t, room: usize);
}

/// # Safety
/// Each set is NULL or has room for `count` descriptors.
unsafe fn note_sets(count: c_int, sets: [*const fd_set; 3]) {
    if process::is_forked() {
        return;
    }
    for set in sets.into_iter().filter(|set| !set.is_null()) {
        for fd in 0..count.max(0) {
            let (word, bit) = (set.cast::<u64>().wrapping_add(fd as usize / 64), 1_u64 << (fd % 64));
            if !fds::is_ruled(fd) {
                continue;
            }
            // SAFETY: the caller's promise.
            let is_in = unsafe { word.read_unaligned() } & bit != 0;
            if is_in && let Some(sock) = fds::find(fd) {
                sock.watch(false);
            }
        }
    }
}

macro_rules! selects {
    ($(fn $name:ident($count:ident, $r:ident, $w:ident, $e:ident $(, $argument:ident: $type:ty)*);)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(
            $count: c_int, $r: *mut fd_set, $w: *mut fd_set, $e: *mut fd_set $(, $argument: $type)*
        ) -> c_int {
            if fds::any_ruled() {
                // SAFETY: the caller passes what the function of libc takes.
                unsafe { note_sets($count, [$r, $w, $e]) };
            }
            real!($name(
                $count: c_int, $r: *mut fd_set, $w: *mut fd_set, $e: *mut fd_set $(, $argument: $type)*
            ) -> c_int)
        }
    )*};
}

selects! {
    fn select(count, read, write, other, timeout: *mut timeval);
    fn __select(count, read, write, other, timeout: *mut timeval);
    fn pselect(count, read, write, other, timeout: *const timespec, mask: *const sigset_t);
}

/// A set of epoll that a descriptor is in, by both descriptors.
#[derive(Clone, Copy)]
struct Member {
    set: c_int,
    event: epoll_event,
}

/// Descriptors that a rule may choose, or has chosen, in sets of epoll. A descriptor that becomes another one
/// is taken out of all sets by the kernel, and must be put in again.
static MEMBERS: Mutex<Option<HashMap<c_int, Vec<Member>>>> = Mutex::new(None);

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn epoll_ctl(
    set: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let special = fds::is_special(fd) && !process::is_child();
    // SAFETY: the caller passes what the function of libc takes.
    let copy = (special && !event.is_null()).then(|| unsafe { event.read_unaligned() });
    if let Some(copy) = &copy
        && operation != libc::EPOLL_CTL_DEL
        && let Some(sock) = fds::is_ruled(fd).then(|| fds::find(fd)).flatten()
    {
        sock.watch(copy.events & libc::EPOLLET as u32 != 0);
    }
    let result = real!(epoll_ctl(set: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int);
    if special && result == 0 {
        remember(set, operation, fd, copy);
    }
    result
}

fn remember(set: c_int, operation: c_int, fd: c_int, event: Option<epoll_event>) {
    let mut members = MEMBERS.lock();
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

/// The descriptor has become another one, with the same number.
pub fn enter_again(fd: c_int) {
    let of_fd = MEMBERS.lock().as_ref().and_then(|members| members.get(&fd).cloned()).unwrap_or_default();
    let Some(sock) = fds::find(fd) else { return };
    for mut member in of_fd {
        sock.watch(member.event.events & libc::EPOLLET as u32 != 0);
        sys::epoll_ctl(member.set, libc::EPOLL_CTL_ADD, fd, &mut member.event);
    }
}
