//! Reliable datagrams: a queue pair that sends messages of any length to anyone, each of which is delivered
//! once or fails (docs/rd.md).
//!
//! The machine of a process (`uwarp_proto::rd`) numbers, repairs and orders the messages of all its queue
//! pairs. A queue pair has the work requests: it gives each message to the machine
//! ([`RdCore::next_message`]), supplies its bytes for every packet and every repair ([`RdCore::fill`]), and
//! completes it when it is done ([`RdCore::finished`]). What arrives goes into receives ([`RdCore::place`]),
//! which stay bound to their messages until these are complete ([`RdCore::deliver`]), or into memory that
//! its sender names ([`remote`]). RDMA Reads and atomic operations are messages, too, and their answers are
//! others ([`asked`], [`RdCore::take_answer`]).
//!
//! A message that fails concerns its own work request only: the queue pair stays in RTS, and is never in SQE.
//! Work requests complete in any order, because a peer that is gone must not hold up those to others.

mod asked;
mod bytes;
mod receive;
mod recording;
mod remote;
mod requests;
mod status;

use std::collections::VecDeque;

use uwarp_proto::rd::{Failure, Outgoing, QpnPair, Ticket};
use uwarp_wire::rd::segment::First;

use self::asked::Asked;
pub use self::bytes::RdBytes;
pub use self::receive::RdSegment;
use self::receive::Receives;
use self::recording::Recording;
pub use self::remote::{AnswerBytes, RdAnswer};
use self::requests::{Payload, Request, Requests};
use self::status::status_of;
use super::attr::{QpAttr, QpInit, QpModify};
use super::counters::Snapshot;
use super::datagrams::{Drops, UdSendWr, copy_out, total_len};
use super::rights::Rights;
use super::shell::Shell;
use super::state::QpState;
use crate::ah::Endpoint;
use crate::error::VerbsError;
use crate::mr::MrCache;
use crate::queues::{ATOMIC_BYTES, MAX_MESSAGE};
use crate::srq::Woken;
use crate::wr::{RecvWr, SendFlags, SendOp, Wc, WcOpcode, WcStatus};

/// What a queue pair for reliable datagrams is made from, besides what every service has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RdInit {
    /// Its messages to one queue pair are delivered in the order of posting.
    pub ordered: bool,
    /// Receives begin with 40 bytes for the routing header, as those of UD.
    pub grh: bool,
    /// Whoever names memory here must have it, and requests of this queue pair that name memory have it where
    /// the program gives them no other. 0: nobody may name memory here.
    pub job_key: u64,
    /// Records of RDMA Write-Records that are open or that the program has not freed: at most 1,024, and none
    /// are taken where this is 0.
    pub max_records: u32,
}

/// A message for the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RdMessage {
    /// The queue pair's name for it, until it has ended.
    pub request: u64,
    /// Where it goes.
    pub endpoint: Endpoint,
    /// What the machine needs to know.
    pub message: Outgoing,
}

/// A queue pair for reliable datagrams without its socket.
pub struct RdCore {
    /// Its send queue only counts places; the work requests are in `requests`.
    shell: Shell,
    how: RdInit,
    requests: Requests,
    /// In SQD: work requests with lower numbers go on, and how many of them have not ended.
    drain_end: u64,
    draining: usize,
    /// Messages that the machine must withdraw.
    withdrawn: VecDeque<Ticket>,
    receives: Receives,
    /// Requests that peers have not answered.
    asked: Asked,
    /// Regions that peers named last, and which peers may name any.
    remote: MrCache,
    rights: Rights,
    /// RDMA Write-Records of peers.
    recording: Option<Box<Recording>>,
    /// Counts RESET and ERR: what was asked before is not answered behind one.
    life: u32,
    /// The answer to the request that was placed last.
    answer: Option<RdAnswer>,
    /// Queue pairs that have a receive which a refused message has given back.
    woken: Woken,
    drops: Drops,
}

