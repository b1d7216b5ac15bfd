//! Queries of device and port. If a number promises a size, a depth or a number of objects, it is enforced.

use std::ffi::c_int;
use std::net::IpAddr;

use uwarp_abi_types::verbs::*;
use uwarp_driver::config::{Config, UdMtu, View};
use uwarp_driver::port::Port;

use super::clock;
use super::context::{Context, guid, host_guid};
use super::device_memory;
use super::view::{self, PORT};
use crate::convention::{Code, MinusOne, Negative};
use crate::failure::{Failure, required};
use crate::object::{look, zeroed};
use crate::{entry, slot};

/// `max_pkeys`, and the only partition key: the default one.
const PKEY: u16 = 0xffff;

/// Vendors have an IEEE number. We have none, and programs treat 0 as an error. So this is one of the numbers
/// that are free to use ("locally administered", 02-75-77).
const VENDOR: u32 = 0x02_7577;

/// Multicast groups: as many as Linux lets one socket join, unless `igmp_max_memberships` says otherwise.
const GROUPS: u32 = 20;

fn count(n: u32) -> c_int {
    c_int::try_from(n).unwrap_or(c_int::MAX)
}

fn device_attr(context: &Context) -> ibv_device_attr {
    let limits = context.nic.limits();
    // SAFETY: plain C data.
    let mut attr: ibv_device_attr = unsafe { zeroed() };
    for (to, from) in attr.fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *to = from.cast_signed();
    }
    attr.node_guid = guid(context.device);
    attr.sys_image_guid = host_guid();
    attr.max_mr_size = limits.max_mr_size;
    // Pages may have any size.
    attr.page_size_cap = !0xfff;
    attr.vendor_id = VENDOR;
    attr.max_qp = count(limits.max_qp);
    attr.max_qp_wr = count(limits.max_qp_wr);
    // Send with Invalidate and local invalidation.
    attr.device_cap_flags = IBV_DEVICE_MEM_MGT_EXTENSIONS
        | IBV_DEVICE_SRQ_RESIZE
        | IBV_DEVICE_MEM_WINDOW
        | IBV_DEVICE_MEM_WINDOW_TYPE_2B;
    attr.max_sge = count(limits.max_sge);
    attr.max_sge_rd = count(limits.max_sge_rd);
    attr.max_srq = count(limits.max_srq);
    attr.max_srq_wr = count(limits.max_srq_wr);
    attr.max_srq_sge = count(limits.max_srq_sge);
    attr.max_cq = count(limits.max_cq);
    attr.max_cqe = count(limits.max_cqe);
    attr.max_mr = count(limits.max_mr);
    attr.max_mw = count(limits.max_mw);
    attr.max_pd = count(limits.max_pd);
    attr.max_ah = count(limits.max_ah);
    attr.max_mcast_grp = count(GROUPS);
    attr.max_mcast_qp_attach = count(limits.max_qp);
    attr.max_total_mcast_qp_attach = count(GROUPS.saturating_mul(limits.max_qp));
    attr.max_qp_rd_atom = count(limits.max_qp_rd_atom);
    attr.max_qp_init_rd_atom = count(limits.max_qp_rd_atom);
    attr.max_res_rd_atom = count(limits.max_qp.saturating_mul(limits.max_qp_rd_atom));
    // IBV_ATOMIC_GLOB would be true, too, but UCX knows this value alone.
    // Shown as iWARP, the device may have peers without atomics (docs/adr/029).
    attr.atomic_cap = if Config::get().view == View::Iwarp { IBV_ATOMIC_NONE } else { IBV_ATOMIC_HCA };
    attr.max_pkeys = 1;
    attr.phys_port_cnt = 1;
    attr
}

/// # Safety
/// `context` is alive or NULL; `attr` is valid or NULL.
unsafe fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        let context = look::<Context>(context)?;
        *required(attr, "device_attr")? = device_attr(context);
    }
    Ok(())
}

/// The exported function, with the structure of older programs, which ends before `port_cap_flags2`. Newer
/// programs call through the context and pass the length of their structure.
///
/// # Safety
/// As [`query_device`].
unsafe fn query_old_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut _compat_ibv_port_attr,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe { port_attr(context, port, attr.cast(), std::mem::offset_of!(ibv_port_attr, port_cap_flags2)) }
}

