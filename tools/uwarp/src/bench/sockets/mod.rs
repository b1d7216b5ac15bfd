//! `uwarp bench sockets`: latency and bandwidth of programs of sockets by message size. Plain sockets; behind
//! the preloaded library; in `IWARP_MODE`; over rsockets.
//!
//! Each way has two processes of its own, as the preloaded library, its rules and the CRC are a process's.
//! In each round all ways are measured, one after the other.

#[allow(unsafe_code)]
pub mod calls;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use comfy_table::Table;
use serde::Serialize;

use super::ends::{Ends, Place, Setting, out_of_turn};
use super::machine::Machine;
use super::plot::{Page, Panel, Scale, Series};
use super::protocol::{Answer, Carrier, Failure, Figure, Order, Pattern, Result, Role, Sockets};
use super::stats::{Ratio, Side};
use super::ways::size_name;
use super::{crc, progress};
use crate::cli::{BenchArgs, BenchPin};
use crate::{complain, libdir, preload, sockets, table};

/// A way in which a program of sockets may run.
struct Way {
    id: &'static str,
    title: &'static str,
    carrier: Carrier,
    /// The rules for the preloaded library; without, it is not there.
    rules: Option<&'static str>,
    /// Receive calls look for a while before they block.
    spin: bool,
    /// With the CRC off and on, as the bytes travel by iWARP.
    iwarp: bool,
    target: Target,
}

