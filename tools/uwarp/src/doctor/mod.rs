//! `uwarp doctor`: looks for what would stop a program, and suggests a remedy.

mod host;
mod library;
mod program;
mod scheduling;
pub mod settings;

use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use serde::Serialize;
use uwarp_driver::config::without_error_numbers;

use crate::cli::DoctorArgs;
use crate::libdir;

/// Exit status 1 if a check failed; 0 with warnings.
pub fn run(args: &DoctorArgs) -> ExitCode {
    let libdir = libdir::find();
    let mut checks = library::checks(&libdir);
    checks.extend(settings::checks(libdir.as_deref().ok()));
    checks.extend(host::checks());
    if let Some(name) = args.program.first() {
        checks.extend(program::checks(name, libdir.as_deref().ok()));
    }
    let worst = checks.iter().map(|check| check.status).max().unwrap_or(Status::Ok);
    if args.json {
        crate::say!("{}", serde_json::json!({ "worst": worst, "checks": checks }));
    } else {
        checks.iter().for_each(print);
        crate::say!("\n{}", conclusion(&checks, worst));
    }
    match worst {
        Status::Fail => ExitCode::FAILURE,
        Status::Ok | Status::Warn => ExitCode::SUCCESS,
    }
}

/// From best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    /// Works, but not in every case or not as well as it could.
    Warn,
    /// Programs will not run, or not over uwarp.
    Fail,
}

/// What one check found.
#[derive(Debug, Serialize)]
pub struct Check {
    name: &'static str,
    status: Status,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Check {
    pub fn ok(name: &'static str, found: impl Into<String>) -> Check {
        Check { name, status: Status::Ok, found: without_error_numbers(&found.into()), remedy: None }
    }

    pub fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { status: Status::Warn, remedy: Some(remedy.into()), ..Check::ok(name, found) }
    }

    pub fn fail(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { status: Status::Fail, remedy: Some(remedy.into()), ..Check::ok(name, found) }
    }
}

fn print(check: &Check) {
    let (word, colour) = match check.status {
        Status::Ok => ("ok", AnsiColor::Green),
        Status::Warn => ("warn", AnsiColor::Yellow),
        Status::Fail => ("FAIL", AnsiColor::Red),
    };
    let style = Style::new().fg_color(Some(colour.into())).bold();
    crate::say!("{style}{word:<4}{style:#}  {:<12} {}", check.name, check.found);
    if let Some(remedy) = &check.remedy {
        crate::say!("{:<18} -> {remedy}", "");
    }
}

fn conclusion(checks: &[Check], worst: Status) -> String {
    let count = |status| checks.iter().filter(|check| check.status == status).count();
    let warnings = match count(Status::Warn) {
        1 => "1 has a warning".to_owned(),
        warnings => format!("{warnings} have warnings"),
    };
    let (all, failed) = (checks.len(), count(Status::Fail));
    match worst {
        Status::Ok => format!("All {all} checks passed."),
        Status::Warn => format!("Programs can run; of {all} checks, {warnings}."),
        Status::Fail if count(Status::Warn) > 0 => {
            format!("Of {all} checks, {failed} failed, and {warnings}.")
        }
        Status::Fail => format!("{failed} of {all} checks failed."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_counts_failures_and_warnings() {
        let checks = |warnings: usize, failures: usize| {
            let mut checks = vec![Check::ok("a", "")];
            checks.extend((0..warnings).map(|_| Check::warn("b", "", "")));
            checks.extend((0..failures).map(|_| Check::fail("c", "", "")));
            conclusion(&checks, checks.iter().map(|check| check.status).max().unwrap())
        };
        assert_eq!(checks(0, 0), "All 1 checks passed.");
        assert_eq!(checks(1, 0), "Programs can run; of 2 checks, 1 has a warning.");
        assert_eq!(checks(2, 0), "Programs can run; of 3 checks, 2 have warnings.");
        assert_eq!(checks(0, 1), "1 of 2 checks failed.");
        assert_eq!(checks(2, 1), "Of 4 checks, 1 failed, and 2 have warnings.");
    }
}
