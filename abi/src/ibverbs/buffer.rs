//! Buffers that the library allocates for the program: ordinary memory, page-aligned, as rdma-core's default
//! is for devices without a better kind.

use std::ffi::{c_int, c_void};

use uwarp_abi_types::verbs::{ibv_buf, ibv_mr, ibv_pd};

use super::mr::{self, CPd};
use crate::convention::MinusOne;
use crate::failure::{Failure, required};
use crate::object::{self, Object, Visible, look, zeroed};
use crate::{entry, slot};

/// A buffer. C sees none of it: `ibv_buf` is opaque.
#[repr(C)]
#[derive(Debug)]
struct CBuffer {
    c: Visible<ibv_buf>,
    memory: *mut c_void,
    size: usize,
    /// The address of its domain, which is only compared: nothing keeps the domain alive.
    pd: *mut ibv_pd,
}

// SAFETY: repr(C), the C structure first; it has no members.
unsafe impl Object for CBuffer {
    type C = ibv_buf;
    const NAME: &'static str = "buf";
}

impl Drop for CBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `alloc`; the program has given the buffer up.
        unsafe { libc::free(self.memory) }
    }
}

/// ibv_alloc_buf(3).
///
/// # Safety
/// `pd` is alive or NULL; `buf` is writable or NULL.
unsafe fn alloc(pd: *mut ibv_pd, size: usize, buf: *mut *mut ibv_buf) -> Result<*mut c_void, Failure> {
    // SAFETY: the caller's promise.
    unsafe { look::<CPd>(pd) }?;
    let given = required(buf, "buf")?;
    let mut memory = std::ptr::null_mut();
    // SAFETY: `memory` is writable.
    let code = unsafe { libc::posix_memalign(&raw mut memory, rustix::param::page_size(), size) };
    if code != 0 {
        return Err(Failure::new(code, "no memory for the buffer"));
    }
    // SAFETY: it has no members.
    let c = Visible::new(unsafe { zeroed() });
    let handle = object::give(CBuffer { c, memory, size, pd });
    // SAFETY: the caller's promise.
    unsafe { *given = handle };
    Ok(memory)
}

/// Whether `length` bytes at `address` lie in a buffer of this domain.
///
/// # Safety
/// `buf` is alive or NULL.
pub unsafe fn check(
    pd: *mut ibv_pd,
    buf: *mut ibv_buf,
    address: *mut c_void,
    length: usize,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    let buffer = unsafe { look::<CBuffer>(buf) }?;
    if buffer.pd != pd {
        return Err(Failure::invalid("the buffer is of another domain"));
    }
    let at = address.addr().checked_sub(buffer.memory.addr());
    if !at.is_some_and(|at| at <= buffer.size && length <= buffer.size - at) {
        return Err(Failure::invalid("the range is not in the buffer"));
    }
    Ok(())
}

entry! {
    /// ibv_alloc_buf(3).
    fn ibv_alloc_buf(pd: *mut ibv_pd, size: usize, buf: *mut *mut ibv_buf) -> *mut c_void {
        alloc(pd, size, buf)
    }

    /// ibv_alloc_buf(3). In a forked child it does nothing: the object is the parent's.
    fn ibv_free_buf(buf: *mut ibv_buf) -> () {
        drop(object::take::<CBuffer>(buf)?);
        Ok(())
    }

    /// ibv_alloc_buf(3).
    fn ibv_reg_buf_mr(
        pd: *mut ibv_pd,
        buf: *mut ibv_buf,
        addr: *mut c_void,
        length: usize,
        access: c_int,
    ) -> *mut ibv_mr {
        check(pd, buf, addr, length)?;
        mr::register(pd, addr, length, addr.addr() as u64, access.cast_unsigned())
    }

    /// ibv_alloc_buf(3).
    fn ibv_export_buf_dmabuf_fd(buf: *mut ibv_buf) -> MinusOne<c_int> {
        look::<CBuffer>(buf)?;
        Err(Failure::new(libc::ENODATA, "the buffer is no dma-buf"))
    }
}

slot! {
    /// ibv_alloc_buf(3), through the context.
    verb fn alloc_buf(pd: *mut ibv_pd, size: usize, buf: *mut *mut ibv_buf) -> *mut c_void {
        alloc(pd, size, buf)
    }

    /// ibv_alloc_buf(3), through the context.
    hot fn free_buf(buf: *mut ibv_buf) -> () {
        drop(object::take::<CBuffer>(buf)?);
        Ok(())
    }
}
