//! One epoll instance, its background thread, its timers.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slab::Slab;

use crate::config::Config;
use crate::fork;
use crate::sync::{
    AtomicBool, AtomicU8, AtomicU64, Mutex, OnceLock, Ordering, RwLock, spin_loop, thread_local,
};
use crate::sys::{self, Bell, Thread, Watch};
use crate::watchdog::{ALIVE, Watchdog};

/// What a descriptor is ready for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Readiness {
    /// Bytes, a connection or the end of the stream can be read.
    pub readable: bool,
    /// There is room to send, or a connection attempt has ended.
    pub writable: bool,
    /// Error or hang-up; reading tells which.
    pub hangup: bool,
}

/// Something that is served when its descriptor is ready or its time has come.
///
/// Calls come from whichever thread makes progress, possibly from two at once and possibly for nothing; they must not block.
pub trait Source: Send + Sync {
    /// The descriptor became ready.
    fn ready(&self, readiness: Readiness);
    /// The timer set with [`Engine::set_timer`] ran out.
    fn timeout(&self);
    /// Whether a thread has looked at the descriptor, on its own account, since this was last asked.
    fn polled(&self) -> bool {
        true
    }
    /// The process exits: begin to close what can be closed without loss.
    fn exit(&self) {}
}

/// Names a registered source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(u64);

impl Token {
    const WAKE: Self = Self(u64::MAX);

    fn new(index: usize, generation: u32) -> Self {
        Self(u64::from(generation) << 32 | (index as u64 & 0xFFFF_FFFF))
    }

    fn index(self) -> usize {
        (self.0 & 0xFFFF_FFFF) as usize
    }
}

struct Slot {
    token: Token,
    source: Arc<dyn Source>,
    fd: Option<RawFd>,
}

#[derive(Default)]
struct Timers {
    order: BTreeSet<(Instant, Token)>,
    of: HashMap<Token, Instant>,
}

/// The engine of this process.
pub struct Engine {
    epoll: Watch,
    /// Level-triggered: makes one waiter look around.
    wake: Bell,
    sources: RwLock<Slab<Slot>>,
    generation: AtomicU64,
    timers: Mutex<Timers>,
    start: Instant,
    /// When a thread last polled in earnest, in nanoseconds since `start`.
    earnest: AtomicU64,
    /// Until when the background thread sleeps at most, in nanoseconds since `start`.
    background_until: AtomicU64,
    /// The lead of a thread that blocks on a channel and waits here rather than on the channel's own descriptor; 0: there is none.
    leader: AtomicU64,
    /// Since when, in nanoseconds since `start`; [`FOREVER`] where nobody has said so.
    led_since: AtomicU64,
    /// Leads so far.
    leads: AtomicU64,
    parked: Mutex<Parked>,
    /// The background thread sleeps on the watchdog.
    standing_back: AtomicBool,
    watchdog: Watchdog,
    /// How often there was something to read when the background thread came back from the watchdog.
    missed: AtomicU64,
    /// The background thread sleeps until the leader leaves.
    aside: AtomicBool,
    background: OnceLock<Thread>,
    /// Changes whenever the parked descriptors come back.
    park_epoch: AtomicU64,
    exit: AtomicU8,
}

/// Stages of [`Engine::exit`].
const RUNNING: u8 = 0;
const EXIT_ASKED: u8 = 1;
const EXIT_BEGUN: u8 = 2;

/// Descriptors that are not watched, because a thread that polls in earnest looks at them all the time: the wake-up call
/// that each packet would make for nobody is a good part of a microsecond.
#[derive(Default)]
struct Parked {
    /// The background thread stands back; when it returns, it watches them again.
    allowed: bool,
    tokens: Vec<Token>,
}

/// Says that a descriptor is parked, until the next [`Engine::unpark`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ParkMark(u64);

thread_local! {
    /// This thread is the leader: should it exit, in the handler of a signal, nobody leads any more.
    static LEADS: Cell<bool> = const { Cell::new(false) };
}

/// What a look at the descriptors brought.
#[derive(Clone, Copy, Default)]
struct Looked {
    /// The wake descriptor was among them.
    woken: bool,
    /// Others that were ready and have been served.
    served: usize,
    /// There was something to read among these.
    input: bool,
}

