//! Queue pairs of an id, with the completion queues, channels and shared receive queues that come with them.

use std::ffi::c_int;
use std::ptr::null_mut;

use uwarp_abi_types::rdmacm::*;
use uwarp_abi_types::verbs::*;
use uwarp_cm::QKEY;
use uwarp_driver::QueuePair;
use uwarp_rnic::Access;
use uwarp_rnic::qp::{QpModify, QpState};

use super::id::CId;
use crate::convention::MinusOne;
use crate::entry;
use crate::failure::{Failure, required};
use crate::ibverbs::context::{self, Context};
use crate::ibverbs::qp::CQp;
use crate::ibverbs::{self, cq, create_qp, event, path, query, srq, view};
use crate::object::look;

/// Rights that a connection grants its peer, as Linux' connection manager sets them; a region's own rights
/// decide.
const ACCESS: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

/// Creates what a queue pair needs if the program has not given it: a channel and a completion queue for each
/// direction that has work requests.
///
/// # Safety
/// The id is alive and used by no other thread.
unsafe fn create_cqs(c: *mut rdma_cm_id, send: u32, recv: u32) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    let made = unsafe {
        (|| {
            if recv > 0 {
                let (channel, cq) = create_cq(c, recv, &raw mut (*c).recv_cq_channel)?;
                ((*c).recv_cq_channel, (*c).recv_cq) = (channel, cq);
            }
            if send > 0 {
                let (channel, cq) = create_cq(c, send, &raw mut (*c).send_cq_channel)?;
                ((*c).send_cq_channel, (*c).send_cq) = (channel, cq);
            }
            Ok(())
        })()
    };
    if made.is_err() {
        // SAFETY: the caller's promise.
        unsafe { destroy_cqs(c) };
    }
    made
}

/// # Safety
/// As [`create_cqs`]; the channel is left in `place` even when the queue fails.
unsafe fn create_cq(
    c: *mut rdma_cm_id,
    depth: u32,
    place: *mut *mut ibv_comp_channel,
) -> Result<(*mut ibv_comp_channel, *mut ibv_cq), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let channel = event::create_comp_channel((*c).verbs)?;
        *place = channel;
        Ok((channel, cq::create((*c).verbs, depth, c.cast(), channel, 0)?))
    }
}

/// # Safety
/// As [`create_cqs`].
unsafe fn destroy_cqs(c: *mut rdma_cm_id) {
    // SAFETY: the caller's promise. An object that the program still uses cannot be destroyed; it is the
    // program's from now on.
    unsafe {
        let cqs = [&raw mut (*c).recv_cq, &raw mut (*c).send_cq];
        if *cqs[0] == *cqs[1] {
            *cqs[1] = null_mut();
        }
        for cq in cqs {
            if !(*cq).is_null() {
                let _ = cq::destroy(*cq);
                *cq = null_mut();
            }
        }
        let channels = [&raw mut (*c).recv_cq_channel, &raw mut (*c).send_cq_channel];
        if *channels[0] == *channels[1] {
            *channels[1] = null_mut();
        }
        for channel in channels {
            if !(*channel).is_null() {
                let _ = event::destroy_comp_channel(*channel);
                *channel = null_mut();
            }
        }
    }
}

