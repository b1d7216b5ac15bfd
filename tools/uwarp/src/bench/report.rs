//! The figures as tables, or as JSON.

use std::collections::BTreeMap;

use comfy_table::Table;
use serde::Serialize;

use super::ends::{Link, Place};
use super::machine::Machine;
use super::plan::{Goal, Group, Item};
use super::protocol::{Calls, Figure, Result};
use super::stats::{self, Ratio, Side};
use super::ways::Sweep;
use crate::table;

const GROUPS: [Group; 13] = [
    Group::Latency,
    Group::Transactions,
    Group::Bandwidth,
    Group::Messages,
    Group::Rate,
    Group::Datagrams,
    Group::DatagramBandwidth,
    Group::DatagramRate,
    Group::DatagramFacts,
    Group::Syscalls,
    Group::Connections,
    Group::Memory,
    Group::Crowded,
];

pub struct Report {
    pub machine: Machine,
    pub place: Place,
    pub seconds: f64,
    pub rounds: u32,
    pub measured: Vec<Measured>,
}

pub struct Measured {
    pub item: Item,
    pub outcome: Result<Outcome>,
}

pub enum Outcome {
    Sides(Sides),
    Calls(Calls),
    Fact(Fact),
}

/// Figures with nothing beside them in the same run, or not raw TCP.
#[derive(Serialize)]
pub struct Fact {
    #[serde(skip)]
    text: String,
    #[serde(flatten)]
    numbers: BTreeMap<&'static str, f64>,
}

