//! The rule that says which thread makes progress, as a function of what a machine costs: a program's
//! thread, the background thread and a peer, by a clock of their own. The background thread chooses by
//! [`Mode::next`], [`Pace`] and [`Contest`], as the real one does.

use std::time::Duration;

use super::*;

/// In nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Costs {
    /// An empty poll with its receive.
    poll: u64,
    /// From the arrival of a packet, or the end of a nap, until the background thread runs.
    wake: u64,
    /// From a message to the peer's answer.
    answer: u64,
}

/// Two processors and a server: raw TCP answers in 4 µs.
const NATIVE: Costs = Costs { poll: 400, wake: 8_000, answer: 4_000 };
/// A virtual machine without hardware for it: a receive is dear, a round trip is a few of them.
const EMULATED: Costs = Costs { poll: 10_000, wake: 40_000, answer: 30_000 };

impl Costs {
    fn times(self, hundredths: u64) -> Self {
        let times = |cost: u64| (cost * hundredths / 100).max(1);
        Self { poll: times(self.poll), wake: times(self.wake), answer: times(self.answer) }
    }
}

/// What the background thread sleeps on.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Sleep {
    /// The sockets.
    Sockets,
    Until(u64),
    /// The watchdog.
    Watchdog,
}

struct World {
    now: u64,
    costs: Costs,
    // The background thread.
    sleep: Sleep,
    naps: usize,
    contest: Contest,
    pace: Pace,
    last_poll: LastPoll,
    lead: Option<Lead>,
    looped: bool,
    returns: Returns,
    /// When the watchdog is pushed next, when it fires, and how often it was pushed.
    watchdog: (u64, u64, u32),
    // The program.
    empty: u32,
    parked: bool,
    /// When the answer arrives that nobody has received yet.
    packet: Option<u64>,
    /// The same for the sockets that the background thread sleeps on. It wakes even if another thread
    /// receives first.
    signal: Option<u64>,
    /// How often the background thread has woken: it takes a processor that a polling thread needs, and the
    /// answer, if it is the first.
    wakes: u64,
    /// The longest time that an answer lay there.
    longest: u64,
}

fn instant(span: Duration) -> u64 {
    nanos(span)
}

impl World {
    fn new(costs: Costs) -> Self {
        Self {
            now: 1,
            costs,
            sleep: Sleep::Sockets,
            naps: 0,
            contest: Contest::new(),
            pace: Pace::new(),
            last_poll: LastPoll::new(),
            lead: None,
            looped: false,
            returns: Returns::default(),
            watchdog: (NEVER, NEVER, 0),
            empty: 0,
            parked: false,
            packet: None,
            signal: None,
            wakes: 0,
            longest: 0,
        }
    }

    /// The program's message is answered in a while.
    fn send(&mut self) {
        self.packet = Some(self.now + self.costs.answer);
        self.signal = self.signal.or(self.packet.filter(|_| !self.parked));
    }

    fn receive(&mut self) -> bool {
        let Some(arrived) = self.packet.filter(|at| *at <= self.now) else { return false };
        self.packet = None;
        self.signal = self.signal.filter(|_| self.sleep == Sleep::Sockets);
        self.longest = self.longest.max(self.now - arrived);
        true
    }

    /// The program polls once. Returns whether it has found the answer.
    fn poll(&mut self) -> bool {
        self.pass(self.costs.poll);
        if self.receive() {
            self.empty = 0;
            return true;
        }
        self.empty += 1;
        let earnest_at = self.pace.earnest_at();
        if self.pace.is_asked() {
            self.pace.answer(self.empty, self.now);
        }
        if stamps(self.empty, earnest_at) {
            self.last_poll.stamp(self.now);
            let (due, _, pushes) = self.watchdog;
            if self.now >= due {
                let (period, alive) = (self.pace.spans().push_period(pushes), self.pace.spans().alive());
                self.watchdog =
                    (self.now + instant(period), self.now + instant(period * 2 + alive), pushes + 1);
            }
        }
        self.parked |= self.empty >= earnest_at && self.sleep == Sleep::Watchdog;
        false
    }

    /// Time passes: the background thread does what it does meanwhile.
    fn pass(&mut self, time: u64) {
        let end = self.now + time;
        loop {
            let wakes = match self.sleep {
                // Of two threads that sleep there the last one is woken.
                Sleep::Sockets if self.lead.is_some() => NEVER,
                Sleep::Sockets => self.signal.map_or(NEVER, |arrives| arrives + self.costs.wake),
                Sleep::Until(at) => at + self.costs.wake,
                Sleep::Watchdog => self.watchdog.1 + self.costs.wake,
            };
            if wakes > end {
                break;
            }
            self.now = self.now.max(wakes);
            self.wakes += 1;
            if self.sleep == Sleep::Sockets {
                self.signal = None;
                self.receive();
                self.pace.set_earnest_at(self.contest.served(self.pace.present()));
                self.pace.ask();
            }
            self.choose();
        }
        self.now = end;
    }

