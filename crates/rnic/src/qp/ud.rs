//! Unreliable datagrams: a queue pair that sends to and receives from anyone.
//!
//! A post copies the bytes of a work request after their headers and computes the CRC over the copy. The
//! datagram then waits for the lower layer, which usually takes it within the same call
//! ([`UdCore::outgoing`], [`UdCore::sent`]). So the program can reuse its memory at once, and no state is
//! kept about a peer.
//!
//! A received datagram is placed or dropped ([`UdCore::deliver`]); it never changes the state of the queue
//! pair.

mod errors;
mod receiving;
mod recording;
mod sending;
mod writes;

use std::collections::VecDeque;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use uwarp_mem as mem;
use uwarp_proto::datagram::{self, Head};
use uwarp_wire::datagram::QPN_MULTICAST;
use uwarp_wire::datagram::error::ErrorMessage;
use uwarp_wire::datagram::record;

pub use self::errors::PeerError;
use self::errors::{ErrorQueue, Sent, Verdict};
pub use self::receiving::Receiving;
use self::recording::Recording;
pub use self::sending::Run;
use self::sending::{RunEnd, Unsealed};
use self::writes::Write;
use super::attr::{QpAttr, QpInit, QpModify};
use super::counters::Snapshot;
use super::datagrams::{Arrival, Dropped, Drops, UdSendWr, copy_inline, copy_out, immediate_of, total_len};
use super::records::{Record, Records};
use super::rights::{Rights, Source};
use super::shell::Shell;
use super::state::QpState;
use crate::ah::{Endpoint, port_of};
use crate::cq::Completed;
use crate::error::VerbsError;
use crate::event::EventKind;
use crate::mr::{Access, Part, random_u32};
use crate::out::pool;
use crate::trace;
use crate::wr::{RecvWr, SendFlags, SendOp, SendWr, Wc, WcOpcode, WcStatus};

/// Payload of the largest message unless the program asks for more: the largest path MTU of the verbs.
pub const MAX_PAYLOAD: u32 = 4096;
/// Payload of the largest message that a program can ask for ([`UdCore::set_max_message`]).
pub const MOST_PAYLOAD: u32 = datagram::MOST_PAYLOAD as u32;
/// Below this many bytes of sent datagrams, the buffer of waiting ones is not moved.
const MOST_TAKEN: usize = 64 * 1024;

/// A work request that is not complete: its datagram waits for the lower layer, or it has failed and waits
/// for those before it.
struct Pending {
    endpoint: Endpoint,
    wr_id: u64,
    status: WcStatus,
    /// In the staging buffer, behind those before it.
    len: usize,
    payload: u32,
    /// What the program's poll of its completion frees; none: it makes none.
    tail: Option<u32>,
    /// An RDMA Write-Record: many datagrams, none of which is in the staging buffer.
    write: Option<Box<Write>>,
    /// It can be sent in one call with the one before it ([`sending`]).
    follows: bool,
}

/// A datagram queue pair without its socket.
pub struct UdCore {
    /// Its send queue only counts places; what waits is in `pending`.
    shell: Shell,
    pending: VecDeque<Pending>,
    /// Of the last one of these.
    run: RunEnd,
    staged: Vec<u8>,
    /// Bytes of `staged` that were sent.
    taken: usize,
    unsealed: Unsealed,
    /// In SQD: how many of `pending` still go out.
    draining: usize,
    msn: u32,
    incarnation: u32,
    drops: Drops,
    /// Completions of [`Receiving`] that are not in their queue yet.
    arrived: Vec<Completed>,
    max_message: u32,
    /// Where the program wants to hear of Error Messages.
    errors: Option<Box<ErrorQueue>>,
    /// RDMA Write-Records that were posted, and the job key that they have where the program gives no other.
    writes: u32,
    job_key: u64,
    /// Those of peers, if there may be any.
    recording: Option<Box<Recording>>,
}

