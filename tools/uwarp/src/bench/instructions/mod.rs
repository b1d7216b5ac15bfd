//! `uwarp bench instructions`: what a message costs the library, in instructions, counted by callgrind in all
//! threads of both ends. Other than times, these say nearly the same on a busy machine.
//!
//! Most figures count step by step what the calls of the program do ([`turns`]); the middle one of several
//! counts is shown. Where the program blocks, all that both processes do is counted, waiting included.

#[allow(unsafe_code)]
pub mod callgrind;
mod profile;
pub mod turns;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::ends::{Ends, Link, PATIENCE, Place, Setting, out_of_turn};
use super::machine::Machine;
use super::progress;
use super::protocol::{
    Answer, Carrier, Counted, Failure, Job, Many, Order, Over, Pattern, Result, Role, Sockets, Wait, Work,
};
use crate::cli::BenchArgs;
use crate::{complain, libdir, preload, sockets, table};
use profile::Counts;

/// How a figure comes about.
#[derive(Clone, Copy)]
enum How {
    /// Two ends with one connection.
    Steps(Counted),
    /// The same with 64 connections; with a shared receive queue or not.
    Crowd { shared_receives: bool },
    /// A ping-pong whose ends block in `ibv_get_cq_event`.
    Events,
    /// A ping-pong of a program of sockets. With these rules for the preloaded library; without, it is not
    /// there.
    Sockets(Carrier, Option<&'static str>),
}

struct Item {
    id: &'static str,
    title: &'static str,
    how: How,
    /// Messages in a step.
    each: u64,
}

const fn item(id: &'static str, title: &'static str, each: u64, how: How) -> Item {
    Item { id, title, how, each }
}

const ITEMS: [Item; 15] = [
    item("empty-poll", "ibv_poll_cq that finds nothing", 1, How::Steps(Counted::EmptyPolls)),
    item("send-64", "64 B Send, its completion, its receipt", 2, How::Steps(Counted::Message { size: 64 })),
    item("send-4k", "4 KiB Send, likewise", 2, How::Steps(Counted::Message { size: 4096 })),
    item("write-list", "64 B Write in a list of 64", turns::LIST as u64, How::Steps(Counted::Writes)),
    item("datagram-64", "64 B datagram (UD), out and in", 2, How::Steps(Counted::Datagram)),
    item("reliable-64", "64 B reliable datagram, out and in", 2, How::Steps(Counted::Reliable)),
    item("send-64-of-64", "64 B Send on one of 64 queue pairs", 2, How::Crowd { shared_receives: false }),
    item("send-64-srq", "the same with a shared receive queue", 2, How::Crowd { shared_receives: true }),
    item("send-64-events", "64 B Send, both block in ibv_get_cq_event", 2, How::Events),
    item("rsocket-64", "64 B by rsend and rrecv", 2, How::Sockets(Carrier::Rsockets, None)),
    item(
        "sockets-64",
        "64 B by send and recv, by rule as rsockets",
        2,
        How::Sockets(Carrier::Libc, Some("rsockets:all")),
    ),
    item(
        "upgraded-64",
        "64 B by send and recv, upgraded in place",
        2,
        How::Sockets(Carrier::Libc, Some("upgrade:all")),
    ),
    item("iwarp-mode-64", "64 B in IWARP_MODE, send and recv", 2, How::Sockets(Carrier::IwarpMode, None)),
    item("descriptors-64", "64 B in IWARP_MODE, descriptors", 2, How::Sockets(Carrier::Descriptors, None)),
    item("plain-64", "64 B by send and recv, passing through", 2, How::Sockets(Carrier::Libc, Some(""))),
];

/// Connections of a crowd.
const CROWD: u32 = 64;
/// Steps that are counted, and with `--quick`.
const STEPS: [u32; 2] = [256, 32];
/// For how long figures are counted whose ends block, and with `--quick`.
const TIME_MS: [u64; 2] = [1000, 100];
/// Everything takes longer under callgrind.
const SLOW: u32 = 8;

impl How {
    /// Over which links it is counted, the ends being there.
    fn links(self, place: Place) -> &'static [Link] {
        match self {
            Self::Steps(Counted::Datagram) if matches!(place, Place::Loopback) => &[Link::Udp, Link::Memory],
            Self::Steps(Counted::Datagram | Counted::Reliable) => &[Link::Udp],
            // IWARP_MODE and connections that began as TCP know no other link.
            Self::Sockets(_, Some("" | "upgrade:all"))
            | Self::Sockets(Carrier::IwarpMode | Carrier::Descriptors, _) => &[Link::Tcp],
            _ if matches!(place, Place::Loopback) => &[Link::Tcp, Link::Memory],
            _ => &[Link::Tcp],
        }
    }
}

