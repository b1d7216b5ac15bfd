//! Memory that two processes share.
//!
//! The peer may write it at any time, and is not trusted: words are read and written atomically, bytes are
//! copied by address ([`crate::MemSeg`]), and no other reference to it exists. Its size is sealed, so the
//! peer cannot take pages away from under a copy; it can only have them zero again.

#![allow(unsafe_code)]

use std::ffi::CStr;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::atomic::AtomicU64;

use uwarp_process::Birth;

use super::MemSeg;

/// A line of a processor's cache, as words: what one end writes.
pub type Line = [AtomicU64; 8];

/// Bytes of a [`Line`].
pub const LINE: usize = size_of::<Line>();

/// Why memory cannot be shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The system refuses, with this error.
    System(i32),
    /// What the peer has passed has another size.
    Size,
    /// It is not sealed, so it could change its size.
    NotSealed,
}

/// Who may write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writers {
    /// Everyone who gets the descriptor.
    All,
    /// Only the process that has made it.
    Maker,
}

/// A mapping of such memory. A forked child does not have it.
#[derive(Debug)]
pub struct Shared {
    start: *mut u8,
    len: usize,
    writable: bool,
    birth: Birth,
}

// SAFETY: a mapping without an owner among the threads; only atomic operations and copies touch it.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
/// <linux/memfd.h>, from Linux 6.3 on. Older systems refuse it.
const MFD_NOEXEC_SEAL: u32 = 8;

impl Shared {
    /// Makes `len` bytes, all zero, and the descriptor to pass. No name of it exists anywhere.
    pub fn create(name: &CStr, len: usize, writers: Writers) -> Result<(Self, OwnedFd), Refused> {
        // The system would end the process with SIGXFSZ.
        // SAFETY: plain data, of which all zeros are valid; the call fills it in.
        let limit = unsafe {
            let mut limit: libc::rlimit = std::mem::zeroed();
            if libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) == 0 { limit.rlim_cur } else { 0 }
        };
        if (len as u64) > limit {
            return Err(Refused::System(libc::EFBIG));
        }
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        // SAFETY: the name is a C string.
        let make = |flags| unsafe { libc::memfd_create(name.as_ptr(), flags) };
        let mut fd = make(flags | MFD_NOEXEC_SEAL);
        if fd < 0 {
            fd = make(flags);
        }
        if fd < 0 {
            return Err(refused());
        }
        // SAFETY: it was just made, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let size = libc::off_t::try_from(len).map_err(|_| Refused::Size)?;
        // SAFETY: no memory is passed.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), size) } != 0 {
            return Err(refused());
        }
        let shared = Self::map(&fd, len, true)?;
        let seals = if writers == Writers::Maker { SEALS | libc::F_SEAL_FUTURE_WRITE } else { SEALS };
        // SAFETY: no memory is passed.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
            return Err(refused());
        }
        Ok((shared, fd))
    }

    /// Maps what a peer has made: `len` bytes, to write them or only to read them.
    pub fn open(fd: BorrowedFd<'_>, len: usize, writable: bool) -> Result<Self, Refused> {
        // SAFETY: no memory is passed.
        let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & SEALS != SEALS {
            return Err(Refused::NotSealed);
        }
        // SAFETY: plain data, of which all zeros are valid; the call fills it in.
        let size = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(fd.as_raw_fd(), &raw mut stat) == 0 { stat.st_size } else { -1 }
        };
        if usize::try_from(size) != Ok(len) {
            return Err(Refused::Size);
        }
        Self::map(&fd, len, writable)
    }

    fn map(fd: &impl std::os::fd::AsFd, len: usize, writable: bool) -> Result<Self, Refused> {
        let rights = if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let raw = fd.as_fd().as_raw_fd();
        // SAFETY: a new mapping, which replaces none.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, rights, libc::MAP_SHARED, raw, 0) };
        if start == libc::MAP_FAILED {
            return Err(refused());
        }
        let shared = Self { start: start.cast(), len, writable, birth: Birth::here() };
        // A child has no business there, and a dump of the process shows nothing of the peer.
        // SAFETY: the whole mapping that was just made, of which nothing is in use.
        let kept = unsafe { libc::madvise(start, len, libc::MADV_DONTFORK) };
        // SAFETY: as above. Fails only on systems that do not know it.
        unsafe { libc::madvise(start, len, libc::MADV_DONTDUMP) };
        if kept == 0 { Ok(shared) } else { Err(refused()) }
    }

    /// Whether the calling process has it: it is a child of the one that has.
    pub fn is_parents(&self) -> bool {
        self.birth.is_parents()
    }

    /// The line that begins at this offset, a multiple of [`LINE`].
    ///
    /// # Panics
    /// If the memory has no such line.
    #[inline]
    pub fn line(&self, at: usize) -> &Line {
        assert!(at.is_multiple_of(LINE) && at < self.len, "no line begins there");
        // SAFETY: inside the mapping, which lives as long as the reference, and aligned. Whoever else has the
        // memory may write it: these are atomics. (Through a mapping for reading only, they are only read.)
        unsafe { &*self.start.add(at).cast::<Line>() }
    }

    /// A stretch of it, for copies: as much of it as there is, nothing if it is not writable.
    #[inline]
    pub fn seg(&self, at: usize, len: usize) -> MemSeg {
        let all = if self.writable { self.len } else { 0 };
        MemSeg { addr: self.start.expose_provenance() as u64, len: all }.part(at, len)
    }

    /// Gives the pages of this stretch back to the system: they are zero from now on. A wish.
    pub fn clear(&self, at: usize, len: usize) {
        if !self.writable || at >= self.len || len > self.len - at {
            return;
        }
        // SAFETY: inside the mapping; bytes there are only ever copied, by whoever.
        unsafe { libc::madvise(self.start.add(at).cast(), len, libc::MADV_REMOVE) };
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.is_parents() {
            // SAFETY: mapped in `map`, unmapped only here; references into it borrow this value.
            unsafe { libc::munmap(self.start.cast(), self.len) };
        }
    }
}

