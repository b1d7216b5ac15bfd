//! Hosts whose programs use rdma_cm: the connection manager's machine of an id (`Life`) with its own loop,
//! real queue pairs, and a network in virtual time.
//!
//! ```text
//!   script, faults ─▶ Ids ── clock, who goes next, checks after each step
//!                      ├── Program ── event channel, queue pairs, what it does with them
//!                      │     └── Node ── Life, machine::run, order of its events
//!                      ├── Stranger
//!                      └── network ── TCP as pairs of pipes
//! ```
//!
//! A program has many threads: a call may be made while another call on the same id waits for its answer.
//! Nothing here waits: [`Ids::run_until`] takes steps until a time of the virtual clock. A seed repeats a
//! run. With `UWARP_SIM_TRACE` in the environment, calls and events are printed.

pub mod node;
pub mod order;
pub mod program;
pub mod stranger;

use std::collections::{BTreeMap, VecDeque};

use rustix::io::Errno;
use uwarp_cm::State;

use crate::hosts::network::{Network, Pid, TcpId, network, set_network};
use crate::{NetParams, Rng, Time};
use node::Key;
use program::{Call, Plan, Program};
use stranger::Stranger;

/// Steps that no run needs: a run with more hangs.
const MOST_STEPS: u64 = 400_000;

/// What is not in the programs' hands, and what a test has them do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A process begins.
    Start(Pid, Plan),
    /// A process ends; its system closes what it had.
    Kill(Pid),
    /// The host of a process loses its power, and is up again then, without the process.
    LosePower(Pid, Time),
    /// The system of a process refuses everything until then.
    Refuse(Pid, Errno, Time),
    /// The last connection of a process is closed from without (false: reset).
    Break(Pid, bool),
    /// A process does not run, until then.
    Stop(Pid, Time),
    /// A program makes a call on the last id that it has.
    Call(Pid, Call),
    /// A stranger ends.
    StrangerEnds(usize),
}

/// A world.
pub struct Ids {
    seed: u64,
    rng: Rng,
    /// The clock.
    pub now: Time,
    /// Those that live.
    pub programs: BTreeMap<Pid, Program>,
    /// All of them.
    pub strangers: Vec<Stranger>,
    script: VecDeque<(Time, Event)>,
    /// Rounds in which something has happened.
    pub steps: u64,
    /// What happens at a step.
    pub at_step: Option<(u64, Vec<(Time, Event)>)>,
    /// Places in each process's budget.
    pub limit: usize,
    trace: bool,
}

impl Drop for Ids {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the seed is {} (step {}, at {} ns)", self.seed, self.steps, self.now);
        }
        // What is left of processes is closed in the network first.
        self.programs.clear();
        if !std::thread::panicking() {
            set_network(None);
        }
    }
}

