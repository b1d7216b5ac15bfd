//! `uwarp bench ucx`: UCX's own `ucx_perftest` over each transport that UCX has for uwarp, in turns with
//! UCX's TCP, and on one host with its own shared memory, too.
//!
//! Which link carries a connected queue pair is required (`UWARP_LINK`), so none falls back.

use std::fmt::Display;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::time::{Duration, Instant};

use comfy_table::Table;
use serde::Serialize;

use super::ends::{Ends, Place};
use super::machine::Machine;
use super::mpi::Scratch;
use super::progress;
use super::protocol::{Failure, Result};
use super::stats::{beside, median};
use crate::cli::{BenchArgs, BenchPin};
use crate::{program, table};

const PERFTEST: &str = "ucx_perftest";
/// One run of it takes a second or two.
const LIMIT: Duration = Duration::from_secs(60);
/// The server may need so long until it listens; the client has no patience.
const STARTING: Duration = Duration::from_secs(10);

/// How UCX's messages travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Way {
    id: &'static str,
    title: &'static str,
    tls: &'static str,
    /// Over uwarp, and by this link.
    link: Option<&'static str>,
    /// Where it can be had: on one host, between two.
    places: [bool; 2],
}

const RC: &str = "rc_verbs,ud_verbs:aux,self";

/// The first is the measure of the others.
const WAYS: [Way; 6] = [
    Way { id: "tcp", title: "UCX's TCP", tls: "tcp,self", link: None, places: [true, true] },
    Way { id: "rc-memory", title: "rc_verbs, memory", tls: RC, link: Some("memory"), places: [true, false] },
    Way { id: "rc-tcp", title: "rc_verbs, TCP", tls: RC, link: Some("tcp"), places: [true, true] },
    Way { id: "rc-rd", title: "rc_verbs, rd", tls: RC, link: Some("rd"), places: [true, true] },
    Way { id: "ud", title: "ud_verbs", tls: "ud_verbs,self", link: Some("auto"), places: [true, true] },
    Way {
        id: "shared",
        title: "UCX's shared memory",
        tls: "posix,sysv,cma,self",
        link: None,
        places: [true, false],
    },
];

/// What is measured, and with how many messages.
struct Test {
    name: &'static str,
    bytes: u32,
    count: u32,
    /// What the project wants of these ways beside UCX's TCP: by `id`. Printed, never asserted.
    targets: &'static [(&'static str, &'static str)],
}

const TESTS: [Test; 5] = [
    Test { name: "tag_lat", bytes: 8, count: 20_000, targets: &[("rc-memory", "at most 0.20")] },
    Test { name: "tag_lat", bytes: 4096, count: 10_000, targets: &[] },
    Test { name: "tag_lat", bytes: 65_536, count: 3000, targets: &[("ud", "at most 1.43")] },
    Test { name: "tag_bw", bytes: 65_536, count: 10_000, targets: &[] },
    Test {
        name: "tag_bw",
        bytes: 1 << 20,
        count: 1000,
        targets: &[("rc-memory", "at least 1.20"), ("ud", "at least 0.50")],
    },
];

impl Test {
    fn id(&self, way: &Way) -> String {
        format!("{}-{}-{}", self.name.replace('_', "-"), self.bytes, way.id)
    }

    fn title(&self) -> String {
        let size = match self.bytes {
            bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
            bytes if bytes >= 1 << 10 => format!("{} KiB", bytes >> 10),
            bytes => format!("{bytes} B"),
        };
        format!("{}, {size}", self.name)
    }

    fn is_latency(&self) -> bool {
        self.name.ends_with("_lat")
    }

    fn unit(&self) -> &'static str {
        if self.is_latency() { "µs" } else { "GB/s" }
    }
}

/// What one run printed: µs, or GB/s.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Run {
    value: f64,
    /// The 99th percentile, of a latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    p99: Option<f64>,
}

#[derive(Serialize)]
struct Row {
    id: String,
    title: String,
    way: &'static str,
    unit: &'static str,
    /// Of the rounds.
    median: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99: Option<f64>,
    /// Of the ratios to UCX's TCP in the same round: median, least, most.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<[f64; 3]>,
    target: &'static str,
    rounds: Vec<Run>,
}

