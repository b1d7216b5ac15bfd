//! The record of the descriptors that a forked child closes.

// Reason: a descriptor is closed in the middle of its drop, with the record locked.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use crate::locks::{Mutex, MutexGuard};

/// How often each descriptor is recorded: by its owner, and by the engine while it watches it.
pub type Descriptors = BTreeMap<RawFd, usize>;

/// Held during a fork, too.
static DESCRIPTORS: Mutex<Descriptors, 28> = Mutex::new(Descriptors::new());

/// The record, locked: by a thread that forks. What it guards is never left half changed.
pub fn descriptors() -> MutexGuard<'static, Descriptors, 28> {
    DESCRIPTORS.lock()
}

/// Records a descriptor, once more.
pub fn track(fd: RawFd) {
    *descriptors().entry(fd).or_default() += 1;
}

/// Removes one record of [`track`].
pub fn untrack(fd: RawFd) {
    remove_once(&mut descriptors(), fd);
}

fn remove_once(descriptors: &mut Descriptors, fd: RawFd) {
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
    fd: ManuallyDrop<OwnedFd>,
}

impl Descriptor {
    /// What `make` makes. A fork waits for both: a child that had a copy without a record would keep a
    /// connection open that its parent has closed. `make` must not block, nor record anything.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn made<E>(make: impl FnOnce() -> Result<OwnedFd, E>) -> Result<Self, E> {
        Self::made_with(|| make().map(|fd| (fd, ()))).map(|(fd, ())| fd)
    }

    /// The same; `make` gives something else beside the descriptor.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn made_with<T, E>(make: impl FnOnce() -> Result<(OwnedFd, T), E>) -> Result<(Self, T), E> {
        let mut descriptors = descriptors();
        let (fd, beside) = make()?;
        *descriptors.entry(fd.as_raw_fd()).or_default() += 1;
        Ok((Self { fd: ManuallyDrop::new(fd) }, beside))
    }

    /// One that exists.
    pub fn new(fd: OwnedFd) -> Self {
        track(fd.as_raw_fd());
        Self { fd: ManuallyDrop::new(fd) }
    }

    /// Gives it back: a child keeps its copy from now on.
    pub fn take(self) -> OwnedFd {
        let mut this = ManuallyDrop::new(self);
        untrack(this.fd.as_raw_fd());
        // SAFETY: it is never dropped.
        unsafe { ManuallyDrop::take(&mut this.fd) }
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        let mut descriptors = descriptors();
        remove_once(&mut descriptors, self.fd.as_raw_fd());
        // Closed before a fork can come: a child would keep a copy without a record.
        // SAFETY: nothing uses it again.
        unsafe { ManuallyDrop::drop(&mut self.fd) };
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
        // A child that was forked between both kept its copy.
        let made = || {
            assert!(DESCRIPTORS.try_lock().is_none(), "a fork must wait until it is recorded");
            Ok::<_, ()>(end.into())
        };
        let kept = Descriptor::made(made).unwrap();
        assert!(is_recorded());
        let again = Descriptor::new(kept.take());
        assert!(is_recorded());
        drop(again);
        assert!(!is_recorded());
    }
}
