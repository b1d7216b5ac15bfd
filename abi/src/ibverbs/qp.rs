//! Queue pairs: modify, query, destroy.

use std::ffi::c_int;
use std::net::IpAddr;
use std::sync::Arc;

use uwarp_abi_types::verbs::*;
use uwarp_cm::{Cm, bringup};
use uwarp_driver::quota::Place;
use uwarp_driver::{Qp, QueuePair, UdQp};
use uwarp_process::Mutex;
use uwarp_rnic::ah::Endpoint;
use uwarp_rnic::qp::{QpCaps, QpModify, QpState};
use uwarp_rsocket::OwnWork;

use super::batch::Batch;
use super::context::Context;
use super::event::{AsyncEvents, cookie};
use super::{ah, modify, path, view};
use crate::convention::Code;
use crate::entry;
use crate::failure::{Failure, required};
use crate::object::{self, Object, Use, Visible, look, zeroed};

/// A queue pair. It always has room for the extended form, which begins with the plain one.
#[repr(C)]
pub struct CQp {
    pub(super) c: Visible<ibv_qp_ex>,
    /// The driver's.
    pub qp: QueuePair,
    /// Its asynchronous events.
    pub async_events: Arc<AsyncEvents>,
    /// Attributes that a program sets and reads back, without an effect here.
    pub(super) stored: Mutex<Stored, 29>,
    /// The batch being built through the `ibv_wr_*` functions, if the queue pair was made for them.
    pub batch: Option<Batch>,
    /// Of a socket's queue pair: what the program may post to it.
    pub(super) own_work: Option<Arc<OwnWork>>,
    /// None: the library made it, for a socket.
    pub(super) _place: Option<Place>,
    pub(super) _uses: [Use; 4],
    pub(super) _srq: Option<Use>,
}

// SAFETY: repr(C), the C structure first; `ibv_qp` is the first member of `ibv_qp_ex`.
unsafe impl Object for CQp {
    type C = ibv_qp;
    const NAME: &'static str = "qp";
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(ibv_qp_ex, qp_base) == 0);
};

/// See [`CQp::stored`].
#[derive(Clone, Copy)]
pub(super) struct Stored {
    path_mtu: ibv_mtu,
    ah_attr: ibv_ah_attr,
    alt_ah_attr: ibv_ah_attr,
    path_mig_state: ibv_mig_state,
    alt_pkey_index: u16,
    alt_port_num: u8,
    alt_timeout: u8,
}

/// In C's form.
pub(super) fn cap_of(caps: &QpCaps) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: caps.max_send_wr,
        max_recv_wr: caps.max_recv_wr,
        max_send_sge: caps.max_send_sge,
        max_recv_sge: caps.max_recv_sge,
        max_inline_data: caps.max_inline_data,
    }
}

/// The change to the first state of a queue pair in this view.
pub(super) fn first_state() -> QpModify {
    QpModify { state: Some(view::shown().first_state), ..QpModify::default() }
}

/// ibv_destroy_qp(3): waits until the program has acknowledged the events it took. EBUSY while it is a member
/// of a multicast group, as the kernel's ib_uverbs has it.
///
/// # Safety
/// `qp` is alive or NULL, and not used any more if this succeeds.
pub unsafe fn destroy(qp: *mut ibv_qp) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let pair = look::<CQp>(qp)?;
        if matches!(&pair.qp, QueuePair::Ud(ud) if ud.is_member()) {
            return Err(Failure::new(libc::EBUSY, "the queue pair is a member of a multicast group"));
        }
        pair.qp.destroy();
        if let Some(cm) = Cm::if_any() {
            bringup::forget(&cm, pair.qp.qpn());
        }
        pair.async_events.close(cookie(qp));
        drop(object::take::<CQp>(qp)?);
    }
    Ok(())
}

