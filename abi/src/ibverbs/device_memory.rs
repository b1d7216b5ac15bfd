//! Device memory. The device is this process, so it is memory that the program reaches only by these calls
//! and by regions of it, as on an adapter.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::{c_uint, c_void};
use std::ptr::NonNull;

use uwarp_abi_types::verbs::*;
use uwarp_driver::quota::Place;
use uwarp_rnic::Access;

use super::context::Context;
use super::mr::{self, Backing};
use crate::convention::{Code, PlainCode};
use crate::failure::{Failure, required};
use crate::object::{self, Object, Use, Users, Visible, look};
use crate::slot;

/// All that the device has, in bytes.
pub const SIZE: u32 = 64 << 20;

/// The largest alignment is that of the largest piece.
const LOG_SIZE: u32 = SIZE.ilog2();

/// Rights of a region that make sense for it.
const RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::ZERO_BASED)
    .union(Access::RELAXED_ORDERING);

/// A piece of device memory.
#[repr(C)]
#[derive(Debug)]
struct CDm {
    c: Visible<ibv_dm>,
    memory: NonNull<u8>,
    layout: Layout,
    /// Regions of it.
    users: Users,
    _place: Place,
    _context: Use,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CDm {
    type C = ibv_dm;
    const NAME: &'static str = "dm";
}

impl Drop for CDm {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; no region uses it any more.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) }
    }
}

impl CDm {
    /// The address of `length` bytes at `offset`.
    fn at(&self, offset: u64, length: usize) -> Option<*mut c_void> {
        let offset = usize::try_from(offset).ok().filter(|offset| *offset <= self.layout.size())?;
        (length <= self.layout.size() - offset).then(|| self.memory.as_ptr().wrapping_add(offset).cast())
    }

    fn part(&self, offset: u64, length: usize) -> Result<*mut c_void, Failure> {
        self.at(offset, length)
            .ok_or_else(|| Failure::new(libc::EFAULT, "beyond the end of the device memory"))
    }
}

slot! {
    /// ibv_alloc_dm(3). Zeroed.
    verb fn alloc_dm(context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
        let opened = look::<Context>(context)?;
        let attr = &*required(attr, "dm_attr")?;
        if attr.comp_mask != 0 {
            return Err(Failure::unsupported("members in comp_mask"));
        }
        let length = u32::try_from(attr.length).ok().filter(|length| (1..=SIZE).contains(length));
        let length = length.ok_or_else(|| Failure::invalid("not a length that the device has"))?;
        if attr.log_align_req > LOG_SIZE {
            return Err(Failure::invalid("an alignment beyond the size of the device memory"));
        }
        let place = opened.device.made.dm_bytes.take_many(length, SIZE)?;
        // At least for atomic operations.
        let align = (1_usize << attr.log_align_req).max(align_of::<u64>());
        let layout = Layout::from_size_align(attr.length, align);
        let layout = layout.map_err(|_| Failure::invalid("length and alignment do not fit"))?;
        let memory = NonNull::new(alloc_zeroed(layout));
        let memory = memory.ok_or_else(|| Failure::new(libc::ENOMEM, "no memory for device memory"))?;
        Ok(object::give(CDm {
            c: Visible::new(ibv_dm {
                context,
                memcpy_to_dm: Some(memcpy_to_dm),
                memcpy_from_dm: Some(memcpy_from_dm),
                comp_mask: 0,
                handle: 0,
            }),
            memory,
            layout,
            users: Users::default(),
            _place: place,
            _context: opened.users.hold(),
        }))
    }

    /// ibv_alloc_dm(3). EBUSY while it has a region.
    verb fn free_dm(dm: *mut ibv_dm) -> Code {
        look::<CDm>(dm)?.users.none()?;
        drop(object::take::<CDm>(dm)?);
        Ok(())
    }

    /// ibv_alloc_dm(3). A peer may use the memory meanwhile, so the bytes are copied by address.
    verb fn memcpy_to_dm(
        dm: *mut ibv_dm,
        dm_offset: u64,
        host_addr: *const c_void,
        length: usize,
    ) -> PlainCode {
        libc::memcpy(look::<CDm>(dm)?.part(dm_offset, length)?, host_addr, length);
        Ok(0)
    }

    /// ibv_alloc_dm(3).
    verb fn memcpy_from_dm(
        host_addr: *mut c_void,
        dm: *mut ibv_dm,
        dm_offset: u64,
        length: usize,
    ) -> PlainCode {
        libc::memcpy(host_addr, look::<CDm>(dm)?.part(dm_offset, length)?, length);
        Ok(0)
    }

    /// ibv_alloc_dm(3): a region whose offsets count from zero.
    verb fn reg_dm_mr(
        pd: *mut ibv_pd,
        dm: *mut ibv_dm,
        dm_offset: u64,
        length: usize,
        access: c_uint,
    ) -> *mut ibv_mr {
        let memory = look::<CDm>(dm)?;
        let rights = mr::access(access)?;
        if !rights.contains(Access::ZERO_BASED) || !RIGHTS.contains(rights) {
            return Err(Failure::invalid("not zero-based, or with a right that device memory cannot have"));
        }
        let at = memory.at(dm_offset, length);
        let at = at.ok_or_else(|| Failure::invalid("beyond the end of the device memory"))?;
        required(pd, "pd")?;
        if (*pd).context != (*dm).context {
            return Err(Failure::invalid("domain and device memory are of different contexts"));
        }
        let region = mr::register_with(pd, at, length, 0, access, Backing::Device(memory.users.hold()))?;
        // It has no address in the program.
        (*region).addr = std::ptr::null_mut();
        Ok(region)
    }
}
