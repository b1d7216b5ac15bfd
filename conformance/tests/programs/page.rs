//! `docs/programs.md`: what each row is, how it was run, and what came of it.
//!
//! The page is written by runs with `PROGRAMS=full`, complete or filtered: cells of rows that did not run
//! stay as they are on the page. There is no time on it, so it changes only when a row, a version or a
//! result does.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use uwarp_conformance::dist::Dist;
use uwarp_conformance::process::Cmd;
use uwarp_conformance::report::{Table, write_if_changed};
use uwarp_conformance::topology::Topology;
use uwarp_conformance::{Context, Outcome, require};

use super::packages;
use super::typed::Typed;
use super::{Case, Run};

/// How many commands of a row are shown.
const SHOWN: usize = 2;

/// What a run of a row at one place left behind.
pub struct Ran {
    pub good: bool,
    pub took: Duration,
    pub started: Vec<Cmd>,
}

/// Of rows by their place in the table.
pub type Results = BTreeMap<(usize, Topology), Ran>;

/// The cells that only a run can tell.
#[derive(Debug, Clone, Default)]
struct Cells {
    settings: String,
    results: Vec<String>,
    commands: String,
}

/// What stands on the page.
#[derive(Debug, Default)]
struct Page {
    versions: BTreeMap<String, String>,
    rows: BTreeMap<Key, Cells>,
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/programs.md")
}

/// Puts these results on the page.
pub fn write(cases: &[Case], results: &Results, dist: &Dist) -> Outcome {
    let mut page = Page::read();
    for (index, case) in cases.iter().enumerate() {
        let cells = page.rows.entry(key(case)).or_default();
        cells.results.resize(Topology::ALL.len(), String::new());
        for (cell, topology) in cells.results.iter_mut().zip(Topology::ALL) {
            match results.get(&(index, topology)) {
                Some(ran) => *cell = if ran.good { "ok" } else { "**FAILS**" }.to_owned(),
                // A place that the row has no more.
                None if !case.at.contains(&topology) => cell.clear(),
                None => {}
            }
        }
        if let Some(ran) = results.get(&(index, case.at[0])).filter(|ran| ran.good) {
            let typed: Vec<Typed> = ran.started.iter().filter_map(|cmd| Typed::new(cmd, dist)).collect();
            (cells.settings, cells.commands) = (settings(&typed), commands(&typed));
        }
    }
    let packages: BTreeSet<String> = cases.iter().map(|case| packages::of(case.program)).collect();
    for package in packages.into_iter().filter(|package| packages::is_debians(package)) {
        page.versions.insert(package.clone(), packages::version(&package)?);
    }
    packages::check_linking()?;
    write_if_changed(&file(), &page.text(cases)).context(file().display())
}

/// Fails if the page lacks a row of the table or a result, or has another text for one.
pub fn check(cases: &[Case]) -> Outcome {
    let page = Page::read();
    let remedy = "PROGRAMS=full cargo test -p uwarp-conformance --test programs -- ROW writes it";
    let mut keys = BTreeSet::new();
    for case in cases {
        require!(keys.insert(key(case)), "two rows are the same in words: {} {}", case.program, case.manner);
        let cells = page.rows.get(&key(case)).cloned().unwrap_or_default();
        let untried = case.at.iter().find(|t| {
            let place = Topology::ALL.iter().position(|topology| topology == *t);
            place.and_then(|n| cells.results.get(n)).is_none_or(String::is_empty)
        });
        if let Some(topology) = untried {
            uwarp_conformance::fail!("no result of {} {} [{topology}]: {remedy}", case.program, case.manner)
        }
    }
    packages::are_known(cases.iter().map(|case| case.program))?;
    let text = std::fs::read_to_string(file()).context(file().display())?;
    require!(text == page.text(cases), "docs/programs.md does not fit the table: {remedy}");
    packages::are_installed_by_setup(page.versions.keys().map(String::as_str))
}

/// Program, manner, and what proves success.
type Key = [String; 3];

fn key(case: &Case) -> Key {
    [case.program, case.manner, case.checked].map(str::to_owned)
}

/// The view, or the views of both ends, and what else was set by options.
fn settings(typed: &[Typed]) -> String {
    let view = |typed: &Typed| {
        let chosen = typed.options.iter().rfind(|(name, _)| name == "as");
        chosen.map_or("roce".to_owned(), |(_, view)| view.clone())
    };
    let mut all: Vec<String> = Vec::new();
    let views = typed.iter().map(view);
    let others = typed.iter().flat_map(|typed| &typed.options).filter(|(name, _)| name != "as");
    for word in views.chain(others.map(|(name, value)| format!("{name} {value}").trim_end().to_owned())) {
        if !all.contains(&word) {
            all.push(word);
        }
    }
    all.join(", ")
}

