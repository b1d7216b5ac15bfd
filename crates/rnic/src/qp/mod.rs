//! Reliable connected queue pairs.
//!
//! [`QpCore`] is a machine without sockets or clock. Its owner holds a lock around it and
//!
//! 1. hands it work requests ([`QpCore::post_send`], [`QpCore::post_recv`]);
//! 2. asks it to cut them into FPDUs ([`QpCore::build`]), takes bytes from [`QpCore::out`] and says how many the
//!    lower layer took ([`QpCore::taken`]);
//! 3. asks where the next received bytes should go ([`QpCore::rx_plan`]), and hands them in
//!    ([`QpCore::direct_received`], [`QpCore::handle_input`]);
//! 4. looks whether the stream is to be closed ([`QpCore::closing`]) and whether it is established
//!    ([`QpCore::take_established`]).
//!
//! `transmit` is the way out, `receive` the way in, `direct` its short cut for large payload, `errors` what happens when something is wrong,
//! `gone` what happens when the peer is gone.

mod acks;
mod aside;
pub mod counters;
mod direct;
mod errors;
mod gone;
mod params;
mod queues;
mod receive;
mod state;
mod transmit;

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use smallvec::SmallVec;
use uwarp_proto::framer::{Framer, MarkerInserter};
use uwarp_proto::rx::RxState;
use uwarp_proto::setup::PeerData;
use uwarp_wire::terminate::TerminateError;

use crate::cq::{Cq, Outlet};
use crate::error::VerbsError;
use crate::event::{AsyncEvent, AsyncSink, EventKind};
use crate::mr::{Access, MrCache, MrUse};
use crate::out::OutQueue;
use crate::pd::{Pd, Streaming};
use crate::srq::{Srq, Waiter, Woken};
use crate::wr::{RecvWr, SendFlags, SendWr, Wc, WcStatus};

pub use counters::{Counters, Snapshot};
pub use direct::RxPlan;
pub use params::{Rtr, StreamParams};
pub use queues::MAX_MESSAGE;
pub(crate) use queues::RecvQueue;
pub use state::QpState;

/// How many work requests and scatter/gather elements a queue pair holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QpCaps {
    /// Send work requests outstanding.
    pub max_send_wr: u32,
    /// Receive work requests outstanding.
    pub max_recv_wr: u32,
    /// Elements of a send work request.
    pub max_send_sge: u32,
    /// Elements of a receive work request.
    pub max_recv_sge: u32,
    /// Bytes that may be posted inline.
    pub max_inline_data: u32,
}

/// What a queue pair is made from.
pub struct QpInit {
    /// Its protection domain.
    pub pd: Arc<Pd>,
    /// Where its sends complete.
    pub send_cq: Arc<Cq>,
    /// Where its receives complete.
    pub recv_cq: Arc<Cq>,
    /// Where its receives come from, if it has no queue of its own; sizes for that are then ignored.
    pub srq: Option<Arc<Srq>>,
    /// Its sizes.
    pub caps: QpCaps,
    /// Every send makes a completion.
    pub sq_sig_all: bool,
    /// Names it in asynchronous events.
    pub cookie: u64,
    /// Takes its asynchronous events.
    pub async_sink: Arc<dyn AsyncSink>,
}

/// Attributes of a queue pair, as a query shows them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct QpAttr {
    pub state: QpState,
    pub caps: QpCaps,
    /// Rights that the queue pair grants its peer, on top of the regions'.
    pub access: Access,
    pub dest_qp_num: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    /// RDMA Reads this end has outstanding at most (ORD).
    pub max_rd_atomic: u16,
    /// RDMA Reads the peer may have outstanding (IRD).
    pub max_dest_rd_atomic: u16,
    pub min_rnr_timer: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub port_num: u8,
    pub pkey_index: u16,
    pub sq_draining: bool,
    pub sq_sig_all: bool,
}

