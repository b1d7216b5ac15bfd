//! Protection domains.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A protection domain: regions and queue pairs work together only within one.
#[derive(Debug)]
pub struct Pd {
    id: u32,
    /// Its queue pairs that are connected.
    streams: AtomicU32,
}

impl Pd {
    /// A new domain.
    pub fn new() -> Arc<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Arc::new(Self { id: NEXT.fetch_add(1, Ordering::Relaxed), streams: AtomicU32::new(0) })
    }

    /// Its number, unique in the process.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// How many of its queue pairs have a stream. Each of these streams can use every region of the domain.
    pub fn streams(&self) -> u32 {
        self.streams.load(Ordering::SeqCst)
    }

    /// Counts the stream of a queue pair until the returned value is dropped.
    pub(crate) fn begin_stream(self: &Arc<Self>) -> Streaming {
        self.streams.fetch_add(1, Ordering::SeqCst);
        Streaming(Arc::clone(self))
    }
}

/// A stream of this domain.
#[derive(Debug)]
pub(crate) struct Streaming(Arc<Pd>);

impl Drop for Streaming {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::SeqCst);
    }
}
