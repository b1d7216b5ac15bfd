//! Which thread this is.

use std::cell::Cell;

use rustix::thread::{Pid, gettid};

use crate::generation::generation;

thread_local! {
    /// Of this thread, and of the process that asked for it: a forked child's thread has another number.
    static NUMBER: Cell<Option<(u32, Pid)>> = const { Cell::new(None) };
}

/// The system's number of the calling thread. The system is asked once for each thread.
pub fn thread() -> Pid {
    let known = NUMBER.try_with(Cell::get).ok().flatten();
    if let Some((_, number)) = known.filter(|(of, _)| *of == generation()) {
        return number;
    }
    let number = gettid();
    // A thread that is ending asks again each time.
    let _ = NUMBER.try_with(|known| known.set(Some((generation(), number))));
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_asked_for_once() {
        assert_eq!((thread(), thread()), (gettid(), gettid()));
        assert_ne!(std::thread::spawn(thread).join().unwrap(), thread());
    }
}