pub fn run(args: &BenchArgs, place: Place) -> Result<bool> {
    if args.pin != BenchPin::Spinning || args.seconds.is_some() {
        return Err(Failure::new("--pin and --seconds are for other figures, not for ucx"));
    }
    if let Err(reason) = program::find(PERFTEST.as_ref()) {
        return Err(Failure(format!("{reason}. On Debian: apt-get install ucx-utils")));
    }
    let rounds = args.rounds.unwrap_or(if args.quick { 1 } else { 5 });
    let shrink = if args.quick { 20 } else { 1 };
    let here = usize::from(place != Place::Loopback);
    let ways: Vec<&Way> = WAYS.iter().filter(|way| way.places[here]).collect();
    let wanted = |test: &Test, way: &Way| {
        args.only.is_empty() || args.only.iter().any(|only| test.id(way).starts_with(only))
    };
    let known: Vec<_> = TESTS.iter().flat_map(|test| ways.iter().map(|way| test.id(way))).collect();
    // UCX's TCP is measured beside each.
    let plan: Vec<(&Test, Vec<&Way>)> = TESTS
        .iter()
        .filter(|test| ways.iter().any(|way| wanted(test, way)))
        .map(|test| {
            (test, ways.iter().copied().filter(|way| **way == WAYS[0] || wanted(test, way)).collect())
        })
        .collect();
    if plan.is_empty() {
        return Err(Failure(format!("there is no such figure; there are: {}", known.join(", "))));
    }
    let mut machine = Machine::look();
    let site = Site::new(place)?;
    let bar = progress(u64::from(rounds) * plan.iter().map(|(_, ways)| ways.len() as u64).sum::<u64>());
    let mut rows = Vec::new();
    for (test, ways) in &plan {
        let mut runs = vec![Vec::new(); ways.len()];
        for _ in 0..rounds {
            for (way, runs) in ways.iter().zip(&mut runs) {
                bar.set_message(format!("{}: {}", test.title(), way.title));
                runs.push(measure(&site, test, way, test.count / shrink)?);
                bar.inc(1);
            }
        }
        let raw = runs[0].clone();
        rows.extend(ways.iter().zip(runs).map(|(way, runs)| row(test, way, runs, &raw)));
    }
    bar.finish_and_clear();
    machine.look_again();
    if args.json {
        crate::say!("{}", serde_json::json!({ "rounds": rounds, "machine": machine, "figures": rows }));
        return Ok(true);
    }
    if let Some(busy) = machine.busy() {
        crate::say!("{busy}\n");
    }
    crate::say!("{PERFTEST} between {}, {rounds} rounds\n", site.described());
    crate::say!("{}", table::text(table(&rows, args.targets)));
    crate::say!("Median and 99th percentile; the ratio is that to UCX's TCP, round by round.");
    Ok(true)
}

/// Where the two ends run.
struct Site {
    place: Place,
    /// Processes whose namespaces they use; the server's first.
    namespaces: Option<(Ends, [u32; 2])>,
    address: IpAddr,
    directory: Scratch,
}

impl Site {
    fn new(place: Place) -> Result<Site> {
        let directory = Scratch::new("ucx")?;
        if place == Place::Loopback {
            return Ok(Site { place, namespaces: None, address: Ipv4Addr::LOCALHOST.into(), directory });
        }
        let ends = Ends::unconnected(place)?;
        let [client, server] = ends.processes();
        [client, server].into_iter().try_for_each(has_come_up)?;
        let address = ends.address();
        Ok(Site { place, namespaces: Some((ends, [server, client])), address, directory })
    }

    fn described(&self) -> String {
        match self.place {
            Place::Loopback => "two processes of one host".to_owned(),
            Place::Namespaces { mtu } => format!("two network namespaces, MTU {mtu}"),
        }
    }