/// The first ones that differ: as a rule a server and a client.
fn commands(typed: &[Typed]) -> String {
    let mut lines: Vec<&str> = Vec::new();
    for typed in typed {
        if !lines.contains(&typed.line.as_str()) {
            lines.push(&typed.line);
        }
    }
    let more = if lines.len() > SHOWN { "<br>…" } else { "" };
    lines.truncate(SHOWN);
    lines.iter().map(|line| format!("`{line}`")).collect::<Vec<_>>().join("<br>") + more
}

const HEADS: [&str; 5] = ["program", "how", "what proves success", "view, settings", "in `make test`"];

impl Page {
    /// Empty if there is none.
    fn read() -> Page {
        let mut page = Page::default();
        let text = std::fs::read_to_string(file()).unwrap_or_default();
        for line in text.lines() {
            let head = line.strip_prefix("## ").and_then(|head| head.split_once(' '));
            if let Some((package, version)) = head.filter(|(_, version)| !version.contains(' ')) {
                page.versions.insert(package.to_owned(), version.to_owned());
            }
            let Some(row) = line.strip_prefix("| ").and_then(|line| line.strip_suffix(" |")) else {
                continue;
            };
            let cells: Vec<String> = row.split(" | ").map(|cell| cell.replace("\\|", "|")).collect();
            let results = HEADS.len()..HEADS.len() + Topology::ALL.len();
            if cells.len() == results.end + 1 {
                let kept = Cells {
                    settings: cells[3].clone(),
                    results: cells[results.clone()].to_vec(),
                    commands: cells[results.end].clone(),
                };
                page.rows.insert([0, 1, 2].map(|n: usize| cells[n].clone()), kept);
            }
        }
        page
    }

    fn text(&self, cases: &[Case]) -> String {
        let mut sections: Vec<(String, Vec<&Case>)> = Vec::new();
        for case in cases {
            let package = packages::of(case.program);
            match sections.iter_mut().find(|(name, _)| *name == package) {
                Some((_, rows)) => rows.push(case),
                None => sections.push((package, vec![case])),
            }
        }
        let mut out = INTRODUCTION.to_owned();
        for (package, rows) in &sections {
            let version = self.versions.get(package).map_or("", String::as_str);
            out += &format!("\n{}\n\n{}", format!("## {package} {version}").trim_end(), self.section(rows));
        }
        let programs: Vec<&str> = cases.iter().map(|case| case.program).collect();
        out += &format!("{LINKING}{}", packages::linking(&programs));
        out
    }

    fn section(&self, rows: &[&Case]) -> String {
        let columns = Topology::ALL.map(|t| t.to_string());
        let heads = HEADS.into_iter().chain(columns.iter().map(String::as_str)).chain(["commands"]);
        let mut table = Table::new(&heads.collect::<Vec<_>>());
        for case in rows {
            let mut cells = self.rows.get(&key(case)).cloned().unwrap_or_default();
            cells.results.resize(Topology::ALL.len(), String::new());
            let in_test = if matches!(case.run, Run::Long(_)) { "no" } else { "yes" };
            let words =
                [case.program, case.manner, case.checked, &cells.settings, in_test].map(str::to_owned);
            table.row(words.into_iter().chain(cells.results).chain([cells.commands]));
        }
        table.markdown()
    }
}

const LINKING: &str = "
## Packages that link the libraries

All packages of Debian 12 that depend on libibverbs1 or librdmacm1 themselves.

Left out of the Rust crates: `client` and `server` of async-rdma 0.5.0, which accept immediate data only if
`wc_flags` is 3, as over Soft-RoCE. Left out of the Python packages: PyTorch. The Gloo in its wheel (torch
2.8.0) has no verbs transport. Its other user of libibverbs, TensorPipe, cannot be loaded without a GPU
maker's libraries.

";

const INTRODUCTION: &str = "# Unmodified programs over uwarp

Each row is a program, a way to run it, and what came of it. `make programs` runs all rows and writes this
page: do not edit it. `make test` runs the rows that say `yes`, and checks that this page fits the table.
This runs one row and writes it again: `PROGRAMS=full cargo test -p uwarp-conformance --test programs -- ROW`.

The headings name packages of Debian 12, with their versions. Each of the six columns of results is a
network: `lo` is loopback, `veth1500` and `veth9000` are two network namespaces with this MTU between them,
`v4` and `v6` are the versions of IP. An empty cell was not tried. Debian 12's perftest takes IPv4 addresses
only.

The last column shows the commands as they are typed, as a rule the server's first. `…` means that there are
more. `SERVER` and `CLIENT` stand for addresses, `PORT` for any free port, `NAMESPACE` for a network
namespace, `DIR` for a directory of the test, and `PREFIX` for the place where MVAPICH2 is installed
([mvapich2.md](mvapich2.md); its rows run only where it is found).
";
