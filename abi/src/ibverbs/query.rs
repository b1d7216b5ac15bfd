//! Queries of device and port. Where a number promises a size or a depth, it is the number the RNIC enforces.
//!
//! How many objects there may be (`max_qp`, `max_cq`, `max_srq`, `max_mr`, `max_pd`) has to be some number, as programs size
//! tables by it; nothing is refused beyond it. What bounds them is the process' memory, and for queue pairs the ports
//! that their numbers come from.

use std::ffi::c_int;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use uwarp_abi_types::verbs::*;
use uwarp_driver::{Nic, address};

use super::device::{Context, Device};
use super::netdev::{self, Netdev};
use super::view;
use crate::entry::{Code, Failure, MinusOne};
use crate::object::{look, zeroed};
use crate::{entry, slot};

/// The device has one port, and it has this number.
pub const PORT: u8 = 1;

/// `max_pkeys`, and the only partition key: the default one.
const PKEY: u16 = 0xffff;

/// Vendors are told by their IEEE number. We have none, and programs take 0 for an error: one of the numbers anybody may
/// use ("locally administered", 02-75-77), which is nobody's.
const VENDOR: u32 = 0x02_7577;

fn count(n: u32) -> c_int {
    c_int::try_from(n).unwrap_or(c_int::MAX)
}

fn device_attr(nic: &Nic) -> ibv_device_attr {
    let limits = nic.limits();
    // SAFETY: plain C data.
    let mut attr: ibv_device_attr = unsafe { zeroed() };
    for (to, from) in attr.fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *to = from.cast_signed();
    }
    attr.node_guid = Device::get().guid();
    attr.sys_image_guid = Device::get().guid();
    attr.max_mr_size = limits.max_mr_size;
    // Pages are not our business: any size will do.
    attr.page_size_cap = !0xfff;
    attr.vendor_id = VENDOR;
    attr.max_qp = count(limits.max_qp);
    attr.max_qp_wr = count(limits.max_qp_wr);
    // Send with Invalidate and local invalidation.
    attr.device_cap_flags = IBV_DEVICE_MEM_MGT_EXTENSIONS | IBV_DEVICE_SRQ_RESIZE;
    attr.max_sge = count(limits.max_sge);
    attr.max_sge_rd = count(limits.max_sge_rd);
    attr.max_srq = count(limits.max_srq);
    attr.max_srq_wr = count(limits.max_srq_wr);
    attr.max_srq_sge = count(limits.max_srq_sge);
    attr.max_cq = count(limits.max_cq);
    attr.max_cqe = count(limits.max_cqe);
    attr.max_mr = count(limits.max_mr);
    attr.max_pd = count(limits.max_pd);
    attr.max_qp_rd_atom = count(limits.max_qp_rd_atom);
    attr.max_qp_init_rd_atom = count(limits.max_qp_rd_atom);
    attr.max_res_rd_atom = count(limits.max_qp.saturating_mul(limits.max_qp_rd_atom));
    attr.atomic_cap = IBV_ATOMIC_NONE;
    attr.max_pkeys = 1;
    attr.phys_port_cnt = 1;
    attr
}

entry! {
    /// ibv_query_device(3).
    verb fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> Code {
        let context = look::<Context>(context)?;
        *entry::required(attr, "device_attr")? = device_attr(&context.nic);
        Ok(())
    }

    /// ibv_query_port(3) as exported: older programs' structure, which ends before `port_cap_flags2`. Newer ones come
    /// through the context with the length of theirs.
    verb fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut _compat_ibv_port_attr) -> Code {
        port_attr(context, port, attr.cast(), std::mem::offset_of!(ibv_port_attr, port_cap_flags2))
    }

    /// ibv_query_gid(3).
    verb fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> MinusOne {
        look::<Context>(context)?;
        let index = u32::try_from(index).map_err(|_| Failure::invalid("negative index"))?;
        *entry::required(gid, "gid")? = gid_entry(port.into(), index)?.gid;
        Ok(())
    }

    /// ibv_query_gid_ex(3), which is inline and calls this with the size of its structure.
    verb fn _ibv_query_gid_ex(
        context: *mut ibv_context,
        port: u32,
        index: u32,
        entry: *mut ibv_gid_entry,
        flags: u32,
        entry_size: usize,
    ) -> Code {
        look::<Context>(context)?;
        entry::required(entry, "entry")?;
        if flags != 0 {
            return Err(Failure::unsupported("flags"));
        }
        let found = gid_entry(port, index)?;
        copy_prefix(&found, entry, entry_size);
        Ok(())
    }

    /// ibv_query_gid_table(3), which is inline and calls this with the size of its structure. Returns the number of
    /// entries or a negative error number.
    verb fn _ibv_query_gid_table(
        context: *mut ibv_context,
        entries: *mut ibv_gid_entry,
        max_entries: usize,
        flags: u32,
        entry_size: usize,
    ) -> NegativeSize {
        look::<Context>(context)?;
        entry::required(entries, "entries")?;
        if flags != 0 {
            return Err(Failure::unsupported("flags"));
        }
        let table = gid_table();
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
    verb fn ibv_query_gid_type(context: *mut ibv_context, port: u8, index: u32, kind: *mut u32) -> MinusOne {
        look::<Context>(context)?;
        let found = gid_entry(port.into(), index)?;
        *entry::required(kind, "type")? = u32::from(found.gid_type == IBV_GID_TYPE_ROCE_V2);
        Ok(())
    }

    /// ibv_query_pkey(3).
    verb fn ibv_query_pkey(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> MinusOne {
        look::<Context>(context)?;
        if port != PORT || index != 0 {
            return Err(Failure::invalid("one port with one partition key"));
        }
        *entry::required(pkey, "pkey")? = PKEY.to_be();
        Ok(())
    }

    /// ibv_get_pkey_index(3).
    verb fn ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> MinusOne<c_int> {
        look::<Context>(context)?;
        if port == PORT && pkey == PKEY.to_be() { Ok(0) } else { Err(Failure::invalid("no such partition key")) }
    }

    /// ibv_query_port_speed(3): in units of 100 Mb/s.
    verb fn ibv_query_port_speed(context: *mut ibv_context, port: u32, speed: *mut u64) -> Code {
        look::<Context>(context)?;
        entry::required(speed, "port_speed")?;
        if port != u32::from(PORT) {
            return Err(Failure::invalid("one port"));
        }
        let mbps = primary().and_then(|dev| dev.speed());
        let mbps = mbps.ok_or_else(|| Failure::unsupported("the interface does not tell its speed"))?;
        *speed = u64::from(mbps / 100);
        Ok(())
    }
}

slot! {
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
        entry::required(attr, "attr")?;
        if input.as_ref().is_some_and(|input| input.comp_mask != 0) {
            return Err(Failure::invalid("comp_mask asks for something unknown"));
        }
        let mut all: ibv_device_attr_ex = zeroed();
        all.orig_attr = device_attr(&context.nic);
        all.device_cap_flags_ex = all.orig_attr.device_cap_flags.into();
        // Memory is not pinned: nothing is faulted in at registration when the program does not want it.
        all.odp_caps.general_caps = u64::from(IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT);
        all.odp_caps.per_transport_caps.rc_odp_caps =
            IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_SRQ_RECV;
        all.phys_port_cnt_ex = 1;
        copy_prefix(&all, attr, size);
        Ok(())
    }
}

