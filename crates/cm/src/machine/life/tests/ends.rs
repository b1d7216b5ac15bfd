//! Two ends: a listener, the ids of its requests, and ids that connect, over bytes that the test carries.

use super::*;

const UDP: u16 = 0x0111;

fn listening() -> Shell {
    let mut shell = Shell::new(true);
    shell.call(|life, _| life.bind(here(5))).unwrap();
    shell.call(|life, _| life.listen(4, Budget::new(64))).unwrap();
    assert_eq!(shell.did(), "listen, ok");
    shell
}

/// The listener gets a connection, and the request that was sent on it; it becomes an id.
fn passive(listener: &mut Shell, request: &[u8]) -> Shell {
    listener.arrives = true;
    listener.input(Input::Waiting);
    listener.hear(request);
    assert!(listener.did().ends_with("request"));
    let NewId { life, conn, event } = listener.new.pop().unwrap();
    let conn = conn.unwrap();
    assert_eq!(event.kind, EventKind::ConnectRequest);
    // The connection moves, under its name.
    let mut shell = Shell::of(life);
    assert!(listener.open.remove(&conn));
    shell.open.insert(conn);
    assert_eq!(listener.life.want(conn), Want::Nothing);
    listener.input(Input::Delivered);
    shell
}

#[test]
fn ends_meet() {
    let mut listener = listening();
    let mut active = Shell::connecting(true, ours(b"question"));
    let request = active.wire.values().next().unwrap().clone();
    let mut passive = passive(&mut listener, &request);
    assert_eq!((passive.life.local(), passive.life.peer()), (Some(here(5)), Some(THERE)));
    let conn = *passive.open.first().unwrap();
    listener.life.answered(&listener.clock.now(), conn);
    passive.call(|life, now| life.accept(now, ours(b"answer"), None)).unwrap();
    assert_eq!(passive.did(), "send, attach, ok");
    let reply = passive.wire.values().next().unwrap().clone();
    active.hear(&reply);
    assert_eq!(active.did(), "attach");
    for end in [&mut active, &mut passive] {
        end.stream(StreamEvent::Established);
    }
    assert_eq!((active.did(), passive.did()), ("Established 0".into(), "Established 0, settled".into()));
    assert_eq!(active.private_data(), b"answer");
    assert_eq!((active.life.peer_param().qp_num, passive.life.peer_param().qp_num), (QPN, QPN));
    for shell in [active, passive, listener] {
        shell.destroyed();
    }
}

/// A peer connects again as soon as it has the reply.
#[test]
fn a_request_waits_for_the_connection_that_caused_it() {
    for settles in [true, false] {
        let mut listener = listening();
        let active = Shell::connecting(true, ours(b""));
        let request = active.wire.values().next().unwrap().clone();
        let first = passive(&mut listener, &request);
        let conn = *first.open.first().unwrap();
        listener.life.answered(&listener.clock.now(), conn);
        listener.clock.pass_ms(1);
        listener.arrives = true;
        listener.input(Input::Waiting);
        listener.hear(&request);
        listener.pass(Duration::from_millis(20));
        assert!(listener.new.is_empty());
        if settles {
            listener.input(Input::Settled(conn));
        } else {
            listener.pass(Duration::from_millis(200));
        }
        assert_eq!(listener.new.len(), 1);
        // The machine of the second request is dropped here, as the shell does when it destroys the event.
        listener.open.clear();
        listener.destroyed();
    }
}

#[test]
fn a_listener_that_is_destroyed_closes_what_it_has() {
    let mut listener = listening();
    listener.arrives = true;
    listener.input(Input::Waiting);
    assert_eq!((listener.did(), listener.open.len()), ("accept, accept".into(), 1));
    listener.destroyed();
    // A request that was not reported yet is rejected.
    let mut listener = listening();
    listener.arrives = true;
    listener.input(Input::Waiting);
    let active = Shell::connecting(true, ours(b""));
    let request = active.wire.values().next().unwrap();
    let conn = *listener.open.first().unwrap();
    let mut rest = &request[..];
    while let Want::Bytes(want) = listener.life.want(conn) {
        let (bytes, after) = rest.split_at(want);
        rest = after;
        listener.life.handle_input(&listener.clock.now(), Input::Bytes { conn, bytes });
    }
    listener.did();
    listener.life.destroy(&listener.clock.now());
    listener.run();
    assert_eq!(listener.did(), "send, close");
    listener.destroyed();
}

/// Accepted in the moment when the listener was destroyed.
#[test]
fn a_connection_that_comes_too_late_is_closed() {
    let mut shell = listening();
    shell.life.destroy(&shell.clock.now());
    let conn = Space::new(1).name();
    shell.open.insert(conn);
    shell.input(Input::Accepted { conn, ends: Ends { local: here(5), peer: THERE } });
    assert_eq!(shell.did(), "close");
    shell.destroyed();
}

fn serving() -> Shell {
    let mut shell = Shell::of(Life::of_datagrams(rules(true), UDP));
    shell.call(|life, _| life.bind(here(5))).unwrap();
    assert!(shell.call(|life, _| life.listen(4, Budget::new(4))).is_err());
    shell.call(|life, now| life.serve(now, &[7; 16], 4)).unwrap();
    assert_eq!((shell.did(), shell.life.socket()), ("listen, ok".into(), Socket::Serving));
    shell
}