impl UdCore {
    /// A queue pair in RESET.
    pub fn new(qpn: u32, init: QpInit) -> Result<Self, VerbsError> {
        Ok(Self {
            shell: Shell::new(qpn, init),
            pending: VecDeque::new(),
            run: RunEnd::default(),
            staged: Vec::new(),
            taken: 0,
            unsealed: Unsealed::default(),
            draining: 0,
            msn: 0,
            incarnation: random_u32()?,
            drops: Drops::default(),
            arrived: Vec::new(),
            max_message: MAX_PAYLOAD,
            errors: None,
            writes: 0,
            job_key: 0,
            recording: None,
        })
    }

    /// A queue pair in RESET for RDMA Write-Records, too. Peers need `job_key` to name memory here (0: none
    /// may), and those posted here have it where the program gives them no other. `most`: records that are
    /// open or that the program has not freed, at most 1,024. Each open one may become a completion, for
    /// which the completion queue of receives needs room.
    pub fn with_records(qpn: u32, init: QpInit, job_key: u64, most: u32) -> Result<Self, VerbsError> {
        let records = Records::new(qpn, most, init.recv_cq.clone())?;
        let mut core = Self::new(qpn, init)?;
        core.job_key = job_key;
        core.recording = Some(Box::new(Recording::new(qpn, records, Rights::with(job_key))));
        Ok(core)
    }

    /// Names peers that may name memory. Once there is one, all others may not.
    pub fn allow_source(&mut self, source: Source) -> Result<(), VerbsError> {
        let recording = self.recording.as_mut();
        recording.ok_or(VerbsError::Invalid("nobody can name memory here"))?.rights.allow(source)
    }

    /// A record that has completed, until the program frees it.
    pub fn record(&mut self, name: u64) -> Option<Record> {
        self.recording.as_mut()?.records.read(name)
    }

    /// The program does not need a record any more. False: there is none of this name.
    pub fn free_record(&mut self, name: u64) -> bool {
        self.recording.as_mut().is_some_and(|recording| recording.records.free(name))
    }

    /// When [`Self::expire_records`] has something to do.
    pub fn records_due(&self) -> Option<Instant> {
        self.recording.as_ref()?.due()
    }

    /// Completes the records of which no more is to be expected.
    pub fn expire_records(&mut self, now: Instant) {
        while let Some(record) = self.recording.as_mut().and_then(|recording| recording.expire(now)) {
            self.end_record(record);
        }
    }

    fn end_record(&mut self, record: u64) {
        if self.recording.as_mut().is_some_and(|recording| !recording.records.end(record)) {
            self.shell.note_overflow();
            self.check_overflow();
        }
    }

    /// Places a segment of an RDMA Write-Record into the memory that it names, or drops it.
    pub fn deliver_record(
        &mut self,
        segment: &record::Segment<'_>,
        arrival: &Arrival,
        now: Instant,
    ) -> Result<(), Dropped> {
        let placed = self.place_record(segment, arrival, now);
        if trace::is_on() {
            self.trace_record(segment, arrival, placed);
        }
        if let Err(dropped) = placed {
            self.drops.count(dropped);
        }
        placed
    }

    fn place_record(
        &mut self,
        segment: &record::Segment<'_>,
        arrival: &Arrival,
        now: Instant,
    ) -> Result<(), Dropped> {
        if !self.shell.receives() {
            return Err(Dropped::State);
        }
        if segment.head.qkey != self.shell.attr.qkey {
            return Err(Dropped::Qkey);
        }
        let recording = self.recording.as_mut().ok_or(Dropped::Access)?;
        let whole = recording.place(segment, arrival, self.shell.pd.id(), now)?;
        let received = &mut self.shell.counters.received.write;
        received.bytes += segment.payload.len() as u64;
        if let Some(record) = whole {
            received.messages += 1;
            self.end_record(record);
        }
        Ok(())
    }

