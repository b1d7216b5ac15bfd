//! What a program does with a reliable connected queue pair: attributes, state, posting, and the stream that
//! it gets.

use std::sync::Weak;

use uwarp_proto::framing::Framing;
use uwarp_proto::setup::PeerData;

use super::errors::Flush;
use super::params::{LinkCaps, StreamParams};
use super::psns::Psns;
use super::stream::{Disconnect, Stream};
use super::timers::{JOINED, LOOK_EVERY, Now, SentBefore, Timer, Timers};
use crate::error::VerbsError;
use crate::mr::{self, Access, MrCache};
use crate::qp::attr::{QpAttr, QpInit, QpModify, set};
use crate::qp::counters::Snapshot;
use crate::qp::rnr::NO_RNR_LIMIT;
use crate::qp::shell::Shell;
use crate::qp::state::QpState;
use crate::queues::Phase;
use crate::srq::{Waiter, Woken};
use crate::wr::{RecvWr, SendWr, Wc, WcStatus};

/// A reliable connected queue pair without its socket.
pub struct RcCore {
    pub(super) shell: Shell,
    given: Given,
    /// Its place in the line at the shared receive queue.
    pub(super) line: Line,
    /// Regions that the peer named recently.
    pub(super) remote: MrCache,
    /// The stream has ended and the program has not reacted: the queue pair keeps its state.
    pub(super) gone: bool,
    /// The program itself moves the queue pair to RTR and RTS, and posts, while its stream is being set up.
    pub(super) by_program: bool,
    /// How often it moved it to RTR.
    pub(super) moves: u32,

    pub(super) timers: Timers,
    pub(super) sent_before: SentBefore,
    /// Checks that expired deadlines request from the owner.
    pub(super) checks: Checks,
    pub(super) stream: Option<Stream>,
    /// Work requests that are flushed once the lower layer has released their memory.
    pub(super) unflushed: Option<Flush>,
}

/// Attributes that the program has set itself; a connection does not change them.
#[derive(Clone, Copy, Default)]
struct Given {
    access: bool,
    dest_qp_num: bool,
    timeout: bool,
    retry_cnt: bool,
    rnr_retry: bool,
    rq_psn: bool,
    sq_psn: bool,
}

/// A queue pair's place in the line at its shared receive queue, if it has one.
#[derive(Default)]
pub(super) struct Line {
    pub waiter: Option<Weak<dyn Waiter>>,
    /// In the line, or woken with a receive reserved for it.
    pub waiting: bool,
    /// Other queue pairs that got a receive that was reserved for this one.
    pub woken: Woken,
}

/// Checks that expired deadlines have requested.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Checks {
    pub hang_up: bool,
    pub answers: bool,
    pub muted: bool,
}

impl Given {
    fn add(&mut self, change: &QpModify) {
        self.access |= change.access.is_some();
        self.dest_qp_num |= change.dest_qp_num.is_some();
        self.timeout |= change.timeout.is_some();
        self.retry_cnt |= change.retry_cnt.is_some();
        self.rnr_retry |= change.rnr_retry.is_some();
        self.rq_psn |= change.rq_psn.is_some();
        self.sq_psn |= change.sq_psn.is_some();
    }
}

impl RcCore {
    /// A queue pair in RESET. `waiter` is notified when a receive of the shared receive queue is reserved for
    /// this queue pair; the owner then calls [`Self::resume`].
    pub fn new(qpn: u32, init: QpInit, waiter: Option<Weak<dyn Waiter>>) -> Self {
        Self {
            shell: Shell::new(qpn, init),
            given: Given::default(),
            line: Line { waiter, ..Line::default() },
            remote: MrCache::of_peer(qpn),
            gone: false,
            by_program: false,
            moves: 0,
            timers: Timers::default(),
            sent_before: SentBefore::default(),
            checks: Checks::default(),
            stream: None,
            unflushed: None,
        }
    }

    /// Its number.
    pub fn qpn(&self) -> u32 {
        self.shell.qpn
    }

    /// All its attributes.
    pub fn query(&self) -> QpAttr {
        self.shell.attr
    }

