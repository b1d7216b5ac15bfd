//! Listeners: half-open connections, floods, and the backlog.

use rustix::net::{AddressFamily, SocketType};
use uwarp_proto::setup::{Depths, Initiator, InitiatorConfig, PeerData, Revision};
use uwarp_wire::crc::{crc32c, to_wire};

use super::*;

#[test]
fn half_open_connections_end_after_their_time() {
    let cm = cm(quick());
    let server = channel();
    let listener = listening(&cm, &server, local(0), 0);
    let mut silent = TcpStream::connect(listener.local_address().unwrap()).unwrap();
    silent.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(silent.read(&mut [0; 1]).unwrap(), 0);
    assert!(server.is_empty());
}

#[test]
fn strangers_that_do_not_speak_mpa_are_turned_away_at_once() {
    let cm = cm(Timeouts { request: PATIENCE * 10, ..Timeouts::default() });
    let server = channel();
    let listener = listening(&cm, &server, local(0), 0);
    let mut web = TcpStream::connect(listener.local_address().unwrap()).unwrap();
    web.set_read_timeout(Some(PATIENCE)).unwrap();
    web.write_all(b"GET /").unwrap();
    // An end of file or a reset, depending on what the kernel still held.
    assert!(matches!(web.read(&mut [0; 1]), Ok(0) | Err(_)));
    assert!(server.is_empty());
}

#[test]
fn a_flood_of_half_open_connections_does_not_keep_honest_peers_out() {
    let cm = cm(Timeouts { request: PATIENCE * 10, ..Timeouts::default() });
    let (server, client) = (channel(), channel());
    let listener = listening(&cm, &server, local(0), 4);
    let at = listener.local_address().unwrap();
    let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let descriptors = descriptors.map_or(usize::MAX, |descriptors| descriptors as usize);
    let more = Budget::of_descriptors(descriptors) + 40;
    let flood: Vec<TcpStream> = (0..more).map(|_| TcpStream::connect(at).unwrap()).collect();
    let active = resolved(&cm, &client, at);
    active.connect(&qp(), ConnParam::DEFAULT, b"honest").unwrap();
    let request = expect(&server, EventKind::ConnectRequest);
    assert_eq!(request.private_data, b"honest");
    let passive = Arc::clone(&request.id);
    request.acknowledge();
    let mut oldest = flood.into_iter().next().unwrap();
    oldest.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(oldest.read(&mut [0; 1]).unwrap(), 0, "the oldest has gone");
    passive.destroy();
    expect(&client, EventKind::Rejected).acknowledge();
}

/// A program may start all of its connections before it looks at the first event: its kernel has connected
/// them long before they have sent their requests.
#[test]
fn hundreds_of_connections_begun_at_once_are_no_flood() {
    const CLIENTS: usize = 400;
    let cm = cm(Timeouts { request: PATIENCE * 10, ..Timeouts::default() });
    let (server, client) = (channel(), channel());
    let listener = listening(&cm, &server, local(0), 0);
    let at = listener.local_address().unwrap();
    let actives: Vec<_> = (0..CLIENTS).map(|_| resolved(&cm, &client, at)).collect();
    for active in &actives {
        active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    }
    let passives: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let event = expect(&server, EventKind::ConnectRequest);
            let passive = Arc::clone(&event.id);
            event.acknowledge();
            passive
        })
        .collect();
    assert!(client.is_empty(), "nobody was turned away");
    passives.iter().for_each(|passive| passive.destroy());
    actives.iter().for_each(|active| active.destroy());
}

/// The socket was gone with the attempt: the id was idle, and its port was anybody's.
#[test]
fn an_id_that_may_not_listen_stays_bound() {
    use rustix::net::{AddressFamily, SocketType, bind, listen, socket, sockopt::set_socket_reuseaddr};
    let cm = cm(Timeouts::default());
    let id = Id::new(&cm, &channel());
    id.set_options(|_, options| {
        options.reuseaddr = true;
        Ok(())
    })
    .unwrap();
    id.bind(local(0)).unwrap();
    let address = id.local_address().unwrap();
    let other = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    set_socket_reuseaddr(&other, true).unwrap();
    bind(&other, &address).unwrap();
    listen(&other, 1).unwrap();
    assert!(id.listen(1).is_err());
    assert_eq!((id.state(), id.local_address()), (State::Bound, Some(address)));
    drop(other);
    id.listen(1).unwrap();
    TcpStream::connect(address).unwrap();
    id.destroy();
}

