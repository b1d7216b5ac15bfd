//! The table: which programs are run, how, and where.

use uwarp_conformance::check::Expected;
use uwarp_conformance::netns::Veth;
use uwarp_conformance::topology::Place;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::{Outcome, require};

use super::Run::{Custom, Long, Perftest, PerftestIwarp, Rping};
use super::by_number;
use super::ceph;
use super::crates;
use super::datagrams;
use super::far;
use super::fresh;
use super::hybrid;
use super::learning;
use super::mpi;
use super::mpi_applications;
use super::mpis;
use super::over_rd;
use super::per_interface;
use super::reliable;
use super::rsockets;
use super::sandboxes;
use super::sockets;
use super::tools;
use super::ucx;
use super::unreliable;
use super::verbs;
use super::versions;
use super::{AS_IB, AS_IWARP, AS_STRANGERS, CRC_OFF, Case, IWARP, ROCE, Run, SPINNING};
use super::{
    devices, devinfo, mixed_rping, ordinary_user, persistent_in_turn, persistent_together, rdma_server,
    rdma_xserver, refused, server_killed, through_the_cli,
};

const LO: &[Topology] = &[Loopback4];
const LO_BOTH: &[Topology] = &[Loopback4, Loopback6];
/// Loopback and both veths, IPv4: Debian 12's perftest asks `rdma_getaddrinfo` for IPv4 addresses only.
const LO_AND_VETH: &[Topology] = &[Loopback4, Veth1500V4, Veth9000V4];
const VETH_1500: &[Topology] = &[Veth1500V4];
const VETHS: &[Topology] = &[Veth1500V4, Veth9000V4];
const EVERYWHERE: &[Topology] = &Topology::ALL;

const TABLE: &str = "one result for each size, every iteration counted, no error at either end";
const IWARP_TABLE: &str =
    "as iWARP: one result for each size, every iteration counted, no error at either end";
const PING: &str = "every round's bytes at both ends, nothing but the disconnect on stderr";

const FI: &str = "every round of each size, data checked at both ends";
const FI_MSG: &str = "-p verbs -e msg";
const FI_RXM: &str = "-p verbs;ofi_rxm -e rdm";
const MPI: &str = "c/mpi/exchange.c: ring, all-to-all, all-reduce, large messages; every byte";
const GUEST: &str = "a guest that writes all the time continues, and every round of its writes is whole; \
                     ten times with make programs";
const ISER: &str = "what was written is read back and in the target's file; 32 reads at a time";
const RPMA: &str = "written, flushed, read back; every byte at both ends";

const STATUS_0: &str = "data transfers complete, return status 0 at both ends";

/// `rc_rdma_write_lat` and `rc_rdma_write_bw` are Writes with immediate data.
const QPERF: [&str; 10] = [
    "rc_lat",
    "rc_bw",
    "rc_bi_bw",
    "rc_rdma_read_lat",
    "rc_rdma_read_bw",
    "rc_rdma_write_lat",
    "rc_rdma_write_bw",
    "rc_rdma_write_poll_lat",
    "rc_compare_swap_mr",
    "rc_fetch_add_mr",
];

/// Transactions with their data verified (`-V`), threads and endpoints; RDMA performance, polling and
/// blocking.
const DAPLTEST: [&str; 4] = [
    "T -i 100 -t 2 -w 2 -- client SR 4096 server SR 4096 client RW 65536 server RR 16384",
    "T -i 50 -t 1 -w 4 -V -P -- client SR 1024 4 server SR 1024 4 client RR 30000 server RW 30000",
    "P -i 1024 -p 64 -m p -- RW 8192 2",
    "P -i 1024 -p 64 -m b -- RR 8192 1",
];

const SIZES: [(u32, usize); 6] = [(20, 26), (20, 64), (20, 1023), (20, 1461), (20, 4096), (20, 65535)];

