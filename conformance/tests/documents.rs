//! What the documents say of files, of tests, and of the rights of the process.

#[path = "documents/guide.rs"]
mod guide;
#[path = "documents/readme.rs"]
mod readme;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use uwarp_conformance::dist::Dist;
use uwarp_conformance::process::Cmd;
use uwarp_conformance::requirements::is_test;
use uwarp_conformance::{Context, Outcome, cc, fail, require};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Links of the form ``[`name`](../file.rs)``: names and files.
fn named_tests(text: &str) -> Vec<(String, String)> {
    text.split("[`")
        .skip(1)
        .filter_map(|rest| {
            let (name, rest) = rest.split_once("`](../")?;
            let (file, _) = rest.split_once(')')?;
            let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
            (is_name && file.ends_with(".rs")).then(|| (name.to_owned(), file.to_owned()))
        })
        .collect()
}

#[test]
fn every_test_that_the_security_page_names_exists() {
    let read = |file: &str| fs::read_to_string(root().join(file)).unwrap_or_else(|e| panic!("{file}: {e}"));
    let page = read("docs/security.md");
    let attacks = read("conformance/tests/hostile/main.rs");
    let tests = named_tests(&page);
    assert!(tests.len() > 60, "the page names {} tests; has its form changed?", tests.len());
    let missing: Vec<_> =
        tests.iter().filter(|(name, file)| !is_test(name, file, &read(file), &attacks)).collect();
    assert!(missing.is_empty(), "docs/security.md names tests that are not there: {missing:?}");
}

/// Every row of its tables of attacks names a test, or says why there is none.
#[test]
fn every_attack_of_the_security_page_has_a_test() {
    let page = fs::read_to_string(root().join("docs/security.md")).expect("docs/security.md");
    let (mut of_attacks, mut attacks) = (false, 0);
    for line in page.lines() {
        if !line.starts_with('|') {
            of_attacks = false;
        } else if line.ends_with("| test |") {
            of_attacks = true;
        } else if of_attacks && !line.starts_with("|---") {
            attacks += 1;
            let last = line.trim_end_matches('|').rsplit('|').next().unwrap_or("").trim();
            assert!(last.starts_with("[`") || last.starts_with("not tested: "), "no test: {line}");
        }
    }
    assert!(attacks > 30, "{attacks} attacks found; has the form of the tables changed?");
}

/// And every attack that is tried stands on the page, so that it does not fall behind.
#[test]
fn every_attack_stands_on_the_security_page() {
    let page = fs::read_to_string(root().join("docs/security.md")).expect("docs/security.md");
    let tests = named_tests(&page);
    let attacks = fs::read_to_string(root().join("conformance/tests/hostile/main.rs")).expect("the attacks");
    let names: Vec<(&str, &str)> = attacks
        .lines()
        .flat_map(|line| line.split_whitespace())
        .filter_map(|word| word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).split_once("::"))
        .filter(|(module, _)| {
            let modules = ["setup", "client", "fields", "rows", "sequences", "endings", "floods"];
            modules.contains(module) || ["by_number", "lookups", "adoption", "parts"].contains(module)
        })
        .collect();
    assert!(names.len() > 50, "{} attacks found; has the list's form changed?", names.len());
    let missing: Vec<_> = names
        .iter()
        .filter(|(module, name)| {
            let file = format!("conformance/tests/hostile/{module}.rs");
            !tests.iter().any(|(n, f)| n == name && *f == file)
        })
        .collect();
    assert!(missing.is_empty(), "docs/security.md does not mention {missing:?}");
}

/// The pages that people read, and the directory that links on each are relative to.
fn pages() -> Vec<PathBuf> {
    let directories = ["", "docs", "docs/adr", "conformance", "conformance/siw", "fuzz"];
    let files = directories.iter().flat_map(|directory| {
        let entries = fs::read_dir(root().join(directory)).unwrap_or_else(|e| panic!("{directory}: {e}"));
        entries.filter_map(|entry| Some(entry.ok()?.path()))
    });
    files.filter(|file| file.extension().is_some_and(|extension| extension == "md")).collect()
}