/// Changes to a queue pair; `None` leaves as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs)]
pub struct QpModify {
    pub state: Option<QpState>,
    /// What the program thinks the state is.
    pub cur_state: Option<QpState>,
    pub access: Option<Access>,
    pub dest_qp_num: Option<u32>,
    pub rq_psn: Option<u32>,
    pub sq_psn: Option<u32>,
    pub max_rd_atomic: Option<u8>,
    pub max_dest_rd_atomic: Option<u8>,
    pub min_rnr_timer: Option<u8>,
    pub timeout: Option<u8>,
    pub retry_cnt: Option<u8>,
    pub rnr_retry: Option<u8>,
    pub port_num: Option<u8>,
    pub pkey_index: Option<u16>,
    pub sqd_async_notify: Option<bool>,
}

/// Why a stream ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disconnect {
    /// The peer closed its side.
    PeerClosed,
    /// This side asked for it.
    LocalClosed,
    /// The peer sent a Terminate.
    Terminated(TerminateError),
    /// We sent a Terminate.
    Sent(TerminateError),
    /// The connection broke.
    Reset,
    /// The peer did not do its part in time.
    Timeout,
}

/// A queue pair without its socket.
pub struct QpCore {
    qpn: u32,
    pd: Arc<Pd>,
    send_cq: Outlet,
    recv_cq: Outlet,
    shared: Option<Shared>,
    cookie: u64,
    async_sink: Arc<dyn AsyncSink>,
    attr: QpAttr,
    given: Given,
    notify_sqd: bool,

    sq: queues::SendQueue,
    /// With a shared receive queue: the receive that the message in progress goes to.
    rq: queues::RecvQueue,
    local: MrCache,
    remote: MrCache,
    /// Something could not be told to a full completion queue.
    cq_overflow: bool,
    /// The stream is over, and the program has not reacted: the queue pair stays as it was.
    gone: bool,

    counters: Counters,
    stream: Option<Stream>,
}

/// What the program has set itself, and no connection changes.
#[derive(Clone, Copy, Default)]
struct Given {
    access: bool,
    dest_qp_num: bool,
    timeout: bool,
    retry_cnt: bool,
    rnr_retry: bool,
}

/// The shared receive queue of a queue pair, and how it stands there.
struct Shared {
    srq: Arc<Srq>,
    waiter: Option<Weak<dyn Waiter>>,
    /// In line, or woken and with a receive kept for it.
    waiting: bool,
    /// Others that got what was kept for this one.
    woken: Woken,
}

