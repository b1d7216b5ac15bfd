//! What is wrong only because of what came before it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use uwarp_conformance::attacker::encode::{ReadRequest, Tagged, Untagged, fpdu, fpdus, terminate};
use uwarp_conformance::attacker::peer::{End, PATIENCE, Peer};
use uwarp_conformance::attacker::victim::Victim;
use uwarp_conformance::{Outcome, require};

use crate::{FLUSHED, Fate, meet, strike};

const RESPONSE: u8 = 2;

pub fn responses_nobody_asked_for(victim: &mut Victim) -> Outcome {
    for name in ["write", "both", "sink", "local", "recv"] {
        let region = victim.region(name);
        let bytes = Tagged::new(RESPONSE, region.stag, region.at, 64).fpdu();
        let peer = Peer::established(victim.port)?;
        strike(victim, peer, &bytes, &format!("a response into {name}"), &Fate::terminated((1, 1, 0)))?;
    }
    for to in [0, 1, u64::MAX - 64] {
        let peer = Peer::established(victim.port)?;
        let bytes = Tagged::new(RESPONSE, 0, to, 64).fpdu();
        strike(victim, peer, &bytes, "a response to STag 0", &Fate::terminated((1, 1, 0)))?;
    }
    let peer = Peer::established(victim.port)?;
    strike(victim, peer, &Tagged::new(RESPONSE, 0, 0, 0).fpdu(), "an empty one", &Fate::terminated((0, 2, 6)))
}

/// Builds the segments of an answer from the STag of the sink that the victim has named.
type Lie = Box<dyn Fn(u32) -> Vec<Vec<u8>>>;

/// Wrong answers to a Read of 64 bytes, and what each leads to.
fn lies(victim: &Victim) -> Vec<(&'static str, Lie, Fate)> {
    let bounds = (1, 1, 1);
    let both = victim.region("both");
    let sink_region = victim.region("sink");
    let one = |f: fn(u32) -> Tagged| -> Lie { Box::new(move |stag| vec![f(stag).ulpdu()]) };
    vec![
        ("another STag", one(|s| Tagged::new(RESPONSE, s ^ 1, 0, 64)), Fate::terminated((1, 1, 0))),
        (
            "the sink's own region",
            Box::new(move |_| vec![response(sink_region.stag, sink_region.at, 64).ulpdu()]),
            Fate::terminated((1, 1, 0)),
        ),
        (
            "a region",
            Box::new(move |_| vec![response(both.stag, both.at, 64).ulpdu()]),
            Fate::terminated((1, 1, 0)),
        ),
        ("a byte too long", one(|s| Tagged::new(RESPONSE, s, 0, 65)), Fate::terminated(bounds)),
        ("far too long", one(|s| Tagged::new(RESPONSE, s, 0, 60_000)), Fate::terminated(bounds)),
        ("a byte too short", one(|s| Tagged::new(RESPONSE, s, 0, 63)), Fate::terminated(bounds)),
        ("empty", one(|s| Tagged::new(RESPONSE, s, 0, 0)), Fate::terminated(bounds)),
        ("not at the beginning", one(|s| Tagged::new(RESPONSE, s, 8, 56)), Fate::terminated(bounds)),
        (
            "at the address",
            Box::new(move |s| vec![response(s, sink_region.at, 64).ulpdu()]),
            Fate::terminated(bounds),
        ),
        (
            "from the end of all offsets",
            one(|s| Tagged::new(RESPONSE, s, u64::MAX - 32, 64)),
            Fate::terminated((1, 1, 3)),
        ),
        (
            "overlapping pieces",
            Box::new(move |s| vec![response(s, 0, 32).more().ulpdu(), response(s, 16, 48).ulpdu()]),
            Fate::terminated(bounds).changed("sink:0-31"),
        ),
        (
            "a gap between pieces",
            Box::new(move |s| vec![response(s, 0, 32).more().ulpdu(), response(s, 40, 24).ulpdu()]),
            Fate::terminated(bounds).changed("sink:0-31"),
        ),
        (
            "pieces that never end",
            Box::new(move |s| vec![response(s, 0, 64).more().ulpdu(), response(s, 64, 1).more().ulpdu()]),
            Fate::terminated(bounds).changed("sink:0-63"),
        ),
        (
            "a Write into the sink",
            Box::new(|s| vec![Tagged::write(s, 0, 64).ulpdu()]),
            Fate::terminated((1, 1, 0)),
        ),
        (
            "a Read of the sink",
            Box::new(|s| vec![Untagged::read(1, &ReadRequest::new(64, s, 0)).ulpdu()]),
            Fate::terminated((0, 1, 0)),
        ),
        (
            "an invalidation of the sink",
            Box::new(|s| vec![Untagged { rdmap: 0x44, invalidate: s, ..Untagged::send(1, 8) }.ulpdu()]),
            Fate::terminated((0, 1, 9)).changed("recv:0-7"),
        ),
    ]
}

