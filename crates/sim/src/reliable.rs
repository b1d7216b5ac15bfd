//! Reliable datagrams over lossy links: processes with the machine `uwarp_proto::rd`, receives and memory,
//! and a model that knows every message.
//!
//! After each step:
//! - a message is delivered at most once, whatever is lost, copied, delayed or restarted, and its bytes are
//!   those that were sent;
//! - a message that its sender calls Done has been delivered;
//! - an ordered message is delivered after all before it in its flow have been delivered, or have failed
//!   before it was posted, and no byte of an ordered Write is placed before that;
//! - the bytes of an ordered Write are placed in ascending order;
//! - a message that its owner withdraws has ended at once, and its payload is not asked for any more;
//! - a refused message is not delivered, and one that fails for want of a receive has looked for one as often
//!   as it may;
//! - receives that one ordered flow uses are used in the order in which they were posted, as long as nothing
//!   of it is withdrawn.
//!
//! In the end each message has ended once, every receive is used or in its queue, and a minute later nothing
//! is kept of any peer.

mod model;
mod process;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

pub use model::{Kind, MessageKey, Model};
pub use process::Process;
use uwarp_proto::rd::{Config, QpnPair};

use crate::links::{Datagram, LinkParams, Links};
use crate::{Rng, Time};

/// A millisecond of virtual time.
pub const MS: Time = 1_000_000;
/// A second.
pub const SEC: Time = 1000 * MS;
/// Nothing that is sent may take longer than this to settle once faults have stopped.
const SETTLED: Time = 60 * SEC;
/// Steps of one part of a run at most.
const MOST_STEPS: u64 = 100_000;
/// Queue pairs of each process.
const QUEUE_PAIRS: u32 = 3;
/// The port of all processes.
const PORT: u16 = 20_000;
/// What each path takes.
const SHORTEST: usize = 1472;
/// Bytes of the longest packet that an interface takes: jumbo frames over IPv4.
const INTERFACE: usize = 8972;

/// What happens in a run; frequencies are in thousandths of its steps.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Processes, each on a host of its own.
    pub processes: usize,
    /// The links while the run lasts. After it they lose nothing.
    pub links: LinkParams,
    /// Messages that are posted.
    pub messages: usize,
    /// Time between two posts, at most.
    pub pause: Time,
    /// Messages of ordered flows.
    pub ordered: u32,
    /// Writes among all messages.
    pub writes: u32,
    /// Messages that their receiver refuses.
    pub refused: u32,
    /// Messages of more than one packet.
    pub long: u32,
    /// Receives that each queue pair has at most.
    pub receives: usize,
    /// A receive comes late, by up to this time.
    pub late_receives: Time,
    /// A process is killed, and another one takes its port.
    pub kills: u32,
    /// A process leaves, and another one takes its port.
    pub leaves: u32,
    /// A direction is cut for up to `cut`.
    pub cuts: u32,
    /// How long at most.
    pub cut: Time,
    /// A process does nothing for up to `stop`.
    pub stops: u32,
    /// How long at most.
    pub stop: Time,
    /// A process withdraws a message, or all of a queue pair.
    pub withdrawals: u32,
    /// A long pause, after which exchanges rest or are forgotten.
    pub rests: u32,
    /// A message finds no receive so often before it fails; 7: without limit.
    pub rnr_retry: u8,
    /// A stranger sends forged and replayed packets.
    pub stranger: bool,
    /// A path takes longer or shorter packets from now on, from an Ethernet's to jumbo frames.
    pub paths: u32,
    /// All messages are ordered Sends from one queue pair to one other: its receives are used in their order.
    pub one_flow: bool,
    /// All messages go from one queue pair to one other.
    pub one_pair: bool,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            processes: 2,
            links: LinkParams::default(),
            messages: 200,
            pause: 200_000,
            ordered: 500,
            writes: 300,
            refused: 0,
            long: 200,
            receives: 16,
            late_receives: 0,
            kills: 0,
            leaves: 0,
            cuts: 0,
            cut: 0,
            stops: 0,
            stop: 0,
            withdrawals: 0,
            rests: 0,
            rnr_retry: 7,
            stranger: false,
            paths: 0,
            one_flow: false,
            one_pair: false,
        }
    }
}

