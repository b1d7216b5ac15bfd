//! What stands in the files: what the verbs say, in the form that the kernel gives it in sysfs.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr};

use uwarp_abi_types::verbs::{IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND};

use crate::verbs::{Device, Port};

/// Numbers of uverbs0, as Linux gives them (Documentation/admin-guide/devices.txt); uverbs1 has the next one.
const UVERBS_MAJOR: u32 = 231;
const UVERBS_MINOR: u32 = 192;
/// Version of the interface between libibverbs and the kernel, the only one there is.
const UVERBS_ABI: &str = "6";
/// What a driver's library may be told; siw's is 1.
const DRIVER_ABI: &str = "1";

/// The addresses of this host, as MVAPICH2 reads them: one of IPv4 for each device, in order.
pub const ADDRESSES: &str = "mv2.conf";

/// Something in the tree, by its path below the root.
#[derive(Debug, PartialEq, Eq)]
pub enum Node {
    /// Its content without the newline at the end.
    File(String, String),
    /// Where it leads.
    Link(String, String),
}

/// All of it.
pub fn nodes(devices: &[Device]) -> Vec<Node> {
    let file = |path: String, text: &str| Node::File(path, text.to_owned());
    let mut nodes = vec![
        file("sys/class/infiniband_verbs/abi_version".to_owned(), UVERBS_ABI),
        link("dev/infiniband/rdma_cm", "/dev/null"),
    ];
    for device in devices {
        let Device { uverbs, name, .. } = device;
        nodes.push(link(&format!("dev/infiniband/{uverbs}"), "/dev/null"));
        let verbs = format!("sys/class/infiniband_verbs/{uverbs}");
        for (path, text) in [("ibdev", name.as_str()), ("abi_version", DRIVER_ABI), ("dev", &numbers(uverbs))]
        {
            nodes.push(file(format!("{verbs}/{path}"), text));
        }
        let directory = format!("sys/class/infiniband/{name}");
        for (path, text) in of_device(device) {
            nodes.push(Node::File(format!("{directory}/{path}"), text));
        }
        for port in &device.ports {
            for (path, text) in of_port(port) {
                nodes.push(Node::File(format!("{directory}/ports/{}/{path}", port.number), text));
            }
        }
        nodes.extend(hardware(&format!("{directory}/device"), device));
    }
    let addresses: Vec<_> = devices.iter().filter_map(address).map(|ip| ip.to_string()).collect();
    if !addresses.is_empty() {
        nodes.push(file(ADDRESSES.to_owned(), &addresses.join("\n")));
    }
    nodes
}

/// The first of IPv4.
fn address(device: &Device) -> Option<Ipv4Addr> {
    let mut gids = device.ports.iter().flat_map(|port| &port.gids);
    gids.find_map(|gid| gid.raw.to_ipv4_mapped())
}

fn link(path: &str, to: &str) -> Node {
    Node::Link(path.to_owned(), to.to_owned())
}

/// Major and minor number of a character device `uverbsN`.
fn numbers(uverbs: &str) -> String {
    let number = uverbs.strip_prefix("uverbs").and_then(|number| number.parse::<u32>().ok()).unwrap_or(0);
    format!("{UVERBS_MAJOR}:{}", UVERBS_MINOR + number)
}

fn of_device(device: &Device) -> Vec<(&'static str, String)> {
    let kind = if device.is_rnic { "4: RNIC" } else { "1: CA" };
    vec![
        ("node_type", kind.to_owned()),
        ("node_guid", groups(&device.guid)),
        ("sys_image_guid", groups(&device.sys_image_guid)),
        ("node_desc", device.name.clone()),
        ("fw_ver", device.firmware.clone()),
        ("hca_type", "uwarp".to_owned()),
        ("hw_rev", "0".to_owned()),
        ("board_id", "uwarp".to_owned()),
    ]
}

fn of_port(port: &Port) -> Vec<(String, String)> {
    let attributes = &port.attributes;
    let mut files = vec![
        ("state".to_owned(), state(attributes.state)),
        ("phys_state".to_owned(), phys_state(attributes.phys_state)),
        ("rate".to_owned(), rate(attributes.active_width, attributes.active_speed)),
        ("link_layer".to_owned(), link_layer(attributes.link_layer).to_owned()),
        ("lid".to_owned(), format!("{:#x}", attributes.lid)),
        ("lid_mask_count".to_owned(), attributes.lmc.to_string()),
        ("sm_lid".to_owned(), format!("{:#x}", attributes.sm_lid)),
        ("sm_sl".to_owned(), attributes.sm_sl.to_string()),
        ("cap_mask".to_owned(), format!("{:#010x}", attributes.port_cap_flags)),
    ];
    for gid in &port.gids {
        let kind = if gid.kind == IBV_GID_TYPE_ROCE_V2 { "RoCE v2" } else { "IB/RoCE v1" };
        files.push((format!("gids/{}", gid.index), groups(&gid.raw.octets())));
        files.push((format!("gid_attrs/types/{}", gid.index), kind.to_owned()));
        if let Some(name) = interface(gid.interface) {
            files.push((format!("gid_attrs/ndevs/{}", gid.index), name));
        }
    }
    if port.gids.is_empty() {
        // The table has one entry at least.
        files.push(("gids/0".to_owned(), groups(&Ipv6Addr::UNSPECIFIED.octets())));
    }
    for (index, pkey) in port.pkeys.iter().enumerate() {
        files.push((format!("pkeys/{index}"), format!("{pkey:#06x}")));
    }
    for (directory, names) in [("counters", COUNTERS.as_slice()), ("hw_counters", &OWN_COUNTERS)] {
        files.extend(names.iter().map(|name| (format!("{directory}/{name}"), "0".to_owned())));
    }
    files
}

