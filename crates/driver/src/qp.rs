//! A queue pair with its socket.
//!
//! [`io`] moves the bytes; here is what the program and the engine ask for.
//!
//! One lock holds the pair together ([`Attended`]). Whoever has it moves bytes; whoever finds it taken leaves that to the holder.
//! It is let go by [`Qp::release`] and [`Qp::let_go`] alone, however short it was held.

mod io;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use uwarp_llp::tcp;
use uwarp_rnic::cq::Feeder;
use uwarp_rnic::mem;
use uwarp_rnic::qp::{Disconnect, QpAttr, QpCore, QpInit, QpModify, QpState, Rtr, Snapshot, StreamParams};
use uwarp_rnic::srq::Waiter;
use uwarp_rnic::{RecvWr, SendWr, VerbsError};

use crate::attended::Attended;
use crate::engine::{ParkMark, Readiness, Source, Token};
use crate::fork;
use crate::linger::{self, Linger};
use crate::nic::Nic;
use crate::silence::Silence;

use io::go_on;

/// Hears of what becomes of a stream. Called without the queue pair's lock; must not block.
pub trait StreamObserver: Send + Sync {
    /// Both sides are up: for the responder, the initiator's first FPDU arrived. Once at most.
    fn established(&self);
    /// The stream is over; the queue pair is in the error state and its work requests are flushed. In the roce and ib views it may
    /// be up still, until the program reacts ([`QpCore::peer_is_gone`]). Once at most.
    fn disconnected(&self, why: Disconnect);
}

/// Inline data that every queue pair takes, in bytes.
const GIVEN_INLINE: u32 = 64;
/// How long what was posted may take to go out after a disconnect.
const SEND_LIMIT: Duration = Duration::from_secs(2);
/// How long an acknowledgement waits at most for something to ride on, after the program has answered each message so far. More than
/// the background thread's naps beside a thread that polls, so that it is not woken for it.
const ACK_LIMIT: Duration = Duration::from_micros(250);
/// How long posted work waits for the peer's first message before that is said.
const MUTE_LIMIT: Duration = Duration::from_secs(1);
/// How long a queue pair may be busy when the process exits. No call holds the lock nearly as long.
const EXIT_PATIENCE: Duration = Duration::from_millis(20);

struct Inner {
    core: QpCore,
    conn: Option<Conn>,
    /// The peer is gone and work requests wait for it: until when, and under which token.
    retrying: Option<(Instant, Token)>,
    destroyed: bool,
    /// What is to be told once the lock is released, oldest first.
    tells: VecDeque<Tell>,
    /// A thread is telling; it goes on to what is added meanwhile.
    telling: bool,
}

#[derive(Clone, Copy)]
struct AckDeadline {
    at: Instant,
    /// How many of both had gone out when it was set.
    acks: u32,
    messages: u64,
}

struct Conn {
    fd: OwnedFd,
    token: Token,
    observer: Arc<dyn StreamObserver>,
    /// Received and not taken by the core yet: part of an FPDU, or Sends that wait for receives.
    left_over: Vec<u8>,
    /// The kernel has room.
    writable: bool,
    /// Nothing may be sent before.
    hold_until: Option<Instant>,
    /// The stall for want of a receive ends the stream then.
    rnr_deadline: Option<Instant>,
    /// So does the peer's end, with less patience.
    gone_deadline: Option<Instant>,
    /// The program disconnects; until then posted work still goes out.
    send_deadline: Option<Instant>,
    /// What is placed waits until then for something to ride on, and what is to be asked.
    ack_deadline: Option<AckDeadline>,
    mute: Mute,
    silence: Silence,
    /// When the engine's timer is set to; never later than the first of the above.
    timer: Option<Instant>,
    /// A deadline was set that the timer may not know of.
    new_deadline: bool,
    /// Sending stopped although there was room, for the others' sake.
    unfinished: bool,
    /// Sending has failed. What the peer sent before that is still to be read.
    broken: bool,
    parked: Option<ParkMark>,
}

/// Whether a program is to be told that what it posted waits for the peer's first message.
#[derive(Clone, Copy)]
enum Mute {
    /// This end may speak, or will hear the peer's ready-to-receive indication, or it was said.
    No,
    /// Nothing is known to wait.
    Look,
    /// Something waits; it is to be said then.
    Until(Instant),
}

impl Conn {
    fn deadlines(&self) -> [Option<Instant>; 7] {
        let ack = self.ack_deadline.map(|deadline| deadline.at);
        let mute = if let Mute::Until(at) = self.mute { Some(at) } else { None };
        [
            self.hold_until,
            self.rnr_deadline,
            self.gone_deadline,
            self.send_deadline,
            ack,
            mute,
            self.silence.deadline(),
        ]
    }
}

