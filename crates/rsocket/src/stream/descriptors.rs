//! Descriptors: messages into receives that the peer's program has posted, and one-sided reads and writes.
//! None is copied; each completes later.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_mem::MemSeg;
use uwarp_mem::owned::read;
use uwarp_rnic::{Access, SendFlags, SendOp, SendWr, Sge, Wc, WcOpcode, WcStatus};

use super::verbs::{Region, Verbs};
use super::work::inline;
use super::{INLINE, State, Stream, wr_id};
use crate::machine::{Carrier, End, Posted, TARGETS};
use crate::posted::{AT_ONCE, ENTRIES, Fit, Ledger, MOST, Notice};
use crate::wire::{Mapping, Message, Order, Target};

const _: () = assert!(AT_ONCE * Target::LEN <= INLINE as usize);

/// Most pieces of local memory of one descriptor.
pub const MOST_PIECES: usize = 16;
/// Descriptors of a direction that wait, and completions that the program has not taken: beyond that, posting
/// is refused.
const MOST_WAITING: usize = 1024;

/// What a descriptor does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Receives one message of the peer's.
    Receive,
    /// Sends a message into the peer's next receive.
    Send,
    /// Writes into memory of the peer.
    Write {
        /// Where.
        to: u64,
        /// Its key.
        key: u32,
    },
    /// Reads memory of the peer.
    Read {
        /// Where.
        from: u64,
        /// Its key.
        key: u32,
    },
}

/// What a completion is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    Receive,
    Send,
    Write,
    Read,
    /// A work request that the program posted to the queue pair itself.
    WorkRequest,
}

/// A descriptor is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The program's.
    pub id: u64,
    /// Of what.
    pub kind: Kind,
    /// Bytes, or why it failed.
    pub result: Result<u64, Errno>,
}

/// Work requests that a program has posted to the queue pair of an upgraded socket by itself, until it has
/// taken their completions.
#[derive(Debug, Default)]
pub struct OwnWork(AtomicU32);

impl OwnWork {
    /// So many at most: more would take the places of the stream's own.
    pub const MOST: u32 = 64;
    /// Numbers of work requests are below this. The others are the stream's.
    pub const NUMBERS: u64 = wr_id::OURS;

    /// Takes a place; false: there is none.
    pub fn take(&self) -> bool {
        let more = |posted| (posted < Self::MOST).then_some(posted + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Gives places back.
    pub fn give_back(&self, places: u32) {
        self.0.fetch_sub(places, Ordering::Relaxed);
    }
}

struct Receive<V: Verbs> {
    id: u64,
    /// So long may the peer write.
    regions: SmallVec<[V::Region; 2]>,
}

struct Waiting {
    id: u64,
    pieces: SmallVec<[Sge; 4]>,
    len: u64,
}

/// A descriptor whose work requests are posted.
struct Flying {
    id: u64,
    kind: Kind,
    left: u32,
    result: Result<u64, Errno>,
}

/// The descriptors of a stream.
pub(super) struct Descriptors<V: Verbs> {
    ledger: Ledger,
    receives: VecDeque<Receive<V>>,
    sends: VecDeque<Waiting>,
    flying: VecDeque<Flying>,
    done: VecDeque<Completion>,
}

impl<V: Verbs> Default for Descriptors<V> {
    fn default() -> Self {
        Self {
            ledger: Ledger::default(),
            receives: VecDeque::new(),
            sends: VecDeque::new(),
            flying: VecDeque::new(),
            done: VecDeque::new(),
        }
    }
}

impl<V: Verbs> Descriptors<V> {
    fn done(&mut self, id: u64, kind: Kind, result: Result<u64, Errno>) {
        self.done.push_back(Completion { id, kind, result });
    }

    pub fn has_completion(&self) -> bool {
        !self.done.is_empty()
    }

    /// Nothing more arrives, or goes out.
    fn fail(&mut self, why: Errno, receives: bool, sends: bool) {
        if receives {
            for receive in std::mem::take(&mut self.receives) {
                self.done(receive.id, Kind::Receive, Err(why));
            }
        }
        if sends {
            for send in std::mem::take(&mut self.sends) {
                self.done(send.id, Kind::Send, Err(why));
            }
        }
    }
}

fn errno_of(status: WcStatus) -> Option<Errno> {
    match status {
        WcStatus::Success => None,
        WcStatus::WrFlushErr | WcStatus::RetryExcErr | WcStatus::RespTimeoutErr => Some(Errno::CONNRESET),
        WcStatus::LocProtErr | WcStatus::LocAccessErr => Some(Errno::FAULT),
        WcStatus::RemAccessErr | WcStatus::RemInvReqErr => Some(Errno::ACCESS),
        WcStatus::LocLenErr => Some(Errno::MSGSIZE),
        _ => Some(Errno::IO),
    }
}

/// The pieces that have bytes: not every provider takes others.
fn some(pieces: &[Sge]) -> impl Iterator<Item = Sge> {
    pieces.iter().copied().filter(|piece| piece.length > 0)
}

fn sum(pieces: &[Sge]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.length)).sum()
}

