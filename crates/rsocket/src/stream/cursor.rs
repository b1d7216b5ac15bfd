//! A program's buffers, in the course of a call.

use rustix::io::Errno;
use uwarp_mem::MemSeg;
use uwarp_mem::owned::{from_program, to_program};

/// A program's buffers, and how far they are used.
pub(super) struct Cursor<'a> {
    buffers: &'a [MemSeg],
    /// Of the first buffer.
    used: usize,
    left: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(buffers: &'a [MemSeg]) -> Self {
        Self { buffers, used: 0, left: buffers.iter().map(|buffer| buffer.len).sum() }
    }

    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// The next piece of the program's memory.
    fn piece(&mut self) -> MemSeg {
        while let [first, rest @ ..] = self.buffers {
            if self.used < first.len {
                return first.part(self.used, first.len);
            }
            (self.buffers, self.used) = (rest, 0);
        }
        MemSeg { addr: 0, len: 0 }
    }

    fn advance(&mut self, bytes: usize) {
        self.used += bytes;
        self.left -= bytes;
    }

    /// Copies to memory of ours, all of it.
    pub(super) fn copy_to(&mut self, ours: [MemSeg; 2]) -> Result<(), Errno> {
        // A bad buffer behind a good one must not use up the good one.
        let before = (self.buffers, self.used, self.left);
        for mut ours in ours {
            while ours.len > 0 {
                let Ok(n) = from_program(ours, self.piece()) else {
                    (self.buffers, self.used, self.left) = before;
                    return Err(Errno::FAULT);
                };
                if n == 0 {
                    break;
                }
                self.advance(n);
                ours = ours.part(n, ours.len);
            }
        }
        Ok(())
    }

    /// Copies from memory of ours, as much as fits.
    pub(super) fn copy_from(&mut self, mut ours: MemSeg) -> Result<usize, Errno> {
        let mut copied = 0;
        while ours.len > 0 {
            let n = to_program(self.piece(), ours).map_err(|_| Errno::FAULT)?;
            if n == 0 {
                break;
            }
            self.advance(n);
            copied += n;
            ours = ours.part(n, ours.len);
        }
        Ok(copied)
    }
}
