//! Queue pairs that a program moves to RTR and RTS itself while rdma_cm makes their connection (`rping -q`, UCX).
//!
//! Such a program believes what it has asked for; the RNIC's queue pair is in INIT until it has its stream, and in RTS from
//! then on. Both orders occur: the active end moves the queue pair after `CONNECT_RESPONSE`, when the connection is there and
//! RTR takes it; the passive end before it accepts (then the accepted connection comes to the queue pair) or after.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use uwarp_abi_types::verbs::*;
use uwarp_driver::Qp;
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::QpModify;
use uwarp_rnic::qp::QpState::{self, Init, Rtr, Rts};

use crate::entry::Failure;
use crate::rdmacm::device::cm_if_any;

/// The queue pairs of the process: connections name them by number, whichever context they are of.
static NUMBERS: Mutex<Option<HashMap<u32, Weak<Qp>>>> = Mutex::new(None);

/// A queue pair was made.
pub fn enter(qp: &Arc<Qp>) {
    NUMBERS.lock().get_or_insert_default().insert(qp.qpn(), Arc::downgrade(qp));
}

/// A queue pair is no more.
pub fn leave(qpn: u32) {
    if let Some(numbers) = NUMBERS.lock().as_mut() {
        numbers.remove(&qpn);
    }
}

/// The queue pair with this number.
pub fn by_number(qpn: u32) -> Option<Arc<Qp>> {
    NUMBERS.lock().as_ref()?.get(&qpn)?.upgrade()
}

/// The state that the program is to be told: what it has asked for, while the stream is to come, and RTR until it asks for RTS.
pub fn told(actual: QpState, believed: ibv_qp_state) -> QpState {
    match (actual, believed) {
        (Init | Rts, IBV_QPS_RTR) => Rtr,
        (Init, IBV_QPS_RTS) => Rts,
        _ => actual,
    }
}

/// The state that a change starts from. Upward it is what the program believes, also of a queue pair that is in RTS already.
/// Attributes alone are changed where the queue pair really is (for RTS rdma_init_qp_attr(3) names no state over iWARP).
pub fn from(actual: QpState, believed: ibv_qp_state, attr: &ibv_qp_attr, mask: u32) -> QpState {
    let moves_up =
        mask & IBV_QP_STATE != 0 && matches!(attr.qp_state, IBV_QPS_INIT | IBV_QPS_RTR | IBV_QPS_RTS);
    match (actual, believed) {
        _ if !moves_up => actual,
        (Rts, IBV_QPS_INIT) => Init,
        (Rts, IBV_QPS_RTR) => Rtr,
        _ => told(actual, believed),
    }
}

/// Makes a change of state that rdma_cm has a part in into one of attributes alone, and lets the queue pair have the connection
/// that waits for it. `from` is of [`from`].
pub fn prepare(qp: &Arc<Qp>, actual: QpState, from: QpState, change: &mut QpModify) -> Result<(), Failure> {
    let Some(to @ (Init | Rtr | Rts)) = change.state else { return Ok(()) };
    let attributes = QpModify { state: None, cur_state: None, ..*change };
    match actual {
        Init if to != Init => {
            let Some(cm) = cm_if_any() else { return Ok(()) };
            if let Some(id) = cm.adopter(qp.qpn(), change.dest_qp_num) {
                qp.modify(&attributes)?;
                id.adopt(qp)?;
            } else if from == Init && !cm.expects(change.dest_qp_num) {
                // The RNIC refuses, as there is nothing to come.
                return Ok(());
            }
        }
        Init if from != Init => {
            return Err(VerbsError::Invalid("no such state transition").into());
        }
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
    fn a_program_starts_from_where_it_believes_to_be() {
        // SAFETY: plain C data.
        let mut attr: ibv_qp_attr = unsafe { crate::object::zeroed() };
        attr.qp_state = IBV_QPS_RTS;
        assert_eq!(from(Init, IBV_QPS_INIT, &attr, IBV_QP_STATE), Init);
        assert_eq!(from(Init, IBV_QPS_RTR, &attr, IBV_QP_STATE), Rtr);
        assert_eq!(from(Rts, IBV_QPS_RTR, &attr, IBV_QP_STATE), Rtr);
        assert_eq!(from(Rts, IBV_QPS_RTR, &attr, IBV_QP_MIN_RNR_TIMER), Rts);
        assert_eq!(from(Init, IBV_QPS_RTR, &attr, IBV_QP_PORT), Init);
        attr.qp_state = IBV_QPS_ERR;
        assert_eq!(from(Rts, IBV_QPS_RTR, &attr, IBV_QP_STATE), Rts);
        assert_eq!(told(Rts, IBV_QPS_INIT), Rts);
        // A queue pair moved only to RTR reported RTS once it was connected by number.
        assert_eq!(
            (told(Init, IBV_QPS_RTR), told(Rts, IBV_QPS_RTR), told(Rts, IBV_QPS_RTS)),
            (Rtr, Rtr, Rts)
        );
        assert_eq!(told(QpState::Err, IBV_QPS_RTS), QpState::Err);
    }
}