    fn choose(&mut self) {
        self.watchdog.0 = NEVER;
        loop {
            let spans = self.pace.spans();
            let polled = self.last_poll.age(self.now);
            let beside_loops = self.returns.beside_loops(spans, true);
            let (lead, naps, looped) = (self.lead, self.naps, self.looped);
            let signs = Signs { polled, lead, naps, looped, beside_loops, spans };
            match Mode::next(signs) {
                Mode::BesideLeads => {
                    self.pace.ask();
                    if looped && lead.is_none() {
                        self.returns.leaves(self.now, spans, true, 0);
                    }
                    let age = polled.unwrap_or_default();
                    let nap = match (looped, lead) {
                        (true, None) => beside_loops.saturating_sub(age),
                        (true, _) => spans.beside_loops(),
                        _ => spans.beside_leads(),
                    };
                    self.sleep = Sleep::Until(self.now + instant(nap));
                    return;
                }
                Mode::TakingBack => {
                    (self.naps, self.parked, self.signal) = (0, false, None);
                    let input = self.receive();
                    self.contest.took_back(input);
                    self.pace.ask();
                }
                Mode::Napping | Mode::StandingBack => {
                    let last = self.last_poll.get().unwrap_or(self.now);
                    self.sleep = match spans.nap(self.naps) {
                        Some(time) => Sleep::Until(self.now + instant(time)),
                        None => {
                            let period = spans.push_period(0);
                            let fires = last + instant(period * 2 + spans.alive());
                            self.watchdog = (last + instant(period), fires, 0);
                            Sleep::Watchdog
                        }
                    };
                    self.naps += 1;
                    return;
                }
                Mode::Serving { .. } => {
                    if looped {
                        self.returns.gives_up(self.last_poll.get());
                    }
                    self.signal = self.packet;
                    self.sleep = Sleep::Sockets;
                    return;
                }
                mode => unreachable!("{mode:?}"),
            }
        }
    }

    /// A program that polls until it has its answer, and sends the next message. Returns how often the
    /// background thread woke beside it.
    fn ping_pong(&mut self, messages: u32) -> u64 {
        let before = self.wakes;
        for _ in 0..messages {
            self.send();
            while !self.poll() && self.packet.is_some() {}
            self.empty = 0;
        }
        self.wakes - before
    }

    /// A program that sends a message and blocks until the answer, again and again. Returns which part of the
    /// time the background thread needs beside it, in hundredths.
    fn blocks(&mut self, messages: u32, spinning: &Spinning) -> u64 {
        let (began, before) = (self.now, self.wakes);
        for _ in 0..messages {
            self.send();
            if !self.looks(spinning) {
                self.leads();
            }
        }
        (self.wakes - before) * self.costs.wake * 100 / (self.now - began)
    }

    /// The thread looks for the answer before it sleeps. Returns whether somebody has received it.
    fn looks(&mut self, spinning: &Spinning) -> bool {
        let Some(score) = spinning.begin() else { return false };
        self.last_poll.stamp(self.now);
        let began = self.now;
        if self.pace.is_asked() {
            self.pace.answer(0, began);
        }
        for looks in 1.. {
            self.pass(self.costs.poll);
            if self.receive() || self.packet.is_none() {
                spinning.end(score, true);
                break;
            }
            if self.pace.is_asked() {
                self.pace.answer(looks, self.now);
            }
            if self.now - began > instant(self.pace.spans().spin()) {
                spinning.end(score, false);
                return false;
            }
        }
        true
    }

    /// The thread sleeps on the sockets until the answer comes.
    fn leads(&mut self) {
        self.lead = Some(Lead::beginning(self.now));
        self.last_poll.stamp(self.now);
        let arrives = self.packet.unwrap_or(self.now).max(self.now);
        self.pass(arrives - self.now + self.costs.wake);
        self.receive();
        self.lead = None;
        self.last_poll.stamp(self.now);
    }

