//! What completion queues, the engine and shared receive queues call of a queue pair.

use std::sync::atomic::Ordering;

use uwarp_mem::glance::Glance;
use uwarp_rnic::cq::{Coverage, Feeder};
use uwarp_rnic::qp::Drops;
use uwarp_rnic::qp::Now;
use uwarp_rnic::srq::Waiter;

use super::{EXIT_PATIENCE, Qp};
use crate::linger;
use crate::source::{Found, Readiness, Source};

impl Feeder for Qp {
    fn make_progress(&self, in_earnest: bool) -> Coverage {
        self.look_for_input(in_earnest).0
    }

    fn receive_messages(&self) -> bool {
        self.look_for_input(true).1
    }

    fn glance(&self) -> Option<Glance> {
        let inner = self.inner.try_lock()?;
        let glance = inner.conn.as_ref().filter(|conn| conn.pump.has_rest(&inner.core));
        let glance = glance.and_then(|conn| conn.link.glance(inner.core.messages_acked()));
        self.let_go(inner);
        glance
    }

    fn rest(&self) {
        if self.is_carried.load(Ordering::Acquire)
            && let Some(carries) = self.carries.lock().clone()
        {
            carries.rest();
        }
        if let Some(mut inner) = self.inner.try_lock() {
            if inner.conn.is_some() && inner.core.polled_in_vain() {
                self.send(&mut inner, &Now::unread());
            }
            self.release(inner);
        }
    }
}

impl Source for Qp {
    fn ready(&self, readiness: Readiness) {
        if readiness.writable {
            self.room.store(true, Ordering::Release);
        }
        if readiness.hangup {
            self.hung_up.store(true, Ordering::Release);
        }
        self.look();
    }

    /// Not to be waited for: a thread that has jumped out of a call, from the handler of a signal, has the
    /// lock for ever, and the engine's thread serves all queue pairs.
    fn timeout(&self) {
        self.timed_out.store(true, Ordering::Release);
        let Some(mut inner) = self.inner.try_lock() else { return self.look() };
        // Without a look for input, which is a system call: input is reported anyway, and where many queue
        // pairs have little traffic each, the timer expires for nearly every message.
        let now = &Now::unread();
        self.handle_timeout(&mut inner, now);
        self.send(&mut inner, now);
        self.release(inner);
    }

    fn polled(&self) -> bool {
        self.polled.swap(false, Ordering::Relaxed)
    }

    fn found(&self) -> Found {
        let direct = self.looked_at.swap(false, Ordering::Relaxed);
        match (self.found_nothing.load(Ordering::Relaxed), direct) {
            (true, _) => Found::Nothing,
            (false, true) => Found::Polled,
            (false, false) => Found::News,
        }
    }

    fn exit(&self) {
        match self.inner.try_lock_for(EXIT_PATIENCE) {
            Some(inner) => self.disconnect_locked(inner, false),
            // The lock's holder was stopped for good, by the signal whose handler exits.
            None => linger::stream_given_up(),
        }
    }
}

impl Waiter for Qp {
    fn receive_kept(&self) {
        self.kept.store(true, Ordering::Release);
        self.look();
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // Before another queue pair gets the number.
        self.shell.stop_feeding();
        self.shell.depart(self.inner.get_mut().snapshot().counters, Drops::default());
    }
}
