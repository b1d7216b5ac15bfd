//! Event loops of the program that serve their own sockets (ADR 050): the descriptors of these are in the
//! channels' epoll instances as well, beside the engine's. What a loop serves of them, and what it leaves.

use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::{Engine, Reports, Slot};
use crate::fork::Uncancelled;
use crate::own_loops::Beside;
use crate::progress::{NAP_BESIDE_LEADS, Nanos, nanos};
use crate::source::{Interest, Source, Token};
use crate::sync::Ordering;
use crate::sys::Watch;

impl Slot {
    /// Returns whether `watch` reports its descriptor, too, from now on.
    fn report_to(&mut self, watch: &Arc<Watch>) -> bool {
        let Reports::System(fd, _) = self.reports else { return false };
        self.beside.retain(|other| other.strong_count() > 0);
        if self.beside.iter().any(|other| other.as_ptr() == Arc::as_ptr(watch)) {
            return true;
        }
        // Without room, which there is nearly always: so the system finds by itself that a socket which was
        // read in another way is not ready any more.
        let interest = if self.room { Interest::InputAndRoom } else { Interest::Input };
        let added = watch.add(fd, self.token.0, interest).is_ok();
        if added {
            self.beside.push(Arc::downgrade(watch));
        }
        added
    }

    fn report_no_more(&mut self, watch: &Arc<Watch>) {
        let before = self.beside.len();
        self.beside.retain(|other| other.as_ptr() != Arc::as_ptr(watch));
        if let Some(fd) = self.fd().filter(|_| self.beside.len() != before) {
            let _ = watch.delete(fd);
        }
    }

    pub(super) fn beside(&self) -> impl Iterator<Item = Arc<Watch>> {
        self.beside.iter().filter_map(Weak::upgrade)
    }
}

impl Engine {
    /// From now on `watch`, which the program waits for, reports this source's descriptor, too, under the
    /// same name; at once if it is ready.
    pub(crate) fn watch_beside(&self, token: Token, watch: &Arc<Watch>) -> Beside {
        let mut sources = self.sources.write();
        let Some(slot) = sources.get_mut(token.index()).filter(|s| s.token == token) else {
            return Beside::Gone;
        };
        if matches!(slot.reports, Reports::Itself | Reports::Both(_)) {
            return Beside::Raised;
        }
        if slot.report_to(watch) { Beside::Watched } else { Beside::Cannot }
    }

    /// As [`Self::register_input`], for a bell: whoever makes sources ready that no descriptor reports rings
    /// it if a thread has announced its sleep.
    pub(crate) fn register_bell(&self, fd: RawFd, source: Arc<dyn Source>) -> io::Result<Token> {
        let token = self.register_for(fd, source, Interest::Input)?;
        let mut sources = self.sources.write();
        if let Some(slot) = sources.get_mut(token.index()).filter(|s| s.token == token) {
            slot.rung = true;
            let home = self.home.lock().upgrade();
            home.iter().for_each(|home| _ = slot.report_to(home));
        }
        Ok(token)
    }

    /// From now on `watch`, which the program waits for, reports the bells, until another one does. Returns
    /// whether it does.
    pub(crate) fn call_to(&self, watch: &Arc<Watch>) -> bool {
        let is_home = |home: &Weak<Watch>| home.as_ptr() == Arc::as_ptr(watch);
        if is_home(&self.home.lock()) {
            return true;
        }
        let mut sources = self.sources.write();
        let mut home = self.home.lock();
        if home.strong_count() > 0 {
            // Its loop serves the sources of all channels.
            return true;
        }
        *home = Arc::downgrade(watch);
        let added = watch.add_rings(&self.wake, Token::CALL.0).is_ok();
        added && sources.iter_mut().filter(|(_, slot)| slot.rung).all(|(_, slot)| slot.report_to(watch))
    }

    /// Takes [`Self::call_to`] back.
    pub(crate) fn call_no_more(&self, watch: &Arc<Watch>) {
        let mut sources = self.sources.write();
        let mut home = self.home.lock();
        if home.as_ptr() == Arc::as_ptr(watch) {
            *home = Weak::new();
            let _ = watch.delete(self.wake.fd());
            for (_, slot) in sources.iter_mut().filter(|(_, slot)| slot.rung) {
                slot.report_no_more(watch);
            }
        }
    }

