//! `uwarp stat`: what the processes of this user do over uwarp, as they report it.
//!
//! Each has a Unix socket in the abstract namespace (`uwarp-driver`'s `stat`), which /proc/net/unix lists.
//! Any user can take such a name, so the answering process is checked first.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::os::linux::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use comfy_table::Table;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use uwarp_driver::credentials::Credentials;

use crate::cli::StatArgs;
use crate::{complain, table};

/// As in the library.
const NAME: &str = "uwarp-stat-";
/// How long a process may take to answer: one that is stopped never does.
const PATIENCE: Duration = Duration::from_secs(1);
/// Shown for a process that takes longer.
const SILENT: &str = "does not answer; it may be stopped";

pub fn run(args: &StatArgs) -> ExitCode {
    let mut before = Seen::default();
    loop {
        let begin = Instant::now();
        let processes = match query_all(&args.pid) {
            Ok(processes) => processes,
            Err(error) => {
                complain(&format_args!(
                    "cannot read /proc/net/unix, which names the programs: {error}. Mount /proc"
                ));
                return ExitCode::FAILURE;
            }
        };
        let text = match args.json {
            true => json(&processes).to_string(),
            false => text(&processes, &before, args),
        };
        let missing = |pid: &&u32| !processes.iter().any(|process| process.pid == **pid);
        let missing: Vec<_> = args.pid.iter().filter(missing).collect();
        for pid in missing.iter().filter(|_| args.watch.is_none()) {
            complain(&absent(**pid));
        }
        if let (Some(_), false) = (args.watch, args.json) {
            clear();
        }
        let mut out = io::stdout().lock();
        let written = if text.is_empty() { Ok(()) } else { writeln!(out, "{text}") };
        match written.and_then(|()| out.flush()) {
            Ok(()) => {}
            // The reader has gone.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
            Err(error) => {
                complain(&format_args!("cannot write to standard output: {error}"));
                return ExitCode::FAILURE;
            }
        }
        let Some(interval) = args.watch else {
            let silent = |process: &Process| args.pid.contains(&process.pid) && process.answer.is_err();
            let all = missing.is_empty() && !processes.iter().any(silent);
            return if all { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        };
        before = Seen::new(&processes);
        std::thread::sleep(Duration::from_secs_f64(interval).saturating_sub(begin.elapsed()));
    }
}

/// On a terminal, a new table replaces the old one; elsewhere they follow each other.
fn clear() {
    if io::stdout().is_terminal() {
        print!("\x1b[H\x1b[2J");
    }
}

/// A process and its queue pairs.
struct Process {
    pid: u32,
    command: String,
    answer: Result<Answer, String>,
}

struct Answer {
    head: Map<String, Value>,
    /// As received: fields that a newer library adds appear in the JSON.
    lines: Vec<Map<String, Value>>,
    pairs: Vec<Pair>,
    totals: Counters,
    /// Datagrams that were dropped, by reason, as the library names it.
    drops: BTreeMap<String, u64>,
    seconds: f64,
}

#[derive(Deserialize)]
struct Head {
    seconds: f64,
    departed: Counters,
    #[serde(default)]
    departed_drops: BTreeMap<String, u64>,
    /// Datagrams that reached no queue pair.
    #[serde(default)]
    unclaimed: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct Pair {
    qpn: u32,
    /// Older libraries do not report it.
    #[serde(default)]
    service: String,
    state: String,
    peer: Option<String>,
    /// Not known of every peer, and older libraries do not report it.
    #[serde(default)]
    peer_qpn: Option<u32>,
    /// What carries its stream; older libraries do not report it, and one without a stream has none.
    #[serde(default)]
    link: Option<String>,
    /// Why that is TCP, although the peer is on this host.
    #[serde(default)]
    why_tcp: Option<String>,
    #[serde(flatten)]
    counters: Counters,
    reads_outstanding: u64,
    stalled: bool,
    /// Older libraries do not report it.
    #[serde(default)]
    muted: bool,
    #[serde(default)]
    drops: BTreeMap<String, u64>,
    /// Processes of this host that its datagrams may reach by memory.
    #[serde(default)]
    peers: Vec<Peer>,
}

/// One that datagrams go to.
#[derive(Deserialize)]
struct Peer {
    peer: String,
    link: String,
    /// Why that is UDP.
    #[serde(default)]
    why: Option<String>,
}

#[derive(Clone, Copy, Default, Serialize, Deserialize)]
struct Counters {
    sent: ByOpcode,
    received: ByOpcode,
    receive_stalls: u64,
    room_stalls: u64,
    /// Older libraries do not report it.
    #[serde(default)]
    retransmits: u64,
    terminates_sent: u64,
    terminates_received: u64,
    failed: u64,
    flushed: u64,
}

#[derive(Clone, Copy, Default, Serialize, Deserialize)]
struct ByOpcode {
    send: Messages,
    write: Messages,
    read_response: Messages,
    /// Older libraries do not report it.
    #[serde(default)]
    atomic_response: Messages,
}

#[derive(Clone, Copy, Default, Serialize, Deserialize)]
struct Messages {
    messages: u64,
    bytes: u64,
}

impl ByOpcode {
    fn all(&self) -> Messages {
        [self.send, self.write, self.read_response, self.atomic_response]
            .into_iter()
            .fold(Messages::default(), Messages::plus)
    }

    fn plus(self, other: Self) -> Self {
        Self {
            send: self.send.plus(other.send),
            write: self.write.plus(other.write),
            read_response: self.read_response.plus(other.read_response),
            atomic_response: self.atomic_response.plus(other.atomic_response),
        }
    }
}

impl Messages {
    fn plus(self, other: Self) -> Self {
        Self { messages: self.messages + other.messages, bytes: self.bytes + other.bytes }
    }

    fn since(self, before: Self) -> Self {
        Self {
            messages: self.messages.saturating_sub(before.messages),
            bytes: self.bytes.saturating_sub(before.bytes),
        }
    }
}

impl Counters {
    fn plus(self, other: Self) -> Self {
        Self {
            sent: self.sent.plus(other.sent),
            received: self.received.plus(other.received),
            receive_stalls: self.receive_stalls + other.receive_stalls,
            room_stalls: self.room_stalls + other.room_stalls,
            retransmits: self.retransmits + other.retransmits,
            terminates_sent: self.terminates_sent + other.terminates_sent,
            terminates_received: self.terminates_received + other.terminates_received,
            failed: self.failed + other.failed,
            flushed: self.flushed + other.flushed,
        }
    }

    fn moved(&self) -> u64 {
        self.sent.all().bytes + self.received.all().bytes
    }
}

/// All processes of this user, or the requested ones, in the order of their numbers.
fn query_all(wanted: &[u32]) -> io::Result<Vec<Process>> {
    // In a container, a process has another number than the one that we see, and its socket's name has that.
    let named: Vec<_> = wanted.iter().flat_map(|pid| numbers(*pid)).collect();
    let is_wanted = |pid: &u32, list: &[u32]| wanted.is_empty() || list.contains(pid);
    let mut processes: Vec<_> = names()?
        .into_iter()
        .filter(|(pid, _)| is_wanted(pid, &named))
        .filter_map(|(pid, name)| query(pid, &name))
        .filter(|process| is_wanted(&process.pid, wanted))
        .collect();
    // A process may have several names, of which another user has taken some.
    processes.sort_by_key(|process| (process.pid, process.answer.is_err()));
    processes.dedup_by_key(|process| process.pid);
    Ok(processes)
}

/// The numbers of a process: here, and in each PID namespace below that it is in.
fn numbers(pid: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    let inner = line.split_whitespace().filter_map(|number| number.parse().ok());
    std::iter::once(pid).chain(inner.filter(|number| *number != pid)).collect()
}

/// Processes by the number that their socket's name has, with this name.
fn names() -> io::Result<Vec<(u32, String)>> {
    let uid = rustix::process::getuid().as_raw().to_string();
    let text = fs::read_to_string("/proc/net/unix")?;
    let mut names: Vec<_> = text
        .lines()
        .filter_map(|line| {
            let name = line.split_whitespace().last()?.strip_prefix('@')?;
            let mut parts = name.strip_prefix(NAME)?.split('-');
            (parts.next()? == uid).then_some(())?;
            Some((parts.next()?.parse().ok()?, name.to_owned()))
        })
        .collect();
    // Connections that are being answered have the same name.
    names.sort();
    names.dedup();
    Ok(names)
}

/// `None`: the process has ended, or it belongs to another user. `pid`: the number that the process has in
/// its own namespace.
fn query(pid: u32, name: &str) -> Option<Process> {
    let socket = match connect(name) {
        Ok(socket) => socket,
        Err(Errno::AGAIN) => {
            // Its backlog is full; only its name shows which process it is.
            let owner = fs::metadata(format!("/proc/{pid}")).ok()?.st_uid();
            let ours = owner == rustix::process::getuid().as_raw();
            return ours.then_some(Process { pid, command: command(pid)?, answer: Err(SILENT.to_owned()) });
        }
        Err(_) => return None,
    };
    let peer = Credentials::of_peer(&socket)?;
    if peer.uid != rustix::process::getuid().as_raw() {
        return None;
    }
    let pid = peer.pid?;
    let command = command(pid)?;
    socket.set_read_timeout(Some(PATIENCE)).ok()?;
    let answer = read(socket).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => SILENT.to_owned(),
        _ => format!("does not answer: {error}"),
    });
    Some(Process { pid, command, answer })
}