/// A count, or a negative error number.
#[derive(Debug)]
pub struct NegativeSize;

impl entry::Convention for NegativeSize {
    type C = isize;
    type Value = isize;
    fn success(value: isize) -> isize {
        value
    }
    fn failure(errno: c_int) -> isize {
        entry::set_errno(errno);
        -(errno as isize)
    }
}

/// Copies as much of a structure as the caller's version of it has; what the caller knows beyond ours is zeroed.
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

/// The interface of the port: that of GID 0.
fn primary() -> Option<Netdev> {
    let index = address::list().first()?.index;
    netdev::list().into_iter().find(|dev| dev.index == index)
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
    entry::required(attr, "port_attr")?;
    if port != PORT {
        return Err(Failure::invalid("the device has one port, number 1"));
    }
    let dev = primary().unwrap_or_default();
    let speed = dev.speed();
    // SAFETY: plain C data.
    let mut all: ibv_port_attr = unsafe { zeroed() };
    all.state = if dev.up { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN };
    // "LinkUp" and "Disabled" of InfiniBand's physical port states.
    all.phys_state = if dev.up { 5 } else { 3 };
    all.max_mtu = IBV_MTU_4096;
    all.active_mtu = mtu(dev.mtu);
    all.gid_tbl_len = c_int::try_from(gid_table().len().max(1)).unwrap_or(c_int::MAX);
    all.pkey_tbl_len = 1;
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

/// `active_mtu` of the port, and the MTU of paths from it, as it was within the last tenth of a second: programs resolve routes and make
/// queue pairs by the thousand, and to ask the system takes longer than all the rest of it.
pub fn active_mtu() -> ibv_mtu {
    const FRESH: Duration = Duration::from_millis(100);
    static LAST: Mutex<Option<(Instant, ibv_mtu)>> = Mutex::new(None);
    let mut last = LAST.lock();
    match *last {
        Some((at, mtu)) if at.elapsed() < FRESH => mtu,
        _ => {
            let mtu = mtu(primary().unwrap_or_default().mtu);
            *last = Some((Instant::now(), mtu));
            mtu
        }
    }
}

/// The largest of InfiniBand's packet sizes that fits the interface's.
fn mtu(bytes: u32) -> ibv_mtu {
    match bytes {
        4096.. => IBV_MTU_4096,
        2048.. => IBV_MTU_2048,
        1024.. => IBV_MTU_1024,
        512.. => IBV_MTU_512,
        _ => IBV_MTU_256,
    }
}

/// InfiniBand's link width (1: 1X, 2: 4X) and lane speed codes (1: 2.5, 2: 5, 8: 10, 32: 25, 64: 50, 128: 100 Gb/s a lane)
/// whose product comes near an Ethernet speed in Mb/s. An interface that does not tell (loopback) passes for 1X, 2.5.
fn width_and_speed(mbps: Option<u32>) -> (u8, u8) {
    match mbps.unwrap_or(1_000) {
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

/// The GID table: the host's addresses, the default route's interface first.
pub fn gid_table() -> Vec<ibv_gid_entry> {
    let gid_type = view::shown().gid_type;
    address::list()
        .into_iter()
        .zip(0..)
        .map(|(address, gid_index)| ibv_gid_entry {
            gid: gid_of(address.ip),
            gid_index,
            port_num: PORT.into(),
            gid_type,
            ndev_ifindex: address.index,
        })
        .collect()
}

fn gid_entry(port: u32, index: u32) -> Result<ibv_gid_entry, Failure> {
    if port != u32::from(PORT) {
        return Err(Failure::invalid("the device has one port, number 1"));
    }
    gid_table()
        .into_iter()
        .nth(index as usize)
        .ok_or_else(|| Failure::invalid("beyond the end of the GID table"))
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
        let got = [65536, 9000, 4095, 1500, 1280, 600, 0].map(mtu);
        assert_eq!(
            got,
            [IBV_MTU_4096, IBV_MTU_4096, IBV_MTU_2048, IBV_MTU_1024, IBV_MTU_1024, IBV_MTU_512, IBV_MTU_256]
        );
    }
}
