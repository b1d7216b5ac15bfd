//! What a blocking verb waits on; its thread keeps it alive.
//!
//! A thread can leave such a verb without returning from it: cancelled (`pthread_cancel`), or by a jump out
//! of a signal's handler. Then no destructor of its frames runs, so the reference to what it waits on is kept
//! here and not in the frames.

use std::cell::Cell;
use std::sync::Arc;

use crate::Channel;

/// A queue of events that a verb can wait on.
pub trait Waits: Send + Sync + 'static {
    /// Its descriptor is readable while there are events.
    fn channel(&self) -> &Channel;
}

impl Waits for Channel {
    fn channel(&self) -> &Channel {
        self
    }
}

/// What the thread waits on; or waited on, if it left the call without returning.
struct WaitsOn(Cell<Option<Arc<dyn Waits>>>);

impl WaitsOn {
    fn set(&self, on: Option<Arc<dyn Waits>>) {
        if let Some(left) = self.0.replace(on) {
            left.channel().abandon();
        }
    }
}

impl Drop for WaitsOn {
    fn drop(&mut self) {
        self.set(None);
    }
}

thread_local! {
    static WAITS_ON: WaitsOn = const { WaitsOn(Cell::new(None)) };
}

/// Keeps `on` alive until [`end_wait`], even if the program destroys it. If the thread has left an earlier
/// wait without returning, that wait ends here. `false`: the thread is about to end, and nothing is kept.
pub fn begin_wait(on: Arc<dyn Waits>) -> bool {
    WAITS_ON.try_with(|waits_on| waits_on.set(Some(on))).is_ok()
}

/// The wait has returned: the thread keeps nothing alive any more.
pub fn end_wait() {
    // A thread that is about to end keeps nothing.
    let _ = WAITS_ON.try_with(|waits_on| drop(waits_on.0.take()));
}