fn asking(private_data: &[u8]) -> Shell {
    let mut shell = Shell::of(Life::of_datagrams(rules(true), UDP));
    shell.call(|life, _| life.resolve_address(THERE, Ok(here(0).ip()))).unwrap();
    shell.call(|life, _| life.resolve_route()).unwrap();
    shell.did();
    assert!(shell.call(|life, now| life.look_up(now, 9, &[0; 256])).is_err(), "too much");
    shell.call(|life, now| life.look_up(now, 9, private_data)).unwrap();
    assert_eq!((shell.did(), shell.life.socket()), ("datagram".into(), Socket::Asking));
    assert_eq!(shell.life.state(), State::Connecting);
    shell
}

/// The lookup arrives at the server; it becomes an id.
fn looked_up(server: &mut Shell, client: &mut Shell) -> Shell {
    let bytes = client.datagrams.pop().unwrap();
    server.input(Input::Datagram { from: here(99), to: here(0).ip(), bytes: &bytes });
    assert_eq!(server.did(), "request");
    let NewId { life, conn, event } = server.new.pop().unwrap();
    assert_eq!((event.kind, conn), (EventKind::ConnectRequest, None));
    let datagram = event.datagram.unwrap();
    assert_eq!((datagram.local, datagram.peer), (here(5), here(99)));
    Shell::of(life)
}

fn carry_reply(passive: &mut Shell, server: &mut Shell, client: &mut Shell) {
    let reply = passive.replies.pop().unwrap();
    server.life.reply(&reply);
    server.run();
    let bytes = server.datagrams.pop().unwrap();
    client.input(Input::Datagram { from: THERE, to: here(0).ip(), bytes: &bytes });
}

#[test]
fn a_lookup_finds_a_queue_pair() {
    let (mut server, mut client) = (serving(), asking(b"question"));
    let mut passive = looked_up(&mut server, &mut client);
    assert_eq!(passive.call(|life, _| life.answer(1, 2, &[0; 137])), Err(TOO_MUCH_DATA));
    assert_eq!(passive.call(|life, now| life.reject(now, &[0; 137])), Err(TOO_MUCH_DATA));
    passive.call(|life, _| life.answer(1, 2, b"answer")).unwrap();
    assert_eq!((passive.did(), passive.life.state()), ("reply".into(), State::Established));
    assert!(passive.call(|life, _| life.answer(1, 2, b"")).is_err(), "once");
    carry_reply(&mut passive, &mut server, &mut client);
    assert_eq!((client.did(), client.life.state()), ("Established 0".into(), State::Established));
    let event = client.event.clone().unwrap();
    let datagram = event.datagram.unwrap();
    assert_eq!((datagram.qpn, datagram.qkey, datagram.peer), (1, 2, THERE));
    assert_eq!((&event.private_data[..], client.life.socket()), (&b"answer"[..], Socket::Quiet));
    client.call(|life, now| life.disconnect(now)).unwrap();
    client.life.queue_pair_destroyed(&client.clock.now());
    assert_eq!((client.did(), client.life.state()), (String::new(), State::Established), "no stream to end");
    for shell in [client, server, passive] {
        shell.destroyed();
    }
}

#[test]
fn a_lookup_that_is_refused_makes_the_peer_unreachable() {
    for destroy in [false, true] {
        let (mut server, mut client) = (serving(), asking(b""));
        let mut passive = looked_up(&mut server, &mut client);
        passive
            .call(|life, now| if destroy { Ok(life.destroy(now)) } else { life.reject(now, b"no") })
            .unwrap();
        assert_eq!(passive.did(), "reply");
        carry_reply(&mut passive, &mut server, &mut client);
        assert_eq!((client.did(), client.life.state()), ("Unreachable 2".into(), State::Closed));
        assert_eq!(client.private_data(), if destroy { &b""[..] } else { b"no" });
        for shell in [client, server, passive] {
            shell.destroyed();
        }
    }
}

#[test]
fn a_port_without_a_listener_and_one_that_is_silent_are_told_apart() {
    let mut absent = asking(b"");
    absent.pass(Duration::from_millis(400));
    absent.did();
    absent.input(Input::NoListener);
    assert_eq!(absent.did(), format!("Unreachable {}", -raw(Errno::CONNREFUSED)));
    let mut silent = asking(b"");
    silent.pass(Timeouts::default().reply);
    assert!(silent.did().ends_with(&format!("Unreachable {}", -raw(Errno::TIMEDOUT))));
    let mut given_up = asking(b"");
    given_up.call(|life, now| life.disconnect(now)).unwrap();
    assert_eq!(given_up.did(), format!("ConnectError {}", -raw(Errno::CONNABORTED)));
    for shell in [absent, silent, given_up, asking(b""), serving()] {
        shell.destroyed();
    }
}

#[test]
fn a_group_is_joined_at_once() {
    let mut shell = serving();
    let group: SocketAddr = "239.1.2.3:0".parse().unwrap();
    shell.call(|life, _| life.join(group, 77)).unwrap();
    assert_eq!(shell.did(), "MulticastJoin 0");
    let datagram = shell.event.clone().unwrap().datagram.unwrap();
    assert_eq!((datagram.peer, datagram.local, datagram.context), (group, here(5), 77));
    assert!(Shell::new(true).call(|life, _| life.join(group, 0)).is_err());
    shell.life.destroy(&shell.clock.now());
    assert!(shell.call(|life, _| life.join(group, 0)).is_err());
    assert!(shell.call(|life, _| life.post(EventKind::User(1), 0)).is_err());
    shell.destroyed();
}