/// Work requests for these pieces, at most `most` in each; one if there are none.
fn requests(pieces: &[Sge], most: usize) -> u32 {
    pieces.len().div_ceil(most).max(1) as u32
}

/// The pieces of each.
fn parts(pieces: &[Sge], most: usize) -> impl Iterator<Item = &[Sge]> {
    let none: Option<&[Sge]> = pieces.is_empty().then_some(&[]);
    none.into_iter().chain(pieces.chunks(most))
}

/// The first `len` bytes of the pieces, which are then gone from them.
fn cut(pieces: &mut SmallVec<[Sge; 4]>, mut len: u32) -> SmallVec<[Sge; 4]> {
    let mut head = SmallVec::new();
    while len > 0
        && let Some(first) = pieces.first_mut()
    {
        let length = first.length.min(len);
        head.push(Sge { length, ..*first });
        first.addr = first.addr.wrapping_add(u64::from(length));
        first.length -= length;
        len -= length;
        if first.length == 0 {
            pieces.remove(0);
        }
    }
    head
}

impl<V: Verbs> Stream<V> {
    /// Posts a descriptor. `pieces`: memory that is registered in [`Self::pd`], named by its local keys. Does
    /// not wait. `AGAIN`: as many wait as can; take completions, and try again when one has come.
    pub fn post_descriptor(&self, id: u64, op: Op, pieces: &[Sge]) -> Result<(), Errno> {
        let len = sum(pieces);
        if pieces.len() > MOST_PIECES {
            return Err(Errno::INVAL);
        }
        if len > u64::from(MOST) {
            return Err(Errno::MSGSIZE);
        }
        let need = match op {
            Op::Receive | Op::Read { .. } => Access::LOCAL_WRITE,
            Op::Send | Op::Write { .. } => Access::empty(),
        };
        self.verbs.check(pieces, need)?;
        let mut state = self.enter();
        self.process(&mut state);
        let Some(machine) = &state.machine else { return Err(self.not_connected()) };
        let (gone, writable, readable) = (machine.ended().is_some(), machine.writable(), machine.readable());
        let descriptors = &mut state.descriptors;
        if descriptors.done.len() >= MOST_WAITING {
            return Err(Errno::AGAIN);
        }
        match op {
            Op::Receive if gone || !readable => return Err(Errno::CONNRESET),
            _ if gone => return Err(Errno::CONNRESET),
            Op::Send | Op::Write { .. } if !writable => return Err(Errno::PIPE),
            Op::Receive => self.post_receive(&mut state, id, pieces)?,
            Op::Send if descriptors.sends.len() >= MOST_WAITING => return Err(Errno::AGAIN),
            Op::Send => descriptors.sends.push_back(Waiting { id, pieces: some(pieces).collect(), len }),
            Op::Write { to: remote, key: stag } => {
                let op = |to| SendOp::Write { stag, to };
                let most = self.verbs.most_pieces();
                self.post_parts(&mut state, id, (Kind::Write, len), (remote, op), pieces, most)?;
            }
            Op::Read { from: remote, key: stag } => {
                let op = |to| SendOp::Read { stag, to, invalidate_local: false };
                let most = self.verbs.most_read_pieces();
                self.post_parts(&mut state, id, (Kind::Read, len), (remote, op), pieces, most)?;
            }
        }
        self.go_on(&mut state);
        Ok(())
    }

