//! Any sequence of C calls on a few objects, with valid handles: no crash, no panic, no hang, and nothing
//! left over.
#![no_main]

#[path = "../../abi/tests/sequences/mod.rs"]
mod sequences;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| sequences::check(bytes));
