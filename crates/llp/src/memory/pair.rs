//! What one process has of another: its board, and the two bells.

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use rustix::event::EventfdFlags;
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use uwarp_process::Descriptor;

use super::bell;
use super::board::PeerBoard;
use crate::sync::{AtomicU64, Ordering};

/// An eventfd that wakes one process for another. It is never read: a watch for edges reports each ring.
#[derive(Debug)]
pub struct Bell(Descriptor);

impl Bell {
    /// Makes one.
    pub fn create() -> Result<Self, Errno> {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Descriptor::new(fd)))
    }

    /// What the peer has passed. Refused if it is something that a write may wait for: a file, a pipe.
    pub fn from_peer(fd: OwnedFd) -> Result<Self, Errno> {
        // An eventfd is not a file of any type; of what else is not, nothing waits for a writer.
        let stat = rustix::fs::fstat(&fd)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Unknown || !never_waits(&fd) {
            return Err(Errno::INVAL);
        }
        Ok(Self(Descriptor::new(fd)))
    }

    /// To pass it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// To watch it.
    pub fn raw(&self) -> RawFd {
        self.fd().as_raw_fd()
    }

    #[cold]
    fn ring(&self) {
        // Both processes have the same open eventfd: a peer that means harm fills its counter, and has writes
        // wait. It is not rung any more.
        if never_waits(&self.0) {
            // A full counter has woken the peer, as often as anybody can count.
            let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
        }
    }
}

/// Whether a write returns at once.
fn never_waits(fd: impl AsFd) -> bool {
    rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
}

/// How to tell the peer of news. An end that has asked for memory learns that with the answer.
#[derive(Debug, Default)]
pub struct Pair {
    peer: OnceLock<(PeerBoard, Bell)>,
    /// The epoch of the board for which the bell was rung last.
    rung: AtomicU64,
    /// The peer is not heard any more; not 0.
    over: AtomicU64,
}

impl Pair {
    /// With the peer's board and the bell that wakes it.
    pub fn new(board: PeerBoard, bell: Bell) -> Self {
        let pair = Self::default();
        pair.learn(board, bell);
        pair
    }

    /// The peer has passed them. Counts once.
    pub fn learn(&self, board: PeerBoard, bell: Bell) {
        let _ = self.peer.set((board, bell));
    }

    /// Whether the peer has passed them.
    pub fn is_known(&self) -> bool {
        self.peer.get().is_some()
    }

    /// The peer is not heard any more: it is gone, most likely. Streams have connections of their own that
    /// say so; datagrams have not.
    pub fn end(&self) {
        self.over.store(1, Ordering::Release);
    }

    /// Whether that was said.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire) != 0
    }

    #[inline]
    pub(super) fn tell(&self, ready: &AtomicU64, bit: u64) {
        if let Some((board, bell)) = self.peer.get() {
            bell::tell(ready, bit, board.word(), &self.rung, || bell.ring());
        }
    }
}
