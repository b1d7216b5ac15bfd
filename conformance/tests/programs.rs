//! Debian's RDMA programs, unmodified, over uwarp. One row of [`cases`] per program and manner of use; the outcome of
//! a complete run is written to `PROGRAMS.md`.
//!
//! Some rows take more rounds with `PROGRAMS=full`, which `make programs` sets: ten migrations instead of one.
//!
//! Cases run one at a time: many of these programs spin at both ends, and two such pairs on two processors would
//! measure each other's patience.

#[path = "programs/cm.rs"]
mod cm;
#[path = "programs/fabric.rs"]
mod fabric;
#[path = "programs/guest.rs"]
mod guest;
#[path = "programs/memory.rs"]
mod memory;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use uwarp_conformance::check::{self, Expected};
use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::NetNs;
use uwarp_conformance::pair::{self, Ends};
use uwarp_conformance::process::{Cmd, Output, Running};
use uwarp_conformance::report::{Table, write_if_changed};
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Network, Place, free_port};
use uwarp_conformance::{Context, Failure, Outcome, fail, require};

/// A program, a manner of using it, and where that is tried.
struct Case {
    program: &'static str,
    /// Arguments or circumstances, as the table names them.
    manner: &'static str,
    /// What is looked at afterwards.
    checked: &'static str,
    at: &'static [Topology],
    run: Run,
}

