//! `<uwarpdv.h>`: what datagram queue pairs can do beyond the verbs (docs/adr/035).

use std::mem::{offset_of, size_of};
use std::net::Ipv6Addr;
use std::ptr;
use std::sync::Arc;

use uwarp_abi_types::verbs::{
    IBV_QPT_DRIVER, IBV_QPT_UD, ibv_context, ibv_gid, ibv_qp, ibv_qp_ex, ibv_qp_init_attr_ex, ibv_qp_type,
};
use uwarp_driver::{QueuePair, UdQp};
use uwarp_rnic::qp::{RdInit, Source};

use crate::convention::Code;
use crate::entry;
use crate::failure::{Failure, required};
use crate::ibverbs::context::Context;
use crate::ibverbs::create_qp::{Service, create_for};
use crate::ibverbs::qp::CQp;
use crate::ibverbs::query::gid_of;
use crate::ibverbs::wr_api;
use crate::object::look;

/// `UWARPDV_QP_MAX_MESSAGE`
const MAX_MESSAGE: u64 = 1 << 0;
/// `UWARPDV_QP_PEER_ERRORS`
const PEER_ERRORS: u64 = 1 << 1;

/// `struct uwarpdv_qp_attr`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct uwarpdv_qp_attr {
    pub comp_mask: u64,
    pub max_message: u32,
    pub peer_errors: u32,
}

/// `struct uwarpdv_peer_error`
#[repr(C)]
#[allow(missing_docs)]
pub struct uwarpdv_peer_error {
    pub wr_id: u64,
    pub remote_gid: ibv_gid,
    pub remote_qpn: u32,
    pub msn: u32,
    pub reason: u32,
    pub reserved: u32,
}

/// Members of the attributes: their bit in `comp_mask`, and how long a structure with them is.
const MEMBERS: [(u64, usize); 2] =
    [(MAX_MESSAGE, offset_of!(uwarpdv_qp_attr, peer_errors)), (PEER_ERRORS, size_of::<uwarpdv_qp_attr>())];

const _: () = {
    assert!(size_of::<uwarpdv_qp_attr>() == 16 && size_of::<uwarpdv_peer_error>() == 40);
    assert!(offset_of!(uwarpdv_peer_error, remote_gid) == 8);
    assert!(size_of::<uwarpdv_qp_semantics>() == 32);
    assert!(size_of::<uwarpdv_record>() == 40 && size_of::<uwarpdv_qp_init_attr>() == 40);
};

/// # Safety
/// `qp` is alive or NULL.
unsafe fn datagram_qp<'a>(qp: *mut ibv_qp) -> Result<&'a Arc<UdQp>, Failure> {
    // SAFETY: the caller's promise.
    match unsafe { &look::<CQp>(qp)?.qp } {
        QueuePair::Ud(ud) => Ok(ud),
        QueuePair::Rc(_) | QueuePair::Rd(_) | QueuePair::Uc(_) => {
            Err(Failure::unsupported("it is for queue pairs of unreliable datagrams"))
        }
    }
}

/// `enum uwarpdv_qp_type`
const QPT_RD: u32 = 1;
/// `enum uwarpdv_qp_create_flags`
const QP_GRH: u32 = 1 << 0;
/// What an ordered queue pair guarantees, as `enum uwarpdv_msg_order` counts it: all messages are delivered
/// in the order of their posts, but the answer to an RDMA Read holds the memory as it is when it is sent
/// (docs/rd.md section 6). So nothing is ordered behind a Read: not RDMA_RAR (5), RDMA_WAR (7), SAR (10), RAR
/// (14), WAR (16).
const ORDERS: u32 = {
    const ALL: u32 = (1 << 18) - 1;
    ALL & !(1 << 5 | 1 << 7 | 1 << 10 | 1 << 14 | 1 << 16)
};
/// Bytes of the longest message.
const LONGEST: u32 = i32::MAX as u32;
/// `UWARPDV_QP_USAGE_IMM_DATA_RQ`
const USAGE_IMM_DATA_RQ: u32 = 1 << 0;

fn no_record() -> Failure {
    Failure::new(libc::ENOENT, "the queue pair has no record of this name")
}

/// `UWARPDV_ANY_QPN`
const ANY_QPN: u32 = 0;

/// `struct uwarpdv_qp_init_attr`
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
#[allow(missing_docs)]
pub struct uwarpdv_qp_init_attr {
    pub comp_mask: u64,
    pub driver_qp_type: u32,
    pub flags: u32,
    pub msg_order: u64,
    pub job_key: u64,
    pub max_records: u32,
    pub reserved: u32,
}

