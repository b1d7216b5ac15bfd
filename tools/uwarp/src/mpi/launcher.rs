//! Which MPI a launcher belongs to, and which ways over a network are built into it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::cli::Transport;

/// A launcher, such as mpirun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launcher {
    pub kind: Kind,
    pub version: String,
    /// The ways that this MPI has. Empty: not known.
    pub built: Vec<Way>,
}

/// The MPIs that differ in what they need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    OpenMpi,
    Mpich,
    /// An MPICH over libfabric, with variables of its own.
    Intel,
    /// An MPICH with its own use of verbs.
    Mvapich2,
}

/// What an MPI uses to reach a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Ucx,
    Libfabric,
    /// Open MPI's own use of verbs.
    Openib,
    /// MVAPICH2's own use of verbs.
    Mrail,
}

impl Launcher {
    /// Asks the launcher for its version, and its MPI for what is built in.
    pub fn identify(path: &Path) -> Result<Self, String> {
        if path.file_name().is_some_and(|name| name == "mpirun_rsh") {
            return Err(format!(
                "{} gives its ranks no environment. Use mpirun, which is beside it",
                path.display()
            ));
        }
        let said = output(path, &["--version"]).unwrap_or_default();
        let Some((kind, version)) = recognise(&said) else {
            return Err(format!(
                "{} is the launcher of no MPI that this command knows: `{} --version` names neither Open MPI \
                 nor MPICH nor Intel MPI nor MVAPICH2. Set by hand what the MPI needs, and use uwarp run",
                path.display(),
                path.display()
            ));
        };
        // Its launcher has the version of the MPICH that it is made of.
        let own = || output(&beside(path, "mpiname"), &["-v"]).and_then(|said| number(&said));
        let version = if kind == Kind::Mvapich2 { own().unwrap_or(version) } else { version };
        let built = match kind {
            Kind::OpenMpi => components(path, major(&version)),
            Kind::Mpich => device(&said),
            Kind::Intel => vec![Way::Libfabric],
            Kind::Mvapich2 => vec![Way::Mrail],
        };
        Ok(Self { kind, version, built })
    }

    /// The transport that is used if none is requested.
    pub fn best(&self) -> Transport {
        match self.built.is_empty() || self.has(Way::Ucx) || self.has(Way::Mrail) {
            true => Transport::Rc,
            false => Transport::Ofi,
        }
    }

    /// Whether nothing is missing for this transport.
    pub fn can(&self, transport: Transport) -> bool {
        super::plan::lacks(self, transport).is_none()
    }

    pub fn has(&self, way: Way) -> bool {
        self.built.is_empty() || self.built.contains(&way)
    }

    pub fn major(&self) -> u32 {
        major(&self.version)
    }
}

/// 0 if it is not known.
fn major(version: &str) -> u32 {
    version.split('.').next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.version)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::OpenMpi => "Open MPI",
            Self::Mpich => "MPICH",
            Self::Intel => "Intel MPI",
            Self::Mvapich2 => "MVAPICH2",
        })
    }
}

/// From what `--version` prints. Intel's launcher is a Hydra too, but names itself.
fn recognise(said: &str) -> Option<(Kind, String)> {
    let first = said.lines().next()?;
    if first.contains("Intel") && first.contains("MPI Library") {
        let version = first.split_once("Version ")?.1.split_whitespace().next()?;
        return Some((Kind::Intel, version.to_owned()));
    }
    if first.contains("Open MPI") || first.contains("OpenRTE") {
        return Some((Kind::OpenMpi, first.split_whitespace().last()?.to_owned()));
    }
    if first.contains("HYDRA") {
        let version = said.lines().find_map(|line| line.trim().strip_prefix("Version:"))?;
        let kind = if said.contains("--with-device=ch3:mrail") { Kind::Mvapich2 } else { Kind::Mpich };
        return Some((kind, version.trim().to_owned()));
    }
    None
}

/// The first word with a digit in front.
fn number(said: &str) -> Option<String> {
    said.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit())).map(str::to_owned)
}

/// The components of an Open MPI. `ompi_info --parsable` lists plug-ins and what is linked in.
fn components(launcher: &Path, major: u32) -> Vec<Way> {
    let info = beside(launcher, "ompi_info");
    let ways = listed(&output(&info, &["--parsable"]).unwrap_or_default());
    match ways.is_empty() {
        // The openib BTL ended with Open MPI 4.
        true if major >= 5 => vec![Way::Ucx, Way::Libfabric],
        _ => ways,
    }
}

fn listed(said: &str) -> Vec<Way> {
    let components =
        [("mca:pml:ucx:", Way::Ucx), ("mca:mtl:ofi:", Way::Libfabric), ("mca:btl:openib:", Way::Openib)];
    let listed = |name: &str| said.lines().any(|line| line.starts_with(name));
    components.into_iter().filter(|(name, _)| listed(name)).map(|(_, way)| way).collect()
}

/// The devices of an MPICH, from how its launcher was configured: `--with-device=ch4:ucx,ofi`.
fn device(said: &str) -> Vec<Way> {
    let Some((_, rest)) = said.split_once("--with-device=ch4:") else { return Vec::new() };
    let list = rest.split(|c: char| c.is_whitespace() || c == '\'').next().unwrap_or_default();
    let ways = list.split(',').filter_map(|device| match device {
        "ucx" => Some(Way::Ucx),
        "ofi" => Some(Way::Libfabric),
        _ => None,
    });
    ways.collect()
}

/// A program of the same directory, or of PATH.
fn beside(launcher: &Path, name: &str) -> PathBuf {
    let there = launcher.with_file_name(name);
    if there.exists() { there } else { name.into() }
}

fn output(program: &Path, arguments: &[&str]) -> Option<String> {
    let out = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    Some(String::from_utf8_lossy(&out.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_are_recognised_by_their_version() {
        let hydra =
            "HYDRA build details:\n  Version:    4.0.2\n  Configure options: '--with-device=ch4:ucx'\n";
        for (said, expected) in [
            ("mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to\n", Some((Kind::OpenMpi, "4.1.4"))),
            ("mpirun (Open MPI) 5.0.7\n", Some((Kind::OpenMpi, "5.0.7"))),
            (hydra, Some((Kind::Mpich, "4.0.2"))),
            (
                "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20230711\nHYDRA\n",
                Some((Kind::Intel, "2021.11")),
            ),
            (
                "HYDRA build details:\n  Version: 3.2.1\n  Configure options: '--with-device=ch3:mrail'\n",
                Some((Kind::Mvapich2, "3.2.1")),
            ),
            ("slurm 22.05.8\n", None),
            ("", None),
        ] {
            let found = recognise(said);
            assert_eq!(found.as_ref().map(|(kind, version)| (*kind, version.as_str())), expected, "{said}");
        }
        assert_eq!(number("MVAPICH2 2.3.7 Wed March 02\n").as_deref(), Some("2.3.7"));
        assert_eq!(device(hydra), [Way::Ucx]);
        assert_eq!(device("'--with-device=ch4:ofi'"), [Way::Libfabric]);
        assert_eq!(device("--with-device=ch4:ucx,ofi --with-pm=hydra"), [Way::Ucx, Way::Libfabric]);
        assert_eq!(device("'--with-device=ch3:nemesis'"), []);
    }

    #[test]
    fn components_of_open_mpi_are_found() {
        let said = "mca:btl:tcp:version:mca:2.1.0\nmca:pml:ucx:version:mca:2.1.0\nmca:pml:ucx:param:x\n";
        assert_eq!(listed(said), [Way::Ucx]);
        assert_eq!(listed("bindings:mpi\n"), []);
    }
}
