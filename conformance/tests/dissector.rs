//! Wireshark's dissector for datagrams (tools/wireshark): tshark reads the examples of docs/datagram-iwarp.md
//! with it, shows every field, and flags whatever a receiver drops. It also reads what queue pairs send.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crc32c::crc32c;
use uwarp_conformance::capture::{self, Capture, Transport, Udp};
use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::Veth;
use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::{Network, Topology, free_port};
use uwarp_conformance::{Outcome, pair, require};

const FROM: u16 = 20001;
const TO: u16 = 20000;

/// The datagrams of the appendix by their number, "A.1".
fn examples() -> BTreeMap<String, Vec<u8>> {
    examples_of("datagram-iwarp.md", 2)
}

/// Those of a page, whose blocks begin with so many lines of text.
fn examples_of(page: &str, lines_of_text: usize) -> BTreeMap<String, Vec<u8>> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(page);
    let page = fs::read_to_string(&page).unwrap_or_else(|e| panic!("{}: {e}", page.display()));
    let (_, appendix) = page.split_once("## Appendix A").expect("an appendix");
    let sections = appendix.split("\n### ").skip(1).filter(|section| !section.contains("GRH area"));
    sections
        .map(|section| {
            let (number, _) = section.split_once(' ').expect("a number");
            let block = section.split("```").nth(1).expect("a block");
            let hex = block.lines().skip(lines_of_text).flat_map(str::split_whitespace);
            (number.to_owned(), hex.map(|byte| u8::from_str_radix(byte, 16).expect("hex")).collect())
        })
        .collect()
}

fn example(number: &str) -> Vec<u8> {
    examples().remove(number).unwrap_or_else(|| panic!("{number} is not in the appendix"))
}

/// With the right CRC behind it.
fn sealed(mut covered: Vec<u8>) -> Vec<u8> {
    let crc = crc32c(&covered).to_le_bytes();
    covered.extend(crc);
    covered
}

/// An example with some bytes changed, and the right CRC.
fn changed(number: &str, changes: &[(usize, u8)]) -> Vec<u8> {
    let mut covered = example(number);
    covered.truncate(covered.len() - 4);
    for &(at, value) in changes {
        covered[at] = value;
    }
    sealed(covered)
}

/// What tshark prints of a recording with the installed dissector.
fn read(file: &Path, args: &str) -> Outcome<String> {
    let script = Dist::find()?.share("wireshark/datagram-iwarp.lua")?;
    let script = format!("lua_script:{}", script.display());
    let out = Cmd::new("tshark").arg("-X").arg(script).args(args).arg("-r").arg(file).run_ok()?;
    require!(!out.text().contains("Lua Error"), "{}", out.text());
    Ok(out.stdout)
}

fn recording(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("dissector-{name}.pcap"))
}

/// What tshark prints of these datagrams.
fn tshark(name: &str, datagrams: &[Udp], args: &str) -> String {
    let file = recording(name);
    capture::write_udp(&file, datagrams).unwrap();
    read(&file, args).unwrap()
}

fn from_to(payload: Vec<u8>) -> Udp {
    Udp { from: FROM, to: TO, payload }
}

/// One line for each datagram: the status of the CRC, and every complaint.
fn verdicts(name: &str, datagrams: Vec<Vec<u8>>) -> Vec<String> {
    let count = datagrams.len();
    let datagrams: Vec<Udp> = datagrams.into_iter().map(from_to).collect();
    let fields = "-T fields -e diwarp.crc.status -e _ws.expert.message";
    let out = tshark(name, &datagrams, &format!("-d udp.port=={TO},diwarp {fields}"));
    let lines: Vec<String> = out.lines().map(|line| line.replace('\t', " ")).collect();
    assert_eq!(lines.len(), count, "{out}");
    lines
}

