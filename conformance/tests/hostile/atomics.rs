//! Atomic operations (RFC 7306): requests that may not be carried out, and responses that are none.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use uwarp_conformance::attacker::encode::{
    self, ATOMIC_REQUEST, ATOMIC_RESPONSE, AtomicRequest, CRC, Codes, ENHANCED, P2P, RTR_WRITE, ReadRequest,
    Setup, Tagged, Untagged, fpdus,
};
use uwarp_conformance::attacker::peer::{PATIENCE, Peer};
use uwarp_conformance::attacker::victim::Victim;
use uwarp_conformance::{Failure, Outcome, require};

use crate::{FLUSHED, Fate, event_of, meet, strike};

const PAINT: u64 = 0xA5A5_A5A5_A5A5_A5A5;

fn add(stag: u32, to: u64) -> Untagged {
    Untagged::atomic(1, &AtomicRequest::fetch_add(7, stag, to))
}

fn swap(stag: u32, to: u64) -> Untagged {
    Untagged::atomic(1, &AtomicRequest::cmp_swap(7, stag, to, PAINT, 0))
}

/// The request must be refused with these codes and change nothing. The Terminate quotes the DDP header, and
/// no more (RFC 7306 section 8.1).
fn refused(victim: &mut Victim, request: &Untagged, what: &str, codes: Codes) -> Outcome {
    for pose in [Peer::established, Peer::uwarp] {
        let mut peer = pose(victim.port)?;
        peer.send(&request.fpdu())?;
        let answer = peer.answer()?;
        let got = answer.terminate()?;
        require!(got == Some(codes), "{what}: Terminate {got:?}, wanted {codes:?}");
        let message = answer.seen.last().map_or(&[][..], |terminate| terminate.payload());
        let ulpdu = request.ulpdu();
        let quoted = [&(ulpdu.len() as u16).to_be_bytes(), &ulpdu[..18]].concat();
        require!(
            message.get(2) == Some(&0xC0) && message.get(4..) == Some(&quoted[..]),
            "{what}: does not quote its DDP header: {message:x?}"
        );
        let report = victim.report()?;
        require!(
            report.events == event_of(codes) && report.recvs == FLUSHED && report.changed.is_empty(),
            "{what}: {report:?}"
        );
    }
    victim.innocent(1)
}

/// The value of the response, which must answer request 7.
fn value(peer: &mut Peer, what: &str) -> Outcome<u64> {
    let seen = peer.message()?;
    let Some((7, value)) = seen.atomic_result() else { uwarp_conformance::fail!("{what}: {seen:?}") };
    Ok(value)
}

/// Carried out, with this change.
fn granted(victim: &mut Victim, request: &Untagged, what: &str, changed: &'static str) -> Outcome {
    let mut peer = Peer::established(victim.port)?;
    peer.send(&request.fpdu())?;
    let found = value(&mut peer, what)?;
    require!(found == PAINT, "{what}: found {found:#x}");
    meet(victim, peer, what, &Fate::harmless().changed(changed))
}

/// An address that is not a multiple of eight, whatever its offset looks like.
pub fn unaligned_atomics(victim: &mut Victim) -> Outcome {
    let region = victim.region("atomic");
    for offset in (0..16).filter(|offset| offset % 8 != 0) {
        for request in [add, swap] {
            let request = request(region.stag, region.at + offset);
            refused(victim, &request, &format!("at offset {offset}"), (0, 2, 7))?;
        }
    }
    // A zero-based window that begins at such an address.
    for to in [0, 8, 4] {
        let mut peer = Peer::established(victim.port)?;
        victim.tell("window w 2 bind 1028 512 46")?;
        let window = victim.region("w");
        let what = format!("offset {to} of a window that begins at a multiple of four");
        peer.send(&add(window.stag, to).fpdu())?;
        if to == 4 {
            value(&mut peer, &what)?;
            meet(victim, peer, &what, &Fate::harmless().changed("bind:1032-1032"))?;
        } else {
            meet(victim, peer, &what, &Fate::terminated((0, 2, 7)))?;
        }
        victim.tell("dealloc w")?;
    }
    Ok(())
}

