//! Address handles, and what makes them from received datagrams.

use std::net::IpAddr;
use std::sync::Arc;

use uwarp_abi_types::verbs::*;
use uwarp_driver::address::Address;
use uwarp_driver::config::Config;
use uwarp_driver::port::Port;
use uwarp_driver::quota::Place;
use uwarp_rnic::ah::Ah;
use uwarp_rnic::ah::grh::{self, Grh};

use super::context::{self, Context};
use super::mr::CPd;
use super::path;
use super::query::gid_of;
use super::view::PORT;
use crate::convention::{Code, MinusOne};
use crate::entry;
use crate::failure::{Failure, required};
use crate::object::{self, Object, Use, Visible, look, zeroed};

/// An address handle.
#[repr(C)]
pub struct CAh {
    c: Visible<ibv_ah>,
    /// The RNIC's.
    pub ah: Arc<Ah>,
    _place: Place,
    _pd: Use,
}

// SAFETY: repr(C), the C structure first.
unsafe impl Object for CAh {
    type C = ibv_ah;
    const NAME: &'static str = "ah";
}

/// # Safety
/// `pd` is alive or NULL.
unsafe fn create(pd: *mut ibv_pd, attr: &ibv_ah_attr) -> Result<*mut ibv_ah, Failure> {
    // SAFETY: the caller's promise.
    let domain = unsafe { look::<CPd>(pd) }?;
    // SAFETY: a live domain's context is alive.
    let opened = unsafe { look::<Context>((*pd).context) }?;
    let port = opened.device.port();
    let path = path::of(attr, port).inspect_err(path::explain)?;
    let place = opened.device.made.ahs.take(opened.nic.limits().max_ah)?;
    let (mut to, own) = (path.peer, path.local.ip());
    let from = source(own, to.ip());
    let ah = if path::is_group(to.ip(), &port.recent_addresses()) {
        to.set_port(Config::get().multicast_port);
        Ah::group(&domain.pd, to, from)
    } else {
        Ah::new(&domain.pd, to, from)
    };
    let grh = if attr.is_global != 0 { (attr.grh.traffic_class, attr.grh.hop_limit) } else { (0, 0) };
    // 1 and 0 mean the system's: programs set them for neighbours and do not know of routers, and the kernel
    // puts the route's in their place.
    let ah = if matches!(grh, (0, 0 | 1)) { ah } else { ah.marked(grh.0, if grh.1 > 1 { grh.1 } else { 0 }) };
    // SAFETY: alive.
    let context = unsafe { (*pd).context };
    let c = Visible::new(ibv_ah { context, pd, handle: 0 });
    Ok(object::give(CAh { c, ah, _place: place, _pd: domain.users.hold() }))
}

/// The address that datagrams to `to` leave from, if `own` is the one that the program has named. `None`: the
/// system chooses, as it must to a group of the other family. To a loopback address they leave from that one:
/// it is not in our table, so the program could not name it, and from a link-local one nothing gets there.
pub(super) fn source(own: IpAddr, to: IpAddr) -> Option<IpAddr> {
    if to.is_loopback() && !own.is_loopback() {
        return Some(to);
    }
    (to.is_ipv4() == own.is_ipv4()).then_some(own)
}

/// The GID to answer from: the address that the datagram was sent to. A group or a loopback address is not in
/// our table; then an address from which the sender can be reached.
fn sgid_index(own: &[Address], grh: &Grh) -> u8 {
    let link_local = |ip: IpAddr| matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let to = grh.destination;
    let named = own.iter().position(|own| own.ip == to);
    let alike = || {
        let source = grh.source;
        let family = |own: &&Address| !own.is_none() && own.ip.is_ipv4() == source.is_ipv4();
        let best = own.iter().find(|own| family(own) && own.link_local == link_local(source));
        let best = best.or_else(|| own.iter().find(family))?;
        own.iter().position(|own| std::ptr::eq(own, best))
    };
    named.or_else(alike).and_then(|index| u8::try_from(index).ok()).unwrap_or(0)
}

/// The way back to the sender of a received datagram, whose GRH area is `grh`.
///
/// # Safety
/// `grh` is readable if the completion says that it is there.
unsafe fn way_back(port: &Port, wc: &ibv_wc, grh: *const ibv_grh) -> Result<ibv_ah_attr, Failure> {
    // SAFETY: plain C data.
    let mut attr: ibv_ah_attr = unsafe { zeroed() };
    attr.port_num = PORT;
    attr.dlid = wc.slid;
    attr.sl = wc.sl;
    attr.src_path_bits = wc.dlid_path_bits;
    if wc.wc_flags & IBV_WC_GRH == 0 {
        return Ok(attr);
    }
    // SAFETY: the caller's promise; any bytes will do. Copied, as the area may be registered memory.
    let area = unsafe { required(grh.cast_mut(), "grh")?.cast::<[u8; grh::LEN]>().read_unaligned() };
    let grh = Grh::parse(&area).ok_or_else(|| Failure::invalid("the GRH area holds no header"))?;
    attr.is_global = 1;
    attr.grh.dgid = gid_of(grh.source);
    attr.grh.sgid_index = sgid_index(&port.recent_addresses(), &grh);
    attr.grh.flow_label = grh.flow_label;
    attr.grh.hop_limit = 0xFF;
    attr.grh.traffic_class = grh.traffic_class;
    Ok(attr)
}

