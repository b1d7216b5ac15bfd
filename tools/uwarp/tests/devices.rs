//! `uwarp devices` against a library made of `stand_in.c`.

mod common;

use std::path::Path;
use std::process::Output;

use common::{cc, uwarp};
use serde_json::{Value, json};

fn stand_in(flags: &[&str]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in.c");
    cc(&[&["-shared", "-fPIC"], flags].concat(), &directory.path().join("libibverbs.so.1"), &[&source]);
    directory
}

fn run(libdir: &Path, words: &[&str]) -> Output {
    uwarp(libdir).args(words).output().unwrap()
}

fn devices(libdir: &Path) -> Value {
    let output = run(libdir, &["devices", "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice::<Value>(&output.stdout).unwrap()["devices"].clone()
}

#[test]
fn everything_the_library_says_is_in_the_json() {
    let libdir = stand_in(&[]);
    let expected = json!([{
        "name": "stand_in0",
        "guid": "0200:00ff:fe00:1234",
        "node_type": "RNIC",
        "transport": "iWARP",
        "view": "iwarp",
        "firmware": "1.2.3",
        "ports": [{
            "port": 1,
            "state": "PORT_ACTIVE",
            "link_layer": "Ethernet",
            "active_mtu": 1024,
            "max_message": 1_u32 << 30,
            "lid": 7,
            "gids": [
                {
                    "index": 0,
                    "gid": "0000:0000:0000:0000:0000:ffff:7f00:0001",
                    "type": null,
                    "address": "127.0.0.1",
                    "interface": "lo",
                },
                {
                    "index": 2,
                    "gid": "fd00:0000:0000:0000:0000:0000:0000:0002",
                    "type": "RoCE v2",
                    "address": "fd00::2",
                    "interface": interface_of("fd00::2"),
                },
            ],
        }],
    }]);
    assert_eq!(devices(libdir.path()), expected);
}

/// The machine that the test runs on may have that very address.
fn interface_of(address: &str) -> Value {
    let addresses = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    let wanted: std::net::Ipv6Addr = address.parse().unwrap();
    let digits = format!("{:032x}", u128::from(wanted));
    let line = addresses.lines().find(|line| line.starts_with(&digits));
    line.and_then(|line| line.split_whitespace().last()).into()
}

#[test]
fn view_is_told_by_node_type_and_link_layer() {
    let libdir = stand_in(&["-DVIEW_ROCE"]);
    let devices = devices(libdir.path());
    assert_eq!((&devices[0]["view"], &devices[0]["node_type"]), (&json!("roce"), &json!("CA")));
}

#[test]
fn table_shows_device_and_addresses() {
    let libdir = stand_in(&[]);
    let output = run(libdir.path(), &["devices"]);
    let text = String::from_utf8(output.stdout).unwrap();
    for word in ["stand_in0", "PORT_ACTIVE", "iwarp", "127.0.0.1", "fd00::2", "0200:00ff:fe00:1234"] {
        assert!(text.contains(word), "{word} is not in\n{text}");
    }
    // This is a pipe: columns without borders, a line each.
    assert!(text.is_ascii() && text.starts_with("device"), "{text}");
    assert!(text.lines().any(|line| line.starts_with("stand_in0  1")), "{text}");
}

#[test]
fn doctor_survives_a_library_that_crashes() {
    let libdir = stand_in(&["-DCRASH"]);
    let output = run(libdir.path(), &["doctor"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("`uwarp devices` ended with signal: 6"), "{text}");
}

#[test]
fn doctor_names_the_device() {
    let libdir = stand_in(&[]);
    let output = run(libdir.path(), &["doctor"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("programs see stand_in0 (iwarp view, 127.0.0.1)"), "{text}");
}
