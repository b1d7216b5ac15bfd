//! Verbs that this device does not offer (yet). Each fails as its man page says for a device without it:
//! `EOPNOTSUPP`, by return value or by NULL and `errno`. Grouped by object, so that a group can move to its
//! own file when it is implemented.
//!
//! What verbs.h calls through `verbs_context` (work queues, flows, XRC domains, counters) is filled as
//! rdma-core's table of defaults is (libibverbs/dummy_ops.c): inline functions of older headers answer
//! `ENOSYS` where a member is NULL, and that of `ibv_close_xrcd` calls it.

use std::ffi::c_int;
use std::mem::transmute;

use uwarp_abi_types::verbs::*;

use crate::convention::{Code, MinusOne};
use crate::entry;
use crate::failure::Failure;
use crate::private::{uwarp_unsupported_code, uwarp_unsupported_minus_one, uwarp_unsupported_pointer};

const DM: &str = "sharing device memory";
const DMAH: &str = "DMA handles";
const COUNTER: &str = "completion counters";

/// Puts one of the functions below, which read no arguments, into members of other types.
macro_rules! put {
    ($function:ident in $table:ident: $($member:ident)*) => {
        // SAFETY: C leaves a function's arguments to its caller, and the result is the same: a number in the
        // lower half of a register, or NULL.
        $( $table.$member = Some(unsafe { transmute($function as *const ()) }); )*
    };
}

/// What the device does not offer. (`post_srq_ops` stays NULL: its inline function then says at which work
/// request it ended, too.)
#[allow(clippy::missing_transmute_annotations, reason = "the members' own types")]
pub fn fill(table: &mut verbs_context) {
    put! { uwarp_unsupported_code in table:
        attach_counters_point_flow read_counters destroy_counters
        ibv_destroy_flow ABI_placeholder2 modify_flow_action_esp destroy_flow_action
        modify_cq modify_qp_rate_limit get_srq_num close_xrcd
        modify_wq destroy_wq destroy_rwq_ind_table dealloc_dmah
    }
    put! { uwarp_unsupported_pointer in table:
        create_counters ibv_create_flow ABI_placeholder1 create_flow_action_esp
        alloc_null_mr open_qp open_xrcd create_wq create_rwq_ind_table alloc_dmah
    }
    put! { uwarp_unsupported_minus_one in table: dm_export_dmabuf_fd }
}

// Device memory, DMA handles.
entry! {
    /// ibv_import_dm(3).
    fn ibv_import_dm(_context: *mut ibv_context, _handle: u32) -> *mut ibv_dm {
        Err(Failure::unsupported(DM))
    }
    /// ibv_import_dm(3).
    fn ibv_unimport_dm(_dm: *mut ibv_dm) -> () {
        Ok(())
    }
    /// ibv_dm_export_dmabuf_fd(3).
    fn ibv_dm_export_dmabuf_fd(_dm: *mut ibv_dm) -> MinusOne<c_int> {
        Err(Failure::unsupported(DM))
    }
    /// ibv_alloc_dmah(3).
    fn ibv_alloc_dmah(_context: *mut ibv_context, _attr: *mut ibv_dmah_init_attr) -> *mut ibv_dmah {
        Err(Failure::unsupported(DMAH))
    }
    /// ibv_alloc_dmah(3).
    fn ibv_dealloc_dmah(_dmah: *mut ibv_dmah) -> Code {
        Err(Failure::unsupported(DMAH))
    }
}

// Completion counters.
entry! {
    /// ibv_query_comp_cntr_caps(3). For programs that do not look at the error: nothing can be counted.
    fn _ibv_query_comp_cntr_caps(
        _context: *mut ibv_context,
        caps: *mut ibv_comp_cntr_caps,
        size: usize,
    ) -> Code {
        if !caps.is_null() {
            std::ptr::write_bytes(caps.cast::<u8>(), 0, size);
        }
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    fn ibv_create_comp_cntr(
        _context: *mut ibv_context,
        _attr: *mut ibv_comp_cntr_init_attr,
    ) -> *mut ibv_comp_cntr {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    fn ibv_destroy_comp_cntr(_counter: *mut ibv_comp_cntr) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    fn ibv_set_comp_cntr(_counter: *mut ibv_comp_cntr, _value: u64) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    fn ibv_set_err_comp_cntr(_counter: *mut ibv_comp_cntr, _value: u64) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    fn ibv_inc_comp_cntr(_counter: *mut ibv_comp_cntr, _amount: u64) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    fn ibv_inc_err_comp_cntr(_counter: *mut ibv_comp_cntr, _amount: u64) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    fn ibv_read_comp_cntr(_counter: *mut ibv_comp_cntr, _value: *mut u64) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    fn ibv_read_err_comp_cntr(_counter: *mut ibv_comp_cntr, _value: *mut u64) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_qp_attach_comp_cntr(3).
    fn ibv_qp_attach_comp_cntr(
        _qp: *mut ibv_qp,
        _counter: *mut ibv_comp_cntr,
        _attr: *mut ibv_qp_attach_comp_cntr_attr,
    ) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
}
