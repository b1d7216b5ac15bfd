//! Connections for queue pairs that a program moves itself: made with `ibv_create_qp`, moved to RTR and RTS
//! with `ibv_modify_qp`, known to the connection manager by number only (rdma_connect(3), rdma_establish(3)).
//!
//! The active end learns of the peer's answer by [`EventKind::ConnectResponse`]; the connection then waits
//! here until the program moves the queue pair to RTR, which takes it ([`Adopter::adopt`]). The passive end
//! may move the queue pair before it accepts, as over InfiniBand; [`crate::Cm::expects`] then says that there
//! is a request for it. Linux' rdma_cm over iWARP has only half of this: it takes the number and moves the
//! queue pair itself.

use std::sync::{Arc, Weak};

use rustix::io::Errno;
use uwarp_driver::{Nic, Qp};
use uwarp_llp::carrier::SetUp;
use uwarp_proto::setup::Negotiated;
use uwarp_rnic::qp::{QpCaps, QpInit};
use uwarp_rnic::{AsyncEvent, AsyncSink, Cq, Pd};

use super::{Id, Inner};
use crate::Event;
use crate::awaiting::Adopter;
use crate::carriers::watch;
use crate::error::CmError;
use crate::event::{ConnParam, EventKind};
use crate::handshake::{Parked, report_local_error};
use crate::params::{agreed, cut};
use crate::state::{State, Step};
use crate::timeouts::RETRIES;

impl Id {
    /// As [`Id::connect`], for a queue pair that the program moves itself. If the peer accepts,
    /// [`EventKind::ConnectResponse`] is reported, and no [`EventKind::Established`] follows.
    pub fn connect_by_number(
        self: &Arc<Self>,
        qp: &Arc<Qp>,
        param: ConnParam,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        self.connect_as(qp, true, param, private_data)
    }

    /// As [`Id::connect_by_number`], for a queue pair that takes no connection: UCX gives the number of a
    /// datagram queue pair that it never uses, and needs only the connection's private data and its end. The
    /// peer sees the number in `param`.
    pub fn connect_by_stand_in(
        self: &Arc<Self>,
        param: ConnParam,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        let qp = self.stand_in()?;
        self.connect_as(&qp, true, param, private_data).inspect_err(|_| self.no_stand_in())
    }

    /// As [`Self::connect_by_stand_in`], for [`Id::accept`].
    pub fn accept_by_stand_in(
        self: &Arc<Self>,
        param: ConnParam,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        let qp = self.stand_in()?;
        self.accept(&qp, Some(param), private_data).inspect_err(|_| self.no_stand_in())
    }

    /// Creates the queue pair that stands in; the id keeps it until the id is destroyed.
    fn stand_in(&self) -> Result<Arc<Qp>, CmError> {
        let new = StandIn::new(self.cm.nic())?;
        let qp = Arc::clone(&new.0);
        let old = self.inner.lock().stand_in.replace(new);
        drop(old);
        Ok(qp)
    }

    fn no_stand_in(&self) {
        // Without the id's lock: the queue pair may call its observer.
        let stand_in = self.inner.lock().stand_in.take();
        drop(stand_in);
    }

