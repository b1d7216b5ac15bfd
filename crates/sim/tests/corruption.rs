//! Flips every bit of every header of large messages, one in each run, while their payload is received
//! straight into place.
//!
//! Random workloads seldom hit a header of such a message.

use std::sync::Arc;

use uwarp_rnic::qp::{Disconnect, StreamParams};
use uwarp_rnic::{Access, Mr, RecvWr, SendFlags, SendOp, SendWr, Sge, WcStatus};
use uwarp_sim::Side::{A, B};
use uwarp_sim::{Arena, EndConfig, Fault, NetParams, Side, World};
use uwarp_wire::terminate::{Mpa, TerminateError};

const SIZE: usize = 1 << 19;
/// Offset of the message in B's memory, as target or source.
const AT: usize = 200_000;
const LEN: usize = 70_000;
const GUARD: u8 = 0x5A;

struct Run {
    world: World,
    memory: [Arena; 2],
    mr: [Arc<Mr>; 2],
}

impl Run {
    fn new(fault: [Option<Fault>; 2]) -> Self {
        // Pieces that end within large FPDUs, so that these are received directly.
        let net = NetParams { piece: 9_000, ..NetParams::default() };
        let mut world = World::new(7, [EndConfig::default(); 2], net, fault);
        let memory = [Arena::from_bytes(&vec![GUARD; SIZE]), Arena::from_bytes(&vec![GUARD; SIZE])];
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let mr = world.init(&memory, access);
        let params = StreamParams { peer_is_uwarp: true, ..StreamParams::default() };
        world.attach([params, StreamParams { initiator: false, ..params }]);
        Self { world, memory, mr }
    }

    fn sge(&self, side: Side, at: usize, len: usize) -> Sge {
        let i = side.index();
        Sge { addr: self.memory[i].addr(at), length: u32::try_from(len).unwrap(), lkey: self.mr[i].stag() }
    }

    /// Sends the message by `op` from A.
    fn post(&mut self, op: impl Fn(&Self) -> SendOp) {
        let sge = self.sge(B, AT, LEN);
        self.world.post_recv(B, &RecvWr { wr_id: 0, sges: &[sge] }).unwrap();
        let (op, sge) = (op(self), self.sge(A, AT, LEN));
        let wr = SendWr { wr_id: 0, op, flags: SendFlags::SIGNALED, sges: &[sge] };
        self.world.post_send(A, &wr).unwrap();
        self.world.settle();
    }
}

/// Positions in a stream of whole FPDUs where headers and trailers are: not the length fields.
fn headers(stream: &[u8]) -> Vec<usize> {
    let mut out = Vec::new();
    let mut at = 0;
    while at < stream.len() {
        let len = usize::from(u16::from_be_bytes([stream[at], stream[at + 1]]));
        let end = (at + 2 + len).next_multiple_of(4) + 4;
        out.extend(at + 2..(at + 20).min(end));
        out.extend(end - 4..end);
        at = end;
    }
    out
}

fn every_flip(from: Side, op: impl Fn(&Run) -> SendOp + Copy) {
    let mut quiet = Run::new([None, None]);
    quiet.post(op);
    assert_eq!(quiet.world.end(A).sends()[0].status, WcStatus::Success);
    let stream: Vec<u8> = quiet.world.pipe(from).tapped().iter().flat_map(|(_, b)| b.clone()).collect();
    let crc = TerminateError::Mpa(Mpa::Crc);
    let headers = headers(&stream);
    assert!(headers.len() >= 2 * 22, "{} bytes of headers and CRCs", headers.len());
    for at in headers {
        for bit in 0..8 {
            let fault = Some(Fault::Flip { at: at as u64, bit });
            let mut run = Run::new(if from == A { [fault, None] } else { [None, fault] });
            run.post(op);
            let what = format!("bit {bit} of byte {at}");
            assert_eq!(run.world.end(from.peer()).disconnected, [Disconnect::Sent(crc)], "{what}");
            assert_eq!(run.world.end(from).disconnected, [Disconnect::Terminated(crc)], "{what}");
            for memory in &run.memory {
                let bytes = memory.snapshot();
                let outside = bytes[..AT].iter().chain(&bytes[AT + LEN..]);
                assert!(outside.copied().all(|b| b == GUARD), "{what}: written elsewhere");
            }
            assert!(run.world.end(B).recvs().iter().all(|wc| wc.status != WcStatus::Success), "{what}");
        }
    }
}

fn fill(run: &Run, side: Side) {
    run.memory[side.index()].write(AT, &[0xC3; LEN]);
}

#[test]
fn headers_of_a_large_write() {
    every_flip(A, |run| {
        fill(run, A);
        SendOp::Write { stag: run.mr[1].stag(), to: run.memory[1].addr(AT) }
    });
}

#[test]
fn headers_of_a_large_send() {
    every_flip(A, |run| {
        fill(run, A);
        SendOp::Send { invalidate: None }
    });
}

#[test]
fn headers_of_a_large_read_response() {
    every_flip(B, |run| {
        fill(run, B);
        SendOp::Read { stag: run.mr[1].stag(), to: run.memory[1].addr(AT), invalidate_local: false }
    });
}
