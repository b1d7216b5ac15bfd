//! System calls that this library makes for itself: not by libc's functions, before which ours stand, and
//! which are cancellation points.

use std::ffi::{c_int, c_long};
use std::time::{Duration, Instant};

use uwarp_preload::set_errno;
use uwarp_process::log_file;

/// A system call of three arguments at most; the error number on failure.
pub fn call(number: c_long, arguments: [usize; 5]) -> Result<c_int, c_int> {
    let [a, b, c, d, e] = arguments;
    // SAFETY: the callers below pass what each call takes.
    let result = unsafe { libc::syscall(number, a, b, c, d, e) };
    if result < 0 { Err(uwarp_preload::errno()) } else { Ok(result as c_int) }
}

/// As an argument of a system call.
pub fn int(value: c_int) -> usize {
    value as usize
}

/// Runs `what` and leaves `errno` as it was.
pub fn quietly<T>(what: impl FnOnce() -> T) -> T {
    let before = uwarp_preload::errno();
    let result = what();
    set_errno(before);
    result
}

/// close(2).
pub fn close(fd: c_int) {
    let _ = quietly(|| call(libc::SYS_close, [int(fd), 0, 0, 0, 0]));
}

/// dup3(2), closed by exec.
pub fn replace(with: c_int, at: c_int) -> Result<c_int, c_int> {
    call(libc::SYS_dup3, [int(with), int(at), int(libc::O_CLOEXEC), 0, 0])
}

/// A second descriptor, out of the way of the program's and closed by exec.
pub fn second(fd: c_int) -> Result<c_int, c_int> {
    fcntl(fd, libc::F_DUPFD_CLOEXEC, 64).or_else(|_| fcntl(fd, libc::F_DUPFD_CLOEXEC, 3))
}

/// fcntl(2) with a number.
pub fn fcntl(fd: c_int, command: c_int, argument: c_int) -> Result<c_int, c_int> {
    call(libc::SYS_fcntl, [int(fd), int(command), int(argument), 0, 0])
}

/// Who is sent a signal about a descriptor's file, and which (fcntl(2)).
pub struct Signals {
    owner: [c_int; 2],
    signal: c_int,
    asked: bool,
}

impl Signals {
    /// Those of this one.
    pub fn of(fd: c_int) -> Self {
        let mut owner = [0; 2];
        let at = (&raw mut owner).expose_provenance();
        let known = call(libc::SYS_fcntl, [int(fd), int(F_GETOWN_EX), at, 0, 0]).is_ok();
        Self {
            owner: if known { owner } else { [0; 2] },
            signal: fcntl(fd, F_GETSIG, 0).unwrap_or(0),
            asked: fcntl(fd, libc::F_GETFL, 0).is_ok_and(|flags| flags & libc::O_ASYNC != 0),
        }
    }

    /// They count for the file that has its place now. (The number is what each signal names.)
    pub fn give(mut self, fd: c_int) {
        if self.owner[1] != 0 {
            let at = (&raw mut self.owner).expose_provenance();
            let _ = call(libc::SYS_fcntl, [int(fd), int(F_SETOWN_EX), at, 0, 0]);
        }
        if self.signal != 0 {
            let _ = fcntl(fd, F_SETSIG, self.signal);
        }
        if self.asked
            && let Ok(flags) = fcntl(fd, libc::F_GETFL, 0)
        {
            let _ = fcntl(fd, libc::F_SETFL, flags | libc::O_ASYNC);
        }
    }
}

const F_SETSIG: c_int = 10;
const F_GETSIG: c_int = 11;
const F_SETOWN_EX: c_int = 15;
const F_GETOWN_EX: c_int = 16;

/// A pair of stream sockets, closed by exec.
pub fn pair() -> Result<[c_int; 2], c_int> {
    let mut pair = [-1; 2];
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    let to = (&raw mut pair).expose_provenance();
    call(libc::SYS_socketpair, [int(libc::AF_UNIX), int(kind), 0, to, 0]).map(|_| pair)
}

/// A TCP socket, closed by exec.
pub fn tcp(domain: c_int) -> Result<c_int, c_int> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    call(libc::SYS_socket, [int(domain), int(kind), 0, 0, 0])
}