fn response(stag: u32, to: u64, len: usize) -> Tagged {
    Tagged::new(RESPONSE, stag, to, len)
}

/// The victim has asked for 64 bytes, twice, one at a time.
pub fn responses_that_lie(victim: &mut Victim) -> Outcome {
    victim.tell("profile reads=2 depth=1")?;
    let flushed = "e5,e5";
    for (what, lie, fate) in lies(victim) {
        for pose in [Peer::established, Peer::uwarp] {
            let mut peer = pose(victim.port)?;
            let sink = peer.sinks(1)?[0];
            peer.send(&fpdus(lie(sink)))?;
            strike(
                victim,
                peer,
                &[],
                what,
                &Fate { codes: fate.codes, ..Fate::harmless() }.changed(fate.changed).sends(flushed),
            )?;
        }
    }
    // The right answer, and then once more to the sink that is gone.
    let mut peer = Peer::established(victim.port)?;
    let sink = peer.sinks(1)?[0];
    peer.send(&response(sink, 0, 64).fpdu())?;
    let second = peer.sinks(1)?[0];
    require!(second != sink, "two Reads have the same sink");
    let fate = Fate::terminated((1, 1, 0)).changed("sink:0-63").sends("ok64,e5");
    strike(victim, peer, &response(sink, 0, 64).fpdu(), "the same response twice", &fate)?;
    victim.tell("profile")
}

/// A Send with Invalidate takes the key back, but not from other streams (RFC 5040 section 8.1.1 rule 7): a
/// key is good for all streams of its protection domain.
pub fn after_invalidation(victim: &mut Victim) -> Outcome {
    victim.tell("profile recvs=1")?;
    let invalidate = |stag| Untagged { rdmap: 0x44, invalidate: stag, ..Untagged::send(1, 0) };
    let cannot = Fate::terminated((0, 1, 9)).recvs("e5");
    // The innocent connection is of that domain, too.
    let both = victim.region("both");
    let peer = Peer::established(victim.port)?;
    strike(
        victim,
        peer,
        &invalidate(both.stag).fpdu(),
        "an invalidation of what the innocent can use",
        &cannot,
    )?;
    let peer = Peer::established(victim.port)?;
    let written = Fate::harmless().recvs("e5").changed("both:0-7");
    strike(victim, peer, &Tagged::write(both.stag, both.at, 8).fpdu(), "a Write after that", &written)?;

    // A domain where the attacker is alone at first.
    victim.tell("profile recvs=1 stranger=1")?;
    for (what, write) in [("Write", true), ("Read", false)] {
        let key = victim.region("strangers");
        let put = Tagged::write(key.stag, key.at, 8);
        let written = Fate::harmless().recvs("e5").changed("write:0-7");
        let other = Peer::established(victim.port)?;
        victim.sync()?;
        let peer = Peer::established(victim.port)?;
        strike(victim, peer, &invalidate(key.stag).fpdu(), "an invalidation beside another stream", &cannot)?;
        strike(victim, other, &put.fpdu(), &format!("the other stream before a {what}"), &written)?;

        let (after, codes) = if write {
            (put.ulpdu(), (1, 1, 0))
        } else {
            (Untagged::read(1, &ReadRequest::new(8, key.stag, key.at)).ulpdu(), (0, 1, 0))
        };
        let mut peer = Peer::established(victim.port)?;
        peer.send(&fpdus([put.ulpdu(), invalidate(key.stag).ulpdu()]))?;
        let fate = Fate::terminated(codes).recvs("ok0").changed("write:0-7");
        strike(victim, peer, &fpdu(&after), &format!("a {what} after invalidation"), &fate)?;
        let peer = Peer::established(victim.port)?;
        let fate = Fate::terminated(codes).recvs("e5");
        strike(victim, peer, &fpdu(&after), &format!("a {what} on a later stream"), &fate)?;
        // Twice is an error.
        let peer = Peer::established(victim.port)?;
        strike(victim, peer, &invalidate(key.stag).fpdu(), "invalidated twice", &cannot)?;
        victim.tell("renew")?;
        require!(victim.region("strangers").stag != key.stag, "a key is used again at once");
        let peer = Peer::established(victim.port)?;
        let fate = Fate::terminated((1, 1, 0)).recvs("e5");
        strike(victim, peer, &put.fpdu(), "the old key", &fate)?;
    }
    victim.tell("profile")
}

