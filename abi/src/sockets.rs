//! `<uwarp_sockets.h>`: sockets of the kernel in `IWARP_MODE` (docs/adr/043). Here C arguments are converted;
//! what the calls do is in `uwarp_rsocket::upgrade`.
//!
//! Each function does for a socket in `IWARP_MODE` what the call without its prefix does for others, and for
//! all other descriptors it makes that system call, and nothing else ([`for_any`]). It makes the call itself:
//! libc's function of that name may be another library's, which in turn calls the one here.

use std::ffi::{c_int, c_long, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use libc::{iovec, nfds_t, pollfd, socklen_t};
use uwarp_abi_types::verbs::{ibv_qp, ibv_sge};
use uwarp_driver::RdmaDevice;
use uwarp_rnic::Sge;
use uwarp_rsocket::socket::How;
use uwarp_rsocket::table;
use uwarp_rsocket::upgrade::{Patience, Role, SETUP_LIMIT, Terms};
use uwarp_rsocket::{Errno, Kind, MemSeg, Op, Upgraded};

use crate::convention::{Convention, MinusOne};
use crate::entry;
use crate::entry::AfterFork;
use crate::failure::{Failure, errno, required};
use crate::ibverbs::create_qp;
use crate::ibverbs::mr::{self, CPd};
use crate::ibverbs::qp::CQp;
use crate::object;
use crate::rdmacm::device::shared;
use crate::rdmacm::rsocket::data::{buffer, buffers, flags, length, vectors};
use crate::rdmacm::rsocket::poll;

/// `SOL_UWARP`
const SOL_UWARP: c_int = 0x5557;
/// `IWARP_MODE`
const IWARP_MODE: c_int = 1;
/// `IWARP_PEER_DATA`
const IWARP_PEER_DATA: c_int = 2;

/// `UWARP_INITIATOR`, `UWARP_RESPONDER`
const INITIATOR: u32 = 1;
const RESPONDER: u32 = 2;

/// `struct uwarp_iwarp_mode`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct uwarp_iwarp_mode {
    pub role: u32,
    pub timeout_ms: u32,
    pub private_data: *const c_void,
    pub private_data_len: u32,
    pub reserved: u32,
}

/// `enum uwarp_op`
mod op {
    pub const RECV: u32 = 1;
    pub const SEND: u32 = 2;
    pub const WRITE: u32 = 3;
    pub const READ: u32 = 4;
    pub const WORK_REQUEST: u32 = 5;
}

/// `struct uwarp_desc`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct uwarp_desc {
    pub id: u64,
    pub sg_list: *const ibv_sge,
    pub num_sge: u32,
    pub op: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub flags: u32,
}

/// `struct uwarp_completion`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct uwarp_completion {
    pub id: u64,
    pub length: u64,
    pub op: u32,
    pub error: i32,
}

const _: () = {
    assert!(size_of::<uwarp_iwarp_mode>() == 24);
    assert!(size_of::<uwarp_desc>() == 40 && size_of::<uwarp_completion>() == 24);
    assert!(size_of::<ibv_sge>() == size_of::<Sge>() && align_of::<ibv_sge>() == align_of::<Sge>());
};

/// A system call, with what it returns.
///
/// # Safety
/// The arguments are those of the call.
unsafe fn system(number: c_long, arguments: [usize; 5]) -> Result<isize, Failure> {
    let [a, b, c, d, e] = arguments;
    // SAFETY: the caller's promise; a call ignores arguments that it does not have.
    let result = unsafe { libc::syscall(number, a, b, c, d, e) };
    match isize::try_from(result) {
        Ok(result @ 0..) => Ok(result),
        _ => Err(Failure::new(errno(), "the system call failed")),
    }
}

/// A C int as an argument.
fn int(value: c_int) -> usize {
    value as usize
}

/// An address as an argument.
fn pointer<T>(to: *const T) -> usize {
    to.expose_provenance()
}

/// The socket in `IWARP_MODE` with this descriptor. `None`: it is the kernel's to serve.
fn upgraded(fd: c_int) -> Result<Option<Arc<Upgraded>>, Failure> {
    // First: a child may have been forked while another thread had the table locked.
    if table::may_be_upgraded(fd) && uwarp_driver::forked() {
        return Err(Failure::new(
            libc::ENODEV,
            "a forked child cannot use a socket that its parent has upgraded",
        ));
    }
    Ok(table::upgraded(fd).ok())
}

