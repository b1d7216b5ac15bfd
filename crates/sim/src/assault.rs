//! Arbitrary bytes into a queue pair, and what must hold for all of them. Shared by a property test and a
//! fuzz target.
//!
//! The first three bytes choose the stream's properties and how the rest arrives. The rest is the stream
//! itself, or a list of well-framed ULPDUs in which real STags replace small numbers, so that a fuzzer gets
//! past the CRC and the key checks.

use std::sync::Arc;

use uwarp_proto::framing::{Framing, Mpa, Step};
use uwarp_rnic::qp::{Disconnect, QpState, Rtr, StreamParams};
use uwarp_rnic::{Access, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge};
use uwarp_wire::rdmap::{Control, Opcode};
use uwarp_wire::{crc, ddp};

use crate::Side::B;
use crate::net::NetParams;
use crate::{Arena, EndConfig, World};

const GUARD: u8 = 0x5A;
/// Every buffer is at a multiple of this, and at most half as long.
const SLOT: usize = 4096;
const LEN: usize = 2000;
const WRITABLE: usize = 0;
const READABLE: usize = 1;
const BOTH: usize = 2;
const LOCAL: usize = 3;
const FOREIGN: usize = 4;
const RECEIVES: usize = 5;
const SINKS: usize = 8;
const SLOTS: usize = 10;

struct Victim {
    world: World,
    memory: Arena,
    /// STags that a ULPDU may name by a small number.
    stags: Vec<u32>,
    framing: Framing,
    /// Keeps the regions registered.
    _regions: Vec<Arc<Mr>>,
}

fn params(flags: u8) -> StreamParams {
    let bit = |n: u8| flags >> n & 1 == 1;
    StreamParams {
        initiator: !bit(7),
        framing: Framing::Mpa(Mpa { crc: bit(0), receive_markers: bit(1), ..Mpa::default() }),
        peer_is_uwarp: bit(2),
        placement_acks: bit(4) && bit(2),
        placement_reads: bit(4),
        rtr: if bit(7) { Rtr::Expect } else { Rtr::None },
        wait_first_frame: bit(7),
        ird: 2,
        ord: 1,
        ..StreamParams::default()
    }
}

impl Victim {
    fn new(flags: u8) -> Self {
        let mut world = World::new(0, [EndConfig::default(); 2], NetParams::default(), [None, None]);
        let memory = Arena::from_bytes(&vec![GUARD; SLOTS * SLOT]);
        let pd = world.end(B).pd.clone();
        let stranger = Pd::new();
        let register = |pd: &Arc<Pd>, slot: usize, access: Access| {
            let access = access | Access::LOCAL_WRITE | Access::ZERO_BASED;
            memory.register(pd, slot * SLOT, LEN, access)
        };
        let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
        let dead = register(&pd, LOCAL, read | write);
        dead.deregister();
        let own = memory.register(&pd, 0, memory.len(), Access::LOCAL_WRITE);
        let regions = vec![
            register(&pd, WRITABLE, write),
            register(&pd, READABLE, read),
            register(&pd, BOTH, read | write),
            register(&pd, LOCAL, Access::empty()),
            register(&stranger, FOREIGN, read | write),
            dead,
        ];
        let sge = |slot: usize, at: usize, length: u32| Sge {
            addr: memory.addr(slot * SLOT + at),
            length,
            lkey: own.stag(),
        };
        let end = world.end(B);
        end.init();
        end.attach(params(flags)).expect("a new queue pair");
        for n in 0..3 {
            // In two pieces, with a gap.
            let sges = [sge(RECEIVES + n, 0, 40), sge(RECEIVES + n, 100, 1900)];
            world.post_recv(B, &RecvWr { wr_id: n as u64, sges: &sges }).expect("there is room");
        }
        for n in 0..2 {
            let op = SendOp::Read { stag: 1, to: 0, invalidate_local: false };
            let sges = [sge(SINKS + n, 0, 40), sge(SINKS + n, 100, 1900)];
            let wr = SendWr { wr_id: n as u64, op, flags: SendFlags::SIGNALED, sges: &sges };
            world.post_send(B, &wr).expect("there is room");
        }
        let mut stags: Vec<u32> = regions.iter().map(|mr| mr.stag()).collect();
        let sent: Vec<u8> = world.pipe(B).tapped().iter().flat_map(|(_, bytes)| bytes.clone()).collect();
        // The sink of the first Read, if its request could already be sent.
        if let Some(sink) = sent.get(20..24).and_then(|b| b.first_chunk()) {
            stags.push(u32::from_be_bytes(*sink));
        }
        let mut regions = regions;
        regions.push(own);
        Self { world, memory, stags, framing: params(flags).framing, _regions: regions }
    }

    /// Replaces a small number by a real STag.
    fn name(&self, field: &mut [u8]) {
        if let [0, 0, 0, n] = *field
            && let Some(stag) = self.stags.get(usize::from(n))
        {
            field.copy_from_slice(&stag.to_be_bytes());
        }
    }