pub fn after_deregistration(victim: &mut Victim) -> Outcome {
    let both = victim.region("both");
    let mut peer = Peer::established(victim.port)?;
    peer.send(&Untagged::read(1, &ReadRequest::new(8, both.stag, both.at)).fpdu())?;
    peer.segment()?;
    victim.tell("retire both")?;
    strike(
        victim,
        peer,
        &Tagged::write(both.stag, both.at, 8).fpdu(),
        "a Write",
        &Fate::terminated((1, 1, 0)),
    )?;
    let peer = Peer::established(victim.port)?;
    let read = Untagged::read(1, &ReadRequest::new(8, both.stag, both.at));
    strike(victim, peer, &read.fpdu(), "a Read", &Fate::terminated((0, 1, 0)))?;
    victim.tell("renew")
}

/// The program takes a region back, and its memory away, while Writes to it pour in. Whoever were late would
/// touch memory that has no access any more.
pub fn deregistered_under_fire(victim: &mut Victim) -> Outcome {
    for round in 0..40 {
        for pose in [Peer::established, Peer::uwarp] {
            let both = victim.region("both");
            let mut peer = pose(victim.port)?;
            let size = [100, 4000, 30_000, 60_000][round % 4];
            let count = (1 << 20) / size;
            let message: Vec<u8> = fpdus((0..count).map(|n| {
                let segment = Tagged::write(both.stag, both.at + (n * size) as u64, size);
                if n + 1 < count { segment.more().ulpdu() } else { segment.ulpdu() }
            }));
            // Until the report has come: what ends by itself may all have been placed before the victim has
            // got a processor for the command, and a stream without a mistake does not end.
            let over = Arc::new(AtomicBool::new(false));
            let fire = std::thread::spawn({
                let over = Arc::clone(&over);
                move || -> Outcome<Peer> {
                    let deadline = Instant::now() + 3 * PATIENCE;
                    while !over.load(Ordering::Relaxed) && peer.send_while_wanted(&message)? {
                        require!(Instant::now() < deadline, "nobody ends it");
                    }
                    Ok(peer)
                }
            });
            std::thread::sleep(Duration::from_micros(500 * (round as u64 % 7)));
            victim.tell("retire both")?;
            let report = victim.report()?;
            over.store(true, Ordering::Relaxed);
            require!(
                report.events == "3" && report.recvs == FLUSHED && report.changed.is_empty(),
                "round {round}: {report:?}"
            );
            let mut peer = fire.join().map_err(|_| uwarp_conformance::Failure("panicked".into()))??;
            peer.finish();
            peer.read_to_end(PATIENCE)?;
            victim.tell("renew")?;
            victim.innocent(1)?;
        }
    }
    Ok(())
}

/// The same for memory that is being sent: the attacker asks for a megabyte, reads a little of it, and waits.
/// When it then makes a mistake, or leaves, what was not sent is not touched any more.
pub fn deregistered_while_it_is_read(victim: &mut Victim) -> Outcome {
    for ending in 0..3 {
        for pose in [Peer::established, Peer::uwarp] {
            let both = victim.region("both");
            let mut peer = pose(victim.port)?;
            for msn in 1..=4 {
                peer.send(&Untagged::read(msn, &ReadRequest::new(1 << 20, both.stag, both.at)).fpdu())?;
            }
            // The socket buffers fill; nothing is read.
            peer.arrived(1)?;
            std::thread::sleep(Duration::from_millis(60));
            victim.tell("retire both")?;
            match ending {
                0 => peer.send(&Untagged::send(9, 8).fpdu())?,
                1 => peer.finish(),
                _ => {}
            }
            if ending < 2 {
                std::thread::sleep(Duration::from_millis(30));
            }
            // Reading on makes the victim go on; it finds the region gone.
            peer.read_to_end(PATIENCE)?;
            drop(peer);
            let report = victim.report()?;
            require!(report.recvs == FLUSHED && report.changed.is_empty(), "ending {ending}: {report:?}");
            victim.tell("renew")?;
            victim.innocent(1)?;
        }
    }
    Ok(())
}