#[test]
fn tshark_shows_every_field_of_a_send() {
    let out = tshark("fields", &[from_to(example("A.2"))], "-V -O diwarp");
    let shown: Vec<&str> = out.lines().map(str::trim).collect();
    for line in [
        "Version: 1",
        "Source QPN: 0x4e2103 (port 20001, slot 3)",
        "1... .... = I: immediate data: True",
        ".0.. .... = R: reliable service: False",
        "..00 .... = Reserved: 0x0",
        ".... 0000 = Kind: Message (0)",
        "Destination QPN: 0xffffff (group)",
        "Q_Key: 0x01234567",
        "Immediate: 0x01020304",
        "Incarnation: 0xcafef00d",
        "0... .... = T: tagged: False",
        ".1.. .... = L: last segment: True",
        ".... ..01 = DDP version: 1",
        "01.. .... = RDMAP version: 1",
        ".... 0101 = Opcode: Send with SE (5)",
        "Invalidate STag (not used): 0x00000000",
        "Queue: Send (0)",
        "MSN: 2",
        "Message offset: 0",
        "Payload: 382062797465732e",
        "CRC32c: 0x16226fc2",
        "[CRC32c status: Good]",
    ] {
        assert!(shown.contains(&line), "no line {line:?} in:\n{out}");
    }
    assert!(!out.contains("Expert"), "{out}");
}

#[test]
fn tshark_names_every_example_on_one_line() {
    let swapped = |payload| Udp { from: TO, to: FROM, payload };
    let all = examples();
    let datagrams: Vec<Udp> = all
        .iter()
        .map(|(number, bytes)| {
            let is_answer = ["A.4", "A.6", "A.7", "A.11", "A.13", "A.18"].contains(&number.as_str());
            if is_answer { swapped(bytes.clone()) } else { from_to(bytes.clone()) }
        })
        .collect();
    // No port is named: the dissector recognizes them by itself.
    let out = tshark("lines", &datagrams, "-T fields -e _ws.col.Protocol -e _ws.col.Info");
    let expected = [
        "0x4e2103 -> 0x4e2007 Send msn=1 len=11",
        "0x4e2103 -> 0x4e2007 Proof Request",
        "0x4e2007 -> 0x4e2103 Proof Reply",
        "0x4e2103 -> 0x4e2007 Memory Request",
        "0x4e2007 -> 0x4e2103 Memory Reply",
        "0x4e2103 -> 0x4e2007 Memory Begins",
        "0x4e2103 -> 0x4e2007 msg=5 12 of 24 RDMA Write-Record len=12",
        "0x4e2103 -> 0x4e2007 Part 2 of 2 number=9",
        "0x4e2103 -> 0x4e2007 Parts Request",
        "0x4e2007 -> 0x4e2103 Parts Reply",
        "0x4e2103 -> group Send with SE msn=2 len=8",
        "0x4e2103 -> 0x4e2007 Send msn=3 len=0",
        "0x4e2007 -> 0x4e2103 Error Message msn=1 DDP: message longer than the receive buffer",
        "Lookup Request port=7174",
        "Lookup Reply Success",
        "Lookup Reply Cookie required",
    ];
    let expected: Vec<String> = expected.iter().map(|line| format!("D-iWARP\t{line}")).collect();
    assert_eq!(out.lines().collect::<Vec<_>>(), expected);

    let fields = "-e diwarp.error.layer -e diwarp.error.type -e diwarp.error.code \
                  -e diwarp.lookup.transaction -e diwarp.lookup.space -e diwarp.lookup.service \
                  -e diwarp.lookup.status -e diwarp.lookup.datalen -e diwarp.lookup.cookie \
                  -e diwarp.lookup.data";
    let out = tshark("more", &datagrams[12..], &format!("-T fields -E separator=, {fields}"));
    let expected = [
        "1,2,0x05,,,,,,,",
        ",,,0x5eed0001,0x0111,7174,,2,0x0000000000000000,6869",
        ",,,0x5eed0001,,,0,7,0x0000000000000000,77656c636f6d65",
        ",,,0x5eed0001,,,32768,0,0x1020304050607080,",
    ];
    assert_eq!(out.lines().collect::<Vec<_>>(), expected);
}

/// The examples of docs/rd.md, each in the direction in which it goes.
fn reliable() -> BTreeMap<String, Udp> {
    let one = |(number, payload): (String, Vec<u8>)| {
        let is_answer = ["A.2", "A.4", "A.6", "A.10", "A.11"].contains(&number.as_str());
        let (from, to) = if is_answer { (TO, FROM) } else { (FROM, TO) };
        (number, Udp { from, to, payload })
    };
    examples_of("rd.md", 2).into_iter().map(one).collect()
}

