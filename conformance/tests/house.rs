//! The order of the house: which crates may use which, which modules of a crate name each other in a circle,
//! and what the core of a connected queue pair offers. A change here is a change of the plan
//! (ARCHITECTURE.md), so it is made on purpose.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// From the bottom up. A crate uses only those of the lines above its own.
const LAYERS: [&[&str]; 7] = [
    &["crates/process", "crates/wire", "abi/types", "abi/preload", "tools/bottleneck"],
    &["crates/proto", "crates/mem"],
    &["crates/rnic", "crates/llp"],
    &["crates/driver"],
    &["crates/cm"],
    &["crates/rsocket"],
    &["abi/iwarp-mode"],
];

/// Above them all; none of the others uses these. `abi/static` is `abi`, to be linked.
const TOP: [&str; 9] = [
    "abi",
    "abi/static",
    "abi/fs",
    "abi/sockets",
    "abi/verbs-sockets",
    "tools/uwarp",
    "conformance",
    "crates/sim",
    "crates/model",
];

fn package(directory: &str) -> String {
    match directory {
        "conformance" | "abi" => format!("uwarp-{directory}"),
        "tools/uwarp" => "uwarp".to_owned(),
        "abi/types" => "uwarp-abi-types".to_owned(),
        other => format!("uwarp-{}", other.rsplit('/').next().unwrap_or_default()),
    }
}

/// The crates of this workspace that one depends on, not only for its tests.
fn dependencies(directory: &str) -> BTreeSet<String> {
    let manifest = fs::read_to_string(root().join(directory).join("Cargo.toml")).expect("a manifest");
    let (_, rest) = manifest.split_once("\n[dependencies]\n").unwrap_or_default();
    let lines = rest.lines().take_while(|line| !line.starts_with('['));
    let names = lines.filter_map(|line| line.split(['.', ' ', '=']).next());
    names.filter(|name| name.starts_with("uwarp")).map(str::to_owned).collect()
}

#[test]
fn each_crate_uses_only_those_below_it() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("the workspace");
    let members = manifest.split("members = [").nth(1).and_then(|rest| rest.split(']').next());
    let members: BTreeSet<&str> = members.expect("members").split('"').skip(1).step_by(2).collect();
    let known: BTreeSet<&str> = LAYERS.iter().flat_map(|layer| layer.iter().copied()).chain(TOP).collect();
    assert_eq!(members, known, "every crate has its place in the table above");
    let mut below = BTreeSet::new();
    for layer in LAYERS {
        for directory in layer {
            let above: Vec<_> = dependencies(directory).difference(&below).cloned().collect();
            assert!(above.is_empty(), "{directory} uses {above:?}, which are not below it");
        }
        below.extend(layer.iter().map(|directory| package(directory)));
    }
    // The simulator and the model are made of the crates that they try.
    for directory in TOP {
        let mut used = dependencies(directory);
        if directory == "abi/static" {
            used.remove("uwarp-abi");
        }
        let beside: Vec<_> = used.difference(&below).cloned().collect();
        assert!(beside.is_empty(), "{directory} uses {beside:?}, which are not below it");
    }
}

/// Circles of modules, each as the modules that reach each other. Every one is named here with its reason; a
/// new one is a mistake, and so is a name that is no longer true.
const CIRCLES: [(&str, &[&str]); 6] = [
    // What headers say in the traces is a part of their own types.
    ("wire", &["datagram", "rd", "rdmap", "terminate", "text"]),
    // A carrier hands a link over, and a link is made of a carrier.
    ("llp", &["carrier", "link", "streams"]),
    // The engine holds the datagrams that wait for more (docs/adr/045).
    ("driver", &["engine", "held"]),
    // The device finds its queue pairs by number. They are made on it, get their numbers from it and leave
    // their counters there. A registry of trait objects would turn the arrows round, and every lookup would
    // end in a downcast to the three types that there are. It keeps what the process shares with its
    // neighbours (docs/adr/049), which settle queue pairs.
    ("driver", &["host", "nic", "pair", "qp", "rd", "rings", "shell", "ud"]),
    ("rsocket", &["poll", "set", "table"]),
    ("rsocket", &["socket", "upgrade"]),
];

/// Arrows that do not count: crate, from, to.
const LEFT_OUT: [(&str, &str, &str); 1] = [
    // The object's own destructor must be a static, and stands in the file that may have one. It only names
    // what the process does last.
    ("driver", "fork", "open"),
];

fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display())).flatten()
    {
        let path = entry.path();
        let is_test = path.file_stem().is_some_and(|name| name == "tests");
        if path.is_dir() && !is_test {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") && !is_test {
            found.push(path);
        }
    }
}