enum Run {
    /// Both ends of a perftest with these arguments behind `-R -F -p PORT`.
    Perftest(&'static str, Expected),
    /// The same with the device shown as an iWARP adapter.
    PerftestIwarp(&'static str, Expected),
    /// `rping` at both ends with `-v -V`, these rounds and sizes one after the other, and these variables set.
    Rping(&'static [(u32, usize)], Env),
    /// Anything else.
    Custom(fn(&World, Place<'_>) -> Outcome),
}
use Run::{Custom, Perftest, PerftestIwarp, Rping};

/// Variables for both ends.
type Env = &'static [(&'static str, &'static str)];
const AS_IWARP: Env = &[("UWARP_VIEW", "iwarp")];
const AS_IB: Env = &[("UWARP_VIEW", "ib")];
const CRC_OFF: Env = &[("UWARP_CRC", "off")];
const SPINNING: Env = &[("UWARP_PROGRESS", "spin")];
const AS_STRANGERS: Env = &[("UWARP_PEER", "off")];

const LO: &[Topology] = &[Loopback4];
const LO_BOTH: &[Topology] = &[Loopback4, Loopback6];
/// Loopback and both veths, IPv4: Debian 12's perftest asks `rdma_getaddrinfo` for IPv4 addresses only.
const LO_AND_VETH: &[Topology] = &[Loopback4, Veth1500V4, Veth9000V4];
const VETH_1500: &[Topology] = &[Veth1500V4];
const VETHS: &[Topology] = &[Veth1500V4, Veth9000V4];
const EVERYWHERE: &[Topology] = &Topology::ALL;

const TABLE: &str = "one row per size, every iteration counted, no complaint at either end";
const IWARP_TABLE: &str = "as iWARP: one row per size, every iteration counted, no complaint at either end";
const PING: &str = "every round's bytes at both ends, nothing but the disconnect on stderr";

fn cases() -> Vec<Case> {
    let case = |program, manner, checked, at, run| Case { program, manner, checked, at, run };
    let perf = |program, args, at, expected| case(program, args, TABLE, at, Perftest(args, expected));
    let iwarp =
        |program, args, at, expected| case(program, args, IWARP_TABLE, at, PerftestIwarp(args, expected));
    let mut all = vec![
        // Device queries.
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
        // rping: Send, Recv, RDMA Read and Write with the data compared. 26 is the least size it takes, 65535 the most.
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
            Custom(|w, p| w.rping_by_number(&[("UWARP_PORT_RANGE", "20000-29999")], p)),
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
        // rdma_create_ep, rdma_getaddrinfo, rdma_get_request, inline Send, rdma_get_*_comp.
        case("rdma_server, rdma_client", "", "both end with 0", EVERYWHERE, Custom(rdma_server)),
        case("rdma_xserver, rdma_xclient", "-c r", "both end with 0", LO_AND_VETH, Custom(rdma_xserver)),
        // A queue pair made with ibv_create_qp and moved on with ibv_modify_qp: CONNECT_RESPONSE, rdma_establish.
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
            "cmtime",
            "-c 1000",
            "every connection comes about, a figure for each step",
            LO_AND_VETH,
            Custom(|w, p| w.cmtime(1000, p)),
        ),
        case(
            "qperf",
            "-cm1, all of RC without atomics",
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
            "err= 0 at both ends, 32 MiB",
            LO_AND_VETH,
            Custom(|w, p| w.fio("send", "4k", 4, p)),
        ),
        // uDAPL over rdma_cm: Send, RDMA Write and Read through libdat2 and libdaplofa. In namespaces: their fixed port is one
        // that the system also gives to outgoing connections, and a loopback address has no device.
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
        case("dtestx", "without atomics", "PASSED at both ends", VETH_1500, Custom(|w, p| w.dtestx(p))),
        case(
            "dapltest",
            "transactions, performance, quit",
            "exit status 0, no complaint",
            VETH_1500,
            Custom(|w, p| w.dapltest(&DAPLTEST, p)),
        ),
        // perftest: every size from 2 B to 8 MiB. After each it measures the processor's clock, which takes longer than
        // the transfers, so not everything is run everywhere.
        perf("ib_send_lat", "-a -n 20", &[Loopback4, Veth1500V4], Expected::all(20)),
        perf("ib_write_lat", "-a -n 20", &[Loopback4, Veth9000V4], Expected::all(20)),
        perf("ib_read_lat", "-a -n 20", LO, Expected::all(20)),
        perf("ib_send_bw", "-a -n 20", LO, Expected::all(20)),
        perf("ib_write_bw", "-a -n 20", &[Loopback4, Veth1500V4], Expected::all(20)),
        perf("ib_read_bw", "-a -n 20", &[Loopback4, Veth9000V4], Expected::all(20)),
        perf("ib_send_lat", "-n 1000 -s 4096", VETHS, Expected::one(4096, 1000)),
        perf("ib_write_lat", "-n 1000 -s 64", VETHS, Expected::one(64, 1000)),
        perf("ib_read_lat", "-n 1000 -s 16384", VETHS, Expected::one(16384, 1000)),
        perf("ib_send_bw", "-n 2000 -s 8192", VETHS, Expected::one(8192, 2000)),
        perf("ib_write_bw", "-n 300 -s 1048576", VETHS, Expected::one(1 << 20, 300)),
        perf("ib_read_bw", "-n 300 -s 1048576", VETHS, Expected::one(1 << 20, 300)),
        // Toward adapters and siw, perftest has to take the device for an iWARP adapter at both ends.
        iwarp("ib_send_lat", "-n 1000 -s 64", LO_AND_VETH, Expected::one(64, 1000)),
        iwarp("ib_send_bw", "-n 2000 -s 8192", LO, Expected::one(8192, 2000)),
        iwarp("ib_write_lat", "-n 1000 -s 64", LO, Expected::one(64, 1000)),
        iwarp("ib_write_bw", "-n 2000", LO_AND_VETH, Expected::one(65536, 2000)),
        iwarp("ib_write_bw", "-l 64 -Q 64 -n 6400 -s 64", LO, Expected::one(64, 6400)),
        iwarp("ib_read_bw", "-n 2000", LO, Expected::one(65536, 2000)),
        iwarp("ib_read_lat", "-e -n 2000 -s 64", LO, Expected::one(64, 2000)),
        // Sleeping on completion events instead of polling.
        perf("ib_send_lat", "-e -n 2000 -s 64", LO_AND_VETH, Expected::one(64, 2000)),
        perf("ib_read_lat", "-e -n 2000 -s 64", LO, Expected::one(64, 2000)),
        // Not as iWARP: there perftest's sender waits for an event after it has sent as far as the receiver's credits go, and a credit is
        // a Write, which makes none. It waits for ever when its last signalled Send completes before the receiver's program has granted
        // more; with -a -n 20 in every run, as the 20th Send, the only signalled one, needs a credit (docs/adr/008).
        perf("ib_send_bw", "-e -n 1000 -s 262144", LO_AND_VETH, Expected::one(262_144, 1000)),
        perf("ib_send_bw", "-e -n 2000 -s 64", LO_AND_VETH, Expected::one(64, 2000)),
        perf("ib_send_bw", "-e -n 2000 -s 4096", LO_AND_VETH, Expected::one(4096, 2000)),
        perf("ib_send_bw", "-e -a -n 20", LO, Expected::all(20)),
        perf("ib_send_bw", "-b -e -n 1000 -s 4096", LO, Expected::one(4096, 1000)),
        perf("ib_read_bw", "-e -n 2000", LO, Expected::one(65536, 2000)),
        // Both directions at once.
        perf("ib_send_bw", "-b -n 2000", LO_AND_VETH, Expected::one(65536, 2000)),
        perf("ib_write_bw", "-b -n 2000", LO_AND_VETH, Expected::one(65536, 2000)),
        perf("ib_read_bw", "-b -n 2000", LO_AND_VETH, Expected::one(65536, 2000)),
        perf("ib_send_bw", "-b -e -n 300 -s 262144", LO, Expected::one(262_144, 300)),
        // Inline. perftest switches it off for vendor part ids it does not know; then this is one more small-message
        // run, and inline is shown by rdma_client and c/verify.c.
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
        // A shared receive queue. Not on several queue pairs as iWARP: there perftest 4.5 grants credits to the queue pair for which it posted the receive and not to the
        // one that took it; one that has more credits than it has sent messages never sends again.
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
    ];
    all.extend(applications());
    all
}

/// Programs that have another purpose than to try RDMA, and the libraries they use it by.
fn applications() -> Vec<Case> {
    let case = |program, manner, checked, at, run| Case { program, manner, checked, at, run: Custom(run) };
    vec![
        // libfabric: connected endpoints, and reliable datagrams over many of them with receives shared between them.
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
        // QEMU: RDMA Writes from and to memory that changes meanwhile.
        case("qemu", "migrate rdma:", GUEST, LO_AND_VETH, |w, p| w.migrate(false, &[], p)),
        case("qemu", "migrate rdma:, rdma-pin-all", GUEST, LO_AND_VETH, |w, p| w.migrate(true, &[], p)),
        case("qemu", "migrate rdma:, UWARP_CRC=off", GUEST, LO, |w, p| w.migrate(false, CRC_OFF, p)),
        case("qemu", "migrate rdma:, as iWARP", GUEST, LO, |w, p| w.migrate(false, AS_IWARP, p)),
        case("qemu", "migrate rdma:, as InfiniBand", GUEST, LO, |w, p| w.migrate(false, AS_IB, p)),
        // librpma. Debian has none of its examples, and no fio with its engines. Not on loopback: its server takes its
        // device from the address it binds, and rdma_cm binds none for 127.0.0.1.
        case("librpma", "c/rpma.c", RPMA, VETHS, |w, p| w.rpma(&[], p)),
        case("librpma", "c/rpma.c, UWARP_CRC=off", RPMA, VETH_1500, |w, p| w.rpma(CRC_OFF, p)),
        case("librpma", "c/rpma.c, as iWARP", RPMA, VETH_1500, |w, p| w.rpma(AS_IWARP, p)),
        case("librpma", "c/rpma.c, as InfiniBand", RPMA, VETH_1500, |w, p| w.rpma(AS_IB, p)),
    ]
}

const FI: &str = "every round of each size, data checked at both ends";
const FI_MSG: &str = "-p verbs -e msg";
const FI_RXM: &str = "-p verbs;ofi_rxm -e rdm";
const MPI: &str = "c/mpi/exchange.c: ring, all-to-all, all-reduce, large messages; every byte";
const GUEST: &str =
    "a guest that writes all the time goes on, each round of it whole; ten times with make programs";
const RPMA: &str = "written, flushed, read back; every byte at both ends";

const STATUS_0: &str = "data transfers complete, return status 0 at both ends";

/// `rc_rdma_write_lat` and `rc_rdma_write_bw` are Writes with immediate data.
const QPERF: [&str; 8] = [
    "rc_lat",
    "rc_bw",
    "rc_bi_bw",
    "rc_rdma_read_lat",
    "rc_rdma_read_bw",
    "rc_rdma_write_lat",
    "rc_rdma_write_bw",
    "rc_rdma_write_poll_lat",
];

/// Transactions with their data verified (`-V`), threads and endpoints; RDMA performance, polling and blocking.
const DAPLTEST: [&str; 4] = [
    "T -i 100 -t 2 -w 2 -- client SR 4096 server SR 4096 client RW 65536 server RR 16384",
    "T -i 50 -t 1 -w 4 -V -P -- client SR 1024 4 server SR 1024 4 client RR 30000 server RW 30000",
    "P -i 1024 -p 64 -m p -- RW 8192 2",
    "P -i 1024 -p 64 -m b -- RR 8192 1",
];

const SIZES: [(u32, usize); 6] = [(20, 26), (20, 64), (20, 1023), (20, 1461), (20, 4096), (20, 65535)];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads = Some(1);
    // With UWARP_VIEW everything that names no view is run in that one, to compare.
    let view = std::env::var_os("UWARP_VIEW");
    let (as_it_is, all_as_iwarp) = (view.is_none(), view.is_some_and(|view| view == "iwarp"));
    let complete = as_it_is && args.filter.is_none() && args.skip.is_empty() && !args.list && !args.ignored;

    let thorough = std::env::var_os("PROGRAMS").is_some_and(|size| size == "full");
    let world = Arc::new(World { dist: Dist::find(), net: Network::default(), all_as_iwarp, thorough });
    let cases = Arc::new(cases());
    let results: Arc<Mutex<Results>> = Arc::default();
    let mut trials = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        for &topology in case.at {
            let (world, cases, results) = (world.clone(), cases.clone(), results.clone());
            let name = format!("{} {} [{topology}]", case.program, case.manner).replace("  ", " ");
            trials.push(Trial::test(name, move || {
                let result = world.run(&cases[index], topology);
                results.lock().unwrap().insert((index, topology), result.is_ok());
                result.map_err(Into::into)
            }));
        }
    }
    let conclusion = libtest_mimic::run(&args, trials);
    if complete {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("PROGRAMS.md");
        if let Err(e) = write_if_changed(&file, &page(&cases, &results.lock().unwrap())) {
            eprintln!("{}: {e}", file.display());
        }
    }
    // The namespaces go with the world, which `exit` would not drop.
    drop(world);
    conclusion.exit_code()
}

/// `-a` takes six seconds on a quiet machine, most of it in perftest's own measuring.
const PERFTEST_LIMIT: Duration = Duration::from_secs(60);

type Results = BTreeMap<(usize, Topology), bool>;

/// What was tried by hand, as building it takes crates from a registry, and cmake.
const RUST: &str = "Examples of Rust crates, tried by hand on loopback: `client` and `server` of rdma-mummy-sys 0.2.6 and \
    `cmtime` of sideway 0.4.3 run (rdma_cm only). \
    Not tried, as they connect without a connection manager: `rc_pingpong` and `rc_pingpong_split` of sideway, `loopback` of ibverbs 0.9.2.";

/// The page of results. No times and no versions, so that it changes only when a result does.
fn page(cases: &[Case], results: &Results) -> String {
    let mut heads = vec!["program", "how", "checked"];
    let columns = Topology::ALL.map(|t| t.to_string());
    heads.extend(columns.iter().map(String::as_str));
    let mut table = Table::new(&heads);
    for (index, case) in cases.iter().enumerate() {
        let cell = |t| match results.get(&(index, t)) {
            Some(true) => "ok".to_owned(),
            Some(false) => "**FAILS**".to_owned(),
            None => String::new(),
        };
        let words = [case.program, case.manner, case.checked].map(str::to_owned);
        table.row(words.into_iter().chain(Topology::ALL.map(cell)));
    }
    let passed = results.values().filter(|ok| **ok).count();
    format!(
        "# Unmodified programs over uwarp\n\n\
         Written by `cargo test -p uwarp-conformance --test programs`; do not edit. {passed} of {} runs pass.\n\n\
         The programs are Debian 12's (rdma-core 44, perftest 4.5). An empty cell was not tried. `lo` is loopback; `veth` \
         is two network namespaces with that MTU between them. Debian 12's perftest can only be told IPv4 addresses.\n\n{RUST}\n\n{}",
        results.len(),
        table.markdown()
    )
}

/// What all cases share.
struct World {
    dist: Outcome<Dist>,
    net: Network,
    /// What names no view is run as iWARP too.
    all_as_iwarp: bool,
    /// Rows that can take more rounds do.
    thorough: bool,
}

impl World {
    fn run(&self, case: &Case, topology: Topology) -> Outcome {
        let place = self.net.place(topology)?;
        match &case.run {
            Perftest(args, expected) => {
                let run = || self.perftest(case.program, args, &[], expected, place);
                if self.all_as_iwarp { pair::despite_perftests_race(run) } else { run() }
            }
            PerftestIwarp(args, expected) => {
                pair::despite_perftests_race(|| self.perftest(case.program, args, AS_IWARP, expected, place))
            }
            Rping(rounds, env) => self.rping(rounds, env, place),
            Custom(run) => run(self, place),
        }
    }

    fn dist(&self) -> Outcome<&Dist> {
        self.dist.as_ref().map_err(Failure::clone)
    }

    /// A program with uwarp in its library path.
    fn over_uwarp(&self, line: &str, ns: Option<&NetNs>) -> Outcome<Cmd> {
        Ok(Cmd::line(line).env("LD_LIBRARY_PATH", self.dist()?.lib()).in_ns(ns))
    }

    fn perftest(&self, tool: &str, args: &str, env: Env, expected: &Expected, place: Place<'_>) -> Outcome {
        let port = free_port();
        let line = format!("{tool} -R -F -p {port} {args}");
        let end = |ns| Ok(self.over_uwarp(&line, ns)?.envs(env).limit(PERFTEST_LIMIT));
        let (server, client) = (end(place.server)?, end(place.client)?.arg(place.address));
        let ends = pair::run(&server, &client, port)?;
        check::no_complaints(&ends.server)?;
        if let Err(why) = check::perftest(&ends.client, expected) {
            return ends.failure(why);
        }
        Ok(())
    }

    fn rping(&self, rounds: &[(u32, usize)], env: Env, place: Place<'_>) -> Outcome {
        for &(count, size) in rounds {
            let port = free_port();
            let server = format!("rping -s -v -a {} -p {port} -S {size}", place.address);
            let client = format!("rping -c -v -V -a {} -p {port} -C {count} -S {size}", place.address);
            let server = self.over_uwarp(&server, place.server)?.envs(env);
            let client = self.over_uwarp(&client, place.client)?.envs(env);
            check_rping(&pair::run(&server, &client, port)?, count, size)?;
        }
        Ok(())
    }
}

/// Programs choose by what their own end shows; the library by what the other end wants.
fn mixed_rping(world: &World, place: Place<'_>) -> Outcome {
    for [server_env, client_env] in [[AS_IWARP, &[]], [&[], AS_IWARP]] {
        let port = free_port();
        let server = format!("rping -s -v -a {} -p {port} -S 4096", place.address);
        let client = format!("rping -c -v -V -a {} -p {port} -C 50 -S 4096", place.address);
        let server = world.over_uwarp(&server, place.server)?.envs(server_env);
        let client = world.over_uwarp(&client, place.client)?.envs(client_env);
        check_rping(&pair::run(&server, &client, port)?, 50, 4096)?;
    }
    Ok(())
}

fn check_rping(ends: &Ends, count: u32, size: usize) -> Outcome {
    let client = check::rping(&ends.client, "ping data: ", count, size);
    let server = check::rping(&ends.server, "server ping data: ", count, size);
    match client.and(server) {
        Ok(()) => Ok(()),
        Err(why) => ends.failure(why),
    }
}

/// The value of a line "name:   value" of ibv_devinfo.
fn field<'a>(out: &'a Output, name: &str) -> Outcome<&'a str> {
    let found = out.stdout.lines().find_map(|l| l.trim().strip_prefix(name)?.strip_prefix(':'));
    match found {
        Some(value) => Ok(value.trim()),
        None => out.failure(format_args!("no line \"{name}:\"")),
    }
}

