//! TCP as a carrier.
//!
//! All sockets are close-on-exec and have Nagle's algorithm disabled, and no call here waits. A socket that
//! the program has connected itself ([`adopt`]) keeps its `O_NONBLOCK`, so the calls say so each time.
//!
//! # Who else may have a port
//! Any user of this host may bind a port beside a socket that is bound with `SO_REUSEADDR` and does not
//! listen, and may then listen before it. (Tried on Linux 6.18, as another user, with and without
//! `SO_REUSEADDR` and `SO_REUSEPORT`, at all addresses and one; the tests below try it again.) So a port of
//! ours has the option only from the moment on when it listens: then nobody can bind it any more.
//!
//! | our socket | another user can bind the port | listen on it |
//! |---|---|---|
//! | bound without `SO_REUSEADDR` | no | – |
//! | the same, the option set later | yes | yes |
//! | bound with it, the option removed at once | no; who was bound before stays | no |
//! | listens | no | no |

use std::cell::OnceCell;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    self, SocketFlags, SocketType, ipproto,
    sockopt::{
        set_ip_tos, set_ipv6_tclass, set_ipv6_v6only, set_socket_linger, set_socket_reuseaddr,
        set_tcp_nodelay, socket_protocol, socket_type,
    },
};
use uwarp_process::Descriptor;

use super::{Bind, Bound, Carrier, Close, Ends, Got, Listening, Options, Refusal, SetUp, TakePort, Watch};
use crate::link::Link;
use crate::route::{family, is_any};
use crate::{tcp, udp};

/// No call waits, and none raises SIGPIPE.
const NOW: net::SendFlags = net::SendFlags::DONTWAIT.union(net::SendFlags::NOSIGNAL);
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// The carrier.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tcp;

impl Carrier for Tcp {
    /// If the port of a wildcard address is taken, the error is `ADDRNOTAVAIL`, as with rdma_cm.
    fn bind(&self, at: &Bind) -> Result<Box<dyn Bound>, Errno> {
        let Bind { address, port, options } = *at;
        let fd = Descriptor::made(|| {
            net::socket_with(family(address), SocketType::STREAM, FLAGS, Some(ipproto::TCP))
        })?;
        set_tcp_nodelay(&fd, true)?;
        if let Some(tos) = options.tos {
            set_tos(&fd, address, tos)?;
        }
        let unbound = BoundSocket { fd, local: address, beside_earlier: false };
        Ok(Box::new(match port {
            TakePort::AtConnect if address.ip().is_unspecified() => unbound,
            TakePort::AtConnect => {
                // A wish: without it the port is taken earlier, and for itself. Emulations of the kernel
                // refuse it (qemu-user).
                let _ =
                    udp::set_option(unbound.fd.as_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1);
                unbound.bind(&options, true)?
            }
            TakePort::Now => unbound.bind(&options, true)?,
            TakePort::NowIfUnused => unbound.bind(&options, false)?,
        }))
    }
}

/// A connected TCP socket of the program. `own`: a second descriptor of it; the program's stays the
/// program's. `NOTSOCK`, `OPNOTSUPP`: not a TCP socket; `NOTCONN`: not connected.
pub fn adopt(own: OwnedFd) -> Result<Box<dyn SetUp>, Errno> {
    check_type(own.as_fd())?;
    let peer = net::getpeername(&own)?.ok_or(Errno::NOTCONN)?;
    // Of the socket, so of the program's descriptor as well.
    set_tcp_nodelay(&own, true)?;
    // The program may have asked to be woken for more bytes than a frame has.
    udp::set_option(own.as_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, 1)?;
    Ok(Box::new(Connection::new(Descriptor::new(own), None, SocketAddr::try_from(peer).ok())))
}

