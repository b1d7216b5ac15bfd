//! Sending and receiving, and mapped buffers.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;

use libc::{iovec, msghdr, off_t, sockaddr, socklen_t};
use uwarp_rsocket::socket::Flags;
use uwarp_rsocket::table::{self, Any};
use uwarp_rsocket::{Errno, MemSeg};

use super::{give, load};
use crate::convention::MinusOne;
use crate::entry;
use crate::failure::{Failure, required};

/// Most vectors of one call, as of the kernel.
const MOST_VECTORS: usize = 1024;

pub(crate) fn flags(flags: c_int) -> Result<Flags, Failure> {
    if flags & libc::MSG_OOB != 0 {
        return Err(Failure::unsupported("urgent data"));
    }
    let is = |flag| flags & flag != 0;
    Ok(Flags { dont_wait: is(libc::MSG_DONTWAIT), peek: is(libc::MSG_PEEK), wait_all: is(libc::MSG_WAITALL) })
}

/// A program's buffer. Nothing is formed of it; it is copied to or from, and a bad one is `EFAULT`.
pub(crate) fn buffer(start: *const c_void, len: usize) -> MemSeg {
    // No call transfers more than fits the result.
    MemSeg { addr: start.expose_provenance() as u64, len: len.min(isize::MAX as usize) }
}

/// # Safety
/// `vectors` has `count` entries.
pub(crate) unsafe fn buffers(vectors: *const iovec, count: usize) -> Result<Vec<MemSeg>, Failure> {
    if count > MOST_VECTORS {
        return Err(Failure::invalid("too many vectors"));
    }
    if count == 0 {
        return Ok(Vec::new());
    }
    let vectors = required(vectors.cast_mut(), "iov")?;
    // SAFETY: the caller's promise.
    let all = (0..count).map(|i| unsafe { vectors.add(i).read_unaligned() });
    let buffers: Vec<MemSeg> = all.map(|vector| buffer(vector.iov_base, vector.iov_len)).collect();
    let sum = buffers.iter().try_fold(0usize, |sum, buffer| sum.checked_add(buffer.len));
    // What a call returns could not say more.
    sum.filter(|sum| *sum <= isize::MAX as usize).ok_or_else(|| Failure::invalid("too many bytes"))?;
    Ok(buffers)
}

pub(crate) fn length(bytes: usize) -> isize {
    isize::try_from(bytes).unwrap_or(isize::MAX)
}

/// What was received.
struct Received {
    /// Bytes that fitted.
    bytes: usize,
    /// More bytes of the datagram did not fit.
    cut: bool,
    /// Where the datagram came from; of a stream: the peer.
    from: Option<SocketAddr>,
}

fn receive_from(socket: c_int, buffers: &[MemSeg], with: c_int) -> Result<Received, Failure> {
    match table::any(socket)? {
        Any::Stream(socket) => {
            let bytes = socket.receive(buffers, flags(with)?)?;
            Ok(Received { bytes, cut: false, from: socket.peer_address().ok().filter(|_| bytes > 0) })
        }
        Any::Datagrams(socket) => {
            let (bytes, all, from) = socket.receive(buffers, flags(with)?)?;
            Ok(Received { bytes, cut: all > bytes, from: Some(from) })
        }
    }
}

fn receive(socket: c_int, buffers: &[MemSeg], with: c_int) -> Result<isize, Failure> {
    let received = match table::any(socket)? {
        Any::Stream(socket) => socket.receive(buffers, flags(with)?)?,
        Any::Datagrams(socket) => socket.receive(buffers, flags(with)?)?.0,
    };
    Ok(length(received))
}

/// rread and rreadv: a call for no bytes does nothing, as read(2).
fn read(socket: c_int, buffers: &[MemSeg]) -> Result<isize, Failure> {
    if buffers.iter().all(|buffer| buffer.len == 0) {
        table::any(socket)?;
        return Ok(0);
    }
    receive(socket, buffers, 0)
}

fn send(socket: c_int, buffers: &[MemSeg], with: c_int) -> Result<isize, Failure> {
    let sent = match table::any(socket)? {
        Any::Stream(socket) => socket.send(buffers, flags(with)?)?,
        Any::Datagrams(socket) => socket.send(buffers, None, flags(with)?)?,
    };
    Ok(length(sent))
}

/// # Safety
/// `to` is NULL or has `len` bytes.
unsafe fn send_to(
    socket: c_int,
    buffers: &[MemSeg],
    with: c_int,
    (to, len): (*const sockaddr, socklen_t),
) -> Result<isize, Failure> {
    if to.is_null() {
        return send(socket, buffers, with);
    }
    match table::any(socket)? {
        Any::Stream(_) => Err(Errno::ISCONN.into()),
        Any::Datagrams(socket) => {
            // SAFETY: the caller's promise.
            let to = unsafe { load(to, len) }?;
            Ok(length(socket.send(buffers, Some(to), flags(with)?)?))
        }
    }
}

pub(crate) fn vectors(count: c_int) -> Result<usize, Failure> {
    usize::try_from(count).map_err(|_| Failure::invalid("iovcnt"))
}

