//! Names and options.
//!
//! Options that concern TCP alone are kept by a TCP socket that does nothing else: it accepts, refuses and
//! returns them as the kernel does.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use libc::{sockaddr, socklen_t, timeval};
use uwarp_preload::{real, set_errno};

use crate::agree::conn::Stage;
use crate::agree::table;
use crate::ending::Pass;
use crate::fds;
use crate::sock::{self, Direction, Sock};
use crate::stand_in::Because;

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn getsockname(fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let _still = table::still(fd);
    if fds::is_ruled(fd) {
        // SAFETY: the caller passes what the function of libc takes.
        return sock::of(fd).map_or(-1, |sock| unsafe { sock.name(false, to, len) });
    }
    real!(getsockname(fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> c_int)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn getpeername(fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let _still = table::still(fd);
    if fds::is_ruled(fd) {
        // SAFETY: the caller passes what the function of libc takes.
        return sock::of(fd).map_or(-1, |sock| unsafe { sock.name(true, to, len) });
    }
    real!(getpeername(fd: c_int, to: *mut sockaddr, len: *mut socklen_t) -> c_int)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    if (level, name) == (libc::IPPROTO_TCP, libc::TCP_ULP) {
        // TLS of the kernel, for example: it would be beneath the stream.
        if fds::is_asking(fd) {
            table::veto(fd);
        }
        if fds::is_ruled(fd) {
            return sock::fail(libc::ENOPROTOOPT);
        }
    }
    let _still = table::still(fd);
    if (level, name) == (libc::SOL_SOCKET, libc::SO_ZEROCOPY) && fds::is_ruled(fd) {
        let is_on = !value.is_null() && len as usize >= size_of::<c_int>();
        // Nobody would say that a buffer is free. (A socket that has it stays TCP.)
        // SAFETY: the caller passes what the function of libc takes.
        if is_on && unsafe { value.cast::<c_int>().read_unaligned() } != 0 {
            return sock::fail(libc::EOPNOTSUPP);
        }
    }
    if !fds::is_ruled(fd) {
        return real!(setsockopt(
            fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t
        ) -> c_int);
    }
    let Some(sock) = sock::of(fd) else { return -1 };
    let Some(keeper) = sock.options() else { return -1 };
    if let Some(conn) = sock.conn().filter(|_| sock.kept(level, name).is_some()) {
        if value.is_null() || (len as usize) < size_of::<c_int>() {
            return sock::fail(if value.is_null() { libc::EFAULT } else { libc::EINVAL });
        }
        // SAFETY: the caller passes what the function of libc takes.
        let value = unsafe { value.cast::<c_int>().read_unaligned() };
        let on = if name == libc::SO_RCVLOWAT && level == libc::SOL_SOCKET {
            value.max(1)
        } else {
            c_int::from(value != 0)
        };
        sock.keep(conn, (level, name), on);
        return 0;
    }
    let result = {
        let fd = keeper;
        real!(setsockopt(
            fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t
        ) -> c_int)
    };
    if result == 0 {
        // SAFETY: the kernel has read the value.
        unsafe { take_effect(&sock, level, name, value, len) };
    }
    result
}

/// What an option that was accepted does to the socket itself.
///
/// # Safety
/// `value` has `len` bytes, and as many as the option has.
unsafe fn take_effect(sock: &Sock, level: c_int, name: c_int, value: *const c_void, len: socklen_t) {
    let Some(calls) = sock.calls() else { return };
    if sock.conn().is_some() && level != libc::SOL_SOCKET {
        // The kernel's acts on the connection.
        return;
    }
    let direction = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => Direction::Receive,
        (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => Direction::Send,
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE | libc::SO_LINGER)
        | (libc::IPPROTO_TCP, libc::TCP_NODELAY | libc::TCP_KEEPIDLE) => {
            // SAFETY: the caller's promise.
            crate::sys::quietly(|| unsafe { (calls.rsetsockopt)(sock.number(), level, name, value, len) });
            return;
        }
        _ => return,
    };
    // SAFETY: the caller's promise.
    let time = unsafe { value.cast::<timeval>().read_unaligned() };
    let micros = time.tv_sec.saturating_mul(1_000_000).saturating_add(time.tv_usec);
    sock.limit(direction).store(u64::try_from(micros).unwrap_or(0), Ordering::Relaxed);
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let _still = table::still(fd);
    if !fds::is_ruled(fd) {
        return real!(getsockopt(
            fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t
        ) -> c_int);
    }
    let _pass = Pass::begin();
    let Some(sock) = sock::of(fd) else { return -1 };
    let Some(calls) = sock.calls() else { return -1 };
    if let Some(conn) = sock.conn() {
        let number = match (level, name) {
            (libc::SOL_SOCKET, libc::SO_ERROR) if conn.stage() != Stage::Stream => Some(conn.take_error()),
            (libc::SOL_SOCKET, libc::SO_ERROR) => calls.number(sock.number(), level, name, 0),
            _ => sock.kept(level, name).map(|kept| kept.load(Ordering::Relaxed)),
        };
        if let Some(number) = number {
            if value.is_null() || len.is_null() {
                return sock::fail(libc::EFAULT);
            }
            // SAFETY: the caller passes what the function of libc takes.
            unsafe {
                let fits = (len.read_unaligned() as usize).min(size_of::<c_int>());
                let bytes = number.to_ne_bytes();
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.cast::<u8>(), fits);
                len.write_unaligned(fits as socklen_t);
            }
            sock.show(Because::Call);
            return 0;
        }
        let fd = conn.tcp();
        return real!(getsockopt(
            fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t
        ) -> c_int);
    }
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_ERROR | libc::SO_ACCEPTCONN) | (libc::IPPROTO_TCP, libc::TCP_INFO) => {
            if value.is_null() || len.is_null() {
                set_errno(libc::EFAULT);
                return -1;
            }
            // SAFETY: the caller passes what the function of libc takes.
            let result = unsafe { (calls.rgetsockopt)(sock.number(), level, name, value, len) };
            sock.show(Because::Call);
            result
        }
        _ => {
            let Some(fd) = sock.options() else { return -1 };
            real!(getsockopt(
                fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t
            ) -> c_int)
        }
    }
}
