//! What many peers cost one process that talks to them by reliable datagrams: the machines of all processes,
//! in virtual time. Prints a line for each number of peers; docs/scale.md has them, and says what they show.
//!
//! ```text
//! cargo run --release -p uwarp-sim --example scale [PEERS...]
//! ```
//!
//! The process posts one message to each peer, one after the other, and each peer has a process of its own,
//! which answers nothing by itself. Then nothing is sent any more, until all is forgotten.

use std::collections::{BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use uwarp_proto::clock::Now;
use uwarp_proto::rd::{Action, Config, Outgoing, PacketBuf, Placed, QpnPair, Rd, Route, Target};
use uwarp_wire::ddp::QN_SEND;
use uwarp_wire::rd::segment::First;

/// One way, on every path.
const DELAY: Duration = Duration::from_micros(20);
/// Between two posts.
const PAUSE: Duration = Duration::from_micros(2);
/// Of each message.
const BYTES: u32 = 64;
/// After this time without a packet, an exchange is forgotten (docs/rd.md section 4).
const FORGOTTEN: Duration = Duration::from_secs(62);
/// The receive buffer of each process, as the system counts it.
const SOCKET: u64 = 4 << 20;

/// A process, and what it has done.
struct Process {
    rd: Rd,
    timer: Option<Instant>,
    finished: usize,
    sent: u64,
    sent_bytes: u64,
    timeouts: u64,
}

impl Process {
    fn new(now: Instant, number: u32) -> Self {
        let config = Config { most_peers: usize::MAX, ..Config::default() };
        let mut seed = [0; 32];
        seed.iter_mut().zip(number.to_le_bytes().into_iter().cycle()).for_each(|(to, byte)| *to = byte);
        let mut rd = Rd::new(&Now::at(now), config, &seed);
        rd.set_room(SOCKET);
        Self { rd, timer: None, finished: 0, sent: 0, sent_bytes: 0, timeouts: 0 }
    }

    fn receive(&mut self, now: Instant, route: Route, datagram: &[u8]) {
        let now = Now::at(now);
        let mut arrivals = Vec::new();
        self.rd.on_socket_empty(&now);
        self.rd.handle_input(&now, route, datagram, &mut arrivals);
        while let Some(arrival) = arrivals.pop() {
            self.rd.on_placed(&now, &arrival, Placed::Done, &mut arrivals);
        }
    }

    fn act(&mut self) {
        while let Some(action) = self.rd.poll_action() {
            if let Action::Finished { outcome, .. } = action {
                assert_eq!(outcome, Ok(()), "nothing is lost");
                self.finished += 1;
            }
        }
    }
}

/// All processes, the one that talks to the others first, and the datagrams on their way.
struct World {
    now: Instant,
    processes: Vec<Process>,
    timers: BTreeSet<(Instant, usize)>,
    /// When each arrives, where, from whom. All take the same time, so they arrive in their order.
    wire: VecDeque<(Instant, usize, usize, Vec<u8>)>,
    packet: PacketBuf,
}

impl World {
    fn new(peers: usize) -> Self {
        let now = Instant::now();
        let processes = (0..=peers).map(|number| Process::new(now, number as u32)).collect();
        Self { now, processes, timers: BTreeSet::new(), wire: VecDeque::new(), packet: PacketBuf::new() }
    }

    /// What a process has to say, and when it wants to be called.
    fn after(&mut self, number: usize) {
        let Some(process) = self.processes.get_mut(number) else { return };
        process.act();
        while let Some(route) = process.rd.poll_transmit(&Now::at(self.now), &mut self.packet) {
            let mut bytes = Vec::with_capacity(self.packet.packet_len());
            let zeros = |len: u32, out: &mut Vec<u8>| out.resize(out.len() + len as usize, 0);
            self.packet.assemble(0, &mut bytes, |payload, out| zeros(payload.len, out));
            process.sent += 1;
            process.sent_bytes += bytes.len() as u64;
            self.wire.push_back((self.now + DELAY, number_of(route.remote), number, bytes));
        }
        let timer = process.rd.poll_timeout();
        if timer != process.timer {
            process.timer.into_iter().for_each(|at| _ = self.timers.remove(&(at, number)));
            timer.into_iter().for_each(|at| _ = self.timers.insert((at, number)));
            process.timer = timer;
        }
    }

    /// Until `end`.
    fn run_until(&mut self, end: Instant) {
        loop {
            let arrival = self.wire.front().map(|(at, ..)| *at).filter(|at| *at <= end);
            let timer = self.timers.first().copied().filter(|(at, _)| *at <= end);
            match (arrival, timer) {
                (Some(at), timer) if timer.is_none_or(|(other, _)| at <= other) => {
                    let Some((_, to, from, bytes)) = self.wire.pop_front() else { return };
                    self.now = self.now.max(at);
                    let route = Route { local: address(to), remote: address(from) };
                    let now = self.now;
                    self.processes.get_mut(to).into_iter().for_each(|to| to.receive(now, route, &bytes));
                    self.after(to);
                }
                (_, Some((at, number))) => {
                    self.now = self.now.max(at);
                    let now = Now::at(self.now);
                    if let Some(process) = self.processes.get_mut(number) {
                        process.timeouts += 1;
                        process.rd.handle_timeout(&now);
                    }
                    self.after(number);
                }
                _ => break,
            }
        }
        self.now = self.now.max(end);
    }

    fn post(&mut self, from: usize, to: usize) {
        let message = Outgoing {
            pair: QpnPair { source: 1, destination: 2 },
            first: First { qkey: 1, immediate: None, job_key: None },
            target: Target::Untagged { qn: QN_SEND, rsvdulp: 0, rsvdulp32: 0 },
            len: BYTES,
            ordered: false,
            rnr_retry: 7,
            unrepeated: false,
        };
        let route = Route { local: address(from), remote: address(to) };
        let now = Now::at(self.now);
        if let Some(from) = self.processes.get_mut(from) {
            from.rd.post(&now, route, message).expect("there is room for the peer");
        }
        self.after(from);
    }

    fn hub(&self) -> &Process {
        self.processes.first().expect("there is one")
    }

    /// Packets, their bytes and timeouts, of all processes.
    fn counts(&self) -> [u64; 3] {
        let sum = |of: fn(&Process) -> u64| self.processes.iter().map(of).sum();
        [sum(|process| process.sent), sum(|process| process.sent_bytes), sum(|process| process.timeouts)]
    }

    /// A message to each peer, one after the other, until all have ended; returns the processor time of one.
    fn round(&mut self) -> Duration {
        let (peers, began, before) = (self.processes.len() - 1, Instant::now(), self.hub().finished);
        for to in 1..=peers {
            self.post(0, to);
            self.run_until(self.now + PAUSE);
        }
        while self.hub().finished < before + peers {
            self.run_until(self.now + DELAY);
        }
        began.elapsed() / peers as u32
    }
}

fn address(number: usize) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0001 + number as u32)), 20_000)
}

