//! Ids of datagrams: lookups and their answers over sockets of this host.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use uwarp_cm::{Cm, CmError, Event, EventChannel, EventKind, Id, State, Timeouts};
use uwarp_driver::Nic;
use uwarp_wire::datagram::Datagram;
use uwarp_wire::datagram::lookup::{Reply, Request, Status};

/// `RDMA_PS_UDP` on the wire.
const UDP: u16 = 0x0111;
/// Longest a test waits for what has to come; reached only when it fails.
const PATIENCE: Duration = Duration::from_secs(60);

fn cm(reply: Duration) -> Arc<Cm> {
    Cm::new(&Nic::open().unwrap(), Timeouts { reply, ..Timeouts::default() })
}

fn channel() -> Arc<EventChannel> {
    EventChannel::new(&Nic::open().unwrap()).unwrap()
}

fn expect(channel: &EventChannel, kind: EventKind) -> Event {
    // SAFETY: the channel outlives the borrow.
    let fd = unsafe { BorrowedFd::borrow_raw(channel.fd()) };
    let limit = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)), Ok(1), "no event");
    let event = channel.get().unwrap();
    assert_eq!(event.kind, kind, "{event:?}");
    event
}

fn serve(cm: &Arc<Cm>, channel: &Arc<EventChannel>, ip: &str) -> (Arc<Id>, SocketAddr) {
    let id = Id::of_datagrams(cm, channel, UDP);
    id.bind(SocketAddr::new(ip.parse::<IpAddr>().unwrap(), 0)).unwrap();
    id.listen(4).unwrap();
    let at = id.local_address().unwrap();
    assert_ne!(at.port(), 0);
    (id, at)
}

fn asking(cm: &Arc<Cm>, channel: &Arc<EventChannel>, server: SocketAddr, data: &[u8]) -> Arc<Id> {
    let id = Id::of_datagrams(cm, channel, UDP);
    id.resolve_address(None, server).unwrap();
    expect(channel, EventKind::AddressResolved).acknowledge();
    id.resolve_route().unwrap();
    expect(channel, EventKind::RouteResolved).acknowledge();
    id.look_up(data).unwrap();
    id
}

#[test]
fn the_answer_names_the_queue_pair() {
    let cm = cm(PATIENCE);
    for ip in ["127.0.0.1", "::1"] {
        let (server, client) = (channel(), channel());
        let (listener, at) = serve(&cm, &server, ip);
        let active = asking(&cm, &client, at, b"question");
        let request = expect(&server, EventKind::ConnectRequest);
        assert_eq!(request.private_data, b"question");
        assert_eq!(request.datagram.as_ref().unwrap().local, at);
        let passive = Arc::clone(&request.id);
        request.acknowledge();
        assert!(matches!(passive.answer(1, 2, &[0; 137]), Err(CmError::Invalid(_))));
        passive.answer(0x12_3456, 0x0123_4567, b"answer").unwrap();
        assert!(matches!(passive.answer(1, 2, &[]), Err(CmError::Invalid(_))), "once");
        let answer = expect(&client, EventKind::Established);
        let datagram = answer.datagram.clone().unwrap();
        assert_eq!((datagram.qpn, datagram.qkey, datagram.peer), (0x12_3456, 0x0123_4567, at));
        assert_eq!((answer.status, &answer.private_data[..]), (0, &b"answer"[..]));
        answer.acknowledge();
        assert_eq!((active.state(), passive.state()), (State::Established, State::Established));
        for id in [active, passive, listener] {
            id.destroy();
        }
    }
}

#[test]
fn a_refusal_and_an_id_given_up_make_the_peer_unreachable() {
    let cm = cm(PATIENCE);
    let (server, client) = (channel(), channel());
    let (_listener, at) = serve(&cm, &server, "127.0.0.1");
    for (explicit, data) in [(true, &b"no"[..]), (false, &[][..])] {
        let _active = asking(&cm, &client, at, &[]);
        let request = expect(&server, EventKind::ConnectRequest);
        let passive = Arc::clone(&request.id);
        request.acknowledge();
        if explicit {
            passive.reject(data).unwrap();
        } else {
            passive.destroy();
        }
        let refused = expect(&client, EventKind::Unreachable);
        assert_eq!((refused.status, &refused.private_data[..]), (2, data));
        refused.acknowledge();
    }
}

#[test]
fn a_port_without_a_listener_and_one_that_is_silent_are_told_apart() {
    // Long enough for a refusal to be believed.
    let cm = cm(Duration::from_secs(4));
    let client = channel();
    // Bound, so that no other program receives there, and connected: it takes datagrams of one peer only.
    let nobody = UdpSocket::bind("127.0.0.1:0").unwrap();
    nobody.connect("127.0.0.1:9").unwrap();
    let _first = asking(&cm, &client, nobody.local_addr().unwrap(), &[]);
    let absent = expect(&client, EventKind::Unreachable);
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let _second = asking(&cm, &client, silent.local_addr().unwrap(), &[]);
    let silence = expect(&client, EventKind::Unreachable);
    assert_eq!(
        (absent.status, silence.status),
        (-Errno::CONNREFUSED.raw_os_error(), -Errno::TIMEDOUT.raw_os_error())
    );
    absent.acknowledge();
    silence.acknowledge();
}