/// Whether [`adopt`] can take it. `NOTSOCK`, `OPNOTSUPP`: not a TCP socket.
pub fn check_type(socket: BorrowedFd<'_>) -> Result<(), Errno> {
    if socket_type(socket)? != SocketType::STREAM || socket_protocol(socket)? != Some(ipproto::TCP) {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(())
}

/// The connection of a link that carries no stream, for a last frame.
pub(crate) fn set_up(fd: Descriptor) -> Box<dyn SetUp> {
    Box::new(Connection::new(fd, None, None))
}

/// A socket that neither connects nor listens yet.
#[derive(Debug)]
struct BoundSocket {
    fd: Descriptor,
    local: SocketAddr,
    /// Connections of an earlier run have the port, too.
    beside_earlier: bool,
}

impl BoundSocket {
    /// Binds so that no other socket can bind the same address, in this process or another.
    ///
    /// Connections of an earlier run in TIME_WAIT prevent a plain bind, and `SO_REUSEADDR` would let two
    /// programs that do not listen yet share a port. So the first attempt does not set it. With
    /// `SO_REUSEADDR`, a bind succeeds only beside sockets that have it, too: those that came from a
    /// listener, which gets it in [`Bound::listen`] (and those of other processes that share ports on
    /// purpose: they cannot listen as long as this socket does not have the option).
    fn bind(mut self, options: &Options, beside_earlier: bool) -> Result<Self, Errno> {
        let (fd, address) = (&self.fd, self.local);
        if let Some(only) = options.afonly.filter(|_| address.is_ipv6()) {
            set_ipv6_v6only(fd, only)?;
        }
        if options.reuseaddr {
            set_socket_reuseaddr(fd, true)?;
        }
        match net::bind(fd, &address) {
            Err(Errno::ADDRINUSE) if !options.reuseaddr && beside_earlier => {
                set_socket_reuseaddr(fd, true)?;
                let again = net::bind(fd, &address);
                set_socket_reuseaddr(fd, false)?;
                again.map_err(|errno| of_any(errno, address))?;
                self.beside_earlier = true;
            }
            other => other.map_err(|errno| of_any(errno, address))?,
        }
        self.local = local_address(&self.fd)?;
        Ok(self)
    }

    fn try_to_listen(&self, backlog: i32) -> Result<(), Errno> {
        // The option comes after the beginning: between the two, another user could bind the port and listen.
        // It is for the connections, which inherit it, so that a later run can bind beside them.
        match net::listen(&self.fd, backlog) {
            Ok(()) => set_socket_reuseaddr(&self.fd, true),
            // The system lets a socket listen beside those of an earlier run only with the option. Whoever
            // listens in this moment gets the port, and this call the error.
            Err(Errno::ADDRINUSE) if self.beside_earlier => {
                set_socket_reuseaddr(&self.fd, true)?;
                net::listen(&self.fd, backlog).inspect_err(|_| _ = set_socket_reuseaddr(&self.fd, false))
            }
            Err(errno) => Err(errno),
        }
    }
}

impl Bound for BoundSocket {
    fn local(&self) -> SocketAddr {
        self.local
    }

    fn set_tos(&self, tos: u8) -> Result<(), Errno> {
        set_tos(&self.fd, self.local, tos)
    }

    fn listen(self: Box<Self>, backlog: usize) -> Result<Box<dyn Listening>, (Errno, Box<dyn Bound>)> {
        match self.try_to_listen(i32::try_from(backlog).unwrap_or(i32::MAX)) {
            Ok(()) => {
                let known = Some(self.local).filter(|local| !local.ip().is_unspecified());
                Ok(Box::new(ListeningSocket { fd: self.fd, local: known }))
            }
            Err(errno) => Err((of_any(errno, self.local), self)),
        }
    }

    fn connect(self: Box<Self>, to: SocketAddr) -> Result<Box<dyn SetUp>, (Refusal, Box<dyn Bound>)> {
        match net::connect(&self.fd, &to) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(Box::new(Connection::new(self.fd, None, Some(to)))),
            Err(errno) => Err((Refusal::from_errno(errno), self)),
        }
    }

    fn watch(&self) -> Watch<'_> {
        Watch::Descriptor(self.fd.as_fd())
    }
}

/// A socket that listens.
#[derive(Debug)]
struct ListeningSocket {
    fd: Descriptor,
    /// The local address of all its connections. `None`: it listens on a wildcard address, so theirs differ.
    local: Option<SocketAddr>,
}

