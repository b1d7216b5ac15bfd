//! The record of the descriptors that a forked child closes.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// How often each descriptor is recorded: by its owner, and by the engine while it watches it.
pub type Descriptors = HashMap<RawFd, usize>;

/// A lock of the standard library: it is held during a fork, and its guard may be kept meanwhile.
static DESCRIPTORS: LazyLock<Mutex<Descriptors>> = LazyLock::new(Mutex::default);

/// The record, locked: by a thread that forks. What it guards is never left half changed.
pub fn descriptors() -> MutexGuard<'static, Descriptors> {
    DESCRIPTORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records a descriptor, once more.
pub fn track(fd: RawFd) {
    *descriptors().entry(fd).or_default() += 1;
}

/// Removes one record of [`track`].
pub fn untrack(fd: RawFd) {
    let mut descriptors = descriptors();
    if let Some(times) = descriptors.get_mut(&fd) {
        *times -= 1;
        if *times == 0 {
            descriptors.remove(&fd);
        }
    }
}

/// A record of a descriptor: while this exists, a child that is forked closes its copy, whether the engine
/// watches the descriptor or not. To be dropped before the descriptor is closed or passed on: its number is
/// another file's then.
#[derive(Debug)]
pub struct Recorded(RawFd);

impl Recorded {
    /// Of an open descriptor.
    pub fn new(fd: RawFd) -> Self {
        track(fd);
        Self(fd)
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        untrack(self.0);
    }
}

/// A descriptor of the library's: a forked child closes its copy.
#[derive(Debug)]
pub struct Descriptor {
    // Dropped before the descriptor is closed.
    record: Recorded,
    fd: OwnedFd,
}

impl Descriptor {
    /// Keeps it.
    pub fn new(fd: OwnedFd) -> Self {
        Self { record: Recorded::new(fd.as_raw_fd()), fd }
    }

    /// Gives it back: a child keeps its copy from now on.
    pub fn take(self) -> OwnedFd {
        let Self { record, fd } = self;
        drop(record);
        fd
    }
}

impl AsFd for Descriptor {
    #[inline]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection is recorded by its owner from birth on, and by the engine while it watches it. When the
    /// engine stopped, a child kept its copy, and the peer never saw the end of the connection.
    #[test]
    fn a_descriptor_stays_recorded_until_each_of_its_records_is_gone() {
        let (end, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let fd = end.as_raw_fd();
        let is_recorded = || descriptors().contains_key(&fd);
        let birth = Recorded::new(fd);
        track(fd);
        untrack(fd);
        assert!(is_recorded());
        drop(birth);
        assert!(!is_recorded());
        untrack(fd);
        let kept = Descriptor::new(end.into());
        assert!(is_recorded());
        drop(kept.take());
        assert!(!is_recorded());
    }
}
