//! Replicas of iWARP adapters: scripted peers that set up a connection as the Linux drivers of cxgb3, cxgb4,
//! i40iw, irdma, amso1100 and siw do, in both roles, against a program over the built library. The data after
//! the set-up is compared, and what both ends did is put into words, which `cases.rs` holds for each case.
//!
//! `docs/compare.md` shows the cases and the replicas' frames. `COMPARE=write` writes both into it.
//!
//! | file | what it holds |
//! |---|---|
//! | `adapter.rs` | what a replica is |
//! | `chelsio.rs`, `intel.rs`, `siw.rs`, `ammasso.rs` | the replicas |
//! | `talk.rs` | data on the stream |
//! | `program.rs` | uwarp's end |
//! | `scenes.rs` | one connection in either role |
//! | `cases.rs` | the table of cases |
//! | `mutations.rs` | replicas that are wrong on purpose, and must fail |
//! | `page.rs` | `docs/compare.md` |

mod adapter;
mod ammasso;
mod cases;
mod chelsio;
mod intel;
mod mutations;
mod page;
mod program;
mod scenes;
mod siw;
mod talk;

use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use libtest_mimic::{Arguments, Trial};
use uwarp_conformance::dist::Dist;
use uwarp_conformance::{Outcome, fail};

use cases::{CASES, Case, Role};
use program::World;

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // Each mostly waits to see that nothing comes.
    args.test_threads = args.test_threads.or(Some(4));
    let world = Arc::new(World { dist: Dist::find(), program: Mutex::default() });
    let trials = CASES.iter().map(|case| {
        let world = world.clone();
        Trial::test(case.name, move || Ok(compare(case, &world)?))
    });
    let mutations = mutations::ALL.iter().map(|(name, mutation)| {
        let world = world.clone();
        Trial::test(*name, move || Ok(mutation(&world)?))
    });
    let page = Trial::test("page", || Ok(page::check()?));
    libtest_mimic::run(&args, trials.chain(mutations).chain([page]).collect()).exit_code()
}

/// What both ends did, in words.
fn run(case: &Case, world: &World) -> Outcome<String> {
    match case.role {
        Role::Active => case.scene.active(world),
        Role::Passive => case.scene.passive(world),
    }
}

fn compare(case: &Case, world: &World) -> Outcome {
    let saw = run(case, world)?;
    if saw != case.saw {
        fail!("it is no longer as the table has it\n  saw:   {saw}\n  table: {}", case.saw)
    }
    Ok(())
}
