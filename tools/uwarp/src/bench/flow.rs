//! Traffic one way over uwarp, as programs send it.

use std::time::{Duration, Instant};

use super::fabric::{IN, Link, OUT, SOURCE, TARGET};
use super::protocol::{Failure, Figure, Flow, LARGEST, Result, Target, Verb};
use super::raw::Raw;
use super::rdma::fits;

/// Messages for about `time`, each in a post of its own and all to one place, as perftest does it: post until
/// the window is full, poll once, and so on. The figure is bytes a second until the target has reported that
/// it has them all; of Reads, until the last has completed.
pub fn stream(link: &Link, raw: &mut Raw, flow: Flow, target: Target, time: Duration) -> Result<Figure> {
    let Flow { verb, size, window, signal } = flow;
    let end = fits(size)?;
    let (window, signal) = (window.max(1), u64::from(signal.max(1)));
    let mut signalled = link.message(verb, size, true);
    let mut unsignalled = link.message(verb, size, false);
    link.store(SOURCE + end, 0);
    link.store(TARGET + end, 0);
    let nonce = raw.receive_number()?;
    let start = Instant::now();
    let (mut posted, mut completed) = (0_u64, 0_u64);
    while start.elapsed() < time {
        while posted - completed < window.into() {
            posted += 1;
            link.post(if posted.is_multiple_of(signal) { &mut signalled } else { &mut unsignalled })?;
        }
        completed += u64::from(link.reap_sends()?) * signal;
    }
    let mut wanted = (posted / signal).saturating_sub(completed / signal);
    // A signalled one completes those before it.
    if !posted.is_multiple_of(signal) {
        posted += 1;
        wanted += 1;
        link.post(&mut signalled)?;
    }
    while wanted > 0 {
        wanted -= u64::from(link.reap_sends()?);
    }
    if verb == Verb::Read {
        let seconds = start.elapsed().as_secs_f64();
        if link.load(TARGET + end) != nonce {
            return Err(Failure::new("RDMA Reads returned wrong data"));
        }
        let reaped = report_count(link, raw, target, posted)?;
        settle(link, 0, reaped)?;
        return Ok(figure(posted, size, seconds));
    }
    // The last one carries the count; its bytes must not change while others are in flight.
    posted += 1;
    link.store(SOURCE + end, posted);
    link.post(&mut signalled)?;
    let reaped = report_count(link, raw, target, posted)?;
    let seconds = start.elapsed().as_secs_f64();
    settle(link, 1, reaped)?;
    Ok(figure(posted, size, seconds))
}

fn figure(messages: u64, size: u32, seconds: f64) -> Figure {
    Figure { value: messages as f64 * f64::from(size) / seconds, p99: None, operations: messages }
}

/// The target of [`stream`].
pub fn sink(link: &Link, raw: &mut Raw, flow: Flow, target: Target) -> Result<()> {
    /// What Reads bring.
    const NONCE: u64 = 0x5EED_0F0D_5EED_0F0D;
    let end = fits(flow.size)?;
    match flow.verb {
        Verb::Write => {
            link.store(TARGET + end, 0);
            await_end(link, raw, target, 0, |count| Ok(link.load(TARGET + end) == count))
        }
        Verb::Read => {
            link.store(SOURCE + end, NONCE);
            await_end(link, raw, target, NONCE, |_| Ok(true))
        }
        Verb::Send => take_sends(link, raw, end),
    }
}

/// Polls as the server of `ib_send_bw`: sixteen at a time, and a new receive for each.
fn take_sends(link: &Link, raw: &mut Raw, end: u32) -> Result<()> {
    link.store(IN + end, 0);
    raw.send_number(0)?;
    let (mut count, mut told) = (0_u64, None);
    while told.is_none() {
        link.reap_receives(|length| {
            // Shorter than any message of a stream: it carries their number.
            match length {
                8 => told = Some(link.load(IN)),
                _ => count += 1,
            }
            link.post_receive()
        })?;
    }
    let told = told.unwrap_or(0);
    let has_all = count == told && link.load(IN + end) == told;
    answer(link, if has_all { told } else { 0 })
}

