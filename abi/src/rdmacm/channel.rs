//! Event channels.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use uwarp_abi_types::rdmacm::rdma_event_channel;
use uwarp_cm::EventChannel;

use super::device::cm;
use crate::entry;
use crate::entry::Failure;

/// The channels that are alive, by address.
///
/// Not looked up through the program's pointer: rping destroys its channel while a thread of its own is about to wait
/// on it again, just before it exits. With a kernel behind the channel that costs an error; it must not cost more here.
static CHANNELS: Mutex<Option<HashMap<usize, Arc<EventChannel>>>> = Mutex::new(None);

/// Makes a channel.
pub(super) fn create() -> Result<*mut rdma_event_channel, Failure> {
    let queue = EventChannel::new(cm()?.nic())?;
    let channel = Box::into_raw(Box::new(rdma_event_channel { fd: queue.fd() }));
    CHANNELS.lock().get_or_insert_default().insert(channel.addr(), queue);
    uwarp_driver::object_made();
    Ok(channel)
}

/// The queue behind a channel. Any pointer may be asked for; one that is no channel is `EBADF`.
pub(super) fn queue(channel: *mut rdma_event_channel) -> Result<Arc<EventChannel>, Failure> {
    let found = CHANNELS.lock().as_ref().and_then(|channels| channels.get(&channel.addr()).cloned());
    found.ok_or_else(|| Failure::new(libc::EBADF, "not an event channel, or destroyed"))
}

/// Destroys a channel. Ids that report to it, and threads that wait on it, keep the queue alive.
pub(super) fn destroy(channel: *mut rdma_event_channel) {
    if CHANNELS.lock().as_mut().is_some_and(|channels| channels.remove(&channel.addr()).is_some()) {
        uwarp_driver::object_gone();
        // SAFETY: it was in the table, so `create` made it of a box, and only who took it out frees it.
        drop(unsafe { Box::from_raw(channel) });
    }
}

entry! {
    /// rdma_create_event_channel(3).
    verb fn rdma_create_event_channel() -> *mut rdma_event_channel {
        create()
    }

    /// rdma_destroy_event_channel(3).
    fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) -> () {
        destroy(channel);
        Ok(())
    }
}