/// Sends these bytes without waiting; false if there is no room.
pub fn put(fd: c_int, bytes: &[u8]) -> bool {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    let from = bytes.as_ptr().expose_provenance();
    // SAFETY: the buffer and its length; no address.
    let sent = quietly(|| unsafe {
        libc::syscall(libc::SYS_sendto, int(fd), from, bytes.len(), int(flags), 0usize, 0usize)
    });
    sent > 0
}

/// Takes all bytes that can be received; how many there were.
pub fn take_all(fd: c_int) -> usize {
    let mut buffer = [0_u8; 4096];
    let mut taken = 0;
    while let Ok(bytes @ 1..) = receive_now(fd, &mut buffer) {
        taken += bytes;
        // Less than there is room for was all: these sockets pass no credentials, at which a read would end.
        if bytes < buffer.len() {
            break;
        }
    }
    taken
}

/// shutdown(2).
pub fn shut(fd: c_int, how: c_int) {
    let _ = quietly(|| call(libc::SYS_shutdown, [int(fd), int(how), 0, 0, 0]));
}

/// Poll(2)'s bits of a descriptor, without waiting.
pub fn ready_for(fd: c_int, events: i16) -> i16 {
    let mut entry = libc::pollfd { fd, events, revents: 0 };
    let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    let (entry_at, zero) = ((&raw mut entry).expose_provenance(), (&raw const zero).expose_provenance());
    let _ = quietly(|| call(libc::SYS_ppoll, [entry_at, 1, zero, 0, 0]));
    entry.revents
}

/// An option that is a number.
pub fn option(fd: c_int, level: c_int, name: c_int) -> Option<c_int> {
    let (mut value, mut len) = (0_i32, 4_u32);
    let (to, len) = ((&raw mut value).expose_provenance(), (&raw mut len).expose_provenance());
    quietly(|| call(libc::SYS_getsockopt, [int(fd), int(level), int(name), to, len])).ok()?;
    Some(value)
}

/// Sets an option that is a number.
pub fn set_option(fd: c_int, level: c_int, name: c_int, value: c_int) {
    let from = (&raw const value).expose_provenance();
    let _ = quietly(|| call(libc::SYS_setsockopt, [int(fd), int(level), int(name), from, 4]));
}

/// Changes a set of epoll.
pub fn epoll_ctl(set: c_int, operation: c_int, fd: c_int, event: &mut libc::epoll_event) {
    let event = (&raw mut *event).expose_provenance();
    let _ = quietly(|| call(libc::SYS_epoll_ctl, [int(set), int(operation), int(fd), event, 0]));
}

/// An eventfd, closed by exec.
pub fn eventfd() -> Result<c_int, c_int> {
    call(libc::SYS_eventfd2, [0, int(libc::EFD_CLOEXEC), 0, 0, 0])
}

/// Writes an eventfd.
pub fn ring(fd: c_int) {
    let one = 1_u64.to_ne_bytes();
    let _ = quietly(|| call(libc::SYS_write, [int(fd), one.as_ptr().expose_provenance(), 8, 0, 0]));
}

/// Waits for an eventfd.
pub fn await_ring(fd: c_int) {
    let mut count = [0_u8; 8];
    let to = count.as_mut_ptr().expose_provenance();
    let _ = quietly(|| call(libc::SYS_read, [int(fd), to, 8, 0, 0]));
}

/// A UDP socket, closed by exec.
pub fn udp(v6: bool) -> Result<c_int, c_int> {
    let domain = if v6 { libc::AF_INET6 } else { libc::AF_INET };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    call(libc::SYS_socket, [int(domain), int(kind), 0, 0, 0])
}

/// bind(2).
pub fn bind(fd: c_int, to: &libc::sockaddr_storage, len: libc::socklen_t) -> Result<c_int, c_int> {
    call(libc::SYS_bind, [int(fd), std::ptr::from_ref(to).expose_provenance(), len as usize, 0, 0])
}

/// connect(2).
pub fn connect(fd: c_int, to: &libc::sockaddr_storage, len: libc::socklen_t) -> Result<c_int, c_int> {
    call(libc::SYS_connect, [int(fd), std::ptr::from_ref(to).expose_provenance(), len as usize, 0, 0])
}

