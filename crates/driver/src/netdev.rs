//! Network interfaces of this host, the source of the port attributes and the GUID. (Addresses:
//! [`crate::address`].)

// Reason: socket addresses of getifaddrs, and an ioctl for the MTU.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::os::fd::AsRawFd as _;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use uwarp_process::OnceValue;

use crate::address;

/// A network interface.
#[derive(Debug, Clone, Default)]
pub struct Netdev {
    /// Its name.
    pub name: String,
    /// Its number, nonzero.
    pub index: u32,
    /// Up, and with its carrier.
    pub up: bool,
    /// The loopback interface.
    pub loopback: bool,
    /// Largest IP packet in bytes; 0 when unknown.
    pub mtu: u32,
    /// Hardware address, if it has one of six bytes.
    pub mac: Option<[u8; 6]>,
}

impl Netdev {
    /// Speed in Mb/s, as the driver reports it; `None` for interfaces without one.
    pub fn speed(&self) -> Option<u32> {
        let text = std::fs::read_to_string(format!("/sys/class/net/{}/speed", self.name)).ok()?;
        text.trim().parse().ok().filter(|speed| *speed > 0)
    }
}

/// All interfaces, by number.
pub fn list() -> Vec<Netdev> {
    let mut found: Vec<Netdev> = Vec::new();
    address::for_each_entry(|entry, c_name| {
        let name = c_name.to_string_lossy().into_owned();
        let at = found.iter().position(|dev| dev.name == name).unwrap_or_else(|| {
            let flags = i64::from(entry.ifa_flags);
            found.push(Netdev {
                index: address::index(c_name),
                up: address::works(entry.ifa_flags),
                loopback: flags & i64::from(libc::IFF_LOOPBACK) != 0,
                mtu: mtu(c_name).unwrap_or(0),
                name,
                ..Netdev::default()
            });
            found.len() - 1
        });
        // SAFETY: NULL or a socket address of the family it says.
        found[at].mac = found[at].mac.or(unsafe { mac(entry.ifa_addr) });
    });
    found.sort_by_key(|dev| dev.index);
    found
}

/// The node's EUI-64; it does not change while the process lives.
pub fn guid() -> [u8; 8] {
    static GUID: OnceValue<[u8; 8]> = OnceValue::new();
    *GUID.get_or_make(make_guid)
}

/// The EUI-64 of the device of one interface. From the node's and the interface's name: interfaces can share
/// a hardware address, as those of VLANs do.
pub fn guid_of(interface: &str) -> [u8; 8] {
    local_eui64(hash(guid().into_iter().chain(interface.bytes())))
}

/// Does not change while the host stays the same: from the hardware address of the first interface that has
/// one, with the "local" bit set, as no such adapter was ever sold; otherwise from the machine's identity.
fn make_guid() -> [u8; 8] {
    let mac = list().into_iter().find_map(|dev| if dev.loopback { None } else { dev.mac });
    if let Some([a, b, c, d, e, f]) = mac {
        return [a | 2, b, c, 0xff, 0xfe, d, e, f];
    }
    let identity = std::fs::read("/etc/machine-id").unwrap_or_else(|_| {
        let name = rustix::system::uname();
        name.nodename().to_bytes().to_vec()
    });
    local_eui64(hash(identity))
}

/// FNV-1a: any hash works that is the same in every version.
fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// An identity with the "local" bit, and not that of a group.
fn local_eui64(identity: u64) -> [u8; 8] {
    let mut guid = identity.to_be_bytes();
    guid[0] = guid[0] & !1 | 2;
    guid
}

/// The hardware address, if it has six bytes and is not all zero.
///
/// # Safety
/// `address` is NULL or points to a socket address of the family it says.
unsafe fn mac(address: *const libc::sockaddr) -> Option<[u8; 6]> {
    // SAFETY: the family stands at the start of each socket address.
    if address.is_null() || i32::from(unsafe { (*address).sa_family }) != libc::AF_PACKET {
        return None;
    }
    // SAFETY: by the family.
    let link = unsafe { address.cast::<libc::sockaddr_ll>().read_unaligned() };
    let mac = [0, 1, 2, 3, 4, 5].map(|i| link.sll_addr[i]);
    (link.sll_halen == 6 && mac != [0; 6]).then_some(mac)
}

/// Read through a socket: sysfs shows the network namespace it was mounted in, not necessarily ours.
fn mtu(name: &CStr) -> Option<u32> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None).ok()?;
    // SAFETY: all zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let name = name.to_bytes();
    if name.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = from.cast_signed();
    }
    let fd = socket.as_raw_fd();
    // SAFETY: SIOCGIFMTU reads the name and writes the number within the structure.
    if unsafe { libc::ioctl(fd, libc::SIOCGIFMTU as _, &raw mut request) } != 0 {
        return None;
    }
    // SAFETY: the kernel wrote this member of the union.
    u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found() {
        let lo = list().into_iter().find(|dev| dev.loopback).expect("this host has a loopback interface");
        assert_ne!(lo.index, 0);
        assert_ne!(lo.mtu, 0);
    }
}
