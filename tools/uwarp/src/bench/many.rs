//! Many connections: how fast they are made, the cost of an idle one, and its cost for the others.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::ends::{Ends, Link, Place, Setting, out_of_turn};
use super::fabric::crowd::DEPTH;
use super::protocol::{Answer, Failure, Figure, Many, Order, Over, Result, Role, Spread, Usage};
use super::report::{Fact, Outcome};
use super::stats::Ratio;
use super::ways;
use super::{Extent, ProgressBar};

/// What is measured of many connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figures {
    /// Connections a second.
    Open { count: u32, at_once: u32 },
    /// Queue pairs a second that are brought up by number, beside as many connections of raw TCP.
    BringUp { count: u32 },
    /// User memory of an idle connection.
    Memory,
    /// Memory of the kernel for a connection: its two sockets, and what the two processes share.
    Kernel,
    /// Processor time of a process with nothing but idle connections.
    Idle,
    /// A ping-pong on one of them, beside one on a connection without others.
    Ping,
    /// The same with Writes.
    Stream,
    /// Ping-pongs on many at the same time.
    Fair { count: u32 },
}

impl Figures {
    /// Whether they are measured over memory, too.
    pub fn have_links(self) -> bool {
        matches!(self, Self::Open { .. } | Self::BringUp { .. } | Self::Memory | Self::Kernel | Self::Idle)
    }
}

/// The idle ones.
const FEW: u32 = 1_000;
const MANY: u32 = 10_000;
/// In flight while they are made: below the backlog of any listener.
pub const AT_ONCE: u32 = 256;
/// For 10,000 connections and the traffic on all of them, on a machine that does other things too.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// After traffic: until delayed acknowledgements and the library's timers are over.
pub const SETTLE: Duration = Duration::from_millis(500);
const IDLE: Duration = Duration::from_secs(3);
/// Some seconds after it was used, the library checks once for each connection whether its peer's system has
/// answered.
pub const LAST_LOOK: Duration = Duration::from_secs(6);

/// Two ends ready for many connections.
pub struct Pair {
    ends: Ends,
    raw: SocketAddr,
    rdma: SocketAddr,
}

impl Pair {
    pub fn new(place: Place, link: Link, most: u32) -> Result<Pair> {
        let mut ends = Ends::start(place, &[link.setting()], Setting::Quiet)?;
        let address: IpAddr = ends.address;
        let listening = ends.both(
            &Order::Gather { listen: Some(address), most, shared_receives: false },
            &Order::Gather { listen: None, most, shared_receives: false },
            PATIENCE,
        )?;
        let Answer::Listening { raw, rdma } = listening.0 else { return Err(out_of_turn()) };
        Ok(Pair { ends, raw: SocketAddr::new(address, raw), rdma: SocketAddr::new(address, rdma) })
    }

    fn many(&mut self, passive: Many, active: Many) -> Result<(Answer, Answer)> {
        self.ends.both(&Order::Many(passive), &Order::Many(active), PATIENCE)
    }

    pub fn open(&mut self, over: Over, count: u32, at_once: u32) -> Result<Figure> {
        let to = match over {
            Over::Raw(_) => self.raw,
            Over::Uwarp => self.rdma,
        };
        let active = Many::Connect { over, to, count, at_once };
        figure(self.many(Many::Accept { over, count }, active)?.1)
    }

    fn close(&mut self, over: Over) -> Result<()> {
        self.many(Many::Leave { over }, Many::Disconnect { over }).map(drop)
    }

    /// Some messages on each, both ways.
    pub fn traffic(&mut self) -> Result<()> {
        self.many(Many::Traffic, Many::Traffic).map(drop)
    }

    fn bring_up(&mut self, count: u32) -> Result<Figure> {
        let order = |role| Many::BringUp { count, role };
        figure(self.many(order(Role::Passive), order(Role::Active))?.1)
    }

    fn open_and_close(&mut self, over: Over, count: u32, at_once: u32) -> Result<Figure> {
        let figure = self.open(over, count, at_once)?;
        self.close(over)?;
        Ok(figure)
    }

    pub fn usage(&mut self) -> Result<[Usage; 2]> {
        match self.many(Many::Usage, Many::Usage)? {
            (Answer::Usage(passive), Answer::Usage(active)) => Ok([active, passive]),
            _ => Err(out_of_turn()),
        }
    }
}

/// What the figures of idle connections share: made once, by the first of them.
pub struct Scale {
    link: Link,
    alone: Pair,
    among: Pair,
    few: [Usage; 2],
    many: [Usage; 2],
}

