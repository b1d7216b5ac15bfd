//! An id between its request and the end of its stream: what the peer, the queue pair and the clock do to it.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Instant;

use rustix::io::Errno;
use uwarp_driver::{Alarm, Disconnect, Qp, Readiness, Source, StreamObserver};
use uwarp_llp::carrier::SetUp;
use uwarp_proto::setup::{Negotiated, Rejection, Request};

use super::{Id, UnreportedEnd, fail};
use crate::Event;
use crate::error::CmError;
use crate::event::{ConnParam, EventKind, reason};
use crate::handshake::{ConnectObserver, Connected, Pending, RequestObserver, report_local_error};
use crate::params::{
    agreed, cut, depths_of, octet, of_request, passes_for_infiniband, rejection, stream_params,
};
use crate::state::{State, Step};
use crate::timeouts::{UNPOLLED, UNPOLLED_LOOK, timewait};

impl ConnectObserver for Id {
    fn connecting_from(&self, local: SocketAddr) {
        self.inner.lock().local = Some(local);
    }

    fn connected(&self, how: Connected) {
        let Some(me) = self.me.upgrade() else { return };
        let mut inner = self.inner.lock();
        if inner.life.state() != State::Connecting {
            return;
        }
        inner.active = None;
        let by_number = inner.by_number.is_some();
        drop(inner);
        match how {
            Connected::Failed(kind, errno) => self.connect_failed(kind, errno),
            Connected::Rejected(reply) => self.connect_rejected(&me, reply),
            Connected::Accepted(connection, negotiated) if by_number => me.responded(connection, negotiated),
            Connected::Accepted(connection, negotiated) => me.connect_accepted(connection, negotiated),
        }
    }
}

impl RequestObserver for Id {
    fn requested(&self, pending: Pending, request: Request) {
        let Some(me) = self.me.upgrade() else { return pending.reject(&[]) };
        let inner = self.inner.lock();
        if inner.life.state() != State::Listening {
            drop(inner);
            return pending.reject(&[]);
        }
        let param = of_request(&request, self.unknown_depths());
        let from = Some(pending.ends.peer.ip());
        let id = Self::with_state(&self.cm, &inner.channel, State::RequestPending, None);
        {
            let mut new = id.inner.lock();
            (new.local, new.peer) = (Some(pending.ends.local), Some(pending.ends.peer));
            new.options = inner.options;
            new.requested = param;
            new.peer_param = param;
            new.pending = Some(pending);
        }
        self.cm.await_answer(id.key, Arc::downgrade(&id) as _, param.qp_num, from);
        inner.channel.push(Event {
            id,
            listener: Some(me),
            kind: EventKind::ConnectRequest,
            status: 0,
            param,
            datagram: None,
            private_data: cut(request.private_data),
        });
    }
}

impl Id {
    fn connect_failed(&self, kind: EventKind, errno: Errno) {
        let status = match kind {
            EventKind::Rejected if errno == Errno::CONNREFUSED => {
                rejection(reason::INVALID_SERVICE_ID, errno)
            }
            EventKind::Rejected => rejection(reason::CONSUMER_DEFINED, errno),
            _ => -errno.raw_os_error(),
        };
        if self.give_up_attempt(kind == EventKind::Rejected) {
            self.report(&mut self.inner.lock(), kind, status);
        }
    }

    fn connect_rejected(&self, me: &Arc<Self>, reply: Rejection) {
        let status = rejection(reason::CONSUMER_DEFINED, Errno::CONNREFUSED);
        let mut event = Event::plain(me, EventKind::Rejected, status);
        event.param = depths_of(reply.enhanced, ConnParam::NONE);
        event.private_data = cut(reply.private_data);
        if self.give_up_attempt(true) {
            Self::push(&mut self.inner.lock(), event);
        }
    }

    /// The attempt has failed. `flush`: what was posted for the connection is flushed, as by librdmacm,
    /// before the event is reported, so that the program finds the completions. False: the program has
    /// destroyed or disconnected the id meanwhile.
    fn give_up_attempt(&self, flush: bool) -> bool {
        let mut inner = self.inner.lock();
        let qp = inner.qp.clone();
        if !inner.conclude(Step::Failed) {
            return false;
        }
        // Without the id's lock: the queue pair may call its observer.
        drop(inner);
        if let Some(qp) = qp.filter(|_| flush) {
            fail(&qp);
        }
        true
    }

    fn connect_accepted(self: &Arc<Self>, connection: Box<dyn SetUp>, mut negotiated: Negotiated) {
        let mut inner = self.inner.lock();
        let Some(qp) = inner.qp.clone() else { return };
        let param = inner.conn_param;
        if inner.local.is_none_or(|local| local.port() == 0 || local.ip().is_unspecified()) {
            inner.local = Some(connection.ends().local);
        }
        let private_data = cut(std::mem::take(&mut negotiated.private_data));
        inner.outcome = (agreed(&negotiated, self.unknown_depths()), private_data);
        inner.peer_param = inner.outcome.0;
        drop(inner);
        match self.attach(&qp, connection, &negotiated, param) {
            Ok(()) => self.start_ready_timer(),
            Err(error) => {
                tracing::warn!("cannot give the connection to the queue pair: {error}");
                let mut inner = self.inner.lock();
                if inner.conclude(Step::Failed) {
                    self.report(&mut inner, EventKind::ConnectError, -error.errno());
                }
            }
        }
    }

