//! Any bytes for an MPA request or reply, over a real socket, and any decisions of the program. Shared by a
//! test and a fuzz target.
//!
//! The first byte says which end is attacked, how the bytes arrive and how the attacker leaves; the second
//! what the program does. What must hold: the events of each id come in a sensible order, and completely;
//! private data never exceeds rdma_cm's limit; nothing hangs.

#[path = "../common/mod.rs"]
mod common;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use uwarp_cm::{Cm, ConnParam, Event, EventChannel, EventKind, GetError, Id, MAX_PRIVATE_DATA, Timeouts};
use uwarp_driver::Nic;
use uwarp_rnic::qp::QpState;

use common::qp;

/// Only a hang takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

struct World {
    cm: Arc<Cm>,
    channel: Arc<EventChannel>,
    /// Of the library, when it is the server.
    listener: Arc<Id>,
    /// Of the attacker, when it is.
    attacker: TcpListener,
}

static WORLD: LazyLock<World> = LazyLock::new(|| {
    let nic = Nic::open().expect("a device");
    let short = Duration::from_millis(100);
    let cm = Cm::new(&nic, Timeouts { reply: short, request: short, ready: short, ..Timeouts::default() });
    let channel = EventChannel::new(&nic).expect("a channel");
    // Events are looked for, never waited for inside.
    // SAFETY: the channel lives for ever.
    let fd = unsafe { BorrowedFd::borrow_raw(channel.fd()) };
    rustix::io::ioctl_fionbio(fd, true).expect("non-blocking");
    let listener = Id::new(&cm, &channel);
    listener.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("bind");
    listener.listen(0).expect("listen");
    let attacker = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("listen");
    attacker.set_nonblocking(true).expect("non-blocking");
    World { cm, channel, listener, attacker }
});

/// Waits until one of them is readable.
fn wait(fds: &[BorrowedFd<'_>], limit: Duration) -> bool {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    rustix::event::poll(&mut fds, Some(&limit)).is_ok_and(|n| n > 0)
}

fn event(world: &World) -> Option<Event> {
    match world.channel.get() {
        Ok(event) => {
            assert!(event.private_data.len() <= MAX_PRIVATE_DATA, "{event:?}");
            Some(event)
        }
        Err(GetError::WouldBlock) => None,
        Err(error) => panic!("{error:?}"),
    }
}

fn channel_fd(world: &World) -> BorrowedFd<'_> {
    // SAFETY: the channel lives for ever.
    unsafe { BorrowedFd::borrow_raw(world.channel.fd()) }
}

/// Waits for the last event of this id.
fn to_the_end(world: &World, id: &Arc<Id>, mut established: bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        while let Some(event) = event(world) {
            assert!(Arc::ptr_eq(&event.id, id), "another id's {event:?}");
            let kind = event.kind;
            event.acknowledge();
            match kind {
                EventKind::Established => {
                    assert!(!established, "established twice");
                    established = true;
                }
                EventKind::Disconnected => {
                    assert!(established, "disconnected, and never was connected");
                    return;
                }
                EventKind::Rejected | EventKind::Unreachable | EventKind::ConnectError => {
                    assert!(!established, "{kind:?} of an established connection");
                    return;
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(Instant::now() < deadline, "the story of an id does not end: {:?}", id.state());
        wait(&[channel_fd(world)], Duration::from_secs(1));
    }
}

/// Sends in pieces; it does not matter whether the peer takes them.
fn send(mut socket: &TcpStream, bytes: &[u8], piece: usize) {
    for part in bytes.chunks(piece) {
        if socket.write_all(part).is_err() {
            return;
        }
    }
}

fn leave(socket: TcpStream, how: u8) {
    match how % 3 {
        0 => drop(socket),
        1 => {
            let _ = rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::ZERO));
        }
        _ => {
            let _ = socket.shutdown(std::net::Shutdown::Write);
            let _ = socket.set_read_timeout(Some(PATIENCE));
            let mut rest = Vec::new();
            // An end or a reset.
            let _ = (&socket).read_to_end(&mut rest);
        }
    }
}

/// A frame's key in front, unless the attacker wants none.
fn framed(key: &[u8; 16], with_key: bool, rest: &[u8]) -> Vec<u8> {
    let mut out = if with_key { key.to_vec() } else { Vec::new() };
    out.extend(rest);
    out
}

