//! The program ends a stream by a call. An adapter would have received by now what its peer has sent, and
//! would have had its acknowledgements.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use uwarp_process::MutexGuard;
use uwarp_rnic::qp::Now;

use super::{Inner, Qp};
use crate::patience::{self, Patience};

/// Turns of receiving before a program's move to ERR or RESET, or its destruction: more than the system's
/// buffers hold, however fast the peer sends.
const TURNS_AT_END: usize = 16;
/// The first pause before a call that waits for the peer looks again; each is twice as long as the one
/// before.
const FIRST_PAUSE: Duration = Duration::from_micros(10);
/// Steps of a peer that is waited for: whoever begins streams again and again keeps no call for ever.
const MOST_STEPS: u32 = 6;
/// The longest pause.
const LAST_PAUSE: Duration = Duration::from_micros(500);

impl Qp {
    /// The program ends the stream. An adapter would have received by now what has arrived, and its peer's
    /// work requests would have succeeded.
    #[cold]
    pub(super) fn receive_all(&self, inner: &mut Inner) {
        for _ in 0..TURNS_AT_END {
            if !self.receive(inner, &Now::unread()) {
                return;
            }
        }
    }

    /// The program moves to ERR, and may know by other means what its peer has received (libdaploscm does):
    /// an adapter would have had the acknowledgement by now. The peer may hold it back for a message to ride
    /// on, so this requests it once more, and waits for a round trip. Other threads may use the queue pair
    /// meanwhile.
    #[cold]
    pub(super) fn await_ack<'a>(&'a self, mut inner: MutexGuard<'a, Inner, 16>) -> MutexGuard<'a, Inner, 16> {
        if !inner.core.demand_ack() {
            return inner;
        }
        self.send(&mut inner, &Now::unread());
        let stream = inner.streams;
        let waits = |inner: &Inner| (inner.streams == stream && inner.core.expects_ack()).then_some(());
        self.await_peer(inner, &patience::FOR_ACKS, waits)
    }

    /// The peer by number has spoken before there is a stream.
    pub fn note_step(&self) {
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// The program ends a queue pair by number whose stream is still being set up. Its peer may have posted
    /// work, which an adapter would have received: that needs no set-up, only a queue pair in RTR.
    #[cold]
    pub(super) fn await_first_message<'a>(
        &'a self,
        inner: MutexGuard<'a, Inner, 16>,
    ) -> MutexGuard<'a, Inner, 16> {
        self.await_peer(inner, &patience::FOR_FIRST, |inner| {
            let link = inner.conn.as_ref().map(|conn| (conn.settling.is_granted(), conn.link.kind()));
            let steps = self.steps.load(Ordering::Relaxed);
            inner.core.expects_first_message().then(|| (steps, inner.streams, link, inner.core.has_heard()))
        })
    }

    /// Waits for something that the peer sends, for a short time and without the lock. `waits`: how far the
    /// peer has come, or that there is nothing to wait for. Each step shows that it is there, so it has the
    /// time anew: with several steps, its threads must get a processor several times.
    fn await_peer<'a, Step: PartialEq>(
        &'a self,
        mut inner: MutexGuard<'a, Inner, 16>,
        patience: &Patience,
        waits: impl Fn(&Inner) -> Option<Step>,
    ) -> MutexGuard<'a, Inner, 16> {
        let limit = patience.limit();
        let (mut end, mut before, mut steps, mut is_longest) = (Instant::now() + limit, None, 0, false);
        let mut pause = FIRST_PAUSE;
        while let Some(step) = waits(&inner) {
            if before.replace(step) != before && steps < MOST_STEPS {
                (end, steps, is_longest) = (Instant::now() + limit, steps + 1, false);
            }
            let mut left = end.saturating_duration_since(Instant::now());
            if left.is_zero() && !is_longest {
                // The turns of other threads are no silence of the peer's.
                left = limit * (patience::turns() - 1);
                (end, is_longest) = (Instant::now() + left, true);
            }
            if left.is_zero() {
                patience.waited_in_vain();
                break;
            }
            self.release(inner);
            patience::pause(pause.min(left));
            pause = LAST_PAUSE.min(pause * 2);
            inner = self.inner.lock();
            // Also sends: the peer may demand the same.
            self.pump(&mut inner, &Now::unread());
        }
        inner
    }
}
