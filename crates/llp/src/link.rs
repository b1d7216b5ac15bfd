//! Links, which carry a stream after it is set up.
//!
//! [`Link`] is an enum of lower layers, so that dispatch is static. The code that
//! moves a queue pair's bytes needs only [`LowerLayer`]. The simulator's network and the wrappers for tests,
//! [`Faulty`] and [`Tracing`], implement it too. What neither moves bytes nor ends the stream (addresses,
//! segment size) is in [`Link`] alone. Outside this crate, nothing names TCP after the set-up: the module
//! `tcp` is private.
//!
//! What the owner sees of an end or of a refusal is a [`Stop`]: which of the system's errors means what is
//! in `tcp`, and another lower layer has a table of its own. Pieces of memory are [`MemSeg`]s, because a
//! lower layer in memory copies them itself.
//!
//! Rejected: the name `Channel` for the trait, which is that of the verbs' channels of events; a segment in
//! place of bytes, which would make receiving, direct placement and sending of the queue pair anew for 20 to
//! 40 instructions; a `Link` that is generic over the lower layer, because one process has streams of
//! several kinds at once, so an enum would stand around it in any case; faulty and tracing variants of the
//! enum, because released code would carry them.

/// The methods of [`LowerLayer`] that move no bytes, for a wrapper around another layer.
macro_rules! pass_on_queries {
    () => {
        fn caps(&self) -> Caps {
            self.inner.caps()
        }

        fn flush(&mut self, received: crate::lower::Counts, wanted: u64) -> bool {
            self.inner.flush(received, wanted)
        }

        fn count_placed(&mut self, placed: u64) {
            self.inner.count_placed(placed);
        }

        fn has_news(&self, acked: u64) -> bool {
            self.inner.has_news(acked)
        }

        fn peer_received(&self) -> crate::lower::Counts {
            self.inner.peer_received()
        }

        fn released(&self) -> Option<u64> {
            self.inner.released()
        }

        fn recall(&mut self) {
            self.inner.recall();
        }

        fn ended(&self) -> Option<Ended> {
            self.inner.ended()
        }

        fn answers(&self) -> Option<Answers> {
            self.inner.answers()
        }

        fn probe_when_quiet(&self) {
            self.inner.probe_when_quiet();
        }

        fn unsent(&self) -> usize {
            self.inner.unsent()
        }

        fn unacknowledged(&self) -> usize {
            self.inner.unacknowledged()
        }

        fn finish(&mut self) {
            self.inner.finish();
        }

        fn reset_on_close(&self, reset: bool) {
            self.inner.reset_on_close(reset);
        }

        fn peer(&self) -> Option<SocketAddr> {
            self.inner.peer()
        }
    };
}

mod faulty;
mod tracing;

use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use rustix::io::Errno;
use uwarp_mem::MemSeg;
use uwarp_mem::glance::Glance;
use uwarp_process::Descriptor;

pub use faulty::Faulty;
pub use tracing::{Call, Tracing};

use crate::carrier::{self, Ends, SetUp, Watch};
pub use crate::lower::{Answers, Caps, Counts, Ended, LowerLayer, Received, Stop};
use crate::memory::lane::Lane;
use crate::route;
use crate::streams::{Carries, StreamLink};
use crate::tcp;

/// Which lower layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// TCP.
    Tcp,
    /// Memory of this host.
    Memory,
    /// A stream of reliable datagrams.
    Rd,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Memory => "memory",
            Self::Rd => "rd",
        })
    }
}

/// A link of one of the lower layers.
#[derive(Debug)]
pub enum Link {
    /// A connected, non-blocking TCP socket from which only the set-up frames were read.
    Tcp(Descriptor),
    /// Memory that is shared with the peer's process.
    Lane(Box<Lane>),
    /// A stream of reliable datagrams.
    Stream(Box<StreamLink>),
}

impl LowerLayer for Link {
    #[inline]
    fn caps(&self) -> Caps {
        match self {
            Self::Tcp(_) => Caps::TCP,
            Self::Lane(_) => Caps::MEMORY,
            Self::Stream(_) => Caps::STREAM,
        }
    }

    #[inline]
    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, Stop> {
        match self {
            Self::Tcp(fd) => tcp::send_bytes(fd.as_fd(), bytes),
            Self::Lane(lane) => lane.send_bytes(bytes),
            Self::Stream(stream) => stream.send_bytes(bytes),
        }
    }

    #[inline]
    fn send(&mut self, pieces: &[MemSeg], stays: u64) -> Result<usize, Stop> {
        match self {
            Self::Tcp(fd) => tcp::send(fd.as_fd(), pieces),
            Self::Lane(lane) => lane.send(pieces, stays),
            Self::Stream(stream) => stream.send(pieces, stays),
        }
    }

