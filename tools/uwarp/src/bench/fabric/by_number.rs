//! Queue pairs that the program brings up itself, by number and GID, as programs without librdmacm do: it
//! exchanges these over a socket of its own.

use std::net::Ipv6Addr;
use std::time::Instant;

use uwarp_abi_types::verbs::{
    IBV_MTU_1024, IBV_QP_ACCESS_FLAGS, IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC,
    IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT,
    IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT,
    IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS,
};

use super::crowd::{DEPTH, Shared, done};
use super::*;
use crate::bench::protocol::Figure;
use crate::bench::raw::Raw;

const PORT: u8 = 1;
const INIT: u32 = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
const RTR: u32 = IBV_QP_STATE
    | IBV_QP_AV
    | IBV_QP_PATH_MTU
    | IBV_QP_DEST_QPN
    | IBV_QP_RQ_PSN
    | IBV_QP_MAX_DEST_RD_ATOMIC
    | IBV_QP_MIN_RNR_TIMER;
const RTS: u32 = IBV_QP_STATE
    | IBV_QP_TIMEOUT
    | IBV_QP_RETRY_CNT
    | IBV_QP_RNR_RETRY
    | IBV_QP_SQ_PSN
    | IBV_QP_MAX_QP_RD_ATOMIC;

/// One end of them.
pub struct ByNumber {
    libraries: &'static Libraries,
    shared: Shared,
    gid: ibv_gid,
}

impl ByNumber {
    /// On the first device, for up to `most` queue pairs at a time.
    pub fn new(libraries: &'static Libraries, most: u32) -> Result<ByNumber> {
        // SAFETY: the list is never freed.
        let device: *mut ibv_device = unsafe {
            let list = (libraries.get_device_list)(ptr::null_mut());
            if list.is_null() { ptr::null_mut() } else { *list }
        };
        if device.is_null() {
            return Err(last("ibv_get_device_list"));
        }
        // SAFETY: a device of the list.
        let context = unsafe { (libraries.open_device)(device) };
        if context.is_null() {
            return Err(last("ibv_open_device"));
        }
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open; `gid` outlives the call.
        check("ibv_query_gid", unsafe { (libraries.query_gid)(context, PORT, 0, &mut gid) })?;
        Ok(ByNumber { libraries, shared: Shared::new(libraries, context, most)?, gid })
    }

    /// Makes `count` queue pairs, joins them with as many of the peer's, and destroys them. The figure is
    /// queue pairs a second, until a message of the active end has arrived on each.
    pub fn bring_up(&self, raw: &mut Raw, count: u32, active: bool) -> Result<Figure> {
        meet(raw)?;
        let start = Instant::now();
        let pairs = (0..count as usize).map(|index| self.create(index)).collect::<Result<Vec<_>>>()?;
        let result = self.join(raw, &pairs, active);
        let seconds = start.elapsed().as_secs_f64();
        if result.is_ok() {
            // The peer must have its acknowledgements before ours are destroyed.
            meet(raw)?;
        }
        for qp in pairs {
            // SAFETY: made above, and used no more.
            check("ibv_destroy_qp", unsafe { (self.libraries.destroy_verbs_qp)(qp) })?;
        }
        result?;
        while self.shared.reap(self.shared.receive_cq, |_| Ok(()))? > 0 {}
        Ok(Figure { value: f64::from(count) / seconds, p99: None, operations: count.into() })
    }

    fn join(&self, raw: &mut Raw, pairs: &[*mut ibv_qp], active: bool) -> Result<()> {
        // SAFETY: plain bytes.
        let gid = u128::from_be_bytes(unsafe { self.gid.raw });
        raw.send_number((gid >> 64) as u64)?;
        raw.send_number(gid as u64)?;
        // SAFETY: alive.
        let own: Vec<u64> = pairs.iter().map(|&qp| unsafe { (*qp).qp_num }.into()).collect();
        raw.send_numbers(&own)?;
        let gid = u128::from(raw.receive_number()?) << 64 | u128::from(raw.receive_number()?);
        let peers = raw.receive_numbers(own.len())?;
        for (&qp, peer) in pairs.iter().zip(peers) {
            self.raise(qp, gid, peer)?;
        }
        if active {
            for (index, &qp) in pairs.iter().enumerate() {
                self.shared.send(qp, index)?;
            }
        }
        let queue = if active { self.shared.send_cq } else { self.shared.receive_cq };
        let mut arrived = 0;
        while arrived < pairs.len() {
            arrived += self.shared.reap(queue, done)?;
        }
        Ok(())
    }

    /// A queue pair in INIT, with a receive.
    fn create(&self, index: usize) -> Result<*mut ibv_qp> {
        let shared = &self.shared;
        let mut init = shared.wanted_queue_pair();
        // SAFETY: the domain is alive; `init` outlives the call.
        let qp = unsafe { (self.libraries.create_verbs_qp)(shared.pd, &mut init) };
        if qp.is_null() {
            return Err(last("ibv_create_qp"));
        }
        // SAFETY: zeros are values of all fields.
        let mut attr: ibv_qp_attr = unsafe { mem::zeroed() };
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = PORT;
        attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
        self.modify(qp, &mut attr, INIT)?;
        (0..DEPTH).try_for_each(|_| shared.receive(qp, index))?;
        Ok(qp)
    }

    /// To RTS.
    fn raise(&self, qp: *mut ibv_qp, gid: u128, number: u64) -> Result<()> {
        // SAFETY: zeros are values of all fields.
        let mut attr: ibv_qp_attr = unsafe { mem::zeroed() };
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = IBV_MTU_1024;
        attr.dest_qp_num = u32::try_from(number).map_err(|_| Failure::new("not a queue pair's number"))?;
        attr.max_dest_rd_atomic = READS;
        attr.min_rnr_timer = 12;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = PORT;
        attr.ah_attr.grh.dgid = ibv_gid { raw: Ipv6Addr::from(gid).octets() };
        attr.ah_attr.grh.hop_limit = 64;
        self.modify(qp, &mut attr, RTR)?;
        attr.qp_state = IBV_QPS_RTS;
        attr.timeout = 14;
        attr.retry_cnt = 7;
        attr.rnr_retry = 7;
        attr.max_rd_atomic = READS;
        self.modify(qp, &mut attr, RTS)
    }

    fn modify(&self, qp: *mut ibv_qp, attr: &mut ibv_qp_attr, mask: u32) -> Result<()> {
        // SAFETY: the queue pair is alive; `attr` outlives the call.
        check("ibv_modify_qp", unsafe { (self.libraries.modify_qp)(qp, attr, mask.cast_signed()) })
    }
}

/// Both ends are here.
fn meet(raw: &mut Raw) -> Result<()> {
    raw.send_number(0)?;
    raw.receive_number().map(drop)
}