/// The request counted as answered, and its peer's next one waited 200 ms for the end of that. (So one of
/// another peer, which came last, was reported before it.)
#[test]
fn an_accept_that_is_refused_for_its_arguments_keeps_nobody_waiting() {
    let cm = cm(Timeouts::default());
    let (server, client) = (channel(), channel());
    let listener = listening(&cm, &server, "0.0.0.0:0".parse().unwrap(), 0);
    let at = local(listener.local_address().unwrap().port());
    let first = resolved(&cm, &client, at);
    first.connect(&qp(), ConnParam::DEFAULT, b"first").unwrap();
    let passive = requested(&server);
    let refused = passive.accept(&qp(), None, &[0; 1000]);
    assert!(matches!(refused, Err(CmError::Invalid(_))), "{refused:?}");
    let second = resolved(&cm, &client, at);
    second.connect(&qp(), ConnParam::DEFAULT, b"second").unwrap();
    let other = Id::new(&cm, &client);
    other.resolve_address(Some(SocketAddr::from(([127, 0, 0, 2], 0))), at).unwrap();
    expect(&client, EventKind::AddressResolved).acknowledge();
    other.resolve_route().unwrap();
    expect(&client, EventKind::RouteResolved).acknowledge();
    other.connect(&qp(), ConnParam::DEFAULT, b"other").unwrap();
    for data in [&b"second"[..], b"other"] {
        let request = expect(&server, EventKind::ConnectRequest);
        assert_eq!(request.private_data, data);
        let passive = Arc::clone(&request.id);
        request.acknowledge();
        passive.destroy();
    }
    passive.accept(&qp(), None, b"").unwrap();
    [first, second, other].iter().for_each(|id| id.destroy());
    passive.destroy();
}

#[test]
fn requests_beyond_the_backlog_wait_and_are_not_lost() {
    const CLIENTS: usize = 12;
    let cm = cm(Timeouts::default());
    let (server, client) = (channel(), channel());
    let listener = listening(&cm, &server, local(0), 2);
    let at = listener.local_address().unwrap();
    let actives: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let active = resolved(&cm, &client, at);
            active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
            active
        })
        .collect();
    let mut passives = Vec::new();
    for _ in 0..CLIENTS {
        let mut event = next(&server);
        while event.kind == EventKind::Established {
            event.acknowledge();
            event = next(&server);
        }
        assert_eq!(event.kind, EventKind::ConnectRequest);
        let passive = Arc::clone(&event.id);
        event.acknowledge();
        let qp = qp();
        passive.accept(&qp, None, b"").unwrap();
        passives.push((passive, qp));
    }
    for _ in 0..CLIENTS {
        expect(&client, EventKind::Established).acknowledge();
    }
    for active in actives {
        active.destroy();
    }
}

#[test]
fn destroying_a_listener_rejects_what_nobody_has_seen() {
    let cm = cm(Timeouts::default());
    let (server, client) = (channel(), channel());
    let listener = listening(&cm, &server, local(0), 0);
    let active = resolved(&cm, &client, listener.local_address().unwrap());
    active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    // Wait until the request is queued, and leave it there.
    while server.is_empty() {
        std::thread::yield_now();
    }
    listener.destroy();
    expect(&client, EventKind::Rejected).acknowledge();
    assert!(server.is_empty());
}

