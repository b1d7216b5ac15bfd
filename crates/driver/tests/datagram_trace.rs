//! What a trace shows of datagrams that reach a socket, and what reaches no queue pair.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use uwarp_driver::{Nic, UdQp};
use uwarp_proto::datagram::{self, Head};
use uwarp_rnic::qp::{QpModify, QpState};
use uwarp_rnic::{Cq, Pd, trace};
use uwarp_wire::crc::crc32c;

mod common;
use common::{Events, LIMIT, init};

const QKEY: u32 = 0x1111_1111;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn made(head: &Head, payload: &[u8]) -> Vec<u8> {
    let mut bytes = [&head.to_bytes()[..], payload].concat();
    let sum = crc32c(&bytes);
    bytes.extend_from_slice(&datagram::trailer(sum));
    bytes
}

#[test]
fn every_drop_is_traced_with_its_reason() {
    trace::start(|passing| {
        if let trace::Passing::Datagram(datagram) = passing {
            let qpn = datagram.qpn.map_or("no qp".to_owned(), |qpn| format!("qp {qpn:#x}"));
            LINES.lock().push(format!("{qpn} {datagram}"));
        }
    });
    let (nic, pd, events) = (Nic::open().unwrap(), Pd::new(), Arc::new(Events::default()));
    let cq = Cq::new(16, 0, None, events.clone());
    let qp = UdQp::create(&nic, init(&pd, &cq, &events)).unwrap();
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        qp.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() }).unwrap();
    }
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    let from = stranger.local_addr().unwrap();
    let to: SocketAddr = (Ipv4Addr::LOCALHOST, u16::try_from(qp.qpn() >> 8).unwrap()).into();
    let good = Head {
        source_qpn: u32::from(from.port()) << 8 | 1,
        destination_qpn: qp.qpn(),
        qkey: QKEY,
        immediate: None,
        solicited: false,
        msn: 1,
        incarnation: 9,
    };
    // Nobody has this one.
    let unknown = Head { destination_qpn: qp.qpn() ^ 0x80, ..good };
    let spoofed = Head { source_qpn: good.source_qpn ^ 0x100, ..good };
    for bytes in
        [b"no iWARP".to_vec(), made(&unknown, b"1"), made(&spoofed, b"22"), made(&good, b"long enough")]
    {
        stranger.send_to(&bytes, to).unwrap();
    }
    let end = Instant::now() + LIMIT;
    // Four drops, and the Error Message about the last.
    while LINES.lock().len() < 5 {
        assert!(Instant::now() < end, "{:?}", LINES.lock());
        nic.poll_cq(&cq, 1, |_| panic!("a completion"));
    }
    let (mine, its) = (qp.qpn(), good.source_qpn);
    let line = |head: &Head, length: usize| {
        let Head { source_qpn, destination_qpn, .. } = *head;
        let ends = format!("src={source_qpn:#x} dst={destination_qpn:#x}");
        format!("UD {ends} qkey=0x11111111 inc=0x9 Send L qn=0 msn=1 mo=0 len={length}")
    };
    let expected = [
        format!("no qp <- {from} 8 bytes, dropped: malformed (version 110)"),
        format!("no qp <- {from} {}, dropped: unknown", line(&unknown, 1)),
        format!("no qp <- {from} {}, dropped: spoofed", line(&spoofed, 2)),
        format!("qp {mine:#x} <- {from} {}, dropped: no receive", line(&good, 11)),
        format!("qp {mine:#x} -> {from} UD src={mine:#x} dst={its:#x} qkey=0x11111111 inc=0x9 Terminate L "),
    ];
    let lines = LINES.lock();
    assert_eq!(lines[..4], expected[..4]);
    assert!(lines[4].starts_with(&expected[4]) && lines[4].ends_with("(1/2/02)"), "{}", lines[4]);
    qp.destroy();
}
