//! Queue pairs: create, modify, query, destroy, post.

use std::ffi::c_int;
use std::sync::Arc;

use parking_lot::Mutex;
use uwarp_abi_types::verbs::*;
use uwarp_driver::{Nic, Qp, Srq};
use uwarp_rnic::qp::{QpCaps, QpInit, QpModify, QpState};
use uwarp_rnic::{RecvWr, SendFlags, SendOp, SendWr, Sge, VerbsError};

use super::cq::CCq;
use super::device::Context;
use super::event::{AsyncEvents, cookie};
use super::mr::CPd;
use super::srq::CSrq;
use super::wr_api::{self, Batch};
use super::{bringup, modify, view};
use crate::entry::{Code, Failure};
use crate::object::{self, Object, Use, Visible, look, zeroed};
use crate::{entry, slot};

/// A queue pair. Always has room for the extended shape: the plain one is its beginning.
#[repr(C)]
pub struct CQp {
    c: Visible<ibv_qp_ex>,
    /// The driver's.
    pub qp: Arc<Qp>,
    /// Its asynchronous events.
    pub async_events: Arc<AsyncEvents>,
    /// Attributes that a program sets and reads back and that mean nothing here.
    remembered: Mutex<Remembered>,
    sq_sig_all: bool,
    /// The batch being built through the `ibv_wr_*` functions, if the queue pair was made for them.
    pub batch: Option<Batch>,
    _uses: [Use; 4],
    _srq: Option<Use>,
}

// SAFETY: repr(C), the C structure first; `ibv_qp` is the first member of `ibv_qp_ex`.
unsafe impl Object for CQp {
    type C = ibv_qp;
    const NAME: &'static str = "qp";
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(ibv_qp_ex, qp_base) == 0);
    // A scatter/gather list is read in place.
    assert!(size_of::<Sge>() == size_of::<ibv_sge>() && align_of::<Sge>() == align_of::<ibv_sge>());
    assert!(offset_of!(Sge, addr) == offset_of!(ibv_sge, addr));
    assert!(offset_of!(Sge, length) == offset_of!(ibv_sge, length));
    assert!(offset_of!(Sge, lkey) == offset_of!(ibv_sge, lkey));
};

#[derive(Clone, Copy)]
struct Remembered {
    path_mtu: ibv_mtu,
    ah_attr: ibv_ah_attr,
    alt_ah_attr: ibv_ah_attr,
    path_mig_state: ibv_mig_state,
    qkey: u32,
    alt_pkey_index: u16,
    alt_port_num: u8,
    alt_timeout: u8,
}

/// What a queue pair is made from, in either shape.
struct Wanted {
    pd: *mut ibv_pd,
    qp_context: *mut std::ffi::c_void,
    send_cq: *mut ibv_cq,
    recv_cq: *mut ibv_cq,
    srq: *mut ibv_srq,
    cap: ibv_qp_cap,
    qp_type: ibv_qp_type,
    sq_sig_all: c_int,
    send_ops: Option<u64>,
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

fn cap_of(caps: &QpCaps) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: caps.max_send_wr,
        max_recv_wr: caps.max_recv_wr,
        max_send_sge: caps.max_send_sge,
        max_recv_sge: caps.max_recv_sge,
        max_inline_data: caps.max_inline_data,
    }
}

/// What it says of receives is ignored where they are `shared` (ibv_create_qp(3)).
fn check_caps(nic: &Nic, cap: &ibv_qp_cap, shared: bool) -> Result<(), Failure> {
    let limits = nic.limits();
    let receives = cap.max_recv_wr <= limits.max_qp_wr && cap.max_recv_sge <= limits.max_sge;
    let fits = cap.max_send_wr <= limits.max_qp_wr
        && cap.max_send_sge <= limits.max_sge
        && (receives || shared)
        && cap.max_inline_data <= limits.max_inline;
    if fits { Ok(()) } else { Err(Failure::invalid("a capability is more than the device allows")) }
}

/// To where a queue pair of this view begins.
fn first_state() -> QpModify {
    QpModify { state: Some(view::shown().first_state), ..QpModify::default() }
}

