//! Datagrams of the agreement: sent and received, on this host and between hosts. What is not the other
//! end's, or not made with the key, ends here.

use std::ffi::c_int;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use uwarp_preload::rules::Key;

use super::conn::Conn;
use super::machine::{Action, Role};
use super::service::{KINDS, LINK, act, reschedule, service};
use super::side::Heard;
use super::wire::{Datagram, Kind};
use super::{kernel, table};
use crate::{address, sys};

/// Datagrams and errors that are received before another socket's turn.
const TURN: usize = 256;

/// What a datagram that could not be delivered means.
pub fn send(conn: &Conn, datagram: &Datagram) -> Vec<Action> {
    if !conn.is_near {
        send_by_udp(conn, datagram);
        return Vec::new();
    }
    let heard = conn.has_heard();
    let sent = send_aside(conn, datagram);
    conn.agreement.lock().name_is_foreign(sent == Err(libc::EACCES));
    match sent {
        Ok(true) => Vec::new(),
        Ok(false) => conn.agreement.lock().unlinked(heard),
        Err(libc::ECONNREFUSED) => conn.agreement.lock().refused(heard),
        // The other end is busy with strangers, or there is no descriptor: as if it were lost.
        Err(_) => Vec::new(),
    }
}

/// To an end on this host. False: its link has ended.
fn send_aside(conn: &Conn, datagram: &Datagram) -> Result<bool, c_int> {
    let Some(epoll) = service().as_ref().map(|service| service.epoll) else { return Ok(true) };
    let shows = matches!(datagram.kind, Kind::Hello | Kind::Welcome);
    if shows && conn.side.lock().has_said(datagram) {
        return Ok(true);
    }
    let shown = if shows { table::path_of(conn) } else { None };
    let mut side = conn.side.lock();
    let linked = match datagram.kind {
        Kind::Hello if !side.is_linked() => {
            side.connect(&datagram.ends, epoll, conn.key as u64 * KINDS + LINK)
        }
        _ => Ok(()),
    };
    let sent = linked.map(|()| side.send(datagram, shown));
    drop(side);
    if let Some(shown) = shown {
        sys::close(shown);
    }
    sent
}

fn send_by_udp(conn: &Conn, datagram: &Datagram) {
    let bytes = datagram.to_bytes(conn.agreement.lock().key());
    let send = || match (conn.speaker.load(Ordering::Acquire), &*conn.udp.lock()) {
        (-1, Some(udp)) => sys::send_now(udp.0, &bytes),
        (-1, None) => Ok(0),
        (speaker, _) => {
            let (to, len) = address::store(datagram.ends.connected);
            sys::send_to_now(speaker, &bytes, &to, len)
        }
    };
    // Refusals of earlier datagrams come here, or when something is received.
    for _ in 0..4 {
        if send() != Err(libc::ECONNREFUSED) {
            return;
        }
    }
}

fn connect_udp(udp: c_int, peer: SocketAddr) -> bool {
    let (storage, len) = address::store(peer);
    sys::quietly(|| sys::connect(udp, &storage, len)).is_ok()
}

/// Receives datagrams of an end on this host.
pub fn hear_aside(conn: &Arc<Conn>, epoll: c_int) {
    let (role, ends) = {
        let agreement = conn.agreement.lock();
        (agreement.role(), agreement.ends())
    };
    let (own, peer) = match role {
        Role::Connected => (ends.connected, ends.accepted),
        Role::Accepted => (ends.accepted, ends.connected),
    };
    for _ in 0..TURN {
        // By turns: who connects again and again does not keep the peer's words from being read.
        let (accepted, heard) = {
            let mut side = conn.side.lock();
            let identity = || kernel::mirrored(own, peer);
            let accepted = side.accept(epoll, conn.key as u64 * KINDS + LINK, identity);
            (accepted, side.receive(&ends, identity))
        };
        let actions = match heard {
            None if accepted => continue,
            None => return,
            Some(Heard::Ended) => conn.agreement.lock().unlinked(conn.has_heard()),
            Some(Heard::Datagram(datagram)) if datagram.kind == Kind::Welcome && conn.is_to_answer() => {
                conn.postpone(datagram);
                continue;
            }
            Some(Heard::Datagram(datagram)) => {
                conn.agreement.lock().datagram(&datagram, true, Instant::now())
            }
        };
        if actions.is_empty() { reschedule(conn) } else { act(conn, actions) }
    }
    // What is left is reported again.
}