#[test]
fn tshark_reads_reliable_datagrams() {
    let datagrams: Vec<Udp> = reliable().into_values().collect();
    let fields = "-e _ws.col.Info -e diwarp.crc.status -e _ws.expert.message";
    let out = tshark("reliable", &datagrams, &format!("-T fields {fields}"));
    // A.1, A.10, A.11, A.12, A.2 …
    let expected = [
        "RD Hello 20001 -> 20000",
        "RD Unknown 20000 -> 20001",
        "RD Cross 20000 -> 20001",
        "RD Packet 20001 -> 20000 pn=12 SEGMENT msg=9 Send len=2",
        "RD Challenge 20000 -> 20001",
        "RD Open 20001 -> 20000 pn=1 SEGMENT msg=1 Send len=12",
        "RD Packet 20000 -> 20001 pn=1 ACK 1 floor=2",
        "RD Packet 20001 -> 20000 pn=2 SEGMENT msg=2 RDMA Write len=12 SEGMENT msg=2 RDMA Write len=12",
        "RD Packet 20000 -> 20001 pn=7 ACK 6 floor=3 VERDICT msg=3 receiver not ready",
        "RD Packet 20001 -> 20000 pn=9 ABANDON 3 5 PING",
        "RD Packet 20001 -> 20000 pn=11 STREAM",
        "RD Packet 20001 -> 20000 pn=10 CLOSE",
    ];
    let expected: Vec<String> = expected.iter().map(|line| format!("{line}\tGood\t")).collect();
    assert_eq!(out.lines().collect::<Vec<_>>(), expected);

    let one = |number: &str| tshark("reliable-fields", &[reliable()[number].clone()], "-V -O diwarp");
    for (number, lines) in [
        ("A.2", &["Home port: 20000", "Cookie: key of the responder: 0xfedcba9876543210"][..]),
        ("A.3", &["Token: 0x0123456789abcdef", "Behind: 0", "Q_Key: 0x11111111", "Queue: Send (0)"]),
        ("A.5", &["Offset: 12", "Length of the message: 24", "Tagged offset: 0x000000000000700c"]),
        ("A.6", &["Blind (units of 4 us): 3", "Gap: 1 of messages", "Reason: receiver not ready (1)"]),
        ("A.12", &["Q_Key: 0x00123456", "Queue: Send (0)"]),
    ] {
        let out = one(number);
        let shown: Vec<&str> = out.lines().map(str::trim).collect();
        for line in lines {
            assert!(shown.contains(line), "no line {line:?} in {number}:\n{out}");
        }
    }
}

#[test]
fn a_reliable_datagram_that_was_cut_is_flagged() {
    let cut = reliable().into_values().flat_map(|udp| {
        (21..udp.payload.len() - 4)
            .map(move |len| Udp { payload: sealed(udp.payload[..len].to_vec()), ..udp })
    });
    let cut: Vec<Udp> = cut.collect();
    let fields = "-T fields -e diwarp.crc.status -e _ws.expert.message";
    let out = tshark("reliable-cut", &cut, &format!("-d udp.port=={TO},diwarp {fields}"));
    assert_eq!(out.lines().count(), cut.len(), "{out}");
}

#[test]
fn tshark_shows_every_field_of_a_proof() {
    let reply = Udp { from: TO, to: FROM, payload: example("A.11") };
    let out = tshark("proofs", &[from_to(example("A.10")), reply], "-V -O diwarp");
    let shown: Vec<&str> = out.lines().map(str::trim).collect();
    for line in [
        "Source QPN: 0x4e2103 (port 20001, slot 3)",
        ".... 0011 = Kind: Proof Request (3)",
        "Destination QPN: 0x4e2007 (port 20000, slot 7)",
        "Token: 0x5eed00025eed0003",
        "Cookie: hash: 0x0000000000000000",
        "Source QPN: 0x4e2007 (port 20000, slot 7)",
        ".... 0100 = Kind: Proof Reply (4)",
        "Cookie: made at (clock of its maker): 287454020",
        "Cookie: hash: 0x5566778899aabbcc",
        "[CRC32c status: Good]",
    ] {
        assert!(shown.contains(&line), "no line {line:?} in:\n{out}");
    }
    assert!(!out.contains("Expert"), "{out}");
}

#[test]
fn tshark_shows_every_field_of_parts() {
    let reply = Udp { from: TO, to: FROM, payload: example("A.18") };
    let out = tshark("parts", &[from_to(example("A.16")), from_to(example("A.17")), reply], "-V -O diwarp");
    let shown: Vec<&str> = out.lines().map(str::trim).collect();
    for line in [
        "Source QPN: 0x4e2103 (port 20001, slot 3)",
        ".... 1001 = Kind: Part (9)",
        "Number: 9",
        "Length of the datagram: 53",
        "Offset: 27",
        "Q_Key: 0x11111111",
        "Padding: 00",
        ".... 1010 = Kind: Parts Request (10)",
        "Token: 5eed00045eed0005",
        ".... 1011 = Kind: Parts Reply (11)",
        "[CRC32c status: Good]",
    ] {
        assert!(shown.contains(&line), "no line {line:?} in:\n{out}");
    }
    assert!(!out.contains("Expert"), "{out}");
}