/// Makes a queue pair; returns it with the capabilities it really has.
///
/// # Safety
/// The pointers are live objects or NULL.
unsafe fn create(wanted: &Wanted) -> Result<(*mut ibv_qp, ibv_qp_cap), Failure> {
    // SAFETY: the caller's promise, here and below.
    let pd = unsafe { look::<CPd>(wanted.pd) }?;
    // SAFETY: a live domain's context is alive.
    let context = unsafe { look::<Context>((*wanted.pd).context) }?;
    match wanted.qp_type {
        IBV_QPT_RC => {}
        IBV_QPT_UC | IBV_QPT_UD | IBV_QPT_RAW_PACKET | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV
        | IBV_QPT_DRIVER => {
            return Err(Failure::unsupported("queue pairs other than RC"));
        }
        _ => return Err(Failure::invalid("unknown queue pair type")),
    }
    let srq = if wanted.srq.is_null() {
        None
    } else {
        // SAFETY: the caller's promise; the program set the pointer, so it is there to be looked at.
        let (srq, same) =
            unsafe { (look::<CSrq>(wanted.srq)?, (*wanted.srq).context == (*wanted.pd).context) };
        if !same {
            return Err(Failure::invalid("the shared receive queue is of another context"));
        }
        Some(srq)
    };
    // SAFETY: the caller's promise.
    let (send_cq, recv_cq) = unsafe { (look::<CCq>(wanted.send_cq)?, look::<CCq>(wanted.recv_cq)?) };
    check_caps(&context.nic, &wanted.cap, srq.is_some())?;
    if wanted.send_ops.is_some_and(|ops| ops & !wr_api::SUPPORTED != 0) {
        return Err(Failure::unsupported("one of the operations in send_ops_flags"));
    }
    let mut cap = wanted.cap;
    let c = object::give_with(|address: *mut ibv_qp| {
        let async_events = AsyncEvents::new(context);
        let init = QpInit {
            pd: pd.pd.clone(),
            send_cq: send_cq.cq.clone(),
            recv_cq: recv_cq.cq.clone(),
            srq: srq.map(|srq| srq.srq.core().clone()),
            caps: caps_of(&wanted.cap),
            sq_sig_all: wanted.sq_sig_all != 0,
            cookie: cookie(address),
            async_sink: async_events.clone(),
        };
        let qp = Qp::create(&context.nic, init)?;
        qp.modify(&first_state())?;
        cap = cap_of(&qp.query().caps);
        context.qps.lock().insert(qp.qpn(), Arc::downgrade(&qp));
        bringup::enter(&qp);
        // SAFETY: plain C data.
        let mut c: ibv_qp_ex = unsafe { zeroed() };
        // SAFETY: alive.
        c.qp_base.context = unsafe { (*wanted.pd).context };
        c.qp_base.qp_context = wanted.qp_context;
        c.qp_base.pd = wanted.pd;
        c.qp_base.send_cq = wanted.send_cq;
        c.qp_base.recv_cq = wanted.recv_cq;
        c.qp_base.srq = wanted.srq;
        c.qp_base.handle = qp.qpn();
        c.qp_base.qp_num = qp.qpn();
        c.qp_base.state = IBV_QPS_RESET;
        c.qp_base.qp_type = wanted.qp_type;
        let batch = wanted.send_ops.map(|ops| wr_api::fill(&mut c, ops));
        Ok(CQp {
            c: Visible::new(c),
            qp,
            async_events,
            // SAFETY: plain C data.
            remembered: Mutex::new(unsafe { zeroed() }),
            sq_sig_all: wanted.sq_sig_all != 0,
            batch,
            _uses: [pd.users.hold(), send_cq.users.hold(), recv_cq.users.hold(), context.users.hold()],
            _srq: srq.map(|srq| srq.users.hold()),
        })
    })?;
    Ok((c, cap))
}

