//! Rows between two programs of one host run over memory, by default: each asserts that none of its streams fell
//! back to TCP, but for those listed here.

use std::sync::Mutex;

use uwarp_conformance::links::{Links, Log};
use uwarp_conformance::topology::Topology;
use uwarp_conformance::{Outcome, require};

use super::Case;

pub struct Linked {
    log: Log,
    sum: Mutex<Links>,
    /// Who runs all rows over one link says so.
    link: Option<String>,
}

impl Linked {
    pub fn start() -> Outcome<Self> {
        let link = std::env::var("UWARP_LINK").ok().filter(|link| !link.is_empty());
        Ok(Self { log: Log::start()?, sum: Mutex::default(), link })
    }

    /// A row has run.
    pub fn row(&self, case: &Case, topology: Topology) -> Outcome {
        let links = self.log.take()?;
        self.sum.lock().unwrap_or_else(|e| e.into_inner()).add(&links);
        if std::env::var_os("SHOW_LINKS").is_some() {
            eprintln!("LINKS {} {} [{topology}] {links}", case.program, case.manner);
        }
        Ok(())
    }
}
