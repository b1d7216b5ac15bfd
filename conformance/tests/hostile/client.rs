//! The victim connects, and the attacker answers.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use uwarp_conformance::attacker::encode::{
    Codes, ENHANCED, P2P, READ_REQUEST, READ_RESPONSE, REJECT, REQUEST, RTR_READ, RTR_WRITE, SEND, Setup,
    Tagged, UWARP_A, UWARP_B, Untagged, WRITE, enhanced, fpdus,
};
use uwarp_conformance::attacker::peer::{End, PATIENCE, Peer};
use uwarp_conformance::attacker::victim::{Report, Victim};
use uwarp_conformance::{Context, Failure, Outcome, require};

type Script = dyn Fn(&mut Peer, usize) -> Outcome + Send + Sync;

/// Three requests, each plainer than the one before; the first is repeated once after a silent end.
const MOST_ATTEMPTS: usize = 4;

/// Has the victim connect, does `script` to each of its attempts (numbered from 0), and returns what it says
/// in the end and how often it tried.
fn serve(victim: &mut Victim, script: &Arc<Script>) -> Outcome<(Report, usize)> {
    let listener = TcpListener::bind("127.0.0.1:0").context("listen")?;
    let port = listener.local_addr().context("address")?.port();
    listener.set_nonblocking(true).context("non-blocking")?;
    let stop = Arc::new(AtomicBool::new(false));
    let attempts = Arc::new(AtomicUsize::new(0));
    let server = std::thread::spawn({
        let (stop, attempts, script) = (stop.clone(), attempts.clone(), script.clone());
        move || -> Outcome {
            while !stop.load(Ordering::SeqCst) {
                match listener.accept() {
                    Ok((tcp, _)) => {
                        tcp.set_nonblocking(false).context("blocking")?;
                        let mut peer = Peer::over(tcp)?;
                        script(&mut peer, attempts.fetch_add(1, Ordering::SeqCst))?;
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
            Ok(())
        }
    });
    let report = victim.tell(&format!("connect {port}")).and_then(|()| victim.report_within(2 * PATIENCE));
    stop.store(true, Ordering::SeqCst);
    let served = server.join().map_err(|_| Failure("the server panicked".into()))?;
    let report = report?;
    served?;
    Ok((report, attempts.load(Ordering::SeqCst)))
}

/// Answers each request with these bytes and reads what comes.
fn answer_with(bytes: Vec<u8>) -> Arc<Script> {
    Arc::new(move |peer, _| {
        peer.read_setup()?;
        peer.send(&bytes)?;
        peer.finish();
        let answer = peer.read_to_end(PATIENCE)?;
        require!(answer.end != End::Open, "the victim keeps a connection that is no use");
        Ok(())
    })
}

/// No connection comes of this answer.
fn refused(victim: &mut Victim, bytes: &[u8], what: &str) -> Outcome {
    let (report, attempts) = serve(victim, &answer_with(bytes.to_vec()))?;
    require!(
        !report.established && report.changed.is_empty() && report.events.is_empty(),
        "{what}: {report:?} after {attempts} attempts"
    );
    require!(attempts <= MOST_ATTEMPTS, "{what}: {attempts} attempts");
    victim.innocent(1)
}

/// A stream comes of this reply; then the attacker writes into it and hangs up.
fn works(victim: &mut Victim, reply: &Setup, what: &str) -> Outcome {
    let write = victim.region("write");
    let reply_bytes = reply.bytes();
    let rtr = u16::from_be_bytes([reply.private_data[0], reply.private_data[1]]) & 0x8000 != 0;
    let script: Arc<Script> = Arc::new(move |peer, attempt| {
        require!(attempt == 0, "it tried again");
        peer.read_setup()?;
        peer.send(&reply_bytes)?;
        if rtr && reply_bytes[16] & 0x80 == 0 {
            // The Write where the reply names it, else the Read.
            if reply_bytes[22] >> 6 & RTR_WRITE != 0 {
                peer.expect_rtr()?;
            } else {
                let seen = peer.segment()?;
                let asks_for_nothing = seen.opcode() == READ_REQUEST && seen.word(18 + 12) == 0;
                require!(asks_for_nothing, "not a Read of no bytes: {seen:?}");
                peer.send(&Tagged::new(2, seen.word(18), 0, 0).fpdu())?;
            }
        }
        peer.send(&Tagged::write(write.stag, write.at, 8).fpdu())?;
        peer.finish();
        peer.answer()?;
        Ok(())
    });
    let (report, _) = serve(victim, &script)?;
    require!(
        report.established && report.changed == "write:0-7" && report.recvs == crate::FLUSHED,
        "{what}: {report:?}"
    );
    victim.innocent(1)
}

pub fn every_byte_of_the_key(victim: &mut Victim) -> Outcome {
    for at in 0..16 {
        for flip in [1, 0xFF] {
            let mut reply = Setup::reply2();
            reply.key[at] ^= flip;
            refused(victim, &reply.bytes(), &format!("byte {at} of the key changed by {flip:#x}"))?;
        }
    }
    refused(victim, &Setup { key: REQUEST, ..Setup::reply2() }.bytes(), "a request for a reply")
}

/// All 256 values: rejected, accepted, or not understood, and never taken for uwarp without saying so.
pub fn every_flag(victim: &mut Victim) -> Outcome {
    for flags in 0..=255u8 {
        let reply = Setup { flags, ..Setup::reply2() };
        let what = format!("flags {flags:#04x}");
        if flags & REJECT != 0 {
            let (report, attempts) = serve(victim, &answer_with(reply.bytes()))?;
            require!(
                report.how == "REJECTED" && attempts == 1,
                "{what}: {report:?} after {attempts} attempts"
            );
        } else if flags & ENHANCED == 0 {
            // Not enhanced: asked again with revision 1, and the same answer is no good then either, or good.
            let (report, attempts) = serve(victim, &answer_with(reply.bytes()))?;
            require!(attempts <= 3 && report.changed.is_empty(), "{what}: {report:?}");
        } else {
            works(victim, &reply, &what)?;
        }
    }
    Ok(())
}

pub fn every_revision(victim: &mut Victim) -> Outcome {
    for revision in (0..=255u8).filter(|r| !matches!(r, 1 | 2)) {
        refused(victim, &Setup { revision, ..Setup::reply2() }.bytes(), &format!("revision {revision}"))?;
    }
    Ok(())
}

pub fn every_length(victim: &mut Victim) -> Outcome {
    for len in (4..=512usize).step_by(17).chain([511, 512]) {
        let mut reply = Setup::reply2();
        reply.private_data.resize(len, 0x77);
        works(victim, &reply, &format!("{len} bytes of private data"))?;
        let posing = Setup { flags: 0x40 | ENHANCED | UWARP_B, ..reply };
        works(victim, &posing, &format!("posing as uwarp, {len} bytes of private data"))?;
    }
    for len in 0..4 {
        let mut reply = Setup::reply2();
        reply.private_data.truncate(len);
        refused(victim, &reply.bytes(), &format!("enhanced, with {len} bytes"))?;
    }
    for len in [513usize, 4096, 65_535] {
        let mut reply = Setup::reply2();
        reply.private_data.resize(len, 0);
        refused(victim, &reply.bytes(), &format!("{len} bytes of private data"))?;
    }
    for (said, sent) in [(512u16, 511usize), (65, 64), (5, 4)] {
        let mut reply = Setup { length: Some(said), ..Setup::reply2() };
        reply.private_data.resize(sent, 0);
        refused(victim, &reply.bytes(), &format!("{sent} of {said} bytes of private data"))?;
    }
    Ok(())
}

pub fn read_depths_and_model(victim: &mut Victim) -> Outcome {
    for bits in 0..16u8 {
        for (ird, ord) in [(0, 0), (1, 1), (4, 5), (0x3FFE, 1), (1, 0x3FFE), (0x3FFF, 0x3FFF)] {
            let reply = Setup { private_data: enhanced(bits, ird, ord).to_vec(), ..Setup::reply2() };
            let what = format!("bits {bits:04b}, IRD {ird}, ORD {ord}");
            let no_indication = bits & P2P != 0 && bits & (RTR_WRITE | RTR_READ) == 0;
            if ord == 0x3FFE || no_indication {
                // More Reads than can be served, or nothing in common: told with a Terminate (RFC 6581
                // section 7).
                let codes = if ord == 0x3FFE { (2, 0, 6) } else { (2, 0, 7) };
                let bytes = reply.bytes();
                let script: Arc<Script> = Arc::new(move |peer, _| {
                    peer.read_setup()?;
                    peer.send(&bytes)?;
                    let answer = peer.answer()?;
                    require!(answer.terminate()? == Some(codes), "not {codes:?}: {answer:?}");
                    Ok(())
                });
                let (report, attempts) = serve(victim, &script)?;
                require!(report.how == "CONNECT_ERROR" && attempts == 1, "{what}: {report:?}");
            } else {
                works(victim, &reply, &what)?;
            }
        }
    }
    Ok(())
}

pub fn cut_short_at_every_byte(victim: &mut Victim) -> Outcome {
    let mut reply = Setup::reply2();
    reply.private_data.extend([9; 20]);
    let bytes = reply.bytes();
    for len in 0..bytes.len() {
        refused(victim, &bytes[..len], &format!("{len} bytes of a reply"))?;
        let part = bytes[..len].to_vec();
        let script: Arc<Script> = Arc::new(move |peer, _| {
            peer.read_setup()?;
            peer.send(&part)?;
            rustix::net::sockopt::set_socket_linger(&peer.tcp, Some(Duration::ZERO)).context("linger")
        });
        let (report, attempts) = serve(victim, &script)?;
        require!(!report.established && attempts <= MOST_ATTEMPTS, "{len} bytes and a reset: {report:?}");
    }
    // One byte at a time it is a reply like any other.
    let script: Arc<Script> = Arc::new(move |peer, _| {
        peer.read_setup()?;
        peer.send_in(&bytes, 1)?;
        peer.expect_rtr()?;
        peer.finish();
        peer.answer()?;
        Ok(())
    });
    let (report, _) = serve(victim, &script)?;
    require!(report.established, "{report:?}");
    Ok(())
}

pub fn other_answers(victim: &mut Victim) -> Outcome {
    // The victim's own request, flags and all: no uwarp end answers so.
    let script: Arc<Script> = Arc::new(|peer, attempt| {
        let Some(request) = peer.read_setup()? else { uwarp_conformance::fail!("no request") };
        require!(attempt > 0 || request.flags & UWARP_A != 0, "it does not show itself: {request:?}");
        peer.send(&Setup { key: Setup::reply2().key, ..request }.bytes())?;
        // A stranger is given a Write without anything in it, and no STag 0, which some hardware takes for
        // one of its own.
        let seen = peer.expect_rtr()?;
        require!(seen.opcode() == WRITE && seen.stag() == 1, "taken for uwarp: {seen:?}");
        peer.finish();
        peer.answer()?;
        Ok(())
    });
    let (report, _) = serve(victim, &script)?;
    require!(report.established, "an echo: {report:?}");
    refused(victim, b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP")?;
    refused(victim, &[0; 5000], "zeros")?;
    refused(victim, &Tagged::write(0, 0, 0).fpdu(), "an FPDU")?;
    refused(victim, &[], "nothing")?;
    // A rejection with the most private data there is, and FPDUs behind it.
    let mut no = Setup { flags: 0x40 | ENHANCED | REJECT, ..Setup::reply2() };
    no.private_data.resize(512, 1);
    let (report, _) = serve(victim, &answer_with([no.bytes(), Tagged::write(1, 1, 1).fpdu()].concat()))?;
    require!(report.how == "REJECTED", "{report:?}");
    // Reply and error at once: the connection comes up, or does not, and ends.
    let stream = [Setup::reply2().bytes(), Untagged::send(7, 8).fpdu()].concat();
    let (report, _) = serve(victim, &answer_with(stream))?;
    require!(report.recvs == crate::FLUSHED && report.changed.is_empty(), "{report:?}");
    victim.innocent(1)
}

/// A server that is not uwarp is asked what it has placed: a Send is done when that is answered, not before.
/// One that sends our flag back may be siw, which is not asked.
pub fn answers_to_what_is_placed(victim: &mut Victim) -> Outcome {
    victim.tell("profile sends=1")?;
    for (what, flags, answered, done) in [
        ("an answer", 0x50, true, true),
        ("no answer", 0x50, false, false),
        ("one that is not asked", 0x50 | UWARP_A, false, true),
    ] {
        let script: Arc<Script> = Arc::new(move |peer, _| {
            peer.read_setup()?;
            peer.send(&Setup { flags, ..Setup::reply2() }.bytes())?;
            peer.expect_rtr()?;
            let seen = peer.segment()?;
            require!(seen.opcode() == SEND, "no Send: {seen:?}");
            if flags & UWARP_A == 0 {
                let seen = peer.segment()?;
                let asks = seen.opcode() == READ_REQUEST
                    && (seen.word(18), seen.word(18 + 12), seen.word(18 + 16)) == (1, 0, 1);
                require!(asks, "not a Read of no bytes with STags 1: {seen:?}");
            }
            if answered {
                peer.send(&Tagged::new(READ_RESPONSE, 1, 0, 0).fpdu())?;
            }
            peer.finish();
            let rest = peer.answer()?;
            require!(rest.seen.is_empty(), "more: {rest:?}");
            Ok(())
        });
        let (report, _) = serve(victim, &script)?;
        require!(report.established && (report.sends == "ok16") == done, "{what}: {report:?}");
        victim.innocent(1)?;
    }
    victim.tell("profile")
}

/// A server that sets up well: what the victim asks of it is answered with lies.
pub fn a_server_that_lies_later(victim: &mut Victim) -> Outcome {
    victim.tell("profile reads=1 sends=1 recvs=2")?;
    let lies: Vec<(&str, Vec<u8>, Option<Codes>)> = vec![
        ("a response to another sink", fpdus([Tagged::new(2, 0x1111_1111, 0, 64).ulpdu()]), Some((1, 1, 0))),
        ("a Terminate", Untagged::terminate(vec![0x01, 2, 0, 0]).fpdu(), None),
        // "MP" for a length: more than comes.
        ("a request in the middle", Setup::request2().bytes(), Some((2, 0, 1))),
        ("a wrong MSN", Untagged::send(0, 8).fpdu(), Some((1, 2, 3))),
        ("half an FPDU", vec![0, 40, 0xC1, 0x40], Some((2, 0, 1))),
    ];
    for (what, bytes, codes) in lies {
        for flags in [0x50, 0x40 | ENHANCED | UWARP_B] {
            let bytes = bytes.clone();
            let script: Arc<Script> = Arc::new(move |peer, _| {
                peer.read_setup()?;
                let mut reply = Setup { flags, ..Setup::reply2() };
                // Who it claims to be, were it uwarp.
                reply.private_data.extend([1, 0, 0xE0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
                peer.send(&reply.bytes())?;
                peer.expect_rtr()?;
                peer.send(&bytes)?;
                peer.finish();
                let answer = peer.answer()?;
                require!(answer.terminate()? == codes, "not {codes:?}: {answer:?}");
                Ok(())
            });
            let (report, _) = serve(victim, &script)?;
            // The Terminate is about a work request, whose completion tells of it.
            let mut event = codes.map_or("", crate::event_of);
            if codes.is_none() && report.sends == crate::FLUSHED {
                // It came before there was one: then an event tells of it.
                event = crate::event_of((0, 0, 0));
            }
            require!(
                report.recvs == crate::FLUSHED && report.changed.is_empty() && report.events == event,
                "{what}: {report:?}"
            );
            let completions = report.sends.split(',').count();
            require!(completions == 2, "{what}: two work requests were posted: {report:?}");
            victim.innocent(1)?;
        }
    }
    victim.tell("profile")
}
