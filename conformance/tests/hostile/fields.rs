//! Every field of every frame behind set-up, one at a time.

use std::time::Duration;

use uwarp_conformance::attacker::encode::{
    self, Codes, Frame, Marked, READ_REQUEST, ReadRequest, SEND, SEND_INVALIDATE, Setup, TERMINATE, Tagged,
    Untagged, WRITE, fpdu, fpdus, terminate,
};
use uwarp_conformance::attacker::peer::Peer;
use uwarp_conformance::attacker::victim::{Region, Victim};
use uwarp_conformance::{Failure, Outcome, require};

use crate::{Fate, meet, strike};

fn hit(victim: &mut Victim, bytes: &[u8], what: &str, fate: &Fate) -> Outcome {
    let peer = Peer::established(victim.port)?;
    strike(victim, peer, bytes, what, fate)
}

/// Every ULPDU length up to two headers, well framed; then lengths that lie.
pub fn fpdu_lengths(victim: &mut Victim) -> Outcome {
    let write = victim.region("write");
    let whole = Tagged::write(write.stag, write.at, 24).ulpdu();
    let send = Untagged::send(1, 24).ulpdu();
    let too_short = Fate::terminated((2, 0, 3));
    for len in 0..14 {
        hit(victim, &fpdu(&whole[..len]), &format!("a tagged ULPDU of {len} bytes"), &too_short)?;
    }
    for len in 0..18 {
        hit(victim, &fpdu(&send[..len]), &format!("an untagged ULPDU of {len} bytes"), &too_short)?;
    }
    for (len, changed) in [(14, ""), (15, "write:0-0"), (17, "write:0-2")] {
        let fate = Fate::harmless().changed(changed);
        hit(victim, &fpdu(&whole[..len]), &format!("a tagged ULPDU of {len} bytes"), &fate)?;
    }
    // A length that is too small ends in the wrong CRC; one that is too large eats what follows, or the end.
    for lie in [0, 1, 13, 14, 20, 37] {
        let bytes = Frame { length: Some(lie), ..Frame::default() }.bytes(&whole);
        let fate =
            if lie + 2 > 36 { Fate::harmless().changed("write:0-22") } else { Fate::terminated((2, 0, 2)) };
        // 37 has the same pad as 38, so that the CRC is right and the Write a byte shorter.
        hit(victim, &bytes, &format!("38 bytes said to be {lie}"), &fate)?;
    }
    for lie in [42, 100, 1460, 16_384, 32_768, 64_768, 65_535] {
        let mut peer = Peer::established(victim.port)?;
        peer.send(&Frame { length: Some(lie), ..Frame::default() }.bytes(&whole))?;
        peer.finish();
        strike(
            victim,
            peer,
            &[],
            &format!("38 bytes said to be {lie}, and the end"),
            &Fate::terminated((2, 0, 1)),
        )?;
    }
    for lie in [42, 1460, 65_535] {
        let mut bytes = Frame { length: Some(lie), ..Frame::default() }.bytes(&whole);
        bytes.resize(70_000, 0x11);
        hit(victim, &bytes, &format!("38 bytes said to be {lie}, and more"), &Fate::terminated((2, 0, 2)))?;
    }
    // The longest there is, over the end of the region and within it.
    let both = victim.region("both");
    let longest = Tagged::write(both.stag, both.at, 65_535 - 14).fpdu();
    hit(victim, &longest, "a ULPDU of 65535 bytes", &Fate::harmless().changed("both:0-65520"))?;
    let over = Tagged::write(both.stag, both.end() - 65_520, 65_535 - 14).fpdu();
    hit(victim, &over, "the same, a byte too far", &Fate::terminated((1, 1, 1)))
}

/// Pads that are not zero are covered by the CRC and not looked at; every bit of the CRC is.
pub fn fpdu_pads_and_crcs(victim: &mut Victim) -> Outcome {
    let write = victim.region("write");
    for (len, pad, changed) in
        [(9, &[1, 2, 3][..], "write:0-8"), (11, &[0xFF], "write:0-10"), (10, &[0, 7], "write:0-9")]
    {
        let ulpdu = Tagged::write(write.stag, write.at, len).ulpdu();
        let bytes = Frame { pad: Some(pad), ..Frame::default() }.bytes(&ulpdu);
        hit(victim, &bytes, &format!("pad {pad:?}"), &Fate::harmless().changed(changed))?;
    }
    let ulpdu = Tagged::write(write.stag, write.at, 24).ulpdu();
    for bit in 0..32 {
        let bytes = Frame { crc_flip: 1 << bit, ..Frame::default() }.bytes(&ulpdu);
        hit(victim, &bytes, &format!("bit {bit} of the CRC"), &Fate::terminated((2, 0, 2)))?;
    }
    let good = fpdu(&ulpdu);
    for at in 0..good.len() * 8 {
        // The length field is another test's: what it does depends on what follows.
        if at < 16 {
            continue;
        }
        let mut bytes = good.clone();
        bytes[at / 8] ^= 1 << (at % 8);
        hit(victim, &bytes, &format!("bit {at} of an FPDU"), &Fate::terminated((2, 0, 2)))?;
    }
    Ok(())
}

