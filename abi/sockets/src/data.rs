//! Functions that receive and send.

use std::ffi::{c_int, c_void};

use libc::{iovec, mmsghdr, msghdr, sockaddr, socklen_t, timespec};
use uwarp_preload::{errno, real, set_errno};

use crate::agree::conn::{Outcome, Wait, limit_of};
use crate::agree::spans::Spans;
use crate::agree::table;
use crate::ending::Pass;
use crate::rsockets::{Rsockets, say_forked, say_passed};
use crate::sock::{self, Block};
use crate::{fds, process, relay, sys};

/// Whether a call with these flags does something that cannot be done before it is known what a connection
/// becomes.
const VETOES: c_int = libc::MSG_OOB | libc::MSG_ZEROCOPY;

fn may_wait(fd: c_int, flags: c_int, limit: c_int) -> Wait {
    let nonblocking = || sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|flags| flags & libc::O_NONBLOCK != 0);
    if flags & libc::MSG_DONTWAIT != 0 || nonblocking() { Wait::Not } else { Wait::Most(limit_of(fd, limit)) }
}

/// What a socket has to do for a part of a call. `None`: it is done, for all of it.
enum Step {
    Whole(isize),
    Part(isize),
}

/// A part of a call that receives. `direct`: the call of the kernel's, on the program's descriptor; `stream`:
/// the call of a stream.
fn receive_step(
    fd: c_int,
    spans: &Spans,
    flags: c_int,
    direct: impl Fn(c_int) -> isize,
    stream: impl Fn(&Rsockets, c_int, c_int) -> isize,
) -> Step {
    loop {
        if fds::is_asking(fd) {
            let Some(conn) = table::find(fd) else { continue };
            if !conn.used() {
                say_forked();
                return Step::Whole(-1);
            }
            if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
                let Some(_still) = table::still(fd) else { continue };
                return Step::Whole(direct(flags));
            }
            if flags & libc::MSG_PEEK != 0 && flags & libc::MSG_WAITALL != 0 {
                // It waits for more than there is, which only the kernel can.
                table::veto(fd);
                continue;
            }
            let wait = || may_wait(fd, flags, libc::SO_RCVTIMEO);
            let call = || direct(flags & !libc::MSG_WAITALL | libc::MSG_DONTWAIT);
            match conn.direct(fd, false, wait, call) {
                Outcome::Done(received) => return Step::Part(received),
                Outcome::Elsewhere => continue,
            }
        }
        if !fds::is_ruled(fd) {
            return Step::Whole(direct(flags));
        }
        if process::is_forked() && relay::ask_for(fd) {
            continue;
        }
        let Some(sock) = sock::of(fd) else { return Step::Whole(-1) };
        if sock.is_handed() {
            return Step::Whole(direct(flags));
        }
        let received = sock.receive(spans, flags, |r, flags| stream(r, sock.number(), flags));
        return if sock.conn().is_some() { Step::Part(received) } else { Step::Whole(received) };
    }
}

/// Receives, in parts if it is to wait for all.
fn receive_parts(
    fd: c_int,
    mut spans: Spans,
    flags: c_int,
    direct: impl Fn(c_int) -> isize,
    stream: impl Fn(&Rsockets, c_int, c_int) -> isize,
) -> isize {
    let first = match receive_step(fd, &spans, flags, direct, stream) {
        Step::Whole(received) => return received,
        Step::Part(received) => received,
    };
    let all = flags & libc::MSG_WAITALL != 0 && flags & (libc::MSG_PEEK | libc::MSG_DONTWAIT) == 0;
    let Ok(mut done) = usize::try_from(first) else { return first };
    spans.skip(done);
    while all && done > 0 && spans.len() > 0 {
        let step = receive_step(
            fd,
            &spans,
            flags,
            |flags| spans.receive(fd, flags),
            // SAFETY: the program's memory.
            |r, number, flags| unsafe {
                receive_stream(r, number, spans.pieces().as_ptr(), spans.pieces().len(), flags)
            },
        );
        let (Step::Whole(more) | Step::Part(more)) = step;
        match usize::try_from(more) {
            Ok(more) if more > 0 => {
                done += more;
                spans.skip(more);
            }
            // The end, or an error that the next call will see again.
            _ => break,
        }
    }
    done.cast_signed()
}