fn devices(world: &World, place: Place<'_>) -> Outcome {
    let out = world.over_uwarp("ibv_devices", place.client)?.run_ok()?;
    check::no_complaints(&out)?;
    // Two heading lines, then "    uwarp0          \t<16 hex digits>".
    let rows: Vec<Vec<&str>> = out.stdout.lines().skip(2).map(|l| l.split_whitespace().collect()).collect();
    match rows.as_slice() {
        [row]
            if row.len() == 2
                && row[0] == "uwarp0"
                && u64::from_str_radix(row[1], 16).is_ok_and(|g| g != 0) =>
        {
            Ok(())
        }
        _ => out.failure("wanted one device, uwarp0, with a GUID"),
    }
}

/// What `ibv_devinfo` says of a view, and the variables that choose it.
struct Seen {
    env: Env,
    transport: &'static str,
    /// Behind the first GID.
    gid_type: &'static str,
}

const ROCE: Seen = Seen { env: &[], transport: "InfiniBand (0)", gid_type: "RoCE v2" };
/// rdma-core 44 says RoCE v1 of all GIDs on Ethernet that are not RoCE v2, an adapter's for iWARP too.
const IWARP: Seen = Seen { env: AS_IWARP, transport: "iWARP (1)", gid_type: "RoCE v1" };

