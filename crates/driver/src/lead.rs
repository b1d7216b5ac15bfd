//! A thread of the program that sleeps on the sockets, in place of the background thread.

use std::cell::Cell;
use std::time::Duration;

use rustix::io::Errno;

use crate::engine::Engine;
use crate::progress::{Due, LEAD, Lead, Mode};
use crate::sync::{Ordering, thread_local};

thread_local! {
    /// The lead of this thread: if it exits, in the handler of a signal, that has ended.
    static LEADS: Cell<Option<Lead>> = const { Cell::new(None) };
}

impl Engine {
    /// Becomes the one thread that sleeps here for a channel, until it is dismissed. `None`: another thread
    /// is the leader.
    pub(crate) fn lead(&self) -> Option<Leader<'_>> {
        let now = self.now();
        let lead = Lead::beginning(now);
        if !self.lead.begin(lead) {
            return None;
        }
        self.note_earnest_at(now, true);
        LEADS.with(|leads| leads.set(Some(lead)));
        self.loops.store(false, Ordering::Relaxed);
        Some(Leader { engine: self, lead })
    }

    /// Requests that another thread reports the exit of the process to all sources; returns whether that has
    /// begun. Must be called again until then. Takes no lock: a signal whose handler exits may have stopped
    /// the calling thread anywhere.
    pub(crate) fn exit(&self) -> bool {
        // Its own, not the present one: another thread that leads by now continues, and would not be woken
        // for its channel if it were not known.
        if let Some(lead) = LEADS.with(Cell::take) {
            self.lead.end(lead);
        }
        self.request_exit()
    }

    /// Requests that the thread with this lead [retires](Leader::retire).
    pub(crate) fn dismiss(&self, lead: Lead) {
        if self.lead.dismiss(lead) {
            self.wake();
        }
    }

    /// What a polling thread does from time to time in place of the background thread.
    pub(crate) fn look_after(&self) {
        self.unpark_forgotten();
        self.end_long_lead();
    }

    /// Polling threads keep the background thread from ending a long lead, possibly for ever, so they end it.
    pub(crate) fn end_long_lead(&self) {
        let Some(lead) = self.lead.get() else { return };
        match Due::at(lead.age(self.now())) {
            Due::Nothing => {}
            Due::Dismissal => self.dismiss(lead),
            Due::End => self.replace_leader(lead),
        }
    }

    /// A thread has left its lead without ending it: it jumped out of a signal's handler. If the thread was
    /// only delayed, it learns of this when it wakes.
    pub(crate) fn replace_leader(&self, lead: Lead) {
        let mut lost = self.lost_leads.lock();
        if self.lead.end(lead) {
            lost.add(lead);
            drop(lost);
            tracing::debug!(
                "a thread that waited for events has left its call; other threads serve the connections"
            );
            // What the system has reported to that thread is lost.
            self.rearm_all();
        }
    }
}

/// The right to sleep on the sockets in place of the background thread.
pub(crate) struct Leader<'a> {
    engine: &'a Engine,
    lead: Lead,
}

impl<'a> Leader<'a> {
    /// The holder of this lead, which was [kept](Self::keep).
    pub(crate) fn again(engine: &'a Engine, lead: Lead) -> Self {
        Self { engine, lead }
    }

    /// Goes on without this value.
    pub(crate) fn keep(self) -> Lead {
        let lead = self.lead;
        std::mem::forget(self);
        lead
    }

    /// How long it may sleep by other means than [`Self::wait`].
    pub(crate) fn limit(&self) -> Option<Duration> {
        [self.own_limit(), self.engine.until_timer()].into_iter().flatten().min()
    }

    /// Its lead.
    pub(crate) fn lead(&self) -> Lead {
        self.lead
    }

    /// Whether it must [retire](Self::retire).
    pub(crate) fn is_over(&self) -> bool {
        !self.engine.lead.goes_on(self.lead) || self.own_limit().is_some_and(|left| left.is_zero())
    }

    /// The rest of the lead, if no thread dismisses the leader: the background thread sleeps on the sockets,
    /// or is about to. Otherwise no timer is set: setting one costs some microseconds, as much as half a
    /// message.
    fn own_limit(&self) -> Option<Duration> {
        let serving = matches!(self.engine.mode.get(), Mode::Serving { .. });
        serving.then(|| LEAD.saturating_sub(self.lead.age(self.engine.now())))
    }

    /// Nothing has come for a while: the background thread gets the sockets at once.
    pub(crate) fn retire(self) {
        let engine = self.engine;
        drop(self);
        engine.hand_over();
        engine.unpark_background();
    }

    /// Sleeps until something is ready, and serves it; no longer than `limit`. May return sooner.
    pub(crate) fn wait(&self, limit: Option<Duration>) -> Result<(), Errno> {
        let limit = [limit, self.own_limit()].into_iter().flatten().min();
        if self.engine.settling(|| self.engine.wait_once(limit))?.woken {
            if self.engine.lead.get() == Some(self.lead) {
                self.engine.take_wake();
            }
            self.engine.exit_if_requested();
        }
        Ok(())
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        let engine = self.engine;
        // The program handles what has come, undisturbed; the background thread waits a little.
        engine.note_earnest(false);
        LEADS.with(|leads| leads.set(None));
        if !engine.lead.end(self.lead) {
            // Another thread has taken its place.
            engine.lost_leads.remove(self.lead);
        }
        match engine.mode.get() {
            Mode::AwaitingLeader => engine.unpark_background(),
            // A wake-up for an early timer may have reached this thread, and the background thread would
            // sleep past that timer.
            Mode::Serving { until } if engine.first_timer() < until => {
                engine.wake();
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use crate::background;
    use crate::engine::Engine;

    /// Each call after the first ended the lead of whichever thread led by then. That slept on, although it
    /// was woken for its channel: the model's `exit_is_reported_to_all` failed once.
    #[test]
    fn an_exit_that_is_requested_again_ends_no_other_threads_lead() {
        // Without a background thread, so nothing else ends a lead.
        let engine = Engine::new().unwrap();
        std::mem::forget(engine.lead());
        engine.exit();
        std::thread::scope(|scope| {
            let leads = scope.spawn(|| engine.lead().map(super::Leader::keep));
            let lead = leads.join().unwrap();
            assert!(lead.is_some(), "the thread that exits leads no more");
            engine.exit();
            assert_eq!(engine.lead.get(), lead);
        });
    }

    #[test]
    fn a_lead_that_was_left_without_a_word_is_replaced_although_a_thread_polls() {
        let engine = background::start().unwrap();
        // As a jump out of a signal's handler leaves it.
        std::mem::forget(engine.lead());
        let end = Instant::now() + Duration::from_secs(20);
        while engine.lead().is_none() {
            assert!(Instant::now() < end, "no other thread may lead");
            engine.note_earnest(false);
            engine.look_after();
        }
    }
}
