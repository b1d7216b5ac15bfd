//! What is measured, and what it is compared with.

use std::fmt;

use serde::{Serialize, Serializer};

use super::datagrams;
use super::ends::{Link, Setting};
use super::many::{self, Figures};
use super::protocol::{Flow, LARGEST, Path, Target, Verb, Wait, Work};
use super::ways::{self, Waiting, Way, size_name};
use crate::cli::BenchWhat;

/// One line of a table.
pub struct Item {
    /// For `--only`.
    pub id: String,
    pub title: String,
    pub group: Group,
    pub link: Link,
    /// Whether the ends request a CRC.
    pub crc: bool,
    pub work: Measure,
    pub goal: Goal,
    /// What the ends share their processors with.
    pub setting: Setting,
    /// How raw TCP may do the same, if it is compared with it on one connection.
    pub ways: Vec<Way>,
}

impl Item {
    /// The same through memory, if that can carry it. There is no CRC then.
    pub fn over_memory(&self) -> Option<Item> {
        // What is measured with and without a CRC is there once.
        let once = self.group != Group::Bandwidth || !self.crc;
        let has_links = match self.work {
            Measure::Many(figures) => figures.have_links(),
            // They go by UDP on every route.
            Measure::One(Work::Reliable { .. } | Work::ReliableStream { .. }) => false,
            _ => self.group.has_links(),
        };
        (has_links && once).then(|| Item {
            id: format!("memory-{}", self.id.replace("-crc-off", "")),
            title: self.title.replace(", CRC off", ""),
            link: Link::Memory,
            // Of a datagram, it stays.
            crc: self.crc && self.link == Link::Udp,
            goal: match (self.group, self.goal) {
                (Group::Latency, Goal::Budget(words)) => Goal::Budget(words),
                (Group::Latency, _) if self.id == "send-poll" => Goal::AtMost(0.10),
                (Group::Latency, _) if self.id == "write-memory" => Goal::AtMost(0.12),
                (Group::Latency, _) if self.id == "send-asleep" => Goal::AtMost(1.2),
                (Group::Datagrams, _) if self.id == "datagram-64b" => Goal::AtMost(0.15),
                (Group::DatagramRate, _) if self.id == "datagrams-1kib" => Goal::Messages(3e6),
                (Group::Bandwidth, _) => Goal::AtLeast(1.3),
                (Group::Messages, _) if self.id.ends_with("-64kib") => Goal::AtLeast(1.6),
                (Group::Messages, _) => Goal::AtLeast(2.0),
                (Group::Rate, Goal::Messages(_)) => Goal::Messages(8e6),
                (Group::Connections, Goal::AtLeast(_)) => Goal::Budget("no fewer than over TCP"),
                (Group::Memory, _) if self.id == "memory-kernel" => Goal::Budget("4 KiB more than over TCP"),
                (Group::Memory, goal) => goal,
                _ => Goal::Open,
            },
            ways: self.ways.clone(),
            ..*self
        })
    }

    /// The same by reliable datagrams, of what shows how a connection over them is beside one over TCP.
    pub fn over_rd(&self) -> Option<Item> {
        let goal = match self.id.as_str() {
            "send-poll" => "no more than over TCP",
            "send-1mib-crc-off" | "write-1mib-crc-off" => "0.75 of what TCP has",
            "send-1mib-crc-on" | "write-1mib-crc-on" => "0.9 of what TCP has",
            "connect-one" => "2 times as many as over TCP",
            "connect-many" => "3 times as many as over TCP",
            _ => return None,
        };
        Some(Item {
            id: format!("rd-{}", self.id),
            title: self.title.clone(),
            link: Link::Rd,
            goal: Goal::Budget(goal),
            ways: self.ways.clone(),
            ..*self
        })
    }
}

/// What is done for it.
#[derive(Clone, Copy, Debug)]
pub enum Measure {
    /// On the one connection of two ends.
    One(Work),
    /// On many.
    Many(Figures),
    /// With datagrams, beside something else than raw UDP alone.
    Datagrams(datagrams::Figures),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    Latency,
    Transactions,
    Bandwidth,
    Messages,
    Rate,
    Datagrams,
    #[serde(rename = "datagram-rate")]
    DatagramRate,
    #[serde(rename = "datagram-bandwidth")]
    DatagramBandwidth,
    #[serde(rename = "datagram-facts")]
    DatagramFacts,
    Syscalls,
    Connections,
    Memory,
    Crowded,
}

