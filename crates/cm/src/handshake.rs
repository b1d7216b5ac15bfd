//! What the two handshakes report, and to whom.
//!
//! A handshake knows nothing of ids: [`crate::active`] reports how connecting ended to a [`ConnectObserver`],
//! [`crate::listener`] passes requests to a [`RequestObserver`]. Both are called with no lock of the
//! handshake held.

use std::net::SocketAddr;
use std::sync::Weak;

use rustix::io::Errno;
use uwarp_driver::Token;
use uwarp_llp::carrier::{Close, Ends, Refusal, SetUp, send_frame};
use uwarp_proto::setup::{Negotiated, Rejection, Request, Responder};

use crate::event::EventKind;
use crate::listener::{Answer, Listener};

/// Requests a connection.
pub(crate) trait ConnectObserver: Send + Sync {
    /// The system has chosen a local address.
    fn connecting_from(&self, local: SocketAddr);
    /// Connecting has ended; nothing further is reported.
    fn connected(&self, how: Connected);
}

/// Receives the requests of a listener, one after the other, in the order of their connections.
pub(crate) trait RequestObserver: Send + Sync {
    /// A request has arrived completely.
    fn requested(&self, pending: Pending, request: Request);
}

/// How connecting ended.
pub(crate) enum Connected {
    /// The peer accepted. The stream begins on this connection.
    Accepted(Box<dyn SetUp>, Negotiated),
    /// The peer's program rejected.
    Rejected(Rejection),
    /// It failed: the event to report, with its status.
    Failed(EventKind, Errno),
}

/// A request that waits for the program's decision.
pub(crate) struct Pending {
    pub connection: Box<dyn SetUp>,
    pub ends: Ends,
    pub responder: Responder,
    /// Its listener.
    pub listener: Weak<Listener>,
}

impl Pending {
    /// The program accepts: to be kept until ESTABLISHED is queued, or until there will be none.
    pub fn answer(&self) -> Option<Answer> {
        Listener::answer(&self.listener, self.ends.peer)
    }

    /// Sends the reply that the responder has ready.
    pub fn reply(&mut self) -> Result<(), Refusal> {
        while let Some(reply) = self.responder.poll_transmit() {
            send_frame(&*self.connection, &reply)?;
        }
        Ok(())
    }

    /// Rejects the request, with private data.
    pub fn reject(mut self, private_data: &[u8]) {
        if self.responder.reject(private_data).is_ok() && self.reply().is_ok() {
            self.connection.close(Close::Finish);
        }
    }
}

/// A connection that the peer has accepted and that has no queue pair yet.
pub(crate) struct Parked {
    pub connection: Box<dyn SetUp>,
    pub negotiated: Negotiated,
    /// Through this the engine reports that the peer hangs up.
    pub watch: Token,
}

/// Reports to the peer that the stream cannot begin, for a local reason (RFC 6581 section 9.3), and closes
/// the connection.
pub(crate) fn report_local_error(connection: Box<dyn SetUp>, negotiated: &Negotiated) {
    if let Some(terminate) = negotiated.local_error() {
        // The connection is closed whether this arrives or not.
        let _ = send_frame(&*connection, &terminate);
    }
    connection.close(Close::Finish);
}

pub(crate) fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}
