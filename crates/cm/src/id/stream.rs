//! An id between its request and the end of its stream: what the peer, the queue pair and the clock do to it.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_driver::config::{Ask, Config, View};
use uwarp_driver::{Disconnect, Qp, Readiness, Rtr, Source, StreamObserver, StreamParams};
use uwarp_proto::setup::{self, Negotiated, PeerData, Request};
use uwarp_rnic::qp::{QpModify, QpState};
use uwarp_wire::mpa::{self, Enhanced};

use super::Id;
use crate::active::Connected;
use crate::event::{ConnParam, Event, EventKind, MAX_PRIVATE_DATA, reason};
use crate::listener::Pending;
use crate::state::{State, Step};
use crate::timeouts::{RETRIES, STRANGER_FIRST_FPDU, UNPOLLED, rnr_limit, timewait};
use crate::{CmError, socket};

impl Id {
    /// TCP has chosen a local address.
    pub(crate) fn connecting_from(&self, local: SocketAddr) {
        self.inner.lock().local = Some(local);
    }

    /// A connection attempt has ended.
    pub(crate) fn connected(self: &Arc<Self>, how: Connected) {
        let mut inner = self.inner.lock();
        if inner.state != State::Connecting {
            return;
        }
        inner.active = None;
        // A failed attempt gives up its claim to the queue pair.
        let qp = inner.qp.clone();
        match how {
            Connected::Failed(kind, errno) => {
                inner.conclude(Step::Failed);
                if let Some(qp) = qp.filter(|_| kind == EventKind::Rejected) {
                    drop(inner);
                    fail(&qp);
                    inner = self.inner.lock();
                }
                let reason = if errno == Errno::CONNREFUSED {
                    reason::INVALID_SERVICE_ID
                } else {
                    reason::CONSUMER_DEFINED
                };
                let status = match kind {
                    EventKind::Rejected => rejection(reason, errno),
                    _ => -errno.raw_os_error(),
                };
                self.report(&mut inner, kind, status);
            }
            Connected::Rejected(reply) => {
                inner.conclude(Step::Failed);
                let status = rejection(reason::CONSUMER_DEFINED, Errno::CONNREFUSED);
                let mut event = Event::plain(self, EventKind::Rejected, status);
                event.param = depths_of(reply.enhanced, ConnParam::NONE);
                event.private_data = cut(reply.private_data);
                // As librdmacm: what was posted for the connection is flushed. Before the event, so that the program finds it
                // done; without the id's lock, because a queue pair's owner may call back.
                if let Some(qp) = qp {
                    drop(inner);
                    fail(&qp);
                    inner = self.inner.lock();
                }
                Self::push(&mut inner, event);
            }
            Connected::Accepted(fd, negotiated) if inner.by_number.is_some() => {
                drop(inner);
                self.responded(fd, negotiated);
            }
            Connected::Accepted(fd, mut negotiated) => {
                let Some(qp) = qp else { return };
                let param = inner.conn_param;
                if inner.local.is_none_or(|local| local.port() == 0 || local.ip().is_unspecified()) {
                    inner.local = socket::local_address(&fd).ok().or(inner.local);
                }
                let private_data = cut(std::mem::take(&mut negotiated.private_data));
                inner.outcome = (agreed(&negotiated, self.unknown_depths()), private_data);
                inner.peer_param = inner.outcome.0;
                drop(inner);
                match self.attach(&qp, fd, &negotiated, param) {
                    Ok(()) => self.start_ready_timer(),
                    Err(error) => {
                        tracing::warn!("the queue pair does not take the connection: {error}");
                        let mut inner = self.inner.lock();
                        if inner.conclude(Step::Failed) {
                            self.report(&mut inner, EventKind::ConnectError, -error.errno());
                        }
                    }
                }
            }
        }
    }

