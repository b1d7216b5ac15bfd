//! Network interfaces of this host: what the port attributes and the GUID are read from. (Addresses are the driver's,
//! see [`uwarp_driver::address`].)

use std::ffi::CStr;

/// A network interface.
#[derive(Debug, Clone, Default)]
pub struct Netdev {
    /// Its name.
    pub name: String,
    /// Its number, nonzero.
    pub index: u32,
    /// Up and running.
    pub up: bool,
    /// The loopback interface.
    pub loopback: bool,
    /// Largest IP packet in bytes; 0 when unknown.
    pub mtu: u32,
    /// Hardware address, if it has one of six bytes.
    pub mac: Option<[u8; 6]>,
}

impl Netdev {
    /// Speed in Mb/s, as the driver says it; `None` for interfaces without one.
    pub fn speed(&self) -> Option<u32> {
        let text = std::fs::read_to_string(format!("/sys/class/net/{}/speed", self.name)).ok()?;
        text.trim().parse().ok().filter(|speed| *speed > 0)
    }
}

/// All interfaces, by number.
pub fn list() -> Vec<Netdev> {
    let mut head = std::ptr::null_mut();
    // SAFETY: getifaddrs fills `head` with a list that is ours until freeifaddrs.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return Vec::new();
    }
    let mut found: Vec<Netdev> = Vec::new();
    let mut entry = head;
    // SAFETY: the list is alive, ends with NULL, and its members are valid or NULL.
    while let Some(ifa) = unsafe { entry.as_ref() } {
        entry = ifa.ifa_next;
        // SAFETY: names are C strings.
        let name = unsafe { CStr::from_ptr(ifa.ifa_name) }.to_string_lossy().into_owned();
        let at = found.iter().position(|dev| dev.name == name).unwrap_or_else(|| {
            let flags = i64::from(ifa.ifa_flags);
            let running = i64::from(libc::IFF_UP | libc::IFF_RUNNING);
            found.push(Netdev {
                // SAFETY: a C string.
                index: unsafe { libc::if_nametoindex(ifa.ifa_name) },
                up: flags & running == running,
                loopback: flags & i64::from(libc::IFF_LOOPBACK) != 0,
                mtu: mtu(&name).unwrap_or(0),
                name,
                ..Netdev::default()
            });
            found.len() - 1
        });
        // SAFETY: NULL or a socket address of the family it says.
        found[at].mac = found[at].mac.or(unsafe { mac(ifa.ifa_addr) });
    }
    // SAFETY: from getifaddrs, not used any more.
    unsafe { libc::freeifaddrs(head) };
    found.sort_by_key(|dev| dev.index);
    found
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

/// Asked of a socket: sysfs shows the network namespace it was mounted in, not necessarily ours.
fn mtu(name: &str) -> Option<u32> {
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .ok()?;
    // SAFETY: all zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return None;
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
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
