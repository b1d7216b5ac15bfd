//! This version and an older one, in both roles: they talk where that is safe. Where the old way could be
//! attacked they refuse, and this version says why.

use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use uwarp_conformance::check::{self, Expected};
use uwarp_conformance::dist::Dist;
use uwarp_conformance::pair::{self, Ends};
use uwarp_conformance::process::{Cmd, Output};
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Failure, Outcome, require};

use super::Run::Long;
use super::sockets::{NOT_WITH_OLD, Setting};
use super::{Case, LONG, PERFTEST_LIMIT, World, check_rping, sockets_files};

/// Version 0.1.0. (A clone may be without tags.)
const OLD: &str = "5d0d368f4bc06e9ca9bc00e0cff6581a4cf64100";
const OLD_NAME: &str = "uwarp 0.1";

const LO: &[Topology] = &[Loopback4];

const TALK: &str = "with 0.1 as server and as client: they talk";
const TALKED: &str = "the same result as two ends of one version, and no warning";
const COPIED: &str = "the copy is the file; 0.1 proves nothing";
const NO_UPGRADE: &str = "with 0.1 as server and as client, upgrade at both: TCP";
const OLD_LISTENS: &str = "with 0.1, whose queue pair has the smaller number: refused";
const OLD_CONNECTS: &str = "with 0.1, whose queue pair has the larger number: refused";
const REFUSED: &str =
    "one line of the log names both versions and the remedy; the end that posts gets RETRY_EXC_ERR and ends";

/// All rows.
pub fn cases() -> Vec<Case> {
    type Row = fn(&World, Place<'_>) -> Outcome;
    let row = |program, manner, checked, run: Row| Case { program, manner, checked, at: LO, run: Long(run) };
    let talk = |program, run: Row| row(program, TALK, TALKED, run);
    vec![
        talk("rping", |w, p| in_both_roles(w, |trees| rping(trees, p))),
        talk("ib_send_lat", |w, p| in_both_roles(w, |trees| perftest(trees, "ib_send_lat", 64, p))),
        talk("ib_write_bw", |w, p| in_both_roles(w, |trees| perftest(trees, "ib_write_bw", 65536, p))),
        talk("ibv_ud_pingpong", |w, p| in_both_roles(w, |trees| ud_pingpong(trees, p))),
        talk("udaddy", |w, p| in_both_roles(w, |trees| udaddy(trees, p))),
        talk("rstream", |w, p| in_both_roles(w, |trees| rstream(trees, p))),
        row("wget, http.server", NO_UPGRADE, COPIED, |w, p| {
            in_both_roles(w, |trees| sockets_files::wget(&Setting::between(w, trees, NOT_WITH_OLD, p)?))
        }),
        row("ibv_rc_pingpong", OLD_LISTENS, REFUSED, |w, p| refused(w, "ibv_rc_pingpong -g 0", true, p)),
        row("ibv_rc_pingpong", OLD_CONNECTS, REFUSED, |w, p| refused(w, "ibv_rc_pingpong -g 0", false, p)),
        row("ib_send_lat", OLD_LISTENS, REFUSED, |w, p| refused(w, "ib_send_lat -F -n 100", true, p)),
        row("ib_send_lat", OLD_CONNECTS, REFUSED, |w, p| refused(w, "ib_send_lat -F -n 100", false, p)),
    ]
}

/// The trees of the server and of the client.
type Trees<'a> = [&'a Dist; 2];

/// With the older version as the server, then as the client.
fn in_both_roles(world: &World, run: impl Fn(Trees<'_>) -> Outcome) -> Outcome {
    let (old, new) = (old()?, world.dist()?);
    for (trees, whose) in [([old, new], "server"), ([new, old], "client")] {
        run(trees).map_err(|why| Failure(format!("{OLD_NAME} is the {whose}: {why}")))?;
    }
    Ok(())
}

/// The older version, built by the first row that needs it.
fn old() -> Outcome<&'static Dist> {
    static DIST: OnceLock<Outcome<Dist>> = OnceLock::new();
    let build = || {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/old-peer");
        // Some minutes, the first time.
        let out = Cmd::new(script).arg(OLD).limit(Duration::from_secs(3600)).run_ok()?;
        Dist::at(Path::new(out.stdout.trim()))
    };
    DIST.get_or_init(build).as_ref().map_err(Failure::clone)
}

/// Both ends of a program over these trees.
fn ends([server, client]: Trees<'_>, server_line: &str, client_line: &str) -> [Cmd; 2] {
    let over = |dist: &Dist, line: &str| Cmd::line(line).env("LD_LIBRARY_PATH", dist.lib());
    [over(server, server_line), over(client, client_line)].map(|end| end.limit(PERFTEST_LIMIT))
}

fn rping(trees: Trees<'_>, place: Place<'_>) -> Outcome {
    let (count, size, port) = (50, 4096, free_port());
    let server = format!("rping -s -v -a {} -p {port} -S {size}", place.address);
    let client = format!("rping -c -v -V -a {} -p {port} -C {count} -S {size}", place.address);
    let [server, client] = ends(trees, &server, &client);
    check_rping(&pair::run(&server, &client, port)?, count, size)
}

fn perftest(trees: Trees<'_>, tool: &str, size: u64, place: Place<'_>) -> Outcome {
    const ROUNDS: u64 = 1000;
    let port = free_port();
    let line = format!("{tool} -F -R -p {port} -n {ROUNDS} -s {size}");
    let [server, client] = ends(trees, &line, &format!("{line} {}", place.address));
    let ends = pair::run(&server, &client, port)?;
    check::no_complaints(&ends.server)?;
    no_warnings(&ends)?;
    check::perftest(&ends.client, &Expected::one(size, ROUNDS)).or_else(|why| ends.failure(why))
}

