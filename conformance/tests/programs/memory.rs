//! Remote memory through librpma.

use std::time::Duration;

use uwarp_conformance::check;
use uwarp_conformance::pair;
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Outcome, cc};

use super::{Env, Scratch, World};

/// For programs that a busy machine slows down.
const LONG: Duration = Duration::from_secs(180);

impl World {
    /// `c/rpma.c` at both ends.
    pub fn rpma(&self, env: Env, place: Place<'_>) -> Outcome {
        let (dir, port) = (Scratch::new("rpma")?, free_port());
        let program = cc::build_with("rpma", dir.path(), "-lrpma")?;
        let at = |end: &str, ns| {
            let line = format!("{} {end} {} {port}", program.display(), place.address);
            Ok(self.over_uwarp(&line, ns)?.envs(env).limit(LONG))
        };
        let ends = pair::run(&at("server", place.server)?, &at("client", place.client)?, port)?;
        for (out, last) in [(&ends.server, "ok served"), (&ends.client, "ok closed")] {
            check::has(out, last)?;
            let good = out.stdout.lines().all(|line| line.starts_with("ok ")) && out.stderr.is_empty();
            if !good {
                return ends.failure("not everything is ok");
            }
        }
        Ok(())
    }
}
