//! The requirements of the RFCs, and their tests, as docs/requirements.md has them: one table for each RFC.

use std::path::Path;

/// A file of the tree, and in it the name of a test function or the quoted name of a row of a table of tests.
pub type Test = (String, String);

/// What the page says of one RFC.
#[derive(Debug, Default)]
pub struct Rfc {
    /// Its number.
    pub number: String,
    /// Every section that holds a MUST, MUST NOT, SHALL, SHALL NOT or REQUIRED. Sections that only explain
    /// the words are left out.
    pub sections: Vec<String>,
    /// The requirements.
    pub rows: Vec<Row>,
}

/// One requirement.
#[derive(Debug)]
pub struct Row {
    /// The section it stands in.
    pub section: String,
    /// The requirement, in our own words.
    pub text: String,
    /// Who must keep it.
    pub binds: String,
    /// How it is shown to be kept.
    pub status: String,
    /// The tests, or the reason.
    pub shown: String,
}

const BINDS: [&str; 6] = ["sender", "receiver", "initiator", "responder", "ULP", "implementation"];
/// In the order of the first summary's columns.
const STATUSES: [&str; 4] = ["tested", "by construction", "not applicable", GAP];
const GAP: &str = "**gap**";

/// Reads the tables of a page. A row that has not five cells is a mistake.
pub fn read(page: &str) -> Result<Vec<Rfc>, String> {
    let mut rfcs: Vec<Rfc> = Vec::new();
    for line in page.lines() {
        if let Some(title) = line.strip_prefix("## RFC ") {
            let number = title.split(':').next().unwrap_or_default().to_owned();
            rfcs.push(Rfc { number, ..Rfc::default() });
            continue;
        }
        let Some(rfc) = rfcs.last_mut() else { continue };
        if let Some(sections) = line.strip_prefix("Sections with requirements: ") {
            rfc.sections = sections.trim_end_matches('.').split(", ").map(str::to_owned).collect();
        } else if line.starts_with("| ") && !line.starts_with("| section |") {
            let cells: Vec<_> = line.trim_matches('|').split(" | ").map(|c| c.trim().to_owned()).collect();
            let Ok([section, text, binds, status, shown]) = <[String; 5]>::try_from(cells) else {
                return Err(format!("not five cells: {line}"));
            };
            rfc.rows.push(Row { section, text, binds, status, shown });
        }
    }
    Ok(rfcs)
}

impl Row {
    /// The tests that its links name.
    pub fn tests(&self) -> Vec<Test> {
        let links = self.shown.split("[`").skip(1);
        let test = |link: &str| {
            let (name, rest) = link.split_once("`](../")?;
            Some((rest.split_once(')')?.0.to_owned(), name.to_owned()))
        };
        links.filter_map(test).collect()
    }
}

/// The mistakes of the page, one line for each.
pub fn mistakes(root: &Path, page: &str) -> Vec<String> {
    let rfcs = match read(page) {
        Ok(rfcs) => rfcs,
        Err(mistake) => return vec![mistake],
    };
    let mut wrong = Vec::new();
    for rfc in &rfcs {
        let name = format!("RFC {}", rfc.number);
        for section in &rfc.sections {
            if !rfc.rows.iter().any(|row| row.section == *section) {
                wrong.push(format!("{name} section {section} has requirements, and no row"));
            }
        }
        for row in &rfc.rows {
            let at = format!("{name} section {}, \"{}\"", row.section, row.text);
            wrong.extend(mistakes_of_row(root, rfc, row).into_iter().map(|what| format!("{at}: {what}")));
        }
        let count = |status: &str| rfc.rows.iter().filter(|row| row.status == status).count().to_string();
        let counts = STATUSES.map(count).join(" | ");
        let summary = format!(") | {} | {counts} |", rfc.rows.len());
        let begins = format!("| [{}](", rfc.number);
        if !page.lines().any(|line| line.starts_with(&begins) && line.ends_with(&summary)) {
            wrong.push(format!("{name}: the first table must have {summary}"));
        }
    }
    let gaps = rfcs.iter().flat_map(|rfc| {
        let gaps = rfc.rows.iter().filter(|row| row.status == GAP);
        gaps.map(|row| format!("- RFC {} section {}: {} – {}.", rfc.number, row.section, row.text, row.shown))
    });
    let gaps: Vec<_> = gaps.collect();
    let listed: Vec<_> = page.lines().filter(|line| line.starts_with("- RFC ")).collect();
    if gaps != listed {
        wrong.push(format!("the list of gaps must be:\n{}", gaps.join("\n")));
    }
    wrong
}

fn mistakes_of_row(root: &Path, rfc: &Rfc, row: &Row) -> Vec<String> {
    let mut wrong = Vec::new();
    if !rfc.sections.contains(&row.section) {
        wrong.push("the section is not in the list of sections".to_owned());
    }
    if !BINDS.contains(&row.binds.as_str()) {
        wrong.push(format!("it binds {}, which is nobody", row.binds));
    }
    match row.status.as_str() {
        "tested" => {
            let tests = row.tests();
            if tests.is_empty() {
                wrong.push("tested, and no test is named".to_owned());
            }
            let missing = tests.iter().filter(|test| !exists(root, test));
            wrong.extend(missing.map(|(file, test)| format!("there is no test {test} in {file}")));
        }
        status if !STATUSES.contains(&status) => wrong.push(format!("{status} is no status")),
        status if row.shown.is_empty() => wrong.push(format!("{status} without a reason")),
        _ => {}
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
