//! The Debian packages that the rows' programs are from. Rows of `make test` can only use what it installs
//! ([`super::installed`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use uwarp_conformance::process::Cmd;
use uwarp_conformance::report::Table;
use uwarp_conformance::{Outcome, fail, require};

use super::installed;
use super::mpis::MVAPICH2;
use Use::Rows;

/// What programs are called that are no file of their package, or that `make test` does not install, and the
/// package. The page is the same where dpkg does not know them.
const OTHER_NAMES: [(&str, &str); 21] = [
    ("pyverbs", "python3-pyverbs"),
    ("libgloo", "libgloo-dev"),
    ("librpma", "librpma-dev"),
    ("libucp", "libucx-dev"),
    ("qemu", "qemu-system-x86"),
    ("mpi4py", "python3-mpi4py"),
    ("gmx_mpi", "gromacs"),
    ("hpcc", "hpcc"),
    ("NPopenmpi", "netpipe-openmpi"),
    ("NPmpich2", "netpipe-mpich2"),
    ("ceph-osd", "ceph-osd"),
    ("curl", "curl"),
    ("redis-benchmark", "redis-tools"),
    ("iperf3", "iperf3"),
    ("memcached", "memcached"),
    ("nc", "netcat-openbsd"),
    ("scp", "openssh-client"),
    ("bwrap", "bubblewrap"),
    ("prlimit", "util-linux"),
    // In a package whose name has its version.
    ("pgbench", "postgresql-client-common"),
    // A machine may have another one of its own in front of it.
    ("git", "git"),
];

/// Names of rows whose program is in no package.
const OWN_NAMES: [&str; 10] = [
    "asyncio",
    "NCCL",
    "make",
    "hello.c",
    "large_datagram.c",
    "peers.c",
    "rd_memory.c",
    "rd_pingpong.c",
    "unreliable_loss.c",
    "write_record.c",
];

/// Headings of rows whose program is in no package of Debian's.
const OWN: &str = "Programs of this tree";
const CRATES: &str = "Examples of Rust crates";
const WHEELS: &str = "Wheels of Python packages";
const BUILT: &str = "Built from their sources";

/// Whether it is one of Debian's.
pub fn is_debians(package: &str) -> bool {
    ![OWN, CRATES, WHEELS, BUILT].contains(&package)
}

/// The package of a row's program, or what it is.
pub fn of(program: &str) -> String {
    if program.starts_with("crate ") {
        return CRATES.to_owned();
    }
    if program.starts_with(MVAPICH2) {
        return BUILT.to_owned();
    }
    if program.starts_with("wheel ") {
        return WHEELS.to_owned();
    }
    // "rdma_server, rdma_client", "mpirun -np 2"; "uwarp run -- rping" is one of rping.
    let program = program.strip_prefix("uwarp run -- ").unwrap_or(program);
    let name = program.split([' ', ',']).next().unwrap_or_default();
    if let Some((_, package)) = OTHER_NAMES.iter().find(|(other, _)| *other == name) {
        return (*package).to_owned();
    }
    if OWN_NAMES.contains(&name) {
        return OWN.to_owned();
    }
    // dpkg reads lists of all files each time.
    static KNOWN: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(|e| e.into_inner());
    known
        .entry(name.to_owned())
        .or_insert_with(|| installed::owner(name).unwrap_or_else(|| format!("{UNKNOWN}{name}")))
        .clone()
}

const UNKNOWN: &str = "no package of ";

/// Fails unless the page is the same on every machine on which `make test` has installed what it needs.
pub fn are_known<'a>(mut programs: impl Iterator<Item = &'a str>) -> Outcome {
    match programs.find(|program| of(program).starts_with(UNKNOWN)) {
        Some(program) => fail!("{program}: of which package? The lists of names can say it"),
        None => Ok(()),
    }
}

/// The installed version of a package, without what a binary rebuild adds.
pub fn version(package: &str) -> Outcome<String> {
    let out = Cmd::line("dpkg-query -W -f ${Version}").arg(package).run_ok()?;
    Ok(out.stdout.trim().to_owned())
}

/// Fails unless `make programs` installs all of these packages, and `make test` all that tell which package a
/// row's program is from.
pub fn are_installed_by_setup<'a>(packages: impl Iterator<Item = &'a str>) -> Outcome {
    let missing = |of: BTreeSet<&'a str>, target: &str| -> Outcome<Vec<&'a str>> {
        let known = installed::by_make(target)?;
        Ok(of.into_iter().filter(|package| is_debians(package) && !known.contains(*package)).collect())
    };
    let all: BTreeSet<&str> = packages.collect();
    let lack = missing(all.clone(), "programs")?;
    require!(lack.is_empty(), "packages of rows that are not in scripts/packages: {lack:?}");
    let named = |package: &&str| !OTHER_NAMES.iter().any(|(_, named)| named == package);
    let lack = missing(all.into_iter().filter(named).collect(), "test")?;
    require!(lack.is_empty(), "make test does not install {lack:?}: their programs belong in OTHER_NAMES");
    Ok(())
}

/// A package that links libibverbs or librdmacm itself: programs of the table that use it, or why none does.
enum Use {
    Rows(&'static [&'static str]),
    None(&'static str),
}

