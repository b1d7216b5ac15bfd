//! Who makes progress, and how that is handed on: the engine and its channels as they are, over sockets that are not there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use shuttle::rand::Rng;

use crate::channel::Channel;
use crate::engine::{Engine, Readiness, Source, Token};
use crate::sync::Mutex;
use crate::sys::{self, Count, Socket, Thread, start};

/// A connection whose input is read by whoever makes progress, and makes an event for each read that found something.
struct Probe {
    socket: Socket,
    read: Count,
    timed: Count,
    at: Mutex<Option<Instant>>,
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

fn get(channel: &Channel) {
    assert_eq!(channel.get(), Ok(7));
}

/// Before, while or after a thread that begins to block looks for a short while, and the background thread's first naps.
fn at_any_moment() {
    sys::sleep(Duration::from_micros(shuttle::rand::thread_rng().gen_range(0..400)));
}

/// Threads that block on channels of their own hear of what comes for them, whichever of them sleeps on the sockets.
pub fn blocked_threads_are_woken() {
    let engine = Engine::start().unwrap();
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

/// Two threads wait on one channel, and the one that sleeps on the sockets may find more there than it takes itself.
pub fn what_comes_at_once_wakes_all_that_block() {
    let engine = Engine::start().unwrap();
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

/// What comes when the thread that slept on the sockets has gone, soon or late, is served by the background thread.
pub fn what_comes_after_a_leader_is_served() {
    let engine = Engine::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let (probe, _) = Probe::new(&engine, Some(channel.clone()));
    let program = start(move || get(&channel));
    // Just as long as the background thread takes to sleep without a timer, or less, or more.
    sys::sleep(Duration::from_micros(4900 + shuttle::rand::thread_rng().gen_range(0..500)));
    probe.socket.arrive();
    probe.read.wait(1);
    probe.socket.arrive();
    probe.read.wait(2);
    program.join();
    probe.socket.arrive();
    probe.read.wait(3);
}

/// A connection whose news are forgotten while a thread that was told of them leaves.
struct Forgotten {
    probe: Arc<Probe>,
    leaves: Mutex<bool>,
}

impl Source for Forgotten {
    fn ready(&self, _: Readiness) {
        if !*self.leaves.lock() {
            self.probe.look();
        }
    }

    fn timeout(&self) {}
}

/// A thread jumps out of the call in which it sleeps on the sockets, and is never seen again: what it was told of, and what comes later,
/// is served all the same.
pub fn what_comes_after_a_leader_that_left_without_a_word_is_served() {
    let engine = Engine::start().unwrap();
    let (later, _) = Probe::new(&engine, None);
    let (probe, token) = Probe::new(&engine, None);
    let told = Arc::new(Forgotten { probe: probe.clone(), leaves: Mutex::new(false) });
    engine.replace(token, told.clone());
    let jumps = {
        let (engine, told) = (engine.clone(), told.clone());
        start(move || {
            let Some(leader) = engine.lead() else { return };
            *told.leaves.lock() = true;
            let _ = leader.wait(Some(Duration::from_millis(1)));
            std::mem::forget(leader);
            *told.leaves.lock() = false;
        })
    };
    at_any_moment();
    probe.socket.arrive();
    jumps.join();
    later.socket.arrive();
    later.read.wait(1);
    probe.read.wait(1);
}

/// An event that a thread was about to take, when it was cancelled, is another's.
pub fn an_event_that_is_left_is_taken_by_another() {
    let engine = Engine::start().unwrap();
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

/// The same where two threads wait on one channel, and the events come from other threads of the program.
pub fn events_of_other_threads_wake_those_that_block() {
    let engine = Engine::start().unwrap();
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

/// An object goes, and its events with it, while others are queued and taken: each of its events is either taken or counted as removed
/// (destruction waits for those that were taken), nobody misses another's, and the descriptor says whether there is one.
pub fn what_goes_with_its_object_takes_nothing_along() {
    const GOES: u64 = 8;
    const EVENTS: usize = 3;
    let engine = Engine::start().unwrap();
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
    assert!(sys::is_readable(channel.fd()), "one is left");
}

/// A timer that is set while a thread leads, begins to or ceases to, runs out in time although another one runs out much later.
pub fn a_timer_set_at_any_moment_runs_out_in_time() {
    const SOON: Duration = Duration::from_secs(1);
    const LATE: Duration = Duration::from_secs(100);
    // Naps, leads that follow each other, and looks at the clock.
    const SLACK: Duration = Duration::from_millis(20);
    let engine = Engine::start().unwrap();
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

/// A timer whose event a blocked thread waits for, and nothing else happens.
pub fn a_leader_runs_timers() {
    const SLACK: Duration = Duration::from_millis(20);
    struct Tick(Arc<Channel>);
    impl Source for Tick {
        fn ready(&self, _: Readiness) {}
        fn timeout(&self) {
            self.0.push(7);
        }
    }
    let engine = Engine::start().unwrap();
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

/// A thread that polls in earnest for long enough that the background thread lets it take the descriptor from the system.
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

/// What comes for a descriptor that a polling thread has taken from the system is found when that thread stops polling, at any
/// moment.
pub fn a_descriptor_that_was_polled_is_not_forgotten() {
    let engine = Engine::start().unwrap();
    let (probe, token) = Probe::new(&engine, None);
    // Wakes the background thread beside the one that polls.
    let (other, _) = Probe::new(&engine, None);
    let poller = poller(&engine, &probe, token);
    other.socket.arrive();
    // Each is read by itself: only then is there a next.
    for n in 1..=3 {
        probe.socket.arrive();
        probe.read.wait(n);
    }
    poller.join();
    probe.socket.arrive();
    probe.read.wait(4);
}

/// Threads that poll in earnest push back what wakes the background thread. When the last of them stops, at any moment, what comes is
/// served, and soon, although the background thread sleeps without a limit of its own.
pub fn that_polling_has_stopped_is_noticed() {
    // What the watchdog takes, and looks at the clock that were held up.
    const SOON: Duration = Duration::from_millis(20);
    let engine = Engine::start().unwrap();
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
    // And once more, when the background thread has been back among the sockets for a while.
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

/// Nor is it while another thread sleeps on the sockets and keeps the background thread away.
pub fn a_descriptor_that_was_polled_is_not_forgotten_beside_a_leader() {
    let engine = Engine::start().unwrap();
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

/// A program that has polled, arms and sleeps on the channel's descriptor hears of what comes.
pub fn a_program_that_waits_on_the_descriptor_is_woken() {
    let engine = Engine::start().unwrap();
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
                channel.armed();
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

/// The process exits in a thread that may be the leader, which then never goes on: every connection is told.
pub fn exit_is_told_to_all() {
    let engine = Engine::start().unwrap();
    let channel = Channel::new(&engine).unwrap();
    let probes = [0, 1].map(|_| Probe::new(&engine, Some(channel.clone())).0);
    let exiting = {
        let engine = engine.clone();
        start(move || {
            // The handler of a signal that came while this thread led.
            std::mem::forget(engine.lead());
            // Until the background thread sleeps by timer, or has gone to sleep without one.
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
    // What they wait for before they close still comes, although the thread that led serves nothing any more.
    for probe in &probes {
        probe.socket.arrive();
        probe.read.wait(1);
    }
    // It may have got into the lead after the exit began.
    channel.push(7);
    other.join();
}