entry! {
    /// ibv_create_ah(3).
    fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
        create(pd, &*required(attr, "attr")?)
    }

    /// ibv_create_ah_from_wc(3).
    fn ibv_create_ah_from_wc(
        pd: *mut ibv_pd,
        wc: *mut ibv_wc,
        grh: *mut ibv_grh,
        _port: u8,
    ) -> *mut ibv_ah {
        look::<CPd>(pd)?;
        let port = context::port((*pd).context)?;
        create(pd, &way_back(port, &*required(wc, "wc")?, grh)?)
    }

    /// ibv_create_ah_from_wc(3).
    fn ibv_init_ah_from_wc(
        context: *mut ibv_context,
        _port: u8,
        wc: *mut ibv_wc,
        grh: *mut ibv_grh,
        attr: *mut ibv_ah_attr,
    ) -> MinusOne {
        let port = look::<Context>(context)?.device.port();
        *required(attr, "ah_attr")? = way_back(port, &*required(wc, "wc")?, grh)?;
        Ok(())
    }

    /// ibv_create_ah(3).
    fn ibv_destroy_ah(ah: *mut ibv_ah) -> Code {
        drop(object::take::<CAh>(ah)?);
        Ok(())
    }

    /// Finds the Ethernet address of a RoCE destination, for vendors' libraries. Not offered: here the host's
    /// network does this.
    fn ibv_resolve_eth_l2_from_gid(
        _context: *mut ibv_context,
        _attr: *mut ibv_ah_attr,
        _mac: *mut u8,
        _vlan: *mut u16,
    ) -> Code {
        Err(Failure::unsupported("Ethernet addresses"))
    }
}

#[cfg(test)]
mod tests {
    use uwarp_driver::RdmaDevice;

    use super::*;

    fn area(source: &str, destination: &str) -> [u8; grh::LEN] {
        let parse = |address: &str| address.parse().expect("an address");
        let grh = Grh {
            source: parse(source),
            destination: parse(destination),
            traffic_class: 3,
            hop_limit: 64,
            flow_label: 5,
            datagram_len: 100,
        };
        let mut area = [0; grh::LEN];
        grh.emit(&mut area);
        area
    }

    #[test]
    fn an_answer_to_a_group_or_to_loopback_leaves_from_an_address_like_the_senders() {
        let own = ["192.0.2.1", "2001:db8::1", "fe80::1"].map(|ip| Address {
            ip: ip.parse().expect("an address"),
            interface: "eth".into(),
            index: 2,
            loopback: false,
            link_local: ip.starts_with("fe80"),
            broadcast: None,
        });
        let index = |source, destination| {
            let grh = Grh::parse(&area(source, destination)).expect("a header");
            sgid_index(&own, &grh)
        };
        assert_eq!(index("192.0.2.9", "192.0.2.1"), 0);
        assert_eq!(index("fe80::9", "2001:db8::1"), 1);
        assert_eq!(index("2001:db8::1", "::1"), 1);
        assert_eq!(index("fe80::9", "ff02::1"), 2);
        assert_eq!(index("192.0.2.9", "239.0.0.1"), 0);
        assert_eq!(sgid_index(&own[..1], &Grh::parse(&area("fe80::9", "::1")).expect("a header")), 0);
    }

    #[test]
    fn to_a_loopback_address_the_source_is_that_one() {
        let source = |own: &str, to: &str| source(own.parse().expect("ours"), to.parse().expect("a peer"));
        assert_eq!(source("fe80::1", "::1"), "::1".parse().ok());
        assert_eq!(source("192.0.2.1", "127.0.0.9"), "127.0.0.9".parse().ok());
        assert_eq!(source("192.0.2.1", "ff02::1"), None);
        assert_eq!(source("127.0.0.1", "127.0.0.1"), "127.0.0.1".parse().ok());
        assert_eq!(source("fe80::1", "fe80::2"), "fe80::1".parse().ok());
    }

    #[test]
    fn the_way_back_leads_to_the_source_of_the_header() {
        let port = RdmaDevice::list()[0].port();
        // SAFETY: plain C data.
        let mut wc: ibv_wc = unsafe { zeroed() };
        (wc.wc_flags, wc.slid, wc.sl) = (IBV_WC_GRH, 7, 2);
        for (source, flow_label) in [("192.0.2.9", 0), ("2001:db8::9", 5)] {
            let other = if source.contains(':') { "2001:db8::1" } else { "192.0.2.200" };
            let area = area(source, other);
            // SAFETY: the area is there.
            let attr = unsafe { way_back(port, &wc, area.as_ptr().cast()) }.expect("a header");
            // SAFETY: plain bytes.
            let dgid = unsafe { attr.grh.dgid.raw };
            // SAFETY: plain bytes.
            assert_eq!(dgid, unsafe { gid_of(source.parse().expect("an address")).raw });
            assert_eq!((attr.is_global, attr.dlid, attr.sl, attr.port_num), (1, 7, 2, 1));
            assert_eq!((attr.grh.flow_label, attr.grh.traffic_class), (flow_label, 3));
        }
        // SAFETY: the area is there.
        assert!(unsafe { way_back(port, &wc, [0_u8; grh::LEN].as_ptr().cast()) }.is_err());
        wc.wc_flags = 0;
        // SAFETY: nothing is read.
        let attr = unsafe { way_back(port, &wc, std::ptr::null()) }.expect("a LID");
        assert_eq!((attr.is_global, attr.dlid), (0, 7));
    }
}
