//! Datagrams one way over uwarp, and what peers and connections cost beside them.

use std::time::{Duration, Instant};

use super::ends::{Ends, out_of_turn};
use super::fabric::datagram::GRH;
use super::fabric::{Link, OUT};
use super::protocol::{Answer, Failure, Figure, Order, Result, Role, Usage, Verb, Wait, Work};
use super::raw::{NO_NUMBER, Raw};
use super::raw_udp::{Tally, Window};
use super::report::{Fact, Outcome};
use super::stats::{Ratio, median};
use super::ways::{Waiting, Way};
use super::{Extent, ProgressBar, Turn, WARM_UP_MS};

/// What is measured of datagrams beside something else than raw UDP alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figures {
    /// A ping-pong of this size, beside one on a connection.
    BesideConnection { size: u32 },
    /// Memory of one queue pair that has talked to many.
    Peers,
}

/// The peers of one queue pair, at most.
const PEERS: u32 = 4096;

/// Posts lists of `list` datagrams for about `time`, up to `depth` in flight. The figure is the peer's:
/// datagrams a second that arrived.
pub fn stream(
    link: &Link,
    raw: &mut Raw,
    size: u32,
    (list, depth): (u32, u32),
    time: Duration,
) -> Result<Figure> {
    let mut prepared = link.datagram_list(list as usize, size);
    (0..size / 8).for_each(|word| link.store(OUT + 8 * word, NO_NUMBER));
    raw.receive_number()?;
    let start = Instant::now();
    let (mut window, mut under_way) = (Window::default(), 0);
    while start.elapsed() < time {
        while under_way * list < depth {
            window.wait_for(list.into(), raw)?;
            link.post(&mut prepared)?;
            window.sent += u64::from(list);
            under_way += 1;
        }
        under_way -= link.reap_sends()?;
    }
    while under_way > 0 {
        under_way -= link.reap_sends()?;
    }
    window.finish(raw)
}

/// The other end of [`stream`]: polls.
pub fn sink(link: &Link, raw: &mut Raw) -> Result<()> {
    // What an earlier round left.
    while let Some(_late) = link.reap_receive()? {
        link.post_receive()?;
    }
    raw.send_number(0)?;
    let mut tally = Tally::default();
    loop {
        let mut count = 0;
        link.reap_receives(|_| {
            count += 1;
            Ok(())
        })?;
        link.post_receives(count)?;
        if tally.add(count as u64, raw)? && tally.is_over(raw)? {
            return tally.report(raw);
        }
    }
}

