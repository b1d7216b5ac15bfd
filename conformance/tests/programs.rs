//! Debian's RDMA programs, unmodified, over uwarp. One row of [`table`] per program and manner of use.
//!
//! With `PROGRAMS=full`, which `make programs` sets, all rows run, some of them with more rounds (ten
//! migrations instead of one), and the results go into `docs/programs.md`. Such a run may be filtered: cells
//! of rows that did not run stay as they are. Otherwise rows of [`Run::Long`] are left out, and of others
//! the places of [`table::LONG`], and the page must fit the table: every row is there, in its words, with a
//! result for each place, and every package is one that `scripts/setup` installs.
//!
//! What can be found out is not written down a second time. The package is the one that dpkg names for the
//! program, and the version the installed one. Commands and settings are recorded when the row runs. The page
//! has no times, because they would change it with each run.
//!
//! With `UWARP_LINK` all rows that choose no link themselves run over that one, and assert it; `make
//! programs` does so with TCP and with reliable datagrams.
//!
//! The price: a result on the page may be older than the last change of the library, and a new row needs one
//! run with `PROGRAMS=full`. If two branches conflict in the page, keep either side and run the other rows.
//!
//! Cases run one at a time: many of these programs spin at both ends, and two such pairs on two processors
//! would measure each other's patience.

#[path = "programs/by_number.rs"]
mod by_number;
#[path = "programs/ceph.rs"]
mod ceph;
#[path = "programs/cm.rs"]
mod cm;
#[path = "programs/crates.rs"]
mod crates;
#[path = "programs/datagrams.rs"]
mod datagrams;
#[path = "programs/fabric.rs"]
mod fabric;
#[path = "programs/far.rs"]
mod far;
#[path = "programs/fresh.rs"]
mod fresh;
#[path = "programs/guest.rs"]
mod guest;
#[path = "programs/hybrid.rs"]
mod hybrid;
#[path = "programs/installed.rs"]
mod installed;
#[path = "programs/learning.rs"]
mod learning;
#[path = "programs/linked.rs"]
mod linked;
#[path = "programs/memory.rs"]
mod memory;
#[path = "programs/mpi.rs"]
mod mpi;
#[path = "programs/mpi_applications.rs"]
mod mpi_applications;
#[path = "programs/mpis.rs"]
mod mpis;
#[path = "programs/over_rd.rs"]
mod over_rd;
#[path = "programs/packages.rs"]
mod packages;
#[path = "programs/page.rs"]
mod page;
#[path = "programs/per_interface.rs"]
mod per_interface;
#[path = "programs/reliable.rs"]
mod reliable;
#[path = "programs/rsockets.rs"]
mod rsockets;
#[path = "programs/sandboxes.rs"]
mod sandboxes;
#[path = "programs/sockets.rs"]
mod sockets;
#[path = "programs/sockets_files.rs"]
mod sockets_files;
#[path = "programs/sockets_services.rs"]
mod sockets_services;
#[path = "programs/storage.rs"]
mod storage;
#[path = "programs/table.rs"]
mod table;
#[path = "programs/tools.rs"]
mod tools;
#[path = "programs/typed.rs"]
mod typed;
#[path = "programs/ucx.rs"]
mod ucx;
#[path = "programs/unreliable.rs"]
mod unreliable;
#[path = "programs/verbs.rs"]
mod verbs;
#[path = "programs/versions.rs"]
mod versions;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Trial};
use uwarp_conformance::check::{self, Expected};
use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::NetNs;
use uwarp_conformance::pair::{self, Ends};
use uwarp_conformance::process::{Cmd, Output, Running, record};
use uwarp_conformance::report::Table;
use uwarp_conformance::topology::{Network, Place, Topology, free_port};
use uwarp_conformance::{Context, Failure, Outcome, fail, require};

