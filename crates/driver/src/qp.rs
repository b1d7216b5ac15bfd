//! A queue pair with its link.
//!
//! The [`Pump`] moves the bytes, and [`io`] ties it to the engine; this file has the calls of the program and
//! of the engine.
//!
//! One lock protects the whole ([`Attended`]). The thread that has it moves bytes; a thread that finds it
//! taken leaves that to the holder. It is released only by [`Qp::release`] and [`Qp::let_go`], however short
//! it was held.

mod ending;
mod io;
mod served;
mod settle;

pub use settle::Settling;
use settle::say_link;

use std::cell::Cell;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use uwarp_llp::link::{Caps, Kind};
use uwarp_llp::memory::lane;
use uwarp_llp::streams::Carries;
use uwarp_llp::{Link, LowerLayer as _};
use uwarp_process::{Mutex, MutexGuard};
use uwarp_proto::framing::Framing;
use uwarp_rnic::cq::{Coverage, Feeder};
use uwarp_rnic::qp::{
    Disconnect, DisconnectReply, Drops, End, LinkCaps, LinkEvent, Now, Psns, QpAttr, QpInit, QpModify,
    QpState, RcCore, Snapshot, StreamParams,
};
use uwarp_rnic::srq::Waiter;
use uwarp_rnic::{RecvWr, SendWr, VerbsError};

use crate::attended::Attended;
use crate::engine::{Engine, ParkMark};
use crate::fork::Uncancelled;
use crate::host::{Neighbours, Why};
use crate::linger::{self, Linger, Waiting};
use crate::nic::Nic;
use crate::observer::StreamObserver;
use crate::pair::QueuePair;
use crate::places::Place;
use crate::pump::Pump;
use crate::shell::{Shell, post_each, post_together};
use crate::source::Token;

/// How long an exit waits for the queue pair's lock. No call holds it nearly as long.
const EXIT_PATIENCE: Duration = Duration::from_millis(20);
/// The same for who only wants to know how it does.
const LOOK_PATIENCE: Duration = EXIT_PATIENCE;

struct Inner {
    core: RcCore,
    conn: Option<Conn>,
    /// For deadlines that outlive the connection.
    alone: Option<Timer>,
    /// The last one.
    streams: StreamNumber,
    /// The last one that has ended, until it is closed.
    last: Weak<Linger>,
    destroyed: bool,
    /// Traffic class of its streams; 0: the system's, or what rdma_cm has set.
    traffic_class: u8,
    /// Reports to make after the lock is released, oldest first.
    notices: VecDeque<Notice>,
}

/// The addresses of a stream's connection (own, peer's), its link, and why that is TCP on one host.
pub(crate) type Carried = ([Option<SocketAddr>; 2], Option<Kind>, Option<Why>);

/// Which of a queue pair's streams.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamNumber(u64);

impl StreamNumber {
    const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// What the engine's timer is set to.
#[derive(Clone, Copy)]
struct Timer {
    token: Token,
    /// Never later than the core's first deadline. It may be earlier: a wait often ends before its deadline,
    /// and moving the timer costs more than an unnecessary call.
    at: Option<Instant>,
}

struct Conn {
    link: Link,
    pump: Pump,
    timer: Timer,
    observer: Arc<dyn StreamObserver>,
    /// The descriptor is not watched, because a thread polls it.
    parked: Option<ParkMark>,
    /// Whether its link may change before its first byte.
    settling: Settling,
    /// Why it uses TCP, although the peer is on this host.
    why_tcp: Option<Why>,
    /// Its peer has a link of its own as long as this stream lasts.
    place: Option<Place>,
}

impl Timer {
    #[inline]
    fn set(&mut self, engine: &Engine, first: Option<Instant>) {
        if let Some(first) = first
            && self.at.is_none_or(|at| first < at)
        {
            self.at = Some(first);
            engine.set_timer(self.token, Some(first));
        }
    }
}

impl Inner {
    /// What the queue pair has done and its present state, with what only the system knows of its connection.
    fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.core.snapshot();
        if let Some(conn) = &self.conn {
            snapshot.counters.retransmits += conn.link.retransmits();
        }
        snapshot
    }
}

