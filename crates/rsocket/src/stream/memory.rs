//! The registered memory of a stream.

use rustix::io::Errno;
use uwarp_mem::owned::{Owned, read};
use uwarp_mem::{MemSeg, copy_in};
use uwarp_rnic::{Access, Sge};

use super::verbs::{Region, Verbs};
use crate::machine::{Own, Sizes, TARGETS};
use crate::wire::{Mapping, Order, Target};

/// Receives that are posted together, once so many have been used.
pub(super) const REPOSTED: usize = 8;
/// Receives beside those that the peer has credits for: for its control messages, and for those that are not
/// posted again yet.
pub(super) const MORE_RECEIVES: u32 = 8 + REPOSTED as u32;
/// Bytes of a message that comes as a Send.
pub(super) const MESSAGE: usize = 4;

/// The registered memory of a stream.
pub(super) struct Memory<V: Verbs> {
    /// Written by the peer.
    pub(super) ring: Registered<V::Region>,
    /// The table of targets and the table of mapped buffers; written by the peer.
    pub(super) table: Registered<V::Region>,
    /// Places for messages.
    pub(super) messages: Registered<V::Region>,
    pub(super) staged: Registered<V::Region>,
}

/// Memory that is registered as long as it exists.
pub(super) struct Registered<R> {
    region: R,
    memory: Owned,
}

impl<R: Region> Registered<R> {
    pub(super) fn seg(&self) -> MemSeg {
        self.memory.seg()
    }

    pub(super) fn sge(&self, at: u32, len: u32) -> Sge {
        Sge { addr: self.seg().addr + u64::from(at), length: len, lkey: self.region.local_key() }
    }

    fn target(&self) -> Target {
        let MemSeg { addr, len } = self.seg();
        Target { addr, key: self.region.remote_key(), length: u32::try_from(len).unwrap_or(u32::MAX) }
    }
}

impl<V: Verbs> Memory<V> {
    /// `more`: receives and entries of a table of receives beside what an rsocket has.
    pub(super) fn new(verbs: &V, sizes: &Sizes, more: u32) -> Result<Self, Errno> {
        let of = |len: usize, access: Access| {
            let memory = Owned::new(len).ok_or(Errno::NOMEM)?;
            let region = verbs.register(memory.seg(), access).map_err(|_| Errno::NOMEM)?;
            Ok(Registered { region, memory })
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
        Own { table: self.table.target(), buffer: self.ring.target() }
    }

    fn entry(&self, index: u32) -> MemSeg {
        self.table.seg().part(index as usize * Target::LEN, Target::LEN)
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
}
