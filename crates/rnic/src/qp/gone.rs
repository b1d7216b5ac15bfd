//! What the program is told of a peer that is gone, where the device passes for InfiniBand's (docs/adr/011).
//!
//! There the end of a connection is the connection manager's event, and nothing happens to the queue pair: it stays in RTS with its receives
//! posted until the program disconnects, modifies or destroys it. What it has posted to send is tried again for a while; then the
//! oldest work request fails with `RETRY_EXC_ERR` and the queue pair with it. (An iWARP queue pair is in ERROR as soon as its
//! stream has ended, as siw's is: `siw_qp_llp_close`.)

use std::time::Duration;

use uwarp_wire::terminate::{Mpa, TerminateError};

use super::queues::Phase;
use super::{Disconnect, Established, QpCore, QpState};
use crate::event::EventKind;
use crate::wr::WcStatus;

/// How long sends to a peer that is gone wait. An adapter's retries take about as long with the numbers that most programs
/// give, and longer with others (4.096 µs × 2^timeout × (retry_cnt + 1): half a minute with 20 and 7). TCP has said already
/// that nobody is there. It is time enough for the program to hear of the end first.
const LEAST: Duration = Duration::from_millis(100);
const MOST: Duration = Duration::from_secs(2);

impl QpCore {
    /// Whether what happens to the stream is told as InfiniBand's verbs do.
    pub(super) fn infiniband(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.params.infiniband)
    }

    /// The peer is gone. The stream is to be closed; the queue pair stays as it is, until the program reacts.
    pub(super) fn leave(&mut self, why: Disconnect) {
        // A connection that did not come about was none.
        if self.stream.as_ref().is_none_or(|s| s.established == Established::NotYet) {
            return self.flush(why, None);
        }
        self.leave_line();
        self.gone = true;
        if let Some(stream) = &mut self.stream {
            stream.end(why);
        }
    }

    /// The peer does not answer any more: the oldest work request has been retried in vain.
    pub(super) fn unanswered(&mut self, why: Disconnect) {
        if let Some(slot) = self.sq.slot_mut(self.sq.head)
            && !matches!(slot.phase, Phase::Failed(_))
        {
            slot.phase = Phase::Failed(WcStatus::RetryExcErr);
        }
        self.flush(why, None);
    }

    /// Whether the peer is gone and the program has not reacted yet.
    pub fn peer_is_gone(&self) -> bool {
        self.gone
    }

    /// How long from now what is posted to send to a peer that is gone may wait, if something is: then
    /// [`Self::retries_exceeded`] is to be called.
    pub fn retry_limit(&self) -> Option<Duration> {
        if !self.gone || self.sq.is_empty() || self.stream.is_some() {
            return None;
        }
        // InfiniBand's local acknowledgement timeout, 4.096 µs × 2^timeout; 0 means none.
        let timeout = match self.attr.timeout & 0x1F {
            0 => MOST,
            code => Duration::from_nanos(4096 << code),
        };
        Some((timeout * (u32::from(self.attr.retry_cnt) + 1)).clamp(LEAST, MOST))
    }

    /// The time that [`Self::retry_limit`] gave is over.
    pub fn retries_exceeded(&mut self) {
        if self.retry_limit().is_some() {
            tracing::debug!(qpn = self.qpn, "the peer is gone, and work requests wait for it");
            self.unanswered(Disconnect::LocalClosed);
        }
    }

    /// The program disconnects from a peer that is gone: to the error state.
    pub fn leave_gone_peer(&mut self) {
        if self.gone {
            self.flush(Disconnect::LocalClosed, None);
        }
    }

    /// The lower layer broke.
    pub fn connection_lost(&mut self, why: Disconnect) {
        if self.closing().is_some() {
            return;
        }
        if !self.infiniband() {
            self.flush(why, None);
            self.event(EventKind::QpFatal);
        } else if why == Disconnect::Timeout && !self.sq.is_empty() {
            self.unanswered(why);
        } else {
            self.leave(why);
        }
    }

    /// The peer closed its sending side. `partial`: in the middle of an FPDU.
    pub fn peer_closed(&mut self, partial: bool) {
        if self.closing().is_some() {
            return;
        }
        if partial || self.stream.as_ref().is_some_and(|s| s.direct.is_some()) {
            // It may still hear why (RFC 5044 section 8, code 1; RFC 5040 section 6.2.1).
            self.give_up(TerminateError::Mpa(Mpa::ConnectionLost), None);
        } else if self.infiniband() {
            self.leave(Disconnect::PeerClosed);
        } else {
            self.flush(Disconnect::PeerClosed, None);
        }
    }

    /// This end gives the stream up for what the peer does not do. The peer is told; with InfiniBand's verbs this end's program is not:
    /// a receiver whose sender ran out of retries does not hear of it.
    pub(super) fn give_up(&mut self, error: TerminateError, struck: Option<(&[u8], u16)>) {
        if !self.infiniband() {
            self.fail(error, struck);
        } else if self.terminate(error, struck) {
            self.leave(Disconnect::Sent(error));
        }
    }

    /// In RTS or SQD with a peer that is gone, the program may move between the two.
    pub(super) fn may_be_up(&self, to: QpState) -> bool {
        self.stream.is_some() || (self.gone && to == QpState::Rts)
    }
}
