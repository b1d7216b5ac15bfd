//! What every queue pair has, whatever its service: number, domain, attributes, work queues, completions,
//! counters.
//!
//! A service ([`super::rc`], [`super::ud`], [`super::rd`]) owns one [`Shell`] and adds how its messages
//! travel. The code that does not depend on that is here, once; another service is another file beside them.
//! All that a program sets and reads is [`QpAttr`], checked and applied here. The services are types, and the
//! owner of a core knows which it is; `uwarp_driver::QueuePair` is an enum for callers that do not know.
//!
//! Rejected: an enum of services inside one core type, because every function of the stream would first
//! find out that it is about a stream, and the pump could get a queue pair that it cannot move; a core that
//! is generic over its service, because two plain structures borrow better where a function needs a field
//! of each.

use std::sync::Arc;

use super::attr::{QpAttr, QpInit, QpModify};
use super::counters::Counters;
use super::state::QpState;
use crate::cq::{Completed, Outlet, Places};
use crate::error::VerbsError;
use crate::event::{AsyncEvent, AsyncSink, EventKind};
use crate::mr::{Access, MrCache};
use crate::pd::Pd;
use crate::queues::{RecvQueue, SendQueue};
use crate::srq::Srq;
use crate::wr::{RecvWr, SendFlags, SendWr, Wc, WcOpcode, WcStatus};

/// The part of a queue pair that does not depend on its service.
pub(super) struct Shell {
    pub qpn: u32,
    pub pd: Arc<Pd>,
    send_cq: Outlet,
    recv_cq: Outlet,
    pub srq: Option<Arc<Srq>>,
    cookie: u64,
    async_sink: Arc<dyn AsyncSink>,
    /// Everything that a query shows, the state included.
    pub attr: QpAttr,
    /// The program requested an event for when the send queue has drained.
    notify_sqd: bool,
    pub sq: SendQueue,
    /// With a shared receive queue: the receive that the message in progress goes to.
    pub rq: RecvQueue,
    /// Regions that recent work requests named.
    pub local: MrCache,
    /// A completion was lost because its completion queue was full, and the service has not reacted yet.
    overflowed: bool,
    /// The program has heard of the first one.
    overflow_reported: bool,
    pub counters: Counters,
}

impl Shell {
    /// A queue pair in RESET, whose work requests complete in the order of posting.
    pub fn new(qpn: u32, init: QpInit) -> Self {
        Self::with(qpn, init, Places::in_order)
    }

    /// The same, where each work request completes when its own message is done.
    pub fn in_any_order(qpn: u32, init: QpInit) -> Self {
        Self::with(qpn, init, Places::in_any_order)
    }

    fn with(qpn: u32, init: QpInit, places: fn() -> Arc<Places>) -> Self {
        let mut caps = init.caps;
        let rq = match &init.srq {
            None => RecvQueue::with(caps.max_recv_wr, caps.max_recv_sge, places()),
            Some(srq) => {
                (caps.max_recv_wr, caps.max_recv_sge) = (0, 0);
                RecvQueue::new(1, srq.query().max_sge)
            }
        };
        let sq = SendQueue::with(caps.max_send_wr, caps.max_send_sge, caps.max_inline_data, places());
        let receive_places = init.srq.as_ref().map_or_else(|| rq.places().clone(), |srq| srq.places());
        Self {
            qpn,
            pd: init.pd,
            send_cq: Outlet::new(init.send_cq, sq.places().clone()),
            recv_cq: Outlet::new(init.recv_cq, receive_places),
            srq: init.srq,
            cookie: init.cookie,
            async_sink: init.async_sink,
            attr: QpAttr::new(caps, init.sq_sig_all),
            notify_sqd: false,
            sq,
            rq,
            local: MrCache::default(),
            overflowed: false,
            overflow_reported: false,
            counters: Counters::default(),
        }
    }

    /// Signalled messages complete before they are in the peer's memory.
    pub fn note_early_completions(&self) {
        self.send_cq.cq().note_early_completions();
    }

    /// Checks a change, for any service; returns the state that it leads to. Nothing has changed yet.
    pub fn check(&self, change: &QpModify) -> Result<QpState, VerbsError> {
        let from = self.attr.state;
        if change.cur_state.is_some_and(|s| s != from) {
            return Err(VerbsError::Invalid("the queue pair is not in the state that the program names"));
        }
        if change.state.is_some_and(|to| !from.may_become(to)) {
            return Err(VerbsError::Invalid("no such state transition"));
        }
        if change.port_num.is_some_and(|p| p != 1) {
            return Err(VerbsError::Invalid("the device has one port, number 1"));
        }
        Ok(change.state.unwrap_or(from))
    }

    /// To RESET: drops all work requests, all completions that the program has not polled, and the attributes
    /// of the connection.
    pub fn reset(&mut self) {
        self.send_cq.purge();
        self.recv_cq.purge();
        self.sq.clear();
        if let Some(srq) = &self.srq {
            // The receive of a message in progress makes no completion now.
            let places = srq.places();
            (0..self.rq.len()).for_each(|_| places.free(0));
        }
        self.rq.clear();
        (self.overflowed, self.overflow_reported) = (false, false);
        // The program does not wait for the draining any more; an event would be about a queue pair that may
        // be destroyed.
        self.notify_sqd = false;
        let attr = &mut self.attr;
        (attr.state, attr.sq_draining) = (QpState::Reset, false);
        (attr.access, attr.qkey) = (Access::empty(), 0);
        (attr.timeout, attr.retry_cnt) = (0, 0);
    }