/// `a/{b,c}.rs` is two names.
fn spelled_out(name: &str) -> Vec<String> {
    let braces = name.split_once('{').and_then(|(head, rest)| Some((head, rest.split_once('}')?)));
    match braces {
        Some((head, (names, tail))) => names.split(',').map(|name| format!("{head}{name}{tail}")).collect(),
        None => vec![name.to_owned()],
    }
}

/// Files that a page names: where its links lead, and what stands in back quotes and begins with a directory
/// of the tree.
fn named_files(page: &Path, text: &str) -> Vec<PathBuf> {
    const TREE: [&str; 7] = ["abi", "conformance", "crates", "docs", "fuzz", "scripts", "tools"];
    let links = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    let links = links.filter(|link| !link.is_empty() && !link.contains("://"));
    let links = links.map(|link| page.with_file_name(link));
    let quoted = text.split('`').skip(1).step_by(2).flat_map(str::split_whitespace);
    let quoted = quoted.map(|word| word.trim_end_matches([',', '.', ';', ':']));
    let in_tree = |word: &&str| word.split_once('/').is_some_and(|(head, _)| TREE.contains(&head));
    let names =
        quoted.filter(in_tree).filter(|word| !word.contains(['*', '…', '=', '('])).flat_map(spelled_out);
    // Inputs of the fuzzers are named by what they are for.
    let names = names.filter(|name| !name.contains("TARGET")).map(|name| root().join(name));
    links.chain(names).collect()
}

/// `docs/adr/004` stands for the page that begins so.
fn is_there(file: &Path) -> bool {
    let begins = |entry: fs::DirEntry| {
        let (name, wanted) = (entry.file_name(), file.file_name().unwrap_or_default());
        name.to_string_lossy().starts_with(&format!("{}-", wanted.to_string_lossy()))
    };
    let siblings = || fs::read_dir(file.parent()?).ok();
    file.exists() || siblings().is_some_and(|entries| entries.flatten().any(begins))
}

#[test]
fn every_file_that_a_page_names_exists() {
    let (mut names, mut missing) = (0, Vec::new());
    for page in pages() {
        let text = fs::read_to_string(&page).unwrap_or_else(|e| panic!("{}: {e}", page.display()));
        let files = named_files(&page, &text);
        names += files.len();
        missing.extend(files.into_iter().filter(|file| !is_there(file)).map(|file| (page.clone(), file)));
    }
    assert!(names > 150, "the pages name {names} files; has their form changed?");
    assert!(missing.is_empty(), "pages name files that are not there: {missing:#?}");
}

