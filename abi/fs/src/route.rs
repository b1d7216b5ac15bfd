//! The tree of this process, and the path that a call is to use.

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use crate::counters;
use crate::place::{self, Found, Listing};
use uwarp_preload::{errno, set_errno};

/// Names the tree; `uwarp run` sets it.
const VARIABLE: &CStr = c"UWARP_FILES_AT";
/// Longest name of a tree.
const LONGEST_ROOT: usize = 256;

struct Root {
    bytes: [u8; LONGEST_ROOT],
    length: usize,
}

/// Before there are threads: a child that was forked while one of them read it would wait for ever.
#[cfg_attr(not(test), used)]
#[cfg_attr(not(test), unsafe(link_section = ".init_array"))]
static BEGIN: extern "C" fn() = begin;

extern "C" fn begin() {
    root();
}

/// The tree's root, without a slash at its end; `None` if this process has no tree. Read once: programs clear
/// their environment.
pub fn root() -> Option<&'static [u8]> {
    static ROOT: OnceLock<Option<Root>> = OnceLock::new();
    ROOT.get_or_init(read_root).as_ref()?.bytes.get(..ROOT.get()?.as_ref()?.length)
}

/// Without an allocation.
fn read_root() -> Option<Root> {
    // SAFETY: a C string; nobody changes the environment while the first path is looked at, or the program
    // has a race of its own.
    let value = unsafe { libc::getenv(VARIABLE.as_ptr()) };
    // SAFETY: NULL or a C string.
    let value = unsafe { bytes(value) }?;
    let mut root = Root { bytes: [0; LONGEST_ROOT], length: value.len() };
    root.bytes.get_mut(..value.len())?.copy_from_slice(value);
    (value.starts_with(b"/") && !value.ends_with(b"/")).then_some(root)
}

/// # Safety
/// `text` is NULL or a C string that lives as long as the result is used.
pub unsafe fn bytes<'a>(text: *const c_char) -> Option<&'a [u8]> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_bytes())
}

/// Where `path` leads from the directory `at`, if that is in the tree. Leaves errno as it is.
///
/// # Safety
/// `path` is NULL or a C string.
pub unsafe fn find(at: c_int, path: *const c_char) -> Option<Found> {
    // SAFETY: the caller's promise.
    let path = unsafe { bytes(path) }?;
    if place::may_enter(path) { find_slowly(at, path) } else { None }
}

#[cold]
fn find_slowly(at: c_int, path: &[u8]) -> Option<Found> {
    let root = root()?;
    if path.starts_with(b"/") {
        return place::find(root, b"/", path);
    }
    let before = errno();
    let mut base = [0; libc::PATH_MAX as usize];
    let found = directory(at, &mut base).and_then(|base| place::find(root, base, path));
    set_errno(before);
    found
}

/// As [`find`], for a program that opens it: counters are written anew.
///
/// # Safety
/// As [`find`].
pub unsafe fn find_to_open(at: c_int, path: *const c_char) -> Option<Found> {
    // SAFETY: the caller's promise.
    let found = unsafe { find(at, path) }?;
    if let (true, Some(root)) = (found.is_counter(), root()) {
        let before = errno();
        // Rust's functions that are called there must not be unwound by glibc.
        without_cancellation(|| counters::write(root, found.meant()));
        set_errno(before);
    }
    Some(found)
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}
const PTHREAD_CANCEL_DISABLE: c_int = 1;

/// Calls `what`; a cancellation of this thread waits until it has returned.
fn without_cancellation(what: impl FnOnce()) {
    let mut before = 0;
    // SAFETY: the thread's own state, put back below.
    unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut before) };
    what();
    // SAFETY: as it was.
    unsafe { pthread_setcancelstate(before, &raw mut before) };
}

/// The name of an open directory, or of the current one.
fn directory(at: c_int, buffer: &mut [u8]) -> Option<&[u8]> {
    let length = if at == libc::AT_FDCWD {
        // The system call, not libc's function: that is one of ours. It counts the zero at the end.
        // SAFETY: a buffer and its length.
        unsafe { libc::syscall(libc::SYS_getcwd, buffer.as_mut_ptr(), buffer.len()) - 1 }
    } else {
        let mut name = *b"/proc/self/fd/\0\0\0\0\0\0\0\0\0\0\0";
        let mut rest = u32::try_from(at).ok()?;
        let digits = rest.checked_ilog10().unwrap_or(0) as usize + 1;
        for place in name.get_mut(14..14 + digits)?.iter_mut().rev() {
            // Below ten.
            *place = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        let (name, at) = (name.as_ptr(), libc::AT_FDCWD);
        // SAFETY: a C string, a buffer and its length.
        unsafe { libc::syscall(libc::SYS_readlinkat, at, name, buffer.as_mut_ptr(), buffer.len()) }
    };
    let name = buffer.get(..usize::try_from(length).ok()?)?;
    name.starts_with(b"/").then_some(name)
}

/// What listing an open directory must show beside what is there. Leaves errno as it is.
pub fn listing(fd: c_int) -> Option<Listing> {
    let root = root()?;
    let before = errno();
    let mut buffer = [0; libc::PATH_MAX as usize];
    let listing = directory(fd, &mut buffer).and_then(|directory| place::listing(root, directory));
    set_errno(before);
    listing
}

/// Takes the tree's root off a path that a function of libc has written.
///
/// # Safety
/// `path` is NULL or a C string that may be written.
pub unsafe fn take_root_off(path: *mut c_char) {
    let Some(root) = root() else { return };
    // SAFETY: the caller's promise.
    let Some(name) = (unsafe { bytes(path) }) else { return };
    let (whole, meant) = (name.len(), place::without_root(root, name).len());
    if meant != whole {
        // SAFETY: within the string, its zero included; the slice above is not used any more.
        unsafe { std::ptr::copy(path.add(whole - meant), path, meant + 1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd as _;

    #[test]
    fn directories_are_named_by_their_descriptors() {
        let mut buffer = [0; 4096];
        let here = std::env::current_dir().unwrap();
        assert_eq!(directory(libc::AT_FDCWD, &mut buffer), Some(here.as_os_str().as_encoded_bytes()));
        let dev = std::fs::File::open("/dev").unwrap();
        assert_eq!(directory(dev.as_raw_fd(), &mut buffer), Some(b"/dev".as_slice()));
        assert_eq!(directory(-1, &mut buffer), None);
        assert_eq!(directory(i32::MAX, &mut buffer), None);
    }
}