/// The background thread's first sleeps beside a thread that polls in earnest, which may be for a moment only. After these, it
/// sleeps on the watchdog.
const NAPS: [Duration; 2] = [Duration::from_micros(50), Duration::from_micros(100)];
/// Its sleeps beside threads that lead now and then.
const NAP_ASIDE: Duration = Duration::from_micros(200);
/// How long a thread sleeps on the sockets at most; then they are the background thread's, and the thread sleeps on its channel's
/// descriptor. So it sleeps for long only in a call that it may leave in any way (`pthread_cancel`, `longjmp` out of a signal's
/// handler): it has nothing there that others need.
pub(crate) const LEAD: Duration = Duration::from_millis(5);
/// Leads that follow each other within this time do not wake the background thread.
const LEADS_APART: Duration = Duration::from_millis(5);
/// Who leads for longer than this is gone: no thread leads for more than [`LEAD`] and what it serves then.
const LOST: Duration = Duration::from_millis(50);
/// In place of a lead.
const NOBODY: u64 = 0;
const FOREVER: u64 = u64::MAX;
/// In place of the time until which the background thread sleeps: the leader sees to the timers.
const ASIDE: u64 = u64::MAX - 1;

impl Engine {
    pub(crate) fn start() -> io::Result<Arc<Self>> {
        let epoll = Watch::new()?;
        let wake = Bell::new(true)?;
        epoll.add_bell(&wake, Token::WAKE.0)?;
        let engine = Arc::new(Self {
            epoll,
            wake,
            sources: RwLock::default(),
            generation: AtomicU64::new(1),
            timers: Mutex::default(),
            start: sys::now(),
            earnest: AtomicU64::new(0),
            background_until: AtomicU64::new(0),
            leader: AtomicU64::new(NOBODY),
            led_since: AtomicU64::new(FOREVER),
            leads: AtomicU64::new(NOBODY),
            parked: Mutex::default(),
            standing_back: AtomicBool::new(false),
            watchdog: Watchdog::new()?,
            missed: AtomicU64::new(0),
            aside: AtomicBool::new(false),
            background: OnceLock::new(),
            park_epoch: AtomicU64::new(1),
            exit: AtomicU8::new(RUNNING),
        });
        let weak = Arc::downgrade(&engine);
        // The program's signals are the program's: its own threads take them.
        let thread = fork::with_signals_blocked(|| sys::spawn("uwarp-progress", move || background(&weak)))?;
        // Not before nothing can fail any more: a child must not close a number that is somebody else's by then.
        fork::track(engine.epoll.fd());
        fork::track(engine.wake.fd());
        engine.watchdog.track();
        // The first to set it is this.
        let _ = engine.background.set(thread);
        Ok(engine)
    }

    /// Registers a descriptor, edge-triggered for input, room and hang-up. If it is ready already, a call follows.
    pub fn register(&self, fd: RawFd, source: Arc<dyn Source>) -> io::Result<Token> {
        let token = self.insert(source, Some(fd));
        fork::track(fd);
        if let Err(e) = self.epoll.add(fd, token.0) {
            self.remove(token);
            return Err(e.into());
        }
        Ok(token)
    }

    /// A token for a source that has only a timer.
    pub fn new_token(&self, source: Arc<dyn Source>) -> Token {
        self.insert(source, None)
    }

