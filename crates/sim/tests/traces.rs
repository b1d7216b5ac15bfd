//! Golden traces: the wire in each operation, one line for each segment (see `uwarp_sim::tap`).

use std::sync::Arc;

use uwarp_proto::framing::{Framing, Mpa};
use uwarp_rnic::qp::{Rtr, StreamParams};
use uwarp_rnic::{Access, Mr, RecvWr, SendFlags, SendOp, SendWr, Sge, WcStatus};
use uwarp_sim::Side::{A, B};
use uwarp_sim::{Arena, EndConfig, NetParams, Side, World, tap};

const SIZE: usize = 1 << 18;

/// Two ends whose regions have offsets from zero, so that a trace is the same in each run.
struct Scene {
    world: World,
    memory: [Arena; 2],
    remote: [Arc<Mr>; 2],
    local: [Arc<Mr>; 2],
    params: [StreamParams; 2],
}

fn uwarp() -> [StreamParams; 2] {
    let a = StreamParams { peer_is_uwarp: true, rtr: Rtr::SendWrite, ..StreamParams::default() };
    [a, StreamParams { initiator: false, rtr: Rtr::Expect, wait_first_frame: true, ..a }]
}

fn strangers() -> [StreamParams; 2] {
    uwarp().map(|p| StreamParams { peer_is_uwarp: false, ..p })
}

impl Scene {
    fn new(params: [StreamParams; 2]) -> Self {
        let net = NetParams { delay: (20_000, 20_000), ..NetParams::default() };
        let mut world = World::new(1, [EndConfig::default(); 2], net, [None, None]);
        let memory = [Arena::new(SIZE), Arena::new(SIZE)];
        let pds = Side::BOTH.map(|side| world.end(side).pd.clone());
        let register = |access| {
            Side::BOTH.map(|side| memory[side.index()].register(&pds[side.index()], 0, SIZE, access))
        };
        let remote =
            register(Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::ZERO_BASED);
        let local = register(Access::LOCAL_WRITE);
        world.end(A).init();
        world.end(B).init();
        world.attach(params);
        Self { world, memory, remote, local, params }
    }

    fn sge(&self, side: Side, len: u32) -> Sge {
        let i = side.index();
        Sge { addr: self.memory[i].addr(0), length: len, lkey: self.local[i].stag() }
    }

    fn recv(&mut self, side: Side, len: u32) {
        let sge = self.sge(side, len);
        self.world.post_recv(side, &RecvWr { wr_id: 0, sges: &[sge] }).unwrap();
    }

    fn post(&mut self, side: Side, op: SendOp, len: u32) {
        self.post_with(side, op, len, SendFlags::SIGNALED);
    }

    fn post_with(&mut self, side: Side, op: SendOp, len: u32, flags: SendFlags) {
        let sge = self.sge(side, len);
        self.world.post_send(side, &SendWr { wr_id: 0, op, flags, sges: &[sge] }).unwrap();
    }

    /// Work requests in one list.
    fn post_list(&mut self, side: Side, ops: &[SendOp], len: u32) {
        let sge = self.sge(side, len);
        let (last, others) = ops.split_last().unwrap();
        for op in others {
            let wr = SendWr { wr_id: 0, op: *op, flags: SendFlags::SIGNALED, sges: &[sge] };
            self.world.end(side).core.post_send(&wr).unwrap();
        }
        self.post(side, *last, len);
    }

    fn write(&self, side: Side, to: u64) -> SendOp {
        SendOp::Write { stag: self.remote[side.peer().index()].stag(), to }
    }

    fn read(&self, side: Side, to: u64) -> SendOp {
        SendOp::Read { stag: self.remote[side.peer().index()].stag(), to, invalidate_local: false }
    }

    /// Runs to the end and prints the wire.
    fn trace(mut self) -> String {
        self.world.settle();
        let [a, b] = self.params.map(|params| {
            let Framing::Mpa(mpa) = params.framing;
            mpa
        });
        let lines = tap::lines(&self.world, a.crc, [a.send_markers, b.send_markers]);
        // The headers that a Terminate quotes are on a line of their own.
        lines.replace(" segment=", "\n        segment=")
    }
}

const SEND: SendOp = SendOp::Send { invalidate: None };