/// `struct uwarpdv_qp_semantics`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct uwarpdv_qp_semantics {
    pub comp_mask: u32,
    pub msg_order: u32,
    pub max_rdma_raw_size: u32,
    pub max_rdma_war_size: u32,
    pub max_rdma_waw_size: u32,
    pub max_pdu: u32,
    pub imm_data_size: u32,
    pub usage_flags: u32,
}

/// Of the queue pairs of this type, as many members as `room` bytes hold; the mask names those.
fn semantics_of(driver_qp_type: u32, room: usize) -> Result<uwarpdv_qp_semantics, Failure> {
    if driver_qp_type != QPT_RD {
        return Err(Failure::unsupported("driver_qp_type must be UWARPDV_QPT_RD"));
    }
    // Each member behind the mask has its bit in order, and four bytes.
    let members = (room.min(size_of::<uwarpdv_qp_semantics>()) / size_of::<u32>()).saturating_sub(1);
    if members == 0 {
        return Err(Failure::invalid("inlen has no room for msg_order"));
    }
    Ok(uwarpdv_qp_semantics {
        comp_mask: (1 << members) - 1,
        msg_order: ORDERS,
        max_rdma_raw_size: LONGEST,
        max_rdma_war_size: 0,
        max_rdma_waw_size: LONGEST,
        max_pdu: 0,
        imm_data_size: u32::BITS,
        usage_flags: USAGE_IMM_DATA_RQ,
    })
}

/// `struct uwarpdv_record`
#[repr(C)]
#[allow(missing_docs)]
pub struct uwarpdv_record {
    pub remote_gid: ibv_gid,
    pub addr: u64,
    pub length: u32,
    pub rkey: u32,
    pub remote_qpn: u32,
    /// In network byte order.
    pub imm_data: u32,
}

/// `struct uwarpdv_range`
#[repr(C)]
#[allow(missing_docs)]
pub struct uwarpdv_range {
    pub offset: u32,
    pub length: u32,
}

/// Copies the attributes of a new queue pair. What the program's structure does not have is 0.
///
/// # Safety
/// `attr` is NULL or points to `inlen` bytes.
unsafe fn init_attributes(
    qp_type: ibv_qp_type,
    attr: *mut uwarpdv_qp_init_attr,
    inlen: u32,
) -> Result<Service, Failure> {
    let attr = required(attr, "attr")?;
    let (len, known) = (inlen as usize, size_of::<uwarpdv_qp_init_attr>());
    if len < offset_of!(uwarpdv_qp_init_attr, flags) {
        return Err(Failure::invalid("inlen has no room for driver_qp_type"));
    }
    let mut own = uwarpdv_qp_init_attr::default();
    // SAFETY: the caller's promise; `own` has room for so many bytes, and any bytes are a value of it.
    unsafe { ptr::copy_nonoverlapping(attr.cast::<u8>(), (&raw mut own).cast(), len.min(known)) };
    // SAFETY: the caller's promise.
    if !(known..len).all(|at| unsafe { attr.cast::<u8>().add(at).read() } == 0) {
        return Err(Failure::unsupported("members beyond those of this version that are not 0"));
    }
    if own.comp_mask != 0 {
        return Err(Failure::invalid("comp_mask names members that are unknown"));
    }
    if own.reserved != 0 {
        return Err(Failure::invalid("reserved must be 0"));
    }
    let (job_key, max_records) = (own.job_key, own.max_records);
    match (qp_type, own.driver_qp_type) {
        (IBV_QPT_DRIVER, QPT_RD) => {}
        (IBV_QPT_UD, 0) if own.flags == 0 && own.msg_order == 0 => {
            return Ok(Service::Recording { job_key, max_records });
        }
        (IBV_QPT_UD, 0) => return Err(Failure::invalid("flags and msg_order are not for IBV_QPT_UD")),
        (IBV_QPT_UD, _) => return Err(Failure::invalid("driver_qp_type must be 0 with IBV_QPT_UD")),
        (IBV_QPT_DRIVER, _) => return Err(Failure::unsupported("driver_qp_type must be UWARPDV_QPT_RD")),
        _ => return Err(Failure::invalid("qp_type must be IBV_QPT_DRIVER or IBV_QPT_UD")),
    }
    if own.flags & !QP_GRH != 0 {
        return Err(Failure::invalid("flags has unknown bits"));
    }
    if own.msg_order & !u64::from(ORDERS) != 0 {
        return Err(Failure::invalid("msg_order asks for what uwarpdv_query_qp_semantics does not offer"));
    }
    let (ordered, grh) = (own.msg_order != 0, own.flags & QP_GRH != 0);
    Ok(Service::Rd(RdInit { ordered, grh, job_key, max_records }))
}