/// What the project wants. Printed beside the figures, never asserted.
#[derive(Clone, Copy)]
struct Target {
    latency: &'static str,
    /// With the CRC off, or without one; with the CRC on.
    bandwidth: [&'static str; 2],
}

const NONE: Target = Target { latency: "-", bandwidth: ["-", "-"] };
const BYTES: Target = Target { latency: "64 B: at most 1.15", bandwidth: ["at least 0.90", "at least 0.75"] };
const RSOCKETS: Target =
    Target { latency: "64 B: at most 1.30", bandwidth: ["at least 0.80", "at least 0.80"] };

/// The first two are plain sockets: the better one of them is the measure of all others but the third, which
/// makes the same calls as the first.
const WAYS: [Way; 8] = [
    way("plain", "plain sockets", Carrier::Libc, None, NONE),
    way(
        "through",
        "preloaded, passing through",
        Carrier::Libc,
        Some(""),
        Target { latency: "at most 1.03", bandwidth: ["at least 0.97", "-"] },
    ),
    Way {
        spin: true,
        ..way("plain-spins", "plain sockets that look for 0.1 ms, then block", Carrier::Libc, None, NONE)
    },
    iwarp("iwarp-mode", "IWARP_MODE, send and recv", Carrier::IwarpMode, None, BYTES),
    iwarp(
        "descriptors",
        "IWARP_MODE, descriptors",
        Carrier::Descriptors,
        None,
        Target { latency: "-", bandwidth: ["from 64 KiB on: at least 1.00", "-"] },
    ),
    iwarp("rsockets", "rsockets, rsend and rrecv", Carrier::Rsockets, None, RSOCKETS),
    iwarp("rule-rsockets", "--sockets=rsockets", Carrier::Libc, Some("rsockets:all"), RSOCKETS),
    iwarp("rule-upgrade", "--sockets=upgrade", Carrier::Libc, Some("upgrade:all"), BYTES),
];

const fn way(
    id: &'static str,
    title: &'static str,
    carrier: Carrier,
    rules: Option<&'static str>,
    target: Target,
) -> Way {
    Way { id, title, carrier, rules, spin: false, iwarp: false, target }
}

const fn iwarp(
    id: &'static str,
    title: &'static str,
    carrier: Carrier,
    rules: Option<&'static str>,
    target: Target,
) -> Way {
    Way { iwarp: true, ..way(id, title, carrier, rules, target) }
}

const PLAIN: &str = "plain";
const PLAINS: [&str; 2] = [PLAIN, "plain-spins"];

const LATENCIES: [u32; 6] = [8, 64, 512, 4096, 16384, 65536];
const STREAMS: [u32; 6] = [64, 1024, 8192, 65536, 262_144, 1_048_576];
/// Before the first round of a figure: it is not measured.
const WARM_UP_MS: u64 = 10;
/// Added to the time that a figure takes.
const PATIENCE: Duration = Duration::from_secs(15);

/// One way with its two processes.
struct Line {
    id: String,
    title: String,
    way: &'static Way,
    crc: bool,
    ends: Result<Ends>,
}

/// One way's part of a figure.
#[derive(Debug, Serialize)]
struct Measured {
    #[serde(flatten)]
    side: Side,
    /// To the way that it is compared with.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<Ratio>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99_ratio: Option<Ratio>,
}

/// A figure: one pattern and size.
#[derive(Debug, Serialize)]
struct Row {
    id: String,
    #[serde(skip)]
    pattern: Pattern,
    size: u32,
    unit: &'static str,
    /// The better one of the plain ways.
    best: &'static str,
    ways: BTreeMap<String, Measured>,
}

/// Whether all was measured.
pub fn run(args: &BenchArgs, place: Place) -> Result<bool> {
    let libdir = libdir::find().map_err(|reason| Failure(reason.to_string()))?;
    let (seconds, rounds) = if args.quick { (0.06, 3) } else { (0.5, 9) };
    let (seconds, rounds) = (args.seconds.unwrap_or(seconds), args.rounds.unwrap_or(rounds));
    let milliseconds = ((seconds * 1000.0 / f64::from(rounds)) as u64).max(1);
    let mut figures = figures();
    figures.retain(|(id, ..)| args.only.is_empty() || args.only.iter().any(|only| id.starts_with(only)));
    if figures.is_empty() {
        return Err(Failure::new("there is no such figure; there are latency-SIZE and bandwidth-SIZE"));
    }
    let mut machine = Machine::look();
    let mut lines = lines(place, &libdir)?;
    let bar = progress(figures.len() as u64 * u64::from(rounds));
    let mut rows = Vec::new();
    for (id, pattern, size) in figures {
        bar.set_message(id.clone());
        let mut measured: Vec<Vec<Figure>> = lines.iter().map(|_| Vec::new()).collect();
        for round in 0..=rounds {
            for (line, figures) in lines.iter_mut().zip(&mut measured) {
                let time = if round == 0 { WARM_UP_MS } else { milliseconds };
                let figure = line.measure(pattern, size, time, args.pin);
                if let (Some(figure), 1..) = (figure, round) {
                    figures.push(figure);
                }
            }
            bar.inc(u64::from(round > 0));
        }
        rows.extend(row(id, pattern, size, &lines, &measured));
    }
    bar.finish_and_clear();
    machine.look_again();
    for line in &lines {
        if let Err(failure) = &line.ends {
            complain(&format_args!("{}: not measured: {failure}", line.title));
        }
    }
    let whole = lines.iter().all(|line| line.ends.is_ok());
    if let Some(file) = &args.plot {
        plot(&rows, &lines).write(file)?;
    }
    if args.json {
        let titles: BTreeMap<_, _> = lines.iter().map(|line| (&line.id, &line.title)).collect();
        let report = serde_json::json!({
            "rounds": rounds, "seconds": seconds, "machine": machine, "ways": titles, "figures": rows,
        });
        crate::say!("{report}");
    } else {
        for pattern in [Pattern::PingPong, Pattern::Stream] {
            if let Some(table) = table(pattern, &rows, &lines, args.targets) {
                crate::say!("{}\n{}\n", caption(pattern), table::text(table));
            }
        }
        crate::say!(
            "{rounds} rounds, {seconds} s for each figure and way. × is the ratio to the better one of the \
             two plain ways (passing\nthrough: to plain sockets), round by round. {}, {} cores; uwarp {}",
            machine.cpu,
            machine.cores,
            machine.uwarp
        );
    }
    Ok(whole)
}

fn figures() -> Vec<(String, Pattern, u32)> {
    let latencies = LATENCIES.map(|size| (format!("latency-{size}"), Pattern::PingPong, size));
    let streams = STREAMS.map(|size| (format!("bandwidth-{size}"), Pattern::Stream, size));
    latencies.into_iter().chain(streams).collect()
}

/// All ways, with their processes. A way whose processes fail is kept, with the reason.
fn lines(place: Place, libdir: &Path) -> Result<Vec<Line>> {
    let library = preload::find(libdir, sockets::LIBRARY).map_err(Failure)?;
    let mut lines = Vec::new();
    for way in &WAYS {
        let crcs: &[bool] = if way.iwarp { &[false, true] } else { &[false] };
        for &on in crcs {
            let word = if on { "on" } else { "off" };
            let (id, title) = match way.iwarp {
                true => (format!("{}-crc-{word}", way.id), format!("{}, CRC {word}", way.title)),
                false => (way.id.to_owned(), way.title.to_owned()),
            };
            let mut environment = vec![crc(on), ("UWARP_SOCKETS", OsString::new())];
            if let Some(rules) = way.rules {
                environment.push(("UWARP_SOCKETS", rules.into()));
                preload::add(&mut environment, &library);
            }
            let ends = Ends::with_sockets(place, &environment, way.carrier, Setting::Quiet);
            lines.push(Line { id, title, way, crc: on, ends });
        }
    }
    Ok(lines)
}

impl Line {
    /// One round. After an error the state of the processes is unknown: they are given up.
    fn measure(&mut self, pattern: Pattern, size: u32, milliseconds: u64, pin: BenchPin) -> Option<Figure> {
        let ends = self.ends.as_mut().ok()?;
        let spin = self.way.spin;
        let order = |role| Order::Sockets(Sockets::Traffic { pattern, size, spin, role, milliseconds });
        let patience = PATIENCE + Duration::from_millis(milliseconds);
        // The library's calls look for a while before they block, too.
        let pinned = match pin {
            BenchPin::Spinning => spin || self.way.iwarp,
            BenchPin::Always => true,
            BenchPin::Never => false,
        };
        let measured = ends
            .pin(pinned)
            .and_then(|()| ends.both(&order(Role::Passive), &order(Role::Active), patience))
            .and_then(|(_, active)| match active {
                Answer::Figure(figure) => Ok(figure),
                _ => Err(out_of_turn()),
            });
        match measured {
            Ok(figure) => Some(figure),
            Err(failure) => {
                self.ends = Err(failure);
                None
            }
        }
    }

