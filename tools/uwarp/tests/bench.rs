//! `uwarp bench` for a user who cannot measure. The conformance tests, which have a library, test that it
//! measures.

use std::process::{Command, Output, Stdio};

/// With an empty directory for the library.
fn uwarp(words: &[&str]) -> Output {
    let nothing = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_uwarp"));
    command.env("UWARP_LIBDIR", nothing.path()).args(words).stdin(Stdio::null());
    command.output().unwrap()
}

fn complaint(words: &[&str]) -> String {
    let output = uwarp(&[&["bench"], words].concat());
    assert!(!output.status.success(), "{words:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_missing_library_is_said_once_with_its_remedy() {
    let complaint = complaint(&["all", "--quick"]);
    assert!(complaint.starts_with("uwarp: there is no libibverbs.so.1 in "), "{complaint}");
    assert_eq!(complaint.lines().count(), 1, "{complaint}");
}

#[test]
fn times_that_make_no_sense_are_refused() {
    for seconds in ["0", "-1", "NaN", "1e9", "x"] {
        assert!(
            complaint(&["rate", &format!("--seconds={seconds}")]).contains("a number of seconds"),
            "{seconds}"
        );
    }
    assert!(complaint(&["rate", "--rounds", "0"]).contains("--rounds"));
}

/// They were taken, and had no effect.
#[test]
fn options_of_mpi_are_refused_elsewhere() {
    for option in [&["--markdown"][..], &["--ranks", "4"], &["--launcher", "mpirun"]] {
        let complaint = complaint(&[&["latency"], option].concat());
        assert_eq!(complaint, format!("uwarp: {} is only for uwarp bench mpi\n", option[0]));
    }
}

#[test]
fn numbers_of_peers_are_two_and_only_of_memory() {
    assert_eq!(complaint(&["latency", "--peers", "1..8"]), "uwarp: --peers is only for uwarp bench memory\n");
    for peers in ["0..8", "8..1", "1..5000", "..", "x"] {
        assert!(
            complaint(&["memory", "--peers", peers]).contains("two numbers of peers from 1 to 4096"),
            "{peers}"
        );
    }
}

/// The figures were measured, and then thrown away with the plot.
#[test]
fn a_plot_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let nowhere = "/no such directory/x.svg";
    let said = complaint(&["memory", "--peers", "1..2", "--plot", nowhere]);
    assert!(said.starts_with(&format!("uwarp: cannot write the plot to {nowhere}: ")), "{said}");
    for figure in ["latency", "loops", "sharing", "ucx"] {
        let said = complaint(&[figure, "--plot", "/dev/null"]);
        assert_eq!(said, "uwarp: --plot is for sockets, for mpi and for memory with --peers\n");
    }
}

/// It is no command for users, but it must not hang when one finds it.
#[test]
fn an_end_without_orders_ends() {
    let output = uwarp(&["bench-end"]);
    assert!(output.status.success());
    assert!(output.stdout.is_empty());
}
