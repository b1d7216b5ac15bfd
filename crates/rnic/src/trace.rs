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

/// One segment as it passes.
#[derive(Debug, Clone, Copy)]
pub struct Passing<'a> {
    /// Number of the queue pair.
    pub qpn: u32,
    /// Direction.
    pub way: Way,
    /// DDP header.
    pub header: &'a Header,
    /// Start of the payload where it is an RDMAP header; may be empty.
    pub head: &'a [u8],
    /// Payload bytes in all.
    pub len: usize,
}

type Sink = dyn Fn(&Passing<'_>) + Send + Sync;

static ON: AtomicBool = AtomicBool::new(false);
static SINK: OnceLock<Box<Sink>> = OnceLock::new();

/// Hands every segment from now on to `sink`, which must not block for long and must not call into a queue
/// pair. The first caller wins.
pub fn start(sink: impl Fn(&Passing<'_>) + Send + Sync + 'static) {
    if SINK.set(Box::new(sink)).is_ok() {
        ON.store(true, Ordering::Release);
    }
}

pub(crate) fn segment(qpn: u32, way: Way, header: &Header, head: &[u8], len: usize) {
    if ON.load(Ordering::Relaxed)
        && let Some(sink) = SINK.get()
    {
        sink(&Passing { qpn, way, header, head, len });
    }
}