use page::{Ran, Results};

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
    /// The same without `-R`: perftest exchanges numbers and GIDs over a socket of its own.
    PerftestByNumber(&'static str, Env, Expected),
    /// Both ends of one of libibverbs' ping-pongs, which exchange numbers and GIDs (or LIDs) in the same way.
    Pingpong(&'static str, Env),
    /// `rping` at both ends with `-v -V`, these rounds and sizes one after the other, and these variables
    /// set.
    Rping(&'static [(u32, usize)], Env),
    /// Anything else.
    Custom(fn(&World, Place<'_>) -> Outcome),
    /// The same, and left to `make programs`: it takes too long for `make test`.
    Long(fn(&World, Place<'_>) -> Outcome),
}

/// Variables for both ends.
type Env = &'static [(&'static str, &'static str)];
const AS_IWARP: Env = &[("UWARP_VIEW", "iwarp")];
const AS_IB: Env = &[("UWARP_VIEW", "ib")];
const CRC_OFF: Env = &[("UWARP_CRC", "off")];
const SPINNING: Env = &[("UWARP_PROGRESS", "spin")];
const AS_STRANGERS: Env = &[("UWARP_PEER", "off")];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads = Some(1);
    // With UWARP_VIEW everything that names no view is run in that one, to compare.
    let view = std::env::var_os("UWARP_VIEW");
    let (as_it_is, all_as_iwarp) = (view.is_none(), view.is_some_and(|view| view == "iwarp"));
    let thorough = std::env::var_os("PROGRAMS").is_some_and(|size| size == "full");
    let world = Arc::new(World { dist: Dist::find(), net: Network::default(), all_as_iwarp, thorough });
    let cases = Arc::new(table::cases());
    let results: Arc<Mutex<Results>> = Arc::default();
    let counted = Arc::new(linked::Linked::start().unwrap());
    let over_rd = std::env::var_os("UWARP_LINK").is_some_and(|link| link == "rd");
    let (mut trials, mut names, mut absent, mut not_for_rd) = (Vec::new(), HashSet::new(), 0, 0);
    for (index, case) in cases.iter().enumerate() {
        if case.program.starts_with(mpis::MVAPICH2) && mpis::mvapich2().is_none() {
            absent += 1;
            continue;
        }
        if over_rd && linked::is_not_for_rd(case) {
            not_for_rd += 1;
            continue;
        }
        for &topology in case.at {
            if !thorough && !table::in_test(case, topology) {
                continue;
            }
            let (world, cases, results) = (world.clone(), cases.clone(), results.clone());
            let name = name(case, topology);
            // One row is run by its name (`--exact`).
            assert!(names.insert(name.clone()), "two rows have the name {name:?}");
            let counted = counted.clone();
            trials.push(Trial::test(name, move || {
                let began = Instant::now();
                let (result, started) = record(|| world.run(&cases[index], topology));
                let result = counted.row(&cases[index], topology, result);
                let in_test = table::in_test(&cases[index], topology);
                let result = result
                    .and_then(|()| if in_test { installed::are_in_make_test(&started) } else { Ok(()) });
                let ran = Ran { good: result.is_ok(), took: began.elapsed(), started };
                results.lock().unwrap().insert((index, topology), ran);
                result.map_err(Into::into)
            }));
        }
    }
    if absent > 0 {
        eprintln!("{absent} rows of MVAPICH2 are left out, because it is not here: see docs/mvapich2.md");
    }
    if not_for_rd > 0 {
        eprintln!("{not_for_rd} rows are left out, because they are about other links than UWARP_LINK=rd");
    }
    if !thorough {
        let cases = cases.clone();
        trials.push(Trial::test("docs/programs.md", move || Ok(page::check(&cases)?)));
    }
    let mut conclusion = libtest_mimic::run(&args, trials);
    let results = results.lock().unwrap();
    if !args.list {
        print_times(&cases, &results);
        println!("{}", counted.shown());
    }
    if as_it_is && thorough && !results.is_empty() {
        let written = world.dist().and_then(|dist| page::write(&cases, &results, dist));
        if let Err(why) = written {
            eprintln!("{why}");
            conclusion.num_failed += 1;
        }
    }
    drop(results);
    // The namespaces go with the world, which `exit` would not drop.
    drop(world);
    conclusion.exit_code()
}

fn name(case: &Case, topology: Topology) -> String {
    format!("{} {} [{topology}]", case.program, case.manner).replace("  ", " ")
}

/// The rows that took longest, and all of them together. Not on the page: they differ from run to run.
fn print_times(cases: &[Case], results: &Results) {
    const LONGEST: usize = 15;
    let mut rows: Vec<_> = results.iter().collect();
    rows.sort_by_key(|(_, ran)| std::cmp::Reverse(ran.took));
    let mut table = Table::new(&["seconds", "row"]);
    for ((index, topology), ran) in rows.iter().take(LONGEST) {
        table.row([format!("{:7.1}", ran.took.as_secs_f64()), name(&cases[*index], *topology)]);
    }
    let all: Duration = rows.iter().map(|(_, ran)| ran.took).sum();
    table.row([format!("{:7.1}", all.as_secs_f64()), format!("all {} runs", rows.len())]);
    println!("{}", table.terminal());
}

/// `-a` takes six seconds on a quiet machine, most of it in perftest's own measuring.
const PERFTEST_LIMIT: Duration = Duration::from_secs(180);

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
            Run::Perftest(args, expected) => {
                let run = || self.perftest(case.program, args, &[], expected, place);
                if self.all_as_iwarp { pair::despite_perftests_race(run) } else { run() }
            }
            Run::PerftestIwarp(args, expected) => {
                pair::despite_perftests_race(|| self.perftest(case.program, args, AS_IWARP, expected, place))
            }
            Run::PerftestByNumber(args, env, expected) => {
                self.perftest_by_number(case.program, args, env, expected, place)
            }
            Run::Pingpong(args, env) => self.pingpong(&format!("{} {args}", case.program), env, place),
            Run::Rping(rounds, env) => self.rping(rounds, env, place),
            Run::Custom(run) | Run::Long(run) => run(self, place),
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
        self.perftest_to(place.address, tool, &format!("-R {args}"), env, expected, place)
    }

    /// Both ends, the client told this address of the server.
    fn perftest_to(
        &self,
        address: &str,
        tool: &str,
        args: &str,
        env: Env,
        expected: &Expected,
        place: Place<'_>,
    ) -> Outcome {
        let port = free_port();
        let line = format!("{tool} -F -p {port} {args}");
        let end = |ns| Ok(self.over_uwarp(&line, ns)?.envs(env).limit(PERFTEST_LIMIT));
        let (server, client) = (end(place.server)?, end(place.client)?.arg(address));
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

/// Each client starts when the one before is at work, and goes on beside it. Not at one moment: Debian 12's
/// rping keeps an arriving request in one variable until a thread has taken it, so a second one may overwrite
/// it.
fn persistent_together(world: &World, place: Place<'_>) -> Outcome {
    persistent(world, place, 8, 2000, |client| {
        client.until(LONG, "pinging", |c| c.so_far().contains("rdma-ping-3: "))
    })
}

/// Bounds a wait that nobody measures.
const LONG: Duration = Duration::from_secs(180);

/// One persistent server and so many clients of so many rounds; `next` returns when the next client may
/// start.
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

/// The connection is refused as an event, its queue pair goes to ERR, the posted receive is flushed, and that
/// wakes rping's completion thread: without the last step the program would hang.
fn refused(world: &World, place: Place<'_>) -> Outcome {
    let line = format!("rping -c -a {} -p {}", place.address, free_port());
    let out = world.over_uwarp(&line, place.client)?.run()?;
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
    client.until(LONG, "pinging", |c| c.so_far().contains("rdma-ping-3: "))?;
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
