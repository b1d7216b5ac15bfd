//! MPA requests with every field wrong, and set-up that never ends.

use std::time::Duration;

use uwarp_conformance::attacker::encode::{
    ENHANCED, MARKERS, P2P, REJECT, REPLY, RTR_READ, RTR_WRITE, ReadRequest, SEND, Setup, Tagged, Untagged,
    enhanced, fpdus, terminate,
};
use uwarp_conformance::attacker::peer::{End, PATIENCE, Peer};
use uwarp_conformance::attacker::victim::Victim;
use uwarp_conformance::{Outcome, require};

use crate::{Fate, meet, strike};

/// The victim hangs up without a reply, and its program gets no event.
fn refused(victim: &mut Victim, bytes: &[u8], what: &str) -> Outcome {
    let [before, ..] = victim.sync()?;
    let mut peer = Peer::connect(victim.port)?;
    peer.send(bytes)?;
    let reply = peer.read_setup()?;
    require!(reply.is_none(), "{what}: a reply: {reply:?}");
    let [after, ..] = victim.sync()?;
    require!(before == after, "{what}: the program got a request");
    Ok(())
}

/// The victim accepts; then the stream works. The indication is a Write where the reply names that, else a
/// Read where it does.
fn accepted(victim: &mut Victim, request: &Setup, what: &str) -> Outcome<Setup> {
    let mut peer = Peer::set_up(victim.port, request)?;
    let write = victim.region("write");
    let Some(reply) = peer.reply.clone() else { uwarp_conformance::fail!("no reply") };
    let posing = reply.flags & 2 != 0;
    let named = if reply.flags & ENHANCED == 0 { 0 } else { reply.private_data[2] >> 6 };
    let only_read = named & (RTR_WRITE | RTR_READ) == RTR_READ;
    let rtr = match (only_read, posing) {
        (true, _) => Untagged::read(1, &ReadRequest::new(0, 0, 0)).ulpdu(),
        (false, true) => Tagged::write(0x0100_E000, 0, 0).ulpdu(),
        (false, false) => Tagged::write(0, 0, 0).ulpdu(),
    };
    peer.send(&fpdus([rtr, Tagged::write(write.stag, write.at, 8).ulpdu()]))?;
    if only_read && request.flags & MARKERS == 0 {
        let seen = peer.segment()?;
        require!(seen.opcode() == 2 && seen.payload().is_empty(), "{what}: no answer to the Read: {seen:?}");
    }
    meet(victim, peer, what, &Fate::harmless().changed("write:0-7"))?;
    Ok(reply)
}

pub fn every_byte_of_the_key(victim: &mut Victim) -> Outcome {
    for at in 0..16 {
        for flip in [1, 0x20, 0x80, 0xFF] {
            let mut request = Setup::request2();
            request.key[at] ^= flip;
            refused(victim, &request.bytes(), &format!("byte {at} of the key changed by {flip:#x}"))?;
        }
    }
    refused(victim, &Setup { key: REPLY, ..Setup::request2() }.bytes(), "a reply for a request")?;
    refused(victim, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "HTTP")?;
    refused(victim, &[0x16, 3, 1, 2, 0, 1, 0, 1, 0xFC, 3, 3], "TLS")?;
    refused(victim, &[0; 4096], "zeros")?;
    refused(victim, &[0xFF; 4096], "ones")?;
    refused(victim, &Tagged::write(0, 0, 0).fpdu(), "an FPDU")
}

/// All 256 values in both revisions: reserved bits are not looked at (RFC 5044 section 7.1.1), and no
/// combination breaks the stream.
pub fn every_flag(victim: &mut Victim) -> Outcome {
    for flags in 0..=255u8 {
        for revision in [1, 2] {
            let base = if revision == 1 { Setup::request1() } else { Setup::request2() };
            let request = Setup { flags, ..base };
            let what = format!("flags {flags:#04x}, revision {revision}");
            let reply = accepted(victim, &request, &what)?;
            require!(reply.flags & 0x40 != 0, "{what}: no CRC");
            require!(reply.revision == revision, "{what}: {reply:?}");
            let extended = revision == 2 && flags & ENHANCED != 0;
            require!((reply.flags & ENHANCED != 0) == extended, "{what}: {reply:?}");
            // Nothing is echoed: only a uwarp request is answered with the project's bit.
            let posing = extended && flags & 4 != 0;
            require!((reply.flags & 0x0F) == if posing { 2 } else { 0 }, "{what}: {reply:?}");
        }
    }
    // Markers that the attacker asks for are in what is sent.
    let read = victim.region("read");
    for flags in [0xC0, 0xD0] {
        let base = if flags == 0xC0 { Setup::request1() } else { Setup::request2() };
        let mut peer = Peer::set_up(victim.port, &Setup { flags, ..base })?;
        let request = ReadRequest::new(8192, read.stag, read.at);
        peer.send(&fpdus([Tagged::write(0, 0, 0).ulpdu(), Untagged::read(1, &request).ulpdu()]))?;
        peer.arrived(8192)?;
        peer.finish();
        let answer = peer.answer()?;
        let bytes: usize = answer.seen.iter().map(|s| s.payload().len()).sum();
        require!(bytes == 8192, "{bytes} bytes of response with markers");
        victim.report()?;
    }
    Ok(())
}

