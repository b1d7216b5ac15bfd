//! The host's addresses.

// Reason: getifaddrs.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uwarp_llp::route;
use uwarp_process::{Mutex, PerProcess};

use crate::fork::Uncancelled;

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
    /// The address of its network for all its hosts. None in IPv6, and in networks of one or two addresses.
    pub broadcast: Option<Ipv4Addr>,
}

/// As `uwarp_llp::route::longest_datagram`, for threads that post or poll, which no call may cancel: the
/// socket that it asks is closed by the C library.
pub(crate) fn longest_datagram(local: IpAddr, peer: SocketAddr) -> Option<usize> {
    let _uncancelled = Uncancelled::begin();
    route::longest_datagram(local, peer)
}

impl Address {
    /// A place of the GID table that has no address now. Another address of the port takes it.
    fn none() -> Self {
        let ip = Ipv4Addr::UNSPECIFIED.into();
        Self { ip, interface: String::new(), index: 0, loopback: false, link_local: false, broadcast: None }
    }

    /// Whether it is a place without an address.
    pub fn is_none(&self) -> bool {
        self.ip.is_unspecified()
    }
}

/// The addresses of `now`, each where it was `before`: programs keep indices of GIDs as long as they run. New
/// ones take free places, as in the kernel's table.
fn in_place(before: &[Address], now: Vec<Address>) -> Vec<Address> {
    let same = |one: &Address, other: &Address| (one.ip, one.index) == (other.ip, other.index);
    let (mut rest, mut table) = (now, Vec::new());
    for old in before {
        let found = rest.iter().position(|new| same(old, new));
        table.push(found.map_or_else(Address::none, |at| rest.remove(at)));
    }
    for new in rest {
        match table.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = new,
            None => table.push(new),
        }
    }
    let used = table.iter().rposition(|address| !address.is_none()).map_or(0, |last| last + 1);
    table.truncate(used);
    table
}

/// The addresses of a port at the last query, and the time of that query.
#[derive(Debug)]
pub(crate) struct Last(PerProcess<Mutex<Option<Listed>, 29>>);

/// When they were listed, and what they were.
type Listed = (Instant, Arc<[Address]>);

/// See [`Last::recent`].
const FRESH: Duration = Duration::from_millis(100);

impl Last {
    /// Nothing yet.
    pub const fn new() -> Self {
        Self(PerProcess::new(Mutex::default))
    }

    pub fn keep(&self, list: Vec<Address>) -> Arc<[Address]> {
        let list: Arc<[Address]> = list.into();
        *self.0.lock() = Some((Instant::now(), Arc::clone(&list)));
        list
    }

    /// The same, with each address where it was before.
    pub fn keep_in_place(&self, list: Vec<Address>) -> Arc<[Address]> {
        let mut last = self.0.lock();
        let before = last.as_ref().map(|(_, list)| Arc::clone(list));
        let list: Arc<[Address]> = in_place(before.as_deref().unwrap_or(&[]), list).into();
        *last = Some((Instant::now(), Arc::clone(&list)));
        list
    }

    /// The last ones, if they are at most a tenth of a second old.
    pub fn recent(&self, now: Instant) -> Option<Arc<[Address]>> {
        let last = self.0.lock();
        let (at, list) = last.as_ref()?;
        (now < *at + FRESH).then(|| Arc::clone(list))
    }
}

/// The LID of an address, in views that show LIDs: its low half. IPv6 addresses have none.
pub fn lid_of(ip: IpAddr) -> u16 {
    match ip {
        IpAddr::V4(ip) => {
            let [.., high, low] = ip.octets();
            u16::from_be_bytes([high, low])
        }
        IpAddr::V6(_) => 0,
    }
}

/// The address of a table that has the port's LID: the first one of IPv4.
pub fn of_lid(own: &[Address]) -> Option<&Address> {
    own.iter().find(|own| own.ip.is_ipv4() && !own.is_none())
}

