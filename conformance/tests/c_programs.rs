//! The C programs of `c/`, compiled against rdma-core's headers and run over uwarp: a program's own mistakes
//! and what the man pages say they give (`errno_table`, `errno_cm`), events and their acknowledgement
//! (`completions`), registered memory that is unmapped (`unmapped`), limits that are reached (`limits`),
//! queue pairs that the program moves up itself (`by_number`), what the man pages say of events, threads and
//! processes (`cm_rules`), threads that leave a call (`leaving`) or are cancelled (`cancels`), children of a
//! fork (`forks`), receivers that leave with their last message (`ways_out`), the edges of the interface
//! (`corners`), datagram queue pairs (`datagrams`, `datagram_life`, `uwarpdv`), reliable ones (`reliable`,
//! `reliable_memory`), RDMA Write-Records (`records`), unreliable connections (`unreliable`), sockets over
//! queue pairs (`rsockets`), sockets in `IWARP_MODE` (`sockets`),
//! both in threads and processes (`socket_threads`), events whose cause is outside (`events`), a device for
//! each interface (`devices`), multicast (`groups`),
//! what programs look at and rely on (`traps`), what is called through the context (`extended`), connections
//! for a datagram queue pair's number (`stand_in`), the interface of 2006 (`old`), the device's files below
//! /sys and /dev (`files`), sequences of socket calls beside the kernel's (`same_calls`), TCP connections
//! that become iWARP's in place (`upgrade`, `upgraded`, `upgrade_processes`, `upgrade_liars`,
//! `upgrade_strangers`), data integrity
//! between two processes (`verify`, `random`), event loops whose completion channels do not block
//! (`own_loops`), what hangs other transports through shared memory (`hangs_others`), regions over mappings
//! of every kind (`regions`), what is in shared memory (`slabs`), programs that go before all others
//! (`priorities`), and connections that come and go in many threads without anything growing (`soak`). Each
//! prints one line a statement; one that begins with FAIL fails the case, and one that says what was left
//! out is shown.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use uwarp_conformance::check;
use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::{NetNs, Veth};
use uwarp_conformance::process::Cmd;
use uwarp_conformance::topology::Topology::{self, *};
use uwarp_conformance::topology::{Network, free_port};
use uwarp_conformance::{Context, Failure, Outcome, cc, pair, require};

/// Programs whose groups of statements are cases of their own: those of the table in their source, which is
/// where a group is registered.
const PROGRAMS: [&str; 34] = [
    "errno_table",
    "completions",
    "errno_cm",
    "cm_rules",
    "shared",
    "by_number",
    "first_words",
    "leaving",
    "cancels",
    "forks",
    "ways_out",
    "corners",
    "unmapped",
    "limits",
    "datagrams",
    "datagram_life",
    "uwarpdv",
    "reliable",
    "reliable_memory",
    "records",
    "unreliable",
    "events",
    "old",
    "stand_in",
    "marks",
    "local_work",
    "buffers",
    "extended",
    "atomics",
    "windows",
    "rsockets",
    "sockets",
    "socket_threads",
    "immediate",
];

/// Groups that are run by themselves, in a namespace, and programs all of whose groups are.
const IN_NAMESPACES: [(&str, &str); 4] =
    [("events", "interfaces"), ("events", "lids"), ("events", "fresh"), ("events", "indices")];
const OTHERS: [&str; 10] = [
    "traps",
    "same_calls",
    "devices",
    "groups",
    "own_loops",
    "hangs_others",
    "to_itself",
    "regions",
    "slabs",
    "priorities",
];

/// The groups of a program, as its table has them.
fn groups(program: &str) -> Vec<String> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("c").join(format!("{program}.c"));
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    let table = text.split_once("struct group groups[] = {").and_then(|(_, rest)| rest.split_once("};"));
    let names = table.map_or("", |(table, _)| table).split("{ \"").skip(1);
    names.filter_map(|row| Some(row.split('"').next()?.to_owned())).collect()
}