enum Notice {
    Established(Arc<dyn StreamObserver>),
    Disconnected(Arc<dyn StreamObserver>, Disconnect),
    Over(Arc<Linger>),
    /// A receive of the shared receive queue that was kept for this queue pair is now kept for another.
    Kept(Arc<dyn Waiter>),
}

impl Notice {
    fn report(self) {
        match self {
            Self::Established(observer) => observer.established(),
            Self::Disconnected(observer, why) => observer.disconnected(why),
            Self::Over(linger) => linger.step(),
            Self::Kept(waiter) => waiter.receive_kept(),
        }
    }
}

/// A queue pair.
pub struct Qp {
    me: Weak<Self>,
    shell: Shell,
    inner: Attended<Inner, 16>,
    /// What receives for its stream, if that shares a socket with others. Called without its lock.
    carries: Mutex<Option<Arc<dyn Carries>>, 29>,
    /// There is such a thing.
    is_carried: AtomicBool,
    /// The kernel may have room again.
    room: AtomicBool,
    /// A thread has polled the socket while the system does not watch it.
    polled: AtomicBool,
    /// The last look, of whoever was told that there is something, has received nothing.
    found_nothing: AtomicBool,
    /// A thread that polls has looked at its memory.
    looked_at: AtomicBool,
    /// The system has reported, once, that the peer closed or the connection broke. A hint: the report may be
    /// about an earlier stream.
    hung_up: AtomicBool,
    /// Its timer has expired, and nobody has served it yet.
    timed_out: AtomicBool,
    /// A receive of the shared receive queue is kept for the Send that waits. A hint: it may have been kept
    /// for an earlier stream.
    kept: AtomicBool,
    /// Steps of the set-up that came before the stream.
    steps: AtomicU32,
    /// A thread makes reports, and then looks for those that were added meanwhile.
    reporting: AtomicBool,
}

impl Qp {
    /// Makes a queue pair in RESET. Fails when a limit of the device is exceeded or no number is free.
    pub fn create(nic: &Arc<Nic>, mut init: QpInit) -> Result<Arc<Self>, VerbsError> {
        let shell = Shell::admit(nic, &mut init)?;
        let qp = Arc::new_cyclic(|me: &Weak<Self>| {
            let inner = Inner {
                core: RcCore::new(shell.qpn(), init, Some(me.clone())),
                conn: None,
                alone: None,
                streams: StreamNumber::default(),
                last: Weak::new(),
                destroyed: false,
                traffic_class: 0,
                notices: VecDeque::new(),
            };
            Self {
                me: me.clone(),
                shell,
                inner: Attended::new(inner),
                carries: Mutex::default(),
                is_carried: AtomicBool::new(false),
                room: AtomicBool::new(false),
                polled: AtomicBool::new(false),
                found_nothing: AtomicBool::new(false),
                looked_at: AtomicBool::new(false),
                hung_up: AtomicBool::new(false),
                timed_out: AtomicBool::new(false),
                kept: AtomicBool::new(false),
                steps: AtomicU32::new(0),
                reporting: AtomicBool::new(false),
            }
        });
        let feeder: Weak<dyn Feeder> = qp.me.clone();
        qp.shell.arrive(&QueuePair::Rc(qp.clone()), &feeder);
        Ok(qp)
    }

    /// Its number.
    pub fn qpn(&self) -> u32 {
        self.shell.qpn()
    }

