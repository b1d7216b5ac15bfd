//! Functions that copy between a socket and a file or pipe, and streams of stdio.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::FILE;
use uwarp_preload::{real, set_errno};

use crate::agree::table;
use crate::data::{receive_block, send_block, send_whole};
use crate::ending::Pass;
use crate::fds;
use crate::sock::{self, Block};

fn read_at(fd: c_int, block: &mut Block, len: usize, position: i64) -> isize {
    let (to, len) = sock::at(block, len);
    real!(pread64(fd: c_int, to: *mut c_void, len: usize, position: i64) -> isize)
}

fn seek(fd: c_int, position: i64, from: c_int) -> i64 {
    // SAFETY: no pointer.
    unsafe { libc::lseek64(fd, position, from) }
}

/// # Safety
/// As sendfile(2).
unsafe fn send_file(to: c_int, from: c_int, position: *mut i64, count: usize) -> isize {
    let at = match position.is_null() {
        true => seek(from, 0, libc::SEEK_CUR),
        // SAFETY: the caller's promise.
        false => unsafe { position.read_unaligned() },
    };
    if at < 0 {
        // Not a file.
        set_errno(libc::EINVAL);
        return -1;
    }
    let mut block = sock::block();
    let mut sent = 0;
    while sent < count {
        let here = at.saturating_add_unsigned(sent as u64);
        let read = read_at(from, &mut block, count - sent, here);
        let Some(bytes) = usize::try_from(read).ok().and_then(|read| block.get(..read)) else {
            if sent == 0 {
                return -1;
            }
            break;
        };
        if bytes.is_empty() {
            break;
        }
        match usize::try_from(send_block(to, bytes, 0)) {
            Ok(taken) => {
                sent += taken;
                if taken < bytes.len() {
                    break;
                }
            }
            Err(_) if sent == 0 => return -1,
            Err(_) => break,
        }
    }
    let end = at.saturating_add_unsigned(sent as u64);
    match position.is_null() {
        true => {
            seek(from, end, libc::SEEK_SET);
        }
        // SAFETY: the caller's promise.
        false => unsafe { position.write_unaligned(end) },
    }
    isize::try_from(sent).unwrap_or(isize::MAX)
}

macro_rules! sendfiles {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(to: c_int, from: c_int, position: *mut i64, count: usize) -> isize {
            if fds::is_mediated(to) {
                let _pass = Pass::begin();
                // SAFETY: the caller passes what the function of libc takes.
                return unsafe { send_file(to, from, position, count) };
            }
            real!($name(to: c_int, from: c_int, position: *mut i64, count: usize) -> isize)
        }
    )*};
}

sendfiles! { sendfile sendfile64 }

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn splice(
    from: c_int,
    from_at: *mut i64,
    to: c_int,
    to_at: *mut i64,
    len: usize,
    flags: c_uint,
) -> isize {
    // Looked at once: another thread may make a connection TCP's for good, which the functions below do not
    // mind.
    let (receives, sends) = (fds::is_mediated(from), fds::is_mediated(to));
    if receives || sends {
        let _pass = Pass::begin();
        let positioned = (receives && !from_at.is_null()) || (sends && !to_at.is_null());
        if positioned {
            set_errno(libc::ESPIPE);
            return -1;
        }
        if receives && sends {
            // One of them must be a pipe.
            set_errno(libc::EINVAL);
            return -1;
        }
        let wait = flags & libc::SPLICE_F_NONBLOCK == 0;
        return if receives { to_pipe(from, to, len, wait) } else { from_pipe(from, to, len) };
    }
    real!(splice(
        from: c_int, from_at: *mut i64, to: c_int, to_at: *mut i64, len: usize, flags: c_uint
    ) -> isize)
}

fn to_pipe(from: c_int, to: c_int, len: usize, wait: bool) -> isize {
    let mut block = sock::block();
    let flags = if wait { 0 } else { libc::MSG_DONTWAIT };
    let seen = receive_block(from, &mut block, len, flags | libc::MSG_PEEK);
    let Some(bytes) = usize::try_from(seen).ok().and_then(|seen| block.get(..seen)) else { return -1 };
    if bytes.is_empty() {
        return 0;
    }
    let (bytes, len) = (bytes.as_ptr().cast::<c_void>(), bytes.len());
    let written = real!(write(to: c_int, bytes: *const c_void, len: usize) -> isize);
    if let Ok(written) = usize::try_from(written) {
        // What the pipe has taken is there: nobody else receives, or the program has a race of its own.
        receive_block(from, &mut block, written, 0);
    }
    written
}

fn from_pipe(from: c_int, to: c_int, len: usize) -> isize {
    let mut block = sock::block();
    let (at, len) = sock::at(&mut block, len);
    let read = real!(read(from: c_int, at: *mut c_void, len: usize) -> isize);
    match usize::try_from(read).ok().and_then(|read| block.get(..read)) {
        // It cannot go back into the pipe, so all of it goes out.
        Some(bytes) if send_whole(to, bytes) => read,
        Some(_) => -1,
        None => -1,
    }
}

/// `cookie_io_functions_t` of fopencookie(3).
#[repr(C)]
struct CookieFunctions {
    read: extern "C" fn(*mut c_void, *mut c_char, usize) -> isize,
    write: extern "C" fn(*mut c_void, *const c_char, usize) -> isize,
    seek: Option<extern "C" fn(*mut c_void, *mut i64, c_int) -> c_int>,
    close: extern "C" fn(*mut c_void) -> c_int,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: CookieFunctions) -> *mut FILE;
}

fn descriptor(cookie: *mut c_void) -> c_int {
    cookie.addr() as c_int
}

extern "C" fn cookie_read(cookie: *mut c_void, to: *mut c_char, len: usize) -> isize {
    // SAFETY: a buffer and its length; the function of this library.
    unsafe { libc::read(descriptor(cookie), to.cast(), len) }
}

extern "C" fn cookie_write(cookie: *mut c_void, from: *const c_char, len: usize) -> isize {
    // SAFETY: as above. fopencookie(3): 0 is an error.
    unsafe { libc::write(descriptor(cookie), from.cast(), len) }.max(0)
}

extern "C" fn cookie_close(cookie: *mut c_void) -> c_int {
    // SAFETY: no pointer; the function of this library.
    unsafe { libc::close(descriptor(cookie)) }
}

/// Streams of stdio call the kernel without libc's names, so one of a socket gets functions of ours.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if fds::is_asking(fd) {
        // What stdio does then is not seen.
        table::veto(fd);
    }
    if fds::is_candidate(fd) {
        fds::enter_copied(fd, fd);
    }
    if fds::is_ruled(fd) {
        let functions =
            CookieFunctions { read: cookie_read, write: cookie_write, seek: None, close: cookie_close };
        let cookie = std::ptr::without_provenance_mut(fd as usize);
        // SAFETY: the caller's mode; functions for this cookie.
        return unsafe { fopencookie(cookie, mode, functions) };
    }
    real!(fdopen(fd: c_int, mode: *const c_char) -> *mut FILE)
}