/// Groups whose statements depend on the view, which are run as iWARP, too.
const AS_IWARP: [(&str, &str); 9] = [
    ("errno_cm", "rejecting"),
    ("errno_cm", "refused"),
    ("cm_rules", "timewait"),
    ("cm_rules", "peer_number"),
    ("by_number", "orders"),
    ("by_number", "again"),
    ("atomics", "attributes"),
    ("datagrams", "modifying"),
    ("unreliable", "as_rnic"),
];

/// All groups of these once more: IPv6, the messages of iWARP, and an RNIC.
const SOCKETS: [(&str, &str, (&str, &str)); 5] = [
    ("rsockets", "::1", ("UWARP_PEER", "on")),
    ("rsockets", "127.0.0.1", ("UWARP_PEER", "off")),
    ("rsockets", "::1", ("UWARP_VIEW", "iwarp")),
    ("sockets", "::1", ("UWARP_CRC", "off")),
    ("sockets", "127.0.0.1", ("UWARP_PEER", "off")),
];

/// Sockets in `IWARP_MODE` once more, by libuwarp-verbs-sockets.so over the librdmacm of this library, and
/// the groups of what it cannot do: rules for a queue pair that is the provider's.
const VERBS_SOCKETS: (&str, &str) = ("VERBS_SOCKETS", "libuwarp-verbs-sockets.so");
const OVER_VERBS: [&str; 2] = ["sockets", "socket_threads"];
const NOT_OVER_VERBS: [&str; 1] = ["own_work"];

/// Groups of `files`, which is run under `uwarp run --files on`, and their environment.
const FILES: [(&str, &[(&str, &str)]); 8] = [
    ("reading", &[]),
    ("kinds", &[]),
    ("listing", &[]),
    ("names", &[]),
    ("counters", &[]),
    ("agreeing", &[]),
    ("agreeing", &[("UWARP_VIEW", "ib")]),
    ("children", &[]),
];

/// How `same_calls` is run: the option, and what the program must know of it.
const SAME_CALLS_AS: [(&str, Option<&str>, &[&str]); 6] = [
    ("of the kernel", None, &[]),
    ("passing through", Some("--sockets"), &[]),
    ("as rsockets", Some("--sockets=rsockets"), &["RULED"]),
    ("upgraded", Some("--sockets=upgrade"), &["RULED", "UPGRADED"]),
    ("upgraded where it connects only", Some("--sockets=upgrade:connect"), &[]),
    ("upgraded where it accepts only", Some("--sockets=upgrade:listen"), &[]),
];