impl Group {
    /// Whether its figures are of messages that memory can carry.
    fn has_links(self) -> bool {
        matches!(
            self,
            Group::Latency
                | Group::Transactions
                | Group::Bandwidth
                | Group::Messages
                | Group::Rate
                | Group::Datagrams
                | Group::DatagramRate
        )
    }

    /// The goal for uwarp's 99th percentile, as a multiple of raw TCP's.
    pub fn tail(self) -> Option<f64> {
        matches!(self, Group::Latency | Group::Transactions | Group::Datagrams | Group::Crowded)
            .then_some(2.0)
    }
}

/// What the project wants. Printed beside the figures, never asserted.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    /// Of raw TCP's time.
    AtMost(f64),
    /// Of raw TCP's throughput.
    AtLeast(f64),
    /// Of raw TCP's throughput T and that of copying with the CRC, F: this share of 1 / (1 + T/F), the
    /// throughput of a stream whose bytes go through both in turn.
    BesideCrc(f64),
    /// A second.
    Messages(f64),
    Budget(&'static str),
    /// None was set.
    Open,
}

impl Goal {
    /// The figure wanted, where T and F are known.
    pub fn ratio(self, raw: f64, copy_crc: Option<f64>) -> Option<f64> {
        match self {
            Goal::AtMost(ratio) | Goal::AtLeast(ratio) => Some(ratio),
            Goal::BesideCrc(share) => Some(share / (1.0 + raw / copy_crc?)),
            Goal::Messages(_) | Goal::Budget(_) | Goal::Open => None,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Goal::AtMost(ratio) => write!(f, "at most {ratio:.2}"),
            Goal::AtLeast(ratio) => write!(f, "at least {ratio:.2}"),
            Goal::BesideCrc(share) => write!(f, "at least {share:.1} / (1 + T/F)"),
            Goal::Messages(rate) => write!(f, "at least {:.1} million/s", rate / 1e6),
            Goal::Budget(words) => f.write_str(words),
            Goal::Open => f.write_str("-"),
        }
    }
}

impl Serialize for Goal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Payload of the small messages.
const SMALL: u32 = 64;
const VERBS: [Verb; 3] = [Verb::Write, Verb::Send, Verb::Read];
/// Messages in flight in a stream; programs such as `ib_write_bw` allow more, smaller ones less.
const WINDOW: u32 = 16;
/// As `ib_write_bw -l 64 -Q 64` has it, with its usual depth of 128.
const LIST: u32 = 64;
const DEPTH: u32 = 128;

/// All items of `what`, in the order in which they are shown.
pub fn items(what: BenchWhat) -> Vec<Item> {
    let wanted = |one: BenchWhat| what == one || what == BenchWhat::All;
    let mut items = Vec::new();
    if wanted(BenchWhat::Latency) {
        latency(&mut items);
    }
    if wanted(BenchWhat::Transactions) {
        transactions(&mut items);
    }
    if wanted(BenchWhat::Bandwidth) {
        bandwidth(&mut items);
    }
    if wanted(BenchWhat::Messages) {
        messages(&mut items);
    }
    if wanted(BenchWhat::Rate) {
        rate(&mut items);
    }
    if wanted(BenchWhat::Datagrams) {
        datagrams(&mut items);
    }
    if wanted(BenchWhat::Syscalls) {
        syscalls(&mut items);
    }
    if wanted(BenchWhat::Connections) {
        let lines = [("connect-one", 300, 1), ("connect-many", 1000, 256)];
        items.extend(lines.map(|(id, count, at_once)| {
            connections(id, Group::Connections, Figures::Open { count, at_once }, Goal::AtLeast(0.7))
        }));
        let figures = Figures::BringUp { count: 1000 };
        let goal = Goal::Budget("the rate of rdma_cm");
        items.push(connections("bring-up", Group::Connections, figures, goal));
    }
    // Only when asked for: its figures say little about a machine that is not crowded.
    if what == BenchWhat::Crowded {
        crowded(&mut items);
    }
    if wanted(BenchWhat::Memory) {
        let lines = [
            ("memory-user", Figures::Memory, Goal::Budget("at most 8 KiB")),
            ("memory-kernel", Figures::Kernel, Goal::Open),
            ("idle-cpu", Figures::Idle, Goal::Budget("none")),
            ("busy-send", Figures::Ping, Goal::Budget("at most 1.10")),
            ("busy-write", Figures::Stream, Goal::Budget("at least 0.90")),
            ("fair", Figures::Fair { count: 1000 }, Goal::Open),
        ];
        items.extend(lines.map(|(id, figures, goal)| connections(id, Group::Memory, figures, goal)));
    }
    items
}

