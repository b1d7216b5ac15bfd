//! Addresses: C's form, and what a program of an IPv6 socket sees of an IPv4 peer.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

/// Room for any address.
pub fn room() -> (sockaddr_storage, socklen_t) {
    // SAFETY: zeros are an address of no family.
    (unsafe { std::mem::zeroed() }, size_of::<sockaddr_storage>() as socklen_t)
}

/// Reads an address of IPv4 or IPv6.
///
/// # Safety
/// `from` is NULL or has `len` bytes.
pub unsafe fn load(from: *const sockaddr, len: socklen_t) -> Option<SocketAddr> {
    let len = len as usize;
    if from.is_null() || len < size_of::<sockaddr_in>() {
        return None;
    }
    // SAFETY: long enough for its family, and below for each structure.
    unsafe {
        match c_int::from((&raw const (*from).sa_family).read_unaligned()) {
            libc::AF_INET => {
                let address = from.cast::<sockaddr_in>().read_unaligned();
                let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
                Some(SocketAddr::new(ip.into(), u16::from_be(address.sin_port)))
            }
            libc::AF_INET6 if len >= size_of::<sockaddr_in6>() => {
                let address = from.cast::<sockaddr_in6>().read_unaligned();
                let ip = Ipv6Addr::from(address.sin6_addr.s6_addr);
                let port = u16::from_be(address.sin6_port);
                Some(SocketAddrV6::new(ip, port, address.sin6_flowinfo, address.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

/// C's form.
pub fn store(address: SocketAddr) -> (sockaddr_storage, socklen_t) {
    let (mut storage, _) = room();
    let at = &raw mut storage;
    let len = match address {
        SocketAddr::V4(v4) => {
            let value = sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr { s_addr: v4.ip().to_bits().to_be() },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage has room for it.
            unsafe { at.cast::<sockaddr_in>().write(value) };
            size_of::<sockaddr_in>()
        }
        SocketAddr::V6(v6) => {
            let value = sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: the storage has room for it.
            unsafe { at.cast::<sockaddr_in6>().write(value) };
            size_of::<sockaddr_in6>()
        }
    };
    (storage, len as socklen_t)
}

/// Gives an address to the program: as much as fits, and its whole length.
///
/// # Safety
/// Both are NULL, or `len` says how long `to` is.
pub unsafe fn give(address: SocketAddr, to: *mut sockaddr, len: *mut socklen_t) {
    if to.is_null() || len.is_null() {
        return;
    }
    let (storage, whole) = store(address);
    // SAFETY: the caller's promise.
    unsafe {
        let fits = (*len).min(whole) as usize;
        std::ptr::copy_nonoverlapping((&raw const storage).cast::<u8>(), to.cast::<u8>(), fits);
        *len = whole;
    }
}

/// As a program sees it at a socket of this family.
pub fn seen(address: SocketAddr, v6: bool) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if v6 => SocketAddr::new(ip.to_ipv6_mapped().into(), address.port()),
        _ => address,
    }
}

/// As the network sees it.
pub fn meant(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, address.port()),
        IpAddr::V6(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_come_back_as_they_were() {
        for text in ["10.1.2.3:80", "[fd00::1]:65535", "[fe80::1%3]:9", "[::ffff:10.1.2.3]:80"] {
            let address: SocketAddr = text.parse().unwrap();
            let (storage, len) = store(address);
            // SAFETY: an address and its length.
            assert_eq!(unsafe { load((&raw const storage).cast(), len) }, Some(address));
            assert_eq!(seen(meant(address), address.is_ipv6()), address);
        }
    }
}
