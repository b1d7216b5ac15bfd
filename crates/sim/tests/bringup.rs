//! Bring-up by number over the simulated hosts: the machine `Pairings` with the connection manager's own loop
//! and real queue pairs, in ten thousand worlds. The rules that are checked stand in `uwarp_sim::hosts`.
//!
//! `UWARP_SIM_SEED` runs the random world with this seed alone, `UWARP_SIM_WORLDS` so many of them.
//!
//! Mutations that were tried; these tests failed with each of them:
//!
//! | mutation | what failed first |
//! |-|-|
//! | every cookie counts (`Proof::made` not compared) | a stream with a stranger, random worlds |
//! | a cookie from before the move counts | the same, of a stranger that had the port before |
//! | halves of the PSNs in request and reply not compared | ends with other PSNs, random worlds |
//! | the same, in the reply alone | a stream with a stranger that has a dead peer's port |
//! | `Paused` has no deadline | nothing ends that state, all tests |
//! | an attempt reports before it closes | connections without a limit, nearly all tests |
//! | the shell reports `Ended` before `Used` | a pairing waits and its queue pair does not, all tests |

use rustix::io::Errno;
use uwarp_sim::hosts::network::Pid;
use uwarp_sim::hosts::process::{MESSAGES, Named};
use uwarp_sim::hosts::stranger::Stranger;
use uwarp_sim::hosts::{Event, Hosts, host, host_v6};
use uwarp_sim::{NetParams, Rng, Time};

const MS: Time = 1_000_000;
const SEC: Time = 1000 * MS;
/// Within this time after the last fault, queue pairs that wait for each other are joined.
const JOINED: Time = 5 * SEC;
/// The same if datagrams are still lost.
const JOINED_WITH_LOSS: Time = 40 * SEC;

type Qp = (Pid, u32);

/// Makes a world.
struct Script {
    hosts: Hosts,
    rng: Rng,
    /// Where each process is.
    places: Vec<(Pid, std::net::SocketAddr, Vec<u32>)>,
    exchanges: u32,
    /// All PSNs are 0, as NCCL and UCX set them.
    known: bool,
    /// The hosts have IPv6 addresses.
    six: bool,
    /// Each second number of a process is of another port.
    two_ports: bool,
}