    /// Takes [`Self::watch_beside`] back.
    pub(crate) fn watch_alone(&self, token: Token, watch: &Arc<Watch>) {
        let mut sources = self.sources.write();
        if let Some(slot) = sources.get_mut(token.index()).filter(|s| s.token == token) {
            slot.report_no_more(watch);
        }
    }

    /// Serves what this watch reports now, unless a `direct` look says that it has found something, and
    /// timers that have expired, for a thread of an event loop; from time to time also all other sources, for
    /// which the background thread leaves it the time.
    pub(crate) fn serve_beside(&self, watch: &Watch, direct: impl FnOnce() -> bool) {
        let mut uncancelled = None;
        if !direct() {
            let mut called = false;
            // EINTR on a wait without timeout is harmless.
            let _ = watch.wait(Some(Duration::ZERO), |name, readiness| {
                let token = Token(name);
                // The channel's bell has told the program that there is an event.
                if token == Token::WAKE {
                    return;
                }
                called = true;
                uncancelled.get_or_insert_with(Uncancelled::begin);
                if readiness.writable && !readiness.hangup {
                    self.report_beside(token, Interest::Input);
                }
                if let Some(source) = self.find(token) {
                    source.ready(readiness);
                }
            });
            if called {
                self.own_loop_wakes();
            }
            if self.raised.maybe() {
                self.serve_raised();
            }
        }
        let now = self.now();
        self.note_own_loop(now);
        let unseen = now.saturating_sub(self.looked_around.load(Ordering::Relaxed));
        if unseen >= nanos(NAP_BESIDE_LEADS) {
            self.looked_around.store(now, Ordering::Relaxed);
            self.poll_others(now);
        } else if self.first_timer() <= now {
            uncancelled.get_or_insert_with(Uncancelled::begin);
            self.run_timers(now);
        }
    }

    /// This source waits for room: from now on, what reports its descriptor beside the engine reports that,
    /// until it has.
    pub(crate) fn wait_for_room(&self, token: Token) {
        let sources = self.sources.read();
        let slot = sources.get(token.index()).filter(|s| s.token == token);
        let is_due = slot.is_some_and(|slot| !slot.beside.is_empty() && !slot.room);
        drop(sources);
        if is_due {
            self.report_beside(token, Interest::InputAndRoom);
        }
    }

    pub(super) fn report_beside(&self, token: Token, interest: Interest) {
        let mut sources = self.sources.write();
        if let Some(slot) = sources.get_mut(token.index()).filter(|s| s.token == token)
            && let Some(fd) = slot.fd()
        {
            slot.room = interest == Interest::InputAndRoom;
            slot.beside().for_each(|watch| _ = watch.rearm(fd, token.0, interest));
        }
    }

    /// Serves what is ready now, and timers that have expired, except what wakes loops of the program. (They
    /// serve it in its turn. If they do not, this thread does later, or one that waits for the engine.)
    fn poll_others(&self, now: Nanos) {
        let (mut uncancelled, mut leaves) = (None, false);
        // EINTR on a wait without timeout is harmless.
        let _ = self.epoll.wait(Some(Duration::ZERO), |name, readiness| {
            let token = Token(name);
            let source = {
                let sources = self.sources.read();
                let slot = sources.get(token.index()).filter(|s| s.token == token);
                slot.map(|slot| slot.beside().next().is_none().then(|| slot.source.clone()))
            };
            match source {
                Some(Some(source)) => {
                    uncancelled.get_or_insert_with(Uncancelled::begin);
                    source.ready(readiness);
                }
                Some(None) => {
                    leaves = true;
                    self.left.add(token, readiness);
                }
                None => {}
            }
        });
        if self.left.any() && self.own.leaves(now) {
            self.serve_left();
        } else if leaves && self.asleep.count() > usize::from(self.own.announced.load(Ordering::Relaxed)) {
            self.wake();
        }
        self.look_once();
        uncancelled.get_or_insert_with(Uncancelled::begin);
        self.run_timers(self.now());
    }
}
