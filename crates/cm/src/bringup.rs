//! Queue pairs that a program moves to RTR and RTS itself: while rdma_cm makes their connection (`rping -q`,
//! UCX), or without a connection manager, by the peer's address and number ([`crate::machine::pairings`]).
//!
//! With rdma_cm the program sees the state that it has requested. The RNIC's queue pair stays in INIT until
//! it has its stream, and is in RTS from then on. Both orders occur. The active end moves the queue pair
//! after `CONNECT_RESPONSE`: the connection is there, and RTR takes it. The passive end moves it before it
//! accepts (the accepted connection then comes to the queue pair), or after.

use std::sync::Arc;

use uwarp_driver::Qp;
use uwarp_rnic::VerbsError;
use uwarp_rnic::ah::port_of;
use uwarp_rnic::qp::QpModify;
use uwarp_rnic::qp::QpState::{self, Init, Rtr, Rts};

use crate::cm::Cm;
use crate::error::CmError;
use crate::machine::pairings::Path;

/// The state that a program sees: the requested one while the stream is still to come, and RTR until it
/// requests RTS.
pub fn shown_state(actual: QpState, requested: QpState) -> QpState {
    match (actual, requested) {
        (Init | Rts, Rtr) => Rtr,
        (Init, Rts) => Rts,
        _ => actual,
    }
}

/// The state that a change starts from; `to` is the state that it leads to, `None` for a change of attributes
/// alone.
///
/// A change upward starts from the state that the program sees, even if the queue pair is in RTS already.
/// Attributes alone are changed in the actual state (for RTS, rdma_init_qp_attr(3) names no state over
/// iWARP).
pub fn start_state(actual: QpState, requested: QpState, to: Option<QpState>) -> QpState {
    match (actual, requested) {
        _ if !matches!(to, Some(Init | Rtr | Rts)) => actual,
        (Rts, Init) => Init,
        (Rts, Rtr) => Rtr,
        _ => shown_state(actual, requested),
    }
}

/// The program takes the event that reports the connection: a queue pair of rdma_cm is in RTS then
/// (rdma_connect(3)).
pub fn established(qp: &Qp) {
    // Refused only in a forked child, which has no connections.
    let _ = qp.modify(&QpModify { requested: Some(Rts), ..QpModify::default() });
}

/// Changes a queue pair as the program requests, starting from the [`start_state`] `from`. A queue pair that
/// is moved to RTR gets its stream: the connection of an id that waits for it, or a stream of its own to the
/// other end of the path, if the program names that. The RNIC decides about everything else. `cm` may be
/// missing if there is no path.
pub fn modify(
    cm: Option<&Cm>,
    qp: &Arc<Qp>,
    actual: QpState,
    from: QpState,
    mut change: QpModify,
    path: Option<Path>,
) -> Result<(), CmError> {
    let (destination, requested) = (change.dest_qp_num, change.state);
    prepare(cm, qp, actual, from, &mut change, path)?;
    let to = change.state;
    change.requested = requested;
    let pairs = match (cm, path, destination) {
        // A number without a port names no queue pair.
        (Some(cm), Some(path), Some(peer)) if actual == Init && to == Some(Rtr) && port_of(peer) != 0 => {
            Some((cm, path, peer))
        }
        _ => None,
    };
    change.awaits_stream = pairs.is_some();
    qp.modify(&change)?;
    if let (Some(cm), Some(QpState::Reset | QpState::Err)) = (cm, to) {
        // Not before: a stream that is being set up is waited for.
        cm.numbers().end(qp.qpn());
    }
    if let Some((cm, path, peer)) = pairs
        && let Err(error) = cm.numbers().begin(qp, path, peer)
    {
        tracing::warn!(qpn = qp.qpn(), "cannot connect the queue pair to its peer: {error}");
        qp.modify(&QpModify { state: Some(QpState::Err), ..QpModify::default() })?;
        return Err(error);
    }
    if let (Some(cm), None) = (cm, pairs) {
        cm.numbers().changed(qp);
    }
    Ok(())
}

/// The queue pair is destroyed: the connection manager makes no stream for it from now on, and turns away who
/// waits for it. (Not before: its peer comes back at once.)
pub fn forget(cm: &Cm, qpn: u32) {
    cm.numbers().forget(qpn);
}

/// Reduces a change of state that the connection manager takes part in to its attributes, and gives the queue
/// pair the connection that waits for it. Without a connection manager, or if no connection can come, the
/// change stays as it is.
fn prepare(
    cm: Option<&Cm>,
    qp: &Arc<Qp>,
    actual: QpState,
    from: QpState,
    change: &mut QpModify,
    path: Option<Path>,
) -> Result<(), CmError> {
    let Some(to @ (Init | Rtr | Rts)) = change.state else { return Ok(()) };
    let attributes = QpModify { state: None, cur_state: None, ..*change };
    match actual {
        Init if to != Init => {
            let Some(cm) = cm else { return Ok(()) };
            if let Some(adopter) = cm.adopter(qp.qpn(), change.dest_qp_num) {
                qp.modify(&attributes)?;
                adopter.adopt(qp)?;
            } else if from == Init && !cm.expects(change.dest_qp_num, path.map(|path| path.peer.ip())) {
                return Ok(());
            }
        }
        Init if from != Init => return Err(VerbsError::Invalid("no such state transition").into()),
        Rts if from != Rts => {}
        _ => return Ok(()),
    }
    *change = attributes;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_starts_from_the_state_that_the_program_sees() {
        assert_eq!(start_state(Init, Init, Some(Rts)), Init);
        assert_eq!(start_state(Init, Rtr, Some(Rts)), Rtr);
        assert_eq!(start_state(Rts, Rtr, Some(Rts)), Rtr);
        assert_eq!(start_state(Rts, Rtr, None), Rts);
        assert_eq!(start_state(Init, Rtr, None), Init);
        assert_eq!(start_state(Rts, Rtr, Some(QpState::Err)), Rts);
    }

    #[test]
    fn a_queue_pair_moved_only_to_rtr_does_not_report_rts_once_it_is_connected() {
        assert_eq!(shown_state(Rts, Init), Rts);
        assert_eq!((shown_state(Init, Rtr), shown_state(Rts, Rtr), shown_state(Rts, Rts)), (Rtr, Rtr, Rts));
        assert_eq!(shown_state(QpState::Err, Rts), QpState::Err);
    }
}
