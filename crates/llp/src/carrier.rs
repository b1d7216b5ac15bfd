//! What a lower layer must offer before a stream begins: binding, listening, connecting, and set-up frames on
//! a connection. The connection manager uses these traits alone; it names lower layers in one place.
//!
//! ```text
//!   Carrier ─ bind ─▶ Bound ─┬─ listen ──▶ Listening ─ accept ─▶ SetUp
//!                            └─ connect ──────────────────────▶ SetUp ─ send_some, receive ─▶ the stream
//! ```
//!
//! No call here waits. [`tcp`] is one carrier; [`streams`](crate::streams) of reliable datagrams have theirs
//! where their sockets are, in the driver; the simulator has another one.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};

use rustix::io::Errno;

use crate::link::{Kind, Link};

pub mod tcp;

/// A lower layer.
pub trait Carrier: Send + Sync {
    /// Something that can listen or connect, with a local address.
    fn bind(&self, at: &Bind) -> Result<Box<dyn Bound>, Errno>;
}

/// Neither connects nor listens yet.
pub trait Bound: Send {
    /// The local address. Its port is 0 as long as none is taken.
    fn local(&self) -> SocketAddr;
    /// Sets the type of service.
    fn set_tos(&self, tos: u8) -> Result<(), Errno>;
    /// Begins to listen. The system keeps up to `backlog` connections that were not accepted yet. What the
    /// system refuses to let listen comes back as it was.
    fn listen(self: Box<Self>, backlog: usize) -> Result<Box<dyn Listening>, (Errno, Box<dyn Bound>)>;
    /// Begins to connect. A connection that comes back may still be connecting: it takes no bytes then.
    fn connect(self: Box<Self>, to: SocketAddr) -> Result<Box<dyn SetUp>, (Refusal, Box<dyn Bound>)>;
    /// What it consists of, for the record of descriptors that a forked child closes.
    fn watch(&self) -> Watch<'_>;
}

/// Listens.
pub trait Listening: Send {
    /// The next connection, ready for set-up; `None`: none waits. An error is one of this host: a peer that
    /// has gone again meanwhile is passed over.
    fn accept(&self) -> Result<Option<Box<dyn SetUp>>, Errno>;
    /// Reports that connections wait.
    fn watch(&self) -> Watch<'_>;
    /// The name under which the engine knows it: of a lower layer that reports by itself.
    fn name(&self, _name: u64) {}
}

/// A connection, established or still connecting. Set-up frames are sent over it, until a stream begins on
/// it with the next byte in each direction.
pub trait SetUp: Send {
    /// Its addresses.
    fn ends(&self) -> Ends;
    /// Sets the type of service.
    fn set_tos(&self, tos: u8) -> Result<(), Errno>;
    /// Sends as much as there is room for; returns how many bytes that is: 0 while it is still connecting.
    fn send_some(&self, bytes: &[u8]) -> Result<usize, Refusal>;
    /// Reads what has arrived, at most the buffer, which has room for one byte at least.
    fn receive(&self, buffer: &mut [u8]) -> Result<Got, Refusal>;
    /// Whether the peer has closed its side, or the connection is broken. Asks the system.
    fn ended(&self) -> bool;
    /// Closes it. (When it is dropped, it is closed, too, without a message to the peer.)
    fn close(self: Box<Self>, how: Close);
    /// Reports room and input.
    fn watch(&self) -> Watch<'_>;
    /// The name under which the engine knows it: of a lower layer that reports by itself.
    fn name(&self, _name: u64) {}
    /// Which lower layer it is of.
    fn kind(&self) -> Kind {
        Kind::Tcp
    }
    /// What carries the stream.
    fn into_link(self: Box<Self>) -> Link;
}

/// Sends a whole set-up frame. Such frames are far smaller than any buffer, so a connection on which one does
/// not fit is of no use.
pub fn send_frame(connection: &dyn SetUp, frame: &[u8]) -> Result<(), Refusal> {
    match connection.send_some(frame) {
        Ok(sent) if sent == frame.len() => Ok(()),
        Ok(_) => Err(Refusal::Local(Errno::NOBUFS)),
        Err(why) => Err(why),
    }
}

/// Where to bind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bind {
    /// The local address. With port 0 the system chooses one.
    pub address: SocketAddr,
    /// When its port is taken.
    pub port: TakePort,
    /// What else the program wants.
    pub options: Options,
}

/// When a local port is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakePort {
    /// When it connects: the system knows the peer then, so long lists of ports in use cost nothing. An
    /// unspecified address becomes the one that the peer is reached from.
    AtConnect,
    /// Now. Connections of an earlier run that wait for their last packets (TIME_WAIT) do not prevent it.
    Now,
    /// Now, if nothing of an earlier run has it any more.
    NowIfUnused,
}

/// Options that a program may set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Type of service (IPv4) or traffic class (IPv6).
    pub tos: Option<u8>,
    /// Others with this option may bind the same address.
    pub reuseaddr: bool,
    /// An IPv6 wildcard does not accept IPv4 connections. `None`: the system's default.
    pub afonly: Option<bool>,
}

/// The two addresses of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends {
    /// This end's.
    pub local: SocketAddr,
    /// The peer's.
    pub peer: SocketAddr,
}

/// What was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Got {
    /// So many bytes, at least one.
    Bytes(usize),
    /// Nothing yet.
    Nothing,
    /// The peer has closed its side.
    End,
}

/// How the owner learns that there is something to do.
#[derive(Debug, Clone, Copy)]
pub enum Watch<'a> {
    /// The engine watches this descriptor. It is for nothing else: all that is done to it is done here.
    Descriptor(BorrowedFd<'a>),
    /// Its lower layer reports by itself, as the simulator's does.
    Itself,
    /// Its lower layer reports by itself; of this descriptor the engine reports input and the end.
    Both(BorrowedFd<'a>),
}

impl Watch<'_> {
    /// The descriptor to watch.
    pub fn descriptor(self) -> Option<RawFd> {
        match self {
            Self::Descriptor(fd) | Self::Both(fd) => Some(fd.as_raw_fd()),
            Self::Itself => None,
        }
    }
}

/// How to close a connection that never became a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close {
    /// Behind what was sent: the peer still reads it.
    Finish,
    /// At once; the local port is free at once.
    Reset,
}

/// Why a connection cannot be made, or cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The peer's host refuses: no program listens.
    Refused,
    /// The peer has ended it.
    Gone,
    /// The peer cannot be reached.
    Unreachable(Errno),
    /// This host refuses.
    Local(Errno),
}

impl Refusal {
    /// From an error of the system.
    pub fn from_errno(errno: Errno) -> Self {
        match errno {
            Errno::CONNREFUSED => Self::Refused,
            Errno::CONNRESET | Errno::PIPE => Self::Gone,
            Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::HOSTDOWN | Errno::NETDOWN => {
                Self::Unreachable(errno)
            }
            errno => Self::Local(errno),
        }
    }

    /// The error of the system that it comes from.
    pub fn errno(self) -> Errno {
        match self {
            Self::Refused => Errno::CONNREFUSED,
            Self::Gone => Errno::CONNRESET,
            Self::Unreachable(errno) | Self::Local(errno) => errno,
        }
    }
}
