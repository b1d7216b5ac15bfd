//! One epoll instance with what it watches, and its timers.
//!
//! `progress` decides which thread calls [`Engine::poll_once`] and which sleeps here.

use std::io;
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slab::Slab;
use uwarp_llp::carrier;

use crate::fork::{self, Birth, Uncancelled};
use crate::held::Held;
use crate::lost_leads::{self, LostLeads};
use crate::own_loops::OwnLoops;
use crate::progress::{
    Around, CurrentLead, CurrentMode, LEAD, LastPoll, Mode, NEVER, Nanos, Pace, in_background, nanos,
};
use crate::raised::{Asleep, Raised};
use crate::source::{Interest, Readiness, Source, Token};
use crate::sync::{AtomicBool, AtomicU8, AtomicU64, Mutex, OnceLock, Ordering, RwLock};
use crate::sys::{self, Bell, Thread, Watch};
use crate::timers::Timers;
use crate::watchdog::Watchdog;

// (The model includes this file by its path.)
#[path = "engine/beside.rs"]
mod beside;

struct Slot {
    token: Token,
    source: Arc<dyn Source>,
    reports: Reports,
    /// What else reports its descriptor: see [`Engine::watch_beside`].
    beside: Vec<Weak<Watch>>,
    /// These report room, too.
    room: bool,
    /// It is rung for what no descriptor reports.
    rung: bool,
}

/// How the engine learns that a source is ready.
#[derive(Clone, Copy)]
enum Reports {
    /// The system watches its descriptor: for what when the watch begins.
    System(RawFd, Interest),
    /// By [`Engine::raise`].
    Itself,
    /// By [`Engine::raise`]; the system reports input and the end of a descriptor beside it.
    Both(RawFd),
    /// It has only a timer.
    Never,
}

impl Slot {
    fn fd(&self) -> Option<RawFd> {
        match self.reports {
            Reports::System(fd, _) | Reports::Both(fd) => Some(fd),
            Reports::Itself | Reports::Never => None,
        }
    }
}

/// The engine of this process.
pub struct Engine {
    /// A forked child has no thread of it.
    pub(crate) birth: Birth,
    epoll: Watch,
    /// Level-triggered: makes one waiting thread look around.
    wake: Bell,
    sources: RwLock<Slab<Slot>, 27>,
    generation: AtomicU64,
    timers: Mutex<Timers, 29>,
    /// When the first timer expires, or [`NEVER`]; written under the lock. Threads that poll read it all the
    /// time, without a lock: a signal's handler may jump out of that.
    first: AtomicU64,
    start: Instant,
    /// The mode of the background thread.
    pub(crate) mode: CurrentMode,
    /// The thread of the program that sleeps here, if one does.
    pub(crate) lead: CurrentLead,
    /// Leads that were taken from their threads.
    pub(crate) lost_leads: LostLeads,
    pub(crate) last_poll: LastPoll,
    pub(crate) pace: Pace,
    /// When threads that are about to sleep look at all sockets.
    pub(crate) around: Around,
    pub(crate) watchdog: Watchdog,
    /// How often there was input when the background thread took the sockets back.
    missed: AtomicU64,
    pub(crate) background: OnceLock<Thread>,
    /// Descriptors that are not watched, because a thread that polls in earnest receives from them all the
    /// time. If they were watched, each packet would cost a wake-up of no thread, a good part of a
    /// microsecond.
    parked: Mutex<Vec<Token>, 25>,
    /// What threads of the program's loops have left to the background thread.
    pub(crate) left: Raised,
    /// What no descriptor reports, and the threads that would sleep over it.
    pub(crate) raised: Raised,
    pub(crate) asleep: Asleep,
    /// The lead of the event loop that has announced its sleep; 0: none.
    pub(crate) loop_asleep: AtomicU64,
    /// Datagrams that wait a moment for more.
    pub(crate) held: Arc<Held>,
    /// Changes whenever the parked descriptors are watched again.
    park_epoch: AtomicU64,
    exit: AtomicU8,
    /// See [`Engine::settle_by`].
    pub(crate) settle: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// The last lead was that of an event loop.
    pub(crate) loops: AtomicBool,
    /// The last sign of one, in [`Self::last_poll`].
    pub(crate) looped_at: AtomicU64,
    /// When a thread of an event loop that serves its own sockets last looked at all of them.
    looked_around: AtomicU64,
    /// What reports the bells to such a thread.
    home: Mutex<Weak<Watch>, 28>,
    pub(crate) own: OwnLoops,
}

