//! Immediate data: after an RDMA Write (RFC 7306 section 6), and with a Send between two uwarp ends.

#[path = "regressions/duo.rs"]
#[allow(dead_code, reason = "shared with other tests")]
mod duo;

use uwarp_rnic::qp::{Rtr, StreamParams};
use uwarp_rnic::{SendFlags, SendOp, SendWr, VerbsError, Wc, WcFlags, WcOpcode, WcStatus};
use uwarp_sim::Side::{A, B};
use uwarp_wire::rdmap::{Control, Opcode};
use uwarp_wire::{crc, ddp};

use duo::{Duo, SEND, params};

const IMM: [u8; 4] = [0xDE, 0xAD, 0xBE, 0xEF];

fn write_imm(duo: &Duo, at: usize, imm: [u8; 4]) -> SendOp {
    match duo.write_op(A, at) {
        SendOp::Write { stag, to } => SendOp::WriteImmediate { stag, to, imm },
        other => other,
    }
}

/// Opcode, flags, length and immediate data.
fn seen(wc: &Wc) -> (WcOpcode, WcFlags, u32, [u8; 4]) {
    assert_eq!(wc.status, WcStatus::Success);
    (wc.opcode, wc.flags, wc.byte_len, wc.imm_or_inv.to_ne_bytes())
}

fn with_imm(byte_len: u32, imm: [u8; 4]) -> (WcOpcode, WcFlags, u32, [u8; 4]) {
    (WcOpcode::RecvRdmaWithImm, WcFlags::WITH_IMM, byte_len, imm)
}

#[test]
fn a_write_with_immediate_is_a_write_and_an_immediate() {
    let mut duo = Duo::new(params());
    duo.memory[0].write(0, &[7; 64]);
    duo.recv(B, 10, 4096, 64);
    let (op, sge) = (write_imm(&duo, 100, IMM), duo.sge(A, 0, 64));
    duo.queue(A, 1, op, sge);
    duo.world.settle();
    let lines = duo.sent(A);
    assert!(lines[0].starts_with("Write L") && lines[0].ends_with("len=64"), "{lines:?}");
    assert_eq!(lines[1], "Imm L qn=0 msn=1 mo=0 0xdeadbeef00000000");
    let recvs = duo.world.end(B).recvs();
    assert_eq!((recvs.len(), recvs[0].wr_id, seen(&recvs[0])), (1, 10, with_imm(64, IMM)));
    let sends = duo.world.end(A).sends();
    assert_eq!((sends.len(), sends[0].opcode, sends[0].byte_len), (1, WcOpcode::RdmaWrite, 64));
    assert_eq!(duo.memory[1].read(100, 64), [7; 64]);
    assert!(
        duo.memory[1].read(4096, 64).iter().all(|b| *b == duo.memory[1].read(8000, 1)[0]),
        "the receive's memory"
    );
}

/// Sends and Immediate Data share the numbering of queue 0, and each length is that of the Write directly
/// before.
#[test]
fn lengths_are_those_of_the_writes_before() {
    let mut duo = Duo::new(params());
    for id in 0..6 {
        duo.recv(B, id, 500_000, 64);
    }
    let (plain, small, sge) = (duo.write_op(A, 0), duo.sge(A, 0, 16), |len| duo.sge(A, 0, len));
    let (whole, none, short) = (sge(200_000), sge(0), sge(5));
    let op = |n| write_imm(&duo, 0, [n; 4]);
    let list = [
        (op(1), whole),
        (op(2), none),
        (SEND, small),
        (plain, whole),
        (op(3), short),
        (SendOp::SendImmediate { imm: IMM }, small),
    ];
    for (id, (op, sge)) in (0..).zip(list) {
        duo.queue(A, id, op, sge);
    }
    duo.world.settle();
    let found: Vec<_> = duo.world.end(B).recvs().iter().map(seen).collect();
    let send = (WcOpcode::Recv, WcFlags::empty(), 16, [0; 4]);
    let send_imm = (WcOpcode::Recv, WcFlags::WITH_IMM, 16, IMM);
    let expected = [with_imm(200_000, [1; 4]), with_imm(0, [2; 4]), send, with_imm(5, [3; 4]), send_imm];
    assert_eq!(found, expected);
    assert_eq!(duo.sends(A).len(), 6);
    let lines = duo.sent(A);
    assert!(lines.iter().any(|l| l == "Send L qn=0 msn=5 mo=0 imm=0xdeadbeef len=16"), "{lines:?}");
}

