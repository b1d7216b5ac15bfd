//! The FPDUs that a queue pair sends, however it takes the payload.

use uwarp_proto::framing::Framing;
use uwarp_rnic::qp::StreamParams;
use uwarp_rnic::{Access, SendFlags, SendOp, SendWr, Sge, WcStatus};
use uwarp_sim::Side::{A, B};
use uwarp_sim::{Arena, EndConfig, NetParams, Side, World};

const SIZE: usize = 1 << 17;

/// RFC 5044 section 4.1. Payload is copied or, above 8 KiB and without a CRC, referenced; the pad must be
/// zero in both cases.
#[test]
fn pads_are_zero() {
    for crc in [true, false] {
        let mut world = World::new(1, [EndConfig::default(); 2], NetParams::default(), [None, None]);
        let memory = Side::BOTH.map(|_| Arena::from_bytes(&vec![0xFF; SIZE]));
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let regions = world.init(&memory, access);
        let framing = if crc { Framing::default() } else { Framing::PLAIN };
        let params = StreamParams { framing, peer_is_uwarp: true, ..StreamParams::default() };
        world.attach([params, StreamParams { initiator: false, ..params }]);
        let lengths: Vec<u32> = (1..=8).chain(9_001..=9_008).chain(20_001..=20_004).collect();
        for (id, length) in (0..).zip(&lengths) {
            let sge =
                Sge { addr: memory[A.index()].addr(0), length: *length, lkey: regions[A.index()].stag() };
            let op = SendOp::Write { stag: regions[B.index()].stag(), to: memory[B.index()].addr(0) };
            let wr = SendWr { wr_id: id, op, flags: SendFlags::SIGNALED, sges: &[sge] };
            world.post_send(A, &wr).unwrap();
            world.settle();
        }
        assert!(world.end(A).sends().iter().all(|wc| wc.status == WcStatus::Success));

        let stream: Vec<u8> = world.pipe(A).tapped().iter().flat_map(|(_, bytes)| bytes.clone()).collect();
        let (mut at, mut padded) = (0, 0);
        while at < stream.len() {
            let end = at + 2 + usize::from(u16::from_be_bytes([stream[at], stream[at + 1]]));
            let crc_field = end.next_multiple_of(4);
            assert!(stream[end..crc_field].iter().all(|byte| *byte == 0), "the FPDU at {at}, CRC {crc}");
            padded += usize::from(end < crc_field);
            at = crc_field + 4;
        }
        assert!(padded >= lengths.len() / 2, "{padded} FPDUs have a pad");
    }
}