impl RdCore {
    /// A queue pair in RESET.
    pub fn new(qpn: u32, init: QpInit, how: RdInit) -> Result<Self, VerbsError> {
        let records = || Recording::new(qpn, how.max_records, init.recv_cq.clone());
        let recording = if how.max_records == 0 { None } else { Some(Box::new(records()?)) };
        Ok(Self {
            recording,
            asked: Asked::new(),
            remote: MrCache::of_peer(qpn),
            rights: Rights::with(how.job_key),
            life: 0,
            answer: None,
            woken: Woken::default(),
            shell: Shell::in_any_order(qpn, init),
            how,
            requests: Requests::default(),
            drain_end: 0,
            draining: 0,
            withdrawn: VecDeque::new(),
            receives: Receives::default(),
            drops: Drops::default(),
        })
    }

    /// Its attributes.
    pub fn query(&self) -> QpAttr {
        self.shell.attr
    }

    /// What it was made from.
    pub fn how(&self) -> RdInit {
        self.how
    }

    /// The segments that it has refused.
    pub fn drops(&self) -> Drops {
        self.drops
    }

    /// What it has done and is at.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            counters: self.shell.counters,
            sends_posted: self.requests.len(),
            receives_posted: self.shell.rq.len(),
            ..Snapshot::default()
        }
    }

    /// Changes attributes and state. All or nothing. See [`Self::take_withdrawn`].
    pub fn modify(&mut self, change: &QpModify) -> Result<(), VerbsError> {
        let (from, to) = (self.shell.attr.state, self.shell.check(change)?);
        self.shell.attr.apply(change);
        self.rights.access = change.access.or(self.rights.access);
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
                self.discard();
                self.rights.access = None;
                self.life += 1;
            }
            QpState::Err => {
                self.flush();
                self.life += 1;
            }
            to => self.shell.go_to(to, notify_sqd),
        }
        if to == QpState::Sqd {
            self.drain_end = self.requests.posted();
            self.draining = self.requests.len();
            self.check_drained();
        }
    }

    fn check_drained(&mut self) {
        if self.shell.attr.sq_draining && self.draining == 0 {
            self.shell.drained();
        }
    }

    /// All work requests, oldest first. The machine must withdraw their messages.
    fn withdraw_all(&mut self) -> Vec<Request> {
        self.asked.clear();
        let requests = self.requests.end_all();
        self.withdrawn.extend(requests.iter().filter_map(|request| request.ticket));
        requests
    }

    /// To RESET: drops everything, without completions.
    fn discard(&mut self) {
        self.withdraw_all();
        if let Some(recording) = &mut self.recording {
            recording.lose_all(&mut self.receives);
            recording.records.clear();
        }
        let bound = self.receives.lose_all();
        if let Some(srq) = &self.shell.srq {
            // These receives make no completion now.
            let places = srq.places();
            bound.iter().for_each(|_| places.free(0));
        }
        self.receives.forget_wanted();
        self.shell.reset();
    }

    /// To the error state: what is not done and the receives complete with a flush error.
    fn flush(&mut self) {
        self.shell.fail();
        for request in self.withdraw_all() {
            self.complete(&request, WcStatus::WrFlushErr);
        }
        if let Some(recording) = &mut self.recording {
            recording.lose_all(&mut self.receives);
        }
        for recv in self.receives.lose_all() {
            let wc = Wc::new(recv.wr_id, WcStatus::WrFlushErr, WcOpcode::Recv, self.shell.qpn);
            self.shell.complete_recv(wc, false);
        }
        self.receives.forget_wanted();
        self.shell.flush_receives();
        self.check_overflow();
        self.shell.last_receive_reached();
    }

    /// A completion queue was full: the queue pair fails.
    fn check_overflow(&mut self) {
        if self.shell.reports_overflow() && self.shell.attr.state != QpState::Err {
            self.enter(QpState::Err, false);
        }
    }

    /// Completes a work request, or only frees its place. A failure is always a completion.
    fn complete(&mut self, request: &Request, status: WcStatus) {
        if request.signaled || status != WcStatus::Success {
            let opcode = request.op.completion();
            let mut wc = Wc::new(request.wr_id, status, opcode, self.shell.qpn);
            if request.op.is_answered() {
                wc.byte_len = request.len;
            }
            self.shell.complete_send(wc);
        } else {
            self.shell.sq.ends_silently();
        }
    }

    /// Posts a message. An error in its length or its address handle is reported by its completion.
    pub fn post_send(&mut self, ud: &UdSendWr<'_>) -> Result<(), VerbsError> {
        self.check_send(ud, 0)?;
        self.post_checked(ud);
        Ok(())
    }

    /// Whether a message can be posted behind `ahead` others, which have been checked and come first. Nothing
    /// is posted.
    pub fn check_send(&mut self, ud: &UdSendWr<'_>, ahead: u32) -> Result<(), VerbsError> {
        self.shell.may_send()?;
        check_op(ud)?;
        self.shell.check_send(&ud.wr)?;
        ud.check_inline(self.shell.attr.caps.max_inline_data)?;
        if ud.ah.is_group() {
            return Err(VerbsError::Invalid("a reliable datagram cannot go to a group"));
        }
        self.shell.sq.check_room(ahead)
    }

    /// Posts a message that [`Self::check_send`] has allowed.
    pub fn post_checked(&mut self, ud: &UdSendWr<'_>) {
        let wr = &ud.wr;
        self.shell.sq.pass();
        let total = total_len(wr.sges);
        let request = Request {
            wr_id: wr.wr_id,
            op: wr.op,
            signaled: self.shell.signals(wr.flags),
            endpoint: ud.ah.endpoint(ud.remote_qpn),
            remote_qpn: ud.remote_qpn,
            qkey: ud.qkey(self.shell.attr.qkey),
            job_key: ud.job_key.or((self.how.job_key != 0).then_some(self.how.job_key)),
            solicited: wr.flags.contains(SendFlags::SOLICITED),
            fence: wr.flags.contains(SendFlags::FENCE),
            len: u32::try_from(total).unwrap_or(u32::MAX),
            id: 0,
            ticket: None,
            number: 0,
        };
        let status = match self.shell.attr.state {
            QpState::Err => WcStatus::WrFlushErr,
            // As adapters: the error shows when the work request is processed.
            _ if ud.ah.pd().id() != self.shell.pd.id() => WcStatus::LocQpOpErr,
            _ if total > u64::from(MAX_MESSAGE) => WcStatus::LocLenErr,
            _ => return self.requests.post(request, wr),
        };
        self.complete(&request, status);
        self.check_overflow();
    }

    /// The oldest message that may go to the exchange now. The owner gives it to the machine, and then the
    /// machine's name for it to [`Self::assign`]; a message to this process itself it moves by its own means.
    /// If it cannot, it calls [`Self::fail`].
    pub fn next_message(&mut self) -> Option<RdMessage> {
        loop {
            let end = match self.shell.attr.state {
                QpState::Rts => u64::MAX,
                QpState::Sqd => self.drain_end,
                _ => return None,
            };
            let asked = &self.asked;
            let may_go = |work: &Request| !work.fence || asked.is_empty();
            let (request, work) = self.requests.next_unsent(end, may_go)?;
            if work.op.is_answered() {
                // Before the question: an atomic operation cannot be undone.
                if !self.has_sink(request, work.len) {
                    self.end(request, WcStatus::LocProtErr);
                    continue;
                }
                let id = self.asked.add(request);
                if let Some(work) = self.requests.get_mut(request) {
                    work.id = id;
                }
            }
            let Some(target) = work.target() else { continue };
            let names_memory = !target.takes_receive();
            let message = Outgoing {
                pair: QpnPair { source: self.shell.qpn, destination: work.remote_qpn },
                first: First {
                    qkey: work.qkey,
                    immediate: immediate_of(work.op),
                    job_key: work.job_key.filter(|_| names_memory),
                },
                target,
                len: work.message_len(),
                ordered: self.how.ordered,
                rnr_retry: self.shell.attr.rnr_retry,
                unrepeated: false,
            };
            return Some(RdMessage { request, endpoint: work.endpoint, message });
        }
    }

    /// Whether a request waits in the send queue: at a fence, or because the queue drains.
    pub fn waits(&self) -> bool {
        self.requests.has_unsent()
    }

    /// The machine's name for a message. If the work request has ended in between, the message is the next
    /// one in [`Self::take_withdrawn`].
    pub fn assign(&mut self, request: u64, ticket: Ticket) {
        match self.requests.get_mut(request) {
            Some(work) => work.ticket = Some(ticket),
            None => self.withdrawn.push_back(ticket),
        }
    }

    /// Appends `len` bytes of a message to `out`, from `offset` on, as they are in the program's memory now.
    /// If false, nothing was appended: the work request has ended, or its memory must not be used any more.
    /// The owner then withdraws the message and calls [`Self::fail`] with [`WcStatus::LocProtErr`].
    pub fn fill(&mut self, request: u64, offset: u32, len: u32, out: &mut Vec<u8>) -> bool {
        if let Some(question) = self.requests.get(request).and_then(Request::question) {
            let part = question.get(offset as usize..).and_then(|rest| rest.get(..len as usize));
            return part.map(|part| out.extend_from_slice(part)).is_some();
        }
        let Some((total, payload)) = self.requests.payload(request) else { return false };
        if u64::from(offset) + u64::from(len) > u64::from(total) {
            return false;
        }
        let start = out.len();
        let good = match payload {
            Payload::Inline(bytes) => {
                let offset = offset as usize;
                bytes.get(offset..offset + len as usize).map(|bytes| out.extend_from_slice(bytes)).is_some()
            }
            Payload::Sges(sges) => {
                let Shell { local, pd, .. } = &mut self.shell;
                copy_out(local, pd.id(), sges.iter(), offset, len, out)
            }
        };
        if !good {
            out.truncate(start);
        }
        good
    }

    /// A message has ended. Does nothing if the work request has.
    pub fn finished(&mut self, request: u64, outcome: Result<(), Failure>) {
        self.end(request, outcome.map_or_else(status_of, |()| WcStatus::Success));
    }

    /// A message cannot be sent, or not any more. Does nothing if its work request has ended.
    pub fn fail(&mut self, request: u64, status: WcStatus) {
        self.end(request, status);
    }

    fn end(&mut self, request: u64, status: WcStatus) {
        let Some(work) = self.requests.end(request) else { return };
        if work.op.is_answered() {
            self.asked.remove(work.id);
        }
        if status == WcStatus::Success {
            self.shell.counters.completed(work.op, work.len);
        }
        self.complete(&work, status);
        // (In SQD, no others end.)
        self.draining = self.draining.saturating_sub(1);
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
        self.receives.added();
        self.check_overflow();
        Ok(())
    }
}

/// Refuses what this service does not have.
fn check_op(ud: &UdSendWr<'_>) -> Result<(), VerbsError> {
    match ud.wr.op {
        SendOp::Send { invalidate: Some(_) }
        | SendOp::Read { invalidate_local: true, .. }
        | SendOp::LocalInvalidate { .. }
        | SendOp::Bind(_) => {
            return Err(VerbsError::Invalid("a queue pair of reliable datagrams has no such operation"));
        }
        _ => {}
    }
    if ud.wr.flags.contains(SendFlags::INLINE) && !ud.wr.op.may_be_inline() {
        return Err(VerbsError::Invalid("inline data goes with Send and RDMA Write only"));
    }
    if ud.wr.op.is_atomic() && total_len(ud.wr.sges) != u64::from(ATOMIC_BYTES) {
        return Err(VerbsError::Invalid("an atomic operation returns exactly 8 bytes"));
    }
    Ok(())
}

fn immediate_of(op: SendOp) -> Option<[u8; 4]> {
    match op {
        SendOp::SendImmediate { imm }
        | SendOp::WriteImmediate { imm, .. }
        | SendOp::WriteRecord { imm, .. } => Some(imm),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
