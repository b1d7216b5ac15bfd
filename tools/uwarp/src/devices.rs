//! `uwarp devices`: what programs see.

use std::net::{IpAddr, Ipv6Addr};
use std::process::ExitCode;

use serde::Serialize;
use uwarp_abi_types::verbs::{IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2};

use crate::cli::DevicesArgs;
use crate::complain;
use crate::interfaces::{self, Interface};
use crate::libdir::{self, SONAMES};
use crate::table;
use crate::verbs::{self, Device, Gid, LinkLayer, Port};

/// Exit status 1 if the library cannot be loaded.
pub fn run(args: &DevicesArgs) -> ExitCode {
    let shown = libdir::find().map_err(|reason| reason.to_string()).and_then(|libdir| {
        let library = libdir.join(SONAMES[0]);
        verbs::devices(&library, &args.device.environment())
            .map_err(|reason| format!("cannot list the devices of {}: {reason}", library.display()))
    });
    match shown {
        Ok(devices) => {
            let interfaces = interfaces::list().unwrap_or_default();
            let devices: Vec<_> = devices.iter().map(|device| Row::new(device, &interfaces)).collect();
            print(&devices, args.json);
            ExitCode::SUCCESS
        }
        Err(reason) => {
            complain(&reason);
            ExitCode::FAILURE
        }
    }
}

/// One device; also the form of the JSON.
#[derive(Serialize)]
struct Row {
    name: String,
    guid: String,
    node_type: &'static str,
    transport: &'static str,
    view: Option<&'static str>,
    firmware: String,
    ports: Vec<PortRow>,
}

#[derive(Serialize)]
struct PortRow {
    port: u8,
    state: String,
    link_layer: &'static str,
    active_mtu: u32,
    max_message: u32,
    lid: u16,
    gids: Vec<GidRow>,
}

#[derive(Serialize)]
struct GidRow {
    index: u32,
    gid: String,
    #[serde(rename = "type")]
    kind: Option<&'static str>,
    address: IpAddr,
    interface: Option<String>,
}

impl Row {
    fn new(device: &Device, interfaces: &[Interface]) -> Row {
        let link_layer = device.ports.first().map_or(LinkLayer::Unspecified, |port| port.link_layer);
        let view = match (device.is_iwarp, link_layer) {
            (true, _) => Some("iwarp"),
            (false, LinkLayer::Ethernet) => Some("roce"),
            (false, LinkLayer::Infiniband) => Some("ib"),
            (false, LinkLayer::Unspecified) => None,
        };
        Row {
            name: device.name.clone(),
            guid: groups(&device.guid),
            node_type: if device.is_rnic { "RNIC" } else { "CA" },
            transport: if device.is_iwarp { "iWARP" } else { "InfiniBand" },
            view,
            firmware: device.firmware.clone(),
            ports: device.ports.iter().map(|port| PortRow::new(port, interfaces)).collect(),
        }
    }
}

impl PortRow {
    fn new(port: &Port, interfaces: &[Interface]) -> PortRow {
        PortRow {
            port: port.number,
            state: port.state.clone(),
            link_layer: match port.link_layer {
                LinkLayer::Ethernet => "Ethernet",
                LinkLayer::Infiniband => "InfiniBand",
                LinkLayer::Unspecified => "unspecified",
            },
            active_mtu: port.active_mtu,
            max_message: port.max_message,
            lid: port.lid,
            gids: port.gids.iter().map(|gid| GidRow::new(gid, interfaces)).collect(),
        }
    }
}

impl GidRow {
    fn new(gid: &Gid, interfaces: &[Interface]) -> GidRow {
        let address = address_of(gid.raw);
        let by_index = (gid.interface != 0)
            .then(|| nix::net::if_::if_indextoname(gid.interface).ok()?.into_string().ok())
            .flatten();
        let by_address = || Some(interfaces.iter().find(|i| i.addresses.contains(&address))?.name.clone());
        GidRow {
            index: gid.index,
            gid: groups(&gid.raw.octets()),
            kind: match gid.kind {
                IBV_GID_TYPE_ROCE_V1 => Some("RoCE v1"),
                IBV_GID_TYPE_ROCE_V2 => Some("RoCE v2"),
                // Devices without types also give this value.
                _ => None,
            },
            address,
            interface: by_index.or_else(by_address),
        }
    }
}

/// A GID holds an IPv4 address in its mapped form.
fn address_of(gid: Ipv6Addr) -> IpAddr {
    gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4)
}

/// As `ibv_devinfo` writes GUIDs and GIDs: groups of four digits, none left out.
fn groups(bytes: &[u8]) -> String {
    let words: Vec<_> = bytes
        .chunks(2)
        .map(|pair| pair.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
        .collect();
    words.join(":")
}

fn print(devices: &[Row], json: bool) {
    if json {
        crate::say!("{}", serde_json::json!({ "devices": devices }));
        return;
    }
    if devices.is_empty() {
        crate::say!("The library shows no device. `uwarp doctor` looks for the reason.");
        return;
    }
    let mut ports =
        table::new(&["device", "port", "state", "view", "transport", "link layer", "MTU", "node GUID"]);
    let mut gids = table::new(&["device", "port", "index", "GID", "type", "address", "interface"]);
    for device in devices {
        for port in &device.ports {
            ports.add_row([
                device.name.clone(),
                port.port.to_string(),
                port.state.clone(),
                device.view.unwrap_or("-").to_owned(),
                format!("{} ({})", device.transport, device.node_type),
                port.link_layer.to_owned(),
                port.active_mtu.to_string(),
                device.guid.clone(),
            ]);
            for gid in &port.gids {
                gids.add_row([
                    device.name.clone(),
                    port.port.to_string(),
                    gid.index.to_string(),
                    gid.gid.clone(),
                    gid.kind.unwrap_or("-").to_owned(),
                    gid.address.to_string(),
                    gid.interface.clone().unwrap_or("-".to_owned()),
                ]);
            }
        }
    }
    crate::say!("{}\n\n{}", table::text(ports), table::text(gids));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_written_as_ibv_devinfo_writes_them() {
        let gid: Ipv6Addr = "::ffff:192.0.2.2".parse().unwrap();
        assert_eq!(groups(&gid.octets()), "0000:0000:0000:0000:0000:ffff:c000:0202");
        assert_eq!(address_of(gid), "192.0.2.2".parse::<IpAddr>().unwrap());
        let v6 = "fd00::2".parse().unwrap();
        assert_eq!(address_of(v6), IpAddr::V6(v6));
    }
}
