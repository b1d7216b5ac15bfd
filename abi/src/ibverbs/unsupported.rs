//! Verbs that this device does not offer (yet). Each fails as its man page says for a device without it:
//! `EOPNOTSUPP`, by return value or by NULL and `errno`. Grouped by object, so that a group can move to its
//! own file when it is implemented.
//!
//! What verbs.h calls through `verbs_context` (work queues, flows, XRC domains, counters)
//! needs nothing here: those members are NULL, and the inline functions return the error.

use std::ffi::c_int;

use uwarp_abi_types::verbs::*;

use crate::convention::{Code, MinusOne};
use crate::entry;
use crate::failure::Failure;

const DM: &str = "device memory";
const DMAH: &str = "DMA handles";
const COUNTER: &str = "completion counters";

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
    /// ibv_query_comp_cntr_caps(3).
    fn _ibv_query_comp_cntr_caps(
        _context: *mut ibv_context,
        _caps: *mut ibv_comp_cntr_caps,
        _size: usize,
    ) -> Code {
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
