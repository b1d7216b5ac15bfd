//! Lookups of rdma_cm's ids of datagrams over the simulated network. The rules that are checked stand in
//! `uwarp_sim::lookups`: what a client is told, by when, and what a server keeps for whom.
//!
//! Mutations of the connection manager that were tried, each alone; what failed first:
//!
//! | mutation | what failed |
//! |-|-|
//! | a Request is not repeated | a client is told nothing, four tests |
//! | the client's patience has no end | nothing ends the lookup, four tests |
//! | a pause has no next deadline | a deadline is over after its timeout, all tests |
//! | every cookie counts (`is_short_valid` not compared) | requests of foreign addresses, random worlds |
//! | the transaction is not compared | a client is told what nobody has said, random worlds |
//! | a corrupt Reply is read | the same |
//! | each cookie is answered at once | more Requests than are due, two tests |
//! | the cookie is not returned | the same two |
//! | a missing listener is reported at once | nobody has said so for long enough, five tests |
//! | the backlog is not kept | more requests wait, two tests |
//! | an answer is not remembered | a client is told nothing, three tests |
//! | a repeated Request is a new one | it is reported twice, four tests |
//! | the port space is not compared | a Request for another one, random worlds |
//! | the event comes before the id's new state | what its program finds, all tests |
//!
//! Not noticed here, because the id drops the machine at the same time: a client or a server whose `cancel`
//! does nothing; `machine/tests/lookup.rs` notices both.
//!
//! `UWARP_SIM_SEED` runs the random world with this seed alone, `UWARP_SIM_WORLDS` so many of them.

use uwarp_sim::lookups::server::Plan;
use uwarp_sim::lookups::stranger::{Kind, Stranger};
use uwarp_sim::lookups::{Event, Lookups, UDP};
use uwarp_sim::{NetParams, Rng, Time};

const MS: Time = 1_000_000;
const SEC: Time = 1000 * MS;
/// A client's patience, and some more.
const DECIDED: Time = 70 * SEC;
/// `RDMA_PS_TCP` on the wire.
const TCP: u16 = 0x0106;

fn plan() -> Plan {
    Plan { port_space: UDP, backlog: 8, slow: MS, rejects: [0; 3] }
}

fn net(rng: &mut Rng) -> NetParams {
    let delay = [(10_000, 200_000), (1_000, 2_000), (1_000_000, 20_000_000)][rng.size(0, 2)];
    NetParams { delay, piece: 64, capacity: 1024, stalls: 0, stall: 0 }
}

// --- A fault at each step.

/// How lookups go, if nothing goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Base {
    /// Two clients are answered.
    Answered,
    /// The program rejects.
    Rejected,
    /// The server is busy: clients prove their addresses.
    Busy,
    /// The server begins late.
    Late,
    /// Nobody listens.
    Nobody,
}

fn base(base: Base, seed: u64) -> Lookups {
    let mut rng = Rng::new(seed ^ 0x100C);
    let mut world = Lookups::new(seed, net(&mut rng));
    let plan = match base {
        Base::Answered | Base::Late | Base::Nobody => plan(),
        Base::Rejected => Plan { rejects: [1000, 0, 0], ..plan() },
        Base::Busy => Plan { backlog: 1, slow: 20 * MS, ..plan() },
    };
    if base != Base::Nobody {
        world.schedule(if base == Base::Late { 200 * MS } else { 0 }, Event::Start(plan));
    }
    for number in 0..if base == Base::Busy { 4 } else { 2 } {
        world.schedule(MS + Time::from(number) * 1000, Event::Ask(number, UDP));
    }
    world
}

/// What happens at a step, and whether clients that stay are still answered then.
fn troubles() -> Vec<(Vec<(Time, Event)>, bool)> {
    vec![
        (vec![(0, Event::Kill)], false),
        (vec![(0, Event::Kill), (200 * MS, Event::Start(plan()))], true),
        (vec![(0, Event::Kill), (2 * SEC, Event::Start(plan()))], false),
        (vec![(0, Event::StopServer(30 * SEC))], true),
        (vec![(0, Event::StopServer(3 * SEC)), (SEC, Event::Kill)], false),
        (vec![(0, Event::ListenAgain)], true),
        (vec![(0, Event::ListenAgain), (1, Event::ListenAgain)], true),
        (vec![(0, Event::Destroy(0))], true),
        (vec![(0, Event::Stop(0, 30 * SEC))], true),
        (vec![(0, Event::Stop(0, 80 * SEC))], false),
        (vec![(0, Event::Stop(0, SEC)), (0, Event::StopServer(SEC))], true),
        (vec![(0, Event::Loss(1000)), (10 * SEC, Event::Loss(0))], true),
        (vec![(0, Event::Loss(1000))], false),
    ]
}

/// Prints which run it was that panics.
struct At(Base, u64, Vec<(Time, Event)>);

impl Drop for At {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self(base, step, what) = self;
            eprintln!("{base:?}: {what:?} at step {step}");
        }
    }
}

/// A run without a fault is counted in steps; then, at each step, each fault.
fn at_each_step(which: Base) {
    let seed = 1;
    let mut world = base(which, seed);
    world.run_until(5 * SEC);
    let steps = world.steps;
    if which != Base::Nobody {
        world.check_answered();
    }
    world.end();
    drop(world);
    let (mut worlds, mut found) = (0, 0);
    for step in 0..=steps {
        for (events, answered) in troubles() {
            let mut world = base(which, seed);
            let at = At(which, step, events.clone());
            world.at_step = Some((step, events));
            world.run_until(DECIDED + SEC);
            if answered && !matches!(which, Base::Nobody | Base::Late) {
                found += world.check_answered();
            }
            world.run_until(2 * DECIDED);
            world.end();
            drop((world, at));
            worlds += 1;
        }
    }
    println!("{which:?}: {worlds} worlds of {steps} steps, {found} clients found a queue pair");
}

