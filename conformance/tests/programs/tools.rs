//! Programs under the tools of those who write them: valgrind, gdb, strace, and the compiler's sanitizers.
//! With the suppressions that are installed beside the library, a tool reports nothing about it.

use std::path::{Path, PathBuf};

use uwarp_conformance::dist::Dist;
use uwarp_conformance::pair::{self, Ends};
use uwarp_conformance::process::{Cmd, Output, Running};
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Place, free_port};
use uwarp_conformance::{Context, Outcome, check, require};

use super::Run::Custom;
use super::{Case, LONG, Scratch, World, check_rping};

/// In namespaces: hello.c has one port.
const VETH: &[Topology] = &[Veth1500V4];
const LO: &[Topology] = &[Loopback4];

const CLEAN: &str = "the message arrives; the tool reports nothing at either end";
const WHOLE: &str = "the same result as without the tool, at both ends";
const NO_ERROR: &str = "the same result as without the tool; no memory error at either end";
const STOPPED: &str = "stopped twice where it handles a completion, continued, detached; every round's \
                       bytes, before and after";
const ATTACHED: &str = "gdb attaches and detaches while it waits; every round's bytes at both ends";

const STOPPED_ONCE: &str =
    "stopped where it waits for a completion, continued; the same result as without gdb";

/// It stops once, and goes on.
const GDB: &str = "gdb -q -nx -batch -return-child-result";
const VALGRIND: &str = "valgrind --error-exitcode=9";
const STRACE: &str = "strace -f -qq -o";

/// What perftest 4.5 itself does: its server sends three words of its stack that it has not written. No frame
/// is the library's.
const PERFTESTS_OWN: &str = "{
   perftest sends its stack
   Memcheck:Param
   write(buf)
   fun:__libc_write
   fun:write
   obj:*/ib_write_bw
   ...
}
";

/// All rows.
pub fn cases() -> Vec<Case> {
    let row = |program, manner, checked, at, run: fn(&World, Place<'_>) -> Outcome| Case {
        program,
        manner,
        checked,
        at,
        run: Custom(run),
    };
    let hello = |manner, run| row("hello.c", manner, CLEAN, VETH, run);
    vec![
        hello("under valgrind, with leaks, valgrind.supp", hello_under_valgrind),
        hello("-fsanitize=address", |w, p| sanitized(w, "address", &[], p)),
        hello("-fsanitize=undefined", |w, p| sanitized(w, "undefined", &[], p)),
        hello("-fsanitize=thread, tsan.supp", thread_sanitizer),
        row("rping", "gdb at the client, with a breakpoint", STOPPED, LO, rping_under_gdb),
        row("rping", "gdb -p at the server", ATTACHED, LO, rping_and_gdb),
        row("rping", "both ends under strace -f", WHOLE, LO, |w, p| rping_under(w, STRACE, p)),
        row("rping", "both ends under valgrind", NO_ERROR, LO, |w, p| rping_under(w, VALGRIND, p)),
        row("ib_write_bw", "both ends under valgrind", NO_ERROR, LO, |w, p| write_bw(w, VALGRIND, p)),
        row("ib_write_bw", "both ends under strace -f", WHOLE, LO, |w, p| write_bw(w, STRACE, p)),
        row("ibv_ud_pingpong", "both ends under valgrind", NO_ERROR, LO, |w, p| pingpong(w, VALGRIND, p)),
        row("ibv_ud_pingpong", "both ends under strace -f", WHOLE, LO, |w, p| pingpong(w, STRACE, p)),
        row("ib_write_bw", "both ends under gdb, with a breakpoint", STOPPED_ONCE, LO, |w, p| {
            write_bw(w, GDB, p)
        }),
        row("ibv_ud_pingpong", "-e, both ends under gdb, with a breakpoint", STOPPED_ONCE, LO, |w, p| {
            pingpong(w, GDB, p)
        }),
        hello("both ends under gdb, with a breakpoint", |w, p| hello_behind(w, GDB, p)),
        hello("both ends under strace -f", |w, p| hello_behind(w, STRACE, p)),
    ]
}

/// A file that is installed for a tool.
fn shared(dist: &Dist, name: &str) -> Outcome<PathBuf> {
    let file = dist.lib().join("../../share/uwarp").join(name);
    file.canonicalize().context(file.display())
}

/// An end behind a tool. strace writes to a file in `dir`.
fn behind(tool: &str, end: Cmd, dir: &Path) -> Outcome<Cmd> {
    let mut front: Vec<_> = tool.split_whitespace().map(Into::into).collect();
    if tool == STRACE {
        front.push(dir.join(format!("calls-{}", free_port())).into());
    }
    if tool == GDB {
        // The others do not wait for events, or find their completion before.
        let waits = end.words().any(|word| word == "ibv_ud_pingpong");
        let at = if waits { "tbreak ibv_get_cq_event" } else { "tbreak ibv_dereg_mr" };
        let orders = ["tcatch load", "run", at, "continue", "bt 1", "continue"];
        front.extend(orders.iter().flat_map(|order| ["-ex", order]).map(Into::into));
        front.push("--args".into());
    }
    if tool == VALGRIND && end.words().any(|word| word == "ib_write_bw") {
        let file = dir.join("perftest.supp");
        std::fs::write(&file, PERFTESTS_OWN).context(file.display())?;
        front.push(format!("--suppressions={}", file.display()).into());
    }
    Ok(end.behind(front).limit(LONG))
}

