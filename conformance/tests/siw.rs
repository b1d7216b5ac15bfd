//! uwarp against the kernel's software iWARP, in the virtual machine of `siw/`: every program in both roles
//! under each negotiation we and siw can be made to use.
//!
//! Two sizes: the short one (default, or `SIW=short`) is part of the test suite: one boot, stock siw, rping
//! in both roles and one perftest of each verb. `SIW=full`, which `make siw` runs, goes through everything
//! and prints the table. What cannot work against siw is in the list with its reason, is tried all the same,
//! and fails the run when it begins to work.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use libtest_mimic::{Arguments, Trial};
use uwarp_conformance::cc;
use uwarp_conformance::check::{self, Expected};
use uwarp_conformance::dist::Dist;
use uwarp_conformance::lab::{self, Lab};
use uwarp_conformance::pair;
use uwarp_conformance::process::{Cmd, Output};
use uwarp_conformance::report::Table;
use uwarp_conformance::topology::free_port;
use uwarp_conformance::{Context, Failure, Outcome};

/// Which end uwarp is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Client,
    Server,
}
use Role::{Client, Server};

/// One way in which the two ends are set up.
struct Setting {
    name: &'static str,
    /// The guest's module and its parameters.
    driver: (&'static str, &'static str),
    /// Variables on our side.
    env: &'static [(&'static str, &'static str)],
    /// MTU of the wire.
    mtu: u32,
    roles: &'static [Role],
}

const fn setting(
    name: &'static str,
    driver: (&'static str, &'static str),
    env: &'static [(&'static str, &'static str)],
    roles: &'static [Role],
) -> Setting {
    Setting { name, driver, env, mtu: 1500, roles }
}

const BOTH: &[Role] = &[Client, Server];
const STOCK: (&str, &str) = ("siw", "");
const CRC_OFF: &[(&str, &str)] = &[("UWARP_CRC", "off")];

/// Settings with the same driver stand together: changing it takes a second or two.
const SETTINGS: [Setting; 11] = [
    // We ask for CRC; as server we answer siw's request without it by turning it on, which it honours.
    setting("CRC on (default)", STOCK, &[], BOTH),
    setting("CRC off at both ends", STOCK, CRC_OFF, BOTH),
    setting("we speak MPA revision 1", STOCK, &[("UWARP_MPA_REVISION", "1")], BOTH),
    Setting { name: "MTU 9000", driver: STOCK, env: &[], mtu: 9000, roles: BOTH },
    setting("siw requires CRC", ("siw_knobs", "mpa_crc_required=1"), &[], BOTH),
    // As client we do not ask and siw's server does not insist; as server we must give in.
    setting("siw requires CRC, we would not", ("siw_knobs", "mpa_crc_required=1"), CRC_OFF, BOTH),
    // Only siw's requests depend on it: as server it answers in the revision it is asked in.
    setting("siw speaks MPA revision 1", ("siw_knobs", "mpa_version=1"), &[], &[Server]),
    setting("siw speaks MPA revision 1, CRC off", ("siw_knobs", "mpa_version=1"), CRC_OFF, &[Server]),
    // As client siw asks for the peer-to-peer model and sends the ready-to-receive frame. rtr_type is
    // big-endian.
    setting("siw asks for RTR, write or read", ("siw_knobs", "peer_to_peer=1"), &[], BOTH),
    setting("siw asks for RTR, write only", ("siw_knobs", "peer_to_peer=1 rtr_type=128"), &[], &[Server]),
    setting("siw asks for RTR, read only", ("siw_knobs", "peer_to_peer=1 rtr_type=64"), &[], &[Server]),
];

/// The columns: rping with validation, perftest, rsockets with validation. Few iterations, as the guest is
/// emulated.
const PROGRAMS: [(&str, &str); 11] = [
    ("rping", ""),
    ("ib_send_lat", "-n 200 -s 64"),
    ("ib_send_bw", "-n 100 -s 65536"),
    ("ib_write_lat", "-n 200 -s 64"),
    ("ib_write_bw", "-n 100 -s 65536"),
    ("ib_read_lat", "-n 200 -s 64"),
    // So few Read Requests at a time that TCP splits none of them (trap 17 of `siw/README.md`).
    ("ib_read_bw", "-n 100 -s 65536 -t 8"),
    // rsockets of Debian's librdmacm at siw's end: the messages of iWARP.
    ("rstream", "-I 10 -C 10 -S 20000"),
    ("riostream", "-I 5 -C 5 -S 20000"),
    ("rcopy", ""),
    // The example of <uwarp_sockets.h>, by libuwarp-verbs-sockets.so: over Debian's librdmacm there, over
    // uwarp's here.
    ("iwarp_mode", ""),
];

