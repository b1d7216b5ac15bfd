//! The victim and an innocent client: `c/victim.c` over the built library, each in its own process, so that a
//! crash or a hang of one of them is noticed.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::lines::LineProcess;
use super::peer::PATIENCE;
use crate::dist::Dist;
use crate::{Context, Outcome, fail, require};

fn start(
    name: &'static str,
    program: &Path,
    dist: &Dist,
    args: &[&str],
    env: &[(&str, &str)],
) -> Outcome<LineProcess> {
    let mut command = Command::new(program);
    command.args(args).env("LD_LIBRARY_PATH", dist.lib()).envs(env.iter().copied());
    LineProcess::start(name, command)
}

/// A memory region of the victim's.
#[derive(Debug, Clone, Copy)]
pub struct Region {
    /// Its remote key.
    pub stag: u32,
    /// Its address, from which offsets count.
    pub at: u64,
    /// Bytes.
    pub len: u64,
}

impl Region {
    /// The offset behind its last byte.
    pub fn end(&self) -> u64 {
        self.at + self.len
    }
}

/// The victim's report of a connection that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The last event, or the call that failed.
    pub how: String,
    /// ESTABLISHED was reported.
    pub established: bool,
    /// State of the queue pair.
    pub state: String,
    /// Asynchronous events by number.
    pub events: String,
    /// Receive completions in order: `ok` with the length, `e` with the status.
    pub recvs: String,
    /// Send completions.
    pub sends: String,
    /// Bytes that changed: region, first and last.
    pub changed: String,
}

impl Report {
    fn parse(line: &str) -> Self {
        let fields: HashMap<&str, &str> = line.split(' ').filter_map(|word| word.split_once('=')).collect();
        let get = |name| fields.get(name).copied().unwrap_or("").to_owned();
        Self {
            how: get("how"),
            established: get("est") == "1",
            state: get("state"),
            events: get("async"),
            recvs: get("recv"),
            sends: get("send"),
            changed: get("changed"),
        }
    }
}

/// The victim, with an honest client that is connected to it.
#[derive(Debug)]
pub struct Victim {
    server: LineProcess,
    innocent: LineProcess,
    /// Where it listens.
    pub port: u16,
    regions: HashMap<String, Region>,
    /// Number of descriptors while only the innocent client is connected.
    descriptors: usize,
}

impl Victim {
    /// Starts both processes. `args` and `env` are the server's.
    pub fn start(program: &Path, dist: &Dist, args: &[&str], env: &[(&str, &str)]) -> Outcome<Self> {
        let args: Vec<&str> = ["serve"].iter().chain(args).copied().collect();
        let mut server = start("the victim", program, dist, &args, env)?;
        let line = server.expect("port ", PATIENCE)?;
        let port: u16 = line[5..].parse().context("the port")?;
        let mut innocent = start("the innocent one", program, dist, &["innocent", &port.to_string()], env)?;
        innocent.expect("connected", PATIENCE)?;
        let mut victim = Self { server, innocent, port, regions: HashMap::new(), descriptors: 0 };
        victim.take_regions();
        victim.sync()?;
        // A stream through memory has its descriptors when the first byte has come.
        victim.innocent(1)?;
        victim.descriptors = victim.count_descriptors()?;
        Ok(victim)
    }

    fn take_regions(&mut self) {
        for line in std::mem::take(&mut self.server.early) {
            let words: Vec<&str> = line.split(' ').collect();
            if let ["region", name, stag, at, len] = words[..]
                && let (Ok(stag), Ok(at), Ok(len)) = (stag.parse(), at.parse(), len.parse())
            {
                self.regions.insert(name.into(), Region { stag, at, len });
            } else {
                self.server.early.push_back(line);
            }
        }
    }

    /// The process that is attacked.
    pub fn pid(&self) -> u32 {
        self.server.pid()
    }

    /// The honest client's process.
    pub fn innocent_pid(&self) -> u32 {
        self.innocent.pid()
    }

