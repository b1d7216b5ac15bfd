//! All parsers of `uwarp-wire` on the same bytes: no panic, and `emit(parse(x))` gives `x` back.
#![no_main]

#[path = "../../crates/wire/tests/roundtrip/mod.rs"]
mod roundtrip;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| roundtrip::check(bytes));