/// Small Writes in lists, numbered, into as many slots as may be in flight.
pub fn rate(
    link: &Link,
    raw: &mut Raw,
    size: u32,
    (list, depth): (u32, u32),
    target: Target,
    time: Duration,
) -> Result<Figure> {
    let (list, lists) = shape(size, list, depth)?;
    let slot = |index: u32| (SOURCE + index * size, TARGET + index * size);
    let mut prepared: Vec<_> = (0..lists)
        .map(|i| {
            let places: Vec<_> = (i * list..(i + 1) * list).map(slot).collect();
            link.write_list(&places, size, false)
        })
        .collect();
    raw.receive_number()?;
    let start = Instant::now();
    let (mut posted, mut under_way, mut next) = (0_u64, 0, 0_u32);
    while start.elapsed() < time {
        while under_way < lists {
            for index in next * list..(next + 1) * list {
                posted += 1;
                link.store(SOURCE + index * size + size - 8, posted);
            }
            if let Some(list) = prepared.get_mut(next as usize) {
                link.post(list)?;
            }
            next = (next + 1) % lists;
            under_way += 1;
        }
        under_way -= link.reap_sends()?;
    }
    let reaped = report_count(link, raw, target, posted)?;
    let seconds = start.elapsed().as_secs_f64();
    settle(link, under_way, reaped)?;
    Ok(Figure { value: posted as f64 / seconds, p99: None, operations: posted })
}

/// The target of [`rate`]: the numbers in the slots show what arrived.
pub fn count(link: &Link, raw: &mut Raw, size: u32, (list, depth): (u32, u32), target: Target) -> Result<()> {
    let (list, lists) = shape(size, list, depth)?;
    let slots = list * lists;
    let word = |index: u32| TARGET + index * size + size - 8;
    (0..slots).for_each(|index| link.store(word(index), 0));
    await_end(link, raw, target, 0, |count| {
        // The last number that went into each slot.
        let newest = |index: u32| {
            let number = u64::from(index) + 1;
            (number <= count).then(|| count - (count - number) % u64::from(slots))
        };
        Ok((0..slots).all(|index| link.load(word(index)) == newest(index).unwrap_or(0)))
    })
}

/// Requests in a list, and lists in flight.
fn shape(size: u32, list: u32, depth: u32) -> Result<(u32, u32)> {
    let lists = depth / list.max(1);
    if list == 0 || lists == 0 || size < 8 || !size.is_multiple_of(8) || list * lists * size > LARGEST {
        return Err(Failure::new("messages, lists and depth do not fit together"));
    }
    Ok((list, lists))
}

/// Sends the target the count of messages that it must have by now, and waits for its answer. The Send
/// arrives behind all Writes. Returns the number of completions that were polled meanwhile.
pub fn report_count(link: &Link, raw: &mut Raw, target: Target, count: u64) -> Result<u32> {
    let mut reaped = 0;
    let answer = match target {
        Target::Sleeps => {
            raw.send_number(count)?;
            raw.receive_number()?
        }
        Target::Polls | Target::Blocks => {
            link.store(OUT, count);
            let mut message = link.send_list(OUT, 8, false);
            link.post(&mut message)?;
            loop {
                if link.reap_receive()?.is_some() {
                    let answer = link.load(IN);
                    link.post_receive()?;
                    break answer;
                }
                reaped += link.reap_sends()?;
            }
        }
    };
    if answer == count {
        Ok(reaped)
    } else {
        Err(Failure::new("the target's memory does not hold what was written"))
    }
}

/// Takes the completions that are still outstanding.
fn settle(link: &Link, wanted: u32, mut reaped: u32) -> Result<()> {
    while reaped < wanted {
        reaped += link.reap_sends()?;
    }
    Ok(())
}

/// Reports that it is ready, waits for the initiator's count, checks that memory holds as much, and answers.
fn await_end(
    link: &Link,
    raw: &mut Raw,
    target: Target,
    ready: u64,
    has: impl Fn(u64) -> Result<bool>,
) -> Result<()> {
    const PATIENCE: Duration = Duration::from_secs(5);
    if target == Target::Blocks {
        link.arm()?;
    }
    raw.send_number(ready)?;
    if target == Target::Sleeps {
        let count = raw.receive_number()?;
        let start = Instant::now();
        // Another connection brought the count: the Writes may still be on their way.
        while !has(count)? && start.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        return raw.send_number(if has(count)? { count } else { 0 });
    }
    loop {
        if target == Target::Blocks {
            link.event()?;
            link.arm()?;
        }
        if link.reap_receive()?.is_some() {
            break;
        }
    }
    let count = link.load(IN);
    link.post_receive()?;
    answer(link, if has(count)? { count } else { 0 })
}

fn answer(link: &Link, count: u64) -> Result<()> {
    link.store(OUT, count);
    let mut message = link.send_list(OUT, 8, true);
    link.post(&mut message)?;
    while link.reap_sends()? == 0 {}
    Ok(())
}