fn latency(items: &mut Vec<Item>) {
    let lines = [
        ("send-poll", "64 B Send, both poll", Wait::Spin, Goal::AtMost(1.10)),
        ("send-event", "64 B Send, both block in ibv_get_cq_event", Wait::Block, Goal::AtMost(1.15)),
        (
            "send-asleep",
            "64 B Send, both asleep in ibv_get_cq_event; two eventfds in place of raw TCP",
            Wait::Late,
            Goal::Open,
        ),
        (
            "send-descriptor",
            "64 B Send, both poll(2) the channel's descriptor",
            Wait::Descriptor,
            Goal::AtMost(2.0),
        ),
        ("write-memory", "64 B Write, both spin on memory", Wait::Memory, Goal::AtMost(1.2)),
        (
            "fetch-add",
            "fetch-and-add, both poll",
            Wait::Answer,
            Goal::Budget("at most 1.15 times the first line's"),
        ),
    ];
    items.extend(lines.map(|(id, title, wait, goal)| Item {
        id: id.into(),
        title: title.into(),
        group: Group::Latency,
        link: Link::Tcp,
        crc: true,
        work: Measure::One(Work::PingPong { wait, size: SMALL }),
        goal,
        setting: Setting::Quiet,
        ways: ways::ping_pong(wait),
    }));
}

fn transactions(items: &mut Vec<Item>) {
    for verb in [Verb::Write, Verb::Read] {
        items.extend([4, 16, 32, 64].map(|kib| {
            let size = kib * 1024;
            Item {
                id: format!("transaction-{}", id_of(verb, size)),
                title: format!("{} {} between request and response", size_name(size), name(verb)),
                group: Group::Transactions,
                link: Link::Tcp,
                crc: true,
                work: Measure::One(Work::Transaction { verb, size }),
                goal: Goal::AtMost(1.0),
                setting: Setting::Quiet,
                ways: ways::transaction(),
            }
        }));
    }
}

fn bandwidth(items: &mut Vec<Item>) {
    const SIZES: [u32; 4] = [64 * 1024, 256 * 1024, 1024 * 1024, LARGEST];
    let stream = |verb, size, crc: bool, target, goal| {
        let switch = if crc { "on" } else { "off" };
        let (suffix, addition) = match target {
            Target::Polls => ("", ""),
            Target::Blocks => ("-blocks", ", target blocks in ibv_get_cq_event"),
            Target::Sleeps => ("-sleeps", ", target sleeps elsewhere"),
        };
        let flow = Flow { verb, size, window: WINDOW, signal: 1 };
        Item {
            id: format!("{}-crc-{switch}{suffix}", id_of(verb, size)),
            title: format!("{} {}s, CRC {switch}{addition}", size_name(size), name(verb)),
            group: Group::Bandwidth,
            link: Link::Tcp,
            crc,
            work: Measure::One(Work::Stream { flow, target }),
            goal,
            setting: Setting::Quiet,
            ways: ways::stream(),
        }
    };
    for (crc, goal) in [(false, Goal::AtLeast(0.95)), (true, Goal::BesideCrc(0.9))] {
        for verb in VERBS {
            items.extend(SIZES.map(|size| stream(verb, size, crc, Target::Polls, goal)));
        }
        if !crc {
            // How much of it depends on the target's polling; one size shows it.
            let others = [Target::Blocks, Target::Sleeps];
            items.extend(others.map(|target| stream(Verb::Write, 1024 * 1024, crc, target, goal)));
        }
    }
}

