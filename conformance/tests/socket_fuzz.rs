//! Random sequences of socket calls (`c/socket_fuzz.c`): each is recorded with the kernel's sockets and then
//! compared with another way to have sockets.
//!
//! `SOCK_FUZZ_SECONDS` says how long each way is tried, `SOCK_FUZZ_SEED` the first seed. Without them it is
//! five seconds from seed 1 on: `make test` looks for what was broken, and `make fuzz-sockets` for more. A
//! sequence that differs three times is shortened, and printed.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use uwarp_conformance::cc;
use uwarp_conformance::dist::Dist;

/// Steps of a sequence; many are skipped, as they would wait, or do not fit what is there.
const STEPS: u32 = 250;
/// A step that takes so long hangs.
const LIMIT: Duration = Duration::from_secs(200);
/// How long a sequence that is being shortened waits for what does not come.
const SHORT: &str = "1000";
/// And another one, in milliseconds: as long as a machine may be busy with much else.
const LONG: &str = "15000";

/// How the worker is started.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    /// Option of `uwarp run`.
    option: Option<&'static str>,
    argument: &'static str,
    /// Its sequences have only steps that all ways have.
    simple: bool,
}

const KERNEL: Way = Way { name: "kernel", option: None, argument: "kernel", simple: false };

struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

fn program() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        cc::build("socket_fuzz", &Path::new(env!("CARGO_TARGET_TMPDIR")).join("socket_fuzz")).unwrap()
    })
}

impl Worker {
    fn start(way: Way, settle: &str) -> Self {
        let dist = Dist::find().unwrap();
        let mut command = match way.option {
            None => Command::new(program()),
            Some(option) => {
                let mut command = Command::new(dist.uwarp().unwrap());
                command.args(["run", option, "--"]).arg(program());
                command
            }
        };
        command.arg(way.argument).env("SETTLE_MS", settle).env("UWARP_LOG", "error");
        match way.option {
            None => command.env("LD_LIBRARY_PATH", dist.lib()),
            Some(_) => command.env_remove("LD_LIBRARY_PATH"),
        };
        if way.option.is_some_and(|option| option.contains('=')) {
            command.env("RULED", "1");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, stdin, lines }
    }

    /// What it prints about this, up to "end".
    fn ask(&mut self, text: &str) -> Vec<String> {
        let mut said = Vec::new();
        if self.stdin.write_all(text.as_bytes()).is_err() {
            said.push("the worker has ended".to_owned());
            return said;
        }
        loop {
            match self.lines.recv_timeout(LIMIT) {
                Ok(line) if line == "end" => return said,
                Ok(line) => said.push(line),
                Err(why) => {
                    said.push(format!("the worker has ended, or hangs: {why}, {:?}", self.child.try_wait()));
                    return said;
                }
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A recorder, and what is compared with it.
struct Pair {
    way: Way,
    kernel: Worker,
    other: Worker,
}

impl Pair {
    fn start(way: Way, settle: &str) -> Self {
        Self { way, kernel: Worker::start(KERNEL, settle), other: Worker::start(way, settle) }
    }

    /// The trace, and what differs if anything does.
    fn run(&mut self, seed: u64, left_out: &[u32]) -> (Vec<String>, Option<String>) {
        let left_out: String = left_out.iter().map(|step| format!(" {step}")).collect();
        let sequence = format!("{} {seed} {STEPS}{left_out}\n", u8::from(self.way.simple));
        let trace = self.kernel.ask(&format!("record {sequence}"));
        let lines: String = trace.iter().map(|line| format!("{line}\n")).collect();
        let said = self.other.ask(&format!("check {sequence}{lines}end\n"));
        let differs = said != ["same"];
        (trace, differs.then(|| said.join("\n")))
    }
}

/// The number of a line's step.
fn step_of(line: &str) -> Option<u32> {
    line.strip_prefix('#')?.split_whitespace().next()?.parse().ok()
}

/// Leaves out what is not needed for a difference; returns what is left.
fn shorten(way: Way, seed: u64, trace: &[String]) -> (Vec<String>, Option<String>) {
    let try_with = |kept: &[u32]| {
        let left_out: Vec<u32> = (0..STEPS).filter(|step| !kept.contains(step)).collect();
        Pair::start(way, SHORT).run(seed, &left_out)
    };
    let mut kept: Vec<u32> = trace.iter().filter_map(|line| step_of(line)).collect();
    let until = Instant::now() + Duration::from_secs(120);
    let mut size = kept.len().div_ceil(2);
    while size > 0 && Instant::now() < until {
        let mut at = 0;
        while at < kept.len() && Instant::now() < until {
            let mut fewer = kept.clone();
            fewer.drain(at..(at + size).min(kept.len()));
            match try_with(&fewer) {
                (_, Some(_)) => kept = fewer,
                (_, None) => at += size,
            }
        }
        size /= 2;
    }
    try_with(&kept)
}

/// One at a time: each says what is so when nothing else happens.
static TURN: Mutex<()> = Mutex::new(());

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn same_as_kernel(way: Way) {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let (seconds, of_this_run) = match number("SOCK_FUZZ_SECONDS") {
        None => (5, 1),
        Some(seconds) => {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
            (seconds, now.as_millis() as u64 % 1_000_000_000)
        }
    };
    let first = number("SOCK_FUZZ_SEED").unwrap_or(of_this_run);
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut pair = Pair::start(way, LONG);
    let mut seed = first;
    while seed == first || Instant::now() < until {
        let (mut trace, mut differs) = pair.run(seed, &[]);
        // Recorded anew, and with new processes: a machine may have been busy for longer than any limit.
        for _ in 0..2 {
            if differs.is_some() {
                (trace, differs) = Pair::start(way, LONG).run(seed, &[]);
            }
        }
        if let Some(differs) = differs {
            let (short, still) = shorten(way, seed, &trace);
            panic!(
                "{}: SOCK_FUZZ_SEED={seed} differs:\n{differs}\nShortened:\n{}\n{}",
                way.name,
                short.join("\n"),
                still.unwrap_or_else(|| "(which does not differ always)".to_owned())
            );
        }
        seed += 1;
    }
    println!("{}: seeds {first} to {}", way.name, seed - 1);
}

#[test]
fn passing_through() {
    same_as_kernel(Way {
        name: "passing through",
        option: Some("--sockets"),
        argument: "kernel",
        simple: false,
    });
}

#[test]
fn under_a_rule() {
    same_as_kernel(Way {
        name: "under a rule",
        option: Some("--sockets=rsockets"),
        argument: "kernel",
        simple: false,
    });
}

/// Both ends are of one process, and become streams at some step of a sequence.
#[test]
fn upgraded() {
    same_as_kernel(Way {
        name: "upgraded",
        option: Some("--sockets=upgrade"),
        argument: "kernel",
        simple: false,
    });
}

#[test]
fn in_iwarp_mode() {
    same_as_kernel(Way { name: "in IWARP_MODE", option: None, argument: "mode", simple: true });
}

#[test]
fn of_rsockets() {
    same_as_kernel(Way { name: "rsockets", option: None, argument: "rsockets", simple: true });
}
