//! Shared receive queues, and the extended shapes of completion queues and queue pairs.

use std::ffi::c_int;
use std::mem::zeroed;
use std::ptr::null_mut;

use uwarp_abi::ibverbs::cq::create_cq_ex;
use uwarp_abi::ibverbs::create_qp::create_qp_ex;
use uwarp_abi::ibverbs::qp::ibv_qp_to_qp_ex;
use uwarp_abi::ibverbs::srq::{ibv_create_srq, ibv_destroy_srq, ibv_modify_srq, ibv_query_srq};
use uwarp_abi::rdmacm::connection::{rdma_establish, rdma_notify};
use uwarp_abi::rdmacm::qp::{rdma_create_srq, rdma_destroy_srq, rdma_init_qp_attr};
use uwarp_abi_types::verbs::*;

use super::{Bytes, MOST, Objects, busy, code, minus_one, pointer};

impl Objects {
    /// # Safety
    /// The lists hold live objects only.
    pub(super) unsafe fn extended_step(&mut self, which: u8, bytes: &mut Bytes<'_>) {
        // SAFETY: by the caller's promise.
        unsafe {
            match which {
                0 if self.srqs.len() < MOST => {
                    let Some(pd) = bytes.pick(&self.pds) else { return };
                    let mut attr: ibv_srq_init_attr = zeroed();
                    attr.attr = self.srq_attr(bytes);
                    self.srqs.extend(pointer("create_srq", ibv_create_srq(pd, &raw mut attr)));
                }
                1 => {
                    if let Some(srq) = bytes.take(&mut self.srqs)
                        && !busy("destroy_srq", ibv_destroy_srq(srq))
                    {
                        self.srqs.push(srq);
                    }
                }
                2 => {
                    let Some(srq) = self.any_srq(bytes) else { return };
                    let mut attr = self.srq_attr(bytes);
                    code("modify_srq", ibv_modify_srq(srq, &raw mut attr, (bytes.byte() % 5).into()));
                    assert_eq!(ibv_query_srq(srq, &raw mut attr), 0);
                    assert!(attr.srq_limit <= attr.max_wr, "a limit that cannot be reached");
                }
                3 | 4 => self.post_srq_recv(bytes),
                5 if self.cqs.len() < MOST => {
                    let channel = bytes.pick(&self.completions).unwrap_or(null_mut());
                    let mut attr: ibv_cq_init_attr_ex = zeroed();
                    (attr.cqe, attr.channel) = (bytes.size().min(1000), channel);
                    (attr.wc_flags, attr.flags) = (bytes.byte().into(), (bytes.byte() & 3).into());
                    attr.comp_mask = (bytes.byte() & 3).into();
                    let made = create_cq_ex(self.fixed.context, &raw mut attr);
                    self.cqs.extend(pointer("create_cq_ex", made.cast()));
                }
                6 => self.read_completions(bytes),
                7 if self.qps.len() < MOST => {
                    let Some(pd) = bytes.pick(&self.pds) else { return };
                    let Some(plain) = self.qp_attr(bytes) else { return };
                    let mut attr: ibv_qp_init_attr_ex = zeroed();
                    (attr.send_cq, attr.recv_cq, attr.srq) = (plain.send_cq, plain.recv_cq, plain.srq);
                    (attr.cap, attr.qp_type, attr.sq_sig_all) = (plain.cap, plain.qp_type, plain.sq_sig_all);
                    (attr.comp_mask, attr.pd) = (IBV_QP_INIT_ATTR_PD | u32::from(bytes.byte() & 0x40), pd);
                    // All that is there, or anything.
                    attr.send_ops_flags = match bytes.byte() {
                        0 => bytes.word().into(),
                        _ => 0x29F,
                    };
                    let made = create_qp_ex(self.fixed.context, &raw mut attr);
                    self.qps.extend(pointer("create_qp_ex", made));
                }
                8 | 9 => self.post_batch(bytes),
                10 => {
                    let Some(id) = bytes.pick(&self.ids) else { return };
                    match bytes.byte() % 4 {
                        // Another would hide the first. Without a domain it takes that of the id, which with
                        // librdmacm, too, is the program's last one, there or not.
                        0 if (*id).srq.is_null() && !self.pds_gone.contains(&(*id).pd) => {
                            let mut attr: ibv_srq_init_attr = zeroed();
                            attr.attr = self.srq_attr(bytes);
                            let pd = bytes.pick(&self.pds).unwrap_or(null_mut());
                            minus_one("id's create_srq", rdma_create_srq(id, pd, &raw mut attr));
                        }
                        // It does not say whether the queue was in use.
                        1 if (*id).qp.is_null() => rdma_destroy_srq(id),
                        2 => {
                            let (mut attr, mut mask): (ibv_qp_attr, c_int) = (zeroed(), 0);
                            attr.qp_state = u32::from(bytes.byte() % 8);
                            minus_one("init_qp_attr", rdma_init_qp_attr(id, &raw mut attr, &raw mut mask));
                        }
                        _ => {
                            minus_one("establish", rdma_establish(id));
                            minus_one("notify", rdma_notify(id, u32::from(bytes.byte() % 20)));
                        }
                    }
                }
                _ => {}
            }
        }
    }