/// The first ends the stream; the others, and whatever else follows, are not looked at.
pub fn terminate_storm(victim: &mut Victim) -> Outcome {
    let one = Untagged::terminate(terminate(1, 1, 0, 0, &[])).fpdu();
    for count in [2, 1000, 50_000] {
        let mut peer = Peer::established(victim.port)?;
        peer.send(&one.repeat(count))?;
        peer.finish();
        let answer = peer.read_to_end(PATIENCE)?;
        require!(answer.seen.is_empty() && answer.end != End::Open, "{answer:?}");
        let report = victim.report()?;
        require!(report.events == "1" && report.recvs == FLUSHED && report.changed.is_empty(), "{report:?}");
        victim.innocent(1)?;
    }
    // With numbers that go up, as if each were a message of its own.
    let many =
        fpdus((1..1000).map(|msn| Untagged { msn, ..Untagged::terminate(vec![0x20, 0, 0, 0]) }.ulpdu()));
    let mut peer = Peer::established(victim.port)?;
    peer.send(&many)?;
    peer.answer()?;
    let report = victim.report()?;
    require!(report.events == "1" && report.recvs == FLUSHED, "{report:?}");
    victim.innocent(1)
}

/// Good messages behind the mistake, and behind the attacker's own Terminate: nothing of them counts.
pub fn data_after_terminate(victim: &mut Victim) -> Outcome {
    let write = victim.region("write");
    let good = fpdus([Tagged::write(write.stag, write.at, 100).ulpdu(), Untagged::send(1, 8).ulpdu()]);
    let mistake = Tagged::write(1, 0, 8).fpdu();
    let peer = Peer::established(victim.port)?;
    strike(victim, peer, &[mistake.clone(), good.clone()].concat(), "at once", &Fate::terminated((1, 1, 0)))?;
    let mut peer = Peer::established(victim.port)?;
    peer.send(&mistake)?;
    let report = victim.report()?;
    require!(report.changed.is_empty(), "{report:?}");
    // On and on, megabytes of it: drained for a bounded time, then the connection is closed.
    let sent = peer.flood(&good.repeat(500_000), PATIENCE)?;
    let answer = peer.read_to_end(PATIENCE)?;
    require!(answer.end != End::Open, "still open after {sent} bytes");
    require!(victim.sync()?[2] == 1, "a connection is left");
    let mut peer = Peer::established(victim.port)?;
    peer.send(&Untagged::terminate(terminate(2, 0, 0, 0, &[])).fpdu())?;
    peer.send(&good)?;
    peer.answer()?;
    let report = victim.report()?;
    require!(report.changed.is_empty() && report.recvs == FLUSHED && report.events == "1", "{report:?}");
    victim.recovers()
}

