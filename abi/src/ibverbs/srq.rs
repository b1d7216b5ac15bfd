//! Shared receive queues: create, modify, query, destroy, post.
//!
//! `IBV_EVENT_SRQ_ERR` is never raised: every error is an error of one receive, which fails on the queue pair
//! that took it.

use std::ffi::c_int;
use std::sync::Arc;

use uwarp_abi_types::verbs::*;
use uwarp_driver::Srq;
use uwarp_driver::quota::Place;
use uwarp_rnic::SrqInit;

use super::context::Context;
use super::event::{AsyncEvents, cookie};
use super::mr::CPd;
use super::post;
use crate::convention::Code;
use crate::failure::{Failure, required};
use crate::object::{self, Object, Use, Users, Visible, look, zeroed};
use crate::{deferred, entry, slot};

/// A shared receive queue.
#[repr(C)]
pub struct CSrq {
    c: Visible<ibv_srq>,
    /// The driver's.
    pub srq: Srq,
    /// Its asynchronous events.
    pub async_events: Arc<AsyncEvents>,
    /// Queue pairs on it.
    pub users: Users,
    _place: Place,
    _uses: [Use; 2],
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CSrq {
    type C = ibv_srq;
    const NAME: &'static str = "srq";
}

/// Creates a shared receive queue; `attr` then has its real size.
///
/// # Safety
/// `pd` is a live protection domain or NULL.
pub unsafe fn create(
    pd: *mut ibv_pd,
    srq_context: *mut std::ffi::c_void,
    attr: &mut ibv_srq_attr,
) -> Result<*mut ibv_srq, Failure> {
    // SAFETY: the caller's promise.
    let domain = unsafe { look::<CPd>(pd) }?;
    // SAFETY: a live domain's context is alive.
    let context = unsafe { look::<Context>((*pd).context) }?;
    let place = context.device.made.srqs.take(context.nic.limits().max_srq)?;
    let c = object::give_with(|address: *mut ibv_srq| {
        let async_events = AsyncEvents::new(context);
        // The limit is ignored here (ibv_create_srq(3)); programs leave it unset.
        let init = SrqInit {
            pd: domain.pd.clone(),
            max_wr: attr.max_wr,
            max_sge: attr.max_sge,
            cookie: cookie(address),
            async_sink: async_events.clone(),
        };
        let srq = Srq::create(&context.nic, init)?;
        // SAFETY: plain C data.
        let mut c: ibv_srq = unsafe { zeroed() };
        // SAFETY: alive.
        c.context = unsafe { (*pd).context };
        c.srq_context = srq_context;
        c.pd = pd;
        Ok(CSrq {
            c: Visible::new(c),
            srq,
            async_events,
            users: Users::default(),
            _place: place,
            _uses: [domain.users.hold(), context.users.hold()],
        })
    })?;
    // SAFETY: it was made just now.
    let now = unsafe { look::<CSrq>(c) }?.srq.query();
    (attr.max_wr, attr.max_sge) = (now.max_wr, now.max_sge);
    Ok(c)
}

/// ibv_create_srq(3): refused while queue pairs use it; waits until the program has acknowledged the events
/// it took.
///
/// # Safety
/// `srq` is alive or NULL, and not used any more if this succeeds.
pub unsafe fn destroy(srq: *mut ibv_srq) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let shared = look::<CSrq>(srq)?;
        shared.users.none()?;
        shared.async_events.close(cookie(srq));
        drop(object::take::<CSrq>(srq)?);
    }
    Ok(())
}

entry! {
    /// ibv_create_srq(3).
    fn ibv_create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq {
        let attr = &mut *required(attr, "srq_init_attr")?;
        create(pd, attr.srq_context, &mut attr.attr)
    }

    /// ibv_modify_srq(3).
    fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> Code {
        let shared = look::<CSrq>(srq)?;
        let attr = &*required(attr, "srq_attr")?;
        let mask = mask.cast_unsigned();
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(Failure::invalid("unknown bits in srq_attr_mask"));
        }
        let max_wr = (mask & IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr);
        let limit = (mask & IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit);
        Ok(shared.srq.modify(max_wr, limit)?)
    }

    /// ibv_query_srq(3).
    fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> Code {
        let now = look::<CSrq>(srq)?.srq.query();
        *required(attr, "srq_attr")? =
            ibv_srq_attr { max_wr: now.max_wr, max_sge: now.max_sge, srq_limit: now.limit };
        Ok(())
    }

    /// ibv_create_srq(3): refused while queue pairs use it; waits until the program has acknowledged the
    /// events it took.
    fn ibv_destroy_srq(srq: *mut ibv_srq) -> Code {
        destroy(srq)
    }
}

slot! {
    /// ibv_create_srq_ex(3). For a structure with only the members of a basic queue, the inline function in
    /// verbs.h calls [`ibv_create_srq`] itself.
    verb fn create_srq_ex(context: *mut ibv_context, attr: *mut ibv_srq_init_attr_ex) -> *mut ibv_srq {
        look::<Context>(context)?;
        let attr = &mut *required(attr, "srq_init_attr_ex")?;
        if attr.comp_mask & !(IBV_SRQ_INIT_ATTR_RESERVED - 1) != 0 {
            return Err(Failure::invalid("unknown members in comp_mask"));
        }
        if attr.comp_mask & IBV_SRQ_INIT_ATTR_TYPE != 0 && attr.srq_type != IBV_SRQT_BASIC {
            return Err(match attr.srq_type {
                IBV_SRQT_XRC | IBV_SRQT_TM => {
                    Failure::unsupported("shared receive queues other than basic ones")
                }
                _ => Failure::invalid("unknown type of shared receive queue"),
            });
        }
        if attr.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 {
            return Err(Failure::invalid("a protection domain is needed"));
        }
        // Members that belong to other types are ignored.
        create(attr.pd, attr.srq_context, &mut attr.attr)
    }

    /// ibv_post_srq_recv(3).
    hot fn post_srq_recv(srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> Code {
        post::post_receives(&look::<CSrq>(srq).inspect_err(|_| *bad_wr = wr)?.srq, wr, bad_wr)
    }
}

deferred! {
    deferred_post_srq_recv = post_srq_recv:
        (srq: *mut ibv_srq, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> c_int;
}
