//! Network namespaces that belong to one test process and go away with it.
//!
//! Names carry the process id, so several suites can run side by side, and so a run that was killed can be
//! cleaned up after: the first namespace of a run removes those whose process is gone.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use uwarp_bottleneck::{Bottleneck, DEVICE, Shape};

use crate::process::Cmd;
use crate::{Context, Outcome, require};

const PREFIX: &str = "uwarp-t";

/// A network namespace with `lo` up. Deleted when dropped.
#[derive(Debug)]
pub struct NetNs {
    name: String,
}

impl NetNs {
    /// Creates a namespace. Without root it fails and says so.
    pub fn new() -> Outcome<NetNs> {
        static SWEEP: Once = Once::new();
        static NEXT: AtomicU32 = AtomicU32::new(0);
        require!(
            rustix::process::geteuid().is_root(),
            "network namespaces need root: run the tests as root (the programs under test do not need it)"
        );
        SWEEP.call_once(sweep);
        let name = format!("{PREFIX}{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        Cmd::line(&format!("ip netns add {name}")).run_ok()?;
        let ns = NetNs { name };
        ns.ip("link set lo up")?;
        Ok(ns)
    }

    /// Its name, as `ip netns` knows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip ARGS` inside it.
    pub fn ip(&self, args: &str) -> Outcome {
        Cmd::line(&format!("ip -n {}", self.name)).args(args).run_ok().map(drop)
    }

    /// The kernel reports the carrier up to a second late. Until then the device of uwarp shows loopback
    /// only.
    fn until_up(&self, dev: &str) -> Outcome {
        let end = Instant::now() + Duration::from_secs(60);
        let show = Cmd::line(&format!("ip -n {} -o link show dev {dev}", self.name));
        while !show.run_ok()?.stdout.contains("state UP") {
            require!(Instant::now() < end, "{dev} of {} does not come up", self.name);
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Waits until the system has looked for others with each of its IPv6 addresses. Until then, nothing is
    /// sent from a link-local address.
    pub fn settled(&self) -> Outcome {
        let end = Instant::now() + Duration::from_secs(60);
        let show = Cmd::line(&format!("ip -n {} -6 addr show tentative", self.name));
        loop {
            let out = show.run_ok()?;
            if out.stdout.trim().is_empty() {
                return Ok(());
            }
            require!(Instant::now() < end, "addresses stay tentative\n{}", out.text());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for NetNs {
    fn drop(&mut self) {
        let _ = Cmd::line(&format!("ip netns del {}", self.name)).run();
    }
}

/// Two namespaces joined by a veth pair, each end with an IPv4 and an IPv6 address.
#[derive(Debug)]
pub struct Veth {
    /// The end with the first addresses; servers live here.
    pub server: NetNs,
    /// The other end.
    pub client: NetNs,
    /// MTU of both ends, in bytes.
    pub mtu: u32,
}

impl Veth {
    /// The server end's IPv4 address.
    pub const SERVER4: &'static str = "10.55.0.1";
    /// The client end's IPv4 address.
    pub const CLIENT4: &'static str = "10.55.0.2";
    /// The server end's IPv6 address.
    pub const SERVER6: &'static str = "fd55::1";
    /// The client end's IPv6 address.
    pub const CLIENT6: &'static str = "fd55::2";
    /// The server end's IPv4 address on the second pair of [`Veth::twice`].
    pub const SECOND_SERVER4: &'static str = "10.56.0.1";
    /// The client end's IPv4 address there.
    pub const SECOND_CLIENT4: &'static str = "10.56.0.2";
    /// Name of the interface at both ends.
    pub const INTERFACE: &'static str = "veth0";

    /// Makes both namespaces and joins them.
    pub fn new(mtu: u32) -> Outcome<Veth> {
        let veth = Veth { server: NetNs::new()?, client: NetNs::new()?, mtu };
        veth.join(Veth::INTERFACE, [Veth::SERVER4, Veth::CLIENT4], [Veth::SERVER6, Veth::CLIENT6])?;
        Ok(veth)
    }

    /// Both namespaces, joined by two pairs: `veth1` is another network.
    pub fn twice(mtu: u32) -> Outcome<Veth> {
        let veth = Veth::new(mtu)?;
        veth.join("veth1", [Veth::SECOND_SERVER4, Veth::SECOND_CLIENT4], ["fd56::1", "fd56::2"])?;
        Ok(veth)
    }

    /// Joins them by a pair of this name, with these addresses of server and client.
    fn join(&self, dev: &str, v4: [&str; 2], v6: [&str; 2]) -> Outcome {
        let mtu = self.mtu;
        self.server.ip(&format!(
            "link add {dev} mtu {mtu} type veth peer name {dev} mtu {mtu} netns {}",
            self.client.name
        ))?;
        let ends = [(&self.server, v4[0], v6[0]), (&self.client, v4[1], v6[1])];
        for (ns, v4, v6) in ends {
            ns.ip(&format!("addr add {v4}/24 dev {dev}"))?;
            // nodad: duplicate address detection would keep the address unusable for a second or two.
            ns.ip(&format!("addr add {v6}/64 dev {dev} nodad"))?;
            ns.ip(&format!("link set {dev} up"))?;
        }
        ends.iter().try_for_each(|(ns, ..)| ns.until_up(dev))
    }
}

/// Two namespaces joined by a path that is slow, long or bad, with the addresses of [`Veth`].
#[derive(Debug)]
pub struct Far {
    /// Servers live here.
    pub server: NetNs,
    /// The other end.
    pub client: NetNs,
    /// What carries the packets: the first direction is the client's.
    pub path: Bottleneck,
}

impl Far {
    /// Makes both namespaces and joins them; both directions are so.
    pub fn new(mtu: u32, shape: Shape) -> Outcome<Far> {
        let (server, client) = (NetNs::new()?, NetNs::new()?);
        let open = |ns: &NetNs| {
            let file = format!("/run/netns/{}", ns.name);
            File::open(&file).context(file)
        };
        let path = Bottleneck::between([open(&client)?, open(&server)?], [shape; 2], 1);
        let path = path.context("a TUN device")?;
        for (ns, v4, v6) in [(&server, Veth::SERVER4, Veth::SERVER6), (&client, Veth::CLIENT4, Veth::CLIENT6)]
        {
            ns.ip(&format!("addr add {v4}/24 dev {DEVICE}"))?;
            ns.ip(&format!("addr add {v6}/64 dev {DEVICE} nodad"))?;
            ns.ip(&format!("link set {DEVICE} mtu {mtu} up"))?;
        }
        Ok(Far { server, client, path })
    }
}

/// Three namespaces on one network: a bridge in the first one joins them.
#[derive(Debug)]
pub struct Bridged {
    hosts: [NetNs; 3],
}

impl Bridged {
    const ADDRESSES: [&'static str; 3] = ["10.57.0.1", "10.57.0.2", "10.57.0.3"];

    /// Makes and joins them.
    pub fn new() -> Outcome<Bridged> {
        let hosts = [NetNs::new()?, NetNs::new()?, NetNs::new()?];
        let [first, others @ ..] = &hosts;
        first.ip("link add bridge0 type bridge")?;
        for (number, ns) in others.iter().enumerate() {
            first.ip(&format!("link add port{number} type veth peer name veth0 netns {}", ns.name))?;
            first.ip(&format!("link set port{number} master bridge0 up"))?;
        }
        first.ip("link set bridge0 up")?;
        for (ns, address) in hosts.iter().zip(Bridged::ADDRESSES) {
            let dev = if ns.name == first.name { "bridge0" } else { Veth::INTERFACE };
            ns.ip(&format!("addr add {address}/24 dev {dev}"))?;
            ns.ip(&format!("link set {dev} up"))?;
        }
        for (ns, dev) in hosts.iter().zip(["bridge0", Veth::INTERFACE, Veth::INTERFACE]) {
            ns.until_up(dev)?;
        }
        Ok(Bridged { hosts })
    }

    /// Address and namespace of each.
    pub fn ends(&self) -> [(&str, &NetNs); 3] {
        let [a, b, c] = &self.hosts;
        [(Bridged::ADDRESSES[0], a), (Bridged::ADDRESSES[1], b), (Bridged::ADDRESSES[2], c)]
    }
}

/// Whether anything listens on a TCP port in the network namespace in which process `pid` lives. While the
/// process is still being moved into namespace `ns` the answer is no.
pub fn listens(pid: Pid, ns: Option<&str>, port: u16) -> bool {
    // LISTEN.
    has_socket(pid, ns, port, ["net/tcp", "net/tcp6"], "0A")
}

/// As [`listens`], for a UDP port that an unconnected socket is bound to.
pub fn receives(pid: Pid, ns: Option<&str>, port: u16) -> bool {
    has_socket(pid, ns, port, ["net/udp", "net/udp6"], "07")
}

fn has_socket(pid: Pid, ns: Option<&str>, port: u16, tables: [&str; 2], state: &str) -> bool {
    let proc = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
    if let Some(ns) = ns {
        let inode = |path: PathBuf| std::fs::metadata(path).map(|m| m.ino()).ok();
        let there = inode(PathBuf::from(format!("/run/netns/{ns}")));
        if there.is_none() || there != inode(proc.join("ns/net")) {
            return false;
        }
    }
    tables.iter().any(|table| {
        let text = std::fs::read_to_string(proc.join(table)).unwrap_or_default();
        text.lines().skip(1).any(|line| {
            // "sl local_address rem_address st …".
            let mut words = line.split_whitespace().skip(1);
            let local = words.next().and_then(|a| a.rsplit_once(':')).map(|(_, p)| p);
            let there = words.nth(1) == Some(state);
            there && local.and_then(|p| u16::from_str_radix(p, 16).ok()) == Some(port)
        })
    })
}

/// Removes namespaces of test processes that no longer exist.
fn sweep() {
    for entry in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if let Some(pid) = pid
            && !PathBuf::from(format!("/proc/{pid}")).exists()
        {
            let _ = Cmd::line(&format!("ip netns del {name}")).run();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn veth_carries_ipv4_and_ipv6_at_its_mtu_and_goes_away() {
        let veth = Veth::new(9000).unwrap();
        let names = [veth.server.name().to_owned(), veth.client.name().to_owned()];
        for (family, to) in [("AF_INET", Veth::SERVER4), ("AF_INET6", Veth::SERVER6)] {
            let listen = format!(
                "import socket as s;l=s.socket(s.{family});\
                 l.setsockopt(s.SOL_SOCKET,s.SO_REUSEADDR,1);l.bind(('',4711));l.listen();c,_=l.accept();\
                 c.sendall(c.recv(99))"
            );
            let talk = format!(
                "import socket as s;c=s.create_connection(('{to}',4711),60);c.sendall(b'x');\
                 print(c.recv(9),c.getsockopt(6,2))"
            );
            let server = Cmd::new("python3").arg("-c").arg(listen).in_ns(Some(&veth.server)).spawn().unwrap();
            let ready = |r: &crate::process::Running| listens(r.pid(), r.ns(), 4711);
            server.until(Duration::from_secs(60), "listening", ready).unwrap();
            let client = Cmd::new("python3").arg("-c").arg(talk).in_ns(Some(&veth.client));
            let out = client.run_ok().unwrap().stdout;
            // 9000 less the headers: the segment size proves the MTU.
            assert!(out.starts_with("b'x' 89"), "{out}");
            server.wait().unwrap().exited_ok().unwrap();
        }
        drop(veth);
        assert!(names.iter().all(|n| !PathBuf::from(format!("/run/netns/{n}")).exists()));
    }

    #[test]
    fn namespaces_go_away_on_panic() {
        let result = std::panic::catch_unwind(|| {
            let ns = NetNs::new().unwrap();
            std::panic::panic_any(ns.name().to_owned());
        });
        let name = *result.unwrap_err().downcast::<String>().unwrap();
        assert!(!PathBuf::from(format!("/run/netns/{name}")).exists());
    }
}