/// The attacker says that it is done, and the victim is not; the other way round; and an end in the middle of
/// everything.
pub fn data_after_the_end(victim: &mut Victim) -> Outcome {
    let write = victim.region("write");
    let good = Tagged::write(write.stag, write.at, 8).fpdu();
    // The victim disconnects; what the attacker goes on to send is drained and not placed.
    let mut peer = Peer::established(victim.port)?;
    peer.send(&Untagged::read(1, &ReadRequest::new(0, 0, 0)).fpdu())?;
    peer.segment()?;
    victim.tell("disconnect")?;
    let report = victim.report()?;
    require!(report.events.is_empty() && report.recvs == FLUSHED, "{report:?}");
    peer.send(&good.repeat(1000))?;
    let answer = peer.read_to_end(PATIENCE)?;
    require!(answer.end != End::Open, "still open");
    drop(peer);
    require!(victim.sync()?[2] == 1, "a connection is left");
    // Ends within the length field, the header, the payload, the pad and the CRC.
    let whole = Tagged::write(write.stag, write.at, 9).fpdu();
    for len in 1..whole.len() {
        let mut peer = Peer::established(victim.port)?;
        peer.send(&whole[..len])?;
        peer.finish();
        meet(victim, peer, &format!("the end after {len} bytes"), &Fate::terminated((2, 0, 1)))?;
    }
    let both = victim.region("both");
    let large = fpdus([
        Tagged::write(both.stag, both.at + 60_000, 0).more().ulpdu(),
        Tagged::write(both.stag, both.at, 0).more().ulpdu(),
        Tagged::write(both.stag, both.at, 60_000).ulpdu(),
    ]);
    for len in [20_000, 40_000, large.len() - 1] {
        let mut peer = Peer::uwarp(victim.port)?;
        peer.send(&large[..len])?;
        std::thread::sleep(Duration::from_millis(20));
        peer.finish();
        let codes = peer.answer()?.terminate()?;
        require!(codes == Some((2, 0, 1)), "{codes:?}");
        let report = victim.report()?;
        // Bytes inside the announced message may be there; nothing else.
        let inside = report
            .changed
            .strip_prefix("both:0-")
            .is_some_and(|last| last.parse::<u32>().is_ok_and(|n| n < 60_000));
        require!(report.events.is_empty() && (report.changed.is_empty() || inside), "{report:?}");
    }
    victim.innocent(1)
}

/// Who poses as uwarp may acknowledge; what was not sent cannot be.
pub fn acknowledgements_that_lie(victim: &mut Victim) -> Outcome {
    let ack = |msn, payload: Vec<u8>| Untagged::new(0xF, 0x7557_0000, msn, payload).fpdu();
    let unspecified = Fate::terminated((0, 2, 0xFF));
    for count in [1u64, 2, 1 << 32, u64::MAX] {
        let peer = Peer::uwarp(victim.port)?;
        strike(
            victim,
            peer,
            &ack(1, count.to_be_bytes().to_vec()),
            &format!("{count} messages"),
            &unspecified,
        )?;
    }
    for len in [0, 1, 7, 9, 1000] {
        let peer = Peer::uwarp(victim.port)?;
        peer_gets(victim, peer, &ack(1, vec![0; len]))?;
    }
    let peer = Peer::uwarp(victim.port)?;
    strike(victim, peer, &ack(2, vec![0; 8]), "MSN 2", &Fate::terminated((1, 2, 3)))?;
    let peer = Peer::established(victim.port)?;
    strike(victim, peer, &ack(1, vec![0; 8]), "of a stranger", &Fate::terminated((1, 2, 1)))?;
    // A hundred thousand that say nothing.
    let mut peer = Peer::uwarp(victim.port)?;
    for msn in 1..=100_000 {
        peer.send(&ack(msn, vec![0; 8]))?;
    }
    strike(victim, peer, &[], "acknowledgements without end", &Fate::harmless())
}

/// Terminated with some code, and nothing changed.
fn peer_gets(victim: &mut Victim, mut peer: Peer, bytes: &[u8]) -> Outcome {
    peer.send(bytes)?;
    peer.finish();
    peer.answer()?;
    let report = victim.report()?;
    require!(report.changed.is_empty() && report.recvs == FLUSHED, "{report:?}");
    victim.innocent(1)
}

