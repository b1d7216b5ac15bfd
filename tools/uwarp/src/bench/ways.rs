//! The ways in which raw TCP can do its part. They are tried at the start of a run, and the best one is
//! compared with uwarp.
//!
//! A ratio is meaningful only if the other side is as good as it can be. So raw TCP may do everything that
//! uwarp does at an end: spin, take more than one message in a call, use one buffer again and again. The best
//! combination is measured, because it differs from machine to machine.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};

use super::protocol::{Figure, Result, Wait};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    /// Of messages there and back: how both ends wait for the next.
    Wait(Waiting),
    /// Of messages there and back whose ends sleep: by two eventfds, not by TCP.
    Eventfds,
    /// Of bytes one way: what a send and a receive call pass at most, out of and into one buffer that is used
    /// again and again, and how the receiver waits. The sender blocks when the socket is full.
    Calls { send: u32, receive: u32, wait: Waiting, buffers: Buffers },
    /// Of datagrams one way: how many a send and a receive call pass at most, whether the system cuts what is
    /// sent (UDP_SEGMENT) and joins what is received (UDP_GRO), and how the receiver waits.
    Datagrams { send: u32, receive: u32, cut: bool, joined: bool, wait: Waiting },
    /// Of connections: how each end waits.
    Open { connect: Waiting, accept: Waiting },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Waiting {
    /// A call that does not block, in a loop.
    Spin,
    /// The same for [`PATIENCE`], then a call that blocks.
    SpinThenBlock,
    /// A call that blocks.
    Block,
    /// poll(2), or epoll_wait(2) where there are many, then a call.
    Poll,
}

/// Of the sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Buffers {
    /// As the system sizes them.
    System,
    /// [`FIXED`] at either end.
    Fixed,
}

/// How long [`Waiting::SpinThenBlock`] spins: above a round trip, below a time slice.
pub const PATIENCE: Duration = Duration::from_micros(100);
/// Bytes of a socket buffer with [`Buffers::Fixed`]: all of it stays in the processor's caches.
pub const FIXED: usize = 1024 * 1024;

const KIB: u32 = 1024;
const MIB: u32 = 1024 * 1024;

impl Way {
    /// Whether it needs a core for each end.
    pub fn spins(self) -> bool {
        match self {
            Way::Wait(wait) | Way::Calls { wait, .. } | Way::Datagrams { wait, .. } => wait == Waiting::Spin,
            // As many connections come and go, threads of the kernel and of the library need a core, too.
            Way::Open { .. } | Way::Eventfds => false,
        }
    }
}

/// Ways for a ping-pong whose ends wait in this way over uwarp.
pub fn ping_pong(wait: Wait) -> Vec<Way> {
    let waits: &[Waiting] = match wait {
        Wait::Spin | Wait::Memory | Wait::Answer => &[Waiting::Spin, Waiting::Block, Waiting::Poll],
        // `ibv_get_cq_event` looks for a while before it sleeps.
        Wait::Block => &[Waiting::SpinThenBlock, Waiting::Block, Waiting::Poll],
        // The program has chosen to sleep.
        Wait::Descriptor => &[Waiting::Poll, Waiting::Block],
        Wait::Late => return vec![Way::Eventfds],
    };
    waits.iter().copied().map(Way::Wait).collect()
}

pub fn transaction() -> Vec<Way> {
    ping_pong(Wait::Spin)
}

/// Ways for large messages one way. The best size of a call is the same for all sizes of messages.
pub fn stream() -> Vec<Way> {
    let mut ways = receivers(&[64 * KIB, 256 * KIB, MIB], &[64 * KIB, 256 * KIB, MIB], Buffers::System);
    ways.extend(receivers(&[256 * KIB, MIB], &[256 * KIB, MIB], Buffers::Fixed));
    ways
}

/// Of messages one way, each in a send call of its own.
pub fn messages(size: u32) -> Vec<Way> {
    let mut ways = receivers(&[size], &[size, 64 * KIB, 256 * KIB, MIB], Buffers::System);
    ways.extend(receivers(&[size], &[64 * KIB, 256 * KIB], Buffers::Fixed));
    ways
}

/// Of small messages in lists: the sender passes one list, or all that may be in flight, in a call.
pub fn lists(list: u32, depth: u32) -> Vec<Way> {
    receivers(&[list, depth], &[4 * KIB, 64 * KIB, 256 * KIB], Buffers::System)
}

/// Of datagrams one way, posted `list` at a time. Offload is of no use to a sender of single datagrams.
pub fn datagrams(list: u32) -> Vec<Way> {
    let mut ways = Vec::new();
    let receives = [(1, false), (32, false), (1, true), (8, true)];
    for cut in [false, true] {
        for (receive, joined) in receives {
            if (cut && list == 1) || (joined && !cut) {
                continue;
            }
            ways.extend([Waiting::Spin, Waiting::Block].map(|wait| Way::Datagrams {
                send: list,
                receive,
                cut,
                joined,
                wait,
            }));
        }
    }
    ways
}

/// With datagrams of a packet's length, which the system cuts and joins.
pub fn joined_datagrams() -> Vec<Way> {
    let joins = |way: &Way| matches!(way, Way::Datagrams { cut: true, joined: true, .. });
    datagrams(32).into_iter().filter(joins).collect()
}

pub fn connections() -> Vec<Way> {
    const BOTH: [Waiting; 2] = [Waiting::Block, Waiting::Spin];
    let pairs = BOTH.iter().flat_map(|connect| BOTH.iter().map(move |accept| (*connect, *accept)));
    pairs.map(|(connect, accept)| Way::Open { connect, accept }).collect()
}