/// A part of a call that sends.
fn send_step(
    fd: c_int,
    spans: &Spans,
    flags: c_int,
    direct: impl Fn(c_int) -> isize,
    stream: impl Fn(&Rsockets, c_int, c_int) -> isize,
) -> Step {
    loop {
        if fds::is_asking(fd) {
            let Some(conn) = table::find(fd) else { continue };
            if !conn.used() {
                say_forked();
                return Step::Whole(-1);
            }
            if flags & VETOES != 0 {
                table::veto(fd);
                continue;
            }
            let wait = || may_wait(fd, flags, libc::SO_SNDTIMEO);
            match conn.direct(fd, true, wait, || direct(flags | libc::MSG_DONTWAIT)) {
                Outcome::Done(sent) => return Step::Part(sent),
                Outcome::Elsewhere => continue,
            }
        }
        if !fds::is_ruled(fd) {
            return Step::Whole(direct(flags));
        }
        if process::is_forked() && relay::ask_for(fd) {
            continue;
        }
        let Some(sock) = sock::of(fd) else { return Step::Whole(-1) };
        if sock.is_handed() {
            return Step::Whole(direct(flags));
        }
        let sent = sock.send(spans, flags, |r, flags| stream(r, sock.number(), flags));
        return if sock.conn().is_some() { Step::Part(sent) } else { Step::Whole(sent) };
    }
}

/// Sends, in parts if that takes several.
fn send_parts(
    fd: c_int,
    mut spans: Spans,
    flags: c_int,
    direct: impl Fn(c_int) -> isize,
    stream: impl Fn(&Rsockets, c_int, c_int) -> isize,
) -> isize {
    let first = match send_step(fd, &spans, flags, direct, stream) {
        Step::Whole(sent) => return sent,
        Step::Part(sent) => sent,
    };
    let Ok(mut done) = usize::try_from(first) else { return first };
    spans.skip(done);
    while done > 0 && spans.len() > 0 && flags & libc::MSG_DONTWAIT == 0 {
        // An error is the next call's.
        let quiet = flags | libc::MSG_NOSIGNAL;
        let step = send_step(
            fd,
            &spans,
            quiet,
            |flags| spans.send(fd, flags),
            |r, number, flags| {
                let message = message(spans.pieces().as_ptr(), spans.pieces().len());
                // SAFETY: the program's memory.
                unsafe { (r.rsendmsg)(number, &raw const message, flags) }
            },
        );
        let (Step::Whole(more) | Step::Part(more)) = step;
        match usize::try_from(more) {
            Ok(more) if more > 0 => {
                done += more;
                spans.skip(more);
            }
            _ => break,
        }
    }
    done.cast_signed()
}

fn receive(fd: c_int, to: *mut c_void, len: usize, flags: c_int) -> isize {
    let spans = Spans::one(to, len);
    let stream = |r: &Rsockets, number, flags| match flags & libc::MSG_TRUNC != 0 {
        // SAFETY: the caller passes what the function of libc takes; a bad buffer is `EFAULT`.
        false => unsafe { (r.rrecv)(number, to, len, flags) },
        true => throw_away(r, number, len, flags),
    };
    let direct = |flags| real!(recv(fd: c_int, to: *mut c_void, len: usize, flags: c_int) -> isize);
    receive_parts(fd, spans, flags, direct, stream)
}

/// TCP's meaning of `MSG_TRUNC`.
fn throw_away(r: &Rsockets, number: c_int, len: usize, flags: c_int) -> isize {
    let mut block = sock::block();
    let (to, len) = sock::at(&mut block, len);
    // SAFETY: a buffer and its length.
    unsafe { (r.rrecv)(number, to, len, flags & !libc::MSG_TRUNC) }
}

