//! Programs under a time limit: each in its own process group, its output kept, nothing left behind.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::netns::NetNs;
use crate::{Context, Failure, Outcome, fail};

/// How long a program may run by default. It only bounds a hang, and a machine may be a hundred times slower
/// than usual for a while, so all limits here are far beyond what is needed.
pub const DEFAULT_LIMIT: Duration = Duration::from_secs(240);

/// How long beyond its limit the outer guard lets a program live. The guard is only for the case that the
/// test process itself is killed and cannot clean up.
const GUARD: Duration = Duration::from_secs(60);

/// What is started while [`record`] runs something.
static RECORD: Mutex<Option<Vec<Cmd>>> = Mutex::new(None);

/// Runs something, and keeps every command that is started meanwhile, by any thread. One at a time.
pub fn record<T>(run: impl FnOnce() -> T) -> (T, Vec<Cmd>) {
    let set = |to| RECORD.lock().unwrap_or_else(|e| e.into_inner()).replace(to);
    set(Vec::new());
    let result = run();
    let started = RECORD.lock().unwrap_or_else(|e| e.into_inner()).take();
    (result, started.unwrap_or_default())
}

/// Variables of all programs that set none of the same name; see [`set_by_default`].
static BY_DEFAULT: Mutex<Vec<(&'static str, OsString)>> = Mutex::new(Vec::new());

/// All programs that are started from now on have these variables. They are no part of a row, so the page
/// does not show them.
pub fn set_by_default(variables: &[(&'static str, OsString)]) {
    *BY_DEFAULT.lock().unwrap_or_else(|e| e.into_inner()) = variables.to_vec();
}

/// A program to be run: arguments, environment, place and time limit.
#[derive(Clone)]
pub struct Cmd {
    argv: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    unset: Vec<OsString>,
    ns: Option<String>,
    user: Option<u32>,
    limit: Duration,
    logs: Option<&'static str>,
}

impl Cmd {
    /// A program by name (searched in `PATH`, and in the `sbin` directories) or by path.
    pub fn new(program: impl AsRef<OsStr>) -> Cmd {
        Cmd {
            argv: vec![program.as_ref().to_owned()],
            env: Vec::new(),
            unset: Vec::new(),
            ns: None,
            user: None,
            limit: DEFAULT_LIMIT,
            logs: None,
        }
    }

    /// A whole command line, split at white space: no quoting, no shell.
    pub fn line(line: &str) -> Cmd {
        let mut words = line.split_whitespace();
        let mut cmd = Cmd::new(words.next().unwrap_or_default());
        cmd.argv.extend(words.map(OsString::from));
        cmd
    }

    /// One more argument.
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Cmd {
        self.argv.push(arg.as_ref().to_owned());
        self
    }

    /// More arguments, split at white space.
    pub fn args(mut self, args: &str) -> Cmd {
        self.argv.extend(args.split_whitespace().map(OsString::from));
        self
    }

    /// Puts a program and its arguments in front of this one (`uwarp run --`, for example).
    pub fn behind(mut self, front: impl IntoIterator<Item = OsString>) -> Cmd {
        let mut argv: Vec<OsString> = front.into_iter().collect();
        argv.append(&mut self.argv);
        self.argv = argv;
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Cmd {
        self.env.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Sets several.
    pub fn envs(self, variables: &[(&str, &str)]) -> Cmd {
        variables.iter().fold(self, |cmd, (name, value)| cmd.env(name, value))
    }

    /// Takes an environment variable away.
    pub fn unset(mut self, name: impl AsRef<OsStr>) -> Cmd {
        self.unset.push(name.as_ref().to_owned());
        self
    }

    /// Runs it inside a network namespace.
    pub fn in_ns(mut self, ns: Option<&NetNs>) -> Cmd {
        self.ns = ns.map(|ns| ns.name().to_owned());
        self
    }

    /// Runs it as another user (and the group of the same number), without supplementary groups.
    pub fn as_user(mut self, uid: u32) -> Cmd {
        self.user = Some(uid);
        self
    }

    /// What it logs where log lines go to files of ours, in place of what all programs log there.
    pub fn logs(mut self, filter: &'static str) -> Cmd {
        self.logs = Some(filter);
        self
    }

    /// The time after which it is killed and counts as failed.
    pub fn limit(mut self, limit: Duration) -> Cmd {
        self.limit = limit;
        self
    }

    /// The program and its arguments.
    pub fn words(&self) -> impl Iterator<Item = String> + '_ {
        self.argv.iter().map(|word| word.to_string_lossy().into_owned())
    }

    /// The environment variables that are set for it alone; the last one of a name counts.
    pub fn variables(&self) -> impl Iterator<Item = (String, String)> + '_ {
        let text = |word: &OsString| word.to_string_lossy().into_owned();
        self.env.iter().map(move |(name, value)| (text(name), text(value)))
    }

    /// The command as a person would type it.
    pub fn shown(&self) -> String {
        let mut out = String::new();
        if let Some(ns) = &self.ns {
            let _ = write!(out, "[{ns}] ");
        }
        for (name, value) in &self.env {
            let _ = write!(out, "{}={} ", name.to_string_lossy(), value.to_string_lossy());
        }
        out + &self.argv.iter().map(|a| a.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    /// Whether it was asked for log lines, which its row reads where they go by themselves.
    fn reads_log_lines(&self) -> bool {
        let log = |word: &OsString| word == "--log" || word.to_string_lossy().contains("UWARP_LOG");
        self.env.iter().any(|(name, _)| name == "UWARP_LOG") || self.argv.iter().any(log)
    }

    /// Starts it. Fails when the program is not installed.
    pub fn spawn(&self) -> Outcome<Running> {
        let program = find_program(&self.argv[0])?;
        if let Some(started) = RECORD.lock().unwrap_or_else(|e| e.into_inner()).as_mut() {
            started.push(self.clone());
        }
        let mut argv: Vec<OsString> = Vec::new();
        if let Some(ns) = &self.ns {
            argv.extend(["ip", "netns", "exec", ns].map(OsString::from));
        }
        let guard = (self.limit + GUARD).as_secs().to_string();
        argv.extend(["timeout", "-s", "KILL", &guard].map(OsString::from));
        if let Some(uid) = self.user {
            let (uid, gid) = (format!("--reuid={uid}"), format!("--regid={uid}"));
            argv.extend(["setpriv", &uid, &gid, "--clear-groups"].map(OsString::from));
        }
        argv.push(program.into_os_string());
        argv.extend_from_slice(&self.argv[1..]);

        let stdout = memfile()?;
        let stderr = memfile()?;
        let mut command = Command::new(find_program(&argv[0])?);
        command.args(&argv[1..]).process_group(0).stdin(Stdio::null());
        command.stdout(stdout.try_clone().context("dup")?).stderr(stderr.try_clone().context("dup")?);
        if !self.reads_log_lines() {
            let by_default = BY_DEFAULT.lock().unwrap_or_else(|e| e.into_inner());
            command.envs(by_default.iter().map(|(n, v)| (n, v)));
            if let (false, Some(filter)) = (by_default.is_empty(), self.logs) {
                command.env("UWARP_LOG", filter);
            }
        }
        command.envs(self.env.iter().map(|(n, v)| (n, v)));
        for name in &self.unset {
            command.env_remove(name);
        }
        let child = command.spawn().context(format_args!("cannot start {}", self.shown()))?;
        let pid = Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
        let started = Instant::now();
        Ok(Running {
            shown: self.shown(),
            child,
            pid,
            pidfd,
            stdout,
            stderr,
            started,
            limit: self.limit,
            ns: self.ns.clone(),
            reaped: false,
        })
    }

    /// Runs it to its end. Fails at the time limit; an exit status other than 0 is the caller's to judge.
    pub fn run(&self) -> Outcome<Output> {
        self.spawn()?.wait()
    }

    /// Runs it to its end and fails unless it exits with 0.
    pub fn run_ok(&self) -> Outcome<Output> {
        let out = self.run()?;
        out.exited_ok()?;
        Ok(out)
    }
}

/// A program that has been started. Dropping it kills its whole process group.
pub struct Running {
    shown: String,
    child: Child,
    pid: Pid,
    pidfd: OwnedFd,
    stdout: File,
    stderr: File,
    started: Instant,
    limit: Duration,
    ns: Option<String>,
    reaped: bool,
}

impl Running {
    /// The id of the process that was started (a wrapper's, while it has not yet become the program).
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// The network namespace it was put into.
    pub fn ns(&self) -> Option<&str> {
        self.ns.as_deref()
    }

    /// Whether it still runs.
    pub fn is_running(&self) -> bool {
        !self.exits_within(Duration::ZERO)
    }

    /// What it printed so far, both streams.
    pub fn so_far(&self) -> String {
        format!("{}{}", contents(&self.stdout), contents(&self.stderr))
    }

    /// Waits for the end, at most until the time limit; then kills the group and fails.
    pub fn wait(mut self) -> Outcome<Output> {
        let left = self.limit.saturating_sub(self.started.elapsed());
        if self.exits_within(left) {
            return Ok(self.finish());
        }
        let threads = self.threads();
        let limit = self.limit;
        let out = self.finish();
        Err(Failure(format!("still running after {limit:?}\n{threads}{}", out.text())))
    }

    /// Waits for the end, at most `within` (and never longer than the time limit); then stops it.
    pub fn wait_at_most(self, within: Duration) -> Output {
        let left = self.limit.saturating_sub(self.started.elapsed()).min(within);
        self.exits_within(left);
        self.stop()
    }

    /// Sends SIGTERM, after two seconds SIGKILL, and returns what the program printed. For servers that would
    /// run for ever.
    pub fn stop(mut self) -> Output {
        let _ = rustix::process::kill_process_group(self.pid, Signal::TERM);
        self.exits_within(Duration::from_secs(2));
        self.finish()
    }

    /// Sends a signal to the whole group.
    pub fn signal(&self, signal: Signal) -> Outcome {
        rustix::process::kill_process_group(self.pid, signal)
            .context(format_args!("signal to {}", self.shown))
    }

    /// Waits until `ready` returns true, which is checked every few milliseconds; fails when the program ends
    /// first or `within` passes. Used to wait until a server listens.
    pub fn until(&self, within: Duration, what: &str, mut ready: impl FnMut(&Running) -> bool) -> Outcome {
        let deadline = Instant::now() + within;
        loop {
            if ready(self) {
                return Ok(());
            }
            if self.exits_within(Duration::from_millis(5)) {
                // It may have become ready and ended since we looked.
                if ready(self) {
                    return Ok(());
                }
                fail!("{} ended before {what}\n{}", self.shown, self.so_far())
            }
            if Instant::now() > deadline {
                let threads = self.threads();
                fail!("{}: not {what} within {within:?}\n{threads}{}", self.shown, self.so_far())
            }
        }
    }

    fn exits_within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec { tv_sec: left.as_secs() as _, tv_nsec: left.subsec_nanos() as _ };
            let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
            match rustix::event::poll(&mut fds, Some(&timeout)) {
                Ok(0) => return false,
                Ok(_) => return true,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }

    /// Where every thread of the group's processes sleeps: the first thing to know about a program that
    /// hangs.
    fn threads(&self) -> String {
        let mut out = String::new();
        let Ok(procs) = std::fs::read_dir("/proc") else { return out };
        for entry in procs.flatten() {
            let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
            if rest.split(' ').nth(2) != Some(&self.pid.to_string()) {
                continue;
            }
            for task in std::fs::read_dir(entry.path().join("task")).into_iter().flatten().flatten() {
                let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
                let state = read("stat").rsplit_once(") ").and_then(|(_, r)| r.chars().next()).unwrap_or('?');
                let (comm, wchan) = (read("comm"), read("wchan"));
                let id = task.file_name();
                let _ = writeln!(out, "  thread {} {} {state} {wchan}", id.to_string_lossy(), comm.trim());
            }
        }
        out
    }

    /// Kills what is left of the group while the leader, dead or not, still holds the number; then reaps.
    fn finish(&mut self) -> Output {
        let status = self.reap();
        Output {
            shown: self.shown.clone(),
            status,
            stdout: contents(&self.stdout),
            stderr: contents(&self.stderr),
            took: self.started.elapsed(),
        }
    }

    fn reap(&mut self) -> Option<ExitStatus> {
        let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        self.reaped = true;
        self.child.wait().ok()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.reaped {
            self.reap();
        }
    }
}

/// The result of a program: its status and its output.
#[derive(Debug, Clone)]
pub struct Output {
    /// The command line.
    pub shown: String,
    /// Exit status, `None` when it could not be learned.
    pub status: Option<ExitStatus>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// Time from start to end.
    pub took: Duration,
}

impl Output {
    /// Whether it exited with 0.
    pub fn ok(&self) -> bool {
        self.status.is_some_and(|s| s.success())
    }

    /// Fails, with all output, unless it exited with 0.
    pub fn exited_ok(&self) -> Outcome {
        if self.ok() { Ok(()) } else { self.failure("exit status is not 0") }
    }

    /// A failure with this output in it.
    pub fn failure<T>(&self, why: impl std::fmt::Display) -> Outcome<T> {
        Err(Failure(format!("{why}\n{}", self.text())))
    }

    /// Command, status and both streams, long ones shortened in the middle.
    pub fn text(&self) -> String {
        let status = match self.status {
            None => "status unknown".to_owned(),
            Some(s) => match (s.code(), s.signal()) {
                (Some(code), _) => format!("exit {code}"),
                (_, Some(signal)) => format!("killed by signal {signal}"),
                _ => s.to_string(),
            },
        };
        let mut out = format!("$ {}   ({status}, {:.2} s)\n", self.shown, self.took.as_secs_f32());
        for (name, text) in [("out", &self.stdout), ("err", &self.stderr)] {
            for line in shortened(text) {
                let _ = writeln!(out, "  {name}| {line}");
            }
        }
        out
    }
}

/// At most 60 lines, 30 from each end, of at most 200 characters.
fn shortened(text: &str) -> Vec<String> {
    let line = |l: &str| match l.char_indices().nth(200) {
        Some((cut, _)) => format!("{}… {} bytes", &l[..cut], l.len()),
        None => l.to_owned(),
    };
    let lines: Vec<String> = text.lines().map(line).collect();
    if lines.len() <= 60 {
        return lines;
    }
    let mut out = lines[..30].to_vec();
    out.push(format!("… {} lines …", lines.len() - 60));
    out.extend_from_slice(&lines[lines.len() - 30..]);
    out
}

/// A file in memory: unlike a pipe it never fills, needs no reader thread, and no left-over grandchild that
/// holds it open can keep us waiting.
fn memfile() -> Outcome<File> {
    Ok(File::from(rustix::fs::memfd_create("output", MemfdFlags::CLOEXEC).context("memfd_create")?))
}

fn contents(file: &File) -> String {
    let mut bytes = Vec::new();
    let mut chunk = [0u8; 8192];
    // Positioned reads: the offset is shared with the child, which writes at it.
    while let Ok(n @ 1..) = file.read_at(&mut chunk, bytes.len() as u64) {
        bytes.extend_from_slice(&chunk[..n]);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Finds a program as a root shell would; for a missing one, the failure names its Debian package if it is
/// known.
pub fn find_program(name: &OsStr) -> Outcome<PathBuf> {
    let path = PathBuf::from(name);
    if path.components().count() > 1 {
        return if path.exists() { Ok(path) } else { fail!("{} is not there", path.display()) };
    }
    let dirs = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin:/usr/bin:/bin";
    for dir in dirs.split(':').filter(|d| !d.is_empty()) {
        let file = PathBuf::from(dir).join(name);
        if file.is_file() {
            return Ok(file);
        }
    }
    let name = name.to_string_lossy();
    let package = match &*name {
        n if n.starts_with("ib_") => "perftest",
        n if n.starts_with("ibv_") => "ibverbs-utils",
        "rping" | "rdma_server" | "rdma_client" | "rdma_xserver" | "rdma_xclient" => "rdmacm-utils",
        "ip" | "ss" => "iproute2",
        "python3" | "tshark" => &*name,
        "cc" => "gcc",
        "as" | "ld" => "binutils",
        n if n.starts_with("fi_") => "libfabric-bin",
        "mpirun" => "openmpi-bin",
        "mpicc" => "libopenmpi-dev",
        "qemu-system-x86_64" => "qemu-system-x86",
        "qemu-io" => "qemu-utils",
        "tgtd" | "tgtadm" => "tgt",
        n if n.starts_with("iscsi-") => "libiscsi-bin",
        "setpriv" => "util-linux",
        _ => fail!("program {name} is not installed"),
    };
    fail!("program {name} is not installed: apt-get install {package}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_status_are_kept() {
        let out = Cmd::new("sh").arg("-c").arg("echo a; echo b >&2; exit 3").run().unwrap();
        assert_eq!((out.stdout.as_str(), out.stderr.as_str()), ("a\n", "b\n"));
        assert_eq!(out.status.unwrap().code(), Some(3));
        assert!(out.exited_ok().unwrap_err().0.contains("exit 3"));
    }

    #[test]
    fn death_by_signal_is_seen_through_the_wrapper() {
        let out = Cmd::new("sh").arg("-c").arg("kill -SEGV $$").run().unwrap();
        assert_eq!(out.status.unwrap().signal(), Some(11), "{}", out.text());
    }

    #[test]
    fn time_limit_kills_the_whole_group() {
        let cmd = Cmd::new("sh").arg("-c").arg("sleep 300 & echo $!; wait").limit(Duration::from_millis(300));
        let running = cmd.spawn().unwrap();
        running.until(Duration::from_secs(60), "printing", |r| r.so_far().ends_with('\n')).unwrap();
        let err = running.wait().unwrap_err().0;
        assert!(err.contains("still running"), "{err}");
        let child: u32 = err.lines().find_map(|l| l.strip_prefix("  out| ")).unwrap().parse().unwrap();
        // The grandchild was killed with the group. It may take a moment to die, and the process that adopted
        // it may still have to reap it.
        let state = || std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        let lives = |state: &str| !state.is_empty() && !state.contains(") Z ");
        let end = Instant::now() + Duration::from_secs(60);
        while lives(&state()) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!lives(&state()), "{}", state());
    }

    #[test]
    fn missing_program_says_what_to_install() {
        let err = Cmd::new("ib_no_such_program").run().unwrap_err().0;
        assert!(err.contains("apt-get install perftest"), "{err}");
    }

    #[test]
    fn commands_are_recorded_as_they_start() {
        let cmd = Cmd::line("true a").env("B", "c");
        let (ok, started) = record(|| cmd.run().is_ok());
        // Other tests start programs meanwhile.
        let mut found = started.iter().filter(|cmd| cmd.words().eq(["true", "a"]));
        let variables: Vec<_> = found.next().expect("the command").variables().collect();
        assert_eq!((ok, variables), (true, vec![("B".to_owned(), "c".to_owned())]));
    }

    #[test]
    fn until_notices_an_early_end() {
        let running = Cmd::line("true").spawn().unwrap();
        let err = running.until(Duration::from_secs(60), "ready", |_| false).unwrap_err().0;
        assert!(err.contains("ended before ready"), "{err}");
    }
}
