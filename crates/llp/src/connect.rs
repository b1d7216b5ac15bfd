//! How a connection begins: a socket with the program's options, bound, connected or listening, and the
//! set-up frames that are sent before the stream.
//!
//! ```text
//!   Unconnected::new ─ bind ─┬─ connect ──▶ Connection ─ send_frame, receive ─▶ the stream
//!                            └─ listen ───▶ Listening ── accept ─▶ Connection
//! ```
//!
//! All sockets are close-on-exec and have Nagle's algorithm disabled, and no call here waits. A socket that
//! the program has connected itself ([`Connection::adopt`]) keeps its `O_NONBLOCK`, so the calls say so each
//! time.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    self, SocketFlags, SocketType, ipproto,
    sockopt::{
        set_ip_tos, set_ipv6_tclass, set_ipv6_v6only, set_socket_linger, set_socket_reuseaddr,
        set_tcp_nodelay, socket_error, socket_protocol, socket_type,
    },
};

use crate::route::{family, is_any};
use crate::{tcp, udp};

/// No call waits, and none raises SIGPIPE.
const NOW: net::SendFlags = net::SendFlags::DONTWAIT.union(net::SendFlags::NOSIGNAL);
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Socket options that a program may set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Type of service (IPv4) or traffic class (IPv6).
    pub tos: Option<u8>,
    /// Other sockets with this option may bind the same address.
    pub reuseaddr: bool,
    /// An IPv6 wildcard does not accept IPv4 connections. `None`: the system's default.
    pub afonly: Option<bool>,
}

/// A socket that neither connects nor listens yet.
#[derive(Debug)]
pub struct Unconnected(OwnedFd);

impl Unconnected {
    /// A socket of the address's family with these options, not bound.
    pub fn new(address: SocketAddr, options: &Options) -> Result<Self, Errno> {
        let fd = net::socket_with(family(address), SocketType::STREAM, FLAGS, Some(ipproto::TCP))?;
        set_tcp_nodelay(&fd, true)?;
        if let Some(tos) = options.tos {
            set_tos(&fd, address, tos)?;
        }
        Ok(Self(fd))
    }

    /// Binds so that no other socket can bind the same address, in this process or another, and returns the
    /// address with its port. If the port of a wildcard address is taken, the error is `ADDRNOTAVAIL`, as
    /// with rdma_cm.
    ///
    /// Connections of an earlier run in TIME_WAIT prevent a plain bind, and `SO_REUSEADDR` would let two
    /// programs that do not listen yet share a port. So the first attempt does not set it. With
    /// `SO_REUSEADDR`, a bind succeeds only beside sockets that have it, too: those that came from a
    /// listener, which gets it in [`Self::listen`] (and those of other processes that share ports on purpose,
    /// until one of them listens).
    pub fn bind(&self, address: SocketAddr, options: &Options) -> Result<SocketAddr, Errno> {
        let fd = &self.0;
        if let Some(only) = options.afonly.filter(|_| address.is_ipv6()) {
            set_ipv6_v6only(fd, only)?;
        }
        set_socket_reuseaddr(fd, options.reuseaddr)?;
        match net::bind(fd, &address) {
            Err(Errno::ADDRINUSE) if !options.reuseaddr => {
                set_socket_reuseaddr(fd, true)?;
                let again = net::bind(fd, &address);
                set_socket_reuseaddr(fd, false)?;
                again.map_err(|errno| of_any(errno, address))?;
            }
            other => other.map_err(|errno| of_any(errno, address))?,
        }
        local_address(fd)
    }

    /// Binds to an address; the system chooses the port when the socket connects.
    pub fn bind_later(&self, address: SocketAddr, options: &Options) -> Result<(), Errno> {
        udp::set_option(self.0.as_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)?;
        self.bind(address, options).map(drop)
    }

    /// Sets the type of service. `local`: the socket's family.
    pub fn set_tos(&self, local: SocketAddr, tos: u8) -> Result<(), Errno> {
        set_tos(&self.0, local, tos)
    }

