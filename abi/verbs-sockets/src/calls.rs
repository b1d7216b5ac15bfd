//! The functions of `<uwarp_sockets.h>`. Each does for a socket in `IWARP_MODE` what the call without its
//! prefix does for others, and for all other descriptors it makes that system call, and nothing else.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use libc::{iovec, nfds_t, pollfd, socklen_t};
use rustix::io::Errno;
use uwarp_abi_types::verbs::ibv_qp;
use uwarp_driver::Uncancelled;
use uwarp_iwarp_mode::{
    IWARP_MODE, IWARP_PEER_DATA, Mode, SOL_UWARP, cancellable, descriptor, disconnect_number, flags, give,
    how, int, linger, patience, plain, pointer, prepare_close, role_value, system, uwarp_completion,
    uwarp_desc,
};
use uwarp_rsocket::MemSeg;
use uwarp_rsocket::poll::PollFd;

use crate::engine::{Engine, forked};
use crate::socket::{Socket, poll};
use crate::table;

/// Most vectors of one call, as of the kernel.
const MOST_VECTORS: usize = 1024;
/// Most descriptors of a call of poll.
const MOST_DESCRIPTORS: usize = 1 << 20;

/// The kernel's poll(2), not libc's: that one may be another library's.
pub fn kernel_poll(fds: &mut [PollFd], limit: Option<Duration>) -> Result<usize, Errno> {
    let time = limit.map(|limit| libc::timespec {
        tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let arguments = [pointer(fds.as_mut_ptr()), fds.len(), pointer(time), 0, 0];
    // SAFETY: `PollFd` has the form of `pollfd`; the time is NULL or alive, and there is no signal mask.
    unsafe { system(libc::SYS_ppoll, arguments) }.map(|ready| ready as usize)
}

/// What C gets for a result.
trait Result_ {
    const FAILED: Self;
}

impl Result_ for c_int {
    const FAILED: Self = -1;
}

impl Result_ for isize {
    const FAILED: Self = -1;
}

impl Result_ for *mut ibv_qp {
    const FAILED: Self = null_mut();
}

fn set_errno(value: c_int) {
    // SAFETY: the calling thread's own.
    unsafe { *libc::__errno_location() = value };
}

/// Runs the body of a function. No panic leaves it, and a success leaves `errno` as it was.
fn run<T: Result_>(body: impl FnOnce() -> Result<T, Errno>) -> T {
    // SAFETY: the calling thread's own.
    let before = unsafe { *libc::__errno_location() };
    let _uncancelled = Uncancelled::begin();
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Errno::IO));
    set_errno(result.as_ref().map_or_else(|errno| errno.raw_os_error(), |_| before));
    result.unwrap_or(T::FAILED)
}

/// The socket in `IWARP_MODE` with this descriptor. `None`: it is the kernel's to serve.
fn socket(fd: c_int) -> Result<Option<Arc<Socket>>, Errno> {
    // First: a child may have been forked while another thread had the table locked.
    if table::may_have(fd) && forked() {
        return Err(Errno::NODEV);
    }
    Ok(table::find(fd))
}

/// A program's buffer. Nothing is formed of it; it is copied to or from, and a bad one is `EFAULT`.
fn buffer(start: *const c_void, len: usize) -> MemSeg {
    MemSeg { addr: start.expose_provenance() as u64, len: len.min(isize::MAX as usize) }
}

/// # Safety
/// `vectors` has `count` entries.
unsafe fn buffers(vectors: *const iovec, count: c_int) -> Result<Vec<MemSeg>, Errno> {
    let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    if count > MOST_VECTORS {
        return Err(Errno::INVAL);
    }
    if count > 0 && vectors.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let all = (0..count).map(|i| unsafe { vectors.add(i).read_unaligned() });
    let buffers: Vec<MemSeg> = all.map(|vector| buffer(vector.iov_base, vector.iov_len)).collect();
    let sum = buffers.iter().try_fold(0usize, |sum, buffer| sum.checked_add(buffer.len));
    sum.filter(|sum| *sum <= isize::MAX as usize).map(|_| buffers).ok_or(Errno::INVAL)
}

fn are_nothing(buffers: &[MemSeg]) -> bool {
    buffers.iter().all(|buffer| buffer.len == 0)
}

