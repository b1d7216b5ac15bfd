//! A stream: the protocol's machine with its queue pair and its memory.

pub mod descriptors;
mod maps;

use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_cm::Cm;
use uwarp_driver::{Nic, Qp};
use uwarp_rnic::mem::owned::{Owned, from_program, read, to_program};
use uwarp_rnic::mem::{MemSeg, copy_in};
use uwarp_rnic::qp::{QpCaps, QpInit, QpModify, QpState};
use uwarp_rnic::{
    Access, AsyncEvent, AsyncSink, Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, Wc, WcFlags, WcStatus,
};

use crate::machine::{Carrier, Control, End, Machine, Own, Posted, Sizes, TARGETS, Write};
use crate::posted::ENTRIES;
use crate::waiting::{Waiters, Waiting};
use crate::wire::{ConnData, Mapping, Message, Order, Target};
use descriptors::{Descriptors, OwnWork};
use maps::Maps;
use wr_id::Id;

/// Completions taken at once.
const BATCH: usize = 32;
/// Receives beside those that the peer has credits for: for its control messages.
const MORE_RECEIVES: u32 = 8;
/// Bytes of a message that comes as a Send.
const MESSAGE: usize = 4;
/// Bytes that go out inline at most.
const INLINE: u32 = 64;

/// What has become of the connection, as the connection manager reports it. It is reported while other locks
/// are held, so it is only stored, and acted on by the next call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// Not established yet.
    Pending,
    /// Established with this private data of the peer.
    Up(ConnData),
    /// There is no connection.
    Failed(Errno),
    /// The connection has ended.
    Gone,
}

/// A connection may have begun and ended before the program's first call on it. What the peer sent meanwhile
/// is there, so its private data is kept.
struct Linked {
    link: Link,
    peer: Option<ConnData>,
    /// Why it has ended, if a call must say so.
    error: Option<Errno>,
}

/// What the calls of the program change.
struct State {
    /// Once the connection is established.
    machine: Option<Machine>,
    /// The error that the next call reports.
    error: Option<Errno>,
    maps: Maps,
    descriptors: Descriptors,
}

/// A stream of one socket, from the attempt to connect to the end.
pub struct Stream {
    nic: Arc<Nic>,
    qp: Arc<Qp>,
    cq: Arc<Cq>,
    pd: Arc<Pd>,
    sizes: Sizes,
    /// Who waits for it.
    waiters: Arc<Waiters>,
    own_work: Arc<OwnWork>,
    memory: Memory,
    /// When it ends, [`Stream::set_gone`] is told why. Work requests that fail before that say nothing.
    explained: bool,
    link: Mutex<Linked>,
    state: Mutex<State>,
    /// Held by the one call that sends, and the one that receives: a call's bytes stay together.
    sending: Mutex<()>,
    receiving: Mutex<()>,
}

/// The registered memory of a stream.
struct Memory {
    /// Written by the peer.
    ring: (Owned, Arc<Mr>),
    /// The table of targets and the table of mapped buffers; written by the peer.
    table: (Owned, Arc<Mr>),
    /// Places for messages.
    messages: (Owned, Arc<Mr>),
    staged: (Owned, Arc<Mr>),
}

