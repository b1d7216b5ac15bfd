//! Conversions between the verbs' structures and the kernel's, which other libraries of rdma-core use.

use uwarp_abi_types::kern::{ib_user_path_rec, ib_uverbs_ah_attr, ib_uverbs_qp_attr};
use uwarp_abi_types::verbs::{ibv_ah_attr, ibv_gid, ibv_qp_attr, ibv_qp_cap, ibv_sa_path_rec};

use crate::entry;
use crate::failure::required;

fn ah_attr(src: &ib_uverbs_ah_attr) -> ibv_ah_attr {
    // SAFETY: plain C data.
    let mut dst: ibv_ah_attr = unsafe { crate::object::zeroed() };
    dst.grh.dgid = ibv_gid { raw: src.grh.dgid };
    dst.grh.flow_label = src.grh.flow_label;
    // The kernel's is wider; the verbs' table has 255 entries at most.
    dst.grh.sgid_index = src.grh.sgid_index;
    dst.grh.hop_limit = src.grh.hop_limit;
    dst.grh.traffic_class = src.grh.traffic_class;
    dst.dlid = src.dlid;
    dst.sl = src.sl;
    dst.src_path_bits = src.src_path_bits;
    dst.static_rate = src.static_rate;
    dst.is_global = src.is_global;
    dst.port_num = src.port_num;
    dst
}

/// Both structures name their members alike; `dgid` and `sgid` are bytes in one and a union in the other.
macro_rules! copy_members {
    ($dst:expr, $src:expr, $($member:ident),+ $(,)?) => {
        $( $dst.$member = $src.$member as _; )+
    };
}

/// The members of a path record that have the same name in both.
macro_rules! copy_path {
    ($dst:expr, $src:expr) => {
        copy_members!(
            $dst,
            $src,
            dlid,
            slid,
            raw_traffic,
            flow_label,
            hop_limit,
            traffic_class,
            reversible,
            numb_path,
            pkey,
            sl,
            mtu_selector,
            mtu,
            rate_selector,
            rate,
            packet_life_time_selector,
            packet_life_time,
            preference,
        )
    };
}

entry! {
    /// Address vector, from the kernel's structure.
    fn ibv_copy_ah_attr_from_kern(dst: *mut ibv_ah_attr, src: *mut ib_uverbs_ah_attr) -> () {
        *required(dst, "dst")? = ah_attr(&*required(src, "src")?);
        Ok(())
    }

    /// Queue pair attributes, from the kernel's structure. The state is not among them.
    fn ibv_copy_qp_attr_from_kern(dst: *mut ibv_qp_attr, src: *mut ib_uverbs_qp_attr) -> () {
        let (dst, src) = (&mut *required(dst, "dst")?, &*required(src, "src")?);
        copy_members!(
            dst,
            src,
            cur_qp_state,
            path_mtu,
            path_mig_state,
            qkey,
            rq_psn,
            sq_psn,
            dest_qp_num,
            qp_access_flags,
            pkey_index,
            alt_pkey_index,
            en_sqd_async_notify,
            sq_draining,
            max_rd_atomic,
            max_dest_rd_atomic,
            min_rnr_timer,
            port_num,
            timeout,
            retry_cnt,
            rnr_retry,
            alt_port_num,
            alt_timeout,
        );
        dst.cap = ibv_qp_cap {
            max_send_wr: src.max_send_wr,
            max_recv_wr: src.max_recv_wr,
            max_send_sge: src.max_send_sge,
            max_recv_sge: src.max_recv_sge,
            max_inline_data: src.max_inline_data,
        };
        dst.ah_attr = ah_attr(&src.ah_attr);
        dst.alt_ah_attr = ah_attr(&src.alt_ah_attr);
        Ok(())
    }

    /// Path record, from the kernel's structure.
    fn ibv_copy_path_rec_from_kern(dst: *mut ibv_sa_path_rec, src: *mut ib_user_path_rec) -> () {
        let (dst, src) = (&mut *required(dst, "dst")?, &*required(src, "src")?);
        dst.dgid = ibv_gid { raw: src.dgid };
        dst.sgid = ibv_gid { raw: src.sgid };
        copy_path!(dst, src);
        Ok(())
    }

    /// Path record, to the kernel's structure.
    fn ibv_copy_path_rec_to_kern(dst: *mut ib_user_path_rec, src: *mut ibv_sa_path_rec) -> () {
        let (dst, src) = (&mut *required(dst, "dst")?, &*required(src, "src")?);
        dst.dgid = src.dgid.raw;
        dst.sgid = src.sgid.raw;
        copy_path!(dst, src);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_record_survives_the_way_there_and_back() {
        // SAFETY: plain C data.
        let (mut src, mut kern, mut dst): (ibv_sa_path_rec, ib_user_path_rec, ibv_sa_path_rec) =
            unsafe { (crate::object::zeroed(), crate::object::zeroed(), crate::object::zeroed()) };
        src.dgid = ibv_gid { raw: [7; 16] };
        src.dlid = 0x1234;
        src.mtu = 4;
        src.rate = 3;
        src.packet_life_time = 12;
        src.preference = 9;
        // SAFETY: valid structures.
        unsafe {
            ibv_copy_path_rec_to_kern(&raw mut kern, &raw mut src);
            ibv_copy_path_rec_from_kern(&raw mut dst, &raw mut kern);
            assert_eq!(dst.dgid.raw, [7; 16]);
        }
        let members = |r: &ibv_sa_path_rec| (r.dlid, r.mtu, r.rate, r.packet_life_time, r.preference);
        assert_eq!(members(&dst), members(&src));
    }
}
