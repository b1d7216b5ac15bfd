//! Lists of work requests between two queue pairs over a network that the bytes choose, compared with a
//! model.
#![no_main]

use uwarp_sim::workload::{self, Plan};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    workload::run(&Plan::from_bytes(bytes));
});
