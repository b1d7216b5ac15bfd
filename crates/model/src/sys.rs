//! A system for the model: threads that sleep, a clock that advances when all of them sleep, and descriptors
//! that become ready when a scenario says so. It has the interface of `uwarp-driver`'s `sys`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::{Condvar, Mutex};

use crate::source::{Interest, Readiness};

/// Every read of the clock takes this long, so that a thread that spins until a time reaches it.
const LOOK: Duration = Duration::from_micros(2);
/// One in this many clock reads and locks takes this long: another process had the processor, and the
/// thread's next step comes late.
const HELD_UP: (u32, Duration) = (64, Duration::from_micros(250));

static START: LazyLock<Instant> = LazyLock::new(Instant::now);
static EXECUTIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// All threads of an execution run on one system thread.
    static WORLD: RefCell<Option<Arc<World>>> = const { RefCell::new(None) };
}

struct World {
    execution: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    now: Duration,
    /// The scenario has ended, so all threads must end.
    over: bool,
    threads: usize,
    asleep: BTreeMap<u64, (Wait, Option<Duration>)>,
    last: u64,
    ended: Vec<u64>,
    /// Threads that were unparked.
    unparked: Vec<u64>,
    bells: BTreeMap<RawFd, bool>,
    /// When each timer expires or expired; `None`: not set yet.
    timers: BTreeMap<RawFd, Option<Duration>>,
    sockets: BTreeMap<RawFd, Readiness>,
    watches: BTreeMap<RawFd, BTreeMap<RawFd, Watched>>,
    flags: BTreeMap<u64, u64>,
    /// See [`busy`].
    late: Duration,
    /// See [`steady`].
    steady: bool,
    nonblocking: Vec<RawFd>,
}

struct Watched {
    name: u64,
    interest: Interest,
    /// `None`: a bell, which is level-triggered.
    news: Option<Readiness>,
}

#[derive(Debug, Clone, Copy)]
enum Wait {
    Bell(RawFd),
    Timers(RawFd, [RawFd; 2]),
    Watch(RawFd),
    Unpark(u64),
    End(u64),
    Count(u64, u64),
    Time,
}

impl State {
    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn is_over(&self, wait: Wait) -> bool {
        self.over
            || match wait {
                Wait::Bell(fd) => self.readable(fd),
                Wait::Timers(bell, _) => {
                    self.bells[&bell] || self.runs_out(wait).is_some_and(|at| at <= self.now)
                }
                Wait::Watch(fd) => self.readable(fd),
                Wait::Unpark(thread) => self.unparked.contains(&thread),
                Wait::End(thread) => self.ended.contains(&thread),
                Wait::Count(flag, n) => self.flags[&flag] >= n,
                Wait::Time => false,
            }
    }

    /// A bell, or a watch.
    fn readable(&self, fd: RawFd) -> bool {
        let Some(watch) = self.watches.get(&fd) else { return self.bells[&fd] };
        watch.iter().any(|(fd, w)| match w.news {
            Some(news) => news != Readiness::default(),
            None => self.bells[fd],
        })
    }

    /// When the first of the awaited timers expires, by their current settings.
    fn runs_out(&self, wait: Wait) -> Option<Duration> {
        let Wait::Timers(_, timers) = wait else { return None };
        timers.iter().filter_map(|fd| self.timers[fd]).min()
    }

    fn wakes(&self, wait: Wait, until: Option<Duration>) -> bool {
        self.is_over(wait) || until.is_some_and(|at| at <= self.now)
    }

    /// If all threads sleep, advances the clock to the first deadline.
    fn let_time_pass(&mut self) -> bool {
        if self.over
            || self.asleep.len() < self.threads
            || self.asleep.values().any(|(wait, until)| self.wakes(*wait, *until))
        {
            return false;
        }
        match self.asleep.values().filter_map(|(wait, until)| until.or(self.runs_out(*wait))).min() {
            Some(at) => self.now = at,
            None => {
                let who: Vec<_> = self.asleep.values().map(|(wait, _)| *wait).collect();
                self.over = true;
                panic!("all threads sleep for ever: {who:?}")
            }
        }
        true
    }

