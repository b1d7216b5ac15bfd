//! Streams between queue pairs that know each other by number and address.

mod common;

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use common::qp_and_cq;
use uwarp_cm::pairing::Path;
use uwarp_cm::{Cm, CmError, ConnParam, Event, EventChannel, EventKind, Id, Timeouts, bringup};
use uwarp_driver::{Nic, Qp};
use uwarp_proto::setup::{Depths, Initiator, InitiatorConfig, PeerData, Revision};
use uwarp_rnic::qp::{QpModify, QpState};
use uwarp_rnic::{Cq, RecvWr, SendFlags, SendOp, SendWr, VerbsError, Wc, WcStatus};
use uwarp_wire::introduction::Introduction;

/// Nothing that works takes nearly as long, on any machine.
const LIMIT: Duration = Duration::from_secs(60);

struct End {
    cm: Arc<Cm>,
    qp: Arc<Qp>,
    cq: Arc<Cq>,
}

/// A process has one: a port has one listener.
fn cm() -> Arc<Cm> {
    static CM: OnceLock<Arc<Cm>> = OnceLock::new();
    CM.get_or_init(|| Cm::new(&Nic::open().unwrap(), Timeouts::default())).clone()
}

impl End {
    fn new(cm: &Arc<Cm>) -> Self {
        let (qp, cq) = qp_and_cq();
        let end = Self { cm: Arc::clone(cm), qp, cq };
        end.init();
        end
    }

    fn init(&self) {
        self.qp.modify(&QpModify { state: Some(QpState::Init), ..QpModify::default() }).unwrap();
    }

    fn modify(&self, change: QpModify, path: Option<Path>) -> Result<(), CmError> {
        let actual = self.qp.query().state;
        bringup::modify(Some(&self.cm), &self.qp, actual, actual, change, path)
    }

    /// To RTR toward `peer`, with one receive.
    fn rtr(&self, local: &str, peer: (&str, u32)) {
        self.receive(0);
        let change = QpModify {
            state: Some(QpState::Rtr),
            dest_qp_num: Some(peer.1),
            rq_psn: Some(7),
            ..QpModify::default()
        };
        let to = |address: &str| SocketAddr::new(address.parse::<IpAddr>().unwrap(), 0);
        self.modify(change, Some(Path { local: to(local), peer: to(peer.0) })).unwrap();
    }

    /// With a timeout of about four seconds, and a retry (times four).
    fn rts(&self) {
        let change = QpModify {
            state: Some(QpState::Rts),
            sq_psn: Some(7),
            timeout: Some(20),
            retry_cnt: Some(1),
            ..QpModify::default()
        };
        self.modify(change, None).unwrap();
    }

    fn receive(&self, wr_id: u64) {
        self.qp.post_recv(std::iter::once(RecvWr { wr_id, sges: &[] })).map_err(|(_, e)| e).unwrap();
    }

    fn send(&self, wr_id: u64, imm: u32) {
        let op = SendOp::SendImmediate { imm: imm.to_be_bytes() };
        let wr = SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges: &[] };
        self.qp.post_send(std::iter::once(wr)).map_err(|(_, e)| e).unwrap();
    }

    fn poll(&self) -> Wc {
        let start = Instant::now();
        loop {
            let mut got = None;
            self.cm.nic().poll_cq(&self.cq, 1, |wc| got = Some(wc));
            if let Some(wc) = got {
                return wc;
            }
            assert!(start.elapsed() < LIMIT, "no completion");
            std::thread::yield_now();
        }
    }
}

/// Each sends the other a message.
fn talk(a: &End, b: &End) {
    a.send(1, 0xA);
    b.send(1, 0xB);
    for (end, imm) in [(a, 0xB_u32), (b, 0xA)] {
        let mut seen = [end.poll(), end.poll()];
        seen.sort_by_key(|wc| wc.wr_id);
        assert_eq!(seen.map(|wc| wc.status), [WcStatus::Success; 2], "{seen:?}");
        assert_eq!(seen[0].imm_or_inv.to_ne_bytes(), imm.to_be_bytes());
    }
}