/// Posts messages of `size` bytes for about `time`, up to `window` in flight. The figure is bytes a second,
/// until all are completed: then the peer has them.
pub fn reliable_stream(
    link: &Link,
    raw: &mut Raw,
    (size, window, wait): (u32, u32, Wait),
    time: Duration,
) -> Result<Figure> {
    if size <= END {
        return Err(Failure(format!("messages of a stream have more than {END} bytes")));
    }
    let mut message = link.message(Verb::Send, size, true);
    let mut end = link.message(Verb::Send, END, true);
    raw.receive_number()?;
    let start = Instant::now();
    let (mut posted, mut completed) = (0_u64, 0_u64);
    while start.elapsed() < time || completed < posted {
        while posted - completed < window.into() && start.elapsed() < time {
            link.post(&mut message)?;
            posted += 1;
        }
        completed += reap(link, wait)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    link.post(&mut end)?;
    while reap(link, wait)? == 0 {}
    raw.receive_number().and_then(|count| match count == completed {
        true => Ok(Figure {
            value: completed as f64 * f64::from(size) / seconds,
            p99: None,
            operations: completed,
        }),
        false => Err(Failure(format!("{completed} messages completed, {count} arrived"))),
    })
}

/// Completions of our messages; before it says that there are none, it has slept if it may.
fn reap(link: &Link, wait: Wait) -> Result<u64> {
    let mut count = link.reap_sends()?;
    if count == 0 && wait == Wait::Block {
        link.arm_sends()?;
        count = link.reap_sends()?;
        if count == 0 {
            link.event()?;
        }
    }
    Ok(count.into())
}

/// Bytes of the message behind a stream.
const END: u32 = 8;

/// The other end of [`reliable_stream`].
pub fn take_all(link: &Link, raw: &mut Raw, wait: Wait) -> Result<()> {
    raw.send_number(0)?;
    let (mut count, mut ended, mut armed) = (0_u64, false, false);
    while !ended {
        let mut found = false;
        link.reap_receives(|length| {
            found = true;
            if length <= END + GRH {
                ended = true;
            } else {
                count += 1;
            }
            link.post_receive()
        })?;
        // A last look behind arm().
        if found || wait != Wait::Block {
            armed = false;
        } else if armed {
            link.event()?;
            armed = false;
        } else {
            link.arm()?;
            armed = true;
        }
    }
    raw.send_number(count)
}

/// One item.
pub fn measure(
    ends: &mut Turn<'_>,
    figures: Figures,
    extent: Extent,
    progress: &ProgressBar,
) -> Result<Outcome> {
    match figures {
        Figures::BesideConnection { size } => beside_connection(ends, size, extent, progress),
        Figures::Peers => peers(ends.ends),
    }
}

/// Datagrams, a connection, raw UDP and raw TCP in turns.
fn beside_connection(
    turn: &mut Turn<'_>,
    size: u32,
    extent: Extent,
    progress: &ProgressBar,
) -> Result<Outcome> {
    let connection = Work::PingPong { wait: Wait::Spin, size };
    let datagram = Work::Datagram { size };
    let spin = Way::Wait(Waiting::Spin);
    let mut figures: [Vec<Figure>; 4] = Default::default();
    for round in 0..=extent.rounds {
        let milliseconds = if round == 0 { WARM_UP_MS } else { extent.round_ms };
        let measured = [
            turn.uwarp(datagram, milliseconds)?,
            turn.uwarp(connection, milliseconds)?,
            turn.raw(datagram, spin, milliseconds)?,
            turn.raw(connection, spin, milliseconds)?,
        ];
        if round > 0 {
            figures.iter_mut().zip(measured).for_each(|(all, one)| all.push(one));
            progress.inc(1);
        }
    }
    let [ud, rc, udp, tcp] = &figures;
    let middle = |figures: &[Figure]| {
        median(&figures.iter().map(|figure| figure.value).collect::<Vec<_>>()).ok_or_else(out_of_turn)
    };
    let ratio = Ratio::new(ud, rc).ok_or_else(out_of_turn)?;
    let raw_ratio = Ratio::new(udp, tcp).ok_or_else(out_of_turn)?;
    let [ud, rc, udp, tcp] = [middle(ud)?, middle(rc)?, middle(udp)?, middle(tcp)?];
    // The gap between uwarp's two services, as a share of that between raw UDP and raw TCP.
    let share = (rc - ud) / (tcp - udp);
    let text = format!(
        "{ud:.2} µs, connection {rc:.2} µs: {:.2} ({:.2} to {:.2}); raw UDP {udp:.2}, raw TCP {tcp:.2}: \
         {:.2}; {share:.1} of that gap",
        ratio.median, ratio.least, ratio.most, raw_ratio.median
    );
    let numbers = [
        ("datagram", ud),
        ("connection", rc),
        ("ratio", ratio.median),
        ("raw_udp", udp),
        ("raw_tcp", tcp),
        ("share_of_gap", share),
    ];
    Ok(Outcome::Fact(Fact::new(text, &numbers)))
}

fn peers(ends: &mut Ends) -> Result<Outcome> {
    let mut usage = |count| -> Result<Usage> {
        let order = |role| Order::Peers { count, role, most: PEERS, reliable: false };
        match ends.both(&order(Role::Passive), &order(Role::Active), Duration::from_secs(60))? {
            (_, Answer::Usage(usage)) => Ok(usage),
            _ => Err(out_of_turn()),
        }
    };
    let (one, many) = (usage(1)?, usage(PEERS)?);
    let heap = many.heap as f64 - one.heap as f64;
    let resident = many.resident as f64 - one.resident as f64;
    Ok(Outcome::Fact(Fact::new(
        format!("{:.0} KiB of heap, {:.0} KiB resident", heap / 1024.0, resident / 1024.0),
        &[("heap_bytes", heap), ("resident_bytes", resident)],
    )))
}

/// Titles have these numbers in them.
pub fn titled(figures: Figures) -> String {
    match figures {
        Figures::BesideConnection { size } => {
            format!("{} ping-pong beside a connection's", super::ways::size_name(size))
        }
        Figures::Peers => {
            format!("Memory, from 1 to {PEERS} peers of a queue pair, with their address handles")
        }
    }
}
