//! Which thread makes progress, and how threads hand this over: the real engine and its channels, over
//! simulated sockets.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use shuttle::rand::Rng;

use crate::background;
use crate::carrier::Watch;
use crate::channel::Channel;
use crate::engine::Engine;
use crate::event_loop::Sleep;
use crate::progress::LEAD;
use crate::raised::Look;
use crate::source::{Readiness, Source, Token};
use crate::sync::{AtomicBool, AtomicUsize, Mutex, Ordering};
use crate::sys::{self, Count, Socket, Thread, start};

/// A connection. The thread that makes progress reads its input; each read that finds something raises an
/// event.
struct Probe {
    socket: Socket,
    read: Count,
    timed: Count,
    at: Mutex<Option<Instant>, 30>,
    exits: Count,
    channel: Option<Arc<Channel>>,
}

impl Probe {
    fn new(engine: &Engine, channel: Option<Arc<Channel>>) -> (Arc<Self>, Token) {
        let (socket, read, timed, exits) = (Socket::new(), Count::new(), Count::new(), Count::new());
        let probe = Arc::new(Self { socket, read, timed, at: Mutex::new(None), exits, channel });
        let token = engine.register(probe.socket.fd(), probe.clone()).unwrap();
        (probe, token)
    }

    fn look(&self) {
        if self.socket.read() {
            self.read.add();
            if let Some(channel) = &self.channel {
                channel.push(7);
            }
        }
    }
}

impl Source for Probe {
    fn ready(&self, _: Readiness) {
        self.look();
    }

    fn timeout(&self) {
        *self.at.lock() = Some(sys::now());
        self.timed.add();
    }

    fn exit(&self) {
        self.exits.add();
    }
}

/// A connection through memory: nothing of it is a descriptor.
struct Lane {
    input: AtomicBool,
    read: Count,
    channel: Option<Arc<Channel>>,
}

impl Lane {
    fn new(engine: &Engine, channel: Option<Arc<Channel>>) -> (Arc<Self>, Token) {
        let lane = Arc::new(Self { input: AtomicBool::new(false), read: Count::new(), channel });
        let token = engine.register_watch(Watch::Itself, lane.clone()).unwrap();
        (lane, token)
    }

    fn arrive(&self, engine: &Engine, token: Token) {
        self.input.store(true, Ordering::SeqCst);
        engine.raise(token, Readiness { readable: true, ..Readiness::default() });
    }
}

impl Source for Lane {
    fn ready(&self, _: Readiness) {
        if self.input.swap(false, Ordering::SeqCst) {
            self.read.add();
            if let Some(channel) = &self.channel {
                channel.push(7);
            }
        }
    }

    fn timeout(&self) {}
}

/// A lower layer in memory that raises nothing: a look finds what is ready, and its peer wakes only threads
/// whose sleep was announced.
struct Lanes {
    lane: Arc<Lane>,
    token: Token,
    ready: AtomicBool,
    asleep: AtomicUsize,
}

impl Lanes {
    fn new(engine: &Engine, channel: Option<Arc<Channel>>) -> Arc<Self> {
        let (lane, token) = Lane::new(engine, channel);
        let (ready, asleep) = (AtomicBool::new(false), AtomicUsize::new(0));
        let lanes = Arc::new(Self { lane, token, ready, asleep });
        engine.add_look(lanes.clone());
        lanes
    }

    fn arrive(&self, engine: &Engine) {
        self.lane.input.store(true, Ordering::SeqCst);
        self.ready.store(true, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) > 0 {
            engine.wake();
        }
    }
}

impl Look for Lanes {
    fn sleep_begins(&self) {
        self.asleep.fetch_add(1, Ordering::SeqCst);
    }

    fn sleep_ends(&self) {
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }

    fn harvest(&self, raise: &mut dyn FnMut(Token, Readiness)) {
        if self.ready.swap(false, Ordering::SeqCst) {
            raise(self.token, Readiness { readable: true, ..Readiness::default() });
        }
    }
}

fn get(channel: &Channel) {
    assert_eq!(channel.get(), Ok(7));
}

