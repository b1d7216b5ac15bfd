//! The number of a socket or set.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use uwarp_process::{Mutex, PerProcess};

/// Numbers from here on are no descriptors. No system lets a process have so many.
const APART: i32 = 1 << 30;

/// So many numbers that are free again wait for their turn. A call that another thread's close overtakes
/// finds no socket then, and not a newer one.
const REST: usize = 4096;

/// Numbers that are no descriptors: those that are free again, and the first that was never used.
static FREE: PerProcess<Mutex<(VecDeque<i32>, i32), 29>> =
    PerProcess::new(|| Mutex::new((VecDeque::new(), APART)));

/// A number that nothing else has while this exists.
pub struct Number {
    value: i32,
    /// A descriptor that is good for its number alone.
    held: Mutex<Option<OwnedFd>, 29>,
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
        let value = if free.0.len() > REST { free.0.pop_front() } else { None };
        let value = match value {
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
            FREE.lock().0.push_back(self.value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_apart_are_used_again_later_and_are_no_descriptors() {
        let (one, two) = (Number::apart().unwrap(), Number::apart().unwrap());
        assert!(one.value() >= APART && two.value() >= APART && one.value() != two.value());
        let free = one.value();
        drop(one);
        assert_ne!(two.another().unwrap().value(), free);
        let mut used = (0..2 * REST).map(|_| two.another().unwrap().value());
        assert!(used.any(|value| value == free));
        assert!(Number::new().unwrap().another().unwrap().value() < APART);
    }
}
