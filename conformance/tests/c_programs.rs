//! The C programs of `c/`, compiled against rdma-core's headers and run over uwarp: a program's own mistakes and what
//! the man pages say they give (`errno_table`, `errno_cm`), events and their acknowledgement (`completions`), registered memory that is unmapped (`unmapped`),
//! limits that are reached (`limits`), what the man pages say of events, threads and processes (`cm_rules`), threads that
//! leave a call (`leaving`),
//! data integrity between two processes (`verify`, `random`), and connections that come and go in many threads without
//! anything growing (`soak`).
//! Each prints one line per statement; a line that begins with FAIL fails the case.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use uwarp_conformance::dist::Dist;
use uwarp_conformance::process::{Cmd, Output};
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Network, free_port};
use uwarp_conformance::{Failure, Outcome, cc, fail, pair};

/// Program, and the groups of statements it has; each group is a case of its own.
const GROUPS: [(&str, &[&str]); 9] = [
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
        ],
    ),
    (
        "completions",
        &[
            "flushing",
            "notifying",
            "acknowledging",
            "async_acknowledging",
            "overflow",
            "purging",
            "throttling",
            "leaving",
            "starving",
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
            "ack_timeout",
            "listeners",
            "by_number",
            "private_data",
            "others",
        ],
    ),
    (
        "cm_rules",
        &[
            "blocking",
            "rejecting_actively",
            "destroying",
            "ports",
            "loopback",
            "forking",
            "threads",
            "private_data",
            "life",
            "timewait",
            "cancelling",
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
    ("leaving", &["cancelling", "jumping", "sleeping"]),
    ("unmapped", &["gone", "handler", "action"]),
    ("limits", &["advertised", "descriptors", "overflow", "receives"]),
    ("immediate", &["writing", "sending", "soliciting", "waiting", "strangers", "extended"]),
];

/// Groups whose statements depend on the view, which are run as iWARP, too.
const AS_IWARP: [(&str, &str); 3] =
    [("errno_cm", "rejecting"), ("errno_cm", "refused"), ("cm_rules", "timewait")];

/// How `verify` is run: address and environment.
const VERIFY: [(&str, &[(&str, &str)]); 4] = [
    ("127.0.0.1", &[]),
    ("::1", &[]),
    ("127.0.0.1", &[("UWARP_CRC", "off")]),
    // Small FPDUs, as toward strangers.
    ("127.0.0.1", &[("UWARP_PEER", "off")]),
];

/// How long `soak` is run, in seconds; `make soak` does it for longer.
const SOAK: &str = "10";

/// Where `random` runs, each with and without CRC.
const RANDOM: [Topology; 5] = [Loopback4, Veth1500V4, Veth1500V6, Veth9000V4, Veth9000V6];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // verify keeps both processors busy; the others are short.
    args.test_threads = Some(1);
    let programs =
        Arc::new(Programs { dist: Dist::find(), built: Mutex::default(), net: Network::default() });
    let mut trials = Vec::new();
    for (program, group) in AS_IWARP {
        let programs = programs.clone();
        trials.push(Trial::test(format!("{program} {group}, as iWARP"), move || {
            Ok(programs.run(program, "127.0.0.1", Some(group), &[("UWARP_VIEW", "iwarp")])?)
        }));
    }
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
    for topology in RANDOM {
        for receiver in ["poll", "block", "sleep"] {
            for crc in ["on", "off"] {
                let programs = programs.clone();
                trials.push(Trial::test(
                    format!("random {receiver} UWARP_CRC={crc} [{topology}]"),
                    move || Ok(programs.random(topology, receiver, crc)?),
                ));
            }
        }
    }
    let soaked = programs.clone();
    trials.push(Trial::test("soak", move || Ok(soaked.run("soak", "127.0.0.1", Some(SOAK), &[])?)));
    let checked = programs.clone();
    trials
        .push(Trial::test("soak under memcheck", move || Ok(checked.memcheck("soak", &["127.0.0.1", "2"])?)));
    let conclusion = libtest_mimic::run(&args, trials);
    // The namespaces go with it, which `exit` would not drop.
    drop(programs);
    conclusion.exit_code()
}

struct Programs {
    dist: Outcome<Dist>,
    /// What has been compiled, or why it does not compile.
    built: Mutex<Vec<(&'static str, Outcome<PathBuf>)>>,
    net: Network,
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

    /// Both ends of `random`, with a seed of this run: the output names it, and the program takes it as an argument.
    fn random(&self, topology: Topology, receiver: &str, crc: &str) -> Outcome {
        let program = self.program("random")?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let place = self.net.place(topology)?;
        let (port, address) = (free_port(), place.address);
        let end = |role, ns| {
            let cmd = Cmd::new(&program).args(&format!("{role} {address} {port} {receiver}")).in_ns(ns);
            cmd.env("LD_LIBRARY_PATH", dist.lib()).env("UWARP_CRC", crc).limit(Duration::from_secs(90))
        };
        let ends = pair::run(&end("server", place.server), &end("client", place.client), port)?;
        judge(&ends.client).and_then(|()| judge(&ends.server))
    }

    /// Under valgrind, which sees a use of what was freed on either side of the C interface. It knows nothing of our locks, so of
    /// its tools only this one is of use.
    fn memcheck(&self, name: &'static str, args: &[&str]) -> Outcome {
        let program = self.program(name)?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let cmd = Cmd::line("valgrind -q --error-exitcode=9 --fair-sched=yes --num-callers=20").arg(program);
        let cmd = args.iter().fold(cmd, Cmd::arg);
        let cmd = cmd.env("LD_LIBRARY_PATH", dist.lib()).env("SOAK_SLOW", "1");
        judge(&cmd.limit(Duration::from_secs(300)).run()?)
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
