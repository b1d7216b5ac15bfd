//! RDMA ports are TCP ports here, which a program cannot know: the library explains the collision, beside the
//! errno that the program gets.

use std::net::TcpListener;
use std::path::Path;

use uwarp_conformance::cc;
use uwarp_conformance::dist::Dist;
use uwarp_conformance::process::Cmd;

/// How the explanation begins, behind the address.
const EXPLAINED: &str = " is in use: RDMA ports are TCP ports here";

fn over_uwarp(cmd: Cmd) -> Cmd {
    cmd.env("LD_LIBRARY_PATH", Dist::find().unwrap().lib())
}

#[test]
fn a_server_on_a_port_that_a_tcp_program_has_is_told_why() {
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = tcp.local_addr().unwrap();
    let line = format!("rping -s -a 127.0.0.1 -p {}", address.port());
    let output = over_uwarp(Cmd::line(&line)).run().unwrap();
    assert!(output.exited_ok().is_err());
    // EADDRNOTAVAIL: a loopback address is any address to rdma_cm.
    assert!(output.stderr.contains("Cannot assign requested address"), "{}", output.text());
    assert!(output.stderr.contains(&format!("{address}{EXPLAINED}")), "{}", output.text());
}

/// It was said of the first collision of a process only, and never when a port was lost between bind and
/// listen.
#[test]
fn every_collision_is_explained_once_and_not_without_end() {
    let program = cc::build("ports", &Path::new(env!("CARGO_TARGET_TMPDIR")).join("c-ports")).unwrap();
    let output = over_uwarp(Cmd::new(program).arg("127.0.0.1")).run_ok().unwrap();
    let ports: Vec<_> = output.stdout.lines().filter_map(|line| line.strip_prefix("taken ")).collect();
    let times = |port: &str| output.stderr.matches(&format!("127.0.0.1:{port}{EXPLAINED}")).count();
    let times: Vec<_> = ports.iter().map(|port| times(port)).collect();
    assert_eq!(times, [[1; 16].as_slice(), &[0; 4]].concat(), "{}", output.text());
}
