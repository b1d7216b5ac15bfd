//! RDMA ports are TCP ports here, which a program cannot know: the library explains the collision, beside the
//! errno that the program gets.

use std::net::TcpListener;
use std::path::Path;

use uwarp_conformance::dist::Dist;
use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{cc, pair};

const ENOPROTOOPT: &str = "92";

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

/// qemu-user and other emulations of the kernel answer IP_BIND_ADDRESS_NO_PORT with ENOPROTOOPT: a wish,
/// without which the port is taken earlier.
#[test]
fn a_kernel_that_takes_ports_at_once_connects_by_number() {
    let fails = cc::build("fails", &Path::new(env!("CARGO_TARGET_TMPDIR")).join("c-ports")).unwrap();
    let refused = || [fails.clone().into(), "late port".into(), "0".into(), ENOPROTOOPT.into()];
    let port = free_port();
    let end = |to: &str| Cmd::line(&format!("ibv_rc_pingpong -g 0 -n 20 -p {port} {to}")).behind(refused());
    let ends = pair::run(&over_uwarp(end("")), &over_uwarp(end("127.0.0.1")), port).unwrap();
    let both = [&ends.server, &ends.client].map(|end| end.stderr.contains("there were 1"));
    // One of them connects.
    assert!(both.contains(&true), "no end asked for it: {}", ends.client.text());
    assert!(ends.client.stdout.contains("20 iters in"), "{}", ends.client.text());
}