/// Program and groups of connections upgraded in place: with a rule for both ends, and with one for one end,
/// the other of which is TCP or played by hand.
const UPGRADE: [(&str, &str, &str, &str, &[&str]); 37] = [
    ("upgrade", "integrity", "-", "upgrade", &["UPGRADED"]),
    ("upgrade", "integrity", "::1", "upgrade", &["UPGRADED"]),
    ("upgrade", "integrity", "-", "upgrade:connect", &[]),
    ("upgrade", "integrity", "-", "upgrade:listen", &[]),
    ("upgrade", "answers", "-", "upgrade", &["UPGRADED"]),
    ("upgrade_meanwhile", "ends_meanwhile", "-", "upgrade", &[]),
    ("upgrade_meanwhile", "names_meanwhile", "-", "upgrade", &[]),
    ("upgrade_meanwhile", "options_meanwhile", "-", "upgrade", &[]),
    ("upgrade_meanwhile", "flags_meanwhile", "-", "upgrade", &[]),
    ("upgrade_meanwhile", "copies_meanwhile", "-", "upgrade", &[]),
    ("upgrade_meanwhile", "waits_meanwhile", "-", "upgrade", &[]),
    ("upgraded", "waits", "-", "upgrade", &[]),
    ("upgraded", "entries", "-", "upgrade", &[]),
    ("upgraded", "handlers", "-", "upgrade", &[]),
    ("upgraded", "many", "-", "upgrade", &[]),
    ("upgraded", "exhausted", "-", "upgrade", &[]),
    ("upgraded", "what_no_stream_has", "-", "upgrade", &[]),
    ("upgrade_processes", "forked", "-", "upgrade", &["UPGRADED"]),
    ("upgrade_processes", "shared_by_two", "-", "upgrade", &[]),
    ("upgrade_processes", "handed_on", "-", "upgrade", &[]),
    ("upgrade_processes", "shared_with_a_child", "-", "upgrade", &[]),
    ("upgrade_processes", "forked_by_one_that_blocks", "-", "upgrade", &[]),
    ("upgrade_processes", "closed_while_a_child_asks", "-", "upgrade", &[]),
    ("upgrade_processes", "brief", "-", "upgrade", &[]),
    ("upgrade_processes", "brief", "-", "upgrade:listen", &[]),
    ("upgrade_processes", "without_exit", "-", "upgrade", &["UPGRADED"]),
    ("upgrade_processes", "without_exit", "-", "upgrade:listen", &[]),
    ("upgrade_processes", "children_without_exit", "-", "upgrade", &[]),
    ("upgrade_processes", "exit_beside_threads", "-", "upgrade", &[]),
    ("upgrade_liars", "liars_that_connect", "-", "upgrade:listen", &[]),
    ("upgrade_liars", "liars_that_accept", "-", "upgrade:connect", &[]),
    ("upgrade_strangers", "claims_of_another_user", "-", "upgrade", &[]),
    ("upgrade_strangers", "another_user_has_the_name", "-", "upgrade", &[]),
    ("upgrade_strangers", "another_user_carries_descriptors", "-", "upgrade", &[]),
    ("upgrade_strangers", "links_of_another_user", "-", "upgrade", &[]),
    ("upgrade_strangers", "users_without_a_number", "-", "upgrade", &[]),
    ("upgrade_strangers", "a_program_that_relays", "-", "upgrade", &[]),
];

/// Rows of `upgrade_hosts`: the rules of server and client, in which KEY and OTHER are files with keys, and
/// what becomes of the connection.
const UPGRADE_HOSTS: [(&str, &str, &str); 9] = [
    ("", "upgrade", "attack"),
    ("", "upgrade:key=KEY", "attack"),
    ("upgrade", "upgrade", "stay"),
    ("upgrade:key=KEY", "upgrade:key=KEY", "agree"),
    ("upgrade:no-other-users", "upgrade:no-other-users", "agree"),
    ("upgrade:key=OTHER", "upgrade:key=KEY", "stay"),
    ("upgrade:key=KEY", "upgrade:no-other-users", "stay"),
    ("upgrade:no-other-users", "upgrade:key=KEY", "stay"),
    ("upgrade:key=KEY", "upgrade", "stay"),
];

/// Programs that are run over each link, the link, and what `UWARP_LINK` says.
const OVER_LINKS: [(&str, &str, &str); 18] = [
    ("own_loops", "tcp", "tcp"),
    ("own_loops", "memory", "auto"),
    ("hangs_others", "tcp", "tcp"),
    ("hangs_others", "memory", "memory"),
    ("to_itself", "tcp", "tcp"),
    ("to_itself", "memory", "auto"),
    ("regions", "tcp", "tcp"),
    ("regions", "memory", "memory"),
    ("slabs", "memory", "memory"),
    ("priorities", "tcp", "tcp"),
    ("priorities", "memory", "memory"),
    // Over memory they are run by themselves.
    ("ways_out", "tcp", "tcp"),
    ("at_exit", "tcp", "tcp"),
    ("cancels", "tcp", "tcp"),
    ("cancels", "rd", "rd"),
    ("atomics", "tcp", "tcp"),
    ("local_work", "tcp", "tcp"),
    ("corners", "tcp", "tcp"),
];

/// How `verify` is run: address and environment.
const VERIFY: [(&str, &[(&str, &str)]); 4] = [
    ("127.0.0.1", &[]),
    ("::1", &[]),
    ("127.0.0.1", &[("UWARP_CRC", "off")]),
    // Small FPDUs, as toward strangers.
    ("127.0.0.1", &[("UWARP_PEER", "off")]),
];

