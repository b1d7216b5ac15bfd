//! The `ibv_wr_*` functions (ibv_wr_post(3)): work requests built call by call, posted together by
//! `ibv_wr_complete`.
//!
//! Inline data is copied when it is set. A mistake shows in `ibv_wr_complete`, which then posts nothing.

use std::ffi::{c_int, c_void};

use lock_api::RawMutex as _;
use uwarp_abi_types::verbs::*;
use uwarp_driver::QueuePair;
use uwarp_rnic::{SendFlags, SendOp, Sge};

use super::ah::CAh;
use super::batch::{Batch, Building};
use super::mw::bind_request;
use super::post::sges;
use super::qp::CQp;
use crate::convention::Code;
use crate::failure::Failure;
use crate::object::look;
use crate::{deferred, jumps, slot};

/// Operations that `send_ops_flags` may contain.
pub const SUPPORTED: u64 = (IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | IBV_QP_EX_WITH_LOCAL_INV
    | IBV_QP_EX_WITH_BIND_MW
    | IBV_QP_EX_WITH_SEND_WITH_INV) as u64;

/// As [`SUPPORTED`], for a queue pair of an unreliable connection.
pub const SUPPORTED_UC: u64 =
    SUPPORTED_UD | (IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) as u64;

/// As [`SUPPORTED`], for a datagram queue pair.
pub const SUPPORTED_UD: u64 = (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM) as u64;

/// As [`SUPPORTED`], for a queue pair of reliable datagrams.
pub const SUPPORTED_RD: u64 = SUPPORTED_UD
    | (IBV_QP_EX_WITH_RDMA_WRITE
        | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        | IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD) as u64;

/// Fills the function pointers for the requested operations; the others stay NULL.
pub fn fill(qp: &mut ibv_qp_ex, ops: u64, is_datagram: bool) {
    let wants = |op: u32| ops & u64::from(op) != 0;
    qp.wr_start = Some(jumps::choose(wr_start, deferred_wr_start));
    qp.wr_complete = Some(jumps::choose(wr_complete, deferred_wr_complete));
    qp.wr_abort = Some(jumps::choose(wr_abort, deferred_wr_abort));
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    if is_datagram {
        qp.wr_set_ud_addr = Some(wr_set_ud_addr);
    }
    if wants(IBV_QP_EX_WITH_RDMA_WRITE) {
        qp.wr_rdma_write = Some(wr_rdma_write);
    }
    if wants(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) {
        qp.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    }
    if wants(IBV_QP_EX_WITH_SEND) {
        qp.wr_send = Some(wr_send);
    }
    if wants(IBV_QP_EX_WITH_SEND_WITH_IMM) {
        qp.wr_send_imm = Some(wr_send_imm);
    }
    if wants(IBV_QP_EX_WITH_RDMA_READ) {
        qp.wr_rdma_read = Some(wr_rdma_read);
    }
    if wants(IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP) {
        qp.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    }
    if wants(IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD) {
        qp.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    }
    if wants(IBV_QP_EX_WITH_LOCAL_INV) {
        qp.wr_local_inv = Some(wr_local_inv);
    }
    if wants(IBV_QP_EX_WITH_BIND_MW) {
        qp.wr_bind_mw = Some(wr_bind_mw);
    }
    if wants(IBV_QP_EX_WITH_SEND_WITH_INV) {
        qp.wr_send_inv = Some(wr_send_inv);
    }
}

/// Sets the job key of the work request that a thread builds.
///
/// # Safety
/// `qp` is alive and was made for this interface; the caller holds the batch's lock.
pub unsafe fn set_job_key(qp: *mut ibv_qp_ex, job_key: u64) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe { batch(qp)?.building().set_job_key(job_key) };
    Ok(())
}

/// Begins an RDMA Write-Record.
///
/// # Safety
/// As [`begin`].
pub unsafe fn begin_record(qp: *mut ibv_qp_ex, stag: u32, to: u64, imm: [u8; 4]) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        if matches!(look::<CQp>(qp.cast())?.qp, QueuePair::Rc(_) | QueuePair::Uc(_)) {
            batch(qp)?.building().fail(Failure::invalid("records are of datagram queue pairs only"));
        }
        begin(qp, SendOp::WriteRecord { stag, to, imm })
    }
}

/// The batch that a thread builds between `ibv_wr_start` and its end; it holds the batch's lock meanwhile.
///
/// # Safety
/// `qp` is alive.
unsafe fn batch<'a>(qp: *mut ibv_qp_ex) -> Result<&'a Batch, Failure> {
    // SAFETY: the caller's promise.
    let pair = unsafe { look::<CQp>(qp.cast()) }?;
    pair.batch
        .as_ref()
        .ok_or_else(|| Failure::invalid("the queue pair was not created for the ibv_wr functions"))
}

/// Begins a work request with the identity and flags the program has put into the structure.
///
/// # Safety
/// `qp` is alive and was made for this interface; the caller holds the batch's lock.
unsafe fn begin(qp: *mut ibv_qp_ex, op: SendOp) -> Result<(), Failure> {
    // SAFETY: the caller's promise; the members are the caller's own.
    unsafe { batch(qp)?.building().begin((*qp).wr_id, op, SendFlags::of_program((*qp).wr_flags)) };
    Ok(())
}

