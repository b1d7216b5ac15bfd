//! Datagrams between calls of the program, in any order, to one datagram queue pair: posts, state changes,
//! invalidation.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| uwarp_sim::datagram_calls::check(bytes));