impl Scale {
    pub fn new(place: Place, link: Link, progress: &ProgressBar) -> Result<Scale> {
        let mut alone = Pair::new(place, link, 1)?;
        alone.open(Over::Uwarp, 1, 1)?;
        let mut among = Pair::new(place, link, MANY)?;
        let mut grow = |count| {
            progress.set_message(format!("{count} connections"));
            among.open(Over::Uwarp, count, AT_ONCE)?;
            among.traffic()?;
            // Rings that are empty then give their pages back.
            std::thread::sleep(if link == Link::Memory { LAST_LOOK } else { SETTLE });
            among.usage()
        };
        let few = grow(FEW)?;
        let many = grow(MANY - FEW)?;
        Ok(Scale { link, alone, among, few, many })
    }
}

/// One item.
pub fn measure(
    (place, link): (Place, Link),
    scale: &mut Option<Scale>,
    figures: Figures,
    extent: Extent,
    progress: &ProgressBar,
) -> Result<Outcome> {
    match figures {
        Figures::Open { count, at_once } => {
            let uwarp = |pair: &mut Pair| pair.open_and_close(Over::Uwarp, count, at_once);
            return open((place, link), (count, at_once), (Each::Timed, uwarp), extent, progress);
        }
        Figures::BringUp { count } => {
            let uwarp = |pair: &mut Pair| pair.bring_up(count);
            return open((place, link), (count, AT_ONCE), (Each::NotTimed, uwarp), extent, progress);
        }
        _ => {}
    }
    if scale.as_ref().is_some_and(|scale| scale.link != link) {
        *scale = None;
    }
    let Scale { alone, among, few, many, .. } = match scale {
        Some(scale) => scale,
        None => scale.insert(Scale::new(place, link, progress)?),
    };
    let milliseconds = extent.round_ms;
    let middle = MANY / 2;
    Ok(Outcome::Fact(match figures {
        Figures::Open { .. } | Figures::BringUp { .. } => return Err(out_of_turn()),
        Figures::Memory => memory(few, many),
        Figures::Kernel => {
            let each = apiece(few, many, |usage| usage.kernel);
            Fact::new(format!("{:.1} KiB", each[0].max(0.0) / 1024.0), &[("bytes", each[0])])
        }
        Figures::Idle => {
            std::thread::sleep(LAST_LOOK);
            let before = among.usage()?;
            std::thread::sleep(IDLE);
            let after = among.usage()?;
            let used = [0, 1].map(|end| {
                after[end].cpu_us[0].saturating_sub(before[end].cpu_us[1]) as f64
                    / IDLE.as_secs_f64()
                    / 1000.0
            });
            Fact::new(
                format!("{:.2} and {:.2} ms a second", used[0], used[1]),
                &[("active_ms_per_second", used[0]), ("passive_ms_per_second", used[1])],
            )
        }
        Figures::Ping => beside(alone, among, extent, progress, "µs", 1.0, |one| Many::Ping {
            one: if one { middle } else { 0 },
            milliseconds,
        })?,
        Figures::Stream => beside(alone, among, extent, progress, "GB/s", 1e-9, |one| Many::Stream {
            one: if one { middle } else { 0 },
            milliseconds,
        })?,
        Figures::Fair { count } => {
            let milliseconds = extent.round_ms * u64::from(extent.rounds);
            let answer = among.many(Many::Answer, Many::Serve { count, milliseconds })?.1;
            let Answer::Spread(Spread { least, median, most }) = answer else { return Err(out_of_turn()) };
            Fact::new(
                format!("least {least:.1}, median {median:.1}, most {most:.1} round trips a second"),
                &[("least", least), ("median", median), ("most", most)],
            )
        }
    }))
}

/// Whether each connection of a figure has a time of its own, for the 99th percentile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Each {
    Timed,
    /// All are made side by side.
    NotTimed,
}

