//! `uwarp bench loops`: a server that is one event loop, whose clients are in another one, beside the same
//! over TCP sockets. `loops.c` is both ends, compiled by the user's cc: a program as users write them.
//!
//! In each round every way is measured, one after the other, so the machine's other work is in all of them.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::Command;

use comfy_table::Table;
use serde::Serialize;

use super::ends::{Ends, Place};
use super::machine::Machine;
use super::mpi::Scratch;
use super::progress;
use super::protocol::{Failure, Result};
use super::stats::{beside, median};
use crate::cli::{BenchArgs, BenchPin};
use crate::{libdir, table};

const SOURCE: &str = include_str!("loops.c");
/// Bytes of a request, and of a reply.
const SIZE: u32 = 256;
const CONNECTIONS: [u32; 4] = [1, 16, 128, 256];
/// What the project wants beside raw TCP through memory, by the number of connections; and between two hosts.
/// Printed, never asserted.
const TARGETS: [&str; 4] = ["at least 1.50", "at least 1.00", "at least 1.30", "-"];
const BETWEEN_HOSTS: &str = "at least 0.90";

/// How requests and replies go.
struct Way {
    id: &'static str,
    title: &'static str,
    /// Words of the program.
    carrier: &'static str,
    channels: &'static str,
    link: &'static str,
}

/// The first is the measure of the others.
const WAYS: [Way; 6] = [
    way("tcp-sockets", "raw TCP sockets", "tcp", "one", "tcp"),
    way("memory-one", "memory, one channel", "send", "one", "memory"),
    way("memory-many", "memory, a channel for each", "send", "many", "memory"),
    way("memory-write", "memory, one channel, replies by Write", "write", "one", "memory"),
    way("tcp-one", "uwarp over TCP, one channel", "send", "one", "tcp"),
    way("tcp-many", "uwarp over TCP, a channel for each", "send", "many", "tcp"),
];

const fn way(
    id: &'static str,
    title: &'static str,
    carrier: &'static str,
    channels: &'static str,
    link: &'static str,
) -> Way {
    Way { id, title, carrier, channels, link }
}

/// What one end printed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct End {
    requests: f64,
    seconds: f64,
    /// All threads of the process.
    processor: f64,
    sleeps: f64,
    /// `None`: the system does not let this user count them.
    calls: Option<f64>,
}

/// One run.
#[derive(Debug, Clone, Copy, Serialize)]
struct Run {
    client: End,
    server: End,
}

impl Run {
    fn rate(&self) -> f64 {
        self.client.requests / self.client.seconds
    }
}

#[derive(Serialize)]
struct Row {
    id: String,
    title: String,
    connections: u32,
    /// Requests a second, median.
    rate: f64,
    /// Of the ratios to raw TCP in the same round: median, least, most.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<[f64; 3]>,
    target: &'static str,
    rounds: Vec<Run>,
}

