//! Reads the command line and the variables behind its options. Each mistake is named, with what to do.

use std::env;
use std::error::Error as _;
use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command, CommandFactory, Error, FromArgMatches};

use crate::cli::Cli;
use crate::complain;
use crate::program;
use crate::variables::{self, Fault};

/// Exit status for a command line or a variable that means nothing, as clap's.
const USAGE: u8 = 2;

/// The command to carry out. A mistake that clap finds ends the process.
pub fn parse() -> Result<Cli, ExitCode> {
    let words: Vec<OsString> = env::args_os().collect();
    // Without the variables first: clap would not name the one that is wrong.
    let command = for_each_option(Cli::command(), |option| option.env(None));
    let matches = command.try_get_matches_from(&words).unwrap_or_else(|error| {
        // It names the variables.
        if error.kind() == ErrorKind::DisplayHelp {
            return Cli::command().get_matches_from(&words);
        }
        match better(&error, &words) {
            Some(sentence) => complain(&sentence),
            None => error.exit(),
        }
        std::process::exit(USAGE.into())
    });
    if let Some((name, given)) = matches.subcommand().filter(|(name, _)| ["run", "mpi"].contains(name)) {
        not_an_option(&words, name, given)?;
    }
    if let Some((name, given)) = matches.subcommand() {
        wrong_variables(name, given)?;
    }
    // An empty variable is as if it were not set.
    let command = for_each_option(Cli::command(), |option| {
        let empty = option.get_env().and_then(env::var_os).is_some_and(|value| value.is_empty());
        if empty { option.env(None) } else { option }
    });
    let matches = command.get_matches_from(&words);
    Cli::from_arg_matches(&matches).map_err(|error| {
        complain(&error);
        ExitCode::from(USAGE)
    })
}

/// What to say instead of clap, which takes an unknown option for a value, and the nearest of all words for
/// what was meant.
fn better(error: &Error, words: &[OsString]) -> Option<String> {
    let word = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    let command = Cli::command();
    let given = words.get(1).and_then(|word| word.to_str()).and_then(|name| command.find_subcommand(name));
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let typed = words.iter().skip(1).find(|word| *word != "help")?;
            Some(no_command(word(ContextKind::InvalidSubcommand).or(typed.to_str())?))
        }
        ErrorKind::UnknownArgument => {
            let typed = word(ContextKind::InvalidArg)?;
            match typed.starts_with('-') {
                true => Some(unknown_option(typed, given)),
                false => {
                    Some(format!("{0} takes no {typed}; `{0} --help` shows what it takes", path_of(given)))
                }
            }
        }
        ErrorKind::MissingRequiredArgument => {
            let Some(ContextValue::Strings(missing)) = error.get(ContextKind::InvalidArg) else {
                return None;
            };
            let names: Vec<_> = missing.iter().map(|name| name.trim_matches(['<', '>', '.'])).collect();
            let (names, command) = (names.join(" and "), path_of(given));
            Some(format!("{command} needs a {names}; `{command} --help` shows how to write it"))
        }
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => {
            let (option, value) = (word(ContextKind::InvalidArg)?, word(ContextKind::InvalidValue)?);
            let reason = match error.get(ContextKind::ValidValue) {
                Some(ContextValue::Strings(values)) if !values.is_empty() => {
                    format!("the values are: {}", values.join(", "))
                }
                _ => match error.source() {
                    Some(reason) => reason.to_string(),
                    None => format!("`{} --help` says what it takes", path_of(given)),
                },
            };
            let near = word(ContextKind::SuggestedValue);
            let near = near.map_or_else(String::new, |near| format!("; did you mean {near}?"));
            // "--crc <on|off>", "--sockets[=<RULE>]", "<WHAT>".
            let given = match option.split([' ', '[']).next() {
                Some(name) if name.starts_with("--") && value.is_empty() => format!("{name} without a value"),
                Some(name) if name.starts_with("--") => format!("{name}={value}"),
                _ => value.to_owned(),
            };
            Some(format!("{given} is not valid: {reason}{near}"))
        }
        ErrorKind::ArgumentConflict => {
            let name = |text: &str| text.split([' ', '[', '=']).next().unwrap_or_default().to_owned();
            let option = name(word(ContextKind::InvalidArg)?);
            let others: Vec<_> = match error.get(ContextKind::PriorArg)? {
                ContextValue::String(other) => vec![name(other)],
                ContextValue::Strings(others) => others.iter().map(|other| name(other)).collect(),
                _ => return None,
            };
            Some(match others.iter().all(|other| *other == option) {
                true => format!("{option} is given more than once"),
                false => format!("{option} does not go with {}", others.join(" and ")),
            })
        }
        ErrorKind::InvalidUtf8 => Some("an option or its value is not valid UTF-8".to_owned()),
        _ => None,
    }
}

