//! `c/parted.c`: one datagram queue pair, whose long messages go to another host in parts.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::lines::LineProcess;
use super::peer::PATIENCE;
use crate::dist::Dist;
use crate::netns::NetNs;
use crate::process::Cmd;
use crate::{Context, Outcome, fail, require};

/// Bytes of a message: three packets of Ethernet.
const SIZE: u32 = 4000;
/// How often a message is sent that does not come, and how long it has each time.
const TRIES: u32 = 200;
const PAUSE: Duration = Duration::from_millis(200);

/// It.
#[derive(Debug)]
pub struct Parted {
    lines: LineProcess,
    /// Its number.
    pub qpn: u32,
    /// Where it is.
    pub address: String,
}

impl Parted {
    /// Starts it, with this port for its numbers. Between two of a host nothing goes through memory, where
    /// there are no packets.
    pub fn start(program: &Path, dist: &Dist, ns: &NetNs, address: &str, port: u16) -> Outcome<Self> {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", ns.name()]).arg(program).arg(address);
        command.env("LD_LIBRARY_PATH", dist.lib());
        command.env("UWARP_LINK", "tcp").env("UWARP_PORT_RANGE", format!("{port}-{port}"));
        let mut lines = LineProcess::start("a program with datagrams", command)?;
        let line = lines.expect("name ", PATIENCE)?;
        let qpn = line[5..].parse().context("its number")?;
        Ok(Self { lines, qpn, address: address.to_owned() })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        (self.qpn >> 8) as u16
    }

    /// Sends a message there until it has come; how often.
    pub fn reaches(&mut self, other: &mut Parted, seed: u32) -> Outcome<u32> {
        for tries in 1..=TRIES {
            let line = format!("send {} {} {SIZE} {seed}", other.qpn, other.address);
            self.lines.send_line(&line)?;
            let done = self.lines.expect("done ", PATIENCE)?;
            require!(done == "done 0", "{line}: {done}");
            if other.lines.says(&format!("received {SIZE} {seed}"), PAUSE)? {
                return Ok(tries);
            }
        }
        fail!("of {TRIES} messages none has come");
    }

    /// The first message goes there in fragments. Returns when messages go in parts.
    pub fn learns(&mut self, other: &mut Parted, ns: &NetNs) -> Outcome {
        self.reaches(other, 1)?;
        require!(joined(ns)? > 0, "the first message came in parts, or in one packet");
        for seed in 2..TRIES {
            let before = joined(ns)?;
            self.reaches(other, seed)?;
            if joined(ns)? == before {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        fail!("no message came in parts")
    }

    /// Kilobytes in use.
    pub fn resident(&self) -> Outcome<u64> {
        let path = format!("/proc/{}/status", self.lines.pid());
        let status = std::fs::read_to_string(&path).context(&path)?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        kib.map_or_else(|| fail!("no VmRSS in {path}"), Ok)
    }

    /// Of `uwarp stat`: what came and nobody got, by its name.
    pub fn dropped(&self, dist: &Dist, ns: &NetNs, what: &str) -> Outcome<u64> {
        let line = format!("stat --json --pid {}", self.lines.pid());
        let out = Cmd::new(dist.uwarp()?).args(&line).in_ns(Some(ns)).run_ok()?;
        let document: serde_json::Value = serde_json::from_str(&out.stdout).context("uwarp stat")?;
        let found = document["processes"][0]["unclaimed"][what].as_u64();
        found.map_or_else(|| fail!("no {what}: {}", out.stdout), Ok)
    }
}

/// Datagrams whose fragments the system there has joined.
pub fn joined(ns: &NetNs) -> Outcome<u64> {
    let said = Cmd::line("cat /proc/net/snmp").in_ns(Some(ns)).run_ok()?.stdout;
    let mut lines = said.lines().filter(|line| line.starts_with("Ip: "));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { fail!("{said}") };
    let at = names.split(' ').position(|name| name == "ReasmOKs");
    let value = at.and_then(|at| values.split(' ').nth(at)?.parse().ok());
    value.map_or_else(|| fail!("no ReasmOKs\n{said}"), Ok)
}