    fn insert(&self, source: Arc<dyn Source>, fd: Option<RawFd>) -> Token {
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) as u32 & 0x7FFF_FFFF;
        let mut sources = self.sources.write();
        let entry = sources.vacant_entry();
        let token = Token::new(entry.key(), generation);
        entry.insert(Slot { token, source, fd });
        token
    }

    fn remove(&self, token: Token) -> Option<Slot> {
        let mut sources = self.sources.write();
        let slot = sources.get(token.index()).filter(|s| s.token == token).map(|_| token.index());
        let slot = slot.map(|index| sources.remove(index))?;
        if let Some(fd) = slot.fd {
            fork::untrack(fd);
        }
        Some(slot)
    }

    /// Forgets a source: before its descriptor is closed or handed on. No call begins after this returns; one that another
    /// thread has begun may still run.
    pub fn deregister(&self, token: Token) {
        let slot = self.remove(token);
        self.set_timer(token, None);
        if let Some(fd) = slot.and_then(|slot| slot.fd) {
            // Fails only when the descriptor is closed already, or parked.
            let _ = self.epoll.delete(fd);
        }
    }

    /// Another source takes over a token with its descriptor and timer. Calls to the old one that have begun may still run, and
    /// what they were told of the new one does not hear: it looks for itself first.
    pub(crate) fn replace(&self, token: Token, source: Arc<dyn Source>) {
        let mut sources = self.sources.write();
        let slot = sources.get_mut(token.index()).filter(|s| s.token == token);
        let old = slot.map(|slot| std::mem::replace(&mut slot.source, source));
        drop(sources);
        // What it owns may have locks of its own.
        drop(old);
    }

    /// Makes the system report a descriptor again that was left with work to do.
    pub fn rearm(&self, token: Token) {
        let fd = self.sources.read().get(token.index()).filter(|s| s.token == token).and_then(|s| s.fd);
        if let Some(fd) = fd {
            // Fails only when the descriptor is closed already, or parked: then it is looked at anyway.
            let _ = self.epoll.rearm(fd, token.0);
        }
    }

    /// Stops watching a descriptor whose owner polls it in earnest; refused unless the background thread stands back.
    pub(crate) fn park(&self, token: Token) -> Option<ParkMark> {
        // Asked at every poll of a thread in earnest, and mostly in vain at first.
        if !self.standing_back.load(Ordering::Relaxed) {
            return None;
        }
        let mut parked = self.parked.lock();
        if !parked.allowed {
            return None;
        }
        let sources = self.sources.read();
        let fd = sources.get(token.index()).filter(|s| s.token == token)?.fd?;
        self.epoll.delete(fd).ok()?;
        parked.tokens.push(token);
        Some(ParkMark(self.park_epoch.load(Ordering::Relaxed)))
    }

    /// Watches the parked descriptors again if there is one that nobody has polled since this was last asked: a thread may poll
    /// a queue pair in earnest, and then another one.
    pub(crate) fn unpark_forgotten(&self) {
        let tokens: smallvec::SmallVec<[Token; 4]> = self.parked.lock().tokens.iter().copied().collect();
        if tokens.into_iter().any(|token| self.find(token).is_some_and(|source| !source.polled())) {
            self.unpark();
        }
    }

    /// What a thread that polls sees to now and then in place of the background thread.
    pub(crate) fn look_after(&self) {
        self.unpark_forgotten();
        self.replace_lost_leader();
    }

    /// Whether a descriptor is still parked.
    pub(crate) fn is_parked(&self, mark: ParkMark) -> bool {
        self.park_epoch.load(Ordering::Relaxed) == mark.0
    }

    /// The background thread stands back or is about to return, which alone decides whether descriptors may be parked: while it
    /// sleeps on epoll, nobody would notice that polling has stopped.
    fn allow_parking(&self, allowed: bool) {
        self.parked.lock().allowed = allowed;
    }

    /// Watches all parked descriptors again; what they are ready for is reported anew.
    pub(crate) fn unpark(&self) {
        let mut parked = self.parked.lock();
        if parked.tokens.is_empty() {
            return;
        }
        self.park_epoch.fetch_add(1, Ordering::Relaxed);
        let sources = self.sources.read();
        for token in parked.tokens.drain(..) {
            if let Some(fd) = sources.get(token.index()).filter(|s| s.token == token).and_then(|s| s.fd)
                && let Err(e) = self.epoll.add(fd, token.0)
            {
                // It was watched before, so this takes a limit that others have used up meanwhile.
                tracing::error!("a connection cannot be watched any more: {e}");
            }
        }
    }

    /// Sets, moves or clears the timer of a source.
    pub fn set_timer(&self, token: Token, at: Option<Instant>) {
        let mut timers = self.timers.lock();
        let old = match at {
            Some(at) => timers.of.insert(token, at),
            None => timers.of.remove(&token),
        };
        if let Some(old) = old {
            timers.order.remove(&(old, token));
        }
        let Some(at) = at else { return };
        timers.order.insert((at, token));
        drop(timers);
        if self.nanos(at) < self.background_until.load(Ordering::SeqCst) {
            self.wake();
        }
    }

    /// Asks another thread to tell all sources that the process exits; says whether it has done so. To be called again until
    /// then. Takes no lock: the calling thread may have been stopped anywhere, by a signal whose handler exits.
    pub(crate) fn exit(&self) -> bool {
        let begun = self.exit.compare_exchange(RUNNING, EXIT_ASKED, Ordering::SeqCst, Ordering::SeqCst);
        if begun == Err(EXIT_BEGUN) {
            return true;
        }
        self.wake();
        // Another leader goes on, and would not be woken for its channel if nobody knew of it.
        if LEADS.with(Cell::get) {
            self.leader.store(NOBODY, Ordering::SeqCst);
        }
        self.watchdog.ring();
        if let Some(thread) = self.background.get() {
            thread.unpark();
        }
        false
    }

    /// Does what [`Self::exit`] asked for.
    fn exit_if_asked(&self) {
        if self.exit.compare_exchange(EXIT_ASKED, EXIT_BEGUN, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return;
        }
        self.unpark();
        let sources: Vec<_> = self.sources.read().iter().map(|(_, s)| s.source.clone()).collect();
        for source in sources {
            source.exit();
        }
    }

    /// Makes a waiting thread look around.
    pub fn wake(&self) {
        self.wake.ring();
    }

    fn nanos(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.start).as_nanos()).unwrap_or(ASIDE - 1)
    }

    /// A thread is polling in earnest: the background thread may stand back for a while. `waits`: it has just begun to wait, and
    /// most likely has some microseconds to spare.
    pub(crate) fn note_earnest(&self, waits: bool) {
        let now = self.nanos(sys::now());
        self.earnest.store(now, Ordering::Relaxed);
        self.watchdog.push(now, waits);
    }

    /// The polling is over as far as the caller is concerned: the sockets are the background thread's again, at once.
    pub(crate) fn hand_over(&self) {
        self.earnest.store(0, Ordering::SeqCst);
        if self.standing_back.load(Ordering::SeqCst) {
            self.watchdog.ring();
        }
    }

    /// How often something had waited for the background thread when it took over from threads that had ceased to poll.
    pub(crate) fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }

    /// The background thread sleeps as long as threads poll in earnest or lead one after the other. `nap`: and no longer than this.
    fn stand_back(&self, nap: Option<Duration>) {
        if self.is_led() {
            self.leave_timers_to_leader();
        }
        // Who polls for longer may take descriptors from the system: the watchdog sees to it that they come back.
        self.allow_parking(nap.is_none());
        self.standing_back.store(true, Ordering::SeqCst);
        // Looked at again: one who hands over now has not seen that anybody stands back.
        let last = self.earnest.load(Ordering::SeqCst);
        match nap {
            _ if last == 0 => {}
            Some(time) => self.watchdog.nap(time),
            None => self.watchdog.sleep(last, self.nanos(sys::now())),
        }
        self.standing_back.store(false, Ordering::SeqCst);
    }

    /// From now on the leader is woken for each new timer; it may not know of some that were set before.
    fn leave_timers_to_leader(&self) {
        if self.background_until.swap(ASIDE, Ordering::SeqCst) != ASIDE
            && !self.timers.lock().order.is_empty()
        {
            self.wake();
        }
    }

    fn polled_within(&self, span: Duration) -> bool {
        let last = self.earnest.load(Ordering::Relaxed);
        let now = self.nanos(sys::now());
        last != 0 && now.saturating_sub(last) < u64::try_from(span.as_nanos()).unwrap_or(0)
    }

    /// Serves what is ready now; says how many descriptors that were.
    pub fn poll_once(&self) -> usize {
        // Nobody hears of an interruption that kept nobody waiting.
        self.wait_once(Some(Duration::ZERO), false).map_or(0, |looked| looked.served)
    }

    /// Waits for something to be ready, at most until the next timer or `limit`, and serves it.
    fn wait_once(&self, limit: Option<Duration>, background: bool) -> Result<Looked, Errno> {
        let deadline = self.timers.lock().order.first().map(|(at, _)| *at);
        let mut timeout = limit;
        if let Some(at) = deadline {
            let left = at.saturating_duration_since(sys::now());
            timeout = Some(timeout.map_or(left, |t| t.min(left)));
        }
        if background {
            let until = timeout.map_or(FOREVER, |t| self.nanos(sys::now() + t));
            self.background_until.store(until, Ordering::SeqCst);
            // A timer set before the store was seen by nobody: look again.
            let first = self.timers.lock().order.first().map(|(at, _)| *at);
            if first != deadline {
                timeout = Some(Duration::ZERO);
            }
        }
        let mut looked = Looked::default();
        self.epoll.wait(timeout, |name, readiness| {
            let token = Token(name);
            if token == Token::WAKE {
                looked.woken = true;
                return;
            }
            looked.served += 1;
            looked.input |= readiness.readable;
            if let Some(source) = self.find(token) {
                source.ready(readiness);
            }
        })?;
        if deadline.is_some_and(|at| at <= sys::now()) {
            self.run_timers();
        }
        Ok(looked)
    }

    fn find(&self, token: Token) -> Option<Arc<dyn Source>> {
        self.sources.read().get(token.index()).filter(|s| s.token == token).map(|s| s.source.clone())
    }

    fn run_timers(&self) {
        let now = sys::now();
        loop {
            let mut timers = self.timers.lock();
            let Some(&(at, token)) = timers.order.first().filter(|(at, _)| *at <= now) else { return };
            timers.order.remove(&(at, token));
            timers.of.remove(&token);
            drop(timers);
            if let Some(source) = self.find(token) {
                source.timeout();
            }
        }
    }

    fn drain_wake(&self) {
        // Another thread may have been faster.
        self.wake.silence();
    }

    /// Becomes the one thread that sleeps here for a channel, for [`LEAD`] at most. `None`: another one does.
    pub(crate) fn lead(&self) -> Option<Leader<'_>> {
        let lead = self.leads.fetch_add(1, Ordering::Relaxed) + 1;
        self.leader.compare_exchange(NOBODY, lead, Ordering::SeqCst, Ordering::SeqCst).ok()?;
        self.led_since.store(self.nanos(sys::now()), Ordering::SeqCst);
        self.note_earnest(true);
        LEADS.with(|leads| leads.set(true));
        Some(Leader { engine: self, lead })
    }

    fn is_led(&self) -> bool {
        self.leader.load(Ordering::SeqCst) != NOBODY
    }

    /// Whether this lead has not ended.
    pub(crate) fn leads(&self, lead: u64) -> bool {
        self.leader.load(Ordering::SeqCst) == lead
    }

    /// The background thread keeps off while another one leads: a wake-up for each packet would cost more than it helps, the two would
    /// be in each other's way at the locks, and of two that wait for the same sockets the one that came last is woken. Says
    /// whether somebody leads.
    fn stand_aside(&self) -> bool {
        let lead = self.leader.load(Ordering::SeqCst);
        if lead == NOBODY {
            return false;
        }
        self.leave_timers_to_leader();
        if self.polled_within(LEADS_APART) {
            sys::park_timeout(NAP_ASIDE);
            return true;
        }
        self.aside.store(true, Ordering::SeqCst);
        let since = sys::now();
        while self.leads(lead) {
            let left = LOST.saturating_sub(sys::now().saturating_duration_since(since));
            if left.is_zero() {
                self.replace_leader(lead);
                break;
            }
            sys::park_timeout(left);
            guarded(|| self.exit_if_asked());
        }
        self.aside.store(false, Ordering::SeqCst);
        true
    }

    /// Threads that poll keep the background thread from waiting for the end of a lead, and may do so for ever.
    fn replace_lost_leader(&self) {
        let lead = self.leader.load(Ordering::SeqCst);
        if lead == NOBODY {
            return;
        }
        let since = self.led_since.load(Ordering::SeqCst);
        let age = self.nanos(sys::now()).saturating_sub(since);
        // Of another lead by now, at worst: harmless, as below.
        if age > u64::try_from(LOST.as_nanos()).unwrap_or(FOREVER) {
            self.replace_leader(lead);
        }
    }

    /// A thread has left its lead without a word: it jumped out of a signal's handler. What the system has told it is lost, so
    /// it is asked again about every descriptor. Harmless if the thread was only held up.
    fn replace_leader(&self, lead: u64) {
        if self.leader.compare_exchange(lead, NOBODY, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return;
        }
        self.led_since.store(FOREVER, Ordering::SeqCst);
        tracing::debug!("a thread that waited for connections has left; serving them here");
        let sources = self.sources.read();
        for (fd, token) in sources.iter().filter_map(|(_, slot)| Some((slot.fd?, slot.token))) {
            // Fails only when the descriptor is closed already, or parked: then it is looked at anyway.
            let _ = self.epoll.rearm(fd, token.0);
        }
    }
}

