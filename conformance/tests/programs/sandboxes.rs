//! Surroundings that lack what programs usually find: no /proc, /sys or /dev/shm, nothing that can be written
//! to, few descriptors, no locked memory. Programs run, or `uwarp doctor` says why not.

use std::ffi::OsString;
use std::path::Path;

use uwarp_conformance::process::{Cmd, Output};
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Outcome, cc, check, pair, require};

use super::Run::Long;
use super::mpis::{MPICH, Mpi, OPEN_MPI};
use super::{Case, LONG, Scratch, World};

const LO: &[Topology] = &[Loopback4];

/// Empty directories in the place of all three, and no right to write anywhere.
const BARE: &str = "bwrap --unshare-user --unshare-pid --ro-bind / / --tmpfs /proc --tmpfs /sys --tmpfs /dev \
                    --dev-bind /dev/null /dev/null --dev-bind /dev/urandom /dev/urandom";
const READ_ONLY: &str = "--remount-ro /proc --remount-ro /sys --remount-ro /dev";
const FEW: &str = "prlimit --nofile=64:64 --memlock=0:0";

const ALL_OF_IT: &str = "no /proc, /sys and /dev/shm, all read-only";
const RUN: &str = "rping, ibv_rc_pingpong, ibv_ud_pingpong and fi_info work as outside";
const SAID: &str = "`uwarp doctor` says what ib_write_bw, ucx_info and MPICH lack, with the remedy";
const MESSAGES: &str = "c/mpi/matching.c over rc, ud and ofi, as outside";

pub fn cases() -> Vec<Case> {
    let row = |program, manner, checked, run| Case { program, manner, checked, at: LO, run: Long(run) };
    vec![
        row("bwrap", ALL_OF_IT, RUN, |w, p| w.verbs_inside(&bare(""), p)),
        row("bwrap", "the same, uwarp doctor", SAID, |w, _| w.doctor_inside()),
        row("bwrap", "the same, a TMPDIR; mpirun.openmpi -np 2", MESSAGES, |w, p| {
            w.mpi_inside(OPEN_MPI, &["rc", "ud", "ofi"], "", p)
        }),
        row(
            "bwrap",
            "the same, a TMPDIR, /dev/shm; mpirun.mpich -np 2",
            "c/mpi/matching.c over rc and ud",
            |w, p| w.mpi_inside(MPICH, &["rc", "ud"], "--tmpfs /dev/shm", p),
        ),
        row("prlimit", "64 descriptors, no locked memory", RUN, |w, p| w.verbs_inside(FEW, p)),
    ]
}

/// The sandbox, with what it has more than the others.
fn bare(more: &str) -> String {
    format!("{BARE} {more} {READ_ONLY}")
}

fn words(line: &str) -> Vec<OsString> {
    line.split_whitespace().map(OsString::from).collect()
}

impl World {
    fn inside(&self, line: &str, sandbox: &str) -> Outcome<Cmd> {
        let uwarp = [self.dist()?.uwarp()?.into_os_string(), "run".into(), "--".into()];
        let cmd = Cmd::line(line).behind(words(sandbox).into_iter().chain(uwarp));
        Ok(cmd.unset("LD_LIBRARY_PATH").unset("XDG_RUNTIME_DIR").limit(LONG))
    }

    fn verbs_inside(&self, sandbox: &str, place: Place<'_>) -> Outcome {
        let pairs = [
            (
                "rping -s -a ADDRESS -p PORT",
                "rping -c -v -V -C 20 -a ADDRESS -p PORT",
                "ping data: rdma-ping-19:",
            ),
            ("ibv_rc_pingpong -g 0 -p PORT", "ibv_rc_pingpong -g 0 -p PORT ADDRESS", "1000 iters in "),
            ("ibv_ud_pingpong -g 0 -p PORT", "ibv_ud_pingpong -g 0 -p PORT ADDRESS", "1000 iters in "),
        ];
        for (server, client, last) in pairs {
            let port = free_port();
            let filled =
                |line: &str| line.replace("ADDRESS", place.address).replace("PORT", &port.to_string());
            let (server, client) = (filled(server), filled(client));
            let ends = pair::run_any(&self.inside(&server, sandbox)?, &self.inside(&client, sandbox)?, port)?;
            check::has(&ends.client, last)?;
        }
        let info = self.inside("fi_info -p verbs", sandbox)?.run_ok()?;
        check::has(&info, "provider: verbs;ofi_rxm")
    }

    fn doctor_inside(&self) -> Outcome {
        let doctor = |program: &str| -> Outcome<Output> {
            let cmd = Cmd::new(self.dist()?.uwarp()?).args("doctor --").arg(program).behind(words(&bare("")));
            cmd.unset("LD_LIBRARY_PATH").unset("XDG_RUNTIME_DIR").limit(LONG).run()
        };
        let said = |program: &str, status: &str, check: &str, remedy: &str| -> Outcome {
            let out = doctor(program)?;
            let mut lines =
                out.stdout.lines().skip_while(|line| !line.starts_with(&format!("{status:<4}  {check} ")));
            let found = lines.next().is_some() && lines.next().is_some_and(|line| line.contains(remedy));
            require!(found, "{program}: no {status} of {check} with \"{remedy}\"\n{}", out.text());
            Ok(())
        };
        said("ib_write_bw", "FAIL", "pci", "--ro-bind /sys /sys")?;
        said("ucx_info", "warn", "files", "XDG_RUNTIME_DIR")?;
        said("ucx_info", "warn", "proc", "--proc /proc")?;
        said("mpirun.mpich", "FAIL", "shm", "--tmpfs /dev/shm")?;
        let out = doctor("rping")?;
        require!(out.exited_ok().is_ok() && !out.stdout.contains("FAIL"), "rping\n{}", out.text());
        Ok(())
    }

    fn mpi_inside(&self, mpi: Mpi, transports: &[&str], more: &str, _: Place<'_>) -> Outcome {
        let dir = Scratch::new("sandbox")?;
        let (uwarp, launcher) = (self.dist()?.uwarp()?, mpi.launcher()?);
        let compiler = mpi.compiler()?.display().to_string();
        let program = cc::build_by(&compiler, "mpi/matching", dir.path(), "")?;
        let writable = |home: &Path| {
            let bind = format!("{more} --bind {} {}", home.display(), home.display());
            bare(&bind)
        };
        for transport in transports {
            let mpi_words =
                ["mpi", "--transport", transport, "--shared-memory", "off", "--"].map(OsString::from);
            let front = words(&writable(dir.path())).into_iter().chain([uwarp.clone().into_os_string()]);
            let mut cmd = Cmd::new(&launcher).args("-np 2").arg(&program).behind(front.chain(mpi_words));
            for (name, value) in mpi.environment()? {
                cmd = cmd.env(name, value);
            }
            let cmd = cmd.env("TMPDIR", dir.path()).env("OMPI_MCA_plm_rsh_agent", "false");
            let out = cmd.unset("LD_LIBRARY_PATH").unset("XDG_RUNTIME_DIR").limit(LONG).run()?;
            out.exited_ok()?;
            check::has(&out, "every message where it belongs")?;
        }
        Ok(())
    }
}
