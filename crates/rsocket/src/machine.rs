//! The protocol of one stream: credits, positions in both rings, control messages, shutdown. No sockets, no
//! clock, no memory.
//!
//! ```text
//!   rsend ─▶ room, send ────▶ write into the peer's ring, message Data ──▶ message ─▶ rrecv: next, take
//!                                                                                        │
//!   target ◀─ entry of the table of targets, message Credits ◀── poll_control ◀──────────┘
//! ```
//!
//! The owner posts what [`Machine::send`], [`Machine::map`] and [`Machine::poll_control`] return, in that
//! order, and passes on what arrives ([`Machine::message`], [`Machine::target`]) and what has completed
//! ([`Machine::completed`]).

use std::collections::VecDeque;

use crate::wire::{ConnData, MAX_DATA, Mapping, Message, Order, Target};

/// Control messages that may be on their way.
pub const CONTROLS: u32 = 4;
/// Entries of a table of targets.
pub const TARGETS: u32 = 2;
/// Room in the send buffer below which a program has to wait.
pub const LOW_WATER: u32 = 2048;
/// Bytes of one write.
pub const MAX_TRANSFER: u32 = 64 * 1024;
/// Messages kept back toward a peer that loses the connection if one finds no receive. It has posted as many
/// receives as it gave credits, and control messages take receives, too.
const RESERVE: u16 = 2 * CONTROLS as u16;

/// How a message travels beside what is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carrier {
    /// As the Write's immediate data.
    Immediate,
    /// As a Send of four bytes behind the Write: iWARP knows no Write with immediate data.
    Send,
}

/// Sizes of one end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Work requests that may be posted for sending.
    pub sends: u16,
    /// Messages that the peer may have sent and we have not read.
    pub receives: u16,
    /// Bytes of the send buffer.
    pub send_buffer: u32,
    /// Bytes of the receive buffer, even.
    pub receive_buffer: u32,
    /// Entries of our table of mapped buffers.
    pub mappings: u16,
}

/// What the peer must know of this end's memory to write to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Own {
    /// The table of targets, followed by the table of mapped buffers.
    pub table: Target,
    /// The receive buffer.
    pub buffer: Target,
}

/// The peer has done what the protocol does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Violation {
    /// More bytes than there was room for.
    TooManyBytes,
    /// More messages than there were credits.
    TooManyMessages,
}

/// Why a stream has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Both ends have said that they are done. What this end has sent may still be on its way.
    Done,
    /// The peer has closed the connection, or it is gone.
    Disconnected,
    /// An error.
    Failed,
}

/// What a work request is, for its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posted {
    /// It takes room in the send buffer.
    Data(u32),
    /// A control message, or the write in front of one.
    Control,
    /// Neither: the Send behind a Write of data.
    Tail,
}

/// A write of data from the send buffer, wrapping at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Write {
    /// Where it begins in the send buffer.
    pub from: u32,
    /// Bytes.
    pub len: u32,
    /// The peer's memory.
    pub to: u64,
    /// The key of that memory.
    pub key: u32,
    /// Tells the peer of it; `None`: a direct write, of which the peer's program is not told.
    pub message: Option<Message>,
    /// There is room for much more: its completion may come late.
    pub relaxed: bool,
}

/// A control message to post.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// Only the message.
    Message(Message),
    /// Write this entry into the peer's table of targets, then the message.
    Target {
        /// Offset in the peer's memory.
        to: u64,
        /// Key of that memory.
        key: u32,
        /// The entry.
        bytes: [u8; Target::LEN],
        /// The message.
        message: Message,
    },
}

/// The protocol of one stream.
#[derive(Debug)]
pub struct Machine {
    carrier: Carrier,
    order: Order,
    sizes: Sizes,
    own: Own,

    // To the peer.
    /// Where the peer may be written, oldest first. At most one entry for each of the table.
    targets: VecDeque<Target>,
    /// The entry of our table of targets that the peer writes next.
    next_target: u32,
    /// Messages of data sent in all, and how many may be.
    sent: u16,
    allowed: u16,
    /// Messages that the peer takes unread at most.
    peer_receives: u16,
    /// Work requests for data that may be posted.
    slots: u32,
    /// Control messages that may be posted.
    controls: u32,
    send_free: u32,
    send_at: u32,
    peer_maps: Target,
    peer_map_count: u16,

