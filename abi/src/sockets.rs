//! `<uwarp_sockets.h>`: sockets of the kernel in `IWARP_MODE` (docs/adr/043). Here C arguments are converted;
//! what the calls do is in `uwarp_rsocket::upgrade`.
//!
//! Each function does for a socket in `IWARP_MODE` what the call without its prefix does for others, and for
//! all other descriptors it makes that system call, and nothing else ([`for_any`]). It makes the call itself:
//! libc's function of that name may be another library's, which in turn calls the one here.

use std::ffi::{c_int, c_long, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use libc::{iovec, nfds_t, pollfd, socklen_t};
use uwarp_abi_types::verbs::ibv_qp;
use uwarp_driver::RdmaDevice;
use uwarp_iwarp_mode as kernel;
use uwarp_iwarp_mode::{
    IWARP_MODE, IWARP_PEER_DATA, Mode, SOL_UWARP, cancellable, descriptor, disconnect_number, give, how, int,
    linger, patience, plain, pointer, prepare_close, role_value, uwarp_completion, uwarp_desc,
};
use uwarp_rsocket::table;
use uwarp_rsocket::upgrade::Terms;
use uwarp_rsocket::{Errno, MemSeg, Upgraded};

use crate::convention::{Convention, MinusOne};
use crate::entry;
use crate::failure::{Failure, required};
use crate::ibverbs::create_qp;
use crate::ibverbs::mr::{self, CPd};
use crate::ibverbs::qp::CQp;
use crate::object;
use crate::rdmacm::device::shared;
use crate::rdmacm::rsocket::data::{buffer, buffers, flags, length, vectors};
use crate::rdmacm::rsocket::poll;

/// A system call, with what it returns.
///
/// # Safety
/// The arguments are those of the call.
unsafe fn system(number: c_long, arguments: [usize; 5]) -> Result<isize, Failure> {
    // SAFETY: the caller's promise.
    unsafe { kernel::system(number, arguments) }
        .map_err(|errno| Failure::new(errno.raw_os_error(), "the system call failed"))
}

/// The socket in `IWARP_MODE` with this descriptor. `None`: it is the kernel's to serve.
fn upgraded(fd: c_int) -> Result<Option<Arc<Upgraded>>, Failure> {
    if table::may_be_upgraded(fd) && table::is_parents(fd) {
        return Err(Failure::new(
            libc::ENODEV,
            "a forked child cannot use a socket that its parent has upgraded",
        ));
    }
    Ok(table::upgraded(fd).ok())
}

fn send(socket: &Upgraded, fd: c_int, buffers: &[MemSeg], with: c_int) -> Result<isize, Failure> {
    Ok(length(socket.send(buffers, flags(with)?, patience(fd, libc::SO_SNDTIMEO))?))
}

/// read(2) and readv(2): a call for no bytes does nothing.
fn read(socket: &Upgraded, fd: c_int, buffers: &[MemSeg]) -> Result<isize, Failure> {
    if are_nothing(buffers) { Ok(0) } else { receive(socket, fd, buffers, 0) }
}

/// So does one of writev(2), but not one of write(2).
fn are_nothing(buffers: &[MemSeg]) -> bool {
    buffers.iter().all(|buffer| buffer.len == 0)
}

fn receive(socket: &Upgraded, fd: c_int, buffers: &[MemSeg], with: c_int) -> Result<isize, Failure> {
    Ok(length(socket.receive(buffers, flags(with)?, patience(fd, libc::SO_RCVTIMEO))?))
}

/// # Safety
/// As [`Mode::of`].
unsafe fn set_mode(fd: c_int, value: *const c_void, len: socklen_t) -> Result<(), Failure> {
    if table::is_parents(fd) {
        return Err(Failure::new(libc::ENODEV, "the parent of this process has upgraded the socket"));
    }
    // SAFETY: the caller's promise.
    let mode = unsafe { Mode::of(value, len) }.map_err(Failure::invalid)?;
    if fd < 0 {
        return Err(Errno::BADF.into());
    }
    // SAFETY: a number that is no descriptor gives `EBADF`, and only the program closes it during the call.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let terms = Terms { private_data: &mode.private_data, limit: mode.limit, ..Terms::new(mode.role) };
    let upgraded = Upgraded::prepare(socket, &terms)?;
    // Before anything is sent: another thread may set the mode at the same time.
    table::insert_upgraded(fd, &upgraded)
        .map_err(|errno| Failure::new(errno.raw_os_error(), "the socket is in IWARP_MODE already"))?;
    if let Err(errno) = upgraded.start(socket, &terms) {
        table::remove_upgraded(fd, &upgraded);
        // Another thread may have asked for it meanwhile.
        if let Some(made) = upgraded.take_handle() {
            drop_view(made);
        }
        return Err(errno.into());
    }
    match upgraded.wait_until_up(patience(fd, libc::SO_SNDTIMEO)) {
        // It goes on; its end is a matter of POLLOUT and SO_ERROR, as with connect(2).
        Err(Errno::AGAIN) => Err(Errno::INPROGRESS.into()),
        other => Ok(other?),
    }
}

fn post(socket: &Upgraded, desc: &uwarp_desc) -> Result<(), Failure> {
    // SAFETY: the entry point's caller has promised it.
    let (op, pieces) = unsafe { descriptor(desc) }.map_err(Failure::invalid)?;
    Ok(socket.post(desc.id, op, &pieces)?)
}

/// C's view of a socket's queue pair, made by the first call.
fn qp_of(socket: &Upgraded) -> Result<*mut ibv_qp, Failure> {
    let make = || {
        let device = RdmaDevice::list().first().copied();
        let device = device.ok_or_else(|| Failure::new(libc::ENODEV, "no interface is up"))?;
        let context = shared(device)?.verbs;
        // SAFETY: the context lives as long as the process, and the domain as long as the queue pair.
        let qp = unsafe {
            let pd = mr::give_domain(context, Arc::clone(socket.pd()), None)?;
            create_qp::of_socket(pd, socket.qp(), socket.own_work())?
        };
        Ok::<_, Failure>(qp.expose_provenance())
    };
    Ok(std::ptr::with_exposed_provenance_mut(socket.handle(make, drop_view)?))
}

/// The program uses that view no longer: the socket is closed. Or it has never had it.
fn drop_view(made: usize) {
    let qp: *mut ibv_qp = std::ptr::with_exposed_provenance_mut(made);
    // SAFETY: `qp_of` has made both, and nothing uses them any more.
    unsafe {
        let pd = (*qp).pd;
        drop(object::take::<CQp>(qp));
        drop(object::take::<CPd>(pd));
    }
}

/// Defines functions that are, for a descriptor that is not in `IWARP_MODE`, the system call behind `=`: no
/// lock is taken and nothing is counted, so that the handler of a signal may call them, and a child that was
/// forked in the middle of another thread's call. In front of it: [`cancellable`], or [`plain`] for what
/// is no cancellation point in libc. `if`: what else must hold for that. Otherwise the body runs, as that of
/// an [`entry!`].
macro_rules! for_any {
    ($(
        $(#[$meta:meta])*
        fn $name:ident($fd:ident: c_int $(, $arg:ident: $type:ty)*) -> $ret:ty
            = $pass:ident $number:ident($($value:expr),*) $(if ($also:expr))? $body:block
    )*) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// The pointers are what the C interface says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            $fd: c_int $(, $arg: $type)*
        ) -> <$ret as Convention>::C {
            if !table::may_be_upgraded($fd) $(&& $also)? {
                let mut arguments = [0; 6];
                for (to, from) in arguments.iter_mut().zip([int($fd) $(, $value)*]) {
                    *to = from;
                }
                // SAFETY: the caller's promise, and this frame has nothing to drop.
                return unsafe { $pass(libc::$number, arguments) } as <$ret as Convention>::C;
            }
            // A frame of its own: the one above has nothing to drop.
            #[inline(never)]
            unsafe fn served($fd: c_int $(, $arg: $type)*) -> <$ret as Convention>::C {
                entry::run::<$ret>(stringify!($name), move || {
                    #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks, reason = "see `entry!`")]
                    unsafe { $body }
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
    ) -> MinusOne
    = plain SYS_setsockopt(int(level), int(name), pointer(value), len as usize) if (level != SOL_UWARP) {
        match (level, name) {
            (SOL_UWARP, IWARP_MODE) => set_mode(fd, value, len),
            (SOL_UWARP, _) => Err(Errno::NOPROTOOPT.into()),
            _ => {
                let arguments = [int(fd), int(level), int(name), pointer(value), len as usize];
                system(libc::SYS_setsockopt, arguments).map(drop)
            }
        }
    }

    /// uwarp_sockets(7).
    fn uwarp_getsockopt(
        fd: c_int,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        len: *mut socklen_t
    ) -> MinusOne
    = plain SYS_getsockopt(int(level), int(name), pointer(value), pointer(len)) if (level != SOL_UWARP) {
        match (level, name, upgraded(fd)?) {
            (SOL_UWARP, IWARP_MODE, socket) => {
                // For the error of a number that is no descriptor.
                system(libc::SYS_fcntl, [int(fd), int(libc::F_GETFD), 0, 0, 0])?;
                Ok(give(&role_value(socket.map(|socket| socket.role())).to_ne_bytes(), value, len)?)
            }
            (SOL_UWARP, IWARP_PEER_DATA, Some(socket)) => Ok(give(&socket.peer_data(), value, len)?),
            (SOL_UWARP, IWARP_PEER_DATA, None) => Err(Errno::NOTCONN.into()),
            (SOL_UWARP, ..) => Err(Errno::NOPROTOOPT.into()),
            (libc::SOL_SOCKET, libc::SO_ERROR, Some(socket)) => {
                let error = socket.take_error().map_or(0, Errno::raw_os_error);
                Ok(give(&error.to_ne_bytes(), value, len)?)
            }
            _ => {
                let arguments = [int(fd), int(level), int(name), pointer(value), pointer(len)];
                system(libc::SYS_getsockopt, arguments).map(drop)
            }
        }
    }

    /// uwarp_sockets(7).
    fn uwarp_read(fd: c_int, buf: *mut c_void, count: usize) -> MinusOne<isize>
    = cancellable SYS_read(pointer(buf), count) {
        match upgraded(fd)? {
            Some(socket) => read(&socket, fd, &[buffer(buf, count)]),
            None => system(libc::SYS_read, [int(fd), pointer(buf), count, 0, 0]),
        }
    }

    /// uwarp_sockets(7).
    fn uwarp_readv(fd: c_int, iov: *const iovec, count: c_int) -> MinusOne<isize>
    = cancellable SYS_readv(pointer(iov), int(count)) {
        match upgraded(fd)? {
            Some(socket) => read(&socket, fd, &buffers(iov, vectors(count)?)?),
            None => system(libc::SYS_readv, [int(fd), pointer(iov), int(count), 0, 0]),
        }
    }

    /// uwarp_sockets(7).
    fn uwarp_recv(fd: c_int, buf: *mut c_void, len: usize, flags: c_int) -> MinusOne<isize>
    = cancellable SYS_recvfrom(pointer(buf), len, int(flags), 0, 0) {
        match upgraded(fd)? {
            Some(socket) => receive(&socket, fd, &[buffer(buf, len)], flags),
            // recvfrom(2) has six arguments; the last is ignored without the fifth.
            None => system(libc::SYS_recvfrom, [int(fd), pointer(buf), len, int(flags), 0]),
        }
    }

    /// uwarp_sockets(7).
    fn uwarp_write(fd: c_int, buf: *const c_void, count: usize) -> MinusOne<isize>
    = cancellable SYS_write(pointer(buf), count) {
        match upgraded(fd)? {
            Some(socket) => send(&socket, fd, &[buffer(buf, count)], 0),
            None => system(libc::SYS_write, [int(fd), pointer(buf), count, 0, 0]),
        }
    }

    /// uwarp_sockets(7).
    fn uwarp_writev(fd: c_int, iov: *const iovec, count: c_int) -> MinusOne<isize>
    = cancellable SYS_writev(pointer(iov), int(count)) {
        match upgraded(fd)? {
            Some(socket) => {
                let buffers = buffers(iov, vectors(count)?)?;
                if are_nothing(&buffers) { Ok(0) } else { send(&socket, fd, &buffers, 0) }
            }
            None => system(libc::SYS_writev, [int(fd), pointer(iov), int(count), 0, 0]),
        }
    }

    /// uwarp_sockets(7).
    fn uwarp_send(fd: c_int, buf: *const c_void, len: usize, flags: c_int) -> MinusOne<isize>
    = cancellable SYS_sendto(pointer(buf), len, int(flags), 0, 0) {
        match upgraded(fd)? {
            Some(socket) => send(&socket, fd, &[buffer(buf, len)], flags),
            None => system(libc::SYS_sendto, [int(fd), pointer(buf), len, int(flags), 0]),
        }
    }

    /// uwarp_sockets(7).
    fn uwarp_shutdown(fd: c_int, direction: c_int) -> MinusOne = plain SYS_shutdown(int(direction)) {
        let Some(socket) = upgraded(fd)? else {
            return system(libc::SYS_shutdown, [int(fd), int(direction), 0, 0, 0]).map(drop);
        };
        let how = how(direction).ok_or_else(|| Failure::invalid("how"))?;
        Ok(socket.shutdown(how)?)
    }

    /// uwarp_sockets(7).
    fn uwarp_close(fd: c_int) -> MinusOne = cancellable SYS_close() {
        if table::is_parents(fd) {
            // The parent's socket goes on when its child closes its copy.
            table::forget(fd);
        } else if table::is_ours() && let Ok(socket) = table::upgraded(fd) {
            if !socket.begin_close() {
                return Err(Errno::BADF.into());
            }
            let linger = linger(fd);
            if let Some(made) = socket.take_handle() {
                drop_view(made);
            }
            prepare_close(fd, linger);
            // While this waits, calls of other threads still find the socket, closed. Bytes of theirs must
            // not get between those of the stream.
            socket.finish_close(linger);
            disconnect_number(fd);
            // Before the number may be another one's.
            table::remove_upgraded(fd, &socket);
        }
        system(libc::SYS_close, [int(fd), 0, 0, 0, 0]).map(drop)
    }
}

/// Whether one of these may be a socket of the library's.
///
/// # Safety
/// As poll(2).
unsafe fn any_of_ours(fds: *const pollfd, nfds: nfds_t) -> bool {
    // SAFETY: the caller's promise.
    !fds.is_null() && (0..nfds as usize).any(|at| table::may_have(unsafe { (*fds.add(at)).fd }))
}

/// uwarp_sockets(7).
///
/// # Safety
/// As poll(2).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn uwarp_poll(fds: *mut pollfd, nfds: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the caller's promise; as of `for_any`.
    unsafe {
        if nfds > poll::MOST as nfds_t || !any_of_ours(fds, nfds) {
            let arguments = [pointer(fds), nfds as usize, int(timeout), 0, 0, 0];
            return cancellable(libc::SYS_poll, arguments) as c_int;
        }
        poll_served(fds, nfds, timeout)
    }
}

/// # Safety
/// As poll(2).
#[inline(never)]
unsafe fn poll_served(fds: *mut pollfd, nfds: nfds_t, timeout: c_int) -> c_int {
    entry::run::<MinusOne<c_int>>("uwarp_poll", move || {
        // SAFETY: the caller's promise.
        unsafe { poll::poll_c(fds, nfds, timeout) }
    })
}

entry! {
    /// uwarp_sockets(7): how many were posted.
    fn uwarp_post(fd: c_int, descs: *const uwarp_desc, count: c_int) -> MinusOne<c_int> {
        let socket = upgraded(fd)?.ok_or(Errno::OPNOTSUPP)?;
        if count == 0 {
            return Ok(0);
        }
        let descs = required(descs.cast_mut(), "descs")?;
        let mut posted = 0;
        while posted < count {
            match post(&socket, &descs.add(posted as usize).read_unaligned()) {
                Ok(()) => posted += 1,
                Err(_) if posted > 0 => break,
                Err(failure) => return Err(failure),
            }
        }
        Ok(posted)
    }

    /// uwarp_sockets(7): how many there were.
    fn uwarp_get_completions(fd: c_int, to: *mut uwarp_completion, count: c_int) -> MinusOne<c_int> {
        let socket = upgraded(fd)?.ok_or(Errno::OPNOTSUPP)?;
        let to = required(to, "completions")?;
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
    }

    /// uwarp_sockets(7).
    fn uwarp_socket_qp(fd: c_int) -> *mut ibv_qp {
        let socket = upgraded(fd)?.ok_or(Errno::OPNOTSUPP)?;
        qp_of(&socket)
    }
}
