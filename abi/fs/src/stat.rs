//! What a file is: `stat` and its like, under today's names and those from before glibc 2.33.
//!
//! A character device is a symbolic link to /dev/null in the tree. It is followed even by calls that follow
//! none, and shown with the numbers that Linux gives such a device.

use std::ffi::{c_char, c_int, c_uint};

use libc::{AT_FDCWD, AT_SYMLINK_NOFOLLOW, stat as Stat, statx as Statx};

use crate::place::Found;
use crate::route::find;
use uwarp_preload::real;

type Path = *const c_char;

/// Puts the numbers of the device into what the system wrote.
///
/// # Safety
/// If `result` is 0, `to` has been written.
unsafe fn finish(result: c_int, found: Option<&Found>, to: *mut Stat) -> c_int {
    if let (0, Some((major, minor))) = (result, found.and_then(Found::device)) {
        // SAFETY: the caller's promise.
        unsafe { (*to).st_rdev = libc::makedev(major, minor) };
    }
    result
}

/// `$follow` is the function that follows symbolic links, for calls that do not. 64-bit and other names have
/// one structure on the processors that we know.
macro_rules! stats {
    ($(fn $name:ident[$($version:ident)?](path, to) by $follow:ident;)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name($($version: c_int,)? path: Path, to: *mut Stat) -> c_int {
            // SAFETY: the caller passes what the function of libc takes.
            let found = unsafe { find(AT_FDCWD, path) };
            let path = found.as_ref().map_or(path, |found| found.to.as_ptr());
            let result = if found.as_ref().is_some_and(|found| found.device().is_some()) {
                real!($follow($($version: c_int,)? path: Path, to: *mut Stat) -> c_int)
            } else {
                real!($name($($version: c_int,)? path: Path, to: *mut Stat) -> c_int)
            };
            // SAFETY: written if the result is 0.
            unsafe { finish(result, found.as_ref(), to) }
        }
    )*};
}

stats! {
    fn stat[](path, to) by stat;
    fn stat64[](path, to) by stat64;
    fn lstat[](path, to) by stat;
    fn lstat64[](path, to) by stat64;
    fn __xstat[version](path, to) by __xstat;
    fn __xstat64[version](path, to) by __xstat64;
    fn __lxstat[version](path, to) by __xstat;
    fn __lxstat64[version](path, to) by __xstat64;
}

macro_rules! stats_at {
    ($(fn $name:ident[$($version:ident)?](at, path, to, flags);)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(
            $($version: c_int,)?
            at: c_int,
            path: Path,
            to: *mut Stat,
            flags: c_int,
        ) -> c_int {
            // SAFETY: the caller passes what the function of libc takes.
            let found = unsafe { find(at, path) };
            let path = found.as_ref().map_or(path, |found| found.to.as_ptr());
            let flags = followed(found.as_ref(), flags);
            let result =
                real!($name($($version: c_int,)? at: c_int, path: Path, to: *mut Stat, flags: c_int)
                    -> c_int);
            // SAFETY: written if the result is 0.
            unsafe { finish(result, found.as_ref(), to) }
        }
    )*};
}

fn followed(found: Option<&Found>, flags: c_int) -> c_int {
    match found.and_then(Found::device) {
        Some(_) => flags & !AT_SYMLINK_NOFOLLOW,
        None => flags,
    }
}

stats_at! {
    fn fstatat[](at, path, to, flags);
    fn fstatat64[](at, path, to, flags);
    fn __fxstatat[version](at, path, to, flags);
    fn __fxstatat64[version](at, path, to, flags);
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn statx(
    at: c_int,
    path: Path,
    flags: c_int,
    mask: c_uint,
    to: *mut Statx,
) -> c_int {
    // SAFETY: the caller passes what the function of libc takes.
    let found = unsafe { find(at, path) };
    let path = found.as_ref().map_or(path, |found| found.to.as_ptr());
    let flags = followed(found.as_ref(), flags);
    let result = real!(statx(at: c_int, path: Path, flags: c_int, mask: c_uint, to: *mut Statx) -> c_int);
    if let (0, Some((major, minor))) = (result, found.as_ref().and_then(Found::device)) {
        // SAFETY: written, as the result is 0.
        unsafe { ((*to).stx_rdev_major, (*to).stx_rdev_minor) = (major, minor) };
    }
    result
}
