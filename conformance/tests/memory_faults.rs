//! What may go wrong with memory that two programs of one host share: the other one is killed at any instant,
//! or writes it at random.

use std::path::PathBuf;
use std::time::Duration;

use uwarp_conformance::cc;
use uwarp_conformance::dist::Dist;
use uwarp_conformance::process::{Cmd, Output};

/// The survivors of so many; `make soak` has 1,000.
fn count(few: u32) -> u32 {
    std::env::var("KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(few)
}

fn built(test: &str) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("memory_faults").join(test);
    cc::build("neighbours", &dir).unwrap()
}

/// `neighbours` in one of its ways; it checks by itself that it runs over memory.
fn neighbours(test: &str, way: &str, rounds: u32, view: &str) -> Output {
    let lib = Dist::find().unwrap().lib();
    let program = Cmd::new(built(test)).args(&format!("127.0.0.1 {way} {rounds}"));
    let over = program.env("LD_LIBRARY_PATH", lib).env("UWARP_LINK", "memory").env("UWARP_VIEW", view);
    // The victims' connections end: one line each.
    let output = over
        .env("UWARP_LOG", "off")
        .limit(Duration::from_secs(240 + u64::from(rounds) * 4))
        .run_ok()
        .unwrap();
    assert!(!output.stdout.contains("FAIL"), "{}", output.text());
    println!("{}", output.stdout);
    output
}

#[test]
fn neighbours_are_killed() {
    neighbours("killed", "kill", count(60), "roce");
}

#[test]
fn neighbours_of_an_rnic_are_killed() {
    neighbours("rnic", "kill", count(30), "iwarp");
}

#[test]
fn neighbours_that_scribble_spoil_their_own_streams() {
    neighbours("scribbling", "scribble", count(30), "roce");
}
