//! Event channels.

use std::sync::Arc;

use uwarp_abi_types::rdmacm::rdma_event_channel;
use uwarp_cm::EventChannel;

use super::device::cm;
use crate::entry;
use crate::entry::Failure;
use crate::object::{self, Object, Visible};

/// An event channel.
#[repr(C)]
pub struct CEventChannel {
    c: Visible<rdma_event_channel>,
    /// The queue behind it.
    pub channel: Arc<EventChannel>,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CEventChannel {
    type C = rdma_event_channel;
    const NAME: &'static str = "channel";
}

/// Makes a channel.
pub fn create() -> Result<*mut rdma_event_channel, Failure> {
    let channel = EventChannel::new(cm()?.nic())?;
    Ok(object::give(Box::new(CEventChannel {
        c: Visible::new(rdma_event_channel { fd: channel.fd() }),
        channel,
    })))
}

entry! {
    /// rdma_create_event_channel(3).
    verb fn rdma_create_event_channel() -> *mut rdma_event_channel {
        create()
    }

    /// rdma_destroy_event_channel(3).
    fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) -> () {
        drop(object::take::<CEventChannel>(channel)?);
        Ok(())
    }
}
