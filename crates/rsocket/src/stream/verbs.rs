//! What a stream runs over: a queue pair with its completion queue, and registered memory. Those of this
//! library ([`Own`]), or those of any other provider of the verbs (abi/verbs-sockets).

use std::sync::Arc;

use rustix::io::Errno;
use uwarp_cm::Cm;
use uwarp_driver::{Nic, Qp};
use uwarp_mem::MemSeg;
use uwarp_rnic::mr::{MrCache, Part};
use uwarp_rnic::qp::{QpCaps, QpInit, QpModify, QpState};
use uwarp_rnic::{Access, AsyncEvent, AsyncSink, Cq, Mr, Pd, RecvWr, SendWr, Sge, VerbsError, Wc};

use super::INLINE;
use super::descriptors::{MOST_PIECES, OwnWork};
use super::memory::MORE_RECEIVES;
use crate::machine::{Carrier, Sizes};
use crate::posted::ENTRIES;
use crate::waiting::Waiters;

/// A queue pair that is connected, or will be, and whose completions go to one queue. Every work request
/// is signaled, and they complete in order.
pub trait Verbs: Send + Sync + 'static {
    /// Registered memory.
    type Region: Region;

    /// Registers memory. The caller keeps it mapped.
    fn register(&self, memory: MemSeg, access: Access) -> Result<Self::Region, Errno>;
    /// Whether the program's memory may be used so, as far as that can be known. `FAULT`: no.
    fn check(&self, pieces: &[Sge], need: Access) -> Result<(), Errno>;
    /// Most pieces of memory of one Send or Write.
    fn most_pieces(&self) -> usize;
    /// Most pieces of memory of one Read.
    fn most_read_pieces(&self) -> usize;
    /// Posts all of them, or ends with an error.
    fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<(), Errno>;
    /// The same for receives.
    fn post_recv<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), Errno>;
    /// Takes at most `most` completions; returns how many. `progress`: receives from the network if there is
    /// none.
    fn poll(&self, most: usize, progress: bool, take: impl FnMut(Wc)) -> usize;
    /// Whether there is no completion to take, without progress.
    fn is_empty(&self) -> bool;
    /// How messages travel to the peer. Is asked once the connection is there.
    fn carrier(&self) -> Carrier;
    /// The stream has changed: wakes the threads that wait for it.
    fn wake(&self);
    /// The same, but for the calling thread, which is about to leave.
    fn wake_others(&self) {
        self.wake();
    }
    /// The stream is dropped.
    fn end(&self);
    /// The queue pair's number.
    fn number(&self) -> u32;
}

/// Registered memory, until it is dropped.
pub trait Region: Send + Sync {
    /// For work requests of this end.
    fn local_key(&self) -> u32;
    /// For the peer.
    fn remote_key(&self) -> u32;
}

/// What a stream needs of its queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Work requests for sending and receiving. The completion queue has to hold all of them.
    pub sends: u32,
    /// See `sends`.
    pub receives: u32,
    /// Pieces of memory of a work request for sending; less is possible, down to two.
    pub pieces: u32,
    /// Bytes that go out inline.
    pub inline: u32,
}

impl Needs {
    /// Of a stream with these sizes. `descriptors`: it has descriptors, and its queue pair is the program's
    /// to use, too.
    pub fn of(sizes: &Sizes, descriptors: bool) -> Self {
        let (more, foreign, pieces) =
            if descriptors { (ENTRIES, OwnWork::MOST, MOST_PIECES as u32) } else { (0, 0, 2) };
        Self {
            sends: u32::from(sizes.sends) + foreign,
            receives: u32::from(sizes.receives) + MORE_RECEIVES + more,
            pieces,
            inline: INLINE,
        }
    }
}

/// A queue pair of this library.
pub struct Own {
    pub(super) nic: Arc<Nic>,
    pub(super) qp: Arc<Qp>,
    pub(super) cq: Arc<Cq>,
    pub(super) pd: Arc<Pd>,
    /// Who waits for it.
    pub(super) waiters: Arc<Waiters>,
}

/// Asynchronous events of the queue pair say nothing that its completions do not say.
struct NoEvents;

