//! Creates queue pairs, in the two forms of the verbs.

use std::sync::Arc;

use uwarp_abi_types::verbs::*;
use uwarp_driver::config::{Config, View};
use uwarp_driver::{Qp, QueuePair, RdQp, UcQp, UdQp};
use uwarp_process::Mutex;
use uwarp_rnic::qp::{QpCaps, QpInit, RdInit};
use uwarp_rsocket::OwnWork;

use super::batch::Batch;
use super::context::{Context, same_device};
use super::cq::CCq;
use super::event::{AsyncEvents, cookie};
use super::mr::CPd;
use super::qp::{CQp, cap_of, first_state};
use super::srq::CSrq;
use super::wr_api;
use crate::failure::{Failure, required};
use crate::object::{self, Visible, look, zeroed};
use crate::{entry, slot};

/// The plain structure in its extended form.
pub fn extended(pd: *mut ibv_pd, attr: &ibv_qp_init_attr) -> ibv_qp_init_attr_ex {
    // SAFETY: plain C data.
    let mut ex: ibv_qp_init_attr_ex = unsafe { zeroed() };
    ex.qp_context = attr.qp_context;
    ex.send_cq = attr.send_cq;
    ex.recv_cq = attr.recv_cq;
    ex.srq = attr.srq;
    ex.cap = attr.cap;
    ex.qp_type = attr.qp_type;
    ex.sq_sig_all = attr.sq_sig_all;
    ex.comp_mask = IBV_QP_INIT_ATTR_PD;
    ex.pd = pd;
    ex
}

/// Checks which members are set; returns the operations of the `ibv_wr_*` functions if the program requests
/// them.
fn check_members(attr: &ibv_qp_init_attr_ex) -> Result<Option<u64>, Failure> {
    let mask = attr.comp_mask;
    let known = IBV_QP_INIT_ATTR_PD
        | IBV_QP_INIT_ATTR_XRCD
        | IBV_QP_INIT_ATTR_CREATE_FLAGS
        | IBV_QP_INIT_ATTR_MAX_TSO_HEADER
        | IBV_QP_INIT_ATTR_IND_TABLE
        | IBV_QP_INIT_ATTR_RX_HASH
        | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    if mask & !known != 0 {
        return Err(Failure::invalid("unknown members in comp_mask"));
    }
    if mask & IBV_QP_INIT_ATTR_PD == 0 {
        return Err(Failure::invalid("a protection domain is needed"));
    }
    let offloads = IBV_QP_INIT_ATTR_XRCD
        | IBV_QP_INIT_ATTR_MAX_TSO_HEADER
        | IBV_QP_INIT_ATTR_IND_TABLE
        | IBV_QP_INIT_ATTR_RX_HASH;
    if mask & offloads != 0 || (mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && attr.create_flags != 0) {
        return Err(Failure::unsupported("XRC, offloads and creation flags"));
    }
    Ok((mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0).then_some(attr.send_ops_flags))
}