#[test]
fn send_and_answer() {
    let mut s = Scene::new(uwarp());
    s.recv(B, 64);
    s.recv(A, 64);
    s.post(A, SEND, 16);
    s.world.settle();
    s.post_with(B, SEND, 0, SendFlags::SOLICITED);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=#1 to=0x0 len=0
    0.000 A Send L qn=0 msn=1 mo=0 len=16
    0.020 B SendSE L qn=0 msn=1 mo=0 len=0
    "##);
}

#[test]
fn send_to_a_stranger_is_cut_to_the_path() {
    let mut s = Scene::new(strangers());
    s.recv(B, 4000);
    s.post(A, SEND, 4000);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=1 to=0x0 len=0
    0.000 A Send qn=0 msn=1 mo=0 len=1436
    0.000 A Send qn=0 msn=1 mo=1436 len=1436
    0.000 A Send L qn=0 msn=1 mo=2872 len=1128
    "##);
}

#[test]
fn send_with_invalidate() {
    let mut s = Scene::new(uwarp());
    s.recv(B, 64);
    let invalidate = Some(s.remote[1].stag());
    s.post(A, SendOp::Send { invalidate }, 16);
    s.world.settle();
    assert!(s.remote[1].enter().is_none());
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=#1 to=0x0 len=0
    0.000 A SendInv L qn=0 msn=1 mo=0 inv=#2 len=16
    "##);
}

#[test]
fn solicited_send_with_invalidate() {
    let mut s = Scene::new(strangers());
    s.recv(B, 64);
    let invalidate = Some(s.remote[1].stag());
    s.post_with(A, SendOp::Send { invalidate }, 16, SendFlags::SIGNALED | SendFlags::SOLICITED);
    s.world.settle();
    assert!(s.remote[1].enter().is_none());
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=1 to=0x0 len=0
    0.000 A SendSEInv L qn=0 msn=1 mo=0 inv=#1 len=16
    "##);
}

/// RFC 7306: a Write, followed by its Immediate Data on the queue of Sends. The second requests an event.
#[test]
fn write_with_immediate() {
    let mut s = Scene::new(uwarp());
    let imm = [0xDE, 0xAD, 0xBE, 0xEF];
    let op = SendOp::WriteImmediate { stag: s.remote[1].stag(), to: 0x100, imm };
    s.recv(B, 0);
    s.recv(B, 0);
    s.post(A, op, 64);
    s.post_with(A, op, 0, SendFlags::SIGNALED | SendFlags::SOLICITED);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=#1 to=0x0 len=0
    0.000 A Write L stag=#2 to=0x100 len=64
    0.000 A Imm L qn=0 msn=1 mo=0 0xdeadbeef00000000
    0.000 A Write L stag=#2 to=0x100 len=0
    0.000 A ImmSE L qn=0 msn=2 mo=0 0xdeadbeef00000000
    "##);
}

/// In no RFC: between uwarp ends, in a Send, in fields that are reserved in other Sends.
#[test]
fn send_with_immediate() {
    let mut s = Scene::new(uwarp());
    s.recv(B, 64);
    s.recv(B, 64);
    let op = SendOp::SendImmediate { imm: [0xDE, 0xAD, 0xBE, 0xEF] };
    s.post(A, op, 16);
    s.post_with(A, op, 0, SendFlags::SIGNALED | SendFlags::SOLICITED);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=#1 to=0x0 len=0
    0.000 A Send L qn=0 msn=1 mo=0 imm=0xdeadbeef len=16
    0.000 A SendSE L qn=0 msn=2 mo=0 imm=0xdeadbeef len=0
    "##);
}

/// Between uwarp ends a large Write begins with two empty segments; with them the receiver checks where the
/// rest begins and ends.
#[test]
fn write() {
    let mut s = Scene::new(uwarp());
    let (small, large) = (s.write(A, 0x100), s.write(A, 0x1000));
    s.post(A, small, 64);
    s.post(A, large, 100_000);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=#1 to=0x0 len=0
    0.000 A Write L stag=#2 to=0x100 len=64
    0.000 A Write stag=#2 to=0x1000 len=50000
    0.000 A Write L stag=#2 to=0xd350 len=50000
    "##);
}

