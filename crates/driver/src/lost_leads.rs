//! Leads that were taken from their threads. Such a thread may still be asleep on the sockets.
//!
//! If a thread does not end its lead when it is dismissed, it has jumped out of the call, or the machine is
//! so busy that it did not run. No thread can find out which. In both cases another thread takes its place. A
//! thread that was only delayed learns of this when it wakes. The engine's bell wakes it, and all threads
//! that sleep on the sockets share this bell. So while it may sleep there, no other thread may silence the
//! bell.

use std::time::{Duration, Instant};

use crate::progress::Lead;
use crate::sync::{Mutex, MutexGuard};
use crate::sys;

/// How long the bell is not silenced for a thread that has not run.
const GONE: Duration = Duration::from_secs(60);
/// Meanwhile the other threads check at this interval whether it has come back.
pub(crate) const NAP: Duration = Duration::from_millis(1);

#[derive(Default)]
pub(crate) struct LostLeads(Mutex<Vec<(Lead, Instant)>, 29>);

impl LostLeads {
    /// For a lead that may be over: that must be decided under this lock.
    pub fn lock(&self) -> Leads<'_> {
        Leads(self.0.lock())
    }

    /// The thread of this lead has come back.
    pub fn remove(&self, lead: Lead) {
        self.0.lock().retain(|(lost, _)| *lost != lead);
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

pub(crate) struct Leads<'a>(MutexGuard<'a, Vec<(Lead, Instant)>, 29>);

impl Leads<'_> {
    pub fn add(&mut self, lead: Lead) {
        self.0.push((lead, sys::now()));
    }
}
