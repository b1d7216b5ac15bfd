//! `c/named.c`: one queue pair that its program brings up by number.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::lines::LineProcess;
use super::peer::PATIENCE;
use crate::dist::Dist;
use crate::netns::NetNs;
use crate::process::Cmd;
use crate::{Context, Outcome, fail, require};

/// It.
#[derive(Debug)]
pub struct Named {
    lines: LineProcess,
    /// Its number.
    pub qpn: u32,
    /// Where it is.
    pub address: String,
}

/// The packet sequence numbers of an end: what it expects and what it begins with.
pub type Psns = (u32, u32);

/// RETRY_EXC_ERR.
pub const RETRIES_EXCEEDED: &str = "sent 12";

impl Named {
    /// Starts it, with this port for its numbers.
    pub fn start(program: &Path, dist: &Dist, ns: &NetNs, address: &str, port: u16) -> Outcome<Self> {
        Self::start_with(program, dist, ns, address, port, &[])
    }

    /// The same with this environment.
    pub fn start_with(
        program: &Path,
        dist: &Dist,
        ns: &NetNs,
        address: &str,
        port: u16,
        env: &[(&str, &str)],
    ) -> Outcome<Self> {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", ns.name()]).arg(program).arg(address);
        command.envs(env.iter().copied());
        command.env("LD_LIBRARY_PATH", dist.lib()).env("UWARP_PORT_RANGE", format!("{port}-{port}"));
        let mut lines = LineProcess::start("a program with a queue pair", command)?;
        let line = lines.expect("name ", PATIENCE)?;
        let qpn: u32 = line[5..].parse().context("its number")?;
        require!(qpn >> 8 == u32::from(port), "its number {qpn:#x} is not one of port {port}");
        Ok(Self { lines, qpn, address: address.into() })
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        (self.qpn >> 8) as u16
    }

    fn tell(&mut self, line: &str) -> Outcome {
        self.lines.send_line(line)?;
        let answer = self.lines.expect("done ", PATIENCE)?;
        require!(answer == "done 0", "{line}: {answer}");
        Ok(())
    }

    /// To RTR and RTS, toward a peer that may not be there.
    pub fn toward(&mut self, peer: (u32, &str), psns: Psns, patience: (u32, u32)) -> Outcome {
        self.tell(&format!("rtr {} {} {}", peer.0, peer.1, psns.0))?;
        self.tell(&format!("rts {} {} {}", psns.1, patience.0, patience.1))
    }

    /// To RESET and INIT.
    pub fn reset(&mut self) -> Outcome {
        self.tell("reset")?;
        self.lines.forget();
        Ok(())
    }

    /// Posts a Send of this word.
    pub fn send(&mut self, word: &str) -> Outcome {
        self.tell(&format!("send {word}"))
    }

    /// Waits for a line that begins so.
    pub fn expect(&mut self, line: &str) -> Outcome {
        self.expect_within(line, PATIENCE)
    }

    /// The same with another limit.
    pub fn expect_within(&mut self, line: &str, limit: Duration) -> Outcome {
        let got = self.lines.expect(line.split(' ').next().unwrap_or(line), limit)?;
        require!(got == line, "\"{got}\" instead of \"{line}\"");
        Ok(())
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.lines.pid()
    }

    /// As `kill -9` does.
    pub fn kill(mut self) {
        self.lines.kill();
    }

    /// Whether it knows its peer as uwarp, as `uwarp stat` shows it.
    pub fn knows_peer(&self, dist: &Dist, ns: &NetNs) -> Outcome<bool> {
        let line = format!("stat --json --pid {}", self.lines.pid());
        let out = Cmd::new(dist.uwarp()?).args(&line).in_ns(Some(ns)).run_ok()?;
        let document: serde_json::Value = serde_json::from_str(&out.stdout).context("uwarp stat")?;
        let pair = &document["processes"][0]["queue_pairs"][0];
        let Some(known) = pair["peer_is_uwarp"].as_bool() else { fail!("no queue pair: {}", out.stdout) };
        Ok(known)
    }
}