    /// A program that sends a message and then computes for long: somebody else receives the answer, within a
    /// bound.
    fn computes(&mut self, costs: &Costs) {
        self.longest = 0;
        self.send();
        self.pass(100_000_000 + 100 * costs.wake);
        assert_eq!(self.packet, None, "{costs:?}: nobody has received the answer");
        let spans = self.pace.spans();
        let looped = spans.beside_loops() * if self.looped { RETURNS } else { 0 };
        let most = (spans.push_period(u32::MAX) * 2 + spans.alive()).max(looped);
        let bound = instant(most) + 2 * costs.wake;
        assert!(self.longest <= bound, "{costs:?}: {} of {bound}", self.longest);
    }

    /// A program that polls once for each message, and then waits for the answer in its memory, where the
    /// background thread puts it. Returns how many answers it waited for longer than two wake-ups.
    fn poll_once_each(&mut self, messages: u32) -> u32 {
        let mut late = 0;
        for _ in 0..messages {
            self.send();
            self.poll();
            let arrives = self.packet;
            while self.packet.is_some() {
                self.pass(self.costs.wake / 8 + 1);
            }
            late += u32::from(arrives.is_some_and(|at| self.now > at + 3 * self.costs.wake));
            self.empty = 0;
        }
        late
    }
}

/// Slower ones than this are those of a thread that hardly runs: the times do not follow it that far.
fn is_followed(costs: &Costs) -> bool {
    costs.poll <= 100_000
}

fn machines() -> impl Iterator<Item = Costs> {
    let times = |costs: Costs| [5, 50, 100, 1_000, 5_000].map(|n| costs.times(n));
    [NATIVE, EMULATED].into_iter().flat_map(times).filter(is_followed)
}

#[test]
fn no_thread_wakes_beside_one_that_polls() {
    for costs in machines() {
        let mut world = World::new(costs);
        world.ping_pong(500);
        let wakes = world.ping_pong(5_000);
        assert!(wakes <= 50, "{costs:?}: {wakes} in 5000, {:?}", world.pace.spans());
    }
}

#[test]
fn a_machine_may_become_slow_and_fast_again() {
    for costs in machines() {
        let mut world = World::new(costs);
        world.ping_pong(2_000);
        for now in [costs.times(5_000), costs, costs.times(5_000)].into_iter().filter(is_followed) {
            world.costs = now;
            world.ping_pong(500);
            let wakes = world.ping_pong(5_000);
            assert!(wakes <= 50, "{costs:?} as {now:?}: {wakes} in 5000, {:?}", world.pace.spans());
        }
    }
}

/// A virtual machine that moves to a slow host and back, in the middle of a run, under programs of each kind.
#[test]
fn a_machine_may_change_under_one_that_blocks_polls_once_or_computes() {
    let changes = |costs: Costs| {
        let to = [costs.times(5_000), costs, costs.times(5_000)];
        to.into_iter().filter(is_followed).collect::<Vec<_>>()
    };
    for costs in machines() {
        let (mut world, spinning) = (World::new(costs), Spinning::new());
        world.blocks(1_000, &spinning);
        for now in changes(costs) {
            world.costs = now;
            world.blocks(500, &spinning);
            let part = world.blocks(5_000, &spinning);
            assert!(part <= 25, "{costs:?} as {now:?}: {part} of 100, {:?}", world.pace.spans());
        }
        let mut world = World::new(costs);
        world.poll_once_each(1_000);
        for now in changes(costs) {
            world.costs = now;
            world.poll_once_each(500);
            let late = world.poll_once_each(5_000);
            assert!(late <= 100, "{costs:?} as {now:?}: {late} of 5000");
        }
        for now in changes(costs) {
            let mut world = World::new(costs);
            world.ping_pong(2_000);
            world.costs = now;
            world.computes(&now);
            world.ping_pong(2_000);
            world.computes(&now);
        }
    }
}

/// Slower than the times follow: a poll of half a millisecond. The background thread may serve what the
/// program polls for, but nothing waits for longer than elsewhere.
#[test]
fn where_the_times_do_not_follow_nobody_waits_longer() {
    let costs = EMULATED.times(5_000);
    assert!(!is_followed(&costs));
    for stops in 0..50 {
        let mut world = World::new(costs);
        world.ping_pong(1_000 + stops);
        world.computes(&costs);
    }
    let mut world = World::new(costs);
    let late = world.poll_once_each(5_000);
    assert!(late <= 100, "{late} of 5000");
}

#[test]
fn a_thread_that_stops_polling_is_noticed() {
    for costs in machines() {
        for stops in 0..50 {
            let mut world = World::new(costs);
            world.ping_pong(1_000 + stops);
            world.computes(&costs);
        }
    }
}

