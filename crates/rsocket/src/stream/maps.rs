//! Mapped buffers (riomap(3)): the program's, which the peer may write, and the peer's.

use std::collections::VecDeque;

use rustix::io::Errno;
use uwarp_mem::owned::read;
use uwarp_mem::{MemSeg, copy_in, populate};
use uwarp_rnic::Access;

use super::cursor::Cursor;
use super::verbs::{Region, Verbs};
use super::{State, Stream};
use crate::machine::{End, TARGETS};
use crate::wire::{Mapping, Order, Target};

/// A buffer that the program has mapped.
struct Mapped<V: Verbs> {
    region: V::Region,
    buffer: MemSeg,
    offset: u64,
    /// Its entry in the peer's table; `None`: mapped for this end only.
    index: Option<u16>,
}

/// The buffers that the program has mapped.
pub(super) struct Maps<V: Verbs> {
    mapped: Vec<Mapped<V>>,
    /// Entries that the peer does not know yet.
    untold: VecDeque<u16>,
}

impl<V: Verbs> Default for Maps<V> {
    fn default() -> Self {
        Self { mapped: Vec::new(), untold: VecDeque::new() }
    }
}

impl<V: Verbs> Maps<V> {
    fn free_index(&self, count: u16) -> Option<u16> {
        (0..count).find(|index| !self.mapped.iter().any(|mapped| mapped.index == Some(*index)))
    }
}

impl<V: Verbs> Stream<V> {
    /// Maps a buffer to `offset`, or to its address. `for_peer`: the peer may write it, once it has received
    /// data that was sent after this.
    pub fn map(&self, buffer: MemSeg, for_peer: bool, offset: Option<u64>) -> Result<u64, Errno> {
        let mut state = self.enter();
        let Some(machine) = &state.machine else { return Err(Errno::NOTCONN) };
        let index = match for_peer {
            true => Some(state.maps.free_index(machine.peer_map_count()).ok_or(Errno::NOMEM)?),
            false => None,
        };
        populate::check(buffer.addr as usize, buffer.len, true).map_err(|_| Errno::FAULT)?;
        let access = if for_peer { Access::LOCAL_WRITE | Access::REMOTE_WRITE } else { Access::LOCAL_WRITE };
        let region = self.verbs.register(buffer, access)?;
        let offset = offset.unwrap_or(buffer.addr);
        state.maps.mapped.push(Mapped { region, buffer, offset, index });
        state.maps.untold.extend(index);
        Ok(offset)
    }

    /// Ends the mapping of a buffer. The peer is not told: what it still writes ends the stream, as with
    /// every rsocket.
    pub fn unmap(&self, buffer: MemSeg) -> Result<(), Errno> {
        let mut state = self.enter();
        let at = state.maps.mapped.iter().position(|mapped| mapped.buffer == buffer).ok_or(Errno::INVAL)?;
        let gone = state.maps.mapped.swap_remove(at);
        state.maps.untold.retain(|index| Some(*index) != gone.index);
        Ok(())
    }

    /// Tells the peer of new mappings, as far as there is room.
    pub(super) fn send_maps(&self, state: &mut State<V>) -> Result<(), Errno> {
        while let Some(index) = state.maps.untold.front().copied() {
            let Some(machine) = &mut state.machine else { return Ok(()) };
            let order = machine.peer_order();
            let Some(mapped) = state.maps.mapped.iter().find(|mapped| mapped.index == Some(index)) else {
                state.maps.untold.pop_front();
                continue;
            };
            let target = Target {
                addr: mapped.buffer.addr,
                key: mapped.region.remote_key(),
                length: u32::try_from(mapped.buffer.len).unwrap_or(u32::MAX),
            };
            let bytes = Mapping { offset: mapped.offset, target }.to_bytes(order);
            // Without room the data behind it finds none either.
            let Some(write) = machine.map(index) else { return Ok(()) };
            let [first, second] = self.staged(write.from, write.len);
            // Memory of ours is mapped.
            let _ = copy_in(first, &bytes);
            let _ = copy_in(second, bytes.get(first.len..).unwrap_or_default());
            let carrier = machine.carrier();
            state.maps.untold.pop_front();
            if self.post_write(carrier, &write).is_err() {
                self.ended(state, End::Disconnected);
                return Err(Errno::CONNRESET);
            }
        }
        Ok(())
    }

    /// The peer's buffer at this offset: where it is, and how many bytes follow there.
    fn find_mapping(&self, offset: u64) -> Option<(Target, u64)> {
        let table = self.memory.table.seg().part(TARGETS as usize * Target::LEN, usize::MAX);
        (0..usize::from(self.sizes.mappings)).find_map(|index| {
            let entry = table.part(index * Mapping::LEN, Mapping::LEN);
            let mapping = Mapping::parse(&read(entry).ok()?, Order::OURS);
            let into = offset.checked_sub(mapping.offset)?;
            (into < u64::from(mapping.target.length)).then_some((mapping.target, into))
        })
    }

    /// Writes the bytes of `buffers` into the peer's mapped buffers, from `offset` on. Stops at the first
    /// offset that is not mapped.
    pub fn write_mapped(
        &self,
        buffers: &[MemSeg],
        mut offset: u64,
        mut wait: impl FnMut() -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        let _turn = self.turn(|stream| stream.sending.try_lock(), &mut wait)?;
        let mut source = Cursor::new(buffers);
        let mut sent = 0;
        while source.left() > 0 {
            let mut state = self.enter();
            match self.write_some(&mut state, &mut source, offset) {
                Ok(Some(0)) => {}
                Ok(Some(n)) => {
                    sent += n;
                    offset += n as u64;
                    continue;
                }
                Ok(None) => return Ok(sent),
                Err(_) if sent > 0 => return Ok(sent),
                Err(errno) => return Err(errno),
            }
            drop(state);
            match wait() {
                Ok(()) => {}
                Err(_) if sent > 0 => return Ok(sent),
                Err(errno) => return Err(errno),
            }
        }
        Ok(sent)
    }

    /// `None`: nothing is mapped there. 0: nothing now.
    fn write_some(
        &self,
        state: &mut State<V>,
        source: &mut Cursor<'_>,
        offset: u64,
    ) -> Result<Option<usize>, Errno> {
        self.may_send(state)?;
        self.send_maps(state)?;
        let Some((target, into)) = self.find_mapping(offset) else { return Ok(None) };
        let Some(machine) = &mut state.machine else { return Err(Errno::NOTCONN) };
        let len = u64::from(machine.direct_room())
            .min(u64::from(target.length) - into)
            .min(source.left() as u64) as u32;
        if len == 0 {
            self.process(state);
            return Ok(Some(0));
        }
        source.copy_to(self.staged(machine.staging(), len))?;
        let Some(write) = machine.write_direct(len, target.addr.wrapping_add(into), target.key) else {
            return Ok(Some(0));
        };
        let carrier = machine.carrier();
        if self.post_write(carrier, &write).is_err() {
            self.ended(state, End::Disconnected);
            return Err(Errno::CONNRESET);
        }
        Ok(Some(write.len as usize))
    }
}
