//! The requirements of the RFCs, and their tests: one table for each RFC. `docs/requirements.md` is written
//! from these tables.
//!
//! A row is one requirement in our own words: every MUST, MUST NOT, SHALL, SHALL NOT and REQUIRED of a
//! section, several of them in one row where one test shows them together. `tests/requirements.rs` checks the
//! tables and the page.

mod rfc5040;
mod rfc5041;
mod rfc5044;
mod rfc6581;
mod rfc7306;

use std::fmt::Write as _;
use std::path::Path;

/// All RFCs of the page, from the top layer down.
pub const RFCS: [&Rfc; 5] = [&rfc5040::RFC, &rfc7306::RFC, &rfc5041::RFC, &rfc5044::RFC, &rfc6581::RFC];

/// One RFC.
pub struct Rfc {
    /// Its number.
    pub number: u16,
    /// What it defines.
    pub title: &'static str,
    /// What the table leaves out, for the page.
    pub scope: &'static str,
    /// Every section that holds one of the five words. Sections that only explain the words are left out.
    pub sections: &'static [&'static str],
    /// The requirements, in the order of the sections.
    pub rows: &'static [Row],
}

/// One requirement.
pub struct Row {
    /// The section it stands in.
    pub section: &'static str,
    /// Who must keep it.
    pub binds: Who,
    /// The requirement, in our own words.
    pub text: &'static str,
    /// How it is shown to be kept.
    pub status: Status,
}

/// Who must keep a requirement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// The end that sends the message.
    Sender,
    /// The end that receives it.
    Receiver,
    /// The end that connects.
    Initiator,
    /// The end that is connected to.
    Responder,
    /// The program above.
    Ulp,
    /// The implementation as a whole, at either end.
    Implementation,
}
pub(crate) use Who::{Implementation, Initiator, Receiver, Responder, Sender, Ulp};