    fn news(&mut self, socket: RawFd, news: Readiness) {
        for watched in self.watches.values_mut().filter_map(|w| w.get_mut(&socket)) {
            if let Some(old) = &mut watched.news {
                old.readable |= news.readable;
                old.writable |= news.writable && watched.interest == Interest::InputAndRoom;
                old.hangup |= news.hangup;
            }
        }
    }
}

impl World {
    fn change<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        let result = f(&mut self.state.lock().unwrap());
        self.changed.notify_all();
        result
    }

    /// Sleeps. Returns whether the awaited event woke the thread.
    fn sleep(&self, wait: Wait, until: Option<Duration>) -> bool {
        let mut state = self.state.lock().unwrap();
        let me = state.number();
        state.asleep.insert(me, (wait, until));
        while !state.wakes(wait, until) {
            if state.let_time_pass() {
                self.changed.notify_all();
            } else {
                state = self.changed.wait(state).unwrap();
            }
        }
        state.asleep.remove(&me);
        state.is_over(wait)
    }
}

fn world() -> Arc<World> {
    WORLD.with_borrow(|world| world.clone().expect("within a scenario"))
}

/// Runs one execution of a scenario, with a world of its own.
pub fn execute(scenario: fn()) {
    let execution = EXECUTIONS.fetch_add(1, Ordering::Relaxed);
    let state = Mutex::new(State { threads: 1, ..State::default() });
    let world = Arc::new(World { execution, state, changed: Condvar::new() });
    WORLD.set(Some(world.clone()));
    scenario();
    world.change(|state| state.over = true);
}

pub fn execution() -> u64 {
    world().execution
}

pub fn over() -> bool {
    world().state.lock().unwrap().over
}

pub fn now() -> Instant {
    held_up();
    // This may wake other threads.
    let now = world().change(|state| {
        state.now += LOOK;
        state.now
    });
    *START + now
}

/// Gives other threads a turn before this one continues.
pub fn held_up() {
    if thread_rng().gen_ratio(1, HELD_UP.0) && !world().state.lock().unwrap().steady {
        world().change(|state| state.now += HELD_UP.1);
        shuttle::thread::yield_now();
    }
}

/// From now on no thread is held up by other processes.
pub fn steady() {
    world().change(|state| state.steady = true);
}

/// From now on, a thread that was woken from its sleep on a watch may run up to this much later.
pub fn busy(late: Duration) {
    world().change(|state| state.late = late);
}

fn run_late(world: &World) {
    let late = world.state.lock().unwrap().late;
    if !late.is_zero() && thread_rng().gen_bool(0.5) {
        sleep(late.mul_f64(thread_rng().gen_range(0.0..1.0)));
    }
}

fn from_now(limit: Duration) -> Duration {
    now().saturating_duration_since(*START) + limit
}

pub fn sleep(time: Duration) {
    world().sleep(Wait::Time, Some(from_now(time)));
}

shuttle::thread_local! {
    static ME: RefCell<Option<u64>> = RefCell::new(None);
}

fn me() -> u64 {
    ME.with(|me| *me.borrow_mut().get_or_insert_with(|| world().state.lock().unwrap().number()))
}

#[derive(Debug, Clone)]
pub struct Thread(u64);

impl Thread {
    pub fn unpark(&self) {
        world().change(|state| state.unparked.push(self.0));
    }

    pub fn join(self) {
        world().sleep(Wait::End(self.0), None);
    }
}

pub fn park() {
    park_until(None);
}

pub fn park_timeout(limit: Duration) {
    park_until(Some(from_now(limit)));
}

fn park_until(until: Option<Duration>) {
    let (world, me) = (world(), me());
    world.sleep(Wait::Unpark(me), until);
    world.change(|state| state.unparked.retain(|thread| *thread != me));
}