/// The first byte of the header, all 256 values. Reserved bits are not looked at (RFC 5041 section 4.1).
pub fn ddp_control(victim: &mut Victim) -> Outcome {
    let write = victim.region("write");
    for byte in 0..=255u8 {
        let (tagged, last, version) = (byte & 0x80 != 0, byte & 0x40 != 0, byte & 3);
        let (ulpdu, good) = if tagged {
            let segment = Tagged { ddp: byte, ..Tagged::write(write.stag, write.at, 8) };
            (segment.ulpdu(), Fate::harmless().changed("write:0-7"))
        } else {
            let segment = Untagged { ddp: byte, ..Untagged::send(1, 8) };
            let recvs = if last { "ok8,e5" } else { crate::FLUSHED };
            (segment.ulpdu(), Fate::harmless().changed("recv:0-7").recvs(recvs))
        };
        let fate = match (version, tagged) {
            (1, _) => good,
            (_, true) => Fate::terminated((1, 1, 4)),
            (_, false) => Fate::terminated((1, 2, 6)),
        };
        hit(victim, &fpdu(&ulpdu), &format!("DDP control {byte:#04x}"), &fate)?;
    }
    Ok(())
}

/// The second byte, all 256 values, in both kinds of segments. Reserved bits are not looked at (RFC 5040
/// section 4.1).
pub fn rdmap_control(victim: &mut Victim) -> Outcome {
    let write = victim.region("write");
    let unexpected: Codes = (0, 2, 6);
    for byte in 0..=255u8 {
        let (version, opcode) = (byte >> 6, byte & 0xF);
        let segment = Tagged { rdmap: byte, ..Tagged::write(write.stag, write.at, 8) };
        let fate = match (version, opcode) {
            (1, WRITE) => Fate::harmless().changed("write:0-7"),
            // A Read Response nobody asked for.
            (1, 2) => Fate::terminated((1, 1, 0)),
            (1, _) => Fate::terminated(unexpected),
            _ => Fate::terminated((0, 2, 5)),
        };
        hit(victim, &segment.fpdu(), &format!("RDMAP control {byte:#04x}, tagged"), &fate)?;
        let segment = Untagged { rdmap: byte, ..Untagged::send(1, 8) };
        let fate = match (version, opcode) {
            (1, SEND | 5) => Fate::harmless().changed("recv:0-7").recvs("ok8,e5"),
            // Immediate Data (RFC 7306) with no Write before it.
            (1, 8 | 9) => Fate::harmless().recvs("ok0,e5"),
            // Send with Invalidate of STag 0: the payload is placed before the end of the message is looked
            // at.
            (1, 4 | 6) => Fate::terminated((0, 1, 9)).changed("recv:0-7"),
            (1, _) => Fate::terminated(unexpected),
            _ => Fate::terminated((0, 2, 5)),
        };
        hit(victim, &segment.fpdu(), &format!("RDMAP control {byte:#04x}, untagged"), &fate)?;
    }
    Ok(())
}

/// The Invalidate STag's place in messages that invalidate nothing (RFC 5040 section 4.1): it is not looked
/// at, also where it names a region that could be invalidated.
pub fn invalidate_field_of_other_messages(victim: &mut Victim) -> Outcome {
    let write = victim.region("write");
    for invalidate in [1, u32::MAX, write.stag, victim.region("foreign").stag] {
        for opcode in [SEND, 5] {
            let send = Untagged { rdmap: 0x40 | opcode, invalidate, ..Untagged::send(1, 8) };
            let fate = Fate::harmless().changed("recv:0-7").recvs("ok8,e5");
            hit(victim, &send.fpdu(), &format!("opcode {opcode} with {invalidate:#x}"), &fate)?;
        }
        let read = victim.region("read");
        let request = ReadRequest::new(8, read.stag, read.at);
        let mut peer = Peer::established(victim.port)?;
        peer.send(&Untagged { invalidate, ..Untagged::read(1, &request) }.fpdu())?;
        let seen = peer.segment()?;
        require!(seen.opcode() == 2 && seen.payload().len() == 8, "not the response: {seen:?}");
        strike(victim, peer, &[], &format!("a Read Request with {invalidate:#x}"), &Fate::harmless())?;
    }
    // It was not invalidated.
    let bytes = Tagged::write(write.stag, write.at, 8).fpdu();
    hit(victim, &bytes, "a Write afterwards", &Fate::harmless().changed("write:0-7"))
}