/// Bounds a program that hangs; it ends by itself before that, and says where it hung.
const LIMIT: Duration = Duration::from_secs(400);

/// How long `soak` is run, in seconds; `make soak` does it for longer.
const SOAK: &str = "10";

/// Where `random` runs, each with and without CRC.
const RANDOM: [Topology; 5] = [Loopback4, Veth1500V4, Veth1500V6, Veth9000V4, Veth9000V6];

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // verify keeps both processors busy; the others are short.
    args.test_threads = Some(1);
    let programs =
        Arc::new(Programs { dist: Dist::find(), built: Mutex::default(), net: Network::default() });
    let mut trials = vec![Trial::test("every group is run", || Ok(every_group_is_run()?))];
    for (program, group) in AS_IWARP {
        let programs = programs.clone();
        trials.push(Trial::test(format!("{program} {group}, as iWARP"), move || {
            Ok(programs.run(program, "127.0.0.1", Some(group), &[("UWARP_VIEW", "iwarp")])?)
        }));
    }
    for program in PROGRAMS {
        for group in groups(program) {
            if IN_NAMESPACES.contains(&(program, &group)) {
                continue;
            }
            let programs = programs.clone();
            trials.push(Trial::test(format!("{program} {group}"), move || {
                Ok(programs.run(program, "127.0.0.1", Some(&group), &[])?)
            }));
        }
    }
    for (address, env) in VERIFY {
        let programs = programs.clone();
        let shown: String = env.iter().map(|(n, v)| format!(" {n}={v}")).collect();
        trials.push(Trial::test(format!("verify {address}{shown}"), move || {
            Ok(programs.run("verify", address, None, env)?)
        }));
    }
    for topology in RANDOM {
        for receiver in ["poll", "block", "sleep"] {
            for crc in ["on", "off"] {
                let programs = programs.clone();
                trials.push(Trial::test(
                    format!("random {receiver} UWARP_CRC={crc} [{topology}]"),
                    move || Ok(programs.random(topology, receiver, crc)?),
                ));
            }
        }
    }
    for (how, option, env) in SAME_CALLS_AS {
        let programs = programs.clone();
        trials.push(Trial::test(format!("same_calls {how}"), move || Ok(programs.same_calls(option, env)?)));
    }
    trials.extend(upgraded(&programs));
    for (server, client, becomes) in UPGRADE_HOSTS {
        let programs = programs.clone();
        let name = format!("upgrade_hosts {becomes}, \"{server}\" and \"{client}\", in namespaces");
        trials.push(Trial::test(name, move || Ok(programs.upgrade_hosts(server, client, becomes)?)));
    }
    for (group, env) in FILES {
        let programs = programs.clone();
        let shown: String = env.iter().map(|(n, v)| format!(" {n}={v}")).collect();
        trials.push(Trial::test(format!("files {group}{shown}"), move || Ok(programs.files(group, env)?)));
    }
    trials.extend(in_namespaces(&programs));
    trials.extend(over_links(&programs));
    let ending = programs.clone();
    trials.push(Trial::test("at_exit, with every line logged", move || Ok(ending.at_exit()?)));
    for (program, address, env) in SOCKETS {
        let sockets = programs.clone();
        trials.push(Trial::test(format!("{program} {address} {}={}", env.0, env.1), move || {
            Ok(sockets.run(program, address, None, &[env])?)
        }));
    }
    trials.extend(in_iwarp_mode(&programs));
    let soaked = programs.clone();
    trials.push(Trial::test("soak", move || Ok(soaked.run("soak", "127.0.0.1", Some(SOAK), &[])?)));
    let checked = programs.clone();
    trials
        .push(Trial::test("soak under memcheck", move || Ok(checked.memcheck("soak", &["127.0.0.1", "2"])?)));
    let conclusion = libtest_mimic::run(&args, trials);
    // The namespaces go with it, which `exit` would not drop.
    drop(programs);
    conclusion.exit_code()
}

