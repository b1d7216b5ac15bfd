//! Connected sockets that become the streams of queue pairs: the machine `Adopt` at both ends with the
//! connection manager's own loop and real queue pairs, or at one end with a stranger at the other.
//!
//! ```text
//!   script, faults ─▶ Adoptions ── clock, who goes next, checks after each step
//!                        ├── Adopter ── Adopt, machine::run, a queue pair, a program
//!                        ├── Stranger
//!                        └── network ── one TCP connection as a pair of pipes
//! ```
//!
//! A seed repeats a run. With `UWARP_SIM_TRACE` in the environment, events and reports are printed.

pub mod adopter;
pub mod stranger;

use std::collections::VecDeque;

use crate::hosts::host;
use crate::hosts::network::{Network, Opening, TcpId, network, set_network};
use crate::{NetParams, Rng, Time};
use adopter::{Adopter, Call, Plan};
use stranger::Stranger;

/// Steps that no run needs: a run with more hangs.
const MOST_STEPS: u64 = 400_000;

/// What happens at a time. The number is the side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The program begins to adopt its socket.
    Begin(usize),
    /// The process ends; its system closes what it had.
    Kill(usize),
    /// The host loses its power, and is up again then, without the process.
    LosePower(usize, Time),
    /// The process does not run, until then.
    Stop(usize, Time),
    /// The connection is closed from without (false: reset).
    Break(usize, bool),
    /// The program makes a call.
    Call(usize, Call),
}

/// A world: one connection, whose ends are sides 0 and 1.
pub struct Adoptions {
    seed: u64,
    rng: Rng,
    /// The clock.
    pub now: Time,
    /// The connection.
    pub id: TcpId,
    /// Those that live.
    pub ends: [Option<Adopter>; 2],
    /// At the other end.
    pub stranger: Option<Stranger>,
    script: VecDeque<(Time, Event)>,
    /// Rounds in which something has happened.
    pub steps: u64,
    /// What happens at a step.
    pub at_step: Option<(u64, Vec<(Time, Event)>)>,
    trace: bool,
}

impl Drop for Adoptions {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the seed is {} (step {}, at {} ns)", self.seed, self.steps, self.now);
        }
        self.ends = [None, None];
        if !std::thread::panicking() {
            set_network(None);
        }
    }
}

impl Adoptions {
    /// A connection between two programs, or between one and a stranger.
    pub fn new(seed: u64, net: NetParams, plans: [Option<Plan>; 2]) -> Self {
        let mut rng = Rng::new(seed);
        set_network(Some(Network::new(rng.fork(), net, 0)));
        let ends = [(host(1), 40_001).into(), (host(2), 40_002).into()];
        let id = network(|network| {
            let id = network.connect(ends[0], ends[1]);
            let tcp = network.tcp.get_mut(&id).expect("it was made");
            (tcp.state, tcp.owners) = (Opening::Open, [0, 1]);
            id
        });
        let stranger = plans[1].is_none().then(|| Stranger::new(id, rng.fork()));
        let trace = std::env::var_os("UWARP_SIM_TRACE").is_some();
        let mut side = 0;
        let ends = plans.map(|plan| {
            side += 1;
            plan.map(|plan| Adopter::new((id, side - 1), plan, rng.fork(), trace))
        });
        let at_step = None;
        Self { seed, rng, now: 0, id, ends, stranger, script: VecDeque::new(), steps: 0, at_step, trace }
    }

    /// Adds to the script; events of one time happen in the order in which they were added.
    pub fn schedule(&mut self, at: Time, event: Event) {
        let place = self.script.partition_point(|(other, _)| *other <= at);
        self.script.insert(place, (at, event));
    }

    /// Runs until then.
    ///
    /// # Panics
    /// If a rule is broken.
    pub fn run_until(&mut self, end: Time) {
        let begin = self.steps;
        loop {
            if self.step() {
                assert!(self.steps - begin < MOST_STEPS, "the run does not end");
                continue;
            }
            let script = self.script.front().map(|(at, _)| *at);
            let now = self.now;
            let stranger = self.stranger.iter().map(|stranger| stranger.wake).filter(|at| *at > now);
            let ends = self.ends.iter_mut().flatten().filter_map(|end| end.next_time(now));
            let next = ends.chain(stranger).chain(script).chain(network(|network| network.next())).min();
            let next = next.map_or(end, |next| next.max(self.now + 1));
            if next >= end {
                self.now = self.now.max(end);
                network(|network| network.now = self.now);
                return;
            }
            self.now = next;
            network(|network| network.now = next);
        }
    }