/// What the short form runs.
const SHORT: [&str; 8] =
    ["rping", "ib_send_bw", "ib_write_bw", "ib_read_bw", "rstream", "riostream", "rcopy", "iwarp_mode"];

/// Groups of the programs of sockets in `IWARP_MODE`, with siw at both ends. The short form runs the first.
const SOCKETS: [(&str, &str); 19] = [
    ("sockets", "one_sided"),
    ("sockets", "modes"),
    ("sockets", "bytes"),
    ("sockets", "polling"),
    ("sockets", "half_closed"),
    ("sockets", "waiting"),
    ("sockets", "killed"),
    ("sockets", "forking"),
    ("sockets", "descriptors"),
    ("sockets", "mixed"),
    ("sockets", "many"),
    ("socket_threads", "locked"),
    ("socket_threads", "copies"),
    ("socket_threads", "at_once"),
    ("socket_threads", "errors"),
    ("socket_threads", "closing"),
    ("socket_threads", "exhausted"),
    ("socket_threads", "not_cancelled"),
    ("socket_threads", "interrupted"),
];

/// What cannot work, and by what its failure is known.
#[derive(Clone, Copy)]
struct Cannot {
    why: &'static str,
    /// Stands in what the two ends print.
    sign: &'static str,
}

/// Why a cell cannot work, if it cannot.
fn cannot_work(setting: &Setting, role: Role, program: &str) -> Option<Cannot> {
    let rtr = setting.driver.1.contains("peer_to_peer=1");
    match (setting.name, role, program) {
        ("we speak MPA revision 1", Client, "rping") => Some(Cannot {
            why: "revision 1 carries no read depths, and `rping -s` accepts with depth 0: its RDMA Read \
                  fails",
            sign: "post send error",
        }),
        ("we speak MPA revision 1", Server, _) => Some(Cannot {
            why: "siw asks in revision 2, rejects a revision 1 reply and does not fall back",
            // The event, as rping names it and as perftest numbers it.
            sign: match program {
                "rping" => "RDMA_CM_EVENT_REJECTED",
                "rstream" | "riostream" | "rcopy" | "iwarp_mode" => "Connection refused",
                _ => "Unexpected CM event bl blka 8",
            },
        }),
        (_, Server, "ib_write_lat") if !rtr => Some(Cannot {
            why: "perftest's server writes first, which a responder must not (RFC 5044 section 7.1.2) unless \
                  the initiator asks for the peer-to-peer model, and siw then waits too",
            sign: "this end may not speak first",
        }),
        _ => None,
    }
}

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads = Some(1);
    let full = match std::env::var("SIW").as_deref() {
        Ok("full") => true,
        Ok("short") | Err(_) => false,
        Ok(other) => {
            eprintln!("SIW={other}: only `short` and `full` are known");
            return ExitCode::FAILURE;
        }
    };
    // With an empty sign, any failure would pass.
    for (setting, role) in SETTINGS.iter().flat_map(|s| s.roles.iter().map(move |role| (s, *role))) {
        for cannot in PROGRAMS.iter().filter_map(|(program, _)| cannot_work(setting, role, program)) {
            assert!(!cannot.sign.is_empty() && !cannot.why.is_empty(), "{}: no sign or reason", setting.name);
        }
    }
    let state = Arc::new(State { dist: Dist::find(), lab: Mutex::new(Machine::Off) });
    let results: Arc<Mutex<Results>> = Arc::default();
    let mut trials = Vec::new();
    let st = state.clone();
    trials.push(Trial::test("the lab itself, with an independent peer", move || Ok(lab_works(&st)?)));
    for (s, setting) in SETTINGS.iter().enumerate().take(if full { SETTINGS.len() } else { 1 }) {
        for &role in setting.roles {
            for (p, &(program, arguments)) in PROGRAMS.iter().enumerate() {
                if !full && !SHORT.contains(&program) {
                    continue;
                }
                let (state, results) = (state.clone(), results.clone());
                let name = format!("{program} [uwarp is {role:?}, {}]", setting.name);
                trials.push(Trial::test(name, move || {
                    let result =
                        judge(cell(&state, setting, role, program, arguments), setting, role, program);
                    let word = match &result {
                        Ok(word) => *word,
                        Err(_) => "FAILS",
                    };
                    results.lock().unwrap().insert((s, role, p), word);
                    Ok(result.map(drop)?)
                }));
            }
        }
    }
    for (program, group) in SOCKETS.into_iter().take(if full { SOCKETS.len() } else { 1 }) {
        let state = state.clone();
        trials.push(Trial::test(format!("{program} {group} [siw at both ends]"), move || {
            Ok(state.with_lab(STOCK, 1500, |lab| {
                provide(lab, state.dist.as_ref().map_err(Failure::clone)?)?;
                let line = format!("/root/{program} {} {group}", Lab::GUEST);
                check::statements(&lab.guest_program(&format!("env {IN_GUEST} {line}"), 170)?)
            })?)
        }));
    }
    let conclusion = libtest_mimic::run(&args, trials);
    if !args.list {
        print_table(&results.lock().unwrap());
    }
    // The machine is powered off with the state, which `exit` would not drop.
    drop(state);
    conclusion.exit_code()
}

