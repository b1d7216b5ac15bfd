//! tshark reads what uwarp sends. The dissectors for MPA, DDP and RDMAP were written by others from the same
//! RFCs; they must find every FPDU, compute the same CRC32c, and call nothing malformed.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use libtest_mimic::{Arguments, Trial};
use uwarp_conformance::capture::{self, Capture, Decoded, Transport};
use uwarp_conformance::check::{self, Expected};
use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::{NetNs, Veth};
use uwarp_conformance::pair;
use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::Topology::{self, Veth1500V4, Veth1500V6, Veth9000V4};
use uwarp_conformance::topology::{Network, free_port};
use uwarp_conformance::{Context, Failure, Outcome, cc, fail, require};

/// A program at both ends, and how many RDMAP segments of each kind its traffic has at least.
struct Case {
    name: &'static str,
    at: Topology,
    /// Arguments of both; `SERVER`'s end takes `-s`-like ones itself. See [`run`].
    program: Program,
    least: &'static [(&'static str, usize)],
}

enum Program {
    /// Rounds and size.
    Rping(u32, usize),
    /// Tool, arguments, size and iterations.
    Perftest(&'static str, &'static str, u64, u64),
    /// RDMA Writes with immediate data.
    Dtestx,
    /// Groups of statements of our own C programs, each of which has both ends within the server's namespace.
    Statements(&'static [(&'static str, &'static str)]),
}
use Program::{Dtestx, Perftest, Rping, Statements};

/// rping: four Sends, a Read and a Write for each round. Messages larger than an FPDU have several segments.
const CASES: [Case; 11] = [
    Case { name: "rping, 64 B", at: Veth1500V4, program: Rping(10, 64), least: PING },
    Case { name: "rping, 64 B, IPv6", at: Veth1500V6, program: Rping(10, 64), least: PING },
    Case {
        name: "rping, 60000 B",
        at: Veth1500V4,
        program: Rping(5, 60000),
        least: &[("Send", 20), ("Write", 5)],
    },
    Case {
        name: "ib_send_bw",
        at: Veth1500V4,
        program: Perftest("ib_send_bw", "-n 50 -s 65536", 65536, 50),
        least: &[("Send", 50)],
    },
    Case {
        name: "ib_write_bw",
        at: Veth1500V4,
        program: Perftest("ib_write_bw", "-n 50 -s 65536", 65536, 50),
        least: &[("Write", 50)],
    },
    Case {
        name: "ib_write_bw, lists of small",
        at: Veth9000V4,
        program: Perftest("ib_write_bw", "-n 640 -s 61 -l 64 -Q 64", 61, 640),
        least: &[("Write", 640)],
    },
    Case {
        name: "ib_read_bw",
        at: Veth9000V4,
        program: Perftest("ib_read_bw", "-n 50 -s 65536", 65536, 50),
        least: &[("Read Request", 50), ("Read Response", 50)],
    },
    Case {
        name: "ib_atomic_bw",
        at: Veth1500V4,
        program: Perftest("ib_atomic_bw", "-A CMP_AND_SWAP -n 50", 8, 50),
        least: &[("Atomic Request", 50), ("Atomic Response", 50)],
    },
    Case {
        name: "ib_send_bw, odd sizes",
        at: Veth9000V4,
        program: Perftest("ib_send_bw", "-n 100 -s 8191 -b", 8191, 100),
        least: &[("Send", 200)],
    },
    // tshark 4.0 does not know Immediate Data by name ("Unknown"); it checks MPA and DDP around it all the
    // same.
    Case { name: "dtestx", at: Veth1500V4, program: Dtestx, least: &[("Write", 2), ("Send", 2)] },
    Case {
        name: "invalidated keys and what ends connections",
        at: Veth1500V4,
        program: Statements(&[
            ("errno_table", "invalidation"),
            ("errno_table", "remote_reads"),
            ("errno_table", "remote_writes"),
            ("verify", "Send with Invalidate"),
        ]),
        least: &[
            ("Send with Invalidate", 3),
            ("Send with SE and Invalidate", 1),
            ("Terminate", 10),
            ("RDMA layer: Invalid STag", 1),
            ("RDMA layer: Access rights violation", 1),
            ("RDMA layer: Base or bounds violation", 1),
            ("RDMA layer: STag cannot be Invalidated", 1),
            ("DDP Tagged Buffer: Invalid STag", 1),
            ("DDP Tagged Buffer: Base or bounds violation", 1),
            ("DDP Tagged Buffer: TO wrap", 1),
        ],
    },
];

const PING: &[(&str, usize)] = &[("Send", 40), ("Read Request", 10), ("Read Response", 10), ("Write", 10)];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads = Some(1);
    let world = Arc::new((Dist::find(), Network::default()));
    let trials = CASES
        .iter()
        .map(|case| {
            let world = world.clone();
            Trial::test(format!("{} [{}]", case.name, case.at), move || Ok(run(&world.0, &world.1, case)?))
        })
        .collect();
    let conclusion = libtest_mimic::run(&args, trials);
    drop(world);
    conclusion.exit_code()
}

