//! The ends' part: messages one at a time, where only the calls on the path are counted.
//!
//! Under callgrind everything takes fifty times as long, so a count should not depend on time. Before an end
//! takes its turn, the other one has finished its own and polled in vain a few times, as it would while it
//! waits for an answer. So each message is there when it is first looked for, and a thread that polls is
//! known as one. Whose turn it is goes over raw TCP, uncounted.

use super::callgrind;
use crate::bench::fabric::crowd::Crowd;
use crate::bench::fabric::{Link, List, OUT, SOURCE, TARGET};
use crate::bench::protocol::{Counted, Failure, Result, Role, Verb};
use crate::bench::raw::Raw;

/// How often all of it is counted: on a busy machine, the library's thread may wake where it would not
/// otherwise.
pub const SAMPLES: u32 = 5;
/// Before anything is counted.
const WARM_UP: u32 = 64;
/// Polls in vain in each turn: after so many, a thread polls in earnest.
const IN_VAIN: u32 = 6;
/// Polls for a completion that is there, as the first one may serve other sockets.
const ATTEMPTS: u32 = 10_000;
/// Writes in a list.
pub const LIST: u32 = 64;
const SMALL: u32 = 64;

/// What the ends do in their turns. All but `idle` is counted.
trait Turns {
    fn idle(&mut self) -> Result<()>;
    /// The active end begins.
    fn begin(&mut self, number: u64) -> Result<()>;
    /// The passive end takes what has come, and answers if there is an answer.
    fn answer(&mut self, number: u64) -> Result<()>;
    /// The active end takes the answer and its completion.
    fn finish(&mut self, number: u64) -> Result<()>;
}

/// Carries out `n` steps of this kind, and counts them, [`SAMPLES`] times.
pub fn count(
    (link, crowd): (&Link, Option<&Crowd>),
    raw: &mut Raw,
    what: Counted,
    role: Role,
    n: u32,
) -> Result<()> {
    match what {
        Counted::EmptyPolls => poll_in_vain(link, raw, role, n),
        Counted::Message { size } => take_turns(&mut Messages::new(link, size), raw, role, n),
        Counted::Datagram => {
            let mut turns = Messages { completes_at_once: true, ..Messages::new(link, SMALL) };
            take_turns(&mut turns, raw, role, n)
        }
        Counted::Reliable => take_turns(&mut Messages::new(link, SMALL), raw, role, n),
        Counted::Writes => take_turns(&mut Writes::new(link), raw, role, n),
        Counted::Crowd => {
            let crowd = crowd.ok_or_else(|| Failure::new("no crowd"))?;
            take_turns(&mut CrowdTurns { crowd, next: 0 }, raw, role, n)
        }
    }
}

/// The calling thread counts if it did not, and does not if it did. It does at first.
fn toggled<T>(step: impl FnOnce() -> Result<T>) -> Result<T> {
    callgrind::toggle();
    let value = step();
    callgrind::toggle();
    value
}

/// At the active end only.
fn poll_in_vain(link: &Link, raw: &mut Raw, role: Role, polls: u32) -> Result<()> {
    toggled(|| {
        let poll = || link.reap_receive().map(drop);
        if role == Role::Active {
            (0..WARM_UP * IN_VAIN).try_for_each(|_| poll())?;
        }
        for _ in 0..SAMPLES {
            callgrind::begin();
            if role == Role::Active {
                toggled(|| (0..polls).try_for_each(|_| poll()))?;
            }
            callgrind::end();
        }
        raw.send_number(0)?;
        raw.receive_number().map(drop)
    })
}

fn take_turns(turns: &mut impl Turns, raw: &mut Raw, role: Role, messages: u32) -> Result<()> {
    toggled(|| {
        take(turns, raw, role, 0..WARM_UP)?;
        for sample in 0..SAMPLES {
            let first = WARM_UP + sample * messages;
            callgrind::begin();
            take(turns, raw, role, first..first + messages)?;
            callgrind::end();
        }
        Ok(())
    })
}

fn take(turns: &mut impl Turns, raw: &mut Raw, role: Role, numbers: std::ops::Range<u32>) -> Result<()> {
    for number in numbers {
        let number = u64::from(number) + 1;
        let over = |turns: &mut dyn Turns, raw: &mut Raw| {
            (0..IN_VAIN).try_for_each(|_| turns.idle())?;
            raw.send_number(number)
        };
        match role {
            Role::Active => {
                toggled(|| turns.begin(number))?;
                over(turns, raw)?;
                raw.receive_number()?;
                toggled(|| turns.finish(number))?;
            }
            Role::Passive => {
                raw.receive_number()?;
                toggled(|| turns.answer(number))?;
                over(turns, raw)?;
            }
        }
    }
    Ok(())
}

