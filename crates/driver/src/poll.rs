//! What a thread that polls a completion queue does for progress.

use std::cell::Cell;
use std::sync::Arc;

use uwarp_rnic::{Cq, Wc};

use crate::fork;
use crate::nic::Nic;

/// Empty polls in a row after which a thread is polling in earnest. A program that polls once after each post and finds its
/// completion (`ib_write_lat`) never gets there.
const IN_EARNEST: u32 = 4;
/// An earnest poller says so every so many polls: a few microseconds, well within what counts as recent.
const STAMP_EVERY: u32 = 16;
/// Up to this many queue pairs are asked directly; with more, the system says which have something.
const FEW: usize = 2;
/// A direct look does not see other sockets; every so many empty polls, they are looked at too. Not only of polls in a row: a
/// thread that often finds something keeps the background thread away all the same.
const LOOK_AROUND: u32 = 256;
/// After this many empty polls, other threads that may have no core get one now and then.
const YIELD_AFTER: u32 = 512;
const YIELD_EVERY: u32 = 64;

thread_local! {
    /// Empty polls of this thread since it last looked around.
    static BLINKERED: Cell<u32> = const { Cell::new(0) };
}

impl Nic {
    /// Takes up to `max` completions, oldest first; returns how many. With none there, makes progress in the calling thread and
    /// looks again. Never blocks.
    pub fn poll_cq(&self, cq: &Arc<Cq>, max: usize, mut sink: impl FnMut(Wc)) -> usize {
        if max == 0 || fork::forked() {
            return 0;
        }
        let found = cq.poll(max, &mut sink);
        if found > 0 {
            cq.note_poll(true);
            return found;
        }
        let empty = cq.note_poll(false);
        if empty % STAMP_EVERY == IN_EARNEST {
            self.engine().note_earnest();
        }
        let direct = cq.feed(FEW, empty >= IN_EARNEST);
        // A thread that is ending has no count any more.
        let since = BLINKERED.try_with(|count| count.replace(count.get() + 1)).unwrap_or(LOOK_AROUND);
        if !direct || since >= LOOK_AROUND {
            let _ = BLINKERED.try_with(|count| count.set(0));
            self.engine().poll_once();
        }
        let found = cq.poll(max, sink);
        if found > 0 {
            cq.note_poll(true);
        } else if empty >= YIELD_AFTER && empty.is_multiple_of(YIELD_EVERY) {
            std::thread::yield_now();
        }
        found
    }
}
