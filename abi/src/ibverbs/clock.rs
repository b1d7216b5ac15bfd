//! The device's clock, which the times of completions come from: the system's monotonic clock in nanoseconds.

use rustix::time::{ClockId, clock_gettime};
use uwarp_abi_types::verbs::*;

use super::context::Context;
use crate::convention::Code;
use crate::failure::{Failure, required};
use crate::object::look;
use crate::slot;

/// `hca_core_clock`: ticks of [`raw`] in a millisecond.
pub const KHZ: u64 = 1_000_000;

/// The clock's ticks.
pub fn raw() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// Nanoseconds since 1970 at the moment when the clock showed `ticks`. As exact as the time of day: if that
/// was set since then, the new setting counts.
pub fn wall(ticks: u64) -> u64 {
    let ago = raw().saturating_sub(ticks);
    nanoseconds(ClockId::Realtime).saturating_sub(ago)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let time = clock_gettime(clock);
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

slot! {
    /// ibv_query_rt_values_ex(3). The ticks are in `tv_nsec` and `tv_sec` is 0, as adapters have it: programs
    /// compare `tv_nsec` with the times of completions.
    verb fn query_rt_values(context: *mut ibv_context, values: *mut ibv_values_ex) -> Code {
        look::<Context>(context)?;
        let values = required(values, "values")?;
        if (*values).comp_mask & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
            return Err(Failure::invalid("unknown members in comp_mask"));
        }
        if (*values).comp_mask & IBV_VALUES_MASK_RAW_CLOCK != 0 {
            (*values).raw_clock.tv_sec = 0;
            (*values).raw_clock.tv_nsec = raw().cast_signed();
        }
        Ok(())
    }
}