    /// Posts send work requests. If one is refused, returns its index (the ones before it are posted) and the
    /// reason. Never blocks.
    pub fn post_send<'a>(&self, wrs: impl Iterator<Item = SendWr<'a>>) -> Result<(), (usize, VerbsError)> {
        if self.shell.is_parents() {
            return Err((0, VerbsError::Forked));
        }
        let mut inner = self.inner.lock();
        let result = post_each(wrs, |wr| inner.core.post_send(wr));
        self.send(&mut inner, &Now::unread());
        self.release(inner);
        result
    }

    /// As [`Self::post_send`], but if one is refused, none is posted.
    pub fn post_send_together<'a>(
        &self,
        wrs: impl Iterator<Item = SendWr<'a>> + Clone,
    ) -> Result<(), VerbsError> {
        if self.shell.is_parents() {
            return Err(VerbsError::Forked);
        }
        let mut inner = self.inner.lock();
        let result = post_together(&mut inner.core, wrs, RcCore::check_send, RcCore::post_checked);
        // Also after a refusal: a full queue asks for an acknowledgement.
        self.send(&mut inner, &Now::unread());
        self.release(inner);
        result
    }

    /// Posts receive work requests; as [`Self::post_send`].
    pub fn post_recv<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), (usize, VerbsError)> {
        if self.shell.is_parents() {
            return Err((0, VerbsError::Forked));
        }
        let mut inner = self.inner.lock();
        let mut posted = false;
        let result = post_each(wrs, |wr| inner.core.post_recv(wr).inspect(|()| posted = true));
        if posted && inner.core.awaits_receive() {
            let now = Now::unread();
            inner.core.resume(&now);
            self.pump(&mut inner, &now);
            self.release(inner);
        } else {
            self.let_go(inner);
        }
        result
    }

    /// Sets the traffic class of its streams; 0: the system's.
    pub fn set_traffic_class(&self, class: u8) {
        let mut inner = self.inner.lock();
        let before = std::mem::replace(&mut inner.traffic_class, class);
        if before != class
            && let Some(conn) = &inner.conn
        {
            mark(&conn.link, class);
        }
        self.let_go(inner);
    }

    /// Changes attributes or state.
    pub fn modify(&self, change: &QpModify) -> Result<(), VerbsError> {
        if self.shell.is_parents() {
            return Err(VerbsError::Forked);
        }
        let mut inner = self.inner.lock();
        if matches!(change.state, Some(QpState::Err | QpState::Reset)) {
            answer(&mut inner);
            inner = self.await_first_message(inner);
            self.receive_all(&mut inner);
        }
        if change.state == Some(QpState::Err) {
            inner = self.await_ack(inner);
        }
        let result = inner.core.modify(change);
        if result.is_ok() {
            self.pump(&mut inner, &Now::unread());
        }
        self.release(inner);
        result
    }

    /// Its attributes.
    pub fn query(&self) -> QpAttr {
        let inner = self.inner.lock();
        let attr = inner.core.query();
        self.release(inner);
        attr
    }

    /// If it waits for a stream that is being made: its attributes, the packet sequence numbers that its
    /// program has set, and which of its moves to RTR the stream is for.
    pub fn awaits_stream(&self) -> Option<(QpAttr, Psns, u32)> {
        let inner = self.inner.lock();
        let core = &inner.core;
        let awaits = core.awaits_stream().map(|moves| (core.query(), core.psns(), moves));
        self.release(inner);
        awaits
    }

    /// Its attributes, and the packet sequence numbers that its program has set.
    pub fn terms(&self) -> (QpAttr, Psns) {
        let inner = self.inner.lock();
        let terms = (inner.core.query(), inner.core.psns());
        self.release(inner);
        terms
    }

    /// Whether completions wait to be polled in the queues where its work requests complete.
    pub fn has_unpolled(&self) -> bool {
        self.shell.has_unpolled()
    }

    /// Whether it has a stream whose other end is uwarp, too. A responder knows it for certain when the
    /// stream is established.
    pub fn peer_is_uwarp(&self) -> bool {
        let inner = self.inner.lock();
        let uwarp = inner.core.snapshot().peer_is_uwarp;
        self.let_go(inner);
        uwarp
    }

    /// Its attributes, its counters, and what carries its stream if it has one. `None`: a thread that has
    /// jumped out of a call, from the handler of a signal, has the lock.
    pub(crate) fn look_at(&self) -> Option<(QpAttr, Snapshot, Carried)> {
        let inner = self.inner.try_lock_for(LOOK_PATIENCE)?;
        let (attr, snapshot) = (inner.core.query(), inner.snapshot());
        let carried = inner.conn.as_ref().map_or(([None, None], None, None), |conn| {
            (conn.link.addresses(), Some(conn.link.kind()), conn.why_tcp)
        });
        self.release(inner);
        Some((attr, snapshot, carried))
    }

    pub(crate) fn neighbours(&self) -> Option<Arc<Neighbours>> {
        self.shell.nic().neighbours()
    }

    pub(crate) fn lane_to_itself(&self) -> Option<lane::End> {
        self.shell.nic().lane_to_itself()
    }

    pub(crate) fn known_neighbours(&self) -> Option<Arc<Neighbours>> {
        self.shell.nic().known_neighbours()
    }

    pub(crate) fn why_alone(&self) -> Why {
        self.shell.nic().why_alone()
    }

    /// Gives the queue pair its stream. `link` must have received the set-up and nothing after it. Moves the
    /// queue pair to RTS, unless the program moves it itself.
    pub fn attach(
        &self,
        link: Link,
        params: StreamParams,
        observer: Arc<dyn StreamObserver>,
    ) -> Result<StreamNumber, (VerbsError, Link)> {
        self.attach_unsettled(link, params, observer, Settling::Over)
    }

    /// As [`Self::attach`], but the link may change before the first byte.
    pub fn attach_unsettled(
        &self,
        link: Link,
        params: StreamParams,
        observer: Arc<dyn StreamObserver>,
        settling: Settling,
    ) -> Result<StreamNumber, (VerbsError, Link)> {
        let mut inner = self.inner.lock();
        let result = self.attach_locked(&mut inner, link, params, observer, settling);
        self.release(inner);
        result
    }

    /// As [`Self::attach_unsettled`], for the stream that it has waited for since this one of its moves to
    /// RTR ([`Self::awaits_stream`]).
    pub fn attach_awaited(
        &self,
        link: Link,
        params: StreamParams,
        observer: Arc<dyn StreamObserver>,
        moves: u32,
        settling: Settling,
    ) -> Result<StreamNumber, (VerbsError, Link)> {
        let mut inner = self.inner.lock();
        let result = if inner.core.awaits_stream() == Some(moves) {
            self.attach_locked(&mut inner, link, params, observer, settling)
        } else {
            Err((VerbsError::Invalid("the queue pair does not wait for this stream"), link))
        };
        self.release(inner);
        result
    }

    fn attach_locked(
        &self,
        inner: &mut Inner,
        link: Link,
        mut params: StreamParams,
        observer: Arc<dyn StreamObserver>,
        mut settling: Settling,
    ) -> Result<StreamNumber, (VerbsError, Link)> {
        if inner.destroyed {
            return Err((VerbsError::Invalid("the queue pair is destroyed"), link));
        }
        if params.emss == 0 {
            // The segment size of a path to a known uwarp peer does not matter: its FPDUs span segments.
            let emss = if params.peer.is_some() { None } else { link.emss() };
            params.emss = emss.unwrap_or(536);
        }
        let Some(me) = self.me.upgrade() else {
            return Err((VerbsError::Invalid("the queue pair is being destroyed"), link));
        };
        let now = &Now::unread();
        let caps = link.caps();
        params.link = link_caps(caps);
        if link.kind() == Kind::Rd {
            // Its packets have a checksum, and it is what its user has chosen.
            (params.framing, settling) = (Framing::PLAIN, Settling::Over);
        }
        if let Err(error) = inner.core.attach(now, params) {
            return Err((error, link));
        }
        // Reports about an earlier stream do not count.
        self.hung_up.store(false, Ordering::Release);
        let engine = self.shell.nic().engine();
        let token = match engine.register_watch(link.watch(), me) {
            Ok(token) => token,
            Err(e) => {
                tracing::error!(qpn = self.qpn(), "cannot watch the socket: {e}");
                // Cannot be refused: any state may become the error state.
                let _ = inner.core.modify(&QpModify { state: Some(QpState::Err), ..QpModify::default() });
                self.act(inner, now);
                return Err((VerbsError::NoResources("descriptors"), link));
            }
        };
        if let Some(timer) = inner.alone.take() {
            engine.deregister(timer.token);
        }
        link.set_name(token.0);
        mark(&link, inner.traffic_class);
        if !caps.needs_system {
            self.shell.set_needs_system(false);
        }
        let carries = link.carries().cloned();
        self.shell.fed_by(Some(token).filter(|_| carries.is_none()));
        self.is_carried.store(carries.is_some(), Ordering::Release);
        *self.carries.lock() = carries;
        linger::stream_begins();
        inner.streams = inner.streams.next();
        let number = inner.streams;
        if settling.is_over() {
            say_link(self.qpn(), &link);
        }
        inner.conn = Some(Conn {
            link,
            pump: Pump::default(),
            timer: Timer { token, at: None },
            observer,
            parked: None,
            settling,
            why_tcp: None,
            place: None,
        });
        self.pump(inner, now);
        Ok(number)
    }

    /// As [`Self::disconnect`], but only for this stream: it may have ended, and another one have begun.
    /// `answered`: the observer is called when the peer's program has disconnected, too, if that end knows
    /// this of its peer; after a second or two at the latest.
    pub fn disconnect_stream(&self, number: StreamNumber, answered: bool) {
        let inner = self.inner.lock();
        if inner.streams == number {
            self.disconnect_locked(inner, answered);
        } else {
            self.let_go(inner);
        }
    }

    /// Begins an orderly end: posted work is sent (for a bounded time), then our side is closed and input is
    /// drained. The observer is called when our side is closed. Does nothing without a stream.
    pub fn disconnect(&self) {
        self.disconnect_locked(self.inner.lock(), false);
    }

    fn disconnect_locked(&self, mut inner: MutexGuard<'_, Inner, 16>, answered: bool) {
        let now = &Now::unread();
        answer(&mut inner);
        inner.core.disconnect(now, answered);
        self.pump(&mut inner, now);
        self.release(inner);
    }

    /// Ends a connection that the peer has ended, for the queue pair only: work requests are flushed. Does
    /// nothing to another connection, which the queue pair may have by now.
    pub fn leave_gone_peer(&self) {
        let mut inner = self.inner.lock();
        answer(&mut inner);
        inner.core.leave_gone_peer();
        self.release(inner);
    }

    /// Destroys the queue pair: no completion, no event and no call to the observer follows. Its connection
    /// is closed in the background.
    pub fn destroy(&self) {
        let mut inner = self.await_first_message(self.inner.lock());
        if !std::mem::replace(&mut inner.destroyed, true) {
            self.receive_all(&mut inner);
            self.shell.stop_feeding();
            self.shell.depart(inner.snapshot().counters, Drops::default());
            // RESET drops the work requests without completions; the stream is then closing.
            let reset = QpModify { state: Some(QpState::Reset), ..QpModify::default() };
            // Cannot be refused: any state may become RESET.
            let _ = inner.core.modify(&reset);
            inner.notices.retain(|notice| matches!(notice, Notice::Over(_) | Notice::Kept(_)));
            if let Some(last) = inner.last.upgrade() {
                last.forget_report();
            }
            answer(&mut inner);
        }
        self.release(inner);
    }

    /// [`Self::release`] for a holder that changed nothing that other threads must learn of.
    fn let_go(&self, inner: MutexGuard<'_, Inner, 16>) {
        if self.inner.let_go(inner) {
            self.look();
        }
    }

    /// Releases the lock and checks whether another thread wanted it meanwhile; then makes the reports.
    fn release(&self, inner: MutexGuard<'_, Inner, 16>) {
        if let Some(notice) = self.release_first(inner) {
            self.report(notice);
        }
    }

    /// As [`Self::release`]; returns the report that the caller has to make first.
    #[inline]
    fn release_first(&self, inner: MutexGuard<'_, Inner, 16>) -> Option<Notice> {
        let first = Cell::new(None);
        let finish = |inner: &mut MutexGuard<'_, Inner, 16>| {
            self.act(inner, &Now::unread());
            if !inner.notices.is_empty() {
                self.take_notice(inner, &first);
            }
            self.set_timer(inner);
        };
        self.inner.release(inner, finish, |inner| self.work(inner, &Now::unread()));
        first.into_inner()
    }

    /// A thread that makes reports makes all of them: in their order.
    #[cold]
    fn take_notice(&self, inner: &mut Inner, first: &Cell<Option<Notice>>) {
        if !self.reporting.swap(true, Ordering::AcqRel) {
            first.set(inner.notices.pop_front());
        }
    }

    /// Makes the reports one after the other, without the lock. It does not wait for it in between: a thread
    /// that has jumped out of a call has it for ever.
    #[cold]
    fn report(&self, first: Notice) {
        // An observer closes descriptors, and a thread that polls must not be cancelled there.
        let _uncancelled = Uncancelled::begin();
        let mut next = Some(first);
        while let Some(notice) = next {
            notice.report();
            self.reporting.store(false, Ordering::Release);
            // If it is taken, its holder makes those that follow.
            next = self.inner.look().and_then(|mut inner| {
                self.work(&mut inner, &Now::unread());
                self.release_first(inner)
            });
        }
    }

    fn established(&self, inner: &mut Inner) {
        if !inner.destroyed
            && let Some(conn) = &mut inner.conn
            && !conn.settling.withholds_established()
        {
            inner.notices.push_back(Notice::Established(conn.observer.clone()));
        }
    }

    /// The stream has ended; `last` is what is still sent before its socket is closed, and how the peer
    /// understands the end.
    fn ended(
        &self,
        inner: &mut Inner,
        now: &Now,
        (why, answer): (Disconnect, DisconnectReply),
        last: (Vec<u8>, End),
    ) {
        let Some(conn) = inner.conn.take() else { return };
        if self.is_carried.swap(false, Ordering::AcqRel) {
            *self.carries.lock() = None;
        }
        let why = if conn.settling.has_failed() { Disconnect::NoLink } else { why };
        inner.core.handle_link(now, LinkEvent::Resent(conn.link.retransmits()));
        let engine = self.shell.nic().engine();
        if conn.parked.is_some() {
            engine.unpark();
        }
        if !conn.link.caps().needs_system {
            self.shell.set_needs_system(true);
        }
        if conn.pump.resets_on_close() {
            conn.link.reset_on_close(false);
        }
        let (mut report, mut at_answer) = ((!inner.destroyed).then_some(conn.observer), None);
        if answer == DisconnectReply::Awaited {
            at_answer = report.take().map(|observer| (observer, why));
        }
        let held = answer == DisconnectReply::Owed && !inner.destroyed;
        let linger =
            Linger::take_over(engine, conn.link, conn.timer.token, last, Waiting { held, at_answer });
        inner.last = Arc::downgrade(&linger);
        inner.notices.push_back(Notice::Over(linger));
        if let Some(observer) = report {
            inner.notices.push_back(Notice::Disconnected(observer, why));
        }
    }

    /// Makes the engine call when the core's first deadline is over.
    #[inline]
    fn set_timer(&self, inner: &mut Inner) {
        let first = inner.core.poll_timeout();
        match &mut inner.conn {
            Some(conn) => conn.timer.set(self.shell.nic().engine(), first),
            None if first.is_some() || inner.alone.is_some() => self.set_timer_alone(inner, first),
            None => {}
        }
    }

    /// As [`Self::set_timer`], without a connection and so without its token.
    #[cold]
    fn set_timer_alone(&self, inner: &mut Inner, first: Option<Instant>) {
        let engine = self.shell.nic().engine();
        if first.is_none() {
            if let Some(timer) = inner.alone.take() {
                engine.deregister(timer.token);
            }
            return;
        }
        let Some(me) = self.me.upgrade() else { return };
        let timer = inner.alone.get_or_insert_with(|| Timer { token: engine.new_token(me), at: None });
        timer.set(engine, first);
    }

    /// Looks for input and room; if another thread has the lock, that thread will look.
    fn look(&self) {
        if let Some(mut inner) = self.inner.look() {
            self.work(&mut inner, &Now::unread());
            self.release(inner);
        }
    }

    /// What other threads may have left for the holder of the lock.
    fn work(&self, inner: &mut Inner, now: &Now) {
        self.handle_timeout(inner, now);
        self.pump(inner, now);
    }

    /// Handles the expired deadlines, if the engine's timer has expired.
    fn handle_timeout(&self, inner: &mut Inner, now: &Now) {
        if self.timed_out.load(Ordering::Acquire) && self.timed_out.swap(false, Ordering::AcqRel) {
            let Inner { conn, alone, .. } = inner;
            if let Some(timer) = conn.as_mut().map(|conn| &mut conn.timer).or(alone.as_mut()) {
                timer.at = None;
            }
            inner.core.handle_timeout(now);
            self.act(inner, now);
        }
    }

    /// [`Feeder::make_progress`], and whether messages of the peer's were placed.
    #[inline(always)]
    fn look_for_input(&self, in_earnest: bool) -> (Coverage, bool) {
        if self.is_carried.load(Ordering::Acquire) {
            return self.look_for_carried(in_earnest);
        }
        self.look_at_own(in_earnest)
    }

    /// Receives what has come for streams of the same socket, and then what of it is this one's.
    #[cold]
    fn look_for_carried(&self, in_earnest: bool) -> (Coverage, bool) {
        let carries = self.carries.lock().clone();
        let is_covered = carries.is_none_or(|carries| carries.look(in_earnest));
        let (coverage, placed) = self.look_at_own(false);
        (if is_covered { coverage } else { Coverage::Partial }, placed)
    }

    #[inline(always)]
    fn look_at_own(&self, in_earnest: bool) -> (Coverage, bool) {
        let (mut waits_for_room, mut placed, mut needs_system) = (false, false, true);
        if let Some(mut inner) = self.inner.try_lock() {
            if let Inner { core, conn: Some(conn), .. } = &mut *inner {
                let engine = self.shell.nic().engine();
                // Of what only the system reports. (A look at memory shows room and the end, too.)
                needs_system = conn.link.caps().needs_system;
                let wants_to_be_told =
                    needs_system && (!conn.pump.writable() || conn.pump.broken() || core.stalled());
                if in_earnest && !wants_to_be_told && conn.parked.is_none_or(|mark| !engine.is_parked(mark)) {
                    conn.parked = engine.park(conn.timer.token);
                }
                if conn.parked.is_some() {
                    self.polled.store(true, Ordering::Relaxed);
                }
                if !needs_system {
                    self.looked_at.store(true, Ordering::Relaxed);
                }
                // (Room that was reported to a pump which has it anyway changes nothing.)
                let room = !conn.pump.writable() && self.room.load(Ordering::Relaxed);
                let unfinished = conn.pump.unfinished() || room || conn.link.has_room_again();
                let before = core.messages_placed();
                let now = &Now::unread();
                let received = self.receive(&mut inner, now);
                let tell = !received && inner.core.polled_in_vain();
                placed = inner.core.messages_placed() != before;
                if !(received || tell || unfinished || self.inner.kicked()) {
                    // The usual case of a polling thread: nothing has changed. A mark that is left from now
                    // on is seen by a later poll, or by the thread that leaves it once the lock is free.
                    self.let_go(inner);
                    return (covered(wants_to_be_told), placed);
                }
                self.send(&mut inner, now);
            }
            waits_for_room = needs_system && inner.conn.as_ref().is_some_and(|conn| !conn.pump.writable());
            self.release(inner);
        }
        (covered(waits_for_room), placed)
    }
}

/// What the core must know of a link.
fn link_caps(caps: Caps) -> LinkCaps {
    let Caps { answers, counts, refers, needs_system: _ } = caps;
    LinkCaps { answers, counts, refers }
}

/// A wish: the stream works without it.
fn mark(link: &Link, class: u8) {
    if class != 0
        && let Err(error) = link.set_traffic_class(class)
    {
        tracing::debug!("cannot set the traffic class: {error}");
    }
}

/// The program ends a connection that the peer's has ended before: that one learns of it.
#[cold]
fn answer(inner: &mut Inner) {
    if let Some(last) = inner.last.upgrade()
        && last.answer()
    {
        inner.notices.push_back(Notice::Over(last));
    }
}

/// `must_be_told`: for something that receiving does not show.
fn covered(must_be_told: bool) -> Coverage {
    if must_be_told { Coverage::Partial } else { Coverage::Complete }
}