    fn trace_record(&self, segment: &record::Segment<'_>, arrival: &Arrival, placed: Result<(), Dropped>) {
        let last = segment.head.offset + segment.payload.len() as u32 == segment.head.message_len;
        trace::datagram(trace::Datagram {
            qpn: Some(self.shell.qpn),
            way: trace::Way::In,
            peer: SocketAddr::new(arrival.from, port_of(segment.head.source_qpn)),
            group: None,
            head: &segment.head.to_bytes(last),
            len: record::Head::OVERHEAD + segment.payload.len(),
            dropped: placed.as_ref().err().map(|why| why as &dyn fmt::Display),
        });
    }

    /// Payload of the largest message that may be sent.
    pub fn max_message(&self) -> u32 {
        self.max_message
    }

    /// Sets the payload of the largest message that may be sent: [`MAX_PAYLOAD`] to [`MOST_PAYLOAD`]. What is
    /// received depends on the receives alone.
    pub fn set_max_message(&mut self, bytes: u32) -> Result<(), VerbsError> {
        if !(MAX_PAYLOAD..=MOST_PAYLOAD).contains(&bytes) {
            return Err(VerbsError::Invalid("the largest message is one of 4,096 to 65,465 bytes"));
        }
        self.max_message = bytes;
        Ok(())
    }

    /// Whether Error Messages are kept for the program.
    pub fn keeps_errors(&self) -> bool {
        self.errors.is_some()
    }

    /// From now on Error Messages are kept for the program, or are not. The program hears of them by an
    /// asynchronous event, and takes them with [`Self::take_error`].
    pub fn keep_errors(&mut self, keep: bool) {
        if keep != self.errors.is_some() {
            self.errors = keep.then(Box::default);
        }
    }

    /// The oldest error that the program has not taken.
    pub fn take_error(&mut self) -> Option<PeerError> {
        self.errors.as_mut()?.waiting.pop_front()
    }

    /// Takes an Error Message from `from`: counts it, and keeps it if the program wants it. Otherwise says
    /// why not: the state, or none where the message in error is not of this queue pair's life or went
    /// elsewhere.
    pub fn handle_error(&mut self, message: &ErrorMessage, from: IpAddr) -> Result<(), Option<Dropped>> {
        if !self.shell.receives() {
            self.drops.state += 1;
            return Err(Some(Dropped::State));
        }
        if message.incarnation != self.incarnation {
            return Err(None);
        }
        match self.errors.as_mut().map_or(Verdict::Counted, |errors| errors.add(message, from)) {
            Verdict::Foreign => return Err(None),
            Verdict::Repeated => return Ok(()),
            Verdict::Kept { was_empty: true } => self.shell.event(EventKind::PeerError),
            Verdict::Kept { was_empty: false } | Verdict::Counted => (),
        }
        self.drops.by_peer += 1;
        Ok(())
    }

    /// What every message to it must have.
    pub fn qkey(&self) -> u32 {
        self.shell.attr.qkey
    }

    /// Its attributes.
    pub fn query(&self) -> QpAttr {
        self.shell.attr
    }

    /// What it has dropped.
    pub fn drops(&self) -> Drops {
        self.drops
    }

