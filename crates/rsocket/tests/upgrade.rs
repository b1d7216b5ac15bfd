//! Sockets of the kernel that are upgraded in place: two ends of this library, and peers that close, stop or
//! lie at each step.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use uwarp_proto::setup::{
    AcceptParams, Depths, Initiator, InitiatorConfig, PeerData, Responder, ResponderPolicy, Revision,
};
use uwarp_rsocket::socket::{Flags, How};
use uwarp_rsocket::upgrade::{Patience, Role, Terms, Upgraded};
use uwarp_rsocket::{Errno, MemSeg};

/// A bound of hangs.
const LONG: Duration = Duration::from_secs(120);
/// A limit that a test waits for.
const SHORT: Duration = Duration::from_millis(150);

fn patient() -> Patience {
    Patience::Limit(LONG)
}

fn tcp_of(address: SocketAddr) -> [TcpStream; 2] {
    let listener = TcpListener::bind(address).unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [client, listener.accept().unwrap().0]
}

fn tcp() -> [TcpStream; 2] {
    tcp_of((Ipv4Addr::LOCALHOST, 0).into())
}

/// An upgraded socket, with the program's descriptor.
struct End {
    socket: Arc<Upgraded>,
    tcp: TcpStream,
}

impl End {
    fn begin(tcp: TcpStream, terms: &Terms<'_>) -> Self {
        Self { socket: Upgraded::begin(tcp.as_fd(), terms).unwrap(), tcp }
    }

    fn up(&self) {
        self.socket.wait_until_up(patient).unwrap();
    }

    fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let seg = MemSeg { addr: bytes.as_ptr().expose_provenance() as u64, len: bytes.len() };
        self.socket.send(&[seg], Flags::default(), patient)
    }

    fn receive(&self, len: usize) -> Result<Vec<u8>, Errno> {
        self.receive_as(len, Flags::default(), patient)
    }

    fn receive_as(&self, len: usize, flags: Flags, patience: fn() -> Patience) -> Result<Vec<u8>, Errno> {
        let mut buffer = vec![0; len];
        let seg = MemSeg { addr: buffer.as_mut_ptr().expose_provenance() as u64, len };
        let received = self.socket.receive(&[seg], flags, patience)?;
        buffer.truncate(received);
        Ok(buffer)
    }

    fn all(&self) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let some = self.receive(1 << 16).unwrap();
            if some.is_empty() {
                return all;
            }
            all.extend(some);
        }
    }
}

fn pair_of([client, server]: [TcpStream; 2]) -> [End; 2] {
    let terms = |role| Terms { limit: LONG, ..Terms::new(role) };
    let ends = [End::begin(client, &terms(Role::Initiator)), End::begin(server, &terms(Role::Responder))];
    ends.iter().for_each(End::up);
    ends
}

fn pair() -> [End; 2] {
    pair_of(tcp())
}

/// Bytes that tell their place.
fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 31 + i / 251 + seed) % 251) as u8).collect()
}

/// What an upgrade in this role, whose peer does this, comes to.
fn outcome(role: Role, limit: Duration, peer: impl FnOnce(TcpStream) -> Option<TcpStream>) -> Errno {
    let [ours, theirs] = tcp();
    let end = End::begin(ours, &Terms { limit, ..Terms::new(role) });
    // Held, so that it is not closed where that is not what the peer does.
    let _held = peer(theirs);
    let why = end.socket.wait_until_up(patient).unwrap_err();
    // It was said. From now on there is just no stream, and nobody waits for one.
    assert_eq!(end.receive(1), Err(Errno::NOTCONN));
    assert_eq!(end.send(b"x"), Err(Errno::NOTCONN));
    why
}

const PEER: PeerData = PeerData::new();
const PRIVATE: [u8; 40] = {
    // Version 1, four credits, a table of two targets and a ring somewhere.
    let mut bytes = [0; 40];
    (bytes[0], bytes[3], bytes[23], bytes[38]) = (1, 4, 2, 1);
    bytes
};

fn request(private_data: &[u8]) -> Vec<u8> {
    let config = InitiatorConfig {
        revision: Revision::Two,
        crc: true,
        markers: false,
        depths: Depths::negotiated(1, 1),
        max_ird: 1,
        peer: None,
        peer_in_request: false,
    };
    Initiator::new(config, private_data).unwrap().poll_transmit().unwrap()
}

/// Reads a request and answers it.
fn reply(peer: &mut TcpStream, decide: impl FnOnce(&mut Responder)) -> Vec<u8> {
    let mut responder = Responder::new(ResponderPolicy {
        max_revision: Revision::Two,
        crc: true,
        markers: false,
        know_peers: false,
        max_ird: 1,
        host: None,
    });
    let mut buffer = [0; 512];
    loop {
        let want = responder.want();
        let received = peer.read(&mut buffer[..want]).unwrap();
        if responder.handle_input(&buffer[..received]).unwrap().is_some() {
            break;
        }
    }
    decide(&mut responder);
    responder.poll_transmit().unwrap()
}