entry! {
    /// rsocket(7).
    fn rrecv(socket: c_int, buf: *mut c_void, len: usize, flags: c_int) -> MinusOne<isize> {
        receive(socket, &[buffer(buf, len)], flags)
    }

    /// rsocket(7).
    fn rrecvfrom(
        socket: c_int,
        buf: *mut c_void,
        len: usize,
        flags: c_int,
        src: *mut sockaddr,
        srclen: *mut socklen_t,
    ) -> MinusOne<isize> {
        let received = receive_from(socket, &[buffer(buf, len)], flags)?;
        if let Some(from) = received.from {
            give(from, src, srclen);
        }
        Ok(length(received.bytes))
    }

    /// rsocket(7).
    fn rrecvmsg(socket: c_int, msg: *mut msghdr, flags: c_int) -> MinusOne<isize> {
        let msg = required(msg, "msg")?;
        if !(*msg).msg_control.is_null() && (*msg).msg_controllen > 0 {
            return Err(Failure::unsupported("ancillary data"));
        }
        let received = receive_from(socket, &buffers((*msg).msg_iov, (*msg).msg_iovlen)?, flags)?;
        match received.from {
            // As of the kernel's: a stream names no sender.
            Some(from) if matches!(table::any(socket)?, Any::Datagrams(_)) => {
                give(from, (*msg).msg_name.cast(), &raw mut (*msg).msg_namelen);
            }
            _ => (*msg).msg_namelen = 0,
        }
        ((*msg).msg_flags, (*msg).msg_controllen) = (if received.cut { libc::MSG_TRUNC } else { 0 }, 0);
        Ok(length(received.bytes))
    }

    /// rsocket(7).
    fn rread(socket: c_int, buf: *mut c_void, count: usize) -> MinusOne<isize> {
        read(socket, &[buffer(buf, count)])
    }

    /// rsocket(7).
    fn rreadv(socket: c_int, iov: *const iovec, count: c_int) -> MinusOne<isize> {
        read(socket, &buffers(iov, vectors(count)?)?)
    }

    /// rsocket(7).
    fn rsend(socket: c_int, buf: *const c_void, len: usize, flags: c_int) -> MinusOne<isize> {
        send(socket, &[buffer(buf, len)], flags)
    }

    /// rsocket(7).
    fn rsendto(
        socket: c_int,
        buf: *const c_void,
        len: usize,
        flags: c_int,
        dest: *const sockaddr,
        destlen: socklen_t,
    ) -> MinusOne<isize> {
        send_to(socket, &[buffer(buf, len)], flags, (dest, destlen))
    }

    /// rsocket(7).
    fn rsendmsg(socket: c_int, msg: *const msghdr, flags: c_int) -> MinusOne<isize> {
        let msg = required(msg.cast_mut(), "msg")?;
        if !(*msg).msg_control.is_null() && (*msg).msg_controllen > 0 {
            return Err(Failure::unsupported("ancillary data"));
        }
        send_to(
            socket,
            &buffers((*msg).msg_iov, (*msg).msg_iovlen)?,
            flags,
            ((*msg).msg_name.cast(), (*msg).msg_namelen),
        )
    }

    /// rsocket(7).
    fn rwrite(socket: c_int, buf: *const c_void, count: usize) -> MinusOne<isize> {
        send(socket, &[buffer(buf, count)], 0)
    }

    /// rsocket(7).
    fn rwritev(socket: c_int, iov: *const iovec, count: c_int) -> MinusOne<isize> {
        let buffers = buffers(iov, vectors(count)?)?;
        if buffers.iter().all(|buffer| buffer.len == 0) {
            table::any(socket)?;
            return Ok(0);
        }
        send(socket, &buffers, 0)
    }

    /// riomap, rsocket(7): the failure is an offset of -1.
    fn riomap(
        socket: c_int,
        buf: *mut c_void,
        len: usize,
        prot: c_int,
        _flags: c_int,
        offset: off_t,
    ) -> MinusOne<off_t> {
        let socket = table::socket(socket)?;
        if prot & !libc::PROT_WRITE != 0 {
            return Err(Failure::invalid("protection other than PROT_WRITE"));
        }
        let offset = (offset != -1).then_some(offset.cast_unsigned());
        let mapped = socket.map(buffer(buf, len), prot & libc::PROT_WRITE != 0, offset)?;
        Ok(mapped.cast_signed())
    }

    /// riounmap, rsocket(7).
    fn riounmap(socket: c_int, buf: *mut c_void, len: usize) -> MinusOne {
        Ok(table::socket(socket)?.unmap(buffer(buf, len))?)
    }

    /// riowrite, rsocket(7): returns a count of bytes, of which -1 is none.
    fn riowrite(
        socket: c_int,
        buf: *const c_void,
        count: usize,
        offset: off_t,
        with: c_int,
    ) -> MinusOne<isize> {
        let socket = table::socket(socket)?;
        Ok(length(socket.write_mapped(&[buffer(buf, count)], offset.cast_unsigned(), flags(with)?)?))
    }
}