/// STags: those next to a valid one, single bits of it, and those that stand for none.
pub fn stags(victim: &mut Victim) -> Outcome {
    let write = victim.region("write");
    let bits = (0..32).map(|bit| write.stag ^ 1 << bit);
    let others =
        [0, 1, u32::MAX, write.stag.wrapping_add(1), write.stag.wrapping_sub(1), write.stag.swap_bytes()];
    for stag in bits.chain(others) {
        let bytes = Tagged::write(stag, write.at, 8).fpdu();
        hit(victim, &bytes, &format!("STag {stag:#x}"), &Fate::terminated((1, 1, 0)))?;
        let read = Untagged::read(1, &ReadRequest::new(8, stag, write.at)).fpdu();
        hit(victim, &read, &format!("a Read of STag {stag:#x}"), &Fate::terminated((0, 1, 0)))?;
        hit_invalidating(victim, stag, &format!("an invalidation of STag {stag:#x}"))?;
    }
    // Known ones that are not for this use.
    for (name, codes) in [
        ("read", (0, 1, 2)),
        ("local", (0, 1, 2)),
        ("recv", (0, 1, 2)),
        ("foreign", (1, 1, 2)),
        ("dead", (1, 1, 0)),
    ] {
        let region = victim.region(name);
        let bytes = Tagged::write(region.stag, region.at, 8).fpdu();
        hit(victim, &bytes, &format!("a Write to {name}"), &Fate::terminated(codes))?;
    }
    for (name, codes) in [
        ("write", (0, 1, 2)),
        ("local", (0, 1, 2)),
        ("recv", (0, 1, 2)),
        ("foreign", (0, 1, 3)),
        ("dead", (0, 1, 0)),
    ] {
        let region = victim.region(name);
        let bytes = Untagged::read(1, &ReadRequest::new(8, region.stag, region.at)).fpdu();
        hit(victim, &bytes, &format!("a Read of {name}"), &Fate::terminated(codes))?;
    }
    // One code for each reason (RFC 5040 section 5.3).
    for name in ["local", "recv", "foreign", "dead"] {
        hit_invalidating(victim, victim.region(name).stag, &format!("an invalidation of {name}"))?;
    }
    // All of them are what they were.
    let bytes = fpdus([Tagged::write(write.stag, write.at, 8).ulpdu()]);
    hit(victim, &bytes, "the right STag", &Fate::harmless().changed("write:0-7"))
}

/// A Send that invalidates what it may not: its payload is placed before the end of the message is looked at.
fn hit_invalidating(victim: &mut Victim, stag: u32, what: &str) -> Outcome {
    let send = Untagged { rdmap: 0x40 | SEND_INVALIDATE, invalidate: stag, ..Untagged::send(1, 8) };
    hit(victim, &send.fpdu(), what, &Fate::terminated((0, 1, 9)).changed("recv:0-7"))
}

