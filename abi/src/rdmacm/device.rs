//! The device that ids share: one for each RDMA device. It is opened once, with one protection domain, until
//! the process ends, or until it forks with nothing open: then the child starts afresh.

use std::ffi::c_int;

use uwarp_abi_types::verbs::{ibv_context, ibv_pd};
use uwarp_cm::process::shared_device;
use uwarp_driver::RdmaDevice;

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
pub fn shared(of: &'static RdmaDevice) -> Result<Shared, Failure> {
    let cookie = shared_device(of, || {
        let verbs = device::open(of)?;
        // SAFETY: the context was just opened.
        let pd = unsafe { mr::alloc_pd(verbs) }?;
        Ok::<_, Failure>(pd.expose_provenance())
    })?;
    let pd: *mut ibv_pd = std::ptr::with_exposed_provenance_mut(cookie);
    // SAFETY: both are objects that live as long as the process.
    Ok(Shared { verbs: unsafe { (*pd).context }, pd })
}

fn open_all() -> Result<Vec<*mut ibv_context>, Failure> {
    let devices = RdmaDevice::list();
    if devices.is_empty() {
        return Err(Failure::new(libc::ENODEV, "no interface is up"));
    }
    devices.into_iter().map(|device| Ok(shared(device)?.verbs)).collect()
}

entry! {
    /// rdma_get_devices(3).
    fn rdma_get_devices(num_devices: *mut c_int) -> *mut *mut ibv_context {
        let opened = open_all();
        if let Some(num) = num_devices.as_mut() {
            let count = opened.as_ref().map_or(0, Vec::len);
            *num = c_int::try_from(count).unwrap_or(c_int::MAX);
        }
        let opened = opened?;
        Ok(device::give_list(opened))
    }

    /// rdma_get_devices(3).
    fn rdma_free_devices(list: *mut *mut ibv_context) -> () {
        if !list.is_null() {
            device::take_list(list);
        }
        Ok(())
    }
}
