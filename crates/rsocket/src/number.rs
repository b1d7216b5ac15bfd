//! The number of a socket or set.

use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// A descriptor that is good for its number alone: while it is open, nothing else gets that number.
pub struct Number {
    value: i32,
    held: Mutex<Option<OwnedFd>>,
}

impl Number {
    /// A new one.
    pub fn new() -> Result<Self, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { value: fd.as_raw_fd(), held: Mutex::new(Some(fd)) })
    }

    /// The number.
    pub fn value(&self) -> i32 {
        self.value
    }

    /// The program has closed it by close(2), and the number is another one's now.
    pub fn disown(&self) {
        let _ = self.held.lock().take().map(IntoRawFd::into_raw_fd);
    }
}
