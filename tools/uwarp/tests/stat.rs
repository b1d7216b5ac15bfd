//! `uwarp stat` of nothing.

use std::process::Command;

fn stat(pid: &str) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_uwarp")).args(["stat", "--pid", pid]).output().unwrap();
    assert!(output.stdout.is_empty(), "{output:?}");
    (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
}

/// It printed "No process of yours uses uwarp", as without the option; then one sentence for all causes.
#[test]
fn a_process_that_does_not_answer_is_named_with_the_reason() {
    let pid = std::process::id().to_string();
    let (status, said) = stat(&pid);
    assert_eq!(status, 1);
    assert!(said.starts_with(&format!("uwarp: process {pid} (")), "{said}");
    assert!(
        said.ends_with(
            ") has opened no device of uwarp, or runs with --stat off. Was it started by `uwarp run`?\n"
        ),
        "{said}"
    );
    // Above the kernel's largest number.
    assert_eq!(stat("4194305"), (1, "uwarp: there is no process 4194305\n".to_owned()));
    // As root, of another user; as another user, of root.
    let other = Command::new("setpriv")
        .args(["--reuid", "65534", "--clear-groups", "sleep", "60"])
        .spawn()
        .ok()
        .filter(|_| rustix::process::getuid().is_root());
    if let Some(mut other) = other {
        while std::fs::read_to_string(format!("/proc/{}/comm", other.id())).unwrap() != "sleep\n" {
            std::thread::yield_now();
        }
        let (pid, (status, said)) = (other.id(), stat(&other.id().to_string()));
        other.kill().unwrap();
        other.wait().unwrap();
        let expected = format!("uwarp: process {pid} (sleep) is of user 65534, and `uwarp stat` shows");
        assert!(status == 1 && said.starts_with(&expected), "{said}");
        assert!(said.ends_with(&format!("sudo -u '#65534' uwarp stat --pid {pid}\n")), "{said}");
    }
}
