//! Datagram queue pairs over sockets of this host.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Instant;

use uwarp_driver::{Channel, Nic, UdQp};
use uwarp_proto::datagram::{self, Head};
use uwarp_rnic::qp::{QpModify, QpState, UdSendWr};
use uwarp_rnic::{
    Access, Ah, Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, VerbsError, Wc, WcFlags, WcOpcode,
    WcStatus,
};
use uwarp_wire::crc::crc32c;

mod common;
use common::{Events, LIMIT, address, evented, init};

const QKEY: u32 = 0x1111_1111;
const SLOT: u32 = 4096 + 40;

struct End {
    nic: Arc<Nic>,
    pd: Arc<Pd>,
    qp: Arc<UdQp>,
    cq: Arc<Cq>,
    channel: Arc<Channel>,
    mr: Arc<Mr>,
    memory: Box<[u8]>,
}

impl End {
    fn new() -> Self {
        let nic = Nic::open().unwrap();
        let pd = Pd::new();
        let channel = Channel::new(nic.engine()).unwrap();
        let events = Arc::new(Events::default());
        let cq = evented(1024, 7, &channel, &events);
        let qp = UdQp::create(&nic, init(&pd, &cq, &events)).unwrap();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            qp.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() }).unwrap();
        }
        let mut memory = vec![0u8; 128 * SLOT as usize].into_boxed_slice();
        let addr = address(&mut memory);
        let mr = Mr::register(&pd, addr, memory.len() as u64, addr, Access::LOCAL_WRITE).unwrap();
        Self { nic, pd, qp, cq, channel, mr, memory }
    }

    fn sge(&self, slot: u32, length: u32) -> Sge {
        let addr = self.mr.range().0 + u64::from(slot * SLOT);
        Sge { addr, length, lkey: self.mr.stag() }
    }

    fn recv(&self, slots: std::ops::Range<u32>) {
        for slot in slots {
            let sges = [self.sge(slot, SLOT)];
            self.qp.post_recv(std::iter::once(RecvWr { wr_id: slot.into(), sges: &sges })).unwrap();
        }
    }

    fn ah(&self, ip: &str) -> Arc<Ah> {
        Ah::new(&self.pd, SocketAddr::new(ip.parse().unwrap(), 0), None)
    }

    fn send(&self, to: u32, ah: &Ah, slot: u32, length: u32) -> Result<(), VerbsError> {
        let sges = [self.sge(slot, length)];
        let op = SendOp::SendImmediate { imm: [1, 2, 3, 4] };
        let wr = SendWr { wr_id: 1000, op, flags: SendFlags::SIGNALED, sges: &sges };
        let wr = UdSendWr { wr, ah, remote_qpn: to, remote_qkey: QKEY, job_key: None };
        self.qp.post_send(std::iter::once(wr)).map_err(|(_, e)| e)
    }

    /// Polls until `count` completions came.
    fn poll(&self, count: usize) -> Vec<Wc> {
        let end = Instant::now() + LIMIT;
        let mut all = Vec::new();
        while all.len() < count {
            assert!(Instant::now() < end, "{} of {count} completions", all.len());
            self.nic.poll_cq(&self.cq, count - all.len(), |wc| all.push(wc));
        }
        all
    }
}

#[test]
fn messages_of_all_lengths_arrive_whole_over_both_families() {
    let (mut a, mut b) = (End::new(), End::new());
    for (i, byte) in a.memory.iter_mut().enumerate() {
        *byte = i as u8 ^ (i >> 8) as u8;
    }
    for ip in ["127.0.0.1", "::1"] {
        let ah = a.ah(ip);
        for length in [0, 1, 63, 64, 1000, 1472, 4095, 4096] {
            // Nothing is left of the message before.
            b.memory.fill(0xEE);
            b.recv(0..1);
            a.send(b.qp.qpn(), &ah, 3, length).unwrap();
            let sent = a.poll(1)[0];
            assert_eq!((sent.wr_id, sent.status, sent.opcode), (1000, WcStatus::Success, WcOpcode::Send));
            let wc = b.poll(1)[0];
            assert_eq!((wc.status, wc.byte_len, wc.src_qp), (WcStatus::Success, length + 40, a.qp.qpn()));
            assert_eq!(wc.flags, WcFlags::GRH | WcFlags::WITH_IMM);
            let n = length as usize;
            assert_eq!(b.memory[40..40 + n], a.memory[3 * SLOT as usize..][..n]);
            assert!(b.memory[40 + n..].iter().all(|byte| *byte == 0xEE), "and nothing behind it");
            let header = &b.memory[..40];
            match ip.parse().unwrap() {
                IpAddr::V4(v4) => assert_eq!(header[32..36], v4.octets()),
                IpAddr::V6(v6) => assert_eq!(header[8..24], v6.octets()),
            }
        }
    }
}