pub fn every_revision(victim: &mut Victim) -> Outcome {
    for revision in (0..=255u8).filter(|r| !matches!(r, 1 | 2)) {
        for flags in [0x40, 0x50] {
            let request = Setup { revision, flags, ..Setup::request2() };
            refused(victim, &request.bytes(), &format!("revision {revision}"))?;
        }
    }
    Ok(())
}

/// Every length of private data up to the limit, and what is beyond.
pub fn every_length(victim: &mut Victim) -> Outcome {
    for len in 0..=512usize {
        let request = Setup { private_data: vec![0x77; len], ..Setup::request1() };
        accepted(victim, &request, &format!("{len} bytes of private data"))?;
    }
    for len in (4..=512usize).step_by(13).chain([512]) {
        let mut request = Setup::request2();
        request.private_data.resize(len, 0x77);
        accepted(victim, &request, &format!("enhanced, {len} bytes of private data"))?;
        let request = Setup { flags: 0x56, ..request };
        accepted(victim, &request, &format!("posing as uwarp, {len} bytes of private data"))?;
    }
    for len in 0..4 {
        let mut request = Setup::request2();
        request.private_data.truncate(len);
        refused(victim, &request.bytes(), &format!("enhanced, with {len} bytes"))?;
    }
    for len in [513usize, 514, 1024, 4096, 65_535] {
        let request = Setup { private_data: vec![0; len], ..Setup::request1() };
        refused(victim, &request.bytes(), &format!("{len} bytes of private data"))?;
    }
    Ok(())
}

pub fn lengths_that_lie(victim: &mut Victim) -> Outcome {
    // More than comes: not a request, whatever follows.
    for (said, sent) in [(1u16, 0usize), (512, 511), (512, 0), (100, 99)] {
        let request = Setup { length: Some(said), private_data: vec![0; sent], ..Setup::request1() };
        let [before, ..] = victim.sync()?;
        let mut peer = Peer::connect(victim.port)?;
        peer.send(&request.bytes())?;
        peer.finish();
        require!(peer.read_setup()?.is_none(), "a reply to {sent} of {said} bytes");
        require!(victim.sync()?[0] == before, "the program got half a request");
    }
    // Less than comes: the rest is the stream's first FPDU, and no good one.
    for sent in [1usize, 4, 100, 1000] {
        let request = Setup { length: Some(0), private_data: vec![0x33; sent], ..Setup::request1() };
        let mut peer = Peer::set_up(victim.port, &request)?;
        peer.finish();
        let codes = peer.answer()?.terminate()?;
        require!(codes.is_some_and(|c| c.0 == 2), "{sent} bytes too many: {codes:?}");
        let report = victim.report()?;
        require!(report.changed.is_empty() && report.recvs == crate::FLUSHED, "{report:?}");
    }
    victim.innocent(1)
}

/// IRD, ORD and all control bits: the reply keeps the RFC's rules, and the stream works.
pub fn read_depths_and_model(victim: &mut Victim) -> Outcome {
    for bits in 0..16u8 {
        for (ird, ord) in [
            (0, 0),
            (1, 1),
            (4, 5),
            (0, 0x3FFE),
            (0x3FFE, 0),
            (0x3FFE, 0x3FFE),
            (0x3FFF, 0x3FFF),
            (0x3FFF, 1),
        ] {
            let request = Setup { private_data: enhanced(bits, ird, ord).to_vec(), ..Setup::request2() };
            let what = format!("bits {bits:04b}, IRD {ird}, ORD {ord}");
            let reply = accepted(victim, &request, &what)?;
            require!(reply.private_data.len() == 4, "{what}: {reply:?}");
            let high = u16::from_be_bytes([reply.private_data[0], reply.private_data[1]]);
            let low = u16::from_be_bytes([reply.private_data[2], reply.private_data[3]]);
            let (their_ird, their_ord) = (high & 0x3FFF, low & 0x3FFF);
            require!((high & 0x8000 != 0) == (bits & P2P != 0), "{what}: the model changed");
            require!(ird == 0x3FFF || their_ord <= ird, "{what}: its ORD is {their_ord}");
            // What it can serve is bounded, whatever is asked for.
            require!(their_ird <= 256 || their_ird == 0x3FFF, "{what}: its IRD is {their_ird}");
            if bits & P2P != 0 {
                let offered = u16::from(bits & (RTR_WRITE | RTR_READ));
                let named = low >> 14;
                require!(
                    offered == 0 || (named != 0 && named & !offered == 0),
                    "{what}: indications {named:02b}"
                );
            }
        }
    }
    Ok(())
}

