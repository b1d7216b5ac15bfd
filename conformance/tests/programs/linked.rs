//! Rows between two programs of one host run over memory, by default: each asserts that none of its streams
//! fell back to TCP, but for those listed here.

use std::sync::Mutex;

use uwarp_conformance::links::{Links, Log};
use uwarp_conformance::topology::Topology;
use uwarp_conformance::{Outcome, fail, require};

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

    /// A row has run. One that failed shows what the library has logged.
    pub fn row(&self, case: &Case, topology: Topology, result: Outcome) -> Outcome {
        let said = self.log.take();
        if let Err(why) = result {
            fail!("{why}{}", said.map_or_else(|why| why.0, |(_, logged)| logged));
        }
        let (links, _) = said?;
        self.sum.lock().unwrap_or_else(|e| e.into_inner()).add(&links);
        let is_local = matches!(topology, Topology::Loopback4 | Topology::Loopback6);
        match self.link.as_deref() {
            None if is_local && !may_use_tcp(case) => {
                require!(links.fell_back() == 0, "streams of one host fell back to TCP\n{links}");
            }
            Some("rd") if !chooses_its_links(case) => {
                let all = links.memory == 0 && links.fell_back() == 0;
                require!(all, "UWARP_LINK=rd, and not all goes that way\n{links}");
            }
            Some("tcp") => require!(links.memory == 0, "UWARP_LINK=tcp, and not all is TCP\n{links}"),
            _ => {}
        }
        Ok(())
    }

    /// What all rows had.
    pub fn shown(&self) -> String {
        format!("ends of streams: {}", self.sum.lock().unwrap_or_else(|e| e.into_inner()))
    }
}

/// Rows in which the two ends may share nothing, or that choose their links themselves.
fn may_use_tcp(case: &Case) -> bool {
    const MANNERS: [&str; 4] = [
        // Another view of the peer, or nothing to offer in.
        "UWARP_PEER=off",
        "MPA revision 1",
        // The server is another user's.
        "as an ordinary user",
        // Their connections are the kernel's at first, and stay TCP.
        "upgraded",
    ];
    chooses_its_links(case) || MANNERS.iter().any(|manner| case.manner.contains(manner))
}

/// They assert them.
fn chooses_its_links(case: &Case) -> bool {
    ["over rd", "rd at one end", "hybrid:"].iter().any(|manner| case.manner.contains(manner))
}

/// Rows that say nothing with `UWARP_LINK=rd`: what is upgraded is a connection of TCP, and where nobody
/// listens nobody answers, so that link cannot be had (EOPNOTSUPP, which rows of `over_rd` want).
pub fn is_not_for_rd(case: &Case) -> bool {
    ["upgraded", "nobody listens"].iter().any(|manner| case.manner.contains(manner))
}