pub fn run(args: &BenchArgs, place: Place) -> Result<bool> {
    if args.pin != BenchPin::Spinning {
        return Err(Failure::new("--pin is for other figures, not for loops"));
    }
    let library = libdir::find().map_err(|reason| Failure(reason.to_string()))?;
    let (seconds, rounds) = if args.quick { (0.6, 3) } else { (4.5, 9) };
    let (seconds, rounds) = (args.seconds.unwrap_or(seconds), args.rounds.unwrap_or(rounds));
    // Nothing is shared between namespaces of the network.
    let ways: Vec<&Way> =
        WAYS.iter().filter(|way| place == Place::Loopback || way.link != "memory").collect();
    let all: Vec<(usize, &Way, String)> = (0..CONNECTIONS.len())
        .flat_map(|at| ways.iter().map(move |way| (at, *way, format!("{}-{}", way.id, CONNECTIONS[at]))))
        .collect();
    let wanted = |id: &str| args.only.is_empty() || args.only.iter().any(|only| id.starts_with(only));
    if !all.iter().any(|(.., id)| wanted(id)) {
        let known: Vec<_> = all.iter().map(|(.., id)| id.as_str()).collect();
        return Err(Failure(format!("there is no such figure; there are: {}", known.join(", "))));
    }
    let mut machine = Machine::look();
    let directory = Scratch::new("loops")?;
    let program = compile(directory.path())?;
    let namespaces = Namespaces::new(place)?;
    let bar = progress(u64::from(rounds) * all.len() as u64);
    let mut rows = Vec::new();
    for (at, connections) in CONNECTIONS.into_iter().enumerate() {
        // Raw TCP is measured beside each.
        let some = |way: &&Way| wanted(&format!("{}-{connections}", way.id));
        let beside: Vec<&Way> = ways[1..].iter().copied().filter(some).collect();
        if beside.is_empty() && !some(&ways[0]) {
            continue;
        }
        let ways: Vec<&Way> = ways[..1].iter().copied().chain(beside).collect();
        let mut runs = vec![Vec::new(); ways.len()];
        for _ in 0..rounds {
            for (way, runs) in ways.iter().zip(&mut runs) {
                bar.set_message(format!("{} connections: {}", connections, way.title));
                let ends = [&program, &library].map(PathBuf::as_path);
                runs.push(measure(ends, &namespaces, way, connections, seconds / f64::from(rounds))?);
                bar.inc(1);
            }
        }
        let raw = runs[0].clone();
        rows.extend(ways.iter().zip(runs).map(|(way, runs)| row(way, (at, place), runs, &raw)));
    }
    bar.finish_and_clear();
    machine.look_again();
    if args.json {
        crate::say!(
            "{}",
            serde_json::json!({
                "seconds": seconds, "rounds": rounds, "bytes": SIZE, "machine": machine, "figures": rows,
            })
        );
        return Ok(true);
    }
    if let Some(busy) = machine.busy() {
        crate::say!("{busy}\n");
    }
    crate::say!("Requests and replies of {SIZE} bytes, one in flight on each connection; {rounds} rounds\n");
    crate::say!("{}", table::text(table(&rows)));
    crate::say!("Of each request, at client and server: processor time in us, system calls, sleeps.");
    Ok(true)
}

fn compile(directory: &Path) -> Result<PathBuf> {
    let (source, program) = (directory.join("loops.c"), directory.join("loops"));
    std::fs::write(&source, SOURCE).map_err(|error| Failure(format!("{}: {error}", source.display())))?;
    let mut cc = Command::new("cc");
    cc.args(["-O2", "-o"]).arg(&program).arg(&source).args(["-lrdmacm", "-libverbs"]);
    match cc.output() {
        Ok(out) if out.status.success() => Ok(program),
        Ok(out) => Err(Failure(format!(
            "cc cannot compile the program that measures. On Debian: apt-get install gcc libc6-dev \
             libibverbs-dev librdmacm-dev\n{}",
            String::from_utf8_lossy(&out.stderr)
        ))),
        Err(error) => {
            Err(Failure(format!("cannot run cc, which compiles the program that measures: {error}")))
        }
    }
}

/// Where the two ends run, if not where this process does.
struct Namespaces(Option<(Ends, [String; 3])>);

impl Namespaces {
    fn new(place: Place) -> Result<Self> {
        if place == Place::Loopback {
            return Ok(Self(None));
        }
        let ends = Ends::unconnected(place)?;
        let [client, server] = ends.processes().map(|process| format!("/proc/{process}/ns/net"));
        let words = [ends.address().to_string(), server, client];
        Ok(Self(Some((ends, words))))
    }

    /// What the program is told of them.
    fn words(&self) -> &[String] {
        self.0.as_ref().map_or(&[], |(_, words)| words)
    }
}

fn measure(
    [program, library]: [&Path; 2],
    namespaces: &Namespaces,
    way: &Way,
    connections: u32,
    seconds: f64,
) -> Result<Run> {
    let failed = |why: &dyn Display| Failure(format!("{}, {connections} connections: {why}", way.title));
    let out = Command::new(program)
        .args([way.carrier, way.channels, &connections.to_string(), &SIZE.to_string()])
        .arg(seconds.to_string())
        .args(namespaces.words())
        .env("LD_LIBRARY_PATH", library)
        .env("UWARP_LINK", way.link)
        .output()
        .map_err(|error| failed(&error))?;
    let text = String::from_utf8_lossy(&out.stdout);
    let of = |name: &str| text.lines().find_map(|line| end(line.strip_prefix(name)?));
    match (of("client "), of("server ")) {
        (Some(client), Some(server)) => Ok(Run { client, server }),
        _ => Err(failed(&String::from_utf8_lossy(&out.stderr))),
    }
}

