//! Listing directories: /sys/class and /dev show the places, and /dev/infiniband shows character devices.
//!
//! For such a directory, one of a few slots holds what is still to be shown. POSIX lets one thread at a time
//! use a directory stream, so a slot needs no lock. If no slot is free, only the real names are shown.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_char, c_int, c_long};
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use libc::{AT_FDCWD, DIR, dirent as Dirent};

use crate::place::{self, Listing};
use crate::route::{bytes, find_to_open, listing};
use uwarp_preload::{errno, real};

type Path = *const c_char;

const SLOTS: usize = 32;

struct Slot {
    stream: AtomicPtr<DIR>,
    state: UnsafeCell<State>,
}

struct State {
    listing: Option<Listing>,
    /// A bit for each name that has been there already or has been shown.
    shown: u32,
    entry: Dirent,
}

// SAFETY: the state is used only through the stream that owns the slot, by one thread at a time.
unsafe impl Sync for Slot {}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        stream: AtomicPtr::new(ptr::null_mut()),
        // SAFETY: all zero is a valid entry.
        state: UnsafeCell::new(State { listing: None, shown: 0, entry: unsafe { std::mem::zeroed() } }),
    }
}; SLOTS];
/// Slots in use: while there are none, reading a directory costs one look at this.
static USED: AtomicUsize = AtomicUsize::new(0);

/// The slot of a stream.
fn slot(stream: *mut DIR) -> Option<&'static Slot> {
    if USED.load(Ordering::Relaxed) == 0 || stream.is_null() {
        return None;
    }
    TABLE.iter().find(|slot| slot.stream.load(Ordering::Acquire) == stream)
}

/// Notes what this stream must show, if that is more than what is there.
fn note(stream: *mut DIR) {
    // SAFETY: an open stream.
    let Some(listing) = listing(unsafe { libc::dirfd(stream) }) else { return };
    let free = |slot: &&Slot| {
        let empty = ptr::null_mut();
        slot.stream.compare_exchange(empty, stream, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    if let Some(slot) = TABLE.iter().find(free) {
        // SAFETY: the slot is this stream's now, and nobody reads the stream yet.
        let state = unsafe { &mut *slot.state.get() };
        (state.listing, state.shown) = (Some(listing), 0);
        USED.fetch_add(1, Ordering::Release);
    }
}

impl State {
    /// An entry on its way to the program.
    ///
    /// # Safety
    /// `entry` is valid.
    unsafe fn pass(&mut self, entry: *mut Dirent) {
        // SAFETY: the caller's promise; the name ends with a zero.
        let (entry, name) = unsafe { (&mut *entry, CStr::from_ptr((&raw const (*entry).d_name).cast())) };
        match self.listing {
            Some(Listing::More(names)) => {
                for (bit, _) in (0..).zip(names).filter(|(_, more)| **more == name.to_bytes()) {
                    self.shown |= 1 << bit;
                }
            }
            Some(Listing::Devices) if entry.d_type == libc::DT_LNK => entry.d_type = libc::DT_CHR,
            _ => {}
        }
    }

    /// The next name that was not there.
    fn more(&mut self) -> Option<*mut Dirent> {
        let Some(Listing::More(names)) = self.listing else { return None };
        let (bit, name) = (0_u32..).zip(names).find(|(bit, _)| self.shown & 1 << bit == 0)?;
        self.shown |= 1 << bit;
        // Any number that is not 0, which some take for an empty entry.
        self.entry.d_ino = u64::from(bit) + 1;
        self.entry.d_type = libc::DT_DIR;
        self.entry.d_reclen = u16::try_from(size_of::<Dirent>()).unwrap_or(u16::MAX);
        self.entry.d_name.fill(0);
        for (to, from) in self.entry.d_name.iter_mut().zip(*name) {
            *to = from.cast_signed() as c_char;
        }
        Some(&raw mut self.entry)
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn opendir(path: Path) -> *mut DIR {
    // SAFETY: the caller passes what the function of libc takes.
    let (found, text) = unsafe { (find_to_open(AT_FDCWD, path), bytes(path)) };
    let shows_more = found.is_some() || text.is_some_and(place::may_list);
    let path = found.as_ref().map_or(path, |found| found.to.as_ptr());
    let stream = real!(opendir(path: Path) -> *mut DIR);
    if shows_more && !stream.is_null() {
        note(stream);
    }
    stream
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn fdopendir(fd: c_int) -> *mut DIR {
    let stream = real!(fdopendir(fd: c_int) -> *mut DIR);
    if !stream.is_null() {
        note(stream);
    }
    stream
}

macro_rules! reads {
    ($($name:ident)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C-unwind" fn $name(stream: *mut DIR) -> *mut Dirent {
            let before = errno();
            let entry = real!($name(stream: *mut DIR) -> *mut Dirent);
            let Some(slot) = slot(stream) else { return entry };
            // SAFETY: one thread at a time uses a stream, and thus its slot.
            let state = unsafe { &mut *slot.state.get() };
            if !entry.is_null() {
                // SAFETY: of libc.
                unsafe { state.pass(entry) };
                return entry;
            }
            // At the end it is as it was; else there is an error.
            if errno() != before {
                return entry;
            }
            state.more().unwrap_or(entry)
        }
    )*};
}

// Entries have one structure on the processors that we know.
reads! { readdir readdir64 }

macro_rules! reads_into {
    ($($name:ident by $plain:ident;)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name(
            stream: *mut DIR,
            to: *mut Dirent,
            result: *mut *mut Dirent,
        ) -> c_int {
            if slot(stream).is_none() {
                return real!($name(stream: *mut DIR, to: *mut Dirent, result: *mut *mut Dirent) -> c_int);
            }
            uwarp_preload::set_errno(0);
            // SAFETY: the caller passes what the function of libc takes: room for one entry.
            unsafe {
                let entry = $plain(stream);
                if entry.is_null() {
                    *result = entry;
                    return errno();
                }
                let length = usize::from((*entry).d_reclen).min(size_of::<Dirent>());
                ptr::copy_nonoverlapping(entry.cast::<u8>(), to.cast::<u8>(), length);
                *result = to;
            }
            0
        }
    )*};
}

reads_into! {
    readdir_r by readdir;
    readdir64_r by readdir64;
}

/// From a certain place on, only the real names are shown: there is no place behind them to return to.
fn from_the_start(stream: *mut DIR, start: bool) {
    if let Some(slot) = slot(stream) {
        // SAFETY: one thread at a time uses a stream, and thus its slot.
        unsafe { (*slot.state.get()).shown = if start { 0 } else { u32::MAX } };
    }
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn rewinddir(stream: *mut DIR) {
    from_the_start(stream, true);
    real!(rewinddir(stream: *mut DIR) -> ());
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn seekdir(stream: *mut DIR, place: c_long) {
    from_the_start(stream, false);
    real!(seekdir(stream: *mut DIR, place: c_long) -> ());
}

#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C-unwind" fn closedir(stream: *mut DIR) -> c_int {
    if let Some(slot) = slot(stream) {
        // Before the stream's memory can become another one's.
        slot.stream.store(ptr::null_mut(), Ordering::Release);
        USED.fetch_sub(1, Ordering::Release);
    }
    real!(closedir(stream: *mut DIR) -> c_int)
}