/// Receives from a stream into these pieces.
///
/// # Safety
/// `vectors` has `count` entries.
unsafe fn receive_stream(
    r: &Rsockets,
    number: c_int,
    vectors: *const iovec,
    count: usize,
    flags: c_int,
) -> isize {
    if flags & libc::MSG_TRUNC != 0 {
        // SAFETY: the caller's promise.
        let len =
            (0..count).fold(0, |len: usize, at| len.saturating_add(unsafe { (*vectors.add(at)).iov_len }));
        return throw_away(r, number, len, flags);
    }
    let mut message = message(vectors, count);
    // SAFETY: the caller's promise.
    unsafe { (r.rrecvmsg)(number, &raw mut message, flags) }
}

/// read(2): a call for no bytes does nothing. recv(2) waits for data then, too.
fn read_from(fd: c_int, to: *mut c_void, len: usize) -> isize {
    if len == 0 { 0 } else { receive(fd, to, len, 0) }
}

fn transmit(fd: c_int, from: *const c_void, len: usize, flags: c_int) -> isize {
    // SAFETY: as of `receive`.
    let stream = |r: &Rsockets, number, flags| unsafe { (r.rsend)(number, from, len, flags) };
    let direct = |flags| real!(send(fd: c_int, from: *const c_void, len: usize, flags: c_int) -> isize);
    send_parts(fd, Spans::one(from, len), flags, direct, stream)
}

/// The pieces of memory that a message of recvmsg(2) or sendmsg(2) names; `None`: errno is set.
///
/// # Safety
/// `vectors` has `count` entries.
unsafe fn spans_of(vectors: *const iovec, count: usize) -> Option<Spans> {
    // SAFETY: the caller's promise.
    unsafe { Spans::new(vectors, count, libc::EMSGSIZE) }.inspect_err(|errno| set_errno(*errno)).ok()
}

/// The pieces of readv(2) or writev(2).
///
/// # Safety
/// `vectors` has `count` entries.
unsafe fn vector(vectors: *const iovec, count: c_int) -> Option<Spans> {
    let spans = usize::try_from(count)
        .map_err(|_| libc::EINVAL)
        // SAFETY: the caller's promise.
        .and_then(|count| unsafe { Spans::new(vectors, count, libc::EINVAL) });
    spans.inspect_err(|errno| set_errno(*errno)).ok()
}

/// As readv(2): a call for no bytes does nothing.
///
/// # Safety
/// `vectors` has `count` entries.
unsafe fn read_into(fd: c_int, vectors: *const iovec, count: c_int, flags: c_int) -> isize {
    // SAFETY: the caller's promise.
    let Some(spans) = (unsafe { vector(vectors, count) }) else { return -1 };
    if spans.len() == 0 {
        return 0;
    }
    let count = spans.pieces().len();
    let stream = |r: &Rsockets, number, flags| {
        // SAFETY: the caller's promise.
        unsafe { receive_stream(r, number, vectors, count, flags) }
    };
    let direct = |flags| {
        let mut message = message(vectors, count);
        let message = &raw mut message;
        real!(recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> isize)
    };
    receive_parts(fd, spans, flags, direct, stream)
}