/// Connections upgraded in place. Where a rule requires memory or reliable datagrams they stay TCP.
fn upgraded(programs: &Arc<Programs>) -> Vec<Trial> {
    let by = |rule| ("upgrade", "integrity", "-", "upgrade", rule);
    let rows = UPGRADE.into_iter().chain([by(&["UWARP_LINK=rd"][..]), by(&["UWARP_LINK=memory"])]);
    rows.map(|(program, group, address, rule, env)| {
        let programs = programs.clone();
        let set: String = env.iter().filter(|name| name.contains('=')).map(|set| format!(" {set}")).collect();
        let name = format!("upgrade {group} {address}, {rule}{set}");
        Trial::test(name, move || Ok(programs.upgrade(program, group, address, rule, env)?))
    })
    .collect()
}

/// The groups of programs that are run over each link.
fn over_links(programs: &Arc<Programs>) -> Vec<Trial> {
    let rows = OVER_LINKS.iter().flat_map(|row| groups(row.0).into_iter().map(move |group| (*row, group)));
    rows.map(|((program, link, set), group)| {
        let programs = programs.clone();
        Trial::test(format!("{program} {group} over {link}"), move || {
            let uwarp = programs.dist.as_ref().map_err(Failure::clone)?.uwarp()?;
            let uwarp = uwarp.to_string_lossy();
            let env = [("UWARP", &*uwarp), ("UWARP_LINK", set), ("LINK", link)];
            Ok(programs.run(program, "127.0.0.1", Some(&group), &env)?)
        })
    })
    .collect()
}

/// The example, and what the programs of sockets in `IWARP_MODE` say of the other library.
fn in_iwarp_mode(programs: &Arc<Programs>) -> Vec<Trial> {
    let mut trials = Vec::new();
    for libraries in ["-luwarp", "-luwarp-verbs-sockets -libverbs"] {
        let example = programs.clone();
        trials.push(Trial::test(format!("example iwarp_mode {libraries}"), move || {
            Ok(example.example("iwarp_mode", libraries)?)
        }));
    }
    for (program, group) in OVER_VERBS.iter().flat_map(|of| groups(of).into_iter().map(move |g| (*of, g))) {
        if NOT_OVER_VERBS.contains(&group.as_str()) {
            continue;
        }
        let programs = programs.clone();
        trials.push(Trial::test(format!("{program} {group}, over librdmacm"), move || {
            Ok(programs.run(program, "127.0.0.1", Some(&group), &[VERBS_SOCKETS])?)
        }));
    }
    trials
}

/// What changes interfaces, or needs several.
fn in_namespaces(programs: &Arc<Programs>) -> Vec<Trial> {
    let mut trials = Vec::new();
    // Where there are GIDs of both families, global and link-local.
    let everywhere = programs.clone();
    trials.push(Trial::test("datagrams families, in a namespace", move || Ok(everywhere.datagrams()?)));
    for group in ["bound", "broadcast", "leaving", "detaching"] {
        let members = programs.clone();
        trials.push(Trial::test(format!("groups {group}, in a namespace"), move || {
            Ok(members.with_two_interfaces("groups", group, "one")?)
        }));
    }
    for group in groups("traps") {
        let careful = programs.clone();
        trials.push(Trial::test(format!("traps {group}, in a namespace"), move || Ok(careful.trap(&group)?)));
    }
    let watched = programs.clone();
    trials.push(Trial::test("events interfaces, in a namespace", move || {
        Ok(watched.interfaces("interfaces", "roce", "PORT_ERR")?)
    }));
    let watched = programs.clone();
    trials.push(Trial::test("events fresh, in a namespace", move || {
        Ok(watched.interfaces("fresh", "roce", "carrier")?)
    }));
    let watched = programs.clone();
    trials.push(Trial::test("events lids, in a namespace", move || {
        Ok(watched.interfaces("lids", "ib", "LID_CHANGE")?)
    }));
    let watched = programs.clone();
    trials.push(Trial::test("events indices, in a namespace", move || {
        Ok(watched.interfaces("indices", "roce", "C14")?)
    }));
    for group in ["listed", "objects", "by_number", "datagrams", "manager", "events"] {
        let many = programs.clone();
        trials.push(Trial::test(format!("devices {group}, in a namespace"), move || {
            Ok(many.with_two_interfaces("devices", group, "per-interface")?)
        }));
    }
    trials
}

