//! `uwarp bench memory --peers`: what peers cost a process, and the kernel, by the way in which it talks to
//! them.
//!
//! A peer is a queue pair of another process, as each rank of a job is for the others: a connection is made
//! to it, or a queue pair of datagrams is told its address. Messages have gone both ways before it is
//! measured.

use std::thread::sleep;

use comfy_table::Table;
use serde::Serialize;

use super::ends::{Ends, Link, Place, Setting, out_of_turn};
use super::machine::Machine;
use super::many::{AT_ONCE, LAST_LOOK, PATIENCE, Pair, SETTLE};
use super::plot::{Page, Panel, Scale, Series};
use super::progress;
use super::protocol::{Answer, Failure, Order, Over, Result, Role, Usage};
use crate::cli::BenchArgs;
use crate::{libdir, table};

/// A way to talk to peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Connections(Link),
    Datagrams { reliable: bool },
}

const WAYS: [(Way, &str); 5] = [
    (Way::Connections(Link::Tcp), "RC over TCP"),
    (Way::Connections(Link::Memory), "RC over memory"),
    (Way::Connections(Link::Rd), "RC over rd"),
    (Way::Datagrams { reliable: false }, "UD"),
    (Way::Datagrams { reliable: true }, "RD"),
];

/// Of one number of peers, beyond what there was before the first one.
#[derive(Clone, Copy, Debug, Serialize)]
struct Point {
    peers: u32,
    /// What malloc has given out at the end that begins, and at the other.
    active_heap_bytes: f64,
    passive_heap_bytes: f64,
    /// The kernel's, for both ends: slabs, buffers of TCP, and what processes share.
    kernel_bytes: f64,
}

