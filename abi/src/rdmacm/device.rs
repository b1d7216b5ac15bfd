//! The device as ids share it: opened once, with one protection domain, until the process ends.

use std::ffi::c_int;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use uwarp_abi_types::verbs::{ibv_context, ibv_pd};
use uwarp_cm::{Cm, Timeouts};
use uwarp_driver::Nic;

use crate::entry;
use crate::entry::Failure;
use crate::ibverbs::device::Context;
use crate::ibverbs::mr::ibv_alloc_pd;

static CM: OnceLock<Arc<Cm>> = OnceLock::new();

/// The connection manager of this process, if it has one yet.
pub fn cm_if_any() -> Option<&'static Arc<Cm>> {
    CM.get()
}

/// The connection manager of this process.
pub fn cm() -> Result<&'static Arc<Cm>, Failure> {
    if let Some(cm) = CM.get() {
        return Ok(cm);
    }
    let nic = Nic::open()?;
    Ok(CM.get_or_init(|| Cm::new(&nic, Timeouts::default())))
}

/// What ids with a device have in `verbs` and `pd`.
#[derive(Debug, Clone, Copy)]
pub struct Shared {
    /// The context.
    pub verbs: *mut ibv_context,
    /// The protection domain that ids use where a program gives none.
    pub pd: *mut ibv_pd,
}

// SAFETY: both are objects that live as long as the process and may be used from any thread.
unsafe impl Send for Shared {}

static SHARED: Mutex<Option<Shared>> = Mutex::new(None);

/// Opens the device, the first time.
pub fn shared() -> Result<Shared, Failure> {
    let mut shared = SHARED.lock();
    if let Some(shared) = *shared {
        return Ok(shared);
    }
    let verbs = Context::open()?;
    // SAFETY: the context was opened just now.
    let pd = unsafe { ibv_alloc_pd(verbs) };
    if pd.is_null() {
        return Err(Failure::new(entry::errno(), "no protection domain for the connection manager"));
    }
    Ok(*shared.insert(Shared { verbs, pd }))
}

entry! {
    /// rdma_get_devices(3).
    verb fn rdma_get_devices(num_devices: *mut c_int) -> *mut *mut ibv_context {
        let opened = shared();
        if let Some(num) = num_devices.as_mut() {
            *num = c_int::from(opened.is_ok());
        }
        Ok(Box::into_raw(Box::new([opened?.verbs, std::ptr::null_mut()])).cast())
    }

    /// rdma_get_devices(3).
    fn rdma_free_devices(list: *mut *mut ibv_context) -> () {
        if !list.is_null() {
            drop(Box::from_raw(list.cast::<[*mut ibv_context; 2]>()));
        }
        Ok(())
    }
}
