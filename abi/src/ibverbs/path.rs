//! The path of an address vector: the address of this host and that of the peer.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use uwarp_abi_types::verbs::{ibv_ah_attr, ibv_gid, ibv_global_route};
use uwarp_cm::pairing::Path;
use uwarp_driver::address::{self, Address};
use uwarp_driver::config::{Config, View};
use uwarp_driver::port::Port;
use uwarp_process::Once;

use super::query::gid_of;
use super::view::PORT;
use crate::failure::Failure;
use crate::object::zeroed;

/// In `src_path_bits` of an address vector to a group: datagrams leave from loopback, whose addresses are in
/// no GID table when the host has others. The member says which of a port's addresses is the source where it
/// has several for one LID. Ours has one (`lmc` is 0), so the bit is free, and programs that fill an address
/// vector themselves leave it 0.
const FROM_LOOPBACK: u8 = 1;

/// Why an address vector without a GID has no path.
const NO_GID: &str = "an address over Ethernet needs a GID (is_global)";

/// Why the other end's GID names no peer, or its LID.
const GID_OF_NONE: &str = "the GID of the peer is zero";
const LID_OF_NONE: &str = "the LID names no peer";

/// Most test programs use LIDs unless they are given an index of the GID table, and print nothing but that
/// the call has failed. So one end lacks what the other one did not send. This says what to do, once.
pub fn explain(wrong: &Failure) {
    static SAID: Once = Once::new();
    let sentence = match &*wrong.why {
        NO_GID => {
            "an address over Ethernet needs a GID index: add -g 0 to the program's options at both ends \
             (or run both ends with --as ib)"
        }
        GID_OF_NONE => "the other end has sent no GID: add -g 0 to the program's options there, too",
        LID_OF_NONE => {
            "the other end has sent no LID: run both ends with --as ib, or neither, and add -g 0 to the \
             program's options at both ends"
        }
        _ => return,
    };
    SAID.call(|| tracing::warn!("{sentence}"));
}

/// The path of an address vector, from a port of this host; the ports of its two addresses have no meaning.
pub fn of(ah: &ibv_ah_attr, port: &Port) -> Result<Path, Failure> {
    if ah.port_num != PORT {
        return Err(Failure::invalid("the device has one port, number 1"));
    }
    if ah.is_global != 0
        && ah.src_path_bits & FROM_LOOPBACK != 0
        && let Some(group) = ip_of(&ah.grh.dgid).filter(|group| is_group(*group, &[]))
    {
        let local = match group {
            IpAddr::V4(_) => IpAddr::from(Ipv4Addr::LOCALHOST),
            IpAddr::V6(_) => IpAddr::from(Ipv6Addr::LOCALHOST),
        };
        let interface = address::loopback_interface();
        return Ok(Path { local: SocketAddr::new(local, 0), peer: on_interface(group, interface) });
    }
    resolve(ah.is_global != 0, &ah.grh, ah.dlid, Config::get().view == View::Ib, &port.recent_addresses())
}

fn resolve(
    global: bool,
    route: &ibv_global_route,
    dlid: u16,
    has_lids: bool,
    own: &[Address],
) -> Result<Path, Failure> {
    if !global && !has_lids {
        return Err(Failure::invalid(NO_GID));
    }
    let there = |address: &&Address| !address.is_none();
    let of_gid = || own.get(usize::from(route.sgid_index)).filter(there);
    let local = if global { of_gid() } else { address::of_lid(own) };
    let local = local.ok_or_else(|| Failure::invalid("the index is that of no GID"))?;
    let peer = if global { ip_of(&route.dgid) } else { address::ip_of_lid(dlid, local.ip) };
    let peer = peer.ok_or_else(|| Failure::invalid(if global { GID_OF_NONE } else { LID_OF_NONE }))?;
    if peer.is_ipv4() != local.ip.is_ipv4() && !peer.is_multicast() {
        if peer.is_loopback() {
            // A loopback address is not in the table, but rdma_cm's events name it.
            return Ok(Path { local: SocketAddr::new(peer, 0), peer: SocketAddr::new(peer, 0) });
        }
        return Err(Failure::invalid("one GID is an IPv4 address and the other one is not"));
    }
    Ok(Path { local: on_interface(local.ip, local.index), peer: on_interface(peer, local.index) })
}

/// The address that a GID stands for. `None` for the zero GID.
pub fn ip_of(gid: &ibv_gid) -> Option<IpAddr> {
    // SAFETY: both members of the union are plain bytes.
    let ip = Ipv6Addr::from(unsafe { gid.raw }).to_canonical();
    (!ip.is_unspecified()).then_some(ip)
}

/// The address vector of a path between two addresses, as programs get it in events. `own_addresses`: those
/// of the port.
pub fn address_vector(own_addresses: &[Address], local: IpAddr, peer: IpAddr) -> ibv_ah_attr {
    // SAFETY: plain C data.
    let mut attr: ibv_ah_attr = unsafe { zeroed() };
    let own = own_addresses.iter().position(|own| own.ip == local);
    attr.port_num = PORT;
    attr.is_global = 1;
    attr.dlid = address::lid_of(peer);
    attr.grh.dgid = gid_of(peer);
    // A loopback address is not in the device's table.
    attr.grh.sgid_index = own.and_then(|index| u8::try_from(index).ok()).unwrap_or(0);
    if own.is_none() && local.is_loopback() && is_group(peer, own_addresses) {
        attr.src_path_bits = FROM_LOOPBACK;
    }
    // A group's datagrams stay in the network, as in Linux (`cma_iboe_join_multicast`).
    attr.grh.hop_limit = if is_group(peer, own_addresses) { 1 } else { 64 };
    attr
}