#[derive(Serialize)]
struct Line {
    way: &'static str,
    points: Vec<Point>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

pub fn run(args: &BenchArgs, place: Place) -> Result<bool> {
    libdir::find().map_err(|reason| Failure(reason.to_string()))?;
    if !args.only.is_empty() || args.seconds.is_some() || args.rounds.is_some() {
        return Err(Failure::new("--peers measures no time: it goes without --only, --seconds and --rounds"));
    }
    let counts = counts(args.peers.unwrap_or([1, 1]));
    let ways = WAYS.into_iter().filter(|(way, _)| {
        // Between namespaces, there is no memory to share.
        place == Place::Loopback || *way != Way::Connections(Link::Memory)
    });
    let ways: Vec<_> = ways.collect();
    let mut machine = Machine::look();
    let bar = progress((ways.len() * counts.len()) as u64);
    let lines: Vec<_> = ways
        .into_iter()
        .map(|(way, name)| {
            let mut points = Vec::new();
            let result = measure(way, place, &counts, |point| {
                bar.set_message(format!("{name}: {} peers", point.peers));
                bar.inc(1);
                points.push(point);
            });
            Line { way: name, points, failure: result.err().map(|failure| failure.to_string()) }
        })
        .collect();
    bar.finish_and_clear();
    machine.look_again();
    if let Some(file) = &args.plot {
        page(&lines).write(file)?;
    }
    let complete = lines.iter().all(|line| line.failure.is_none());
    if args.json {
        crate::say!("{}", serde_json::json!({ "machine": machine, "lines": lines }));
        return Ok(complete);
    }
    if let Some(busy) = machine.busy() {
        crate::say!("{busy}\n");
    }
    crate::say!(
        "KiB for so many peers: of heap at the active end; in brackets of the kernel, for both ends\n"
    );
    crate::say!("{}\n", table::text(rows(&lines, &counts)));
    for Line { way, failure, .. } in &lines {
        if let Some(failure) = failure {
            crate::say!("{way}: not measured to the end: {failure}");
        }
    }
    crate::say!("The kernel's is that of the whole machine, and says little where other programs run.");
    Ok(complete)
}

/// Powers of two, and both ends.
fn counts([least, most]: [u32; 2]) -> Vec<u32> {
    let powers = (0..u32::BITS).map(|n| 1 << n).filter(|n| (least..=most).contains(n));
    let mut counts: Vec<u32> = powers.chain([least, most]).collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

fn measure(way: Way, place: Place, counts: &[u32], mut found: impl FnMut(Point)) -> Result<()> {
    let most = counts.last().copied().unwrap_or_default();
    let mut usage: Box<dyn FnMut(u32) -> Result<[Usage; 2]>> = match way {
        Way::Connections(link) => Box::new(connections(link, place, most)?),
        Way::Datagrams { reliable } => Box::new(datagrams(reliable, place, most)?),
    };
    let before = usage(0)?;
    for &peers in counts {
        let after = usage(peers)?;
        let more = |end: usize, of: fn(&Usage) -> u64| of(&after[end]) as f64 - of(&before[end]) as f64;
        found(Point {
            peers,
            active_heap_bytes: more(0, |usage| usage.heap),
            passive_heap_bytes: more(1, |usage| usage.heap),
            kernel_bytes: more(0, |usage| usage.kernel),
        });
    }
    Ok(())
}

/// What both ends use, the active one first, when they have this number of connections.
fn connections(link: Link, place: Place, most: u32) -> Result<impl FnMut(u32) -> Result<[Usage; 2]>> {
    let mut pair = Pair::new(place, link, most)?;
    let mut have = 0;
    Ok(move |count| {
        if count > have {
            pair.open(Over::Uwarp, count - have, AT_ONCE)?;
            have = count;
            pair.traffic()?;
        }
        // Rings that are empty then give their pages back.
        sleep(if link == Link::Memory { LAST_LOOK } else { SETTLE });
        pair.usage()
    })
}

/// The same, when one queue pair of the active end has talked to this number of the other's.
fn datagrams(reliable: bool, place: Place, most: u32) -> Result<impl FnMut(u32) -> Result<[Usage; 2]>> {
    let mut ends = Ends::start(place, &[Link::Tcp.setting()], Setting::Quiet)?;
    Ok(move |count| {
        let order = |role| Order::Peers { count, role, most, reliable };
        match ends.both(&order(Role::Passive), &order(Role::Active), PATIENCE)? {
            (Answer::Usage(passive), Answer::Usage(active)) => Ok([active, passive]),
            _ => Err(out_of_turn()),
        }
    })
}

fn kib(bytes: f64) -> f64 {
    bytes / 1024.0
}

fn rows(lines: &[Line], counts: &[u32]) -> Table {
    let header: Vec<_> = ["peers"].into_iter().chain(lines.iter().map(|line| line.way)).collect();
    let mut table = table::new(&header);
    for &count in counts {
        let cells = lines.iter().map(|line| {
            let point = line.points.iter().find(|point| point.peers == count);
            point.map_or("-".to_owned(), |point| {
                format!("{:.1} ({:.0})", kib(point.active_heap_bytes), kib(point.kernel_bytes).max(0.0))
            })
        });
        table.add_row([count.to_string()].into_iter().chain(cells));
    }
    table::align(&mut table, 0);
    table
}

fn page(lines: &[Line]) -> Page {
    let panel = |title: &str, of: fn(&Point) -> f64| Panel {
        title: title.to_owned(),
        x: "peers".to_owned(),
        y: "KiB".to_owned(),
        scales: [Scale::Doubling, Scale::Decimal],
        series: lines
            .iter()
            .map(|line| Series {
                name: line.way.to_owned(),
                // There is no place for nothing on a logarithmic axis.
                points: line
                    .points
                    .iter()
                    .map(|point| (f64::from(point.peers), kib(of(point))))
                    .filter(|(_, kib)| *kib > 0.0)
                    .collect(),
            })
            .collect(),
    };
    Page {
        title: "Memory for peers".to_owned(),
        panels: vec![
            panel("Heap of the active end", |point| point.active_heap_bytes),
            panel("Heap of the active end and the kernel's memory for both", |point| {
                point.active_heap_bytes + point.kernel_bytes.max(0.0)
            }),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_powers_of_two_between_the_ends() {
        assert_eq!(counts([1, 8]), [1, 2, 4, 8]);
        assert_eq!(counts([3, 20]), [3, 4, 8, 16, 20]);
        assert_eq!(counts([5, 5]), [5]);
    }

    #[test]
    fn what_was_not_measured_has_no_figure() {
        let point =
            Point { peers: 2, active_heap_bytes: 2048.0, passive_heap_bytes: 0.0, kernel_bytes: -5.0 };
        let line = |way, points| Line { way, points, failure: None };
        let lines = [line("UD", vec![point]), line("RD", vec![])];
        let text = table::text(rows(&lines, &[2]));
        assert_eq!(
            text.lines().last().unwrap().split_whitespace().collect::<Vec<_>>(),
            ["2", "2.0", "(0)", "-"]
        );
        assert_eq!(page(&lines).panels[0].series[1].points, []);
    }
}
