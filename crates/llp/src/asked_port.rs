//! Asks a system whether a process has a UDP port: a datagram from a socket that is connected to it. A system
//! that has no such port refuses it (ICMP "port unreachable", RFC 1122 section 4.1.3.1).

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd as _;

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto};
use uwarp_process::Descriptor;

use crate::udp::set_option;

/// A port that was asked for.
#[derive(Debug)]
pub struct AskedPort(Descriptor);

/// What has come of that so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// Nothing: the port is taken, or the answer is on its way, or none comes from there.
    Nothing,
    /// No process has the port.
    Refused,
    /// A system on the way says so, or the own one.
    Unreachable(Errno),
}

impl AskedPort {
    /// Asks from this address of the host. `datagram` is made for the socket's port; the process that has the
    /// asked port gets it.
    pub fn ask(from: IpAddr, to: SocketAddr, datagram: impl FnOnce(u16) -> Vec<u8>) -> Result<Self, Errno> {
        let (family, level, errors) = match to {
            SocketAddr::V4(_) => (AddressFamily::INET, libc::IPPROTO_IP, libc::IP_RECVERR),
            SocketAddr::V6(_) => (AddressFamily::INET6, libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
        };
        let flags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
        let make = || net::socket_with(family, SocketType::DGRAM, flags, Some(ipproto::UDP));
        let fd = Descriptor::made(make)?;
        // Without it, the system reports a refusal alone, and not that a host is out of reach.
        set_option(fd.as_fd(), level, errors, 1)?;
        let source = match (SocketAddr::new(from, 0), to) {
            (SocketAddr::V6(mut from), SocketAddr::V6(to)) => {
                from.set_scope_id(to.scope_id());
                SocketAddr::V6(from)
            }
            (source, _) => source,
        };
        net::bind(&fd, &source)?;
        net::connect(&fd, &to)?;
        let own = SocketAddr::try_from(net::getsockname(&fd)?).map_err(|_| Errno::AFNOSUPPORT)?;
        if (own.ip(), own.port()) == (to.ip(), to.port()) {
            // The system has given us the very port, of this host and free: we would hear ourselves, and no
            // refusal. It gives another one while we have this.
            return Self::ask(from, to, datagram);
        }
        net::send(&fd, &datagram(own.port()), SendFlags::empty())?;
        Ok(Self(fd))
    }

    /// Whether something has come.
    pub fn look(&self) -> Said {
        let mut buffer = [0; 64];
        // What the process answers is of no interest, and more than this is not.
        for _ in 0..4 {
            match net::recv(&self.0, &mut buffer, RecvFlags::empty()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::CONNREFUSED) => return Said::Refused,
                Err(errno @ (Errno::HOSTUNREACH | Errno::NETUNREACH)) => return Said::Unreachable(errno),
                Err(_) => return Said::Nothing,
            }
        }
        Said::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::time::{Duration, Instant};

    /// The system gives a free port of some 28,000: in three or four of these questions the one that is
    /// asked.
    #[test]
    fn nobody_asks_himself() {
        for _ in 0..100_000 {
            let to =
                UdpSocket::bind(("127.0.0.1", 0)).and_then(|socket| socket.local_addr()).expect("a port");
            // Another process may have it by now, and have gone.
            let Ok(asked) = AskedPort::ask(to.ip(), to, |_| vec![7; 24]) else { continue };
            let own = net::getsockname(&asked.0).ok().and_then(|own| SocketAddr::try_from(own).ok());
            assert_ne!(own, Some(to));
        }
    }

    #[test]
    fn a_port_that_nobody_has_is_refused() {
        for address in ["127.0.0.1", "::1"] {
            let socket = UdpSocket::bind((address, 0)).expect("a port");
            let to = socket.local_addr().expect("its address");
            let asked = AskedPort::ask(to.ip(), to, |_| vec![7; 24]).expect("a question");
            let (len, _) = socket.recv_from(&mut [0; 64]).expect("the question");
            assert_eq!((len, asked.look()), (24, Said::Nothing));
            drop(socket);
            let asked = AskedPort::ask(to.ip(), to, |_| vec![7; 24]).expect("a question");
            let until = Instant::now() + Duration::from_secs(20);
            while asked.look() == Said::Nothing {
                assert!(Instant::now() < until, "no refusal");
                std::thread::sleep(Duration::from_millis(1));
            }
            let asked = AskedPort::ask(to.ip(), to, |_| vec![7; 24]).expect("a question");
            std::thread::sleep(Duration::from_millis(1));
            assert!(matches!(asked.look(), Said::Refused | Said::Nothing));
        }
    }
}
