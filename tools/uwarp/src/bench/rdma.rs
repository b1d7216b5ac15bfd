//! Messages there and back over uwarp, as programs exchange them.

use std::time::{Duration, Instant};

use super::eventfds::{LATE, be_late};
use super::fabric::{IN, Link, List, OUT, SMALL, SOURCE, TARGET};
use super::protocol::{Failure, Figure, LARGEST, Result, Verb, Wait};
use super::raw::{NO_NUMBER, REQUEST, Raw, Trips, is_last};

/// If completions of Sends are not awaited, one Send in this number is signalled, so that the send queue
/// drains.
const SIGNAL_EVERY: u64 = 64;

/// One side of a ping-pong: sends a number, or waits for one. It does not use the clock, so that both sides
/// are the same.
struct PingPongEnd<'a> {
    link: &'a Link,
    wait: Wait,
    /// Where in a message its number is.
    end: u32,
    signalled: List,
    unsignalled: List,
    /// What [`Wait::Memory`] last saw.
    seen: u64,
}

impl<'a> PingPongEnd<'a> {
    fn new(link: &'a Link, wait: Wait, size: u32) -> Result<PingPongEnd<'a>> {
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
        if matches!(wait, Wait::Block | Wait::Late | Wait::Descriptor) {
            link.arm()?;
        }
        Ok(PingPongEnd { link, wait, end, signalled, unsignalled, seen: 0 })
    }

    #[inline]
    fn send(&mut self, number: u64) -> Result<()> {
        self.link.store(OUT + self.end, number);
        match self.wait {
            // As ib_send_lat and ib_write_lat: every one is signalled, and its completion taken before going
            // on.
            Wait::Spin | Wait::Memory | Wait::Answer => {
                self.link.post(&mut self.signalled)?;
                while self.link.reap_sends()? == 0 {}
                Ok(())
            }
            Wait::Block | Wait::Late | Wait::Descriptor if number.is_multiple_of(SIGNAL_EVERY) => {
                self.link.post(&mut self.signalled)?;
                self.link.reap_sends().map(drop)
            }
            Wait::Block | Wait::Late | Wait::Descriptor => self.link.post(&mut self.unsignalled),
        }
    }

    #[inline]
    fn wait(&mut self) -> Result<u64> {
        match self.wait {
            // `Answer` is handled elsewhere.
            Wait::Spin | Wait::Answer => loop {
                if self.link.reap_receive()?.is_some() {
                    let number = self.take()?;
                    if number != NO_NUMBER {
                        return Ok(number);
                    }
                }
            },
            Wait::Block | Wait::Late | Wait::Descriptor => loop {
                if self.wait == Wait::Descriptor {
                    self.link.descriptor()?;
                }
                self.link.event()?;
                self.link.arm()?;
                if self.link.reap_receive()?.is_some() {
                    return self.take();
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
    fn take(&self) -> Result<u64> {
        let number = self.link.load(self.link.received() + self.end);
        self.link.post_receive()?;
        Ok(number)
    }

    /// Leaves nothing behind for the next round: all Sends completed, no event queued.
    fn finish(self) -> Result<()> {
        while self.link.reap_sends()? > 0 {}
        Ok(())
    }
}

/// The active side of a ping-pong. `raw` carries the message that the passive side is ready.
pub fn ping(link: &Link, raw: &mut Raw, wait: Wait, size: u32, time: Duration) -> Result<Figure> {
    if wait == Wait::Answer {
        return fetch_and_add(link, raw, time);
    }
    let mut own = PingPongEnd::new(link, wait, size)?;
    raw.receive_number()?;
    let mut trips = Trips::start(time);
    if wait == Wait::Late {
        be_late(Instant::now());
    }
    while let Some(number) = trips.next() {
        own.send(number)?;
        let answer = own.wait()?;
        let since = (wait == Wait::Late).then(Instant::now);
        trips.end(answer)?;
        since.into_iter().for_each(be_late);
    }
    own.finish()?;
    trips.late_figure(2, if wait == Wait::Late { 2 * LATE } else { Duration::ZERO })
}

/// The passive side.
pub fn pong(link: &Link, raw: &mut Raw, wait: Wait, size: u32) -> Result<()> {
    if wait == Wait::Answer {
        return await_sum(link, raw);
    }
    let mut own = PingPongEnd::new(link, wait, size)?;
    raw.send_number(0)?;
    loop {
        let number = own.wait()?;
        if wait == Wait::Late {
            be_late(Instant::now());
        }
        own.send(number)?;
        if is_last(number) {
            return own.finish();
        }
    }
}

/// The active side of a ping that the peer's library answers: adds to a word of the peer's so that it becomes
/// the number.
fn fetch_and_add(link: &Link, raw: &mut Raw, time: Duration) -> Result<Figure> {
    let mut add = link.fetch_add(OUT, TARGET);
    raw.receive_number()?;
    let mut there = 0;
    let mut trips = Trips::start(time);
    while let Some(number) = trips.next() {
        let step = number.wrapping_sub(there);
        add.set_operand(step);
        link.post(&mut add)?;
        while link.reap_sends()? == 0 {}
        there = number;
        trips.end(link.load(OUT).wrapping_add(step))?;
    }
    trips.figure(2)
}

/// The passive side: polls until the last number has arrived.
fn await_sum(link: &Link, raw: &mut Raw) -> Result<()> {
    link.store(TARGET, 0);
    raw.send_number(0)?;
    while !is_last(link.load(TARGET)) {
        if link.reap_receive()?.is_some() {
            return Err(Failure::new("an unexpected message arrived"));
        }
    }
    Ok(())
}

/// The active side of transactions, both ends polling: a Send of the request, and the wait for the response.
/// What the peer Writes is at [`TARGET`], what it Reads at [`SOURCE`].
pub fn request(link: &Link, raw: &mut Raw, verb: Verb, size: u32, time: Duration) -> Result<Figure> {
    let end = fits(size)?;
    let mut request = link.send_list(OUT, REQUEST, true);
    link.store(TARGET + end, 0);
    raw.receive_number()?;
    let mut trips = Trips::start(time);
    while let Some(number) = trips.next() {
        link.store(OUT + REQUEST - 8, number);
        if verb == Verb::Read {
            link.store(SOURCE + end, number);
        }
        link.post(&mut request)?;
        while link.reap_receive()?.is_none() {}
        let answer = match verb {
            // Payload that came too late, or not at all, is a wrong answer.
            Verb::Write if link.load(TARGET + end) != number => 0,
            _ => link.load(IN + REQUEST - 8),
        };
        link.post_receive()?;
        // Usually there: the response came behind it.
        while link.reap_sends()? == 0 {}
        trips.end(answer)?;
    }
    trips.figure(1)
}

/// The passive side: a Write with the response behind it, posted as one list, as NVMe-oF and iSER targets do
/// it; or a Read, and the response when that is completed.
pub fn respond(link: &Link, raw: &mut Raw, verb: Verb, size: u32) -> Result<()> {
    let end = fits(size)?;
    let mut both = link.write_and_send(size, REQUEST);
    let mut read = link.message(Verb::Read, size, true);
    let mut response = link.send_list(OUT, REQUEST, true);
    link.store(TARGET + end, 0);
    raw.send_number(0)?;
    let mut under_way = 0;
    loop {
        while link.reap_receive()?.is_none() {}
        let number = link.load(IN + REQUEST - 8);
        link.post_receive()?;
        under_way -= link.reap_sends()?;
        link.store(OUT + REQUEST - 8, number);
        if verb == Verb::Read {
            while under_way > 0 {
                under_way -= link.reap_sends()?;
            }
            link.post(&mut read)?;
            while link.reap_sends()? == 0 {}
            if link.load(TARGET + end) != number {
                return Err(Failure::new("an RDMA Read returned wrong data"));
            }
            link.post(&mut response)?;
        } else {
            link.store(SOURCE + end, number);
            link.post(&mut both)?;
        }
        under_way += 1;
        if is_last(number) {
            while under_way > 0 {
                under_way -= link.reap_sends()?;
            }
            return Ok(());
        }
    }
}

/// Where the last word of a message of this size is.
pub fn fits(size: u32) -> Result<u32> {
    if (8..=LARGEST).contains(&size) && size.is_multiple_of(8) {
        return Ok(size - 8);
    }
    Err(Failure(format!("messages hold 8 to {LARGEST} bytes in steps of 8")))
}