/// Resets a TCP connection.
pub fn reset(fd: c_int) {
    // SAFETY: zeros are an address of no family.
    let mut nowhere: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    nowhere.ss_family = libc::AF_UNSPEC as libc::sa_family_t;
    let _ = quietly(|| connect(fd, &nowhere, 16));
}

/// Whether the peer's system has all that was sent by TCP, and the end behind it.
pub fn has_arrived(fd: c_int) -> bool {
    // States of TCP: what comes after the acknowledgement of an end, or after a failure.
    const FIN_WAIT2: u8 = 5;
    const TIME_WAIT: u8 = 6;
    const CLOSE: u8 = 7;
    let state: Option<[u8; 8]> = option_of(fd, libc::IPPROTO_TCP, libc::TCP_INFO);
    state.is_none_or(|state| [FIN_WAIT2, TIME_WAIT, CLOSE].contains(&state[0]))
}

/// What the other end of a Unix socket has not received yet, in bytes of the kernel's memory; 0 also if this
/// is not known.
pub fn unread_by_peer(fd: c_int) -> c_int {
    let mut unread: c_int = 0;
    let to = (&raw mut unread).expose_provenance();
    let asked = quietly(|| call(libc::SYS_ioctl, [int(fd), libc::TIOCOUTQ as usize, to, 0, 0]));
    asked.map_or(0, |_| unread)
}

/// shutdown(2), with its error.
pub fn shutdown(fd: c_int, how: c_int) -> Result<(), c_int> {
    quietly(|| call(libc::SYS_shutdown, [int(fd), int(how), 0, 0, 0])).map(drop)
}