/// One figure: for each message, at the active and the passive end together unless it says which.
#[derive(Serialize)]
struct Row {
    id: &'static str,
    title: &'static str,
    link: Link,
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<Failure>,
    messages: u64,
    /// Of all messages, at the active end and at the passive one.
    ends: [Counts; 2],
}

impl Row {
    fn of_message(&self, value: impl Fn(&Counts) -> u64) -> f64 {
        self.ends.iter().map(value).sum::<u64>() as f64 / self.messages.max(1) as f64
    }
}

/// Whether all was counted.
pub fn run(args: &BenchArgs, place: Place) -> Result<bool> {
    if !cfg!(target_arch = "x86_64") {
        return Err(Failure::new("instructions can be counted on x86-64 only"));
    }
    let libdir = libdir::find().map_err(|reason| Failure(reason.to_string()))?;
    let items: Vec<_> = ITEMS
        .iter()
        .filter(|item| args.only.is_empty() || args.only.iter().any(|only| item.id.starts_with(only)))
        .collect();
    if items.is_empty() {
        let known: Vec<_> = ITEMS.iter().map(|item| item.id).collect();
        return Err(Failure(format!("there is no such figure; there are: {}", known.join(", "))));
    }
    let mut machine = Machine::look();
    let counts: Vec<_> = items
        .into_iter()
        .flat_map(|item| item.how.links(place).iter().map(move |link| (item, *link)))
        .collect();
    let bar = progress(counts.len() as u64);
    let mut rows = Vec::new();
    for (item, link) in counts {
        bar.set_message(item.title);
        let row =
            |messages, ends, failure| Row { id: item.id, title: item.title, link, failure, messages, ends };
        rows.push(match count(item, link, place, &libdir, args.quick) {
            Ok((messages, ends)) => row(messages, ends, None),
            Err(failure) => row(0, <[Counts; 2]>::default(), Some(failure)),
        });
        bar.inc(1);
    }
    bar.finish_and_clear();
    machine.look_again();
    if args.json {
        crate::say!("{}", serde_json::json!({ "machine": machine, "figures": rows }));
    } else {
        print(&rows, &machine);
    }
    Ok(rows.iter().all(|row| row.failure.is_none()))
}

fn print(rows: &[Row], machine: &Machine) {
    let header = ["of one message", "link", "instructions", "active end", "passive end", "locked", "copies"];
    let mut table = table::new(&header);
    for row in rows {
        if let Some(failure) = &row.failure {
            complain(&format_args!("{} over {}: not counted: {failure}", row.title, row.link.name()));
            continue;
        }
        let at = |end: usize| {
            let counts = row.ends.get(end).copied().unwrap_or_default();
            format!("{:.0}", counts.instructions as f64 / row.messages.max(1) as f64)
        };
        table.add_row([
            row.title.to_owned(),
            row.link.name().to_owned(),
            format!("{:.0}", row.of_message(|counts| counts.instructions)),
            at(0),
            at(1),
            format!("{:.1}", row.of_message(|counts| counts.locked)),
            format!("{:.1}", row.of_message(|counts| counts.copies)),
        ]);
    }
    table::align(&mut table, 2);
    crate::say!("{}\n", table::text(table));
    crate::say!(
        "All threads, without the kernel. Copies are those from and to registered memory. uwarp {}",
        machine.uwarp
    );
}

