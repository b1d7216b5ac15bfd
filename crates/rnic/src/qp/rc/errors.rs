//! What happens on an error: Terminates sent and received, flushing, and what is reported to the program.

use uwarp_proto::tx::Message;
use uwarp_wire::ddp::QN_TERMINATE;
use uwarp_wire::rdmap::Opcode;
use uwarp_wire::terminate::{RemoteOperation, Terminate, TerminateError, UntaggedBuffer};

use super::core::RcCore;
use super::stream::{Disconnect, Stream};
use super::timers::Timer;
use crate::event::EventKind;
use crate::qp::state::QpState;
use crate::queues::{Phase, SendQueue};
use crate::wr::{SendOp, Wc, WcOpcode, WcStatus};

/// The completion status of the work request that a peer's Terminate is about (verbs' names for RFC 5040's
/// and 5041's errors).
pub(super) fn status_for(error: TerminateError) -> WcStatus {
    match error {
        TerminateError::RemoteProtection(_) | TerminateError::TaggedBuffer(_) => WcStatus::RemAccessErr,
        TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer) => WcStatus::RnrRetryExcErr,
        TerminateError::UntaggedBuffer(UntaggedBuffer::TooLong)
        | TerminateError::RemoteOperation(RemoteOperation::UnexpectedOpcode) => WcStatus::RemInvReqErr,
        TerminateError::RemoteOperation(_)
        | TerminateError::LocalCatastrophic
        | TerminateError::DdpLocalCatastrophic => WcStatus::RemOpErr,
        TerminateError::UntaggedBuffer(_) => WcStatus::BadRespErr,
        TerminateError::Mpa(_) | TerminateError::Unknown { .. } => WcStatus::FatalErr,
    }
}

/// The same for this operation. For an atomic operation, the error that RFC 7306 section 8.2 prescribes for
/// an unaligned address has only that meaning; InfiniBand's verbs call it an invalid request.
fn status_of(op: SendOp, error: TerminateError) -> WcStatus {
    match error {
        TerminateError::RemoteOperation(RemoteOperation::CatastrophicStream) if op.is_atomic() => {
            WcStatus::RemInvReqErr
        }
        error => status_for(error),
    }
}

/// The asynchronous event of the end that found the error, by what the peer did.
fn event_for(error: TerminateError) -> EventKind {
    match error {
        TerminateError::RemoteProtection(_) | TerminateError::TaggedBuffer(_) => EventKind::QpAccessErr,
        TerminateError::UntaggedBuffer(_) | TerminateError::RemoteOperation(_) => EventKind::QpReqErr,
        _ => EventKind::QpFatal,
    }
}

/// Which work request of this end a peer's Terminate is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Blame {
    /// The Read whose request had this MSN.
    Read(u32),
    /// No header identifies it: the oldest that is not complete.
    Oldest,
    /// None: the Terminate is about a response of this end.
    NoWorkRequest,
}

/// How the send work requests of a queue pair in the error state complete.
#[derive(Debug, Clone, Copy)]
pub(super) struct Flush {
    /// Bytes of the stream that the lower layer had taken.
    taken: u64,
    /// The last message that may complete with success.
    completes_to: u64,
    vendor_err: u32,
}

/// An error while a segment is handled.
pub(super) enum Fault {
    /// The peer's error: it gets this Terminate.
    Peer(TerminateError),
    /// The local memory of the present receive cannot be used. The receive completes with this status; the
    /// peer gets a Terminate for a local failure.
    Receive(WcStatus, TerminateError),
    /// The oldest Read fails with this status: its local memory cannot be used.
    Read(WcStatus),
}

impl From<TerminateError> for Fault {
    fn from(e: TerminateError) -> Self {
        Self::Peer(e)
    }
}

impl Stream {
    /// Drops what is queued, except a frame that is partly sent; returns how many bytes were dropped. `None`
    /// if the program has unmapped the rest of that frame: then nothing more can be sent.
    fn cut(&mut self) -> Option<usize> {
        let dropped = self.out.cut();
        self.sender.unsend(dropped.unwrap_or(0));
        self.unsend_acks();
        dropped.ok()
    }

    /// Whether the peer is a uwarp end that has no Read of this end to serve.
    pub(super) fn peer_only_receives(&self) -> bool {
        self.params.peer_is_uwarp && self.reads.iter().all(|read| read.slot.is_none())
    }