/// The first FPDU is not what was agreed. RFC 6581 gives no code for that: a good one says as much as the
/// indication would (RFC 5044 section 7.1.2 rule 4), and counts for what it is; a bad one ends a stream that
/// was never established.
pub fn first_fpdus_that_are_no_indication(victim: &mut Victim) -> Outcome {
    let [write, read] = ["write", "read"].map(|name| victim.region(name));
    let get = |size| Untagged::read(1, &ReadRequest::new(size, read.stag, read.at)).ulpdu();
    for offered in [RTR_WRITE, RTR_READ, RTR_WRITE | RTR_READ] {
        let request = Setup { private_data: enhanced(P2P | offered, 4, 4).to_vec(), ..Setup::request2() };
        for (what, ulpdu, answered, fate) in [
            (
                "a Write of 8 bytes",
                Tagged::write(write.stag, write.at, 8).ulpdu(),
                None,
                Fate::harmless().changed("write:0-7"),
            ),
            (
                "a segment that is not the last",
                Tagged::write(write.stag, write.at, 8).more().ulpdu(),
                None,
                Fate::harmless().changed("write:0-7"),
            ),
            (
                "a Send",
                Untagged::send(1, 8).ulpdu(),
                None,
                Fate::harmless().changed("recv:0-7").recvs("ok8,e5"),
            ),
            ("a Send of nothing", Untagged::send(1, 0).ulpdu(), None, Fate::harmless().recvs("ok0,e5")),
            ("a Read of 8 bytes", get(8), Some(8), Fate::harmless()),
            ("a Read of nothing", get(0), Some(0), Fate::harmless()),
        ] {
            let what = format!("{what} where {offered:02b} was offered");
            let mut peer = Peer::set_up(victim.port, &request)?;
            peer.send(&fpdus([ulpdu]))?;
            if let Some(len) = answered {
                let seen = peer.segment()?;
                require!(seen.opcode() == 2 && seen.payload() == vec![0xA5; len], "{what}: {seen:?}");
            }
            meet(victim, peer, &what, &fate)?;
        }
        for (what, ulpdu, codes, event) in [
            ("a Write to nothing that is", Tagged::write(1, 0, 8).ulpdu(), Some((1, 1, 0)), "3"),
            (
                "a Read of nothing that is",
                Untagged::read(1, &ReadRequest::new(8, 1, 0)).ulpdu(),
                Some((0, 1, 0)),
                "3",
            ),
            ("a Read Response", Tagged::new(2, write.stag, write.at, 8).ulpdu(), Some((1, 1, 0)), "3"),
            ("a Send with MSN 2", Untagged::send(2, 8).ulpdu(), Some((1, 2, 3)), "2"),
            ("a Terminate", Untagged::terminate(terminate(2, 0, 7, 0, &[])).ulpdu(), None, "1"),
        ] {
            let what = format!("{what} where {offered:02b} was offered");
            let mut peer = Peer::set_up(victim.port, &request)?;
            peer.send(&fpdus([ulpdu]))?;
            let answer = peer.answer()?;
            require!(answer.terminate()? == codes, "{what}: not {codes:?}: {answer:?}");
            drop(peer);
            let report = victim.report()?;
            require!(
                report.how == "CONNECT_ERROR"
                    && !report.established
                    && report.events == event
                    && report.recvs == crate::FLUSHED
                    && report.changed.is_empty(),
                "{what}: {report:?}"
            );
            victim.innocent(1)?;
        }
    }
    // One that has to wait for its receive: the program is told that the connection is up, as it may post
    // only then.
    victim.tell("profile recvs=0 sends=1")?;
    let mut peer = Peer::set_up(victim.port, &Setup::request2())?;
    peer.send(&Untagged::send(1, 8).fpdu())?;
    let seen = peer.segment()?;
    require!(seen.opcode() == SEND, "not what it sends when it is established: {seen:?}");
    victim.tell("post 1")?;
    let fate = Fate::harmless().changed("recv:0-7").recvs("ok8").sends("ok16");
    meet(victim, peer, "a Send without a receive", &fate)?;
    victim.tell("profile")
}