    #[inline]
    fn receive(&mut self, buffer: &mut [u8]) -> Result<Received, Stop> {
        match self {
            Self::Tcp(fd) => tcp::receive(fd.as_fd(), buffer),
            Self::Lane(lane) => lane.receive(buffer),
            Self::Stream(stream) => LowerLayer::receive(&mut **stream, buffer),
        }
    }

    #[inline]
    fn receive_scattered(&mut self, pieces: &[MemSeg], buffer: &mut [u8]) -> Result<Received, Stop> {
        match self {
            Self::Tcp(fd) => tcp::receive_scattered(fd.as_fd(), pieces, buffer),
            Self::Lane(lane) => lane.receive_scattered(pieces, buffer),
            Self::Stream(stream) => stream.receive_scattered(pieces, buffer),
        }
    }

    #[inline]
    fn flush(&mut self, received: Counts, wanted: u64) -> bool {
        match self {
            Self::Tcp(_) => false,
            Self::Lane(lane) => lane.flush(received, wanted),
            Self::Stream(stream) => stream.flush(received, wanted),
        }
    }

    #[inline]
    fn count_placed(&mut self, placed: u64) {
        if let Self::Lane(lane) = self {
            lane.count_placed(placed);
        }
    }

    #[inline]
    fn has_news(&self, acked: u64) -> bool {
        match self {
            Self::Tcp(_) => true,
            Self::Lane(lane) => lane.has_news(acked),
            Self::Stream(stream) => stream.has_news(acked),
        }
    }

    #[inline]
    fn peer_received(&self) -> Counts {
        match self {
            Self::Tcp(_) => Counts::default(),
            Self::Lane(lane) => lane.peer_received(),
            Self::Stream(stream) => stream.peer_received(),
        }
    }

    fn ended(&self) -> Option<Ended> {
        match self {
            Self::Tcp(fd) => tcp::ended(fd.as_fd()),
            Self::Lane(lane) => lane.ended(),
            Self::Stream(stream) => LowerLayer::ended(&**stream),
        }
    }

    fn answers(&self) -> Option<Answers> {
        match self {
            Self::Tcp(fd) => tcp::answers(fd.as_fd()),
            Self::Lane(lane) => lane.answers(),
            Self::Stream(stream) => stream.answers(),
        }
    }

    fn probe_when_quiet(&self) {
        match self {
            // If the system cannot do this, only the checks of its answers find a dead peer.
            Self::Tcp(fd) => _ = tcp::probe_when_quiet(fd.as_fd()),
            Self::Lane(lane) => lane.probe_when_quiet(),
            Self::Stream(stream) => stream.probe_when_quiet(),
        }
    }

    fn unsent(&self) -> usize {
        match self {
            Self::Tcp(fd) => tcp::unsent(fd.as_fd()),
            Self::Lane(lane) => lane.unsent(),
            Self::Stream(stream) => stream.unsent(),
        }
    }

    fn finish(&mut self) {
        match self {
            Self::Tcp(fd) => tcp::shutdown_send(fd.as_fd()),
            Self::Lane(lane) => lane.finish(),
            Self::Stream(stream) => stream.finish(),
        }
    }

    fn unacknowledged(&self) -> usize {
        match self {
            Self::Tcp(fd) => tcp::unacknowledged(fd.as_fd()),
            Self::Lane(lane) => lane.unacknowledged(),
            Self::Stream(stream) => stream.unacknowledged(),
        }
    }

    fn reset_on_close(&self, reset: bool) {
        match self {
            Self::Tcp(fd) => tcp::reset_on_close(fd.as_fd(), reset),
            Self::Lane(lane) => lane.reset_on_close(reset),
            Self::Stream(stream) => stream.reset_on_close(reset),
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
            Self::Lane(lane) => route::addresses(lane.tcp()),
            Self::Stream(stream) => {
                let Ends { local, peer } = stream.ends();
                [Some(local), Some(peer)]
            }
        }
    }

    /// Sets the traffic class in the IP header of what is sent from now on.
    pub fn set_traffic_class(&self, class: u8) -> Result<(), Errno> {
        match (self, self.addresses()[1]) {
            (Self::Tcp(fd), Some(peer)) => tcp::set_traffic_class(fd.as_fd(), peer, class),
            (Self::Tcp(_), None) => Err(Errno::NOTCONN),
            // Nothing of it travels in packets.
            (Self::Lane(_), _) => Ok(()),
            // Its packets are those of other streams, too.
            (Self::Stream(_), _) => Ok(()),
        }
    }

