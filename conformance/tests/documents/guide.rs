//! docs/writing-programs.md: its programs are built and run from the page; the one in Rust with
//! `make programs` alone, because its bindings are made from rdma-core's sources first: half a minute.
//! docs/troubleshooting.md: the lines of uwarp that it explains are lines that uwarp writes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use uwarp_conformance::process::Cmd;
use uwarp_conformance::{Context, Failure, Outcome, fail, require};

use super::readme::{Place, Shown, are_installed, blocks, commands};
use super::{files_below, root};

fn page(name: &str) -> String {
    fs::read_to_string(root().join("docs").join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn the_programs_of_the_guide_are_built_and_run() {
    if let Err(Failure(why)) = run() {
        panic!("{why}");
    }
}

fn run() -> Outcome {
    let (text, place) = (page("writing-programs.md"), Place::new("guide")?);
    for (language, file) in [("c", "numbers.c"), ("toml", "Cargo.toml"), ("rust", "src/main.rs")] {
        let [program] = blocks(&text, language)[..] else { fail!("not one program in {language}") };
        fs::create_dir_all(place.home.join("src")).context("src")?;
        fs::write(place.home.join(file), program).context(file)?;
    }
    // What the crates need is what it was when the page was written.
    let lock = root().join("conformance/data/guide/Cargo.lock");
    fs::copy(lock, place.home.join("Cargo.lock")).context("the lock file")?;
    let all = commands(&text);
    require!(all.len() == 13, "{} commands in the guide; has its form changed?", all.len());
    let Some(in_rust) = all.iter().position(|shown| shown.command == "cargo build") else { fail!("no Rust") };
    let thorough = std::env::var_os("PROGRAMS").is_some_and(|size| size == "full");
    let mut left = if thorough { &all[..] } else { &all[..in_rust] }.iter();
    while let Some(shown) = left.next() {
        let command = shown.command.as_str();
        match command {
            _ if command.starts_with("sudo apt-get install ") => are_installed(command)?,
            _ if command.starts_with("cc ") => drop(place.client(command).run_ok()?),
            "cargo build" => build(&place)?,
            _ if command.starts_with("uwarp run -- ") && command.contains(" server ") => {
                let client: &Shown = left.next().ok_or_else(|| Failure("no client".to_owned()))?;
                let port = if command.contains("numbers") { 7472 } else { 7471 };
                place.on_one_host(shown, client, port)?;
            }
            _ => fail!("the guide shows a command that this test does not know: {command}"),
        }
    }
    Ok(())
}

/// By the toolchain that builds this test; what is built once is kept for the next time.
fn build(place: &Place) -> Outcome {
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guide");
    fs::create_dir_all(&kept).context("a directory")?;
    std::os::unix::fs::symlink(&kept, place.home.join("target")).context("a link")?;
    let build = Cmd::line("sh -c").arg(format!("cd {} && cargo build --locked", place.home.display()));
    let build = build.unset("CARGO_TARGET_DIR").unset("RUSTFLAGS").limit(Duration::from_secs(1200));
    build.run_ok().map(drop)
}

/// Each row's symptom that begins with `uwarp: ` is in the source, up to its first name or number.
#[test]
fn every_line_of_uwarp_that_is_explained_is_one_that_it_writes() {
    let text = page("troubleshooting.md");
    let mut sources = String::new();
    for directory in ["abi/src", "crates", "tools/uwarp/src"] {
        for file in files_below(directory, "rs") {
            sources += &fs::read_to_string(file).expect("a source file");
        }
    }
    // A string goes on in the next line behind a backslash.
    let sources = sources.split("\\\n").map(str::trim_start).collect::<String>();
    let symptoms: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("| "))
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .filter_map(|quoted| quoted.strip_prefix("uwarp: "))
        .collect();
    assert!(symptoms.len() > 10, "{} symptoms; has the page's form changed?", symptoms.len());
    let unknown: Vec<_> = symptoms
        .iter()
        .filter(|symptom| {
            let parts = symptom.split('…').map(|part| part.trim_matches([' ', ':', ',']));
            !parts.filter(|part| part.len() > 3).all(|part| sources.contains(part))
        })
        .collect();
    assert!(unknown.is_empty(), "uwarp does not write these: {unknown:#?}");
}
