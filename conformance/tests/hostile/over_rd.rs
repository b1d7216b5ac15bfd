//! Streams of reliable datagrams, from a process that has made contact and means no good: what it opens,
//! leaves, floods and says falsely costs the victim little, for a while, and others nothing.

use std::time::{Duration, Instant};

use uwarp_conformance::attacker::datagrams::{Exchange, FIN, credit, ping, reset, stream};
use uwarp_conformance::attacker::encode::{ENHANCED, Setup, Tagged, Untagged, fpdus};
use uwarp_conformance::attacker::peer::PATIENCE;
use uwarp_conformance::attacker::victim::Victim;
use uwarp_conformance::{Outcome, require};

use crate::floods::bounded;

const MIB: usize = 1 << 20;

/// By which the victim's process goes by reliable datagrams, and its honest client.
pub const OVER_RD: &[(&str, &str)] = &[("UWARP_LINK", "rd")];

fn request() -> Vec<u8> {
    Setup { flags: ENHANCED, ..Setup::request2() }.bytes()
}

/// A connection that the victim's program has. Returns its stream and the position behind what was sent.
fn established(exchange: &mut Exchange, port: u16) -> Outcome<(u32, u32)> {
    let number = exchange.new_stream();
    let request = request();
    exchange.say(&stream(number, 0, Some(port.into()), 0, &request))?;
    exchange.wait_for(number, 20)?;
    let ready = Tagged::write(0, 0, 0).fpdu();
    let at = request.len() as u32;
    exchange.say(&stream(number, at, None, 0, &ready))?;
    Ok((number, at + ready.len() as u32))
}

