//! What must hold under every order of threads. Each function is one execution.

pub mod datagrams;
pub mod engine;
pub mod futexes;
pub mod locks;
pub mod rings;
pub mod runners;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};

/// Executions with each scheduler, unless `UWARP_MODEL_EXECUTIONS` says otherwise.
const EXECUTIONS: usize = 1500;
/// Steps of a thread at which the priority scheduler changes priorities.
const DEPTH: usize = 3;
/// Runs a scenario many times: with threads in random order, and with random priorities.
pub fn check(scenario: fn()) {
    let given = std::env::var("UWARP_MODEL_EXECUTIONS").ok().and_then(|n| n.parse().ok());
    let mut config = Config::new();
    config.silence_warnings = true;
    config.stack_size = 256 << 10;
    // A spinning thread needs others to make progress, and the schedulers ensure it. A run of a thousand
    // times this bound would be endless.
    config.max_steps = MaxSteps::FailAfter(200_000);
    let n = given.unwrap_or(EXECUTIONS);
    let random =
        Runner::new(RandomScheduler::new(n), config.clone()).run(move || crate::sys::execute(scenario));
    let by_priority =
        Runner::new(PctScheduler::new(DEPTH, n), config).run(move || crate::sys::execute(scenario));
    // A time limit would silently let a slow machine try fewer orders.
    assert_eq!((random, by_priority), (n, n), "orders that were tried");
    println!("{random} executions in random order, {by_priority} by priority");
}
