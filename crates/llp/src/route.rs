//! Addresses of this host, and the routing table.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};
use uwarp_process::{Mutex, OnceValue, PerProcess};

/// The address from which this host would send to `peer`; `bound` is the address that the program has bound,
/// if any. Sends nothing. `datagrams`: they can be sent to a broadcast address; no stream leads there.
pub fn source_for(bound: Option<IpAddr>, peer: SocketAddr, datagrams: bool) -> Result<IpAddr, Errno> {
    /// The last result, for programs that make thousands of connections to one peer: the system is asked at
    /// most ten times a second.
    static LAST: PerProcess<Mutex<Option<(Instant, Route)>, 29>> = PerProcess::new(Mutex::default);
    type Route = (Option<IpAddr>, SocketAddr, bool, IpAddr);
    const FRESH: Duration = Duration::from_millis(100);
    let last = || LAST.lock();
    let to = SocketAddr::new(peer.ip(), 0);
    let scoped = matches!(peer, SocketAddr::V6(v6) if v6.scope_id() != 0);
    // A group and 255.255.255.255 can be reached from any address (ip(7)).
    let for_all = datagrams && peer.ip() == IpAddr::V4(Ipv4Addr::BROADCAST);
    let everywhere = peer.ip().is_multicast() || for_all;
    if let Some(bound) = bound.filter(|bound| everywhere && !bound.is_unspecified()) {
        return Ok(bound);
    }
    let bound = bound.filter(IpAddr::is_loopback);
    if let Some((at, (from, address, alike, source))) = *last()
        && (from, address, alike) == (bound, to, datagrams)
        && !scoped
        && at.elapsed() < FRESH
    {
        return Ok(source);
    }
    let source = ask_for_source(bound, peer, datagrams)?;
    *last() = Some((Instant::now(), (bound, to, datagrams, source))).filter(|_| !scoped);
    Ok(source)
}

/// See [`source_for`]; `bound` is a loopback address.
fn ask_for_source(bound: Option<IpAddr>, peer: SocketAddr, broadcasts: bool) -> Result<IpAddr, Errno> {
    let flags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
    let fd = net::socket_with(family(peer), SocketType::DGRAM, flags, None)?;
    net::sockopt::set_socket_broadcast(&fd, broadcasts)?;
    // A loopback address has no route to another host; after the bind, the connect below fails.
    if let Some(bound) = bound {
        net::bind(&fd, &SocketAddr::new(bound, 0))?;
    }
    // Some systems have no route to port 0; any other port works.
    let mut probe = peer;
    if probe.port() == 0 {
        probe.set_port(9);
    }
    net::connect(&fd, &probe)?;
    let local = SocketAddr::try_from(net::getsockname(&fd)?).map_err(|_| Errno::AFNOSUPPORT)?;
    Ok(local.ip())
}

/// Bytes of payload in the longest datagram from `local` to `peer` that needs no fragments, as far as this
/// host knows: its interface's, or a shorter one that the system has learned. `None`: it does not say.
pub fn longest_datagram(local: IpAddr, peer: SocketAddr) -> Option<usize> {
    /// What IP and UDP put in front.
    const HEADERS: (usize, usize) = (28, 48);
    let flags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
    let fd = net::socket_with(family(peer), SocketType::DGRAM, flags, None).ok()?;
    let mut from = SocketAddr::new(local, 0);
    if let (SocketAddr::V6(from), SocketAddr::V6(peer)) = (&mut from, peer) {
        // A link-local address is one of the peer's link.
        from.set_scope_id(peer.scope_id());
    }
    net::bind(&fd, &from).ok()?;
    net::connect(&fd, &peer).ok()?;
    let (mtu, headers) = match peer {
        SocketAddr::V4(_) => (net::sockopt::ip_mtu(&fd), HEADERS.0),
        SocketAddr::V6(_) => (net::sockopt::ipv6_mtu(&fd), HEADERS.1),
    };
    usize::try_from(mtu.ok()?).ok()?.checked_sub(headers)
}

/// Whether Linux' rdma_cm treats the address as "any address": the wildcard and the loopback addresses
/// (`cma_any_addr`). An id that is bound to one has no device until its peer's address is resolved.
pub fn is_any(ip: IpAddr) -> bool {
    ip.is_unspecified() || ip.is_loopback()
}

/// Whether an IPv6 socket excludes IPv4 if the program does not choose.
pub fn ipv6_only_by_default() -> bool {
    static BY_DEFAULT: OnceValue<bool> = OnceValue::new();
    *BY_DEFAULT.get_or_make(|| {
        std::fs::read_to_string("/proc/sys/net/ipv6/bindv6only").is_ok_and(|value| value.trim() == "1")
    })
}

/// The peer that a wildcard address means: this host.
pub fn loopback_if_wildcard(mut peer: SocketAddr) -> SocketAddr {
    if peer.ip().is_unspecified() {
        peer.set_ip(match peer {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::LOCALHOST),
        });
    }
    peer
}

/// The wildcard address of the peer's family, without a port.
pub fn wildcard_for(peer: SocketAddr) -> SocketAddr {
    match peer {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    }
}

pub(crate) fn family(address: SocketAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

/// The addresses of a connected socket: its own, the peer's.
pub fn addresses(fd: BorrowedFd<'_>) -> [Option<SocketAddr>; 2] {
    let own = net::getsockname(fd).ok().and_then(|address| SocketAddr::try_from(address).ok());
    let peer = net::getpeername(fd).ok().flatten();
    [own, peer.and_then(|address| SocketAddr::try_from(address).ok())]
}