/// A program with a table of groups that nobody runs would be forgotten, and so would a group of those whose
/// groups are run in several ways.
fn every_group_is_run() -> Outcome {
    let upgrade = [
        "upgrade",
        "upgrade_meanwhile",
        "upgraded",
        "upgrade_processes",
        "upgrade_liars",
        "upgrade_strangers",
    ];
    for program in upgrade {
        let rows = UPGRADE.iter().filter(|(of, ..)| *of == program);
        let mut run: Vec<&str> = rows.map(|(_, group, ..)| *group).collect();
        run.dedup();
        let names = groups(program);
        require!(names == run, "{program} has the groups {names:?}, and these are run: {run:?}");
    }
    let known: Vec<&str> = PROGRAMS.into_iter().chain(OTHERS).chain(upgrade).collect();
    let none: Vec<_> = known.iter().filter(|program| groups(program).is_empty()).collect();
    require!(none.is_empty(), "no groups in {none:?}; has the form of their tables changed?");
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("c");
    for entry in std::fs::read_dir(&directory).context(directory.display())?.flatten() {
        let name =
            entry.path().file_stem().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        require!(
            groups(&name).is_empty() || known.contains(&name.as_str()),
            "nobody runs the groups of {name}"
        );
    }
    Ok(())
}

struct Programs {
    dist: Outcome<Dist>,
    /// What has been compiled, or why it does not compile.
    built: Mutex<Vec<(&'static str, Outcome<PathBuf>)>>,
    net: Network,
}

impl Programs {
    fn run(&self, name: &'static str, address: &str, group: Option<&str>, env: &[(&str, &str)]) -> Outcome {
        let program = self.program(name)?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let mut cmd = Cmd::new(program).arg(address).env("LD_LIBRARY_PATH", dist.lib());
        cmd = group.into_iter().fold(cmd, Cmd::arg);
        cmd = env.iter().fold(cmd, |cmd, (name, value)| cmd.env(name, value));
        let out = cmd.limit(LIMIT).run()?;
        for line in out.stdout.lines().filter(|line| line.starts_with("# left out")) {
            eprintln!("{name}: {line}");
        }
        check::statements(&out)?;
        // A queue that overflows loses completions by the thousand.
        let lost = out.stderr.lines().filter(|line| line.contains("completion") && line.contains("lost"));
        require!(lost.count() <= 1, "the log repeats that a completion is lost:\n{}", out.stderr);
        Ok(())
    }

    /// Calls at exit, with a log of them.
    fn at_exit(&self) -> Outcome {
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let cmd = Cmd::new(self.program("at_exit")?).env("LD_LIBRARY_PATH", dist.lib());
        let out = cmd.env("UWARP_LOG", "trace").limit(LIMIT).run()?;
        check::statements(&out)?;
        check::has(&out, "ok to the end")?;
        require!(!out.stderr.contains("panic"), "{}", out.stderr);
        let last = out.stderr.lines().last().unwrap_or_default();
        require!(last.contains("ibv_close_device"), "the last line of the log is: {last}");
        Ok(())
    }

    /// An installed example, compiled against the installed header and library; both ends of it.
    fn example(&self, name: &str, libraries: &str) -> Outcome {
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        cc::build_example(name, &program, dist, libraries)?;
        let lib = dist.lib();
        let port = free_port();
        let end = |args: String| Cmd::new(&program).args(&args).env("LD_LIBRARY_PATH", &lib).limit(LIMIT);
        let (server, client) = (end(format!("server {port}")), end(format!("client 127.0.0.1 {port}")));
        let ends = pair::run(&server, &client, port)?;
        check::has(&ends.server, "hello, and a message of 1048576 bytes")?;
        check::has(&ends.client, "hello, and a message of 1048576 bytes")
    }