    // From the peer.
    /// Bytes of each message that the program has not read.
    received: VecDeque<u32>,
    unread: u32,
    /// Bytes that have ever come.
    arrived: u64,
    read_at: u32,
    /// Bytes that the peer may still write.
    granted: u32,
    /// Bytes that the program has read and that are not granted anew.
    freed: u32,
    free_at: u32,
    /// Messages read in all, and the number at which the peer must get credits.
    taken: u16,
    announce_at: u16,
    /// The table of targets of the peer, and the entry that we write next.
    peer_table: Target,
    peer_entry: u32,

    readable: bool,
    writable: bool,
    /// The program has said that it sends no more.
    said_last: bool,
    /// And the peer has.
    peer_said_last: bool,
    /// A message about the shutdown that could not be posted yet.
    farewell: Option<Message>,
    /// The peer has said that it is done, and this end is done when `farewell` is posted.
    finishing: bool,
    end: Option<End>,
}

impl Machine {
    /// An established stream. `peer`: the peer's private data.
    pub fn new(carrier: Carrier, sizes: Sizes, own: Own, peer: &ConnData) -> Self {
        let half = sizes.receive_buffer / 2;
        let mut targets = VecDeque::with_capacity(TARGETS as usize);
        targets.push_back(peer.buffer);
        let table_bytes = u64::from(peer.table.length) * Target::LEN as u64;
        Self {
            carrier,
            order: peer.order,
            sizes,
            own,
            targets,
            next_target: 1,
            sent: 0,
            allowed: peer.credits,
            peer_receives: peer.credits,
            slots: u32::from(sizes.sends).saturating_sub(CONTROLS),
            controls: CONTROLS,
            send_free: sizes.send_buffer,
            send_at: 0,
            peer_maps: Target {
                addr: peer.table.addr.wrapping_add(table_bytes),
                key: peer.table.key,
                length: u32::from(peer.mappings),
            },
            peer_map_count: if peer.maps { peer.mappings } else { 0 },
            received: VecDeque::new(),
            unread: 0,
            arrived: 0,
            read_at: 0,
            granted: half,
            freed: half,
            free_at: half,
            taken: 0,
            announce_at: sizes.receives / 2,
            peer_table: peer.table,
            peer_entry: 1,
            readable: true,
            writable: true,
            said_last: false,
            peer_said_last: false,
            farewell: None,
            finishing: false,
            end: None,
        }
    }

    /// The private data of this end.
    pub fn conn_data(sizes: Sizes, own: Own) -> ConnData {
        ConnData {
            order: Order::OURS,
            maps: true,
            credits: sizes.receives,
            mappings: sizes.mappings,
            table: Target { length: TARGETS, ..own.table },
            buffer: Target { length: sizes.receive_buffer / 2, ..own.buffer },
        }
    }

    /// Memory of the peer that may be written, for writes of nothing: offset and key.
    pub fn anywhere(&self) -> (u64, u32) {
        (self.peer_table.addr, self.peer_table.key)
    }

    /// The order of bytes in the peer's memory.
    pub fn peer_order(&self) -> Order {
        self.order
    }

    /// How messages travel.
    pub fn carrier(&self) -> Carrier {
        self.carrier
    }

    /// Work requests that a message with a write takes.
    fn work_requests(&self) -> u32 {
        if self.carrier == Carrier::Send { 2 } else { 1 }
    }

    fn credits(&self) -> u16 {
        let reserve = if self.carrier == Carrier::Send { RESERVE } else { 0 };
        let left = self.allowed.wrapping_sub(self.sent);
        // A peer that gives fewer than it gave before is not believed: the difference is in 16 bits.
        if left > self.peer_receives { 0 } else { left.saturating_sub(reserve) }
    }

    /// Bytes that may be sent now in one write; 0: wait for completions, credits or a target.
    pub fn room(&self) -> u32 {
        let target = self.targets.front().map_or(0, |target| target.length);
        if self.credits() == 0 || !self.writable { 0 } else { self.direct_room().min(target) }
    }