/// Sleeps for a random time, so that what follows comes before, during or after the short polling of a thread
/// that begins to block, or the background thread's first naps.
fn at_any_moment() {
    sys::sleep(Duration::from_micros(shuttle::rand::thread_rng().gen_range(0..400)));
}

/// Threads that block on their own channels get their events, whichever of them sleeps on the sockets.
pub fn blocked_threads_are_woken() {
    let engine = background::start().unwrap();
    let sides = [0, 1].map(|_| {
        let channel = Channel::new(&engine).unwrap();
        (Probe::new(&engine, Some(channel.clone())).0, channel)
    });
    let threads = sides.clone().map(|(_, channel)| start(move || get(&channel)));
    let [(one, _), (other, _)] = sides;
    let peer = start(move || one.socket.arrive());
    other.socket.arrive();
    peer.join();
    threads.into_iter().for_each(Thread::join);
}

/// Two threads wait on one channel. The one that sleeps on the sockets may find more events than it takes
/// itself.
pub fn events_at_the_same_time_wake_all_blocked_threads() {
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let [one, other] = [0, 1].map(|_| Probe::new(&engine, Some(channel.clone())).0);
    let threads = [0, 1].map(|_| {
        let channel = channel.clone();
        start(move || get(&channel))
    });
    at_any_moment();
    one.socket.arrive();
    other.socket.arrive();
    threads.into_iter().for_each(Thread::join);
    assert!(channel.is_empty());
}

/// When the thread that slept on the sockets has left, the background thread serves the input, soon or later.
pub fn input_after_a_leader_is_served() {
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let (probe, _) = Probe::new(&engine, Some(channel.clone()));
    let program = start(move || get(&channel));
    // As long as the background thread takes until it sleeps without a timer, or less, or more.
    sys::sleep(Duration::from_micros(4900 + shuttle::rand::thread_rng().gen_range(0..500)));
    probe.socket.arrive();
    probe.read.wait(1);
    probe.socket.arrive();
    probe.read.wait(2);
    program.join();
    probe.socket.arrive();
    probe.read.wait(3);
}

/// A connection whose events are lost when the thread that received them leaves.
struct Forgotten {
    probe: Arc<Probe>,
    leaves: Mutex<bool, 30>,
}

impl Source for Forgotten {
    fn ready(&self, _: Readiness) {
        if !*self.leaves.lock() {
            self.probe.look();
        }
    }

    fn timeout(&self) {}
}

/// A thread jumps out of the call in which it sleeps on the sockets, and never returns. The events that it
/// received, and later events, are still served.
pub fn input_after_a_leader_that_never_returned_is_served() {
    let engine = background::start().unwrap();
    let (later, _) = Probe::new(&engine, None);
    let (probe, token) = Probe::new(&engine, None);
    let forgotten = Arc::new(Forgotten { probe: probe.clone(), leaves: Mutex::new(false) });
    engine.replace(token, forgotten.clone());
    let jumps = {
        let (engine, forgotten) = (engine.clone(), forgotten.clone());
        start(move || {
            let Some(leader) = engine.lead() else { return };
            *forgotten.leaves.lock() = true;
            let _ = leader.wait(Some(Duration::from_millis(1)));
            std::mem::forget(leader);
            *forgotten.leaves.lock() = false;
        })
    };
    at_any_moment();
    probe.socket.arrive();
    jumps.join();
    later.socket.arrive();
    later.read.wait(1);
    probe.read.wait(1);
}

/// A thread that blocks in a call is assumed to be gone, because the machine is so busy that it does not run
/// in time. It still gets its event.
pub fn a_delayed_leader_gets_its_event() {
    sys::busy(Duration::from_millis(200));
    let engine = background::start().unwrap();
    let sides = [0, 1].map(|_| Channel::new(&engine).unwrap());
    let threads = sides.clone().map(|channel| start(move || get(&channel)));
    for channel in sides {
        sys::sleep(Duration::from_micros(shuttle::rand::thread_rng().gen_range(0..300_000)));
        channel.push(7);
    }
    threads.into_iter().for_each(Thread::join);
}

