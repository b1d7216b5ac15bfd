//! Atomic operations (RFC 7306 section 5; docs/adr/029), at both ends.
//!
//! The responder carries a request out when it arrives: Sends and Writes behind it must find it done. A Read
//! before it that is answered later gets the old value. Requests and Reads share one queue, one numbering and
//! the read depth, and are answered in the order in which they arrived.

use uwarp_proto::rx::Segment;
use uwarp_proto::tx::Message;
use uwarp_wire::ddp::{QN_ATOMIC_RESPONSE, QN_READ_REQUEST};
use uwarp_wire::rdmap::{AtomicRequest, AtomicResponse, Opcode};
use uwarp_wire::terminate::{RemoteOperation, RemoteProtection, TerminateError, UntaggedBuffer};

use super::core::RcCore;
use super::errors::Fault;
use super::reads::{Atomic, ReadSink, Request};
use crate::mr::{Access, AccessError, Part};
use crate::queues::{ATOMIC_BYTES, Phase, slice_sges};
use crate::wr::WcStatus;
use uwarp_mem::{self as mem, NotDone};

/// RFC 7306 sections 5.2.1 and 5.2.2 fix the lengths and name no code for a wrong one; these are the codes
/// for a Read Request of the wrong length. The message is one segment, because every segment may be larger
/// (RFC 5044 section 4.1).
fn check_length(segment: &Segment, len: usize) -> Result<(), TerminateError> {
    match segment.payload_len {
        longer if longer > len => Err(TerminateError::UntaggedBuffer(UntaggedBuffer::TooLong)),
        exact if exact == len && segment.last() => Ok(()),
        _ => Err(TerminateError::RemoteOperation(RemoteOperation::Unspecified)),
    }
}

/// The Terminate for an Atomic Request that cannot be carried out.
fn error_for(why: NotDone) -> TerminateError {
    match why {
        // RFC 7306 section 8.2.
        NotDone::Unaligned => TerminateError::RemoteOperation(RemoteOperation::CatastrophicStream),
        // Section 5.2.1 item 4 names no code; section 1.1 says that a peer can learn from this one what is
        // supported.
        NotDone::Unknown => TerminateError::RemoteOperation(RemoteOperation::UnexpectedOpcode),
        NotDone::Unmapped => AccessError::Unmapped.for_read_request(),
    }
}

impl RcCore {
    /// Sends the request of a work request; the read depth has a place for it.
    pub(super) fn start_atomic(&mut self, number: u64) -> bool {
        // The sink is checked before the request is sent: the operation cannot be undone.
        let Some(slot) = self.shell.sq.slot(number).copied() else { return false };
        let (pd, local) = (self.shell.pd.id(), &mut self.shell.local);
        let bad = slice_sges(self.shell.sq.sges(&slot), 0, slot.total)
            .any(|part| local.with(part, pd, Access::LOCAL_WRITE, |_| ()).is_err());
        if bad {
            self.fail_work_request(number, WcStatus::LocProtErr);
            return true;
        }
        let Some(stream) = &mut self.stream else { return false };
        let msn = stream.tx.next_read_msn();
        let Some(request) = slot.op.atomic_request(msn) else { return false };
        let message =
            Message::Untagged { opcode: Opcode::AtomicRequest, qn: QN_READ_REQUEST, msn, invalidate: 0 };
        stream.emit_message(message, &request.to_bytes());
        stream.reads.push_back(ReadSink::atomic(number, msn, stream.tx.messages()));
        stream.look_past_waiting();
        self.shell.sq.next += 1;
        self.mark(number, Phase::Reading);
        true
    }

    /// An Atomic Response arrived.
    pub(super) fn atomic_response(&mut self, segment: &Segment, payload: &[u8]) -> Result<(), Fault> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        let Some(sink) = stream.reads.front().copied().filter(|sink| sink.atomic) else {
            // There is no request for it, or a Read before it is not answered yet.
            return Err(TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer).into());
        };
        check_length(segment, AtomicResponse::LEN)?;
        let response = AtomicResponse::parse(payload).ok().filter(|response| response.request_id == sink.msn);
        let response = response.ok_or(TerminateError::RemoteOperation(RemoteOperation::Unspecified))?;
        let Some((number, slot)) = sink.slot.and_then(|n| self.shell.sq.slot(n).map(|slot| (n, slot))) else {
            return Ok(());
        };
        let value = response.original.to_ne_bytes();
        let mut rest: &[u8] = &value;
        let (pd, need) = (self.shell.pd.id(), Access::needed(segment.info.right));
        for part in slice_sges(self.shell.sq.sges(slot), 0, ATOMIC_BYTES) {
            let placed = self.shell.local.with(part, pd, need, |seg| mem::copy_in(seg, rest));
            let Ok(Ok(n)) = placed else { return Err(Fault::Read(WcStatus::LocProtErr)) };
            rest = rest.get(n..).unwrap_or(&[]);
        }
        stream.reads.pop_front();
        stream.read_answered(&sink);
        self.read_done(number);
        Ok(())
    }

    /// An Atomic Request arrived: carries it out. The Response waits for its turn.
    pub(super) fn atomic_request(&mut self, segment: &Segment, payload: &[u8]) -> Result<(), TerminateError> {
        let Some(stream) = &mut self.stream else { return Ok(()) };
        check_length(segment, AtomicRequest::LEN)?;
        let Ok(request) = AtomicRequest::parse(payload) else {
            return Err(TerminateError::RemoteOperation(RemoteOperation::Unspecified));
        };
        if stream.reads_to_serve() >= usize::from(stream.params.ird) {
            return Err(TerminateError::UntaggedBuffer(UntaggedBuffer::NoBuffer));
        }
        if !self.shell.attr.access.contains(Access::needed(segment.info.right)) {
            return Err(TerminateError::RemoteProtection(RemoteProtection::AccessRights));
        }
        let (addr, original) = self.carry_out(&request)?;
        if let Some(stream) = &mut self.stream {
            stream.atomics += 1;
            stream.requests.push_back(Request::Atomic(Atomic {
                request_id: request.request_id,
                addr,
                original,
            }));
        }
        Ok(())
    }

    /// Checks the target, and carries the operation out; returns its address and the old value.
    fn carry_out(&mut self, request: &AtomicRequest) -> Result<(u64, u64), TerminateError> {
        if request.to.checked_add(u64::from(ATOMIC_BYTES)).is_none() {
            return Err(TerminateError::RemoteProtection(RemoteProtection::ToWrap));
        }
        let part = Part { stag: request.stag, to: request.to, len: ATOMIC_BYTES as usize };
        let done = self.remote.with(part, self.shell.pd.id(), Access::REMOTE_ATOMIC, |seg| {
            mem::atomic(seg, request).map(|original| (seg.addr, original))
        });
        done.map_err(AccessError::for_read_request)?.map_err(error_for)
    }

    /// Answers an atomic operation whose turn has come.
    pub(super) fn start_atomic_response(&mut self, atomic: Atomic) {
        self.shell.counters.sent.atomic_response.count(ATOMIC_BYTES);
        let Some(stream) = &mut self.stream else { return };
        stream.atomics = stream.atomics.saturating_sub(1);
        let Atomic { request_id, original, .. } = atomic;
        let response = AtomicResponse { request_id, original };
        let message = Message::Untagged {
            opcode: Opcode::AtomicResponse,
            qn: QN_ATOMIC_RESPONSE,
            msn: stream.tx.next_atomic_msn(),
            invalidate: 0,
        };
        stream.emit_message(message, &response.to_bytes());
        stream.responses.push_back(stream.out.queued());
    }
}