/// Why this process has not answered.
fn absent(pid: u32) -> String {
    let directory = format!("/proc/{pid}");
    let (Ok(metadata), Some(command)) = (fs::metadata(&directory), command(pid)) else {
        return format!("there is no process {pid}");
    };
    let owner = metadata.st_uid();
    if owner != rustix::process::getuid().as_raw() {
        return format!(
            "process {pid} ({command}) is of user {owner}, and `uwarp stat` shows the processes of its own \
             user: sudo -u '#{owner}' uwarp stat --pid {pid}"
        );
    }
    let namespace = |of: &str| fs::read_link(format!("/proc/{of}/ns/net")).ok();
    // (A process that is ending has none.)
    if namespace(&pid.to_string()).is_some_and(|theirs| namespace("self") != Some(theirs)) {
        return format!(
            "process {pid} ({command}) is in another network namespace: nsenter -t {pid} -n uwarp stat \
             --pid {pid}"
        );
    }
    format!(
        "process {pid} ({command}) has opened no device of uwarp, or runs with --stat off. Was it started by \
         `uwarp run`?"
    )
}

fn command(pid: u32) -> Option<String> {
    Some(fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim_end().to_owned())
}

/// Connects without waiting. `AGAIN`: the backlog is full.
fn connect(name: &str) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    net::connect(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    rustix::io::ioctl_fionbio(&fd, false)?;
    Ok(UnixStream::from(fd))
}

