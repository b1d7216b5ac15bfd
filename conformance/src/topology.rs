//! The places where programs meet: loopback and veth, IPv4 and IPv6, behind one interface.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

use crate::netns::{NetNs, Veth};
use crate::{Failure, Outcome};

/// Where server and client are, and which address family they use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Topology {
    /// `127.0.0.1`, in the namespace the tests run in: needs no rights.
    Loopback4,
    /// `::1`, likewise.
    Loopback6,
    /// Two namespaces, MTU 1500, IPv4.
    Veth1500V4,
    /// Two namespaces, MTU 1500, IPv6.
    Veth1500V6,
    /// Two namespaces, MTU 9000, IPv4.
    Veth9000V4,
    /// Two namespaces, MTU 9000, IPv6.
    Veth9000V6,
}

impl Topology {
    /// All of them, in the order of the tables.
    pub const ALL: [Topology; 6] = [
        Topology::Loopback4,
        Topology::Loopback6,
        Topology::Veth1500V4,
        Topology::Veth1500V6,
        Topology::Veth9000V4,
        Topology::Veth9000V6,
    ];

    /// Whether addresses are IPv6.
    pub fn is_v6(self) -> bool {
        matches!(self, Topology::Loopback6 | Topology::Veth1500V6 | Topology::Veth9000V6)
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Topology::Loopback4 => "lo-v4",
            Topology::Loopback6 => "lo-v6",
            Topology::Veth1500V4 => "veth1500-v4",
            Topology::Veth1500V6 => "veth1500-v6",
            Topology::Veth9000V4 => "veth9000-v4",
            Topology::Veth9000V6 => "veth9000-v6",
        })
    }
}

/// The namespaces of one test run, made when the first case needs them, removed when the last owner is
/// dropped.
#[derive(Default)]
pub struct Network {
    veth1500: OnceLock<Result<Veth, Failure>>,
    veth9000: OnceLock<Result<Veth, Failure>>,
}

/// One topology ready for use.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    /// Where the server runs; `None` is here.
    pub server: Option<&'a NetNs>,
    /// Where the client runs.
    pub client: Option<&'a NetNs>,
    /// The server's address.
    pub address: &'static str,
    /// An address that means "all of mine" in the family of `address`.
    pub any: &'static str,
}

impl Network {
    /// Makes what the topology needs, or finds it made.
    pub fn place(&self, topology: Topology) -> Outcome<Place<'_>> {
        let any = if topology.is_v6() { "::" } else { "0.0.0.0" };
        let veth = match topology {
            Topology::Loopback4 => {
                return Ok(Place { server: None, client: None, address: "127.0.0.1", any });
            }
            Topology::Loopback6 => return Ok(Place { server: None, client: None, address: "::1", any }),
            Topology::Veth1500V4 | Topology::Veth1500V6 => self.veth1500.get_or_init(|| Veth::new(1500)),
            Topology::Veth9000V4 | Topology::Veth9000V6 => self.veth9000.get_or_init(|| Veth::new(9000)),
        };
        let veth = veth.as_ref().map_err(Failure::clone)?;
        let address = if topology.is_v6() { Veth::SERVER6 } else { Veth::SERVER4 };
        Ok(Place { server: Some(&veth.server), client: Some(&veth.client), address, any })
    }
}

/// A TCP port on which no program listens here, below the range from which the kernel takes ports for
/// outgoing connections. Never the same port twice in a process.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Each process starts at another port, so that two suites at once rarely try the same ports.
    let start = (std::process::id() % 97) as u16 * 120;
    loop {
        let port = 20_000 + (start + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000;
        // A wildcard IPv6 socket covers IPv4 as well.
        if TcpListener::bind(SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port)).is_ok() {
            return port;
        }
    }
}