type Results = BTreeMap<(usize, Role, usize), &'static str>;

/// Turns what happened into the word for the table.
fn judge(result: Outcome, setting: &Setting, role: Role, program: &str) -> Outcome<&'static str> {
    match (result, cannot_work(setting, role, program)) {
        (Ok(()), None) => Ok("ok"),
        (Err(Failure(text)), Some(cannot)) if text.contains(cannot.sign) => Ok("cannot"),
        (Err(Failure(text)), Some(cannot)) => {
            Err(Failure(format!("does not fail as the list says ({}): {text}", cannot.why)))
        }
        (Err(why), None) => Err(why),
        (Ok(()), Some(cannot)) => {
            Err(Failure(format!("works, although the list says: {}. Take it off the list.", cannot.why)))
        }
    }
}

fn print_table(results: &Results) {
    let mut heads = vec!["setting", "uwarp is"];
    heads.extend(PROGRAMS.iter().map(|(p, _)| *p));
    let mut table = Table::new(&heads);
    for (s, setting) in SETTINGS.iter().enumerate() {
        for &role in setting.roles {
            let cells: Vec<_> = (0..PROGRAMS.len()).map(|p| results.get(&(s, role, p)).copied()).collect();
            if cells.iter().any(Option::is_some) {
                let words = [setting.name.to_owned(), format!("{role:?}").to_lowercase()];
                table.row(words.into_iter().chain(cells.iter().map(|c| c.unwrap_or("").to_owned())));
            }
        }
    }
    if table.is_empty() {
        return;
    }
    println!("\nuwarp against siw (Linux's software iWARP)\n\n{}", table.terminal());
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for (&(setting, role, program), _) in results.iter().filter(|(_, word)| **word == "cannot") {
        let setting = &SETTINGS[setting];
        let Some(Cannot { why, .. }) = cannot_work(setting, role, PROGRAMS[program].0) else { continue };
        match reasons.iter_mut().find(|(known, _)| *known == why) {
            Some((_, names)) => names.push(setting.name),
            None => reasons.push((why, vec![setting.name])),
        }
    }
    if !reasons.is_empty() {
        println!("cannot: tried and failed, as it must:");
    }
    for (why, mut names) in reasons {
        names.dedup();
        println!("  {why} ({})", names.join("; "));
    }
}

/// What the cases share.
struct State {
    dist: Outcome<Dist>,
    lab: Mutex<Machine>,
}

/// The machine as it stands.
enum Machine {
    Off,
    /// Did not boot once: it is not tried again for every case.
    Broken(Failure),
    Up {
        lab: Lab,
        driver: (&'static str, &'static str),
        mtu: u32,
    },
}