    /// Starts to connect. Returns `Ok` even if that takes time; [`Connection::progress`] reports the result.
    pub fn connect(self, peer: SocketAddr) -> Result<Connection, Errno> {
        match net::connect(&self.0, &peer) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(Connection(self.0)),
            Err(errno) => Err(errno),
        }
    }

    /// Starts to listen. The kernel keeps up to `backlog` connections that were not accepted yet.
    pub fn listen(self, backlog: usize) -> Result<Listening, Errno> {
        set_socket_reuseaddr(&self.0, true)?;
        // The connections inherit it. A socket that was made elsewhere does not have it yet.
        set_tcp_nodelay(&self.0, true)?;
        match net::listen(&self.0, i32::try_from(backlog).unwrap_or(i32::MAX)) {
            Ok(()) => Ok(Listening(self.0)),
            Err(errno) => Err(local_address(&self.0).map_or(errno, |address| of_any(errno, address))),
        }
    }
}

impl From<OwnedFd> for Unconnected {
    /// From a non-blocking TCP socket, which may be bound.
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

/// A socket that listens.
#[derive(Debug)]
pub struct Listening(OwnedFd);

impl Listening {
    /// The next connection, ready for set-up, and its peer's address. `AGAIN`: none is waiting.
    pub fn accept(&self) -> Result<(Connection, Option<SocketAddr>), Errno> {
        // It inherits the listener's options, so Nagle's algorithm is disabled (see `Unconnected::listen`).
        let (fd, peer) = net::acceptfrom_with(&self.0, FLAGS)?;
        Ok((Connection(fd), peer.and_then(|peer| SocketAddr::try_from(peer).ok())))
    }

