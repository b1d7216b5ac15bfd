//! What callgrind has written.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use serde::Serialize;

use crate::bench::protocol::{Failure, Result};

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    pub instructions: u64,
    /// Those that lock the bus, and barriers.
    pub locked: u64,
    /// Copies between the library's memory and registered memory.
    pub copies: u64,
}

/// The routine that copies from and to registered memory (`crates/mem/src/guard.rs`).
const COPY: &str = "uwarp_guarded_copy";

/// What the process has counted, in all threads: the samples in their order. Their files are removed.
pub fn take(directory: &Path, process: u32) -> Result<Vec<Counts>> {
    let doing = || Failure::of("what callgrind counted");
    let mut samples = Vec::new();
    for number in 1.. {
        let path = directory.join(format!("{process}.{number}"));
        if !path.exists() {
            break;
        }
        let text = fs::read_to_string(&path).map_err(doing())?;
        samples.push(parse(&text).ok_or_else(|| Failure::new("callgrind counted other things"))?);
        fs::remove_file(&path).map_err(doing())?;
    }
    Ok(samples)
}

fn parse(text: &str) -> Option<Counts> {
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let events: Vec<_> = value("events:")?.split_whitespace().collect();
    let totals: Vec<_> = value("totals:")?.split_whitespace().collect();
    let total = |event| {
        let at = events.iter().position(|name| *name == event)?;
        // Zeros at the end are left out.
        totals.get(at).map_or(Some(0), |number| number.parse().ok())
    };
    Some(Counts { instructions: total("Ir")?, locked: total("Ge")?, copies: calls(text, COPY) })
}

/// How often a function was called. Names are written once, with a number that stands for them afterwards.
fn calls(text: &str, function: &str) -> u64 {
    let (mut names, mut called, mut count) = (HashMap::new(), "", 0);
    for line in text.lines() {
        if let Some(reference) = line.strip_prefix("cfn=").or_else(|| line.strip_prefix("fn=")) {
            let (number, name) = reference.split_once(' ').unwrap_or((reference, ""));
            if !name.is_empty() {
                names.insert(number, name);
            }
            called = names.get(number).copied().unwrap_or("");
        } else if let Some(call) = line.strip_prefix("calls=")
            && called == function
        {
            count += call.split(' ').next().and_then(|number| number.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROFILE: &str = "# callgrind format\nversion: 1\npid: 7\npart: 1\n\n\
        events: Ir Ge\nsummary: 30 2\n\n\
        fl=(1) a.rs\nfn=(1) poll\n10 20 1\ncfn=(2) uwarp_guarded_copy\ncalls=3 100\n10 10 1\n\n\
        fn=(2)\n100 10 1\n\nfn=(3) post\ncfn=(2)\ncalls=4 100\n10 0\ncfn=(1)\ncalls=9 10\n12 0\n\n\
        totals: 30 2\n";

    #[test]
    fn totals_and_calls_are_read() {
        let counts = Counts { instructions: 30, locked: 2, copies: 7 };
        assert_eq!(parse(PROFILE), Some(counts));
        let other = PROFILE.replace("totals: 30 2", "totals: 30");
        assert_eq!(parse(&other), Some(Counts { locked: 0, ..counts }));
        assert_eq!(parse(&PROFILE.replace("Ge", "Dr")), None);
    }
}
