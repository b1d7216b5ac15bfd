//! Two ends, two pipes and a clock.

use std::sync::Arc;

use uwarp_rnic::qp::StreamParams;
use uwarp_rnic::{Access, Mr, RecvWr, SendWr, VerbsError};

use crate::end::{End, EndConfig, shuffle};
use crate::memory::Arena;
use crate::net::{Fault, NetParams, Pipe};
use crate::{Rng, Time};

/// One of the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The initiator.
    A,
    /// The responder.
    B,
}

impl Side {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::A, Self::B];

    /// The other one.
    pub fn peer(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    /// 0 or 1.
    pub fn index(self) -> usize {
        self as usize
    }
}

/// More rounds than any run needs: a run with more hangs.
const ROUNDS: u64 = 4_000_000;

/// Prints the seed when a run panics.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("simulation seed: {:#x}", self.0);
        }
    }
}

/// Two ends joined by two pipes.
pub struct World {
    seed: Seed,
    rng: Rng,
    now: Time,
    ends: [End; 2],
    /// From A to B, from B to A.
    pipes: [Pipe; 2],
    /// The side whose process is gone.
    killed: Option<Side>,
}

impl World {
    /// Two ends without a stream. `faults`: the fault from A to B, and from B to A.
    pub fn new(seed: u64, config: [EndConfig; 2], net: NetParams, faults: [Option<Fault>; 2]) -> Self {
        let mut rng = Rng::new(seed);
        let pipes = faults.map(|fault| Pipe::new(net, rng.fork(), fault));
        Self { seed: Seed(seed), rng, now: 0, ends: config.map(End::new), pipes, killed: None }
    }

    /// The seed, which repeats this run.
    pub fn seed(&self) -> u64 {
        self.seed.0
    }

    /// Moves both ends to INIT, and registers all of each end's memory with these rights.
    pub fn init(&mut self, memory: &[Arena; 2], access: Access) -> [Arc<Mr>; 2] {
        Side::BOTH.map(|side| {
            let (end, memory) = (self.end(side), &memory[side.index()]);
            end.init();
            memory.register(&end.pd, 0, memory.len(), access)
        })
    }

    /// Gives both ends their stream.
    pub fn attach(&mut self, params: [StreamParams; 2]) {
        for (end, params) in self.ends.iter_mut().zip(params) {
            end.attach(params).expect("a new queue pair can be attached");
        }
    }

    /// The clock.
    pub fn now(&self) -> Time {
        self.now
    }

    /// An end.
    pub fn end(&mut self, side: Side) -> &mut End {
        &mut self.ends[side.index()]
    }

    /// The pipe that an end writes to.
    pub fn pipe(&self, from: Side) -> &Pipe {
        &self.pipes[from.index()]
    }

    fn parts(&mut self, side: Side) -> (&mut End, &mut Pipe, &mut Pipe) {
        let [ab, ba] = &mut self.pipes;
        let [a, b] = &mut self.ends;
        match side {
            Side::A => (a, ba, ab),
            Side::B => (b, ab, ba),
        }
    }

    /// Posts a send work request and sends what can be sent.
    pub fn post_send(&mut self, side: Side, wr: &SendWr<'_>) -> Result<(), VerbsError> {
        let now = self.now;
        let (end, input, output) = self.parts(side);
        end.post_send(now, wr, input, output)
    }

    /// Posts a receive.
    pub fn post_recv(&mut self, side: Side, wr: &RecvWr<'_>) -> Result<(), VerbsError> {
        let now = self.now;
        let (end, input, output) = self.parts(side);
        end.post_recv(now, wr, input, output)
    }

    /// Disconnects one side in an orderly way.
    pub fn disconnect(&mut self, side: Side) {
        let now = self.now;
        let (end, input, output) = self.parts(side);
        end.disconnect(now, input, output);
    }

    /// Kills the process of one side, which must not be used any more.
    pub fn kill(&mut self, side: Side) {
        let now = self.now;
        self.killed = Some(side);
        let (end, input, output) = self.parts(side);
        end.kill(now, input, output);
    }

