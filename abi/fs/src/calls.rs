//! Functions that go by a path and return a number or a file.
//!
//! `open` and its like are variadic in C. A function that always takes the mode can stand in their place: on
//! the processors that we know, arguments are passed in the same registers in both cases, and the mode is
//! not looked at unless the flags ask for it.

use std::ffi::{c_char, c_int, c_void};

use libc::{AT_FDCWD, FILE, mode_t};

use crate::route::{find, find_to_open};
use uwarp_preload::real;

type Path = *const c_char;

/// Functions whose first argument is a path, and those with a directory before it (`at`).
macro_rules! by_path {
    ($how:ident: $(fn $name:ident($path:ident: Path $(, $argument:ident: $type:ty)*) -> $result:ty;)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name($path: Path $(, $argument: $type)*) -> $result {
            // SAFETY: the caller passes what the function of libc takes.
            let found = unsafe { $how(AT_FDCWD, $path) };
            let $path = found.as_ref().map_or($path, |found| found.to.as_ptr());
            real!($name($path: Path $(, $argument: $type)*) -> $result)
        }
    )*};
    ($how:ident, at: $(
        fn $name:ident($at:ident: c_int, $path:ident: Path $(, $argument:ident: $type:ty)*) -> $result:ty;
    )*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name($at: c_int, $path: Path $(, $argument: $type)*) -> $result {
            // SAFETY: the caller passes what the function of libc takes.
            let found = unsafe { $how($at, $path) };
            // The path is absolute then, and the directory is not looked at.
            let $path = found.as_ref().map_or($path, |found| found.to.as_ptr());
            real!($name($at: c_int, $path: Path $(, $argument: $type)*) -> $result)
        }
    )*};
}

by_path! { find_to_open:
    fn open(path: Path, flags: c_int, mode: mode_t) -> c_int;
    fn open64(path: Path, flags: c_int, mode: mode_t) -> c_int;
    fn __open(path: Path, flags: c_int, mode: mode_t) -> c_int;
    fn __open64(path: Path, flags: c_int, mode: mode_t) -> c_int;
    fn __open_2(path: Path, flags: c_int) -> c_int;
    fn __open64_2(path: Path, flags: c_int) -> c_int;
    fn creat(path: Path, mode: mode_t) -> c_int;
    fn creat64(path: Path, mode: mode_t) -> c_int;
    fn fopen(path: Path, mode: Path) -> *mut FILE;
    fn fopen64(path: Path, mode: Path) -> *mut FILE;
    fn freopen(path: Path, mode: Path, stream: *mut FILE) -> *mut FILE;
    fn freopen64(path: Path, mode: Path, stream: *mut FILE) -> *mut FILE;
    fn chdir(path: Path) -> c_int;
}

by_path! { find_to_open, at:
    fn openat(at: c_int, path: Path, flags: c_int, mode: mode_t) -> c_int;
    fn openat64(at: c_int, path: Path, flags: c_int, mode: mode_t) -> c_int;
    fn __openat_2(at: c_int, path: Path, flags: c_int) -> c_int;
    fn __openat64_2(at: c_int, path: Path, flags: c_int) -> c_int;
}

by_path! { find:
    fn access(path: Path, mode: c_int) -> c_int;
    fn eaccess(path: Path, mode: c_int) -> c_int;
    fn euidaccess(path: Path, mode: c_int) -> c_int;
    fn statfs(path: Path, buffer: *mut c_void) -> c_int;
    fn statfs64(path: Path, buffer: *mut c_void) -> c_int;
    fn statvfs(path: Path, buffer: *mut c_void) -> c_int;
    fn statvfs64(path: Path, buffer: *mut c_void) -> c_int;
    fn getxattr(path: Path, name: Path, value: *mut c_void, size: usize) -> isize;
    fn lgetxattr(path: Path, name: Path, value: *mut c_void, size: usize) -> isize;
    fn listxattr(path: Path, list: *mut c_char, size: usize) -> isize;
    fn llistxattr(path: Path, list: *mut c_char, size: usize) -> isize;
}

by_path! { find, at:
    fn faccessat(at: c_int, path: Path, mode: c_int, flags: c_int) -> c_int;
}