/// As writev(2): a call for no bytes does nothing.
///
/// # Safety
/// `vectors` has `count` entries.
unsafe fn write_from(fd: c_int, vectors: *const iovec, count: c_int, flags: c_int) -> isize {
    // SAFETY: the caller's promise.
    let Some(spans) = (unsafe { vector(vectors, count) }) else { return -1 };
    if spans.len() == 0 {
        return 0;
    }
    let count = spans.pieces().len();
    let stream = |r: &Rsockets, number, flags| {
        let message = message(vectors, count);
        // SAFETY: the caller's promise.
        unsafe { (r.rsendmsg)(number, &raw const message, flags) }
    };
    let direct = |flags| {
        let message = message(vectors, count);
        let message = &raw const message;
        real!(sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize)
    };
    send_parts(fd, spans, flags, direct, stream)
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
    let direct = |flags| real!(recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> isize);
    // SAFETY: the caller's promise.
    unsafe {
        let (vectors, count) = ((*message).msg_iov, (*message).msg_iovlen);
        let Some(spans) = spans_of(vectors, count) else { return -1 };
        let stream = |r: &Rsockets, number, flags| receive_stream(r, number, vectors, count, flags);
        let received = receive_parts(fd, spans, flags, direct, stream);
        // It may have become a stream while the call waited.
        if !fds::is_ruled(fd) {
            return received;
        }
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
    let direct = |flags| real!(sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize);
    // SAFETY: the caller's promise.
    unsafe {
        let (vectors, count) = ((*message).msg_iov, (*message).msg_iovlen);
        let Some(spans) = spans_of(vectors, count) else { return -1 };
        let stream = |r: &Rsockets, number, flags| {
            let message = self::message(vectors, count);
            (r.rsendmsg)(number, &raw const message, flags)
        };
        send_parts(fd, spans, flags, direct, stream)
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
            if fds::is_mediated($fd) {
                let _pass = Pass::begin();
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
    fn read(fd: c_int, to: To, len: usize) -> isize = read_from(fd, to, len);
    fn __read(fd: c_int, to: To, len: usize) -> isize = read_from(fd, to, len);
    fn __read_chk(fd: c_int, to: To, len: usize, room: usize) -> isize =
        { within(len, room); read_from(fd, to, len) };
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
    fn readv(fd: c_int, vectors: *const iovec, count: c_int) -> isize = read_into(fd, vectors, count, 0);
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
    fn writev(fd: c_int, vectors: *const iovec, count: c_int) -> isize = write_from(fd, vectors, count, 0);
}

// A position of -1 is none; any other has no meaning for a socket, as the kernel says of the stand-in.
macro_rules! positioned {
    ($($reads:ident $writes:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $reads(
            fd: c_int, vectors: *const iovec, count: c_int, position: i64, flags: c_int
        ) -> isize {
            if fds::is_mediated(fd) && position == -1 {
                let _pass = Pass::begin();
                // SAFETY: the caller passes what the function of libc takes.
                return unsafe { read_into(fd, vectors, count, without_waiting(flags)) };
            }
            real!($reads(
                fd: c_int, vectors: *const iovec, count: c_int, position: i64, flags: c_int
            ) -> isize)
        }

        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $writes(
            fd: c_int, vectors: *const iovec, count: c_int, position: i64, flags: c_int
        ) -> isize {
            if fds::is_mediated(fd) && position == -1 {
                let _pass = Pass::begin();
                // SAFETY: the caller passes what the function of libc takes.
                return unsafe { write_from(fd, vectors, count, without_waiting(flags)) };
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
pub fn within(len: usize, room: usize) {
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
    if fds::any_mediated() {
        // SAFETY: the caller passes what the function of libc takes.
        unsafe {
            if fds::is_mediated(fd) {
                let _pass = Pass::begin();
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
                    let passed = fds.add(at).read_unaligned();
                    if fds::is_asking(passed) {
                        table::veto(passed);
                    }
                    if fds::is_ruled(passed) {
                        say_passed();
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
    if fds::is_mediated(fd) {
        let _pass = Pass::begin();
        // SAFETY: the caller passes what the function of libc takes.
        return unsafe { each(messages, count.min(1024), |_, message| send_message(fd, message, flags)) };
    }
    if fds::any_mediated() && !messages.is_null() {
        for at in 0..count.min(1024) as usize {
            // SAFETY: the caller passes what the function of libc takes.
            if unsafe { passes_ruled(&raw const (*messages.add(at)).msg_hdr) } {
                set_errno(libc::EOPNOTSUPP);
                return -1;
            }
        }
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
    if fds::is_mediated(fd) {
        let _pass = Pass::begin();
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
                let mut entry = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
                // SAFETY: one entry; the function of this library.
                unsafe { libc::poll(&raw mut entry, 1, -1) };
            }
            Err(_) => return false,
        }
    }
    true
}
