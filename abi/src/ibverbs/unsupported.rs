//! Verbs this device does not offer (yet). Each answers as its man page says a device without it does: `EOPNOTSUPP`, by
//! return value or by NULL and `errno`. Grouped by object, so that a group moves out when it is built.
//!
//! What verbs.h calls through `verbs_context` (work queues, flows, XRC domains, counters, device memory, thread and
//! parent domains) needs nothing here: those members are NULL, and the inline functions answer.

use std::ffi::{c_int, c_void};

use uwarp_abi_types::verbs::*;

use crate::entry::{Code, Failure, MinusOne};
use crate::{entry, slot};

const AH: &str = "address handles";
const MULTICAST: &str = "multicast";
const WINDOW: &str = "memory windows";
const DM: &str = "device memory";
const DMAH: &str = "DMA handles";
const BUFFER: &str = "buffers from the device";
const COUNTER: &str = "completion counters";

// Datagrams.
entry! {
    /// ibv_create_ah(3).
    verb fn ibv_create_ah(_pd: *mut ibv_pd, _attr: *mut ibv_ah_attr) -> *mut ibv_ah {
        Err(Failure::unsupported(AH))
    }
    /// ibv_create_ah_from_wc(3).
    verb fn ibv_create_ah_from_wc(
        _pd: *mut ibv_pd,
        _wc: *mut ibv_wc,
        _grh: *mut ibv_grh,
        _port: u8,
    ) -> *mut ibv_ah {
        Err(Failure::unsupported(AH))
    }
    /// ibv_create_ah_from_wc(3).
    verb fn ibv_init_ah_from_wc(
        _context: *mut ibv_context,
        _port: u8,
        _wc: *mut ibv_wc,
        _grh: *mut ibv_grh,
        _attr: *mut ibv_ah_attr,
    ) -> MinusOne {
        Err(Failure::unsupported(AH))
    }
    /// ibv_create_ah(3).
    verb fn ibv_destroy_ah(_ah: *mut ibv_ah) -> Code {
        Err(Failure::unsupported(AH))
    }
    /// Finds the Ethernet address of a RoCE destination, for vendor drivers.
    verb fn ibv_resolve_eth_l2_from_gid(
        _context: *mut ibv_context,
        _attr: *mut ibv_ah_attr,
        _mac: *mut u8,
        _vlan: *mut u16,
    ) -> Code {
        Err(Failure::unsupported(AH))
    }
    /// ibv_attach_mcast(3).
    verb fn ibv_attach_mcast(_qp: *mut ibv_qp, _gid: *const ibv_gid, _lid: u16) -> Code {
        Err(Failure::unsupported(MULTICAST))
    }
    /// ibv_attach_mcast(3).
    verb fn ibv_detach_mcast(_qp: *mut ibv_qp, _gid: *const ibv_gid, _lid: u16) -> Code {
        Err(Failure::unsupported(MULTICAST))
    }
}

// Memory windows.
slot! {
    /// ibv_alloc_mw(3).
    verb fn alloc_mw(_pd: *mut ibv_pd, _kind: ibv_mw_type) -> *mut ibv_mw {
        Err(Failure::unsupported(WINDOW))
    }
    /// ibv_bind_mw(3).
    verb fn bind_mw(_qp: *mut ibv_qp, _mw: *mut ibv_mw, _bind: *mut ibv_mw_bind) -> Code {
        Err(Failure::unsupported(WINDOW))
    }
    /// ibv_alloc_mw(3).
    verb fn dealloc_mw(_mw: *mut ibv_mw) -> Code {
        Err(Failure::unsupported(WINDOW))
    }
}

// Device memory, DMA handles, buffers.
entry! {
    /// ibv_import_dm(3).
    verb fn ibv_import_dm(_context: *mut ibv_context, _handle: u32) -> *mut ibv_dm {
        Err(Failure::unsupported(DM))
    }
    /// ibv_import_dm(3).
    verb fn ibv_unimport_dm(_dm: *mut ibv_dm) -> () {
        Ok(())
    }
    /// ibv_dm_export_dmabuf_fd(3).
    verb fn ibv_dm_export_dmabuf_fd(_dm: *mut ibv_dm) -> MinusOne<c_int> {
        Err(Failure::unsupported(DM))
    }
    /// ibv_alloc_dmah(3).
    verb fn ibv_alloc_dmah(_context: *mut ibv_context, _attr: *mut ibv_dmah_init_attr) -> *mut ibv_dmah {
        Err(Failure::unsupported(DMAH))
    }
    /// ibv_alloc_dmah(3).
    verb fn ibv_dealloc_dmah(_dmah: *mut ibv_dmah) -> Code {
        Err(Failure::unsupported(DMAH))
    }
    /// ibv_alloc_buf(3).
    verb fn ibv_alloc_buf(_pd: *mut ibv_pd, _size: usize, _buf: *mut *mut ibv_buf) -> *mut c_void {
        Err(Failure::unsupported(BUFFER))
    }
    /// ibv_alloc_buf(3).
    verb fn ibv_free_buf(_buf: *mut ibv_buf) -> () {
        Ok(())
    }
    /// ibv_alloc_buf(3).
    verb fn ibv_reg_buf_mr(
        _pd: *mut ibv_pd,
        _buf: *mut ibv_buf,
        _addr: *mut c_void,
        _length: usize,
        _access: c_int,
    ) -> *mut ibv_mr {
        Err(Failure::unsupported(BUFFER))
    }
    /// ibv_alloc_buf(3).
    verb fn ibv_export_buf_dmabuf_fd(_buf: *mut ibv_buf) -> MinusOne<c_int> {
        Err(Failure::unsupported(BUFFER))
    }
}

// Completion counters.
entry! {
    /// ibv_query_comp_cntr_caps(3).
    verb fn _ibv_query_comp_cntr_caps(
        _context: *mut ibv_context,
        _caps: *mut ibv_comp_cntr_caps,
        _size: usize,
    ) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    verb fn ibv_create_comp_cntr(
        _context: *mut ibv_context,
        _attr: *mut ibv_comp_cntr_init_attr,
    ) -> *mut ibv_comp_cntr {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    verb fn ibv_destroy_comp_cntr(_counter: *mut ibv_comp_cntr) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    verb fn ibv_set_comp_cntr(_counter: *mut ibv_comp_cntr, _value: u64) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    verb fn ibv_set_err_comp_cntr(_counter: *mut ibv_comp_cntr, _value: u64) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    verb fn ibv_inc_comp_cntr(_counter: *mut ibv_comp_cntr, _amount: u64) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    verb fn ibv_inc_err_comp_cntr(_counter: *mut ibv_comp_cntr, _amount: u64) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    verb fn ibv_read_comp_cntr(_counter: *mut ibv_comp_cntr, _value: *mut u64) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_create_comp_cntr(3).
    verb fn ibv_read_err_comp_cntr(_counter: *mut ibv_comp_cntr, _value: *mut u64) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
    /// ibv_qp_attach_comp_cntr(3).
    verb fn ibv_qp_attach_comp_cntr(
        _qp: *mut ibv_qp,
        _counter: *mut ibv_comp_cntr,
        _attr: *mut ibv_qp_attach_comp_cntr_attr,
    ) -> Code {
        Err(Failure::unsupported(COUNTER))
    }
}