impl Script {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x5EED);
        let delay = [(10_000, 200_000), (1_000, 2_000), (1_000_000, 20_000_000)][rng.size(0, 2)];
        let piece = [7, 64, 4096][rng.size(0, 2)];
        let capacity = [256, 64 * 1024][rng.size(0, 1)];
        let net = NetParams { delay, piece, capacity, stalls: 0, stall: 0 };
        let mut hosts = Hosts::new(seed, net);
        hosts.infiniband = rng.chance(500);
        hosts.timeout = if rng.chance(300) { 14 } else { 0 };
        Self { hosts, rng, places: Vec::new(), exchanges: 0, known: false, six: false, two_ports: false }
    }

    fn host(&self, n: u8) -> std::net::IpAddr {
        if self.six { host_v6(n) } else { host(n) }
    }

    fn port(&self, first: u16, n: u32) -> u32 {
        u32::from(first) + if self.two_ports { 10 * (n % 2) } else { 0 }
    }

    /// A process at this address, with so many queue pairs.
    fn place(&mut self, at: Time, ip: u8, port: u16, queue_pairs: u32) -> Pid {
        let pid = self.places.len() + 1;
        let qpns: Vec<u32> = (0..queue_pairs).map(|n| (self.port(port, n) << 8) + 7 + n).collect();
        assert_eq!(Stranger::port(qpns[0]), port);
        let address = (self.host(ip), port).into();
        self.places.push((pid, address, qpns.clone()));
        self.hosts.schedule(at, Event::Start(pid, address, qpns));
        pid
    }

    /// The same place, for a process that begins again there.
    fn place_again(&mut self, at: Time, old: Pid) -> Pid {
        let (_, address, qpns) = self.places[old - 1].clone();
        let pid = self.places.len() + 1;
        self.places.push((pid, address, qpns.clone()));
        self.hosts.schedule(at, Event::Start(pid, address, qpns));
        pid
    }

    fn qp(&self, pid: Pid, n: usize) -> Qp {
        (pid, self.places[pid - 1].2[n])
    }

    /// The programs of two queue pairs exchange numbers: whom each names.
    fn exchange(&mut self, pair: [Qp; 2]) -> [Named; 2] {
        self.exchanges += 1;
        let exchange = self.exchanges;
        let mut psns = [0, 1].map(|_| 1 + self.rng.below(0xFF_FFFE) as u32);
        if pair[0] == pair[1] {
            psns[1] = psns[0];
        }
        if self.known {
            psns = [0; 2];
        }
        [0, 1].map(|own: usize| {
            let (pid, qpn) = pair[1 - own];
            let address = self.places[pid - 1].1.ip();
            Named { pid, address, qpn, exchange, psns: [psns[1 - own], psns[own]] }
        })
    }

    /// RESET, RTR and RTS of both, after such times each.
    fn events(&mut self, pair: [Qp; 2], rtr: [Time; 2], rts: [Option<Time>; 2]) -> Vec<(Time, Event)> {
        let named = self.exchange(pair);
        let mut events = Vec::new();
        let ends = if pair[0] == pair[1] { 1 } else { 2 };
        for end in 0..ends {
            let (pid, qpn) = pair[end];
            events.push((rtr[end], Event::Reset(pid, qpn)));
            events.push((rtr[end], Event::Rtr(pid, qpn, named[end])));
            if let Some(rts) = rts[end] {
                events.push((rts.max(rtr[end]), Event::Rts(pid, qpn)));
            }
        }
        events.sort_by_key(|(at, _)| *at);
        events
    }

    fn schedule(&mut self, events: Vec<(Time, Event)>) {
        for (at, event) in events {
            self.hosts.schedule(at, event);
        }
    }

    /// A time up to `limit`, more often a short one.
    fn time(&mut self, limit: Time) -> Time {
        let limit = [limit, limit / 100, MS, 1][self.rng.size(0, 3)].min(limit);
        self.rng.below(limit + 1)
    }
}

/// Runs to the end and checks what must hold then. Returns how many of the pairs were joined.
fn finish(hosts: &mut Hosts, pairs: &[[Qp; 2]], limit: Time) -> usize {
    let last = hosts.last_event();
    hosts.run_until(last + limit);
    let joined: Vec<Option<bool>> = pairs.iter().map(|[a, b]| hosts.is_joined(*a, *b)).collect();
    for (pair, joined) in pairs.iter().zip(&joined) {
        if *joined == Some(false) {
            for end in pair {
                let process = &hosts.processes[&end.0];
                let phases: Vec<_> = process.phases().collect();
                eprintln!("{end:x?}: {:?} {phases:?}", process.stream(end.1));
            }
            panic!("{pair:x?} are not joined");
        }
    }
    hosts.run_until(last + limit + 5 * SEC);
    for ([a, b], joined) in pairs.iter().zip(&joined) {
        for ((pid, qpn), peer) in [(*a, *b), (*b, *a)] {
            let Some(process) = hosts.processes.get(&pid) else { continue };
            let queue_pair = &process.queue_pairs[&qpn];
            let done = queue_pair.completed;
            if process.is_up(qpn) == Some(true) && queue_pair.streams.end.core.awaits_stream().is_none() {
                assert_eq!(done[0] + done[1], queue_pair.sent, "{qpn:x}: posted work ends or completes");
            }
            if *joined == Some(true) && queue_pair.sent == MESSAGES {
                assert_eq!(done, [MESSAGES, 0], "{qpn:x}: messages of a joined pair arrive");
                let theirs = &hosts.processes[&peer.0].queue_pairs[&peer.1];
                assert_eq!(theirs.received, MESSAGES, "{:x}: messages of a joined pair arrive", peer.1);
            }
        }
    }
    hosts.end();
    joined.iter().filter(|joined| **joined == Some(true)).count()
}

