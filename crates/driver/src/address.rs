//! The host's addresses.

// Reason: getifaddrs.
#![allow(unsafe_code)]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An address of an interface that is up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// Name of its interface.
    pub interface: String,
    /// Index of its interface.
    pub index: u32,
    /// A loopback interface.
    pub loopback: bool,
    /// IPv6 link-local.
    pub link_local: bool,
}

/// All addresses: the default route's interface first, IPv4 before IPv6, link-local last; loopback's only if there are no
/// others.
pub fn list() -> Vec<Address> {
    let mut all = all();
    if all.iter().any(|a| !a.loopback) {
        all.retain(|a| !a.loopback);
    }
    let default = default_interface();
    all.sort_by_key(|a| (Some(&a.interface) != default.as_ref(), a.link_local, a.ip.is_ipv6(), a.index));
    all
}

/// All addresses, loopback's too, as the system lists them.
pub fn all() -> Vec<Address> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `first` is valid for the write; the list is freed below.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let mut out = Vec::new();
    let mut at = first;
    while !at.is_null() {
        // SAFETY: `at` is a node of the list that getifaddrs made and nobody has freed.
        let node = unsafe { &*at };
        at = node.ifa_next;
        let up = node.ifa_flags & libc::IFF_UP as u32 != 0 && node.ifa_flags & libc::IFF_RUNNING as u32 != 0;
        if node.ifa_addr.is_null() || !up {
            continue;
        }
        // SAFETY: the family says which structure the address is; both casts follow it.
        let ip = unsafe {
            match i32::from((*node.ifa_addr).sa_family) {
                libc::AF_INET => {
                    let a = &*node.ifa_addr.cast::<libc::sockaddr_in>();
                    IpAddr::from(Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr)))
                }
                libc::AF_INET6 => {
                    let a = &*node.ifa_addr.cast::<libc::sockaddr_in6>();
                    IpAddr::from(Ipv6Addr::from(a.sin6_addr.s6_addr))
                }
                _ => continue,
            }
        };
        // SAFETY: the name is a C string that lives as long as the list.
        let (name, index) =
            unsafe { (std::ffi::CStr::from_ptr(node.ifa_name), libc::if_nametoindex(node.ifa_name)) };
        out.push(Address {
            ip,
            interface: name.to_string_lossy().into_owned(),
            index,
            loopback: node.ifa_flags & libc::IFF_LOOPBACK as u32 != 0,
            link_local: matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local()),
        });
    }
    // SAFETY: `first` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(first) };
    out
}

/// Name of the interface of the default route, IPv4's if there is one.
fn default_interface() -> Option<String> {
    let v4 = std::fs::read_to_string("/proc/net/route").unwrap_or_default();
    let v4 = v4.lines().skip(1).find_map(|line| {
        let mut fields = line.split_whitespace();
        let (name, destination) = (fields.next()?, fields.next()?);
        (destination == "00000000").then(|| name.to_owned())
    });
    v4.or_else(|| {
        let v6 = std::fs::read_to_string("/proc/net/ipv6_route").unwrap_or_default();
        v6.lines().find_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let default = fields.first()?.bytes().all(|b| b == b'0') && *fields.get(1)? == "00";
            let name = *fields.last()?;
            (default && name != "lo").then(|| name.to_owned())
        })
    })
}