    /// A listener's request is whole.
    pub(crate) fn requested(self: &Arc<Self>, pending: Pending, request: Request) {
        let inner = self.inner.lock();
        if inner.state != State::Listening {
            drop(inner);
            return answer_no(pending, &[]);
        }
        let mut param = depths_of(request.enhanced, self.unknown_depths());
        if let Some(peer) = request.peer {
            param.rnr_retry_count = peer.rnr_retry;
            param.qp_num = peer.qpn;
        }
        let id = Self::with_state(&self.cm, &inner.channel, State::RequestPending);
        {
            let mut new = id.inner.lock();
            new.local = socket::local_address(&pending.fd).ok();
            new.peer = socket::peer_address(&pending.fd).ok();
            new.options = inner.options;
            new.requested = param;
            new.peer_param = param;
            new.pending = Some(pending);
        }
        self.cm.await_queue_pair(&id, None, param.qp_num);
        inner.channel.push(Event {
            id,
            listener: Some(Arc::clone(self)),
            kind: EventKind::ConnectRequest,
            status: 0,
            param,
            private_data: cut(request.private_data),
        });
    }

    /// What is reported of a peer that does not say its depths: our own limits, so that programs which mirror them get
    /// working numbers.
    pub(super) fn unknown_depths(&self) -> ConnParam {
        let max = octet(self.cm.max_depth());
        ConnParam { responder_resources: max, initiator_depth: max, ..ConnParam::NONE }
    }

    pub(super) fn attach(
        self: &Arc<Self>,
        qp: &Arc<Qp>,
        fd: OwnedFd,
        negotiated: &Negotiated,
        param: ConnParam,
    ) -> Result<(), CmError> {
        let stranger_client = negotiated.initiator && !negotiated.peer_is_uwarp;
        let params = StreamParams {
            initiator: negotiated.initiator,
            crc: negotiated.crc,
            send_markers: negotiated.send_markers,
            receive_markers: negotiated.receive_markers,
            ird: negotiated.ird,
            ord: negotiated.ord,
            peer_is_uwarp: negotiated.peer_is_uwarp,
            emss: 0,
            peer: negotiated.peer,
            timeout: self.ack_timeout(),
            retry_cnt: param.retry_count.min(RETRIES),
            rtr: match negotiated.rtr {
                setup::Rtr::None => Rtr::None,
                setup::Rtr::SendWrite => Rtr::SendWrite,
                setup::Rtr::SendRead => Rtr::SendRead,
                setup::Rtr::Expect => Rtr::Expect,
            },
            rtr_stag_to: negotiated.rtr_stag_to,
            wait_first_fpdu: !negotiated.initiator,
            first_fpdu_delay: if stranger_client { STRANGER_FIRST_FPDU } else { Duration::ZERO },
            rnr_timeout: rnr_limit(param.rnr_retry_count, qp.query().min_rnr_timer),
            placement_acks: acknowledges(negotiated),
            placement_reads: placement_acks() && asks_stranger(Config::get().ask, negotiated),
            infiniband: Config::get().view != View::Iwarp,
        };
        tracing::debug!(id = self.key, qpn = qp.qpn(), ?params, "attach");
        if let Err((error, fd)) = qp.attach(fd, params, Arc::clone(self) as Arc<dyn StreamObserver>) {
            tell_local_error(&fd, negotiated);
            return Err(error.into());
        }
        // The program may have given up while no lock was held; then nobody else ends the stream.
        if !matches!(
            self.state(),
            State::Connecting | State::Responded | State::Accepting | State::Established
        ) {
            qp.disconnect();
        }
        Ok(())
    }

    /// The peer has bounded time to show itself.
    pub(super) fn start_ready_timer(self: &Arc<Self>) {
        let engine = self.cm.engine();
        let token = engine.new_token(Arc::clone(self) as Arc<dyn Source>);
        engine.set_timer(token, Some(Instant::now() + self.cm.timeouts().ready));
        let mut inner = self.inner.lock();
        if matches!(inner.state, State::Connecting | State::Accepting) {
            inner.ready_timer = Some(token);
        } else {
            drop(inner);
            engine.deregister(token);
        }
    }

    /// After the end of a connection, in the views that pass for InfiniBand. TCP has no use for it; programs wait for the event.
    pub(super) fn start_timewait(&self) {
        let Some(me) = self.me.upgrade().filter(|_| passes_for_infiniband()) else { return };
        let engine = self.cm.engine();
        let timer = engine.new_token(me as Arc<dyn Source>);
        let mut inner = self.inner.lock();
        let at = Instant::now() + timewait(inner.options.ack_timeout);
        let ended = inner.state == State::Closed;
        if ended {
            inner.timewait = Some(timer);
        }
        drop(inner);
        if ended {
            engine.set_timer(timer, Some(at));
        } else {
            // The program was faster, and has given the id up.
            engine.deregister(timer);
        }
    }