fn caps_of(cap: &ibv_qp_cap) -> QpCaps {
    QpCaps {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

/// What a queue pair is to be.
#[derive(Debug, Clone, Copy)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagrams.
    Ud,
    /// The same with RDMA Write-Records.
    Recording {
        /// What peers need to name memory.
        job_key: u64,
        /// How many records there may be.
        max_records: u32,
    },
    /// Reliable datagrams, which no type of the verbs names.
    Rd(RdInit),
}

impl Service {
    /// Whether a destination goes with each send.
    pub fn is_datagram(self) -> bool {
        !matches!(self, Self::Rc | Self::Uc)
    }

    /// Operations that `send_ops_flags` may contain.
    fn operations(self) -> u64 {
        match self {
            Self::Rc => wr_api::SUPPORTED,
            Self::Uc => wr_api::SUPPORTED_UC,
            Self::Ud | Self::Recording { .. } => wr_api::SUPPORTED_UD,
            Self::Rd(_) => wr_api::SUPPORTED_RD,
        }
    }
}

/// The service of a queue pair of this type.
fn service_of(qp_type: ibv_qp_type) -> Result<Service, Failure> {
    match qp_type {
        IBV_QPT_RC => Ok(Service::Rc),
        IBV_QPT_UD => Ok(Service::Ud),
        // iWARP has no such service, and its adapters refuse it.
        IBV_QPT_UC if Config::get().view == View::Iwarp => {
            Err(Failure::unsupported("UC queue pairs in the iwarp view"))
        }
        IBV_QPT_UC => Ok(Service::Uc),
        IBV_QPT_RAW_PACKET | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV | IBV_QPT_DRIVER => {
            Err(Failure::unsupported("queue pairs other than RC, UC and UD"))
        }
        _ => Err(Failure::invalid("unknown queue pair type")),
    }
}

/// Makes a queue pair; `attr.cap` then holds the capabilities it really has.
///
/// # Safety
/// The pointers are live objects or NULL.
pub unsafe fn create(attr: &mut ibv_qp_init_attr_ex) -> Result<*mut ibv_qp, Failure> {
    let service = service_of(attr.qp_type)?;
    // SAFETY: the caller's promise.
    unsafe { create_for(service, attr) }
}

/// The same for this service, whatever type the program names.
///
/// # Safety
/// As [`create`].
pub unsafe fn create_for(service: Service, attr: &mut ibv_qp_init_attr_ex) -> Result<*mut ibv_qp, Failure> {
    let send_ops = check_members(attr)?;
    // SAFETY: the caller's promise, here and below.
    let pd = unsafe { look::<CPd>(attr.pd) }?;
    // SAFETY: a live domain's context is alive.
    let context = unsafe { look::<Context>((*attr.pd).context) }?;
    let srq = if attr.srq.is_null() {
        None
    } else {
        // SAFETY: the caller's promise.
        let (srq, same) = unsafe { (look::<CSrq>(attr.srq)?, (*attr.srq).context == (*attr.pd).context) };
        if !same {
            return Err(Failure::invalid("the shared receive queue is of another context"));
        }
        Some(srq)
    };
    // SAFETY: the caller's promise.
    let (send_cq, recv_cq) = unsafe { (look::<CCq>(attr.send_cq)?, look::<CCq>(attr.recv_cq)?) };
    // SAFETY: all three were looked at above.
    unsafe {
        same_device((*attr.pd).context, (*attr.send_cq).context)?;
        same_device((*attr.pd).context, (*attr.recv_cq).context)?;
    }
    if send_ops.is_some_and(|ops| ops & !service.operations() != 0) {
        return Err(Failure::unsupported("one of the operations in send_ops_flags"));
    }
    let place = context.device.made.qps.take(context.nic.limits().max_qp)?;
    object::give_with(|address: *mut ibv_qp| {
        let async_events = AsyncEvents::new(context);
        let init = QpInit {
            pd: pd.pd.clone(),
            send_cq: send_cq.cq.clone(),
            recv_cq: recv_cq.cq.clone(),
            srq: srq.map(|srq| srq.srq.core().clone()),
            caps: caps_of(&attr.cap),
            sq_sig_all: attr.sq_sig_all != 0,
            cookie: cookie(address),
            async_sink: async_events.clone(),
        };
        let qp = match service {
            Service::Rc => {
                let rc = Qp::create(&context.nic, init)?;
                rc.modify(&first_state())?;
                QueuePair::Rc(rc)
            }
            Service::Uc => QueuePair::Uc(UcQp::create(&context.nic, init)?),
            Service::Ud => QueuePair::Ud(UdQp::create(&context.nic, init)?),
            Service::Recording { job_key, max_records } => {
                QueuePair::Ud(UdQp::create_with_records(&context.nic, init, job_key, max_records)?)
            }
            Service::Rd(how) => QueuePair::Rd(RdQp::create(&context.nic, init, how)?),
        };
        attr.cap = cap_of(&qp.query().caps);
        // SAFETY: alive.
        context.nic.set_context(&qp, cookie(unsafe { (*attr.pd).context }));
        // SAFETY: plain C data.
        let mut c: ibv_qp_ex = unsafe { zeroed() };
        // SAFETY: alive.
        c.qp_base.context = unsafe { (*attr.pd).context };
        c.qp_base.qp_context = attr.qp_context;
        c.qp_base.pd = attr.pd;
        c.qp_base.send_cq = attr.send_cq;
        c.qp_base.recv_cq = attr.recv_cq;
        c.qp_base.srq = attr.srq;
        c.qp_base.handle = qp.qpn();
        c.qp_base.qp_num = qp.qpn();
        c.qp_base.state = IBV_QPS_RESET;
        c.qp_base.qp_type = attr.qp_type;
        let batch = send_ops.map(|ops| {
            wr_api::fill(&mut c, ops, service.is_datagram());
            Batch::default()
        });
        Ok(CQp {
            c: Visible::new(c),
            qp,
            async_events,
            // SAFETY: plain C data.
            stored: Mutex::new(unsafe { zeroed() }),
            batch,
            own_work: None,
            _place: Some(place),
            _uses: [pd.users.hold(), send_cq.users.hold(), recv_cq.users.hold(), context.users.hold()],
            _srq: srq.map(|srq| srq.users.hold()),
        })
    })
}

/// The handle of a queue pair that the library has made for a socket, with a protection domain of that queue
/// pair's. It has no completion queues: the library takes the completions.
///
/// # Safety
/// `pd` is alive.
pub unsafe fn of_socket(
    pd: *mut ibv_pd,
    rc: &Arc<Qp>,
    own_work: &Arc<OwnWork>,
) -> Result<*mut ibv_qp, Failure> {
    // SAFETY: the caller's promise; a live domain's context is alive.
    let (domain, context) = unsafe { (look::<CPd>(pd)?, look::<Context>((*pd).context)?) };
    let qp = QueuePair::Rc(Arc::clone(rc));
    // SAFETY: alive.
    context.nic.set_context(&qp, cookie(unsafe { (*pd).context }));
    // SAFETY: plain C data.
    let mut c: ibv_qp_ex = unsafe { zeroed() };
    // SAFETY: alive.
    c.qp_base.context = unsafe { (*pd).context };
    c.qp_base.pd = pd;
    c.qp_base.handle = qp.qpn();
    c.qp_base.qp_num = qp.qpn();
    c.qp_base.state = IBV_QPS_RTS;
    c.qp_base.qp_type = IBV_QPT_RC;
    Ok(object::give(CQp {
        c: Visible::new(c),
        qp,
        async_events: AsyncEvents::new(context),
        // SAFETY: plain C data.
        stored: Mutex::new(unsafe { zeroed() }),
        batch: None,
        own_work: Some(Arc::clone(own_work)),
        _place: None,
        _uses: std::array::from_fn(|_| domain.users.hold()),
        _srq: None,
    }))
}

entry! {
    /// ibv_create_qp(3).
    fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
        let attr = &mut *required(attr, "qp_init_attr")?;
        let mut ex = extended(pd, attr);
        let qp = create(&mut ex)?;
        attr.cap = ex.cap;
        Ok(qp)
    }
}

slot! {
    /// ibv_create_qp_ex(3).
    verb fn create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
        look::<Context>(context)?;
        create(&mut *required(attr, "qp_init_attr_ex")?)
    }
}
