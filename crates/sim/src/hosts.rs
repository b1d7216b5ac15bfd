//! Hosts with addresses, and processes on them that bring up queue pairs by number: the connection manager's
//! machines over a network in virtual time, with the connection manager's own loop.
//!
//! ```text
//!   script, faults ─▶ Hosts ── clock, who goes next, checks after each step
//!                       ├── Process ── Pairings, machine::run, queue pairs (End)
//!                       ├── Stranger
//!                       └── network ── TCP as pairs of pipes, UDP
//! ```
//!
//! Nothing here waits: [`Hosts::run_until`] takes steps until a time of the virtual clock. A seed repeats a
//! run. With `UWARP_SIM_TRACE` in the environment, events and states are printed.

pub mod carrier;
pub mod network;
pub mod process;
pub mod shell;
pub mod stranger;
pub mod streams;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};

use rustix::io::Errno;
use uwarp_cm::machine::Machine as _;
use uwarp_rnic::ah::port_of;
use uwarp_rnic::qp::Now;

use crate::{NetParams, Rng, Time, instant};
use network::{Network, Pid, TcpId, network, set_network};
use process::{Named, Process, Seen};
use stranger::Stranger;

pub(crate) fn at(now: Time) -> Now {
    Now::at(instant(now))
}

/// Steps that no run needs: a run with more hangs.
const MOST_STEPS: u64 = 400_000;

/// What programs, and what is not in their hands, do at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A process begins, with the port of this address and these queue pairs, which may be of other ports, too.
    Start(Pid, SocketAddr, Vec<u32>),
    /// A process ends; its system closes what it had.
    Kill(Pid),
    /// The host of a process loses its power. It is up again then, without the process.
    LosePower(Pid, Time),
    /// A program moves a queue pair from RESET to RTR.
    Rtr(Pid, u32, Named),
    /// From RTR to RTS, with messages that wait to be sent.
    Rts(Pid, u32),
    /// To RESET.
    Reset(Pid, u32),
    /// The program destroys it.
    Destroy(Pid, u32),
    /// The system of a process refuses everything until then.
    Refuse(Pid, Errno, Time),
    /// The last connection of a process is closed from without (false: reset).
    Break(Pid, bool),
    /// A process does not run, until then.
    Stop(Pid, Time),
    /// A stranger begins: an index into those of the world.
    Stranger(usize),
    /// It leaves its port, and goes on.
    StrangerLeaves(usize),
    /// It ends.
    StrangerEnds(usize),
    /// The rest of the script does not happen: the programs begin anew.
    Anew,
    /// Datagrams that are lost, of a thousand.
    Loss(u32),
}

/// A world.
pub struct Hosts {
    seed: u64,
    rng: Rng,
    /// The clock.
    pub now: Time,
    /// Those that live.
    pub processes: BTreeMap<Pid, Process>,
    /// All of them.
    pub strangers: Vec<Stranger>,
    script: VecDeque<(Time, Event)>,
    /// Rounds in which something has happened.
    pub steps: u64,
    /// What happens at a step.
    pub at_step: Option<(u64, Vec<(Time, Event)>)>,
    /// Places in each process's budget.
    pub limit: usize,
    /// The device looks like InfiniBand's.
    pub infiniband: bool,
    /// The programs' local acknowledgement timeout: how long posted work waits for a peer. 0: no limit.
    pub timeout: u8,
    /// Ends of connections that queue pairs have: whom each has named, and whether it is established.
    attached: BTreeMap<(TcpId, usize), (Pid, u32, Named)>,
    established: BTreeSet<(TcpId, usize)>,
    /// Where each process is or was.
    places: BTreeMap<Pid, SocketAddr>,
    /// Prints what happens.
    trace: bool,
    /// Streams that were up at both ends.
    pub joined: u64,
}

impl Drop for Hosts {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the seed is {} (step {}, at {} ns)", self.seed, self.steps, self.now);
        }
        // What is left of processes is closed in the network first.
        self.processes.clear();
        if !std::thread::panicking() {
            set_network(None);
        }
    }
}