/// A system call of six arguments that transfers bytes; the error number on failure. Leaves errno as it is.
pub fn transfer(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> Result<usize, c_int> {
    quietly(|| {
        // SAFETY: the callers below pass what each call takes.
        let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
        usize::try_from(result).map_err(|_| uwarp_preload::errno())
    })
}

/// Sends bytes without waiting, and without SIGPIPE. Leaves errno as it is.
pub fn send_now(fd: c_int, bytes: &[u8]) -> Result<usize, c_int> {
    let flags = int(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
    transfer(libc::SYS_sendto, [int(fd), bytes.as_ptr().expose_provenance(), bytes.len(), flags, 0, 0])
}

/// Receives bytes without waiting. Leaves errno as it is.
pub fn receive_now(fd: c_int, to: &mut [u8]) -> Result<usize, c_int> {
    let (at, len) = (to.as_mut_ptr().expose_provenance(), to.len());
    transfer(libc::SYS_recvfrom, [int(fd), at, len, int(libc::MSG_DONTWAIT), 0, 0])
}

/// Copies from memory of the program, as far as `to` has room; `EFAULT`, as of the kernel, if it has none
/// there. Leaves errno as it is.
pub fn copy_from(pieces: &[libc::iovec], to: &mut [u8]) -> Result<usize, c_int> {
    let here = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
    // SAFETY: no argument.
    let own = unsafe { libc::syscall(libc::SYS_getpid) } as usize;
    let (from, count) = (pieces.as_ptr().expose_provenance(), pieces.len());
    let arguments = [own, (&raw const here).expose_provenance(), 1, from, count, 0];
    match transfer(libc::SYS_process_vm_readv, arguments) {
        // A filter of system calls forbids it.
        Err(libc::EPERM | libc::ENOSYS) => {}
        done => return done,
    }
    let mut copied = 0;
    for piece in pieces {
        let len = piece.iov_len.min(to.len() - copied);
        let (Some(rest), false) = (to.get_mut(copied..copied + len), len == 0) else { break };
        // SAFETY: memory of the program, as its call says.
        unsafe { std::ptr::copy_nonoverlapping(piece.iov_base.cast::<u8>(), rest.as_mut_ptr(), len) };
        copied += len;
    }
    Ok(copied)
}

/// Sends a datagram without waiting. Leaves errno as it is.
pub fn send_to_now(
    fd: c_int,
    bytes: &[u8],
    to: &libc::sockaddr_storage,
    len: libc::socklen_t,
) -> Result<usize, c_int> {
    let (from, flags) = (bytes.as_ptr().expose_provenance(), int(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL));
    let to = std::ptr::from_ref(to).expose_provenance();
    transfer(libc::SYS_sendto, [int(fd), from, bytes.len(), flags, to, len as usize])
}

/// From now on a UDP socket that is not connected keeps what becomes of its datagrams, for [`take_error`].
pub fn report_refusals(fd: c_int, v6: bool) {
    match v6 {
        true => set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVERR, 1),
        false => set_option(fd, libc::IPPROTO_IP, libc::IP_RECVERR, 1),
    }
}

/// The beginning of a datagram that could not be delivered, its length, and why. `None`: there is no other.
pub fn take_error(fd: c_int, bytes: &mut [u8]) -> Option<(usize, c_int)> {
    #[repr(C, align(8))]
    struct Control([u8; 256]);
    let mut control = Control([0; 256]);
    let mut piece = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: zeros are NULL and no bytes.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut piece, 1);
    (message.msg_control, message.msg_controllen) = ((&raw mut control).cast(), size_of::<Control>());
    let (at, flags) = ((&raw mut message).expose_provenance(), libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT);
    let len = transfer(libc::SYS_recvmsg, [int(fd), at, int(flags), 0, 0, 0]).ok()?;
    // SAFETY: headers that the call wrote, within their length; the first field of what follows the one of
    // this type is the error.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            let kind = ((*header).cmsg_level, (*header).cmsg_type);
            if kind == (libc::IPPROTO_IP, libc::IP_RECVERR)
                || kind == (libc::IPPROTO_IPV6, libc::IPV6_RECVERR)
            {
                let error = libc::CMSG_DATA(header).cast::<u32>().read_unaligned();
                return Some((len, error.cast_signed()));
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Some((len, 0))
}

/// Where a datagram came from.
pub type From = (libc::sockaddr_storage, libc::socklen_t);

/// Receives a datagram without waiting. Leaves errno as it is.
pub fn receive_from_now(fd: c_int, to: &mut [u8]) -> Result<(usize, From), c_int> {
    let (mut storage, mut room) = crate::address::room();
    let (at, len, flags) = (to.as_mut_ptr().expose_provenance(), to.len(), int(libc::MSG_DONTWAIT));
    let (from, size) = ((&raw mut storage).expose_provenance(), (&raw mut room).expose_provenance());
    let len = transfer(libc::SYS_recvfrom, [int(fd), at, len, flags, from, size])?;
    Ok((len, (storage, room)))
}

/// Fills memory with numbers that nobody can guess.
pub fn random(to: &mut [u8]) {
    let (at, len) = (to.as_mut_ptr().expose_provenance(), to.len());
    let got = quietly(|| call(libc::SYS_getrandom, [at, len, 0, 0, 0]));
    // So few bytes are never interrupted.
    debug_assert_eq!(got.ok().and_then(|got| usize::try_from(got).ok()), Some(len));
}

/// A set of epoll, closed by exec.
pub fn epoll() -> Result<c_int, c_int> {
    call(libc::SYS_epoll_create1, [int(libc::EPOLL_CLOEXEC), 0, 0, 0, 0])
}

/// Puts a descriptor into a set of epoll.
pub fn epoll_add(set: c_int, fd: c_int, events: u32, data: u64) -> Result<c_int, c_int> {
    let event = libc::epoll_event { events, u64: data };
    let at = (&raw const event).expose_provenance();
    quietly(|| call(libc::SYS_epoll_ctl, [int(set), int(libc::EPOLL_CTL_ADD), int(fd), at, 0]))
}

/// Takes a descriptor out of a set of epoll; false: it was not in it.
pub fn epoll_delete(set: c_int, fd: c_int) -> bool {
    quietly(|| call(libc::SYS_epoll_ctl, [int(set), int(libc::EPOLL_CTL_DEL), int(fd), 0, 0])).is_ok()
}

/// Waits for events until then; how many there are.
pub fn epoll_wait(set: c_int, events: &mut [libc::epoll_event], until: Option<Instant>) -> usize {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000));
    let left = left.map_or(-1, |left| c_int::try_from(left).unwrap_or(c_int::MAX));
    let (at, len) = (events.as_mut_ptr().expose_provenance(), events.len());
    // No set of signals.
    transfer(libc::SYS_epoll_pwait, [int(set), at, len, int(left), 0, 8]).unwrap_or(0)
}

