//! The only crate that touches registered memory.
//!
//! The program and the peer write this memory while we use it, so we never form a slice over it. It is named
//! by address and length ([`MemSeg`]), and copied from or to in this crate, or passed to the kernel by
//! address. A copy that races with a writer yields a mixture of old and new bytes, as it would with an
//! adapter.

// Reason: registered memory is named by address.
#![allow(unsafe_code)]

use uwarp_wire::crc::Crc32c;
use uwarp_wire::rdmap::{AtomicOp, AtomicRequest};

pub mod glance;
pub mod guard;
pub mod owned;
pub mod populate;
pub mod shared;

/// A stretch of memory in a registered region (or in a program's inline buffer during the post), laid out
/// like the system's `iovec`.
///
/// The code that makes one has checked it against a valid region, or took it from a work request. That the
/// memory is still mapped is the program's promise, which it may break: see [`guard`].
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemSeg {
    /// Virtual address in this process.
    pub addr: u64,
    /// Bytes.
    pub len: usize,
}

const _: () = {
    assert!(size_of::<MemSeg>() == size_of::<libc::iovec>());
    assert!(core::mem::offset_of!(MemSeg, addr) == core::mem::offset_of!(libc::iovec, iov_base));
    assert!(core::mem::offset_of!(MemSeg, len) == core::mem::offset_of!(libc::iovec, iov_len));
};

impl MemSeg {
    /// The part from `offset` on, at most `len` bytes.
    #[inline]
    pub fn part(self, offset: usize, len: usize) -> Self {
        let offset = offset.min(self.len);
        Self { addr: self.addr.wrapping_add(offset as u64), len: len.min(self.len - offset) }
    }

    #[inline]
    fn ptr(self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.addr as usize)
    }
}

/// The program has unmapped registered memory, or taken away the rights to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unmapped;

/// Copies `src` into registered memory, as many bytes as both have; returns how many.
#[inline]
pub fn copy_in(dst: MemSeg, src: &[u8]) -> Result<usize, Unmapped> {
    let n = dst.len.min(src.len());
    // SAFETY: `dst` lies in a region that is registered (checked right before), and `src` is ours, so they do
    // not overlap. The program may write at the same time; we hold no reference to the region.
    let done = unsafe { guard::copy(dst.ptr(), src.as_ptr(), n, src.as_ptr()) };
    if done { Ok(n) } else { Err(unmapped(dst)) }
}

/// Why an atomic operation was not carried out; the memory is unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotDone {
    /// The address is not a multiple of 8.
    Unaligned,
    /// The operation is not defined.
    Unknown,
    /// The memory is not mapped any more, or must not be written.
    Unmapped,
}

impl From<Unmapped> for NotDone {
    fn from(_: Unmapped) -> Self {
        Self::Unmapped
    }
}

/// Whether [`atomic`] would succeed, as far as that can be known without touching the memory.
fn check_atomic(dst: MemSeg, request: &AtomicRequest) -> Result<(), NotDone> {
    if dst.len != size_of::<u64>() || !dst.addr.is_multiple_of(size_of::<u64>() as u64) {
        return Err(NotDone::Unaligned);
    }
    request.apply(0).map(|_| ()).ok_or(NotDone::Unknown)
}

/// Carries out an atomic operation on the eight bytes of `dst`, in host byte order, and returns their old
/// value. It uses the processor's atomic instructions. So it is atomic toward those of every thread of every
/// process that shares the memory, and so toward every other uwarp device.
pub fn atomic(dst: MemSeg, request: &AtomicRequest) -> Result<u64, NotDone> {
    check_atomic(dst, request)?;
    let whole = |mask: u64| mask == u64::MAX;
    // A mask of zero, or of the top bit alone, makes one field of all bits.
    if request.operation == AtomicOp::FetchAdd && request.add_swap_mask << 1 == 0 {
        // SAFETY: as in `copy_in`; aligned.
        let done = unsafe { guard::fetch_add(dst.ptr().cast(), request.add_swap_data) };
        return done.ok_or_else(|| unmapped(dst).into());
    }
    // The first guess at the present value: for a plain compare-and-swap its own compare value, else zero,
    // which is most likely wrong.
    let plain = whole(request.add_swap_mask) && whole(request.compare_mask);
    let mut guess = if plain { request.compare_data } else { 0 };
    loop {
        let new = request.apply(guess).ok_or(NotDone::Unknown)?;
        // SAFETY: as in `copy_in`; aligned.
        let found = unsafe { guard::compare_exchange(dst.ptr().cast(), guess, new) };
        let found = found.ok_or_else(|| unmapped(dst))?;
        if found == guess || request.apply(found) == Some(found) {
            return Ok(found);
        }
        guess = found;
    }
}