fn refused() -> Refused {
    Refused::System(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::os::fd::AsFd as _;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::{copy_in, owned};

    const LEN: usize = 64 * 1024;

    #[test]
    fn two_mappings_are_one_memory() {
        crate::guard::arm();
        let (ours, fd) = Shared::create(c"test", LEN, Writers::All).unwrap();
        let theirs = Shared::open(fd.as_fd(), LEN, true).unwrap();
        ours.line(128)[3].store(7, Ordering::Release);
        assert_eq!(theirs.line(128)[3].load(Ordering::Acquire), 7);
        copy_in(theirs.seg(LEN - 4, 100), b"abcdef").unwrap();
        assert_eq!(owned::read::<4>(ours.seg(LEN - 4, 4)), Ok(*b"abcd"));
        assert_eq!(ours.seg(LEN, 1).len, 0);
        ours.clear(LEN - 4096, 4096);
        assert_eq!(owned::read::<4>(theirs.seg(LEN - 4, 4)), Ok([0; 4]));
        ours.clear(LEN - 4096, 8192);
    }

    #[test]
    fn what_could_change_its_size_is_refused() {
        let (_ours, fd) = Shared::create(c"test", LEN, Writers::All).unwrap();
        assert_eq!(Shared::open(fd.as_fd(), LEN / 2, true).unwrap_err(), Refused::Size);
        // SAFETY: no memory is passed.
        assert_ne!(unsafe { libc::ftruncate(fd.as_raw_fd(), 0) }, 0);
        let file = tempfile();
        assert_eq!(Shared::open(file.as_fd(), LEN, true).unwrap_err(), Refused::NotSealed);
    }

    /// The size is right, but nothing holds it.
    fn tempfile() -> OwnedFd {
        // SAFETY: the name is a C string; the descriptor is new.
        let fd = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC)) };
        // SAFETY: no memory is passed.
        assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), LEN as libc::off_t) }, 0);
        fd
    }

    #[test]
    fn only_its_maker_writes_a_board() {
        let (ours, fd) = Shared::create(c"test", 4096, Writers::Maker).unwrap();
        assert!(matches!(Shared::open(fd.as_fd(), 4096, true), Err(Refused::System(_))));
        let theirs = Shared::open(fd.as_fd(), 4096, false).unwrap();
        ours.line(0)[0].store(5, Ordering::SeqCst);
        assert_eq!(theirs.line(0)[0].load(Ordering::SeqCst), 5);
        assert_eq!(theirs.seg(0, 8).len, 0);
    }
}