    /// Bytes that may be written now into a mapped buffer.
    pub fn direct_room(&self) -> u32 {
        if self.slots < self.work_requests() || self.send_free < LOW_WATER || self.end.is_some() {
            return 0;
        }
        self.send_free.min(MAX_TRANSFER)
    }

    /// Sends `len` bytes, at most [`Self::room`]; they belong into the send buffer where the write says.
    pub fn send(&mut self, len: u32) -> Option<Write> {
        let len = len.min(self.room());
        let target = self.targets.front_mut().filter(|_| len > 0)?;
        let (to, key) = (target.addr, target.key);
        target.addr = target.addr.wrapping_add(u64::from(len));
        target.length -= len;
        if target.length == 0 {
            self.targets.pop_front();
        }
        self.sent = self.sent.wrapping_add(1);
        self.slots -= self.work_requests();
        let from = self.reserve(len);
        let relaxed = self.slots > self.data_slots() / 2 && self.send_free > self.sizes.send_buffer / 2;
        Some(Write { from, len, to, key, message: Some(Message::Data(len)), relaxed })
    }

    /// Writes `len` bytes, at most [`Self::direct_room`], to `to`.
    pub fn write_direct(&mut self, len: u32, to: u64, key: u32) -> Option<Write> {
        let len = len.min(self.direct_room());
        if len == 0 || !self.writable {
            return None;
        }
        self.slots -= 1;
        let from = self.reserve(len);
        Some(Write { from, len, to, key, message: None, relaxed: false })
    }

    /// Writes an entry into the peer's table of mapped buffers; the entry belongs into the send buffer where
    /// the write says. `None`: as [`Self::room`].
    pub fn map(&mut self, index: u16) -> Option<Write> {
        let len = Mapping::LEN as u32;
        if self.room() == 0 || index >= self.peer_map_count {
            return None;
        }
        // rdma-core counts this message where it is sent, but gives no credit for it where it arrives. So a
        // peer that may be rdma-core gets it without one: there are few of them.
        if self.carrier == Carrier::Immediate {
            self.sent = self.sent.wrapping_add(1);
        }
        self.slots -= self.work_requests();
        let from = self.reserve(len);
        let to = self.peer_maps.addr.wrapping_add(u64::from(index) * Mapping::LEN as u64);
        let message = Some(Message::Mapped(index));
        Some(Write { from, len, to, key: self.peer_maps.key, message, relaxed: false })
    }

    /// Entries of the peer's table of mapped buffers.
    pub fn peer_map_count(&self) -> u16 {
        self.peer_map_count
    }

    /// Where in the send buffer the bytes of the next write belong.
    pub fn staging(&self) -> u32 {
        self.send_at
    }

    fn reserve(&mut self, len: u32) -> u32 {
        let from = self.send_at;
        self.send_free -= len;
        self.send_at =
            (u64::from(from) + u64::from(len)).rem_euclid(u64::from(self.sizes.send_buffer)) as u32;
        from
    }

    /// The control message to post now, if there is one.
    pub fn poll_control(&mut self) -> Option<Control> {
        if self.end.is_some() {
            return None;
        }
        if self.controls > 0
            && let Some(message) = self.farewell.take()
        {
            self.controls -= 1;
            if self.finishing {
                self.end(End::Done);
            }
            return Some(Control::Message(message));
        }
        let half = self.sizes.receive_buffer / 2;
        let grants = self.freed >= half;
        let due = self.taken.wrapping_sub(self.announce_at) < 1 << 15;
        // Both work requests must fit, also when it turns out that one is enough.
        if !(grants || due) || self.controls < self.work_requests() {
            return None;
        }
        self.announce_at = self.taken.wrapping_add(self.sizes.receives / 2);
        let message = Message::Credits(self.taken.wrapping_add(self.sizes.receives));
        if !grants {
            self.controls -= 1;
            return Some(Control::Message(message));
        }
        self.controls -= self.work_requests();
        let target = Target {
            addr: self.own.buffer.addr.wrapping_add(u64::from(self.free_at)),
            key: self.own.buffer.key,
            length: half,
        };
        self.granted += half;
        self.freed -= half;
        self.free_at = if self.free_at == 0 { half } else { 0 };
        let entry = u64::from(self.peer_entry) * Target::LEN as u64;
        self.peer_entry = (self.peer_entry + 1).checked_rem(self.peer_table.length).unwrap_or(0);
        Some(Control::Target {
            to: self.peer_table.addr.wrapping_add(entry),
            key: self.peer_table.key,
            bytes: target.to_bytes(self.order),
            message,
        })
    }

