//! The C programs of `c/`, compiled against rdma-core's headers and run over uwarp: a program's own mistakes and what
//! the man pages say they give (`errno_table`, `errno_cm`), and data integrity between two processes (`verify`).
//! Each prints one line per statement; a line that begins with FAIL fails the case.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use uwarp_conformance::dist::Dist;
use uwarp_conformance::process::{Cmd, Output};
use uwarp_conformance::{Failure, Outcome, cc, fail};

/// Program, and the groups of statements it has; each group is a case of its own.
const GROUPS: [(&str, &[&str]); 3] = [
    (
        "errno_table",
        &[
            "device",
            "regions",
            "queues",
            "resize",
            "states",
            "drain",
            "queries",
            "posting",
            "local_protection",
            "receive_protection",
            "remote_reads",
            "remote_writes",
            "invalidation",
            "flushing",
            "notifying",
            "acknowledging",
            "overflow",
        ],
    ),
    (
        "errno_cm",
        &[
            "order",
            "binding",
            "queue_pairs",
            "accepting",
            "rejecting",
            "refused",
            "acknowledging",
            "migrating",
            "names",
            "options",
            "listeners",
            "by_number",
            "private_data",
            "others",
        ],
    ),
    (
        "shared",
        &[
            "creating",
            "modifying",
            "posting",
            "sharing",
            "limit",
            "last_wqe",
            "acknowledging",
            "rdma_cm",
            "endpoints",
        ],
    ),
];

/// How `verify` is run: address and environment.
const VERIFY: [(&str, &[(&str, &str)]); 4] = [
    ("127.0.0.1", &[]),
    ("::1", &[]),
    ("127.0.0.1", &[("UWARP_CRC", "off")]),
    // Small FPDUs staged and checked, as toward strangers.
    ("127.0.0.1", &[("UWARP_STRICT", "1")]),
];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // verify keeps both processors busy; the others are short.
    args.test_threads = Some(1);
    let programs = Arc::new(Programs { dist: Dist::find(), built: Mutex::default() });
    let mut trials = Vec::new();
    for (program, groups) in GROUPS {
        for group in groups {
            let programs = programs.clone();
            trials.push(Trial::test(format!("{program} {group}"), move || {
                Ok(programs.run(program, "127.0.0.1", Some(group), &[])?)
            }));
        }
    }
    for (address, env) in VERIFY {
        let programs = programs.clone();
        let shown: String = env.iter().map(|(n, v)| format!(" {n}={v}")).collect();
        trials.push(Trial::test(format!("verify {address}{shown}"), move || {
            Ok(programs.run("verify", address, None, env)?)
        }));
    }
    libtest_mimic::run(&args, trials).exit_code()
}

struct Programs {
    dist: Outcome<Dist>,
    /// What has been compiled, or why it does not compile.
    built: Mutex<Vec<(&'static str, Outcome<PathBuf>)>>,
}

impl Programs {
    fn run(&self, name: &'static str, address: &str, group: Option<&str>, env: &[(&str, &str)]) -> Outcome {
        let program = self.program(name)?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let mut cmd = Cmd::new(program).arg(address).env("LD_LIBRARY_PATH", dist.lib());
        cmd = group.into_iter().fold(cmd, Cmd::arg);
        cmd = env.iter().fold(cmd, |cmd, (name, value)| cmd.env(name, value));
        judge(&cmd.limit(Duration::from_secs(120)).run()?)
    }

    fn program(&self, name: &'static str) -> Outcome<PathBuf> {
        let mut built = self.built.lock().unwrap_or_else(|e| e.into_inner());
        if let Some((_, program)) = built.iter().find(|(n, _)| *n == name) {
            return program.clone();
        }
        let program = cc::build(name, &Path::new(env!("CARGO_TARGET_TMPDIR")).join("c"));
        built.push((name, program.clone()));
        program
    }
}

/// No statement failed, at least one held, and the exit status says the same.
fn judge(out: &Output) -> Outcome {
    let failed: Vec<&str> = out.stdout.lines().filter(|l| l.starts_with("FAIL")).collect();
    let held = out.stdout.lines().filter(|l| l.starts_with("ok ")).count();
    if !failed.is_empty() {
        fail!(
            "{} of {} statements do not hold:\n{}\n{}",
            failed.len(),
            failed.len() + held,
            failed.join("\n"),
            out.text()
        )
    }
    if held == 0 {
        return out.failure("no statement was checked");
    }
    out.exited_ok()
}