/// A thread that blocks in a call does not sleep on the sockets for long if nothing arrives, whatever the
/// background thread does when it begins, and although another thread polls. Later input is served and wakes
/// it.
pub fn a_thread_that_waits_without_input_is_dismissed() {
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let (probe, _) = Probe::new(&engine, Some(channel.clone()));
    let (other, token) = Probe::new(&engine, None);
    let poller = poller(&engine, &other, token);
    if shuttle::rand::thread_rng().gen_bool(0.5) {
        // Wakes the background thread, which then stands back.
        other.socket.arrive();
    }
    at_any_moment();
    let blocked = {
        let channel = channel.clone();
        start(move || get(&channel))
    };
    poller.join();
    sys::sleep(Duration::from_millis(30));
    assert!(!engine.is_led());
    probe.socket.arrive();
    blocked.join();
    probe.socket.arrive();
    probe.read.wait(2);
}

/// If a thread is cancelled when it is about to take an event, another thread gets the event.
pub fn an_event_that_one_thread_leaves_is_taken_by_another() {
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let (probe, _) = Probe::new(&engine, Some(channel.clone()));
    let cancelled = {
        let channel = channel.clone();
        start(move || {
            let _ = channel.attend(None);
            channel.abandon();
        })
    };
    at_any_moment();
    probe.socket.arrive();
    sys::wait_readable(channel.fd());
    get(&channel);
    cancelled.join();
}

/// The same with two threads on one channel and with events from other threads of the program.
pub fn events_of_other_threads_wake_blocked_threads() {
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let threads = [0, 1].map(|_| {
        let channel = channel.clone();
        start(move || get(&channel))
    });
    let other = {
        let channel = channel.clone();
        start(move || channel.push(7))
    };
    channel.push(7);
    other.join();
    threads.into_iter().for_each(Thread::join);
    assert!(channel.is_empty());
}

/// An object is destroyed with its events while other events are queued and taken. Each of its events is
/// either taken or counted as removed (destruction waits for the taken ones), no other event is lost, and the
/// descriptor shows whether there is an event.
pub fn destroying_an_object_removes_only_its_own_events() {
    const GOES: u64 = 8;
    const EVENTS: usize = 3;
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let (probe, _) = Probe::new(&engine, Some(channel.clone()));
    let (taken, removed) = (Count::new(), Count::new());
    let threads = [0, 1].map(|_| {
        let (channel, taken) = (channel.clone(), taken.clone());
        start(move || {
            while channel.get() == Ok(GOES) {
                taken.add();
            }
        })
    });
    let peer = {
        let channel = channel.clone();
        start(move || (0..EVENTS).for_each(|_| channel.push(GOES)))
    };
    let destroyer = {
        let (channel, removed) = (channel.clone(), removed.clone());
        start(move || (0..2).for_each(|_| (0..channel.remove(GOES)).for_each(|_| removed.add())))
    };
    probe.socket.arrive();
    channel.push(7);
    threads.into_iter().for_each(Thread::join);
    peer.join();
    destroyer.join();
    let left = channel.remove(GOES) as u64;
    assert_eq!(taken.get() + removed.get() + left, EVENTS as u64);
    assert!(channel.is_empty() && !sys::is_readable(channel.fd()));
    channel.push(GOES);
    channel.push(7);
    assert_eq!(channel.remove(GOES), 1);
    assert!(sys::is_readable(channel.fd()), "one event is left");
}

/// A timer that is set while a thread leads, begins to lead or stops leading, expires in time although
/// another one expires much later.
pub fn a_timer_set_at_any_moment_expires_in_time() {
    const SOON: Duration = Duration::from_secs(1);
    const LATE: Duration = Duration::from_secs(100);
    // Naps, consecutive leads, and clock reads.
    const SLACK: Duration = Duration::from_millis(20);
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let (probe, token) = Probe::new(&engine, Some(channel.clone()));
    let (_, late) = Probe::new(&engine, None);
    engine.set_timer(late, Some(sys::now() + LATE));
    let blocked = start(move || get(&channel));
    let peer = {
        let probe = probe.clone();
        start(move || {
            at_any_moment();
            probe.socket.arrive();
        })
    };
    at_any_moment();
    let at = sys::now() + SOON;
    engine.set_timer(token, Some(at));
    probe.timed.wait(1);
    let ran = probe.at.lock().unwrap();
    assert!(ran >= at && ran < at + SLACK, "{:?} late", ran.saturating_duration_since(at));
    peer.join();
    blocked.join();
    engine.deregister(late);
}

