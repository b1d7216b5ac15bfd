//! The places where programs meet: loopback and veth, IPv4 and IPv6, behind one interface.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};
use std::sync::{Mutex, OnceLock};

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

/// A block of ports that no other test process takes as long as the block's name is taken.
struct PortBlock {
    _name: UnixListener,
    first: u16,
    used: u16,
}

/// Ports of a block.
const BLOCK: u16 = 100;

impl PortBlock {
    /// The first block from `start` on that no process has.
    fn reserve(start: u16) -> Option<PortBlock> {
        // Below the range from which the kernel takes ports for outgoing connections.
        const FIRST: u16 = 20_000;
        const COUNT: u16 = 120;
        (0..COUNT).map(|n| (start + n) % COUNT).find_map(|block| {
            let name = UnixAddr::from_abstract_name(format!("uwarp-test-ports-{block}")).ok()?;
            let name = UnixListener::bind_addr(&name).ok()?;
            Some(PortBlock { _name: name, first: FIRST + block * BLOCK, used: 0 })
        })
    }
}

static BLOCKS: Mutex<Vec<PortBlock>> = Mutex::new(Vec::new());

/// Whether [`free_port`] has returned this number in this process.
pub fn is_given_port(port: u16) -> bool {
    let blocks = BLOCKS.lock().unwrap_or_else(|e| e.into_inner());
    blocks.iter().any(|block| (block.first..block.first + block.used).contains(&port))
}

/// A TCP port nobody listens on here. Never the same one twice, in this process and in those that run beside
/// it: a server binds its port some time after this has returned.
///
/// # Panics
/// When other processes have all ports.
pub fn free_port() -> u16 {
    let mut blocks = BLOCKS.lock().unwrap_or_else(|e| e.into_inner());
    loop {
        if blocks.last().is_none_or(|block| block.used == BLOCK) {
            let new = PortBlock::reserve((std::process::id() % 97) as u16);
            blocks.push(new.expect("a block of ports that no other test process has"));
        }
        let Some(block) = blocks.last_mut() else { continue };
        let port = block.first + block.used;
        block.used += 1;
        // A wildcard IPv6 socket covers IPv4 as well.
        if TcpListener::bind(SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port)).is_ok() {
            return port;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The port that was found free for one suite was taken by another before its server had bound it.
    #[test]
    fn ports_are_handed_out_once_and_from_blocks_of_this_process() {
        let ports: BTreeSet<u16> = (0..150).map(|_| free_port()).collect();
        assert_eq!(ports.len(), 150);
        assert!(ports.iter().all(|port| is_given_port(*port)));
        let blocks: BTreeSet<u16> = ports.iter().map(|port| (port - 20_000) / BLOCK).collect();
        for block in blocks {
            let name = UnixAddr::from_abstract_name(format!("uwarp-test-ports-{block}")).unwrap();
            assert!(UnixListener::bind_addr(&name).is_err(), "block {block} is not reserved");
        }
    }
}