    /// One end, in its place, over uwarp or not.
    fn end(&self, server: bool, way: &Way, words: &[String], to: &str) -> Result<Child> {
        let uwarp = std::env::current_exe().map_err(Failure::of("this program"))?;
        let mut line: Vec<String> = Vec::new();
        if let Some((_, [of_server, of_client])) = &self.namespaces {
            let process = if server { of_server } else { of_client };
            line.extend(["nsenter", "--net", "--target", &process.to_string()].map(str::to_owned));
            // UCX finds its devices in /sys, which is that of the namespace in which it was mounted.
            const OWN_SYS: &str = "mount -t sysfs sysfs /sys && exec \"$@\"";
            line.extend(["unshare", "--mount", "sh", "-c", OWN_SYS, "sh"].map(str::to_owned));
        }
        if way.link.is_some() {
            line.push(uwarp.display().to_string());
            line.extend(["run", "--files", "on", "--"].map(str::to_owned));
        }
        line.push(PERFTEST.to_owned());
        line.extend(words.iter().cloned());
        let file = |name: &str| {
            let file = self.directory.path().join(format!("{to}.{name}"));
            File::create(&file).map_err(Failure::of("a file of this measurement"))
        };
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).env("UCX_TLS", way.tls).stdin(Stdio::null());
        if let Some(link) = way.link {
            command.env("UWARP_LINK", link);
        }
        let child = command.stdout(file("out")?).stderr(file("err")?).spawn();
        child.map_err(|error| Failure(format!("cannot run {}: {error}", line[0])))
    }

    fn said(&self, of: &str) -> String {
        std::fs::read_to_string(self.directory.path().join(of)).unwrap_or_default()
    }
}