entry! {
    /// ibv_query_device(3).
    fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> Code {
        query_device(context, attr)
    }

    /// ibv_query_port(3).
    fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut _compat_ibv_port_attr) -> Code {
        query_old_port(context, port, attr)
    }

    /// ibv_query_gid(3).
    fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> MinusOne {
        let own = look::<Context>(context)?.device.port();
        let index = u32::try_from(index).map_err(|_| Failure::invalid("negative index"))?;
        *required(gid, "gid")? = gid_entry(own, port.into(), index)?.gid;
        Ok(())
    }

    /// ibv_query_gid_ex(3), which is inline and calls this with the size of its structure.
    fn _ibv_query_gid_ex(
        context: *mut ibv_context,
        port: u32,
        index: u32,
        entry: *mut ibv_gid_entry,
        flags: u32,
        entry_size: usize,
    ) -> Code {
        let own = look::<Context>(context)?.device.port();
        required(entry, "entry")?;
        if flags != 0 {
            return Err(Failure::unsupported("flags"));
        }
        let found = gid_entry(own, port, index)?;
        if !exists(&found) {
            return Err(Failure::new(libc::ENODATA, "the place has no GID now"));
        }
        copy_prefix(&found, entry, entry_size);
        Ok(())
    }

    /// ibv_query_gid_table(3), which is inline and calls this with the size of its structure. Returns the
    /// number of entries or a negative error number.
    fn _ibv_query_gid_table(
        context: *mut ibv_context,
        entries: *mut ibv_gid_entry,
        max_entries: usize,
        flags: u32,
        entry_size: usize,
    ) -> Negative<isize> {
        let own = look::<Context>(context)?.device.port();
        required(entries, "entries")?;
        if flags != 0 {
            return Err(Failure::unsupported("flags"));
        }
        let mut table = gid_table(own);
        table.retain(exists);
        if table.len() > max_entries {
            return Err(Failure::invalid("more entries than the program has room for"));
        }
        for (i, found) in table.iter().enumerate() {
            // Entries of older programs may be shorter than ours.
            copy_prefix(found, entries.byte_add(i * entry_size), entry_size);
        }
        Ok(table.len() as isize)
    }

    /// The private symbol behind `ibv_devinfo -v`: 0 for InfiniBand and RoCE v1, 1 for RoCE v2.
    fn ibv_query_gid_type(context: *mut ibv_context, port: u8, index: u32, kind: *mut u32) -> MinusOne {
        let own = look::<Context>(context)?.device.port();
        let found = gid_entry(own, port.into(), index)?;
        *required(kind, "type")? = u32::from(exists(&found) && found.gid_type == IBV_GID_TYPE_ROCE_V2);
        Ok(())
    }

    /// ibv_query_pkey(3).
    fn ibv_query_pkey(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> MinusOne {
        look::<Context>(context)?;
        if port != PORT || index != 0 {
            return Err(Failure::invalid("the device has one port and one partition key"));
        }
        *required(pkey, "pkey")? = PKEY.to_be();
        Ok(())
    }

    /// ibv_get_pkey_index(3).
    fn ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> MinusOne<c_int> {
        look::<Context>(context)?;
        if port != PORT || pkey != PKEY.to_be() {
            return Err(Failure::invalid("no such partition key"));
        }
        Ok(0)
    }

    /// ibv_query_port_speed(3): in units of 100 Mb/s.
    fn ibv_query_port_speed(context: *mut ibv_context, port: u32, speed: *mut u64) -> Code {
        let own = look::<Context>(context)?.device.port();
        required(speed, "port_speed")?;
        if port != u32::from(PORT) {
            return Err(Failure::invalid("the device has one port, number 1"));
        }
        let mbps = own.state().netdev.speed();
        let mbps = mbps.ok_or_else(|| Failure::unsupported("the interface has no known speed"))?;
        *speed = u64::from(mbps / 100);
        Ok(())
    }
}