entry! {
    /// ibv_create_qp(3).
    verb fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
        let attr = entry::required(attr, "qp_init_attr")?;
        let (qp, cap) = create(&Wanted {
            pd,
            qp_context: (*attr).qp_context,
            send_cq: (*attr).send_cq,
            recv_cq: (*attr).recv_cq,
            srq: (*attr).srq,
            cap: (*attr).cap,
            qp_type: (*attr).qp_type,
            sq_sig_all: (*attr).sq_sig_all,
            send_ops: None,
        })?;
        (*attr).cap = cap;
        Ok(qp)
    }

    /// ibv_create_qp_ex(3): the `ibv_qp_ex` of a queue pair made with `send_ops_flags`, else NULL.
    fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
        let pair = look::<CQp>(qp)?;
        Ok(if pair.batch.is_some() { qp.cast() } else { std::ptr::null_mut() })
    }

    /// ibv_modify_qp(3).
    verb fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int) -> Code {
        let pair = look::<CQp>(qp)?;
        let attr = &*entry::required(attr, "attr")?;
        let context = look::<Context>((*qp).context)?;
        let mask = attr_mask.cast_unsigned();
        let actual = pair.qp.query().state;
        let from = bringup::from(actual, (*qp).state, attr, mask);
        let mut change = modify::convert(attr, mask, from, context.nic.limits())?;
        let to = change.state;
        bringup::prepare(&pair.qp, actual, from, &mut change)?;
        pair.qp.modify(&change)?;
        if to == Some(QpState::Reset) {
            pair.qp.modify(&first_state())?;
        }
        pair.remember(attr, mask);
        if let Some(state) = to {
            (*qp).state = state as ibv_qp_state;
        }
        Ok(())
    }

    /// ibv_query_qp(3).
    verb fn ibv_query_qp(
        qp: *mut ibv_qp,
        attr: *mut ibv_qp_attr,
        _attr_mask: c_int,
        init_attr: *mut ibv_qp_init_attr,
    ) -> Code {
        let pair = look::<CQp>(qp)?;
        let attr = entry::required(attr, "attr")?;
        let init = entry::required(init_attr, "init_attr")?;
        let now = pair.qp.query();
        let kept = *pair.remembered.lock();
        let state = bringup::told(now.state, (*qp).state) as ibv_qp_state;
        let mut out: ibv_qp_attr = zeroed();
        out.qp_state = state;
        out.cur_qp_state = state;
        out.path_mtu = kept.path_mtu;
        out.path_mig_state = kept.path_mig_state;
        out.qkey = kept.qkey;
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
        out.sq_sig_all = pair.sq_sig_all.into();
        *init = out;
        // A program that moves it there itself is not there yet.
        if state != IBV_QPS_RTS {
            (*qp).state = state;
        }
        Ok(())
    }

    /// ibv_destroy_qp(3): waits until the program has acknowledged the events it took.
    verb fn ibv_destroy_qp(qp: *mut ibv_qp) -> Code {
        let pair = look::<CQp>(qp)?;
        pair.qp.destroy();
        bringup::leave(pair.qp.qpn());
        if let Ok(context) = look::<Context>((*qp).context) {
            context.qps.lock().remove(&pair.qp.qpn());
        }
        pair.async_events.close(cookie(qp));
        drop(object::take::<CQp>(qp)?);
        Ok(())
    }

    /// ibv_query_qp_data_in_order(3): TCP is, but the kernel's copy and ours do not promise it to a reader who polls
    /// memory.
    verb fn ibv_query_qp_data_in_order(qp: *mut ibv_qp, _op: ibv_wr_opcode, _flags: u32) -> i32 {
        look::<CQp>(qp)?;
        Ok(0)
    }

    /// ibv_set_ece(3).
    verb fn ibv_set_ece(qp: *mut ibv_qp, _ece: *mut ibv_ece) -> Code {
        look::<CQp>(qp)?;
        Err(Failure::unsupported("enhanced connection establishment"))
    }

    /// ibv_query_ece(3).
    verb fn ibv_query_ece(qp: *mut ibv_qp, _ece: *mut ibv_ece) -> Code {
        look::<CQp>(qp)?;
        Err(Failure::unsupported("enhanced connection establishment"))
    }
}

