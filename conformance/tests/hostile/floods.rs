//! Much of what is cheap to send: memory stays bounded, and the others are served.

use std::time::Duration;

use uwarp_conformance::attacker::encode::{ReadRequest, Tagged, Untagged, fpdus};
use uwarp_conformance::attacker::peer::{End, PATIENCE, Peer};
use uwarp_conformance::attacker::victim::Victim;
use uwarp_conformance::{Failure, Outcome, require};

use crate::{FLUSHED, Fate, meet, strike};

const MIB: usize = 1 << 20;

/// Memory the victim may come to own beyond what it had, for `connections` at once (docs/contracts.md): 4 MiB
/// for each, at most 64 MiB.
pub fn bounded(victim: &Victim, before: usize, connections: usize) -> Outcome {
    let now = victim.memory()?;
    let limit = (4 * MIB * connections).min(64 * MIB) + 4 * MIB;
    require!(now < before + limit, "{} KiB more than before", now.saturating_sub(before) / 1024);
    Ok(())
}

/// A guess costs the attacker a connection, and tells it nothing.
pub fn guessing_stags(victim: &mut Victim) -> Outcome {
    let port = victim.port;
    let at = victim.region("both").at;
    victim.innocent_begins(100)?;
    let guessers: Vec<_> = (0..2u32)
        .map(|thread| {
            std::thread::spawn(move || -> Outcome {
                let mut stag = 0x9E37_79B9u32.wrapping_mul(thread + 1);
                for n in 0..300u32 {
                    stag = stag.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let mut peer = Peer::established(port)?;
                    // Behind the first wrong guess nothing is looked at.
                    let guesses: Vec<_> =
                        (0..50).map(|k| Tagged::write(stag.wrapping_add(k), at, 8).ulpdu()).collect();
                    let reads: Vec<_> = (0..4u32)
                        .map(|k| {
                            Untagged::read(k + 1, &ReadRequest::new(8, stag.wrapping_add(k), at)).ulpdu()
                        })
                        .collect();
                    let (bytes, codes) =
                        if n % 2 == 0 { (fpdus(guesses), (1, 1, 0)) } else { (fpdus(reads), (0, 1, 0)) };
                    peer.send(&bytes)?;
                    let got = peer.answer()?.terminate()?;
                    require!(got == Some(codes), "{stag:#x}: {got:?}");
                }
                Ok(())
            })
        })
        .collect();
    for guesser in guessers {
        guesser.join().map_err(|_| Failure("panicked".into()))??;
    }
    victim.innocent_done()?;
    for _ in 0..600 {
        let report = victim.report()?;
        require!(report.events == "3" && report.changed.is_empty() && report.recvs == FLUSHED, "{report:?}");
    }
    victim.recovers()
}

/// The queue of Read Requests is as long as the depth that was agreed; one more ends the stream, and only
/// this one.
pub fn reads_beyond_the_depth(victim: &mut Victim) -> Outcome {
    victim.tell("profile depth=2")?;
    let both = victim.region("both");
    let before = victim.memory()?;
    for size in [1u32 << 20, 0] {
        let mut peer = Peer::established(victim.port)?;
        let request = ReadRequest::new(size, both.stag, both.at);
        peer.send(&fpdus((1..=5000).map(|msn| Untagged::read(msn, &request).ulpdu())))?;
        let answer = peer.answer()?;
        let codes = answer.terminate()?;
        require!(codes == Some((1, 2, 2)), "Reads of {size} bytes: {codes:?}");
        let report = victim.report()?;
        require!(report.events == "2" && report.recvs == FLUSHED, "{report:?}");
        bounded(victim, before, 1)?;
        victim.innocent(1)?;
    }
    // A program that takes none says so, and gets none.
    victim.tell("profile depth=0")?;
    let mut peer = Peer::established(victim.port)?;
    let named = peer.reply.as_ref().and_then(|reply| reply.private_data.first_chunk()).copied();
    let ird = named.map(|bytes| u16::from_be_bytes(bytes) & 0x3FFF);
    require!(ird == Some(0), "the reply names a depth of {ird:?}");
    peer.send(&Untagged::read(1, &ReadRequest::new(8, both.stag, both.at)).fpdu())?;
    meet(victim, peer, "a Read although there is no depth", &Fate::terminated((1, 2, 2)))?;
    victim.tell("profile")
}