    fn target(&self, pattern: Pattern) -> &'static str {
        match pattern {
            Pattern::PingPong => self.way.target.latency,
            Pattern::Stream => self.way.target.bandwidth[usize::from(self.crc)],
        }
    }
}

fn row(id: String, pattern: Pattern, size: u32, lines: &[Line], measured: &[Vec<Figure>]) -> Option<Row> {
    let of = |id: &str| {
        let at = lines.iter().position(|line| line.id == id)?;
        measured.get(at).filter(|figures| !figures.is_empty())
    };
    let value = |id: &str| of(id).and_then(|figures| Some(Side::new(figures)?.median));
    let better = |a: f64, b: f64| if pattern == Pattern::PingPong { a < b } else { a > b };
    let best = PLAINS.into_iter().reduce(|best, next| match (value(best), value(next)) {
        (Some(a), Some(b)) if better(b, a) => next,
        (None, _) => next,
        _ => best,
    })?;
    let ways = lines.iter().zip(measured).filter_map(|(line, figures)| {
        let base = if line.way.id == "through" { PLAIN } else { best };
        // A way that failed has fewer rounds; neighbours are still compared.
        let base = of(base).filter(|_| !PLAINS.contains(&line.way.id));
        let measured = Measured {
            side: Side::new(figures)?,
            ratio: base.and_then(|base| Ratio::new(figures, base)),
            p99_ratio: base.and_then(|base| Ratio::of_tails(figures, base)),
        };
        Some((line.id.clone(), measured))
    });
    let unit = match pattern {
        Pattern::PingPong => "µs, half a round trip",
        Pattern::Stream => "B/s",
    };
    Some(Row { id, pattern, size, unit, best, ways: ways.collect() })
}

fn caption(pattern: Pattern) -> &'static str {
    match pattern {
        Pattern::PingPong => "Ping-pong: half a round trip in µs, median / 99th percentile",
        Pattern::Stream => "One way: GB/s, until the receiver has said that it has everything",
    }
}

