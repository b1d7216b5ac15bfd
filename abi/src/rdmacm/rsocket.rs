//! `<rdma/rsocket.h>` (rsocket(7)): sockets over queue pairs. Here C's arguments are converted; what the
//! calls do is in `uwarp_rsocket`.
//!
//! | file | what |
//! |---|---|
//! | this one | from `rsocket` to `rclose`, addresses, `rfcntl` |
//! | [`data`] | sending and receiving, mapped buffers |
//! | [`event_loop`] | for libuwarp-sockets.so: how threads of event loops make progress |
//! | [`options`] | `rsetsockopt`, `rgetsockopt` |
//! | [`poll`] | `rpoll`, `rselect`, `repoll_…` |
//!
//! Where rsocket(7) is silent, a call does what its namesake of the kernel does. A forked child cannot use
//! the device, so all of these calls return `ENODEV` there, with two exceptions: `rclose` does nothing, and
//! `rpoll` and `rselect` serve the kernel's descriptors.

pub mod data;
pub mod event_loop;
pub mod options;
pub mod poll;

use std::ffi::{c_int, c_long};
use std::net::SocketAddr;

use libc::{sockaddr, socklen_t};
use uwarp_abi_types::preload::UWARP_NO_DESCRIPTOR;
use uwarp_rsocket::socket::How;
use uwarp_rsocket::table::{self, Any, Entry};
use uwarp_rsocket::{Datagrams, Errno, Socket};

use super::address;
use crate::convention::MinusOne;
use crate::entry;
use crate::failure::Failure;

/// Gives an address to the program: as much as fits, and its whole length.
///
/// # Safety
/// Both are NULL, or `len` says how long `to` is.
unsafe fn give(from: SocketAddr, to: *mut sockaddr, len: *mut socklen_t) {
    if to.is_null() || len.is_null() {
        return;
    }
    let (storage, whole) = address::storage(from);
    // SAFETY: the caller's promise.
    unsafe {
        let fits = (*len).min(whole) as usize;
        std::ptr::copy_nonoverlapping((&raw const storage).cast::<u8>(), to.cast::<u8>(), fits);
        *len = whole;
    }
}

/// Reads an address of `len` bytes.
///
/// # Safety
/// `from` is NULL or has `len` bytes.
unsafe fn load(from: *const sockaddr, len: socklen_t) -> Result<SocketAddr, Failure> {
    let len = len as usize;
    if from.is_null() || len < size_of::<libc::sa_family_t>() {
        return Err(Failure::invalid("the address's length"));
    }
    // SAFETY: long enough for its family.
    let family = c_int::from(unsafe { (&raw const (*from).sa_family).read_unaligned() });
    let whole = if family == libc::AF_INET6 {
        size_of::<libc::sockaddr_in6>()
    } else {
        size_of::<libc::sockaddr_in>()
    };
    if len < whole {
        return Err(Failure::invalid("the address's length"));
    }
    // SAFETY: long enough for an address of this family.
    unsafe { address::load(from) }
}

fn enter(socket: std::sync::Arc<Socket>) -> c_int {
    table::insert(socket.fd(), Entry::Socket(socket))
}

/// Of `libuwarp-sockets.so`.
const PRELOADED: c_int = libc::SOCK_STREAM | UWARP_NO_DESCRIPTOR;