    /// A well-formed FPDU around a ULPDU with its STags filled in.
    fn frame(&self, ulpdu: &[u8], out: &mut Vec<u8>) {
        let mut ulpdu = ulpdu.to_vec();
        if ulpdu.len() >= 6 {
            self.name(&mut ulpdu[2..6]);
        }
        let is_request = ulpdu.get(1).is_some_and(|b| Control::parse(*b).opcode == Opcode::ReadRequest);
        let source = ddp::Untagged::LEN + 16;
        if is_request && ulpdu.len() >= source + 4 {
            self.name(&mut ulpdu[source..source + 4]);
        }
        let start = out.len();
        out.extend(u16::try_from(ulpdu.len()).unwrap_or(0).to_be_bytes());
        out.extend(ulpdu);
        while !(out.len() - start).is_multiple_of(4) {
            out.push(0);
        }
        let sum = crc::to_wire(crc::crc32c(&out[start..]));
        out.extend(sum);
    }

    fn allowed(&self, at: usize) -> bool {
        let (slot, offset) = (at / SLOT, at % SLOT);
        match slot {
            WRITABLE | BOTH => offset < LEN,
            READABLE | LOCAL | FOREIGN => false,
            _ => offset < 40 || (100..2000).contains(&offset),
        }
    }
}

/// Feeds `bytes` to a queue pair; the first three of them choose how.
///
/// # Panics
/// If a check fails.
pub fn check(bytes: &[u8]) {
    let Some(([flags, mode, piece], rest)) = bytes.split_first_chunk::<3>() else { return };
    let mut victim = Victim::new(*flags);
    let mut stream = Vec::new();
    if mode & 1 == 0 {
        stream.extend(rest);
    } else {
        let mut rest = rest;
        while let Some((len, tail)) = rest.split_first_chunk::<2>() {
            let len = usize::from(u16::from_le_bytes(*len) & 0x7FF).min(tail.len());
            victim.frame(&tail[..len], &mut stream);
            rest = &tail[len..];
        }
    }
    let piece = if *piece == 0 { usize::MAX } else { usize::from(*piece) * 7 };
    for part in stream.chunks(piece) {
        victim.world.inject(B, part);
        victim.world.settle_for(30_000);
    }
    if mode & 2 == 0 {
        victim.world.inject_end(B);
    } else {
        victim.world.disconnect(B);
    }
    victim.world.settle();
    hold(&mut victim);
}

/// What must hold at the end.
fn hold(victim: &mut Victim) {
    let memory = victim.memory.snapshot();
    let bad = (0..memory.len()).find(|at| memory[*at] != GUARD && !victim.allowed(*at));
    assert_eq!(bad, None, "memory without write access was written");

    let end = victim.world.end(B);
    if end.disconnected.is_empty() {
        // This end does not read past a Send without receive: it sees the end of the stream behind it only
        // when the program continues.
        assert!(end.core.stalled(), "the stream ended and the queue pair did not notice");
        victim.world.disconnect(B);
        victim.world.settle();
    }
    let end = victim.world.end(B);
    assert!(end.is_closed(), "the stream is not closed");
    assert_eq!(end.core.query().state, QpState::Err);
    assert_eq!(end.disconnected.len(), 1, "reports of the end: {:?}", end.disconnected);
    let sent_terminate = matches!(end.disconnected[..], [Disconnect::Sent(_)]);
    assert!(end.established <= 1 && end.events.kinds().len() <= 1);
    let recvs: Vec<u64> = end.recvs().iter().map(|wc| wc.wr_id).collect();
    let sends: Vec<u64> = end.sends().iter().map(|wc| wc.wr_id).collect();
    assert_eq!((recvs, sends), (vec![0, 1, 2], vec![0, 1]), "each completes once, in order");
    answers(victim, sent_terminate);
}

/// The victim sends whole FPDUs; a Terminate is the last one, and it is sent if and only if the queue pair
/// reports it.
fn answers(victim: &Victim, sent_terminate: bool) {
    let stream: Vec<u8> =
        victim.world.pipe(B).tapped().iter().flat_map(|(_, bytes)| bytes.iter().copied()).collect();
    let Framing::Mpa(mpa) = victim.framing;
    let mut receiver = Framing::Mpa(Mpa { receive_markers: false, ..mpa }).receiver();
    let mut scratch = Vec::new();
    let mut rest = &stream[..];
    let mut terminated = false;
    while !rest.is_empty() {
        let Ok(Step::Ulpdu { ulpdu, consumed }) = receiver.next(rest, &mut scratch) else {
            panic!("{} bytes at the end are no FPDU", rest.len());
        };
        rest = &rest[consumed..];
        assert!(!terminated, "something follows the Terminate");
        let (header, _) = ddp::Header::parse(ulpdu).expect("a good header");
        terminated = Control::parse(header.rsvdulp()).opcode == Opcode::Terminate;
    }
    assert_eq!(terminated, sent_terminate);
}