/// Whether gdb has stopped this program once, and it has ended as it should.
fn was_stopped(out: &Output) -> Outcome {
    let stops = out.stdout.matches(" hit Temporary breakpoint 2").count();
    require!(stops == 1, "{stops} stops, wanted 1\n{}", out.text());
    check::has(out, "exited normally]")
}

/// The installed example with these options of the compiler, both ends behind these words.
fn hello(
    world: &World,
    options: &str,
    front: &[String],
    env: &[(&str, &str)],
    place: Place<'_>,
) -> Outcome<Ends> {
    const PORT: u16 = 7471;
    let (dist, dir) = (world.dist()?, Scratch::new("tools")?);
    let program = dir.path().join("hello");
    let source = dist.lib().join("../../share/doc/uwarp/examples/hello.c");
    let compiler = Cmd::line("cc -std=gnu11 -g -Wall -Wextra -Werror -o").arg(&program).arg(source);
    compiler.args(options).args("-lrdmacm -libverbs").limit(LONG).run_ok()?;
    let end = |role: &str, ns| {
        let end = Cmd::new(&program).arg(role).arg(place.address).in_ns(ns).envs(env).limit(LONG);
        end.env("LD_LIBRARY_PATH", dist.lib()).behind(front.iter().map(Into::into))
    };
    let ends = pair::run(&end("server", place.server), &end("client", place.client), PORT)?;
    check::has(&ends.server, "received: hello from C").or_else(|why| ends.failure(why))?;
    Ok(ends)
}

fn hello_behind(world: &World, tool: &str, place: Place<'_>) -> Outcome {
    let dir = Scratch::new("tools")?;
    let front = behind(tool, Cmd::new("hello"), dir.path())?.words().collect::<Vec<_>>();
    // Without the program itself.
    let ends = hello(world, "", &front[..front.len() - 1], &[], place)?;
    if tool == GDB { was_stopped(&ends.server).and(was_stopped(&ends.client)) } else { Ok(()) }
}

fn hello_under_valgrind(world: &World, place: Place<'_>) -> Outcome {
    let suppressions = shared(world.dist()?, "valgrind.supp")?;
    let mut front: Vec<String> = VALGRIND.split_whitespace().map(str::to_owned).collect();
    front.push("--leak-check=full".to_owned());
    front.push(format!("--suppressions={}", suppressions.display()));
    let ends = hello(world, "", &front, &[], place)?;
    let clean = |out: &Output| out.stderr.contains("ERROR SUMMARY: 0 errors");
    if !clean(&ends.server) || !clean(&ends.client) {
        return ends.failure("valgrind reports something");
    }
    Ok(())
}

/// The sanitizers change the exit status if they report anything, and print it.
fn sanitized(world: &World, sanitizers: &str, env: &[(&str, &str)], place: Place<'_>) -> Outcome {
    let options = format!("-fsanitize={sanitizers} -fno-sanitize-recover=all");
    let ends = hello(world, &options, &[], env, place)?;
    let quiet = ends.server.stderr.is_empty() && ends.client.stderr.is_empty();
    if quiet { Ok(()) } else { ends.failure("a sanitizer reports something") }
}

fn thread_sanitizer(world: &World, place: Place<'_>) -> Outcome {
    let options = format!("suppressions={}", shared(world.dist()?, "tsan.supp")?.display());
    sanitized(world, "thread", &[("TSAN_OPTIONS", &options)], place)
}

/// Attaches gdb to a program, does this, and detaches; what gdb printed.
fn gdb(program: &Running, orders: &[&str]) -> Outcome<String> {
    // The program is what `timeout` in front of it has started.
    let children = format!("/proc/{0}/task/{0}/children", program.pid().as_raw_nonzero());
    let pid = std::fs::read_to_string(&children).context(children)?;
    let gdb = Cmd::line("gdb -q -nx -batch -p").arg(pid.trim()).limit(LONG);
    let orders = orders.iter().chain(&["detach"]);
    let out = orders.fold(gdb, |gdb, order| gdb.arg("-ex").arg(order)).run_ok()?;
    require!(out.stdout.contains("detached]"), "not detached\n{}", out.text());
    Ok(out.stdout)
}