/// Eight bytes of which one or all lie outside.
pub fn atomics_out_of_bounds(victim: &mut Victim) -> Outcome {
    let region = victim.region("atomic");
    granted(victim, &add(region.stag, region.at), "the first eight bytes", "atomic:0-0")?;
    granted(victim, &swap(region.stag, region.at + 88), "the last eight bytes", "atomic:88-95")?;
    for (to, codes) in [
        (region.at + 96, (0, 1, 1)),
        (region.at + 104, (0, 1, 1)),
        (region.at - 8, (0, 1, 1)),
        (region.at + (1 << 32), (0, 1, 1)),
        (region.at ^ 1 << 63, (0, 1, 1)),
        (0, (0, 1, 1)),
        (u64::MAX - 15, (0, 1, 1)),
        (u64::MAX - 7, (0, 1, 4)),
        (u64::MAX, (0, 1, 4)),
    ] {
        for request in [add, swap] {
            refused(victim, &request(region.stag, to), &format!("at {to:#x}"), codes)?;
        }
    }
    Ok(())
}

/// Atomic access is a right of its own, of the region and of the queue pair.
pub fn atomics_without_the_right(victim: &mut Victim) -> Outcome {
    let atomics = victim.region("atomics");
    granted(victim, &add(atomics.stag, atomics.at), "the right alone", "atomics:0-0")?;
    let write = Tagged::write(atomics.stag, atomics.at, 8).fpdu();
    let peer = Peer::established(victim.port)?;
    strike(victim, peer, &write, "a Write with the right to atomics", &Fate::terminated((0, 1, 2)))?;
    let read = Untagged::read(1, &ReadRequest::new(8, atomics.stag, atomics.at)).fpdu();
    let peer = Peer::established(victim.port)?;
    strike(victim, peer, &read, "a Read with the right to atomics", &Fate::terminated((0, 1, 2)))?;
    for (name, codes) in [
        ("both", (0, 1, 2)),
        ("write", (0, 1, 2)),
        ("read", (0, 1, 2)),
        ("local", (0, 1, 2)),
        ("foreign", (0, 1, 3)),
        ("dead", (0, 1, 0)),
    ] {
        let region = victim.region(name);
        refused(victim, &add(region.stag, region.at), name, codes)?;
    }
    refused(victim, &add(atomics.stag ^ 1, atomics.at), "another key", (0, 1, 0))?;
    victim.tell("profile access=7")?;
    refused(victim, &add(atomics.stag, atomics.at), "a queue pair without the right", (0, 1, 2))?;
    victim.tell("profile access=8")?;
    granted(victim, &add(atomics.stag, atomics.at), "a queue pair with that right alone", "atomics:0-0")?;
    victim.tell("profile")
}

