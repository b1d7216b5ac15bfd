//! Random lists of work requests over random networks, with and without faults (see `uwarp_sim::workload`).

mod cases;
mod plans;

use proptest::prelude::*;
use uwarp_sim::workload::{self, Plan};

use plans::Trouble;

proptest! {
    #![proptest_config(cases::config(300))]

    /// A network without faults: everything arrives where it should.
    #[test]
    fn all_arrives(plan in plans::plan(Trouble::None)) {
        workload::run(&plan);
    }

    /// One bit flips, CRCs are on: the stream ends with MPA's CRC error, and no wrong data was completed.
    #[test]
    fn a_flipped_bit(plan in plans::plan(Trouble::Flip)) {
        let plan = Plan { stream: workload::StreamPlan { crc: true, ..plan.stream }, ..plan };
        workload::run(&plan);
    }

    /// One bit flips, CRCs are off: anything may arrive, but nothing panics or hangs, and everything
    /// completes once.
    #[test]
    fn a_flipped_bit_without_crc(plan in plans::plan(Trouble::Flip)) {
        let plan = Plan { stream: workload::StreamPlan { crc: false, ..plan.stream }, ..plan };
        workload::run(&plan);
    }

    /// The connection is reset, or one end vanishes, at any byte.
    #[test]
    fn a_broken_connection(plan in plans::plan(Trouble::Break)) {
        workload::run(&plan);
    }

    /// A program disconnects, moves its queue pair or deregisters a region, at any time.
    #[test]
    fn a_program_that_stops(plan in plans::plan(Trouble::Abort)) {
        workload::run(&plan);
    }
}
