//! `uwarp bench mpi`: an MPI program of ours, compiled by the user's mpicc, over each transport that the MPI
//! has, in turns: its own TCP first.
//!
//! The ranks use no shared memory, so all messages go over the transport.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use comfy_table::Table;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;

use super::machine::Machine;
use super::plot::{Page, Panel, Scale, Series};
use super::progress;
use super::protocol::{Failure, Result};
use super::stats::median;
use crate::cli::{BenchArgs, BenchPin, Transport};
use crate::mpi::Launcher;
use crate::{complain, program, table};

const SOURCE: &str = include_str!("mpi.c");
/// A job that prints nothing new for so long hangs. A rank may wait for a whole time slice at each step of a
/// figure.
const LIMIT: Duration = Duration::from_secs(60);
/// A launcher that is asked to end has so long to end its ranks.
const GRACE: Duration = Duration::from_secs(10);

/// One figure of one transport.
#[derive(Debug, Clone, Serialize)]
struct Side {
    /// Of the rounds' medians.
    median: f64,
    /// Of the rounds' 99th percentiles; of throughput, that of the slow end.
    p99: f64,
    /// Median of the ratios to the MPI's own TCP in the same round.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    rounds: Vec<f64>,
}

#[derive(Debug, Serialize)]
struct Row {
    id: String,
    unit: String,
    transports: BTreeMap<String, Side>,
}

/// What a run of the program printed: figure to unit, median and 99th percentile.
type Printed = Vec<(String, String, f64, f64)>;

/// Exit status 1 if something could not be measured.
pub fn run(args: &BenchArgs) -> ExitCode {
    match measure(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            complain(&failure);
            ExitCode::FAILURE
        }
    }
}

