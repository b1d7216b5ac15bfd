//! Any bytes into a connected queue pair: nothing is written where it may not be, everything completes once,
//! and what it answers is well formed.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| uwarp_sim::assault::check(bytes));