/// Several keys of one buffer (RFC 5042 section 6.3.6): each has the rights that it was given and works on
/// streams of its own protection domain only, whatever the others may.
pub fn stags_over_one_buffer(victim: &mut Victim) -> Outcome {
    let [write, readers, strangers] = ["write", "readers", "strangers"].map(|name| victim.region(name));
    let written = || Fate::harmless().changed("write:0-7");
    let put = |region: Region| Tagged::write(region.stag, region.at, 8).ulpdu();
    let get = |region: Region| Untagged::read(1, &ReadRequest::new(8, region.stag, region.at)).ulpdu();
    hit(victim, &fpdu(&put(write)), "a Write with the key to write", &written())?;
    for (what, ulpdu, codes) in [
        ("a Read with the key to write", get(write), (0, 1, 2)),
        ("a Write with the key to read", put(readers), (0, 1, 2)),
        ("a Write with the other domain's key", put(strangers), (1, 1, 2)),
        ("a Read with the other domain's key", get(strangers), (0, 1, 3)),
    ] {
        hit(victim, &fpdu(&ulpdu), what, &Fate::terminated(codes))?;
    }
    // One sees what the other wrote.
    let mut peer = Peer::established(victim.port)?;
    peer.send(&fpdus([put(write), get(readers)]))?;
    let seen = peer.segment()?;
    require!(seen.opcode() == 2 && seen.payload() == [0xEE; 8], "not what was written: {seen:?}");
    strike(victim, peer, &[], "a Read with the key to read", &written())?;

    victim.tell("profile stranger=1")?;
    hit(victim, &fpdu(&put(strangers)), "a Write in the other domain", &written())?;
    for (what, ulpdu, codes) in [
        ("a Write with the first domain's key", put(write), (1, 1, 2)),
        ("a Read with the first domain's key", get(readers), (0, 1, 3)),
    ] {
        hit(victim, &fpdu(&ulpdu), what, &Fate::terminated(codes))?;
    }
    // Taken back is only the one that was named. (No other stream is of that domain.)
    let invalidate =
        Untagged { rdmap: 0x40 | SEND_INVALIDATE, invalidate: strangers.stag, ..Untagged::send(1, 0) };
    let taken = Fate::harmless().recvs("ok0,e5");
    hit(victim, &invalidate.fpdu(), "an invalidation of the other domain's key", &taken)?;
    hit(victim, &fpdu(&put(strangers)), "a Write with the invalid key", &Fate::terminated((1, 1, 0)))?;
    victim.tell("profile")?;
    hit(victim, &fpdu(&put(write)), "a Write when another key is invalid", &written())?;
    victim.tell("renew")
}

/// Offsets around both edges of every kind of region, and around the end of all numbers.
pub fn tagged_offsets(victim: &mut Victim) -> Outcome {
    for (name, first, last, all) in [
        ("write", "write:0-0", "write:8191-8191", "write:0-8191"),
        ("odd", "odd:0-0", "odd:999-999", "odd:0-999"),
        ("edge", "edge:0-0", "edge:99-99", "edge:0-99"),
        ("start", "start:0-0", "start:99-99", "start:0-99"),
    ] {
        let region = victim.region(name);
        let len = region.len as usize;
        let mut tries = vec![
            (region.at, 1, Some(first)),
            (region.end() - 1, 1, Some(last)),
            (region.at, len, Some(all)),
            (region.end(), 0, Some("")),
            (0, 0, Some("")),
            (u64::MAX, 0, Some("")),
        ];
        let beyond = [
            (region.end(), 1),
            (region.end() - 1, 2),
            (region.at - 1, 1),
            (region.at - 1, 2),
            (region.at - 1, len),
            (region.at, len + 1),
            (region.at - 1, len + 2),
            (region.at - 4096, 4096),
            (region.end() + 4096, 1),
            (0, 1),
            (region.at ^ 1 << 63, 1),
            (region.at + (1 << 32), 1),
            (region.at.wrapping_sub(1 << 32), 1),
            (u64::MAX - 1, 1),
        ];
        tries.extend(beyond.map(|(to, len)| (to, len, None)));
        for (to, len, changed) in tries {
            let what = format!("{len} bytes to {name} at {:+}", to.wrapping_sub(region.at) as i64);
            let fate =
                changed.map_or(Fate::terminated((1, 1, 1)), |changed| Fate::harmless().changed(changed));
            hit(victim, &Tagged::write(region.stag, to, len).fpdu(), &what, &fate)?;
        }
        for (to, len) in [(u64::MAX, 1), (u64::MAX - 3, 8), (u64::MAX, 100), (u64::MAX - 98, 100)] {
            let what = format!("{len} bytes to {name} at {to:#x}");
            // One byte at the last offset has no end that is a number.
            hit(victim, &Tagged::write(region.stag, to, len).fpdu(), &what, &Fate::terminated((1, 1, 3)))?;
        }
    }
    let empty = victim.region("empty");
    for (to, len, fate) in [
        (empty.at, 0, Fate::harmless()),
        (empty.at, 1, Fate::terminated((1, 1, 1))),
        (empty.at - 1, 1, Fate::terminated((1, 1, 1))),
    ] {
        hit(victim, &Tagged::write(empty.stag, to, len).fpdu(), "a region of no bytes", &fate)?;
    }
    Ok(())
}