impl State {
    /// Runs `f` with a machine that has this driver and MTU.
    fn with_lab(
        &self,
        driver: (&'static str, &'static str),
        mtu: u32,
        f: impl FnOnce(&Lab) -> Outcome,
    ) -> Outcome {
        let mut machine = self.lab.lock().unwrap_or_else(|e| e.into_inner());
        if let Machine::Up { lab, driver: now, .. } = &mut *machine
            && *now != driver
        {
            match lab.driver(driver.0, driver.1) {
                Ok(()) => *now = driver,
                // A wedged driver cannot be removed; a new machine has none.
                Err(_) => *machine = Machine::Off,
            }
        }
        if let Machine::Off = *machine {
            *machine = match boot(driver) {
                Ok(lab) => Machine::Up { lab, driver, mtu: 1500 },
                Err(why) => Machine::Broken(why),
            };
        }
        match &mut *machine {
            Machine::Up { lab, mtu: now, .. } => {
                if *now != mtu {
                    lab.ns().ip(&format!("link set tap0 mtu {mtu}"))?;
                    lab.guest_ok(&format!("ip link set eth0 mtu {mtu}"))?;
                    *now = mtu;
                }
                f(lab)
            }
            Machine::Broken(why) => Err(why.clone()),
            Machine::Off => unreachable!("it was switched on above"),
        }
    }
}

fn boot(driver: (&str, &str)) -> Outcome<Lab> {
    let lab = lab::boot_or_explain()?;
    if driver != STOCK {
        lab.driver(driver.0, driver.1)?;
    }
    Ok(lab)
}

/// The machine boots, its device is up, and `mpa_lab.py`, which shares no line with uwarp, completes rping
/// sessions with it in both roles. When this passes and other cases fail, the lab is not to blame.
fn lab_works(state: &State) -> Outcome {
    state.with_lab(STOCK, 1500, |lab| {
        check::has(&lab.guest_ok("ibv_devinfo")?, "PORT_ACTIVE")?;
        let port = free_port();
        lab.guest_serve(&format!("rping -s -v -a {} -p {port}", Lab::GUEST), port, PATIENCE)?;
        // The pause keeps clear of siw's habit of missing an FPDU that comes right behind its reply.
        let peer = lab::mpa_lab(lab, &format!("rping-client {} {port} 3 crc delay=0.05", Lab::GUEST));
        check::has(&peer.run_ok()?, "rping-client: OK")?;
        lab.guest_server_end("rping", PATIENCE)?;

        let port = free_port();
        let peer = lab::mpa_lab(lab, &format!("rping-server {port} 3"));
        let peer = pair::serve(&peer, port)?;
        let out = lab.guest_program(&format!("rping -c -v -V -a {} -p {port} -C 3", Lab::HOST), PATIENCE)?;
        check::rping(&out, "ping data: ", 3, 64)?;
        check::has(&peer.wait()?, "rping-server: OK")
    })
}

/// Where the guest's programs find the library, and an address without a device.
const IN_GUEST: &str =
    "LD_LIBRARY_PATH=/root VERBS_SOCKETS=libuwarp-verbs-sockets.so.1 NO_DEVICE_AT=10.88.0.1";

/// Brings libuwarp-verbs-sockets.so and its programs into the guest, once. They are those of this machine:
/// both are Debian 12.
fn provide(lab: &Lab, dist: &Dist) -> Outcome<PathBuf> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("siw");
    let example = dir.join("iwarp_mode");
    if lab.guest("[ -e /root/provided ]")?.ok() {
        return Ok(example);
    }
    let (sockets, threads) = (cc::build("sockets", &dir)?, cc::build("socket_threads", &dir)?);
    cc::build_example("iwarp_mode", &example, dist, "-luwarp-verbs-sockets -libverbs")?;
    let library = dist.lib().join("libuwarp-verbs-sockets.so.1");
    for file in [&sockets, &threads, &example, &library] {
        lab.put(file, &format!("/root/{}", file.file_name().unwrap_or_default().to_string_lossy()))?;
    }
    // With an interface that has no device.
    lab.guest_ok(
        "modprobe dummy; ip link add lone type dummy && ip addr add 10.88.0.1/24 dev lone && \
         ip link set lone up && touch /root/provided",
    )?;
    Ok(example)
}

/// Seconds that a program may take. They only bound a hang: the guest is slow.
const PATIENCE: u32 = 60;

/// The same for one cell. What cannot work often hangs, and all of them together would take longer than the
/// guest lives.
fn patience(setting: &Setting, role: Role, program: &str) -> u32 {
    if cannot_work(setting, role, program).is_some() { 20 } else { PATIENCE }
}