pub fn cut_short_at_every_byte(victim: &mut Victim) -> Outcome {
    let [before, ..] = victim.sync()?;
    let mut request = Setup::request2();
    request.private_data.extend([1; 40]);
    let bytes = request.bytes();
    for reset in [false, true] {
        for len in 0..bytes.len() {
            let mut peer = Peer::connect(victim.port)?;
            peer.send(&bytes[..len])?;
            if reset {
                peer.reset();
            } else {
                peer.finish();
                require!(peer.read_setup()?.is_none(), "a reply to {len} bytes");
            }
        }
    }
    require!(victim.sync()?[0] == before, "the program got a request that never was whole");
    victim.recovers()
}

pub fn one_byte_at_a_time(victim: &mut Victim) -> Outcome {
    let write = victim.region("write");
    for request in [Setup::request1(), Setup::request2(), Setup::uwarp()] {
        let mut peer = Peer::connect(victim.port)?;
        peer.send_in(&request.bytes(), 1)?;
        let reply = peer.read_setup()?;
        require!(reply.as_ref().is_some_and(|r| r.flags & REJECT == 0), "not accepted: {reply:?}");
        let rtr = Tagged::write(if request.flags & 4 != 0 { 0x0100_E000 } else { 0 }, 0, 0).ulpdu();
        peer.send_in(&fpdus([rtr, Tagged::write(write.stag, write.at, 300).ulpdu()]), 1)?;
        meet(victim, peer, "one byte at a time", &Fate::harmless().changed("write:0-299"))?;
    }
    Ok(())
}

/// An initiator that does not wait for the reply: its FPDUs lie in the socket, and are the stream's.
pub fn data_before_the_reply(victim: &mut Victim) -> Outcome {
    let write = victim.region("write");
    let stream = fpdus([Tagged::write(0, 0, 0).ulpdu(), Tagged::write(write.stag, write.at, 8).ulpdu()]);
    let mut peer = Peer::connect(victim.port)?;
    peer.send(&[Setup::request2().bytes(), stream].concat())?;
    require!(peer.read_setup()?.is_some(), "no reply");
    meet(victim, peer, "FPDUs behind the request", &Fate::harmless().changed("write:0-7"))?;
    for garbage in [vec![0xFF; 100_000], Setup::request2().bytes(), vec![0; 3]] {
        let mut peer = Peer::connect(victim.port)?;
        peer.send(&[Setup::request2().bytes(), garbage].concat())?;
        require!(peer.read_setup()?.is_some(), "no reply");
        peer.finish();
        let codes = peer.answer()?.terminate()?;
        require!(codes.is_some_and(|c| c.0 == 2), "garbage behind the request: {codes:?}");
        let report = victim.report()?;
        require!(report.changed.is_empty() && report.recvs == crate::FLUSHED, "{report:?}");
    }
    Ok(())
}

/// Gone before the request, within it, before the answer, after it, with and without a reset.
pub fn abandoned_at_every_phase(victim: &mut Victim) -> Outcome {
    for reset in [false, true] {
        let leave = |peer: Peer| if reset { peer.reset() } else { drop(peer) };
        leave(Peer::connect(victim.port)?);
        let mut peer = Peer::connect(victim.port)?;
        peer.send(&Setup::request2().bytes()[..19])?;
        leave(peer);
        // While the program thinks about it.
        for decision in ["accept", "reject", "drop"] {
            victim.tell("profile hold=1")?;
            let mut peer = Peer::connect(victim.port)?;
            peer.send(&Setup::request2().bytes())?;
            victim.expect("held")?;
            leave(peer);
            std::thread::sleep(Duration::from_millis(20));
            victim.tell("profile")?;
            victim.tell(decision)?;
            if decision == "accept" {
                let report = victim.report()?;
                require!(!report.established && report.recvs == crate::FLUSHED, "{report:?}");
            }
        }
        // After the answer, before the first FPDU; and behind a part of it.
        for len in [0, 1, 10, 19] {
            let mut peer = Peer::set_up(victim.port, &Setup::request2())?;
            peer.send(&Tagged::write(0, 0, 0).fpdu()[..len])?;
            leave(peer);
            let report = victim.report()?;
            require!(
                report.how == "CONNECT_ERROR" && !report.established && report.recvs == crate::FLUSHED,
                "gone after {len} bytes of the first FPDU: {report:?}"
            );
        }
        // An initiator of revision 1 owes no indication: the program is told at once that the connection is
        // up.
        let peer = Peer::set_up(victim.port, &Setup::request1())?;
        leave(peer);
        let report = victim.report()?;
        require!(report.recvs == crate::FLUSHED, "{report:?}");
    }
    victim.recovers()
}

