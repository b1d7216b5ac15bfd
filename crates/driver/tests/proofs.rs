//! Proofs that come to a port of queue pair numbers which serves datagrams.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;
use uwarp_driver::{Nic, ProofObserver, UdQp};
use uwarp_proto::datagram::{self, Head};
use uwarp_rnic::{Cq, Pd};
use uwarp_wire::crc::crc32c;
use uwarp_wire::datagram::proof::Proof;

mod common;
use common::{Events, LIMIT, init};

#[derive(Default)]
struct Seen(Mutex<Vec<(SocketAddr, Proof)>>);

impl ProofObserver for Seen {
    fn proof(&self, from: SocketAddr, _: IpAddr, proof: &Proof) {
        self.0.lock().push((from, *proof));
    }
}

/// It was dropped, and its peer waited 50 ms for its next one.
#[test]
fn a_proof_that_comes_before_the_first_connected_queue_pair_of_a_port_is_kept_for_it() {
    let (nic, pd, events) = (Nic::open().unwrap(), Pd::new(), Arc::new(Events::default()));
    let cq = Cq::new(16, 0, None, events.clone());
    let datagrams = UdQp::create(&nic, init(&pd, &cq, &events)).unwrap();
    let to = (Ipv4Addr::LOCALHOST, u16::try_from(datagrams.qpn() >> 8).unwrap());
    let peer = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let from = peer.local_addr().unwrap();
    let source_qpn = u32::from(from.port()) << 8 | 1;
    let proof = Proof { source_qpn, destination_qpn: datagrams.qpn() ^ 1, token: 7, cookie: None };
    peer.send_to(&proof.to_bytes(), to).unwrap();
    // When its queue pair, which is in RESET, has dropped this, the proof was received. (Malformed datagrams
    // may come from others: a port has had other owners, whom their peers still ask.)
    let destination_qpn = datagrams.qpn();
    let (qkey, immediate, solicited, msn, incarnation) = (0, None, false, 1, 0);
    let head = Head { source_qpn, destination_qpn, qkey, immediate, solicited, msn, incarnation };
    let mut marker = head.to_bytes().to_vec();
    marker.extend_from_slice(&datagram::trailer(crc32c(&marker)));
    peer.send_to(&marker, to).unwrap();
    let limit = Instant::now() + LIMIT;
    while datagrams.look_at().2.state == 0 {
        assert!(Instant::now() < limit, "the port does not receive");
        std::thread::yield_now();
    }
    let seen = Arc::new(Seen::default());
    let observer: Weak<Seen> = Arc::downgrade(&seen);
    let port = nic.serve_proofs(datagrams.qpn(), observer).unwrap();
    assert_eq!(*seen.0.lock(), [(from, proof)]);
    drop(port);
}