/// One cell of the table.
fn cell(state: &State, setting: &Setting, role: Role, program: &str, arguments: &str) -> Outcome {
    let lib = state.dist.as_ref().map_err(Failure::clone)?.lib();
    state.with_lab(setting.driver, setting.mtu, |lab| {
        let patience = patience(setting, role, program);
        let ours = |line: String| {
            let mut cmd = Cmd::line(&line).env("LD_LIBRARY_PATH", &lib).in_ns(Some(lab.ns()));
            for (name, value) in setting.env {
                cmd = cmd.env(name, value);
            }
            cmd.limit(Duration::from_secs(patience.into()))
        };
        // perftest wants both ends to be of one kind; rping does not look.
        let as_iwarp = |line: String| ours(line).env("UWARP_VIEW", "iwarp");
        match program {
            "rping" => {
                let wire = Wire { lab, ours: &ours, role, patience };
                wire.rping(20, 64)?;
                wire.rping(5, 65535)?;
                Wire { lab, ours: &as_iwarp, role, patience }.rping(20, 64)
            }
            "rstream" | "riostream" => {
                // Blocking, and with rpoll; our end shown as RoCE, and as an RNIC. siw's end always blocks:
                // with rpoll, librdmacm reports the end of a stream before its last bytes are read, and
                // rstream then fails.
                let stream = |ours: &dyn Fn(String) -> Cmd, how: &str| {
                    let wire = Wire { lab, ours, role, patience };
                    wire.stream(
                        program,
                        &format!("{how} -T v {arguments}"),
                        &format!("-T b -T v {arguments}"),
                    )
                };
                stream(&ours, "-T b")?;
                stream(&ours, "-T a")?;
                stream(&as_iwarp, "-T b")
            }
            "rcopy" => Wire { lab, ours: &ours, role, patience }.rcopy(),
            "iwarp_mode" => {
                let program = provide(lab, state.dist.as_ref().map_err(Failure::clone)?)?;
                Wire { lab, ours: &ours, role, patience }.iwarp_mode(&program.display().to_string())
            }
            tool => {
                let wire = Wire { lab, ours: &as_iwarp, role, patience };
                pair::despite_perftests_race(|| wire.perftest(tool, arguments))
            }
        }
    })
}

/// Two ends and who is where.
struct Wire<'a> {
    lab: &'a Lab,
    ours: &'a dyn Fn(String) -> Cmd,
    role: Role,
    patience: u32,
}