/// What a run came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct Tally {
    pub done: u64,
    pub failed: u64,
    pub packets: u64,
    /// Longer than they are at first.
    pub long: u64,
    pub lost: u64,
    /// Segments that were held for their turn.
    pub held: u64,
    /// Parts of messages that came in several joined packets and were handled together.
    pub joined: u64,
    /// Receives that were taken back.
    pub taken_back: u64,
    pub no_receive: u64,
    pub withdrawn: u64,
    pub duration: Time,
}

/// A run of a plan.
pub struct World {
    plan: Plan,
    rng: Rng,
    now: Time,
    links: Links,
    processes: Vec<Process>,
    model: Model,
    /// When a cut ends.
    cuts: BTreeMap<Time, (IpAddr, IpAddr)>,
    /// Packets that the stranger has seen, for replay; the Opens among them.
    seen: Vec<Datagram>,
    opens: Vec<Datagram>,
    /// Bytes that were sent to an address where nobody is, and in its name.
    to_nobody: u64,
    from_nobody: u64,
    packets: u64,
    long: u64,
}

fn home(host: usize) -> SocketAddr {
    ([10, 0, 0, host as u8 + 1], PORT).into()
}

/// Where nobody is, and in whose name the stranger sends.
fn nobody() -> SocketAddr {
    ([10, 0, 9, 9], PORT).into()
}

fn stranger() -> IpAddr {
    [10, 0, 9, 1].into()
}

/// Runs a plan with a seed to its end and checks it.
///
/// # Panics
/// If a property is broken.
pub fn run(seed: u64, plan: Plan) -> Tally {
    let mut world = World::new(seed, plan);
    for _ in 0..plan.messages {
        let until = world.now + world.rng.below(plan.pause + 1);
        world.run_until(until);
        world.post();
        world.disturb();
    }
    world.finish()
}

impl World {
    /// Before its first step.
    pub fn new(seed: u64, plan: Plan) -> Self {
        let mut rng = Rng::new(seed ^ 0x4C1D);
        let links = Links::new(rng.fork(), plan.links);
        let processes = (0..plan.processes)
            .map(|host| {
                let mut process = Process::new(0, home(host), config(&plan), QUEUE_PAIRS, &mut rng);
                process.refill(0, plan.receives, 0, &mut rng);
                process
            })
            .collect();
        Self {
            plan,
            rng,
            now: 0,
            links,
            processes,
            model: Model::new(plan.rnr_retry),
            cuts: BTreeMap::new(),
            seen: Vec::new(),
            opens: Vec::new(),
            to_nobody: 0,
            from_nobody: 0,
            packets: 0,
            long: 0,
        }
    }

    /// Posts a random message.
    fn post(&mut self) {
        let from = self.rng.size(0, self.processes.len() - 1);
        let to = (from + self.rng.size(1, self.processes.len() - 1)) % self.processes.len();
        let one = self.plan.one_flow;
        let one_pair = one || self.plan.one_pair;
        let (from, to) = if one_pair { (0, 1) } else { (from, to) };
        if self.processes[from].is_stopped(self.now) {
            return;
        }
        let first = u32::from(PORT) << 8 | 1;
        let pair = match one_pair {
            true => QpnPair { source: first, destination: first },
            false => QpnPair { source: self.qpn(), destination: self.qpn() },
        };
        let kind = match !one && self.rng.chance(self.plan.writes) {
            true => [Kind::Write, Kind::Write, Kind::WriteWithImmediate, Kind::Request][self.rng.size(0, 3)],
            false => Kind::Send,
        };
        let len = match self.rng.below(1000) {
            draw if draw < u64::from(self.plan.long) => self.rng.size(1000, 12_000),
            draw if draw % 10 == 0 => 0,
            _ => self.rng.size(1, model::SHORT as usize),
        };
        let key = MessageKey {
            from: (from, self.processes[from].life),
            to,
            pair,
            kind,
            len: len as u32,
            is_ordered: one || self.rng.chance(self.plan.ordered),
            is_refused: self.rng.chance(self.plan.refused),
        };
        let number = self.model.new_message(self.now, key);
        let (now, remote) = (self.now, self.processes[to].at);
        self.processes[from].post(now, remote, number, &key, self.plan.rnr_retry);
        self.pump(from);
    }