    fn srq_attr(&self, bytes: &mut Bytes<'_>) -> ibv_srq_attr {
        ibv_srq_attr { max_wr: bytes.size(), max_sge: bytes.size() % 8, srq_limit: u32::from(bytes.byte()) }
    }

    /// One that was made directly, or an id's.
    unsafe fn any_srq(&self, bytes: &mut Bytes<'_>) -> Option<*mut ibv_srq> {
        // SAFETY: ids in the list are alive.
        let of_ids = self.ids.iter().map(|id| unsafe { (**id).srq }).filter(|srq| !srq.is_null());
        let all: Vec<_> = self.srqs.iter().copied().chain(of_ids).collect();
        bytes.pick(&all)
    }

    unsafe fn post_srq_recv(&mut self, bytes: &mut Bytes<'_>) {
        // SAFETY: lists of live structures in this frame; memory of the elements is this object's.
        unsafe {
            let Some(srq) = self.any_srq(bytes) else { return };
            let mut sges = self.sges(bytes);
            let mut wr = ibv_recv_wr {
                wr_id: 2,
                next: null_mut(),
                sg_list: sges.as_mut_ptr(),
                num_sge: sges.len() as c_int,
            };
            let mut bad = null_mut();
            let post = (*(*srq).context).ops.post_srq_recv.expect("post_srq_recv");
            if !code("post_srq_recv", post(srq, &raw mut wr, &raw mut bad)) {
                assert_eq!(bad, &raw mut wr);
            }
        }
    }

    unsafe fn read_completions(&self, bytes: &mut Bytes<'_>) {
        // SAFETY: the queue is alive; accessors are called between a poll that found something and the end.
        unsafe {
            let Some(cq) = bytes.pick(&self.cqs) else { return };
            let cq: *mut ibv_cq_ex = cq.cast();
            let Some(start) = (*cq).start_poll else { return };
            let mut attr = ibv_poll_cq_attr { comp_mask: (bytes.byte() / 250).into() };
            if start(cq, &raw mut attr) != 0 {
                return;
            }
            for _ in 0..=bytes.byte() % 8 {
                (*cq).read_opcode.expect("set")(cq);
                (*cq).read_byte_len.expect("set")(cq);
                (*cq).read_wc_flags.expect("set")(cq);
                (*cq).read_qp_num.expect("set")(cq);
                (*cq).read_imm_data.expect("set")(cq);
                if (*cq).next_poll.expect("set")(cq) != 0 {
                    break;
                }
            }
            (*cq).end_poll.expect("set")(cq);
        }
    }

    /// Work requests built call by call. Setters may come twice, or without a request.
    unsafe fn post_batch(&mut self, bytes: &mut Bytes<'_>) {
        // SAFETY: the queue pair is alive; elements and inline data are of this object's memory or this
        // frame.
        unsafe {
            let Some(qp) = self.any_qp(bytes) else { return };
            let qp = ibv_qp_to_qp_ex(qp);
            if qp.is_null() {
                return;
            }
            let keys: Vec<u32> = self.mrs.iter().map(|mr| (**mr).rkey).collect();
            let to = self.memory.as_ptr().expose_provenance() as u64 + bytes.number() as u64 * 64;
            (*qp).wr_start.expect("set")(qp);
            for _ in 0..bytes.byte() % 8 {
                let key = bytes.pick(&keys).unwrap_or(7);
                (*qp).wr_flags = u32::from(bytes.byte() & 0x3F);
                match bytes.byte() % 12 {
                    0 => _ = (*qp).wr_send.map(|f| f(qp)),
                    1 => _ = (*qp).wr_send_imm.map(|f| f(qp, 7)),
                    2 => _ = (*qp).wr_send_inv.map(|f| f(qp, key)),
                    3 => _ = (*qp).wr_rdma_write.map(|f| f(qp, key, to)),
                    4 => _ = (*qp).wr_rdma_write_imm.map(|f| f(qp, key, to, 7)),
                    5 => _ = (*qp).wr_rdma_read.map(|f| f(qp, key, to)),
                    6 => _ = (*qp).wr_local_inv.map(|f| f(qp, key)),
                    7 | 8 => {
                        let sges = self.sges(bytes);
                        (*qp).wr_set_sge_list.expect("set")(qp, sges.len(), sges.as_ptr());
                    }
                    9 => {
                        let length = bytes.number() * 4;
                        (*qp).wr_set_inline_data.expect("set")(qp, self.memory.as_mut_ptr().cast(), length);
                    }
                    10 => {
                        let mut piece: ibv_data_buf = zeroed();
                        (piece.addr, piece.length) = (self.memory.as_mut_ptr().cast(), bytes.number());
                        let pieces = [piece; 2];
                        (*qp).wr_set_inline_data_list.expect("set")(qp, pieces.len(), pieces.as_ptr());
                    }
                    _ => (*qp).wr_set_sge.expect("set")(qp, key, to, bytes.number() as u32),
                }
            }
            if bytes.byte() < 220 {
                code("wr_complete", (*qp).wr_complete.expect("set")(qp));
            } else {
                (*qp).wr_abort.expect("set")(qp);
            }
        }
    }
}