/// The first Write of a uwarp initiator says who it is: every version and feature, and what is not zero
/// though it must be.
pub fn introductions_that_lie(victim: &mut Victim) -> Outcome {
    use uwarp_conformance::attacker::encode::Setup;
    let write = victim.region("write");
    let stags = (0..=255u32).map(|version| version << 24).chain((0..24).map(|bit| 0x0100_0000 | 1 << bit));
    for stag in stags.chain([u32::MAX]) {
        for to in [0, u64::MAX] {
            let mut peer = Peer::set_up(victim.port, &Setup::uwarp())?;
            let bytes =
                fpdus([Tagged::write(stag, to, 0).ulpdu(), Tagged::write(write.stag, write.at, 8).ulpdu()]);
            peer.send(&bytes)?;
            peer.finish();
            // Acknowledgements may come, if it asked for them.
            let codes = peer.answer()?.terminate()?;
            require!(codes.is_none(), "introduced with {stag:#x} {to:#x}: {codes:?}");
            let report = victim.report()?;
            require!(
                report.established && report.changed == "write:0-7" && report.events.is_empty(),
                "{report:?}"
            );
        }
    }
    // Something else comes first.
    for (first, fate) in [
        (Untagged::send(1, 8), Fate::harmless().changed("recv:0-7").recvs("ok8,e5")),
        (Untagged::read(1, &ReadRequest::new(0, 0, 0)), Fate::harmless()),
    ] {
        let peer = Peer::set_up(victim.port, &Setup::uwarp())?;
        strike(victim, peer, &first.fpdu(), "no introduction", &fate)?;
    }
    let peer = Peer::set_up(victim.port, &Setup::uwarp())?;
    let first = Tagged::write(write.stag, write.at, 8).fpdu();
    strike(victim, peer, &first, "no introduction", &Fate::harmless().changed("write:0-7"))?;
    victim.innocent(1)
}