// --- A fault at each step.

/// How a pair is brought up, if nothing goes wrong.
#[derive(Debug, Clone, Copy)]
enum Base {
    TwoHosts,
    OneHost,
    Late,
    EarlyListener,
    RtsLate,
    OneStaysInRtr,
    Itself,
}

fn base(base: Base, seed: u64) -> (Script, [Qp; 2]) {
    let mut script = Script::new(seed);
    script.hosts.timeout = 0;
    let other = if matches!(base, Base::OneHost) { 1 } else { 2 };
    let a = script.place(0, 1, 20_000, 1);
    let b = script.place(0, other, 20_001, 1);
    let pair = [script.qp(a, 0), script.qp(if matches!(base, Base::Itself) { a } else { b }, 0)];
    let (rtr, rts) = match base {
        Base::TwoHosts | Base::OneHost | Base::Itself => ([MS, MS], [Some(MS), Some(MS)]),
        Base::Late => ([700 * MS, MS], [Some(700 * MS), Some(2 * MS)]),
        Base::EarlyListener => ([MS, 700 * MS], [Some(2 * MS), Some(700 * MS)]),
        Base::RtsLate => ([MS, 2 * MS], [Some(500 * MS), Some(300 * MS)]),
        Base::OneStaysInRtr => ([MS, 2 * MS], [None, Some(3 * MS)]),
    };
    let events = script.events(pair, rtr, rts);
    script.schedule(events);
    (script, pair)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    Close,
    Reset,
    Kill,
    PowerLoss,
    Stop,
    ProgramResets,
    NoDescriptors,
    AddressInUse,
}

const TROUBLES: [Trouble; 8] = [
    Trouble::Close,
    Trouble::Reset,
    Trouble::Kill,
    Trouble::PowerLoss,
    Trouble::Stop,
    Trouble::ProgramResets,
    Trouble::NoDescriptors,
    Trouble::AddressInUse,
];

/// What happens at the step, and what the programs do then. Returns whom they have named at the end.
fn trouble(script: &mut Script, what: Trouble, pair: [Qp; 2], side: usize) -> (Vec<(Time, Event)>, [Qp; 2]) {
    let (pid, qpn) = pair[side];
    let both = [Some(0), Some(0)];
    let again = |script: &mut Script, old: [Qp; 2], up: Time| {
        let new = script.places.len() + 1;
        let (_, address, qpns) = script.places[pid - 1].clone();
        script.places.push((new, address, qpns.clone()));
        let pair = old.map(|(of, qpn)| if of == pid { (new, qpn) } else { (of, qpn) });
        let mut events = vec![(up, Event::Start(new, address, qpns))];
        let rtr = [0, 1].map(|_| up + script.time(SEC));
        events.extend(script.events(pair, rtr, both));
        (events, pair)
    };
    let until = script.hosts.now + 2 * SEC;
    let mut events = match what {
        Trouble::Close => vec![(0, Event::Break(pid, true))],
        Trouble::Reset => vec![(0, Event::Break(pid, false))],
        Trouble::Stop => vec![(0, Event::Stop(pid, until)), (2 * SEC, Event::Loss(0))],
        Trouble::NoDescriptors => {
            vec![(0, Event::Refuse(pid, Errno::MFILE, until)), (2 * SEC, Event::Loss(0))]
        }
        Trouble::AddressInUse => {
            vec![(0, Event::Refuse(pid, Errno::ADDRINUSE, until)), (2 * SEC, Event::Loss(0))]
        }
        Trouble::Kill => {
            let (more, pair) = again(script, pair, SEC / 2);
            let mut events = vec![(0, Event::Kill(pid)), (0, Event::Anew)];
            events.extend(more);
            return (events, pair);
        }
        Trouble::PowerLoss => {
            let (more, pair) = again(script, pair, 2 * SEC + MS);
            let mut events = vec![(0, Event::LosePower(pid, 2 * SEC)), (0, Event::Anew)];
            events.extend(more);
            return (events, pair);
        }
        Trouble::ProgramResets => {
            let rtr = [0, 1].map(|_| script.time(SEC));
            let mut events = vec![(0, Event::Reset(pid, qpn)), (0, Event::Anew)];
            events.extend(script.events(pair, rtr, both));
            events
        }
    };
    events.sort_by_key(|(at, _)| *at);
    (events, pair)
}