impl CQp {
    fn remember(&self, attr: &ibv_qp_attr, mask: u32) {
        let mut kept = self.remembered.lock();
        if mask & IBV_QP_PATH_MTU != 0 {
            kept.path_mtu = attr.path_mtu;
        }
        if mask & IBV_QP_AV != 0 {
            kept.ah_attr = attr.ah_attr;
        }
        if mask & IBV_QP_PATH_MIG_STATE != 0 {
            kept.path_mig_state = attr.path_mig_state;
        }
        if mask & IBV_QP_QKEY != 0 {
            kept.qkey = attr.qkey;
        }
        if mask & IBV_QP_ALT_PATH != 0 {
            kept.alt_ah_attr = attr.alt_ah_attr;
            kept.alt_pkey_index = attr.alt_pkey_index;
            kept.alt_port_num = attr.alt_port_num;
            kept.alt_timeout = attr.alt_timeout;
        }
    }
}

/// # Safety
/// `list` points to `n` elements that stay until the request is posted.
unsafe fn sges<'a>(list: *mut ibv_sge, n: c_int) -> Option<&'a [Sge]> {
    match usize::try_from(n) {
        Ok(0) => Some(&[]),
        // SAFETY: the same layout (asserted above), and the caller's promise.
        Ok(n) if !list.is_null() => Some(unsafe { std::slice::from_raw_parts(list.cast::<Sge>(), n) }),
        _ => None,
    }
}

/// A send work request in the RNIC's words.
///
/// # Safety
/// `wr` is a valid request whose scatter/gather list stays until it is posted.
unsafe fn send_wr<'a>(wr: &ibv_send_wr) -> Result<SendWr<'a>, Failure> {
    // SAFETY: which members of the unions are valid follows from the opcode; all of them are plain numbers.
    let op = unsafe {
        let (stag, to) = (wr.wr.rdma.rkey, wr.wr.rdma.remote_addr);
        match wr.opcode {
            IBV_WR_SEND => SendOp::Send { invalidate: None },
            IBV_WR_SEND_WITH_INV => SendOp::Send { invalidate: Some(wr.anon_1.invalidate_rkey) },
            IBV_WR_SEND_WITH_IMM => SendOp::SendImmediate { imm: wr.anon_1.imm_data.to_ne_bytes() },
            IBV_WR_RDMA_WRITE => SendOp::Write { stag, to },
            IBV_WR_RDMA_WRITE_WITH_IMM => {
                SendOp::WriteImmediate { stag, to, imm: wr.anon_1.imm_data.to_ne_bytes() }
            }
            IBV_WR_RDMA_READ => SendOp::Read { stag, to, invalidate_local: false },
            IBV_WR_LOCAL_INV => SendOp::LocalInvalidate { stag: wr.anon_1.invalidate_rkey },
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD | IBV_WR_ATOMIC_WRITE => {
                return Err(Failure::invalid("atomics are not offered"));
            }
            _ => return Err(Failure::invalid("unknown or unoffered opcode")),
        }
    };
    // SAFETY: the caller's promise.
    let sges =
        unsafe { sges(wr.sg_list, wr.num_sge) }.ok_or_else(|| Failure::invalid("num_sge or sg_list"))?;
    Ok(SendWr { wr_id: wr.wr_id, op, flags: SendFlags::from_bits_truncate(wr.send_flags), sges })
}

/// A list of work requests in C, walked once.
struct List<W> {
    next: *mut W,
    /// The first one that cannot be said in the RNIC's words; those before it are posted.
    refused: Option<(*mut W, Failure)>,
}

impl<W> List<W> {
    fn walk<'a, R>(
        &mut self,
        convert: impl Fn(&W) -> Result<R, Failure> + 'a,
        following: impl Fn(&W) -> *mut W + 'a,
    ) -> impl Iterator<Item = R> {
        std::iter::from_fn(move || {
            // SAFETY: a list in C: each element is valid and the last one's successor is NULL.
            let wr = unsafe { self.next.as_ref() }?;
            match convert(wr) {
                Ok(converted) => {
                    self.next = following(wr);
                    Some(converted)
                }
                Err(why) => {
                    self.refused = Some((self.next, why));
                    self.next = std::ptr::null_mut();
                    None
                }
            }
        })
    }
}

