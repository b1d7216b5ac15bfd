//! Two ends of a lane of shared memory, and somebody who writes it.
#![no_main]

#[path = "../../crates/llp/tests/hostile/mod.rs"]
#[allow(dead_code)]
mod hostile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::lane(bytes));