/// The right to sleep on the sockets in place of the background thread.
pub(crate) struct Leader<'a> {
    engine: &'a Engine,
    lead: u64,
}

impl Leader<'_> {
    /// Its number.
    pub(crate) fn lead(&self) -> u64 {
        self.lead
    }

    /// Nothing has come for a while: the sockets are the background thread's, at once.
    pub(crate) fn retire(self) {
        let engine = self.engine;
        drop(self);
        engine.hand_over();
        if let Some(thread) = engine.background.get() {
            thread.unpark();
        }
    }

    /// Sleeps until something was ready, and serves it; no longer than `limit`.
    pub(crate) fn wait(&self, limit: Option<Duration>) -> Result<(), Errno> {
        if self.engine.wait_once(limit, false)?.woken {
            self.engine.drain_wake();
            self.engine.exit_if_asked();
        }
        Ok(())
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        let engine = self.engine;
        // Before the next one says when it began.
        engine.led_since.store(FOREVER, Ordering::SeqCst);
        // What has come is the program's to handle, in peace; the background thread waits a little.
        engine.note_earnest(false);
        LEADS.with(|leads| leads.set(false));
        // Unless it was given up for lost.
        let _ = engine.leader.compare_exchange(self.lead, NOBODY, Ordering::SeqCst, Ordering::SeqCst);
        if engine.aside.load(Ordering::SeqCst)
            && let Some(thread) = engine.background.get()
        {
            thread.unpark();
        }
        // A wake-up for an early timer may have come here; the background thread, if it waits for the sockets, sleeps too long then.
        let until = engine.background_until.load(Ordering::SeqCst);
        if until != ASIDE {
            let first = engine.timers.lock().order.first().map(|(at, _)| *at);
            if first.is_some_and(|at| engine.nanos(at) < until) {
                engine.wake();
            }
        }
    }
}

