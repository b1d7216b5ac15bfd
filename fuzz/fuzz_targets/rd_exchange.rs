//! An exchange of reliable datagrams with a peer that has its key and lies.
#![no_main]

#[path = "../../crates/proto/tests/rd_hostile/mod.rs"]
mod rd_hostile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| rd_hostile::exchange(bytes));
