//! One word of a process that says whether threads of it sleep. Its peers can only read it.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use uwarp_mem::shared::{Refused, Shared, Writers};
use uwarp_process::Descriptor;

use super::bell;

/// Bytes of its memory.
const SIZE: usize = 4096;

/// The calling process's.
#[derive(Debug)]
pub struct Board {
    memory: Shared,
    fd: Descriptor,
}

impl Board {
    /// Makes it.
    pub fn create() -> Result<Self, Refused> {
        let (memory, fd) = Shared::create(c"uwarp-board", SIZE, Writers::Maker)?;
        Ok(Self { memory, fd: Descriptor::new(fd) })
    }

    /// What a peer needs to read it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A thread is about to sleep.
    pub fn enter(&self) {
        bell::enter(self.word());
    }

    /// It looks again by itself.
    pub fn leave(&self) {
        bell::leave(self.word());
    }

    /// A thread has been told that a bell was rung, and looks after this.
    pub fn heard(&self) {
        bell::heard(self.word());
    }

    fn word(&self) -> &crate::sync::AtomicU64 {
        &self.memory.line(0)[0]
    }
}

/// A peer's.
#[derive(Debug)]
pub struct PeerBoard(Shared);

impl PeerBoard {
    /// Maps what the peer has passed.
    pub fn open(fd: OwnedFd) -> Result<Self, Refused> {
        Shared::open(fd.as_fd(), SIZE, false).map(Self)
    }

    pub(super) fn word(&self) -> &crate::sync::AtomicU64 {
        &self.0.line(0)[0]
    }
}
