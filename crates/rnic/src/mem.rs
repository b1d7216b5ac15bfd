//! The one room that touches registered memory.
//!
//! The program and the peer write this memory while we look, so no slice over it is ever formed: it is named by
//! address and length ([`MemSeg`]) and copied from or to, here, or handed to the kernel by address. A copy that races with
//! a writer yields some mixture of old and new bytes, as it would with an adapter.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod fold;

use uwarp_wire::crc::Crc32c;

/// A stretch of memory in a registered region (or in a program's inline buffer during the post).
///
/// Whoever makes one has checked it against a region that is valid, or took it from a work request whose
/// memory the program has promised to keep mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemSeg {
    /// Virtual address in this process.
    pub addr: u64,
    /// Bytes.
    pub len: usize,
}

impl MemSeg {
    /// The part from `offset` on, at most `len` bytes.
    pub fn part(self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len);
        Self { addr: self.addr.wrapping_add(offset as u64), len: len.min(self.len - offset) }
    }

    fn ptr(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.addr as usize)
    }
}

/// Copies as many bytes as both have from `src` into registered memory; returns how many.
pub fn copy_in(dst: MemSeg, src: &[u8]) -> usize {
    let n = dst.len.min(src.len());
    if n > 0 {
        // SAFETY: `dst` lies in a region whose memory the program keeps mapped and writable while it is registered
        // (checked at registration and again, for validity of the key, right before), and `src` is ours, so they do
        // not overlap. Racing writers are the program's choice; no reference to the region exists on our side.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), dst.ptr(), n) }
    }
    n
}

/// Appends the bytes of `src` to `out`.
pub fn copy_out(src: MemSeg, out: &mut Vec<u8>) {
    out.reserve(src.len);
    // SAFETY: `src` lies in memory that the program keeps mapped (see `copy_in`); the destination was just reserved, is
    // ours alone, and is initialised by the copy before the length says so.
    unsafe {
        let end = out.as_mut_ptr().add(out.len());
        std::ptr::copy_nonoverlapping(src.ptr().cast_const(), end, src.len);
        out.set_len(out.len() + src.len);
    }
}

/// Copies as many bytes as both have from registered (or inline) memory to `dst`; returns how many.
pub fn copy_to(dst: &mut [u8], src: MemSeg) -> usize {
    let n = dst.len().min(src.len);
    if n > 0 {
        // SAFETY: `src` as in `copy_out`; `dst` is ours.
        unsafe { std::ptr::copy_nonoverlapping(src.ptr().cast_const(), dst.as_mut_ptr(), n) }
    }
    n
}

/// Copies from one registered stretch to another (a queue pair connected to itself); they may overlap.
pub fn copy_between(dst: MemSeg, src: MemSeg) -> usize {
    let n = dst.len.min(src.len);
    // SAFETY: as `copy_in` and `copy_out`; `copy` allows overlap.
    unsafe { std::ptr::copy(src.ptr().cast_const(), dst.ptr(), n) }
    n
}

/// Takes the bytes of `src` into a CRC, by way of a buffer that stays in the first-level cache.
pub fn crc_over(mut src: MemSeg, crc: &mut Crc32c) {
    #[cfg(target_arch = "x86_64")]
    if src.len >= 4 * fold::STEP && fold::available() {
        let n = src.len - src.len % fold::STEP;
        // SAFETY: the source as in `copy_out`; the instructions are there.
        *crc = Crc32c::from_register(unsafe { fold::update(crc.register(), src.ptr().cast_const(), n) });
        src = src.part(n, src.len);
    }
    const STEP: usize = 8192;
    let mut buf = std::mem::MaybeUninit::<[u8; STEP]>::uninit();
    while src.len > 0 {
        let n = src.len.min(STEP);
        // SAFETY: the source as in `copy_out`; the destination holds STEP >= n bytes, and exactly the n bytes
        // just written are read back.
        let bytes = unsafe {
            std::ptr::copy_nonoverlapping(src.ptr().cast_const(), buf.as_mut_ptr().cast::<u8>(), n);
            std::slice::from_raw_parts(buf.as_ptr().cast::<u8>(), n)
        };
        crc.update(bytes);
        src = src.part(n, src.len);
    }
}