    fn qpn(&mut self) -> u32 {
        u32::from(PORT) << 8 | (1 + self.rng.below(u64::from(QUEUE_PAIRS)) as u32)
    }

    /// Faults that are not the links'.
    fn disturb(&mut self) {
        let plan = self.plan;
        let host = self.rng.size(0, self.processes.len() - 1);
        if self.rng.chance(plan.kills) {
            self.replace(host);
        }
        if self.rng.chance(plan.leaves) {
            self.processes[host].close(self.now);
            self.pump(host);
            self.run_until(self.now + 3 * MS);
            self.replace(host);
        }
        if self.rng.chance(plan.cuts) {
            let other = (host + 1) % self.processes.len();
            let cut = (home(host).ip(), home(other).ip());
            self.links.block(cut.0, cut.1, true);
            self.cuts.insert(self.now + self.rng.below(plan.cut + 1), cut);
        }
        if self.rng.chance(plan.paths) {
            let other = (host + 1) % self.processes.len();
            let mtu = [SHORTEST, 3000, 3600, 8900, INTERFACE, 65_507][self.rng.size(0, 5)];
            self.links.set(home(host).ip(), home(other).ip(), LinkParams { mtu, ..plan.links });
        }
        if self.rng.chance(plan.stops) {
            let until = self.now + self.rng.below(plan.stop + 1);
            self.processes[host].stop(until);
        }
        if plan.withdrawals > 0
            && self.rng.chance(plan.withdrawals)
            && !self.processes[host].is_stopped(self.now)
        {
            self.processes[host].withdraw_some(self.now, host, &mut self.model);
            self.pump(host);
        }
        if self.rng.chance(plan.rests) {
            // Around the limits of docs/rd.md section 4.
            let rest = [8, 14, 29, 30, 31, 32, 33, 59, 60, 61, 75][self.rng.size(0, 10)] * SEC;
            let until = self.now + rest + self.rng.below(SEC);
            self.run_until(until);
        }
        if plan.stranger {
            self.intrude();
        }
    }

    fn replace(&mut self, host: usize) {
        let life = self.processes[host].life + 1;
        self.model.killed(host, self.processes[host].life);
        let mut process = Process::new(self.now, home(host), config(&self.plan), QUEUE_PAIRS, &mut self.rng);
        process.life = life;
        process.refill(self.now, self.plan.receives, 0, &mut self.rng);
        self.processes[host] = process;
    }

    /// Runs until then.
    ///
    /// # Panics
    /// If a property is broken, or if the processes never rest.
    pub fn run_until(&mut self, end: Time) {
        for steps in 0_u64.. {
            assert!(steps < MOST_STEPS, "no rest at {} ns: {:?}", self.now, self.processes);
            let timers = self.processes.iter().filter_map(|process| process.next_time(self.now));
            let cut = self.cuts.keys().next().copied();
            let next = timers.chain(self.links.next()).chain(cut).min();
            let Some(next) = next.filter(|next| *next <= end) else {
                self.now = self.now.max(end);
                return;
            };
            self.now = self.now.max(next);
            self.step();
        }
    }

    fn step(&mut self) {
        while let Some(cut) = self.cuts.first_entry().filter(|cut| *cut.key() <= self.now) {
            let (from, to) = cut.remove();
            self.links.block(from, to, false);
        }
        while let Some(datagram) = self.links.receive(self.now) {
            if datagram.to == nobody() {
                continue;
            }
            if datagram.from == nobody() {
                self.from_nobody += datagram.bytes.len() as u64;
            }
            if let Some(process) = self.processes.iter_mut().find(|process| process.at == datagram.to) {
                process.inbox.push_back(datagram);
            }
        }
        for host in 0..self.processes.len() {
            if self.processes[host].is_stopped(self.now) {
                continue;
            }
            let (now, late) = (self.now, self.plan.late_receives);
            let process = &mut self.processes[host];
            process.refill(now, self.plan.receives, late, &mut self.rng);
            // Another thread may send while a segment is being placed.
            let mut early = Vec::new();
            process.turn(now, host, &mut self.model, &mut self.rng, &mut early);
            early.into_iter().for_each(|datagram| self.emit(host, datagram));
            self.pump(host);
        }
    }