/// The `n`th element of a list.
///
/// # Safety
/// The list has that many.
unsafe fn nth<W>(mut wr: *mut W, n: usize, following: impl Fn(&W) -> *mut W) -> *mut W {
    for _ in 0..n {
        // SAFETY: the caller's promise.
        wr = unsafe { following(&*wr) };
    }
    wr
}

/// What takes receives. A trait rather than a closure, for the sake of static dispatch.
pub(super) trait Receives {
    fn post<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), (usize, VerbsError)>;
}

impl Receives for Qp {
    #[inline]
    fn post<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), (usize, VerbsError)> {
        self.post_recv(wrs)
    }
}

impl Receives for Srq {
    #[inline]
    fn post<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), (usize, VerbsError)> {
        self.post_recv(wrs)
    }
}

/// Posts a list of receives; tells in `bad_wr` which one was refused.
///
/// # Safety
/// `wr` is a valid list that stays until it is posted; `bad_wr` may be written.
#[inline]
pub(super) unsafe fn post_receives(
    to: &impl Receives,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> Result<(), Failure> {
    let mut list = List { next: wr, refused: None };
    let convert = |wr: &ibv_recv_wr| {
        // SAFETY: the caller's promise.
        let sges = unsafe { sges(wr.sg_list, wr.num_sge) };
        let sges = sges.ok_or_else(|| Failure::invalid("num_sge or sg_list"))?;
        Ok(RecvWr { wr_id: wr.wr_id, sges })
    };
    if uwarp_driver::forked() {
        // SAFETY: the caller's promise.
        unsafe { *bad_wr = wr };
        return Err(VerbsError::Forked.into());
    }
    let posted = to.post(list.walk(convert, |wr| wr.next));
    let (bad, why) = match (posted, list.refused) {
        (Ok(()), None) => return Ok(()),
        (Ok(()), Some(refused)) => refused,
        // SAFETY: the list has more than `index` elements.
        (Err((index, error)), _) => (unsafe { nth(wr, index, |wr| wr.next) }, error.into()),
    };
    // SAFETY: the caller's promise.
    unsafe { *bad_wr = bad };
    Err(why)
}

slot! {
    /// ibv_post_send(3).
    hot fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad_wr: *mut *mut ibv_send_wr) -> Code {
        let pair = look::<CQp>(qp)?;
        let mut list = List { next: wr, refused: None };
        if uwarp_driver::forked() {
            *bad_wr = wr;
            return Err(VerbsError::Forked.into());
        }
        let posted = pair.qp.post_send(list.walk(|wr| send_wr(wr), |wr| wr.next));
        let (bad, why) = match (posted, list.refused) {
            (Ok(()), None) => return Ok(()),
            (Ok(()), Some(refused)) => refused,
            (Err((index, error)), _) => (nth(wr, index, |wr| wr.next), error.into()),
        };
        *bad_wr = bad;
        Err(why)
    }

    /// ibv_post_recv(3).
    hot fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad_wr: *mut *mut ibv_recv_wr) -> Code {
        post_receives(&*look::<CQp>(qp)?.qp, wr, bad_wr)
    }

    /// ibv_create_qp_ex(3).
    verb fn create_qp_ex(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
        look::<Context>(context)?;
        let attr = entry::required(attr, "qp_init_attr_ex")?;
        let mask = (*attr).comp_mask;
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
        if mask & offloads != 0 || (mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && (*attr).create_flags != 0) {
            return Err(Failure::unsupported("XRC, offloads and creation flags"));
        }
        let send_ops = (mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0).then(|| (*attr).send_ops_flags);
        let (qp, cap) = create(&Wanted {
            pd: (*attr).pd,
            qp_context: (*attr).qp_context,
            send_cq: (*attr).send_cq,
            recv_cq: (*attr).recv_cq,
            srq: (*attr).srq,
            cap: (*attr).cap,
            qp_type: (*attr).qp_type,
            sq_sig_all: (*attr).sq_sig_all,
            send_ops,
        })?;
        (*attr).cap = cap;
        Ok(qp)
    }
}