#[test]
fn a_queue_pair_hears_itself_and_others_of_its_port_do_not() {
    let (a, b) = (End::new(), End::new());
    assert_eq!(a.qp.qpn() >> 8, b.qp.qpn() >> 8);
    a.recv(0..1);
    b.recv(0..1);
    a.send(a.qp.qpn(), &a.ah("127.0.0.1"), 5, 8).unwrap();
    let both = a.poll(2);
    assert!(both.iter().any(|wc| wc.opcode == WcOpcode::Recv));
    a.send(b.qp.qpn(), &a.ah("127.0.0.1"), 5, 9).unwrap();
    assert_eq!(b.poll(1)[0].byte_len, 49);
}

#[test]
fn a_list_of_many_goes_out_in_order() {
    let (a, b) = (End::new(), End::new());
    let ah = a.ah("127.0.0.1");
    b.recv(0..100);
    let sges: Vec<[Sge; 1]> = (0..100).map(|slot| [a.sge(slot, slot)]).collect();
    let wrs = sges.iter().map(|sges| {
        let op = SendOp::Send { invalidate: None };
        let wr = SendWr { wr_id: 0, op, flags: SendFlags::empty(), sges };
        UdSendWr { wr, ah: &ah, remote_qpn: b.qp.qpn(), remote_qkey: QKEY, job_key: None }
    });
    a.qp.post_send(wrs).unwrap();
    let got = b.poll(100);
    for (i, wc) in got.iter().enumerate() {
        assert_eq!((wc.wr_id, wc.byte_len), (i as u64, i as u32 + 40));
    }
}

#[test]
fn a_program_that_sleeps_on_its_channel_is_woken_for_a_datagram() {
    let (a, b) = (End::new(), End::new());
    b.recv(0..1);
    b.cq.arm(false);
    let waits = std::thread::spawn({
        let channel = b.channel.clone();
        move || channel.get()
    });
    a.send(b.qp.qpn(), &a.ah("127.0.0.1"), 0, 8).unwrap();
    assert_eq!(waits.join().unwrap(), Ok(7));
    assert_eq!(b.poll(1).len(), 1);
}

/// What a stranger can send.
#[test]
fn bad_datagrams_are_dropped_and_good_ones_behind_them_arrive() {
    let (a, b) = (End::new(), End::new());
    b.recv(0..4);
    let qpn = b.qp.qpn();
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, (qpn >> 8) as u16));
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    let own = u32::from(stranger.local_addr().unwrap().port()) << 8;
    let good = Head {
        source_qpn: own | 1,
        destination_qpn: qpn,
        qkey: QKEY,
        immediate: None,
        solicited: false,
        msn: 1,
        incarnation: 0,
    };
    let made = |head: &Head, payload: &[u8]| {
        let mut bytes = [&head.to_bytes()[..], payload].concat();
        let sum = crc32c(&bytes);
        bytes.extend_from_slice(&datagram::trailer(sum));
        bytes
    };
    let mut flipped = made(&good, b"payload");
    flipped[45] ^= 1;
    let bad = [
        Vec::new(),
        vec![1; 10],
        flipped,
        made(&Head { qkey: 5, ..good }, b"another Q_Key"),
        made(&Head { destination_qpn: qpn ^ 0x80, ..good }, b"for nobody"),
        made(&Head { source_qpn: qpn, ..good }, b"from a port that is not the sender's"),
        made(&good, &vec![0; 5000]),
        vec![0xFF; 60_000],
    ];
    for datagram in &bad {
        stranger.send_to(datagram, to).unwrap();
    }
    stranger.send_to(&made(&good, b"good"), to).unwrap();
    a.send(qpn, &a.ah("127.0.0.1"), 0, 6).unwrap();
    let got = b.poll(2);
    assert_eq!(got.iter().map(|wc| wc.byte_len).collect::<Vec<_>>(), [44, 46]);
    assert_eq!(got[0].src_qp, own | 1);
    assert_eq!(b.qp.look_at().2.qkey, 1);
}

