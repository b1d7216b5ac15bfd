//! The connection manager over real sockets and queue pairs of this process.

#[path = "connect/channels.rs"]
mod channels;
mod common;
#[path = "connect/listeners.rs"]
mod listeners;
#[path = "connect/sockets.rs"]
mod sockets;
#[path = "connect/strangers.rs"]
mod strangers;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use uwarp_cm::machine::budget::Budget;
use uwarp_cm::{Cm, CmError, ConnParam, Event, EventChannel, EventKind, GetError, Id, State, Timeouts};
use uwarp_driver::Nic;
use uwarp_rnic::qp::{QpModify, QpState};
use uwarp_rnic::{RecvWr, SendFlags, SendOp, SendWr};
use uwarp_wire::mpa::{FLAG_C, FLAG_S, FLAG_UWARP_A, FLAG_UWARP_B, KEY_REP, KEY_REQ};

use common::qp;

/// Longest a test waits for what has to come; reached only when it fails.
const PATIENCE: Duration = Duration::from_secs(60);

fn cm(timeouts: Timeouts) -> Arc<Cm> {
    Cm::new(&Nic::open().unwrap(), timeouts)
}

fn quick() -> Timeouts {
    let short = Duration::from_millis(150);
    Timeouts { reply: short, request: short, ready: short, ..Timeouts::default() }
}

fn channel() -> Arc<EventChannel> {
    EventChannel::new(&Nic::open().unwrap()).unwrap()
}

/// The next event, or a failure after a long while.
fn next(channel: &EventChannel) -> Event {
    // SAFETY: the channel outlives the borrow.
    let fd = unsafe { BorrowedFd::borrow_raw(channel.fd()) };
    let limit = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let ready = rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap();
    assert_eq!(ready, 1, "no event came");
    channel.get().unwrap()
}