    /// Closes the stream; the work requests are about to be completed. Only the first reason counts.
    pub(super) fn end(&mut self, why: Disconnect) {
        if self.closing.is_none() {
            match why {
                Disconnect::Sent(_) => {}
                // Nothing can be sent any more, and the memory that waits may be unmapped.
                Disconnect::Reset => self.out.discard(),
                // The rest refers to memory that now returns to the program. (A peer that is silent for too
                // long may come back, and its system take what nobody here will read.)
                _ if self.cut().is_some() && matches!(why, Disconnect::LocalClosed | Disconnect::Timeout) => {
                    self.emit_last_ack();
                }
                _ => {}
            }
        }
        self.closing.get_or_insert(why);
        self.tx.stop();
        self.direct = None;
        self.stalled = false;
        self.buffered.clear();
        self.reads.clear();
        self.requests.clear();
        self.streaming = None;
    }
}

/// Why a work request of this end has failed, in words for its programmer.
fn own_failure(status: WcStatus) -> &'static str {
    match status {
        WcStatus::LocProtErr => {
            "the memory of its own work request: a wrong local key, or a place that the region does not \
             contain or may not be written"
        }
        _ => "its own work request failed; the completion's status says why",
    }
}

impl RcCore {
    /// The peer made an error (or this end cannot continue): sends a Terminate, and the queue pair fails.
    /// Only the first reason counts. `offending`: the DDP segment with the error, headers at least, and its
    /// length.
    pub(super) fn fail(&mut self, error: TerminateError, offending: Option<(&[u8], u16)>) {
        self.fail_because(error, offending, error.in_words());
    }

    fn fail_because(&mut self, error: TerminateError, offending: Option<(&[u8], u16)>, why: &str) {
        if self.terminate_because(error, offending, why) {
            self.flush(Disconnect::Sent(error), None);
            self.shell.event(event_for(error));
        }
    }

    /// A work request of this end cannot be carried out: the peer gets a Terminate, and the queue pair fails.
    /// With InfiniBand's verbs only the completion reports it (rxe does the same, `rxe_comp.c`).
    pub(super) fn fail_own(&mut self, status: WcStatus) {
        let error = TerminateError::LocalCatastrophic;
        if self.terminate_because(error, None, own_failure(status)) {
            let quiet = self.infiniband();
            self.flush(Disconnect::Sent(error), None);
            if !quiet {
                self.shell.event(event_for(error));
            }
        }
    }

    /// Queues a Terminate, unless the stream is closing already.
    pub(super) fn terminate(&mut self, error: TerminateError, offending: Option<(&[u8], u16)>) -> bool {
        self.terminate_because(error, offending, error.in_words())
    }

    /// `why`: for the person who reads the log.
    fn terminate_because(
        &mut self,
        error: TerminateError,
        offending: Option<(&[u8], u16)>,
        why: &str,
    ) -> bool {
        let Some(stream) = &mut self.stream else { return false };
        if stream.closing.is_some() {
            return false;
        }
        tracing::warn!(qpn = self.shell.qpn, "this end ends the connection: {why}");
        tracing::debug!(qpn = self.shell.qpn, %error, "terminating the stream");
        self.shell.counters.terminates_sent += 1;
        if stream.cut().is_some() {
            self.shell.sq.unsend(stream.out.queued());
            // Good messages are acknowledged first: the peer takes its oldest unacknowledged message for the
            // bad one.
            stream.emit_all_acks();
            stream.last_word_said = true;
            let terminate = Terminate::new(error, offending);
            let mut bytes = [0u8; Terminate::MAX_LEN];
            let len = terminate.emit(&mut bytes);
            let message =
                Message::Untagged { opcode: Opcode::Terminate, qn: QN_TERMINATE, msn: 1, invalidate: 0 };
            stream.emit_message(message, bytes.get(..len).unwrap_or(&[]));
        }
        true
    }

