//! The `ibv_wr_*` functions (ibv_wr_post(3)): work requests built call by call, posted together by `ibv_wr_complete`.
//!
//! Inline data is copied when it is set. A mistake shows in `ibv_wr_complete`, which then posts nothing.

use std::cell::UnsafeCell;
use std::ffi::c_void;

use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;
use uwarp_abi_types::verbs::*;
use uwarp_rnic::{SendFlags, SendOp, SendWr, Sge, VerbsError};

use super::qp::CQp;
use crate::entry::{Code, Failure};
use crate::object::look;
use crate::slot;

/// Operations that `send_ops_flags` may ask for.
pub const SUPPORTED: u64 = (IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_LOCAL_INV
    | IBV_QP_EX_WITH_SEND_WITH_INV) as u64;

/// Work requests between `ibv_wr_start` and `ibv_wr_complete`.
pub struct Batch {
    lock: RawMutex,
    building: UnsafeCell<Building>,
}

// SAFETY: `building` is used by whoever holds `lock`.
unsafe impl Sync for Batch {}

#[derive(Default)]
struct Building {
    requests: Vec<Request>,
    sges: Vec<Sge>,
    /// Inline bytes; pieces of it are named by position until the batch is posted, as it may move while it grows.
    inline: Vec<u8>,
    failure: Option<Failure>,
}

struct Request {
    wr_id: u64,
    op: SendOp,
    flags: SendFlags,
    data: Data,
}

enum Data {
    /// A range of `sges`.
    Sges(std::ops::Range<usize>),
    /// A range of `inline`.
    Inline(std::ops::Range<usize>),
}

impl Building {
    fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.inline.clear();
        self.failure = None;
    }

    fn fail(&mut self, why: Failure) {
        self.failure.get_or_insert(why);
    }

    fn set(&mut self, data: Data) {
        match self.requests.last_mut() {
            Some(request) => request.data = data,
            None => self.fail(Failure::invalid("data without a work request")),
        }
    }

    fn set_inline(&mut self, start: usize) {
        let data = Data::Inline(start..self.inline.len());
        self.set(data);
    }
}

/// Fills the function pointers for the operations asked for; the others stay NULL.
pub fn fill(qp: &mut ibv_qp_ex, ops: u64) -> Batch {
    let wants = |op: u32| ops & u64::from(op) != 0;
    qp.wr_start = Some(wr_start);
    qp.wr_complete = Some(wr_complete);
    qp.wr_abort = Some(wr_abort);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
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
    if wants(IBV_QP_EX_WITH_LOCAL_INV) {
        qp.wr_local_inv = Some(wr_local_inv);
    }
    if wants(IBV_QP_EX_WITH_SEND_WITH_INV) {
        qp.wr_send_inv = Some(wr_send_inv);
    }
    Batch { lock: RawMutex::INIT, building: UnsafeCell::default() }
}

/// The batch, for a thread between `ibv_wr_start` and its end.
///
/// # Safety
/// `qp` is alive and was made for this interface; the caller holds the batch's lock.
#[allow(clippy::mut_from_ref, reason = "the lock makes it exclusive")]
unsafe fn building<'a>(qp: *mut ibv_qp_ex) -> Result<&'a mut Building, Failure> {
    // SAFETY: the caller's promise.
    let pair = unsafe { look::<CQp>(qp.cast()) }?;
    let batch = pair.batch.as_ref().ok_or_else(|| Failure::invalid("not made for ibv_wr functions"))?;
    // SAFETY: the caller holds the lock.
    Ok(unsafe { &mut *batch.building.get() })
}

/// Begins a work request with the identity and flags the program has put into the structure.
///
/// # Safety
/// As [`building`].
unsafe fn begin(qp: *mut ibv_qp_ex, op: SendOp) -> Result<(), Failure> {
    // SAFETY: the caller's promise; the members are the caller's own.
    let (building, wr_id, flags) = unsafe { (building(qp)?, (*qp).wr_id, (*qp).wr_flags) };
    // Inline is decided by the setter.
    let flags = SendFlags::from_bits_truncate(flags) - SendFlags::INLINE;
    building.requests.push(Request { wr_id, op, flags, data: Data::Sges(0..0) });
    Ok(())
}