/// All files of a directory and below whose name ends so.
fn files_below(directory: &str, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![root().join(directory)];
    while let Some(directory) = left.pop() {
        let entries = fs::read_dir(&directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
        for path in entries.map(|entry| entry.expect("an entry").path()) {
            if path.is_dir() {
                left.push(path);
            } else if path.extension().unwrap_or_default() == extension {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

/// A path as pages write it.
fn from_root(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// The rank that the type of a lock has: the last argument of `Mutex<…>` and its like.
fn rank(declaration: &str) -> Option<u32> {
    let mut depth = 0;
    let mut end = None;
    for (at, c) in declaration.char_indices() {
        match c {
            '<' => depth += 1,
            '>' => depth -= 1,
            _ => continue,
        }
        if depth == 0 {
            end = Some(at);
            break;
        }
    }
    declaration[..end?].rsplit(['<', ',']).next()?.trim().parse().ok()
}

/// The rows of docs/locks.md are the locks of the code, name by name and file by file, with their ranks.
#[test]
fn every_lock_stands_on_the_page_of_locks() {
    const KINDS: [&str; 5] = ["RawMutex<", "OncePerProcess<", "Mutex<", "RwLock<", "Attended<"];
    /// Made of locks that are on the page, or written once.
    const NONE: [&str; 3] = ["Attended", "OncePerProcess", "VALUE"];
    let mut locks = Vec::new();
    for directory in [
        "abi/src",
        "abi/sockets/src",
        "abi/verbs-sockets/src",
        "crates/cm/src",
        "crates/driver/src",
        "crates/rnic/src",
        "crates/llp/src",
        "crates/process/src",
        "crates/rsocket/src",
    ] {
        let files = files_below(directory, "rs");
        // What locks are made of.
        let made_of = |file: &Path| file.ends_with("process/src/locks.rs");
        for file in files.iter().filter(|file| !file.ends_with("tests.rs") && !made_of(file)) {
            let text = fs::read_to_string(file).expect("a source file");
            let code = text.split("#[cfg(test)]").next().unwrap_or("");
            // Fields, variants and statics; not what functions are given or make for themselves.
            let lines = code.lines().map(str::trim_start).filter(|line| {
                let lock = KINDS.iter().any(|kind| line.contains(kind));
                let code = ["//", "use ", "fn ", "pub fn", "impl", "let ", "pub(crate) use", "pub type"];
                lock && !code.iter().any(|start| line.starts_with(start))
            });
            for line in lines.filter(|line| !line.contains("-> ") && !line.contains("MutexGuard")) {
                let words = line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                let declared = ["pub", "crate", "super", "static", "struct", "Numbers", "port", "u16", ""];
                let name = words.into_iter().find(|word| !declared.contains(word)).unwrap_or_default();
                let of_attended = name == "inner" && file.ends_with("driver/src/attended.rs");
                if !NONE.contains(&name) && !of_attended {
                    let kind = KINDS.iter().filter_map(|kind| line.find(kind)).min();
                    let rank = kind.and_then(|at| rank(&line[at..]));
                    let rank = rank.map_or("none".to_owned(), |rank| rank.to_string());
                    locks.push(format!("{name} in {}, rank {rank}", from_root(file)));
                }
            }
        }
    }
    let page = fs::read_to_string(root().join("docs/locks.md")).expect("docs/locks.md");
    let rows = page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| rank"));
    let mut named = Vec::new();
    for row in rows {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let quoted =
            |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
        let numbers = |cell: &str| -> Vec<u32> {
            cell.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
        };
        let rank = numbers(cells[1])[0];
        assert!(numbers(cells[5]).iter().all(|&after| after > rank), "not in order: {row}");
        for file in quoted(cells[3]) {
            named.extend(quoted(cells[2]).iter().map(|name| format!("{name} in {file}, rank {rank}")));
        }
    }
    locks.sort();
    locks.dedup();
    named.sort();
    assert!(locks.len() > 40, "{} locks found; has their form changed?", locks.len());
    let missing: Vec<_> = locks.iter().filter(|lock| !named.contains(lock)).collect();
    let gone: Vec<_> = named.iter().filter(|lock| !locks.contains(lock)).collect();
    assert!(
        missing.is_empty() && gone.is_empty(),
        "not on docs/locks.md: {missing:#?}\nnot in the code: {gone:#?}"
    );
}

/// What the repository holds of text that people write.
fn sources() -> Vec<PathBuf> {
    let mut files = vec![root().join("Makefile")];
    for directory in ["abi", "conformance", "crates", "docs", "fuzz", "scripts", "tools"] {
        for extension in ["rs", "c", "h", "md", "in", "lua", ""] {
            files.extend(files_below(directory, extension));
        }
    }
    files.extend(pages());
    files.sort();
    files.dedup();
    files.retain(|file| !["/target/", "/corpus/"].iter().any(|part| from_root(file).contains(part)));
    files
}

/// Files of `docs` that code, scripts and pages name, in any form: `docs/adr/004`, "ADR 004", a page and its
/// section.
#[test]
fn every_decision_and_section_that_is_named_exists() {
    let (mut names, mut missing) = (0, Vec::new());
    for file in sources() {
        // (What is no text has no names.)
        let Ok(text) = fs::read_to_string(&file) else { continue };
        // A comment may go on in the next line, and the name with it.
        let text: Vec<_> =
            text.split_whitespace().filter(|word| !["//", "///", "//!", "#", "*"].contains(word)).collect();
        let text = text.join(" ");
        let mut named = Vec::new();
        for rest in text.split("docs/").skip(1) {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && !"-_./".contains(c));
            let name = rest[..end.unwrap_or(rest.len())].trim_end_matches(['.', '/']);
            named.push(format!("docs/{name}"));
            let section = rest.strip_prefix(name).and_then(|rest| rest.strip_prefix(", \""));
            if let Some((section, _)) = section.and_then(|rest| rest.split_once('"')) {
                let page = fs::read_to_string(root().join("docs").join(name)).unwrap_or_default();
                names += 1;
                if !page.lines().any(|line| line.trim_start_matches('#').trim() == section) {
                    missing.push(format!("{}: \"{section}\" of docs/{name}", from_root(&file)));
                }
            }
        }
        for rest in text.split("ADR ").skip(1) {
            let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
            if number.len() == 3 {
                named.push(format!("docs/adr/{number}"));
            }
        }
        names += named.len();
        let gone = named.into_iter().filter(|name| !is_there(&root().join(name)));
        missing.extend(gone.map(|name| format!("{}: {name}", from_root(&file))));
    }
    assert!(names > 150, "{names} names found; has their form changed?");
    assert!(missing.is_empty(), "named and not there: {missing:#?}");
}

/// Rustfmt leaves comments and strings as they are, so it does not see every long line.
#[test]
fn lines_and_functions_are_not_longer_than_the_rules_say() {
    const COLUMNS: usize = 110;
    const LINES: usize = 80;
    let (mut long_lines, mut long_functions) = (Vec::new(), Vec::new());
    for directory in ["abi", "conformance", "crates", "fuzz", "tools"] {
        let files = files_below(directory, "rs");
        for file in files.iter().filter(|file| !from_root(file).contains("/target/")) {
            let text = fs::read_to_string(file).expect("a source file");
            let lines: Vec<_> = text.lines().collect();
            for (number, line) in (1..).zip(&lines) {
                if line.chars().count() > COLUMNS {
                    long_lines.push(format!("{}:{number}", from_root(file)));
                }
                let start = line.trim_start();
                let begins = ["fn ", "pub fn ", "pub(", "const fn ", "unsafe fn ", "verb fn ", "async fn "]
                    .iter()
                    .any(|word| start.starts_with(word));
                if !(begins && start.contains("fn ") && !line.ends_with(['}', ';'])) {
                    continue;
                }
                // Rustfmt puts the end below the beginning.
                let end = format!("{}}}", &line[..line.len() - start.len()]);
                let rest = &lines[number..];
                let body = rest.iter().position(|line| line.ends_with('{') || line.starts_with(&end));
                let Some(last) = rest.iter().position(|line| **line == end) else { continue };
                let first = if line.ends_with('{') { 0 } else { body.map_or(0, |at| at + 1) };
                if last.saturating_sub(first) > LINES {
                    long_functions.push(format!("{}:{number}: {start}", from_root(file)));
                }
            }
        }
    }
    assert!(long_functions.is_empty(), "functions of more than {LINES} lines: {long_functions:#?}");
    assert!(long_lines.is_empty(), "lines that go beyond column {COLUMNS}: {long_lines:#?}");
}

/// Found while the security page was written: whoever calls a setuid program chooses its environment.
#[test]
fn the_trace_of_a_program_with_more_rights_than_its_caller_is_not_written() {
    fn run() -> Outcome {
        let dist = Dist::find()?;
        // Where another user gets to.
        let dir = std::env::temp_dir().join(format!("uwarp-secure-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).context("a directory")?;
        let result = compare(&dist, &dir);
        let _ = fs::remove_dir_all(&dir);
        result
    }

    fn compare(dist: &Dist, dir: &Path) -> Outcome {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o777)).context("rights")?;
        for name in ["libibverbs.so.1", "librdmacm.so.1"] {
            fs::copy(dist.lib().join(name), dir.join(name)).context(name)?;
        }
        let program = cc::build_with("opens", dir, &format!("-Wl,-rpath,{}", dir.display()))?;
        for (mode, secure) in [(0o755, "secure 0"), (0o4755, "secure 1")] {
            fs::set_permissions(&program, fs::Permissions::from_mode(mode)).context("rights")?;
            let trace = dir.join("trace");
            let cmd = Cmd::new(&program).env("UWARP_TRACE", &trace).unset("LD_LIBRARY_PATH").as_user(65_534);
            let out = cmd.run_ok()?;
            if !out.stdout.contains(secure) {
                fail!(
                    "mode {mode:o}: wanted \"{secure}\" (run as root, on a file system that heeds setuid)\n\
                     {}",
                    out.text()
                )
            }
            let written = trace.exists();
            require!(written == (mode == 0o755), "mode {mode:o}: the trace was written: {written}");
            let _ = fs::remove_file(&trace);
        }
        Ok(())
    }

    if let Err(failure) = run() {
        panic!("{failure}");
    }
}