fn request(transaction: u32, port_space: u16) -> Vec<u8> {
    request_with(transaction, port_space, 0)
}

fn request_with(transaction: u32, port_space: u16, cookie: u64) -> Vec<u8> {
    let request = Request { transaction, port_space, service_port: 1, cookie, private_data: b"hi" };
    let mut bytes = vec![0; 256];
    let len = request.emit(&mut bytes);
    bytes.truncate(len);
    bytes
}

/// Status and cookie of the next reply.
fn answered(stranger: &UdpSocket) -> (Status, u64) {
    let mut room = [0; 256];
    let len = stranger.recv(&mut room).unwrap();
    assert!(len <= request(0, UDP).len(), "no answer is longer than its question");
    let reply = Reply::parse(&Datagram::parse(&room[..len]).unwrap()).unwrap();
    (reply.status, reply.cookie)
}

/// A sender with a forged address cannot return the cookie: it costs no event, and no other client is dropped
/// for it.
#[test]
fn a_server_that_is_asked_often_wants_its_cookie_back_before_it_remembers() {
    let cm = cm(PATIENCE);
    let server = channel();
    let (_listener, at) = serve(&cm, &server, "127.0.0.1");
    let [one, other] = [(); 2].map(|()| {
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        stranger.set_read_timeout(Some(PATIENCE)).unwrap();
        stranger
    });
    // Half of the backlog of four.
    let mut asked = Vec::new();
    for transaction in [1, 2] {
        one.send_to(&request(transaction, UDP), at).unwrap();
        asked.push(expect(&server, EventKind::ConnectRequest));
    }
    one.send_to(&request(3, UDP), at).unwrap();
    let (status, cookie) = answered(&one);
    assert_eq!(status, Status::CookieRequired);
    assert_ne!(cookie, 0);
    // For another transaction, of another client, changed.
    for (stranger, transaction, cookie) in [(&one, 4, cookie), (&other, 3, cookie), (&one, 3, cookie ^ 2)] {
        stranger.send_to(&request_with(transaction, UDP, cookie), at).unwrap();
        assert_eq!(answered(stranger).0, Status::CookieRequired);
    }
    one.send_to(&request_with(3, UDP, cookie), at).unwrap();
    asked.push(expect(&server, EventKind::ConnectRequest));
    // Clients of ours bring it back by themselves.
    let client = channel();
    let _id = asking(&cm, &client, at, b"");
    let ours = expect(&server, EventKind::ConnectRequest);
    ours.id.answer(5, 6, b"yes").unwrap();
    expect(&client, EventKind::Established).acknowledge();
    ours.acknowledge();
    asked.into_iter().for_each(uwarp_cm::Event::acknowledge);
}

/// A stranger that speaks by hand: repeated requests get the same answer and are one event; bad ones get
/// none.
#[test]
fn a_repeated_request_is_one_question() {
    let cm = cm(PATIENCE);
    let server = channel();
    let (_listener, at) = serve(&cm, &server, "127.0.0.1");
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.set_read_timeout(Some(PATIENCE)).unwrap();
    let good = request(7, UDP);
    let mut bad = good.clone();
    bad[60] ^= 1;
    for bytes in [&bad[..], &good[..30], b"noise", &[], &good, &good, &good] {
        stranger.send_to(bytes, at).unwrap();
    }
    let asked = expect(&server, EventKind::ConnectRequest);
    asked.id.answer(5, 6, b"yes").unwrap();
    asked.acknowledge();
    stranger.send_to(&good, at).unwrap();
    let mut room = [0; 256];
    for _ in 0..2 {
        let len = stranger.recv(&mut room).unwrap();
        assert!(len <= good.len(), "no answer is longer than its question");
        let datagram = Datagram::parse(&room[..len]).unwrap();
        let reply = Reply::parse(&datagram).unwrap();
        assert!(datagram.is_intact());
        assert_eq!((reply.transaction, reply.status, reply.qpn, reply.qkey), (7, Status::Success, 5, 6));
    }
    stranger.send_to(&request(8, 2), at).unwrap();
    // A repeated request that was read only after the answer has its own answer in front of this one.
    let unsupported = loop {
        let len = stranger.recv(&mut room).unwrap();
        let reply = Reply::parse(&Datagram::parse(&room[..len]).unwrap()).unwrap();
        if reply.transaction == 8 {
            break reply.status;
        }
        assert_eq!((reply.transaction, reply.status), (7, Status::Success));
    };
    assert_eq!(unsupported, Status::Unsupported);
}

#[test]
fn an_id_that_joins_a_group_gets_it_by_event() {
    let cm = cm(PATIENCE);
    let channel = channel();
    let (id, at) = serve(&cm, &channel, "127.0.0.1");
    let group: SocketAddr = "239.1.2.3:0".parse().unwrap();
    id.join(group, 77).unwrap();
    let joined = expect(&channel, EventKind::MulticastJoin);
    let datagram = joined.datagram.clone().unwrap();
    assert_eq!((datagram.qpn, datagram.peer, datagram.local, datagram.context), (0xFF_FFFF, group, at, 77));
    joined.acknowledge();
    assert!(matches!(Id::new(&cm, &channel).join(group, 0), Err(CmError::Invalid(_))));
}