/// The address with this LID in the network of one of our addresses.
pub fn ip_of_lid(lid: u16, own: IpAddr) -> Option<IpAddr> {
    let IpAddr::V4(own) = own else { return None };
    let [a, b, ..] = own.octets();
    let [high, low] = lid.to_be_bytes();
    (lid != 0).then_some(IpAddr::V4(Ipv4Addr::new(a, b, high, low)))
}

/// All addresses: the default route's interface first, IPv4 before IPv6, link-local last. Loopback's only if
/// there are no others.
pub fn list() -> Vec<Address> {
    let mut all = all();
    if all.iter().any(|a| !a.loopback) {
        all.retain(|a| !a.loopback);
    }
    let default = default_interface();
    all.sort_by_key(|a| (Some(&a.interface) != default.as_ref(), a.link_local, a.ip.is_ipv6(), a.index));
    all
}

/// The addresses of one interface: IPv4 before IPv6, link-local last.
pub fn list_of(interface: &str) -> Vec<Address> {
    let mut own = all();
    own.retain(|a| a.interface == interface);
    own.sort_by_key(|a| (a.link_local, a.ip.is_ipv6()));
    own
}

/// All addresses, loopback's too, as the system lists them.
pub fn all() -> Vec<Address> {
    let mut out = Vec::new();
    for_each_entry(|entry, name| {
        let flags = entry.ifa_flags;
        if entry.ifa_addr.is_null() || !works(flags) {
            return;
        }
        let mut broadcast = None;
        // SAFETY: the family says which structure the address is, and the mask is of the same; the casts
        // follow it.
        let ip = unsafe {
            match i32::from((*entry.ifa_addr).sa_family) {
                libc::AF_INET => {
                    let a = &*entry.ifa_addr.cast::<libc::sockaddr_in>();
                    let ip = Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
                    let mask = entry.ifa_netmask.cast::<libc::sockaddr_in>().as_ref();
                    broadcast = mask.and_then(|mask| broadcast_of(ip, u32::from_be(mask.sin_addr.s_addr)));
                    IpAddr::from(ip)
                }
                libc::AF_INET6 => {
                    let a = &*entry.ifa_addr.cast::<libc::sockaddr_in6>();
                    IpAddr::from(Ipv6Addr::from(a.sin6_addr.s6_addr))
                }
                _ => return,
            }
        };
        out.push(Address {
            ip,
            interface: name.to_string_lossy().into_owned(),
            index: index(name),
            loopback: flags & libc::IFF_LOOPBACK as u32 != 0,
            link_local: matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local()),
            broadcast,
        });
    });
    out
}

/// The last address of a network of more than two, as the kernel's routing table has it, whether or not the
/// interface has been told one.
fn broadcast_of(ip: Ipv4Addr, mask: u32) -> Option<Ipv4Addr> {
    (mask.count_zeros() >= 2).then(|| Ipv4Addr::from(u32::from(ip) | !mask))
}

/// Whether an interface with these flags is up and has its carrier. The kernel sets `IFF_RUNNING` up to a
/// second after the carrier is there. An interface that still waits for something else (802.1X) is dormant.
pub(crate) fn works(flags: u32) -> bool {
    let has = |flag: i32| flags & flag.cast_unsigned() != 0;
    has(libc::IFF_UP) && (has(libc::IFF_RUNNING) || has(libc::IFF_LOWER_UP) && !has(libc::IFF_DORMANT))
}

/// The number of the interface that has the loopback addresses; 0: there is none.
pub fn loopback_interface() -> u32 {
    all().into_iter().find(|own| own.ip.is_loopback()).map_or(0, |own| own.index)
}

/// The number of the interface with this name.
pub(crate) fn index(name: &CStr) -> u32 {
    // SAFETY: a C string.
    unsafe { libc::if_nametoindex(name.as_ptr()) }
}

