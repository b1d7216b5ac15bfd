//! A queue pair of the libraries, as what a stream runs over.

#![allow(unsafe_code)]

use std::collections::VecDeque;
use std::ffi::c_int;
use std::mem::{MaybeUninit, zeroed};
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::null_mut;
use std::sync::Arc;

use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_abi_types::rdmacm::rdma_cm_id;
use uwarp_abi_types::verbs::{
    IBV_QPT_RC, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_SEND, ibv_comp_channel, ibv_context, ibv_cq,
    ibv_device_attr, ibv_mr, ibv_pd, ibv_qp, ibv_qp_cap, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr,
    ibv_send_wr__bindgen_ty_2, ibv_send_wr__bindgen_ty_2__bindgen_ty_1, ibv_sge, ibv_wc,
};
use uwarp_mem::MemSeg;
use uwarp_process::Mutex;
use uwarp_rnic::{Access, RecvWr, SendFlags, SendOp, SendWr, Sge, Wc, WcFlags, WcOpcode, WcStatus};
use uwarp_rsocket::MOST_PIECES;
use uwarp_rsocket::machine::{Carrier, Sizes};
use uwarp_rsocket::options::Options;
use uwarp_rsocket::stream::verbs::{Needs, Region, Verbs};

use crate::engine::Engine;
use crate::foreign::{Foreign, last};
use crate::waiting::Waiters;

/// Completions taken by one call.
const BATCH: usize = 32;
/// Reads at a time in each direction, if the device does so many.
const READS: c_int = 16;

/// What a device can do.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pieces: usize,
    read_pieces: usize,
    requests: u32,
    /// Reads that it answers at a time, and that it asks for.
    pub answers: u8,
    pub reads: u8,
}

impl Limits {
    /// Those of a device.
    pub fn of(foreign: &Foreign, context: *mut ibv_context) -> Result<Self, Errno> {
        if context.is_null() {
            return Err(Errno::NODEV);
        }
        let mut attr = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: an open device, and a place for its attributes, of which any bytes are a value.
        let attr = unsafe {
            if (foreign.ibv_query_device)(context, attr.as_mut_ptr()) != 0 {
                return Err(Errno::NODEV);
            }
            attr.assume_init()
        };
        let number = |value: c_int| u32::try_from(value).unwrap_or(0);
        let most = |value: c_int| (number(value) as usize).clamp(1, MOST_PIECES);
        Ok(Self {
            pieces: most(attr.max_sge),
            read_pieces: most(attr.max_sge_rd.min(attr.max_sge)),
            requests: number(attr.max_qp_wr).min(number(attr.max_cqe) / 2),
            answers: attr.max_qp_rd_atom.clamp(1, READS) as u8,
            reads: attr.max_qp_init_rd_atom.clamp(1, READS) as u8,
        })
    }

    /// The sizes of a stream.
    pub fn sizes(&self) -> Sizes {
        // Work requests of descriptors and of the program are beside those of the stream.
        Options::new().sizes(self.requests.saturating_sub(256).max(64))
    }
}

/// What was made of the libraries for one connection.
pub struct Parts {
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    channel: *mut ibv_comp_channel,
    cq: *mut ibv_cq,
}

// SAFETY: the libraries' objects may be used by any thread.
unsafe impl Send for Parts {}

impl Parts {
    /// The id, or NULL.
    pub fn id(&self) -> *mut rdma_cm_id {
        self.id
    }

    /// Destroys all of it, in the engine's thread: nobody takes an event of the id meanwhile. What is left is
    /// a domain with memory that the program has registered: to be tried again.
    pub fn destroy(mut self, foreign: &Foreign) -> Option<Self> {
        // SAFETY: nothing uses them any more, and each is destroyed once, after what depends on it. All
        // events of the queue have been acknowledged where they were taken.
        unsafe {
            if !self.id.is_null() {
                if !(*self.id).qp.is_null() {
                    (foreign.rdma_destroy_qp)(self.id);
                }
                (foreign.rdma_destroy_id)(self.id);
                self.id = null_mut();
            }
            if !self.cq.is_null() {
                (foreign.ibv_destroy_cq)(self.cq);
                self.cq = null_mut();
            }
            if !self.channel.is_null() {
                (foreign.ibv_destroy_comp_channel)(self.channel);
                self.channel = null_mut();
            }
            if !self.pd.is_null() && (foreign.ibv_dealloc_pd)(self.pd) != 0 {
                return Some(self);
            }
        }
        None
    }
}