/// Segments of 16 KiB and more, behind empty ones as earlier versions of uwarp sent them. Nothing of a bad
/// FPDU is placed.
pub fn large_segments_that_lie(victim: &mut Victim) -> Outcome {
    victim.tell("profile recvlen=1024")?;
    let both = victim.region("both");
    let odd = victim.region("odd");
    let empty = |stag, to| Tagged::write(stag, to, 0).more().ulpdu();
    let announced = |stag, to: u64, len: u32, segment: Tagged| {
        fpdus([empty(stag, to + u64::from(len)), empty(stag, to), segment.ulpdu()])
    };
    let segment = |to, len| Tagged::write(both.stag, to, len);
    // In pieces with pauses, so that the header is seen before the rest is there.
    let slowly = |victim: &mut Victim, bytes: &[u8]| -> Outcome<Peer> {
        let mut peer = Peer::uwarp(victim.port)?;
        for part in bytes.chunks(9000) {
            peer.send(part)?;
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(peer)
    };
    let ok = announced(both.stag, both.at, 40_000, segment(both.at, 40_000));
    let peer = slowly(victim, &ok)?;
    meet(victim, peer, "as it should be", &Fate::harmless().changed("both:0-39999"))?;
    // Announced in the region, and over its end.
    for (to, len) in [(both.end() - 20_000, 20_001), (both.end() - 16_384, 60_000), (both.end(), 16_384)] {
        let peer = slowly(victim, &announced(both.stag, to, len as u32, segment(to, len)))?;
        meet(victim, peer, &format!("{len} bytes at the end"), &Fate::terminated((1, 1, 1)))?;
    }
    // Announced for one place, sent to another.
    for (place, sent) in [(both.at, both.at + 4096), (both.at + 4096, both.at - 4096), (0, both.at - 1)] {
        let peer = slowly(victim, &announced(both.stag, place, 60_000, segment(sent, 30_000)))?;
        let inside = sent >= both.at;
        let fate =
            if inside { Fate::harmless().changed("both:4096-34095") } else { Fate::terminated((1, 1, 1)) };
        meet(victim, peer, "announced elsewhere", &fate)?;
    }
    // Announced for one region, sent to a smaller one.
    let bytes = announced(both.stag, odd.at, 20_000, Tagged::write(odd.stag, odd.at, 20_000));
    let peer = slowly(victim, &bytes)?;
    meet(victim, peer, "another region", &Fate::terminated((1, 1, 1)))?;
    // Without right; to what is no region; to a wrong domain.
    for (stag, to, codes) in [
        (victim.region("read").stag, victim.region("read").at, (1, 1, 1)),
        (victim.region("local").stag, victim.region("local").at, (1, 1, 1)),
        (victim.region("foreign").stag, victim.region("foreign").at, (1, 1, 2)),
        (both.stag ^ 4, both.at, (1, 1, 0)),
    ] {
        let bytes = announced(stag, to, 20_000, Tagged::write(stag, to, 20_000));
        let peer = slowly(victim, &bytes)?;
        meet(victim, peer, &format!("STag {stag:#x}"), &Fate::terminated(codes))?;
    }
    // A CRC that is wrong in the end: the stream is over, and nothing is written.
    let mut bytes = ok.clone();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    let mut peer = slowly(victim, &bytes)?;
    let codes = peer.answer()?.terminate()?;
    require!(codes == Some((2, 0, 2)), "{codes:?}");
    let report = victim.report()?;
    require!(report.events == "1" && report.changed.is_empty(), "{report:?}");
    // Every bit of the large segment's header flipped, without mending the CRC. Its length may then be more
    // than what comes.
    let header = fpdus([empty(both.stag, both.at), empty(both.stag, both.at)]).len();
    for bit in 0..16 * 8 {
        let mut bytes = ok.clone();
        bytes[header + bit / 8] ^= 1 << (bit % 8);
        let mut peer = slowly(victim, &bytes[..bytes.len().min(header + 45_000)])?;
        peer.finish();
        let codes = peer.answer()?.terminate()?;
        let lengthened = bit < 16 && codes == Some((2, 0, 1));
        require!(codes == Some((2, 0, 2)) || lengthened, "bit {bit}: {codes:?}");
        let report = victim.report()?;
        let event = codes.map_or("", crate::event_of);
        require!(report.events == event && report.changed.is_empty(), "bit {bit}: {report:?}");
        if bit % 16 == 0 {
            victim.innocent(1)?;
        }
    }
    // A large Send for a small receive, and in pieces that fit no more.
    let peer = slowly(victim, &Untagged::send(1, 30_000).fpdu())?;
    meet(victim, peer, "a large Send", &Fate::terminated((1, 2, 5)).recvs("e1,e5"))?;
    victim.tell("profile")
}

/// The queue pair itself grants nothing.
pub fn rights_of_the_queue_pair(victim: &mut Victim) -> Outcome {
    let both = victim.region("both");
    let write = Tagged::write(both.stag, both.at, 8).fpdu();
    let read = Untagged::read(1, &ReadRequest::new(8, both.stag, both.at)).fpdu();
    // 1 is local, 2 remote write, 4 remote read.
    for access in [0, 1, 2, 3, 4, 5, 6, 7] {
        victim.tell(&format!("profile access={access}"))?;
        let peer = Peer::established(victim.port)?;
        let fate =
            if access & 2 != 0 { Fate::harmless().changed("both:0-7") } else { Fate::terminated((0, 1, 2)) };
        strike(victim, peer, &write, &format!("a Write with access {access}"), &fate)?;
        let mut peer = Peer::established(victim.port)?;
        peer.send(&read)?;
        if access & 4 != 0 {
            require!(peer.segment()?.payload() == [0xA5; 8], "not what was to be read");
            meet(victim, peer, "a Read", &Fate::harmless())?;
        } else {
            meet(victim, peer, &format!("a Read with access {access}"), &Fate::terminated((0, 1, 2)))?;
        }
    }
    victim.tell("profile")
}

/// More Sends than the victim's completion queue holds (RFC 5042 section 6.4.6).
pub fn overflowing_completion_queue(victim: &mut Victim) -> Outcome {
    victim.tell("profile recvs=16 cqe=4")?;
    let mut peer = Peer::established(victim.port)?;
    peer.send(&fpdus((1..=16).map(|msn| Untagged::send(msn, 8).ulpdu())))?;
    let codes = peer.answer()?.terminate()?;
    require!(codes == Some((0, 0, 0)), "{codes:?}");
    let report = victim.report()?;
    // 0 is the completion queue's own event.
    require!(
        report.state == "ERR" && report.events.contains('0') && report.events.contains('1'),
        "{report:?}"
    );
    victim.tell("profile")?;
    victim.innocent(1)
}

/// Two retries: then the stream ends, whatever the attacker goes on to send.
pub fn missing_receive_in_limited_time(victim: &mut Victim) -> Outcome {
    victim.tell("profile recvs=1 rnr=2")?;
    let write = victim.region("write");
    let mut peer = Peer::established(victim.port)?;
    peer.send(&fpdus([1, 2, 3].map(|msn| Untagged::send(msn, 8).ulpdu())))?;
    peer.send(&Tagged::write(write.stag, write.at, 8).fpdu())?;
    // The sender's retries are none of the receiver's business.
    let fate = Fate::terminated((1, 2, 2)).recvs("ok8").changed("recv:0-7").quiet();
    meet(victim, peer, "no receive", &fate)?;
    victim.tell("profile")
}
