//! What the program sees of a peer that is gone, where the device looks like InfiniBand's (docs/adr/011).
//!
//! With InfiniBand, the end of a connection is an event of the connection manager, and nothing happens to the
//! queue pair: it stays in RTS with its receives posted until the program disconnects, modifies or destroys
//! it. Posted sends are retried for a while; then the oldest work request fails with `RETRY_EXC_ERR`, and the
//! queue pair with it. (An iWARP queue pair is in ERROR as soon as its stream has ended, as siw's is:
//! `siw_qp_llp_close`.)

use std::time::Duration;

use uwarp_wire::terminate::TerminateError;

use super::core::RcCore;
use super::silence::Answers;
use super::stream::{Disconnect, Established, Stream};
use super::timers::{LOOK_EVERY, Now, Timer};
use crate::event::EventKind;
use crate::qp::state::QpState;
use crate::queues::Phase;
use crate::wr::WcStatus;

/// How long sends to a peer that is gone wait. An adapter's retries take about as long with the numbers that
/// most programs set, and longer with others: 4.096 µs × 2^timeout × (retry_cnt + 1) is half a minute with 20
/// and 7. Here TCP has already reported that the peer is gone. The program still has enough time to learn of
/// the end first.
const MIN_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_secs(2);
/// An adapter's timeout may be up to four times the time that its number means (InfiniBand volume 1, section
/// 9.7.6.1.3), and setting up a stream takes longer than acknowledging a packet.
const SETUP_FACTOR: u32 = 4;
/// The least time for the peer to answer while the stream is set up, whatever numbers the program sets:
/// hundreds of streams may begin at once.
const MIN_SETUP_WAIT: Duration = Duration::from_millis(500);