/// Stages of [`Engine::request_exit`].
const RUNNING: u8 = 0;
const EXIT_REQUESTED: u8 = 1;
const EXIT_BEGUN: u8 = 2;

/// A mark that a descriptor is parked, valid until the next [`Engine::unpark`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ParkMark(u64);

/// The result of a look at the descriptors.
#[derive(Clone, Copy, Default)]
pub(crate) struct Looked {
    /// The wake descriptor was ready.
    pub woken: bool,
    /// Other descriptors that were ready and have been served, and sources that no descriptor reports, had
    /// something to do, and are not polled.
    pub served: usize,
    /// One of these had input, or one that is polled.
    pub input: bool,
    /// One of these that no descriptor reports had input.
    pub in_memory: bool,
}

impl Engine {
    /// An engine without its background thread.
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = Watch::new()?;
        let wake = Bell::new(true)?;
        epoll.add_bell(&wake, Token::WAKE.0)?;
        let engine = Self {
            birth: Birth::here(),
            epoll,
            wake,
            sources: RwLock::default(),
            generation: AtomicU64::new(1),
            timers: Mutex::default(),
            first: AtomicU64::new(NEVER),
            start: sys::now(),
            mode: CurrentMode::new(),
            lead: CurrentLead::new(),
            lost_leads: LostLeads::default(),
            last_poll: LastPoll::new(),
            pace: Pace::new(),
            around: Around::new(),
            watchdog: Watchdog::new()?,
            missed: AtomicU64::new(0),
            background: OnceLock::new(),
            parked: Mutex::default(),
            left: Raised::default(),
            raised: Raised::default(),
            asleep: Asleep::default(),
            loop_asleep: AtomicU64::new(0),
            held: Arc::new(Held::new()),
            park_epoch: AtomicU64::new(1),
            exit: AtomicU8::new(RUNNING),
            settle: OnceLock::new(),
            loops: AtomicBool::new(false),
            looped_at: AtomicU64::new(0),
            looked_around: AtomicU64::new(0),
            home: Mutex::default(),
            own: OwnLoops::default(),
        };
        engine.held.set_token(engine.new_token(engine.held.clone()));
        Ok(engine)
    }

    /// The epoll instance.
    pub(crate) fn epoll_fd(&self) -> RawFd {
        self.epoll.fd()
    }

    /// Makes a forked child close its copies of the engine's descriptors.
    pub(crate) fn track(&self) {
        fork::track(self.epoll.fd());
        fork::track(self.wake.fd());
        self.watchdog.track();
    }

    /// Registers a descriptor, edge-triggered for input, room and hang-up. If it is ready already, the source
    /// is called soon.
    pub fn register(&self, fd: RawFd, source: Arc<dyn Source>) -> io::Result<Token> {
        self.register_for(fd, source, Interest::InputAndRoom)
    }

    /// As [`Self::register`], but room is reported only after [`Self::rearm`], until
    /// [`Self::ignore_room`] or the next parking. For UDP: the system reports room after each datagram that
    /// leaves the socket's queue, also if there was room all the time. TCP reports it only after a send that
    /// found none.
    pub fn register_input(&self, fd: RawFd, source: Arc<dyn Source>) -> io::Result<Token> {
        self.register_for(fd, source, Interest::Input)
    }

    /// Registers what reports in this way. A source that reports itself is not ready before it is
    /// [raised](Self::raise).
    pub fn register_watch(&self, watch: carrier::Watch<'_>, source: Arc<dyn Source>) -> io::Result<Token> {
        match watch {
            carrier::Watch::Descriptor(fd) => self.register(fd.as_raw_fd(), source),
            carrier::Watch::Itself => Ok(self.insert(source, Reports::Itself)),
            carrier::Watch::Both(fd) => {
                let fd = fd.as_raw_fd();
                self.watched(fd, source, Reports::Both(fd), Interest::Input)
            }
        }
    }

    pub(crate) fn register_for(
        &self,
        fd: RawFd,
        source: Arc<dyn Source>,
        interest: Interest,
    ) -> io::Result<Token> {
        self.watched(fd, source, Reports::System(fd, interest), interest)
    }

    fn watched(
        &self,
        fd: RawFd,
        source: Arc<dyn Source>,
        reports: Reports,
        interest: Interest,
    ) -> io::Result<Token> {
        let token = self.insert(source, reports);
        fork::track(fd);
        if let Err(e) = self.epoll.add(fd, token.0, interest) {
            self.remove(token);
            return Err(e.into());
        }
        Ok(token)
    }

    /// A token for a source that has only a timer.
    pub fn new_token(&self, source: Arc<dyn Source>) -> Token {
        self.insert(source, Reports::Never)
    }

    fn insert(&self, source: Arc<dyn Source>, reports: Reports) -> Token {
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) as u32 & 0x7FFF_FFFF;
        let mut sources = self.sources.write();
        let entry = sources.vacant_entry();
        let token = Token::new(entry.key(), generation);
        entry.insert(Slot { token, source, reports, beside: Vec::new(), room: false, rung: false });
        token
    }

    fn remove(&self, token: Token) -> Option<Slot> {
        let mut sources = self.sources.write();
        let slot = sources.get(token.index()).filter(|s| s.token == token).map(|_| token.index());
        let slot = slot.map(|index| sources.remove(index))?;
        if let Some(fd) = slot.fd() {
            fork::untrack(fd);
        }
        Some(slot)
    }

    /// Forgets a source, before its descriptor is closed or passed on. No call to it begins after this
    /// returns; a call that another thread has begun may still run.
    pub fn deregister(&self, token: Token) {
        let slot = self.remove(token);
        self.set_timer(token, None);
        if let Some((slot, fd)) = slot.and_then(|slot| slot.fd().map(|fd| (slot, fd))) {
            // Fails only when the descriptor is closed already, or parked.
            let _ = self.epoll.delete(fd);
            slot.beside().for_each(|watch| _ = watch.delete(fd));
        }
    }

    /// Another source takes over a token with its descriptor and timer. Calls to the old source that have
    /// begun may still run, and the new source does not see what they reported: it checks its descriptor
    /// itself first.
    pub(crate) fn replace(&self, token: Token, source: Arc<dyn Source>) {
        let mut sources = self.sources.write();
        let slot = sources.get_mut(token.index()).filter(|s| s.token == token);
        let old = slot.map(|slot| std::mem::replace(&mut slot.source, source));
        drop(sources);
        // The source may own things with locks of their own.
        drop(old);
    }

    /// Makes the system report a descriptor again, for input and for room: its owner left work undone.
    pub fn rearm(&self, token: Token) {
        self.watch_for(token, Interest::InputAndRoom);
    }

    /// Ends reports of room for a descriptor registered with [`Self::register_input`]. What it is ready for
    /// is reported again, except room.
    pub(crate) fn ignore_room(&self, token: Token) {
        self.watch_for(token, Interest::Input);
    }

    fn watch_for(&self, token: Token, interest: Interest) {
        // Locked until the system has been told: the owner deregisters the descriptor and closes it, and its
        // number may be that of another one then.
        let sources = self.sources.read();
        let Some(slot) = sources.get(token.index()).filter(|s| s.token == token) else { return };
        match slot.reports {
            // Fails only if the descriptor is closed already, or parked: then it is polled anyway.
            Reports::System(fd, _) => _ = self.epoll.rearm(fd, token.0, interest),
            Reports::Itself | Reports::Both(_) => self.raise(token, Readiness::ANY),
            Reports::Never => {}
        }
        let beside = !slot.beside.is_empty();
        drop(sources);
        if beside {
            self.report_beside(token, interest);
        }
    }

    /// Stops watching a descriptor whose owner polls it in earnest; refused unless the background thread
    /// stands back.
    #[inline]
    pub(crate) fn park(&self, token: Token) -> Option<ParkMark> {
        // Called at every poll of a thread in earnest, and usually refused at first.
        if self.mode.glance().allows_parking() { self.park_now(token) } else { None }
    }

    fn park_now(&self, token: Token) -> Option<ParkMark> {
        let mut parked = self.parked.lock();
        // Checked again with the lock: the background thread leaves that mode before it takes the lock to
        // watch the parked descriptors.
        if !self.mode.glance().allows_parking() {
            return None;
        }
        let sources = self.sources.read();
        let reports = sources.get(token.index()).filter(|s| s.token == token)?.reports;
        let Reports::System(fd, _) = reports else { return None };
        self.epoll.delete(fd).ok()?;
        parked.push(token);
        Some(ParkMark(self.park_epoch.load(Ordering::Relaxed)))
    }

    /// Watches the parked descriptors again if one of them has not been polled since the last call: a thread
    /// may poll one queue pair in earnest, and later another one.
    pub(crate) fn unpark_forgotten(&self) {
        let tokens: smallvec::SmallVec<[Token; 4]> = self.parked.lock().iter().copied().collect();
        if tokens.into_iter().any(|token| self.find(token).is_some_and(|source| !source.polled())) {
            self.unpark();
        }
    }

    /// Whether a descriptor is still parked.
    pub(crate) fn is_parked(&self, mark: ParkMark) -> bool {
        self.park_epoch.load(Ordering::Relaxed) == mark.0
    }

    /// Watches all parked descriptors again; the system reports anew what they are ready for.
    pub(crate) fn unpark(&self) {
        let mut parked = self.parked.lock();
        if parked.is_empty() {
            return;
        }
        self.park_epoch.fetch_add(1, Ordering::Relaxed);
        let sources = self.sources.read();
        for token in parked.drain(..) {
            if let Some(slot) = sources.get(token.index()).filter(|s| s.token == token)
                && let Reports::System(fd, interest) = slot.reports
                && let Err(e) = self.epoll.add(fd, token.0, interest)
            {
                // It was watched before, so another use has reached a limit of the system meanwhile.
                tracing::error!("cannot watch a connection any more: {e}");
            }
        }
    }

    /// Sets, moves or clears the timer of a source.
    pub fn set_timer(&self, token: Token, at: Option<Instant>) {
        let at = at.map(|at| self.nanos(at));
        let mut timers = self.timers.lock();
        match at {
            Some(at) => timers.set(token, at),
            None => timers.clear(token),
        }
        self.note_first(&timers);
        drop(timers);
        let Some(at) = at else { return };
        // A thread that polls checks the timers itself, and so does a thread that begins to lead or to serve
        // after this; the background thread does before it sleeps again.
        let oversleeps = match self.mode.get() {
            Mode::Serving { until } => at < until && !in_background(),
            _ => self.is_led() && self.within_a_lead(at),
        };
        if oversleeps {
            self.wake();
        }
    }

    #[cfg(test)]
    pub(crate) fn sources_registered(&self) -> usize {
        self.sources.read().len()
    }

    /// When the first timer expires; [`NEVER`] if none is set.
    pub(crate) fn first_timer(&self) -> Nanos {
        self.first.load(Ordering::SeqCst)
    }

    /// The timers have changed.
    fn note_first(&self, timers: &Timers) {
        let first = timers.first();
        if self.first.load(Ordering::Relaxed) != first {
            self.first.store(first, Ordering::SeqCst);
        }
    }

    /// Whether a leader that sleeps now may wake too late for a timer. It looks at the timers before each
    /// sleep, and a sleep lasts little longer than [`LEAD`]. Later timers need no wake-up: connection set-up
    /// sets several, all of seconds.
    pub(crate) fn within_a_lead(&self, at: Nanos) -> bool {
        at != NEVER && at < self.now() + nanos(LEAD * 2)
    }

    /// Wakes a thread that can do what the exit requests; returns whether one has begun. Takes no lock.
    pub(crate) fn request_exit(&self) -> bool {
        let begun = self.exit.compare_exchange(RUNNING, EXIT_REQUESTED, Ordering::SeqCst, Ordering::SeqCst);
        if begun == Err(EXIT_BEGUN) {
            return true;
        }
        self.wake();
        self.watchdog.ring();
        self.unpark_background();
        false
    }

    /// Wakes the background thread if it waits for a lead to end.
    pub(crate) fn unpark_background(&self) {
        if let Some(thread) = self.background.get() {
            thread.unpark();
        }
    }

    /// Does what [`Self::request_exit`] requested.
    pub(crate) fn exit_if_requested(&self) {
        if self.exit.load(Ordering::SeqCst) == EXIT_REQUESTED {
            // Before the thread that exits hears that it may go on.
            self.held.send();
        }
        let begins =
            self.exit.compare_exchange(EXIT_REQUESTED, EXIT_BEGUN, Ordering::SeqCst, Ordering::SeqCst);
        if begins.is_err() {
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

    /// Converts a time to the engine's clock.
    pub(crate) fn nanos(&self, at: Instant) -> Nanos {
        nanos(at.saturating_duration_since(self.start))
    }

    /// The time that is `nanos` by the engine's clock.
    pub(crate) fn instant(&self, nanos: Nanos) -> Instant {
        self.start + Duration::from_nanos(nanos)
    }

    /// The time by the engine's clock.
    pub(crate) fn now(&self) -> Nanos {
        self.nanos(sys::now())
    }

    /// A thread polls in earnest: the background thread may stand back for a while. `waits`: the thread has
    /// just begun to wait, and most likely has some microseconds to spare.
    pub(crate) fn note_earnest(&self, waits: bool) {
        self.note_earnest_at(self.now(), waits);
    }

    /// When an event loop of the program last began to wait.
    pub(crate) fn looped_at(&self) -> Nanos {
        self.looped_at.load(Ordering::Relaxed)
    }

    /// Whether the last sign of the program was a thread that polls, and not an event loop.
    pub(crate) fn polls_last(&self) -> bool {
        self.last_poll.get().is_some_and(|last| last != self.looped_at.load(Ordering::Relaxed))
    }

    pub(crate) fn note_earnest_at(&self, now: Nanos, waits: bool) {
        self.last_poll.stamp(now);
        self.watchdog.push(now, waits, || self.pace.spans());
    }

    /// A thread that polls in earnest has messages to send, and polls again soon.
    pub(crate) fn note_posts(&self) {
        self.note_earnest_at(self.now(), false);
    }

    /// The caller stops polling: the background thread gets the sockets at once.
    pub(crate) fn hand_over(&self) {
        self.last_poll.hand_over();
        if self.mode.get().heeds_hand_over() {
            self.watchdog.ring();
        }
    }

    /// The caller waits elsewhere for what only the background thread brings. That one would sleep on beside
    /// a loop of the program that serves its own sockets, or did so before it had others to wait for.
    pub(crate) fn hand_over_from_loops(&self) {
        self.hand_over();
        if self.loops.load(Ordering::Relaxed) && !self.is_led() {
            self.loops.store(false, Ordering::Relaxed);
            if self.mode.get() == Mode::BesideLeads {
                self.unpark_background();
            }
        }
    }

    /// How often there was input when the background thread took the sockets back from threads that had
    /// stopped polling.
    pub(crate) fn missed(&self) -> u64 {
        self.missed.load(Ordering::Relaxed)
    }

    pub(crate) fn note_missed(&self) {
        self.missed.fetch_add(1, Ordering::Relaxed);
    }

    /// How long so many empty polls take here, as far as that is known.
    pub fn time_of_polls(&self, polls: u32) -> Duration {
        self.pace.spans().polls(polls)
    }

    /// Whether a thread of the program sleeps here for a channel.
    pub(crate) fn is_led(&self) -> bool {
        self.lead.get().is_some()
    }

    /// Serves what is ready now; returns the number of descriptors, and of sources in memory that had
    /// something to do and that no thread polls.
    pub fn poll_once(&self) -> usize {
        // EINTR on a wait without timeout is harmless.
        self.wait_once(Some(Duration::ZERO)).map_or(0, |looked| looked.served)
    }

    /// Waits for something to be ready, at most until the next timer or `limit`, and serves it.
    pub(crate) fn wait_once(&self, limit: Option<Duration>) -> Result<Looked, Errno> {
        let deadline = self.first_timer();
        self.wait_until(deadline, limit)
    }

    /// As [`Self::wait_once`], for a caller that has read the first timer.
    pub(crate) fn wait_until(&self, deadline: Nanos, limit: Option<Duration>) -> Result<Looked, Errno> {
        let mut timeout = limit;
        if timeout != Some(Duration::ZERO) && deadline != NEVER {
            let left = Duration::from_nanos(deadline.saturating_sub(self.now()));
            timeout = Some(limit.map_or(left, |limit| limit.min(left)));
        }
        let mut looked = Looked::default();
        if self.left.any() {
            (looked.served, looked.input) = self.serve_left();
        }
        let mut sleeper = None;
        if timeout != Some(Duration::ZERO) {
            let (asleep, may) = self.while_asleep();
            sleeper = Some(asleep);
            if !may {
                timeout = Some(Duration::ZERO);
            }
        }
        // What is served closes descriptors, reads and logs through the C library. A thread that polls must
        // not be cancelled there (pthreads(7)).
        let mut uncancelled = None;
        self.epoll.wait(timeout, |name, readiness| {
            sleeper = None;
            let token = Token(name);
            if token == Token::WAKE {
                looked.woken = true;
                return;
            }
            uncancelled.get_or_insert_with(Uncancelled::begin);
            looked.served += 1;
            looked.input |= readiness.readable;
            if let Some(source) = self.find(token) {
                source.ready(readiness);
            }
        })?;
        drop(sleeper);
        if self.raised.maybe() {
            let (served, input) = self.serve_raised();
            looked.served += served;
            looked.input |= input;
            looked.in_memory = input;
        }
        if deadline != NEVER {
            let now = self.now();
            if deadline <= now {
                uncancelled.get_or_insert_with(Uncancelled::begin);
                self.run_timers(now);
            }
        }
        Ok(looked)
    }

    pub(crate) fn find(&self, token: Token) -> Option<Arc<dyn Source>> {
        self.sources.read().get(token.index()).filter(|s| s.token == token).map(|s| s.source.clone())
    }

    /// Whether there is such a source. (Unlike [`Self::find`], the caller never drops one.)
    pub(crate) fn knows(&self, token: Token) -> bool {
        self.sources.read().get(token.index()).is_some_and(|s| s.token == token)
    }

    /// Calls the sources whose timers have expired.
    fn run_timers(&self, now: Nanos) {
        while self.first_timer() <= now {
            let mut timers = self.timers.lock();
            let Some(token) = timers.take_expired(now) else { return };
            self.note_first(&timers);
            drop(timers);
            if let Some(source) = self.find(token) {
                source.timeout();
            }
        }
    }

    /// The bell has woken this thread. It is not silenced if it may be meant for a thread that has not run
    /// since.
    pub(crate) fn take_wake(&self) {
        if self.lost_leads.any() {
            self.wake();
            sys::sleep(lost_leads::NAP);
        } else {
            // Another thread may have silenced it first.
            self.wake.silence();
            // It may have rung again, for another thread that sleeps, since this one looked.
            self.settling(|| self.look_once());
        }
    }

    /// Makes the system report again what every descriptor is ready for: a thread has left without handling
    /// what was reported to it.
    pub(crate) fn rearm_all(&self) {
        for (_, slot) in self.sources.read().iter() {
            match slot.reports {
                // Fails only if the descriptor is closed already, or parked: then it is polled anyway.
                Reports::System(fd, _) => _ = self.epoll.rearm(fd, slot.token.0, Interest::InputAndRoom),
                Reports::Itself => self.raise(slot.token, Readiness::ANY),
                Reports::Both(fd) => {
                    let _ = self.epoll.rearm(fd, slot.token.0, Interest::Input);
                    self.raise(slot.token, Readiness::ANY);
                }
                Reports::Never => {}
            }
        }
    }
}
