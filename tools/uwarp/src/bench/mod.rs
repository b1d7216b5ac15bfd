//! `uwarp bench`: figures of uwarp beside those of raw sockets, from one run.
//!
//! A figure by itself says as much about the machine and its other work as about uwarp. So each is measured
//! in turns with the same traffic over a bare socket (TCP; UDP for datagrams) between the same two processes,
//! and shown as a ratio.
//!
//! The command itself only controls ([`ends`]); the traffic is between two processes of its own making
//! ([`end`]), which load the library as programs do ([`fabric`]).

mod datagrams;
#[allow(unsafe_code)]
mod dispatch;
mod end;
mod ends;
mod eventfds;
#[allow(unsafe_code)]
mod fabric;
mod flow;
mod fused;
mod instructions;
mod loops;
mod machine;
mod many;
mod mpi;
mod paths;
mod peers;
mod plan;
mod plot;
mod protocol;
mod raw;
mod raw_many;
#[allow(unsafe_code)]
mod raw_udp;
mod rdma;
mod report;
mod sharing;
mod sockets;
mod stats;
mod ucx;
#[allow(unsafe_code)]
mod usage;
mod ways;

use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::process::ExitCode;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::{BenchArgs, BenchEndArgs, BenchPin, BenchWhat};
use crate::{complain, libdir};
use ends::{Ends, Link, Place, Setting};
use machine::Machine;
use plan::{Goal, Item, Measure};
use protocol::{Calls, Failure, Figure, Job, Over, Result, Work};
use report::{Measured, Outcome, Report};
use ways::{Sweep, Way};

/// Exit status 1 if something could not be measured; figures that miss their goal are not failures.
pub fn run(args: &BenchArgs) -> ExitCode {
    if let Some(file) = &args.plot {
        let of_peers = args.what == BenchWhat::Memory && args.peers.is_some();
        if !of_peers && !matches!(args.what, BenchWhat::Mpi | BenchWhat::Sockets) {
            complain(&"--plot is for sockets, for mpi and for memory with --peers");
            return ExitCode::from(USAGE);
        }
        // Before anything is measured.
        if let Err(error) = may_be_written(file) {
            complain(&format_args!("cannot write the plot to {}: {error}", file.display()));
            return ExitCode::from(USAGE);
        }
    }
    if args.what == BenchWhat::Mpi {
        return mpi::run(args);
    }
    let only_mpi = [
        ("--markdown", args.markdown),
        ("--launcher", args.launcher.is_some()),
        ("--ranks", args.ranks.is_some()),
    ];
    if let Some((option, _)) = only_mpi.iter().find(|(_, given)| *given) {
        complain(&format_args!("{option} is only for uwarp bench mpi"));
        return ExitCode::from(USAGE);
    }
    if args.peers.is_some() && args.what != BenchWhat::Memory {
        complain(&"--peers is only for uwarp bench memory");
        return ExitCode::from(USAGE);
    }
    let measured = match args.what {
        BenchWhat::Memory if args.peers.is_some() => place(args).and_then(|place| peers::run(args, place)),
        BenchWhat::Loops => place(args).and_then(|place| loops::run(args, place)),
        BenchWhat::Sharing => sharing::run(args),
        BenchWhat::Instructions => place(args).and_then(|place| instructions::run(args, place)),
        BenchWhat::Ucx => place(args).and_then(|place| ucx::run(args, place)),
        BenchWhat::Sockets => place(args).and_then(|place| sockets::run(args, place)),
        _ => measure(args).map(|report| {
            report.print(args.json, args.targets);
            report.complete()
        }),
    };
    match measured {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(failure) => {
            complain(&failure);
            ExitCode::FAILURE
        }
    }
}

/// What is there stays as it is, and nothing is left where nothing was.
fn may_be_written(file: &std::path::Path) -> std::io::Result<()> {
    let known = std::fs::metadata(file);
    if known.as_ref().is_ok_and(|known| !known.is_file() && !known.is_dir()) {
        // A pipe would wait for its reader.
        return Ok(());
    }
    std::fs::File::options().create(true).append(true).open(file)?;
    // (What a link without an end pointed to.)
    if known.is_ok() { Ok(()) } else { std::fs::remove_file(std::fs::canonicalize(file)?) }
}

/// One of the two processes that `uwarp bench` starts.
pub fn run_end(args: &BenchEndArgs) -> ExitCode {
    end::run(args)
}

