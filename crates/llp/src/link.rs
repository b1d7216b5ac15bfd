//! Links: what carries a stream after it is set up.
//!
//! [`Link`] is one enum of lower layers, so that dispatch is static; TCP is the only one now. What moves a queue pair's
//! bytes needs only [`LowerLayer`], which the simulator's network implements, too, and so do the wrappers for tests:
//! [`Faulty`] and [`Tracing`].

mod faulty;
mod tracing;

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::io::Errno;

pub use faulty::Faulty;
pub use tracing::{Call, Tracing};

use crate::connect::Connection;
pub use crate::lower::{Answers, LowerLayer, Piece, Received};
use crate::route;
use crate::tcp;

/// A link of one of the lower layers that there are.
#[derive(Debug)]
pub enum Link {
    /// A connected, non-blocking TCP socket from which exactly the set-up was read.
    Tcp(OwnedFd),
}

impl LowerLayer for Link {
    #[inline]
    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Errno> {
        match self {
            Self::Tcp(fd) => tcp::send_bytes(fd.as_fd(), bytes),
        }
    }

    #[inline]
    fn send(&mut self, pieces: &[Piece]) -> Result<usize, Errno> {
        match self {
            Self::Tcp(fd) => tcp::send(fd.as_fd(), pieces),
        }
    }

    #[inline]
    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Errno> {
        match self {
            Self::Tcp(fd) => tcp::receive(fd.as_fd(), buffer),
        }
    }

    #[inline]
    fn receive_scattered(&mut self, pieces: &[Piece], buffer: &mut [u8]) -> Result<Received, Errno> {
        match self {
            Self::Tcp(fd) => tcp::receive_scattered(fd.as_fd(), pieces, buffer),
        }
    }

    fn hung_up(&self) -> bool {
        match self {
            Self::Tcp(fd) => tcp::hung_up(fd.as_fd()),
        }
    }

    fn broken(&self) -> bool {
        match self {
            Self::Tcp(fd) => tcp::broken(fd.as_fd()),
        }
    }

    fn answers(&self) -> Option<Answers> {
        match self {
            Self::Tcp(fd) => tcp::answers(fd.as_fd()),
        }
    }

    fn probe_when_quiet(&self) {
        match self {
            // A system that cannot leaves the peer to the looks at its answers.
            Self::Tcp(fd) => _ = tcp::probe_when_quiet(fd.as_fd()),
        }
    }

    fn peer(&self) -> Option<SocketAddr> {
        self.addresses()[1]
    }
}

impl Link {
    /// Addresses: its own, the peer's.
    pub fn addresses(&self) -> [Option<SocketAddr>; 2] {
        match self {
            Self::Tcp(fd) => route::addresses(fd.as_fd()),
        }
    }

    /// The effective maximum segment size of the path in bytes, `None` if the system does not tell.
    pub fn emss(&self) -> Option<u32> {
        match self {
            Self::Tcp(fd) => tcp::emss(fd.as_fd()),
        }
    }

    /// Whether [`LowerLayer::answers`] knows anything.
    pub fn tells_answers(&self) -> bool {
        match self {
            Self::Tcp(_) => true,
        }
    }

    /// Segments that the system has sent again since the link was made; 0 if it does not tell.
    pub fn retransmits(&self) -> u64 {
        match self {
            Self::Tcp(fd) => tcp::retransmits(fd.as_fd()),
        }
    }

    /// Bytes sent that the peer's system has not acknowledged.
    pub fn unacknowledged(&self) -> usize {
        match self {
            Self::Tcp(fd) => tcp::unacknowledged(fd.as_fd()),
        }
    }

    /// Half-closes: the peer sees the end of the stream after all that was sent.
    pub fn finish(&self) {
        match self {
            Self::Tcp(fd) => tcp::shutdown_send(fd.as_fd()),
        }
    }

    /// Makes the close a reset, which the peer hears of whatever it has not read.
    pub fn reset_on_close(&self) {
        match self {
            Self::Tcp(fd) => tcp::reset_on_close(fd.as_fd()),
        }
    }

    /// The descriptor to wait on, for whoever closes it.
    pub fn into_fd(self) -> OwnedFd {
        match self {
            Self::Tcp(fd) => fd,
        }
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(fd) => fd.as_fd(),
        }
    }
}

impl AsRawFd for Link {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl From<Connection> for Link {
    /// The stream begins with the next byte in each direction.
    fn from(connection: Connection) -> Self {
        Self::Tcp(connection.into())
    }
}

impl From<Link> for Connection {
    /// For a last frame on a link that is of no use.
    fn from(link: Link) -> Self {
        Self::from(link.into_fd())
    }
}

impl From<std::net::TcpStream> for Link {
    /// From a connected, non-blocking socket.
    fn from(stream: std::net::TcpStream) -> Self {
        Self::Tcp(stream.into())
    }
}