#[test]
fn each_order_of_the_ends_and_of_their_calls_makes_a_stream() {
    let cm = cm();
    for (left, right) in [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.1"), ("::1", "::1")] {
        for swapped in [false, true] {
            let (a, b) = (End::new(&cm), End::new(&cm));
            // The larger number connects, so the first of these waits as a listener or as a connector.
            let (first, second) = if swapped { (&b, &a) } else { (&a, &b) };
            first.rtr(left, (right, second.qp.qpn()));
            first.rts();
            std::thread::sleep(Duration::from_millis(if swapped { 0 } else { 30 }));
            second.rtr(right, (left, first.qp.qpn()));
            second.rts();
            talk(first, second);
        }
    }
}

#[test]
fn a_queue_pair_is_its_own_peer() {
    let end = End::new(&cm());
    end.rtr("127.0.0.1", ("127.0.0.1", end.qp.qpn()));
    end.rts();
    end.send(1, 5);
    let mut seen = [end.poll(), end.poll()];
    seen.sort_by_key(|wc| wc.wr_id);
    assert_eq!(seen.map(|wc| (wc.wr_id, wc.status)), [(0, WcStatus::Success), (1, WcStatus::Success)]);
    assert_eq!(seen[0].imm_or_inv.to_ne_bytes(), 5_u32.to_be_bytes());
}

#[test]
fn hundreds_at_once() {
    let cm = cm();
    let pairs: Vec<(End, End)> = (0..300).map(|_| (End::new(&cm), End::new(&cm))).collect();
    for (a, b) in &pairs {
        a.rtr("127.0.0.1", ("127.0.0.1", b.qp.qpn()));
        a.rts();
    }
    for (a, b) in pairs.iter().rev() {
        b.rtr("127.0.0.1", ("127.0.0.1", a.qp.qpn()));
        b.rts();
    }
    for (a, b) in &pairs {
        talk(a, b);
    }
}

/// Seconds late.
#[test]
fn an_end_that_is_late_finds_the_other_one_waiting() {
    let cm = cm();
    let (a, b) = (End::new(&cm), End::new(&cm));
    for (early, late) in [(&a, &b), (&b, &a)] {
        early.rtr("127.0.0.1", ("127.0.0.1", late.qp.qpn()));
        early.rts();
        early.send(1, 0xA);
        std::thread::sleep(Duration::from_millis(1500));
        late.rtr("127.0.0.1", ("127.0.0.1", early.qp.qpn()));
        assert_eq!(
            (early.poll().status, late.poll().imm_or_inv.to_ne_bytes()),
            (WcStatus::Success, 0xA_u32.to_be_bytes())
        );
        for end in [early, late] {
            end.modify(QpModify { state: Some(QpState::Reset), ..QpModify::default() }, None).unwrap();
            end.init();
        }
    }
}

#[test]
fn after_reset_the_same_two_are_joined_again() {
    let cm = cm();
    let (a, b) = (End::new(&cm), End::new(&cm));
    for _ in 0..20 {
        for (end, peer) in [(&a, &b), (&b, &a)] {
            end.rtr("127.0.0.1", ("127.0.0.1", peer.qp.qpn()));
            end.rts();
        }
        talk(&a, &b);
        for end in [&a, &b] {
            end.modify(QpModify { state: Some(QpState::Reset), ..QpModify::default() }, None).unwrap();
            end.init();
        }
    }
}

#[test]
fn a_peer_that_never_comes_fails_the_work_request() {
    let cm = cm();
    let (a, b) = (End::new(&cm), End::new(&cm));
    for (end, peer) in [(&a, &b), (&b, &a)] {
        end.rtr("127.0.0.1", ("127.0.0.1", peer.qp.qpn() ^ 1 << 6));
        let change = QpModify {
            state: Some(QpState::Rts),
            timeout: Some(1),
            retry_cnt: Some(0),
            ..QpModify::default()
        };
        end.modify(change, None).unwrap();
        end.send(1, 0);
        assert_eq!(end.poll().status, WcStatus::RetryExcErr);
        assert_eq!(end.qp.query().state, QpState::Err);
    }
}