    /// A sign of life, if control messages are free.
    pub fn keepalive(&mut self) -> bool {
        let may = self.controls > 0 && self.end.is_none();
        self.controls -= u32::from(may);
        may
    }

    /// Takes room for work requests beside those of the stream, the last of them with a message if `message`.
    pub fn reserve_work(&mut self, count: u32, message: bool) -> bool {
        if self.end.is_some() || self.slots < count || message && self.credits() == 0 {
            return false;
        }
        self.slots -= count;
        self.sent = self.sent.wrapping_add(u16::from(message));
        true
    }

    /// Work requests that were reserved and are not needed.
    pub fn release_work(&mut self, count: u32) {
        self.slots += count;
    }

    /// Takes room for a write and the control message behind it.
    pub fn reserve_control(&mut self) -> bool {
        if self.end.is_some() || self.controls < self.work_requests() {
            return false;
        }
        self.controls -= self.work_requests();
        true
    }

    /// A message that took a credit, and is none of the stream's, is dealt with.
    pub fn message_read(&mut self) {
        self.taken = self.taken.wrapping_add(1);
    }

    /// The peer's table of receives, behind its mapped buffers: address and key.
    pub fn peer_receives(&self) -> (u64, u32) {
        let maps = u64::from(self.peer_maps.length) * Mapping::LEN as u64;
        (self.peer_maps.addr.wrapping_add(maps), self.peer_maps.key)
    }

    /// A work request has completed.
    pub fn completed(&mut self, what: Posted) {
        match what {
            Posted::Data(len) => {
                self.slots += 1;
                self.send_free += len;
            }
            Posted::Tail => self.slots += 1,
            Posted::Control => self.controls += 1,
        }
    }

    /// Work requests for data that may be posted in all.
    fn data_slots(&self) -> u32 {
        u32::from(self.sizes.sends).saturating_sub(CONTROLS)
    }

    /// Whether everything that was posted has completed.
    pub fn all_sent(&self) -> bool {
        self.slots == self.data_slots() && self.controls == CONTROLS && self.farewell.is_none()
    }

    /// A message of the peer.
    pub fn message(&mut self, message: Message) -> Result<(), Violation> {
        self.peer_said_last |= matches!(message, Message::Disconnect | Message::Shutdown);
        match message {
            Message::Data(len) => return self.data(len),
            Message::Credits(allowed) => self.allowed = allowed,
            // The sender has spent a credit on it.
            Message::Mapped(_) => self.taken = self.taken.wrapping_add(1),
            Message::Disconnect => self.end(End::Disconnected),
            Message::Shutdown if self.writable => self.readable = false,
            // Both are done. The peer must hear of it from this end, too.
            Message::Shutdown if self.farewell.is_some() => {
                self.farewell = Some(Message::Disconnect);
                (self.readable, self.finishing) = (false, true);
            }
            Message::Shutdown => self.end(End::Done),
            Message::Keepalive | Message::Unknown(_) => {}
        }
        Ok(())
    }

    fn data(&mut self, len: u32) -> Result<(), Violation> {
        debug_assert!(len <= MAX_DATA);
        if len == 0 {
            // Nothing to read, and the sender has spent a credit on it.
            self.taken = self.taken.wrapping_add(1);
            return Ok(());
        }
        if self.received.len() > usize::from(self.sizes.receives) {
            return Err(Violation::TooManyMessages);
        }
        self.granted = self.granted.checked_sub(len).ok_or(Violation::TooManyBytes)?;
        self.unread += len;
        self.arrived += u64::from(len);
        self.received.push_back(len);
        Ok(())
    }