/// As `ib_write_bw`, `ib_read_bw` and `ib_send_bw` have it by default: up to 8 KiB one work request in a
/// hundred is signalled, above that each. The server of the first two sleeps outside the library, that of the
/// last one polls.
fn messages(items: &mut Vec<Item>) {
    for verb in VERBS {
        items.extend([4, 16, 64].map(|kib| {
            let size = kib * 1024;
            let target = if verb == Verb::Send { Target::Polls } else { Target::Sleeps };
            let signal = if size <= 8 * 1024 { 100 } else { 1 };
            let flow = Flow { verb, size, window: DEPTH, signal };
            Item {
                id: format!("message-{}", id_of(verb, size)),
                title: format!("{} {}s, as ib_{}_bw", size_name(size), name(verb), name(verb).to_lowercase()),
                group: Group::Messages,
                link: Link::Tcp,
                crc: true,
                work: Measure::One(Work::Stream { flow, target }),
                goal: Goal::AtLeast(0.9),
                setting: Setting::Quiet,
                ways: ways::messages(size),
            }
        }));
    }
}

fn rate(items: &mut Vec<Item>) {
    let lines = [
        ("rate", "64 B Writes in lists of 64, target polls", Target::Polls, 5e6),
        ("rate-sleeps", "64 B Writes in lists of 64, target sleeps elsewhere", Target::Sleeps, 4e6),
    ];
    items.extend(lines.map(|(id, title, target, least)| Item {
        id: id.into(),
        title: title.into(),
        group: Group::Rate,
        link: Link::Tcp,
        crc: true,
        work: Measure::One(Work::Rate { size: SMALL, list: LIST, depth: DEPTH, target }),
        goal: Goal::Messages(least),
        setting: Setting::Quiet,
        ways: ways::lists(SMALL * LIST, SMALL * DEPTH),
    }));
}

fn datagrams(items: &mut Vec<Item>) {
    let item = |id: &str, title, group, work, goal, ways| Item {
        id: id.into(),
        title,
        group,
        link: Link::Udp,
        crc: true,
        work,
        goal,
        setting: Setting::Quiet,
        ways,
    };
    for (id, size) in [("datagram-64b", 64), ("datagram-256b", 256), ("datagram-1kib", 1024)] {
        let work = Measure::One(Work::Datagram { size });
        let title = format!("{} datagram, both poll", size_name(size));
        let ways = ways::ping_pong(Wait::Spin);
        items.push(item(id, title, Group::Datagrams, work, Goal::AtMost(1.15), ways));
    }
    for (id, size) in [("reliable-64b", 64), ("reliable-1kib", 1024)] {
        let work = Measure::One(Work::Reliable { size });
        let title = format!("{} reliable datagram, both poll", size_name(size));
        let ways = ways::ping_pong(Wait::Spin);
        items.push(item(id, title, Group::Datagrams, work, Goal::AtMost(1.25), ways));
    }
    let work = Measure::One(Work::ReliableStream { size: 1 << 20, window: 8, wait: Wait::Spin });
    let title = "1 MiB reliable messages, each posted alone".to_owned();
    let group = Group::DatagramBandwidth;
    items.push(item("reliable-1mib", title, group, work, Goal::AtLeast(0.7), ways::joined_datagrams()));
    let lines = [("datagrams-1kib", 1, "each posted alone"), ("datagrams-1kib-lists", 32, "in lists of 32")];
    for (id, list, how) in lines {
        let work = Measure::One(Work::Datagrams { size: 1024, list, depth: DEPTH });
        let title = format!("1 KiB datagrams, {how}");
        let ways = ways::datagrams(list);
        items.push(item(id, title, Group::DatagramRate, work, Goal::AtLeast(0.9), ways));
    }
    let facts = [
        ("datagram-beside-64b", datagrams::Figures::BesideConnection { size: 64 }),
        ("datagram-beside-1kib", datagrams::Figures::BesideConnection { size: 1024 }),
        ("datagram-peers", datagrams::Figures::Peers),
    ];
    for (id, figures) in facts {
        let goal = match figures {
            datagrams::Figures::BesideConnection { .. } => "at most 0.80, or 0.8 of the gap",
            datagrams::Figures::Peers => "less than 1 MiB",
        };
        let (title, work) = (datagrams::titled(figures), Measure::Datagrams(figures));
        items.push(item(id, title, Group::DatagramFacts, work, Goal::Budget(goal), Vec::new()));
    }
}