/// A run without a fault is counted in steps; then, at each step, for each end, each fault.
fn at_each_step(which: Base, seed: u64) {
    let (mut script, pair) = base(which, seed);
    script.hosts.run_until(2 * SEC);
    let steps = script.hosts.steps;
    assert_eq!(finish(&mut script.hosts, &[pair], JOINED), 1, "{which:?}: no fault");
    drop(script);
    let (mut worlds, mut joined) = (0, 0);
    for step in 0..=steps {
        for side in 0..if matches!(which, Base::Itself) { 1 } else { 2 } {
            for what in TROUBLES {
                let at = At(which, seed, step, side, what);
                let (mut script, pair) = base(which, seed);
                let (events, pair) = trouble(&mut script, what, pair, side);
                script.hosts.at_step = Some((step, events));
                script.hosts.run_until(2 * SEC);
                joined += finish(&mut script.hosts, &[pair], JOINED);
                worlds += 1;
                std::mem::forget(at);
            }
        }
    }
    println!("{which:?}: {worlds} worlds of {steps} steps, joined in {joined}");
    assert!(joined * 2 > worlds, "{which:?}: joined in {joined} of {worlds} worlds");
}

/// Prints which run it was that panics.
struct At(Base, u64, u64, usize, Trouble);

impl Drop for At {
    fn drop(&mut self) {
        let Self(base, seed, step, side, what) = self;
        eprintln!("{base:?}, seed {seed}: {what:?} of end {side} at step {step}");
    }
}

macro_rules! at_each_step {
    ($($name:ident: $base:ident,)*) => {$(
        #[test]
        fn $name() {
            at_each_step(Base::$base, 1);
        }
    )*};
}

at_each_step! {
    a_fault_at_each_step_between_two_hosts: TwoHosts,
    a_fault_at_each_step_on_one_host: OneHost,
    a_fault_at_each_step_if_the_listener_is_late: Late,
    a_fault_at_each_step_if_the_connector_is_late: EarlyListener,
    a_fault_at_each_step_if_rts_is_late: RtsLate,
    a_fault_at_each_step_if_one_stays_in_rtr: OneStaysInRtr,
    a_fault_at_each_step_of_a_queue_pair_with_itself: Itself,
}

// --- Random worlds.

/// The number in an environment variable.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Trouble in this round, which begins and ends at these times. Returns when the last of it is over.
fn troubles(script: &mut Script, peers: &[usize; 2], begin: Time, mut last: Time) -> Time {
    for _ in 0..script.rng.size(0, 2) {
        let at = begin + script.time((last - begin).max(SEC));
        let pid = peers[script.rng.size(0, 1)];
        let until = at + script.time(2 * SEC);
        let event = match script.rng.below(8) {
            0 | 1 => Event::Break(pid, true),
            2 | 3 => Event::Break(pid, false),
            4 => Event::Stop(pid, until),
            5 => Event::Refuse(pid, Errno::MFILE, until),
            6 => Event::Refuse(pid, Errno::ADDRINUSE, until),
            _ => continue,
        };
        script.hosts.schedule(at, event);
        last = last.max(until);
    }
    last
}

/// A program moves to another peer.
fn another_peer(script: &mut Script, one: Qp, begin: Time) -> [Qp; 2] {
    let other = script.place(begin - MS, 3, 20_002, 1);
    let pair = [one, script.qp(other, 0)];
    let rtr = [0, 1].map(|_| begin + script.time(SEC));
    let rts = rtr.map(|at| Some(at + script.time(SEC)));
    let events = script.events(pair, rtr, rts);
    script.schedule(events);
    pair
}