/// A blocked thread waits for the event of a timer, and nothing else happens.
pub fn a_leader_runs_timers() {
    const SLACK: Duration = Duration::from_millis(20);
    struct Tick(Arc<Channel>);
    impl Source for Tick {
        fn ready(&self, _: Readiness) {}
        fn timeout(&self) {
            self.0.push(7);
        }
    }
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let token = engine.new_token(Arc::new(Tick(channel.clone())));
    let late = engine.new_token(Arc::new(Tick(channel.clone())));
    engine.set_timer(late, Some(sys::now() + Duration::from_secs(100)));
    let blocked = {
        let channel = channel.clone();
        start(move || get(&channel))
    };
    at_any_moment();
    let at = sys::now() + Duration::from_millis(30);
    engine.set_timer(token, Some(at));
    blocked.join();
    assert!(sys::now() < at + SLACK, "{:?} late", sys::now().saturating_duration_since(at));
}

/// A thread spins on polls for so long that the background thread lets it remove the descriptor from epoll.
fn poller(engine: &Arc<Engine>, probe: &Arc<Probe>, token: Token) -> Thread {
    let (engine, probe) = (engine.clone(), probe.clone());
    start(move || {
        let mut parked = None;
        for _ in 0..40 {
            engine.note_earnest(false);
            if parked.is_none_or(|mark| !engine.is_parked(mark)) {
                parked = engine.park(token);
            }
            probe.look();
            if parked.is_none() {
                engine.poll_once();
            }
            sys::sleep(Duration::from_micros(18));
        }
    })
}

/// Input of a descriptor that a polling thread has removed from epoll is found when that thread stops
/// polling, at any moment.
pub fn a_descriptor_that_was_polled_is_served_afterwards() {
    let engine = background::start().unwrap();
    let (probe, token) = Probe::new(&engine, None);
    // Wakes the background thread beside the polling thread.
    let (other, _) = Probe::new(&engine, None);
    let poller = poller(&engine, &probe, token);
    other.socket.arrive();
    // Each input is read by itself; the next one arrives only after that.
    for n in 1..=3 {
        probe.socket.arrive();
        probe.read.wait(n);
    }
    poller.join();
    probe.socket.arrive();
    probe.read.wait(4);
}

/// Threads that spin on polls postpone the timer that wakes the background thread. When the last of them
/// stops, at any moment, input is served soon, although the background thread sleeps without a time limit of
/// its own.
pub fn the_end_of_polling_is_noticed() {
    // The watchdog's time, and delayed clock reads.
    const SOON: Duration = Duration::from_millis(20);
    let engine = background::start().unwrap();
    let (probe, token) = Probe::new(&engine, None);
    let (other, _) = Probe::new(&engine, None);
    let pollers = [(), ()].map(|()| poller(&engine, &probe, token));
    other.socket.arrive();
    pollers.into_iter().for_each(Thread::join);
    let stopped = sys::now();
    probe.socket.arrive();
    probe.read.wait(1);
    let late = sys::now().saturating_duration_since(stopped);
    assert!(late < SOON, "{late:?} late");
    // Once more, when the background thread has been serving the sockets for a while.
    sys::sleep(Duration::from_millis(1));
    let again = start({
        let engine = engine.clone();
        move || (0..40).for_each(|_| engine.note_earnest(true))
    });
    other.socket.arrive();
    again.join();
    probe.socket.arrive();
    probe.read.wait(2);
}

/// The same while another thread sleeps on the sockets and keeps the background thread away.
pub fn a_descriptor_that_was_polled_is_served_beside_a_leader() {
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let (probe, token) = Probe::new(&engine, None);
    let (other, _) = Probe::new(&engine, None);
    let poller = poller(&engine, &probe, token);
    other.socket.arrive();
    sys::sleep(Duration::from_micros(500));
    let blocked = {
        let channel = channel.clone();
        start(move || get(&channel))
    };
    poller.join();
    probe.socket.arrive();
    probe.read.wait(1);
    channel.push(7);
    blocked.join();
}