slot! {
    /// `ibv_wr_start`.
    hot fn wr_start(qp: *mut ibv_qp_ex) -> () {
        let batch = batch(qp)?;
        batch.lock.lock();
        batch.building().clear();
        Ok(())
    }

    /// `ibv_wr_abort`.
    hot fn wr_abort(qp: *mut ibv_qp_ex) -> () {
        let batch = batch(qp)?;
        batch.building().clear();
        batch.lock.unlock();
        Ok(())
    }

    /// `ibv_wr_complete`.
    hot fn wr_complete(qp: *mut ibv_qp_ex) -> Code {
        let batch = batch(qp)?;
        let result = post(look::<CQp>(qp.cast())?, batch.building());
        batch.lock.unlock();
        result
    }

    /// `ibv_wr_rdma_write`.
    hot fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) -> () {
        begin(qp, SendOp::Write { stag: rkey, to: remote_addr })
    }

    /// `ibv_wr_rdma_write_imm`.
    hot fn wr_rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, imm_data: __be32) -> () {
        let imm = imm_data.to_ne_bytes();
        begin(qp, SendOp::WriteImmediate { stag: rkey, to: remote_addr, imm })
    }

    /// `ibv_wr_send_imm`.
    hot fn wr_send_imm(qp: *mut ibv_qp_ex, imm_data: __be32) -> () {
        begin(qp, SendOp::SendImmediate { imm: imm_data.to_ne_bytes() })
    }

    /// `ibv_wr_rdma_read`.
    hot fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) -> () {
        begin(qp, SendOp::Read { stag: rkey, to: remote_addr, invalidate_local: false })
    }

    /// `ibv_wr_atomic_cmp_swp`.
    hot fn wr_atomic_cmp_swp(
        qp: *mut ibv_qp_ex,
        rkey: u32,
        remote_addr: u64,
        compare: u64,
        swap: u64,
    ) -> () {
        begin(qp, SendOp::CmpSwap { stag: rkey, to: remote_addr, compare, swap })
    }

    /// `ibv_wr_atomic_fetch_add`.
    hot fn wr_atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, add: u64) -> () {
        begin(qp, SendOp::FetchAdd { stag: rkey, to: remote_addr, add })
    }

    /// `ibv_wr_send`.
    hot fn wr_send(qp: *mut ibv_qp_ex) -> () {
        begin(qp, SendOp::Send { invalidate: None })
    }

    /// `ibv_wr_send_inv`.
    hot fn wr_send_inv(qp: *mut ibv_qp_ex, rkey: u32) -> () {
        begin(qp, SendOp::Send { invalidate: Some(rkey) })
    }

    /// `ibv_wr_local_inv`.
    hot fn wr_local_inv(qp: *mut ibv_qp_ex, rkey: u32) -> () {
        begin(qp, SendOp::LocalInvalidate { stag: rkey })
    }

    /// `ibv_wr_bind_mw`. A window that cannot be bound shows in `ibv_wr_complete`.
    hot fn wr_bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) -> () {
        let info = info.as_ref().ok_or_else(|| Failure::invalid("bind_info is NULL"));
        match info.and_then(|info| bind_request(mw, rkey, info)) {
            Ok(op) => begin(qp, op),
            Err(why) => {
                batch(qp)?.building().fail(why);
                Ok(())
            }
        }
    }

    /// `ibv_wr_set_ud_addr`.
    hot fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) -> () {
        batch(qp)?.building().set_destination(&look::<CAh>(ah)?.ah, remote_qpn, remote_qkey);
        Ok(())
    }

    /// `ibv_wr_set_sge`.
    hot fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) -> () {
        batch(qp)?.building().set_sges(&[Sge { addr, length, lkey }]);
        Ok(())
    }

    /// `ibv_wr_set_sge_list`.
    hot fn wr_set_sge_list(qp: *mut ibv_qp_ex, num_sge: usize, list: *const ibv_sge) -> () {
        let list = sges(list.cast_mut(), num_sge).ok_or_else(|| Failure::invalid("sg_list"))?;
        batch(qp)?.building().set_sges(list);
        Ok(())
    }

    /// `ibv_wr_set_inline_data`.
    hot fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) -> () {
        batch(qp)?.building().set_inline(std::iter::once((addr.cast_const().cast(), length)));
        Ok(())
    }

    /// `ibv_wr_set_inline_data_list`.
    hot fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, num_buf: usize, list: *const ibv_data_buf) -> () {
        // SAFETY: the list has that many.
        let piece = |i| unsafe { &*list.add(i) };
        let pieces = (0..num_buf).map(piece).map(|piece| (piece.addr.cast_const().cast(), piece.length));
        batch(qp)?.building().set_inline(pieces);
        Ok(())
    }
}

deferred! {
    deferred_wr_start = wr_start: (qp: *mut ibv_qp_ex) -> ();
    deferred_wr_abort = wr_abort: (qp: *mut ibv_qp_ex) -> ();
    deferred_wr_complete = wr_complete: (qp: *mut ibv_qp_ex) -> c_int;
}

fn post(pair: &CQp, building: &mut Building) -> Result<(), Failure> {
    match &pair.qp {
        QueuePair::Rc(qp) => qp.post_send_together(building.finish()?)?,
        QueuePair::Ud(qp) => qp.post_send_together(building.finish_datagrams()?)?,
        QueuePair::Rd(qp) => qp.post_send_together(building.finish_datagrams()?)?,
        QueuePair::Uc(qp) => qp.post_send_together(building.finish()?)?,
    }
    Ok(())
}
