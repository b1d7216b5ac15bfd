//! How one end learns that the other has said something, also when it sleeps.
//!
//! Whoever has news for a peer publishes them, and calls [`tell`]. A thread that is about to sleep calls
//! [`enter`], looks at its ready words once more ([`take`]), and sleeps only if they are empty; when it wakes
//! it calls [`leave`], and looks.
//!
//! Why nothing is lost: (1) The bit was set already: whoever clears it does so later, and then looks at the
//! lane; the fence in [`tell`] puts the news before the look at the bit. (2) The bit was set now, after the
//! sleeper's last look: its `enter` came before that look, so the board shows a sleeper, and its epoch is
//! new, because every `enter` and every `leave` changes it: the bell rings. (3) A thread wakes and goes back
//! to the program while another one still sleeps: its `leave` has changed the epoch, so the next news ring
//! again. (4) A thread that does not sleep takes the bell's report, because it looks at the sockets, and the
//! sleeper sleeps on: [`heard`] has changed the epoch before that thread looks. The search in
//! `tests/order.rs` fails without the fence, and without a new epoch in (3) and (4).

use crate::sync::{AtomicU64, Ordering, fence};

/// The board's word: an epoch, and in the low 16 bits how many threads sleep.
const EPOCH: u64 = 1 << 16;

/// The calling thread is about to sleep, and looks once more after this.
pub fn enter(board: &AtomicU64) {
    board.fetch_add(EPOCH + 1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// It looks again by itself.
pub fn leave(board: &AtomicU64) {
    board.fetch_add(EPOCH - 1, Ordering::SeqCst);
}

/// The calling thread has the bell's report, and looks after this. It may not be the one that sleeps.
pub fn heard(board: &AtomicU64) {
    board.fetch_add(EPOCH, Ordering::SeqCst);
}

/// The lanes with news, as bits; they are not reported again.
#[inline]
pub fn take(ready: &AtomicU64) -> u64 {
    // While there is nothing, the line stays in this processor's cache. (A thread that is about to sleep has
    // announced that before a fence, so this load is not early.)
    if ready.load(Ordering::SeqCst) == 0 {
        return 0;
    }
    let lanes = ready.swap(0, Ordering::SeqCst);
    // The looks at these lanes come behind.
    fence(Ordering::SeqCst);
    lanes
}

/// Tells the peer that there are news, which were published before. `rung` is the epoch of the peer's board
/// for which its bell was rung last; `ring` rings it.
#[inline]
pub fn tell(ready: &AtomicU64, bit: u64, board: &AtomicU64, rung: &AtomicU64, ring: impl FnOnce()) {
    fence(Ordering::SeqCst);
    if ready.load(Ordering::SeqCst) & bit != 0 {
        return;
    }
    ready.fetch_or(bit, Ordering::SeqCst);
    fence(Ordering::SeqCst);
    let word = board.load(Ordering::SeqCst);
    let epoch = word / EPOCH;
    if !word.is_multiple_of(EPOCH) && rung.load(Ordering::Relaxed) != epoch {
        ring();
        // Afterwards: a thread that is stopped in between has not silenced the others.
        rung.store(epoch, Ordering::Relaxed);
    }
}