#[test]
fn what_comes_for_a_destroyed_queue_pair_is_dropped() {
    let (a, b) = (End::new(), End::new());
    let (qpn, ah) = (b.qp.qpn(), a.ah("127.0.0.1"));
    b.recv(0..1);
    b.qp.destroy();
    a.send(qpn, &ah, 0, 8).unwrap();
    assert_eq!(a.poll(1)[0].status, WcStatus::Success);
    let c = End::new();
    c.recv(0..1);
    a.send(c.qp.qpn(), &ah, 0, 9).unwrap();
    assert_eq!(c.poll(1)[0].byte_len, 49);
    assert!(b.cq.is_empty());
}

#[test]
fn a_destination_without_a_route_loses_the_message_only() {
    let (a, b) = (End::new(), End::new());
    b.recv(0..1);
    // Documentation's addresses, without a route of IPv6 on most machines; where there is one, the message is
    // lost behind it.
    a.send(b.qp.qpn(), &a.ah("2001:db8::1"), 0, 8).unwrap();
    a.send(b.qp.qpn(), &a.ah("127.0.0.1"), 0, 8).unwrap();
    assert!(a.poll(2).iter().all(|wc| wc.status == WcStatus::Success));
    assert_eq!(b.poll(1).len(), 1);
}

/// A group of this test alone: other processes listen on the same port. (Over loopback Linux routes multicast
/// of IPv4 only.)
fn group() -> IpAddr {
    let [high, low] = (std::process::id() as u16).to_be_bytes();
    IpAddr::from([239, 77, high, low])
}

/// Loopback's interface.
const LO: u32 = 1;

fn group_ah(end: &End) -> Arc<Ah> {
    let port = uwarp_driver::config::Config::get().multicast_port;
    Ah::group(&end.pd, SocketAddr::new(group(), port), Some(Ipv4Addr::LOCALHOST.into()))
}

#[test]
fn each_member_of_a_group_gets_a_copy_and_nobody_else_does() {
    let ends: Vec<End> = (0..4).map(|_| End::new()).collect();
    let [sender, a, b, outsider] = &ends[..] else { unreachable!() };
    for end in &ends {
        end.recv(0..2);
    }
    for member in [a, b] {
        member.qp.attach(group(), LO).unwrap();
        // Again: nothing changes.
        member.qp.attach(group(), LO).unwrap();
    }
    sender.send(0x00FF_FFFF, &group_ah(sender), 3, 10).unwrap();
    for member in [a, b] {
        let wc = member.poll(1)[0];
        assert_eq!((wc.status, wc.byte_len, wc.src_qp), (WcStatus::Success, 50, sender.qp.qpn()));
    }
    assert_eq!(sender.poll(1)[0].opcode, WcOpcode::Send);
    b.qp.detach(group()).unwrap();
    assert!(matches!(b.qp.detach(group()), Err(VerbsError::Invalid(_))));
    // A member that sends receives its own message.
    a.send(0x00FF_FFFF, &group_ah(a), 3, 11).unwrap();
    let mut lengths: Vec<u32> = a.poll(2).iter().map(|wc| wc.byte_len).collect();
    lengths.sort_unstable();
    assert_eq!(lengths, [0, 51]);
    for (end, receives) in [(a, 0), (b, 1), (outsider, 2), (sender, 2)] {
        assert_eq!(end.qp.look_at().1.receives_posted, receives);
    }
}
