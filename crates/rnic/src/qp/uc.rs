//! Unreliable connections: a queue pair that sends Sends and RDMA Writes to one other, each of which arrives
//! whole and in its turn, or not at all (docs/rd.md section 5.5).
//!
//! Its messages ride in the exchange of the two processes and are not repeated there (`uwarp_proto::rd`). So
//! the machine keeps nothing of a message, and what is known of one is here: at the sender until its last
//! packet has left ([`UcCore::finished`]), at the receiver while it is incomplete ([`UcCore::place`]).
//!
//! A receiver builds one message at a time, as InfiniBand's responder does. The first segment of a later one
//! ends it: its receive is still the first of the queue, and the later message takes it. So a lost message
//! needs no timer, and none is ever completed behind a later one.

mod receive;

use std::collections::VecDeque;

use uwarp_proto::rd::{MessageId, Outgoing, QpnPair, Target, Ticket};
use uwarp_wire::ddp::QN_SEND;
use uwarp_wire::rd::segment::First;
use uwarp_wire::rdmap::{Control, Opcode, UWARP_SOLICITED};

use self::receive::Incomplete;
pub use self::receive::UcPlaced;
use super::attr::{QpAttr, QpInit, QpModify};
use super::counters::Snapshot;
use super::datagrams::{Drops, copy_out};
use super::shell::Shell;
use super::state::QpState;
use crate::ah::{Endpoint, port_of};
use crate::error::VerbsError;
use crate::mr::MrCache;
use crate::queues::{Phase, SqSlot};
use crate::wr::{RecvWr, SendFlags, SendOp, SendWr, Wc, WcStatus};

/// A message for the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UcMessage {
    /// The queue pair's name for it, until it has left.
    pub request: u64,
    /// Where it goes.
    pub endpoint: Endpoint,
    /// What the machine needs to know.
    pub message: Outgoing,
}

/// A queue pair of an unreliable connection without its socket.
pub struct UcCore {
    shell: Shell,
    /// The peer, from the change to RTR on.
    peer: Option<Endpoint>,
    /// The machine's names for the messages that it has, oldest first.
    tickets: VecDeque<(u64, Ticket)>,
    /// Messages that the machine must withdraw.
    withdrawn: VecDeque<Ticket>,
    /// In SQD: work requests with lower numbers go on.
    drain_end: u64,
    /// The message that arrives.
    incomplete: Option<Incomplete>,
    /// The last message that has begun. What comes of those before it comes too late.
    last: Option<MessageId>,
    /// The exchange with which the peer's last good message has come, in any life of this queue pair.
    known: Option<u64>,
    /// Regions that the peer named last.
    remote: MrCache,
    drops: Drops,
}

impl UcCore {
    /// A queue pair in RESET.
    pub fn new(qpn: u32, init: QpInit) -> Self {
        Self {
            shell: Shell::new(qpn, init),
            peer: None,
            tickets: VecDeque::new(),
            withdrawn: VecDeque::new(),
            drain_end: 0,
            incomplete: None,
            last: None,
            known: None,
            remote: MrCache::of_peer(qpn),
            drops: Drops::default(),
        }
    }

    /// Its attributes.
    pub fn query(&self) -> QpAttr {
        self.shell.attr
    }

    /// Where its messages go.
    pub fn peer(&self) -> Option<Endpoint> {
        self.peer
    }

    /// The messages that it has dropped.
    pub fn drops(&self) -> Drops {
        self.drops
    }

