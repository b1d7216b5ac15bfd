//! Datagrams: an accepted datagram is what a sender would make of the same message.
#![no_main]

#[path = "../../crates/proto/tests/hostile/mod.rs"]
#[allow(dead_code)]
mod hostile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::datagram(bytes));