pub fn spawn(_: &str, run: impl FnOnce() + Send + 'static) -> io::Result<Thread> {
    let world = world();
    let number = world.change(|state| {
        state.threads += 1;
        state.number()
    });
    shuttle::thread::spawn(move || {
        ME.with(|me| *me.borrow_mut() = Some(number));
        run();
        world.change(|state| {
            state.threads -= 1;
            state.ended.push(number);
            state.let_time_pass();
        });
    });
    Ok(Thread(number))
}

/// Starts a thread of a scenario.
pub fn start(run: impl FnOnce() + Send + 'static) -> Thread {
    spawn("", run).unwrap()
}

fn descriptor() -> RawFd {
    world().change(State::number) as RawFd
}

pub struct Bell(RawFd);

impl Bell {
    pub fn new(_: bool) -> Result<Self, Errno> {
        let fd = descriptor();
        world().change(|state| state.bells.insert(fd, false));
        Ok(Self(fd))
    }

    pub fn fd(&self) -> RawFd {
        self.0
    }

    pub fn ring(&self) {
        world().change(|state| {
            state.bells.insert(self.0, true);
            state.news(self.0, Readiness { readable: true, ..Readiness::default() });
        });
    }

    pub fn silence(&self) {
        world().change(|state| state.bells.insert(self.0, false));
    }

    pub fn wait(fd: RawFd, limit: Option<Duration>) -> Result<(), Errno> {
        world().sleep(Wait::Bell(fd), limit.map(from_now));
        Ok(())
    }
}

pub struct Timer(RawFd);

impl Timer {
    pub fn new() -> Result<Self, Errno> {
        let fd = descriptor();
        world().change(|state| state.timers.insert(fd, None));
        Ok(Self(fd))
    }

    pub fn fd(&self) -> RawFd {
        self.0
    }

    pub fn set(&self, after: Duration) {
        let at = from_now(after);
        world().change(|state| state.timers.insert(self.0, Some(at)));
    }
}

pub fn wait_first(bell: &Bell, timers: Option<&[Timer; 2]>, limit: Option<Duration>) {
    let wait = match timers {
        Some([one, other]) => Wait::Timers(bell.0, [one.0, other.0]),
        None => Wait::Bell(bell.0),
    };
    world().sleep(wait, limit.map(from_now));
}

/// Sets `O_NONBLOCK`.
pub fn set_nonblocking(fd: RawFd) {
    world().change(|state| state.nonblocking.push(fd));
}

pub fn is_nonblocking(fd: RawFd) -> bool {
    world().state.lock().unwrap().nonblocking.contains(&fd)
}

/// Behaves as a program that polls the descriptor of a channel.
pub fn wait_readable(bell: RawFd) {
    world().sleep(Wait::Bell(bell), None);
}

/// Whether it can continue without waiting.
pub fn is_readable(bell: RawFd) -> bool {
    world().state.lock().unwrap().readable(bell)
}

/// Behaves as a program that polls the descriptor of an engine.
pub fn wait_watched(watch: RawFd, limit: Option<Duration>) {
    world().sleep(Wait::Watch(watch), limit.map(from_now));
}

pub struct Watch(RawFd);

impl Watch {
    pub fn new() -> Result<Self, Errno> {
        let fd = descriptor();
        world().change(|state| state.watches.insert(fd, BTreeMap::new()));
        Ok(Self(fd))
    }

    pub fn fd(&self) -> RawFd {
        self.0
    }

    pub fn add_bell(&self, bell: &Bell, name: u64) -> Result<(), Errno> {
        let watched = Watched { name, interest: Interest::Input, news: None };
        world().change(|state| state.watches.get_mut(&self.0).unwrap().insert(bell.fd(), watched));
        Ok(())
    }

    pub fn add_rings(&self, bell: &Bell, name: u64) -> Result<(), Errno> {
        world().change(|state| {
            let news = Readiness { readable: state.bells[&bell.fd()], ..Readiness::default() };
            let watched = Watched { name, interest: Interest::Input, news: Some(news) };
            state.watches.get_mut(&self.0).unwrap().insert(bell.fd(), watched);
            Ok(())
        })
    }