/// The top modules of a crate, and those that each names as `crate::…`.
fn arrows(name: &str) -> BTreeMap<String, BTreeSet<String>> {
    let source = root().join("crates").join(name).join("src");
    let mut all = Vec::new();
    files(&source, &mut all);
    let module = |file: &PathBuf| {
        let first = file.strip_prefix(&source).ok()?.iter().next()?.to_str()?;
        Some(first.trim_end_matches(".rs").to_owned())
    };
    let modules: BTreeSet<String> = all.iter().filter_map(module).collect();
    let mut arrows: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in &all {
        let Some(from) = module(file).filter(|from| from != "lib") else { continue };
        let text = fs::read_to_string(file).expect("a source file");
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        let code = lines.collect::<Vec<_>>().join("\n");
        for rest in code.split("crate::").skip(1) {
            let named = match rest.strip_prefix('{') {
                Some(list) => first_words(list),
                None => vec![word(rest)],
            };
            let counts = |to: &String| !LEFT_OUT.contains(&(name, &from, to));
            let others = named.into_iter().filter(|to| *to != from && modules.contains(to) && counts(to));
            arrows.entry(from.clone()).or_default().extend(others);
        }
    }
    arrows
}

fn word(text: &str) -> String {
    text.trim_start().chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()
}

/// Of `a::{b, c}, d}` the words `a` and `d`.
fn first_words(list: &str) -> Vec<String> {
    let (mut depth, mut begins, mut words) = (0, true, Vec::new());
    for (at, c) in list.char_indices() {
        if depth == 0 && begins && c.is_ascii_alphabetic() {
            words.push(word(&list[at..]));
            begins = false;
        }
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => begins = true,
            _ => {}
        }
    }
    words
}

/// The sets of modules that reach each other.
fn circles(arrows: &BTreeMap<String, BTreeSet<String>>) -> BTreeSet<Vec<String>> {
    let reached = |from: &String| {
        let (mut seen, mut left) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(next) = left.pop() {
            for to in arrows.get(&next).into_iter().flatten() {
                if seen.insert(to.clone()) {
                    left.push(to.clone());
                }
            }
        }
        seen
    };
    let reach: BTreeMap<_, _> = arrows.keys().map(|from| (from, reached(from))).collect();
    let circle = |of: &String| -> Vec<String> {
        let back = |other: &&String| reach.get(*other).is_some_and(|reach| reach.contains(of));
        reach[of].iter().filter(back).cloned().collect()
    };
    arrows.keys().map(circle).filter(|circle| circle.len() > 1).collect()
}

#[test]
fn modules_go_in_no_circle_that_is_not_named() {
    let crates = ["process", "wire", "mem", "proto", "llp", "rnic", "driver", "cm", "rsocket"];
    let found: BTreeSet<_> = crates
        .iter()
        .flat_map(|name| {
            let circles = circles(&arrows(name));
            circles.into_iter().map(move |circle| ((*name).to_owned(), circle))
        })
        .collect();
    let named = CIRCLES.map(|(name, circle)| {
        (name.to_owned(), circle.iter().map(|module| (*module).to_owned()).collect::<Vec<_>>())
    });
    assert_eq!(found, BTreeSet::from(named), "circles that are there, and those that are named");
}

/// A child that is forked while another thread makes such a value waits for that thread for ever. Those of
/// `uwarp_process` make a fork wait instead.
#[test]
fn no_static_is_a_cell_of_the_standard_library() {
    /// Set when the library is loaded.
    const NAMED: [&str; 1] =
        ["crates/driver/src/fork.rs: static INSTALLED: OnceLock<Installed> = OnceLock::new();"];
    let (mut all, mut found) = (Vec::new(), Vec::new());
    for directory in ["process", "wire", "proto", "llp", "rnic", "driver", "cm", "rsocket"] {
        files(&root().join("crates").join(directory).join("src"), &mut all);
    }
    for directory in ["", "iwarp-mode", "verbs-sockets"] {
        files(&root().join("abi").join(directory).join("src"), &mut all);
    }
    assert!(all.len() > 100, "{} files", all.len());
    for file in all {
        let text = fs::read_to_string(&file).expect("a source file");
        let code = text.split("#[cfg(test)]").next().unwrap_or_default();
        for line in code.lines().map(str::trim) {
            let is_static = line.contains("static ") && line.contains(" = ");
            let cell =
                is_static && ["OnceLock<", "LazyLock<", "Lazy<"].iter().any(|kind| line.contains(kind));
            let words = || line.split(|c: char| !c.is_ascii_alphanumeric());
            if cell || line.starts_with("use std::sync::") && words().any(|word| word == "Once") {
                let name = file.strip_prefix(root()).unwrap_or(&file).display().to_string();
                found.push(format!("{name}: {line}"));
            }
        }
    }
    assert_eq!(found, NAMED, "cells of the standard library, and those that are named");
}

