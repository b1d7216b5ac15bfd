//! The private interface between libibverbs and vendor drivers: the part that they read.
//!
//! Vendor libraries that a program loads (`libmlx5.so.1`, `libefa.so.1`) treat every `ibv_device` as the
//! first member of a driver device and compare its operations with their own (`mlx5dv_is_supported`). So ours
//! has that shape: first member, operations pointer, and room behind them for the members of every version of
//! rdma-core.

#![allow(non_camel_case_types)]

use crate::verbs::ibv_device;

/// Driver operations: a table of ours alone. Vendor libraries recognise foreign devices by its address; its
/// content is never used. Larger than the structure of any rdma-core version.
#[repr(C, align(64))]
pub struct verbs_device_ops {
    /// Name of the driver, a C string.
    pub name: *const libc::c_char,
    /// Null function pointers and zero numbers.
    pub reserved: [usize; 31],
}

// SAFETY: the table is never written and the name points to a string constant.
unsafe impl Sync for verbs_device_ops {}

/// A device as drivers see it: the public part, and what libibverbs keeps behind it (operations, reference
/// count, list entry, sysfs device, capabilities; 56 bytes in rdma-core 44 to 65).
#[repr(C)]
pub struct verbs_device {
    /// The public part.
    pub device: ibv_device,
    /// Compared by vendor libraries with their own.
    pub ops: *const verbs_device_ops,
    /// Zero: reference count, list entry, sysfs device, capabilities and whatever a later version adds.
    pub reserved: [usize; 31],
}

// SAFETY: never written after it was made; `ops` points to a constant.
unsafe impl Send for verbs_device {}
// SAFETY: as above.
unsafe impl Sync for verbs_device {}

const _: () = {
    assert!(std::mem::offset_of!(verbs_device, ops) == std::mem::size_of::<ibv_device>());
};