/// More than the bound: the oldest go, an honest client still gets in, and none is left in the end.
pub fn half_open_flood(victim: &mut Victim) -> Outcome {
    // A quarter of what a process may have, a thousand at most; the victim has inherited our limit.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let bound = usize::try_from(limit / 4).unwrap_or(usize::MAX).min(1024);
    let mut silent = Vec::new();
    let mut most = 0;
    for n in 0..bound + 200 {
        let mut peer = Peer::connect(victim.port)?;
        if n % 2 == 0 {
            peer.send(&Setup::request2().bytes()[..n % 20])?;
        }
        silent.push(peer);
        if n % 50 == 0 {
            most = most.max(victim.extra_descriptors()?);
            victim.innocent(1)?;
        }
        if n % 100 == 99 {
            let write = victim.region("write");
            let peer = Peer::established(victim.port)?;
            let bytes = Tagged::write(write.stag, write.at, 8).fpdu();
            strike(
                victim,
                peer,
                &bytes,
                "an honest client among the silent",
                &Fate::harmless().changed("write:0-7"),
            )?;
        }
    }
    // One is on its way in or out.
    require!(most <= bound + 4, "{most} descriptors for half-open connections");
    // All are closed by the victim, the last after its patience of five seconds.
    for mut peer in silent {
        let answer = peer.read_to_end(PATIENCE)?;
        require!(answer.end != End::Open, "a half-open connection stays");
    }
    victim.recovers()
}

/// A byte now and then keeps nothing alive: the time limits are for the whole, not for the next byte.
pub fn slow_senders(victim: &mut Victim) -> Outcome {
    let bytes = Setup::request2().bytes();
    let mut request = Peer::connect(victim.port)?;
    let mut first_fpdu = Peer::set_up(victim.port, &Setup::request2())?;
    let rtr = Tagged::write(0, 0, 0).fpdu();
    let mut silent = Peer::set_up(victim.port, &Setup::request2())?;
    // The victim waits five seconds for a request, and ten from its reply to the first FPDU. Neither is whole
    // when this ends, nine seconds after the later limit. A limit that began anew with each byte would not
    // have passed.
    for n in 0..rtr.len() - 1 {
        request.send(&bytes[n..=n])?;
        first_fpdu.send(&rtr[n..=n])?;
        std::thread::sleep(Duration::from_secs(1));
    }
    let soon = Duration::from_secs(1);
    require!(request.read_to_end(soon)?.end != End::Open, "a slow request is still waited for");
    // One had an FPDU cut short, the other one nothing.
    for _ in 0..2 {
        let report = victim.report_within(soon)?;
        require!(!report.established && report.how == "UNREACHABLE", "{report:?}");
        require!(report.recvs == crate::FLUSHED && report.changed.is_empty(), "{report:?}");
    }
    first_fpdu.answer()?;
    silent.answer()?;
    victim.recovers()
}

/// Connections by the hundred at once, set up, used and broken.
pub fn connection_storm(victim: &mut Victim) -> Outcome {
    let port = victim.port;
    let write = victim.region("write");
    let [before, ..] = victim.sync()?;
    victim.innocent_begins(200)?;
    let storms: Vec<_> = (0..4)
        .map(|thread| {
            std::thread::spawn(move || -> Outcome<u64> {
                let mut whole = 0;
                for n in 0..150 {
                    match (n + thread) % 5 {
                        0 => drop(Peer::connect(port)?),
                        1 => Peer::connect(port)?.reset(),
                        2 => {
                            let mut peer = Peer::connect(port)?;
                            peer.send(&Setup::request2().bytes())?;
                            whole += 1;
                            peer.reset();
                        }
                        n => {
                            let mut peer = Peer::established(port)?;
                            whole += 1;
                            peer.send(&Tagged::write(write.stag, write.at, 100).fpdu())?;
                            if n == 3 {
                                peer.reset();
                            }
                        }
                    }
                }
                Ok(whole)
            })
        })
        .collect();
    let mut whole = 0;
    for storm in storms {
        whole += storm.join().map_err(|_| uwarp_conformance::Failure("a storm panicked".into()))??;
    }
    victim.innocent_done()?;
    victim.recovers()?;
    let [after, ..] = victim.sync()?;
    // A request that was reset may be gone before it is read; none is reported twice.
    require!(after - before <= whole, "{} requests of {whole} connections", after - before);
    Ok(())
}