    /// The entry of our table of targets that may hold a new one: look at it after a message, and when there
    /// is no room.
    pub fn next_target(&self) -> Option<u32> {
        (self.targets.len() < TARGETS as usize).then_some(self.next_target)
    }

    /// What [`Self::next_target`] names holds this. Returns whether it was new; the owner then clears the
    /// entry. The peer writes it again only after it has received all that belongs to it.
    pub fn target(&mut self, target: Target) -> bool {
        if target.length == 0 || self.next_target().is_none() {
            return false;
        }
        self.targets.push_back(target);
        self.next_target = (self.next_target + 1) % TARGETS;
        true
    }

    /// Unread bytes.
    pub fn unread(&self) -> u32 {
        self.unread
    }

    /// Bytes that have ever come, read or not.
    pub fn arrived(&self) -> u64 {
        self.arrived
    }

    /// Unread bytes in one piece, `skip` bytes behind the first one: where they are in the receive buffer,
    /// and how many.
    pub fn next(&self, skip: u32) -> (u32, u32) {
        let size = u64::from(self.sizes.receive_buffer.max(1));
        let at = (u64::from(self.read_at) + u64::from(skip)).rem_euclid(size) as u32;
        (at, self.unread.saturating_sub(skip).min(self.sizes.receive_buffer - at))
    }

    /// The program has read so many bytes, at most [`Self::unread`].
    pub fn take(&mut self, len: u32) {
        let len = len.min(self.unread);
        let mut left = len;
        while left > 0
            && let Some(first) = self.received.front_mut()
        {
            if *first > left {
                *first -= left;
                break;
            }
            left -= *first;
            self.received.pop_front();
            self.taken = self.taken.wrapping_add(1);
        }
        self.unread -= len;
        self.freed += len;
        self.read_at = self.next_position(self.read_at, len);
    }

    fn next_position(&self, at: u32, len: u32) -> u32 {
        (u64::from(at) + u64::from(len)).rem_euclid(u64::from(self.sizes.receive_buffer.max(1))) as u32
    }

    /// The program sends no more. The message follows from [`Self::poll_control`].
    pub fn shut_writing(&mut self) {
        self.said_last = true;
        if std::mem::replace(&mut self.writable, false) && self.end.is_none() {
            self.farewell = Some(if self.readable { Message::Shutdown } else { Message::Disconnect });
        }
    }

    /// The program reads no more. The peer is not told while this end may still send.
    pub fn shut_reading(&mut self) {
        self.readable = false;
        if !self.writable && self.end.is_none() {
            self.farewell = Some(Message::Disconnect);
        }
    }

    /// Both.
    pub fn shut(&mut self) {
        self.said_last = true;
        if (self.readable || self.writable) && self.end.is_none() {
            self.farewell = Some(Message::Disconnect);
        }
        (self.readable, self.writable) = (false, false);
    }

    /// The stream has ended. The first reason stays, except [`End::Done`].
    pub fn end(&mut self, end: End) {
        if matches!(self.end, None | Some(End::Done)) {
            self.end = Some(end);
        }
        (self.readable, self.writable) = (false, false);
        self.farewell = None;
    }

    /// Whether more data can arrive.
    pub fn readable(&self) -> bool {
        self.readable
    }

    /// Whether data can be sent.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Whether the program has said that it sends no more.
    pub fn said_last(&self) -> bool {
        self.said_last
    }

    /// Whether there is nothing to shut down any more, as TCP has it: both ends have said that they are done,
    /// or the stream has failed.
    pub fn is_over(&self) -> bool {
        let peer_is_done = self.peer_said_last || self.end.is_some();
        self.end == Some(End::Failed) || self.said_last && peer_is_done
    }

    /// Whether the stream has ended, and why.
    pub fn ended(&self) -> Option<End> {
        self.end
    }

    /// Whether the connection is gone or failed: nothing that is on its way arrives.
    pub fn gone(&self) -> bool {
        matches!(self.end, Some(End::Disconnected | End::Failed))
    }
}

#[cfg(test)]
mod tests;
