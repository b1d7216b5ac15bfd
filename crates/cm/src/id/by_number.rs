//! Connections for queue pairs that a program sees to itself: made with `ibv_create_qp`, moved on with `ibv_modify_qp`,
//! known to the connection manager by number only (rdma_connect(3), rdma_establish(3)).
//!
//! The active end learns of the peer's answer by [`EventKind::ConnectResponse`]; the connection then waits here until the
//! program moves the queue pair on, which takes it ([`Id::adopt`]). The passive end may move the queue pair on before it
//! accepts, as over InfiniBand; [`crate::Cm::expects`] tells that a request for it is there. Linux' rdma_cm over iWARP knows
//! only the half of this: it takes the number and moves the queue pair itself.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use uwarp_driver::{Qp, Token};
use uwarp_llp::tcp;
use uwarp_proto::setup::Negotiated;

use super::stream::{agreed, cut, tell_local_error};
use super::{Id, Inner};
use crate::active::errno_of;
use crate::event::{ConnParam, Event, EventKind};
use crate::state::{State, Step};
use crate::timeouts::RETRIES;
use crate::{CmError, socket};

/// A connection that the peer has accepted and no queue pair has yet.
pub(super) struct Parked {
    fd: OwnedFd,
    negotiated: Negotiated,
    /// The engine looks whether the peer hangs up.
    watch: Token,
}

impl Id {
    /// As [`Id::connect`], for a queue pair that the program sees to itself. An acceptance is answered by
    /// [`EventKind::ConnectResponse`], and no [`EventKind::Established`] follows.
    pub fn connect_by_number(
        self: &Arc<Self>,
        qp: &Arc<Qp>,
        param: ConnParam,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        self.connect_as(qp, true, param, private_data)
    }

    /// The program has its queue pair ready, or will have: the connection is established. rdma_establish(3).
    pub fn establish(&self) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        inner.state = inner.after(Step::Establish)?;
        Ok(())
    }

    /// The peer has accepted: the connection waits for its queue pair.
    pub(super) fn responded(self: &Arc<Self>, fd: OwnedFd, mut negotiated: Negotiated) {
        let private_data = cut(std::mem::take(&mut negotiated.private_data));
        let param = agreed(&negotiated, self.unknown_depths());
        let watched = self.cm.engine().register(fd.as_raw_fd(), Arc::clone(self) as _);
        let mut inner = self.inner.lock();
        let qpn = inner.by_number.as_ref().and_then(Weak::upgrade).map(|qp| qp.qpn());
        let (watch, qpn) = match (watched, qpn) {
            (Ok(watch), Some(qpn)) => (watch, qpn),
            (watched, qpn) => {
                let errno = watched.as_ref().err().map_or(Errno::INVAL, errno_of);
                tracing::warn!(id = self.key, ?qpn, "nothing takes the connection: {errno}");
                if inner.conclude(Step::Failed) {
                    self.report(&mut inner, EventKind::ConnectError, -errno.raw_os_error());
                }
                drop(inner);
                if let Ok(watch) = watched {
                    self.cm.engine().deregister(watch);
                }
                tell_local_error(&fd, &negotiated);
                return;
            }
        };
        let Ok(state) = inner.after(Step::Response) else {
            drop(inner);
            return self.cm.engine().deregister(watch);
        };
        inner.state = state;
        inner.local = socket::local_address(&fd).ok().or(inner.local);
        inner.peer_param = param;
        inner.parked = Some(Parked { fd, negotiated, watch });
        self.cm.await_queue_pair(self, Some(qpn), param.qp_num);
        let mut event = Event::plain(self, EventKind::ConnectResponse, 0);
        event.param = param;
        event.private_data = private_data;
        inner.channel.push(event);
        drop(inner);
        // What came before the connection was in its place.
        self.look_at_parked();
    }

    /// The program moves its queue pair on: it gets the connection that waits for it, and is in RTS.
    pub fn adopt(self: &Arc<Self>, qp: &Arc<Qp>) -> Result<(), CmError> {
        let mut inner = self.inner.lock();
        let parked = inner.parked.take().ok_or(CmError::Invalid("no connection waits for the queue pair"))?;
        inner.qp = Some(Arc::clone(qp));
        let param = inner.conn_param;
        drop(inner);
        self.cm.no_longer_awaits(self.key);
        self.cm.engine().deregister(parked.watch);
        self.attach(qp, parked.fd, &parked.negotiated, param).inspect_err(|_| self.lost())
    }

    /// Whether the peer has hung up before the queue pair came.
    pub(super) fn look_at_parked(&self) {
        let inner = self.inner.lock();
        let gone = inner.parked.as_ref().is_some_and(|parked| tcp::hung_up(parked.fd.as_fd()));
        drop(inner);
        if gone {
            self.unpark();
            self.lost();
        }
    }

    /// Gives up a connection that waits for its queue pair. Whether there was one.
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

    /// How often a transport that counts would retry.
    pub fn retries(&self) -> u8 {
        let inner = self.inner.lock();
        if inner.has_connected { inner.conn_param.retry_count.min(RETRIES) } else { RETRIES }
    }

    /// What the peer said of itself in its request or its reply; zero before, and where it does not say.
    pub fn peer_param(&self) -> ConnParam {
        self.inner.lock().peer_param
    }
}

impl Inner {
    /// Whether a connection waits for its queue pair.
    pub(super) fn waits_for_queue_pair(&self) -> bool {
        matches!(self.state, State::Responded | State::Established) && self.parked.is_some()
    }
}