/// Solicited ones make an event, others do not.
#[test]
fn immediates_make_solicited_events() {
    let mut duo = Duo::new(params());
    let mut events = Vec::new();
    let flags = [SendFlags::empty(), SendFlags::SOLICITED];
    let ops = [write_imm(&duo, 0, IMM), SendOp::SendImmediate { imm: IMM }];
    for (op, flags) in ops.into_iter().flat_map(|op| flags.map(|flags| (op, flags))) {
        duo.recv(B, 1, 0, 64);
        duo.world.end(B).recv_cq.arm(true);
        let sges = [duo.sge(A, 0, 8)];
        duo.world.post_send(A, &SendWr { wr_id: 1, op, flags, sges: &sges }).unwrap();
        duo.world.settle();
        events.push(duo.world.end(B).events.completions());
    }
    assert_eq!(events, [0, 1, 1, 2]);
}

/// A stranger is not sent an operation that it may not know: it would end the stream.
#[test]
fn strangers_are_sent_none() {
    let mut duo = Duo::new(params().map(|p| StreamParams { peer_is_uwarp: false, ..p }));
    let sges = [duo.sge(A, 0, 8)];
    for op in [write_imm(&duo, 0, IMM), SendOp::SendImmediate { imm: IMM }] {
        let wr = SendWr { wr_id: 1, op, flags: SendFlags::SIGNALED, sges: &sges };
        let refused = duo.world.end(A).core.post_send(&wr);
        assert!(matches!(refused, Err(VerbsError::NotSupported(_))), "{refused:?}");
    }
    duo.queue(A, 2, SEND, sges[0]);
    duo.recv(B, 1, 0, 8);
    duo.world.settle();
    assert_eq!(duo.sends(A), [(2, WcStatus::Success)]);
}

/// Queued while the peer was assumed to be a uwarp end; its first frame shows that it is not (docs/adr/002).
#[test]
fn a_stranger_that_was_taken_for_uwarp_is_sent_none() {
    let [a, b] = duo::with_rtr(Rtr::SendWrite);
    let mut duo = Duo::new([StreamParams { peer_is_uwarp: false, ..a }, b]);
    let sge = duo.sge(B, 0, 8);
    duo.queue(B, 1, SendOp::SendImmediate { imm: IMM }, sge);
    duo.world.settle();
    assert_eq!(duo.sends(B), [(1, WcStatus::LocQpOpErr)]);
    assert!(!duo.sent(B).iter().any(|line| line.starts_with("Send")));
}

/// The written data is placed at once; the completion waits for a receive, and with acknowledgements so does
/// the writer's.
#[test]
fn an_immediate_waits_for_a_receive() {
    let mut duo = Duo::new(params().map(|p| StreamParams { placement_acks: true, ..p }));
    duo.memory[0].write(0, &[7; 32]);
    for (id, imm) in [(1, [1; 4]), (2, [2; 4])] {
        let (op, sge) = (write_imm(&duo, 0, imm), duo.sge(A, 0, 32));
        duo.queue(A, id, op, sge);
    }
    duo.world.settle();
    assert!(duo.world.end(B).core.stalled());
    assert_eq!((duo.memory[1].read(0, 32), duo.sends(A)), (vec![7; 32], vec![]));
    for (id, imm) in [(1, [1; 4]), (2, [2; 4])] {
        // Receives without memory are enough.
        duo.recv(B, id, 0, 0);
        duo.world.settle();
        let found: Vec<_> = duo.world.end(B).recvs().iter().map(seen).collect();
        assert_eq!(found, [with_imm(32, imm)]);
        assert_eq!(duo.sends(A), [(id, WcStatus::Success)]);
    }
}

