//! A queue pair's pump with its link, and how the engine, polling threads and the lock take part in it.

use std::sync::atomic::Ordering;

use uwarp_llp::Link;
use uwarp_rnic::qp::{Action, Now};

use super::{Conn, Inner, Notice, Qp};
use crate::engine::ParkMark;
use crate::pump::Surroundings;
use crate::source::Token;

/// A queue pair's link, and what was reported about it.
pub(super) struct Around<'a> {
    qp: &'a Qp,
    link: &'a mut Link,
    token: Token,
    parked: &'a mut Option<ParkMark>,
}

impl Surroundings for Around<'_> {
    type Lower = Link;

    #[inline]
    fn lower(&mut self) -> &mut Link {
        self.link
    }

    #[inline]
    fn take_room(&mut self) -> bool {
        self.qp.room.load(Ordering::Relaxed) && self.qp.room.swap(false, Ordering::Acquire)
            || self.link.has_room_again()
    }

    fn take_kept(&mut self) -> bool {
        self.qp.kept.swap(false, Ordering::Acquire)
    }

    #[inline]
    fn hung_up(&self) -> bool {
        self.qp.hung_up.load(Ordering::Acquire) || self.link.is_ending()
    }

    fn set_hung_up(&mut self) {
        self.qp.hung_up.store(true, Ordering::Release);
    }

    fn again(&mut self) {
        self.qp.shell.nic().engine().rearm(self.token);
    }

    /// The system does not report a descriptor that a thread polls.
    fn watch(&mut self) -> bool {
        let engine = self.qp.shell.nic().engine();
        let parked = self.parked.take().is_some_and(|mark| engine.is_parked(mark));
        if parked {
            engine.unpark();
        } else {
            engine.wait_for_room(self.token);
        }
        parked
    }
}

impl Qp {
    /// Moves what can be moved, in both directions.
    pub(super) fn pump(&self, inner: &mut Inner, now: &Now) {
        let received = self.receive(inner, now);
        self.found_nothing.store(!received, Ordering::Relaxed);
        self.send(inner, now);
    }

    #[inline]
    pub(super) fn send(&self, inner: &mut Inner, now: &Now) {
        let Inner { core, conn, .. } = inner;
        match conn {
            Some(Conn { settling, .. }) if settling.is_mute() => {}
            Some(Conn { link, pump, parked, timer, .. }) => {
                pump.send(core, now, &mut Around { qp: self, link, token: timer.token, parked });
            }
            // A peer that is gone takes nothing, but posted work must not wait for ever.
            None => _ = core.poll_transmit(now),
        }
    }

    /// Receives what is there. Returns whether there was anything: bytes, an end, an error.
    #[inline]
    pub(super) fn receive(&self, inner: &mut Inner, now: &Now) -> bool {
        if inner.conn.as_ref().is_some_and(|conn| !conn.settling.is_over()) {
            return self.receive_first(inner, now);
        }
        self.receive_now(inner, now)
    }

    /// The link is not settled. As [`Self::receive`], and it is reported also if that has ended the stream.
    #[cold]
    fn receive_first(&self, inner: &mut Inner, now: &Now) -> bool {
        let received = self.decide(inner) && self.receive_now(inner, now);
        received || inner.core.has_action()
    }

    #[inline(always)]
    fn receive_now(&self, inner: &mut Inner, now: &Now) -> bool {
        let Inner { core, conn: Some(conn), .. } = inner else { return false };
        let Conn { link, pump, parked, timer, .. } = conn;
        if self.hung_up.load(Ordering::Acquire) {
            link.look_at_end();
        }
        pump.receive(core, now, &mut Around { qp: self, link, token: timer.token, parked })
    }

    /// Carries out the core's actions and reports: usually there are none.
    #[inline]
    pub(super) fn act(&self, inner: &mut Inner, now: &Now) {
        if inner.core.has_action() {
            self.act_now(inner, now);
        }
    }

    #[cold]
    fn act_now(&self, inner: &mut Inner, now: &Now) {
        loop {
            let Inner { core, conn, .. } = inner;
            let action = match conn {
                Some(Conn { link, pump, parked, timer, .. }) => {
                    let mut around = Around { qp: self, link, token: timer.token, parked };
                    pump.poll_action(core, now, &mut around)
                }
                None => core.poll_action(),
            };
            match action {
                None => return,
                Some(Action::Wake(woken)) => inner.notices.extend(woken.into_iter().map(Notice::Kept)),
                Some(Action::Established) => self.established(inner),
                Some(Action::Disconnected { why, unsent, end, answer }) => {
                    self.ended(inner, now, (why, answer), (unsent, end));
                }
                Some(Action::Muted) => {
                    tracing::warn!(
                        qpn = self.qpn(),
                        "posted work waits for the peer's first message: in iWARP the end that has connected \
                         speaks first (RFC 5044 section 7.1.2), unless it requests the peer-to-peer model, \
                         which uwarp does and siw does not"
                    );
                }
                // There is no link to ask. (The pump does what concerns the link itself.)
                Some(Action::Recall | Action::CheckHangUp | Action::CheckAnswers { .. }) => {}
            }
        }
    }
}
