//! The device that ids share. It is opened once, with one protection domain, until the process ends, or until
//! it forks with nothing open: then the child starts afresh.

use std::ffi::c_int;

use uwarp_abi_types::verbs::{ibv_context, ibv_pd};
use uwarp_cm::process::shared_device;

use crate::entry;
use crate::failure::Failure;
use crate::ibverbs::{device, mr};

/// The values that ids with a device have in `verbs` and `pd`.
#[derive(Debug, Clone, Copy)]
pub struct Shared {
    /// The context.
    pub verbs: *mut ibv_context,
    /// The protection domain that ids use if a program gives none.
    pub pd: *mut ibv_pd,
}

/// Opens the device, the first time.
pub fn shared() -> Result<Shared, Failure> {
    let cookie = shared_device(|| {
        let verbs = device::open()?;
        // SAFETY: the context was just opened.
        let pd = unsafe { mr::alloc_pd(verbs) }?;
        // Both belong to the library; the program has not opened anything.
        uwarp_driver::object_gone();
        uwarp_driver::object_gone();
        Ok::<_, Failure>(pd.expose_provenance())
    })?;
    let pd: *mut ibv_pd = std::ptr::with_exposed_provenance_mut(cookie);
    // SAFETY: both are objects that live as long as the process.
    Ok(Shared { verbs: unsafe { (*pd).context }, pd })
}

entry! {
    /// rdma_get_devices(3).
    verb fn rdma_get_devices(num_devices: *mut c_int) -> *mut *mut ibv_context {
        let opened = shared();
        if let Some(num) = num_devices.as_mut() {
            *num = c_int::from(opened.is_ok());
        }
        let verbs = opened?.verbs;
        uwarp_driver::object_made();
        Ok(Box::into_raw(Box::new([verbs, std::ptr::null_mut()])).cast())
    }

    /// rdma_get_devices(3).
    fn rdma_free_devices(list: *mut *mut ibv_context) -> () {
        if !list.is_null() {
            uwarp_driver::object_gone();
            drop(Box::from_raw(list.cast::<[*mut ibv_context; 2]>()));
        }
        Ok(())
    }
}