/// A queue pair of the libraries.
pub struct Provider {
    foreign: &'static Foreign,
    engine: &'static Engine,
    parts: Option<Parts>,
    qp: *mut ibv_qp,
    cq: *mut ibv_cq,
    pd: *mut ibv_pd,
    channel: *mut ibv_comp_channel,
    limits: Limits,
    /// Completions that were taken to see whether there are any.
    early: Mutex<VecDeque<Wc>, 29>,
    waiters: Arc<Waiters>,
}

// SAFETY: the libraries' objects may be used by any threads at the same time.
unsafe impl Send for Provider {}
// SAFETY: as above.
unsafe impl Sync for Provider {}

impl Provider {
    /// Makes the queue pair of an id that has a device. The id is this one's from then on, also after an
    /// error.
    pub fn new(
        engine: &'static Engine,
        id: *mut rdma_cm_id,
        needs: Needs,
        limits: Limits,
        waiters: &Arc<Waiters>,
    ) -> Result<Self, Errno> {
        let foreign = engine.foreign();
        let parts = Parts { id, pd: null_mut(), channel: null_mut(), cq: null_mut() };
        let mut provider = Self {
            foreign,
            engine,
            parts: Some(parts),
            qp: null_mut(),
            cq: null_mut(),
            pd: null_mut(),
            channel: null_mut(),
            limits,
            early: Mutex::default(),
            waiters: Arc::clone(waiters),
        };
        let Some(parts) = provider.parts.as_mut() else { return Err(Errno::NOMEM) };
        let depth = (needs.sends + needs.receives) as c_int;
        // SAFETY: an id with a device; each object is made for the next one.
        unsafe {
            let context = (*id).verbs;
            parts.pd = (foreign.ibv_alloc_pd)(context);
            parts.channel = (foreign.ibv_create_comp_channel)(context);
            if parts.pd.is_null() || parts.channel.is_null() {
                return Err(last());
            }
            let fd = BorrowedFd::borrow_raw((*parts.channel).fd);
            rustix::io::ioctl_fionbio(fd, true)?;
            parts.cq = (foreign.ibv_create_cq)(context, depth, null_mut(), parts.channel, 0);
            if parts.cq.is_null() {
                return Err(last());
            }
            let mut init = ibv_qp_init_attr {
                qp_context: null_mut(),
                send_cq: parts.cq,
                recv_cq: parts.cq,
                srq: null_mut(),
                cap: ibv_qp_cap {
                    max_send_wr: needs.sends,
                    max_recv_wr: needs.receives,
                    max_send_sge: needs.pieces.min(limits.pieces as u32),
                    max_recv_sge: 1,
                    max_inline_data: needs.inline,
                },
                qp_type: IBV_QPT_RC,
                sq_sig_all: 1,
            };
            if (foreign.rdma_create_qp)(id, parts.pd, &raw mut init) != 0 {
                return Err(last());
            }
            provider.qp = (*id).qp;
        }
        (provider.cq, provider.pd, provider.channel) = (parts.cq, parts.pd, parts.channel);
        Ok(provider)
    }

    /// For the program.
    pub fn qp(&self) -> *mut ibv_qp {
        self.qp
    }

    /// Readable when a completion has come since [`Self::arm`].
    pub fn fd(&self) -> RawFd {
        // SAFETY: it lives as long as this.
        unsafe { (*self.channel).fd }
    }

    /// The next completion makes [`Self::fd`] readable.
    pub fn arm(&self) {
        // SAFETY: the queue lives as long as this. Every provider has the function.
        unsafe {
            if let Some(arm) = (*(*self.cq).context).ops.req_notify_cq {
                arm(self.cq, 0);
            }
        }
    }

