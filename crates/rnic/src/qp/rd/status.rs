//! What a program sees of a message that has failed.

use uwarp_proto::rd::Failure;
use uwarp_wire::rd::chunk::Reason;

use crate::wr::WcStatus;

/// The status of its completion. The receiver's reasons are those that InfiniBand has for RC and for its own
/// reliable datagrams.
pub(super) fn status_of(failure: Failure) -> WcStatus {
    match failure {
        Failure::Refused(Reason::InvalidRequest) => WcStatus::RemInvReqErr,
        Failure::Refused(Reason::Access) => WcStatus::RemAccessErr,
        Failure::Refused(Reason::InvalidDestination) => WcStatus::RemInvRdReqErr,
        Failure::Refused(Reason::Aborted) => WcStatus::RemAbortErr,
        // A reason of a later version: that the receiver did not take it is all that is known.
        Failure::Refused(Reason::Operation | Reason::Unassigned(_)) => WcStatus::RemOpErr,
        Failure::Refused(Reason::ReceiverNotReady) | Failure::NoReceive => WcStatus::RnrRetryExcErr,
        Failure::Silent | Failure::Restarted | Failure::Incompatible => WcStatus::RetryExcErr,
        Failure::Flushed | Failure::Withdrawn => WcStatus::WrFlushErr,
    }
}
