//! Event channels: events that wait, move and are dropped.

use super::*;

/// `crates/cm/src/channel.rs` tests that this costs no walk over the others.
#[test]
fn ids_with_events_waiting_are_destroyed_and_the_rest_is_delivered() {
    let cm = cm(Timeouts::default());
    let channel = channel();
    let ids: Vec<_> = (0..2000).map(|_| Id::new(&cm, &channel)).collect();
    for id in &ids {
        id.post(EventKind::User(1), 0).unwrap();
    }
    for id in ids.iter().skip(1) {
        id.destroy();
    }
    let event = next(&channel);
    assert!(Arc::ptr_eq(&event.id, &ids[0]));
    event.acknowledge();
    assert!(channel.is_empty());
    ids[0].destroy();
}

#[test]
fn destroy_waits_for_acknowledgement() {
    let cm = cm(Timeouts::default());
    let channel = channel();
    let id = Id::new(&cm, &channel);
    id.resolve_address(None, local(7)).unwrap();
    let event = expect(&channel, EventKind::AddressResolved);
    let (done, waiting) = std::sync::mpsc::channel();
    let destroyer = std::thread::spawn({
        let id = Arc::clone(&id);
        move || {
            id.destroy();
            done.send(()).unwrap();
        }
    });
    while id.state() != State::Destroyed {
        std::thread::yield_now();
    }
    assert!(waiting.try_recv().is_err(), "the event is not acknowledged yet");
    event.acknowledge();
    waiting.recv_timeout(PATIENCE).unwrap();
    destroyer.join().unwrap();
}

#[test]
fn migrating_takes_queued_events_along() {
    let cm = cm(Timeouts::default());
    let (from, to) = (channel(), channel());
    let other = Id::new(&cm, &from);
    let id = Id::new(&cm, &from);
    other.resolve_address(None, local(7)).unwrap();
    id.resolve_address(None, local(7)).unwrap();
    id.resolve_route().unwrap();
    id.migrate(&to).unwrap();
    expect(&to, EventKind::AddressResolved).acknowledge();
    expect(&to, EventKind::RouteResolved).acknowledge();
    let left = expect(&from, EventKind::AddressResolved);
    assert!(Arc::ptr_eq(&left.id, &other));
    left.acknowledge();
    assert!(from.is_empty());
}

/// Its events went to the channel that the listener had when the request came.
#[test]
fn a_request_that_moves_with_its_listener_is_answered_on_the_new_channel() {
    let cm = cm(Timeouts::default());
    let (from, to, client) = (channel(), channel(), channel());
    let listener = listening(&cm, &from, local(0), 0);
    let active = resolved(&cm, &client, listener.local_address().unwrap());
    let active_qp = qp();
    active.connect(&active_qp, ConnParam::DEFAULT, b"").unwrap();
    let start = Instant::now();
    while from.is_empty() {
        assert!(start.elapsed() < PATIENCE, "no request");
        std::thread::yield_now();
    }
    listener.migrate(&to).unwrap();
    let passive = requested(&to);
    let passive_qp = qp();
    passive.accept(&passive_qp, None, b"").unwrap();
    expect(&client, EventKind::Established).acknowledge();
    expect(&to, EventKind::Established).acknowledge();
    assert!(from.is_empty());
    [active, passive, listener].iter().for_each(|id| id.destroy());
}

#[test]
fn non_blocking_channels_do_not_block() {
    let channel = channel();
    // SAFETY: the channel outlives the borrow.
    let fd = unsafe { BorrowedFd::borrow_raw(channel.fd()) };
    let flags = rustix::fs::fcntl_getfl(fd).unwrap();
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    assert_eq!(channel.get().unwrap_err(), GetError::WouldBlock);
}

#[test]
fn a_thread_that_blocks_on_the_channel_hears_of_both_ends() {
    let cm = cm(Timeouts::default());
    let channel = channel();
    let listener = listening(&cm, &channel, local(0), 0);
    let at = listener.local_address().unwrap();
    let thread = std::thread::spawn({
        let channel = Arc::clone(&channel);
        move || {
            let mut seen = Vec::new();
            let mut kept = Vec::new();
            while seen.iter().filter(|kind| **kind == EventKind::Disconnected).count() < 2 {
                let event = channel.get().unwrap();
                seen.push(event.kind);
                let (id, kind) = (Arc::clone(&event.id), event.kind);
                event.acknowledge();
                match kind {
                    EventKind::ConnectRequest => {
                        let qp = qp();
                        id.accept(&qp, None, b"").unwrap();
                        // An id that nobody has reports nothing.
                        kept.push((id, qp));
                    }
                    EventKind::Established if seen.iter().filter(|k| **k == kind).count() == 2 => {
                        id.disconnect().unwrap();
                    }
                    _ => {}
                }
            }
            seen.len()
        }
    });
    let active = Id::new(&cm, &channel);
    active.resolve_address(None, at).unwrap();
    active.resolve_route().unwrap();
    active.connect(&qp(), ConnParam::DEFAULT, b"").unwrap();
    assert_eq!(thread.join().unwrap(), 7);
}