/// Its thread for completions calls `ibv_ack_cq_events` between an event and the poll for it.
fn rping_under_gdb(world: &World, place: Place<'_>) -> Outcome {
    const SIZE: usize = 64;
    let port = free_port();
    let server = format!("rping -s -v -a {} -p {port} -S {SIZE}", place.address);
    let server = pair::serve(&world.over_uwarp(&server, place.server)?.limit(LONG), port)?;
    let client = format!("rping -c -v -V -a {} -p {port} -S {SIZE}", place.address);
    let client = world.over_uwarp(&client, place.client)?.limit(LONG).spawn()?;
    let rounds = |client: &Running| client.so_far().matches("ping data: rdma-ping-").count();
    client.until(LONG, "pinging", |client| rounds(client) > 3)?;
    let said = gdb(&client, &["break ibv_ack_cq_events", "continue", "bt 1", "continue"])?;
    let stops = said.matches(" hit Breakpoint 1").count();
    require!(stops == 2, "{stops} stops, wanted 2\n{said}");
    let before = rounds(&client);
    client.until(LONG, "going on", |client| rounds(client) > before + 1000)?;
    let ends = Ends { client: client.stop(), server: server.wait()? };
    for (out, prefix) in [(&ends.client, "ping data: "), (&ends.server, "server ping data: ")] {
        let whole = out.stdout.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let mut lines = (0..).zip(whole.lines().filter_map(|line| line.strip_prefix(prefix)));
        if let Some((round, _)) = lines.find(|(round, line)| *line != check::rping_text(*round, SIZE)) {
            return ends.failure(format_args!("round {round}: the data is not what the client sent"));
        }
    }
    Ok(())
}

/// The server sleeps in `rdma_get_cm_event` and in the library's own thread.
fn rping_and_gdb(world: &World, place: Place<'_>) -> Outcome {
    let (count, size, port) = (10, 1000, free_port());
    let server = format!("rping -s -v -a {} -p {port} -S {size}", place.address);
    let client = format!("rping -c -v -V -a {} -p {port} -C {count} -S {size}", place.address);
    let server = pair::serve(&world.over_uwarp(&server, place.server)?.limit(LONG), port)?;
    gdb(&server, &["bt 1"])?;
    let client = world.over_uwarp(&client, place.client)?.run_ok()?;
    check_rping(&Ends { server: server.wait()?, client }, count, size)
}

fn rping_under(world: &World, tool: &str, place: Place<'_>) -> Outcome {
    let (count, size, port) = (10, 1000, free_port());
    let dir = Scratch::new("tools")?;
    let server = format!("rping -s -v -a {} -p {port} -S {size}", place.address);
    let client = format!("rping -c -v -V -a {} -p {port} -C {count} -S {size}", place.address);
    let server = behind(tool, world.over_uwarp(&server, place.server)?, dir.path())?;
    let client = behind(tool, world.over_uwarp(&client, place.client)?, dir.path())?;
    let ends = pair::run(&server, &client, port)?;
    if tool == STRACE {
        return check_rping(&ends, count, size);
    }
    // valgrind, too, writes to stderr. Its exit status has been looked at.
    for (out, prefix) in [(&ends.client, "ping data: "), (&ends.server, "server ping data: ")] {
        let pings = out.stdout.matches(&format!("{prefix}rdma-ping-")).count();
        if pings != count as usize {
            return ends.failure(format_args!("{pings} rounds"));
        }
    }
    Ok(())
}

fn write_bw(world: &World, tool: &str, place: Place<'_>) -> Outcome {
    const ROUNDS: u64 = 200;
    let (port, dir) = (free_port(), Scratch::new("tools")?);
    let line = format!("ib_write_bw -F -p {port} -n {ROUNDS} -s 4096");
    let server = behind(tool, world.over_uwarp(&line, place.server)?, dir.path())?;
    let client = world.over_uwarp(&format!("{line} {}", place.address), place.client)?;
    let ends = pair::run(&server, &behind(tool, client, dir.path())?, port)?;
    if tool == GDB {
        was_stopped(&ends.server).and(was_stopped(&ends.client))?;
    }
    let rows = check::perftest_rows(&ends.client.stdout);
    match rows.as_slice() {
        [_] => Ok(()),
        _ => ends.failure(format_args!("{} rows", rows.len())),
    }
}

fn pingpong(world: &World, tool: &str, place: Place<'_>) -> Outcome {
    let (port, dir) = (free_port(), Scratch::new("tools")?);
    let events = if tool == GDB { "-e " } else { "" };
    let line = format!("ibv_ud_pingpong {events}-g 0 -n 100 -p {port}");
    let server = behind(tool, world.over_uwarp(&line, place.server)?, dir.path())?;
    let client = world.over_uwarp(&format!("{line} {}", place.address), place.client)?;
    let ends = pair::run(&server, &behind(tool, client, dir.path())?, port)?;
    for out in [&ends.server, &ends.client] {
        check::has(out, "100 iters in ").or_else(|why| ends.failure(why))?;
        if tool == GDB {
            was_stopped(out)?;
        }
    }
    Ok(())
}