fn syscalls(items: &mut Vec<Item>) {
    let lines = [
        ("post-idle", "ibv_post_send, 64 B Send, idle connection", Path::PostIdle, "1 sendmsg"),
        (
            "post-list",
            "ibv_post_send, list of 64 Writes of 64 B",
            Path::PostList,
            "as few as the socket takes",
        ),
        (
            "post-large",
            "ibv_post_send, 1 MiB Write, until it is completed",
            Path::PostLarge,
            "as few as the socket takes",
        ),
        ("poll-waiting", "ibv_poll_cq, a message waits", Path::PollWaiting, "1 receive"),
        ("poll-empty", "ibv_poll_cq, nothing waits", Path::PollEmpty, "at most 1"),
        ("event", "ibv_get_cq_event to the message's completion", Path::Event, "1 wait, 1 receive"),
    ];
    items.extend(lines.map(|(id, title, path, budget)| Item {
        id: id.into(),
        title: title.into(),
        group: Group::Syscalls,
        link: Link::Tcp,
        crc: true,
        work: Measure::One(Work::Path(path)),
        goal: Goal::Budget(budget),
        setting: Setting::Quiet,
        ways: Vec::new(),
    }));
}

fn connections(id: &str, group: Group, figures: Figures, goal: Goal) -> Item {
    let title = many::titled(figures);
    let (work, setting) = (Measure::Many(figures), Setting::Quiet);
    Item { id: id.into(), title, group, link: Link::Tcp, crc: true, work, goal, setting, ways: Vec::new() }
}

/// The ping-pong where processors are few or slow, beside raw TCP that spins and that blocks.
fn crowded(items: &mut Vec<Item>) {
    let settings = [
        ("one", "on one processor", Setting::OneProcessor),
        ("busy", "beside a loop for each processor", Setting::Crowded),
        ("emulated", "emulated by qemu-user", Setting::Emulated),
    ];
    let waits = [("poll", "both poll", Wait::Spin), ("event", "both block", Wait::Block)];
    let beside = [("spins", Waiting::Spin), ("blocks", Waiting::Block)];
    for (place, where_, setting) in settings {
        for (way, how, wait) in waits {
            items.extend(beside.map(|(name, waiting)| Item {
                id: format!("{place}-{way}-beside-{name}"),
                title: format!("64 B Send {where_}, {how}; raw TCP {name}"),
                group: Group::Crowded,
                link: Link::Tcp,
                crc: true,
                work: Measure::One(Work::PingPong { wait, size: SMALL }),
                goal: match (setting, wait, waiting) {
                    (Setting::OneProcessor, Wait::Spin, Waiting::Block) => Goal::AtMost(1.2),
                    (Setting::Emulated, Wait::Spin, Waiting::Spin) => Goal::AtMost(1.6),
                    _ => Goal::Open,
                },
                setting,
                ways: vec![Way::Wait(waiting)],
            }));
        }
    }
}

fn name(verb: Verb) -> &'static str {
    match verb {
        Verb::Write => "Write",
        Verb::Read => "Read",
        Verb::Send => "Send",
    }
}

fn id_of(verb: Verb, size: u32) -> String {
    format!("{}-{}", name(verb), size_name(size).replace(' ', "")).to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique() {
        let memory = |item: &Item| item.over_memory().map(|item| item.id);
        let items = items(BenchWhat::All);
        let mut ids: Vec<_> = items.iter().filter_map(memory).collect();
        ids.extend(items.iter().filter_map(|item| item.over_rd().map(|item| item.id)));
        ids.extend(items.into_iter().map(|item| item.id));
        let count = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), count);
        for id in ["write-64kib-crc-off", "memory-write-64kib", "memory-rate", "rd-send-poll"] {
            assert!(ids.contains(&id.to_owned()), "{id}");
        }
    }

    #[test]
    fn crc_goal_is_that_of_two_stages_in_turn() {
        let goal = Goal::BesideCrc(0.9).ratio(5.0, Some(20.0)).unwrap();
        assert!((goal - 0.72).abs() < 1e-9);
        assert_eq!(Goal::BesideCrc(0.9).ratio(5.0, None), None);
    }
}