/// What a source reports itself is served: by the background thread, or by a thread that sleeps for its own
/// channel, whichever sleeps or is about to.
pub fn what_is_raised_wakes_who_sleeps() {
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let (lane, token) = Lane::new(&engine, None);
    let (other, other_token) = Lane::new(&engine, Some(channel.clone()));
    let blocked = {
        let channel = channel.clone();
        start(move || get(&channel))
    };
    at_any_moment();
    for n in 1..=2 {
        lane.arrive(&engine, token);
        lane.read.wait(n);
    }
    other.arrive(&engine, other_token);
    blocked.join();
    lane.arrive(&engine, token);
    lane.read.wait(3);
}

/// The same for what only a look finds. It is added while threads sleep, or are about to.
pub fn what_a_look_finds_wakes_who_sleeps() {
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let blocked = {
        let channel = channel.clone();
        start(move || get(&channel))
    };
    at_any_moment();
    let lanes = Lanes::new(&engine, Some(channel));
    for n in 1..=4 {
        // Every second one comes while threads go to sleep behind the one before.
        if n % 2 == 1 {
            at_any_moment();
        }
        lanes.arrive(&engine);
        lanes.lane.read.wait(n);
    }
    blocked.join();
}

/// The same for the thread of an event loop, which sleeps by a call of its own. It is dismissed at last, and
/// the background thread serves what was raised, but that takes some milliseconds.
pub fn what_is_raised_wakes_an_event_loop() {
    let engine = background::start().unwrap();
    let (lane, token) = Lane::new(&engine, None);
    let peer = {
        let (engine, lane) = (engine.clone(), lane.clone());
        start(move || {
            for n in 1..=3 {
                at_any_moment();
                let raised = sys::now();
                lane.arrive(&engine, token);
                lane.read.wait(n);
                let took = sys::now().saturating_duration_since(raised);
                assert!(took < LEAD / 2, "it slept over what was raised: {took:?}");
            }
        })
    };
    while lane.read.get() < 3 {
        let Some(lead) = engine.begin_loop() else { continue };
        let sleeps_on = (0..2).any(|_| match engine.may_sleep(lead) {
            Sleep::For(limit) => {
                sys::wait_watched(engine.fd(), limit);
                engine.serve_loop(lead);
                false
            }
            Sleep::NoMore => true,
        });
        engine.end_loop(lead, sleeps_on);
    }
    peer.join();
}

/// A program that polled, then arms and sleeps on the channel's descriptor, gets its events.
pub fn a_program_that_waits_on_the_descriptor_is_woken() {
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let (probe, _) = Probe::new(&engine, Some(channel.clone()));
    let program = {
        let (engine, channel) = (engine.clone(), channel.clone());
        start(move || {
            for _ in 0..2 {
                for _ in 0..3 {
                    engine.note_earnest(false);
                    engine.poll_once();
                }
                channel.armed(&Weak::new());
                sys::wait_readable(channel.fd());
                get(&channel);
            }
        })
    };
    probe.socket.arrive();
    probe.read.wait(1);
    probe.socket.arrive();
    program.join();
}

/// A program's own event loop: its channel does not block, the sockets make the descriptor readable, and its
/// calls serve them. It gets each event, also those that another thread has found; and what does not belong
/// to its channel is served beside it.
pub fn an_event_loop_with_a_channel_gets_its_events() {
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    sys::set_nonblocking(channel.fd());
    let (probe, token) = Probe::new(&engine, Some(channel.clone()));
    let (other, _) = Probe::new(&engine, None);
    channel.fed_by(Some(token.0), &Weak::new());
    let taken = Count::new();
    let program = {
        let (channel, taken) = (channel.clone(), taken.clone());
        start(move || {
            channel.armed(&Weak::new());
            while taken.get() < 3 {
                sys::wait_readable(channel.fd());
                if channel.get().is_ok() {
                    channel.armed(&Weak::new());
                    taken.add();
                }
            }
        })
    };
    let polls = {
        let engine = engine.clone();
        start(move || {
            at_any_moment();
            engine.poll_once();
        })
    };
    for event in 1..=3 {
        if shuttle::rand::thread_rng().gen_bool(0.5) {
            at_any_moment();
        }
        probe.socket.arrive();
        taken.wait(event);
    }
    other.socket.arrive();
    other.read.wait(1);
    program.join();
    polls.join();
}