/// Plays what the bytes say.
///
/// # Panics
/// When something is not as it must be.
pub fn check(bytes: &[u8]) {
    let Some(([how, decision], rest)) = bytes.split_first_chunk::<2>() else { return };
    let world = &*WORLD;
    let piece = [usize::MAX, 1, 7, 20][usize::from(how >> 1 & 3)];
    let with_key = how & 8 == 0;
    if how & 1 == 0 {
        attacked_server(world, &framed(b"MPA ID Req Frame", with_key, rest), piece, how >> 4, *decision);
    } else {
        attacked_client(world, &framed(b"MPA ID Rep Frame", with_key, rest), piece, how >> 4, *decision);
    }
    assert!(event(world).is_none(), "an event is left");
}

fn attacked_server(world: &World, bytes: &[u8], piece: usize, how: u8, decision: u8) {
    let at = world.listener.local_address().expect("bound");
    let socket = TcpStream::connect(at).expect("the listener takes connections");
    // Behind the request comes the stream; a part of it may wait until the program has decided.
    let split =
        if decision & 0x80 != 0 { bytes.len() } else { bytes.len().min(24 + usize::from(decision >> 3 & 7)) };
    let (first, second) = bytes.split_at(split);
    send(&socket, first, piece);
    let whole =
        first.len() >= 20 && first.len() - 20 >= usize::from(u16::from_be_bytes([first[18], first[19]]));
    if !whole {
        let _ = socket.shutdown(std::net::Shutdown::Write);
    }
    assert!(wait(&[channel_fd(world), socket.as_fd()], PATIENCE), "neither a request nor an end");
    let Some(request) = event(world) else {
        // Not a request, so that the connection was closed. The event may have been on its way after all.
        leave(socket, how);
        if wait(&[channel_fd(world)], Duration::ZERO) {
            panic!("a request on a connection that was closed: {:?}", event(world));
        }
        return;
    };
    assert_eq!(request.kind, EventKind::ConnectRequest, "{request:?}");
    assert!(whole, "half a request is reported: {request:?}");
    let id = Arc::clone(&request.id);
    request.acknowledge();
    let data = vec![0x44; usize::from(decision >> 4) * 17];
    let queue_pair = qp();
    match decision % 4 {
        0 => {
            let _ = id.reject(&data);
        }
        1 => {}
        n => {
            let param = (n == 2).then_some(ConnParam { responder_resources: decision, ..ConnParam::DEFAULT });
            if id.accept(&queue_pair, param, &data).is_ok() {
                send(&socket, second, piece);
                leave(socket, how);
                to_the_end(world, &id, false);
            } else {
                assert_ne!(queue_pair.query().state, QpState::Rts);
            }
        }
    }
    id.destroy();
    queue_pair.destroy();
}

fn attacked_client(world: &World, bytes: &[u8], piece: usize, how: u8, decision: u8) {
    let id = Id::new(&world.cm, &world.channel);
    id.resolve_address(None, world.attacker.local_addr().expect("bound")).expect("loopback");
    id.resolve_route().expect("loopback");
    for kind in [EventKind::AddressResolved, EventKind::RouteResolved] {
        let event = event(world).expect("reported at once");
        assert_eq!(event.kind, kind);
        event.acknowledge();
    }
    let queue_pair = qp();
    let data = vec![0x55; usize::from(decision)];
    id.connect(&queue_pair, ConnParam::DEFAULT, &data).expect("started");
    let mut attempts = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    let established = loop {
        assert!(Instant::now() < deadline, "connecting does not end");
        wait(&[channel_fd(world), world.attacker.as_fd()], Duration::from_secs(1));
        if let Ok((socket, _)) = world.attacker.accept() {
            // Three ways to ask, and the first of them once more after an end without a word.
            assert!(attempts.len() < 4, "a fifth attempt");
            let _ = socket.set_nonblocking(false);
            send(&socket, bytes, piece);
            if decision & 1 == 0 {
                let _ = socket.shutdown(std::net::Shutdown::Write);
            }
            attempts.push(socket);
        }
        if let Some(event) = event(world) {
            let kind = event.kind;
            event.acknowledge();
            break kind == EventKind::Established;
        }
    };
    if decision & 2 != 0 && established {
        id.disconnect().expect("established");
    }
    for socket in attempts {
        leave(socket, how);
    }
    if established {
        to_the_end(world, &id, true);
    }
    id.destroy();
    queue_pair.destroy();
}