impl Listening for ListeningSocket {
    fn accept(&self) -> Result<Option<Box<dyn SetUp>>, Errno> {
        loop {
            // A connection inherits the listener's options, so Nagle's algorithm is disabled.
            match Descriptor::made_with(|| net::acceptfrom_with(&self.fd, FLAGS)) {
                Ok((fd, peer)) => {
                    let peer = peer.and_then(|peer| SocketAddr::try_from(peer).ok());
                    return Ok(Some(Box::new(Connection::new(fd, self.local, peer))));
                }
                Err(Errno::AGAIN) => return Ok(None),
                // That connection is gone; the next one may be good (accept(2) lists these errors).
                Err(
                    Errno::INTR
                    | Errno::CONNABORTED
                    | Errno::PROTO
                    | Errno::NETDOWN
                    | Errno::NETUNREACH
                    | Errno::HOSTDOWN
                    | Errno::HOSTUNREACH
                    | Errno::NONET
                    | Errno::NOPROTOOPT
                    | Errno::OPNOTSUPP,
                ) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    fn watch(&self) -> Watch<'_> {
        Watch::Descriptor(self.fd.as_fd())
    }
}

/// A connected or connecting socket.
#[derive(Debug)]
struct Connection {
    fd: Descriptor,
    /// Asked for when it is needed: each costs a system call.
    local: OnceCell<SocketAddr>,
    peer: OnceCell<SocketAddr>,
}

impl Connection {
    fn new(fd: Descriptor, local: Option<SocketAddr>, peer: Option<SocketAddr>) -> Self {
        let known = |address: Option<_>| address.map_or_else(OnceCell::new, OnceCell::from);
        Self { fd, local: known(local), peer: known(peer) }
    }

    fn peer(&self) -> SocketAddr {
        *self.peer.get_or_init(|| {
            let address = net::getpeername(&self.fd).ok().flatten();
            address.and_then(|address| SocketAddr::try_from(address).ok()).unwrap_or(UNKNOWN)
        })
    }
}

/// In place of an address that the system does not tell: that of a peer which has reset its connection.
const UNKNOWN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

impl SetUp for Connection {
    fn ends(&self) -> Ends {
        let local = *self.local.get_or_init(|| local_address(&self.fd).unwrap_or(UNKNOWN));
        Ends { local, peer: self.peer() }
    }

    fn set_tos(&self, tos: u8) -> Result<(), Errno> {
        set_tos(&self.fd, self.peer(), tos)
    }

    fn send_some(&self, bytes: &[u8]) -> Result<usize, Refusal> {
        loop {
            match net::send(&self.fd, bytes, NOW) {
                Ok(sent) => return Ok(sent),
                // No room, or it is still connecting.
                Err(Errno::AGAIN) => return Ok(0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Refusal::from_errno(errno)),
            }
        }
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<Got, Refusal> {
        loop {
            match net::recv(&self.fd, &mut *buffer, net::RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Ok(Got::End),
                Ok((_, received)) => return Ok(Got::Bytes(received)),
                Err(Errno::AGAIN) => return Ok(Got::Nothing),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Refusal::from_errno(errno)),
            }
        }
    }

    fn ended(&self) -> bool {
        tcp::ended(self.fd.as_fd()).is_some()
    }

    fn close(self: Box<Self>, how: Close) {
        match how {
            Close::Finish => tcp::shutdown_send(self.fd.as_fd()),
            // If this fails, the close is an ordinary one.
            Close::Reset => _ = set_socket_linger(&self.fd, Some(Duration::ZERO)),
        }
    }

    fn watch(&self) -> Watch<'_> {
        Watch::Descriptor(self.fd.as_fd())
    }

    fn into_link(self: Box<Self>) -> Link {
        Link::Tcp(self.fd)
    }
}

/// `of_family`: an address of the socket's family.
fn set_tos(fd: &Descriptor, of_family: SocketAddr, tos: u8) -> Result<(), Errno> {
    match of_family {
        SocketAddr::V4(_) => set_ip_tos(fd, tos),
        SocketAddr::V6(_) => {
            set_ipv6_tclass(fd, u32::from(tos))?;
            // An IPv6 socket may carry IPv4 as well; if not, this call fails, which does not matter.
            let _ = set_ip_tos(fd, tos);
            Ok(())
        }
    }
}

fn local_address(fd: &Descriptor) -> Result<SocketAddr, Errno> {
    SocketAddr::try_from(net::getsockname(fd)?).map_err(|_| Errno::AFNOSUPPORT)
}

/// The error that rdma_cm returns where TCP returns `ADDRINUSE`.
fn of_any(errno: Errno, address: SocketAddr) -> Errno {
    if errno == Errno::ADDRINUSE && is_any(address.ip()) { Errno::ADDRNOTAVAIL } else { errno }
}

#[cfg(test)]
mod tests;