/// Rows and places that are left to `make programs`. perftest measures the processor's clock after each size,
/// so `-a` takes 6 to 20 seconds of processor time, and other rows 1; `ib_write_lat`, whose ends spin on
/// memory, takes 40. Every size is tried by `ib_send_bw -a` on loopback; each operation, each manner and each
/// place with fewer sizes. qperf takes a second for each of its tests at both ends, and has no size that
/// other rows lack between namespaces. `-D` keeps both ends' processors busy for its time: it is tried once
/// for Sends, once for Writes, and once for each link.
pub const LONG: [(&str, &str, &[Topology]); 19] = [
    ("ib_send_lat", "-a -n 20", &[Loopback4, Veth1500V4]),
    ("ib_write_lat", "-a -n 20", &[Loopback4, Veth9000V4]),
    ("ib_send_lat", "-c UC -a -n 20", LO),
    ("ib_read_lat", "-a -n 20", LO),
    ("ib_write_bw", "-a -n 20", &[Loopback4, Veth1500V4]),
    ("ib_read_bw", "-a -n 20", &[Loopback4, Veth9000V4]),
    ("ib_send_bw", "-e -a -n 20", LO),
    ("ib_send_bw", "--use-srq -a -n 20", LO),
    ("ib_send_lat", "-c UD -a -n 20", LO),
    ("qperf", "-cm1, all of RC", VETH_1500),
    ("ib_write_lat", "-c UC -n 1000 -s 64", LO),
    ("ib_write_lat", "-D 2 -s 64", LO),
    ("ib_send_bw", "-D 2", LO),
    ("ib_read_bw", "-D 2", LO),
    ("ib_send_lat", "over rd, -R -D 2 -s 64", &[Loopback4, Veth9000V4]),
    ("ib_write_bw", "over rd, -R -D 2", &[Loopback4, Veth9000V4]),
    ("ib_send_bw", "over rd, by number, -D 2", &[Loopback4, Veth9000V4]),
    ("ib_send_lat", "hybrid:0 and hybrid:1, -R -D 2", LO),
    ("rping", "over rd", &[Loopback4, Veth9000V4]),
];

/// Whether `make test` runs this row at this place.
pub fn in_test(case: &Case, place: Topology) -> bool {
    let is_long = |(program, manner, at): &(&str, &str, &[Topology])| {
        (*program, *manner) == (case.program, case.manner) && at.contains(&place)
    };
    !matches!(case.run, Long(_)) && !LONG.iter().any(is_long) && !is_tried_elsewhere(case, place)
}

/// What goes by streams on loopback and through packets of 1,500 bytes differs through those of 9,000 in
/// lengths alone: rping and the rows that are between namespaces only show that for each operation.
fn is_tried_elsewhere(case: &Case, place: Topology) -> bool {
    const BY_STREAMS: [&str; 8] =
        ["fi_pingpong", "mpirun", "fio", "tgtd", "qemu", "NCCL", "librpma", "riostream"];
    let by_streams = matches!(case.run, Perftest(..) | PerftestIwarp(..) | Run::PerftestByNumber(..))
        || BY_STREAMS.contains(&case.program);
    let there = |place| case.at.contains(&place);
    by_streams && place == Veth9000V4 && there(Loopback4) && there(Veth1500V4)
}

/// [`LONG`] names rows of the table.
pub fn are_rows(cases: &[Case]) -> Outcome {
    for (program, manner, at) in LONG {
        let is_it = |case: &&Case| (case.program, case.manner) == (program, manner);
        let there =
            cases.iter().find(is_it).is_some_and(|case| at.iter().all(|place| case.at.contains(place)));
        require!(there, "no row {program} {manner} at {at:?}");
    }
    Ok(())
}