/// `given`: the command that has no such option, if there was one in front of it.
fn unknown_option(typed: &str, given: Option<&Command>) -> String {
    let mut root = Cli::command();
    // Only then it has --help and --version.
    root.build();
    let command = given.unwrap_or(&root);
    let name = typed.trim_start_matches('-').split('=').next().unwrap_or_default();
    let longs = |command: &Command| -> Vec<String> {
        command.get_arguments().filter_map(|option| option.get_long()).map(str::to_owned).collect()
    };
    if name.starts_with(|first: char| first.is_ascii_digit()) {
        return format!("{typed} is below 0; `{} --help` says which values there are", path_of(given));
    }
    if let Some(near) = variables::nearest(name, longs(command).iter().map(String::as_str)) {
        return format!("unknown option {typed}; did you mean --{near}?");
    }
    let run = root.find_subcommand("run").filter(|run| {
        given.is_none()
            && run.get_arguments().any(|option| {
                option.get_long() == Some(name)
                    || option.get_short().is_some_and(|short| typed == format!("-{short}"))
            })
    });
    match run {
        Some(_) => format!("{typed} is an option of `uwarp run`: uwarp run {typed} … -- PROGRAM"),
        None => format!("unknown option {typed}; `{} --help` lists the options", path_of(given)),
    }
}

fn path_of(command: Option<&Command>) -> String {
    command.map_or_else(|| "uwarp".to_owned(), |command| format!("uwarp {}", command.get_name()))
}

fn no_command(typed: &str) -> String {
    let command = Cli::command();
    let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
    let names: Vec<_> = commands.map(Command::get_name).collect();
    match variables::nearest(typed, names.iter().copied()) {
        Some(name) => format!("there is no command {typed}; did you mean {name}?"),
        None if program::find(OsStr::new(typed)).is_ok() => {
            format!("there is no command {typed}; to run the program: uwarp run -- {typed}")
        }
        None => format!("there is no command {typed}; there are: {}", names.join(", ")),
    }
}

fn for_each_option(command: Command, change: impl Fn(Arg) -> Arg + Copy) -> Command {
    command.mut_subcommands(|command| command.mut_args(change))
}

/// The first word that is no option begins the program, so a mistyped option would be taken for it.
fn not_an_option(words: &[OsString], subcommand: &str, given: &ArgMatches) -> Result<(), ExitCode> {
    let program: Vec<_> =
        given.get_many::<OsString>("program").map(|words| words.collect()).unwrap_or_default();
    let Some(first) = program.first().and_then(|first| first.to_str()) else { return Ok(()) };
    let before = words.len().checked_sub(program.len() + 1).and_then(|at| words.get(at));
    if before.is_some_and(|word| word == "--") {
        return Ok(());
    }
    let refuse = |sentence: String| {
        complain(&sentence);
        Err(ExitCode::from(USAGE))
    };
    if first.starts_with('-') {
        let typed = first.trim_start_matches('-').split('=').next().unwrap_or_default();
        let command = Cli::command();
        let options = command.find_subcommand(subcommand).into_iter().flat_map(Command::get_arguments);
        let options: Vec<_> = options.filter_map(|option| option.get_long()).collect();
        return refuse(match variables::nearest(typed, options) {
            Some(name) => format!("unknown option {first}; did you mean --{name}?"),
            None => format!(
                "unknown option {first}; `uwarp {subcommand} --help` lists the options. \
                 Options of the program go after its name: uwarp {subcommand} -- PROGRAM {first}"
            ),
        });
    }
    let without_rule = given.get_one::<String>("sockets").is_some_and(String::is_empty);
    let is_rule = ["upgrade", "rsockets", "tcp"].contains(&first.split(':').next().unwrap_or_default());
    if without_rule && is_rule && program::find(OsStr::new(first)).is_err() {
        return refuse(format!("{first} is not a program; did you mean --sockets={first}?"));
    }
    Ok(())
}

/// Names all variables that are wrong, unless an option takes their place.
fn wrong_variables(subcommand: &str, given: &ArgMatches) -> Result<(), ExitCode> {
    let command = Cli::command();
    let options: Vec<_> = command
        .find_subcommand(subcommand)
        .into_iter()
        .flat_map(Command::get_arguments)
        .filter_map(|option| Some((option.get_env()?.to_owned(), option.get_id().to_string())))
        .collect();
    if options.is_empty() {
        return Ok(());
    }
    let replaced = |variable: &str| {
        let option = options.iter().find(|(name, _)| name == variable);
        option.is_some_and(|(_, id)| given.value_source(id) == Some(ValueSource::CommandLine))
    };
    let faults = variables::set().into_iter().filter(|(name, _)| !replaced(name));
    let faults: Vec<_> = faults.filter_map(|(name, value)| variables::judge(&name, &value)).collect();
    for Fault { invalid, found, remedy } in &faults {
        match *invalid {
            true => complain(&format_args!("{found}; {remedy}")),
            false => complain(&format_args!("warning: {found}; {remedy}")),
        }
    }
    match faults.iter().any(|fault| fault.invalid) {
        true => Err(ExitCode::from(USAGE)),
        false => Ok(()),
    }
}