fn send(socket: &Socket, fd: c_int, buffers: &[MemSeg], with: c_int) -> Result<isize, Errno> {
    let flags = flags(with).ok_or(Errno::OPNOTSUPP)?;
    socket.send(buffers, flags, patience(fd, libc::SO_SNDTIMEO)).map(|n| n as isize)
}

fn receive(socket: &Socket, fd: c_int, buffers: &[MemSeg], with: c_int) -> Result<isize, Errno> {
    let flags = flags(with).ok_or(Errno::OPNOTSUPP)?;
    socket.receive(buffers, flags, patience(fd, libc::SO_RCVTIMEO)).map(|n| n as isize)
}

/// read(2) and readv(2): a call for no bytes does nothing.
fn read(socket: &Socket, fd: c_int, buffers: &[MemSeg]) -> Result<isize, Errno> {
    if are_nothing(buffers) { Ok(0) } else { receive(socket, fd, buffers, 0) }
}

/// # Safety
/// As [`Mode::of`].
unsafe fn set_mode(fd: c_int, value: *const c_void, len: socklen_t) -> Result<c_int, Errno> {
    if forked() {
        return Err(Errno::NODEV);
    }
    // SAFETY: the caller's promise.
    let mode = unsafe { Mode::of(value, len) }.map_err(|_| Errno::INVAL)?;
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: a number that is no descriptor gives `EBADF`, and only the program closes it during the call.
    let socket = Socket::prepare(unsafe { BorrowedFd::borrow_raw(fd) }, mode)?;
    let engine = Engine::of_process()?;
    // Before anything is sent: another thread may set the mode at the same time.
    table::insert(fd, &socket)?;
    if let Err(errno) = engine.set_up(&socket) {
        table::remove(fd, &socket);
        // Another thread may wait for it meanwhile.
        socket.begin_close();
        socket.finish_close(None);
        return Err(errno);
    }
    match socket.wait_until_up(patience(fd, libc::SO_SNDTIMEO)) {
        // It goes on; its end is a matter of POLLOUT and SO_ERROR, as with connect(2).
        Err(Errno::AGAIN) => Err(Errno::INPROGRESS),
        other => other.map(|()| 0),
    }
}

/// Defines functions that are, for a descriptor that is not in `IWARP_MODE`, the system call behind `=`: no
/// lock is taken. In front of it: [`cancellable`], or [`plain`] for what is no cancellation point in libc.
/// `if`: what else must hold for that. Otherwise the body runs, with the socket if there is one.
macro_rules! for_any {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($fd:ident: c_int $(, $arg:ident: $type:ty)*) -> $ret:ty
            = $pass:ident $number:ident($($value:expr),*) $(if ($also:expr))? |$socket:ident| $body:block
    )*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// The pointers are what the C interface says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($fd: c_int $(, $arg: $type)*) -> $ret {
            if !table::may_have($fd) $(&& $also)? {
                let mut arguments = [0; 6];
                for (to, from) in arguments.iter_mut().zip([int($fd) $(, $value)*]) {
                    *to = from;
                }
                // SAFETY: the caller's promise, and this frame has nothing to drop.
                return unsafe { $pass(libc::$number, arguments) } as $ret;
            }
            // A frame of its own: the one above has nothing to drop.
            #[inline(never)]
            unsafe fn served($fd: c_int $(, $arg: $type)*) -> $ret {
                run(move || {
                    let mut arguments = [0; 5];
                    for (to, from) in arguments.iter_mut().zip([int($fd) $(, $value)*]) {
                        *to = from;
                    }
                    let $socket = socket($fd)?;
                    #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks, reason = "as above")]
                    unsafe {
                        let body = move || -> Result<Option<$ret>, Errno> { $body };
                        match body()? {
                            Some(result) => Ok(result),
                            None => system(libc::$number, arguments).map(|result| result as $ret),
                        }
                    }
                })
            }
            // SAFETY: the caller's promise.
            unsafe { served($fd $(, $arg)*) }
        }
    )*};
}