impl Fact {
    /// As the table has it, and as the JSON has it.
    pub fn new(text: String, numbers: &[(&'static str, f64)]) -> Fact {
        Fact { text, numbers: numbers.iter().copied().collect() }
    }
}

/// Raw TCP and uwarp.
#[derive(Serialize)]
pub struct Sides {
    raw: Side,
    uwarp: Side,
    ratio: Ratio,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99_ratio: Option<Ratio>,
    /// If it matters, copying with the CRC alone, in bytes a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    copy_crc: Option<f64>,
    baseline: Sweep,
    /// Rounds that were dropped, because raw TCP was far below its best in them.
    slow_rounds: u32,
}

impl Outcome {
    pub fn of(
        raw: &[Figure],
        uwarp: &[Figure],
        copy_crc: &[Figure],
        baseline: Sweep,
        slow_rounds: u32,
    ) -> Option<Outcome> {
        let copies: Vec<_> = copy_crc.iter().map(|figure| figure.value).collect();
        Some(Outcome::Sides(Sides {
            raw: Side::new(raw)?,
            uwarp: Side::new(uwarp)?,
            ratio: Ratio::new(uwarp, raw)?,
            p99_ratio: Ratio::of_tails(uwarp, raw),
            copy_crc: stats::median(&copies),
            baseline,
            slow_rounds,
        }))
    }
}

/// One item in the JSON.
#[derive(Serialize)]
struct Line<'a> {
    id: &'a str,
    title: &'a str,
    group: Group,
    link: Link,
    unit: &'static str,
    target: &'a Goal,
    /// The target as a ratio, where it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    target_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target_p99_ratio: Option<f64>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    sides: Option<&'a Sides>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    calls: Option<&'a Calls>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fact: Option<&'a Fact>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

impl Report {
    /// Everything was measured.
    pub fn complete(&self) -> bool {
        self.measured.iter().all(|measured| measured.outcome.is_ok())
    }

    /// `targets`: with what is for developers.
    pub fn print(&self, json: bool, targets: bool) {
        match json {
            true => crate::say!("{}", self.json()),
            false => crate::say!("{}", self.text(targets)),
        }
    }

    fn json(&self) -> serde_json::Value {
        let lines: Vec<_> = self.measured.iter().map(Measured::line).collect();
        serde_json::json!({
            "command": command(),
            "place": self.place(),
            "seconds": self.seconds,
            "rounds": self.rounds,
            "machine": self.machine,
            "figures": lines,
        })
    }

    fn text(&self, targets: bool) -> String {
        let mut text = String::new();
        for group in GROUPS {
            let of_group: Vec<_> =
                self.measured.iter().filter(|measured| measured.item.group == group).collect();
            if !of_group.is_empty() {
                let rows = of_group.iter().map(|measured| measured.row(targets));
                let table = table::text(table(group, rows, targets));
                text.push_str(&format!("{}\n{table}\n\n", caption(group)));
            }
        }
        for measured in &self.measured {
            if let Err(failure) = &measured.outcome {
                text.push_str(&format!("{}: not measured: {failure}\n", measured.item.title));
            }
        }
        let machine = &self.machine;
        let load =
            machine.load.map(|load| load.map_or("?".to_owned(), |load| format!("{load:.2}"))).join(" to ");
        text.push_str(&format!(
            "{}; {}, {} s a figure and side; ratios are medians of neighbouring rounds (least to \
             most).\n\
             {}, {} cores, {}, clock {}, load {load}; uwarp {}{}\n{}$ {}",
            self.place(),
            if self.rounds == 1 { "1 round".to_owned() } else { format!("{} rounds", self.rounds) },
            self.seconds,
            machine.cpu,
            machine.cores,
            machine.kernel,
            machine.clock,
            machine.uwarp,
            machine.settings.iter().map(|setting| format!(", {setting}")).collect::<String>(),
            machine.busy().map(|sentence| format!("{sentence}\n")).unwrap_or_default(),
            command(),
        ));
        text
    }

    fn place(&self) -> String {
        match self.place {
            Place::Loopback => "Two processes over loopback".to_owned(),
            Place::Namespaces { mtu } => {
                format!("Two processes in two network namespaces over veth, MTU {mtu}")
            }
        }
    }
}

impl Measured {
    fn line(&self) -> Line<'_> {
        let (sides, calls, fact, failure) = match &self.outcome {
            Ok(Outcome::Sides(sides)) => (Some(sides), None, None, None),
            Ok(Outcome::Calls(calls)) => (None, Some(calls), None, None),
            Ok(Outcome::Fact(fact)) => (None, None, Some(fact), None),
            Err(failure) => (None, None, None, Some(failure.to_string())),
        };
        Line {
            id: &self.item.id,
            title: &self.item.title,
            group: self.item.group,
            link: self.item.link,
            unit: match self.item.group {
                Group::Latency | Group::Datagrams | Group::Crowded => "µs, half a round trip",
                Group::Transactions => "µs",
                Group::Bandwidth | Group::Messages | Group::DatagramBandwidth => "B/s",
                Group::Rate | Group::DatagramRate => "messages/s",
                Group::Syscalls => "system calls of the calling thread",
                Group::Connections => "connections/s",
                Group::Memory | Group::DatagramFacts => "see the names",
            },
            target: &self.item.goal,
            target_ratio: sides.and_then(|sides| self.item.goal.ratio(sides.raw.median, sides.copy_crc)),
            target_p99_ratio: self.item.group.tail(),
            sides,
            calls,
            fact,
            failure,
        }
    }

    fn row(&self, targets: bool) -> Vec<String> {
        let title = self.item.title.clone();
        let goal = self.item.goal;
        match &self.outcome {
            Err(_) => vec![title, "not measured".to_owned()],
            Ok(Outcome::Calls(calls)) => {
                let row = vec![title, per_operation(calls), calls.operations.to_string()];
                row.into_iter().chain(targets.then(|| goal.to_string())).collect()
            }
            Ok(Outcome::Fact(fact)) => {
                let link = self.item.link.name().to_owned();
                let link = (self.item.group == Group::Memory).then_some(link);
                let row = [Some(title), link, Some(fact.text.clone())];
                row.into_iter().flatten().chain(targets.then(|| goal.to_string())).collect()
            }
            Ok(Outcome::Sides(sides)) => {
                let (raw, uwarp) = (&sides.raw, &sides.uwarp);
                let group = self.item.group;
                let link = self.item.link.name().to_owned();
                let mut row =
                    vec![title, link, in_unit(group, raw), in_unit(group, uwarp), spread(sides.ratio)];
                if !targets {
                    return row;
                }
                row.push(match goal {
                    // The target's value in this run.
                    Goal::BesideCrc(_) => {
                        let wanted = goal.ratio(raw.median, sides.copy_crc);
                        wanted.map_or("-".to_owned(), |wanted| format!("at least {wanted:.2}"))
                    }
                    goal => goal.to_string(),
                });
                match group {
                    Group::Latency | Group::Transactions | Group::Datagrams | Group::Crowded => {
                        row.push(sides.p99_ratio.map_or("-".to_owned(), spread));
                        row.push(group.tail().map_or("-".to_owned(), |most| format!("at most {most:.2}")));
                    }
                    Group::Bandwidth => {
                        row.push(sides.copy_crc.map_or("-".to_owned(), |copy| format!("{:.1}", copy / 1e9)));
                    }
                    _ => {}
                }
                row.push(sides.baseline.chosen.to_string());
                row
            }
        }
    }
}

fn spread(Ratio { median, least, most }: Ratio) -> String {
    format!("{median:.2} ({least:.2} to {most:.2})")
}

/// For the caption and the header of the group.
fn in_unit(group: Group, side: &Side) -> String {
    match group {
        Group::Latency | Group::Transactions | Group::Datagrams | Group::Crowded => with_tail(side),
        Group::Bandwidth | Group::Messages | Group::DatagramBandwidth => {
            format!("{:.2}", side.median / 1e9)
        }
        Group::Connections => per_second(side),
        Group::Rate | Group::DatagramRate | Group::DatagramFacts | Group::Syscalls | Group::Memory => {
            format!("{:.2}", side.median / 1e6)
        }
    }
}

/// Such as "1 sendmsg", or "0.98 recvfrom, 0.03 epoll_pwait (empty)".
fn per_operation(calls: &Calls) -> String {
    let operations = calls.operations as f64;
    let mut words: Vec<_> = calls
        .calls
        .iter()
        .map(|call| {
            let empty = if call.empty { " (empty)" } else { "" };
            format!("{} {}{empty}", short(call.count as f64 / operations), call.name)
        })
        .collect();
    if words.is_empty() {
        words.push("none".to_owned());
    }
    if calls.spared > 0 {
        let share = 100.0 * calls.spared as f64 / operations;
        words.push(format!("{share:.0} % done by the library's thread"));
    }
    words.join(", ")
}

fn short(number: f64) -> String {
    let text = format!("{number:.2}");
    text.strip_suffix(".00").map_or(text.clone(), str::to_owned)
}

fn with_tail(side: &Side) -> String {
    side.p99.map_or(format!("{:.2}", side.median), |p99| format!("{:.2} ({p99:.1})", side.median))
}

fn per_second(side: &Side) -> String {
    side.p99.map_or(format!("{:.0}", side.median), |p99| format!("{:.0} ({:.2})", side.median, p99 / 1000.0))
}

fn caption(group: Group) -> &'static str {
    match group {
        Group::Latency => "Ping-pong: half a round trip, median (99th percentile)",
        Group::Crowded => "Where processors are few or slow: half a round trip, median (99th percentile)",
        Group::Transactions => {
            "64 B request, then the payload by RDMA, then a 64 B response; median (99th percentile)"
        }
        Group::Bandwidth => {
            "One way, until the target has said that it has everything. Best raw TCP: sizes of its send / \
             receive calls"
        }
        Group::Messages => {
            "One way at the settings of perftest: 128 work requests under way, each posted alone; raw TCP \
             sends each by itself"
        }
        Group::Rate => "Small messages one way, counted at the target; with a CRC over TCP",
        Group::Datagrams => "Datagrams, ping-pong: half a round trip, median (99th percentile)",
        Group::DatagramBandwidth => {
            "Reliable messages one way. Best raw UDP: datagrams as long as their packets, of its send / \
             receive calls"
        }
        Group::DatagramRate => {
            "Datagrams one way, as they arrive. Best raw UDP: datagrams of its send / receive calls"
        }
        Group::DatagramFacts => "Datagrams beside connections, and with many peers",
        Group::Syscalls => "System calls of the calling thread, one time through each path",
        Group::Connections => {
            "Connections a second, until they are established at both ends (99th percentile of one, ms)"
        }
        Group::Memory => {
            "10,000 idle connections between two processes; where there are two numbers, the \
             active end's first"
        }
    }
}

