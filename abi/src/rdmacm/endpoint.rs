//! Endpoints: an id with all that it needs, in one call.

use std::ffi::c_int;
use std::ptr::{null_mut, slice_from_raw_parts};

use uwarp_abi_types::rdmacm::*;
use uwarp_abi_types::verbs::*;

use super::id::{self, CId};
use super::{channel, connection, event, qp, take};
use crate::convention::MinusOne;
use crate::entry;
use crate::failure::{Failure, required};
use crate::object::look;
use crate::wait::wait;

/// # Safety
/// As `rdma_create_ep` demands.
unsafe fn fill(
    c: *mut rdma_cm_id,
    res: &rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let cid = look::<CId>(c)?;
        if res.ai_flags & RAI_PASSIVE.cast_signed() != 0 {
            connection::bind(cid, res.ai_src_addr)?;
            if !pd.is_null() {
                (*c).pd = pd;
            }
            if let Some(attr) = attr.as_ref() {
                let mut attr = *attr;
                attr.qp_type = res.ai_qp_type.cast_unsigned();
                cid.private.lock().qp_init_attr = Some(attr);
            }
            return Ok(());
        }
        connection::resolve_address(cid, res.ai_src_addr, res.ai_dst_addr)?;
        connection::resolve_route(cid)?;
        if let Some(attr) = attr.as_mut() {
            attr.qp_type = res.ai_qp_type.cast_unsigned();
            qp::create_plain(c, pd, attr)?;
        }
        if !res.ai_connect.is_null() && res.ai_connect_len > 0 {
            let data = &*slice_from_raw_parts(res.ai_connect.cast::<u8>(), res.ai_connect_len);
            cid.private.lock().connect_data = data.to_vec();
        }
        Ok(())
    }
}

/// # Safety
/// As `rdma_destroy_ep` demands.
unsafe fn destroy(c: *mut rdma_cm_id) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        look::<CId>(c)?;
        if !(*c).qp.is_null() {
            qp::destroy(c)?;
        }
        if !(*c).srq.is_null() {
            qp::destroy_srq(c);
        }
        id::destroy(c)
    }
}

entry! {
    /// rdma_create_ep(3). The id's calls block until it is moved to a channel.
    fn rdma_create_ep(
        id: *mut *mut rdma_cm_id,
        res: *mut rdma_addrinfo,
        pd: *mut ibv_pd,
        qp_init_attr: *mut ibv_qp_init_attr,
    ) -> MinusOne {
        required(id, "id")?;
        let res = &*required(res, "res")?;
        let c = id::create(null_mut(), null_mut(), res.ai_port_space.cast_unsigned())?;
        match fill(c, res, pd, qp_init_attr) {
            Ok(()) => {
                *id = c;
                Ok(())
            }
            Err(failure) => {
                let _ = destroy(c);
                Err(failure)
            }
        }
    }

    /// rdma_destroy_ep(3).
    fn rdma_destroy_ep(id: *mut rdma_cm_id) -> () {
        destroy(id)
    }
}

/// rdma_get_request(3). The new id has a queue pair if the listening endpoint was made with attributes for
/// one. A cancellation point.
///
/// # Safety
/// The pointers are what the C interface says.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rdma_get_request(listen: *mut rdma_cm_id, id: *mut *mut rdma_cm_id) -> c_int {
    wait(
        "rdma_get_request",
        || {
            // SAFETY: the caller's promise, here and below.
            let listener = unsafe { look::<CId>(listen) }?;
            required(id, "id")?;
            if !listener.is_sync() {
                return Err(Failure::invalid(
                    "the id reports to a channel: take its events from the channel",
                ));
            }
            // SAFETY: as above.
            unsafe {
                listener.acknowledge_kept();
                channel::queue((*listen).channel)
            }
        },
        |queue, first| {
            // SAFETY: as above.
            let Some(event) = (unsafe { take::take_next(queue, first) })? else { return Ok(None) };
            // SAFETY: as above.
            unsafe { request(listen, id, event) }.map(Some)
        },
    )
}

/// Converts an event to the result of `rdma_get_request`.
///
/// # Safety
/// As `rdma_get_request` demands; `event` was just taken from the listener's channel.
unsafe fn request(
    listen: *mut rdma_cm_id,
    id: *mut *mut rdma_cm_id,
    event: *mut rdma_cm_event,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let listener = look::<CId>(listen)?;
        let outcome = match ((*event).event, (*event).status) {
            (RDMA_CM_EVENT_REJECTED, _) => Err(Failure::new(libc::ECONNREFUSED, "rejected")),
            (_, status) if status != 0 => Err(Failure::new(status.abs(), "the event's status")),
            (RDMA_CM_EVENT_CONNECT_REQUEST, _) => Ok((*event).id),
            _ => Err(Failure::invalid("the event is not a connection request")),
        };
        let outcome = outcome.and_then(|new| {
            let attr = listener.private.lock().qp_init_attr;
            match attr {
                // The listener's protection domain, if the program gave one.
                Some(mut attr) => qp::create_plain(new, (*listen).pd, &mut attr).map(|()| new),
                None => Ok(new),
            }
        });
        match outcome {
            Ok(new) => {
                (*new).event = event;
                *id = new;
                Ok(())
            }
            Err(failure) => {
                if !listener.keep(event) {
                    event::acknowledge(event);
                }
                Err(failure)
            }
        }
    }
}
