//! What a blocking verb waits on; its thread keeps it alive.
//!
//! A thread can leave such a verb without returning from it: cancelled (`pthread_cancel`), or by a jump out
//! of a signal's handler. Then no destructor of its frames runs, so the reference to what it waits on is kept
//! here and not in the frames.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use uwarp_rnic::process::generation;

use crate::Channel;
use crate::fork::Uncancelled;

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

/// What a thread waits on.
struct Held {
    on: Arc<dyn Waits>,
    /// In a forked child it is the parent's.
    generation: u32,
}

/// Ends the wait of a thread that ends.
struct AtEnd;

impl Drop for AtEnd {
    fn drop(&mut self) {
        // The thread may have been cancelled, and what is dropped closes descriptors.
        let _uncancelled = Uncancelled::begin();
        abandon(WAITS_ON.take());
    }
}

thread_local! {
    /// What the thread waits on; or waited on, if it left the call without returning. It has no destructor,
    /// so destructors of the program's thread-local data, and handlers of atexit(3), can wait. (Only what
    /// they leave without returning is kept for ever.)
    static WAITS_ON: Cell<Option<ManuallyDrop<Held>>> = const { Cell::new(None) };
    static AT_END: AtEnd = const { AtEnd };
}

/// The thread has left a wait without returning from it.
fn abandon(held: Option<ManuallyDrop<Held>>) {
    if let Some(held) = held
        && held.generation == generation()
    {
        held.on.channel().abandon();
        drop(ManuallyDrop::into_inner(held));
    }
}

/// Keeps `on` alive until [`end_wait`], even if the program destroys it. If the thread has left an earlier
/// wait without returning, that wait ends here.
pub fn begin_wait(on: Arc<dyn Waits>) {
    // Fails in a thread that is about to end.
    let _ = AT_END.try_with(|_| ());
    abandon(WAITS_ON.replace(Some(ManuallyDrop::new(Held { on, generation: generation() }))));
}

/// The wait has returned: the thread keeps nothing alive any more.
pub fn end_wait() {
    if let Some(held) = WAITS_ON.take()
        && held.generation == generation()
    {
        drop(ManuallyDrop::into_inner(held));
    }
}