/// Copies as much of a structure as the program has. A later version's is longer, and an earlier one's may
/// be shorter.
///
/// # Safety
/// `attr` is NULL or points to `inlen` bytes.
unsafe fn attributes(attr: *mut uwarpdv_qp_attr, inlen: u32) -> Result<uwarpdv_qp_attr, Failure> {
    let attr = required(attr, "attr")?;
    let len = (inlen as usize).min(size_of::<uwarpdv_qp_attr>());
    if len < size_of::<u64>() {
        return Err(Failure::invalid("inlen has no room for comp_mask"));
    }
    let mut own = uwarpdv_qp_attr { comp_mask: 0, max_message: 0, peer_errors: 0 };
    // SAFETY: the caller's promise; `own` has room for `len` bytes, and any bytes are a value of it.
    unsafe { ptr::copy_nonoverlapping(attr.cast::<u8>(), (&raw mut own).cast(), len) };
    let known = MEMBERS.iter().filter(|(_, end)| *end <= len).fold(0, |all, (bit, _)| all | bit);
    if own.comp_mask & !known != 0 {
        return Err(Failure::invalid("comp_mask names members that are unknown or beyond inlen"));
    }
    Ok(own)
}

entry! {
    /// uwarpdv_create_qp(3).
    fn uwarpdv_create_qp(
        context: *mut ibv_context,
        attr_ex: *mut ibv_qp_init_attr_ex,
        attr: *mut uwarpdv_qp_init_attr,
        inlen: u32,
    ) -> *mut ibv_qp {
        look::<Context>(context)?;
        let ex = &mut *required(attr_ex, "attr_ex")?;
        create_for(init_attributes(ex.qp_type, attr, inlen)?, ex)
    }

    /// uwarpdv_create_qp(3).
    fn uwarpdv_query_qp_semantics(
        context: *mut ibv_context,
        driver_qp_type: u32,
        semantics: *mut uwarpdv_qp_semantics,
        inlen: u32,
    ) -> Code {
        look::<Context>(context)?;
        let out = required(semantics, "semantics")?.cast::<u8>();
        let (room, known) = (inlen as usize, size_of::<uwarpdv_qp_semantics>());
        let own = semantics_of(driver_qp_type, room)?;
        // Whole members only.
        let len = room.min(known) / size_of::<u32>() * size_of::<u32>();
        ptr::copy_nonoverlapping((&raw const own).cast::<u8>(), out, len);
        out.add(len).write_bytes(0, room.saturating_sub(known));
        Ok(())
    }

    /// uwarpdv_create_qp(3). A mistake shows in `ibv_wr_complete`.
    fn uwarpdv_wr_set_job_key(qp: *mut ibv_qp_ex, job_key: u64) -> () {
        wr_api::set_job_key(qp, job_key)
    }

    /// uwarpdv_create_qp(3).
    fn uwarpdv_allow_source(
        qp: *mut ibv_qp,
        prefix: *const ibv_gid,
        prefix_bits: u32,
        remote_qpn: u32,
    ) -> Code {
        let pair = &look::<CQp>(qp)?.qp;
        let prefix = Ipv6Addr::from((*required(prefix.cast_mut(), "prefix")?).raw);
        let bits = u8::try_from(prefix_bits).map_err(|_| Failure::invalid("prefix_bits is above 128"))?;
        let qpn = (remote_qpn != ANY_QPN).then_some(remote_qpn);
        let source = Source { prefix: prefix.into(), bits, qpn };
        match pair {
            QueuePair::Rd(rd) => Ok(rd.allow_source(source)?),
            QueuePair::Ud(ud) => Ok(ud.allow_source(source)?),
            QueuePair::Rc(_) | QueuePair::Uc(_) => {
                Err(Failure::unsupported("it is for datagram queue pairs"))
            }
        }
    }

    /// uwarpdv_create_qp(3). A mistake shows in `ibv_wr_complete`.
    fn uwarpdv_wr_rdma_write_record(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, imm_data: u32) -> () {
        wr_api::begin_record(qp, rkey, remote_addr, imm_data.to_ne_bytes())
    }

    /// uwarpdv_create_qp(3).
    fn uwarpdv_get_record(
        qp: *mut ibv_qp,
        name: u64,
        record: *mut uwarpdv_record,
        inlen: u32,
        ranges: *mut uwarpdv_range,
        count: *mut u32,
    ) -> Code {
        let (out, count) = (required(record, "record")?, required(count, "count")?);
        // A later version's structure is longer: what it has beyond this one is 0.
        let Some(beyond) = (inlen as usize).checked_sub(size_of::<uwarpdv_record>()) else {
            return Err(Failure::invalid("inlen has no room for a record"));
        };
        let known = match &look::<CQp>(qp)?.qp {
            QueuePair::Ud(ud) => ud.record(name),
            QueuePair::Rd(rd) => rd.record(name),
            QueuePair::Rc(_) | QueuePair::Uc(_) => {
                return Err(Failure::unsupported("it is for datagram queue pairs"));
            }
        };
        let Some(known) = known else { return Err(no_record()) };
        let room = std::mem::replace(&mut *count, u32::try_from(known.valid.len()).unwrap_or(u32::MAX));
        if room < *count {
            return Err(Failure::new(libc::ENOSPC, "count has no room for all ranges"));
        }
        if *count > 0 {
            let ranges = required(ranges, "ranges")?;
            for (at, range) in known.valid.iter().enumerate() {
                let (offset, length) = (range.start, range.end - range.start);
                ranges.add(at).write(uwarpdv_range { offset, length });
            }
        }
        out.write(uwarpdv_record {
            remote_gid: gid_of(known.from),
            addr: known.to,
            length: known.len,
            rkey: known.stag,
            remote_qpn: known.source_qpn,
            imm_data: u32::from_ne_bytes(known.immediate),
        });
        out.add(1).cast::<u8>().write_bytes(0, beyond);
        Ok(())
    }

    /// uwarpdv_create_qp(3).
    fn uwarpdv_free_record(qp: *mut ibv_qp, name: u64) -> Code {
        let freed = match &look::<CQp>(qp)?.qp {
            QueuePair::Ud(ud) => ud.free_record(name),
            QueuePair::Rd(rd) => rd.free_record(name),
            QueuePair::Rc(_) | QueuePair::Uc(_) => {
                return Err(Failure::unsupported("it is for datagram queue pairs"));
            }
        };
        if freed { Ok(()) } else { Err(no_record()) }
    }

    /// uwarpdv(3).
    fn uwarpdv_query_qp(qp: *mut ibv_qp, attr: *mut uwarpdv_qp_attr, inlen: u32) -> Code {
        let ud = datagram_qp(qp)?;
        let mask = attributes(attr, inlen)?.comp_mask;
        let (max_message, peer_errors) = ud.extras();
        if mask & MAX_MESSAGE != 0 {
            (&raw mut (*attr).max_message).write(max_message);
        }
        if mask & PEER_ERRORS != 0 {
            (&raw mut (*attr).peer_errors).write(peer_errors.into());
        }
        Ok(())
    }

    /// uwarpdv(3).
    fn uwarpdv_modify_qp(qp: *mut ibv_qp, attr: *mut uwarpdv_qp_attr, inlen: u32) -> Code {
        let ud = datagram_qp(qp)?;
        let attr = attributes(attr, inlen)?;
        let max_message = (attr.comp_mask & MAX_MESSAGE != 0).then_some(attr.max_message);
        let peer_errors = (attr.comp_mask & PEER_ERRORS != 0).then_some(attr.peer_errors != 0);
        Ok(ud.set_extras(max_message, peer_errors)?)
    }

    /// uwarpdv(3).
    fn uwarpdv_get_peer_error(qp: *mut ibv_qp, error: *mut uwarpdv_peer_error, inlen: u32) -> Code {
        let ud = datagram_qp(qp)?;
        let out = required(error, "error")?;
        // A later version's structure is longer: what it has beyond this one is 0.
        let Some(beyond) = (inlen as usize).checked_sub(size_of::<uwarpdv_peer_error>()) else {
            return Err(Failure::invalid("inlen has no room for an error"));
        };
        let Some(error) = ud.take_error() else {
            return Err(Failure::new(libc::EAGAIN, "no peer has reported an error"));
        };
        let (layer, etype, code) = error.error.codes();
        out.write(uwarpdv_peer_error {
            wr_id: error.wr_id,
            remote_gid: gid_of(error.from),
            remote_qpn: error.remote_qpn,
            msn: error.msn,
            reason: u32::from(layer) << 12 | u32::from(etype) << 8 | u32::from(code),
            reserved: 0,
        });
        out.add(1).cast::<u8>().write_bytes(0, beyond);
        Ok(())
    }
}
