//! What the libraries of `<uwarp_sockets.h>` share (docs/adr/043, docs/adr/047): C's types, what a value of
//! `IWARP_MODE` means, and the system calls behind each function for all other descriptors.
//!
//! The libraries make the calls themselves: libc's function of that name may be another library's, which in
//! turn calls the one here.

use std::ffi::{c_int, c_long, c_void};
use std::time::Duration;

use libc::socklen_t;
use uwarp_abi_types::verbs::ibv_sge;
use uwarp_rnic::Sge;
use uwarp_rsocket::socket::{Flags, How};
use uwarp_rsocket::upgrade::{MAX_PRIVATE_DATA, Patience, Role, SETUP_LIMIT};
use uwarp_rsocket::{Completion, Errno, Kind, MOST_PIECES, Op};

/// `SOL_UWARP`
pub const SOL_UWARP: c_int = 0x5557;
/// `IWARP_MODE`
pub const IWARP_MODE: c_int = 1;
/// `IWARP_PEER_DATA`
pub const IWARP_PEER_DATA: c_int = 2;

/// `UWARP_INITIATOR`, `UWARP_RESPONDER`
const INITIATOR: u32 = 1;
const RESPONDER: u32 = 2;

/// `struct uwarp_iwarp_mode`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, non_camel_case_types)]
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
#[allow(missing_docs, non_camel_case_types)]
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
#[allow(missing_docs, non_camel_case_types)]
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

/// What a program has asked for by `IWARP_MODE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mode {
    /// This end's.
    pub role: Role,
    /// For the peer's program.
    pub private_data: Vec<u8>,
    /// For all of set-up.
    pub limit: Duration,
}

impl Mode {
    /// Reads the option's value: a role alone, or all of `struct uwarp_iwarp_mode`. An error says what is
    /// wrong.
    ///
    /// # Safety
    /// `value` is NULL or has `len` bytes; its pointer is as the C interface says.
    pub unsafe fn of(value: *const c_void, len: socklen_t) -> Result<Self, &'static str> {
        if value.is_null() {
            return Err("optval is NULL");
        }
        let len = len as usize;
        // SAFETY: long enough, by the caller's promise.
        let mode = unsafe {
            if len >= size_of::<uwarp_iwarp_mode>() {
                value.cast::<uwarp_iwarp_mode>().read_unaligned()
            } else if len == size_of::<u32>() {
                let role = value.cast::<u32>().read_unaligned();
                let private_data = std::ptr::null();
                uwarp_iwarp_mode { role, timeout_ms: 0, private_data, private_data_len: 0, reserved: 0 }
            } else {
                return Err("optlen is neither an int's nor that of struct uwarp_iwarp_mode");
            }
        };
        let role = match mode.role {
            INITIATOR => Role::Initiator,
            RESPONDER => Role::Responder,
            _ => return Err("the role is neither UWARP_INITIATOR nor UWARP_RESPONDER"),
        };
        if mode.reserved != 0 {
            return Err("reserved is not 0");
        }
        let mut private_data = vec![0; mode.private_data_len as usize];
        if private_data.len() > MAX_PRIVATE_DATA {
            return Err("more private data than UWARP_PRIVATE_DATA_MAX");
        }
        if !private_data.is_empty() {
            if mode.private_data.is_null() {
                return Err("private_data is NULL");
            }
            let from = mode.private_data.cast::<u8>();
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(from, private_data.as_mut_ptr(), private_data.len()) };
        }
        let limit = match mode.timeout_ms {
            0 => SETUP_LIMIT,
            milliseconds => Duration::from_millis(milliseconds.into()),
        };
        Ok(Self { role, private_data, limit })
    }
}

/// The value of `IWARP_MODE` for a socket in this role, or in none.
pub fn role_value(role: Option<Role>) -> u32 {
    match role {
        None => 0,
        Some(Role::Initiator) => INITIATOR,
        Some(Role::Responder) => RESPONDER,
    }
}

/// shutdown(2)'s argument.
pub fn how(how: c_int) -> Option<How> {
    match how {
        libc::SHUT_RD => Some(How::Reading),
        libc::SHUT_WR => Some(How::Writing),
        libc::SHUT_RDWR => Some(How::Both),
        _ => None,
    }
}

