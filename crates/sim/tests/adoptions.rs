//! Sockets that become streams in place, over the simulated network: the machine `Adopt` at both ends. The
//! rules that are checked stand in `uwarp_sim::adoptions`: what a program is told, by when, and what is left.
//!
//! Mutations of the connection manager that were tried, each alone; what failed first:
//!
//! | mutation | what failed |
//! |-|-|
//! | set-up has no limit | nothing ends it, all tests |
//! | the limit stays when the stream runs | a deadline of an adoption that is over, five tests |
//! | the reply's data is not compared | an end runs with a peer that it does not expect |
//! | the request's data is not compared | the same |
//! | at the limit, the report comes before the disconnect | a failed adoption has a stream, six tests |
//! | what is being attached is not disconnected | the same, four tests |
//! | a connection that comes back after the end is not closed | one that is over is open, five tests |
//! | a failure closes nothing | a connection is open that has failed, all tests |
//! | a failure is reported without closing | the same |
//! | a queue pair that is gone: the peer is told nothing | the peer waits, four tests |
//! | the end of a cancelled adoption's stream is reported | a report after the end, five tests |
//! | a byte too many is read | what each program is told, all tests |
//!
//! Not noticed, and of no effect: that a stream which ends before it runs is not disconnected, too.
//!
//! `UWARP_SIM_SEED` runs the random world with this seed alone, `UWARP_SIM_WORLDS` so many of them.

use rustix::io::Errno;
use uwarp_sim::adoptions::adopter::{Adopter, Call, Plan};
use uwarp_sim::adoptions::{Adoptions, Event};
use uwarp_sim::{NetParams, Rng, Time};

const MS: Time = 1_000_000;
const SEC: Time = 1000 * MS;
/// A program's limit for set-up.
const LIMIT: Time = 20 * SEC;
/// A peer that is silent is given up within this time, and some more.
const DECIDED: Time = 150 * SEC;
/// What ends one end is known at the other within this time.
const KNOWN: Time = 8 * SEC;

fn plan(initiates: bool) -> Plan {
    Plan { initiates, expects_peer: true, knows_peers: true, limit: LIMIT }
}

fn net(rng: &mut Rng) -> NetParams {
    let delay = [(10_000, 200_000), (1_000, 2_000), (1_000_000, 20_000_000)][rng.size(0, 2)];
    let piece = [7, 64, 4096][rng.size(0, 2)];
    NetParams { delay, piece, capacity: [256, 64 * 1024][rng.size(0, 1)], stalls: 0, stall: 0 }
}

// --- A fault at each step.

/// How a socket is adopted, if nothing goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Base {
    /// Both programs begin at once.
    Both,
    /// The one that initiates begins first.
    ResponderLate,
    /// The other one does.
    InitiatorLate,
    /// One end does not show that it is uwarp.
    Plain,
    /// The one that responds does not expect this peer.
    Rejected,
    /// The one that initiates does not.
    NotExpected,
    /// They disagree on who initiates.
    BothInitiate,
    /// The same.
    BothRespond,
}

fn base(base: Base, seed: u64) -> Adoptions {
    let mut rng = Rng::new(seed ^ 0xAD09);
    let (mut plans, mut begins) = ([plan(true), plan(false)], [MS, MS]);
    match base {
        Base::Both => {}
        Base::ResponderLate => begins[1] = 300 * MS,
        Base::InitiatorLate => begins[0] = 300 * MS,
        Base::Plain => plans[0].knows_peers = false,
        Base::Rejected => plans[1].expects_peer = false,
        Base::NotExpected => plans[0].expects_peer = false,
        Base::BothInitiate => plans[1].initiates = true,
        Base::BothRespond => plans[0].initiates = false,
    }
    let mut world = Adoptions::new(seed, net(&mut rng), plans.map(Some));
    for (side, at) in begins.into_iter().enumerate() {
        world.schedule(at, Event::Begin(side));
    }
    world
}

/// What each program is told, if nothing goes wrong. `None`: it gets its stream.
fn expected(base: Base) -> [Option<Errno>; 2] {
    match base {
        Base::Both | Base::ResponderLate | Base::InitiatorLate | Base::Plain => [None; 2],
        Base::Rejected => [Some(Errno::CONNREFUSED); 2],
        // The stream of the one that responds has begun.
        Base::NotExpected => [Some(Errno::CONNREFUSED), Some(Errno::CONNRESET)],
        Base::BothInitiate | Base::BothRespond => [Some(Errno::TIMEDOUT); 2],
    }
}

