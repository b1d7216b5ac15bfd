//! What a queue pair answers to a peer that breaks the rules: a scripted peer with its own encoder sends one
//! bad frame. The test compares the Terminate byte by byte, and also the asynchronous event, the completions
//! and the memory.
//!
//! The table of rows is in `rows`. The snapshot prints each row with the result, so that a reader can compare
//! it with RFC 5040 section 7, RFC 5041 section 7 and RFC 5044 section 8.

mod atomics;
mod encoder;
mod row;
mod rows;
mod victim;

use std::fmt::Write as _;

use uwarp_sim::Side::B;
use uwarp_wire::text::Segment;

use row::{Answer, Row};
use victim::{Outcome, Victim};

/// Runs a row with its bytes in pieces of at most `piece`.
fn run(row: &Row, piece: usize) -> (Victim, Vec<u8>, Outcome) {
    let mut victim = Victim::new((row.params)(), row.access);
    (row.before)(&mut victim);
    let script = (row.script)(&victim);
    for bytes in script.bytes.chunks(piece) {
        victim.world.inject(B, bytes);
        victim.world.settle_for(20_000);
    }
    if script.end {
        victim.world.inject_end(B);
    }
    // Long enough for a receive that never comes, shorter than draining takes.
    victim.world.settle_for(1_000_000_000);
    let outcome = victim.outcome();
    (victim, script.offending, outcome)
}

#[test]
fn every_error_is_answered_as_the_rfcs_say() {
    let mut text = String::new();
    for row in rows::all() {
        let (victim, offending, outcome) = run(&row, usize::MAX);
        let expected = match row.answer {
            Answer::Terminate(codes, quotes) => encoder::terminate(codes, quotes, &offending),
            Answer::Bytes(bytes) => bytes(&victim),
        };
        assert_eq!(hex(&outcome.answer), hex(&expected), "{}: answer", row.name);
        assert_eq!(outcome.events, row.events, "{}: asynchronous events", row.name);
        assert_eq!(outcome.sends, row.sends, "{}: completions of sends", row.name);
        assert_eq!(outcome.recvs, row.recvs, "{}: completions of receives", row.name);
        assert_eq!(outcome.written, row.written, "{}: memory written", row.name);
        text.push_str(&describe(&row, &victim, &offending, &outcome));
    }
    insta::assert_snapshot!("protocol_errors", text);
}

/// The same when the frames arrive byte by byte.
#[test]
fn errors_do_not_depend_on_how_the_bytes_arrive() {
    for row in rows::all().into_iter().filter(|row| !row.at_once) {
        let (.., whole) = run(&row, usize::MAX);
        let (.., single) = run(&row, 1);
        assert_eq!(codes_of(&whole), codes_of(&single), "{}", row.name);
        let rest = |o: &Outcome| (o.written.clone(), o.events.clone(), o.sends.clone(), o.recvs.clone());
        assert_eq!(rest(&whole), rest(&single), "{}", row.name);
    }
}

/// The answer without its STags, which differ from run to run.
fn codes_of(outcome: &Outcome) -> (usize, Option<Vec<u8>>) {
    (outcome.answer.len(), outcome.answer.get(20..24).map(<[u8]>::to_vec))
}

fn describe(row: &Row, victim: &Victim, offending: &[u8], outcome: &Outcome) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{}", row.name);
    let frame = match Segment::parse(offending) {
        Ok(segment) => segment.to_string(),
        Err(_) => hex(offending),
    };
    let _ = writeln!(out, "    frame     {frame}");
    let mut at = 0;
    while let Some(rest) = outcome.answer.get(at..).filter(|rest| rest.len() > 2) {
        let len = usize::from(u16::from_be_bytes([rest[0], rest[1]]));
        let Some(ulpdu) = rest.get(2..2 + len) else { break };
        let line = Segment::parse(ulpdu).map_or_else(|e| e.to_string(), |s| s.to_string());
        let _ = writeln!(out, "    answer    {line}");
        at += (2 + len).next_multiple_of(4) + 4;
    }
    for (what, list) in [("sends", &outcome.sends), ("receives", &outcome.recvs)] {
        let list: Vec<String> = list.iter().map(|(id, status)| format!("{id} {status:?}")).collect();
        let _ = writeln!(out, "    {what:9} {}", list.join(", "));
    }
    let _ = writeln!(out, "    event     {:?}", outcome.events);
    if !outcome.written.is_empty() {
        let _ = writeln!(out, "    written   {:?}", outcome.written);
    }
    let _ = writeln!(out, "    rule      {}", row.rule);
    for (name, stag) in [
        ("WRITABLE", victim.writable.stag()),
        ("READABLE", victim.readable.stag()),
        ("LOCAL", victim.local.stag()),
        ("ATOMIC", victim.atomic.stag()),
        ("FOREIGN", victim.foreign.stag()),
        ("DEAD", victim.dead),
        ("SINK", victim.sink),
    ] {
        out = out.replace(&format!("{stag:#x}"), name).replace(&hex(&stag.to_be_bytes()), name);
    }
    out.push('\n');
    out
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(" ")
}
