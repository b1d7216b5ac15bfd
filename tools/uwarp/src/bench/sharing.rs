//! `uwarp bench sharing`: what streams of reliable datagrams get of a slow path, alone, beside themselves and
//! beside TCP; docs/rd.md section 7.1 has the same by simulation.
//!
//! The path is made here ([`uwarp_bottleneck`]), between two network namespaces. All ends sleep while they
//! wait: who spins would take the processor from what carries the packets.

use std::time::Duration;

use comfy_table::Table;
use serde::Serialize;
use uwarp_bottleneck::{Bottleneck, Counts, Shape};

use super::ends::{Ends, Link};
use super::machine::Machine;
use super::protocol::{Failure, Flow, Job, Over, Result, Target, Verb, Wait, Work};
use super::stats::median;
use super::ways::{Buffers, Waiting, Way};
use super::{crc, progress};
use crate::cli::{BenchArgs, BenchPin};
use crate::{libdir, table};

/// Bytes in a second, 100 Mbit.
const RATE: u64 = 12_500_000;
/// One way.
const DELAY: Duration = Duration::from_millis(5);
/// Bytes of a message.
const MESSAGE: u32 = 64 << 10;
/// Messages that a stream has posted: more than path and queue hold.
const POSTED: u32 = 24;
/// The second stream begins so much later.
const LATER: Duration = Duration::from_millis(200);
const SEED: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Stream {
    /// Reliable datagrams.
    Rd,
    /// The same, the next message when the last has been acknowledged.
    #[serde(rename = "rd, one message at a time")]
    RdOne,
    /// The system's TCP with CUBIC (RFC 9438).
    Cubic,
    /// The same with BBR.
    Bbr,
}
use Stream::{Bbr, Cubic, Rd, RdOne};

impl Stream {
    /// For `--only`.
    fn id(self) -> &'static str {
        match self {
            Rd => "rd",
            RdOne => "one",
            Cubic => "cubic",
            Bbr => "bbr",
        }
    }

    fn is_tcp(self) -> bool {
        matches!(self, Cubic | Bbr)
    }

    fn name(self) -> &'static str {
        match self {
            Rd => "RD",
            RdOne => "RD, one message at a time",
            Cubic => "CUBIC",
            Bbr => "BBR",
        }
    }

    fn job(self, milliseconds: u64) -> Job {
        let over = match self {
            Rd | RdOne => Over::Uwarp,
            Cubic | Bbr => Over::Raw(Way::Calls {
                send: MESSAGE,
                receive: 1 << 20,
                wait: Waiting::Block,
                buffers: Buffers::System,
            }),
        };
        let work = match self {
            Rd => Work::ReliableStream { size: MESSAGE, window: POSTED, wait: Wait::Block },
            RdOne => Work::ReliableStream { size: MESSAGE, window: 1, wait: Wait::Block },
            Cubic | Bbr => {
                let flow = Flow { verb: Verb::Send, size: MESSAGE, window: 1, signal: 1 };
                Work::Stream { flow, target: Target::Blocks }
            }
        };
        Job { over, work, milliseconds }
    }
}

/// A path and the streams on it.
struct Item {
    id: String,
    path: String,
    shape: Shape,
    streams: &'static [Stream],
}

/// One run.
#[derive(Clone, Debug, Serialize)]
struct Run {
    /// Bytes a second of each stream.
    goodput: Vec<f64>,
    /// Packets that found the queue full.
    dropped: u64,
    /// Lost at random.
    lost: u64,
    /// Overtaken by others.
    late: u64,
}

#[derive(Serialize)]
struct Row {
    id: String,
    path: String,
    streams: &'static [Stream],
    rate: u64,
    queue: u64,
    round_trip_ms: f64,
    /// All streams, as a share of the rate: median, least, most.
    used: [f64; 3],
    /// What the first of two has of both.
    #[serde(skip_serializing_if = "Option::is_none")]
    share: Option<[f64; 3]>,
    rounds: Vec<Run>,
}

/// Bytes that the path holds without a queue.
fn path_bytes() -> u64 {
    (RATE as f64 * 2.0 * DELAY.as_secs_f64()) as u64
}