fn expect(channel: &EventChannel, kind: EventKind) -> Event {
    let event = next(channel);
    assert_eq!(event.kind, kind, "{event:?}");
    event
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

fn listening(cm: &Arc<Cm>, channel: &Arc<EventChannel>, address: SocketAddr, backlog: i32) -> Arc<Id> {
    let id = Id::new(cm, channel);
    id.bind(address).unwrap();
    id.listen(backlog).unwrap();
    id
}

/// The id of the next event, which is a request.
fn requested(channel: &EventChannel) -> Arc<Id> {
    let request = expect(channel, EventKind::ConnectRequest);
    let passive = Arc::clone(&request.id);
    request.acknowledge();
    passive
}

/// A connection of the test's own, on which a request was sent: what follows the key of its MPA frame.
fn stranger(to: SocketAddr, request: &[u8]) -> TcpStream {
    let mut stranger = TcpStream::connect(to).unwrap();
    stranger.set_read_timeout(Some(PATIENCE)).unwrap();
    stranger.write_all(&KEY_REQ).unwrap();
    stranger.write_all(request).unwrap();
    stranger
}

/// Reads an MPA request.
fn take_request(stream: &mut TcpStream) -> Vec<u8> {
    let mut request = vec![0; 20];
    stream.read_exact(&mut request).unwrap();
    let rest = usize::from(u16::from_be_bytes([request[18], request[19]]));
    request.resize(20 + rest, 0);
    stream.read_exact(&mut request[20..]).unwrap();
    request
}

/// An id that is ready to connect.
fn resolved(cm: &Arc<Cm>, channel: &Arc<EventChannel>, peer: SocketAddr) -> Arc<Id> {
    let id = Id::new(cm, channel);
    id.resolve_address(None, peer).unwrap();
    expect(channel, EventKind::AddressResolved).acknowledge();
    id.resolve_route().unwrap();
    expect(channel, EventKind::RouteResolved).acknowledge();
    id
}

fn meet_at(address: SocketAddr) {
    let cm = cm(Timeouts::default());
    let (server, client) = (channel(), channel());
    let listener = listening(&cm, &server, address, 0);
    let at = listener.local_address().unwrap();
    assert_ne!(at.port(), 0, "a port is there as soon as it is bound");

    let active = resolved(&cm, &client, at);
    let active_qp = qp();
    let param =
        ConnParam { responder_resources: 3, initiator_depth: 5, rnr_retry_count: 2, ..ConnParam::DEFAULT };
    active.connect(&active_qp, param, b"question").unwrap();

    let request = expect(&server, EventKind::ConnectRequest);
    assert_eq!(request.private_data, b"question");
    assert_eq!((request.param.responder_resources, request.param.initiator_depth), (5, 3));
    // It was 0 unless the program gave the number to rdma_connect.
    assert_eq!(request.param.qp_num, active_qp.qpn(), "the request names the peer's queue pair");
    assert_eq!(request.param.rnr_retry_count, 2);
    let passive = Arc::clone(&request.id);
    assert_eq!(passive.local_address(), Some(at));
    assert!(Arc::ptr_eq(request.owner(), &listener));
    request.acknowledge();
    let passive_qp = qp();
    passive.accept(&passive_qp, None, b"answer").unwrap();

    let established = expect(&client, EventKind::Established);
    assert_eq!((established.status, established.private_data.as_slice()), (0, b"answer".as_slice()));
    assert_eq!((established.param.responder_resources, established.param.initiator_depth), (3, 5));
    assert_eq!(established.param.qp_num, passive_qp.qpn(), "uwarp ends tell each other");
    established.acknowledge();
    let established = expect(&server, EventKind::Established);
    assert!(Arc::ptr_eq(&established.id, &passive));
    established.acknowledge();
    assert_eq!(active.peer_address(), passive.local_address());
    assert_eq!(active.local_address(), passive.peer_address());
    assert_eq!((active_qp.query().max_rd_atomic, active_qp.query().max_dest_rd_atomic), (5, 3));
    assert_eq!((passive_qp.query().max_rd_atomic, passive_qp.query().max_dest_rd_atomic), (3, 5));

    active.disconnect().unwrap();
    expect(&client, EventKind::Disconnected).acknowledge();
    expect(&server, EventKind::Disconnected).acknowledge();
    passive.disconnect().unwrap();
    assert_eq!((active.state(), passive.state()), (State::Closed, State::Closed));
    active.destroy();
    passive.destroy();
    listener.destroy();
    assert!(server.is_empty() && client.is_empty());
}

/// A program that polls, then looks for events, and destroys the queue pair when the connection has ended
/// (libfabric's rxm) lost the completion of a message that came together with the end.
#[test]
fn the_end_is_reported_when_the_completions_before_it_were_polled() {
    // However long this thread gets no processor between two lines.
    let cm = cm(Timeouts { unpolled: PATIENCE * 10, ..Timeouts::default() });
    let (server, client) = (channel(), channel());
    let listener = listening(&cm, &server, local(0), 0);
    for round in 0..50 {
        let active = resolved(&cm, &client, listener.local_address().unwrap());
        let active_qp = qp();
        active.connect(&active_qp, ConnParam::DEFAULT, b"").unwrap();
        let passive = requested(&server);
        let (passive_qp, cq) = common::qp_and_cq();
        passive_qp.modify(&QpModify { state: Some(QpState::Init), ..QpModify::default() }).unwrap();
        passive_qp.post_recv(std::iter::once(RecvWr { wr_id: 1, sges: &[] })).unwrap();
        passive.accept(&passive_qp, None, b"").unwrap();
        expect(&client, EventKind::Established).acknowledge();
        expect(&server, EventKind::Established).acknowledge();
        let send =
            SendWr { wr_id: 2, op: SendOp::Send { invalidate: None }, flags: SendFlags::empty(), sges: &[] };
        active_qp.post_send(std::iter::once(send)).unwrap();
        active.disconnect().unwrap();
        let (mut received, end) = (0, Instant::now() + PATIENCE);
        loop {
            // The background thread serves the socket, between any two of these lines.
            received += cq.poll(1, |_| ());
            if let Some(event) = server.take_next(false) {
                assert_eq!(event.kind, EventKind::Disconnected);
                event.acknowledge();
                break;
            }
            assert!(Instant::now() < end, "no end");
        }
        assert_eq!(received, 1, "round {round}: the message came behind the end");
        // Otherwise the other end waits for this one.
        passive.disconnect().unwrap();
        expect(&client, EventKind::Disconnected).acknowledge();
        [active, passive].iter().for_each(|id| id.destroy());
        [active_qp, passive_qp].iter().for_each(|qp| qp.destroy());
    }
    listener.destroy();
}

#[test]
fn ends_meet_over_ipv4() {
    meet_at(local(0));
}

#[test]
fn ends_meet_over_ipv6() {
    meet_at("[::1]:0".parse().unwrap());
}

#[test]
fn rejections_carry_private_data() {
    let cm = cm(Timeouts::default());
    let (server, client) = (channel(), channel());
    let listener = listening(&cm, &server, local(0), 0);
    let active = resolved(&cm, &client, listener.local_address().unwrap());
    active.connect(&qp(), ConnParam::DEFAULT, &[9; 255]).unwrap();
    let request = expect(&server, EventKind::ConnectRequest);
    assert_eq!(request.private_data, [9; 255]);
    request.id.reject(b"go away").unwrap();
    request.acknowledge();
    let rejected = expect(&client, EventKind::Rejected);
    assert_eq!(rejected.private_data, b"go away");
    assert_eq!(rejected.status, 28, "IB_CM_REJ_CONSUMER_DEFINED, in the default view");
    rejected.acknowledge();
    assert_eq!(active.state(), State::Closed);
    assert_eq!(
        active.connect(&qp(), ConnParam::DEFAULT, b""),
        Err(CmError::Invalid("not allowed in the id's state"))
    );
}

#[test]
fn refused_connections_are_an_event() {
    let cm = cm(Timeouts::default());
    let client = channel();
    let closed = Id::new(&cm, &client);
    // Bound, so that no other program listens there.
    closed.bind(local(0)).unwrap();
    let active = resolved(&cm, &client, closed.local_address().unwrap());
    active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    let rejected = expect(&client, EventKind::Rejected);
    assert_eq!(rejected.status, 8, "IB_CM_REJ_INVALID_SERVICE_ID, in the default view");
    rejected.acknowledge();
    active.disconnect().unwrap();
    active.destroy();
    closed.destroy();
}

#[test]
fn a_listener_that_comes_right_after_the_request_is_found() {
    let cm = cm(Timeouts::default());
    let (server, client) = (channel(), channel());
    let listener = Id::new(&cm, &server);
    listener.bind(local(0)).unwrap();
    let active = resolved(&cm, &client, listener.local_address().unwrap());
    active.connect(&qp(), ConnParam::DEFAULT, b"early").unwrap();
    listener.listen(0).unwrap();
    let request = expect(&server, EventKind::ConnectRequest);
    assert_eq!(request.private_data, b"early");
    request.acknowledge();
    active.destroy();
    assert!(client.is_empty(), "the refusal was reported");
}

#[test]
fn calls_out_of_order_are_refused() {
    let cm = cm(Timeouts::default());
    let channel = channel();
    let id = Id::new(&cm, &channel);
    let out_of_order = Err(CmError::Invalid("not allowed in the id's state"));
    assert_eq!(id.resolve_route(), out_of_order);
    assert_eq!(id.connect(&qp(), ConnParam::DEFAULT, b""), out_of_order);
    assert_eq!(id.accept(&qp(), None, b""), out_of_order);
    assert_eq!(id.reject(b""), out_of_order);
    assert!(id.disconnect().is_err());
    id.bind(local(0)).unwrap();
    assert_eq!(id.bind(local(0)), out_of_order);
    assert!(id.resolve_address(None, "[::1]:1".parse().unwrap()).is_err(), "families differ");
    assert!(id.bind("[fe80::1]:0".parse().unwrap()).is_err());
    id.listen(0).unwrap();
    assert_eq!(id.listen(0), out_of_order);
    assert!(id.disconnect().is_err());
    id.destroy();
    assert_eq!(id.state(), State::Destroyed);

    let deep = resolved(&cm, &channel, local(1));
    let param = ConnParam { initiator_depth: 129, ..ConnParam::DEFAULT };
    assert!(deep.connect(&qp(), param, b"").is_err());
    assert_eq!(deep.state(), State::RouteResolved);
}

#[test]
fn address_without_route_is_an_event() {
    let cm = cm(Timeouts::default());
    let channel = channel();
    let id = Id::new(&cm, &channel);
    // Class E: no route leads there.
    id.resolve_address(None, "255.255.255.255:7".parse().unwrap()).unwrap();
    let event = expect(&channel, EventKind::AddressError);
    assert!(event.status < 0);
    event.acknowledge();
    assert_eq!(id.state(), State::Bound);
    id.resolve_address(None, local(7)).unwrap();
    expect(&channel, EventKind::AddressResolved).acknowledge();
}

#[test]
fn a_wildcard_peer_is_this_host() {
    let cm = cm(Timeouts::default());
    let channel = channel();
    let id = Id::new(&cm, &channel);
    id.resolve_address(None, SocketAddr::from((Ipv4Addr::UNSPECIFIED, 7))).unwrap();
    expect(&channel, EventKind::AddressResolved).acknowledge();
    assert_eq!(id.peer_address(), Some(local(7)));
    assert_eq!(id.local_address().map(|a| a.ip()), Some(local(7).ip()));
}

#[test]
fn a_peer_that_says_nothing_is_unreachable() {
    let cm = cm(quick());
    let client = channel();
    let silent = TcpListener::bind(local(0)).unwrap();
    let active = resolved(&cm, &client, silent.local_addr().unwrap());
    active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    let event = expect(&client, EventKind::Unreachable);
    assert_eq!(event.status, -rustix::io::Errno::TIMEDOUT.raw_os_error());
    event.acknowledge();
}

#[test]
fn a_peer_that_never_shows_itself_does_not_hold_an_accepted_request() {
    let cm = cm(quick());
    let server = channel();
    let listener = listening(&cm, &server, local(0), 0);
    let _stranger =
        stranger(listener.local_address().unwrap(), &[FLAG_S | FLAG_C, 2, 0, 4, 0x80, 1, 0xC0, 1]);
    let passive = requested(&server);
    passive.accept(&qp(), None, b"").unwrap();
    let event = expect(&server, EventKind::Unreachable);
    assert_eq!(event.status, -rustix::io::Errno::TIMEDOUT.raw_os_error());
    event.acknowledge();
    passive.destroy();
}

#[test]
fn an_accept_that_comes_too_late_fails_the_queue_pair() {
    // Found by the attacker of `conformance/tests/hostile`: what was posted for the connection was never
    // flushed.
    let cm = cm(Timeouts::default());
    let server = channel();
    let listener = listening(&cm, &server, local(0), 0);
    let stranger = stranger(listener.local_address().unwrap(), &[0, 1, 0, 0]);
    let passive = requested(&server);
    rustix::net::sockopt::set_socket_linger(&stranger, Some(Duration::ZERO)).unwrap();
    drop(stranger);
    let queue_pair = qp();
    queue_pair.modify(&QpModify { state: Some(QpState::Init), ..QpModify::default() }).unwrap();
    assert!(cm.expects(None, None), "the request waits");
    assert!(passive.accept(&queue_pair, None, b"").is_err());
    assert_eq!(queue_pair.query().state, QpState::Err);
    assert!(!cm.expects(None, None), "a request that is gone waits for no queue pair");
    passive.destroy();
}

/// A queue pair that named the same number waited for a request that its program had never seen, and might
/// never look at: whoever can connect from the peer's address could keep it from being brought up by number.
#[test]
fn a_request_that_the_program_has_not_taken_keeps_no_queue_pair() {
    let cm = cm(Timeouts::default());
    let server = channel();
    let listener = listening(&cm, &server, local(0), 0);
    let _stranger = stranger(listener.local_address().unwrap(), &[0, 1, 0, 0]);
    let begin = std::time::Instant::now();
    while server.is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the request does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(!cm.expects(None, None), "the program cannot have a number from it");
    let passive = requested(&server);
    assert!(cm.expects(None, None), "now it may");
    passive.destroy();
    assert!(!cm.expects(None, None));
}

/// Its slot in the backlog was never free again.
#[test]
fn a_request_that_is_taken_before_listen_returns_counts_as_taken() {
    let cm = cm(Timeouts::default());
    for _ in 0..40 {
        let server = channel();
        let listener = Id::new(&cm, &server);
        listener.bind(local(0)).unwrap();
        let at = listener.local_address().unwrap();
        let taker = std::thread::spawn(move || {
            for _ in 0..2 {
                let passive = requested(&server);
                passive.destroy();
            }
        });
        let eager = std::thread::spawn(move || {
            let connected = std::iter::repeat_with(|| TcpStream::connect(at)).flatten().next();
            let all = [connected.unwrap(), TcpStream::connect(at).unwrap()];
            all.map(|mut stranger| {
                stranger.write_all(&KEY_REQ).unwrap();
                stranger.write_all(&[0, 1, 0, 0]).unwrap();
                stranger
            })
        });
        listener.listen(1).unwrap();
        taker.join().unwrap();
        drop(eager.join().unwrap());
        listener.destroy();
    }
}

#[test]
fn an_end_behind_bytes_is_seen_before_the_queue_pair_comes() {
    let cm = cm(Timeouts::default());
    let client = channel();
    let old = TcpListener::bind(local(0)).unwrap();
    let active = resolved(&cm, &client, old.local_addr().unwrap());
    let queue_pair = qp();
    active.connect_by_number(&queue_pair, ConnParam::DEFAULT, b"").unwrap();
    let (mut stream, _) = old.accept().unwrap();
    take_request(&mut stream);
    stream.write_all(&KEY_REP).unwrap();
    stream.write_all(&[FLAG_S, 2, 0, 4, 0, 1, 0, 1]).unwrap();
    let response = expect(&client, EventKind::ConnectResponse);
    response.acknowledge();
    stream.write_all(&[0; 20]).unwrap();
    drop(stream);
    expect(&client, EventKind::Disconnected).acknowledge();
    active.destroy();
}

#[test]
fn connections_beyond_one_turn_are_all_taken() {
    // A peer that connects as fast as it is served must not keep the thread that serves others.
    let cm = cm(Timeouts::default());
    let server = channel();
    let listener = listening(&cm, &server, local(0), 0);
    let at = listener.local_address().unwrap();
    let all: Vec<_> = (0..300).map(|_| stranger(at, &[0, 1, 0, 0])).collect();
    for _ in &all {
        let passive = requested(&server);
        passive.reject(b"").unwrap();
        passive.destroy();
    }
}

#[test]
fn strangers_without_enhanced_set_up_are_established_when_accepted() {
    let cm = cm(Timeouts::default());
    let server = channel();
    let listener = listening(&cm, &server, local(0), 0);
    let mut stranger = stranger(listener.local_address().unwrap(), &[0, 1, 0, 2, b'h', b'i']);
    let request = expect(&server, EventKind::ConnectRequest);
    assert_eq!(request.private_data, b"hi");
    assert_eq!((request.param.responder_resources, request.param.initiator_depth), (128, 128));
    let passive = Arc::clone(&request.id);
    request.acknowledge();
    passive.accept(&qp(), None, b"yes").unwrap();
    expect(&server, EventKind::Established).acknowledge();
    let mut reply = [0; 23];
    stranger.read_exact(&mut reply).unwrap();
    assert_eq!(
        (&reply[..16], &reply[16..]),
        (KEY_REP.as_slice(), [FLAG_C, 1, 0, 3, b'y', b'e', b's'].as_slice())
    );
    drop(stranger);
    expect(&server, EventKind::Disconnected).acknowledge();
}

#[test]
fn destroying_the_queue_pair_ends_the_connection_at_both_ends() {
    let cm = cm(Timeouts::default());
    let (server, client) = (channel(), channel());
    let listener = listening(&cm, &server, local(0), 0);
    let active = resolved(&cm, &client, listener.local_address().unwrap());
    let active_qp = qp();
    active.connect(&active_qp, ConnParam::DEFAULT, b"").unwrap();
    let passive = requested(&server);
    let passive_qp = qp();
    passive.accept(&passive_qp, None, b"").unwrap();
    expect(&client, EventKind::Established).acknowledge();
    expect(&server, EventKind::Established).acknowledge();
    active_qp.destroy();
    expect(&server, EventKind::Disconnected).acknowledge();
    active.disconnect().unwrap();
    expect(&client, EventKind::Disconnected).acknowledge();
    active.destroy();
    passive.destroy();
    assert!(client.is_empty() && server.is_empty());
}

#[test]
fn an_end_that_comes_with_the_first_fpdu_is_seen() {
    let cm = cm(Timeouts::default());
    let server = channel();
    let listener = listening(&cm, &server, local(0), 0);
    for _ in 0..20 {
        let mut stranger =
            stranger(listener.local_address().unwrap(), &[FLAG_S | FLAG_C, 2, 0, 4, 0x80, 1, 0xC0, 1]);
        let passive = requested(&server);
        let qp = qp();
        passive.accept(&qp, None, b"").unwrap();
        take_request(&mut stranger);
        // A ready-to-receive Write and the end of the stream in one TCP segment.
        let mut fpdu = vec![0, 14, 0xC1, 0x40];
        fpdu.resize(16, 0);
        fpdu.extend_from_slice(&uwarp_wire::crc::to_wire(uwarp_wire::crc::crc32c(&fpdu)));
        rustix::net::sockopt::set_tcp_cork(&stranger, true).unwrap();
        stranger.write_all(&fpdu).unwrap();
        stranger.shutdown(std::net::Shutdown::Write).unwrap();
        expect(&server, EventKind::Established).acknowledge();
        expect(&server, EventKind::Disconnected).acknowledge();
        passive.destroy();
    }
}

#[test]
fn older_peers_are_asked_again_on_new_connections() {
    let cm = cm(Timeouts::default());
    let client = channel();
    let old = TcpListener::bind(local(0)).unwrap();
    let active = resolved(&cm, &client, old.local_addr().unwrap());
    let queue_pair = qp();
    active.connect(&queue_pair, ConnParam::DEFAULT, b"hi").unwrap();
    let mut asked = Vec::new();
    loop {
        let (mut stream, _) = old.accept().unwrap();
        let request = take_request(&mut stream);
        asked.push((request[16], request[17], request[20..].to_vec()));
        if request[17] == 1 {
            stream.write_all(&KEY_REP).unwrap();
            stream.write_all(&[0, 1, 0, 1, b'!']).unwrap();
            let event = expect(&client, EventKind::Established);
            assert_eq!(event.private_data, b"!");
            event.acknowledge();
            break;
        }
    }
    let enhanced = vec![0x80, 128, 0xC0, 128, b'h', b'i'];
    let [_, q0, q1, q2] = queue_pair.qpn().to_be_bytes();
    let named = [&enhanced[..], &[1, 3, 0xE0, 0, 0, q0, q1, q2, 0, 0, 0, 0]].concat();
    assert_eq!(
        asked,
        [
            (FLAG_C | FLAG_S | FLAG_UWARP_A | FLAG_UWARP_B, 2, named.clone()),
            // Once more: that it was closed may say nothing of the request.
            (FLAG_C | FLAG_S | FLAG_UWARP_A | FLAG_UWARP_B, 2, named),
            (FLAG_C | FLAG_S, 2, enhanced),
            (FLAG_C, 1, b"hi".to_vec()),
        ]
    );
}

#[test]
fn an_attempt_that_is_given_up_as_it_begins_does_not_go_on() {
    let cm = cm(Timeouts { reply: PATIENCE * 10, ..Timeouts::default() });
    let client = channel();
    let patient = TcpListener::bind(local(0)).unwrap();
    patient.set_nonblocking(true).unwrap();
    for _ in 0..300 {
        let active = resolved(&cm, &client, patient.local_addr().unwrap());
        let other = std::thread::spawn({
            let active = Arc::clone(&active);
            move || while active.disconnect().is_err() {}
        });
        active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
        other.join().unwrap();
        expect(&client, EventKind::ConnectError).acknowledge();
        while let Ok((mut stream, _)) = patient.accept() {
            stream.set_nonblocking(false).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            // A reset would do as well.
            let end = stream.read_to_end(&mut Vec::new());
            assert!(!end.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "it goes on");
        }
        active.destroy();
    }
}

#[test]
fn a_peer_that_always_hangs_up_has_rejected() {
    let cm = cm(Timeouts::default());
    let client = channel();
    let rude = TcpListener::bind(local(0)).unwrap();
    let active = resolved(&cm, &client, rude.local_addr().unwrap());
    active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    // The first request is repeated once: to close a silent connection may say nothing of the request.
    for _ in 0..4 {
        drop(rude.accept().unwrap());
    }
    let event = expect(&client, EventKind::Rejected);
    assert_eq!(event.status, 28);
    event.acknowledge();
}

#[test]
fn garbage_for_a_reply_is_an_error() {
    let cm = cm(Timeouts::default());
    let client = channel();
    let web = TcpListener::bind(local(0)).unwrap();
    let active = resolved(&cm, &client, web.local_addr().unwrap());
    active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    let (mut stream, _) = web.accept().unwrap();
    stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    let event = expect(&client, EventKind::ConnectError);
    assert_eq!(event.status, -rustix::io::Errno::PROTO.raw_os_error());
    event.acknowledge();
}

#[test]
fn a_responder_that_wants_too_much_is_told_with_a_terminate() {
    let cm = cm(Timeouts::default());
    let client = channel();
    let greedy = TcpListener::bind(local(0)).unwrap();
    let active = resolved(&cm, &client, greedy.local_addr().unwrap());
    active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    let (mut stream, _) = greedy.accept().unwrap();
    take_request(&mut stream);
    stream.write_all(&KEY_REP).unwrap();
    stream.write_all(&[FLAG_S, 2, 0, 4, 0x80, 1, 0xBF, 0xFE]).unwrap();
    let mut terminate = Vec::new();
    stream.read_to_end(&mut terminate).unwrap();
    assert_eq!(terminate[..4], [0, 0x16, 0x41, 0x47]);
    assert_eq!(terminate[20..24], [0x20, 6, 0, 0]);
    let event = expect(&client, EventKind::ConnectError);
    assert_eq!(event.status, -rustix::io::Errno::NOMEM.raw_os_error());
    event.acknowledge();
}