    /// The parameters of a peer that names no depths: our own limits, so that programs which mirror them get
    /// working numbers.
    pub(super) fn unknown_depths(&self) -> ConnParam {
        let max = octet(self.cm.max_depth());
        ConnParam { responder_resources: max, initiator_depth: max, ..ConnParam::NONE }
    }

    pub(super) fn attach(
        self: &Arc<Self>,
        qp: &Arc<Qp>,
        connection: Box<dyn SetUp>,
        negotiated: &Negotiated,
        param: ConnParam,
    ) -> Result<(), CmError> {
        let params = stream_params(negotiated, param, self.ack_timeout(), qp.query().min_rnr_timer);
        tracing::debug!(id = self.key, qpn = qp.qpn(), ?params, "attach");
        let observer: Arc<Self> = Arc::clone(self);
        if let Err((error, link)) = qp.attach(connection.into_link(), params, observer) {
            report_local_error(link.into_set_up(), negotiated);
            return Err(error.into());
        }
        // The program may have destroyed the id while no lock was held; nothing else ends the stream then.
        if !matches!(
            self.state(),
            State::Connecting | State::Responded | State::Accepting | State::Established
        ) {
            qp.disconnect();
        }
        Ok(())
    }

    /// The peer's ready-to-receive indication must arrive in bounded time.
    pub(super) fn start_ready_timer(&self) {
        let mut inner = self.inner.lock();
        if matches!(inner.life.state(), State::Connecting | State::Accepting) {
            inner.ready_timer = Some(self.alarm(Instant::now() + self.cm.timeouts().ready));
        }
    }

    fn alarm(&self, at: Instant) -> Alarm {
        let me: Weak<Self> = Weak::clone(&self.me);
        Alarm::at(self.cm.engine(), me, at)
    }

    /// After the end of a connection, in the views that pass for InfiniBand. TCP does not need it; programs
    /// wait for the event.
    pub(super) fn start_timewait(&self) {
        if !passes_for_infiniband() {
            return;
        }
        let mut inner = self.inner.lock();
        // Unless the program has destroyed the id in the meantime.
        if inner.life.state() == State::Closed {
            inner.timewait = Some(self.alarm(Instant::now() + timewait(inner.options.ack_timeout)));
        }
    }

    /// The connection is established, or never will be: later requests of its peer need not wait for it.
    pub(super) fn no_longer_answered(&self) {
        // Dropped without the id's lock, because it reports requests.
        let answer = self.inner.lock().answer.take();
        drop(answer);
    }

    pub(super) fn stream_established(&self) {
        let mut inner = self.inner.lock();
        if inner.life.take(Step::Established).is_err() {
            return;
        }
        inner.ready_timer = None;
        if let Some(me) = self.me.upgrade() {
            let (param, private_data) = std::mem::replace(&mut inner.outcome, (ConnParam::NONE, Vec::new()));
            let mut event = Event::plain(&me, EventKind::Established, 0);
            event.param = param;
            event.private_data = private_data;
            Self::push(&mut inner, event);
        }
        drop(inner);
        self.no_longer_answered();
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
    /// Lets a timer report the end of the stream later, if completions that came before it are not polled
    /// yet. Returns whether it does.
    fn wait_for_polls(&self, why: Disconnect) -> bool {
        // A stream that broke has few completions that are worth the wait, and bad peers break many streams.
        let longest = match why {
            Disconnect::PeerClosed => UNPOLLED,
            _ if passes_for_infiniband() => UNPOLLED_LOOK,
            _ => return false,
        };
        let qp = self.inner.lock().qp.clone();
        if why == Disconnect::LocalClosed || !qp.is_some_and(|qp| qp.has_unpolled()) {
            return false;
        }
        let mut inner = self.inner.lock();
        // The program may have destroyed the id by now.
        let waits = inner.life.state() == State::Established;
        if waits {
            let now = Instant::now();
            let timer = self.alarm(now + UNPOLLED_LOOK);
            inner.unreported_end = Some(UnreportedEnd { timer, limit: now + longest });
        }
        waits
    }

    /// Reports the end of the stream, or continues to wait for the program to poll.
    fn check_unreported_end(&self, unpolled: bool) {
        let now = Instant::now();
        let mut inner = self.inner.lock();
        // The program may have disconnected or destroyed the id in the meantime.
        let Some(end) = &mut inner.unreported_end else { return };
        if unpolled && now < end.limit {
            return end.timer.set(now + UNPOLLED_LOOK);
        }
        inner.unreported_end = None;
        drop(inner);
        self.stream_ended();
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
        inner.ready_timer = None;
        drop(inner);
        self.no_longer_answered();
        if ended {
            self.start_timewait();
        }
    }
}

/// Timers for the ready-to-receive indication and for the end of a connection, and the socket of a connection
/// that waits for its queue pair.
impl Source for Id {
    fn ready(&self, _: Readiness) {
        self.check_parked();
    }

    fn timeout(&self) {
        let mut inner = self.inner.lock();
        if inner.unreported_end.is_some() {
            let qp = inner.qp.clone();
            drop(inner);
            return self.check_unreported_end(qp.is_some_and(|qp| qp.has_unpolled()));
        }
        if inner.timewait.take().is_some() {
            return self.report(&mut inner, EventKind::TimewaitExit, 0);
        }
        if inner.ready_timer.take().is_none() {
            return;
        }
        let qp = inner.qp.clone();
        if inner.conclude(Step::Failed) {
            self.report(&mut inner, EventKind::Unreachable, -Errno::TIMEDOUT.raw_os_error());
        }
        drop(inner);
        self.no_longer_answered();
        if let Some(qp) = qp {
            qp.disconnect();
        }
    }
}
