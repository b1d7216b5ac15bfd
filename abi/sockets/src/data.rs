//! Functions that receive and send.

use std::ffi::{c_int, c_void};

use libc::{iovec, mmsghdr, msghdr, sockaddr, socklen_t, timespec};
use uwarp_preload::{errno, real, set_errno};

use crate::fds;
use crate::rsockets::say_forked;
use crate::sock::{self, Block};

fn receive(fd: c_int, to: *mut c_void, len: usize, flags: c_int) -> isize {
    let Some(sock) = sock::of(fd) else { return -1 };
    if flags & libc::MSG_TRUNC != 0 {
        // TCP's meaning: the bytes are thrown away.
        let mut block: Block = [0; _];
        let (to, len) = sock::at(&mut block, len);
        // SAFETY: a buffer and its length.
        return sock.receive(flags & !libc::MSG_TRUNC, |r, flags| unsafe {
            (r.rrecv)(sock.number(), to, len, flags)
        });
    }
    // SAFETY: the caller passes what the function of libc takes; a bad buffer is `EFAULT`.
    sock.receive(flags, |r, flags| unsafe { (r.rrecv)(sock.number(), to, len, flags) })
}

fn transmit(fd: c_int, from: *const c_void, len: usize, flags: c_int) -> isize {
    let Some(sock) = sock::of(fd) else { return -1 };
    // SAFETY: as of `receive`.
    sock.send(flags, |r, flags| unsafe { (r.rsend)(sock.number(), from, len, flags) })
}

/// # Safety
/// `vectors` has `count` entries.
unsafe fn receive_into(fd: c_int, vectors: *const iovec, count: c_int, flags: c_int) -> isize {
    let Some(sock) = sock::of(fd) else { return -1 };
    let Ok(len) = usize::try_from(count) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    sock.receive(flags, |r, flags| {
        let mut message = message(vectors, len);
        // SAFETY: the caller's promise.
        unsafe { (r.rrecvmsg)(sock.number(), &raw mut message, flags) }
    })
}

/// # Safety
/// `vectors` has `count` entries.
unsafe fn send_from(fd: c_int, vectors: *const iovec, count: c_int, flags: c_int) -> isize {
    let Some(sock) = sock::of(fd) else { return -1 };
    let Ok(len) = usize::try_from(count) else {
        set_errno(libc::EINVAL);
        return -1;
    };
    sock.send(flags, |r, flags| {
        let message = message(vectors, len);
        // SAFETY: the caller's promise.
        unsafe { (r.rsendmsg)(sock.number(), &raw const message, flags) }
    })
}

fn message(vectors: *const iovec, count: usize) -> msghdr {
    // SAFETY: zeros are NULL and no bytes.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (vectors.cast_mut(), count);
    message
}

/// # Safety
/// As recvmsg(2).
unsafe fn receive_message(fd: c_int, message: *mut msghdr, flags: c_int) -> isize {
    if message.is_null() {
        set_errno(libc::EFAULT);
        return -1;
    }
    // SAFETY: the caller's promise.
    unsafe {
        let count = c_int::try_from((*message).msg_iovlen).unwrap_or(c_int::MAX);
        let received = receive_into(fd, (*message).msg_iov, count, flags);
        if received >= 0 {
            // As of TCP: a stream names no sender, and there is nothing beside the bytes.
            ((*message).msg_namelen, (*message).msg_controllen, (*message).msg_flags) = (0, 0, 0);
        }
        received
    }
}

/// # Safety
/// As sendmsg(2).
unsafe fn send_message(fd: c_int, message: *const msghdr, flags: c_int) -> isize {
    if message.is_null() {
        set_errno(libc::EFAULT);
        return -1;
    }
    // SAFETY: the caller's promise.
    unsafe {
        let count = c_int::try_from((*message).msg_iovlen).unwrap_or(c_int::MAX);
        send_from(fd, (*message).msg_iov, count, flags)
    }
}

/// # Safety
/// NULL, or a length.
unsafe fn no_sender(len: *mut socklen_t) {
    if !len.is_null() {
        // SAFETY: the caller's promise.
        unsafe { len.write_unaligned(0) };
    }
}

