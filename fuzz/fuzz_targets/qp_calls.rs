//! Bytes from the peer between calls of the program, in any order: posts, state changes, registration and its
//! end, memory windows, invalidation.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| uwarp_sim::interleave::check(bytes));