/// The connection manager reads the clock at one place, and its machines have no socket, lock, randomness or
/// configuration: a simulator could not drive them otherwise.
#[test]
fn the_connection_managers_machines_have_no_clock_socket_or_lock() {
    const CLOCK: [&str; 4] = ["Instant::now", "SystemTime", "Now::unread", "clock_gettime"];
    const REAL: [&str; 13] = [
        "Mutex",
        "RwLock",
        "Attended",
        "crate::sync",
        "crate::runner",
        "crate::carriers",
        "rustix::net",
        "std::net::Tcp",
        "std::net::Udp",
        "std::thread",
        "random_u",
        "HashMap",
        "Config::get",
    ];
    let source = root().join("crates/cm/src");
    let (mut all, mut clocks, mut real) = (Vec::new(), Vec::new(), Vec::new());
    files(&source, &mut all);
    let machines = all.iter().filter(|file| file.starts_with(source.join("machine"))).count();
    assert!(machines > 15, "{machines} files of machines");
    for file in all.iter().filter(|file| !file.ends_with("testing.rs")) {
        let text = fs::read_to_string(file).expect("a source file");
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let name = file.strip_prefix(&source).unwrap_or(file).display().to_string();
        for line in code.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
            let has = |words: &[&str]| words.iter().any(|word| line.contains(word));
            if has(&CLOCK) {
                clocks.push(format!("{name}: {line}"));
            }
            if name.starts_with("machine") && has(&REAL) {
                real.push(format!("{name}: {line}"));
            }
        }
    }
    assert_eq!(clocks, ["runner.rs: Now::unread()"], "where the connection manager reads the clock");
    assert!(real.is_empty(), "in machines: {real:#?}");
}

/// What the core of a connected queue pair offers, by what it is for. The first three rows are the surface
/// that was planned, some 15 functions. There are more because one decision does not belong to the core:
/// whether a thread continues to receive, sends first, or stands back. The pump and the polling threads ask
/// for single facts on their way. One function that returns all of them would compute more than each caller
/// needs, once for each message; one that takes the decision would move the policy of polling into the core.
const CORE: [&[&str]; 9] = [
    // The five verbs, and the link's part in them.
    &[
        "handle_input",
        "handle_input_counted",
        "handle_timeout",
        "poll_transmit",
        "poll_timeout",
        "poll_action",
    ],
    &["transmitted", "rx_plan", "direct_received", "handle_link", "has_nothing_to_send", "has_action"],
    // Posting.
    &["post_send", "check_send", "post_checked", "post_recv", "resume"],
    // The program's other requests; what others show.
    &["new", "modify", "attach", "disconnect", "leave_gone_peer", "reframe", "has_heard"],
    &["qpn", "query", "psns", "snapshot", "awaits_stream"],
    // Who makes progress, and when.
    &["stalled", "awaits_receive", "sets_aside", "polled_in_vain", "await_ride"],
    // What the ends count.
    &["messages_placed", "messages_wanted", "messages_acked", "messages_acknowledged"],
    // Acknowledgements that cannot wait.
    &["ack_is_urgent", "demand_ack", "expects_ack", "expects_first_message"],
    // For tests near the wrap.
    &["set_msn"],
];

#[test]
fn the_core_of_a_queue_pair_offers_what_is_listed() {
    let mut all = Vec::new();
    files(&root().join("crates/rnic/src/qp/rc"), &mut all);
    let mut found = BTreeSet::new();
    for file in all {
        let text = fs::read_to_string(&file).expect("a source file");
        for part in text.split("\nimpl RcCore {\n").skip(1) {
            let body = part.split("\n}\n").next().unwrap_or_default();
            let functions = body.lines().filter_map(|line| line.strip_prefix("    pub fn "));
            found.extend(functions.map(word));
        }
    }
    let listed: BTreeSet<_> = CORE.iter().flat_map(|row| row.iter().map(|name| (*name).to_owned())).collect();
    assert_eq!(found, listed, "public functions of RcCore, and those that are listed");
}

/// The page of decisions has each of them, with its title.
#[test]
fn every_decision_stands_in_the_index() {
    let directory = root().join("docs/adr");
    let index = fs::read_to_string(directory.join("README.md")).expect("the index");
    let mut pages: Vec<_> = fs::read_dir(&directory).expect("pages").flatten().map(|e| e.path()).collect();
    pages.retain(|page| !page.ends_with("README.md") && !page.ends_with("rejected.md"));
    for page in &pages {
        let name = page.file_name().and_then(|name| name.to_str()).expect("a name");
        let text = fs::read_to_string(page).expect("a page");
        let heading = text.lines().next().unwrap_or_default();
        let title = heading.split_once(": ").map_or("", |(_, title)| title);
        let row = format!("| [{}]({name}) | {title} | 20", &name[..3]);
        assert!(heading.starts_with(&format!("# {}: ", &name[..3])) && index.contains(&row), "no row: {row}");
    }
    assert_eq!(
        index.lines().filter(|line| line.starts_with("| [")).count(),
        pages.len(),
        "rows without a page"
    );
}