/// Requests that may wait for one queue pair: `MOST_EARLY_EACH` of crates/cm/src/pairing.rs.
const MOST_EARLY: usize = 4;

/// Strangers at the port: one says nothing, one is no queue pair, one lies about its number.
#[test]
fn strangers_cost_nobody_a_stream() {
    let cm = cm();
    let (a, b) = (End::new(&cm), End::new(&cm));
    let (low, high) = if a.qp.qpn() < b.qp.qpn() { (&a, &b) } else { (&b, &a) };
    low.rtr("127.0.0.1", ("127.0.0.2", high.qp.qpn()));
    let port = (low.qp.qpn() >> 8) as u16;
    let connect = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let _silent: Vec<TcpStream> = (0..50).map(|_| connect()).collect();
    let mut noisy = connect();
    noisy.write_all(b"GET / HTTP/1.0\r\n\r\n0123456789").unwrap();
    let lie = Introduction {
        source_qpn: high.qp.qpn(),
        destination_qpn: low.qp.qpn(),
        rq_psn: 7,
        sq_psn: None,
        incarnation: 1,
    };
    // From another address than the peer's; in an MPA request of revision 1 (RFC 5044 section 7.1.1).
    let mut liars: Vec<TcpStream> = (0..10)
        .map(|_| {
            let mut liar = connect();
            let mut request = b"MPA ID Req Frame\0\x01".to_vec();
            request.extend_from_slice(&(Introduction::LEN as u16).to_be_bytes());
            request.extend_from_slice(&lie.to_bytes());
            liar.write_all(&request).unwrap();
            liar
        })
        .collect();
    // All strangers have been seen when of the liars, who came last, all but the few are gone that may wait.
    // Nobody is told anything.
    noisy.set_read_timeout(Some(LIMIT)).unwrap();
    assert!(matches!(noisy.read(&mut [0; 64]), Ok(0) | Err(_)));
    let start = Instant::now();
    liars.iter().for_each(|liar| liar.set_nonblocking(true).unwrap());
    while liars.len() > MOST_EARLY {
        liars.retain_mut(|liar| match liar.read(&mut [0; 64]) {
            Ok(len) => {
                assert_eq!(len, 0, "an answer to a liar");
                false
            }
            Err(error) => error.kind() == std::io::ErrorKind::WouldBlock,
        });
        assert!(start.elapsed() < LIMIT, "{} liars wait", liars.len());
        std::thread::sleep(Duration::from_millis(1));
    }
    high.rtr("127.0.0.2", ("127.0.0.1", low.qp.qpn()));
    low.rts();
    high.rts();
    talk(low, high);
}

/// A request as queue pair `from` makes it, by hand.
fn request(from: &End, to: &End) -> TcpStream {
    let introduction = Introduction {
        source_qpn: from.qp.qpn(),
        destination_qpn: to.qp.qpn(),
        rq_psn: 7,
        sq_psn: None,
        incarnation: 2,
    };
    let config = InitiatorConfig {
        revision: Revision::Two,
        crc: true,
        markers: false,
        depths: Depths::negotiated(4, 4),
        max_ird: 4,
        peer: Some(PeerData::new()),
        peer_in_request: false,
    };
    let mut initiator = Initiator::new(config, &introduction.to_bytes()).unwrap();
    let port = (to.qp.qpn() >> 8) as u16;
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    while let Some(bytes) = initiator.poll_transmit() {
        stream.write_all(&bytes).unwrap();
    }
    stream
}

/// The smaller number listens.
fn two(cm: &Arc<Cm>) -> (End, End) {
    let (a, b) = (End::new(cm), End::new(cm));
    if a.qp.qpn() < b.qp.qpn() { (a, b) } else { (b, a) }
}