    /// The program has moved its queue pair to RTS, or will do so: the connection is established.
    /// rdma_establish(3).
    pub fn establish(&self) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        inner.life.take(Step::Establish)?;
        let waiting = inner.stand_in.as_ref().filter(|_| inner.parked.is_some());
        let stand_in = waiting.map(|stand_in| Arc::clone(&stand_in.0));
        drop(inner);
        stand_in.map_or(Ok(()), |qp| self.adopt(&qp))
    }

    /// The peer has accepted: the connection waits for the program's queue pair.
    pub(super) fn responded(self: &Arc<Self>, connection: Box<dyn SetUp>, mut negotiated: Negotiated) {
        let private_data = cut(std::mem::take(&mut negotiated.private_data));
        let param = agreed(&negotiated, self.unknown_depths());
        let watched = watch(self.cm.engine(), connection.watch(), Arc::clone(self) as _);
        let mut inner = self.inner.lock();
        let qpn = inner.by_number.as_ref().and_then(Weak::upgrade).map(|qp| qp.qpn());
        let (watch, qpn) = match (watched, qpn) {
            (Ok(watch), Some(qpn)) => (watch, qpn),
            (watched, qpn) => {
                let errno = watched.err().unwrap_or(Errno::INVAL);
                tracing::warn!(
                    id = self.key,
                    ?qpn,
                    "the queue pair is destroyed, or its connection cannot be watched: {errno}"
                );
                if inner.conclude(Step::Failed) {
                    self.report(&mut inner, EventKind::ConnectError, -errno.raw_os_error());
                }
                drop(inner);
                if let Ok(watch) = watched {
                    self.cm.engine().deregister(watch);
                }
                report_local_error(connection, &negotiated);
                return;
            }
        };
        if inner.life.take(Step::Response).is_err() {
            drop(inner);
            return self.cm.engine().deregister(watch);
        }
        inner.local = Some(connection.ends().local);
        inner.peer_param = param;
        inner.parked = Some(Parked { connection, negotiated, watch });
        if inner.stand_in.is_none() {
            self.cm.await_queue_pair(self.key, Arc::downgrade(self) as _, qpn, param.qp_num);
        }
        let mut event = Event::plain(self, EventKind::ConnectResponse, 0);
        event.param = param;
        event.private_data = private_data;
        inner.channel.push(event);
        drop(inner);
        // Readiness may have been reported before the connection was stored.
        self.check_parked();
    }

    /// Checks whether the peer has hung up before the queue pair got the connection.
    pub(super) fn check_parked(&self) {
        let inner = self.inner.lock();
        let gone = inner.parked.as_ref().is_some_and(|parked| parked.connection.ended());
        drop(inner);
        if gone {
            self.unpark();
            self.lost();
        }
    }

    /// Closes a connection that waits for its queue pair. Returns whether there was one.
    pub(super) fn unpark(&self) -> bool {
        let parked = self.inner.lock().parked.take();
        self.cm.no_longer_awaits(self.key);
        let Some(parked) = parked else { return false };
        self.cm.engine().deregister(parked.watch);
        true
    }

    pub(super) fn lost(&self) {
        let mut inner = self.inner.lock();
        let ended = inner.conclude(Step::Disconnected);
        if ended {
            self.report(&mut inner, EventKind::Disconnected, 0);
        }
        drop(inner);
        if ended {
            self.start_timewait();
        }
    }

    /// The retry count that queries show. TCP does not count retries.
    pub fn retries(&self) -> u8 {
        let inner = self.inner.lock();
        if inner.has_connected { inner.conn_param.retry_count.min(RETRIES) } else { RETRIES }
    }

    /// The peer's parameters from its request or its reply; zero before that, and for those that the peer
    /// does not name.
    pub fn peer_param(&self) -> ConnParam {
        self.inner.lock().peer_param
    }
}

impl Adopter for Id {
    fn adopt(&self, qp: &Arc<Qp>) -> Result<(), CmError> {
        let none = CmError::Invalid("no connection waits for the queue pair");
        let me = self.me.upgrade().ok_or(none)?;
        let mut inner = self.inner.lock();
        let parked = inner.parked.take().ok_or(none)?;
        inner.qp = Some(Arc::clone(qp));
        let param = inner.conn_param;
        drop(inner);
        self.cm.no_longer_awaits(self.key);
        self.cm.engine().deregister(parked.watch);
        me.attach(qp, parked.connection, &parked.negotiated, param).inspect_err(|_| self.lost())
    }
}

/// A queue pair of uwarp's own that holds the connection in place of a queue pair that cannot: a datagram
/// queue pair. The program does not know of it, and nothing is ever posted to it.
pub(super) struct StandIn(Arc<Qp>);

/// Ignores asynchronous events.
struct IgnoreEvents;

impl AsyncSink for IgnoreEvents {
    fn async_event(&self, _: AsyncEvent) {}
}

impl StandIn {
    fn new(nic: &Arc<Nic>) -> Result<Self, CmError> {
        let async_sink: Arc<dyn AsyncSink> = Arc::new(IgnoreEvents);
        let cq = Cq::new(1, 0, None, Arc::clone(&async_sink));
        let init = QpInit {
            pd: Pd::new(),
            send_cq: Arc::clone(&cq),
            recv_cq: cq,
            srq: None,
            caps: QpCaps {
                max_send_wr: 1,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            sq_sig_all: false,
            cookie: 0,
            async_sink,
        };
        Ok(Self(Qp::create(nic, init)?))
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.0.destroy();
    }
}

impl Inner {
    /// The number that the peer sees for a connection of `qp`.
    pub(super) fn number_of(&self, qp: &Qp, param: ConnParam) -> u32 {
        if self.stand_in.is_some() { param.qp_num } else { qp.qpn() }
    }

    /// Whether a connection waits for its queue pair.
    pub(super) fn waits_for_queue_pair(&self) -> bool {
        matches!(self.life.state(), State::Responded | State::Established) && self.parked.is_some()
    }
}