/// "31563 1.000084 0.122975 976 63013": requests, seconds, processor seconds, sleeps, system calls.
fn end(line: &str) -> Option<End> {
    let words: Option<Vec<f64>> = line.split_whitespace().map(|word| word.parse().ok()).collect();
    let [requests, seconds, processor, sleeps, calls] = words?[..] else { return None };
    let calls = (calls >= 0.0).then_some(calls);
    (requests > 0.0).then_some(End { requests, seconds, processor, sleeps, calls })
}

fn row(way: &Way, (at, place): (usize, Place), rounds: Vec<Run>, raw: &[Run]) -> Row {
    let rates = |runs: &[Run]| runs.iter().map(Run::rate).collect::<Vec<_>>();
    let (rates, raw) = (rates(&rounds), rates(raw));
    let is_raw = way.id == WAYS[0].id;
    let ratio = if is_raw { None } else { beside(&rates, &raw) };
    let connections = CONNECTIONS[at];
    Row {
        id: format!("{}-{connections}", way.id),
        title: way.title.to_owned(),
        connections,
        rate: median(&rates).unwrap_or_default(),
        ratio,
        target: match place {
            _ if is_raw => "-",
            Place::Namespaces { .. } => BETWEEN_HOSTS,
            Place::Loopback if way.link == "memory" => TARGETS[at],
            Place::Loopback => "-",
        },
        rounds,
    }
}

fn table(rows: &[Row]) -> Table {
    let header = ["connections", "", "requests/s", "ratio", "target", "processor", "calls", "sleeps"];
    let mut table = table::new(&header);
    for row in rows {
        let ends = |of: fn(&End) -> Option<f64>, digits: usize| {
            let at = |end: fn(&Run) -> &End| {
                let each: Option<Vec<f64>> =
                    row.rounds.iter().map(|run| Some(of(end(run))? / end(run).requests)).collect();
                each.and_then(|each| median(&each))
                    .map_or("-".to_owned(), |value| format!("{value:.digits$}"))
            };
            format!("{} / {}", at(|run| &run.client), at(|run| &run.server))
        };
        let ratio = row
            .ratio
            .map_or("-".to_owned(), |[middle, least, most]| format!("{middle:.2} ({least:.2} to {most:.2})"));
        table.add_row([
            row.connections.to_string(),
            row.title.clone(),
            format!("{:.0}", row.rate),
            ratio,
            row.target.to_owned(),
            ends(|end| Some(end.processor * 1e6), 1),
            ends(|end| end.calls, 2),
            ends(|end| Some(end.sleeps), 2),
        ]);
    }
    table::align(&mut table, 2);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_says_what_it_did() {
        let said = end("200 2.0 0.5 10 400").unwrap();
        assert_eq!((said.requests, said.seconds, said.calls), (200.0, 2.0, Some(400.0)));
        assert_eq!(end("200 2.0 0.5 10 -1").unwrap().calls, None);
        for line in ["", "0 2.0 0.5 10 -1", "1 2 3 4", "1 2 3 4 x", "1 2 3 4 5 6"] {
            assert_eq!(end(line), None, "{line}");
        }
    }

    #[test]
    fn ratios_compare_runs_of_the_same_round() {
        let run = |rate| {
            let end = End { requests: rate, seconds: 1.0, processor: 0.1, sleeps: 1.0, calls: None };
            Run { client: end, server: end }
        };
        let raw = [run(10.0), run(100.0), run(10.0)];
        let row = row(&WAYS[1], (2, Place::Loopback), vec![run(20.0), run(200.0), run(30.0)], &raw);
        assert_eq!((row.rate, row.ratio, row.target), (30.0, Some([2.0, 2.0, 3.0]), "at least 1.30"));
        assert_eq!(super::row(&WAYS[0], (2, Place::Loopback), raw.to_vec(), &raw).ratio, None);
    }
}