    /// `files`, with the device's files in a directory that goes away.
    fn files(&self, group: &str, env: &[(&str, &str)]) -> Outcome {
        self.with_files("files", group, env, None)
    }

    /// A group of `traps`.
    fn trap(&self, group: &str) -> Outcome {
        let place = self.net.place(Veth1500V4)?;
        self.with_files("traps", group, &[], place.client)
    }

    fn with_files(
        &self,
        name: &'static str,
        group: &str,
        env: &[(&str, &str)],
        ns: Option<&NetNs>,
    ) -> Outcome {
        let program = self.program(name)?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let home =
            std::env::temp_dir().join(format!("uwarp-files-{}-{group}-{}", std::process::id(), env.len()));
        std::fs::create_dir_all(&home).context(home.display())?;
        let front =
            [dist.uwarp()?.into_os_string(), "run".into(), "--files".into(), "on".into(), "--".into()];
        let cmd = Cmd::new(program).arg("-").arg(group).behind(front).envs(env);
        let cmd = cmd.env("XDG_RUNTIME_DIR", &home).unset("LD_LIBRARY_PATH").in_ns(ns).limit(LIMIT);
        let result = cmd.run().and_then(|out| check::statements(&out));
        let _ = std::fs::remove_dir_all(&home);
        result
    }

    /// `same_calls`, behind `uwarp run` with this option.
    fn same_calls(&self, option: Option<&str>, env: &[&str]) -> Outcome {
        let program = self.program("same_calls")?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let mut cmd = Cmd::new(program);
        if let Some(option) = option {
            cmd = cmd.behind([dist.uwarp()?.into_os_string(), "run".into(), option.into(), "--".into()]);
        }
        for name in env {
            cmd = cmd.env(name, "1");
        }
        let out = cmd.unset("LD_LIBRARY_PATH").limit(LIMIT).run()?;
        check::statements(&out)?;
        check::has(&out, "ok the last words of a process")
    }

    /// A group of `upgrade`, behind `uwarp run` with this rule.
    fn upgrade(
        &self,
        program: &'static str,
        group: &str,
        address: &str,
        rule: &str,
        env: &[&str],
    ) -> Outcome {
        let program = self.program(program)?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let option = format!("--sockets={rule}");
        let front = [dist.uwarp()?.into_os_string(), "run".into(), option.into(), "--".into()];
        let mut cmd = Cmd::new(program).arg(address).arg(group).behind(front).unset("LD_LIBRARY_PATH");
        for name in env {
            let (name, value) = name.split_once('=').unwrap_or((name, "1"));
            cmd = cmd.env(name, value);
        }
        check::statements(&cmd.limit(LIMIT).run()?)
    }

    /// Two hosts whose ends have these rules.
    fn upgrade_hosts(&self, server: &str, client: &str, becomes: &str) -> Outcome {
        let program = self.program("upgrade_hosts")?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let place = self.net.place(Veth1500V4)?;
        let (port, address) = (free_port(), place.address);
        let keys = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let key = |name: &str, digits: &str| -> Outcome<String> {
            let file = keys.join(format!("upgrade-key-{name}"));
            std::fs::write(&file, digits).context(file.display())?;
            let only_own = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            std::fs::set_permissions(&file, only_own).context(file.display())?;
            Ok(file.display().to_string())
        };
        let (one, other) = (key("one", &"0f".repeat(16))?, key("other", &"1f".repeat(16))?);
        let end = |role, rule: &str, ns| -> Outcome<Cmd> {
            let rule = rule.replace("KEY", &one).replace("OTHER", &other);
            let mut cmd = Cmd::new(&program).args(&format!("{role} {address} {port} {becomes}")).in_ns(ns);
            if !rule.is_empty() {
                let option = format!("--sockets={rule}");
                cmd = cmd.behind([dist.uwarp()?.into_os_string(), "run".into(), option.into(), "--".into()]);
            }
            Ok(cmd.unset("LD_LIBRARY_PATH").limit(LIMIT))
        };
        let (server, client) = (end("serve", server, place.server)?, end("connect", client, place.client)?);
        let ends = pair::run_any(&server, &client, port)?;
        check::statements(&ends.client).and_then(|()| check::statements(&ends.server))
    }

