//! Any bytes for an MPA request or reply over a real socket, private data among them, and any decisions of
//! the program.
#![no_main]

#[path = "../../crates/cm/tests/hostile/mod.rs"]
mod hostile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::check(bytes));