fn number_of(address: SocketAddr) -> usize {
    match address.ip() {
        IpAddr::V4(address) => (address.to_bits() - 0x0a00_0001) as usize,
        IpAddr::V6(_) => unreachable!("all have IPv4"),
    }
}

/// Bytes of the process that are in memory.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").expect("/proc is there");
    let pages: u64 = text.split_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    pages * rustix::param::page_size() as u64
}

/// Bytes of an exchange: processes that have all talked to all others, about so many exchanges in all. (Of
/// a process with one peer alone, half the memory would be that of its empty lists.)
fn bytes_of_exchange(exchanges: usize) -> u64 {
    let processes = (exchanges as f64).sqrt().ceil().max(2.0) as usize;
    let mut world = World::new(processes - 1);
    let before = resident();
    for from in 0..processes {
        for to in (0..processes).filter(|to| *to != from) {
            world.post(from, to);
            world.run_until(world.now + DELAY * 10);
        }
    }
    resident().saturating_sub(before) / (processes * (processes - 1)) as u64
}

fn main() {
    let given: Vec<usize> = std::env::args().skip(1).filter_map(|word| word.parse().ok()).collect();
    let peers = if given.is_empty() { vec![10, 100, 1_000, 10_000, 100_000] } else { given };
    println!(
        "{:>7} {:>14} {:>15} {:>15} {:>13} {:>12} {:>12}",
        "peers",
        "bytes of one",
        "packets: first",
        "packets: later",
        "bytes: later",
        "timeouts",
        "µs a message"
    );
    for peers in peers {
        let exchange = bytes_of_exchange(peers);
        let mut world = World::new(peers);
        world.round();
        world.run_until(world.now + Duration::from_secs(1));
        let first = world.counts();
        let took = world.round();
        world.run_until(world.now + Duration::from_secs(1));
        let later = world.counts();
        assert_eq!(world.hub().rd.peers(), peers, "nobody is forgotten while messages come");
        world.run_until(world.now + FORGOTTEN);
        let end = world.counts();
        assert_eq!(world.hub().rd.peers(), 0, "all are forgotten");
        let each = |number: u64| number as f64 / peers as f64;
        println!(
            "{peers:>7} {exchange:>14} {:>15.2} {:>15.2} {:>13.0} {:>12.2} {:>12.2}",
            each(first[0]),
            each(later[0] - first[0]),
            each(later[1] - first[1]),
            each(end[2]),
            took.as_secs_f64() * 1e6,
        );
    }
}
