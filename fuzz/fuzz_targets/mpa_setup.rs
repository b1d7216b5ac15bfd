//! Both MPA set-up machines on any frame, and against each other.
#![no_main]

#[path = "../../crates/proto/tests/hostile/mod.rs"]
#[allow(dead_code)]
mod hostile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::setup(bytes));
