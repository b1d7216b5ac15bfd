//! Calls that this host refuses, not the peer: afterwards the id is what it was, and nothing is left behind.

mod common;
#[path = "common/refusing.rs"]
mod refusing;

use std::hash::RandomState;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uwarp_cm::{Cm, CmError, ConnParam, EventChannel, EventKind, Id, State, Timeouts};
use uwarp_driver::Nic;
use uwarp_rnic::mr::random_u32;

use common::qp;
use refusing::refuse;

/// `RDMA_PS_UDP` on the wire.
const UDP: u16 = 0x0111;
/// Longest a test waits for what has to come; reached only when it fails.
const PATIENCE: Duration = Duration::from_secs(60);

const HERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

fn cm() -> (Arc<Cm>, Arc<EventChannel>) {
    let cm = Cm::new(&Nic::open().unwrap(), Timeouts::default());
    let channel = EventChannel::new(cm.nic()).unwrap();
    (cm, channel)
}

/// Runs a call in a thread in which the system refuses `call`.
fn while_refused<T: Send>(call: libc::c_long, errno: libc::c_int, run: impl FnOnce() -> T + Send) -> T {
    // The standard library's hash maps and the driver's keys begin with random numbers, once a process.
    let _ = (RandomState::new(), random_u32().unwrap());
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let _ = RandomState::new();
            refuse(call, errno);
            run()
        });
        thread.join().unwrap()
    })
}

fn resolve(id: &Id, channel: &EventChannel, peer: SocketAddr) {
    id.resolve_address(None, peer).unwrap();
    id.resolve_route().unwrap();
    for kind in [EventKind::AddressResolved, EventKind::RouteResolved] {
        let event = channel.get().unwrap();
        assert_eq!(event.kind, kind);
        event.acknowledge();
    }
}

/// The socket went with the first attempt, and its port with it: the second one came from another port.
#[test]
fn an_id_whose_connect_is_refused_here_keeps_its_port() {
    let (cm, channel) = cm();
    let peer = TcpListener::bind(HERE).unwrap();
    let id = Id::new(&cm, &channel);
    id.bind(HERE).unwrap();
    let bound = id.local_address().unwrap();
    resolve(&id, &channel, peer.local_addr().unwrap());
    let qp = qp();
    let refused =
        while_refused(libc::SYS_epoll_ctl, libc::ENOSPC, || id.connect(&qp, ConnParam::DEFAULT, b""));
    assert!(matches!(refused, Err(CmError::System(_))), "{refused:?}");
    assert_eq!(id.state(), State::RouteResolved);
    // What the first attempt left, if it came that far.
    peer.set_nonblocking(true).unwrap();
    while peer.accept().is_ok() {}
    id.connect(&qp, ConnParam::DEFAULT, b"").unwrap();
    let begin = Instant::now();
    let from = loop {
        match peer.accept() {
            Ok((_, from)) => break from,
            Err(_) => std::thread::yield_now(),
        }
        assert!(begin.elapsed() < PATIENCE, "no connection");
    };
    assert_eq!(from, bound, "the program has told its peers this port");
    id.destroy();
}

/// It was as new, so the next `listen` bound it to another port.
#[test]
fn an_id_of_datagrams_that_may_not_listen_is_still_bound() {
    let (cm, channel) = cm();
    let id = Id::of_datagrams(&cm, &channel, UDP);
    id.bind(HERE).unwrap();
    let bound = id.local_address();
    let refused = while_refused(libc::SYS_epoll_ctl, libc::ENOSPC, || id.listen(4));
    assert!(matches!(refused, Err(CmError::System(_))), "{refused:?}");
    assert_eq!(id.state(), State::Bound);
    id.listen(4).unwrap();
    assert_eq!((id.state(), id.local_address()), (State::Listening, bound));
    id.destroy();
}

#[test]
fn an_id_that_may_not_listen_is_still_bound() {
    let (cm, channel) = cm();
    let id = Id::new(&cm, &channel);
    id.bind(HERE).unwrap();
    let bound = id.local_address();
    let refused = while_refused(libc::SYS_epoll_ctl, libc::ENOSPC, || id.listen(4));
    assert!(matches!(refused, Err(CmError::System(_))), "{refused:?}");
    assert_eq!(id.state(), State::Bound);
    id.listen(4).unwrap();
    assert_eq!((id.state(), id.local_address()), (State::Listening, bound));
    id.destroy();
}

/// How many sockets of this host are connected to a UDP port of loopback.
fn connected_to(port: u16) -> usize {
    let peer = format!("0100007F:{port:04X}");
    let sockets = std::fs::read_to_string("/proc/self/net/udp").unwrap();
    sockets.lines().filter(|line| line.split_whitespace().nth(2) == Some(&peer)).count()
}

/// The engine kept it, and its socket: nothing deregistered what had failed behind its registration.
#[test]
fn a_lookup_without_random_numbers_leaves_no_socket() {
    let (cm, channel) = cm();
    let server = UdpSocket::bind(HERE).unwrap();
    let at = server.local_addr().unwrap();
    let id = Id::of_datagrams(&cm, &channel, UDP);
    resolve(&id, &channel, at);
    let refused = while_refused(libc::SYS_getrandom, libc::EIO, || id.look_up(b""));
    assert!(matches!(refused, Err(CmError::Verbs(_))), "{refused:?}");
    assert_eq!(connected_to(at.port()), 0);
    // The id is as before.
    id.look_up(b"").unwrap();
    assert_eq!(connected_to(at.port()), 1);
    id.destroy();
    assert_eq!(connected_to(at.port()), 0);
}
