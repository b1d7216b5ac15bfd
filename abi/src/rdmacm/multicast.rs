//! Multicast groups of ids of datagrams.

use std::ffi::c_void;

use libc::sockaddr;
use uwarp_abi_types::rdmacm::*;

use super::address;
use super::id::{CId, Group};
use super::take::complete;
use crate::convention::MinusOne;
use crate::entry;
use crate::failure::{Failure, required};
use crate::ibverbs::context;
use crate::ibverbs::path::is_group;
use crate::ibverbs::qp::CQp;
use crate::object::look;

/// # Safety
/// The id is alive; `group` is a socket address.
unsafe fn join(
    id: *mut rdma_cm_id,
    group: *const sockaddr,
    receives: bool,
    context: *mut c_void,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let cid = look::<CId>(id)?;
        let group = address::load(group)?;
        if (*id).verbs.is_null() {
            return Err(Failure::invalid("the id is not bound to a device"));
        }
        if !is_group(group.ip(), &context::port((*id).verbs)?.recent_addresses()) {
            return Err(Failure::invalid("the address is not a multicast group"));
        }
        // Before the event, which another thread may take at once.
        cid.private.lock().groups.push(Group { address: group, receives });
        cid.id.join(group, context.expose_provenance()).inspect_err(|_| {
            cid.private.lock().groups.pop();
        })?;
        complete(cid)
    }
}

entry! {
    /// rdma_join_multicast(3).
    fn rdma_join_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr, context: *mut c_void) -> MinusOne {
        join(id, addr, true, context)
    }

    /// rdma_join_multicast_ex(3).
    fn rdma_join_multicast_ex(
        id: *mut rdma_cm_id,
        attr: *mut rdma_cm_join_mc_attr_ex,
        context: *mut c_void,
    ) -> MinusOne {
        let attr = &*required(attr, "mc_join_attr")?;
        let known = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
        if attr.comp_mask & RDMA_CM_JOIN_MC_ATTR_ADDRESS == 0 || attr.comp_mask & !known != 0 {
            return Err(Failure::invalid("unknown or missing members in comp_mask"));
        }
        let given = attr.comp_mask & RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS != 0;
        let receives = match if given { attr.join_flags } else { RDMA_MC_JOIN_FLAG_FULLMEMBER } {
            RDMA_MC_JOIN_FLAG_FULLMEMBER => true,
            RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER => false,
            _ => return Err(Failure::invalid("unknown join_flags")),
        };
        join(id, attr.addr, receives, context)
    }

    /// rdma_leave_multicast(3).
    fn rdma_leave_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr) -> MinusOne {
        let cid = look::<CId>(id)?;
        let group = address::load(addr)?;
        let mut private = cid.private.lock();
        let at = private.groups.iter().position(|joined| joined.address.ip() == group.ip());
        let at = at.ok_or_else(|| Failure::new(libc::EADDRNOTAVAIL, "not joined"))?;
        private.groups.remove(at);
        drop(private);
        if !(*id).qp.is_null() {
            // The program may have detached it itself.
            let _ = look::<CQp>((*id).qp)?.ud()?.detach(group.ip());
        }
        Ok(())
    }
}