/// Polls until `found`.
fn until(mut found: impl FnMut() -> Result<bool>) -> Result<()> {
    for _ in 0..ATTEMPTS {
        if found()? {
            return Ok(());
        }
    }
    Err(Failure::new("a completion did not come"))
}

/// A Send and the answer to it, both signalled.
struct Messages<'a> {
    link: &'a Link,
    list: List,
    unfinished: u32,
    /// Datagrams complete when they are sent.
    completes_at_once: bool,
}

impl<'a> Messages<'a> {
    fn new(link: &'a Link, size: u32) -> Self {
        let list = match size {
            SMALL => link.send_list(OUT, size, true),
            _ => link.message(Verb::Send, size, true),
        };
        Self { link, list, unfinished: 0, completes_at_once: false }
    }

    fn post(&mut self) -> Result<()> {
        self.link.post(&mut self.list)?;
        self.unfinished += 1;
        if self.completes_at_once { self.complete() } else { Ok(()) }
    }

    fn receive(&mut self) -> Result<()> {
        until(|| Ok(self.link.reap_receive()?.is_some()))?;
        self.link.post_receive()?;
        // With the message came the acknowledgement of what was sent before it.
        self.complete()
    }

    fn complete(&mut self) -> Result<()> {
        until(|| {
            if self.unfinished > 0 {
                self.unfinished -= self.link.reap_sends()?;
            }
            Ok(self.unfinished == 0)
        })
    }
}

impl Turns for Messages<'_> {
    fn idle(&mut self) -> Result<()> {
        self.link.reap_sends().map(|found| self.unfinished -= found)
    }

    fn begin(&mut self, _: u64) -> Result<()> {
        self.post()
    }

    fn answer(&mut self, _: u64) -> Result<()> {
        self.receive()?;
        self.post()
    }

    fn finish(&mut self, _: u64) -> Result<()> {
        self.receive()
    }
}

/// A list of Writes, the last one signalled. The target polls once.
struct Writes<'a> {
    link: &'a Link,
    list: List,
    last: u32,
}

impl<'a> Writes<'a> {
    fn new(link: &'a Link) -> Self {
        let places: Vec<_> = (0..LIST).map(|n| (SOURCE + n * SMALL, TARGET + n * SMALL)).collect();
        let list = link.write_list(&places, SMALL, false);
        Self { link, list, last: LIST * SMALL - 8 }
    }
}

impl Turns for Writes<'_> {
    fn idle(&mut self) -> Result<()> {
        self.link.reap_receive().map(drop)
    }

    fn begin(&mut self, number: u64) -> Result<()> {
        self.link.store(SOURCE + self.last, number);
        self.link.post(&mut self.list)
    }

    fn answer(&mut self, number: u64) -> Result<()> {
        until(|| {
            self.link.reap_receive()?;
            Ok(self.link.load(TARGET + self.last) == number)
        })
    }

    fn finish(&mut self, _: u64) -> Result<()> {
        until(|| Ok(self.link.reap_sends()? > 0))
    }
}

/// A message and its answer on one of many connections, in turn, that share completion queues.
struct CrowdTurns<'a> {
    crowd: &'a Crowd,
    next: u32,
}

impl CrowdTurns<'_> {
    fn receive(&mut self) -> Result<()> {
        until(|| self.crowd.take_one())
    }
}

impl Turns for CrowdTurns<'_> {
    fn idle(&mut self) -> Result<()> {
        self.crowd.poll_sends()
    }

    fn begin(&mut self, _: u64) -> Result<()> {
        self.crowd.send_on(self.next)
    }

    fn answer(&mut self, number: u64) -> Result<()> {
        self.receive()?;
        self.crowd.poll_sends()?;
        self.begin(number)?;
        self.next = (self.next + 1) % self.crowd.len() as u32;
        Ok(())
    }

    fn finish(&mut self, _: u64) -> Result<()> {
        self.receive()?;
        self.next = (self.next + 1) % self.crowd.len() as u32;
        self.crowd.poll_sends()
    }
}