    /// The peer sent a Terminate.
    pub(super) fn peer_terminated(&mut self, error: TerminateError, blame: Blame) {
        tracing::warn!(qpn = self.shell.qpn, "the peer ended the connection: {}", error.in_words());
        tracing::debug!(qpn = self.shell.qpn, %error, "the peer terminated the stream");
        self.shell.counters.terminates_received += 1;
        let oldest = |sq: &SendQueue| sq.front().map(|_| sq.head);
        let blamed = match blame {
            Blame::Read(msn) => {
                let Some(stream) = &mut self.stream else { return };
                let read = stream.reads.iter().find(|read| read.msn == msn).copied();
                if let Some(read) = &read {
                    // The peer has reached the request of this Read, so the messages before it are placed.
                    stream.read_answered(read);
                    self.retire();
                }
                // A Read that this end made itself is no work request; it was about the messages that wait.
                read.and_then(|read| read.slot.or_else(|| oldest(&self.shell.sq)))
            }
            Blame::Oldest => oldest(&self.shell.sq),
            Blame::NoWorkRequest => None,
        };
        // These completions may have brought a local failure to the front, which has ended the stream.
        if self.closing().is_some() {
            return;
        }
        let why = Disconnect::Terminated(error);
        let infiniband = self.infiniband();
        if let Some(slot) = blamed.and_then(|n| self.shell.sq.slot_mut(n)) {
            slot.phase = Phase::Failed(status_of(slot.op, error));
            self.flush(why, Some(error));
            if infiniband {
                return;
            }
        } else if infiniband && error == TerminateError::LocalCatastrophic {
            // A work request of the peer has failed there. An adapter would not learn of it. (Nor does it
            // mean that there was no connection, where the peer had not said its first word yet.)
            if let Some(stream) = &mut self.stream {
                stream.note_frame();
            }
            return self.end_stream_only(why);
        } else {
            self.flush(why, Some(error));
        }
        self.shell.event(EventKind::QpFatal);
    }

    /// A work request of this end cannot be carried out, and all earlier ones are complete.
    pub(super) fn local_failure(&mut self, status: WcStatus) {
        tracing::debug!(qpn = self.shell.qpn, ?status, "a send work request failed");
        // RFC 5040 section 7.1: an error found while a request is created is reported to the peer instead of
        // the request.
        if self.stream.as_ref().is_some_and(|s| s.closing.is_none()) {
            self.fail_own(status);
        } else {
            self.flush(Disconnect::LocalClosed, None);
        }
    }

    pub(super) fn fault(&mut self, fault: Fault, offending: Option<(&[u8], u16)>) {
        match fault {
            Fault::Peer(e) => self.fail(e, offending),
            Fault::Receive(status, e) => {
                if let Some(recv) = self.shell.rq.pop() {
                    let wc = Wc::new(recv.wr_id, status, WcOpcode::Recv, self.shell.qpn);
                    self.shell.complete_recv(wc, false);
                }
                let own = e == TerminateError::DdpLocalCatastrophic;
                self.fail_because(e, offending, if own { own_failure(status) } else { e.in_words() });
            }
            Fault::Read(status) => {
                if let Some(number) =
                    self.stream.as_ref().and_then(|s| s.reads.front()).and_then(|sink| sink.slot)
                    && let Some(slot) = self.shell.sq.slot_mut(number)
                {
                    slot.phase = Phase::Failed(status);
                }
                self.fail_own(status);
            }
        }
    }

    /// A completion queue was full: a completion is lost, so the stream cannot continue.
    pub(super) fn check_overflow(&mut self) {
        if self.shell.take_overflow() {
            self.fail(TerminateError::LocalCatastrophic, None);
        }
    }

    /// The owner closes the stream; posted work that was not sent is flushed.
    pub(super) fn close(&mut self) {
        if self.closing().is_none() {
            self.flush(Disconnect::LocalClosed, None);
        }
    }

    /// To the error state: every work request that is not done completes, in order, with a flush error or
    /// with the failure that it was marked with.
    pub(super) fn flush(&mut self, why: Disconnect, cause: Option<TerminateError>) {
        let before = self.shell.attr.state;
        self.shell.fail();
        self.gone = false;
        self.timers.clear(Timer::Retry);
        self.leave_line();
        if let Some(stream) = &mut self.stream {
            stream.end(why);
        }
        let vendor_err = cause.map_or(0, |e| {
            let (layer, etype, code) = e.codes();
            u32::from(layer) << 12 | u32::from(etype) << 8 | u32::from(code)
        });
        let (taken, completes_to) =
            self.stream.as_ref().map_or((0, 0), |s| (s.out.taken(), s.completes_to()));
        let flush = Flush { taken, completes_to, vendor_err };
        if self.stream.as_ref().is_some_and(|s| s.out.released() < taken) {
            // The lower layer still refers to memory of work requests: see `Action::Recall`.
            self.unflushed.get_or_insert(flush);
        } else {
            self.flush_sends(flush);
        }
        self.shell.flush_receives();
        if before != QpState::Err {
            self.shell.last_receive_reached();
        }
    }

