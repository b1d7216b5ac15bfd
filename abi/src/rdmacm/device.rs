//! The device as ids share it: opened once, with one protection domain, until the process ends, or until it forks with nothing
//! open: the child begins afresh.

use std::ffi::c_int;
use std::sync::Arc;

use parking_lot::Mutex;
use uwarp_abi_types::verbs::{ibv_context, ibv_pd};
use uwarp_cm::{Cm, Timeouts};
use uwarp_driver::Nic;

use crate::entry;
use crate::entry::Failure;
use crate::ibverbs::device::Context;
use crate::ibverbs::mr::ibv_alloc_pd;

/// With the generation of the process that it was made in.
static CM: Mutex<Option<(u32, Arc<Cm>)>> = Mutex::new(None);

/// The connection manager of this process, if it has one yet.
pub fn cm_if_any() -> Option<Arc<Cm>> {
    CM.lock()
        .as_ref()
        .filter(|(generation, _)| *generation == uwarp_driver::generation())
        .map(|(_, cm)| cm.clone())
}

/// The connection manager of this process.
pub fn cm() -> Result<Arc<Cm>, Failure> {
    if let Some(cm) = cm_if_any() {
        return Ok(cm);
    }
    let nic = Nic::open()?;
    let generation = uwarp_driver::generation();
    let mut cm = CM.lock();
    if let Some((_, cm)) = cm.as_ref().filter(|(made_in, _)| *made_in == generation) {
        return Ok(cm.clone());
    }
    // What a parent left is dropped; the device behind it was given up at the fork.
    Ok(cm.insert((generation, Cm::new(&nic, Timeouts::default()))).1.clone())
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

static SHARED: Mutex<Option<(u32, Shared)>> = Mutex::new(None);

/// Opens the device, the first time.
pub fn shared() -> Result<Shared, Failure> {
    let mut shared = SHARED.lock();
    if let Some((_, shared)) = shared.filter(|(generation, _)| *generation == uwarp_driver::generation()) {
        return Ok(shared);
    }
    let verbs = Context::open()?;
    // SAFETY: the context was opened just now.
    let pd = unsafe { ibv_alloc_pd(verbs) };
    if pd.is_null() {
        return Err(Failure::new(entry::errno(), "no protection domain for the connection manager"));
    }
    // Both are ours; the program has not opened anything.
    uwarp_driver::object_gone();
    uwarp_driver::object_gone();
    Ok(shared.insert((uwarp_driver::generation(), Shared { verbs, pd })).1)
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
