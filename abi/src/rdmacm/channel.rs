//! Event channels.

use std::sync::Arc;

use uwarp_abi_types::rdmacm::rdma_event_channel;
use uwarp_cm::process::{enter_channel, find_channel, remove_channel};
use uwarp_cm::{Cm, EventChannel};
use uwarp_process::forked;
use uwarp_rnic::VerbsError;

use crate::entry;
use crate::failure::Failure;

/// Makes a channel.
pub(super) fn create() -> Result<*mut rdma_event_channel, Failure> {
    let queue = EventChannel::new(Cm::of_process()?.nic())?;
    let channel = Box::into_raw(Box::new(rdma_event_channel { fd: queue.fd() }));
    enter_channel(channel.addr(), queue);
    Ok(channel)
}

/// The queue behind a channel. Any pointer may be given; one that is not a channel is `EBADF`, in a child
/// `ENODEV`: it may be its parent's.
pub(super) fn queue(channel: *mut rdma_event_channel) -> Result<Arc<EventChannel>, Failure> {
    find_channel(channel.addr()).ok_or_else(|| match forked() {
        true => VerbsError::Forked.into(),
        false => Failure::new(libc::EBADF, "not an event channel, or destroyed"),
    })
}

/// Destroys a channel. Ids that report to it, and threads that wait on it, keep the queue alive.
pub(super) fn destroy(channel: *mut rdma_event_channel) {
    if remove_channel(channel.addr()) {
        // SAFETY: `create` made it of a box, and only the caller that removed its address frees it.
        drop(unsafe { Box::from_raw(channel) });
    }
}

entry! {
    /// rdma_create_event_channel(3).
    fn rdma_create_event_channel() -> *mut rdma_event_channel {
        create()
    }

    /// rdma_destroy_event_channel(3).
    fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) -> () {
        destroy(channel);
        Ok(())
    }
}
