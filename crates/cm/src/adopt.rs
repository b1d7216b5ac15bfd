//! A connected TCP socket becomes the stream of a queue pair: the shell of [`crate::machine::adopt`].
//!
//! Both ends have agreed on it beforehand, by means of their own, and on their roles: one initiates and one
//! responds (RFC 5044 section 7.1). From then on the socket's bytes are MPA's, in both directions. The
//! program's descriptor stays the kernel's TCP socket; the queue pair gets a second one for it.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::io::Errno;
use uwarp_driver::Qp;
use uwarp_driver::config::Config;
use uwarp_proto::setup::{AcceptParams, Depths, InitiatorConfig, Negotiated};
use uwarp_rnic::qp::StreamParams;

use crate::carriers;
use crate::cm::Cm;
use crate::event::ConnParam;
use crate::machine::Recipient;
use crate::machine::adopt::{self, Adopt, Report};
use crate::params::{peer_data, revision, stream_params};
use crate::runner::{Environment, Runner, now};
use crate::timeouts::ACK_TIMEOUT;

pub use crate::machine::adopt::MAX_PRIVATE_DATA;

/// Which end sends the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// This one.
    Initiator,
    /// The peer.
    Responder,
}

/// Learns what becomes of an adopted socket. Called without a lock; must not block.
pub trait AdoptObserver: Send + Sync {
    /// The stream runs, in both directions. Called once at most, as is the next one.
    fn adopted(&self, private_data: Vec<u8>);
    /// There is no stream, and the connection is of no use any more.
    ///
    /// | errno | why |
    /// |---|---|
    /// | `PROTO` | what the peer sent is not MPA's, or it did not offer what both ends need |
    /// | `CONNREFUSED` | this end does not expect the peer's private data, or the peer rejected the request |
    /// | `CONNRESET` | the peer closed or does not expect the reply's private data, or the connection broke |
    /// | `TIMEDOUT` | the peer did not do its part in time |
    fn failed(&self, errno: Errno);
    /// The stream has ended, in an orderly way or with an error. `CONNRESET`: it broke, or the peer closed in
    /// the middle of a frame; `TIMEDOUT`: the peer does not answer; `PROTO`: one end has broken the protocol.
    fn ended(&self, error: Option<Errno>);
}

/// A socket that is being adopted, or was. When it is dropped, it is given up.
pub struct Adoption(Arc<Runner<Adopt, Owner>>);

/// Who adopts.
struct Owner {
    qp: Weak<Qp>,
    observer: Weak<dyn AdoptObserver>,
}

impl Environment<Adopt> for Owner {
    fn queue_pair(&self, _: Recipient) -> Option<Arc<Qp>> {
        self.qp.upgrade()
    }

    fn stream_params(&self, qp: &Qp, said: &Negotiated, param: ConnParam) -> StreamParams {
        stream_params(said, param, ACK_TIMEOUT, qp.query().min_rnr_timer)
    }

    fn report(&self, report: Report) {
        let Some(observer) = self.observer.upgrade() else { return };
        match report {
            Report::Adopted(private_data) => observer.adopted(private_data),
            Report::Failed(errno) => observer.failed(errno),
            Report::Ended(error) => observer.ended(error),
        }
    }
}

/// What both ends say, except in their roles.
#[derive(Debug, Clone, Copy)]
pub struct Terms<'a> {
    /// Who sends the request.
    pub role: Role,
    /// For the peer.
    pub private_data: &'a [u8],
    /// Whether the peer's private data is what this end expects. A request that is not gets a rejection.
    /// Called under a lock; must be pure.
    pub expects: fn(&[u8]) -> bool,
    /// For all of set-up.
    pub limit: Duration,
}

impl Adoption {
    /// `NOTSOCK`, `OPNOTSUPP`: not a TCP socket.
    pub fn check_type(socket: BorrowedFd<'_>) -> Result<(), Errno> {
        carriers::check_type(socket)
    }

    /// Begins on a connected socket of the program, of which `socket` is a second descriptor. `qp`: in INIT.
    /// Does not block; what becomes of it is reported to the observer, possibly before this returns. An error
    /// that is returned is not reported; nothing was sent or received then, but `TCP_NODELAY` and
    /// `SO_RCVLOWAT` may have been set.
    pub fn start(
        cm: &Arc<Cm>,
        socket: OwnedFd,
        terms: &Terms<'_>,
        qp: &Arc<Qp>,
        observer: Weak<dyn AdoptObserver>,
    ) -> Result<Arc<Self>, Errno> {
        let connection = carriers::adopt(socket)?;
        let config = Config::get();
        let introduction = peer_data(qp.qpn(), qp.query().min_rnr_timer, ConnParam::DEFAULT);
        let depths = Depths::negotiated(cm.max_depth(), cm.max_depth());
        let role = match terms.role {
            Role::Initiator => adopt::Role::Initiator(InitiatorConfig {
                revision: revision(config),
                crc: config.crc,
                markers: config.markers,
                depths,
                max_ird: cm.max_depth(),
                peer: config.find_uwarp_peers.then_some(introduction),
                peer_in_request: false,
            }),
            Role::Responder => {
                adopt::Role::Responder(cm.responder_policy(), AcceptParams { depths, peer: introduction })
            }
        };
        let Terms { private_data, expects, limit, .. } = *terms;
        let machine = Adopt::new(&now(), role, private_data, expects, limit)?;
        let owner = Owner { qp: Arc::downgrade(qp), observer };
        let conn = machine.conn();
        Ok(Arc::new(Self(Runner::start(cm.engine(), owner, machine, [(conn, connection)]))))
    }

    /// Gives up: nothing is reported any more. A stream that runs already goes on: then its peer's private
    /// data is returned, whether [`AdoptObserver::adopted`] was told or not.
    pub fn cancel(&self) -> Option<Vec<u8>> {
        let mut adopted = None;
        self.0.cancel(|machine| adopted = machine.cancel());
        adopted
    }
}

impl Drop for Adoption {
    fn drop(&mut self) {
        self.cancel();
    }
}
