//! The registered memory of a stream.

use std::sync::Arc;

use rustix::io::Errno;
use uwarp_rnic::mem::owned::{Owned, read};
use uwarp_rnic::mem::{MemSeg, copy_in};
use uwarp_rnic::{Access, Mr, Pd, Sge};

use crate::machine::{Own, Sizes, TARGETS};
use crate::wire::{Mapping, Order, Target};

/// Receives beside those that the peer has credits for: for its control messages.
pub(super) const MORE_RECEIVES: u32 = 8;
/// Bytes of a message that comes as a Send.
pub(super) const MESSAGE: usize = 4;

/// The registered memory of a stream.
pub(super) struct Memory {
    /// Written by the peer.
    pub(super) ring: (Owned, Arc<Mr>),
    /// The table of targets and the table of mapped buffers; written by the peer.
    pub(super) table: (Owned, Arc<Mr>),
    /// Places for messages.
    pub(super) messages: (Owned, Arc<Mr>),
    pub(super) staged: (Owned, Arc<Mr>),
}

impl Memory {
    /// `more`: receives and entries of a table of receives beside what an rsocket has.
    pub(super) fn new(pd: &Arc<Pd>, sizes: &Sizes, more: u32) -> Result<Self, Errno> {
        let of = |len: usize, access: Access| {
            let memory = Owned::new(len).ok_or(Errno::NOMEM)?;
            let seg = memory.seg();
            let mr =
                Mr::register(pd, seg.addr, seg.len as u64, seg.addr, access).map_err(|_| Errno::NOMEM)?;
            Ok((memory, mr))
        };
        let peers = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let maps = usize::from(sizes.mappings) * Mapping::LEN;
        let receives = usize::from(sizes.receives) + (MORE_RECEIVES + more) as usize;
        Ok(Self {
            ring: of(sizes.receive_buffer as usize, peers)?,
            table: of((TARGETS + more) as usize * Target::LEN + maps, peers)?,
            messages: of(receives * MESSAGE, Access::LOCAL_WRITE)?,
            staged: of(sizes.send_buffer as usize, Access::LOCAL_WRITE)?,
        })
    }

    /// Where the peer may write.
    pub(super) fn own(&self) -> Own {
        let target = |(memory, mr): &(Owned, Arc<Mr>)| Target {
            addr: memory.seg().addr,
            key: mr.stag(),
            length: u32::try_from(memory.seg().len).unwrap_or(u32::MAX),
        };
        Own { table: target(&self.table), buffer: target(&self.ring) }
    }

    fn entry(&self, index: u32) -> MemSeg {
        self.table.0.seg().part(index as usize * Target::LEN, Target::LEN)
    }

    /// A new entry of the table of targets, unless its length is zero. The length is its last word and memory
    /// is written in ascending order: once it is there, so is the rest.
    pub(super) fn target(&self, index: u32) -> Target {
        let entry = self.entry(index);
        let length = read::<4>(entry.part(Target::LENGTH_AT, 4)).unwrap_or_default();
        if length == [0; 4] {
            return Target::default();
        }
        Target::parse(&read(entry).unwrap_or_default(), Order::OURS)
    }

    pub(super) fn clear(&self, index: u32) {
        // Memory of ours is mapped.
        let _ = copy_in(self.entry(index), &[0; Target::LEN]);
    }

    pub(super) fn sge((memory, mr): &(Owned, Arc<Mr>), at: u32, len: u32) -> Sge {
        Sge { addr: memory.seg().addr + u64::from(at), length: len, lkey: mr.stag() }
    }

    fn deregister(&self) {
        for (_, mr) in [&self.ring, &self.table, &self.messages, &self.staged] {
            // No window is bound to it.
            mr.deregister();
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.deregister();
    }
}