    /// Takes what has made [`Self::fd`] readable. Other threads may sleep on it, and will not see it any
    /// more: they are woken.
    pub fn take_events(&self) {
        let mut taken = 0;
        let (mut cq, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel lives as long as this, and does not block.
        while unsafe { (self.foreign.ibv_get_cq_event)(self.channel, &raw mut cq, &raw mut context) } == 0 {
            taken += 1;
        }
        if taken > 0 {
            // SAFETY: so many events of this queue were taken.
            unsafe { (self.foreign.ibv_ack_cq_events)(self.cq, taken) };
            self.waiters.wake();
        }
    }

    /// Ends the connection: the peer gets what was sent, and then its end.
    pub fn disconnect(&self) {
        if let Some(parts) = &self.parts {
            // SAFETY: the id lives as long as this. Without a connection the call fails.
            unsafe { (self.foreign.rdma_disconnect)(parts.id) };
        }
    }

    fn take(&self, most: usize, mut each: impl FnMut(Wc)) -> usize {
        let mut batch = [const { MaybeUninit::<ibv_wc>::uninit() }; BATCH];
        let most = most.min(BATCH);
        // SAFETY: there is room for as many; those that the call says are filled in.
        unsafe {
            let Some(poll) = (*(*self.cq).context).ops.poll_cq else { return 0 };
            let found = poll(self.cq, most as c_int, batch.as_mut_ptr().cast::<ibv_wc>());
            let found = usize::try_from(found).unwrap_or(0).min(most);
            batch.iter().take(found).for_each(|wc| each(completion(wc.assume_init_ref())));
            found
        }
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        if let Some(parts) = self.parts.take() {
            self.engine.bury(parts);
        }
    }
}

/// A completion in this library's form. What it has no name for is an error like any other.
fn completion(wc: &ibv_wc) -> Wc {
    use WcStatus::*;
    const STATUSES: [WcStatus; 9] = [
        LocLenErr,
        LocQpOpErr,
        LocProtErr,
        WrFlushErr,
        LocAccessErr,
        RemInvReqErr,
        RemAccessErr,
        RetryExcErr,
        RespTimeoutErr,
    ];
    let known = STATUSES.into_iter().find(|status| *status as u32 == wc.status);
    Wc {
        wr_id: wc.wr_id,
        status: if wc.status == Success as u32 { Success } else { known.unwrap_or(GeneralErr) },
        opcode: match wc.opcode {
            1 => WcOpcode::RdmaWrite,
            2 => WcOpcode::RdmaRead,
            128 => WcOpcode::Recv,
            _ => WcOpcode::Send,
        },
        vendor_err: wc.vendor_err,
        byte_len: wc.byte_len,
        imm_or_inv: 0,
        qp_num: wc.qp_num,
        src_qp: 0,
        flags: WcFlags::empty(),
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    }
}

fn list(sges: &[Sge]) -> *mut ibv_sge {
    // The layouts are the same (uwarp_iwarp_mode), and no provider writes it.
    sges.as_ptr().cast::<ibv_sge>().cast_mut()
}

impl Verbs for Provider {
    type Region = Registered;

    fn register(&self, memory: MemSeg, access: Access) -> Result<Registered, Errno> {
        let at = std::ptr::with_exposed_provenance_mut(memory.addr as usize);
        // SAFETY: the domain lives as long as this. Memory that is not mapped makes the call fail.
        let mr = unsafe { (self.foreign.ibv_reg_mr)(self.pd, at, memory.len, access.bits() as c_int) };
        if mr.is_null() { Err(last()) } else { Ok(Registered { mr, foreign: self.foreign }) }
    }

    /// What the program has registered, only the library knows with which it did: the work request will fail.
    fn check(&self, _: &[Sge], _: Access) -> Result<(), Errno> {
        Ok(())
    }

    fn most_pieces(&self) -> usize {
        self.limits.pieces
    }

    fn most_read_pieces(&self) -> usize {
        self.limits.read_pieces
    }

    fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<(), Errno> {
        // SAFETY: zeros are a value of it.
        let mut list_of: SmallVec<[ibv_send_wr; 2]> = wrs.iter().map(|_| unsafe { zeroed() }).collect();
        for (to, wr) in list_of.iter_mut().zip(wrs) {
            let (opcode, remote) = match wr.op {
                SendOp::Send { invalidate: None } => (IBV_WR_SEND, None),
                SendOp::Write { stag, to } => (IBV_WR_RDMA_WRITE, Some((to, stag))),
                SendOp::Read { stag, to, .. } => (IBV_WR_RDMA_READ, Some((to, stag))),
                // A stream that sends messages as Sends has no others.
                _ => return Err(Errno::OPNOTSUPP),
            };
            let flags = wr.flags - SendFlags::RELAXED;
            (to.wr_id, to.opcode, to.send_flags) = (wr.wr_id, opcode, flags.bits());
            (to.sg_list, to.num_sge) = (list(wr.sges), wr.sges.len() as c_int);
            if let Some((remote_addr, rkey)) = remote {
                let rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey };
                to.wr = ibv_send_wr__bindgen_ty_2 { rdma };
            }
        }
        for at in (1..list_of.len()).rev() {
            let next = &raw mut list_of[at];
            list_of[at - 1].next = next;
        }
        let mut bad = null_mut();
        // SAFETY: the queue pair lives as long as this; the list and what it names are alive during the call.
        match unsafe { (*(*self.qp).context).ops.post_send } {
            // SAFETY: as above.
            Some(post) => errno(unsafe { post(self.qp, list_of.as_mut_ptr(), &raw mut bad) }),
            None => Err(Errno::OPNOTSUPP),
        }
    }

    fn post_recv<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), Errno> {
        let mut list_of: SmallVec<[ibv_recv_wr; BATCH]> = wrs
            .map(|wr| ibv_recv_wr {
                wr_id: wr.wr_id,
                next: null_mut(),
                sg_list: list(wr.sges),
                num_sge: wr.sges.len() as c_int,
            })
            .collect();
        for at in (1..list_of.len()).rev() {
            let next = &raw mut list_of[at];
            list_of[at - 1].next = next;
        }
        let mut bad = null_mut();
        // SAFETY: as for sending.
        match unsafe { (*(*self.qp).context).ops.post_recv } {
            Some(post) if !list_of.is_empty() => {
                // SAFETY: as above.
                errno(unsafe { post(self.qp, list_of.as_mut_ptr(), &raw mut bad) })
            }
            Some(_) => Ok(()),
            None => Err(Errno::OPNOTSUPP),
        }
    }

    fn poll(&self, most: usize, _: bool, mut take: impl FnMut(Wc)) -> usize {
        let mut early = self.early.lock();
        let first = most.min(early.len());
        early.drain(..first).for_each(&mut take);
        drop(early);
        if first == most { first } else { first + self.take(most - first, take) }
    }

    fn is_empty(&self) -> bool {
        let mut early = self.early.lock();
        if early.is_empty() {
            self.take(1, |wc| early.push_back(wc));
        }
        early.is_empty()
    }

    fn carrier(&self) -> Carrier {
        // Every provider has Sends.
        Carrier::Send
    }

    fn wake(&self) {
        self.waiters.wake();
    }

    fn end(&self) {
        self.disconnect();
    }

    fn number(&self) -> u32 {
        // SAFETY: it lives as long as this.
        unsafe { (*self.qp).qp_num }
    }
}

fn errno(code: c_int) -> Result<(), Errno> {
    if code == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(code.abs())) }
}

/// Memory that is registered with the libraries.
pub struct Registered {
    mr: *mut ibv_mr,
    foreign: &'static Foreign,
}

// SAFETY: as of `Parts`.
unsafe impl Send for Registered {}
// SAFETY: only its keys are read.
unsafe impl Sync for Registered {}

impl Region for Registered {
    fn local_key(&self) -> u32 {
        // SAFETY: it lives as long as this.
        unsafe { (*self.mr).lkey }
    }

    fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.mr).rkey }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered in this library, and used no longer.
        unsafe { (self.foreign.ibv_dereg_mr)(self.mr) };
    }
}
