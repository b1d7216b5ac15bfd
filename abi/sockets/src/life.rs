//! Functions that make, name, copy and end descriptors.

use std::ffi::{c_int, c_long, c_uint, c_ulong};
use std::sync::Arc;

use libc::{sockaddr, socklen_t};
use uwarp_abi_types::preload::UWARP_NO_DESCRIPTOR;
use uwarp_preload::rules::{Role, Trust, Way};
use uwarp_preload::{errno, real, set_errno};

use crate::address;
use crate::agree;
use crate::agree::conn::Stage;
use crate::ending::{self, Pass};
use crate::fds;
use crate::process;
use crate::relay;
use crate::rsockets::{self, Rsockets};
use crate::sock::{self, Direction, Sock};
use crate::stand_in::{Because, StandIn};
use crate::sys;

/// Longest wait for a peer before a rule with `fallback` uses TCP.
const FALLBACK_MS: c_int = 1000;

fn failed(errno: c_int) -> c_int {
    set_errno(errno);
    -1
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let fd = real!(socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int);
    if fds::rules_apply() && fd >= 0 {
        let stream = kind & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) == libc::SOCK_STREAM;
        let tcp = protocol == 0 || protocol == libc::IPPROTO_TCP;
        if stream && tcp && (domain == libc::AF_INET || domain == libc::AF_INET6) {
            fds::enter_candidate(fd);
        } else {
            of_kernel(fd);
        }
    }
    fd
}

/// The address that a TCP socket has.
fn own_name(fd: c_int) -> Option<std::net::SocketAddr> {
    let (mut storage, mut len) = address::room();
    let (to, size): (*mut sockaddr, *mut socklen_t) = ((&raw mut storage).cast(), &raw mut len);
    let got = real!(getsockname(fd: c_int, to: *mut sockaddr, size: *mut socklen_t) -> c_int);
    // SAFETY: what the call wrote.
    (got == 0).then(|| unsafe { address::load(to, len) }).flatten()
}

fn is_v6(fd: c_int) -> bool {
    sys::option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) == Some(libc::AF_INET6)
}

/// A new rsocket.
pub fn new_rsocket(calls: &Rsockets, v6: bool) -> Result<c_int, c_int> {
    let (domain, kind) = (if v6 { libc::AF_INET6 } else { libc::AF_INET }, libc::SOCK_STREAM);
    // SAFETY: no pointer.
    let number = unsafe { (calls.rsocket)(domain, kind | UWARP_NO_DESCRIPTOR, 0) };
    if number < 0 {
        return Err(errno());
    }
    ending::in_order(calls, number);
    Ok(number)
}

fn bind_rsocket(calls: &Rsockets, number: c_int, to: std::net::SocketAddr) -> Result<(), c_int> {
    let (storage, len) = address::store(to);
    // SAFETY: an address and its length.
    match unsafe { (calls.rbind)(number, (&raw const storage).cast(), len) } {
        0 => Ok(()),
        _ => Err(errno()),
    }
}

/// Closes one.
pub fn close_rsocket(calls: &Rsockets, number: c_int) {
    // SAFETY: no pointer.
    sys::quietly(|| unsafe { (calls.rclose)(number) });
}

