//! What is measured, and what it is held against.

use std::fmt;

use serde::{Serialize, Serializer};

use super::many::{self, Figures};
use super::protocol::{LARGEST, Path, Target, Wait, Work};
use crate::cli::BenchWhat;

/// One line of a table.
pub struct Item {
    /// For `--only`.
    pub id: String,
    pub title: String,
    pub group: Group,
    /// Whether the ends ask for a CRC.
    pub crc: bool,
    pub work: Measure,
    pub goal: Goal,
}

/// What is done for it.
#[derive(Clone, Copy, Debug)]
pub enum Measure {
    /// On the one connection of two ends.
    One(Work),
    /// On many.
    Many(Figures),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    Latency,
    Bandwidth,
    Rate,
    Syscalls,
    Connections,
    Memory,
}

/// What the project wants. Printed beside the figures, never asserted.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    /// Of raw TCP's time.
    AtMost(f64),
    /// Of raw TCP's throughput.
    AtLeast(f64),
    /// Of raw TCP's throughput T and the CRC's own C: this share of 1 / (1 + T/C), the throughput of a
    /// stream whose bytes go through both in turn.
    BesideCrc(f64),
    /// A second.
    Messages(f64),
    Budget(&'static str),
    /// None was set.
    Open,
}

impl Goal {
    /// The figure wanted, where T and C are known.
    pub fn ratio(self, raw: f64, crc: Option<f64>) -> Option<f64> {
        match self {
            Goal::AtMost(ratio) | Goal::AtLeast(ratio) => Some(ratio),
            Goal::BesideCrc(share) => Some(share / (1.0 + raw / crc?)),
            Goal::Messages(_) | Goal::Budget(_) | Goal::Open => None,
        }
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Goal::AtMost(ratio) => write!(f, "at most {ratio:.2}"),
            Goal::AtLeast(ratio) => write!(f, "at least {ratio:.2}"),
            Goal::BesideCrc(share) => write!(f, "at least {share:.1} / (1 + T/C)"),
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
/// Writes under way in a stream; programs such as `ib_write_bw` allow more, smaller ones less.
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
    if wanted(BenchWhat::Bandwidth) {
        bandwidth(&mut items);
    }
    if wanted(BenchWhat::Rate) {
        rate(&mut items);
    }
    if wanted(BenchWhat::Syscalls) {
        syscalls(&mut items);
    }
    if wanted(BenchWhat::Connections) {
        let lines = [("connect-one", 300, 1), ("connect-many", 1000, 256)];
        items.extend(lines.map(|(id, count, at_once)| {
            connections(id, Group::Connections, Figures::Open { count, at_once }, Goal::Open)
        }));
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
        ("send-poll", "64 B Send, both poll", Wait::Spin, 1.10),
        ("send-event", "64 B Send, both block in ibv_get_cq_event", Wait::Block, 1.15),
        ("send-descriptor", "64 B Send, both poll(2) the channel's descriptor", Wait::Descriptor, 2.0),
        ("write-memory", "64 B Write, both spin on memory", Wait::Memory, 1.8),
    ];
    items.extend(lines.map(|(id, title, wait, most)| Item {
        id: id.into(),
        title: title.into(),
        group: Group::Latency,
        crc: true,
        work: Measure::One(Work::PingPong { wait, size: SMALL }),
        goal: Goal::AtMost(most),
    }));
}

fn bandwidth(items: &mut Vec<Item>) {
    const SIZES: [u32; 4] = [64 * 1024, 256 * 1024, 1024 * 1024, LARGEST];
    let stream = |size, crc: bool, target, goal| {
        let switch = if crc { "on" } else { "off" };
        let (suffix, addition) = match target {
            Target::Polls => ("", ""),
            Target::Blocks => ("-blocks", ", target blocks in ibv_get_cq_event"),
            Target::Sleeps => ("-sleeps", ", target sleeps elsewhere"),
        };
        let name = size_name(size);
        Item {
            id: format!("write-{}-crc-{switch}{suffix}", name.replace(' ', "").to_lowercase()),
            title: format!("{name} Writes, CRC {switch}{addition}"),
            group: Group::Bandwidth,
            crc,
            work: Measure::One(Work::Stream { size, window: WINDOW, target }),
            goal,
        }
    };
    items.extend(SIZES.map(|size| stream(size, false, Target::Polls, Goal::AtLeast(0.95))));
    items.extend(SIZES.map(|size| stream(size, true, Target::Polls, Goal::BesideCrc(0.9))));
    // How much of it hangs on the target's polling; one size says it.
    let others = [Target::Blocks, Target::Sleeps];
    items.extend(others.map(|target| stream(1024 * 1024, false, target, Goal::AtLeast(0.95))));
}

fn rate(items: &mut Vec<Item>) {
    let lines = [
        ("rate", "64 B Writes in lists of 64, target polls", Target::Polls),
        ("rate-sleeps", "64 B Writes in lists of 64, target sleeps elsewhere", Target::Sleeps),
    ];
    items.extend(lines.map(|(id, title, target)| Item {
        id: id.into(),
        title: title.into(),
        group: Group::Rate,
        crc: true,
        work: Measure::One(Work::Rate { size: SMALL, list: LIST, depth: DEPTH, target }),
        goal: Goal::Messages(3e6),
    }));
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
        crc: true,
        work: Measure::One(Work::Path(path)),
        goal: Goal::Budget(budget),
    }));
}

fn connections(id: &str, group: Group, figures: Figures, goal: Goal) -> Item {
    let title = many::titled(figures);
    Item { id: id.into(), title, group, crc: true, work: Measure::Many(figures), goal }
}

/// In the largest unit that leaves a whole number.
fn size_name(bytes: u32) -> String {
    match bytes {
        _ if bytes.is_multiple_of(1024 * 1024) => format!("{} MiB", bytes / 1024 / 1024),
        _ if bytes.is_multiple_of(1024) => format!("{} KiB", bytes / 1024),
        _ => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique() {
        let mut ids: Vec<_> = items(BenchWhat::All).into_iter().map(|item| item.id).collect();
        let count = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), count);
        assert!(ids.contains(&"write-64kib-crc-off".to_owned()));
    }

    #[test]
    fn crc_goal_is_that_of_two_stages_in_turn() {
        let goal = Goal::BesideCrc(0.9).ratio(5.0, Some(20.0)).unwrap();
        assert!((goal - 0.72).abs() < 1e-9);
        assert_eq!(Goal::BesideCrc(0.9).ratio(5.0, None), None);
    }
}