fn table(pattern: Pattern, rows: &[Row], lines: &[Line], targets: bool) -> Option<Table> {
    let rows: Vec<_> = rows.iter().filter(|row| row.pattern == pattern).collect();
    if rows.is_empty() {
        return None;
    }
    let sizes = rows.iter().map(|row| size_name(row.size));
    let target = targets.then(|| "target".to_owned());
    let header: Vec<_> = [String::new()].into_iter().chain(sizes).chain(target).collect();
    let mut table = table::new(&header);
    for line in lines {
        let cell = |row: &&Row| row.ways.get(&line.id).map_or("-".to_owned(), |way| way.cell(pattern));
        let cells = rows.iter().map(cell);
        let target = targets.then(|| line.target(pattern).to_owned());
        table.add_row([line.title.clone()].into_iter().chain(cells).chain(target));
    }
    table::align(&mut table, 1);
    Some(table)
}

impl Measured {
    fn cell(&self, pattern: Pattern) -> String {
        let ratio = self.ratio.map_or(String::new(), |ratio| format!(" ({:.2} ×)", ratio.median));
        match (pattern, self.side.p99) {
            (Pattern::PingPong, Some(p99)) => format!("{:.1} / {p99:.1}{ratio}", self.side.median),
            (Pattern::PingPong, None) => format!("{:.1}{ratio}", self.side.median),
            (Pattern::Stream, _) => format!("{:.2}{ratio}", self.side.median / 1e9),
        }
    }
}

/// As figures 5 and 6 of the paper on extended sockets: latency and bandwidth over the size of messages.
fn plot(rows: &[Row], lines: &[Line]) -> Page {
    let panel = |pattern, title: &str, y: &str, scale: f64| {
        let series = lines.iter().map(|line| {
            let points = rows.iter().filter(|row| row.pattern == pattern).filter_map(|row| {
                let way = row.ways.get(&line.id)?;
                Some((f64::from(row.size), way.side.median * scale))
            });
            Series { name: line.title.clone(), points: points.collect() }
        });
        Panel {
            title: title.to_owned(),
            x: "bytes in a message".to_owned(),
            y: y.to_owned(),
            scales: [Scale::Doubling, Scale::Decimal],
            series: series.collect(),
        }
    };
    Page {
        title: "Sockets".to_owned(),
        panels: vec![
            panel(Pattern::PingPong, "Ping-pong", "µs, half a round trip", 1.0),
            panel(Pattern::Stream, "One way", "GB/s", 1e-9),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(way: &'static Way) -> Line {
        Line {
            id: way.id.into(),
            title: way.title.into(),
            way,
            crc: false,
            ends: Err(Failure::new("not started")),
        }
    }

    #[test]
    fn the_better_plain_way_is_the_measure_and_passing_through_has_its_own() {
        let lines: Vec<_> = WAYS.iter().take(4).map(line).collect();
        let figures =
            |values: [f64; 2]| values.map(|value| Figure { value, p99: None, operations: 1 }).to_vec();
        // plain, through, plain-spins, iwarp-mode; the second round is slow.
        let measured =
            [figures([10.0, 20.0]), figures([11.0, 22.0]), figures([5.0, 10.0]), figures([6.0, 12.0])];
        let row = row("latency-8".into(), Pattern::PingPong, 8, &lines, &measured).unwrap();
        let ratio = |id: &str| row.ways[id].ratio.map(|ratio| (ratio.median * 100.0).round());
        assert_eq!(row.best, "plain-spins");
        assert_eq!([ratio("plain"), ratio("through"), ratio("iwarp-mode")], [None, Some(110.0), Some(120.0)]);
        let stream = super::row("bandwidth-64".into(), Pattern::Stream, 64, &lines, &measured).unwrap();
        assert_eq!(stream.best, "plain");
    }

    #[test]
    fn a_way_that_failed_is_left_out() {
        let lines: Vec<_> = WAYS.iter().take(2).map(line).collect();
        let one = vec![Figure { value: 10.0, p99: Some(12.0), operations: 1 }];
        let row = row("latency-8".into(), Pattern::PingPong, 8, &lines, &[one, Vec::new()]).unwrap();
        assert_eq!(row.ways.keys().collect::<Vec<_>>(), ["plain"]);
    }

    #[test]
    fn the_first_ways_are_the_plain_ones() {
        assert_eq!([WAYS[0].id, WAYS[2].id], PLAINS);
    }
}