/// A shared channel reported the second request first: the indication and the request are bytes on two
/// sockets. Programs that wait for ESTABLISHED then take it for an error (libfabric's fi_multi_ep).
#[test]
fn a_peers_next_request_is_reported_after_its_connection_is_established() {
    let cm = cm(Timeouts::default());
    let server = channel();
    let listener = listening(&cm, &server, local(0), 0);
    let address = listener.local_address().unwrap();
    // Enhanced, peer-to-peer, a Write as the indication.
    let request = [0x50, 2, 0, 4, 0x80, 0, 0x80, 0];
    let mut indication = vec![0, 14, 0xC1, 0x40, 0, 0, 0, 1];
    indication.resize(16, 0);
    indication.extend(to_wire(crc32c(&indication)));
    for _ in 0..50 {
        let mut first = stranger(address, &request);
        let passive = requested(&server);
        let passive_qp = qp();
        passive.accept(&passive_qp, None, b"").unwrap();
        let mut reply = [0; 20 + 4];
        first.read_exact(&mut reply).unwrap();
        let _second = stranger(address, &request);
        std::thread::sleep(Duration::from_millis(1));
        first.write_all(&indication).unwrap();
        expect(&server, EventKind::Established).acknowledge();
        let refused = requested(&server);
        refused.reject(b"").unwrap();
        [passive, refused].iter().for_each(|id| id.destroy());
        passive_qp.destroy();
    }
    listener.destroy();
}

/// A peer that never completes its connection must not hold up its next one for long.
#[test]
fn a_peer_without_an_indication_delays_its_next_request_and_no_more() {
    let cm = cm(Timeouts::default());
    let server = channel();
    let listener = listening(&cm, &server, local(0), 0);
    let address = listener.local_address().unwrap();
    let request = [0x50, 2, 0, 4, 0x80, 0, 0x80, 0];
    let mut first = stranger(address, &request);
    let passive = requested(&server);
    let passive_qp = qp();
    passive.accept(&passive_qp, None, b"").unwrap();
    first.read_exact(&mut [0; 20 + 4]).unwrap();
    let _second = stranger(address, &request);
    let second = requested(&server);
    [second, passive, listener].iter().for_each(|id| id.destroy());
    passive_qp.destroy();
}

/// A request of the process at this port, as an end of uwarp makes it, from an address of loopback.
fn request_of(port: u32, from: [u8; 4], to: SocketAddr) -> TcpStream {
    let config = InitiatorConfig {
        revision: Revision::Two,
        crc: true,
        markers: false,
        depths: Depths::negotiated(4, 4),
        max_ird: 4,
        peer: Some(PeerData { qpn: port << 8 | 1, ..PeerData::new() }),
        peer_in_request: true,
    };
    let request = Initiator::new(config, b"").unwrap().poll_transmit().unwrap();
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((from, 0))).unwrap();
    rustix::net::connect(&socket, &to).unwrap();
    let mut stream = TcpStream::from(socket);
    stream.write_all(&request).unwrap();
    stream
}

/// Each connection of a host that was accepted and never completed delayed all requests of that host, from
/// whichever process, by a fifth of a second. Others passed them meanwhile.
#[test]
fn a_process_that_never_completes_its_connection_does_not_delay_those_beside_it() {
    let cm = cm(Timeouts::default());
    let server = channel();
    let listener = listening(&cm, &server, local(0), 0);
    let address = listener.local_address().unwrap();
    for round in 0..5 {
        let silent = request_of(1000, [127, 0, 0, 1], address);
        let accepted = requested(&server);
        let queue_pair = qp();
        accepted.accept(&queue_pair, None, b"").unwrap();
        let beside = request_of(2000, [127, 0, 0, 1], address);
        // It is complete when the next one comes, and would be reported.
        std::thread::sleep(Duration::from_millis(20));
        let elsewhere = request_of(3000, [127, 0, 0, 2], address);
        let order = [requested(&server), requested(&server)];
        let expected = [&beside, &elsewhere].map(|stream| stream.local_addr().ok());
        assert_eq!(order.each_ref().map(|id| id.peer_address()), expected, "round {round}");
        order.iter().chain([&accepted]).for_each(|id| id.destroy());
        queue_pair.destroy();
        drop(silent);
    }
    listener.destroy();
}
