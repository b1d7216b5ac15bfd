//! docs/requirements.md: its rows are complete, and the tests that they name are in the tree.

use std::path::{Path, PathBuf};

use uwarp_conformance::requirements::{exists, is_test, mistakes, read};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn page() -> String {
    std::fs::read_to_string(root().join("docs/requirements.md")).expect("docs/requirements.md")
}

#[test]
fn every_requirement_has_its_test_or_its_reason() {
    let page = page();
    let rfcs = read(&page).expect("the page's tables");
    let (rows, sections): (usize, usize) =
        (rfcs.iter().map(|rfc| rfc.rows.len()).sum(), rfcs.iter().map(|rfc| rfc.sections.len()).sum());
    assert!(rows > 150 && sections > 60, "{rows} rows, {sections} sections; has the page's form changed?");
    let wrong = mistakes(&root(), &page);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The check itself: each change of the page is found.
#[test]
fn what_is_wrong_on_the_page_is_found() {
    let page = page();
    for (from, to, found) in [
        ("[`control_bytes`]", "[`control_bites`]", "there is no test control_bites"),
        ("| tested | [", "| attested | [", "attested is no status"),
        ("| sender | ", "| sendor | ", "it binds sendor, which is nobody"),
        ("Sections with requirements: 3.1, ", "Sections with requirements: ", "section 3.1,"),
        (
            "Sections with requirements: 3.1, ",
            "Sections with requirements: 3.1, 9.9, ",
            "section 9.9 has requi",
        ),
        ("| **gap** |", "| by construction |", "the list of gaps must be"),
        ("| by construction | no ", "| not applicable | no ", "the first table must have"),
    ] {
        assert!(page.contains(from), "no {from:?} on the page");
        let wrong = mistakes(&root(), &page.replacen(from, to, 1)).join("\n");
        assert!(wrong.contains(found), "{from:?} instead of {to:?}: no {found:?} in:\n{wrong}");
    }
}

/// A name that is no test is found out.
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
    assert!(!exists(&root(), &("crates/nowhere.rs".to_owned(), "one".to_owned())));
}