#[test]
fn who_polls_once_for_each_message_is_served_at_once() {
    for costs in machines() {
        let mut world = World::new(costs);
        let late = world.poll_once_each(5_000);
        assert!(late <= 100, "{costs:?}: {late} of 5000");
        // It did not become one that polls in earnest.
        world.ping_pong(1_000);
        let late = world.poll_once_each(5_000);
        assert!(late <= 100, "{costs:?}, after polling: {late} of 5000");
    }
}

#[test]
fn little_time_is_lost_beside_one_that_blocks() {
    for costs in machines() {
        for looped in [false, true] {
            let (mut world, spinning) = (World::new(costs), Spinning::new());
            world.looped = looped;
            world.blocks(500, &spinning);
            let part = world.blocks(5_000, &spinning);
            assert!(part <= 25, "{costs:?}: {part} of 100, {:?}", world.pace.spans());
        }
    }
}

#[test]
fn one_that_blocked_and_then_computes_is_noticed() {
    for costs in machines() {
        for messages in 0..50 {
            let (mut world, spinning) = (World::new(costs), Spinning::new());
            world.blocks(500 + messages, &spinning);
            world.computes(&costs);
        }
    }
}

/// An MPI's rank: it polls until it has its messages, and computes for a few milliseconds. UCX has armed a
/// queue of it once, as a loop does.
#[test]
fn one_that_computes_between_its_polls_is_left_alone_until_it_computes_for_long() {
    for costs in machines() {
        let mut world = World::new(costs);
        world.looped = true;
        let computes = |world: &World| instant(world.pace.spans().beside_loops()) * 5 / 2;
        let phases = |world: &mut World, count: u32| {
            let before = world.wakes;
            for _ in 0..count {
                world.ping_pong(10);
                // The peer's next message comes meanwhile.
                world.send();
                let time = computes(world);
                world.pass(time);
                while world.packet.is_some() && !world.poll() {}
            }
            world.wakes - before
        };
        phases(&mut world, 50);
        let wakes = phases(&mut world, 100);
        assert!(wakes <= 120, "{costs:?}: {wakes} in 100 phases");
        world.computes(&costs);
        // For one whose phases are long the sockets are served as soon as before.
        for _ in 0..2 {
            world.ping_pong(10);
            world.computes(&costs);
        }
        let bound = instant(world.pace.spans().beside_loops()) + 2 * costs.wake;
        assert!(world.longest <= bound, "{costs:?}: {} of {bound}", world.longest);
    }
}

/// Both ends, and perhaps a thread that computes, on one processor.
struct OneProcessor {
    costs: Costs,
    /// What the peer's thread does for an answer, once it runs.
    work: u64,
    /// A third thread takes its slice at each yield.
    busy: bool,
    now: u64,
}

const SLICE: u64 = 3_000_000;

impl OneProcessor {
    /// The program polls until it has the answer. Returns how long that takes.
    fn message(&mut self, yielding: &mut Yielding) -> u64 {
        let spans = Spans::of(self.costs.poll);
        let began = self.now;
        let mut ready = false;
        let mut slice = SLICE;
        loop {
            self.now += self.costs.poll;
            if ready {
                yielding.found();
                return self.now - began;
            }
            slice = slice.saturating_sub(self.costs.poll);
            yielding.limit(spans);
            let yields = yielding.count();
            if yields || slice == 0 {
                // The others run, the peer last.
                let took = self.work + if self.busy { SLICE } else { 0 };
                self.now += took;
                (ready, slice) = (true, SLICE);
                if yields {
                    yielding.yielded(Duration::from_nanos(took), true, spans);
                }
            }
        }
    }
}

#[test]
fn on_one_processor_the_peer_runs_at_once() {
    for costs in machines() {
        // Two switches and what the peer does: raw TCP that blocks needs as long.
        let work = 15 * costs.poll;
        let mut world = OneProcessor { costs, work, busy: false, now: 0 };
        let mut yielding = Poller::NEW.yielding;
        (0..20).for_each(|_| _ = world.message(&mut yielding));
        let took = world.message(&mut yielding);
        assert!(took <= work + 3 * costs.poll, "{costs:?}: {took} where the peer needs {work}");
    }
}

#[test]
fn a_yield_gives_no_slice_away_for_each_message() {
    for costs in machines().filter(|costs| costs.poll <= 20_000) {
        let mut world = OneProcessor { costs, work: 15 * costs.poll, busy: true, now: 0 };
        let mut yielding = Poller::NEW.yielding;
        (0..20).for_each(|_| _ = world.message(&mut yielding));
        assert_eq!(yielding.until, Spans::of(costs.poll).polls_of_slice(), "{costs:?}");
    }
}