fn items() -> Vec<Item> {
    let usual = Shape { rate: Some(RATE), queue: path_bytes(), delay: DELAY, ..Shape::default() };
    let mut items = Vec::new();
    let mut add = |id: &str, path: &str, shape, streams: &'static [Stream]| {
        let names: Vec<_> = streams.iter().map(|stream| stream.id()).collect();
        let id = format!("{id}-{}", names.join("-"));
        items.push(Item { id, path: path.to_owned(), shape, streams });
    };
    const ALONE: [&[Stream]; 3] = [&[Cubic], &[Bbr], &[Rd]];
    const PAIRS: [&[Stream]; 5] = [&[Rd, Rd], &[Rd, Cubic], &[Cubic, Cubic], &[Rd, Bbr], &[Cubic, Bbr]];
    for (id, name, quarters) in [
        ("short", "queue 0.25 x the path", 1),
        ("usual", "queue as the path", 4),
        ("long", "queue 4 x the path", 16),
    ] {
        let shape = Shape { queue: path_bytes() * quarters / 4, ..usual };
        ALONE.iter().chain(&PAIRS).for_each(|streams| add(id, name, shape, streams));
    }
    add("usual", "queue as the path", usual, &[RdOne]);
    let late = Shape { lateness: Duration::from_millis(3), ..usual };
    for (id, name, shape) in [
        ("loss-1", "1 % lost", Shape { loss: 10, ..usual }),
        ("loss-5", "5 % lost", Shape { loss: 50, ..usual }),
        ("late-1", "1 % late by 3 ms", Shape { late: 10, ..late }),
        ("late-10", "10 % late by 3 ms", Shape { late: 100, ..late }),
        ("twice-1", "1 % come twice", Shape { twice: 10, ..usual }),
    ] {
        ALONE.iter().for_each(|streams| add(id, name, shape, streams));
    }
    // In one order of the table: all of a path together.
    items.sort_by_key(|item| item.path.clone());
    items
}

pub fn run(args: &BenchArgs) -> Result<bool> {
    if args.netns || args.pin != BenchPin::Spinning {
        return Err(Failure::new(
            "--netns, --mtu and --pin are for other figures; sharing makes its own path",
        ));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::new(
            "sharing creates network namespaces and needs root, at least in a user namespace: \
             unshare --map-root-user uwarp bench sharing",
        ));
    }
    libdir::find().map_err(|reason| Failure(reason.to_string()))?;
    let (seconds, rounds) = if args.quick { (1.0, 1) } else { (24.0, 3) };
    let (seconds, rounds) = (args.seconds.unwrap_or(seconds), args.rounds.unwrap_or(rounds));
    let mut items = items();
    let known: Vec<_> = items.iter().map(|item| item.id.clone()).collect();
    // The system may have no BBR.
    let controls = congestion_controls()?;
    let has = |stream: &Stream| !stream.is_tcp() || controls.iter().any(|name| name == stream.id());
    let mut left_out: Vec<_> = items.iter().flat_map(|item| item.streams).filter(|one| !has(one)).collect();
    left_out.dedup();
    items.retain(|item| item.streams.iter().all(has));
    items.retain(|item| args.only.is_empty() || args.only.iter().any(|only| item.id.starts_with(only)));
    if items.is_empty() {
        return Err(Failure(format!("there is no such figure; there are: {}", known.join(", "))));
    }
    let mut machine = Machine::look();
    let bar = progress(items.len() as u64 * u64::from(rounds));
    let milliseconds = ((seconds * 1000.0 / f64::from(rounds)) as u64).max(1);
    let mut rows: Vec<(Item, Vec<Run>)> = items.into_iter().map(|item| (item, Vec::new())).collect();
    for round in 0..rounds {
        for (item, runs) in &mut rows {
            bar.set_message(format!("{}: {}", item.path, names(item.streams)));
            runs.push(measure(item, SEED + u64::from(round), milliseconds)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    machine.look_again();
    let rows: Vec<Row> = rows.into_iter().map(|(item, runs)| row(item, runs)).collect();
    if args.json {
        crate::say!(
            "{}",
            serde_json::json!({
                "seconds": seconds, "rounds": rounds, "message": MESSAGE, "machine": machine,
                "congestion_controls": controls, "figures": rows,
            })
        );
        return Ok(true);
    }
    if let Some(busy) = machine.busy() {
        crate::say!("{busy}\n");
    }
    crate::say!(
        "{} Mbit/s, round trip {} ms, MTU {}; {rounds} rounds of {:.1} s\n",
        RATE * 8 / 1_000_000,
        2 * DELAY.as_millis(),
        super::MTU,
        milliseconds as f64 / 1000.0
    );
    crate::say!("{}", table::text(table(&rows)));
    if let Some(name) = left_out.first() {
        crate::say!("The system has no {}, so what is measured beside it is left out.", name.name());
    }
    Ok(true)
}

/// Those that the system has. Its modules may not be loaded; then their names are not there.
fn congestion_controls() -> Result<Vec<String>> {
    let names = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_available_congestion_control");
    let names = names.map_err(Failure::of("the system's congestion controls"))?;
    Ok(names.split_whitespace().map(str::to_owned).collect())
}

fn names(streams: &[Stream]) -> String {
    streams.iter().map(|stream| stream.name()).collect::<Vec<_>>().join(" with ")
}

/// On a new path with new processes: what they learn of one would tell in the next run.
fn measure(item: &Item, seed: u64, milliseconds: u64) -> Result<Run> {
    let environment = [crc(true), Link::Tcp.setting()];
    let (first, path) = Ends::along([item.shape; 2], seed, &environment)?;
    let mut ends = vec![first];
    for _ in 1..item.streams.len() {
        ends.push(ends[0].beside(&environment)?);
    }
    for (ends, stream) in ends.iter_mut().zip(item.streams).filter(|(_, stream)| stream.is_tcp()) {
        ends.set_congestion(stream.id())?;
    }
    let before = dropped(&path);
    let goodput = std::thread::scope(|scope| {
        let began: Vec<_> = (0_u32..)
            .zip(ends.iter_mut().zip(item.streams))
            .map(|(number, (ends, stream))| {
                scope.spawn(move || {
                    let later = LATER * number;
                    std::thread::sleep(later);
                    let rest = milliseconds.saturating_sub(later.as_millis() as u64).max(1);
                    ends.measure(stream.job(rest)).map(|figure| figure.value)
                })
            })
            .collect();
        let panicked = || Err(Failure::new("a stream's thread has panicked"));
        began
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| panicked()))
            .collect::<Result<Vec<_>>>()
    })?;
    let Counts { lost, full, late, .. } = dropped(&path);
    Ok(Run { goodput, dropped: full - before.full, lost: lost - before.lost, late: late - before.late })
}