fn read(socket: UnixStream) -> io::Result<Answer> {
    let mut lines = BufReader::new(socket).lines();
    let first = lines.next().ok_or(io::ErrorKind::UnexpectedEof)??;
    let Head { seconds, departed, departed_drops, unclaimed } = serde_json::from_str(&first)?;
    let mut answer = Answer {
        head: serde_json::from_str(&first)?,
        lines: Vec::new(),
        pairs: Vec::new(),
        totals: departed,
        drops: unclaimed,
        seconds,
    };
    add(&mut answer.drops, &departed_drops);
    for line in lines {
        let line = line?;
        let pair: Pair = serde_json::from_str(&line)?;
        answer.totals = answer.totals.plus(pair.counters);
        add(&mut answer.drops, &pair.drops);
        answer.pairs.push(pair);
        answer.lines.push(serde_json::from_str(&line)?);
    }
    Ok(answer)
}

fn add(to: &mut BTreeMap<String, u64>, more: &BTreeMap<String, u64>) {
    for (reason, count) in more {
        *to.entry(reason.clone()).or_default() += count;
    }
}

/// The reasons with their numbers, most frequent first, such as "12 no receive, 1 qkey".
fn reasons(drops: &BTreeMap<String, u64>) -> Vec<String> {
    let mut drops: Vec<_> = drops.iter().filter(|(_, count)| **count > 0).collect();
    drops.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    drops.iter().map(|(reason, count)| format!("{count} {}", reason.replace('_', " "))).collect()
}

fn json(processes: &[Process]) -> Value {
    let processes = processes.iter().map(|process| {
        let mut object = Map::new();
        object.insert("pid".into(), process.pid.into());
        object.insert("command".into(), process.command.clone().into());
        match &process.answer {
            Err(error) => drop(object.insert("failure".into(), error.clone().into())),
            Ok(answer) => {
                // The process's own number may be of another namespace.
                let head = answer.head.iter().filter(|(name, _)| *name != "pid" && *name != "queue_pairs");
                object.extend(head.map(|(name, value)| (name.clone(), value.clone())));
                object.insert("totals".into(), serde_json::to_value(answer.totals).unwrap_or_default());
                object.insert("drops".into(), serde_json::to_value(&answer.drops).unwrap_or_default());
                let lines = answer.lines.iter().cloned().map(Value::Object).collect();
                object.insert("queue_pairs".into(), Value::Array(lines));
            }
        }
        Value::Object(object)
    });
    serde_json::json!({ "processes": processes.collect::<Vec<_>>() })
}

