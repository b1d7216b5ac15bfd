//! `uwarp mpi`: finds out which MPI a launcher belongs to, sets what this MPI needs to run over uwarp, says
//! so, and becomes the launcher as `uwarp run` does.

mod launcher;
mod plan;

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;

use crate::cli::{DeviceOptions, Files, MpiArgs, RunArgs, RunOptions, Switch, Transport};
use crate::{complain, exec, program, run};
pub use launcher::Launcher;
use plan::Plan;

/// Does not return if the launcher starts.
pub fn run(args: MpiArgs) -> ExitCode {
    let Some(name) = args.program.first() else {
        complain(&"no launcher given");
        return ExitCode::from(run::OWN_FAILURE);
    };
    let path = match program::find(name) {
        Ok(path) => path,
        Err(reason) => {
            complain(&format_args!("{reason}; {}", reason.remedy()));
            return ExitCode::from(reason.exit_status());
        }
    };
    let plan = Launcher::identify(&path).and_then(|launcher| {
        let transport = args.transport.unwrap_or_else(|| launcher.best());
        let wanted = plan::Wanted { transport, shared_memory: args.shared_memory == Switch::On };
        Plan::new(&launcher, wanted, &args.device, |variable| env::var_os(variable))
    });
    let plan = match plan {
        Ok(plan) => plan,
        Err(reason) => {
            complain(&reason);
            return ExitCode::from(run::OWN_FAILURE);
        }
    };
    let words = plan.command(&args.program);
    plan.lines(&words).iter().for_each(|line| match args.dry_run {
        true => crate::say!("{line}"),
        false => complain(line),
    });
    if args.dry_run {
        return ExitCode::SUCCESS;
    }
    if !plan.over_uwarp {
        let error = exec::exec(&path, &words, &plan.variables(), true);
        complain(&format_args!("cannot execute {}: {error}", path.display()));
        return ExitCode::from(126);
    }
    start(args.device, args.options, &plan, words)
}

fn start(device: DeviceOptions, options: RunOptions, plan: &Plan, words: Vec<OsString>) -> ExitCode {
    let files = options.files.or(plan.files.then_some(Files::On));
    let device = DeviceOptions { view: device.view.or(plan.view), ..device };
    let args = RunArgs { verbose: false, device, options: RunOptions { files, ..options }, program: words };
    run::run_with(&args, plan.variables())
}

impl Transport {
    /// As the user writes it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Rc => "rc",
            Self::Ud => "ud",
            Self::Hybrid => "hybrid",
            Self::Ofi => "ofi",
            Self::Openib => "openib",
            Self::Tcp => "tcp",
        }
    }
}