/// Raw, uwarp, raw, uwarp and so on; all connections of a round are closed before the next.
fn open(
    (place, link): (Place, Link),
    (count, at_once): (u32, u32),
    (each, mut uwarp_once): (Each, impl FnMut(&mut Pair) -> Result<Figure>),
    extent: Extent,
    progress: &ProgressBar,
) -> Result<Outcome> {
    let mut pair = Pair::new(place, link, count)?;
    // The first of each warm up.
    let ways = ways::connections();
    if let Some(&way) = ways.first() {
        pair.open_and_close(Over::Raw(way), count, at_once)?;
    }
    uwarp_once(&mut pair)?;
    let baseline = ways::sweep(&ways, false, |way| pair.open_and_close(Over::Raw(way), count, at_once))?;
    let baseline = baseline.ok_or_else(|| Failure::new("raw TCP has no way to do this"))?;
    let (mut raw, mut uwarp) = (Vec::new(), Vec::new());
    for _ in 0..extent.rounds {
        let mut figure = pair.open_and_close(Over::Raw(baseline.chosen), count, at_once)?;
        if each == Each::NotTimed {
            figure.p99 = None;
        }
        raw.push(figure);
        uwarp.push(uwarp_once(&mut pair)?);
        progress.inc(1);
    }
    Outcome::of(&raw, &uwarp, &[], baseline, 0).ok_or_else(|| Failure::new("no round was measured"))
}

/// The cost of one more connection, at each end.
fn apiece(few: &[Usage; 2], many: &[Usage; 2], of: impl Fn(&Usage) -> u64) -> [f64; 2] {
    [0, 1].map(|end| {
        let more = many[end].connections.saturating_sub(few[end].connections).max(1);
        (of(&many[end]) as f64 - of(&few[end]) as f64) / more as f64
    })
}

fn memory(few: &[Usage; 2], many: &[Usage; 2]) -> Fact {
    let heap = apiece(few, many, |usage| usage.heap);
    let resident = apiece(few, many, |usage| usage.resident);
    let kib = |bytes: f64| bytes / 1024.0;
    Fact::new(
        format!(
            "{:.2} and {:.2} KiB of heap; {:.2} and {:.2} KiB resident",
            kib(heap[0]),
            kib(heap[1]),
            kib(resident[0]),
            kib(resident[1])
        ),
        &[
            ("active_heap_bytes", heap[0]),
            ("passive_heap_bytes", heap[1]),
            ("active_resident_bytes", resident[0]),
            ("passive_resident_bytes", resident[1]),
        ],
    )
}

/// The same on the only connection and on one of many, in turns.
fn beside(
    alone: &mut Pair,
    among: &mut Pair,
    extent: Extent,
    progress: &ProgressBar,
    unit: &str,
    scale: f64,
    job: impl Fn(bool) -> Many,
) -> Result<Fact> {
    alone.ends.pin(true)?;
    among.ends.pin(true)?;
    let (mut one, mut other) = (Vec::new(), Vec::new());
    for round in 0..=extent.rounds {
        for (pair, figures, is_among) in [(&mut *alone, &mut one, false), (&mut *among, &mut other, true)] {
            let figure = figure(pair.many(Many::Answer, job(is_among))?.1)?;
            if round > 0 {
                figures.push(figure);
            }
        }
        if round > 0 {
            progress.inc(1);
        }
    }
    alone.ends.pin(false)?;
    among.ends.pin(false)?;
    let values = |figures: &[Figure]| figures.iter().map(|figure| figure.value).collect::<Vec<_>>();
    let medians = (super::stats::median(&values(&one)), super::stats::median(&values(&other)));
    let (Some(first), Some(second)) = medians else { return Err(out_of_turn()) };
    let Ratio { median, least, most } = Ratio::new(&other, &one).ok_or_else(out_of_turn)?;
    let (first, second) = (first * scale, second * scale);
    Ok(Fact::new(
        format!(
            "alone {first:.2} {unit}, among them {second:.2} {unit}: {median:.2} ({least:.2} to {most:.2})"
        ),
        &[("alone", first), ("among", second), ("ratio", median), ("least", least), ("most", most)],
    ))
}

fn figure(answer: Answer) -> Result<Figure> {
    match answer {
        Answer::Figure(figure) => Ok(figure),
        _ => Err(out_of_turn()),
    }
}

/// Titles have these numbers in them.
pub fn titled(figures: Figures) -> String {
    match figures {
        Figures::Open { count, at_once: 1 } => format!("{count} connections, one at a time"),
        Figures::Open { count, at_once } => format!("{count} connections, {at_once} at a time"),
        Figures::BringUp { count } => format!("{count} queue pairs by number"),
        Figures::Memory => format!("User memory of each, {DEPTH} + {DEPTH} work requests"),
        Figures::Kernel => "Memory of its two sockets, and what the processes share".to_owned(),
        Figures::Idle => "Processor time of all".to_owned(),
        Figures::Ping => "64 B Send ping-pong on one of them".to_owned(),
        Figures::Stream => "1 MiB Writes on one of them".to_owned(),
        Figures::Fair { count } => format!("64 B Send ping-pongs on {count} of them"),
    }
}
