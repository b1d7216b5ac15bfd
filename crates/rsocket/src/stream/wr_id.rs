//! Work requests by their number.

use crate::machine::Posted;

const KIND: u32 = 32;
/// Ours. Those without it are the program's, posted to the queue pair.
pub const OURS: u64 = 1 << 63;
const RECEIVE: u64 = OURS | 3 << KIND;
/// Of a descriptor.
pub const DESCRIPTOR: u64 = OURS | 4 << KIND;

pub fn of(posted: Posted) -> u64 {
    match posted {
        Posted::Data(len) => OURS | u64::from(len),
        Posted::Control => OURS | 1 << KIND,
        Posted::Tail => OURS | 2 << KIND,
    }
}

pub fn receive(slot: u32) -> u64 {
    RECEIVE | u64::from(slot)
}

/// What has completed.
pub enum Id {
    /// A work request of the stream.
    Stream(Posted),
    /// A receive, by its place.
    Receive(u32),
    Descriptor,
    Foreign,
}

pub fn parse(id: u64) -> Id {
    match (id & OURS, (id & !OURS) >> KIND) {
        (0, _) => Id::Foreign,
        (_, 0) => Id::Stream(Posted::Data(id as u32)),
        (_, 1) => Id::Stream(Posted::Control),
        (_, 2) => Id::Stream(Posted::Tail),
        (_, 4) => Id::Descriptor,
        _ => Id::Receive(id as u32),
    }
}
