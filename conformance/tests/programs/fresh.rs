//! Fresh machines: the README's first commands on a Debian that has git and make alone.

use std::path::Path;
use std::time::Duration;

use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::{Outcome, check};

use super::Case;
use super::Run::Long;

const LO: &[Topology] = &[Loopback4];
const DEMO: &str = "`make` installs Debian's Rust and builds `dist/`; every program of `make demo` works";

pub fn cases() -> Vec<Case> {
    let row = |manner, run| Case { program: "make", manner, checked: DEMO, at: LO, run: Long(run) };
    vec![
        row("and make demo on a fresh Debian 12", |_, _| on("bookworm")),
        row("and make demo on a fresh Debian 13", |_, _| on("trixie")),
    ]
}

fn on(suite: &str) -> Outcome {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/fresh-debian");
    // Some minutes, most of them to build.
    let out = Cmd::new(script).arg(suite).limit(Duration::from_secs(3600)).run_ok()?;
    check::has(&out, " passed, 0 failed")?;
    check::has(&out, "rping over veth ")
}