fn devinfo(world: &World, seen: &Seen, place: Place<'_>) -> Outcome {
    let out = world.over_uwarp("ibv_devinfo -v", place.client)?.envs(seen.env).run_ok()?;
    check::no_complaints(&out)?;
    let wanted = [
        ("hca_id", "uwarp0"),
        ("transport", seen.transport),
        ("phys_port_cnt", "1"),
        ("state", "PORT_ACTIVE (4)"),
        ("link_layer", "Ethernet"),
    ];
    for (name, value) in wanted {
        let is = field(&out, name)?;
        require!(is == value, "{name} is \"{is}\", wanted \"{value}\"\n{}", out.text());
    }
    // Limits that programs divide by, allocate by or compare with what they need.
    for (name, least) in
        [("max_qp", 1000u64), ("max_qp_wr", 1024), ("max_sge", 4), ("max_cq", 1000), ("max_cqe", 4096)]
    {
        let is: u64 = field(&out, name)?.parse().context(name)?;
        require!(is >= least, "{name} is {is}, less than {least}\n{}", out.text());
    }
    let gid = field(&out, "GID[  0]")?;
    require!(gid.ends_with(seen.gid_type), "GID 0 is \"{gid}\", wanted {}\n{}", seen.gid_type, out.text());
    Ok(())
}

