//! Any private data and messages of a peer, between any calls of the program, to the machine of one rsocket
//! stream.
#![no_main]

#[path = "../../crates/rsocket/tests/hostile/mod.rs"]
mod hostile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::check(bytes));