/// The number of retries is given with the move to RTS. Whose stream was there before that had a limit of a
/// tenth of a second.
#[test]
fn a_send_waits_for_its_receive_although_the_stream_was_there_before_rts() {
    let cm = cm();
    for swapped in [false, true] {
        let (low, high) = two(&cm);
        let (first, second) = if swapped { (&low, &high) } else { (&high, &low) };
        first.rtr("127.0.0.1", ("127.0.0.1", second.qp.qpn()));
        std::thread::sleep(Duration::from_millis(50));
        second.rtr("127.0.0.1", ("127.0.0.1", first.qp.qpn()));
        std::thread::sleep(Duration::from_millis(50));
        for end in [first, second] {
            let rts = QpModify {
                state: Some(QpState::Rts),
                timeout: Some(0),
                retry_cnt: Some(7),
                rnr_retry: Some(7),
                ..QpModify::default()
            };
            end.modify(rts, None).unwrap();
        }
        for (sender, receiver) in [(first, second), (second, first)] {
            // One has a receive, the other one waits.
            sender.send(1, 0xA);
            sender.send(2, 0xB);
            std::thread::sleep(Duration::from_millis(300));
            receiver.receive(3);
            for end in [sender, receiver] {
                assert_eq!([end.poll().status, end.poll().status], [WcStatus::Success; 2]);
            }
        }
    }
}

#[test]
fn a_stream_that_ends_before_it_carried_anything_was_none() {
    let (low, high) = two(&cm());
    low.rtr("127.0.0.1", ("127.0.0.1", high.qp.qpn()));
    low.rts();
    low.send(1, 0xA);
    for _ in 0..3 {
        let mut given_up = request(&high, &low);
        // Accepted, with the queue pair's connection; and gone before the first FPDU.
        assert!(given_up.read(&mut [0; 256]).unwrap() > 0);
        assert_eq!(low.qp.query().state, QpState::Rts);
    }
    high.rtr("127.0.0.1", ("127.0.0.1", low.qp.qpn()));
    high.rts();
    high.send(1, 0xB);
    for end in [&low, &high] {
        assert_eq!([end.poll().status, end.poll().status], [WcStatus::Success; 2]);
    }
}

/// Also until the queue pair is in RESET: the other program may be faster.
#[test]
fn a_request_waits_while_the_last_stream_lasts() {
    let cm = cm();
    let (low, high) = two(&cm);
    for (end, peer) in [(&low, &high), (&high, &low)] {
        end.rtr("127.0.0.1", ("127.0.0.1", peer.qp.qpn()));
        end.rts();
    }
    talk(&low, &high);
    let mut next = request(&high, &low);
    next.set_nonblocking(true).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(next.read(&mut [0; 256]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock));
    low.modify(QpModify { state: Some(QpState::Reset), ..QpModify::default() }, None).unwrap();
    low.init();
    low.rtr("127.0.0.1", ("127.0.0.1", high.qp.qpn()));
    next.set_nonblocking(false).unwrap();
    assert!(next.read(&mut [0; 256]).unwrap() > 0);
}

#[test]
fn who_waits_for_a_queue_pair_that_is_destroyed_is_turned_away() {
    let cm = cm();
    let (low, high) = two(&cm);
    // Its port is open from the first stream on.
    low.rtr("127.0.0.1", ("127.0.0.1", high.qp.qpn()));
    low.modify(QpModify { state: Some(QpState::Reset), ..QpModify::default() }, None).unwrap();
    let mut waits = request(&high, &low);
    waits.set_nonblocking(true).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(waits.read(&mut [0; 256]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock));
    bringup::forget(&cm, low.qp.qpn());
    waits.set_nonblocking(false).unwrap();
    // By a reply. One whose time is over is closed without a word.
    assert!(waits.read(&mut [0; 256]).unwrap() > 0);
    while waits.read(&mut [0; 256]).unwrap() > 0 {}
}

fn expect(channel: &EventChannel, kind: EventKind) -> Event {
    let event = channel.get_within(Some(LIMIT)).unwrap();
    assert_eq!(event.kind, kind, "{event:?}");
    event
}

