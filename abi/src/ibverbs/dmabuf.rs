//! Buffers that another device or process owns and shares as a descriptor: dma-bufs that the processor can
//! reach, and memfds, which are mapped the same way.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;

use rustix::fs::{FileType, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use uwarp_rnic::Access;

use crate::failure::Failure;

/// A part of such a buffer, mapped as long as this lives.
#[derive(Debug)]
pub struct Mapping {
    /// Whole pages.
    start: *mut c_void,
    pages: usize,
    /// Where in the first page the part begins.
    skip: usize,
}

// SAFETY: an address that is given to the kernel when it is dropped; the memory itself is not touched here.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes from `offset` on.
    ///
    /// # Errors
    /// `EBADF`: no descriptor. `EINVAL`: beyond the end, empty, or nothing that can be mapped at all.
    /// `EACCES`: the descriptor does not allow what `access` grants. `EOPNOTSUPP`: a dma-buf that only its
    /// device can reach.
    pub fn of(fd: c_int, offset: u64, length: usize, access: Access) -> Result<Self, Failure> {
        if fd < 0 {
            return Err(Errno::BADF.into());
        }
        // SAFETY: used within this call only; a number that names nothing gives EBADF.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        rustix::io::fcntl_getfd(fd)?;
        let invalid = Failure::invalid("the part is empty, or ends beyond the buffer");
        let end = offset.checked_add(length as u64).filter(|_| length > 0).ok_or_else(|| invalid.clone())?;
        if size(fd)? < end {
            return Err(invalid);
        }
        let page = rustix::param::page_size();
        // Less than a page.
        let skip = (offset % page as u64) as usize;
        let pages = length.checked_add(skip).and_then(|n| n.checked_next_multiple_of(page)).ok_or(invalid)?;
        let writable = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let rights =
            if access.intersects(writable) { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let start = (offset - skip as u64, std::ptr::null_mut());
        // SAFETY: a new mapping where the kernel finds room.
        let mapped = unsafe { rustix::mm::mmap(start.1, pages, rights, MapFlags::SHARED, fd, start.0) };
        match mapped {
            Ok(start) => Ok(Self { start, pages, skip }),
            // A pipe or a directory. A dma-buf that only its device can reach gives EINVAL or ENOTSUP.
            Err(Errno::NODEV) => Err(Failure::invalid("the descriptor cannot be mapped")),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => {
                Err(Failure::unsupported("a buffer that the processor cannot reach"))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Where the part begins.
    pub fn address(&self) -> *mut c_void {
        self.start.wrapping_byte_add(self.skip)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`; the region is deregistered, so nothing uses it any more.
        let _ = unsafe { rustix::mm::munmap(self.start, self.pages) };
    }
}

/// Bytes of the buffer. For dma-bufs only the position of the end shows it.
fn size(fd: BorrowedFd<'_>) -> Result<u64, Failure> {
    let stat = rustix::fs::fstat(fd)?;
    if FileType::from_raw_mode(stat.st_mode).is_file() && stat.st_size > 0 {
        return Ok(stat.st_size.cast_unsigned());
    }
    rustix::fs::seek(fd, SeekFrom::End(0))
        .map_err(|_| Failure::invalid("the descriptor does not belong to a buffer"))
}