/// The victim has no connection but the honest one, and as many requests as before, and `more`.
fn quiet(victim: &mut Victim, before: u64, more: u64) -> Outcome {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let [requests, _, open] = victim.sync()?;
        if open == 1 && requests == before + more {
            return Ok(());
        }
        require!(Instant::now() < deadline, "{requests} requests, {before} before, and {open} connections");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Twice the same: what it costs the second time was not given back.
fn twice(victim: &mut Victim, mut attack: impl FnMut(&mut Victim) -> Outcome) -> Outcome {
    let before = victim.memory()?;
    attack(victim)?;
    bounded(victim, before, 16)?;
    victim.recovers()?;
    let between = victim.memory()?;
    attack(victim)?;
    let after = victim.memory()?;
    require!(after < between + 8 * MIB, "{} KiB more each time", after.saturating_sub(between) / 1024);
    Ok(())
}

/// Streams by the ten thousand that say nothing. Nobody acknowledges what the victim answers.
pub fn streams_that_say_nothing(victim: &mut Victim) -> Outcome {
    let service = Some(victim.port.into());
    let [before, ..] = victim.sync()?;
    twice(victim, |victim| {
        victim.innocent_begins(20)?;
        for _ in 0..4 {
            let mut exchange = Exchange::begin(victim.port)?;
            exchange.is_silent = true;
            let numbers: Vec<u32> = (0..5000).map(|_| exchange.new_stream()).collect();
            exchange.flood(
                numbers.chunks(8).map(|some| {
                    some.iter().flat_map(|number| stream(*number, 0, service, 0, b"M")).collect()
                }),
            )?;
        }
        victim.innocent_done()
    })?;
    quiet(victim, before, 0)
}

/// Half a request and then the end, a reset, or nothing.
pub fn streams_abandoned_half_way(victim: &mut Victim) -> Outcome {
    let service = Some(victim.port.into());
    let half = &request()[..20];
    let [before, ..] = victim.sync()?;
    twice(victim, |victim| {
        let mut exchange = Exchange::begin(victim.port)?;
        victim.innocent_begins(20)?;
        for end in 0..3 {
            let numbers: Vec<u32> = (0..2000).map(|_| exchange.new_stream()).collect();
            exchange.flood(numbers.iter().map(|number| {
                let flags = if end == 0 { FIN } else { 0 };
                let opening = stream(*number, 0, service, flags, half);
                if end == 1 { [opening, reset(*number)].concat() } else { opening }
            }))?;
        }
        victim.innocent_done()
    })?;
    quiet(victim, before, 0)
}

/// Connections that the victim has ended, and whose end the attacker never acknowledges.
pub fn ends_that_are_not_acknowledged(victim: &mut Victim) -> Outcome {
    twice(victim, |victim| {
        for _ in 0..4 {
            let mut exchange = Exchange::begin(victim.port)?;
            let mut streams = Vec::new();
            for _ in 0..12 {
                streams.push(established(&mut exchange, victim.port)?);
            }
            exchange.is_silent = true;
            // An FPDU that is wrong: the victim answers and ends the stream.
            let wrong = Tagged::write(0xBAD0_0BAD, 0, 8).fpdu();
            for (number, at) in &streams {
                exchange.say(&stream(*number, *at, None, 0, &wrong))?;
            }
            for _ in &streams {
                let report = victim.report()?;
                require!(report.established && report.changed.is_empty(), "{report:?}");
            }
        }
        Ok(())
    })
}

/// What the victim answers to, as fast as it goes; nothing of its answers is acknowledged.
pub fn resets_and_services_that_nobody_has(victim: &mut Victim) -> Outcome {
    let [before, ..] = victim.sync()?;
    let other = Some(u32::from(victim.port) ^ 0x5A00_0000);
    twice(victim, |victim| {
        let mut exchange = Exchange::begin(victim.port)?;
        exchange.is_silent = true;
        victim.innocent_begins(20)?;
        exchange.flood((0..20_000u32).map(|n| {
            let (own, its) = (n << 1, n << 1 | 1);
            [stream(own, 0, other, 0, b"?"), reset(own), reset(its), credit(n, u32::MAX)].concat()
        }))?;
        exchange.flood((0..40_000u32).map(|_| ping()))?;
        victim.innocent_done()
    })?;
    let mut exchange = Exchange::begin(victim.port)?;
    let number = exchange.new_stream();
    exchange.say(&stream(number, 0, other, 0, b"?"))?;
    let deadline = Instant::now() + PATIENCE;
    while !exchange.resets.contains_key(&number) {
        require!(Instant::now() < deadline, "a service that nobody has is not refused");
        exchange.read(Duration::from_millis(20))?;
    }
    quiet(victim, before, 0)
}

/// Numbers of streams that are over, or were never begun; of both ends.
pub fn numbers_that_are_used_again(victim: &mut Victim) -> Outcome {
    let port = victim.port;
    let [before, ..] = victim.sync()?;
    let mut exchange = Exchange::begin(port)?;
    let (first, _) = established(&mut exchange, port)?;
    exchange.say(&reset(first))?;
    let report = victim.report()?;
    require!(report.established && report.changed.is_empty(), "{report:?}");
    // 5: what the victim might open. 1000 was reset before it began.
    exchange.say(&reset(1000))?;
    for number in [first, 1000, 5, first | 1] {
        exchange.say(&stream(number, 0, Some(port.into()), 0, &request()))?;
        exchange.say(&stream(number, 0, Some(port.into()), FIN, &request()))?;
    }
    victim.innocent(3)?;
    quiet(victim, before, 1)?;
    require!(exchange.came.len() == 1, "answers on {:?}", exchange.came.keys());
    // The exchange itself still serves.
    let (number, at) = established(&mut exchange, port)?;
    exchange.say(&stream(number, at, None, FIN, &[]))?;
    victim.report()?;
    quiet(victim, before, 2)
}

/// More than was granted, with and without gaps; limits that go back and forth.
pub fn credits_that_lie_and_data_beyond_the_limit(victim: &mut Victim) -> Outcome {
    let port = victim.port;
    let before = victim.memory()?;
    let mut exchange = Exchange::begin(port)?;
    let (number, at) = established(&mut exchange, port)?;
    victim.innocent_begins(20)?;
    for far in [0x0003_0000, 0x0100_0000, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FF00u32] {
        exchange.send(&stream(number, at.wrapping_add(far), None, 0, &[0xEE; 1000]))?;
        exchange.send(&stream(number, at.wrapping_add(far), None, FIN, &[]))?;
        for limit in [0, far, u32::MAX, at] {
            exchange.say(&credit(number, limit))?;
            exchange.say(&credit(number + 2, limit))?;
        }
    }
    // Every second byte of what may come, in as many ranges as there are.
    exchange.flood((at + 1..at + 20_000).step_by(64).map(|from| {
        (from..from + 64).step_by(2).flat_map(|at| stream(number, at, None, 0, b"x")).collect()
    }))?;
    victim.innocent_done()?;
    bounded(victim, before, 1)?;
    // Nothing of that has reached the stream's order: it goes on, up to the bytes that were kept.
    exchange.say(&reset(number))?;
    let report = victim.report()?;
    require!(report.established && report.changed.is_empty(), "{report:?}");
    let (number, at) = established(&mut exchange, port)?;
    let write = victim.region("write");
    let bytes = fpdus([Tagged::write(write.stag, write.at, 333).ulpdu(), Untagged::send(1, 64).ulpdu()]);
    exchange.say(&stream(number, at, None, FIN, &bytes))?;
    let report = victim.report()?;
    require!(report.changed.starts_with("write:0-332"), "{report:?}");
    Ok(())
}