/// Flags of a call; `None`: urgent data, which there is not.
pub fn flags(flags: c_int) -> Option<Flags> {
    let is = |flag| flags & flag != 0;
    (!is(libc::MSG_OOB)).then(|| Flags {
        dont_wait: is(libc::MSG_DONTWAIT),
        peek: is(libc::MSG_PEEK),
        wait_all: is(libc::MSG_WAITALL),
    })
}

/// What a descriptor does, and with which memory. An error says what is wrong.
///
/// # Safety
/// As the C interface says.
pub unsafe fn descriptor(desc: &uwarp_desc) -> Result<(Op, Vec<Sge>), &'static str> {
    let (to, key) = (desc.remote_addr, desc.rkey);
    let op = match desc.op {
        op::RECV => Op::Receive,
        op::SEND => Op::Send,
        op::WRITE => Op::Write { to, key },
        op::READ => Op::Read { from: to, key },
        _ => return Err("op"),
    };
    let count = desc.num_sge as usize;
    if desc.flags != 0 {
        return Err("flags");
    }
    if count > MOST_PIECES {
        return Err("more pieces of memory than UWARP_SGE_MAX");
    }
    if count > 0 && desc.sg_list.is_null() {
        return Err("sg_list is NULL");
    }
    let from = desc.sg_list.cast::<Sge>();
    // SAFETY: the caller's promise, and the layouts are the same.
    Ok((op, (0..count).map(|i| unsafe { from.add(i).read_unaligned() }).collect()))
}

impl From<Completion> for uwarp_completion {
    fn from(done: Completion) -> Self {
        let (length, error) = match done.result {
            Ok(length) => (length, 0),
            Err(errno) => (0, errno.raw_os_error()),
        };
        let op = match done.kind {
            Kind::Receive => op::RECV,
            Kind::Send => op::SEND,
            Kind::Write => op::WRITE,
            Kind::Read => op::READ,
            Kind::WorkRequest => op::WORK_REQUEST,
        };
        Self { id: done.id, length, op, error }
    }
}

/// A system call, with what it returns.
///
/// # Safety
/// The arguments are those of the call.
pub unsafe fn system(number: c_long, arguments: [usize; 5]) -> Result<isize, Errno> {
    let [a, b, c, d, e] = arguments;
    // SAFETY: the caller's promise; a call ignores arguments that it does not have.
    let result = unsafe { libc::syscall(number, a, b, c, d, e) };
    match isize::try_from(result) {
        Ok(result @ 0..) => Ok(result),
        // SAFETY: the calling thread's own.
        _ => Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() })),
    }
}

/// A C int as an argument.
pub fn int(value: c_int) -> usize {
    value as usize
}

/// An address as an argument.
pub fn pointer<T>(to: *const T) -> usize {
    to.expose_provenance()
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
pub unsafe fn plain(number: c_long, [a, b, c, d, e, f]: [usize; 6]) -> c_long {
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(number, a, b, c, d, e, f) }
}

/// The same, and a cancellation point, for the calls that are one in libc.
///
/// # Safety
/// The arguments are those of the call. No frame above has anything to drop.
pub unsafe fn cancellable(number: c_long, arguments: [usize; 6]) -> c_long {
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
pub fn patience(fd: c_int, limit: c_int) -> impl Fn() -> Patience {
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

/// Gives bytes to the program: as many as fit, and how many that are.
///
/// # Safety
/// `to` has room for as many bytes as `len` says.
pub unsafe fn give(bytes: &[u8], to: *mut c_void, len: *mut socklen_t) -> Result<(), Errno> {
    if to.is_null() || len.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    unsafe {
        let fits = (*len as usize).min(bytes.len());
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast::<u8>(), fits);
        *len = fits as socklen_t;
    }
    Ok(())
}

/// The socket's `SO_LINGER`.
pub fn linger(fd: c_int) -> Option<Duration> {
    let value = option(fd, libc::SO_LINGER, libc::linger { l_onoff: 0, l_linger: 0 });
    (value.l_onoff != 0).then(|| Duration::from_secs(u64::try_from(value.l_linger).unwrap_or(0)))
}

/// What the kernel has to do before an end of the stream with this `SO_LINGER`.
pub fn prepare_close(fd: c_int, linger: Option<Duration>) {
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
pub fn disconnect_number(fd: c_int) {
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