/// Queue numbers, for each message that belongs on one.
pub fn queue_numbers(victim: &mut Victim) -> Outcome {
    let read = victim.region("read");
    let request = ReadRequest::new(8, read.stag, read.at).bytes();
    let messages =
        [(SEND, 0, vec![0xEE; 8]), (READ_REQUEST, 1, request), (TERMINATE, 2, terminate(2, 0, 0, 0, &[]))];
    let numbers = (0..=4).chain((3..32).map(|bit| 1 << bit)).chain([0x7557_0000, u32::MAX]);
    for qn in numbers {
        for (opcode, right, payload) in &messages {
            if qn == *right {
                continue;
            }
            let bytes = Untagged::new(*opcode, qn, 1, payload.clone()).fpdu();
            let codes = if qn <= 3 { (0, 2, 6) } else { (1, 2, 1) };
            hit(victim, &bytes, &format!("opcode {opcode} on queue {qn:#x}"), &Fate::terminated(codes))?;
        }
    }
    Ok(())
}

/// Message sequence numbers that are not the next one, on each queue.
pub fn message_numbers(victim: &mut Victim) -> Outcome {
    let read = victim.region("read");
    let request = ReadRequest::new(8, read.stag, read.at);
    let range = Fate::terminated((1, 2, 3));
    for msn in [0, 2, 3, 1 << 16, 1 << 31, u32::MAX - 1, u32::MAX] {
        hit(victim, &Untagged::send(msn, 8).fpdu(), &format!("a Send with MSN {msn}"), &range)?;
        hit(victim, &Untagged::read(msn, &request).fpdu(), &format!("a Read with MSN {msn}"), &range)?;
        let end = Untagged { msn, ..Untagged::terminate(terminate(2, 0, 0, 0, &[])) };
        hit(victim, &end.fpdu(), &format!("a Terminate with MSN {msn}"), &range)?;
    }
    // Twice the same, and one left out.
    let once = Fate::terminated((1, 2, 3)).changed("recv:0-7").recvs("ok8,e5");
    for msn in [1, 3, 0] {
        let bytes = fpdus([Untagged::send(1, 8).ulpdu(), Untagged::send(msn, 8).ulpdu()]);
        hit(victim, &bytes, &format!("MSN {msn} after 1"), &once)?;
    }
    // The MSN changes within a message.
    let bytes = fpdus([Untagged::send(1, 8).more().ulpdu(), Untagged::send(2, 8).at(8).ulpdu()]);
    hit(victim, &bytes, "MSN 2 in the middle of 1", &Fate::terminated((1, 2, 3)).changed("recv:0-7"))
}

/// Message offsets: segments that overlap, leave gaps, or go on for ever.
pub fn message_offsets(victim: &mut Victim) -> Outcome {
    for mo in [1, 4, 64, 1 << 31, u32::MAX] {
        hit(
            victim,
            &Untagged::send(1, 8).at(mo).fpdu(),
            &format!("begins at {mo}"),
            &Fate::terminated((1, 2, 4)),
        )?;
    }
    for mo in [0, 1, 7, 9, 16, 1 << 31, u32::MAX] {
        let bytes = fpdus([Untagged::send(1, 8).more().ulpdu(), Untagged::send(1, 8).at(mo).ulpdu()]);
        let fate = Fate::terminated((1, 2, 4)).changed("recv:0-7");
        hit(victim, &bytes, &format!("goes on at {mo} instead of 8"), &fate)?;
    }
    // Empty segments that are not the last one change nothing, however many there are.
    let mut segments = vec![Untagged::send(1, 0).more().ulpdu(); 1000];
    segments.push(Untagged::send(1, 8).ulpdu());
    let fate = Fate::harmless().changed("recv:0-7").recvs("ok8,e5");
    hit(victim, &fpdus(segments), "a thousand empty segments first", &fate)?;
    let too_long = || Fate::terminated((1, 2, 5)).recvs("e1,e5");
    for len in [65, 1000, 10_000, 65_000] {
        hit(
            victim,
            &Untagged::send(1, len).fpdu(),
            &format!("{len} bytes for a receive of 64"),
            &too_long(),
        )?;
    }
    let bytes = fpdus([Untagged::send(1, 64).more().ulpdu(), Untagged::send(1, 1).at(64).ulpdu()]);
    hit(victim, &bytes, "a byte too many in the second segment", &too_long().changed("recv:0-63"))
}