/// Many connections ask for as much as they may, and take nothing.
pub fn reads_that_nobody_takes(victim: &mut Victim) -> Outcome {
    let both = victim.region("both");
    let before = victim.memory()?;
    let mut peers = Vec::new();
    for _ in 0..48 {
        let mut peer = Peer::established(victim.port)?;
        let request = ReadRequest::new(1 << 20, both.stag, both.at);
        peer.send(&fpdus((1..=4).map(|msn| Untagged::read(msn, &request).ulpdu())))?;
        peers.push(peer);
    }
    victim.innocent(20)?;
    bounded(victim, before, 48)?;
    for mut peer in peers {
        // At least what fitted arrives, unharmed.
        peer.finish();
        let answer = peer.read_to_end(PATIENCE)?;
        require!(answer.end != End::Open, "still open");
        let read: Vec<&[u8]> = answer.seen.iter().map(|segment| segment.payload()).collect();
        require!(read.iter().any(|payload| !payload.is_empty()), "nothing arrived");
        require!(read.iter().all(|payload| payload.iter().all(|b| *b == 0xA5)), "not what was to be read");
        victim.report()?;
    }
    victim.recovers()
}

/// No receive is posted: the attacker is held up, not the victim.
pub fn sends_without_receives(victim: &mut Victim) -> Outcome {
    without_receives(victim, 0)
}

/// The same with a Read of the victim's outstanding, so that Sends are set aside.
pub fn sends_without_receives_before_a_response(victim: &mut Victim) -> Outcome {
    without_receives(victim, 1)
}

fn without_receives(victim: &mut Victim, reads: usize) -> Outcome {
    victim.tell(&format!("profile recvs=0 reads={reads}"))?;
    let before = victim.memory()?;
    let mut peers = Vec::new();
    for n in 0..24 {
        let mut peer = if n % 2 == 0 { Peer::established(victim.port)? } else { Peer::uwarp(victim.port)? };
        peer.sinks(reads)?;
        let size = [8, 1000, 60_000][n % 3];
        // More than the kernel's buffers at both ends and what is set aside together.
        let count = 48 * MIB / size;
        let mut sent = 0;
        let mut msn = 1;
        while sent < count {
            let some: Vec<_> =
                (0..(MIB / size)).map(|k| Untagged::send(msn + k as u32, size).ulpdu()).collect();
            msn += some.len() as u32;
            let bytes = fpdus(some);
            let taken = peer.flood(&bytes, Duration::from_millis(200))?;
            if taken < bytes.len() {
                break;
            }
            sent += MIB / size;
        }
        require!(sent < count, "48 MiB were taken and there is no receive");
        peers.push(peer);
        bounded(victim, before, n + 1)?;
    }
    victim.innocent(20)?;
    bounded(victim, before, 24)?;
    // The program may still take them, one by one.
    victim.tell("profile recvlen=8")?;
    let mut peer = Peer::established(victim.port)?;
    peer.send(&fpdus((1..=10).map(|msn| Untagged::send(msn, 8).ulpdu())))?;
    victim.tell("post 4")?;
    victim.tell("post 4")?;
    peer.reset();
    let report = victim.report()?;
    require!(report.recvs.split(',').count() == 10, "{report:?}");
    // All at once: the program has two seconds for each to post a receive after all.
    let count = peers.len();
    peers.into_iter().for_each(Peer::reset);
    for _ in 0..count {
        let report = victim.report()?;
        require!(
            report.recvs.is_empty() && report.changed.is_empty() && report.events.is_empty(),
            "{report:?}"
        );
    }
    victim.tell("profile")?;
    victim.recovers()
}