/// An option of the kernel's socket; zeros if it has none.
fn option<T: Copy>(fd: c_int, name: c_int, mut value: T) -> T {
    let before = value;
    let mut len = size_of::<T>() as socklen_t;
    let arguments =
        [int(fd), int(libc::SOL_SOCKET), int(name), pointer(&raw mut value), pointer(&raw mut len)];
    // SAFETY: value and length are alive, and any bytes are a value of the structures that this is used for.
    if unsafe { system(libc::SYS_getsockopt, arguments) }.is_ok() { value } else { before }
}

/// How long a call may wait, as the program has told the kernel. `limit`: `SO_RCVTIMEO` or `SO_SNDTIMEO`.
fn patience(fd: c_int, limit: c_int) -> impl Fn() -> Patience {
    move || {
        // SAFETY: it has no pointers.
        let flags = unsafe { system(libc::SYS_fcntl, [int(fd), int(libc::F_GETFL), 0, 0, 0]) };
        if flags.is_ok_and(|flags| flags & libc::O_NONBLOCK as isize != 0) {
            return Patience::None;
        }
        let time = option(fd, limit, libc::timeval { tv_sec: 0, tv_usec: 0 });
        match (u64::try_from(time.tv_sec), u64::try_from(time.tv_usec)) {
            (Ok(0), Ok(0)) | (Err(_), _) | (_, Err(_)) => Patience::Unlimited,
            (Ok(seconds), Ok(micros)) => {
                Patience::Limit(Duration::from_secs(seconds) + Duration::from_micros(micros))
            }
        }
    }
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

/// Reads the option's value: a role alone, or all of the structure.
///
/// # Safety
/// `value` is NULL or has `len` bytes.
unsafe fn mode_of(value: *const c_void, len: socklen_t) -> Result<uwarp_iwarp_mode, Failure> {
    let value = required(value.cast_mut(), "optval")?;
    let len = len as usize;
    // SAFETY: long enough, by the caller's promise.
    unsafe {
        if len >= size_of::<uwarp_iwarp_mode>() {
            Ok(value.cast::<uwarp_iwarp_mode>().read_unaligned())
        } else if len == size_of::<u32>() {
            let role = value.cast::<u32>().read_unaligned();
            let private_data = std::ptr::null();
            Ok(uwarp_iwarp_mode { role, timeout_ms: 0, private_data, private_data_len: 0, reserved: 0 })
        } else {
            Err(Failure::invalid("optlen is neither an int's nor that of struct uwarp_iwarp_mode"))
        }
    }
}

/// # Safety
/// As [`mode_of`].
unsafe fn set_mode(fd: c_int, value: *const c_void, len: socklen_t) -> Result<(), Failure> {
    if uwarp_driver::forked() {
        return Err(Failure::new(libc::ENODEV, "a forked child has no device"));
    }
    // SAFETY: the caller's promise.
    let mode = unsafe { mode_of(value, len) }?;
    let role = match mode.role {
        INITIATOR => Role::Initiator,
        RESPONDER => Role::Responder,
        _ => return Err(Failure::invalid("the role is neither UWARP_INITIATOR nor UWARP_RESPONDER")),
    };
    if mode.reserved != 0 {
        return Err(Failure::invalid("reserved is not 0"));
    }
    if fd < 0 {
        return Err(Errno::BADF.into());
    }
    let private_data = match mode.private_data_len as usize {
        0 => Vec::new(),
        len if len > uwarp_rsocket::upgrade::MAX_PRIVATE_DATA => {
            return Err(Failure::invalid("more private data than UWARP_PRIVATE_DATA_MAX"));
        }
        len => {
            let from = required(mode.private_data.cast::<u8>().cast_mut(), "private_data")?;
            let mut bytes = vec![0; len];
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
            bytes
        }
    };
    let limit = match mode.timeout_ms {
        0 => SETUP_LIMIT,
        milliseconds => Duration::from_millis(milliseconds.into()),
    };
    // SAFETY: a number that is no descriptor gives `EBADF`, and only the program closes it during the call.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let terms = Terms { private_data: &private_data, limit, ..Terms::new(role) };
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

/// Gives bytes to the program: as many as fit, and how many that are.
///
/// # Safety
/// `to` has room for as many bytes as `len` says.
unsafe fn give(bytes: &[u8], to: *mut c_void, len: *mut socklen_t) -> Result<(), Failure> {
    if to.is_null() || len.is_null() {
        return Err(Errno::FAULT.into());
    }
    // SAFETY: the caller's promise.
    unsafe {
        let fits = (*len as usize).min(bytes.len());
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast::<u8>(), fits);
        *len = fits as socklen_t;
    }
    Ok(())
}

/// The pieces of memory of a descriptor.
///
/// # Safety
/// As [`uwarp_desc`] says.
unsafe fn pieces(desc: &uwarp_desc) -> Result<Vec<Sge>, Failure> {
    let count = desc.num_sge as usize;
    if count > uwarp_rsocket::MOST_PIECES {
        return Err(Failure::invalid("more pieces of memory than UWARP_SGE_MAX"));
    }
    if count == 0 {
        return Ok(Vec::new());
    }
    let from = required(desc.sg_list.cast_mut(), "sg_list")?.cast::<Sge>();
    // SAFETY: the caller's promise, and the layouts are the same.
    Ok((0..count).map(|i| unsafe { from.add(i).read_unaligned() }).collect())
}

fn post(socket: &Upgraded, desc: &uwarp_desc) -> Result<(), Failure> {
    let (to, key) = (desc.remote_addr, desc.rkey);
    let op = match desc.op {
        op::RECV => Op::Receive,
        op::SEND => Op::Send,
        op::WRITE => Op::Write { to, key },
        op::READ => Op::Read { from: to, key },
        _ => return Err(Failure::invalid("op")),
    };
    if desc.flags != 0 {
        return Err(Failure::invalid("flags"));
    }
    // SAFETY: the entry point's caller has promised it.
    Ok(socket.post(desc.id, op, &unsafe { pieces(desc) }?)?)
}

fn kind(kind: Kind) -> u32 {
    match kind {
        Kind::Receive => op::RECV,
        Kind::Send => op::SEND,
        Kind::Write => op::WRITE,
        Kind::Read => op::READ,
        Kind::WorkRequest => op::WORK_REQUEST,
    }
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

fn linger(fd: c_int) -> Option<Duration> {
    let value = option(fd, libc::SO_LINGER, libc::linger { l_onoff: 0, l_linger: 0 });
    (value.l_onoff != 0).then(|| Duration::from_secs(u64::try_from(value.l_linger).unwrap_or(0)))
}

/// What the kernel has to do before an end of the stream with this `SO_LINGER`.
fn prepare_close(fd: c_int, linger: Option<Duration>) {
    let off = libc::linger { l_onoff: 0, l_linger: 0 };
    let nowhere = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    // Neither fails on a connected socket. On another one there is nothing to do.
    let _ = match linger {
        None => return,
        // A reset at once, though the connection has a second descriptor: the peer must not take what it
        // has so far for the whole.
        Some(Duration::ZERO) => {
            let arguments = [int(fd), pointer(&raw const nowhere), size_of_val(&nowhere), 0, 0];
            // SAFETY: the address is alive.
            unsafe { system(libc::SYS_connect, arguments) }
        }
        // The call here waits. The kernel would do so again where the connection's last descriptor is closed,
        // and that is the engine's thread.
        Some(_) => {
            let (level, name) = (int(libc::SOL_SOCKET), int(libc::SO_LINGER));
            let arguments = [int(fd), level, name, pointer(&raw const off), size_of_val(&off)];
            // SAFETY: the value is alive.
            unsafe { system(libc::SYS_setsockopt, arguments) }
        }
    };
}

/// Makes the number that of a file on which every call fails with `EBADF`. The stream has a descriptor of its
/// own for the connection, and a call that does not find the socket any more must not reach it by this one.
fn disconnect_number(fd: c_int) {
    let flags = int(libc::O_PATH | libc::O_CLOEXEC);
    let root = c"/".as_ptr();
    // SAFETY: the path is alive, and the new descriptor is this function's. Without one the number stays what
    // it is, until it is closed.
    unsafe {
        let Ok(nothing) = system(libc::SYS_openat, [int(libc::AT_FDCWD), pointer(root), flags, 0, 0]) else {
            return;
        };
        let _ = system(libc::SYS_dup3, [nothing as usize, int(fd), int(libc::O_CLOEXEC), 0, 0]);
        let _ = system(libc::SYS_close, [nothing as usize, 0, 0, 0, 0]);
    }
}

// As of libc, but a thread can be cancelled in them: the unwinding goes through.
unsafe extern "C-unwind" {
    #[link_name = "syscall"]
    fn syscall_unwinding(number: c_long, ...) -> c_long;
    #[link_name = "pthread_setcanceltype"]
    fn set_cancel_type(new: c_int, old: *mut c_int) -> c_int;
}

/// A system call of the program: with libc's result.
///
/// # Safety
/// The arguments are those of the call.
unsafe fn plain(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> c_long {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(number, a, b, c, d, e, f) }
}

/// The same, and a cancellation point, for the calls that are one in libc.
///
/// # Safety
/// The arguments are those of the call. No frame above has anything to drop.
unsafe fn cancellable(number: c_long, arguments: [usize; 6]) -> c_long {
    const PTHREAD_CANCEL_ASYNCHRONOUS: c_int = 1;
    let [a, b, c, d, e, f] = arguments;
    let mut before = 0;
    // SAFETY: a place for the type; the caller's promise. A thread that is cancelled between the calls has
    // nothing to give back.
    unsafe {
        set_cancel_type(PTHREAD_CANCEL_ASYNCHRONOUS, &raw mut before);
        let result = syscall_unwinding(number, a, b, c, d, e, f);
        set_cancel_type(before, std::ptr::null_mut());
        result
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
                entry::run::<$ret>(stringify!($name), AfterFork::Allow, move || {
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
                let role = match socket.map(|socket| socket.role()) {
                    None => {
                        // For the error of a number that is no descriptor.
                        system(libc::SYS_fcntl, [int(fd), int(libc::F_GETFD), 0, 0, 0])?;
                        0
                    }
                    Some(Role::Initiator) => INITIATOR,
                    Some(Role::Responder) => RESPONDER,
                };
                give(&role.to_ne_bytes(), value, len)
            }
            (SOL_UWARP, IWARP_PEER_DATA, Some(socket)) => give(&socket.peer_data(), value, len),
            (SOL_UWARP, IWARP_PEER_DATA, None) => Err(Errno::NOTCONN.into()),
            (SOL_UWARP, ..) => Err(Errno::NOPROTOOPT.into()),
            (libc::SOL_SOCKET, libc::SO_ERROR, Some(socket)) => {
                let error = socket.take_error().map_or(0, Errno::raw_os_error);
                give(&error.to_ne_bytes(), value, len)
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
    fn uwarp_shutdown(fd: c_int, how: c_int) -> MinusOne = plain SYS_shutdown(int(how)) {
        let Some(socket) = upgraded(fd)? else {
            return system(libc::SYS_shutdown, [int(fd), int(how), 0, 0, 0]).map(drop);
        };
        let how = match how {
            libc::SHUT_RD => How::Reading,
            libc::SHUT_WR => How::Writing,
            libc::SHUT_RDWR => How::Both,
            _ => return Err(Failure::invalid("how")),
        };
        Ok(socket.shutdown(how)?)
    }

    /// uwarp_sockets(7).
    fn uwarp_close(fd: c_int) -> MinusOne = cancellable SYS_close() {
        if uwarp_driver::forked() {
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
    entry::run::<MinusOne<c_int>>("uwarp_poll", AfterFork::Allow, move || {
        // SAFETY: the caller's promise.
        unsafe { poll::poll_c(fds, nfds, timeout) }
    })
}

entry! {
    /// uwarp_sockets(7): how many were posted.
    verb fn uwarp_post(fd: c_int, descs: *const uwarp_desc, count: c_int) -> MinusOne<c_int> {
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
    verb fn uwarp_get_completions(fd: c_int, to: *mut uwarp_completion, count: c_int) -> MinusOne<c_int> {
        let socket = upgraded(fd)?.ok_or(Errno::OPNOTSUPP)?;
        let to = required(to, "completions")?;
        let mut taken = 0;
        socket.take_done(|done| {
            if taken >= count {
                return false;
            }
            let (length, error) = match done.result {
                Ok(length) => (length, 0),
                Err(errno) => (0, errno.raw_os_error()),
            };
            let done = uwarp_completion { id: done.id, length, op: kind(done.kind), error };
            // SAFETY: there is room for `count` of them.
            unsafe { to.add(taken as usize).write_unaligned(done) };
            taken += 1;
            true
        });
        Ok(taken)
    }

    /// uwarp_sockets(7).
    verb fn uwarp_socket_qp(fd: c_int) -> *mut ibv_qp {
        let socket = upgraded(fd)?.ok_or(Errno::OPNOTSUPP)?;
        qp_of(&socket)
    }
}