fn persistent_in_turn(world: &World, place: Place<'_>) -> Outcome {
    persistent(world, place, 6, 50, |client| client.until(LONG, "done", |c| !c.is_running()))
}

/// Each client starts when the one before is at work, and goes on beside it. Not at one moment: Debian 12's rping
/// keeps an arriving request in one variable until a thread has taken it, so a second one may overwrite it.
fn persistent_together(world: &World, place: Place<'_>) -> Outcome {
    persistent(world, place, 8, 2000, |client| {
        client.until(LONG, "pinging", |c| c.so_far().contains("rdma-ping-3: "))
    })
}

/// Bounds a wait that nobody measures.
const LONG: Duration = Duration::from_secs(20);

/// One persistent server and so many clients of so many rounds; `next` returns when the next client may start.
fn persistent(
    world: &World,
    place: Place<'_>,
    clients: usize,
    count: u32,
    next: impl Fn(&Running) -> Outcome,
) -> Outcome {
    let (size, port) = (1000, free_port());
    // The clients' size must fit the server's buffer.
    let line = format!("rping -s -P -a {} -p {port} -S {size}", place.address);
    let server = pair::serve(&world.over_uwarp(&line, place.server)?.limit(LONG * 3), port)?;
    let line = format!("rping -c -v -V -a {} -p {port} -C {count} -S {size}", place.address);
    let client = world.over_uwarp(&line, place.client)?;
    let all = || -> Outcome {
        let mut running = Vec::new();
        for _ in 0..clients {
            let client = client.spawn()?;
            next(&client)?;
            running.push(client);
        }
        for client in running {
            let out = client.wait()?;
            out.exited_ok()?;
            check::rping(&out, "ping data: ", count, size)?;
        }
        Ok(())
    };
    if let Err(why) = all() {
        fail!("{why}--- server\n{}", server.stop().text())
    }
    require!(server.is_running(), "the server ended\n{}", server.stop().text());
    check::rping_quiet(&server.stop())
}