fn accept(private_data: &[u8]) -> impl FnOnce(&mut Responder) {
    move |responder| {
        let params = AcceptParams { depths: Depths::negotiated(1, 1), peer: PEER };
        responder.accept(params, private_data).unwrap();
    }
}

fn reset(peer: TcpStream) {
    rustix::net::sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
    drop(peer);
}

#[test]
fn bytes_flow_in_both_directions_at_once_over_both_families() {
    for address in [(Ipv4Addr::LOCALHOST, 0).into(), (Ipv6Addr::LOCALHOST, 0).into()] {
        let ends = pair_of(tcp_of(address));
        std::thread::scope(|scope| {
            for (i, end) in ends.iter().enumerate() {
                scope.spawn(move || {
                    assert_eq!(end.send(&pattern(3 << 20, i)), Ok(3 << 20));
                    end.socket.shutdown(How::Writing).unwrap();
                });
                scope.spawn(move || assert!(end.all() == pattern(3 << 20, 1 - i)));
            }
        });
    }
}

#[test]
fn each_end_gets_the_others_private_data() {
    let [client, server] = tcp();
    let long = pattern(uwarp_rsocket::upgrade::MAX_PRIVATE_DATA, 3);
    let client = End::begin(client, &Terms { private_data: &long, ..Terms::new(Role::Initiator) });
    let server = End::begin(server, &Terms { private_data: b"", ..Terms::new(Role::Responder) });
    client.up();
    server.up();
    assert_eq!((client.socket.peer_data(), server.socket.peer_data()), (vec![], long.clone()));
    let too_long = [long, vec![0]].concat();
    let [tcp, _other] = tcp();
    let terms = Terms { private_data: &too_long, ..Terms::new(Role::Initiator) };
    assert_eq!(Upgraded::begin(tcp.as_fd(), &terms).err(), Some(Errno::INVAL));
}

#[test]
fn a_call_that_must_not_wait_does_not_wait_for_set_up() {
    let [client, server] = tcp();
    let client = End::begin(client, &Terms::new(Role::Initiator));
    assert_eq!(client.socket.wait_until_up(|| Patience::None), Err(Errno::AGAIN));
    assert_eq!(client.receive_as(1, Flags::default(), || Patience::None), Err(Errno::AGAIN));
    assert!(!client.socket.readiness().writable);
    let server = End::begin(server, &Terms::new(Role::Responder));
    // A call that may wait waits for both: set-up and data.
    assert_eq!(server.send(b"first"), Ok(5));
    assert_eq!(client.receive(5), Ok(b"first".to_vec()));
    assert!(client.socket.readiness().writable);
    let peek = Flags { peek: true, ..Flags::default() };
    assert_eq!(client.send(b"second"), Ok(6));
    assert_eq!(server.receive_as(3, peek, patient), Ok(b"sec".to_vec()));
    assert_eq!((server.socket.unread(), server.receive(9)), (6, Ok(b"second".to_vec())));
}

/// Its request goes out behind them, when there is room.
#[test]
fn an_end_may_have_left_its_socket_full_of_plain_bytes() {
    let [mut client, mut server] = tcp();
    client.set_nonblocking(true).unwrap();
    let mut plain = 0;
    while let Ok(written) = client.write(&[7; 1 << 16]) {
        plain += written;
    }
    let client = End::begin(client, &Terms { limit: LONG, ..Terms::new(Role::Initiator) });
    let mut bytes = vec![0; plain];
    server.read_exact(&mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7));
    let server = End::begin(server, &Terms { limit: LONG, ..Terms::new(Role::Responder) });
    assert_eq!(client.send(b"now"), Ok(3));
    assert_eq!(server.receive(3), Ok(b"now".to_vec()));
}

