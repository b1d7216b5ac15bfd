//! The number of a socket or set.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

/// Numbers from here on are no descriptors. No system lets a process have so many.
const APART: i32 = 1 << 30;

/// Numbers that are no descriptors: those that are free again, and the first that was never used.
static FREE: Mutex<(BTreeSet<i32>, i32)> = Mutex::new((BTreeSet::new(), APART));

/// A number that nothing else has while this exists.
pub struct Number {
    value: i32,
    /// A descriptor that is good for its number alone.
    held: Mutex<Option<OwnedFd>>,
}

impl Number {
    /// A descriptor's: programs take it for one.
    pub fn new() -> Result<Self, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { value: fd.as_raw_fd(), held: Mutex::new(Some(fd)) })
    }

    /// No descriptor's, for a caller that knows it for what it is.
    pub fn apart() -> Result<Self, Errno> {
        let mut free = FREE.lock();
        let value = match free.0.pop_first() {
            Some(value) => value,
            None => {
                let next = free.1;
                free.1 = next.checked_add(1).ok_or(Errno::MFILE)?;
                next
            }
        };
        Ok(Self { value, held: Mutex::new(None) })
    }

    /// Another one of the same kind.
    pub fn another(&self) -> Result<Self, Errno> {
        if self.value >= APART { Self::apart() } else { Self::new() }
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

impl Drop for Number {
    fn drop(&mut self) {
        if self.value >= APART {
            FREE.lock().0.insert(self.value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_apart_are_used_again_and_are_no_descriptors() {
        let (one, two) = (Number::apart().unwrap(), Number::apart().unwrap());
        assert!(one.value() >= APART && two.value() >= APART && one.value() != two.value());
        let free = one.value();
        drop(one);
        assert_eq!(two.another().unwrap().value(), free);
        assert!(Number::new().unwrap().another().unwrap().value() < APART);
    }
}