/// The connection is refused as an event, its queue pair goes to ERR, the posted receive is flushed, and that wakes
/// rping's completion thread: without the last step the program would hang.
fn refused(world: &World, place: Place<'_>) -> Outcome {
    let line = format!("rping -c -a {} -p {}", place.address, free_port());
    let out = world.over_uwarp(&line, place.client)?.limit(Duration::from_secs(10)).run()?;
    require!(!out.ok(), "exited with 0 although nobody listens\n{}", out.text());
    require!(out.status.is_some_and(|s| s.code().is_some()), "did not end by itself\n{}", out.text());
    require!(out.stderr.contains("RDMA_CM_EVENT_REJECTED"), "no REJECTED event\n{}", out.text());
    Ok(())
}

/// A peer that dies without a word: TCP tells, the program sees DISCONNECTED and a flush, and ends by itself.
fn server_killed(world: &World, place: Place<'_>) -> Outcome {
    let port = free_port();
    let server = world.over_uwarp(&format!("rping -s -a {} -p {port}", place.address), place.server)?;
    let server = pair::serve(&server, port)?;
    let line = format!("rping -c -v -V -a {} -p {port}", place.address);
    let client = world.over_uwarp(&line, place.client)?.spawn()?;
    client.until(Duration::from_secs(10), "pinging", |c| c.so_far().contains("rdma-ping-3: "))?;
    server.signal(rustix::process::Signal::KILL)?;
    let out = client.wait()?;
    require!(out.status.is_some_and(|s| s.code().is_some()), "did not end by itself\n{}", out.text());
    require!(out.stderr.contains("DISCONNECT EVENT"), "no DISCONNECTED event\n{}", out.text());
    Ok(())
}