/// State of the connection, made anew for each.
struct Stream {
    /// The queue pair's number, for traces.
    qpn: u32,
    params: StreamParams,
    mulpdu: usize,
    out: OutQueue,
    tx: transmit::Tx,
    framer: Framer,
    rx: RxState,
    direct: Option<direct::Direct>,
    /// Reads of ours that wait for responses, oldest first.
    reads: VecDeque<receive::ReadSink>,
    /// Reads of the peer's that wait for our responses.
    requests: VecDeque<receive::ReadSource>,
    /// Where the responses end that are cut and, as far as was looked, not all with the lower layer.
    responses: VecDeque<u64>,
    /// Until it ends, the stream can use the regions of its domain.
    streaming: Option<Streaming>,
    /// A Send arrived and no receive was posted.
    stalled: bool,
    /// Sends that came without a receive while Responses to our Reads are to come behind them.
    aside: aside::Aside,
    /// The Send that waited last.
    waiting: Option<receive::Struck>,
    /// Receives that are still to be sized to end at the next header.
    exact_reads: u8,
    /// Bytes of the Write that came last, whole or not; zero when a Send or an Immediate came behind it.
    written: u32,
    /// The Write that came last is not whole yet.
    write_continues: bool,
    first_fpdu_seen: bool,
    established: Established,
    /// Messages of the peer that are placed, and how many of them it was told of.
    placed: u64,
    placed_told: u64,
    /// The program has sent something since the last of them: it likely answers the next one too, and what tells of it can ride on that.
    answered: bool,
    /// What is placed of that the peer wants to hear of.
    asked_of: u64,
    /// The first of these of which it was not told yet.
    asked_first: u64,
    /// When the peer is to be told.
    tell: acks::Tell,
    /// And for how long a program that polls in vain may still answer first.
    hold: acks::Hold,
    /// Messages of ours that the peer has placed.
    acked: u64,
    /// Signalled ones that have completed.
    completed_signaled: u64,
    closing: Option<Disconnect>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Established {
    NotYet,
    Untold,
    Told,
}

impl QpCore {
    /// A queue pair in RESET.
    pub fn new(qpn: u32, init: QpInit) -> Self {
        let mut caps = init.caps;
        let rq = match &init.srq {
            None => queues::RecvQueue::new(caps.max_recv_wr, caps.max_recv_sge),
            Some(srq) => {
                (caps.max_recv_wr, caps.max_recv_sge) = (0, 0);
                queues::RecvQueue::new(1, srq.query().max_sge)
            }
        };
        let sq = queues::SendQueue::new(caps.max_send_wr, caps.max_send_sge, caps.max_inline_data);
        let receive_places = init.srq.as_ref().map_or_else(|| rq.places().clone(), |srq| srq.places());
        Self {
            qpn,
            pd: init.pd,
            send_cq: Outlet::new(init.send_cq, sq.places().clone()),
            recv_cq: Outlet::new(init.recv_cq, receive_places),
            shared: init.srq.map(|srq| Shared { srq, waiter: None, waiting: false, woken: Woken::default() }),
            cookie: init.cookie,
            async_sink: init.async_sink,
            attr: QpAttr {
                state: QpState::Reset,
                caps,
                access: Access::empty(),
                dest_qp_num: 0,
                rq_psn: 0,
                sq_psn: 0,
                max_rd_atomic: 0,
                max_dest_rd_atomic: 0,
                min_rnr_timer: 0,
                timeout: 0,
                retry_cnt: 0,
                rnr_retry: 0,
                port_num: 1,
                pkey_index: 0,
                sq_draining: false,
                sq_sig_all: init.sq_sig_all,
            },
            given: Given::default(),
            notify_sqd: false,
            sq,
            rq,
            local: MrCache::default(),
            remote: MrCache::default(),
            cq_overflow: false,
            gone: false,
            counters: Counters::default(),
            stream: None,
        }
    }

    /// Its number.
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        self.attr.state
    }

    /// All its attributes.
    pub fn query(&self) -> QpAttr {
        self.attr
    }

    /// Its completion queues: for sends, for receives.
    pub fn cqs(&self) -> (&Arc<Cq>, &Arc<Cq>) {
        (self.send_cq.cq(), self.recv_cq.cq())
    }

    /// Its shared receive queue.
    pub fn srq(&self) -> Option<&Arc<Srq>> {
        self.shared.as_ref().map(|shared| &shared.srq)
    }

    /// Who is to be woken when a receive of the shared receive queue is kept for this queue pair; it then calls
    /// [`Self::unstall`] and [`Self::handle_input`]. To be set once, before the queue pair is attached.
    pub fn set_waiter(&mut self, waiter: Weak<dyn Waiter>) {
        if let Some(shared) = &mut self.shared {
            shared.waiter = Some(waiter);
        }
    }

    /// Queue pairs that have to be woken since this one has left the line, once the lock is free.
    pub fn take_woken(&mut self) -> Option<Woken> {
        let shared = self.shared.as_mut().filter(|shared| !shared.woken.is_empty())?;
        Some(std::mem::take(&mut shared.woken))
    }

    /// Leaves the line at the shared receive queue.
    fn leave_line(&mut self) {
        if let Some(shared) = &mut self.shared
            && std::mem::take(&mut shared.waiting)
        {
            shared.woken.append(shared.srq.leave(self.qpn));
        }
    }

