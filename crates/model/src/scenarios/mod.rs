//! What is to hold under every order of threads. Each function is one execution.

pub mod engine;
pub mod locks;
pub mod rings;

use std::time::Duration;

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, MaxSteps, Runner};

/// Executions with each scheduler, unless `UWARP_MODEL_EXECUTIONS` says otherwise.
const EXECUTIONS: usize = 1500;
/// Turns of a thread at which those with priorities change them.
const DEPTH: usize = 3;
/// For each scheduler, however slow the machine is.
const LIMIT: Duration = Duration::from_secs(4);

/// Runs a scenario many times, with threads in random order and in random order of priority.
pub fn check(scenario: fn()) {
    let given = std::env::var("UWARP_MODEL_EXECUTIONS").ok().and_then(|n| n.parse().ok());
    let mut config = Config::new();
    config.silence_warnings = true;
    config.stack_size = 256 << 10;
    // Who spins needs others to go on, and the schedulers see to that; a thousand times this is for ever.
    config.max_steps = MaxSteps::FailAfter(200_000);
    config.max_time = given.is_none().then_some(LIMIT);
    let n = given.unwrap_or(EXECUTIONS);
    let random =
        Runner::new(RandomScheduler::new(n), config.clone()).run(move || crate::sys::execute(scenario));
    let by_priority =
        Runner::new(PctScheduler::new(DEPTH, n), config).run(move || crate::sys::execute(scenario));
    println!("{random} executions in random order, {by_priority} by priority");
}
