use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::net::sockopt::tcp_nodelay;

use super::*;
use crate::carrier::send_frame;

const HERE: std::net::IpAddr = std::net::IpAddr::V4(Ipv4Addr::LOCALHOST);

fn bind_to(address: SocketAddr, port: TakePort) -> Result<Box<dyn Bound>, Errno> {
    Tcp.bind(&Bind { address, port, options: Options::default() })
}

fn bind(port: u16, take: TakePort) -> Box<dyn Bound> {
    bind_to(SocketAddr::new(HERE, port), take).expect("a port")
}

fn connect(to: SocketAddr) -> Box<dyn SetUp> {
    bind(0, TakePort::AtConnect).connect(to).map_err(|(why, _)| why).expect("a connection")
}

fn listen(bound: Box<dyn Bound>) -> Box<dyn Listening> {
    bound.listen(16).map_err(|(errno, _)| errno).expect("it listens")
}

fn accept(listening: &dyn Listening) -> Box<dyn SetUp> {
    loop {
        if let Some(accepted) = listening.accept().expect("accept") {
            return accepted;
        }
    }
}

fn received(connection: &dyn SetUp) -> Result<Vec<u8>, Refusal> {
    let mut bytes = [0; 16];
    loop {
        match connection.receive(&mut bytes)? {
            Got::Bytes(count) => return Ok(bytes[..count].to_vec()),
            Got::Nothing => std::thread::yield_now(),
            Got::End => return Ok(vec![]),
        }
    }
}

/// A free port of which a connection of an earlier run is left, in TIME_WAIT.
fn port_of_an_earlier_run() -> u16 {
    let bound = bind(0, TakePort::Now);
    let address = bound.local();
    let listening = listen(bound);
    let client = connect(address);
    accept(&*listening).close(Close::Finish);
    assert_eq!(received(&*client), Ok(vec![]));
    drop(client);
    address.port()
}

/// Another program's attempts at a port: what it can bind, and whether it can listen then.
fn attacks(port: u16) -> Vec<(SocketAddr, bool, Result<(), Errno>)> {
    let mut got = Vec::new();
    let wildcard = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    for address in [SocketAddr::new(HERE, port), wildcard] {
        for reuse in [false, true] {
            let fd = net::socket(net::AddressFamily::INET, SocketType::STREAM, None).unwrap();
            set_socket_reuseaddr(&fd, reuse).unwrap();
            if net::bind(&fd, &address).is_ok() {
                got.push((address, reuse, net::listen(&fd, 1)));
            }
        }
    }
    got
}

/// With Nagle's algorithm a second small message waited for the peer's delayed acknowledgement, 40 ms.
#[test]
fn both_ends_of_a_connection_send_at_once() {
    let bound = bind(0, TakePort::Now);
    let address = bound.local();
    let listening = listen(bound);
    let connecting = connect(address);
    for end in [accept(&*listening), connecting] {
        assert!(tcp_nodelay(end.into_link().into_descriptor().unwrap().take()).unwrap());
    }
}

#[test]
fn both_ends_know_both_addresses_and_carry_bytes_until_one_ends() {
    let bound = bind_to(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)), TakePort::Now).unwrap();
    let address = SocketAddr::new(HERE, bound.local().port());
    let listening = listen(bound);
    assert!(listening.accept().unwrap().is_none(), "none waits");
    let connecting = connect(address);
    let accepted = accept(&*listening);
    let ends = connecting.ends();
    assert_eq!(ends.peer, address);
    assert_eq!(accepted.ends(), Ends { local: ends.peer, peer: ends.local });
    send_frame(&*connecting, b"request").unwrap();
    assert_eq!(received(&*accepted), Ok(b"request".to_vec()));
    assert_eq!(connecting.receive(&mut [0; 4]), Ok(Got::Nothing));
    connecting.close(Close::Reset);
    assert_eq!(received(&*accepted), Err(Refusal::Gone));
    assert!(accepted.ended());
}