for_any! {
    /// uwarp_sockets(7).
    fn uwarp_setsockopt(
        fd: c_int,
        level: c_int,
        name: c_int,
        value: *const c_void,
        len: socklen_t
    ) -> c_int
    = plain SYS_setsockopt(int(level), int(name), pointer(value), len as usize)
    if (level != SOL_UWARP) |_socket| {
        match (level, name) {
            (SOL_UWARP, IWARP_MODE) => set_mode(fd, value, len).map(Some),
            (SOL_UWARP, _) => Err(Errno::NOPROTOOPT),
            _ => Ok(None),
        }
    }

    /// uwarp_sockets(7).
    fn uwarp_getsockopt(
        fd: c_int,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        len: *mut socklen_t
    ) -> c_int
    = plain SYS_getsockopt(int(level), int(name), pointer(value), pointer(len))
    if (level != SOL_UWARP) |socket| {
        match (level, name, socket) {
            (SOL_UWARP, IWARP_MODE, socket) => {
                // For the error of a number that is no descriptor.
                system(libc::SYS_fcntl, [int(fd), int(libc::F_GETFD), 0, 0, 0])?;
                give(&role_value(socket.map(|socket| socket.role())).to_ne_bytes(), value, len)?;
            }
            (SOL_UWARP, IWARP_PEER_DATA, Some(socket)) => give(&socket.peer_data(), value, len)?,
            (SOL_UWARP, IWARP_PEER_DATA, None) => return Err(Errno::NOTCONN),
            (SOL_UWARP, ..) => return Err(Errno::NOPROTOOPT),
            (libc::SOL_SOCKET, libc::SO_ERROR, Some(socket)) => {
                let error = socket.take_error().map_or(0, Errno::raw_os_error);
                give(&error.to_ne_bytes(), value, len)?;
            }
            _ => return Ok(None),
        }
        Ok(Some(0))
    }

    /// uwarp_sockets(7).
    fn uwarp_read(fd: c_int, buf: *mut c_void, count: usize) -> isize
    = cancellable SYS_read(pointer(buf), count) |socket| {
        socket.map(|socket| read(&socket, fd, &[buffer(buf, count)])).transpose()
    }

    /// uwarp_sockets(7).
    fn uwarp_readv(fd: c_int, iov: *const iovec, count: c_int) -> isize
    = cancellable SYS_readv(pointer(iov), int(count)) |socket| {
        socket.map(|socket| read(&socket, fd, &buffers(iov, count)?)).transpose()
    }

    /// uwarp_sockets(7).
    fn uwarp_recv(fd: c_int, buf: *mut c_void, len: usize, flags: c_int) -> isize
    = cancellable SYS_recvfrom(pointer(buf), len, int(flags), 0) |socket| {
        socket.map(|socket| receive(&socket, fd, &[buffer(buf, len)], flags)).transpose()
    }

    /// uwarp_sockets(7).
    fn uwarp_write(fd: c_int, buf: *const c_void, count: usize) -> isize
    = cancellable SYS_write(pointer(buf), count) |socket| {
        socket.map(|socket| send(&socket, fd, &[buffer(buf, count)], 0)).transpose()
    }

    /// uwarp_sockets(7).
    fn uwarp_writev(fd: c_int, iov: *const iovec, count: c_int) -> isize
    = cancellable SYS_writev(pointer(iov), int(count)) |socket| {
        let Some(socket) = socket else { return Ok(None) };
        let buffers = buffers(iov, count)?;
        if are_nothing(&buffers) { Ok(Some(0)) } else { send(&socket, fd, &buffers, 0).map(Some) }
    }

    /// uwarp_sockets(7).
    fn uwarp_send(fd: c_int, buf: *const c_void, len: usize, flags: c_int) -> isize
    = cancellable SYS_sendto(pointer(buf), len, int(flags), 0) |socket| {
        socket.map(|socket| send(&socket, fd, &[buffer(buf, len)], flags)).transpose()
    }

    /// uwarp_sockets(7).
    fn uwarp_shutdown(fd: c_int, direction: c_int) -> c_int = plain SYS_shutdown(int(direction)) |socket| {
        let Some(socket) = socket else { return Ok(None) };
        socket.shutdown(how(direction).ok_or(Errno::INVAL)?).map(|()| Some(0))
    }
}

