//! The order in which a thread takes locks (docs/locks.md), checked by the locks themselves.
//!
//! Each lock has its rank in its type. In debug builds, and in `crates/model`, each thread keeps the locks
//! that it holds. It may wait for a lock only while each of these has a lower rank: otherwise two threads
//! could wait for each other, although they never have yet. A lock that is only tried makes no thread wait,
//! so it may have any rank, but what is taken behind it may not. In release builds nothing of this is left.
//!
//! Locks of rank 0 are held between two calls of the program, which chooses their order. They are not kept.

use std::panic::Location;

use crate::futex::{held, out_of_order};

/// Before a thread waits for a lock.
#[inline]
#[cfg_attr(debug_assertions, track_caller)]
pub(crate) fn wait_for(rank: u8) {
    if cfg!(debug_assertions) {
        let place = Location::caller();
        if let Some(words) = held(|held| held.forbids(rank, place)) {
            out_of_order(&words);
        }
    }
}

/// The thread has it now.
#[inline]
#[cfg_attr(debug_assertions, track_caller)]
pub(crate) fn taken<L>(rank: u8, lock: &L) {
    if cfg!(debug_assertions) && rank != 0 {
        let (at, place) = (std::ptr::from_ref(lock).addr(), Location::caller());
        held(|held| held.add(rank, at, place));
    }
}

/// Before the thread releases it.
#[inline]
pub(crate) fn released<L>(lock: &L) {
    if cfg!(debug_assertions) {
        held(|held| held.remove(std::ptr::from_ref(lock).addr()));
    }
}
