//! `uwarp doctor`: looks for what would stop a program, and suggests a remedy.

mod host;
mod library;
mod program;
mod scheduling;
pub mod settings;

use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use serde::Serialize;

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
        Check { name, status: Status::Ok, found: found.into(), remedy: None }
    }

    pub fn warn(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { name, status: Status::Warn, found: found.into(), remedy: Some(remedy.into()) }
    }

    pub fn fail(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { name, status: Status::Fail, found: found.into(), remedy: Some(remedy.into()) }
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
    match worst {
        Status::Ok => format!("All {} checks passed.", checks.len()),
        Status::Warn => {
            format!("Programs can run; {} of {} checks have warnings.", count(Status::Warn), checks.len())
        }
        Status::Fail => format!("{} of {} checks failed.", count(Status::Fail), checks.len()),
    }
}
