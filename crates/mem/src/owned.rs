//! Memory of the library's own that peers may write.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};

use super::{MemSeg, Unmapped, guard};

/// Memory that the library registers for itself, zero at first. Peers may write it at any time, so it is used
/// like a program's registered memory: by address, and only through the functions of [`super`].
#[derive(Debug)]
pub struct Owned {
    start: *mut u8,
    layout: Layout,
}

/// Blocks of this size and more come from the kernel itself. The allocator of the C library takes them from
/// memory that it clears first, once such a block has been freed: then all of it is in use, though most
/// connections never touch more than a part.
const LARGE: usize = 64 * 1024;

// SAFETY: it is a block of memory without an owner among the threads; only copies touch it.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Owned {
    /// `len` bytes; `None` if the system has not so much.
    pub fn new(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len.max(1), 16).ok()?;
        let start = if layout.size() >= LARGE {
            let (rights, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: a new mapping, which replaces none.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), layout.size(), rights, flags, -1, 0) };
            if start == libc::MAP_FAILED { std::ptr::null_mut() } else { start.cast::<u8>() }
        } else {
            // SAFETY: the size is not zero.
            unsafe { alloc_zeroed(layout) }
        };
        (!start.is_null()).then_some(Self { start, layout })
    }

    /// All of it.
    pub fn seg(&self) -> MemSeg {
        MemSeg { addr: self.start.expose_provenance() as u64, len: self.layout.size() }
    }
}

impl Drop for Owned {
    /// The region over it must have been deregistered.
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`, and freed only here.
        unsafe {
            if self.layout.size() >= LARGE {
                libc::munmap(self.start.cast(), self.layout.size());
            } else {
                dealloc(self.start, self.layout);
            }
        }
    }
}

/// Copies memory of ours to a program's buffer, as many bytes as both have; returns how many.
pub fn to_program(buffer: MemSeg, ours: MemSeg) -> Result<usize, Unmapped> {
    let n = buffer.len.min(ours.len);
    // SAFETY: `ours` lies in an `Owned` that the caller keeps alive. A peer that writes it meanwhile yields
    // a mixture of bytes; no reference to it exists. The buffer is the program's, and may be anything.
    let done = unsafe { guard::copy(buffer.ptr(), ours.ptr(), n, ours.ptr()) };
    if done { Ok(n) } else { Err(Unmapped) }
}

/// Copies a program's buffer to memory of ours, as many bytes as both have; returns how many.
pub fn from_program(ours: MemSeg, buffer: MemSeg) -> Result<usize, Unmapped> {
    let n = buffer.len.min(ours.len);
    // SAFETY: as in `to_program`.
    let done = unsafe { guard::copy(ours.ptr(), buffer.ptr(), n, ours.ptr()) };
    if done { Ok(n) } else { Err(Unmapped) }
}

/// The first `N` bytes of a stretch of memory; the rest is zero if it is shorter.
pub fn read<const N: usize>(src: MemSeg) -> Result<[u8; N], Unmapped> {
    let mut bytes = [0; N];
    let n = N.min(src.len);
    // SAFETY: `bytes` is ours; the source lies in memory of ours or of the program, as in `to_program`.
    let done = unsafe { guard::copy(bytes.as_mut_ptr(), src.ptr(), n, bytes.as_ptr()) };
    if done { Ok(bytes) } else { Err(Unmapped) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy_in;

    #[test]
    fn bytes_go_there_and_back() {
        guard::arm();
        let ours = Owned::new(4096).unwrap();
        assert_eq!(read::<4>(ours.seg()), Ok([0; 4]));
        copy_in(ours.seg().part(1, 4), b"abcdef").unwrap();
        assert_eq!(read::<6>(ours.seg()), Ok(*b"\0abcd\0"));
        let mut buffer = [0u8; 3];
        let seg = MemSeg { addr: buffer.as_mut_ptr().expose_provenance() as u64, len: 3 };
        assert_eq!(to_program(seg, ours.seg().part(2, 10)), Ok(3));
        assert_eq!(&buffer, b"bcd");
        assert_eq!(from_program(ours.seg().part(4095, 9), seg), Ok(1));
        assert_eq!(read::<2>(ours.seg().part(4095, 9)), Ok([b'b', 0]));
    }

    /// Pages of this process that are in memory.
    fn resident() -> usize {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// A socket has two of these, and 10,000 sockets had 2.5 GB.
    #[test]
    fn large_memory_is_not_in_use_before_it_is_touched() {
        // From then on the C library's allocator would take such blocks from memory that it clears.
        drop(vec![1u8; 256 * 1024]);
        let before = resident();
        let all: Vec<Owned> = (0..200).map(|_| Owned::new(128 * 1024).unwrap()).collect();
        let more = resident().saturating_sub(before);
        // Of 6,400 pages. Other tests run meanwhile.
        assert!(more < 1600, "{more} pages of {} blocks", all.len());
    }
}