    /// One of its regions.
    ///
    /// # Panics
    /// When there is none of this name.
    pub fn region(&self, name: &str) -> Region {
        self.regions[name]
    }

    /// Gives it a command, and waits until it is carried out.
    pub fn tell(&mut self, line: &str) -> Outcome {
        self.server.send_line(line)?;
        self.server.expect("done", PATIENCE)?;
        self.take_regions();
        Ok(())
    }

    /// Gives it several commands at once: it looks at nothing else in between.
    pub fn tell_at_once(&mut self, lines: &[&str]) -> Outcome {
        self.server.send_line(&lines.join("\n"))?;
        for _ in lines {
            self.server.expect("done", PATIENCE)?;
        }
        self.take_regions();
        Ok(())
    }

    /// Waits for a line that begins so.
    pub fn expect(&mut self, start: &str) -> Outcome<String> {
        self.server.expect(start, PATIENCE)
    }

    /// The same with another limit.
    pub fn expect_within(&mut self, start: &str, limit: Duration) -> Outcome<String> {
        self.server.expect(start, limit)
    }

    /// Waits for the end of a connection.
    pub fn report(&mut self) -> Outcome<Report> {
        self.report_within(PATIENCE)
    }

    /// The same with another limit.
    pub fn report_within(&mut self, limit: Duration) -> Outcome<Report> {
        Ok(Report::parse(&self.server.expect("ended ", limit)?))
    }

    /// How many requests it has seen, connections that have ended, and open ones (the innocent one's is one).
    pub fn sync(&mut self) -> Outcome<[u64; 3]> {
        self.server.send_line("sync")?;
        let line = self.server.expect("synced ", PATIENCE)?;
        let numbers: Vec<u64> = line.split(' ').skip(1).filter_map(|n| n.parse().ok()).collect();
        let Ok(numbers) = numbers.try_into() else { fail!("not numbers: {line}") };
        Ok(numbers)
    }

    /// The innocent client does this number of rounds of Send, echo, Write and Read, and compares every byte.
    pub fn innocent(&mut self, rounds: usize) -> Outcome {
        self.innocent_begins(rounds)?;
        self.innocent_done()
    }

    /// As [`Self::innocent`], in two steps, for attacks in between.
    pub fn innocent_begins(&mut self, rounds: usize) -> Outcome {
        self.innocent.send_line(&format!("rounds {rounds}"))
    }

    /// The second step.
    pub fn innocent_done(&mut self) -> Outcome {
        self.innocent.expect("rounds ", 4 * PATIENCE)?;
        Ok(())
    }

    fn count_descriptors(&self) -> Outcome<usize> {
        let dir = format!("/proc/{}/fd", self.server.pid());
        Ok(std::fs::read_dir(&dir).context(dir)?.count())
    }

    /// Descriptors that it has beyond those it began with.
    pub fn extra_descriptors(&self) -> Outcome<usize> {
        Ok(self.count_descriptors()?.saturating_sub(self.descriptors))
    }

    /// All descriptors of ended connections are closed, and the innocent client still works.
    pub fn recovers(&mut self) -> Outcome {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let [_, _, open] = self.sync()?;
            let extra = self.extra_descriptors()?;
            if open == 1 && extra == 0 {
                break;
            }
            require!(Instant::now() < deadline, "{extra} descriptors and {} connections are left", open - 1);
            std::thread::sleep(Duration::from_millis(20));
        }
        self.innocent(3)
    }

    /// Bytes of its private memory, as the system reports them.
    pub fn memory(&self) -> Outcome<usize> {
        let file = format!("/proc/{}/status", self.server.pid());
        let text = std::fs::read_to_string(&file).context(file)?;
        let number =
            |line: &str| line.strip_prefix("RssAnon:")?.split_whitespace().next()?.parse::<usize>().ok();
        let kib = text.lines().find_map(number);
        let Some(kib) = kib else { fail!("no RssAnon in its status") };
        Ok(kib * 1024)
    }
}
