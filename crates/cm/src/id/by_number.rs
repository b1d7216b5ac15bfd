//! Connections for queue pairs that a program moves itself: made with `ibv_create_qp`, moved to RTR and RTS
//! with `ibv_modify_qp`, known to the connection manager by number only (rdma_connect(3), rdma_establish(3)).
//!
//! The active end learns of the peer's answer by [`EventKind::ConnectResponse`]; the connection then waits
//! until the program moves the queue pair to RTR, which takes it ([`Adopter::adopt`]). The passive end may
//! move the queue pair before it accepts, as over InfiniBand; [`crate::Cm::expects`] then says that there is
//! a request for it. Linux' rdma_cm over iWARP has only half of this: it takes the number and moves the queue
//! pair itself.
//!
//! [`EventKind::ConnectResponse`]: crate::EventKind::ConnectResponse

use std::sync::Arc;

use uwarp_driver::{Nic, Qp};
use uwarp_rnic::qp::{QpCaps, QpInit};
use uwarp_rnic::{AsyncEvent, AsyncSink, Cq, Pd};

use super::Id;
use crate::awaiting::Adopter;
use crate::error::CmError;
use crate::event::ConnParam;
use crate::machine::life::Pair;

impl Id {
    /// As [`Id::connect`], for a queue pair that the program moves itself. If the peer accepts,
    /// [`crate::EventKind::ConnectResponse`] is reported, and no [`crate::EventKind::Established`] follows.
    pub fn connect_by_number(
        &self,
        qp: &Arc<Qp>,
        param: ConnParam,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        self.connect_as(Pair::Number(qp.qpn()), qp, param, private_data)
    }

    /// As [`Id::connect_by_number`], for a queue pair that takes no connection: UCX gives the number of a
    /// datagram queue pair that it never uses, and needs only the connection's private data and its end. The
    /// peer sees the number in `param`.
    pub fn connect_by_stand_in(&self, param: ConnParam, private_data: &[u8]) -> Result<(), CmError> {
        let qp = self.stand_in()?;
        self.connect_as(Pair::StandIn, &qp, param, private_data).inspect_err(|_| self.no_stand_in())
    }

    /// As [`Self::connect_by_stand_in`], for [`Id::accept`].
    pub fn accept_by_stand_in(&self, param: ConnParam, private_data: &[u8]) -> Result<(), CmError> {
        let qp = self.stand_in()?;
        self.accept_as(Pair::StandIn, &qp, Some(param), private_data).inspect_err(|_| self.no_stand_in())
    }

    /// Creates the queue pair that stands in; the id keeps it until the id is destroyed.
    fn stand_in(&self) -> Result<Arc<Qp>, CmError> {
        let new = StandIn::new(self.owner().cm.nic())?;
        let qp = Arc::clone(&new.0);
        let old = self.owner().kept.lock().stand_in.replace(new);
        // Without a lock: it is a queue pair.
        drop(old);
        Ok(qp)
    }

    fn no_stand_in(&self) {
        let stand_in = self.owner().kept.lock().stand_in.take();
        drop(stand_in);
    }

    /// The program has moved its queue pair to RTS, or will do so: the connection is established.
    /// rdma_establish(3).
    pub fn establish(&self) -> Result<(), CmError> {
        self.runner.ask(|life, _, _| life.establish())
    }
}

impl Adopter for Id {
    fn adopt(&self, qp: &Arc<Qp>) -> Result<(), CmError> {
        self.runner.ask(|life, _, _| {
            life.adopt()?;
            self.owner().take_pair(Pair::Own(qp.qpn()), qp);
            Ok(())
        })
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