    /// The packet sequence numbers that the program has set: the one it expects (`rq_psn`) and the one it
    /// begins with (`sq_psn`). A program in RTS that has set neither, as it may in the iwarp view, has 0 for
    /// both.
    pub fn psns(&self) -> Psns {
        let (attr, given) = (&self.shell.attr, self.given);
        let none = !given.rq_psn && !given.sq_psn && attr.state != QpState::Rtr;
        Psns {
            expects: (given.rq_psn || none).then_some(attr.rq_psn),
            begins: (given.sq_psn || none).then_some(attr.sq_psn),
        }
    }

    /// Leaves the line at the shared receive queue.
    pub(super) fn leave_line(&mut self) {
        if let Some(srq) = &self.shell.srq
            && std::mem::take(&mut self.line.waiting)
        {
            self.line.woken.append(srq.leave(self.shell.qpn));
        }
    }

    /// Changes attributes and state. All or nothing.
    pub fn modify(&mut self, change: &QpModify) -> Result<(), VerbsError> {
        let (from, to) = (self.shell.attr.state, self.shell.check(change)?);
        let by_program = self.by_program || (change.awaits_stream && to == QpState::Rtr);
        if matches!(to, QpState::Rtr | QpState::Rts) && from != to && !by_program && !self.may_be_up(to) {
            return Err(VerbsError::NotSupported("a queue pair gets its connection from rdma_cm"));
        }
        self.by_program = by_program;
        self.moves = self.moves.wrapping_add(u32::from(change.awaits_stream && to == QpState::Rtr));
        self.given.add(change);
        let attr = &mut self.shell.attr;
        attr.apply(change);
        if self.stream.is_none() || by_program {
            set(&mut attr.max_rd_atomic, change.max_rd_atomic.map(u16::from));
            set(&mut attr.max_dest_rd_atomic, change.max_dest_rd_atomic.map(u16::from));
        }
        if from != to {
            self.enter(to, change.sqd_async_notify.unwrap_or(false));
            self.say_rnr_retry();
        }
        if from != to || change.sq_psn.is_some() || change.rq_psn.is_some() {
            self.check_psns();
        }
        Ok(())
    }

    /// The peer counts how often a Send is retried without a receive. The program gives the number with the
    /// move to RTS, when the stream may be there already; until it is told, the peer waits without a limit,
    /// which is what 7 means.
    fn say_rnr_retry(&mut self) {
        let (attr, given) = (&self.shell.attr, self.by_program && self.given.rnr_retry);
        if let Some(stream) = &mut self.stream
            && given
            && attr.state == QpState::Rts
            && attr.rnr_retry < NO_RNR_LIMIT
        {
            stream.tx.rnr_retry = Some(attr.rnr_retry);
        }
    }

    fn enter(&mut self, to: QpState, notify_sqd: bool) {
        match to {
            QpState::Reset => self.reset(),
            QpState::Err => self.flush(Disconnect::LocalClosed, None),
            to => self.shell.go_to(to, notify_sqd),
        }
        if to == QpState::Rts {
            self.do_local_work();
        }
        if to == QpState::Sqd {
            self.check_drained();
            if let Some(stream) = &mut self.stream {
                stream.request_every_ack();
            }
        }
    }

    fn reset(&mut self) {
        self.shell.reset();
        mr::unbind_windows_of(self.shell.qpn);
        self.leave_line();
        if let Some(stream) = &mut self.stream {
            stream.end(Disconnect::LocalClosed);
        }
        (self.gone, self.by_program) = (false, false);
        self.timers.clear(Timer::Retry);
        // Work requests are dropped, and their memory is recalled before the owner's call returns.
        self.unflushed = None;
        self.given = Given::default();
        self.set_peer_attributes(None);
    }

    fn check_drained(&mut self) {
        if self.shell.attr.sq_draining && self.shell.sq.next == self.shell.sq.head {
            self.shell.drained();
        }
    }

    /// Queues a send work request; [`Self::poll_transmit`] starts it.
    #[inline]
    pub fn post_send(&mut self, wr: &SendWr<'_>) -> Result<(), VerbsError> {
        self.check_send(wr, 0)?;
        self.post_checked(wr);
        Ok(())
    }