fn create(domain: c_int, kind: c_int, protocol: c_int) -> Result<c_int, Failure> {
    let v6 = match domain {
        libc::AF_INET => false,
        libc::AF_INET6 => true,
        _ => return Err(Failure::unsupported("address families other than IPv4 and IPv6")),
    };
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let is = |flag| kind & flag != 0;
    match (kind & !flags, protocol) {
        (PRELOADED, 0) => {
            Ok(enter(Socket::without_descriptor(v6, is(libc::SOCK_NONBLOCK), is(libc::SOCK_CLOEXEC))?))
        }
        (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => {
            Ok(enter(Socket::new(v6, is(libc::SOCK_NONBLOCK), is(libc::SOCK_CLOEXEC))?))
        }
        (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP) => {
            let socket = Datagrams::new(v6, is(libc::SOCK_NONBLOCK))?;
            Ok(table::insert(socket.fd(), Entry::Datagrams(socket)))
        }
        _ => Err(Failure::unsupported("sockets that are neither TCP's nor UDP's")),
    }
}

entry! {
    /// rsocket(7).
    fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> MinusOne<c_int> {
        create(domain, kind, protocol)
    }

    /// rsocket(7).
    fn rbind(socket: c_int, addr: *const sockaddr, len: socklen_t) -> MinusOne {
        let address = load(addr, len)?;
        Ok(match table::any(socket)? {
            Any::Stream(socket) => socket.bind(address),
            Any::Datagrams(socket) => socket.bind(address),
        }?)
    }

    /// rsocket(7).
    fn rlisten(socket: c_int, backlog: c_int) -> MinusOne {
        Ok(table::socket(socket)?.listen(backlog)?)
    }

    /// rsocket(7).
    fn raccept(socket: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> MinusOne<c_int> {
        let new = table::socket(socket)?.accept()?;
        if let Ok(peer) = new.peer_address() {
            give(peer, addr, len);
        }
        Ok(enter(new))
    }

    /// rsocket(7).
    fn rconnect(socket: c_int, addr: *const sockaddr, len: socklen_t) -> MinusOne {
        let peer = load(addr, len)?;
        Ok(match table::any(socket)? {
            Any::Stream(socket) => socket.connect(peer),
            Any::Datagrams(socket) => socket.connect(peer),
        }?)
    }

    /// rsocket(7).
    fn rshutdown(socket: c_int, how: c_int) -> MinusOne {
        let how = match how {
            libc::SHUT_RD => How::Reading,
            libc::SHUT_WR => How::Writing,
            libc::SHUT_RDWR => How::Both,
            _ => return Err(Failure::invalid("how")),
        };
        Ok(table::socket(socket)?.shutdown(how)?)
    }

    /// rsocket(7).
    fn rclose(socket: c_int) -> MinusOne {
        if table::is_parents(socket) {
            table::forget(socket);
            return Ok(());
        }
        Ok(table::close(socket)?)
    }

    /// rsocket(7).
    fn rgetpeername(socket: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> MinusOne {
        let peer = match table::any(socket)? {
            Any::Stream(socket) => socket.peer_address(),
            Any::Datagrams(socket) => socket.peer_address(),
        };
        give(peer?, addr, len);
        Ok(())
    }

    /// rsocket(7).
    fn rgetsockname(socket: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> MinusOne {
        let own = match table::any(socket)? {
            Any::Stream(socket) => socket.local_address(),
            Any::Datagrams(socket) => socket.local_address(),
        };
        give(own?, addr, len);
        Ok(())
    }

    /// rsocket(7). Variadic in C; the one further argument arrives in the same place.
    fn rfcntl(socket: c_int, cmd: c_int, arg: c_long) -> MinusOne<c_int> {
        let socket = table::any(socket)?;
        // An int in C: the upper half is undefined.
        let arg = arg as c_int;
        let nonblocking = match &socket {
            Any::Stream(socket) => socket.nonblocking(),
            Any::Datagrams(socket) => socket.nonblocking(),
        };
        Ok(match (cmd, socket) {
            (libc::F_GETFL, _) => libc::O_RDWR | if nonblocking { libc::O_NONBLOCK } else { 0 },
            (libc::F_SETFL, socket) => {
                let on = arg & libc::O_NONBLOCK != 0;
                match socket {
                    Any::Stream(socket) => socket.set_nonblocking(on),
                    Any::Datagrams(socket) => socket.set_nonblocking(on),
                }
                0
            }
            (libc::F_GETFD, Any::Stream(socket)) if socket.close_on_exec() => libc::FD_CLOEXEC,
            (libc::F_SETFD, Any::Stream(socket)) => {
                socket.set_close_on_exec(arg & libc::FD_CLOEXEC != 0);
                0
            }
            (libc::F_GETFD | libc::F_SETFD, _) => 0,
            _ => return Err(Errno::OPNOTSUPP.into()),
        })
    }
}
