//! Whether memory can be registered: it must be mapped, with the rights that the region needs.
//!
//! An adapter pins the pages and fails with `EFAULT` when it cannot. Here the kernel faults them in for
//! reading or for writing (`MADV_POPULATE_*`). That checks the same page tables, without /proc and without
//! touching a byte. As with an adapter, memory gets its pages when it is registered; a region that should get
//! them later is registered with on-demand paging.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Unmapped;

/// Set if the kernel does not know this advice (before 5.14), or a sandbox refuses it.
static POPULATE_UNKNOWN: AtomicBool = AtomicBool::new(false);

/// Checks that `length` bytes at `address` are mapped and readable, and writable if `write`. Zero bytes
/// always pass.
pub fn check(address: usize, length: usize, write: bool) -> Result<(), Unmapped> {
    if length == 0 {
        return Ok(());
    }
    let page = page_size();
    let start = address & !(page - 1);
    let end =
        address.checked_add(length).and_then(|end| end.checked_next_multiple_of(page)).ok_or(Unmapped)?;
    if !POPULATE_UNKNOWN.load(Ordering::Relaxed) {
        let advice = if write { libc::MADV_POPULATE_WRITE } else { libc::MADV_POPULATE_READ };
        match advise(start, end - start, advice) {
            Ok(()) => return Ok(()),
            Err(libc::EINVAL | libc::EPERM | libc::ENOSYS) if !known(page) => {
                POPULATE_UNKNOWN.store(true, Ordering::Relaxed)
            }
            // ENOMEM: a hole. EINVAL: no such right, or memory of a device. EFAULT: the file ends before it.
            Err(_) => return Err(Unmapped),
        }
    }
    if mapped(start, end - start, page) { Ok(()) } else { Err(Unmapped) }
}

fn page_size() -> usize {
    // SAFETY: no pointers.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

fn advise(start: usize, length: usize, advice: c_int) -> Result<(), c_int> {
    loop {
        // SAFETY: populating changes no content; a range that is not mapped is refused.
        let done = unsafe { libc::madvise(std::ptr::without_provenance_mut(start), length, advice) };
        if done == 0 {
            return Ok(());
        }
        match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::EINTR | libc::EAGAIN) => {}
            errno => return Err(errno.unwrap_or(libc::EFAULT)),
        }
    }
}

/// Whether the kernel knows the advice: tries it on a page that is certainly readable.
fn known(page: usize) -> bool {
    let here = (&raw const POPULATE_UNKNOWN).addr() & !(page - 1);
    advise(here, page, libc::MADV_POPULATE_READ).is_ok()
}

/// For older kernels: whether the memory is mapped at all. Missing rights then show only when it is used.
fn mapped(start: usize, length: usize, page: usize) -> bool {
    const PAGES: usize = 4096;
    let mut resident = [0_u8; PAGES];
    (start..start + length).step_by(PAGES * page).all(|at| {
        let chunk = (start + length - at).min(PAGES * page);
        // SAFETY: one byte for each page of the chunk, which `resident` has room for.
        unsafe { libc::mincore(std::ptr::without_provenance_mut(at), chunk, resident.as_mut_ptr()) == 0 }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three pages; the middle one has other rights.
    struct Pages {
        at: usize,
        page: usize,
    }

    impl Pages {
        fn new(middle: c_int) -> Self {
            let page = page_size();
            let rw = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            // SAFETY: a new anonymous mapping.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), 3 * page, rw, flags, -1, 0) };
            assert_ne!(at, libc::MAP_FAILED);
            // SAFETY: within the mapping.
            assert_eq!(unsafe { libc::mprotect(at.byte_add(page), page, middle) }, 0);
            Self { at: at.addr(), page }
        }
    }

    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: the mapping made above.
            unsafe { libc::munmap(std::ptr::without_provenance_mut(self.at), 3 * self.page) };
        }
    }

    #[test]
    fn rights_decide() {
        let pages = Pages::new(libc::PROT_READ);
        let (at, page) = (pages.at, pages.page);
        assert_eq!(check(at, page, true), Ok(()));
        assert_eq!(check(at + 1, page - 1, true), Ok(()));
        assert_eq!(check(at, 3 * page, false), Ok(()));
        assert_eq!(check(at, page + 1, true), Err(Unmapped));
        let pages = Pages::new(libc::PROT_NONE);
        assert_eq!(check(pages.at, page + 1, false), Err(Unmapped));
        assert_eq!(check(pages.at + 2 * page, page, true), Ok(()));
    }

    #[test]
    fn holes_and_ends_of_the_address_space() {
        let pages = Pages::new(libc::PROT_READ);
        let (at, page) = (pages.at, pages.page);
        // SAFETY: the middle page of our mapping; unmapping it again with the others does no harm.
        assert_eq!(unsafe { libc::munmap(std::ptr::without_provenance_mut(at + page), page) }, 0);
        assert_eq!(check(at, 2 * page, false), Err(Unmapped));
        assert!(mapped(at, page, page));
        assert!(!mapped(at, 2 * page, page));
        assert_eq!(check(0, 0, true), Ok(()));
        assert_eq!(check(0, 1, false), Err(Unmapped));
        assert_eq!(check(usize::MAX - 10, 100, false), Err(Unmapped));
        assert_eq!(check(0, usize::MAX, false), Err(Unmapped));
    }

    #[test]
    fn constants_can_be_sent_but_not_received_into() {
        static TEXT: &str = "in read-only memory";
        let (at, len) = (TEXT.as_ptr().addr(), TEXT.len());
        assert_eq!(check(at, len, false), Ok(()));
        assert_eq!(check(at, len, true), Err(Unmapped));
    }
}