    /// Bytes from a peer that is no queue pair: they arrive at `side` as if its peer had sent them.
    pub fn inject(&mut self, side: Side, bytes: &[u8]) {
        let now = self.now;
        // A pipe that is full or closed may not take all; that is the same for a hostile peer.
        let _ = self.pipes[side.peer().index()].send(now, bytes);
    }

    /// The peer that [`World::inject`] speaks for closes its side.
    pub fn inject_end(&mut self, side: Side) {
        let now = self.now;
        self.pipes[side.peer().index()].close(now);
    }

    /// Pumps one end.
    pub fn pump(&mut self, side: Side) {
        if self.killed == Some(side) {
            return;
        }
        let now = self.now;
        let (end, input, output) = self.parts(side);
        end.pump(now, input, output);
        if output.is_reset() != input.is_reset() && self.killed.is_none() {
            // A reset concerns both directions.
            for pipe in self.pipes.iter_mut().filter(|p| !p.is_reset()) {
                pipe.reset();
            }
        }
    }

    /// Runs until nothing happens any more.
    ///
    /// # Panics
    /// If the run does not end.
    pub fn run(&mut self, program: &mut dyn Program) {
        let mut order = Side::BOTH;
        for _ in 0..ROUNDS {
            let before = self.activity();
            shuffle(&mut self.rng, &mut order);
            for side in order {
                self.pump(side);
            }
            let stepped = program.step(self);
            if stepped || self.activity() != before {
                continue;
            }
            let now = self.now;
            let arrivals = self.pipes.iter().filter_map(|p| p.next_arrival(now));
            let killed = self.killed.map(Side::index);
            let alive = self.ends.iter_mut().enumerate().filter(|(index, _)| killed != Some(*index));
            let timers = alive.filter_map(|(_, end)| end.timeout());
            let next = arrivals.chain(timers).chain(program.wake(now)).filter(|at| *at > now).min();
            let Some(next) = next.filter(|_| !program.done(now)) else { return };
            self.now = next;
            for side in Side::BOTH.into_iter().filter(|side| self.killed != Some(*side)) {
                self.ends[side.index()].handle_timeout(next);
            }
        }
        panic!("the run does not end (seed {:#x})", self.seed.0);
    }

    /// Runs for some virtual time, without posting.
    pub fn settle_for(&mut self, time: Time) {
        let end = self.now + time;
        self.run(&mut Until(end));
    }

    /// Runs until nothing happens any more, without posting.
    pub fn settle(&mut self) {
        self.run(&mut Idle);
    }

    /// Changes whenever something happens.
    fn activity(&self) -> (u64, u64, usize, usize, bool, bool) {
        let [a, b] = &self.ends;
        (
            a.moved(),
            b.moved(),
            a.disconnected.len() + usize::from(a.is_closed()),
            b.disconnected.len() + usize::from(b.is_closed()),
            self.pipes[0].is_reset(),
            self.pipes[1].is_reset(),
        )
    }
}

/// What the programs at the two ends do.
pub trait Program {
    /// Called after each round; may post. Returns whether it did something.
    fn step(&mut self, world: &mut World) -> bool;

    /// When it must be called even if nothing else happens.
    fn wake(&self, now: Time) -> Option<Time>;

    /// Whether the run must end now even if more would happen later.
    fn done(&self, now: Time) -> bool {
        let _ = now;
        false
    }
}

/// Programs that do nothing until a time.
struct Until(Time);

impl Program for Until {
    fn step(&mut self, _: &mut World) -> bool {
        false
    }

    fn wake(&self, _: Time) -> Option<Time> {
        Some(self.0)
    }

    fn done(&self, now: Time) -> bool {
        now >= self.0
    }
}

/// Programs that do nothing.
struct Idle;

impl Program for Idle {
    fn step(&mut self, _: &mut World) -> bool {
        false
    }

    fn wake(&self, _: Time) -> Option<Time> {
        None
    }
}
