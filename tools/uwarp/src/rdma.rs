//! `rdma link` and `rdma dev` for programs that see the device's files.
//!
//! iproute2's rdma asks the kernel by a socket of NETLINK_RDMA, and nothing but the kernel can answer there.
//! So the installation has a command of the same name, in front of the other one in PATH. It shows
//! what the files say, in the words and the JSON of iproute2; for all else, it becomes the other one.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::Serialize;

use crate::exec::exec;
use crate::files::VARIABLE;
use crate::{complain, libdir};

/// The name by which the command is called for this.
pub const NAME: &str = "rdma";

/// Whether this process was called by that name.
pub fn is_meant() -> bool {
    env::args_os().next().is_some_and(|name| Path::new(&name).file_name() == Some(NAME.as_ref()))
}

/// `rdma` with the arguments of this process.
pub fn run() -> ExitCode {
    let words: Vec<OsString> = env::args_os().collect();
    let texts: Option<Vec<&str>> = words.iter().skip(1).map(|word| word.to_str()).collect();
    let tree = env::var_os(VARIABLE).map(PathBuf::from);
    match (texts.and_then(|texts| Question::read(&texts)), tree) {
        (Some(question), Some(tree)) => question.answer(&tree),
        _ => become_other(&words),
    }
}

/// iproute2's.
fn become_other(words: &[OsString]) -> ExitCode {
    let own = libdir::executable().and_then(fs::canonicalize).ok();
    let path = env::var_os("PATH").unwrap_or_default();
    let mut places = env::split_paths(&path).map(|place| place.join(NAME));
    let other = places.find(|place| place.is_file() && fs::canonicalize(place).ok() != own);
    match other {
        Some(other) => {
            let error = exec(&other, words, &[], false);
            complain(&format_args!("cannot execute {}: {error}", other.display()));
            ExitCode::from(126)
        }
        None => {
            complain(
                &"only `rdma link` and `rdma dev` show this device, and PATH has no other rdma for the rest. \
                  Install iproute2",
            );
            ExitCode::from(127)
        }
    }
}

/// What is asked.
#[derive(Debug, PartialEq, Eq)]
struct Question<'a> {
    links: bool,
    /// A device, and one of its ports; without a name all of them.
    only: Option<(&'a str, Option<&'a str>)>,
    json: bool,
    pretty: bool,
    details: bool,
}