/// uwarp_sockets(7).
///
/// # Safety
/// Any number may be given.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn uwarp_close(fd: c_int) -> c_int {
    if forked() {
        // The parent's socket goes on when its child closes its copy.
        table::forget(fd);
    }
    if table::may_have(fd) && close_served(fd) < 0 {
        return -1;
    }
    // SAFETY: this frame has nothing to drop.
    unsafe { cancellable(libc::SYS_close, [int(fd), 0, 0, 0, 0, 0]) as c_int }
}

/// Ends the stream; the number is the caller's to close.
#[inline(never)]
fn close_served(fd: c_int) -> c_int {
    run(|| {
        let Some(socket) = table::find(fd).filter(|_| table::is_ours()) else { return Ok(0) };
        if !socket.begin_close() {
            return Err(Errno::BADF);
        }
        let linger = linger(fd);
        prepare_close(fd, linger);
        // While this waits, calls of other threads still find the socket, closed.
        socket.finish_close(linger);
        disconnect_number(fd);
        // Before the number may be another one's.
        table::remove(fd, &socket);
        Ok(0)
    })
}

/// uwarp_sockets(7).
///
/// # Safety
/// As poll(2).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn uwarp_poll(fds: *mut pollfd, nfds: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the caller's promise; this frame has nothing to drop.
    unsafe {
        let ours = !fds.is_null()
            && nfds <= MOST_DESCRIPTORS as nfds_t
            && (0..nfds as usize).any(|at| table::may_have((*fds.add(at)).fd));
        if !ours || forked() {
            let arguments = [pointer(fds), nfds as usize, int(timeout), 0, 0, 0];
            return cancellable(libc::SYS_poll, arguments) as c_int;
        }
        poll_served(fds, nfds as usize, timeout)
    }
}

/// # Safety
/// As poll(2), and not NULL.
#[inline(never)]
unsafe fn poll_served(fds: *mut pollfd, nfds: usize, timeout: c_int) -> c_int {
    run(|| {
        // SAFETY: the caller's promise; the forms are the same.
        let fds = unsafe { std::slice::from_raw_parts_mut(fds.cast::<PollFd>(), nfds) };
        let limit = u64::try_from(timeout).ok().map(Duration::from_millis);
        poll(fds, limit).map(|ready| ready as c_int)
    })
}

fn upgraded(fd: c_int) -> Result<Arc<Socket>, Errno> {
    socket(fd)?.ok_or(Errno::OPNOTSUPP)
}

/// uwarp_sockets(7): how many were posted.
///
/// # Safety
/// `descs` has `count` entries, each as the C interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uwarp_post(fd: c_int, descs: *const uwarp_desc, count: c_int) -> c_int {
    run(|| {
        let socket = upgraded(fd)?;
        if count > 0 && descs.is_null() {
            return Err(Errno::INVAL);
        }
        let mut posted = 0;
        while posted < count {
            // SAFETY: the caller's promise.
            let one = unsafe {
                let desc = descs.add(posted as usize).read_unaligned();
                descriptor(&desc).map(|(op, pieces)| (desc.id, op, pieces))
            };
            let result = one.map_err(|_| Errno::INVAL);
            match result.and_then(|(id, op, pieces)| socket.post(id, op, &pieces)) {
                Ok(()) => posted += 1,
                Err(_) if posted > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(posted)
    })
}

/// uwarp_sockets(7): how many there were.
///
/// # Safety
/// `to` has room for `count` completions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uwarp_get_completions(fd: c_int, to: *mut uwarp_completion, count: c_int) -> c_int {
    run(|| {
        let socket = upgraded(fd)?;
        if to.is_null() {
            return Err(Errno::INVAL);
        }
        let mut taken = 0;
        socket.take_done(|done| {
            if taken >= count {
                return false;
            }
            // SAFETY: there is room for `count` of them.
            unsafe { to.add(taken as usize).write_unaligned(done.into()) };
            taken += 1;
            true
        });
        Ok(taken)
    })
}

/// uwarp_sockets(7).
///
/// # Safety
/// Any number may be given.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn uwarp_socket_qp(fd: c_int) -> *mut ibv_qp {
    run(|| Ok(upgraded(fd)?.stream()?.verbs().qp()))
}