    /// Takes completions, oldest first.
    pub fn take_done(&self, mut take: impl FnMut(Completion) -> bool) {
        let mut state = self.enter();
        self.process(&mut state);
        while let Some(first) = state.descriptors.done.front()
            && take(*first)
        {
            if first.kind == Kind::WorkRequest {
                self.own_work.give_back(1);
            }
            state.descriptors.done.pop_front();
        }
    }

    fn post_receive(&self, state: &mut State<V>, id: u64, pieces: &[Sge]) -> Result<(), Errno> {
        // The peer's right to write ends with the receive, so it has keys of its own.
        let mut receive = Receive { id, regions: SmallVec::new() };
        let mut targets = SmallVec::<[Target; 4]>::new();
        for piece in pieces {
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            let memory = MemSeg { addr: piece.addr, len: piece.length as usize };
            let region = self.verbs.register(memory, access)?;
            targets.push(Target { addr: piece.addr, key: region.remote_key(), length: piece.length });
            receive.regions.push(region);
        }
        if targets.is_empty() {
            return Err(Errno::INVAL);
        }
        if !state.descriptors.ledger.post(&targets) {
            return Err(Errno::AGAIN);
        }
        state.descriptors.receives.push_back(receive);
        Ok(())
    }

    /// Posts a one-sided operation, at most `most` pieces in a work request.
    fn post_parts(
        &self,
        state: &mut State<V>,
        id: u64,
        (kind, len): (Kind, u64),
        (mut remote, op): (u64, impl Fn(u64) -> SendOp),
        pieces: &[Sge],
        most: usize,
    ) -> Result<(), Errno> {
        let pieces: SmallVec<[Sge; 4]> = some(pieces).collect();
        let left = requests(&pieces, most);
        let reserved = state.machine.as_mut().is_some_and(|machine| machine.reserve_work(left, false));
        if !reserved {
            return Err(Errno::AGAIN);
        }
        state.descriptors.flying.push_back(Flying { id, kind, left, result: Ok(len) });
        for sges in parts(&pieces, most) {
            let (wr_id, flags) = (wr_id::DESCRIPTOR, SendFlags::empty());
            if self.post(&[SendWr { wr_id, op: op(remote), flags, sges }]).is_err() {
                self.ended(state, End::Disconnected);
            }
            remote = remote.wrapping_add(sum(sges));
        }
        Ok(())
    }

    /// Announces receives and sends messages, as far as that is possible now.
    pub(super) fn go_on(&self, state: &mut State<V>) {
        while self.announce(state) || self.send_message(state) {}
        let Some(machine) = &state.machine else { return };
        let (gone, readable, writable) = (machine.ended().is_some(), machine.readable(), machine.writable());
        let why = state.error.unwrap_or(Errno::CONNRESET);
        state.descriptors.fail(why, gone || !readable, gone || !writable);
    }

    fn announce(&self, state: &mut State<V>) -> bool {
        let State { machine: Some(machine), descriptors, .. } = state else { return false };
        if !descriptors.ledger.has_announcement() || !machine.reserve_control() {
            return false;
        }
        let Some((first, entries)) = descriptors.ledger.announcement() else { return false };
        let order = machine.peer_order();
        let bytes: SmallVec<[u8; INLINE as usize]> =
            entries.iter().flat_map(|entry| entry.to_bytes(order)).collect();
        let (table, key) = machine.peer_receives();
        let to = table.wrapping_add(u64::from(first) * Target::LEN as u64);
        let notice = Message::Unknown(Notice::Posted(entries.len() as u32).bits());
        if self.post_target(machine.carrier(), (to, key), &bytes, notice).is_err() {
            self.ended(state, End::Disconnected);
        }
        true
    }