/// Any peer can name any number in a request to a listener of rdma_cm. While the program had not answered it,
/// no queue pair was joined with the number's owner: it showed RTS, stayed in INIT and refused what was
/// posted.
#[test]
fn a_request_that_names_a_number_keeps_no_queue_pair_from_the_numbers_owner() {
    let cm = cm();
    let channel = EventChannel::new(cm.nic()).unwrap();
    let listener = Id::new(&cm, &channel);
    listener.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    listener.listen(0).unwrap();
    for swapped in [false, true] {
        let (a, b) = (End::new(&cm), End::new(&cm));
        let (left, right) = if swapped { ("127.0.0.3", "127.0.0.2") } else { ("127.0.0.2", "127.0.0.3") };
        let config = InitiatorConfig {
            revision: Revision::Two,
            crc: true,
            markers: false,
            depths: Depths::negotiated(4, 4),
            max_ird: 4,
            peer: Some(PeerData { qpn: b.qp.qpn(), ..PeerData::new() }),
            peer_in_request: true,
        };
        // From 127.0.0.1.
        let mut stranger = TcpStream::connect(listener.local_address().unwrap()).unwrap();
        let mut initiator = Initiator::new(config, b"").unwrap();
        stranger.write_all(&initiator.poll_transmit().unwrap()).unwrap();
        let waits = expect(&channel, EventKind::ConnectRequest);
        assert_eq!(waits.param.qp_num, b.qp.qpn());
        a.rtr(left, (right, b.qp.qpn()));
        a.rts();
        b.rtr(right, (left, a.qp.qpn()));
        b.rts();
        talk(&a, &b);
        waits.id.destroy();
        waits.acknowledge();
    }
    listener.destroy();
}

/// As `rping -q` does it: both ends name a path, and the passive one before it accepts.
#[test]
fn a_queue_pair_that_names_the_path_of_its_request_gets_the_connection() {
    let cm = cm();
    let [server, client] = [(); 2].map(|()| EventChannel::new(cm.nic()).unwrap());
    let listener = Id::new(&cm, &server);
    listener.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    listener.listen(0).unwrap();
    let (a, b) = (End::new(&cm), End::new(&cm));
    let active = Id::new(&cm, &client);
    active.resolve_address(None, listener.local_address().unwrap()).unwrap();
    expect(&client, EventKind::AddressResolved).acknowledge();
    active.resolve_route().unwrap();
    expect(&client, EventKind::RouteResolved).acknowledge();
    active.connect_by_number(&a.qp, ConnParam::DEFAULT, b"").unwrap();
    let request = expect(&server, EventKind::ConnectRequest);
    assert_eq!(request.param.qp_num, a.qp.qpn());
    let passive = Arc::clone(&request.id);
    request.acknowledge();
    b.rtr("127.0.0.1", ("127.0.0.1", a.qp.qpn()));
    b.rts();
    assert_eq!(b.qp.query().state, QpState::Init, "until it has its stream");
    passive.accept(&b.qp, None, b"").unwrap();
    let response = expect(&client, EventKind::ConnectResponse);
    assert_eq!(response.param.qp_num, b.qp.qpn());
    response.acknowledge();
    a.rtr("127.0.0.1", ("127.0.0.1", b.qp.qpn()));
    a.rts();
    active.establish().unwrap();
    expect(&server, EventKind::Established).acknowledge();
    talk(&a, &b);
    [active, passive, listener].iter().for_each(|id| id.destroy());
}

#[test]
fn without_a_path_the_rnic_refuses() {
    let end = End::new(&cm());
    let change = QpModify { state: Some(QpState::Rtr), dest_qp_num: Some(0x4242), ..QpModify::default() };
    let refused = end.modify(change, None);
    assert!(matches!(refused, Err(CmError::Verbs(VerbsError::NotSupported(_)))), "{refused:?}");
    assert_eq!(end.qp.query().state, QpState::Init);
}
