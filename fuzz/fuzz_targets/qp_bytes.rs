//! Any bytes into a connected queue pair: memory is written only where allowed, everything completes once,
//! and the answer is well formed.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| uwarp_sim::assault::check(bytes));
