//! Links `libuwarp.so` from the static library cargo has just built, and runs C programs over it.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The root of the source tree.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A directory that holds `libuwarp.so` under its two names, linked once for each test binary.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let dir = scratch().join("lib");
        let link = Command::new(root().join("scripts/link-libuwarp"))
            .args([static_library().as_path(), dir.as_path()])
            .output()
            .expect("scripts/link-libuwarp runs");
        assert!(link.status.success(), "{}", String::from_utf8_lossy(&link.stderr));
        dir
    })
}

fn scratch() -> PathBuf {
    let test = std::env::current_exe().expect("this test has a path");
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(test.file_stem().expect("and a name"))
}

/// The newest static library beside this test: cargo built it, or found it up to date, before it ran us.
fn static_library() -> PathBuf {
    let test = std::env::current_exe().expect("this test has a path");
    let deps = test.parent().expect("it lies in deps/");
    std::fs::read_dir(deps)
        .expect("deps/ can be read")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with("libuwarp_abi-") && name.ends_with(".a")
        })
        .max_by_key(|path| path.metadata().and_then(|m| m.modified()).ok())
        .expect("cargo builds the static library for this test")
}

/// Compiles `tests/c/NAME.c` against the headers of the distribution, once for each test binary: a program
/// that runs for one test cannot be written for another.
pub fn compile(name: &str, libraries: &[&str]) -> PathBuf {
    static COMPILED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    let program = scratch().join(name);
    if !compiled.contains(name) {
        compile_into(&program, name, libraries);
        compiled.insert(name.to_owned());
    }
    program
}

fn compile_into(program: &Path, name: &str, libraries: &[&str]) {
    let dir = scratch();
    std::fs::create_dir_all(&dir).expect("a scratch directory");
    let cc = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"])
        .arg(program)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(format!("{name}.c")))
        .args(libraries)
        .output()
        .expect("a C compiler is needed");
    assert!(
        cc.status.success(),
        "needs libibverbs-dev and librdmacm-dev:\n{}",
        String::from_utf8_lossy(&cc.stderr)
    );
}

/// Runs a program over the library; it must succeed in time. Returns what it printed.
pub fn run(program: &Path, environment: &[(&str, &str)]) -> String {
    run_with(program, &[], environment)
}

/// The same with arguments.
pub fn run_with(program: &Path, arguments: &[String], environment: &[(&str, &str)]) -> String {
    const LIMIT: Duration = Duration::from_secs(120);
    let mut child = Command::new(program)
        .args(arguments)
        .env("LD_LIBRARY_PATH", library())
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    let end = Instant::now() + LIMIT;
    let late = loop {
        match child.try_wait().expect("the program can be waited for") {
            Some(_) => break false,
            None if Instant::now() > end => break true,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    if late {
        child.kill().expect("the program can be killed");
    }
    let output = child.wait_with_output().expect("its output can be read");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!late, "{} hangs:\n{text}{errors}", program.display());
    assert!(output.status.success(), "{}: {}\n{text}{errors}", program.display(), output.status);
    text
}

/// Compiles and runs.
pub fn passes(name: &str, libraries: &[&str]) -> String {
    run(&compile(name, libraries), &[])
}