    /// Changes attributes and state. All or nothing.
    pub fn modify(&mut self, change: &QpModify) -> Result<(), VerbsError> {
        let from = self.attr.state;
        if change.cur_state.is_some_and(|s| s != from) {
            return Err(VerbsError::Invalid("the queue pair is not in the state the program names"));
        }
        let to = change.state.unwrap_or(from);
        if change.state.is_some() && !from.may_become(to) {
            return Err(VerbsError::Invalid("no such state transition"));
        }
        if matches!(to, QpState::Rtr | QpState::Rts) && from != to && !self.may_be_up(to) {
            return Err(VerbsError::NotSupported("a queue pair gets its connection from rdma_cm"));
        }
        if change.port_num.is_some_and(|p| p != 1) {
            return Err(VerbsError::Invalid("the device has one port, number 1"));
        }
        let (attr, given) = (&mut self.attr, &mut self.given);
        given.access |= change.access.is_some();
        given.dest_qp_num |= change.dest_qp_num.is_some();
        given.timeout |= change.timeout.is_some();
        given.retry_cnt |= change.retry_cnt.is_some();
        given.rnr_retry |= change.rnr_retry.is_some();
        set(&mut attr.access, change.access);
        set(&mut attr.dest_qp_num, change.dest_qp_num);
        set(&mut attr.rq_psn, change.rq_psn);
        set(&mut attr.sq_psn, change.sq_psn);
        if self.stream.is_none() {
            set(&mut attr.max_rd_atomic, change.max_rd_atomic.map(u16::from));
            set(&mut attr.max_dest_rd_atomic, change.max_dest_rd_atomic.map(u16::from));
        }
        set(&mut attr.min_rnr_timer, change.min_rnr_timer);
        set(&mut attr.timeout, change.timeout);
        set(&mut attr.retry_cnt, change.retry_cnt);
        set(&mut attr.rnr_retry, change.rnr_retry);
        set(&mut attr.port_num, change.port_num);
        set(&mut attr.pkey_index, change.pkey_index);
        if from != to {
            self.enter(to, change.sqd_async_notify.unwrap_or(false));
        }
        Ok(())
    }

    fn enter(&mut self, to: QpState, notify_sqd: bool) {
        match to {
            QpState::Reset => {
                self.send_cq.purge();
                self.recv_cq.purge();
                self.sq.clear();
                if let Some(shared) = &self.shared {
                    // The receive of a message in progress, which makes no completion now.
                    let places = shared.srq.places();
                    (0..self.rq.len()).for_each(|_| places.free(0));
                }
                self.rq.clear();
                self.leave_line();
                if let Some(stream) = &mut self.stream {
                    stream.end(Disconnect::LocalClosed);
                }
                self.attr.state = QpState::Reset;
                self.gone = false;
                self.cq_overflow = false;
                // Nobody waits for the draining any more; an event would be about a queue pair that may be gone.
                self.attr.sq_draining = false;
                self.notify_sqd = false;
                self.attr.access = Access::empty();
                self.given = Given::default();
                (self.attr.timeout, self.attr.retry_cnt) = (0, 0);
                self.meet(None);
            }
            QpState::Err => self.flush(Disconnect::LocalClosed, None),
            QpState::Sqd => {
                self.attr.state = QpState::Sqd;
                self.attr.sq_draining = true;
                self.notify_sqd = notify_sqd;
                self.check_drained();
            }
            other => {
                self.attr.state = other;
                self.attr.sq_draining = false;
            }
        }
    }

    /// In SQD: says so once every work request that was started is complete. Those that were not wait for RTS.
    fn check_drained(&mut self) {
        if self.attr.sq_draining && self.sq.next == self.sq.head {
            self.attr.sq_draining = false;
            if std::mem::take(&mut self.notify_sqd) {
                self.event(EventKind::SqDrained);
            }
        }
    }

    /// Queues a send work request; [`Self::build`] starts it.
    #[inline]
    pub fn post_send(&mut self, wr: &SendWr<'_>) -> Result<(), VerbsError> {
        if !self.attr.state.may_post_send() {
            return Err(VerbsError::Invalid("the queue pair is not ready to send"));
        }
        if self.attr.state == QpState::Err {
            self.check_post(wr)?;
            self.sq.pass()?;
            let opcode = transmit::wc_opcode(wr.op);
            self.complete_send(Wc::new(wr.wr_id, WcStatus::WrFlushErr, opcode, self.qpn));
            return Ok(());
        }
        if wr.op.wants_uwarp() && self.stream.as_ref().is_some_and(|s| !s.params.peer_is_uwarp) {
            return Err(VerbsError::NotSupported("the peer is no uwarp end, and may not know the operation"));
        }
        let posted = self.sq.post(wr);
        if matches!(posted, Err(VerbsError::QueueFull)) {
            // Of the places that are taken, some may be those of messages that nobody asked about.
            self.ask_placed(true);
        }
        posted
    }