/// In the direction of the streams.
fn dropped(path: &Bottleneck) -> Counts {
    let [there, _] = path.counts();
    there
}

fn row(item: Item, rounds: Vec<Run>) -> Row {
    let Item { id, path, shape, streams } = item;
    let rate = shape.rate.unwrap_or(RATE);
    let of = |value: &dyn Fn(&Run) -> f64| {
        let values: Vec<f64> = rounds.iter().map(value).collect();
        let bounds = values.iter().fold((f64::MAX, f64::MIN), |(a, b), v| (a.min(*v), b.max(*v)));
        [median(&values).unwrap_or_default(), bounds.0, bounds.1]
    };
    let all = |run: &Run| run.goodput.iter().sum::<f64>();
    let used = of(&|run| all(run) / rate as f64);
    let share = (streams.len() > 1).then(|| of(&|run| run.goodput[0] / all(run)));
    let round_trip_ms = 2.0 * shape.delay.as_secs_f64() * 1000.0;
    Row { id, path, streams, rate, queue: shape.queue, round_trip_ms, used, share, rounds }
}

fn table(rows: &[Row]) -> Table {
    let header = ["path", "streams", "of the link", "the first's share", "dropped", "lost", "late"];
    let mut table = table::new(&header);
    let range = |[middle, least, most]: [f64; 3]| format!("{middle:.2} ({least:.2} to {most:.2})");
    for row in rows {
        let count = |of: fn(&Run) -> u64| {
            let counts: Vec<f64> = row.rounds.iter().map(|run| of(run) as f64).collect();
            format!("{:.0}", median(&counts).unwrap_or_default())
        };
        table.add_row([
            row.path.clone(),
            names(row.streams),
            range(row.used),
            row.share.map_or("-".to_owned(), range),
            count(|run| run.dropped),
            count(|run| run.lost),
            count(|run| run.late),
        ]);
    }
    table::align(&mut table, 2);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_names_of_their_own() {
        let mut ids: Vec<_> = items().into_iter().map(|item| item.id).collect();
        assert!(ids.contains(&"short-rd-cubic".to_owned()) && ids.contains(&"late-10-rd".to_owned()));
        let all = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), all);
    }

    #[test]
    fn shares_are_of_both() {
        let run = |goodput: &[f64]| Run { goodput: goodput.to_vec(), dropped: 1, lost: 0, late: 0 };
        let item = || items().into_iter().find(|item| item.id == "usual-rd-cubic").unwrap();
        let rate = RATE as f64;
        let rounds = vec![run(&[0.5 * rate, 0.25 * rate]), run(&[0.25 * rate, 0.75 * rate])];
        let row = row(item(), rounds);
        let [_, least, most] = row.share.unwrap();
        assert_eq!((row.used[1], row.used[2], least), (0.75, 1.0, 0.25));
        assert!((most - 2.0 / 3.0).abs() < 1e-9);
    }
}
