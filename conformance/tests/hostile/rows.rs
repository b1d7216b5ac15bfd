//! One case of every kind of mistake, in each of the ways in which a stream can be carried.

use uwarp_conformance::Outcome;
use uwarp_conformance::attacker::encode::{
    AtomicRequest, Codes, Marked, ReadRequest, Setup, Tagged, Untagged, fpdus,
};
use uwarp_conformance::attacker::peer::Peer;
use uwarp_conformance::attacker::victim::Victim;

use crate::{Fate, strike};

struct Row {
    what: &'static str,
    ulpdus: Vec<Vec<u8>>,
    fate: Fate,
}

fn table(victim: &Victim) -> Vec<Row> {
    [messages(victim), headers(victim), reads(victim)].into_iter().flatten().collect()
}

fn one(what: &'static str, ulpdu: Vec<u8>, fate: Fate) -> Row {
    Row { what, ulpdus: vec![ulpdu], fate }
}

fn bad(what: &'static str, ulpdu: Vec<u8>, codes: Codes) -> Row {
    one(what, ulpdu, Fate::terminated(codes))
}

/// What is no mistake, and messages of several segments with a mistake in one of them.
fn messages(victim: &Victim) -> Vec<Row> {
    let write = victim.region("write");
    let both = victim.region("both");
    let odd = victim.region("odd");
    let pieces = |len: usize, piece: usize| -> Vec<Vec<u8>> {
        let count = len / piece;
        (0..count)
            .map(|n| {
                let segment = Tagged::write(both.stag, both.at + (n * piece) as u64, piece);
                if n + 1 < count { segment.more().ulpdu() } else { segment.ulpdu() }
            })
            .collect()
    };
    vec![
        one("a Write", Tagged::write(write.stag, write.at, 8).ulpdu(), Fate::harmless().changed("write:0-7")),
        one("a Send", Untagged::send(1, 64).ulpdu(), Fate::harmless().changed("recv:0-63").recvs("ok64,e5")),
        one(
            "a Write of 60000 bytes",
            Tagged::write(both.stag, both.at, 60_000).ulpdu(),
            Fate::harmless().changed("both:0-59999"),
        ),
        Row {
            what: "a Write of 32 segments of 20000 bytes",
            ulpdus: pieces(640_000, 20_000),
            fate: Fate::harmless().changed("both:0-639999"),
        },
        Row {
            what: "a Write of segments of a byte each",
            ulpdus: pieces(2000, 1),
            fate: Fate::harmless().changed("both:0-1999"),
        },
        Row {
            what: "Writes over each other",
            ulpdus: (0..100).map(|n| Tagged::write(odd.stag, odd.at + n, 900).ulpdu()).collect(),
            fate: Fate::harmless().changed("odd:0-998"),
        },
        Row {
            what: "a Write whose second segment leaves the region",
            ulpdus: vec![
                Tagged::write(odd.stag, odd.at, 1000).more().ulpdu(),
                Tagged::write(odd.stag, odd.end(), 1).ulpdu(),
            ],
            fate: Fate::terminated((1, 1, 1)).changed("odd:0-999"),
        },
        Row {
            // It waits for its receive, however long that takes (a stranger names no limit), until the
            // attacker hangs up.
            what: "a third Send, for two receives; then an error behind it, which nobody reads",
            ulpdus: vec![
                Untagged::send(1, 8).ulpdu(),
                Untagged::send(2, 8).ulpdu(),
                Untagged::send(3, 8).ulpdu(),
                Tagged::write(0x1111_1111, write.at, 8).ulpdu(),
            ],
            fate: Fate::harmless().changed("recv:0-1031").recvs("ok8,ok8"),
        },
        Row {
            what: "the second of three is wrong",
            ulpdus: vec![
                Tagged::write(write.stag, write.at, 8).ulpdu(),
                Tagged::write(write.stag ^ 1, write.at, 8).ulpdu(),
                Tagged::write(write.stag, write.at + 100, 8).ulpdu(),
            ],
            fate: Fate::terminated((1, 1, 0)).changed("write:0-7"),
        },
    ]
}

/// Segments whose header is wrong.
fn headers(victim: &Victim) -> Vec<Row> {
    let write = victim.region("write");
    let read = victim.region("read");
    let odd = victim.region("odd");
    let foreign = victim.region("foreign");
    vec![
        bad("an STag that never was", Tagged::write(0x1111_1111, write.at, 8).ulpdu(), (1, 1, 0)),
        bad("another protection domain", Tagged::write(foreign.stag, foreign.at, 8).ulpdu(), (1, 1, 2)),
        bad("no right to write", Tagged::write(read.stag, read.at, 8).ulpdu(), (0, 1, 2)),
        bad("a byte too far", Tagged::write(odd.stag, odd.at, 1001).ulpdu(), (1, 1, 1)),
        bad("40000 bytes too far", Tagged::write(odd.stag, odd.at, 41_000).ulpdu(), (1, 1, 1)),
        bad("an offset that wraps", Tagged::write(odd.stag, u64::MAX, 8).ulpdu(), (1, 1, 3)),
        bad(
            "DDP version 2, tagged",
            Tagged { ddp: 0xC2, ..Tagged::write(odd.stag, odd.at, 8) }.ulpdu(),
            (1, 1, 4),
        ),
        bad("DDP version 2, untagged", Untagged { ddp: 0x42, ..Untagged::send(1, 8) }.ulpdu(), (1, 2, 6)),
        bad("RDMAP version 0", Untagged { rdmap: 3, ..Untagged::send(1, 8) }.ulpdu(), (0, 2, 5)),
        bad("an opcode nobody knows", Untagged { rdmap: 0x4D, ..Untagged::send(1, 8) }.ulpdu(), (0, 2, 6)),
        bad("queue 4", Untagged { qn: 4, ..Untagged::send(1, 8) }.ulpdu(), (1, 2, 1)),
        bad("MSN 2", Untagged::send(2, 8).ulpdu(), (1, 2, 3)),
        bad("MO 4", Untagged::send(1, 8).at(4).ulpdu(), (1, 2, 4)),
        one("too long a Send", Untagged::send(1, 65).ulpdu(), Fate::terminated((1, 2, 5)).recvs("e1,e5")),
        one(
            "far too long a Send",
            Untagged::send(1, 50_000).ulpdu(),
            Fate::terminated((1, 2, 5)).recvs("e1,e5"),
        ),
    ]
}