fn measure(args: &BenchArgs) -> Result<()> {
    if args.netns || args.pin != BenchPin::Spinning {
        return Err(Failure::new("--netns, --mtu and --pin are for the other figures, not for mpi"));
    }
    let name = args.launcher.as_deref().unwrap_or(OsStr::new("mpirun"));
    let path = program::find(name).map_err(|reason| Failure(format!("{reason}; {}", reason.remedy())))?;
    let launcher = Launcher::identify(&path).map_err(Failure)?;
    let mut machine = Machine::look();
    let ranks = args.ranks.unwrap_or_else(|| u32::try_from(machine.cores).unwrap_or(2).clamp(2, 16));
    let (seconds, rounds) = if args.quick { (0.1, 2) } else { (1.0, 5) };
    let (seconds, rounds) = (args.seconds.unwrap_or(seconds), args.rounds.unwrap_or(rounds));
    let directory = Scratch::new("mpi")?;
    let program = compile(&path, directory.path())?;
    let transports: Vec<Transport> = [Transport::Tcp, Transport::Rc, Transport::Ud, Transport::Ofi]
        .into_iter()
        .filter(|t| launcher.can(*t))
        .collect();
    let milliseconds = seconds * 1000.0 / f64::from(rounds);
    let mut printed: Vec<(Transport, Vec<Printed>)> = transports.iter().map(|t| (*t, Vec::new())).collect();
    let bar = progress(u64::from(rounds) * transports.len() as u64);
    for _ in 0..rounds {
        for (transport, runs) in &mut printed {
            bar.set_message(format!("{launcher}: {}", transport.word()));
            let (figures, failure) = job(*transport, name, ranks, &program, milliseconds)?;
            // An MPI may hang in one figure over its own TCP; what it printed before is worth having.
            match failure {
                Some(failure) if figures.is_empty() => return Err(failure),
                Some(failure) => complain(&failure),
                None => {}
            }
            runs.push(figures);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    machine.look_again();
    let rows = rows(&printed, &args.only);
    if rows.is_empty() {
        return Err(Failure::new("there is no such figure; without --only, all are shown"));
    }
    if let Some(file) = &args.plot {
        plot(&launcher.to_string(), &transports, &rows).write(file)?;
    }
    if args.json {
        let report = serde_json::json!({
            "mpi": launcher.to_string(), "ranks": ranks, "rounds": rounds, "seconds": seconds,
            "machine": machine, "figures": rows,
        });
        crate::say!("{report}");
    } else if args.markdown {
        crate::say!("{}", markdown(&transports, &rows).trim_end());
    } else {
        crate::say!("{launcher}, {ranks} ranks, no shared memory, {rounds} rounds\n");
        crate::say!("{}", table::text(table(&transports, &rows)));
        crate::say!("Median and 99th percentile; × is the ratio to the MPI's own TCP, round by round.");
    }
    Ok(())
}

/// A directory that goes away.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new(name: &str) -> Result<Scratch> {
        let directory = std::env::temp_dir().join(format!("uwarp-bench-{name}-{}", std::process::id()));
        // Not one that another user has made.
        std::fs::create_dir(&directory)
            .map_err(|error| Failure(format!("cannot make {}: {error}", directory.display())))?;
        Ok(Scratch(directory))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// By the compiler that belongs to the launcher: mpicc beside mpirun, mpicc.mpich beside mpirun.mpich.
fn compile(launcher: &Path, directory: &Path) -> Result<PathBuf> {
    let name = launcher.file_name().unwrap_or_default().to_string_lossy();
    let suffix = name.split_once('.').map_or(String::new(), |(_, suffix)| format!(".{suffix}"));
    let compiler = launcher.with_file_name(format!("mpicc{suffix}"));
    if !compiler.exists() {
        return Err(Failure(format!(
            "there is no {}, which compiles the program that measures. On Debian: apt-get install \
             libopenmpi-dev or libmpich-dev",
            compiler.display()
        )));
    }
    let (source, program) = (directory.join("mpi.c"), directory.join("mpi"));
    std::fs::write(&source, SOURCE).map_err(|error| Failure(format!("{}: {error}", source.display())))?;
    let out = Command::new(&compiler).arg("-O2").arg("-o").arg(&program).arg(&source).output();
    match out {
        Ok(out) if out.status.success() => Ok(program),
        Ok(out) => Err(Failure(format!("{}: {}", compiler.display(), String::from_utf8_lossy(&out.stderr)))),
        Err(error) => Err(Failure(format!("cannot run {}: {error}", compiler.display()))),
    }
}

/// One run of all figures: those that it printed, and why it printed no more if it failed.
fn job(
    transport: Transport,
    launcher: &OsStr,
    ranks: u32,
    program: &Path,
    milliseconds: f64,
) -> Result<(Printed, Option<Failure>)> {
    let failed = |why: &dyn std::fmt::Display| Failure(format!("--transport {}: {why}", transport.word()));
    let uwarp = std::env::current_exe().map_err(|error| failed(&error))?;
    let directory = program.with_file_name("");
    let to = |name: &str| File::create(directory.join(name)).map_err(|error| failed(&error));
    let words = ["mpi", "--transport", transport.word(), "--shared-memory", "off", "--"];
    let child = Command::new(uwarp)
        .args(words)
        .arg(launcher)
        .args([OsString::from("-n"), ranks.to_string().into(), program.into()])
        .arg(milliseconds.to_string())
        // With fewer cores than ranks, Open MPI refuses otherwise.
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .stdin(Stdio::null())
        .stdout(to("out")?)
        .stderr(to("err")?)
        .spawn()
        .map_err(|error| failed(&error))?;
    let end = wait(child, &directory.join("out")).map_err(|error| failed(&error))?;
    let text = |name: &str| std::fs::read_to_string(directory.join(name)).unwrap_or_default();
    let printed: Printed = text("out").lines().filter_map(figure).collect();
    let last = printed.last().map_or("none", |figure| figure.0.as_str());
    let failure = match end {
        Some(status) if status.success() => None,
        Some(status) => Some(failed(&format_args!("the job ended with {status}\n{}", text("err")))),
        None => {
            let seconds = LIMIT.as_secs();
            Some(failed(&format_args!("the job printed nothing for {seconds} s; its last figure: {last}")))
        }
    };
    Ok((printed, failure))
}

/// How it ended; `None`: it hung. Launchers end their ranks when they are asked to end.
fn wait(mut child: Child, out: &Path) -> std::io::Result<Option<ExitStatus>> {
    let mut seen = (0, Instant::now());
    while seen.1.elapsed() < LIMIT {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let len = std::fs::metadata(out)?.len();
        if len > seen.0 {
            seen = (len, Instant::now());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        kill_process(pid, Signal::TERM)?;
    }
    let asked = Instant::now();
    while child.try_wait()?.is_none() {
        if asked.elapsed() > GRACE {
            child.kill()?;
            child.wait()?;
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(None)
}

/// "ping-pong-8 us 4.2 9.7 1000"
fn figure(line: &str) -> Option<(String, String, f64, f64)> {
    let mut words = line.split_whitespace();
    let (id, unit) = (words.next()?, words.next()?);
    let (middle, late) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    words.next()?.parse::<u32>().ok()?;
    Some((id.to_owned(), unit.to_owned(), middle, late))
}

fn rows(printed: &[(Transport, Vec<Printed>)], only: &[String]) -> Vec<Row> {
    // In the order of the longest run: one that failed has printed less.
    let runs = printed.iter().flat_map(|(_, runs)| runs);
    let first = runs.max_by_key(|run| run.len()).cloned().unwrap_or_default();
    let wanted = |id: &str| only.is_empty() || only.iter().any(|only| id.starts_with(only.as_str()));
    let of = |runs: &[Printed], id: &str| -> Vec<Option<(f64, f64)>> {
        let found = runs.iter().map(|run| run.iter().find(|figure| figure.0 == id));
        found.map(|figure| figure.map(|(_, _, middle, late)| (*middle, *late))).collect()
    };
    let row = |(id, unit): (String, String)| {
        let base = printed.first().map(|(_, runs)| of(runs, &id)).unwrap_or_default();
        let side = |(transport, runs): &(Transport, Vec<Printed>)| {
            let figures = of(runs, &id);
            let (rounds, tails): (Vec<f64>, Vec<f64>) = figures.iter().flatten().copied().unzip();
            let pairs = figures.iter().zip(&base);
            let ratios: Vec<f64> = pairs.filter_map(|(value, base)| Some((*value)?.0 / (*base)?.0)).collect();
            let ratio = median(&ratios).filter(|_| *transport != Transport::Tcp);
            let side = Side { median: median(&rounds)?, p99: median(&tails)?, ratio, rounds };
            Some((transport.word().to_owned(), side))
        };
        Row { id: id.clone(), unit, transports: printed.iter().filter_map(side).collect() }
    };
    first.into_iter().map(|(id, unit, ..)| (id, unit)).filter(|(id, _)| wanted(id)).map(row).collect()
}

impl Row {
    fn cell(&self, transport: Transport) -> String {
        let Some(side) = self.transports.get(transport.word()) else { return String::new() };
        let tail = if side.p99 > 0.0 { format!(" / {:.1}", side.p99) } else { String::new() };
        let ratio = side.ratio.map_or(String::new(), |ratio| format!(" ({ratio:.2} ×)"));
        format!("{:.1}{tail}{ratio}", side.median)
    }
}

/// As docs/performance.md has it.
fn markdown(transports: &[Transport], rows: &[Row]) -> String {
    let heads = transports.iter().map(|transport| match transport {
        Transport::Rc | Transport::Ud => format!("{} (UCX)", transport.word()),
        Transport::Ofi => format!("{} (libfabric)", transport.word()),
        _ => transport.word().to_owned(),
    });
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let mut text = line(["figure".to_owned(), "unit".to_owned()].into_iter().chain(heads).collect());
    text += &format!("|{}\n", "---|".repeat(2 + transports.len()));
    for row in rows {
        let cells = transports.iter().map(|transport| row.cell(*transport));
        text += &line([row.id.clone(), row.unit.clone()].into_iter().chain(cells).collect());
    }
    text
}

fn table(transports: &[Transport], rows: &[Row]) -> Table {
    let heads = transports.iter().map(|transport| transport.word().to_owned());
    let header: Vec<_> = ["figure".to_owned(), "unit".to_owned()].into_iter().chain(heads).collect();
    let mut table = table::new(&header);
    for row in rows {
        let cells = transports.iter().map(|transport| row.cell(*transport));
        table.add_row([row.id.clone(), row.unit.clone()].into_iter().chain(cells));
    }
    table::align(&mut table, 2);
    table
}

/// A panel for each operation that was measured with more than one size.
fn plot(mpi: &str, transports: &[Transport], rows: &[Row]) -> Page {
    let sized = |row: &Row| {
        let (operation, size) = row.id.rsplit_once('-')?;
        Some(((operation.to_owned(), row.unit.clone()), size.parse::<u32>().ok()?))
    };
    let mut operations: Vec<(String, String)> = Vec::new();
    for (operation, _) in rows.iter().filter_map(sized) {
        if !operations.contains(&operation) {
            operations.push(operation);
        }
    }
    let panel = |operation: &(String, String)| {
        let of: Vec<_> = rows
            .iter()
            .filter_map(|row| sized(row).filter(|(of, _)| of == operation).map(|(_, size)| (size, row)))
            .collect();
        let series = |transport: &Transport| {
            let word = transport.word();
            let points = of
                .iter()
                .filter_map(|(size, row)| Some((f64::from(*size), row.transports.get(word)?.median)));
            Series { name: word.to_owned(), points: points.collect() }
        };
        (of.len() > 1).then(|| Panel {
            title: operation.0.clone(),
            x: "bytes".to_owned(),
            y: operation.1.clone(),
            scales: [Scale::Doubling, Scale::Decimal],
            series: transports.iter().map(series).collect(),
        })
    };
    Page { title: mpi.to_owned(), panels: operations.iter().filter_map(panel).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_compare_runs_of_the_same_round() {
        let run = |value| vec![figure(&format!("barrier-0 us {value} 9 100")).unwrap()];
        let printed = [
            (Transport::Tcp, vec![run(10.0), run(100.0), run(10.0)]),
            (Transport::Rc, vec![run(5.0), run(50.0), run(5.0)]),
        ];
        let rows = rows(&printed, &[]);
        let rc = &rows[0].transports["rc"];
        assert_eq!((rc.median, rc.ratio), (5.0, Some(0.5)));
        assert_eq!(rows[0].transports["tcp"].ratio, None);
        assert!(super::rows(&printed, &["put".to_owned()]).is_empty());
    }

    #[test]
    fn the_table_of_the_page_names_what_carries_each_transport() {
        let printed = [
            (Transport::Tcp, vec![vec![figure("barrier-0 us 4 9 100").unwrap()]]),
            (Transport::Rc, vec![vec![figure("barrier-0 us 2 8 100").unwrap()]]),
        ];
        assert_eq!(
            markdown(&[Transport::Tcp, Transport::Rc], &rows(&printed, &[])),
            "| figure | unit | tcp | rc (UCX) |\n|---|---|---|---|\n\
             | barrier-0 | us | 4.0 / 9.0 | 2.0 / 8.0 (0.50 ×) |\n"
        );
    }

    /// A run that failed has fewer figures; the others keep theirs, without a ratio to it.
    #[test]
    fn a_figure_that_one_transport_lacks_is_shown() {
        let run = |ids: &[&str]| ids.iter().map(|id| figure(&format!("{id} us 4 9 100")).unwrap()).collect();
        let printed = [
            (Transport::Tcp, vec![run(&["barrier-0"])]),
            (Transport::Rc, vec![run(&["barrier-0", "put-8"])]),
        ];
        let rows = rows(&printed, &[]);
        assert_eq!(rows.iter().map(|row| row.id.as_str()).collect::<Vec<_>>(), ["barrier-0", "put-8"]);
        assert_eq!(rows[1].transports.keys().collect::<Vec<_>>(), ["rc"]);
        assert_eq!((rows[1].transports["rc"].ratio, rows[0].transports["rc"].ratio), (None, Some(1.0)));
    }

    #[test]
    fn other_lines_are_no_figures() {
        for line in ["", "warning: no such thing", "a b 1 2", "a b c d e"] {
            assert_eq!(figure(line), None, "{line}");
        }
    }
}