/// Without `targets`: what a user wants to know.
fn table(group: Group, rows: impl Iterator<Item = Vec<String>>, targets: bool) -> Table {
    const BEST: &str = "raw TCP at its best";
    let header: &[&str] = match group {
        Group::Latency | Group::Transactions | Group::Crowded => {
            &["", "link", "raw TCP µs", "uwarp µs", "ratio", "target", "of 99th percentiles", "target", BEST]
        }
        Group::Bandwidth => {
            &["", "link", "raw TCP GB/s", "uwarp GB/s", "ratio", "target", "copying GB/s", BEST]
        }
        Group::Messages => &["", "link", "raw TCP GB/s", "uwarp GB/s", "ratio", "target", BEST],
        Group::Rate => &["", "link", "raw TCP million/s", "uwarp million/s", "ratio", "target", BEST],
        Group::Datagrams => &[
            "",
            "link",
            "raw UDP µs",
            "uwarp µs",
            "ratio",
            "target",
            "of 99th percentiles",
            "target",
            "raw UDP at its best",
        ],
        Group::DatagramBandwidth => {
            &["", "link", "raw UDP GB/s", "uwarp GB/s", "ratio", "target", "raw UDP at its best"]
        }
        Group::DatagramRate => {
            &["", "link", "raw UDP million/s", "uwarp million/s", "ratio", "target", "raw UDP at its best"]
        }
        Group::DatagramFacts => &["", "measured", "target"],
        Group::Syscalls => &["", "calls", "times", "budget"],
        Group::Connections => &["", "link", "raw TCP", "uwarp", "ratio", "target", BEST],
        Group::Memory => &["", "link", "measured", "target"],
    };
    let users = header.iter().position(|title| ["target", "budget"].contains(title));
    let mut table = table::new(if targets { header } else { &header[..users.unwrap_or(header.len())] });
    for row in rows {
        table.add_row(row);
    }
    if !matches!(group, Group::DatagramFacts | Group::Syscalls | Group::Memory) {
        table::align(&mut table, 2);
    }
    table
}

/// The command as it was typed, so that the figures can be made again.
fn command() -> String {
    let words: Vec<_> = std::env::args().skip(1).collect();
    format!("uwarp {}", words.join(" "))
}
