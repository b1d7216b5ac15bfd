//! What the two handshakes report, and to whom.
//!
//! A handshake knows nothing of ids: [`crate::active`] reports how connecting ended to a [`ConnectObserver`],
//! [`crate::listener`] passes requests to a [`RequestObserver`]. Both are called with no lock of the
//! handshake held.

use std::net::SocketAddr;
use std::sync::Weak;

use rustix::io::Errno;
use uwarp_driver::Token;
use uwarp_llp::connect::Connection;
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
#[derive(Debug)]
pub(crate) enum Connected {
    /// The peer accepted. The stream begins on this connection.
    Accepted(Connection, Negotiated),
    /// The peer's program rejected.
    Rejected(Rejection),
    /// It failed: the event to report, with its status.
    Failed(EventKind, Errno),
}

/// A request that waits for the program's decision.
pub(crate) struct Pending {
    pub connection: Connection,
    /// The local address, and the peer's.
    pub addresses: [Option<SocketAddr>; 2],
    pub responder: Responder,
    /// Its listener.
    pub listener: Weak<Listener>,
}

impl Pending {
    /// The program accepts: to be kept until ESTABLISHED is queued, or until there will be none.
    pub fn answer(&self) -> Option<Answer> {
        Listener::answer(&self.listener, self.addresses[1]?)
    }

    /// Sends the reply that the responder has ready.
    pub fn reply(&mut self) -> Result<(), Errno> {
        while let Some(reply) = self.responder.poll_transmit() {
            self.connection.send_frame(&reply)?;
        }
        Ok(())
    }

    /// Rejects the request, with private data.
    pub fn reject(mut self, private_data: &[u8]) {
        if self.responder.reject(private_data).is_ok() && self.reply().is_ok() {
            self.connection.finish();
        }
    }
}

/// A connection that the peer has accepted and that has no queue pair yet.
pub(crate) struct Parked {
    pub connection: Connection,
    pub negotiated: Negotiated,
    /// Through this the engine reports that the peer hangs up.
    pub watch: Token,
}

/// Reports to the peer that the stream cannot begin, for a local reason (RFC 6581 section 9.3). The caller
/// then closes the connection.
pub(crate) fn report_local_error(connection: &Connection, negotiated: &Negotiated) {
    if let Some(terminate) = negotiated.local_error() {
        // The connection is closed whether this arrives or not.
        let _ = connection.send_frame(&terminate);
        connection.finish();
    }
}

pub(crate) fn errno_of(error: &std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error)
}