#[test]
fn write_to_a_stranger() {
    let mut s = Scene::new(strangers());
    let write = s.write(A, 0x1000);
    s.post(A, write, 3000);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=1 to=0x0 len=0
    0.000 A Write stag=#1 to=0x1000 len=1440
    0.000 A Write stag=#1 to=0x15a0 len=1440
    0.000 A Write L stag=#1 to=0x1b40 len=120
    "##);
}

/// The second Read waits for the first: the read depth is one.
#[test]
fn reads_one_at_a_time() {
    let mut s = Scene::new(uwarp().map(|p| StreamParams { ird: 1, ord: 1, ..p }));
    let (first, second) = (s.read(A, 0x1000), s.read(A, 0x2000));
    s.post(A, first, 70_000);
    s.post(A, second, 0);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=#1 to=0x0 len=0
    0.000 A ReadReq L qn=1 msn=1 mo=0 sink=#2/0x0 src=#3/0x1000 size=70000
    0.020 B ReadResp stag=#2 to=0x0 len=35000
    0.020 B ReadResp L stag=#2 to=0x88b8 len=35000
    0.040 A ReadReq L qn=1 msn=2 mo=0 sink=#4/0x0 src=#3/0x2000 size=0
    0.060 B ReadResp L stag=#4 to=0x0 len=0
    "##);
}

/// A Read, and a fenced Send of its data.
#[test]
fn read_and_fenced_send() {
    let mut s = Scene::new(strangers());
    s.recv(B, 64);
    let read = s.read(A, 0);
    s.post(A, read, 64);
    s.post_with(A, SEND, 64, SendFlags::FENCE);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=1 to=0x0 len=0
    0.000 A ReadReq L qn=1 msn=1 mo=0 sink=#1/0x0 src=#2/0x0 size=64
    0.020 B ReadResp L stag=#1 to=0x0 len=64
    0.040 A Send L qn=0 msn=1 mo=0 len=64
    "##);
}

#[test]
fn ready_to_receive_by_read() {
    let [a, b] = strangers();
    let mut s = Scene::new([StreamParams { rtr: Rtr::SendRead, ..a }, b]);
    s.recv(A, 64);
    // The responder has work at once, but must wait.
    s.post(B, SEND, 16);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A ReadReq L qn=1 msn=1 mo=0 sink=1/0x0 src=1/0x0 size=0
    0.020 B ReadResp L stag=1 to=0x0 len=0
    0.020 B Send L qn=0 msn=1 mo=0 len=16
    "##);
}

#[test]
fn placement_is_acknowledged_once_for_many() {
    let mut s = Scene::new(uwarp().map(|p| StreamParams { placement_acks: true, ..p }));
    let write = s.write(A, 0);
    for _ in 0..3 {
        s.post(A, write, 8);
    }
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=#1 to=0x0 len=0
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.020 B Ack L qn=ack msn=1 mo=0 completed=4
    "##);
}

fn acknowledging() -> [StreamParams; 2] {
    uwarp().map(|p| StreamParams { placement_acks: true, ..p })
}

/// The first is acknowledged at once; then B is known to answer.
#[test]
fn acknowledgements_ride_on_answers() {
    let mut s = Scene::new(acknowledging());
    for _ in 0..2 {
        s.recv(B, 8);
        s.post(A, SEND, 8);
        s.world.settle_for(50_000);
        s.recv(A, 8);
        s.post(B, SEND, 8);
        s.world.settle_for(50_000);
    }
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=#1 to=0x0 len=0
    0.000 A Send L ackreq qn=0 msn=1 mo=0 len=8
    0.020 B Ack L qn=ack msn=1 mo=0 completed=2
    0.050 B Send L ackreq qn=0 msn=1 mo=0 len=8
    0.100 A Ack L qn=ack msn=1 mo=0 completed=1
    0.100 A Send L ackreq qn=0 msn=2 mo=0 len=8
    0.150 B Ack L qn=ack msn=2 mo=0 completed=3
    0.150 B Send L ackreq qn=0 msn=2 mo=0 len=8
    0.570 A Ack L qn=ack msn=2 mo=0 completed=2
    "##);
}