/// Every field of the request: operations that are none, reserved bits, which do not count, lengths, queues.
pub fn atomic_requests_that_lie(victim: &mut Victim) -> Outcome {
    let region = victim.region("atomic");
    let base = AtomicRequest::fetch_add(7, region.stag, region.at);
    for operation in (0..16).filter(|operation| ![0, 2].contains(operation)) {
        for reserved in [0, 0xFFFF_FFF0] {
            let request = Untagged::atomic(1, &AtomicRequest { operation: operation | reserved, ..base });
            refused(victim, &request, &format!("operation {operation}"), (0, 2, 6))?;
        }
    }
    for bit in 4..32 {
        let request = Untagged::atomic(1, &AtomicRequest { operation: 1 << bit, ..base });
        granted(victim, &request, &format!("reserved bit {bit}"), "atomic:0-0")?;
    }
    // Nothing to compare with.
    let request = AtomicRequest { compare: (1, u64::MAX), ..base };
    granted(victim, &Untagged::atomic(1, &request), "compare data of FetchAdd", "atomic:0-0")?;

    let cut = |len| Untagged::new(ATOMIC_REQUEST, 1, 1, base.bytes()[..len].to_vec());
    for len in 0..52 {
        refused(victim, &cut(len), &format!("{len} bytes"), (0, 2, 0xFF))?;
    }
    for len in [53, 60, 104, 1000] {
        let mut longer = base.bytes();
        longer.resize(len, 0);
        let longer = Untagged::new(ATOMIC_REQUEST, 1, 1, longer);
        refused(victim, &longer, &format!("{len} bytes"), (1, 2, 5))?;
    }
    let good = Untagged::atomic(1, &base);
    refused(victim, &good.clone().more(), "not the last segment", (0, 2, 0xFF))?;
    refused(victim, &good.clone().at(4), "not the first segment", (1, 2, 4))?;
    for msn in [0, 2, u32::MAX] {
        refused(victim, &Untagged { msn, ..good.clone() }, &format!("MSN {msn}"), (1, 2, 3))?;
    }
    for qn in [0, 2, 3] {
        refused(victim, &Untagged { qn, ..good.clone() }, &format!("queue {qn}"), (0, 2, 6))?;
    }
    Ok(())
}

/// Reads and atomic operations together are as many as were agreed. What waits for its turn is not carried
/// out when one more ends the stream.
pub fn atomics_beyond_the_depth(victim: &mut Victim) -> Outcome {
    victim.tell("profile depth=64")?;
    let (both, atomic) = (victim.region("both"), victim.region("atomic"));
    for reads in [63u32, 64] {
        let setup = Setup {
            flags: CRC | ENHANCED,
            private_data: encode::enhanced(P2P | RTR_WRITE, 64, 64).to_vec(),
            ..Setup::request2()
        };
        let mut peer = Peer::set_up(victim.port, &setup)?;
        peer.send(&Tagged::write(0, 0, 0).fpdu())?;
        // More than the buffers of both sockets hold: most of them stay unanswered.
        for msn in 1..=reads {
            peer.send(&Untagged::read(msn, &ReadRequest::new(1 << 20, both.stag, both.at)).fpdu())?;
        }
        peer.arrived(1)?;
        let many = (1..=65).map(|n| {
            let request = AtomicRequest::fetch_add(n, atomic.stag, atomic.at);
            Untagged::atomic(reads + n, &request).ulpdu()
        });
        peer.send(&fpdus(many))?;
        let report = victim.report()?;
        // What is within the depth is carried out when it arrives. Behind 64 Reads, that is the case if the
        // buffers of both sockets have taken all of the first answer by then.
        let carried_out = report.changed == "atomic:0-0" || reads == 64 && report.changed.is_empty();
        require!(
            report.events == "2" && report.recvs == FLUSHED && carried_out,
            "behind {reads} Reads: {report:?}"
        );
        let answer = peer.answer()?;
        let codes = answer.terminate()?;
        require!(codes == Some((1, 2, 2)), "behind {reads} Reads: {codes:?}");
        require!(answer.seen.iter().all(|seen| seen.opcode() != ATOMIC_RESPONSE), "one is answered");
        victim.innocent(1)?;
    }
    victim.tell("profile")
}

/// The victim waits for the response to one FetchAdd, whose identifier is the argument.
type Lie = fn(u32) -> Vec<Vec<u8>>;