/// Read Requests: every field.
pub fn read_requests(victim: &mut Victim) -> Outcome {
    let read = victim.region("read");
    let len = read.len as u32;
    let good = ReadRequest::new(8, read.stag, read.at);
    let bounds = (0, 1, 1);
    for (what, request, codes) in [
        ("a byte too many", ReadRequest { size: len + 1, ..good }, bounds),
        ("2 GiB", ReadRequest { size: 1 << 31, ..good }, bounds),
        ("4 GiB less a byte", ReadRequest { size: u32::MAX, ..good }, bounds),
        ("from before", ReadRequest { source: (read.stag, read.at - 1), ..good }, bounds),
        ("over the end", ReadRequest { source: (read.stag, read.end() - 7), ..good }, bounds),
        ("from behind", ReadRequest { source: (read.stag, read.end()), ..good }, bounds),
        ("from 0", ReadRequest { source: (read.stag, 0), ..good }, bounds),
        ("the source wraps", ReadRequest { source: (read.stag, u64::MAX - 3), ..good }, (0, 1, 4)),
        ("the sink wraps", ReadRequest { sink: (1, u64::MAX - 3), ..good }, (0, 1, 4)),
        ("both wrap", ReadRequest { sink: (1, u64::MAX), source: (read.stag, u64::MAX), ..good }, (0, 1, 4)),
    ] {
        hit(victim, &Untagged::read(1, &request).fpdu(), what, &Fate::terminated(codes))?;
    }
    for keep in [0, 1, 27] {
        let mut short = Untagged::read(1, &good);
        short.payload.truncate(keep);
        hit(victim, &short.fpdu(), &format!("{keep} bytes of a request"), &Fate::terminated((0, 2, 0xFF)))?;
    }
    for more in [1, 28, 1000] {
        let mut long = Untagged::read(1, &good);
        long.payload.resize(28 + more, 0);
        hit(victim, &long.fpdu(), &format!("{more} bytes behind a request"), &Fate::terminated((1, 2, 5)))?;
    }
    let pieces = Untagged::read(1, &good).more();
    hit(victim, &pieces.fpdu(), "a request in pieces", &Fate::terminated((0, 2, 0xFF)))?;
    // What is right is answered, to the sink that was named, and nowhere else.
    for (request, payload) in [
        (good, 8),
        (ReadRequest { size: 0, source: (0x1111, u64::MAX), ..good }, 0),
        (ReadRequest { size: len, ..good }, len as usize),
        (ReadRequest { sink: (u32::MAX, u64::MAX - 8), ..good }, 8),
    ] {
        let mut peer = Peer::established(victim.port)?;
        peer.send(&Untagged::read(1, &request).fpdu())?;
        let mut got = 0;
        while got < payload || payload == 0 {
            let seen = peer.segment()?;
            require!(seen.opcode() == 2 && seen.stag() == request.sink.0, "not the response: {seen:?}");
            require!(seen.payload().iter().all(|b| *b == 0xA5), "not what was to be read");
            got += seen.payload().len();
            if payload == 0 {
                break;
            }
        }
        require!(got == payload, "{got} bytes instead of {payload}");
        strike(victim, peer, &[], "a Read", &Fate::harmless())?;
    }
    Ok(())
}

/// Terminates: every layer and type, codes, header bits, quoted headers that lie.
pub fn terminates(victim: &mut Victim) -> Outcome {
    victim.tell("profile reads=1")?;
    let mut hit = |message: Vec<u8>, what: String| -> Outcome {
        let mut peer = Peer::established(victim.port)?;
        peer.sinks(1)?;
        peer.send(&Untagged::terminate(message).fpdu())?;
        let answer = peer.answer()?;
        require!(answer.seen.is_empty(), "{what}: a Terminate is answered: {:?}", answer.seen);
        let report = victim.report()?;
        // The Read fails, with whatever the codes stand for, or is flushed when they are not about it; that
        // is an event then, for nothing else tells of it. Nothing else happens.
        let failed = report.sends.starts_with('e') && !report.sends.contains(',');
        let event = if report.sends == "e5" { "1" } else { "" };
        require!(
            failed && report.recvs == crate::FLUSHED && report.events == event && report.changed.is_empty(),
            "{what}: {report:?}"
        );
        victim.innocent(1)
    };
    for layer in 0..16 {
        for etype in 0..16 {
            for code in (0..=9).chain([0xFF]) {
                let what = format!("Terminate {layer}, {etype}, {code}");
                hit(terminate(layer, etype, code, 0, &[]), what)?;
            }
        }
    }
    let request = Untagged::read(1, &ReadRequest::new(64, 1, 2)).ulpdu();
    let mut quoted = 46u16.to_be_bytes().to_vec();
    quoted.extend(&request);
    for control in 0..=7u8 {
        for keep in [0, 1, 2, 3, 15, 16, 17, 20, 29, 47, 48] {
            let what = format!("header control {control:#b}, {keep} bytes quoted");
            hit(terminate(0, 1, 2, control << 5, &quoted[..keep]), what.clone())?;
            // And where Linux siw puts the bits.
            hit(terminate(0, 1, 2, control, &quoted[..keep]), what)?;
        }
    }
    for (what, segment) in [
        (
            "a Read that was never made",
            Untagged { msn: 77, ..Untagged::read(1, &ReadRequest::new(1, 1, 1)) }.ulpdu(),
        ),
        ("a Send that was never made", Untagged::send(9, 28).ulpdu()),
        ("a response of the victim's", Tagged::new(2, 1, 1, 32).ulpdu()),
        ("garbage", vec![0xFF; 46]),
    ] {
        for length in [0u16, 13, 46, 65_535] {
            let quoted = [&length.to_be_bytes()[..], &segment].concat();
            hit(terminate(1, 1, 0, 0xE0, &quoted), format!("quotes {what}, length {length}"))?;
        }
    }
    for len in [0, 1, 2, 3] {
        hit(vec![0; len], format!("{len} bytes of Terminate"))?;
    }
    hit(vec![0xFF; 60_000], "60000 bytes of Terminate".into())?;
    victim.tell("profile")?;
    // Before the end of its message it is a Terminate already.
    let more = Untagged::terminate(terminate(2, 0, 0, 0, &[])).more();
    let mut peer = Peer::established(victim.port)?;
    peer.send(&more.fpdu())?;
    let answer = peer.answer()?;
    let report = victim.report()?;
    require!(answer.seen.is_empty() && report.events == "1", "{answer:?} {report:?}");
    Ok(())
}

