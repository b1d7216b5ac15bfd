//! Memory of the program that a call of its names.

use std::ffi::{c_int, c_void};

use libc::{iovec, msghdr};
use smallvec::SmallVec;
use uwarp_preload::real;

/// Memory of the program, piece by piece.
#[derive(Clone)]
pub struct Spans(SmallVec<[iovec; 4]>);

impl Spans {
    /// `too_many`: the error where there are more pieces than the system takes, which is another one for each
    /// call.
    ///
    /// # Safety
    /// `vectors` has `count` entries.
    pub unsafe fn new(vectors: *const iovec, count: usize, too_many: c_int) -> Result<Self, c_int> {
        if count > 1024 {
            return Err(too_many);
        }
        if count > 0 && vectors.is_null() {
            return Err(libc::EFAULT);
        }
        // SAFETY: the caller's promise.
        let pieces = Self((0..count).map(|at| unsafe { vectors.add(at).read_unaligned() }).collect());
        // The system's lengths have a sign.
        match pieces.0.iter().any(|piece| piece.iov_len.cast_signed() < 0) {
            true => Err(libc::EINVAL),
            false => Ok(pieces),
        }
    }

    /// One piece.
    pub fn one(at: *const c_void, len: usize) -> Self {
        Self(SmallVec::from_slice(&[iovec { iov_base: at.cast_mut(), iov_len: len }]))
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.0.iter().fold(0usize, |sum, piece| sum.saturating_add(piece.iov_len))
    }

    /// Its pieces.
    pub fn pieces(&self) -> &[iovec] {
        &self.0
    }

    /// The first `bytes` are used.
    pub fn skip(&mut self, mut bytes: usize) {
        self.0.retain(|piece| {
            let here = bytes.min(piece.iov_len);
            bytes -= here;
            piece.iov_base = piece.iov_base.wrapping_byte_add(here);
            piece.iov_len -= here;
            piece.iov_len > 0
        });
    }

    /// For recvmsg(2) and its like.
    pub fn message(&self) -> msghdr {
        // SAFETY: zeros are NULL and no bytes.
        let mut message: msghdr = unsafe { std::mem::zeroed() };
        (message.msg_iov, message.msg_iovlen) = (self.0.as_ptr().cast_mut(), self.0.len());
        message
    }

    /// recvmsg(2).
    pub fn receive(&self, fd: c_int, flags: c_int) -> isize {
        let mut message = self.message();
        let message = &raw mut message;
        real!(recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> isize)
    }

    /// sendmsg(2).
    pub fn send(&self, fd: c_int, flags: c_int) -> isize {
        let message = self.message();
        let message = &raw const message;
        real!(sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize)
    }

    /// Copies bytes to it, as many as fit.
    pub fn fill(&self, mut bytes: &[u8]) -> usize {
        let mut copied = 0;
        for piece in &self.0 {
            let (here, rest) = bytes.split_at(bytes.len().min(piece.iov_len));
            // SAFETY: the program's buffer has room for so many, as its call says.
            unsafe { std::ptr::copy_nonoverlapping(here.as_ptr(), piece.iov_base.cast::<u8>(), here.len()) };
            copied += here.len();
            bytes = rest;
        }
        copied
    }
}
