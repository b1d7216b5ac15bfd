//! Asynchronous events: taken and acknowledged.

use std::ffi::c_int;

use uwarp_abi_types::verbs::*;
use uwarp_rnic::EventKind;

use super::context::Context;
use super::cq::CCq;
use super::event::{KIND_BITS, next, pointer};
use super::qp::CQp;
use super::srq::CSrq;
use crate::entry;
use crate::failure::required;
use crate::object::look;
use crate::wait::wait;

/// `UWARPDV_EVENT_PEER_ERROR`
pub(super) const PEER_ERROR: ibv_event_type = EventKind::PeerError as ibv_event_type;

/// The kind of object that an event is about: it selects the member of its union.
pub(super) enum Of {
    Cq,
    Qp,
    Srq,
    /// A port by its number, or the device.
    Port,
}

impl Of {
    pub(super) fn event(kind: ibv_event_type) -> Self {
        match kind {
            IBV_EVENT_CQ_ERR => Self::Cq,
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => Self::Srq,
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_PATH_MIG
            | IBV_EVENT_PATH_MIG_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED
            | PEER_ERROR => Self::Qp,
            _ => Self::Port,
        }
    }
}

/// ibv_get_async_event(3). A cancellation point.
///
/// # Safety
/// The pointers are what the C interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    wait(
        "ibv_get_async_event",
        // SAFETY: the caller's promise, here and below.
        || Ok(unsafe { look::<Context>(context) }?.events.clone()),
        |events, first| {
            let Some(cookie) = next(events, first) else { return Ok(None) };
            let kind = (cookie & ((1 << KIND_BITS) - 1)) as ibv_event_type;
            // SAFETY: the kind says which member of the union is meant; all of them are pointers except the
            // port's number.
            unsafe {
                (*event).event_type = kind;
                match Of::event(kind) {
                    Of::Port => (*event).element.port_num = (cookie >> KIND_BITS) as c_int,
                    _ => (*event).element.qp = pointer(cookie >> KIND_BITS),
                }
            }
            Ok(Some(()))
        },
    )
}

entry! {
    /// ibv_get_async_event(3).
    fn ibv_ack_async_event(event: *mut ibv_async_event) -> () {
        let event = &*required(event, "event")?;
        match Of::event(event.event_type) {
            Of::Cq => {
                let cq = event.element.cq;
                let queue = look::<CCq>(cq)?;
                (*cq).async_events_completed = (*cq).async_events_completed.wrapping_add(1);
                queue.async_events.acknowledged();
            }
            Of::Qp => {
                let qp = event.element.qp;
                let pair = look::<CQp>(qp)?;
                (*qp).events_completed = (*qp).events_completed.wrapping_add(1);
                pair.async_events.acknowledged();
            }
            Of::Srq => {
                let srq = event.element.srq;
                let shared = look::<CSrq>(srq)?;
                (*srq).events_completed = (*srq).events_completed.wrapping_add(1);
                shared.async_events.acknowledged();
            }
            Of::Port => {}
        }
        Ok(())
    }
}