/// Counters of the last query, by process and queue pair, for rates.
#[derive(Default)]
struct Seen {
    at: Option<Instant>,
    pairs: BTreeMap<(u32, u32), Counters>,
    totals: BTreeMap<u32, Counters>,
}

impl Seen {
    fn new(processes: &[Process]) -> Seen {
        let mut seen = Seen { at: Some(Instant::now()), ..Seen::default() };
        for process in processes {
            let Ok(answer) = &process.answer else { continue };
            seen.totals.insert(process.pid, answer.totals);
            seen.pairs.extend(answer.pairs.iter().map(|pair| ((process.pid, pair.qpn), pair.counters)));
        }
        seen
    }
}

fn text(processes: &[Process], before: &Seen, args: &StatArgs) -> String {
    if processes.is_empty() && !args.pid.is_empty() {
        return String::new();
    }
    if processes.is_empty() {
        return "No process of yours uses uwarp.".to_owned();
    }
    let blocks: Vec<_> = processes.iter().map(|process| block(process, before, args)).collect();
    blocks.join("\n\n")
}

/// What a process has moved, or moves in a second if it was queried before.
struct Rates {
    elapsed: Option<f64>,
}

impl Rates {
    fn cells(&self, now: Messages, then: Option<Messages>) -> [String; 2] {
        let (messages, bytes) = match (self.elapsed, then) {
            (Some(elapsed), Some(then)) if elapsed > 0.0 => {
                let Messages { messages, bytes } = now.since(then);
                (messages as f64 / elapsed, bytes as f64 / elapsed)
            }
            _ => (now.messages as f64, now.bytes as f64),
        };
        [number(messages), size(bytes)]
    }

    /// Titles of the columns.
    fn titles(&self) -> [String; 4] {
        let per = if self.elapsed.is_some() { "/s" } else { "" };
        ["sent", "bytes", "received", "bytes"].map(|title| format!("{title}{per}"))
    }
}

fn block(process: &Process, before: &Seen, args: &StatArgs) -> String {
    let Process { pid, command, answer } = process;
    let answer = match answer {
        Ok(answer) => answer,
        Err(error) => return format!("{command} ({pid}): {error}"),
    };
    let count = answer.pairs.len();
    let plural = if count == 1 { "" } else { "s" };
    let mut text =
        format!("{command} ({pid}): {count} queue pair{plural}, open for {:.0} s\n", answer.seconds);
    let rates = Rates { elapsed: before.at.map(|at| at.elapsed().as_secs_f64()) };
    if let Some(opcodes) = opcodes(answer, before.totals.get(pid), &rates) {
        text.push_str(&format!("{}\n", table::text(opcodes)));
    }
    let dropped = reasons(&answer.drops);
    if !dropped.is_empty() {
        text.push_str(&format!("datagrams dropped: {}\n", dropped.join(", ")));
    }

    // The busiest first: these matter most if there are thousands.
    let mut pairs: Vec<_> = answer.pairs.iter().collect();
    let before = |pair: &Pair| before.pairs.get(&(*pid, pair.qpn));
    let moved = |pair: &Pair| {
        let then = before(pair).map_or(0, Counters::moved);
        pair.counters.moved().saturating_sub(then)
    };
    pairs.sort_by_key(|pair| (std::cmp::Reverse(moved(pair)), pair.qpn));
    let shown = pairs.len().min(args.top);
    if shown > 0 {
        let titles = ["queue pair", "service", "state", "peer"].map(str::to_owned).into_iter();
        let titles = titles.chain(rates.titles());
        let titles = titles.chain(["reads out", "stalls", "resent", "errors"].map(str::to_owned));
        let mut titles: Vec<_> = titles.collect();
        let of_pair = |pair: &&Pair| row(pair, before(pair), |now, then| rates.cells(now, then));
        let mut rows: Vec<_> = pairs.iter().take(shown).map(of_pair).collect();
        let notes = if table::fits(&titles, &rows) { Vec::new() } else { narrow(&mut titles, &mut rows) };
        let mut table = table::new(&titles);
        table.add_rows(rows);
        table::align(&mut table, titles.iter().position(|title| title.starts_with("sent")).unwrap_or(0));
        text.push_str(&table::text(table));
        notes.iter().for_each(|note| text.push_str(&format!("\n{note}")));
    }
    if shown < pairs.len() {
        text.push_str(&format!("\nand {} more; --top shows more of them", pairs.len() - shown));
    }
    text.trim_end().to_owned()
}

