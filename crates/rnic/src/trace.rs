//! Readable traces of segments, for `UWARP_TRACE` and for golden tests.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use uwarp_wire::ddp::Header;

/// Direction of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Sent by this end.
    Out,
    /// Received by this end.
    In,
}

type Sink = dyn Fn(Way, &Header, usize) + Send + Sync;

static ON: AtomicBool = AtomicBool::new(false);
static SINK: OnceLock<Box<Sink>> = OnceLock::new();

/// Hands every segment from now on to `sink`: direction, header, payload bytes. The first caller wins.
pub fn start(sink: impl Fn(Way, &Header, usize) + Send + Sync + 'static) {
    if SINK.set(Box::new(sink)).is_ok() {
        ON.store(true, Ordering::Release);
    }
}

pub(crate) fn segment(way: Way, header: &Header, payload: usize) {
    if ON.load(Ordering::Relaxed)
        && let Some(sink) = SINK.get()
    {
        sink(way, header, payload);
    }
}