fn run(dist: &Outcome<Dist>, net: &Network, case: &Case) -> Outcome {
    let lib = dist.as_ref().map_err(Failure::clone)?.lib();
    let place = net.place(case.at)?;
    // dtestx has one port.
    let port = if matches!(case.program, Dtestx) { 15828 } else { free_port() };
    let file =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.pcapng", case.name.replace([' ', ','], "-")));
    let address = place.address;
    let over =
        |line: String, ns| Cmd::line(&line).env("LD_LIBRARY_PATH", &lib).env("UWARP_CRC", "on").in_ns(ns);
    let (server, client) = match case.program {
        Rping(count, size) => (
            format!("rping -s -a {address} -p {port} -S {size}"),
            format!("rping -c -v -V -a {address} -p {port} -C {count} -S {size}"),
        ),
        Perftest(tool, arguments, ..) => {
            let line = format!("{tool} -R -F -p {port} {arguments}");
            (line.clone(), format!("{line} {address}"))
        }
        Dtestx => ("dtestx -P uwarp -s".to_owned(), format!("dtestx -P uwarp -h {address}")),
        Statements(groups) => return statements(&lib, place.server, groups, case.least, &file),
    };
    // The client's end of the pair sees the frames of both.
    let capture = Capture::start(place.client, Veth::INTERFACE, Transport::Tcp, address, &file)?;
    let dapl = |cmd: Cmd, device: &str| -> Outcome<Cmd> {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("dat-{device}.conf"));
        let row = format!("uwarp u2.0 nonthreadsafe default libdaplofa.so.2 dapl.2.0 \"{device} 0\" \"\"\n");
        std::fs::write(&file, row).context(file.display())?;
        Ok(cmd.env("DAT_OVERRIDE", file))
    };
    let (mut server, mut client) = (over(server, place.server), over(client, place.client));
    if matches!(case.program, Dtestx) {
        (server, client) = (dapl(server, address)?, dapl(client, Veth::CLIENT4)?);
    }
    let ends = pair::run(&server, &client, port)?;
    match case.program {
        Dtestx => check::has(&ends.client, "RDMA_WRITE_WITH_IMMEDIATE_DATA test - PASSED")?,
        Rping(count, size) => check::rping(&ends.client, "ping data: ", count, size)?,
        Perftest(.., size, count) => check::perftest(&ends.client, &Expected::one(size, count))?,
        Statements(_) => {}
    }
    let file = capture.finish()?;
    judge(&capture::decode(&file)?, case.least, &file)?;
    let _ = std::fs::remove_file(&file);
    Ok(())
}

/// Runs groups of statements one after the other, over the loopback interface of a namespace.
fn statements(
    lib: &Path,
    ns: Option<&NetNs>,
    groups: &[(&'static str, &str)],
    least: &[(&str, usize)],
    file: &Path,
) -> Outcome {
    let address = "127.0.0.1";
    let capture = Capture::start(ns, "lo", Transport::Tcp, address, file)?;
    for (program, group) in groups {
        let program = cc::build(program, &Path::new(env!("CARGO_TARGET_TMPDIR")).join("tshark"))?;
        let cmd = Cmd::new(program).arg(address).arg(group).in_ns(ns);
        // What goes through memory is not seen.
        let cmd = cmd.env("UWARP_LINK", "tcp").env("UWARP_CRC", "on");
        check::statements(&cmd.env("LD_LIBRARY_PATH", lib).run()?)?;
    }
    let file = capture.finish()?;
    judge(&capture::decode(&file)?, least, &file)?;
    let _ = std::fs::remove_file(&file);
    Ok(())
}

fn judge(decoded: &Decoded, least: &[(&str, usize)], file: &Path) -> Outcome {
    let file = file.display();
    if let [first, ..] = decoded.complaints.as_slice() {
        fail!("tshark complains {} times about {file}; first: {first}", decoded.complaints.len())
    }
    require!(
        decoded.mpa_setup >= 2,
        "{} MPA frames in {file}, wanted a Request and a Reply",
        decoded.mpa_setup
    );
    let segments: usize = decoded.opcodes.values().sum();
    require!(
        decoded.crc_good == segments,
        "{} good CRCs for {segments} segments in {file}: {:?}",
        decoded.crc_good,
        decoded.opcodes
    );
    let terminates = decoded.opcodes.get("Terminate").copied().unwrap_or(0);
    let explained: usize = decoded.terminates.values().sum();
    require!(
        terminates == explained,
        "{terminates} Terminates in {file}, with a reason that tshark knows {explained}"
    );
    for (name, least) in least {
        let is = decoded.opcodes.get(*name).or(decoded.terminates.get(*name)).copied().unwrap_or(0);
        require!(
            is >= *least,
            "{is} segments of \"{name}\" in {file}, {least} wanted: {:?} {:?}",
            decoded.opcodes,
            decoded.terminates
        );
    }
    Ok(())
}
