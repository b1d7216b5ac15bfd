//! Streams between queue pairs that know each other by number and address.

mod common;

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use common::qp_and_cq;
use uwarp_cm::pairing::Path;
use uwarp_cm::{Cm, CmError, ConnParam, Event, EventChannel, EventKind, Id, Timeouts, bringup};
use uwarp_driver::{Nic, Qp};
use uwarp_proto::setup::{
    AcceptParams, Depths, Initiator, InitiatorConfig, PeerData, Responder, ResponderPolicy, Revision,
};
use uwarp_rnic::qp::{QpModify, QpState};
use uwarp_rnic::{Cq, RecvWr, SendFlags, SendOp, SendWr, VerbsError, Wc, WcStatus};
use uwarp_wire::datagram::Datagram;
use uwarp_wire::datagram::proof::Proof;
use uwarp_wire::introduction::{Cookie, Half, Introduction, TurnedAway};

/// The packet sequence number that each program begins with, and expects.
const PSN: u32 = 0x00AB_C007;
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
            rq_psn: Some(PSN),
            ..QpModify::default()
        };
        let to = |address: &str| SocketAddr::new(address.parse::<IpAddr>().unwrap(), 0);
        self.modify(change, Some(Path { local: to(local), peer: to(peer.0) })).unwrap();
    }

    /// With a timeout of about four seconds, and a retry (times four).
    fn rts(&self) {
        let change = QpModify {
            state: Some(QpState::Rts),
            sq_psn: Some(PSN),
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
            // Some of these wait half a minute: a thread that yields takes a whole processor for that.
            std::thread::sleep(Duration::from_millis(1));
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

/// A peer whose frames are made by hand: it has a port in UDP and in TCP, as a process has, and so numbers.
/// These are larger than those of the other end, so it connects.
struct Hand {
    udp: UdpSocket,
    _tcp: TcpListener,
    qpn: u32,
}

impl Hand {
    fn new(larger_than: &End) -> Self {
        let least = (larger_than.qp.qpn() >> 8) as u16 + 1;
        let ports = (least..=u16::MAX).rev();
        let (udp, tcp) = ports
            .filter_map(|port| {
                let udp = UdpSocket::bind(("127.0.0.1", port)).ok()?;
                Some((udp, TcpListener::bind(("127.0.0.1", port)).ok()?))
            })
            .next()
            .expect("a port above that of the queue pair");
        udp.set_read_timeout(Some(LIMIT)).unwrap();
        let qpn = u32::from(udp.local_addr().unwrap().port()) << 8 | 7;
        Self { udp, _tcp: tcp, qpn }
    }

    /// Asks the process of this queue pair for a cookie.
    fn cookie(&self, to: &End) -> Cookie {
        let (source_qpn, destination_qpn, token) = (self.qpn, to.qp.qpn(), 99);
        let request = Proof { source_qpn, destination_qpn, token, cookie: None };
        let port = (to.qp.qpn() >> 8) as u16;
        let mut bytes = [0; 256];
        self.udp.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        // Before the move, the first request waits for that: repeated, as a connector does.
        let end = Instant::now() + LIMIT;
        let len = loop {
            self.udp.send_to(&request.to_bytes(), ("127.0.0.1", port)).unwrap();
            match self.udp.recv(&mut bytes) {
                Ok(len) => break len,
                Err(error) => assert!(Instant::now() < end, "no cookie: {error}"),
            }
        };
        self.udp.set_read_timeout(Some(LIMIT)).unwrap();
        let reply = Proof::parse(&Datagram::parse(&bytes[..len]).unwrap()).unwrap();
        assert_eq!(
            (reply.token, reply.source_qpn, reply.destination_qpn),
            (token, destination_qpn, source_qpn)
        );
        reply.cookie.unwrap()
    }

    /// What it says of itself; both programs begin with the same number.
    fn introduction(&self, to: &End, psn: u32, cookie: Cookie) -> Introduction {
        Introduction {
            source_qpn: self.qpn,
            destination_qpn: to.qp.qpn(),
            expects: Some(Half::Lower.of(psn)),
            begins: Some(Half::Lower.of(psn)),
            incarnation: 2,
            cookie,
        }
    }

    /// With a cookie made now.
    fn request(&self, to: &End) -> TcpStream {
        request(to, &self.introduction(to, PSN, self.cookie(to)))
    }
}

/// A request, by hand.
fn request(to: &End, introduction: &Introduction) -> TcpStream {
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

/// The reply that comes: accepted, or why not. The fixed part of an MPA frame has 20 bytes, and enhanced
/// set-up four.
fn answer(stream: &mut TcpStream) -> Result<Introduction, TurnedAway> {
    let mut frame = [0; 20];
    stream.read_exact(&mut frame).unwrap();
    let mut data = vec![0; usize::from(u16::from_be_bytes([frame[18], frame[19]]))];
    stream.read_exact(&mut data).unwrap();
    let said = &data[4..];
    match Introduction::parse(said) {
        Some(introduction) => Ok(introduction),
        None => Err(TurnedAway::parse(said).expect("a reason")),
    }
}

/// Whether no answer has come in a tenth of a second.
fn waits(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let waits = stream.peek(&mut [0; 256]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock);
    stream.set_nonblocking(false).unwrap();
    waits
}

/// Strangers at the port: some say nothing, one is no queue pair, and others know every number but do not
/// have the port of the one that they name.
#[test]
fn strangers_cost_nobody_a_stream() {
    let cm = cm();
    let (a, b) = (End::new(&cm), End::new(&cm));
    let (low, high) = if a.qp.qpn() < b.qp.qpn() { (&a, &b) } else { (&b, &a) };
    low.rtr("127.0.0.1", ("127.0.0.1", high.qp.qpn()));
    let port = (low.qp.qpn() >> 8) as u16;
    let connect = || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let _silent: Vec<TcpStream> = (0..50).map(|_| connect()).collect();
    let mut noisy = connect();
    noisy.write_all(b"GET / HTTP/1.0\r\n\r\n0123456789").unwrap();
    noisy.set_read_timeout(Some(LIMIT)).unwrap();
    assert!(matches!(noisy.read(&mut [0; 64]), Ok(0) | Err(_)));
    let stranger = Hand::new(low);
    let own = stranger.cookie(low);
    for cookie in [Cookie::NONE, own, Cookie { made: own.made + 1, ..own }] {
        let lie = Introduction { source_qpn: high.qp.qpn(), ..stranger.introduction(low, PSN, cookie) };
        assert_eq!(answer(&mut request(low, &lie)), Err(TurnedAway::NoProof));
    }
    // With a number of its own it is not the one that is waited for.
    assert_eq!(answer(&mut stranger.request(low)), Err(TurnedAway::AnotherPeer));
    high.rtr("127.0.0.1", ("127.0.0.1", low.qp.qpn()));
    low.rts();
    high.rts();
    talk(low, high);
    assert!(low.qp.peer_is_uwarp() && high.qp.peer_is_uwarp());
}

/// With the address, both numbers and the sequence numbers, any user of the peer's host got the stream, and a
/// Send completed with success at him.
#[test]
fn who_has_not_the_port_of_a_number_does_not_speak_for_it() {
    let low = End::new(&cm());
    let peer = Hand::new(&low);
    low.rtr("127.0.0.1", ("127.0.0.1", peer.qpn));
    low.rts();
    low.send(1, 0xA);
    // Another process: all that it lacks is the port.
    let stranger = Hand::new(&low);
    for cookie in [Cookie::NONE, stranger.cookie(&low)] {
        let lie = Introduction { source_qpn: peer.qpn, ..stranger.introduction(&low, PSN, cookie) };
        assert_eq!(answer(&mut request(&low, &lie)), Err(TurnedAway::NoProof));
    }
    assert!(answer(&mut peer.request(&low)).is_ok(), "and keeps nobody out");
}

/// Only a warning was logged, and only if the number was said.
#[test]
fn packet_sequence_numbers_that_do_not_fit_are_refused() {
    let low = End::new(&cm());
    let peer = Hand::new(&low);
    low.rtr("127.0.0.1", ("127.0.0.1", peer.qpn));
    let wrong = |psn| request(&low, &peer.introduction(&low, psn, peer.cookie(&low)));
    assert_eq!(answer(&mut wrong(PSN + 1)), Err(TurnedAway::Psn));
    // So is the right one then, for a while: numbers cannot be guessed one after the other.
    assert_eq!(answer(&mut wrong(PSN)), Err(TurnedAway::Psn));
    std::thread::sleep(Duration::from_millis(600));
    let reply = answer(&mut wrong(PSN)).unwrap();
    assert_eq!((reply.source_qpn, reply.destination_qpn, reply.incarnation), (low.qp.qpn(), peer.qpn, 2));
    // In RTR it has said what it expects, and shows the other half.
    assert_eq!((reply.expects, reply.begins), (Some(Half::Upper.of(PSN)), None));
}

/// Who has the number's port now may have it since the peer died. The program has named the port's owner when
/// it moved the queue pair.
#[test]
fn a_cookie_from_before_the_move_does_not_count() {
    let (low, other) = (End::new(&cm()), End::new(&cm()));
    let peer = Hand::new(&low);
    // The port is served because of another queue pair.
    other.rtr("127.0.0.1", ("127.0.0.1", peer.qpn + 1));
    let old = peer.cookie(&low);
    let early = request(&low, &peer.introduction(&low, PSN, old));
    assert!(waits(&early), "its queue pair may come");
    low.rtr("127.0.0.1", ("127.0.0.1", peer.qpn));
    let mut early = early;
    assert_eq!(answer(&mut early), Err(TurnedAway::Stale));
    let again = request(&low, &peer.introduction(&low, PSN, old));
    assert_eq!(answer(&mut { again }), Err(TurnedAway::Stale));
    assert!(answer(&mut peer.request(&low)).is_ok());
}

/// The introduction contained the number that the other end must know by itself: whoever had the port of a
/// dead peer returned it, and was the peer.
#[test]
fn who_has_the_port_of_a_dead_peer_cannot_answer_for_it() {
    let high = End::new(&cm());
    let (port, udp, tcp) = port_below(&high);
    high.rtr("127.0.0.1", ("127.0.0.1", u32::from(port) << 8));
    high.rts();
    high.send(1, 0xA);
    udp.set_read_timeout(Some(LIMIT)).unwrap();
    for _ in 0..3 {
        let mut bytes = [0; 256];
        let (len, from) = udp.recv_from(&mut bytes).unwrap();
        let asked = Proof::parse(&Datagram::parse(&bytes[..len]).unwrap()).unwrap();
        let (source_qpn, destination_qpn) = (asked.destination_qpn, asked.source_qpn);
        let cookie = Some(Cookie { made: 1, hash: 1 });
        let reply = Proof { source_qpn, destination_qpn, cookie, ..asked };
        udp.send_to(&reply.to_bytes(), from).unwrap();
        let (mut stream, mut responder, request) = take_request(&tcp);
        let said = Introduction::parse(&request).unwrap();
        // All that it has ever been sent.
        let (expects, begins) = (said.begins, said.expects);
        let echo = Introduction { source_qpn, destination_qpn, expects, begins, ..said };
        let params = AcceptParams { depths: Depths::negotiated(4, 4), peer: PeerData::new() };
        responder.accept(params, &echo.to_bytes()).unwrap();
        send_reply(&mut stream, &mut responder);
        // Nothing comes: no indication, and above all not the program's message.
        assert!(matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_)));
        // The connector tries with the same cookie until that is turned away, so it is.
        let (mut stream, mut responder, _) = take_request(&tcp);
        responder.reject(&TurnedAway::Stale.to_bytes()).unwrap();
        send_reply(&mut stream, &mut responder);
    }
    assert_eq!(high.poll().status, WcStatus::RetryExcErr, "and the program learns of it in time");
}

/// A port that listens for a number smaller than this queue pair's.
fn port_below(high: &End) -> (u16, UdpSocket, TcpListener) {
    let port = (1025..(high.qp.qpn() >> 8) as u16).find_map(|port| {
        let udp = UdpSocket::bind(("127.0.0.1", port)).ok()?;
        Some((port, udp, TcpListener::bind(("127.0.0.1", port)).ok()?))
    });
    port.expect("a port below that of the queue pair")
}

/// Accepts a connection and its request; returns the request's private data, too.
fn take_request(listener: &TcpListener) -> (TcpStream, Responder, Vec<u8>) {
    let (mut stream, _) = listener.accept().unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let mut responder = Responder::new(ResponderPolicy {
        max_revision: Revision::Two,
        crc: true,
        markers: false,
        know_peers: true,
        max_ird: 4,
        host: None,
    });
    loop {
        let mut bytes = vec![0; responder.want()];
        stream.read_exact(&mut bytes).unwrap();
        if let Some(request) = responder.handle_input(&bytes).unwrap() {
            return (stream, responder, request.private_data);
        }
    }
}

fn send_reply(stream: &mut TcpStream, responder: &mut Responder) {
    while let Some(bytes) = responder.poll_transmit() {
        stream.write_all(&bytes).unwrap();
    }
}

/// A UDP port that does not answer may be that of a peer of version 1: the TCP port is asked, for the log.
#[test]
fn a_tcp_port_that_is_asked_why_udp_is_silent_learns_nothing_and_gets_no_stream() {
    let high = End::new(&cm());
    let (port, _udp, tcp) = port_below(&high);
    let peer = u32::from(port) << 8;
    high.rtr("127.0.0.1", ("127.0.0.1", peer));
    high.rts();
    high.send(1, 0xA);
    for accepts in [true, false] {
        let (mut stream, mut responder, request) = take_request(&tcp);
        let said = Introduction::parse(&request).unwrap();
        assert_eq!((said.source_qpn, said.destination_qpn), (high.qp.qpn(), peer));
        assert_eq!((said.expects, said.begins, said.incarnation, said.cookie), (None, None, 0, Cookie::NONE));
        if accepts {
            let (source_qpn, destination_qpn) = (said.destination_qpn, said.source_qpn);
            let reply =
                Introduction { source_qpn, destination_qpn, expects: Some(0), begins: Some(0), ..said };
            let params = AcceptParams { depths: Depths::negotiated(4, 4), peer: PeerData::new() };
            responder.accept(params, &reply.to_bytes()).unwrap();
            send_reply(&mut stream, &mut responder);
            assert!(matches!(stream.read(&mut [0; 64]), Ok(0) | Err(_)), "no FPDU comes");
        }
    }
    assert_eq!(high.poll().status, WcStatus::RetryExcErr);
}

/// With a stream attached there was no limit, so a peer that accepted and was silent held a work request for
/// ever.
#[test]
fn a_silent_peer_does_not_disable_the_retry_limit() {
    let low = End::new(&cm());
    let peer = Hand::new(&low);
    low.rtr("127.0.0.1", ("127.0.0.1", peer.qpn));
    low.rts();
    let mut silent = peer.request(&low);
    assert!(answer(&mut silent).is_ok());
    low.send(1, 0xA);
    assert_eq!(low.poll().status, WcStatus::RetryExcErr);
    let mut rest = Vec::new();
    let _ = silent.read_to_end(&mut rest);
    assert!(rest.is_empty(), "the program's message goes to nobody who has said nothing: {rest:?}");
}

/// Their connectors took the silent close of an early request for a peer that does not understand it, and
/// asked again without uwarp's bits: two uwarp ends were strangers, without acknowledgements.
#[test]
fn requests_of_strangers_do_not_make_two_uwarp_ends_strangers() {
    let cm = cm();
    let (low, high) = two(&cm);
    let other = End::new(&cm);
    other.rtr("127.0.0.1", ("127.0.0.1", u32::from(u16::MAX) << 8));
    high.rtr("127.0.0.1", ("127.0.0.1", low.qp.qpn()));
    // Each with a proven number of its own, for the same queue pair.
    let peers: Vec<Hand> = (0..6).map(|_| Hand::new(&low)).collect();
    let mut early: Vec<TcpStream> = peers.iter().map(|peer| peer.request(&low)).collect();
    // The first ones have to make room, and hear why.
    assert_eq!(answer(&mut early[0]), Err(TurnedAway::Crowded));
    high.rts();
    low.rtr("127.0.0.1", ("127.0.0.1", high.qp.qpn()));
    low.rts();
    talk(&low, &high);
    assert!(low.qp.peer_is_uwarp() && high.qp.peer_is_uwarp());
}

/// An introduction of version 1 proves nothing.
#[test]
fn an_older_uwarp_is_turned_away_in_words() {
    let low = End::new(&cm());
    let peer = Hand::new(&low);
    low.rtr("127.0.0.1", ("127.0.0.1", peer.qpn));
    let mut old = peer.introduction(&low, PSN, Cookie::NONE).to_bytes().to_vec();
    old[3] = 1;
    let config = InitiatorConfig {
        revision: Revision::Two,
        crc: true,
        markers: false,
        depths: Depths::negotiated(4, 4),
        max_ird: 4,
        peer: Some(PeerData::new()),
        peer_in_request: false,
    };
    let mut initiator = Initiator::new(config, &old).unwrap();
    let mut stream = TcpStream::connect(("127.0.0.1", (low.qp.qpn() >> 8) as u16)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    while let Some(bytes) = initiator.poll_transmit() {
        stream.write_all(&bytes).unwrap();
    }
    assert_eq!(answer(&mut stream), Err(TurnedAway::Version));
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
                sq_psn: Some(PSN),
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
    let low = End::new(&cm());
    let peer = Hand::new(&low);
    low.rtr("127.0.0.1", ("127.0.0.1", peer.qpn));
    low.rts();
    for _ in 0..3 {
        // Accepted, with the queue pair's connection; and gone before the first FPDU.
        assert!(answer(&mut peer.request(&low)).is_ok());
        assert_eq!(low.qp.query().state, QpState::Rts);
    }
    low.modify(QpModify { state: Some(QpState::Reset), ..QpModify::default() }, None).unwrap();
    let high = {
        let end = End::new(&cm());
        if end.qp.qpn() > low.qp.qpn() { end } else { return }
    };
    low.init();
    high.rtr("127.0.0.1", ("127.0.0.1", low.qp.qpn()));
    low.rtr("127.0.0.1", ("127.0.0.1", high.qp.qpn()));
    for end in [&low, &high] {
        end.rts();
    }
    talk(&low, &high);
}

/// Until the queue pair is moved to RTR again, since the other program may be faster; and then it comes back,
/// with a cookie that counts.
#[test]
fn a_request_waits_while_the_last_stream_lasts() {
    let cm = cm();
    let (low, high) = two(&cm);
    for (end, peer) in [(&low, &high), (&high, &low)] {
        end.rtr("127.0.0.1", ("127.0.0.1", peer.qp.qpn()));
        end.rts();
    }
    talk(&low, &high);
    let peer = Hand::new(&low);
    let mut next = peer.request(&low);
    assert!(waits(&next));
    low.modify(QpModify { state: Some(QpState::Reset), ..QpModify::default() }, None).unwrap();
    low.init();
    assert!(waits(&next));
    low.rtr("127.0.0.1", ("127.0.0.1", peer.qpn));
    assert_eq!(answer(&mut next), Err(TurnedAway::Stale));
    assert!(answer(&mut peer.request(&low)).is_ok());
}

#[test]
fn who_waits_for_a_queue_pair_that_is_destroyed_is_turned_away() {
    let cm = cm();
    let low = End::new(&cm);
    let peer = Hand::new(&low);
    // Its port is open from the first stream on.
    low.rtr("127.0.0.1", ("127.0.0.1", peer.qpn));
    low.modify(QpModify { state: Some(QpState::Reset), ..QpModify::default() }, None).unwrap();
    let mut early = peer.request(&low);
    assert!(waits(&early));
    bringup::forget(&cm, low.qp.qpn());
    assert_eq!(answer(&mut early), Err(TurnedAway::NoQueuePair));
    assert_eq!(early.read(&mut [0; 256]).unwrap(), 0);
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
