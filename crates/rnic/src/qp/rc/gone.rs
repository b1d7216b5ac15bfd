//! What the program is told of a peer that is gone, where the device passes for InfiniBand's (docs/adr/011).
//!
//! There the end of a connection is the connection manager's event, and nothing happens to the queue pair: it
//! stays in RTS with its receives posted until the program disconnects, modifies or destroys it. What it has
//! posted to send is tried again for a while; then the oldest work request fails with `RETRY_EXC_ERR` and the
//! queue pair with it. (An iWARP queue pair is in ERROR as soon as its stream has ended, as siw's is:
//! `siw_qp_llp_close`.)

use std::time::Duration;

use uwarp_wire::terminate::TerminateError;

use super::core::RcCore;
use super::silence::Answers;
use super::stream::{Disconnect, Established};
use super::timers::{LOOK_EVERY, Now, Timer};
use crate::event::EventKind;
use crate::qp::state::QpState;
use crate::queues::Phase;
use crate::wr::WcStatus;

/// How long sends to a peer that is gone wait. An adapter's retries take about as long with the numbers that
/// most programs give, and longer with others: 4.096 µs × 2^timeout × (retry_cnt + 1) is half a minute with 20
/// and 7. TCP has said already that nobody is there. The program has time enough to hear of the end first.
const LEAST: Duration = Duration::from_millis(100);
const MOST: Duration = Duration::from_secs(2);
/// An adapter's timeout may be up to four times the number that stands for it (InfiniBand volume 1, section
/// 9.7.6.1.3), and a stream takes longer to make than a packet to be acknowledged.
const LENIENT: u32 = 4;
/// What a peer has at least to answer in while the stream is made, whatever numbers the program gives:
/// hundreds of streams may begin at once.
const UNREACHED: Duration = Duration::from_millis(500);

impl RcCore {
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

    /// The stream is over, and nothing was heard on it: the peer's program began anew meanwhile, or went. A queue pair that its program
    /// moves up itself waits for the next one. (Posted work is as it was: who has not heard anything has not sent anything.)
    fn awaits_another(&mut self, why: Disconnect) -> bool {
        let up = self.is_up();
        match &mut self.stream {
            Some(stream) if self.by_program && up && stream.established == Established::NotYet => {
                stream.end(why);
                true
            }
            _ => false,
        }
    }

    /// The peer does not answer any more: the oldest work request has been retried in vain.
    pub(super) fn unanswered(&mut self, why: Disconnect) {
        if let Some(slot) = self.shell.sq.slot_mut(self.shell.sq.head)
            && !matches!(slot.phase, Phase::Failed(_))
        {
            slot.phase = Phase::Failed(WcStatus::RetryExcErr);
        }
        self.flush(why, None);
    }

    /// Whether what is posted has no stream to go to: the peer is gone, or the stream is being made.
    #[inline]
    pub(super) fn unreachable(&self) -> bool {
        self.gone || self.awaits_stream().is_some()
    }

    /// Whether the queue pair waits for its stream, in RTR, RTS or SQD, and which of its program's moves to RTR that is for.
    #[inline]
    pub fn awaits_stream(&self) -> Option<u32> {
        let awaits = self.by_program && self.stream.is_none() && self.is_up() && !self.gone;
        awaits.then_some(self.moves)
    }

    fn is_up(&self) -> bool {
        matches!(self.shell.attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd)
    }

    /// How long what is posted to a peer that is not there may wait, if something is.
    pub(super) fn retry_limit(&self) -> Option<Duration> {
        if self.shell.sq.is_empty() {
            return None;
        }
        // InfiniBand's local acknowledgement timeout, 4.096 µs × 2^timeout; 0 means none.
        let timeout = match self.shell.attr.timeout & 0x1F {
            0 => None,
            code => Some(Duration::from_nanos(4096 << code)),
        };
        let retries = u32::from(self.shell.attr.retry_cnt) + 1;
        if self.awaits_stream().is_some() {
            timeout.map(|timeout| (timeout * LENIENT * retries).max(UNREACHED))
        } else if self.gone {
            Some((timeout.unwrap_or(MOST) * retries).clamp(LEAST, MOST))
        } else {
            None
        }
    }

    /// The time that [`Self::retry_limit`] gave is over.
    pub(super) fn retries_exceeded(&mut self) {
        if self.retry_limit().is_some() {
            tracing::debug!(qpn = self.shell.qpn, "work requests wait for a peer that is not there");
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
    pub(super) fn connection_lost(&mut self, why: Disconnect) {
        if self.closing().is_some() || self.awaits_another(why) {
            return;
        }
        if !self.infiniband() {
            self.flush(why, None);
            self.shell.event(EventKind::QpFatal);
        } else if why == Disconnect::Timeout && !self.shell.sq.is_empty() {
            self.unanswered(why);
        } else {
            self.leave(why);
        }
    }

    /// The link has looked: how the peer answers, or that nothing is known.
    pub(super) fn answers(&mut self, now: &Now, answers: Option<Answers>) {
        let Some(stream) = &mut self.stream else { return };
        let Some(answers) = answers.filter(|answers| answers.pending) else {
            // The next bytes sent begin anew.
            stream.silence.since = None;
            return;
        };
        if stream.silence.is_over(answers, now.get()) {
            self.connection_lost(Disconnect::Timeout);
        } else {
            self.timers.start(Timer::Silence, now, LOOK_EVERY);
        }
    }

    /// The peer closed its sending side. `partial`: in the middle of a frame.
    pub(super) fn peer_closed(&mut self, partial: bool) {
        if self.closing().is_some() || self.awaits_another(Disconnect::PeerClosed) {
            return;
        }
        let cut_short = self.stream.as_ref().filter(|stream| partial || stream.direct.is_some());
        if let Some(error) = cut_short.map(|stream| stream.receiver.cut_short()) {
            // It may still hear why (RFC 5044 section 8, code 1; RFC 5040 section 6.2.1).
            self.give_up(error, None);
        } else if self.infiniband() {
            self.leave(Disconnect::PeerClosed);
        } else {
            self.flush(Disconnect::PeerClosed, None);
        }
    }

    /// This end gives the stream up for what the peer does not do. The peer is told; with InfiniBand's verbs
    /// this end's program is not: a receiver whose sender ran out of retries does not hear of it.
    pub(super) fn give_up(&mut self, error: TerminateError, offending: Option<(&[u8], u16)>) {
        if !self.infiniband() {
            self.fail(error, offending);
        } else if self.terminate(error, offending) {
            self.leave(Disconnect::Sent(error));
        }
    }

    /// In RTS or SQD with a peer that is gone, the program may move between the two.
    pub(super) fn may_be_up(&self, to: QpState) -> bool {
        self.stream.is_some() || (self.gone && to == QpState::Rts)
    }
}
