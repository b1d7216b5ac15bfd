//! Programs of TCP sockets under `uwarp run --sockets`: passing through, as rsockets, and upgraded in place;
//! each also with a rule at one end only, where it has to work by TCP.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, getpgid};
use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::NetNs;
use uwarp_conformance::pair;
use uwarp_conformance::process::{Cmd, Output, Running};
use uwarp_conformance::topology::Place;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{Context, Failure, Outcome, require};

use super::Run::{Custom, Long};
use super::sockets_files as files;
use super::sockets_services as services;
use super::{Case, LONG, Scratch, World};

const LO: &[Topology] = &[Loopback4];
const LO_BOTH: &[Topology] = &[Loopback4, Loopback6];
const LO_AND_VETH: &[Topology] = &[Loopback4, Veth1500V4];

/// What the two ends are run with, without the port.
#[derive(Clone, Copy)]
pub struct Rules {
    words: &'static str,
    pub server: &'static str,
    client: &'static str,
    /// Whether iWARP carries anything.
    agree: bool,
}

const THROUGH: Rules = Rules { words: "passing through", server: "", client: "", agree: false };
const RSOCKETS: Rules =
    Rules { words: "as rsockets", server: "rsockets:port=", client: "rsockets:port=", agree: true };
const RSOCKETS_CLIENT: Rules = Rules {
    words: "as rsockets at the client, with fallback",
    server: "",
    client: "rsockets:fallback,port=",
    agree: false,
};
pub const UPGRADED: Rules =
    Rules { words: "upgraded", server: "upgrade:port=", client: "upgrade:port=", agree: true };
/// Version 0.1 proves nothing, and is not believed.
pub const NOT_WITH_OLD: Rules = Rules { agree: false, ..UPGRADED };
const UPGRADED_CLIENT: Rules =
    Rules { words: "upgraded at the client only: TCP", server: "", client: "upgrade:port=", agree: false };
const UPGRADED_SERVER: Rules =
    Rules { words: "upgraded at the server only: TCP", server: "upgrade:port=", client: "", agree: false };
/// Of servers that hand each connection to a program that they start: it has the kernel's socket and knows
/// nothing of its past, so no end asks the other one (docs/adr/044).
const HANDED_ON: Rules = Rules {
    words: "upgraded, but the server hands its connections on by exec: TCP",
    server: "upgrade:port=",
    client: "upgrade:port=",
    agree: false,
};

impl Rules {
    /// Whether the connection begins as TCP.
    pub fn are_upgrades(self) -> bool {
        [self.server, self.client].iter().any(|rule| rule.starts_with("upgrade"))
    }
}

/// Rows of one program: `Custom` are those of `make test`.
macro_rules! rows {
    (
        $cases:ident, $program:literal, $checked:expr, $run:path:
        $($kind:ident $rules:ident $at:ident),* $(,)?
    ) => {
        $cases.extend([$(Case {
            program: $program,
            manner: $rules.words,
            checked: $checked,
            at: $at,
            run: $kind(|world, place| $run(&Setting::new(world, $rules, place)?)),
        }),*]);
    };
}

