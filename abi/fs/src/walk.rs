//! Functions that list directories or walk over them inside of libc, where ours are not called.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use libc::{AT_FDCWD, dirent as Dirent, stat as Stat};

use crate::dir::{closedir, opendir, readdir};
use crate::place::may_list;
use crate::route::{bytes, find, root};
use crate::stat::{lstat, stat};
use uwarp_preload::{errno, real, set_errno};

type Path = *const c_char;
type Filter = Option<unsafe extern "C-unwind" fn(*const Dirent) -> c_int>;
type Order = Option<unsafe extern "C-unwind" fn(*mut *const Dirent, *mut *const Dirent) -> c_int>;
type List = *mut *mut *mut Dirent;

// A program's function that is called from here may throw an exception of C++.
unsafe extern "C-unwind" {
    fn qsort(
        base: *mut c_void,
        count: usize,
        size: usize,
        order: unsafe extern "C-unwind" fn(*const c_void, *const c_void) -> c_int,
    );
}

macro_rules! scans {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(path: Path, list: List, filter: Filter, order: Order) -> c_int {
            // SAFETY: the caller passes what the function of libc takes.
            unsafe {
                if find(AT_FDCWD, path).is_some() || bytes(path).is_some_and(may_list) {
                    return scan(path, list, filter, order);
                }
            }
            real!($name(path: Path, list: List, filter: Filter, order: Order) -> c_int)
        }
    )*};
}

scans! { scandir scandir64 }

macro_rules! scans_at {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(
            at: c_int,
            path: Path,
            list: List,
            filter: Filter,
            order: Order,
        ) -> c_int {
            // SAFETY: the caller passes what the function of libc takes.
            let found = unsafe { find(at, path) };
            let path = found.as_ref().map_or(path, |found| found.to.as_ptr());
            real!($name(at: c_int, path: Path, list: List, filter: Filter, order: Order) -> c_int)
        }
    )*};
}

scans_at! { scandirat scandirat64 }

/// scandir(3), by our own functions.
///
/// # Safety
/// As there.
unsafe fn scan(path: Path, list: List, filter: Filter, order: Order) -> c_int {
    // SAFETY: the caller's promise.
    let stream = unsafe { opendir(path) };
    if stream.is_null() {
        return -1;
    }
    let before = errno();
    let mut found: Vec<*mut Dirent> = Vec::new();
    set_errno(0);
    let failed = loop {
        // SAFETY: an open stream; entries are valid until the next is read, and copied before.
        unsafe {
            let entry = readdir(stream);
            if entry.is_null() {
                break errno() != 0;
            }
            if filter.is_none_or(|filter| filter(entry) != 0) {
                let length = usize::from((*entry).d_reclen);
                let copy = libc::malloc(length).cast::<Dirent>();
                if copy.is_null() {
                    break true;
                }
                ptr::copy_nonoverlapping(entry.cast::<u8>(), copy.cast::<u8>(), length);
                found.push(copy);
            }
            set_errno(0);
        }
    };
    // SAFETY: the stream and the entries are ours; the list becomes the caller's, by malloc.
    unsafe {
        let error = errno();
        closedir(stream);
        let memory = libc::malloc(found.len().max(1) * size_of::<*mut Dirent>()).cast::<*mut Dirent>();
        if failed || memory.is_null() {
            found.iter().for_each(|entry| libc::free(entry.cast()));
            libc::free(memory.cast());
            set_errno(if error == 0 { libc::ENOMEM } else { error });
            return -1;
        }
        ptr::copy_nonoverlapping(found.as_ptr(), memory, found.len());
        if let Some(order) = order {
            let order = std::mem::transmute::<
                unsafe extern "C-unwind" fn(*mut *const Dirent, *mut *const Dirent) -> c_int,
                unsafe extern "C-unwind" fn(*const c_void, *const c_void) -> c_int,
            >(order);
            qsort(memory.cast(), found.len(), size_of::<*mut Dirent>(), order);
        }
        *list = memory;
    }
    set_errno(before);
    c_int::try_from(found.len()).unwrap_or(c_int::MAX)
}

/// `glob_t` with the members that glibc adds to POSIX's.
#[repr(C)]
struct Glob {
    pathc: usize,
    pathv: *mut *mut c_char,
    offs: usize,
    flags: c_int,
    closedir: *mut c_void,
    readdir: *mut c_void,
    opendir: *mut c_void,
    lstat: *mut c_void,
    stat: *mut c_void,
}

const GLOB_ALTDIRFUNC: c_int = 1 << 9;