/// Written anew by the preloaded library when a program opens them (abi/fs/src/counters.rs).
const COUNTERS: [&str; 21] = [
    "VL15_dropped",
    "excessive_buffer_overrun_errors",
    "link_downed",
    "link_error_recovery",
    "local_link_integrity_errors",
    "multicast_rcv_packets",
    "multicast_xmit_packets",
    "port_rcv_constraint_errors",
    "port_rcv_data",
    "port_rcv_errors",
    "port_rcv_packets",
    "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors",
    "port_xmit_constraint_errors",
    "port_xmit_data",
    "port_xmit_discards",
    "port_xmit_packets",
    "port_xmit_wait",
    "symbol_error",
    "unicast_rcv_packets",
    "unicast_xmit_packets",
];
const OWN_COUNTERS: [&str; 12] = [
    "dropped_datagrams",
    "failed",
    "flushed",
    "receive_stalls",
    "received_bytes",
    "received_messages",
    "retransmits",
    "room_stalls",
    "sent_bytes",
    "sent_messages",
    "terminates_received",
    "terminates_sent",
];

/// The directory of the device behind the port: its interface, and where that is in the machine. No vendor
/// and no device number: programs take an adapter's for that adapter.
fn hardware(directory: &str, device: &Device) -> Vec<Node> {
    let gids = device.ports.iter().flat_map(|port| &port.gids);
    let Some(name) = gids.map(|gid| gid.interface).find_map(interface) else { return Vec::new() };
    let real = format!("/sys/class/net/{name}");
    let mut nodes = vec![link(&format!("{directory}/net/{name}"), &real)];
    for file in ["numa_node", "local_cpus", "local_cpulist"] {
        if let Ok(text) = fs::read_to_string(format!("{real}/device/{file}")) {
            nodes.push(Node::File(format!("{directory}/{file}"), text.trim_end().to_owned()));
        } else if file == "numa_node" {
            // Of no node.
            nodes.push(Node::File(format!("{directory}/{file}"), "-1".to_owned()));
        }
    }
    nodes
}

fn interface(index: u32) -> Option<String> {
    nix::net::if_::if_indextoname(index).ok()?.into_string().ok()
}

/// As in `ibv_port_state`.
fn state(state: u32) -> String {
    let names = ["NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"];
    format!("{state}: {}", names.get(state as usize).unwrap_or(&"UNKNOWN"))
}

fn phys_state(state: u8) -> String {
    let names =
        ["NOP", "Sleep", "Polling", "Disabled", "PortConfigurationTraining", "LinkUp", "LinkErrorRecovery"];
    format!("{state}: {}", names.get(usize::from(state)).unwrap_or(&"<unknown>"))
}

fn link_layer(layer: u8) -> &'static str {
    match layer.into() {
        IBV_LINK_LAYER_ETHERNET => "Ethernet",
        IBV_LINK_LAYER_INFINIBAND => "InfiniBand",
        _ => "Unknown",
    }
}

/// Lanes times the speed of one, in tenths of Gb/s, as `rate_show` of the kernel's `sysfs.c` has it.
fn rate(width: u8, speed: u8) -> String {
    let (tenths, name) = match speed {
        2 => (50, " DDR"),
        4 => (100, " QDR"),
        8 => (100, " FDR10"),
        16 => (140, " FDR"),
        32 => (250, " EDR"),
        64 => (500, " HDR"),
        128 => (1000, " NDR"),
        _ => (25, ""),
    };
    let lanes = match width {
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 1,
    };
    let all = tenths * lanes;
    let half = if all % 10 == 5 { ".5" } else { "" };
    format!("{}{half} Gb/sec ({lanes}X{name})", all / 10)
}

/// Groups of four digits, none left out.
fn groups(bytes: &[u8]) -> String {
    let groups = bytes.chunks_exact(2).map(|pair| match pair {
        [high, low] => format!("{high:02x}{low:02x}"),
        _ => String::new(),
    });
    groups.collect::<Vec<_>>().join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_as_the_kernel_writes_them() {
        for (width, speed, expected) in [
            (1, 1, "2.5 Gb/sec (1X)"),
            (2, 32, "100 Gb/sec (4X EDR)"),
            (1, 8, "10 Gb/sec (1X FDR10)"),
            (2, 1, "10 Gb/sec (4X)"),
            (1, 64, "50 Gb/sec (1X HDR)"),
        ] {
            assert_eq!(rate(width, speed), expected);
        }
        assert_eq!((state(4), phys_state(5)), ("4: ACTIVE".to_owned(), "5: LinkUp".to_owned()));
        assert_eq!(groups(&[0, 1, 0xab, 0xcd]), "0001:abcd");
        assert_eq!((numbers("uverbs0"), numbers("uverbs12")), ("231:192".to_owned(), "231:204".to_owned()));
    }
}
