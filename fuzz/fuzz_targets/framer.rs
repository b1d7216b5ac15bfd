//! The MPA framer on any stream: what it finds does not depend on how the bytes arrive; and marker insertion
//! against it.
#![no_main]

#[path = "../../crates/proto/tests/hostile/mod.rs"]
#[allow(dead_code)]
mod hostile;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::framer(bytes));