fn ud_pingpong(trees: Trees<'_>, place: Place<'_>) -> Outcome {
    let port = free_port();
    let line = format!("ibv_ud_pingpong -g 0 -p {port}");
    let [server, client] = ends(trees, &line, &format!("{line} {}", place.address));
    let ends = pair::run(&server, &client, port)?;
    no_warnings(&ends)?;
    for out in [&ends.server, &ends.client] {
        check::no_complaints(out)?;
        if !out.stdout.contains("1000 iters in ") {
            return ends.failure("not every message came");
        }
    }
    Ok(())
}

fn udaddy(trees: Trees<'_>, place: Place<'_>) -> Outcome {
    // It knows no other.
    const PORT: u16 = 7174;
    let line = "-c 20 -C 5 -S 1000";
    let server = format!("udaddy -b {} {line}", place.address);
    let [server, client] = ends(trees, &server, &format!("udaddy -s {} {line}", place.address));
    let ends = pair::run_datagrams(&server, &client, PORT)?;
    for out in [&ends.server, &ends.client] {
        let whole = out.stdout.contains("data transfers complete") && out.stdout.contains("return status 0");
        if !whole || !out.stderr.is_empty() {
            return ends.failure("not whole, or a complaint");
        }
    }
    Ok(())
}

fn rstream(trees: Trees<'_>, place: Place<'_>) -> Outcome {
    let port = free_port();
    let line = format!("-p {port} -T b -T v -I 50 -C 10 -S 20000");
    let server = format!("rstream -b {} {line}", place.address);
    let [server, client] = ends(trees, &server, &format!("rstream -s {} {line}", place.address));
    let ends = pair::run(&server, &client, port)?;
    for out in [&ends.server, &ends.client] {
        let rows = out.stdout.lines().filter(|line| line.contains('.')).count();
        if rows == 0 || !out.stderr.is_empty() {
            return ends.failure("rows are missing, or a complaint");
        }
    }
    Ok(())
}

/// Of queue pairs with one address, that with the smaller number listens. Each role of the program is tried
/// with each role of the queue pair: the end that posts is the client.
fn refused(world: &World, line: &str, old_listens: bool, place: Place<'_>) -> Outcome {
    for old_serves in [true, false] {
        let why = |why: Failure| {
            let role = if old_serves { "server" } else { "client" };
            Failure(format!("{OLD_NAME} is the {role}: {}", why.0))
        };
        one_refused(world, line, old_listens, old_serves, place).map_err(why)?;
    }
    Ok(())
}

fn one_refused(world: &World, line: &str, old_listens: bool, old_serves: bool, place: Place<'_>) -> Outcome {
    let (old, new) = (old()?, world.dist()?);
    let port = free_port();
    let mut ports = [free_port(), free_port()];
    ports.sort_unstable();
    if old_listens != old_serves {
        ports.reverse();
    }
    let line = format!("{line} -p {port}");
    let trees = if old_serves { [old, new] } else { [new, old] };
    let ends = ends(trees, &line, &format!("{line} {}", place.address));
    let mut in_range = ends.into_iter().zip(ports).map(|(end, port)| {
        // The end that posts must end by itself, long before this.
        end.env("UWARP_PORT_RANGE", format!("{port}-{port}")).limit(LONG)
    });
    let (Some(server), Some(client)) = (in_range.next(), in_range.next()) else { return Ok(()) };
    let server = pair::serve(&server, port)?;
    let client = client.spawn()?;
    // A server that only receives waits for ever, as over an adapter. This version speaks before it is ended.
    let new = if old_serves { &client } else { &server };
    new.until(LONG, "saying which versions meet", |end| end.so_far().contains(OLD_NAME))?;
    let client = client.wait()?;
    let server = server.wait_at_most(Duration::from_secs(3));
    let ends = Ends { server, client };
    judge_refusal(&ends, old_serves).or_else(|why| ends.failure(why))
}

fn judge_refusal(ends: &Ends, old_serves: bool) -> Outcome {
    let client = &ends.client;
    let by_itself = client.status.is_some_and(|status| status.code().is_some_and(|code| code != 0));
    // In words, or as the number of the status.
    let text = client.text();
    let error = text.contains("transport retry counter exceeded") || text.contains("Failed status 12");
    require!(by_itself && error, "the client did not end by itself with RETRY_EXC_ERR");
    let new = if old_serves { client } else { &ends.server };
    let warnings = warnings(new);
    let [warning] = warnings.as_slice() else { uwarp_conformance::fail!("{} warnings", warnings.len()) };
    let own = env!("CARGO_PKG_VERSION");
    for words in [OLD_NAME, &format!("this end is uwarp {own}"), &format!(": install uwarp {own} there")] {
        require!(warning.to_lowercase().contains(&words.to_lowercase()), "no \"{words}\" in the warning");
    }
    Ok(())
}

fn no_warnings(ends: &Ends) -> Outcome {
    let all = [&ends.server, &ends.client].map(warnings);
    if all.iter().all(Vec::is_empty) { Ok(()) } else { ends.failure("a warning") }
}

/// Those in the log. 0.1 writes them with their level.
fn warnings(out: &Output) -> Vec<&str> {
    let is_warning = |line: &&str| line.starts_with("uwarp: ") || line.contains(" WARN ");
    out.stderr.lines().filter(is_warning).collect()
}