impl Hosts {
    /// An empty world.
    pub fn new(seed: u64, net: NetParams) -> Self {
        let mut rng = Rng::new(seed);
        set_network(Some(Network::new(rng.fork(), net, 0)));
        Self {
            seed,
            rng,
            now: 0,
            processes: BTreeMap::new(),
            strangers: Vec::new(),
            script: VecDeque::new(),
            steps: 0,
            at_step: None,
            limit: 64,
            infiniband: true,
            timeout: 0,
            attached: BTreeMap::new(),
            established: BTreeSet::new(),
            places: BTreeMap::new(),
            trace: std::env::var_os("UWARP_SIM_TRACE").is_some(),
            joined: 0,
        }
    }

    /// Adds to the script; events of one time happen in the order in which they were added.
    pub fn schedule(&mut self, at: Time, event: Event) {
        let place = self.script.partition_point(|(other, _)| *other <= at);
        self.script.insert(place, (at, event));
    }

    /// Who begins at this time does so after all else that happens then.
    pub fn sort_starts_last(&mut self, at: Time) {
        let is_start = |event: &(Time, Event)| matches!(event, (then, Event::Start(..)) if *then == at);
        let starts: Vec<_> = self.script.iter().filter(|event| is_start(event)).cloned().collect();
        self.script.retain(|event| !is_start(event));
        for (at, event) in starts {
            self.schedule(at, event);
        }
    }