/// All rows.
pub fn cases() -> Vec<Case> {
    [
        devices_shown(),
        rping(),
        connection_manager(),
        groups(),
        by_number::cases(),
        benchmarks(),
        dapl(),
        perftest(),
        perftest_as_iwarp(),
        perftest_with_events(),
        perftest_at_length(),
        fabric(),
        ucx::cases(),
        mpi::cases(),
        mpis::mvapich2_cases(),
        mpi_applications::cases(),
        datagrams::cases(),
        reliable::cases(),
        far::cases(),
        unreliable::cases(),
        over_rd::cases(),
        hybrid::cases(),
        rsockets::cases(),
        sockets::cases(),
        verbs::cases(),
        per_interface::cases(),
        applications(),
        learning::cases(),
        crates::cases(),
        ceph::cases(),
        sandboxes::cases(),
        tools::cases(),
        versions::cases(),
        fresh::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn case(
    program: &'static str,
    manner: &'static str,
    checked: &'static str,
    at: &'static [Topology],
    run: Run,
) -> Case {
    Case { program, manner, checked, at, run }
}

fn perf(program: &'static str, args: &'static str, at: &'static [Topology], expected: Expected) -> Case {
    case(program, args, TABLE, at, Perftest(args, expected))
}

fn iwarp(program: &'static str, manner: &'static str, at: &'static [Topology], expected: Expected) -> Case {
    let args = manner.trim_end_matches(", as iWARP");
    case(program, manner, IWARP_TABLE, at, PerftestIwarp(args, expected))
}

/// Device queries.
fn devices_shown() -> Vec<Case> {
    vec![
        case("ibv_devices", "", "one device, uwarp0, with a node GUID", LO, Custom(devices)),
        case(
            "ibv_devinfo",
            "-v",
            "a RoCE device, port active, sane limits, a GID",
            LO,
            Custom(|w, p| devinfo(w, &ROCE, p)),
        ),
        case(
            "ibv_devinfo",
            "-v, in a namespace",
            "the same with no route but veth's",
            VETH_1500,
            Custom(|w, p| devinfo(w, &ROCE, p)),
        ),
        case(
            "ibv_devinfo",
            "-v, as iWARP",
            "the same of an iWARP device",
            LO,
            Custom(|w, p| devinfo(w, &IWARP, p)),
        ),
    ]
}

/// Send, Recv, RDMA Read and Write with the data compared. 26 is the least size that rping takes, 65535 the
/// most.
fn rping() -> Vec<Case> {
    vec![
        case("rping", "-v -V -C 20, sizes 26 to 65535", PING, EVERYWHERE, Rping(&SIZES, &[])),
        case("rping", "-v -V -C 2000", PING, LO, Rping(&[(2000, 64)], &[])),
        case("rping", "UWARP_CRC=off", PING, LO_AND_VETH, Rping(&[(20, 4096)], CRC_OFF)),
        case("rping", "MPA revision 1", PING, LO, Rping(&[(20, 4096)], &[("UWARP_MPA_REVISION", "1")])),
        case("rping", "UWARP_PROGRESS=spin", PING, LO_AND_VETH, Rping(&[(20, 64), (20, 65535)], SPINNING)),
        case("rping", "UWARP_PEER=off", PING, LO_AND_VETH, Rping(&[(20, 64), (20, 65535)], AS_STRANGERS)),
        case(
            "rping",
            "UWARP_PORT_RANGE, -q",
            PING,
            LO,
            Custom(|w, p| w.rping_by_number(&[("UWARP_PORT_RANGE", "10000-14999")], p)),
        ),
        case("rping", "-P, clients in turn", PING, LO_BOTH, Custom(persistent_in_turn)),
        case("rping", "-P, 8 clients beside each other", PING, LO, Custom(persistent_together)),
        case("rping", "-c, nobody listens", "REJECTED event, and the program ends", LO_BOTH, Custom(refused)),
        case(
            "rping",
            "-c, server killed",
            "DISCONNECTED, flushed, and the program ends",
            LO,
            Custom(server_killed),
        ),
        case("rping", "as an ordinary user", "works as uid 65534", LO, Custom(ordinary_user)),
        case("uwarp run -- rping", "", PING, LO, Custom(through_the_cli)),
    ]
}

/// The connection manager's own programs.
fn connection_manager() -> Vec<Case> {
    vec![
        // rdma_create_ep, rdma_getaddrinfo, rdma_get_request, inline Send, rdma_get_*_comp.
        case("rdma_server, rdma_client", "", "both exit with 0", EVERYWHERE, Custom(rdma_server)),
        case("rdma_xserver, rdma_xclient", "-c r", "both exit with 0", LO_AND_VETH, Custom(rdma_xserver)),
        // A queue pair made with ibv_create_qp and moved on with ibv_modify_qp: CONNECT_RESPONSE,
        // rdma_establish.
        case(
            "rping",
            "-q at either end and at both",
            PING,
            LO_BOTH,
            Custom(|w, p| w.rping_by_number(&[], p)),
        ),
        case("rping", "-q, as iWARP", PING, LO, Custom(|w, p| w.rping_by_number(AS_IWARP, p))),
        case("rping", "as iWARP", PING, LO_AND_VETH, Rping(&[(20, 64), (20, 65535)], AS_IWARP)),
        case("rping", "one end as iWARP, the other as RoCE", PING, LO_BOTH, Custom(mixed_rping)),
        case("ucmatose", "-c 100 -C 10", STATUS_0, LO_BOTH, Custom(|w, p| w.ucmatose("-c 100 -C 10", p))),
        case(
            "ucmatose",
            "-c 4 -C 50 -S 65536",
            STATUS_0,
            EVERYWHERE,
            Custom(|w, p| w.ucmatose("-c 4 -C 50 -S 65536", p)),
        ),
        case(
            "ucmatose",
            "-m -c 5 -t 8 -a 14",
            STATUS_0,
            LO,
            Custom(|w, p| w.ucmatose("-m -c 5 -t 8 -a 14", p)),
        ),
        case(
            "udaddy",
            "-c 20 -C 5 -S 1000",
            STATUS_0,
            EVERYWHERE,
            Custom(|w, p| w.udaddy("-c 20 -C 5 -S 1000", p)),
        ),
        case(
            "udaddy",
            "to ::1 beside a link-local address",
            STATUS_0,
            &[Loopback6],
            Custom(|w, _| w.udaddy_beside_link_local("-c 2 -C 5 -S 1000")),
        ),
    ]
}

/// Datagrams to many.
fn groups() -> Vec<Case> {
    vec![
        case(
            "mckey",
            "a member and a sender that is none",
            STATUS_0,
            VETHS,
            Custom(|w, p| w.mckey("239.55.1.2", [Veth::SERVER4, Veth::CLIENT4], "", p)),
        ),
        case(
            "mckey",
            "-o: a member and a sender that joins to send only",
            STATUS_0,
            &[Veth1500V4],
            Custom(|w, p| w.mckey("239.55.1.3", [Veth::SERVER4, Veth::CLIENT4], "-o", p)),
        ),
        case(
            "mckey",
            "bound to 127.0.0.1, beside another interface",
            STATUS_0,
            &[Veth1500V4],
            Custom(|w, p| w.mckey("239.55.1.4", ["127.0.0.1"; 2], "", Place { server: p.client, ..p })),
        ),
        case(
            "mckey",
            "to 255.255.255.255: two receivers and a sender in three namespaces",
            STATUS_0,
            VETH_1500,
            Custom(|w, _| w.mckey_to_all("255.255.255.255")),
        ),
        case(
            "mckey",
            "to the network's broadcast address: two receivers and a sender in three namespaces",
            STATUS_0,
            VETH_1500,
            Custom(|w, _| w.mckey_to_all("10.57.0.255")),
        ),
        case(
            "mckey",
            "a member and a sender that is none, IPv6",
            STATUS_0,
            &[Veth1500V6],
            Custom(|w, p| w.mckey("ff15::55:1", [Veth::SERVER6, Veth::CLIENT6], "", p)),
        ),
    ]
}

/// Benchmarks over rdma_cm beside perftest.
fn benchmarks() -> Vec<Case> {
    vec![
        case(
            "cmtime",
            "-c 1000",
            "every connection is made, a figure for each step",
            LO_AND_VETH,
            Custom(|w, p| w.cmtime(1000, p)),
        ),
        case(
            "cmtime",
            "-c 5000",
            "every connection is made, a figure for each step",
            LO,
            Long(|w, p| w.cmtime(5000, p)),
        ),
        case(
            "qperf",
            "-cm1, all of RC",
            "a figure for each test",
            &[Loopback4, Veth1500V4],
            Custom(|w, p| w.qperf(&QPERF, p)),
        ),
        case(
            "fio",
            "ioengine=rdma, verb=write, 1m",
            "err= 0 at both ends, 32 MiB",
            LO_AND_VETH,
            Custom(|w, p| w.fio("write", "1m", 16, p)),
        ),
        case(
            "fio",
            "ioengine=rdma, verb=read, 64k",
            "err= 0 at both ends, 32 MiB",
            LO_AND_VETH,
            Custom(|w, p| w.fio("read", "64k", 16, p)),
        ),
        case(
            "fio",
            "ioengine=rdma, verb=send, 4k",
            "err= 0 at both ends, 2 MiB",
            LO_AND_VETH,
            Custom(|w, p| w.fio("send", "4k", 4, p)),
        ),
    ]
}

/// uDAPL over rdma_cm: Send, RDMA Write and Read through libdat2 and libdaplofa. In namespaces: their fixed
/// port is one that the system also gives to outgoing connections, and a loopback address has no device.
fn dapl() -> Vec<Case> {
    vec![
        case(
            "dtest",
            "-D -b 262144 -B 20",
            "PASSED at both ends",
            VETHS,
            Custom(|w, p| w.dtest("dtest", "-D -b 262144 -B 20", "DAPL Test Complete. PASSED", p)),
        ),
        case(
            "dtest",
            "-b 65536 -B 50 -c",
            "PASSED at both ends",
            VETH_1500,
            Custom(|w, p| w.dtest("dtest", "-b 65536 -B 50 -c", "DAPL Test Complete. PASSED", p)),
        ),
        case(
            "dtestcm",
            "-c 100",
            "complete at both ends",
            VETH_1500,
            Custom(|w, p| w.dtest("dtestcm", "-c 100", "TOTAL:", p)),
        ),
        case(
            "dtestsrq",
            "",
            "complete at both ends",
            VETH_1500,
            Custom(|w, p| w.dtest("dtestsrq", "", "DAPL RC SRQ Test Complete.", p)),
        ),
        case(
            "dtestx",
            "immediate data and atomics",
            "PASSED at both ends",
            VETH_1500,
            Custom(|w, p| w.dtestx(p)),
        ),
        case(
            "dapltest",
            "transactions, performance, quit",
            "exit status 0, no error",
            VETH_1500,
            Custom(|w, p| w.dapltest(&DAPLTEST, p)),
        ),
    ]
}

/// Every size from 2 B to 8 MiB. After each, perftest measures the processor's clock, which takes longer than
/// the transfers, so not everything is run everywhere.
fn perftest() -> Vec<Case> {
    vec![
        perf("ib_send_lat", "-a -n 20", &[Loopback4, Veth1500V4], Expected::all(20)),
        perf("ib_write_lat", "-a -n 20", &[Loopback4, Veth9000V4], Expected::all(20)),
        perf("ib_read_lat", "-a -n 20", LO, Expected::all(20)),
        perf("ib_send_bw", "-a -n 20", LO, Expected::all(20)),
        perf("ib_write_bw", "-a -n 20", &[Loopback4, Veth1500V4], Expected::all(20)),
        perf("ib_read_bw", "-a -n 20", &[Loopback4, Veth9000V4], Expected::all(20)),
        perf("ib_send_lat", "-n 1000 -s 4096", VETHS, Expected::one(4096, 1000)),
        perf("ib_write_lat", "-n 1000 -s 64", VETHS, Expected::one(64, 1000)),
        perf("ib_write_lat", "-n 200 -s 65536", LO, Expected::one(65536, 200)),
        perf("ib_write_lat", "-n 100 -s 1048576", LO, Expected::one(1 << 20, 100)),
        perf("ib_read_lat", "-n 1000 -s 16384", VETHS, Expected::one(16384, 1000)),
        perf("ib_send_bw", "-n 2000 -s 8192", VETHS, Expected::one(8192, 2000)),
        perf("ib_atomic_lat", "-n 1000", VETHS, Expected::one(8, 1000)),
        perf("ib_atomic_lat", "-e -A CMP_AND_SWAP -n 1000", LO, Expected::one(8, 1000)),
        perf("ib_atomic_bw", "-A FETCH_AND_ADD -q 4 -n 500", LO, Expected::one(8, 2000)),
        perf("ib_write_bw", "-n 300 -s 1048576", VETHS, Expected::one(1 << 20, 300)),
        perf("ib_read_bw", "-n 300 -s 1048576", VETHS, Expected::one(1 << 20, 300)),
    ]
}

/// Toward adapters and siw, perftest has to take the device for an iWARP adapter at both ends.
fn perftest_as_iwarp() -> Vec<Case> {
    vec![
        iwarp("ib_send_lat", "-n 1000 -s 64, as iWARP", LO_AND_VETH, Expected::one(64, 1000)),
        iwarp("ib_send_bw", "-n 2000 -s 8192, as iWARP", LO, Expected::one(8192, 2000)),
        iwarp("ib_write_lat", "-n 1000 -s 64, as iWARP", LO, Expected::one(64, 1000)),
        iwarp("ib_write_bw", "-n 2000, as iWARP", LO_AND_VETH, Expected::one(65536, 2000)),
        iwarp("ib_write_bw", "-l 64 -Q 64 -n 6400 -s 64, as iWARP", LO, Expected::one(64, 6400)),
        iwarp("ib_read_bw", "-n 2000, as iWARP", LO, Expected::one(65536, 2000)),
        iwarp("ib_read_lat", "-e -n 2000 -s 64, as iWARP", LO, Expected::one(64, 2000)),
    ]
}

/// Sleeping on completion events instead of polling.
fn perftest_with_events() -> Vec<Case> {
    vec![
        perf("ib_send_lat", "-e -n 2000 -s 64", LO_AND_VETH, Expected::one(64, 2000)),
        perf("ib_read_lat", "-e -n 2000 -s 64", LO, Expected::one(64, 2000)),
        // Not as iWARP: there perftest's sender waits for an event after it has sent as far as the receiver's
        // credits go, and a credit is a Write, which makes none. It waits for ever when its last signalled
        // Send completes before the receiver's program has granted more; with -a -n 20 in every run, as the
        // 20th Send, the only signalled one, needs a credit (docs/adr/008).
        perf("ib_send_bw", "-e -n 1000 -s 262144", LO_AND_VETH, Expected::one(262_144, 1000)),
        perf("ib_send_bw", "-e -n 2000 -s 64", LO_AND_VETH, Expected::one(64, 2000)),
        perf("ib_send_bw", "-e -n 2000 -s 4096", LO_AND_VETH, Expected::one(4096, 2000)),
        perf("ib_send_bw", "-e -a -n 20", LO, Expected::all(20)),
        perf("ib_send_bw", "-b -e -n 1000 -s 4096", LO, Expected::one(4096, 1000)),
        perf("ib_read_bw", "-e -n 2000", LO, Expected::one(65536, 2000)),
    ]
}

/// Both directions, inline data, many queue pairs, shared receives, lists, and runs for a time.
fn perftest_at_length() -> Vec<Case> {
    vec![
        // Both directions at once.
        perf("ib_send_bw", "-b -n 2000", LO_AND_VETH, Expected::one(65536, 2000)),
        perf("ib_write_bw", "-b -n 2000", LO_AND_VETH, Expected::one(65536, 2000)),
        perf("ib_read_bw", "-b -n 2000", LO_AND_VETH, Expected::one(65536, 2000)),
        perf("ib_send_bw", "-b -e -n 300 -s 262144", LO, Expected::one(262_144, 300)),
        // Inline. perftest switches it off for vendor part ids it does not know; then this is one more
        // small-message run, and inline is shown by rdma_client and c/verify.c.
        perf("ib_send_lat", "-I 64 -n 2000 -s 64", LO, Expected::one(64, 2000)),
        perf("ib_write_lat", "-I 64 -n 2000 -s 64", LO, Expected::one(64, 2000)),
        perf("ib_send_bw", "-I 64 -n 5000 -s 64", LO, Expected::one(64, 5000)),
        perf("ib_write_bw", "-I 64 -n 5000 -s 64", LO, Expected::one(64, 5000)),
        // Many queue pairs; iterations are counted over all of them.
        perf("ib_send_bw", "-q 64 -n 50 -s 4096", LO_AND_VETH, Expected::one(4096, 3200)),
        perf("ib_write_bw", "-q 64 -n 50 -s 4096", LO_AND_VETH, Expected::one(4096, 3200)),
        perf("ib_read_bw", "-q 64 -n 50 -s 4096", LO_AND_VETH, Expected::one(4096, 3200)),
        perf("ib_write_bw", "-q 16 -b -n 100", LO, Expected::one(65536, 1600)),
        perf("ib_read_bw", "-q 16 -e -n 100 -s 1024", LO, Expected::one(1024, 1600)),
        // A shared receive queue. Not on several queue pairs as iWARP: there perftest 4.5 grants credits to
        // the queue pair for which it posted the receive and not to the one that took it; one that has more
        // credits than it has sent messages never sends again.
        perf("ib_send_bw", "--use-srq -n 2000", LO_AND_VETH, Expected::one(65536, 2000)),
        perf("ib_send_bw", "--use-srq -a -n 20", LO, Expected::all(20)),
        perf("ib_send_bw", "--use-srq -e -n 500 -s 262144", LO, Expected::one(262_144, 500)),
        perf("ib_send_lat", "--use-srq -n 2000 -s 64", LO, Expected::one(64, 2000)),
        perf("ib_send_lat", "--use-srq -e -n 2000 -s 64", LO, Expected::one(64, 2000)),
        perf("ib_send_bw", "--use-srq -q 4 -n 1000", LO_AND_VETH, Expected::one(65536, 4000)),
        perf("ib_send_bw", "--use-srq -q 4 -n 1000 -s 1024", LO, Expected::one(1024, 4000)),
        perf("ib_send_bw", "--use-srq -q 4 -b -n 500 -s 4096", LO, Expected::one(4096, 2000)),
        // Lists of work requests.
        perf("ib_send_bw", "-l 16 -n 3200 -s 1024", LO, Expected::one(1024, 3200)),
        perf("ib_write_bw", "-l 64 -Q 64 -n 6400 -s 64", LO_AND_VETH, Expected::one(64, 6400)),
        perf("ib_read_bw", "-l 16 -n 3200 -s 1024", LO, Expected::one(1024, 3200)),
        perf("ib_write_bw", "-l 8 -q 8 -n 800 -s 512", LO, Expected::one(512, 6400)),
        // For a time instead of a count.
        perf("ib_send_lat", "-D 2 -s 64", LO, Expected::lasting(64)),
        perf("ib_write_lat", "-D 2 -s 64", LO, Expected::lasting(64)),
        perf("ib_send_bw", "-D 2", LO, Expected::lasting(65536)),
        perf("ib_write_bw", "-D 2", VETH_1500, Expected::lasting(65536)),
        perf("ib_read_bw", "-D 2", LO, Expected::lasting(65536)),
    ]
}

/// libfabric: connected endpoints, and reliable datagrams over many of them with receives shared between
/// them; and Open MPI over it.
fn fabric() -> Vec<Case> {
    let case = |program, manner, checked, at, run| Case { program, manner, checked, at, run: Custom(run) };
    vec![
        case(
            "fi_info",
            "-p verbs",
            "connected endpoints and reliable datagrams, of uwarp0",
            LO_AND_VETH,
            |w, p| w.fi_info(p),
        ),
        case("fi_pingpong", "-p verbs -e msg -c", FI, EVERYWHERE, |w, p| w.fi_pingpong(FI_MSG, &[], p)),
        case("fi_pingpong", "-p verbs -e msg, UWARP_CRC=off", FI, LO_AND_VETH, |w, p| {
            w.fi_pingpong(FI_MSG, CRC_OFF, p)
        }),
        case("fi_pingpong", "-p verbs -e msg, as iWARP", FI, LO_AND_VETH, |w, p| {
            w.fi_pingpong(FI_MSG, AS_IWARP, p)
        }),
        case("fi_pingpong", "-p verbs -e msg, as InfiniBand", FI, LO_AND_VETH, |w, p| {
            w.fi_pingpong(FI_MSG, AS_IB, p)
        }),
        case("fi_pingpong", "-p verbs;ofi_rxm -e rdm -c", FI, EVERYWHERE, |w, p| {
            w.fi_pingpong(FI_RXM, &[], p)
        }),
        case("fi_pingpong", "-p verbs;ofi_rxm -e rdm, UWARP_CRC=off", FI, LO_AND_VETH, |w, p| {
            w.fi_pingpong(FI_RXM, CRC_OFF, p)
        }),
        case("fi_pingpong", "-p verbs;ofi_rxm -e rdm, as iWARP", FI, LO_AND_VETH, |w, p| {
            w.fi_pingpong(FI_RXM, AS_IWARP, p)
        }),
        // Open MPI with its ranks on one host, or half of them in each namespace.
        case("mpirun -np 2", "--mca mtl ofi, verbs;ofi_rxm", MPI, LO_AND_VETH, |w, p| w.mpi(2, &[], p)),
        case("mpirun -np 4", "--mca mtl ofi, verbs;ofi_rxm", MPI, LO_AND_VETH, |w, p| w.mpi(4, &[], p)),
        case("mpirun -np 4", "UWARP_CRC=off", MPI, VETH_1500, |w, p| w.mpi(4, CRC_OFF, p)),
        case("mpirun -np 4", "as iWARP", MPI, LO_AND_VETH, |w, p| w.mpi(4, AS_IWARP, p)),
        case("mpirun -np 4", "as InfiniBand", MPI, VETH_1500, |w, p| w.mpi(4, AS_IB, p)),
    ]
}

/// Programs that have another purpose than to try RDMA.
fn applications() -> Vec<Case> {
    let case = |program, manner, checked, at, run| Case { program, manner, checked, at, run: Custom(run) };
    vec![
        // QEMU: RDMA Writes from and to memory that changes meanwhile.
        case("qemu", "migrate rdma:", GUEST, LO_AND_VETH, |w, p| w.migrate(false, &[], p)),
        case("qemu", "migrate rdma:, rdma-pin-all", GUEST, LO_AND_VETH, |w, p| w.migrate(true, &[], p)),
        case("qemu", "migrate rdma:, UWARP_CRC=off", GUEST, LO, |w, p| w.migrate(false, CRC_OFF, p)),
        case("qemu", "migrate rdma:, as iWARP", GUEST, LO, |w, p| w.migrate(false, AS_IWARP, p)),
        case("qemu", "migrate rdma:, as InfiniBand", GUEST, LO, |w, p| w.migrate(false, AS_IB, p)),
        // tgt's iSER target, whose RDMA Reads and Writes are of the initiators' memory.
        case("tgtd", "iser://, libiscsi, qemu-io", ISER, LO_AND_VETH, |w, p| w.iser(&[], p)),
        case("tgtd", "iser://, UWARP_CRC=off", ISER, LO, |w, p| w.iser(CRC_OFF, p)),
        case("tgtd", "iser://, as iWARP", ISER, LO, |w, p| w.iser(AS_IWARP, p)),
        case("tgtd", "iser://, as InfiniBand", ISER, LO, |w, p| w.iser(AS_IB, p)),
        // librpma. Debian has none of its examples, and no fio with its engines. Not on loopback: its server
        // takes its device from the address it binds, and rdma_cm binds none for 127.0.0.1.
        case("librpma", "c/rpma.c", RPMA, VETHS, |w, p| w.rpma(&[], p)),
        case("librpma", "c/rpma.c, UWARP_CRC=off", RPMA, VETH_1500, |w, p| w.rpma(CRC_OFF, p)),
        case("librpma", "c/rpma.c, as iWARP", RPMA, VETH_1500, |w, p| w.rpma(AS_IWARP, p)),
        case("librpma", "c/rpma.c, as InfiniBand", RPMA, VETH_1500, |w, p| w.rpma(AS_IB, p)),
    ]
}