/// A victim that asks for markers: right ones, wrong ones, none.
pub fn markers(victim: &mut Victim) -> Outcome {
    let both = victim.region("both");
    let rtr = Tagged::write(0, 0, 0).ulpdu();
    let connect = |victim: &Victim| -> Outcome<(Peer, Marked)> {
        let mut peer = Peer::set_up(victim.port, &Setup::request2())?;
        require!(peer.reply.as_ref().is_some_and(|r| r.flags & 0x80 != 0), "it does not ask for markers");
        let mut marked = Marked::default();
        peer.send(&marked.fpdu(&rtr, 0))?;
        Ok((peer, marked))
    };
    for (len, changed) in
        [(8, "both:0-7"), (512, "both:0-511"), (3000, "both:0-2999"), (60_000, "both:0-59999")]
    {
        let (peer, mut marked) = connect(victim)?;
        let bytes = marked.fpdu(&Tagged::write(both.stag, both.at, len).ulpdu(), 0);
        strike(
            victim,
            peer,
            &bytes,
            &format!("{len} bytes with markers"),
            &Fate::harmless().changed(changed),
        )?;
    }
    // Two reserved bits of a pointer are not looked at; every other value is wrong.
    for lie in [1, 2, 3, 4, 8, 512, 0x8000, 0xFFFC] {
        let (peer, mut marked) = connect(victim)?;
        let bytes = marked.fpdu(&Tagged::write(both.stag, both.at, 1000).ulpdu(), lie);
        let fate = if lie < 4 { Fate::harmless().changed("both:0-999") } else { Fate::terminated((2, 0, 3)) };
        strike(victim, peer, &bytes, &format!("pointers off by {lie}"), &fate)?;
    }
    // Without any: the first bytes are taken for a marker.
    let mut peer = Peer::set_up(victim.port, &Setup::request2())?;
    peer.send(&fpdu(&rtr))?;
    peer.finish();
    let answer = peer.answer()?;
    let report = victim.report()?;
    require!(answer.terminate()?.is_some_and(|c| c.0 == 2), "no MPA error: {answer:?}");
    require!(!report.established && report.changed.is_empty(), "{report:?}");
    // Lengths that wrap around markers, cut at every place.
    let whole = Marked::default().fpdu(&Tagged::write(both.stag, both.at, 600).ulpdu(), 0);
    for cut in (1..whole.len()).step_by(7) {
        let mut peer = Peer::set_up(victim.port, &Setup::request2())?;
        peer.send(&whole[..cut])?;
        peer.finish();
        peer.answer()?;
        let report = victim.report()?;
        require!(report.changed.is_empty() && report.recvs == crate::FLUSHED, "cut at {cut}: {report:?}");
    }
    victim.innocent(1)
}