impl RcCore {
    /// Whether errors are reported as InfiniBand's verbs do.
    pub(super) fn infiniband(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.params.infiniband)
    }

    /// Whether the queue pair stays as it is when the peer ends the stream.
    fn outlives_stream(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.params.infiniband || s.params.by_number)
    }

    /// The peer is gone. Closes the stream; the queue pair keeps its state until the program reacts.
    pub(super) fn end_stream_only(&mut self, why: Disconnect) {
        // The connection was never established, so the queue pair fails.
        if self.stream.as_ref().is_none_or(|s| s.established == Established::NotYet) {
            return self.flush(why, None);
        }
        self.leave_line();
        self.gone = true;
        if let Some(stream) = &mut self.stream {
            stream.end(why);
        }
    }

    /// A stream by number has ended before any program used it: meanwhile the peer's program restarted, or
    /// ended. It does not count, and the queue pair waits for the next one. (Posted work is unchanged: an end
    /// that has received nothing has sent nothing.)
    fn waits_for_next_stream(&mut self, why: Disconnect) -> bool {
        let up = self.is_up();
        match &mut self.stream {
            Some(stream) if self.by_program && up && !stream.is_used() => {
                stream.end(why);
                true
            }
            _ => false,
        }
    }

    /// The peer of a stream by number has sent nothing in time: this end waits for the next stream.
    pub(super) fn join_failed(&mut self) {
        if self.is_joining() {
            tracing::debug!(qpn = self.shell.qpn, "nothing came on a stream by number");
            self.connection_lost(Disconnect::Timeout);
        }
    }

    /// The peer does not answer any more: the retries of the oldest work request are exhausted.
    pub(super) fn unanswered(&mut self, why: Disconnect) {
        if let Some(slot) = self.shell.sq.slot_mut(self.shell.sq.head)
            && !matches!(slot.phase, Phase::Failed(_))
        {
            slot.phase = Phase::Failed(WcStatus::RetryExcErr);
        }
        self.flush(why, None);
    }

    /// Whether posted work has no peer: that is gone, or the stream is being set up.
    #[inline]
    pub(super) fn unreachable(&self) -> bool {
        match &self.stream {
            Some(stream) => self.gone || stream.is_joining(),
            None => self.gone || self.awaits_stream().is_some(),
        }
    }

    fn is_joining(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| stream.is_joining() && stream.closing.is_none())
    }

    /// Whether the queue pair waits for its stream, in RTR, RTS or SQD; if so, which of the program's moves
    /// to RTR the stream is for.
    #[inline]
    pub fn awaits_stream(&self) -> Option<u32> {
        let awaits = self.by_program && self.stream.is_none() && self.is_up() && !self.gone;
        awaits.then_some(self.moves)
    }

    fn is_up(&self) -> bool {
        matches!(self.shell.attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd)
    }

    /// How long work that is posted without a peer may wait, if there is such work.
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
        // A stream that ends before it counts does not begin the time anew: a peer that comes and goes
        // forever does not keep work waiting forever.
        let joining = self.stream.as_ref().is_some_and(Stream::is_joining);
        if self.awaits_stream().is_some() || joining {
            timeout.map(|timeout| (timeout * SETUP_FACTOR * retries).max(MIN_SETUP_WAIT))
        } else if self.gone {
            Some((timeout.unwrap_or(MAX_WAIT) * retries).clamp(MIN_WAIT, MAX_WAIT))
        } else {
            None
        }
    }

    /// The time that [`Self::retry_limit`] returned has passed.
    pub(super) fn retries_exceeded(&mut self) {
        if self.retry_limit().is_some() {
            tracing::debug!(qpn = self.shell.qpn, "retries of work requests without a peer are exhausted");
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
        if self.closing().is_some() || self.waits_for_next_stream(why) {
            return;
        }
        if !self.outlives_stream() {
            self.flush(why, None);
            self.shell.event(EventKind::QpFatal);
        } else if why == Disconnect::Timeout && !self.shell.sq.is_empty() {
            self.unanswered(why);
        } else {
            self.end_stream_only(why);
        }
    }

    /// The link has checked how the peer answers; `None`: not known.
    pub(super) fn answers(&mut self, now: &Now, answers: Option<Answers>) {
        let qpn = self.shell.qpn;
        let Some(stream) = &mut self.stream else { return };
        let waits = stream.awaits_peer() && stream.closing.is_none();
        if waits {
            let answered = (stream.acked, stream.reads.front().map(|read| read.msn));
            stream.silence.say_if_idle(qpn, answered, now.get());
        }
        let Some(answers) = answers.filter(|answers| answers.pending) else {
            stream.silence.since = None;
            if waits && answers.is_some() {
                self.timers.start(Timer::Silence, now, LOOK_EVERY);
            }
            // Otherwise the next bytes sent start the check again.
            return;
        };
        if stream.silence.is_over(answers, now.get()) {
            self.connection_lost(Disconnect::Timeout);
        } else {
            self.timers.start(Timer::Silence, now, LOOK_EVERY);
        }
    }

    /// The peer's stream has ended in good order, and its system had not acknowledged the last `unread` bytes
    /// then. If no last acknowledgement came before, the peer's process is gone, and its system has closed
    /// the stream. That would have been a reset if the process had not read all that its system has
    /// acknowledged, or had set something aside ([`RcCore::sets_aside`]). So it had placed the messages up to
    /// there.
    pub(super) fn read_before_end(&mut self, unread: usize) {
        let Some(stream) = &mut self.stream else { return };
        // A peer that has sent nothing may be a responder that has received nothing, which says nothing.
        let tells = stream.params.placement_acks && stream.last_acks && stream.opening.heard();
        if !tells || stream.last_ack_seen || stream.closing.is_some() {
            return;
        }
        let read = stream.out.taken().saturating_sub(u64::try_from(unread).unwrap_or(u64::MAX));
        let sq = &self.shell.sq;
        let placed = (sq.head..sq.next).filter_map(|number| match sq.slot(number)?.phase {
            Phase::Sent { end, message } if end <= read => Some(message),
            _ => None,
        });
        stream.acked = placed.max().unwrap_or(0).max(stream.acked);
        self.retire();
    }

    /// Whether something that was received is not placed: a Send waits for its receive, and what is behind it
    /// waits with it. While this is so, the lower layer must end the stream with a reset if this process is
    /// killed, because the peer takes an orderly end for an acknowledgement.
    #[inline]
    pub fn sets_aside(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| (s.stalled || !s.buffered.is_empty()) && s.params.placement_acks)
    }

    /// The peer closed its sending side. `partial`: in the middle of a frame.
    pub(super) fn peer_closed(&mut self, partial: bool) {
        if self.closing().is_some() || self.waits_for_next_stream(Disconnect::PeerClosed) {
            return;
        }
        let cut_short = self.stream.as_ref().filter(|stream| partial || stream.direct.is_some());
        if let Some(error) = cut_short.map(|stream| stream.receiver.cut_short()) {
            // The peer may still receive the reason (RFC 5044 section 8, code 1; RFC 5040 section 6.2.1).
            self.give_up(error, None);
        } else if self.outlives_stream() {
            self.end_stream_only(Disconnect::PeerClosed);
        } else {
            self.flush(Disconnect::PeerClosed, None);
        }
    }

    /// This end gives up the stream because the peer did not do its part. The peer gets a Terminate. With
    /// InfiniBand's verbs, this end's program gets no report: there, a receiver does not learn that its
    /// sender ran out of retries.
    pub(super) fn give_up(&mut self, error: TerminateError, offending: Option<(&[u8], u16)>) {
        if !self.infiniband() {
            self.fail(error, offending);
        } else if self.terminate(error, offending) {
            self.end_stream_only(Disconnect::Sent(error));
        }
    }

    /// In RTS or SQD with a peer that is gone, the program may move between the two.
    pub(super) fn may_be_up(&self, to: QpState) -> bool {
        self.stream.is_some() || (self.gone && to == QpState::Rts)
    }
}
