//! MPI programs of ours, `c/mpi`, with Open MPI and MPICH and each transport of `uwarp mpi`.
//!
//! Ranks of one host do not use shared memory here, so that all their messages go over uwarp.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use uwarp_conformance::check;
use uwarp_conformance::netns::{Bridged, NetNs, Veth};
use uwarp_conformance::process::{Cmd, Running};
use uwarp_conformance::topology::Place;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::{Context, Outcome, cc, require};

use super::Run::{Custom, Long};
use super::mpis::{Job, Kind, MPICH, Mpi, OPEN_MPI, messages};
use super::{AS_IB, AS_IWARP, Case, Env, Run, Scratch, World};

const LO: &[Topology] = &[Loopback4];
const APART: &[Topology] = &[Veth1500V4];
const BOTH: &[Topology] = &[Loopback4, Veth1500V4];

/// Bounds a job that hangs, for a machine that does much else.
const LIMIT: Duration = Duration::from_secs(300);

const MATCHING: &str = "c/mpi/matching.c: all connect at once; unexpected, reordered, probed, claimed \
                        messages of 0 to 4 MiB; collectives; every byte and sum";
const ONESIDED: &str = "c/mpi/onesided.c: fences, post-start, locks, flushes; every element";
const EXCHANGE: &str = "c/mpi/exchange.c: ring, all-to-all, all-reduce, large messages; every byte";
pub const KILLED: &str = "the launcher says so and ends by itself; no rank, port or shared memory is left";

const BY_WRITES: &str = "c/mpi/exchange.c: every byte; the trace has more Writes than Sends";
const LOSSY: &str = "c/mpi/exchange.c: every byte; datagrams were dropped at both ends";

pub fn cases() -> Vec<Case> {
    [short(), apart(), many(), bad_days_and_hosts(), uncommon()].into_iter().flatten().collect()
}

const fn row(
    program: &'static str,
    manner: &'static str,
    checked: &'static str,
    at: &'static [Topology],
    run: Run,
) -> Case {
    Case { program, manner, checked, at, run }
}