impl Inner {
    /// What the queue pair has done and is at, with what only the system knows of its connection.
    fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.core.snapshot();
        if let Some(conn) = &self.conn {
            snapshot.counters.retransmits += tcp::retransmits(conn.fd.as_fd());
        }
        snapshot
    }
}

enum Tell {
    Established(Arc<dyn StreamObserver>),
    Disconnected(Arc<dyn StreamObserver>, Disconnect),
    Over(Arc<Linger>),
    /// A receive of the shared receive queue that was kept for this queue pair is now kept for another.
    Kept(Arc<dyn Waiter>),
}

impl Tell {
    fn now(self) {
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
    nic: Arc<Nic>,
    qpn: u32,
    inner: Attended<Inner>,
    /// The kernel may have room again.
    room: AtomicBool,
    /// A thread has polled the socket while the system does not watch it.
    polled: AtomicBool,
    /// The system has said, once, that the peer closed or the connection broke. A hint: it may have spoken of an earlier stream.
    hung_up: AtomicBool,
    /// A receive of the shared receive queue is kept for the Send that waits. A hint: it may have been for an earlier stream's.
    kept: AtomicBool,
}

impl Qp {
    /// Makes a queue pair in RESET. Fails when a limit of the device is exceeded or no number is free.
    pub fn create(nic: &Arc<Nic>, mut init: QpInit) -> Result<Arc<Self>, VerbsError> {
        if fork::forked() {
            return Err(VerbsError::Forked);
        }
        let (caps, limits) = (init.caps, nic.limits());
        let own_receives = init.srq.is_none();
        if caps.max_send_wr > limits.max_qp_wr || (own_receives && caps.max_recv_wr > limits.max_qp_wr) {
            return Err(VerbsError::Invalid("more work requests than max_qp_wr"));
        }
        if caps.max_send_sge > limits.max_sge || (own_receives && caps.max_recv_sge > limits.max_sge) {
            return Err(VerbsError::Invalid("more scatter/gather elements than max_sge"));
        }
        if caps.max_inline_data > limits.max_inline {
            return Err(VerbsError::Invalid("more inline data than the device takes"));
        }
        // Adapters give more than was asked for, and programs post short inline messages without having asked for any
        // (rdma_xclient). The room is made when first used.
        init.caps.max_inline_data = caps.max_inline_data.max(GIVEN_INLINE);
        let qpn = nic.numbers.take()?;
        let (send_cq, recv_cq) = (init.send_cq.clone(), init.recv_cq.clone());
        let mut inner = Inner {
            core: QpCore::new(qpn, init),
            conn: None,
            retrying: None,
            destroyed: false,
            tells: VecDeque::new(),
            telling: false,
        };
        let qp = Arc::new_cyclic(|me: &Weak<Self>| {
            inner.core.set_waiter(me.clone());
            Self {
                me: me.clone(),
                nic: nic.clone(),
                qpn,
                inner: Attended::new(inner),
                room: AtomicBool::new(false),
                polled: AtomicBool::new(false),
                hung_up: AtomicBool::new(false),
                kept: AtomicBool::new(false),
            }
        });
        // Not before it exists: a completion queue forgets feeders that do not.
        let feeder: Weak<dyn Feeder> = qp.me.clone();
        send_cq.add_feeder(qpn, feeder.clone());
        recv_cq.add_feeder(qpn, feeder);
        nic.arrive(&qp);
        Ok(qp)
    }

    /// Its number.
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Posts send work requests. On a refusal, says which one (the ones before it are posted) and why. Never blocks.
    pub fn post_send<'a>(&self, wrs: impl Iterator<Item = SendWr<'a>>) -> Result<(), (usize, VerbsError)> {
        if fork::forked() {
            return Err((0, VerbsError::Forked));
        }
        let mut inner = self.inner.lock();
        let mut result = Ok(());
        for (i, wr) in wrs.enumerate() {
            if let Err(e) = inner.core.post_send(&wr) {
                result = Err((i, e));
                break;
            }
        }
        self.send(&mut inner);
        self.wind_down(&mut inner);
        self.release(inner);
        result
    }