/// Exit status for options that have no meaning.
const USAGE: u8 = 2;
/// MTU of the devices between the namespaces by default: that of Ethernet.
const MTU: u32 = 1500;
/// Time of each trial of a way in which raw TCP can do the work.
const PROBE_MS: u64 = 40;
/// If raw TCP reaches less than this share of its best trial in a round, the machine was slow during that
/// round.
const SLOW: f64 = 0.7;
/// Warm-up before the first round, not measured: caches, socket buffers, knowledge of the peer.
const WARM_UP_MS: u64 = 50;
/// The throughput of copying with the CRC does not vary much.
const COPY_CRC_MS: u64 = 20;

/// How long each thing is measured.
#[derive(Clone, Copy)]
struct Extent {
    rounds: u32,
    round_ms: u64,
}

fn place(args: &BenchArgs) -> Result<Place> {
    match args.netns {
        true if !rustix::process::geteuid().is_root() => Err(Failure::new(
            "--netns creates network namespaces and needs root, at least in a user namespace: \
             unshare --map-root-user uwarp bench --netns ...",
        )),
        true => Ok(Place::Namespaces { mtu: args.mtu.unwrap_or(MTU) }),
        false => Ok(Place::Loopback),
    }
}

fn measure(args: &BenchArgs) -> Result<Report> {
    // Reported once here rather than by each end.
    libdir::find().map_err(|reason| Failure(reason.to_string()))?;
    let place = place(args)?;
    let (seconds, rounds) = if args.quick { (0.6, 3) } else { (2.0, 9) };
    let (seconds, rounds) = (args.seconds.unwrap_or(seconds), args.rounds.unwrap_or(rounds));
    let extent = Extent { rounds, round_ms: ((seconds * 1000.0 / f64::from(rounds)) as u64).max(1) };
    let mut items = plan::items(args.what);
    let own = |item: &Item| if place == Place::Loopback { item.over_memory() } else { None };
    items = items.into_iter().flat_map(|item| [own(&item), item.over_rd(), Some(item)]).flatten().collect();
    // Connections that are idle are made once for each link.
    items.sort_by_key(|item| item.group == plan::Group::Memory && item.link == Link::Tcp);
    let known: Vec<_> = items.iter().map(|item| item.id.clone()).collect();
    items.retain(|item| args.only.is_empty() || args.only.iter().any(|only| item.id.starts_with(only)));
    if items.is_empty() {
        return Err(Failure(format!("there is no such figure; there are: {}", known.join(", "))));
    }
    let mut machine = Machine::look();
    let progress = progress(items.len() as u64 * u64::from(rounds));
    let mut runner = Runner {
        place,
        pin: args.pin,
        ends: None,
        scale: None,
        swept: Vec::new(),
        extent,
        progress: progress.clone(),
    };
    let measured = items
        .into_iter()
        .map(|item| {
            progress.set_message(item.title.clone());
            let outcome = runner.item(&item);
            Measured { item, outcome }
        })
        .collect();
    progress.finish_and_clear();
    machine.look_again();
    Ok(Report { machine, place, seconds, rounds, measured })
}

/// Only on a terminal: in a log it would be noise.
fn progress(steps: u64) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    }
    let style = ProgressStyle::with_template("{wide_msg} {bar:24} {percent:>3} % {eta:>4}");
    ProgressBar::new(steps).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

struct Runner {
    place: Place,
    pin: BenchPin,
    /// The ends of the last item, their link, whether they request a CRC, and what they share their
    /// processors with.
    ends: Option<(Link, bool, Setting, Ends)>,
    /// For the figures of many connections.
    scale: Option<many::Scale>,
    /// The best ways of raw TCP that are known; what is the same for raw TCP is tried once in a run.
    swept: Vec<(Work, Vec<Way>, Setting, Sweep)>,
    extent: Extent,
    progress: ProgressBar,
}

impl Runner {
    fn item(&mut self, item: &Item) -> Result<Outcome> {
        let before = self.progress.position();
        let outcome = self.try_item(item);
        self.progress.set_position(before + u64::from(self.extent.rounds));
        if outcome.is_err() {
            // Their state is unknown: the next item gets new ones.
            self.ends = None;
            self.scale = None;
        }
        outcome
    }