/// No right is needed: both ends run as nobody, from a copy of the library that nobody can read.
fn ordinary_user(world: &World, place: Place<'_>) -> Outcome {
    let lib = world.dist()?.lib();
    let copy = Scratch::new("lib")?;
    for entry in std::fs::read_dir(&lib).context(lib.display())?.flatten() {
        // Links are followed: two names, and so two inodes, of one library would be loaded twice.
        let to = copy.0.join(entry.file_name());
        let kind = entry.file_type().context("file type")?;
        if kind.is_symlink() {
            let target = std::fs::read_link(entry.path()).context("readlink")?;
            std::os::unix::fs::symlink(target, &to).context(to.display())?;
        } else if kind.is_file() {
            std::fs::copy(entry.path(), &to).context(to.display())?;
        }
    }
    let port = free_port();
    let as_nobody =
        |line: &str, ns| Ok(world.over_uwarp(line, ns)?.env("LD_LIBRARY_PATH", &copy.0).as_user(65534));
    let server = as_nobody(&format!("rping -s -v -a {} -p {port}", place.address), place.server)?;
    let client = as_nobody(&format!("rping -c -v -V -a {} -p {port} -C 20", place.address), place.client)?;
    check_rping(&pair::run(&server, &client, port)?, 20, 64)
}