fn connect_rsocket(calls: &Rsockets, number: c_int, peer: std::net::SocketAddr) -> c_int {
    let (storage, len) = address::store(peer);
    // SAFETY: an address and its length.
    unsafe { (calls.rconnect)(number, (&raw const storage).cast(), len) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int {
    if fds::is_special(fd) && !fds::is_own(fd) {
        // SAFETY: the caller passes what the function of libc takes.
        let peer = unsafe { address::load(to, len) };
        if fds::is_asking(fd)
            && let Some(tcp) = kernels(fd)
        {
            let fd = tcp.0;
            return real!(connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int);
        }
        if fds::is_ruled(fd) {
            return match (sock::of(fd), peer) {
                (None, _) => -1,
                (Some(sock), _) if sock.conn().is_some() => {
                    let fd = sock.options().unwrap_or(-1);
                    real!(connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int)
                }
                (Some(_), None) => failed(libc::EAFNOSUPPORT),
                (Some(sock), Some(peer)) => connect_again(&sock, fd, address::meant(peer)),
            };
        }
        if fds::is_asking(fd) {
            // There is no descriptor left.
            return real!(connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int);
        }
        let way = peer.map(address::meant).map_or(Way::Tcp, |peer| process::decide(Role::Connect, peer));
        if let (Way::Rsockets { fallback }, Some(peer)) = (way, peer.map(address::meant))
            && let Some(result) = connect_first(fd, peer, fallback)
        {
            return result;
        }
        let result = real!(connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int);
        if result == 0 || errno() == libc::EINPROGRESS {
            let asks = match (way, peer) {
                (Way::Upgrade(trust), Some(peer)) if !fds::is_copied(fd) => sys::quietly(|| {
                    may_become(fd, agree::machine::Role::Connected, address::meant(peer), trust)
                }),
                _ => false,
            };
            if !asks {
                // It is TCP's.
                fds::forget(fd);
            }
        }
        return result;
    }
    real!(connect(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int)
}

/// A second descriptor of a connection that has no stand-in yet, for a call that may wait. `None`: it has one
/// meanwhile, or is TCP's for good.
fn kernels(fd: c_int) -> Option<agree::conn::Own> {
    let _still = agree::table::still(fd)?;
    let tcp = sys::quietly(|| sys::second(fd)).ok()?;
    fds::enter_own(tcp);
    Some(agree::conn::Own(tcp))
}

/// A connection of the kernel's that may become iWARP's. False: it stays TCP.
fn may_become(fd: c_int, role: agree::machine::Role, peer: std::net::SocketAddr, trust: Trust) -> bool {
    own_name(fd)
        .and_then(|own| agree::service::connection(role, address::meant(own), peer, trust))
        .is_some_and(|conn| agree::table::enter(fd, conn))
}

fn connect_again(sock: &Arc<Sock>, fd: c_int, peer: std::net::SocketAddr) -> c_int {
    let Some(calls) = sock.calls() else { return -1 };
    if sock.listens() {
        return failed(libc::EISCONN);
    }
    let result = connect_rsocket(calls, sock.number(), peer);
    let errno = errno();
    if result < 0 && errno == libc::EINPROGRESS {
        sock.renew(fd);
    }
    sock.show(Because::Call);
    if result < 0 { failed(errno) } else { result }
}

/// Connects a TCP socket that a rule has chosen. `None`: it is to connect by TCP.
fn connect_first(fd: c_int, peer: std::net::SocketAddr, fallback: bool) -> Option<c_int> {
    if agree::service::tells_of_buffers(fd) {
        return if fallback { None } else { Some(failed(libc::EOPNOTSUPP)) };
    }
    let Some(calls) = rsockets::load() else { return (!fallback).then_some(-1) };
    let bound = own_name(fd).filter(|name| name.port() != 0);
    let number = match new_rsocket(calls, peer.is_ipv6()) {
        Ok(number) => number,
        Err(_) if fallback => return None,
        Err(errno) => return Some(failed(errno)),
    };
    if fallback {
        // Before anything is changed. A bound port is in use until then.
        if bound.is_some() || !connects_soon(calls, number, peer) {
            close_rsocket(calls, number);
            return None;
        }
    }
    let sock = match Sock::replace(calls, number, fd, is_v6(fd)) {
        Ok(sock) => sock,
        Err(errno) => {
            close_rsocket(calls, number);
            return Some(failed(errno));
        }
    };
    if fallback {
        sock.begun(fd);
        return Some(0);
    }
    if let Some(Err(errno)) = bound.map(|bound| bind_rsocket(calls, number, address::meant(bound))) {
        return Some(failed(errno));
    }
    let result = connect_rsocket(calls, number, peer);
    let errno = errno();
    sock.begun(fd);
    Some(if result < 0 { failed(errno) } else { result })
}

fn connects_soon(calls: &Rsockets, number: c_int, peer: std::net::SocketAddr) -> bool {
    calls.set_nonblocking(number, true);
    if connect_rsocket(calls, number, peer) < 0 && errno() != libc::EINPROGRESS {
        return false;
    }
    let ready = calls.wait(number, libc::POLLOUT, FALLBACK_MS) > 0;
    ready
        && calls.number(number, libc::SOL_SOCKET, libc::SO_ERROR, 0) == Some(0)
        && connect_rsocket(calls, number, peer) == 0
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn bind(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int {
    if fds::is_ruled(fd) {
        return failed(libc::EINVAL);
    }
    real!(bind(fd: c_int, to: *const sockaddr, len: socklen_t) -> c_int)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn listen(fd: c_int, backlog: c_int) -> c_int {
    if fds::is_ruled(fd) {
        let Some(sock) = sock::of(fd) else { return -1 };
        // A new backlog has no effect.
        return if sock.listens() { 0 } else { failed(libc::EINVAL) };
    }
    if fds::is_candidate(fd)
        && let Some(own) = own_name(fd).map(address::meant)
    {
        match process::decide(Role::Listen, own) {
            Way::Tcp => fds::forget(fd),
            Way::Upgrade(_) => {
                fds::forget(fd);
                let result = real!(listen(fd: c_int, backlog: c_int) -> c_int);
                if result == 0 {
                    fds::enter_offering(fd);
                }
                return result;
            }
            Way::Rsockets { .. } => {
                return match listen_first(fd, own, backlog) {
                    Ok(()) => 0,
                    Err(errno) => failed(errno),
                };
            }
        }
    }
    real!(listen(fd: c_int, backlog: c_int) -> c_int)
}

fn listen_first(fd: c_int, own: std::net::SocketAddr, backlog: c_int) -> Result<(), c_int> {
    if agree::service::tells_of_buffers(fd) {
        return Err(libc::EOPNOTSUPP);
    }
    let calls = rsockets::load().ok_or(libc::ENODEV)?;
    let v6 = is_v6(fd);
    let number = new_rsocket(calls, own.is_ipv6())?;
    // The TCP socket gives its port up here.
    let sock = match Sock::replace(calls, number, fd, v6) {
        Ok(sock) => sock,
        Err(errno) => {
            close_rsocket(calls, number);
            return Err(errno);
        }
    };
    if own.port() != 0 {
        bind_rsocket(calls, number, own)?;
    }
    // SAFETY: no pointer.
    if unsafe { (calls.rlisten)(number, backlog) } < 0 {
        return Err(errno());
    }
    sock.set_listens();
    sock.begun(fd);
    Ok(())
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn accept(fd: c_int, from: *mut sockaddr, len: *mut socklen_t) -> c_int {
    if fds::is_ruled(fd) {
        // SAFETY: the caller passes what the function of libc takes.
        return unsafe { accepted(fd, from, len, 0) };
    }
    let new = of_kernel(real!(accept(fd: c_int, from: *mut sockaddr, len: *mut socklen_t) -> c_int));
    if fds::is_offering(fd) { offered(new) } else { new }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn accept4(
    fd: c_int,
    from: *mut sockaddr,
    len: *mut socklen_t,
    flags: c_int,
) -> c_int {
    if fds::is_ruled(fd) {
        // SAFETY: the caller passes what the function of libc takes.
        return unsafe { accepted(fd, from, len, flags) };
    }
    let new =
        of_kernel(real!(accept4(fd: c_int, from: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int));
    if fds::is_offering(fd) { offered(new) } else { new }
}

/// A new descriptor of the kernel. Its number may be one that was closed without libc's names.
#[inline]
fn of_kernel(fd: c_int) -> c_int {
    if fds::is_special(fd) {
        if fds::is_asking(fd) {
            agree::table::remove(fd);
        }
        fds::forget(fd);
    }
    fd
}

/// A connection that was accepted where connections may become iWARP's.
fn offered(fd: c_int) -> c_int {
    if fd < 0 {
        return fd;
    }
    let (mut storage, mut len) = address::room();
    let (to, size): (*mut sockaddr, *mut socklen_t) = ((&raw mut storage).cast(), &raw mut len);
    sys::quietly(|| {
        let got = real!(getpeername(fd: c_int, to: *mut sockaddr, size: *mut socklen_t) -> c_int);
        // SAFETY: what the call wrote.
        let peer = (got == 0).then(|| unsafe { address::load(to, len) }).flatten().map(address::meant);
        if let (Some(peer), Some(own)) = (peer, own_name(fd).map(address::meant))
            && let Some(trust) = process::upgrades(own, peer.ip())
        {
            may_become(fd, agree::machine::Role::Accepted, peer, trust);
        }
    });
    fd
}

/// # Safety
/// As accept4(2).
unsafe fn accepted(fd: c_int, from: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
    let Some(listener) = sock::of(fd) else { return -1 };
    let Some(calls) = listener.calls() else { return -1 };
    if flags & !(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) != 0 || !listener.listens() {
        return failed(libc::EINVAL);
    }
    // A connection is taken only when there is a descriptor for it.
    let limit = if listener.is_nonblocking() { 0 } else { listener.limit_for_poll(Direction::Receive) };
    match calls.wait(listener.number(), libc::POLLIN, limit) {
        0 => return failed(libc::EAGAIN),
        ready if ready < 0 => return -1,
        _ => {}
    }
    let (stand_in, end) = match StandIn::new() {
        Ok(made) => made,
        Err(errno) => return failed(errno),
    };
    // SAFETY: no address is asked for.
    let number = unsafe { (calls.raccept)(listener.number(), std::ptr::null_mut(), std::ptr::null_mut()) };
    let errno = errno();
    listener.show(Because::Call);
    if number < 0 {
        stand_in.close();
        sys::close(end);
        return failed(errno);
    }
    let sock = Arc::new(listener.accepted(number, stand_in));
    sock.set_nonblocking(calls, flags & libc::SOCK_NONBLOCK != 0);
    // SAFETY: the caller passes what the function of libc takes.
    if !from.is_null() && unsafe { sock.name(true, from, len) } < 0 {
        // Gone already: it has no address any more.
        // SAFETY: as above.
        unsafe { len.write(0) };
    }
    fds::enter(end, sock, flags & libc::SOCK_CLOEXEC == 0);
    end
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn shutdown(fd: c_int, how: c_int) -> c_int {
    // First: it may get a stand-in at any moment, and whoever looked for that before would end the stand-in's
    // own pair then, and no end would go to the peer.
    if fds::is_asking(fd) && !process::is_child() {
        // An end that sends no more could not answer.
        agree::table::veto(fd);
    }
    if fds::is_ruled(fd) && !(process::is_forked() && relay::ask_for(fd)) {
        let _pass = Pass::begin();
        let Some(sock) = sock::of(fd) else { return -1 };
        let Some(calls) = sock.calls() else { return -1 };
        if sock.is_handed() {
            return sys_shutdown(fd, how);
        }
        if let Some(result) = sock.conn().and_then(|conn| conn.shutdown(how)) {
            sock.show(Because::Call);
            return result;
        }
        // SAFETY: no pointer.
        let result = unsafe { (calls.rshutdown)(sock.number(), how) };
        sock.show(Because::Call);
        return result;
    }
    sys_shutdown(fd, how)
}

fn sys_shutdown(fd: c_int, how: c_int) -> c_int {
    real!(shutdown(fd: c_int, how: c_int) -> c_int)
}

fn really_close(fd: c_int) -> c_int {
    real!(close(fd: c_int) -> c_int)
}

/// Closes a descriptor that is not the kernel's alone.
fn close_special(fd: c_int) -> c_int {
    if fds::is_own(fd) {
        // The program knows nothing of it: it closes all numbers there are.
        return failed(libc::EBADF);
    }
    ending::stop_at_the_end();
    if process::is_child() {
        // Of a child the copy only.
        forget_in_child(fd);
        return really_close(fd);
    }
    crate::wait::forget(fd);
    if fds::is_asking(fd) {
        agree::table::remove(fd);
    }
    match taken_out(fd) {
        Some(sock) => {
            sock.release(|| {
                really_close(fd);
            });
            0
        }
        None => really_close(fd),
    }
}

/// The socket of a descriptor that is being closed. A copy that another thread is making of it just now
/// counts already, or is not made any more.
fn taken_out(fd: c_int) -> Option<Arc<Sock>> {
    let _changing = agree::table::changing();
    fds::remove(fd)
}

/// In a child the number is the kernel's alone from now on. Not after vfork(2): the table is the parent's.
fn forget_in_child(fd: c_int) {
    if process::is_forked() {
        fds::forget(fd);
    }
}

macro_rules! closes {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(fd: c_int) -> c_int {
            if fds::is_special(fd) {
                return close_special(fd);
            }
            real!($name(fd: c_int) -> c_int)
        }
    )*};
}

closes! { close __close }

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let really =
        |first: c_uint, last: c_uint| real!(close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int);
    if !fds::rules_apply() || first > last {
        return really(first, last);
    }
    let special = fds::special_within(first, last);
    if flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0 {
        let result = really(first, last);
        // Behind it: what gets a stand-in takes this from the kernel.
        special.iter().for_each(|fd| fds::set_kept(*fd, false));
        return result;
    }
    // All but what the program knows nothing of.
    let mut from = first;
    for fd in special {
        let at = fd.cast_unsigned();
        if at > from && really(from, at - 1) < 0 {
            return -1;
        }
        if !fds::is_own(fd) {
            close_special(fd);
        }
        from = at + 1;
    }
    if from <= last { really(from, last) } else { 0 }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn closefrom(first: c_int) {
    let first = first.max(0).cast_unsigned();
    if fds::rules_apply() {
        // SAFETY: numbers.
        unsafe { close_range(first, c_uint::MAX, 0) };
    } else {
        let first = first.cast_signed();
        real!(closefrom(first: c_int) -> ())
    }
}

/// `really` makes a copy of `old`, and says which. Until it is entered, neither of the two becomes another
/// file.
fn copy(old: c_int, kept: bool, really: impl FnOnce() -> c_int) -> c_int {
    if process::is_child() {
        return copy_in_child(old, really);
    }
    if !fds::is_special(old) {
        return really();
    }
    let ruled = fds::is_ruled(old);
    let mut changing = agree::table::changing();
    if ruled && !fds::is_ruled(old) {
        // Another thread is closing it.
        return failed(libc::EBADF);
    }
    let new = really();
    if new >= 0 && new != old {
        copied(&mut changing.table, old, new, kept);
    }
    new
}

fn copy_in_child(old: c_int, really: impl FnOnce() -> c_int) -> c_int {
    if fds::is_asking(old) {
        // For the child's own use, which nothing here sees.
        agree::table::veto(old);
    }
    let new = really();
    if new >= 0 && new != old {
        forget_in_child(new);
        if fds::is_ruled(old) && !relay::ask_for(old) {
            sys::quietly(rsockets::say_forked);
        }
    }
    new
}

/// `new` is a copy of `old` now.
fn copied(table: &mut agree::table::Table, old: c_int, new: c_int, kept: bool) {
    if fds::is_ruled(old) {
        if let Some(sock) = fds::find(old) {
            let _ = sys::quietly(|| sys::fcntl(new, libc::F_SETFD, libc::FD_CLOEXEC));
            sock.duplicated();
            fds::enter(new, sock, kept);
        }
    } else if fds::is_asking(old) {
        let conn = table.as_ref().and_then(|table| table.get(&old).cloned());
        if let Some(conn) = conn {
            agree::table::enter_in(table, new, conn);
        }
    } else if fds::is_offering(old) {
        fds::enter_offering(new);
    } else if fds::is_candidate(old) {
        fds::enter_copied(old, new);
    }
}

/// `new` is about to become something else, if `old` is a descriptor.
fn give_up(old: c_int, new: c_int) -> Option<Arc<Sock>> {
    let there =
        old != new && !process::is_child() && sys::quietly(|| sys::fcntl(old, libc::F_GETFD, 0)).is_ok();
    if !there {
        return None;
    }
    crate::wait::forget(new);
    if fds::is_asking(new) {
        agree::table::remove(new);
    }
    taken_out(new)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    let really = || real!(dup(fd: c_int) -> c_int);
    if fds::is_special(fd) { copy(fd, true, really) } else { really() }
}

/// `dup` onto a number, by `really`.
fn onto(old: c_int, new: c_int, kept: bool, really: impl FnOnce() -> c_int) -> c_int {
    if !fds::is_special(old) && !fds::is_special(new) {
        return really();
    }
    if fds::is_own(new) || fds::is_own(old) {
        return failed(libc::EBUSY);
    }
    let before = give_up(old, new);
    let mut result = -1;
    // (If this closes a socket that lingers, all threads wait that make copies.)
    let really = || result = copy(old, kept, really);
    match before {
        Some(sock) => sock.release(really),
        None => really(),
    }
    result
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn dup2(old: c_int, new: c_int) -> c_int {
    onto(old, new, true, || real!(dup2(old: c_int, new: c_int) -> c_int))
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn __dup2(old: c_int, new: c_int) -> c_int {
    onto(old, new, true, || real!(__dup2(old: c_int, new: c_int) -> c_int))
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    let kept = flags & libc::O_CLOEXEC == 0;
    onto(old, new, kept, || real!(dup3(old: c_int, new: c_int, flags: c_int) -> c_int))
}

/// Variadic in C; the one further argument arrives in the same place.
macro_rules! fcntls {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(fd: c_int, command: c_int, argument: c_long) -> c_int {
            let really = || real!($name(fd: c_int, command: c_int, argument: c_long) -> c_int);
            if fds::is_special(fd) { fcntl_special(fd, command, argument as c_int, really) } else { really() }
        }
    )*};
}

fcntls! { fcntl fcntl64 __fcntl }

fn fcntl_special(fd: c_int, command: c_int, argument: c_int, really: impl FnOnce() -> c_int) -> c_int {
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        return copy(fd, command == libc::F_DUPFD, really);
    }
    // These two wait.
    let waits = matches!(command, libc::F_SETLKW | libc::F_OFD_SETLKW);
    let _still = if waits { None } else { agree::table::still(fd) };
    match command {
        libc::F_SETFD
            if fds::is_ruled(fd)
                && process::is_child()
                && argument & libc::FD_CLOEXEC == 0
                && !relay::ask_for(fd) =>
        {
            sys::quietly(rsockets::say_forked);
            return really();
        }
        _ if !fds::is_ruled(fd) || process::is_child() => return really(),
        libc::F_GETFD => return if fds::is_kept(fd) { 0 } else { libc::FD_CLOEXEC },
        // It does not survive exec in any case.
        libc::F_SETFD => fds::set_kept(fd, argument & libc::FD_CLOEXEC == 0),
        libc::F_SETFL => {
            if let Some(sock) = fds::find(fd)
                && let Some(calls) = sock.calls()
            {
                sock.set_nonblocking(calls, argument & libc::O_NONBLOCK != 0);
                if argument & libc::O_ASYNC != 0 {
                    sock.tells_by_signals();
                }
            }
            return really();
        }
        _ => return really(),
    }
    0
}

/// Variadic in C, as `fcntl`.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_int) -> c_int {
    if fds::is_special(fd) && matches!(request, libc::FIOCLEX | libc::FIONCLEX) {
        let flags = if request == libc::FIOCLEX { libc::FD_CLOEXEC } else { 0 };
        let really = || real!(ioctl(fd: c_int, request: c_ulong, argument: *mut c_int) -> c_int);
        return fcntl_special(fd, libc::F_SETFD, flags, really);
    }
    let _still = agree::table::still(fd);
    if fds::is_ruled(fd) {
        // SAFETY: the caller passes what the function of libc takes.
        if let Some(result) = unsafe { ioctl_of(fd, request, argument) } {
            return result;
        }
    }
    real!(ioctl(fd: c_int, request: c_ulong, argument: *mut c_int) -> c_int)
}

/// `None`: it is the kernel's, for the stand-in.
///
/// # Safety
/// As ioctl(2).
unsafe fn ioctl_of(fd: c_int, request: c_ulong, argument: *mut c_int) -> Option<c_int> {
    const SIOCOUTQ: c_ulong = 0x5411;
    const SIOCATMARK: c_ulong = 0x8905;
    const FIOASYNC: c_ulong = 0x5452;
    const FIOSETOWN: c_ulong = 0x8901;
    const SIOCSPGRP: c_ulong = 0x8902;
    const FIOGETOWN: c_ulong = 0x8903;
    const SIOCGPGRP: c_ulong = 0x8904;
    let Some(sock) = sock::of(fd) else { return Some(-1) };
    let calls = sock.calls().filter(|_| !sock.is_handed())?;
    let number = match request {
        libc::FIONBIO if !argument.is_null() => {
            // SAFETY: the caller's promise.
            sock.set_nonblocking(calls, unsafe { argument.read_unaligned() } != 0);
            return Some(0);
        }
        // As by fcntl.
        FIOASYNC => {
            // SAFETY: the caller's promise.
            if !argument.is_null() && unsafe { argument.read_unaligned() } != 0 {
                sock.tells_by_signals();
            }
            return None;
        }
        FIOSETOWN | SIOCSPGRP | FIOGETOWN | SIOCGPGRP => return None,
        libc::FIONREAD if sock.listens() => return Some(failed(libc::EINVAL)),
        libc::FIONREAD => {
            let stream = sock.conn().is_none_or(|conn| conn.stage() == Stage::Stream);
            let unread = if stream { calls.unread(sock.number()).unwrap_or(0) } else { 0 };
            let ahead = sock.conn().filter(|conn| !conn.is_only_stream()).map_or(0, |conn| conn.unread());
            unread.saturating_add(c_int::try_from(ahead).unwrap_or(c_int::MAX))
        }
        SIOCOUTQ if sock.conn().is_some_and(|conn| conn.stage() == Stage::Behind) => {
            let fd = sock.options()?;
            return Some(real!(ioctl(fd: c_int, request: c_ulong, argument: *mut c_int) -> c_int));
        }
        SIOCOUTQ | SIOCATMARK => 0,
        // Of interfaces and routes: any socket does.
        _ => {
            let fd = sock.options()?;
            return Some(real!(ioctl(fd: c_int, request: c_ulong, argument: *mut c_int) -> c_int));
        }
    };
    if argument.is_null() {
        return Some(failed(libc::EFAULT));
    }
    // SAFETY: the caller's promise.
    unsafe { argument.write_unaligned(number) };
    Some(0)
}