/// A WELCOME that was kept back for an answer of the program's, which has sent it, or takes too long.
pub fn hear_postponed(conn: &Arc<Conn>) {
    if let Some(datagram) = conn.take_postponed() {
        let actions = conn.agreement.lock().datagram(&datagram, true, Instant::now());
        act(conn, actions);
    }
}

fn parse(bytes: &[u8; Datagram::LEN + 1], len: usize) -> Option<Datagram> {
    bytes.get(..len).and_then(Datagram::parse)
}

fn is_made_with(bytes: &[u8; Datagram::LEN + 1], len: usize, key: Option<&Key>) -> bool {
    bytes.get(..len).is_some_and(|bytes| Datagram::is_made_with(bytes, key))
}

fn address_of(from: &sys::From) -> Option<SocketAddr> {
    // SAFETY: what the call wrote.
    unsafe { address::load((&raw const from.0).cast(), from.1) }.map(address::meant)
}

/// Receives datagrams of a connection that this end has made.
pub fn hear(conn: &Arc<Conn>) {
    for _ in 0..16 {
        let mut bytes = [0; Datagram::LEN + 1];
        let received = {
            let udp = conn.udp.lock();
            let Some(udp) = &*udp else { return };
            sys::receive_from_now(udp.0, &mut bytes)
        };
        let actions = match received {
            Ok((len, from)) => {
                let (Some(from), Some(datagram)) = (address_of(&from), parse(&bytes, len)) else { continue };
                let (ends, made) = {
                    let agreement = conn.agreement.lock();
                    (agreement.ends(), is_made_with(&bytes, len, agreement.key()))
                };
                if from.ip() != ends.accepted.ip().to_canonical() || !datagram.ends.are(&ends) || !made {
                    continue;
                }
                // Answers go there, and refusals of them come here.
                if let Some(udp) = &*conn.udp.lock() {
                    connect_udp(udp.0, from);
                }
                conn.agreement.lock().datagram(&datagram, false, Instant::now())
            }
            Err(libc::ECONNREFUSED) => conn.agreement.lock().refused(conn.has_heard()),
            Err(libc::EINTR) => continue,
            Err(_) => return,
        };
        act(conn, actions);
    }
}

/// Receives datagrams, and refusals of them, of connections that this process has accepted.
pub fn hear_all(speaker: c_int) {
    let find = |datagram: &Datagram| {
        let held = service();
        let service = held.as_ref()?;
        service.find(*service.accepted.get(&datagram.accepted)?)
    };
    let mut bytes = [0; Datagram::LEN + 1];
    for _ in 0..TURN {
        match sys::receive_from_now(speaker, &mut bytes) {
            Ok((len, from)) => {
                let (Some(from), Some(datagram)) = (address_of(&from), parse(&bytes, len)) else { continue };
                let Some(conn) = find(&datagram) else { continue };
                let (peer, made) = {
                    let agreement = conn.agreement.lock();
                    (agreement.ends().connected, is_made_with(&bytes, len, agreement.key()))
                };
                if (from.ip(), from.port()) != (peer.ip().to_canonical(), peer.port()) || !made {
                    continue;
                }
                // As if it were lost: the peer repeats it, and so does this end its HELLO.
                if datagram.kind == Kind::Welcome && conn.is_to_answer() {
                    continue;
                }
                let actions = conn.agreement.lock().datagram(&datagram, false, Instant::now());
                act(&conn, actions);
            }
            Err(libc::EAGAIN) => break,
            // Of a datagram that was sent: it is in the other queue, too.
            Err(_) => {}
        }
    }
    for _ in 0..TURN {
        let Some((len, errno)) = sys::take_error(speaker, &mut bytes) else { break };
        if errno == libc::ECONNREFUSED
            && let Some(conn) = parse(&bytes, len).and_then(|datagram| find(&datagram))
        {
            let actions = conn.agreement.lock().refused(conn.has_heard());
            act(&conn, actions);
        }
    }
}
