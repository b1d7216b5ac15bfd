//! The one room that touches registered memory.
//!
//! The program and the peer write this memory while we look, so no slice over it is ever formed: it is named by
//! address and length ([`MemSeg`]) and copied from or to, here, or handed to the kernel by address. A copy that races with
//! a writer yields some mixture of old and new bytes, as it would with an adapter.

#![allow(unsafe_code)]

use uwarp_wire::crc::Crc32c;

pub mod guard;

/// A stretch of memory in a registered region (or in a program's inline buffer during the post).
///
/// Whoever makes one has checked it against a region that is valid, or took it from a work request. That the memory is still
/// mapped is the program's promise, which it may break: see [`guard`].
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

/// Registered memory that the program has unmapped meanwhile, or taken the rights to away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unmapped;

/// Copies as many bytes as both have from `src` into registered memory; returns how many.
pub fn copy_in(dst: MemSeg, src: &[u8]) -> Result<usize, Unmapped> {
    let n = dst.len.min(src.len());
    // SAFETY: `dst` lies in a region that is registered (checked right before), and `src` is ours, so they do not overlap. Racing
    // writers are the program's choice; no reference to the region exists on our side.
    let done = unsafe { guard::copy(dst.ptr(), src.as_ptr(), n, src.as_ptr()) };
    if done { Ok(n) } else { Err(unmapped(dst)) }
}

/// Appends the bytes of `src` to `out`, or nothing.
pub fn copy_out(src: MemSeg, out: &mut Vec<u8>) -> Result<(), Unmapped> {
    out.reserve(src.len);
    // SAFETY: `src` lies in registered memory (see `copy_in`) or in a staging buffer of ours; the destination was just reserved,
    // is ours alone, and is initialised by the copy before the length says so.
    let done = unsafe {
        let end = out.as_mut_ptr().add(out.len());
        let done = guard::copy(end, src.ptr(), src.len, end);
        if done {
            out.set_len(out.len() + src.len);
        }
        done
    };
    if done { Ok(()) } else { Err(unmapped(src)) }
}

/// As [`copy_out`], and takes the copied bytes into a CRC: in steps that stay in the first-level cache, and of the copy, which nobody
/// else can change. `out` may be longer by some of the bytes where this fails.
pub fn copy_out_with_crc(mut src: MemSeg, out: &mut Vec<u8>, crc: &mut Crc32c) -> Result<(), Unmapped> {
    const STEP: usize = 8 * 1024;
    out.reserve(src.len);
    while src.len > 0 {
        let step = src.part(0, STEP);
        let at = out.len();
        copy_out(step, out)?;
        crc.update(out.get(at..).unwrap_or(&[]));
        src = src.part(step.len, src.len);
    }
    Ok(())
}

/// Copies as many bytes as both have from the memory that an inline post names to `dst`; returns how many.
///
/// Not guarded: nothing is registered, and a bad pointer is the caller's mistake, to be seen in the call that made it.
pub fn copy_inline(dst: &mut [u8], src: MemSeg) -> usize {
    let n = dst.len().min(src.len);
    if n > 0 {
        // SAFETY: the caller of a posting verb vouches for inline memory as for any argument; `dst` is ours.
        unsafe { std::ptr::copy_nonoverlapping(src.ptr().cast_const(), dst.as_mut_ptr(), n) }
    }
    n
}

#[cold]
fn unmapped(seg: MemSeg) -> Unmapped {
    tracing::warn!(
        addr = format_args!("{:#x}", seg.addr),
        len = seg.len,
        "registered memory is not mapped any more"
    );
    Unmapped
}
