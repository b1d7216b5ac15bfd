//! Protection domains.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A protection domain: regions and queue pairs work together only within one.
#[derive(Debug)]
pub struct Pd {
    id: u32,
}

impl Pd {
    /// A new domain.
    pub fn new() -> Arc<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Arc::new(Self { id: NEXT.fetch_add(1, Ordering::Relaxed) })
    }

    /// Its number, unique in the process.
    pub fn id(&self) -> u32 {
        self.id
    }
}