/// Before a process is there, a stranger has its port.
fn stranger_before(script: &mut Script, b: usize, late: Time, targets: &[(std::net::SocketAddr, u32)]) {
    let index = stranger(script, b, 0, targets);
    script.hosts.schedule(1, Event::Stranger(index));
    script.hosts.schedule(late, Event::StrangerLeaves(index));
    // It leaves first.
    script.hosts.sort_starts_last(late);
}

/// A process dies, and its port gets another one. Returns when that one is there.
fn dies(
    script: &mut Script,
    peers: &mut [usize; 2],
    pairs: &mut [[Qp; 2]],
    begin: Time,
    two_hosts: bool,
    targets: &[(std::net::SocketAddr, u32)],
) -> Time {
    let side = script.rng.size(0, 1);
    let old = peers[side];
    let up = begin + 10 * MS + script.time(2 * SEC);
    let dark = script.rng.chance(300) && two_hosts;
    let death = if dark { Event::LosePower(old, up) } else { Event::Kill(old) };
    script.hosts.schedule(begin, death);
    if !script.known && !dark && script.rng.chance(500) {
        let index = stranger(script, old, begin + 1, targets);
        script.hosts.schedule(begin + 1, Event::Stranger(index));
        let leaves =
            if script.rng.chance(500) { Event::StrangerEnds(index) } else { Event::StrangerLeaves(index) };
        script.hosts.schedule(up, leaves);
    }
    let new = script.place_again(up, old);
    peers[side] = new;
    for pair in pairs {
        *pair = pair.map(|(pid, qpn)| if pid == old { (new, qpn) } else { (pid, qpn) });
    }
    up + MS + script.time(SEC)
}

fn random(seed: u64) -> usize {
    let mut script = Script::new(seed);
    let rng = &mut script.rng;
    script.known = rng.chance(150);
    script.six = rng.chance(400);
    script.two_ports = rng.chance(400);
    let ips = [[1, 2], [2, 1], [1, 1]][rng.size(0, 2)];
    let ports = if rng.chance(500) { [20_000, 20_001] } else { [20_001, 20_000] };
    let queue_pairs = rng.size(1, 3) as u32;
    let strangers = if rng.chance(400) { rng.size(1, 2) } else { 0 };
    let loss = if rng.chance(400) { rng.below(301) as u32 } else { 0 };
    let stays_lossy = loss > 0 && rng.chance(500);
    script.hosts.limit = [16, 64][rng.size(0, 1)];
    script.hosts.schedule(0, Event::Loss(loss));
    let very_late = script.rng.chance(60);
    let late = script.time(if very_late { 90 * SEC } else { SEC });
    let a = script.place(0, ips[0], ports[0], queue_pairs);
    let b = script.place(late, ips[1], ports[1], queue_pairs);
    let mut targets: Vec<(std::net::SocketAddr, u32)> = Vec::new();
    for (_, at, qpns) in &script.places {
        let place = |qpn: &u32| (std::net::SocketAddr::new(at.ip(), Stranger::port(*qpn)), *qpn);
        targets.extend(qpns.iter().map(place));
        targets.push((*at, (u32::from(at.port()) << 8) + 200));
    }
    if late > 10 * MS && script.rng.chance(300) {
        stranger_before(&mut script, b, late, &targets);
    }
    let mut pairs: Vec<[Qp; 2]> =
        (0..queue_pairs as usize).map(|n| [script.qp(a, n), script.qp(b, n)]).collect();
    if script.rng.chance(100) {
        pairs[0] = [script.qp(a, 0); 2];
    } else if queue_pairs > 1 && script.rng.chance(150) {
        // Two of one process, perhaps of two ports.
        pairs.remove(1);
        pairs[0] = [script.qp(a, 0), script.qp(a, 1)];
    }
    let mut begin = late + MS;
    let rounds = script.rng.size(1, 3);
    let mut peers = [a, b];
    for round in 0..rounds {
        let mut last = begin;
        for pair in &pairs {
            let wait = if script.rng.chance(20) { 90 * SEC } else { 2 * SEC };
            let rtr = [0, 1].map(|_| begin + script.time(wait));
            let mut rts = [0, 1].map(|end| Some(rtr[end] + script.time(3 * SEC)));
            if script.rng.chance(150) {
                let end = script.rng.size(0, 1);
                if pair[0] != pair[1] {
                    rts[end] = None;
                }
            }
            last = rtr.into_iter().chain(rts.into_iter().flatten()).fold(last, Time::max);
            let events = script.events(*pair, rtr, rts);
            script.schedule(events);
        }
        last = troubles(&mut script, &peers, begin, last);
        begin = last + script.time(2 * SEC);
        if round + 1 == rounds || !script.rng.chance(300) {
            continue;
        }
        begin = dies(&mut script, &mut peers, &mut pairs, begin, ips[0] != ips[1], &targets);
    }
    if script.rng.chance(150) {
        pairs.push(another_peer(&mut script, pairs[0][0], begin + MS));
    }
    for _ in 0..strangers {
        let ip = script.rng.size(1, 3) as u8;
        let own = script.rng.size(0, 1);
        let index = stranger_with_own_port(&mut script, ip, own, peers[own], &targets);
        script.hosts.schedule(2 + script.rng.below(SEC), Event::Stranger(index));
    }
    let last = script.hosts.last_event();
    if !stays_lossy {
        script.hosts.schedule(last, Event::Loss(0));
    }
    finish(&mut script.hosts, &pairs, if stays_lossy { JOINED_WITH_LOSS } else { JOINED })
}