    /// What it has done and is at.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            counters: self.shell.counters,
            sends_posted: self.shell.sq.len(),
            receives_posted: self.shell.rq.len(),
            // No other end speaks this.
            peer_is_uwarp: self.peer.is_some(),
            ..Snapshot::default()
        }
    }

    /// Changes attributes and state. All or nothing. `peer`: the host of the peer, if that is among the
    /// changes; its port is ignored. See [`Self::take_withdrawn`].
    pub fn modify(&mut self, change: &QpModify, peer: Option<Endpoint>) -> Result<(), VerbsError> {
        let (from, to) = (self.shell.attr.state, self.shell.check(change)?);
        self.shell.attr.apply(change);
        if peer.is_some_and(|peer| self.peer.is_some_and(|old| old.to.ip() != peer.to.ip())) {
            // By another path its messages have other numbers, which may be lower.
            (self.incomplete, self.last) = (None, None);
        }
        self.peer = peer.or(self.peer);
        let port = port_of(self.shell.attr.dest_qp_num);
        self.peer.iter_mut().for_each(|peer| peer.to.set_port(port));
        if from != to {
            self.enter(to, change.sqd_async_notify.unwrap_or(false));
        }
        Ok(())
    }

    /// The program destroys the queue pair: as RESET.
    pub fn destroy(&mut self) {
        self.enter(QpState::Reset, false);
    }

    fn enter(&mut self, to: QpState, notify_sqd: bool) {
        match to {
            QpState::Reset => {
                self.withdraw_all();
                (self.incomplete, self.last, self.peer) = (None, None, None);
                self.shell.reset();
            }
            QpState::Err => self.flush(),
            to => self.shell.go_to(to, notify_sqd),
        }
        if to == QpState::Sqd {
            self.drain_end = self.shell.sq.end();
            self.check_drained();
        }
    }

    fn check_drained(&mut self) {
        if self.shell.attr.sq_draining && self.shell.sq.head >= self.drain_end {
            self.shell.drained();
        }
    }

    fn withdraw_all(&mut self) {
        self.withdrawn.extend(self.tickets.drain(..).map(|(_, ticket)| ticket));
    }

    /// To the error state: what has not left and the receives complete with a flush error.
    fn flush(&mut self) {
        self.shell.fail();
        self.incomplete = None;
        self.flush_sends();
        self.shell.flush_receives();
        self.check_overflow();
        self.shell.last_receive_reached();
    }

    fn flush_sends(&mut self) {
        self.withdraw_all();
        while let Some(slot) = self.shell.sq.pop() {
            self.complete(&slot, WcStatus::WrFlushErr);
        }
        self.check_drained();
    }

    /// A completion queue was full: the queue pair fails.
    fn check_overflow(&mut self) {
        if self.shell.reports_overflow() && self.shell.attr.state != QpState::Err {
            self.enter(QpState::Err, false);
        }
    }

    /// Completes the work request that was just taken out. A failure is always a completion.
    fn complete(&mut self, slot: &SqSlot, status: WcStatus) {
        if status != WcStatus::Success || self.shell.signals(slot.flags) {
            self.shell.complete_send(Wc::new(slot.wr_id, status, slot.op.completion(), self.shell.qpn));
        }
    }

    /// Posts a message.
    pub fn post_send(&mut self, wr: &SendWr<'_>) -> Result<(), VerbsError> {
        self.check_send(wr, 0)?;
        self.post_checked(wr);
        Ok(())
    }

    /// Whether a message can be posted behind `ahead` others, which have been checked and come first. Nothing
    /// is posted.
    pub fn check_send(&mut self, wr: &SendWr<'_>, ahead: u32) -> Result<(), VerbsError> {
        self.shell.may_send()?;
        if target_of(wr.op, false).is_none() {
            return Err(VerbsError::Invalid("an unreliable connection has Sends and RDMA Writes only"));
        }
        self.shell.sq.check(wr, ahead)
    }

    /// Posts a message that [`Self::check_send`] has allowed.
    pub fn post_checked(&mut self, wr: &SendWr<'_>) {
        if matches!(self.shell.attr.state, QpState::Err | QpState::Sqe) {
            self.shell.sq.pass();
            let wc = Wc::new(wr.wr_id, WcStatus::WrFlushErr, wr.op.completion(), self.shell.qpn);
            self.shell.complete_send(wc);
            self.check_overflow();
        } else {
            self.shell.sq.post(wr);
        }
    }

    /// The oldest message that may go to the exchange now. The owner gives it to the machine, and then the
    /// machine's name for it to [`Self::assign`]; a message to this process itself it moves by its own means.
    pub fn next_message(&mut self) -> Option<UcMessage> {
        let end = match self.shell.attr.state {
            QpState::Rts => u64::MAX,
            QpState::Sqd => self.drain_end,
            _ => return None,
        };
        let (attr, sq) = (&self.shell.attr, &mut self.shell.sq);
        let (request, endpoint) = (sq.next, self.peer?);
        let slot = sq.slot_mut(request).filter(|_| request < end)?;
        let target = target_of(slot.op, slot.flags.contains(SendFlags::SOLICITED))?;
        let immediate = match slot.op {
            SendOp::SendImmediate { imm } | SendOp::WriteImmediate { imm, .. } => Some(imm),
            _ => None,
        };
        let message = Outgoing {
            pair: QpnPair { source: self.shell.qpn, destination: attr.dest_qp_num },
            first: First { qkey: attr.sq_psn, immediate, job_key: None },
            target,
            len: slot.total,
            ordered: false,
            rnr_retry: 0,
            unrepeated: true,
        };
        sq.next += 1;
        Some(UcMessage { request, endpoint, message })
    }

    /// The machine's name for a message. If the work request has ended in between, the message is the next
    /// one in [`Self::take_withdrawn`].
    pub fn assign(&mut self, request: u64, ticket: Ticket) {
        if self.shell.sq.slot(request).is_some() {
            self.tickets.push_back((request, ticket));
        } else {
            self.withdrawn.push_back(ticket);
        }
    }

    /// Appends `len` bytes of a message to `out`, from `offset` on, as they are in the program's memory now.
    /// If false, nothing was appended: the work request has ended, or its memory must not be used any more.
    /// The owner then withdraws the message and calls [`Self::fail`].
    pub fn fill(&mut self, request: u64, offset: u32, len: u32, out: &mut Vec<u8>) -> bool {
        let Shell { local, pd, sq, .. } = &mut self.shell;
        let Some(slot) = sq.slot(request).copied() else { return false };
        if u64::from(offset) + u64::from(len) > u64::from(slot.total) {
            return false;
        }
        let start = out.len();
        let good = if slot.flags.contains(SendFlags::INLINE) {
            let bytes = sq.inline_bytes(request, slot.total);
            let bytes = bytes.get(offset as usize..).and_then(|rest| rest.get(..len as usize));
            bytes.map(|bytes| out.extend_from_slice(bytes)).is_some()
        } else {
            copy_out(local, pd.id(), sq.sges(&slot), offset, len, out)
        };
        if !good {
            out.truncate(start);
        }
        good
    }

    /// A message has left, or will not: then it is lost. Does nothing if the work request has ended.
    pub fn finished(&mut self, request: u64, has_left: bool) {
        let Some(slot) = self.shell.sq.slot_mut(request) else { return };
        slot.phase = Phase::Done;
        let (op, total) = (slot.op, slot.total);
        if has_left {
            self.shell.counters.completed(op, total);
        } else {
            self.drops.unsent += 1;
        }
        self.retire();
    }

    /// The memory of a message must not be used: its work request fails, and those behind it are flushed.
    /// Does nothing if it has ended.
    pub fn fail(&mut self, request: u64, status: WcStatus) {
        let Some(slot) = self.shell.sq.slot_mut(request) else { return };
        slot.phase = Phase::Failed(status);
        self.tickets.retain(|(of, _)| *of != request);
        self.retire();
    }

    /// Completes what has ended and stands in front.
    fn retire(&mut self) {
        while let Some(front) = self.shell.sq.front().copied() {
            let status = match front.phase {
                Phase::Done => WcStatus::Success,
                Phase::Failed(status) => status,
                _ => break,
            };
            self.shell.sq.pop();
            self.complete(&front, status);
            if status != WcStatus::Success {
                // As InfiniBand: the queue pair receives, and sends again when the program says so.
                if matches!(self.shell.attr.state, QpState::Rts | QpState::Sqd) {
                    self.shell.attr.state = QpState::Sqe;
                }
                self.flush_sends();
            }
        }
        let head = self.shell.sq.head;
        while self.tickets.front().is_some_and(|(request, _)| *request < head) {
            self.tickets.pop_front();
        }
        self.check_drained();
        self.check_overflow();
    }

    /// The next message that the machine must withdraw, because its work request was flushed or dropped.
    /// There may be some after each call: when a completion queue is full, the queue pair fails in the middle
    /// of any.
    pub fn take_withdrawn(&mut self) -> Option<Ticket> {
        self.withdrawn.pop_front()
    }

    /// Posts a receive.
    pub fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), VerbsError> {
        self.shell.post_recv(wr)?;
        self.check_overflow();
        Ok(())
    }
}

/// Where a message goes at the receiver. `None`: this service has no such operation.
fn target_of(op: SendOp, solicited: bool) -> Option<Target> {
    let rsvdulp = |opcode| Control::new(opcode).to_byte();
    match op {
        SendOp::Send { invalidate: None } | SendOp::SendImmediate { .. } => {
            let opcode = if solicited { Opcode::SendSe } else { Opcode::Send };
            Some(Target::Untagged { qn: QN_SEND, rsvdulp: rsvdulp(opcode), rsvdulp32: 0 })
        }
        SendOp::Write { stag, to } => Some(Target::Tagged { stag, to, rsvdulp: rsvdulp(Opcode::Write) }),
        SendOp::WriteImmediate { stag, to, .. } => {
            let event = if solicited { UWARP_SOLICITED } else { 0 };
            Some(Target::Tagged { stag, to, rsvdulp: rsvdulp(Opcode::Write) | event })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests;
