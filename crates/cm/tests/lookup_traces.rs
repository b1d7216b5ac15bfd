//! Golden trace of lookups: what `UWARP_TRACE` shows of them. The program traces one test only, because all
//! threads of a process have one trace.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use uwarp_cm::{Cm, Event, EventChannel, EventKind, Id, Timeouts};
use uwarp_driver::Nic;
use uwarp_rnic::trace::{self, Passing};
use uwarp_wire::datagram::lookup::Request;

/// `RDMA_PS_UDP` on the wire.
const UDP: u16 = 0x0111;
/// Longest the test waits for what has to come; reached only when it fails.
const PATIENCE: Duration = Duration::from_secs(60);

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn expect(channel: &EventChannel, kind: EventKind) -> Event {
    // SAFETY: the channel outlives the borrow.
    let fd = unsafe { BorrowedFd::borrow_raw(channel.fd()) };
    let limit = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)), Ok(1), "no event");
    let event = channel.get().unwrap();
    assert_eq!(event.kind, kind, "{event:?}");
    event
}

/// What was traced: names for addresses, `I` for a random transaction ID. A line that comes again belongs to
/// a Request that was repeated because the machine is busy.
fn traced(server: SocketAddr, stranger: SocketAddr) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    for line in LINES.lock().unwrap().drain(..) {
        let (way, rest) = line.split_once(' ').unwrap();
        let (peer, rest) = rest.split_once(' ').unwrap();
        let peer = match peer.parse::<SocketAddr>().unwrap() {
            at if at == server => "server",
            at if at == stranger => "stranger",
            _ => "client",
        };
        let rest = rest.replace(&format!("port={} ", server.port()), "port=P ");
        let rest = match rest.split_once("id=").and_then(|(head, tail)| Some((head, tail.split_once(' ')?))) {
            Some((head, (id, tail))) if id != "0x9" => format!("{head}id=I {tail}"),
            _ => rest,
        };
        let line = format!("{way} {peer} {rest}");
        if !all.contains(&line) {
            all.push(line);
        }
    }
    all
}

#[test]
fn lookups_and_their_answers_are_traced() {
    trace::start(|passing| {
        if let Passing::Datagram(datagram) = passing {
            LINES.lock().unwrap().push(datagram.to_string());
        }
    });
    let nic = Nic::open().unwrap();
    let cm = Cm::new(&nic, Timeouts { reply: PATIENCE, ..Timeouts::default() });
    let [server, client] = [0, 1].map(|_| EventChannel::new(&nic).unwrap());
    let listener = Id::of_datagrams(&cm, &server, UDP);
    listener.bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    listener.listen(4).unwrap();
    let at = listener.local_address().unwrap();

    let active = Id::of_datagrams(&cm, &client, UDP);
    active.resolve_address(None, at).unwrap();
    expect(&client, EventKind::AddressResolved).acknowledge();
    active.resolve_route().unwrap();
    expect(&client, EventKind::RouteResolved).acknowledge();
    active.look_up(b"question").unwrap();
    let request = expect(&server, EventKind::ConnectRequest);
    let passive = Arc::clone(&request.id);
    request.acknowledge();
    passive.answer(0x12_3456, 0x0123_4567, b"answer").unwrap();
    expect(&client, EventKind::Established).acknowledge();

    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.set_read_timeout(Some(PATIENCE)).unwrap();
    let another = Request { transaction: 9, port_space: 2, service_port: 7, cookie: 5, private_data: b"x" };
    let mut bytes = vec![0; another.buffer_len()];
    another.emit(&mut bytes);
    stranger.send_to(b"abc", at).unwrap();
    stranger.send_to(&bytes, at).unwrap();
    stranger.recv(&mut [0; 256]).unwrap();

    assert_eq!(
        traced(at, stranger.local_addr().unwrap()),
        [
            "-> server Lookup id=I space=0x111 port=P len=8",
            "<- client Lookup id=I space=0x111 port=P len=8",
            "-> client LookupReply id=I success qpn=0x123456 qkey=0x1234567 len=6",
            "<- server LookupReply id=I success qpn=0x123456 qkey=0x1234567 len=6",
            "<- stranger 3 bytes, dropped: malformed",
            "<- stranger Lookup id=0x9 space=0x2 port=7 cookie=0x5 len=1",
            "-> stranger LookupReply id=0x9 unsupported len=0",
        ]
    );
}