    /// Posts receive work requests; as [`Self::post_send`].
    pub fn post_recv<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), (usize, VerbsError)> {
        if fork::forked() {
            return Err((0, VerbsError::Forked));
        }
        let mut inner = self.inner.lock();
        let mut result = Ok(());
        for (i, wr) in wrs.enumerate() {
            if let Err(e) = inner.core.post_recv(&wr) {
                result = Err((i, e));
                break;
            }
        }
        if inner.core.awaits_receive() && inner.core.srq().is_none() {
            go_on(&mut inner);
            self.pump(&mut inner);
            self.release(inner);
        } else {
            self.let_go(inner);
        }
        result
    }

    /// Changes attributes or state.
    pub fn modify(&self, change: &QpModify) -> Result<(), VerbsError> {
        if fork::forked() {
            return Err(VerbsError::Forked);
        }
        let mut inner = self.inner.lock();
        if matches!(change.state, Some(QpState::Err | QpState::Reset)) {
            // What is placed is placed: the peer's work requests are good.
            inner.core.tell_all();
            self.send(&mut inner);
        }
        let result = inner.core.modify(change);
        if result.is_ok() {
            if change.state == Some(QpState::Sqd) {
                inner.core.ask_placed(true);
            }
            self.pump(&mut inner);
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

    /// Whether completions wait to be polled in the queues where its work requests complete.
    pub fn has_unpolled(&self) -> bool {
        let inner = self.inner.lock();
        let (send_cq, recv_cq) = inner.core.cqs();
        let some = !(send_cq.is_empty() && recv_cq.is_empty());
        self.release(inner);
        some
    }

    /// Its state, what it does, and the addresses of its connection (own, peer's) if it has one.
    pub(crate) fn look_at(&self) -> (QpState, Snapshot, [Option<SocketAddr>; 2]) {
        let inner = self.inner.lock();
        let (state, snapshot) = (inner.core.state(), inner.snapshot());
        let addresses = inner.conn.as_ref().map_or([None, None], |conn| tcp::addresses(conn.fd.as_fd()));
        self.release(inner);
        (state, snapshot, addresses)
    }

    /// Gives the queue pair its stream: `fd` is a connected, non-blocking TCP socket from which exactly the MPA set-up was
    /// read. Moves it to RTS.
    pub fn attach(
        &self,
        fd: OwnedFd,
        params: StreamParams,
        observer: Arc<dyn StreamObserver>,
    ) -> Result<(), (VerbsError, OwnedFd)> {
        let mut inner = self.inner.lock();
        let result = self.attach_locked(&mut inner, fd, params, observer);
        self.release(inner);
        result
    }

    fn attach_locked(
        &self,
        inner: &mut Inner,
        fd: OwnedFd,
        mut params: StreamParams,
        observer: Arc<dyn StreamObserver>,
    ) -> Result<(), (VerbsError, OwnedFd)> {
        if inner.destroyed {
            return Err((VerbsError::Invalid("the queue pair is destroyed"), fd));
        }
        if params.emss == 0 {
            params.emss = tcp::emss(&fd).unwrap_or(536);
        }
        let Some(me) = self.me.upgrade() else {
            return Err((VerbsError::Invalid("the queue pair is going away"), fd));
        };
        if let Err(error) = inner.core.attach(params) {
            return Err((error, fd));
        }
        if inner.core.completes_early() {
            inner.core.cqs().0.note_early_completions();
        }
        // What was heard of an earlier stream is of no interest.
        self.hung_up.store(false, Ordering::Release);
        let engine = self.nic.engine();
        let token = match engine.register(fd.as_raw_fd(), me) {
            Ok(token) => token,
            Err(e) => {
                tracing::error!(qpn = self.qpn, "cannot watch the socket: {e}");
                inner.core.close();
                inner.core.detach();
                return Err((VerbsError::NoResources("descriptors"), fd));
            }
        };
        let silence = Silence::watch();
        let mute = if params.wait_first_fpdu && params.rtr == Rtr::None { Mute::Look } else { Mute::No };
        linger::stream_begins();
        let hold_until =
            (!params.first_fpdu_delay.is_zero()).then(|| Instant::now() + params.first_fpdu_delay);
        inner.conn = Some(Conn {
            fd,
            token,
            observer,
            left_over: Vec::new(),
            writable: true,
            hold_until,
            rnr_deadline: None,
            gone_deadline: None,
            send_deadline: None,
            ack_deadline: None,
            mute,
            silence,
            timer: None,
            new_deadline: true,
            unfinished: false,
            broken: false,
            parked: None,
        });
        self.pump(inner);
        Ok(())
    }

    /// Begins an orderly end: what is posted goes out (for a bounded time), then our side is closed, input is drained. The
    /// observer hears when our side is closed. Does nothing without a stream.
    pub fn disconnect(&self) {
        self.disconnect_locked(self.inner.lock());
    }

    fn disconnect_locked(&self, mut inner: MutexGuard<'_, Inner>) {
        if let Some(conn) = &mut inner.conn
            && conn.send_deadline.is_none()
        {
            conn.send_deadline = Some(Instant::now() + SEND_LIMIT);
            conn.new_deadline = true;
            inner.core.tell_all();
            inner.core.ask_placed(true);
            self.pump(&mut inner);
        } else if inner.conn.is_none() {
            inner.core.leave_gone_peer();
        }
        self.release(inner);
    }

    /// Ends a connection that the peer has ended, as far as the queue pair is concerned: work requests are flushed. Does nothing to
    /// another connection, which it may have by now.
    pub fn leave_gone_peer(&self) {
        let mut inner = self.inner.lock();
        inner.core.leave_gone_peer();
        self.release(inner);
    }

    /// Destroys the queue pair: no completion, no event and no call to the observer follows. Its connection is closed in
    /// the background.
    pub fn destroy(&self) {
        let mut inner = self.inner.lock();
        if !std::mem::replace(&mut inner.destroyed, true) {
            let (send_cq, recv_cq) = inner.core.cqs();
            send_cq.remove_feeder(self.qpn);
            recv_cq.remove_feeder(self.qpn);
            self.nic.depart(self.qpn, inner.snapshot().counters);
            // What is placed is placed: the peer's work requests are good.
            inner.core.tell_all();
            self.send(&mut inner);
            // RESET drops the work requests without completions; the stream is then closing.
            let reset = QpModify { state: Some(QpState::Reset), ..QpModify::default() };
            // Cannot be refused: any state may become RESET.
            let _ = inner.core.modify(&reset);
            inner.tells.retain(|tell| matches!(tell, Tell::Over(_) | Tell::Kept(_)));
        }
        self.release(inner);
    }

    /// [`Self::release`] for a holder that changed nothing that others have to know.
    fn let_go(&self, inner: MutexGuard<'_, Inner>) {
        if self.inner.let_go(inner) {
            self.look();
        }
    }

    /// Lets go of the lock and looks whether somebody wanted it meanwhile.
    fn release(&self, inner: MutexGuard<'_, Inner>) {
        let finish = |inner: &mut MutexGuard<'_, Inner>| {
            self.news(inner);
            if !inner.tells.is_empty() {
                tell(inner);
            }
            self.set_timer(inner);
        };
        self.inner.release(inner, finish, |inner| self.pump(inner));
    }

    /// What has happened that others have to know.
    fn news(&self, inner: &mut Inner) {
        if let Some(woken) = inner.core.take_woken() {
            inner.tells.extend(woken.into_iter().map(Tell::Kept));
        }
        let established = inner.core.take_established();
        if established
            && !inner.destroyed
            && let Some(conn) = &inner.conn
        {
            inner.tells.push_back(Tell::Established(conn.observer.clone()));
        }
        if let Some(why) = inner.core.closing()
            && let Some(conn) = inner.conn.take()
        {
            if conn.send_deadline.is_some() {
                // The program has disconnected already.
                inner.core.leave_gone_peer();
            }
            let mut rest = Vec::new();
            if let Some(out) = inner.core.out() {
                let mut read = Ok(());
                out.gather(usize::MAX, |seg| read = read.and_then(|()| mem::copy_out(seg, &mut rest)));
                if read.is_err() {
                    rest.clear();
                }
            }
            inner.core.detach();
            inner.core.resent(tcp::retransmits(conn.fd.as_fd()));
            let engine = self.nic.engine();
            if conn.parked.is_some() {
                engine.unpark();
            }
            inner.tells.push_back(Tell::Over(Linger::take_over(engine, conn.fd, conn.token, rest)));
            if !inner.destroyed {
                inner.tells.push_back(Tell::Disconnected(conn.observer, why));
            }
        }
    }

    /// Has the engine call when the first deadline is over. It may call too early: deadlines move back with every wait for a
    /// receive, and timers cost more than a call for nothing.
    fn set_timer(&self, inner: &mut Inner) {
        let Some(conn) = &mut inner.conn else { return self.set_retry_timer(inner) };
        if conn.ack_deadline.is_none() && inner.core.ack_waits() {
            let at = Instant::now() + ACK_LIMIT;
            let (acks, messages) = (inner.core.acks_sent(), inner.core.messages_sent());
            conn.ack_deadline = Some(AckDeadline { at, acks, messages });
            conn.new_deadline = true;
        }
        if !conn.new_deadline {
            return;
        }
        conn.new_deadline = false;
        if let Some(first) = conn.deadlines().into_iter().flatten().min()
            && conn.timer.is_none_or(|at| first < at)
        {
            conn.timer = Some(first);
            self.nic.engine().set_timer(conn.token, Some(first));
        }
    }

    /// The same for what is posted to a peer that is gone.
    fn set_retry_timer(&self, inner: &mut Inner) {
        let engine = self.nic.engine();
        match (inner.core.retry_limit(), inner.retrying) {
            (None, None) | (Some(_), Some(_)) => {}
            (None, Some((_, token))) => {
                inner.retrying = None;
                engine.deregister(token);
            }
            (Some(limit), None) => {
                let Some(me) = self.me.upgrade() else { return };
                let (at, token) = (Instant::now() + limit, engine.new_token(me));
                inner.retrying = Some((at, token));
                engine.set_timer(token, Some(at));
            }
        }
    }

    /// Looks for input and room; if another thread has the lock, it will look.
    fn look(&self) {
        if let Some(mut inner) = self.inner.look() {
            self.pump(&mut inner);
            self.release(inner);
        }
    }

    /// [`Feeder::feed`], and whether messages of the peer's were placed.
    fn look_for_input(&self, in_earnest: bool) -> (bool, bool) {
        let (mut ask, mut placed) = (false, false);
        if let Some(mut inner) = self.inner.try_lock() {
            if let Inner { core, conn: Some(conn), .. } = &mut *inner {
                let engine = self.nic.engine();
                let wants_to_be_told = !conn.writable || conn.broken || core.stalled();
                if in_earnest && !wants_to_be_told && conn.parked.is_none_or(|mark| !engine.is_parked(mark)) {
                    conn.parked = engine.park(conn.token);
                }
                if conn.parked.is_some() {
                    self.polled.store(true, Ordering::Relaxed);
                }
                let unfinished = conn.unfinished || self.room.load(Ordering::Relaxed);
                let before = core.messages_placed();
                let received = self.receive(&mut inner);
                let tell = !received && inner.core.polled_in_vain();
                placed = inner.core.messages_placed() != before;
                if !(received || tell || unfinished || self.inner.kicked()) {
                    // The usual case of a thread that polls: nothing is different from before. A mark left from now on is
                    // seen by a later poll, or by the thread that leaves it once the lock is free.
                    self.let_go(inner);
                    return (wants_to_be_told, placed);
                }
                self.send(&mut inner);
                self.wind_down(&mut inner);
            }
            ask = inner.conn.as_ref().is_some_and(|conn| !conn.writable);
            self.release(inner);
        }
        (ask, placed)
    }
}

