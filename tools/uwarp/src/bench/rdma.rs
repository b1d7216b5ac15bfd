//! The same traffic over uwarp, as programs do it.

use std::time::{Duration, Instant};

use super::fabric::{Link, List, OUT, Received, SMALL, SOURCE, TARGET};
use super::protocol::{Failure, Figure, LARGEST, Result, Target, Wait};
use super::raw::{Raw, half, ping_figure};

/// In the last word of a ping: this is the last one.
const LAST: u64 = 1 << 63;
/// Of Sends whose end nobody waits for, one in so many is signalled, so that the send queue empties.
const SIGNAL_EVERY: u64 = 64;

/// One side's part of a ping-pong: sends a number, or waits for one. Kept apart from the clock, so that both sides are
/// the same.
struct Ball<'a> {
    link: &'a Link,
    wait: Wait,
    /// Where in a message its number is.
    end: u32,
    signalled: List,
    unsignalled: List,
    /// What [`Wait::Memory`] last saw.
    seen: u64,
}

impl<'a> Ball<'a> {
    fn new(link: &'a Link, wait: Wait, size: u32) -> Result<Ball<'a>> {
        if !(8..=SMALL).contains(&size) || !size.is_multiple_of(8) {
            return Err(Failure(format!("a ping-pong over uwarp holds 8 to {SMALL} bytes in steps of 8")));
        }
        let (signalled, unsignalled) = match wait {
            Wait::Memory => (link.write_list(&[(OUT, TARGET)], size, true), link.send_list(OUT, size, false)),
            _ => (link.send_list(OUT, size, true), link.send_list(OUT, size, false)),
        };
        let end = size - 8;
        if wait == Wait::Memory {
            // Of an earlier round; the peer begins only after both ends have begun.
            link.store(TARGET + end, 0);
        }
        if matches!(wait, Wait::Block | Wait::Descriptor) {
            link.arm()?;
        }
        Ok(Ball { link, wait, end, signalled, unsignalled, seen: 0 })
    }

    #[inline]
    fn send(&mut self, number: u64) -> Result<()> {
        self.link.store(OUT + self.end, number);
        match self.wait {
            // As ib_send_lat and ib_write_lat: every one is signalled, and its completion taken before going on.
            Wait::Spin | Wait::Memory => {
                self.link.post(&mut self.signalled)?;
                while self.link.reap_sends()? == 0 {}
                Ok(())
            }
            Wait::Block | Wait::Descriptor if number.is_multiple_of(SIGNAL_EVERY) => {
                self.link.post(&mut self.signalled)?;
                self.link.reap_sends().map(drop)
            }
            Wait::Block | Wait::Descriptor => self.link.post(&mut self.unsignalled),
        }
    }

    #[inline]
    fn wait(&mut self) -> Result<u64> {
        match self.wait {
            Wait::Spin => loop {
                if let Some(received) = self.link.reap_receive()? {
                    return self.take(received);
                }
            },
            Wait::Block | Wait::Descriptor => loop {
                if self.wait == Wait::Descriptor {
                    self.link.descriptor()?;
                }
                self.link.event()?;
                self.link.arm()?;
                if let Some(received) = self.link.reap_receive()? {
                    return self.take(received);
                }
            },
            Wait::Memory => loop {
                let number = self.link.load(TARGET + self.end);
                if number != self.seen {
                    self.seen = number;
                    return Ok(number);
                }
                std::hint::spin_loop();
            },
        }
    }

    #[inline]
    fn take(&self, received: Received) -> Result<u64> {
        let number = self.link.load(received.offset + self.end);
        self.link.post_receive(received.slot)?;
        Ok(number)
    }

    /// Leaves nothing behind for the next round: all Sends completed, no event queued.
    fn finish(self) -> Result<()> {
        while self.link.reap_sends()? > 0 {}
        Ok(())
    }
}

/// The active side of a ping-pong. `raw` carries the word that the passive side is ready.
pub fn ping(link: &Link, raw: &mut Raw, wait: Wait, size: u32, time: Duration) -> Result<Figure> {
    let mut ball = Ball::new(link, wait, size)?;
    raw.receive_number()?;
    let mut halves = Vec::with_capacity(1 << 20);
    let start = Instant::now();
    let (mut last, mut number) = (start, 0_u64);
    loop {
        number += 1;
        let over = last - start >= time;
        ball.send(if over { number | LAST } else { number })?;
        if ball.wait()? & !LAST != number {
            return Err(Failure::new("uwarp brought a wrong message"));
        }
        let now = Instant::now();
        halves.push(half(now - last));
        last = now;
        if over {
            break;
        }
    }
    ball.finish()?;
    ping_figure(&mut halves)
}

/// The passive side.
pub fn pong(link: &Link, raw: &mut Raw, wait: Wait, size: u32) -> Result<()> {
    let mut ball = Ball::new(link, wait, size)?;
    raw.send_number(0)?;
    loop {
        let number = ball.wait()?;
        ball.send(number)?;
        if number & LAST != 0 {
            return ball.finish();
        }
    }
}

/// Writes for about `time`, all to one place, as `ib_write_bw` does. The figure is bytes a second until the target has
/// said that it has them all.
pub fn stream(
    link: &Link,
    raw: &mut Raw,
    size: u32,
    window: u32,
    target: Target,
    time: Duration,
) -> Result<Figure> {
    if !(8..=LARGEST).contains(&size) || !size.is_multiple_of(8) {
        return Err(Failure(format!("Writes hold 8 to {LARGEST} bytes in steps of 8")));
    }
    let mut write = link.write_list(&[(SOURCE, TARGET)], size, false);
    link.store(SOURCE + size - 8, 0);
    raw.receive_number()?;
    let start = Instant::now();
    let (mut posted, mut under_way) = (0_u64, 0);
    while start.elapsed() < time {
        while under_way < window.max(1) {
            link.post(&mut write)?;
            posted += 1;
            under_way += 1;
        }
        under_way -= link.reap_sends()?;
    }
    // The last one carries the count; its bytes must not change while others are under way.
    while under_way > 0 {
        under_way -= link.reap_sends()?;
    }
    posted += 1;
    link.store(SOURCE + size - 8, posted);
    link.post(&mut write)?;
    let reaped = tell(link, raw, target, posted)?;
    let seconds = start.elapsed().as_secs_f64();
    settle(link, 1, reaped)?;
    Ok(Figure { value: posted as f64 * f64::from(size) / seconds, p99: None, operations: posted })
}

/// The target of [`stream`].
pub fn sink(link: &Link, raw: &mut Raw, size: u32, target: Target) -> Result<()> {
    let end = TARGET + size.min(LARGEST) - 8;
    link.store(end, 0);
    await_end(link, raw, target, |count| Ok(link.load(end) == count))
}

/// Small Writes in lists, numbered, into as many slots as may be under way.
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
    let reaped = tell(link, raw, target, posted)?;
    let seconds = start.elapsed().as_secs_f64();
    settle(link, under_way, reaped)?;
    Ok(Figure { value: posted as f64 / seconds, p99: None, operations: posted })
}

