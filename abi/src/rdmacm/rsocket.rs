//! rsockets (rsocket(7)): not built. Every call fails with `EOPNOTSUPP`, whatever descriptor it gets.

use std::ffi::{c_int, c_long, c_void};

use libc::{epoll_event, fd_set, iovec, msghdr, nfds_t, off_t, pollfd, sockaddr, socklen_t, timeval};

use crate::convention::MinusOne;
use crate::entry;
use crate::failure::Failure;

fn none() -> Failure {
    Failure::unsupported("rsockets")
}

entry! {
    /// rsocket(7).
    fn rsocket(_domain: c_int, _kind: c_int, _protocol: c_int) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn rbind(_socket: c_int, _addr: *const sockaddr, _len: socklen_t) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn rlisten(_socket: c_int, _backlog: c_int) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn raccept(_socket: c_int, _addr: *mut sockaddr, _len: *mut socklen_t) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn rconnect(_socket: c_int, _addr: *const sockaddr, _len: socklen_t) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn rshutdown(_socket: c_int, _how: c_int) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn rclose(_socket: c_int) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn rrecv(_socket: c_int, _buf: *mut c_void, _len: usize, _flags: c_int) -> MinusOne<isize> {
        Err(none())
    }
    /// rsocket(7).
    fn rrecvfrom(
        _socket: c_int,
        _buf: *mut c_void,
        _len: usize,
        _flags: c_int,
        _src: *mut sockaddr,
        _srclen: *mut socklen_t,
    ) -> MinusOne<isize> {
        Err(none())
    }
    /// rsocket(7).
    fn rrecvmsg(_socket: c_int, _msg: *mut msghdr, _flags: c_int) -> MinusOne<isize> {
        Err(none())
    }
    /// rsocket(7).
    fn rsend(_socket: c_int, _buf: *const c_void, _len: usize, _flags: c_int) -> MinusOne<isize> {
        Err(none())
    }
    /// rsocket(7).
    fn rsendto(
        _socket: c_int,
        _buf: *const c_void,
        _len: usize,
        _flags: c_int,
        _dest: *const sockaddr,
        _destlen: socklen_t,
    ) -> MinusOne<isize> {
        Err(none())
    }
    /// rsocket(7).
    fn rsendmsg(_socket: c_int, _msg: *const msghdr, _flags: c_int) -> MinusOne<isize> {
        Err(none())
    }
    /// rsocket(7).
    fn rread(_socket: c_int, _buf: *mut c_void, _count: usize) -> MinusOne<isize> {
        Err(none())
    }
    /// rsocket(7).
    fn rreadv(_socket: c_int, _iov: *const iovec, _count: c_int) -> MinusOne<isize> {
        Err(none())
    }
    /// rsocket(7).
    fn rwrite(_socket: c_int, _buf: *const c_void, _count: usize) -> MinusOne<isize> {
        Err(none())
    }
    /// rsocket(7).
    fn rwritev(_socket: c_int, _iov: *const iovec, _count: c_int) -> MinusOne<isize> {
        Err(none())
    }
    /// rsocket(7).
    fn rpoll(_fds: *mut pollfd, _nfds: nfds_t, _timeout: c_int) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn rselect(
        _nfds: c_int,
        _read: *mut fd_set,
        _write: *mut fd_set,
        _except: *mut fd_set,
        _timeout: *mut timeval,
    ) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn rgetpeername(_socket: c_int, _addr: *mut sockaddr, _len: *mut socklen_t) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn rgetsockname(_socket: c_int, _addr: *mut sockaddr, _len: *mut socklen_t) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn rsetsockopt(
        _socket: c_int,
        _level: c_int,
        _name: c_int,
        _value: *const c_void,
        _len: socklen_t,
    ) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn rgetsockopt(
        _socket: c_int,
        _level: c_int,
        _name: c_int,
        _value: *mut c_void,
        _len: *mut socklen_t,
    ) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7). Variadic in C; the one further argument arrives in the same place.
    fn rfcntl(_socket: c_int, _cmd: c_int, _arg: c_long) -> MinusOne<c_int> {
        Err(none())
    }
    /// riomap(3): the failure is an offset of -1.
    fn riomap(
        _socket: c_int,
        _buf: *mut c_void,
        _len: usize,
        _prot: c_int,
        _flags: c_int,
        _offset: off_t,
    ) -> MinusOne<off_t> {
        Err(none())
    }
    /// riomap(3).
    fn riounmap(_socket: c_int, _buf: *mut c_void, _len: usize) -> MinusOne<c_int> {
        Err(none())
    }
    /// riowrite(3): returns a count of bytes, of which -1 is none.
    fn riowrite(
        _socket: c_int,
        _buf: *const c_void,
        _count: usize,
        _offset: off_t,
        _flags: c_int,
    ) -> MinusOne<isize> {
        Err(none())
    }
    /// rsocket(7).
    fn repoll_create() -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn repoll_ctl(_epfd: c_int, _op: c_int, _fd: c_int, _event: *mut epoll_event) -> MinusOne<c_int> {
        Err(none())
    }
    /// rsocket(7).
    fn repoll_wait(
        _epfd: c_int,
        _events: *mut epoll_event,
        _max: c_int,
        _timeout: c_int,
    ) -> MinusOne<c_int> {
        Err(none())
    }
}