/// Calls `each` with every entry of getifaddrs(3) and the name of its interface. An entry's address is NULL
/// or of the family it says.
pub(crate) fn for_each_entry(mut each: impl FnMut(&libc::ifaddrs, &CStr)) {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `first` is valid for the write; the list is freed below.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return;
    }
    let mut next = first;
    // SAFETY: an entry of the list that getifaddrs made, or NULL at its end; the list is freed only below.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: the name is a C string that lives as long as the list.
        each(entry, unsafe { CStr::from_ptr(entry.ifa_name) });
    }
    // SAFETY: `first` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(first) };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c25_a_network_of_more_than_two_addresses_has_one_for_all() {
        let of = |bits: u32| broadcast_of(Ipv4Addr::new(10, 1, 2, 3), u32::MAX << (32 - bits));
        assert_eq!(of(24), Some(Ipv4Addr::new(10, 1, 2, 255)));
        assert_eq!(of(9), Some(Ipv4Addr::new(10, 127, 255, 255)));
        assert_eq!((of(30), of(31)), (Some(Ipv4Addr::new(10, 1, 2, 3)), None));
        let own = all().into_iter().find(|own| own.ip == IpAddr::from(Ipv4Addr::LOCALHOST)).unwrap();
        assert_eq!(own.broadcast, Some(Ipv4Addr::new(127, 255, 255, 255)));
    }

    #[test]
    fn a_carrier_is_enough_unless_the_interface_is_dormant() {
        use libc::{IFF_DORMANT, IFF_LOWER_UP, IFF_RUNNING, IFF_UP};
        let works = |flags: i32| works(flags.cast_unsigned());
        assert!(works(IFF_UP | IFF_RUNNING) && works(IFF_UP | IFF_LOWER_UP));
        assert!(!works(IFF_UP) && !works(IFF_UP | IFF_LOWER_UP | IFF_DORMANT) && !works(IFF_LOWER_UP));
    }

    #[test]
    fn recent_addresses_are_those_that_were_listed_last() {
        let at = |ip| Address { ip, index: 2, ..Address::none() };
        let last = Last::new();
        let now = Instant::now();
        assert_eq!(last.recent(now), None);
        last.keep(vec![]);
        last.keep(vec![at(Ipv4Addr::LOCALHOST.into())]);
        assert_eq!(last.recent(now).map(|list| list.len()), Some(1));
        assert_eq!(last.recent(now + FRESH * 2), None, "the system is asked again");
    }

    #[test]
    fn c14_addresses_keep_their_places_and_new_ones_take_free_places() {
        let list = |ips: &[&str]| -> Vec<Address> {
            let address = |ip: &&str| Address { ip: ip.parse().unwrap(), index: 2, ..Address::none() };
            ips.iter().map(address).collect()
        };
        let last = Last::new();
        let step = |ips: &[&str]| -> Vec<String> {
            last.keep_in_place(list(ips)).iter().map(|address| address.ip.to_string()).collect()
        };
        assert_eq!(step(&["10.0.0.1", "fe80::1"]), ["10.0.0.1", "fe80::1"]);
        assert_eq!(step(&["10.0.0.9", "10.0.0.1", "fe80::1"]), ["10.0.0.1", "fe80::1", "10.0.0.9"]);
        assert_eq!(step(&["10.0.0.9", "fe80::1"]), ["0.0.0.0", "fe80::1", "10.0.0.9"]);
        assert_eq!(step(&["10.0.0.9", "10.0.0.5", "10.0.0.6"]), ["10.0.0.5", "10.0.0.6", "10.0.0.9"]);
        assert_eq!(step(&["10.0.0.5"]), ["10.0.0.5"], "no free places at the end");
        assert_eq!(step(&["127.0.0.1", "::1"]), ["127.0.0.1", "::1"]);
        assert_eq!(step(&[]), [""; 0]);
    }
}