    pub(super) fn stream_established(&self) {
        let mut inner = self.inner.lock();
        let Ok(established) = inner.after(Step::Established) else { return };
        inner.state = established;
        let timer = inner.ready_timer.take();
        if let Some(me) = self.me.upgrade() {
            let (param, private_data) = std::mem::replace(&mut inner.outcome, (ConnParam::NONE, Vec::new()));
            let mut event = Event::plain(&me, EventKind::Established, 0);
            event.param = param;
            event.private_data = private_data;
            Self::push(&mut inner, event);
        }
        drop(inner);
        if let Some(timer) = timer {
            self.cm.engine().deregister(timer);
        }
    }
}

impl StreamObserver for Id {
    fn established(&self) {
        self.stream_established();
    }

    fn disconnected(&self, why: Disconnect) {
        tracing::debug!(id = self.key, ?why, "stream ended");
        if !self.wait_for_polls(why) {
            self.stream_ended();
        }
    }
}

impl Id {
    /// Leaves the report of the stream's end to a timer, if the program has yet to poll what came before; says whether that is so.
    fn wait_for_polls(&self, why: Disconnect) -> bool {
        let Some(me) = self.me.upgrade().filter(|_| passes_for_infiniband()) else { return false };
        let qp = self.inner.lock().qp.clone();
        if why == Disconnect::LocalClosed || !qp.is_some_and(|qp| qp.has_unpolled()) {
            return false;
        }
        let engine = self.cm.engine();
        let timer = engine.new_token(me as Arc<dyn Source>);
        let mut inner = self.inner.lock();
        // The program may have given the id up by now.
        let waits = inner.state == State::Established;
        if waits {
            inner.unreported_end = Some(timer);
        }
        drop(inner);
        if waits {
            engine.set_timer(timer, Some(Instant::now() + UNPOLLED));
        } else {
            engine.deregister(timer);
        }
        waits
    }

    pub(super) fn stream_ended(&self) {
        let mut inner = self.inner.lock();
        inner.left = inner.qp.as_ref().map(Arc::downgrade);
        let ended = inner.conclude(Step::Disconnected);
        if ended {
            self.report(&mut inner, EventKind::Disconnected, 0);
        } else if inner.conclude(Step::Failed) {
            self.report(&mut inner, EventKind::ConnectError, -Errno::CONNRESET.raw_os_error());
        }
        let timer = inner.ready_timer.take();
        drop(inner);
        if let Some(timer) = timer {
            self.cm.engine().deregister(timer);
        }
        if ended {
            self.start_timewait();
        }
    }
}

/// The timers for a peer that has yet to show itself and for the end of a connection, and the connection that waits for its queue
/// pair.
impl Source for Id {
    fn ready(&self, _: Readiness) {
        self.look_at_parked();
    }

    fn timeout(&self) {
        let mut inner = self.inner.lock();
        if let Some(timer) = inner.unreported_end.take() {
            drop(inner);
            self.cm.engine().deregister(timer);
            return self.stream_ended();
        }
        if let Some(timer) = inner.timewait.take() {
            self.report(&mut inner, EventKind::TimewaitExit, 0);
            drop(inner);
            return self.cm.engine().deregister(timer);
        }
        let Some(timer) = inner.ready_timer.take() else { return };
        let qp = inner.qp.clone();
        if inner.conclude(Step::Failed) {
            self.report(&mut inner, EventKind::Unreachable, -Errno::TIMEDOUT.raw_os_error());
        }
        drop(inner);
        self.cm.engine().deregister(timer);
        if let Some(qp) = qp {
            qp.disconnect();
        }
    }
}

/// As much of a peer's private data as a program can be told of. MPA allows 512 bytes, rdma_cm has an octet for the
/// length.
pub(super) fn cut(mut private_data: Vec<u8>) -> Vec<u8> {
    if private_data.len() > MAX_PRIVATE_DATA {
        tracing::warn!(
            "{} bytes of private data received, the program gets {MAX_PRIVATE_DATA}",
            private_data.len()
        );
        private_data.truncate(MAX_PRIVATE_DATA);
    }
    private_data
}