/// Functions whose first argument is a descriptor: what they do if a rule has chosen it.
macro_rules! by_descriptor {
    ($(fn $name:ident($fd:ident: c_int $(, $argument:ident: $type:ty)*) -> $result:ty = $ruled:expr;)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name($fd: c_int $(, $argument: $type)*) -> $result {
            if fds::is_ruled($fd) {
                // SAFETY: the caller passes what the function of libc takes.
                #[allow(unused_unsafe)]
                return unsafe { $ruled };
            }
            real!($name($fd: c_int $(, $argument: $type)*) -> $result)
        }
    )*};
}

type To = *mut c_void;
type From = *const c_void;

by_descriptor! {
    fn read(fd: c_int, to: To, len: usize) -> isize = receive(fd, to, len, 0);
    fn __read(fd: c_int, to: To, len: usize) -> isize = receive(fd, to, len, 0);
    fn __read_chk(fd: c_int, to: To, len: usize, room: usize) -> isize =
        { within(len, room); receive(fd, to, len, 0) };
    fn recv(fd: c_int, to: To, len: usize, flags: c_int) -> isize = receive(fd, to, len, flags);
    fn __recv_chk(fd: c_int, to: To, len: usize, room: usize, flags: c_int) -> isize =
        { within(len, room); receive(fd, to, len, flags) };
    fn recvfrom(
        fd: c_int, to: To, len: usize, flags: c_int, from: *mut sockaddr, size: *mut socklen_t
    ) -> isize =
        { if !from.is_null() { no_sender(size) }; receive(fd, to, len, flags) };
    fn __recvfrom_chk(
        fd: c_int, to: To, len: usize, room: usize, flags: c_int, from: *mut sockaddr, size: *mut socklen_t
    ) -> isize =
        { within(len, room); if !from.is_null() { no_sender(size) }; receive(fd, to, len, flags) };
    fn readv(fd: c_int, vectors: *const iovec, count: c_int) -> isize = receive_into(fd, vectors, count, 0);
    fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> isize = receive_message(fd, message, flags);

    fn write(fd: c_int, from: From, len: usize) -> isize = transmit(fd, from, len, 0);
    fn __write(fd: c_int, from: From, len: usize) -> isize = transmit(fd, from, len, 0);
    fn send(fd: c_int, from: From, len: usize, flags: c_int) -> isize = transmit(fd, from, len, flags);
    fn __send(fd: c_int, from: From, len: usize, flags: c_int) -> isize = transmit(fd, from, len, flags);
    // A connected TCP socket does not look at the address.
    fn sendto(
        fd: c_int, from: From, len: usize, flags: c_int, to: *const sockaddr, size: socklen_t
    ) -> isize =
        { let _ = (to, size); transmit(fd, from, len, flags) };
    fn writev(fd: c_int, vectors: *const iovec, count: c_int) -> isize = send_from(fd, vectors, count, 0);
}

// A position of -1 is none; any other has no meaning for a socket, as the kernel says of the stand-in.
macro_rules! positioned {
    ($($reads:ident $writes:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $reads(
            fd: c_int, vectors: *const iovec, count: c_int, position: i64, flags: c_int
        ) -> isize {
            if fds::is_ruled(fd) && position == -1 {
                // SAFETY: the caller passes what the function of libc takes.
                return unsafe { receive_into(fd, vectors, count, without_waiting(flags)) };
            }
            real!($reads(
                fd: c_int, vectors: *const iovec, count: c_int, position: i64, flags: c_int
            ) -> isize)
        }

        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $writes(
            fd: c_int, vectors: *const iovec, count: c_int, position: i64, flags: c_int
        ) -> isize {
            if fds::is_ruled(fd) && position == -1 {
                // SAFETY: the caller passes what the function of libc takes.
                return unsafe { send_from(fd, vectors, count, without_waiting(flags)) };
            }
            real!($writes(
                fd: c_int, vectors: *const iovec, count: c_int, position: i64, flags: c_int
            ) -> isize)
        }
    )*};
}

positioned! { preadv2 pwritev2 preadv64v2 pwritev64v2 }

/// `RWF_NOWAIT`, which is `MSG_DONTWAIT` of sockets.
fn without_waiting(flags: c_int) -> c_int {
    const RWF_NOWAIT: c_int = 8;
    if flags & RWF_NOWAIT != 0 { libc::MSG_DONTWAIT } else { 0 }
}