#[test]
fn an_error_of_set_up_keeps_its_errno() {
    for (errno, why) in [
        (Errno::CONNREFUSED, Refusal::Refused),
        (Errno::CONNRESET, Refusal::Gone),
        (Errno::TIMEDOUT, Refusal::Unreachable(Errno::TIMEDOUT)),
        (Errno::HOSTUNREACH, Refusal::Unreachable(Errno::HOSTUNREACH)),
        (Errno::NETUNREACH, Refusal::Unreachable(Errno::NETUNREACH)),
        (Errno::ADDRNOTAVAIL, Refusal::Local(Errno::ADDRNOTAVAIL)),
        (Errno::NOBUFS, Refusal::Local(Errno::NOBUFS)),
    ] {
        assert_eq!((Refusal::from_errno(errno), why.errno()), (why, errno));
    }
    assert_eq!(Refusal::from_errno(Errno::PIPE), Refusal::Gone);
}

/// The socket was gone with the attempt, and its port with it.
#[test]
fn what_is_refused_comes_back_with_its_port() {
    let shared = Options { reuseaddr: true, ..Options::default() };
    let at = |port| Bind { address: SocketAddr::new(HERE, port), port: TakePort::Now, options: shared };
    let first = Tcp.bind(&at(0)).unwrap();
    let address = first.local();
    let second = Tcp.bind(&at(address.port())).unwrap();
    let first = listen(first);
    let (errno, second) = second.listen(1).err().expect("another one listens");
    assert_eq!((errno, second.local()), (Errno::ADDRNOTAVAIL, address), "loopback is any address");
    drop(first);
    drop(listen(second));

    let bound = bind(0, TakePort::Now);
    let local = bound.local();
    let broadcast = SocketAddr::from((Ipv4Addr::BROADCAST, 9));
    let (why, bound) = bound.connect(broadcast).err().expect("TCP has no broadcasts");
    assert_eq!((matches!(why, Refusal::Local(_) | Refusal::Unreachable(_)), bound.local()), (true, local));
    let there = listen(bind(0, TakePort::Now));
    let Watch::Descriptor(fd) = there.watch() else { panic!("a socket") };
    let to = SocketAddr::try_from(net::getsockname(fd).unwrap()).unwrap();
    let connecting = bound.connect(to).map_err(|(why, _)| why).unwrap();
    assert_eq!(accept(&*there).ends().peer, local);
    assert_eq!(connecting.ends().local, local);
}

#[test]
fn a_port_of_an_earlier_run_is_taken_only_by_those_that_want_it() {
    let port = port_of_an_earlier_run();
    let address = SocketAddr::new(HERE, port);
    assert_eq!(bind_to(address, TakePort::NowIfUnused).err(), Some(Errno::ADDRNOTAVAIL));
    let bound = bind(port, TakePort::Now);
    assert_eq!(attacks(port), [], "bound");
    let listening = listen(bound);
    assert_eq!(attacks(port), [], "listening");
    let client = connect(address);
    let _accepted = accept(&*listening);
    assert_eq!(client.ends().peer, address);
}

#[test]
fn nobody_can_bind_beside_a_port_that_waits_to_listen() {
    let bound = bind(0, TakePort::Now);
    let port = bound.local().port();
    assert_eq!(attacks(port), []);
    let listening = listen(bound);
    assert_eq!(attacks(port), []);
    drop(listening);
}

/// `SO_REUSEADDR` was set just before the socket listened: in between any user could bind the port and listen
/// on it, and got the connections.
#[test]
fn nobody_gets_a_port_in_the_moment_in_which_its_owner_begins_to_listen() {
    const ROUNDS: usize = 20_000;
    let port = bind(0, TakePort::Now).local().port();
    let (over, got) = (AtomicBool::new(false), AtomicUsize::new(0));
    let address = SocketAddr::new(HERE, port);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let fd = net::socket(net::AddressFamily::INET, SocketType::STREAM, None).unwrap();
                set_socket_reuseaddr(&fd, true).unwrap();
                // One that is bound already, before the owner comes, is the system's usual case of a port in
                // use.
                if net::bind(&fd, &address).is_ok() && net::listen(&fd, 1).is_ok() {
                    got.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        let mut lost = 0;
        for _ in 0..ROUNDS {
            let bound = loop {
                match bind_to(address, TakePort::NowIfUnused) {
                    Ok(bound) => break bound,
                    Err(_) => std::thread::yield_now(),
                }
            };
            if bound.listen(1).is_err() {
                lost += 1;
            }
        }
        over.store(true, Ordering::Relaxed);
        assert_eq!(lost, 0, "of {ROUNDS}");
    });
}