/// What an established connection offers, as the program is told.
pub(super) fn agreed(negotiated: &Negotiated, unknown: ConnParam) -> ConnParam {
    let mut param = unknown;
    if negotiated.peer_enhanced.is_some() {
        param.responder_resources = octet(negotiated.ird);
        param.initiator_depth = octet(negotiated.ord);
    }
    if let Some(peer) = negotiated.peer {
        param.rnr_retry_count = peer.rnr_retry;
        param.qp_num = peer.qpn;
    }
    param
}

/// What the peer says of its depths, as seen from here; `unknown` where it does not say.
fn depths_of(peer: Option<Enhanced>, unknown: ConnParam) -> ConnParam {
    let mut param = unknown;
    if let Some(peer) = peer {
        if peer.ord != mpa::NO_AUTO {
            param.responder_resources = octet(peer.ord);
        }
        if peer.ird != mpa::NO_AUTO {
            param.initiator_depth = octet(peer.ird);
        }
    }
    param
}

fn octet(depth: u16) -> u8 {
    u8::try_from(depth).unwrap_or(u8::MAX)
}

/// What a uwarp peer is told of us.
pub(super) fn peer_data(qp: &Qp, param: ConnParam) -> PeerData {
    PeerData {
        placement_acks: placement_acks(),
        rnr_retry: param.rnr_retry_count.min(7),
        min_rnr_timer: qp.query().min_rnr_timer,
        qpn: qp.qpn(),
        ..PeerData::new()
    }
}

/// Tells the peer that the stream cannot begin, for a reason of our own (RFC 6581 section 9.3). The connection is to be closed then.
pub(super) fn tell_local_error(fd: &OwnedFd, negotiated: &Negotiated) {
    if let Some(terminate) = negotiated.local_error() {
        // It ends with or without a word.
        let _ = socket::send_all(fd, &terminate);
        socket::finish(fd);
    }
}

/// Whether the stream has placement acknowledgements, in both directions: when either end wishes them. A responder hears
/// the initiator's wish with the ready-to-receive indication, before it has sent anything; the queue pair sees to that.
fn acknowledges(negotiated: &Negotiated) -> bool {
    let peer_wishes = negotiated.peer.is_some_and(|peer| peer.placement_acks);
    negotiated.peer_is_uwarp && (peer_wishes || placement_acks())
}

/// Whether sends are to complete only when the peer has placed them: programs of the InfiniBand views rely on it.
fn placement_acks() -> bool {
    passes_for_infiniband()
}

fn passes_for_infiniband() -> bool {
    Config::get().view != View::Iwarp
}

/// The status of a rejection: InfiniBand's reason where the device passes for InfiniBand or RoCE, an errno where it is an RNIC.
fn rejection(reason: i32, errno: Errno) -> i32 {
    if passes_for_infiniband() { reason } else { -errno.raw_os_error() }
}

/// Whether a stranger is asked what it has placed (docs/adr/008). It has to say that it takes a Read: without enhanced set-up, or where
/// the programs see to depths, nobody knows, and one too many would end the stream.
fn asks_stranger(ask: Ask, negotiated: &Negotiated) -> bool {
    let takes_one = negotiated.peer_enhanced.is_some_and(|peer| (1..mpa::NO_AUTO).contains(&peer.ird));
    takes_one
        && match ask {
            Ask::Off => false,
            Ask::On => true,
            // siw sends our flags back in its reply. Of an initiator nobody can tell.
            Ask::Auto => negotiated.initiator && negotiated.drops_reserved_flags,
        }
}

/// Rejects a request, with private data.
pub(super) fn answer_no(mut pending: Pending, private_data: &[u8]) {
    if pending.responder.reject(private_data).is_err() {
        return;
    }
    while let Some(reply) = pending.responder.poll_transmit() {
        if socket::send_all(&pending.fd, &reply).is_err() {
            return;
        }
    }
    socket::finish(&pending.fd);
}

/// Moves a queue pair whose connection came to nothing to the error state.
pub(super) fn fail(qp: &Qp) {
    let change = QpModify { state: Some(QpState::Err), ..QpModify::default() };
    // Refused only in a forked child, which has no connections.
    let _ = qp.modify(&change);
}