const LIES: [(&str, Lie, Codes); 14] = [
    ("another identifier", |id| vec![Untagged::atomic_response(1, id ^ 1, 5).ulpdu()], (0, 2, 0xFF)),
    ("identifier 0", |_| vec![Untagged::atomic_response(1, 0, 5).ulpdu()], (0, 2, 0xFF)),
    ("no byte", |_| vec![short(0)], (0, 2, 0xFF)),
    ("half of it", |_| vec![short(4)], (0, 2, 0xFF)),
    ("a byte too few", |_| vec![short(11)], (0, 2, 0xFF)),
    ("a byte too many", |_| vec![short(13)], (1, 2, 5)),
    ("far too many", |_| vec![short(1400)], (1, 2, 5)),
    ("in two segments", |id| vec![Untagged::atomic_response(1, id, 5).more().ulpdu()], (0, 2, 0xFF)),
    ("an offset", |id| vec![Untagged::atomic_response(1, id, 5).at(4).ulpdu()], (1, 2, 4)),
    ("MSN 2", |id| vec![Untagged::atomic_response(2, id, 5).ulpdu()], (1, 2, 3)),
    ("on queue 0", |id| vec![Untagged { qn: 0, ..Untagged::atomic_response(1, id, 5) }.ulpdu()], (0, 2, 6)),
    ("a Read Response", |id| vec![Tagged::new(encode::READ_RESPONSE, id, 0, 8).ulpdu()], (1, 1, 0)),
    ("an empty Read Response", |_| vec![Tagged::new(encode::READ_RESPONSE, 0, 0, 0).ulpdu()], (0, 2, 6)),
    (
        "a request of the same identifier",
        |id| vec![Untagged::atomic(1, &AtomicRequest::fetch_add(id, 0x0101_0101, 0x1000)).ulpdu()],
        (0, 1, 0),
    ),
];

fn short(len: usize) -> Vec<u8> {
    Untagged::new(ATOMIC_RESPONSE, 3, 1, vec![0; len]).ulpdu()
}

/// The victim has asked for an atomic operation. It gets its result by the right response only, and each
/// result once.
pub fn atomic_responses_that_lie(victim: &mut Victim) -> Outcome {
    victim.tell("profile atomics=1")?;
    let asked = |peer: &mut Peer| -> Outcome<u32> {
        let seen = peer.message()?;
        require!(seen.opcode() == ATOMIC_REQUEST && seen.payload().len() == 52, "no request: {seen:?}");
        // The identifier is behind the operation.
        Ok(seen.word(22))
    };
    for (what, lie, codes) in LIES {
        let mut peer = Peer::uwarp(victim.port)?;
        let id = asked(&mut peer)?;
        let fate = Fate::terminated(codes).sends("e5");
        strike(victim, peer, &fpdus(lie(id)), what, &fate)?;
    }
    // The right one, and once more.
    let mut peer = Peer::uwarp(victim.port)?;
    let id = asked(&mut peer)?;
    let bytes = fpdus([1, 2].map(|msn| Untagged::atomic_response(msn, id, 5).ulpdu()));
    let fate = Fate::terminated((1, 2, 2)).sends("ok8").changed("sink:0-7");
    strike(victim, peer, &bytes, "the same response twice", &fate)?;
    // Two outstanding, answered in the wrong order.
    victim.tell("profile atomics=2")?;
    let mut peer = Peer::uwarp(victim.port)?;
    let ids = [asked(&mut peer)?, asked(&mut peer)?];
    require!(ids[0] != ids[1], "two requests have the same identifier");
    let bytes = Untagged::atomic_response(1, ids[1], 5).fpdu();
    let fate = Fate::terminated((0, 2, 0xFF)).sends("e5,e5");
    strike(victim, peer, &bytes, "the second response first", &fate)?;
    // Nothing is asked of those who do not show themselves as uwarp, and nothing is expected of anyone.
    victim.tell("profile atomics=2 sends=1")?;
    let mut peer = Peer::established(victim.port)?;
    let seen = peer.message()?;
    require!(seen.opcode() == encode::SEND, "the first message to a stranger: {seen:?}");
    let fate = Fate::harmless().sends("unsupported,unsupported,ok16");
    strike(victim, peer, &[], "a stranger", &fate)?;
    victim.tell("profile reads=1")?;
    for pose in [Peer::established, Peer::uwarp] {
        let mut peer = pose(victim.port)?;
        peer.sinks(1)?;
        let bytes = Untagged::atomic_response(1, 1, 5).fpdu();
        strike(victim, peer, &bytes, "a response to a Read", &Fate::terminated((1, 2, 2)).sends("e5"))?;
    }
    victim.tell("profile")
}