/// For a terminal that is too narrow: the table keeps the state and the traffic, and the other columns become
/// a line for each queue pair that has something there. Those lines are returned.
fn narrow(titles: &mut Vec<String>, rows: &mut [Vec<String>]) -> Vec<String> {
    const PEER: usize = 3;
    const BEHIND_TRAFFIC: usize = 8;
    let taken = |from: &mut Vec<String>| {
        let mut taken = from.split_off(BEHIND_TRAFFIC);
        taken.insert(0, from.remove(PEER));
        taken
    };
    let titles = taken(titles);
    let note = |row: &mut Vec<String>| {
        let cells = titles.iter().zip(taken(row)).filter(|(_, cell)| cell != "-" && cell != "0");
        let words: Vec<_> = cells.map(|(title, cell)| format!("{title} {cell}")).collect();
        (!words.is_empty()).then(|| format!("{}: {}", row[0], words.join("; ")))
    };
    rows.iter_mut().filter_map(note).collect()
}

/// A row for each kind of message that there was.
fn opcodes(answer: &Answer, then: Option<&Counters>, rates: &Rates) -> Option<Table> {
    type Of = fn(&ByOpcode) -> Messages;
    let opcodes: [(&str, Of); 4] = [
        ("Send", |by| by.send),
        ("Write", |by| by.write),
        ("Read Response", |by| by.read_response),
        ("Atomic Response", |by| by.atomic_response),
    ];
    let titles: Vec<_> = std::iter::once(String::new()).chain(rates.titles()).collect();
    let mut table = table::new(&titles);
    let totals = &answer.totals;
    let some = |of: &Of| of(&totals.sent).plus(of(&totals.received)).messages > 0;
    let opcodes: Vec<_> = opcodes.into_iter().filter(|(_, of)| some(of)).collect();
    if opcodes.is_empty() {
        return None;
    }
    for (name, of) in opcodes {
        let [sent, sent_bytes] = rates.cells(of(&answer.totals.sent), then.map(|then| of(&then.sent)));
        let [received, received_bytes] =
            rates.cells(of(&answer.totals.received), then.map(|then| of(&then.received)));
        table.add_row([name.to_owned(), sent, sent_bytes, received, received_bytes]);
    }
    table::align(&mut table, 1);
    Some(table)
}

fn row(
    pair: &Pair,
    then: Option<&Counters>,
    cells: impl Fn(Messages, Option<Messages>) -> [String; 2],
) -> Vec<String> {
    let counters = &pair.counters;
    let state = match (pair.stalled, pair.muted) {
        (true, _) => format!("{}, stalled", pair.state),
        (_, true) => format!("{}, waits for the peer's first message", pair.state),
        _ => pair.state.clone(),
    };
    let stalls = match (counters.receive_stalls, counters.room_stalls) {
        (0, 0) => "-".to_owned(),
        (receive, 0) => format!("{receive} receive"),
        (0, room) => format!("{room} room"),
        (receive, room) => format!("{receive} receive, {room} room"),
    };
    let errors = [
        (counters.failed, "failed"),
        (counters.flushed, "flushed"),
        (counters.terminates_sent, "Terminate sent"),
        (counters.terminates_received, "Terminate received"),
    ];
    let mut errors: Vec<_> = errors
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{count} {what}"))
        .collect();
    let drops = reasons(&pair.drops);
    if !drops.is_empty() {
        errors.push(format!("dropped: {}", drops.join(", ")));
    }
    let address = pair.peer.clone().unwrap_or_else(|| "-".to_owned());
    let peer = pair.peer_qpn.map_or_else(|| address.clone(), |number| format!("{address} {number:#08x}"));
    let peer = match (pair.link.as_deref(), &pair.why_tcp) {
        (None, None) if !pair.peers.is_empty() => by_memory(&pair.peers),
        (_, Some(why)) => format!("{peer} by tcp: {why}"),
        (Some(link), None) if link != "tcp" => format!("{peer} by {link}"),
        _ => peer,
    };
    let mut row = vec![format!("{:#08x}", pair.qpn), pair.service.clone(), state, peer];
    row.extend(cells(counters.sent.all(), then.map(|then| then.sent.all())));
    row.extend(cells(counters.received.all(), then.map(|then| then.received.all())));
    row.push(pair.reads_outstanding.to_string());
    row.push(stalls);
    row.push(match counters.retransmits {
        0 => "-".to_owned(),
        segments => number(segments as f64),
    });
    row.push(if errors.is_empty() { "-".to_owned() } else { errors.join(", ") });
    row
}