    /// Whether a send work request can be posted behind `ahead` others, which have been checked and come
    /// first. Nothing is posted.
    #[inline]
    pub fn check_send(&mut self, wr: &SendWr<'_>, ahead: u32) -> Result<(), VerbsError> {
        self.shell.may_send()?;
        if self.shell.attr.state == QpState::Err {
            self.shell.check_send(wr)?;
            return self.shell.sq.check_room(ahead);
        }
        if wr.op.wants_uwarp() && self.stream.as_ref().is_some_and(|s| !s.params.peer_is_uwarp) {
            return Err(VerbsError::NotSupported("the peer is no uwarp end and may not know the operation"));
        }
        let checked = self.shell.sq.check(wr, ahead);
        if matches!(checked, Err(VerbsError::QueueFull)) {
            // Some of the taken places may belong to messages that did not request an acknowledgement.
            if let Some(stream) = &mut self.stream {
                stream.request_every_ack();
            }
        }
        checked
    }

    /// Queues a send work request that [`Self::check_send`] has allowed.
    #[inline]
    pub fn post_checked(&mut self, wr: &SendWr<'_>) {
        if self.shell.attr.state == QpState::Err {
            self.shell.sq.pass();
            let wc = Wc::new(wr.wr_id, WcStatus::WrFlushErr, wr.op.completion(), self.shell.qpn);
            self.shell.complete_send(wc);
        } else {
            self.shell.sq.post(wr);
            if wr.op.is_local() {
                self.do_local_work();
            }
        }
    }

    /// Work about keys of this end needs no peer: before there is one, or when it is gone, it is done here.
    /// Otherwise its turn comes in [`Self::poll_transmit`].
    #[cold]
    fn do_local_work(&mut self) {
        let sends =
            self.stream.as_ref().is_some_and(|stream| stream.opening.may_send() && stream.closing.is_none());
        while !sends && self.shell.attr.state == QpState::Rts {
            let number = self.shell.sq.next;
            let Some(op) = self.shell.sq.slot(number).map(|slot| slot.op).filter(|op| op.is_local()) else {
                return;
            };
            self.shell.sq.next += 1;
            match self.change_key(op) {
                Ok(()) => self.mark(number, Phase::Done),
                Err(_) => return self.fail_work_request(number, WcStatus::MwBindErr),
            }
            self.retire();
        }
    }