macro_rules! globs {
    ($($name:ident)*) => {$(
        /// With our functions for libc's, unless the program brings its own.
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(
            pattern: Path,
            flags: c_int,
            on_error: *mut c_void,
            to: *mut Glob,
        ) -> c_int {
            let ours = root().is_some() && !to.is_null() && flags & GLOB_ALTDIRFUNC == 0;
            if ours {
                // SAFETY: the caller passes what the function of libc takes.
                let to = unsafe { &mut *to };
                to.closedir = closedir as *mut c_void;
                to.readdir = readdir as *mut c_void;
                to.opendir = opendir as *mut c_void;
                to.lstat = lstat as *mut c_void;
                to.stat = stat as *mut c_void;
            }
            let flags = if ours { flags | GLOB_ALTDIRFUNC } else { flags };
            let result =
                real!($name(pattern: Path, flags: c_int, on_error: *mut c_void, to: *mut Glob) -> c_int);
            if ours {
                // SAFETY: as above.
                unsafe { (*to).flags &= !GLOB_ALTDIRFUNC };
            }
            result
        }
    )*};
}

globs! { glob glob64 }

/// `struct FTW`: where in the path the name begins, and how deep it is.
#[repr(C)]
#[derive(Clone, Copy)]
struct Depth {
    base: c_int,
    level: c_int,
}

type Visit = unsafe extern "C-unwind" fn(Path, *const Stat, c_int) -> c_int;
type VisitDeep = unsafe extern "C-unwind" fn(Path, *const Stat, c_int, *mut Depth) -> c_int;

const FTW_F: c_int = 0;
const FTW_SL: c_int = 4;

thread_local! {
    /// What the program wants called, while this thread walks over the tree.
    static VISIT: Cell<Option<Visit>> = const { Cell::new(None) };
    static VISIT_DEEP: Cell<Option<VisitDeep>> = const { Cell::new(None) };
}

/// The path as the program means it: the end of the one that libc made.
///
/// # Safety
/// A C string.
unsafe fn meant(path: Path) -> (Path, usize) {
    // SAFETY: the caller's promise.
    let whole = unsafe { CStr::from_ptr(path) }.to_bytes();
    let cut = root().map_or(0, |root| whole.len() - crate::place::without_root(root, whole).len());
    // SAFETY: within the string.
    (unsafe { path.add(cut) }, cut)
}

unsafe extern "C-unwind" fn visit(path: Path, what: *const Stat, kind: c_int) -> c_int {
    // SAFETY: as libc calls it.
    unsafe {
        let (path, _) = meant(path);
        VISIT.get().map_or(0, |visit| visit(path, what, kind))
    }
}

unsafe extern "C-unwind" fn visit_deep(
    path: Path,
    what: *const Stat,
    kind: c_int,
    depth: *mut Depth,
) -> c_int {
    // SAFETY: as libc calls it.
    unsafe {
        let (path, cut) = meant(path);
        let mut shown = *depth;
        shown.base -= c_int::try_from(cut).unwrap_or(0);
        let Some(visit) = VISIT_DEEP.get() else { return 0 };
        // A device, which is a link in the tree.
        let mut device: Stat = std::mem::zeroed();
        let is_device = kind == FTW_SL && find(AT_FDCWD, path).is_some_and(|found| found.device().is_some());
        if is_device && stat(path, &raw mut device) == 0 {
            return visit(path, &raw const device, FTW_F, &raw mut shown);
        }
        visit(path, what, kind, &raw mut shown)
    }
}

macro_rules! walks {
    ($($name:ident, $deep:ident;)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(path: Path, each: Option<Visit>, depth: c_int) -> c_int {
            // SAFETY: the caller passes what the function of libc takes.
            let Some(found) = (unsafe { find(AT_FDCWD, path) }) else {
                return real!($name(path: Path, each: Option<Visit>, depth: c_int) -> c_int);
            };
            let (path, outer, each) = (found.to.as_ptr(), VISIT.replace(each), Some(visit as Visit));
            let result = real!($name(path: Path, each: Option<Visit>, depth: c_int) -> c_int);
            VISIT.set(outer);
            result
        }

        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $deep(
            path: Path,
            each: Option<VisitDeep>,
            depth: c_int,
            flags: c_int,
        ) -> c_int {
            // SAFETY: the caller passes what the function of libc takes.
            let Some(found) = (unsafe { find(AT_FDCWD, path) }) else {
                return real!($deep(path: Path, each: Option<VisitDeep>, depth: c_int, flags: c_int) -> c_int);
            };
            let (path, outer) = (found.to.as_ptr(), VISIT_DEEP.replace(each));
            let each = Some(visit_deep as VisitDeep);
            let result =
                real!($deep(path: Path, each: Option<VisitDeep>, depth: c_int, flags: c_int) -> c_int);
            VISIT_DEEP.set(outer);
            result
        }
    )*};
}

walks! {
    ftw, nftw;
    ftw64, nftw64;
}