impl Ids {
    /// An empty world.
    pub fn new(seed: u64, net: NetParams) -> Self {
        let mut rng = Rng::new(seed);
        set_network(Some(Network::new(rng.fork(), net, 0)));
        Self {
            seed,
            rng,
            now: 0,
            programs: BTreeMap::new(),
            strangers: Vec::new(),
            script: VecDeque::new(),
            steps: 0,
            at_step: None,
            limit: 64,
            trace: std::env::var_os("UWARP_SIM_TRACE").is_some(),
        }
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
            let strangers = self.strangers.iter().map(|stranger| stranger.wake).filter(|at| *at > self.now);
            let programs = self.programs.values_mut().filter_map(|program| program.next_time(self.now));
            let next = strangers.chain(programs).chain(script).chain(network(|network| network.next()));
            let next = next.min().map_or(end, |next| next.max(self.now + 1));
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
            for (after, event) in events {
                self.schedule(self.now + after, event);
            }
            did = true;
        }
        network(|network| network.step());
        let mut order: Vec<Pid> = self.programs.keys().copied().collect();
        crate::end::shuffle(&mut self.rng, &mut order);
        for pid in order {
            if let Some(program) = self.programs.get_mut(&pid) {
                did |= program.turn(self.now);
                let requests = std::mem::take(&mut program.requests);
                requests.into_iter().for_each(|request| self.check_request(pid, request));
            }
        }
        for stranger in &mut self.strangers {
            did |= stranger.turn(self.now);
        }
        did |= network(|network| network.activity) != before;
        self.steps += u64::from(did);
        did
    }

    /// A listener has reported a request: the ESTABLISHED of earlier ones that its peer has seen established
    /// was reported before it.
    fn check_request(&self, pid: Pid, request: Key) {
        const WAITS: Time = 200_000_000;
        let program = &self.programs[&pid];
        let Some(new) = program.nodes.get(&request) else { return };
        let Some(connects) = self.peer_of(pid, request) else { return };
        let began = self.programs[&connects.0].nodes[&connects.1].order.begun;
        for (key, node) in &program.nodes {
            let same = *key != request && node.listener() == new.listener();
            let waits = node.order.accepted.filter(|at| self.now < *at + WAITS);
            if !same || waits.is_none() || node.life.state() != State::Accepting {
                continue;
            }
            let Some((other, peer)) = self.peer_of(pid, *key) else { continue };
            // Requests that name no number are known by their address alone, and apart from those that do.
            if self.names_number(other, peer) != self.names_number(connects.0, connects.1) {
                continue;
            }
            let established = self.programs[&other].nodes[&peer].order.established;
            assert!(
                other != connects.0 || established.is_none_or(|at| at >= began),
                "{pid}: the request of {connects:?} comes before the ESTABLISHED of {key}, \
                 which its peer had at {established:?}, before it connected at {began}"
            );
        }
    }

    fn names_number(&self, pid: Pid, key: Key) -> bool {
        let program = &self.programs[&pid];
        program.plan.infiniband || program.nodes[&key].order.role == order::Role::ConnectsByNumber
    }

    /// The id at the other end of this one's connection.
    fn peer_of(&self, pid: Pid, key: Key) -> Option<(Pid, Key)> {
        let life = &self.programs.get(&pid)?.nodes.get(&key)?.life;
        let (local, peer) = (life.local()?, life.peer()?);
        self.programs.iter().find_map(|(pid, program)| {
            let of_it = |life: &uwarp_cm::machine::life::Life| {
                (life.local(), life.peer()) == (Some(peer), Some(local))
            };
            program.nodes.iter().find_map(|(key, node)| of_it(&node.life).then_some((*pid, *key)))
        })
    }

    fn event(&mut self, event: Event) {
        if self.trace {
            eprintln!("{:>12} step {} {event:?}", self.now, self.steps);
        }
        match event {
            Event::Start(pid, plan) => {
                let program = Program::new(pid, plan, self.limit, self.rng.fork(), self.now, self.trace);
                self.programs.insert(pid, program);
            }
            Event::Kill(pid) => {
                network(|network| {
                    network.running = pid;
                    network.end_process(pid);
                });
                self.programs.remove(&pid);
            }
            Event::LosePower(pid, until) => {
                if let Some(program) = self.programs.get(&pid) {
                    network(|network| {
                        network.running = pid;
                        network.lose_power(program.plan.at.ip(), pid, until);
                    });
                }
                self.programs.remove(&pid);
            }
            Event::Refuse(pid, errno, until) => {
                network(|network| network.refuses.insert(pid, (errno, until)));
            }
            Event::Break(pid, close) => network(|network| {
                let now = network.now;
                let tcp = network.tcp.values_mut().rev().find(|tcp| tcp.owners.contains(&pid));
                if let Some(tcp) = tcp {
                    tcp.broken_by_fault = true;
                    let side = usize::from(tcp.owners[1] == pid);
                    if close { tcp.pipes[side].close(now) } else { tcp.reset() }
                }
            }),
            Event::Stop(pid, until) => {
                if let Some(program) = self.programs.get_mut(&pid) {
                    program.stopped = until;
                }
            }
            Event::Call(pid, call) => {
                if let Some(program) = self.programs.get_mut(&pid) {
                    program.call_last(self.now, call);
                }
            }
            Event::StrangerEnds(index) => self.strangers[index].end(),
        }
    }

    /// Ends established by both programs, of which neither has ended one, are joined.
    pub fn check_joined(&self) -> usize {
        let mut joined = 0;
        for (pid, program) in &self.programs {
            for (key, node) in &program.nodes {
                let waits = matches!(node.life.state(), State::Responded | State::Established);
                if !waits || node.left {
                    continue;
                }
                let Some((id, side, other)) = program.stream(*key).or_else(|| parked(node)) else {
                    panic!("id {key} of {pid} is connected, has no stream, and was not told")
                };
                let (open, dark) = network(|network| {
                    let tcp = &network.tcp[&id];
                    (!tcp.closed[1 - side], network.resets.iter().any(|(_, dark)| *dark == id))
                });
                let stranger = !self.programs.contains_key(&other);
                let stopped = self.programs.get(&other).is_some_and(|other| other.stopped > self.now);
                assert!(
                    open || dark || stranger || stopped,
                    "id {key} of {pid} is connected, and its peer is gone"
                );
                joined += usize::from(open && !stranger);
            }
        }
        joined
    }

    /// Ends everything and checks that nothing is left.
    pub fn end(&mut self) {
        self.strangers.iter_mut().for_each(Stranger::end);
        self.script.clear();
        for program in self.programs.values_mut() {
            program.end(self.now);
        }
        self.run_until(self.now + 10_000_000_000);
        for program in self.programs.values() {
            program.check_end();
        }
        let left = network(|network| network.tcp.len());
        assert_eq!(left, 0, "connections are left in the network");
    }
}

/// The connection of an id whose queue pair does not have it yet, its side, and the process at the other end.
fn parked(node: &node::Node) -> Option<(TcpId, usize, Pid)> {
    let (local, peer) = (node.life.local()?, node.life.peer()?);
    network(|network| {
        let (id, side) = network.find(local, peer).filter(|_| !node.shell.conns.is_empty())?;
        Some((id, side, network.tcp.get(&id)?.owners[1 - side]))
    })
}