    /// One round. Returns whether something has happened.
    fn step(&mut self) -> bool {
        let before = network(|network| network.activity);
        let mut did = false;
        while self.script.front().is_some_and(|(at, _)| *at <= self.now) {
            if let Some((_, event)) = self.script.pop_front() {
                self.event(event);
                did = true;
            }
        }
        if let Some((_, events)) = self.at_step.take_if(|(step, _)| *step <= self.steps) {
            events.into_iter().for_each(|(after, event)| self.schedule(self.now + after, event));
            did = true;
        }
        network(|network| network.step());
        let mut order = [0, 1];
        crate::end::shuffle(&mut self.rng, &mut order);
        for side in order {
            if let Some(end) = &mut self.ends[side] {
                did |= end.turn(self.now);
            }
        }
        if let Some(stranger) = &mut self.stranger {
            did |= stranger.turn(self.now);
        }
        did |= network(|network| network.activity) != before;
        self.steps += u64::from(did);
        did
    }

    fn event(&mut self, event: Event) {
        // A program does nothing while its process is stopped.
        if let Event::Begin(side) | Event::Call(side, _) = event
            && let Some(end) = &self.ends[side]
            && self.now < end.stopped
        {
            return self.schedule(end.stopped, event);
        }
        if self.trace {
            eprintln!("{:>12} step {} {event:?}", self.now, self.steps);
        }
        let now = self.now;
        match event {
            Event::Begin(side) => {
                if let Some(end) = &mut self.ends[side] {
                    end.begin(now);
                }
            }
            Event::Kill(side) => {
                network(|network| {
                    network.running = side;
                    network.end_process(side);
                });
                self.ends[side] = None;
            }
            Event::LosePower(side, until) => {
                network(|network| {
                    network.running = side;
                    network.lose_power(host(side as u8 + 1), side, until);
                });
                self.ends[side] = None;
            }
            Event::Stop(side, until) => {
                if let Some(end) = &mut self.ends[side] {
                    end.stopped = until;
                }
            }
            Event::Break(side, close) => network(|network| {
                if let Some(tcp) = network.tcp.get_mut(&self.id) {
                    tcp.broken_by_fault = true;
                    if close { tcp.pipes[side].close(now) } else { tcp.reset() }
                }
            }),
            Event::Call(side, call) => {
                if let Some(end) = &mut self.ends[side] {
                    end.call(now, call);
                }
            }
        }
    }

    /// Whether each end that lives was told, or has a stream to a peer that has one, too. Returns how many
    /// ends have one.
    ///
    /// # Panics
    /// If an end waits for a peer that is gone, or messages are missing.
    pub fn check_told(&self) -> usize {
        let runs = [0, 1].map(|side| self.ends[side].as_ref().is_some_and(Adopter::runs));
        for (side, end) in self.ends.iter().enumerate() {
            let Some(end) = end else { continue };
            // Who destroys the queue pair is told when the limit is over.
            assert!(end.is_told() || end.left, "end {side} is told nothing");
            if !runs[side] || end.left {
                continue;
            }
            // The stream of an adoption that is cancelled goes on if it has begun.
            let peer = self.ends[1 - side].as_ref().filter(|peer| peer.has_stream());
            assert!(peer.is_some(), "end {side} has a stream, and its peer has none");
            let sent = peer.map_or(0, Adopter::sent);
            assert_eq!(end.received(), sent, "messages that end {side} got");
        }
        runs.into_iter().filter(|runs| *runs).count()
    }

    /// Ends everything and checks that nothing is left.
    pub fn end(&mut self) {
        self.script.clear();
        if let Some(stranger) = &mut self.stranger {
            stranger.end();
        }
        for end in self.ends.iter_mut().flatten() {
            end.stopped = 0;
            end.call(self.now, Call::Cancel);
            end.call(self.now, Call::DestroyPair);
        }
        self.run_until(self.now + 10_000_000_000);
        self.ends.iter().flatten().for_each(Adopter::check_end);
        for side in [0, 1] {
            let open = network(|network| network.tcp.get(&self.id).is_some_and(|tcp| !tcp.closed[side]));
            let never = self.ends[side].as_ref().is_some_and(|end| !end.has_begun());
            assert!(!open || never, "end {side} of the connection is open");
        }
    }
}