    pub fn add(&self, fd: RawFd, name: u64, interest: Interest) -> Result<(), Errno> {
        // In one step, as the system does it: no thread would learn of an event in between.
        world().change(|state| {
            let news = *state.sockets.get(&fd).ok_or(Errno::BADF)?;
            let watched = Watched { name, interest, news: Some(Readiness::default()) };
            state.watches.get_mut(&self.0).unwrap().insert(fd, watched);
            state.news(fd, news);
            Ok(())
        })
    }

    pub fn rearm(&self, fd: RawFd, _: u64, interest: Interest) -> Result<(), Errno> {
        world().change(|state| {
            let now = *state.sockets.get(&fd).ok_or(Errno::BADF)?;
            let watched = state.watches.get_mut(&self.0).unwrap().get_mut(&fd).ok_or(Errno::NOENT)?;
            watched.interest = interest;
            state.news(fd, now);
            Ok(())
        })
    }

    pub fn delete(&self, fd: RawFd) -> Result<(), Errno> {
        let old = world().change(|state| state.watches.get_mut(&self.0).unwrap().remove(&fd));
        old.map(|_| ()).ok_or(Errno::NOENT)
    }

    pub fn wait(
        &self,
        limit: Option<Duration>,
        mut tell: impl FnMut(u64, Readiness),
    ) -> Result<usize, Errno> {
        let world = world();
        let until = limit.map(from_now);
        loop {
            // Other threads may be faster.
            let may_sleep = limit != Some(Duration::ZERO);
            let ready = !may_sleep || world.sleep(Wait::Watch(self.0), until);
            if may_sleep {
                run_late(&world);
            }
            let told = world.change(|state| {
                let State { watches, bells, .. } = state;
                let mut told = Vec::new();
                for (fd, watched) in watches.get_mut(&self.0).unwrap() {
                    match &mut watched.news {
                        Some(news) if *news != Readiness::default() => {
                            told.push((watched.name, std::mem::take(news)));
                        }
                        None if bells[fd] => told.push((watched.name, Readiness::default())),
                        _ => {}
                    }
                }
                told
            });
            if told.is_empty() && ready && may_sleep && !over() {
                continue;
            }
            for (name, readiness) in &told {
                tell(*name, *readiness);
            }
            return Ok(told.len());
        }
    }
}

/// A connection. Only the amount of readable data matters.
#[derive(Clone)]
pub struct Socket(RawFd);

impl Socket {
    pub fn new() -> Self {
        let fd = descriptor();
        world().change(|state| state.sockets.insert(fd, Readiness::default()));
        Self(fd)
    }

    pub fn fd(&self) -> RawFd {
        self.0
    }

    /// Input arrives.
    pub fn arrive(&self) {
        world().change(|state| {
            let news = Readiness { readable: true, ..Readiness::default() };
            state.sockets.insert(self.0, news);
            state.news(self.0, news);
        });
    }

    /// Reads everything; returns whether there was something.
    pub fn read(&self) -> bool {
        world().change(|state| state.sockets.insert(self.0, Readiness::default()).unwrap().readable)
    }
}

/// Changes a socket's state in one step with what `change` does. It says which descriptors the socket has,
/// what they are ready for, and whether that is news.
pub fn update<T>(change: impl FnOnce() -> (T, Vec<RawFd>, Readiness, bool)) -> T {
    world().change(|state| {
        let (result, descriptors, now, news) = change();
        for fd in descriptors {
            state.sockets.insert(fd, now);
            if news {
                state.news(fd, now);
            }
        }
        result
    })
}

/// Counts events, for threads that wait for them.
#[derive(Clone)]
pub struct Count(u64);

impl Count {
    pub fn new() -> Self {
        world().change(|state| {
            let number = state.number();
            state.flags.insert(number, 0);
            Self(number)
        })
    }

    pub fn add(&self) {
        world().change(|state| *state.flags.get_mut(&self.0).unwrap() += 1);
    }

    pub fn get(&self) -> u64 {
        world().state.lock().unwrap().flags[&self.0]
    }

    pub fn wait(&self, n: u64) {
        world().sleep(Wait::Count(self.0, n), None);
    }
}
