//! Attributes of a queue pair: what it is created with, what a program changes, what a query returns.

use std::sync::Arc;

use super::state::QpState;
use crate::cq::Cq;
use crate::event::AsyncSink;
use crate::mr::Access;
use crate::pd::Pd;
use crate::srq::Srq;

/// How many work requests and scatter/gather elements a queue pair holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QpCaps {
    /// Send work requests outstanding.
    pub max_send_wr: u32,
    /// Receive work requests outstanding.
    pub max_recv_wr: u32,
    /// Elements of a send work request.
    pub max_send_sge: u32,
    /// Elements of a receive work request.
    pub max_recv_sge: u32,
    /// Bytes that may be posted inline.
    pub max_inline_data: u32,
}

/// What a queue pair is created from.
pub struct QpInit {
    /// Its protection domain.
    pub pd: Arc<Pd>,
    /// Where its sends complete.
    pub send_cq: Arc<Cq>,
    /// Where its receives complete.
    pub recv_cq: Arc<Cq>,
    /// Where its receives come from, if it has no receive queue of its own; the sizes of its own are then
    /// ignored.
    pub srq: Option<Arc<Srq>>,
    /// Its sizes.
    pub caps: QpCaps,
    /// Every send makes a completion.
    pub sq_sig_all: bool,
    /// Identifies it in asynchronous events.
    pub cookie: u64,
    /// Receives its asynchronous events.
    pub async_sink: Arc<dyn AsyncSink>,
}

/// Attributes of a queue pair, as a query returns them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct QpAttr {
    /// The state that it is in.
    pub state: QpState,
    /// The state that its program requested last. The two differ while the connection manager sets up the
    /// stream.
    pub requested: QpState,
    pub caps: QpCaps,
    /// Rights that the queue pair grants its peer, on top of the regions'.
    pub access: Access,
    pub dest_qp_num: u32,
    /// Datagrams with another Q_Key are dropped. (RC has none.)
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    /// RDMA Reads and atomic operations this end may have outstanding (ORD).
    pub max_rd_atomic: u16,
    /// RDMA Reads and atomic operations the peer may have outstanding (IRD).
    pub max_dest_rd_atomic: u16,
    pub min_rnr_timer: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub port_num: u8,
    pub pkey_index: u16,
    pub sq_draining: bool,
    pub sq_sig_all: bool,
}

impl QpAttr {
    /// The attributes of a new queue pair.
    pub(super) fn new(caps: QpCaps, sq_sig_all: bool) -> Self {
        Self {
            state: QpState::Reset,
            requested: QpState::Reset,
            caps,
            access: Access::empty(),
            dest_qp_num: 0,
            qkey: 0,
            rq_psn: 0,
            sq_psn: 0,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            min_rnr_timer: 0,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            port_num: 1,
            pkey_index: 0,
            sq_draining: false,
            sq_sig_all,
        }
    }

    /// Applies the changes that do not depend on the connection.
    pub(super) fn apply(&mut self, change: &QpModify) {
        set(&mut self.requested, change.requested.or(change.state));
        set(&mut self.access, change.access);
        set(&mut self.dest_qp_num, change.dest_qp_num);
        set(&mut self.qkey, change.qkey);
        set(&mut self.rq_psn, change.rq_psn);
        set(&mut self.sq_psn, change.sq_psn);
        set(&mut self.min_rnr_timer, change.min_rnr_timer);
        set(&mut self.timeout, change.timeout);
        set(&mut self.retry_cnt, change.retry_cnt);
        set(&mut self.rnr_retry, change.rnr_retry);
        set(&mut self.port_num, change.port_num);
        set(&mut self.pkey_index, change.pkey_index);
    }
}

/// Changes to a queue pair; `None`: no change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct QpModify {
    pub state: Option<QpState>,
    /// The state that the program has requested, where the connection manager changes to another one. `None`:
    /// the same as `state`.
    pub requested: Option<QpState>,
    /// What the program thinks the state is.
    pub cur_state: Option<QpState>,
    pub access: Option<Access>,
    pub dest_qp_num: Option<u32>,
    pub qkey: Option<u32>,
    pub rq_psn: Option<u32>,
    pub sq_psn: Option<u32>,
    pub max_rd_atomic: Option<u8>,
    pub max_dest_rd_atomic: Option<u8>,
    pub min_rnr_timer: Option<u8>,
    pub timeout: Option<u8>,
    pub retry_cnt: Option<u8>,
    pub rnr_retry: Option<u8>,
    pub port_num: Option<u8>,
    pub pkey_index: Option<u16>,
    pub sqd_async_notify: Option<bool>,
    /// For a change of an RC queue pair to RTR: the stream is being set up, and [`super::RcCore::attach`]
    /// comes later.
    pub awaits_stream: bool,
}

pub(super) fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}