    /// `datagrams` over every address of a namespace.
    fn datagrams(&self) -> Outcome {
        let program = self.program("datagrams")?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let place = self.net.place(Veth1500V6)?;
        place.client.map_or(Ok(()), |ns| ns.settled())?;
        let cmd = Cmd::new(program).args("- families").env("LD_LIBRARY_PATH", dist.lib()).in_ns(place.client);
        let out = cmd.limit(LIMIT).run()?;
        check::statements(&out)?;
        check::has(&out, "ok fe80:")?;
        check::has(&out, "ok ::ffff:")
    }

    /// A group of `events` whose interface goes down and up, or changes its addresses.
    fn interfaces(&self, group: &str, view: &str, seen: &str) -> Outcome {
        let program = self.program("events")?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        // Not the one that others use, and without events of addresses that become usable.
        let veth = Veth::new(1500)?;
        veth.client.settled()?;
        let cmd = Cmd::new(program).arg("-").arg(group).env("LD_LIBRARY_PATH", dist.lib());
        let out = cmd.env("UWARP_VIEW", view).in_ns(Some(&veth.client)).limit(LIMIT).run()?;
        check::statements(&out)?;
        check::has(&out, seen)
    }

    /// A group of a program that wants two interfaces.
    fn with_two_interfaces(&self, name: &'static str, group: &str, devices: &str) -> Outcome {
        let program = self.program(name)?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let veth = Veth::twice(1500)?;
        let cmd = Cmd::new(program).arg("-").arg(group).env("LD_LIBRARY_PATH", dist.lib());
        let cmd = cmd.env("UWARP_DEVICES", devices).in_ns(Some(&veth.client));
        check::statements(&cmd.limit(LIMIT).run()?)
    }

    /// Both ends of `random`, with a seed of this run: the output names it, and the program takes it as an
    /// argument.
    fn random(&self, topology: Topology, receiver: &str, crc: &str) -> Outcome {
        let program = self.program("random")?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let place = self.net.place(topology)?;
        let (port, address) = (free_port(), place.address);
        let end = |role, ns| {
            let cmd = Cmd::new(&program).args(&format!("{role} {address} {port} {receiver}")).in_ns(ns);
            cmd.env("LD_LIBRARY_PATH", dist.lib()).env("UWARP_CRC", crc).limit(LIMIT)
        };
        let ends = pair::run(&end("server", place.server), &end("client", place.client), port)?;
        check::statements(&ends.client).and_then(|()| check::statements(&ends.server))
    }

    /// Under valgrind, which sees a use of what was freed on either side of the C interface. It knows nothing
    /// of our locks, so of its tools only this one is of use.
    fn memcheck(&self, name: &'static str, args: &[&str]) -> Outcome {
        let program = self.program(name)?;
        let dist = self.dist.as_ref().map_err(Failure::clone)?;
        let cmd = Cmd::line("valgrind -q --error-exitcode=9 --fair-sched=yes --num-callers=20").arg(program);
        let cmd = args.iter().fold(cmd, Cmd::arg);
        let cmd = cmd.env("LD_LIBRARY_PATH", dist.lib()).env("SOAK_SLOW", "1");
        check::statements(&cmd.limit(2 * LIMIT).run()?)
    }

    fn program(&self, name: &'static str) -> Outcome<PathBuf> {
        let mut built = self.built.lock().unwrap_or_else(|e| e.into_inner());
        if let Some((_, program)) = built.iter().find(|(n, _)| *n == name) {
            return program.clone();
        }
        let program = cc::build(name, &Path::new(env!("CARGO_TARGET_TMPDIR")).join("c"));
        built.push((name, program.clone()));
        program
    }
}