    fn send_message(&self, state: &mut State<V>) -> bool {
        let State { machine: Some(machine), descriptors, .. } = state else { return false };
        let Some(first) = descriptors.sends.front() else { return false };
        let (len, carrier, most) = (first.len, machine.carrier(), self.verbs.most_pieces());
        let reserve = match descriptors.ledger.fit(len) {
            Fit::NoReceive => return false,
            Fit::TooLong => {
                let id = first.id;
                descriptors.sends.pop_front();
                descriptors.done(id, Kind::Send, Err(Errno::MSGSIZE));
                return true;
            }
            Fit::Pieces(pieces) => {
                // At worst, each of them is in the middle of a work request's.
                let more = requests(&first.pieces, most) - 1;
                pieces + more + u32::from(carrier == Carrier::Send)
            }
        };
        if !machine.writable() || !machine.reserve_work(reserve, true) {
            return false;
        }
        let Some(mut send) = descriptors.sends.pop_front() else { return false };
        let targets = descriptors.ledger.take(len);
        let mut posted = u32::from(carrier == Carrier::Send);
        let message = Message::Unknown(Notice::Placed(len as u32).bits());
        let mut failed = false;
        for (i, target) in targets.iter().enumerate() {
            let pieces = cut(&mut send.pieces, target.length);
            let (stag, mut to) = (target.key, target.addr);
            let count = requests(&pieces, most);
            for (part, sges) in parts(&pieces, most).enumerate() {
                let last = i + 1 == targets.len() && part + 1 == count as usize;
                let op = match carrier {
                    Carrier::Immediate if last => {
                        SendOp::WriteImmediate { stag, to, imm: message.immediate() }
                    }
                    _ => SendOp::Write { stag, to },
                };
                let (wr_id, flags) = (wr_id::DESCRIPTOR, SendFlags::empty());
                failed |= self.post(&[SendWr { wr_id, op, flags, sges }]).is_err();
                to = to.wrapping_add(sum(sges));
            }
            posted += count;
        }
        if carrier == Carrier::Send {
            let bytes = message.bytes();
            let (tail, op) = (inline(&bytes), SendOp::Send { invalidate: None });
            let (wr_id, flags) = (wr_id::DESCRIPTOR, SendFlags::INLINE);
            failed |= self.post(&[SendWr { wr_id, op, flags, sges: &[tail] }]).is_err();
        }
        // A piece of no bytes takes no work request.
        machine.release_work(reserve.saturating_sub(posted));
        descriptors.flying.push_back(Flying { id: send.id, kind: Kind::Send, left: posted, result: Ok(len) });
        if failed {
            self.ended(state, End::Disconnected);
        }
        true
    }

    /// A work request of a descriptor has completed; they complete in order.
    pub(super) fn descriptor_completed(&self, state: &mut State<V>, wc: &Wc) {
        let State { machine: Some(machine), descriptors, .. } = state else { return };
        machine.completed(Posted::Tail);
        let Some(first) = descriptors.flying.front_mut() else { return };
        if let (Some(errno), Ok(_)) = (errno_of(wc.status), first.result) {
            first.result = Err(errno);
        }
        first.left -= 1;
        if first.left == 0
            && let Some(Flying { id, kind, result, .. }) = descriptors.flying.pop_front()
        {
            descriptors.done(id, kind, result);
        }
    }

    /// A work request that the program has posted to the queue pair itself.
    pub(super) fn foreign_completed(&self, state: &mut State<V>, wc: &Wc) {
        let len = if wc.opcode == WcOpcode::RdmaRead { u64::from(wc.byte_len) } else { 0 };
        let result = errno_of(wc.status).map_or(Ok(len), Err);
        state.descriptors.done(wc.wr_id, Kind::WorkRequest, result);
    }

    /// A message about receives. An error: the peer broke the protocol.
    pub(super) fn noticed(&self, state: &mut State<V>, bits: u32) -> Result<(), crate::machine::Violation> {
        let State { machine: Some(machine), descriptors, .. } = state else { return Ok(()) };
        match Notice::from_bits(bits) {
            None => Ok(()),
            Some(Notice::Posted(count)) => {
                for at in descriptors.ledger.written(count)? {
                    let entry = self.receives_table().part(at as usize * Target::LEN, Target::LEN);
                    let entry = Target::parse(&read(entry).unwrap_or_default(), Order::OURS);
                    descriptors.ledger.peer_posted(entry);
                }
                Ok(())
            }
            Some(Notice::Placed(len)) => {
                descriptors.ledger.placed(len)?;
                machine.message_read();
                if let Some(receive) = descriptors.receives.pop_front() {
                    let id = receive.id;
                    // Before the program learns of it.
                    drop(receive);
                    descriptors.done(id, Kind::Receive, Ok(len.into()));
                }
                Ok(())
            }
        }
    }

    /// Our table of receives, behind the mapped buffers.
    fn receives_table(&self) -> MemSeg {
        let before = TARGETS as usize * Target::LEN + usize::from(self.sizes.mappings) * Mapping::LEN;
        self.memory.table.seg().part(before, ENTRIES as usize * Target::LEN)
    }
}