#[test]
fn only_connected_tcp_sockets_are_upgraded() {
    let begin =
        |socket: std::os::fd::BorrowedFd<'_>| Upgraded::begin(socket, &Terms::new(Role::Initiator)).err();
    let udp = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    assert_eq!(begin(udp.as_fd()), Some(Errno::OPNOTSUPP));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    assert_eq!(begin(listener.as_fd()), Some(Errno::NOTCONN));
    let (local, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_eq!(begin(local.as_fd()), Some(Errno::OPNOTSUPP));
    assert_eq!(begin(std::fs::File::open("/dev/null").unwrap().as_fd()), Some(Errno::NOTSOCK));
}

#[test]
fn a_peer_that_closes_during_set_up_is_an_error_at_once() {
    let request = request(&PRIVATE);
    for sent in [0, 1, 19, 20, 30, request.len()] {
        let part = &request[..sent];
        for how in [reset as fn(TcpStream), drop] {
            let why = outcome(Role::Responder, LONG, |mut peer| {
                peer.write_all(part).unwrap();
                how(peer);
                None
            });
            assert_eq!(why, Errno::CONNRESET, "the responder's peer sent {sent} bytes");
        }
    }
    for sent in [0, 1, 20, 30] {
        for how in [reset as fn(TcpStream), drop] {
            let why = outcome(Role::Initiator, LONG, |mut peer| {
                let reply = reply(&mut peer, accept(&PRIVATE));
                peer.write_all(&reply[..sent]).unwrap();
                how(peer);
                None
            });
            assert_eq!(why, Errno::CONNRESET, "the initiator's peer sent {sent} bytes");
        }
    }
}

#[test]
fn a_peer_that_stops_during_set_up_is_not_waited_for_for_ever() {
    let request = request(&PRIVATE);
    for sent in [0, 1, 20, request.len()] {
        let part = &request[..sent];
        let why = outcome(Role::Responder, SHORT, |mut peer| {
            peer.write_all(part).unwrap();
            Some(peer)
        });
        assert_eq!(why, Errno::TIMEDOUT, "{sent} bytes");
    }
    for sent in [0, 1, 20] {
        let why = outcome(Role::Initiator, SHORT, |mut peer| {
            let reply = reply(&mut peer, accept(&PRIVATE));
            peer.write_all(&reply[..sent]).unwrap();
            Some(peer)
        });
        assert_eq!(why, Errno::TIMEDOUT, "{sent} bytes");
    }
}

#[test]
fn a_peer_that_does_not_speak_mpa_or_not_this_is_an_error() {
    let say = |role, bytes: Vec<u8>| {
        outcome(role, LONG, |mut peer| {
            peer.write_all(&bytes).unwrap();
            Some(peer)
        })
    };
    let http = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec();
    assert_eq!(say(Role::Responder, http.clone()), Errno::PROTO);
    assert_eq!(say(Role::Initiator, http), Errno::PROTO);
    // Both ends initiate.
    assert_eq!(say(Role::Initiator, request(&PRIVATE)), Errno::PROTO);
    // An iWARP end, but nothing that knows how bytes travel here.
    assert_eq!(say(Role::Responder, request(b"another protocol")), Errno::CONNREFUSED);
    assert_eq!(say(Role::Responder, request(&[9; 40])), Errno::CONNREFUSED);
    let answer = |decide: fn(&mut Responder)| {
        outcome(Role::Initiator, LONG, |mut peer| {
            let reply = reply(&mut peer, decide);
            peer.write_all(&reply).unwrap();
            Some(peer)
        })
    };
    assert_eq!(answer(|responder| accept(b"")(responder)), Errno::CONNREFUSED);
    assert_eq!(answer(|responder| responder.reject(b"no").unwrap()), Errno::CONNREFUSED);
}

/// A responder's reply ends set-up for the initiator; what follows is the stream's.
#[test]
fn a_peer_that_lies_after_set_up_ends_the_stream_and_nothing_else() {
    for (lie, expected) in [
        // A length that never comes, as of a process that was killed in the middle of an FPDU.
        (vec![0xFF; 7], Errno::CONNRESET),
        // An FPDU with a wrong CRC.
        (vec![0; 64], Errno::PROTO),
        (pattern(4000, 1), Errno::PROTO),
    ] {
        let [ours, mut theirs] = tcp();
        let end = End::begin(ours, &Terms::new(Role::Initiator));
        let reply = reply(&mut theirs, accept(&PRIVATE));
        theirs.write_all(&reply).unwrap();
        end.up();
        theirs.write_all(&lie).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(end.receive(1), Err(expected), "{lie:?}");
        assert_eq!(end.receive(1), Ok(vec![]));
        assert!(matches!(end.send(b"x"), Err(Errno::CONNRESET | Errno::PIPE)));
        assert!(end.socket.readiness().hangup);
    }
}

#[test]
fn each_direction_ends_by_itself() {
    let [client, server] = pair();
    assert_eq!(client.send(b"last words"), Ok(10));
    client.socket.shutdown(How::Writing).unwrap();
    assert_eq!(client.send(b"x"), Err(Errno::PIPE));
    assert_eq!(server.all(), b"last words");
    assert!(server.socket.readiness().peer_done && !server.socket.readiness().hangup);
    assert_eq!(server.send(b"go on"), Ok(5));
    server.socket.shutdown(How::Writing).unwrap();
    assert_eq!(client.all(), b"go on");
    assert!(client.socket.readiness().hangup);
}

#[test]
fn what_was_sent_before_a_close_arrives() {
    let [client, server] = pair();
    // More than one message, and no more than the peer's buffer, which nobody reads yet.
    let bytes = pattern(120_000, 5);
    assert_eq!(client.send(&bytes), Ok(bytes.len()));
    client.socket.close(None);
    // The program's descriptor, too.
    drop(client);
    assert!(server.all() == bytes);
    assert_eq!(server.send(b"x"), Err(Errno::CONNRESET));
}

/// To a peer that does not read while the close waits.
#[test]
fn a_close_that_stops_waiting_loses_nothing() {
    use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    // Less than is sent, at both ends.
    set_socket_recv_buffer_size(&listener, 4096).unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    set_socket_send_buffer_size(&ours, 4096).unwrap();
    let mut theirs = listener.accept().unwrap().0;
    theirs.set_read_timeout(Some(LONG)).unwrap();
    let end = End::begin(ours, &Terms { limit: LONG, ..Terms::new(Role::Initiator) });
    // A hundred credits, and a ring of 128 KiB.
    let mut private = PRIVATE;
    (private[3], private[37]) = (100, 2);
    let reply = reply(&mut theirs, accept(&private));
    theirs.write_all(&reply).unwrap();
    end.up();
    assert_eq!(end.send(&pattern(100_000, 2)), Ok(100_000));
    end.socket.close(Some(SHORT));
    drop(end);
    // Not to the end: this peer does not answer, and the close goes on until it does.
    let mut all = vec![0; 100_000];
    theirs.read_exact(&mut all).unwrap();
}

#[test]
fn a_close_ends_calls_that_wait() {
    let [client, _server] = pair();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| client.receive(1));
        while client.socket.is_idle() {
            std::thread::yield_now();
        }
        client.socket.close(None);
        assert_eq!(waits.join().unwrap(), Err(Errno::BADF));
    });
}

