//! What `uwarp-cm`'s `runner` has around it: connections that report edges only, and no queue pairs: what
//! those do is `uwarp-sim`'s.

use std::cell::Cell;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

use llp::Link;
use llp::link::Kind;
use rustix::io::Errno;
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::{Disconnect, QpModify, StreamParams};

use crate::carrier::{Bind, Bound, Carrier, Close, Ends, Got, Refusal, SetUp, Watch};
use crate::source::Readiness;
use crate::sys::{self, Socket};

/// `uwarp_driver::StreamObserver`.
pub trait StreamObserver: Send + Sync {
    fn established(&self);
    fn disconnected(&self, why: Disconnect);
}

/// `uwarp_driver::StreamNumber`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamNumber;

/// `uwarp_driver::Qp`. There is none.
pub enum Qp {}

impl Qp {
    pub fn qpn(&self) -> u32 {
        match *self {}
    }

    pub fn attach_unsettled(
        &self,
        _: Link,
        _: StreamParams,
        _: Arc<dyn StreamObserver>,
        _: host::Settling,
    ) -> Result<StreamNumber, (VerbsError, Link)> {
        match *self {}
    }

    pub fn attach_awaited(
        &self,
        _: Link,
        _: StreamParams,
        _: Arc<dyn StreamObserver>,
        _: u32,
        _: host::Settling,
    ) -> Result<StreamNumber, (VerbsError, Link)> {
        match *self {}
    }

    pub fn keep_place(&self, _: StreamNumber, _: Infallible) {
        match *self {}
    }

    pub fn modify(&self, _: &QpModify) -> Result<(), VerbsError> {
        match *self {}
    }

    pub fn disconnect_stream(&self, _: StreamNumber, _: bool) {
        match *self {}
    }
}

/// `uwarp_driver::host`: no queue pair is on this host.
pub mod host {
    use std::net::SocketAddr;

    use uwarp_proto::setup::Negotiated;

    use super::*;

    pub fn choice(_: &Negotiated, _: Kind, _: [SocketAddr; 2], _: SocketAddr) -> ((), Option<Infallible>) {
        ((), None)
    }

    pub struct Settling;

    impl Settling {
        pub fn begin((): (), _: &Negotiated, _: [SocketAddr; 2]) -> Self {
            Self
        }
    }

    pub fn begin(_: &Arc<Qp>, _: StreamNumber, (): (), _: &Negotiated, _: [SocketAddr; 2]) {}
}

/// `uwarp_cm::carriers`.
pub mod carriers {
    use super::*;
    use crate::engine::Engine;
    use crate::source::{Source, Token};

    struct Nowhere;

    impl Carrier for Nowhere {
        fn bind(&self, _: &Bind) -> Result<Box<dyn Bound>, Errno> {
            Err(Errno::NOTSUP)
        }
    }

    pub fn carrier() -> &'static dyn Carrier {
        &Nowhere
    }

    pub fn watch(engine: &Engine, _: Watch<'_>, source: Arc<dyn Source>) -> Result<Token, Errno> {
        engine.register(LAST.get(), source).map_err(|_| Errno::IO)
    }
}

thread_local! {
    /// What was asked last how to watch it: a [`Watch`] has room for a descriptor of the system's only. All
    /// threads of an execution run on one system thread, and none comes in between.
    static LAST: Cell<RawFd> = const { Cell::new(-1) };
}

/// The peer's end, and what of its bytes was not received.
#[derive(Clone)]
pub struct Peer {
    socket: Socket,
    bytes: Arc<Mutex<usize>>,
}

/// This end.
pub struct Connection(Peer);

impl Peer {
    /// Sends so many bytes. The other end is told once.
    pub fn send(&self, bytes: usize) {
        sys::update(|| {
            let mut all = self.bytes.lock().unwrap();
            *all += bytes;
            ((), vec![self.socket.fd()], readable(*all), true)
        });
    }
}

fn readable(bytes: usize) -> Readiness {
    Readiness { readable: bytes > 0, ..Readiness::default() }
}

/// A connection.
pub fn connection() -> (Box<dyn SetUp>, Peer) {
    let peer = Peer { socket: Socket::new(), bytes: Arc::default() };
    (Box::new(Connection(peer.clone())), peer)
}

impl SetUp for Connection {
    fn ends(&self) -> Ends {
        let nowhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        Ends { local: nowhere, peer: nowhere }
    }

    fn set_tos(&self, _: u8) -> Result<(), Errno> {
        Ok(())
    }

    fn send_some(&self, bytes: &[u8]) -> Result<usize, Refusal> {
        Ok(bytes.len())
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<Got, Refusal> {
        let Self(Peer { socket, bytes }) = self;
        let got = sys::update(|| {
            let mut bytes = bytes.lock().unwrap();
            let got = buffer.len().min(*bytes);
            *bytes -= got;
            (got, vec![socket.fd()], readable(*bytes), false)
        });
        Ok(if got == 0 { Got::Nothing } else { Got::Bytes(got) })
    }

    fn ended(&self) -> bool {
        false
    }

    fn close(self: Box<Self>, _: Close) {}

    fn watch(&self) -> Watch<'_> {
        LAST.set(self.0.socket.fd());
        Watch::Itself
    }

    fn into_link(self: Box<Self>) -> Link {
        unreachable!("no queue pair takes a stream")
    }
}