    /// To a state in which work requests wait or are sent: neither RESET nor ERROR.
    pub fn go_to(&mut self, to: QpState, notify_sqd: bool) {
        let draining = to == QpState::Sqd;
        (self.attr.state, self.attr.sq_draining) = (to, draining);
        if draining {
            self.notify_sqd = notify_sqd;
        }
    }

    /// In SQD: every work request that was started is complete. The others wait for RTS.
    #[cold]
    pub fn drained(&mut self) {
        self.attr.sq_draining = false;
        if std::mem::take(&mut self.notify_sqd) {
            self.event(EventKind::SqDrained);
        }
    }

    /// To ERROR; the service then completes its work requests.
    pub fn fail(&mut self) {
        (self.attr.state, self.attr.sq_draining) = (QpState::Err, false);
    }

    /// Checks a send work request that no queue checks, because it is flushed or built into a datagram at
    /// once.
    pub fn check_send(&self, wr: &SendWr<'_>) -> Result<(), VerbsError> {
        if wr.sges.len() > self.attr.caps.max_send_sge as usize {
            return Err(VerbsError::Invalid("more scatter/gather elements than the queue pair was made for"));
        }
        Ok(())
    }

    /// Whether a send work request may be posted in the state that the queue pair is in.
    #[inline]
    pub fn may_send(&self) -> Result<(), VerbsError> {
        if !self.attr.state.may_post_send() {
            return Err(VerbsError::Invalid("the queue pair is not ready to send"));
        }
        Ok(())
    }

    /// Whether a work request with these flags makes a completion when it succeeds.
    #[inline]
    pub fn signals(&self, flags: SendFlags) -> bool {
        self.attr.sq_sig_all || flags.contains(SendFlags::SIGNALED)
    }

    /// Queues a receive work request; in ERROR it is flushed.
    pub fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), VerbsError> {
        if self.srq.is_some() {
            return Err(VerbsError::Invalid("the queue pair takes its receives from a shared receive queue"));
        }
        if !self.attr.state.may_post_recv() {
            return Err(VerbsError::Invalid("the queue pair is in RESET"));
        }
        if self.attr.state == QpState::Err {
            self.rq.pass()?;
            self.complete_recv(Wc::new(wr.wr_id, WcStatus::WrFlushErr, WcOpcode::Recv, self.qpn), false);
            return Ok(());
        }
        self.rq.post(wr)
    }

    /// Completes all remaining receives with a flush error.
    pub fn flush_receives(&mut self) {
        while let Some(slot) = self.rq.pop() {
            self.complete_recv(Wc::new(slot.wr_id, WcStatus::WrFlushErr, WcOpcode::Recv, self.qpn), false);
        }
    }

    /// In ERROR for the first time. Receives that were not taken from a shared receive queue stay there, so
    /// no completion would show the program that this queue pair takes no more.
    pub fn last_receive_reached(&self) {
        if self.srq.is_some() {
            self.event(EventKind::QpLastWqeReached);
        }
    }

    /// Completes the send work request that was just taken out of the queue.
    #[inline]
    pub fn complete_send(&mut self, wc: Wc) {
        let tail = self.sq.completes();
        self.complete_send_at(tail, wc);
    }

    /// Completes a send work request; the places before `tail` are free when its completion is polled.
    #[inline]
    pub fn complete_send_at(&mut self, tail: u32, wc: Wc) {
        self.count_failure(&wc);
        self.overflowed |= !self.send_cq.push(tail, wc, false);
    }

    /// Completes the receive that was just taken out of the queue.
    #[inline]
    pub fn complete_recv(&mut self, wc: Wc, solicited: bool) {
        self.count_failure(&wc);
        let tail = self.rq.completes();
        self.overflowed |= !self.recv_cq.push(tail, wc, solicited);
    }

    /// As [`Self::complete_recv`] for receives that were taken out of the queue one behind the other: those
    /// that succeeded. Returns how many completions were lost.
    pub fn complete_recv_run(&mut self, run: &[Completed]) -> usize {
        let lost = run.len() - self.recv_cq.push_run(run);
        self.overflowed |= lost > 0;
        lost
    }

    /// A completion was lost that the service has made itself.
    pub fn note_overflow(&mut self) {
        self.overflowed = true;
    }

    #[inline]
    fn count_failure(&mut self, wc: &Wc) {
        match wc.status {
            WcStatus::Success => {}
            WcStatus::WrFlushErr => self.counters.flushed += 1,
            _ => self.counters.failed += 1,
        }
    }

    /// The next result of [`Self::take_overflow`].
    #[inline]
    pub fn has_overflowed(&self) -> bool {
        self.overflowed
    }

    /// Whether a completion was lost since the last call: the program cannot know any more which work
    /// requests are done, so the queue pair must fail.
    #[inline]
    pub fn take_overflow(&mut self) -> bool {
        std::mem::take(&mut self.overflowed)
    }

    /// Whether a completion was lost for the first time since RESET: reports it, and the service must go to
    /// ERROR, if it is not there. For services without a stream.
    pub fn reports_overflow(&mut self) -> bool {
        let reports = self.take_overflow() && !std::mem::replace(&mut self.overflow_reported, true);
        if reports {
            self.event(EventKind::QpFatal);
        }
        reports
    }

    /// Whether messages are received in the state that the queue pair is in.
    pub fn receives(&self) -> bool {
        matches!(self.attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe)
    }

    /// The protection domain of the receives.
    pub fn recv_pd(&self) -> u32 {
        self.srq.as_ref().map_or(self.pd.id(), |srq| srq.pd().id())
    }

    /// Reports an asynchronous event.
    pub fn event(&self, kind: EventKind) {
        self.async_sink.async_event(AsyncEvent { kind, cookie: self.cookie });
    }
}