    fn try_item(&mut self, item: &Item) -> Result<Outcome> {
        if let Measure::Many(figures) = item.work {
            self.ends = None;
            return many::measure(
                (self.place, item.link),
                &mut self.scale,
                figures,
                self.extent,
                &self.progress,
            );
        }
        self.scale = None;
        // Others are gone before new ones start.
        let wanted = (item.link, item.crc, item.setting);
        let same = self.ends.take().filter(|(link, crc, setting, _)| (*link, *crc, *setting) == wanted);
        let ends = match same {
            Some((.., ends)) => ends,
            None => Ends::start(self.place, &[crc(item.crc), item.link.setting()], item.setting)?,
        };
        let (.., ends) = self.ends.insert((item.link, item.crc, item.setting, ends));
        // Who has a processor for himself is not in a crowd.
        let alone = matches!(item.setting, Setting::Quiet | Setting::Emulated);
        let mut turn = Turn { ends, pin: alone.then_some(self.pin) };
        let work = match item.work {
            Measure::Datagrams(figures) => {
                return datagrams::measure(&mut turn, figures, self.extent, &self.progress);
            }
            Measure::One(work) => work,
            Measure::Many(_) => return Err(ends::out_of_turn()),
        };
        if let Work::Path(_) = work {
            return count(&mut turn, work, self.extent).map(Outcome::Calls);
        }
        let known = self.swept.iter().find(|(raw, ways, setting, _)| {
            *raw == work.without_verbs() && *ways == item.ways && *setting == item.setting
        });
        let baseline = match known {
            Some((_, _, _, sweep)) => sweep.clone(),
            None => {
                let sweep = sweep(&mut turn, work, &item.ways, self.extent)?;
                self.swept.push((work.without_verbs(), item.ways.clone(), item.setting, sweep.clone()));
                sweep
            }
        };
        let copy_crc = matches!(item.goal, Goal::BesideCrc(_));
        rounds(&mut turn, work, copy_crc, baseline, self.extent, &self.progress)
    }
}

/// The setting for the ends.
fn crc(on: bool) -> (&'static str, OsString) {
    ("UWARP_CRC", if on { "on" } else { "off" }.into())
}

/// The ends of one item.
struct Turn<'a> {
    ends: &'a mut Ends,
    /// `None`: they stay where they are.
    pin: Option<BenchPin>,
}

impl Turn<'_> {
    fn pin(&mut self, spins: bool) -> Result<()> {
        let Some(pin) = self.pin else { return Ok(()) };
        self.ends.pin(match pin {
            BenchPin::Spinning => spins,
            BenchPin::Always => true,
            BenchPin::Never => false,
        })
    }

    fn raw(&mut self, work: Work, way: Way, milliseconds: u64) -> Result<Figure> {
        self.pin(way.spins())?;
        self.ends.measure(Job { over: Over::Raw(way), work, milliseconds })
    }

    fn uwarp(&mut self, work: Work, milliseconds: u64) -> Result<Figure> {
        self.pin(work.spins())?;
        self.ends.measure(Job { over: Over::Uwarp, work, milliseconds })
    }
}

/// Finds the best way for raw TCP.
fn sweep(turn: &mut Turn, work: Work, ways: &[Way], extent: Extent) -> Result<Sweep> {
    if let Some(&way) = ways.first() {
        turn.raw(work, way, WARM_UP_MS)?;
    }
    let milliseconds = extent.round_ms.min(PROBE_MS);
    let best = ways::sweep(ways, work.is_time(), |way| turn.raw(work, way, milliseconds))?;
    best.ok_or_else(|| Failure::new("raw TCP has no way to do this"))
}

/// Raw, uwarp, raw, uwarp and so on.
fn rounds(
    turn: &mut Turn,
    work: Work,
    copy_crc: bool,
    baseline: Sweep,
    extent: Extent,
    progress: &ProgressBar,
) -> Result<Outcome> {
    let (mut raw, mut uwarp, mut copies) = (Vec::new(), Vec::new(), Vec::<Figure>::new());
    turn.raw(work, baseline.chosen, WARM_UP_MS)?;
    turn.uwarp(work, WARM_UP_MS)?;
    // As many rounds again may be slow, and are dropped; more of them are normal for this machine.
    let mut patience = extent.rounds;
    while (raw.len() as u64) < u64::from(extent.rounds) {
        let figure = turn.raw(work, baseline.chosen, extent.round_ms)?;
        let share =
            if work.is_time() { baseline.value / figure.value } else { figure.value / baseline.value };
        if share < SLOW && patience > 0 {
            patience -= 1;
            continue;
        }
        raw.push(figure);
        uwarp.push(turn.uwarp(work, extent.round_ms)?);
        if let (true, Work::Stream { flow, .. }) = (copy_crc, work) {
            copies.push(turn.uwarp(Work::CopyCrc { size: flow.size }, COPY_CRC_MS)?);
        }
        progress.inc(1);
    }
    let slow = extent.rounds - patience;
    Outcome::of(&raw, &uwarp, &copies, baseline, slow).ok_or_else(|| Failure::new("no round was measured"))
}

/// Counting is exact, so it takes no rounds; it only has to include the rare cases.
fn count(turn: &mut Turn, work: Work, extent: Extent) -> Result<Calls> {
    let milliseconds = extent.round_ms.min(500);
    turn.pin(work.spins())?;
    turn.ends.count(Job { over: Over::Uwarp, work, milliseconds })
}