#[test]
fn tshark_shows_every_field_of_what_is_said_about_memory() {
    let reply = Udp { from: TO, to: FROM, payload: example("A.13") };
    let all = [from_to(example("A.12")), reply, from_to(example("A.14"))];
    let out = tshark("memory", &all, "-V -O diwarp");
    let shown: Vec<&str> = out.lines().map(str::trim).collect();
    for line in [
        "Source QPN: 0x4e2103 (port 20001, slot 3)",
        ".... 0101 = Kind: Memory Request (5)",
        "Token: 5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e",
        ".... 0110 = Kind: Memory Reply (6)",
        "Process: 11111111111111111111111111111111",
        ".... 0111 = Kind: Memory Begins (7)",
        "Word: 22222222222222222222222222222222",
        "[CRC32c status: Good]",
    ] {
        assert!(shown.contains(&line), "no line {line:?} in:\n{out}");
    }
    assert!(!out.contains("Expert"), "{out}");
}

#[test]
fn a_wrong_bit_anywhere_is_flagged() {
    let good = example("A.1");
    let broken: Vec<Vec<u8>> = (0..good.len())
        .map(|at| {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << (at % 8);
            bytes
        })
        .collect();
    let lines = verdicts("bits", broken);
    assert!(lines[0].contains("Another version"), "{}", lines[0]);
    for (at, line) in lines.iter().enumerate().skip(1) {
        assert!(line.starts_with("Bad ") && line.contains("Wrong CRC32c"), "byte {at}: {line}");
    }
}

/// Each field that the specification has a receiver check, wrong and with a right CRC.
#[test]
fn tshark_flags_each_datagram_that_a_receiver_drops() {
    /// An example, bytes of it with the values that they get, and the complaint.
    type Case<'a> = (&'a str, &'a [(usize, u8)], &'a str);
    let cases: [Case<'_>; 25] = [
        ("A.1", &[(0, 2)], "Another version"),
        ("A.1", &[(1, 9)], "The source QPN is not of the UDP source port"),
        ("A.1", &[(4, 0x40)], "A chunk is shorter than its header"),
        ("A.1", &[(4, 0x10)], "Reserved flags are not 0"),
        ("A.1", &[(4, 0x0C)], "Unassigned kind"),
        ("A.1", &[(20, 0xC1)], "Tagged segment"),
        ("A.1", &[(20, 0x01)], "Not the whole message"),
        ("A.1", &[(20, 0x42)], "Another DDP version"),
        ("A.1", &[(21, 0x03)], "Another RDMAP version"),
        ("A.1", &[(21, 0x40)], "Not an opcode of the unreliable service"),
        ("A.1", &[(21, 0x44)], "Not an opcode of the unreliable service"),
        ("A.1", &[(29, 1)], "Another queue"),
        ("A.1", &[(37, 1)], "Message offset is not 0"),
        ("A.1", &[(21, 0x47), (29, 2)], "An Error Message has 4 bytes"),
        ("A.3", &[(21, 0x47), (29, 2)], "An Error Message has 4 bytes"),
        ("A.4", &[(29, 0)], "Another queue"),
        ("A.5", &[(4, 0x81)], "Immediate data in a lookup"),
        ("A.5", &[(27, 181)], "More private data than the limit"),
        ("A.5", &[(27, 137)], "More private data than there is"),
        ("A.10", &[(4, 0x83)], "Immediate data in a proof"),
        ("A.11", &[(4, 0x44)], "It has no body"),
        ("A.10", &[(1, 9)], "The source QPN is not of the UDP source port"),
        ("A.12", &[(4, 0x85)], "Immediate data about memory"),
        ("A.14", &[(1, 9)], "The source QPN is not of the UDP source port"),
        ("A.16", &[(15, 28)], "No part begins there"),
    ];
    let mut datagrams: Vec<_> = cases.iter().map(|(number, changes, _)| changed(number, changes)).collect();
    let mut expected: Vec<_> = cases.iter().map(|case| case.2).collect();
    let short = |number, len| sealed(example(number)[..len].to_vec());
    datagrams.extend([short("A.10", 43), short("A.10", 20), short("A.13", 67), short("A.14", 44)]);
    datagrams.extend([short("A.1", 37), short("A.5", 35), short("A.5", 171), example("A.1")[..23].to_vec()]);
    expected.extend([
        "A proof has 48 bytes",
        "A proof has 48 bytes",
        "What is said about memory has 72 bytes",
        "What is said about memory has 72 bytes",
        "Shorter than a DDP header",
        "Shorter than a lookup",
        "A Lookup Request has at least 176 bytes",
        "Shorter than its header and its CRC",
    ]);
    for (line, expected) in verdicts("drops", datagrams).iter().zip(expected) {
        assert!(line.contains(expected), "{expected:?} is not in {line:?}");
    }
}

