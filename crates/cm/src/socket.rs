//! The system calls of connection set-up, and what the routing table says.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, SocketFlags, SocketType, ipproto,
    sockopt::{
        set_ip_tos, set_ipv6_tclass, set_ipv6_v6only, set_socket_linger, set_socket_reuseaddr,
        set_tcp_nodelay, socket_error,
    },
};

use crate::cm::Options;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// A TCP socket with these options, not bound.
pub fn tcp(address: SocketAddr, options: &Options) -> Result<OwnedFd, Errno> {
    let fd = net::socket_with(family(address), SocketType::STREAM, FLAGS, Some(ipproto::TCP))?;
    set_tcp_nodelay(&fd, true)?;
    if let Some(tos) = options.tos {
        set_tos(&fd, address, tos)?;
    }
    Ok(fd)
}

/// Sets the type of service of what is sent from here, or by connections that come in here. `local`: of which family the socket
/// is.
pub fn set_tos(fd: &OwnedFd, local: SocketAddr, tos: u8) -> Result<(), Errno> {
    match local {
        SocketAddr::V4(_) => set_ip_tos(fd, tos),
        SocketAddr::V6(_) => {
            set_ipv6_tclass(fd, u32::from(tos))?;
            // An IPv6 socket may carry IPv4 as well; one that may not says so.
            let _ = set_ip_tos(fd, tos);
            Ok(())
        }
    }
}

/// Binds so that nobody else can bind the same, in this process or another, and returns the address with its port. A port of any
/// address that is taken is `ADDRNOTAVAIL`, as [`crate::ports`] says it.
///
/// Connections of an earlier run in TIME_WAIT are in the way of a plain bind, and `SO_REUSEADDR` would let two programs
/// that do not listen yet share a port. So it is tried without first; with `SO_REUSEADDR` a bind succeeds only
/// beside sockets that have it too: those that came from a listener, which gets it in [`listen`] (and those of
/// other processes that share ports on purpose, until one of them listens; this one's are in [`crate::ports`]).
pub fn bind(fd: &OwnedFd, address: SocketAddr, options: &Options) -> Result<SocketAddr, Errno> {
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

/// What rdma_cm says where TCP says `ADDRINUSE`.
fn of_any(errno: Errno, address: SocketAddr) -> Errno {
    if errno == Errno::ADDRINUSE && is_any(address.ip()) { Errno::ADDRNOTAVAIL } else { errno }
}

/// Starts to listen.
pub fn listen(fd: &OwnedFd, backlog: usize) -> Result<(), Errno> {
    set_socket_reuseaddr(fd, true)?;
    net::listen(fd, i32::try_from(backlog).unwrap_or(i32::MAX))
        .map_err(|errno| local_address(fd).map_or(errno, |address| of_any(errno, address)))
}

/// Starts to connect; `Ok(())` also when that takes time.
pub fn connect(fd: &OwnedFd, peer: SocketAddr) -> Result<(), Errno> {
    match net::connect(fd, &peer) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(()),
        Err(error) => Err(error),
    }
}

