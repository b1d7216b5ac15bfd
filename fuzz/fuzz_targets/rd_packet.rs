//! Packets of reliable datagrams: every chunk that is accepted is what a sender makes of the same contents.
#![no_main]

#[path = "../../crates/wire/tests/roundtrip/reliable.rs"]
mod reliable;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| reliable::check(bytes));