slot! {
    /// `ibv_context_ops._compat_query_device`.
    verb fn compat_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> Code {
        query_device(context, attr)
    }

    /// `ibv_context_ops._compat_query_port`.
    verb fn compat_query_port(context: *mut ibv_context, port: u8, attr: *mut _compat_ibv_port_attr) -> Code {
        query_old_port(context, port, attr)
    }

    /// `verbs_context.query_port`: fills as much as the caller's structure has room for.
    verb fn query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr, length: usize) -> Code {
        port_attr(context, port, attr, length)
    }

    /// `verbs_context.query_device_ex`.
    verb fn query_device_ex(
        context: *mut ibv_context,
        input: *const ibv_query_device_ex_input,
        attr: *mut ibv_device_attr_ex,
        size: usize,
    ) -> Code {
        let context = look::<Context>(context)?;
        required(attr, "attr")?;
        if input.as_ref().is_some_and(|input| input.comp_mask != 0) {
            return Err(Failure::invalid("unknown members in comp_mask"));
        }
        let mut all: ibv_device_attr_ex = zeroed();
        all.orig_attr = device_attr(context);
        all.device_cap_flags_ex = all.orig_attr.device_cap_flags.into();
        // Memory is not pinned: registration touches no pages unless the program requests it.
        all.odp_caps.general_caps = u64::from(IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT);
        all.odp_caps.per_transport_caps.rc_odp_caps = IBV_ODP_SUPPORT_SEND
            | IBV_ODP_SUPPORT_RECV
            | IBV_ODP_SUPPORT_WRITE
            | IBV_ODP_SUPPORT_READ
            | IBV_ODP_SUPPORT_ATOMIC
            | IBV_ODP_SUPPORT_SRQ_RECV;
        all.max_dm_size = device_memory::SIZE.into();
        all.phys_port_cnt_ex = 1;
        (all.completion_timestamp_mask, all.hca_core_clock) = (u64::MAX, clock::KHZ);
        copy_prefix(&all, attr, size);
        Ok(())
    }
}

/// Copies as much of a structure as the caller's version of it has; what the caller knows beyond ours is
/// zeroed.
///
/// # Safety
/// `to` has `length` bytes.
unsafe fn copy_prefix<T>(from: &T, to: *mut T, length: usize) {
    let ours = size_of::<T>().min(length);
    // SAFETY: within both structures; the caller's has `length` bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(from).cast::<u8>(), to.cast::<u8>(), ours);
        to.cast::<u8>().add(ours).write_bytes(0, length - ours);
    }
}

/// # Safety
/// `context` as everywhere; `attr` has `length` bytes.
unsafe fn port_attr(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    length: usize,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    let context = unsafe { look::<Context>(context) }?;
    required(attr, "port_attr")?;
    if port != PORT {
        return Err(Failure::invalid("the device has one port, number 1"));
    }
    let state = context.device.port().state();
    let dev = &state.netdev;
    let speed = dev.speed();
    // SAFETY: plain C data.
    let mut all: ibv_port_attr = unsafe { zeroed() };
    all.state = if dev.up { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN };
    // "LinkUp" and "Disabled" of InfiniBand's physical port states.
    all.phys_state = if dev.up { 5 } else { 3 };
    all.max_mtu = IBV_MTU_4096;
    all.active_mtu = mtu(dev.mtu);
    all.gid_tbl_len = c_int::try_from(state.addresses.len().max(1)).unwrap_or(c_int::MAX);
    all.pkey_tbl_len = 1;
    if Config::get().view == View::Ib {
        (all.lid, all.sm_lid) = (state.lid(), state.lid());
    }
    all.max_msg_sz = context.nic.limits().max_message;
    all.port_cap_flags = IBV_PORT_CM_SUP;
    all.max_vl_num = 1;
    (all.active_width, all.active_speed) = width_and_speed(speed);
    all.active_speed_ex = all.active_speed.into();
    all.link_layer = view::shown().link_layer;
    // SAFETY: the caller's promise.
    unsafe { copy_prefix(&all, attr, length) };
    Ok(())
}

/// `active_mtu` of a port, and the MTU of paths from it.
pub fn active_mtu(port: &Port) -> ibv_mtu {
    mtu(port.mtu())
}