/// An established connection on which neither end asked for CRCs.
fn peer_without_crc(victim: &Victim) -> Outcome<Peer> {
    let mut peer = Peer::set_up(victim.port, &Setup { flags: 0x10, ..Setup::request2() })?;
    require!(peer.reply.as_ref().is_some_and(|r| r.flags & 0x40 == 0), "it asks for CRCs");
    peer.send(&Frame { crc_flip: 77, ..Frame::default() }.bytes(&Tagged::write(0, 0, 0).ulpdu()))?;
    Ok(peer)
}

/// What the Terminate at the end of such a connection says; its CRC is not looked at.
fn terminate_without_crc(peer: &mut Peer) -> Outcome<Option<Codes>> {
    let mut stream = Vec::new();
    let _ = std::io::Read::read_to_end(&mut peer.tcp, &mut stream);
    let (seen, rest) = encode::unframe(&stream, false, false).map_err(Failure)?;
    require!(rest == 0, "{rest} bytes behind {seen:?}");
    Ok(seen.last().and_then(|segment| segment.codes()))
}

/// An FPDU with something else where its CRC would be.
fn odd(ulpdu: &[u8]) -> Vec<u8> {
    Frame { crc_flip: 0xDEAD_BEEF, ..Frame::default() }.bytes(ulpdu)
}

/// Both ends do without CRCs: what the field holds does not matter, and everything else is checked as ever.
pub fn without_crc(victim: &mut Victim) -> Outcome {
    let write = victim.region("write");
    let peer = peer_without_crc(victim)?;
    let bytes = odd(&Tagged::write(write.stag, write.at, 8).ulpdu());
    strike(victim, peer, &bytes, "any CRC", &Fate::harmless().changed("write:0-7"))?;
    for (to, codes) in [(write.end(), (1, 1, 1)), (write.at - 1, (1, 1, 1)), (u64::MAX, (1, 1, 3))] {
        let mut peer = peer_without_crc(victim)?;
        peer.send(&odd(&Tagged::write(write.stag, to, 8).ulpdu()))?;
        require!(terminate_without_crc(&mut peer)? == Some(codes), "{to:#x}");
        let report = victim.report()?;
        require!(report.changed.is_empty() && report.events == "3", "{report:?}");
    }
    // An attacker that asks for them gets them.
    let peer = Peer::established(victim.port)?;
    let bytes =
        Frame { crc_flip: 1, ..Frame::default() }.bytes(&Tagged::write(write.stag, write.at, 8).ulpdu());
    strike(victim, peer, &bytes, "a wrong CRC where they were asked for", &Fate::terminated((2, 0, 2)))
}

/// Large segments without CRCs are received straight into place: never beyond what the region and the receive
/// allow.
pub fn large_segments_without_crc(victim: &mut Victim) -> Outcome {
    victim.tell("profile recvlen=1024")?;
    let both = victim.region("both");
    // In pieces with pauses, so that the header is seen before the rest is there.
    let slowly = |victim: &mut Victim, bytes: &[u8]| -> Outcome<Peer> {
        let mut peer = peer_without_crc(victim)?;
        for part in bytes.chunks(9000) {
            // It may have been terminated by now.
            if peer.send(part).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(peer)
    };
    let write = |stag, to, len| odd(&Tagged::write(stag, to, len).ulpdu());
    let peer = slowly(victim, &write(both.stag, both.at, 40_000))?;
    meet(victim, peer, "as it should be", &Fate::harmless().changed("both:0-39999"))?;
    // One that ends in the middle of its payload: what came is placed, and the connection is over.
    let peer = slowly(victim, &write(both.stag, both.at, 40_000)[..30_000])?;
    peer.finish();
    let report = victim.report()?;
    require!(report.changed == "both:0-29983", "cut short: {report:?}");
    for (stag, to, len, codes) in [
        (both.stag, both.end() - 20_000, 20_001, (1, 1, 1)),
        (both.stag, both.end() - 16_384, 60_000, (1, 1, 1)),
        (both.stag, both.at - 1, 30_000, (1, 1, 1)),
        (both.stag ^ 4, both.at, 20_000, (1, 1, 0)),
        (victim.region("read").stag, victim.region("read").at, 20_000, (1, 1, 1)),
        (victim.region("foreign").stag, victim.region("foreign").at, 20_000, (1, 1, 2)),
    ] {
        let mut peer = slowly(victim, &write(stag, to, len))?;
        let seen = terminate_without_crc(&mut peer)?;
        let report = victim.report()?;
        require!(
            seen == Some(codes) && report.changed.is_empty(),
            "{len} bytes at {to:#x}: {seen:?} {report:?}"
        );
    }
    victim.tell("profile")
}