/// Appends the bytes of `src` to `out`, or nothing.
#[inline]
pub fn copy_out(src: MemSeg, out: &mut Vec<u8>) -> Result<(), Unmapped> {
    out.reserve(src.len);
    // SAFETY: `src` lies in registered memory (see `copy_in`) or in a staging buffer of ours; the destination
    // was just reserved, is ours alone, and is initialised by the copy before the length includes it.
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

/// As [`copy_out`], and adds the copied bytes to a CRC, in steps that stay in the first-level cache. The CRC
/// is of the copy, which nothing else can change. On failure, `out` may be longer by some of the bytes.
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

/// Fills `dst` from registered or shared memory, as many bytes as both have; returns how many.
#[inline]
pub fn copy_to(src: MemSeg, dst: &mut [u8]) -> Result<usize, Unmapped> {
    let n = src.len.min(dst.len());
    // SAFETY: as in `copy_in`, the other way round.
    let done = unsafe { guard::copy(dst.as_mut_ptr(), src.ptr(), n, dst.as_ptr()) };
    if done { Ok(n) } else { Err(unmapped(src)) }
}

/// Copies the memory that an inline post names to `dst`, as many bytes as both have; returns how many.
///
/// Not guarded: this memory is not registered. A bad pointer is the caller's mistake and should fault in the
/// call that made it.
#[inline]
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn request(operation: AtomicOp, data: u64, mask: u64) -> AtomicRequest {
        AtomicRequest {
            operation,
            request_id: 0,
            stag: 0,
            to: 0,
            add_swap_data: data,
            add_swap_mask: mask,
            compare_data: 0,
            compare_mask: 0,
        }
    }

    fn segment(word: &AtomicU64) -> MemSeg {
        MemSeg { addr: word.as_ptr().expose_provenance() as u64, len: 8 }
    }

    #[test]
    fn what_cannot_be_carried_out_changes_nothing() {
        guard::arm();
        let words = [AtomicU64::new(7), AtomicU64::new(8)];
        let seg = segment(&words[0]);
        let add = request(AtomicOp::FetchAdd, 1, 0);
        for off in 1..8 {
            let seg = MemSeg { addr: seg.addr + off, ..seg };
            assert_eq!(atomic(seg, &add), Err(NotDone::Unaligned));
        }
        assert_eq!(atomic(MemSeg { len: 4, ..seg }, &add), Err(NotDone::Unaligned));
        assert_eq!(atomic(seg, &request(AtomicOp::Unknown(1), 1, 0)), Err(NotDone::Unknown));
        assert_eq!(words.each_ref().map(|word| word.load(Ordering::SeqCst)), [7, 8]);
    }

    /// A compare-and-swap that finds a value other than the first guess is tried again with that value.
    #[test]
    fn masked_operations_find_what_is_there() {
        let word = AtomicU64::new(0x1122_3344_5566_7788);
        let seg = segment(&word);
        let low = request(AtomicOp::CmpSwap, 0xFF, 0xFF);
        assert_eq!(atomic(seg, &low), Ok(0x1122_3344_5566_7788));
        assert_eq!(word.load(Ordering::SeqCst), 0x1122_3344_5566_77FF);
        let differs = AtomicRequest { compare_data: 1, compare_mask: 0xFF, ..low };
        assert_eq!(atomic(seg, &differs), Ok(0x1122_3344_5566_77FF));
        let fields = request(AtomicOp::FetchAdd, 1, 0x80);
        assert_eq!(atomic(seg, &fields), Ok(0x1122_3344_5566_77FF));
        assert_eq!(word.load(Ordering::SeqCst), 0x1122_3344_5566_7700, "the carry does not leave the field");
    }

    /// Plain and masked operations, and the processor's own.
    #[test]
    fn operations_of_many_threads_exclude_each_other() {
        const EACH: u64 = if cfg!(miri) { 50 } else { 20_000 };
        let word = AtomicU64::new(0);
        let seg = segment(&word);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                (0..EACH).for_each(|_| _ = atomic(seg, &request(AtomicOp::FetchAdd, 1, 0)).unwrap())
            });
            // Two fields of 32 bits, of which the upper one gets a number.
            let upper = request(AtomicOp::FetchAdd, 1 << 32, 1 << 31 | 1 << 63);
            scope.spawn(move || (0..EACH).for_each(|_| _ = atomic(seg, &upper).unwrap()));
            scope.spawn(|| {
                let mut done = 0;
                let mut expected = 0;
                while done < EACH {
                    let swap = AtomicRequest {
                        compare_data: expected,
                        compare_mask: u64::MAX,
                        ..request(AtomicOp::CmpSwap, expected + 1, u64::MAX)
                    };
                    let found = atomic(seg, &swap).unwrap();
                    done += u64::from(found == expected);
                    expected = if found == expected { found + 1 } else { found };
                }
            });
            scope.spawn(|| (0..EACH).for_each(|_| _ = word.fetch_add(1, Ordering::SeqCst)));
        });
        assert_eq!(word.load(Ordering::SeqCst), (EACH << 32) + 3 * EACH);
    }
}