/// The processes of this host that datagrams go to, and how they go there.
fn by_memory(peers: &[Peer]) -> String {
    match peers {
        [Peer { peer, link, why: Some(why) }] => format!("{peer} by {link}: {why}"),
        [Peer { peer, link, why: None }] => format!("{peer} by {link}"),
        _ => {
            let by_memory = peers.iter().filter(|peer| peer.link == "memory").count();
            format!("{} ports of this host, {by_memory} by memory", peers.len())
        }
    }
}

/// Such as 950, 12.3k, 4.56M.
fn number(value: f64) -> String {
    scaled(value, &["", "k", "M", "G", "T", "P", "E"])
}

/// Such as 950 B, 12.3 kB, 4.56 GB.
fn size(value: f64) -> String {
    scaled(value, &[" B", " kB", " MB", " GB", " TB", " PB", " EB"])
}

fn scaled(mut value: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 => 0,
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$}{}", units.get(unit).unwrap_or(&""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_a_full_queue_keeps_nobody_waiting() {
        let pid = std::process::id();
        let name = format!("{NAME}{}-{pid}-full", rustix::process::getuid().as_raw());
        let fd =
            net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        net::bind(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
        net::listen(&fd, 1).unwrap();
        let waiting: Vec<_> = std::iter::from_fn(|| connect(&name).ok()).take(100).collect();
        assert!(waiting.len() < 100);
        let found = query_all(&[pid]).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].answer.as_ref().err().map(String::as_str), Some(SILENT));
    }

    /// At 80 columns each letter of an error had a line of its own.
    #[test]
    fn a_narrow_table_has_the_traffic_and_lines_below_it() {
        let words = |text: &str| text.split('|').map(str::to_owned).collect::<Vec<_>>();
        let mut titles =
            words("queue pair|service|state|peer|sent|bytes|received|bytes|reads out|stalls|resent|errors");
        let mut rows = [
            words("0xa9a501|UD|RTS|-|0|0 B|0|0 B|0|-|-|dropped: 4 no receive, 1 qkey"),
            words("0xa9a502|RC|RTS|192.0.2.1:4000 0xa9a503|7|7 B|0|0 B|0|2 room|-|-"),
            words("0xa9a504|RC|INIT|-|0|0 B|0|0 B|0|-|-|-"),
        ];
        assert!(!table::fits_in(Some(80), &titles, &rows));
        assert!(table::fits_in(None, &titles, &rows) && table::fits_in(Some(180), &titles, &rows));
        let notes = narrow(&mut titles, &mut rows);
        assert_eq!(
            notes,
            [
                "0xa9a501: errors dropped: 4 no receive, 1 qkey",
                "0xa9a502: peer 192.0.2.1:4000 0xa9a503; stalls 2 room"
            ]
        );
        assert_eq!(titles, words("queue pair|service|state|sent|bytes|received|bytes"));
        assert_eq!(rows[1], words("0xa9a502|RC|RTS|7|7 B|0|0 B"));
        assert!(table::fits_in(Some(80), &titles, &rows));
    }

    #[test]
    fn drops_are_told_by_reason_the_most_frequent_first() {
        let mut drops = BTreeMap::from([("qkey".to_owned(), 1), ("state".to_owned(), 0)]);
        add(&mut drops, &BTreeMap::from([("no_receive".to_owned(), 12), ("qkey".to_owned(), 2)]));
        assert_eq!(reasons(&drops), ["12 no receive", "3 qkey"]);
    }

    #[test]
    fn numbers_keep_three_digits() {
        let texts = [0.0, 7.0, 999.0, 999.6, 1234.0, 12_345.0, 123_456.0, 2.5e9].map(number);
        assert_eq!(texts, ["0", "7", "999", "1.00k", "1.23k", "12.3k", "123k", "2.50G"]);
        assert_eq!(size(2048.0), "2.05 kB");
    }
}
