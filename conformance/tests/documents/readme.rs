//! The README keeps its size, and what it shows is so: each command is run as it stands there, and prints
//! what stands below it. `make` and `make demo` are run by `scripts/fresh-debian`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use uwarp_conformance::dist::Dist;
use uwarp_conformance::netns::{NetNs, Veth};
use uwarp_conformance::pair;
use uwarp_conformance::process::{Cmd, Output};
use uwarp_conformance::{Context, Failure, Outcome, cc, check, fail, require};

use super::root;

/// A stranger reads it in a few minutes, in a terminal or on a telephone.
const LINES: usize = 120;
const COLUMNS: usize = 100;
const WORDS: usize = 1100;

/// The other machine's address in the README.
const SERVER: &str = "192.0.2.1";

fn text() -> String {
    fs::read_to_string(root().join("README.md")).expect("README.md")
}

#[test]
fn the_readme_keeps_its_size() {
    let text = text();
    let long: Vec<_> = text.lines().filter(|line| line.chars().count() > COLUMNS).collect();
    assert!(long.is_empty(), "lines that go beyond column {COLUMNS}: {long:#?}");
    let (lines, words) = (text.lines().count(), text.split_whitespace().count());
    assert!(lines <= LINES && words <= WORDS, "{lines} lines, {words} words");
}

/// A command of a `console` block, without its comment, and the lines below it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Shown {
    pub command: String,
    pub output: Vec<String>,
}

/// What stands in blocks of this language, and where.
pub(super) fn blocks<'a>(text: &'a str, language: &str) -> Vec<&'a str> {
    let start = format!("```{language}\n");
    text.split(&start).skip(1).filter_map(|rest| rest.split("```").next()).collect()
}

fn without_comment(line: &str) -> &str {
    line.split(" # ").next().unwrap_or(line).trim()
}

pub(super) fn commands(text: &str) -> Vec<Shown> {
    let mut all: Vec<Shown> = Vec::new();
    for line in blocks(text, "console").into_iter().flat_map(str::lines) {
        match line.strip_prefix("$ ") {
            Some(command) => {
                all.push(Shown { command: without_comment(command).to_owned(), output: Vec::new() });
            }
            None => all.last_mut().expect("a command").output.push(line.to_owned()),
        }
    }
    all
}

/// Where the commands are run: a directory with `dist` in it, which `make` leaves behind, in which `make`'s
/// `export PATH` has been said.
pub(super) struct Place {
    pub home: PathBuf,
    dist: Dist,
    veth: Veth,
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.home);
    }
}