macro_rules! at_each_step {
    ($($name:ident: $base:ident,)*) => {$(
        #[test]
        fn $name() {
            at_each_step(Base::$base);
        }
    )*};
}

at_each_step! {
    a_fault_at_each_step: Answered,
    a_fault_at_each_step_if_the_program_rejects: Rejected,
    a_fault_at_each_step_if_the_server_is_busy: Busy,
    a_fault_at_each_step_if_the_server_is_late: Late,
    a_fault_at_each_step_if_nobody_listens: Nobody,
}

// --- Random worlds.

/// The number in an environment variable.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Who cannot receive at an address takes no place that true clients need: all are answered.
fn spoofed(seed: u64) -> usize {
    let mut rng = Rng::new(seed ^ 0x5900F);
    let mut world = Lookups::new(seed, net(&mut rng));
    let loss = [0, 0, rng.below(301) as u32][rng.size(0, 2)];
    world.schedule(0, Event::Loss(loss));
    let backlog = [2, 4, 16][rng.size(0, 2)];
    let rejects = [[0, 200][rng.size(0, 1)], 0, [0, 200][rng.size(0, 1)]];
    world.schedule(0, Event::Start(Plan { backlog, slow: 500 * MS, rejects, ..plan() }));
    for kind in [Kind::Spoofs, Kind::Noise] {
        world.strangers.push(Stranger::new(kind, rng.fork()));
    }
    world.schedule(1, Event::Stranger(0));
    world.schedule(1, Event::Stranger(1));
    let count = rng.size(1, 8) as u32;
    for number in 0..count {
        world.schedule(MS + rng.below(2 * SEC), Event::Ask(number, UDP));
    }
    for stranger in 0..2 {
        world.schedule(10 * SEC, Event::StrangerEnds(stranger));
    }
    world.run_until(2 * SEC + DECIDED);
    let found = world.check_answered();
    world.end();
    found
}

fn random(seed: u64) -> usize {
    let mut rng = Rng::new(seed ^ 0x100C);
    let mut world = Lookups::new(seed, net(&mut rng));
    let loss = [0, rng.below(301) as u32][rng.size(0, 1)];
    world.schedule(0, Event::Loss(loss));
    let of = |rng: &mut Rng| Plan {
        port_space: if rng.chance(900) { UDP } else { TCP },
        backlog: [1, 2, 8, 1000][rng.size(0, 3)],
        slow: [1, MS, 300 * MS, 5 * SEC, 70 * SEC][rng.size(0, 4)],
        rejects: [0, 1, 2].map(|_| [0, 0, 300][rng.size(0, 2)]),
    };
    let late = [0, 0, 90 * SEC][rng.size(0, 2)] / 1000 * rng.below(1001);
    world.schedule(late, Event::Start(of(&mut rng)));
    let count = rng.size(1, 8) as u32;
    let spread = [MS, SEC, 20 * SEC][rng.size(0, 2)];
    for number in 0..count {
        let begins = 1 + rng.below(spread);
        world.schedule(begins, Event::Ask(number, if rng.chance(950) { UDP } else { TCP }));
        if rng.chance(100) {
            let until = begins + rng.below(80 * SEC);
            world.schedule(begins + rng.below(SEC), Event::Stop(number, until));
        }
        if rng.chance(100) {
            world.schedule(begins + rng.below(2 * SEC), Event::Destroy(number));
        }
    }
    for _ in 0..rng.size(0, 3) {
        let at = late + rng.below(2 * spread);
        let until = at + rng.below(3 * SEC);
        match rng.below(4) {
            0 => {
                world.schedule(at, Event::Kill);
                world.schedule(until, Event::Start(of(&mut rng)));
            }
            1 => world.schedule(at, Event::ListenAgain),
            2 => world.schedule(at, Event::StopServer(until)),
            _ => world.schedule(at, Event::Loss(rng.below(1001) as u32)),
        }
    }
    for kind in [Kind::Spoofs, Kind::Asks, Kind::Noise, Kind::Poses] {
        if !rng.chance(250) {
            continue;
        }
        let index = world.strangers.len();
        world.strangers.push(Stranger::new(kind, rng.fork()));
        // One that poses has the port before its owner, or after that has died.
        let begins = if kind == Kind::Poses { 0 } else { rng.below(SEC) };
        world.schedule(begins, Event::Stranger(index));
        world.schedule(begins + 1 + rng.below(20 * SEC), Event::StrangerEnds(index));
        if kind == Kind::Poses {
            world.schedule(begins + 20 * SEC, Event::Start(of(&mut rng)));
        }
    }
    world.run_until(late + 2 * spread + 20 * SEC + DECIDED);
    let found = world.clients.values().filter(|client| client.outcome.is_some()).count();
    world.end();
    found
}

#[test]
fn random_worlds() {
    if let Some(seed) = number("UWARP_SIM_SEED") {
        random(seed);
        return;
    }
    let worlds = number("UWARP_SIM_WORLDS").unwrap_or(2000);
    let told: usize = (0..worlds).map(random).sum();
    println!("{told} clients were told in {worlds} worlds");
    assert!(told as u64 > worlds, "most clients are told something");
}

#[test]
fn who_has_no_address_keeps_nobody_out() {
    if let Some(seed) = number("UWARP_SIM_SEED") {
        spoofed(seed);
        return;
    }
    let found: usize = (0..200).map(spoofed).sum();
    println!("{found} clients found a queue pair");
    assert!(found > 500, "most clients find one");
}