/// What happens at a step, and within which time both ends are told.
fn troubles(side: usize, base: Base) -> Vec<(Vec<(Time, Event)>, Time)> {
    use Event::{Break, Kill, LosePower, Stop};
    let known = if base == Base::BothRespond { DECIDED } else { KNOWN };
    let mut all = vec![
        (vec![(0, Break(side, true))], known),
        (vec![(0, Break(side, false))], known),
        (vec![(0, Kill(side))], known),
        (vec![(0, LosePower(side, 2 * SEC))], DECIDED),
        (vec![(0, Stop(side, 2 * SEC))], known),
        (vec![(0, Stop(side, 30 * SEC))], DECIDED),
    ];
    let calls = [Call::Cancel, Call::DestroyPair, Call::FailPair].map(|call| Event::Call(side, call));
    all.extend(calls.map(|call| (vec![(0, call)], known)));
    for first in calls {
        all.extend(calls.map(|call| (vec![(0, first), (0, call)], known)));
    }
    all
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

/// A run without a fault is counted in steps; then, at each step, for each end, each fault.
fn at_each_step(which: Base, seed: u64) {
    let mut world = base(which, seed);
    world.run_until(5 * SEC);
    let steps = world.steps;
    if which == Base::BothRespond {
        world.run_until(LIMIT + SEC);
    }
    let told = [0, 1].map(|side| world.ends[side].as_ref().and_then(Adopter::failed));
    if which == Base::BothInitiate {
        // One may be faster.
        let fits = |errno: &Option<Errno>| matches!(*errno, Some(Errno::PROTO | Errno::CONNRESET));
        assert!(told.iter().all(fits) && told.contains(&Some(Errno::PROTO)), "{told:?}");
    } else {
        assert_eq!(told, expected(which), "{which:?}: no fault");
    }
    world.check_told();
    world.end();
    drop(world);
    let (mut worlds, mut streams) = (0, 0);
    for step in 0..=steps {
        for side in [0, 1] {
            for (events, known) in troubles(side, which) {
                let mut world = base(which, seed);
                let at = At(which, step, events.clone());
                world.at_step = Some((step, events));
                world.run_until(known);
                streams += world.check_told();
                world.end();
                drop((world, at));
                worlds += 1;
            }
        }
    }
    println!("{which:?}: {worlds} worlds of {steps} steps, {streams} ends had a stream");
}

macro_rules! at_each_step {
    ($($name:ident: $base:ident,)*) => {$(
        #[test]
        fn $name() {
            (1..=4).for_each(|seed| at_each_step(Base::$base, seed));
        }
    )*};
}

at_each_step! {
    a_fault_at_each_step: Both,
    a_fault_at_each_step_if_the_responder_is_late: ResponderLate,
    a_fault_at_each_step_if_the_initiator_is_late: InitiatorLate,
    a_fault_at_each_step_with_an_end_that_does_not_say_who_it_is: Plain,
    a_fault_at_each_step_if_the_request_is_rejected: Rejected,
    a_fault_at_each_step_if_the_reply_is_not_expected: NotExpected,
    a_fault_at_each_step_if_both_initiate: BothInitiate,
    a_fault_at_each_step_if_both_respond: BothRespond,
}

// --- Random worlds.

/// The number in an environment variable.
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn random(seed: u64) -> usize {
    let mut rng = Rng::new(seed ^ 0xAD09);
    let net = self::net(&mut rng);
    let of = |initiates: bool, rng: &mut Rng| Plan {
        initiates,
        expects_peer: rng.chance(900),
        knows_peers: rng.chance(700),
        limit: [LIMIT, LIMIT, 2 * SEC, 10 * MS][rng.size(0, 3)],
    };
    let first = rng.chance(500);
    let agree = rng.chance(900);
    let plans = [of(first, &mut rng), of(first != agree, &mut rng)];
    let stranger = rng.chance(250);
    let mut world = Adoptions::new(seed, net, [Some(plans[0]), (!stranger).then_some(plans[1])]);
    for side in [0, 1] {
        let late = [MS, MS, SEC, 30 * SEC][rng.size(0, 3)];
        world.schedule(1 + rng.below(late), Event::Begin(side));
    }
    for _ in 0..rng.size(0, 5).saturating_sub(2) {
        let at = 1 + {
            let limit = [10 * MS, SEC, 30 * SEC][rng.size(0, 2)];
            rng.below(limit)
        };
        let side = rng.size(0, 1);
        let call = [Call::Cancel, Call::DestroyPair, Call::FailPair][rng.size(0, 2)];
        let event = match rng.below(8) {
            0 => Event::Break(side, true),
            1 => Event::Break(side, false),
            2 => Event::Kill(side),
            3 => Event::LosePower(side, at + rng.below(3 * SEC)),
            4 => Event::Stop(side, at + rng.below(30 * SEC)),
            _ => Event::Call(side, call),
        };
        world.schedule(at, event);
    }
    world.run_until(60 * SEC + DECIDED);
    let streams = world.check_told();
    world.end();
    streams
}

#[test]
fn random_worlds() {
    if let Some(seed) = number("UWARP_SIM_SEED") {
        random(seed);
        return;
    }
    let worlds = number("UWARP_SIM_WORLDS").unwrap_or(4000);
    let streams: usize = (0..worlds).map(random).sum();
    println!("{streams} ends had a stream in {worlds} worlds");
    assert!(streams as u64 > worlds / 4, "many ends have a stream");
}
