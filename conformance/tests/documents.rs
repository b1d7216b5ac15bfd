//! What the documents say of files, of tests, and of the rights of the process.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use uwarp_conformance::dist::Dist;
use uwarp_conformance::process::Cmd;
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

/// Whether `text` has a test of this name, or `attacks` a line for it.
fn is_test(name: &str, file: &str, text: &str, attacks: &str) -> bool {
    if let Some(module) = file.strip_prefix("conformance/tests/hostile/").and_then(|f| f.strip_suffix(".rs"))
    {
        return attacks.contains(&format!("{module}::{name},"));
    }
    let Some(at) = text.find(&format!("fn {name}(")) else { return false };
    // The attribute stands above, other attributes and comments between.
    let before = text[..at].lines().rev().take(4).collect::<Vec<_>>();
    before.iter().any(|line| line.contains("#[test]"))
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
    let mut of_attacks = false;
    for line in page.lines() {
        if !line.starts_with('|') {
            of_attacks = false;
        } else if line.ends_with("| test |") {
            of_attacks = true;
        } else if of_attacks && !line.starts_with("|---") {
            let last = line.trim_end_matches('|').rsplit('|').next().unwrap_or("").trim();
            assert!(last.starts_with("[`") || last.starts_with("not tested: "), "no test: {line}");
        }
    }
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
            ["setup", "client", "fields", "rows", "sequences", "endings", "floods"].contains(module)
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

/// Files that a page names: where its links lead, and what stands in back quotes and begins with a directory of the tree.
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
                    "mode {mode:o}: wanted \"{secure}\" (run as root, on a file system that heeds setuid)\n{}",
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
