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
/// A direct look does not see other sockets; every so many empty polls, they are looked at too, and far more often as before
/// when that was not in vain: the background thread stands back for all sockets, not only for the polled ones. Not only of polls
/// in a row: a thread that often finds something keeps the background thread away all the same.
const LOOK_AROUND: u32 = 256;
/// After this many empty polls, other threads that may have no core get one now and then.
const YIELD_AFTER: u32 = 512;
const YIELD_EVERY: u32 = 64;

thread_local! {
    static BLINKERS: Cell<Blinkers> = const { Cell::new(Blinkers { polls: 0, until: LOOK_AROUND }) };
}

/// How long this thread has not looked around.
#[derive(Clone, Copy)]
struct Blinkers {
    /// Empty polls since.
    polls: u32,
    /// Empty polls after which it does.
    until: u32,
}

impl Blinkers {
    /// Counts an empty poll; says whether it is time.
    fn count(&mut self) -> bool {
        self.polls += 1;
        self.polls >= self.until
    }

    /// It has looked; others were `busy` or not.
    fn looked(&mut self, busy: bool) {
        self.polls = 0;
        self.until = if busy { (self.until / 8).max(1) } else { (self.until * 2).min(LOOK_AROUND) };
    }
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
        // A thread that is ending has no blinkers any more.
        let mut blinkers = BLINKERS.try_with(Cell::get).unwrap_or(Blinkers { polls: 0, until: 1 });
        let time = blinkers.count();
        if time || !direct {
            let served = self.engine().poll_once();
            if time {
                self.engine().unpark_forgotten();
            }
            if direct {
                blinkers.looked(served > 0);
            }
        }
        let _ = BLINKERS.try_with(|b| b.set(blinkers));
        let found = cq.poll(max, sink);
        if found > 0 {
            cq.note_poll(true);
        } else if empty >= YIELD_AFTER && empty.is_multiple_of(YIELD_EVERY) {
            std::thread::yield_now();
        }
        found
    }
}