    /// Queues a receive work request. The owner calls [`Self::resume`] when [`Self::awaits_receive`].
    pub fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), VerbsError> {
        self.shell.post_recv(wr)
    }

    /// Gives the queue pair a stream and moves it to RTS.
    pub fn attach(&mut self, now: &Now, params: StreamParams) -> Result<(), VerbsError> {
        let may_begin =
            self.awaits_stream().is_some() || matches!(self.shell.attr.state, QpState::Reset | QpState::Init);
        if !may_begin || self.stream.is_some() {
            return Err(VerbsError::Invalid("the queue pair is connected already or in error"));
        }
        if !self.by_program {
            (self.shell.attr.max_rd_atomic, self.shell.attr.max_dest_rd_atomic) = (params.ord, params.ird);
        }
        let (attr, given) = (&mut self.shell.attr, self.given);
        let mut rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        // As the kernel's connection managers do in `cm_init_qp_init_attr` and `iwcm_init_qp_init_attr`.
        rights.set(Access::REMOTE_ATOMIC, params.infiniband);
        set(&mut attr.access, (!given.access).then_some(rights));
        set(&mut attr.timeout, (!given.timeout).then_some(params.timeout));
        set(&mut attr.retry_cnt, (!given.retry_cnt).then_some(params.retry_cnt));
        self.set_peer_attributes(params.peer);
        if !self.by_program {
            self.shell.attr.state = QpState::Rts;
        }
        let mut stream = Stream::new(self.shell.qpn, params, self.shell.pd.begin_stream());
        stream.begin();
        if params.peer_is_uwarp && !params.placement_acks {
            // Signalled messages complete before they reach the peer's memory: next, the program waits for
            // the peer's answer.
            self.shell.note_early_completions();
        }
        if stream.is_joining() {
            self.timers.start(Timer::Joined, now, JOINED);
        } else {
            self.timers.clear(Timer::Retry);
        }
        let opening = stream.opening.deadlines();
        self.stream = Some(stream);
        for (timer, after) in [Timer::FirstFrame, Timer::Nudge].into_iter().zip(opening) {
            if let Some(after) = after {
                self.timers.start(timer, now, after);
            }
        }
        if params.link.answers {
            self.timers.start(Timer::Silence, now, LOOK_EVERY);
        }
        self.say_rnr_retry();
        // The program may have set one since set-up compared them.
        self.check_psns();
        Ok(())
    }

    /// The lower layer of the stream is another one than was assumed, before the first byte in either
    /// direction: a responder learns that only behind its reply.
    pub fn reframe(&mut self, now: &Now, framing: Framing, link: LinkCaps) -> Result<(), VerbsError> {
        if !self.stream.as_mut().is_some_and(|stream| stream.reframe(framing, link)) {
            return Err(VerbsError::Invalid("the stream is in use, or there is none"));
        }
        if link.answers {
            self.timers.start(Timer::Silence, now, LOOK_EVERY);
        } else {
            self.timers.clear(Timer::Silence);
        }
        Ok(())
    }

    /// Whether the peer has sent a frame of the present stream.
    pub fn has_heard(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| stream.opening.heard())
    }

    /// Sets what queries return about the peer. If it does not introduce itself, neither number is known; and
    /// a stranger may end the stream at once when it has no receive, as siw does: no retries.
    pub(super) fn set_peer_attributes(&mut self, peer: Option<PeerData>) {
        let (qpn, retries) = peer.map_or((0, 0), |peer| (peer.qpn, peer.rnr_retry));
        set(&mut self.shell.attr.dest_qp_num, (!self.given.dest_qp_num).then_some(qpn));
        set(&mut self.shell.attr.rnr_retry, (!self.given.rnr_retry).then_some(retries));
    }

    /// Why the stream is closing, if it is.
    pub(super) fn closing(&self) -> Option<Disconnect> {
        self.stream.as_ref().and_then(|s| s.closing)
    }

    /// Whether work is posted that may not be sent: a responder is silent until the initiator's first frame
    /// has arrived (RFC 5044 section 7.1.2 rule 4).
    pub(super) fn muted(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| !s.opening.may_send() && s.closing.is_none())
            && self.shell.sq.has_unsent()
    }

    /// Whether a Send waits for a receive to be posted, and reading has stopped meanwhile.
    pub fn stalled(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.stalled)
    }

    /// A poll of the program found nothing. Returns whether the next [`Self::poll_transmit`] sends an
    /// acknowledgement or a request for one because of that. It does not while the program is likely to send
    /// something in a moment.
    #[inline]
    pub fn polled_in_vain(&mut self) -> bool {
        let unpolled = self.shell.sq.unpolled();
        self.stream.as_mut().is_some_and(|stream| stream.polled_in_vain(unpolled))
    }

    /// Messages of the peer that are placed.
    #[inline]
    pub fn messages_placed(&self) -> u64 {
        self.stream.as_ref().map_or(0, |s| s.placed)
    }

    /// Those of them that are acknowledged, where the lower layer carries the number ([`LinkCaps::counts`]).
    ///
    /// [`LinkCaps::counts`]: super::params::LinkCaps::counts
    #[inline]
    pub fn messages_acknowledged(&self) -> u64 {
        self.stream.as_ref().map_or(0, |s| s.placed_acked)
    }

    /// How many messages of this end the peer must have acknowledged before work requests complete that the
    /// program waits for.
    #[inline]
    pub fn messages_wanted(&self) -> u64 {
        self.stream.as_ref().map_or(0, |s| s.tx.ack_requests.last)
    }

    /// Messages of this end that the peer has placed, as far as it is known.
    #[inline]
    pub fn messages_acked(&self) -> u64 {
        self.stream.as_ref().map_or(0, |s| s.acked)
    }

    /// The peer has said so, beside the stream.
    pub(super) fn peer_has_placed(&mut self, messages: u64) {
        let Some(stream) = &mut self.stream else { return };
        if messages > stream.tx.messages() {
            tracing::warn!(
                qpn = self.shell.qpn,
                "the peer claims to have placed messages that were not sent"
            );
            return self.connection_lost(Disconnect::Reset);
        }
        stream.acked = stream.acked.max(messages);
        stream.hold.input();
        self.retire();
    }

    /// The lower layer has released the memory of the stream's first `position` bytes.
    pub(super) fn released(&mut self, position: u64) {
        let Some(stream) = &mut self.stream else { return };
        stream.out.release_to(position);
        let all = stream.out.released() == stream.out.taken();
        match self.unflushed.take_if(|_| all) {
            Some(flush) => self.flush_sends(flush),
            None => self.retire(),
        }
    }

    /// Whether the peer has waited too long for an acknowledgement: the owner should send before it receives
    /// more.
    pub fn ack_is_urgent(&self) -> bool {
        self.stream.as_ref().is_some_and(Stream::ack_is_urgent)
    }

    /// Requests an acknowledgement, at once and whatever was requested before. Returns whether work requests
    /// wait for one.
    pub fn demand_ack(&mut self) -> bool {
        self.build();
        self.stream.as_mut().is_some_and(Stream::demand_ack)
    }

    /// Whether the first message of a peer by number may come soon: the stream is being set up, or no program
    /// has used it. (What the peer posted meanwhile is behind its indication.)
    pub fn expects_first_message(&self) -> bool {
        let none = |stream: &Stream| !stream.is_used() && stream.closing.is_none();
        self.awaits_stream().is_some() || self.by_program && self.stream.as_ref().is_some_and(none)
    }

    /// Whether work requests wait for an acknowledgement that may come soon.
    pub fn expects_ack(&self) -> bool {
        self.stream.as_ref().is_some_and(Stream::expects_ack)
    }

    /// Makes the next message of every queue, in both directions, have this MSN, for tests near the wrap.
    /// Call on both ends right after they were attached.
    #[doc(hidden)]
    pub fn set_msn(&mut self, msn: u32) {
        if let Some(stream) = &mut self.stream {
            stream.rx.set_msn(msn);
            stream.tx.set_msn(msn);
        }
    }

    /// Its counters and present state.
    pub fn snapshot(&self) -> Snapshot {
        let stream = self.stream.as_ref();
        Snapshot {
            counters: self.shell.counters,
            reads_outstanding: stream.map_or(0, |s| s.reads.len()),
            reads_to_serve: stream.map_or(0, |s| s.requests.len()),
            sends_posted: self.shell.sq.len(),
            receives_posted: self.shell.rq.len(),
            waiting_bytes: stream.map_or(0, |s| s.out.waiting()),
            stalled: self.stalled(),
            muted: self.muted(),
            peer_is_uwarp: stream.is_some_and(|s| s.params.peer_is_uwarp),
        }
    }

    /// Makes the completions of the oldest send work requests that are done.
    pub(super) fn retire(&mut self) {
        self.retire_done();
        self.check_drained();
    }

    fn retire_done(&mut self) {
        while let Some(slot) = self.shell.sq.front() {
            let signaled = self.shell.signals(slot.flags);
            let status = match slot.phase {
                Phase::Done => WcStatus::Success,
                Phase::Sent { end, message } => {
                    let Some(s) = &mut self.stream else { return };
                    if end > s.out.released() || message > s.completes_to() {
                        return;
                    }
                    s.tx.ack_requests.signaled_completed += u64::from(signaled);
                    WcStatus::Success
                }
                Phase::Failed(status) => return self.local_failure(status),
                Phase::Posted | Phase::Reading => return,
            };
            let mut wc = Wc::new(slot.wr_id, status, slot.op.completion(), self.shell.qpn);
            wc.byte_len = slot.total;
            self.shell.counters.completed(slot.op, slot.total);
            self.shell.sq.pop();
            if signaled {
                self.shell.complete_send(wc);
            }
        }
    }
}