/// The background thread: serves the program's peers while no thread of the program does.
fn background(engine: &Weak<Engine>) {
    fork::ask_for_short_slices();
    let mut naps = 0;
    while let Some(engine) = engine.upgrade() {
        if fork::forked() {
            return;
        }
        guarded(|| engine.exit_if_asked());
        if Config::get().spin {
            guarded(|| engine.poll_once());
            spin_loop();
            continue;
        }
        engine.replace_lost_leader();
        // Woken beside a thread that polls: every further wake-up would cost that thread a part of its latency.
        let nap = NAPS.get(naps).copied();
        if engine.polled_within(nap.unwrap_or(ALIVE)) {
            engine.stand_back(nap);
            naps = (naps + 1).min(NAPS.len());
            continue;
        }
        if naps > 0 {
            // Nobody polls any more, so nobody looks at the descriptors that were left to one who did.
            naps = 0;
            engine.allow_parking(false);
            engine.unpark();
            if let Some(Ok(Looked { input: true, .. })) =
                guarded(|| engine.wait_once(Some(Duration::ZERO), false))
            {
                engine.missed.fetch_add(1, Ordering::Relaxed);
            }
        }
        if engine.stand_aside() {
            continue;
        }
        let looked = guarded(|| engine.wait_once(None, true)).unwrap_or(Ok(Looked::default()));
        match looked.map(|looked| looked.woken) {
            Ok(false) => {}
            Ok(true) => {
                engine.drain_wake();
                if engine.is_led() {
                    // It may have been meant for the thread that is about to sleep here for a channel.
                    engine.wake();
                }
            }
            Err(Errno::INTR) => {}
            Err(e) => {
                tracing::error!("the progress thread cannot wait: {e}");
                sys::sleep(Duration::from_millis(10));
            }
        }
    }
}

/// Without this thread all connections would stand still for one that is broken.
fn guarded<T>(serve: impl FnOnce() -> T) -> Option<T> {
    // Locks are released on the way, and nothing but the failed source can be half changed.
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(serve));
    result
        .inspect_err(|_| tracing::error!("a panic while serving a connection; going on with the others"))
        .ok()
}