/// Makes the queue pair of an id and moves it to INIT.
///
/// # Safety
/// The id is alive and used by no other thread; `attr` is valid.
pub unsafe fn create(c: *mut rdma_cm_id, attr: &mut ibv_qp_init_attr_ex) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        if !(*c).qp.is_null() {
            return Err(Failure::invalid("the id has a queue pair already"));
        }
        look::<Context>((*c).verbs).map_err(|_| Failure::invalid("the id is not bound to a device"))?;
        if attr.comp_mask & IBV_QP_INIT_ATTR_PD == 0 || attr.pd.is_null() {
            attr.comp_mask |= IBV_QP_INIT_ATTR_PD;
            attr.pd = (*c).pd;
        } else if (*attr.pd).context != (*c).verbs {
            return Err(Failure::invalid("the protection domain is of another context"));
        }
        if attr.qp_type != (*c).qp_type {
            return Err(Failure::invalid("the id's port space has queue pairs of another type"));
        }
        if attr.qp_type == IBV_QPT_UC {
            // TODO(docs/limits.md): the handshake of rdma_cm has a stream, and an unreliable connection has
            // none: what the two ends would exchange there is number, PSN and address.
            return Err(Failure::unsupported("UC queue pairs by rdma_cm"));
        }
        let differs =
            |ours: *mut ibv_cq, given: *mut ibv_cq| !ours.is_null() && !given.is_null() && ours != given;
        if differs((*c).recv_cq, attr.recv_cq) || differs((*c).send_cq, attr.send_cq) {
            return Err(Failure::invalid("the id has other completion queues"));
        }
        let needed = |ours: *mut ibv_cq, given: *mut ibv_cq, depth: u32| {
            if ours.is_null() && given.is_null() { depth } else { 0 }
        };
        create_cqs(
            c,
            needed((*c).send_cq, attr.send_cq, attr.cap.max_send_wr),
            needed((*c).recv_cq, attr.recv_cq, attr.cap.max_recv_wr),
        )?;
        if attr.send_cq.is_null() {
            attr.send_cq = (*c).send_cq;
        }
        if attr.recv_cq.is_null() {
            attr.recv_cq = (*c).recv_cq;
        }
        if attr.srq.is_null() {
            attr.srq = (*c).srq;
        }
        let qp = create_qp::create(attr).inspect_err(|_| destroy_cqs(c))?;
        let to_init = QpModify {
            state: Some(QpState::Init),
            access: Some(ACCESS),
            port_num: Some(1),
            pkey_index: Some(0),
            ..QpModify::default()
        };
        match &look::<CQp>(qp)?.qp {
            QueuePair::Rc(rc) => {
                rc.modify(&to_init)?;
                (*qp).state = IBV_QPS_INIT;
            }
            // No type that rdma_create_qp takes makes one.
            QueuePair::Rd(_) | QueuePair::Uc(_) => {
                return Err(Failure::unsupported("queue pairs of this type have no id"));
            }
            // It has no stream to wait for (librdmacm's ucma_init_ud_qp).
            QueuePair::Ud(ud) => {
                for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
                    ud.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() })?;
                }
                (*qp).state = IBV_QPS_RTS;
            }
        }
        (*c).pd = (*qp).pd;
        (*c).qp = qp;
        Ok(())
    }
}

/// As [`create`], from the plain structure.
///
/// # Safety
/// As [`create`].
pub unsafe fn create_plain(
    c: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: &mut ibv_qp_init_attr,
) -> Result<(), Failure> {
    // SAFETY: plain C data, and the caller's promise.
    unsafe {
        let mut ex = create_qp::extended(if pd.is_null() { (*c).pd } else { pd }, attr);
        let made = create(c, &mut ex);
        attr.send_cq = ex.send_cq;
        attr.recv_cq = ex.recv_cq;
        attr.srq = ex.srq;
        attr.cap = ex.cap;
        made
    }
}

/// Destroys the queue pair of an id and what was made with it.
///
/// # Safety
/// The id is alive and used by no other thread.
pub unsafe fn destroy(c: *mut rdma_cm_id) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let cid = look::<CId>(c)?;
        if !(*c).qp.is_null() {
            if let Ok(ud) = look::<CQp>((*c).qp).and_then(CQp::ud) {
                // rdma_destroy_qp(3) cannot fail. librdmacm leaves a member of a group behind, for ever.
                ud.leave_all();
            }
            let _ = ibverbs::qp::destroy((*c).qp);
            (*c).qp = null_mut();
            cid.id.queue_pair_destroyed();
        }
        destroy_cqs(c);
    }
    Ok(())
}

/// Destroys the shared receive queue of an id.
///
/// # Safety
/// The id is alive and used by no other thread.
pub unsafe fn destroy_srq(c: *mut rdma_cm_id) {
    // SAFETY: the caller's promise.
    unsafe {
        if !(*c).srq.is_null() {
            let _ = srq::destroy((*c).srq);
            (*c).srq = null_mut();
        }
        destroy_cqs(c);
    }
}

/// # Safety
/// The id is alive and used by no other thread.
unsafe fn create_srq(
    c: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: &mut ibv_srq_init_attr,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let pd = if pd.is_null() { (*c).pd } else { pd };
        let srq = srq::create(pd, attr.srq_context, &mut attr.attr)?;
        if (*c).pd.is_null() {
            (*c).pd = pd;
        }
        (*c).srq = srq;
    }
    Ok(())
}