impl Wire<'_> {
    fn rping(&self, count: u32, size: usize) -> Outcome {
        let port = free_port();
        let address = self.server_address();
        let server = format!("rping -s -v -a {address} -p {port} -S {size}");
        let client = format!("rping -c -v -V -a {address} -p {port} -C {count} -S {size}");
        let (server, client) = self.run("rping", server, client, port)?;
        let good = check::rping(&client, "ping data: ", count, size).and(check::rping(
            &server,
            "server ping data: ",
            count,
            size,
        ));
        both(good, &server, &client)
    }

    fn perftest(&self, tool: &str, arguments: &str) -> Outcome {
        let port = free_port();
        let number = |flag| -> u64 {
            let mut words = arguments.split_whitespace().skip_while(|w| *w != flag);
            words.nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
        };
        let expected = Expected::one(number("-s"), number("-n"));
        let server = format!("{tool} -R -F -p {port} {arguments}");
        let client = format!("{server} {}", self.server_address());
        let (server, client) = self.run(tool, server, client, port)?;
        // The end at which siw is may fail in its last act, a handshake before both leave: siw looks for a
        // half-closed peer between having sent a segment and completing the work request, and then fails the
        // Send that it has delivered. All that was to be measured has been by then, and the table must be
        // complete.
        let siw_hasty = |out: &Output| {
            ["Bad wc status 2", "Failed to close connection"].iter().all(|text| out.stderr.contains(text))
        };
        let quiet = |out: &Output| out.exited_ok().and(check::no_complaints(out));
        let (ours, theirs) = match self.role {
            Client => (&client, &server),
            Server => (&server, &client),
        };
        let good = quiet(ours)
            .and(if siw_hasty(theirs) { Ok(()) } else { quiet(theirs) })
            .and(check::perftest_table(&client, &expected));
        both(good, &server, &client)
    }

    /// `rstream` or `riostream` at both ends, with arguments for ours and for theirs.
    fn stream(&self, program: &str, ours: &str, theirs: &str) -> Outcome {
        let port = free_port();
        let address = self.server_address();
        let (of_server, of_client) = match self.role {
            Client => (theirs, ours),
            Server => (ours, theirs),
        };
        let server = format!("{program} -b {address} -p {port} {of_server}");
        let client = format!("{program} -s {address} -p {port} {of_client}");
        let (server, client) = self.run(program, server, client, port)?;
        let complete = |out: &Output| {
            out.exited_ok()?;
            check::has(out, "custom")?;
            if out.stderr.trim().is_empty() { Ok(()) } else { out.failure("a complaint") }
        };
        both(complete(&client).and(complete(&server)), &server, &client)
    }

    /// The example of `<uwarp_sockets.h>`; `here`: our end's program.
    fn iwarp_mode(&self, here: &str) -> Outcome {
        let port = free_port();
        let there = format!("env {IN_GUEST} /root/iwarp_mode");
        let (of_server, of_client) = match self.role {
            Client => (&*there, here),
            Server => (here, &*there),
        };
        let server = format!("{of_server} server {port}");
        let client = format!("{of_client} client {} {port}", self.server_address());
        let (server, client) = self.run("iwarp_mode", server, client, port)?;
        let good = |out: &Output| {
            out.exited_ok()?;
            check::has(out, "hello, and a message of 1048576 bytes")
        };
        both(good(&client).and(good(&server)), &server, &client)
    }

    /// Copies a file from the client to the server and compares.
    fn rcopy(&self) -> Outcome {
        const MAKE: &str = "head -c 3000000 /dev/urandom";
        let port = free_port();
        let dir = std::env::temp_dir().join(format!("uwarp-siw-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&dir).context(dir.display())?;
        let here = dir.join("file").display().to_string();
        let there = format!("/tmp/file-{port}");
        let line = |server: &str, from: &str, to: &str| format!("rcopy {from} {server}:{to} -p {port}");
        let server = format!("rcopy -p {port}");
        let result = match self.role {
            Client => {
                Cmd::new("sh").arg("-c").arg(format!("{MAKE} >{here}")).run_ok()?;
                self.lab.guest_serve(&server, port, self.patience + 5)?;
                let client = (self.ours)(line(Lab::GUEST, &here, &there)).run();
                let server = self.lab.guest_server_end("rcopy", 1)?;
                client.map(|client| (server, client))
            }
            Server => {
                self.lab.guest_ok(&format!("{MAKE} >{there}"))?;
                let running = pair::serve(&(self.ours)(server), port)?;
                let client = self.lab.guest_program(&line(Lab::HOST, &there, &here), self.patience)?;
                Ok((running.stop(), client))
            }
        };
        let (server, client) = result?;
        if !client.ok() {
            let _ = std::fs::remove_dir_all(&dir);
            return both(client.exited_ok(), &server, &client);
        }
        let sum = |out: Output| out.stdout.split_whitespace().next().map(str::to_owned);
        let [ours, theirs] = [
            sum(Cmd::new("md5sum").arg(&here).run_ok()?),
            sum(self.lab.guest_ok(&format!("md5sum {there}"))?),
        ];
        let _ = std::fs::remove_dir_all(&dir);
        let same = ours.is_some() && ours == theirs;
        let good = if same { Ok(()) } else { client.failure("the copy is not the file") };
        both(good, &server, &client)
    }

    fn server_address(&self) -> &'static str {
        match self.role {
            Client => Lab::GUEST,
            Server => Lab::HOST,
        }
    }

    /// Runs both ends and returns what server and client printed.
    fn run(&self, program: &str, server: String, client: String, port: u16) -> Outcome<(Output, Output)> {
        match self.role {
            Client => {
                self.lab.guest_serve(&server, port, self.patience + 5)?;
                let client = (self.ours)(client).run();
                let server = self.lab.guest_server_end(program, if client.is_ok() { PATIENCE } else { 3 })?;
                match client {
                    Ok(client) => Ok((server, client)),
                    Err(why) => Err(Failure(format!("{why}--- server\n{}", server.text()))),
                }
            }
            Server => {
                let running = pair::serve(&(self.ours)(server), port)?;
                let client = self.lab.guest_program(&client, self.patience)?;
                Ok((
                    running.wait_at_most(Duration::from_secs(if client.ok() { PATIENCE.into() } else { 5 })),
                    client,
                ))
            }
        }
    }
}

fn both(result: Outcome, server: &Output, client: &Output) -> Outcome {
    result
        .map_err(|why| Failure(format!("{why}\n--- client\n{}--- server\n{}", client.text(), server.text())))
}