/// What the checking names do about a length that is more than there is room for.
fn within(len: usize, room: usize) {
    unsafe extern "C-unwind" {
        fn __chk_fail() -> !;
    }
    if len > room {
        // SAFETY: it ends the process.
        unsafe { __chk_fail() }
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize {
    if fds::any_ruled() {
        // SAFETY: the caller passes what the function of libc takes.
        unsafe {
            if fds::is_ruled(fd) {
                return send_message(fd, message, flags);
            }
            if passes_ruled(message) {
                set_errno(libc::EOPNOTSUPP);
                return -1;
            }
        }
    }
    real!(sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize)
}

/// Whether a message passes a descriptor that a rule has chosen to another process, which could do nothing
/// with it.
///
/// # Safety
/// As sendmsg(2).
unsafe fn passes_ruled(message: *const msghdr) -> bool {
    // SAFETY: the caller's promise; within each header's length.
    unsafe {
        if message.is_null() || (*message).msg_control.is_null() {
            return false;
        }
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = (*header).cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let fds = libc::CMSG_DATA(header).cast::<c_int>();
                for at in 0..bytes / size_of::<c_int>() {
                    if fds::is_ruled(fds.add(at).read_unaligned()) {
                        say_forked();
                        return true;
                    }
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    false
}

/// Calls `one` for each message, until one fails or does less than it was asked.
///
/// # Safety
/// `messages` has `count` entries.
unsafe fn each(messages: *mut mmsghdr, count: u32, mut one: impl FnMut(u32, *mut msghdr) -> isize) -> c_int {
    for at in 0..count {
        // SAFETY: the caller's promise.
        let entry = unsafe { messages.add(at as usize) };
        // SAFETY: as above.
        let done = one(at, unsafe { &raw mut (*entry).msg_hdr });
        if done < 0 {
            return if at > 0 { at.cast_signed() } else { -1 };
        }
        // SAFETY: as above. A call transfers less than 4 GiB here: messages have at most 1024 vectors.
        unsafe { (*entry).msg_len = u32::try_from(done).unwrap_or(u32::MAX) };
        if done == 0 {
            return at.cast_signed() + 1;
        }
    }
    count.cast_signed()
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: u32, flags: c_int) -> c_int {
    if fds::is_ruled(fd) {
        // SAFETY: the caller passes what the function of libc takes.
        return unsafe { each(messages, count.min(1024), |_, message| send_message(fd, message, flags)) };
    }
    real!(sendmmsg(fd: c_int, messages: *mut mmsghdr, count: u32, flags: c_int) -> c_int)
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: u32,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    if fds::is_ruled(fd) {
        // The limit is looked at between messages only, by the kernel as well.
        let first = flags & !libc::MSG_WAITFORONE;
        let later = if flags & libc::MSG_WAITFORONE == 0 { first } else { first | libc::MSG_DONTWAIT };
        // SAFETY: the caller passes what the function of libc takes.
        return unsafe {
            each(messages, count.min(1024), |at, message| {
                receive_message(fd, message, if at == 0 { first } else { later })
            })
        };
    }
    real!(recvmmsg(
        fd: c_int, messages: *mut mmsghdr, count: u32, flags: c_int, timeout: *mut timespec
    ) -> c_int)
}

/// Receives into a buffer of this library, for functions that copy between descriptors.
pub fn receive_block(fd: c_int, block: &mut Block, len: usize, flags: c_int) -> isize {
    let (to, len) = sock::at(block, len);
    receive(fd, to, len, flags)
}

/// Sends from a buffer of this library.
pub fn send_block(fd: c_int, bytes: &[u8], flags: c_int) -> isize {
    transmit(fd, bytes.as_ptr().cast(), bytes.len(), flags)
}

/// Sends all of it, also if the socket is non-blocking. False: errno says why it cannot.
pub fn send_whole(fd: c_int, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        match usize::try_from(send_block(fd, bytes, 0)) {
            Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
            Err(_) if errno() == libc::EAGAIN || errno() == libc::EINTR => {
                let Some(sock) = sock::of(fd) else { return false };
                let Some(calls) = sock.calls() else { return false };
                calls.wait(sock.number(), libc::POLLOUT, -1);
            }
            Err(_) => return false,
        }
    }
    true
}