    fn check_post(&mut self, wr: &SendWr<'_>) -> Result<(), VerbsError> {
        if wr.sges.len() > self.attr.caps.max_send_sge as usize {
            return Err(VerbsError::Invalid("more scatter/gather elements than the queue pair was made for"));
        }
        Ok(())
    }

    /// Queues a receive work request. The owner calls [`Self::handle_input`] again when [`Self::stalled`].
    pub fn post_recv(&mut self, wr: &RecvWr<'_>) -> Result<(), VerbsError> {
        if self.shared.is_some() {
            return Err(VerbsError::Invalid("the queue pair takes its receives from a shared receive queue"));
        }
        if !self.attr.state.may_post_recv() {
            return Err(VerbsError::Invalid("the queue pair is in RESET"));
        }
        if self.attr.state == QpState::Err {
            self.rq.pass()?;
            let wc = Wc::new(wr.wr_id, WcStatus::WrFlushErr, crate::wr::WcOpcode::Recv, self.qpn);
            self.complete_recv(wc, false);
            return Ok(());
        }
        self.rq.post(wr)
    }

    /// Gives the queue pair a stream and moves it to RTS.
    pub fn attach(&mut self, params: StreamParams) -> Result<(), VerbsError> {
        if !matches!(self.attr.state, QpState::Reset | QpState::Init) || self.stream.is_some() {
            return Err(VerbsError::Invalid("the queue pair is connected already or in error"));
        }
        let mulpdu = params.mulpdu();
        self.attr.max_rd_atomic = params.ord;
        self.attr.max_dest_rd_atomic = params.ird;
        let (attr, given) = (&mut self.attr, self.given);
        let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        set(&mut attr.access, (!given.access).then_some(rights));
        set(&mut attr.timeout, (!given.timeout).then_some(params.timeout));
        set(&mut attr.retry_cnt, (!given.retry_cnt).then_some(params.retry_cnt));
        self.meet(params.peer);
        self.attr.state = QpState::Rts;
        let inserter = params.send_markers.then(MarkerInserter::default);
        let mut stream = Stream {
            qpn: self.qpn,
            params,
            mulpdu,
            out: OutQueue::with_markers(params.send_markers),
            tx: transmit::Tx::new(inserter, !params.wait_first_fpdu),
            framer: Framer::new(params.crc, params.receive_markers),
            rx: RxState::new(params.peer_is_uwarp),
            direct: None,
            reads: VecDeque::new(),
            requests: VecDeque::new(),
            responses: VecDeque::new(),
            streaming: Some(self.pd.begin_stream()),
            stalled: false,
            aside: aside::Aside::default(),
            waiting: None,
            exact_reads: 0,
            written: 0,
            write_continues: false,
            first_fpdu_seen: false,
            established: Established::NotYet,
            placed: 0,
            placed_told: 0,
            answered: false,
            asked_of: 0,
            asked_first: 0,
            tell: acks::Tell::Rides,
            hold: acks::Hold::new(),
            acked: 0,
            completed_signaled: 0,
            closing: None,
        };
        stream.begin();
        self.stream = Some(stream);
        Ok(())
    }

    /// What queries tell of the peer. Of one that does not introduce itself neither number is known, and a stranger may
    /// end the stream at once when it has no receive, as siw does: no retries.
    fn meet(&mut self, peer: Option<PeerData>) {
        let (qpn, retries) = peer.map_or((0, 0), |peer| (peer.qpn, peer.rnr_retry));
        set(&mut self.attr.dest_qp_num, (!self.given.dest_qp_num).then_some(qpn));
        set(&mut self.attr.rnr_retry, (!self.given.rnr_retry).then_some(retries));
    }