fn through_the_cli(world: &World, place: Place<'_>) -> Outcome {
    let (port, uwarp) = (free_port(), world.dist()?.uwarp()?);
    let run = |line: String, ns| {
        let front = [uwarp.clone().into_os_string(), "run".into(), "--".into()];
        Cmd::line(&line).behind(front).unset("LD_LIBRARY_PATH").in_ns(ns)
    };
    let server = run(format!("rping -s -v -a {} -p {port}", place.address), place.server);
    let client = run(format!("rping -c -v -V -a {} -p {port} -C 20", place.address), place.client);
    check_rping(&pair::run(&server, &client, port)?, 20, 64)
}

fn rdma_server(world: &World, place: Place<'_>) -> Outcome {
    let port = free_port();
    let server = world.over_uwarp(&format!("rdma_server -s {} -p {port}", place.any), place.server)?;
    let client = world.over_uwarp(&format!("rdma_client -s {} -p {port}", place.address), place.client)?;
    ends_with_0(&pair::run(&server, &client, port)?, "rdma_server", "rdma_client")
}

fn rdma_xserver(world: &World, place: Place<'_>) -> Outcome {
    let port = free_port();
    let server = world.over_uwarp(&format!("rdma_xserver -c r -p {port}"), place.server)?;
    let client =
        world.over_uwarp(&format!("rdma_xclient -c r -s {} -p {port}", place.address), place.client)?;
    ends_with_0(&pair::run(&server, &client, port)?, "rdma_xserver", "rdma_xclient")
}

fn ends_with_0(ends: &Ends, server: &str, client: &str) -> Outcome {
    for (out, name) in [(&ends.server, server), (&ends.client, client)] {
        let said = out.stdout.lines().any(|l| l.ends_with(&format!("{name}: end 0")));
        let quiet = out.stderr.trim().is_empty();
        if !said || !quiet {
            return ends.failure(format_args!("{name} does not end with 0, or complains"));
        }
    }
    Ok(())
}

/// A directory that goes away.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Outcome<Scratch> {
        use std::os::unix::fs::PermissionsExt;
        let dir = std::env::temp_dir().join(format!("uwarp-conformance-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).context(dir.display())?;
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).context(dir.display())?;
        Ok(Scratch(dir))
    }
}

impl Scratch {
    fn path(&self) -> &Path {
        &self.0
    }

    /// An option with this directory for a value.
    fn flag(&self, name: &str) -> String {
        format!("{name}={}", self.0.display())
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