/// A stranger that takes the port of this process while that does not live.
fn stranger(script: &mut Script, pid: Pid, at: Time, targets: &[(std::net::SocketAddr, u32)]) -> usize {
    let (_, address, own) = script.places[pid - 1].clone();
    let index = script.hosts.strangers.len();
    let mut stranger = Stranger::new(1000 + index, address, at + 1, Time::MAX, script.rng.fork());
    stranger.own = own;
    stranger.targets = targets.iter().copied().filter(|(to, _)| *to != address).collect();
    stranger.knows_psns = script.known;
    script.hosts.strangers.push(stranger);
    index
}

/// A stranger with a port of its own, which names that, or a number of this process.
fn stranger_with_own_port(
    script: &mut Script,
    ip: u8,
    own: usize,
    peer: Pid,
    targets: &[(std::net::SocketAddr, u32)],
) -> usize {
    let port = 20_100 + script.hosts.strangers.len() as u16;
    let index = script.hosts.strangers.len();
    let at = 3 + script.rng.below(SEC);
    let own_place = (script.host(ip), port).into();
    let mut stranger = Stranger::new(1000 + index, own_place, at, Time::MAX, script.rng.fork());
    stranger.own = (0..4).map(|n| (u32::from(port) << 8) + n).collect();
    if own == 0 {
        stranger.own.extend(&script.places[peer - 1].2);
    }
    stranger.targets = targets.to_vec();
    stranger.knows_psns = script.known;
    stranger.floods = if script.rng.chance(50) { 2 } else { 0 };
    script.hosts.strangers.push(stranger);
    index
}

fn random_worlds(part: u64) {
    if let Some(seed) = number("UWARP_SIM_SEED") {
        random(seed);
        return;
    }
    let worlds = number("UWARP_SIM_WORLDS").unwrap_or(5000) / 2;
    let joined: usize = (0..worlds).map(|world| random(2 * world + part)).sum();
    println!("{joined} pairs were joined in {worlds} worlds");
    assert!(joined as u64 > worlds, "most pairs are joined");
}

#[test]
fn random_worlds_with_even_seeds() {
    random_worlds(0);
}

#[test]
fn random_worlds_with_odd_seeds() {
    random_worlds(1);
}