/// The largest of InfiniBand's packet sizes, or the largest that fits the interface's: datagrams that are
/// longer than a packet go in parts. An interface of less than 1280 bytes is for something else.
fn mtu(bytes: u32) -> ibv_mtu {
    const LEAST: u32 = 1280;
    let takes_parts = Config::get().ud_mtu == UdMtu::Auto && bytes >= LEAST;
    if takes_parts { IBV_MTU_4096 } else { whole_mtu(bytes) }
}

/// The largest of InfiniBand's packet sizes that fits the interface's.
fn whole_mtu(bytes: u32) -> ibv_mtu {
    match bytes {
        4096.. => IBV_MTU_4096,
        2048.. => IBV_MTU_2048,
        1024.. => IBV_MTU_1024,
        512.. => IBV_MTU_512,
        _ => IBV_MTU_256,
    }
}

/// Speed in Mb/s of an interface that reports none. Such interfaces are virtual (loopback, virtio); Linux's
/// own virtual Ethernet (veth, tun) claims this one. Programs choose by it: UCX takes a link of 2.5 Gb/s for
/// one with a latency of 5 us, and sends up to 385 KiB in pieces of 8 KiB, where an RDMA Read takes half the
/// time.
const UNKNOWN_SPEED: u32 = 10_000;

/// InfiniBand's link width (1: 1X, 2: 4X) and lane speed codes (1: 2.5, 2: 5, 8: 10, 32: 25, 64: 50, 128: 100
/// Gb/s a lane) whose product comes near an Ethernet speed in Mb/s.
fn width_and_speed(mbps: Option<u32>) -> (u8, u8) {
    match mbps.unwrap_or(UNKNOWN_SPEED) {
        ..=2_500 => (1, 1),
        2_501..=5_000 => (1, 2),
        5_001..=10_000 => (1, 8),
        10_001..=20_000 => (2, 2),
        20_001..=25_000 => (1, 32),
        25_001..=40_000 => (2, 8),
        40_001..=50_000 => (1, 64),
        50_001..=100_000 => (2, 32),
        100_001..=200_000 => (2, 64),
        _ => (2, 128),
    }
}

/// An address as a GID: IPv6 as it is, IPv4 mapped.
pub fn gid_of(address: IpAddr) -> ibv_gid {
    let v6 = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    ibv_gid { raw: v6.octets() }
}

/// Of a place of the table without an address.
const NO_GID: ibv_gid = ibv_gid { raw: [0; 16] };

fn exists(entry: &ibv_gid_entry) -> bool {
    // SAFETY: plain bytes.
    unsafe { entry.gid.raw != NO_GID.raw }
}

/// The GID table of a port: its addresses, of several interfaces at first the default route's before the
/// others. A place without an address has a GID of zeros.
fn gid_table(port: &Port) -> Vec<ibv_gid_entry> {
    let gid_type = view::shown().gid_type;
    port.addresses()
        .iter()
        .zip(0..)
        .map(|(address, gid_index)| ibv_gid_entry {
            gid: if address.is_none() { NO_GID } else { gid_of(address.ip) },
            gid_index,
            port_num: PORT.into(),
            gid_type,
            ndev_ifindex: address.index,
        })
        .collect()
}

fn gid_entry(own: &Port, port: u32, index: u32) -> Result<ibv_gid_entry, Failure> {
    if port != u32::from(PORT) {
        return Err(Failure::invalid("the device has one port, number 1"));
    }
    gid_table(own)
        .into_iter()
        .nth(index as usize)
        .ok_or_else(|| Failure::invalid("the index is beyond the end of the GID table"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_of_addresses() {
        // SAFETY: plain bytes.
        let raw = |address: &str| unsafe { gid_of(address.parse().unwrap()).raw };
        assert_eq!(raw("192.0.2.1"), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1]);
        assert_eq!(raw("fe80::1"), [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn mtu_never_promises_more_than_the_interface_has() {
        let got = [65536, 9000, 4095, 1500, 1280, 600, 0].map(whole_mtu);
        assert_eq!(
            got,
            [IBV_MTU_4096, IBV_MTU_4096, IBV_MTU_2048, IBV_MTU_1024, IBV_MTU_1024, IBV_MTU_512, IBV_MTU_256]
        );
    }
}
