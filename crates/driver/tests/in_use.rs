//! Memory that is in use: what a program does with its own registered memory, or a second stream with the
//! same memory, never costs a connection. The bytes are then indeterminate, and that is all (RFC 5040 section
//! 5.5): each is an old one or a new one.
//!
//! `UWARP_STRESS_SECONDS` makes it longer.

#![allow(missing_docs)]
// Reason: the memory is written beside the streams that move it, which no reference may do.
#![allow(unsafe_code)]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::*;
use uwarp_driver::StreamParams;
use uwarp_proto::framing::Framing;
use uwarp_rnic::{SendOp, WcStatus};

const SIZES: [u32; 12] = [1, 7, 64, 1000, 4096, 8192, 16_384, 64 << 10, 70_001, 256 << 10, 1 << 20, 4 << 20];
/// Every byte of the source is one of these, of a sink one of the next, or one that it got.
const SOURCE: [u8; 2] = [0x11, 0x22];
const SINK: [u8; 2] = [0x44, 0x88];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Op {
    Write,
    Send,
    Read,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Changing {
    Source,
    Sink,
    Both,
}

fn seconds() -> f64 {
    std::env::var("UWARP_STRESS_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(0.02)
}

/// Writes one of two bytes to some place in every page of the memory, again and again, until told to stop.
fn change(addr: u64, len: usize, bytes: [u8; 2], stop: &AtomicBool) {
    let base = std::ptr::with_exposed_provenance_mut::<u8>(addr as usize);
    let mut round = 0usize;
    while !stop.load(Ordering::Relaxed) {
        // The last byte of the message too: programs wait for it to change, and set it back.
        let places = (0..len).step_by(512).map(|at| (at + round * 7 % 512).min(len - 1));
        for (i, at) in places.chain([len - 1]).enumerate() {
            // SAFETY: within the memory, which outlives the thread; nobody forms a reference to it meanwhile.
            unsafe { base.add(at).write_volatile(bytes[(i + round) % 2]) };
        }
        round += 1;
    }
}

/// Fills memory to which no reference exists.
fn fill(addr: u64, len: usize, bytes: [u8; 2]) {
    let base = std::ptr::with_exposed_provenance_mut::<u8>(addr as usize);
    for at in 0..len {
        // SAFETY: as in `change`.
        unsafe { base.add(at).write_volatile(bytes[at % 2]) };
    }
}

/// The first byte that is none of these.
fn stray(addr: u64, len: usize, allowed: &[u8]) -> Option<(usize, u8)> {
    let base = std::ptr::with_exposed_provenance::<u8>(addr as usize);
    // SAFETY: as in `change`.
    (0..len).map(|at| (at, unsafe { base.add(at).read_volatile() })).find(|(_, byte)| !allowed.contains(byte))
}

/// One stream's operations, until the time is over.
fn operate(end: &End, peer: &End, op: Op, len: u32, until: Instant) -> u64 {
    let (local, remote) = (end.sge(0, len), peer.sge(0, len));
    let (stag, to) = (remote.lkey, remote.addr);
    let mut count = 0;
    while count == 0 || Instant::now() < until {
        match op {
            Op::Write => end.send(SendOp::Write { stag, to }, &[local]),
            Op::Read => end.send(SendOp::Read { stag, to, invalidate_local: false }, &[local]),
            Op::Send => {
                peer.recv(&[remote]);
                end.send(SendOp::Send { invalidate: None }, &[local]);
                assert_eq!(peer.poll().status, WcStatus::Success, "{op:?} of {len} at the target");
            }
        }
        assert_eq!(end.poll().status, WcStatus::Success, "{op:?} of {len}");
        count += 1;
    }
    count
}

/// Connections that all move the same memory to the same place, while a thread changes it.
fn in_use(params: StreamParams, op: Op, changing: Changing, len: u32, streams: usize) -> u64 {
    const BESIDE: usize = 4096;
    let size = len as usize;
    let mut pairs = vec![connect(params, size + BESIDE)];
    while pairs.len() < streams {
        let (a, b) = (pairs[0].0.beside(), pairs[0].1.beside());
        join(&a, &b, params);
        pairs.push((a, b));
    }
    let (asks, asked) = &pairs[0];
    // A Read moves from the asked end to the asking one.
    let (source, sink) =
        if op == Op::Read { (asked.addr(), asks.addr()) } else { (asks.addr(), asked.addr()) };
    fill(source, size, SOURCE);
    fill(sink, size + BESIDE, SINK);
    let stop = AtomicBool::new(false);
    let until = Instant::now() + Duration::from_secs_f64(seconds());
    let mut count = 0;
    std::thread::scope(|s| {
        let stop = &stop;
        if changing != Changing::Sink {
            s.spawn(move || change(source, size, SOURCE, stop));
        }
        if changing != Changing::Source {
            s.spawn(move || change(sink, size, SINK, stop));
        }
        let operators: Vec<_> =
            pairs.iter().map(|(a, b)| s.spawn(move || operate(a, b, op, len, until))).collect();
        // Joined before the other threads must stop, whatever their results are.
        let results: Vec<_> = operators.into_iter().map(|o| o.join()).collect();
        stop.store(true, Ordering::Relaxed);
        count = results.into_iter().map(|r| r.unwrap_or_else(|p| std::panic::resume_unwind(p))).sum();
    });
    let what = format!("{op:?} of {len} B, {changing:?} changing, {streams} streams, {:?}", params.framing);
    let old_or_new = [SOURCE, SINK].concat();
    assert_eq!(stray(sink, size, &old_or_new), None, "{what}: a byte that is neither old nor new");
    assert_eq!(stray(sink + u64::from(len), BESIDE, &SINK), None, "{what}: beside it");
    for (a, b) in &pairs {
        assert_eq!((a.watch.ended(), b.watch.ended()), (None, None), "{what}");
        assert_eq!((a.events.count(), b.events.count()), (0, 0), "{what}");
    }
    count
}

fn all_of(op: Op) {
    let mut count = 0;
    for framing in [Framing::default(), Framing::PLAIN] {
        for uwarp_peer in [true, false] {
            let params = if uwarp_peer { uwarp() } else { StreamParams::default() };
            let params = StreamParams { framing, ..params };
            for changing in [Changing::Source, Changing::Sink, Changing::Both] {
                for len in SIZES {
                    for streams in [1, 2] {
                        count += in_use(params, op, changing, len, streams);
                    }
                }
            }
        }
    }
    println!("{op:?}: {count} operations");
}

#[test]
fn writes_of_memory_in_use_cost_no_connection() {
    all_of(Op::Write);
}

#[test]
fn sends_of_memory_in_use_cost_no_connection() {
    all_of(Op::Send);
}

#[test]
fn reads_of_memory_in_use_cost_no_connection() {
    all_of(Op::Read);
}
