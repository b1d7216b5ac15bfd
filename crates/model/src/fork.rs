//! In the model, no process forks and no signal arrives.

use std::os::fd::RawFd;

/// The background thread ends with the scenario.
#[derive(Clone, Copy)]
pub struct Birth(());

impl Birth {
    pub fn here() -> Self {
        Self(())
    }

    pub fn is_parents(self) -> bool {
        crate::sys::over()
    }
}

pub fn track(_: RawFd) {}

pub fn untrack(_: RawFd) {}

pub fn close(_: crate::udp::Duplicate) {}

pub fn with_signals_blocked<T>(f: impl FnOnce() -> T) -> T {
    f()
}

pub fn ask_to_run_soon() -> Result<(), u32> {
    Ok(())
}

pub fn jumps_are_expected() -> bool {
    false
}

pub fn interruptions_restart() -> bool {
    true
}

pub fn interruptions_are_heeded() -> bool {
    true
}

pub fn nonblocking(fd: RawFd) -> bool {
    crate::sys::is_nonblocking(fd)
}

pub struct SignalsAsleep(());

impl SignalsAsleep {
    pub fn in_call() -> Self {
        Self(())
    }

    pub fn begin() {}
}

/// No thread is cancelled.
pub struct Uncancelled(());

impl Uncancelled {
    pub fn begin() -> Self {
        Self(())
    }
}