/// The same for a connection between two GIDs. Programs use it for queue pairs of their own: UCX compares
/// the GID that a datagram was sent to with the port's. So of a connection over loopback it names the port's
/// first address of that family.
pub fn of_connection(local: &ibv_gid, peer: &ibv_gid, own: &[Address]) -> Result<ibv_ah_attr, Failure> {
    let (Some(local), Some(peer)) = (ip_of(local), ip_of(peer)) else {
        return Err(Failure::invalid("the id has no route"));
    };
    let here =
        own.iter().filter(|own| !own.is_none()).map(|own| own.ip).find(|ip| ip.is_ipv4() == peer.is_ipv4());
    Ok(match here.filter(|_| peer.is_loopback()) {
        Some(ip) => address_vector(own, ip, ip),
        None => address_vector(own, local, peer),
    })
}

/// Whether datagrams to an address go to many: a group, 255.255.255.255, or the broadcast address of a
/// network of the port, whose addresses are `own`.
pub fn is_group(ip: IpAddr, own: &[Address]) -> bool {
    let for_all = |ip: Ipv4Addr| ip.is_broadcast() || own.iter().any(|own| own.broadcast == Some(ip));
    ip.is_multicast() || matches!(ip, IpAddr::V4(ip) if for_all(ip))
}

/// A link-local address and a group need their interface.
fn on_interface(ip: IpAddr, interface: u32) -> SocketAddr {
    match ip {
        IpAddr::V6(ip) if ip.is_unicast_link_local() || ip.is_multicast() => {
            SocketAddrV6::new(ip, 0, 0, interface).into()
        }
        ip => SocketAddr::new(ip, 0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Vec<Address> {
        let address = |ip: &str, index| Address {
            ip: ip.parse().expect("an address"),
            interface: "eth".into(),
            index,
            loopback: false,
            link_local: ip.starts_with("fe80"),
            broadcast: (ip == "192.0.2.1").then(|| [192, 0, 2, 255].into()),
        };
        vec![address("192.0.2.1", 2), address("fe80::1", 3)]
    }

    fn route(gid: &str, sgid_index: u8) -> ibv_global_route {
        // SAFETY: plain C data.
        let mut route: ibv_global_route = unsafe { crate::object::zeroed() };
        route.dgid = gid_of(gid.parse().expect("an address"));
        route.sgid_index = sgid_index;
        route
    }

    fn path(local: &str, peer: &str) -> Path {
        let parse = |address: &str| address.parse().expect("an address");
        Path { local: parse(local), peer: parse(peer) }
    }

    #[test]
    fn gids_are_addresses() {
        let to = |gid, index| resolve(true, &route(gid, index), 0, false, &own()).ok();
        assert_eq!(to("192.0.2.9", 0), Some(path("192.0.2.1:0", "192.0.2.9:0")));
        assert_eq!(to("fe80::9", 1), Some(path("[fe80::1%3]:0", "[fe80::9%3]:0")));
        assert_eq!(to("fe80::9", 0), None, "families differ");
        assert_eq!(to("::1", 0), Some(path("[::1]:0", "[::1]:0")), "loopback's is in no table");
        assert_eq!(to("192.0.2.9", 2), None, "no such GID of ours");
        assert_eq!(to("::", 1), None);
        let why = |global| resolve(global, &route("::", 1), 0, true, &own()).err().map(|wrong| wrong.why);
        assert_eq!((why(true).as_deref(), why(false).as_deref()), (Some(GID_OF_NONE), Some(LID_OF_NONE)));
    }

    /// The hop limit of an address handle reaches the network: a group's datagrams must not leave it for
    /// that.
    #[test]
    fn c16_a_group_is_reached_in_one_hop() {
        let limit = |peer: &str| {
            let [local, peer] = ["192.0.2.1", peer].map(|ip| ip.parse().expect("an address"));
            address_vector(&own(), local, peer).grh.hop_limit
        };
        assert_eq!((limit("239.1.2.3"), limit("255.255.255.255"), limit("192.0.2.255")), (1, 1, 1));
        assert_eq!((limit("192.0.2.9"), limit("198.51.100.255")), (64, 64), "of no network of ours");
    }

    #[test]
    fn lids_are_the_low_halves_of_addresses_in_the_view_that_has_them() {
        let route = route("::", 0);
        let to = |lid, has_lids| resolve(false, &route, lid, has_lids, &own()).ok();
        assert_eq!(to(0x0209, true), Some(path("192.0.2.1:0", "192.0.2.9:0")));
        assert_eq!((to(0, true), to(0x0209, false)), (None, None));
        assert_eq!(
            (
                address::lid_of("192.0.2.9".parse().expect("one")),
                address::lid_of("::1".parse().expect("one"))
            ),
            (0x0209, 0)
        );
    }
}