    /// Forgets the stream, after its socket was closed or handed to whoever drains it.
    pub fn detach(&mut self) {
        self.stream = None;
    }

    /// Whether the queue pair has a stream.
    pub fn attached(&self) -> bool {
        self.stream.is_some()
    }

    /// Why the stream is to be closed, once it is: send what [`Self::out`] still has, shut down, drain, close.
    pub fn closing(&self) -> Option<Disconnect> {
        self.stream.as_ref().and_then(|s| s.closing)
    }

    /// Whether the connection became usable since the last call: for the responder, the first FPDU arrived.
    pub fn take_established(&mut self) -> bool {
        match &mut self.stream {
            Some(s) if s.established == Established::Untold => {
                s.established = Established::Told;
                true
            }
            _ => false,
        }
    }

    /// Whether work is posted that may not go out: a responder is silent until the initiator's first FPDU has arrived
    /// (RFC 5044 section 7.1.2 rule 4).
    pub fn muted(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| !s.tx.open && s.closing.is_none()) && self.sq.has_unsent()
    }

    /// Whether a Send waits for a receive to be posted; nothing is to be read meanwhile.
    pub fn stalled(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.stalled)
    }

    /// How long such a wait may last.
    pub fn rnr_timeout(&self) -> Option<Duration> {
        self.stream.as_ref().and_then(|s| s.params.rnr_timeout)
    }

    /// Whether the send queue and everything cut from it is gone to the lower layer and completed.
    pub fn send_idle(&self) -> bool {
        self.sq.is_empty() && self.stream.as_ref().is_none_or(|s| s.out.is_empty() && s.tx.idle())
    }

    /// The peer waits to hear what is placed, or is to be asked for it. Either goes with the next that goes out; the owner sees to it that
    /// it does not wait long for that ([`Self::tell_placed`]).
    pub fn ack_waits(&self) -> bool {
        self.stream.as_ref().is_some_and(Stream::ack_waits)
    }

    /// As far as is known, one of the two programs waits for that.
    pub fn ack_awaited(&self) -> bool {
        self.stream.as_ref().is_some_and(Stream::ack_awaited)
    }

    /// The program has polled in vain. Says whether the next [`Self::build`] tells or asks the peer because of that: not while the program
    /// is likely to send something in a moment.
    pub fn polled_in_vain(&mut self) -> bool {
        self.stream.as_mut().is_some_and(Stream::polled_in_vain)
    }

    /// Messages of the peer's that are placed.
    pub fn messages_placed(&self) -> u64 {
        self.stream.as_ref().map_or(0, |s| s.placed)
    }

    /// Whether signalled messages complete before they reach the peer's memory: what the program waits for next is then the peer's
    /// answer.
    pub fn completes_early(&self) -> bool {
        self.stream.as_ref().is_some_and(|s| s.params.peer_is_uwarp && !s.params.placement_acks)
    }

    /// Messages cut so far that the peer counts.
    pub fn messages_sent(&self) -> u64 {
        self.stream.as_ref().map_or(0, |s| s.tx.messages())
    }

    /// The peer waits for an acknowledgement longer than it should: the owner is to send before it receives more.
    pub fn ack_presses(&self) -> bool {
        self.stream.as_ref().is_some_and(Stream::ack_presses)
    }

    /// Frames that told or asked, so far.
    pub fn acks_sent(&self) -> u32 {
        self.stream.as_ref().map_or(0, |s| s.tx.acks())
    }

    /// Nothing is known to go out soon: the next [`Self::build`] tells the peer what is placed, and asks it if need be.
    pub fn tell_placed(&mut self) {
        if let Some(stream) = &mut self.stream {
            if stream.owes_ack() {
                stream.tell = acks::Tell::Now;
            }
            stream.tx.ask |= stream.question_presses();
        }
    }

    /// The next [`Self::build`] asks what the peer has placed of what it was not asked about; of what no work request waits for, only with
    /// `all`.
    pub fn ask_placed(&mut self, all: bool) {
        if let Some(stream) = &mut self.stream {
            stream.tx.ask |= if all { stream.owes_question() } else { stream.question_presses() };
        }
    }

    /// The stream is about to end: the next [`Self::build`] tells of all that is placed, asked or not.
    pub fn tell_all(&mut self) {
        if let Some(stream) = &mut self.stream {
            stream.tell_all();
        }
    }

    /// Bytes waiting for the lower layer.
    pub fn out(&mut self) -> Option<&mut OutQueue> {
        self.stream.as_mut().map(|s| &mut s.out)
    }

    /// Makes the next message of every queue, in both directions, have this MSN, for tests near the wrap. Call on both ends
    /// right after they were attached.
    #[doc(hidden)]
    pub fn set_msn(&mut self, msn: u32) {
        if let Some(stream) = &mut self.stream {
            stream.rx.set_msn(msn);
            stream.tx.set_msn(msn);
        }
    }

    /// The socket had no room.
    pub fn no_room(&mut self) {
        self.counters.room_stalls += 1;
    }

    /// The lower layer has sent so many segments again.
    pub fn resent(&mut self, segments: u64) {
        self.counters.retransmits += segments;
    }

    /// What it has done and what it is at.
    pub fn snapshot(&self) -> Snapshot {
        let stream = self.stream.as_ref();
        Snapshot {
            counters: self.counters,
            reads_outstanding: stream.map_or(0, |s| s.reads.len()),
            reads_to_serve: stream.map_or(0, |s| s.requests.len()),
            sends_posted: self.sq.len(),
            receives_posted: self.rq.len(),
            waiting_bytes: stream.map_or(0, |s| s.out.waiting()),
            stalled: self.stalled(),
            muted: self.muted(),
            peer_is_uwarp: stream.is_some_and(|s| s.params.peer_is_uwarp),
        }
    }

    fn count_failure(&mut self, wc: &Wc) {
        match wc.status {
            WcStatus::Success => {}
            WcStatus::WrFlushErr => self.counters.flushed += 1,
            _ => self.counters.failed += 1,
        }
    }

    fn event(&self, kind: EventKind) {
        self.async_sink.async_event(AsyncEvent { kind, cookie: self.cookie });
    }

    /// Completes the send work request that was taken out of the queue right before.
    fn complete_send(&mut self, wc: Wc) {
        self.count_failure(&wc);
        let tail = self.sq.completes();
        self.cq_overflow |= !self.send_cq.push(tail, wc, false);
    }

    /// Completes the receive that was taken out of the queue right before.
    fn complete_recv(&mut self, wc: Wc, solicited: bool) {
        self.count_failure(&wc);
        let tail = self.rq.completes();
        self.cq_overflow |= !self.recv_cq.push(tail, wc, solicited);
    }

    /// Makes the completions of the oldest send work requests that are done.
    fn retire(&mut self) {
        self.retire_done();
        self.check_drained();
    }

    fn retire_done(&mut self) {
        while let Some(slot) = self.sq.front() {
            let signaled = self.attr.sq_sig_all || slot.flags.contains(SendFlags::SIGNALED);
            let status = match slot.phase {
                queues::Phase::Done => WcStatus::Success,
                queues::Phase::Sent { end, message } => {
                    let Some(s) = &mut self.stream else { return };
                    if end > s.out.taken() || message > s.completes_to() {
                        return;
                    }
                    s.completed_signaled += u64::from(signaled);
                    WcStatus::Success
                }
                queues::Phase::Failed(status) => return self.local_failure(status),
                queues::Phase::Posted | queues::Phase::Reading => return,
            };
            let mut wc = Wc::new(slot.wr_id, status, transmit::wc_opcode(slot.op), self.qpn);
            wc.byte_len = slot.total;
            self.counters.completed(slot.op, slot.total);
            self.sq.pop();
            if signaled {
                self.complete_send(wc);
            }
        }
    }
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

/// Regions in use by a receive that is under way; kept only for the length of a system call.
type Pins = SmallVec<[MrUse; 2]>;
