//! Communication libraries over rdma_cm: libfabric's verbs provider, and Open MPI on top of it.

use std::path::Path;
use std::time::Duration;

use uwarp_conformance::check;
use uwarp_conformance::netns::Veth;
use uwarp_conformance::pair;
use uwarp_conformance::process::Output;
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Outcome, cc, require};

use super::{Env, Scratch, World, mpi};

/// For programs that a busy machine slows down.
const LONG: Duration = Duration::from_secs(180);

/// As `fi_pingpong` prints its default sizes.
const SIZES: [&str; 6] = ["64", "256", "1k", "4k", "64k", "1m"];

impl World {
    /// `fi_info -p verbs`: connected endpoints, and reliable datagrams of `ofi_rxm` on top of them.
    pub fn fi_info(&self, place: Place<'_>) -> Outcome {
        let out = self.over_uwarp("fi_info -p verbs", place.client)?.run_ok()?;
        check::no_complaints(&out)?;
        for line in ["provider: verbs", "provider: verbs;ofi_rxm", "domain: uwarp0", "type: FI_EP_MSG"] {
            let found = out.stdout.lines().any(|l| l.trim() == line);
            require!(found, "no line \"{line}\"\n{}", out.text());
        }
        Ok(())
    }

    /// `fi_pingpong` with this provider and type of endpoint, its data checked at both ends.
    pub fn fi_pingpong(&self, endpoint: &str, env: Env, place: Place<'_>) -> Outcome {
        // Of 1,000 it would print "1k".
        let (port, rounds) = (free_port(), if self.thorough { 999 } else { 100 });
        let v6 = if place.address.contains(':') { "-6" } else { "" };
        let line = format!("fi_pingpong {endpoint} -c -I {rounds} {v6}");
        let server = self.over_uwarp(&format!("{line} -B {port}"), place.server)?.envs(env).limit(LONG);
        let client = format!("{line} -P {port} {}", place.address);
        let client = self.over_uwarp(&client, place.client)?.envs(env).limit(LONG);
        let ends = pair::run(&server, &client, port)?;
        for out in [&ends.server, &ends.client] {
            check::no_complaints(out)?;
            // "64  100  =100  …": sent, and as many acknowledged.
            let complete = |size: &&str| {
                let wanted = [size.to_string(), rounds.to_string(), format!("={rounds}")];
                out.stdout.lines().any(|line| line.split_whitespace().take(3).eq(&wanted))
            };
            if !SIZES.iter().all(complete) {
                return ends.failure(format_args!("not {rounds} rounds of each of {SIZES:?}"));
            }
        }
        Ok(())
    }

    /// `c/mpi/exchange.c` with so many ranks: on this host, or dealt out to the two namespaces.
    pub fn mpi(&self, ranks: u32, env: Env, place: Place<'_>) -> Outcome {
        let dir = Scratch::new("mpi")?;
        let program = cc::build_by("mpicc", "mpi/exchange", dir.path(), "")?;
        let out = self.mpirun(ranks, env, &program, &dir, place)?;
        out.exited_ok()?;
        for part in ["ring", "neighbours", "all-to-all", "all-reduce", "large"] {
            check::has(&out, &format!("ok {part}: "))?;
        }
        check::has(&out, "every byte as it was sent")
    }

    fn mpirun(
        &self,
        ranks: u32,
        env: Env,
        program: &Path,
        dir: &Scratch,
        place: Place<'_>,
    ) -> Outcome<Output> {
        // No other way between ranks than libfabric: without a device there is none, and the job fails.
        let line = format!(
            "mpirun -np {ranks} -x LD_LIBRARY_PATH --mca pml cm --mca mtl ofi \
             --mca mtl_ofi_provider_include verbs;ofi_rxm"
        );
        let mut mpirun = self
            .over_uwarp(&line, place.server)?
            .envs(env)
            .env("TMPDIR", dir.path())
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .env("OMPI_MCA_rmaps_base_oversubscribe", "1");
        mpirun = match (place.server, place.client) {
            (Some(server), Some(client)) => {
                let (a, b, each) = (Veth::SERVER4, Veth::CLIENT4, ranks / 2);
                mpirun
                    .env("OMPI_MCA_plm_rsh_agent", mpi::agent())
                    .env("NAMESPACES", format!("{a}={} {b}={}", server.name(), client.name()))
                    .args(&format!("--host {a}:{each},{b}:{each}"))
            }
            // Nothing is started elsewhere, and there need be no ssh.
            _ => mpirun.env("OMPI_MCA_plm_rsh_agent", "false"),
        };
        let rounds = if self.thorough { "20" } else { "3" };
        let limit = if self.thorough { LONG * 3 } else { LONG };
        // Asked to end, mpirun ends its daemons and ranks, which are in other process groups.
        Ok(mpirun.arg(program).arg(rounds).limit(limit).spawn()?.wait_at_most(limit))
    }
}