/// Reads, their responses, invalidations, and what is too short for a header.
fn reads(victim: &Victim) -> Vec<Row> {
    let write = victim.region("write");
    let read = victim.region("read");
    let both = victim.region("both");
    let foreign = victim.region("foreign");
    let request = |size, stag, to| Untagged::read(1, &ReadRequest::new(size, stag, to)).ulpdu();
    let add = |stag, to| AtomicRequest::fetch_add(1, stag, to);
    let atomic = |request: AtomicRequest| Untagged::atomic(1, &request).ulpdu();
    let swap = AtomicRequest::cmp_swap(1, foreign.stag, foreign.at, 0, 1);
    vec![
        bad("a Read of nothing that is", request(8, 0x1111_1111, read.at), (0, 1, 0)),
        bad("a Read beyond the region", request(8193, read.stag, read.at), (0, 1, 1)),
        bad("a Read without the right", request(8, write.stag, write.at), (0, 1, 2)),
        bad("a Read of another domain's", request(8, foreign.stag, foreign.at), (0, 1, 3)),
        bad("a Read that wraps", request(8, read.stag, u64::MAX - 3), (0, 1, 4)),
        bad("a Read Response", Tagged::new(2, both.stag, both.at, 8).ulpdu(), (1, 1, 0)),
        bad("a Read Response of 50000 bytes", Tagged::new(2, both.stag, both.at, 50_000).ulpdu(), (1, 1, 0)),
        bad("an empty Read Response", Tagged::new(2, 0, 0, 0).ulpdu(), (0, 2, 6)),
        one(
            "an invalidation of nothing that is",
            Untagged { rdmap: 0x44, invalidate: 0x1111_1111, ..Untagged::send(1, 8) }.ulpdu(),
            Fate::terminated((0, 1, 9)).changed("recv:0-7"),
        ),
        one(
            "an invalidation of what has no remote rights",
            Untagged { rdmap: 0x44, invalidate: victim.region("recv").stag, ..Untagged::send(1, 8) }.ulpdu(),
            Fate::terminated((0, 1, 9)).changed("recv:0-7"),
        ),
        bad("an atomic operation without the right", atomic(add(both.stag, both.at)), (0, 1, 2)),
        bad("an atomic operation on nothing that is", atomic(add(0x1111_1111, both.at)), (0, 1, 0)),
        bad("an atomic operation on another domain's", atomic(swap), (0, 1, 3)),
        bad("a short Atomic Request", Untagged::new(10, 1, 1, vec![0; 51]).ulpdu(), (0, 2, 0xFF)),
        bad("an Atomic Response", Untagged::atomic_response(1, 0, 0).ulpdu(), (1, 2, 2)),
        bad("an empty ULPDU", vec![], (2, 0, 3)),
        bad("a ULPDU of 13 bytes", vec![0xC1; 13], (2, 0, 3)),
    ]
}

fn all(victim: &mut Victim, connect: fn(u16) -> Outcome<Peer>, piece: usize) -> Outcome {
    for row in table(victim) {
        let mut peer = connect(victim.port)?;
        let bytes = fpdus(&row.ulpdus);
        peer.send_in(&bytes, piece)?;
        strike(victim, peer, &[], row.what, &row.fate)?;
    }
    Ok(())
}

pub fn as_a_stranger(victim: &mut Victim) -> Outcome {
    all(victim, Peer::established, usize::MAX)?;
    all(victim, Peer::established, 5000)?;
    all(victim, Peer::established, 777)
}

/// The same where large segments are received straight into place.
pub fn posing_as_uwarp(victim: &mut Victim) -> Outcome {
    all(victim, Peer::uwarp, usize::MAX)?;
    all(victim, Peer::uwarp, 5000)?;
    all(victim, Peer::uwarp, 777)
}

/// The same where the program's thread moves the bytes and not the background thread.
pub fn against_a_program_that_polls(victim: &mut Victim) -> Outcome {
    all(victim, Peer::established, usize::MAX)?;
    all(victim, Peer::uwarp, 5000)
}

/// The same with markers.
pub fn with_markers(victim: &mut Victim) -> Outcome {
    for row in table(victim) {
        let mut peer = Peer::set_up(victim.port, &Setup::request2())?;
        let mut marked = Marked::default();
        let rtr = Tagged::write(0, 0, 0).ulpdu();
        let bytes: Vec<u8> =
            std::iter::once(&rtr).chain(&row.ulpdus).flat_map(|ulpdu| marked.fpdu(ulpdu, 0)).collect();
        peer.send_in(&bytes, 3000)?;
        strike(victim, peer, &[], row.what, &row.fate)?;
    }
    Ok(())
}
