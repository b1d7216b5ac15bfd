//! The current time, as machines take it: read by whoever drives them, and only if they need it.

use std::cell::Cell;
use std::time::Instant;

/// The current time. The clock is read when a deadline first needs it: most calls set none, and reading it
/// costs 25 to 40 ns.
#[derive(Debug, Default)]
pub struct Now(Cell<Option<Instant>>);

impl Now {
    /// Read from the system's clock on first use.
    pub const fn unread() -> Self {
        Self(Cell::new(None))
    }

    /// A given time: the simulator's.
    pub const fn at(now: Instant) -> Self {
        Self(Cell::new(Some(now)))
    }

    /// The time; the same for each call.
    pub fn get(&self) -> Instant {
        self.0.get().unwrap_or_else(|| self.read())
    }

    #[cold]
    fn read(&self) -> Instant {
        let now = Instant::now();
        self.0.set(Some(now));
        now
    }
}