slot! {
    /// `ibv_wr_start`.
    hot fn wr_start(qp: *mut ibv_qp_ex) -> () {
        let pair = look::<CQp>(qp.cast())?;
        let batch = pair.batch.as_ref().ok_or_else(|| Failure::invalid("not made for ibv_wr functions"))?;
        batch.lock.lock();
        (*batch.building.get()).clear();
        Ok(())
    }

    /// `ibv_wr_abort`.
    hot fn wr_abort(qp: *mut ibv_qp_ex) -> () {
        building(qp)?.clear();
        unlock(qp)
    }

    /// `ibv_wr_complete`.
    hot fn wr_complete(qp: *mut ibv_qp_ex) -> Code {
        let result = post(look::<CQp>(qp.cast())?, building(qp)?);
        unlock(qp)?;
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

    /// `ibv_wr_set_sge`.
    hot fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) -> () {
        let building = building(qp)?;
        let start = building.sges.len();
        building.sges.push(Sge { addr, length, lkey });
        building.set(Data::Sges(start..start + 1));
        Ok(())
    }

    /// `ibv_wr_set_sge_list`.
    hot fn wr_set_sge_list(qp: *mut ibv_qp_ex, num_sge: usize, list: *const ibv_sge) -> () {
        let building = building(qp)?;
        let start = building.sges.len();
        if num_sge > 0 {
            // The same layout, asserted where the plain lists are read.
            building.sges.extend_from_slice(std::slice::from_raw_parts(list.cast::<Sge>(), num_sge));
        }
        building.set(Data::Sges(start..start + num_sge));
        Ok(())
    }

    /// `ibv_wr_set_inline_data`.
    hot fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) -> () {
        let building = building(qp)?;
        let start = building.inline.len();
        append(building, addr, length);
        building.set_inline(start);
        Ok(())
    }

    /// `ibv_wr_set_inline_data_list`.
    hot fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, num_buf: usize, list: *const ibv_data_buf) -> () {
        let building = building(qp)?;
        let start = building.inline.len();
        for i in 0..num_buf {
            let piece = &*list.add(i);
            append(building, piece.addr, piece.length);
        }
        building.set_inline(start);
        Ok(())
    }
}

/// Copies inline data. Plainly too much of it is refused before it is copied; the queue pair's own limit is checked when
/// the request is posted.
///
/// # Safety
/// `addr` points to `length` bytes.
unsafe fn append(building: &mut Building, addr: *mut c_void, length: usize) {
    const LIMIT: usize = 1 << 20;
    if length > LIMIT {
        building.fail(Failure::invalid("inline data is longer than the queue pair allows"));
    } else if length > 0 {
        // SAFETY: the caller's promise; nobody else writes it while it is being copied, by the same promise.
        building.inline.extend_from_slice(unsafe { std::slice::from_raw_parts(addr.cast::<u8>(), length) });
    }
}

/// # Safety
/// The caller holds the lock and does not touch the batch any more.
unsafe fn unlock(qp: *mut ibv_qp_ex) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    let pair = unsafe { look::<CQp>(qp.cast()) }?;
    if let Some(batch) = &pair.batch {
        // SAFETY: the caller holds the lock.
        unsafe { batch.lock.unlock() };
    }
    Ok(())
}

fn post(pair: &CQp, building: &mut Building) -> Result<(), Failure> {
    if uwarp_driver::forked() {
        return Err(VerbsError::Forked.into());
    }
    if let Some(failure) = building.failure.take() {
        return Err(failure);
    }
    // Inline pieces become elements now that they do not move any more.
    let base = building.inline.as_ptr().addr();
    for request in &mut building.requests {
        if let Data::Inline(range) = &request.data {
            let length = u32::try_from(range.len()).map_err(|_| Failure::invalid("too much inline data"))?;
            let at = building.sges.len();
            building.sges.push(Sge { addr: (base + range.start) as u64, length, lkey: 0 });
            request.data = Data::Sges(at..at + 1);
            request.flags |= SendFlags::INLINE;
        }
    }
    let sges = &building.sges;
    let requests = building.requests.iter().map(|request| {
        let Data::Sges(range) = &request.data else { unreachable!("turned into elements above") };
        SendWr { wr_id: request.wr_id, op: request.op, flags: request.flags, sges: &sges[range.clone()] }
    });
    pair.qp.post_send(requests).map_err(|(_, error)| error.into())
}