/// How far a connection that was started has come: `Ok(true)` connected, `Ok(false)` not yet.
pub fn connect_progress(fd: &OwnedFd) -> Result<bool, Errno> {
    socket_error(fd)??;
    match net::getpeername(fd) {
        Ok(_) => Ok(true),
        Err(Errno::NOTCONN) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A connection from a listener, ready for set-up. `AGAIN`: none is waiting.
pub fn accept(fd: &OwnedFd) -> Result<OwnedFd, Errno> {
    // It has the listener's options; Nagle's delay is off there.
    net::accept_with(fd, FLAGS)
}

/// Sends a whole frame. Set-up frames are far smaller than any socket buffer, so a frame that does not fit finds a
/// connection that is of no use.
pub fn send_all(fd: &OwnedFd, frame: &[u8]) -> Result<(), Errno> {
    loop {
        match net::send(fd, frame, net::SendFlags::NOSIGNAL) {
            Ok(sent) if sent == frame.len() => return Ok(()),
            Ok(_) | Err(Errno::AGAIN) => return Err(Errno::NOBUFS),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Reads what is there, at most the buffer. `Ok(0)`: the peer closed. `AGAIN`: nothing yet.
pub fn receive(fd: &OwnedFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    loop {
        match net::recv(fd, &mut *buffer, net::RecvFlags::empty()) {
            Ok((_, received)) => return Ok(received),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

/// Says that no more comes, so that the peer reads what was sent and then an end of file.
pub fn finish(fd: &OwnedFd) {
    let _ = net::shutdown(fd, net::Shutdown::Write);
}

/// Makes the coming close forget the connection at once, so that its local port can be used again.
pub fn abandon(fd: &OwnedFd) {
    let _ = set_socket_linger(fd, Some(std::time::Duration::ZERO));
}

/// The local address.
pub fn local_address(fd: impl AsFd) -> Result<SocketAddr, Errno> {
    SocketAddr::try_from(net::getsockname(fd)?).map_err(|_| Errno::AFNOSUPPORT)
}

/// The peer's address.
pub fn peer_address(fd: impl AsFd) -> Result<SocketAddr, Errno> {
    let address = net::getpeername(fd)?.ok_or(Errno::NOTCONN)?;
    SocketAddr::try_from(address).map_err(|_| Errno::AFNOSUPPORT)
}

/// The address from which this host would talk to `peer`; `bound` is the address that the program has bound, if any. Sends
/// nothing.
pub fn source_for(bound: Option<IpAddr>, peer: SocketAddr) -> Result<IpAddr, Errno> {
    /// The last answer, for programs that make thousands of connections to one peer: the system is asked ten times a second.
    static LAST: Mutex<Option<(Instant, Route)>> = Mutex::new(None);
    type Route = (Option<IpAddr>, SocketAddr, IpAddr);
    const FRESH: Duration = Duration::from_millis(100);
    let to = SocketAddr::new(peer.ip(), 0);
    let scoped = matches!(peer, SocketAddr::V6(v6) if v6.scope_id() != 0);
    let bound = bound.filter(IpAddr::is_loopback);
    if let Some((at, (from, address, source))) = *LAST.lock()
        && (from, address) == (bound, to)
        && !scoped
        && at.elapsed() < FRESH
    {
        return Ok(source);
    }
    let source = ask_for_source(bound, peer)?;
    *LAST.lock() = Some((Instant::now(), (bound, to, source))).filter(|_| !scoped);
    Ok(source)
}

/// See [`source_for`]; `bound` is a loopback address.
fn ask_for_source(bound: Option<IpAddr>, peer: SocketAddr) -> Result<IpAddr, Errno> {
    let fd = net::socket_with(family(peer), SocketType::DGRAM, FLAGS, None)?;
    // A loopback address has no way to another host, and says so here.
    if let Some(bound) = bound {
        net::bind(&fd, &SocketAddr::new(bound, 0))?;
    }
    // Port 0 has no route on some systems; any other will do.
    let mut probe = peer;
    if probe.port() == 0 {
        probe.set_port(9);
    }
    net::connect(&fd, &probe)?;
    Ok(local_address(&fd)?.ip())
}

/// Whether Linux' rdma_cm takes the address for "any address": the wildcard and the loopback addresses (`cma_any_addr`). An id that
/// is bound to one has no device until its peer's address is resolved.
pub fn is_any(ip: IpAddr) -> bool {
    ip.is_unspecified() || ip.is_loopback()
}

/// Whether an IPv6 socket leaves IPv4 alone where the program does not say so.
pub fn ipv6_only_by_default() -> bool {
    static BY_DEFAULT: OnceLock<bool> = OnceLock::new();
    *BY_DEFAULT.get_or_init(|| {
        std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only").is_ok_and(|value| value.trim() == "1")
    })
}

/// The peer that is meant by a wildcard address: this host.
pub fn loopback_if_wildcard(mut peer: SocketAddr) -> SocketAddr {
    if peer.ip().is_unspecified() {
        peer.set_ip(match peer {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        });
    }
    peer
}

fn family(address: SocketAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}
