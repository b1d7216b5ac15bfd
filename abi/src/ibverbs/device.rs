//! Device lists, and opened devices with their table of operations: the top of the verbs.

use std::ffi::{c_char, c_int};

use uwarp_abi_types::verbs::{ibv_context, ibv_device, verbs_context};
use uwarp_cm::{Cm, bringup};
use uwarp_driver::RdmaDevice;

use super::context::{self, Context};
use super::event::cookie;
use super::{buffer, clock, cq, create_qp, device_memory, mr, mw, parent, post, query, srq, unsupported};
use crate::convention::MinusOne;
use crate::failure::{Failure, required};
use crate::{entry, jumps, object};

/// What inline functions of verbs.h call through the context.
fn fill_operations(vctx: &mut verbs_context) {
    vctx.query_port = Some(query::query_port);
    vctx.query_device_ex = Some(query::query_device_ex);
    vctx.create_cq_ex = Some(cq::create_cq_ex);
    vctx.create_qp_ex = Some(create_qp::create_qp_ex);
    vctx.create_srq_ex = Some(srq::create_srq_ex);
    vctx.advise_mr = Some(mr::advise_mr);
    vctx.reg_mr_ex = Some(mr::reg_mr_ex);
    vctx.query_rt_values = Some(clock::query_rt_values);
    vctx.alloc_buf = Some(buffer::alloc_buf);
    vctx.free_buf = Some(buffer::free_buf);
    vctx.alloc_dm = Some(device_memory::alloc_dm);
    vctx.free_dm = Some(device_memory::free_dm);
    vctx.reg_dm_mr = Some(device_memory::reg_dm_mr);
    vctx.alloc_td = Some(parent::alloc_td);
    vctx.dealloc_td = Some(parent::dealloc_td);
    vctx.alloc_parent_domain = Some(parent::alloc_parent_domain);
    let ops = &mut vctx.context.ops;
    ops._compat_query_device = Some(query::compat_query_device);
    ops._compat_query_port = Some(query::compat_query_port);
    ops.poll_cq = Some(jumps::choose(cq::poll_cq, cq::deferred_poll_cq));
    ops.req_notify_cq = Some(jumps::choose(cq::req_notify_cq, cq::deferred_req_notify_cq));
    ops.post_send = Some(jumps::choose(post::post_send, post::deferred_post_send));
    ops.post_recv = Some(jumps::choose(post::post_recv, post::deferred_post_recv));
    ops.post_srq_recv = Some(jumps::choose(srq::post_srq_recv, srq::deferred_post_srq_recv));
    ops.alloc_mw = Some(mw::alloc_mw);
    ops.bind_mw = Some(mw::bind_mw);
    ops.dealloc_mw = Some(mw::dealloc_mw);
    unsupported::fill(vctx);
}

/// ibv_open_device(3).
pub fn open(device: &'static RdmaDevice) -> Result<*mut ibv_context, Failure> {
    jumps::look();
    Context::open(device, fill_operations)
}

/// A list that ends with NULL, for the program.
pub fn give_list<T>(list: impl IntoIterator<Item = *mut T>) -> *mut *mut T {
    let list: Box<[*mut T]> = list.into_iter().chain([std::ptr::null_mut()]).collect();
    Box::into_raw(list).cast()
}

/// Takes one back.
///
/// # Safety
/// `list` came from [`give_list`] as it is, and nothing uses it any more.
pub unsafe fn take_list<T>(list: *mut *mut T) {
    // SAFETY: it ends with NULL, and all up to there was made as one.
    unsafe {
        let length = (0..).take_while(|at| !(*list.add(*at)).is_null()).count() + 1;
        drop(Box::from_raw(std::ptr::slice_from_raw_parts_mut(list, length)));
    }
}

entry! {
    /// ibv_get_device_list(3).
    fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
        let devices = RdmaDevice::list();
        if let Some(num) = num_devices.as_mut() {
            *num = c_int::try_from(devices.len()).unwrap_or(c_int::MAX);
        }
        Ok(give_list(devices.into_iter().map(context::shown)))
    }

    /// ibv_free_device_list(3).
    fn ibv_free_device_list(list: *mut *mut ibv_device) -> () {
        if !list.is_null() {
            take_list(list);
        }
        Ok(())
    }

    /// ibv_get_device_name(3).
    fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
        required(device, "device")?;
        Ok((&raw const (*device).name).cast())
    }

    /// ibv_get_device_guid(3).
    fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
        required(device, "device")?;
        let known = context::device(device).ok_or_else(|| Failure::invalid("not a device of uwarp"))?;
        Ok(context::guid(known))
    }

    /// ibv_get_device_index(3): -1, as there is no kernel device to have an index.
    fn ibv_get_device_index(device: *mut ibv_device) -> MinusOne<c_int> {
        required(device, "device")?;
        Ok(-1)
    }

    /// ibv_open_device(3).
    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
        open(context::device(device).ok_or_else(|| Failure::new(libc::ENODEV, "not a device of uwarp"))?)
    }

    /// ibv_close_device(3). Queue pairs that the program left are destroyed; other objects that it left keep
    /// the context's memory, so that destroying them later does no harm.
    fn ibv_close_device(context: *mut ibv_context) -> MinusOne {
        let opened = object::look::<Context>(context)?;
        let cm = Cm::if_any();
        opened.nic.close_context(cookie(context), |qpn| {
            if let Some(cm) = &cm {
                bringup::forget(cm, qpn);
            }
        });
        if opened.users.count() == 0 {
            drop(object::take::<Context>(context)?);
        } else {
            opened.leave();
        }
        Ok(())
    }

    /// ibv_import_device(3): there is nothing behind our command descriptor that another process could
    /// import.
    fn ibv_import_device(_cmd_fd: c_int) -> *mut ibv_context {
        Err(Failure::unsupported("importing a device"))
    }
}