    /// What it has done and is at.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            counters: self.shell.counters,
            sends_posted: self.pending.len(),
            receives_posted: self.shell.rq.len(),
            waiting_bytes: self.staged.len() - self.taken,
            ..Snapshot::default()
        }
    }

    /// Changes attributes and state. All or nothing.
    pub fn modify(&mut self, change: &QpModify) -> Result<(), VerbsError> {
        let (from, to) = (self.shell.attr.state, self.shell.check(change)?);
        self.shell.attr.apply(change);
        if from != to {
            self.enter(to, change.sqd_async_notify.unwrap_or(false));
        }
        Ok(())
    }

    fn enter(&mut self, to: QpState, notify_sqd: bool) {
        match to {
            QpState::Reset => {
                self.discard();
                if let Some(recording) = &mut self.recording {
                    recording.give_up();
                    recording.records.clear();
                }
                self.shell.reset();
                if let Some(errors) = &mut self.errors {
                    errors.clear();
                }
            }
            QpState::Err => self.flush(),
            to => self.shell.go_to(to, notify_sqd),
        }
        if to == QpState::Sqd {
            self.draining = self.pending.len();
            self.check_drained();
        }
    }

    fn check_drained(&mut self) {
        if self.shell.attr.sq_draining && self.draining == 0 {
            self.shell.drained();
        }
    }

    /// Nothing that waits is sent, and nobody is told.
    fn discard(&mut self) {
        self.pending.clear();
        (self.taken, self.unsealed) = (0, Unsealed::default());
        self.draining = 0;
        pool::give(std::mem::take(&mut self.staged));
    }

    /// To the error state: what was not sent and the receives complete with a flush error.
    fn flush(&mut self) {
        self.shell.fail();
        if let Some(recording) = &mut self.recording {
            recording.give_up();
        }
        let pending = std::mem::take(&mut self.pending);
        self.discard();
        for mut datagram in pending {
            if datagram.status == WcStatus::Success {
                datagram.status = WcStatus::WrFlushErr;
            }
            self.complete_pending(&datagram);
        }
        self.shell.flush_receives();
        self.check_overflow();
        self.shell.last_receive_reached();
    }

    /// A failure is always a completion, also where a success would be none.
    fn complete_pending(&mut self, pending: &Pending) {
        let failed = pending.status != WcStatus::Success;
        if let Some(tail) = pending.tail.or_else(|| failed.then(|| self.shell.sq.completes())) {
            let opcode = if pending.write.is_some() { WcOpcode::RdmaWrite } else { WcOpcode::Send };
            let wc = Wc::new(pending.wr_id, pending.status, opcode, self.shell.qpn);
            self.shell.complete_send_at(tail, wc);
            self.check_overflow();
        }
    }

    /// Completes what has failed and stands in front. What stands there then can be sent.
    fn settle(&mut self) {
        loop {
            while self.pending.front().is_some_and(|first| first.status != WcStatus::Success) {
                let Some(failed) = self.pending.pop_front() else { return };
                self.draining = self.draining.saturating_sub(1);
                self.complete_pending(&failed);
            }
            if self.stage_write() {
                break;
            }
            self.stop_sending();
            self.flush_behind();
        }
        if self.pending.is_empty() {
            self.discard();
        }
        self.check_drained();
    }

    /// Makes datagrams of the RDMA Write-Record that stands in front, if there is one. False: its memory must
    /// not be used, and it has failed.
    fn stage_write(&mut self) -> bool {
        let Some(first) = self.pending.front_mut() else { return true };
        let Some(write) = first.write.as_mut().filter(|write| write.wants_more()) else { return true };
        let Shell { local, pd, .. } = &mut self.shell;
        let good = write.stage(local, pd.id());
        if !good {
            first.status = WcStatus::LocProtErr;
        }
        good
    }

    /// Those behind the first one are flushed as if they had been posted after it has failed.
    fn flush_behind(&mut self) {
        for behind in self.pending.iter_mut().skip(1) {
            if behind.status == WcStatus::Success {
                behind.status = WcStatus::WrFlushErr;
            }
        }
    }

    /// Posts a datagram: it waits in [`Self::outgoing`].
    ///
    /// An error in its memory or its length is reported by a completion; the queue pair then sends no more
    /// until the program moves it from SQE to RTS again.
    pub fn post_send(&mut self, ud: &UdSendWr<'_>) -> Result<(), VerbsError> {
        let posted = self.post_next(ud);
        self.end_posts();
        posted
    }

    /// The same where more may follow at once; [`Self::end_posts`] comes behind the last one.
    #[inline]
    pub fn post_next(&mut self, ud: &UdSendWr<'_>) -> Result<(), VerbsError> {
        self.check_send(ud, 0)?;
        self.post_checked(ud);
        Ok(())
    }

    /// No more follow: the memory that they named can be deregistered.
    #[inline]
    pub fn end_posts(&mut self) {
        self.shell.local.end_use();
        self.seal();
    }

    /// Whether a datagram can be posted behind `ahead` others, which have been checked and come first.
    /// Nothing is posted.
    pub fn check_send(&mut self, ud: &UdSendWr<'_>, ahead: u32) -> Result<(), VerbsError> {
        let wr = &ud.wr;
        self.shell.may_send()?;
        match wr.op {
            SendOp::WriteRecord { .. } => self.check_write(ud)?,
            op => _ = immediate_of(op)?,
        }
        self.shell.check_send(wr)?;
        ud.check_inline(self.shell.attr.caps.max_inline_data)?;
        if self.pending.len() + ahead as usize >= self.shell.attr.caps.max_send_wr as usize {
            return Err(VerbsError::QueueFull);
        }
        self.shell.sq.check_room(ahead)
    }

    fn check_write(&self, ud: &UdSendWr<'_>) -> Result<(), VerbsError> {
        if ud.ah.is_group() {
            return Err(VerbsError::Invalid("memory of a group cannot be named"));
        }
        if ud.job_key.unwrap_or(self.job_key) == 0 {
            return Err(VerbsError::Invalid("neither the queue pair nor the work request has a job key"));
        }
        Ok(())
    }

    /// Posts a datagram that [`Self::check_send`] has allowed. [`Self::end_posts`] comes behind the last one.
    pub fn post_checked(&mut self, ud: &UdSendWr<'_>) {
        let wr = &ud.wr;
        self.shell.sq.pass();
        let signaled = self.shell.signals(wr.flags);
        let tail = signaled.then(|| self.shell.sq.completes());
        let payload = u32::try_from(total_len(wr.sges)).unwrap_or(u32::MAX);
        let endpoint = ud.ah.endpoint(ud.remote_qpn);
        let is_write = matches!(wr.op, SendOp::WriteRecord { .. });
        let most = if is_write { record::MOST } else { self.max_message };
        let (status, len) = match self.shell.attr.state {
            QpState::Err | QpState::Sqe => (WcStatus::WrFlushErr, 0),
            // As adapters: the error shows when the work request is processed.
            _ if ud.ah.pd().id() != self.shell.pd.id() => (WcStatus::LocQpOpErr, 0),
            _ if payload > most => (WcStatus::LocLenErr, 0),
            _ if is_write => (WcStatus::Success, 0),
            _ => match self.stage(ud, immediate_of(wr.op).unwrap_or(None), payload) {
                Some(len) => (WcStatus::Success, len),
                None => (WcStatus::LocProtErr, 0),
            },
        };
        let write = is_write.then(|| self.write(ud, payload, &endpoint)).flatten();
        let follows = len > 0 && self.follows(ud, &endpoint, len);
        self.pending.push_back(Pending {
            endpoint,
            wr_id: wr.wr_id,
            status,
            len,
            payload,
            tail,
            write,
            follows,
        });
        if status != WcStatus::Success || is_write {
            self.end_posts();
            if status != WcStatus::Success {
                self.stop_sending();
            }
            self.settle();
        }
    }

    /// An RDMA Write-Record for the queue.
    fn write(&mut self, ud: &UdSendWr<'_>, payload: u32, to: &Endpoint) -> Option<Box<Write>> {
        let SendOp::WriteRecord { stag, to: at, imm } = ud.wr.op else { return None };
        self.writes = self.writes.wrapping_add(1);
        let head = record::Head {
            source_qpn: self.shell.qpn,
            destination_qpn: ud.remote_qpn,
            qkey: ud.qkey(self.shell.attr.qkey),
            immediate: imm,
            solicited: ud.wr.flags.contains(SendFlags::SOLICITED),
            incarnation: self.incarnation,
            message: self.writes,
            offset: 0,
            message_len: payload,
            job_key: ud.job_key.unwrap_or(self.job_key),
            stag,
            to: at,
        };
        Some(Box::new(Write::new(head, &ud.wr, to)))
    }

    /// A work request has failed: the ones behind it are flushed until the program has reacted.
    fn stop_sending(&mut self) {
        if matches!(self.shell.attr.state, QpState::Rts | QpState::Sqd) {
            self.shell.attr.state = QpState::Sqe;
        }
    }

    /// Copies a message after its headers, and its CRC after it; returns the datagram's length. `None`: its
    /// memory must not be used.
    fn stage(&mut self, ud: &UdSendWr<'_>, immediate: Option<[u8; 4]>, payload: u32) -> Option<usize> {
        self.msn = self.msn.wrapping_add(1);
        let head = Head {
            source_qpn: self.shell.qpn,
            destination_qpn: if ud.ah.is_group() { QPN_MULTICAST } else { ud.remote_qpn },
            qkey: ud.qkey(self.shell.attr.qkey),
            immediate,
            solicited: ud.wr.flags.contains(SendFlags::SOLICITED),
            msn: self.msn,
            incarnation: self.incarnation,
        };
        if self.staged.capacity() == 0 {
            self.staged = pool::take();
        }
        self.forget_taken();
        let start = self.staged.len();
        self.staged.reserve(datagram::OVERHEAD + payload as usize);
        self.staged.extend_from_slice(&head.to_bytes());
        if !self.stage_payload(&ud.wr, payload) {
            self.staged.truncate(start);
            return None;
        }
        self.staged.extend_from_slice(&[0; datagram::TRAILER_LEN]);
        self.seal_later(start);
        // Nobody reports a message to a group.
        if let Some(errors) = self.errors.as_mut().filter(|_| !ud.ah.is_group()) {
            let (to, remote_qpn) = (ud.ah.endpoint(ud.remote_qpn).to.ip(), ud.remote_qpn & QPN_MULTICAST);
            errors.sent(Sent { msn: self.msn, wr_id: ud.wr.wr_id, to, remote_qpn });
        }
        Some(self.staged.len() - start)
    }

    /// Frees the room of datagrams that were sent. If the queue never becomes empty, nothing else does.
    /// Moving less than was sent since the last time, it costs each byte one more copy at most.
    fn forget_taken(&mut self) {
        if self.taken >= MOST_TAKEN && self.taken >= self.staged.len() / 2 {
            self.seal();
            self.staged.drain(..self.taken);
            self.taken = 0;
        }
    }

    fn stage_payload(&mut self, wr: &SendWr<'_>, payload: u32) -> bool {
        if wr.flags.contains(SendFlags::INLINE) {
            copy_inline(wr.sges, &mut self.staged);
            return true;
        }
        let Shell { local, pd, .. } = &mut self.shell;
        if let [sge] = wr.sges
            && sge.length > 0
        {
            // Nearly always; and more of the same region follows in a list.
            let part = Part { stag: sge.lkey, to: sge.addr, len: sge.length as usize };
            let staged = &mut self.staged;
            let copied =
                local.with_more(part, pd.id(), Access::empty(), |memory| mem::copy_out(memory, staged));
            return matches!(copied, Ok(Ok(())));
        }
        copy_out(local, pd.id(), wr.sges.iter(), 0, payload, &mut self.staged)
    }

    /// Work requests that wait for the lower layer, and the bytes of their datagrams.
    pub fn waiting(&self) -> (usize, usize) {
        (self.pending.len(), self.staged.len() - self.taken)
    }

    /// Whether as many work requests wait as the send queue takes: the next one is refused.
    pub fn is_full(&self) -> bool {
        self.pending.len() >= self.shell.attr.caps.max_send_wr as usize
    }

    /// Whether something waits for the lower layer.
    pub fn has_outgoing(&self) -> bool {
        self.outgoing().next().is_some()
    }

    /// The lower layer took the first `count` of [`Self::outgoing`].
    pub fn sent(&mut self, count: usize) {
        for _ in 0..count {
            self.trace_next(None);
            if self.is_piece_only() {
                continue;
            }
            let Some(datagram) = self.pending.front() else { return };
            let (payload, tail) = (datagram.payload, datagram.tail);
            let sent = &mut self.shell.counters.sent;
            let of = if datagram.write.is_some() { &mut sent.write } else { &mut sent.send };
            of.count(payload);
            if tail.is_none() {
                // Of a list, all but the last, most likely.
                self.pass_next(datagram.len);
            } else if let Some(datagram) = self.next_pending() {
                self.complete_pending(&datagram);
            }
        }
        self.settle();
    }

    /// The first of the pending ones is not needed any more.
    #[inline]
    fn pass_next(&mut self, len: usize) {
        self.pending.pop_front();
        self.taken += len;
        self.draining = self.draining.saturating_sub(1);
    }

    /// The first of [`Self::outgoing`] has gone. Whether it is a part of a message of which more follows.
    #[inline]
    fn is_piece_only(&mut self) -> bool {
        let write = self.pending.front_mut().and_then(|first| first.write.as_mut());
        write.is_some_and(|write| !write.passed())
    }

    /// The lower layer refused the first of [`Self::outgoing`]. `too_long`: because of its length; otherwise
    /// it is lost, like one that is dropped on the way.
    pub fn refused(&mut self, too_long: bool) {
        self.trace_next(Some(if too_long { "too long for IP" } else { "unsent" }));
        if !too_long && self.is_piece_only() {
            self.drops.unsent += 1;
            return self.settle();
        }
        let Some(mut datagram) = self.next_pending() else { return };
        if too_long {
            datagram.status = WcStatus::LocLenErr;
            self.stop_sending();
            // As if they had been posted after it.
            for behind in &mut self.pending {
                if behind.status == WcStatus::Success {
                    behind.status = WcStatus::WrFlushErr;
                }
            }
        } else {
            self.drops.unsent += 1;
        }
        self.complete_pending(&datagram);
        self.settle();
    }

    /// Traces the first of [`Self::outgoing`].
    fn trace_next(&self, dropped: Option<&str>) {
        if !trace::is_on() {
            return;
        }
        if let Some((endpoint, bytes)) = self.outgoing().next() {
            let is_write = self.pending.front().is_some_and(|first| first.write.is_some());
            let head_len = if is_write { record::Head::LEN } else { datagram::HEAD_LEN };
            trace::datagram(trace::Datagram {
                qpn: Some(self.shell.qpn),
                way: trace::Way::Out,
                peer: endpoint.to,
                group: None,
                head: bytes.get(..head_len).unwrap_or(bytes),
                len: bytes.len(),
                dropped: dropped.as_ref().map(|why| why as &dyn fmt::Display),
            });
        }
    }

    fn next_pending(&mut self) -> Option<Pending> {
        let datagram = self.pending.pop_front()?;
        self.taken += datagram.len;
        self.draining = self.draining.saturating_sub(1);
        Some(datagram)
    }

    /// Posts a receive, whose first [`GRH_LEN`] bytes are for the routing header.
    pub fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), VerbsError> {
        self.shell.post_recv(wr)?;
        self.check_overflow();
        Ok(())
    }

    fn complete_recv(&mut self, wc: Wc, solicited: bool) {
        self.shell.complete_recv(wc, solicited);
        self.check_overflow();
    }

    /// A completion queue was full: the queue pair fails.
    fn check_overflow(&mut self) {
        if self.shell.reports_overflow() && self.shell.attr.state != QpState::Err {
            self.enter(QpState::Err, false);
        }
    }
}

#[cfg(test)]
mod tests;
