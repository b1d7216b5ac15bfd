//! Functions that return paths: as the program means them, without the tree's root.

use std::ffi::{c_char, c_int};

use libc::AT_FDCWD;

use crate::place::Found;
use crate::route::{find, take_root_off};
use uwarp_preload::{real, set_errno};

type Path = *const c_char;

/// Takes the root off a link's target of `length` bytes, which has no zero at its end.
///
/// # Safety
/// `length` bytes at `buffer` have been written, unless it is negative.
unsafe fn target(buffer: *mut c_char, length: isize) -> isize {
    let (Some(root), Ok(whole)) = (crate::route::root(), usize::try_from(length)) else { return length };
    // SAFETY: the caller's promise.
    let name = unsafe { std::slice::from_raw_parts(buffer.cast_const().cast::<u8>(), whole) };
    let meant = crate::place::without_root(root, name).len();
    if meant != whole {
        // SAFETY: within these bytes; the slice is not used any more.
        unsafe { std::ptr::copy(buffer.add(whole - meant), buffer, meant) };
    }
    isize::try_from(meant).unwrap_or(length)
}

macro_rules! links {
    ($(fn $name:ident[$($at:ident)?](path, buffer, size $(, $room:ident: usize)?);)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(
            $($at: c_int,)?
            path: Path,
            buffer: *mut c_char,
            size: usize
            $(, $room: usize)?
        ) -> isize {
            #[allow(unused_mut, unused_assignments)]
            let mut from = AT_FDCWD;
            $(from = $at;)?
            // SAFETY: the caller passes what the function of libc takes.
            let found = unsafe { find(from, path) };
            // A device has no target, although the tree has a link there.
            if let Some(device) = found.as_ref().filter(|found| found.device().is_some()) {
                // SAFETY: a C string. If there is none of this number, errno says so.
                if unsafe { libc::access(device.to.as_ptr(), libc::F_OK) } == 0 {
                    set_errno(libc::EINVAL);
                }
                return -1;
            }
            let path = found.as_ref().map_or(path, |found| found.to.as_ptr());
            let length = real!($name(
                $($at: c_int,)? path: Path, buffer: *mut c_char, size: usize $(, $room: usize)?
            ) -> isize);
            // SAFETY: as long as the system says.
            unsafe { target(buffer, length) }
        }
    )*};
}

links! {
    fn readlink[](path, buffer, size);
    fn readlinkat[at](path, buffer, size);
    fn __readlink_chk[](path, buffer, size, room: usize);
    fn __readlinkat_chk[at](path, buffer, size, room: usize);
}

/// The whole name of `path`, into `buffer` or, if that is NULL, into memory of malloc; `by` is a function of
/// libc that resolves symbolic links.
///
/// # Safety
/// As that function; `buffer` is NULL or has room for `PATH_MAX` bytes.
unsafe fn resolved(path: Path, buffer: *mut c_char, by: impl FnOnce(Path) -> *mut c_char) -> *mut c_char {
    // SAFETY: the caller's promise.
    let found = unsafe { find(AT_FDCWD, path) };
    // A device's link leads out of the tree, so its name is all there is to say of it.
    if let Some(device) = found.as_ref().filter(|found| found.device().is_some()) {
        // SAFETY: the caller's promise.
        return unsafe { name_of(device, buffer) };
    }
    let name = by(found.as_ref().map_or(path, |found| found.to.as_ptr()));
    // SAFETY: NULL or a C string that libc wrote.
    unsafe { take_root_off(name) };
    name
}

/// # Safety
/// As [`resolved`].
unsafe fn name_of(device: &Found, mut buffer: *mut c_char) -> *mut c_char {
    let meant = device.meant();
    // SAFETY: a C string; room for the name and its zero, which a path in a buffer of ours has.
    unsafe {
        if libc::access(device.to.as_ptr(), libc::F_OK) != 0 {
            return std::ptr::null_mut();
        }
        if buffer.is_null() {
            buffer = libc::malloc(meant.len() + 1).cast();
        }
        if !buffer.is_null() {
            std::ptr::copy_nonoverlapping(meant.as_ptr(), buffer.cast(), meant.len());
            *buffer.add(meant.len()) = 0;
        }
    }
    buffer
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn realpath(path: Path, buffer: *mut c_char) -> *mut c_char {
    let by = |path: Path| real!(realpath(path: Path, buffer: *mut c_char) -> *mut c_char);
    // SAFETY: the caller passes what the function of libc takes.
    unsafe { resolved(path, buffer, by) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn __realpath_chk(path: Path, buffer: *mut c_char, room: usize) -> *mut c_char {
    let by = |path: Path| real!(__realpath_chk(path: Path, buffer: *mut c_char, room: usize) -> *mut c_char);
    // SAFETY: the caller passes what the function of libc takes.
    unsafe { resolved(path, buffer, by) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn canonicalize_file_name(path: Path) -> *mut c_char {
    let by = |path: Path| real!(canonicalize_file_name(path: Path) -> *mut c_char);
    // SAFETY: the caller passes what the function of libc takes.
    unsafe { resolved(path, std::ptr::null_mut(), by) }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn getcwd(buffer: *mut c_char, size: usize) -> *mut c_char {
    let name = real!(getcwd(buffer: *mut c_char, size: usize) -> *mut c_char);
    // SAFETY: NULL or a C string that libc wrote.
    unsafe { take_root_off(name) };
    name
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn __getcwd_chk(buffer: *mut c_char, size: usize, room: usize) -> *mut c_char {
    let name = real!(__getcwd_chk(buffer: *mut c_char, size: usize, room: usize) -> *mut c_char);
    // SAFETY: NULL or a C string that libc wrote.
    unsafe { take_root_off(name) };
    name
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn get_current_dir_name() -> *mut c_char {
    let name = real!(get_current_dir_name() -> *mut c_char);
    // SAFETY: NULL or a C string that libc wrote.
    unsafe { take_root_off(name) };
    name
}