/// Rows of sockets. Servers that serve each connection in a child process have no row as rsockets at both
/// ends: a child has no device (docs/sockets.md).
pub fn cases() -> Vec<Case> {
    const FILE: &str = "the copy is the file";
    let mut cases = Vec::new();
    rows!(cases, "curl, http.server", FILE, files::http:
        Long THROUGH LO, Long RSOCKETS LO_BOTH, Long RSOCKETS_CLIENT LO,
        Long UPGRADED LO_AND_VETH, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    rows!(cases, "wget, http.server", FILE, files::wget:
        Long THROUGH LO, Long RSOCKETS LO, Long RSOCKETS_CLIENT LO,
        Custom UPGRADED LO, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    const TWO_FILES: &str = "one connection for all; the copies are the files, 1 MB and 1 GiB";
    const TWO_BY_TLS: &str = "one connection for all; the copies are the files, 1 MB and 256 MiB";
    rows!(cases, "curl, nginx", TWO_FILES, files::nginx:
        Long THROUGH LO, Long RSOCKETS LO, Long RSOCKETS_CLIENT LO,
        Long UPGRADED LO_AND_VETH, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    rows!(cases, "wget, nginx", TWO_FILES, files::nginx_wget:
        Long THROUGH LO, Long RSOCKETS LO, Long RSOCKETS_CLIENT LO,
        Long UPGRADED LO, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    rows!(cases, "curl, nginx, TLS", TWO_BY_TLS, files::tls:
        Long THROUGH LO, Long RSOCKETS LO, Long RSOCKETS_CLIENT LO,
        Long UPGRADED LO, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    rows!(cases, "curl, Node http", "the copy is the file; a POST of it arrives whole", files::node:
        Long THROUGH LO, Long RSOCKETS LO, Long RSOCKETS_CLIENT LO,
        Custom UPGRADED LO, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    rows!(cases, "nc", FILE, files::netcat:
        Long THROUGH LO, Long RSOCKETS LO,
        Long UPGRADED LO, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    rows!(cases, "scp, sshd", "the copy is the file, 1 GiB", files::ssh:
        Long THROUGH LO, Long RSOCKETS_CLIENT LO,
        Long HANDED_ON LO, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    rows!(cases, "git clone, git daemon", "the file in the clone is the file", files::git:
        Long THROUGH LO, Long RSOCKETS_CLIENT LO,
        Custom HANDED_ON LO, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    rows!(cases, "redis-benchmark", "every request answered; what was set is read back", services::redis:
        Long THROUGH LO, Long RSOCKETS LO_AND_VETH, Long RSOCKETS_CLIENT LO,
        Long UPGRADED LO_AND_VETH, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    rows!(cases, "memcached", "what was set is read back", services::memcached:
        Long THROUGH LO, Long RSOCKETS LO,
        Long UPGRADED LO, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    const IPERF: &str = "both ends exit with 0; bytes are received, and no more than were sent";
    rows!(cases, "iperf3", IPERF, services::iperf:
        Long THROUGH LO, Long RSOCKETS LO,
        Long UPGRADED LO_AND_VETH, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    rows!(cases, "iperf3 -R", IPERF, services::iperf_back: Long RSOCKETS LO, Long UPGRADED LO);
    const SOCKPERF: &str = "--data-integrity: every message comes back as it was sent, none is lost";
    rows!(cases, "sockperf", SOCKPERF, services::sockperf:
        Long THROUGH LO, Long RSOCKETS LO,
        Custom UPGRADED LO, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    const POSTGRES: &str = "no transaction fails; the sums of the tables agree";
    rows!(cases, "pgbench, PostgreSQL", POSTGRES, services::postgres:
        Long THROUGH LO, Long RSOCKETS_CLIENT LO,
        Custom UPGRADED LO, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    rows!(cases, "asyncio", "20 connections, 1 MB each, echoed byte by byte", services::asyncio:
        Long THROUGH LO, Long RSOCKETS LO, Long RSOCKETS_CLIENT LO,
        Custom UPGRADED LO, Long UPGRADED_CLIENT LO, Long UPGRADED_SERVER LO);
    // All ranks have one rule.
    const MPI: &str = "NetPIPE's -i: the integrity of each size to 64 KiB";
    rows!(cases, "NPopenmpi, btl tcp", MPI, services::open_mpi:
        Long THROUGH LO, Long RSOCKETS LO, Long UPGRADED LO);
    cases
}

/// A program behind `uwarp run --sockets` of a tree, with a rule that ends in the port.
fn with_sockets(dist: &Dist, line: &str, rule: &str, port: u16, ns: Option<&NetNs>) -> Outcome<Cmd> {
    // The rows' hosts are namespaces without other users.
    let rule = match (ns, rule.strip_prefix("upgrade:")) {
        (Some(_), Some(conditions)) => format!("upgrade:no-other-users,{conditions}"),
        _ => rule.to_owned(),
    };
    let option = if rule.is_empty() { "--sockets".to_owned() } else { format!("--sockets={rule}{port}") };
    let front = [dist.uwarp()?.into_os_string(), "run".into(), option.into(), "--".into()];
    Ok(Cmd::line(line).behind(front).unset("LD_LIBRARY_PATH").in_ns(ns).limit(LONG))
}

const BY_IWARP: &str = "bytes went by iWARP";

/// A server and its clients: where they are, under which rules, with a port and a directory.
pub struct Setting<'a> {
    world: &'a World,
    /// The server's tree, and the client's.
    trees: [&'a Dist; 2],
    pub rules: Rules,
    pub place: Place<'a>,
    pub port: u16,
    dir: Scratch,
}

impl<'a> Setting<'a> {
    fn new(world: &'a World, rules: Rules, place: Place<'a>) -> Outcome<Self> {
        Self::between(world, [world.dist()?; 2], rules, place)
    }

    /// With other trees than the one under test.
    pub fn between(world: &'a World, trees: [&'a Dist; 2], rules: Rules, place: Place<'a>) -> Outcome<Self> {
        let port = free_port();
        let dir = Scratch::new(&format!("sockets-{port}"))?;
        Ok(Self { world, trees, rules, place, port, dir })
    }

    /// The server's address in a URL.
    pub fn host(&self) -> String {
        let address = self.place.address;
        if address.contains(':') { format!("[{address}]") } else { address.to_owned() }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn server(&self, line: &str) -> Outcome<Cmd> {
        with_sockets(self.trees[0], line, self.rules.server, self.port, self.place.server)
    }

    pub fn client(&self, line: &str) -> Outcome<Cmd> {
        with_sockets(self.trees[1], line, self.rules.client, self.port, self.place.client)
    }

    /// With a rule that ends in a port of its own.
    pub fn job(&self, line: &str, rule: &str, port: u16) -> Outcome<Cmd> {
        with_sockets(self.trees[1], line, rule, port, None)
    }

    /// Runs `steps` while the server runs. What it has printed stands behind the reason.
    pub fn serve(&self, line: &str, steps: impl FnOnce(&Running) -> Outcome) -> Outcome {
        let server = pair::serve(&self.server(line)?, self.port)?;
        let result = steps(&server);
        let server = server.stop();
        result.map_err(|why| Failure(format!("{why}\n--- server\n{}", server.text())))
    }

    /// A file with this name, in which no two blocks are the same.
    pub fn file(&self, name: &str, len: usize) -> Outcome {
        let mut block: Vec<u8> =
            (0..1 << 16).map(|at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let path = self.dir().join(name);
        let mut write = || -> std::io::Result<()> {
            let mut file = File::create(&path)?;
            let mut left = len;
            while left > 0 {
                for (at, sector) in block.chunks_exact_mut(512).enumerate() {
                    sector[..8].copy_from_slice(&((left + at * 512) as u64).to_le_bytes());
                }
                let part = left.min(block.len());
                file.write_all(&block[..part])?;
                left -= part;
            }
            Ok(())
        };
        write().context(path.display())
    }

    /// Whether two files of the directory are the same.
    pub fn is_copied(&self, from: &str, to: &str, client: &Output) -> Outcome {
        let compare = || -> std::io::Result<bool> {
            let (mut one, mut other) = (File::open(self.dir().join(from))?, File::open(self.dir().join(to))?);
            if one.metadata()?.len() != other.metadata()?.len() {
                return Ok(false);
            }
            let (mut a, mut b) = (vec![0; 1 << 20], vec![0; 1 << 20]);
            loop {
                let len = one.read(&mut a)?;
                if len == 0 {
                    return Ok(true);
                }
                other.read_exact(&mut b[..len])?;
                if a[..len] != b[..len] {
                    return Ok(false);
                }
            }
        };
        let same = compare().unwrap_or(false);
        require!(client.ok() && same, "{to} is no copy of {from}\n--- client\n{}", client.text());
        let _ = fs::remove_file(self.dir().join(to));
        Ok(())
    }

    /// Bytes by iWARP, both ways, of each process that has a device, and its group. Without a connection by
    /// iWARP it has none.
    fn stat(&self) -> Outcome<Vec<(String, Pid, u64)>> {
        let stat = Cmd::new(self.world.dist()?.uwarp()?).args("stat --json");
        // It sees the processes of its own namespace.
        let out = stat.in_ns(self.place.server).run()?;
        let report: serde_json::Value = serde_json::from_str(&out.stdout).unwrap_or_default();
        let process = |process: &serde_json::Value| {
            let pid = process["pid"].as_i64().and_then(|pid| Pid::from_raw(pid.try_into().ok()?))?;
            let of = |way: &str| process["totals"][way]["write"]["bytes"].as_u64().unwrap_or(0);
            let name = process["command"].as_str().unwrap_or_default().to_owned();
            Some((name, getpgid(Some(pid)).ok()?, of("sent") + of("received")))
        };
        Ok(report["processes"].as_array().into_iter().flatten().filter_map(process).collect())
    }

    /// Bytes by iWARP of all processes with the group of one of these.
    fn by_iwarp(&self, of: &[&Running]) -> Outcome<u64> {
        let all = self.stat()?.into_iter();
        let of_these = all.filter(|(_, group, _)| of.iter().any(|of| of.pid() == *group));
        Ok(of_these.map(|(.., bytes)| bytes).sum())
    }

    /// How many programs with this name have sent and received at least so many bytes by iWARP.
    pub fn ranks_by_iwarp(&self, name: &str, least: u64) -> Outcome<usize> {
        Ok(self.stat()?.iter().filter(|(other, _, bytes)| other == name && *bytes >= least).count())
    }

    /// With `UWARP_LOG=info` the client has said what became of its connection.
    pub fn is_said(&self, client: &Output) -> Outcome {
        let wanted = match (self.rules.client.starts_with("upgrade"), self.rules.agree) {
            (false, _) => return Ok(()),
            (true, true) => format!(":{}: iWARP", self.port),
            (true, false) => format!(":{}: TCP, as ", self.port),
        };
        require!(client.stderr.contains(&wanted), "not said: {wanted}\n{}", client.text());
        Ok(())
    }

    /// By the rules iWARP has carried at least `least` bytes, or none.
    fn judge(&self, bytes: u64, least: usize) -> Outcome {
        // A part of them goes by TCP, before the connection is upgraded.
        let least = if self.rules.are_upgrades() { least / 4 } else { least };
        let good = if self.rules.agree { bytes >= least as u64 } else { bytes == 0 };
        let wanted = if self.rules.agree { least } else { 0 };
        require!(good, "{bytes} {BY_IWARP}, wanted {wanted} with these rules");
        Ok(())
    }

    /// Runs `steps`, and with more bytes again if too few of them went by iWARP: on a busy machine all of a
    /// few megabytes can have come before both ends have agreed.
    pub fn with_enough(&self, steps: impl Fn(usize) -> Outcome) -> Outcome {
        const MOST: usize = 64;
        let mut times = 1;
        loop {
            match steps(times) {
                Err(why) if times < MOST && self.rules.are_upgrades() && why.0.contains(BY_IWARP) => {
                    times *= 4;
                    eprintln!(
                        "again with {times} times as much: {}",
                        why.0.lines().next().unwrap_or_default()
                    );
                }
                result => return result,
            }
        }
    }

    /// This server, which still runs, has sent and received at least so much by iWARP, if that is carried.
    pub fn carried(&self, server: &Running, least: usize) -> Outcome {
        self.judge(self.by_iwarp(&[server])?, least)
    }

    /// Runs a client, and looks meanwhile what it and the server have sent and received by iWARP: of servers
    /// and clients that end with the connection.
    pub fn run_watched(&self, server: &Running, client: &str, least: usize) -> Outcome<Output> {
        let client = self.client(client)?.spawn()?;
        let mut most = 0;
        while client.is_running() {
            most = most.max(self.by_iwarp(&[server, &client])?);
            std::thread::sleep(Duration::from_millis(5));
        }
        let client = client.wait()?;
        self.judge(most, least).map_err(|why| Failure(format!("{why}\n--- client\n{}", client.text())))?;
        Ok(client)
    }
}
