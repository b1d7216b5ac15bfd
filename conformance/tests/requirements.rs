//! The tables of requirements, and the page made of them.

use std::path::{Path, PathBuf};

use uwarp_conformance::report::write_if_changed;
use uwarp_conformance::requirements::{RFCS, exists, is_test, mistakes, page};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn every_requirement_has_its_test_or_its_reason() {
    let rows: usize = RFCS.iter().map(|rfc| rfc.rows.len()).sum();
    assert!(rows > 150, "{rows} rows; has the form of the tables changed?");
    let wrong = mistakes(&root());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_page_is_what_the_tables_say() {
    let file = root().join("docs/requirements.md");
    if std::env::var_os("REQUIREMENTS").is_some_and(|what| what == "write") {
        write_if_changed(&file, &page()).expect("docs/requirements.md can be written");
    }
    let written = std::fs::read_to_string(&file).unwrap_or_default();
    // Not both texts in full.
    assert!(
        written == page(),
        "docs/requirements.md is stale; write it again with \
         REQUIREMENTS=write cargo test -p uwarp-conformance --test requirements"
    );
}

/// The check itself: a name that is no test is found out.
#[test]
fn what_is_no_test_is_told_from_one() {
    let text = "fn one(\n\n\n\n#[test]\nfn one() {}\n\n\n\n\nfn helper() {}\nrow(\"a row\")\n\
                pub fn attack(v: u8) {}";
    let attacks = "fields::attack,";
    let hostile = "conformance/tests/hostile/fields.rs";
    assert!(is_test("one", "crates/x.rs", text, attacks));
    assert!(is_test("a row", "crates/x.rs", text, attacks));
    assert!(!is_test("helper", "crates/x.rs", text, attacks), "no attribute");
    assert!(!is_test("gone", "crates/x.rs", text, attacks));
    assert!(is_test("attack", hostile, text, attacks));
    assert!(!is_test("one", hostile, text, attacks), "not in the list of attacks");
    assert!(!exists(&root(), &("crates/nowhere.rs", "one")));
}