/// If they are buffered while a Read is outstanding, each keeps the length of its Write, whatever is written
/// meanwhile.
#[test]
fn buffered_immediates_keep_their_lengths() {
    let mut duo = Duo::new(params());
    let (read, sink) = (duo.read_op(B, 0), duo.sge(B, 500_000, 10));
    // The Read's Response comes after all of it.
    for (id, (len, imm)) in (0..).zip([(100, [1; 4]), (50, [2; 4])]) {
        let (op, sge) = (write_imm(&duo, 0, imm), duo.sge(A, 0, len));
        duo.queue(A, id, op, sge);
    }
    let (plain, last) = (duo.write_op(A, 0), write_imm(&duo, 0, [3; 4]));
    let (seven, nine, send) = (duo.sge(A, 0, 7), duo.sge(A, 0, 9), duo.sge(A, 0, 1));
    duo.queue(A, 2, plain, seven);
    duo.queue(A, 3, SEND, send);
    duo.queue(A, 4, plain, nine);
    duo.queue(B, 9, read, sink);
    duo.world.settle();
    duo.queue(A, 5, last, seven);
    duo.world.settle();
    assert_eq!(duo.sends(B), [(9, WcStatus::Success)]);
    let mut found = Vec::new();
    for id in 0..4 {
        duo.recv(B, id, 1000, 1);
        duo.world.settle();
        found.extend(duo.world.end(B).recvs().iter().map(seen));
    }
    let send = (WcOpcode::Recv, WcFlags::empty(), 1, [0; 4]);
    assert_eq!(found, [with_imm(100, [1; 4]), with_imm(50, [2; 4]), send, with_imm(7, [3; 4])]);
}

/// A peer may send Immediate Data alone, or in the middle of a Write: then no Write ended directly before it.
#[test]
fn an_immediate_that_follows_no_write_has_no_length() {
    let fpdu = |ulpdu: &[u8]| {
        let mut out = u16::try_from(ulpdu.len()).unwrap().to_be_bytes().to_vec();
        out.extend(ulpdu);
        out.resize(out.len().next_multiple_of(4), 0);
        let sum = crc::to_wire(crc::crc32c(&out));
        out.extend(sum);
        out
    };
    let mut duo = Duo::new(params().map(|p| StreamParams { peer_is_uwarp: false, ..p }));
    let immediate = |msn: u32| {
        let rsvdulp = Control::new(Opcode::Immediate).to_byte();
        let header = ddp::Untagged { last: true, rsvdulp, rsvdulp32: 0, qn: 0, msn, mo: 0 };
        let mut ulpdu = header.to_bytes().to_vec();
        ulpdu.extend([1, 2, 3, 4, 0xFF, 0xFF, 0xFF, 0xFF]);
        fpdu(&ulpdu)
    };
    let write = |last: bool, at: u64| {
        let rsvdulp = Control::new(Opcode::Write).to_byte();
        let to = duo.memory[1].addr(0) + at;
        let mut ulpdu = ddp::Tagged { last, stag: duo.mr[1].stag(), to, rsvdulp }.to_bytes().to_vec();
        ulpdu.extend([7; 24]);
        fpdu(&ulpdu)
    };
    let bytes = [
        immediate(1),
        write(true, 0),
        immediate(2),
        immediate(3),
        write(false, 0),
        immediate(4),
        write(true, 24),
        immediate(5),
    ];
    for id in 0..5 {
        duo.recv(B, id, 4096, 8);
    }
    duo.world.inject(B, &bytes.concat());
    duo.world.settle();
    let found: Vec<_> = duo.world.end(B).recvs().iter().map(seen).collect();
    assert_eq!(found, [0, 24, 0, 0, 24].map(|len| with_imm(len, [1, 2, 3, 4])));
}
