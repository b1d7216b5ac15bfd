//! What a program sees of a message that has failed.

use uwarp_proto::rd::Failure;
use uwarp_wire::rd::chunk::Reason;

use crate::wr::WcStatus;

/// The status of its completion. The receiver's reasons are those that InfiniBand has for RC and for its own
/// reliable datagrams.
pub(super) fn status_of(failure: Failure) -> WcStatus {
    match failure {
        Failure::Refused(reason) => status_of_refusal(reason),
        Failure::NoReceive => WcStatus::RnrRetryExcErr,
        Failure::Silent | Failure::Restarted | Failure::Incompatible => WcStatus::RetryExcErr,
        Failure::Flushed | Failure::Withdrawn => WcStatus::WrFlushErr,
    }
}

/// The same of what the receiver has said.
pub(super) fn status_of_refusal(reason: Reason) -> WcStatus {
    match reason {
        Reason::InvalidRequest => WcStatus::RemInvReqErr,
        Reason::Access => WcStatus::RemAccessErr,
        Reason::InvalidDestination => WcStatus::RemInvRdReqErr,
        Reason::Aborted => WcStatus::RemAbortErr,
        // A reason of a later version: that the receiver did not take it is all that is known.
        Reason::Operation | Reason::Unassigned(_) => WcStatus::RemOpErr,
        Reason::ReceiverNotReady => WcStatus::RnrRetryExcErr,
    }
}