entry! {
    /// ibv_create_qp_ex(3): the `ibv_qp_ex` of a queue pair made with `send_ops_flags`, else NULL.
    fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
        let pair = look::<CQp>(qp)?;
        Ok(if pair.batch.is_some() { qp.cast() } else { std::ptr::null_mut() })
    }

    /// ibv_modify_qp(3).
    fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int) -> Code {
        let pair = look::<CQp>(qp)?;
        let attr = &*required(attr, "attr")?;
        let context = look::<Context>((*qp).context)?;
        let mask = attr_mask.cast_unsigned();
        let now = pair.qp.query();
        let actual = now.state;
        let rc = match &pair.qp {
            QueuePair::Rc(rc) => rc,
            QueuePair::Ud(ud) => {
                let change = modify::convert_ud(attr, mask, actual)?;
                ud.modify(&change)?;
                pair.store(attr, mask);
                if mask & IBV_QP_STATE != 0 {
                    (*qp).state = attr.qp_state;
                }
                return Ok(());
            }
            QueuePair::Rd(rd) => {
                let change = modify::convert_rd(attr, mask, actual)?;
                rd.modify(&change)?;
                if mask & IBV_QP_STATE != 0 {
                    (*qp).state = attr.qp_state;
                }
                return Ok(());
            }
            QueuePair::Uc(uc) => {
                let change = modify::convert_uc(attr, mask, actual, context.nic.limits())?;
                uc.modify(&change, pair.uc_peer(context, attr, mask)?)?;
                pair.store(attr, mask);
                if mask & IBV_QP_STATE != 0 {
                    (*qp).state = attr.qp_state;
                }
                return Ok(());
            }
        };
        let to = if mask & IBV_QP_STATE == 0 { None } else { Some(modify::state(attr.qp_state)?) };
        let from = bringup::start_state(actual, now.requested, to);
        let change = modify::convert(attr, mask, from, context.nic.limits())?;
        let leads = to == Some(QpState::Rtr) && mask & IBV_QP_AV != 0;
        let path = leads.then(|| path::of(&attr.ah_attr, context.device.port()));
        let cm = if leads { Some(Cm::of_process()?) } else { Cm::if_any() };
        if leads && attr.ah_attr.is_global != 0 {
            // The hop limit is the route's, as with the kernel.
            rc.set_traffic_class(attr.ah_attr.grh.traffic_class);
        }
        let known = path.as_ref().and_then(|path| path.as_ref().ok()).copied();
        bringup::modify(cm.as_deref(), rc, actual, from, change, known).map_err(|error| match path {
            // Also not a queue pair of rdma_cm, which finds the peer in another way.
            Some(Err(wrong)) => {
                path::explain(&wrong);
                wrong
            }
            _ => error.into(),
        })?;
        if to == Some(QpState::Reset) {
            rc.modify(&first_state())?;
        }
        if leads && !view::shown().ib_transitions && rc.query().state == QpState::Rtr {
            // iWARP has no RTR: a queue pair that has its stream can send. Perftest's server relies on it,
            // which never requests RTS and posts credits. Refused only if something has ended the queue pair
            // meanwhile.
            let change = QpModify { state: Some(QpState::Rts), requested: to, ..QpModify::default() };
            let _ = rc.modify(&change);
        }
        pair.store(attr, mask);
        if let Some(state) = to {
            (*qp).state = state as ibv_qp_state;
        }
        Ok(())
    }

    /// ibv_query_qp(3).
    fn ibv_query_qp(
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        _attr_mask: c_int,
        init_attr: *mut ibv_qp_init_attr,
    ) -> Code {
        let pair = look::<CQp>(qp)?;
        let attr = required(attr, "attr")?;
        let init = required(init_attr, "init_attr")?;
        let now = pair.qp.query();
        let kept = *pair.stored.lock();
        let state = match &pair.qp {
            QueuePair::Rc(_) => bringup::shown_state(now.state, now.requested) as ibv_qp_state,
            QueuePair::Ud(_) | QueuePair::Rd(_) | QueuePair::Uc(_) => now.state as ibv_qp_state,
        };
        let mut out: ibv_qp_attr = zeroed();
        out.qp_state = state;
        out.cur_qp_state = state;
        out.path_mtu = kept.path_mtu;
        out.path_mig_state = kept.path_mig_state;
        out.qkey = now.qkey;
        out.rq_psn = now.rq_psn;
        out.sq_psn = now.sq_psn;
        out.dest_qp_num = now.dest_qp_num;
        out.qp_access_flags = now.access.bits();
        out.cap = cap_of(&now.caps);
        out.ah_attr = kept.ah_attr;
        out.alt_ah_attr = kept.alt_ah_attr;
        out.pkey_index = now.pkey_index;
        out.alt_pkey_index = kept.alt_pkey_index;
        out.sq_draining = now.sq_draining.into();
        out.max_rd_atomic = u8::try_from(now.max_rd_atomic).unwrap_or(u8::MAX);
        out.max_dest_rd_atomic = u8::try_from(now.max_dest_rd_atomic).unwrap_or(u8::MAX);
        out.min_rnr_timer = now.min_rnr_timer;
        out.port_num = now.port_num;
        out.timeout = now.timeout;
        out.retry_cnt = now.retry_cnt;
        out.rnr_retry = now.rnr_retry;
        out.alt_port_num = kept.alt_port_num;
        out.alt_timeout = kept.alt_timeout;
        *attr = out;
        let mut out: ibv_qp_init_attr = zeroed();
        out.qp_context = (*qp).qp_context;
        out.send_cq = (*qp).send_cq;
        out.recv_cq = (*qp).recv_cq;
        out.srq = (*qp).srq;
        out.cap = cap_of(&now.caps);
        out.qp_type = (*qp).qp_type;
        out.sq_sig_all = now.sq_sig_all.into();
        *init = out;
        // A program that moves the queue pair itself has not requested RTS yet.
        if state != IBV_QPS_RTS || !matches!(pair.qp, QueuePair::Rc(_)) {
            (*qp).state = state;
        }
        Ok(())
    }

    /// ibv_destroy_qp(3): waits until the program has acknowledged the events it took.
    fn ibv_destroy_qp(qp: *mut ibv_qp) -> Code {
        look::<CQp>(qp)?;
        if (*qp).send_cq.is_null() {
            return Err(Failure::new(libc::EBUSY, "the queue pair is a socket's; uwarp_close destroys it"));
        }
        destroy(qp)
    }

    /// ibv_attach_mcast(3). The group is joined on the interface of GID 0, the address for all hosts of a
    /// network on that of the network; the LID is ignored.
    fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> Code {
        let pair = look::<CQp>(qp)?;
        let own = look::<Context>((*qp).context)?.device.port().addresses();
        let group = address(gid)?;
        if !path::is_group(group, &own) {
            return Err(Failure::invalid("the GID is not a multicast group"));
        }
        let network = own.iter().find(|own| own.broadcast.is_some_and(|all| group == all));
        let first = network.or_else(|| own.iter().find(|own| !own.is_none()));
        pair.ud()?.attach(group, first.map_or(0, |first| first.index))?;
        Ok(())
    }

    /// ibv_attach_mcast(3).
    fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> Code {
        look::<CQp>(qp)?.ud()?.detach(address(gid)?)?;
        Ok(())
    }

    /// ibv_query_qp_data_in_order(3): TCP is in order, but the kernel's copy and ours do not promise it to a
    /// thread that polls memory.
    fn ibv_query_qp_data_in_order(qp: *mut ibv_qp, _op: ibv_wr_opcode, _flags: u32) -> i32 {
        look::<CQp>(qp)?;
        Ok(0)
    }

    /// ibv_set_ece(3).
    fn ibv_set_ece(qp: *mut ibv_qp, _ece: *mut ibv_ece) -> Code {
        look::<CQp>(qp)?;
        Err(Failure::unsupported("enhanced connection establishment"))
    }

    /// ibv_query_ece(3).
    fn ibv_query_ece(qp: *mut ibv_qp, _ece: *mut ibv_ece) -> Code {
        look::<CQp>(qp)?;
        Err(Failure::unsupported("enhanced connection establishment"))
    }
}