/// The target of [`rate`]: the numbers in the slots say what arrived.
pub fn count(link: &Link, raw: &mut Raw, size: u32, (list, depth): (u32, u32), target: Target) -> Result<()> {
    let (list, lists) = shape(size, list, depth)?;
    let slots = list * lists;
    let word = |index: u32| TARGET + index * size + size - 8;
    (0..slots).for_each(|index| link.store(word(index), 0));
    await_end(link, raw, target, |count| {
        // The last number that went into each slot.
        let newest = |index: u32| {
            let number = u64::from(index) + 1;
            (number <= count).then(|| count - (count - number) % u64::from(slots))
        };
        Ok((0..slots).all(|index| link.load(word(index)) == newest(index).unwrap_or(0)))
    })
}

/// Requests in a list, and lists under way.
fn shape(size: u32, list: u32, depth: u32) -> Result<(u32, u32)> {
    let lists = depth / list.max(1);
    if list == 0 || lists == 0 || size < 8 || !size.is_multiple_of(8) || list * lists * size > LARGEST {
        return Err(Failure::new("messages, lists and depth do not fit together"));
    }
    Ok((list, lists))
}

/// Tells the target how much it should have by now, and waits until it says so. The Send arrives behind all Writes.
/// Answers how many completions it took meanwhile.
pub fn tell(link: &Link, raw: &mut Raw, target: Target, count: u64) -> Result<u32> {
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
                if let Some(received) = link.reap_receive()? {
                    let answer = link.load(received.offset);
                    link.post_receive(received.slot)?;
                    break answer;
                }
                reaped += link.reap_sends()?;
            }
        }
    };
    if answer == count {
        Ok(reaped)
    } else {
        Err(Failure::new("the target does not have in memory what was written"))
    }
}

/// Takes the completions that are still to come.
fn settle(link: &Link, wanted: u32, mut reaped: u32) -> Result<()> {
    while reaped < wanted {
        reaped += link.reap_sends()?;
    }
    Ok(())
}

/// Waits for the initiator's count, looks whether memory holds as much, and answers.
fn await_end(link: &Link, raw: &mut Raw, target: Target, has: impl Fn(u64) -> Result<bool>) -> Result<()> {
    const PATIENCE: Duration = Duration::from_secs(5);
    if target == Target::Blocks {
        link.arm()?;
    }
    raw.send_number(0)?;
    if target == Target::Sleeps {
        let count = raw.receive_number()?;
        let start = Instant::now();
        // Another connection brought the count: the Writes may still be on their way.
        while !has(count)? && start.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        return raw.send_number(if has(count)? { count } else { 0 });
    }
    let received = loop {
        if target == Target::Blocks {
            link.event()?;
            link.arm()?;
        }
        if let Some(received) = link.reap_receive()? {
            break received;
        }
    };
    let count = link.load(received.offset);
    link.post_receive(received.slot)?;
    link.store(OUT, if has(count)? { count } else { 0 });
    let mut message = link.send_list(OUT, 8, true);
    link.post(&mut message)?;
    while link.reap_sends()? == 0 {}
    Ok(())
}
