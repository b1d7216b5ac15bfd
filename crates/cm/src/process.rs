//! What a process has once: its connection manager, of each device the opened one that ids share, and its
//! event channels by address.

use std::collections::BTreeMap;
use std::sync::Arc;

use uwarp_driver::waits::Waits;
use uwarp_driver::{Channel, Nic, OncePerProcess, RdmaDevice};
use uwarp_process::{Mutex, PerProcess};
use uwarp_rnic::VerbsError;

use crate::{Cm, EventChannel, Timeouts};

static CM: OncePerProcess<Arc<Cm>, 6> = OncePerProcess::new();
static CHANNELS: PerProcess<Mutex<Channels, 29>> = PerProcess::new(Mutex::default);

/// By address.
type Channels = BTreeMap<usize, Arc<EventChannel>>;

impl Cm {
    /// The connection manager of this process; the first call opens the device.
    pub fn of_process() -> Result<Arc<Self>, VerbsError> {
        if let Some(cm) = CM.get() {
            return Ok(cm);
        }
        // Without the lock, for it may block: docs at `UWARP_TRACE`.
        let nic = Nic::open()?;
        CM.get_or_make(|| Ok(Self::new(&nic, Timeouts::default())))
    }

    /// The connection manager of this process, if it has one yet.
    pub fn if_any() -> Option<Arc<Self>> {
        CM.get()
    }
}

/// The cookie of the opened device that all ids of a device share; `open` opens it, the first time.
///
/// # Errors
/// Those of `open`.
pub fn shared_device<E>(device: &RdmaDevice, open: impl FnOnce() -> Result<usize, E>) -> Result<usize, E> {
    device.shared.get_or_make(open)
}

/// Enters a channel under the address that the program knows it by.
///
/// Programs use channels that they have destroyed: rping destroys its channel just before it exits, while
/// another of its threads is about to wait on it. With a kernel behind the channel that gives an error. So an
/// address is only looked up here, never dereferenced.
pub fn enter_channel(address: usize, channel: Arc<EventChannel>) {
    CHANNELS.lock().insert(address, channel);
}

/// The channel with this address. Any address may be given.
pub fn find_channel(address: usize) -> Option<Arc<EventChannel>> {
    CHANNELS.lock().get(&address).cloned()
}

/// Removes a channel; `true` for the one caller that removed it. Ids that report to it, and threads that wait
/// on it, keep it alive.
pub fn remove_channel(address: usize) -> bool {
    // It may end with this, and then takes locks of its own.
    let removed = CHANNELS.lock().remove(&address);
    removed.is_some()
}

impl Waits for EventChannel {
    fn channel(&self) -> &Channel {
        self.doorbell()
    }
}