/// The number of messages, and what each end counted for all of them.
fn count(item: &Item, link: Link, place: Place, libdir: &Path, quick: bool) -> Result<(u64, [Counts; 2])> {
    let directory = Directory::new()?;
    let mut options = OsString::from("--collect-bus=yes --callgrind-out-file=");
    options.push(&directory.0);
    options.push("/%p");
    let mut environment = vec![("VALGRIND_OPTS", options), link.setting()];
    let steps = STEPS[usize::from(quick)];
    let milliseconds = TIME_MS[usize::from(quick)];
    let (messages, ends) = match item.how {
        How::Steps(what) => {
            let mut ends = Ends::start(place, &environment, Setting::Counted)?;
            in_steps(&mut ends, what, steps)?;
            (u64::from(steps) * item.each, ends)
        }
        How::Crowd { shared_receives } => {
            let mut ends = Ends::start(place, &environment, Setting::Counted)?;
            connect_crowd(&mut ends, shared_receives)?;
            in_steps(&mut ends, Counted::Crowd, steps)?;
            (u64::from(steps) * item.each, ends)
        }
        How::Events => {
            let mut ends = Ends::start(place, &environment, Setting::Counted)?;
            let work = Work::PingPong { wait: Wait::Block, size: 64 };
            let order =
                |role, milliseconds| Order::Run { job: Job { over: Over::Uwarp, work, milliseconds }, role };
            (in_all(&mut ends, order, milliseconds)? * item.each, ends)
        }
        How::Sockets(carrier, rules) => {
            environment.push(("UWARP_SOCKETS", rules.unwrap_or("").into()));
            if rules.is_some() {
                let library = preload::find(libdir, sockets::LIBRARY).map_err(Failure)?;
                preload::add(&mut environment, &library);
            }
            let mut ends = Ends::with_sockets(place, &environment, carrier, Setting::Counted)?;
            let order = |role, milliseconds| {
                let pattern = Pattern::PingPong;
                Order::Sockets(Sockets::Traffic { pattern, size: 64, spin: false, role, milliseconds })
            };
            (in_all(&mut ends, order, milliseconds)? * item.each, ends)
        }
    };
    let [active, passive] = ends.processes();
    let passive = profile::take(&directory.0, passive)?;
    let mut samples: Vec<_> = profile::take(&directory.0, active)?.into_iter().zip(passive).collect();
    samples.sort_by_key(|(active, passive)| active.instructions + passive.instructions);
    let middle = samples.get(samples.len() / 2);
    let (active, passive) = middle.ok_or_else(|| Failure::new("callgrind has counted nothing"))?;
    Ok((messages, [*active, *passive]))
}

fn in_steps(ends: &mut Ends, what: Counted, messages: u32) -> Result<()> {
    let order = |role| Order::Count { what, role, messages };
    ends.both(&order(Role::Passive), &order(Role::Active), PATIENCE * SLOW).map(drop)
}

/// Counts all that the ends do for about this time; returns how many round trips there were.
fn in_all(ends: &mut Ends, order: impl Fn(Role, u64) -> Order, milliseconds: u64) -> Result<u64> {
    // As a warm-up.
    round_trips(ends, &order, milliseconds / 4 + 1)?;
    let [begin, end] = [true, false].map(|begin| Order::CountAll { begin });
    ends.both(&begin, &begin, PATIENCE)?;
    let operations = round_trips(ends, &order, milliseconds)?;
    ends.both(&end, &end, PATIENCE)?;
    Ok(operations)
}

fn round_trips(ends: &mut Ends, order: impl Fn(Role, u64) -> Order, milliseconds: u64) -> Result<u64> {
    let patience = PATIENCE * SLOW + Duration::from_millis(milliseconds);
    match ends.both(&order(Role::Passive, milliseconds), &order(Role::Active, milliseconds), patience)? {
        (_, Answer::Figure(figure)) => Ok(figure.operations),
        _ => Err(out_of_turn()),
    }
}

fn connect_crowd(ends: &mut Ends, shared_receives: bool) -> Result<()> {
    let address = ends.address;
    let gather = |listen| Order::Gather { listen, most: CROWD, shared_receives };
    let (listening, _) = ends.both(&gather(Some(address)), &gather(None), PATIENCE)?;
    let Answer::Listening { rdma, .. } = listening else { return Err(out_of_turn()) };
    let (over, count, to) = (Over::Uwarp, CROWD, (address, rdma).into());
    let accept = Order::Many(Many::Accept { over, count });
    let connect = Order::Many(Many::Connect { over, to, count, at_once: 1 });
    ends.both(&accept, &connect, PATIENCE * SLOW).map(drop)
}

/// For callgrind's files, until this is dropped.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("uwarp-bench-{}", std::process::id()));
        fs::create_dir_all(&path).map_err(Failure::of("a directory for what callgrind counts"))?;
        Ok(Self(path))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // What is left of it in the directory for temporary files does no harm.
        let _ = fs::remove_dir_all(&self.0);
    }
}