/// The address that a GID names.
///
/// # Safety
/// `gid` is valid or NULL.
unsafe fn address(gid: *const ibv_gid) -> Result<IpAddr, Failure> {
    // SAFETY: the caller's promise.
    let gid = unsafe { &*required(gid.cast_mut(), "gid")? };
    path::ip_of(gid).ok_or_else(|| Failure::invalid("the GID names no address"))
}

impl CQp {
    /// The queue pair, if it is one of datagrams.
    pub fn ud(&self) -> Result<&Arc<UdQp>, Failure> {
        match &self.qp {
            QueuePair::Ud(ud) => Ok(ud),
            QueuePair::Rc(_) | QueuePair::Rd(_) | QueuePair::Uc(_) => {
                Err(Failure::invalid("only a datagram queue pair can be a member of a group"))
            }
        }
    }

    /// The queue pair, if it is one with a stream.
    pub fn rc(&self) -> Result<&Arc<Qp>, Failure> {
        match &self.qp {
            QueuePair::Rc(rc) => Ok(rc),
            QueuePair::Ud(_) | QueuePair::Rd(_) => {
                Err(Failure::invalid("a datagram queue pair has no connection"))
            }
            QueuePair::Uc(_) => Err(Failure::unsupported("UC queue pairs by rdma_cm")),
        }
    }

    /// The host of the peer that an address vector names, if it is among the attributes.
    fn uc_peer(&self, context: &Context, attr: &ibv_qp_attr, mask: u32) -> Result<Option<Endpoint>, Failure> {
        if mask & IBV_QP_AV == 0 {
            return Ok(None);
        }
        let path = path::of(&attr.ah_attr, context.device.port()).inspect_err(path::explain)?;
        let from = ah::source(path.local.ip(), path.peer.ip());
        Ok(Some(Endpoint { to: path.peer, from, marks: (0, 0) }))
    }

    fn store(&self, attr: &ibv_qp_attr, mask: u32) {
        let mut kept = self.stored.lock();
        if mask & IBV_QP_PATH_MTU != 0 {
            kept.path_mtu = attr.path_mtu;
        }
        if mask & IBV_QP_AV != 0 {
            kept.ah_attr = attr.ah_attr;
        }
        if mask & IBV_QP_PATH_MIG_STATE != 0 {
            kept.path_mig_state = attr.path_mig_state;
        }
        if mask & IBV_QP_ALT_PATH != 0 {
            kept.alt_ah_attr = attr.alt_ah_attr;
            kept.alt_pkey_index = attr.alt_pkey_index;
            kept.alt_port_num = attr.alt_port_num;
            kept.alt_timeout = attr.alt_timeout;
        }
    }
}