impl Feeder for Qp {
    fn feed(&self, in_earnest: bool) -> bool {
        self.look_for_input(in_earnest).0
    }

    fn listen(&self) -> bool {
        self.look_for_input(true).1
    }
}

impl Source for Qp {
    fn ready(&self, readiness: Readiness) {
        if readiness.writable {
            self.room.store(true, Ordering::Release);
        }
        if readiness.hangup {
            self.hung_up.store(true, Ordering::Release);
        }
        self.look();
    }

    fn timeout(&self) {
        let mut inner = self.inner.lock();
        self.run_deadlines(&mut inner);
        self.pump(&mut inner);
        self.release(inner);
    }

    fn polled(&self) -> bool {
        self.polled.swap(false, Ordering::Relaxed)
    }

    fn exit(&self) {
        match self.inner.try_lock_for(EXIT_PATIENCE) {
            Some(inner) => self.disconnect_locked(inner),
            // Its holder was stopped for good, by the signal whose handler exits.
            None => linger::stream_given_up(),
        }
    }
}

impl Waiter for Qp {
    fn receive_kept(&self) {
        self.kept.store(true, Ordering::Release);
        self.look();
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // Before another one gets the number.
        let inner = self.inner.get_mut();
        let (send_cq, recv_cq) = inner.core.cqs();
        send_cq.remove_feeder(self.qpn);
        recv_cq.remove_feeder(self.qpn);
        self.nic.depart(self.qpn, inner.snapshot().counters);
        self.nic.numbers.give(self.qpn);
    }
}

/// Tells what is to be told, without the lock, one thing after the other.
fn tell(inner: &mut MutexGuard<'_, Inner>) {
    if inner.telling {
        return;
    }
    inner.telling = true;
    while let Some(tell) = inner.tells.pop_front() {
        MutexGuard::unlocked(inner, || tell.now());
    }
    inner.telling = false;
}