impl Memory {
    /// `more`: receives and entries of a table of receives beside what an rsocket has.
    fn new(pd: &Arc<Pd>, sizes: &Sizes, more: u32) -> Result<Self, Errno> {
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
    fn own(&self) -> Own {
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
    fn target(&self, index: u32) -> Target {
        let entry = self.entry(index);
        let length = read::<4>(entry.part(Target::LENGTH_AT, 4)).unwrap_or_default();
        if length == [0; 4] {
            return Target::default();
        }
        Target::parse(&read(entry).unwrap_or_default(), Order::OURS)
    }

    fn clear(&self, index: u32) {
        // Memory of ours is mapped.
        let _ = copy_in(self.entry(index), &[0; Target::LEN]);
    }

    fn sge((memory, mr): &(Owned, Arc<Mr>), at: u32, len: u32) -> Sge {
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

/// Asynchronous events of the queue pair say nothing that its completions do not say.
struct NoEvents;

impl AsyncSink for NoEvents {
    fn async_event(&self, _: AsyncEvent) {}
}

/// Work requests by their number.
mod wr_id {
    use crate::machine::Posted;

    const KIND: u32 = 32;
    /// Ours. Those without it are the program's, posted to the queue pair.
    pub const OURS: u64 = 1 << 63;
    const RECEIVE: u64 = OURS | 3 << KIND;
    /// Of a descriptor.
    pub const DESCRIPTOR: u64 = OURS | 4 << KIND;

    pub fn of(posted: Posted) -> u64 {
        match posted {
            Posted::Data(len) => OURS | u64::from(len),
            Posted::Control => OURS | 1 << KIND,
            Posted::Tail => OURS | 2 << KIND,
        }
    }

    pub fn receive(slot: u32) -> u64 {
        RECEIVE | u64::from(slot)
    }

    /// What has completed.
    pub enum Id {
        /// A work request of the stream.
        Stream(Posted),
        /// A receive, by its place.
        Receive(u32),
        Descriptor,
        Foreign,
    }

    pub fn parse(id: u64) -> Id {
        match (id & OURS, (id & !OURS) >> KIND) {
            (0, _) => Id::Foreign,
            (_, 0) => Id::Stream(Posted::Data(id as u32)),
            (_, 1) => Id::Stream(Posted::Control),
            (_, 2) => Id::Stream(Posted::Tail),
            (_, 4) => Id::Descriptor,
            _ => Id::Receive(id as u32),
        }
    }
}

impl Stream {
    /// A stream without a connection; its receives are posted.
    pub fn new(cm: &Cm, sizes: Sizes, waiters: &Arc<Waiters>) -> Result<Arc<Self>, Errno> {
        Self::with(cm, sizes, waiters, false)
    }

    /// The same; `explained`: [`Self::set_gone`] will be called when it ends, and says why.
    pub fn with(cm: &Cm, sizes: Sizes, waiters: &Arc<Waiters>, explained: bool) -> Result<Arc<Self>, Errno> {
        let nic = cm.nic();
        let errno = |error: uwarp_rnic::VerbsError| Errno::from_raw_os_error(error.errno());
        let pd = Pd::new();
        // An upgraded socket has descriptors, too, and its queue pair is the program's to use.
        let (more, foreign, pieces) =
            if explained { (ENTRIES, OwnWork::MOST, descriptors::MOST_PIECES as u32) } else { (0, 0, 2) };
        let memory = Memory::new(&pd, &sizes, more)?;
        let receives = u32::from(sizes.receives) + MORE_RECEIVES + more;
        let sends = u32::from(sizes.sends) + foreign;
        let depth = receives + sends;
        let cq = Cq::new(depth, 0, Some(Arc::clone(waiters) as _), Arc::new(NoEvents));
        let caps = QpCaps {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_send_sge: pieces,
            max_recv_sge: 1,
            max_inline_data: INLINE,
        };
        let qp = Qp::create(
            nic,
            QpInit {
                pd: Arc::clone(&pd),
                send_cq: Arc::clone(&cq),
                recv_cq: Arc::clone(&cq),
                srq: None,
                caps,
                sq_sig_all: true,
                cookie: 0,
                async_sink: Arc::new(NoEvents),
            },
        )
        .map_err(errno)?;
        let stream = Self {
            nic: Arc::clone(nic),
            qp,
            cq,
            pd,
            sizes,
            waiters: Arc::clone(waiters),
            own_work: Arc::default(),
            memory,
            explained,
            link: Mutex::new(Linked { link: Link::Pending, peer: None, error: None }),
            state: Mutex::new(State {
                machine: None,
                error: None,
                maps: Maps::default(),
                descriptors: Descriptors::default(),
            }),
            sending: Mutex::default(),
            receiving: Mutex::default(),
        };
        let to_init = QpModify {
            state: Some(QpState::Init),
            access: Some(Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ),
            ..QpModify::default()
        };
        stream.qp.modify(&to_init).map_err(errno)?;
        stream.post_receives(0..receives).map_err(|_| Errno::NOMEM)?;
        Ok(Arc::new(stream))
    }

    /// Its queue pair, to connect.
    pub fn qp(&self) -> &Arc<Qp> {
        &self.qp
    }

    /// The program's own work requests on the queue pair.
    pub fn own_work(&self) -> &Arc<OwnWork> {
        &self.own_work
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// The private data for the peer.
    pub fn conn_data(&self) -> [u8; ConnData::LEN] {
        Machine::conn_data(self.sizes, self.memory.own()).to_bytes()
    }

    /// What has become of its connection.
    pub fn link(&self) -> Link {
        self.link.lock().link.clone()
    }

    /// The connection manager reports. A connection that is gone stays so.
    pub fn set_link(&self, to: Link) {
        let mut linked = self.link.lock();
        if !matches!(linked.link, Link::Failed(_) | Link::Gone) {
            if let Link::Up(peer) = to {
                linked.peer = Some(peer);
            }
            linked.link = to;
        }
        drop(linked);
        self.waiters.wake();
    }

    /// The connection has ended, with an error that the next call reports once what has arrived is read.
    pub fn set_gone(&self, error: Option<Errno>) {
        self.link.lock().error = error;
        self.set_link(Link::Gone);
    }

    /// Takes the error that the next call would report. Looks first: programs ask for it without a call that
    /// waits before.
    pub fn take_error(&self) -> Option<Errno> {
        let mut state = self.enter();
        self.process(&mut state);
        state.error.take()
    }

    fn post_receives(&self, slots: impl Iterator<Item = u32>) -> Result<(), Errno> {
        let sge = |slot| Memory::sge(&self.memory.messages, slot * MESSAGE as u32, MESSAGE as u32);
        let posts: SmallVec<[(u32, Sge); BATCH]> = slots.map(|slot| (slot, sge(slot))).collect();
        let wrs = posts
            .iter()
            .map(|(slot, sge)| RecvWr { wr_id: wr_id::receive(*slot), sges: std::slice::from_ref(sge) });
        self.qp.post_recv(wrs).map_err(|(_, error)| Errno::from_raw_os_error(error.errno()))
    }

    /// Locks the stream, for a call.
    fn enter(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        self.begin(&mut state);
        state
    }

    /// Makes the machine when the connection is there.
    fn begin(&self, state: &mut State) {
        // Not locked meanwhile: the end of the connection may be reported while messages are posted.
        let peer = self.link.lock().peer;
        if state.machine.is_none()
            && let Some(peer) = peer
        {
            // A peer that is not uwarp runs over an iWARP device, and librdmacm then uses Sends. A uwarp peer
            // takes either form, whatever its view (docs/adr/037).
            let uwarp = self.qp.peer_is_uwarp();
            let carrier = if uwarp { Carrier::Immediate } else { Carrier::Send };
            state.machine = Some(Machine::new(carrier, self.sizes, self.memory.own(), &peer));
            self.controls(state);
        }
    }

    /// Takes completions, and says to the peer what is due.
    fn process(&self, state: &mut State) {
        if state.machine.is_none() {
            return;
        }
        loop {
            let mut batch = SmallVec::<[Wc; BATCH]>::new();
            let found = self.nic.poll_cq(&self.cq, BATCH, |wc| batch.push(wc));
            self.take_completions(state, &batch);
            if found < BATCH {
                break;
            }
        }
        if matches!(self.link(), Link::Gone) && self.cq.is_empty() {
            let error = self.link.lock().error.take();
            match error {
                Some(errno) => self.failed(state, errno),
                None => self.ended(state, End::Disconnected),
            }
        }
        self.controls(state);
        self.go_on(state);
    }

    fn take_completions(&self, state: &mut State, batch: &[Wc]) {
        let mut free = SmallVec::<[u32; BATCH]>::new();
        for wc in batch {
            let Some(machine) = &mut state.machine else { return };
            match wr_id::parse(wc.wr_id) {
                Id::Stream(posted) => {
                    machine.completed(posted);
                    if wc.status != WcStatus::Success {
                        self.send_failed(state, wc.status);
                    }
                }
                Id::Descriptor => self.descriptor_completed(state, wc),
                Id::Foreign => self.foreign_completed(state, wc),
                // Receives are flushed when the connection ends; that is reported otherwise.
                Id::Receive(_) if wc.status == WcStatus::WrFlushErr => {}
                Id::Receive(_) if wc.status != WcStatus::Success => self.failed(state, Errno::IO),
                Id::Receive(slot) => {
                    free.push(slot);
                    let done = match self.message_of(machine, wc, slot) {
                        Some(Message::Unknown(bits)) if self.explained => self.noticed(state, bits),
                        Some(message) => machine.message(message),
                        None => Ok(()),
                    };
                    if let Err(violation) = done {
                        tracing::warn!(
                            qpn = self.qp.qpn(),
                            ?violation,
                            "the peer broke the rsocket protocol"
                        );
                        self.failed(state, Errno::PROTO);
                    }
                }
            }
        }
        let alive = state.machine.as_ref().is_some_and(|machine| !machine.gone());
        if alive && !free.is_empty() && self.post_receives(free.into_iter()).is_err() {
            self.ended(state, End::Disconnected);
        }
        self.look_at_targets(state);
    }

    /// The message behind a completed receive.
    fn message_of(&self, machine: &Machine, wc: &Wc, slot: u32) -> Option<Message> {
        if wc.flags.contains(WcFlags::WITH_IMM) {
            return Some(Message::from_bits(u32::from_be(wc.imm_or_inv)));
        }
        let place = self.memory.messages.0.seg().part(slot as usize * MESSAGE, MESSAGE);
        (wc.byte_len as usize == MESSAGE)
            .then(|| Message::from_bytes(read(place).unwrap_or_default(), machine.peer_order()))
    }

    fn look_at_targets(&self, state: &mut State) {
        let Some(machine) = &mut state.machine else { return };
        while let Some(index) = machine.next_target() {
            if !machine.target(self.memory.target(index)) {
                break;
            }
            self.memory.clear(index);
        }
    }

    /// A send work request has failed. A flush follows from something else: from the peer's end, or from the
    /// work request in front.
    fn send_failed(&self, state: &mut State, status: WcStatus) {
        match status {
            WcStatus::WrFlushErr | WcStatus::RetryExcErr | WcStatus::RespTimeoutErr if self.explained => {}
            WcStatus::WrFlushErr => self.ended(state, End::Disconnected),
            WcStatus::RetryExcErr | WcStatus::RespTimeoutErr => self.failed(state, Errno::TIMEDOUT),
            _ => self.failed(state, Errno::IO),
        }
    }

    fn failed(&self, state: &mut State, errno: Errno) {
        if state.machine.as_ref().is_some_and(|machine| machine.ended().is_none()) {
            state.error.get_or_insert(errno);
        }
        self.ended(state, End::Failed);
    }

    fn ended(&self, state: &mut State, end: End) {
        if let Some(machine) = &mut state.machine {
            machine.end(end);
        }
    }

    /// Posts the control messages that are due.
    fn controls(&self, state: &mut State) {
        loop {
            let Some(machine) = &mut state.machine else { return };
            let Some(control) = machine.poll_control() else { return };
            let carrier = machine.carrier();
            let done = match &control {
                Control::Message(message) => self.post_message(carrier, machine.anywhere(), *message),
                Control::Target { to, key, bytes, message } => {
                    self.post_target(carrier, (*to, *key), bytes, *message)
                }
            };
            if done.is_err() {
                self.ended(state, End::Disconnected);
            }
        }
    }

    fn post(&self, wrs: &[SendWr<'_>]) -> Result<(), Errno> {
        self.qp.post_send(wrs.iter().copied()).map_err(|(_, error)| {
            tracing::debug!(qpn = self.qp.qpn(), %error, "a stream's work request was refused");
            Errno::from_raw_os_error(error.errno())
        })
    }

    fn post_message(&self, carrier: Carrier, (to, stag): (u64, u32), message: Message) -> Result<(), Errno> {
        let bytes = message.bytes();
        let sge = inline(&bytes);
        let (op, sges) = match carrier {
            Carrier::Send => (SendOp::Send { invalidate: None }, std::slice::from_ref(&sge)),
            Carrier::Immediate => {
                (SendOp::WriteImmediate { stag, to, imm: message.immediate() }, [].as_slice())
            }
        };
        self.post(&[SendWr { wr_id: wr_id::of(Posted::Control), op, flags: SendFlags::INLINE, sges }])
    }

    fn post_target(
        &self,
        carrier: Carrier,
        (to, stag): (u64, u32),
        entry: &[u8],
        message: Message,
    ) -> Result<(), Errno> {
        let sge = inline(entry);
        let bytes = message.bytes();
        let (wr_id, flags, sges) =
            (wr_id::of(Posted::Control), SendFlags::INLINE, std::slice::from_ref(&sge));
        match carrier {
            Carrier::Immediate => {
                let op = SendOp::WriteImmediate { stag, to, imm: message.immediate() };
                self.post(&[SendWr { wr_id, op, flags, sges }])
            }
            Carrier::Send => {
                let tail = inline(&bytes);
                let send = SendOp::Send { invalidate: None };
                self.post(&[
                    SendWr { wr_id, op: SendOp::Write { stag, to }, flags, sges },
                    SendWr { wr_id, op: send, flags, sges: std::slice::from_ref(&tail) },
                ])
            }
        }
    }

    /// Posts a write whose bytes are in the send buffer.
    fn post_write(&self, carrier: Carrier, write: &Write) -> Result<(), Errno> {
        let first = write.len.min(self.sizes.send_buffer - write.from);
        let sges = [
            Memory::sge(&self.memory.staged, write.from, first),
            Memory::sge(&self.memory.staged, 0, write.len - first),
        ];
        let sges = if first == write.len { &sges[..1] } else { &sges[..] };
        let (stag, to, flags) = (write.key, write.to, SendFlags::empty());
        let wr = |op| SendWr { wr_id: wr_id::of(Posted::Data(write.len)), op, flags, sges };
        match (write.message, carrier) {
            (None, _) => self.post(&[wr(SendOp::Write { stag, to })]),
            (Some(message), Carrier::Immediate) => {
                self.post(&[wr(SendOp::WriteImmediate { stag, to, imm: message.immediate() })])
            }
            (Some(message), Carrier::Send) => {
                let bytes = message.bytes();
                let tail = inline(&bytes);
                self.post(&[
                    wr(SendOp::Write { stag, to }),
                    SendWr {
                        wr_id: wr_id::of(Posted::Tail),
                        op: SendOp::Send { invalidate: None },
                        flags: SendFlags::INLINE,
                        sges: std::slice::from_ref(&tail),
                    },
                ])
            }
        }
    }

    /// The send buffer from `at` on, in at most two pieces.
    fn staged(&self, at: u32, len: u32) -> [MemSeg; 2] {
        let all = self.memory.staged.0.seg();
        let first = all.part(at as usize, len as usize);
        [first, all.part(0, len as usize - first.len)]
    }

    /// Waits until no other call sends, or receives: a call's bytes stay together.
    fn turn<'a>(
        &'a self,
        take: impl Fn(&'a Self) -> Option<MutexGuard<'a, ()>>,
        wait: &mut impl FnMut() -> Result<(), Errno>,
    ) -> Result<Turn<'a>, Errno> {
        loop {
            if let Some(held) = take(self) {
                return Ok(Turn { held: Some(held), waiters: &self.waiters });
            }
            wait()?;
        }
    }

    /// Sends the bytes of `buffers`. `wait` waits until the stream has changed, or fails if the call must not
    /// wait. Returns how many bytes were taken.
    pub fn send(
        &self,
        buffers: &[MemSeg],
        mut wait: impl FnMut() -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        let _turn = self.turn(|stream| stream.sending.try_lock(), &mut wait)?;
        let mut source = Cursor::new(buffers);
        let mut sent = 0;
        // Nothing can be sent, too, if anything could be.
        while source.left() == 0 {
            match self.may_send(&mut self.enter()) {
                Err(Errno::AGAIN) => wait()?,
                other => return other.map(|()| 0),
            }
        }
        while source.left() > 0 {
            let mut state = self.enter();
            match self.send_some(&mut state, &mut source) {
                // Not connected yet, or no room.
                Ok(0) | Err(Errno::AGAIN) => {}
                Ok(n) => {
                    sent += n;
                    continue;
                }
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

    /// Sends what can be sent at once; 0: nothing now.
    fn send_some(&self, state: &mut State, source: &mut Cursor<'_>) -> Result<usize, Errno> {
        self.may_send(state)?;
        self.send_maps(state)?;
        let Some(machine) = &mut state.machine else { return Err(Errno::NOTCONN) };
        let room = machine.room().min(u32::try_from(source.left()).unwrap_or(u32::MAX));
        if room == 0 {
            return Ok(0);
        }
        // Copied first: a program's bad buffer must leave the stream as it is.
        source.copy_to(self.staged(machine.staging(), room))?;
        let Some(write) = machine.send(room) else { return Ok(0) };
        let carrier = machine.carrier();
        if let Err(errno) = self.post_write(carrier, &write) {
            self.ended(state, End::Disconnected);
            return Err(if errno == Errno::NODEV { errno } else { Errno::CONNRESET });
        }
        Ok(room as usize)
    }

    /// Whether data can be sent, now or later. Takes completions if it cannot be sent now.
    fn may_send(&self, state: &mut State) -> Result<(), Errno> {
        let Some(machine) = &state.machine else { return Err(self.not_connected()) };
        if machine.room() == 0 {
            self.look_at_targets(state);
        }
        let no_room = state.machine.as_ref().is_some_and(|machine| machine.room() == 0);
        // The peer may have said that it is done.
        if no_room || !self.cq.is_empty() || self.link() == Link::Gone {
            self.process(state);
        }
        if let Some(errno) = state.error.take() {
            return Err(errno);
        }
        match &state.machine {
            Some(machine) if machine.said_last() => Err(Errno::PIPE),
            Some(machine) if machine.gone() => Err(Errno::CONNRESET),
            Some(machine) if !machine.writable() => Err(Errno::PIPE),
            _ => Ok(()),
        }
    }

    /// Why there is no machine.
    fn not_connected(&self) -> Errno {
        match self.link() {
            Link::Pending => Errno::AGAIN,
            Link::Failed(_) | Link::Up(_) | Link::Gone => Errno::NOTCONN,
        }
    }

    /// Receives into `buffers`: what is there, or all that fits if `all`. `peek`: the bytes stay. Returns 0
    /// at the end of the stream. A call for no bytes waits for data, too.
    pub fn receive(
        &self,
        buffers: &[MemSeg],
        all: bool,
        peek: bool,
        mut wait: impl FnMut() -> Result<(), Errno>,
    ) -> Result<usize, Errno> {
        let _turn = self.turn(|stream| stream.receiving.try_lock(), &mut wait)?;
        let mut sink = Cursor::new(buffers);
        let mut received = 0;
        loop {
            let mut state = self.enter();
            if state.machine.is_none() {
                match self.not_connected() {
                    Errno::AGAIN => {}
                    errno => return Err(errno),
                }
            }
            // A program that looks until a whole header is there never takes what there is.
            let enough = if peek { u32::try_from(sink.left()).unwrap_or(u32::MAX) } else { 1 };
            if state.machine.as_ref().is_some_and(|machine| machine.unread() < enough.max(1)) {
                self.process(&mut state);
            }
            match self.receive_some(&mut state, &mut sink, peek) {
                Ok(some) => received += some,
                Err(_) if received > 0 => return Ok(received),
                Err(errno) => return Err(errno),
            }
            let there = state.machine.as_ref().is_some_and(|machine| machine.unread() > 0);
            if sink.left() == 0 && (received > 0 || there) || received > 0 && (peek || !all) {
                return Ok(received);
            }
            if let Some(machine) = &state.machine
                && !machine.readable()
                && (peek || machine.unread() == 0)
            {
                return match state.error.take() {
                    Some(errno) if received == 0 => Err(errno),
                    _ => Ok(received),
                };
            }
            drop(state);
            match wait() {
                Ok(()) => {}
                Err(_) if received > 0 => return Ok(received),
                Err(errno) => return Err(errno),
            }
        }
    }

    fn receive_some(&self, state: &mut State, sink: &mut Cursor<'_>, peek: bool) -> Result<usize, Errno> {
        let Some(machine) = &mut state.machine else { return Ok(0) };
        let ring = self.memory.ring.0.seg();
        let mut seen = 0;
        loop {
            let (at, len) = machine.next(if peek { seen } else { 0 });
            let copied = match sink.copy_from(ring.part(at as usize, len as usize)) {
                Ok(copied) => copied as u32,
                // What was read before is not lost.
                Err(_) if seen > 0 => break,
                Err(errno) => return Err(errno),
            };
            if copied == 0 {
                break;
            }
            if !peek {
                machine.take(copied);
            }
            seen += copied;
        }
        if !peek && seen > 0 {
            self.controls(state);
        }
        Ok(seen as usize)
    }

    /// Prepares to wait for a change.
    pub fn arm(&self, waiting: &Waiting) {
        self.cq.arm(false);
        waiting.channel().armed(&Arc::downgrade(&self.cq));
    }

    /// The next completion wakes those who wait.
    pub fn report_next(&self) {
        self.cq.arm(false);
    }

    /// What the stream is ready for.
    pub fn readiness(&self) -> Ready {
        let mut state = self.enter();
        if state.machine.is_none() {
            let failed = matches!(self.link(), Link::Failed(_) | Link::Gone);
            return Ready { readable: failed, writable: failed, error: failed, ..Ready::default() };
        }
        self.process(&mut state);
        self.look_at_targets(&mut state);
        let Some(machine) = &state.machine else { return Ready::default() };
        let ended = machine.ended();
        Ready {
            readable: machine.unread() > 0 || !machine.readable(),
            writable: machine.room() > 0 || !machine.writable(),
            peer_done: !machine.readable(),
            // Programs give up on a hang-up, so what is there comes first: librdmacm says "disconnected" for
            // what the kernel's sockets call the end of the stream.
            hangup: machine.unread() == 0 && (ended.is_some() || !(machine.readable() || machine.writable())),
            error: ended == Some(End::Failed) && state.error.is_some(),
            completion: state.descriptors.has_completion(),
        }
    }

    /// Whether it is connected: established, and not ended. Begins the stream if it is established now.
    pub fn is_connected(&self) -> bool {
        self.enter().machine.as_ref().is_some_and(|machine| machine.ended().is_none())
    }

    /// Unread bytes.
    pub fn unread(&self) -> usize {
        let mut state = self.enter();
        self.process(&mut state);
        state.machine.as_ref().map_or(0, |machine| machine.unread() as usize)
    }

    /// See [`Machine::is_over`].
    pub fn is_over(&self) -> bool {
        let mut state = self.enter();
        self.process(&mut state);
        state.machine.as_ref().is_some_and(Machine::is_over)
    }

    /// Shuts down one direction or both, and tells the peer.
    pub fn shut(&self, reading: bool, writing: bool) -> Result<(), Errno> {
        let mut state = self.enter();
        // What the peer has said so far comes first: it decides what it must hear.
        self.process(&mut state);
        let Some(machine) = &mut state.machine else { return Err(Errno::NOTCONN) };
        match (reading, writing) {
            (true, true) => machine.shut(),
            (true, false) => machine.shut_reading(),
            (false, true) => machine.shut_writing(),
            (false, false) => {}
        }
        self.process(&mut state);
        drop(state);
        // Other threads that wait for it will find it shut.
        self.waiters.wake();
        Ok(())
    }

    /// Whether all that was sent has reached the peer, as far as that can be known, or never will.
    pub fn is_drained(&self) -> bool {
        let mut state = self.enter();
        self.process(&mut state);
        state.machine.as_ref().is_none_or(|machine| machine.all_sent() || machine.gone())
    }

    /// The same, for the engine. False while another thread uses the stream, and goes on itself.
    pub fn is_drained_meanwhile(&self) -> bool {
        let Some(mut state) = self.state.try_lock() else { return false };
        self.begin(&mut state);
        self.process(&mut state);
        let drained = state.machine.as_ref().is_none_or(|machine| machine.all_sent() || machine.gone());
        drop(state);
        // It may have taken a completion for which another thread sleeps.
        self.waiters.wake();
        drained
    }

    /// A sign of life: an empty Write, without a message. Does nothing while another thread uses the stream.
    pub fn keepalive(&self) {
        let Some(mut state) = self.state.try_lock() else { return };
        // What has completed already, without progress: this is called by the engine.
        let mut batch = SmallVec::<[Wc; BATCH]>::new();
        self.cq.poll(BATCH, |wc| batch.push(wc));
        self.begin(&mut state);
        self.take_completions(&mut state, &batch);
        let to = state.machine.as_mut().and_then(|machine| machine.keepalive().then(|| machine.anywhere()));
        if let Some((to, stag)) = to {
            let op = SendOp::Write { stag, to };
            let flags = SendFlags::empty();
            let wr = SendWr { wr_id: wr_id::of(Posted::Control), op, flags, sges: &[] };
            if self.post(&[wr]).is_err() {
                self.ended(&mut state, End::Disconnected);
            }
        }
    }

    /// Who waits for it.
    pub fn waiters(&self) -> &Arc<Waiters> {
        &self.waiters
    }

    /// For a table that must not keep it.
    pub fn downgrade(self: &Arc<Self>) -> Weak<Self> {
        Arc::downgrade(self)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.qp.destroy();
    }
}

/// The right of one call to send, or to receive. The next call is woken when this is dropped.
struct Turn<'a> {
    held: Option<MutexGuard<'a, ()>>,
    waiters: &'a Waiters,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.held = None;
        self.waiters.wake();
    }
}

/// What a socket is ready for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ready {
    /// A call that receives would not wait.
    pub readable: bool,
    /// A call that sends would not wait.
    pub writable: bool,
    /// The peer sends no more.
    pub peer_done: bool,
    /// Both directions are done.
    pub hangup: bool,
    /// There is an error to take.
    pub error: bool,
    /// A descriptor is done.
    pub completion: bool,
}

/// Memory that is copied during the post; it needs no key.
fn inline(bytes: &[u8]) -> Sge {
    Sge {
        addr: bytes.as_ptr().expose_provenance() as u64,
        length: u32::try_from(bytes.len()).unwrap_or(0),
        lkey: 0,
    }
}

/// A program's buffers, and how far they are used.
struct Cursor<'a> {
    buffers: &'a [MemSeg],
    /// Of the first buffer.
    used: usize,
    left: usize,
}

impl<'a> Cursor<'a> {
    fn new(buffers: &'a [MemSeg]) -> Self {
        Self { buffers, used: 0, left: buffers.iter().map(|buffer| buffer.len).sum() }
    }

    fn left(&self) -> usize {
        self.left
    }

    /// The next piece of the program's memory.
    fn piece(&mut self) -> MemSeg {
        while let [first, rest @ ..] = self.buffers {
            if self.used < first.len {
                return first.part(self.used, first.len);
            }
            (self.buffers, self.used) = (rest, 0);
        }
        MemSeg { addr: 0, len: 0 }
    }

    fn advance(&mut self, bytes: usize) {
        self.used += bytes;
        self.left -= bytes;
    }

    /// Copies to memory of ours, all of it.
    fn copy_to(&mut self, ours: [MemSeg; 2]) -> Result<(), Errno> {
        // A bad buffer behind a good one must not use up the good one.
        let before = (self.buffers, self.used, self.left);
        for mut ours in ours {
            while ours.len > 0 {
                let Ok(n) = from_program(ours, self.piece()) else {
                    (self.buffers, self.used, self.left) = before;
                    return Err(Errno::FAULT);
                };
                if n == 0 {
                    break;
                }
                self.advance(n);
                ours = ours.part(n, ours.len);
            }
        }
        Ok(())
    }

    /// Copies from memory of ours, as much as fits.
    fn copy_from(&mut self, mut ours: MemSeg) -> Result<usize, Errno> {
        let mut copied = 0;
        while ours.len > 0 {
            let n = to_program(self.piece(), ours).map_err(|_| Errno::FAULT)?;
            if n == 0 {
                break;
            }
            self.advance(n);
            copied += n;
            ours = ours.part(n, ours.len);
        }
        Ok(copied)
    }
}
