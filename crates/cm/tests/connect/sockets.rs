//! What the sockets below have to do with it: families, ports, type of service, and listeners that are not
//! answering.

use rustix::io::Errno;
use rustix::net::sockopt::{ip_tos, ipv6_tclass};
use uwarp_llp::route;

use super::*;

#[test]
fn wildcards_take_both_families_unless_told_otherwise() {
    let cm = cm(Timeouts::default());
    let (server, client) = (channel(), channel());
    let both = Id::new(&cm, &server);
    both.set_options(|_, options| {
        options.afonly = Some(false);
        Ok(())
    })
    .unwrap();
    both.bind("[::]:0".parse().unwrap()).unwrap();
    both.listen(1).unwrap();
    let port = both.local_address().unwrap().port();
    let active = resolved(&cm, &client, local(port));
    active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    let passive = requested(&server);

    let only = Id::new(&cm, &server);
    only.set_options(|_, options| {
        options.afonly = Some(true);
        Ok(())
    })
    .unwrap();
    only.bind("[::]:0".parse().unwrap()).unwrap();
    only.listen(1).unwrap();
    let refused = resolved(&cm, &client, local(only.local_address().unwrap().port()));
    refused.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    expect(&client, EventKind::Rejected).acknowledge();
    for id in [both, only, active, passive, refused] {
        id.destroy();
    }
}

#[test]
fn a_port_has_one_owner_and_survives_its_connections() {
    let cm = cm(Timeouts::default());
    let (server, client) = (channel(), channel());
    // Loopback is any address to rdma_cm.
    let in_use = CmError::System(rustix::io::Errno::ADDRNOTAVAIL);
    let bound = Id::new(&cm, &server);
    bound.bind(local(0)).unwrap();
    let at = bound.local_address().unwrap();
    assert_eq!(Id::new(&cm, &server).bind(at), Err(in_use), "bound by another id, which does not listen");
    assert_eq!(Id::new(&cm, &server).bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, at.port()))), Err(in_use));
    assert!(TcpListener::bind(at).is_err(), "an ordinary program cannot have it either");
    bound.listen(0).unwrap();
    assert_eq!(Id::new(&cm, &server).bind(at), Err(in_use));

    let active = resolved(&cm, &client, at);
    active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    let passive = requested(&server);
    passive.accept(&qp(), None, b"").unwrap();
    expect(&client, EventKind::Established).acknowledge();
    expect(&server, EventKind::Established).acknowledge();
    // The server ends it, so TIME_WAIT is on its side.
    passive.disconnect().unwrap();
    expect(&server, EventKind::Disconnected).acknowledge();
    expect(&client, EventKind::Disconnected).acknowledge();
    for id in [bound, active, passive] {
        id.destroy();
    }
    Id::new(&cm, &server).bind(at).unwrap();
}

#[test]
fn shared_ports_are_shared_by_those_who_say_so() {
    let cm = cm(Timeouts::default());
    let server = channel();
    let share = || {
        let id = Id::new(&cm, &server);
        id.set_options(|_, options| {
            options.reuseaddr = true;
            Ok(())
        })
        .unwrap();
        id
    };
    let first = share();
    first.bind(local(0)).unwrap();
    let at = first.local_address().unwrap();
    let second = share();
    second.bind(at).unwrap();
    assert!(Id::new(&cm, &server).bind(at).is_err(), "one that does not say so is no part of it");
    assert!(first.listen(0).is_err(), "none listens while the other is bound");
    second.destroy();
    first.listen(0).unwrap();
    assert!(share().bind(at).is_err(), "a listener shares no more");
}

/// The socket of this process that is at `here` and connected with `there`.
fn socket_at(here: SocketAddr, there: SocketAddr) -> BorrowedFd<'static> {
    let ours = std::fs::read_dir("/proc/self/fd").unwrap();
    ours.filter_map(|entry| entry.unwrap().file_name().into_string().ok()?.parse().ok())
        // SAFETY: its owner keeps it until the test is over; for a number that is nobody's any more the calls
        // fail.
        .map(|number| unsafe { BorrowedFd::borrow_raw(number) })
        .find(|fd| route::addresses(*fd) == [Some(here), Some(there)])
        .expect("our socket")
}

fn type_of_service(fd: BorrowedFd<'_>) -> u8 {
    match route::addresses(fd)[0].unwrap() {
        SocketAddr::V4(_) => ip_tos(fd).unwrap(),
        SocketAddr::V6(_) => ipv6_tclass(fd).unwrap().try_into().unwrap(),
    }
}

fn set_tos(id: &Id, tos: u8) {
    id.set_options(|_, options| {
        options.tos = Some(tos);
        Ok(())
    })
    .unwrap();
}

/// For connections that are made and for those that a listener takes; the latter may still be changed before
/// they are accepted.
#[test]
fn connections_carry_the_type_of_service_that_was_set() {
    let cm = cm(Timeouts::default());
    let (server, client) = (channel(), channel());
    for address in [local(0), "[::1]:0".parse().unwrap()] {
        let ordinary = TcpListener::bind(address).unwrap();
        let at = ordinary.local_addr().unwrap();
        let active = resolved(&cm, &client, at);
        set_tos(&active, 0x28);
        active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
        let (_accepted, from) = ordinary.accept().unwrap();
        assert_eq!(type_of_service(socket_at(from, at)), 0x28, "{address}");
        active.destroy();

        let listener = Id::new(&cm, &server);
        set_tos(&listener, 0x48);
        listener.bind(address).unwrap();
        listener.listen(0).unwrap();
        let at = listener.local_address().unwrap();
        let active = resolved(&cm, &client, at);
        active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
        let passive = requested(&server);
        let taken = socket_at(at, active.local_address().unwrap());
        assert_eq!(type_of_service(taken), 0x48, "{address}");
        set_tos(&passive, 0x10);
        assert_eq!(type_of_service(taken), 0x10, "{address}");
        for id in [listener, passive, active] {
            id.destroy();
        }
    }
}

/// If a listener's backlog is full, the system does not answer a SYN, like a host that does not exist.
#[test]
fn a_peer_whose_tcp_does_not_answer_is_unreachable() {
    let short = Duration::from_millis(150);
    let cm = cm(Timeouts { connect: short, ..Timeouts::default() });
    let client = channel();
    let full = TcpListener::bind(local(0)).unwrap();
    rustix::net::listen(&full, 0).unwrap();
    let at = full.local_addr().unwrap();
    let connects = || TcpStream::connect_timeout(&at, short);
    let kept: Vec<_> = std::iter::from_fn(|| connects().ok()).take(16).collect();
    assert!(kept.len() < 16, "the backlog does not fill");

    let active = resolved(&cm, &client, at);
    active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    let event = expect(&client, EventKind::Unreachable);
    assert_eq!(event.status, -Errno::TIMEDOUT.raw_os_error());
    event.acknowledge();
    active.destroy();
}