/// Takes what an eventfd has, without waiting if it has something.
pub fn take_ring(fd: c_int) {
    if ready_for(fd, libc::POLLIN) & libc::POLLIN != 0 {
        await_ring(fd);
    }
}

/// An option of any type that consists of numbers.
pub fn option_of<T: Copy>(fd: c_int, level: c_int, name: c_int) -> Option<T> {
    // SAFETY: of the callers' types zeros are a value.
    let mut value: T = unsafe { std::mem::zeroed() };
    let mut len = size_of::<T>() as libc::socklen_t;
    let (to, size) = ((&raw mut value).expose_provenance(), (&raw mut len).expose_provenance());
    quietly(|| call(libc::SYS_getsockopt, [int(fd), int(level), int(name), to, size])).ok()?;
    Some(value)
}

/// This process's number. Not what libc may remember: after vfork(2), memory is the parent's.
pub fn pid() -> c_int {
    call(libc::SYS_getpid, [0; 5]).unwrap_or(0)
}

/// This thread's number.
pub fn thread() -> c_int {
    call(libc::SYS_gettid, [0; 5]).unwrap_or(0)
}

/// Sends this thread a signal.
pub fn raise(signal: c_int) {
    let _ = quietly(|| call(libc::SYS_tgkill, [int(pid()), int(thread()), int(signal), 0, 0]));
}

/// Sleeps until a signal comes.
pub fn sleep() {
    let _ = quietly(|| call(libc::SYS_ppoll, [0; 5]));
}

/// Sleeps; the error: a signal has come.
pub fn sleep_for(time: Duration) -> Result<(), c_int> {
    let tv_sec = libc::time_t::try_from(time.as_secs()).unwrap_or(libc::time_t::MAX);
    let time = libc::timespec { tv_sec, tv_nsec: time.subsec_nanos().into() };
    let at = (&raw const time).expose_provenance();
    quietly(|| call(libc::SYS_ppoll, [0, 0, at, 0, 0])).map(drop)
}

/// Says a line on standard error, unless the user wants errors only.
pub fn warn(text: &str) {
    let quiet = std::env::var("UWARP_LOG").is_ok_and(|level| level == "error" || level == "off");
    if !quiet {
        complain(text);
    }
}

/// Says a line that the user has asked for, in the file of `UWARP_LOG_FILE` if there is one.
pub fn inform(text: &str) {
    let line = format!("uwarp: sockets: {text}\n");
    if !log_file::is_wanted() || quietly(|| log_file::append(line.as_bytes()).map_err(|_| 0)).is_err() {
        complain(text);
    }
}

/// Says a line on standard error.
pub fn complain(text: &str) {
    let line = format!("uwarp: sockets: {text}\n");
    let from = line.as_ptr().expose_provenance();
    let _ = quietly(|| call(libc::SYS_write, [2, from, line.len(), 0, 0]));
}

/// Lets no signal come to this thread, until it is undone by [`unblock`], but those of its own faults: they
/// cannot wait, so the system would end the process without asking its handler.
pub fn block_signals() -> libc::sigset_t {
    // SAFETY: sets of this thread, all written before they are read.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP] {
            libc::sigdelset(&raw mut all, fault);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    }
}

/// See [`block_signals`].
pub fn unblock(before: &libc::sigset_t) {
    // SAFETY: a set that `block_signals` wrote.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, std::ptr::from_ref(before), std::ptr::null_mut()) };
}

/// Until it is dropped, signals come to this thread only in calls that let them, by [`Self::mask`]. So a
/// handler never runs while the thread has a lock of this library: it may call send(2), and may jump; and a
/// call that is about to sleep does not miss a signal.
pub struct Deferred(libc::sigset_t);

impl Deferred {
    /// From now on.
    pub fn begin() -> Self {
        Self(block_signals())
    }

    /// The mask for a call that sleeps: the program's own, if it has given one, or that of the thread.
    pub fn mask(&self, given: *const libc::sigset_t) -> *const libc::sigset_t {
        if given.is_null() { &raw const self.0 } else { given }
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        unblock(&self.0);
    }
}
