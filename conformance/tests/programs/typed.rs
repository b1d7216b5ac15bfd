//! A command that a row ran, as a user would type it: `uwarp run`, with its options in the place of
//! variables, and words in the place of what differs from run to run.

use std::path::Path;

use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::Veth;
use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::is_given_port;

use super::mpis;

/// The library's variable that has no option.
const PEER: &str = "UWARP_PEER";
/// The option that can be without a value, which only follows `=`.
const SOCKETS: &str = "sockets";

/// Addresses of the places where programs meet, and what stands for them.
const ADDRESSES: [(&str, &str); 8] = [
    (Veth::SERVER4, "SERVER"),
    (Veth::CLIENT4, "CLIENT"),
    (Veth::SERVER6, "SERVER"),
    (Veth::CLIENT6, "CLIENT"),
    (Veth::SECOND_SERVER4, "SERVER2"),
    (Veth::SECOND_CLIENT4, "CLIENT2"),
    ("127.0.0.1", "SERVER"),
    ("::1", "SERVER"),
];

/// A command of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Typed {
    pub line: String,
    /// Options of `uwarp run`, with their values.
    pub options: Vec<(String, String)>,
}

impl Typed {
    /// What was run over uwarp; `None` for other commands, such as a compiler's.
    pub fn new(cmd: &Cmd, dist: &Dist) -> Option<Typed> {
        let uwarp = dist.uwarp().ok()?.display().to_string();
        let mut words: Vec<String> = cmd.words().collect();
        let mut options = Vec::new();
        let mut variables = Vec::new();
        let mut over_uwarp = false;
        for (name, value) in cmd.variables() {
            match (name.as_str(), name.strip_prefix("UWARP_")) {
                ("LD_LIBRARY_PATH", _) => over_uwarp = true,
                ("TMPDIR" | "XDG_RUNTIME_DIR", _) => {}
                ("UWARP_VIEW", _) => options.push(("as".to_owned(), value)),
                (_, Some(rest)) if name != PEER => {
                    options.push((rest.to_lowercase().replace('_', "-"), plain(&value)));
                }
                _ => variables.push(format!("{name}={}", quoted(&plain(&value)))),
            }
        }
        if words[0] == uwarp {
            over_uwarp = true;
            words.remove(0);
            if words.first().is_some_and(|word| word == "run") {
                let end = words.iter().position(|word| word == "--").unwrap_or(0);
                let given: Vec<String> = words.drain(..=end).collect();
                options.extend(given_options(&given[1..end.max(1)]));
            } else {
                words.insert(0, "uwarp".to_owned());
                return Some(Typed { line: joined(&variables, &words), options });
            }
        }
        if !over_uwarp {
            return None;
        }
        let mut front = vec!["uwarp".to_owned(), "run".to_owned()];
        for (name, value) in &options {
            match name.as_str() {
                SOCKETS if value.is_empty() => front.push(format!("--{name}")),
                SOCKETS => front.push(format!("--{name}={value}")),
                _ => front.extend([format!("--{name}"), value.clone()]),
            }
        }
        front.push("--".to_owned());
        front.append(&mut words);
        Some(Typed { line: joined(&variables, &front), options })
    }
}

/// Options of `uwarp run` with their values.
fn given_options(words: &[String]) -> Vec<(String, String)> {
    let mut words = words.iter();
    let mut options = Vec::new();
    while let Some(word) = words.next() {
        let name = word.trim_start_matches('-');
        let (name, value) = match name.split_once('=') {
            Some(pair) => pair,
            None if name == SOCKETS => (name, ""),
            None => (name, words.next().map_or("", String::as_str)),
        };
        options.push((name.to_owned(), plain(value)));
    }
    options
}

/// Variables, and a program with its arguments.
fn joined(variables: &[String], words: &[String]) -> String {
    let words = words.iter().map(|word| quoted(&plain(word)));
    variables.iter().cloned().chain(words).collect::<Vec<_>>().join(" ")
}

/// In quotes if a shell would take it for more than one word.
fn quoted(word: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(harmless) { word.to_owned() } else { format!("'{word}'") }
}

/// Without what differs from run to run: directories, ports, namespaces and addresses.
fn plain(word: &str) -> String {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("/"));
    let mut word = word.replace(env!("CARGO_TARGET_TMPDIR"), "DIR");
    word = word.replace(&format!("{}/", tree.display()), "");
    if let Some(prefix) = mpis::mvapich2() {
        word = word.replace(&prefix.display().to_string(), "PREFIX");
    }
    let scratch = format!("{}/uwarp-conformance-{}-", std::env::temp_dir().display(), std::process::id());
    while let Some(at) = word.find(&scratch) {
        let end =
            word[at + scratch.len()..].find(['/', ',', ' ']).map_or(word.len(), |n| at + scratch.len() + n);
        word.replace_range(at..end, "DIR");
    }
    let namespace = format!("uwarp-t{}-", std::process::id());
    while let Some(at) = word.find(&namespace) {
        let rest = &word[at + namespace.len()..];
        let digits = rest.chars().take_while(char::is_ascii_digit).count();
        word.replace_range(at..at + namespace.len() + digits, "NAMESPACE");
    }
    let mut out = String::new();
    let mut rest = word.as_str();
    while let Some(first) = rest.chars().next() {
        let part = rest.find(|c: char| !is_of_address(c)).unwrap_or(rest.len());
        if part == 0 {
            out.push(first);
            rest = &rest[first.len_utf8()..];
        } else {
            out += &without_address(&rest[..part]);
            rest = &rest[part..];
        }
    }
    out
}

fn is_of_address(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '.' || c == ':'
}

/// A number, an address, an address and a port, or something else.
fn without_address(text: &str) -> String {
    let named = |address: &str| ADDRESSES.iter().find(|(a, _)| *a == address).map(|(_, name)| *name);
    let is_port = |text: &str| text.parse().is_ok_and(is_given_port);
    if let Some(name) = named(text) {
        return name.to_owned();
    }
    if is_port(text) {
        return "PORT".to_owned();
    }
    // "rdma:10.55.0.1:20001", for example.
    match text.split_once(':') {
        Some((head, tail)) if !text.contains("::") => {
            format!("{}:{}", without_address(head), without_address(tail))
        }
        _ => text.to_owned(),
    }
}
