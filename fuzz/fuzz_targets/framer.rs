//! The MPA framer on any stream: the result does not depend on how the bytes arrive. Marker insertion and
//! removal agree.
#![no_main]

#[path = "../../crates/proto/tests/hostile/mod.rs"]
#[allow(dead_code)]
mod hostile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::framer(bytes));
