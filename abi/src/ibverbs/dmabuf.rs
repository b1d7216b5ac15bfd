//! Buffers that another device owns and shares as a descriptor: dma-bufs that the processor can reach.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;

use rustix::fs::{FileType, SeekFrom};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use uwarp_rnic::Access;

use crate::failure::Failure;

/// `f_type` of the file system of dma-bufs (linux/magic.h).
const DMA_BUF_MAGIC: rustix::fs::FsWord = 0x444d_4142;

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
    /// `EBADF`: no descriptor. `EINVAL`: no dma-buf, beyond its end, or empty.
    /// `EACCES`: the descriptor does not allow what `access` grants. `EOPNOTSUPP`: a dma-buf that only its
    /// device can reach.
    pub fn of(fd: c_int, offset: u64, length: usize, access: Access) -> Result<Self, Failure> {
        if fd < 0 {
            return Err(Errno::BADF.into());
        }
        // SAFETY: used within this call only; a number that names nothing gives EBADF.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        // As the kernel, which does not take other files, whether or not they can be mapped.
        if rustix::fs::fstatfs(fd)?.f_type != DMA_BUF_MAGIC {
            return Err(Failure::invalid("the descriptor is no dma-buf"));
        }
        Self::map(fd, offset, length, access)
    }

    fn map(fd: BorrowedFd<'_>, offset: u64, length: usize, access: Access) -> Result<Self, Failure> {
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
            Err(Errno::NODEV | Errno::INVAL | Errno::OPNOTSUPP) => {
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

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;

    /// Few machines have a driver that makes dma-bufs. A memfd is mapped in the same way.
    #[test]
    fn the_part_that_offset_and_length_name_is_mapped() {
        let page = rustix::param::page_size();
        let file = rustix::fs::memfd_create("buffer", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        rustix::fs::ftruncate(&file, 4 * page as u64).expect("a length");
        rustix::io::pwrite(&file, b"buffer", page as u64 + 100).expect("bytes");
        let of = |offset, length| Mapping::map(file.as_fd(), offset, length, Access::LOCAL_WRITE);
        let mapping = of(page as u64 + 100, 2 * page).expect("a mapping");
        // SAFETY: mapped just now, six bytes of it are read.
        let seen = unsafe { std::slice::from_raw_parts(mapping.address().cast::<u8>(), 6) };
        assert_eq!(seen, b"buffer");
        let errno = |offset, length| of(offset, length).err().map(|e| e.errno);
        let end = 4 * page as u64;
        assert_eq!(errno(end, 1), Some(libc::EINVAL));
        assert_eq!(errno(end - 1, 2), Some(libc::EINVAL));
        assert_eq!(errno(u64::MAX, page), Some(libc::EINVAL));
        assert_eq!(errno(0, 0), Some(libc::EINVAL));
        // By the verb it is refused.
        let refused = Mapping::of(file.as_raw_fd(), 0, page, Access::LOCAL_WRITE);
        assert_eq!(refused.err().map(|e| e.errno), Some(libc::EINVAL));
    }
}
