//! `UWARP_TRACE`: every segment and every datagram as a line of text.
//!
//! ```text
//!   0.001204 qp 0xa81701 -> Send L qn=0 msn=1 mo=0 len=16
//!   0.001377 qp 0xa81701 <- ReadReq L qn=1 msn=1 mo=0 sink=0x1/0x0 src=0x2/0x7f00 size=64
//!   0.001502 qp 0x4e2103 -> 192.0.2.2:20000 UD src=0x4e2103 dst=0x4e2007 … Send L qn=0 msn=1 mo=0 len=11
//!   0.001781 qp 0x4e2103 <- 192.0.2.2:20000 UD src=0x4e2007 dst=0x4e2103 …, dropped: no receive
//!   0.002013 no qp       <- 192.0.2.9:53 60 bytes, dropped: malformed (version 72)
//! ```
//!
//! Seconds since the device was opened, queue pair, direction, segment; of a datagram also the peer's
//! address, the group if it was received from one, and why it was dropped. Made for reading, not for speed.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Instant;

use parking_lot::Mutex;
use uwarp_rnic::trace::{self, Passing};
use uwarp_wire::text::Line;

use crate::fork::Uncancelled;

/// The destination of a trace.
pub(crate) type Target = Box<dyn Write + Send>;

/// Opens the file that `UWARP_TRACE` names, if it is set: `-` is standard error, anything else a file that is
/// appended to.
///
/// In a program that has more rights than its caller, the caller's environment must not choose a file to
/// write to.
///
/// Call this with no lock held: opening a FIFO waits for its reader.
pub(crate) fn open_if_wanted() -> Option<Target> {
    let target = std::env::var_os("UWARP_TRACE").filter(|v| !v.is_empty())?;
    if crate::has_more_rights_than_its_caller() {
        tracing::warn!("no trace: UWARP_TRACE is ignored in a program that has more rights than its caller");
        return None;
    }
    if target == "-" {
        return Some(Box::new(std::io::stderr()));
    }
    match OpenOptions::new().create(true).append(true).open(&target) {
        Ok(file) => Some(Box::new(file)),
        Err(e) => {
            tracing::warn!("no trace: cannot write {}: {e}", target.display());
            None
        }
    }
}

/// Starts tracing.
pub(crate) fn start(out: Target) {
    let out = Mutex::new(Some(out));
    let start = Instant::now();
    trace::start(move |passing: &Passing<'_>| {
        let seconds = start.elapsed().as_secs_f64();
        let text = match passing {
            Passing::Segment(p) => {
                let line = Line { header: *p.header, head: p.head, len: p.len };
                format!("{seconds:>11.6} qp {:#08x} {} {line}\n", p.qpn, p.way)
            }
            Passing::Datagram(p) => match p.qpn {
                Some(qpn) => format!("{seconds:>11.6} qp {qpn:#08x} {p}\n"),
                None => format!("{seconds:>11.6} no qp       {p}\n"),
            },
        };
        // A thread that posts or polls must not be cancelled in the write.
        let _uncancelled = Uncancelled::begin();
        let mut out = out.lock();
        // If the trace cannot be written, the program's traffic continues; a trace with a gap would mislead.
        if let Err(error) = out.as_mut().map_or(Ok(()), |out| out.write_all(text.as_bytes())) {
            *out = None;
            tracing::error!("the trace ends here, because it cannot be written: {error}");
        }
    });
}
