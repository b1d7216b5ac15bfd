//! Work requests and their completions: what a stream posts, and what becomes of it.

use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_mem::MemSeg;
use uwarp_mem::owned::read;
use uwarp_rnic::{RecvWr, SendFlags, SendOp, SendWr, Sge, Wc, WcFlags, WcStatus};

use super::memory::{MESSAGE, REPOSTED};
use super::verbs::Verbs;
use super::wr_id::{self, Id};
use super::{BATCH, State, Stream};
use crate::machine::{Carrier, Control, End, Machine, Posted, Write};
use crate::wire::Message;

impl<V: Verbs> Stream<V> {
    /// Takes completions, and says to the peer what is due.
    pub(super) fn process(&self, state: &mut State<V>) {
        self.process_by(state, true);
    }

    /// The same; `progress`: receives from the network if there is no completion.
    pub(super) fn process_by(&self, state: &mut State<V>, progress: bool) {
        if state.machine.is_none() {
            return;
        }
        loop {
            let mut batch = SmallVec::<[Wc; BATCH]>::new();
            let found = self.verbs.poll(BATCH, progress, |wc| batch.push(wc));
            self.take_completions(state, &batch);
            if found < BATCH {
                break;
            }
        }
        if self.is_gone() && self.verbs.is_empty() {
            let error = self.link.lock().error.take();
            match error {
                Some(errno) => self.failed(state, errno),
                None => self.ended(state, End::Disconnected),
            }
        }
        self.controls(state);
        self.go_on(state);
    }

    pub(super) fn take_completions(&self, state: &mut State<V>, batch: &[Wc]) {
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
                    state.free.push(slot);
                    let done = match self.message_of(machine, wc, slot) {
                        Some(Message::Unknown(bits)) if self.explained => self.noticed(state, bits),
                        Some(message) => machine.message(message),
                        None => Ok(()),
                    };
                    if let Err(violation) = done {
                        tracing::warn!(
                            qpn = self.verbs.number(),
                            ?violation,
                            "the peer broke the rsocket protocol"
                        );
                        self.failed(state, Errno::PROTO);
                    }
                }
            }
        }
        let alive = state.machine.as_ref().is_some_and(|machine| !machine.gone());
        // Together: each post takes the queue pair's lock, and there are more receives than the peer may use.
        if alive && state.free.len() >= REPOSTED && self.post_receives(state.free.drain(..)).is_err() {
            self.ended(state, End::Disconnected);
        }
        self.look_at_targets(state);
    }

    /// The message behind a completed receive.
    fn message_of(&self, machine: &Machine, wc: &Wc, slot: u32) -> Option<Message> {
        if wc.flags.contains(WcFlags::WITH_IMM) {
            return Some(Message::from_bits(u32::from_be(wc.imm_or_inv)));
        }
        let place = self.memory.messages.seg().part(slot as usize * MESSAGE, MESSAGE);
        (wc.byte_len as usize == MESSAGE)
            .then(|| Message::from_bytes(read(place).unwrap_or_default(), machine.peer_order()))
    }

    pub(super) fn look_at_targets(&self, state: &mut State<V>) {
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
    fn send_failed(&self, state: &mut State<V>, status: WcStatus) {
        match status {
            WcStatus::WrFlushErr | WcStatus::RetryExcErr | WcStatus::RespTimeoutErr if self.explained => {}
            WcStatus::WrFlushErr => self.ended(state, End::Disconnected),
            WcStatus::RetryExcErr | WcStatus::RespTimeoutErr => self.failed(state, Errno::TIMEDOUT),
            _ => self.failed(state, Errno::IO),
        }
    }

    pub(super) fn failed(&self, state: &mut State<V>, errno: Errno) {
        if state.machine.as_ref().is_some_and(|machine| machine.ended().is_none()) {
            state.error.get_or_insert(errno);
        }
        self.ended(state, End::Failed);
    }

    pub(super) fn ended(&self, state: &mut State<V>, end: End) {
        if let Some(machine) = &mut state.machine {
            machine.end(end);
        }
    }

    /// Posts the control messages that are due.
    pub(super) fn controls(&self, state: &mut State<V>) {
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

    pub(super) fn post(&self, wrs: &[SendWr<'_>]) -> Result<(), Errno> {
        self.verbs.post_send(wrs).inspect_err(|errno| {
            tracing::debug!(qpn = self.verbs.number(), %errno, "a stream's work request was refused");
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

    pub(super) fn post_target(
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
    pub(super) fn post_write(&self, carrier: Carrier, write: &Write) -> Result<(), Errno> {
        let first = write.len.min(self.sizes.send_buffer - write.from);
        let sges = [self.memory.staged.sge(write.from, first), self.memory.staged.sge(0, write.len - first)];
        let sges = if first == write.len { &sges[..1] } else { &sges[..] };
        // Only a close waits for the completion of data, and what it sends asks for all. An upgraded socket
        // knows by other means why its connection has ended; for an rsocket, a work request that is not
        // completed would be the reason.
        let relaxed = write.relaxed && self.explained;
        let flags = if relaxed { SendFlags::RELAXED } else { SendFlags::empty() };
        let (stag, to) = (write.key, write.to);
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
    pub(super) fn staged(&self, at: u32, len: u32) -> [MemSeg; 2] {
        let all = self.memory.staged.seg();
        let first = all.part(at as usize, len as usize);
        [first, all.part(0, len as usize - first.len)]
    }

    pub(super) fn post_receives(&self, slots: impl Iterator<Item = u32>) -> Result<(), Errno> {
        let sge = |slot| self.memory.messages.sge(slot * MESSAGE as u32, MESSAGE as u32);
        let posts: SmallVec<[(u32, Sge); BATCH]> = slots.map(|slot| (slot, sge(slot))).collect();
        let wrs = posts
            .iter()
            .map(|(slot, sge)| RecvWr { wr_id: wr_id::receive(*slot), sges: std::slice::from_ref(sge) });
        self.verbs.post_recv(wrs)
    }
}

/// Memory that is copied during the post; it needs no key.
pub(super) fn inline(bytes: &[u8]) -> Sge {
    Sge {
        addr: bytes.as_ptr().expose_provenance() as u64,
        length: u32::try_from(bytes.len()).unwrap_or(0),
        lkey: 0,
    }
}
