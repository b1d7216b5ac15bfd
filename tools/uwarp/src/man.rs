//! `uwarp man`: the man page, made from the definition of the command line and from the hand-written parts
//! (docs/man).

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Arg, Command, CommandFactory};
use clap_mangen::Man;

use crate::cli::Cli;
use crate::complain;

const HAND_WRITTEN: &str = include_str!("../../../docs/man/uwarp.1.in");

pub fn print() -> ExitCode {
    let page = page().and_then(|page| io::stdout().write_all(&page));
    match page {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// Title to SYNOPSIS, one section for each command, and the variables of ENVIRONMENT are generated; the rest
/// is written by hand.
fn page() -> io::Result<Vec<u8>> {
    let mut command = Cli::command();
    command.build();
    let man = Man::new(command.clone()).manual("User Commands");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    synopsis(&mut command, &mut page)?;
    let (description, rest) = HAND_WRITTEN.split_once(".SH ENVIRONMENT\n").unwrap_or((HAND_WRITTEN, ""));
    page.write_all(description.as_bytes())?;
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        if subcommand.get_name() != "help" {
            section(subcommand, &mut page)?;
        }
    }
    page.write_all(b".SH ENVIRONMENT\n")?;
    if let Some(run) = command.find_subcommand("run") {
        run.get_arguments().try_for_each(|option| variable(option, &mut page))?;
    }
    page.write_all(rest.as_bytes())?;
    Ok(page)
}

/// A line for each command.
fn synopsis(command: &mut Command, page: &mut Vec<u8>) -> io::Result<()> {
    writeln!(page, ".SH SYNOPSIS")?;
    for subcommand in command.get_subcommands_mut().filter(|subcommand| !subcommand.is_hide_set()) {
        let usage = subcommand.render_usage().to_string();
        writeln!(page, "{}\n.br", usage.trim_start_matches("Usage: ").replace('-', "\\-"))?;
    }
    Ok(())
}

fn section(subcommand: &Command, page: &mut Vec<u8>) -> io::Result<()> {
    writeln!(page, ".SH \"UWARP {}\"", subcommand.get_name().to_uppercase())?;
    // Those of `uwarp run` are listed once.
    let is_run = subcommand.get_name() == "run";
    let shared = subcommand.get_arguments().any(|option| !is_run && option.get_env().is_some());
    let command = subcommand.clone().mut_args(|option| {
        let hidden = option.get_id() == "help" || (!is_run && option.get_env().is_some());
        option.hide(hidden)
    });
    let man = Man::new(command);
    let mut body = Vec::new();
    man.render_synopsis_section(&mut body)?;
    writeln!(body, ".PP\n{}.", subcommand.get_about().cloned().unwrap_or_default())?;
    man.render_options_section(&mut body)?;
    if shared {
        let all = subcommand.get_arguments().any(|option| option.get_id() == "log");
        let which = if all { "The options" } else { "\\-\\-as and \\-\\-devices" };
        writeln!(body, ".PP\n{which} of\n.B uwarp run\nare options of this command, too.")?;
    }
    // One page for all commands: their sections become paragraphs of this one.
    for line in body.split_inclusive(|&byte| byte == b'\n') {
        match line.starts_with(b".SH ") {
            true => page.write_all(b".PP\n")?,
            false => page.write_all(line)?,
        }
    }
    Ok(())
}

fn variable(option: &Arg, page: &mut Vec<u8>) -> io::Result<()> {
    let (Some(name), Some(long)) = (option.get_env(), option.get_long()) else { return Ok(()) };
    writeln!(page, ".TP\n.B {}\n\\-\\-{} of", name.display(), long.replace('-', "\\-"))?;
    writeln!(page, ".BR \"uwarp run\" .")
}