/// How a requirement is shown to be kept.
pub enum Status {
    /// These tests fail when it is not kept.
    Tested(&'static [Test]),
    /// It cannot be broken, for this reason.
    ByConstruction(&'static str),
    /// It does not concern uwarp, for this reason.
    NotApplicable(&'static str),
    /// It is not kept, or no test shows that it is kept.
    Gap(&'static str),
}

/// A file of the tree, and in it the name of a test function or the quoted name of a row of a table of tests.
pub type Test = (&'static str, &'static str);

pub(crate) const fn tested(
    section: &'static str,
    binds: Who,
    text: &'static str,
    tests: &'static [Test],
) -> Row {
    Row { section, binds, text, status: Status::Tested(tests) }
}

pub(crate) const fn built(section: &'static str, binds: Who, text: &'static str, why: &'static str) -> Row {
    Row { section, binds, text, status: Status::ByConstruction(why) }
}

pub(crate) const fn outside(section: &'static str, binds: Who, text: &'static str, why: &'static str) -> Row {
    Row { section, binds, text, status: Status::NotApplicable(why) }
}

pub(crate) const fn gap(section: &'static str, binds: Who, text: &'static str, why: &'static str) -> Row {
    Row { section, binds, text, status: Status::Gap(why) }
}

/// Files with many of the tests.
pub(crate) mod files {
    pub const ATOMIC_ATTACKS: &str = "conformance/tests/hostile/atomics.rs";
    pub const ATOMIC_ERRORS: &str = "crates/sim/tests/protocol_errors/atomics.rs";
    pub const ATOMICS: &str = "crates/sim/tests/atomics.rs";
    pub const BAD_NETWORK: &str = "conformance/tests/bad_network.rs";
    pub const BAD_DAYS: &str = "crates/driver/tests/bad_days.rs";
    pub const CLIENT: &str = "conformance/tests/hostile/client.rs";
    pub const CM: &str = "crates/cm/tests/connect.rs";
    pub const CORRUPTION: &str = "crates/sim/tests/corruption.rs";
    pub const C_PROGRAMS: &str = "conformance/tests/c_programs.rs";
    pub const DDP: &str = "crates/wire/src/ddp.rs";
    pub const ENDINGS: &str = "conformance/tests/hostile/endings.rs";
    pub const ERRORS: &str = "crates/sim/tests/protocol_errors/rows.rs";
    pub const FIELDS: &str = "conformance/tests/hostile/fields.rs";
    pub const FLOODS: &str = "conformance/tests/hostile/floods.rs";
    pub const FRAMER: &str = "crates/proto/src/framing/mpa/receive.rs";
    pub const IMMEDIATE: &str = "crates/sim/tests/immediate.rs";
    pub const LOOPBACK: &str = "crates/driver/tests/loopback.rs";
    pub const MEM: &str = "crates/rnic/src/mem.rs";
    pub const MPA: &str = "crates/wire/src/mpa.rs";
    pub const MR: &str = "crates/rnic/src/mr/mod.rs";
    pub const PROCESSES: &str = "crates/driver/tests/processes.rs";
    pub const RDMAP: &str = "crates/wire/src/rdmap.rs";
    pub const RECEIVING: &str = "crates/sim/tests/regressions/receiving.rs";
    pub const SEGMENTS: &str = "crates/proto/tests/segments.rs";
    pub const SENDING: &str = "crates/sim/tests/regressions/sending.rs";
    pub const SEQUENCES: &str = "conformance/tests/hostile/sequences.rs";
    pub const SETUP: &str = "crates/proto/src/setup/tests.rs";
    pub const SHARED: &str = "crates/sim/tests/shared.rs";
    pub const SIW: &str = "conformance/tests/siw.rs";
    pub const STARTUP: &str = "conformance/tests/hostile/setup.rs";
    pub const STRANGERS: &str = "crates/cm/tests/connect/strangers.rs";
    pub const TABLES: &str = "crates/wire/tests/tables.rs";
    pub const TERMINATE: &str = "crates/wire/src/terminate.rs";
    pub const TRACES: &str = "crates/sim/tests/traces.rs";
    pub const TSHARK: &str = "conformance/tests/tshark.rs";
    pub const VERBS: &str = "crates/sim/tests/verbs.rs";
    pub const WINDOWS: &str = "conformance/tests/hostile/windows.rs";
    pub const WORKLOADS: &str = "crates/sim/tests/workloads.rs";
}

impl Status {
    /// Its word in the tables.
    pub fn word(&self) -> &'static str {
        match self {
            Status::Tested(_) => "tested",
            Status::ByConstruction(_) => "by construction",
            Status::NotApplicable(_) => "not applicable",
            Status::Gap(_) => "**gap**",
        }
    }
}

/// The mistakes in the tables, one line for each: a test that is not in the tree, a section without a row, a
/// row without its reason.
pub fn mistakes(root: &Path) -> Vec<String> {
    let mut wrong = Vec::new();
    for rfc in RFCS {
        let name = format!("RFC {}", rfc.number);
        for section in rfc.sections {
            if !rfc.rows.iter().any(|row| row.section == *section) {
                wrong.push(format!("{name} section {section} has requirements, and no row"));
            }
        }
        for row in rfc.rows {
            let at = format!("{name} section {}, \"{}\"", row.section, row.text);
            if !rfc.sections.contains(&row.section) {
                wrong.push(format!("{at}: the section is not in the list of sections"));
            }
            match &row.status {
                Status::Tested([]) => wrong.push(format!("{at}: tested, and no test is named")),
                Status::Tested(tests) => {
                    let missing = tests.iter().filter(|test| !exists(root, test));
                    wrong.extend(
                        missing.map(|(file, test)| format!("{at}: there is no test {test} in {file}")),
                    );
                }
                Status::ByConstruction(why) | Status::NotApplicable(why) | Status::Gap(why) => {
                    if why.is_empty() {
                        wrong.push(format!("{at}: {} without a reason", row.status.word()));
                    }
                }
            }
        }
    }
    wrong
}

/// Whether a file of the tree has a test of this name.
pub fn exists(root: &Path, (file, name): &Test) -> bool {
    let read = |file: &str| std::fs::read_to_string(root.join(file)).unwrap_or_default();
    is_test(name, file, &read(file), &read("conformance/tests/hostile/main.rs"))
}

/// Whether `text`, a file's, has a test of this name: a function with the attribute, an attack that the list
/// of attacks runs, or a row of a table with this name in quotes.
pub fn is_test(name: &str, file: &str, text: &str, attacks: &str) -> bool {
    if let Some(module) = file.strip_prefix("conformance/tests/hostile/").and_then(|f| f.strip_suffix(".rs"))
    {
        let listed = attacks.contains(&format!("{module}::{name},"));
        return listed && text.contains(&format!("pub fn {name}("));
    }
    // A list of the model's scenarios, of which a macro makes tests.
    if file == "crates/model/tests/schedules.rs" {
        return text.split_whitespace().any(|word| word.trim_end_matches(';') == name);
    }
    if text.contains(&format!("\"{name}\"")) {
        return true;
    }
    // The attribute stands above, other attributes and comments between.
    let marked = |at: usize| text[..at].lines().rev().take(4).any(|line| line.contains("#[test]"));
    text.match_indices(&format!("fn {name}(")).any(|(at, _)| marked(at))
}

/// The page.
pub fn page() -> String {
    let mut out = String::from(HEAD);
    out.push_str("| RFC | requirements | tested | by construction | not applicable | gaps |\n");
    out.push_str("|---|---|---|---|---|---|\n");
    for rfc in RFCS {
        let count = |is: fn(&Status) -> bool| rfc.rows.iter().filter(|row| is(&row.status)).count();
        let _ = writeln!(
            out,
            "| [{0}](#rfc-{0}-{1}) | {2} | {3} | {4} | {5} | {6} |",
            rfc.number,
            anchor(rfc.title),
            rfc.rows.len(),
            count(|s| matches!(s, Status::Tested(_))),
            count(|s| matches!(s, Status::ByConstruction(_))),
            count(|s| matches!(s, Status::NotApplicable(_))),
            count(|s| matches!(s, Status::Gap(_))),
        );
    }
    out.push_str("\n## Gaps\n\n");
    for rfc in RFCS {
        for row in rfc.rows {
            if let Status::Gap(why) = row.status {
                let _ = writeln!(out, "- RFC {} section {}: {} – {why}.", rfc.number, row.section, row.text);
            }
        }
    }
    for rfc in RFCS {
        let _ = write!(out, "\n## RFC {}: {}\n\n", rfc.number, rfc.title);
        if !rfc.scope.is_empty() {
            let _ = write!(out, "{}\n\n", rfc.scope);
        }
        out.push_str("| section | requirement | binds | status | test or reason |\n|---|---|---|---|---|\n");
        for row in rfc.rows {
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {} |",
                row.section,
                row.text,
                format!("{:?}", row.binds).to_lowercase().replace("ulp", "ULP"),
                row.status.word(),
                shown(&row.status)
            );
        }
    }
    out
}

const HEAD: &str = "\
# Requirements of the RFCs, and their tests

The tables in `conformance/src/requirements` are the source of this page; do not edit it here. This command
writes it again: `REQUIREMENTS=write cargo test -p uwarp-conformance --test requirements`. `make test` fails
when the page differs from the tables, when a test that it names is not in the tree, or when a section with
a MUST has no row.

A row is a MUST, MUST NOT, SHALL, SHALL NOT or REQUIRED of the RFC in our own words, or several of them that
one test shows together. *Tested* names tests that fail when the requirement is broken; most rows have more
tests than are named. *By construction* means that no input and no call can break the requirement, and says
why. *Not applicable* says why the requirement does not concern a library that runs MPA over the kernel's
TCP. A *gap* is a requirement that uwarp does not keep, or that no test shows to be kept.

";

fn anchor(title: &str) -> String {
    let words = title.to_lowercase().replace([',', '(', ')', ':'], "");
    words.replace(' ', "-")
}

fn shown(status: &Status) -> String {
    match status {
        Status::Tested(tests) => {
            let links: Vec<_> = tests.iter().map(|(file, name)| format!("[`{name}`](../{file})")).collect();
            links.join(", ")
        }
        Status::ByConstruction(why) | Status::NotApplicable(why) | Status::Gap(why) => (*why).to_owned(),
    }
}