/// The same for a stream in memory: its peer calls the program if its sleep was announced. A second thread
/// with such a loop makes no difference.
pub fn an_event_loop_is_called_for_what_no_descriptor_reports() {
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    sys::set_nonblocking(channel.fd());
    let lanes = Lanes::new(&engine, Some(channel.clone()));
    channel.fed_by(Some(lanes.token.0), &Weak::new());
    let taken = Count::new();
    let several = shuttle::rand::thread_rng().gen_bool(0.3);
    let loops = || {
        let (channel, taken) = (channel.clone(), taken.clone());
        start(move || {
            channel.armed(&Weak::new());
            while taken.get() < 3 {
                sys::wait_readable(channel.fd());
                if channel.get().is_ok() {
                    taken.add();
                    channel.armed(&Weak::new());
                }
            }
            // The others leave, too.
            channel.push(7);
        })
    };
    let program = loops();
    let other = several.then(loops);
    for event in 1..=3 {
        if shuttle::rand::thread_rng().gen_bool(0.5) {
            at_any_moment();
        }
        lanes.arrive(&engine);
        taken.wait(event);
    }
    program.join();
    other.into_iter().for_each(|other| other.join());
}

/// The process exits in a thread that may be the leader, which then never continues: every connection is
/// notified.
pub fn exit_is_reported_to_all() {
    let engine = background::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let probes = [0, 1].map(|_| Probe::new(&engine, Some(channel.clone())).0);
    let exiting = {
        let engine = engine.clone();
        start(move || {
            // A signal handler, while this thread led.
            std::mem::forget(engine.lead());
            // Until the background thread sleeps with a timer, or sleeps without one.
            sys::sleep(Duration::from_micros(shuttle::rand::thread_rng().gen_range(0..7000)));
            while !engine.exit() {
                sys::sleep(Duration::from_millis(1));
            }
        })
    };
    let other = {
        let channel = channel.clone();
        start(move || get(&channel))
    };
    exiting.join();
    for probe in &probes {
        probe.exits.wait(1);
    }
    // What the connections wait for before they close still arrives, although the former leader serves
    // nothing any more.
    for probe in &probes {
        probe.socket.arrive();
        probe.read.wait(1);
    }
    // It may have become leader after the exit began.
    channel.push(7);
    other.join();
}

/// The modes of the background thread that [`every_mode_is_entered`] has seen, over all executions.
pub static MODES: std::sync::Mutex<BTreeSet<String>> = std::sync::Mutex::new(BTreeSet::new());

fn note_mode(engine: &Engine) {
    let mode = format!("{:?}", engine.mode.get());
    let name = mode.split(' ').next().unwrap_or(&mode);
    MODES.lock().unwrap().insert(name.into());
}

/// A thread polls, another one leads again and again until it is dismissed, and both stop. All input is
/// served meanwhile, and the background thread passes through all its modes.
pub fn every_mode_is_entered() {
    let engine = background::start().unwrap();
    let (probe, _) = Probe::new(&engine, None);
    let (other, token) = Probe::new(&engine, None);
    let watcher = {
        let engine = engine.clone();
        start(move || {
            for _ in 0..20 {
                note_mode(&engine);
                at_any_moment();
            }
        })
    };
    let poller = poller(&engine, &other, token);
    other.socket.arrive();
    let leads = {
        let engine = engine.clone();
        start(move || {
            // Longer than the other thread polls.
            let end = sys::now() + Duration::from_micros(1500);
            while sys::now() < end {
                let _ = engine.lead().map(|leader| leader.wait(Some(Duration::from_micros(300))));
            }
            let Some(leader) = engine.lead() else { return };
            while !leader.is_over() {
                let _ = leader.wait(None);
                note_mode(&engine);
            }
            leader.retire();
        })
    };
    for n in 1..=3 {
        at_any_moment();
        probe.socket.arrive();
        probe.read.wait(n);
    }
    leads.join();
    poller.join();
    watcher.join();
}