fn receivers(sends: &[u32], receives: &[u32], buffers: Buffers) -> Vec<Way> {
    let mut ways = Vec::new();
    for &send in sends {
        for &receive in receives {
            for wait in [Waiting::Spin, Waiting::Block] {
                let way = Way::Calls { send, receive, wait, buffers };
                if !ways.contains(&way) {
                    ways.push(way);
                }
            }
        }
    }
    ways
}

/// What was tried, and the best of it.
#[derive(Clone, Debug, Serialize)]
pub struct Sweep {
    #[serde(serialize_with = "as_text")]
    pub chosen: Way,
    /// The best trial of the chosen way.
    pub value: f64,
    /// The best first.
    pub tried: Vec<Tried>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    #[serde(serialize_with = "as_text")]
    pub way: Way,
    /// In the unit of the figure, the best of all trials: machines have slow spells of some seconds, in which
    /// everything takes twice as long, and no fast ones.
    pub value: f64,
}

/// How often each way is tried. The trials are so far apart that not all of them are in one slow spell of the
/// machine.
const PASSES: usize = 2;
/// This many are tried again.
const FINALISTS: usize = 3;
/// How often the finalists are tried.
const FINALS: usize = 2;

/// Tries each way, and the best ones again. `None` if there is no way.
pub fn sweep(
    ways: &[Way],
    less_is_better: bool,
    mut measure: impl FnMut(Way) -> Result<Figure>,
) -> Result<Option<Sweep>> {
    let better = |a: f64, b: f64| if less_is_better { a.min(b) } else { a.max(b) };
    let mut tried: Vec<Tried> = Vec::new();
    for &way in ways {
        tried.push(Tried { way, value: measure(way)?.value });
    }
    let again = |tried: &mut [Tried], measure: &mut dyn FnMut(Way) -> Result<Figure>| {
        tried.iter_mut().try_for_each(|one| {
            one.value = better(one.value, measure(one.way)?.value);
            Ok(())
        })
    };
    for _ in 1..PASSES {
        again(&mut tried, &mut measure)?;
    }
    let best_first = |tried: &mut [Tried]| {
        let order = |a: &Tried, b: &Tried| a.value.total_cmp(&b.value);
        tried.sort_by(|a, b| if less_is_better { order(a, b) } else { order(b, a) });
    };
    best_first(&mut tried);
    if ways.len() > 1 {
        let finalists = FINALISTS.min(tried.len());
        for _ in 0..FINALS {
            again(tried.get_mut(..finalists).unwrap_or_default(), &mut measure)?;
        }
        best_first(&mut tried);
    }
    let best = tried.first().map(|best| (best.way, best.value));
    Ok(best.map(|(chosen, value)| Sweep { chosen, value, tried }))
}

/// In a few words, for a column of a table.
impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Way::Wait(wait) => wait.fmt(f),
            Way::Eventfds => f.write_str("two eventfds"),
            Way::Calls { send, receive, wait, buffers } => {
                write!(f, "{} / {}, {wait}", size_name(*send), size_name(*receive))?;
                match buffers {
                    Buffers::System => Ok(()),
                    Buffers::Fixed => write!(f, ", buffers of {}", size_name(FIXED as u32)),
                }
            }
            Way::Datagrams { send, receive, cut, joined, wait } => {
                write!(f, "{send}{} / {receive}", if *cut { " (UDP_SEGMENT)" } else { "" })?;
                write!(f, "{}, {wait}", if *joined { " (UDP_GRO)" } else { "" })
            }
            Way::Open { connect, accept } => write!(f, "connect {connect}, accept {accept}"),
        }
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Waiting::Spin => "spins",
            Waiting::SpinThenBlock => "spins, then blocks",
            Waiting::Block => "blocks",
            Waiting::Poll => "poll(2)",
        })
    }
}

/// For JSON that people read.
fn as_text<S: Serializer>(way: &Way, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(way)
}

/// In the largest unit that leaves a whole number.
pub fn size_name(bytes: u32) -> String {
    match bytes {
        _ if bytes.is_multiple_of(MIB) => format!("{} MiB", bytes / MIB),
        _ if bytes.is_multiple_of(KIB) => format!("{} KiB", bytes / KIB),
        _ => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(value: f64) -> Result<Figure> {
        Ok(Figure { value, p99: None, operations: 1 })
    }

    #[test]
    fn a_slow_spell_does_not_decide_which_way_is_the_best() {
        let ways = stream();
        let best = ways[3];
        let mut trials = 0;
        let sweep = sweep(&ways, false, |way| {
            trials += 1;
            // The first third of all trials is at half the speed.
            let speed = if trials <= ways.len() * 2 / 3 { 0.5 } else { 1.0 };
            figure(speed * if way == best { 5.0 } else { 4.0 })
        });
        let sweep = sweep.unwrap().unwrap();
        assert_eq!((sweep.chosen, sweep.value), (best, 5.0));
        assert_eq!(sweep.tried.len(), ways.len());
    }

    #[test]
    fn less_is_better_for_times() {
        let ways = ping_pong(Wait::Spin);
        let chosen = sweep(&ways, true, |way| figure(if way == ways[1] { 1.0 } else { 2.0 }));
        assert_eq!(chosen.unwrap().unwrap().chosen, ways[1]);
        assert!(sweep(&[], true, |_| figure(1.0)).unwrap().is_none());
    }

    #[test]
    fn ways_are_told_in_a_few_words() {
        let way = |buffers| Way::Calls { send: MIB, receive: 64 * KIB, wait: Waiting::Spin, buffers };
        assert_eq!(way(Buffers::System).to_string(), "1 MiB / 64 KiB, spins");
        assert_eq!(way(Buffers::Fixed).to_string(), "1 MiB / 64 KiB, spins, buffers of 1 MiB");
        assert_eq!(connections()[1].to_string(), "connect blocks, accept spins");
    }
}