    /// When the last event of the script happens.
    pub fn last_event(&self) -> Time {
        self.script.back().map_or(self.now, |(at, _)| *at)
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
            let processes = self.processes.values_mut().filter_map(|process| process.next_time(self.now));
            let next = strangers.chain(processes).chain(script).chain(network(|network| network.next()));
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
                if after == 0 {
                    self.event(event);
                } else {
                    self.schedule(self.now + after, event);
                }
            }
            did = true;
        }
        network(|network| network.step());
        while let Some(datagram) = network(Network::take_datagram) {
            did = true;
            let owner = network(|network| network.ports.get(&datagram.to).copied());
            let Some(owner) = owner else { continue };
            if let Some(process) = self.processes.get_mut(&owner) {
                let port = process.ports.iter_mut().find(|port| port.at == datagram.to);
                port.into_iter().for_each(|port| port.inbox.push_back(datagram.clone()));
            } else if let Some(stranger) = self.strangers.iter_mut().find(|stranger| stranger.pid == owner) {
                stranger.inbox.push_back(datagram);
            }
        }
        let mut order: Vec<Pid> = self.processes.keys().copied().collect();
        crate::end::shuffle(&mut self.rng, &mut order);
        for pid in order {
            let mut seen = Vec::new();
            if let Some(process) = self.processes.get_mut(&pid) {
                did |= process.turn(self.now, &mut seen);
            }
            self.check(pid, seen);
        }
        for stranger in &mut self.strangers {
            did |= stranger.turn(self.now);
        }
        did |= network(|network| network.activity) != before;
        self.steps += u64::from(did);
        if did && self.trace {
            for process in self.processes.values() {
                let phases: Vec<_> = process.phases().map(|(qpn, phase, _)| (qpn & 255, phase)).collect();
                eprintln!("{:>12} step {} process {}: {phases:?}", self.now, self.steps, process.pid);
            }
        }
        did
    }

    fn event(&mut self, event: Event) {
        // A program does nothing while its process is stopped.
        if let Event::Rtr(pid, ..) | Event::Rts(pid, _) | Event::Reset(pid, _) | Event::Destroy(pid, _) =
            event
            && let Some(process) = self.processes.get(&pid)
            && self.now < process.stopped
        {
            let at = process.stopped;
            return self.schedule(at, event);
        }
        if self.trace {
            eprintln!("{:>12} {event:?}", self.now);
        }
        let now = self.now;
        let mut seen = Vec::new();
        let pid = match event {
            Event::Start(pid, at, qpns) => {
                let mut ports = vec![at.port()];
                ports.extend(qpns.iter().map(|qpn| port_of(*qpn)).filter(|port| *port != at.port()));
                ports.dedup();
                let mut process = Process::new(pid, at, &ports, self.limit, self.rng.fork());
                (process.infiniband, process.timeout) = (self.infiniband, self.timeout);
                qpns.into_iter().for_each(|qpn| process.create(qpn));
                self.processes.insert(pid, process);
                self.places.insert(pid, at);
                pid
            }
            Event::Kill(pid) => {
                network(|network| {
                    network.running = pid;
                    network.end_process(pid);
                });
                self.processes.remove(&pid);
                pid
            }
            Event::LosePower(pid, until) => {
                if let Some(process) = self.processes.get(&pid) {
                    network(|network| {
                        network.running = pid;
                        network.lose_power(process.at.ip(), pid, until);
                    });
                }
                self.processes.remove(&pid);
                pid
            }
            Event::Rtr(pid, qpn, named) => {
                self.call(pid, |process, seen| process.move_to_rtr(now, qpn, named, seen), &mut seen);
                pid
            }
            Event::Rts(pid, qpn) => {
                self.call(pid, |process, seen| process.move_to_rts(now, qpn, seen), &mut seen);
                pid
            }
            Event::Reset(pid, qpn) => {
                self.by_intent(pid, qpn);
                self.call(pid, |process, seen| process.reset(now, qpn, seen), &mut seen);
                pid
            }
            Event::Destroy(pid, qpn) => {
                self.by_intent(pid, qpn);
                self.call(pid, |process, seen| process.destroy(now, qpn, seen), &mut seen);
                pid
            }
            Event::Refuse(pid, ..) | Event::Break(pid, _) | Event::Stop(pid, _) => {
                self.fault(event);
                pid
            }
            Event::Stranger(index) => {
                self.strangers[index].begin();
                return;
            }
            Event::StrangerLeaves(index) => return self.strangers[index].leave(),
            Event::Anew => return self.script.clear(),
            Event::StrangerEnds(index) => return self.strangers[index].end(),
            Event::Loss(loss) => return network(|network| network.loss = loss),
        };
        self.check(pid, seen);
    }

    /// What the system does to a process.
    fn fault(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Refuse(pid, errno, until) => {
                network(|network| network.refuses.insert(pid, (errno, until)));
            }
            Event::Break(pid, close) => {
                network(|network| {
                    let tcp = network.tcp.values_mut().rev().find(|tcp| tcp.owners.contains(&pid));
                    if let Some(tcp) = tcp {
                        tcp.broken_by_fault = true;
                        let side = usize::from(tcp.owners[1] == pid);
                        if close { tcp.pipes[side].close(now) } else { tcp.reset() }
                    }
                });
            }
            Event::Stop(pid, until) => {
                if let Some(process) = self.processes.get_mut(&pid) {
                    process.stopped = until;
                }
                // Its limits may expire meanwhile, and those of its peers.
                network(|network| {
                    let of_it = network.tcp.values_mut().filter(|tcp| tcp.owners.contains(&pid));
                    of_it.for_each(|tcp| tcp.broken_by_fault = true);
                });
            }
            _ => {}
        }
    }

    fn call(&mut self, pid: Pid, f: impl FnOnce(&mut Process, &mut Vec<Seen>), seen: &mut Vec<Seen>) {
        if let Some(process) = self.processes.get_mut(&pid) {
            network(|network| network.running = pid);
            f(process, seen);
            process.after_call(self.now);
        }
    }

    /// The stream of a queue pair ends because its program wants it to.
    fn by_intent(&mut self, pid: Pid, qpn: u32) {
        let stream = self.processes.get(&pid).and_then(|process| process.stream(qpn));
        if let Some((id, _)) = stream {
            network(|network| {
                if let Some(tcp) = network.tcp.get_mut(&id) {
                    tcp.broken_by_fault = true;
                }
            });
        }
    }

    // --- The rules.

    /// After each step of a process.
    fn check(&mut self, pid: Pid, seen: Vec<Seen>) {
        for seen in seen {
            match seen {
                Seen::Attached(qpn, id, side) => self.check_attached(pid, qpn, id, side),
                Seen::Established(qpn, id, side) => {
                    let process = &self.processes[&pid];
                    let core = &process.queue_pairs[&qpn].streams.end.core;
                    let ended = process.stream(qpn).is_none_or(|(present, _)| present != id);
                    assert!(ended || core.snapshot().peer_is_uwarp, "both ends know that they are uwarp");
                    self.established.insert((id, side));
                    self.joined += u64::from(self.established.contains(&(id, 1 - side)));
                }
                Seen::Ended(_, id, side) => {
                    let fault = network(|network| network.tcp.get(&id).is_none_or(|tcp| tcp.broken_by_fault));
                    let both = [0, 1].iter().all(|side| self.established.contains(&(id, *side)));
                    assert!(fault || !both, "a stream that both ends had ended by itself");
                    // From here the other end may end, too.
                    network(|network| {
                        if let Some(tcp) = network.tcp.get_mut(&id) {
                            tcp.broken_by_fault |= fault;
                        }
                    });
                    self.attached.remove(&(id, side));
                }
            }
        }
        let Some(process) = self.processes.get(&pid) else { return };
        process.check(self.now);
    }

    fn check_attached(&mut self, pid: Pid, qpn: u32, id: TcpId, side: usize) {
        let process = &self.processes[&pid];
        let named = process.queue_pairs[&qpn].named.expect("only a queue pair in RTR gets a stream");
        let (owners, to_itself, set_up) =
            network(|network| network.tcp.get(&id).map(|tcp| (tcp.owners, tcp.to_itself, tcp.set_up)))
                .expect("it is open");
        let peer = owners[1 - side];
        assert!(
            self.may_be(&named, peer),
            "queue pair {qpn:#x} of {pid} has a stream with {peer}, a stranger"
        );
        let (sent, read) = set_up[1 - side];
        assert!(read <= sent, "{read} bytes were read as set-up frames, and {sent} were sent");
        if to_itself {
            self.established.insert((id, 1));
        }
        if let Some((other, other_qpn, theirs)) = self.attached.get(&(id, 1 - side)) {
            assert_eq!((*other_qpn, theirs.qpn), (named.qpn, qpn), "the two that were named");
            assert!(self.may_be(&named, *other) && self.may_be(theirs, pid), "the two that were named");
            let [a, b] = theirs.psns;
            assert_eq!(named.psns, [b, a], "the ends have other packet sequence numbers");
        }
        self.attached.insert((id, side), (pid, qpn, named));
    }

    /// Whether this process is the one that was named. With PSNs that everybody knows, it may also be a later
    /// one with its port (security.md).
    fn may_be(&self, named: &Named, pid: Pid) -> bool {
        let known = named.psns == [0; 2];
        named.pid == pid || (known && self.places.get(&pid) == self.places.get(&named.pid))
    }

    /// Whether two queue pairs that have named each other must be joined by now; `Some(false)`: they are not.
    pub fn is_joined(&self, a: (Pid, u32), b: (Pid, u32)) -> Option<bool> {
        let queue_pair = |(pid, qpn): (Pid, u32)| {
            let process = self.processes.get(&pid)?;
            let said = process.is_up(qpn)?;
            let queue_pair = process.queue_pairs.get(&qpn)?;
            Some((
                queue_pair.named?,
                said,
                process.stream(qpn),
                queue_pair.streams.end.core.awaits_stream().is_some(),
            ))
        };
        let ((ours, said, stream, waits), (theirs, they_said, their_stream, they_wait)) =
            (queue_pair(a)?, queue_pair(b)?);
        let meant =
            (ours.pid, ours.qpn) == b && (theirs.pid, theirs.qpn) == a && ours.exchange == theirs.exchange;
        // Otherwise a program has used a stream that has ended.
        let fresh = (stream.is_some() || waits) && (their_stream.is_some() || they_wait);
        if !meant || !fresh || !(said || they_said) {
            return None;
        }
        Some(match (stream, their_stream) {
            (Some((id, true)), Some((other, true))) => id == other,
            _ => false,
        })
    }

    /// Ends everything and checks that nothing is left.
    pub fn end(&mut self) {
        for stranger in &mut self.strangers {
            stranger.end();
        }
        let all: Vec<(Pid, u32)> = self
            .processes
            .iter()
            .flat_map(|(pid, process)| process.queue_pairs.keys().map(|qpn| (*pid, *qpn)))
            .collect();
        for (pid, qpn) in all {
            self.event(Event::Destroy(pid, qpn));
        }
        self.run_until(self.now + 70_000_000_000);
        for process in self.processes.values() {
            assert_eq!((process.budget.used(), process.streams()), (0, 0));
            for port in &process.ports {
                assert_eq!(port.shell.conns.len(), 0, "connections of {} are left", process.pid);
                assert_eq!((port.machine.held(), port.machine.poll_timeout()), (0, None));
            }
        }
        let left = network(|network| network.tcp.len());
        assert_eq!(left, 0, "connections are left in the network");
    }
}

/// An address of the example hosts.
pub fn host(n: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, n])
}

/// Its address of the other family.
pub fn host_v6(n: u8) -> IpAddr {
    IpAddr::from([0xFD00, 0, 0, 0, 0, 0, 0, u16::from(n)])
}