/// The program takes the region and its memory away while atomic operations on it pour in. Whoever were late
/// would touch memory that has no access any more.
pub fn deregistered_under_atomics(victim: &mut Victim) -> Outcome {
    for round in 0..20 {
        for pose in [Peer::established, Peer::uwarp] {
            let atomic = victim.region("atomic");
            let mut peer = pose(victim.port)?;
            let over = Arc::new(AtomicBool::new(false));
            let ended = over.clone();
            let fire = std::thread::spawn(move || -> Outcome<Vec<Codes>> {
                let mut msn = 0;
                while !ended.load(Ordering::Relaxed) {
                    // As many at once as the depth allows.
                    let some = fpdus((0..4).map(|n| {
                        let request = if n % 2 == 0 {
                            AtomicRequest::fetch_add(n, atomic.stag, atomic.at + 8)
                        } else {
                            AtomicRequest::cmp_swap(n, atomic.stag, atomic.at + 8, 0, 1)
                        };
                        Untagged::atomic(msn + n + 1, &request).ulpdu()
                    }));
                    msn += 4;
                    peer.send(&some)?;
                    for n in 0..4 {
                        let seen = peer.message()?;
                        if let Some(codes) = seen.codes() {
                            return Ok(vec![codes]);
                        }
                        let id = seen.atomic_result().map(|(id, _)| id);
                        require!(id == Some(n), "no response to {n}: {seen:?}");
                    }
                }
                Ok(vec![])
            });
            std::thread::sleep(Duration::from_micros(500 * (round as u64 % 7)));
            victim.tell("retire atomic")?;
            let report = victim.report_within(PATIENCE);
            over.store(true, Ordering::Relaxed);
            let report = report?;
            require!(
                report.events == "3" && report.recvs == FLUSHED && report.changed.is_empty(),
                "round {round}: {report:?}"
            );
            let codes = fire.join().map_err(|_| Failure("panicked".into()))??;
            require!(codes == [(0, 1, 0)], "round {round}: {codes:?}");
            victim.tell("renew")?;
            victim.innocent(1)?;
        }
    }
    Ok(())
}

/// Several at once add to one number, each as often: no addition is lost, whoever moves the bytes.
pub fn contended_atomics(victim: &mut Victim) -> Outcome {
    const EACH: u32 = 400;
    let region = victim.region("atomic");
    victim.innocent_begins(20)?;
    let port = victim.port;
    let threads: Vec<_> = [Peer::established, Peer::uwarp, Peer::established, Peer::uwarp]
        .map(|pose| {
            std::thread::spawn(move || -> Outcome<Peer> {
                let mut peer = pose(port)?;
                for msn in 1..=EACH {
                    peer.send(
                        &Untagged::atomic(msn, &AtomicRequest::fetch_add(msn, region.stag, region.at)).fpdu(),
                    )?;
                    let seen = peer.message()?;
                    require!(seen.atomic_result().is_some_and(|(id, _)| id == msn), "{msn}: {seen:?}");
                }
                Ok(peer)
            })
        })
        .into();
    let peers: Vec<Peer> = threads
        .into_iter()
        .map(|thread| thread.join().map_err(|_| Failure("panicked".into()))?)
        .collect::<Outcome<_>>()?;
    let mut last = Peer::established(port)?;
    last.send(&add(region.stag, region.at).fpdu())?;
    let sum = value(&mut last, "the sum")?.wrapping_sub(PAINT);
    require!(sum == 4 * u64::from(EACH), "the sum is {sum}");
    victim.innocent_done()?;
    for peer in peers.into_iter().chain([last]) {
        peer.finish();
        let report = victim.report()?;
        require!(report.events.is_empty() && report.recvs == FLUSHED, "{report:?}");
    }
    Ok(())
}

pub fn contended_atomics_against_a_program_that_polls(victim: &mut Victim) -> Outcome {
    contended_atomics(victim)
}