    /// Completes the send work requests of a queue pair in the error state.
    pub(super) fn flush_sends(&mut self, flush: Flush) {
        let Flush { taken, completes_to, vendor_err } = flush;
        let mut failed = false;
        while let Some(slot) = self.shell.sq.pop() {
            // After one that is not done, none counts as done: programs take the first failure for the end.
            let status = match slot.phase {
                Phase::Done if !failed => WcStatus::Success,
                Phase::Sent { end, message } if !failed && end <= taken && message <= completes_to => {
                    WcStatus::Success
                }
                Phase::Failed(status) => status,
                _ => WcStatus::WrFlushErr,
            };
            failed |= status != WcStatus::Success;
            if status == WcStatus::Success {
                self.shell.counters.completed(slot.op, slot.total);
            }
            let signaled = self.shell.signals(slot.flags);
            if status == WcStatus::Success && !signaled {
                continue;
            }
            let mut wc = Wc::new(slot.wr_id, status, slot.op.completion(), self.shell.qpn);
            if matches!(slot.phase, Phase::Failed(_)) {
                wc.vendor_err = vendor_err;
            }
            self.shell.complete_send(wc);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uwarp_wire::terminate::ERRORS;

    /// Every error of the RFCs, by layer, type and code, with what the program of either end sees.
    #[test]
    fn every_error_has_its_status_and_its_event() {
        type Codes = (u8, u8, u8);
        let table: [(WcStatus, EventKind, &[Codes]); 8] = [
            // The peer may not do that to this memory.
            (
                WcStatus::RemAccessErr,
                EventKind::QpAccessErr,
                &[(0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 1, 3), (0, 1, 4), (0, 1, 9), (0, 1, 0xFF)],
            ),
            (
                WcStatus::RemAccessErr,
                EventKind::QpAccessErr,
                &[(1, 1, 0), (1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 1, 4)],
            ),
            // No receive; a receive that is too small, or an operation that does not belong in this queue.
            (WcStatus::RnrRetryExcErr, EventKind::QpReqErr, &[(1, 2, 2)]),
            (WcStatus::RemInvReqErr, EventKind::QpReqErr, &[(1, 2, 5), (0, 2, 6)]),
            // Segments out of order.
            (WcStatus::BadRespErr, EventKind::QpReqErr, &[(1, 2, 1), (1, 2, 3), (1, 2, 4), (1, 2, 6)]),
            // The peer could not do it.
            (
                WcStatus::RemOpErr,
                EventKind::QpReqErr,
                &[(0, 2, 5), (0, 2, 7), (0, 2, 8), (0, 2, 9), (0, 2, 0xFF)],
            ),
            (WcStatus::RemOpErr, EventKind::QpFatal, &[(0, 0, 0), (1, 0, 0)]),
            // The stream below.
            (
                WcStatus::FatalErr,
                EventKind::QpFatal,
                &[(2, 0, 1), (2, 0, 2), (2, 0, 3), (2, 0, 4), (2, 0, 5), (2, 0, 6), (2, 0, 7)],
            ),
        ];
        let rows =
            || table.iter().flat_map(|(status, event, list)| list.iter().map(move |c| (c, status, event)));
        for (codes, status, event) in rows() {
            let error = TerminateError::from_codes(codes.0, codes.1, codes.2);
            assert!(!matches!(error, TerminateError::Unknown { .. }), "{codes:?}");
            assert_eq!((status_for(error), event_for(error)), (*status, *event), "{error:?}");
        }
        let missing: Vec<_> =
            ERRORS.iter().filter(|(_, codes, _)| !rows().any(|(listed, ..)| listed == codes)).collect();
        assert!(missing.is_empty(), "{missing:?}");
        let unknown = TerminateError::from_codes(15, 7, 0x99);
        assert_eq!((status_for(unknown), event_for(unknown)), (WcStatus::FatalErr, EventKind::QpFatal));
    }
}