    /// The effective maximum segment size of the path in bytes, `None` if the system does not report it.
    pub fn emss(&self) -> Option<u32> {
        match self {
            Self::Tcp(fd) => tcp::emss(fd.as_fd()),
            Self::Lane(_) | Self::Stream(_) => None,
        }
    }

    /// Segments that the system has retransmitted since the link was made; 0 if it does not report them.
    pub fn retransmits(&self) -> u64 {
        match self {
            Self::Tcp(fd) => tcp::retransmits(fd.as_fd()),
            Self::Lane(_) | Self::Stream(_) => 0,
        }
    }

    /// How its owner learns of input, of room and of the end.
    pub fn watch(&self) -> Watch<'_> {
        match self {
            Self::Tcp(fd) => Watch::Descriptor(fd.as_fd()),
            Self::Lane(lane) => Watch::Both(lane.tcp()),
            Self::Stream(_) => Watch::Itself,
        }
    }

    /// The name under which the engine knows it: of a lower layer that reports by itself.
    pub fn set_name(&self, name: u64) {
        match self {
            Self::Tcp(_) => {}
            Self::Lane(lane) => lane.set_name(name),
            Self::Stream(stream) => stream.set_name(name),
        }
    }

    /// What receives for it, of a stream that shares a socket with others.
    pub fn carries(&self) -> Option<&Arc<dyn Carries>> {
        match self {
            Self::Tcp(_) | Self::Lane(_) => None,
            Self::Stream(stream) => Some(stream.carries()),
        }
    }

    /// From now on its owner may hold any lock when it calls.
    pub fn set_late(&mut self) {
        if let Self::Stream(stream) = self {
            stream.set_late();
        }
    }

    /// The system has reported the end of the peer's connection.
    #[inline]
    pub fn look_at_end(&mut self) {
        if let Self::Lane(lane) = self {
            lane.look_at_end();
        }
    }

    /// Whether the end comes, behind what waits to be received. Only of a lower layer that shows it without
    /// the system.
    #[inline]
    pub fn is_ending(&self) -> bool {
        match self {
            Self::Tcp(_) | Self::Stream(_) => false,
            Self::Lane(lane) => lane.is_ending(),
        }
    }

    /// Whether there is room again, after a send that found too little. Only of a lower layer that shows it
    /// without the system.
    #[inline]
    pub fn has_room_again(&self) -> bool {
        match self {
            Self::Tcp(_) => false,
            Self::Lane(lane) => lane.has_room_again(),
            Self::Stream(stream) => stream.has_room_again(),
        }
    }

    /// What shows news of the peer's, if there are none now. Only of a lower layer that shows them without
    /// the system. `acked`: messages that it has acknowledged.
    pub fn glance(&self, acked: u64) -> Option<Glance> {
        match self {
            Self::Tcp(_) | Self::Stream(_) => None,
            Self::Lane(lane) => lane.glance(acked),
        }
    }

    /// What waits in its connection, or beside its lane: [`tcp::peek`].
    pub fn peek_tcp(&self) -> Option<bool> {
        match self {
            Self::Tcp(fd) => tcp::peek(fd.as_fd()),
            Self::Lane(lane) => tcp::peek(lane.tcp()),
            Self::Stream(_) => None,
        }
    }

    /// What carries it, for people.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Tcp(_) => Kind::Tcp,
            Self::Lane(_) => Kind::Memory,
            Self::Stream(_) => Kind::Rd,
        }
    }

    /// The connection, for a last frame on a link that carries no stream.
    pub fn into_set_up(self) -> Box<dyn SetUp> {
        match self {
            Self::Tcp(fd) => carrier::tcp::set_up(fd),
            Self::Lane(lane) => carrier::tcp::set_up(lane.into_tcp()),
            Self::Stream(stream) => stream,
        }
    }

    /// Its connection: of a lane the one beside it, whose lane is left. `Err`: it has none of its own.
    pub fn into_descriptor(self) -> Result<Descriptor, Self> {
        match self {
            Self::Tcp(fd) => Ok(fd),
            Self::Lane(lane) => Ok(lane.into_tcp()),
            Self::Stream(_) => Err(self),
        }
    }
}

impl From<Lane> for Link {
    fn from(lane: Lane) -> Self {
        Self::Lane(Box::new(lane))
    }
}

impl From<std::net::TcpStream> for Link {
    /// From a connected, non-blocking socket.
    fn from(stream: std::net::TcpStream) -> Self {
        Self::Tcp(Descriptor::new(stream.into()))
    }
}
