//! The man page and docs/settings.md name every option and variable there is.

use std::process::Command;

fn uwarp(words: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_uwarp")).args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The variables that the help of `uwarp run` names.
fn variables() -> Vec<String> {
    let help = uwarp(&["run", "--help"]);
    let named =
        help.split("[env: ").skip(1).filter_map(|rest| rest.split([']', '=']).next().map(str::to_owned));
    let named: Vec<_> = named.collect();
    assert!(named.len() >= 10, "{named:?}");
    named
}

#[test]
fn man_page_names_every_variable_once_and_every_section() {
    let page = uwarp(&["man"]);
    for variable in variables() {
        assert_eq!(page.matches(&format!(".B {variable}\n")).count(), 1, "{variable}");
    }
    for section in
        ["NAME", "SYNOPSIS", "DESCRIPTION", "\"UWARP RUN\"", "ENVIRONMENT", "\"EXIT STATUS\"", "EXAMPLES"]
    {
        assert_eq!(page.matches(&format!(".SH {section}\n")).count(), 1, "{section}");
    }
    // It was "uwarp [-h|--help] [-V|--version] <subcommands>".
    for line in [
        "uwarp run [OPTIONS] \\-\\- PROGRAM [ARGS]...",
        "uwarp stat [OPTIONS]",
        "uwarp bench [OPTIONS] <WHAT>",
    ] {
        assert!(page.contains(&format!("\n{line}\n.br\n")), "{line}");
    }
}

#[test]
fn settings_md_lists_every_variable() {
    let page = include_str!("../../../docs/settings.md");
    for variable in variables() {
        assert!(
            page.contains(&format!("| `{variable}` |")),
            "{variable} is not in the table of docs/settings.md"
        );
    }
}

#[test]
fn version_names_the_wire() {
    assert!(uwarp(&["--version"]).contains("MPA revisions 1 and 2"));
    assert!(uwarp(&["-V"]).starts_with(concat!("uwarp ", env!("CARGO_PKG_VERSION"))));
}