/// The system says of a device that it runs some time after it does; UCX does not wait.
fn has_come_up(process: u32) -> Result<()> {
    let begun = Instant::now();
    while begun.elapsed() < STARTING {
        let mut command = Command::new("nsenter");
        command.args(["--net", "--target", &process.to_string(), "ip", "-o", "link", "show", "type", "veth"]);
        let out = command.output().map_err(Failure::of("nsenter (of package util-linux)"))?;
        if String::from_utf8_lossy(&out.stdout).contains("state UP") {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(Failure::new("the devices between the namespaces do not come up"))
}

fn measure(site: &Site, test: &Test, way: &Way, count: u32) -> Result<Run> {
    let value = one(site, test, way, count, 50)?;
    // Of a run, ucx_perftest prints one percentile.
    let p99 = if test.is_latency() { Some(one(site, test, way, count, 99)?) } else { None };
    Ok(Run { value, p99 })
}

/// A run of both ends.
fn one(site: &Site, test: &Test, way: &Way, count: u32, percentile: u32) -> Result<f64> {
    let failed = |why: &dyn Display| Failure(format!("{}, {}: {why}", test.title(), way.title));
    let port = free_port().map_err(|error| failed(&error))?.to_string();
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let server = site.end(true, way, &words(&format!("-p {port}")), "server")?;
    let mut server = Ending(server);
    let line = format!(
        "{} -p {port} -t {} -s {} -n {count} -w {} -R {percentile} -f -v",
        site.address,
        test.name,
        test.bytes,
        count / 10
    );
    let begun = Instant::now();
    loop {
        let mut client = Ending(site.end(false, way, &words(&line), "client")?);
        let well = client.wait(LIMIT).map_err(|error| failed(&error))?;
        if well == Some(true) {
            server.wait(LIMIT).map_err(|error| failed(&error))?;
            let said = site.said("client.out");
            return figure(test, &said).ok_or_else(|| failed(&format_args!("{PERFTEST} printed\n{said}")));
        }
        // The server does not listen yet.
        let accepted = site.said("server.out").contains("Accepted connection");
        let ended = server.0.try_wait().map_err(|error| failed(&error))?.is_some();
        if well.is_none() || accepted || ended || begun.elapsed() > STARTING {
            let why = if well.is_none() { "did not end in a minute\n" } else { "" };
            let said =
                ["client.err", "client.out", "server.err", "server.out"].map(|of| site.said(of)).concat();
            return Err(failed(&format_args!("{why}{said}")));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// A child that does not outlive this measurement.
struct Ending(Child);

impl Ending {
    /// Whether it ended well; `None`: not in this time.
    fn wait(&mut self, limit: Duration) -> std::io::Result<Option<bool>> {
        let begun = Instant::now();
        while begun.elapsed() < limit {
            if let Some(status) = self.0.try_wait()? {
                return Ok(Some(status.success()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(None)
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        // It has ended already, or it is ours to end.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// One that nobody has here, another one each time, and none that the system gives to who connects: one of
/// those may be taken before the server has it.
fn free_port() -> std::io::Result<u16> {
    const PORTS: std::ops::Range<u16> = 20_000..30_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    if NEXT.load(Relaxed) == 0 {
        NEXT.store((std::process::id() % 5000) as u16, Relaxed);
    }
    loop {
        let port = PORTS.start + NEXT.fetch_add(1, Relaxed) % (PORTS.end - PORTS.start);
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error),
            Ok(_) => return Ok(port),
        }
    }
}

/// Of the line below the heads: iterations, percentile, average and overall latency in µs, average and
/// overall bandwidth in MiB/s, average and overall message rate.
fn figure(test: &Test, said: &str) -> Option<f64> {
    let line = said.lines().map(str::trim).rfind(|line| line.starts_with(|c: char| c.is_ascii_digit()))?;
    let values: Option<Vec<f64>> = line.split(',').map(|value| value.trim().parse().ok()).collect();
    let [_, percentile, _, _, _, bandwidth, ..] = values?[..] else { return None };
    Some(if test.is_latency() { percentile } else { bandwidth * f64::from(1 << 20) / 1e9 })
}

fn row(test: &Test, way: &Way, rounds: Vec<Run>, raw: &[Run]) -> Row {
    let values = |runs: &[Run]| runs.iter().map(|run| run.value).collect::<Vec<_>>();
    let (values, raw) = (values(&rounds), values(raw));
    let tails: Vec<f64> = rounds.iter().filter_map(|run| run.p99).collect();
    let ratio = if *way == WAYS[0] { None } else { beside(&values, &raw) };
    Row {
        id: test.id(way),
        title: test.title(),
        way: way.title,
        unit: test.unit(),
        median: median(&values).unwrap_or_default(),
        p99: median(&tails),
        ratio,
        target: test.targets.iter().find(|(id, _)| *id == way.id).map_or("-", |(_, target)| target),
        rounds,
    }
}

fn table(rows: &[Row], targets: bool) -> Table {
    let mut header = vec!["figure", "over", "measured", "ratio"];
    header.extend(targets.then_some("target"));
    let mut table = table::new(&header);
    for row in rows {
        let tail = row.p99.map_or(String::new(), |p99| format!(" ({p99:.2})"));
        let ratio = row
            .ratio
            .map_or("-".to_owned(), |[middle, least, most]| format!("{middle:.2} ({least:.2} to {most:.2})"));
        let mut cells = vec![
            row.title.clone(),
            row.way.to_owned(),
            format!("{:.2}{tail} {}", row.median, row.unit),
            ratio,
        ];
        cells.extend(targets.then(|| row.target.to_owned()));
        table.add_row(cells);
    }
    table::align(&mut table, 2);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "\
        iterations,99.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n\
                        \x20500,1.266,0.900,0.900,8.48,2048.00,1111656,1111656\n";

    #[test]
    fn the_line_of_figures_is_read() {
        assert_eq!(figure(&TESTS[0], SAID), Some(1.266));
        assert_eq!(figure(&TESTS[4], SAID), Some(2.147_483_648));
        for other in ["", "Waiting for connection...\n", "1000,x\n", "1000\n"] {
            assert_eq!(figure(&TESTS[0], other), None, "{other}");
        }
    }

    #[test]
    fn ratios_compare_runs_of_the_same_round() {
        let runs = |values: [f64; 3]| values.map(|value| Run { value, p99: None }).to_vec();
        let row = row(&TESTS[4], &WAYS[1], runs([20.0, 200.0, 30.0]), &runs([10.0, 50.0, 10.0]));
        assert_eq!((row.median, row.ratio, row.target), (30.0, Some([3.0, 2.0, 4.0]), "at least 1.20"));
        assert_eq!(row.id, "tag-bw-1048576-rc-memory");
    }

    #[test]
    fn targets_are_of_ways() {
        let known = |id| WAYS.iter().any(|way| way.id == id);
        assert!(TESTS.iter().flat_map(|test| test.targets).all(|(id, _)| known(*id)));
    }
}