    /// The local address of all its connections. `None`: it listens on a wildcard address, so theirs differ.
    pub fn address_of_connections(&self) -> Option<SocketAddr> {
        local_address(&self.0).ok().filter(|local| !local.ip().is_unspecified())
    }
}

impl AsRawFd for Listening {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A connection, established or still connecting. Only set-up frames are sent over it.
#[derive(Debug)]
pub struct Connection(OwnedFd);

impl Connection {
    /// `NOTSOCK`, `OPNOTSUPP`: not a TCP socket.
    pub fn check_type(socket: BorrowedFd<'_>) -> Result<(), Errno> {
        if socket_type(socket)? != SocketType::STREAM || socket_protocol(socket)? != Some(ipproto::TCP) {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(())
    }

    /// A TCP socket that the program has connected. `own`: a second descriptor of it; the program's stays the
    /// program's. `NOTSOCK`, `OPNOTSUPP`: not a TCP socket; `NOTCONN`: not connected.
    pub fn adopt(own: OwnedFd) -> Result<Self, Errno> {
        Self::check_type(own.as_fd())?;
        net::getpeername(&own)?.ok_or(Errno::NOTCONN)?;
        // Of the socket, so of the program's descriptor as well.
        set_tcp_nodelay(&own, true)?;
        // The program may have asked to be woken for more bytes than a frame has.
        udp::set_option(own.as_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1)?;
        Ok(Self(own))
    }

    /// Sends as much as there is room for; returns how many bytes that is.
    pub fn send_some(&self, bytes: &[u8]) -> Result<usize, Errno> {
        match net::send(&self.0, bytes, NOW) {
            Err(Errno::INTR) => self.send_some(bytes),
            Err(Errno::AGAIN) => Ok(0),
            other => other,
        }
    }

    /// As [`Self::send_frame`], if the connection is established; returns false if it is still connecting. An
    /// error can be that of connecting, which [`Self::progress`] then does not report any more.
    pub fn send_first_frame(&self, frame: &[u8]) -> Result<bool, Errno> {
        match net::send(&self.0, frame, NOW) {
            Ok(sent) if sent == frame.len() => Ok(true),
            Ok(_) => Err(Errno::NOBUFS),
            // Nothing has been sent before, so there is room: it is still connecting.
            Err(Errno::AGAIN) => Ok(false),
            Err(Errno::INTR) => self.send_first_frame(frame),
            Err(errno) => Err(errno),
        }
    }

    /// `Ok(true)`: established. `Ok(false)`: still connecting.
    pub fn progress(&self) -> Result<bool, Errno> {
        socket_error(&self.0)??;
        match net::getpeername(&self.0) {
            Ok(_) => Ok(true),
            Err(Errno::NOTCONN) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// Sends a whole frame. Set-up frames are far smaller than any socket buffer, so a connection on which a
    /// frame does not fit is unusable (`NOBUFS`).
    pub fn send_frame(&self, frame: &[u8]) -> Result<(), Errno> {
        loop {
            match net::send(&self.0, frame, NOW) {
                Ok(sent) if sent == frame.len() => return Ok(()),
                Ok(_) | Err(Errno::AGAIN) => return Err(Errno::NOBUFS),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Reads what has arrived, at most the buffer. `Ok(0)`: the peer closed. `AGAIN`: nothing yet.
    pub fn receive(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        loop {
            match net::recv(&self.0, &mut *buffer, net::RecvFlags::DONTWAIT) {
                Ok((_, received)) => return Ok(received),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    /// Half-closes: the peer reads everything that was sent and then an end of file.
    pub fn finish(&self) {
        let _ = net::shutdown(&self.0, net::Shutdown::Write);
    }

    /// Makes the coming close drop the connection at once, so that its local port can be used again.
    pub fn abandon(&self) {
        let _ = set_socket_linger(&self.0, Some(Duration::ZERO));
    }

    /// Sets the type of service. `local`: the socket's family.
    pub fn set_tos(&self, local: SocketAddr, tos: u8) -> Result<(), Errno> {
        set_tos(&self.0, local, tos)
    }

    /// Whether the peer has closed its side, or the connection is broken.
    pub fn hung_up(&self) -> bool {
        tcp::hung_up(self.0.as_fd())
    }

    /// The local address.
    pub fn local_address(&self) -> Result<SocketAddr, Errno> {
        local_address(&self.0)
    }

    /// The peer's address.
    pub fn peer_address(&self) -> Result<SocketAddr, Errno> {
        let address = net::getpeername(&self.0)?.ok_or(Errno::NOTCONN)?;
        SocketAddr::try_from(address).map_err(|_| Errno::AFNOSUPPORT)
    }
}

impl AsRawFd for Connection {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl From<OwnedFd> for Connection {
    /// From a connected, non-blocking socket.
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl From<Connection> for OwnedFd {
    /// For the stream, which begins with the next byte in each direction.
    fn from(connection: Connection) -> Self {
        connection.0
    }
}

fn set_tos(fd: &OwnedFd, local: SocketAddr, tos: u8) -> Result<(), Errno> {
    match local {
        SocketAddr::V4(_) => set_ip_tos(fd, tos),
        SocketAddr::V6(_) => {
            set_ipv6_tclass(fd, u32::from(tos))?;
            // An IPv6 socket may carry IPv4 as well; if not, this call fails, which does not matter.
            let _ = set_ip_tos(fd, tos);
            Ok(())
        }
    }
}

fn local_address(fd: &OwnedFd) -> Result<SocketAddr, Errno> {
    SocketAddr::try_from(net::getsockname(fd)?).map_err(|_| Errno::AFNOSUPPORT)
}

/// The error that rdma_cm returns where TCP returns `ADDRINUSE`.
fn of_any(errno: Errno, address: SocketAddr) -> Errno {
    if errno == Errno::ADDRINUSE && is_any(address.ip()) { Errno::ADDRNOTAVAIL } else { errno }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use rustix::net::sockopt::tcp_nodelay;

    use super::*;

    /// The ports of queue pair numbers are bound elsewhere. Both ends of a connection to one need the option:
    /// with Nagle's algorithm a second small message waited for the peer's delayed acknowledgement, 40 ms.
    #[test]
    fn connections_to_a_socket_that_was_made_elsewhere_send_at_once() {
        let fd = net::socket_with(net::AddressFamily::INET, SocketType::STREAM, FLAGS, Some(ipproto::TCP))
            .unwrap();
        net::bind(&fd, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let address = local_address(&fd).unwrap();
        let listening = Unconnected::from(fd).listen(1).unwrap();
        let connecting = Unconnected::new(address, &Options::default()).unwrap().connect(address).unwrap();
        let accepted = loop {
            match listening.accept() {
                Ok((accepted, _)) => break accepted,
                Err(errno) => assert_eq!(errno, Errno::AGAIN),
            }
        };
        for end in [connecting, accepted] {
            assert!(tcp_nodelay(OwnedFd::from(end)).unwrap());
        }
    }
}