/// Those of `make test`.
fn short() -> Vec<Case> {
    vec![
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport rc",
            MATCHING,
            BOTH,
            Custom(|w, p| w.matching(OPEN_MPI, "rc", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport ud",
            MATCHING,
            LO,
            Custom(|w, p| w.matching(OPEN_MPI, "ud", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport ofi",
            MATCHING,
            LO,
            Custom(|w, p| w.matching(OPEN_MPI, "ofi", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport openib",
            MATCHING,
            LO,
            Custom(|w, p| w.matching(OPEN_MPI, "openib", p)),
        ),
        row(
            "mpirun.mpich -np 4",
            "uwarp mpi --transport rc",
            MATCHING,
            BOTH,
            Custom(|w, p| w.matching(MPICH, "rc", p)),
        ),
        row(
            "mpirun.mpich -np 4",
            "uwarp mpi --transport ud",
            MATCHING,
            LO,
            Custom(|w, p| w.matching(MPICH, "ud", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport rc, one-sided",
            ONESIDED,
            LO,
            Custom(|w, p| w.onesided(OPEN_MPI, "rc", p)),
        ),
        row(
            "mpirun.mpich -np 4",
            "uwarp mpi --transport rc, one-sided",
            ONESIDED,
            LO,
            Custom(|w, p| w.onesided(MPICH, "rc", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport rc, a rank killed",
            KILLED,
            LO,
            Custom(|w, p| w.killed(OPEN_MPI, "rc", p)),
        ),
        row(
            "mpirun.mpich -np 4",
            "uwarp mpi --transport ud, a rank killed",
            KILLED,
            LO,
            Custom(|w, p| w.killed(MPICH, "ud", p)),
        ),
    ]
}

/// The same in two namespaces, and one-sided operations.
fn apart() -> Vec<Case> {
    vec![
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport ud, in two namespaces",
            MATCHING,
            APART,
            Long(|w, p| w.matching(OPEN_MPI, "ud", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport ofi, in two namespaces",
            MATCHING,
            APART,
            Long(|w, p| w.matching(OPEN_MPI, "ofi", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport openib, in two namespaces",
            MATCHING,
            APART,
            Long(|w, p| w.matching(OPEN_MPI, "openib", p)),
        ),
        row(
            "mpirun.mpich -np 4",
            "uwarp mpi --transport ud, in two namespaces",
            MATCHING,
            APART,
            Long(|w, p| w.matching(MPICH, "ud", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport rc, one-sided, in two namespaces",
            ONESIDED,
            APART,
            Long(|w, p| w.onesided(OPEN_MPI, "rc", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport ud, one-sided",
            ONESIDED,
            BOTH,
            Long(|w, p| w.onesided(OPEN_MPI, "ud", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport ofi, one-sided",
            ONESIDED,
            BOTH,
            Long(|w, p| w.onesided(OPEN_MPI, "ofi", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport openib, one-sided",
            ONESIDED,
            BOTH,
            Long(|w, p| w.onesided(OPEN_MPI, "openib", p)),
        ),
        row(
            "mpirun.mpich -np 4",
            "uwarp mpi --transport rc, one-sided, in two namespaces",
            ONESIDED,
            APART,
            Long(|w, p| w.onesided(MPICH, "rc", p)),
        ),
        row(
            "mpirun.mpich -np 4",
            "uwarp mpi --transport ud, one-sided",
            ONESIDED,
            BOTH,
            Long(|w, p| w.onesided(MPICH, "ud", p)),
        ),
    ]
}

/// More ranks.
fn many() -> Vec<Case> {
    vec![
        row(
            "mpirun.openmpi -np 2",
            "uwarp mpi --transport rc",
            EXCHANGE,
            BOTH,
            Long(|w, p| w.exchange(OPEN_MPI, 2, "rc", p)),
        ),
        row(
            "mpirun.openmpi -np 8",
            "uwarp mpi --transport rc",
            EXCHANGE,
            BOTH,
            Long(|w, p| w.exchange(OPEN_MPI, 8, "rc", p)),
        ),
        row(
            "mpirun.openmpi -np 8",
            "uwarp mpi --transport ud",
            EXCHANGE,
            BOTH,
            Long(|w, p| w.exchange(OPEN_MPI, 8, "ud", p)),
        ),
        row(
            "mpirun.openmpi -np 8",
            "uwarp mpi --transport openib",
            EXCHANGE,
            BOTH,
            Long(|w, p| w.exchange(OPEN_MPI, 8, "openib", p)),
        ),
        row(
            "mpirun.openmpi -np 16",
            "uwarp mpi --transport rc",
            "every byte; on one host, of the links between two ranks at most one in 50 is TCP",
            BOTH,
            Long(|w, p| match p.client {
                // `uwarp stat` sees one namespace.
                Some(_) => w.exchange(OPEN_MPI, 16, "rc", p),
                None => w.exchange_of_many(16, p),
            }),
        ),
        row(
            "mpirun.openmpi -np 16",
            "uwarp mpi --transport ud",
            EXCHANGE,
            BOTH,
            Long(|w, p| w.exchange(OPEN_MPI, 16, "ud", p)),
        ),
        row(
            "mpirun.openmpi -np 16",
            "uwarp mpi --transport ofi",
            EXCHANGE,
            BOTH,
            Long(|w, p| w.exchange(OPEN_MPI, 16, "ofi", p)),
        ),
        row(
            "mpirun.openmpi -np 64",
            "uwarp mpi --transport rc, 32 processes for each processor or so",
            "every byte; of the links between two ranks at most one in 50 is TCP",
            LO,
            Long(|w, p| w.exchange_of_many(64, p)),
        ),
        row(
            "mpirun.mpich -np 8",
            "uwarp mpi --transport rc",
            EXCHANGE,
            BOTH,
            Long(|w, p| w.exchange(MPICH, 8, "rc", p)),
        ),
        row(
            "mpirun.mpich -np 8",
            "uwarp mpi --transport ud",
            EXCHANGE,
            BOTH,
            Long(|w, p| w.exchange(MPICH, 8, "ud", p)),
        ),
    ]
}

/// Ranks that are killed, and three hosts.
fn bad_days_and_hosts() -> Vec<Case> {
    vec![
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport ofi, a rank killed",
            KILLED,
            BOTH,
            Long(|w, p| w.killed(OPEN_MPI, "ofi", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport ud, a rank killed",
            KILLED,
            BOTH,
            Long(|w, p| w.killed(OPEN_MPI, "ud", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport openib, a rank killed",
            KILLED,
            BOTH,
            Long(|w, p| w.killed(OPEN_MPI, "openib", p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "its own TCP, a rank killed, to compare",
            KILLED,
            BOTH,
            Long(|w, p| w.killed(OPEN_MPI, "tcp", p)),
        ),
        row(
            "mpirun.openmpi -np 6",
            "uwarp mpi --transport rc, three namespaces",
            MATCHING,
            APART,
            Long(|w, _| w.three_hosts(OPEN_MPI, "rc")),
        ),
        row(
            "mpirun.openmpi -np 6",
            "uwarp mpi --transport ud, three namespaces",
            MATCHING,
            APART,
            Long(|w, _| w.three_hosts(OPEN_MPI, "ud")),
        ),
        row(
            "mpirun.openmpi -np 6",
            "uwarp mpi --transport ofi, three namespaces",
            MATCHING,
            APART,
            Long(|w, _| w.three_hosts(OPEN_MPI, "ofi")),
        ),
        row(
            "mpirun.mpich -np 6",
            "uwarp mpi --transport rc, three namespaces",
            MATCHING,
            APART,
            Long(|w, _| w.three_hosts(MPICH, "rc")),
        ),
        row(
            "mpirun.mpich -np 4",
            "uwarp mpi --transport rc, a rank killed",
            KILLED,
            BOTH,
            Long(|w, p| w.killed(MPICH, "rc", p)),
        ),
    ]
}

/// An MPI's fast path by Writes, and datagrams that are lost.
fn uncommon() -> Vec<Case> {
    vec![
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport openib, btl_openib_use_eager_rdma 1",
            BY_WRITES,
            LO,
            Custom(|w, p| w.eager_writes(p)),
        ),
        row(
            "mpirun.openmpi -np 4",
            "uwarp mpi --transport ud, 2 % of UDP dropped in each namespace",
            LOSSY,
            APART,
            Long(|w, _| w.lossy_datagrams()),
        ),
    ]
}

/// A compiled program and where it lies.
pub struct Built {
    pub dir: Scratch,
    pub program: PathBuf,
}

impl Built {
    pub fn new(name: &str, mpi: Mpi) -> Outcome<Built> {
        let dir = Scratch::new("mpi")?;
        let compiler = mpi.compiler()?.display().to_string();
        let program = cc::build_by(&compiler, &format!("mpi/{name}"), dir.path(), "")?;
        Ok(Built { dir, program })
    }
}

impl World {
    pub fn matching(&self, mpi: Mpi, transport: &'static str, place: Place<'_>) -> Outcome {
        self.matching_in(&[], mpi, transport, place)
    }

    /// The same with these variables.
    pub fn matching_in(&self, env: Env, mpi: Mpi, transport: &'static str, place: Place<'_>) -> Outcome {
        let out = self.job("matching", Job { mpi, ranks: 4, transport }, env, place)?;
        for part in ["cold", "unexpected", "any source", "claimed", "strided", "collectives"] {
            require!(out.contains(&format!("ok {part}: ")), "no {part}\n{out}");
        }
        require!(out.contains("every message where it belongs"), "no end\n{out}");
        Ok(())
    }

    pub fn onesided(&self, mpi: Mpi, transport: &'static str, place: Place<'_>) -> Outcome {
        self.onesided_in(&[], mpi, transport, place)
    }

    /// The same with these variables.
    pub fn onesided_in(&self, env: Env, mpi: Mpi, transport: &'static str, place: Place<'_>) -> Outcome {
        let out = self.job("onesided", Job { mpi, ranks: 4, transport }, env, place)?;
        for part in ["fence", "post", "lock", "flush"] {
            let windows = out.matches(&format!("ok {part}: ")).count();
            require!(windows == 2, "{part} passed on {windows} windows, wanted 2\n{out}");
        }
        require!(out.contains("every window as it was written"), "no end\n{out}");
        Ok(())
    }

    pub fn exchange(&self, mpi: Mpi, ranks: u32, transport: &'static str, place: Place<'_>) -> Outcome {
        exchanged(&self.job("exchange", Job { mpi, ranks, transport }, &[], place)?)
    }

    /// `exchange` with many more ranks than processors, most of which wait for one at any time. Where memory
    /// is the default, they have it nevertheless.
    fn exchange_of_many(&self, ranks: u32, place: Place<'_>) -> Outcome {
        let built = Built::new("exchange", OPEN_MPI)?;
        let job = self.launch(built.dir.path(), Job { mpi: OPEN_MPI, ranks, transport: "rc" }, place)?;
        let job = job.limit(2 * LIMIT).arg(&built.program).arg(self.rounds()).spawn()?;
        // All of them have spoken with all.
        job.until(LIMIT, "the end of the all-to-all", |job| job.so_far().contains("ok all-to-all: "))?;
        let of_each = processes_of(&built.program)?.into_iter().map(held).collect::<Vec<_>>();
        let stat = Cmd::new(self.dist()?.uwarp()?).args("stat --json").run_ok()?;
        let out = job.wait_at_most(LIMIT);
        out.exited_ok()?;
        exchanged(&out.stdout)?;

        let (by_memory, others) = links(&stat.stdout, "exchange")?;
        println!("{ranks} ranks: {by_memory} ends by memory, {} not; the most of a rank:", others.len());
        let most = |of: fn(&Held) -> u64| of_each.iter().flatten().map(of).max().unwrap_or_default();
        let [addresses, tables] = [most(|held| held.addresses), most(|held| held.page_tables)];
        println!(
            "{} descriptors, {addresses} KiB of addresses, {tables} of page tables",
            most(|h| h.descriptors)
        );
        let all = by_memory + others.len();
        require!(all as u32 >= 2 * ranks, "{all} connections");
        let is_default = std::env::var_os("UWARP_LINK").is_none();
        require!(!is_default || others.len() * 50 <= all, "{} of {all} by TCP: {others:#?}", others.len());
        Ok(())
    }

    /// `exchange` as iWARP, each rank started by `uwarp run`, so that it has files of its own host.
    pub fn exchange_by_run(&self, job: Job, place: Place<'_>) -> Outcome {
        let built = Built::new("exchange", job.mpi)?;
        let cmd = self.launch(built.dir.path(), job, place)?.envs(AS_IWARP).arg(self.dist()?.uwarp()?);
        let cmd = cmd.args("run --as iwarp --files on --").arg(&built.program).arg(self.rounds());
        let out = cmd.spawn()?.wait_at_most(LIMIT);
        out.exited_ok()?;
        exchanged(&out.stdout)
    }

    /// What `exchange` or `onesided` sent and received, as UWARP_TRACE has it.
    pub fn traced(&self, name: &str, job: Job, env: Env, place: Place<'_>) -> Outcome<String> {
        let built = Built::new(name, job.mpi)?;
        let trace = built.dir.path().join("trace");
        let cmd = self.launch(built.dir.path(), job, place)?.arg(&built.program).arg("1");
        let cmd = if name == "onesided" { cmd.arg("direct") } else { cmd };
        let out = cmd.envs(env).env("UWARP_TRACE", &trace).spawn()?.wait_at_most(LIMIT);
        out.exited_ok()?;
        match name {
            "exchange" => exchanged(&out.stdout)?,
            _ => check::has(&out, "every window as it was written")?,
        }
        std::fs::read_to_string(&trace).context(trace.display())
    }

    /// Open MPI's openib writes small messages into rings at the peer. It does so by itself only over
    /// adapters that it knows.
    fn eager_writes(&self, place: Place<'_>) -> Outcome {
        let job = Job { mpi: OPEN_MPI, ranks: 4, transport: "openib" };
        // A rank sometimes ends with SIGSEGV when all is done (docs/flakes.md). Open MPI does not say which
        // call has failed before; the library does.
        let settings: Env =
            &[("OMPI_MCA_btl_openib_use_eager_rdma", "1"), ("UWARP_LOG", "warn,uwarp::abi=debug")];
        let trace = self.traced("exchange", job, settings, place)?;
        let (writes, sends) = (messages(&trace, "Write"), messages(&trace, "Send"));
        require!(writes > sends && sends > 0, "{writes} Writes, {sends} Sends");
        Ok(())
    }

    /// In namespaces of its own, whose firewalls go with them.
    fn lossy_datagrams(&self) -> Outcome {
        self.with_loss(|place| self.exchange(OPEN_MPI, 4, "ud", place))
    }

    /// A rank is killed in the middle of its messages.
    pub fn killed(&self, mpi: Mpi, transport: &'static str, place: Place<'_>) -> Outcome {
        let built = Built::new("matching", mpi)?;
        let shared_before = shared_memory();
        let job = self.launch(built.dir.path(), Job { mpi, ranks: 4, transport }, place)?;
        let job = job.arg(&built.program).arg("1000000").spawn()?;
        job.until(LIMIT, "all ranks at work", |job| job.so_far().contains("ok cold: "))?;
        let ranks = processes_of(&built.program)?;
        require!(ranks.len() == 4, "{} ranks run, wanted 4", ranks.len());
        kill_process(ranks[2], Signal::KILL).context("kill")?;
        let out = ended(job)?;
        let said = if mpi.kind() == Kind::OpenMpi { "exited on signal 9" } else { "EXIT CODE: 9" };
        require!(out.contains(said), "no \"{said}\"\n{out}");
        // The launcher does not wait for them on other hosts.
        let end = std::time::Instant::now() + LIMIT;
        // Other jobs of this machine come and go meanwhile: theirs is mapped by somebody, or soon gone.
        let left = || -> Vec<_> {
            let mapped = mapped_by_anybody();
            let new = shared_memory().into_iter().filter(|name| !shared_before.contains(name));
            new.filter(|name| !mapped.contains(&*name.to_string_lossy())).collect()
        };
        while !left().is_empty() {
            require!(std::time::Instant::now() < end, "left in /dev/shm: {:?}\n{out}", left());
            std::thread::sleep(Duration::from_millis(20));
        }
        while !processes_of(&built.program)?.is_empty() {
            require!(std::time::Instant::now() < end, "ranks are left\n{out}");
            std::thread::sleep(Duration::from_millis(20));
        }
        for ns in [place.server, place.client].into_iter().flatten() {
            let listening = Cmd::line(&format!("ip netns exec {} ss -Hltnp", ns.name()));
            loop {
                let now = listening.run_ok()?;
                if now.stdout.is_empty() {
                    break;
                }
                require!(std::time::Instant::now() < end, "ports are open\n{}", now.text());
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        Ok(())
    }

    /// Runs it to its end; returns what it printed.
    fn job(&self, name: &str, job: Job, env: Env, place: Place<'_>) -> Outcome<String> {
        let built = Built::new(name, job.mpi)?;
        let cmd = self.launch(built.dir.path(), job, place)?.arg(&built.program).arg(self.rounds());
        let out = cmd.envs(env).spawn()?.wait_at_most(LIMIT);
        out.exited_ok()?;
        check::has(&out, "every ")?;
        Ok(out.stdout)
    }

    fn rounds(&self) -> &'static str {
        if self.thorough { "3" } else { "1" }
    }

    /// Two ranks in each of three namespaces that one bridge joins.
    fn three_hosts(&self, mpi: Mpi, transport: &'static str) -> Outcome {
        let hosts = Bridged::new()?;
        let built = Built::new("matching", mpi)?;
        let [(_, first), ..] = hosts.ends();
        let cmd = self.launcher(built.dir.path(), Job { mpi, ranks: 6, transport })?.in_ns(Some(first));
        let cmd = dealt_out(cmd, mpi, 2, &hosts.ends()).arg(&built.program).arg(self.rounds());
        let out = cmd.spawn()?.wait_at_most(LIMIT);
        out.exited_ok()?;
        check::has(&out, "every message where it belongs")
    }

    /// The launcher, to which the program is still to be added: its ranks here, or half of them in each
    /// namespace. `home` is for the launcher's files.
    pub fn launch(&self, home: &Path, job: Job, place: Place<'_>) -> Outcome<Cmd> {
        let Job { mpi, ranks, .. } = job;
        let mut cmd = self.launcher(home, job)?.in_ns(place.server);
        if let Some((server, client)) = place.server.zip(place.client) {
            cmd = dealt_out(cmd, mpi, ranks / 2, &[(Veth::SERVER4, server), (Veth::CLIENT4, client)]);
        } else if mpi.kind() == Kind::OpenMpi {
            // Nothing is started elsewhere, and there need be no ssh.
            cmd = cmd.env(mpi.agent_variable(), "false");
        }
        Ok(cmd)
    }

    fn launcher(&self, home: &Path, job: Job) -> Outcome<Cmd> {
        let uwarp = self.dist()?.uwarp()?;
        let Job { mpi, ranks, transport } = job;
        let view: Env = if transport == "openib" { AS_IB } else { &[] };
        let mut cmd = Cmd::new(mpi.launcher()?)
            .args(&format!("-np {ranks}"))
            .behind(
                [uwarp.into_os_string()]
                    .into_iter()
                    .chain(["mpi", "--transport", transport, "--shared-memory", "off", "--"].map(Into::into)),
            )
            .envs(view)
            .env("TMPDIR", home)
            .limit(LIMIT);
        let own = mpi.environment()?;
        if !own.iter().any(|(name, _)| *name == "LD_LIBRARY_PATH") {
            cmd = cmd.unset("LD_LIBRARY_PATH");
        }
        for (name, value) in own {
            cmd = cmd.env(name, value);
        }
        Ok(cmd)
    }
}

/// Ends of connections of all processes with this name, as `uwarp stat --json` has them: those by memory, and
/// what it says of the others. (UCX connects each rank with itself, too.)
fn links(report: &str, name: &str) -> Outcome<(usize, Vec<String>)> {
    let report: Value = serde_json::from_str(report).context("the report of uwarp stat")?;
    let processes = report["processes"].as_array().into_iter().flatten();
    let qps = processes.filter(|process| process["command"] == name);
    let qps = qps.flat_map(|process| process["queue_pairs"].as_array().into_iter().flatten());
    let ends = qps.filter(|qp| qp["service"] == "RC" && qp["peer_qpn"] != qp["qpn"]);
    let (by_memory, others): (Vec<_>, Vec<_>) = ends.partition(|qp| qp["link"] == "memory");
    let said = |qp: &Value| format!("{} {} {}", qp["state"], qp["link"], qp["why_tcp"]);
    Ok((by_memory.len(), others.into_iter().map(said).collect()))
}

/// What a process holds; the last two in KiB.
struct Held {
    descriptors: u64,
    addresses: u64,
    page_tables: u64,
}

/// `None`: it has ended.
fn held(pid: Pid) -> Option<Held> {
    let of = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
    let status = std::fs::read_to_string(of.join("status")).ok()?;
    let line = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().ok()
    };
    let descriptors = std::fs::read_dir(of.join("fd")).ok()?.count() as u64;
    Some(Held { descriptors, addresses: line("VmSize")?, page_tables: line("VmPTE")? })
}

/// What `c/mpi/exchange.c` says at its end.
fn exchanged(out: &str) -> Outcome {
    for part in ["ring", "neighbours", "all-to-all", "all-reduce", "large"] {
        require!(out.contains(&format!("ok {part}: ")), "no {part}\n{out}");
    }
    require!(out.contains("every byte as it was sent"), "no end\n{out}");
    Ok(())
}

/// What processes of the user have in shared memory by name.
fn shared_memory() -> Vec<std::ffi::OsString> {
    let mut names: Vec<_> = std::fs::read_dir("/dev/shm")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    names.sort();
    names
}

/// What processes have mapped of that, as the system shows it.
fn mapped_by_anybody() -> String {
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let maps = processes.filter_map(|process| std::fs::read_to_string(process.path().join("maps")).ok());
    let lines =
        |maps: String| maps.lines().filter(|line| line.contains("/dev/shm/")).collect::<Vec<_>>().join("\n");
    maps.map(lines).collect::<Vec<_>>().join("\n")
}

/// So many ranks on each of these hosts.
fn dealt_out(cmd: Cmd, mpi: Mpi, each: u32, hosts: &[(&str, &NetNs)]) -> Cmd {
    let joined =
        |of: &dyn Fn(&(&str, &NetNs)) -> String, by: &str| hosts.iter().map(of).collect::<Vec<_>>().join(by);
    let cmd = cmd.env("NAMESPACES", joined(&|(address, ns)| format!("{address}={}", ns.name()), " "));
    let cmd = match mpi.kind() {
        Kind::OpenMpi => cmd.env(mpi.agent_variable(), agent()).args("--host"),
        _ => cmd.args("-launcher rsh -launcher-exec").arg(agent()).args("-hosts"),
    };
    cmd.arg(joined(&|(address, _)| format!("{address}:{each}"), ","))
}

/// Waits for the end of a job that must fail; what it printed.
fn ended(job: Running) -> Outcome<String> {
    let out = job.wait_at_most(LIMIT);
    let text = out.text();
    require!(out.status.is_some_and(|status| status.code().is_some_and(|code| code != 0)), "{text}");
    Ok(text)
}

/// Processes that run this file.
fn processes_of(program: &Path) -> Outcome<Vec<Pid>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").context("/proc")?.flatten() {
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let runs = std::fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == program);
        found.extend(pid.filter(|_| runs));
    }
    Ok(found)
}

/// What stands in for ssh.
pub fn agent() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("c/mpi/agent")
}
