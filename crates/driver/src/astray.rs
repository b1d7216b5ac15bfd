//! Leads that were given up for lost, and whose threads may still be asleep on the sockets.
//!
//! A thread that does not end its lead when it is told to has jumped out of it, or the machine is so busy that it did
//! not run: nobody can tell. The other threads take its place either way. One that was only held up learns of this
//! when it wakes, and it is woken by the engine's bell, which all threads that sleep on the sockets share: as long as
//! it may sleep there, none of them may silence that bell.

use std::time::{Duration, Instant};

use crate::progress::Lead;
use crate::sync::{Mutex, MutexGuard};
use crate::sys;

/// How long the bell is kept ringing for a thread that has not run.
const GONE: Duration = Duration::from_secs(60);
/// How often the others look meanwhile whether it has come back.
pub(crate) const NAP: Duration = Duration::from_millis(1);

#[derive(Default)]
pub(crate) struct Astray(Mutex<Vec<(Lead, Instant)>>);

impl Astray {
    /// For a lead that may be over: whether it is must be decided under this lock.
    pub fn lock(&self) -> Leads<'_> {
        Leads(self.0.lock())
    }

    /// Its thread has come back.
    pub fn found(&self, lead: Lead) {
        self.0.lock().retain(|(astray, _)| *astray != lead);
    }

    /// Whether a thread may still sleep without a lead.
    pub fn any(&self) -> bool {
        let mut leads = self.0.lock();
        if leads.is_empty() {
            return false;
        }
        let now = sys::now();
        leads.retain(|(_, since)| now.saturating_duration_since(*since) < GONE);
        !leads.is_empty()
    }
}

pub(crate) struct Leads<'a>(MutexGuard<'a, Vec<(Lead, Instant)>>);

impl Leads<'_> {
    pub fn add(&mut self, lead: Lead) {
        self.0.push((lead, sys::now()));
    }
}