impl AsyncSink for NoEvents {
    fn async_event(&self, _: AsyncEvent) {}
}

fn errno(error: VerbsError) -> Errno {
    Errno::from_raw_os_error(error.errno())
}

impl Own {
    /// In the state INIT.
    pub(super) fn new(cm: &Cm, needs: Needs, waiters: &Arc<Waiters>) -> Result<Self, Errno> {
        let nic = cm.nic();
        let pd = Pd::new();
        let depth = needs.receives + needs.sends;
        let cq = Cq::new(depth, 0, Some(Arc::clone(waiters) as _), Arc::new(NoEvents));
        let caps = QpCaps {
            max_send_wr: needs.sends,
            max_recv_wr: needs.receives,
            max_send_sge: needs.pieces,
            max_recv_sge: 1,
            max_inline_data: needs.inline,
        };
        let init = QpInit {
            pd: Arc::clone(&pd),
            send_cq: Arc::clone(&cq),
            recv_cq: Arc::clone(&cq),
            srq: None,
            caps,
            sq_sig_all: true,
            cookie: 0,
            async_sink: Arc::new(NoEvents),
        };
        let qp = Qp::create(nic, init).map_err(errno)?;
        let own = Self { nic: Arc::clone(nic), qp, cq, pd, waiters: Arc::clone(waiters) };
        let to_init = QpModify {
            state: Some(QpState::Init),
            access: Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ),
            ..QpModify::default()
        };
        own.qp.modify(&to_init).map_err(errno)?;
        Ok(own)
    }
}

impl Verbs for Own {
    type Region = OwnRegion;

    fn register(&self, memory: MemSeg, access: Access) -> Result<OwnRegion, Errno> {
        let region = Mr::register(&self.pd, memory.addr, memory.len as u64, memory.addr, access);
        region.map(OwnRegion).map_err(errno)
    }

    fn check(&self, pieces: &[Sge], need: Access) -> Result<(), Errno> {
        let mut cache = MrCache::default();
        for piece in pieces.iter().filter(|piece| piece.length > 0) {
            let part = Part { stag: piece.lkey, to: piece.addr, len: piece.length as usize };
            cache.enter(part, self.pd.id(), need).map_err(|_| Errno::FAULT)?;
        }
        Ok(())
    }

    fn most_pieces(&self) -> usize {
        MOST_PIECES
    }

    fn most_read_pieces(&self) -> usize {
        MOST_PIECES
    }

    #[inline]
    fn post_send(&self, wrs: &[SendWr<'_>]) -> Result<(), Errno> {
        self.qp.post_send(wrs.iter().copied()).map_err(|(_, error)| errno(error))
    }

    #[inline]
    fn post_recv<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), Errno> {
        self.qp.post_recv(wrs).map_err(|(_, error)| errno(error))
    }

    #[inline]
    fn poll(&self, most: usize, progress: bool, take: impl FnMut(Wc)) -> usize {
        if progress { self.nic.poll_cq(&self.cq, most, take) } else { self.cq.poll(most, take) }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.cq.is_empty()
    }

    fn carrier(&self) -> Carrier {
        // A peer that is not uwarp runs over an iWARP device, and librdmacm then uses Sends. A uwarp peer
        // takes either form, whatever its view (docs/adr/037).
        if self.qp.peer_is_uwarp() { Carrier::Immediate } else { Carrier::Send }
    }

    fn wake(&self) {
        self.waiters.wake();
    }

    fn wake_others(&self) {
        self.waiters.wake_others();
    }

    fn end(&self) {
        self.qp.destroy();
    }

    fn number(&self) -> u32 {
        self.qp.qpn()
    }
}

/// Memory that is registered with this library.
pub struct OwnRegion(Arc<Mr>);

impl Region for OwnRegion {
    fn local_key(&self) -> u32 {
        self.0.stag()
    }

    fn remote_key(&self) -> u32 {
        self.0.stag()
    }
}

impl Drop for OwnRegion {
    fn drop(&mut self) {
        // No window is bound to it.
        self.0.deregister();
    }
}