/// Messages without a byte in them, of every kind, by the hundred thousand.
pub fn nothing_at_all(victim: &mut Victim) -> Outcome {
    let before = victim.memory()?;
    let empty = Tagged::write(0x1234, u64::MAX, 0).fpdu().repeat(5000);
    let mut peer = Peer::established(victim.port)?;
    victim.innocent_begins(20)?;
    for _ in 0..40 {
        peer.send(&empty)?;
    }
    victim.innocent_done()?;
    bounded(victim, before, 1)?;
    meet(victim, peer, "empty Writes", &Fate::harmless())?;
    let mut peer = Peer::established(victim.port)?;
    let unfinished = Tagged::write(0x1234, u64::MAX, 0).more().fpdu().repeat(5000);
    for _ in 0..10 {
        peer.send(&unfinished)?;
    }
    meet(victim, peer, "empty segments of a Write that never ends", &Fate::harmless())?;
    let peer = Peer::established(victim.port)?;
    let sends = fpdus([1, 2].map(|msn| Untagged::send(msn, 0).ulpdu()));
    strike(victim, peer, &sends, "empty Sends", &Fate::harmless().recvs("ok0,ok0"))?;
    // Empty Reads one behind the other, each answered.
    let mut peer = Peer::established(victim.port)?;
    for msn in 1..=2000 {
        peer.send(&Untagged::read(msn, &ReadRequest::new(0, 1, 1)).fpdu())?;
        let seen = peer.segment()?;
        require!(seen.opcode() == 2 && seen.payload().is_empty(), "{seen:?}");
    }
    meet(victim, peer, "empty Reads", &Fate::harmless())?;
    let mut peer = Peer::connect(victim.port)?;
    peer.send(&[])?;
    peer.finish();
    require!(peer.read_setup()?.is_none(), "an answer to nothing");
    Ok(())
}

fn tiny(victim: &mut Victim) -> Outcome {
    let before = victim.memory()?;
    let both = victim.region("both");
    victim.innocent_begins(20)?;
    let mut peer = Peer::established(victim.port)?;
    let count = 200_000u64;
    for from in (0..count).step_by(5000) {
        let segments = (from..from + 5000).map(|n| {
            let segment = Tagged::write(both.stag, both.at + n, 1);
            if n + 1 < count { segment.more().ulpdu() } else { segment.ulpdu() }
        });
        peer.send(&fpdus(segments))?;
    }
    victim.innocent_done()?;
    bounded(victim, before, 1)?;
    meet(victim, peer, "a Write of 200000 segments", &Fate::harmless().changed("both:0-199999"))?;
    // A Send as long as its receive, a byte in each segment.
    let bytes = fpdus((0..64).map(|n| {
        let segment = Untagged::send(1, 1).at(n);
        if n < 63 { segment.more().ulpdu() } else { segment.ulpdu() }
    }));
    let peer = Peer::established(victim.port)?;
    strike(victim, peer, &bytes, "a Send in bytes", &Fate::harmless().changed("recv:0-63").recvs("ok64,e5"))
}

pub fn tiny_segments(victim: &mut Victim) -> Outcome {
    tiny(victim)
}

pub fn tiny_segments_against_a_program_that_polls(victim: &mut Victim) -> Outcome {
    tiny(victim)
}

/// A good stream, and a bad one, with every byte in a packet of its own.
pub fn a_byte_at_a_time(victim: &mut Victim) -> Outcome {
    let write = victim.region("write");
    let read = victim.region("read");
    for pose in [Peer::established, Peer::uwarp] {
        let mut peer = pose(victim.port)?;
        let stream = fpdus([
            Tagged::write(write.stag, write.at, 333).ulpdu(),
            Untagged::send(1, 64).ulpdu(),
            Untagged::read(1, &ReadRequest::new(100, read.stag, read.at)).ulpdu(),
            Untagged::send(2, 1).ulpdu(),
        ]);
        peer.send_in(&stream, 1)?;
        let fate = Fate::harmless().changed("write:0-332,recv:0-1024").recvs("ok64,ok1");
        meet(victim, peer, "byte by byte", &fate)?;
        let mut peer = pose(victim.port)?;
        peer.send_in(&Tagged::write(write.stag ^ 2, write.at, 333).fpdu(), 1)?;
        meet(victim, peer, "byte by byte to no region", &Fate::terminated((1, 1, 0)))?;
    }
    Ok(())
}
