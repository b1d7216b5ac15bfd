//! The network interfaces of this host (of this network namespace).

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;

/// A network interface with its addresses, link-local IPv6 addresses included.
pub struct Interface {
    pub name: String,
    pub up: bool,
    pub loopback: bool,
    pub addresses: Vec<IpAddr>,
}

impl Interface {
    /// Peers on other hosts can reach it: it is up and has an address that is not link-local.
    pub fn is_usable(&self) -> bool {
        self.up && !self.loopback && self.addresses.iter().any(|address| !is_link_local(address))
    }
}

/// All interfaces, by name.
pub fn list() -> io::Result<Vec<Interface>> {
    let mut interfaces = BTreeMap::new();
    for entry in getifaddrs()? {
        let interface = interfaces.entry(entry.interface_name.clone()).or_insert_with(|| Interface {
            name: entry.interface_name,
            up: works(entry.flags),
            loopback: entry.flags.contains(InterfaceFlags::IFF_LOOPBACK),
            addresses: Vec::new(),
        });
        let Some(address) = entry.address else { continue };
        if let Some(v4) = address.as_sockaddr_in() {
            interface.addresses.push(v4.ip().into());
        } else if let Some(v6) = address.as_sockaddr_in6() {
            interface.addresses.push(v6.ip().into());
        }
    }
    Ok(interfaces.into_values().collect())
}

/// As the library has it: up and with its carrier. The kernel sets `IFF_RUNNING` up to a second later.
fn works(flags: InterfaceFlags) -> bool {
    let (has, carrier) = (|flag| flags.contains(flag), InterfaceFlags::IFF_LOWER_UP);
    let carrier = has(carrier) && !has(InterfaceFlags::IFF_DORMANT);
    has(InterfaceFlags::IFF_UP) && (has(InterfaceFlags::IFF_RUNNING) || carrier)
}

/// Whether an address is link-local: then it needs the name of an interface.
pub fn is_link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}