impl<'a> Question<'a> {
    /// Nothing, if iproute2 is to answer: it knows more objects, and what is wrong with a call.
    fn read(words: &[&'a str]) -> Option<Self> {
        let (mut json, mut pretty, mut details) = (false, false, false);
        let mut rest = Vec::new();
        for word in words {
            match *word {
                "-j" | "--json" | "-json" => json = true,
                "-p" | "--pretty" | "-pretty" => pretty = true,
                "-d" | "--details" | "-details" => details = true,
                "-jp" | "-pj" => (json, pretty) = (true, true),
                option if option.starts_with('-') => return None,
                word => rest.push(word),
            }
        }
        // iproute2 takes any beginning of these words.
        let is = |word: &str, name: &str| !word.is_empty() && name.starts_with(word);
        let (object, mut rest) = rest.split_first()?;
        let links = match *object {
            word if is(word, "dev") => false,
            word if is(word, "link") => true,
            _ => return None,
        };
        if let Some((word, after)) = rest.split_first()
            && (is(word, "show") || is(word, "list"))
        {
            rest = after;
        }
        let only = match rest {
            [] => None,
            [name] => Some(match name.split_once('/') {
                Some((name, port)) if links => (name, Some(port)),
                _ => (*name, None),
            }),
            _ => return None,
        };
        Some(Self { links, only, json, pretty, details })
    }

    fn answer(&self, tree: &Path) -> ExitCode {
        let devices: Vec<_> = devices(tree)
            .into_iter()
            .filter(|device| self.only.is_none_or(|(name, _)| name == device.ifname))
            .collect();
        let links: Vec<_> = devices
            .iter()
            .flat_map(|device| links(tree, device))
            .filter(|link| self.only.is_none_or(|(_, port)| port.is_none_or(|p| link.port.to_string() == p)))
            .collect();
        // Also of a question about the kernel's devices, where it has some.
        if self.only.is_some() && (devices.is_empty() || self.links && links.is_empty()) {
            return become_other(&env::args_os().collect::<Vec<_>>());
        }
        if self.json {
            let text = match self.links {
                true => self.in_json(&links),
                false => self.in_json(&devices),
            };
            crate::say!("{text}");
        } else if self.links {
            links.iter().for_each(|link| crate::say!("{}", link.text(self.details)));
        } else {
            devices.iter().for_each(|device| crate::say!("{}", device.text()));
        }
        ExitCode::SUCCESS
    }

    fn in_json(&self, rows: &[impl Serialize]) -> String {
        let text = if self.pretty { serde_json::to_string_pretty(rows) } else { serde_json::to_string(rows) };
        // Only maps whose keys are no text cannot be written.
        text.unwrap_or_default()
    }
}

/// A device, in the order and the words of `rdma -j dev`.
#[derive(Serialize)]
struct Device {
    ifindex: usize,
    ifname: String,
    node_type: String,
    protocol: &'static str,
    fw: String,
    node_guid: String,
    sys_image_guid: String,
}

impl Device {
    fn text(&self) -> String {
        let Self { ifindex, ifname, node_type, protocol, fw, node_guid, sys_image_guid } = self;
        format!(
            "{ifindex}: {ifname}: node_type {node_type} protocol {protocol} fw {fw} node_guid {node_guid} \
             sys_image_guid {sys_image_guid} "
        )
    }
}

/// A port, in the order and the words of `rdma -j link`.
#[derive(Serialize)]
struct Link {
    ifindex: usize,
    ifname: String,
    port: u32,
    #[serde(flatten)]
    subnet: Option<Subnet>,
    state: String,
    physical_state: String,
    #[serde(flatten)]
    netdev: Option<Netdev>,
}

/// What only ports of InfiniBand have.
#[derive(Serialize)]
struct Subnet {
    subnet_prefix: String,
    lid: u16,
    sm_lid: u16,
    lmc: u8,
}

#[derive(Serialize)]
struct Netdev {
    netdev: String,
    netdev_index: u32,
}

impl Link {
    fn text(&self, details: bool) -> String {
        let mut text = format!("link {}/{} ", self.ifname, self.port);
        if let Some(Subnet { subnet_prefix, lid, sm_lid, lmc }) = &self.subnet {
            text += &format!("subnet_prefix {subnet_prefix} lid {lid} sm_lid {sm_lid} lmc {lmc} ");
        }
        text += &format!("state {} physical_state {} ", self.state, self.physical_state);
        if let Some(Netdev { netdev, netdev_index }) = &self.netdev {
            text += &format!("netdev {netdev} ");
            if details {
                text += &format!("netdev_index {netdev_index} ");
            }
        }
        text
    }
}

/// The entries of a directory, by name.
fn entries(directory: &Path) -> Vec<String> {
    let found = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> = found.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

fn read(directory: &Path, file: &str) -> String {
    fs::read_to_string(directory.join(file)).unwrap_or_default().trim_end().to_owned()
}

/// What stands behind the number in files such as `state`: `4: ACTIVE`.
fn word(text: &str) -> &str {
    text.split_once(": ").map_or(text, |(_, word)| word)
}

fn number(text: &str) -> u16 {
    text.strip_prefix("0x").map_or_else(|| text.parse(), |hex| u16::from_str_radix(hex, 16)).unwrap_or(0)
}

fn class(tree: &Path) -> PathBuf {
    tree.join("sys/class/infiniband")
}

fn devices(tree: &Path) -> Vec<Device> {
    let class = class(tree);
    let names = entries(&class).into_iter().enumerate();
    let device = |(ifindex, ifname): (usize, String)| {
        let directory = class.join(&ifname);
        let node_type = word(&read(&directory, "node_type")).to_lowercase();
        let first = entries(&directory.join("ports")).into_iter().next().unwrap_or_default();
        let protocol = match read(&directory.join("ports").join(first), "link_layer").as_str() {
            _ if node_type == "rnic" => "iw",
            "InfiniBand" => "ib",
            _ => "roce",
        };
        let (fw, node_guid) = (read(&directory, "fw_ver"), read(&directory, "node_guid"));
        let sys_image_guid = read(&directory, "sys_image_guid");
        Device { ifindex, ifname, node_type, protocol, fw, node_guid, sys_image_guid }
    };
    names.map(device).collect()
}

fn links(tree: &Path, device: &Device) -> Vec<Link> {
    let directory = class(tree).join(&device.ifname);
    let netdev = || {
        let netdev = entries(&directory.join("device/net")).into_iter().next()?;
        let netdev_index = nix::net::if_::if_nametoindex(netdev.as_str()).ok()?;
        Some(Netdev { netdev, netdev_index })
    };
    let numbers = entries(&directory.join("ports")).into_iter().filter_map(|name| name.parse().ok());
    let link = |port: u32| {
        let at = directory.join("ports").join(port.to_string());
        let gid = read(&at, "gids/0");
        let subnet = (read(&at, "link_layer") == "InfiniBand").then(|| Subnet {
            subnet_prefix: gid.split(':').take(4).collect::<Vec<_>>().join(":"),
            lid: number(&read(&at, "lid")),
            sm_lid: number(&read(&at, "sm_lid")),
            lmc: number(&read(&at, "lid_mask_count")).try_into().unwrap_or(0),
        });
        // `LinkUp` is `LINK_UP` there.
        let physical_state = match word(&read(&at, "phys_state")) {
            "LinkUp" => "LINK_UP".to_owned(),
            other => other.to_uppercase(),
        };
        Link {
            ifindex: device.ifindex,
            ifname: device.ifname.clone(),
            port,
            // The kernel names no interface of a port of InfiniBand's.
            netdev: if subnet.is_some() { None } else { netdev() },
            subnet,
            state: word(&read(&at, "state")).to_owned(),
            physical_state,
        }
    };
    numbers.map(link).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_iproute2_answers_itself_is_left_to_it() {
        let question = |links, only| Question { links, only, json: false, pretty: false, details: false };
        for (words, expected) in [
            (&["link"][..], Some(question(true, None))),
            (&["l", "sh"], Some(question(true, None))),
            (&["link", "show", "uwarp0/1"], Some(question(true, Some(("uwarp0", Some("1")))))),
            (&["dev", "show", "uwarp0"], Some(question(false, Some(("uwarp0", None))))),
            (&["link", "show", "-j"], Some(Question { json: true, ..question(true, None) })),
            (&["-d", "dev"], Some(Question { details: true, ..question(false, None) })),
            (&[], None),
            (&["-V"], None),
            (&["system"], None),
            (&["resource", "show", "qp"], None),
            (&["link", "add", "siw0", "type", "siw", "netdev", "eth0"], None),
            (&["dev", "set", "uwarp0", "name", "x"], None),
        ] {
            assert_eq!(Question::read(words), expected, "{words:?}");
        }
    }

    #[test]
    fn the_files_are_shown_in_iproute2s_words() {
        let tree = tempfile::tempdir().unwrap();
        let device = class(tree.path()).join("uwarp0");
        for (file, text) in [
            ("node_type", "4: RNIC"),
            ("fw_ver", "1.2"),
            ("node_guid", "0001:0002:0003:0004"),
            ("sys_image_guid", "0001:0002:0003:0004"),
            ("ports/1/link_layer", "Ethernet"),
            ("ports/1/state", "4: ACTIVE"),
            ("ports/1/phys_state", "5: LinkUp"),
            ("device/net/lo", ""),
        ] {
            let path = device.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        let found = devices(tree.path());
        let link = links(tree.path(), &found[0]).remove(0);
        assert_eq!(link.text(false), "link uwarp0/1 state ACTIVE physical_state LINK_UP netdev lo ");
        assert_eq!(
            serde_json::to_string(&link).unwrap(),
            concat!(
                r#"{"ifindex":0,"ifname":"uwarp0","port":1,"state":"ACTIVE","#,
                r#""physical_state":"LINK_UP","netdev":"lo","netdev_index":1}"#
            )
        );
        assert_eq!(
            found[0].text(),
            "0: uwarp0: node_type rnic protocol iw fw 1.2 node_guid 0001:0002:0003:0004 \
             sys_image_guid 0001:0002:0003:0004 "
        );
        let infiniband = [("link_layer", "InfiniBand"), ("lid", "0x10"), ("sm_lid", "0x1")];
        for (file, text) in infiniband {
            fs::write(device.join("ports/1").join(file), text).unwrap();
        }
        fs::create_dir(device.join("ports/1/gids")).unwrap();
        fs::write(device.join("ports/1/gids/0"), "fe80:0000:0000:0000:0000:0000:0000:0001").unwrap();
        let link = links(tree.path(), &found[0]).remove(0);
        assert_eq!(
            link.text(true),
            "link uwarp0/1 subnet_prefix fe80:0000:0000:0000 lid 16 sm_lid 1 lmc 0 \
             state ACTIVE physical_state LINK_UP "
        );
    }
}