/// Each of the first eight requests an acknowledgement, then one in eight; and the last ones when nothing
/// follows.
#[test]
fn of_many_some_request_an_acknowledgement() {
    let mut s = Scene::new(acknowledging());
    let write = s.write(A, 0);
    s.post_list(A, &[write; 18], 8);
    s.world.settle_for(5_000);
    s.post_list(A, &[write; 2], 8);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=#1 to=0x0 len=0
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.000 A Write L stag=#2 to=0x0 len=8
    0.000 A Write L stag=#2 to=0x0 len=8
    0.000 A Write L stag=#2 to=0x0 len=8
    0.000 A Write L stag=#2 to=0x0 len=8
    0.000 A Write L stag=#2 to=0x0 len=8
    0.000 A Write L stag=#2 to=0x0 len=8
    0.000 A Write L stag=#2 to=0x0 len=8
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.000 A Write L stag=#2 to=0x0 len=8
    0.000 A Write L stag=#2 to=0x0 len=8
    0.005 A Write L stag=#2 to=0x0 len=8
    0.005 A Write L stag=#2 to=0x0 len=8
    0.020 B Ack L qn=ack msn=1 mo=0 completed=19
    0.290 A Ack L ackreq qn=ack msn=1 mo=0 completed=0
    0.310 B Ack L qn=ack msn=2 mo=0 completed=21
    "##);
}

/// Strangers, with completions that mean placement: one placement Read at a time.
fn with_placement_reads(ord: u16) -> [StreamParams; 2] {
    strangers().map(|p| StreamParams { placement_reads: true, ord, ..p })
}

#[test]
fn a_stranger_gets_one_placement_read_for_many() {
    let mut s = Scene::new(with_placement_reads(1));
    let write = s.write(A, 0);
    s.post_list(A, &[write; 3], 8);
    s.world.settle();
    assert_eq!(s.world.end(A).sends().len(), 3);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=1 to=0x0 len=0
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A ReadReq L qn=1 msn=1 mo=0 sink=1/0x0 src=1/0x0 size=0
    0.020 B ReadResp L stag=1 to=0x0 len=0
    "##);
}

/// With many to send it does not wait for the last: the second placement Read covers all that was sent since
/// the first.
#[test]
fn a_stranger_gets_placement_reads_in_between() {
    let mut s = Scene::new(with_placement_reads(4));
    let write = s.write(A, 0);
    s.post_list(A, &[write; 40], 8);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=1 to=0x0 len=0
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A ReadReq L qn=1 msn=1 mo=0 sink=1/0x0 src=1/0x0 size=0
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.020 B ReadResp L stag=1 to=0x0 len=0
    0.040 A ReadReq L qn=1 msn=2 mo=0 sink=1/0x0 src=1/0x0 size=0
    0.060 B ReadResp L stag=1 to=0x0 len=0
    "##);
}

/// The Response to a Read of the program shows the same, and its place of the read depth is not taken away.
#[test]
fn a_read_of_the_program_serves_as_placement_read() {
    let mut s = Scene::new(with_placement_reads(1));
    let (write, read) = (s.write(A, 0), s.read(A, 0));
    s.post_list(A, &[write, read, write], 8);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=1 to=0x0 len=0
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A ReadReq L qn=1 msn=1 mo=0 sink=#2/0x0 src=#1/0x0 size=8
    0.000 A Write L stag=#1 to=0x0 len=8
    0.020 B ReadResp L stag=#2 to=0x0 len=8
    0.040 A ReadReq L qn=1 msn=2 mo=0 sink=1/0x0 src=1/0x0 size=0
    0.060 B ReadResp L stag=1 to=0x0 len=0
    "##);
}

/// A program that reads nothing has a depth of 0; its peer accepts the one placement Read.
#[test]
fn a_stranger_gets_a_placement_read_without_read_depth() {
    let mut s = Scene::new(with_placement_reads(0));
    let write = s.write(A, 0);
    s.post(A, write, 8);
    s.post(A, write, 8);
    s.world.settle();
    assert_eq!(s.world.end(A).sends().len(), 2);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=1 to=0x0 len=0
    0.000 A Write L stag=#1 to=0x0 len=8
    0.000 A ReadReq L qn=1 msn=1 mo=0 sink=1/0x0 src=1/0x0 size=0
    0.000 A Write L stag=#1 to=0x0 len=8
    0.020 B ReadResp L stag=1 to=0x0 len=0
    0.040 A ReadReq L qn=1 msn=2 mo=0 sink=1/0x0 src=1/0x0 size=0
    0.060 B ReadResp L stag=1 to=0x0 len=0
    "##);
}

