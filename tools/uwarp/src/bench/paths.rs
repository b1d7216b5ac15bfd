//! Walks single paths of the library and counts the system calls on them.

use std::time::{Duration, Instant};

use super::dispatch::Counter;
use super::fabric::{IN, Link, OUT, SOURCE, TARGET};
use super::flow;
use super::protocol::{Calls, Failure, Flow, Path, Result, Target, Verb, Wait, Work};
use super::raw::Raw;

const SMALL: u32 = 64;
const LIST: u32 = 64;
const LARGE: u32 = 1024 * 1024;
const LAST: u64 = 1 << 63;

impl Path {
    /// What the passive end does meanwhile; nothing where it is not needed.
    pub fn opposite(self) -> Option<Work> {
        match self {
            Path::PostIdle | Path::PollWaiting => Some(Work::PingPong { wait: Wait::Spin, size: SMALL }),
            Path::Event => Some(Work::PingPong { wait: Wait::Block, size: SMALL }),
            Path::PostList => {
                Some(Work::Rate { size: SMALL, list: LIST, depth: LIST, target: Target::Polls })
            }
            Path::PostLarge => {
                let flow = Flow { verb: Verb::Write, size: LARGE, window: 1, signal: 1 };
                Some(Work::Stream { flow, target: Target::Polls })
            }
            Path::PollEmpty => None,
        }
    }
}

/// How much longer to try if nothing could be counted: on a busy machine the answer has seldom arrived at the
/// moment of the poll.
const GRACE: Duration = Duration::from_secs(5);

/// The active end's part, for about `time`.
pub fn walk(link: &Link, raw: &mut Raw, counter: &mut Counter, path: Path, time: Duration) -> Result<Calls> {
    counter.drop();
    counter.take();
    if path.opposite().is_some() {
        raw.receive_number()?;
    }
    let start = Instant::now();
    let over = |counted: u64| start.elapsed() >= if counted > 0 { time } else { time + GRACE };
    let (operations, spared) = match path {
        Path::PostIdle | Path::PollWaiting | Path::Event => ping(link, counter, path, over)?,
        Path::PostList => post_lists(link, raw, counter, over)?,
        Path::PostLarge => post_large(link, raw, counter, over)?,
        Path::PollEmpty => poll_empty(link, counter, over)?,
    };
    if operations == 0 {
        return Err(Failure::new("the path was never taken: this machine is too busy"));
    }
    Ok(Calls { operations, spared, calls: counter.take() })
}

/// A ping-pong with one part of it under the counter.
fn ping(link: &Link, counter: &mut Counter, path: Path, over: impl Fn(u64) -> bool) -> Result<(u64, u64)> {
    let mut message = link.send_list(OUT, SMALL, true);
    let (mut operations, mut spared, mut number) = (0, 0, 0_u64);
    if path == Path::Event {
        link.arm()?;
    }
    loop {
        number += 1;
        let last = over(operations);
        link.store(OUT + SMALL - 8, if last { number | LAST } else { number });
        counter.drop();
        match path {
            Path::PostIdle => {
                counter.count(|| link.post(&mut message)).0?;
                counter.keep();
                operations += 1;
            }
            _ => link.post(&mut message)?,
        }
        if path != Path::PollWaiting {
            while link.reap_sends()? == 0 {}
        }
        match path {
            Path::Event => loop {
                let (received, _) = counter.count(|| {
                    link.event()?;
                    link.arm()?;
                    link.reap_receive()
                });
                if received?.is_some() {
                    counter.keep();
                    operations += 1;
                    break;
                }
            },
            Path::PollWaiting => {
                // The answer must be in the socket when the counter runs: poll in earnest, so that the
                // library's own thread pauses, then give the answer the time that it needs. The send's
                // completion must wait: what says that it was placed may come together with the answer.
                if link.reap_receive()?.is_none() {
                    spin(Duration::from_micros(20));
                    let (received, calls) = counter.count(|| link.reap_receive());
                    if received?.is_some() {
                        operations += 1;
                        spared += u64::from(calls == 0);
                        counter.keep();
                    } else {
                        // Later than that: not the path in question.
                        wait(link)?;
                    }
                }
                while link.reap_sends()? == 0 {}
            }
            _ => wait(link)?,
        }
        let back = link.load(IN + SMALL - 8);
        link.post_receive()?;
        if back & !LAST != number {
            return Err(Failure::new("uwarp delivered a wrong message"));
        }
        if last {
            return Ok((operations, spared));
        }
    }
}

fn wait(link: &Link) -> Result<()> {
    while link.reap_receive()?.is_none() {}
    Ok(())
}

fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

fn post_lists(
    link: &Link,
    raw: &mut Raw,
    counter: &mut Counter,
    over: impl Fn(u64) -> bool,
) -> Result<(u64, u64)> {
    let places: Vec<_> = (0..LIST).map(|i| (SOURCE + i * SMALL, TARGET + i * SMALL)).collect();
    let mut list = link.write_list(&places, SMALL, false);
    let (mut operations, mut number) = (0, 0_u64);
    while !over(operations) {
        for i in 0..LIST {
            number += 1;
            link.store(SOURCE + i * SMALL + SMALL - 8, number);
        }
        counter.count(|| link.post(&mut list)).0?;
        counter.keep();
        operations += 1;
        while link.reap_sends()? == 0 {}
        // The next one must find an idle connection.
        spin(Duration::from_micros(50));
    }
    flow::report_count(link, raw, Target::Polls, number)?;
    Ok((operations, 0))
}

fn post_large(
    link: &Link,
    raw: &mut Raw,
    counter: &mut Counter,
    over: impl Fn(u64) -> bool,
) -> Result<(u64, u64)> {
    let mut write = link.write_list(&[(SOURCE, TARGET)], LARGE, false);
    let mut operations = 0;
    while !over(operations) {
        operations += 1;
        link.store(SOURCE + LARGE - 8, operations);
        // What the socket does not take at once, polling sends.
        let (done, _) = counter.count(|| {
            link.post(&mut write)?;
            while link.reap_sends()? == 0 {}
            Ok(())
        });
        done?;
        counter.keep();
        spin(Duration::from_micros(500));
    }
    flow::report_count(link, raw, Target::Polls, operations)?;
    Ok((operations, 0))
}

fn poll_empty(link: &Link, counter: &mut Counter, over: impl Fn(u64) -> bool) -> Result<(u64, u64)> {
    let mut operations = 0;
    while !over(operations) {
        for _ in 0..100 {
            if counter.count(|| link.reap_receive()).0?.is_some() {
                return Err(Failure::new("an unexpected message arrived"));
            }
            operations += 1;
        }
        counter.keep();
    }
    Ok((operations, 0))
}
