//! Datagrams that wait a moment for more, so that the system takes them in one call (docs/adr/045).

use std::sync::Weak;

use crate::engine::Engine;
use crate::source::{Readiness, Source, Token};
use crate::sync::{AtomicBool, AtomicU32, Mutex, OnceLock, Ordering};
use crate::sys;

/// Something that holds datagrams: a queue pair.
pub(crate) trait Holder: Send + Sync {
    /// Sends them.
    fn send_held(&self);
}

/// Who holds datagrams in this process, and whether they may.
pub(crate) struct Held {
    holders: Mutex<Vec<Weak<dyn Holder>>, 19>,
    /// There are holders.
    any: AtomicBool,
    /// Counts empty polls that followed a post.
    round: AtomicU32,
    /// Something was posted in this round.
    posted: AtomicBool,
    /// Many posts were made in this round.
    many: AtomicBool,
    /// A thread has polled since the last one armed a queue or blocked on a channel.
    polls: AtomicBool,
    token: OnceLock<Token>,
    /// The timer runs, and sends what is held when it expires. It is not stopped when nothing is held: it is
    /// set once for many posts.
    timer: AtomicBool,
}

impl Held {
    pub fn new() -> Self {
        Self {
            holders: Mutex::new(Vec::new()),
            any: AtomicBool::new(false),
            round: AtomicU32::new(0),
            posted: AtomicBool::new(false),
            many: AtomicBool::new(false),
            polls: AtomicBool::new(false),
            token: OnceLock::new(),
            timer: AtomicBool::new(false),
        }
    }

    /// The name by which the engine knows the timer.
    pub fn set_token(&self, token: Token) {
        // Once, when the engine is made.
        let _ = self.token.set(token);
    }

    /// The present round, for a queue pair that has not posted in it yet.
    pub fn begin(&self) -> u32 {
        self.posted.store(true, Ordering::Relaxed);
        self.round()
    }

    /// Changes with the first empty poll after a post.
    #[inline]
    pub fn round(&self) -> u32 {
        self.round.load(Ordering::Relaxed)
    }

    /// A queue pair has made many posts in this round. Returns whether it may hold datagrams: threads poll,
    /// as far as is known.
    #[inline]
    pub fn may_hold(&self) -> bool {
        if !self.many.load(Ordering::Relaxed) {
            self.many.store(true, Ordering::Relaxed);
        }
        self.polls.load(Ordering::Relaxed)
    }

    /// A queue pair holds datagrams from now on.
    pub fn add(&self, holder: Weak<dyn Holder>, engine: &Engine) {
        self.holders.lock().push(holder);
        self.any.store(true, Ordering::SeqCst);
        if !self.timer.swap(true, Ordering::SeqCst)
            && let Some(token) = self.token.get()
        {
            engine.set_timer(*token, Some(sys::now() + engine.pace.spans().held()));
        }
    }

    /// A thread has polled. Whether it found something does not matter: a program that polls only when it
    /// knows of completions never polls in vain.
    #[inline]
    pub fn polled(&self) {
        if !self.polls.load(Ordering::Relaxed) {
            self.polls.store(true, Ordering::Relaxed);
        }
    }

    /// A thread has polled in vain: what is held goes out, and posts are counted anew. Returns whether many
    /// were made: the thread has messages to send and polls in between, so it polls in earnest, although it
    /// may never poll in vain several times in a row.
    #[inline]
    pub fn polled_in_vain(&self) -> bool {
        self.polled();
        if self.posted.load(Ordering::Relaxed) {
            self.posted.store(false, Ordering::Relaxed);
            self.round.fetch_add(1, Ordering::Relaxed);
        }
        self.send();
        self.many.load(Ordering::Relaxed) && self.many.swap(false, Ordering::Relaxed)
    }

    /// A thread will wait for an event. What is held goes out, and until the next poll nothing is held.
    pub fn will_wait(&self) {
        self.polls.store(false, Ordering::Relaxed);
        self.send();
    }

    /// What is held goes out.
    #[inline]
    pub fn send(&self) {
        if self.any.load(Ordering::SeqCst) {
            self.send_all();
        }
    }

    #[cold]
    fn send_all(&self) {
        let mut holders = self.holders.lock();
        self.any.store(false, Ordering::SeqCst);
        let taken = std::mem::take(&mut *holders);
        drop(holders);
        for holder in taken.iter().filter_map(Weak::upgrade) {
            holder.send_held();
        }
    }
}

impl Source for Held {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        // Who holds datagrams after this sets the timer again; who did before is seen here.
        self.timer.store(false, Ordering::SeqCst);
        self.send();
    }
}
