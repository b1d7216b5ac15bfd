//! The names `libuwarp.so` exports.

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn every_name_of_debian_12_and_of_the_newest_rdma_core_is_there_under_its_version() {
    let check = Command::new(common::root().join("scripts/check-symbols"))
        .arg(common::library().join("libuwarp.so"))
        .output()
        .expect("scripts/check-symbols runs");
    assert!(
        check.status.success(),
        "{}{}",
        String::from_utf8_lossy(&check.stdout),
        String::from_utf8_lossy(&check.stderr)
    );
}

#[test]
fn both_libraries_are_one_object_to_the_loader() {
    common::passes("loader", &["-ldl"]);
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] }).collect()
}

/// The words of a file that are code: comments, strings and tests left out.
fn words(text: &str) -> Vec<&str> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    let outside_strings = lines.flat_map(|line| line.split('"').step_by(2));
    outside_strings.flat_map(|part| part.split(|c: char| !(c.is_alphanumeric() || c == '_'))).collect()
}

/// A program may bring a function of the same name; ours must not call that.
#[test]
fn no_exported_function_is_used_from_inside() {
    let table = std::fs::read_to_string(common::root().join("abi/symbols.txt")).unwrap();
    let names: BTreeSet<_> = table.lines().filter_map(|line| line.split_whitespace().next()).collect();
    let names: BTreeSet<_> = names
        .into_iter()
        .filter(|name| ["ibv_", "_ibv_", "rdma_", "uwarpdv_", "uwarp_"].iter().any(|p| name.starts_with(p)))
        .collect();
    assert!(names.len() > 100, "{names:?}");
    let mut used = Vec::new();
    for file in sources(&common::root().join("abi/src")) {
        if file.ends_with("rdmacm/tests.rs") {
            continue;
        }
        let text = std::fs::read_to_string(&file).unwrap();
        let words: Vec<_> = words(&text).into_iter().filter(|word| !word.is_empty()).collect();
        let uses = words.windows(2).filter(|pair| pair[0] != "fn" && names.contains(pair[1]));
        used.extend(uses.map(|pair| format!("{}: {}", file.display(), pair[1])));
    }
    assert_eq!(used, Vec::<String>::new());
}