/// Messages that a stranger accepted complete; the one that it terminates the stream for fails.
#[test]
fn a_stranger_ends_the_stream_for_the_oldest_unanswered_one() {
    let mut s = Scene::new(with_placement_reads(1));
    let (good, bad) = (s.write(A, 0), s.write(A, SIZE as u64 - 4));
    s.post(A, good, 8);
    s.world.settle();
    s.post(A, bad, 8);
    s.post(A, SEND, 8);
    s.world.settle();
    let status: Vec<WcStatus> = s.world.end(A).sends().iter().map(|wc| wc.status).collect();
    assert_eq!(status, [WcStatus::Success, WcStatus::RemAccessErr, WcStatus::WrFlushErr]);
}

/// Between uwarp ends too, in one turn: good messages are acknowledged before the Terminate.
#[test]
fn good_messages_are_acknowledged_before_a_terminate() {
    let mut s = Scene::new(uwarp().map(|p| StreamParams { placement_acks: true, ..p }));
    let (good, bad) = (s.write(A, 0), s.write(A, SIZE as u64 - 4));
    s.post_list(A, &[good, bad, good], 8);
    s.world.settle();
    let status: Vec<WcStatus> = s.world.end(A).sends().iter().map(|wc| wc.status).collect();
    assert_eq!(status, [WcStatus::Success, WcStatus::RemAccessErr, WcStatus::WrFlushErr]);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=#1 to=0x0 len=0
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.000 A Write L ackreq stag=#2 to=0x3fffc len=8
    0.000 A Write L ackreq stag=#2 to=0x0 len=8
    0.020 B Ack L qn=ack msn=1 mo=0 completed=2
    0.020 B Terminate L qn=2 msn=1 mo=0 DDP: base or bounds violation (1/1/01)
            segment=22 [Write L ackreq stag=#2 to=0x3fffc]
    "##);
}

#[test]
fn terminate() {
    let mut s = Scene::new(uwarp());
    let write = s.write(A, SIZE as u64 - 4);
    s.post(A, write, 8);
    s.post(A, SEND, 8);
    s.world.settle();
    let status: Vec<WcStatus> = s.world.end(A).sends().iter().map(|wc| wc.status).collect();
    assert_eq!(status, [WcStatus::Success; 2], "the lower layer took them before the Terminate arrived");
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=#1 to=0x0 len=0
    0.000 A Write L stag=#2 to=0x3fffc len=8
    0.000 A Send L qn=0 msn=1 mo=0 len=8
    0.020 B Terminate L qn=2 msn=1 mo=0 DDP: base or bounds violation (1/1/01)
            segment=22 [Write L stag=#2 to=0x3fffc]
    "##);
}

#[test]
fn terminate_of_a_read() {
    let mut s = Scene::new(strangers());
    s.remote[1].deregister();
    let read = s.read(A, 0x40);
    s.post(A, read, 8);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=1 to=0x0 len=0
    0.000 A ReadReq L qn=1 msn=1 mo=0 sink=#1/0x0 src=#2/0x40 size=8
    0.020 B Terminate L qn=2 msn=1 mo=0 RDMAP: invalid STag (0/1/00)
            segment=46 [ReadReq L qn=1 msn=1 mo=0 sink=#1/0x0 src=#2/0x40 size=8]
    "##);
}

#[test]
fn markers() {
    let [a, b] = strangers();
    let [sends, takes] = [(true, false), (false, true)].map(|(send_markers, receive_markers)| {
        Framing::Mpa(Mpa { send_markers, receive_markers, ..Mpa::default() })
    });
    let [a, b] = [StreamParams { framing: sends, ..a }, StreamParams { framing: takes, ..b }];
    let mut s = Scene::new([a, b]);
    let write = s.write(A, 0);
    s.post(A, write, 3000);
    insta::assert_snapshot!(s.trace(), @r##"
    0.000 A Write L stag=1 to=0x0 len=0
    0.000 A Write stag=#1 to=0x0 len=1428
    0.000 A Write stag=#1 to=0x594 len=1428
    0.000 A Write L stag=#1 to=0xb28 len=144
    "##);
}
