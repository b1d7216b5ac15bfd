//! Socket addresses in the forms of C and Rust.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

use crate::failure::Failure;
use crate::object::zeroed;

/// Reads an address that a program gave. NULL and families other than IPv4 and IPv6 are `EINVAL`, as in
/// librdmacm.
///
/// # Safety
/// `address` is NULL or a socket address as long as its family says.
pub unsafe fn load(address: *const sockaddr) -> Result<SocketAddr, Failure> {
    if address.is_null() {
        return Err(Failure::invalid("address is NULL"));
    }
    // SAFETY: every socket address begins with its family. Programs do not always align them.
    let family = unsafe { (&raw const (*address).sa_family).read_unaligned() };
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: the family says that it is one.
            let v4 = unsafe { address.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Ok(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says that it is one.
            let v6 = unsafe { address.cast::<sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            Ok(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
        }
        _ => Err(Failure::invalid("address is neither IPv4 nor IPv6")),
    }
}

/// An address as C has it, and its length.
pub fn storage(address: SocketAddr) -> (sockaddr_storage, socklen_t) {
    // SAFETY: plain C data.
    let mut storage: sockaddr_storage = unsafe { zeroed() };
    let length = match address {
        SocketAddr::V4(v4) => {
            // SAFETY: plain C data.
            let mut c: sockaddr_in = unsafe { zeroed() };
            c.sin_family = libc::AF_INET as u16;
            c.sin_port = v4.port().to_be();
            c.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
            // SAFETY: a storage holds and aligns every address.
            unsafe { (&raw mut storage).cast::<sockaddr_in>().write(c) };
            size_of::<sockaddr_in>()
        }
        SocketAddr::V6(v6) => {
            // SAFETY: plain C data.
            let mut c: sockaddr_in6 = unsafe { zeroed() };
            c.sin6_family = libc::AF_INET6 as u16;
            c.sin6_port = v6.port().to_be();
            c.sin6_addr.s6_addr = v6.ip().octets();
            c.sin6_flowinfo = v6.flowinfo();
            c.sin6_scope_id = v6.scope_id();
            // SAFETY: as above.
            unsafe { (&raw mut storage).cast::<sockaddr_in6>().write(c) };
            size_of::<sockaddr_in6>()
        }
    };
    (storage, length as socklen_t)
}

/// The port of an address in network byte order; 0 if there is none.
pub fn port(storage: &sockaddr_storage) -> u16 {
    // SAFETY: a storage is aligned for, and as long as, every address.
    match unsafe { load(std::ptr::from_ref(storage).cast()) } {
        Ok(address) => address.port().to_be(),
        Err(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        for text in ["127.0.0.1:7174", "[::1]:1", "[fe80::1%3]:65535", "0.0.0.0:0"] {
            let address: SocketAddr = text.parse().unwrap();
            let (c, length) = storage(address);
            assert_eq!(length, if address.is_ipv4() { 16 } else { 28 });
            // SAFETY: `c` is an address.
            assert_eq!(unsafe { load((&raw const c).cast()) }.unwrap(), address);
            assert_eq!(u16::from_be(port(&c)), address.port());
        }
    }

    #[test]
    fn other_families_are_refused() {
        // SAFETY: plain C data.
        let mut c: sockaddr_storage = unsafe { zeroed() };
        c.ss_family = 27; // AF_IB
        // SAFETY: `c` is long enough for anything.
        assert_eq!(unsafe { load((&raw const c).cast()) }.unwrap_err().errno, libc::EINVAL);
        // SAFETY: NULL is allowed.
        assert_eq!(unsafe { load(std::ptr::null()) }.unwrap_err().errno, libc::EINVAL);
        assert_eq!(port(&c), 0);
    }
}