/// While another thread closes the socket, or makes the same.
#[test]
fn what_is_made_too_late_of_a_queue_pair_is_unmade() {
    let [client, server] = pair();
    let never = |_: usize| panic!("nothing else was made");
    assert_eq!(client.socket.handle(|| Ok::<_, Errno>(1), never), Ok(1));
    assert_eq!(client.socket.handle(|| panic!("it is made"), never), Ok::<_, Errno>(1));
    let mut unmade = 0;
    let second = server.socket.handle(
        || {
            assert_eq!(server.socket.handle(|| Ok::<_, Errno>(3), never), Ok(3));
            Ok::<_, Errno>(4)
        },
        |made| unmade = made,
    );
    assert_eq!((second, unmade), (Ok(3), 4));
    assert_eq!(server.socket.take_handle(), Some(3));
    let [client, _server] = pair();
    let late = client.socket.handle(
        || {
            assert_eq!(client.socket.take_handle(), None);
            client.socket.close(None);
            Ok::<_, Errno>(5)
        },
        |made| unmade = made,
    );
    assert_eq!((late, unmade), (Err(Errno::BADF), 5));
    assert_eq!(client.socket.handle(|| panic!("it is closed"), never), Err(Errno::BADF));
}

/// Another thread may close a socket between the two steps of its upgrade.
#[test]
fn a_socket_that_is_closed_before_its_upgrade_starts_has_no_stream() {
    let [client, mut server] = tcp();
    let terms = Terms::new(Role::Initiator);
    let early = Upgraded::prepare(client.as_fd(), &terms).unwrap();
    early.close(None);
    assert_eq!(early.start(client.as_fd(), &terms), Err(Errno::BADF));
    assert_eq!(early.wait_until_up(patient), Err(Errno::BADF));
    drop((early, client));
    server.set_read_timeout(Some(LONG)).unwrap();
    // The end, possibly behind a request.
    server.read_to_end(&mut Vec::new()).unwrap();
}

/// The kernel's descriptor is still its socket.
#[test]
fn the_descriptor_stays_the_kernels() {
    let [client, server] = tcp();
    let (own, peer) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
    client.set_nonblocking(false).unwrap();
    let ends = pair_of([client, server]);
    assert_eq!(ends[0].tcp.local_addr().unwrap(), own);
    assert_eq!(ends[0].tcp.peer_addr().unwrap(), peer);
    let flags = rustix::fs::fcntl_getfl(&ends[0].tcp).unwrap();
    assert!(!flags.contains(rustix::fs::OFlags::NONBLOCK));
    assert_eq!(ends[0].send(b"still"), Ok(5));
    assert_eq!(ends[1].receive(5), Ok(b"still".to_vec()));
}
