//! `uwarp stat` of nothing.

use std::process::Command;

/// It printed "No process of yours uses uwarp", as without the option.
#[test]
fn a_process_that_does_not_use_uwarp_is_named() {
    let pid = std::process::id().to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_uwarp")).args(["stat", "--pid", &pid]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let expected = format!("uwarp: process {pid} does not use uwarp, is another user's, or does not exist\n");
    assert_eq!((said, output.stdout.len()), (expected, 0));
}