const MANAGEMENT: &str = "talks to a subnet manager of InfiniBand or Omni-Path; iWARP has none";
const MELLANOX: &str = "a DPDK driver for the adapters of one maker: it writes to their queues itself";
const SAME: &str = "the code for `rdma:` migration is that of qemu-system-x86, which has rows";
const DRIVERS: &str = "drivers for libibverbs, which uwarp replaces";
const HEADERS: &str = "headers; all programs in `conformance/c` are compiled with them";

/// What `apt-cache rdepends libibverbs1 librdmacm1` of Debian 12 names.
const LINKING: [(&str, Use); 43] = [
    ("ceph-osd", Rows(&["ceph-osd"])),
    ("dpdk-dev", Use::None(MELLANOX)),
    ("fio", Rows(&["fio"])),
    ("gfio", Use::None("fio with a window; its engine is that of fio, which has rows")),
    ("ibacm", Use::None(MANAGEMENT)),
    ("ibverbs-providers", Use::None(DRIVERS)),
    ("ibverbs-utils", Rows(&["ibv_devices", "ibv_devinfo", "ibv_rc_pingpong", "ibv_asyncwatch"])),
    ("libdapl2", Rows(&["dtest", "dapltest"])),
    ("libfabric1", Rows(&["fi_info", "fi_pingpong"])),
    ("libgloo0", Rows(&["libgloo"])),
    ("libibverbs-dev", Use::None(HEADERS)),
    ("libiscsi7", Rows(&["tgtd"])),
    ("libopamgt0", Use::None(MANAGEMENT)),
    ("libopasadb1", Use::None(MANAGEMENT)),
    ("libopenmpi3", Rows(&["mpirun -np", "mpirun.openmpi"])),
    ("librados2", Rows(&["ceph-osd"])),
    ("librdmacm-dev", Use::None(HEADERS)),
    ("librdmacm1", Use::None("uwarp replaces it")),
    ("librpma0", Rows(&["librpma"])),
    ("librte-common-mlx5-23", Use::None(MELLANOX)),
    ("librte-compress-mlx5-23", Use::None(MELLANOX)),
    ("librte-crypto-mlx5-23", Use::None(MELLANOX)),
    ("librte-net-mlx4-23", Use::None(MELLANOX)),
    ("librte-net-mlx5-23", Use::None(MELLANOX)),
    ("librte-regex-mlx5-23", Use::None(MELLANOX)),
    ("librte-vdpa-mlx5-23", Use::None(MELLANOX)),
    ("libucx0", Rows(&["ucx_", "mpirun.mpich"])),
    ("opa-address-resolution", Use::None(MANAGEMENT)),
    ("opa-basic-tools", Use::None(MANAGEMENT)),
    ("opa-fastfabric", Use::None(MANAGEMENT)),
    ("opa-fm", Use::None(MANAGEMENT)),
    ("perftest", Rows(&["ib_send_lat", "ib_write_bw", "ib_read_bw", "ib_atomic_bw"])),
    ("python3-pyverbs", Rows(&["pyverbs"])),
    ("qemu-system-arm", Use::None(SAME)),
    ("qemu-system-mips", Use::None(SAME)),
    ("qemu-system-misc", Use::None(SAME)),
    ("qemu-system-ppc", Use::None(SAME)),
    ("qemu-system-sparc", Use::None(SAME)),
    ("qemu-system-x86", Rows(&["qemu"])),
    ("qperf", Rows(&["qperf"])),
    ("rdmacm-utils", Rows(&["rping", "ucmatose", "udaddy", "mckey", "cmtime"])),
    ("srptools", Use::None(MANAGEMENT)),
    ("tgt", Rows(&["tgtd"])),
];

/// The list as a section of the page. Programs whose rows are not there are left out.
pub fn linking(programs: &[&str]) -> String {
    let mut table = Table::new(&["package", "state"]);
    for (package, uses) in &LINKING {
        let state = match uses {
            Use::None(why) => (*why).to_owned(),
            Rows(names) => {
                let names =
                    names.iter().flat_map(|name| programs.iter().filter(move |p| p.starts_with(name)));
                let names: BTreeSet<&str> = names.filter_map(|name| name.split([' ', ',']).next()).collect();
                let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
                if names.is_empty() {
                    "no row yet".to_owned()
                } else {
                    format!("rows of {}", names.join(", "))
                }
            }
        };
        table.row([(*package).to_owned(), state]);
    }
    table.markdown()
}

/// Fails if apt knows a package that links the libraries and is not in the list. Needs apt's lists.
pub fn check_linking() -> Outcome {
    let out = Cmd::line("apt-cache rdepends libibverbs1 librdmacm1").run_ok()?;
    let found = out.stdout.lines().filter_map(|line| line.strip_prefix("  "));
    let known = |name: &&str| !LINKING.iter().any(|(package, _)| package == name);
    let missing: BTreeSet<&str> = found.map(|name| name.trim_start_matches('|')).filter(known).collect();
    require!(missing.is_empty(), "packages that link the libraries and are not in the table: {missing:?}");
    Ok(())
}