/// The attributes that an InfiniBand connection manager would set for the connection of a queue pair that
/// goes to `attr.qp_state`.
///
/// # Safety
/// The id is alive and used by no other thread.
unsafe fn infiniband_attributes(cid: &CId, attr: &mut ibv_qp_attr) -> Result<u32, Failure> {
    let peer = cid.id.peer_param();
    attr.port_num = 1;
    if cid.id.is_datagram() {
        (attr.pkey_index, attr.qkey, attr.sq_psn) = (0, QKEY, 0);
        return Ok(match attr.qp_state {
            IBV_QPS_INIT => IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY,
            IBV_QPS_RTR => IBV_QP_STATE,
            IBV_QPS_RTS => IBV_QP_STATE | IBV_QP_SQ_PSN,
            _ => return Err(Failure::invalid("attributes are offered for INIT, RTR and RTS")),
        });
    }
    Ok(match attr.qp_state {
        IBV_QPS_INIT => {
            attr.qp_access_flags = ACCESS.bits();
            attr.pkey_index = 0;
            IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX | IBV_QP_PORT
        }
        IBV_QPS_RTR => {
            // SAFETY: the id is alive, and one with a device has its context.
            let (port, ends) =
                unsafe { (context::port((*cid.c()).verbs)?, (*cid.c()).route.addr.addr.ibaddr) };
            attr.ah_attr = path::of_connection(&ends.sgid, &ends.dgid, &port.recent_addresses())?;
            attr.path_mtu = query::active_mtu(port);
            attr.dest_qp_num = peer.qp_num;
            attr.rq_psn = 0;
            attr.max_dest_rd_atomic = peer.initiator_depth;
            attr.min_rnr_timer = 0;
            IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER
        }
        IBV_QPS_RTS => {
            attr.timeout = cid.id.ack_timeout();
            attr.retry_cnt = cid.id.retries();
            attr.rnr_retry = peer.rnr_retry_count.min(7);
            attr.sq_psn = 0;
            attr.max_rd_atomic = peer.responder_resources;
            IBV_QP_STATE
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC
        }
        _ => return Err(Failure::invalid("attributes are offered for INIT, RTR and RTS")),
    })
}

entry! {
    /// rdma_create_qp(3).
    fn rdma_create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> MinusOne {
        look::<CId>(id)?;
        create_plain(id, pd, &mut *required(attr, "qp_init_attr")?)
    }

    /// rdma_create_qp(3), extended.
    fn rdma_create_qp_ex(id: *mut rdma_cm_id, attr: *mut ibv_qp_init_attr_ex) -> MinusOne {
        look::<CId>(id)?;
        create(id, &mut *required(attr, "qp_init_attr")?)
    }

    /// rdma_destroy_qp(3).
    fn rdma_destroy_qp(id: *mut rdma_cm_id) -> () {
        destroy(id)
    }

    /// rdma_create_srq(3).
    fn rdma_create_srq(id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> MinusOne {
        look::<CId>(id)?;
        create_srq(id, pd, &mut *required(attr, "attr")?)
    }

    /// rdma_create_srq(3), extended. Basic queues only.
    fn rdma_create_srq_ex(id: *mut rdma_cm_id, attr: *mut ibv_srq_init_attr_ex) -> MinusOne {
        look::<CId>(id)?;
        let attr = &mut *required(attr, "attr")?;
        if attr.comp_mask & IBV_SRQ_INIT_ATTR_TYPE == 0 {
            return Err(Failure::invalid("unknown type of shared receive queue"));
        }
        if attr.srq_type != IBV_SRQT_BASIC {
            return Err(Failure::unsupported("shared receive queues other than basic ones"));
        }
        let pd = if attr.comp_mask & IBV_SRQ_INIT_ATTR_PD == 0 { null_mut() } else { attr.pd };
        let mut plain = ibv_srq_init_attr { srq_context: attr.srq_context, attr: attr.attr };
        create_srq(id, pd, &mut plain)?;
        attr.attr = plain.attr;
        attr.pd = if pd.is_null() { (*id).pd } else { pd };
        attr.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
        Ok(())
    }

    /// rdma_create_srq(3).
    fn rdma_destroy_srq(id: *mut rdma_cm_id) -> () {
        look::<CId>(id)?;
        destroy_srq(id);
        Ok(())
    }

    /// rdma_init_qp_attr(3): as on an iWARP device, rights and port; the connection brings the rest.
    fn rdma_init_qp_attr(
        id: *mut rdma_cm_id,
        qp_attr: *mut ibv_qp_attr,
        qp_attr_mask: *mut c_int,
    ) -> MinusOne {
        let cid = look::<CId>(id)?;
        let attr = required(qp_attr, "qp_attr")?;
        let mask = required(qp_attr_mask, "qp_attr_mask")?;
        if (*id).verbs.is_null() {
            return Err(Failure::invalid("the id is not bound to a device"));
        }
        if view::shown().ib_transitions || cid.id.is_datagram() {
            *mask = infiniband_attributes(cid, &mut *attr)?.cast_signed();
            return Ok(());
        }
        let set = match (*attr).qp_state {
            IBV_QPS_INIT | IBV_QPS_RTR => {
                (*attr).qp_access_flags = ACCESS.bits();
                IBV_QP_STATE | IBV_QP_ACCESS_FLAGS
            }
            IBV_QPS_RTS => 0,
            _ => return Err(Failure::invalid("attributes are offered for INIT, RTR and RTS")),
        };
        (*attr).port_num = 1;
        *mask = (set | IBV_QP_PORT).cast_signed();
        Ok(())
    }
}