impl Place {
    pub fn new(name: &str) -> Outcome<Place> {
        let home = std::env::temp_dir().join(format!("uwarp-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&home);
        fs::create_dir_all(&home).context(home.display())?;
        let dist = Dist::find()?;
        let place = Place { home, dist, veth: Veth::new(1500)? };
        symlink(place.dist.lib().join("../.."), place.home.join("dist")).context("a link")?;
        Ok(place)
    }

    /// A line of the README, for a shell.
    fn line(&self, line: &str, ns: &NetNs) -> Cmd {
        // Debian's python3 has Debian's modules.
        let path = format!("{}/dist/bin:/usr/bin:/bin:/usr/sbin:/sbin", self.home.display());
        let line = line.replace(SERVER, Veth::SERVER4);
        let settings = std::env::vars_os().map(|(name, _)| name);
        let settings = settings.filter(|name| name.as_encoded_bytes().starts_with(b"UWARP_"));
        let cmd = Cmd::line("sh -c").arg(format!("cd {} && exec {line}", self.home.display()));
        let cmd = settings.fold(cmd, Cmd::unset).unset("LD_LIBRARY_PATH").env("PATH", path);
        // mpirun does not run as root without these.
        let allowed = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"].map(|name| (name, "1"));
        cmd.envs(&allowed).env("OMPI_MCA_rmaps_base_oversubscribe", "1").in_ns(Some(ns))
    }

    pub fn client(&self, line: &str) -> Cmd {
        self.line(line, &self.veth.client)
    }

    /// Both ends in one namespace, which talk over its loopback.
    pub fn on_one_host(&self, server: &Shown, client: &Shown, port: u16) -> Outcome {
        let ns = &self.veth.server;
        let ends = pair::run(&self.line(&server.command, ns), &self.line(&client.command, ns), port)?;
        prints(&ends.server, &server.output)?;
        prints(&ends.client, &client.output)
    }

    fn between_two(&self, server: &Shown, client: &Shown, port: u16) -> Outcome<pair::Ends> {
        let server = self.line(&server.command, &self.veth.server);
        pair::run(&server, &self.client(&client.command), port)
    }

    /// What a firewall may let through of what begins at the other machine: these ports, and no others.
    fn firewall(&self, tcp: &str, udp: &str) -> Outcome {
        for ns in [&self.veth.server, &self.veth.client] {
            for rule in [
                "add table inet fire".to_owned(),
                "add chain inet fire in { type filter hook input priority 0 ; }".to_owned(),
                format!(
                    "add rule inet fire in iif != lo tcp flags & ( syn | ack ) == syn \
                     tcp dport != {{ {tcp} }} drop"
                ),
                format!("add rule inet fire in iif != lo udp dport != {{ {udp} }} drop"),
            ] {
                Cmd::line("nft").args(&rule).in_ns(Some(ns)).run_ok()?;
            }
        }
        Ok(())
    }

    fn no_firewall(&self) -> Outcome {
        for ns in [&self.veth.server, &self.veth.client] {
            Cmd::line("nft delete table inet fire").in_ns(Some(ns)).run_ok()?;
        }
        Ok(())
    }
}

/// What rping says or not, as its thread for events comes before or after its end.
const NOT_SURE: [&str; 2] =
    [" DISCONNECT EVENT...", "unhandled event: RDMA_CM_EVENT_TIMEWAIT_EXIT, ignoring"];

/// These lines and no others, on both streams together; which of two streams is first cannot be seen.
fn prints(out: &Output, lines: &[String]) -> Outcome {
    let is_sure = |line: &&str| !NOT_SURE.iter().any(|end| line.ends_with(end));
    let mut seen: Vec<&str> = out.stdout.lines().chain(out.stderr.lines()).filter(is_sure).collect();
    let mut wanted: Vec<&str> = lines.iter().map(String::as_str).filter(is_sure).collect();
    seen.sort_unstable();
    wanted.sort_unstable();
    require!(seen == wanted, "the README shows other output: {wanted:#?}\n{}", out.text());
    Ok(())
}

#[test]
fn the_commands_of_the_readme_do_what_it_says() {
    if let Err(Failure(why)) = run_commands() {
        panic!("{why}");
    }
}

fn run_commands() -> Outcome {
    let (text, place) = (text(), Place::new("readme")?);
    let all = commands(&text);
    let mut left = all.iter();
    while let Some(shown) = left.next() {
        let mut other = || left.next().ok_or_else(|| Failure("no command of the other end".to_owned()));
        let command = shown.command.as_str();
        match command {
            _ if command.starts_with("uwarp run -- rping -s ") => {
                place.on_one_host(shown, other()?, 7174)?;
            }
            _ if command.starts_with("uwarp run --port-range ") => {
                // As the README says, and no more.
                let range = command.split(' ').nth(3).unwrap_or_default();
                require!(text.contains("TCP 18515, and TCP and UDP 20000 to 20099"), "other ports");
                require!(range == "20000-20099", "another range: {range}");
                place.firewall(&format!("18515, {range}"), range)?;
                let ends = place.between_two(shown, other()?, 18515)?;
                check::has(&ends.client, "1000 iters in ")?;
                place.no_firewall()?;
            }
            _ if command.starts_with("sudo apt-get install ") => are_installed(command)?,
            _ if command.starts_with("cc ") => {
                prints(&place.client(command).run_ok()?, &shown.output)?;
            }
            _ if command.starts_with("uwarp run -- ./hello server ") => {
                let client = other()?;
                place.on_one_host(shown, client, 7471)?;
                // "and talk to each other": the other way round, too.
                let reversed = [(client, "client", "server"), (shown, "server", "client")]
                    .map(|(shown, from, to)| shown.command.replace(from, to));
                let [server, client] = reversed.map(|command| Shown { command, output: Vec::new() });
                let output = |word: &str| vec![format!("{word}: hello from C")];
                let server = Shown { output: output("received"), ..server };
                place.on_one_host(&server, &Shown { output: output("sent"), ..client }, 7471)?;
            }
            _ if command.starts_with("uwarp mpi -- ") => mpi(&place, command)?,
            _ if command.starts_with("uwarp run --sockets=") => sockets(&place, command)?,
            _ => fail!("the README shows a command that this test does not know: {command}"),
        }
    }
    require!(all.len() == 10, "{} commands in the README; has its form changed?", all.len());
    first_aid(&place, &text)
}

/// The packages in this command are those that the tests are run with.
pub(super) fn are_installed(command: &str) -> Outcome {
    for package in command.split(' ').skip(4) {
        Cmd::line("dpkg-query -W").arg(package).run_ok()?;
    }
    Ok(())
}

fn mpi(place: &Place, command: &str) -> Outcome {
    let program = cc::build_by("mpicc.openmpi", "mpi/exchange", &place.home, "")?;
    fs::rename(program, place.home.join("my-program")).context("my-program")?;
    let out = place.client(command).run_ok()?;
    check::has(&out, "every byte as it was sent")
}

/// A server under the same rule, and a file that is long enough to be fetched by iWARP.
fn sockets(place: &Place, command: &str) -> Outcome {
    const LENGTH: u64 = 64 << 20;
    // The same key at both ends, in a directory of the test.
    let key = place.home.join("uwarp.key");
    fs::write(&key, "0123456789abcdef0123456789abcdef\n").context(key.display())?;
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).context(key.display())?;
    require!(command.contains("key=/etc/uwarp.key"), "another key: {command}");
    let command = &command.replace("/etc/uwarp.key", &key.display().to_string());
    let front = command.split(" -- ").next().unwrap_or_default();
    let name = command.rsplit('/').next().unwrap_or_default();
    let served = place.home.join("served");
    fs::create_dir(&served).context(served.display())?;
    fs::File::create(served.join(name)).and_then(|file| file.set_len(LENGTH)).context(name)?;
    let server = format!("{front} -- python3 -m http.server -d served 80");
    let server = pair::serve(&place.line(&server, &place.veth.server), 80)?;
    let out = place.client(command).run();
    server.stop();
    let out = out?;
    let fetched = fs::metadata(place.home.join(name)).map_or(0, |file| file.len());
    require!(out.ok() && fetched == LENGTH, "{fetched} bytes were fetched\n{}", out.text());
    Ok(())
}

/// The symptoms are those that a user sees, and the remedies help.
fn first_aid(place: &Place, text: &str) -> Outcome {
    let row = |symptom: &str, remedy: &str| -> Outcome {
        let mut rows = text.lines().filter(|line| line.starts_with("| ") && line.contains(symptom));
        let good = rows.next().is_some_and(|row| row.contains(remedy));
        require!(good, "no row of first aid for {symptom} that says {remedy}");
        Ok(())
    };
    let no_index = "Failed to modify QP to RTR";
    // At the server's end, and at the client's.
    let given_up = "Couldn't read/write remote";
    row(no_index, "`-g 0` at both ends")?;
    row(given_up, "`-g 0` at both ends")?;
    let host = &place.veth.server;
    let server = place.line("uwarp run -- ibv_rc_pingpong", host);
    let ends =
        pair::run_any(&server, &place.client(&format!("uwarp run -- ibv_rc_pingpong {SERVER}")), 18515)?;
    for (out, symptom) in [(&ends.server, no_index), (&ends.client, given_up)] {
        require!(out.text().contains(symptom), "not said: {symptom}\n{}", out.text());
    }

    let (refused, of_pingpong) = ("RDMA_CM_EVENT_REJECTED, error 8", "Couldn't connect");
    row(refused, "start the server")?;
    row(of_pingpong, "start the server")?;
    let out = place.client(&format!("uwarp run -- ibv_rc_pingpong -g 0 {SERVER}")).run()?;
    require!(out.text().contains(of_pingpong), "another word\n{}", out.text());
    let out = place.client(&format!("uwarp run -- rping -c -a {SERVER} -C 1")).run()?;
    require!(out.text().contains(refused), "another event\n{}", out.text());

    row("no RDMA device", "`uwarp doctor -- PROGRAM`")?;
    let out = place.client("uwarp doctor -- rping").run_ok()?;
    check::has(&out, "dynamically linked")?;
    row("UCX or NCCL finds no device", "`uwarp run --files auto -- PROGRAM`")?;
    let (without, with) = ("uwarp run -- ucx_info -d", "uwarp run --files auto -- ucx_info -d");
    for (line, shown) in [(without, false), (with, true)] {
        let out = place.client(line).run_ok()?;
        require!(out.stdout.contains("rc_verbs") == shown, "the device, seen: {shown}\n{}", out.text());
    }
    Ok(())
}

/// Lines of `sh` blocks that a fresh machine is tried with, and those that only a shell needs.
#[test]
fn a_fresh_debian_runs_the_first_commands_of_the_readme() {
    let script = fs::read_to_string(root().join("scripts/fresh-debian")).expect("the script");
    let text = text();
    let lines = blocks(&text, "sh").into_iter().flat_map(str::lines).map(without_comment);
    let run: Vec<_> = lines.filter(|line| !line.starts_with("export PATH=$PWD/dist/bin:$PATH")).collect();
    let tried: Vec<_> =
        script.lines().filter_map(|line| line.strip_prefix("run \"")?.strip_suffix('"')).collect();
    assert_eq!(run, tried, "the README's first commands, and those of scripts/fresh-debian");
    assert!(!run.is_empty());
}

#[test]
fn a_toolchain_that_is_too_old_is_named_with_what_to_do() {
    let dir = std::env::temp_dir().join(format!("uwarp-old-rust-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory");
    for name in ["cargo", "rustc"] {
        fs::write(dir.join(name), format!("#!/bin/sh\necho {name} 1.70.0\n")).expect("a program");
        fs::set_permissions(dir.join(name), fs::Permissions::from_mode(0o755)).expect("rights");
    }
    let path = format!("{}:/usr/bin:/bin", dir.display());
    let out = Cmd::new(root().join("scripts/setup")).arg("build").env("PATH", path).run();
    let _ = fs::remove_dir_all(&dir);
    let out = out.unwrap_or_else(|Failure(why)| panic!("{why}"));
    let said = ["Rust 1.70.0 is too old; uwarp needs ", " or newer: run rustup update stable"];
    assert!(!out.ok() && said.iter().all(|words| out.stderr.contains(words)), "{}", out.text());
}

/// Each figure is on the page it is from, and its command measures it.
#[test]
fn the_figures_of_the_readme_are_those_of_performance_md() {
    /// As the page names them, over memory and over TCP.
    const OTHER_NAMES: [(&str, &[&str]); 4] = [
        ("half a round trip of 64 B Sends, by events", &["64 B Send, both block in ibv_get_cq_event"]),
        ("1 MiB Writes", &["1 MiB Writes", "1 MiB Writes, CRC on"]),
        ("64 B Writes in lists of 64, million/s", &["64 B Writes in lists of 64, target polls"]),
        ("half a round trip of 8 B by Open MPI", &["ping-pong-8"]),
    ];
    let page = fs::read_to_string(root().join("docs/performance.md")).expect("docs/performance.md");
    let text = text();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| line.starts_with("| ") && line.contains("`uwarp bench "))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    assert_eq!(rows.len(), 4, "figures in the README");
    let shown = text.lines().filter(|line| line.contains("`uwarp bench "));
    let missing: Vec<_> = shown.filter(|line| !page.lines().any(|other| other == *line)).collect();
    assert!(missing.is_empty(), "docs/performance.md does not begin with these: {missing:#?}");
    for row in rows {
        let [title, raw, memory, tcp, command] = row[..] else { panic!("{row:?}") };
        let itself = [title];
        let other = OTHER_NAMES.iter().find(|(name, _)| *name == title);
        let names = other.map_or(&itself[..], |(_, names)| names);
        // From the heading of the loopback's section to the next one.
        let command = command.trim_matches('`');
        let (_, rest) = page.split_once(&format!("`{command} ")).unwrap_or_else(|| panic!("no {command}"));
        let (section, _) = rest.split_once("\n## ").unwrap_or((rest, ""));
        let of_row = |line: &&str| names.iter().any(|name| line.starts_with(&format!("| {name} |")));
        let lines: Vec<_> = section.lines().filter(of_row).collect();
        let number = |cell: &str| cell.split(' ').next().unwrap_or_default().to_owned();
        let cells: Vec<_> =
            lines.iter().flat_map(|line| line.split('|')).map(|cell| number(cell.trim())).collect();
        for shown in [raw, memory, tcp] {
            assert!(
                cells.contains(&number(shown)),
                "{title}: docs/performance.md has not {shown}; write the README's anew, from these:\n{}",
                lines.join("\n")
            );
        }
    }
}

#[test]
fn every_page_of_docs_stands_in_their_index() {
    let index = fs::read_to_string(root().join("docs/README.md")).expect("docs/README.md");
    let is_page = |file: &Path| file.extension().is_some_and(|extension| extension == "md");
    let entries =
        fs::read_dir(root().join("docs")).expect("docs").map(|entry| entry.expect("an entry").path());
    let names =
        entries.filter(|file| is_page(file)).filter_map(|file| Some(file.file_name()?.to_str()?.to_owned()));
    let missing: Vec<_> =
        names.filter(|name| name != "README.md" && !index.contains(&format!("]({name})"))).collect();
    assert!(missing.is_empty(), "not in docs/README.md: {missing:?}");
}