    /// A process sends what it has to send.
    fn pump(&mut self, host: usize) {
        self.processes[host].act(host, &mut self.model);
        while let Some(datagram) = self.processes[host].transmit(self.now, host, &mut self.model) {
            self.emit(host, datagram);
            self.processes[host].act(host, &mut self.model);
            self.processes[host].search(self.now, INTERFACE);
        }
        let held = self.processes[host].held_bytes();
        assert!(held <= 256 * 1024 * self.plan.processes, "held more than may be");
    }

    fn emit(&mut self, host: usize, datagram: Datagram) {
        self.packets += 1;
        self.long += u64::from(datagram.bytes.len() > 1472);
        if datagram.to == nobody() {
            self.to_nobody += datagram.bytes.len() as u64;
            assert!(self.to_nobody <= self.from_nobody, "more to a stranger than came in its name");
        }
        if self.plan.stranger {
            let is_open = process::is_open(&datagram.bytes);
            let list = if is_open { &mut self.opens } else { &mut self.seen };
            list.push(datagram.clone());
        }
        self.links.send(self.now, self.processes[host].at.ip(), datagram);
    }

    /// The stranger reads everything and sends what it likes, but does not use a key that it has read in a
    /// packet of its own: docs/rd.md promises nothing against that.
    fn intrude(&mut self) {
        let host = self.rng.size(0, self.processes.len() - 1);
        let (to, other) = (home(host), home((host + 1) % self.processes.len()));
        // In the name of an address where nobody is, or of a peer.
        let from = if self.rng.chance(500) { nobody() } else { other };
        let bytes = match self.rng.below(4) {
            0 => process::forged_hello(from, to, self.rng.draw()),
            1 => process::forged_packet(from, to, self.rng.draw()),
            2 => {
                // As many as would fill the list of dead tokens.
                for _ in 0..5 {
                    let bytes = process::forged_open(from, to, self.rng.draw());
                    self.links.send(self.now, stranger(), Datagram { from, to, bytes });
                }
                return;
            }
            _ => {
                // A copy of what was seen, from where it came or in another's name. A late Open is the one
                // that could deliver again.
                let list = if self.rng.chance(700) { &self.opens } else { &self.seen };
                let Some(at) = list.len().checked_sub(1) else { return };
                let copy = list[self.rng.size(at.saturating_sub(9), at)].clone();
                if self.rng.chance(800) {
                    self.links.send(self.now, stranger(), copy);
                    return;
                }
                copy.bytes
            }
        };
        self.links.send(self.now, stranger(), Datagram { from, to, bytes });
    }

    /// Faults stop, everything settles, and nothing is left.
    fn finish(mut self) -> Tally {
        // Good again, but a path that has become shorter stays so: who does not notice would never end.
        let mtu = match self.plan.paths {
            0 => LinkParams::default().mtu,
            _ => [SHORTEST, 3000, 8900][self.rng.size(0, 2)],
        };
        self.links.set_all(LinkParams { mtu, ..LinkParams::default() });
        self.links.unblock_all();
        self.cuts.clear();
        let busy = self.now;
        self.plan.stranger = false;
        self.plan.late_receives = self.plan.late_receives.min(MS);
        self.run_until(busy + SETTLED);
        self.model.check_ended(self.now);
        self.run_until(self.now + 61 * SEC);
        let mut tally = Tally { duration: busy, packets: self.packets, long: self.long, ..Tally::default() };
        for process in &self.processes {
            process.check_empty();
            // What is posted after a withdrawal may take its receive before the withdrawn one comes back.
            if self.plan.one_flow && self.plan.withdrawals == 0 {
                process.check_receives_in_order();
            }
            let counts = process.counts;
            tally.held += counts.held;
            tally.joined += counts.joined;
            tally.taken_back += counts.taken_back;
            tally.no_receive += counts.no_receive;
            tally.withdrawn += counts.withdrawn;
        }
        (tally.done, tally.failed) = self.model.counts();
        tally.lost = self.links.tally().lost;
        tally
    }
}

/// Few requests at a time, so that some wait for others.
fn config(plan: &Plan) -> Config {
    Config { most_requests: 2, most_taken: if plan.paths > 0 { 64_000 } else { 1472 }, ..Config::default() }
}
