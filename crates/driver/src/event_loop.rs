//! A thread that sleeps on the sockets and on descriptors of the program together: the thread of an event
//! loop, which knows nothing of this library (`abi/sockets/src/event_loop.rs`).
//!
//! The caller sleeps by a call of its own, on [`Engine::fd`] beside its descriptors, so a signal, a
//! cancellation or a jump takes no event with it: what the system would report to this thread, it reports to
//! the next one that asks.

use std::cell::Cell;
use std::os::fd::RawFd;
use std::time::Duration;

use crate::engine::Engine;
use crate::lead::Leader;
use crate::progress::{Lead, Mode, NEVER, Nanos};
use crate::sync::{Ordering, thread_local};

/// How often a thread looks before the program gets its time.
const LOOKS: usize = 4;

thread_local! {
    /// The calling thread settles what it serves.
    static SETTLES: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread will call what [`Engine::settle_by`] was given, once it holds no lock. Those
/// who note changes need not wake another thread for them.
pub fn settles() -> bool {
    SETTLES.try_with(Cell::get).unwrap_or(false)
}

/// Until it is dropped, the calling thread settles what it serves.
struct Settling(bool);

impl Settling {
    fn begin() -> Self {
        Self(SETTLES.with(|settles| settles.replace(true)))
    }
}

impl Drop for Settling {
    fn drop(&mut self) {
        SETTLES.with(|settles| settles.set(self.0));
    }
}

/// How a thread's lead goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sleep {
    /// It may sleep for so long; `None`: until something is ready.
    For(Option<Duration>),
    /// It must end the lead, and sleep without the engine.
    NoMore,
}

impl Engine {
    /// What a thread calls after it has served descriptors, without a lock, if it sleeps on them. Once.
    pub fn settle_by(&self, settle: Box<dyn Fn() + Send + Sync>) {
        let _ = self.settle.set(settle);
    }

    /// Runs what serves descriptors, and then what settles it.
    pub(crate) fn settling<T>(&self, serve: impl FnOnce() -> T) -> T {
        let Some(settle) = self.settle.get() else { return serve() };
        let settling = Settling::begin();
        let result = serve();
        drop(settling);
        settle();
        result
    }

    /// Begins a lead for a thread that will sleep on [`Self::fd`] and on descriptors of its own. `None`:
    /// another thread leads. It must be ended by [`Self::end_loop`] when the thread returns to the program.
    pub fn begin_loop(&self) -> Option<u64> {
        self.held.will_wait();
        // This thread no longer polls what it polled in earnest.
        self.unpark();
        let lead = self.lead()?.keep();
        self.note_loop();
        Some(lead.to_word())
    }

    /// Readable when something can be served. Only for poll(2) and its like.
    pub fn fd(&self) -> RawFd {
        self.epoll_fd()
    }

    /// How long the thread with this lead may sleep now.
    pub fn may_sleep(&self, lead: u64) -> Sleep {
        let leader = Leader::again(self, Lead::from_word(lead));
        let sleep = if leader.is_over() {
            Sleep::NoMore
        } else if self.loop_sleeps(lead) {
            Sleep::For(leader.limit())
        } else {
            Sleep::For(Some(Duration::ZERO))
        };
        leader.keep();
        sleep
    }

    /// Serves what is ready now, for the thread with this lead.
    pub fn serve_loop(&self, lead: u64) {
        self.loop_wakes(lead);
        let leader = Leader::again(self, Lead::from_word(lead));
        // EINTR on a wait without timeout is harmless.
        let _ = leader.wait(Some(Duration::ZERO));
        leader.keep();
    }

    /// The thread returns to the program; or it sleeps on, without the engine, if it `sleeps`.
    pub fn end_loop(&self, lead: u64, sleeps: bool) {
        self.loop_wakes(lead);
        let leader = Leader::again(self, Lead::from_word(lead));
        if sleeps {
            leader.retire();
        } else {
            drop(leader);
        }
        self.note_loop();
    }

    /// Serves what is ready now, for a thread that does not lead and holds no lock.
    pub fn serve_now(&self) {
        self.settling(|| self.poll_once());
    }

    /// The thread with this lead announces that it is about to sleep; returns whether it may. One
    /// announcement counts for all threads that lead one after the other, so a thread that was replaced
    /// while it slept takes nothing back from its successor.
    fn loop_sleeps(&self, lead: u64) -> bool {
        let announced = self.loop_asleep.swap(lead, Ordering::SeqCst) != 0;
        let may = self.begin_sleep();
        if announced {
            // It was its predecessor's.
            self.end_sleep();
        }
        may
    }

    fn loop_wakes(&self, lead: u64) {
        let mine = self.loop_asleep.compare_exchange(lead, 0, Ordering::SeqCst, Ordering::SeqCst);
        if mine.is_ok() {
            self.end_sleep();
        }
    }

    /// The last sign of the program is that of an event loop.
    fn note_loop(&self) {
        self.loops.store(true, Ordering::Relaxed);
        self.looped_at.store(self.last_poll.get().unwrap_or(0), Ordering::Relaxed);
    }

    /// A thread of the program sleeps, or is about to, on a descriptor that the sockets it waits for make
    /// readable, and then serves them itself.
    pub(crate) fn note_own_loop(&self, now: Nanos) {
        let polled = self.polls_last();
        self.last_poll.stamp(now);
        self.note_loop();
        if polled && self.mode.get() == Mode::BesideLeads {
            // The nap may be one for who polls.
            self.unpark_background();
        }
    }

    /// Such a thread sleeps, or is about to, also on streams that no descriptor reports. Serves what is
    /// ready.
    pub(crate) fn own_loop_sleeps(&self) {
        for _ in 0..LOOKS {
            if self.own.announced.swap(true, Ordering::SeqCst) || self.announce_sleep() {
                return;
            }
            self.own_loop_wakes();
            self.look_once();
        }
        // There is more all the time: the program is called for it.
        self.wake();
    }

    /// It has been called, or sleeps no more.
    pub(crate) fn own_loop_wakes(&self) {
        if self.own.announced.swap(false, Ordering::SeqCst) {
            self.end_sleep();
        }
    }

    /// Whether the last lead was that of an event loop, which comes back when it has handled its events.
    pub(crate) fn is_looped(&self) -> bool {
        self.loops.load(Ordering::Relaxed)
    }

    /// Time until the first timer.
    pub(crate) fn until_timer(&self) -> Option<Duration> {
        let first = self.first_timer();
        (first != NEVER).then(|| Duration::from_nanos(first.saturating_sub(self.now())))
    }
}
