//! Multicast, which needs datagram port spaces.

use std::ffi::c_void;

use libc::sockaddr;
use uwarp_abi_types::rdmacm::{rdma_cm_id, rdma_cm_join_mc_attr_ex};

use crate::entry;
use crate::entry::{Failure, MinusOne};

const MULTICAST: &str = "multicast";

entry! {
    /// rdma_join_multicast(3).
    verb fn rdma_join_multicast(
        _id: *mut rdma_cm_id,
        _addr: *mut sockaddr,
        _context: *mut c_void,
    ) -> MinusOne {
        Err(Failure::unsupported(MULTICAST))
    }

    /// rdma_join_multicast_ex(3).
    verb fn rdma_join_multicast_ex(
        _id: *mut rdma_cm_id,
        _attr: *mut rdma_cm_join_mc_attr_ex,
        _context: *mut c_void,
    ) -> MinusOne {
        Err(Failure::unsupported(MULTICAST))
    }

    /// rdma_leave_multicast(3).
    verb fn rdma_leave_multicast(_id: *mut rdma_cm_id, _addr: *mut sockaddr) -> MinusOne {
        Err(Failure::unsupported(MULTICAST))
    }
}
