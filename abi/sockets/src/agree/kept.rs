//! What the program sends while nothing may follow this end's marker. TCP would have room for it, and there
//! are programs that take a socket without room for their first byte for one that has failed (PostgreSQL's
//! server). So it is kept, and goes first into the stream, or to TCP behind the marker.
//!
//! A program that closes meanwhile has sent it all the same: the connection ends when nothing is kept.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use uwarp_preload::errno;

use super::conn::{Conn, Outbound};
use super::spans::Spans;
use crate::rsockets::Rsockets;
use crate::sock::Sock;
use crate::sys;

/// Most bytes: what a new stream takes at once. A program with more waits for the stream.
const MOST: usize = 64 << 10;

/// How many connections keep bytes.
static KEEPERS: AtomicUsize = AtomicUsize::new(0);

/// Bytes of the program, in order.
#[derive(Default)]
pub struct Kept(Vec<u8>);

impl Kept {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether more can be kept.
    pub fn has_room(&self) -> bool {
        self.0.len() < MOST
    }

    /// Keeps the first bytes of this memory; returns how many.
    pub fn add(&mut self, spans: &Spans) -> Result<usize, c_int> {
        let before = self.0.len();
        let room = MOST.saturating_sub(before);
        let mut block = vec![0; spans.len().min(room)];
        let copied = sys::copy_from(spans.pieces(), &mut block)?;
        self.0.extend_from_slice(block.get(..copied).unwrap_or_default());
        if before == 0 && copied > 0 {
            KEEPERS.fetch_add(1, Ordering::AcqRel);
        }
        Ok(copied)
    }

    /// The first bytes are on their way.
    fn remove(&mut self, bytes: usize) {
        let before = self.0.len();
        self.0.drain(..bytes.min(before));
        if before > 0 && self.0.is_empty() {
            self.0 = Vec::new();
            // A child's copy may be dropped where nobody has counted it.
            let less = |keepers: usize| keepers.checked_sub(1);
            let _ = KEEPERS.fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        }
    }

    /// Takes all.
    pub fn take(&mut self) -> Vec<u8> {
        let bytes = self.0.clone();
        self.remove(bytes.len());
        bytes
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.remove(usize::MAX);
    }
}

/// In a child: what its parent keeps is the parent's.
pub fn in_child() {
    KEEPERS.store(0, Ordering::Release);
}

/// The process ends: waits until no connection keeps bytes, for a moment. Takes no lock.
pub fn await_none(limit: Duration) {
    let until = Instant::now() + limit;
    while KEEPERS.load(Ordering::Acquire) != 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(100));
    }
}

impl Conn {
    /// Whether bytes are kept in front of the stream.
    pub fn keeps(&self) -> bool {
        self.keeps.load(Ordering::Acquire)
    }

    /// Sends what is kept by the stream, as far as that has room.
    pub fn send_kept(&self, outbound: &mut Outbound, calls: &Rsockets, number: c_int) {
        while !outbound.kept.is_empty() {
            let (from, len) = (outbound.kept.0.as_ptr().cast::<c_void>(), outbound.kept.0.len());
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            // SAFETY: a buffer and its length.
            let sent = sys::quietly(|| match unsafe { (calls.rsend)(number, from, len, flags) } {
                sent @ 0.. => Ok(sent.unsigned_abs()),
                _ => Err(errno()),
            });
            match sent {
                Ok(sent) => outbound.kept.remove(sent),
                // A peer whose buffer is smaller than all this.
                Err(libc::EAGAIN) => return,
                // The stream has ended, which receiving will say.
                Err(_) => outbound.kept.remove(usize::MAX),
            }
        }
        self.keeps.store(false, Ordering::Release);
        self.nudge();
    }

    /// Whether the program, which closes the connection, has sent bytes that are kept: it ends with them.
    pub fn ends_later(&self, sock: &Arc<Sock>) -> bool {
        let _outbound = self.outbound.lock();
        if !self.keeps() {
            return false;
        }
        *self.ending.lock() = Some(Arc::clone(sock));
        true
    }

    /// Ends it, if the program has closed it and nothing is kept any more. The caller holds no lock.
    pub fn end_if_closed(&self) {
        if self.keeps() {
            return;
        }
        let sock = self.ending.lock().take();
        if let Some(sock) = sock {
            sock.end();
        }
    }

    /// Neither a stream nor TCP takes it any more.
    pub fn forget_kept(&self, outbound: &mut Outbound) {
        outbound.kept.remove(usize::MAX);
        self.keeps.store(false, Ordering::Release);
    }
}