/// Every prefix of every example; none is shown as good, and none makes the script fail.
#[test]
fn a_datagram_that_was_cut_is_flagged() {
    // A part has no CRC.
    let all = examples().into_iter().filter(|(number, _)| number != "A.16");
    let cut: Vec<Vec<u8>> =
        all.flat_map(|(_, bytes)| (1..bytes.len()).map(move |len| bytes[..len].to_vec())).collect();
    assert!(cut.len() > 300, "{} prefixes; has the form of the appendix changed?", cut.len());
    for line in verdicts("cut", cut) {
        assert!(line.starts_with("Bad ") || line.contains("Shorter than its header"), "{line}");
    }
}

#[test]
fn what_others_send_is_not_taken_for_datagrams() {
    let with_first = |first: u8, len: usize| {
        let mut bytes = vec![0x5A; len];
        bytes[0] = first;
        bytes
    };
    // Another protocol's bytes, some of which begin with our version; and ours from a port of others, with a
    // wrong CRC.
    let mut stranger = example("A.1");
    stranger[1] = 9;
    let datagrams =
        [vec![1], with_first(1, 23), with_first(1, 24), with_first(1, 600), stranger].map(from_to);
    let out = tshark("others", &datagrams, "-T fields -e _ws.col.Protocol");
    assert!(!out.contains("D-iWARP"), "{out}");
}

/// Every datagram of an unmodified program has a good CRC and nothing that a receiver would drop; the
/// messages of each queue pair are numbered from 1.
#[test]
fn tshark_reads_what_queue_pairs_send() {
    const ROUNDS: u32 = 50;

    fn run(gid: u32, size: u32) -> Outcome<String> {
        let (dist, net) = (Dist::find()?, Network::default());
        let place = net.place(Topology::Veth1500V4)?;
        let port = free_port();
        let line = format!("ibv_ud_pingpong -g {gid} -p {port} -n {ROUNDS} -s {size}");
        let over = |line: &str, ns| Cmd::line(line).env("LD_LIBRARY_PATH", dist.lib()).in_ns(ns);
        let file = recording(&format!("ud-{gid}-{size}"));
        let capture = Capture::start(place.client, Veth::INTERFACE, Transport::Udp, place.address, &file)?;
        let client = over(&format!("{line} {}", place.address), place.client);
        pair::run(&over(&line, place.server), &client, port)?;
        let fields = "-e ip.src -e diwarp.srcqp -e diwarp.msn -e diwarp.crc.status -e _ws.expert.message";
        read(&capture.finish()?, &format!("-Y diwarp -T fields {fields}"))
    }

    // GID 0 is the IPv4 address, GID 1 an IPv6 address. 1024 is the MTU that the port shows.
    for (gid, size) in [(0, 1024), (1, 64)] {
        let out = run(gid, size).unwrap();
        let mut next: BTreeMap<&str, u32> = BTreeMap::new();
        for line in out.lines() {
            let fields: Vec<&str> = line.split('\t').collect();
            let &[ipv4, source, msn, crc, complaints] = &fields[..] else { panic!("{line}") };
            assert_eq!((ipv4.is_empty(), crc, complaints), (gid == 1, "Good", ""), "{line}");
            let expected = next.entry(source).or_insert(1);
            assert_eq!(msn, expected.to_string(), "{line}");
            *expected += 1;
        }
        let sent: Vec<u32> = next.into_values().collect();
        let enough = sent.len() == 2 && sent.iter().all(|next| *next > ROUNDS);
        assert!(enough, "GID {gid}, {size} bytes: the next messages would be {sent:?}");
    }
}
